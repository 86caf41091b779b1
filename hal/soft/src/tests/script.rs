//! One device against a peer that is played from a script: what no well-behaved device would send.

use std::collections::VecDeque;
use std::vec::Vec;

use o2poll_dataplane::nic::{Nic, Rights, SendWr, Status, WrId};

use super::pair::{End, Hoard, LIMITS};
use crate::conformance::{done, failed, received};
use crate::packet::{Body, Flags, Opcode, Packet, Route};
use crate::{Memory, Profile, QueuePair, Wire};

#[derive(Default)]
struct Script {
    arriving: VecDeque<Packet>,
    sent: Vec<Packet>,
}

impl Wire for Script {
    fn ports(&self) -> u16 {
        2
    }

    fn send(&mut self, port: u16, packet: &Packet) -> bool {
        assert_eq!(port, 0);
        self.sent.push(*packet);
        true
    }

    fn peek(&mut self, port: u16) -> Option<Packet> {
        self.arriving.front().copied().filter(|_| port == 0)
    }

    fn pop(&mut self, _port: u16) {
        self.arriving.pop_front();
    }
}

/// Queue pair 1, whose peer is 2, with so deep queues.
fn alone(hoard: &mut Hoard, depth: u32) -> End<Script> {
    let pair = QueuePair::new(1, 0, 2, depth, depth);
    let limits = crate::Limits {
        send_wr: depth,
        ..LIMITS
    };
    End::new(hoard, Profile::frwr(), limits, Script::default(), pair)
}

/// Delivers packets and polls; the opcodes that went out.
fn play(end: &mut End<Script>, packets: &[Packet]) -> Vec<Opcode> {
    end.soft.wire().arriving.extend(packets);
    end.step();
    let sent = core::mem::take(&mut end.soft.wire().sent);
    sent.iter().map(Packet::opcode).collect()
}

fn says(opcode: Opcode, psn: u32) -> Packet {
    Packet::bare(opcode, 1, 2, psn)
}

/// A SEND of queue pair 2.
fn request(flags: Flags, remaining: u32, span: crate::Span) -> Packet {
    let body = body(0, remaining, span);
    Packet::request(Opcode::Send, flags, Route::new(1, 2), &body)
}

fn body(psn: u32, remaining: u32, span: crate::Span) -> Body {
    Body {
        psn,
        remaining,
        address: 0,
        rkey: 0,
        extra: 0,
        spans: (span, crate::Span::EMPTY),
    }
}

fn send(end: &mut End<Script>, id: u64) {
    let wr = SendWr::Send {
        message: end.arena.sge(0, 8),
        invalidate: None,
    };
    end.soft.queue(end.qp, WrId(id), true, wr);
    end.soft.doorbell(end.qp).unwrap();
}

#[test]
fn an_answer_to_what_was_never_asked_is_ignored() {
    let mut hoard = Hoard::default();
    let mut end = alone(&mut hoard, 8);
    send(&mut end, 1);
    let strange = [
        says(Opcode::Ack, 2),
        says(Opcode::Ack, u32::MAX),
        says(Opcode::Ack, 1 << 31),
        says(Opcode::ReceiverNotReady, 5),
        says(Opcode::SequenceError, 5),
    ];
    assert_eq!(play(&mut end, &strange), [Opcode::Send]);
    assert_eq!(end.take(), []);
    play(&mut end, &[says(Opcode::Ack, 1)]);
    assert_eq!(end.take(), [done(1)]);
    // Nothing is under way: nobody to fail.
    play(
        &mut end,
        &[says(Opcode::RefusedAccess, 1), says(Opcode::Gone, 0)],
    );
    send(&mut end, 2);
    play(&mut end, &[says(Opcode::Ack, 2)]);
    assert_eq!(end.take(), [done(2)]);
}

#[test]
fn a_late_acknowledgement_overtakes_the_second_try() {
    let mut hoard = Hoard::default();
    let mut end = alone(&mut hoard, 1);
    send(&mut end, 1);
    // Back to the start, and before anything is sent again it turns out to have been done.
    play(&mut end, &[says(Opcode::ReceiverNotReady, 0)]);
    play(&mut end, &[says(Opcode::Ack, 1)]);
    assert_eq!(end.take(), [done(1)]);
    // The next one takes the same slot, and is another request.
    send(&mut end, 2);
    for _ in 0..200 {
        end.step();
    }
    assert_eq!(end.take(), []);
    let sent = core::mem::take(&mut end.soft.wire().sent);
    assert_eq!(sent.last().map(Packet::psn), Some(1));
    play(&mut end, &[says(Opcode::Ack, 2)]);
    assert_eq!(end.take(), [done(2)]);
}

