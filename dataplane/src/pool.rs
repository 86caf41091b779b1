//! Fixed slots with generations.
//!
//! A [`Pool`] stores values in slots that somebody lent; a [`Handle`] names one by index and
//! generation, so that a completion for a value that is gone finds nothing instead of somebody
//! else's value. Each slot has one link. It threads the free list while the slot is vacant and at
//! most one [`Queue`] while it is occupied. [`pack`] and [`unpack`] put a kind and a handle into a
//! work request's 64-bit id.

use crate::nic::WrId;

/// End of a list.
const NONE: u32 = u32::MAX;

/// Most slots of a pool: an index has 24 bits in a [`WrId`].
pub const MAX_SLOTS: usize = 1 << 24;

/// Bits of a [cookie](Pool::cookie) that fit beside eight others into 32.
pub const SHORT_BITS: u32 = 24;

/// The low [`SHORT_BITS`] of a cookie.
#[must_use]
pub const fn short_of(cookie: u64) -> u32 {
    (cookie & ((1 << SHORT_BITS) - 1)) as u32
}

/// Names an occupied slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Handle {
    index: u32,
    generation: u32,
}

impl Handle {
    /// Position of the slot, for tables kept beside the pool.
    #[must_use]
    pub const fn index(self) -> usize {
        self.index as usize
    }

    /// One 64-bit word: index in the upper half, generation in the lower.
    #[must_use]
    pub const fn to_bits(self) -> u64 {
        ((self.index as u64) << 32) | self.generation as u64
    }

    /// The inverse of [`to_bits`](Self::to_bits). Any word is accepted: a handle that names nothing
    /// is found out when it is used.
    #[must_use]
    #[expect(
        clippy::cast_possible_truncation,
        reason = "the two halves of the word"
    )]
    pub const fn from_bits(bits: u64) -> Self {
        Self {
            index: (bits >> 32) as u32,
            generation: bits as u32,
        }
    }
}

/// What a work request was for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Kind {
    /// A message of a transfer. The handle names the transfer.
    Send = 1,
    /// An RDMA WRITE of a transfer.
    Write = 2,
    /// A registration of a transfer's memory.
    Register = 3,
    /// An invalidation of a transfer's key.
    Invalidate = 4,
    /// A NOOP. The handle names the connection.
    Noop = 5,
    /// A posted receive. The handle names the receive.
    Receive = 6,
    /// The last request of a failed connection: what was before it is over. The handle names the
    /// connection.
    Drain = 7,
    /// Nothing but the order: what is before it is done when it is. The handle names the transfer.
    Fence = 8,
}

/// Kind and handle in one work request id.
#[must_use]
pub const fn pack(kind: Kind, handle: Handle) -> WrId {
    WrId(((kind as u64) << 56) | handle.to_bits())
}

/// The id of the `nth` WRITE of a transfer, 0 to 15. No two that are on the send queue together may share an
/// id: a completion would be taken for that of the first of them.
#[must_use]
pub const fn pack_write(handle: Handle, nth: u16) -> WrId {
    let kind = (((nth & 15) as u64) << 4) | Kind::Write as u64;
    WrId((kind << 56) | handle.to_bits())
}

/// The inverse of [`pack`]; `None` for an id that no `pack` made.
#[inline]
#[must_use]
pub const fn unpack(id: WrId) -> Option<(Kind, Handle)> {
    // The four bits above the kind number WRITEs, and nothing else is numbered.
    let kind = match id.0 >> 56 {
        1 => Kind::Send,
        code if code & 15 == 2 => Kind::Write,
        3 => Kind::Register,
        4 => Kind::Invalidate,
        5 => Kind::Noop,
        6 => Kind::Receive,
        7 => Kind::Drain,
        8 => Kind::Fence,
        _ => return None,
    };
    Some((kind, Handle::from_bits(id.0 & 0x00ff_ffff_ffff_ffff)))
}

