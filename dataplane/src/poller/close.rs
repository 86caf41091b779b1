//! Ends: of a transfer, of a connection, of the core.

use super::{Leftovers, Poller, Reason, Received, Report};
use crate::connection::State;
use crate::endpoint::{Error, Event, Incoming, Landed};
use crate::nic::{Nic, SendWr, Status};
use crate::pool::{Handle, Kind, Queue, pack};
use crate::portal::Leaving;
use crate::transfer::{Input, Phase, Place, Role, Sink, Transfer};
use crate::wire::lnet::WireHandle;

impl<'a, N: Nic> Poller<'a, N> {
    /// Ends a transfer, if nothing of it is on the send queue and no key of it is alive; else its last
    /// completion will.
    pub(super) fn finish(&mut self, handle: Handle) {
        let Some(state) = self.transfers.get(handle) else {
            return;
        };
        let (queued, is_sink) = (state.queued, state.role == Role::Sink);
        let window = state.window.as_ref();
        if window.is_some_and(crate::registration::Descriptor::needs_invalidate) {
            // Its REGISTER was taken, its message was not, and then its time was over: nobody was told the
            // key, and it must not be any more.
            if queued {
                self.unqueue(handle);
            }
            self.apply(handle, Input::Revoked);
            return;
        }
        let dying = window.is_some_and(crate::registration::Descriptor::may_be_alive);
        if state.in_flight != 0 || dying {
            return;
        }
        if queued {
            self.unqueue(handle);
        }
        if is_sink && self.acknowledge(handle) {
            return;
        }
        self.end(handle);
    }

    /// A peer's PUT that asked for an ACK turns into that ACK once its data has landed.
    fn acknowledge(&mut self, handle: Handle) -> bool {
        let Some(state) = self.transfers.get_mut(handle) else {
            return false;
        };
        let wanted = state.role == Role::Sink
            && state.abandoned.is_none()
            && state.handle != WireHandle::NONE
            && state.outcome.is_ok();
        if !wanted {
            return false;
        }
        state.role = Role::Ack;
        state.bulk = false;
        state.phase = Phase::Waiting;
        if let Some(window) = state.window.take() {
            self.windows.give(window, false);
        }
        if let Some(stage) = state.stage.take() {
            self.stages.give(stage, false);
        }
        if let Some(lease) = state.mapping.take() {
            self.give_mapping(lease, true);
        }
        // The data has landed: the application is told now, and the ACK goes its own way.
        self.landed(handle);
        self.apply(handle, Input::Admitted);
        true
    }

    /// Tells the application of a peer's transfer, if it wants to know, and releases its entry.
    fn landed(&mut self, handle: Handle) {
        let Some(state) = self.transfers.get_mut(handle) else {
            return;
        };
        let Place::Entry { entry, offset } = state.place else {
            return;
        };
        state.place = Place::Nothing;
        if core::mem::replace(&mut state.event, false) {
            let event = landed(state, offset);
            self.tell(Event::Landed(event));
        }
        self.release_entry(entry);
    }

    /// One transfer less in an entry.
    pub(super) fn release_entry(&mut self, entry: Handle) {
        if let Some(attached) = self.entries.get_mut(entry)
            && attached.disengage()
        {
            self.let_go(entry);
        }
    }

    /// Gives back all that a transfer holds and tells whoever waits for it. No key of it is alive.
    pub(super) fn end(&mut self, handle: Handle) {
        let (mut lent, mut left) = (None, None);
        // What it holds goes straight to where it belongs, the rest stays where it is: a transfer is several cache lines
        // long.
        self.transfers.discard_with(handle, |transfer| {
            let own = transfer.role.is_own();
            if let Some(window) = transfer.window.take() {
                self.windows.give(window, own);
            }
            if let Some(stage) = transfer.stage.take() {
                self.stages.give(stage, own);
            }
            if let Some(message) = transfer.message.take() {
                self.messages.give(message.into_buffer());
            }
            if let Some(state) = self.connections.get_mut(transfer.connection) {
                if transfer.admitted {
                    let share = if own {
                        &mut state.own
                    } else {
                        &mut state.peers
                    };
                    *share = share.saturating_sub(1);
                }
                if transfer.reserved {
                    state.credits.unreserve();
                }
            }
            let outcome = transfer.abandoned.map_or(transfer.outcome, Err);
            if own {
                self.own = self.own.saturating_sub(1);
                self.counters.transfers.add(1);
                if let Ok(bytes) = outcome {
                    self.counters.bytes.add(u64::from(bytes));
                }
            } else {
                self.counters.peer_transfers.add(1);
            }
            if let Some(lease) = transfer.mapping.take() {
                // Whose peer may still write has the next transfer of this memory go by another key. The old one is live
                // until its batch is unmapped.
                let is_quiet = transfer.abandoned.is_none()
                    && transfer.outcome != Err(Error::ConnectionClosed);
                self.mappings.release(lease.mapping, is_quiet);
            }
            match core::mem::replace(&mut transfer.place, Place::Nothing) {
                Place::Own(memory) if transfer.event => {
                    self.events_due = self.events_due.saturating_sub(1);
                    // Room was reserved and only this core puts events in.
                    let _ = self.ends.events.push(Event::Done {
                        token: transfer.token,
                        outcome,
                        memory,
                    });
                }
                Place::Entry { entry, offset } => {
                    if transfer.event {
                        self.events_due = self.events_due.saturating_sub(1);
                        let event = landed(transfer, offset);
                        let _ = self.ends.events.push(Event::Landed(event));
                    }
                    if let Some(attached) = self.entries.get_mut(entry)
                        && attached.disengage()
                    {
                        left = Some(entry);
                    }
                }
                Place::Own(_) | Place::Ping | Place::Nothing => {}
            }
            if transfer.is_lent() {
                let sink = core::mem::replace(&mut transfer.sink, Sink::None);
                lent = Some((transfer.connection, sink));
            }
        });
        if !self.mappings.is_empty() {
            self.note_mappings();
        }
        if let Some(entry) = left {
            self.let_go(entry);
        }
        if let Some((
            connection,
            Sink::Many {
                receive,
                message,
                owe,
                ..
            },
        )) = lent
        {
            self.repost(connection, receive, message, owe);
        }
        // Who waits for its share keeps the connection listed.
    }

