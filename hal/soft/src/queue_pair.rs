//! Queue pairs: what a control thread makes, and the state a device keeps for each.
//!
//! Positions in both queues run freely as `u32` and are masked on access; differences are right modulo 2^32.
//!
//! ```text
//! send queue      freed <= completed <= sent <= tail <= open
//!   [freed, completed)  done, but no later signalled completion has been polled
//!   [completed, sent)   on the wire, not acknowledged
//!   [sent, tail)        rung for, not yet run
//!   [tail, open)        the open chain
//! receive queue   freed <= head <= tail
//! ```

use o2poll_dataplane::nic::{LKey, Sge, Status, WrId};

use crate::lists::Asker;
use crate::packet::{NUMBER, Opcode, Route, before};

/// The other end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Path {
    /// Port of our [`Wire`](crate::Wire) that leads to the peer's device.
    pub port: u16,
    /// The peer's queue pair number.
    pub number: u32,
    /// Sequence number of the peer's first packet.
    pub psn: u32,
}

/// A connected queue pair (RTS), made by a control thread and adopted by a core.
#[derive(Debug)]
pub struct QueuePair {
    /// Its number, 24 bits, used once by one device at a time.
    pub number: u32,
    /// Its protection domain.
    pub pd: u32,
    /// The other end.
    pub path: Path,
    /// Sequence number of our first packet.
    pub psn: u32,
    /// Most send work requests outstanding.
    pub send_depth: u32,
    /// Most receives posted.
    pub recv_depth: u32,
    /// Times that packets are sent again without progress before [`Status::RetryExceeded`].
    pub retry_count: u8,
    /// Times that a request is tried again when the peer has no receive; 7 is for ever.
    pub rnr_retry: u8,
    /// READs of the peer that we are ready to serve at a time. 0 refuses them all.
    pub responder_resources: u8,
}

impl QueuePair {
    /// A queue pair with the usual counts: `retry_count` 7, `rnr_retry` 6, READs served, both sequence numbers
    /// from 0.
    #[must_use]
    pub const fn new(number: u32, port: u16, peer: u32, send_depth: u32, recv_depth: u32) -> Self {
        Self {
            number,
            pd: 0,
            path: Path {
                port,
                number: peer,
                psn: 0,
            },
            psn: 0,
            send_depth,
            recv_depth,
            retry_count: 7,
            rnr_retry: 6,
            responder_resources: 1,
        }
    }

    pub(crate) const fn asker(&self) -> Asker {
        Asker {
            pd: self.pd,
            number: self.number,
        }
    }
}

/// Life of an adopted queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// RTS.
    Ready,
    /// In error, but the peer may still touch memory of what is on the wire: nothing of the send queue is
    /// flushed before it has let go.
    Closing,
    /// In error.
    Error,
}

/// What a send work request asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Work {
    Send,
    Write,
    Read,
    Register,
    Invalidate,
}

bitflags::bitflags! {
    /// What is special about a send work request.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) struct Marks: u8 {
        const SIGNALLED = 1;
        /// Run (or sent in full) at least once.
        const RAN = 2;
        /// A registration whose list waits in the region.
        const STAGED = 4;
        /// `extra` is immediate data.
        const IMMEDIATE = 8;
        /// `extra` is a key for the peer to invalidate.
        const INVALIDATE = 16;
        /// A registration that has been told to wait.
        const DELAYED = 32;
        /// Goes out as one packet, if its memory is a base region's.
        const PLAIN = 64;
    }
}

/// Room for one send work request, reduced to what is needed to run it (again): a cache line.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
pub struct SendEntry {
    pub(crate) id: WrId,
    /// The first scatter/gather element.
    pub(crate) first: Sge,
    /// Remote address.
    pub(crate) address: u64,
    /// Remote key, or the key that is registered or invalidated.
    pub(crate) rkey: u32,
    /// As the marks say, or the region that is registered.
    pub(crate) extra: u32,
    /// Bytes in all.
    pub(crate) length: u32,
    /// Scatter/gather elements.
    pub(crate) pieces: u32,
    /// The sequence number after its last packet, once it ran.
    pub(crate) end: u32,
    pub(crate) work: Work,
    pub(crate) marks: Marks,
    /// It fails so when its turn comes.
    pub(crate) failure: Option<Status>,
}

