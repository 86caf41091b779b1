//! The pool of mappings: keys that the control side puts over memory, for devices that register nothing on a queue.
//!
//! It is what the FMR pools of the kernel were (`ib_fmr_pool`, and `fmr_pool_size`, `fmr_flush_trigger`, `fmr_cache` of
//! ko2iblnd). A mapping is made once for a list of ranges and its owner, and found again while both are the same. It is
//! live from the control side's answer on. A transfer uses it and gives it back; the mapping stays live. When
//! `flush_trigger` unused ones stand, they all go to the control side in one batch, which is the only way that such a
//! key dies. So a peer keeps access to what it was told of until then: that is the price, and it is counted.

use crate::memory::MAX_FRAGMENTS;
use crate::nic::{RKey, Region, Sge};
use crate::pool::{Handle, Pool, Queue, Slot};

/// Whose memory a mapping lies over. Memory that changes hands is mapped anew, so that who was told the old key
/// does not reach it by the one of its new owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// A page list of an application, which has been changed so many times.
    List {
        /// Where the list is kept.
        at: u64,
        /// [`PageList::generation`](crate::memory::PageList::generation).
        generation: u32,
    },
    /// An attached entry; its handle has a generation.
    Entry(Handle),
    /// The staging buffers of the core.
    Stage,
}

/// A transfer's use of a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lease {
    /// Which.
    pub mapping: Handle,
    /// Its key, once it is live.
    pub key: Option<RKey>,
}

/// What came of [`Mappings::claim`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    /// One that is there, or that somebody has asked for already.
    Found(Handle),
    /// A new one: the control side is to be asked for it.
    New(Handle),
    /// None now. Ask again when [`Mappings::epoch`] has moved.
    Short,
}

/// How a mapping stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// The control side has been asked for it.
    Asked,
    /// Its key is live.
    Live(RKey),
    /// The control side could not make it.
    Refused,
}

/// The next of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Goes to the control side.
    Unmap(Region),
    /// Is used again, and stays.
    Skip,
    /// The batch is whole.
    End,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Asked,
    Live {
        region: Region,
        key: RKey,
    },
    Refused,
    /// With the control side, to be unmapped.
    Dying,
}

/// One mapping.
#[derive(Debug)]
pub struct Mapping {
    owner: Owner,
    pieces: heapless::Vec<Sge, MAX_FRAGMENTS>,
    state: State,
    /// Transfers that use it, or wait for it.
    users: u32,
    /// Whose share it counts against while it is used.
    own: bool,
    /// It may be found.
    cached: bool,
    /// A peer has been told its key.
    told: bool,
    /// It is in the queue of the unused, whether it is or not: those at the front are looked at again.
    listed: bool,
}

/// Mappings with one hash value: as many as a lookup looks at.
#[derive(Clone, Copy, Debug, Default)]
pub struct Ways([Option<Handle>; 4]);

/// Where a batch is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Batch {
    None,
    /// So many of the unused are still to be looked at, and so many have gone.
    Filling {
        left: usize,
        gone: usize,
    },
    /// The control side has all of it.
    Sent,
    /// Every key of it is dead; its places are still to be freed.
    Ended,
}

/// The mappings of a core, over lent slices.
#[derive(Debug)]
pub struct Mappings<'a> {
    slots: Pool<'a, Mapping>,
    sets: &'a mut [Ways],
    mask: usize,
    /// Live ones that nobody uses, the one that was first so at the front, and some that are used again.
    unused: Queue,
    dying: Queue,
    batch: Batch,
    trigger: usize,
    caches: bool,
    /// A transfer found no place, while unused ones hold some.
    short: bool,
    epoch: u32,
    /// In use, by our transfers and by peers'.
    own: usize,
    peers: usize,
    live: usize,
    dirty: usize,
    exposed: usize,
}

