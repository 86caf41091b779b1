//! What a transfer waits for, what can happen to it, and what it does then.

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
