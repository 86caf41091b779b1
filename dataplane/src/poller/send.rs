//! What goes out: per connection first what kills keys, then answers, then what needs credits, then a
//! NOOP; one doorbell for all of it.

use super::desk::Desk;
use super::record::{CHAIN, Link, What};
use super::sink::{Uncovered, choose, cover};
use super::{Poller, Received};
use crate::connection::{Connection, State};
use crate::nic::{Nic, Qp, SendWr};
use crate::pool::{Handle, Kind, Pool, pack};
use crate::time::Instant;
use crate::transfer::{Input, Message as Slot, Phase, Role, Sink, Transfer, step};
use crate::wire::lnet::WireHandle;
use crate::wire::{Body, IMMEDIATE_PAYLOAD, Message};

impl<'a, N: Nic> Poller<'a, N> {
    /// Serves every connection that has something to do. Those that still have afterwards are looked
    /// at again by the next poll, whether or not anything completed meanwhile (R10).
    #[inline]
    pub(super) fn send(&mut self, now: Instant) -> u32 {
        if self.listed.is_empty() {
            return 0;
        }
        self.serve_listed(now)
    }

    fn serve_listed(&mut self, now: Instant) -> u32 {
        let mut listed = core::mem::take(&mut self.listed);
        let mut work = 0_u32;
        while let Some(connection) = self.connections.pop_front(&mut listed) {
            work = work.saturating_add(self.serve(connection, now));
            if let Some(state) = self.connections.get_mut(connection)
                && state.has_work()
                && !state.listed
            {
                state.listed = true;
                self.connections.push_back(&mut self.listed, connection);
            }
        }
        work
    }

    fn serve(&mut self, connection: Handle, now: Instant) -> u32 {
        let Some(state) = self.connections.get_mut(connection) else {
            return 0;
        };
        state.listed = false;
        if state.state == State::Closing {
            return u32::from(self.drain(connection));
        }
        let qp = state.qp;
        let mut work = 0_u32;
        if state.holds_back() {
            work = self.serve_held(connection, now);
            if self
                .connections
                .get(connection)
                .is_none_or(|state| state.state == State::Closing)
            {
                return work;
            }
        }
        loop {
            let queued = self.fill(connection, now);
            if self.chain.is_empty() {
                return work;
            }
            let length = self.chain.len();
            work = work.saturating_add(u32::try_from(length).unwrap_or(u32::MAX));
            let whole = self.ring(connection, qp);
            // A chain that was cut by its own length goes on; one that the device cut waits.
            if !whole || !queued {
                return work;
            }
        }
    }

