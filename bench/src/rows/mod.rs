//! What is measured. Each file has a `specs` function that names its rows; [`all`] puts them in order.

pub mod copy;
pub mod floor;
pub mod map;
pub mod poll;
pub mod ring;
pub mod transfer;
#[cfg(feature = "verbs")]
pub mod verbs;
pub mod wire;

use crate::harness::{Cores, Row};

/// A row that is not built yet, so that what the filter leaves out costs nothing.
pub struct Spec {
    /// Path-like, from the general to the particular; what the filter looks at.
    pub name: String,
    /// How many cores it needs.
    pub cores: usize,
    build: Box<dyn Fn(Row) -> Row>,
    operation: &'static str,
}

impl Spec {
    /// A row of this name whose contenders `build` adds. `operation` is what is counted.
    pub fn new(
        name: impl Into<String>,
        operation: &'static str,
        cores: usize,
        build: impl Fn(Row) -> Row + 'static,
    ) -> Self {
        Self {
            name: name.into(),
            cores,
            build: Box::new(build),
            operation,
        }
    }

    /// The row, ready to be measured.
    #[must_use]
    pub fn build(&self, cores: Cores) -> Row {
        (self.build)(Row::new(self.name.clone(), self.operation, cores))
    }
}

/// Every row there is.
#[must_use]
pub fn all() -> Vec<Spec> {
    [
        floor::specs(),
        ring::specs(),
        wire::specs(),
        copy::specs(),
        map::specs(),
        poll::specs(),
        transfer::specs(),
        #[cfg(feature = "verbs")]
        verbs::specs(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

#[cfg(test)]
mod tests {
    use core::time::Duration;
    use std::collections::BTreeSet;

    use core_affinity::CoreId;

    use super::all;
    use crate::harness::{Cores, Effort, Role};
    use crate::tsc::Calibration;

    /// No figure is looked at; but every contender does its work, on one core or on two.
    #[test]
    fn every_row_runs_and_has_a_rival_or_a_floor() {
        let cores = core_affinity::get_core_ids().unwrap_or_default();
        let near = cores.first().copied().unwrap_or(CoreId { id: 0 });
        let far = cores.last().copied().unwrap_or(near);
        let effort = Effort {
            samples: 1,
            least_samples: 1,
            at_most: Duration::ZERO,
            sample_here: Duration::ZERO,
            sample_across: Duration::ZERO,
            least_batch: 1,
            tries: 1,
        };
        let calibration = Calibration::over(Duration::from_millis(1));
        let mut names = BTreeSet::new();
        for spec in all() {
            assert!(names.insert(spec.name.clone()), "two rows {}", spec.name);
            if near == far && spec.cores > 1 {
                continue;
            }
            let measured = spec
                .build(Cores { near, far })
                .measure(&effort, &calibration);
            assert!(measured.outcomes.len() >= 2, "{}", spec.name);
            assert!(
                measured.outcomes.iter().any(|o| o.role != Role::Ours),
                "{}",
                spec.name
            );
        }
    }
}
