//! Rows, contenders, and the loop that measures them.
//!
//! A **row** is one question ("how long does an object take through a ring, bursts of 32, between
//! cores?"); its **contenders** are ours, the rivals and the floors. They take turns, sample by
//! sample, so that whatever else the machine does meanwhile hits all of them, and only figures of
//! one row are compared. A **sample** is the mean over one batch of at least [`LEAST_BATCH`]
//! operations; the batch is made long enough for the two readings of the counter not to matter.

use core::hint;
use core::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use core::time::Duration;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use core_affinity::CoreId;
use crossbeam_utils::CachePadded;

use crate::stats::{Ratio, Summary};
use crate::tsc::{self, Calibration};

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

/// How a goal's value comes out of the medians of its row.
type Judge = Box<dyn Fn(&Measured) -> Option<f64>>;

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

/// The mean over one batch.
#[derive(Clone, Copy, Debug)]
struct Sample {
    /// Per operation.
    ticks: f64,
    /// Somebody else had one of the cores meanwhile.
    preempted: bool,
}

/// How much is measured.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Samples per contender.
    pub samples: usize,
    /// Samples that are taken even when time is up.
    pub least_samples: usize,
    /// Longest time for a row, warming up apart.
    pub at_most: Duration,
    /// Least length of a sample on one core.
    pub sample_here: Duration,
    /// Least length of a sample on two cores.
    pub sample_across: Duration,
    /// Least operations per sample; [`LEAST_BATCH`] for anything that is looked at.
    pub least_batch: u64,
    /// How often each length of a batch is tried before it is found too short.
    pub tries: u32,
}

impl Effort {
    /// For figures that are reported.
    #[must_use]
    pub const fn full() -> Self {
        Self {
            samples: 400,
            least_samples: 40,
            at_most: Duration::from_secs(4),
            sample_here: Duration::from_micros(20),
            sample_across: Duration::from_micros(200),
            least_batch: LEAST_BATCH,
            tries: 5,
        }
    }

    /// For a look: a fraction of a second per row.
    #[must_use]
    pub const fn quick() -> Self {
        Self {
            samples: 60,
            least_samples: 10,
            at_most: Duration::from_millis(400),
            sample_here: Duration::from_micros(20),
            sample_across: Duration::from_micros(100),
            least_batch: LEAST_BATCH,
            tries: 5,
        }
    }
}

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
    /// fewer than [`LEAST_BLOCKS`] would be left.
    pub paired: Option<Ratio>,
    /// Whatever else it tells of itself.
    pub figures: Vec<Figure>,
}

impl Outcome {
    fn of(
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

/// The cores that are measured on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cores {
    /// Where the measuring thread is pinned.
    pub near: CoreId,
    /// Where the partners are pinned.
    pub far: CoreId,
}

/// Waits politely: spins at first, then lets others have the core, so that a partner that was
/// preempted by us can come back.
#[derive(Debug, Default)]
pub struct Patience(u32);

impl Patience {
    /// Called after an attempt that got nowhere.
    #[inline]
    pub fn wait(&mut self) {
        self.0 += 1;
        if self.0 & 0x3fff == 0 {
            thread::yield_now();
        } else {
            hint::spin_loop();
        }
    }
}

/// The other half of a contender: a thread on the other core, asleep between samples so that it
/// does not disturb the others'.
struct Partner {
    shared: Arc<Shared>,
    thread: Option<thread::JoinHandle<()>>,
}

/// How the two halves meet. Written once per sample.
#[derive(Default)]
struct Shared {
    /// Operations asked for; 0: none.
    wanted: CachePadded<AtomicU64>,
    /// The partner is awake and on its mark.
    ready: CachePadded<AtomicBool>,
    /// The measuring thread has seen that, and begins.
    go: CachePadded<AtomicBool>,
    /// The partner has done its operations.
    done: CachePadded<AtomicBool>,
    /// The row is over.
    over: AtomicBool,
    /// Involuntary context switches of the partner during the sample.
    preempted: AtomicI64,
}

impl Partner {
    fn start(core: CoreId, mut far: Batch) -> Self {
        let shared = Arc::new(Shared::default());
        let seen = Arc::clone(&shared);
        let thread = thread::spawn(move || {
            core_affinity::set_for_current(core);
            loop {
                // Acquire pairs with the Release in `begin` and in `drop`.
                let wanted = seen.wanted.swap(0, Ordering::Acquire);
                if wanted == 0 {
                    if seen.over.load(Ordering::Acquire) {
                        return;
                    }
                    thread::park();
                    continue;
                }
                let before = tsc::preemptions();
                // Release pairs with the Acquire in `begin`.
                seen.ready.store(true, Ordering::Release);
                let mut patience = Patience::default();
                // Acquire pairs with the Release in `begin`.
                while !seen.go.swap(false, Ordering::Acquire) {
                    patience.wait();
                }
                far(wanted);
                // Release pairs with the Acquire in `Running::wait`.
                seen.done.store(true, Ordering::Release);
                // Release pairs with the Acquire in `Running::preempted`, which waits for it.
                seen.preempted
                    .store(tsc::preemptions() - before, Ordering::Release);
            }
        });
        Self {
            shared,
            thread: Some(thread),
        }
    }

