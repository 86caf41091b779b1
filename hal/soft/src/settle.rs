//! What becomes of work requests: acknowledgements, retries, errors, flushes.

use o2poll_dataplane::nic::{Completion, RKey, Region, Status};

use crate::Soft;
use crate::bytes::prefetch_to_write;
use crate::completion::{CompletionEntry, CompletionQueue, Side};
use crate::keys::Keys;
use crate::packet::before;
use crate::queue_pair::{Held, Marks, NEVER, QueuePairSlot, SendEntry, SendRing, State, Work};
use crate::wire::Wire;

impl<W: Wire> Soft<'_, W> {
    /// Everything before `psn` is done, and that is all.
    pub(crate) fn on_ack(&mut self, index: u32, psn: u32) {
        // An INVALIDATE may have waited for this.
        if self.acknowledged(index, psn) && self.invalidate_waiting(index) && self.go_on(index) {
            self.table.list(index);
        }
    }

    /// Everything before `psn` is done; whether there is more to run.
    fn acknowledged(&mut self, index: u32, psn: u32) -> bool {
        let now = self.polls;
        let timeout = u64::from(self.profile.ack_timeout);
        let Some(held) = self.table.held(index) else {
            return false;
        };
        let Held {
            slot, mut sends, ..
        } = held;
        // Old news, or a number that we never sent.
        if !before(slot.acked, psn) || before(slot.top, psn) {
            return false;
        }
        slot.acked = psn;
        if let Some(pair) = &slot.pair {
            slot.rnr_retries = pair.rnr_retry;
            if slot.state == State::Ready {
                slot.retries = pair.retry_count;
            }
        }
        slot.deadline = NEVER;
        if slot.in_flight() {
            // After a pause for a receive it may be sooner than what was set for the pause.
            slot.deadline = now.wrapping_add(timeout);
            self.timers.set(slot.deadline);
        }
        complete(index, slot, &mut sends, &mut self.completions);
        if slot.state == State::Closing && !slot.in_flight() {
            self.flush_sends(index);
            return false;
        }
        slot.state == State::Ready && slot.sent != slot.tail
    }

    /// Runs an INVALIDATE that has waited for an acknowledgement, if nothing is wrong with it; whether there is more to
    /// run.
    #[inline(never)]
    fn invalidate_waiting(&mut self, index: u32) -> bool {
        let Some(Held {
            slot, mut sends, ..
        }) = self.table.held(index)
        else {
            return false;
        };
        let (Some(pair), Some(entry)) = (&slot.pair, sends.at(slot.sent)) else {
            return false;
        };
        let foreign = self.profile.foreign_invalidate;
        let runs = slot.sent == slot.completed
            && slot.resume == 0
            && !self.faulty
            && entry.waits()
            && self.keys.kill(pair.asker(), RKey(entry.rkey), foreign);
        if runs {
            slot.sent = slot.sent.wrapping_add(1);
            slot.completed = slot.sent;
            if entry.is(Marks::SIGNALLED) {
                tell(
                    &mut self.completions,
                    index,
                    slot,
                    Completion::Done { id: entry.id },
                );
            }
        }
        slot.sent != slot.tail
    }

    /// The same, before something else is done about `psn`.
    fn settle_up_to(&mut self, index: u32, psn: u32) {
        if self.acknowledged(index, psn) {
            self.table.list(index);
        }
    }

    /// The peer had no receive for `psn`.
    pub(crate) fn on_not_ready(&mut self, index: u32, psn: u32) {
        self.settle_up_to(index, psn);
        let (now, wait) = (self.polls, u64::from(self.profile.rnr_timer).max(1));
        let Some(slot) = self.table.slot(index) else {
            return;
        };
        if slot.state != State::Ready || slot.acked != psn || !slot.in_flight() {
            return;
        }
        // A second copy of the same answer.
        if slot.resume != 0 {
            return;
        }
        let forever = slot.pair.as_ref().is_some_and(|pair| pair.rnr_retry == 7);
        match slot.rnr_retries.checked_sub(1) {
            _ if forever => {}
            Some(left) => slot.rnr_retries = left,
            None => {
                self.enter_error(index, Status::ReceiverNotReady, false);
                return;
            }
        }
        slot.rewind();
        slot.resume = now.wrapping_add(wait);
        slot.deadline = slot
            .resume
            .wrapping_add(u64::from(self.profile.ack_timeout));
        self.timers.set(slot.resume);
        self.counts.retries = self.counts.retries.wrapping_add(1);
    }

    /// The peer has seen a gap from `psn` on.
    pub(crate) fn on_sequence_error(&mut self, index: u32, psn: u32) {
        self.settle_up_to(index, psn);
        let Some(slot) = self.table.slot(index) else {
            return;
        };
        if slot.state == State::Ready && slot.acked == psn && slot.in_flight() {
            slot.rewind();
            self.counts.retries = self.counts.retries.wrapping_add(1);
            self.table.list(index);
        }
    }

    /// The peer refuses `psn`, and carries out nothing of the rest.
    pub(crate) fn on_refused(&mut self, index: u32, psn: u32, verdict: Status) {
        self.settle_up_to(index, psn);
        self.on_gone(index, verdict);
    }

    /// Whatever is on the wire will never be done.
    pub(crate) fn on_gone(&mut self, index: u32, verdict: Status) {
        let Some(slot) = self.table.slot(index) else {
            return;
        };
        match slot.state {
            State::Ready if slot.in_flight() => self.enter_error(index, verdict, true),
            State::Closing => self.flush_sends(index),
            State::Ready | State::Error => {}
        }
    }

    /// Puts a queue pair in error. `cause` is the status of its oldest request; `quiet` says that the peer
    /// touches nothing of ours any more.
    pub(crate) fn enter_error(&mut self, index: u32, cause: Status, quiet: bool) {
        let deadline = self.polls.wrapping_add(u64::from(self.profile.ack_timeout));
        let Some(slot) = self.table.slot(index) else {
            return;
        };
        if slot.state != State::Ready {
            return;
        }
        slot.cause = cause;
        slot.state = State::Closing;
        slot.done = 0;
        slot.incoming = None;
        let wait = slot.in_flight() && !quiet;
        if wait {
            slot.close_due = true;
            slot.retries = slot.pair.as_ref().map_or(0, |pair| pair.retry_count);
            slot.deadline = deadline;
            self.timers.set(deadline);
            self.table.list(index);
        }
        self.flush_receives(index);
        if !wait {
            self.flush_sends(index);
        }
    }

    /// Forgets the registrations that a queue pair had staged.
    pub(crate) fn release_staged(&mut self, index: u32) {
        let Some(mut held) = self.table.held(index) else {
            return;
        };
        let waiting = held.slot.open.wrapping_sub(held.slot.completed);
        for step in 0..waiting {
            let position = held.slot.completed.wrapping_add(step);
            if let Some(entry) = held.sends.at(position) {
                drop_staged(entry, &mut self.keys);
            }
        }
    }

    /// Every request rung for completes, the oldest with the cause. The peer has let go.
    pub(crate) fn flush_sends(&mut self, index: u32) {
        let Some(held) = self.table.held(index) else {
            return;
        };
        let Held {
            slot, mut sends, ..
        } = held;
        slot.state = State::Error;
        slot.close_due = false;
        slot.deadline = NEVER;
        slot.resume = 0;
        complete(index, slot, &mut sends, &mut self.completions);
        while slot.completed != slot.tail {
            let status = core::mem::replace(&mut slot.cause, Status::Flushed);
            let Some(entry) = sends.at(slot.completed) else {
                return;
            };
            drop_staged(entry, &mut self.keys);
            let id = entry.id;
            slot.completed = slot.completed.wrapping_add(1);
            tell(
                &mut self.completions,
                index,
                slot,
                Completion::Failed { id, status },
            );
        }
        slot.sent = slot.completed;
        slot.cause = Status::Flushed;
    }

    /// Timers of the next queue pair, and what else is seldom to be done.
    #[cold]
    pub(crate) fn tick(&mut self) {
        self.answer_strangers();
        let index = self.timers.hand;
        self.run_out(index);
        let alarm = self.table.slot(index).map_or(NEVER, |slot| slot.alarm());
        self.timers.seen(alarm, self.table.high);
        if !self.strangers.is_empty() {
            // The wire was full.
            self.timers.set(self.polls);
        }
    }

    fn run_out(&mut self, index: u32) {
        let (now, timeout) = (self.polls, self.profile.ack_timeout);
        let Some(slot) = self.table.slot(index) else {
            return;
        };
        if slot.resume != 0 && slot.resume <= now {
            slot.resume = 0;
            self.table.list(index);
            return;
        }
        if slot.deadline > now {
            return;
        }
        if slot.state == State::Ready && !slot.in_flight() {
            slot.deadline = NEVER;
            return;
        }
        let left = slot.retries.checked_sub(1);
        slot.retries = left.unwrap_or(0);
        slot.deadline = now.wrapping_add(u64::from(timeout));
        match (slot.state, left) {
            (State::Ready, Some(_)) => {
                slot.rewind();
                self.counts.retries = self.counts.retries.wrapping_add(1);
                self.table.list(index);
            }
            (State::Ready, None) => self.enter_error(index, Status::RetryExceeded, false),
            (State::Closing, Some(_)) => {
                slot.close_due = true;
                self.table.list(index);
            }
            // The peer was silent for all retries: it is not there any more.
            (State::Closing, None) => self.flush_sends(index),
            (State::Error, _) => slot.deadline = NEVER,
        }
    }
}

