//! What verified transfers carry: bytes that tell which slot, which round and which place they belong to.

/// A reproducible stream of numbers (splitmix64).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) const fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(GOLDEN);
        mix(self.0)
    }

    /// A number below `bound`, which is not 0; the bias is below 2^-32 for what is asked here.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        let product = u128::from(self.next()) * u128::from(bound);
        u64::try_from(product >> 64).unwrap_or(0)
    }
}

/// The contents of one round of one slot: byte `i` is always the same, whatever part of it is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pattern(u64);

impl Pattern {
    pub(crate) const fn new(seed: u64, slot: u64, round: u64) -> Self {
        Self(mix(
            seed ^ mix(slot.wrapping_mul(GOLDEN) ^ mix(round.wrapping_add(1)))
        ))
    }

    const fn word(self, index: u64) -> [u8; 8] {
        // One multiplication a word: this has to keep up with memory.
        let x = self.0 ^ index.wrapping_mul(GOLDEN);
        (x ^ (x >> 29)).to_le_bytes()
    }

    /// Writes the bytes from `offset` on, a multiple of 8.
    pub(crate) fn fill(self, offset: u64, bytes: &mut [u8]) {
        let (words, rest) = bytes.as_chunks_mut::<8>();
        let mut index = offset / 8;
        for word in words {
            *word = self.word(index);
            index += 1;
        }
        for (byte, value) in rest.iter_mut().zip(self.word(index)) {
            *byte = value;
        }
    }

    /// How many of `bytes`, which begin at `offset`, a multiple of 8, are not what they must be.
    pub(crate) fn differences(self, offset: u64, bytes: &[u8]) -> u64 {
        let (words, rest) = bytes.as_chunks::<8>();
        let mut index = offset / 8;
        let mut wrong = 0;
        for word in words {
            let right = self.word(index);
            if *word != right {
                wrong += differing(word, &right);
            }
            index += 1;
        }
        wrong + differing(rest, &self.word(index))
    }
}

fn differing(found: &[u8], right: &[u8]) -> u64 {
    found
        .iter()
        .zip(right)
        .map(|(a, b)| u64::from(a != b))
        .sum()
}

const fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

#[cfg(test)]
mod tests {
    use super::{Pattern, Random};

    #[test]
    fn a_part_is_the_same_as_in_the_whole() {
        let pattern = Pattern::new(1, 2, 3);
        let mut whole = [0; 1003];
        pattern.fill(0, &mut whole);
        for offset in [0_usize, 8, 504, 1000] {
            let mut part = vec![0; 1003 - offset];
            pattern.fill(offset as u64, &mut part);
            assert_eq!(part, whole[offset..]);
            assert_eq!(pattern.differences(offset as u64, &whole[offset..]), 0);
        }
    }

    #[test]
    fn every_wrong_byte_is_found() {
        let pattern = Pattern::new(1, 2, 3);
        for at in 0..1003 {
            let mut bytes = [0; 1003];
            pattern.fill(0, &mut bytes);
            bytes[at] ^= 1;
            assert_eq!(pattern.differences(0, &bytes), 1, "{at}");
        }
    }

    #[test]
    fn another_seed_slot_round_or_place_is_another_content() {
        let mut bytes = [0; 4096];
        Pattern::new(1, 2, 3).fill(0, &mut bytes);
        for other in [
            Pattern::new(2, 2, 3),
            Pattern::new(1, 3, 3),
            Pattern::new(1, 2, 4),
            Pattern::new(1, 3, 2),
        ] {
            assert!(other.differences(0, &bytes) > 4000);
        }
        assert!(Pattern::new(1, 2, 3).differences(8, &bytes) > 3500);
    }

    #[test]
    fn bounded_numbers_are_below_the_bound_and_reach_all_of_it() {
        let mut random = Random::new(1);
        let mut seen = [false; 7];
        for _ in 0..1000 {
            seen[random.below(7) as usize] = true;
        }
        assert_eq!(seen, [true; 7]);
    }
}
