//! Memory with its image: what every byte of it ought to be, holes and guards included.

use o2poll_dataplane::memory::PageList;
use o2poll_dataplane::nic::{Capabilities, Mechanisms};

use crate::arena::{FILL, GUARD};
use crate::{Arena, Setup};

/// How a buffer is cut into fragments.
#[derive(Clone, Copy, Debug)]
pub struct Cut {
    /// Offset of the first byte in its page.
    pub offset: u16,
    /// Bytes of a fragment; the last may be shorter. Raised where it would take more than 257.
    pub piece: u32,
    /// The first fragment is so much shorter.
    pub trim: u32,
    /// Bytes between fragments.
    pub hole: u32,
}

impl Cut {
    /// One fragment.
    #[must_use]
    pub const fn flat(offset: u16) -> Self {
        Self {
            offset,
            piece: u32::MAX,
            trim: 0,
            hole: 0,
        }
    }

    /// Pieces of so many bytes at odd addresses, 8 bytes apart, the first `trim` bytes shorter.
    #[must_use]
    pub const fn gapped(piece: u32, trim: u32) -> Self {
        Self {
            offset: 3,
            piece,
            trim,
            hole: 8,
        }
    }

    /// Whole pages that do not touch, from `offset` in the first.
    #[must_use]
    pub const fn pages(offset: u16) -> Self {
        Self {
            offset,
            piece: 4096,
            trim: offset as u32,
            hole: 4096,
        }
    }

    /// Lengths of the fragments of a buffer of `total` bytes.
    #[must_use]
    pub fn lengths(&self, total: u32) -> Vec<u32> {
        let piece = self.piece.max(total.div_ceil(256)).max(1);
        let mut left = total;
        let mut next = piece - self.trim.min(piece - 1);
        let mut lengths = Vec::new();
        while left != 0 {
            let length = next.min(left);
            lengths.push(length);
            left -= length;
            next = piece;
        }
        lengths
    }
}

/// The image of a buffer.
#[derive(Clone, Debug)]
pub struct Plot {
    from: u64,
    image: Vec<u8>,
    /// What was there before what is awaited.
    before: Vec<u8>,
    /// Address and length of each fragment.
    pieces: Vec<(u64, u32)>,
}

impl Plot {
    /// Takes a buffer from the arena and draws its image.
    #[must_use]
    pub fn new(arena: &mut Arena, total: u32, cut: Cut) -> (&'static mut PageList<'static>, Self) {
        let list = arena.list(&cut.lengths(total), cut.hole, usize::from(cut.offset));
        let pieces: Vec<(u64, u32)> = list
            .pieces()
            .iter()
            .map(|piece| (piece.address, piece.length))
            .collect();
        let plot = match (pieces.first(), pieces.last()) {
            (Some((start, _)), Some((end, length))) => {
                let from = start - GUARD as u64;
                let to = end + u64::from(*length) + GUARD as u64;
                let length = usize::try_from(to - from).expect("small");
                Self {
                    from,
                    image: vec![FILL; length],
                    before: vec![FILL; length],
                    pieces,
                }
            }
            _ => Self {
                from: 0,
                image: Vec::new(),
                before: Vec::new(),
                pieces,
            },
        };
        (list, plot)
    }

    /// Draws bytes that are at an offset of the buffer.
    pub fn write(&mut self, offset: u32, bytes: &[u8]) {
        self.await_bytes(offset, bytes);
        self.before.clone_from(&self.image);
    }

    /// Draws bytes that will be at an offset of the buffer.
    pub fn await_bytes(&mut self, offset: u32, bytes: &[u8]) {
        let mut rest = bytes;
        for (address, length) in self.within(offset, bytes.len()) {
            let at = usize::try_from(address - self.from).expect("small");
            let (head, tail) = rest.split_at(length as usize);
            self.image[at..at + head.len()].copy_from_slice(head);
            rest = tail;
        }
        assert!(rest.is_empty(), "beyond the buffer");
    }

