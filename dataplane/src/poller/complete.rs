//! What the device says is done, and what a transfer does then.

use super::{Poller, Reason, Received};
use crate::connection::State;
use crate::nic::{Burst, Completion, Fault, Nic, Status, WrId};
use crate::pool::{Handle, Kind, unpack};
use crate::time::Instant;
use crate::transfer::{Input, Phase, Step, step};

impl<'a, N: Nic> Poller<'a, N> {
    /// One burst of completions.
    pub(super) fn complete(&mut self, now: Instant) -> Result<u32, Fault> {
        let mut burst = Burst::new();
        self.nic.poll(&mut burst)?;
        for completion in &burst {
            match *completion {
                Completion::Done { id } => self.done(id, None),
                // Nothing but id and status is defined: what failed is looked up (R9).
                Completion::Failed { id, status } => self.done(id, Some(status)),
                Completion::Received {
                    id,
                    length,
                    imm,
                    invalidated,
                } => self.received(id, length, imm, invalidated, now),
            }
        }
        Ok(u32::try_from(burst.len()).unwrap_or(u32::MAX))
    }

    fn done(&mut self, id: WrId, failed: Option<Status>) {
        let Some((kind, handle)) = unpack(id) else {
            self.counters.stale_completions.add(1);
            return;
        };
        let connection = match kind {
            Kind::Receive => {
                self.receive_failed(handle, failed);
                return;
            }
            Kind::Noop | Kind::Drain => Some(handle),
            Kind::Send | Kind::Write | Kind::Register | Kind::Invalidate | Kind::Fence => {
                self.transfers.get(handle).map(|state| state.connection)
            }
        };
        let Some(connection) = connection else {
            self.counters.stale_completions.add(1);
            return;
        };
        if !self.settle(connection, id, failed.is_some()) {
            self.counters.stale_completions.add(1);
            return;
        }
        if let Some(status) = failed {
            self.close(connection, Reason::Device(status));
        }
    }

    /// Everything on the send queue up to `id` is done. False, and nothing touched, if it is not there.
    fn settle(&mut self, connection: Handle, id: WrId, failed: bool) -> bool {
        let Some(state) = self.connections.get_mut(connection) else {
            return false;
        };
        let (head, tail) = (state.head, state.tail);
        let Some(end) = self.record.behind(connection, tail, head, id) else {
            return false;
        };
        // Nothing is sent before the send stage, so that all of it may be taken off at once.
        state.tail = end;
        let mut at = tail;
        while at != end {
            let each = self.record.get(connection, at);
            at = at.wrapping_add(1);
            if let Some((kind, handle)) = each.and_then(unpack) {
                self.finished(kind, handle, failed && at == end);
            }
        }
        // Whoever waits for room on this send queue has it now, and keeps the connection listed.
        true
    }

    /// One work request is off the send queue.
    #[inline(always)]
    fn finished(&mut self, kind: Kind, handle: Handle, failed: bool) {
        if matches!(kind, Kind::Noop | Kind::Drain | Kind::Receive) {
            if kind == Kind::Noop {
                self.noop_finished(handle);
            }
            return;
        }
        let Some(state) = self.transfers.get_mut(handle) else {
            self.counters.stale_completions.add(1);
            return;
        };
        state.in_flight = state.in_flight.saturating_sub(1);
        if kind == Kind::Send {
            state.message = state.message.take().map(|message| message.home());
        }
        let kills = matches!(kind, Kind::Invalidate | Kind::Fence) && !failed;
        if state.in_flight != 0 {
            if kills {
                self.key_finished(kind, handle);
            }
            return;
        }
        if kills {
            // With its key, and nothing else of it on the queue, it is most often over.
            let (own, granted) = (state.role.is_own(), state.role.is_sink());
            let is_plain = kind == Kind::Invalidate && own && granted && state.stage.is_none();
            if is_plain
                && let Some(window) = &mut state.window
                && let (phase, Step::Finish) = step(state.phase, Input::Dead)
                && !state.queued
            {
                window.dead();
                state.phase = phase;
                self.counters.invalidations.add(1);
                self.key_died();
                self.end(handle);
                return;
            }
            self.key_finished(kind, handle);
            self.all_finished(handle);
            return;
        }
        // A message, and most others: with its last work request it has ended.
        if state.phase == Phase::Sent && state.is_bare() {
            self.end(handle);
        } else {
            self.all_finished(handle);
        }
    }

