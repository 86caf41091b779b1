//! The key table: which key lies over which memory, and who may use it how.
//!
//! Two kinds of keys. **Memories** (base regions) have a key from their registration on. **Regions** (adopted
//! windows) get one by REGISTER. A region holds two lists: *live*, what its key means now, and *staged*, what
//! the next REGISTER on some queue will make it mean. So the caller's list is copied once, when it is queued.

use o2poll_dataplane::nic::{Capabilities, LKey, Mechanisms, RKey, Region, Rights, Sge, Status};

use crate::bytes::{Fragment, Memory, Pieces, Span};
use crate::lists::{ANYBODY, Asker, Laid, MEMORY_INDEX, Memories, Order, build, pages_of};

/// A window, mkey or fast-registration region, made by a control thread; it may come with a live mapping.
#[derive(Debug)]
pub struct Window {
    pd: u32,
    tag: u8,
    mapped: Option<Mapped>,
}

/// What a control thread has put a key over.
#[derive(Debug)]
struct Mapped {
    ranges: &'static mut [Sge],
    count: usize,
    rights: Rights,
    base: u64,
}

impl Window {
    /// A window of a protection domain.
    #[must_use]
    pub const fn new(pd: u32) -> Self {
        Self {
            pd,
            tag: 0,
            mapped: None,
        }
    }

    /// With the tag that its key was last used with; if it is mapped, with the tag that its key has. In a place of the
    /// device that had a key before, that one's tag counts: a dead key does not come back with the next window.
    #[must_use]
    pub const fn with_tag(self, tag: u8) -> Self {
        Self {
            pd: self.pd,
            tag,
            mapped: self.mapped,
        }
    }

    /// With a key over all bytes of the first `count` ranges, laid end to end from `base` on, which is live from the
    /// window's adoption until it is retired: what an FMR is. The device refuses to adopt it if it has no
    /// [`Mechanisms::MAPPINGS`], if the ranges are none, fewer than `count`, more pages than its `max_pages`, or not of
    /// its memory and protection domain, if one is empty, and if there is a hole within a page: only the first may
    /// begin, and only the last may end there, and neighbours that touch are one.
    #[must_use]
    pub const fn over(
        self,
        ranges: &'static mut [Sge],
        count: usize,
        rights: Rights,
        base: u64,
    ) -> Self {
        Self {
            pd: self.pd,
            tag: self.tag,
            mapped: Some(Mapped {
                ranges,
                count,
                rights,
                base,
            }),
        }
    }

    /// The tag of its key.
    #[must_use]
    pub const fn tag(&self) -> u8 {
        self.tag
    }

    /// Takes the mapping off a window that is retired; its ranges can be written anew.
    pub const fn unmap(&mut self) -> Option<&'static mut [Sge]> {
        match self.mapped.take() {
            Some(mapped) => Some(mapped.ranges),
            None => None,
        }
    }
}

/// What a key means.
#[derive(Clone, Copy, Debug)]
struct Mapping {
    base: u64,
    length: u32,
    fragments: u32,
    /// The one queue pair that may use it, for a window; else [`ANYBODY`].
    bound: u32,
    rights: Rights,
}

impl Mapping {
    const NONE: Self = Self {
        base: 0,
        length: 0,
        fragments: 0,
        bound: ANYBODY,
        rights: Rights::empty(),
    };

    /// Where a range begins in it, if it lies inside.
    #[inline(always)]
    fn reach(&self, address: u64, length: u32) -> Option<u32> {
        let offset = u32::try_from(address.checked_sub(self.base)?).ok()?;
        (offset.checked_add(length)? <= self.length).then_some(offset)
    }
}

/// Room for one window: a line of what work requests and peers look at, and the window itself.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct RegionSlot {
    /// What goes with each of the two lists: the live one's, and the staged one's.
    mappings: [Mapping; 2],
    /// The live key, or [`NO_KEY`].
    live: RKey,
    /// The key of the staged list, or [`NO_KEY`].
    staged: RKey,
    /// The window's protection domain.
    pd: u32,
    /// The tag of the last key here.
    tag: u8,
    /// Which of the two lists is the live one.
    flipped: bool,
    /// The control side has made the key, which alone ends it.
    fixed: bool,
    /// There is a window.
    taken: bool,
    window: Option<Window>,
    /// There was a window before, whose last tag is kept.
    used: bool,
}

