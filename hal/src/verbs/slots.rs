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
    pub(super) raw: *mut ibv_qp,
    pub(super) facts: Facts,
    pub(super) failed: bool,
    pub(super) send_depth: u32,
    pub(super) recv_depth: u32,
    /// Next position of the send queue.
    pub(super) tail: u32,
    /// First one that is not known to be done.
    pub(super) freed: u32,
    pub(super) recv_tail: u32,
    pub(super) recv_freed: u32,
    pub(super) sends: Box<[Sent]>,
    /// Of the requests that change a window or fail for certain. Most do neither.
    pub(super) notes: Box<[Note]>,
    pub(super) receives: Box<[WrId]>,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sent {
    pub(super) id: WrId,
    /// There is a note of it.
    pub(super) noted: bool,
    /// Its note says that it fails for certain.
    pub(super) fails: bool,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Note {
    pub(super) change: Option<Change>,
    pub(super) verdict: Option<Status>,
}

impl Slot {
    pub(super) fn empty(limits: &Limits) -> Self {
        let sends = limits.send_wr.max(1).next_power_of_two() as usize;
        let receives = limits.recv_wr.max(1).next_power_of_two() as usize;
        Self {
            pair: None,
            raw: null_mut(),
            facts: Facts::default(),
            failed: false,
            send_depth: 0,
            recv_depth: 0,
            tail: 0,
            freed: 0,
            recv_tail: 0,
            recv_freed: 0,
            sends: vec![Sent::default(); sends].into_boxed_slice(),
            notes: vec![Note::default(); sends].into_boxed_slice(),
            receives: vec![WrId(0); receives].into_boxed_slice(),
        }
    }

    pub(super) fn adopt(&mut self, pair: QueuePair) {
        self.raw = pair.raw.raw;
        self.facts = Facts {
            pd: pair.raw.pd.id(),
            max_sge: pair.max_sge as usize,
            inline: pair.inline,
            generation: self.facts.generation.wrapping_add(1) & Token::GENERATIONS,
            reads: pair.initiator_depth > 0,
        };
        self.failed = false;
        self.send_depth = pair.send_depth;
        self.recv_depth = pair.recv_depth;
        (self.tail, self.freed, self.recv_tail, self.recv_freed) = (0, 0, 0, 0);
        self.pair = Some(pair);
    }

    #[inline]
    #[expect(
        clippy::cast_possible_truncation,
        reason = "there are at most 65536 slots"
    )]
    pub(super) const fn token(&self, slot: u32, position: u32, receive: bool) -> u64 {
        let token = Token {
            slot: slot as u16,
            generation: self.facts.generation,
            receive,
            position,
        };
        token.pack()
    }

    #[inline]
    pub(super) const fn send_index(&self, position: u32) -> usize {
        position as usize & self.sends.len().wrapping_sub(1)
    }

    #[inline]
    pub(super) const fn receive_index(&self, position: u32) -> usize {
        position as usize & self.receives.len().wrapping_sub(1)
    }

    /// What was noted of the request `n` of the open chain.
    pub(super) fn noted(&self, n: usize) -> Option<&Note> {
        #[expect(
            clippy::cast_possible_truncation,
            reason = "at most the depth of a queue"
        )]
        let at = self.send_index(self.tail.wrapping_add(n as u32));
        let sent = self.sends.get(at)?;
        self.notes.get(at).filter(|_| sent.noted)
    }

    /// One of the first `count` of the open chain fails for certain.
    pub(super) fn has_verdict(&self, count: usize) -> bool {
        (0..count).any(|n| self.noted(n).is_some_and(|note| note.verdict.is_some()))
    }

    /// Whether the request at `position` is known to be done.
    pub(super) const fn is_done(&self, generation: u16, position: u32) -> bool {
        self.facts.generation == generation && is_before(position, self.freed)
    }
}

/// Order of positions that are less than 2^31 apart.
pub(super) const fn is_before(position: u32, other: u32) -> bool {
    position.wrapping_sub(other).cast_signed() < 0
}
