//! The program.

mod cli;
#[cfg(any(feature = "verbs", test))]
mod output;
mod tools;

use std::process::ExitCode;

/// Counts what polling cores ask of the allocator; the report of a run says 0.
#[global_allocator]
static ALLOCATOR: o2poll_hal::count_alloc::CountAlloc = o2poll_hal::count_alloc::CountAlloc;

fn main() -> ExitCode {
    cli::main()
}
