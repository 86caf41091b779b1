//! A whole node, and a peer that does anything in any order.

use arbitrary::{Arbitrary, Unstructured};
use o2poll_dataplane::endpoint::{
    Entry, EntryOptions, Event, MatchBits, Operation, Portal, Request, Submission, Token,
};
use o2poll_dataplane::memory::PageList;
use o2poll_dataplane::nic::RKey;
use o2poll_dataplane::peer::Terms;
use o2poll_dataplane::poller::{Leftovers, Limits, Order, Reason, Shape};
use o2poll_dataplane::pool::Handle;
use o2poll_dataplane::ring::{LapSlot, Returned};
use o2poll_dataplane::time::{Instant, Ticks};
use o2poll_dataplane::wire::lnet::{self, WireHandle};
use o2poll_dataplane::wire::{Body, Done, Message, Nid, Pid};
use o2poll_soft::{Gauges, Lane, Lossy, Port, Ports, Profile, QueuePair, link};

use super::peer::{Peer, SHARED, Touch};
use super::plan::{
    Act, HONEST_PORTAL, Key, Length, PING_BITS, PORTAL, Plan, ProfileChoice, STAMP, Say,
};
use crate::lend::{alone, lend, lend_all, lend_one};
use crate::{NAMES, Node, Setup};

/// Whatever the peer, the application and time do: nothing panics, the node keeps to its credits, every
/// submission has one event, nobody writes into memory that was given back, an ended connection has a
/// reason that was counted, another connection works, and in the end nothing is missing.
pub fn connection(bytes: &[u8]) {
    let Ok(plan) = Plan::arbitrary_take_rest(Unstructured::new(bytes)) else {
        return;
    };
    alone(|| Bench::new(&plan).run(&plan));
}

/// Memory of the application.
struct Memory {
    size: u32,
    list: Option<&'static mut PageList<'static>>,
}

struct Bench {
    node: Node,
    /// The hostile one, and an honest one.
    peers: [Peer; 2],
    connections: [Option<Handle>; 2],
    /// The hostile peer's messages are taken.
    taken: bool,
    numbers: u32,
    now: Instant,
    shape: Shape,
    memories: Vec<Memory>,
    /// Exported memory, at home or as `Err` its handle.
    entries: Vec<Result<&'static mut PageList<'static>, Option<Handle>>>,
    listening: bool,
    /// Local key of the node.
    lkey: RKey,
    /// Acts that no step follows.
    hurry: u8,
    landed: u32,
    /// Where the honest peer PUTs: a window covers one piece only.
    landing: u32,
}

impl Bench {
    fn new(plan: &Plan) -> Self {
        let profile = match plan.profile {
            ProfileChoice::Frwr => Profile::frwr(),
            ProfileChoice::Mlx5 => Profile::mlx5(),
            ProfileChoice::Windows => Profile::windows(),
        };
        let depth = u16::from(plan.depth % 4) + 1;
        let shape = Shape {
            connections: 3,
            queue_depth: depth,
            writes_at_once: 2,
            waiting: 3,
            windows: 4,
            staging: 0,
            mappings: 0,
            register_source_from: 0,
            entries: 4,
        };
        let setup = Setup {
            shape,
            memory: 2 << 20,
            events: 16,
            reports: 16,
            timeout: TIMEOUT,
            abandon: TIMEOUT,
            keepalive: TIMEOUT / 2,
            wire: 32,
            ..Setup::new(profile)
        };
        let lane = || Lane {
            returned: lend_one(Returned::new()),
            slots: lend(setup.wire, LapSlot::new),
        };
        let (near, far): (Vec<Port<'_>>, Vec<Port<'_>>) = (0..2)
            .map(|_| link(lane(), lane()).expect("a power of two"))
            .unzip();
        let wire = Lossy::new(Ports::new(lend_all(near)), setup.weather, setup.seed);
        let now = Instant(1);
        let limits = Limits {
            nid: NAMES[0],
            pid: Pid::LUSTRE,
            stamp: STAMP,
            timeout: Ticks(setup.timeout),
            abandon: Ticks(setup.abandon),
            keepalive: Ticks(setup.keepalive),
            shape,
            registration: setup.registration,
        };
        let mut node = Node::new(&setup, limits, wire, now);
        let mut far = far.into_iter().zip([2, 3]).map(|(port, last)| {
            let nid = Nid::o2ib([10, 0, 0, last], 0);
            let ports = Ports::new(lend_all(vec![port]));
            Peer::new(profile, nid, 1000, (NAMES[0], STAMP), ports)
        });
        let peers = [far.next(), far.next()].map(|peer| peer.expect("two"));
        let memories = SIZES
            .into_iter()
            .map(|size| {
                // In two pieces, but for some that a window can cover.
                let first = if size == 4000 || size == 30_000 {
                    0
                } else {
                    size / 3
                };
                let pieces = [first, size - first];
                let list = node.arena.list(&pieces, 5, 7);
                home(list);
                Memory {
                    size,
                    list: Some(list),
                }
            })
            .collect();
        let entries = (0..4)
            .map(|index| {
                let list = node.arena.list(&[4096, 12_000 + index], 3, 16);
                home(list);
                Ok(list)
            })
            .collect();
        let lkey = RKey(node.arena.key().0);
        Self {
            node,
            peers,
            connections: [None; 2],
            taken: false,
            numbers: 0,
            now,
            shape,
            memories,
            entries,
            listening: true,
            lkey,
            hurry: 0,
            landed: 0,
            landing: match plan.profile {
                ProfileChoice::Windows => 4096,
                ProfileChoice::Frwr | ProfileChoice::Mlx5 => 0,
            },
        }
    }

