//! The driver's own account of its windows: what each is bound to, and which key the device has.
//!
//! Providers check little (mlx5 compiles its checks out, rxe's kernel dereferences NULL when a window that is
//! not bound is invalidated), so nothing is handed to them that this table does not know to be right.
//!
//! A state is what it will be when everything that is queued has run. What the device does not take, or gives
//! back failed, is undone: each change notes the state before it and has a serial number, and a window
//! remembers from which number on changes are void, so that the first of several failures decides.

use o2poll_dataplane::nic::{RKey, Region};
use rdma_core_sys::types::ibv_mw;

use super::objects::Window;
use super::slots;

/// What a window is bound to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Binding {
    /// Nothing.
    #[default]
    Free,
    /// Live on a queue pair, over a memory.
    Live {
        /// What all ids of the queue pair have in common ([`Token::owner`](super::decode::Token::owner)).
        owner: u64,
        /// Index of the memory.
        memory: u32,
    },
    /// An INVALIDATE is on its way, or was done less than 2^31 requests ago.
    Dying {
        /// Its id.
        token: u64,
        /// Index of the memory.
        memory: u32,
    },
}

/// What is known of a window. A line each.
#[repr(align(64))]
#[derive(Debug)]
pub(super) struct Slot {
    /// Of the window; null without one.
    pub(super) raw: *mut ibv_mw,
    pub(super) pd: usize,
    /// The last key that was queued for it; the index never changes.
    pub(super) key: RKey,
    pub(super) binding: Binding,
    /// Serial number of the last change.
    pub(super) serial: u32,
    /// Changes before this one are void.
    pub(super) floor: u32,
    /// Number of the last chain that a REGISTER of it was in.
    pub(super) chain: u64,
}

/// A change, as a work request notes it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Change {
    /// Index of the window.
    pub(super) region: u32,
    pub(super) serial: u32,
    pub(super) key_before: RKey,
    pub(super) before: Binding,
}

/// All windows of one core.
#[derive(Debug)]
pub(super) struct Windows {
    slots: Box<[Slot]>,
    /// The windows themselves, in the same places.
    held: Box<[Option<Window>]>,
    /// From the index of a key to a slot: open addressing, at most half full.
    places: Box<[u32]>,
    shift: u32,
    /// Every slot before this one is taken.
    pub(super) vacant_from: usize,
}

impl Windows {
    pub(super) fn new(most: usize) -> Self {
        let places = most.saturating_mul(2).next_power_of_two().max(4);
        Self {
            slots: core::iter::repeat_with(Slot::empty).take(most).collect(),
            held: core::iter::repeat_with(|| None).take(most).collect(),
            places: vec![NONE; places].into_boxed_slice(),
            shift: u32::BITS - places.trailing_zeros(),
            vacant_from: 0,
        }
    }

    /// Takes a window over.
    pub(super) fn adopt(&mut self, window: Window) -> Result<(Region, RKey), Window> {
        let mut slots = self.held.iter().enumerate().skip(self.vacant_from);
        let Some((at, _)) = slots.find(|(_, held)| held.is_none()) else {
            return Err(window);
        };
        let (key, raw, pd) = (window.key(), window.raw(), window.domain());
        if window.is_held() || self.find(key).is_some() {
            return Err(window);
        }
        let (Some(slot), Some(held), Ok(region)) = (
            self.slots.get_mut(at),
            self.held.get_mut(at),
            u32::try_from(at),
        ) else {
            return Err(window);
        };
        *held = Some(window);
        let serial = slot.serial.wrapping_add(1);
        *slot = Slot {
            raw,
            pd,
            key,
            binding: Binding::Free,
            serial,
            floor: serial.wrapping_add(1),
            chain: 0,
        };
        self.vacant_from = at.wrapping_add(1);
        self.place_at(region, key);
        Ok((Region(region), key))
    }

    /// Gives a window back, and what it may be bound to.
    pub(super) fn retire(&mut self, region: Region) -> Option<(Window, Binding)> {
        let slot = self.slots.get_mut(region.0 as usize)?;
        let window = self.held.get_mut(region.0 as usize)?.take()?;
        // SAFETY: it has just been held.
        unsafe { slot.settle() };
        let binding = slot.binding;
        slot.binding = Binding::Free;
        slot.raw = core::ptr::null_mut();
        // What still comes back of it is void.
        slot.serial = slot.serial.wrapping_add(1);
        slot.floor = slot.serial.wrapping_add(1);
        let key = slot.key;
        self.vacant_from = self.vacant_from.min(region.0 as usize);
        self.displace(region.0, key);
        Some((window, binding))
    }

    #[inline]
    pub(super) fn get_mut(&mut self, region: u32) -> Option<&mut Slot> {
        self.slots
            .get_mut(region as usize)
            .filter(|slot| !slot.raw.is_null())
    }

    /// All of them, and what is known of each.
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (&mut Slot, &mut Window)> {
        let held = self.held.iter_mut();
        let both = self.slots.iter_mut().zip(held);
        both.filter_map(|(slot, held)| Some((slot, held.as_mut()?)))
    }

