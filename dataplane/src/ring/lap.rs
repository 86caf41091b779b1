//! The lap ring: each slot is one cache line that says itself whose turn it is, like a CQE's owner bit.
//!
//! A message crosses in the one line that it fills; no shared index moves with it. The consumer gives
//! slots back through [`Returned`], a quarter of the ring at a time, so that line moves seldom.
//!
//! A consumer that waits for the very next slot takes its line away while the producer writes it, and
//! the line crosses twice. What is sent together is better pushed together: a burst is published
//! from its last message to its first, so nobody looks at its lines before they are complete.
//!
//! A small ring is a fast one: with 16 or 64 slots each way, all lines stay in the first-level caches
//! of both cores, and a round trip costs a sixth to a third less than with 256 or more.

use core::fmt;

use crossbeam_utils::CachePadded;

use super::sync::{AtomicU32, Cell, Edge, acquire, const_unless_loom, prefetch_to_write, release};

/// What travels: seven plain words.
pub type Message = [u64; 7];

/// One cache line: seven words of message and the index it was written at, which says its lap.
#[repr(C, align(64))]
pub struct LapSlot {
    message: Cell<Message>,
    lap: AtomicU32,
}

#[cfg(not(loom))]
static_assertions::const_assert_eq!(size_of::<LapSlot>(), 64);

impl LapSlot {
    const_unless_loom! {
        /// An empty slot.
        #[must_use]
        pub fn new() -> Self {
            Self::before(0)
        }
    }

    const_unless_loom! {
        /// An empty slot, as if it had last been written at this index.
        fn before(index: u32) -> Self {
            Self {
                message: Cell::new([0; 7]),
                lap: AtomicU32::new(index),
            }
        }
    }
}

impl Default for LapSlot {
    fn default() -> Self {
        Self::new()
    }
}

/// How far the consumer says it has come: the way back of the ring's credits.
#[derive(Debug, Default)]
pub struct Returned(CachePadded<AtomicU32>);

impl Returned {
    const_unless_loom! {
        /// Nothing consumed yet.
        #[must_use]
        pub fn new() -> Self {
            Self::at(0)
        }
    }

    const_unless_loom! {
        fn at(start: u32) -> Self {
            Self(CachePadded::new(AtomicU32::new(start)))
        }
    }
}

/// Makes a ring of `slots`; `None` unless their number is a power of two, at least 4 and at most 2^30.
pub fn ring<'a>(
    returned: &'a mut Returned,
    slots: &'a mut [LapSlot],
) -> Option<(LapProducer<'a>, LapConsumer<'a>)> {
    ring_at(0, returned, slots)
}

/// A ring whose indices begin at `start`.
fn ring_at<'a>(
    start: u32,
    returned: &'a mut Returned,
    slots: &'a mut [LapSlot],
) -> Option<(LapProducer<'a>, LapConsumer<'a>)> {
    let count = u32::try_from(slots.len()).ok()?;
    if !count.is_power_of_two() || !(MIN..=MAX).contains(&count) {
        return None;
    }
    let mask = count.wrapping_sub(1);
    *returned = Returned::at(start);
    for ahead in 0..count {
        // As if it had been written a lap ago.
        let index = start.wrapping_add(ahead);
        *slots.get_mut(slot_of(index, mask))? = LapSlot::before(index.wrapping_sub(count));
    }
    let returned: &'a Returned = returned;
    let slots: &'a [LapSlot] = slots;
    Some((
        LapProducer {
            slots,
            returned,
            tail: start,
            limit: start.wrapping_add(count),
            mask,
        },
        LapConsumer {
            slots,
            returned,
            head: start,
            told: start,
            mask,
        },
    ))
}

/// The position of index `at`. Indices run freely; a ring has no more than a quarter of them, so two laps of a slot
/// in a row never have the same one.
const fn slot_of(at: u32, mask: u32) -> usize {
    (at & mask) as usize
}

