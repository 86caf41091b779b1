//! What an application submits, and what it gets back.
//!
//! Memory goes in by value and comes out by value: between a [`Submission`] and its [`Event`] nobody
//! but the data plane can reach it, and when the event is out no key to it is alive.

use crate::memory::PageList;
use crate::pool::Handle;
use crate::time::Ticks;
use crate::wire::{Nid, Pid};

/// LNet portal index.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Portal(pub u32);

/// LNet match bits.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MatchBits(pub u64);

/// The application's own name for something; it comes back in the event and means nothing here.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Token(pub u64);

/// What an application asks for. Every submission is answered by exactly one event; an attached
/// entry gives one [`Event::Landed`] for each transfer that lands in it besides.
#[derive(Debug)]
pub enum Submission<'a> {
    /// A PUT or a GET.
    Transfer(Request<'a>),
    /// Export memory.
    Attach(Entry<'a>),
    /// Take exported memory back, once nothing moves in it.
    Detach {
        /// As told by [`Event::Attached`].
        entry: Handle,
    },
    /// Give up on transfers of this token. Their events come when their keys are dead; the cancel
    /// itself has no event.
    Cancel {
        /// Which.
        token: Token,
    },
}

/// A PUT or GET of ours.
#[derive(Debug)]
pub struct Request<'a> {
    /// The application's name for it.
    pub token: Token,
    /// The connection to use, as told when it was established.
    pub connection: Handle,
    /// Portal at the target.
    pub portal: Portal,
    /// Which buffer there.
    pub match_bits: MatchBits,
    /// Offset in bytes in the target's buffer.
    pub remote_offset: u32,
    /// Source of a PUT, sink of a GET; as long as the transfer. At most 1 MiB, in any shape.
    pub memory: &'a mut PageList<'a>,
    /// PUT or GET.
    pub operation: Operation,
    /// How long it may take; [`Limits`](crate::poller::Limits) has the default.
    pub timeout: Option<Ticks>,
}

/// What a [`Request`] does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Write to the target.
    Put {
        /// 64 bits that the target's application sees.
        hdr_data: u64,
        /// Ask for an LNet ACK: the event then says how many bytes the target took.
        ack: bool,
    },
    /// Read from the target.
    Get {
        /// Let the target write straight into our memory (GET_REQ) when it is too large for a message.
        /// False asks for a REPLY, as a routed GET does.
        optimized: bool,
    },
}

/// Exported memory: where incoming PUTs and GETs land.
#[derive(Debug)]
pub struct Entry<'a> {
    /// The application's name for it.
    pub token: Token,
    /// Portal it listens on. Portal 0 is LNet's own.
    pub portal: Portal,
    /// What the initiator must ask for ...
    pub match_bits: MatchBits,
    /// ... except in these bits.
    pub ignore_bits: MatchBits,
    /// Only this node, or [`Nid::ANY`].
    pub from: Nid,
    /// What may be done.
    pub options: EntryOptions,
    /// The memory; less than 4 GiB, since offsets on the wire have 32 bits.
    pub memory: &'a mut PageList<'a>,
}

bitflags::bitflags! {
    /// What may be done with an [`Entry`], as the options of an LNet memory descriptor.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct EntryOptions: u8 {
        /// Incoming PUTs may land here.
        const PUT = 1;
        /// Incoming GETs may read here.
        const GET = 2;
        /// A transfer that is too long is cut to what fits. Without it, it does not match.
        const TRUNCATE = 4;
        /// Never send an ACK, even if asked.
        const ACK_DISABLE = 8;
        /// The offset is ours and moves on with each transfer; without it the initiator's is used.
        const LOCAL_OFFSET = 16;
        /// Tell the application of each transfer ([`Event::Landed`]).
        const EVENTS = 32;
        /// Used by one transfer, then detached by itself.
        const ONCE = 64;
    }
}

/// What became of something.
#[derive(Debug)]
pub enum Event<'a> {
    /// A transfer of ours has ended. Its memory is the application's again, and no key to it is alive.
    Done {
        /// As submitted.
        token: Token,
        /// Bytes moved, or why not.
        outcome: Result<u32, Error>,
        /// As submitted.
        memory: &'a mut PageList<'a>,
    },
    /// An entry is attached.
    Attached {
        /// As submitted.
        token: Token,
        /// Its name from now on.
        entry: Handle,
    },
    /// An entry could not be attached, or is no longer.
    Detached {
        /// The entry with its memory; `None` for a [`Submission::Detach`] that named nothing.
        entry: Option<Entry<'a>>,
        /// Why, where nobody asked.
        why: Option<Error>,
    },
    /// A peer's transfer has landed in an entry with [`EntryOptions::EVENTS`].
    Landed(Landed),
}

/// A peer's transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Landed {
    /// The entry's token.
    pub token: Token,
    /// PUT or GET.
    pub operation: Incoming,
    /// From which node.
    pub nid: Nid,
    /// From which process there.
    pub pid: Pid,
    /// As asked for.
    pub match_bits: MatchBits,
    /// Where in the entry's memory.
    pub offset: u32,
    /// Bytes moved, or why not.
    pub outcome: Result<u32, Error>,
}

/// What a peer did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Incoming {
    /// It wrote.
    Put {
        /// The initiator's 64 bits.
        hdr_data: u64,
    },
    /// It read.
    Get,
}

/// Why a transfer did not do what was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[expect(
    clippy::error_impl_error,
    reason = "read as endpoint::Error, the room's only one"
)]
pub enum Error {
    /// The deadline passed before the peer was done.
    #[error("timed out")]
    TimedOut,
    /// The application gave up on it.
    #[error("cancelled")]
    Cancelled,
    /// The handle names no connection (any more).
    #[error("no such connection")]
    NotConnected,
    /// The connection ended before the transfer did.
    #[error("connection closed")]
    ConnectionClosed,
    /// The peer answered with a negative errno, e.g. -61 (ENODATA): no buffer there matches.
    #[error("the peer answered errno {0}")]
    Peer(i32),
    /// Longer than the LNet MTU, or than its memory.
    #[error("longer than 1 MiB")]
    TooLong,
    /// No mechanism of this device can put one key over this memory.
    #[error("no registration mechanism of this device covers this memory with one key")]
    Unmappable,
    /// Portal 0 is LNet's own.
    #[error("portal 0 is reserved")]
    ReservedPortal,
    /// Every entry slot is taken, or the memory is 4 GiB or more.
    #[error("no room for another entry")]
    NoRoom,
    /// A node of several cores polls each on its own: none knows where the next transfer of another lands, or that
    /// another has used it up. Only whoever hands submissions out to several cores says so.
    #[error("LOCAL_OFFSET and ONCE cannot be kept on several cores: attach it on one of them")]
    SeveralCores,
    /// Detached after its one use.
    #[error("used up")]
    Used,
    /// The node is shutting down.
    #[error("shutting down")]
    ShuttingDown,
}
