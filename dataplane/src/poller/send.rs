//! What goes out: per connection first what kills keys, then answers, then what needs credits, then a
//! NOOP; one doorbell for all of it.

use super::record::{CHAIN, Link, What};
use super::{Poller, Received};
use crate::connection::State;
use crate::memory::PageList;
use crate::nic::{Nic, Qp, RKey, Remote, Rights, SendWr, Sge, WrId};
use crate::pool::{Handle, Kind, Pool, Queue, pack, pack_write};
use crate::portal::Attached;
use crate::registration::Mechanism;
use crate::time::Instant;
use crate::transfer::{Cursor, Input, Message as Slot, Phase, Place, Role, Sink, Transfer};
use crate::wire::lnet::{self, WireHandle};
use crate::wire::{
    Body, Descriptor, Done, Envelope, Fragment, IMMEDIATE_BYTES, Message, encode_immediate,
};

/// Most local pieces of one WRITE, whatever the device could take.
const PIECES: usize = 32;

/// Where the ping info lies in the message buffer of a transfer that writes it by RDMA.
const PING_AT: u32 = 2048;

/// Most WRITEs of one transfer on the send queue: as many as there are ids for.
const WRITES_AT_ONCE: u16 = 16;

/// The whole of a chain's longest step: register and message.
const STEP: usize = 2;

impl<'a, N: Nic> Poller<'a, N> {
    /// Serves every connection that has something to do. Those that still have afterwards are looked
    /// at again by the next poll, whether or not anything completed meanwhile (R10).
    pub(super) fn send(&mut self, now: Instant) -> u32 {
        let mut listed = core::mem::take(&mut self.listed);
        let mut work = 0_u32;
        while let Some(connection) = self.connections.pop_front(&mut listed) {
            if let Some(state) = self.connections.get_mut(connection) {
                state.listed = false;
            }
            work = work.saturating_add(self.serve(connection, now));
            if self
                .connections
                .get(connection)
                .is_some_and(crate::connection::Connection::has_work)
            {
                self.list(connection);
            }
        }
        work
    }

    fn serve(&mut self, connection: Handle, now: Instant) -> u32 {
        let Some(state) = self.connections.get(connection) else {
            return 0;
        };
        if state.state == State::Closing {
            return u32::from(self.drain(connection));
        }
        let mut work = self.retry_reposts(connection);
        work = work.saturating_add(self.take_held(connection, now));
        self.admit_waiting(connection);
        let Some(state) = self.connections.get(connection) else {
            return work;
        };
        if state.state == State::Closing {
            return work;
        }
        let qp = state.qp;
        loop {
            let queued = self.fill(connection, qp);
            if self.chain.is_empty() {
                return work;
            }
            let length = self.chain.len();
            work = work.saturating_add(u32::try_from(length).unwrap_or(u32::MAX));
            if let Some(state) = self.connections.get_mut(connection) {
                state.last_sent = now;
            }
            let whole = self.ring(connection, qp);
            // A chain that was cut by its own length goes on; one that the device cut waits.
            if !whole || !queued {
                return work;
            }
        }
    }

    /// Receives that the device would not take earlier.
    fn retry_reposts(&mut self, connection: Handle) -> u32 {
        let mut work = 0_u32;
        loop {
            let Some(state) = self.connections.get_mut(connection) else {
                return work;
            };
            let before = state.reposts.len();
            let Some(handle) = self.receives.pop_front(&mut state.reposts) else {
                return work;
            };
            let Some(receive) = self.receives.get_mut(handle) else {
                continue;
            };
            if let Received::Idle { buffer, owe } =
                core::mem::replace(&mut receive.state, Received::Lent)
            {
                self.repost(connection, handle, buffer, owe);
            }
            let stuck = self
                .connections
                .get(connection)
                .is_none_or(|state| state.reposts.len() >= before);
            if stuck {
                return work;
            }
            work = work.saturating_add(1);
        }
    }

