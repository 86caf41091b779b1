//! Transfers of what another core has just written.

use core::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

use crossbeam_utils::CachePadded;
use o2poll_dataplane::memory::Range;
use o2poll_hal::copy::copy;

use super::application::{Application, Target};
use super::{Kind, Load, PLAIN, TWO};
use crate::harness::{Bound, Patience, Role, Row};
use crate::nodes::{self, Plan, Scribble};
use crate::rows::poll::clock;
use crate::tsc;

/// A 4 KiB GET of what the target's core has just written: the payload crosses, and is not in our cache.
///
/// In turns, 64 at a time: the target writes all 64 buffers, which does not count, then they are fetched one
/// after another.
pub(super) fn fresh(row: Row) -> Row {
    let clock = clock();
    let load = Load {
        kind: Kind::Get,
        length: 4096,
        depth: 1,
        cold: false,
        ..PLAIN
    };
    let plan = Plan {
        payload: FRESH * 4096,
        ..load.plan()
    };
    let [mut near, far] = nodes::pair(plan);
    let mut application = Application::new(&mut near, load, clock, &far);
    application.offsets = (0..64).map(|at| at * 4096).collect();
    let mut scribble = Scribble::over(&far, 1);
    let mut target = Target::new(far, clock);
    let gate = Arc::new(Gate::default());
    let far_gate = Arc::clone(&gate);
    let row = row.granule(FRESH as u64).bytes(4096).across_timed(
        Role::Ours,
        TWO,
        move |n| {
            (0..n / FRESH as u64)
                .map(|_| {
                    gate.pass();
                    let from = tsc::start();
                    application.run(&mut near, FRESH as u64, |_| 0);
                    tsc::stop().wrapping_sub(from)
                })
                .sum()
        },
        move |n| {
            for _ in 0..n / FRESH as u64 {
                scribble.write(FRESH * 4096);
                far_gate.open();
                target.serve(FRESH as u64);
            }
        },
    );
    // The floor: a line there and back for each, and the copy.
    let [mut near, far] = nodes::pair(plan);
    let mut scribble = Scribble::over(&far, 1);
    let source = far.payload.as_ref().map(Range::sge).expect("not exported");
    let mut sink = near.payload.take().expect("not taken");
    let gate = Arc::new(Gate::default());
    let far_gate = Arc::clone(&gate);
    let ball = Arc::new(CachePadded::new(AtomicU64::new(0)));
    let far_ball = Arc::clone(&ball);
    let (mut sent, mut returned) = (0, 0);
    let copier = o2poll_hal::copy::Method::Plain
        .copier()
        .expect("always there");
    let reader = nodes::Reader::new(source, &near);
    row.across_timed(
        Role::Floor,
        "line there and back, and the copy",
        move |n| {
            (0..n / FRESH as u64)
                .map(|_| {
                    gate.pass();
                    let from = tsc::start();
                    for at in 0..FRESH {
                        // Release and Acquire pair with the other half's.
                        ball.store(sent + 1, Ordering::Release);
                        sent += 2;
                        await_value(&ball, sent);
                        let from = reader.bytes(at * 4096, 4096);
                        copy(copier, &mut sink.bytes_mut()[..4096], from);
                    }
                    tsc::stop().wrapping_sub(from)
                })
                .sum()
        },
        move |n| {
            let _kept = &far;
            for _ in 0..n / FRESH as u64 {
                scribble.write(FRESH * 4096);
                far_gate.open();
                for _ in 0..FRESH {
                    await_value(&far_ball, returned + 1);
                    returned += 2;
                    far_ball.store(returned, Ordering::Release);
                }
            }
        },
    )
    .goal(
        "time over that of a line there and back and a copy",
        Bound::AtMost(1.7),
        |row| Some(row.ticks_of(TWO)? / row.best_floor()?),
    )
}

/// Opened by one thread, passed by the other, again and again.
#[derive(Default)]
struct Gate {
    opened: CachePadded<AtomicU64>,
    passed: CachePadded<AtomicU64>,
}

impl Gate {
    fn open(&self) {
        // Release pairs with the Acquire in `pass`. One thread opens.
        self.opened.fetch_add(1, Ordering::Release);
    }

    fn pass(&self) {
        let next = self.passed.load(Ordering::Relaxed) + 1;
        self.passed.store(next, Ordering::Relaxed);
        let mut patience = Patience::default();
        // Acquire pairs with the Release in `open`.
        while self.opened.load(Ordering::Acquire) < next {
            patience.wait();
        }
    }
}

#[inline]
fn await_value(line: &AtomicU64, value: u64) {
    let mut patience = Patience::default();
    // Acquire pairs with the sender's Release.
    while line.load(Ordering::Acquire) != value {
        patience.wait();
    }
}

/// Buffers that the target writes between turns: half of a core's own cache.
const FRESH: usize = 64;
