//! The clock of the data plane, and the stamp of an incarnation.
//!
//! On x86-64 with an invariant TSC (`constant_tsc` and `nonstop_tsc` in `/proc/cpuinfo`) a tick is
//! a TSC cycle: read by one instruction, no system call, about 15 ns. The cycles are reference
//! cycles, not those of the core's own frequency. Elsewhere a tick is a nanosecond of
//! `CLOCK_MONOTONIC`.
//!
//! # Across cores
//! An invariant TSC of one package counts in step on all of its cores, and Linux checks that of several
//! packages at boot (where it fails, the kernel's own clock source is not `tsc`, and this clock falls
//! back too). Even so the instruction is not ordered against loads and stores around it, so two
//! cores may see times that differ by tens of nanoseconds. The data plane subtracts with saturation
//! ([`Instant::since`]) and only measures deadlines by it.
#![allow(unsafe_code)]

use core::fmt;
use core::time::Duration;
use std::fs;
use std::time::SystemTime;

use o2poll_dataplane::time::{Instant, Ticks};

use crate::procfs;

/// Reads time in ticks. A plain value: each core has a copy.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    source: Source,
    hertz: u64,
}

#[derive(Clone, Copy, Debug)]
enum Source {
    #[cfg(target_arch = "x86_64")]
    Tsc,
    Monotonic {
        epoch: std::time::Instant,
        why: &'static str,
    },
}

impl Clock {
    /// The best clock this machine has. Measures the TSC for about 50 ms: call once at start.
    #[must_use]
    pub fn start() -> Self {
        match Self::tsc() {
            Ok(clock) => clock,
            Err(why) => Self::without_tsc(why),
        }
    }

    /// `CLOCK_MONOTONIC` in nanoseconds, whatever the machine has.
    #[must_use]
    pub fn monotonic() -> Self {
        Self::without_tsc("as asked")
    }

    /// Now.
    #[must_use]
    #[inline]
    pub fn now(&self) -> Instant {
        match self.source {
            #[cfg(target_arch = "x86_64")]
            Source::Tsc => Instant(tsc::read()),
            Source::Monotonic { epoch, .. } => Instant(nanos(epoch.elapsed())),
        }
    }

    /// Ticks per second.
    #[must_use]
    pub const fn hertz(&self) -> u64 {
        self.hertz
    }

    /// Whether a tick is a TSC cycle.
    #[must_use]
    pub const fn counts_cycles(&self) -> bool {
        match self.source {
            #[cfg(target_arch = "x86_64")]
            Source::Tsc => true,
            Source::Monotonic { .. } => false,
        }
    }

    /// A span in ticks, rounded up: a timeout is never shorter than it was asked for.
    #[must_use]
    pub fn ticks(&self, span: Duration) -> Ticks {
        Ticks(scale(span.as_nanos(), self.hertz, NANOS, true))
    }

    /// A span in nanoseconds, rounded down.
    #[must_use]
    pub fn nanoseconds(&self, span: Ticks) -> u64 {
        scale(u128::from(span.0), NANOS, self.hertz, false)
    }

    /// A span as the standard library writes it.
    #[must_use]
    pub fn duration(&self, span: Ticks) -> Duration {
        Duration::from_nanos(self.nanoseconds(span))
    }

    fn without_tsc(why: &'static str) -> Self {
        Self {
            source: Source::Monotonic {
                epoch: std::time::Instant::now(),
                why,
            },
            hertz: NANOS,
        }
    }

    #[cfg(target_arch = "x86_64")]
    fn tsc() -> Result<Self, &'static str> {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let source = fs::read_to_string(CLOCK_SOURCE).unwrap_or_default();
        invariant(&cpuinfo, &source)?;
        tsc::measure().map(|hertz| Self {
            source: Source::Tsc,
            hertz,
        })
    }

    #[cfg(not(target_arch = "x86_64"))]
    const fn tsc() -> Result<Self, &'static str> {
        Err("this architecture has no TSC")
    }
}

impl fmt::Display for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.source {
            #[cfg(target_arch = "x86_64")]
            Source::Tsc => {
                let mega = self.hertz / 1_000_000;
                write!(f, "TSC at {}.{:03} GHz", mega / 1000, mega % 1000)
            }
            Source::Monotonic { why, .. } => write!(f, "CLOCK_MONOTONIC, not the TSC: {why}"),
        }
    }
}

/// The incarnation of a node that starts now: microseconds of the wall clock, what a kernel node
/// puts into `ibp_incarnation`'s place. A node that starts again has another one.
#[must_use]
pub fn stamp() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    // A wall clock before 1970 is unset; any number that is not 0 will do.
    since.map_or(1, |since| {
        u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
    })
}

/// Whether the TSC counts at one rate for ever, as the kernel sees it.
fn invariant(cpuinfo: &str, clock_source: &str) -> Result<(), &'static str> {
    let flags = procfs::field(cpuinfo, "flags").ok_or("no flags in /proc/cpuinfo")?;
    let has = |flag| flags.split_whitespace().any(|word| word == flag);
    if !has("constant_tsc") || !has("nonstop_tsc") {
        return Err("it is not invariant (constant_tsc and nonstop_tsc in /proc/cpuinfo)");
    }
    match clock_source.trim() {
        // The paravirtual clocks are the TSC with a scale from the hypervisor.
        "tsc" | "kvm-clock" | "hyperv_clocksource_tsc_page" | "" => Ok(()),
        _ => Err("the kernel does not trust it (current_clocksource)"),
    }
}

/// `value * to / from`, saturating.
fn scale(value: u128, to: u64, from: u64, up: bool) -> u64 {
    let from = u128::from(from.max(1));
    let product = value.saturating_mul(u128::from(to));
    let scaled = if up {
        product.div_ceil(from)
    } else {
        product / from
    };
    u64::try_from(scaled).unwrap_or(u64::MAX)
}

