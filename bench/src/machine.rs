//! What the figures were measured on, and how idle it was.

use std::fs;

use anyhow::{Context as _, Result, bail};
use core_affinity::CoreId;
use serde_json::{Value, json};

use crate::harness::Cores;
use crate::tsc::Calibration;

/// Chooses the cores: those named, or the first two this process may use; and how many it may use.
/// One core is enough for the rows that need one.
///
/// # Errors
/// A core is named that the process may not use, or the kernel names none.
pub fn cores(named: Option<(usize, usize)>) -> Result<(Cores, usize)> {
    let allowed =
        core_affinity::get_core_ids().context("the kernel does not say which cores there are")?;
    let allow = |id: usize| -> Result<CoreId> {
        match allowed.iter().find(|core| core.id == id) {
            Some(core) => Ok(*core),
            None => bail!(
                "core {id} is not among those this process may use; see `taskset -p {}`",
                std::process::id()
            ),
        }
    };
    // Asked before anything is pinned: afterwards the answer is the pinned core.
    let (near, far) = match (named, &allowed[..]) {
        (Some((near, far)), _) => (allow(near)?, allow(far)?),
        (None, [near, far, ..]) => (*near, *far),
        (None, [one]) => (*one, *one),
        (None, []) => bail!("the kernel lets this process use no core"),
    };
    Ok((Cores { near, far }, allowed.len()))
}

/// Processor time of the whole machine, in clock ticks of `/proc/stat`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Load {
    busy: u64,
    stolen: u64,
    total: u64,
}

impl Load {
    /// Since boot. All zero where there is no `/proc/stat`.
    #[must_use]
    pub fn now() -> Self {
        Self::of(&fs::read_to_string("/proc/stat").unwrap_or_default())
    }

    fn of(stat: &str) -> Self {
        // cpu user nice system idle iowait irq softirq steal ...
        let fields: Vec<u64> = stat
            .lines()
            .next()
            .unwrap_or_default()
            .split_whitespace()
            .skip(1)
            .take(8)
            .filter_map(|field| field.parse().ok())
            .collect();
        let total = fields.iter().sum();
        let at = |n: usize| fields.get(n).copied().unwrap_or_default();
        Self {
            busy: total - at(3) - at(4),
            stolen: at(7),
            total,
        }
    }

    /// Shares of busy and of stolen time (the hypervisor ran somebody else) since `earlier`, in percent.
    #[must_use]
    pub fn since(self, earlier: Self) -> (f64, f64) {
        let total = self.total.saturating_sub(earlier.total);
        if total == 0 {
            return (0.0, 0.0);
        }
        let share = |now: u64, then: u64| now.saturating_sub(then) as f64 / total as f64 * 100.0;
        (
            share(self.busy, earlier.busy),
            share(self.stolen, earlier.stolen),
        )
    }
}

/// The machine, as the report's head names it.
#[derive(Clone, Debug)]
pub struct Machine {
    processor: String,
    count: usize,
    cores: Cores,
    calibration: Calibration,
    /// Busy share before anything was measured.
    busy_before: f64,
}

impl Machine {
    /// Describes this machine, of which `count` cores may be used. `idle` is the load over a span in
    /// which nothing was measured.
    #[must_use]
    pub fn describe(
        cores: Cores,
        count: usize,
        calibration: Calibration,
        idle: (f64, f64),
    ) -> Self {
        let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let field = |name: &str| {
            info.lines()
                .find(|line| line.starts_with(name))
                .and_then(|line| line.split_once(':'))
                .map(|(_, value)| value.trim().to_owned())
        };
        Self {
            processor: field("model name").unwrap_or_else(|| std::env::consts::ARCH.to_owned()),
            count,
            cores,
            calibration,
            busy_before: idle.0,
        }
    }

    /// The report's head.
    #[must_use]
    pub fn text(&self) -> String {
        format!(
            "{}, {} cores to use, measured on {} and {}; tsc {:.3} GHz, an empty section takes {} tsc; \
             {:.0} % busy with other things before the first row",
            self.processor,
            self.count,
            self.cores.near.id,
            self.cores.far.id,
            self.calibration.ticks_per_ns,
            self.calibration.empty,
            self.busy_before,
        )
    }

    /// The same for machines.
    #[must_use]
    pub fn json(&self) -> Value {
        json!({
            "processor": self.processor,
            "cores": self.count,
            "measured_on": [self.cores.near.id, self.cores.far.id],
            "tsc_ghz": self.calibration.ticks_per_ns,
            "empty_section_tsc": self.calibration.empty,
            "busy_before_percent": self.busy_before,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::{Load, cores};

    #[test]
    fn load_is_what_changed_between_two_readings() {
        let before = Load::of("cpu  100 0 100 700 100 0 0 0 0 0\ncpu0 1 2 3\n");
        let after = Load::of("cpu  140 0 110 730 110 0 0 10 0 0\n");
        assert_eq!(after.since(before), (60.0, 10.0));
        assert_eq!(before.since(before), (0.0, 0.0));
        assert_eq!(Load::of("").since(Load::of("")), (0.0, 0.0));
    }

    #[test]
    fn a_core_that_is_not_there_is_refused_by_name() {
        let error = cores(Some((0, 9999))).unwrap_err().to_string();
        assert!(error.contains("core 9999"), "{error}");
    }
}