/// Completes what is done at the front of the send queue.
pub(crate) fn complete(
    index: u32,
    slot: &mut QueuePairSlot,
    sends: &mut SendRing<'_>,
    completions: &mut CompletionQueue<'_>,
) {
    while slot.completed != slot.tail {
        let Some(entry) = sends.at(slot.completed) else {
            return;
        };
        if !entry.is(Marks::RAN) {
            return;
        }
        if !entry.is_local() {
            if before(slot.acked, entry.end) {
                return;
            }
            slot.base = entry.end;
            if entry.work == Work::Send {
                prefetch_to_write(entry.first.address, entry.length);
            }
        }
        let behind = slot.sent == slot.completed;
        slot.completed = slot.completed.wrapping_add(1);
        if behind {
            // It was acknowledged after all, while it was being sent again.
            slot.rewind();
        }
        if entry.is(Marks::SIGNALLED) {
            tell(completions, index, slot, Completion::Done { id: entry.id });
        }
    }
}

/// The completion of the request before `completed`.
#[inline(always)]
pub(crate) fn tell(
    completions: &mut CompletionQueue<'_>,
    index: u32,
    slot: &QueuePairSlot,
    completion: Completion,
) {
    completions.push(CompletionEntry {
        completion,
        queue_pair: index,
        generation: slot.generation,
        side: Side::Send,
        frees: slot.completed,
    });
}

/// A registration that will not run gives its staged list back.
pub(crate) fn drop_staged(entry: &mut SendEntry, keys: &mut Keys<'_>) {
    if entry.is(Marks::STAGED) {
        entry.marks.remove(Marks::STAGED);
        keys.unstage(Region(entry.extra), RKey(entry.rkey));
    }
}
