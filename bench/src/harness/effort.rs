//! How much is measured.

use core::time::Duration;

use super::LEAST_BATCH;

/// How much is measured.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Samples per contender.
    pub samples: usize,
    /// Samples that are taken even when time is up.
    pub least_samples: usize,
    /// Longest time for a row, warming up apart.
    pub at_most: Duration,
    /// Least length of a sample on one core.
    pub sample_here: Duration,
    /// Least length of a sample on two cores.
    pub sample_across: Duration,
    /// Least operations per sample; [`LEAST_BATCH`] for anything that is looked at.
    pub least_batch: u64,
    /// How often each length of a batch is tried before it is found too short.
    pub tries: u32,
}

impl Effort {
    /// For figures that are reported.
    #[must_use]
    pub const fn full() -> Self {
        Self {
            samples: 400,
            least_samples: 40,
            at_most: Duration::from_secs(4),
            sample_here: Duration::from_micros(20),
            sample_across: Duration::from_micros(200),
            least_batch: LEAST_BATCH,
            tries: 5,
        }
    }

    /// For a look: a fraction of a second per row.
    #[must_use]
    pub const fn quick() -> Self {
        Self {
            samples: 60,
            least_samples: 10,
            at_most: Duration::from_millis(400),
            sample_here: Duration::from_micros(20),
            sample_across: Duration::from_micros(100),
            least_batch: LEAST_BATCH,
            tries: 5,
        }
    }
}