/// One place for a value.
#[derive(Debug)]
pub struct Slot<T> {
    generation: u32,
    next: u32,
    value: Option<T>,
}

impl<T> Slot<T> {
    /// A vacant slot.
    #[must_use]
    pub const fn vacant() -> Self {
        Self {
            generation: 0,
            next: NONE,
            value: None,
        }
    }
}

impl<T> Default for Slot<T> {
    fn default() -> Self {
        Self::vacant()
    }
}

/// Makes the [cookies](Pool::cookie) of a pool.
#[derive(Clone, Copy, Debug)]
pub struct Cookies {
    /// Bits of an index.
    shift: u32,
}

impl Cookies {
    /// [`Pool::cookie`].
    #[inline]
    #[must_use]
    pub const fn of(self, handle: Handle) -> u64 {
        (handle.generation as u64).wrapping_shl(self.shift) | handle.index as u64
    }
}

/// Values in lent slots.
#[derive(Debug)]
pub struct Pool<'a, T> {
    slots: &'a mut [Slot<T>],
    free: u32,
    occupied: usize,
    /// Bits of an index.
    shift: u32,
}

impl<'a, T> Pool<'a, T> {
    /// A pool over `slots`, all vacant afterwards. Slots beyond [`MAX_SLOTS`] are not used.
    #[expect(clippy::cast_possible_truncation, reason = "bounded by MAX_SLOTS")]
    pub fn new(slots: &'a mut [Slot<T>]) -> Self {
        let mut next = NONE;
        for (index, slot) in slots.iter_mut().enumerate().take(MAX_SLOTS).rev() {
            slot.value = None;
            slot.next = next;
            next = index as u32;
        }
        let mut pool = Self {
            slots,
            free: next,
            occupied: 0,
            shift: 0,
        };
        let most = pool.capacity().saturating_sub(1) as u32;
        pool.shift = u32::BITS.wrapping_sub(most.leading_zeros());
        pool
    }

    /// The handle as a peer is told it, to echo: the index in as many of the low bits as this pool needs, the
    /// generation above. So the low [`SHORT_BITS`] name a slot, and as much of its generation as there is room for.
    #[inline]
    #[must_use]
    pub const fn cookie(&self, handle: Handle) -> u64 {
        self.cookies().of(handle)
    }

    /// What makes [cookies](Self::cookie) of this pool's handles.
    #[inline]
    #[must_use]
    pub const fn cookies(&self) -> Cookies {
        Cookies { shift: self.shift }
    }

