//! The index ring: free-running indices, a power of two of slots, a cached copy of the other side's index.
//!
//! An index moves two cache lines per hand-over, the data's and its own, so bursts are what it is
//! for: [`Producer::push_slice`], [`Producer::push_iter`], [`Producer::reserve`],
//! [`Consumer::pop_slice`] and [`Consumer::drain`] move the shared index once for all their values.
//!
//! Values still in the ring when both ends are gone are leaked: the slots are lent memory and run
//! no destructor. What travels here is plain or borrowed, so nothing is lost but the loan; whoever
//! sends a value that owns something drains the ring first.

use core::fmt;
use core::mem::MaybeUninit;

use crossbeam_utils::CachePadded;

use super::sync::{AtomicUsize, Cell, Edge, acquire, const_unless_loom, release};

/// Room for one value.
#[repr(transparent)]
pub struct Slot<T>(Cell<MaybeUninit<T>>);

impl<T> Slot<T> {
    const_unless_loom! {
        /// An empty slot.
        #[must_use]
        pub fn new() -> Self {
            Self(Cell::new(MaybeUninit::uninit()))
        }
    }

    /// # Safety
    /// The caller owns the slot: nobody reads or writes it at the same time.
    #[inline(always)]
    unsafe fn put(&self, value: T) {
        self.0.write(|at| {
            // SAFETY: `at` points to the slot's own memory, and the caller owns it. Whatever was there
            // has been moved out or is leaked.
            unsafe { (*at).write(value) };
        });
    }

    /// # Safety
    /// The caller owns the slot, and the slot holds a value, which is moved out: it is not taken again.
    #[inline(always)]
    unsafe fn take(&self) -> T {
        self.0.read(|at| {
            // SAFETY: the caller owns the slot and says that it holds a value.
            unsafe { (*at).assume_init_read() }
        })
    }
}

impl<T> Default for Slot<T> {
    fn default() -> Self {
        Self::new()
    }
}

/// The two indices of one ring, each in its own cache line. They run freely and wrap; the
/// distance between them is right modulo 2^64, and at most the number of slots, so a wrapped index
/// needs no special case. A power of two of slots keeps `index & (slots - 1)` continuous there.
#[derive(Debug, Default)]
pub struct Indices {
    tail: CachePadded<AtomicUsize>,
    head: CachePadded<AtomicUsize>,
}

impl Indices {
    const_unless_loom! {
        /// Indices of an empty ring.
        #[must_use]
        pub fn new() -> Self {
            Self::at(0)
        }
    }

    const_unless_loom! {
        fn at(start: usize) -> Self {
            Self {
                tail: CachePadded::new(AtomicUsize::new(start)),
                head: CachePadded::new(AtomicUsize::new(start)),
            }
        }
    }
}

/// Makes a ring of `slots`; `None` unless their number is a power of two.
pub fn ring<'a, T>(
    indices: &'a mut Indices,
    slots: &'a mut [Slot<T>],
) -> Option<(Producer<'a, T>, Consumer<'a, T>)> {
    ring_at(0, indices, slots)
}

/// A ring whose indices begin at `start`.
fn ring_at<'a, T>(
    start: usize,
    indices: &'a mut Indices,
    slots: &'a mut [Slot<T>],
) -> Option<(Producer<'a, T>, Consumer<'a, T>)> {
    if !slots.len().is_power_of_two() {
        return None;
    }
    *indices = Indices::at(start);
    let indices: &'a Indices = indices;
    let slots: &'a [Slot<T>] = slots;
    Some((
        Producer {
            indices,
            slots,
            tail: start,
            head: start,
        },
        Consumer {
            indices,
            slots,
            head: start,
            tail: start,
        },
    ))
}

/// The end that puts values in.
///
/// It owns the slots from its tail up to the consumer's head (one lap on): the consumer reads a slot
/// only after the tail has passed it.
pub struct Producer<'a, T> {
    indices: &'a Indices,
    slots: &'a [Slot<T>],
    /// Ours. Ahead of the shared one only inside a burst.
    tail: usize,
    /// The consumer's, as last seen.
    head: usize,
}

impl<'a, T> Producer<'a, T> {
    /// How many values fit now. Never less than it said before, minus what was pushed since.
    pub fn free(&mut self) -> usize {
        // Acquire pairs with the Release in `Consumer::give_back`: a slot seen free has been emptied.
        self.head = self.indices.head.load(acquire(Edge::Head));
        self.known_free()
    }

