//! Lists that a work request borrows while it is built.

use super::Mechanism;
use crate::memory::{MAX_FRAGMENTS, PageList, Shape};
use crate::nic::{Capabilities, LKey, Layout, Sge};

/// Lists that a work request borrows while it is built.
#[derive(Debug)]
pub struct Scratch {
    pieces: [Sge; MAX_FRAGMENTS],
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
        }
    }

    /// Lays out `length` bytes of `list` from `offset` on for one mechanism; `None` when it does not cover them, and
    /// for those that register nothing there.
    ///
    /// A fragment list takes any shape up to the device's length of a list; pieces that lie end to end
    /// count as one. A page list needs every piece but the first to begin, and every piece but the
    /// last to end, on a page boundary (LU-11064, LU-20399). A window needs one contiguous range.
    ///
    /// Inlined: a layout that is returned is written in small pieces and read back in larger ones, which a core does not
    /// forward.
    #[inline(always)]
    pub fn lay_out<'l>(
        &'l mut self,
        by: Mechanism,
        capabilities: &Capabilities,
        list: &'l PageList<'_>,
        offset: u64,
        length: u32,
    ) -> Option<Layout<'l>> {
        let pieces = list.pieces();
        // Not copied where the device takes it as it is.
        let is_taken = match by {
            Mechanism::FragmentList => pieces.len() <= capabilities.max_fragments as usize,
            Mechanism::PageList => true,
            Mechanism::Window => pieces.len() == 1,
            Mechanism::Mapping | Mechanism::Arena | Mechanism::Staging => return None,
        };
        if length == 0 || !list.is_whole(offset, length) || !is_taken {
            let pieces = self.part(list, offset, length)?;
            return over(by, capabilities, pieces, || of_pieces(capabilities, pieces));
        }
        let shift = capabilities.page_shift;
        over(by, capabilities, pieces, || {
            list.shape(offset, length).pages(shift, length)
        })
    }

    /// The same for pieces that are in no list.
    pub fn lay_out_pieces(
        &mut self,
        by: Mechanism,
        capabilities: &Capabilities,
        pieces: impl Iterator<Item = Sge>,
    ) -> Option<Layout<'_>> {
        let pieces = self.gather(pieces)?;
        over(by, capabilities, pieces, || of_pieces(capabilities, pieces))
    }

    /// The pieces of a part of a list, those that lie end to end as one.
    #[inline(never)]
    fn part(&mut self, list: &PageList<'_>, offset: u64, length: u32) -> Option<&[Sge]> {
        self.gather(list.slice(offset, length))
    }

    /// The pieces of `length` bytes of `list` from `offset` on, those that lie end to end as one; `None` for more than
    /// any list has.
    pub fn joined<'l>(
        &'l mut self,
        list: &'l PageList<'_>,
        offset: u64,
        length: u32,
    ) -> Option<&'l [Sge]> {
        let pieces = list.pieces();
        if list.is_whole(offset, length) && list.shape(offset, length).fragments() == pieces.len() {
            return Some(pieces);
        }
        self.gather(list.slice(offset, length))
    }

    /// Copies pieces, those that lie end to end as one.
    fn gather(&mut self, mut pieces: impl Iterator<Item = Sge>) -> Option<&[Sge]> {
        let Some(mut last) = pieces.next() else {
            return Some(&[]);
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
        self.pieces.get(..count.wrapping_add(1))
    }
}

/// One mechanism over these pieces, as they are; `pages` says how many pages they are, if they can be a page list.
#[inline(always)]
fn over<'l>(
    by: Mechanism,
    capabilities: &Capabilities,
    pieces: &'l [Sge],
    pages: impl FnOnce() -> Option<usize>,
) -> Option<Layout<'l>> {
    match by {
        Mechanism::FragmentList
            if (1..=capabilities.max_fragments as usize).contains(&pieces.len()) =>
        {
            Some(Layout::Fragments(pieces))
        }
        Mechanism::PageList if pages()? <= capabilities.max_pages as usize => Some(Layout::Pages {
            shift: capabilities.page_shift,
            ranges: pieces,
        }),
        Mechanism::Window if let [only] = pieces => Some(Layout::Window(*only)),
        _ => None,
    }
}