    /// The inverse of [`cookie`](Self::cookie). Any word is accepted: a handle that names nothing is found out when
    /// it is used.
    #[inline]
    #[must_use]
    #[expect(
        clippy::cast_possible_truncation,
        reason = "an index has at most 24 bits"
    )]
    pub fn by_cookie(&self, cookie: u64) -> Option<Handle> {
        let mask = 1_u64.wrapping_shl(self.shift).wrapping_sub(1);
        Some(Handle {
            index: (cookie & mask) as u32,
            generation: u32::try_from(cookie.wrapping_shr(self.shift)).ok()?,
        })
    }

    /// The value that is here now and whose cookie has these low [`SHORT_BITS`].
    #[must_use]
    pub fn by_short(&self, short: u32) -> Option<Handle> {
        let index = self.by_cookie(u64::from(short))?.index();
        let handle = self.at(index)?;
        (short_of(self.cookie(handle)) == short).then_some(handle)
    }

    /// How many slots hold a value.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.occupied
    }

    /// Whether no slot holds a value.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.occupied == 0
    }

    /// How many slots there are.
    #[must_use]
    pub const fn capacity(&self) -> usize {
        if self.slots.len() < MAX_SLOTS {
            self.slots.len()
        } else {
            MAX_SLOTS
        }
    }

    /// How many slots are vacant.
    #[must_use]
    pub const fn vacant(&self) -> usize {
        self.capacity().saturating_sub(self.occupied)
    }

    /// Puts a value into a vacant slot.
    ///
    /// # Errors
    /// The value, when no slot is vacant.
    #[inline]
    pub fn insert(&mut self, value: T) -> Result<Handle, T> {
        let index = self.free;
        let Some(slot) = self.slots.get_mut(index as usize) else {
            return Err(value);
        };
        self.free = slot.next;
        slot.next = NONE;
        slot.value = Some(value);
        self.occupied = self.occupied.wrapping_add(1);
        Ok(Handle {
            index,
            generation: slot.generation,
        })
    }

    /// The value, if the handle's generation is the slot's.
    #[inline]
    #[must_use]
    pub fn get(&self, handle: Handle) -> Option<&T> {
        let slot = self.slots.get(handle.index())?;
        if slot.generation == handle.generation {
            slot.value.as_ref()
        } else {
            None
        }
    }

    /// The value, to change.
    #[inline]
    pub fn get_mut(&mut self, handle: Handle) -> Option<&mut T> {
        self.slot(handle)?.value.as_mut()
    }

    /// Takes the value out. The handle, and every copy of it, names nothing from now on.
    ///
    /// The value must not be linked in a [`Queue`]: [`unlink`](Self::unlink) it first.
    pub fn remove(&mut self, handle: Handle) -> Option<T> {
        let free = self.free;
        let slot = self.slot(handle)?;
        let value = slot.value.take()?;
        slot.generation = slot.generation.wrapping_add(1);
        slot.next = free;
        self.free = handle.index;
        self.occupied = self.occupied.wrapping_sub(1);
        Some(value)
    }

    /// As [`remove`](Self::remove), of what needs not be moved out; whether it was there.
    #[inline]
    pub fn discard(&mut self, handle: Handle) -> bool {
        self.discard_with(handle, |_| ()).is_some()
    }

    /// As [`discard`](Self::discard), after `take` has made of the value what is still wanted of it.
    #[inline]
    pub fn discard_with<R>(&mut self, handle: Handle, take: impl FnOnce(&mut T) -> R) -> Option<R> {
        let free = self.free;
        let slot = self.slots.get_mut(handle.index())?;
        if slot.generation != handle.generation {
            return None;
        }
        let taken = take(slot.value.as_mut()?);
        slot.value = None;
        slot.generation = slot.generation.wrapping_add(1);
        slot.next = free;
        self.free = handle.index;
        self.occupied = self.occupied.wrapping_sub(1);
        Some(taken)
    }

    /// The handle of the value in slot `index`, if there is one.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "bounded by MAX_SLOTS")]
    pub fn at(&self, index: usize) -> Option<Handle> {
        let slot = self.slots.get(index)?;
        slot.value.as_ref()?;
        (index < MAX_SLOTS).then_some(Handle {
            index: index as u32,
            generation: slot.generation,
        })
    }

    /// Appends to a queue. False, and nothing done, for a handle that names nothing.
    ///
    /// A value is in at most one queue at a time; the caller sees to that.
    #[inline]
    pub fn push_back(&mut self, queue: &mut Queue, handle: Handle) -> bool {
        let Some(slot) = self.slot(handle) else {
            return false;
        };
        slot.next = NONE;
        if let Some(tail) = self.slots.get_mut(queue.tail as usize)
            && queue.length != 0
        {
            tail.next = handle.index;
        } else {
            queue.head = handle.index;
        }
        queue.tail = handle.index;
        queue.length = queue.length.wrapping_add(1);
        true
    }

    /// Puts back at the front of a queue what could not be served.
    pub fn push_front(&mut self, queue: &mut Queue, handle: Handle) -> bool {
        let head = if queue.length == 0 { NONE } else { queue.head };
        let Some(slot) = self.slot(handle) else {
            return false;
        };
        slot.next = head;
        if queue.length == 0 {
            queue.tail = handle.index;
        }
        queue.head = handle.index;
        queue.length = queue.length.wrapping_add(1);
        true
    }

    /// Takes the oldest out of a queue.
    #[inline]
    pub fn pop_front(&mut self, queue: &mut Queue) -> Option<Handle> {
        let (handle, _) = self.take_front(queue)?;
        Some(handle)
    }

    /// As [`pop_front`](Self::pop_front), with its value, to change.
    #[inline]
    pub fn take_front(&mut self, queue: &mut Queue) -> Option<(Handle, &mut T)> {
        let length = queue.length.checked_sub(1)?;
        let index = queue.head;
        let slot = self.slots.get_mut(index as usize)?;
        let value = slot.value.as_mut()?;
        // Of an empty queue nobody looks at the ends.
        queue.head = slot.next;
        queue.length = length;
        slot.next = NONE;
        let handle = Handle {
            index,
            generation: slot.generation,
        };
        Some((handle, value))
    }

    /// The value of the oldest.
    #[inline]
    #[must_use]
    pub fn first(&self, queue: &Queue) -> Option<&T> {
        if queue.length == 0 {
            return None;
        }
        self.slots.get(queue.head as usize)?.value.as_ref()
    }

    /// All of a queue, the oldest first.
    #[inline]
    pub fn iter(&self, queue: &Queue) -> impl Iterator<Item = (Handle, &T)> {
        let (mut index, mut left) = (queue.head, queue.length);
        core::iter::from_fn(move || {
            left = left.checked_sub(1)?;
            let slot = self.slots.get(index as usize)?;
            let handle = Handle {
                index,
                generation: slot.generation,
            };
            index = slot.next;
            Some((handle, slot.value.as_ref()?))
        })
    }

    /// Takes one value out of the middle of a queue; true if it was in there. Walks the queue.
    pub fn unlink(&mut self, queue: &mut Queue, handle: Handle) -> bool {
        let mut rest = core::mem::take(queue);
        let mut found = false;
        while let Some(member) = self.pop_front(&mut rest) {
            if member == handle {
                found = true;
            } else {
                self.push_back(queue, member);
            }
        }
        found
    }

    #[inline]
    fn slot(&mut self, handle: Handle) -> Option<&mut Slot<T>> {
        let slot = self.slots.get_mut(handle.index())?;
        (slot.generation == handle.generation && slot.value.is_some()).then_some(slot)
    }
}

