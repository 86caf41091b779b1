//! The ten messages of o2iblnd.

use zerocopy::{BigEndian, LittleEndian};

use super::layout::{self, Head, Start, put, take};
use super::{
    ByteOrder, CONN_BYTES, Checksum, Descriptor, Encoding, HEADER_BYTES, IMMEDIATE_BYTES,
    IMMEDIATE_PAYLOAD, MAGIC, MESSAGE_BYTES, Nid, TooLong, V1, V2, WireError, checksum, lnet,
};

/// What every message carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Envelope {
    /// [`V1`] or [`V2`].
    pub version: u16,
    /// Receive buffers given back to the receiver of this message.
    pub credits: u8,
    /// The sender.
    pub source: Nid,
    /// The sender's incarnation.
    pub source_stamp: u64,
    /// The receiver.
    pub destination: Nid,
    /// The receiver's incarnation as the sender knows it; 0, only in a CONNREQ, if it does not.
    pub destination_stamp: u64,
}

/// What two nodes agree on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnParams {
    /// Peer credits: messages that may be under way to one side.
    pub queue_depth: u16,
    /// Most fragments of a descriptor.
    pub max_frags: u16,
    /// Bytes of a message buffer; 4096.
    pub max_msg_size: u32,
}

impl ConnParams {
    /// The private data of a CM REQ. Native order, no checksum.
    #[must_use]
    pub fn request(&self, envelope: &Envelope) -> [u8; CONN_BYTES] {
        self.conn(envelope, CONNREQ)
    }

    /// The private data of a CM REP. Native order, no checksum.
    #[must_use]
    pub fn acknowledge(&self, envelope: &Envelope) -> [u8; CONN_BYTES] {
        self.conn(envelope, CONNACK)
    }

    fn conn(&self, envelope: &Envelope, kind: u8) -> [u8; CONN_BYTES] {
        zerocopy::transmute!(layout::Conn::<zerocopy::NativeEndian> {
            head: head(envelope, kind, CONN_NOB),
            params: raw_params(self),
        })
    }
}

/// How a bulk transfer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done {
    /// Of the transfer, as the receiver of this message chose it.
    pub cookie: u64,
    /// Bytes moved, or a negative errno.
    pub status: i32,
}

/// The part of a message that depends on its type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Body<'m> {
    /// Asks for a connection. Only as private data of a CM REQ.
    ConnReq(ConnParams),
    /// Grants it. Only as private data of a CM REP.
    ConnAck(ConnParams),
    /// Nothing but credits.
    Noop,
    /// A whole LNet message.
    Immediate {
        /// Any type but HELLO.
        header: lnet::Header,
        /// As long as `header` says.
        payload: &'m [u8],
    },
    /// Asks where data is to be written.
    PutReq {
        /// A PUT or a REPLY.
        header: lnet::Header,
        /// The source's, echoed in PUT_ACK or PUT_NAK.
        cookie: u64,
    },
    /// Answers PUT_REQ: nowhere.
    PutNak(Done),
    /// Answers PUT_REQ: here.
    PutAck {
        /// Of the PUT_REQ.
        source_cookie: u64,
        /// The sink's, echoed in PUT_DONE.
        sink_cookie: u64,
        /// Where to write.
        sink: Descriptor<'m>,
    },
    /// The data of a PUT_REQ has been written.
    PutDone(Done),
    /// Asks to write data.
    GetReq {
        /// A GET.
        header: lnet::Header,
        /// The initiator's, echoed in GET_DONE.
        cookie: u64,
        /// Where to write.
        sink: Descriptor<'m>,
    },
    /// The data of a GET_REQ has been written.
    GetDone(Done),
}

/// One o2iblnd message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message<'m> {
    /// What every message carries.
    pub envelope: Envelope,
    /// The rest.
    pub body: Body<'m>,
}

