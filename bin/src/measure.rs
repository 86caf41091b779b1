//! What is measured of transfers: how long each took, and what a span of them cost.

use o2poll_dataplane::counters::Counters;
use o2poll_dataplane::time::{Instant, Ticks};

use crate::application::Turn;

/// What each core of a node has counted.
pub type CoreCounters = &'static [&'static Counters];

/// How often each span of time was seen, to within 3 %. Recording neither allocates nor divides.
#[derive(Clone, Debug)]
pub struct Histogram {
    buckets: Box<[u64]>,
    count: u64,
    most: Ticks,
}

impl Histogram {
    /// An empty one. Allocates all it will ever need.
    #[must_use]
    pub fn new() -> Self {
        Self {
            buckets: vec![0; BUCKETS].into_boxed_slice(),
            count: 0,
            most: Ticks(0),
        }
    }

    /// Counts one span.
    pub fn record(&mut self, span: Ticks) {
        if let Some(bucket) = self.buckets.get_mut(bucket_of(span.0)) {
            *bucket = bucket.saturating_add(1);
        }
        self.count = self.count.saturating_add(1);
        self.most = self.most.max(span);
    }

    /// Counts everything that another has.
    pub fn add(&mut self, other: &Self) {
        for (bucket, more) in self.buckets.iter_mut().zip(&other.buckets) {
            *bucket = bucket.saturating_add(*more);
        }
        self.count = self.count.saturating_add(other.count);
        self.most = self.most.max(other.most);
    }

    /// How many spans there are.
    #[must_use]
    pub const fn count(&self) -> u64 {
        self.count
    }

    /// The longest, exactly; zero if there is none.
    #[must_use]
    pub const fn most(&self) -> Ticks {
        self.most
    }

    /// The span that `per_mille` of a thousand spans do not exceed; zero if there is none.
    #[must_use]
    pub fn quantile(&self, per_mille: u32) -> Ticks {
        let rank = u128::from(self.count) * u128::from(per_mille.min(1000));
        let rank = u64::try_from(rank.div_ceil(1000))
            .unwrap_or(u64::MAX)
            .max(1);
        let mut seen = 0_u64;
        for (index, bucket) in self.buckets.iter().enumerate() {
            seen = seen.saturating_add(*bucket);
            if seen >= rank {
                return Ticks(upper_end(index)).min(self.most);
            }
        }
        self.most
    }
}

impl Default for Histogram {
    fn default() -> Self {
        Self::new()
    }
}

/// Work requests and doorbells of both ends so far, and time in busy polls of the end that asks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Time in polls that found something to do.
    pub busy: Ticks,
    /// Send work requests of the node that runs the job, and of its peer.
    pub work_requests: [u64; 2],
    /// Doorbells of both.
    pub doorbells: [u64; 2],
}

impl Cost {
    fn at(turn: Turn, nodes: [CoreCounters; 2]) -> Self {
        let sum = |of: fn(&Counters) -> u64| {
            nodes.map(|cores| {
                cores
                    .iter()
                    .fold(0_u64, |sum, core| sum.saturating_add(of(core)))
            })
        };
        Self {
            busy: turn.busy,
            work_requests: sum(|core| core.work_requests.get()),
            doorbells: sum(|core| core.doorbells.get()),
        }
    }

    fn since(self, earlier: Self) -> Self {
        let minus = |now: [u64; 2], then: [u64; 2]| {
            [
                now[0].saturating_sub(then[0]),
                now[1].saturating_sub(then[1]),
            ]
        };
        Self {
            busy: Ticks(self.busy.0.saturating_sub(earlier.busy.0)),
            work_requests: minus(self.work_requests, earlier.work_requests),
            doorbells: minus(self.doorbells, earlier.doorbells),
        }
    }
}

/// A span of transfers of one kind.
#[derive(Clone, Debug)]
pub struct Span {
    counters: [CoreCounters; 2],
    began: Option<(Instant, Cost)>,
    /// From the first submission to the last event.
    pub elapsed: Ticks,
    /// What it cost.
    pub cost: Cost,
    /// Latencies of PUTs: from submission to event.
    pub puts: Histogram,
    /// Latencies of GETs.
    pub gets: Histogram,
    /// Bytes that PUTs moved.
    pub put_bytes: u64,
    /// Bytes that GETs moved.
    pub get_bytes: u64,
}

impl Span {
    /// Not begun. The counters are those of the node that runs the job, and of its peer.
    #[must_use]
    pub fn new(counters: [CoreCounters; 2]) -> Self {
        Self {
            counters,
            began: None,
            elapsed: Ticks(0),
            cost: Cost::default(),
            puts: Histogram::new(),
            gets: Histogram::new(),
            put_bytes: 0,
            get_bytes: 0,
        }
    }

    /// Begins at the first call.
    pub fn begin(&mut self, turn: Turn) {
        if self.began.is_none() {
            self.began = Some((turn.now, Cost::at(turn, self.counters)));
        }
    }

