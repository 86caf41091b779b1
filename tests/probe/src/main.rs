//! Links only if no code of the data plane or the software device can panic or allocate.
//!
//! The panic handler calls a function that does not exist, and there is no allocator. Whatever can
//! reach one of them is an error of the linker. [`rooms`] has the functions of each room, kept
//! alive with arguments that the optimiser cannot know. `cargo xtask probe` builds this, and then
//! builds it once more with each planted mistake, which must not link; `cargo xtask locate` names the
//! lines that can panic.
#![no_std]
#![no_main]

mod engine;
mod plants;
mod rooms;

use core::panic::PanicInfo;

// The C library starts the program and has memcpy(3).
#[link(name = "c")]
unsafe extern "C" {}

/// Where the C library begins.
#[unsafe(no_mangle)]
pub extern "C" fn main() -> i32 {
    rooms::keep();
    engine::keep();
    plants::keep();
    0
}

#[cfg(not(feature = "locate"))]
#[panic_handler]
fn panic(_: &PanicInfo<'_>) -> ! {
    unsafe extern "C" {
        /// Defined nowhere.
        fn dataplane_hot_path_can_panic() -> !;
    }
    // SAFETY: never called, since a program that could call it does not link.
    unsafe { dataplane_hot_path_can_panic() }
}

#[cfg(feature = "locate")]
#[panic_handler]
fn panic(_: &PanicInfo<'_>) -> ! {
    loop {
        core::hint::spin_loop();
    }
}