static_assertions::const_assert_eq!(core::mem::offset_of!(RegionSlot, window), 64);

impl Default for RegionSlot {
    fn default() -> Self {
        Self {
            mappings: [Mapping::NONE; 2],
            live: NO_KEY,
            staged: NO_KEY,
            pd: 0,
            tag: 0,
            flipped: false,
            fixed: false,
            taken: false,
            window: None,
            used: false,
        }
    }
}

/// A registration that was not staged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NotStaged {
    /// It cannot be posted.
    Reject,
    /// It can be posted, and fails so.
    Fail(Status),
}

/// The pieces of memory behind a range of a key.
pub(crate) struct Walk<'k> {
    head: Span,
    rest: &'k [Fragment],
}

impl Pieces for Walk<'_> {
    fn next(&mut self, most: u32) -> Option<Span> {
        if self.head.length() == 0 {
            let (next, rest) = self.rest.split_first()?;
            (self.head, self.rest) = (next.span(), rest);
        }
        let (taken, left) = self.head.cut(most);
        self.head = left;
        (taken.length() != 0).then_some(taken)
    }
}

/// All keys of one device.
pub(crate) struct Keys<'a> {
    regions: &'a mut [RegionSlot],
    fragments: &'a mut [Fragment],
    stride: usize,
    memories: &'a mut [Option<Memory>],
    /// Every region before this one is taken.
    vacant_from: usize,
}

impl<'a> Keys<'a> {
    pub(crate) const fn new(
        regions: &'a mut [RegionSlot],
        fragments: &'a mut [Fragment],
        stride: usize,
        memories: &'a mut [Option<Memory>],
    ) -> Self {
        Self {
            regions,
            fragments,
            stride,
            memories,
            vacant_from: 0,
        }
    }

    #[expect(clippy::cast_possible_truncation, reason = "at most 2^22 memories")]
    pub(crate) fn add_memory(&mut self, memory: Memory) -> Result<LKey, Memory> {
        let vacant = self
            .memories
            .iter_mut()
            .enumerate()
            .find(|(_, slot)| slot.is_none());
        let Some((index, slot)) = vacant else {
            return Err(memory);
        };
        *slot = Some(memory);
        Ok(LKey(MEMORY_INDEX.wrapping_add(index as u32) << 8))
    }

    #[expect(clippy::cast_possible_truncation, reason = "at most 2^22 windows")]
    pub(crate) fn adopt(
        &mut self,
        mut window: Window,
        capabilities: &Capabilities,
    ) -> Result<(Region, RKey), Window> {
        let vacant = self
            .regions
            .iter()
            .enumerate()
            .skip(self.vacant_from)
            .find(|(_, slot)| !slot.taken)
            .map(|(index, slot)| (index as u32, slot.used.then_some(slot.tag)));
        let Some((index, last)) = vacant else {
            return Err(window);
        };
        let tag = match last {
            None => window.tag,
            // A mapping has a key of its own, which nobody was told before.
            Some(last) => last.wrapping_add(u8::from(window.mapped.is_some())),
        };
        let key = RKey((WINDOW_INDEX.wrapping_add(index) << 8) | u32::from(tag));
        let mut mapping = None;
        if let Some(mapped) = &window.mapped {
            mapping = self.map(Region(index), window.pd, mapped, capabilities);
            if mapping.is_none() {
                return Err(window);
            }
        }
        let Some(slot) = self.regions.get_mut(index as usize) else {
            return Err(window);
        };
        window.tag = tag;
        self.vacant_from = (index as usize).wrapping_add(1);
        *slot = RegionSlot {
            mappings: [mapping.unwrap_or(Mapping::NONE), Mapping::NONE],
            live: if mapping.is_some() { key } else { NO_KEY },
            pd: window.pd,
            tag,
            fixed: mapping.is_some(),
            taken: true,
            window: Some(window),
            ..RegionSlot::default()
        };
        Ok((Region(index), key))
    }

