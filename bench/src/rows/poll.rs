//! What a poll costs when there is nothing to do.

use core::hint::black_box;
use std::sync::OnceLock;

use o2poll_dataplane::ring::{
    Consumer, Indices, LapConsumer, LapProducer, LapSlot, Producer, Returned, Slot, index_ring,
    lap_ring,
};
use o2poll_hal::clock::Clock;
use o2poll_soft::Profile;

use super::Spec;
use crate::harness::{Role, Row};
use crate::nodes::{self, End, Plan, lend_one};

/// The rows of this file.
#[must_use]
pub fn specs() -> Vec<Spec> {
    [1, 16]
        .map(|connections| {
            Spec::new(
                format!("poll/idle/{connections}-connections"),
                "poll",
                1,
                move |row| build(row, connections),
            )
        })
        .into()
}

/// Each connection leads to a core of its own.
fn build(row: Row, connections: u16) -> Row {
    let clock = clock();
    let plan = Plan {
        depth: 8,
        payload: 4096,
        profile: Profile::frwr(),
        source: 0,
        end: End::Done,
    };
    let mut node = nodes::idle(plan, connections);
    let (mut orders, mut submissions) = (index(), index());
    let ports: Vec<_> = (0..connections).map(|_| lap()).collect();
    row.here(Role::Ours, "poller and device", move |n| {
        for _ in 0..n {
            let work = node.turn(clock.now());
            debug_assert_eq!(work, 0);
        }
    })
    .here(Role::Floor, "clock, two rings, each port, once", move |n| {
        for _ in 0..n {
            black_box(clock.now());
            black_box(orders.1.pop());
            black_box(submissions.1.pop());
            for (_, port) in &ports {
                black_box(port.peek());
            }
        }
    })
    .here(Role::Floor, "reading the clock", move |n| {
        for _ in 0..n {
            black_box(clock.now());
        }
    })
}

/// Measured once.
pub(super) fn clock() -> Clock {
    static CLOCK: OnceLock<Clock> = OnceLock::new();
    *CLOCK.get_or_init(Clock::start)
}

fn index() -> (Producer<'static, [u64; 8]>, Consumer<'static, [u64; 8]>) {
    let slots = Vec::leak((0..64).map(|_| Slot::new()).collect());
    index_ring(lend_one(Indices::new()), slots).expect("a power of two")
}

fn lap() -> (LapProducer<'static>, LapConsumer<'static>) {
    let slots = Vec::leak((0..64).map(|_| LapSlot::new()).collect());
    lap_ring(lend_one(Returned::new()), slots).expect("a power of two")
}
