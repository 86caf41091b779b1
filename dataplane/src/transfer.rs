//! The sequence of one LNet message.
//!
//! [`step`] is the whole sequence: what a transfer does next is decided by its [`Phase`] and by an
//! [`Input`] that says what happened, and by nothing else. Work requests in flight are a count beside
//! the phase, because their completions may come before or after the peer's answer (a PUT_ACK may
//! overtake the completion of its PUT_REQ).

use crate::endpoint::{Error, MatchBits, Portal, Token};
use crate::memory::{Buffer, PageList, Posted};
use crate::pool::Handle;
use crate::registration::{Descriptor, Lease, Mechanism, Stage};
use crate::time::Instant;
use crate::wire::lnet::WireHandle;
use crate::wire::{Fragment, Located, Nid, Pid};

/// What a transfer waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Its share of the queue pair: ours only, nothing is reserved yet.
    Waiting,
    /// The mapping of its sink, which the control side makes, before it asks: ours only, a GET.
    MapRequest,
    /// The mapping of its sink, before it answers: a peer's PUT_REQ, or the REPLY of ours that came as one.
    MapAnswer,
    /// A credit for its request.
    Request,
    /// PUT_ACK or PUT_NAK.
    AskedPut,
    /// GET_DONE.
    AskedGet,
    /// The REPLY of a GET that went as a message.
    AskedReply,
    /// Room on the send queue for its WRITEs and their DONE.
    Data,
    /// The end of its last send.
    Sent,
    /// The end of its last send, and an LNet ACK.
    SentWantsAck,
    /// An LNet ACK.
    AwaitAck,
    /// Room on the send queue for its PUT_ACK, or for its refusal.
    Answer,
    /// PUT_DONE.
    Answered,
    /// Room on the send queue for an invalidate.
    Invalidate,
    /// The end of the invalidate.
    Invalidating,
    /// Its turns at being copied from its staging buffer to where it belongs.
    Copying,
    /// Nothing but the end of what is still on the send queue.
    Settling,
    /// The drain of its failed connection.
    Lost,
    /// The control side, which destroys its window.
    Rebuilding,
}

/// What happened to a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Input {
    /// It has its share, memory handle and buffer.
    Admitted,
    /// It has all that, but its sink is yet to be mapped.
    Unmapped,
    /// Its sink is mapped.
    Mapped,
    /// Its sink cannot be mapped, or nobody waits for that any more; whoever asked is told otherwise.
    Unmappable,
    /// Its PUT_REQ is on the send queue.
    PostedPutReq,
    /// Its GET_REQ is on the send queue.
    PostedGetReq,
    /// Its GET as a message is on the send queue.
    PostedGet,
    /// Its PUT_ACK is on the send queue.
    PostedPutAck,
    /// Its last message is on the send queue and nobody will answer.
    PostedLast,
    /// Its last message is on the send queue; the target will send an LNet ACK.
    PostedLastWantsAck,
    /// Its invalidate is on the send queue.
    PostedInvalidate,
    /// Nothing of it is on the send queue any more.
    Completed,
    /// The peer's PUT_ACK.
    PutAck,
    /// The peer's PUT_NAK.
    PutNak,
    /// The peer's PUT_DONE, or the WRITE that stands for it.
    PutDone,
    /// The peer's GET_DONE, or the WRITE that stands for it.
    GetDone,
    /// The REPLY, in a message.
    Reply,
    /// The REPLY, announced by a PUT_REQ.
    ReplyRequest,
    /// The LNet ACK.
    Ack,
    /// Its key is dead.
    Dead,
    /// Its key is dead, and its data is in a staging buffer.
    Staged,
    /// Its data is out of the staging buffer.
    Copied,
    /// Its time is over, or the application gave up on it.
    Expired,
    /// It is over, but its key is alive.
    Revoked,
    /// Its connection failed.
    ConnectionLost,
}