    /// Writes the list of a mapping that the control side has made.
    fn map(
        &mut self,
        region: Region,
        pd: u32,
        mapped: &Mapped,
        capabilities: &Capabilities,
    ) -> Option<Mapping> {
        let ranges = mapped.ranges.get(..mapped.count)?;
        let length = ranges
            .iter()
            .try_fold(0_u32, |sum, range| sum.checked_add(range.length))?;
        if !capabilities.mechanisms.contains(Mechanisms::MAPPINGS)
            || pages_of(ranges, capabilities.page_shift)
                .is_none_or(|pages| pages > u64::from(capabilities.max_pages))
            || mapped.base.checked_add(u64::from(length)).is_none()
            || (mapped.base != 0 && capabilities.zero_based)
        {
            return None;
        }
        let start = list_start(region.0 as usize, false, self.stride);
        let room = self
            .fragments
            .get_mut(start..start.checked_add(self.stride)?)?;
        let memories = Memories::of(self.memories, pd, mapped.rights);
        let fragments = build(room, &memories, ranges, length, 0)?;
        Some(Mapping {
            base: mapped.base,
            length,
            fragments,
            bound: ANYBODY,
            rights: mapped.rights,
        })
    }

    pub(crate) fn retire(&mut self, region: Region) -> Option<Window> {
        let slot = self.regions.get_mut(region.0 as usize)?;
        let mut window = slot.window.take()?;
        window.tag = slot.tag;
        self.vacant_from = self.vacant_from.min(region.0 as usize);
        *slot = RegionSlot {
            tag: slot.tag,
            used: true,
            ..RegionSlot::default()
        };
        Some(window)
    }

    /// Keys that would let somebody in.
    pub(crate) fn live(&self) -> usize {
        self.regions
            .iter()
            .filter(|slot| slot.live != NO_KEY)
            .count()
    }

    /// Copies a registration into the region's staged list.
    #[inline(always)]
    pub(crate) fn stage(
        &mut self,
        asker: Asker,
        order: &Order<'_>,
        capabilities: &Capabilities,
    ) -> Result<(), NotStaged> {
        let reject = NotStaged::Reject;
        let index = order.region.0 as usize;
        let slot = self.regions.get_mut(index).ok_or(reject)?;
        let laid = Laid::of(asker, order, capabilities);
        // What a driver refuses to post, or has no room for.
        if !capabilities.mechanisms.contains(laid.mechanism)
            || laid.count > laid.most as usize
            || slot.staged != NO_KEY
            || slot.fixed
            || !slot.taken
        {
            return Err(reject);
        }
        let bind = NotStaged::Fail(Status::Bind);
        let fits = laid.is_sound
            && order.length != 0
            && (order.base == 0 || !capabilities.zero_based)
            && order.base.checked_add(u64::from(order.length)).is_some()
            && slot.pd == asker.pd
            && order.key.0 >> 8 == WINDOW_INDEX.wrapping_add(order.region.0);
        if !fits {
            return Err(bind);
        }
        let start = list_start(index, !slot.flipped, self.stride);
        let room = self
            .fragments
            .get_mut(start..start.wrapping_add(self.stride))
            .ok_or(reject)?;
        let memories = Memories::of(self.memories, asker.pd, order.rights);
        let fragments = build(room, &memories, laid.list, order.length, laid.within);
        let fragments = fragments.ok_or(bind)?;
        let [first, second] = &mut slot.mappings;
        *(if slot.flipped { first } else { second }) = Mapping {
            base: order.base,
            length: order.length,
            fragments,
            bound: laid.bound,
            rights: order.rights,
        };
        slot.staged = order.key;
        Ok(())
    }

    /// Forgets a staged registration that will not run.
    pub(crate) fn unstage(&mut self, region: Region, key: RKey) {
        if let Some(slot) = self.regions.get_mut(region.0 as usize)
            && slot.staged == key
        {
            slot.staged = NO_KEY;
        }
    }

