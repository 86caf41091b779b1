//! A peer without a poller: a device that the test drives by hand.
//!
//! It receives, sends any bytes, kills and writes under any key, and forgets nothing it was told. What it
//! sends of itself (`say`) is honest: right names, and all credits that it owes.

use std::collections::{HashMap, HashSet, VecDeque};

use o2poll_dataplane::memory::Range;
use o2poll_dataplane::nic::{
    Burst, Completion, Nic, Qp, RKey, ReceiveQueue, Remote, Rights, SendWr, Sge, Status, WrId,
};
use o2poll_dataplane::peer::Immediate;
use o2poll_dataplane::wire::lnet::{self, WireHandle};
use o2poll_dataplane::wire::{Body, Descriptor, Done, Encoding, Envelope, Fragment, Message, Nid};
use o2poll_soft as soft;
use o2poll_soft::{Ports, Profile, QueuePair, Soft};

use crate::Arena;
use crate::lend::lend;

/// What the peer received.
#[derive(Clone, Debug)]
pub struct Inbound {
    /// The message.
    pub bytes: Vec<u8>,
    /// The key of the peer that it killed.
    pub invalidated: Option<RKey>,
}

impl Inbound {
    /// The message, which must be a legal one: the node under test sends nothing else.
    #[must_use]
    pub fn message(&self) -> Message<'_> {
        Message::decode(&self.bytes).expect("a legal message").0
    }

    /// Cookie and sink of a GET_REQ, or source cookie's answer: sink cookie and sink of a PUT_ACK.
    #[must_use]
    pub fn grant(&self) -> Grant {
        let message = self.message();
        let (cookie, sink) = match message.body {
            Body::GetReq { cookie, sink, .. } => (cookie, sink),
            Body::PutAck {
                sink_cookie, sink, ..
            } => (sink_cookie, sink),
            other => panic!("no key in {other:?}"),
        };
        assert_eq!(sink.len(), 1, "this node registers: one fragment");
        let fragment = sink.get(0).expect("just counted");
        Grant {
            cookie,
            key: sink.key(),
            address: fragment.address,
            length: fragment.length,
        }
    }

    /// The cookie of a PUT_REQ.
    #[must_use]
    pub fn cookie(&self) -> u64 {
        match self.message().body {
            Body::PutReq { cookie, .. } | Body::GetReq { cookie, .. } => cookie,
            other => panic!("no cookie in {other:?}"),
        }
    }

    /// The LNet header.
    #[must_use]
    pub fn header(&self) -> lnet::Header {
        match self.message().body {
            Body::PutReq { header, .. }
            | Body::GetReq { header, .. }
            | Body::Immediate { header, .. } => header,
            other => panic!("no LNet header in {other:?}"),
        }
    }

    /// The handle to echo in an ACK or REPLY.
    #[must_use]
    pub fn handle(&self) -> WireHandle {
        match self.header().body {
            lnet::Body::Get { reply, .. } => reply,
            lnet::Body::Put { ack, .. } => ack,
            other => panic!("no handle in {other:?}"),
        }
    }
}

/// A key that the node gave away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    /// To be echoed in the DONE.
    pub cookie: u64,
    /// The key.
    pub key: RKey,
    /// Where in its address space.
    pub address: u64,
    /// How many bytes.
    pub length: u32,
}

impl Grant {
    /// The body that says so many bytes were moved, or a negative errno.
    #[must_use]
    pub const fn done(&self, status: i32) -> Done {
        Done {
            cookie: self.cookie,
            status,
        }
    }
}

/// A queue pair of the peer, and what it needs to know about the connection.
#[derive(Clone, Copy, Debug)]
pub struct Line {
    /// On its device.
    pub qp: Qp,
    /// Of the connection.
    pub depth: u16,
}

