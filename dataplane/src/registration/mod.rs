//! Windows, their keys, and which mechanism puts a key over which memory.
//!
//! A [`Descriptor`] is a window with the key that was named last, and whether the device has heard of it. A key that was
//! named and not taken, because its chain was not posted or was accepted in part, is named again, so that
//! device and descriptor stay in step (LU-14733, LU-16349). Free
//! descriptors are reused first-in first-out: the same key comes back only after 256 rounds over
//! all windows, so a dead key stays dead for long.
//!
//! [`Choices`] is the table of what a connection may do with a sink, made when the connection is agreed on.
//! Each transfer asks it once. [`Scratch`] lays a buffer out for the mechanism that was chosen, and [`Stages`] lends
//! the buffers through which data is copied where no key can lie over the sink itself. [`Mappings`] keeps the keys that
//! the control side puts over memory for devices that register nothing on a queue.
//!
//! The key of the arena is never dead. A transfer that is given up while a peer has it, keeps its memory until a late
//! DONE comes, or until its connection has ended after `abandon_limit`; and even then the peer could use it over another
//! connection. That is what `exposure = "arena"` grants; `arena_exposed` among the counters says that it has happened.
//!
//! The key of a mapping is live until its batch is unmapped, also between transfers and after the last: until then a
//! peer that was told it reaches that memory, whoever has it by now. `mappings_exposed` counts those that are live, told
//! and unused. With `fmr_cache = false` no second transfer uses one, and `fmr_flush_trigger = 1` unmaps each as it
//! ends; the key of a transfer that was given up, or whose connection failed, is not used again in any case.
//!
//! Data that comes through a staging buffer lands after the DONE: a PUT without an ACK may be told as done at its
//! source before that. LNet promises such a source no more (LNET_EVENT_SEND); an ACK is sent when the data has landed.

mod choice;
mod descriptor;
mod mapping;
mod scratch;
mod stage;

pub use choice::{Choice, Choices, Mechanism, Outline, Refused, Settings, Stock, Why};
pub use descriptor::{Descriptor, Free};
pub use mapping::{Claim, Lease, Mapping, Mappings, Next, Owner, Standing, Ways};
pub use scratch::Scratch;
pub use stage::{SLICE, STAGE_BYTES, Stage, Stages};
