//! RoCEv2 on paper: the frames that a card would have put on an Ethernet, for a capture file.
//!
//! The software device moves packets of its own between cores. [`Flow`] turns what passed between two queue
//! pairs into the frames of a reliable connection as the InfiniBand specification (volume 1, chapter 9, and its
//! annex A17 for RoCEv2) has them; [`cm`] writes the connection manager's messages (chapter 12) that went before.
//! What they make goes into a [`pcap`](crate::pcap) file, and Wireshark reads it like traffic of real nodes.
//!
//! A path has an MTU of [`MTU`] bytes, the largest there is, so that every o2iblnd message is one frame: Wireshark
//! 4.0 dissects a SEND by its first frame only. A frame is then up to 4170 bytes long, a jumbo frame.

pub mod cm;
mod flow;
mod frame;
mod icrc;

pub use flow::{Answer, Flow, Part, Verb};
pub use frame::{Address, Extension, Frame};
pub use icrc::icrc;

/// Payload bytes of one frame.
pub const MTU: usize = 4096;

/// Queue pair numbers, sequence numbers and message counts have 24 bits.
pub(crate) const BITS_24: u32 = 0x00ff_ffff;

/// UDP's destination port of RoCEv2.
pub(crate) const UDP_PORT: u16 = 4791;