fn nanos(span: Duration) -> u64 {
    u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(target_arch = "x86_64")]
mod tsc {
    use super::{NANOS, nanos};
    use core::time::Duration;
    use std::time::Instant;

    /// The counter.
    #[inline]
    pub(super) fn read() -> u64 {
        // SAFETY: every x86-64 has the instruction; where the kernel has disabled it (prctl(2),
        // PR_SET_TSC) the process is killed, which is loud and not unsound.
        unsafe { core::arch::x86_64::_rdtsc() }
    }

    /// Cycles per second: two stretches that have to agree, so that a thread that was interrupted in a
    /// bad place, or a virtual machine that was moved, is noticed.
    pub(super) fn measure() -> Result<u64, &'static str> {
        for stretch in [25, 50, 100, 200] {
            let stretch = Duration::from_millis(stretch);
            let start = sample();
            std::thread::sleep(stretch);
            let middle = sample();
            std::thread::sleep(stretch);
            let end = sample();
            let halves = (rate(start, middle), rate(middle, end));
            if let (Some(first), Some(second)) = halves
                && first.abs_diff(second) <= first / 10_000
                && let Some(whole) = rate(start, end)
            {
                return Ok(whole);
            }
        }
        Err("it does not agree with CLOCK_MONOTONIC")
    }

    /// One moment on both clocks: of many tries the one with the least time between the two reads of
    /// the counter around the other.
    fn sample() -> (u64, Instant) {
        let mut best = (u64::MAX, 0, Instant::now());
        for _ in 0..64 {
            let before = read();
            let moment = Instant::now();
            let width = read().wrapping_sub(before);
            if width < best.0 {
                best = (width, before.wrapping_add(width / 2), moment);
            }
        }
        (best.1, best.2)
    }

    fn rate(start: (u64, Instant), end: (u64, Instant)) -> Option<u64> {
        let cycles = end.0.checked_sub(start.0)?;
        let elapsed = nanos(end.1.checked_duration_since(start.1)?);
        let rate = u128::from(cycles) * u128::from(NANOS) / u128::from(elapsed.max(1));
        u64::try_from(rate).ok().filter(|rate| *rate >= 1_000_000)
    }
}

const NANOS: u64 = 1_000_000_000;

#[cfg(target_arch = "x86_64")]
const CLOCK_SOURCE: &str = "/sys/devices/system/clocksource/clocksource0/current_clocksource";

#[cfg(test)]
mod tests {
    use super::{Clock, invariant, scale, stamp};
    use core::time::Duration;
    use o2poll_dataplane::time::Ticks;

    #[test]
    fn both_clocks_agree_with_the_wall_about_a_sleep() {
        for clock in [Clock::start(), Clock::monotonic()] {
            let outer = std::time::Instant::now();
            let start = clock.now();
            let inner = std::time::Instant::now();
            std::thread::sleep(Duration::from_millis(20));
            let least = inner.elapsed();
            let measured = clock.duration(clock.now().since(start));
            let most = outer.elapsed();
            // Whenever this thread was interrupted, the clock read lies between the two walls; a
            // hundredth is left to the calibration.
            assert!(
                measured >= least.mul_f64(0.99),
                "{clock}: {measured:?} {least:?}"
            );
            assert!(
                measured <= most.mul_f64(1.01),
                "{clock}: {measured:?} {most:?}"
            );
        }
    }

    #[test]
    fn time_does_not_run_backwards_on_one_core() {
        let clock = Clock::start();
        let mut last = clock.now();
        for _ in 0..100_000 {
            let now = clock.now();
            assert!(now >= last);
            last = now;
        }
    }

    #[test]
    fn conversions_round_timeouts_up_and_never_overflow() {
        let clock = Clock::monotonic();
        assert_eq!(clock.ticks(Duration::from_micros(3)), Ticks(3000));
        assert_eq!(clock.nanoseconds(Ticks(3000)), 3000);
        assert_eq!(clock.ticks(Duration::MAX), Ticks(u64::MAX));
        assert_eq!(scale(1, 2_100_000_000, 1_000_000_000, true), 3);
        assert_eq!(scale(1, 2_100_000_000, 1_000_000_000, false), 2);
        assert_eq!(scale(u128::MAX, u64::MAX, 1, true), u64::MAX);
        assert_eq!(scale(5, 1, 0, false), 5);
    }

    #[test]
    fn only_an_invariant_tsc_that_the_kernel_trusts_is_used() {
        let good = "processor\t: 0\nflags\t\t: fpu tsc constant_tsc nonstop_tsc\n";
        assert!(invariant(good, "tsc\n").is_ok());
        assert!(invariant(good, "kvm-clock").is_ok());
        assert!(invariant(good, "").is_ok());
        assert!(invariant(good, "hpet").is_err());
        assert!(invariant("flags : tsc nonstop_tsc", "tsc").is_err());
        assert!(invariant("flags : tsc constant_tsc", "tsc").is_err());
        assert!(invariant("", "tsc").is_err());
    }

    #[test]
    fn a_fallback_says_why() {
        assert!(Clock::monotonic().to_string().contains("not the TSC"));
        let clock = Clock::start();
        assert_eq!(
            clock.counts_cycles(),
            clock.to_string().starts_with("TSC at")
        );
    }

    #[test]
    fn a_later_start_has_a_later_stamp() {
        let first = stamp();
        // 2020: the wall clock of a machine that runs this is set.
        assert!(first > 1_577_836_800_000_000);
        std::thread::sleep(Duration::from_millis(1));
        assert!(stamp() > first);
    }
}