    /// Takes a transfer out of whichever queue of its connection it is in.
    pub(super) fn unqueue(&mut self, handle: Handle) {
        let Some(transfer) = self.transfers.get_mut(handle) else {
            return;
        };
        transfer.queued = false;
        let Some(state) = self.connections.get_mut(transfer.connection) else {
            return;
        };
        for queue in [
            &mut state.waiting,
            &mut state.reserve,
            &mut state.credited,
            &mut state.answers,
            &mut state.invalidates,
            &mut state.copies,
            &mut state.mappings,
        ] {
            if self.transfers.unlink(queue, handle) {
                return;
            }
        }
    }

    /// Begins to end a connection: everything outstanding is flushed, then `drain` ends the rest.
    pub(super) fn close(&mut self, connection: Handle, why: Reason) {
        let Some(state) = self.connections.get_mut(connection) else {
            return;
        };
        if state.state == State::Closing {
            // What is flushed may be told before what caused it.
            if state.why == Some(Reason::Device(Status::Flushed))
                && matches!(why, Reason::Device(_))
            {
                state.why = Some(why);
            }
            return;
        }
        state.state = State::Closing;
        state.why = Some(why);
        for queue in [
            &mut state.waiting,
            &mut state.reserve,
            &mut state.credited,
            &mut state.answers,
            &mut state.invalidates,
            &mut state.copies,
            &mut state.mappings,
        ] {
            *queue = Queue::new();
        }
        let qp = state.qp;
        let mut held = core::mem::take(&mut state.held);
        let mut replies = core::mem::take(&mut state.held_replies);
        let mut reposts = core::mem::take(&mut state.reposts);
        self.nic.fail(qp);
        self.counters.connections_ended.add(1);
        if !matches!(why, Reason::Closed | Reason::Device(_) | Reason::TimedOut) {
            self.counters.protocol_errors.add(1);
        }
        for queue in [&mut held, &mut replies, &mut reposts] {
            while let Some(receive) = self.receives.pop_front(queue) {
                if let Some(receive) = self.receives.remove(receive) {
                    match receive.state {
                        Received::Held { buffer, .. } | Received::Idle { buffer, .. } => {
                            self.messages.give(buffer);
                        }
                        Received::Posted(posted) => self.messages.give(posted.completed()),
                        Received::Lent => {}
                    }
                }
            }
        }
        for index in 0..self.transfers.capacity() {
            let Some(handle) = self.transfers.at(index) else {
                continue;
            };
            if let Some(transfer) = self.transfers.get_mut(handle)
                && transfer.connection == connection
                && transfer.phase != Phase::Rebuilding
            {
                transfer.queued = false;
                // Where only the key had still to die, what was moved was moved.
                // Not so what is still in a staging buffer.
                let landed = match transfer.phase {
                    Phase::Invalidate | Phase::Invalidating => transfer.stage.is_none(),
                    Phase::Settling => true,
                    _ => false,
                };
                if transfer.outcome.is_ok() && !landed {
                    transfer.outcome = Err(Error::ConnectionClosed);
                }
                self.apply(handle, Input::ConnectionLost);
            }
        }
        self.list(connection);
    }