    /// Ends here; a later call moves the end.
    pub fn end(&mut self, turn: Turn) {
        if let Some((began, cost)) = self.began {
            self.elapsed = turn.now.since(began);
            self.cost = Cost::at(turn, self.counters).since(cost);
        }
    }

    /// Counts a transfer that ended well.
    pub fn record(&mut self, put: bool, bytes: u32, latency: Ticks) {
        if put {
            self.puts.record(latency);
            self.put_bytes = self.put_bytes.saturating_add(bytes.into());
        } else {
            self.gets.record(latency);
            self.get_bytes = self.get_bytes.saturating_add(bytes.into());
        }
    }

    /// Transfers that ended well.
    #[must_use]
    pub const fn transfers(&self) -> u64 {
        self.puts.count().saturating_add(self.gets.count())
    }
}

/// Buckets 0 to 31 are exact; above, each power of two is cut into 32.
const fn bucket_of(value: u64) -> usize {
    let shift = (63 - FINE_BITS).saturating_sub(value.leading_zeros());
    let fine = ((value >> shift) & (FINE - 1)) as usize;
    // The row below the first power of two that is cut has the exact values.
    if value < FINE {
        fine
    } else {
        (shift as usize + 1) * 32 + fine
    }
}

/// The largest value of a bucket.
#[expect(clippy::cast_possible_truncation, reason = "at most 60 rows")]
const fn upper_end(bucket: usize) -> u64 {
    let (row, fine) = (bucket / 32, (bucket % 32) as u64);
    if row == 0 {
        return fine;
    }
    let shift = row as u32 - 1;
    // The bucket's first value, and as many more as it is wide, less one.
    let first = (FINE + fine) << shift;
    first + ((1 << shift) - 1)
}

const FINE_BITS: u32 = 5;
const FINE: u64 = 1 << FINE_BITS;
const BUCKETS: usize = (64 - FINE_BITS as usize + 1) * 32;

#[cfg(test)]
mod tests {
    use super::{BUCKETS, Histogram, Span, bucket_of, upper_end};
    use crate::application::Turn;
    use o2poll_dataplane::counters::Counters;
    use o2poll_dataplane::time::{Instant, Ticks};

    #[test]
    fn buckets_follow_each_other_and_hold_what_they_say() {
        assert_eq!(bucket_of(u64::MAX), BUCKETS - 1);
        for bucket in 0..BUCKETS - 1 {
            let end = upper_end(bucket);
            assert_eq!(bucket_of(end), bucket);
            assert_eq!(bucket_of(end + 1), bucket + 1);
        }
        assert_eq!(upper_end(BUCKETS - 1), u64::MAX);
    }

    #[test]
    fn quantiles_are_within_three_percent_and_never_beyond_the_longest() {
        let mut histogram = Histogram::new();
        for value in 1..=10_000 {
            histogram.record(Ticks(value));
        }
        for (per_mille, exact) in [(500, 5000.0), (990, 9900.0), (1, 10.0)] {
            let found = histogram.quantile(per_mille).0 as f64;
            assert!(
                (exact..=exact * 1.04).contains(&found),
                "{per_mille}: {found}"
            );
        }
        assert_eq!(histogram.quantile(1000), Ticks(10_000));
        assert_eq!(histogram.most(), Ticks(10_000));
        assert_eq!(Histogram::new().quantile(500), Ticks(0));
    }

    #[test]
    fn two_histograms_add_up() {
        let (mut low, mut high) = (Histogram::new(), Histogram::new());
        for _ in 0..10 {
            low.record(Ticks(5));
            high.record(Ticks(1_000_000));
        }
        low.add(&high);
        assert_eq!(low.count(), 20);
        assert_eq!(low.quantile(500), Ticks(5));
        assert_eq!(low.most(), Ticks(1_000_000));
    }

    #[test]
    fn a_span_costs_what_was_counted_between_its_ends() {
        let ours: &'static Counters = Box::leak(Box::new(Counters::new()));
        let theirs: &'static Counters = Box::leak(Box::new(Counters::new()));
        ours.work_requests.add(100);
        let mut span = Span::new([vec![ours].leak(), vec![theirs].leak()]);
        let turn = |now, busy| Turn {
            now: Instant(now),
            busy: Ticks(busy),
        };
        span.begin(turn(1000, 10));
        span.begin(turn(2000, 20));
        ours.work_requests.add(6);
        theirs.doorbells.add(4);
        span.record(true, 4096, Ticks(7));
        span.record(false, 1, Ticks(9));
        span.end(turn(3000, 110));
        assert_eq!(span.elapsed, Ticks(2000));
        assert_eq!(span.cost.busy, Ticks(100));
        assert_eq!(span.cost.work_requests, [6, 0]);
        assert_eq!(span.cost.doorbells, [0, 4]);
        assert_eq!(
            (span.transfers(), span.put_bytes, span.get_bytes),
            (2, 4096, 1)
        );
    }
}
