//! Rows, contenders, and the loop that measures them.
//!
//! A **row** is one question ("how long does an object take through a ring, bursts of 32, between
//! cores?"); its **contenders** are ours, the rivals and the floors. They take turns, sample by
//! sample, so that whatever else the machine does meanwhile hits all of them, and only figures of
//! one row are compared. A **sample** is the mean over one batch of at least [`LEAST_BATCH`]
//! operations; the batch is made long enough for the two readings of the counter not to matter.

mod effort;
mod outcome;
mod partner;

use std::time::Instant;

use core_affinity::CoreId;
use crossbeam_utils::CachePadded;

use crate::stats::Ratio;
use crate::tsc::{self, Calibration};

pub use effort::Effort;
pub use outcome::{Bound, Figure, Judged, Measured, Outcome};
pub use partner::Patience;

use outcome::Sample;
use partner::Partner;

/// Least operations per sample.
pub const LEAST_BATCH: u64 = 64;

/// Turns that a paired ratio is taken of at least, if there were so many.
const LEAST_BLOCKS: usize = 30;

/// Operations that move so many bytes need not be [`LEAST_BATCH`] in a sample.
const LONG: u64 = 32 << 10;

/// Does as many operations as it is told, a multiple of the row's granule. `Some`: how many ticks they took,
/// where not all that was done is to be counted.
pub type Batch = Box<dyn FnMut(u64) -> Option<u64> + Send>;

/// Figures of a contender besides its time. Called before the first sample, when what it returns is dropped,
/// and after the last: each call forgets what came before it.
pub type Figures = Box<dyn FnMut() -> Vec<Figure> + Send>;

/// What a contender is in its row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Code of this project. The first of a row is what the others are compared with.
    Ours,
    /// Somebody else's code for the same task.
    Rival,
    /// What the machine takes for the least that must happen.
    Floor,
}

impl Role {
    /// As the table and the JSON say it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ours => "ours",
            Self::Rival => "rival",
            Self::Floor => "floor",
        }
    }
}

/// How a goal's value comes out of the medians of its row.
type Judge = Box<dyn Fn(&Measured) -> Option<f64>>;

/// One way to do a row's operation.
pub struct Contender {
    name: String,
    role: Role,
    here: Batch,
    figures: Option<Figures>,
    partner: Option<Partner>,
}

/// One question and the contenders that answer it.
pub struct Row {
    name: String,
    operation: &'static str,
    granule: u64,
    bytes: u64,
    contenders: Vec<Contender>,
    goals: Vec<(&'static str, Bound, Judge)>,
    cores: Cores,
}

impl Row {
    /// An empty row. `operation` is what is counted, as in "ns per ...".
    #[must_use]
    pub fn new(name: impl Into<String>, operation: &'static str, cores: Cores) -> Self {
        Self {
            name: name.into(),
            operation,
            granule: 1,
            bytes: 0,
            contenders: Vec::new(),
            goals: Vec::new(),
            cores,
        }
    }

    /// Batches are multiples of `granule` operations: the burst size, for one.
    #[must_use]
    pub fn granule(mut self, granule: u64) -> Self {
        self.granule = granule.max(1);
        self
    }

    /// An operation moves so many bytes: the table says GB/s.
    #[must_use]
    pub fn bytes(mut self, bytes: u64) -> Self {
        self.bytes = bytes;
        self
    }

    /// A goal: `value`, from the medians of this row, is to be within `bound`.
    #[must_use]
    pub fn goal(
        mut self,
        text: &'static str,
        bound: Bound,
        value: impl Fn(&Measured) -> Option<f64> + 'static,
    ) -> Self {
        self.goals.push((text, bound, Box::new(value)));
        self
    }

    /// More figures of the contender that was added last.
    #[must_use]
    pub fn figures(mut self, figures: impl FnMut() -> Vec<Figure> + Send + 'static) -> Self {
        if let Some(last) = self.contenders.last_mut() {
            last.figures = Some(Box::new(figures));
        }
        self
    }

    /// Adds a contender that needs the one measuring thread only.
    #[must_use]
    pub fn here(
        self,
        role: Role,
        name: impl Into<String>,
        mut batch: impl FnMut(u64) + Send + 'static,
    ) -> Self {
        self.add(
            role,
            name.into(),
            Box::new(move |n| {
                batch(n);
                None
            }),
            None,
        )
    }

    fn add(mut self, role: Role, name: String, here: Batch, far: Option<Batch>) -> Self {
        let partner = far.map(|far| Partner::start(self.cores.far, far));
        self.contenders.push(Contender {
            name,
            role,
            here,
            figures: None,
            partner,
        });
        self
    }

    /// Adds a contender of two halves: `near` runs on the measuring core and `far` on the other, at
    /// the same time and for the same number of operations. A sample lasts until both are done.
    #[must_use]
    pub fn across(
        self,
        role: Role,
        name: impl Into<String>,
        near: impl FnMut(u64) + Send + 'static,
        far: impl FnMut(u64) + Send + 'static,
    ) -> Self {
        // In lines of their own: what the two halves keep to themselves must not share one.
        let (mut near, mut far) = (CachePadded::new(near), CachePadded::new(far));
        self.add(
            role,
            name.into(),
            Box::new(move |n| {
                (*near)(n);
                None
            }),
            Some(Box::new(move |n| {
                (*far)(n);
                None
            })),
        )
    }

