//! A device with a listener: reads every message that goes out and comes in, and keeps its own account of
//! credits and keys. It panics at the first message that breaks a rule of the protocol.

use core::ops::{Deref, DerefMut};
use std::collections::{BTreeMap, HashMap, HashSet};

use o2poll_dataplane::nic::{
    Burst, Capabilities, Completion, Fault, Mechanisms, Nic, Qp, RKey, ReceiveQueue, Region,
    Rejected, Remote, Rights, SendWr, Sge, WrId,
};
use o2poll_dataplane::peer::Immediate;
use o2poll_dataplane::wire::{Body, Message};

use crate::arena::View;

/// What has been heard on one queue pair.
#[derive(Clone, Debug, Default)]
pub struct Heard {
    /// Messages sent, by type.
    pub sent: BTreeMap<&'static str, u64>,
    /// Messages received, by type.
    pub received: BTreeMap<&'static str, u64>,
    /// Messages sent that cost a credit, less credits that came back.
    pub outstanding: u64,
    /// The most that `outstanding` has been.
    pub most_outstanding: u64,
    /// PUT_REQs and GET_REQs sent, less their answers.
    pub bulk: u64,
    /// The most that `bulk` has been.
    pub most_bulk: u64,
    /// Messages received that cost the peer a credit, less credits given back.
    pub owed: u64,
    /// WRITEs sent.
    pub writes: u64,
    /// Those of them that stand for a DONE.
    pub immediates: u64,
    /// The peer has returned more credits than were spent.
    pub overpaid: bool,
    /// GET_REQs without an answer, as an immediate names them.
    asked: HashSet<u32>,
    depth: u64,
}

/// What was posted to a queue pair for its peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Posted {
    /// A SEND of this message, and the key that it invalidates.
    Message(Vec<u8>, Option<RKey>),
    /// A WRITE of so many bytes, and its immediate data.
    Write(Remote, u32, Option<u32>),
}

impl Heard {
    /// Messages sent of a type.
    #[must_use]
    pub fn sent(&self, kind: &str) -> u64 {
        self.sent.get(kind).copied().unwrap_or(0)
    }
}

/// A request of the open chain.
enum Queued {
    Message(Vec<u8>, Option<RKey>),
    Register(Region, RKey, Rights),
    Invalidate(WrId, RKey),
    Write(Remote, u32, Option<u32>),
}

/// A device with a listener.
pub struct Tap<N> {
    inner: N,
    view: View,
    /// Listens to nothing.
    quiet: bool,
    /// The key of the arena, if peers may be told it.
    arena: Option<RKey>,
    /// Keys that are for our own device alone.
    private: HashSet<RKey>,
    depth: u64,
    max_frags: usize,
    chain: Vec<Queued>,
    heard: HashMap<u32, Heard>,
    receives: HashMap<WrId, (u32, Sge)>,
    live: HashSet<RKey>,
    keys: HashMap<u32, RKey>,
    /// Keys that windows came with: those of mappings may be told again and again.
    mapped: HashMap<u32, RKey>,
    /// Keys that were told to the peer since they were registered.
    told: HashSet<RKey>,
    dying: HashMap<WrId, RKey>,
    /// The device works, and what has completed stays in its completion queue: the core is told later.
    pub late: bool,
    /// Everything that was posted, in order, if it is wanted.
    pub log: Option<Vec<Posted>>,
}

impl<N: Nic> Tap<N> {
    /// Listens to `inner`, whose messages lie in `view`.
    #[must_use]
    pub fn new(inner: N, view: View) -> Self {
        Self {
            inner,
            view,
            quiet: false,
            arena: None,
            private: HashSet::new(),
            depth: 0,
            max_frags: usize::MAX,
            chain: Vec::new(),
            heard: HashMap::new(),
            receives: HashMap::new(),
            live: HashSet::new(),
            keys: HashMap::new(),
            mapped: HashMap::new(),
            told: HashSet::new(),
            dying: HashMap::new(),
            late: false,
            log: None,
        }
    }

    /// Does not listen, and so allocates nothing. To be chosen before anything is adopted.
    pub fn be_quiet(&mut self) {
        self.quiet = true;
    }

    /// Peers may be told this key, again and again: the arena's.
    pub fn expose(&mut self, key: RKey) {
        self.arena = Some(key);
    }

    /// Queue pairs adopted from now on have this depth, and descriptors that go out no more fragments.
    pub fn set_terms(&mut self, depth: u16, max_frags: u16) {
        self.depth = u64::from(depth);
        self.max_frags = max_frags.into();
    }

    /// What was heard on the queue pair that was adopted last.
    #[must_use]
    pub fn last(&self) -> Heard {
        let last = self.heard.keys().max();
        last.map_or_else(Heard::default, |qp| self.heard[qp].clone())
    }

