//! The lists of registrations: what may be registered, and what a list becomes.
//!
//! A caller names pieces of base memories. Each is checked once, against the memory that its local key names, and written
//! down as a [`Fragment`]; neighbours that touch become one.

use o2poll_dataplane::nic::{Capabilities, LKey, Layout, Mechanisms, RKey, Region, Rights, Sge};

use crate::bytes::{Fragment, Memory, Span};

/// A queue pair, as the checks see it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asker {
    pub(crate) pd: u32,
    pub(crate) number: u32,
}

/// A REGISTER.
pub(crate) struct Order<'w> {
    pub(crate) region: Region,
    pub(crate) key: RKey,
    pub(crate) rights: Rights,
    pub(crate) base: u64,
    pub(crate) length: u32,
    pub(crate) layout: Layout<'w>,
}

/// The memories that a registration may use.
pub(crate) struct Memories<'k> {
    all: &'k [Option<Memory>],
    pd: u32,
    write: bool,
}

impl<'k> Memories<'k> {
    #[inline(always)]
    pub(crate) fn of(all: &'k [Option<Memory>], pd: u32, rights: Rights) -> Self {
        let write = Rights::REMOTE_WRITE.union(Rights::LOCAL_WRITE);
        Self {
            all,
            pd,
            write: rights.intersects(write),
        }
    }

    fn admits(&self, memory: &Memory) -> bool {
        memory.pd() == self.pd && (!self.write || memory.rights().contains(Rights::LOCAL_WRITE))
    }

    /// By local key.
    #[inline(always)]
    fn named(&self, lkey: LKey) -> Option<&Memory> {
        let index = (lkey.0 >> 8).checked_sub(MEMORY_INDEX)?;
        let memory = self.all.get(index as usize)?.as_ref()?;
        (lkey.0 & 0xff == 0 && self.admits(memory)).then_some(memory)
    }
}

/// A fragment list being written. Neighbours that touch become one.
struct Builder<'k> {
    room: core::slice::IterMut<'k, Fragment>,
    /// The one written last, which the next piece may belong to.
    last: &'k mut Fragment,
    /// Address behind it. No memory begins at 0.
    next: u64,
    /// Bytes so far: more than any list holds.
    length: u64,
    /// On both sides of each hole, the address: all of them or'ed.
    holes: u64,
}

impl<'k> Builder<'k> {
    #[inline(always)]
    fn new(room: &'k mut [Fragment], none: &'k mut Fragment) -> Self {
        Self {
            room: room.iter_mut(),
            last: none,
            next: 0,
            length: 0,
            holes: 0,
        }
    }

    /// The first span.
    #[inline(always)]
    fn first(&mut self, first: (Span, u64)) -> Option<()> {
        self.push(first)?;
        // What is before it is no hole.
        self.holes = 0;
        Some(())
    }

    /// How many fragments of `most` were written, if they have so many bytes, and no hole touches one of the bits
    /// `within`.
    #[inline(always)]
    fn end(self, most: usize, length: u32, within: u64) -> Option<u32> {
        if self.length != u64::from(length) || self.holes & within != 0 {
            return None;
        }
        u32::try_from(most.wrapping_sub(self.room.len())).ok()
    }

    /// A span that is not empty, and the address behind it. `None` when there is no room.
    #[inline(always)]
    fn push(&mut self, (span, end): (Span, u64)) -> Option<()> {
        let length = span.length();
        if span.address() == self.next {
            self.last.grow(length);
        } else {
            self.last = self.room.next()?;
            self.holes |= self.next | span.address();
            *self.last = Fragment::new(span, self.length);
        }
        self.next = end;
        self.length = self.length.wrapping_add(u64::from(length));
        Some(())
    }
}

/// The ranges of a registration, and what goes for lists of that kind.
pub(crate) struct Laid<'w> {
    pub(crate) mechanism: Mechanisms,
    pub(crate) list: &'w [Sge],
    /// No hole between two ranges begins or ends at an address with one of these bits.
    pub(crate) within: u64,
    /// What is counted, and how many there may be.
    pub(crate) count: usize,
    pub(crate) most: u32,
    /// The one queue pair that may use the key, for a window; else [`ANYBODY`].
    pub(crate) bound: u32,
    pub(crate) is_sound: bool,
}

impl<'w> Laid<'w> {
    #[inline(always)]
    pub(crate) fn of(asker: Asker, order: &'w Order<'_>, capabilities: &Capabilities) -> Self {
        match &order.layout {
            Layout::Fragments(list) => Self {
                mechanism: Mechanisms::FRAGMENTS,
                list,
                within: 0,
                count: list.len(),
                most: capabilities.max_fragments,
                bound: ANYBODY,
                is_sound: true,
            },
            Layout::Window(piece) => Self {
                mechanism: Mechanisms::WINDOW,
                list: core::slice::from_ref(piece),
                within: 0,
                count: 1,
                most: 1,
                bound: asker.number,
                // A window is addressed as the memory is.
                is_sound: piece.address == order.base,
            },
            Layout::Pages { shift, ranges } => {
                let within = 1_u64.wrapping_shl(u32::from(*shift)).wrapping_sub(1);
                Self {
                    mechanism: Mechanisms::PAGES,
                    list: ranges,
                    within,
                    count: pages_in(ranges, within, *shift, order.length),
                    most: capabilities.max_pages,
                    bound: ANYBODY,
                    is_sound: (capabilities.page_shift..=MOST_SHIFT).contains(shift),
                }
            }
        }
    }
}