static_assertions::const_assert_eq!(size_of::<SendEntry>(), 64);

impl SendEntry {
    /// A request without data.
    pub(crate) const fn bare(id: WrId, work: Work, marks: Marks) -> Self {
        Self {
            id,
            first: Sge {
                address: 0,
                length: 0,
                lkey: LKey(0),
            },
            address: 0,
            rkey: 0,
            extra: 0,
            length: 0,
            pieces: 0,
            end: 0,
            work,
            marks,
            failure: None,
        }
    }

    pub(crate) const fn is(&self, mark: Marks) -> bool {
        self.marks.contains(mark)
    }

    /// Whether it runs on this device alone.
    pub(crate) const fn is_local(&self) -> bool {
        matches!(self.work, Work::Register | Work::Invalidate)
    }

    /// Whether it runs only when all before it is complete.
    pub(crate) const fn waits(&self) -> bool {
        matches!(self.work, Work::Invalidate) && self.failure.is_none()
    }
}

impl Default for SendEntry {
    fn default() -> Self {
        Self::bare(WrId(0), Work::Send, Marks::empty())
    }
}

/// Room for one receive.
#[derive(Clone, Copy, Debug, Default)]
pub struct ReceiveEntry {
    pub(crate) id: WrId,
    pub(crate) buffer: Sge,
}

/// How far the work request at `sent` has been put on the wire.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Cursor {
    pub(crate) piece: u32,
    /// Bytes of that piece.
    pub(crate) offset: u32,
    /// Bytes of all pieces.
    pub(crate) bytes: u32,
    /// Packets have been made.
    pub(crate) begun: bool,
}

/// A message that is coming in.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Incoming {
    pub(crate) length: u32,
    pub(crate) done: u32,
}

/// Room for one queue pair.
#[derive(Debug)]
pub struct QueuePairSlot {
    pub(crate) pair: Option<QueuePair>,
    /// What is for it comes so, what it sends goes so, and both by this port.
    pub(crate) here: Route,
    pub(crate) there: Route,
    pub(crate) port: u16,
    pub(crate) generation: u32,
    pub(crate) state: State,

    // The send queue.
    pub(crate) freed: u32,
    pub(crate) completed: u32,
    pub(crate) sent: u32,
    pub(crate) tail: u32,
    pub(crate) open: u32,
    /// A request of the open chain was refused; none behind it is taken.
    pub(crate) latched: bool,

    // What was sent.
    /// Everything before it is acknowledged.
    pub(crate) acked: u32,
    /// Sequence number of the next packet.
    pub(crate) psn: u32,
    /// The highest that `psn` has been.
    pub(crate) top: u32,
    /// `psn` at `completed`: where to go back to.
    pub(crate) base: u32,
    pub(crate) cursor: Cursor,
    pub(crate) retries: u8,
    pub(crate) rnr_retries: u8,
    /// Poll at which a timer runs out.
    pub(crate) deadline: u64,
    /// Nothing is sent before this poll (receiver not ready).
    pub(crate) resume: u64,
    /// Status of the oldest work request when the send queue is flushed.
    pub(crate) cause: Status,
    pub(crate) close_due: bool,

    // The receive queue.
    pub(crate) recv_freed: u32,
    pub(crate) recv_head: u32,
    pub(crate) recv_tail: u32,

    // What comes in.
    /// Sequence number of the next packet.
    pub(crate) expected: u32,
    /// Bytes of that packet that are done.
    pub(crate) done: u32,
    pub(crate) incoming: Option<Incoming>,
    /// A packet was lost or turned away, and the peer was told.
    pub(crate) gap: bool,
    /// The peer asked to be left alone.
    pub(crate) deaf: bool,
    /// What to tell the peer at the next occasion.
    pub(crate) answer: Option<Opcode>,
    /// What to tell it for good, in error.
    pub(crate) refusal: Opcode,

