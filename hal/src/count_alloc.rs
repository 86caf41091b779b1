//! A global allocator that counts what polling cores ask of it.
//!
//! A program installs it once:
//! ```
//! #[global_allocator]
//! static ALLOCATOR: o2poll_hal::count_alloc::CountAlloc = o2poll_hal::count_alloc::CountAlloc;
//! ```
//! A polling core opens a [`Watch`] when its set-up is over. From then on every allocation and every
//! free of that thread is counted, here and in the [`total`] over all threads. A count of 0 means
//! something only if [`is_live`] says that the counter counts.
#![allow(unsafe_code)]

use core::alloc::{GlobalAlloc, Layout};
use core::cell::Cell;
use core::marker::PhantomData;
use core::sync::atomic::{AtomicU64, Ordering};
use std::alloc::System;

/// The system's allocator, counting for threads that hold a [`Watch`].
#[derive(Clone, Copy, Debug, Default)]
pub struct CountAlloc;

/// While it lives, calls of this thread to the allocator are counted. Watches nest: the outer one
/// sees what the inner one sees.
#[derive(Debug)]
pub struct Watch {
    start: Counts,
    outer: bool,
    this_thread: PhantomData<*const ()>,
}

/// Calls to the allocator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Allocations and reallocations.
    pub allocations: u64,
    /// Frees.
    pub frees: u64,
}

impl Watch {
    /// Counts from now on.
    #[must_use]
    pub fn start() -> Self {
        Self {
            start: HERE.get(),
            outer: WATCHED.replace(true),
            this_thread: PhantomData,
        }
    }

    /// Calls of this thread since the start.
    #[must_use]
    pub fn counts(&self) -> Counts {
        let now = HERE.get();
        Counts {
            allocations: now.allocations.wrapping_sub(self.start.allocations),
            frees: now.frees.wrapping_sub(self.start.frees),
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        WATCHED.set(self.outer);
    }
}

/// Calls of all threads while they were watched.
#[must_use]
pub fn total() -> Counts {
    // Relaxed: counters, and a reader orders nothing by them.
    Counts {
        allocations: ALLOCATIONS.load(Ordering::Relaxed),
        frees: FREES.load(Ordering::Relaxed),
    }
}

/// Whether [`CountAlloc`] is this program's allocator and counts: allocates once, and leaves
/// [`total`] as it was.
#[must_use]
pub fn is_live() -> bool {
    std::thread::spawn(|| {
        COUNTED.set(false);
        let watch = Watch::start();
        drop(core::hint::black_box(Box::new(0_u8)));
        watch.counts()
            == Counts {
                allocations: 1,
                frees: 1,
            }
    })
    .join()
    .unwrap_or(false)
}

// SAFETY: every call goes to the system's allocator with the arguments it came with. Counting
// neither allocates nor unwinds: the thread-locals are plain cells that need no set-up and no
// destructor.
unsafe impl GlobalAlloc for CountAlloc {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(1, 0);
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(1, 0);
        // SAFETY: the caller keeps the contract of `alloc_zeroed`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(1, 0);
        // SAFETY: the caller keeps the contract of `realloc`; `block` came from the same allocator.
        unsafe { System.realloc(block, layout, size) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        count(0, 1);
        // SAFETY: the caller keeps the contract of `dealloc`; `block` came from the same allocator.
        unsafe { System.dealloc(block, layout) }
    }
}

#[inline]
fn count(allocations: u64, frees: u64) {
    if !WATCHED.get() {
        return;
    }
    let here = HERE.get();
    HERE.set(Counts {
        allocations: here.allocations.wrapping_add(allocations),
        frees: here.frees.wrapping_add(frees),
    });
    if COUNTED.get() {
        // Relaxed: as in `total`.
        ALLOCATIONS.fetch_add(allocations, Ordering::Relaxed);
        FREES.fetch_add(frees, Ordering::Relaxed);
    }
}

thread_local! {
    static WATCHED: Cell<bool> = const { Cell::new(false) };
    /// Whether this thread counts in the total: all do but the one of the self-test.
    static COUNTED: Cell<bool> = const { Cell::new(true) };
    static HERE: Cell<Counts> = const { Cell::new(Counts { allocations: 0, frees: 0 }) };
}

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);
static FREES: AtomicU64 = AtomicU64::new(0);

#[cfg(test)]
mod tests {
    /// The unit tests of this crate run on the plain system allocator; `tests/count_alloc.rs` installs
    /// the counting one.
    #[test]
    fn a_counter_that_is_not_installed_is_not_live() {
        assert!(!super::is_live());
    }
}
