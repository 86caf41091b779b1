//! What goes out: per connection first what kills keys, then answers, then what needs credits, then a
//! NOOP; one doorbell for all of it.

use super::fill::{Filled, room_of};
use super::record::{Link, What};
use super::sink::{choose, cover};
use super::{Poller, Received};
use crate::connection::State;
use crate::nic::{Nic, Qp};
use crate::pool::Handle;
use crate::time::Instant;
use crate::transfer::{Input, Message as Slot, Phase, Role, Sink, step};
use crate::wire::IMMEDIATE_PAYLOAD;

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

    /// Transfers of ours that wait, oldest first, as long as there is what they need: a share of the queue pair, a buffer and
    /// a window, all or nothing.
    fn admit_waiting(&mut self, connection: Handle) {
        loop {
            let Some(state) = self.connections.get_mut(connection) else {
                return;
            };
            if !state.has_own_share() {
                return;
            }
            let Some((handle, transfer)) = self.transfers.take_front(&mut state.waiting) else {
                return;
            };
            let length = transfer.length;
            let mut is_mapped = false;
            let mut has_room = !self.messages.is_empty();
            // A large REPLY will come as a PUT_REQ: nothing is asked for that could not land.
            if has_room && transfer.role == Role::Get && length > IMMEDIATE_PAYLOAD {
                let Ok(mechanism) = choose(transfer, &state.choices, length) else {
                    self.counters.unmappable.add(1);
                    self.refuse_own(handle);
                    continue;
                };
                // A GET that goes as a message takes its window when a REPLY by PUT_REQ comes: held that long, the
                // last window could be what the peer's own request waits for, and the REPLY behind that.
                if transfer.bulk {
                    let takes_window = state.choices.takes_window(mechanism, length);
                    let (windows, stages) = (&mut self.windows, &mut self.stages);
                    has_room = cover(
                        transfer,
                        takes_window,
                        mechanism,
                        true,
                        windows,
                        stages,
                        self.counters,
                    );
                    is_mapped = state.choices.takes_mapping(mechanism, length);
                }
            }
            if !has_room {
                self.counters.waits.add(1);
                self.transfers.push_front(&mut state.waiting, handle);
                return;
            }
            state.admit(transfer, self.messages.take(), self.limits.pid);
            transfer.queued = false;
            if is_mapped {
                self.apply(handle, Input::Unmapped);
                continue;
            }
            (transfer.phase, _) = step(transfer.phase, Input::Admitted);
            // It is served in this turn, or keeps the connection listed.
            let queue = state.queue_of(transfer);
            self.transfers.push_back(queue, handle);
        }
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