    /// Gives transfers of ours their share of the queue pair, a buffer and a window: all or nothing.
    fn admit_waiting(&mut self, connection: Handle) {
        loop {
            let Some(state) = self.connections.get_mut(connection) else {
                return;
            };
            if state.state != State::Established || state.own >= state.terms.queue_depth {
                return;
            }
            let Some(handle) = self.transfers.front(&state.waiting) else {
                return;
            };
            let Some(transfer) = self.transfers.get_mut(handle) else {
                return;
            };
            // A GET that goes as a message takes its window when a REPLY by PUT_REQ comes: held that long, the
            // last window could be what the peer's own request waits for, and the REPLY behind that.
            let is_sink = transfer.role == Role::Get && transfer.bulk;
            if self.messages.is_empty() || (is_sink && !self.windows.has(true)) {
                self.counters.waits.add(1);
                return;
            }
            transfer.message = self.messages.take().map(Slot::Home);
            if is_sink {
                transfer.window = self.windows.take(true);
            }
            transfer.admitted = true;
            transfer.peer = (state.terms.peer, self.limits.pid);
            state.own = state.own.saturating_add(1);
            self.transfers.pop_front(&mut state.waiting);
            self.apply(handle, Input::Admitted);
        }
    }

    /// Queues what may go now on the open chain. True if there is more, and only the chain was full.
    fn fill(&mut self, connection: Handle, qp: Qp) -> bool {
        loop {
            let Some(state) = self.connections.get_mut(connection) else {
                return false;
            };
            while !state.reserve.is_empty() && state.credits.reserve() {
                if let Some(handle) = self.transfers.pop_front(&mut state.reserve)
                    && let Some(transfer) = self.transfers.get_mut(handle)
                {
                    transfer.reserved = true;
                    self.transfers.push_back(&mut state.credited, handle);
                }
            }
            let room = room_of(self.send_wr, state.on_send_queue()) as usize;
            let left = CHAIN.saturating_sub(self.chain.len());
            if room < STEP {
                return false;
            }
            if left < STEP {
                return true;
            }
            let room = room.min(left);
            let invalidate = self.transfers.front(&state.invalidates);
            let answer = self.transfers.front(&state.answers);
            let request = if state.credits.available() > 0 {
                self.transfers.front(&state.credited)
            } else {
                None
            };
            if let Some(handle) = invalidate {
                self.pop(connection, |state| &mut state.invalidates);
                self.invalidate(connection, qp, handle);
            } else if let Some(handle) = answer {
                self.pop(connection, |state| &mut state.answers);
                self.answer(connection, qp, handle, room);
            } else if let Some(handle) = request {
                self.pop(connection, |state| &mut state.credited);
                self.request(connection, qp, handle);
            } else {
                if state.wants_noop(false) {
                    self.noop(connection, qp);
                }
                return false;
            }
        }
    }

    fn pop(
        &mut self,
        connection: Handle,
        queue: impl for<'c> FnOnce(&'c mut crate::connection::Connection<'a>) -> &'c mut Queue,
    ) {
        if let Some(state) = self.connections.get_mut(connection)
            && let Some(handle) = self.transfers.pop_front(queue(state))
            && let Some(transfer) = self.transfers.get_mut(handle)
        {
            transfer.queued = false;
        }
    }

    /// Puts one work request on the open chain, the record and the chain's own list.
    fn link(&mut self, connection: Handle, link: Link, id: WrId) {
        if let Some(state) = self.connections.get_mut(connection) {
            self.record.set(connection, state.head, id);
            state.head = state.head.wrapping_add(1);
        }
        if !matches!(link.what, What::Noop { .. })
            && let Some(transfer) = self.transfers.get_mut(link.handle)
        {
            transfer.in_flight = transfer.in_flight.saturating_add(1);
        }
        // `fill` keeps room for a whole step.
        let _ = self.chain.push(link);
    }

    fn invalidate(&mut self, connection: Handle, qp: Qp, handle: Handle) {
        let Some(transfer) = self.transfers.get_mut(handle) else {
            return;
        };
        let link = link_of(What::Invalidate, handle, transfer);
        let Some(window) = transfer
            .window
            .as_mut()
            .filter(|window| window.needs_invalidate())
        else {
            // Never invalidate what is not live: some devices' drivers do not survive it.
            let in_flight = transfer.in_flight != 0;
            self.apply(handle, Input::Dead);
            if in_flight {
                self.fence(connection, qp, handle);
            }
            return;
        };
        let id = pack(Kind::Invalidate, handle);
        self.nic
            .queue(qp, id, true, SendWr::Invalidate { key: window.key() });
        window.invalidating();
        self.link(connection, link, id);
        self.apply(handle, Input::PostedInvalidate);
    }

