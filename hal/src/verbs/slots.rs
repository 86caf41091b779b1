//! What the driver keeps of each queue pair.
//!
//! Positions in both queues run freely as `u32` and are masked on access; differences are right modulo 2^32.
//! A slot of the send queue is free when a completion at or behind its position has been polled: providers
//! count so as well, and a request that is not signalled holds its slot until then.

use core::ptr::null_mut;

use o2poll_dataplane::nic::{Status, WrId};
use rdma_core_sys::types::ibv_qp;

use super::chain::Facts;
use super::decode::Token;
use super::nic::Limits;
use super::queue_pair::QueuePair;
use super::windows::Change;

/// Room for one queue pair.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) pair: Option<QueuePair>,
    /// Of the pair; null without one.
    pub(super) raw: *mut ibv_qp,
    pub(super) facts: Facts,
    /// What all its ids have in common; [`NOBODY`] without a pair.
    pub(super) owner: u64,
    generation: u16,
    pub(super) failed: bool,
    /// A request came while the chain of another queue pair was open: its next doorbell tells.
    pub(super) stray: bool,
    /// Its chains go to the device with fences in them ([`fence`](super::fence)).
    pub(super) fenced: bool,
    pub(super) send_depth: u32,
    pub(super) recv_depth: u32,
    /// Next position of the send queue.
    pub(super) tail: u32,
    /// First one that is not known to be done.
    pub(super) freed: u32,
    pub(super) recv_tail: u32,
    pub(super) recv_freed: u32,
    /// `tail` when the windows whose INVALIDATE is done were last looked for.
    swept: u32,
    sends: Box<[Sent]>,
    pub(super) receives: Box<[WrId]>,
}

/// A send work request that is outstanding. A line each.
#[repr(align(64))]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sent {
    pub(super) id: WrId,
    pub(super) kind: Kind,
    /// Of one that changes a window.
    pub(super) change: Change,
    /// Of one that fails for certain.
    pub(super) verdict: Option<Status>,
}

/// What there is to know of a request when it fails, or when it was not taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Kind {
    /// Nothing.
    #[default]
    Plain,
    /// It changes a window.
    Changes,
    /// It fails for certain.
    Fails,
}

impl Slot {
    pub(super) fn empty(limits: &Limits) -> Self {
        let sends = limits.send_wr.max(1).next_power_of_two() as usize;
        let receives = limits.recv_wr.max(1).next_power_of_two() as usize;
        Self {
            pair: None,
            raw: null_mut(),
            facts: Facts::default(),
            owner: NOBODY,
            generation: 0,
            failed: false,
            stray: false,
            fenced: false,
            send_depth: 0,
            recv_depth: 0,
            tail: 0,
            freed: 0,
            swept: 0,
            recv_tail: 0,
            recv_freed: 0,
            sends: vec![Sent::default(); sends].into_boxed_slice(),
            receives: vec![WrId(0); receives].into_boxed_slice(),
        }
    }

    /// `at` is the place of this one.
    pub(super) fn adopt(&mut self, at: u16, pair: QueuePair) {
        self.raw = pair.raw.raw;
        self.facts = Facts {
            pd: pair.raw.pd.id(),
            max_sge: pair.max_sge as usize,
            inline: pair.inline,
            reads: pair.initiator_depth > 0,
        };
        self.generation = self.generation.wrapping_add(1) & Token::GENERATIONS;
        let first = Token {
            slot: at,
            generation: self.generation,
            receive: false,
            position: 0,
        };
        self.owner = first.pack();
        (self.failed, self.stray) = (false, false);
        self.send_depth = pair.send_depth;
        self.recv_depth = pair.recv_depth;
        (self.tail, self.freed, self.swept) = (0, 0, 0);
        (self.recv_tail, self.recv_freed) = (0, 0);
        self.pair = Some(pair);
    }

    /// The id of the request at this position of the send queue, as the device has it.
    #[inline]
    pub(super) const fn send_token(&self, position: u32) -> u64 {
        self.owner | position as u64
    }

    /// The same of the receive queue.
    #[inline]
    pub(super) const fn receive_token(&self, position: u32) -> u64 {
        self.owner | Token::RECEIVE | position as u64
    }

    /// Whether a request of this queue pair has been posted and is not known to be done. Completions of a queue come in
    /// order, so that one behind which another was seen is done.
    #[inline]
    pub(super) const fn is_outstanding(&self, token: Token) -> bool {
        let (freed, tail) = if token.receive {
            (self.recv_freed, self.recv_tail)
        } else {
            (self.freed, self.tail)
        };
        token.position.wrapping_sub(freed) < tail.wrapping_sub(freed)
    }

    /// Send work requests that it has room for.
    #[inline]
    pub(super) const fn room(&self) -> u32 {
        self.send_depth
            .saturating_sub(self.tail.wrapping_sub(self.freed))
    }

    /// Position of the request `n` of the open chain.
    #[inline]
    #[expect(
        clippy::cast_possible_truncation,
        reason = "at most the depth of a queue"
    )]
    pub(super) const fn position_of(&self, n: usize) -> u32 {
        self.tail.wrapping_add(n as u32)
    }

    #[inline]
    pub(super) fn sent(&self, position: u32) -> Option<&Sent> {
        let mask = self.sends.len().wrapping_sub(1);
        self.sends.get(position as usize & mask)
    }

    #[inline]
    pub(super) fn sent_mut(&mut self, position: u32) -> Option<&mut Sent> {
        let mask = self.sends.len().wrapping_sub(1);
        self.sends.get_mut(position as usize & mask)
    }

    #[inline]
    pub(super) const fn receive_index(&self, position: u32) -> usize {
        position as usize & self.receives.len().wrapping_sub(1)
    }

    /// The request `n` of the open chain.
    pub(super) fn queued(&self, n: usize) -> Option<&Sent> {
        self.sent(self.position_of(n))
    }

    /// One of the first `count` of the open chain fails for certain.
    pub(super) fn has_verdict(&self, count: usize) -> bool {
        (0..count).any(|n| self.queued(n).is_some_and(|sent| sent.kind == Kind::Fails))
    }

    /// It is time for [`Windows::sweep`](super::windows::Windows::sweep), and noted that it is done.
    #[inline]
    pub(super) const fn is_to_be_swept(&mut self) -> bool {
        let due = self.tail.wrapping_sub(self.swept) >= SWEEP;
        if due {
            self.swept = self.tail;
        }
        due
    }

    /// Whether a request of the send queue is known to be done. It was queued less than 2^31 requests ago: the windows
    /// remember none that is older.
    #[inline]
    pub(super) const fn is_done(&self, token: u64) -> bool {
        self.owner == Token::owner(token) && is_before(Token::position(token), self.freed)
    }

    /// Gives the queue pair up.
    pub(super) fn retire(&mut self) -> Option<QueuePair> {
        let pair = self.pair.take()?;
        (self.raw, self.owner, self.stray) = (null_mut(), NOBODY, false);
        Some(pair)
    }
}

/// Order of positions that are less than 2^31 apart.
const fn is_before(position: u32, other: u32) -> bool {
    position.wrapping_sub(other).cast_signed() < 0
}

/// Requests between two sweeps. A sweep leaves those that are still in the queue, so that none that a window remembers grows
/// older than this, twice the depth of the queue and a chain: less than 2^31, as [`is_before`] asks, with queues of up to 2^28 (devices have some 2^15).
const SWEEP: u32 = 1 << 30;

/// No queue pair has it: it has the bit of receives.
pub(super) const NOBODY: u64 = u64::MAX;
