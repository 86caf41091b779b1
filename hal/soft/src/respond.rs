//! The responder: runs what peers ask, against our own keys, and says what came of it.

use o2poll_dataplane::nic::{Completion, RKey, Rights, Status, WrId};

use crate::Soft;
use crate::bytes::{self, Pair, Pieces, Span};
use crate::completion::{CompletionEntry, Side};
use crate::packet::{Flags, Opcode, Packet, before};
use crate::queue_pair::{Incoming, State};
use crate::wire::Wire;

/// What became of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    /// It is done with.
    Done,
    /// More of it at the next poll.
    Again,
}

/// What a poll may still take in.
struct Left {
    bytes: u32,
    packets: u32,
    /// A long slice may be granted yet: once per poll.
    may_grow: bool,
}

/// How a request for data went, so far.
enum Verdict {
    /// So many bytes were moved, of so many that were left in the packet.
    Moved(u32),
    NotReady,
    /// Refused so.
    Refused(Opcode),
    /// Refused so, and the receive that it was for fails.
    Spoilt(Opcode, Status),
}

impl<W: Wire> Soft<'_, W> {
    /// Takes in what has arrived, up to the slice and the number of packets of one poll.
    #[inline(always)]
    pub(crate) fn take_in(&mut self) {
        let mut left = Left {
            bytes: self.profile.slice,
            packets: self.profile.packets,
            may_grow: true,
        };
        let ports = self.wire.ports();
        let mut port = self.port;
        for _ in 0..ports {
            if port >= ports {
                port = 0;
            }
            if let Some(packet) = self.wire.peek(port) {
                self.take_from(port, packet, &mut left);
            }
            port = port.wrapping_add(1);
        }
        self.port = self.port.wrapping_add(1);
        if self.port >= ports {
            self.port = 0;
        }
    }

    /// Takes in what has arrived on a port, of which this is the first packet.
    #[inline(never)]
    fn take_from(&mut self, port: u16, first: Packet, left: &mut Left) {
        let mut packet = first;
        while left.packets != 0 && left.bytes != 0 {
            // The bytes of the next are in another core's cache, or in memory: they come while this one is
            // served.
            self.wire.prefetch(port);
            let slice = self.profile.slice;
            if left.may_grow
                && left.bytes == slice
                && packet.length() > slice
                && self.is_alone(port)
            {
                left.may_grow = false;
                left.bytes = slice.saturating_mul(self.profile.alone);
            }
            if self.take(port, &packet, &mut left.bytes) == Outcome::Again {
                break;
            }
            self.wire.pop(port);
            left.packets = left.packets.wrapping_sub(1);
            match self.wire.peek(port) {
                Some(next) => packet = next,
                None => break,
            }
        }
    }

    /// Whether no other port has a packet.
    #[cold]
    fn is_alone(&mut self, port: u16) -> bool {
        (0..self.wire.ports()).all(|other| other == port || self.wire.peek(other).is_none())
    }

    #[inline(always)]
    fn take(&mut self, port: u16, packet: &Packet, bytes: &mut u32) -> Outcome {
        let Some(index) = self.table.receiver(packet.route(), port) else {
            self.on_stranger(port, packet);
            return Outcome::Done;
        };
        let psn = packet.psn();
        match packet.opcode() {
            Opcode::Send | Opcode::Write | Opcode::Read => {
                if self.take_whole(index, packet, bytes) {
                    return Outcome::Done;
                }
                return self.request(index, packet, bytes);
            }
            Opcode::Ack => self.on_ack(index, psn),
            Opcode::ReceiverNotReady => self.on_not_ready(index, psn),
            Opcode::SequenceError => self.on_sequence_error(index, psn),
            Opcode::RefusedAccess | Opcode::RefusedRequest | Opcode::RefusedOperation => {
                let verdict = packet.opcode().verdict().unwrap_or(Status::RemoteOperation);
                self.on_refused(index, psn, verdict);
                // The peer may be waiting for us to let go.
                self.answer(index, Opcode::Closed);
            }
            Opcode::Gone => self.on_gone(index, Status::RetryExceeded),
            Opcode::Closed => self.on_refused(index, psn, Status::RetryExceeded),
            Opcode::Close => {
                if let Some(slot) = self.table.slot(index) {
                    slot.deaf = true;
                }
                self.answer(index, Opcode::Closed);
            }
        }
        Outcome::Done
    }

    /// A packet for a queue pair that is not here.
    #[cold]
    fn on_stranger(&mut self, port: u16, packet: &Packet) {
        self.counts.strangers = self.counts.strangers.wrapping_add(1);
        if !matches!(
            packet.opcode(),
            Opcode::Send | Opcode::Write | Opcode::Read | Opcode::Close
        ) {
            return;
        }
        let answer = (port, packet.source(), packet.destination());
        if self.strangers.iter().all(|waiting| *waiting != answer) {
            // Without room it is lost like any packet, and the stranger asks again.
            let _full = self.strangers.push_back(answer);
            self.timers.set(self.polls);
        }
    }

    /// The common case, in one go: the next packet is a whole SEND or WRITE of one span, it fits into what this
    /// poll may move, and nothing is wrong with it. Else false, and nothing was
    /// done (`remote` has looked at the whole length, so a WRITE does not stop half way).
    #[inline(always)]
    fn take_whole(&mut self, index: u32, packet: &Packet, bytes: &mut u32) -> bool {
        let Some(mut held) = self.table.held(index) else {
            return false;
        };
        let slot = held.slot;
        let (Some(pair), Some(from)) = (&slot.pair, packet.whole()) else {
            return false;
        };
        let length = from.length();
        let plain = packet.psn() == slot.expected
            && slot.state == State::Ready
            && !slot.deaf
            // Nor is a part of a packet done.
            && slot.incoming.is_none()
            && length <= *bytes;
        if !plain {
            return false;
        }
        match packet.opcode() {
            Opcode::Send => {
                let position = slot.recv_head;
                if position == slot.recv_tail {
                    return false;
                }
                let Some(receive) = held.receives.at(position) else {
                    return false;
                };
                if length > receive.buffer.length {
                    return false;
                }
                if length != 0 {
                    let Some(sink) = self.keys.base_sink(pair.pd, receive.buffer) else {
                        return false;
                    };
                    bytes::move_whole(self.copier, sink, from);
                }
                slot.recv_head = position.wrapping_add(1);
                self.completions.push(CompletionEntry {
                    completion: Completion::Received {
                        id: receive.id,
                        length,
                        imm: None,
                        invalidated: None,
                    },
                    queue_pair: index,
                    generation: slot.generation,
                    side: Side::Receive,
                    frees: slot.recv_head,
                });
            }
            Opcode::Write if length != 0 => {
                let (address, key) = packet.remote();
                let (asker, key) = (pair.asker(), RKey(key));
                let right = Rights::REMOTE_WRITE;
                let piece = self.keys.remote_piece(asker, key, address, length, right);
                if let Some(sink) = piece {
                    bytes::move_whole(self.copier, sink, from);
                } else {
                    let keys = &self.keys;
                    let Some(mut sink) = keys.remote(asker, key, address, length, right) else {
                        return false;
                    };
                    let mut from = Pair(from, Span::EMPTY);
                    if bytes::run(self.copier, &mut sink, &mut from, length) != length {
                        return false;
                    }
                }
            }
            _ => return false,
        }
        *bytes = bytes.wrapping_sub(length);
        self.counts.bytes = self.counts.bytes.wrapping_add(u64::from(length));
        slot.gap = false;
        slot.expected = slot.expected.wrapping_add(1);
        // Who is ready has refused nothing.
        slot.answer = Some(Opcode::Ack);
        if !slot.listed {
            self.table.list(index);
        }
        true
    }

    /// A packet with data, or for data.
    #[inline(never)]
    fn request(&mut self, index: u32, packet: &Packet, bytes: &mut u32) -> Outcome {
        let Some(slot) = self.table.slot(index) else {
            return Outcome::Done;
        };
        if slot.deaf {
            return Outcome::Done;
        }
        if slot.state != State::Ready {
            let refusal = slot.refusal;
            self.answer(index, refusal);
            return Outcome::Done;
        }
        if packet.psn() != slot.expected {
            if before(packet.psn(), slot.expected) {
                if slot.answer.is_none() {
                    self.answer(index, Opcode::Ack);
                }
            } else if !slot.gap {
                slot.gap = true;
                self.answer(index, Opcode::SequenceError);
            }
            return Outcome::Done;
        }
        slot.gap = false;
        match self.run(index, packet, *bytes) {
            Verdict::Moved(moved) => {
                *bytes = bytes.wrapping_sub(moved);
                self.counts.bytes = self.counts.bytes.wrapping_add(u64::from(moved));
                self.advance(index, packet, moved)
            }
            Verdict::NotReady => {
                if let Some(slot) = self.table.slot(index) {
                    slot.gap = true;
                }
                self.answer(index, Opcode::ReceiverNotReady);
                Outcome::Done
            }
            Verdict::Refused(refusal) => {
                self.refuse(index, refusal);
                Outcome::Done
            }
            Verdict::Spoilt(refusal, status) => {
                self.finish_receive(index, |id| Completion::Failed { id, status });
                self.refuse(index, refusal);
                Outcome::Done
            }
        }
    }

    /// Checks the next slice of a packet and moves it.
    fn run(&mut self, index: u32, packet: &Packet, most: u32) -> Verdict {
        let invalid = Verdict::Refused(Opcode::RefusedRequest);
        let Some(mut held) = self.table.held(index) else {
            return invalid;
        };
        let slot = held.slot;
        let Some(pair) = &slot.pair else {
            return invalid;
        };
        let asker = pair.asker();
        let serves_reads = pair.responder_resources != 0;
        let done = slot.done;
        let Some(left) = packet.length().checked_sub(done) else {
            return invalid;
        };
        let (flags, remaining) = (packet.flags(), packet.remaining());
        let first = flags.contains(Flags::FIRST);
        let fits = if flags.contains(Flags::LAST) {
            packet.length() == remaining
        } else {
            packet.length() < remaining && packet.length() != 0
        };
        let incoming = match slot.incoming {
            Some(incoming) if !first || done != 0 => incoming,
            None if first => Incoming {
                length: remaining,
                done: 0,
            },
            _ => return invalid,
        };
        // The whole rest of the message is checked each time, so that nothing of a bad one is written.
        let rest = remaining.wrapping_sub(done);
        if !fits || incoming.length.wrapping_sub(incoming.done) != rest {
            return invalid;
        }
        let receive = (slot.recv_head != slot.recv_tail)
            .then(|| held.receives.at(slot.recv_head).copied())
            .flatten();
        let now = left.min(most);
        let (one, other) = packet.spans();
        let mut spans = Pair(one, other);
        spans.skip(done);
        let (address, key) = packet.remote();
        let (address, key) = (address.wrapping_add(u64::from(done)), RKey(key));
        let moved = match packet.opcode() {
            Opcode::Send => {
                let Some(receive) = receive else {
                    return Verdict::NotReady;
                };
                if incoming.length > receive.buffer.length {
                    return Verdict::Spoilt(Opcode::RefusedRequest, Status::LocalLength);
                }
                if rest == 0 {
                    0
                } else {
                    let region_lkey = self.profile.capabilities.region_lkey;
                    let Some(mut sink) = self.keys.local(asker, receive.buffer, true, region_lkey)
                    else {
                        return Verdict::Spoilt(Opcode::RefusedOperation, Status::LocalProtection);
                    };
                    sink.skip(incoming.done);
                    bytes::run(self.copier, &mut sink, &mut spans, now)
                }
            }
            Opcode::Write => {
                if flags.contains(Flags::IMMEDIATE) && receive.is_none() {
                    return Verdict::NotReady;
                }
                if rest == 0 {
                    0
                } else {
                    let right = Rights::REMOTE_WRITE;
                    let Some(mut sink) = self.keys.remote(asker, key, address, rest, right) else {
                        return Verdict::Refused(Opcode::RefusedAccess);
                    };
                    bytes::run(self.copier, &mut sink, &mut spans, now)
                }
            }
            Opcode::Read if !serves_reads => return invalid,
            Opcode::Read => {
                if rest == 0 {
                    0
                } else {
                    let right = Rights::REMOTE_READ;
                    let Some(mut from) = self.keys.remote(asker, key, address, rest, right) else {
                        return Verdict::Refused(Opcode::RefusedAccess);
                    };
                    bytes::run(self.copier, &mut spans, &mut from, now)
                }
            }
            _ => return invalid,
        };
        if moved != now {
            return Verdict::Refused(Opcode::RefusedOperation);
        }
        slot.incoming = Some(Incoming {
            done: incoming.done.wrapping_add(moved),
            ..incoming
        });
        Verdict::Moved(moved)
    }

    /// After a slice: the packet may be done, and with it the message.
    fn advance(&mut self, index: u32, packet: &Packet, moved: u32) -> Outcome {
        let Some(slot) = self.table.slot(index) else {
            return Outcome::Done;
        };
        slot.done = slot.done.wrapping_add(moved);
        if slot.done < packet.length() {
            return Outcome::Again;
        }
        slot.done = 0;
        let flags = packet.flags();
        if flags.contains(Flags::LAST) {
            let length = slot.incoming.take().map_or(0, |incoming| incoming.length);
            let asker = slot.pair.as_ref().map(crate::QueuePair::asker);
            let mark = |flag| flags.contains(flag).then_some(packet.extra());
            let invalidated = mark(Flags::INVALIDATE).map(RKey);
            let imm = mark(Flags::IMMEDIATE);
            if let (Some(asker), Some(key)) = (asker, invalidated)
                && !self.keys.kill(asker, key, self.profile.foreign_invalidate)
            {
                let status = Status::RemoteInvalidate;
                self.finish_receive(index, |id| Completion::Failed { id, status });
                self.refuse_invalidate(index);
                return Outcome::Done;
            }
            if packet.opcode() == Opcode::Send || imm.is_some() {
                self.finish_receive(index, |id| Completion::Received {
                    id,
                    length,
                    imm,
                    invalidated,
                });
            }
        }
        if let Some(slot) = self.table.slot(index) {
            slot.expected = slot.expected.wrapping_add(1);
        }
        self.answer(index, Opcode::Ack);
        Outcome::Done
    }

    /// Completes the oldest receive.
    fn finish_receive(&mut self, index: u32, completion: impl FnOnce(WrId) -> Completion) {
        let Some(mut held) = self.table.held(index) else {
            return;
        };
        let slot = held.slot;
        if slot.recv_head == slot.recv_tail {
            return;
        }
        let Some(entry) = held.receives.at(slot.recv_head) else {
            return;
        };
        slot.recv_head = slot.recv_head.wrapping_add(1);
        self.completions.push(CompletionEntry {
            completion: completion(entry.id),
            queue_pair: index,
            generation: slot.generation,
            side: Side::Receive,
            frees: slot.recv_head,
        });
    }

    /// Every posted receive completes as flushed.
    pub(crate) fn flush_receives(&mut self, index: u32) {
        while let Some(slot) = self.table.slot(index)
            && slot.recv_head != slot.recv_tail
        {
            let status = Status::Flushed;
            self.finish_receive(index, |id| Completion::Failed { id, status });
        }
    }

    /// Turns the peer's request away for good: this queue pair is in error.
    fn refuse(&mut self, index: u32, refusal: Opcode) {
        self.counts.refused = self.counts.refused.wrapping_add(1);
        if let Some(slot) = self.table.slot(index) {
            slot.refusal = refusal;
        }
        self.answer(index, refusal);
        self.enter_error(index, Status::Flushed, false);
    }

    /// Turns away a SEND that could not kill its key. Where nobody is told, it counts as served, and this queue pair
    /// is in error all the same.
    fn refuse_invalidate(&mut self, index: u32) {
        if !self.profile.silent_invalidate {
            self.refuse(index, Opcode::RefusedOperation);
            return;
        }
        if let Some(slot) = self.table.slot(index) {
            slot.expected = slot.expected.wrapping_add(1);
        }
        self.answer(index, Opcode::Ack);
        self.counts.refused = self.counts.refused.wrapping_add(1);
        self.enter_error(index, Status::Flushed, false);
    }

    /// Says so at the next occasion. What the peer must know for good is not overwritten.
    fn answer(&mut self, index: u32, opcode: Opcode) {
        let Some(slot) = self.table.slot(index) else {
            return;
        };
        if slot.answer.and_then(Opcode::verdict).is_none() {
            slot.answer = Some(opcode);
        }
        self.table.list(index);
    }
}
