//! Memory for the life of a test: leaked, or taken back when [`reclaim`] ends.
//!
//! Pollers and devices borrow what they stand on. A test leaks it, which costs nothing; a fuzzer that
//! makes a thousand nodes a second could not.
#![allow(unsafe_code)]

use core::cell::RefCell;
use core::ptr::NonNull;

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
                // SAFETY: from a leaked box, and pushed once. By the contract of `reclaim` nobody uses
                // what was lent any more.
                drop(unsafe { Box::from_raw(place.as_ptr()) });
            }));
        }
    });
    // SAFETY: a leaked box, that nobody else knows before `reclaim` ends.
    unsafe { place.as_mut() }
}

/// Runs `body`, and frees everything that was lent in it on this thread.
///
/// # Safety
/// Nothing lent in `body`, and nothing that borrows it, is used after its end: it must not put any of it
/// into a place that outlives it. If it panics, what it lent is leaked.
pub unsafe fn reclaim(body: impl FnOnce()) {
    let before = RECLAIMED.replace(Some(Vec::new()));
    assert!(before.is_none(), "reclaims do not nest");
    let reset = Reset;
    body();
    core::mem::forget(reset);
    for free in RECLAIMED.take().unwrap_or_default() {
        free();
    }
}

/// After a panic, so that the next [`reclaim`] of this thread begins anew.
struct Reset;

impl Drop for Reset {
    fn drop(&mut self) {
        RECLAIMED.take();
    }
}

type Free = Box<dyn FnOnce()>;

std::thread_local! {
    static RECLAIMED: RefCell<Option<Vec<Free>>> = const { RefCell::new(None) };
}
