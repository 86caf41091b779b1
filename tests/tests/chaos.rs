//! A peer that does anything, in any order, while the node moves data with it and with another.
//!
//! Whatever it does: every transfer is told once, memory is not touched after the event, the honest
//! connection goes on, and in the end everything has come back.

use o2poll_dataplane::endpoint::{EntryOptions, Event, Operation};
use o2poll_dataplane::nic::RKey;
use o2poll_dataplane::poller::Order;
use o2poll_dataplane::wire::lnet::{self, WireHandle};
use o2poll_dataplane::wire::{Body, ByteOrder, Checksum, Descriptor, Done, Encoding};
use o2poll_soft::Profile;
use o2poll_tests::lend::alone;
use o2poll_tests::raw_peer::{get, put};
use o2poll_tests::{Lab, Setup};
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Act {
    /// The node asks for something.
    Ask {
        kind: u8,
        length: u32,
    },
    /// The peer answers something it was asked, in the right way but for the status.
    Answer {
        which: prop::sample::Index,
        status: i32,
        kill: bool,
        shape: Vec<u16>,
    },
    /// The peer sends a message made of what it knows.
    Send {
        kind: u8,
        cookie: prop::sample::Index,
        key: Option<prop::sample::Index>,
        status: i32,
        length: u32,
        credits: u8,
        big: bool,
        /// Bytes that are changed: where, and to what.
        broken: Vec<(u16, u8)>,
        cut: Option<u16>,
    },
    /// The peer writes with a key it knows.
    Write {
        key: prop::sample::Index,
        offset: u32,
        length: u16,
    },
    Step(u8),
    Freeze(bool),
    Cancel(u8),
    Close,
    HoldWindows(bool),
    Partial(u8),
    Refuse(u8),
    /// The peer dies.
    Die,
    /// The honest peer moves something.
    Honest,
}

fn index() -> impl Strategy<Value = prop::sample::Index> {
    any::<prop::sample::Index>()
}

fn status() -> impl Strategy<Value = i32> {
    prop_oneof![-100..0_i32, 0..6000_i32, any::<i32>()]
}

fn act() -> impl Strategy<Value = Act> {
    let length = prop_oneof![0..200_u32, 3900..6000_u32];
    let broken = prop_oneof![
        4 => Just(vec![]),
        1 => prop::collection::vec((0..160_u16, any::<u8>()), 1..3),
    ];
    prop_oneof![
        6 => (0..4_u8, length.clone()).prop_map(|(kind, length)| Act::Ask { kind, length }),
        8 => (index(), status(), any::<bool>(), prop::collection::vec(0..3000_u16, 1..20))
            .prop_map(|(which, status, kill, shape)| Act::Answer { which, status, kill, shape }),
        4 => (
            (0..9_u8, index(), prop::option::weighted(0.1, index()), status(), length),
            (prop_oneof![5 => Just(0), 1 => 0..9_u8], any::<bool>(), broken),
            prop::option::weighted(0.05, 0..200_u16),
        )
            .prop_map(|((kind, cookie, key, status, length), (credits, big, broken), cut)| {
                Act::Send { kind, cookie, key, status, length, credits, big, broken, cut }
            }),
        3 => (index(), 0..8000_u32, 1..3000_u16)
            .prop_map(|(key, offset, length)| Act::Write { key, offset, length }),
        8 => (1..30_u8).prop_map(Act::Step),
        1 => any::<bool>().prop_map(Act::Freeze),
        1 => any::<u8>().prop_map(Act::Cancel),
        1 => Just(Act::Close),
        1 => any::<bool>().prop_map(Act::HoldWindows),
        2 => (0..4_u8).prop_map(Act::Partial),
        1 => (0..4_u8).prop_map(Act::Refuse),
        1 => Just(Act::Die),
        1 => Just(Act::Honest),
    ]
}

/// What the peer was asked and has not answered.
#[derive(Clone, Copy, Debug)]
enum Asked {
    Get(o2poll_tests::raw_peer::Grant),
    Ack(o2poll_tests::raw_peer::Grant),
    Put(u64),
    Small(WireHandle, bool),
}