impl Message<'_> {
    /// Reads a message: the bytes of a completed receive, or the private data of a CM event. What
    /// stands behind the message's own length is ignored, and so is everything after 4096 bytes.
    ///
    /// # Errors
    /// The first check that failed, in the order of [`WireError`]'s variants.
    pub fn decode(bytes: &[u8]) -> Result<(Message<'_>, Encoding), WireError> {
        let opened = Opened::new(bytes)?;
        let body = opened.body()?;
        let envelope = opened.envelope();
        Ok((Message { envelope, body }, opened.encoding))
    }

    /// Writes the message in native order without a checksum; how many bytes it has.
    ///
    /// # Errors
    /// [`TooLong`].
    #[inline(always)]
    pub fn encode(&self, to: &mut [u8; MESSAGE_BYTES as usize]) -> Result<u32, TooLong> {
        encode::<zerocopy::NativeEndian>(self, to)
    }

    /// Writes the message; how many bytes it has.
    ///
    /// # Errors
    /// [`TooLong`].
    pub fn encode_as(
        &self,
        encoding: Encoding,
        to: &mut [u8; MESSAGE_BYTES as usize],
    ) -> Result<u32, TooLong> {
        let nob = match encoding.order {
            ByteOrder::Little => encode::<LittleEndian>(self, to)?,
            ByteOrder::Big => encode::<BigEndian>(self, to)?,
        };
        let message = to.get_mut(..nob as usize).ok_or(TooLong)?;
        checksum::seal(message, encoding.order, encoding.checksum);
        Ok(nob)
    }
}

/// A message of which the o2iblnd header has been checked, and the body not yet. It reads in place: who wants to know
/// what it says asks for the body of its kind, and nothing is put together only to be taken apart.
#[derive(Clone, Copy)]
pub struct Opened<'m> {
    /// Read as little-endian; its sender's order is `encoding.order`.
    head: &'m Head<LittleEndian>,
    /// What stands behind the header; `None` where that is cut.
    body: Option<&'m [u8]>,
    encoding: Encoding,
}

impl<'m> Opened<'m> {
    /// Reads the header of a message, as [`Message::decode`] does.
    ///
    /// # Errors
    /// The first check that failed.
    #[inline(always)]
    pub fn new(bytes: &'m [u8]) -> Result<Self, WireError> {
        let bytes = bytes.get(..MESSAGE_BYTES as usize).unwrap_or(bytes);
        let (start, _) = take::<Start<LittleEndian>>(bytes).ok_or(WireError::Runt)?;
        let order = match start.magic.get() {
            MAGIC => ByteOrder::Little,
            magic if magic.swap_bytes() == MAGIC => ByteOrder::Big,
            magic => return Err(WireError::Magic(magic)),
        };
        let version = order.of_u16(start.version.get());
        if version != V1 && version != V2 {
            return Err(WireError::Version(version));
        }
        let (head, _) = take::<Head<LittleEndian>>(bytes).ok_or(WireError::ShortHeader)?;
        let nob = order.of_u32(head.nob.get());
        let message = bytes.get(..nob as usize).ok_or(WireError::Truncated(nob))?;
        let checksum = match order.of_u32(head.cksum.get()) {
            0 => Checksum::None,
            sum => checksum::recognise(message, sum).ok_or(WireError::Checksum)?,
        };
        // The same in either order.
        if Nid(head.srcnid.get()) == Nid::ANY {
            return Err(WireError::NoSource);
        }
        Ok(Self {
            head,
            body: message.get(HEADER_BYTES as usize..),
            encoding: Encoding { order, checksum },
        })
    }

    /// What every message carries.
    #[inline(always)]
    #[must_use]
    pub fn envelope(&self) -> Envelope {
        let (head, order) = (self.head, self.encoding.order);
        Envelope {
            version: order.of_u16(head.start.version.get()),
            credits: head.credits,
            source: Nid(order.of_u64(head.srcnid.get())),
            source_stamp: order.of_u64(head.srcstamp.get()),
            destination: Nid(order.of_u64(head.dstnid.get())),
            destination_stamp: order.of_u64(head.dststamp.get()),
        }
    }

