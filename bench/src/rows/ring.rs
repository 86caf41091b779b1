//! The two rings against rtrb, heapless' spsc queue and crossbeam's `ArrayQueue`.
//!
//! An operation is one object in *and* out. A rival that has no burst of its own does a loop. A
//! ring has 1024 slots where the row does not say otherwise. A message is one cache line: for the lap ring that is 56 bytes and the lap
//! word, for the others 64 bytes of the user's, aligned, which is what they do best.
//!
//! Between cores the consumer does nothing with what it gets and asks at once for more. That is the
//! worst case of every ring: the consumer follows close behind the producer and takes its lines away
//! as they are written. What a burst saves there is the lines, not the instructions.

use core::hint::black_box;
use std::sync::Arc;

use crossbeam_queue::ArrayQueue;
use heapless::spsc::Queue;
use o2poll_dataplane::ring::{
    Consumer, Indices, LapConsumer, LapProducer, LapSlot, Message, Producer, Returned, Slot,
    index_ring, lap_ring,
};

use super::{Spec, floor};
use crate::harness::{Patience, Role, Row};

/// The rows of this file.
#[must_use]
pub fn specs() -> Vec<Spec> {
    let mut specs = Vec::new();
    for burst in BURSTS {
        specs.push(Spec::new(
            format!("ring/index/same-core/burst-{burst}"),
            "u64",
            1,
            move |row| index_here(row, burst),
        ));
    }
    for burst in BURSTS {
        specs.push(Spec::new(
            format!("ring/index/cross-core/burst-{burst}"),
            "u64",
            2,
            move |row| index_across(row, burst),
        ));
    }
    specs.push(Spec::new(
        "ring/lap/same-core",
        "64-byte message",
        1,
        messages_here,
    ));
    for slots in MESSAGE_SLOTS {
        specs.push(Spec::new(
            format!("ring/lap/cross-core/slots-{slots}"),
            "64-byte message",
            2,
            move |row| messages_across(row, slots),
        ));
    }
    for burst in [8, 32] {
        specs.push(Spec::new(
            format!("ring/lap/cross-core/burst-{burst}"),
            "64-byte message",
            2,
            move |row| message_bursts_across(row, burst),
        ));
    }
    for slots in MESSAGE_SLOTS {
        specs.push(Spec::new(
            format!("ring/lap/cross-core/round-trip/slots-{slots}"),
            "round trip of a 64-byte message",
            2,
            move |row| round_trips(row, slots),
        ));
    }
    specs
}

/// A cache line of a message, for rings that do not keep their own word in it.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line(#[expect(dead_code, reason = "carried, not looked at")] [u64; 8]);

fn index_here(row: Row, burst: usize) -> Row {
    let row = row.granule(burst as u64);
    let (mut producer, mut consumer) = index::<u64>();
    let (mut their_producer, mut their_consumer) = rtrb::RingBuffer::new(SLOTS);
    let row = if burst == 1 {
        row.here(
            Role::Ours,
            "index ring",
            singles_here(
                1,
                OBJECT,
                move |v| producer.push(v).is_ok(),
                move || consumer.pop(),
            ),
        )
        .here(
            Role::Rival,
            "rtrb",
            singles_here(
                1,
                OBJECT,
                move |v| their_producer.push(v).is_ok(),
                move || their_consumer.pop().ok(),
            ),
        )
    } else {
        row.here(
            Role::Ours,
            "index ring, slices",
            slices_here(
                burst,
                OBJECT,
                move |from| producer.push_slice(from),
                move |to| consumer.pop_slice(to),
            ),
        )
        .here(
            Role::Rival,
            "rtrb, slices",
            slices_here(
                burst,
                OBJECT,
                move |from| their_producer.push_partial_slice(from).0.len(),
                move |to| their_consumer.pop_partial_slice(to).0.len(),
            ),
        )
    };
    let row = if burst == 1 {
        row
    } else {
        iterators_here(row, burst)
    };
    let (mut producer, mut consumer) = heapless_queue::<u64>();
    let queue = ArrayQueue::new(SLOTS);
    let same = Arc::new(queue);
    let queue = Arc::clone(&same);
    row.here(
        Role::Rival,
        "heapless spsc",
        singles_here(
            burst,
            OBJECT,
            move |v| producer.enqueue(v).is_ok(),
            move || consumer.dequeue(),
        ),
    )
    .here(
        Role::Rival,
        "crossbeam ArrayQueue",
        singles_here(
            burst,
            OBJECT,
            move |v| same.push(v).is_ok(),
            move || queue.pop(),
        ),
    )
}

