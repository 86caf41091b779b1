//! Two single-producer single-consumer rings over lent memory.
//!
//! * [`index`]: free-running indices, slices in and out. For bulk hand-over between threads.
//! * [`lap`]: the owner word inside the slot's own cache line. Where latency counts.
#![allow(unsafe_code)]

pub mod index;
pub mod lap;

pub use index::{Consumer, Indices, Producer, Slot, ring as index_ring};
pub use lap::{LapConsumer, LapProducer, LapSlot, Message, Returned, ring as lap_ring};