    /// How it is written.
    #[must_use]
    pub const fn encoding(&self) -> Encoding {
        self.encoding
    }

    /// Its kind.
    ///
    /// # Errors
    /// [`Type`](WireError::Type); [`ShortBody`](WireError::ShortBody) where even the header is cut.
    #[inline]
    pub fn kind(&self) -> Result<Kind, WireError> {
        let code = self.head.kind;
        let kind = Kind::of(code).ok_or(WireError::Type(code))?;
        if self.body.is_none() {
            return Err(WireError::ShortBody);
        }
        Ok(kind)
    }

    /// The body, whatever its kind.
    ///
    /// # Errors
    /// The first check that failed.
    pub fn body(&self) -> Result<Body<'m>, WireError> {
        Ok(match self.kind()? {
            Kind::ConnReq => Body::ConnReq(self.params()?),
            Kind::ConnAck => Body::ConnAck(self.params()?),
            Kind::Noop => Body::Noop,
            Kind::Immediate => {
                let (header, payload) = self.immediate()?;
                Body::Immediate {
                    header: header.header(),
                    payload,
                }
            }
            Kind::PutReq => {
                let (header, cookie) = self.put_req()?;
                Body::PutReq {
                    header: header.header(),
                    cookie,
                }
            }
            Kind::PutNak => Body::PutNak(self.done()?),
            Kind::PutAck => {
                let (source_cookie, sink_cookie, sink) = self.put_ack()?;
                Body::PutAck {
                    source_cookie,
                    sink_cookie,
                    sink,
                }
            }
            Kind::PutDone => Body::PutDone(self.done()?),
            Kind::GetReq => {
                let (header, cookie, sink) = self.get_req()?;
                Body::GetReq {
                    header: header.header(),
                    cookie,
                    sink,
                }
            }
            Kind::GetDone => Body::GetDone(self.done()?),
        })
    }

    /// The body of a CONNREQ or CONNACK.
    ///
    /// # Errors
    /// [`ShortBody`](WireError::ShortBody).
    pub fn params(&self) -> Result<ConnParams, WireError> {
        match self.encoding.order {
            ByteOrder::Little => params::<LittleEndian>(self.rest()),
            ByteOrder::Big => params::<BigEndian>(self.rest()),
        }
    }

    /// The body of an IMMEDIATE: its header, and as many bytes as that says.
    ///
    /// # Errors
    /// The first check that failed.
    #[inline(always)]
    pub fn immediate(&self) -> Result<(lnet::View<'m>, &'m [u8]), WireError> {
        let (header, rest) = lnet(self.rest())?;
        let header = lnet::View::new(header)?;
        if header.is_hello() {
            return Err(WireError::LnetType(lnet::HELLO));
        }
        let payload = rest
            .get(..header.payload_length() as usize)
            .ok_or(WireError::LnetCut)?;
        Ok((header, payload))
    }

    /// The body of a PUT_REQ: header and cookie.
    ///
    /// # Errors
    /// The first check that failed.
    #[inline]
    pub fn put_req(&self) -> Result<(lnet::View<'m>, u64), WireError> {
        let (header, rest) = lnet(self.rest())?;
        let (cookie, _) = cookie(rest)?;
        let header = lnet::View::new(header)?;
        if !header.body().has_payload() {
            return Err(WireError::LnetMismatch);
        }
        Ok((header, cookie))
    }

    /// The body of a PUT_ACK: the source's cookie, the sink's, and the sink.
    ///
    /// # Errors
    /// The first check that failed.
    #[inline(always)]
    pub fn put_ack(&self) -> Result<(u64, u64, Descriptor<'m>), WireError> {
        let (source_cookie, rest) = cookie(self.rest())?;
        let (sink_cookie, rest) = cookie(rest)?;
        let sink = self.descriptor(rest, PUT_ACK_SINK)?;
        Ok((source_cookie, sink_cookie, sink))
    }

    /// The body of a GET_REQ: header, cookie and sink.
    ///
    /// # Errors
    /// The first check that failed.
    #[inline(always)]
    pub fn get_req(&self) -> Result<(lnet::View<'m>, u64, Descriptor<'m>), WireError> {
        let (header, rest) = lnet(self.rest())?;
        let (cookie, rest) = cookie(rest)?;
        let sink = self.descriptor(rest, GET_REQ_SINK)?;
        let header = lnet::View::new(header)?;
        let lnet::Body::Get { .. } = header.body() else {
            return Err(WireError::LnetMismatch);
        };
        Ok((header, cookie, sink))
    }

    /// The body of a PUT_NAK, PUT_DONE or GET_DONE.
    ///
    /// # Errors
    /// [`ShortBody`](WireError::ShortBody).
    #[inline]
    pub fn done(&self) -> Result<Done, WireError> {
        let view = take::<layout::Completion<LittleEndian>>(self.rest());
        let (view, _) = view.ok_or(WireError::ShortBody)?;
        let status = view.status.get().cast_unsigned();
        Ok(Done {
            cookie: u64::from_ne_bytes(view.cookie),
            status: self.encoding.order.of_u32(status).cast_signed(),
        })
    }

    #[inline(always)]
    fn descriptor(&self, rest: &'m [u8], offset: u16) -> Result<Descriptor<'m>, WireError> {
        match self.encoding.order {
            ByteOrder::Little => {
                Descriptor::decode::<LittleEndian>(rest, offset, ByteOrder::Little)
            }
            ByteOrder::Big => Descriptor::decode::<BigEndian>(rest, offset, ByteOrder::Big),
        }
    }

    /// What stands behind the header. `kind` has seen that it is there.
    #[inline]
    fn rest(&self) -> &'m [u8] {
        self.body.unwrap_or_default()
    }
}

