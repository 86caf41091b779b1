//! Requests, answers, and what to do about a refusal.

use super::extensions::RECORD_BYTES;
use super::{Extensions, Local, REPLY_BYTES, Remembered, Terms, V1_DEPTH};
use crate::wire::{
    Body, CONN_BYTES, ConnParams, Envelope, MESSAGE_BYTES, Message, Nid, REJECT_BYTES,
    RejectRecord, V1, V2, Why, WireError,
};

/// What to do with an incoming connection request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Take it.
    Accept {
        /// What is agreed on.
        terms: Terms,
        /// Private data of the CM REP: a CONNACK and, if the requester is of our own kind, the record of what this
        /// node offers.
        reply: [u8; REPLY_BYTES],
    },
    /// Refuse it.
    Reject {
        /// Private data of the CM REJ.
        record: [u8; REJECT_BYTES],
        /// What the record says.
        why: Why,
        /// What it means, for the log.
        refusal: Refusal,
        /// Whether the node has restarted, so that its connections of before must be closed.
        close_others: bool,
    },
}

/// Why this node does not agree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Refusal {
    /// `require_privileged_port` is set.
    #[error("source port is not below 1024, which require_privileged_port asks for")]
    Port,
    /// No o2iblnd message.
    #[error("private data is no o2iblnd message: {0}")]
    Unreadable(WireError),
    /// This node is starting.
    #[error("this node is not ready yet")]
    NotReady,
    /// Meant for another node.
    #[error("meant for {0}, which is not this node")]
    NotHere(Nid),
    /// Meant for an earlier life of this node.
    #[error("meant for another incarnation of this node")]
    StaleDestination,
    /// Some other message than belongs here.
    #[error("private data has message type {0:#04x}")]
    Type(u8),
    /// Depth 0. A kernel accepts it and then fails.
    #[error("queue depth 0")]
    NoDepth,
    /// Deeper than this node goes, or than was asked for.
    #[error("queue depth {0} is too deep")]
    Depth(u16),
    /// Not a single fragment.
    #[error("max_frags 0")]
    NoFrags,
    /// More fragments than this node grants, or than were asked for.
    #[error("max_frags {0} are too many")]
    Frags(u16),
    /// Messages of more than 4096 bytes.
    #[error("message size {0}, more than 4096")]
    MessageSize(u32),
    /// No room to remember another node.
    #[error("no room for another peer")]
    NoRoom,
    /// The node has restarted, or speaks another version than before. Its next request is good.
    #[error("peer has restarted")]
    OtherLife,
    /// Answered in another version than was asked in.
    #[error("answered in version {0:#x}")]
    Version(u16),
    /// Answered by another node than was asked.
    #[error("answered by {0}")]
    OtherNode(Nid),
}