    /// Instead of the invalidate, where the peer's has come first: a signalled request that does nothing
    /// (a WRITE of no bytes checks no key), to tell that the unsignalled ones before it are done.
    fn fence(&mut self, connection: Handle, qp: Qp, handle: Handle) {
        let Some(transfer) = self.transfers.get(handle) else {
            return;
        };
        let link = link_of(What::Fence, handle, transfer);
        let id = pack(Kind::Write, handle);
        let wr = SendWr::Write {
            local: &[],
            remote: Remote {
                address: 0,
                rkey: RKey(0),
            },
            imm: None,
        };
        self.nic.queue(qp, id, true, wr);
        self.link(connection, link, id);
    }

    /// What needs no credit: PUT_ACK, a refusal, or WRITEs and their DONE.
    fn answer(&mut self, connection: Handle, qp: Qp, handle: Handle, room: usize) {
        let Some(transfer) = self.transfers.get(handle) else {
            return;
        };
        match (transfer.phase, transfer.role) {
            (Phase::Data, _) => self.data(connection, qp, handle, room),
            (_, Role::Nak(_) | Role::Refusal(_)) => {
                self.message(connection, qp, handle, true, false);
                self.apply(handle, Input::PostedLast);
            }
            _ => {
                if self.register(connection, qp, handle) {
                    // The invalidate that follows in any case tells that this is done, too.
                    self.message(connection, qp, handle, false, false);
                    self.apply(handle, Input::PostedPutAck);
                } else {
                    self.close(connection, super::Reason::BadLength);
                }
            }
        }
    }

    /// What needs a credit.
    fn request(&mut self, connection: Handle, qp: Qp, handle: Handle) {
        let spent = self
            .connections
            .get_mut(connection)
            .is_some_and(|state| state.credits.spend());
        let Some(transfer) = self.transfers.get(handle) else {
            return;
        };
        if !spent {
            return;
        }
        let (role, bulk) = (transfer.role, transfer.bulk);
        let wants_ack = role == Role::Put && transfer.handle != WireHandle::NONE;
        let is_sink = role == Role::Get && bulk;
        if is_sink {
            // Checked when it was submitted.
            self.register(connection, qp, handle);
        }
        self.message(connection, qp, handle, !is_sink, true);
        let input = match (role, bulk) {
            (Role::Get, true) => Input::PostedGetReq,
            (Role::Get, false) => Input::PostedGet,
            (_, true) => Input::PostedPutReq,
            (_, false) if wants_ack => Input::PostedLastWantsAck,
            (_, false) => Input::PostedLast,
        };
        if !bulk
            && matches!(role, Role::Put | Role::Reply)
            && let Some(transfer) = self.transfers.get_mut(handle)
        {
            transfer.outcome = Ok(transfer.length);
        }
        self.apply(handle, input);
    }

    /// Puts the transfer's key over its memory, if that is not done yet. False if no mechanism can.
    fn register(&mut self, connection: Handle, qp: Qp, handle: Handle) -> bool {
        let Some(transfer) = self.transfers.get_mut(handle) else {
            return false;
        };
        let link = link_of(What::Register, handle, transfer);
        let length = transfer.length;
        let Some((list, offset)) = memory_of(&transfer.place, &self.entries) else {
            return false;
        };
        let Some((mechanism, layout)) =
            self.scratch
                .lay_out_list(&self.capabilities, list, offset, length)
        else {
            return false;
        };
        let base = base_of(list, offset, length, self.capabilities.zero_based);
        let Some(window) = transfer.window.as_mut() else {
            return false;
        };
        if !window.needs_register() {
            return true;
        }
        window.name();
        let id = pack(Kind::Register, handle);
        let wr = SendWr::Register {
            region: window.region(),
            key: window.key(),
            rights: Rights::LOCAL_WRITE | Rights::REMOTE_WRITE,
            base,
            length,
            layout,
        };
        self.nic.queue(qp, id, false, wr);
        window.registered();
        let counter = match mechanism {
            Mechanism::FragmentList => &self.counters.fragment_lists,
            Mechanism::PageList => &self.counters.page_lists,
            Mechanism::Window => &self.counters.windows,
        };
        counter.add(1);
        let alive = self.counters.keys_alive.get();
        self.counters.keys_alive.set(alive.saturating_add(1));
        self.link(connection, link, id);
        true
    }

