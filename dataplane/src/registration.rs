//! Windows, their keys, and which mechanism puts a key over which memory.
//!
//! A [`Descriptor`] is a window with its two keys: the one the device has (or last had), and the
//! next. The first moves only when the device accepted the registration, so that a chain that was
//! mapped and not posted, or accepted in part, leaves both in step (LU-14733, LU-16349). Free
//! descriptors are reused first-in first-out: the same key comes back only after 256 rounds over
//! all windows, so a dead key stays dead for long.

use crate::memory::{MAX_FRAGMENTS, PageList};
use crate::nic::{Capabilities, LKey, Layout, Mechanisms, RKey, Region, Sge};

/// Where a window is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// No key is alive and none is named.
    Free,
    /// A key is named; the device has not heard of it.
    Named,
    /// The device accepted the registration: the key may be alive.
    Live,
    /// An invalidate of it was accepted.
    Dying,
}

/// A window that transfers borrow in turn.
#[derive(Debug, PartialEq, Eq)]
pub struct Descriptor {
    region: Region,
    on_device: RKey,
    state: State,
}

impl Descriptor {
    /// A window as adopted, with the key last used on it.
    #[must_use]
    pub const fn new(region: Region, key: RKey) -> Self {
        Self {
            region,
            on_device: key,
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
            State::Free | State::Named => self.on_device.rotated(),
            State::Live | State::Dying => self.on_device,
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
            self.state = State::Named;
        }
    }

    /// The registration went into the chain.
    pub const fn registered(&mut self) {
        if self.needs_register() {
            self.on_device = self.on_device.rotated();
            self.state = State::Live;
        }
    }

