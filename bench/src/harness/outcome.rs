//! What came of a row: samples and their summary, figures, goals.

use super::{Contender, Role};
use crate::stats::{Ratio, Summary};
use crate::tsc::Calibration;

/// The answer to a row.
#[derive(Clone, Debug)]
pub struct Measured {
    /// The row's name.
    pub name: String,
    /// What is counted.
    pub operation: &'static str,
    /// Bytes that an operation moves, or 0.
    pub bytes: u64,
    /// One per contender, in the row's order.
    pub outcomes: Vec<Outcome>,
    /// The row's goals.
    pub goals: Vec<Judged>,
    /// How far apart the cores were before and after, if the row used two: nanoseconds for one
    /// cache line there and back.
    pub distance: Option<(f64, f64)>,
}

impl Measured {
    /// `outcome`'s median over the first contender's: above 1 it takes longer than ours.
    #[must_use]
    pub fn ratio(&self, outcome: &Outcome) -> f64 {
        let ours = self
            .outcomes
            .first()
            .map_or(f64::NAN, |ours| ours.ticks.p50);
        outcome.ticks.p50 / ours
    }

    /// The median of a contender, in ticks per operation.
    #[must_use]
    pub fn ticks_of(&self, name: &str) -> Option<f64> {
        let outcome = self.outcomes.iter().find(|outcome| outcome.name == name)?;
        Some(outcome.ticks.p50)
    }

    /// The least median of the row's floors, in ticks per operation.
    #[must_use]
    pub fn best_floor(&self) -> Option<f64> {
        self.outcomes
            .iter()
            .filter(|outcome| outcome.role == Role::Floor)
            .map(|outcome| outcome.ticks.p50)
            .min_by(f64::total_cmp)
    }

    /// GB/s of a contender: 10^9 bytes in a second, by the median.
    #[must_use]
    pub fn gigabytes(&self, outcome: &Outcome) -> Option<f64> {
        (self.bytes != 0).then(|| self.bytes as f64 / outcome.ns.p50)
    }
}

/// What one contender of a row did.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The contender's name.
    pub name: String,
    /// What it is in the row.
    pub role: Role,
    /// Operations per sample.
    pub batch: u64,
    /// Samples taken.
    pub samples: usize,
    /// Samples during which the kernel took one of the cores away. They are left out of the
    /// summary, unless more than half of the samples are such.
    pub preempted: usize,
    /// Per operation, in ticks of the counter.
    pub ticks: Summary,
    /// Per operation, in nanoseconds.
    pub ns: Summary,
    /// Its samples over the first contender's, taken in the same turn; those with a core taken away are left out, unless
    /// fewer than 30 would be left.
    pub paired: Option<Ratio>,
    /// Whatever else it tells of itself.
    pub figures: Vec<Figure>,
}

impl Outcome {
    pub(super) fn of(
        mut contender: Contender,
        batch: u64,
        samples: &[Sample],
        calibration: &Calibration,
    ) -> Option<Self> {
        let preempted = samples.iter().filter(|sample| sample.preempted).count();
        let keep_all = preempted * 2 > samples.len();
        let kept = samples
            .iter()
            .filter(|sample| keep_all || !sample.preempted)
            .map(|sample| sample.ticks)
            .collect();
        let ticks = Summary::of(kept)?;
        let figures = contender.take_figures();
        Some(Self {
            figures,
            name: contender.name,
            role: contender.role,
            batch,
            samples: samples.len(),
            preempted,
            ticks,
            ns: ticks.map(|ticks| calibration.ns(ticks)),
            paired: None,
        })
    }

    /// Whether the machine was too busy for the figure to be trusted: one sample in ten was cut.
    #[must_use]
    pub const fn flagged(&self) -> bool {
        self.preempted * 10 > self.samples
    }
}

/// One more figure.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Figure {
    /// What it is, with its unit: `work requests`, `p99 ns`.
    pub name: &'static str,
    /// The figure.
    pub value: f64,
}

/// What a goal demands of its value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Bound {
    /// This or more.
    AtLeast(f64),
    /// This or less.
    AtMost(f64),
}

impl Bound {
    /// Whether the value is within.
    #[must_use]
    pub fn admits(self, value: f64) -> bool {
        match self {
            Self::AtLeast(least) => value >= least,
            Self::AtMost(most) => value <= most,
        }
    }
}

/// A goal, and what became of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Judged {
    /// What is compared with what.
    pub text: &'static str,
    /// What it should be.
    pub bound: Bound,
    /// What it was.
    pub value: f64,
}

impl Judged {
    /// Whether it was reached.
    #[must_use]
    pub fn reached(&self) -> bool {
        self.bound.admits(self.value)
    }
}

/// The mean over one batch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sample {
    /// Per operation.
    pub(super) ticks: f64,
    /// Somebody else had one of the cores meanwhile.
    pub(super) preempted: bool,
}