    // The list of queue pairs that want a turn.
    pub(crate) next: u32,
    pub(crate) listed: bool,
}

impl Default for QueuePairSlot {
    fn default() -> Self {
        Self {
            pair: None,
            here: Route::NONE,
            there: Route::NONE,
            port: 0,
            generation: 0,
            state: State::Error,
            freed: 0,
            completed: 0,
            sent: 0,
            tail: 0,
            open: 0,
            latched: false,
            acked: 0,
            psn: 0,
            top: 0,
            base: 0,
            cursor: Cursor::default(),
            retries: 0,
            rnr_retries: 0,
            deadline: NEVER,
            resume: 0,
            cause: Status::Flushed,
            close_due: false,
            recv_freed: 0,
            recv_head: 0,
            recv_tail: 0,
            expected: 0,
            done: 0,
            incoming: None,
            gap: false,
            deaf: false,
            answer: None,
            refusal: Opcode::Closed,
            next: NONE,
            listed: false,
        }
    }
}

impl QueuePairSlot {
    /// As after connecting. Keeps its place in the list of those who want a turn.
    fn start(&mut self, pair: QueuePair) {
        *self = Self {
            here: Route::new(pair.number, pair.path.number),
            there: Route::new(pair.path.number, pair.number),
            port: pair.path.port,
            state: State::Ready,
            acked: pair.psn,
            psn: pair.psn,
            top: pair.psn,
            base: pair.psn,
            retries: pair.retry_count,
            rnr_retries: pair.rnr_retry,
            expected: pair.path.psn,
            generation: self.generation,
            next: self.next,
            listed: self.listed,
            pair: Some(pair),
            ..Self::default()
        };
    }

    /// The poll at which the first of its timers runs out.
    pub(crate) const fn alarm(&self) -> u64 {
        if self.resume != 0 && self.resume < self.deadline {
            self.resume
        } else {
            self.deadline
        }
    }

    /// Whether packets are on the wire that the peer has not answered.
    pub(crate) const fn in_flight(&self) -> bool {
        self.acked != self.top
    }

    /// A packet was sent.
    #[inline(always)]
    pub(crate) const fn sent_one(&mut self) {
        self.psn = self.psn.wrapping_add(1);
        if before(self.top, self.psn) {
            self.top = self.psn;
        }
    }

    /// The request at `sent`, which needs no peer, has run; whether it is complete. Behind others it is when they are.
    #[inline(always)]
    pub(crate) const fn pass_local(&mut self) -> bool {
        let first = self.completed == self.sent;
        self.sent = self.sent.wrapping_add(1);
        if first {
            self.completed = self.sent;
        }
        first
    }

    /// Goes back to the oldest work request that is not complete.
    pub(crate) const fn rewind(&mut self) {
        self.sent = self.completed;
        self.psn = self.base;
        self.cursor = Cursor {
            piece: 0,
            offset: 0,
            bytes: 0,
            begun: false,
        };
    }
}

/// The send queue of one queue pair: its part of all queues' memory.
pub(crate) struct SendRing<'s> {
    all: &'s mut [SendEntry],
    all_pieces: &'s mut [Sge],
    /// Where the queue begins in `all`, and its length less one.
    base: usize,
    mask: usize,
    stride: usize,
}

impl SendRing<'_> {
    #[inline]
    pub(crate) fn at(&mut self, position: u32) -> Option<&mut SendEntry> {
        let place = self.place(position);
        self.all.get_mut(place)
    }

    pub(crate) fn get(&self, position: u32) -> Option<&SendEntry> {
        self.all.get(self.place(position))
    }

    /// Stores the scatter/gather elements of a request behind the first, which its entry holds; false if
    /// there are too many.
    pub(crate) fn store(&mut self, position: u32, rest: &[Sge]) -> bool {
        let start = self.piece_start(position);
        let Some(room) = self
            .all_pieces
            .get_mut(start..start.saturating_add(rest.len()))
            .filter(|room| room.len() <= self.stride)
        else {
            return false;
        };
        for (slot, piece) in room.iter_mut().zip(rest) {
            *slot = *piece;
        }
        true
    }

    /// A scatter/gather element of the request at `position`.
    pub(crate) fn piece(&self, position: u32, entry: &SendEntry, number: u32) -> Option<Sge> {
        if number >= entry.pieces {
            return None;
        }
        match number.checked_sub(1) {
            None => Some(entry.first),
            Some(rest) => self
                .all_pieces
                .get(self.piece_start(position).wrapping_add(rest as usize))
                .copied(),
        }
    }

    const fn place(&self, position: u32) -> usize {
        self.base.wrapping_add(position as usize & self.mask)
    }

    const fn piece_start(&self, position: u32) -> usize {
        self.place(position).wrapping_mul(self.stride)
    }
}