    fn run(mut self, plan: &Plan) {
        self.attach(
            0,
            HONEST_PORTAL,
            EntryOptions::PUT | EntryOptions::EVENTS,
            0,
        );
        self.settle();
        self.connect(1, false, self.shape.queue_depth);
        self.establish(1);
        self.connect(0, plan.accepted, self.shape.queue_depth);
        if plan.establish {
            self.establish(0);
        }
        for act in plan.acts.iter().take(MOST_ACTS) {
            self.act(act);
            match self.hurry.checked_sub(1) {
                Some(left) => self.hurry = left,
                None => {
                    self.step();
                }
            }
        }
        self.listening = true;
        self.node.keep_broken = false;
        *self.node.poller.nic().faults() = o2poll_soft::Faults::default();
        self.poison_works();
        self.another_works();
        self.end();
    }

    fn act(&mut self, act: &Act) {
        match act {
            Act::Step(count) => {
                for _ in 0..*count {
                    self.step();
                }
            }
            Act::Leap(eighths) => {
                self.now = self.now.after(Ticks(u64::from(*eighths) * TIMEOUT / 8));
            }
            Act::Say(say) => self.say(say),
            Act::Send(bytes) => {
                self.peers[0].send(bytes, None);
            }
            Act::Touch {
                how,
                key,
                address,
                offset,
                length,
            } => {
                let key = self.key(*key);
                let address = address
                    .of(&self.peers[0].addresses, |any| any)
                    .wrapping_add(u64::from(*offset % 64));
                let length = self.length(*length);
                self.peers[0].touch(*how, key, address, length);
            }
            Act::Deaf => self.peers[0].deaf = true,
            Act::Die => self.peers[0].die(),
            Act::Submit {
                get,
                flag,
                size,
                offset,
                impatient,
            } => self.submit(*get, *flag, *size, *offset, *impatient),
            Act::Cancel(token) => {
                let token = Token(u64::from(*token) % SIZES.len() as u64);
                let _ = self.node.submissions.push(Submission::Cancel { token });
            }
            Act::Attach {
                options,
                match_bits,
            } => {
                let index = usize::from(*options >> 1) % 3 + 1;
                let options = EntryOptions::from_bits_truncate(options.wrapping_mul(5));
                self.attach(index, PORTAL, options, *match_bits);
            }
            Act::Detach(index) => {
                // Not the honest peer's, which is the first.
                let index = usize::from(*index) % 4;
                let entry = match self.entries.get(index) {
                    Some(Err(Some(entry))) if index != 0 => *entry,
                    _ => Handle::from_bits(u64::from(u32::MAX) << 32),
                };
                let _ = self.node.submissions.push(Submission::Detach { entry });
            }
            Act::Listen(listening) => self.listening = *listening,
            Act::Close => {
                if let Some(connection) = self.connections[0] {
                    let _ = self.node.orders.push(Order::Close { connection });
                }
            }
            Act::Connect { accepted, depth } => {
                let gone = self.connections[0].is_none_or(|connection| {
                    self.node.gone.iter().any(|(gone, _)| *gone == connection)
                });
                if gone && self.numbers < 32 {
                    let depth = u16::from(*depth) % self.shape.queue_depth + 1;
                    self.connect(0, *accepted, depth);
                }
            }
            Act::Establish => self.establish(0),
            Act::KeepBroken(keep) => self.node.keep_broken = *keep,
            Act::Accept(count) => {
                let faults = self.node.poller.nic().faults();
                faults.accept = Some(u32::from(count % 8));
            }
            Act::RefuseReceives(count) => {
                let faults = self.node.poller.nic().faults();
                faults.refuse_receives = u32::from(count % 8);
            }
            Act::Hurry(acts) => self.hurry = acts % 8 + 1,
        }
    }