    /// Panics unless memory is as drawn, holes and guards included.
    pub fn check(&self, arena: &Arena, what: &str) {
        self.compare(arena, what, |at, byte| byte == self.image[at]);
    }

    /// Panics unless each byte is as drawn or as before: of a transfer that came to nothing, or was cut short.
    pub fn check_loosely(&self, arena: &Arena, what: &str) {
        self.compare(arena, what, |at, byte| {
            byte == self.image[at] || byte == self.before[at]
        });
    }

    fn compare(&self, arena: &Arena, what: &str, is_right: impl Fn(usize, u8) -> bool) {
        if self.image.is_empty() {
            return;
        }
        let there = arena.peek(self.from, self.image.len());
        if let Some(at) = (0..there.len()).find(|at| !is_right(*at, there[*at])) {
            panic!(
                "{what}: byte {at} of {} is {:#x}, not {:#x}; fragments {:x?} from {:#x}",
                there.len(),
                there[at],
                self.image[at],
                self.pieces,
                self.from
            );
        }
    }

    /// Whether a node of this kind can be a sink for a part of the buffer: the rules of the design, said once more.
    #[must_use]
    pub fn has_way(&self, node: &Setup, max_frags: u16, offset: u32, length: u32) -> bool {
        let device = &node.profile.capabilities;
        let exposed = node.registration.expose_arena;
        let parts = self.within(offset, length as usize);
        let mut runs = 0;
        let mut end = 0;
        for (address, length) in parts {
            runs += u16::from(address != end);
            end = address + u64::from(length);
        }
        let has = |mechanism| device.mechanisms.contains(mechanism);
        // In the largest pages that every staging buffer begins on.
        let largest = u32::try_from(node.stage_align).expect("no more than its length");
        let over_stage = exposed
            || has(Mechanisms::FRAGMENTS) && device.max_fragments != 0
            || has(Mechanisms::PAGES) && length.div_ceil(largest) <= device.max_pages
            || has(Mechanisms::WINDOW)
            || has(Mechanisms::MAPPINGS) && length.div_ceil(4096) <= device.max_pages;
        self.has_key(device, offset, length)
            || exposed && runs <= max_frags
            || node.shape.staging != 0 && over_stage
    }

    /// Whether one key of such a device can lie over a part of the buffer.
    fn has_key(&self, device: &Capabilities, offset: u32, length: u32) -> bool {
        let mut runs: Vec<(u64, u64)> = Vec::new();
        for (address, length) in self.within(offset, length as usize) {
            let end = address + u64::from(length);
            match runs.last_mut() {
                Some((_, last)) if *last == address => *last = end,
                _ => runs.push((address, end)),
            }
        }
        let page = 1_u64 << device.page_shift;
        let pages: u64 = runs
            .iter()
            .map(|(from, to)| to.div_ceil(page) - from / page)
            .sum();
        let shaped = runs.iter().skip(1).all(|(from, _)| from % page == 0)
            && runs.iter().rev().skip(1).all(|(_, to)| to % page == 0);
        let has = |mechanism| device.mechanisms.contains(mechanism);
        has(Mechanisms::FRAGMENTS) && runs.len() <= device.max_fragments as usize
            || device
                .mechanisms
                .intersects(Mechanisms::PAGES | Mechanisms::MAPPINGS)
                && shaped
                && pages <= u64::from(device.max_pages)
            || has(Mechanisms::WINDOW) && runs.len() == 1
    }

    /// Address and length of the parts of fragments that a part of the buffer lies in.
    fn within(&self, offset: u32, length: usize) -> Vec<(u64, u32)> {
        let (mut skip, mut left) = (offset, u32::try_from(length).expect("small"));
        let mut parts = Vec::new();
        for (address, length) in &self.pieces {
            let from = skip.min(*length);
            skip -= from;
            let take = (length - from).min(left);
            left -= take;
            if take != 0 {
                parts.push((address + u64::from(from), take));
            }
        }
        parts
    }
}

/// Bytes that look like no others.
#[must_use]
pub fn noise(length: u32, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    core::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    })
    .flatten()
    .take(length as usize)
    .collect()
}