    /// The same, but `near` says how many ticks its operations took: what it does between them, e.g. to
    /// bring the caches into the state that is wanted, does not count.
    #[must_use]
    pub fn across_timed(
        self,
        role: Role,
        name: impl Into<String>,
        near: impl FnMut(u64) -> u64 + Send + 'static,
        far: impl FnMut(u64) + Send + 'static,
    ) -> Self {
        let (mut near, mut far) = (CachePadded::new(near), CachePadded::new(far));
        self.add(
            role,
            name.into(),
            Box::new(move |n| Some((*near)(n))),
            Some(Box::new(move |n| {
                (*far)(n);
                None
            })),
        )
    }

    /// Measures all contenders in turns.
    #[must_use]
    pub fn measure(mut self, effort: &Effort, calibration: &Calibration) -> Measured {
        // The readings of the counter are nothing beside a copy of this length.
        let least = if self.bytes >= LONG {
            1
        } else {
            effort.least_batch
        };
        let batches: Vec<u64> = self
            .contenders
            .iter_mut()
            .map(|contender| contender.batch(self.granule, least, effort, calibration))
            .collect();
        for contender in &mut self.contenders {
            contender.take_figures();
        }
        let mut samples: Vec<Vec<Sample>> = vec![Vec::new(); self.contenders.len()];
        let began = Instant::now();
        for turn in 0..effort.samples {
            // The order rotates: nobody always runs after the same neighbour.
            for place in 0..self.contenders.len() {
                let which = (place + turn) % self.contenders.len();
                samples[which].push(self.contenders[which].sample(batches[which]));
            }
            if began.elapsed() > effort.at_most && turn + 1 >= effort.least_samples {
                break;
            }
        }
        let ours = samples.first().cloned().unwrap_or_default();
        let outcomes = self
            .contenders
            .into_iter()
            .zip(batches)
            .zip(samples)
            .filter_map(|((contender, batch), samples)| {
                let mut outcome = Outcome::of(contender, batch, &samples, calibration)?;
                let blocks = samples.iter().zip(&ours);
                let quiet =
                    |(theirs, ours): &(&Sample, &Sample)| !theirs.preempted && !ours.preempted;
                let keep_all = blocks.clone().filter(quiet).count() < LEAST_BLOCKS;
                let kept = blocks.filter(|block| keep_all || quiet(block));
                outcome.paired = Ratio::of(kept.map(|(theirs, ours)| (theirs.ticks, ours.ticks)));
                Some(outcome)
            })
            .collect();
        let mut measured = Measured {
            name: self.name,
            operation: self.operation,
            bytes: self.bytes,
            outcomes,
            goals: Vec::new(),
            distance: None,
        };
        measured.goals = self
            .goals
            .into_iter()
            .filter_map(|(text, bound, value)| {
                value(&measured).map(|value| Judged { text, bound, value })
            })
            .collect();
        measured
    }
}

impl Contender {
    /// How many operations make a sample of the length wanted. Doubles until it is there, which
    /// warms the caches as well.
    fn batch(
        &mut self,
        granule: u64,
        least: u64,
        effort: &Effort,
        calibration: &Calibration,
    ) -> u64 {
        let wanted = match self.partner {
            None => effort.sample_here,
            Some(_) => effort.sample_across,
        };
        let wanted_ns = wanted.as_secs_f64() * 1e9;
        let mut batch = granule.max(least.next_multiple_of(granule));
        loop {
            let mut best = f64::INFINITY;
            for _ in 0..effort.tries {
                best = best.min(calibration.ns(self.sample(batch).ticks * batch as f64));
                if best >= 4.0 * wanted_ns {
                    // Long enough beyond doubt.
                    return batch;
                }
            }
            if best >= wanted_ns || batch >= 1 << 24 {
                return batch;
            }
            batch *= 2;
        }
    }

    fn take_figures(&mut self) -> Vec<Figure> {
        self.figures.as_mut().map_or_else(Vec::new, |take| take())
    }

    fn sample(&mut self, operations: u64) -> Sample {
        let preempted_before = tsc::preemptions();
        let (ticks, far_preempted) = match &mut self.partner {
            None => {
                let from = tsc::start();
                let own = (self.here)(operations);
                let ticks = tsc::stop().wrapping_sub(from);
                (own.unwrap_or(ticks), false)
            }
            Some(partner) => {
                let running = partner.begin(operations);
                let from = tsc::start();
                let own = (self.here)(operations);
                running.wait();
                let ticks = tsc::stop().wrapping_sub(from);
                (own.unwrap_or(ticks), running.preempted())
            }
        };
        Sample {
            ticks: ticks as f64 / operations as f64,
            preempted: far_preempted || tsc::preemptions() != preempted_before,
        }
    }
}

/// The cores that are measured on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cores {
    /// Where the measuring thread is pinned.
    pub near: CoreId,
    /// Where the partners are pinned.
    pub far: CoreId,
}

#[cfg(test)]
mod tests;