/// Fewest and most slots.
const MIN: u32 = 4;
const MAX: u32 = 1 << 30;

/// The end that sends.
///
/// It owns the slots from its tail up to what the consumer has returned, one lap on.
pub struct LapProducer<'a> {
    slots: &'a [LapSlot],
    returned: &'a Returned,
    tail: u32,
    /// Where the tail may come to, by what the consumer had returned when last looked at.
    limit: u32,
    mask: u32,
}

impl LapProducer<'_> {
    /// How many messages fit now, as far as the consumer has told: up to a quarter of the ring may be
    /// empty and not yet given back. Never less than it said before, minus what was pushed since.
    pub fn room(&mut self) -> u32 {
        // Acquire pairs with the Release in `LapConsumer::pop`: a slot given back has been read.
        let head = self.returned.0.load(acquire(Edge::Returned));
        self.limit = head.wrapping_add(self.mask).wrapping_add(1);
        self.known_room()
    }

    /// Sends a message; false when there is no room.
    #[inline]
    #[must_use]
    pub fn push(&mut self, message: &Message) -> bool {
        if self.known_room() == 0 && self.room() == 0 {
            return false;
        }
        let Some(slot) = self.slots.get(slot_of(self.tail, self.mask)) else {
            return false;
        };
        slot.message.write(|at| {
            // SAFETY: there is room, so the consumer has given this slot back (Acquire in `room`), and
            // it reads it again only after the lap below says so.
            unsafe { *at = *message }
        });
        // Release pairs with the Acquire in `LapConsumer::peek`: the message is written before it is seen.
        slot.lap.store(self.tail, release(Edge::Lap));
        self.tail = self.tail.wrapping_add(1);
        // The consumer read this line a lap ago. Not the very next one, which it may be looking at.
        let soon = slot_of(self.tail.wrapping_add(AHEAD), self.mask);
        if let Some(slot) = self.slots.get(soon) {
            prefetch_to_write(slot);
        }
        true
    }

    /// Sends as many of `from`, first to last, as there is room for; how many that was. The consumer
    /// sees none of them before all are written.
    #[inline]
    #[must_use]
    pub fn push_slice(&mut self, from: &[Message]) -> usize {
        let wanted = u32::try_from(from.len()).unwrap_or(u32::MAX);
        let mut room = self.known_room();
        if room < wanted {
            room = self.room();
        }
        let count = room.min(wanted);
        let end = self.tail.wrapping_add(count);
        let mut at = end;
        for message in from.iter().take(count as usize).rev() {
            at = at.wrapping_sub(1);
            let Some(slot) = self.slots.get(slot_of(at, self.mask)) else {
                return 0;
            };
            slot.message.write(|place| {
                // SAFETY: as in `push`: the slot is one of `count` that were given back. The consumer
                // does not come past the first of them, whose lap is written last.
                unsafe { *place = *message }
            });
            // Release pairs with the Acquire in `LapConsumer::peek`, as in `push`.
            slot.lap.store(at, release(Edge::Lap));
        }
        self.tail = end;
        count as usize
    }

    fn known_room(&self) -> u32 {
        self.limit.wrapping_sub(self.tail)
    }
}

/// How far ahead of its tail a producer asks for a line.
const AHEAD: u32 = 2;

// SAFETY: the producer writes only slots that the consumer has given back; messages are plain words.
unsafe impl Send for LapProducer<'_> {}

impl fmt::Debug for LapProducer<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LapProducer")
            .field("slots", &self.slots.len())
            .field("tail", &self.tail)
            .finish_non_exhaustive()
    }
}

/// The end that receives.
///
/// It owns the slots from what it has returned up to the first one whose lap is not its own.
pub struct LapConsumer<'a> {
    slots: &'a [LapSlot],
    returned: &'a Returned,
    head: u32,
    /// What the producer knows of `head`.
    told: u32,
    mask: u32,
}