/// Answers a connection request, check by check in ko2iblnd's order.
///
/// `private_data` is what came with CONNECT_REQUEST, behind the RDMA CM's own header; `source_port`
/// the requester's, where it can be told. `remembered` finds what is known of a node, and makes room
/// for one that is new; `None` says that there is no room.
///
/// The depth is granted as asked or refused with this node's own, never lowered in the reply: a
/// kernel that gets less than it asked for leaks.
pub fn answer<'r>(
    private_data: &[u8],
    source_port: Option<u16>,
    local: &Local,
    remembered: impl FnOnce(Nid) -> Option<&'r mut Remembered>,
) -> Answer {
    // Before this node's interface is found, a record names no values; none may be adopted from it.
    let nameless = |version: u16, why: Why, refusal: Refusal| {
        reject(
            RejectRecord {
                version,
                why,
                incarnation: 0,
                params: None,
            },
            refusal,
        )
    };
    if local.require_privileged_port && source_port.is_none_or(|port| port >= 1024) {
        return nameless(V2, Why::Fatal, Refusal::Port);
    }
    let message = match Message::decode(private_data) {
        Ok((message, _)) => message,
        // Says in passing which version this node speaks.
        Err(error) => return nameless(V2, Why::Fatal, Refusal::Unreadable(error)),
    };
    let envelope = &message.envelope;
    let version = envelope.version;
    if !local.ready {
        return nameless(version, Why::Early, Refusal::NotReady);
    }
    if envelope.destination != local.nid {
        let refusal = Refusal::NotHere(envelope.destination);
        return nameless(version, Why::Fatal, refusal);
    }
    // The requester's version: a kernel that reads another one does not dial again.
    let refuse = |why: Why, refusal: Refusal| {
        reject(
            RejectRecord {
                version,
                why,
                incarnation: local.stamp,
                params: Some(ConnParams {
                    queue_depth: local.deepest(version),
                    max_frags: local.max_frags,
                    max_msg_size: MESSAGE_BYTES,
                }),
            },
            refusal,
        )
    };
    if envelope.destination_stamp != 0 && envelope.destination_stamp != local.stamp {
        return refuse(Why::ConnStale, Refusal::StaleDestination);
    }
    let Body::ConnReq(params) = message.body else {
        return refuse(Why::Fatal, Refusal::Type(message.body.kind()));
    };
    if params.queue_depth == 0 {
        return refuse(Why::Fatal, Refusal::NoDepth);
    }
    if params.queue_depth > local.deepest(version) {
        let why = if version == V1 {
            Why::Fatal
        } else {
            Why::MsgQueueSize
        };
        return refuse(why, Refusal::Depth(params.queue_depth));
    }
    if params.max_frags == 0 {
        return refuse(Why::Fatal, Refusal::NoFrags);
    }
    if params.max_frags > local.max_frags {
        return refuse(Why::RdmaFrags, Refusal::Frags(params.max_frags));
    }
    if params.max_msg_size > MESSAGE_BYTES {
        return refuse(Why::Fatal, Refusal::MessageSize(params.max_msg_size));
    }
    let Some(remembered) = remembered(envelope.source) else {
        return refuse(Why::NoResources, Refusal::NoRoom);
    };
    let stamp = envelope.source_stamp;
    let other_life = remembered
        .stamp
        .is_some_and(|known| known != stamp || remembered.version != version);
    if other_life {
        // Believed although refused: the node asks again, and its next request must not be another life's.
        remembered.learn(version, stamp);
        let mut answer = refuse(Why::ConnStale, Refusal::OtherLife);
        if let Answer::Reject { close_others, .. } = &mut answer {
            *close_others = true;
        }
        return answer;
    }
    if params.queue_depth > remembered.held_depth {
        let record = too_deep(version, local, remembered);
        return reject(record, Refusal::Depth(params.queue_depth));
    }
    remembered.learn(version, stamp);
    remembered.settled();
    let theirs = Extensions::of_request(envelope.credits);
    let terms = terms(local, envelope, &params, theirs);
    let acknowledgement = ConnParams {
        max_msg_size: MESSAGE_BYTES,
        ..params
    }
    .acknowledge(&terms.envelope(0));
    let record = if theirs.is_empty() {
        [0; RECORD_BYTES]
    } else {
        local.extensions.record()
    };
    let mut reply = [0; REPLY_BYTES];
    for (to, from) in reply.iter_mut().zip(acknowledgement.iter().chain(&record)) {
        *to = *from;
    }
    Answer::Accept { terms, reply }
}

/// The record that refuses a request for a depth that this node's device does not hold for its sender. It asks for less
/// then; version 1 has one depth only.
#[must_use]
pub fn too_deep(version: u16, local: &Local, remembered: &Remembered) -> RejectRecord {
    RejectRecord {
        version,
        why: if version == V1 {
            Why::Fatal
        } else {
            Why::MsgQueueSize
        },
        incarnation: local.stamp,
        params: Some(ConnParams {
            queue_depth: remembered.held_depth.min(local.deepest(version)),
            max_frags: local.max_frags,
            max_msg_size: MESSAGE_BYTES,
        }),
    }
}

/// A connection request that was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Whom it asks.
    pub peer: Nid,
    /// In which version.
    pub version: u16,
    /// For what.
    pub params: ConnParams,
    /// What it offers.
    pub extensions: Extensions,
    /// Private data of the CM REQ, which it fills exactly.
    pub private_data: [u8; CONN_BYTES],
}