    fn say(&mut self, say: &Say) {
        let key = self.key(say.key);
        let kill = say.kill.map(|key| self.key(key));
        let length = self.length(say.length);
        let peer = &mut self.peers[0];
        if let Some(bytes) = say.bytes(peer, key, length) {
            peer.send(&bytes, kill);
        }
    }

    fn key(&self, key: Key) -> RKey {
        match key {
            Key::Told(pick) => pick.of(&self.peers[0].keys, |any| RKey(any as u32)),
            Key::Own => self.peers[0].key(),
            Key::Local => self.lkey,
        }
    }

    fn length(&self, length: Length) -> u32 {
        match length {
            Length::Told(pick) => pick.of(&self.peers[0].lengths, |any| any as u32),
            Length::Nothing => 0,
            Length::Small(length) => length.into(),
            Length::Medium(length) => length.into(),
            Length::Any(length) => length,
        }
    }

    fn submit(&mut self, get: bool, flag: bool, size: u8, offset: u16, impatient: bool) {
        let Some(connection) = self.connections[0] else {
            return;
        };
        let index = usize::from(size) % SIZES.len();
        let memory = &mut self.memories[index];
        let Some(list) = memory.list.take() else {
            return;
        };
        check_home(list);
        let request = Request {
            token: Token(index as u64),
            connection,
            portal: Portal(PORTAL),
            match_bits: MatchBits(3),
            remote_offset: offset.into(),
            memory: list,
            operation: if get {
                Operation::Get { optimized: flag }
            } else {
                Operation::Put {
                    hdr_data: 1,
                    ack: flag,
                }
            },
            timeout: impatient.then_some(Ticks(TIMEOUT / 4)),
        };
        if let Err(Submission::Transfer(request)) =
            self.node.submissions.push(Submission::Transfer(request))
        {
            self.memories[index].list = Some(request.memory);
        }
    }

    fn attach(&mut self, index: usize, portal: u32, options: EntryOptions, match_bits: u8) {
        if self.entries[index].is_err() {
            return;
        }
        let Ok(list) = core::mem::replace(&mut self.entries[index], Err(None)) else {
            unreachable!("just looked at")
        };
        check_home(list);
        let entry = Entry {
            token: Token(index as u64),
            portal: Portal(portal),
            match_bits: MatchBits(match_bits.into()),
            ignore_bits: MatchBits(0xff),
            from: if index == 0 {
                self.peers[1].nid
            } else {
                Nid::ANY
            },
            options,
            memory: list,
        };
        if let Err(Submission::Attach(entry)) =
            self.node.submissions.push(Submission::Attach(entry))
        {
            self.entries[index] = Ok(entry.memory);
        }
    }

    fn terms(&self, of: usize, queue_depth: u16) -> Terms {
        Terms {
            local: NAMES[0],
            local_stamp: STAMP,
            peer: self.peers[of].nid,
            peer_stamp: self.peers[of].stamp,
            version: 0x12,
            queue_depth,
            max_frags: 257,
            high_water: queue_depth.div_ceil(2),
            kills_keys: false,
            keys_killed: false,
            write_immediates: false,
        }
    }