/// The peer.
pub struct RawPeer {
    /// Its device.
    pub device: Soft<'static, Ports<'static, 'static>>,
    /// Its memory; one key grants all of it.
    pub arena: Arena,
    /// Its name.
    pub nid: Nid,
    /// Its incarnation.
    pub stamp: u64,
    /// The node's name and incarnation.
    pub node: (Nid, u64),
    /// What it says in every header.
    pub version: u16,
    /// How it encodes.
    pub encoding: Encoding,
    /// The connection that it uses.
    pub line: Option<Line>,
    /// Messages that came, oldest first.
    pub inbox: VecDeque<Inbound>,
    /// WRITEs with immediate data that came, oldest first, and how many bytes each wrote.
    pub immediates: VecDeque<(Immediate, u32)>,
    /// Receives that failed.
    pub failed: Vec<Status>,
    /// Credits that it owes the node.
    pub owed: u16,
    /// Credits of the node that are spent, as far as this side can see.
    pub spent_by_node: i32,
    /// Credits of its own that are spent.
    pub spent: i32,
    /// Check that the node keeps to its credits; off for a peer that lies about them.
    pub counts: bool,
    /// Post a receive again at once when it has received.
    pub repost: bool,
    /// Entries of its send and its receive queue.
    sizes: (u32, u32),
    receives: HashMap<u64, (Qp, Range<'static>)>,
    outcomes: HashMap<u64, Result<(), Status>>,
    messages: HashMap<u64, Range<'static>>,
    /// GET_REQs of its own without an answer, as an immediate names them.
    asked: HashSet<u32>,
    spare: Vec<Range<'static>>,
    next: u64,
}

impl RawPeer {
    /// A peer over its own device.
    #[must_use]
    pub fn new(
        profile: Profile,
        nid: Nid,
        stamp: u64,
        node: (Nid, u64),
        (memory, depth): (usize, u16),
        ports: Ports<'static, 'static>,
    ) -> Self {
        let sends = SENDS.max(4 * u32::from(depth));
        let receives = RECEIVES.max(2 * u32::from(depth) + 2);
        let limits = soft::Limits {
            queue_pairs: 16,
            send_wr: sends,
            recv_wr: receives,
            windows: 1,
            memories: 1,
            cqe: 16 * (sends + receives),
        };
        let sizes = limits.sizes(&profile).expect("within the profile");
        let storage = soft::Storage {
            queue_pairs: lend(sizes.queue_pairs, soft::QueuePairSlot::default),
            numbers: lend(sizes.numbers, u32::default),
            sends: lend(sizes.sends, soft::SendEntry::default),
            pieces: lend(sizes.pieces, Sge::default),
            receives: lend(sizes.receives, soft::ReceiveEntry::default),
            regions: lend(sizes.regions, soft::RegionSlot::default),
            fragments: lend(sizes.fragments, soft::Fragment::default),
            memories: lend(sizes.memories, || None),
            completions: lend(sizes.completions, soft::CompletionEntry::default),
        };
        let mut device = Soft::new(profile, &limits, storage, ports).expect("sized to fit");
        let rights = Rights::LOCAL_WRITE | Rights::REMOTE_WRITE;
        let arena = Arena::granting(&mut device, memory, rights);
        Self {
            device,
            arena,
            nid,
            stamp,
            node,
            version: 0x12,
            encoding: Encoding::PLAIN,
            line: None,
            sizes: (sends, receives),
            inbox: VecDeque::new(),
            immediates: VecDeque::new(),
            failed: Vec::new(),
            owed: 0,
            spent_by_node: 0,
            spent: 0,
            counts: true,
            repost: true,
            receives: HashMap::new(),
            outcomes: HashMap::new(),
            messages: HashMap::new(),
            asked: HashSet::new(),
            spare: Vec::new(),
            next: 1,
        }
    }

