#![no_std]
//! The data plane of o2poll: LNet's o2iblnd in user space.
//!
//! No standard library, no allocator, no clock, no socket, no thread. See the rooms below, in the
//! order in which they import each other.

pub mod counters;
pub mod endpoint;
pub mod memory;
pub mod nic;
pub mod peer;
pub mod pool;
pub mod ring;
pub mod time;
pub mod wire;
