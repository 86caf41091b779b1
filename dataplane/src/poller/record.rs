//! What a core keeps count with: the record of its send queues, the open chain, its buffers and windows,
//! and the hand of its clock.

use crate::memory::Buffer;
use crate::nic::WrId;
use crate::pool::Handle;
use crate::registration::{Descriptor, Free};
use crate::time::{Instant, Ticks};
use crate::transfer::{Cursor, Phase};

/// Which work requests are on which send queue, in order.
///
/// Completions come in order, and one of them speaks for all unsignalled requests before it. So the
/// record tells, for each completion, what else is done; and after an error it is empty exactly when
/// every request has been accounted for.
#[derive(Debug)]
pub(super) struct Record<'a> {
    ids: &'a mut [WrId],
    stride: u32,
}

impl<'a> Record<'a> {
    pub(super) fn new(ids: &'a mut [WrId], send_wr: u32) -> Self {
        Self {
            ids,
            stride: send_wr.next_power_of_two(),
        }
    }

    /// The position behind `id`, looked for from `tail` up to `head`.
    #[inline]
    pub(super) fn behind(&self, connection: Handle, tail: u32, head: u32, id: WrId) -> Option<u32> {
        let base = connection.index().saturating_mul(self.stride as usize);
        let ids = self.ids.get(base..)?;
        let mut at = tail;
        while at != head {
            let within = at & self.stride.wrapping_sub(1);
            let found = *ids.get(within as usize)? == id;
            at = at.wrapping_add(1);
            if found {
                return Some(at);
            }
        }
        None
    }

    #[inline]
    fn place(&mut self, connection: Handle, at: u32) -> Option<&mut WrId> {
        let base = connection.index().saturating_mul(self.stride as usize);
        let within = at & self.stride.wrapping_sub(1);
        self.ids.get_mut(base.saturating_add(within as usize))
    }

    pub(super) fn set(&mut self, connection: Handle, at: u32, id: WrId) {
        if let Some(place) = self.place(connection, at) {
            *place = id;
        }
    }

    pub(super) fn get(&mut self, connection: Handle, at: u32) -> Option<WrId> {
        self.place(connection, at).copied()
    }
}

/// One request of the open chain, with what to put back if the device does not take it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Link {
    pub(super) what: What,
    /// The transfer; for a NOOP the connection.
    pub(super) handle: Handle,
    /// The transfer's phase before.
    pub(super) phase: Phase,
}

/// What a request of the open chain is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum What {
    Register,
    Invalidate,
    Fence,
    /// A request of no bytes behind the beginning of a run of messages, which tells that that is done.
    Tell,
    /// The transfer's cursor before.
    Write {
        cursor: Cursor,
    },
    /// A WRITE with immediate data, which carried credits back; as an answer.
    Immediate {
        cursor: Cursor,
        paid: u8,
        lent: bool,
    },
    /// A message that carried credits back. `lent`: its transfer reads the peer's descriptor in a receive, which goes back
    /// when this is on its way.
    Answer {
        paid: u8,
        lent: bool,
    },
    /// A message that carried credits back and took one. Not `told`: the completion of a message behind it in the chain
    /// speaks for it.
    Request {
        paid: u8,
        told: bool,
    },
    Noop {
        paid: u8,
    },
}

/// Requests queued since the last doorbell.
pub(super) type Chain = heapless::Vec<Link, CHAIN>;

/// Most requests of one doorbell.
pub(super) const CHAIN: usize = 64;

/// Message buffers that nobody uses. The one used last comes first: it is warm.
#[derive(Debug)]
pub(super) struct Stack<'a> {
    places: &'a mut [Option<Buffer<'a>>],
    /// Those below are present.
    top: usize,
    total: usize,
}