/// What to do now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// Nothing.
    Wait,
    /// Queue it for its mapping.
    Map,
    /// Queue its request for a credit.
    Request,
    /// Queue its WRITEs and DONE.
    Data,
    /// Queue its PUT_ACK.
    Answer,
    /// Queue its invalidate.
    Invalidate,
    /// Queue it for copying.
    Copy,
    /// End it as soon as nothing of it is on the send queue.
    Finish,
    /// The message that brought this means nothing here: drop it.
    Ignore,
    /// The peer broke the protocol: end the connection.
    Violation,
}

/// The next phase, and what to do.
///
/// Every cell is written out. Three kinds of cells repeat: an answer by cookie that is not waited for
/// ends the connection (the kernel does the same); an LNet ACK or REPLY that is not waited for is
/// dropped silently, as LNet does; an expired transfer whose key the peer may still use stays where it
/// is (its key and memory stay held, design rule 6).
#[inline(always)]
#[must_use]
pub const fn step(phase: Phase, input: Input) -> (Phase, Step) {
    use Input as I;
    use Phase as P;
    match (phase, input) {
        (P::Waiting, I::Admitted) => (P::Request, Step::Request),
        (P::Waiting, I::Unmapped) => (P::MapRequest, Step::Map),
        (P::Waiting, I::Expired) => (P::Settling, Step::Finish),

        (P::MapRequest, I::Mapped) => (P::Request, Step::Request),
        // Nobody has been told of it. What the control side makes of it stays for the next.
        (P::MapRequest, I::Unmappable | I::Expired) => (P::Settling, Step::Finish),

        (P::MapAnswer, I::Mapped) => (P::Answer, Step::Answer),
        // The peer waits for an answer: when this is over, it is a refusal, which may have to wait for its share.
        (P::MapAnswer, I::Expired) => (P::MapAnswer, Step::Wait),
        (P::MapAnswer, I::Unmappable) => (P::Settling, Step::Finish),

        (P::Request, I::PostedPutReq) => (P::AskedPut, Step::Wait),
        (P::Request, I::PostedGetReq) => (P::AskedGet, Step::Wait),
        (P::Request, I::PostedGet) => (P::AskedReply, Step::Wait),
        (P::Request, I::PostedLast) => (P::Sent, Step::Wait),
        (P::Request, I::PostedLastWantsAck) => (P::SentWantsAck, Step::Wait),
        (P::Request, I::Expired) => (P::Settling, Step::Finish),

        (P::AskedPut, I::PutAck) => (P::Data, Step::Data),
        (P::AskedPut, I::PutNak) => (P::Settling, Step::Finish),

        (P::AskedGet, I::GetDone) => (P::Invalidate, Step::Invalidate),

        (P::AskedReply, I::Reply) => (P::Settling, Step::Finish),
        (P::AskedReply, I::ReplyRequest) => (P::Answer, Step::Answer),
        (P::AskedReply | P::Answer, I::Unmapped) => (P::MapAnswer, Step::Map),
        // No key is out: nothing can arrive that would need the memory. A late REPLY finds no handle.
        (P::AskedReply, I::Expired) => (P::Settling, Step::Finish),

        // A PUT_ACK that overtook the end of its PUT_REQ, or one instalment of WRITEs done.
        (P::Data, I::Completed) => (P::Data, Step::Data),
        (P::Data, I::PostedLast) => (P::Sent, Step::Wait),
        (P::Data, I::PostedLastWantsAck) => (P::SentWantsAck, Step::Wait),

        (P::Sent, I::Completed) => (P::Settling, Step::Finish),

        (P::SentWantsAck, I::Completed) => (P::AwaitAck, Step::Wait),
        (P::SentWantsAck, I::Ack) => (P::Sent, Step::Wait),

        (P::AwaitAck, I::Ack | I::Expired) => (P::Settling, Step::Finish),

        (P::Answer, I::PostedPutAck) => (P::Answered, Step::Wait),
        // A refusal: PUT_NAK, or GET_DONE with a negative status.
        (P::Answer, I::PostedLast) => (P::Sent, Step::Wait),
        // The message buffer is home again.
        (P::Answer, I::Completed) => (P::Answer, Step::Answer),

        (P::Answered, I::PutDone) => (P::Invalidate, Step::Invalidate),

        (P::Invalidate, I::PostedInvalidate) => (P::Invalidating, Step::Wait),
        (P::Invalidate | P::Invalidating, I::Dead) => (P::Settling, Step::Finish),
        (P::Invalidate | P::Invalidating, I::Staged) => (P::Copying, Step::Copy),

        (P::Copying, I::Copied) => (P::Settling, Step::Finish),
        // No key of it is alive: what was not copied is left out.
        (P::Copying, I::Expired) => (P::Settling, Step::Finish),

        (P::Settling, I::Completed) => (P::Settling, Step::Finish),
        (P::Settling, I::Revoked) => (P::Invalidate, Step::Invalidate),

        (
            P::Waiting
            | P::MapRequest
            | P::MapAnswer
            | P::Request
            | P::AskedPut
            | P::AskedGet
            | P::AskedReply
            | P::Data
            | P::Sent
            | P::SentWantsAck
            | P::AwaitAck
            | P::Answer
            | P::Answered
            | P::Invalidate
            | P::Invalidating
            | P::Copying
            | P::Settling,
            I::ConnectionLost,
        ) => (P::Lost, Step::Wait),

        // Expired, while the peer may still use the key or the device still reads the memory.
        (P::AskedPut, I::Expired)
        | (P::AskedGet, I::Expired)
        | (P::Data, I::Expired)
        | (P::Sent, I::Expired)
        | (P::SentWantsAck, I::Expired)
        | (P::Answer, I::Expired)
        | (P::Answered, I::Expired)
        | (P::Invalidate, I::Expired)
        | (P::Invalidating, I::Expired)
        | (P::Settling, I::Expired) => (phase, Step::Wait),

        // The end of a send while the answer, or a mapping, is what counts.
        (P::AskedPut, I::Completed)
        | (P::MapAnswer, I::Completed)
        | (P::AskedGet, I::Completed)
        | (P::AskedReply, I::Completed)
        | (P::AwaitAck, I::Completed)
        | (P::Answered, I::Completed)
        | (P::Invalidate, I::Completed)
        | (P::Invalidating, I::Completed)
        | (P::Copying, I::Completed) => (phase, Step::Wait),

        // An answer by cookie that this transfer does not wait for: wrong type, early, late or twice.
        (
            P::Waiting
            | P::MapRequest
            | P::MapAnswer
            | P::Request
            | P::AskedGet
            | P::AskedReply
            | P::Data
            | P::Sent
            | P::SentWantsAck
            | P::AwaitAck
            | P::Answer
            | P::Answered
            | P::Invalidate
            | P::Invalidating
            | P::Copying
            | P::Settling,
            I::PutAck | I::PutNak,
        )
        | (
            P::Waiting
            | P::MapRequest
            | P::MapAnswer
            | P::Request
            | P::AskedPut
            | P::AskedReply
            | P::Data
            | P::Sent
            | P::SentWantsAck
            | P::AwaitAck
            | P::Answer
            | P::Answered
            | P::Invalidate
            | P::Invalidating
            | P::Copying
            | P::Settling,
            I::GetDone,
        )
        | (
            P::Waiting
            | P::MapRequest
            | P::MapAnswer
            | P::Request
            | P::AskedPut
            | P::AskedGet
            | P::AskedReply
            | P::Data
            | P::Sent
            | P::SentWantsAck
            | P::AwaitAck
            | P::Answer
            | P::Invalidate
            | P::Invalidating
            | P::Copying
            | P::Settling,
            I::PutDone,
        ) => (phase, Step::Violation),

        // LNet's own answers by handle, not waited for.
        (
            P::Waiting
            | P::MapRequest
            | P::MapAnswer
            | P::Request
            | P::AskedPut
            | P::AskedGet
            | P::Data
            | P::Sent
            | P::SentWantsAck
            | P::AwaitAck
            | P::Answer
            | P::Answered
            | P::Invalidate
            | P::Invalidating
            | P::Copying
            | P::Settling,
            I::Reply | I::ReplyRequest,
        )
        | (
            P::Waiting
            | P::MapRequest
            | P::MapAnswer
            | P::Request
            | P::AskedPut
            | P::AskedGet
            | P::AskedReply
            | P::Data
            | P::Sent
            | P::Answer
            | P::Answered
            | P::Invalidate
            | P::Invalidating
            | P::Copying
            | P::Settling,
            I::Ack,
        ) => (phase, Step::Ignore),

        // Over, but for the clearing up: whatever comes is too late.
        (
            P::Lost | P::Rebuilding,
            I::Admitted
            | I::Unmapped
            | I::Mapped
            | I::Unmappable
            | I::PostedPutReq
            | I::PostedGetReq
            | I::PostedGet
            | I::PostedPutAck
            | I::PostedLast
            | I::PostedLastWantsAck
            | I::PostedInvalidate
            | I::Completed
            | I::PutAck
            | I::PutNak
            | I::PutDone
            | I::GetDone
            | I::Reply
            | I::ReplyRequest
            | I::Ack
            | I::Dead
            | I::Staged
            | I::Copied
            | I::Expired
            | I::Revoked
            | I::ConnectionLost,
        ) => (phase, Step::Ignore),

        // The poller's own doing, which it does not do in these phases.
        (
            P::MapRequest
            | P::MapAnswer
            | P::Request
            | P::AskedPut
            | P::AskedGet
            | P::AskedReply
            | P::Data
            | P::Sent
            | P::SentWantsAck
            | P::AwaitAck
            | P::Answer
            | P::Answered
            | P::Invalidate
            | P::Invalidating
            | P::Copying
            | P::Settling,
            I::Admitted,
        )
        | (
            P::MapRequest
            | P::MapAnswer
            | P::Request
            | P::AskedPut
            | P::AskedGet
            | P::Data
            | P::Sent
            | P::SentWantsAck
            | P::AwaitAck
            | P::Answered
            | P::Invalidate
            | P::Invalidating
            | P::Copying
            | P::Settling,
            I::Unmapped,
        )
        | (
            P::Waiting
            | P::Request
            | P::AskedPut
            | P::AskedGet
            | P::AskedReply
            | P::Data
            | P::Sent
            | P::SentWantsAck
            | P::AwaitAck
            | P::Answer
            | P::Answered
            | P::Invalidate
            | P::Invalidating
            | P::Copying
            | P::Settling,
            I::Mapped | I::Unmappable,
        )
        | (
            P::Waiting
            | P::MapRequest
            | P::MapAnswer
            | P::AskedPut
            | P::AskedGet
            | P::AskedReply
            | P::Data
            | P::Sent
            | P::SentWantsAck
            | P::AwaitAck
            | P::Answer
            | P::Answered
            | P::Invalidate
            | P::Invalidating
            | P::Copying
            | P::Settling,
            I::PostedPutReq | I::PostedGetReq | I::PostedGet,
        )
        | (
            P::Waiting
            | P::MapRequest
            | P::MapAnswer
            | P::AskedPut
            | P::AskedGet
            | P::AskedReply
            | P::Sent
            | P::SentWantsAck
            | P::AwaitAck
            | P::Answered
            | P::Invalidate
            | P::Invalidating
            | P::Copying
            | P::Settling,
            I::PostedLast,
        )
        | (
            P::Waiting
            | P::MapRequest
            | P::MapAnswer
            | P::AskedPut
            | P::AskedGet
            | P::AskedReply
            | P::Sent
            | P::SentWantsAck
            | P::AwaitAck
            | P::Answer
            | P::Answered
            | P::Invalidate
            | P::Invalidating
            | P::Copying
            | P::Settling,
            I::PostedLastWantsAck,
        )
        | (
            P::Waiting
            | P::MapRequest
            | P::MapAnswer
            | P::Request
            | P::AskedPut
            | P::AskedGet
            | P::AskedReply
            | P::Data
            | P::Sent
            | P::SentWantsAck
            | P::AwaitAck
            | P::Answered
            | P::Invalidate
            | P::Invalidating
            | P::Copying
            | P::Settling,
            I::PostedPutAck,
        )
        | (
            P::Waiting
            | P::MapRequest
            | P::MapAnswer
            | P::Request
            | P::AskedPut
            | P::AskedGet
            | P::AskedReply
            | P::Data
            | P::Sent
            | P::SentWantsAck
            | P::AwaitAck
            | P::Answer
            | P::Answered
            | P::Invalidating
            | P::Copying
            | P::Settling,
            I::PostedInvalidate,
        )
        | (
            P::Waiting
            | P::MapRequest
            | P::MapAnswer
            | P::Request
            | P::AskedPut
            | P::AskedGet
            | P::AskedReply
            | P::Data
            | P::Sent
            | P::SentWantsAck
            | P::AwaitAck
            | P::Answer
            | P::Answered
            | P::Copying
            | P::Settling,
            I::Dead | I::Staged,
        )
        | (
            P::Waiting
            | P::MapRequest
            | P::MapAnswer
            | P::Request
            | P::AskedPut
            | P::AskedGet
            | P::AskedReply
            | P::Data
            | P::Sent
            | P::SentWantsAck
            | P::AwaitAck
            | P::Answer
            | P::Answered
            | P::Invalidate
            | P::Invalidating
            | P::Settling,
            I::Copied,
        )
        | (
            P::Waiting
            | P::MapRequest
            | P::MapAnswer
            | P::Request
            | P::AskedPut
            | P::AskedGet
            | P::AskedReply
            | P::Data
            | P::Sent
            | P::SentWantsAck
            | P::AwaitAck
            | P::Answer
            | P::Answered
            | P::Invalidate
            | P::Invalidating
            | P::Copying,
            I::Revoked,
        )
        | (P::Waiting | P::MapRequest | P::Request, I::Completed) => (phase, Step::Ignore),
    }
}

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

