//! What goes out: per connection first what kills keys, then answers, then what needs credits, then a
//! NOOP; one doorbell for all of it.

use super::record::{CHAIN, Chain, Link, Record, What};
use super::sink::Cover;
use super::{Poller, Received};
use crate::connection::{Connection, State};
use crate::nic::{Nic, Qp, RKey, Remote, SendWr, WrId};
use crate::pool::{Handle, Kind, pack};
use crate::time::Instant;
use crate::transfer::{Cursor, Input, Message as Slot, Phase, Role, Sink, Transfer};
use crate::wire::lnet::WireHandle;
use crate::wire::{Body, IMMEDIATE_PAYLOAD, Message};

impl<N: Nic> Poller<'_, N> {
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
                .is_some_and(Connection::has_work)
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
        let mut work = self.copy_slices(connection);
        let Some(state) = self.connections.get(connection) else {
            return work;
        };
        let qp = state.qp;
        let held = !state.held.is_empty() || !state.held_replies.is_empty();
        let (reposts, waiting) = (!state.reposts.is_empty(), !state.waiting.is_empty());
        let mapping = !state.mappings.is_empty();
        if reposts || held || waiting || mapping {
            if reposts {
                work = work.saturating_add(self.retry_reposts(connection));
            }
            if held {
                work = work.saturating_add(self.take_held(connection, now));
            }
            if waiting {
                self.admit_waiting(connection);
            }
            // Those that were admitted now may find theirs at once.
            work = work.saturating_add(self.map_waiting(connection, now));
            if self
                .connections
                .get(connection)
                .is_none_or(|state| state.state == State::Closing)
            {
                return work;
            }
        }
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
            let length = transfer.length;
            let mut cover = Cover::default();
            if self.messages.is_empty() {
                self.counters.waits.add(1);
                return;
            }
            // A large REPLY will come as a PUT_REQ: nothing is asked for that could not land.
            if transfer.role == Role::Get && length > IMMEDIATE_PAYLOAD {
                let Ok(mechanism) = self.choose_own(handle, length) else {
                    self.counters.unmappable.add(1);
                    if let Some(state) = self.connections.get_mut(connection) {
                        self.transfers.pop_front(&mut state.waiting);
                    }
                    self.refuse_own(handle);
                    continue;
                };
                if is_sink {
                    let Some(taken) = self.take_cover(connection, mechanism, length, true) else {
                        self.counters.waits.add(1);
                        return;
                    };
                    cover = taken;
                }
            }
            let (Some(state), Some(transfer)) = (
                self.connections.get_mut(connection),
                self.transfers.get_mut(handle),
            ) else {
                return;
            };
            transfer.message = self.messages.take().map(Slot::Home);
            transfer.window = cover.window;
            transfer.stage = cover.stage;
            transfer.admitted = true;
            transfer.queued = false;
            transfer.peer = (state.terms.peer, self.limits.pid);
            state.own = state.own.saturating_add(1);
            self.transfers.pop_front(&mut state.waiting);
            let input = if is_sink && self.takes_mapping(handle) {
                Input::Unmapped
            } else {
                Input::Admitted
            };
            self.apply(handle, input);
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
            let room = room_of(state.send_wr, state.on_send_queue()) as usize;
            let left = CHAIN.saturating_sub(self.chain.len());
            let may_ask = state.credits.available() > 0 && !state.credited.is_empty();
            let next = if !state.invalidates.is_empty() {
                None
            } else if !state.answers.is_empty() {
                self.transfers.front(&state.answers)
            } else if may_ask {
                self.transfers.front(&state.credited)
            } else {
                None
            };
            // The queue is sized for exactly this: who asks for more than the next step takes waits when it is full but for
            // one, with an invalidate in hand.
            let step = match next {
                Some(handle) => {
                    let registers = self.source_from != usize::MAX;
                    step_of(self.transfers.get(handle), registers)
                }
                None => 1,
            };
            if room < step {
                return false;
            }
            if left < step {
                return true;
            }
            let room = room.min(left);
            if let Some(handle) = self.transfers.pop_front(&mut state.invalidates) {
                self.invalidate(connection, qp, handle);
            } else if let Some(handle) = self.transfers.pop_front(&mut state.answers) {
                self.answer(connection, qp, handle, room);
            } else if may_ask && let Some(handle) = self.transfers.pop_front(&mut state.credited) {
                self.request(connection, qp, handle);
            } else {
                if state.wants_noop(false) {
                    self.noop(connection, qp);
                }
                return false;
            }
        }
    }

    /// Puts one work request of a transfer on the open chain, the record and the chain's own list.
    #[inline]
    pub(super) fn link(&mut self, connection: Handle, link: Link, id: WrId) {
        if let Some(state) = self.connections.get_mut(connection)
            && let Some(transfer) = self.transfers.get_mut(link.handle)
        {
            transfer.in_flight = transfer.in_flight.saturating_add(1);
            note(
                &mut self.record,
                &mut self.chain,
                connection,
                state,
                link,
                id,
            );
        }
    }

    fn invalidate(&mut self, connection: Handle, qp: Qp, handle: Handle) {
        let (Some(state), Some(transfer)) = (
            self.connections.get_mut(connection),
            self.transfers.get_mut(handle),
        ) else {
            return;
        };
        let are_killed = state.terms.keys_killed;
        transfer.queued = false;
        if transfer.phase == Phase::Data {
            // The DONE of a registered source was not taken: that goes first.
            self.enqueue(connection, handle);
            return;
        }
        let link = link_of(What::Invalidate, handle, transfer);
        let Some(window) = transfer
            .window
            .as_mut()
            .filter(|window| window.needs_invalidate())
        else {
            // Never invalidate what is not live: some devices' drivers do not survive it.
            // A source's key is for our own device, and no DONE kills it.
            let is_told = transfer.role.is_sink() && are_killed;
            if transfer.in_flight != 0 && transfer.window.is_some() && !is_told {
                self.fence(connection, qp, handle);
                self.apply(handle, Input::PostedInvalidate);
            } else {
                self.died(handle);
            }
            return;
        };
        let id = pack(Kind::Invalidate, handle);
        self.nic
            .queue(qp, id, true, SendWr::Invalidate { key: window.key() });
        window.invalidating();
        transfer.in_flight = transfer.in_flight.saturating_add(1);
        note(
            &mut self.record,
            &mut self.chain,
            connection,
            state,
            link,
            id,
        );
        self.apply(handle, Input::PostedInvalidate);
    }

    /// Whether the message that names a key is signalled: where the peer kills it, no invalidate follows that would tell.
    fn is_told(&self, connection: Handle) -> bool {
        self.connections
            .get(connection)
            .is_some_and(|state| state.terms.keys_killed)
    }

    /// Instead of the invalidate, where the peer's has come first: a signalled request that does nothing
    /// (a WRITE of no bytes checks no key), to tell that the unsignalled ones before it are done.
    fn fence(&mut self, connection: Handle, qp: Qp, handle: Handle) {
        let Some(transfer) = self.transfers.get(handle) else {
            return;
        };
        let link = link_of(What::Fence, handle, transfer);
        let id = pack(Kind::Fence, handle);
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
        let Some(transfer) = self.transfers.get_mut(handle) else {
            return;
        };
        transfer.queued = false;
        match (transfer.phase, transfer.role) {
            (Phase::Data, _) => self.data(connection, qp, handle, room),
            (_, Role::Nak(_) | Role::Refusal(_)) => {
                self.message(connection, qp, handle, true, false);
                self.apply(handle, Input::PostedLast);
            }
            _ => {
                if self.register(connection, qp, handle) {
                    // The invalidate that follows where there is a window tells that this is done, too.
                    let told = self.is_alone(handle) || self.is_told(connection);
                    self.message(connection, qp, handle, told, false);
                    self.apply(handle, Input::PostedPutAck);
                } else {
                    self.close(connection, super::Reason::BadLength);
                }
            }
        }
    }

    /// What needs a credit.
    fn request(&mut self, connection: Handle, qp: Qp, handle: Handle) {
        let (Some(state), Some(transfer)) = (
            self.connections.get_mut(connection),
            self.transfers.get_mut(handle),
        ) else {
            return;
        };
        transfer.queued = false;
        if !state.credits.spend() {
            return;
        }
        let (role, bulk) = (transfer.role, transfer.bulk);
        // Whether no invalidate will tell of its messages.
        let told = transfer.window.is_none() || state.terms.keys_killed;
        let wants_ack = role == Role::Put && transfer.handle != WireHandle::NONE;
        let is_sink = role == Role::Get && bulk;
        if is_sink {
            // What was chosen for it when it was admitted covers it.
            self.register(connection, qp, handle);
        }
        self.message(connection, qp, handle, told, true);
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

    /// Whether no invalidate will tell of its messages.
    fn is_alone(&self, handle: Handle) -> bool {
        self.transfers
            .get(handle)
            .is_none_or(|transfer| transfer.window.is_none())
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
        note(
            &mut self.record,
            &mut self.chain,
            connection,
            state,
            link,
            id,
        );
    }

    /// Sends a NOOP if nothing was sent for long.
    pub(super) fn keep_alive(&mut self, connection: Handle, now: Instant) {
        let keepalive = self.limits.keepalive;
        let Some(state) = self.connections.get_mut(connection) else {
            return;
        };
        let due = now.since(state.last_sent) >= keepalive && state.wants_noop(true);
        let (room, qp) = (room_of(state.send_wr, state.on_send_queue()), state.qp);
        if due && room != 0 {
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
                What::Immediate { .. } => self.counters.write_immediates.add(1),
                What::Register | What::Invalidate | What::Fence | What::Write => {}
            }
        }
        // The descriptors of transfers whose DONE went out are no longer needed.
        while let Some(link) = self.chain.pop() {
            if matches!(link.what, What::Answer { .. } | What::Immediate { .. })
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
            What::Answer { paid }
            | What::Immediate { paid }
            | What::Request { paid }
            | What::Noop { paid } => {
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
                if transfer.role.is_sink() {
                    let alive = self.counters.keys_alive.get();
                    self.counters.keys_alive.set(alive.saturating_sub(1));
                }
            }
            What::Invalidate => {
                if let Some(window) = &mut transfer.window {
                    window.not_invalidating();
                }
            }
            What::Answer { .. } | What::Request { .. } => {
                transfer.message = transfer.message.take().map(Slot::home);
            }
            What::Write | What::Immediate { .. } | What::Fence | What::Noop { .. } => {}
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

/// The most work requests of a transfer's next step that must go together: REGISTER or a WRITE, and the message behind.
/// A source that is registered has both.
const fn step_of(transfer: Option<&Transfer<'_>>, registers: bool) -> usize {
    match transfer {
        Some(Transfer {
            phase: Phase::Data, ..
        }) if registers => 3,
        Some(Transfer {
            role: Role::Nak(_) | Role::Refusal(_) | Role::Ack,
            ..
        }) => 1,
        _ => 2,
    }
}

/// Room on a send queue with so many requests. The last place is for the drain.
const fn room_of(send_wr: u32, used: u32) -> u32 {
    send_wr.saturating_sub(1).saturating_sub(used)
}

/// One work request more on the send queue of a connection.
#[inline]
pub(super) fn note(
    record: &mut Record<'_>,
    chain: &mut Chain,
    connection: Handle,
    state: &mut Connection<'_>,
    link: Link,
    id: WrId,
) {
    record.set(connection, state.head, id);
    state.head = state.head.wrapping_add(1);
    // `fill` keeps room for a whole step.
    let _ = chain.push(link);
}

pub(super) const fn link_of(what: What, handle: Handle, transfer: &Transfer<'_>) -> Link {
    Link {
        what,
        handle,
        phase: transfer.phase,
        cursor: transfer.cursor,
    }
}
