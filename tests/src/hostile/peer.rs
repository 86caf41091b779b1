//! A peer that may do anything, and keeps what it was told. Small, and it never panics over its own
//! doings: only over what the node under test does.

use std::collections::{HashSet, VecDeque};

use o2poll_dataplane::memory::Range;
use o2poll_dataplane::nic::{
    Burst, Completion, Nic, Qp, RKey, ReceiveQueue, Remote, Rights, SendWr, Sge, WrId,
};
use o2poll_dataplane::wire::lnet::{self, WireHandle};
use o2poll_dataplane::wire::{Body, Done, Envelope, Message, Nid};
use o2poll_soft as soft;
use o2poll_soft::{Ports, Profile, QueuePair, Soft};

use crate::Arena;
use crate::lend::lend;

/// A peer over its own device.
pub(super) struct Peer {
    device: Soft<'static, Ports<'static, 'static>>,
    arena: Arena,
    qp: Option<Qp>,
    buffers: Vec<Range<'static>>,
    receives: Vec<Range<'static>>,
    /// Memory that WRITEs come from and the node may write to.
    pub(super) shared: Range<'static>,
    /// Buffers of messages under way, oldest first, and whether the message is poison.
    sending: VecDeque<(usize, bool)>,
    idle: Vec<usize>,
    /// Post no receive again.
    pub(super) deaf: bool,
    pub(super) nid: Nid,
    pub(super) stamp: u64,
    node: (Nid, u64),
    depth: u16,
    /// What the node has told, newest last.
    pub(super) keys: Vec<RKey>,
    pub(super) addresses: Vec<u64>,
    pub(super) cookies: Vec<u64>,
    pub(super) handles: Vec<WireHandle>,
    /// Lengths that it named.
    pub(super) lengths: Vec<u32>,
    /// Messages since the last look.
    pub(super) inbox: Vec<Vec<u8>>,
    /// Credits the node has coming, if this peer were honest.
    owed: u16,
    /// Requests of the node that came, and credits that went to it.
    requests_in: u64,
    credits_out: u64,
    /// Cookies told on this connection, and those that were answered.
    told: HashSet<u64>,
    answered: HashSet<u64>,
    /// What must end the connection has arrived at the node.
    pub(super) poisoned: bool,
    /// Requests that went to the node, and credits that came from it.
    requests_out: u64,
    credits_in: u64,
}

