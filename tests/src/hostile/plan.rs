//! What may happen to a node, as a fuzzer writes it down.

use arbitrary::Arbitrary;
use o2poll_dataplane::nic::RKey;
use o2poll_dataplane::wire::lnet::{self, WireHandle};
use o2poll_dataplane::wire::{
    Body, ByteOrder, Checksum, ConnParams, Descriptor, Done, Encoding, Fragment, Message, Nid,
};

use super::peer::{Peer, Touch};
use crate::NAMES;

/// A whole run.
#[derive(Arbitrary, Debug)]
pub(super) struct Plan {
    pub(super) profile: ProfileChoice,
    pub(super) depth: u8,
    pub(super) accepted: bool,
    pub(super) establish: bool,
    pub(super) acts: Vec<Act>,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
pub(super) enum ProfileChoice {
    Frwr,
    Mlx5,
    Windows,
}

/// One thing that happens.
#[derive(Arbitrary, Debug)]
pub(super) enum Act {
    /// Time passes, a tick a step.
    Step(u8),
    /// So many eighths of the timeout pass at once.
    Leap(u8),
    /// The peer sends a message.
    Say(Say),
    /// The peer sends bytes.
    Send(Vec<u8>),
    /// The peer touches memory of the node.
    Touch {
        how: Touch,
        key: Key,
        address: Pick,
        offset: u16,
        length: Length,
    },
    /// The peer posts no receives again.
    Deaf,
    /// The peer's queue pair fails.
    Die,
    /// The application asks for a transfer.
    Submit {
        get: bool,
        flag: bool,
        size: u8,
        offset: u16,
        impatient: bool,
    },
    /// The application gives up on what it asked for.
    Cancel(u8),
    /// The application exports memory.
    Attach { options: u8, match_bits: u8 },
    /// The application takes it back.
    Detach(u8),
    /// The application reads its events, or stops doing so.
    Listen(bool),
    /// The control side ends the connection.
    Close,
    /// The control side makes the next one, if there is none.
    Connect { accepted: bool, depth: u8 },
    /// ... and says that it is up.
    Establish,
    /// The control side keeps broken windows, or rebuilds them.
    KeepBroken(bool),
    /// The device takes only so much of the next chain.
    Accept(u8),
    /// The device takes no receives for a while.
    RefuseReceives(u8),
    /// No step between the acts that follow, this many of them.
    Hurry(u8),
}

/// A message that is right where nothing else is said.
#[derive(Arbitrary, Debug)]
pub(super) struct Say {
    pub(super) kind: Kind,
    pub(super) cookie: Pick,
    pub(super) other: u64,
    pub(super) handle: Pick,
    pub(super) match_bits: u8,
    pub(super) portal: PortalChoice,
    pub(super) offset: u16,
    pub(super) length: Length,
    pub(super) key: Key,
    pub(super) fragments: Fragments,
    pub(super) status: Status,
    pub(super) credits: Option<u8>,
    pub(super) kill: Option<Key>,
    pub(super) wrong: Wrong,
    pub(super) encoding: u8,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
pub(super) enum Kind {
    ConnReq,
    ConnAck,
    Noop,
    Put,
    PutWantsAck,
    Get,
    Ping,
    Ack,
    Reply,
    PutReq,
    PutReqWantsAck,
    ReplyReq,
    PutNak,
    PutAck,
    PutDone,
    GetReq,
    PingReq,
    GetDone,
}

/// Something that the node has told, counted from the last; or any number.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub(super) enum Pick {
    Last,
    Back(u8),
    Any(u64),
}

impl Pick {
    pub(super) fn of<T: Copy>(self, list: &[T], any: impl FnOnce(u64) -> T) -> T {
        let back = |back: usize| list.len().checked_sub(1 + back).map(|at| list[at]);
        match self {
            Self::Last => back(0).unwrap_or_else(|| any(0)),
            Self::Back(by) => back(usize::from(by) % 16).unwrap_or_else(|| any(0)),
            Self::Any(number) => any(number),
        }
    }
}

#[derive(Arbitrary, Clone, Copy, Debug)]
pub(super) enum Key {
    Told(Pick),
    /// Over the peer's own memory.
    Own,
    /// Over all of the node's memory, for the node's own use.
    Local,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
pub(super) enum Length {
    /// As the node has said.
    Told(Pick),
    Nothing,
    Small(u8),
    Medium(u16),
    Any(u32),
}

#[derive(Arbitrary, Clone, Copy, Debug)]
pub(super) enum Status {
    Length,
    Errno(u8),
    Any(i32),
}

#[derive(Arbitrary, Clone, Copy, Debug)]
pub(super) enum PortalChoice {
    Open,
    Reserved,
    OfTheOther,
    Any(u32),
}

#[derive(Arbitrary, Clone, Copy, Debug)]
pub(super) enum Fragments {
    /// One, of the message's length.
    One,
    /// So many, of this length each, so far apart.
    Many { count: u16, each: u16, apart: u16 },
    /// One somewhere.
    At(u64),
}

#[derive(Arbitrary, Clone, Copy, Debug)]
pub(super) enum Wrong {
    Nothing,
    Nothing2,
    Nothing3,
    Source,
    Destination,
    SourceStamp,
    DestinationStamp,
    Version,
    LnetDestination,
    OtherNet,
    LnetSource,
    Patch(u8, u8),
    Cut(u8),
}

impl Say {
    /// The message, as the peer says it; nothing if there is no such message.
    pub(super) fn bytes(&self, peer: &mut Peer, key: RKey, length: u32) -> Option<Vec<u8>> {
        let cookie = self.cookie.of(&peer.cookies, |any| any);
        let handle = self
            .handle
            .of(&peer.handles, |any| WireHandle::from_words(STAMP, any));
        let portal = match self.portal {
            PortalChoice::Open => PORTAL,
            PortalChoice::Reserved => 0,
            PortalChoice::OfTheOther => HONEST_PORTAL,
            PortalChoice::Any(portal) => portal,
        };
        let (match_bits, offset) = (u64::from(self.match_bits), u32::from(self.offset));
        let put = |ack| lnet::Body::Put {
            ack,
            match_bits,
            hdr_data: 7,
            portal,
            offset,
        };
        let get = lnet::Body::Get {
            reply: WireHandle::from_words(9, 9),
            match_bits,
            portal,
            offset,
            sink_length: length,
        };
        let ping = lnet::Body::Get {
            reply: WireHandle::from_words(9, 9),
            match_bits: PING_BITS,
            portal: 0,
            offset: 0,
            sink_length: length,
        };
        let wants_ack = WireHandle::from_words(8, 8);
        let short = length.min(3976);
        let mut payload = vec![0x5a; short as usize];
        let header = |payload_length, body| {
            let mut header = peer.header(payload_length, body);
            match self.wrong {
                Wrong::LnetDestination => header.destination = NAMES[1],
                Wrong::OtherNet => header.destination = Nid::o2ib([10, 0, 0, 1], 7),
                Wrong::LnetSource => header.source = Nid(u64::from(self.match_bits)),
                _ => {}
            }
            header
        };
        let mut immediate = |payload_length, body| {
            payload.truncate(payload_length as usize);
            (header(payload_length, body), payload.clone())
        };
        let long = length.min(lnet::MTU);
        let inside;
        let own = peer.shared.sge().address;
        let fragments = match self.fragments {
            Fragments::One => vec![Fragment {
                length,
                address: own,
            }],
            Fragments::At(address) => vec![Fragment { length, address }],
            Fragments::Many { count, each, apart } => (0..count % 257 + 1)
                .map(|n| Fragment {
                    length: u32::from(each),
                    address: own.wrapping_add(u64::from(n) * u64::from(apart)),
                })
                .collect(),
        };
        // A descriptor of 257 fragments does not fit behind an LNet header and more: the codec says so.
        let sink = Descriptor::new(key, &fragments);
        let done = Done {
            cookie,
            status: match self.status {
                Status::Length => i32::try_from(length).unwrap_or(i32::MAX),
                Status::Errno(errno) => -i32::from(errno),
                Status::Any(status) => status,
            },
        };
        let params = ConnParams {
            queue_depth: 8,
            max_frags: 257,
            max_msg_size: 4096,
        };
        let body = match self.kind {
            Kind::ConnReq => Body::ConnReq(params),
            Kind::ConnAck => Body::ConnAck(params),
            Kind::Noop => Body::Noop,
            Kind::Put | Kind::PutWantsAck | Kind::Get | Kind::Ping | Kind::Ack | Kind::Reply => {
                inside = match self.kind {
                    Kind::Put => immediate(short, put(WireHandle::NONE)),
                    Kind::PutWantsAck => immediate(short, put(wants_ack)),
                    Kind::Get => immediate(0, get),
                    Kind::Ping => immediate(0, ping),
                    Kind::Ack => immediate(
                        0,
                        lnet::Body::Ack {
                            handle,
                            match_bits,
                            length,
                        },
                    ),
                    _ => immediate(short, lnet::Body::Reply { handle }),
                };
                Body::Immediate {
                    header: inside.0,
                    payload: &inside.1,
                }
            }
            Kind::PutReq => Body::PutReq {
                header: header(long, put(WireHandle::NONE)),
                cookie: self.other,
            },
            Kind::PutReqWantsAck => Body::PutReq {
                header: header(long, put(wants_ack)),
                cookie: self.other,
            },
            Kind::ReplyReq => Body::PutReq {
                header: header(long, lnet::Body::Reply { handle }),
                cookie: self.other,
            },
            Kind::PutNak => Body::PutNak(done),
            Kind::PutAck => Body::PutAck {
                source_cookie: cookie,
                sink_cookie: self.other,
                sink,
            },
            Kind::PutDone => Body::PutDone(done),
            Kind::GetReq => Body::GetReq {
                header: header(0, get),
                cookie: self.other,
                sink,
            },
            Kind::PingReq => Body::GetReq {
                header: header(0, ping),
                cookie: self.other,
                sink,
            },
            Kind::GetDone => Body::GetDone(done),
        };
        let mut envelope = peer.envelope(self.credits);
        match self.wrong {
            Wrong::Source => envelope.source = NAMES[0],
            Wrong::Destination => envelope.destination = NAMES[1],
            Wrong::SourceStamp => envelope.source_stamp ^= 1,
            Wrong::DestinationStamp => envelope.destination_stamp = 0,
            Wrong::Version => envelope.version = 0x11,
            _ => {}
        }
        let encoding = Encoding {
            order: if self.encoding & 1 == 0 {
                ByteOrder::NATIVE
            } else {
                ByteOrder::Big
            },
            checksum: match self.encoding >> 1 & 3 {
                1 => Checksum::Signed,
                2 => Checksum::Unsigned,
                _ => Checksum::None,
            },
        };
        let mut bytes = vec![0; 4096];
        let room = bytes.first_chunk_mut().expect("as long");
        let length = Message { envelope, body }.encode_as(encoding, room).ok()?;
        bytes.truncate(length as usize);
        match self.wrong {
            Wrong::Patch(at, value) => {
                if let Some(byte) = bytes.get_mut(usize::from(at)) {
                    *byte = value;
                }
            }
            Wrong::Cut(by) => bytes.truncate(bytes.len().saturating_sub(usize::from(by))),
            _ => {}
        }
        Some(bytes)
    }
}

/// Of the node.
pub(super) const STAMP: u64 = 101;
/// Whose entries anybody may use.
pub(super) const PORTAL: u32 = 5;
/// Whose entry is the honest peer's.
pub(super) const HONEST_PORTAL: u32 = 9;
/// Match bits of an LNet ping.
pub(super) const PING_BITS: u64 = 0x8000_0000_0000_0000;