    /// The device did not take that part of the chain.
    pub const fn not_registered(&mut self) {
        if matches!(self.state, State::Live) {
            self.on_device =
                RKey((self.on_device.0 & 0xffff_ff00) | (self.on_device.0.wrapping_sub(1) & 0xff));
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

    /// The key is known to be dead: the invalidate completed, or the peer's did.
    pub const fn dead(&mut self) {
        self.state = State::Free;
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

/// How a buffer will be registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mechanism {
    /// Any ranges under one key: IB_WR_REG_INDIR_MR, SG_GAPS, UMR.
    FragmentList,
    /// Equal pages under one key: IB_WR_FAST_REG_MR, FRWR.
    PageList,
    /// One range.
    Window,
}

/// Lists that a work request borrows while it is built.
#[derive(Debug)]
pub struct Scratch {
    pieces: [Sge; MAX_FRAGMENTS],
    pages: [u64; MAX_FRAGMENTS],
}

impl Default for Scratch {
    fn default() -> Self {
        Self::new()
    }
}

impl Scratch {
    /// Empty lists.
    #[must_use]
    pub const fn new() -> Self {
        let none = Sge {
            address: 0,
            length: 0,
            lkey: LKey(0),
        };
        Self {
            pieces: [none; MAX_FRAGMENTS],
            pages: [0; MAX_FRAGMENTS],
        }
    }

    /// Lays out `pieces` in the cheapest way the device has; `None` when it has none for this shape.
    ///
    /// A fragment list takes any shape up to the device's length of a list; pieces that lie end to end
    /// count as one. A page list needs every piece but the first to begin, and every piece but the
    /// last to end, on a page boundary (LU-11064, LU-20399). A window needs one contiguous range.
    pub fn lay_out(
        &mut self,
        capabilities: &Capabilities,
        pieces: impl Iterator<Item = Sge>,
    ) -> Option<(Mechanism, Layout<'_>)> {
        let count = self.gather(pieces)?;
        let pieces = self.pieces.get(..count)?;
        let first = *pieces.first()?;
        let mechanisms = capabilities.mechanisms;
        if mechanisms.contains(Mechanisms::FRAGMENTS)
            && count <= capabilities.max_fragments as usize
        {
            return Some((Mechanism::FragmentList, Layout::Fragments(pieces)));
        }
        if mechanisms.contains(Mechanisms::PAGES)
            && let Some(layout) = fill_pages(&mut self.pages, capabilities, pieces.iter().copied())
        {
            return Some((Mechanism::PageList, layout));
        }
        if mechanisms.contains(Mechanisms::WINDOW) && count == 1 {
            return Some((Mechanism::Window, Layout::Window(first)));
        }
        None
    }

    /// Copies pieces, those that lie end to end as one; how many there are then.
    fn gather(&mut self, mut pieces: impl Iterator<Item = Sge>) -> Option<usize> {
        let Some(mut last) = pieces.next() else {
            return Some(0);
        };
        let mut count = 0_usize;
        for piece in pieces {
            if last.lkey == piece.lkey
                && last.address.checked_add(u64::from(last.length)) == Some(piece.address)
                && let Some(length) = last.length.checked_add(piece.length)
            {
                last.length = length;
            } else {
                *self.pieces.get_mut(count)? = last;
                count = count.wrapping_add(1);
                last = piece;
            }
        }
        *self.pieces.get_mut(count)? = last;
        Some(count.wrapping_add(1))
    }

    /// Lays out `length` bytes of `list` from `offset` on, as [`lay_out`](Self::lay_out) does, without a copy of
    /// the list where the device takes it as it is.
    pub fn lay_out_list<'l>(
        &'l mut self,
        capabilities: &Capabilities,
        list: &'l PageList<'_>,
        offset: u64,
        length: u32,
    ) -> Option<(Mechanism, Layout<'l>)> {
        let pieces = list.pieces();
        let whole = offset == 0 && length != 0 && u64::from(length) == list.length();
        let mechanisms = capabilities.mechanisms;
        if whole
            && mechanisms.contains(Mechanisms::FRAGMENTS)
            && pieces.len() <= capabilities.max_fragments as usize
        {
            return Some((Mechanism::FragmentList, Layout::Fragments(pieces)));
        }
        if whole && mechanisms == Mechanisms::PAGES {
            // Nothing else to fall back to.
            let layout = fill_pages(&mut self.pages, capabilities, pieces.iter().copied())?;
            return Some((Mechanism::PageList, layout));
        }
        self.lay_out(capabilities, list.slice(offset, length))
    }

    /// Whether `lay_out_list` would find a way.
    pub fn can_lay_out(
        &mut self,
        capabilities: &Capabilities,
        list: &PageList<'_>,
        offset: u64,
        length: u32,
    ) -> bool {
        let mechanisms = capabilities.mechanisms;
        // A part of a list has no more pieces than all of it.
        let short = list.pieces().len() <= capabilities.max_fragments as usize;
        (mechanisms.contains(Mechanisms::FRAGMENTS)
            && short
            && length != 0
            && offset.saturating_add(u64::from(length)) <= list.length())
            || self
                .lay_out(capabilities, list.slice(offset, length))
                .is_some()
    }
}

/// The pages of page-shaped pieces.
fn fill_pages<'s>(
    room: &'s mut [u64; MAX_FRAGMENTS],
    capabilities: &Capabilities,
    mut pieces: impl Iterator<Item = Sge>,
) -> Option<Layout<'s>> {
    let page = 1_u64.checked_shl(u32::from(capabilities.page_shift))?;
    let within = page.wrapping_sub(1);
    let most = (capabilities.max_pages as usize).min(room.len());
    let places = room.get_mut(..most)?;
    let mut piece = pieces.next()?;
    let first_offset = u32::try_from(piece.address & within).ok()?;
    let mut at = piece.address & !within;
    let mut count = 0_usize;
    loop {
        let end = piece.address.checked_add(u64::from(piece.length))?;
        while at < end {
            *places.get_mut(count)? = at;
            count = count.wrapping_add(1);
            at = at.checked_add(page)?;
        }
        let Some(next) = pieces.next() else {
            break;
        };
        // Where it goes on in the page that is there already, `at` is the page behind it.
        if next.address != end {
            if (end | next.address) & within != 0 {
                return None;
            }
            at = next.address;
        }
        piece = next;
    }
    Some(Layout::Pages {
        shift: capabilities.page_shift,
        first_offset,
        pages: room.get(..count)?,
    })
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::{Descriptor, Free, Mechanism, Scratch};
    use crate::memory::{PageList, Range};
    use crate::nic::{Capabilities, LKey, Layout, Mechanisms, RKey, Region, Sge};
    use std::vec::Vec;

    fn capabilities(mechanisms: Mechanisms) -> Capabilities {
        Capabilities {
            mechanisms,
            max_fragments: 4,
            max_pages: 8,
            page_shift: 12,
            zero_based: false,
            checks_reuse: true,
            region_lkey: true,
            remote_invalidate: true,
            max_sge: 4,
            max_send_wr: 100,
            max_recv_wr: 100,
            max_cqe: 100,
            max_windows: 4,
        }
    }

    fn piece(address: u64, length: u32) -> Sge {
        Sge {
            address,
            length,
            lkey: LKey(1),
        }
    }

