//! Memory for the life of a test: leaked, or taken back at the end of [`alone`].
//!
//! Pollers and devices borrow what they stand on. A test leaks it, which costs nothing; a fuzzer that
//! makes a thousand nodes a second could not.
#![allow(unsafe_code)]

use core::cell::RefCell;
use core::ptr::NonNull;
use std::sync::Once;

/// A slice that lives for ever.
pub fn lend<T: 'static>(count: usize, make: impl FnMut() -> T) -> &'static mut [T] {
    lend_all(core::iter::repeat_with(make).take(count).collect())
}

/// One value that lives for ever.
pub fn lend_one<T: 'static>(value: T) -> &'static mut T {
    let [one] = lend_all(vec![value]) else {
        unreachable!("one was given")
    };
    one
}

/// Values that live for ever.
pub fn lend_all<T: 'static>(values: Vec<T>) -> &'static mut [T] {
    let mut place = NonNull::from(Box::leak(values.into_boxed_slice()));
    RECLAIMED.with_borrow_mut(|reclaimed| {
        if let Some(reclaimed) = reclaimed {
            reclaimed.push(Box::new(move || {
                // SAFETY: from a leaked box, and pushed once. What was lent lived in the worlds and labs of
                // the body of `alone`, which are gone.
                drop(unsafe { Box::from_raw(place.as_ptr()) });
            }));
        }
    });
    // SAFETY: a leaked box, that nobody else knows before `alone` ends.
    unsafe { place.as_mut() }
}

/// Runs `body`, and frees everything that was lent in it on this thread.
///
/// Its worlds and labs must end in it, and nothing lent in it may be put into a place that outlives it. What comes
/// out is a number or two, so `Copy`, which no lent `&mut` is. If it panics, what it lent is leaked.
pub fn alone<T: Copy>(body: impl FnOnce() -> T) -> T {
    let before = RECLAIMED.replace(Some(Vec::new()));
    assert!(before.is_none(), "these do not nest");
    KEEP.call_once(|| drop(core::hint::black_box(vec![0_u8; 31 << 20])));
    let reset = Reset;
    let result = body();
    core::mem::forget(reset);
    for free in RECLAIMED.take().unwrap_or_default() {
        free();
    }
    result
}

/// After a panic, so that the next [`alone`] of this thread begins anew.
struct Reset;

impl Drop for Reset {
    fn drop(&mut self) {
        RECLAIMED.take();
    }
}

/// glibc's allocator gives a large block back to the kernel when it is freed, until it has seen that so large a block does
/// not stay. Faulting the pages in again would be most of what a small world takes.
static KEEP: Once = Once::new();

type Free = Box<dyn FnOnce()>;

std::thread_local! {
    static RECLAIMED: RefCell<Option<Vec<Free>>> = const { RefCell::new(None) };
}
