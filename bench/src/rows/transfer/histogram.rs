//! Latencies, counted by size.

/// Counts by size: 16 classes to each power of two, so within 7 %.
pub(super) struct Histogram {
    counts: Vec<u32>,
    all: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self {
            counts: vec![0; 61 * 16],
            all: 0,
        }
    }
}

impl Histogram {
    #[inline]
    pub(super) fn add(&mut self, ticks: u64) {
        self.counts[Self::class(ticks)] += 1;
        self.all += 1;
    }

    pub(super) fn clear(&mut self) {
        self.counts.fill(0);
        self.all = 0;
    }

    #[inline]
    fn class(ticks: u64) -> usize {
        let power = 63 - (ticks | 16).leading_zeros();
        let within = (ticks >> (power - 4)) & 15;
        ((power - 4) * 16) as usize
            + usize::try_from(within).expect("four bits")
            + 16 * usize::from(ticks >= 16)
    }

    /// The upper end of the class in which the percentile lies.
    pub(super) fn percentile(&self, percent: u64) -> u64 {
        let wanted = (self.all * percent).div_ceil(100).max(1);
        let mut seen = 0;
        for (class, count) in self.counts.iter().enumerate() {
            seen += u64::from(*count);
            if seen >= wanted {
                return Self::end(class);
            }
        }
        0
    }

    fn end(class: usize) -> u64 {
        let (power, within) = (class / 16, class as u64 % 16);
        match power.checked_sub(1) {
            None => within,
            Some(shift) => ((16 + within + 1) << shift) - 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Histogram;

    #[test]
    fn percentiles_are_within_a_sixteenth_above() {
        for scale in [1, 7, 100, 12_345, 1 << 40] {
            let mut histogram = Histogram::default();
            for value in 1..=1000 {
                histogram.add(value * scale);
            }
            for percent in [1, 50, 99, 100] {
                let (found, exact) = (histogram.percentile(percent), percent * 10 * scale);
                assert!(
                    found >= exact && found <= exact + exact / 15,
                    "{found} {exact}"
                );
            }
            histogram.clear();
            assert_eq!(histogram.percentile(50), 0);
        }
    }

    #[test]
    fn classes_go_up_with_what_is_in_them() {
        for value in (0..5000).chain([1 << 30, (1 << 62) + 1]) {
            let class = Histogram::class(value);
            assert!(value <= Histogram::end(class), "{value}");
            assert!(class == 0 || value > Histogram::end(class - 1), "{value}");
        }
    }
}