/// A connection request to `peer`, with what is remembered of it.
#[must_use]
pub fn request(local: &Local, remembered: &Remembered, peer: Nid) -> Request {
    let version = remembered.version;
    let params = ConnParams {
        queue_depth: remembered
            .queue_depth
            .min(remembered.held_depth)
            .min(local.deepest(version))
            .max(1),
        max_frags: remembered.max_frags.min(local.max_frags).max(1),
        max_msg_size: MESSAGE_BYTES,
    };
    let envelope = Envelope {
        version,
        credits: local.extensions.bits(),
        source: local.nid,
        source_stamp: local.stamp,
        destination: peer,
        destination_stamp: remembered.stamp.unwrap_or(0),
    };
    Request {
        peer,
        version,
        params,
        extensions: local.extensions,
        private_data: params.request(&envelope),
    }
}

/// Checks the private data of the CM REP that `request` got. The peer believes in a connection by now:
/// if this node does not, it must disconnect.
///
/// # Errors
/// What is wrong with the answer.
pub fn accepted(
    private_data: &[u8],
    request: &Request,
    local: &Local,
    remembered: &mut Remembered,
) -> Result<Terms, Refusal> {
    let (message, _) = Message::decode(private_data).map_err(Refusal::Unreadable)?;
    let envelope = &message.envelope;
    let Body::ConnAck(params) = message.body else {
        return Err(Refusal::Type(message.body.kind()));
    };
    if envelope.version != request.version {
        return Err(Refusal::Version(envelope.version));
    }
    if params.queue_depth == 0 {
        return Err(Refusal::NoDepth);
    }
    if params.queue_depth > request.params.queue_depth {
        return Err(Refusal::Depth(params.queue_depth));
    }
    if params.max_frags == 0 {
        return Err(Refusal::NoFrags);
    }
    if params.max_frags > request.params.max_frags {
        return Err(Refusal::Frags(params.max_frags));
    }
    if params.max_msg_size > MESSAGE_BYTES {
        return Err(Refusal::MessageSize(params.max_msg_size));
    }
    if envelope.source != request.peer {
        return Err(Refusal::OtherNode(envelope.source));
    }
    if envelope.destination != local.nid {
        return Err(Refusal::NotHere(envelope.destination));
    }
    if envelope.destination_stamp != local.stamp {
        return Err(Refusal::StaleDestination);
    }
    remembered.learn(envelope.version, envelope.source_stamp);
    remembered.settled();
    // Who was offered nothing has nothing to answer.
    let theirs = if request.extensions.is_empty() {
        Extensions::empty()
    } else {
        Extensions::of_reply(private_data)
    };
    Ok(terms(local, envelope, &params, theirs))
}

/// What to do after a refusal. The refused attempt must be gone before the next begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Dial again at once, with what is remembered now.
    Redial,
    /// Dial again after a pause: ko2iblnd's is a second.
    RedialLater,
    /// A race was lost: the peer's own request is on its way. Dial again, after a pause, if it does not
    /// come.
    Wait,
    /// Give up.
    Fail(Refused),
}

/// Why a peer does not want a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Refused {
    /// Nobody listens there (CM reason 8): EHOSTUNREACH. Dialing again is pointless (LU-14536).
    #[error("nobody listens there: is LNet up on that node, and is it the same service number?")]
    NoListener,
    /// By a reject record that leaves nothing to try: ECONNREFUSED.
    #[error("refused by the peer: {0:?}")]
    Peer(Why),
    /// By private data that is no reject record: ECONNREFUSED.
    #[error("refused with private data that is no reject record: {0}")]
    Unreadable(WireError),
    /// By the connection manager: ECONNREFUSED.
    #[error("refused by the connection manager, reason {0}")]
    Manager(u16),
}

