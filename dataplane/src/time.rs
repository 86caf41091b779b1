//! Points in time and spans of it, in ticks of a clock that the caller owns.
//!
//! The data plane never reads a clock: every call that depends on time is given an
//! [`Instant`]. Ticks are whatever the caller's clock counts (TSC reference cycles in
//! production, plain numbers in a simulation). `core::time::Duration` is not used since its
//! arithmetic can panic; everything here saturates.

/// A point in time, in ticks since an epoch of the caller's choosing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Instant(pub u64);

/// A span of time, in ticks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticks(pub u64);

impl Instant {
    /// The far end of time: a deadline that never comes.
    pub const NEVER: Self = Self(u64::MAX);

    /// The instant `span` later, or [`Instant::NEVER`] where that cannot be told.
    #[must_use]
    pub const fn after(self, span: Ticks) -> Self {
        Self(self.0.saturating_add(span.0))
    }

    /// Ticks from `earlier` to `self`; zero if `earlier` is the later one.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Ticks {
        Ticks(self.0.saturating_sub(earlier.0))
    }
}
