//! One peer connection: credits, queues, what is on its send queue.
//!
//! # Credits (v2)
//! Both ends post `2 * depth + 2` receives: `depth` for the other's requests, `depth` for the answers
//! to our own, two for NOOPs. A request costs a credit; a bulk request (PUT_REQ, GET_REQ) also one of
//! `depth` *reserved* credits, which its answer gives back. Answers cost nothing. What a consumed
//! message frees is *owed* and rides back in the next message, or in a NOOP once it reaches the
//! high-water mark. So answers and credit returns never wait for a credit, and two nodes that both
//! fill their windows cannot block each other.

use crate::memory::{Buffer, Posted};
use crate::nic::{Qp, Status};
use crate::peer::{Stale, Terms};
use crate::pool::{Handle, Queue};
use crate::registration::Choices;
use crate::time::Instant;
use crate::transfer::{Message, Transfer};
use crate::wire::{Pid, WireError};

/// More credits came back than were spent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadCredits;

/// The counters of one connection's flow control.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Credits {
    depth: u16,
    high_water: u16,
    credits: u16,
    reserved: u16,
    owed: u16,
}

impl Credits {
    /// A fresh connection's. The high-water mark is held between 1 and `depth`: above the
    /// negotiated depth credits would never come back (LU-12569).
    #[must_use]
    pub const fn new(depth: u16, high_water: u16) -> Self {
        let high_water = if high_water > depth {
            depth
        } else {
            high_water
        };
        Self {
            depth,
            high_water: if high_water == 0 { 1 } else { high_water },
            credits: depth,
            reserved: depth,
            owed: 0,
        }
    }

    /// Messages that may be sent now.
    #[must_use]
    pub const fn available(&self) -> u16 {
        self.credits
    }

    /// Bulk requests that may be started now.
    #[must_use]
    pub const fn reserved(&self) -> u16 {
        self.reserved
    }

    /// Credits the peer has coming.
    #[must_use]
    pub const fn owed(&self) -> u16 {
        self.owed
    }

    /// Whether nothing is spent or owed.
    #[must_use]
    pub const fn is_whole(&self) -> bool {
        self.credits == self.depth && self.reserved == self.depth && self.owed == 0
    }

    /// Takes a credit for a message. Checked here, in the path that sends: overrunning a kernel's
    /// credits panics a file server.
    #[must_use]
    pub const fn spend(&mut self) -> bool {
        match self.credits.checked_sub(1) {
            Some(left) => {
                self.credits = left;
                true
            }
            None => false,
        }
    }

    /// A message that had taken a credit was not posted.
    pub const fn unspend(&mut self) {
        if self.credits < self.depth {
            self.credits = self.credits.wrapping_add(1);
        }
    }

    /// Takes a reserved credit for a bulk request.
    #[must_use]
    pub const fn reserve(&mut self) -> bool {
        match self.reserved.checked_sub(1) {
            Some(left) => {
                self.reserved = left;
                true
            }
            None => false,
        }
    }

    /// A bulk request was answered, or will never be sent.
    pub const fn unreserve(&mut self) {
        if self.reserved < self.depth {
            self.reserved = self.reserved.wrapping_add(1);
        }
    }

    /// The header of a message brought `credits` back.
    ///
    /// # Errors
    /// More than were spent: the connection must end.
    pub const fn returned(&mut self, credits: u8) -> Result<(), BadCredits> {
        let sum = self.credits.saturating_add(credits as u16);
        if sum > self.depth {
            return Err(BadCredits);
        }
        self.credits = sum;
        Ok(())
    }

    /// A receive that the peer paid for is posted again.
    pub const fn owe(&mut self) {
        if self.owed < self.depth {
            self.owed = self.owed.wrapping_add(1);
        }
    }

    /// What the next message carries back.
    #[expect(clippy::cast_possible_truncation, reason = "at most 255")]
    pub const fn pay(&mut self) -> u8 {
        let paid = if self.owed > 255 { 255 } else { self.owed };
        self.owed = self.owed.saturating_sub(paid);
        paid as u8
    }

    /// A message that carried `paid` back was not posted.
    pub const fn unpay(&mut self, paid: u8) {
        let owed = self.owed.saturating_add(paid as u16);
        self.owed = if owed > self.depth { self.depth } else { owed };
    }

    /// Whether so much is owed that it must go back by itself.
    #[must_use]
    pub const fn at_high_water(&self) -> bool {
        self.owed >= self.high_water
    }
}

