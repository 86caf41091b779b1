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

/// The smallest sample that at least `percent` of the samples do not exceed (nearest rank).
fn percentile(sorted: &[f64], percent: usize) -> Option<f64> {
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    sorted.get(rank - 1).copied()
}

#[cfg(test)]
mod tests {
    use super::Summary;

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
