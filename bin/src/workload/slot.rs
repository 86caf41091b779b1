//! One slot of a workload: its memory, its slice of the region, and what must be in both.

use o2poll_dataplane::endpoint::MatchBits;
use o2poll_dataplane::memory::{PageList, Range};
use o2poll_dataplane::time::Instant;

use crate::links::Over;
use crate::pattern::Pattern;

/// One transfer at a time, over and over.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) match_bits: MatchBits,
    /// Of its slice in that piece of the region.
    pub(super) offset: u32,
    /// Its memory, cut where the sizes end: the first `n` pieces make the `n`th size.
    pub(super) memory: Vec<Range<'static>>,
    pub(super) list: Option<&'static mut PageList<'static>>,
    pub(super) layers: Layers,
    /// The peer has begun a new life, and what this slot is at was begun in the old one.
    pub(super) reborn: bool,
    pub(super) round: u64,
    pub(super) state: State,
    pub(super) prepared: bool,
    /// What it does now: index of the size, and whether it is a PUT.
    pub(super) size: usize,
    pub(super) put: bool,
    pub(super) submitted: Instant,
    /// The connection that it was given to.
    pub(super) over: Over,
    /// Its connection failed, and it is to be made again.
    pub(super) again: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Idle,
    /// The source of a PUT is being written, or the sink of a GET cleared: piece, and where in it.
    Filling(usize, usize),
    Ready,
    Out,
    /// What a GET brought is being compared: piece, and where in it.
    Checking(usize, usize),
}

/// Which rounds a slice of the region consists of: the newest PUT covers its start, behind it lies the rest of
/// an older and longer one, and so on.
#[derive(Clone, Debug, Default)]
pub(super) struct Layers {
    /// End and round, newest and shortest last.
    pub(super) ends: Vec<(u64, u64)>,
}

impl Layers {
    /// Never more than there are sizes, and what lies below them all.
    pub(super) fn with_room(sizes: usize) -> Self {
        Self {
            ends: Vec::with_capacity(sizes + 1),
        }
    }

    /// A PUT of this length has landed.
    pub(super) fn put(&mut self, length: u64, round: u64) {
        while let Some((end, _)) = self.ends.last()
            && *end <= length
        {
            self.ends.pop();
        }
        self.ends.push((length, round));
    }

    /// Nothing has been PUT yet into memory that is clear.
    fn clear(&mut self) {
        self.ends.clear();
        self.ends.push((u64::MAX, CLEAR));
    }

    /// The round that byte `at` is of, and where that ends; `None` where nothing was PUT.
    pub(super) fn at(&self, at: u64) -> Option<(u64, u64)> {
        let found = self.ends.iter().rev().find(|(end, _)| at < *end)?;
        Some((found.1, found.0))
    }
}

impl Slot {
    /// The pieces come back in the order in which they were.
    pub(super) fn take_back(&mut self, list: &'static mut PageList<'static>) {
        // `memory` has room: it held them before.
        let at = self.memory.len();
        while let Some(range) = list.pop() {
            self.memory.push(range);
        }
        // What was taken were the first pieces, last one first; the rest stayed behind them.
        self.memory.rotate_left(at);
        let taken = self.memory.len() - at;
        if let Some(first) = self.memory.get_mut(..taken) {
            first.reverse();
        }
        self.list = Some(list);
    }

    /// Forgets what the peer's old life had, once nothing that was begun in it is under way or has yet to be compared.
    pub(super) fn begin_anew(&mut self) {
        if self.reborn && !matches!(self.state, State::Out | State::Checking(..)) {
            self.reborn = false;
            self.layers.clear();
        }
    }

    /// Where a piece begins in the slice.
    fn start(&self, piece: usize) -> u64 {
        let before = self.memory.iter().take(piece);
        before.map(|range| u64::from(range.sge().length)).sum()
    }

    /// One bite of the source of a PUT, or of the sink of a GET: that gets the complement of what must come, so
    /// that a GET that moves nothing is noticed.
    pub(super) fn fill(&mut self, pattern: Pattern, piece: usize, within: usize) {
        let start = self.start(piece);
        let put = self.put;
        let Some(range) = self.memory.get_mut(piece) else {
            self.state = State::Ready;
            return;
        };
        let left = range.bytes_mut().get_mut(within..).unwrap_or_default();
        let length = left.len();
        let bite = length.min(BITE);
        if let Some(bytes) = left.get_mut(..bite) {
            if put {
                pattern.fill(start + within as u64, bytes);
            } else {
                bytes.iter_mut().for_each(|byte| *byte = !*byte);
            }
        }
        self.state = if bite < length {
            State::Filling(piece, within + bite)
        } else if piece < self.size {
            State::Filling(piece + 1, 0)
        } else {
            State::Ready
        };
    }

    /// One bite of what a GET brought; how many bytes were wrong.
    pub(super) fn check(
        &mut self,
        pattern: impl Fn(u64) -> Pattern,
        piece: usize,
        within: usize,
    ) -> u64 {
        let start = self.start(piece);
        let Some(range) = self.memory.get(piece) else {
            self.state = State::Idle;
            return 0;
        };
        let left = range.bytes().get(within..).unwrap_or_default();
        let length = left.len();
        let at = start + within as u64;
        // Nothing was PUT here: nothing is known of it. Only without preparation, which there always is.
        let (round, end) = self.layers.at(at).unwrap_or((0, u64::MAX));
        let layer = usize::try_from(end - at).unwrap_or(usize::MAX);
        let bite = length.min(BITE).min(layer);
        let bytes = left.get(..bite).unwrap_or(left);
        let wrong = if round == CLEAR {
            bytes.iter().filter(|byte| **byte != 0).count() as u64
        } else {
            pattern(round).differences(at, bytes)
        };
        self.state = if bite < length {
            State::Checking(piece, within + bite)
        } else if piece < self.size {
            State::Checking(piece + 1, 0)
        } else {
            State::Idle
        };
        wrong
    }
}

/// The round of bytes that are 0.
const CLEAR: u64 = u64::MAX;

/// Bytes that one step fills, clears or compares.
const BITE: usize = 16 << 10;