    fn sent(&mut self, qp: u32, bytes: &[u8]) {
        let (message, _) = Message::decode(bytes).expect("we send what can be decoded");
        let credits = u64::from(message.envelope.credits);
        let sink = match message.body {
            Body::PutAck { sink, .. } | Body::GetReq { sink, .. } => Some(sink),
            _ => None,
        };
        let fragments = sink.map_or(0, |sink| sink.len());
        assert!(fragments <= self.max_frags, "{fragments} fragments told");
        let key = sink.map(|sink| sink.key());
        if let Some(key) = key
            && self.arena != Some(key)
            && !self.mapped.values().any(|mapped| *mapped == key)
        {
            assert!(self.live.contains(&key), "{key:?} told, not registered");
            assert!(
                !self.private.contains(&key),
                "{key:?} told, and without a right for peers"
            );
            assert!(self.told.insert(key), "{key:?} told twice");
        }
        let heard = self.heard.entry(qp).or_default();
        assert!(!heard.overpaid, "goes on with credits it never spent");
        *heard.sent.entry(name(&message.body)).or_default() += 1;
        assert!(
            credits <= heard.owed,
            "returns {credits} credits and owes {}",
            heard.owed
        );
        heard.owed -= credits;
        if costs(&message.body) {
            heard.outstanding += 1;
            heard.most_outstanding = heard.most_outstanding.max(heard.outstanding);
            assert!(
                heard.outstanding <= heard.depth,
                "{} credits at depth {}",
                heard.outstanding,
                heard.depth
            );
        }
        if let Body::GetReq { cookie, .. } = message.body {
            heard.asked.insert(Immediate::new(0, cookie).cookie);
        }
        if matches!(message.body, Body::PutReq { .. } | Body::GetReq { .. }) {
            heard.bulk += 1;
            heard.most_bulk = heard.most_bulk.max(heard.bulk);
            assert!(heard.bulk <= heard.depth, "bulk requests above the depth");
        }
    }

    fn received(&mut self, qp: u32, bytes: &[u8]) {
        let Ok((message, _)) = Message::decode(bytes) else {
            return;
        };
        let heard = self.heard.entry(qp).or_default();
        *heard.received.entry(name(&message.body)).or_default() += 1;
        heard.overpaid |= u64::from(message.envelope.credits) > heard.outstanding;
        heard.outstanding = heard
            .outstanding
            .saturating_sub(u64::from(message.envelope.credits));
        if costs(&message.body) {
            heard.owed += 1;
        }
        if let Body::GetDone(done) = message.body {
            heard.asked.remove(&Immediate::new(0, done.cookie).cookie);
        }
        if matches!(
            message.body,
            Body::PutAck { .. } | Body::PutNak(_) | Body::GetDone(_)
        ) {
            heard.bulk = heard.bulk.saturating_sub(1);
        }
    }

    /// A WRITE with immediate data was posted in place of a DONE.
    fn ended(&mut self, qp: u32, immediate: Immediate) {
        let heard = self.heard.entry(qp).or_default();
        heard.immediates += 1;
        let credits = u64::from(immediate.credits);
        assert!(
            credits <= heard.owed,
            "returns {credits} credits and owes {}",
            heard.owed
        );
        heard.owed -= credits;
    }

    /// One has come.
    fn was_ended(&mut self, qp: u32, immediate: Immediate) {
        let heard = self.heard.entry(qp).or_default();
        let credits = u64::from(immediate.credits);
        heard.overpaid |= credits > heard.outstanding;
        heard.outstanding = heard.outstanding.saturating_sub(credits);
        if heard.asked.remove(&immediate.cookie) {
            heard.bulk = heard.bulk.saturating_sub(1);
        }
    }

    fn note(&mut self, posted: Posted) {
        if let Some(log) = &mut self.log {
            log.push(posted);
        }
    }

    fn dead(&mut self, key: RKey) {
        self.live.remove(&key);
        self.told.remove(&key);
    }
}

impl<N: Nic> Nic for Tap<N> {
    type QueuePair = N::QueuePair;
    type Window = N::Window;

    fn capabilities(&self) -> &Capabilities {
        self.inner.capabilities()
    }

    fn adopt(&mut self, qp: Self::QueuePair) -> Result<Qp, Self::QueuePair> {
        let qp = self.inner.adopt(qp)?;
        let heard = Heard {
            depth: self.depth,
            ..Heard::default()
        };
        self.heard.insert(qp.0, heard);
        Ok(qp)
    }

    fn fail(&mut self, qp: Qp) {
        self.inner.fail(qp);
    }

    fn retire(&mut self, qp: Qp) -> Option<Self::QueuePair> {
        self.inner.retire(qp)
    }

    fn adopt_window(&mut self, window: Self::Window) -> Result<(Region, RKey), Self::Window> {
        let (region, key) = self.inner.adopt_window(window)?;
        let maps = self.inner.capabilities().mechanisms;
        if maps.contains(Mechanisms::MAPPINGS) && !self.quiet {
            self.mapped.insert(region.0, key);
        }
        Ok((region, key))
    }

    fn retire_window(&mut self, region: Region) -> Option<Self::Window> {
        // Whatever key it had: the device says that it is dead from here on.
        self.mapped.remove(&region.0);
        if let Some(key) = self.keys.remove(&region.0) {
            self.dead(key);
        }
        self.inner.retire_window(region)
    }

