//! Two nodes in one thread: what the whole-system tests stand on.
//!
//! A [`World`] steps two pollers over software devices in turn, plays the control side of both, and keeps
//! the clock. Nothing in it runs by itself, so every run replays from its inputs.
#![allow(clippy::missing_panics_doc, reason = "a test that panics has failed")]

pub mod arena;
pub mod backend;
pub mod book;
pub mod dial;
pub mod hostile;
pub mod job;
pub mod lab;
pub mod lend;
pub mod maps;
pub mod mover;
pub mod node;
pub mod plot;
pub mod raw_peer;
#[cfg(feature = "verbs")]
pub mod rdma;
pub mod tap;
pub mod threads;
pub mod wireshark;
pub mod world;

pub use arena::Arena;
pub use backend::{Backend, Software};
pub use job::{Job, Jobs};
pub use lab::Lab;
pub use mover::Mover;
pub use node::{Device, Node, Ticker};
pub use plot::{Cut, Plot};
pub use raw_peer::{Inbound, RawPeer};
#[cfg(feature = "verbs")]
pub use rdma::Rdma;
pub use world::{NAMES, STAMPS, Setup, Short, World};
