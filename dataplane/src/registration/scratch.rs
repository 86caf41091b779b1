//! Lists that a work request borrows while it is built.

use super::{Mechanism, Outline};
use crate::memory::{MAX_FRAGMENTS, PageList};
use crate::nic::{Capabilities, LKey, Layout, Sge};
use crate::wire::Fragment;

/// Lists that a work request borrows while it is built.
#[derive(Debug)]
pub struct Scratch {
    pieces: [Sge; MAX_FRAGMENTS],
    pages: [u64; MAX_FRAGMENTS],
    fragments: [Fragment; MAX_FRAGMENTS],
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
        let nothing = Fragment {
            length: 0,
            address: 0,
        };
        Self {
            pieces: [none; MAX_FRAGMENTS],
            pages: [0; MAX_FRAGMENTS],
            fragments: [nothing; MAX_FRAGMENTS],
        }
    }

    /// The shape of `pieces`; `paged` is the length of a page list and log2 of a page, where there are page lists.
    /// `None` for more pieces than any list has.
    pub fn outline(
        &mut self,
        pieces: impl Iterator<Item = Sge>,
        paged: Option<(usize, u8)>,
        length: u32,
        exposed: bool,
    ) -> Option<Outline> {
        let count = self.gather(pieces)?;
        let pieces = self.pieces.get(..count)?;
        let pages = paged.and_then(|(most, shift)| {
            let (_, pages) = fill_pages(&mut self.pages, most, shift, pieces.iter().copied())?;
            Some(pages.len())
        });
        Some(Outline {
            length,
            fragments: count,
            pages,
            exposed,
        })
    }

    /// Lays out `length` bytes of `list` from `offset` on for one mechanism; `None` when it does not cover them, and
    /// for those that register nothing there.
    ///
    /// A fragment list takes any shape up to the device's length of a list; pieces that lie end to end
    /// count as one. A page list needs every piece but the first to begin, and every piece but the
    /// last to end, on a page boundary (LU-11064, LU-20399). A window needs one contiguous range.
    pub fn lay_out<'l>(
        &'l mut self,
        by: Mechanism,
        capabilities: &Capabilities,
        list: &'l PageList<'_>,
        offset: u64,
        length: u32,
    ) -> Option<Layout<'l>> {
        let pieces = list.pieces();
        let whole = offset == 0 && length != 0 && u64::from(length) == list.length();
        if whole {
            // Not copied where the device takes it as it is.
            match by {
                Mechanism::FragmentList if pieces.len() <= capabilities.max_fragments as usize => {
                    return Some(Layout::Fragments(pieces));
                }
                Mechanism::PageList => {
                    let most = capabilities.max_pages as usize;
                    let shift = capabilities.page_shift;
                    let (first_offset, pages) =
                        fill_pages(&mut self.pages, most, shift, pieces.iter().copied())?;
                    return Some(Layout::Pages {
                        shift,
                        first_offset,
                        pages,
                    });
                }
                _ => {}
            }
        }
        self.lay_out_pieces(by, capabilities, list.slice(offset, length))
    }

    /// The same for pieces that are in no list.
    pub fn lay_out_pieces(
        &mut self,
        by: Mechanism,
        capabilities: &Capabilities,
        pieces: impl Iterator<Item = Sge>,
    ) -> Option<Layout<'_>> {
        let count = self.gather(pieces)?;
        let pieces = self.pieces.get(..count)?;
        let first = *pieces.first()?;
        match by {
            Mechanism::FragmentList if count <= capabilities.max_fragments as usize => {
                Some(Layout::Fragments(pieces))
            }
            Mechanism::PageList => {
                let most = capabilities.max_pages as usize;
                let shift = capabilities.page_shift;
                let (first_offset, pages) =
                    fill_pages(&mut self.pages, most, shift, pieces.iter().copied())?;
                Some(Layout::Pages {
                    shift,
                    first_offset,
                    pages,
                })
            }
            Mechanism::Window if count == 1 => Some(Layout::Window(first)),
            Mechanism::FragmentList
            | Mechanism::Window
            | Mechanism::Mapping
            | Mechanism::Arena
            | Mechanism::Staging => None,
        }
    }

    /// Pieces, those that lie end to end as one; `None` for more than any list has.
    pub fn joined(&mut self, pieces: impl Iterator<Item = Sge>) -> Option<&[Sge]> {
        let count = self.gather(pieces)?;
        self.pieces.get(..count)
    }

    /// Fragments of a descriptor with the arena's key.
    pub fn fragments(&mut self, pieces: impl Iterator<Item = Sge>) -> Option<&[Fragment]> {
        let count = self.gather(pieces)?;
        let pieces = self.pieces.get(..count)?;
        let fragments = self.fragments.get_mut(..count)?;
        for (to, piece) in fragments.iter_mut().zip(pieces) {
            *to = Fragment {
                length: piece.length,
                address: piece.address,
            };
        }
        Some(fragments)
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
}