/// Decides what follows a REJECTED event for `request`, and remembers what the record tells.
///
/// `reason` is the event's status. The first ten redials in a row happen at once, later ones after a
/// pause (LU-7569).
pub fn rejected(
    reason: u16,
    private_data: &[u8],
    request: &Request,
    local: &Local,
    remembered: &mut Remembered,
) -> Next {
    match reason {
        CM_CONSUMER_DEFINED => {}
        CM_INVALID_SERVICE_ID => return Next::Fail(Refused::NoListener),
        // Numbers of an earlier connection are still in its timewait.
        CM_STALE_CONN => return redial(remembered),
        other => return Next::Fail(Refused::Manager(other)),
    }
    let record = match RejectRecord::decode(private_data) {
        Ok((record, _)) => record,
        Err(error) => return Next::Fail(Refused::Unreadable(error)),
    };
    let why = match record.why {
        // A node that speaks only version 1 refuses every other so.
        Why::Fatal if record.version == V1 && request.version == V2 => Why::ConnUncompat,
        why => why,
    };
    let fail = Next::Fail(Refused::Peer(record.why));
    match (why, record.params) {
        (Why::ConnRace, _) => {
            remembered.races_lost = remembered.races_lost.saturating_add(1);
            Next::Wait
        }
        (Why::Early, _) => Next::RedialLater,
        (Why::ConnUncompat, _) => {
            // Its version 1 depth is fixed; a smaller node cannot serve it.
            if record.version == request.version
                || (record.version == V1 && local.queue_depth < V1_DEPTH)
            {
                return fail;
            }
            remembered.version = record.version;
            redial(remembered)
        }
        (Why::ConnStale, _) => {
            adopt_life(&record, request, remembered);
            redial(remembered)
        }
        (Why::RdmaFrags, Some(params))
            if (1..request.params.max_frags).contains(&params.max_frags) =>
        {
            adopt_life(&record, request, remembered);
            remembered.max_frags = params.max_frags;
            redial(remembered)
        }
        (Why::MsgQueueSize, Some(params))
            if (1..request.params.queue_depth).contains(&params.queue_depth) =>
        {
            adopt_life(&record, request, remembered);
            remembered.queue_depth = params.queue_depth;
            redial(remembered)
        }
        (
            Why::RdmaFrags
            | Why::MsgQueueSize
            | Why::NoResources
            | Why::Fatal
            | Why::InvalidSrvId
            | Why::Unknown(_),
            _,
        ) => fail,
    }
}

fn reject(record: RejectRecord, refusal: Refusal) -> Answer {
    Answer::Reject {
        record: record.encode(),
        why: record.why,
        refusal,
        close_others: false,
    }
}

/// The terms that an envelope *from* the peer, and its parameters, lead to.
fn terms(local: &Local, envelope: &Envelope, params: &ConnParams, theirs: Extensions) -> Terms {
    Terms {
        local: local.nid,
        local_stamp: local.stamp,
        peer: envelope.source,
        peer_stamp: envelope.source_stamp,
        version: envelope.version,
        queue_depth: params.queue_depth,
        max_frags: params.max_frags,
        high_water: local.high_water(envelope.version, params.queue_depth),
        kills_keys: local.extensions.kills_keys_of(theirs),
        keys_killed: theirs.kills_keys_of(local.extensions),
        write_immediates: local.extensions.write_immediates(theirs),
    }
}

/// Takes the incarnation of a record over. An old record has none: then the next request names none.
fn adopt_life(record: &RejectRecord, request: &Request, remembered: &mut Remembered) {
    match record.incarnation {
        0 | RejectRecord::UNKNOWN => remembered.stamp = None,
        stamp => remembered.learn(request.version, stamp),
    }
}

fn redial(remembered: &mut Remembered) -> Next {
    if remembered.redials >= REDIALS_AT_ONCE {
        return Next::RedialLater;
    }
    remembered.redials = remembered.redials.saturating_add(1);
    Next::Redial
}

/// Redials in a row that need no pause between them.
const REDIALS_AT_ONCE: u8 = 10;

/// CM reject reason "invalid service id" (IB spec, 12.6.7.2).
const CM_INVALID_SERVICE_ID: u16 = 8;
/// CM reject reason "stale connection".
const CM_STALE_CONN: u16 = 10;
/// CM reject reason "consumer defined": the private data tell.
const CM_CONSUMER_DEFINED: u16 = 28;
