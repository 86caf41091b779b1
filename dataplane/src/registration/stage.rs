//! Staging buffers: where a peer writes what no key can bring to its sink.

use crate::memory::Range;
use crate::wire::lnet::MTU;

/// Bytes of a staging buffer: the longest transfer.
pub const STAGE_BYTES: u32 = MTU;

/// Most bytes that are copied out of one staging buffer per poll, so that timers and other connections go on.
pub const SLICE: u32 = 64 << 10;

/// A staging buffer that a transfer holds.
#[derive(Debug)]
pub struct Stage<'a> {
    range: Range<'a>,
    copied: u32,
}

impl<'a> Stage<'a> {
    /// Its memory.
    #[must_use]
    pub const fn range(&self) -> &Range<'a> {
        &self.range
    }

    /// Bytes that have been copied out.
    #[must_use]
    pub const fn copied(&self) -> u32 {
        self.copied
    }

    /// So many more have been.
    pub const fn advance(&mut self, bytes: u32) {
        self.copied = self.copied.saturating_add(bytes);
    }
}

/// Staging buffers, free and lent out, over a lent slice. As with windows, our own transfers never take the peers'
/// share of them: what a peer of ours waits for could be the one we hold while we wait for it.
#[derive(Debug)]
pub struct Stages<'a> {
    places: &'a mut [Option<Range<'a>>],
    /// Those below are present.
    top: usize,
    total: usize,
    own: usize,
    peers: usize,
    /// log2 of what every address is a multiple of.
    alignment: u32,
}

impl<'a> Stages<'a> {
    /// Over these buffers; places without one, and shorter ones, are not used.
    pub fn new(places: &'a mut [Option<Range<'a>>]) -> Self {
        let mut stages = Self {
            places,
            top: 0,
            total: 0,
            own: 0,
            peers: 0,
            alignment: STAGE_BYTES.trailing_zeros(),
        };
        for at in 0..stages.places.len() {
            let range = stages.places.get_mut(at).and_then(Option::take);
            if let Some(range) = range
                && range.sge().length >= STAGE_BYTES
            {
                let zeros = range.sge().address.trailing_zeros();
                stages.alignment = stages.alignment.min(zeros);
                stages.put(range);
                stages.total = stages.total.wrapping_add(1);
            }
        }
        stages
    }

    /// How many there are.
    #[must_use]
    pub const fn total(&self) -> usize {
        self.total
    }

    /// log2 of what the address of each is a multiple of, up to its length; `None` where there are none.
    #[must_use]
    pub const fn alignment(&self) -> Option<u8> {
        match self.total {
            0 => None,
            _ => Some(self.alignment.to_le_bytes()[0]),
        }
    }

    /// How many are lent out.
    #[must_use]
    pub const fn missing(&self) -> usize {
        self.total.saturating_sub(self.top)
    }

    /// Whether `take` would find one for a transfer of ours (`own`), or of a peer.
    #[must_use]
    pub const fn has(&self, own: bool) -> bool {
        let half = self.total.wrapping_shr(1);
        let (used, share) = if own {
            (self.own, self.total.wrapping_sub(half))
        } else {
            (self.peers, half)
        };
        // A single one has no half to keep free.
        self.top != 0 && (used < share || share == 0)
    }

    /// One for a transfer of ours, or of a peer.
    pub fn take(&mut self, own: bool) -> Option<Stage<'a>> {
        if !self.has(own) {
            return None;
        }
        let below = self.top.checked_sub(1)?;
        let range = self.places.get_mut(below)?.take()?;
        self.top = below;
        let used = if own { &mut self.own } else { &mut self.peers };
        *used = used.wrapping_add(1);
        Some(Stage { range, copied: 0 })
    }

    /// One comes back. No key of it is alive.
    pub fn give(&mut self, stage: Stage<'a>, own: bool) {
        let used = if own { &mut self.own } else { &mut self.peers };
        *used = used.saturating_sub(1);
        self.put(stage.range);
    }

    fn put(&mut self, range: Range<'a>) {
        if let Some(place) = self.places.get_mut(self.top) {
            *place = Some(range);
            self.top = self.top.wrapping_add(1);
        }
    }
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::{STAGE_BYTES, Stages};
    use crate::memory::Range;
    use crate::nic::LKey;
    use std::vec::Vec;

    fn buffers(memory: &mut [Vec<u8>]) -> Vec<Option<Range<'_>>> {
        memory
            .iter_mut()
            .map(|bytes| Range::of_bytes(bytes, LKey(1)))
            .collect()
    }

    #[test]
    fn our_own_transfers_leave_the_peers_their_half() {
        for (count, expected) in [(0, (0, 0)), (1, (1, 0)), (2, (1, 1)), (5, (3, 2))] {
            let mut memory = std::vec![std::vec![0_u8; STAGE_BYTES as usize]; count];
            let mut places = buffers(&mut memory);
            let mut stages = Stages::new(&mut places);
            let own: Vec<_> = core::iter::from_fn(|| stages.take(true)).collect();
            let peers: Vec<_> = core::iter::from_fn(|| stages.take(false)).collect();
            assert_eq!((own.len(), peers.len()), expected);
            assert_eq!(stages.missing(), count);
            for stage in own {
                stages.give(stage, true);
            }
            for stage in peers {
                stages.give(stage, false);
            }
            assert_eq!(stages.missing(), 0);
            // A single one goes to whoever comes first.
            assert_eq!(stages.has(false), count != 0);
        }
    }

    #[test]
    fn a_short_buffer_is_not_used() {
        let mut memory = std::vec![std::vec![0_u8; STAGE_BYTES as usize - 1]];
        let mut places = buffers(&mut memory);
        assert_eq!(Stages::new(&mut places).total(), 0);
    }
}