/// Which of the ten.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Kind {
    /// [`Body::ConnReq`].
    ConnReq = CONNREQ,
    /// [`Body::ConnAck`].
    ConnAck = CONNACK,
    /// [`Body::Noop`].
    Noop = NOOP,
    /// [`Body::Immediate`].
    Immediate = IMMEDIATE,
    /// [`Body::PutReq`].
    PutReq = PUT_REQ,
    /// [`Body::PutNak`].
    PutNak = PUT_NAK,
    /// [`Body::PutAck`].
    PutAck = PUT_ACK,
    /// [`Body::PutDone`].
    PutDone = PUT_DONE,
    /// [`Body::GetReq`].
    GetReq = GET_REQ,
    /// [`Body::GetDone`].
    GetDone = GET_DONE,
}

impl Kind {
    #[inline]
    const fn of(code: u8) -> Option<Self> {
        Some(match code {
            CONNREQ => Self::ConnReq,
            CONNACK => Self::ConnAck,
            NOOP => Self::Noop,
            IMMEDIATE => Self::Immediate,
            PUT_REQ => Self::PutReq,
            PUT_NAK => Self::PutNak,
            PUT_ACK => Self::PutAck,
            PUT_DONE => Self::PutDone,
            GET_REQ => Self::GetReq,
            GET_DONE => Self::GetDone,
            _ => return None,
        })
    }
}

impl Body<'_> {
    /// The type code.
    #[must_use]
    pub const fn kind(&self) -> u8 {
        match self {
            Self::ConnReq(_) => CONNREQ,
            Self::ConnAck(_) => CONNACK,
            Self::Noop => NOOP,
            Self::Immediate { .. } => IMMEDIATE,
            Self::PutReq { .. } => PUT_REQ,
            Self::PutNak(_) => PUT_NAK,
            Self::PutAck { .. } => PUT_ACK,
            Self::PutDone(_) => PUT_DONE,
            Self::GetReq { .. } => GET_REQ,
            Self::GetDone(_) => GET_DONE,
        }
    }
}

