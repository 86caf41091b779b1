//! The initiator: chains of work requests become packets.

use o2poll_dataplane::nic::{Completion, RKey, Region, Sge, Status};

use crate::Soft;
use crate::bytes::{Pieces, Span};
use crate::completion::CompletionQueue;
use crate::keys::Keys;
use crate::lists::Asker;
use crate::packet::{Body, Flags, Opcode, Packet, Route, before};
use crate::profile::Profile;
use crate::queue_pair::{
    Cursor, Held, Marks, NEVER, QueuePairSlot, SendEntry, SendRing, State, Work,
};
use crate::settle::tell;
use crate::wire::Wire;
use crate::{Counts, Faults};

/// Why a queue pair stopped sending.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pause {
    /// Nothing to send, or something must happen first that will ask for a turn.
    Idle,
    /// The wire is full.
    Full,
    /// The request at `sent` fails, and everything before it is done.
    Failed(Status),
}

impl<W: Wire> Soft<'_, W> {
    /// One turn of a queue pair: answers first, then its own requests. Asks for another turn if the wire
    /// was full.
    #[inline(always)]
    pub(crate) fn serve(&mut self, index: u32) {
        let Some(slot) = self.table.slot(index) else {
            return;
        };
        let (state, idle) = (slot.state, slot.sent == slot.tail);
        let again = slot.answer.is_some() && !self.send_answer(index);
        let again = match state {
            State::Ready if idle => again,
            State::Ready => self.go_on(index) || again,
            State::Closing => !self.send_close(index) || again,
            State::Error => {
                self.flush_sends(index);
                again
            }
        };
        if again {
            self.table.list(index);
        }
    }

    /// Answers that belong to no queue pair, as far as there is room.
    #[cold]
    pub(crate) fn answer_strangers(&mut self) {
        while let Some((port, theirs, ours)) = self.strangers.front().copied() {
            let packet = Packet::bare(Opcode::Gone, theirs, ours, 0);
            if !put(
                &mut self.wire,
                &mut self.faults,
                &mut self.counts,
                port,
                &packet,
            ) {
                return;
            }
            self.strangers.pop_front();
        }
    }

    /// Sends what is due to the peer's requests; false when there was no room.
    fn send_answer(&mut self, index: u32) -> bool {
        let Some(slot) = self.table.slot(index) else {
            return true;
        };
        let (Some(opcode), Some(pair)) = (slot.answer, &slot.pair) else {
            return true;
        };
        let (port, number) = (pair.path.port, pair.path.number);
        let packet = Packet::bare(opcode, number, pair.number, slot.expected);
        let sent = put(
            &mut self.wire,
            &mut self.faults,
            &mut self.counts,
            port,
            &packet,
        );
        if sent {
            slot.answer = None;
        }
        sent
    }

    /// Asks the peer to let go; false when there was no room.
    fn send_close(&mut self, index: u32) -> bool {
        let Some(slot) = self.table.slot(index) else {
            return true;
        };
        let (true, Some(pair)) = (slot.close_due, &slot.pair) else {
            return true;
        };
        let (port, number) = (pair.path.port, pair.path.number);
        let packet = Packet::bare(Opcode::Close, number, pair.number, slot.psn);
        let sent = put(
            &mut self.wire,
            &mut self.faults,
            &mut self.counts,
            port,
            &packet,
        );
        slot.close_due = !sent;
        sent
    }

    /// Runs requests of a queue pair that is ready; true when the wire was full.
    pub(crate) fn go_on(&mut self, index: u32) -> bool {
        loop {
            let pause = self.run_simple(index).or_else(|| self.run_any(index));
            match pause {
                None => {}
                Some(Pause::Idle) => return false,
                Some(Pause::Full) => return true,
                Some(Pause::Failed(status)) => {
                    self.enter_error(index, status, false);
                    return false;
                }
            }
        }
    }

    /// Runs requests in order until one has to wait. `None` if the next is not of a kind that is done in one step, or
    /// something about it is not as it should be.
    #[inline(always)]
    fn run_simple(&mut self, index: u32) -> Option<Pause> {
        let Held {
            slot, mut sends, ..
        } = self.table.held(index)?;
        let asker = slot.pair.as_ref()?.asker();
        if self.faulty {
            return None;
        }
        while slot.sent != slot.tail && slot.resume == 0 {
            let position = slot.sent;
            let entry = sends.at(position)?;
            if entry.is(Marks::PLAIN) && entry.failure.is_none() {
                if slot.cursor.begun || before(slot.psn, slot.acked) {
                    return None;
                }
                let span = self.keys.base(asker.pd, entry.first)?;
                let packet = whole_packet(entry, slot.there, slot.psn, span);
                if !self.wire.send(slot.port, &packet) {
                    return Some(Pause::Full);
                }
                self.counts.packets = self.counts.packets.wrapping_add(1);
                if slot.deadline == NEVER {
                    slot.deadline = self.polls.wrapping_add(u64::from(self.profile.ack_timeout));
                    self.timers.set(slot.deadline);
                }
                slot.sent_one();
                entry.marks.insert(Marks::RAN);
                entry.end = slot.psn;
                slot.sent = position.wrapping_add(1);
            } else if entry.is_local() && entry.failure.is_none() {
                match run_local(entry, slot, &mut self.keys, asker, &self.profile) {
                    Local::Waits => return Some(Pause::Idle),
                    Local::Failed => return None,
                    Local::Ran => pass(index, slot, entry, &mut self.completions),
                }
            } else {
                return None;
            }
        }
        Some(Pause::Idle)
    }

    /// Runs the next request, of whatever kind; `None` when there may be more to run.
    #[inline(never)]
    fn run_any(&mut self, index: u32) -> Option<Pause> {
        let Some(held) = self.table.held(index) else {
            return Some(Pause::Idle);
        };
        let Held {
            slot, mut sends, ..
        } = held;
        let Some(pair) = &slot.pair else {
            return Some(Pause::Idle);
        };
        let asker = pair.asker();
        let position = slot.sent;
        if position == slot.tail || slot.resume != 0 {
            return Some(Pause::Idle);
        }
        let Some(entry) = sends.at(position) else {
            return Some(Pause::Idle);
        };
        if self.faulty && !entry.is(Marks::RAN) && !slot.cursor.begun && entry.failure.is_none() {
            entry.failure = self.faults.next_failure();
        }
        if let Some(status) = entry.failure {
            // What was asked before it is still served.
            return Some(if slot.completed == position {
                Pause::Failed(status)
            } else {
                Pause::Idle
            });
        }
        if entry.is_local() {
            if self.faulty
                && let Some(polls) = self.faults.late_registrations
                && entry.is(Marks::STAGED)
                && !entry.is(Marks::DELAYED)
            {
                entry.marks |= Marks::DELAYED;
                slot.resume = self.polls.wrapping_add(u64::from(polls).max(1));
                self.timers.set(slot.resume);
                return Some(Pause::Idle);
            }
            match run_local(entry, slot, &mut self.keys, asker, &self.profile) {
                Local::Waits => return Some(Pause::Idle),
                Local::Failed => {}
                Local::Ran => pass(index, slot, entry, &mut self.completions),
            }
            return None;
        }
        let made = make_packet(slot, &sends, &self.keys, asker, &self.profile);
        let (packet, cursor, last) = match made {
            Ok(made) => made,
            Err(status) => {
                if let Some(entry) = sends.at(position) {
                    entry.failure = Some(status);
                }
                return None;
            }
        };
        // Going back may have gone back too far.
        let needed = !before(slot.psn, slot.acked);
        if needed
            && !put(
                &mut self.wire,
                &mut self.faults,
                &mut self.counts,
                slot.port,
                &packet,
            )
        {
            return Some(Pause::Full);
        }
        if needed && slot.deadline == NEVER {
            slot.deadline = self.polls.wrapping_add(u64::from(self.profile.ack_timeout));
            self.timers.set(slot.deadline);
        }
        slot.sent_one();
        slot.cursor = cursor;
        if last {
            if let Some(entry) = sends.at(position) {
                entry.marks.insert(Marks::RAN);
                entry.end = slot.psn;
            }
            slot.sent = position.wrapping_add(1);
            slot.cursor = Cursor::default();
        }
        None
    }
}

