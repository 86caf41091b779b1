//! The LNet header: 72 bytes, little-endian whoever sends it.

use super::layout::{self, Lnet};
use super::{Nid, Pid, WireError};

/// Bytes of a header.
pub const HEADER_BYTES: usize = 72;
/// Most bytes of a PUT or a REPLY: the LNet MTU, 1 MiB.
pub const MTU: u32 = 1 << 20;

/// Who says what to whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The node it is for.
    pub destination: Nid,
    /// The node it is from; behind a router not the peer of the connection.
    pub source: Nid,
    /// The process it is for. LNet does not check it.
    pub destination_pid: Pid,
    /// The process it is from.
    pub source_pid: Pid,
    /// Bytes of data that go with it: 0 for an ACK or a GET, at most [`MTU`].
    pub payload_length: u32,
    /// The rest, by type.
    pub body: Body,
}

/// The part of a [`Header`] that depends on its type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Body {
    /// A PUT has landed.
    Ack {
        /// The PUT's ACK handle.
        handle: WireHandle,
        /// The PUT's match bits.
        match_bits: u64,
        /// Bytes the target took.
        length: u32,
    },
    /// Write into the target.
    Put {
        /// To be echoed in an ACK; [`WireHandle::NONE`] asks for none.
        ack: WireHandle,
        /// Which buffer.
        match_bits: u64,
        /// 64 bits for the target's application.
        hdr_data: u64,
        /// Which portal.
        portal: u32,
        /// Where in the buffer.
        offset: u32,
    },
    /// Read from the target.
    Get {
        /// To be echoed in a REPLY.
        reply: WireHandle,
        /// Which buffer.
        match_bits: u64,
        /// Which portal.
        portal: u32,
        /// Where in the buffer.
        offset: u32,
        /// Bytes the initiator has room for.
        sink_length: u32,
    },
    /// The data of a GET.
    Reply {
        /// The GET's handle.
        handle: WireHandle,
    },
    /// The greeting of stream LNDs. [`Message::decode`](super::Message::decode) refuses it, as LNet
    /// does on o2iblnd.
    Hello {
        /// Of the greeting node.
        incarnation: u64,
        /// Which of several connections this is.
        kind: u32,
    },
}

/// 16 bytes that mean something to whoever made them, and are echoed unchanged.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WireHandle(pub [u8; 16]);

impl WireHandle {
    /// All ones: no handle.
    pub const NONE: Self = Self([0xff; 16]);

    /// One of our own.
    #[must_use]
    pub const fn from_words(interface: u64, object: u64) -> Self {
        let [a, b, c, d, e, f, g, h] = interface.to_le_bytes();
        let [i, j, k, l, m, n, o, p] = object.to_le_bytes();
        Self([a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p])
    }

    /// The words of one of our own: the inverse of [`from_words`](Self::from_words).
    #[must_use]
    pub const fn words(self) -> (u64, u64) {
        let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = self.0;
        (
            u64::from_le_bytes([a, b, c, d, e, f, g, h]),
            u64::from_le_bytes([i, j, k, l, m, n, o, p]),
        )
    }
}

impl Header {
    /// Reads a header and makes the checks that need no knowledge of the node.
    ///
    /// # Errors
    /// [`ShortBody`](WireError::ShortBody), [`LnetType`](WireError::LnetType),
    /// [`LnetPayload`](WireError::LnetPayload), [`LnetTooLong`](WireError::LnetTooLong).
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let bytes = bytes.first_chunk().ok_or(WireError::ShortBody)?;
        Ok(View::new(bytes)?.header())
    }

    /// Whether o2iblnd may carry it: no HELLO, payload only where it belongs and not too much of it.
    #[must_use]
    pub const fn is_legal(&self) -> bool {
        match self.body {
            Body::Ack { .. } | Body::Get { .. } => self.payload_length == 0,
            Body::Put { .. } | Body::Reply { .. } => self.payload_length <= MTU,
            Body::Hello { .. } => false,
        }
    }

    /// The header as it goes out. The unused end of the body is zero.
    #[inline(always)]
    pub(super) fn raw(&self) -> Lnet {
        Lnet {
            dest_nid: self.destination.0.into(),
            src_nid: self.source.0.into(),
            dest_pid: self.destination_pid.0.into(),
            src_pid: self.source_pid.0.into(),
            kind: self.body.kind().into(),
            payload_length: self.payload_length.into(),
            body: self.body.raw(),
        }
    }
}

/// A header that has been checked, as it stands in its message.
#[derive(Clone, Copy)]
pub struct View<'m>(&'m Lnet);

impl<'m> View<'m> {
    /// Makes the checks that need no knowledge of the node.
    ///
    /// # Errors
    /// [`LnetType`](WireError::LnetType), [`LnetPayload`](WireError::LnetPayload),
    /// [`LnetTooLong`](WireError::LnetTooLong).
    #[inline(always)]
    pub fn new(bytes: &'m [u8; HEADER_BYTES]) -> Result<Self, WireError> {
        let view: &Lnet = zerocopy::transmute_ref!(bytes);
        let length = view.payload_length.get();
        match view.kind.get() {
            ACK | GET if length != 0 => Err(WireError::LnetPayload),
            ACK | PUT | GET | REPLY | HELLO if length > MTU => Err(WireError::LnetTooLong(length)),
            ACK | PUT | GET | REPLY | HELLO => Ok(Self(view)),
            unknown => Err(WireError::LnetType(unknown)),
        }
    }

