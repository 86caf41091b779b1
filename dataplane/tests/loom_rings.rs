//! Both rings under every interleaving that loom can tell apart, and under planted mistakes.
//!
//! ```sh
//! RUSTFLAGS="--cfg loom" cargo test -p o2poll-dataplane --release --target-dir target/loom --test loom_rings
//! ```
//!
//! loom fails a model when one thread reads a slot that another writes, or the reverse, with no
//! Release-Acquire edge between the two. The last tests weaken each access of each edge to Relaxed
//! and demand that failure, so that the others' silence means something.
#![cfg(loom)]
#![allow(unsafe_code)]

use std::panic;

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;
use o2poll_dataplane::ring::{
    Consumer, Edge, Indices, LapConsumer, LapProducer, LapSlot, Producer, Returned, Side, Slot,
    index_ring, lap_ring, weaken,
};

/// A ring for one run of a model. loom's threads want `'static`; the loan is leaked.
fn index<T>(slots: usize) -> (Producer<'static, T>, Consumer<'static, T>) {
    let indices = Box::leak(Box::new(Indices::new()));
    let slots = Vec::leak((0..slots).map(|_| Slot::new()).collect());
    index_ring(indices, slots).unwrap()
}

fn lap(slots: usize) -> (LapProducer<'static>, LapConsumer<'static>) {
    let returned = Box::leak(Box::new(Returned::new()));
    let slots = Vec::leak((0..slots).map(|_| LapSlot::new()).collect());
    lap_ring(returned, slots).unwrap()
}

/// Checks `model` under at most `preemptions` forced switches per run; all of them if `None`.
fn check(preemptions: Option<usize>, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = preemptions;
    builder.check(model);
}

fn index_singles() {
    check(None, || {
        let (mut producer, mut consumer) = index(2);
        let sender = thread::spawn(move || {
            for value in 0..3 {
                while producer.push(value).is_err() {
                    thread::yield_now();
                }
            }
        });
        for value in 0..3 {
            let popped = loop {
                match consumer.pop() {
                    Some(popped) => break popped,
                    None => thread::yield_now(),
                }
            };
            assert_eq!(popped, value);
        }
        assert!(consumer.is_empty());
        sender.join().unwrap();
    });
}

fn lap_singles() {
    check(Some(3), || {
        // Four slots, six messages: the lap changes, and no message but the first four goes out before
        // a slot has come back.
        let (mut producer, mut consumer) = lap(4);
        let sender = thread::spawn(move || {
            for value in 0..6 {
                while !producer.push(&[value; 7]) {
                    thread::yield_now();
                }
            }
        });
        for value in 0..6 {
            let popped = loop {
                match consumer.pop() {
                    Some(popped) => break popped,
                    None => thread::yield_now(),
                }
            };
            assert_eq!(popped, [value; 7]);
        }
        assert_eq!(consumer.peek(), None);
        sender.join().unwrap();
    });
}

fn lap_bursts() {
    check(Some(3), || {
        let (mut producer, mut consumer) = lap(4);
        let sender = thread::spawn(move || {
            let messages = [[0; 7], [1; 7], [2; 7], [3; 7], [4; 7], [5; 7]];
            // Three, so that the second burst lies across the end.
            for mut burst in [&messages[..3], &messages[3..]] {
                while !burst.is_empty() {
                    let sent = producer.push_slice(burst);
                    if sent == 0 {
                        thread::yield_now();
                    }
                    burst = &burst[sent..];
                }
            }
        });
        for value in 0..6 {
            let popped = loop {
                match consumer.pop() {
                    Some(popped) => break popped,
                    None => thread::yield_now(),
                }
            };
            assert_eq!(popped, [value; 7]);
            if value == 0 {
                assert_eq!(consumer.peek(), Some([1; 7]), "half a burst was seen");
            }
        }
        sender.join().unwrap();
    });
}

/// The software device's wire: a request ring and an acknowledgement ring, and memory that belongs to no ring.
/// The responder reads the initiator's source and writes its sink between request and acknowledgement; the
/// initiator touches both before and after, and nobody locks anything.
fn requests_and_acknowledgements() {
    check(Some(3), || {
        let (mut requests, mut asked) = lap(4);
        let (mut answers, mut acknowledged) = lap(4);
        let memory = Arc::new([UnsafeCell::new(0_u64), UnsafeCell::new(0_u64)]);
        let theirs = Arc::clone(&memory);
        let responder = thread::spawn(move || {
            let [source, sink] = &*theirs;
            for _ in 0..2 {
                let request = popped(&mut asked);
                // SAFETY: loom fails the model if anybody may be writing.
                let copied = source.with(|source| unsafe { *source });
                assert_eq!(copied, request[0]);
                // SAFETY: loom fails the model if anybody else may be looking.
                sink.with_mut(|sink| unsafe { *sink = copied + 100 });
                while !answers.push(&request) {
                    thread::yield_now();
                }
            }
        });
        let [source, sink] = &*memory;
        for round in 1..=2 {
            // SAFETY: as above.
            source.with_mut(|source| unsafe { *source = round });
            while !requests.push(&[round; 7]) {
                thread::yield_now();
            }
            assert_eq!(popped(&mut acknowledged), [round; 7]);
            // SAFETY: as above.
            assert_eq!(sink.with(|sink| unsafe { *sink }), round + 100);
        }
        responder.join().unwrap();
    });
}

fn popped(consumer: &mut LapConsumer<'static>) -> [u64; 7] {
    loop {
        match consumer.pop() {
            Some(message) => return message,
            None => thread::yield_now(),
        }
    }
}

