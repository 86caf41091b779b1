//! A wire with a tap is the same wire, and nothing that passes is missed.

use core::sync::atomic::{AtomicU64, Ordering};
use std::vec::Vec;

use o2poll_dataplane::nic::{Completion, Nic, SendWr, WrId};
use o2poll_dataplane::ring::{Indices, Slot};

use super::pair::{End, Hoard, LIMITS, wires};
use crate::{Flags, Opcode, Passed, Ports, Profile, QueuePair, Reader, Tap, Timer, recorder};

/// Says how often it was asked.
#[derive(Debug, Default)]
struct Count(AtomicU64);

impl Timer for &Count {
    fn now(&self) -> u64 {
        self.0.fetch_add(1, Ordering::Relaxed)
    }
}

type Tapped = Tap<'static, Ports<'static, 'static>, &'static Count>;

struct Both {
    a: End<Tapped>,
    b: End<Tapped>,
    readers: [Reader<'static>; 2],
    _hoard: Hoard,
}

/// Two devices over rings of so many slots, with taps of so many chunks.
fn connected(wire: usize, tap: usize) -> Both {
    let mut hoard = Hoard::default();
    let (near, far) = wires(&mut hoard, wire);
    let order: &'static AtomicU64 = &hoard.lend(1, || AtomicU64::new(0))[0];
    let count: &'static Count = &hoard.lend(1, Count::default)[0];
    let mut on = |wire| {
        let indices = &mut hoard.lend(1, Indices::new)[0];
        let slots = hoard.lend(tap, Slot::new);
        let (recorder, reader) = recorder(indices, slots, order, count).unwrap();
        (Tap::on(wire, recorder), reader)
    };
    let (near, near_reader) = on(near);
    let (far, far_reader) = on(far);
    let pair = |number, peer| QueuePair::new(number, 0, peer, 32, 32);
    Both {
        a: End::new(&mut hoard, Profile::frwr(), LIMITS, near, pair(1, 2)),
        b: End::new(&mut hoard, Profile::frwr(), LIMITS, far, pair(2, 1)),
        readers: [near_reader, far_reader],
        _hoard: hoard,
    }
}

impl Both {
    /// What has passed since, with its bytes, in order.
    fn passed(&mut self) -> Vec<(Passed, Vec<u8>)> {
        let mut all = Vec::new();
        for reader in &mut self.readers {
            let mut bytes = Vec::new();
            while let Some(passed) = reader.next(|piece| bytes.extend_from_slice(piece)) {
                all.push((passed, core::mem::take(&mut bytes)));
            }
        }
        all.sort_by_key(|(passed, _)| passed.order);
        all
    }

    fn send(&mut self, length: u32) {
        let message = self.a.arena.sge(0, length);
        let wr = SendWr::Send {
            message,
            invalidate: None,
        };
        self.a.soft.queue(self.a.qp, WrId(1), true, wr);
        self.a.soft.doorbell(self.a.qp).unwrap();
    }
}

#[test]
fn what_passes_is_told_with_its_bytes_and_an_answer_after_what_it_answers() {
    let mut both = connected(64, 64);
    let bytes: Vec<u8> = (0..3000_u32).map(|n| n as u8).collect();
    both.a.arena.write(0, &bytes);
    for (round, length) in [3000_u32, 0, 1, 256, 257].into_iter().enumerate() {
        both.b.post(2, 4096, 4096);
        both.send(length);
        for _ in 0..5 {
            both.a.step();
            both.b.step();
        }
        assert!(both.a.take().contains(&Completion::Done { id: WrId(1) }));
        let passed = both.passed();
        let [(sent, content), (answered, none)] = &passed[..] else {
            panic!("{passed:?}")
        };
        assert_eq!(
            (sent.order, answered.order),
            (2 * round as u64, 2 * round as u64 + 1)
        );
        assert_eq!((sent.time, answered.time), (sent.order, answered.order));
        let (said, answer) = (sent.said.unwrap(), answered.said.unwrap());
        assert_eq!(
            (said.opcode, said.flags),
            (Opcode::Send, Flags::FIRST | Flags::LAST)
        );
        assert_eq!((said.source, said.destination, said.length), (1, 2, length));
        assert_eq!(content[..], bytes[..length as usize]);
        assert_eq!((answer.opcode, answer.psn), (Opcode::Ack, round as u32 + 1));
        assert!(none.is_empty());
    }
}

#[test]
fn a_full_tap_is_a_full_wire_and_nothing_is_missed() {
    let mut both = connected(64, 4);
    for round in 0..20 {
        both.b.post(round, 4096, 512);
    }
    for _ in 0..20 {
        both.send(300);
    }
    let mut passed = Vec::new();
    let mut completed = 0;
    for _ in 0..2000 {
        both.a.step();
        both.b.step();
        completed += both.a.take().len();
        if completed == 0 && passed.is_empty() {
            // One packet fits beside nothing: the others wait, however often they are tried.
            let first = both.passed();
            assert_eq!(
                first
                    .iter()
                    .filter(|(p, _)| p.said.is_some_and(|s| s.opcode == Opcode::Send))
                    .count(),
                1
            );
            passed.extend(first);
        } else {
            passed.extend(both.passed());
        }
    }
    assert_eq!(completed, 20);
    let sends = passed.iter().filter(|(passed, content)| {
        passed.said.is_some_and(|said| said.opcode == Opcode::Send) && content.len() == 300
    });
    assert_eq!(sends.count(), 20);
    let mut orders: Vec<u64> = passed.iter().map(|(passed, _)| passed.order).collect();
    orders.sort_unstable();
    assert!(orders.iter().copied().eq(0..orders.len() as u64));
    assert_eq!(both.b.take().len(), 20);
}

#[test]
fn what_found_the_wire_full_is_told_as_nothing_and_leaves_no_gap() {
    let mut both = connected(4, 256);
    for round in 0..16 {
        both.b.post(round, 4096, 512);
    }
    for _ in 0..16 {
        both.send(10);
    }
    // The peer does not look: the wire stays full.
    for _ in 0..10 {
        both.a.step();
    }
    let mut passed = both.passed();
    let void = passed.iter().filter(|(passed, _)| passed.said.is_none());
    assert!(void.count() > 5);
    for _ in 0..200 {
        both.a.step();
        both.b.step();
        passed.extend(both.passed());
    }
    assert_eq!(both.a.take().len(), 16);
    let orders: Vec<u64> = passed.iter().map(|(passed, _)| passed.order).collect();
    assert!(
        orders.iter().copied().eq(0..orders.len() as u64),
        "{orders:?}"
    );
    let psns: Vec<u32> = passed
        .iter()
        .filter_map(|(passed, _)| passed.said.filter(|said| said.opcode == Opcode::Send))
        .map(|said| said.psn)
        .collect();
    assert!(psns.into_iter().eq(0..16));
}

/// More bytes than the ring holds: the first of them, and the packet goes its way.
#[test]
fn a_packet_that_is_too_long_for_the_ring_is_cut() {
    let mut both = connected(64, 4);
    both.b.post(2, 4096, 4096);
    both.send(4000);
    for _ in 0..5 {
        both.a.step();
        both.b.step();
    }
    let passed = both.passed();
    let (sent, content) = &passed[0];
    assert_eq!((sent.said.unwrap().length, sent.captured), (4000, 768));
    assert_eq!(content.len(), 768);
    assert!(
        recorder(
            &mut Indices::new(),
            &mut [Slot::new()],
            &AtomicU64::new(0),
            &Count::default()
        )
        .is_none()
    );
}