impl Faults {
    fn next_failure(&mut self) -> Option<Status> {
        let (left, status) = self.fail?;
        match left.checked_sub(1) {
            Some(left) => {
                self.fail = Some((left, status));
                None
            }
            None => {
                self.fail = None;
                Some(status)
            }
        }
    }
}

/// Gives a packet to the wire; false when there was no room.
fn put<W: Wire>(
    wire: &mut W,
    faults: &mut Faults,
    counts: &mut Counts,
    port: u16,
    packet: &Packet,
) -> bool {
    if let Some(left) = &mut faults.cut {
        match left.checked_sub(1) {
            Some(less) => *left = less,
            None => return true,
        }
    }
    let sent = wire.send(port, packet);
    counts.packets = counts.packets.wrapping_add(u64::from(sent));
    sent
}

/// What became of a request that needs no peer.
enum Local {
    Ran,
    /// For what was sent before it.
    Waits,
    /// Why is in its entry.
    Failed,
}

/// Runs a request that needs no peer, if it has not run.
#[inline(always)]
fn run_local(
    entry: &mut SendEntry,
    slot: &QueuePairSlot,
    keys: &mut Keys<'_>,
    asker: Asker,
    profile: &Profile,
) -> Local {
    if entry.is(Marks::RAN) {
        return Local::Ran;
    }
    if entry.waits() && slot.completed != slot.sent {
        return Local::Waits;
    }
    let key = RKey(entry.rkey);
    if entry.work == Work::Register {
        entry.marks.remove(Marks::STAGED);
        let checks_reuse = profile.capabilities.checks_reuse;
        if let Err(status) = keys.activate(Region(entry.extra), key, checks_reuse) {
            entry.failure = Some(status);
            return Local::Failed;
        }
    } else if !keys.kill(asker, key, profile.foreign_invalidate) {
        entry.failure = Some(Status::LocalOperation);
        return Local::Failed;
    }
    entry.marks.insert(Marks::RAN);
    Local::Ran
}