impl LapConsumer<'_> {
    /// The oldest message, left in the ring.
    #[inline]
    #[must_use]
    pub fn peek(&self) -> Option<Message> {
        let slot = self.slots.get(slot_of(self.head, self.mask))?;
        // Acquire pairs with the Releases in `LapProducer::push` and `push_slice`: a message whose lap is
        // seen has been written.
        if slot.lap.load(acquire(Edge::Lap)) != self.head {
            return None;
        }
        Some(slot.message.read(|at| {
            // SAFETY: the lap says the producer is done with the slot; it writes it again only after
            // this consumer has given it back in `pop`.
            unsafe { *at }
        }))
    }

    /// The message `ahead` places behind the oldest, left in the ring: for who wants to prepare it, and has seen all
    /// before it. Looking at a slot that is being written takes its line away.
    #[inline]
    #[must_use]
    pub fn peek_at(&self, ahead: u16) -> Option<Message> {
        // So short a step ends at no index that was given back.
        let at = self.head.wrapping_add(u32::from(ahead));
        let slot = self.slots.get(slot_of(at, self.mask))?;
        // Acquire pairs with the Releases in `LapProducer::push` and `push_slice`, as in `peek`.
        if slot.lap.load(acquire(Edge::Lap)) != at {
            return None;
        }
        Some(slot.message.read(|at| {
            // SAFETY: as in `peek`: the lap is the one in which the producer writes this index and no other, and
            // it writes the slot again only after this consumer has given the index back in `pop`.
            unsafe { *at }
        }))
    }

    /// Takes the oldest message out. Slots are given back a quarter of the ring at a time.
    #[inline]
    pub fn pop(&mut self) -> Option<Message> {
        let message = self.peek()?;
        self.head = self.head.wrapping_add(1);
        if self.head.wrapping_sub(self.told) > self.mask >> 2 {
            self.told = self.head;
            // Release pairs with the Acquire in `LapProducer::room`: slots are read before they are given back.
            self.returned.0.store(self.head, release(Edge::Returned));
        }
        Some(message)
    }
}

// SAFETY: the consumer reads only slots whose lap says they are written; messages are plain words.
unsafe impl Send for LapConsumer<'_> {}