#[cfg(test)]
mod tests {
    use super::{Input, Phase, Step, step};

    const PHASES: [Phase; 19] = [
        Phase::Waiting,
        Phase::MapRequest,
        Phase::MapAnswer,
        Phase::Request,
        Phase::AskedPut,
        Phase::AskedGet,
        Phase::AskedReply,
        Phase::Data,
        Phase::Sent,
        Phase::SentWantsAck,
        Phase::AwaitAck,
        Phase::Answer,
        Phase::Answered,
        Phase::Invalidate,
        Phase::Invalidating,
        Phase::Copying,
        Phase::Settling,
        Phase::Lost,
        Phase::Rebuilding,
    ];
    const INPUTS: [Input; 25] = [
        Input::Admitted,
        Input::Unmapped,
        Input::Mapped,
        Input::Unmappable,
        Input::PostedPutReq,
        Input::PostedGetReq,
        Input::PostedGet,
        Input::PostedPutAck,
        Input::PostedLast,
        Input::PostedLastWantsAck,
        Input::PostedInvalidate,
        Input::Completed,
        Input::PutAck,
        Input::PutNak,
        Input::PutDone,
        Input::GetDone,
        Input::Reply,
        Input::ReplyRequest,
        Input::Ack,
        Input::Dead,
        Input::Staged,
        Input::Copied,
        Input::Expired,
        Input::Revoked,
        Input::ConnectionLost,
    ];