/// Writes everything of an IMMEDIATE but its payload, of which the caller has put `payload_length`
/// bytes at `to[120..]` already; how many bytes the message has. Native order, no checksum. The
/// header goes out with this `payload_length`, whatever it says itself.
///
/// # Errors
/// [`TooLong`].
#[inline(always)]
pub fn encode_immediate(
    envelope: &Envelope,
    header: &lnet::Header,
    payload_length: u32,
    to: &mut [u8; MESSAGE_BYTES as usize],
) -> Result<u32, TooLong> {
    let header = lnet::Header {
        payload_length,
        ..*header
    };
    if payload_length > IMMEDIATE_PAYLOAD || !header.is_legal() {
        return Err(TooLong);
    }
    let nob = IMMEDIATE_BYTES.wrapping_add(payload_length);
    if let Some(at) = to.first_chunk_mut::<{ IMMEDIATE_BYTES as usize }>() {
        *at = zerocopy::transmute!(layout::Immediate::<zerocopy::NativeEndian> {
            head: head(envelope, IMMEDIATE, nob),
            lnet: header.raw(),
        });
    }
    Ok(nob)
}

/// Writes a GET_REQ; how many bytes it has. Native order, no checksum.
///
/// # Errors
/// [`TooLong`].
#[inline(always)]
pub fn encode_get_req(
    envelope: &Envelope,
    header: &lnet::Header,
    cookie: u64,
    sink: &Descriptor<'_>,
    to: &mut [u8; MESSAGE_BYTES as usize],
) -> Result<u32, TooLong> {
    let (at, rest) = to
        .split_first_chunk_mut::<{ GET_REQ_SINK as usize }>()
        .ok_or(TooLong)?;
    let (true, lnet::Body::Get { .. }) = (header.is_legal(), header.body) else {
        return Err(TooLong);
    };
    let nob = u32::from(GET_REQ_SINK).wrapping_add(sink.write(rest)?);
    *at = zerocopy::transmute!(layout::GetReq::<zerocopy::NativeEndian> {
        head: head(envelope, GET_REQ, nob),
        lnet: header.raw(),
        cookie: cookie.to_ne_bytes(),
    });
    Ok(nob)
}

/// Writes a PUT_ACK; how many bytes it has. Native order, no checksum.
///
/// # Errors
/// [`TooLong`].
#[inline(always)]
pub fn encode_put_ack(
    envelope: &Envelope,
    source_cookie: u64,
    sink_cookie: u64,
    sink: &Descriptor<'_>,
    to: &mut [u8; MESSAGE_BYTES as usize],
) -> Result<u32, TooLong> {
    let (at, rest) = to
        .split_first_chunk_mut::<{ PUT_ACK_SINK as usize }>()
        .ok_or(TooLong)?;
    let nob = u32::from(PUT_ACK_SINK).wrapping_add(sink.write(rest)?);
    *at = zerocopy::transmute!(layout::PutAck::<zerocopy::NativeEndian> {
        head: head(envelope, PUT_ACK, nob),
        source_cookie: source_cookie.to_ne_bytes(),
        sink_cookie: sink_cookie.to_ne_bytes(),
    });
    Ok(nob)
}