    /// WRITEs, as many as may be posted at a time, and the DONE behind the last of them.
    fn data(&mut self, connection: Handle, qp: Qp, handle: Handle, room: usize) {
        let (max_sge, writes) = {
            let writes = self.limits.shape.writes_at_once;
            let Some(transfer) = self.transfers.get(handle) else {
                return;
            };
            // A REPLY has the request besides, in the share of a GET's data.
            let writes = if transfer.role == Role::Reply {
                writes.saturating_sub(1).max(1)
            } else {
                writes
            };
            (
                (self.capabilities.max_sge as usize).clamp(1, PIECES),
                writes.min(WRITES_AT_ONCE),
            )
        };
        let room = room.saturating_sub(1);
        let mut posted = 0_usize;
        loop {
            let Some(transfer) = self.transfers.get_mut(handle) else {
                return;
            };
            if transfer.cursor.written >= transfer.length {
                break;
            }
            if posted >= room || transfer.in_flight >= writes {
                // The rest goes when these are done; the last of them was signalled.
                return;
            }
            let link = link_of(What::Write, handle, transfer);
            let Some((remote, most_bytes)) = next_target(transfer) else {
                self.close(connection, super::Reason::BadLength);
                return;
            };
            let mut pieces: heapless::Vec<Sge, PIECES> = heapless::Vec::new();
            let mut bytes = 0_u32;
            let from = transfer.cursor.written;
            if let Some((list, offset)) = memory_of(&transfer.place, &self.entries) {
                let from = offset.saturating_add(u64::from(from));
                for piece in list.slice(from, most_bytes).take(max_sge) {
                    bytes = bytes.saturating_add(piece.length);
                    let _ = pieces.push(piece);
                }
            } else if let (Place::Ping, Some(Slot::Home(buffer))) =
                (&transfer.place, &mut transfer.message)
            {
                let at = PING_AT as usize;
                if let Some(place) = buffer
                    .bytes()
                    .get_mut(at..)
                    .and_then(|rest| rest.first_chunk_mut())
                {
                    *place = self.ping;
                }
                let piece = buffer.sge_at(PING_AT.saturating_add(from), most_bytes);
                bytes = piece.length;
                let _ = pieces.push(piece);
            }
            if bytes == 0 {
                // The memory is shorter than what was matched in it: cannot be.
                self.close(connection, super::Reason::BadLength);
                return;
            }
            transfer.cursor.written = from.saturating_add(bytes);
            transfer.cursor.offset = transfer.cursor.offset.saturating_add(bytes);
            // Numbered on from those of an earlier chain that the device took in part, which may be in flight.
            let id = pack_write(handle, transfer.cursor.writes);
            transfer.cursor.writes = transfer.cursor.writes.wrapping_add(1);
            posted = posted.wrapping_add(1);
            let is_last = transfer.cursor.written >= transfer.length;
            let is_end = posted >= room || transfer.in_flight.saturating_add(1) >= writes;
            let wr = SendWr::Write {
                local: &pieces,
                remote,
                imm: None,
            };
            self.nic.queue(qp, id, is_end && !is_last, wr);
            self.link(connection, link, id);
        }
        let Some(transfer) = self.transfers.get_mut(handle) else {
            return;
        };
        transfer.outcome = Ok(transfer.cursor.written);
        let wants_ack = transfer.role == Role::Put && transfer.handle != WireHandle::NONE;
        self.message(connection, qp, handle, true, false);
        self.apply(
            handle,
            if wants_ack {
                Input::PostedLastWantsAck
            } else {
                Input::PostedLast
            },
        );
    }

