#![no_std]
//! The data plane of o2poll: LNet's o2iblnd in user space.
//!
//! A node has a NID, connections to other nodes, and moves PUTs and GETs of up to 1 MiB between
//! their memory by RDMA WRITE. Small messages ride inside a SEND. A sink buffer is registered for
//! one transfer, its key travels to the peer, the peer writes, and the key is dead before the
//! transfer is reported done.
//!
//! This crate has no standard library, allocator, clock, socket, thread or file. Memory is lent to it,
//! time is an argument, and the device is a type parameter. Nothing in it can panic.
//!
//! # The rooms
//! In the order in which they import each other.
//!
//! | room | what lives there |
//! |---|---|
//! | [`time`] | points in time and spans of it, in the caller's ticks |
//! | [`nic`] | the contract with a device |
//! | [`ring`] | the two lock-free rings that cores and threads talk through |
//! | [`wire`] | o2iblnd and LNet messages, byte by byte |
//! | [`pool`] | fixed slots with generations, and the ids of work requests |
//! | [`memory`] | registered memory that moves by value: ranges, page lists, message buffers |
//! | [`registration`] | windows, their keys, and which mechanism covers which memory |
//! | [`peer`] | what two nodes agree on, and what is remembered of a node |
//! | [`connection`] | credits and queues of one peer connection |
//! | [`endpoint`] | what an application submits, and the events it gets back |
//! | [`portal`] | which exported memory an incoming PUT or GET lands in |
//! | [`transfer`] | the sequence of one LNet message, every cell of it |
//! | [`poller`] | one core's loop; the only room that calls across rooms |
//! | [`counters`] | what an operator reads |
//!
//! # A GET, from end to end
//! 1. The application pushes a [`Submission`](endpoint::Submission) with its memory into a ring.
//! 2. [`Poller::poll`](poller::Poller::poll) takes it out, once an event slot is reserved for its end,
//!    and gives it its share of the queue pair, a message buffer and a window, all or nothing.
//! 3. One chain with one doorbell: REGISTER puts the next key over the memory, SEND carries GET_REQ with
//!    that key.
//! 4. The peer matches the GET to exported memory, WRITEs into ours and sends GET_DONE.
//! 5. INVALIDATE kills the key. When it has completed, the memory goes back in an
//!    [`Event`](endpoint::Event).
//!
//! # Unsafe code
//! In [`ring`] and [`memory`] only; it is denied elsewhere.
#![deny(unsafe_code)]

pub mod time;

pub mod nic;

pub mod ring;

pub mod wire;

pub mod pool;

pub mod memory;

pub mod registration;

pub mod peer;

pub mod connection;

pub mod endpoint;

pub mod portal;

pub mod transfer;

pub mod poller;

pub mod counters;
