//! A window with its key, and the ring of those that are free.

use crate::nic::{RKey, Region};

/// Where a window is in its life. A word, and the last of the descriptor, so that a move reads what was written as it was
/// written: a core does not forward two small stores to one larger load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
enum State {
    /// No key is alive and none is named.
    Free,
    /// A key is named, or was; the device has not heard of it.
    Named,
    /// The device accepted the registration: the key may be alive.
    Live,
    /// An invalidate of it was accepted.
    Dying,
}

/// A window that transfers borrow in turn.
#[derive(Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Descriptor {
    region: Region,
    /// The last that was named.
    key: RKey,
    state: State,
}

impl Descriptor {
    /// A window as adopted, with the key last used on it.
    #[must_use]
    pub const fn new(region: Region, key: RKey) -> Self {
        Self {
            region,
            key,
            state: State::Free,
        }
    }

    /// Which window.
    #[must_use]
    pub const fn region(&self) -> Region {
        self.region
    }

    /// The key that a registration will name, or has named.
    #[must_use]
    pub const fn key(&self) -> RKey {
        match self.state {
            State::Free => self.key.rotated(),
            State::Named | State::Live | State::Dying => self.key,
        }
    }

    /// Whether the registration still has to be put on the queue.
    #[must_use]
    pub const fn needs_register(&self) -> bool {
        matches!(self.state, State::Free | State::Named)
    }

    /// Whether the device may hold a live key.
    #[must_use]
    pub const fn may_be_alive(&self) -> bool {
        matches!(self.state, State::Live | State::Dying)
    }

    /// Whether an invalidate has to be put on the queue before the memory is free.
    #[must_use]
    pub const fn needs_invalidate(&self) -> bool {
        matches!(self.state, State::Live)
    }

    /// The transfer that holds it is going to register.
    pub const fn name(&mut self) {
        if matches!(self.state, State::Free) {
            self.key = self.key.rotated();
            self.state = State::Named;
        }
    }

    /// The registration went into the chain.
    pub const fn registered(&mut self) {
        self.name();
        if matches!(self.state, State::Named) {
            self.state = State::Live;
        }
    }

    /// The device did not take that part of the chain.
    pub const fn not_registered(&mut self) {
        if matches!(self.state, State::Live) {
            self.state = State::Named;
        }
    }

    /// The invalidate went into the chain.
    pub const fn invalidating(&mut self) {
        if matches!(self.state, State::Live) {
            self.state = State::Dying;
        }
    }

    /// The device did not take that part of the chain.
    pub const fn not_invalidating(&mut self) {
        if matches!(self.state, State::Dying) {
            self.state = State::Live;
        }
    }

    /// The key is known to be dead: the invalidate completed, or the peer's did. One that the device never had is named
    /// again.
    pub const fn dead(&mut self) {
        if self.may_be_alive() {
            self.state = State::Free;
        }
    }
}

/// Free descriptors, first in first out, over a lent slice.
#[derive(Debug)]
pub struct Free<'a> {
    places: &'a mut [Option<Descriptor>],
    head: usize,
    length: usize,
}

impl<'a> Free<'a> {
    /// An empty ring.
    pub fn new(places: &'a mut [Option<Descriptor>]) -> Self {
        for place in places.iter_mut() {
            *place = None;
        }
        Self {
            places,
            head: 0,
            length: 0,
        }
    }

    /// How many are free.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.length
    }

    /// Whether none is free.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// The one that has been free for longest.
    pub fn take(&mut self) -> Option<Descriptor> {
        if self.length == 0 {
            return None;
        }
        let descriptor = self.places.get_mut(self.head)?.take()?;
        self.head = self.next(self.head);
        self.length = self.length.wrapping_sub(1);
        Some(descriptor)
    }

    /// Puts one behind all others.
    ///
    /// # Errors
    /// The descriptor, when there is no place.
    pub fn give(&mut self, descriptor: Descriptor) -> Result<(), Descriptor> {
        if self.length >= self.places.len() {
            return Err(descriptor);
        }
        let mut at = self.head.wrapping_add(self.length);
        if at >= self.places.len() {
            at = at.wrapping_sub(self.places.len());
        }
        match self.places.get_mut(at) {
            Some(place) => {
                *place = Some(descriptor);
                self.length = self.length.wrapping_add(1);
                Ok(())
            }
            None => Err(descriptor),
        }
    }

    const fn next(&self, at: usize) -> usize {
        let next = at.wrapping_add(1);
        if next >= self.places.len() { 0 } else { next }
    }
}

#[cfg(test)]
mod tests {
    use super::{Descriptor, Free};
    use crate::nic::{RKey, Region};

    #[test]
    fn lu_16349_map_without_post_keeps_keys_in_step() {
        let mut descriptor = Descriptor::new(Region(3), RKey(0x3ff));
        descriptor.name();
        let named = descriptor.key();
        assert_eq!(named, RKey(0x300), "the tag wraps, the index stays");
        assert!(!descriptor.may_be_alive());
        descriptor.dead();
        assert_eq!(
            descriptor.key(),
            named,
            "the device never saw it: the same key is named again"
        );
        descriptor.registered();
        descriptor.not_registered();
        assert_eq!(
            (descriptor.key(), descriptor.may_be_alive()),
            (named, false)
        );
        descriptor.registered();
        assert_eq!((descriptor.key(), descriptor.may_be_alive()), (named, true));
        descriptor.registered();
        assert_eq!(
            descriptor.key(),
            named,
            "registered once per mapping (LU-14733)"
        );
        descriptor.invalidating();
        descriptor.not_invalidating();
        assert!(descriptor.needs_invalidate());
        descriptor.invalidating();
        assert!(!descriptor.needs_invalidate() && descriptor.may_be_alive());
        descriptor.dead();
        assert_eq!(descriptor.key(), RKey(0x301));
    }

    #[test]
    fn free_descriptors_come_back_first_in_first_out() {
        let mut places = [const { None }; 3];
        let mut free = Free::new(&mut places);
        for index in 0..3 {
            free.give(Descriptor::new(Region(index), RKey(index << 8)))
                .unwrap();
        }
        assert!(free.give(Descriptor::new(Region(9), RKey(0))).is_err());
        for round in 0..7_u32 {
            let descriptor = free.take().unwrap();
            assert_eq!(descriptor.region(), Region(round % 3));
            free.give(descriptor).unwrap();
        }
    }
}