    /// Opens a queue pair and posts its receives; it is the one used from now on.
    pub fn open(&mut self, number: u32, peer: u32, depth: u16) {
        if let Some(line) = self.line.take() {
            self.device.retire(line.qp);
            let (old, kept) = core::mem::take(&mut self.receives)
                .into_iter()
                .partition(|(_, (qp, _))| *qp == line.qp);
            self.receives = kept;
            let old: HashMap<u64, (Qp, Range<'static>)> = old;
            self.spare.extend(old.into_values().map(|(_, range)| range));
            self.spare
                .extend(self.messages.drain().map(|(_, range)| range));
        }
        let pair = QueuePair::new(number, 0, peer, self.sizes.0, self.sizes.1);
        let qp = self.device.adopt(pair).expect("room for a queue pair");
        self.line = Some(Line { qp, depth });
        (self.owed, self.spent_by_node, self.spent) = (0, 0, 0);
        self.inbox.clear();
        self.immediates.clear();
        self.asked.clear();
        self.post_receives(u32::from(depth) * 2 + 2);
    }

    /// Posts receives.
    pub fn post_receives(&mut self, count: u32) {
        let qp = self.qp();
        for _ in 0..count {
            let range = self.buffer();
            self.post(qp, range);
        }
    }

    /// The queue pair in use.
    #[must_use]
    pub fn qp(&self) -> Qp {
        self.line.expect("connected").qp
    }

    /// One turn of its device.
    pub fn step(&mut self) -> bool {
        let mut burst = Burst::new();
        self.device.poll(&mut burst).expect("a healthy device");
        for completion in &burst {
            match *completion {
                Completion::Done { id } => self.sent(id, Ok(())),
                Completion::Received {
                    id,
                    length,
                    imm,
                    invalidated,
                } => {
                    let (qp, range) = self.receives.remove(&id.0).expect("a receive of ours");
                    if self.line.is_some_and(|line| line.qp == qp) {
                        if let Some(bits) = imm {
                            self.ended(Immediate::from_bits(bits), length);
                        } else {
                            let bytes = range.bytes()[..length as usize].to_vec();
                            self.account(&bytes);
                            self.inbox.push_back(Inbound { bytes, invalidated });
                        }
                    }
                    if self.repost {
                        self.post(qp, range);
                    } else {
                        self.spare.push(range);
                    }
                }
                Completion::Failed { id, status } => {
                    if let Some((qp, range)) = self.receives.remove(&id.0) {
                        self.spare.push(range);
                        if self.line.is_some_and(|line| line.qp == qp) {
                            self.failed.push(status);
                        }
                    } else {
                        self.sent(id, Err(status));
                    }
                }
            }
        }
        !burst.is_empty()
    }

    /// An honest header that pays back so many credits.
    #[must_use]
    pub const fn envelope(&self, credits: u8) -> Envelope {
        Envelope {
            version: self.version,
            credits,
            source: self.nid,
            source_stamp: self.stamp,
            destination: self.node.0,
            destination_stamp: self.node.1,
        }
    }

    /// The bytes of a message with an honest header.
    #[must_use]
    pub fn encode(&self, body: Body<'_>, credits: u8) -> Vec<u8> {
        let mut bytes = [0; 4096];
        let message = Message {
            envelope: self.envelope(credits),
            body,
        };
        let length = message
            .encode_as(self.encoding, &mut bytes)
            .expect("legal at least in form");
        bytes[..length as usize].to_vec()
    }

    /// Sends a message, honestly.
    pub fn say(&mut self, body: Body<'_>) -> u64 {
        self.say_and_kill(body, None)
    }

    /// Sends a message, honestly but for the key that it kills.
    pub fn say_and_kill(&mut self, body: Body<'_>, kill: Option<RKey>) -> u64 {
        if matches!(body, Body::PutNak(_)) {
            self.owed += 1;
        }
        if matches!(
            body,
            Body::Immediate { .. } | Body::PutReq { .. } | Body::GetReq { .. }
        ) {
            self.spent += 1;
        }
        if let Body::GetReq { cookie, .. } = body {
            self.asked.insert(Immediate::new(0, cookie).cookie);
        }
        let credits = self.pay();
        let bytes = self.encode(body, credits);
        self.send(&bytes, kill)
    }

    /// All the credits that it owes, for what goes out next.
    fn pay(&mut self) -> u8 {
        let credits = u8::try_from(self.owed).expect("a depth below 256");
        self.owed = 0;
        self.spent_by_node -= i32::from(credits);
        credits
    }

    /// Writes all of what it was granted, with immediate data in place of the DONE. Honestly.
    pub fn fill(&mut self, grant: Grant, bytes: &[u8]) -> u64 {
        let immediate = Immediate::new(self.pay(), grant.cookie);
        self.write_with(grant.key, grant.address, bytes, Some(immediate))
    }

    /// Sends bytes.
    pub fn send(&mut self, bytes: &[u8], kill: Option<RKey>) -> u64 {
        let mut range = self.buffer();
        range.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
        let message = Sge {
            length: u32::try_from(bytes.len()).expect("a message"),
            ..range.sge()
        };
        let id = self.name();
        self.messages.insert(id, range);
        self.post_send(
            id,
            SendWr::Send {
                message,
                invalidate: kill,
            },
        )
    }

    /// Sends more bytes than any message has.
    pub fn send_long(&mut self, length: u32) -> u64 {
        let range = self.arena.take(length as usize, 0);
        let id = self.name();
        self.post_send(
            id,
            SendWr::Send {
                message: range.sge(),
                invalidate: None,
            },
        )
    }

    /// Writes bytes into memory of the node under a key; ask [`outcome`](Self::outcome) what came of it.
    pub fn write(&mut self, key: RKey, address: u64, bytes: &[u8]) -> u64 {
        self.write_with(key, address, bytes, None)
    }

    /// The same, with any immediate data.
    pub fn write_with(
        &mut self,
        key: RKey,
        address: u64,
        bytes: &[u8],
        immediate: Option<Immediate>,
    ) -> u64 {
        let mut range = self
            .arena
            .take(bytes.len(), usize::try_from(address % 64).unwrap_or(0));
        range.bytes_mut().copy_from_slice(bytes);
        let id = self.name();
        self.post_send(
            id,
            SendWr::Write {
                local: &[range.sge()],
                remote: Remote { address, rkey: key },
                imm: immediate.map(Immediate::to_bits),
            },
        )
    }

    /// Moves the queue pair to the error state: to the node this looks like a peer that is gone.
    pub fn die(&mut self) {
        let qp = self.qp();
        self.device.fail(qp);
    }

    /// What became of a request, if it is done.
    #[must_use]
    pub fn outcome(&self, id: u64) -> Option<Result<(), Status>> {
        self.outcomes.get(&id).copied()
    }

    /// Memory of its own to be written by the node: `(address, length)` each, under [`key`](Self::key).
    pub fn sink(&mut self, pieces: &[u32], hole: u32) -> Vec<Fragment> {
        let total: usize = pieces.iter().map(|piece| (piece + hole) as usize).sum();
        let mut address = self.arena.take(total, 3).sge().address;
        pieces
            .iter()
            .map(|piece| {
                let fragment = Fragment {
                    length: *piece,
                    address,
                };
                address += u64::from(piece + hole);
                fragment
            })
            .collect()
    }

    /// The key over all of its memory.
    #[must_use]
    pub const fn key(&self) -> RKey {
        RKey(self.arena.key().0)
    }

    /// What is in such a sink.
    #[must_use]
    pub fn peek(&self, sink: &[Fragment]) -> Vec<u8> {
        sink.iter()
            .flat_map(|piece| self.arena.peek(piece.address, piece.length as usize))
            .collect()
    }

    /// An LNet header from this peer to the node.
    #[must_use]
    pub const fn header(&self, payload_length: u32, body: lnet::Body) -> lnet::Header {
        lnet::Header {
            destination: self.node.0,
            source: self.nid,
            destination_pid: o2poll_dataplane::wire::Pid::LUSTRE,
            source_pid: o2poll_dataplane::wire::Pid::LUSTRE,
            payload_length,
            body,
        }
    }

    /// A PUT_REQ to portal 5.
    #[must_use]
    pub const fn put_req(&self, cookie: u64, match_bits: u64, length: u32) -> Body<'static> {
        Body::PutReq {
            header: self.header(length, put(match_bits, WireHandle::NONE)),
            cookie,
        }
    }