    fn run(inputs: &[Input]) -> (Phase, Step) {
        inputs
            .iter()
            .fold((Phase::Waiting, Step::Wait), |(phase, _), input| {
                step(phase, *input)
            })
    }

    #[test]
    fn the_sequences_of_the_protocol() {
        use Input as I;
        let over = (Phase::Settling, Step::Finish);
        for sequence in [
            // PUT, bulk, the answer before and after the end of the request.
            &[
                I::Admitted,
                I::PostedPutReq,
                I::Completed,
                I::PutAck,
                I::PostedLast,
                I::Completed,
            ][..],
            &[
                I::Admitted,
                I::PostedPutReq,
                I::PutAck,
                I::Completed,
                I::PostedLast,
                I::Completed,
            ],
            &[
                I::Admitted,
                I::PostedPutReq,
                I::PutAck,
                I::PostedLastWantsAck,
                I::Ack,
                I::Completed,
            ],
            &[
                I::Admitted,
                I::PostedPutReq,
                I::PutAck,
                I::PostedLastWantsAck,
                I::Completed,
                I::Ack,
            ],
            &[I::Admitted, I::PostedPutReq, I::PutNak],
            // PUT as a message.
            &[I::Admitted, I::PostedLast, I::Completed],
            // GET, bulk: our invalidate, and the peer's.
            &[
                I::Admitted,
                I::PostedGetReq,
                I::GetDone,
                I::PostedInvalidate,
                I::Dead,
            ],
            &[I::Admitted, I::PostedGetReq, I::GetDone, I::Dead],
            // The same, with a mapping that the control side makes, and with one that it cannot make.
            &[I::Unmapped, I::Mapped, I::PostedGetReq, I::GetDone, I::Dead],
            &[I::Unmapped, I::Unmappable],
            &[I::Unmapped, I::Expired],
            &[
                I::Admitted,
                I::PostedGet,
                I::Unmapped,
                I::Completed,
                I::Mapped,
                I::PostedPutAck,
                I::PutDone,
                I::Dead,
            ],
            &[
                I::Admitted,
                I::PostedGet,
                I::Unmapped,
                I::Expired,
                I::Unmappable,
            ],
            // GET as a message: the REPLY in a message, and in a PUT_REQ.
            &[I::Admitted, I::PostedGet, I::Completed, I::Reply],
            &[
                I::Admitted,
                I::PostedGet,
                I::ReplyRequest,
                I::PostedPutAck,
                I::PutDone,
                I::PostedInvalidate,
                I::Dead,
            ],
        ] {
            assert_eq!(run(sequence), over, "{sequence:?}");
        }
    }