impl Peer {
    pub(super) fn new(
        profile: Profile,
        nid: Nid,
        stamp: u64,
        node: (Nid, u64),
        ports: Ports<'static, 'static>,
    ) -> Self {
        let limits = soft::Limits {
            queue_pairs: 2,
            send_wr: SENDS,
            recv_wr: RECEIVES,
            windows: 1,
            memories: 1,
            cqe: 4 * (SENDS + RECEIVES),
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
        let pages = BUFFERS + RECEIVES as usize;
        let mut arena = Arena::granting(&mut device, pages * 3 * 4096 + SHARED + 16_384, rights);
        Self {
            buffers: (0..BUFFERS).map(|_| arena.take(4096, 0)).collect(),
            receives: (0..RECEIVES).map(|_| arena.take(4096, 0)).collect(),
            shared: arena.take(SHARED, 0),
            device,
            arena,
            qp: None,
            sending: VecDeque::new(),
            idle: (0..BUFFERS).collect(),
            deaf: false,
            nid,
            stamp,
            node,
            depth: 0,
            keys: Vec::new(),
            addresses: Vec::new(),
            cookies: Vec::new(),
            handles: Vec::new(),
            lengths: Vec::new(),
            inbox: Vec::new(),
            owed: 0,
            requests_in: 0,
            credits_out: 0,
            told: HashSet::new(),
            answered: HashSet::new(),
            poisoned: false,
            requests_out: 0,
            credits_in: 0,
        }
    }

    /// Gives the queue pair of before up, and opens another.
    pub(super) fn open(&mut self, number: u32, peer: u32, depth: u16) {
        self.drop_queue_pair();
        let pair = QueuePair::new(number, 0, peer, SENDS, RECEIVES);
        let qp = self.device.adopt(pair).expect("room for a queue pair");
        (self.qp, self.depth, self.deaf) = (Some(qp), depth, false);
        (self.owed, self.requests_in, self.credits_out) = (0, 0, 0);
        (self.requests_out, self.credits_in) = (0, 0);
        self.told.clear();
        self.answered.clear();
        self.poisoned = false;
        for index in 0..self.receives.len().min(usize::from(depth) * 2 + 2) {
            self.post_receive(index);
        }
    }

    fn drop_queue_pair(&mut self) {
        if let Some(qp) = self.qp.take() {
            self.device.fail(qp);
            // The node has drained its side: nothing on the wire names this memory any more.
            self.device.retire(qp);
            self.idle
                .extend(self.sending.drain(..).map(|(index, _)| index));
        }
    }

    /// The queue pair fails: to the node this is a peer that is gone.
    pub(super) fn die(&mut self) {
        if let Some(qp) = self.qp {
            self.device.fail(qp);
        }
    }

    pub(super) fn key(&self) -> RKey {
        RKey(self.arena.key().0)
    }

    /// One turn of its device.
    pub(super) fn step(&mut self) -> bool {
        let mut burst = Burst::new();
        self.device.poll(&mut burst).expect("a healthy device");
        for completion in &burst {
            match *completion {
                Completion::Done { id } => self.sent(id, true),
                Completion::Failed { id, .. } => self.sent(id, false),
                Completion::Received { id, length, .. } => {
                    let index = id.0 as usize & 0xffff;
                    let bytes = self.receives[index].bytes()[..length as usize].to_vec();
                    self.learn(&bytes);
                    self.inbox.push(bytes);
                    if !self.deaf {
                        self.post_receive(index);
                    }
                }
            }
        }
        !burst.is_empty()
    }

    fn post_receive(&mut self, index: usize) {
        let Some(qp) = self.qp else { return };
        let sge = self.receives[index].sge();
        let id = WrId(RECEIVE | index as u64);
        // Refused when the queue pair has failed.
        let _ = self.device.receive(ReceiveQueue::Of(qp), id, sge);
    }

    fn sent(&mut self, id: WrId, arrived: bool) {
        if id.0 & SEND != 0 {
            let index = id.0 as usize & 0xffff;
            let at = self.sending.iter().position(|sending| sending.0 == index);
            if let Some((_, poison)) = at.and_then(|at| self.sending.remove(at)) {
                self.poisoned |= poison && arrived;
                self.idle.push(index);
            }
        }
    }

    /// Keeps what the node says, and holds it to its credits.
    fn learn(&mut self, bytes: &[u8]) {
        let (message, _) = Message::decode(bytes).expect("the node sends legal messages");
        assert_eq!(message.envelope.source, self.node.0);
        assert_eq!(message.envelope.destination, self.nid);
        self.credits_in += u64::from(message.envelope.credits);
        assert!(
            self.credits_in <= self.requests_out,
            "the node returns credits that it never got"
        );
        match message.body {
            Body::Immediate { header, .. } => {
                self.requests_in += 1;
                self.owed += 1;
                if let lnet::Body::Get { reply: handle, .. } | lnet::Body::Put { ack: handle, .. } =
                    header.body
                {
                    push(&mut self.handles, handle);
                }
            }
            Body::PutReq { cookie, header } => {
                self.requests_in += 1;
                self.told.insert(cookie);
                push(&mut self.cookies, cookie);
                push(&mut self.lengths, header.payload_length);
            }
            Body::GetReq { cookie, sink, .. } => {
                self.requests_in += 1;
                self.owed += 1;
                self.grant(cookie, &sink);
            }
            Body::PutAck {
                sink_cookie, sink, ..
            } => self.grant(sink_cookie, &sink),
            Body::PutDone(_) => self.owed += 1,
            Body::GetDone(_) | Body::PutNak(_) | Body::Noop => {}
            Body::ConnReq(_) | Body::ConnAck(_) => panic!("the node connects twice"),
        }
        assert!(
            self.requests_in <= self.credits_out + u64::from(self.depth),
            "the node overran its credits"
        );
    }

    fn grant(&mut self, cookie: u64, sink: &o2poll_dataplane::wire::Descriptor<'_>) {
        self.told.insert(cookie);
        push(&mut self.cookies, cookie);
        push(&mut self.keys, sink.key());
        for fragment in sink {
            push(&mut self.addresses, fragment.address);
            push(&mut self.lengths, fragment.length);
        }
    }

    /// An honest header; credits are all that is owed, if not said otherwise.
    pub(super) fn envelope(&mut self, credits: Option<u8>) -> Envelope {
        let credits = credits.unwrap_or_else(|| {
            let all = u8::try_from(self.owed).unwrap_or(u8::MAX);
            self.owed -= u16::from(all);
            all
        });
        Envelope {
            version: 0x12,
            credits,
            source: self.nid,
            source_stamp: self.stamp,
            destination: self.node.0,
            destination_stamp: self.node.1,
        }
    }

    /// Sends an honest message.
    pub(super) fn say(&mut self, body: Body<'_>) {
        let envelope = self.envelope(None);
        let mut bytes = [0; 4096];
        let length = Message { envelope, body }
            .encode(&mut bytes)
            .expect("legal") as usize;
        self.send(&bytes[..length], None);
    }

    /// Sends bytes; false if there is no room for them just now.
    pub(super) fn send(&mut self, bytes: &[u8], kill: Option<RKey>) -> bool {
        let (Some(qp), Some(index)) = (self.qp, self.idle.pop()) else {
            return false;
        };
        let bytes = &bytes[..bytes.len().min(4096)];
        self.buffers[index].bytes_mut()[..bytes.len()].copy_from_slice(bytes);
        let message = Sge {
            length: u32::try_from(bytes.len()).expect("short"),
            ..self.buffers[index].sge()
        };
        let wr = SendWr::Send {
            message,
            invalidate: kill,
        };
        self.device.queue(qp, WrId(SEND | index as u64), true, wr);
        if self.device.doorbell(qp).is_err() {
            self.idle.push(index);
            return false;
        }
        let poison = self.is_poison(bytes, kill);
        self.sending.push_back((index, poison));
        // Whatever the node makes of it, it counts at most for this much.
        if let Ok((message, _)) = Message::decode(bytes) {
            self.credits_out += u64::from(message.envelope.credits);
            match message.body {
                Body::Immediate { .. } | Body::PutReq { .. } | Body::GetReq { .. } => {
                    self.requests_out += 1;
                }
                Body::PutNak(_) => self.owed += 1,
                _ => {}
            }
        }
        true
    }

    /// Whether no node may go on after this message.
    fn is_poison(&mut self, bytes: &[u8], kill: Option<RKey>) -> bool {
        let Ok((message, _)) = Message::decode(bytes) else {
            return true;
        };
        let envelope = &message.envelope;
        let stale = envelope.version != 0x12
            || (envelope.source, envelope.source_stamp) != (self.nid, self.stamp)
            || (envelope.destination, envelope.destination_stamp) != self.node;
        let body = match message.body {
            Body::ConnReq(_) | Body::ConnAck(_) => true,
            // Answered twice, or never asked.
            Body::PutAck {
                source_cookie: cookie,
                ..
            }
            | Body::PutNak(Done { cookie, .. })
            | Body::PutDone(Done { cookie, .. })
            | Body::GetDone(Done { cookie, .. }) => {
                !self.told.contains(&cookie) || !self.answered.insert(cookie)
            }
            _ => false,
        };
        let kills = kill.is_some() && !matches!(message.body, Body::PutDone(_) | Body::GetDone(_));
        stale || body || kills
    }

    /// Touches memory of the node: WRITE, WRITE_WITH_IMM, READ.
    pub(super) fn touch(&mut self, how: Touch, key: RKey, address: u64, length: u32) {
        let Some(qp) = self.qp else { return };
        let local = [Sge {
            length: length.min(SHARED as u32),
            ..self.shared.sge()
        }];
        let remote = Remote { address, rkey: key };
        let wr = match how {
            Touch::Write => SendWr::Write {
                local: &local,
                remote,
                imm: None,
            },
            Touch::WriteImm => SendWr::Write {
                local: &local,
                remote,
                imm: Some(7),
            },
            Touch::Read => SendWr::Read {
                local: &local,
                remote,
            },
        };
        self.device.queue(qp, WrId(0), true, wr);
        // Refused when the queue is full or has failed.
        let _ = self.device.doorbell(qp);
    }

    pub(super) const fn header(&self, payload_length: u32, body: lnet::Body) -> lnet::Header {
        lnet::Header {
            destination: self.node.0,
            source: self.nid,
            destination_pid: o2poll_dataplane::wire::Pid::LUSTRE,
            source_pid: o2poll_dataplane::wire::Pid::LUSTRE,
            payload_length,
            body,
        }
    }
}

/// How memory of the node is touched.
#[derive(arbitrary::Arbitrary, Clone, Copy, Debug)]
pub(super) enum Touch {
    Write,
    WriteImm,
    Read,
}

fn push<T>(list: &mut Vec<T>, item: T) {
    if list.len() == MEMORY {
        list.remove(0);
    }
    list.push(item);
}

/// Things of a kind that it keeps.
const MEMORY: usize = 16;
const SENDS: u32 = 64;
const RECEIVES: u32 = 24;
const BUFFERS: usize = 24;
/// Bytes of its shared memory.
pub(super) const SHARED: usize = 64 << 10;
const SEND: u64 = 1 << 32;
const RECEIVE: u64 = 1 << 33;