/// First-in first-out order over values of one pool. A value is in at most one queue.
#[derive(Debug)]
pub struct Queue {
    head: u32,
    tail: u32,
    length: u32,
}

impl Queue {
    /// An empty queue.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            head: NONE,
            tail: NONE,
            length: 0,
        }
    }

    /// How many are waiting.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.length as usize
    }

    /// Whether nobody waits.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.length == 0
    }
}

impl Default for Queue {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::{Handle, Kind, Pool, Queue, Slot, pack, pack_write, short_of, unpack};
    use crate::nic::WrId;

    #[test]
    fn a_stale_handle_finds_nothing() {
        let mut slots = [const { Slot::vacant() }; 2];
        let mut pool = Pool::new(&mut slots);
        let first = pool.insert('a').unwrap();
        assert_eq!(pool.remove(first), Some('a'));
        let second = pool.insert('b').unwrap();
        assert_eq!(first.index(), second.index());
        assert_eq!(pool.get(first), None);
        assert_eq!(pool.remove(first), None);
        assert_eq!(pool.get(second), Some(&'b'));
    }

    #[test]
    fn a_full_pool_returns_the_value_and_is_whole_afterwards() {
        let mut slots = [const { Slot::vacant() }; 3];
        let mut pool = Pool::new(&mut slots);
        let handles = [1, 2, 3].map(|n| pool.insert(n).unwrap());
        assert_eq!(pool.insert(4), Err(4));
        for handle in handles {
            pool.remove(handle).unwrap();
        }
        assert_eq!(pool.vacant(), 3);
        assert!(pool.is_empty());
    }

