#![no_std]
//! The data plane of o2poll: LNet's o2iblnd in user space.
//!
//! No standard library, no allocator, no clock, no socket, no thread. See the rooms below, in the
//! order in which they import each other.

pub mod time;

pub mod nic;

pub mod ring;

pub mod wire;

pub mod pool;

pub mod memory;

pub mod registration;

pub mod connection;

pub mod peer;

pub mod portal;

pub mod endpoint;

pub mod transfer;

pub mod poller;

pub mod counters;
