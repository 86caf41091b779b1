//! The sequence of one LNet message.
//!
//! [`step`] is the whole sequence: what a transfer does next is decided by its [`Phase`] and by an
//! [`Input`] that says what happened, and by nothing else. Work requests in flight are a count beside
//! the phase, because their completions may come before or after the peer's answer (a PUT_ACK may
//! overtake the completion of its PUT_REQ).

mod sequence;
#[cfg(test)]
mod tests;

pub use sequence::{Input, Phase, Step, step};

use crate::endpoint::{Error, MatchBits, Portal, Token};
use crate::memory::{Buffer, PageList, Posted};
use crate::pool::Handle;
use crate::registration::{Descriptor, Lease, Mechanism, Stage};
use crate::time::Instant;
use crate::wire::lnet::WireHandle;
use crate::wire::{Fragment, Located, Nid, Pid};

/// Whose transfer it is, and which.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// Our PUT.
    Put,
    /// Our GET.
    Get,
    /// A peer's PUT_REQ.
    Sink,
    /// A peer's GET_REQ.
    Source,
    /// The REPLY to a peer's GET that came as a message.
    Reply,
    /// The LNet ACK of a peer's PUT.
    Ack,
    /// PUT_NAK with this status.
    Nak(i32),
    /// GET_DONE with this negative status.
    Refusal(i32),
}

impl Role {
    /// Whether it counts against our share of the queue pair, not against the peer's.
    pub(crate) const fn is_own(self) -> bool {
        matches!(self, Self::Put | Self::Get)
    }

    /// Whether a key to its memory goes to the peer.
    pub(crate) const fn is_sink(self) -> bool {
        matches!(self, Self::Get | Self::Sink)
    }
}

/// The memory that a transfer moves.
#[derive(Debug)]
pub(crate) enum Place<'a> {
    /// An application's, lent with its submission.
    Own(&'a mut PageList<'a>),
    /// Part of an exported entry.
    Entry { entry: Handle, offset: u64 },
    /// The ping info of this node.
    Ping,
    /// None.
    Nothing,
}

/// A message buffer's whereabouts.
#[derive(Debug)]
pub(crate) enum Message<'a> {
    Home(Buffer<'a>),
    Posted(Posted<'a>),
}

impl<'a> Message<'a> {
    /// The device is done with it.
    pub(crate) fn home(self) -> Self {
        match self {
            Self::Home(buffer) => Self::Home(buffer),
            Self::Posted(posted) => Self::Home(posted.completed()),
        }
    }

    /// The buffer, whoever had it last.
    pub(crate) fn into_buffer(self) -> Buffer<'a> {
        match self {
            Self::Home(buffer) => buffer,
            Self::Posted(posted) => posted.completed(),
        }
    }
}

/// The peer's descriptor of its sink.
#[derive(Debug)]
pub(crate) enum Sink<'a> {
    None,
    /// One fragment, as every fast-registering peer sends.
    One(Fragment),
    /// Many: they stay in the message that brought them, which is posted again when all is written.
    Many {
        receive: Handle,
        message: Buffer<'a>,
        located: Located,
        owe: bool,
    },
}

/// How far the WRITEs have come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Cursor {
    /// WRITEs posted.
    pub(crate) writes: u16,
    pub(crate) written: u32,
    pub(crate) fragment: u32,
    pub(crate) offset: u32,
}

/// One LNet message and its answers.
#[derive(Debug)]
pub struct Transfer<'a> {
    pub(crate) connection: Handle,
    pub(crate) role: Role,
    pub(crate) phase: Phase,
    /// As a bulk transfer (PUT_REQ, GET_REQ), not as a message.
    pub(crate) bulk: bool,
    /// Work requests on the send queue.
    pub(crate) in_flight: u16,
    pub(crate) deadline: Instant,
    /// Its time is over, and this is what will be said.
    pub(crate) abandoned: Option<Error>,
    pub(crate) outcome: Result<u32, Error>,
    pub(crate) place: Place<'a>,
    /// Bytes it may move.
    pub(crate) length: u32,
    pub(crate) window: Option<Descriptor>,
    /// How its sink is covered; `None` where it has no sink, or none yet.
    pub(crate) mechanism: Option<Mechanism>,
    pub(crate) stage: Option<Stage<'a>>,
    /// The mapping that it uses or waits for.
    pub(crate) mapping: Option<Lease>,
    /// When it last looked for one: [`Mappings::epoch`](crate::registration::Mappings::epoch), as it was then.
    pub(crate) looked: Option<u32>,
    pub(crate) message: Option<Message<'a>>,
    /// The peer's name for it, to echo.
    pub(crate) cookie: u64,
    pub(crate) sink: Sink<'a>,
    pub(crate) sink_key: crate::nic::RKey,
    /// The peer's sink ends where its data does.
    pub(crate) fills_sink: bool,
    pub(crate) cursor: Cursor,
    pub(crate) token: Token,
    pub(crate) portal: Portal,
    pub(crate) match_bits: MatchBits,
    pub(crate) remote_offset: u32,
    pub(crate) hdr_data: u64,
    /// LNet handle of the peer to echo in an ACK or REPLY; ours asks for an ACK if not NONE.
    pub(crate) handle: WireHandle,
    /// The other side of the LNet message.
    pub(crate) peer: (Nid, Pid),
    /// An event slot is reserved for it.
    pub(crate) event: bool,
    /// It is linked in one of its connection's queues.
    pub(crate) queued: bool,
    /// It holds a reserved credit.
    pub(crate) reserved: bool,
    /// It holds a share of the queue pair.
    pub(crate) admitted: bool,
}

impl Transfer<'_> {
    /// Nothing of it is queued, on the device or under a key: when it has come to its end, it may go at once.
    pub(crate) const fn is_bare(&self) -> bool {
        self.in_flight == 0
            && !self.queued
            && self.window.is_none()
            && !matches!(self.role, Role::Sink)
    }

    /// It reads its peer's descriptor in the message that brought it.
    pub(crate) const fn is_lent(&self) -> bool {
        matches!(self.sink, Sink::Many { .. })
    }

    /// Something of it is on the send queue. Nothing is to be done then but to wait.
    #[inline]
    pub(crate) const fn posted(&mut self, input: Input) {
        (self.phase, _) = step(self.phase, input);
    }
}