#[test]
fn a_message_that_makes_no_sense_is_refused() {
    let part = |flags, remaining| request(flags, remaining, crate::Span::EMPTY);
    let nonsense = [
        part(Flags::LAST, 0),
        part(Flags::FIRST | Flags::LAST, 1),
        part(Flags::FIRST, 0),
        part(Flags::FIRST, 9),
        part(Flags::empty(), 9),
    ];
    for packet in nonsense {
        let mut hoard = Hoard::default();
        let mut end = alone(&mut hoard, 8);
        end.post(1, 0, 64);
        assert_eq!(play(&mut end, &[packet]), [Opcode::RefusedRequest]);
        assert_eq!(end.take(), [failed(1, Status::Flushed)]);
    }
    let mut hoard = Hoard::default();
    let mut end = alone(&mut hoard, 8);
    end.post(1, 0, 64);
    let whole = part(Flags::FIRST | Flags::LAST, 0);
    assert_eq!(play(&mut end, &[whole]), [Opcode::Ack]);
    assert_eq!(end.take(), [received(1, 0)]);
    // Again: acknowledged, not carried out.
    end.post(2, 0, 64);
    assert_eq!(play(&mut end, &[whole]), [Opcode::Ack]);
    assert_eq!(end.take(), []);
}

#[test]
fn somebody_elses_packets_are_turned_away() {
    let mut hoard = Hoard::default();
    let mut end = alone(&mut hoard, 8);
    end.post(1, 0, 64);
    send(&mut end, 2);
    end.soft.wire().sent.clear();
    let from = |opcode, destination, source| {
        let route = Route::new(destination, source);
        Packet::request(opcode, Flags::WHOLE, route, &body(1, 0, crate::Span::EMPTY))
    };
    let foreign = [
        from(Opcode::Send, 1, 3),
        from(Opcode::Send, 3, 2),
        from(Opcode::Close, 1, 4),
        from(Opcode::Ack, 1, 3),
    ];
    assert_eq!(play(&mut end, &foreign), [Opcode::Gone; 3]);
    assert_eq!(end.take(), []);
    assert_eq!(end.soft.counts().strangers, 4);
}

#[test]
fn memory_that_is_only_read_is_never_written() {
    let mut hoard = Hoard::default();
    let mut end = alone(&mut hoard, 8);
    let base = hoard.bytes(64);
    // SAFETY: the hoard outlives the device.
    #[allow(unsafe_code)]
    let memory = unsafe { Memory::new(base, 64, 0) }.with_rights(Rights::empty());
    let lkey = end.soft.register(memory).unwrap();
    let piece = o2poll_dataplane::nic::Sge {
        address: base.as_ptr() as u64,
        length: 64,
        lkey,
    };
    for (rights, status) in [
        (Rights::REMOTE_READ, None),
        (Rights::REMOTE_WRITE, Some(Status::Bind)),
    ] {
        let (region, key) = end.soft.adopt_window(crate::Window::new(0)).unwrap();
        let wr = SendWr::Register {
            region,
            key,
            rights,
            base: 0,
            length: 64,
            layout: o2poll_dataplane::nic::Layout::Fragments(&[piece]),
        };
        end.soft.queue(end.qp, WrId(1), true, wr);
        end.soft.doorbell(end.qp).unwrap();
        end.step();
        assert_eq!(
            end.take(),
            [status.map_or(done(1), |status| failed(1, status))]
        );
    }
    // Nor by a message.
    let mut end = alone(&mut hoard, 8);
    // SAFETY: as above.
    #[allow(unsafe_code)]
    let memory = unsafe { Memory::new(base, 64, 0) }.with_rights(Rights::empty());
    let lkey = end.soft.register(memory).unwrap();
    let into = o2poll_dataplane::nic::ReceiveQueue::Of(end.qp);
    let buffer = o2poll_dataplane::nic::Sge { lkey, ..piece };
    end.soft.receive(into, WrId(1), buffer).unwrap();
    let source = end.arena.sge(0, 8);
    let span = crate::Span::of_packet(source.address, 8);
    let packet = request(Flags::WHOLE, 8, span);
    assert_eq!(play(&mut end, &[packet]), [Opcode::RefusedOperation]);
    assert_eq!(end.take(), [failed(1, Status::LocalProtection)]);
}