    /// [`Header::destination`].
    #[inline]
    #[must_use]
    pub fn destination(self) -> Nid {
        Nid(self.0.dest_nid.get())
    }

    /// [`Header::source`].
    #[inline]
    #[must_use]
    pub fn source(self) -> Nid {
        Nid(self.0.src_nid.get())
    }

    /// [`Header::source_pid`].
    #[inline]
    #[must_use]
    pub fn source_pid(self) -> Pid {
        Pid(self.0.src_pid.get())
    }

    /// [`Header::payload_length`].
    #[inline]
    #[must_use]
    pub fn payload_length(self) -> u32 {
        self.0.payload_length.get()
    }

    /// Whether it is a [`Body::Hello`].
    #[inline]
    #[must_use]
    pub fn is_hello(self) -> bool {
        self.0.kind.get() == HELLO
    }

    /// [`Header::body`].
    #[inline(always)]
    #[must_use]
    pub fn body(self) -> Body {
        let bytes = &self.0.body;
        // The checks have seen which it is: what is left is a HELLO.
        match self.0.kind.get() {
            ACK => {
                let view: &layout::LnetAck = zerocopy::transmute_ref!(bytes);
                Body::Ack {
                    handle: WireHandle(view.dst_wmd),
                    match_bits: view.match_bits.get(),
                    length: view.mlength.get(),
                }
            }
            PUT => {
                let view: &layout::LnetPut = zerocopy::transmute_ref!(bytes);
                Body::Put {
                    ack: WireHandle(view.ack_wmd),
                    match_bits: view.match_bits.get(),
                    hdr_data: view.hdr_data.get(),
                    portal: view.ptl_index.get(),
                    offset: view.offset.get(),
                }
            }
            GET => {
                let view: &layout::LnetGet = zerocopy::transmute_ref!(bytes);
                Body::Get {
                    reply: WireHandle(view.return_wmd),
                    match_bits: view.match_bits.get(),
                    portal: view.ptl_index.get(),
                    offset: view.src_offset.get(),
                    sink_length: view.sink_length.get(),
                }
            }
            REPLY => {
                let view: &layout::LnetReply = zerocopy::transmute_ref!(bytes);
                Body::Reply {
                    handle: WireHandle(view.dst_wmd),
                }
            }
            _ => {
                let view: &layout::LnetHello = zerocopy::transmute_ref!(bytes);
                Body::Hello {
                    incarnation: view.incarnation.get(),
                    kind: view.kind.get(),
                }
            }
        }
    }

    /// All of it.
    #[must_use]
    pub fn header(self) -> Header {
        Header {
            destination: self.destination(),
            source: self.source(),
            destination_pid: Pid(self.0.dest_pid.get()),
            source_pid: self.source_pid(),
            payload_length: self.payload_length(),
            body: self.body(),
        }
    }
}

impl Body {
    /// The type code.
    #[must_use]
    pub const fn kind(&self) -> u32 {
        match self {
            Self::Ack { .. } => ACK,
            Self::Put { .. } => PUT,
            Self::Get { .. } => GET,
            Self::Reply { .. } => REPLY,
            Self::Hello { .. } => HELLO,
        }
    }

    #[inline(always)]
    fn raw(&self) -> [u8; 40] {
        match *self {
            Self::Ack {
                handle,
                match_bits,
                length,
            } => zerocopy::transmute!(layout::LnetAck {
                dst_wmd: handle.0,
                match_bits: match_bits.into(),
                mlength: length.into(),
                rest: [0; 12],
            }),
            Self::Put {
                ack,
                match_bits,
                hdr_data,
                portal,
                offset,
            } => zerocopy::transmute!(layout::LnetPut {
                ack_wmd: ack.0,
                match_bits: match_bits.into(),
                hdr_data: hdr_data.into(),
                ptl_index: portal.into(),
                offset: offset.into(),
            }),
            Self::Get {
                reply,
                match_bits,
                portal,
                offset,
                sink_length,
            } => zerocopy::transmute!(layout::LnetGet {
                return_wmd: reply.0,
                match_bits: match_bits.into(),
                ptl_index: portal.into(),
                src_offset: offset.into(),
                sink_length: sink_length.into(),
                rest: [0; 4],
            }),
            Self::Reply { handle } => zerocopy::transmute!(layout::LnetReply {
                dst_wmd: handle.0,
                rest: [0; 24],
            }),
            Self::Hello { incarnation, kind } => zerocopy::transmute!(layout::LnetHello {
                incarnation: incarnation.into(),
                kind: kind.into(),
                rest: [0; 28],
            }),
        }
    }

    /// Whether data may go with it.
    #[must_use]
    pub const fn has_payload(&self) -> bool {
        matches!(self, Self::Put { .. } | Self::Reply { .. })
    }
}

const ACK: u32 = 0;
const PUT: u32 = 1;
const GET: u32 = 2;
const REPLY: u32 = 3;
pub(super) const HELLO: u32 = 4;