    /// Puts a value in.
    ///
    /// # Errors
    /// The value, when the ring is full.
    #[inline]
    pub fn push(&mut self, value: T) -> Result<(), T> {
        if self.room_for(1) == 0 {
            return Err(value);
        }
        self.put(value)?;
        self.publish();
        Ok(())
    }

    /// Puts in as many of `from`, first to last, as there is room for; how many that was.
    #[inline]
    pub fn push_slice(&mut self, from: &[T]) -> usize
    where
        T: Copy,
    {
        let count = self.room_for(from.len()).min(from.len());
        let Some((lap_start, here)) = self.slots.split_at_checked(self.slot_of_tail()) else {
            return 0;
        };
        let Some((first, rest)) = from
            .get(..count)
            .and_then(|from| from.split_at_checked(count.min(here.len())))
        else {
            return 0;
        };
        for (slot, value) in here.iter().zip(first) {
            // SAFETY: `count` slots from the tail on are free (`room_for`), and these are the first of them.
            unsafe { slot.put(*value) };
        }
        for (slot, value) in lap_start.iter().zip(rest) {
            // SAFETY: the free slots go on at the start of the ring; `rest` is what is left of `count`.
            unsafe { slot.put(*value) };
        }
        self.tail = self.tail.wrapping_add(count);
        if count != 0 {
            self.publish();
        }
        count
    }

    /// Puts in values from `values` while there are any and there is room; how many that was. A
    /// value is taken from the iterator only when its place is certain.
    #[inline]
    pub fn push_iter(&mut self, values: impl IntoIterator<Item = T>) -> usize {
        let mut values = values.into_iter();
        let mut count = 0_usize;
        while self.room_for(1) != 0 {
            let Some(value) = values.next() else { break };
            if self.put(value).is_err() {
                break;
            }
            count = count.wrapping_add(1);
        }
        if count != 0 {
            self.publish();
        }
        count
    }

    /// Sets `count` places aside, all or none. What is pushed through the token becomes visible when
    /// the token is dropped; places that were not used are free again.
    #[inline]
    #[must_use]
    pub fn reserve(&mut self, count: usize) -> Option<Reserved<'_, 'a, T>> {
        if self.room_for(count) < count {
            return None;
        }
        Some(Reserved {
            producer: self,
            left: count,
        })
    }

    fn known_free(&self) -> usize {
        self.slots
            .len()
            .wrapping_sub(self.tail.wrapping_sub(self.head))
    }

    /// How many values fit; looks at the consumer's line only if what is known does not suffice.
    #[inline]
    fn room_for(&mut self, wanted: usize) -> usize {
        let known = self.known_free();
        if known >= wanted { known } else { self.free() }
    }

    fn slot_of_tail(&self) -> usize {
        self.tail & self.slots.len().wrapping_sub(1)
    }

    /// Writes the next slot without telling. The caller has made sure of room.
    #[inline]
    fn put(&mut self, value: T) -> Result<(), T> {
        let Some(slot) = self.slots.get(self.slot_of_tail()) else {
            return Err(value);
        };
        // SAFETY: every caller has seen room for one more value than lies in the ring, so the slot is
        // the producer's until `publish` passes it.
        unsafe { slot.put(value) };
        self.tail = self.tail.wrapping_add(1);
        Ok(())
    }

    #[inline]
    fn publish(&self) {
        // Release pairs with the Acquire in `Consumer::len`: the values are written before they are seen.
        self.indices.tail.store(self.tail, release(Edge::Tail));
    }
}

// SAFETY: a producer reaches only the slots between its tail and the consumer's head, which no other
// thread reaches; values go through them to the other thread, which `T: Send` allows.
unsafe impl<T: Send> Send for Producer<'_, T> {}

impl<T> fmt::Debug for Producer<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Producer")
            .field("slots", &self.slots.len())
            .field("tail", &self.tail)
            .finish_non_exhaustive()
    }
}

/// Places set aside by [`Producer::reserve`].
#[derive(Debug)]
pub struct Reserved<'r, 'a, T> {
    producer: &'r mut Producer<'a, T>,
    left: usize,
}

impl<T> Reserved<'_, '_, T> {
    /// How many places are left.
    #[must_use]
    pub const fn left(&self) -> usize {
        self.left
    }

    /// Puts a value in one of the places.
    ///
    /// # Errors
    /// The value, when all places of the token are used. Never because the ring is full.
    #[inline]
    pub fn push(&mut self, value: T) -> Result<(), T> {
        let Some(left) = self.left.checked_sub(1) else {
            return Err(value);
        };
        self.producer.put(value)?;
        self.left = left;
        Ok(())
    }
}

impl<T> Drop for Reserved<'_, '_, T> {
    // A forgotten token publishes nothing; the next push does it then.
    fn drop(&mut self) {
        self.producer.publish();
    }
}