    /// Runs a staged registration: its key is live from here on.
    #[inline]
    pub(crate) fn activate(
        &mut self,
        region: Region,
        key: RKey,
        checks_reuse: bool,
    ) -> Result<(), Status> {
        let slot = self
            .regions
            .get_mut(region.0 as usize)
            .ok_or(Status::Bind)?;
        if slot.staged != key || key == NO_KEY {
            return Err(Status::Bind);
        }
        slot.staged = NO_KEY;
        if checks_reuse && slot.live != NO_KEY {
            return Err(Status::Bind);
        }
        // What was live before is no more, and its list is the next to be written.
        slot.live = key;
        slot.tag = key.0.to_le_bytes()[0];
        slot.flipped = !slot.flipped;
        Ok(())
    }

    /// Makes a key dead. False for one that is not live, or not this queue pair's to kill; with `foreign`, every
    /// queue pair of the device may.
    #[inline]
    pub(crate) fn kill(&mut self, asker: Asker, key: RKey, foreign: bool) -> bool {
        let Some(slot) = region_index(key.0).and_then(|index| self.regions.get_mut(index)) else {
            return false;
        };
        if slot.live != key || slot.fixed || !(foreign || slot.answers(asker, key)) {
            return false;
        }
        slot.live = NO_KEY;
        true
    }

    /// The memory behind `length` (not 0) bytes at `address` of a remote key, if the peer of this queue pair
    /// has `right` to all of them.
    pub(crate) fn remote(
        &self,
        asker: Asker,
        key: RKey,
        address: u64,
        length: u32,
        right: Rights,
    ) -> Option<Walk<'_>> {
        if let Some(memory) = self.memory(key.0) {
            let open = memory.pd() == asker.pd && memory.rights().contains(right);
            return memory
                .span(address, length)
                .filter(|_| open)
                .map(|head| Walk { head, rest: &[] });
        }
        self.region(asker, key, address, length, right)
    }

    /// As [`remote`](Self::remote), where the key is a window's and lies over one piece of memory. `None` sends the caller
    /// there.
    ///
    /// Inlined: what comes back in memory, and is read in larger pieces than it was written in, is waited for.
    #[inline(always)]
    pub(crate) fn remote_piece(
        &self,
        asker: Asker,
        key: RKey,
        address: u64,
        length: u32,
        right: Rights,
    ) -> Option<Span> {
        let index = region_index(key.0)?;
        let slot = self.regions.get(index)?;
        let live = slot.mapping();
        if live.fragments != 1 || !slot.answers(asker, key) || !live.rights.contains(right) {
            return None;
        }
        let offset = live.reach(address, length)?;
        let start = list_start(index, slot.flipped, self.stride);
        let span = self.fragments.get(start)?.span();
        Some(span.cut(offset).1.cut(length).0)
    }

    /// A scatter/gather element of our own under a base memory's key, to be read. `None` sends the caller to
    /// [`local`](Self::local).
    #[inline]
    pub(crate) fn base(&self, pd: u32, piece: Sge) -> Option<Span> {
        if piece.length == 0 {
            return Some(Span::EMPTY);
        }
        let memory = self.memory(piece.lkey.0)?;
        if memory.pd() != pd {
            return None;
        }
        memory.span(piece.address, piece.length)
    }

    /// As [`base`](Self::base), to be written.
    #[inline(always)]
    pub(crate) fn base_sink(&self, pd: u32, piece: Sge) -> Option<Span> {
        let memory = self.memory(piece.lkey.0)?;
        if memory.pd() != pd || !memory.rights().contains(Rights::LOCAL_WRITE) {
            return None;
        }
        memory.span(piece.address, piece.length)
    }

    /// The memory behind a scatter/gather element of our own. `write` where the device would write to it.
    pub(crate) fn local(
        &self,
        asker: Asker,
        piece: Sge,
        write: bool,
        region_lkey: bool,
    ) -> Option<Walk<'_>> {
        let right = if write {
            Rights::LOCAL_WRITE
        } else {
            Rights::empty()
        };
        if let Some(memory) = self.memory(piece.lkey.0) {
            let open = memory.pd() == asker.pd && memory.rights().contains(right);
            return memory
                .span(piece.address, piece.length)
                .filter(|_| open)
                .map(|head| Walk { head, rest: &[] });
        }
        if !region_lkey {
            return None;
        }
        let key = RKey(piece.lkey.0);
        self.region(asker, key, piece.address, piece.length, right)
    }

    #[inline]
    fn memory(&self, key: u32) -> Option<&Memory> {
        let index = (key >> 8).checked_sub(MEMORY_INDEX)?;
        let memory = self.memories.get(index as usize)?.as_ref()?;
        (key & 0xff == 0).then_some(memory)
    }

    fn region(
        &self,
        asker: Asker,
        key: RKey,
        address: u64,
        length: u32,
        right: Rights,
    ) -> Option<Walk<'_>> {
        let index = region_index(key.0)?;
        let slot = self.regions.get(index)?;
        let live = slot.mapping();
        if !slot.answers(asker, key) || !live.rights.contains(right) {
            return None;
        }
        let offset = live.reach(address, length)?;
        let start = list_start(index, slot.flipped, self.stride);
        let end = start.checked_add(live.fragments as usize)?;
        let list = self.fragments.get(start..end)?;
        let first = list.partition_point(|fragment| fragment.end() <= offset);
        let (head, rest) = match list.get(first..)?.split_first() {
            Some((head, rest)) => (head.span().cut(offset.wrapping_sub(head.start())).1, rest),
            None => (Span::EMPTY, [].as_slice()),
        };
        Some(Walk { head, rest })
    }
}