/// Writes the list of a registration; how many fragments it has. No hole between its pieces begins or ends at an address
/// with one of the bits `within`.
#[inline(always)]
pub(crate) fn build(
    room: &mut [Fragment],
    memories: &Memories<'_>,
    list: &[Sge],
    length: u32,
    within: u64,
) -> Option<u32> {
    if let [piece] = list {
        return build_one(room, memories, *piece, length);
    }
    // Most lists lie in one memory: it is looked up once.
    let lkey = list.first()?.lkey;
    let memory = memories.named(lkey)?;
    match build_in(room, memory, lkey, list, length, within) {
        Built::Whole(count) => Some(count),
        Built::Bad => None,
        Built::Mixed => build_mixed(room, memories, list, length, within),
    }
}

/// The list of one piece.
#[inline(always)]
fn build_one(
    room: &mut [Fragment],
    memories: &Memories<'_>,
    piece: Sge,
    length: u32,
) -> Option<u32> {
    let (span, _) = memories.named(piece.lkey)?.piece(piece)?;
    if piece.length != length {
        return None;
    }
    *room.first_mut()? = Fragment::new(span, 0);
    Some(1)
}

/// What became of a list for one memory.
enum Built {
    /// So many fragments.
    Whole(u32),
    /// It cannot be.
    Bad,
    /// Not all pieces have the same local key.
    Mixed,
}

/// The list of pieces that have one local key. By itself, so that all that a piece changes stays in registers.
#[inline(never)]
fn build_in(
    room: &mut [Fragment],
    memory: &Memory,
    lkey: LKey,
    list: &[Sge],
    length: u32,
    within: u64,
) -> Built {
    let most = room.len();
    let mut none = Fragment::default();
    let mut builder = Builder::new(room, &mut none);
    // Empty ones are refused: a length of 0 means 2 GiB in an mlx5 list.
    let Some((first, rest)) = list.split_first() else {
        return Built::Bad;
    };
    let checked = memory.piece(*first);
    if checked.and_then(|checked| builder.first(checked)).is_none() {
        return Built::Bad;
    }
    for piece in rest {
        if piece.lkey != lkey {
            return Built::Mixed;
        }
        let checked = memory.piece(*piece);
        if checked.and_then(|checked| builder.push(checked)).is_none() {
            return Built::Bad;
        }
    }
    builder
        .end(most, length, within)
        .map_or(Built::Bad, Built::Whole)
}

/// The list of pieces of several memories.
#[inline(never)]
fn build_mixed(
    room: &mut [Fragment],
    memories: &Memories<'_>,
    list: &[Sge],
    length: u32,
    within: u64,
) -> Option<u32> {
    let most = room.len();
    let mut none = Fragment::default();
    let mut builder = Builder::new(room, &mut none);
    let (first, rest) = list.split_first()?;
    builder.first(memories.named(first.lkey)?.piece(*first)?)?;
    for piece in rest {
        builder.push(memories.named(piece.lkey)?.piece(*piece)?)?;
    }
    builder.end(most, length, within)
}

/// Pages that so many bytes take in the shape of a page list; `within` is a page less one.
fn pages_in(ranges: &[Sge], within: u64, shift: u8, length: u32) -> usize {
    let before = ranges.first().map_or(0, |first| first.address & within);
    let bytes = before.saturating_add(u64::from(length));
    let pages = bytes.saturating_add(within) >> (shift & 63);
    usize::try_from(pages).unwrap_or(usize::MAX)
}

/// Pages of `1 << shift` that ranges take, if only the first begins and only the last ends within one.
pub(crate) fn pages_of(ranges: &[Sge], shift: u8) -> Option<u64> {
    let within = 1_u64.checked_shl(u32::from(shift))?.wrapping_sub(1);
    let mut pages = 0_u64;
    let mut end: Option<u64> = None;
    for range in ranges {
        let next = range.address.checked_add(u64::from(range.length))?;
        // The first page of what goes on in a page that is counted already.
        let mut from = range.address & !within;
        if let Some(end) = end {
            if range.address == end {
                from = end.checked_add(within)? & !within;
            } else if (end | range.address) & within != 0 {
                return None;
            }
        }
        let behind = next.checked_add(within)? & !within;
        pages = pages.checked_add(behind.saturating_sub(from) >> shift)?;
        end = Some(next);
    }
    Some(pages)
}

/// No number of a queue pair, which has 24 bits.
pub(crate) const ANYBODY: u32 = u32::MAX;

/// Key index of the first base memory region.
pub(crate) const MEMORY_INDEX: u32 = 1 << 23;

/// Largest page: 1 GiB.
const MOST_SHIFT: u8 = 30;