/// Pages of these pieces.
fn of_pieces(capabilities: &Capabilities, pieces: &[Sge]) -> Option<usize> {
    let length = pieces
        .iter()
        .try_fold(0_u32, |sum, piece| sum.checked_add(piece.length))?;
    Shape::of(pieces.iter().copied()).pages(capabilities.page_shift, length)
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
        let pages = |pieces: &[Sge]| -> Option<Vec<Sge>> {
            let mut scratch = Scratch::new();
            let by = Mechanism::PageList;
            match scratch.lay_out_pieces(by, &caps, pieces.iter().copied())? {
                Layout::Pages { shift: 12, ranges } => Some(ranges.to_vec()),
                other => panic!("{other:?}"),
            }
        };
        for whole in [
            [piece(0x1100, 100)].as_slice(),
            &[
                piece(0x1100, 0xf00),
                piece(0x5000, 0x1000),
                piece(0x9000, 1),
            ],
            &[piece(0x1000, 0x8000)],
        ] {
            assert_eq!(pages(whole).as_deref(), Some(whole));
        }
        assert_eq!(
            pages(&[piece(0x1100, 0x700), piece(0x1800, 0x800)]),
            Some([piece(0x1100, 0xf00)].to_vec()),
            "no hole within a page"
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
            let chosen = table(&caps).choose_for(&list, offset, length);
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
        let chosen = table(&caps).choose_for(&list, 0, 400);
        assert_eq!(chosen, Err(Refused::NoStaging));
        assert!(scratch.lay_out(by, &caps, &list, 0, 300).is_some());
        assert!(table(&caps).choose_for(&list, 0, 300).is_ok());
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
        let gapped: Vec<Sge> = (0..5).map(|n| piece(0x1000 + n * 32, 16)).collect();
        for by in [
            Mechanism::FragmentList,
            Mechanism::PageList,
            Mechanism::Window,
        ] {
            let layout = scratch.lay_out_pieces(by, &caps, gapped.iter().copied());
            assert!(layout.is_none(), "{by:?}");
        }
    }

    /// Lists of random cuts: what is known of a list as its ranges come in, what is found of its parts, what is laid out
    /// and what a slow count says, is the same.
    #[test]
    fn a_shape_that_was_kept_is_the_shape_that_is_found() {
        // Of one bit pattern after another, by the generator of Knuth's MMIX.
        let mut state = 1_u64;
        let mut draw = |below: u64| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % below
        };
        let mut backing = std::vec![0_u8; 64 << 10];
        let base = backing.as_ptr().align_offset(4096);
        let caps = Capabilities {
            max_pages: 257,
            max_fragments: 257,
            page_shift: 9,
            ..capabilities(Mechanisms::all())
        };
        let (mut paged, mut odd, mut joins) = (0, 0, 0);
        for round in 0..2000 {
            let unit = if round % 2 == 0 { 256 } else { 100 };
            let memory = &mut backing[base..base + (48 << 10)];
            let mut rest = Range::of_bytes(memory, LKey(1)).unwrap();
            let mut list = PageList::new();
            for _ in 0..draw(12) {
                let length = u32::try_from(unit * (1 + draw(8))).unwrap();
                let (head, tail) = rest.split_at(length).unwrap();
                let hole = u32::try_from(draw(2) * unit * draw(4)).unwrap();
                let (_hole, tail) = tail.split_at(hole).unwrap();
                list.push(head.under(LKey(u32::from(draw(5) == 0))))
                    .unwrap();
                rest = tail;
            }
            for _ in 0..draw(3) {
                list.pop();
            }
            let length = u32::try_from(list.length()).unwrap();
            let from = [0, draw(u64::from(length) + 1)][usize::from(draw(2) == 0)];
            let length = length - u32::try_from(from).unwrap();
            let pieces: Vec<Sge> = list.slice(from, length).collect();
            let mut scratch = Scratch::new();
            let shape = list.shape(from, length);
            let by = Mechanism::PageList;
            let laid = match scratch.lay_out(by, &caps, &list, from, length) {
                Some(Layout::Pages { ranges, .. }) => Some(ranges.to_vec()),
                _ => None,
            };
            // Every page that a byte lies on, once, in order, and all of its bytes.
            let mut touched: Vec<u64> = pieces
                .iter()
                .flat_map(|piece| piece.address..piece.address + u64::from(piece.length))
                .map(|byte| byte & !511)
                .collect();
            touched.dedup();
            let least = touched.len() * 512;
            let bytes = |all: &[Sge]| -> Vec<u64> {
                all.iter()
                    .flat_map(|piece| piece.address..piece.address + u64::from(piece.length))
                    .collect()
            };
            if let Some(ranges) = &laid {
                assert_eq!(shape.pages(9, length), Some(touched.len()));
                assert_eq!(bytes(ranges), bytes(&pieces));
                paged += 1;
            } else {
                assert_eq!(shape.pages(9, length), None);
                assert!(length == 0 || least > length as usize);
                odd += 1;
            }
            let joined = scratch.joined(&list, from, length).unwrap();
            assert_eq!(joined.len(), shape.fragments());
            joins += u32::from(joined.len() < pieces.len());
            for pair in joined.windows(2) {
                let end = pair[0].address + u64::from(pair[0].length);
                assert!(end != pair[1].address || pair[0].lkey != pair[1].lkey);
            }
            assert_eq!(bytes(joined), bytes(&pieces));
        }
        assert!(
            paged > 100 && odd > 100 && joins > 100,
            "{paged} {odd} {joins}"
        );
    }
}