struct Chaos {
    lab: Lab,
    asked: Vec<Asked>,
    cookies: Vec<u64>,
    handles: Vec<WireHandle>,
    keys: Vec<(RKey, u64)>,
    submitted: u64,
    done: Vec<bool>,
    /// Memory that is the application's again: address and bytes at the time of the event.
    ours: Vec<(u64, Vec<u8>)>,
}

const ENTRY: u64 = 42;
const LENGTH: u32 = 6000;

impl Chaos {
    fn new(profile: Profile) -> Self {
        let mut setup = Setup::new(profile);
        setup.memory = 3 << 20;
        setup.shape.connections = 3;
        setup.shape.queue_depth = 4;
        setup.shape.writes_at_once = 2;
        setup.shape.windows = 24;
        setup.timeout = 3000;
        setup.abandon = 3000;
        setup.profile.ack_timeout = 500;
        let mut lab = Lab::connected(setup, 2);
        let options = EntryOptions::PUT | EntryOptions::GET | EntryOptions::TRUNCATE;
        lab.export(ENTRY, options | EntryOptions::EVENTS, LENGTH);
        lab.peers[0].counts = false;
        Self {
            lab,
            asked: Vec::new(),
            cookies: vec![0, u64::MAX],
            handles: vec![WireHandle::NONE, WireHandle([0; 16])],
            keys: vec![(RKey(0), 0)],
            submitted: 0,
            done: Vec::new(),
            ours: Vec::new(),
        }
    }

    fn run(&mut self, act: Act) {
        match act {
            Act::Ask { kind, length } => {
                let operation = match kind {
                    0 => Operation::Put {
                        hdr_data: 1,
                        ack: false,
                    },
                    1 => Operation::Put {
                        hdr_data: 1,
                        ack: true,
                    },
                    2 => Operation::Get { optimized: true },
                    _ => Operation::Get { optimized: false },
                };
                if self.lab.node.submissions.free() > 0 {
                    self.lab.ask(0, self.submitted, operation, length);
                    self.submitted += 1;
                    self.done.push(false);
                }
            }
            Act::Answer {
                which,
                status,
                kill,
                shape,
            } => self.answer(which, status, kill, &shape),
            Act::Send { .. } => self.send(act),
            Act::Write {
                key,
                offset,
                length,
            } => {
                let (key, address) = *key.get(&self.keys);
                let bytes = vec![0xb0; usize::from(length)];
                let at = address.wrapping_add(u64::from(offset));
                self.lab.peers[0].write(key, at, &bytes);
            }
            Act::Step(count) => {
                for _ in 0..count {
                    self.step();
                }
            }
            Act::Freeze(frozen) => self.lab.frozen[0] = frozen,
            Act::Cancel(token) => {
                if self.lab.node.submissions.free() > 0 {
                    self.lab.cancel(u64::from(token) % self.submitted.max(1));
                }
            }
            Act::Close => {
                let connection = self.lab.connection(0);
                self.lab.node.order(Order::Close { connection });
                self.step();
            }
            Act::HoldWindows(hold) => self.lab.node.keep_broken = hold,
            Act::Partial(count) => {
                self.lab.node.poller.nic().faults().accept = Some(u32::from(count));
            }
            Act::Refuse(count) => {
                self.lab.node.poller.nic().faults().refuse_receives = u32::from(count);
            }
            Act::Die => self.lab.peers[0].die(),
            Act::Honest => self.honest(),
        }
        self.listen();
    }

    /// A GET_REQ with the honest peer, whose events are not mixed up with the others.
    fn honest(&mut self) {
        let connection = self.lab.connection(1);
        assert!(
            self.lab
                .node
                .gone
                .iter()
                .all(|(gone, _)| *gone != connection)
        );
        let operation = Operation::Get { optimized: true };
        let at = self.lab.ask(1, HONEST, operation, 4500).address;
        let mut grant = None;
        for _ in 0..20_000 {
            self.step();
            if let Some(message) = self.lab.peers[1].inbox.pop_front()
                && !matches!(message.message().body, Body::Noop)
            {
                grant = Some(message.grant());
                break;
            }
        }
        let grant = grant.unwrap_or_else(|| panic!("{}", self.lab.picture()));
        self.lab.peers[1].write(grant.key, grant.address, &[0x5a; 4500]);
        self.lab.peers[1].say(Body::GetDone(grant.done(4500)));
        let before = self.ours.len();
        for _ in 0..20_000 {
            self.step();
            if self.ours[before..]
                .iter()
                .any(|(address, _)| *address == at)
            {
                assert!(self.lab.node.arena.peek(at, 4500) == [0x5a; 4500]);
                return;
            }
        }
        panic!("{}", self.lab.picture());
    }