    #[test]
    fn queues_keep_order_and_take_back_at_the_front() {
        let mut slots = [const { Slot::vacant() }; 4];
        let mut pool = Pool::new(&mut slots);
        let mut queue = Queue::new();
        let [a, b, c] = [1, 2, 3].map(|n| pool.insert(n).unwrap());
        for handle in [a, b, c] {
            assert!(pool.push_back(&mut queue, handle));
        }
        assert_eq!(pool.pop_front(&mut queue), Some(a));
        assert!(pool.push_front(&mut queue, a));
        assert!(pool.unlink(&mut queue, b));
        assert!(!pool.unlink(&mut queue, b));
        assert_eq!(pool.pop_front(&mut queue), Some(a));
        assert_eq!(pool.pop_front(&mut queue), Some(c));
        assert_eq!(pool.pop_front(&mut queue), None);
        assert!(pool.push_front(&mut queue, b));
        assert_eq!(pool.first(&queue), Some(&2));
        assert!(queue.len() == 1 && !queue.is_empty());
    }

    #[test]
    fn ids_round_trip_and_junk_is_told_apart() {
        let handle = Handle::from_bits((0x00ff_ffff << 32) | 0xdead_beef);
        for kind in [
            Kind::Send,
            Kind::Write,
            Kind::Register,
            Kind::Invalidate,
            Kind::Noop,
            Kind::Receive,
            Kind::Drain,
            Kind::Fence,
        ] {
            assert_eq!(unpack(pack(kind, handle)), Some((kind, handle)));
        }
        for nth in 0..16 {
            let id = pack_write(handle, nth);
            assert_eq!(unpack(id), Some((Kind::Write, handle)));
            assert!((0..nth).all(|other| pack_write(handle, other) != id));
        }
        assert_eq!(unpack(WrId(0x0100_0000_0000_0000 << 4)), None);
        for kind in [0x11, 0x16, 0xf8] {
            assert_eq!(unpack(WrId((kind << 56) | 1)), None);
        }
        assert_eq!(unpack(WrId(0)), None);
        assert_eq!(unpack(WrId(u64::MAX)), None);
    }

    #[test]
    fn a_cookie_comes_back_and_its_low_bits_name_the_slot_and_what_fits_of_its_generation() {
        for (slots, bits) in [(1, 24), (2, 23), (3, 22), (91, 17), (70_000, 7)] {
            let mut places: std::vec::Vec<Slot<u8>> =
                core::iter::repeat_with(Slot::vacant).take(slots).collect();
            let mut pool = Pool::new(&mut places);
            let mut handles = std::vec::Vec::new();
            while let Ok(handle) = pool.insert(0) {
                handles.push(handle);
            }
            for handle in handles.iter().copied().rev().take(200) {
                let cookie = pool.cookie(handle);
                assert_eq!(pool.by_cookie(cookie), Some(handle));
                assert_eq!(pool.by_short(short_of(cookie)), Some(handle));
                // The next in the slot has another name, until its generation has gone round.
                pool.remove(handle);
                assert_eq!(pool.by_short(short_of(cookie)), None);
                let next = pool.insert(0).unwrap();
                assert_eq!(next.index(), handle.index());
                assert_eq!(pool.by_short(short_of(cookie)), None);
                assert_eq!(pool.by_short(short_of(pool.cookie(next))), Some(next));
            }
            let round = Handle {
                index: 0,
                generation: 1 << bits,
            };
            assert_eq!(short_of(pool.cookie(round)), 0, "{slots}");
            for word in [u64::MAX, 1 << 60, 77 << 40] {
                let found = pool.by_cookie(word).and_then(|handle| pool.get(handle));
                assert_eq!(found, None);
            }
        }
    }
}