    /// Builds the transfer's next message in its buffer and puts it on the chain.
    fn message(
        &mut self,
        connection: Handle,
        qp: Qp,
        handle: Handle,
        signalled: bool,
        credit: bool,
    ) {
        let Some(state) = self.connections.get_mut(connection) else {
            return;
        };
        let Some(transfer) = self.transfers.get_mut(handle) else {
            return;
        };
        let paid = state.credits.pay();
        let what = if credit {
            What::Request { paid }
        } else {
            What::Answer { paid }
        };
        let link = link_of(what, handle, transfer);
        let envelope = state.terms.envelope(paid);
        let Some(Slot::Home(mut buffer)) = transfer.message.take() else {
            return;
        };
        let context = Context {
            handle,
            stamp: self.limits.stamp,
            local: (self.limits.nid, self.limits.pid),
            zero_based: self.capabilities.zero_based,
            ping: &self.ping,
        };
        let length = build(transfer, &self.entries, &envelope, &context, buffer.bytes());
        let posted = buffer.post();
        let id = pack(Kind::Send, handle);
        let wr = SendWr::Send {
            message: posted.sge(length),
            invalidate: None,
        };
        transfer.message = Some(Slot::Posted(posted));
        self.nic.queue(qp, id, signalled, wr);
        self.link(connection, link, id);
    }

    /// Returns credits, or shows that we live.
    fn noop(&mut self, connection: Handle, qp: Qp) {
        let Some(mut buffer) = self.messages.take() else {
            return;
        };
        let Some(state) = self.connections.get_mut(connection) else {
            self.messages.give(buffer);
            return;
        };
        let paid = state.credits.pay();
        let message = Message {
            envelope: state.terms.envelope(paid),
            body: Body::Noop,
        };
        let length = message.encode(buffer.bytes()).unwrap_or(0);
        let posted = buffer.post();
        let id = pack(Kind::Noop, connection);
        let wr = SendWr::Send {
            message: posted.sge(length),
            invalidate: None,
        };
        self.nic.queue(qp, id, true, wr);
        // `wants_noop` saw that there is room.
        let _ = state.noops.push_back(posted);
        let link = Link {
            what: What::Noop { paid },
            handle: connection,
            phase: Phase::Sent,
            cursor: Cursor::default(),
        };
        self.link(connection, link, id);
    }

    /// Sends a NOOP if nothing was sent for long.
    pub(super) fn keep_alive(&mut self, connection: Handle, now: Instant) {
        let keepalive = self.limits.keepalive;
        let Some(state) = self.connections.get_mut(connection) else {
            return;
        };
        let due = now.since(state.last_sent) >= keepalive && state.wants_noop(true);
        let (used, qp) = (state.on_send_queue(), state.qp);
        if due && room_of(self.send_wr, used) != 0 {
            self.noop(connection, qp);
            // What the device did not take is tried again when the hand comes round.
            if self.ring(connection, qp)
                && let Some(state) = self.connections.get_mut(connection)
            {
                state.last_sent = now;
            }
        }
    }

    /// Rings the doorbell. Whatever the device did not take is put back as if it had never been
    /// queued, last first: keys, credits, cursors, places in the queues. True if it took all.
    fn ring(&mut self, connection: Handle, qp: Qp) -> bool {
        let length = self.chain.len();
        self.counters.doorbells.add(1);
        let accepted = match self.nic.doorbell(qp) {
            Ok(()) => length,
            Err(rejected) => {
                self.counters.partial_doorbells.add(1);
                (rejected.accepted as usize).min(length)
            }
        };
        self.counters.work_requests.add(accepted as u64);
        while self.chain.len() > accepted {
            if let Some(link) = self.chain.pop() {
                self.take_back(connection, link);
            }
        }
        for link in &self.chain {
            match link.what {
                What::Answer { .. } | What::Request { .. } => self.counters.messages_sent.add(1),
                What::Noop { .. } => self.counters.noops.add(1),
                What::Register | What::Invalidate | What::Fence | What::Write => {}
            }
        }
        // The descriptors of transfers whose DONE went out are no longer needed.
        while let Some(link) = self.chain.pop() {
            if matches!(link.what, What::Answer { .. })
                && let Some(transfer) = self.transfers.get_mut(link.handle)
                && let Sink::Many {
                    receive,
                    message,
                    owe,
                    ..
                } = core::mem::replace(&mut transfer.sink, Sink::None)
            {
                self.repost(connection, receive, message, owe);
            }
        }
        accepted == length
    }

