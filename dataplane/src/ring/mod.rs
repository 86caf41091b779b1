//! Two single-producer single-consumer rings over lent memory.
//!
//! * [`index`]: free-running indices, slices in and out. For bulk hand-over between threads.
//! * [`lap`]: the owner word inside the slot's own cache line. Where latency counts.
//!
//! Neither allocates, waits, or panics; both are generic over nothing but what they carry. Every
//! atomic access names its partner, and `tests/loom_rings.rs` weakens each of them in turn to show
//! that the model notices.
#![allow(unsafe_code)]

pub mod index;
pub mod lap;
mod sync;

pub use index::{Consumer, Drain, Indices, Producer, Reserved, Slot, ring as index_ring};
pub use lap::{LapConsumer, LapProducer, LapSlot, Message, Returned, ring as lap_ring};
#[cfg(loom)]
pub use sync::{Edge, Side, weaken};