    fn step(&mut self) {
        self.lab.step();
        while let Some(event) = self.lab.node.events.pop() {
            match event {
                Event::Done { token, memory, .. } => {
                    if token.0 != HONEST {
                        let done = &mut self.done[usize::try_from(token.0).unwrap()];
                        assert!(!*done, "told twice");
                        *done = true;
                    }
                    for piece in memory.pieces() {
                        let bytes = self
                            .lab
                            .node
                            .arena
                            .peek(piece.address, piece.length as usize);
                        self.ours.push((piece.address, bytes));
                    }
                }
                Event::Landed(_) | Event::Detached { .. } => {}
                other => panic!("{other:?}"),
            }
        }
        let connection = self.lab.connection(0);
        let gone = self
            .lab
            .node
            .gone
            .iter()
            .any(|(gone, _)| *gone == connection);
        if gone {
            // Connected again by the control side. What was asked before is void, but not forgotten.
            self.asked.clear();
            self.lab.frozen[0] = false;
            self.lab.connect(0);
        }
    }

    /// Remembers all that the peer is told.
    fn listen(&mut self) {
        while let Some(message) = self.lab.peers[0].inbox.pop_front() {
            match message.message().body {
                Body::GetReq { cookie, .. } => {
                    let grant = message.grant();
                    self.keys.push((grant.key, grant.address));
                    self.cookies.push(cookie);
                    self.handles.push(message.handle());
                    self.asked.push(Asked::Get(grant));
                }
                Body::PutAck { .. } => {
                    let grant = message.grant();
                    self.keys.push((grant.key, grant.address));
                    self.cookies.push(grant.cookie);
                    self.asked.push(Asked::Ack(grant));
                }
                Body::PutReq { cookie, .. } => {
                    self.cookies.push(cookie);
                    self.asked.push(Asked::Put(cookie));
                }
                Body::Immediate { header, .. } => {
                    let handle = match header.body {
                        lnet::Body::Put { ack, .. } => (ack, false),
                        lnet::Body::Get { reply, .. } => (reply, true),
                        _ => continue,
                    };
                    self.handles.push(handle.0);
                    self.cookies.push(handle.0.words().1);
                    self.asked.push(Asked::Small(handle.0, handle.1));
                }
                _ => {}
            }
        }
    }

    fn answer(&mut self, which: prop::sample::Index, status: i32, kill: bool, shape: &[u16]) {
        if self.asked.is_empty() {
            return;
        }
        let at = which.index(self.asked.len());
        let asked = self.asked.remove(at);
        let peer = &mut self.lab.peers[0];
        let bounded =
            |grant: &o2poll_tests::raw_peer::Grant| status.min(grant.length.cast_signed());
        match asked {
            Asked::Get(grant) => {
                let done = grant.done(bounded(&grant));
                peer.say_and_kill(Body::GetDone(done), kill.then_some(grant.key));
            }
            Asked::Ack(grant) => {
                let done = grant.done(bounded(&grant));
                peer.say_and_kill(Body::PutDone(done), kill.then_some(grant.key));
            }
            Asked::Put(cookie) if status < 0 => {
                peer.say(Body::PutNak(Done { cookie, status }));
            }
            Asked::Put(source_cookie) => {
                let shape: Vec<u32> = shape.iter().map(|piece| u32::from(*piece)).collect();
                let sink = peer.sink(&shape, 1);
                let key = peer.key();
                peer.say(Body::PutAck {
                    source_cookie,
                    sink_cookie: 3,
                    sink: Descriptor::new(key, &sink),
                });
            }
            Asked::Small(handle, true) if kill => {
                let length = status.unsigned_abs() % 200;
                let header = peer.header(length, lnet::Body::Reply { handle });
                peer.say(Body::PutReq { header, cookie: 4 });
            }
            Asked::Small(handle, true) => {
                let length = status.unsigned_abs() % 200;
                let header = peer.header(length, lnet::Body::Reply { handle });
                let payload = vec![1; length as usize];
                peer.say(Body::Immediate {
                    header,
                    payload: &payload,
                });
            }
            Asked::Small(handle, false) => {
                let ack = lnet::Body::Ack {
                    handle,
                    match_bits: 7,
                    length: 0,
                };
                let header = peer.header(0, ack);
                peer.say(Body::Immediate {
                    header,
                    payload: &[],
                });
            }
        }
    }