/// The pages of page-shaped pieces, and the offset of the first byte in the first.
fn fill_pages(
    room: &mut [u64; MAX_FRAGMENTS],
    most: usize,
    shift: u8,
    mut pieces: impl Iterator<Item = Sge>,
) -> Option<(u32, &[u64])> {
    let page = 1_u64.checked_shl(u32::from(shift))?;
    let within = page.wrapping_sub(1);
    let places = room.get_mut(..most.min(MAX_FRAGMENTS))?;
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
    Some((first_offset, room.get(..count)?))
}

#[cfg(test)]
pub(super) mod tests {
    extern crate std;
    use super::Scratch;
    use crate::memory::{PageList, Range};
    use crate::nic::{Capabilities, LKey, Layout, Mechanisms, Sge};
    use crate::registration::{Choices, Mechanism, Refused, Settings, Stock};
    use std::vec::Vec;

    pub(in crate::registration) fn capabilities(mechanisms: Mechanisms) -> Capabilities {
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
    fn lu_11064_lu_20399_the_boundary_rules_of_page_lists() {
        let caps = capabilities(Mechanisms::PAGES);
        let pages = |pieces: &[Sge]| -> Option<(u32, Vec<u64>)> {
            let mut scratch = Scratch::new();
            let by = Mechanism::PageList;
            match scratch.lay_out_pieces(by, &caps, pieces.iter().copied())? {
                Layout::Pages {
                    first_offset,
                    pages,
                    ..
                } => Some((first_offset, pages.to_vec())),
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
        let by = Mechanism::FragmentList;
        let caps = capabilities(Mechanisms::all());
        let table =
            |caps: &Capabilities| Choices::new(caps, Settings::PRIVATE, 257, Stock::default());
        for (offset, length) in [(0, 400), (50, 350), (0, 399), (120, 10), (400, 0), (0, 0)] {
            let expected: Vec<_> = list.slice(offset, length).collect();
            let chosen = table(&caps).choose_for(&mut scratch, &list, offset, length);
            assert_eq!(
                chosen.map(|choice| choice.mechanism).ok(),
                (length != 0).then_some(by)
            );
            match scratch.lay_out(by, &caps, &list, offset, length) {
                Some(Layout::Fragments(found)) => {
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
        assert!(scratch.lay_out(by, &caps, &list, 0, 400).is_none());
        let chosen = table(&caps).choose_for(&mut scratch, &list, 0, 400);
        assert_eq!(chosen, Err(Refused::NoStaging));
        assert!(scratch.lay_out(by, &caps, &list, 0, 300).is_some());
        assert!(table(&caps).choose_for(&mut scratch, &list, 0, 300).is_ok());
    }

    #[test]
    fn lu_13181_adjacent_pieces_count_as_one() {
        let caps = capabilities(Mechanisms::all());
        let mut scratch = Scratch::new();
        let many: Vec<Sge> = (0..200).map(|n| piece(0x1000 + n * 16, 16)).collect();
        let all = || many.iter().copied();
        assert!(matches!(
            scratch.lay_out_pieces(Mechanism::FragmentList, &caps, all()),
            Some(Layout::Fragments([one])) if one.length == 3200
        ));
        assert!(matches!(
            scratch.lay_out_pieces(Mechanism::Window, &caps, all()),
            Some(Layout::Window(one)) if one.length == 3200
        ));
        assert!(matches!(
            scratch.fragments(all()),
            Some([one]) if one.length == 3200 && one.address == 0x1000
        ));
        let outline = scratch.outline(all(), Some((8, 12)), 3200, true).unwrap();
        assert_eq!((outline.fragments, outline.pages), (1, Some(1)));
        let gapped: Vec<Sge> = (0..5).map(|n| piece(0x1000 + n * 32, 16)).collect();
        for by in [
            Mechanism::FragmentList,
            Mechanism::PageList,
            Mechanism::Window,
        ] {
            let layout = scratch.lay_out_pieces(by, &caps, gapped.iter().copied());
            assert!(layout.is_none(), "{by:?}");
        }
        let found = scratch.fragments(gapped.iter().copied()).unwrap();
        assert_eq!(found.len(), 5);
    }
}