    fn connect(&mut self, of: usize, accepted: bool, depth: u16) {
        let sizes = self.shape.sizes();
        let terms = self.terms(of, depth);
        self.numbers += 2;
        let (ours, theirs) = (self.numbers, self.numbers + 1);
        self.peers[of].open(theirs, ours, depth);
        let port = u16::try_from(of).expect("two");
        let qp = QueuePair::new(ours, port, theirs, sizes.send_wr, sizes.recv_wr);
        self.node.poller.nic().set_terms(depth, terms.max_frags);
        self.node.order(Order::Adopt {
            qp,
            terms,
            accepted,
            token: u64::from(ours),
        });
        for _ in 0..100 {
            if let Some(connection) = self.node.ready.pop_front() {
                self.connections[of] = Some(connection);
                if of == 0 {
                    self.taken = accepted;
                }
                return;
            }
            self.step();
        }
        panic!("never adopted");
    }

    fn establish(&mut self, of: usize) {
        if let Some(connection) = self.connections[of] {
            let terms = self.terms(of, self.shape.queue_depth);
            let _ = self
                .node
                .orders
                .push(Order::Establish { connection, terms });
            self.taken |= of == 0;
        }
    }

    fn step(&mut self) -> bool {
        self.now = self.now.after(Ticks(1));
        let mut busy = self.node.step(self.now);
        for peer in &mut self.peers {
            busy |= peer.step();
        }
        while self.listening
            && let Some(event) = self.node.events.pop()
        {
            busy = true;
            self.take(event);
        }
        busy
    }

    fn take(&mut self, event: Event<'static>) {
        match event {
            Event::Done {
                token,
                outcome,
                memory,
            } => {
                let index = token.0 as usize;
                assert_eq!(
                    memory.length(),
                    u64::from(self.memories[index].size),
                    "another's memory"
                );
                if let Ok(bytes) = outcome {
                    assert!(u64::from(bytes) <= memory.length(), "{bytes} bytes moved");
                }
                home(memory);
                let before = self.memories[index].list.replace(memory);
                assert!(before.is_none(), "told twice");
            }
            Event::Attached { token, entry } => {
                self.entries[token.0 as usize] = Err(Some(entry));
            }
            Event::Detached { entry, .. } => {
                if let Some(entry) = entry {
                    home(entry.memory);
                    let index = entry.token.0 as usize;
                    let before = core::mem::replace(&mut self.entries[index], Ok(entry.memory));
                    assert!(before.is_err(), "detached twice");
                }
            }
            Event::Landed(landed) => {
                if landed.token.0 == 0 && landed.nid == self.peers[1].nid {
                    self.landed += 1;
                }
            }
        }
    }

    /// Steps until `done`; time leaps when nothing else happens.
    fn until(&mut self, mut done: impl FnMut(&mut Self) -> bool) -> bool {
        let mut quiet = 0;
        for _ in 0..MOST_STEPS {
            if done(self) {
                return true;
            }
            quiet = if self.step() { 0 } else { quiet + 1 };
            if quiet > 40 {
                self.now = self.now.after(Ticks(TIMEOUT / 8));
            }
        }
        done(self)
    }

    fn settle(&mut self) {
        let mut quiet = 0;
        for _ in 0..MOST_STEPS {
            quiet = if self.step() { 0 } else { quiet + 1 };
            if quiet == 4 {
                return;
            }
        }
        panic!("never at rest; {}", self.picture());
    }

    /// What no node may put up with has ended the connection.
    fn poison_works(&mut self) {
        self.settle();
        if !self.peers[0].poisoned || !self.taken {
            return;
        }
        let Some(connection) = self.connections[0] else {
            return;
        };
        let gone = self.until(|bench| bench.node.gone.iter().any(|(gone, _)| *gone == connection));
        assert!(gone, "it goes on; {}", self.picture());
    }