impl<'a> Mappings<'a> {
    /// An empty pool: unused mappings are unmapped when `trigger` of them stand, and found again only where it `caches`.
    pub fn new(
        slots: &'a mut [Slot<Mapping>],
        sets: &'a mut [Ways],
        trigger: usize,
        caches: bool,
    ) -> Self {
        // The largest power of two of them.
        let sets_used = 1_usize
            .checked_shl(usize::BITS.wrapping_sub(sets.len().leading_zeros()))
            .map_or(0, |above| above >> 1);
        for set in sets.iter_mut() {
            *set = Ways::default();
        }
        Self {
            sets,
            mask: sets_used.saturating_sub(1),
            unused: Queue::new(),
            dying: Queue::new(),
            batch: Batch::None,
            // More than there are could never stand.
            trigger: trigger.min(slots.len()).max(1),
            caches,
            short: false,
            epoch: 0,
            own: 0,
            peers: 0,
            live: 0,
            dirty: 0,
            exposed: 0,
            slots: Pool::new(slots),
        }
    }

    /// How many there may be.
    #[must_use]
    pub const fn total(&self) -> usize {
        self.slots.capacity()
    }

    /// How many there are, those asked for and those being unmapped included.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.slots.len()
    }

    /// Whether there are none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// How many of them a transfer uses or waits for.
    #[must_use]
    pub const fn used(&self) -> usize {
        self.own.saturating_add(self.peers)
    }

    /// Mappings whose keys are live.
    #[must_use]
    pub const fn live(&self) -> usize {
        self.live
    }

    /// Live ones that no transfer uses and whose keys peers have been told.
    #[must_use]
    pub const fn exposed(&self) -> usize {
        self.exposed
    }

    /// Moves on whenever a claim that came to nothing may come to something.
    #[must_use]
    pub const fn epoch(&self) -> u32 {
        self.epoch
    }

    /// A mapping over these pieces (those that touch are one) for a transfer of ours (`own`), or of a peer. A new one
    /// only where `may_ask`. Looks at no more than four.
    pub fn claim(&mut self, owner: Owner, pieces: &[Sge], own: bool, may_ask: bool) -> Claim {
        let hash = hash(owner, pieces);
        if let Some(found) = self.find(hash, owner, pieces) {
            return if self.join(found, own) {
                Claim::Found(found)
            } else {
                Claim::Short
            };
        }
        if !self.has(own) {
            return Claim::Short;
        }
        if self.slots.vacant() == 0 {
            self.short = true;
            return Claim::Short;
        }
        let Some(pieces) = may_ask
            .then(|| heapless::Vec::from_slice(pieces).ok())
            .flatten()
        else {
            return Claim::Short;
        };
        let mapping = Mapping {
            owner,
            pieces,
            state: State::Asked,
            users: 1,
            own,
            cached: self.caches,
            told: false,
            listed: false,
        };
        let Ok(handle) = self.slots.insert(mapping) else {
            return Claim::Short;
        };
        self.count(own);
        if self.caches {
            self.index(hash, handle);
        }
        Claim::New(handle)
    }

    /// How one stands that a transfer uses; `None` for a handle that names none.
    #[must_use]
    pub fn standing(&self, mapping: Handle) -> Option<Standing> {
        match self.slots.get(mapping)?.state {
            State::Asked => Some(Standing::Asked),
            State::Live { key, .. } => Some(Standing::Live(key)),
            State::Refused | State::Dying => Some(Standing::Refused),
        }
    }

    /// Whether the control side's answer is still waited for.
    #[must_use]
    pub fn is_asked(&self, mapping: Handle) -> bool {
        self.standing(mapping) == Some(Standing::Asked)
    }

    /// The control side has made it. Whoever asked may be gone: then it is there for the next.
    pub fn made(&mut self, mapping: Handle, region: Region, key: RKey) {
        if !self.is_asked(mapping) {
            return;
        }
        if let Some(state) = self.slots.get_mut(mapping) {
            state.state = State::Live { region, key };
            self.live = self.live.saturating_add(1);
            if state.users == 0 {
                self.idle(mapping);
            }
        }
        self.moved();
    }

    /// The control side has not made it.
    pub fn refused(&mut self, mapping: Handle) {
        if !self.is_asked(mapping) {
            return;
        }
        if let Some(state) = self.slots.get_mut(mapping) {
            state.state = State::Refused;
            state.cached = false;
            if state.users == 0 {
                self.slots.discard(mapping);
            }
        }
        self.moved();
    }

    /// A peer is told its key.
    pub fn tell(&mut self, mapping: Handle) {
        if let Some(state) = self.slots.get_mut(mapping) {
            state.told = true;
        }
    }

    /// A transfer is done with it. `again`: nothing can come by its key that belongs to this transfer, so that another
    /// may have it.
    pub fn release(&mut self, mapping: Handle, again: bool) {
        let Some(state) = self.slots.get_mut(mapping) else {
            return;
        };
        // A key that nobody was told is as good as new.
        if !again && state.told {
            state.cached = false;
        }
        state.users = state.users.saturating_sub(1);
        if state.users == 0 {
            let (own, stands) = (state.own, state.state);
            let used = if own { &mut self.own } else { &mut self.peers };
            *used = used.saturating_sub(1);
            match stands {
                State::Live { .. } => self.idle(mapping),
                State::Refused => {
                    self.slots.discard(mapping);
                }
                State::Asked | State::Dying => {}
            }
        }
        self.moved();
    }

    /// Begins a batch if it is time: the trigger is reached, somebody waits for a place, or it is the `end`.
    pub const fn begin(&mut self, end: bool) -> bool {
        let due = self.dirty >= self.trigger || self.short || end;
        if !matches!(self.batch, Batch::None) || self.dirty == 0 || !due {
            return false;
        }
        self.short = false;
        self.batch = Batch::Filling {
            left: self.unused.len(),
            gone: 0,
        };
        true
    }

    /// Whether a batch is being filled.
    #[must_use]
    pub const fn is_filling(&self) -> bool {
        matches!(self.batch, Batch::Filling { .. })
    }

    /// Whether the control side has a batch that it has not answered for.
    #[must_use]
    pub const fn is_flushed(&self) -> bool {
        matches!(self.batch, Batch::Sent)
    }

    /// The next of the batch that is being filled.
    pub fn next_unused(&mut self) -> Next {
        let Batch::Filling { left, gone } = self.batch else {
            return Next::End;
        };
        let Some(left) = left.checked_sub(1) else {
            self.batch = if gone == 0 { Batch::None } else { Batch::Sent };
            return Next::End;
        };
        let mut gone = gone;
        let mut next = Next::Skip;
        if let Some(mapping) = self.slots.pop_front(&mut self.unused)
            && let Some(state) = self.slots.get_mut(mapping)
        {
            state.listed = false;
            if state.users == 0
                && let State::Live { region, .. } = state.state
            {
                state.state = State::Dying;
                state.cached = false;
                self.dirty = self.dirty.saturating_sub(1);
                self.slots.push_back(&mut self.dying, mapping);
                gone = gone.saturating_add(1);
                next = Next::Unmap(region);
            }
        }
        self.batch = Batch::Filling { left, gone };
        next
    }

    /// The control side has ended every mapping of the batch.
    pub const fn unmapped(&mut self) {
        if matches!(self.batch, Batch::Sent) {
            self.batch = Batch::Ended;
        }
    }

    /// Frees the places of an ended batch, `most` of them at a time; how many.
    pub fn free(&mut self, most: u32) -> u32 {
        if self.batch != Batch::Ended {
            return 0;
        }
        let mut freed = 0_u32;
        while freed < most
            && let Some(mapping) = self.slots.pop_front(&mut self.dying)
        {
            freed = freed.wrapping_add(1);
            self.live = self.live.saturating_sub(1);
            if self.slots.get(mapping).is_some_and(|state| state.told) {
                self.exposed = self.exposed.saturating_sub(1);
            }
            self.slots.discard(mapping);
        }
        if self.dying.is_empty() {
            self.batch = Batch::None;
            // Whoever was short looks again, and says so again.
            self.short = false;
        }
        self.moved();
        freed
    }

    /// Whether one more may be used.
    const fn has(&self, own: bool) -> bool {
        let half = self.total().wrapping_shr(1);
        let (used, share) = if own {
            (self.own, self.total().wrapping_sub(half))
        } else {
            (self.peers, half)
        };
        // A single one has no half to keep free.
        used < share || (share == 0 && self.used() < self.total())
    }

    const fn count(&mut self, own: bool) {
        let used = if own { &mut self.own } else { &mut self.peers };
        *used = used.saturating_add(1);
    }

    const fn moved(&mut self) {
        self.epoch = self.epoch.wrapping_add(1);
    }

    fn find(&self, hash: u64, owner: Owner, pieces: &[Sge]) -> Option<Handle> {
        let ways = self.sets.get(self.set_of(hash))?;
        ways.0.iter().flatten().copied().find(|handle| {
            self.slots.get(*handle).is_some_and(|state| {
                state.cached && state.owner == owner && are_same(&state.pieces, pieces)
            })
        })
    }

    /// One more user; false where it is unused and the share is used up.
    fn join(&mut self, mapping: Handle, own: bool) -> bool {
        let has = self.has(own);
        let Some(state) = self.slots.get_mut(mapping) else {
            return false;
        };
        if state.users == 0 {
            if !has {
                return false;
            }
            state.own = own;
            if matches!(state.state, State::Live { .. }) {
                self.dirty = self.dirty.saturating_sub(1);
                if state.told {
                    self.exposed = self.exposed.saturating_sub(1);
                }
            }
        }
        state.users = state.users.saturating_add(1);
        if state.users == 1 {
            self.count(own);
        }
        true
    }

    /// A live one that nobody uses (any more).
    fn idle(&mut self, mapping: Handle) {
        let Some(state) = self.slots.get_mut(mapping) else {
            return;
        };
        self.dirty = self.dirty.saturating_add(1);
        if state.told {
            self.exposed = self.exposed.saturating_add(1);
        }
        if !state.listed {
            state.listed = true;
            self.slots.push_back(&mut self.unused, mapping);
        }
    }

    /// Makes it found. The set's oldest is forgotten where there is no way free, and then dies unused.
    fn index(&mut self, hash: u64, handle: Handle) {
        let at = self.set_of(hash);
        let Some(Ways(ways)) = self.sets.get_mut(at) else {
            return;
        };
        let slots = &self.slots;
        let free = ways.iter_mut().find(|way| {
            way.and_then(|other| slots.get(other))
                .is_none_or(|state| !state.cached)
        });
        if let Some(free) = free {
            *free = Some(handle);
            return;
        }
        let [oldest, second, third, fourth] = *ways;
        *ways = [second, third, fourth, Some(handle)];
        if let Some(oldest) = oldest.and_then(|oldest| self.slots.get_mut(oldest)) {
            oldest.cached = false;
        }
    }

    const fn set_of(&self, hash: u64) -> usize {
        (hash >> 24) as usize & self.mask
    }
}

