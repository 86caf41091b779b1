//! Windows, their keys, and which mechanism puts a key over which memory.
//!
//! A [`Descriptor`] is a window with its two keys: the one the device has (or last had), and the
//! next. The first moves only when the device accepted the registration, so that a chain that was
//! mapped and not posted, or accepted in part, leaves both in step (LU-14733, LU-16349). Free
//! descriptors are reused first-in first-out: the same key comes back only after 256 rounds over
//! all windows, so a dead key stays dead for long.
//!
//! [`Choices`] is the table of what a connection may do with a sink, made when the connection is agreed on.
//! Each transfer asks it once. [`Scratch`] lays a buffer out for the mechanism that was chosen, and [`Stages`] lends
//! the buffers through which data is copied where no key can lie over the sink itself.

mod choice;
mod descriptor;
mod scratch;
mod stage;

pub use choice::{Choice, Choices, Mechanism, Outline, Refused, Settings, Why};
pub use descriptor::{Descriptor, Free};
pub use scratch::Scratch;
/// From how many ranges on a source is registered by default, where the device can.
pub const SOURCE_CROSSOVER: u16 = 32;

pub use stage::{SLICE, STAGE_BYTES, Stage, Stages};
