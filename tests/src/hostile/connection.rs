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
use o2poll_dataplane::wire::{
    Body, ByteOrder, Checksum, ConnParams, Descriptor, Done, Encoding, Fragment, Message, Nid, Pid,
};
use o2poll_soft::{Gauges, Lane, Lossy, Port, Ports, Profile, QueuePair, link};

use super::peer::{Peer, SHARED, Touch};
use crate::lend::{lend, lend_all, lend_one, reclaim};
use crate::{NAMES, Node, Setup};

/// One thing that happens.
#[derive(Arbitrary, Debug)]
enum Act {
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
struct Say {
    kind: Kind,
    cookie: Pick,
    other: u64,
    handle: Pick,
    match_bits: u8,
    portal: PortalChoice,
    offset: u16,
    length: Length,
    key: Key,
    fragments: Fragments,
    status: Status,
    credits: Option<u8>,
    kill: Option<Key>,
    wrong: Wrong,
    encoding: u8,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Kind {
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
enum Pick {
    Last,
    Back(u8),
    Any(u64),
}

impl Pick {
    fn of<T: Copy>(self, list: &[T], any: impl FnOnce(u64) -> T) -> T {
        let back = |back: usize| list.len().checked_sub(1 + back).map(|at| list[at]);
        match self {
            Self::Last => back(0).unwrap_or_else(|| any(0)),
            Self::Back(by) => back(usize::from(by) % 16).unwrap_or_else(|| any(0)),
            Self::Any(number) => any(number),
        }
    }
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Key {
    Told(Pick),
    /// Over the peer's own memory.
    Own,
    /// Over all of the node's memory, for the node's own use.
    Local,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Length {
    /// As the node has said.
    Told(Pick),
    Nothing,
    Small(u8),
    Medium(u16),
    Any(u32),
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Status {
    Length,
    Errno(u8),
    Any(i32),
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum PortalChoice {
    Open,
    Reserved,
    OfTheOther,
    Any(u32),
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Fragments {
    /// One, of the message's length.
    One,
    /// So many, of this length each, so far apart.
    Many { count: u16, each: u16, apart: u16 },
    /// One somewhere.
    At(u64),
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Wrong {
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

#[derive(Arbitrary, Debug)]
struct Plan {
    profile: ProfileChoice,
    depth: u8,
    accepted: bool,
    establish: bool,
    acts: Vec<Act>,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum ProfileChoice {
    Frwr,
    Mlx5,
    Windows,
}

/// Whatever the peer, the application and time do: nothing panics, the node keeps to its credits, every
/// submission has one event, nobody writes into memory that was given back, an ended connection has a
/// reason that was counted, another connection works, and in the end nothing is missing.
pub fn connection(bytes: &[u8]) {
    let Ok(plan) = Plan::arbitrary_take_rest(Unstructured::new(bytes)) else {
        return;
    };
    // SAFETY: all that is made in there goes no further.
    #[allow(unsafe_code)]
    unsafe {
        reclaim(|| Bench::new(&plan).run(&plan));
    }
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
        let cookie = say.cookie.of(&peer.cookies, |any| any);
        let handle = say
            .handle
            .of(&peer.handles, |any| WireHandle::from_words(STAMP, any));
        let portal = match say.portal {
            PortalChoice::Open => PORTAL,
            PortalChoice::Reserved => 0,
            PortalChoice::OfTheOther => HONEST_PORTAL,
            PortalChoice::Any(portal) => portal,
        };
        let (match_bits, offset) = (u64::from(say.match_bits), u32::from(say.offset));
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
            match say.wrong {
                Wrong::LnetDestination => header.destination = NAMES[1],
                Wrong::OtherNet => header.destination = Nid::o2ib([10, 0, 0, 1], 7),
                Wrong::LnetSource => header.source = Nid(u64::from(say.match_bits)),
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
        let fragments = match say.fragments {
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
            status: match say.status {
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
        let body = match say.kind {
            Kind::ConnReq => Body::ConnReq(params),
            Kind::ConnAck => Body::ConnAck(params),
            Kind::Noop => Body::Noop,
            Kind::Put | Kind::PutWantsAck | Kind::Get | Kind::Ping | Kind::Ack | Kind::Reply => {
                inside = match say.kind {
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
                cookie: say.other,
            },
            Kind::PutReqWantsAck => Body::PutReq {
                header: header(long, put(wants_ack)),
                cookie: say.other,
            },
            Kind::ReplyReq => Body::PutReq {
                header: header(long, lnet::Body::Reply { handle }),
                cookie: say.other,
            },
            Kind::PutNak => Body::PutNak(done),
            Kind::PutAck => Body::PutAck {
                source_cookie: cookie,
                sink_cookie: say.other,
                sink,
            },
            Kind::PutDone => Body::PutDone(done),
            Kind::GetReq => Body::GetReq {
                header: header(0, get),
                cookie: say.other,
                sink,
            },
            Kind::PingReq => Body::GetReq {
                header: header(0, ping),
                cookie: say.other,
                sink,
            },
            Kind::GetDone => Body::GetDone(done),
        };
        let mut envelope = peer.envelope(say.credits);
        match say.wrong {
            Wrong::Source => envelope.source = NAMES[0],
            Wrong::Destination => envelope.destination = NAMES[1],
            Wrong::SourceStamp => envelope.source_stamp ^= 1,
            Wrong::DestinationStamp => envelope.destination_stamp = 0,
            Wrong::Version => envelope.version = 0x11,
            _ => {}
        }
        let encoding = Encoding {
            order: if say.encoding & 1 == 0 {
                ByteOrder::NATIVE
            } else {
                ByteOrder::Big
            },
            checksum: match say.encoding >> 1 & 3 {
                1 => Checksum::Signed,
                2 => Checksum::Unsigned,
                _ => Checksum::None,
            },
        };
        let mut bytes = [0; 4096];
        let Ok(length) = (Message { envelope, body }).encode_as(encoding, &mut bytes) else {
            return;
        };
        let mut bytes = &mut bytes[..length as usize];
        match say.wrong {
            Wrong::Patch(at, value) => {
                if let Some(byte) = bytes.get_mut(usize::from(at)) {
                    *byte = value;
                }
            }
            Wrong::Cut(by) => {
                let left = bytes.len().saturating_sub(usize::from(by));
                bytes = &mut bytes[..left];
            }
            _ => {}
        }
        self.peers[0].send(bytes, kill);
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
        self.node.poller.nic().set_depth(depth);
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
        while quiet < 4 {
            quiet = if self.step() { 0 } else { quiet + 1 };
        }
    }

    /// What no node may put up with has ended the connection.
    fn poison_works(&mut self) {
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
const STAMP: u64 = 101;
const PORTAL: u32 = 5;
const HONEST_PORTAL: u32 = 9;
const PING_BITS: u64 = 0x8000_0000_0000_0000;
/// Bytes of the honest peer's PUT.
const LANDING: u32 = 8000;
const MOST_ACTS: usize = 200;
const MOST_STEPS: u32 = 20_000;
const _: () = assert!(LANDING as usize <= SHARED);