    fn take_back(&mut self, connection: Handle, link: Link) {
        let Some(state) = self.connections.get_mut(connection) else {
            return;
        };
        state.head = state.head.wrapping_sub(1);
        match link.what {
            What::Answer { paid } | What::Request { paid } | What::Noop { paid } => {
                state.credits.unpay(paid);
            }
            What::Register | What::Invalidate | What::Fence | What::Write => {}
        }
        if let What::Noop { .. } = link.what {
            if let Some(posted) = state.noops.pop_back() {
                self.messages.give(posted.completed());
            }
            // No queue remembers a NOOP: the credits it was to return must not be forgotten.
            self.list(connection);
            return;
        }
        let Some(transfer) = self.transfers.get_mut(link.handle) else {
            return;
        };
        transfer.in_flight = transfer.in_flight.saturating_sub(1);
        // A connection that failed while the chain was open keeps what it decided.
        let lost = state.state == State::Closing;
        if !lost {
            transfer.phase = link.phase;
            transfer.cursor = link.cursor;
        }
        match link.what {
            What::Register => {
                if let Some(window) = &mut transfer.window {
                    window.not_registered();
                }
                let alive = self.counters.keys_alive.get();
                self.counters.keys_alive.set(alive.saturating_sub(1));
            }
            What::Invalidate => {
                if let Some(window) = &mut transfer.window {
                    window.not_invalidating();
                }
            }
            What::Answer { .. } | What::Request { .. } => {
                transfer.message = transfer.message.take().map(Slot::home);
            }
            What::Write | What::Fence | What::Noop { .. } => {}
        }
        let queue = match link.what {
            What::Invalidate | What::Fence => &mut state.invalidates,
            What::Request { .. } => {
                state.credits.unspend();
                &mut state.credited
            }
            What::Register if link.phase == Phase::Request => &mut state.credited,
            _ => &mut state.answers,
        };
        if !transfer.queued && !lost {
            transfer.queued = true;
            self.transfers.push_front(queue, link.handle);
        }
    }
}

/// Room on a send queue with so many requests. The last place is for the drain.
const fn room_of(send_wr: u32, used: u32) -> u32 {
    send_wr.saturating_sub(1).saturating_sub(used)
}

const fn link_of(what: What, handle: Handle, transfer: &Transfer<'_>) -> Link {
    Link {
        what,
        handle,
        phase: transfer.phase,
        cursor: transfer.cursor,
    }
}

/// The list that holds a transfer's memory, and where in it that begins.
fn memory_of<'t, 'a>(
    place: &'t Place<'a>,
    entries: &'t Pool<'_, Attached<'a>>,
) -> Option<(&'t PageList<'a>, u64)> {
    match place {
        Place::Own(list) => Some((list, 0)),
        Place::Entry { entry, offset } => Some((entries.get(*entry)?.entry.memory, *offset)),
        Place::Ping | Place::Nothing => None,
    }
}

/// Address of the first byte in the key's address space. The address that goes to the peer is exactly
/// the registered one (LU-9500).
fn base_of(list: &PageList<'_>, offset: u64, length: u32, zero_based: bool) -> u64 {
    if zero_based {
        return 0;
    }
    list.slice(offset, length)
        .next()
        .map_or(0, |piece| piece.address)
}

fn transfer_fragment(sink: &Sink<'_>, cursor: Cursor) -> Option<Fragment> {
    match sink {
        Sink::None => None,
        Sink::One(fragment) => (cursor.fragment == 0).then_some(*fragment),
        Sink::Many {
            message, located, ..
        } => located.get(message.peek(), cursor.fragment as usize),
    }
}

/// Where the next WRITE goes, and how much fits there. Fragments of no length are passed over.
fn next_target(transfer: &mut Transfer<'_>) -> Option<(Remote, u32)> {
    loop {
        let fragment = transfer_fragment(&transfer.sink, transfer.cursor)?;
        let room = fragment.length.saturating_sub(transfer.cursor.offset);
        if room == 0 {
            transfer.cursor.fragment = transfer.cursor.fragment.checked_add(1)?;
            transfer.cursor.offset = 0;
            continue;
        }
        let left = transfer.length.saturating_sub(transfer.cursor.written);
        let remote = Remote {
            address: fragment
                .address
                .wrapping_add(u64::from(transfer.cursor.offset)),
            rkey: transfer.sink_key,
        };
        return Some((remote, room.min(left)));
    }
}