/// Goes on behind a request that needs no peer, and tells of it where that is wanted and due.
#[inline(always)]
fn pass(
    index: u32,
    slot: &mut QueuePairSlot,
    entry: &SendEntry,
    completions: &mut CompletionQueue<'_>,
) {
    if slot.pass_local() && entry.is(Marks::SIGNALLED) {
        let done = Completion::Done { id: entry.id };
        tell(completions, index, slot, done);
    }
}

/// All of a plain request in one packet.
#[inline]
fn whole_packet(entry: &SendEntry, route: Route, psn: u32, span: Span) -> Packet {
    let opcode = match entry.work {
        Work::Write => Opcode::Write,
        _ => Opcode::Send,
    };
    let body = Body {
        psn,
        remaining: entry.length,
        address: entry.address,
        rkey: entry.rkey,
        extra: entry.extra,
        spans: (span, Span::EMPTY),
    };
    Packet::request(opcode, Flags::WHOLE.union(flags_of(entry)), route, &body)
}

/// What the last packet of a request says of `extra`.
const fn flags_of(entry: &SendEntry) -> Flags {
    let immediate = if entry.is(Marks::IMMEDIATE) {
        Flags::IMMEDIATE
    } else {
        Flags::empty()
    };
    let invalidate = if entry.is(Marks::INVALIDATE) {
        Flags::INVALIDATE
    } else {
        Flags::empty()
    };
    immediate.union(invalidate)
}

/// The next packet of a request, where the cursor stands after it, and whether it is the last.
fn make_packet(
    slot: &QueuePairSlot,
    sends: &SendRing<'_>,
    keys: &Keys<'_>,
    asker: Asker,
    profile: &Profile,
) -> Result<(Packet, Cursor, bool), Status> {
    let (position, cursor) = (slot.sent, slot.cursor);
    let entry = sends.get(position).ok_or(Status::LocalLength)?;
    let region_lkey = profile.capabilities.region_lkey;
    let writes = entry.work == Work::Read;
    let find = |piece: Sge| keys.local(asker, piece, writes, region_lkey);
    if !cursor.begun && entry.pieces > 1 {
        // All of it is checked before any of it is sent.
        for number in 0..entry.pieces {
            let piece = sends
                .piece(position, entry, number)
                .ok_or(Status::LocalLength)?;
            if piece.length != 0 {
                find(piece).ok_or(Status::LocalProtection)?;
            }
        }
    }
    let mut at = Cursor {
        begun: true,
        ..cursor
    };
    let mut first = Span::EMPTY;
    let mut second = Span::EMPTY;
    while second.length() == 0
        && let Some(piece) = sends.piece(position, entry, at.piece)
    {
        let left = piece.length.wrapping_sub(at.offset);
        if left == 0 {
            at.piece = at.piece.wrapping_add(1);
            at.offset = 0;
            continue;
        }
        let rest = Sge {
            address: piece.address.wrapping_add(u64::from(at.offset)),
            length: left,
            lkey: piece.lkey,
        };
        let span = find(rest)
            .and_then(|mut walk| walk.next(left))
            .ok_or(Status::LocalProtection)?;
        at.offset = at.offset.wrapping_add(span.length());
        at.bytes = at.bytes.wrapping_add(span.length());
        if first.length() == 0 {
            first = span;
        } else {
            second = span;
        }
    }
    let last = at.bytes >= entry.length;
    let mut flags = Flags::empty();
    flags.set(Flags::FIRST, !cursor.begun);
    flags.set(Flags::LAST, last);
    if last {
        flags.insert(flags_of(entry));
    }
    let opcode = match entry.work {
        Work::Write => Opcode::Write,
        Work::Read => Opcode::Read,
        _ => Opcode::Send,
    };
    let body = Body {
        psn: slot.psn,
        remaining: entry.length.wrapping_sub(cursor.bytes),
        address: entry.address.wrapping_add(u64::from(cursor.bytes)),
        rkey: entry.rkey,
        extra: entry.extra,
        spans: (first, second),
    };
    let packet = Packet::request(opcode, flags, slot.there, &body);
    Ok((packet, at, last))
}