/// Why a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Reason {
    /// The control side asked.
    #[error("closed by us")]
    Closed,
    /// A work request failed.
    #[error("work request failed: {0:?}")]
    Device(Status),
    /// A message could not be decoded.
    #[error("bad message: {0}")]
    Malformed(WireError),
    /// NIDs or incarnations of a message are not those of the connection.
    #[error("{0}")]
    Stale(Stale),
    /// More credits came back than were spent.
    #[error("the peer returned more credits than it had")]
    BadCredits,
    /// An answer that was not asked for: unknown cookie, wrong type, late or twice.
    #[error("an answer nobody waits for")]
    UnexpectedAnswer,
    /// An answer says more bytes than there is room for, or a descriptor that cannot be.
    #[error("a length that cannot be")]
    BadLength,
    /// A message not addressed to this node.
    #[error("a message for another node")]
    WrongAddress,
    /// A connection message on an established connection.
    #[error("a message type that does not belong here")]
    UnexpectedType,
    /// The peer invalidated a key that was not the transfer's.
    #[error("the peer invalidated a key it was not given for that")]
    BadInvalidate,
    /// A transfer was abandoned, and its key had to die.
    #[error("a transfer timed out")]
    TimedOut,
}

/// Where a connection is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Receives are posted; the control side is still shaking hands. Messages wait.
    Adopted,
    /// Messages are taken, though the control side has not said so: on the accepting side the terms are
    /// final, and the first message stands for a lost RTU (LU-8303).
    Accepted,
    /// Transfers may start.
    Established,
    /// Everything outstanding is being flushed.
    Closing,
}

/// Most NOOPs on the send queue at a time.
pub const MAX_NOOPS: usize = 2;

/// One connection.
#[derive(Debug)]
pub struct Connection<'a> {
    pub(crate) terms: Terms,
    /// What it may do with a sink.
    pub(crate) choices: Choices,
    pub(crate) qp: Qp,
    pub(crate) token: u64,
    pub(crate) state: State,
    pub(crate) why: Option<Reason>,
    pub(crate) credits: Credits,
    /// Transfers of ours that wait for their share of the queue pair.
    pub(crate) waiting: Queue,
    /// Bulk requests that wait for a reserved credit.
    pub(crate) reserve: Queue,
    /// Messages that wait for a credit.
    pub(crate) credited: Queue,
    /// Answers: they wait for nothing but room on the send queue.
    pub(crate) answers: Queue,
    /// Keys to be invalidated.
    pub(crate) invalidates: Queue,
    /// The last message of a run that the device took in part: nothing signalled is behind it.
    pub(crate) untold: Option<Handle>,
    /// Transfers with data in a staging buffer.
    pub(crate) copies: Queue,
    /// Transfers whose sink is being mapped, or waits for that.
    pub(crate) mappings: Queue,
    /// Incoming messages that wait for a slot of ours.
    pub(crate) held: Queue,
    /// REPLYs that came as a PUT_REQ and wait for a window or a slot. They never wait behind `held`: the peer
    /// may need our answer before it can serve what `held` waits for.
    pub(crate) held_replies: Queue,
    /// Receives to be posted again.
    pub(crate) reposts: Queue,
    /// Transfers of ours that hold a share.
    pub(crate) own: u16,
    /// Transfers of the peer that hold a share.
    pub(crate) peers: u16,
    /// NOOPs on the send queue, oldest first.
    pub(crate) noops: heapless::Deque<Posted<'a>, MAX_NOOPS>,
    pub(crate) posted_receives: u16,
    pub(crate) last_sent: Instant,
    /// Send work requests of its queue pair: as its depth needs, which may be less than the core's deepest.
    pub(crate) send_wr: u32,
    /// Free-running indices of the record of what is on the send queue.
    pub(crate) head: u32,
    pub(crate) tail: u32,
    /// Its last request is on the send queue.
    pub(crate) draining: bool,
    /// Whether it is in the poller's list of connections to look at.
    pub(crate) listed: bool,
}

impl<'a> Connection<'a> {
    /// A connection that was just adopted.
    #[must_use]
    pub const fn new(
        qp: Qp,
        terms: Terms,
        choices: Choices,
        state: State,
        token: u64,
        now: Instant,
    ) -> Self {
        Self {
            terms,
            choices,
            qp,
            token,
            state,
            why: None,
            credits: Credits::new(terms.queue_depth, terms.high_water),
            waiting: Queue::new(),
            reserve: Queue::new(),
            credited: Queue::new(),
            answers: Queue::new(),
            invalidates: Queue::new(),
            untold: None,
            copies: Queue::new(),
            mappings: Queue::new(),
            held: Queue::new(),
            held_replies: Queue::new(),
            reposts: Queue::new(),
            own: 0,
            peers: 0,
            noops: heapless::Deque::new(),
            posted_receives: 0,
            last_sent: now,
            send_wr: 0,
            head: 0,
            tail: 0,
            draining: false,
            listed: false,
        }
    }