    /// Rule 6: while the peer may use a key, time alone frees nothing.
    #[test]
    fn time_ends_nothing_whose_key_may_be_alive() {
        for phase in [
            Phase::AskedGet,
            Phase::Answered,
            Phase::Invalidate,
            Phase::Invalidating,
        ] {
            assert_eq!(step(phase, Input::Expired), (phase, Step::Wait));
        }
    }

    #[test]
    fn only_an_expected_answer_moves_anything() {
        for phase in PHASES {
            for input in [Input::PutAck, Input::PutNak, Input::PutDone, Input::GetDone] {
                let expected = matches!(
                    (phase, input),
                    (Phase::AskedPut, Input::PutAck | Input::PutNak)
                        | (Phase::Answered, Input::PutDone)
                        | (Phase::AskedGet, Input::GetDone)
                );
                let over = matches!(phase, Phase::Lost | Phase::Rebuilding);
                let (next, then) = step(phase, input);
                match (expected, over) {
                    (true, _) => assert_ne!(next, phase),
                    (false, true) => assert_eq!((next, then), (phase, Step::Ignore)),
                    (false, false) => assert_eq!((next, then), (phase, Step::Violation)),
                }
            }
        }
    }

    #[test]
    fn a_lost_connection_takes_every_living_transfer() {
        for phase in PHASES {
            let (next, _) = step(phase, Input::ConnectionLost);
            assert!(matches!(next, Phase::Lost | Phase::Rebuilding));
        }
    }

    #[test]
    fn memory_is_finished_only_where_no_key_can_be_alive() {
        for phase in PHASES {
            for input in INPUTS {
                if let (_, Step::Finish) = step(phase, input) {
                    assert!(
                        !matches!(phase, Phase::AskedGet | Phase::Answered)
                            && (!matches!(phase, Phase::Invalidate | Phase::Invalidating)
                                || input == Input::Dead),
                        "{phase:?} {input:?}"
                    );
                }
            }
        }
    }
}