#[test]
fn a_flushed_registration_gives_its_place_back() {
    let mut hoard = Hoard::default();
    let mut end = alone(&mut hoard, 8);
    let other = end.soft.adopt(QueuePair::new(5, 0, 6, 8, 8)).unwrap();
    let (region, key) = end.soft.adopt_window(crate::Window::new(0)).unwrap();
    let list = [end.arena.sge(0, 64)];
    let wr = SendWr::Register {
        region,
        key,
        rights: Rights::REMOTE_WRITE,
        base: 0,
        length: 64,
        layout: o2poll_dataplane::nic::Layout::Fragments(&list),
    };
    end.soft.fail(end.qp);
    end.soft.queue(end.qp, WrId(1), true, wr);
    end.soft.doorbell(end.qp).unwrap();
    end.soft.queue(other, WrId(2), true, wr);
    end.soft.doorbell(other).unwrap();
    end.step();
    assert_eq!(end.take(), [failed(1, Status::Flushed), done(2)]);
    // The same when its queue pair is retired with the chain open.
    end.soft
        .queue(other, WrId(3), true, SendWr::Invalidate { key });
    end.soft.doorbell(other).unwrap();
    end.soft.queue(other, WrId(4), true, wr);
    end.soft.retire(other).unwrap();
    let next = end.soft.adopt(QueuePair::new(7, 0, 8, 8, 8)).unwrap();
    end.soft.queue(next, WrId(5), true, wr);
    end.soft.doorbell(next).unwrap();
    end.step();
    assert_eq!(end.take(), [done(3), done(5)]);
}

/// Whichever was set first, and also where one is set while the device looks at the others'.
#[test]
fn timers_of_all_queue_pairs_run_out_in_their_time() {
    const TIMEOUT: u32 = 40;
    const BEGINS: [u32; 6] = [0, 7, 41, 44, 300, 1000];
    let mut hoard = Hoard::default();
    let mut profile = Profile::frwr();
    profile.ack_timeout = TIMEOUT;
    let pair = |number| QueuePair::new(number, 0, number + 100, 8, 8);
    let mut end = End::new(&mut hoard, profile, LIMITS, Script::default(), pair(1));
    let others: Vec<_> = (2..=6)
        .map(|number| end.soft.adopt(pair(number)).unwrap())
        .collect();
    let all: Vec<_> = core::iter::once(end.qp).chain(others).collect();
    let mut ends = [None; BEGINS.len()];
    for poll in 0..3000 {
        for ((qp, begin), id) in all.iter().zip(BEGINS).zip(0..) {
            if begin == poll {
                end.qp = *qp;
                send(&mut end, id);
            }
        }
        end.step();
        for (id, over) in (0..).zip(&mut ends) {
            let gone = failed(id, Status::RetryExceeded);
            if end.seen.contains(&gone) && over.is_none() {
                *over = Some(poll);
            }
        }
    }
    // The first try and seven more, then as often that it be let go; and for each a round over all queue pairs, or two.
    let least = 16 * TIMEOUT;
    let most = 16 * (TIMEOUT + 2 * 6);
    for (begin, over) in BEGINS.iter().zip(ends) {
        let took = over.unwrap() - begin;
        assert!((least..=most).contains(&took), "{took} polls");
    }
}

#[test]
fn a_poll_moves_no_more_than_a_long_slice() {
    let mut hoard = Hoard::default();
    let mut profile = Profile::frwr();
    (profile.slice, profile.alone) = (8, 4);
    let pair = QueuePair::new(1, 0, 2, 32, 32);
    let mut end = End::new(&mut hoard, profile, LIMITS, Script::default(), pair);
    for id in 0..16 {
        end.post(id, 64 * id as usize, 64);
    }
    let source = end.arena.sge(4096, 24);
    let span = crate::Span::of_packet(source.address, 24);
    let all: Vec<_> = (0..16)
        .map(|psn| {
            Packet::request(
                Opcode::Send,
                Flags::WHOLE,
                Route::new(1, 2),
                &body(psn, 24, span),
            )
        })
        .collect();
    play(&mut end, &all);
    assert!(
        end.soft.counts().bytes <= 32,
        "{} bytes in one poll",
        end.soft.counts().bytes
    );
}