    /// Wakes the partner and returns when both may begin.
    fn begin(&mut self, operations: u64) -> Running<'_> {
        self.shared.preempted.store(-1, Ordering::Relaxed);
        // Release pairs with the Acquire of the partner's swap.
        self.shared.wanted.store(operations, Ordering::Release);
        if let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
        let mut patience = Patience::default();
        // Acquire pairs with the partner's Release.
        while !self.shared.ready.swap(false, Ordering::Acquire) {
            patience.wait();
        }
        // Release pairs with the Acquire of the partner's swap.
        self.shared.go.store(true, Ordering::Release);
        Running(&self.shared)
    }
}

impl Drop for Partner {
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // The partner of a half that panicked waits for ever. One that panicked has said so itself.
            if !thread::panicking() {
                let _ = thread.join();
            }
        }
    }
}

/// A sample on two cores, begun.
struct Running<'a>(&'a Shared);

impl Running<'_> {
    #[inline]
    fn wait(&self) {
        let mut patience = Patience::default();
        // Acquire pairs with the partner's Release.
        while !self.0.done.swap(false, Ordering::Acquire) {
            patience.wait();
        }
    }

    fn preempted(&self) -> bool {
        let mut patience = Patience::default();
        loop {
            // Acquire pairs with the partner's Release.
            match self.0.preempted.load(Ordering::Acquire) {
                -1 => patience.wait(),
                count => return count != 0,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use core::sync::atomic::{AtomicU64, Ordering};
    use core::time::Duration;
    use std::sync::Arc;

    use core_affinity::CoreId;

    use super::{
        Bound, Contender, Cores, Effort, Figure, Judged, LEAST_BATCH, Measured, Outcome, Role, Row,
        Sample,
    };
    use crate::stats::Summary;
    use crate::tsc::Calibration;

    const ANYWHERE: Cores = Cores {
        near: CoreId { id: 0 },
        far: CoreId { id: 0 },
    };

    fn effort() -> Effort {
        Effort {
            samples: 12,
            least_samples: 12,
            at_most: Duration::ZERO,
            sample_here: Duration::from_nanos(1),
            sample_across: Duration::from_nanos(1),
            least_batch: LEAST_BATCH,
            tries: 5,
        }
    }

    fn calibration() -> Calibration {
        Calibration::over(Duration::from_millis(2))
    }

    #[test]
    fn contenders_take_turns_and_do_whole_granules() {
        let log = Arc::new(std::sync::Mutex::new(Vec::new()));
        let row = ["a", "b", "c"].into_iter().fold(
            Row::new("turns", "step", ANYWHERE).granule(48),
            |row, name| {
                let log = Arc::clone(&log);
                row.here(Role::Ours, name, move |n| {
                    assert!(n >= LEAST_BATCH && n.is_multiple_of(48));
                    log.lock().unwrap().push(name);
                })
            },
        );
        let measured = row.measure(&effort(), &calibration());
        let log = log.lock().unwrap();
        // Behind the warming up, every three samples are one of each, and each is first in turn.
        let taken = &log[log.len() - 36..];
        for (turn, three) in taken.chunks(3).enumerate() {
            let first = ["a", "b", "c"][turn % 3];
            assert_eq!(three[0], first);
            assert!(["a", "b", "c"].iter().all(|name| three.contains(name)));
        }
        assert!(
            measured
                .outcomes
                .iter()
                .all(|outcome| outcome.samples == 12)
        );
    }

    #[test]
    fn both_halves_do_the_same_number_of_operations_at_the_same_time() {
        let ball = Arc::new(AtomicU64::new(0));
        let (near, far) = (Arc::clone(&ball), Arc::clone(&ball));
        let turn = |ball: &AtomicU64, odd: u64| {
            while ball.load(Ordering::Acquire) % 2 != odd {
                std::thread::yield_now();
            }
            ball.fetch_add(1, Ordering::AcqRel);
        };
        let row = Row::new("ping-pong", "round trip", ANYWHERE).across(
            Role::Floor,
            "one line",
            move |n| (0..n).for_each(|_| turn(&near, 0)),
            move |n| (0..n).for_each(|_| turn(&far, 1)),
        );
        let measured = row.measure(&effort(), &calibration());
        assert_eq!(measured.outcomes[0].samples, 12);
        assert!(measured.outcomes[0].ticks.min > 0.0);
        let count = ball.load(Ordering::Acquire);
        assert!(count >= 2 * 12 * LEAST_BATCH && count.is_multiple_of(2));
    }

    #[test]
    fn a_ratio_is_the_contenders_median_over_ours() {
        let outcome = |p50: f64, preempted| Outcome {
            name: String::new(),
            role: Role::Rival,
            batch: 64,
            samples: 100,
            preempted,
            ticks: Summary {
                min: 1.0,
                p50,
                p99: 1000.0,
            },
            ns: Summary::of(vec![1.0]).unwrap(),
            paired: None,
            figures: Vec::new(),
        };
        let measured = Measured {
            name: String::new(),
            operation: "step",
            bytes: 0,
            outcomes: vec![outcome(4.0, 0), outcome(10.0, 11)],
            goals: Vec::new(),
            distance: None,
        };
        let [ours, rival] = &measured.outcomes[..] else {
            panic!("two outcomes")
        };
        assert_eq!((measured.ratio(ours), measured.ratio(rival)), (1.0, 2.5));
        assert!(!ours.flagged() && rival.flagged());
    }

    #[test]
    fn goals_are_judged_by_the_medians_and_figures_forget_the_warming_up() {
        let seen = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&seen);
        let row = Row::new("goals", "step", ANYWHERE)
            .here(Role::Ours, "a", move |n| {
                count.fetch_add(n, Ordering::Relaxed);
            })
            .figures(move || {
                vec![Figure {
                    name: "steps",
                    value: seen.swap(0, Ordering::Relaxed) as f64,
                }]
            })
            .across_timed(Role::Floor, "b", |n| n * 10, |_| ())
            .goal("ten ticks", Bound::AtLeast(10.0), |row| row.ticks_of("b"))
            .goal("less", Bound::AtMost(9.0), |row| row.best_floor())
            .goal("nothing", Bound::AtMost(9.0), |row| row.ticks_of("c"));
        let measured = row.measure(&effort(), &calibration());
        let reached: Vec<_> = measured.goals.iter().map(Judged::reached).collect();
        assert_eq!(reached, [true, false]);
        let [a, b] = &measured.outcomes[..] else {
            panic!("two outcomes")
        };
        assert_eq!(a.figures[0].value, 12.0 * a.batch as f64);
        assert!(b.figures.is_empty());
        assert_eq!(b.ticks.p50, 10.0);
    }

    #[test]
    fn preempted_samples_are_counted_and_left_out() {
        let outcome = |cut: usize| {
            let samples: Vec<_> = (0..10)
                .map(|n| Sample {
                    ticks: if n < cut { 1e6 } else { 5.0 },
                    preempted: n < cut,
                })
                .collect();
            let contender = Contender {
                name: String::new(),
                role: Role::Ours,
                here: Box::new(|_| None),
                figures: None,
                partner: None,
            };
            Outcome::of(contender, 64, &samples, &calibration()).unwrap()
        };
        assert_eq!((outcome(3).preempted, outcome(3).ticks.p99), (3, 5.0));
        // Too many to leave out: then the figures say how it was.
        assert_eq!((outcome(8).preempted, outcome(8).ticks.p50), (8, 1e6));
    }
}