/// The receive queue of one queue pair: its part of all queues' memory.
pub(crate) struct ReceiveRing<'s> {
    all: &'s mut [ReceiveEntry],
    base: usize,
    mask: usize,
}

impl ReceiveRing<'_> {
    #[inline]
    pub(crate) fn at(&mut self, position: u32) -> Option<&mut ReceiveEntry> {
        self.all
            .get_mut(self.base.wrapping_add(position as usize & self.mask))
    }
}

/// A queue pair with its queues.
pub(crate) struct Held<'s> {
    pub(crate) slot: &'s mut QueuePairSlot,
    pub(crate) sends: SendRing<'s>,
    pub(crate) receives: ReceiveRing<'s>,
}

/// All queue pairs of one device.
pub(crate) struct Table<'a> {
    pub(crate) slots: &'a mut [QueuePairSlot],
    pub(crate) sends: &'a mut [SendEntry],
    pub(crate) pieces: &'a mut [Sge],
    pub(crate) receives: &'a mut [ReceiveEntry],
    /// Slot by number: open addressing, a power of two, at most half full.
    pub(crate) numbers: &'a mut [u32],
    pub(crate) send_stride: usize,
    pub(crate) piece_stride: usize,
    pub(crate) receive_stride: usize,
    /// No slot from here on was ever used.
    pub(crate) high: u32,
    pub(crate) first: u32,
    pub(crate) last: u32,
    pub(crate) listed: u32,
}

