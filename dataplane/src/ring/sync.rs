//! The atomics and cells of both rings: the core's own, or loom's under `--cfg loom`.

#[cfg(not(loom))]
pub(super) use core::sync::atomic::{AtomicU32, AtomicUsize};

#[cfg(loom)]
pub(super) use loom::sync::atomic::{AtomicU32, AtomicUsize};

#[cfg(not(loom))]
use core::sync::atomic::Ordering;

#[cfg(loom)]
pub use self::plant::weaken;

/// The happens-before edges of the rings. Each has one Release store and one Acquire load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(loom), allow(unreachable_pub))]
pub enum Edge {
    /// The index ring's tail: what the producer wrote reaches the consumer.
    Tail,
    /// The index ring's head: what the consumer emptied comes back to the producer.
    Head,
    /// The lap word of a slot: the message reaches the consumer.
    Lap,
    /// The lap ring's returned index: the slots come back to the producer.
    Returned,
}

/// One of the two ends of an [`Edge`].
#[cfg(loom)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The store that publishes.
    Release,
    /// The load that sees.
    Acquire,
}

/// The order of the store that publishes over `edge`.
///
/// `--cfg o2poll_plant="lap"` is a mistake planted on purpose: a sanitizer that does not see the race
/// it makes proves nothing.
#[cfg(not(loom))]
#[inline(always)]
pub(super) const fn release(edge: Edge) -> Ordering {
    match edge {
        Edge::Lap if cfg!(o2poll_plant = "lap") => Ordering::Relaxed,
        Edge::Tail | Edge::Head | Edge::Lap | Edge::Returned => Ordering::Release,
    }
}

/// The order of the load that sees over `edge`.
#[cfg(not(loom))]
#[inline(always)]
pub(super) const fn acquire(_edge: Edge) -> Ordering {
    Ordering::Acquire
}

#[cfg(loom)]
pub(super) use self::plant::{acquire, release};

/// A value that its two users reach by agreement.
#[cfg(not(loom))]
#[repr(transparent)]
pub(super) struct Cell<T>(core::cell::UnsafeCell<T>);

#[cfg(not(loom))]
impl<T> Cell<T> {
    pub(super) const fn new(value: T) -> Self {
        Self(core::cell::UnsafeCell::new(value))
    }

    /// Lends the value for reading. What is done with the pointer is the caller's proof.
    #[inline(always)]
    pub(super) fn read<R>(&self, with: impl FnOnce(*const T) -> R) -> R {
        with(self.0.get().cast_const())
    }

    /// Lends the value for writing. What is done with the pointer is the caller's proof.
    #[inline(always)]
    pub(super) fn write<R>(&self, with: impl FnOnce(*mut T) -> R) -> R {
        with(self.0.get())
    }
}

/// As above; loom fails the model when two threads hold the value without an edge between them.
#[cfg(loom)]
pub(super) struct Cell<T>(loom::cell::UnsafeCell<T>);

#[cfg(loom)]
impl<T> Cell<T> {
    pub(super) fn new(value: T) -> Self {
        Self(loom::cell::UnsafeCell::new(value))
    }

    pub(super) fn read<R>(&self, with: impl FnOnce(*const T) -> R) -> R {
        self.0.with(with)
    }

    pub(super) fn write<R>(&self, with: impl FnOnce(*mut T) -> R) -> R {
        self.0.with_mut(with)
    }
}

/// Asks for a line, to be written soon: it comes while something else is done.
#[inline(always)]
pub(super) fn prefetch_to_write<T>(line: *const T) {
    #[cfg(all(target_arch = "x86_64", not(any(loom, miri))))]
    // SAFETY: a prefetch never faults and changes nothing; a processor without this one does nothing.
    unsafe {
        core::arch::asm!("prefetchw [{}]", in(reg) line, options(nostack, preserves_flags));
    }
    #[cfg(not(all(target_arch = "x86_64", not(any(loom, miri)))))]
    let _ = line;
}

/// `const fn`, but not under loom, whose atomics are made at run time.
macro_rules! const_unless_loom {
    ($(#[$attribute:meta])* $visibility:vis fn $($rest:tt)*) => {
        #[cfg(not(loom))]
        $(#[$attribute])*
        $visibility const fn $($rest)*
        #[cfg(loom)]
        $(#[$attribute])*
        $visibility fn $($rest)*
    };
}
pub(super) use const_unless_loom;

/// Planted mistakes: a model that cannot tell Release from Relaxed proves nothing.
#[cfg(loom)]
mod plant {
    extern crate std;

    use core::cell::Cell;
    use core::sync::atomic::Ordering;

    use super::{Edge, Side};

    std::thread_local! {
        // loom runs the threads of a model as coroutines of the one thread that runs the model.
        static WEAKENED: Cell<Option<(Edge, Side)>> = const { Cell::new(None) };
    }

    /// Makes one access Relaxed for the models that this thread runs from now on.
    pub fn weaken(edge: Edge, side: Side) {
        WEAKENED.set(Some((edge, side)));
    }

    pub(in super::super) fn release(edge: Edge) -> Ordering {
        order(edge, Side::Release, Ordering::Release)
    }

    pub(in super::super) fn acquire(edge: Edge) -> Ordering {
        order(edge, Side::Acquire, Ordering::Acquire)
    }

    fn order(edge: Edge, side: Side, sound: Ordering) -> Ordering {
        if WEAKENED.get() == Some((edge, side)) {
            Ordering::Relaxed
        } else {
            sound
        }
    }
}
