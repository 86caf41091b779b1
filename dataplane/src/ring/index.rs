//! The index ring: free-running indices, a power of two of slots, a cached copy of the other side's index.

use core::cell::UnsafeCell;
use core::mem::MaybeUninit;
use core::sync::atomic::{AtomicUsize, Ordering};

use crossbeam_utils::CachePadded;

/// Room for one value.
pub struct Slot<T>(UnsafeCell<MaybeUninit<T>>);

impl<T> Slot<T> {
    /// An empty slot.
    #[must_use]
    pub const fn new() -> Self {
        Self(UnsafeCell::new(MaybeUninit::uninit()))
    }
}

impl<T> Default for Slot<T> {
    fn default() -> Self {
        Self::new()
    }
}

/// The two indices of one ring, each in its own cache line. They run freely and wrap; the
/// distance between them is right modulo 2^64.
#[derive(Debug, Default)]
pub struct Indices {
    tail: CachePadded<AtomicUsize>,
    head: CachePadded<AtomicUsize>,
}

impl Indices {
    /// Indices of an empty ring.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            tail: CachePadded::new(AtomicUsize::new(0)),
            head: CachePadded::new(AtomicUsize::new(0)),
        }
    }
}

/// Makes a ring of `slots`; `None` unless their number is a power of two.
pub fn ring<'a, T>(
    indices: &'a mut Indices,
    slots: &'a mut [Slot<T>],
) -> Option<(Producer<'a, T>, Consumer<'a, T>)> {
    if !slots.len().is_power_of_two() {
        return None;
    }
    *indices = Indices::new();
    let indices: &'a Indices = indices;
    let slots: &'a [Slot<T>] = slots;
    Some((
        Producer {
            indices,
            slots,
            tail: 0,
            head: 0,
        },
        Consumer {
            indices,
            slots,
            head: 0,
            tail: 0,
        },
    ))
}

/// The end that puts values in.
pub struct Producer<'a, T> {
    indices: &'a Indices,
    slots: &'a [Slot<T>],
    tail: usize,
    head: usize,
}

// SAFETY: a producer owns the slots between its tail and the consumer's head, and values go through
// them to the other thread, which `T: Send` allows.
unsafe impl<T: Send> Send for Producer<'_, T> {}

impl<T> Producer<'_, T> {
    /// How many values fit now. Never less than it said before, minus what was pushed since.
    pub fn free(&mut self) -> usize {
        // Acquire pairs with the Release in `Consumer::pop`: a slot seen free has been emptied.
        self.head = self.indices.head.load(Ordering::Acquire);
        self.slots
            .len()
            .wrapping_sub(self.tail.wrapping_sub(self.head))
    }

    /// Puts a value in.
    ///
    /// # Errors
    /// The value, when the ring is full.
    pub fn push(&mut self, value: T) -> Result<(), T> {
        if self.tail.wrapping_sub(self.head) >= self.slots.len() && self.free() == 0 {
            return Err(value);
        }
        let Some(slot) = self.slots.get(self.tail & self.slots.len().wrapping_sub(1)) else {
            return Err(value);
        };
        // SAFETY: the slot lies in [tail, head + len): the consumer does not touch it before the
        // Release below publishes it.
        unsafe { (*slot.0.get()).write(value) };
        self.tail = self.tail.wrapping_add(1);
        // Release pairs with the Acquire in `Consumer::len`: the value is written before it is seen.
        self.indices.tail.store(self.tail, Ordering::Release);
        Ok(())
    }
}

/// The end that takes values out.
pub struct Consumer<'a, T> {
    indices: &'a Indices,
    slots: &'a [Slot<T>],
    head: usize,
    tail: usize,
}

// SAFETY: as for `Producer`: the consumer owns the slots between its head and the producer's tail.
unsafe impl<T: Send> Send for Consumer<'_, T> {}

impl<T> Consumer<'_, T> {
    /// How many values are there now.
    pub fn len(&mut self) -> usize {
        // Acquire pairs with the Release in `Producer::push`.
        self.tail = self.indices.tail.load(Ordering::Acquire);
        self.tail.wrapping_sub(self.head)
    }

    /// Whether nothing is there now.
    pub fn is_empty(&mut self) -> bool {
        self.len() == 0
    }

    /// Takes the oldest value out.
    pub fn pop(&mut self) -> Option<T> {
        if self.head == self.tail && self.len() == 0 {
            return None;
        }
        let slot = self
            .slots
            .get(self.head & self.slots.len().wrapping_sub(1))?;
        // SAFETY: the slot lies in [head, tail): the producer wrote it and published it, and writes
        // it again only after the Release below.
        let value = unsafe { (*slot.0.get()).assume_init_read() };
        self.head = self.head.wrapping_add(1);
        // Release pairs with the Acquire in `Producer::free`.
        self.indices.head.store(self.head, Ordering::Release);
        Some(value)
    }
}

#[cfg(test)]
mod tests {
    use super::{Indices, Slot, ring};

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
}