/// The end that takes values out.
///
/// It owns the slots from its head up to the producer's tail: the producer writes a slot only after
/// the head has passed it.
pub struct Consumer<'a, T> {
    indices: &'a Indices,
    slots: &'a [Slot<T>],
    /// Ours. Ahead of the shared one only inside a burst.
    head: usize,
    /// The producer's, as last seen.
    tail: usize,
}

impl<'a, T> Consumer<'a, T> {
    /// How many values are there now.
    pub fn len(&mut self) -> usize {
        // Acquire pairs with the Release in `Producer::publish`: a value that is counted has been written.
        self.tail = self.indices.tail.load(acquire(Edge::Tail));
        self.known_len()
    }

    /// Whether nothing is there now.
    pub fn is_empty(&mut self) -> bool {
        self.len() == 0
    }

    /// Takes the oldest value out.
    #[inline]
    pub fn pop(&mut self) -> Option<T> {
        if self.ready(1) == 0 {
            return None;
        }
        let value = self.take()?;
        self.give_back();
        Some(value)
    }

    /// Takes values out, oldest first, into the start of `to`; how many that was: as many as are
    /// there and `to` holds.
    #[inline]
    pub fn pop_slice(&mut self, to: &mut [T]) -> usize
    where
        T: Copy,
    {
        let count = self.ready(to.len()).min(to.len());
        let Some((lap_start, here)) = self.slots.split_at_checked(self.slot_of_head()) else {
            return 0;
        };
        let Some((first, rest)) = to
            .get_mut(..count)
            .and_then(|to| to.split_at_mut_checked(count.min(here.len())))
        else {
            return 0;
        };
        for (slot, value) in here.iter().zip(first) {
            // SAFETY: `count` slots from the head on hold values (`ready`), and these are the first of them.
            *value = unsafe { slot.take() };
        }
        for (slot, value) in lap_start.iter().zip(rest) {
            // SAFETY: the values go on at the start of the ring; `rest` is what is left of `count`.
            *value = unsafe { slot.take() };
        }
        self.head = self.head.wrapping_add(count);
        if count != 0 {
            self.give_back();
        }
        count
    }

    /// Takes out up to `most` of the values that are there now, one by one. The producer gets all their
    /// places back when the iterator is dropped; values it did not reach stay in the ring.
    #[inline]
    pub fn drain(&mut self, most: usize) -> Drain<'_, 'a, T> {
        let left = self.ready(most).min(most);
        Drain {
            consumer: self,
            left,
        }
    }

    fn known_len(&self) -> usize {
        self.tail.wrapping_sub(self.head)
    }

    /// How many values are there; looks at the producer's line only if what is known does not suffice.
    #[inline]
    fn ready(&mut self, wanted: usize) -> usize {
        let known = self.known_len();
        if known >= wanted { known } else { self.len() }
    }

    fn slot_of_head(&self) -> usize {
        self.head & self.slots.len().wrapping_sub(1)
    }

    /// Reads the next slot without telling. The caller has made sure that it holds a value.
    #[inline]
    fn take(&mut self) -> Option<T> {
        let slot = self.slots.get(self.slot_of_head())?;
        // SAFETY: every caller has seen at least one value beyond the head, so the slot is the
        // consumer's until `give_back` passes it. The head moves on, so it is taken once.
        let value = unsafe { slot.take() };
        self.head = self.head.wrapping_add(1);
        Some(value)
    }

    #[inline]
    fn give_back(&self) {
        // Release pairs with the Acquire in `Producer::free`: the slots are emptied before they are seen free.
        self.indices.head.store(self.head, release(Edge::Head));
    }
}

// SAFETY: as for `Producer`: a consumer reaches only the slots between its head and the producer's tail.
unsafe impl<T: Send> Send for Consumer<'_, T> {}

impl<T> fmt::Debug for Consumer<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Consumer")
            .field("slots", &self.slots.len())
            .field("head", &self.head)
            .finish_non_exhaustive()
    }
}

/// Values on their way out; see [`Consumer::drain`].
#[derive(Debug)]
#[must_use = "nothing is taken out unless the iterator is run"]
pub struct Drain<'r, 'a, T> {
    consumer: &'r mut Consumer<'a, T>,
    left: usize,
}

impl<T> Iterator for Drain<'_, '_, T> {
    type Item = T;

