//! o2iblnd and LNet, byte by byte.

pub mod nid;

pub use nid::{Nid, Pid};