    /// The window whose keys have the index of this one.
    #[inline]
    pub(super) fn find(&self, key: RKey) -> Option<u32> {
        let mask = self.places.len().wrapping_sub(1);
        let mut at = self.place(key);
        for _ in 0..self.places.len() {
            let region = *self.places.get(at)?;
            let slot = self.slots.get(region as usize)?;
            if slot.key.0 >> 8 == key.0 >> 8 {
                return Some(region);
            }
            at = at.wrapping_add(1) & mask;
        }
        None
    }

    /// The device has not taken it: it never was. Called for the last change first.
    pub(super) fn withdraw(&mut self, change: &Change) {
        let Some(slot) = self.get_mut(change.region) else {
            return;
        };
        if slot.serial == change.serial {
            slot.serial = slot.serial.wrapping_sub(1);
            slot.key = change.key_before;
            slot.binding = change.before;
        }
    }

    /// The device has taken it and could not do it. Called for the first change first: it decides, since
    /// nothing that was behind it has run.
    pub(super) fn undo(&mut self, change: &Change) {
        let Some(slot) = self.get_mut(change.region) else {
            return;
        };
        if change.serial.wrapping_sub(slot.floor).cast_signed() < 0 {
            return;
        }
        slot.serial = slot.serial.wrapping_add(1);
        slot.floor = slot.serial.wrapping_add(1);
        slot.key = change.key_before;
        slot.binding = change.before;
    }

    /// A message of the peer has killed this key.
    // Not inlined: its loads would be done for every poll.
    #[inline(never)]
    pub(super) fn killed(&mut self, key: RKey) {
        if let Some(region) = self.find(key)
            && let Some(slot) = self.get_mut(region)
            && slot.key == key
        {
            slot.serial = slot.serial.wrapping_add(1);
            slot.floor = slot.serial.wrapping_add(1);
            slot.binding = Binding::Free;
        }
    }

    /// Those whose INVALIDATE on this queue pair is done are free: its id says so for half the range of positions only.
    #[cold]
    pub(super) fn sweep(&mut self, pair: &slots::Slot) {
        for slot in &mut self.slots {
            if let Binding::Dying { token, .. } = slot.binding
                && pair.is_done(token)
            {
                slot.binding = Binding::Free;
            }
        }
    }

    #[inline]
    fn place(&self, key: RKey) -> usize {
        // Neighbouring indices, which is what devices hand out, land apart (Fibonacci hashing).
        ((key.0 >> 8).wrapping_mul(0x9e37_79b1) >> self.shift) as usize
    }

    /// Puts a slot behind the index of its key. Half of the places are empty.
    fn place_at(&mut self, region: u32, key: RKey) {
        let mask = self.places.len().wrapping_sub(1);
        let mut at = self.place(key);
        while self.places.get(at).is_some_and(|place| *place != NONE) {
            at = at.wrapping_add(1) & mask;
        }
        if let Some(place) = self.places.get_mut(at) {
            *place = region;
        }
    }

    /// Takes a slot out of the places. Those behind it that had to go on because of it come forward, so that a search may end
    /// at the first empty place.
    fn displace(&mut self, region: u32, key: RKey) {
        let mask = self.places.len().wrapping_sub(1);
        let mut hole = self.place(key);
        while self.places.get(hole).is_some_and(|place| *place != region) {
            if self.places.get(hole) == Some(&NONE) {
                return;
            }
            hole = hole.wrapping_add(1) & mask;
        }
        let mut at = hole;
        loop {
            at = at.wrapping_add(1) & mask;
            let other = self.places.get(at).copied().unwrap_or(NONE);
            let Some(slot) = self.slots.get(other as usize) else {
                break;
            };
            // From where its search begins; one that begins behind the hole stays.
            let from = self.place(slot.key);
            let way = at.wrapping_sub(from) & mask;
            if at.wrapping_sub(hole) & mask > way {
                continue;
            }
            if let Some(place) = self.places.get_mut(hole) {
                *place = other;
            }
            hole = at;
        }
        if let Some(place) = self.places.get_mut(hole) {
            *place = NONE;
        }
    }
}

impl Slot {
    /// Tells the library's window which key the device has by now: who registers it next starts from that one, a provider
    /// when it is posted, and who it is given back to. No chain with a REGISTER of it is open.
    ///
    /// # Safety
    /// It holds a window.
    #[inline]
    pub(super) unsafe fn settle(&mut self) {
        // SAFETY: as the caller says, so that its `ibv_mw` is alive, and no one else has it.
        unsafe { (*self.raw).rkey = self.key.0 };
    }

    /// The window goes to another binding. What it was is told by the serial number, with the key and the binding
    /// that the caller has seen.
    #[inline]
    pub(super) const fn change(&mut self, key: RKey, binding: Binding) -> u32 {
        self.serial = self.serial.wrapping_add(1);
        self.key = key;
        self.binding = binding;
        self.serial
    }

    const fn empty() -> Self {
        Self {
            raw: core::ptr::null_mut(),
            pd: 0,
            key: RKey(0),
            binding: Binding::Free,
            serial: 0,
            floor: 0,
            chain: 0,
        }
    }
}

const NONE: u32 = u32::MAX;