impl Table<'_> {
    /// The queue pair of an index, with its queues.
    #[inline]
    pub(crate) fn held(&mut self, index: u32) -> Option<Held<'_>> {
        let at = index as usize;
        let slot = self.slots.get_mut(at)?;
        slot.pair.as_ref()?;
        Some(Held {
            slot,
            sends: SendRing {
                all: self.sends,
                all_pieces: self.pieces,
                base: at.wrapping_mul(self.send_stride),
                mask: self.send_stride.wrapping_sub(1),
                stride: self.piece_stride,
            },
            receives: ReceiveRing {
                all: self.receives,
                base: at.wrapping_mul(self.receive_stride),
                mask: self.receive_stride.wrapping_sub(1),
            },
        })
    }

    #[inline]
    pub(crate) fn slot(&mut self, index: u32) -> Option<&mut QueuePairSlot> {
        self.slots
            .get_mut(index as usize)
            .filter(|slot| slot.pair.is_some())
    }

    /// The queue pair that a packet of this route from this port is for.
    #[inline]
    pub(crate) fn receiver(&self, route: Route, port: u16) -> Option<u32> {
        self.find(route.destination(), |slot| {
            slot.here == route && slot.port == port
        })
    }

    /// The index of a number, if the slot is the one.
    #[inline]
    fn find(&self, number: u32, is_it: impl Fn(&QueuePairSlot) -> bool) -> Option<u32> {
        let mask = self.numbers.len().wrapping_sub(1);
        let mut at = number as usize & mask;
        for _ in 0..self.numbers.len() {
            let index = *self.numbers.get(at)?;
            if is_it(self.slots.get(index as usize)?) {
                return Some(index);
            }
            at = at.wrapping_add(1) & mask;
        }
        None
    }

    /// Takes a queue pair in, if its number is new, its queues fit and a slot is vacant.
    #[expect(clippy::cast_possible_truncation, reason = "at most 2^22 queue pairs")]
    pub(crate) fn adopt(&mut self, pair: QueuePair) -> Result<u32, QueuePair> {
        let taken = |slot: &QueuePairSlot| {
            let held = slot.pair.as_ref();
            held.is_some_and(|held| held.number == pair.number)
        };
        let fits = pair.number <= NUMBER
            && pair.send_depth as usize <= self.send_stride
            && pair.recv_depth as usize <= self.receive_stride
            && self.find(pair.number, taken).is_none();
        let vacant = self
            .slots
            .iter_mut()
            .enumerate()
            .find(|(_, slot)| slot.pair.is_none())
            .filter(|_| fits);
        let Some((index, slot)) = vacant else {
            return Err(pair);
        };
        let number = pair.number;
        slot.start(pair);
        let index = index as u32;
        self.high = self.high.max(index.wrapping_add(1));
        self.enter(number, index);
        Ok(index)
    }

    /// Takes a queue pair out.
    #[expect(clippy::cast_possible_truncation, reason = "at most 2^22 queue pairs")]
    pub(crate) fn retire(&mut self, index: u32) -> Option<QueuePair> {
        let slot = self.slots.get_mut(index as usize)?;
        let pair = slot.pair.take()?;
        slot.here = Route::NONE;
        slot.generation = slot.generation.wrapping_add(1);
        // Retiring is rare: rebuilding needs no tombstones.
        self.numbers.fill(NONE);
        for index in 0..self.slots.len() {
            let number = self.slots.get(index).and_then(|slot| slot.pair.as_ref());
            if let Some(pair) = number {
                let number = pair.number;
                self.enter(number, index as u32);
            }
        }
        Some(pair)
    }

    /// Asks for a turn.
    #[inline]
    pub(crate) fn list(&mut self, index: u32) {
        let Some(slot) = self.slots.get_mut(index as usize) else {
            return;
        };
        if slot.listed {
            return;
        }
        slot.listed = true;
        slot.next = NONE;
        match self.slots.get_mut(self.last as usize) {
            Some(last) if self.listed != 0 => last.next = index,
            _ => self.first = index,
        }
        self.last = index;
        self.listed = self.listed.wrapping_add(1);
    }

    /// The one whose turn it is, off the list.
    pub(crate) fn unlist(&mut self) -> Option<u32> {
        self.listed = self.listed.checked_sub(1)?;
        let index = self.first;
        let slot = self.slots.get_mut(index as usize)?;
        slot.listed = false;
        self.first = slot.next;
        Some(index)
    }

    fn enter(&mut self, number: u32, index: u32) {
        let mask = self.numbers.len().wrapping_sub(1);
        let mut at = number as usize & mask;
        for _ in 0..self.numbers.len() {
            if let Some(place) = self.numbers.get_mut(at)
                && *place == NONE
            {
                *place = index;
                return;
            }
            at = at.wrapping_add(1) & mask;
        }
    }
}

/// When the timers of queue pairs are looked at: not before the first may run out, and then those of all, one queue pair
/// per poll.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timers {
    /// None runs out before this poll.
    pub(crate) alarm: u64,
    /// The same, of those that the round under way has seen.
    later: u64,
    /// The queue pair that is looked at next.
    pub(crate) hand: u32,
}

impl Timers {
    pub(crate) const fn new() -> Self {
        Self {
            alarm: NEVER,
            later: NEVER,
            hand: 0,
        }
    }

    /// A timer runs out then.
    #[inline]
    pub(crate) fn set(&mut self, at: u64) {
        self.alarm = self.alarm.min(at);
        self.later = self.later.min(at);
    }

    /// The first of the hand's timers is this one, and there are so many queue pairs.
    pub(crate) fn seen(&mut self, at: u64, queue_pairs: u32) {
        self.later = self.later.min(at);
        self.hand = self.hand.wrapping_add(1);
        if self.hand >= queue_pairs {
            *self = Self {
                alarm: self.later,
                ..Self::new()
            };
        }
    }
}

/// No index.
pub(crate) const NONE: u32 = u32::MAX;

/// No poll.
pub(crate) const NEVER: u64 = u64::MAX;