impl<'a> Stack<'a> {
    pub(super) fn new(places: &'a mut [Option<Buffer<'a>>]) -> Self {
        let mut stack = Self {
            total: 0,
            top: 0,
            places,
        };
        // Whatever the order in which they were lent.
        for at in 0..stack.places.len() {
            let buffer = stack.places.get_mut(at).and_then(Option::take);
            if let Some(buffer) = buffer {
                stack.give(buffer);
                stack.total = stack.total.wrapping_add(1);
            }
        }
        stack
    }

    pub(super) fn take(&mut self) -> Option<Buffer<'a>> {
        let below = self.top.checked_sub(1)?;
        let buffer = self.places.get_mut(below)?.take()?;
        self.top = below;
        Some(buffer)
    }

    pub(super) fn give(&mut self, buffer: Buffer<'a>) {
        if let Some(place) = self.places.get_mut(self.top) {
            *place = Some(buffer);
            self.top = self.top.wrapping_add(1);
        }
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.top == 0
    }

    pub(super) const fn missing(&self) -> usize {
        self.total.saturating_sub(self.top)
    }
}

/// Windows, free and lent out. Our own transfers never take the peers' share of them, or two nodes
/// would wait for each other for ever.
#[derive(Debug)]
pub(super) struct Windows<'a> {
    free: Free<'a>,
    total: usize,
    own: usize,
    peers: usize,
}

impl<'a> Windows<'a> {
    pub(super) fn new(places: &'a mut [Option<Descriptor>]) -> Self {
        Self {
            free: Free::new(places),
            total: 0,
            own: 0,
            peers: 0,
        }
    }

    /// A window came from the control side.
    pub(super) fn add(&mut self, descriptor: Descriptor) -> Result<(), Descriptor> {
        self.free.give(descriptor)?;
        self.total = self.total.wrapping_add(1);
        Ok(())
    }

    /// A free window, to be given back to the control side.
    pub(super) fn remove(&mut self) -> Option<Descriptor> {
        let descriptor = self.free.take()?;
        self.total = self.total.saturating_sub(1);
        Some(descriptor)
    }

    /// Whether `take` would find one.
    pub(super) const fn has(&self, own: bool) -> bool {
        let half = self.total.wrapping_shr(1);
        let (used, share) = if own {
            (self.own, self.total.wrapping_sub(half))
        } else {
            (self.peers, half)
        };
        // With a single window there is no half to keep free.
        !self.free.is_empty() && (used < share || share == 0)
    }

    #[inline]
    pub(super) fn take(&mut self, own: bool) -> Option<Descriptor> {
        if !self.has(own) {
            return None;
        }
        let descriptor = self.free.take()?;
        let used = if own { &mut self.own } else { &mut self.peers };
        *used = used.wrapping_add(1);
        Some(descriptor)
    }

    /// A window whose key is dead comes back.
    pub(super) fn give(&mut self, descriptor: Descriptor, own: bool) {
        self.unused(own);
        // There is a place for every window that was ever added.
        let _ = self.free.give(descriptor);
    }

    /// A window goes to the control side to be rebuilt.
    pub(super) const fn lose(&mut self, own: bool) {
        self.unused(own);
        self.total = self.total.saturating_sub(1);
    }

    const fn unused(&mut self, own: bool) {
        let used = if own { &mut self.own } else { &mut self.peers };
        *used = used.saturating_sub(1);
    }

    pub(super) const fn missing(&self) -> usize {
        self.total.saturating_sub(self.free.len())
    }

    /// Whether the core has no window at all.
    pub(super) const fn is_empty(&self) -> bool {
        self.total == 0
    }
}

/// The hand of the clock: goes over all transfer slots once per eighth of the timeout, so that nothing
/// has to be listed, cancelled or sorted.
#[derive(Debug)]
pub(super) struct Hand {
    at: usize,
    slots: usize,
    turn: Ticks,
    /// Slots per tick, in units of 2^-32.
    rate: u64,
    /// Slots due, in units of 2^-32.
    due: u64,
    moved: Instant,
    /// Before that, nothing is due.
    until: Instant,
}

