//! Floors: what the machine takes for the least that must happen.

use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;
use std::sync::Arc;

use crossbeam_utils::CachePadded;

use super::Spec;
use crate::harness::{Cores, Effort, LEAST_BATCH, Patience, Role, Row};
use crate::tsc::Calibration;

/// The rows of this file.
#[must_use]
pub fn specs() -> Vec<Spec> {
    vec![Spec::new("floor/ping-pong", "round trip", 2, |row| {
        two_lines(one_line(row))
    })]
}

/// How far apart the two cores are now: nanoseconds for one cache line there and back. On a virtual
/// machine this changes while one looks, as the host moves the virtual cores.
#[must_use]
pub fn distance(cores: Cores, calibration: &Calibration) -> f64 {
    let effort = Effort {
        samples: 25,
        least_samples: 25,
        at_most: Duration::ZERO,
        sample_here: Duration::ZERO,
        sample_across: Duration::from_micros(50),
        least_batch: LEAST_BATCH,
        tries: 5,
    };
    let row = one_line(Row::new("distance", "round trip", cores));
    row.measure(&effort, calibration)
        .outcomes
        .first()
        .map_or(f64::NAN, |outcome| outcome.ns.p50)
}

/// Adds the floor of every exchange between cores: one cache line there and back.
#[must_use]
pub fn one_line(row: Row) -> Row {
    let ball = Arc::new(CachePadded::new(AtomicU64::new(0)));
    let far_ball = Arc::clone(&ball);
    let (mut sent, mut returned) = (0, 0);
    row.across(
        Role::Floor,
        "one cache line, there and back",
        move |n| {
            for _ in 0..n {
                // Release and Acquire pair with the other half's.
                ball.store(sent + 1, Ordering::Release);
                sent += 2;
                await_value(&ball, sent);
            }
        },
        move |n| {
            for _ in 0..n {
                await_value(&far_ball, returned + 1);
                returned += 2;
                far_ball.store(returned, Ordering::Release);
            }
        },
    )
}

/// Adds the floor of a ring with a shared index: data and index lines, each there and back.
#[must_use]
pub fn two_lines(row: Row) -> Row {
    #[derive(Default)]
    struct Lines {
        there: [CachePadded<AtomicU64>; 2],
        back: [CachePadded<AtomicU64>; 2],
    }
    let lines = Arc::new(Lines::default());
    let far_lines = Arc::clone(&lines);
    let (mut round, mut far_round) = (0, 0);
    row.across(
        Role::Floor,
        "data line and index line",
        move |n| {
            for _ in 0..n {
                round += 1;
                send(&lines.there, round);
                receive(&lines.back, round);
            }
        },
        move |n| {
            for _ in 0..n {
                far_round += 1;
                receive(&far_lines.there, far_round);
                send(&far_lines.back, far_round);
            }
        },
    )
}

fn send([data, index]: &[CachePadded<AtomicU64>; 2], round: u64) {
    data.store(round, Ordering::Relaxed);
    // Release pairs with the Acquire in `await_value`.
    index.store(round, Ordering::Release);
}

fn receive([data, index]: &[CachePadded<AtomicU64>; 2], round: u64) {
    await_value(index, round);
    assert_eq!(data.load(Ordering::Relaxed), round);
}

#[inline]
fn await_value(line: &AtomicU64, value: u64) {
    let mut patience = Patience::default();
    // Acquire pairs with the sender's Release.
    while line.load(Ordering::Acquire) != value {
        patience.wait();
    }
}