/// What a message needs to know of its sender.
struct Context<'c> {
    handle: Handle,
    stamp: u64,
    local: (crate::wire::Nid, crate::wire::Pid),
    zero_based: bool,
    ping: &'c [u8],
}

/// Writes the message that the transfer's phase calls for; its length. Every message fits its buffer.
fn build<'a>(
    transfer: &Transfer<'a>,
    entries: &Pool<'_, Attached<'a>>,
    envelope: &Envelope,
    context: &Context<'_>,
    to: &mut [u8; 4096],
) -> u32 {
    let cookie = context.handle.to_bits();
    let ours = WireHandle::from_words(context.stamp, cookie);
    let key = transfer
        .window
        .as_ref()
        .map(crate::registration::Descriptor::key);
    let base = memory_of(&transfer.place, entries).map_or(0, |(list, offset)| {
        base_of(list, offset, transfer.length, context.zero_based)
    });
    let fragment = [Fragment {
        length: transfer.length,
        address: base,
    }];
    let sink = Descriptor::new(key.unwrap_or_default(), &fragment);
    let header = lnet::Header {
        destination: transfer.peer.0,
        source: context.local.0,
        destination_pid: transfer.peer.1,
        source_pid: context.local.1,
        payload_length: match transfer.role {
            Role::Put | Role::Reply => transfer.length,
            _ => 0,
        },
        body: match transfer.role {
            Role::Put => lnet::Body::Put {
                ack: if transfer.handle == WireHandle::NONE {
                    WireHandle::NONE
                } else {
                    ours
                },
                match_bits: transfer.match_bits.0,
                hdr_data: transfer.hdr_data,
                portal: transfer.portal.0,
                offset: transfer.remote_offset,
            },
            Role::Get => lnet::Body::Get {
                reply: ours,
                match_bits: transfer.match_bits.0,
                portal: transfer.portal.0,
                offset: transfer.remote_offset,
                sink_length: transfer.length,
            },
            Role::Ack => lnet::Body::Ack {
                handle: transfer.handle,
                match_bits: transfer.match_bits.0,
                length: transfer.outcome.unwrap_or(0),
            },
            _ => lnet::Body::Reply {
                handle: transfer.handle,
            },
        },
    };
    let status = |status| Done {
        cookie: transfer.cookie,
        status,
    };
    let written = i32::try_from(transfer.cursor.written).unwrap_or(i32::MAX);
    let body = match (transfer.phase, transfer.role) {
        (_, Role::Nak(errno)) => Body::PutNak(status(errno)),
        (_, Role::Refusal(errno)) => Body::GetDone(status(errno)),
        (Phase::Data, Role::Source) => Body::GetDone(status(written)),
        (Phase::Data, _) => Body::PutDone(status(written)),
        (Phase::Answer, _) => Body::PutAck {
            source_cookie: transfer.cookie,
            sink_cookie: cookie,
            sink,
        },
        (_, Role::Get) if transfer.bulk => Body::GetReq {
            header,
            cookie,
            sink,
        },
        _ if transfer.bulk => Body::PutReq { header, cookie },
        _ => {
            let payload = payload(transfer, entries, context, header.payload_length, to);
            return encode_immediate(envelope, &header, payload, to).unwrap_or(0);
        }
    };
    Message {
        envelope: *envelope,
        body,
    }
    .encode(to)
    .unwrap_or(0)
}

/// Copies the payload of an IMMEDIATE to where it belongs; how many bytes it has.
fn payload<'a>(
    transfer: &Transfer<'a>,
    entries: &Pool<'_, Attached<'a>>,
    context: &Context<'_>,
    length: u32,
    to: &mut [u8; 4096],
) -> u32 {
    let Some(room) = to
        .get_mut(IMMEDIATE_BYTES as usize..)
        .and_then(|rest| rest.get_mut(..length as usize))
    else {
        return 0;
    };
    if let Some((list, offset)) = memory_of(&transfer.place, entries) {
        list.read_at(offset, room);
    } else {
        for (to, from) in room.iter_mut().zip(context.ping) {
            *to = *from;
        }
    }
    length
}