/// The bursts for values that are not `Copy`, ours only.
fn iterators_here(row: Row, burst: usize) -> Row {
    let (mut producer, mut consumer) = index::<u64>();
    row.here(Role::Ours, "index ring, push_iter and drain", move |n| {
        for round in 0..n / burst as u64 {
            producer.push_iter((round..).take(burst));
            for value in consumer.drain(burst) {
                black_box(value);
            }
        }
    })
}

fn index_across(row: Row, burst: usize) -> Row {
    let row = row.granule(burst as u64);
    let (mut producer, mut consumer) = index::<u64>();
    let (mut their_producer, mut their_consumer) = rtrb::RingBuffer::new(SLOTS);
    let row = if burst == 1 {
        row.across(
            Role::Ours,
            "index ring",
            singles_near(OBJECT, move |v| producer.push(v).is_ok()),
            singles_far(move || consumer.pop()),
        )
        .across(
            Role::Rival,
            "rtrb",
            singles_near(OBJECT, move |v| their_producer.push(v).is_ok()),
            singles_far(move || their_consumer.pop().ok()),
        )
    } else {
        row.across(
            Role::Ours,
            "index ring, slices",
            slices_near(burst, OBJECT, move |from| producer.push_slice(from)),
            slices_far(burst, OBJECT, move |to| consumer.pop_slice(to)),
        )
        .across(
            Role::Rival,
            "rtrb, slices",
            slices_near(burst, OBJECT, move |from| {
                their_producer.push_partial_slice(from).0.len()
            }),
            slices_far(burst, OBJECT, move |to| {
                their_consumer.pop_partial_slice(to).0.len()
            }),
        )
    };
    let (mut producer, mut consumer) = heapless_queue::<u64>();
    let same = Arc::new(ArrayQueue::new(SLOTS));
    let queue = Arc::clone(&same);
    row.across(
        Role::Rival,
        "heapless spsc",
        singles_near(OBJECT, move |v| producer.enqueue(v).is_ok()),
        singles_far(move || consumer.dequeue()),
    )
    .across(
        Role::Rival,
        "crossbeam ArrayQueue",
        singles_near(OBJECT, move |v| same.push(v).is_ok()),
        singles_far(move || queue.pop()),
    )
}

fn messages_here(row: Row) -> Row {
    let (mut producer, mut consumer) = lap(SLOTS);
    let row = row.here(
        Role::Ours,
        "lap ring",
        singles_here(
            1,
            MESSAGE,
            move |m| producer.push(&m),
            move || consumer.pop(),
        ),
    );
    let (mut producer, mut consumer) = index::<Line>();
    let row = row.here(
        Role::Ours,
        "index ring",
        singles_here(
            1,
            LINE,
            move |m| producer.push(m).is_ok(),
            move || consumer.pop(),
        ),
    );
    let (mut producer, mut consumer) = rtrb::RingBuffer::new(SLOTS);
    let row = row.here(
        Role::Rival,
        "rtrb",
        singles_here(
            1,
            LINE,
            move |m| producer.push(m).is_ok(),
            move || consumer.pop().ok(),
        ),
    );
    let (mut producer, mut consumer) = heapless_queue::<Line>();
    row.here(
        Role::Rival,
        "heapless spsc",
        singles_here(
            1,
            LINE,
            move |m| producer.enqueue(m).is_ok(),
            move || consumer.dequeue(),
        ),
    )
}

