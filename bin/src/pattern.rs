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
        // Little for a word: this has to keep up with memory.
        let x = self.0.wrapping_add(index.wrapping_mul(GOLDEN));
        let x = (x ^ (x >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
        (x ^ (x >> 32)).to_le_bytes()
    }

    /// Writes the bytes from `offset` on.
    pub(crate) fn fill(self, offset: u64, bytes: &mut [u8]) {
        let (head, rest, mut index) = self.split(offset, bytes.len());
        let (first, bytes) = bytes.split_at_mut(rest);
        for (byte, value) in first.iter_mut().zip(head.into_iter().skip(skew(offset))) {
            *byte = value;
        }
        let (words, last) = bytes.as_chunks_mut::<8>();
        for word in words {
            *word = self.word(index);
            index += 1;
        }
        for (byte, value) in last.iter_mut().zip(self.word(index)) {
            *byte = value;
        }
    }

    /// How many of `bytes`, which begin at `offset`, are not what they must be.
    pub(crate) fn differences(self, offset: u64, bytes: &[u8]) -> u64 {
        let (head, rest, mut index) = self.split(offset, bytes.len());
        let (first, bytes) = bytes.split_at(rest);
        let mut wrong = differing(first, head.get(skew(offset)..).unwrap_or_default());
        let (words, last) = bytes.as_chunks::<8>();
        for word in words {
            let right = self.word(index);
            if *word != right {
                wrong += differing(word, &right);
            }
            index += 1;
        }
        wrong + differing(last, &self.word(index))
    }

    /// The word that `offset` is in, how many of `length` bytes belong to it if it is not at its start, and the
    /// index of the first word of the others.
    fn split(self, offset: u64, length: usize) -> ([u8; 8], usize, u64) {
        let skew = skew(offset);
        let rest = if skew == 0 { 0 } else { length.min(8 - skew) };
        (self.word(offset / 8), rest, offset.div_ceil(8))
    }
}

/// Where in its word an offset is.
const fn skew(offset: u64) -> usize {
    (offset % 8) as usize
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
        for offset in (0..40).chain(960..1003_usize) {
            for length in (0..40).chain([1003 - offset]) {
                let length = length.min(1003 - offset);
                let right = &whole[offset..offset + length];
                let mut part = vec![0; length];
                pattern.fill(offset as u64, &mut part);
                assert_eq!(part, right, "{offset} {length}");
                assert_eq!(pattern.differences(offset as u64, &part), 0);
            }
        }
    }

    #[test]
    fn every_wrong_byte_is_found() {
        let pattern = Pattern::new(1, 2, 3);
        for offset in [0, 1, 5, 8, 15] {
            for at in 0..203 {
                let mut bytes = [0; 203];
                pattern.fill(offset, &mut bytes);
                bytes[at] ^= 1;
                assert_eq!(pattern.differences(offset, &bytes), 1, "{offset} {at}");
            }
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
            seen[usize::try_from(random.below(7)).unwrap()] = true;
        }
        assert_eq!(seen, [true; 7]);
    }
}
