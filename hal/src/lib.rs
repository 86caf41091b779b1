//! What a machine has, for o2poll: pinned memory, cores, clocks. And what it would put on a wire.
//!
//! The data plane knows no allocator, thread, clock or file; this crate is where they come from.
//! Everything here is called at start or from a control thread, except [`clock::Clock::now`], which
//! is one instruction, and [`count_alloc`], which is there to prove that nobody calls it.
//!
//! | room | what lives there |
//! |---|---|
//! | [`arena`] | one mapping per core or node that the device may touch, cut into [`Range`](o2poll_dataplane::memory::Range)s |
//! | [`cores`] | which cores there are, pinning, and how often a polling core was interrupted |
//! | [`clock`] | the TSC as the data plane's clock, and the wall-clock stamp of an incarnation |
//! | [`copy`] | the copy that the software device moves bytes with |
//! | [`count_alloc`] | a global allocator that counts what polling cores ask of it |
//! | [`roce`] | RoCEv2 frames, for a capture of what the software device moves |
//! | [`pcap`] | capture files |
//! | `verbs` | RDMA devices by libibverbs, with the feature of that name |
//!
//! Unsafe code is in [`arena`] (mappings), [`copy`], [`clock`] (one instruction), [`count_alloc`] (a global
//! allocator is an unsafe trait) and `verbs` (a C library), and nowhere else.

pub mod arena;
pub mod clock;
pub mod copy;
pub mod cores;
pub mod count_alloc;
pub mod pcap;
mod procfs;
pub mod roce;
#[cfg(feature = "verbs")]
pub mod verbs;