fn messages_across(row: Row, slots: usize) -> Row {
    let (mut producer, mut consumer) = lap(slots);
    let row = row.across(
        Role::Ours,
        "lap ring",
        singles_near(MESSAGE, move |m| producer.push(&m)),
        singles_far(move || consumer.pop()),
    );
    let (mut producer, mut consumer) = index_of::<Line>(slots);
    let row = row.across(
        Role::Ours,
        "index ring",
        singles_near(LINE, move |m| producer.push(m).is_ok()),
        singles_far(move || consumer.pop()),
    );
    let (mut producer, mut consumer) = rtrb::RingBuffer::new(slots);
    row.across(
        Role::Rival,
        "rtrb",
        singles_near(LINE, move |m| producer.push(m).is_ok()),
        singles_far(move || consumer.pop().ok()),
    )
}

fn message_bursts_across(row: Row, burst: usize) -> Row {
    let row = row.granule(burst as u64);
    let (mut producer, mut consumer) = lap(SLOTS);
    let row = row.across(
        Role::Ours,
        "lap ring, push_slice",
        slices_near(burst, MESSAGE, move |from| producer.push_slice(from)),
        singles_far(move || consumer.pop()),
    );
    let (mut producer, mut consumer) = index::<Line>();
    let row = row.across(
        Role::Ours,
        "index ring, slices",
        slices_near(burst, LINE, move |from| producer.push_slice(from)),
        slices_far(burst, LINE, move |to| consumer.pop_slice(to)),
    );
    let (mut producer, mut consumer) = rtrb::RingBuffer::new(SLOTS);
    let row = row.across(
        Role::Rival,
        "rtrb, slices",
        slices_near(burst, LINE, move |from| {
            producer.push_partial_slice(from).0.len()
        }),
        slices_far(burst, LINE, move |to| {
            consumer.pop_partial_slice(to).0.len()
        }),
    );
    let (mut producer, mut consumer) = rtrb::RingBuffer::new(SLOTS);
    row.across(
        Role::Rival,
        "rtrb, one by one",
        singles_near(LINE, move |m| producer.push(m).is_ok()),
        singles_far(move || consumer.pop().ok()),
    )
}

fn round_trips(row: Row, slots: usize) -> Row {
    let ((mut there, mut at_far), (mut back, mut at_near)) = (lap(slots), lap(slots));
    let row = row.across(
        Role::Ours,
        "lap ring",
        round_near(MESSAGE, move |m| there.push(&m), move || at_near.pop()),
        round_far(move |m| back.push(&m), move || at_far.pop()),
    );
    let ((mut there, mut at_far), (mut back, mut at_near)) = (index_of(slots), index_of(slots));
    let row = row.across(
        Role::Ours,
        "index ring",
        round_near(LINE, move |m| there.push(m).is_ok(), move || at_near.pop()),
        round_far(move |m| back.push(m).is_ok(), move || at_far.pop()),
    );
    let (mut there, mut at_far) = rtrb::RingBuffer::new(slots);
    let (mut back, mut at_near) = rtrb::RingBuffer::new(slots);
    let row = row.across(
        Role::Rival,
        "rtrb",
        round_near(
            LINE,
            move |m| there.push(m).is_ok(),
            move || at_near.pop().ok(),
        ),
        round_far(move |m| back.push(m).is_ok(), move || at_far.pop().ok()),
    );
    floor::two_lines(floor::one_line(row))
}

/// `burst` objects in, the same out, one by one.
fn singles_here<T: Copy>(
    burst: usize,
    value: T,
    mut push: impl FnMut(T) -> bool,
    mut pop: impl FnMut() -> Option<T>,
) -> impl FnMut(u64) {
    move |n| {
        for _ in 0..n / burst as u64 {
            for _ in 0..burst {
                let pushed = push(black_box(value));
                debug_assert!(pushed);
            }
            for _ in 0..burst {
                let popped = black_box(pop());
                debug_assert!(popped.is_some());
            }
        }
    }
}

/// `burst` objects in, the same out, by slices.
fn slices_here<T: Copy>(
    burst: usize,
    value: T,
    mut push: impl FnMut(&[T]) -> usize,
    mut pop: impl FnMut(&mut [T]) -> usize,
) -> impl FnMut(u64) {
    let (from, mut to) = (vec![value; burst], vec![value; burst]);
    move |n| {
        for _ in 0..n / burst as u64 {
            let pushed = push(black_box(&from));
            let popped = pop(&mut to);
            black_box(&to);
            debug_assert_eq!((pushed, popped), (burst, burst));
        }
    }
}