    fn queue(&mut self, qp: Qp, id: WrId, signalled: bool, wr: SendWr<'_>) {
        if self.quiet {
            self.inner.queue(qp, id, signalled, wr);
            return;
        }
        self.chain.push(match &wr {
            SendWr::Send {
                message,
                invalidate,
            } => Queued::Message(
                self.view.copy(message.address, message.length as usize),
                *invalidate,
            ),
            SendWr::Write { local, remote, imm } => {
                let length = local.iter().map(|piece| piece.length).sum();
                Queued::Write(*remote, length, *imm)
            }
            SendWr::Read { local, remote } => {
                let length = local.iter().map(|piece| piece.length).sum();
                Queued::Write(*remote, length, None)
            }
            SendWr::Register {
                region,
                key,
                rights,
                ..
            } => Queued::Register(*region, *key, *rights),
            SendWr::Invalidate { key } => Queued::Invalidate(id, *key),
        });
        self.inner.queue(qp, id, signalled, wr);
    }

    fn doorbell(&mut self, qp: Qp) -> Result<(), Rejected> {
        if self.quiet {
            return self.inner.doorbell(qp);
        }
        let chain = core::mem::take(&mut self.chain);
        let result = self.inner.doorbell(qp);
        let accepted = result.map_or_else(|rejected| rejected.accepted as usize, |()| chain.len());
        for queued in chain.into_iter().take(accepted) {
            match queued {
                Queued::Message(bytes, key) => {
                    self.sent(qp.0, &bytes);
                    self.note(Posted::Message(bytes, key));
                }
                Queued::Register(region, key, rights) => {
                    if rights.contains(Rights::REMOTE_WRITE) {
                        self.private.remove(&key);
                    } else {
                        self.private.insert(key);
                    }
                    self.keys.insert(region.0, key);
                    assert!(self.live.insert(key), "{key:?} registered while live");
                }
                Queued::Invalidate(id, key) => {
                    assert!(
                        self.live.contains(&key),
                        "{key:?} invalidated while not live"
                    );
                    self.dying.insert(id, key);
                }
                Queued::Write(remote, length, imm) => {
                    self.heard.entry(qp.0).or_default().writes += 1;
                    if let Some(bits) = imm {
                        self.ended(qp.0, Immediate::from_bits(bits));
                    }
                    self.note(Posted::Write(remote, length, imm));
                }
            }
        }
        result
    }

    fn receive(&mut self, into: ReceiveQueue, id: WrId, buffer: Sge) -> Result<(), Rejected> {
        self.inner.receive(into, id, buffer)?;
        if let ReceiveQueue::Of(qp) = into
            && !self.quiet
        {
            self.receives.insert(id, (qp.0, buffer));
        }
        Ok(())
    }

    fn poll(&mut self, out: &mut Burst) -> Result<(), Fault> {
        if self.late {
            // A burst without room.
            let mut full = Burst::new();
            full.resize(full.capacity(), Completion::Done { id: WrId(0) })
                .ok();
            return self.inner.poll(&mut full);
        }
        self.inner.poll(out)?;
        if self.quiet {
            return Ok(());
        }
        for completion in out.iter() {
            match *completion {
                Completion::Done { id } => {
                    if let Some(key) = self.dying.remove(&id) {
                        self.dead(key);
                    }
                }
                Completion::Received {
                    id,
                    length,
                    imm,
                    invalidated,
                } => {
                    if let Some(key) = invalidated {
                        self.dead(key);
                    }
                    if let Some((qp, buffer)) = self.receives.remove(&id) {
                        if let Some(bits) = imm {
                            self.was_ended(qp, Immediate::from_bits(bits));
                            continue;
                        }
                        let bytes = self.view.copy(buffer.address, length as usize);
                        self.received(qp, &bytes);
                    }
                }
                Completion::Failed { id, .. } => {
                    self.dying.remove(&id);
                    self.receives.remove(&id);
                }
            }
        }
        Ok(())
    }

    fn arm(&mut self) -> Result<(), Fault> {
        self.inner.arm()
    }
}

impl<N> Deref for Tap<N> {
    type Target = N;

    fn deref(&self) -> &N {
        &self.inner
    }
}

impl<N> DerefMut for Tap<N> {
    fn deref_mut(&mut self) -> &mut N {
        &mut self.inner
    }
}

/// Whether a message costs its sender a credit (v2: answers and NOOPs do not).
const fn costs(body: &Body<'_>) -> bool {
    matches!(
        body,
        Body::Immediate { .. } | Body::PutReq { .. } | Body::GetReq { .. }
    )
}

const fn name(body: &Body<'_>) -> &'static str {
    match body {
        Body::ConnReq(_) => "CONNREQ",
        Body::ConnAck(_) => "CONNACK",
        Body::Noop => "NOOP",
        Body::Immediate { .. } => "IMMEDIATE",
        Body::PutReq { .. } => "PUT_REQ",
        Body::PutNak(_) => "PUT_NAK",
        Body::PutAck { .. } => "PUT_ACK",
        Body::PutDone(_) => "PUT_DONE",
        Body::GetReq { .. } => "GET_REQ",
        Body::GetDone(_) => "GET_DONE",
    }
}
