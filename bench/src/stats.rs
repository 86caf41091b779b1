//! What is said about a set of samples.

/// Least, median and 99th percentile of samples, in whatever unit they are in.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Summary {
    /// The least.
    pub min: f64,
    /// The median.
    pub p50: f64,
    /// The 99th percentile. A sample is the mean over a batch, so this is not the tail of a
    /// single operation.
    pub p99: f64,
}

impl Summary {
    /// Of `samples`, in any order; `None` if there are none.
    #[must_use]
    pub fn of(mut samples: Vec<f64>) -> Option<Self> {
        samples.sort_by(f64::total_cmp);
        Some(Self {
            min: *samples.first()?,
            p50: percentile(&samples, 50)?,
            p99: percentile(&samples, 99)?,
        })
    }

    /// Every figure passed through `f`.
    #[must_use]
    pub fn map(self, f: impl Fn(f64) -> f64) -> Self {
        Self {
            min: f(self.min),
            p50: f(self.p50),
            p99: f(self.p99),
        }
    }
}

/// The median of paired ratios, and between what the true one lies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ratio {
    /// Pairs.
    pub blocks: usize,
    /// The median.
    pub p50: f64,
    /// With a confidence of 95 %, the median of all such pairs is not below this.
    pub low: f64,
    /// With the same confidence, it is not above this.
    pub high: f64,
}

impl Ratio {
    /// Of `above` over `below`, block by block; `None` if there are fewer than six pairs, which have no such interval.
    ///
    /// The interval is that of order statistics: how many of `n` values lie below their true median is binomial with a half,
    /// whatever they are distributed like.
    #[must_use]
    pub fn of(pairs: impl Iterator<Item = (f64, f64)>) -> Option<Self> {
        let mut ratios: Vec<f64> = pairs.map(|(above, below)| above / below).collect();
        ratios.sort_by(f64::total_cmp);
        let blocks = ratios.len();
        let out = outside(blocks)?;
        Some(Self {
            blocks,
            p50: percentile(&ratios, 50)?,
            low: *ratios.get(out)?,
            high: *ratios.get(blocks.checked_sub(out + 1)?)?,
        })
    }
}

/// How many of `n` sorted values may be left out at each end of an interval that still holds the median with 95 %.
fn outside(n: usize) -> Option<usize> {
    // The binomial distribution with a half, from its lower end; of n = 1000 its first term is about 1e-301.
    let mut term = 0.5_f64.powi(i32::try_from(n.min(1000)).ok()?);
    let mut below = 0.0;
    let n = n.min(1000);
    for k in 0..n {
        below += term;
        if below > 0.025 {
            return k.checked_sub(1);
        }
        term *= (n - k) as f64 / (k + 1) as f64;
    }
    None
}

/// The smallest sample that at least `percent` of the samples do not exceed (nearest rank).
fn percentile(sorted: &[f64], percent: usize) -> Option<f64> {
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    sorted.get(rank - 1).copied()
}

#[cfg(test)]
mod tests {
    use super::{Ratio, Summary};

    #[test]
    fn the_interval_of_a_median_is_that_of_the_sign_test() {
        // Tables of the sign test: of 6 pairs none may be left out at an end, of 20 five, of 40 thirteen, of 100 39.
        for (n, out) in [(6_u8, 0), (20, 5), (40, 13), (100, 39)] {
            let pairs = (0..n).rev().map(|k| (f64::from(k), 1.0));
            let ratio = Ratio::of(pairs).unwrap();
            assert_eq!(ratio.blocks, usize::from(n));
            assert_eq!(
                (ratio.low, ratio.high),
                (f64::from(out), f64::from(n - 1 - out))
            );
        }
        assert_eq!(Ratio::of([(1.0, 1.0); 5].into_iter()), None);
        assert_eq!(Ratio::of([(3.0, 2.0); 9].into_iter()).unwrap().p50, 1.5);
    }

    #[test]
    fn percentiles_are_of_nearest_rank_whatever_the_order() {
        let samples = (1..=200).rev().map(f64::from).collect();
        let summary = Summary::of(samples).unwrap();
        assert_eq!((summary.min, summary.p50, summary.p99), (1.0, 100.0, 198.0));
        let one = Summary::of(vec![7.0]).unwrap();
        assert_eq!((one.min, one.p50, one.p99), (7.0, 7.0, 7.0));
        assert_eq!(Summary::of(Vec::new()), None);
    }
}