fn singles_near<T: Copy>(value: T, mut push: impl FnMut(T) -> bool) -> impl FnMut(u64) {
    move |n| {
        let mut patience = Patience::default();
        for _ in 0..n {
            while !push(black_box(value)) {
                patience.wait();
            }
        }
    }
}

fn singles_far<T>(mut pop: impl FnMut() -> Option<T>) -> impl FnMut(u64) {
    move |n| {
        for _ in 0..n {
            black_box(patiently(&mut pop));
        }
    }
}

fn slices_near<T: Copy>(
    burst: usize,
    value: T,
    mut push: impl FnMut(&[T]) -> usize,
) -> impl FnMut(u64) {
    let from = vec![value; burst];
    move |n| {
        let mut patience = Patience::default();
        let mut left = n;
        while left != 0 {
            let wanted = burst.min(usize::try_from(left).unwrap_or(burst));
            match push(black_box(from.get(..wanted).unwrap_or_default())) {
                0 => patience.wait(),
                pushed => left -= pushed as u64,
            }
        }
    }
}

fn slices_far<T: Copy>(
    burst: usize,
    value: T,
    mut pop: impl FnMut(&mut [T]) -> usize,
) -> impl FnMut(u64) {
    let mut to = vec![value; burst];
    move |n| {
        let mut patience = Patience::default();
        let mut left = n;
        while left != 0 {
            match pop(&mut to) {
                0 => patience.wait(),
                popped => left -= popped as u64,
            }
            black_box(&to);
        }
    }
}

fn round_near<T: Copy>(
    value: T,
    mut push: impl FnMut(T) -> bool,
    mut pop: impl FnMut() -> Option<T>,
) -> impl FnMut(u64) {
    move |n| {
        for _ in 0..n {
            let pushed = push(black_box(value));
            debug_assert!(pushed);
            black_box(patiently(&mut pop));
        }
    }
}

fn round_far<T>(
    mut push: impl FnMut(T) -> bool,
    mut pop: impl FnMut() -> Option<T>,
) -> impl FnMut(u64) {
    move |n| {
        for _ in 0..n {
            let pushed = push(patiently(&mut pop));
            debug_assert!(pushed);
        }
    }
}

#[inline]
fn patiently<T>(pop: &mut impl FnMut() -> Option<T>) -> T {
    let mut patience = Patience::default();
    loop {
        match pop() {
            Some(value) => return value,
            None => patience.wait(),
        }
    }
}

// The rings lend; a row lives as long as the program, near enough.

fn index<T>() -> (Producer<'static, T>, Consumer<'static, T>) {
    index_of(SLOTS)
}

fn index_of<T>(slots: usize) -> (Producer<'static, T>, Consumer<'static, T>) {
    let slots = Box::leak((0..slots).map(|_| Slot::new()).collect());
    index_ring(Box::leak(Box::new(Indices::new())), slots).expect("a power of two of slots")
}

fn lap(slots: usize) -> (LapProducer<'static>, LapConsumer<'static>) {
    let slots = Box::leak((0..slots).map(|_| LapSlot::new()).collect());
    lap_ring(Box::leak(Box::new(Returned::new())), slots).expect("a power of two of slots")
}

fn heapless_queue<T>() -> (
    heapless::spsc::Producer<'static, T>,
    heapless::spsc::Consumer<'static, T>,
) {
    Box::leak(Box::new(Queue::<T, SLOTS>::new())).split()
}

const SLOTS: usize = 1024;
/// 1 KiB to 64 KiB of messages: within the first-level cache, and beyond.
const MESSAGE_SLOTS: [usize; 4] = [16, 64, 256, 1024];
const BURSTS: [usize; 4] = [1, 8, 32, 128];
const OBJECT: u64 = 7;
const MESSAGE: Message = [7; 7];
const LINE: Line = Line([7; 8]);
