//! The lap ring: each slot is one cache line that says itself whose turn it is, like a CQE's owner bit.

use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicU32, Ordering};

use crossbeam_utils::CachePadded;

/// What travels: seven plain words.
pub type Message = [u64; 7];

/// One cache line: seven words of message and the lap it was written in.
#[repr(C, align(64))]
pub struct LapSlot {
    message: UnsafeCell<Message>,
    lap: AtomicU32,
}

static_assertions::const_assert_eq!(size_of::<LapSlot>(), 64);

impl LapSlot {
    /// An empty slot.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            message: UnsafeCell::new([0; 7]),
            lap: AtomicU32::new(0),
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
    /// Nothing consumed yet.
    #[must_use]
    pub const fn new() -> Self {
        Self(CachePadded::new(AtomicU32::new(0)))
    }
}

/// Makes a ring of `slots`; `None` unless their number is a power of two, at least 4 and at most 2^30.
pub fn ring<'a>(
    returned: &'a mut Returned,
    slots: &'a mut [LapSlot],
) -> Option<(LapProducer<'a>, LapConsumer<'a>)> {
    let shift = slots.len().trailing_zeros();
    if !slots.len().is_power_of_two() || !(2..=30).contains(&shift) {
        return None;
    }
    *returned = Returned::new();
    for slot in slots.iter_mut() {
        *slot = LapSlot::new();
    }
    let returned: &'a Returned = returned;
    let slots: &'a [LapSlot] = slots;
    Some((
        LapProducer {
            slots,
            returned,
            tail: 0,
            head: 0,
            shift,
        },
        LapConsumer {
            slots,
            returned,
            head: 0,
            told: 0,
            shift,
        },
    ))
}

/// The lap number of index `at`: never 0, the mark of a slot that was never written.
const fn lap_of(at: u32, shift: u32) -> u32 {
    (at >> shift).wrapping_add(1)
}

/// The end that sends.
pub struct LapProducer<'a> {
    slots: &'a [LapSlot],
    returned: &'a Returned,
    tail: u32,
    head: u32,
    shift: u32,
}

// SAFETY: the producer writes only slots that the consumer has given back; messages are plain words.
unsafe impl Send for LapProducer<'_> {}

impl LapProducer<'_> {
    /// How many messages fit now, as far as the consumer has told.
    #[expect(clippy::cast_possible_truncation, reason = "at most 2^30 slots")]
    pub fn room(&mut self) -> u32 {
        // Acquire pairs with the Release in `LapConsumer::pop`: a slot given back has been read.
        self.head = self.returned.0.load(Ordering::Acquire);
        (self.slots.len() as u32).wrapping_sub(self.tail.wrapping_sub(self.head))
    }

    /// Sends a message; false when there is no room.
    #[expect(clippy::cast_possible_truncation, reason = "at most 2^30 slots")]
    pub fn push(&mut self, message: &Message) -> bool {
        if self.tail.wrapping_sub(self.head) >= self.slots.len() as u32 && self.room() == 0 {
            return false;
        }
        let mask = (self.slots.len() as u32).wrapping_sub(1);
        let Some(slot) = self.slots.get((self.tail & mask) as usize) else {
            return false;
        };
        // SAFETY: the consumer gave this slot back (Acquire in `room`) and reads it only after the
        // lap below says so.
        unsafe { *slot.message.get() = *message };
        // Release pairs with the Acquire in `LapConsumer::peek`: the message is written before it is seen.
        slot.lap
            .store(lap_of(self.tail, self.shift), Ordering::Release);
        self.tail = self.tail.wrapping_add(1);
        true
    }
}

/// The end that receives.
pub struct LapConsumer<'a> {
    slots: &'a [LapSlot],
    returned: &'a Returned,
    head: u32,
    told: u32,
    shift: u32,
}

// SAFETY: the consumer reads only slots whose lap says they are written; messages are plain words.
unsafe impl Send for LapConsumer<'_> {}

impl LapConsumer<'_> {
    /// The oldest message, left in the ring.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "at most 2^30 slots")]
    pub fn peek(&self) -> Option<Message> {
        let mask = (self.slots.len() as u32).wrapping_sub(1);
        let slot = self.slots.get((self.head & mask) as usize)?;
        // Acquire pairs with the Release in `LapProducer::push`.
        if slot.lap.load(Ordering::Acquire) != lap_of(self.head, self.shift) {
            return None;
        }
        // SAFETY: the lap says the producer is done with the slot; it writes it again only after
        // this consumer has given it back in `pop`.
        Some(unsafe { *slot.message.get() })
    }

    /// Takes the oldest message out. Slots are given back a quarter of the ring at a time.
    #[expect(clippy::cast_possible_truncation, reason = "at most 2^30 slots")]
    pub fn pop(&mut self) -> Option<Message> {
        let message = self.peek()?;
        self.head = self.head.wrapping_add(1);
        if self.head.wrapping_sub(self.told) >= (self.slots.len() as u32) >> 2 {
            self.told = self.head;
            // Release pairs with the Acquire in `LapProducer::room`: slots are read before they are given back.
            self.returned.0.store(self.head, Ordering::Release);
        }
        Some(message)
    }
}

#[cfg(test)]
mod tests {
    use super::{LapSlot, Returned, ring};

    #[test]
    fn order_holds_over_many_laps() {
        let mut returned = Returned::new();
        let mut slots = [const { LapSlot::new() }; 8];
        let (mut producer, mut consumer) = ring(&mut returned, &mut slots).unwrap();
        let (mut sent, mut received) = (0_u64, 0_u64);
        while received < 1000 {
            while producer.push(&[sent; 7]) {
                sent += 1;
            }
            for _ in 0..3 {
                if let Some(message) = consumer.pop() {
                    assert_eq!(message, [received; 7]);
                    received += 1;
                }
            }
        }
    }
}