    /// Ends a failed connection once the device has given everything of it back. True when it is gone.
    ///
    /// A window whose key may be alive goes to the control side first, and its transfer waits for it:
    /// a key of an mkey is good on every queue pair of its protection domain.
    pub(super) fn drain(&mut self, connection: Handle) -> bool {
        let Some(state) = self.connections.get(connection) else {
            return true;
        };
        if state.on_send_queue() != 0 {
            self.post_drain(connection);
            return false;
        }
        if state.posted_receives != 0 {
            return false;
        }
        let (qp, token) = (state.qp, state.token);
        let why = state.why.unwrap_or(Reason::Closed);
        for index in 0..self.transfers.capacity() {
            let Some(handle) = self.transfers.at(index) else {
                continue;
            };
            let Some(transfer) = self.transfers.get_mut(handle) else {
                continue;
            };
            if transfer.connection != connection || transfer.phase == Phase::Rebuilding {
                continue;
            }
            let (own, granted) = (transfer.role.is_own(), transfer.role.is_sink());
            match &transfer.window {
                Some(window) if window.may_be_alive() => {
                    if self.ends.reports.free() == 0 {
                        return false;
                    }
                    let region = window.region();
                    transfer.window = None;
                    transfer.phase = Phase::Rebuilding;
                    self.windows.lose(own);
                    self.counters.windows_broken.add(1);
                    if let Some(window) = self.nic.retire_window(region) {
                        let _ = self.ends.reports.push(Report::Broken {
                            window,
                            of: Some(handle),
                        });
                    } else {
                        // The device does not know it (any more): no key of it can be alive.
                        if granted {
                            self.key_died();
                        }
                        self.end(handle);
                    }
                }
                _ => self.end(handle),
            }
        }
        if self.ends.reports.free() == 0 {
            return false;
        }
        // Ending its transfers has listed it again.
        self.connections.unlink(&mut self.listed, connection);
        if let Some(qp) = self.nic.retire(qp) {
            self.connections.remove(connection);
            let _ = self.ends.reports.push(Report::Gone {
                connection,
                qp,
                token,
                why,
            });
        } else {
            self.connections.remove(connection);
        }
        true
    }

    /// The last request on a failed send queue. An unsignalled request that was done before the queue
    /// pair failed is flushed by nothing: only the end of a later one tells that its slot is free.
    fn post_drain(&mut self, connection: Handle) {
        let Some(state) = self.connections.get_mut(connection) else {
            return;
        };
        if state.draining || state.on_send_queue() >= state.send_wr {
            return;
        }
        let (qp, head) = (state.qp, state.head);
        let id = pack(Kind::Drain, connection);
        // It is flushed and never runs.
        self.nic.queue(qp, id, true, SendWr::NOTHING);
        self.counters.doorbells.add(1);
        if self.nic.doorbell(qp).is_err() {
            return;
        }
        self.counters.work_requests.add(1);
        self.record.set(connection, head, id);
        if let Some(state) = self.connections.get_mut(connection) {
            state.head = head.wrapping_add(1);
            state.draining = true;
        }
    }

    /// The control side wants the core to end.
    pub(super) fn stop(&mut self) {
        self.stopping = true;
        for index in 0..self.connections.capacity() {
            if let Some(connection) = self.connections.at(index) {
                self.close(connection, Reason::Closed);
            }
        }
        for index in 0..self.entries.capacity() {
            if let Some(handle) = self.entries.at(index) {
                if let Some(attached) = self.entries.get_mut(handle) {
                    attached.leaving.get_or_insert(Leaving::Asked);
                }
                self.let_go(handle);
            }
        }
    }

    /// Goes on ending: when all connections and transfers are gone, so are the windows, and then the
    /// control side is told what is left.
    pub(super) fn wind_down(&mut self) -> u32 {
        let busy =
            !self.connections.is_empty() || !self.transfers.is_empty() || !self.entries.is_empty();
        if busy || self.stopped {
            return 0;
        }
        // The pool ends by its own road, once what was asked for has come.
        if !self.mappings.is_empty() {
            return 0;
        }
        while self.ends.reports.free() > 1
            && let Some(descriptor) = self.windows.remove()
        {
            if let Some(window) = self.nic.retire_window(descriptor.region()) {
                let _ = self.ends.reports.push(Report::Retired { window });
            }
        }
        if self.windows.is_empty() && self.ends.reports.free() > 0 {
            let leftovers: Leftovers = self.leftovers();
            self.stopped = self.ends.reports.push(Report::Stopped(leftovers)).is_ok();
        }
        1
    }
}

/// What an application is told of a peer's transfer.
fn landed(transfer: &Transfer<'_>, offset: u64) -> Landed {
    Landed {
        token: transfer.token,
        operation: match transfer.role {
            // A PUT_REQ of which nothing fits is answered by a PUT_NAK, and has landed all the same.
            Role::Sink | Role::Ack | Role::Nak(_) => Incoming::Put {
                hdr_data: transfer.hdr_data,
            },
            _ => Incoming::Get,
        },
        nid: transfer.peer.0,
        pid: transfer.peer.1,
        match_bits: transfer.match_bits,
        offset: u32::try_from(offset).unwrap_or(u32::MAX),
        outcome: transfer.abandoned.map_or(transfer.outcome, Err),
    }
}
