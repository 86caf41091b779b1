//! The bytes and their names. Nothing here judges a value.
//!
//! Views of the o2iblnd part are generic over the byte order; zerocopy makes them plain loads.

use core::mem::size_of_val;

use zerocopy::byteorder::{I32, U16, U32, U64};
use zerocopy::{ByteOrder, FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::TooLong;

/// What stands in this place whatever the version.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct Start<O: ByteOrder> {
    pub(super) magic: U32<O>,
    pub(super) version: U16<O>,
}

/// Header of every message.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct Head<O: ByteOrder> {
    pub(super) start: Start<O>,
    pub(super) kind: u8,
    pub(super) credits: u8,
    pub(super) nob: U32<O>,
    pub(super) cksum: U32<O>,
    pub(super) srcnid: U64<O>,
    pub(super) srcstamp: U64<O>,
    pub(super) dstnid: U64<O>,
    pub(super) dststamp: U64<O>,
}

/// A whole IMMEDIATE but for its payload.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct Immediate<O: ByteOrder> {
    pub(super) head: Head<O>,
    pub(super) lnet: Lnet,
}

/// A GET_REQ up to its descriptor.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct GetReq<O: ByteOrder> {
    pub(super) head: Head<O>,
    pub(super) lnet: Lnet,
    pub(super) cookie: [u8; 8],
}

/// A PUT_ACK up to its descriptor.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct PutAck<O: ByteOrder> {
    pub(super) head: Head<O>,
    pub(super) source_cookie: [u8; 8],
    pub(super) sink_cookie: [u8; 8],
}

/// Body of CONNREQ and CONNACK, end of a reject record.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct ConnParams<O: ByteOrder> {
    pub(super) queue_depth: U16<O>,
    pub(super) max_frags: U16<O>,
    pub(super) max_msg_size: U32<O>,
}

/// A whole CONNREQ or CONNACK.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct Conn<O: ByteOrder> {
    pub(super) head: Head<O>,
    pub(super) params: ConnParams<O>,
}

/// Body of PUT_NAK, PUT_DONE, GET_DONE.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct Completion<O: ByteOrder> {
    pub(super) cookie: [u8; 8],
    pub(super) status: I32<O>,
}

/// What precedes the fragments of a descriptor.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct Descriptor<O: ByteOrder> {
    pub(super) key: U32<O>,
    pub(super) nfrags: U32<O>,
}

/// One fragment.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct Fragment<O: ByteOrder> {
    pub(super) nob: U32<O>,
    pub(super) address: U64<O>,
}

/// A descriptor with one fragment.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct Single<O: ByteOrder> {
    pub(super) start: Descriptor<O>,
    pub(super) fragment: Fragment<O>,
}

/// A reject record.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct Reject<O: ByteOrder> {
    pub(super) begin: RejectStart<O>,
    pub(super) pad: u8,
    pub(super) incarnation: U64<O>,
    pub(super) params: ConnParams<O>,
}

/// All that a version 1 reject record has.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct RejectStart<O: ByteOrder> {
    pub(super) start: Start<O>,
    pub(super) why: u8,
}

/// Common part of the LNet header.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct Lnet {
    pub(super) dest_nid: Le64,
    pub(super) src_nid: Le64,
    pub(super) dest_pid: Le32,
    pub(super) src_pid: Le32,
    pub(super) kind: Le32,
    pub(super) payload_length: Le32,
    pub(super) body: [u8; 40],
}

/// LNet ACK.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct LnetAck {
    pub(super) dst_wmd: [u8; 16],
    pub(super) match_bits: Le64,
    pub(super) mlength: Le32,
    pub(super) rest: [u8; 12],
}

/// LNet PUT.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct LnetPut {
    pub(super) ack_wmd: [u8; 16],
    pub(super) match_bits: Le64,
    pub(super) hdr_data: Le64,
    pub(super) ptl_index: Le32,
    pub(super) offset: Le32,
}

/// LNet GET.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct LnetGet {
    pub(super) return_wmd: [u8; 16],
    pub(super) match_bits: Le64,
    pub(super) ptl_index: Le32,
    pub(super) src_offset: Le32,
    pub(super) sink_length: Le32,
    pub(super) rest: [u8; 4],
}

/// LNet REPLY.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct LnetReply {
    pub(super) dst_wmd: [u8; 16],
    pub(super) rest: [u8; 24],
}

/// LNet HELLO.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct LnetHello {
    pub(super) incarnation: Le64,
    pub(super) kind: Le32,
    pub(super) rest: [u8; 28],
}

/// Start of a ping info.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct Ping<O: ByteOrder> {
    pub(super) magic: U32<O>,
    pub(super) features: U32<O>,
    pub(super) pid: U32<O>,
    pub(super) nnis: U32<O>,
}

/// The ping info of a node with one interface.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct PingPlain<O: ByteOrder> {
    pub(super) start: Ping<O>,
    pub(super) loopback: PingEntry<O>,
    pub(super) own: PingEntry<O>,
}

/// One interface in a ping info.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct PingEntry<O: ByteOrder> {
    pub(super) nid: U64<O>,
    pub(super) status: U32<O>,
    pub(super) msg_size: U32<O>,
}

/// Writes a view; what of `to` is left behind it.
pub(super) fn put<'t, T: IntoBytes + Immutable + ?Sized>(
    value: &T,
    to: &'t mut [u8],
) -> Result<&'t mut [u8], TooLong> {
    let (at, rest) = to.split_at_mut_checked(size_of_val(value)).ok_or(TooLong)?;
    value.write_to(at).map_err(|_| TooLong)?;
    Ok(rest)
}

/// The view at the start of `from`, and what is left behind it.
#[inline]
pub(super) fn take<T: FromBytes + KnownLayout + Immutable>(from: &[u8]) -> Option<(&T, &[u8])> {
    T::ref_from_prefix(from).ok()
}

pub(super) type Le32 = U32<zerocopy::LittleEndian>;
pub(super) type Le64 = U64<zerocopy::LittleEndian>;

const _: () = {
    use zerocopy::LittleEndian as O;
    assert!(size_of::<Head<O>>() == super::HEADER_BYTES as usize);
    assert!(size_of::<Head<O>>() + size_of::<ConnParams<O>>() == super::CONN_BYTES);
    assert!(size_of::<Head<O>>() + size_of::<Lnet>() == super::IMMEDIATE_BYTES as usize);
    assert!(super::IMMEDIATE_BYTES + super::IMMEDIATE_PAYLOAD == super::MESSAGE_BYTES);
    assert!(size_of::<Completion<O>>() == 12);
    assert!(size_of::<Descriptor<O>>() == 8);
    assert!(size_of::<Fragment<O>>() == 12);
    assert!(size_of::<RejectStart<O>>() == 7);
    assert!(size_of::<Reject<O>>() == super::REJECT_BYTES);
    assert!(size_of::<Lnet>() == 72);
    // Each fills the body of a header.
    assert!(size_of::<LnetAck>() == 40);
    assert!(size_of::<LnetPut>() == 40);
    assert!(size_of::<LnetGet>() == 40);
    assert!(size_of::<LnetReply>() == 40);
    assert!(size_of::<LnetHello>() == 40);
    assert!(size_of::<Ping<O>>() == 16);
    assert!(size_of::<PingEntry<O>>() == 16);
};