impl fmt::Debug for LapConsumer<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LapConsumer")
            .field("slots", &self.slots.len())
            .field("head", &self.head)
            .finish_non_exhaustive()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    extern crate std;

    use std::collections::VecDeque;
    use std::thread;
    use std::vec::Vec;

    use proptest::prelude::*;

    use super::{LapSlot, Returned, ring, ring_at};

    fn slots(count: usize) -> Vec<LapSlot> {
        (0..count).map(|_| LapSlot::new()).collect()
    }

    #[test]
    fn only_a_power_of_two_from_four_is_a_ring() {
        for count in [0, 1, 2, 3, 6, 12] {
            assert!(ring(&mut Returned::new(), &mut slots(count)).is_none());
        }
        for count in [4, 8, 256] {
            assert!(ring(&mut Returned::new(), &mut slots(count)).is_some());
        }
    }

    /// Wherever the indices begin, also where one of them is what a fresh slot says.
    #[test]
    fn a_new_ring_is_empty_and_has_all_its_room() {
        for start in [0, 1, 3, 4, 5, u32::MAX - 4, u32::MAX - 1, u32::MAX] {
            let mut returned = Returned::new();
            let mut slots = slots(4);
            let (mut producer, mut consumer) = ring_at(start, &mut returned, &mut slots).unwrap();
            for lap in 0..3 {
                assert_eq!(consumer.pop(), None);
                assert_eq!(producer.room(), 4);
                assert_eq!(producer.push_slice(&[[lap; 7]; 5]), 4);
                assert!(!producer.push(&[9; 7]));
                for _ in 0..4 {
                    assert_eq!(consumer.pop(), Some([lap; 7]));
                }
            }
        }
    }

    #[test]
    fn a_ring_made_again_of_used_slots_is_empty() {
        let mut returned = Returned::new();
        let mut slots = slots(4);
        let (mut producer, _) = ring(&mut returned, &mut slots).unwrap();
        assert!(producer.push(&[7; 7]));
        let (mut producer, mut consumer) = ring(&mut returned, &mut slots).unwrap();
        assert_eq!(consumer.pop(), None);
        assert_eq!(producer.room(), 4);
    }

    #[test]
    fn an_emptied_ring_has_more_than_three_quarters_of_its_room() {
        let mut returned = Returned::new();
        let mut slots = slots(16);
        let (mut producer, mut consumer) = ring(&mut returned, &mut slots).unwrap();
        for round in 0..100_u64 {
            assert!(producer.room() > 12);
            assert!(producer.push(&[round; 7]));
            assert_eq!(consumer.pop(), Some([round; 7]));
        }
    }

    proptest! {
        /// Any sequence of calls does what a bounded `VecDeque` does, but for the credits that are on
        /// their way back, also where the indices wrap.
        #[test]
        fn behaves_as_a_bounded_queue(
            calls in proptest::collection::vec(0..10_u8, 1..400),
            shift in 2..5_u32,
            before_wrap in 0..64_u32,
        ) {
            let capacity = 1_usize << shift;
            let mut returned = Returned::new();
            let mut slots = slots(capacity);
            let (mut producer, mut consumer) =
                ring_at(0_u32.wrapping_sub(before_wrap), &mut returned, &mut slots).unwrap();
            let mut model = VecDeque::new();
            let mut popped = 0;
            for (n, call) in (0_u64..).zip(calls) {
                let message = [n, n + 1, n + 2, n + 3, n + 4, n + 5, n + 6];
                let held_back = popped % (capacity / 4);
                let room = capacity - model.len() - held_back;
                match call {
                    0 | 1 => {
                        prop_assert_eq!(producer.push(&message), room > 0);
                        model.extend((room > 0).then_some(message));
                    }
                    2..=5 => {
                        prop_assert_eq!(consumer.peek(), model.front().copied());
                        prop_assert_eq!(consumer.peek_at(1), model.get(1).copied());
                        popped += usize::from(!model.is_empty());
                        prop_assert_eq!(consumer.pop(), model.pop_front());
                    }
                    6 => prop_assert_eq!(producer.room() as usize, room),
                    _ => {
                        let burst: Vec<_> = (0..u64::from(call)).map(|i| [n, i, 2, 3, 4, 5, 6]).collect();
                        prop_assert_eq!(producer.push_slice(&burst), burst.len().min(room));
                        model.extend(burst.into_iter().take(room));
                    }
                }
            }
        }
    }

    /// Messages from one thread to another arrive complete, in order, unmixed.
    #[test]
    fn two_threads_lose_and_reorder_nothing() {
        const COUNT: u64 = 300_000;
        let mut returned = Returned::new();
        let mut slots = slots(32);
        let (mut producer, mut consumer) =
            ring_at(u32::MAX - 1000, &mut returned, &mut slots).unwrap();
        thread::scope(|scope| {
            scope.spawn(move || {
                let mut next = 0;
                while next < COUNT {
                    let burst = (1 + next % 11).min(COUNT - next);
                    let messages: Vec<_> = (next..next + burst).map(|n| [n; 7]).collect();
                    let sent = match messages[..] {
                        [ref one] => u64::from(producer.push(one)),
                        _ => producer.push_slice(&messages) as u64,
                    };
                    next += sent;
                    if sent == 0 {
                        thread::yield_now();
                    }
                }
            });
            for n in 0..COUNT {
                let message = loop {
                    match consumer.pop() {
                        Some(message) => break message,
                        None => thread::yield_now(),
                    }
                };
                assert_eq!(message, [n; 7]);
            }
            assert_eq!(consumer.pop(), None);
        });
    }
}