#[test]
fn memory_changes_hands_by_request_and_acknowledgement_alone() {
    requests_and_acknowledgements();
}

#[test]
fn index_ring_hands_over_one_by_one_round_the_end() {
    index_singles();
}

#[test]
fn index_ring_hands_over_slices_round_the_end() {
    index_slices();
}

fn index_slices() {
    check(None, || {
        let (mut producer, mut consumer) = index(2);
        let sender = thread::spawn(move || {
            // One ahead, so that a burst of two lies across the end.
            let mut rest: &[u32] = &[0];
            let mut more: &[u32] = &[1, 2];
            while !rest.is_empty() {
                let pushed = producer.push_slice(rest);
                if pushed == 0 {
                    thread::yield_now();
                }
                rest = &rest[pushed..];
                if rest.is_empty() {
                    rest = core::mem::take(&mut more);
                }
            }
        });
        let mut got = Vec::new();
        while got.len() < 3 {
            let mut to = [u32::MAX; 2];
            let popped = consumer.pop_slice(&mut to);
            if popped == 0 {
                thread::yield_now();
            }
            got.extend_from_slice(&to[..popped]);
        }
        assert_eq!(got, [0, 1, 2]);
        sender.join().unwrap();
    });
}

#[test]
fn index_ring_hands_over_reserved_places_together_and_drains_them() {
    check(None, || {
        let (mut producer, mut consumer) = index(2);
        let sender = thread::spawn(move || {
            for pair in [[0, 1], [2, 3]] {
                let mut places = loop {
                    match producer.reserve(2) {
                        Some(places) => break places,
                        None => thread::yield_now(),
                    }
                };
                for value in pair {
                    places.push(Box::new(value)).unwrap();
                }
            }
        });
        let mut got = Vec::new();
        while got.len() < 4 {
            let seen = consumer.len();
            assert_eq!(seen % 2, 0, "half a reservation was seen");
            if seen == 0 {
                thread::yield_now();
            }
            got.extend(consumer.drain(seen).map(|value| *value));
        }
        assert_eq!(got, [0, 1, 2, 3]);
        sender.join().unwrap();
    });
}

#[test]
fn a_full_index_ring_refuses_and_loses_nothing() {
    check(None, || {
        let (mut producer, mut consumer) = index(2);
        let sender = thread::spawn(move || {
            let free = producer.free();
            let pushed = producer.push_iter(0..4);
            assert!((free..=4).contains(&pushed));
            pushed
        });
        let mut got: Vec<u32> = consumer.pop().into_iter().chain(consumer.pop()).collect();
        let pushed = sender.join().unwrap();
        got.extend(consumer.drain(usize::MAX));
        assert_eq!(got, (0..4).take(pushed).collect::<Vec<_>>());
    });
}

#[test]
fn lap_ring_hands_over_and_returns_credits_round_the_end() {
    lap_singles();
}

#[test]
fn lap_ring_hands_over_bursts_complete_and_round_the_end() {
    lap_bursts();
}

#[test]
fn lap_ring_returns_credits_by_the_quarter() {
    check(Some(2), || {
        // Eight slots: two go back together.
        let (mut producer, mut consumer) = lap(8);
        let sender = thread::spawn(move || {
            for value in 0..10 {
                while !producer.push(&[value; 7]) {
                    thread::yield_now();
                }
            }
            producer
        });
        for value in 0..10 {
            let popped = loop {
                match consumer.pop() {
                    Some(popped) => break popped,
                    None => thread::yield_now(),
                }
            };
            assert_eq!(popped, [value; 7]);
        }
        assert_eq!(sender.join().unwrap().room(), 8);
    });
}

#[test]
fn a_full_lap_ring_refuses_and_loses_nothing() {
    check(Some(3), || {
        let (mut producer, mut consumer) = lap(4);
        let sender = thread::spawn(move || {
            let room = producer.room();
            let sent = (0..6).take_while(|n| producer.push(&[*n; 7])).count();
            assert!(sent >= room as usize);
            sent
        });
        let mut got: Vec<_> = (0..3).filter_map(|_| consumer.pop()).collect();
        let sent = sender.join().unwrap();
        got.extend(core::iter::from_fn(|| consumer.pop()));
        assert_eq!(got, (0..6).take(sent).map(|n| [n; 7]).collect::<Vec<_>>());
    });
}

/// Weakens one access and demands that `model` fails, and fails for that.
fn caught(edge: Edge, side: Side, model: fn()) {
    let run = std::thread::spawn(move || {
        weaken(edge, side);
        panic::catch_unwind(model)
    });
    let Err(reason) = run.join().unwrap() else {
        panic!("{edge:?}: a Relaxed access in place of {side:?} goes unnoticed");
    };
    let text = reason
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| reason.downcast_ref::<&str>().copied())
        .unwrap_or_default();
    assert!(
        text.contains("Causality violation"),
        "{edge:?} {side:?}: failed for another reason: {text}"
    );
}

#[test]
fn every_weakened_access_of_the_index_ring_is_caught() {
    for edge in [Edge::Tail, Edge::Head] {
        for side in [Side::Release, Side::Acquire] {
            caught(edge, side, index_singles);
            caught(edge, side, index_slices);
        }
    }
}

#[test]
fn every_weakened_access_of_the_lap_ring_is_caught() {
    for edge in [Edge::Lap, Edge::Returned] {
        for side in [Side::Release, Side::Acquire] {
            caught(edge, side, lap_singles);
            caught(edge, side, lap_bursts);
        }
    }
    for side in [Side::Release, Side::Acquire] {
        caught(Edge::Lap, side, requests_and_acknowledgements);
    }
}