    fn send(&mut self, act: Act) {
        let Act::Send {
            kind,
            cookie,
            key,
            status,
            length,
            credits,
            big,
            broken,
            cut,
        } = act
        else {
            return;
        };
        let handle = *cookie.get(&self.handles);
        let cookie = *cookie.get(&self.cookies);
        let key = key.map(|key| key.get(&self.keys).0);
        let peer = &mut self.lab.peers[0];
        let order = if big {
            ByteOrder::Big
        } else {
            ByteOrder::Little
        };
        let checksum = Checksum::None;
        peer.encoding = Encoding { order, checksum };
        let sink = peer.sink(&[length / 2, length - length / 2], 1);
        let done = Done { cookie, status };
        let payload = vec![7; (length % 3000) as usize];
        let small = length % 3000;
        let descriptor = Descriptor::new(peer.key(), &sink);
        let body = match kind {
            0 => Body::Noop,
            1 => Body::PutNak(done),
            2 => Body::PutDone(done),
            3 => Body::GetDone(done),
            4 => Body::PutAck {
                source_cookie: cookie,
                sink_cookie: 1,
                sink: descriptor,
            },
            5 => peer.get_req(cookie, ENTRY, &sink),
            6 => peer.put_req(cookie, ENTRY, length),
            7 => Body::Immediate {
                header: peer.header(small, put(ENTRY, handle)),
                payload: &payload,
            },
            _ => Body::Immediate {
                header: peer.header(0, get(ENTRY, handle, length)),
                payload: &[],
            },
        };
        let mut bytes = peer.encode(body, credits);
        peer.encoding = Encoding::PLAIN;
        for (at, byte) in broken {
            if let Some(place) = bytes.get_mut(usize::from(at)) {
                *place = byte;
            }
        }
        bytes.truncate(cut.map_or(4096, usize::from));
        peer.send(&bytes, key);
    }

    fn end(mut self) {
        self.lab.frozen[0] = false;
        self.lab.node.keep_broken = false;
        *self.lab.node.poller.nic().faults() = o2poll_soft::Faults::default();
        self.honest();
        // Everything is told, at the latest when its time is over.
        for _ in 0..20_000 {
            self.step();
        }
        assert!(self.done.iter().all(|done| *done), "{}", self.lab.picture());
        // Late writes with every key there ever was, one connection for each.
        for (key, address) in core::mem::take(&mut self.keys).into_iter().rev().take(4) {
            self.lab.peers[0].write(key, address, &[0xdd; 10]);
            for _ in 0..60 {
                self.step();
            }
        }
        for (address, bytes) in &self.ours {
            let now = self.lab.node.arena.peek(*address, bytes.len());
            assert!(now == *bytes, "memory was written after its event");
        }
        self.honest();
        self.lab.end();
    }
}

/// Token of the transfers with the honest peer.
const HONEST: u64 = 1 << 40;

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, max_shrink_iters: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn whatever_a_peer_does_it_does_to_itself(
        windows in any::<bool>(),
        acts in prop::collection::vec(act(), 1..80),
    ) {
        alone(|| {
            let mut chaos = Chaos::new(if windows { Profile::windows() } else { Profile::frwr() });
            for act in acts {
                chaos.run(act);
            }
            chaos.end();
        });
    }
}
