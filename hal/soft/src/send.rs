//! The initiator: chains of work requests become packets.

use o2poll_dataplane::nic::{Completion, RKey, Region, Rejected, SendWr, Sge, Status, WrId};

use crate::Soft;
use crate::bytes::{Pieces, Span};
use crate::keys::{Asker, Keys, NotStaged, Order};
use crate::packet::{Body, Flags, Opcode, Packet, Route, before};
use crate::profile::Profile;
use crate::queue_pair::{
    Cursor, Held, Marks, NEVER, QueuePairSlot, SendEntry, SendRing, State, Work,
};
use crate::settle::{drop_staged, tell};
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
    /// Adds a request to the open chain, or latches that it cannot be.
    ///
    /// Inlined: a caller knows what it posts, and what is left then is to fill in a line. Behind a call the request would be
    /// written to memory in small pieces and read back in larger ones, which a core does not forward.
    #[inline(always)]
    pub(crate) fn append(&mut self, index: u32, id: WrId, signalled: bool, wr: SendWr<'_>) {
        let mut marks = Marks::empty();
        marks.set(Marks::SIGNALLED, signalled);
        let bare = SendEntry::bare(id, Work::Send, marks);
        let plain = SendEntry {
            marks: marks.union(Marks::PLAIN),
            ..bare
        };
        match wr {
            SendWr::Send {
                message,
                invalidate: None,
            } => self.enter(
                index,
                SendEntry {
                    length: message.length,
                    pieces: 1,
                    first: message,
                    ..plain
                },
            ),
            SendWr::Write {
                local: [only],
                remote,
                imm: None,
            } => self.enter(
                index,
                SendEntry {
                    work: Work::Write,
                    address: remote.address,
                    rkey: remote.rkey.0,
                    length: only.length,
                    pieces: 1,
                    first: *only,
                    ..plain
                },
            ),
            SendWr::Invalidate { key } => self.enter(
                index,
                SendEntry {
                    work: Work::Invalidate,
                    rkey: key.0,
                    ..bare
                },
            ),
            SendWr::Register {
                region,
                key,
                rights,
                base,
                length,
                layout,
            } => {
                let order = Order {
                    region,
                    key,
                    rights,
                    base,
                    length,
                    layout,
                };
                self.append_register(index, id, marks, &order);
            }
            _ => self.append_any(index, bare, &wr),
        }
    }

    /// A request of one piece at most, where nothing but its length can be wrong.
    #[inline(always)]
    fn enter(&mut self, index: u32, mut entry: SendEntry) {
        let Some(Held {
            slot, mut sends, ..
        }) = self.table.held(index)
        else {
            return;
        };
        if entry.length > MOST_BYTES {
            entry = entry.too_long();
        }
        let depth = slot.pair.as_ref().map_or(0, |pair| pair.send_depth);
        if slot.latched || slot.open.wrapping_sub(slot.freed) >= depth {
            slot.latched = true;
        } else if let Some(place) = sends.at(slot.open) {
            *place = entry;
            slot.open = slot.open.wrapping_add(1);
        }
    }

    /// A registration, whose list is staged as it enters.
    #[inline(always)]
    fn append_register(&mut self, index: u32, id: WrId, mut marks: Marks, order: &Order<'_>) {
        let Some(Held {
            slot, mut sends, ..
        }) = self.table.held(index)
        else {
            return;
        };
        let Some(pair) = &slot.pair else {
            return;
        };
        // Nothing is staged that does not enter.
        if slot.latched || slot.open.wrapping_sub(slot.freed) >= pair.send_depth {
            slot.latched = true;
            return;
        }
        let Some(place) = sends.at(slot.open) else {
            return;
        };
        let capabilities = &self.profile.capabilities;
        let mut failure = None;
        match self.keys.stage(pair.asker(), order, capabilities) {
            Ok(()) => marks.insert(Marks::STAGED),
            Err(NotStaged::Fail(status)) => failure = Some(status),
            Err(NotStaged::Reject) => {
                slot.latched = true;
                return;
            }
        }
        *place = SendEntry {
            rkey: order.key.0,
            extra: order.region.0,
            failure,
            ..SendEntry::bare(id, Work::Register, marks)
        };
        slot.open = slot.open.wrapping_add(1);
    }

    #[inline(never)]
    fn append_any(&mut self, index: u32, bare: SendEntry, wr: &SendWr<'_>) {
        let Some(mut held) = self.table.held(index) else {
            return;
        };
        if held.slot.latched {
            return;
        }
        match write_entry(&mut held, &self.profile, bare, wr) {
            Some(()) => held.slot.open = held.slot.open.wrapping_add(1),
            None => held.slot.latched = true,
        }
    }

    /// Takes the open chain, all or its first part, and starts on it.
    pub(crate) fn ring(&mut self, index: u32) -> Result<(), Rejected> {
        self.counts.doorbells = self.counts.doorbells.wrapping_add(1);
        let Some(held) = self.table.held(index) else {
            return Err(Rejected { accepted: 0 });
        };
        let Held {
            slot, mut sends, ..
        } = held;
        let length = slot.open.wrapping_sub(slot.tail);
        let mut accepted = length;
        if self.faulty
            && let Some(most) = self.faults.accept.take()
            && most < length
        {
            accepted = most;
            slot.latched = true;
            for extra in most..length {
                if let Some(entry) = sends.at(slot.tail.wrapping_add(extra)) {
                    drop_staged(entry, &mut self.keys);
                }
            }
        }
        slot.tail = slot.tail.wrapping_add(accepted);
        slot.open = slot.tail;
        let whole = !core::mem::replace(&mut slot.latched, false);
        self.counts.work_requests = self.counts.work_requests.wrapping_add(u64::from(accepted));
        // An INVALIDATE that waits for what was sent before goes on when that is acknowledged.
        let waits = slot.sent != slot.completed
            && slot.answer.is_none()
            && slot.state == State::Ready
            && sends.get(slot.sent).is_some_and(SendEntry::waits);
        if !waits {
            self.serve(index);
        }
        if whole {
            Ok(())
        } else {
            Err(Rejected { accepted })
        }
    }

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
            if entry.is(Marks::PLAIN) {
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
                    Local::Failed(status) => {
                        entry.failure = Some(status);
                        return None;
                    }
                    Local::Ran => {}
                }
                if slot.pass_local() && entry.is(Marks::SIGNALLED) {
                    let done = Completion::Done { id: entry.id };
                    tell(&mut self.completions, index, slot, done);
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
                Local::Failed(status) => {
                    entry.failure = Some(status);
                    return None;
                }
                Local::Ran => {}
            }
            if slot.pass_local() && entry.is(Marks::SIGNALLED) {
                let done = Completion::Done { id: entry.id };
                tell(&mut self.completions, index, slot, done);
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

impl SendEntry {
    /// A request that will fail.
    #[cold]
    const fn too_long(mut self) -> Self {
        self.failure = Some(Status::LocalLength);
        self.length = 0;
        self.marks = self.marks.difference(Marks::PLAIN);
        self
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

/// Writes a request into the slot at `open`; `None` if it cannot be posted.
fn write_entry(
    held: &mut Held<'_>,
    profile: &Profile,
    bare: SendEntry,
    wr: &SendWr<'_>,
) -> Option<()> {
    let Held { slot, sends, .. } = held;
    let capabilities = &profile.capabilities;
    let pair = slot.pair.as_ref()?;
    let position = slot.open;
    if position.wrapping_sub(slot.freed) >= pair.send_depth {
        return None;
    }
    let mut entry = bare;
    let list: &[Sge] = match wr {
        SendWr::Send {
            message,
            invalidate,
        } => {
            if let Some(key) = invalidate {
                if !capabilities.remote_invalidate {
                    return None;
                }
                entry.marks.insert(Marks::INVALIDATE);
                entry.extra = key.0;
            }
            core::slice::from_ref(message)
        }
        SendWr::Write { local, remote, imm } => {
            entry.work = Work::Write;
            (entry.address, entry.rkey) = (remote.address, remote.rkey.0);
            if let Some(data) = imm {
                entry.marks.insert(Marks::IMMEDIATE);
                entry.extra = *data;
            }
            local
        }
        SendWr::Read { local, remote } => {
            entry.work = Work::Read;
            (entry.address, entry.rkey) = (remote.address, remote.rkey.0);
            local
        }
        // `append` has dealt with it.
        SendWr::Register { .. } => return None,
        SendWr::Invalidate { key } => {
            entry.work = Work::Invalidate;
            entry.rkey = key.0;
            &[]
        }
    };
    if list.len() > capabilities.max_sge as usize {
        return None;
    }
    if let Some((first, rest)) = list.split_first() {
        if !sends.store(position, rest) {
            return None;
        }
        let length = list.iter().fold(0_u64, |sum, piece| {
            sum.wrapping_add(u64::from(piece.length))
        });
        entry.first = *first;
        // Bounded by `max_sge`.
        entry.pieces = u32::try_from(list.len()).unwrap_or(u32::MAX);
        match u32::try_from(length) {
            Ok(length) if length <= MOST_BYTES => entry.length = length,
            _ => entry.failure = Some(Status::LocalLength),
        }
    }
    let one = matches!(entry.work, Work::Send | Work::Write) && entry.pieces <= 1;
    entry
        .marks
        .set(Marks::PLAIN, one && entry.failure.is_none());
    *sends.at(position)? = entry;
    Some(())
}

/// What became of a request that needs no peer.
enum Local {
    Ran,
    /// For what was sent before it.
    Waits,
    Failed(Status),
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
            return Local::Failed(status);
        }
    } else if !keys.kill(asker, key, profile.foreign_invalidate) {
        return Local::Failed(Status::LocalOperation);
    }
    entry.marks.insert(Marks::RAN);
    Local::Ran
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

/// Longest message (`max_msg_sz` of every card).
const MOST_BYTES: u32 = 1 << 31;