    /// Nothing of a transfer is on the send queue any more.
    fn all_finished(&mut self, handle: Handle) {
        let Some(state) = self.transfers.get(handle) else {
            return;
        };
        let is_over = state.abandoned.is_some();
        self.apply(handle, Input::Completed);
        // Its time ended while it was being sent: an ACK is no longer waited for.
        if is_over {
            self.apply(handle, Input::Expired);
        }
    }

    /// A transfer's key is dead by our own request, or all is done that was before its peer's.
    fn key_finished(&mut self, kind: Kind, handle: Handle) {
        let Some(state) = self.transfers.get_mut(handle) else {
            return;
        };
        let is_sink = state.role.is_sink();
        if kind == Kind::Invalidate {
            let Some(window) = &mut state.window else {
                return;
            };
            window.dead();
            // A source has no more use for it.
            if !is_sink && let Some(window) = state.window.take() {
                self.windows.give(window, state.role.is_own());
            }
            self.counters.invalidations.add(1);
            if is_sink {
                self.key_died();
            }
        }
        self.died(handle);
    }

    #[cold]
    fn noop_finished(&mut self, connection: Handle) {
        let noop = self
            .connections
            .get_mut(connection)
            .and_then(|state| state.noops.pop_front());
        if let Some(posted) = noop {
            self.messages.give(posted.completed());
        }
        // The next may have waited for this one.
        self.list(connection);
    }

    /// A receive did not receive: flushed, or too small for what came.
    fn receive_failed(&mut self, handle: Handle, failed: Option<Status>) {
        let Some(receive) = self.receives.remove(handle) else {
            self.counters.stale_completions.add(1);
            return;
        };
        let connection = receive.connection;
        if let Received::Posted(posted) = receive.state {
            self.messages.give(posted.completed());
            if let Some(state) = self.connections.get_mut(connection) {
                state.posted_receives = state.posted_receives.saturating_sub(1);
            }
        }
        self.close(
            connection,
            Reason::Device(failed.unwrap_or(Status::Flushed)),
        );
    }

    /// One key less that a peer could use.
    pub(super) fn key_died(&self) {
        let alive = self.counters.keys_alive.get();
        self.counters.keys_alive.set(alive.saturating_sub(1));
    }

    /// Moves a transfer on and does what its next step says.
    #[inline(never)]
    pub(super) fn apply(&mut self, handle: Handle, input: Input) -> Step {
        self.advance(handle, input)
    }

    /// [`apply`](Self::apply), where it is worth to be inlined.
    #[inline(always)]
    pub(super) fn advance(&mut self, handle: Handle, input: Input) -> Step {
        let Some(state) = self.transfers.get_mut(handle) else {
            return Step::Ignore;
        };
        let (phase, then) = crate::transfer::step(state.phase, input);
        state.phase = phase;
        match then {
            Step::Wait | Step::Ignore => {}
            Step::Finish => self.finish(handle),
            _ => {
                let idle = state.in_flight == 0 && !state.queued;
                let connection = state.connection;
                self.act(connection, handle, idle, then);
            }
        }
        then
    }

    #[inline(always)]
    fn act(&mut self, connection: Handle, handle: Handle, idle: bool, then: Step) {
        match then {
            Step::Wait | Step::Ignore => {}
            Step::Request => self.enqueue_request(connection, handle),
            // The message buffer is needed for the answer: it comes home with the last completion.
            Step::Data | Step::Answer => {
                if idle {
                    self.enqueue(connection, handle);
                }
            }
            Step::Invalidate => self.enqueue(connection, handle),
            Step::Map => self.enqueue_map(connection, handle),
            Step::Copy => self.enqueue_copy(connection, handle),
            Step::Finish => self.finish(handle),
            Step::Violation => self.close(connection, Reason::UnexpectedAnswer),
        }
    }

    fn enqueue_request(&mut self, connection: Handle, handle: Handle) {
        let Some(state) = self.connections.get_mut(connection) else {
            return;
        };
        let Some(transfer) = self.transfers.get_mut(handle) else {
            return;
        };
        let queue = state.queue_of(transfer);
        self.transfers.push_back(queue, handle);
        self.list(connection);
    }

    /// Into the queue of what needs no credit.
    pub(super) fn enqueue(&mut self, connection: Handle, handle: Handle) {
        let Some(state) = self.connections.get_mut(connection) else {
            return;
        };
        let Some(transfer) = self.transfers.get_mut(handle) else {
            return;
        };
        let queue = if transfer.phase == Phase::Invalidate {
            &mut state.invalidates
        } else {
            &mut state.answers
        };
        if !transfer.queued && state.state != State::Closing {
            transfer.queued = true;
            self.transfers.push_back(queue, handle);
            if !state.listed {
                self.list(connection);
            }
        }
    }
}