    /// What waits for something else than a credit or room on the send queue.
    fn serve_held(&mut self, connection: Handle, now: Instant) -> u32 {
        let Some(state) = self.connections.get(connection) else {
            return 0;
        };
        let held = !state.held.is_empty() || !state.held_replies.is_empty();
        let (copies, reposts) = (!state.copies.is_empty(), !state.reposts.is_empty());
        let waiting = !state.waiting.is_empty();
        let mut work = 0_u32;
        if copies {
            work = self.copy_slices(connection);
        }
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
        work.saturating_add(self.map_waiting(connection, now))
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

    /// Transfers of ours that wait, oldest first, as long as there is what they need.
    fn admit_waiting(&mut self, connection: Handle) {
        loop {
            let Some(state) = self.connections.get_mut(connection) else {
                return;
            };
            if state.waiting.is_empty() || !state.has_own_share() {
                return;
            }
            let Some(handle) = self.transfers.pop_front(&mut state.waiting) else {
                return;
            };
            if !self.admit_own(connection, handle) {
                self.counters.waits.add(1);
                if let Some(state) = self.connections.get_mut(connection) {
                    self.transfers.push_front(&mut state.waiting, handle);
                }
                return;
            }
        }
    }

    /// Gives a transfer of ours, which is in no queue, its share of the queue pair, a buffer and a window: all or nothing.
    /// False if it has to wait. That its connection has a share for it has been seen.
    fn admit_own(&mut self, connection: Handle, handle: Handle) -> bool {
        let (Some(state), Some(transfer)) = (
            self.connections.get_mut(connection),
            self.transfers.get_mut(handle),
        ) else {
            return true;
        };
        if self.messages.is_empty() {
            return false;
        }
        let length = transfer.length;
        let mut is_mapped = false;
        // A large REPLY will come as a PUT_REQ: nothing is asked for that could not land.
        if transfer.role == Role::Get && length > IMMEDIATE_PAYLOAD {
            let chosen = choose(transfer, &state.choices, length);
            let Ok(mechanism) = chosen else {
                self.counters.unmappable.add(1);
                self.refuse_own(handle);
                return true;
            };
            // A GET that goes as a message takes its window when a REPLY by PUT_REQ comes: held that long, the
            // last window could be what the peer's own request waits for, and the REPLY behind that.
            if transfer.bulk {
                let takes_window = state.choices.takes_window(mechanism, length);
                let (windows, stages) = (&mut self.windows, &mut self.stages);
                let cover = cover(
                    takes_window,
                    mechanism,
                    true,
                    windows,
                    stages,
                    self.counters,
                );
                let Some(cover) = cover else {
                    return false;
                };
                transfer.window = cover.window;
                transfer.stage = cover.stage;
                is_mapped = state.choices.takes_mapping(mechanism, length);
            }
        }
        state.admit(transfer, self.messages.take(), self.limits.pid);
        transfer.queued = false;
        if is_mapped {
            self.apply(handle, Input::Unmapped);
            return true;
        }
        (transfer.phase, _) = step(transfer.phase, Input::Admitted);
        let queue = state.queue_of(transfer);
        self.transfers.push_back(queue, handle);
        self.list(connection);
        true
    }

    /// Queues what may go now on the open chain. True if there is more, and only the chain was full.
    fn fill(&mut self, connection: Handle, now: Instant) -> bool {
        loop {
            let Some((mut desk, state, transfers)) = self.desk(connection) else {
                return false;
            };
            let filled = desk.fill(state, transfers);
            if !desk.chain.is_empty() {
                state.last_sent = now;
            }
            match filled {
                Filled::AsMuchAsMay => return false,
                Filled::Chain => return true,
                Filled::UpToDead(handle) => self.died(handle),
                Filled::UpToUncovered => self.close(connection, super::Reason::BadLength),
            }
        }
    }

    /// Sends a NOOP if nothing was sent for long.
    pub(super) fn keep_alive(&mut self, connection: Handle, now: Instant) {
        let keepalive = self.limits.keepalive;
        let Some((mut desk, state, _)) = self.desk(connection) else {
            return;
        };
        let due = now.since(state.last_sent) >= keepalive && state.wants_noop(true);
        let (room, qp) = (room_of(state.send_wr, state.on_send_queue()), state.qp);
        if due && room != 0 {
            desk.noop(state);
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
        let whole = accepted == length;
        if !whole {
            self.cut(connection, accepted);
        }
        self.counters.work_requests.add(accepted as u64);
        let (mut messages, mut noops, mut immediates) = (0_u64, 0_u64, 0_u64);
        let mut is_lent = false;
        for link in &self.chain {
            match link.what {
                What::Answer { lent, .. } => {
                    messages = messages.wrapping_add(1);
                    is_lent |= lent;
                }
                What::Request { .. } => messages = messages.wrapping_add(1),
                What::Immediate { lent, .. } => {
                    immediates = immediates.wrapping_add(1);
                    is_lent |= lent;
                }
                What::Noop { .. } => noops = noops.wrapping_add(1),
                What::Register
                | What::Invalidate
                | What::Fence
                | What::Tell
                | What::Write { .. } => {}
            }
        }
        if is_lent {
            self.give_back_lent(connection);
        }
        self.chain.clear();
        self.counters.messages_sent.add(messages);
        self.counters.noops.add(noops);
        self.counters.write_immediates.add(immediates);
        whole
    }

    /// The descriptors of transfers whose DONE went out are no longer needed.
    fn give_back_lent(&mut self, connection: Handle) {
        while let Some(link) = self.chain.pop() {
            if let What::Answer { lent: true, .. } | What::Immediate { lent: true, .. } = link.what
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
    }

    /// The device took only so many requests of the chain.
    #[cold]
    fn cut(&mut self, connection: Handle, accepted: usize) {
        while self.chain.len() > accepted {
            if let Some(link) = self.chain.pop() {
                self.take_back(connection, link);
            }
        }
        if let Some(Link {
            what: What::Request { told: false, .. },
            handle,
            ..
        }) = self.chain.last()
            && let Some(state) = self.connections.get_mut(connection)
        {
            state.untold = Some(*handle);
        }
    }

    fn take_back(&mut self, connection: Handle, link: Link) {
        let Some(state) = self.connections.get_mut(connection) else {
            return;
        };
        state.head = state.head.wrapping_sub(1);
        match link.what {
            What::Answer { paid, .. }
            | What::Immediate { paid, .. }
            | What::Request { paid, .. }
            | What::Noop { paid } => {
                state.credits.unpay(paid);
            }
            What::Register | What::Invalidate | What::Fence | What::Tell | What::Write { .. } => {}
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
        if let What::Tell = link.what {
            state.untold = Some(link.handle);
            return;
        }
        // A connection that failed while the chain was open keeps what it decided.
        let lost = state.state == State::Closing;
        if !lost {
            transfer.phase = link.phase;
            if let What::Write { cursor } | What::Immediate { cursor, .. } = link.what {
                transfer.cursor = cursor;
            }
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
            What::Write { .. }
            | What::Immediate { .. }
            | What::Fence
            | What::Tell
            | What::Noop { .. } => {}
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

/// Where filling the chain stopped.
enum Filled {
    /// Nothing more may go now.
    AsMuchAsMay,
    /// There is more, and only the chain was full.
    Chain,
    /// At a transfer whose key is dead without an invalidate of ours.
    UpToDead(Handle),
    /// At one whose memory is not what was matched.
    UpToUncovered,
}

/// What became of a transfer that was to invalidate its key.
enum Invalidated {
    /// It is on the chain.
    Queued,
    /// There was nothing to invalidate.
    Dead,
    /// The DONE of a registered source was not taken: that goes first.
    WantsDone,
}

impl<'a, N: Nic> Desk<'_, 'a, N> {
    /// Queues what may go now on the open chain.
    fn fill(
        &mut self,
        state: &mut Connection<'a>,
        transfers: &mut Pool<'a, Transfer<'a>>,
    ) -> Filled {
        let registers = self.source_from != usize::MAX;
        loop {
            while !state.reserve.is_empty() && state.credits.reserve() {
                if let Some((handle, transfer)) = transfers.take_front(&mut state.reserve) {
                    transfer.reserved = true;
                    transfers.push_back(&mut state.credited, handle);
                }
            }
            let room = room_of(state.send_wr, state.on_send_queue()) as usize;
            let left = CHAIN.saturating_sub(self.chain.len());
            let both = room.min(left);
            // How many work requests must go together. The queue is sized for exactly this: who asks for more than the next
            // step takes waits when it is full but for one, with an invalidate in hand.
            let stop = |step| {
                if room >= step {
                    Filled::Chain
                } else {
                    Filled::AsMuchAsMay
                }
            };
            if let Some(handle) = state.untold {
                if both < 1 {
                    return stop(1);
                }
                state.untold = None;
                self.tell_of(state, transfers, handle);
            } else if !state.invalidates.is_empty() {
                if both < 1 {
                    return stop(1);
                }
                let Some((handle, transfer)) = transfers.take_front(&mut state.invalidates) else {
                    return Filled::AsMuchAsMay;
                };
                self.handle = handle;
                match self.invalidate(state, transfer) {
                    Invalidated::Queued => {}
                    Invalidated::Dead => return Filled::UpToDead(handle),
                    Invalidated::WantsDone => {
                        transfer.queued = true;
                        transfers.push_back(&mut state.answers, handle);
                    }
                }
            } else if !state.answers.is_empty() {
                if both < MOST_OF_A_STEP {
                    let step = step_of(transfers.first(&state.answers), registers);
                    if both < step {
                        return stop(step);
                    }
                }
                let Some((handle, transfer)) = transfers.take_front(&mut state.answers) else {
                    return Filled::AsMuchAsMay;
                };
                self.handle = handle;
                match self.answer(state, transfer, both) {
                    Err(Uncovered) => return Filled::UpToUncovered,
                    Ok(false) => {}
                    Ok(true) => {
                        transfer.queued = true;
                        transfers.push_back(&mut state.invalidates, handle);
                    }
                }
            } else if state.credits.available() > 0 && !state.credited.is_empty() {
                if both < MOST_OF_A_STEP {
                    let bulk = transfers
                        .first(&state.credited)
                        .is_some_and(|first| first.bulk);
                    let step = if bulk { 2 } else { 1 };
                    if both < step {
                        return stop(step);
                    }
                }
                let Some((handle, transfer)) = transfers.take_front(&mut state.credited) else {
                    return Filled::AsMuchAsMay;
                };
                self.handle = handle;
                if transfer.bulk {
                    self.request_bulk(state, transfer);
                    continue;
                }
                // Of a run of messages the last is signalled: that the next is one of it is certain.
                let follows = both > 1
                    && state.credits.available() > 1
                    && transfers
                        .first(&state.credited)
                        .is_some_and(|next| !next.bulk);
                if let Some(transfer) = transfers.get_mut(handle) {
                    self.request_message(state, transfer, !follows);
                }
            } else {
                if both < 1 {
                    return stop(1);
                }
                if state.wants_noop(false) {
                    self.noop(state);
                }
                return Filled::AsMuchAsMay;
            }
        }
    }

    /// The transfer's invalidate, or what tells as much.
    #[inline(always)]
    fn invalidate(
        &mut self,
        state: &mut Connection<'a>,
        transfer: &mut Transfer<'a>,
    ) -> Invalidated {
        transfer.queued = false;
        if transfer.phase == Phase::Data {
            return Invalidated::WantsDone;
        }
        let link = self.link(What::Invalidate, transfer);
        let window = transfer.window.as_mut();
        let Some(window) = window.filter(|window| window.needs_invalidate()) else {
            // Never invalidate what is not live: some devices' drivers do not survive it.
            // A source's key is for our own device, and no DONE kills it.
            let is_told = transfer.role.is_sink() && state.terms.keys_killed;
            if transfer.in_flight != 0 && transfer.window.is_some() && !is_told {
                self.fence(What::Fence, state, transfer);
                transfer.posted(Input::PostedInvalidate);
                return Invalidated::Queued;
            }
            return Invalidated::Dead;
        };
        let wr = SendWr::Invalidate { key: window.key() };
        window.invalidating();
        let id = pack(Kind::Invalidate, self.handle);
        self.queue(state, transfer, link, id, true, wr);
        transfer.posted(Input::PostedInvalidate);
        Invalidated::Queued
    }

    /// The device took only the beginning of a run of messages: a signalled request tells when that is done.
    #[cold]
    fn tell_of(
        &mut self,
        state: &mut Connection<'a>,
        transfers: &mut Pool<'a, Transfer<'a>>,
        handle: Handle,
    ) {
        if let Some(transfer) = transfers.get_mut(handle)
            && transfer.in_flight != 0
        {
            self.handle = handle;
            self.fence(What::Tell, state, transfer);
        }
    }

    /// What needs no credit: PUT_ACK, a refusal, or WRITEs and their DONE. True if an invalidate is to follow.
    #[inline(always)]
    fn answer(
        &mut self,
        state: &mut Connection<'a>,
        transfer: &mut Transfer<'a>,
        room: usize,
    ) -> Result<bool, Uncovered> {
        transfer.queued = false;
        match (transfer.phase, transfer.role) {
            (Phase::Data, _) => self.data(state, transfer, room)?,
            (_, Role::Nak(_) | Role::Refusal(_)) => {
                self.message(state, transfer, true, false, Input::PostedLast);
            }
            _ => {
                self.register(state, transfer)?;
                // The invalidate that follows where there is a window tells that this is done, too.
                let told = transfer.window.is_none() || state.terms.keys_killed;
                self.message(state, transfer, told, false, Input::PostedPutAck);
            }
        }
        // The DONE of a registered source is on the chain: its invalidate follows.
        Ok(transfer.window.is_some()
            && !transfer.role.is_sink()
            && matches!(transfer.phase, Phase::Sent | Phase::SentWantsAck))
    }

    /// A whole LNet message, which needs a credit.
    #[inline(always)]
    fn request_message(
        &mut self,
        state: &mut Connection<'a>,
        transfer: &mut Transfer<'a>,
        told: bool,
    ) {
        transfer.queued = false;
        if !state.credits.spend() {
            return;
        }
        let role = transfer.role;
        if matches!(role, Role::Put | Role::Reply) {
            transfer.outcome = Ok(transfer.length);
        }
        self.immediate(state, transfer, told);
        let wants_ack = role == Role::Put && transfer.handle != WireHandle::NONE;
        transfer.posted(match role {
            Role::Get => Input::PostedGet,
            _ if wants_ack => Input::PostedLastWantsAck,
            _ => Input::PostedLast,
        });
    }

    /// A PUT_REQ or GET_REQ, which needs a credit.
    #[inline(always)]
    fn request_bulk(&mut self, state: &mut Connection<'a>, transfer: &mut Transfer<'a>) {
        transfer.queued = false;
        if !state.credits.spend() {
            return;
        }
        let posted = if transfer.role == Role::Get {
            // What was chosen for it when it was admitted covers it.
            let _ = self.register(state, transfer);
            Input::PostedGetReq
        } else {
            Input::PostedPutReq
        };
        // Whether no invalidate will tell of its messages.
        let told = transfer.window.is_none() || state.terms.keys_killed;
        self.message(state, transfer, told, true, posted);
    }

    /// Returns credits, or shows that we live.
    fn noop(&mut self, state: &mut Connection<'a>) {
        let Some(mut buffer) = self.messages.take() else {
            return;
        };
        let paid = state.credits.pay();
        let message = Message {
            envelope: state.terms.envelope(paid),
            body: Body::Noop,
        };
        let length = message.encode(buffer.bytes()).unwrap_or(0);
        let posted = buffer.post();
        let id = pack(Kind::Noop, self.connection);
        let wr = SendWr::Send {
            message: posted.sge(length),
            invalidate: None,
        };
        self.nic.queue(state.qp, id, true, wr);
        // `wants_noop` saw that there is room.
        let _ = state.noops.push_back(posted);
        let link = Link {
            what: What::Noop { paid },
            handle: self.connection,
            phase: Phase::Sent,
        };
        self.note(state, link, id);
    }
}

/// The most that [`step_of`] says of any transfer.
const MOST_OF_A_STEP: usize = 3;

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