    /// The terms are final.
    pub(crate) const fn settle(&mut self, terms: Terms, choices: Choices) {
        self.terms = terms;
        self.choices = choices;
        self.credits = Credits::new(terms.queue_depth, terms.high_water);
        self.state = State::Established;
    }

    /// Send work requests whose slots are not known to be free.
    #[must_use]
    pub const fn on_send_queue(&self) -> u32 {
        self.head.wrapping_sub(self.tail)
    }

    /// Whether there is a share of the queue pair for one more transfer of ours.
    #[must_use]
    pub fn has_own_share(&self) -> bool {
        self.state == State::Established && self.own < self.terms.queue_depth
    }

    /// A transfer of ours takes its share, and a message buffer.
    #[inline]
    pub(crate) fn admit(
        &mut self,
        transfer: &mut Transfer<'a>,
        message: Option<Buffer<'a>>,
        pid: Pid,
    ) {
        transfer.message = message.map(Message::Home);
        transfer.admitted = true;
        transfer.peer = (self.terms.peer, pid);
        self.own = self.own.saturating_add(1);
    }

    /// The queue in which a request waits: for a credit, or for a reserved credit first. It takes one if there is one.
    #[inline]
    pub(crate) const fn queue_of(&mut self, transfer: &mut Transfer<'a>) -> &mut Queue {
        transfer.queued = true;
        if transfer.bulk && !transfer.reserved && self.reserve.is_empty() {
            transfer.reserved = self.credits.reserve();
        }
        if transfer.bulk && !transfer.reserved {
            &mut self.reserve
        } else {
            &mut self.credited
        }
    }

    /// Whether incoming messages are taken.
    #[must_use]
    pub const fn takes_messages(&self) -> bool {
        matches!(self.state, State::Accepted | State::Established)
    }

    /// Whether a NOOP should go now (protocol: nothing that could carry the credits instead is about to).
    #[must_use]
    pub fn wants_noop(&self, keepalive_due: bool) -> bool {
        matches!(self.state, State::Established)
            && (self.credits.at_high_water() || keepalive_due)
            && self.answers.is_empty()
            && (self.credited.is_empty() || self.credits.available() == 0)
            && !self.noops.is_full()
    }

    /// Whether something waits for anything else than a credit or room on the send queue.
    #[inline]
    pub(crate) const fn holds_back(&self) -> bool {
        let waiting = self.waiting.len() | self.copies.len() | self.mappings.len();
        let held = self.held.len() | self.held_replies.len() | self.reposts.len();
        waiting | held != 0
    }

    /// Whether anything waits that a later poll must look at again.
    #[must_use]
    pub fn has_work(&self) -> bool {
        let asks = self.reserve.len() | self.credited.len();
        let answers = self.answers.len() | self.invalidates.len();
        asks | answers != 0
            || self.holds_back()
            || self.untold.is_some()
            || matches!(self.state, State::Closing)
            // A NOOP that the device did not take, or for which there was no buffer.
            || self.wants_noop(false)
    }
}

#[cfg(test)]
mod tests {
    use super::{BadCredits, Credits};

    #[test]
    fn a_window_is_spent_and_comes_back_once() {
        let mut credits = Credits::new(8, 4);
        for _ in 0..8 {
            assert!(credits.spend());
        }
        assert!(!credits.spend());
        assert_eq!(credits.returned(8), Ok(()));
        assert_eq!(credits.returned(1), Err(BadCredits));
        assert_eq!(credits.available(), 8);
        assert!(credits.is_whole());
    }

    #[test]
    fn a_post_that_failed_restores_both_sides() {
        let mut credits = Credits::new(8, 4);
        for _ in 0..4 {
            credits.owe();
        }
        assert!(credits.at_high_water());
        assert!(credits.spend() && credits.reserve());
        let paid = credits.pay();
        assert_eq!((paid, credits.owed()), (4, 0));
        credits.unpay(paid);
        credits.unspend();
        credits.unreserve();
        assert_eq!(
            (credits.available(), credits.reserved(), credits.owed()),
            (8, 8, 4)
        );
    }

    /// LU-12569: a mark above the negotiated depth would never be reached.
    #[test]
    fn lu_12569_the_high_water_mark_can_be_reached_at_every_depth() {
        for depth in 1..=255 {
            for high_water in [0, 1, depth / 2, depth, 300] {
                let mut credits = Credits::new(depth, high_water);
                for _ in 0..depth {
                    credits.owe();
                }
                assert!(credits.at_high_water());
                assert_eq!(u16::from(credits.pay()), depth);
            }
        }
    }
}