impl RegionSlot {
    /// What goes with the live list, if there is a live key.
    #[inline]
    const fn mapping(&self) -> &Mapping {
        let [first, second] = &self.mappings;
        if self.flipped { second } else { first }
    }

    /// Whether the key, which has the index of a window, is live here, and this queue pair may use it.
    #[inline]
    fn answers(&self, asker: Asker, key: RKey) -> bool {
        let bound = self.mapping().bound;
        self.live == key && self.pd == asker.pd && (bound == ANYBODY || bound == asker.number)
    }
}

fn region_index(key: u32) -> Option<usize> {
    let index = (key >> 8).checked_sub(WINDOW_INDEX)?;
    (index < MEMORY_INDEX).then_some(index as usize)
}

/// Each region has two lists side by side.
fn list_start(region: usize, second: bool, stride: usize) -> usize {
    region
        .wrapping_mul(2)
        .wrapping_add(usize::from(second))
        .wrapping_mul(stride)
}

/// Key index of the first window. Key 0 is nobody's.
const WINDOW_INDEX: u32 = 1;

/// The index of no window.
const NO_KEY: RKey = RKey(0);

#[cfg(test)]
mod tests {
    extern crate std;
    use std::vec;
    use std::vec::Vec;

    use super::{Fragment, Keys, Memory, RegionSlot, Window};
    use crate::profile::Profile;

    /// Starting a node adopts tens of thousands of windows, and none may look at all that came before it.
    #[test]
    fn a_window_is_placed_without_a_look_at_the_others_in_the_lowest_place_there_is() {
        let mut regions: Vec<RegionSlot> = (0..8).map(|_| RegionSlot::default()).collect();
        let mut fragments = vec![Fragment::default(); 16];
        let mut memories: [Option<Memory>; 0] = [];
        let mut keys = Keys::new(&mut regions, &mut fragments, 1, &mut memories);
        let capabilities = Profile::frwr().capabilities;
        for n in 0..8 {
            let (region, _) = keys.adopt(Window::new(0), &capabilities).unwrap();
            assert_eq!((region.0, keys.vacant_from), (n, n as usize + 1));
        }
        assert!(keys.adopt(Window::new(0), &capabilities).is_err());
        for (gone, from) in [(5, 5), (2, 2), (6, 2)] {
            assert!(keys.retire(super::Region(gone)).is_some());
            assert!(keys.retire(super::Region(gone)).is_none());
            assert_eq!(keys.vacant_from, from);
        }
        for lowest in [2, 5, 6] {
            let (region, _) = keys.adopt(Window::new(0), &capabilities).unwrap();
            assert_eq!(region.0, lowest);
        }
        assert!(keys.adopt(Window::new(0), &capabilities).is_err());
    }
}
