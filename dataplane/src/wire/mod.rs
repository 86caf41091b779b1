//! o2iblnd and LNet, byte by byte.
//!
//! Two layers. `layout` gives the bytes names: views that judge nothing. Above it stand values that
//! can only be legal: [`Message::decode`] either returns one or says which check failed, and
//! everything a peer can get wrong without knowing anything about the connection is refused there.
//! What needs to know the connection (is the stamp current, does the cookie name anything) is not
//! asked here.
//!
//! The o2iblnd part of a message is in its *sender's* byte order, told by the magic. The LNet header
//! inside it is little-endian always. Cookies and [`lnet::WireHandle`]s belong to whoever made them
//! and are echoed byte for byte.

mod checksum;
mod descriptor;
mod error;
mod layout;
pub mod lnet;
mod message;
pub mod nid;
pub mod ping;
mod reject;

pub use descriptor::{Descriptor, Fragment, Fragments, Located};
pub use error::{TooLong, WireError};
pub use message::{
    Body, ConnParams, Done, Envelope, Kind, Message, Opened, encode_get_req, encode_immediate,
    encode_put_ack,
};
pub use nid::{Nid, Pid};
pub use reject::{RejectRecord, Why};

/// First word of every message and reject record.
pub const MAGIC: u32 = 0x0be9_1b91;
/// The magic of a protocol that never came; a reject record may carry it.
pub const UNIFIED_MAGIC: u32 = 0x4572_6963;
/// The old protocol version: fixed depth 8, no NOOP without a credit.
pub const V1: u16 = 0x11;
/// The protocol version in use.
pub const V2: u16 = 0x12;

/// Bytes of a message buffer, and what [`ConnParams::max_msg_size`] says.
pub const MESSAGE_BYTES: u32 = 4096;
/// Bytes of the o2iblnd header; a NOOP is nothing else.
pub const HEADER_BYTES: u32 = 48;
/// Bytes of a CONNREQ or CONNACK. A CONNREQ fills the CM REQ's room exactly.
pub const CONN_BYTES: usize = 56;
/// Bytes of a reject record.
pub const REJECT_BYTES: usize = 24;
/// Where the payload of an IMMEDIATE begins.
pub const IMMEDIATE_BYTES: u32 = 120;
/// Longest payload of an IMMEDIATE.
pub const IMMEDIATE_PAYLOAD: u32 = 3976;
/// Most fragments of a descriptor (LU-15092); 256 up to 2.14.
pub const MAX_FRAGMENTS: u16 = 257;

/// The byte order of a message, told by its magic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ByteOrder {
    /// Least significant byte first.
    Little,
    /// Most significant byte first.
    Big,
}

impl ByteOrder {
    /// This machine's.
    pub const NATIVE: Self = if cfg!(target_endian = "little") {
        Self::Little
    } else {
        Self::Big
    };
}

macro_rules! of {
    ($($name:ident: $number:ident,)*) => {
        impl ByteOrder {
            $(
                /// A number of a message of this order that was read as little-endian.
                #[inline]
                const fn $name(self, read: $number) -> $number {
                    match self {
                        Self::Little => read,
                        Self::Big => read.swap_bytes(),
                    }
                }
            )*
        }
    };
}
of! {
    of_u16: u16,
    of_u32: u32,
    of_u64: u64,
}

/// How a message is checksummed.
///
/// ko2iblnd adds plain C `char`s, so the sum depends on where it was compiled: x86 before Linux 6.2
/// adds signed bytes, every other kernel unsigned ones. A receiver cannot know, so both are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Checksum {
    /// Not at all: the field is zero. The default everywhere.
    None,
    /// Bytes of 0x80 and more count as negative. A received sum that fits both variants reports this
    /// one.
    Signed,
    /// Bytes count as they are.
    Unsigned,
}

/// The choices a sender has in encoding a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Encoding {
    /// Of the o2iblnd part.
    pub order: ByteOrder,
    /// Of the message, never of what an RDMA moves.
    pub checksum: Checksum,
}

impl Encoding {
    /// Native order, no checksum: what this project sends.
    pub const PLAIN: Self = Self {
        order: ByteOrder::NATIVE,
        checksum: Checksum::None,
    };
}

#[cfg(test)]
mod tests;