impl Hand {
    pub(super) fn new(slots: usize, timeout: Ticks, now: Instant) -> Self {
        let turn = (timeout.0 >> 3).max(1);
        let slots_fixed = (slots as u64).saturating_mul(1 << 32);
        Self {
            at: 0,
            slots,
            turn: Ticks(turn),
            rate: slots_fixed.checked_div(turn).unwrap_or(0).max(1),
            due: 0,
            moved: now,
            until: now,
        }
    }

    /// How long the hand takes to go round.
    pub(super) const fn turn(&self) -> Ticks {
        self.turn
    }

    /// Moves on to `now`; how many slots to look at, at most [`Hand::MOST`] at a time.
    #[inline]
    pub(super) fn advance(&mut self, now: Instant) -> u32 {
        if now < self.until && now >= self.moved {
            return 0;
        }
        self.catch_up(now)
    }

    fn catch_up(&mut self, now: Instant) -> u32 {
        let elapsed = now.since(self.moved);
        self.moved = now;
        // Never more than one round behind.
        let round = (self.slots as u64).saturating_mul(1 << 32);
        self.due = self
            .due
            .saturating_add(elapsed.0.saturating_mul(self.rate))
            .min(round);
        let whole = u32::try_from(self.due >> 32)
            .unwrap_or(u32::MAX)
            .min(Self::MOST);
        self.due = self.due.saturating_sub(u64::from(whole) << 32);
        let short = (1_u64 << 32).saturating_sub(self.due);
        let wait = short.checked_div(self.rate).unwrap_or(0);
        self.until = now.after(Ticks(wait));
        whole
    }

    /// The next slot.
    pub(super) const fn next(&mut self) -> usize {
        let at = self.at;
        let next = at.wrapping_add(1);
        self.at = if next >= self.slots { 0 } else { next };
        at
    }

    const MOST: u32 = 64;
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::{Hand, Windows};
    use crate::nic::{RKey, Region};
    use crate::registration::Descriptor;
    use crate::time::{Instant, Ticks};

    #[test]
    fn the_hand_sees_every_slot_once_per_eighth_of_the_timeout() {
        for slots in [1_usize, 7, 100, 5000] {
            let mut hand = Hand::new(slots, Ticks(80_000), Instant(0));
            let mut seen = std::vec![0_u32; slots];
            for now in 1..=10_000 {
                for _ in 0..hand.advance(Instant(now)) {
                    seen[hand.next()] += 1;
                }
            }
            assert!(seen.iter().all(|times| (0..=2).contains(times)), "{seen:?}");
            assert!(seen.iter().filter(|times| **times == 1).count() + 1 >= slots);
        }
    }

    #[test]
    fn a_stopped_clock_and_a_great_leap_are_bounded() {
        let mut hand = Hand::new(1000, Ticks(1000), Instant(5));
        assert_eq!(hand.advance(Instant(5)), 0);
        assert_eq!(hand.advance(Instant(u64::MAX)), Hand::MOST);
        assert_eq!(
            hand.advance(Instant(0)),
            Hand::MOST,
            "time does not go back, the debt is worked off"
        );
    }

    #[test]
    fn our_own_transfers_leave_the_peers_their_half() {
        let mut places = [const { None }; 5];
        let mut windows = Windows::new(&mut places);
        for index in 0..5 {
            windows
                .add(Descriptor::new(Region(index), RKey(0)))
                .unwrap();
        }
        let own: std::vec::Vec<_> = core::iter::from_fn(|| windows.take(true)).collect();
        let peers: std::vec::Vec<_> = core::iter::from_fn(|| windows.take(false)).collect();
        assert_eq!((own.len(), peers.len(), windows.missing()), (3, 2, 5));
        for descriptor in own {
            windows.give(descriptor, true);
        }
        for descriptor in peers {
            windows.give(descriptor, false);
        }
        assert_eq!(windows.missing(), 0);
    }
}
