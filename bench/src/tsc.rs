//! The time stamp counter, and what a thread has suffered meanwhile.
//!
//! Figures are TSC reference cycles ("tsc"), not core clock cycles: the counter runs at a constant
//! rate that has nothing to do with the clock the core runs at.
#![allow(unsafe_code)]

use core::mem::MaybeUninit;
use core::time::Duration;
use std::time::Instant;

/// Reads the counter so that nothing of what follows has begun, and all that precedes is done.
#[inline(always)]
#[must_use]
pub fn start() -> u64 {
    #[cfg(target_arch = "x86_64")]
    {
        use core::arch::x86_64::{_mm_lfence, _rdtsc};
        // SAFETY: SSE2 and RDTSC belong to every x86_64; user space may read the counter unless
        // CR4.TSD is set, which faults and cannot corrupt.
        unsafe {
            _mm_lfence();
            let now = _rdtsc();
            _mm_lfence();
            now
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    nanoseconds()
}

/// Reads the counter after all that precedes is done, before anything that follows begins.
#[inline(always)]
#[must_use]
pub fn stop() -> u64 {
    #[cfg(target_arch = "x86_64")]
    {
        use core::arch::x86_64::{__rdtscp, _mm_lfence};
        let mut processor = 0;
        // SAFETY: as in `start`; every x86_64 server of the last fifteen years has RDTSCP, and one
        // without it raises an invalid opcode. `processor` is a valid place to write to.
        unsafe {
            let now = __rdtscp(&raw mut processor);
            _mm_lfence();
            now
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    nanoseconds()
}

/// Nanoseconds of `CLOCK_MONOTONIC` since the first call: the counter of other architectures.
#[cfg(not(target_arch = "x86_64"))]
fn nanoseconds() -> u64 {
    use std::sync::OnceLock;
    static EPOCH: OnceLock<Instant> = OnceLock::new();
    u64::try_from(EPOCH.get_or_init(Instant::now).elapsed().as_nanos()).unwrap_or(u64::MAX)
}

/// How long a tick of the counter is.
#[derive(Clone, Copy, Debug)]
pub struct Calibration {
    /// Ticks per nanosecond.
    pub ticks_per_ns: f64,
    /// Ticks between a [`start`] and a [`stop`] with nothing between them: the least seen.
    pub empty: u64,
}

impl Calibration {
    /// Compares the counter with `CLOCK_MONOTONIC` (`Instant` on Linux) over `span`, and measures
    /// an empty section.
    ///
    /// The clock is read between two readings of the counter, so that an interruption shows as a
    /// wide bracket; the narrowest of several brackets counts.
    #[must_use]
    pub fn over(span: Duration) -> Self {
        let (first_tick, first) = bracketed();
        std::thread::sleep(span);
        let (last_tick, last) = bracketed();
        let ns = last.duration_since(first).as_secs_f64() * 1e9;
        let empty = (0..10_000)
            .map(|_| {
                let from = start();
                stop().wrapping_sub(from)
            })
            .min()
            .unwrap_or(0);
        Self {
            ticks_per_ns: last_tick.wrapping_sub(first_tick) as f64 / ns,
            empty,
        }
    }

    /// Ticks as nanoseconds.
    #[must_use]
    pub fn ns(&self, ticks: f64) -> f64 {
        ticks / self.ticks_per_ns
    }
}

/// The counter at an instant of the clock.
fn bracketed() -> (u64, Instant) {
    (0..100)
        .map(|_| {
            let before = start();
            let instant = Instant::now();
            let width = stop().wrapping_sub(before);
            (width, before.wrapping_add(width / 2), instant)
        })
        .min_by_key(|(width, ..)| *width)
        .map_or_else(
            || (start(), Instant::now()),
            |(_, tick, instant)| (tick, instant),
        )
}

/// Involuntary context switches of the calling thread so far (`RUSAGE_THREAD`).
#[must_use]
pub fn preemptions() -> i64 {
    let mut usage = MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: `usage` is a valid place for a `rusage`, and an all-zero one is a value of the type, so
    // it is initialised whether or not the call succeeds.
    let usage = unsafe {
        libc::getrusage(libc::RUSAGE_THREAD, usage.as_mut_ptr());
        usage.assume_init()
    };
    usage.ru_nivcsw
}

#[cfg(test)]
mod tests {
    use core::time::Duration;
    use std::time::Instant;

    use super::{Calibration, preemptions, start, stop};

    #[test]
    fn the_counter_goes_on_and_agrees_with_the_clock() {
        let calibration = Calibration::over(Duration::from_millis(20));
        assert!(calibration.ticks_per_ns.is_finite() && calibration.ticks_per_ns > 0.0);
        let (from, clock) = (start(), Instant::now());
        std::thread::sleep(Duration::from_millis(20));
        let (ticks, ns) = (stop() - from, clock.elapsed().as_secs_f64() * 1e9);
        let ratio = calibration.ns(ticks as f64) / ns;
        assert!((0.5..2.0).contains(&ratio), "{ratio}");
    }

    #[test]
    fn preemptions_never_go_back() {
        let before = preemptions();
        assert!(before >= 0);
        assert!(preemptions() >= before);
    }
}