    #[inline]
    fn next(&mut self) -> Option<T> {
        self.left = self.left.checked_sub(1)?;
        self.consumer.take()
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl<T> ExactSizeIterator for Drain<'_, '_, T> {}

impl<T> Drop for Drain<'_, '_, T> {
    // A forgotten iterator gives nothing back; the next pop does it then.
    fn drop(&mut self) {
        self.consumer.give_back();
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    extern crate std;

    use std::boxed::Box;
    use std::collections::VecDeque;
    use std::thread;
    use std::vec;
    use std::vec::Vec;

    use proptest::prelude::*;

    use super::{Indices, Slot, ring, ring_at};

    fn slots<T>(count: usize) -> Vec<Slot<T>> {
        (0..count).map(|_| Slot::new()).collect()
    }

    #[test]
    fn only_a_power_of_two_of_slots_is_a_ring() {
        for count in [0, 3, 6, 1000] {
            assert!(ring::<u8>(&mut Indices::new(), &mut slots(count)).is_none());
        }
        for count in [1, 2, 1024] {
            assert!(ring::<u8>(&mut Indices::new(), &mut slots(count)).is_some());
        }
    }

    #[test]
    fn first_in_first_out_and_full_gives_back() {
        let mut indices = Indices::new();
        let mut slots = [const { Slot::new() }; 4];
        let (mut producer, mut consumer) = ring(&mut indices, &mut slots).unwrap();
        for round in 0..10 {
            for n in 0..4 {
                producer.push(round * 4 + n).unwrap();
            }
            assert_eq!(producer.push(99), Err(99));
            assert_eq!(producer.free(), 0);
            for n in 0..4 {
                assert_eq!(consumer.pop(), Some(round * 4 + n));
            }
            assert_eq!(consumer.pop(), None);
        }
    }

    #[test]
    fn a_reservation_is_all_or_nothing_and_seen_at_once() {
        let mut indices = Indices::new();
        let mut slots = slots(4);
        let (mut producer, mut consumer) = ring(&mut indices, &mut slots).unwrap();
        producer.push(0).unwrap();
        assert!(producer.reserve(4).is_none());
        let mut places = producer.reserve(3).unwrap();
        places.push(1).unwrap();
        places.push(2).unwrap();
        assert_eq!(places.left(), 1);
        assert_eq!(consumer.len(), 1);
        drop(places);
        assert_eq!(consumer.len(), 3);
        assert_eq!(producer.free(), 1);
        let mut places = producer.reserve(1).unwrap();
        places.push(3).unwrap();
        assert_eq!(places.push(4), Err(4));
        drop(places);
        assert_eq!(consumer.drain(usize::MAX).collect::<Vec<_>>(), [0, 1, 2, 3]);
    }

    #[test]
    fn what_a_drain_does_not_reach_stays() {
        let mut indices = Indices::new();
        let mut slots = slots(8);
        let (mut producer, mut consumer) = ring(&mut indices, &mut slots).unwrap();
        // Not Copy: every box is freed once, or the allocator complains.
        assert_eq!(producer.push_iter((0..20).map(Box::new)), 8);
        assert_eq!(consumer.drain(5).take(3).map(|b| *b).sum::<i32>(), 3);
        assert_eq!(producer.free(), 3);
        assert_eq!(consumer.drain(usize::MAX).len(), 5);
        assert_eq!(consumer.drain(usize::MAX).map(|b| *b).sum::<i32>(), 25);
    }

    #[test]
    fn a_full_ring_takes_nothing_from_the_iterator() {
        let mut indices = Indices::new();
        let mut slots = slots(2);
        let (mut producer, _consumer) = ring(&mut indices, &mut slots).unwrap();
        let mut values = 0..5;
        assert_eq!(producer.push_iter(&mut values), 2);
        assert_eq!(producer.push_iter(&mut values), 0);
        assert_eq!(values.next(), Some(2));
    }

    #[derive(Clone, Debug)]
    enum Call {
        Push,
        PushSlice(usize),
        PushIter(usize),
        Reserve(usize, usize),
        Pop,
        PopSlice(usize),
        Drain(usize, usize),
        Look,
    }

    fn call() -> impl Strategy<Value = Call> {
        let n = 0..12_usize;
        prop_oneof![
            Just(Call::Push),
            n.clone().prop_map(Call::PushSlice),
            n.clone().prop_map(Call::PushIter),
            (n.clone(), n.clone()).prop_map(|(a, b)| Call::Reserve(a, b)),
            Just(Call::Pop),
            n.clone().prop_map(Call::PopSlice),
            (n.clone(), n).prop_map(|(a, b)| Call::Drain(a, b)),
            Just(Call::Look),
        ]
    }

    proptest! {
        /// Any sequence of calls does what a bounded `VecDeque` does, also where the indices wrap.
        #[test]
        fn behaves_as_a_bounded_queue(
            calls in proptest::collection::vec(call(), 1..200),
            shift in 0..4_u32,
            before_wrap in 0..64_usize,
        ) {
            let capacity = 1_usize << shift;
            let mut indices = Indices::new();
            let mut slots = slots(capacity);
            let (mut producer, mut consumer) =
                ring_at(0_usize.wrapping_sub(before_wrap), &mut indices, &mut slots).unwrap();
            let mut model = VecDeque::new();
            let mut next = 0_u64;
            let mut fresh = |n: usize| {
                let values: Vec<u64> = (next..).take(n).collect();
                next += n as u64;
                values
            };
            for call in calls {
                let free = capacity - model.len();
                match call {
                    Call::Push => {
                        let value = fresh(1)[0];
                        prop_assert_eq!(producer.push(value).is_ok(), free > 0);
                        model.extend((free > 0).then_some(value));
                    }
                    Call::PushSlice(n) => {
                        let values = fresh(n);
                        prop_assert_eq!(producer.push_slice(&values), n.min(free));
                        model.extend(&values[..n.min(free)]);
                    }
                    Call::PushIter(n) => {
                        let values = fresh(n);
                        prop_assert_eq!(producer.push_iter(values.iter().copied()), n.min(free));
                        model.extend(&values[..n.min(free)]);
                    }
                    Call::Reserve(n, used) => match producer.reserve(n) {
                        None => prop_assert!(n > free),
                        Some(mut places) => {
                            prop_assert!(n <= free);
                            for value in fresh(used) {
                                if places.push(value).is_ok() {
                                    model.push_back(value);
                                }
                            }
                            prop_assert_eq!(places.left(), n.saturating_sub(used));
                        }
                    },
                    Call::Pop => prop_assert_eq!(consumer.pop(), model.pop_front()),
                    Call::PopSlice(n) => {
                        let mut to = vec![u64::MAX; n];
                        let count = consumer.pop_slice(&mut to);
                        prop_assert_eq!(count, n.min(model.len()));
                        let expected: Vec<u64> = model.drain(..count).collect();
                        prop_assert_eq!(&to[..count], &expected[..]);
                        prop_assert!(to[count..].iter().all(|v| *v == u64::MAX));
                    }
                    Call::Drain(most, used) => {
                        let got: Vec<u64> = consumer.drain(most).take(used).collect();
                        let count = most.min(used).min(model.len());
                        let expected: Vec<u64> = model.drain(..count).collect();
                        prop_assert_eq!(got, expected);
                    }
                    Call::Look => {
                        prop_assert_eq!(producer.free(), free);
                        prop_assert_eq!(consumer.len(), model.len());
                        prop_assert_eq!(consumer.is_empty(), model.is_empty());
                    }
                }
            }
        }
    }

    /// Bursts of changing sizes from one thread to another arrive complete, in order, unmixed.
    #[test]
    fn two_threads_lose_and_reorder_nothing() {
        const COUNT: u64 = 300_000;
        let mut indices = Indices::new();
        let mut slots = slots(64);
        let (mut producer, mut consumer) =
            ring_at(usize::MAX - 1000, &mut indices, &mut slots).unwrap();
        thread::scope(|scope| {
            scope.spawn(move || {
                let mut next = 0_u64;
                while next < COUNT {
                    let burst = (1 + next % 23).min(COUNT - next);
                    let values: Vec<[u64; 3]> = (next..next + burst).map(|n| [n, !n, n]).collect();
                    let pushed = match next % 3 {
                        0 => u64::from(producer.push([next, !next, next]).is_ok()),
                        1 => producer.push_slice(&values) as u64,
                        _ => producer.push_iter(values.iter().copied()) as u64,
                    };
                    next += pushed;
                    if pushed == 0 {
                        thread::yield_now();
                    }
                }
            });
            let mut expected = 0_u64;
            let mut check = |[a, b, c]: [u64; 3]| {
                assert_eq!([a, b, c], [expected, !expected, expected]);
                expected += 1;
            };
            let mut got = 0_u64;
            let mut to = [[0; 3]; 17];
            while got < COUNT {
                let before = got;
                match got % 3 {
                    0 => got += consumer.pop().map(&mut check).map_or(0, |()| 1),
                    1 => {
                        let count = consumer.pop_slice(&mut to);
                        to[..count].iter().copied().for_each(&mut check);
                        got += count as u64;
                    }
                    _ => got += consumer.drain(29).map(&mut check).count() as u64,
                }
                if got == before {
                    thread::yield_now();
                }
            }
            assert_eq!(consumer.pop(), None);
        });
    }
}