/// Of the owner, the number of pieces and both ends: two parts of one list differ there, and the comparison looks at
/// the rest. A peer may choose offsets that fall together: that costs it hits.
fn hash(owner: Owner, pieces: &[Sge]) -> u64 {
    const fn mix(hash: u64, word: u64) -> u64 {
        // The multiplier of splitmix64.
        let hash = (hash ^ word).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        hash ^ (hash >> 31)
    }
    let mut hash = match owner {
        Owner::List { at, generation } => mix(mix(1, at), u64::from(generation)),
        Owner::Entry(handle) => mix(2, handle.to_bits()),
        Owner::Stage => 3,
    };
    for piece in [pieces.first(), pieces.last()].into_iter().flatten() {
        hash = mix(mix(hash, piece.address), u64::from(piece.length));
    }
    mix(hash, pieces.len() as u64)
}

/// Whether two lists are the same, word by word and without a branch for each.
fn are_same(these: &[Sge], those: &[Sge]) -> bool {
    let differ = these.iter().zip(those).fold(0, |differ, (this, that)| {
        let keys = this.lkey.0 ^ that.lkey.0;
        let ends = (this.length ^ that.length) | keys;
        differ | (this.address ^ that.address) | u64::from(ends)
    });
    differ == 0 && these.len() == those.len()
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::{Claim, Mapping, Mappings, Next, Owner, Standing, Ways};
    use crate::nic::{LKey, RKey, Region, Sge};
    use crate::pool::{Handle, Slot};
    use std::vec::Vec;

    fn piece(number: u64) -> [Sge; 1] {
        [Sge {
            address: number * 4096,
            length: 100,
            lkey: LKey(1),
        }]
    }

    fn places(count: usize, sets: usize) -> (Vec<Slot<Mapping>>, Vec<Ways>) {
        let slots = (0..count).map(|_| Slot::vacant()).collect();
        (slots, std::vec![Ways::default(); sets])
    }

    /// A mapping that is asked for and made.
    fn make(pool: &mut Mappings<'_>, number: u64, own: bool) -> Handle {
        let Claim::New(handle) = pool.claim(Owner::Stage, &piece(number), own, true) else {
            panic!("not new");
        };
        let place = u32::try_from(number).unwrap();
        pool.made(handle, Region(place), RKey(place));
        pool.tell(handle);
        handle
    }

    fn flush(pool: &mut Mappings<'_>, end: bool) -> Vec<u32> {
        let mut gone = Vec::new();
        if pool.begin(end) {
            while pool.is_filling() {
                if let Next::Unmap(region) = pool.next_unused() {
                    gone.push(region.0);
                }
            }
            pool.unmapped();
            pool.free(u32::MAX);
        }
        gone
    }

    /// However many fall together: a lookup looks at four, and what is forgotten dies unused.
    #[test]
    fn a_set_that_is_full_forgets_its_oldest() {
        let (mut slots, mut sets) = places(16, 1);
        let mut pool = Mappings::new(&mut slots, &mut sets, 16, true);
        let all: Vec<_> = (0..6).map(|number| make(&mut pool, number, true)).collect();
        for handle in &all {
            pool.release(*handle, true);
        }
        for (number, handle) in all.iter().enumerate().skip(2) {
            let claim = pool.claim(Owner::Stage, &piece(number as u64), true, true);
            assert_eq!(claim, Claim::Found(*handle));
        }
        make(&mut pool, 0, true);
        assert_eq!((pool.live(), pool.exposed(), pool.used()), (7, 2, 5));
        assert_eq!(flush(&mut pool, true), [0, 1], "those that are used stay");
        assert_eq!((pool.live(), pool.exposed(), pool.len()), (5, 0, 5));
    }

    #[test]
    fn a_mapping_that_is_used_again_leaves_the_batch() {
        let (mut slots, mut sets) = places(8, 4);
        let mut pool = Mappings::new(&mut slots, &mut sets, 3, true);
        let all: Vec<_> = (0..3).map(|number| make(&mut pool, number, true)).collect();
        for handle in &all {
            assert!(!pool.begin(false));
            pool.release(*handle, true);
        }
        assert!(pool.begin(false));
        assert_eq!(pool.next_unused(), Next::Unmap(Region(0)));
        let again = pool.claim(Owner::Stage, &piece(1), false, true);
        assert_eq!(again, Claim::Found(all[1]));
        assert_eq!(pool.next_unused(), Next::Skip);
        assert_eq!(pool.next_unused(), Next::Unmap(Region(2)));
        assert_eq!(pool.next_unused(), Next::End);
        assert!(
            pool.is_flushed() && !pool.begin(true),
            "one batch at a time"
        );
        assert_eq!(pool.standing(all[1]), Some(Standing::Live(RKey(1))));
        // What is with the control side is found no more.
        let other = pool.claim(Owner::Stage, &piece(0), true, false);
        assert_eq!(other, Claim::Short, "nor asked for, where that may not be");
        assert_eq!(pool.free(1), 0, "their keys are alive");
        pool.unmapped();
        assert_eq!((pool.free(1), pool.len()), (1, 2), "one by one");
        assert!(!pool.begin(true), "one batch at a time");
        pool.unmapped();
        assert_eq!((pool.free(7), pool.free(7)), (1, 0));
        assert_eq!((pool.len(), pool.used()), (1, 1));
        pool.release(all[1], true);
        assert_eq!(flush(&mut pool, true), [1]);
        assert!(pool.is_empty() && pool.live() == 0 && pool.exposed() == 0);
    }

    #[test]
    fn a_share_that_is_used_up_waits_and_a_full_pool_asks_for_a_flush() {
        let (mut slots, mut sets) = places(3, 2);
        let mut pool = Mappings::new(&mut slots, &mut sets, 3, true);
        let first = make(&mut pool, 0, true);
        let second = make(&mut pool, 1, true);
        assert_eq!(
            pool.claim(Owner::Stage, &piece(2), true, true),
            Claim::Short
        );
        pool.release(first, true);
        pool.release(second, true);
        let third = make(&mut pool, 2, false);
        assert!(!pool.begin(false), "nobody is short");
        let epoch = pool.epoch();
        assert_eq!(
            pool.claim(Owner::Stage, &piece(3), true, true),
            Claim::Short
        );
        assert_eq!(flush(&mut pool, false), [0, 1]);
        assert_ne!(pool.epoch(), epoch);
        let fourth = make(&mut pool, 3, true);
        pool.refused(fourth);
        pool.release(third, false);
        pool.release(fourth, true);
        assert_eq!(flush(&mut pool, true), [2, 3]);
    }

    /// Who looks while the batch is away sees a full pool, but the batch is on its way already.
    #[test]
    fn who_is_short_while_a_batch_is_away_does_not_have_the_next_flushed() {
        let (mut slots, mut sets) = places(2, 2);
        let mut pool = Mappings::new(&mut slots, &mut sets, 2, true);
        let first = make(&mut pool, 0, true);
        let peers = make(&mut pool, 1, false);
        pool.release(first, true);
        assert_eq!(
            pool.claim(Owner::Stage, &piece(2), true, true),
            Claim::Short
        );
        assert!(pool.begin(false));
        while pool.is_filling() {
            pool.next_unused();
        }
        assert_eq!(
            pool.claim(Owner::Stage, &piece(2), true, true),
            Claim::Short
        );
        pool.unmapped();
        pool.free(8);
        make(&mut pool, 2, true);
        pool.release(peers, true);
        assert!(!pool.begin(false), "nobody is short now");
    }

    #[test]
    fn a_refusal_is_told_to_all_that_wait_and_kept_by_none() {
        let (mut slots, mut sets) = places(4, 2);
        let mut pool = Mappings::new(&mut slots, &mut sets, 3, true);
        let Claim::New(handle) = pool.claim(Owner::Stage, &piece(0), true, true) else {
            panic!("not new");
        };
        assert_eq!(
            pool.claim(Owner::Stage, &piece(0), true, true),
            Claim::Found(handle)
        );
        pool.refused(handle);
        assert_eq!(pool.standing(handle), Some(Standing::Refused));
        pool.release(handle, true);
        assert_eq!(pool.standing(handle), Some(Standing::Refused));
        pool.release(handle, true);
        assert_eq!(pool.standing(handle), None);
        // Nobody waits any more: the answer finds nobody, and is kept if there is something to keep.
        for refuses in [true, false] {
            let Claim::New(handle) = pool.claim(Owner::Stage, &piece(0), true, true) else {
                panic!("not new");
            };
            pool.release(handle, true);
            if refuses {
                pool.refused(handle);
                assert!(pool.is_empty());
            } else {
                pool.made(handle, Region(7), RKey(7));
                pool.made(handle, Region(8), RKey(8));
                assert_eq!((pool.live(), pool.exposed()), (1, 0));
                assert_eq!(flush(&mut pool, true), [7]);
            }
        }
    }

    #[test]
    fn no_pool_at_all_has_nothing_to_give() {
        let mut pool = Mappings::new(&mut [], &mut [], 384, true);
        assert_eq!(
            pool.claim(Owner::Stage, &piece(0), true, true),
            Claim::Short
        );
        assert!(!pool.begin(true));
    }
}