    #[test]
    fn map_without_post_leaves_the_keys_in_step() {
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

    #[test]
    fn the_boundary_rules_of_page_lists() {
        let caps = capabilities(Mechanisms::PAGES);
        let pages = |pieces: &[Sge]| -> Option<(u32, Vec<u64>)> {
            match Scratch::new().lay_out(&caps, pieces.iter().copied())? {
                (
                    Mechanism::PageList,
                    Layout::Pages {
                        first_offset,
                        pages,
                        ..
                    },
                ) => Some((first_offset, pages.to_vec())),
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(
            pages(&[piece(0x1100, 100)]),
            Some((0x100, [0x1000].to_vec()))
        );
        assert_eq!(
            pages(&[
                piece(0x1100, 0xf00),
                piece(0x5000, 0x1000),
                piece(0x9000, 1)
            ]),
            Some((0x100, [0x1000, 0x5000, 0x9000].to_vec()))
        );
        assert_eq!(
            pages(&[piece(0x1000, 0x800), piece(0x5000, 0x1000)]),
            None,
            "hole at an end"
        );
        assert_eq!(
            pages(&[piece(0x1000, 0x1000), piece(0x5004, 0x10)]),
            None,
            "hole at a start"
        );
        assert_eq!(
            pages(&[piece(0x1001, 0x8000)]),
            None,
            "nine pages, eight allowed"
        );
        assert!(pages(&[piece(0x1000, 0x8000)]).is_some());
        assert_eq!(pages(&[]), None);
    }

    #[test]
    fn a_list_that_the_device_takes_as_it_is_is_not_copied() {
        let mut backing = std::vec![0_u8; 4096];
        let mut rest = Range::of_bytes(&mut backing, LKey(1)).unwrap();
        let mut list = PageList::new();
        for _ in 0..4 {
            let (head, tail) = rest.split_at(100).unwrap();
            let (_hole, tail) = tail.split_at(28).unwrap();
            list.push(head).unwrap();
            rest = tail;
        }
        let mut scratch = Scratch::new();
        let caps = capabilities(Mechanisms::all());
        for (offset, length) in [(0, 400), (50, 350), (0, 399), (120, 10), (400, 0), (0, 0)] {
            let expected: Vec<_> = list.slice(offset, length).collect();
            assert_eq!(
                scratch.can_lay_out(&caps, &list, offset, length),
                length != 0
            );
            match scratch.lay_out_list(&caps, &list, offset, length) {
                Some((Mechanism::FragmentList, Layout::Fragments(found))) => {
                    assert_eq!(found, &expected[..]);
                    assert_eq!(found.as_ptr() == list.pieces().as_ptr(), length == 400);
                }
                other => assert!(length == 0 && other.is_none()),
            }
        }
        // One piece too many for the device: only a part of it goes.
        let caps = Capabilities {
            max_fragments: 3,
            ..capabilities(Mechanisms::FRAGMENTS)
        };
        assert!(scratch.lay_out_list(&caps, &list, 0, 400).is_none());
        assert!(!scratch.can_lay_out(&caps, &list, 0, 400));
        assert!(scratch.lay_out_list(&caps, &list, 0, 300).is_some());
        assert!(scratch.can_lay_out(&caps, &list, 0, 300));
    }

    #[test]
    fn adjacent_pieces_count_as_one_and_the_cheapest_mechanism_wins() {
        let caps = capabilities(Mechanisms::all());
        let mut scratch = Scratch::new();
        let many: Vec<Sge> = (0..200).map(|n| piece(0x1000 + n * 16, 16)).collect();
        assert!(matches!(
            scratch.lay_out(&caps, many.iter().copied()),
            Some((Mechanism::FragmentList, Layout::Fragments([one]))) if one.length == 3200
        ));
        let gapped: Vec<Sge> = (0..5).map(|n| piece(0x1000 + n * 32, 16)).collect();
        assert!(scratch.lay_out(&caps, gapped.iter().copied()).is_none());
        let caps = capabilities(Mechanisms::WINDOW);
        assert!(matches!(
            scratch.lay_out(&caps, many.iter().copied()),
            Some((Mechanism::Window, Layout::Window(one))) if one.length == 3200
        ));
        let pages: Vec<Sge> = (0..5).map(|n| piece(0x1000 + n * 0x2000, 0x1000)).collect();
        let caps = capabilities(Mechanisms::all());
        assert!(matches!(
            scratch.lay_out(&caps, pages.iter().copied()),
            Some((Mechanism::PageList, _))
        ));
    }
}