#[inline(always)]
fn encode<O: zerocopy::ByteOrder>(message: &Message<'_>, to: &mut [u8]) -> Result<u32, TooLong> {
    let (head_at, body_at) = to
        .split_at_mut_checked(HEADER_BYTES as usize)
        .ok_or(TooLong)?;
    let room = body_at.len();
    let rest = match &message.body {
        Body::ConnReq(params) | Body::ConnAck(params) => put(&raw_params::<O>(params), body_at)?,
        Body::Noop => body_at,
        Body::Immediate { header, payload } => {
            if !header.is_legal() || header.payload_length as usize != payload.len() {
                return Err(TooLong);
            }
            put(*payload, put(&header.raw(), body_at)?)?
        }
        Body::PutReq { header, cookie } => {
            if !header.is_legal() || !header.body.has_payload() {
                return Err(TooLong);
            }
            put(&cookie.to_ne_bytes(), put(&header.raw(), body_at)?)?
        }
        Body::PutAck {
            source_cookie,
            sink_cookie,
            sink,
        } => {
            let rest = put(&source_cookie.to_ne_bytes(), body_at)?;
            let rest = put(&sink_cookie.to_ne_bytes(), rest)?;
            sink.encode::<O>(rest)?
        }
        Body::GetReq {
            header,
            cookie,
            sink,
        } => {
            let (true, lnet::Body::Get { .. }) = (header.is_legal(), header.body) else {
                return Err(TooLong);
            };
            let rest = put(&cookie.to_ne_bytes(), put(&header.raw(), body_at)?)?;
            sink.encode::<O>(rest)?
        }
        Body::PutNak(done) | Body::PutDone(done) | Body::GetDone(done) => {
            let completion = layout::Completion::<O> {
                cookie: done.cookie.to_ne_bytes(),
                status: done.status.into(),
            };
            put(&completion, body_at)?
        }
    };
    let length = room.saturating_sub(rest.len());
    let nob = u32::try_from(length)
        .map_err(|_| TooLong)?
        .saturating_add(HEADER_BYTES);
    put(
        &head::<O>(&message.envelope, message.body.kind(), nob),
        head_at,
    )?;
    Ok(nob)
}

fn head<O: zerocopy::ByteOrder>(envelope: &Envelope, kind: u8, nob: u32) -> Head<O> {
    Head {
        start: Start {
            magic: MAGIC.into(),
            version: envelope.version.into(),
        },
        kind,
        credits: envelope.credits,
        nob: nob.into(),
        cksum: 0.into(),
        srcnid: envelope.source.0.into(),
        srcstamp: envelope.source_stamp.into(),
        dstnid: envelope.destination.0.into(),
        dststamp: envelope.destination_stamp.into(),
    }
}

pub(super) fn raw_params<O: zerocopy::ByteOrder>(params: &ConnParams) -> layout::ConnParams<O> {
    layout::ConnParams {
        queue_depth: params.queue_depth.into(),
        max_frags: params.max_frags.into(),
        max_msg_size: params.max_msg_size.into(),
    }
}

pub(super) fn params<O: zerocopy::ByteOrder + 'static>(
    body: &[u8],
) -> Result<ConnParams, WireError> {
    let (view, _) = take::<layout::ConnParams<O>>(body).ok_or(WireError::ShortBody)?;
    Ok(ConnParams {
        queue_depth: view.queue_depth.get(),
        max_frags: view.max_frags.get(),
        max_msg_size: view.max_msg_size.get(),
    })
}

#[inline]
fn lnet(body: &[u8]) -> Result<(&[u8; lnet::HEADER_BYTES], &[u8]), WireError> {
    body.split_first_chunk().ok_or(WireError::ShortBody)
}

/// Cookies are their maker's: never flipped, only echoed.
#[inline]
fn cookie(body: &[u8]) -> Result<(u64, &[u8]), WireError> {
    let (cookie, rest) = body.split_first_chunk().ok_or(WireError::ShortBody)?;
    Ok((u64::from_ne_bytes(*cookie), rest))
}

/// Where the descriptor of a PUT_ACK begins.
const PUT_ACK_SINK: u16 = 64;
/// Where the descriptor of a GET_REQ begins.
const GET_REQ_SINK: u16 = 128;

/// `CONN_BYTES` as the header says it.
const CONN_NOB: u32 = 56;

const CONNREQ: u8 = 0xc0;
const CONNACK: u8 = 0xc1;
const NOOP: u8 = 0xd0;
const IMMEDIATE: u8 = 0xd1;
const PUT_REQ: u8 = 0xd2;
const PUT_NAK: u8 = 0xd3;
const PUT_ACK: u8 = 0xd4;
const PUT_DONE: u8 = 0xd5;
const GET_REQ: u8 = 0xd6;
const GET_DONE: u8 = 0xd7;