    /// A GET_REQ from portal 5.
    #[must_use]
    pub fn get_req<'m>(&self, cookie: u64, match_bits: u64, sink: &'m [Fragment]) -> Body<'m> {
        let length = sink.iter().map(|piece| piece.length).sum();
        Body::GetReq {
            header: self.header(
                0,
                get(match_bits, WireHandle::from_words(7, cookie), length),
            ),
            cookie,
            sink: Descriptor::new(self.key(), sink),
        }
    }

    fn buffer(&mut self) -> Range<'static> {
        self.spare.pop().unwrap_or_else(|| self.arena.take(4096, 0))
    }

    fn name(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn post(&mut self, qp: Qp, range: Range<'static>) {
        let id = self.name();
        let queue = ReceiveQueue::Of(qp);
        if self.device.receive(queue, WrId(id), range.sge()).is_ok() {
            self.receives.insert(id, (qp, range));
        } else {
            self.spare.push(range);
        }
    }

    fn post_send(&mut self, id: u64, wr: SendWr<'_>) -> u64 {
        let qp = self.qp();
        self.device.queue(qp, WrId(id), true, wr);
        assert!(
            self.device.doorbell(qp).is_ok(),
            "the peer's send queue is full"
        );
        id
    }

    fn sent(&mut self, id: WrId, outcome: Result<(), Status>) {
        self.outcomes.insert(id.0, outcome);
        if let Some(range) = self.messages.remove(&id.0) {
            self.spare.push(range);
        }
    }

    /// All of a sink of ours is written.
    fn ended(&mut self, immediate: Immediate, length: u32) {
        self.spent -= i32::from(immediate.credits);
        // The receive of a PUT_REQ comes back with its end, that of a GET_REQ with that.
        if !self.asked.remove(&immediate.cookie) {
            self.owed += 1;
        }
        self.immediates.push_back((immediate, length));
    }

    /// Keeps both sides' credits. The node must never overrun them.
    fn account(&mut self, bytes: &[u8]) {
        let (message, _) = Message::decode(bytes).expect("the node sends legal messages");
        assert_eq!(message.envelope.source, self.node.0);
        assert_eq!(message.envelope.destination, self.nid);
        self.spent -= i32::from(message.envelope.credits);
        if let Body::GetDone(done) = message.body {
            self.asked.remove(&Immediate::new(0, done.cookie).cookie);
        }
        match message.body {
            Body::Immediate { .. } | Body::GetReq { .. } => {
                self.owed += 1;
                self.spent_by_node += 1;
            }
            Body::PutReq { .. } => self.spent_by_node += 1,
            Body::PutDone(_) => self.owed += 1,
            _ => {}
        }
        let depth = i32::from(self.line.expect("connected").depth);
        assert!(
            !self.counts || self.spent_by_node <= depth,
            "the node overran its credits"
        );
    }
}

/// A PUT to portal 5.
#[must_use]
pub const fn put(match_bits: u64, ack: WireHandle) -> lnet::Body {
    lnet::Body::Put {
        ack,
        match_bits,
        hdr_data: 77,
        portal: 5,
        offset: 0,
    }
}

/// A GET from portal 5.
#[must_use]
pub const fn get(match_bits: u64, reply: WireHandle, sink_length: u32) -> lnet::Body {
    lnet::Body::Get {
        reply,
        match_bits,
        portal: 5,
        offset: 0,
        sink_length,
    }
}

/// Deepest send queue of the peer.
const SENDS: u32 = 256;
/// Deepest receive queue.
const RECEIVES: u32 = 64;