    /// The honest peer pings, and PUTs into the memory that is exported to it.
    fn another_works(&mut self) {
        let ping = lnet::Body::Get {
            reply: WireHandle::from_words(1, 2),
            match_bits: PING_BITS,
            portal: 0,
            offset: 0,
            sink_length: 272,
        };
        let honest = &mut self.peers[1];
        honest.inbox.clear();
        let header = honest.header(0, ping);
        honest.say(Body::Immediate {
            header,
            payload: &[],
        });
        let answered = self.until(|bench| {
            bench.peers[1].inbox.drain(..).any(|bytes| {
                let (message, _) = Message::decode(&bytes).expect("legal");
                matches!(message.body, Body::Immediate { payload, .. } if payload.len() == 48)
            })
        });
        assert!(answered, "no answer to a ping; {}", self.picture());

        let landed = self.landed;
        let honest = &mut self.peers[1];
        let put = lnet::Body::Put {
            ack: WireHandle::NONE,
            match_bits: 0,
            hdr_data: 0,
            portal: HONEST_PORTAL,
            offset: self.landing,
        };
        let header = honest.header(LANDING, put);
        honest.say(Body::PutReq { header, cookie: 5 });
        let mut granted = None;
        self.until(|bench| {
            for bytes in bench.peers[1].inbox.drain(..) {
                let (message, _) = Message::decode(&bytes).expect("legal");
                if let Body::PutAck {
                    sink_cookie, sink, ..
                } = message.body
                {
                    granted = Some((sink_cookie, sink.key(), sink.get(0).expect("one").address));
                }
            }
            granted.is_some()
        });
        let Some((cookie, key, address)) = granted else {
            panic!("no PUT_ACK; {}", self.picture());
        };
        let honest = &mut self.peers[1];
        honest.shared.bytes_mut().fill(0x77);
        honest.touch(Touch::Write, key, address, LANDING);
        honest.say(Body::PutDone(Done {
            cookie,
            status: i32::try_from(LANDING).expect("small"),
        }));
        let done = self.until(|bench| bench.landed != landed);
        assert!(done, "a PUT that never landed; {}", self.picture());
    }

    /// Stops the node, and looks at what is left.
    fn end(mut self) {
        self.node.order(Order::Stop);
        let stopped = self.until(|bench| bench.node.stopped.is_some());
        assert!(stopped, "not stopped; {}", self.picture());
        self.settle();
        assert_eq!(self.node.stopped, Some(Leftovers::default()));
        assert_eq!(self.node.retired, 4, "windows");
        assert_eq!(self.node.counters.keys_alive.get(), 0);
        assert_eq!(self.node.poller.nic().gauges(), Gauges::default());
        for memory in &self.memories {
            let list = memory
                .list
                .as_ref()
                .expect("every submission has its event");
            check_home(list);
        }
        for entry in &self.entries {
            let Ok(list) = entry else {
                panic!("an entry that was never given back");
            };
            check_home(list);
        }
        let counters = self.node.counters;
        let gone = &self.node.gone;
        assert_eq!(counters.connections_ended.get(), gone.len() as u64);
        let broken = gone.iter().filter(|(_, why)| {
            !matches!(why, Reason::Closed | Reason::Device(_) | Reason::TimedOut)
        });
        assert_eq!(counters.protocol_errors.get(), broken.count() as u64);
    }

    fn picture(&mut self) -> String {
        let node = &mut self.node;
        let counts: Vec<_> = node
            .counters
            .each()
            .filter(|(_, value)| *value != 0)
            .collect();
        let (left, gauges) = (node.poller.leftovers(), node.poller.nic().gauges());
        format!("{left:?} {gauges:?} gone {:?} {counts:?}", node.gone)
    }
}

/// Marks memory that is the application's.
fn home(list: &mut PageList<'static>) {
    for chunk in list.chunks_mut() {
        chunk.fill(0x11);
    }
}

/// Nobody has written into it since.
fn check_home(list: &PageList<'static>) {
    assert!(
        list.chunks().flatten().all(|byte| *byte == 0x11),
        "written into after it was given back"
    );
}

/// Of the application's lists: two of each kind of transfer.
const SIZES: [u32; 6] = [0, 100, 101, 4000, 5000, 30_000];
const TIMEOUT: u64 = 1000;
/// Bytes of the honest peer's PUT.
const LANDING: u32 = 8000;
const MOST_ACTS: usize = 200;
const MOST_STEPS: u32 = 20_000;
const _: () = assert!(LANDING as usize <= SHARED);
