//! One node under test, and peers that the test drives by hand.

use o2poll_dataplane::endpoint::{
    Entry, EntryOptions, Error, Event, MatchBits, Operation, Portal, Submission, Token,
};
use o2poll_dataplane::memory::PageList;
use o2poll_dataplane::nic::{Sge, Status};
use o2poll_dataplane::peer::{Immediate, Terms};
use o2poll_dataplane::poller::{Leftovers, Limits, Order, Reason};
use o2poll_dataplane::pool::Handle;
use o2poll_dataplane::ring::{LapSlot, Returned};
use o2poll_dataplane::time::{Instant, Ticks};
use o2poll_dataplane::wire::{Body, Descriptor, Done, Nid, Pid};
use o2poll_soft::{Lane, Lossy, Port, Ports, QueuePair, link};

use crate::lend::{lend, lend_all, lend_one};
use crate::node::Node;
use crate::raw_peer::{Inbound, RawPeer};
use crate::{NAMES, Setup, World};

/// One node, and [`RawPeer`]s each on a wire of its own.
pub struct Lab {
    /// The node under test; named `NAMES[0]`.
    pub node: Node,
    /// Its peers.
    pub peers: Vec<RawPeer>,
    /// The node's name of each peer's connection in use.
    pub connections: Vec<Option<Handle>>,
    /// Peers that do not turn now: nothing that is sent to them is taken in or acknowledged.
    pub frozen: Vec<bool>,
    /// The time.
    pub now: Instant,
    setup: Setup,
    numbers: u32,
}

impl Lab {
    /// A node and so many peers, not yet connected.
    #[must_use]
    pub fn new(setup: Setup, peers: u8) -> Self {
        let lane = || Lane {
            returned: lend_one(Returned::new()),
            slots: lend(setup.wire, LapSlot::new),
        };
        let (near, far): (Vec<Port<'_>>, Vec<Port<'_>>) = (0..peers)
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
            shape: setup.shape,
            registration: setup.registration,
        };
        let node = Node::new(&setup, limits, wire, now);
        let peers: Vec<_> = (1_u8..)
            .zip(far)
            .map(|(number, port)| {
                let ports = Ports::new(lend_all(vec![port]));
                RawPeer::new(
                    setup.profile,
                    Nid::o2ib([10, 0, 0, 1 + number], 0),
                    1000 + u64::from(number),
                    (NAMES[0], STAMP),
                    (setup.memory, setup.shape.queue_depth),
                    ports,
                )
            })
            .collect();
        Self {
            node,
            connections: vec![None; peers.len()],
            frozen: vec![false; peers.len()],
            peers,
            now,
            setup,
            numbers: 0,
        }
    }

    /// Such a lab, with every peer connected.
    #[must_use]
    pub fn connected(setup: Setup, peers: u8) -> Self {
        let mut lab = Self::new(setup, peers);
        for peer in 0..usize::from(peers) {
            lab.connect(peer);
        }
        lab
    }

    /// One step of everything; whether anything happened.
    pub fn step(&mut self) -> bool {
        self.now = self.now.after(Ticks(1));
        let mut busy = self.node.step(self.now);
        for (peer, frozen) in self.peers.iter_mut().zip(&self.frozen) {
            busy |= !frozen && peer.step();
        }
        busy
    }

    /// Steps until `done`, at most `limit` times; whether it was done.
    pub fn until(&mut self, limit: u32, mut done: impl FnMut(&mut Self) -> bool) -> bool {
        for _ in 0..limit {
            if done(self) {
                return true;
            }
            self.step();
        }
        done(self)
    }

    /// Steps until nothing has happened for a while.
    pub fn settle(&mut self) {
        let mut quiet = 0;
        while quiet < 20 {
            quiet = if self.step() { 0 } else { quiet + 1 };
        }
    }

    /// The terms of the connection to a peer.
    #[must_use]
    pub fn terms(&self, peer: usize) -> Terms {
        let depth = self.setup.shape.queue_depth;
        Terms {
            local: NAMES[0],
            local_stamp: STAMP,
            peer: self.peers[peer].nid,
            peer_stamp: self.peers[peer].stamp,
            version: 0x12,
            queue_depth: depth,
            max_frags: self.setup.max_frags,
            high_water: depth.div_ceil(2),
            kills_keys: self.setup.kill_keys,
            keys_killed: self.setup.kill_keys && !self.setup.registration.expose_arena,
            write_immediates: self.setup.write_immediates,
        }
    }

    /// Makes a connection as far as [`Order::Adopt`].
    pub fn adopt(&mut self, peer: usize, accepted: bool) -> Handle {
        let sizes = self.setup.shape.sizes();
        let terms = self.terms(peer);
        self.numbers += 2;
        let (ours, theirs) = (self.numbers, self.numbers + 1);
        let port = u16::try_from(peer).expect("few peers");
        self.peers[peer].open(theirs, ours, terms.queue_depth);
        self.node
            .poller
            .nic()
            .set_terms(terms.queue_depth, terms.max_frags);
        self.node.order(Order::Adopt {
            qp: QueuePair::new(
                ours,
                port,
                theirs,
                sizes.send_wr - self.setup.short.sends,
                sizes.recv_wr - self.setup.short.receives,
            ),
            terms,
            accepted,
            token: u64::from(ours),
        });
        assert!(self.until(100, |lab| !lab.node.ready.is_empty()));
        let connection = self.node.ready.pop_front().expect("waited for");
        self.connections[peer] = Some(connection);
        connection
    }

    /// Connects a peer (again, over a new queue pair).
    pub fn connect(&mut self, peer: usize) -> Handle {
        let connection = self.adopt(peer, false);
        self.establish(peer);
        connection
    }

    /// The second half of [`connect`](Self::connect).
    pub fn establish(&mut self, peer: usize) {
        let terms = self.terms(peer);
        let connection = self.connection(peer);
        self.node.order(Order::Establish { connection, terms });
        self.step();
    }

    /// The node's name of a peer's connection.
    #[must_use]
    pub fn connection(&self, peer: usize) -> Handle {
        self.connections[peer].expect("connected")
    }

    /// Steps until the peer has a message that is no NOOP.
    pub fn receive(&mut self, peer: usize) -> Inbound {
        let mut found = None;
        self.until(100_000, |lab| {
            while let Some(message) = lab.peers[peer].inbox.pop_front() {
                if !matches!(message.message().body, Body::Noop) {
                    found = Some(message);
                    return true;
                }
            }
            false
        });
        found.unwrap_or_else(|| panic!("no message; {}", self.picture()))
    }

    /// Steps until a sink of the peer was written to its end; what was said with it, and the bytes of that WRITE.
    pub fn immediate(&mut self, peer: usize) -> (Immediate, u32) {
        let mut found = None;
        self.until(100_000, |lab| {
            found = lab.peers[peer].immediates.pop_front();
            found.is_some()
        });
        found.unwrap_or_else(|| panic!("no immediate; {}", self.picture()))
    }

    /// Steps until the node has an event.
    pub fn event(&mut self) -> Event<'static> {
        let mut found = None;
        self.until(3_000_000, |lab| {
            found = lab.node.events.pop();
            found.is_some()
        });
        found.unwrap_or_else(|| panic!("no event; {}", self.picture()))
    }

    /// Steps until a request of the peer is done.
    pub fn outcome(&mut self, peer: usize, id: u64) -> Result<(), Status> {
        let mut found = None;
        self.until(100_000, |lab| {
            found = lab.peers[peer].outcome(id);
            found.is_some()
        });
        found.expect("every request completes")
    }

    /// Steps until a connection has ended; why.
    pub fn gone(&mut self, connection: Handle) -> Reason {
        let mut found = None;
        self.until(3_000_000, |lab| {
            found = lab
                .node
                .gone
                .iter()
                .find(|(handle, _)| *handle == connection)
                .map(|(_, why)| *why);
            found.is_some()
        });
        found.unwrap_or_else(|| panic!("not gone; {}", self.picture()))
    }

    /// Exports so many bytes of the node under portal 5; what the device sees of them.
    pub fn export(&mut self, match_bits: u64, options: EntryOptions, length: u32) -> Sge {
        let memory = self.node.arena.flat(length, 9);
        let piece = memory.pieces()[0];
        self.export_list(match_bits, options, memory);
        piece
    }

    /// Exports such memory of the node under portal 5.
    pub fn export_list(
        &mut self,
        match_bits: u64,
        options: EntryOptions,
        memory: &'static mut PageList<'static>,
    ) {
        self.node.submit(Submission::Attach(Entry {
            token: Token(match_bits),
            portal: Portal(5),
            match_bits: MatchBits(match_bits),
            ignore_bits: MatchBits(0),
            from: Nid::ANY,
            options,
            memory,
        }));
        match self.event() {
            Event::Attached { .. } => {}
            other => panic!("not attached: {other:?}"),
        }
    }

    /// A bulk or small GET or PUT of the node to portal 5 of a peer.
    pub fn ask(&mut self, peer: usize, token: u64, operation: Operation, length: u32) -> Sge {
        let memory = self.node.arena.flat(length, 5);
        let piece = memory.pieces().first().copied().unwrap_or_default();
        let connection = self.connection(peer);
        let request = World::request(connection, token, 7, 0, operation, memory);
        self.node.submit(request);
        piece
    }

    /// The event of a transfer of the node; others are dropped.
    pub fn event_of(&mut self, token: u64) -> Event<'static> {
        loop {
            match self.event() {
                Event::Done { token: of, .. } if of.0 != token => {}
                Event::Landed(_) => {}
                event => return event,
            }
        }
    }

    /// An honest peer: the connection moves data, in both directions, byte for byte.
    pub fn works(&mut self, peer: usize) {
        let data: Vec<u8> = (0..5000_u32).map(|n| (n % 251) as u8).collect();
        let get = Operation::Get { optimized: true };
        let at = self.ask(peer, 1000, get, 5000).address;
        let grant = self.receive(peer).grant();
        self.peers[peer].write(grant.key, grant.address, &data);
        self.peers[peer].say(Body::GetDone(grant.done(5000)));
        assert_eq!(told(self.event_of(1000)), Ok(5000));
        assert!(self.node.arena.peek(at, 5000) == data);

        let connection = self.connection(peer);
        let memory = self.node.arena.flat(5000, 1);
        memory.write_at(0, &data);
        let put = Operation::Put {
            hdr_data: 1,
            ack: false,
        };
        let request = World::request(connection, 1001, 7, 0, put, memory);
        self.node.submit(request);
        let source_cookie = self.receive(peer).cookie();
        let sink = self.peers[peer].sink(&[2000, 1, 2999], 7);
        let key = self.peers[peer].key();
        self.peers[peer].say(Body::PutAck {
            source_cookie,
            sink_cookie: 5,
            sink: Descriptor::new(key, &sink),
        });
        let expected = Done {
            cookie: 5,
            status: 5000,
        };
        if self.setup.write_immediates {
            let immediate = self.immediate(peer).0;
            assert_eq!(immediate.cookie, Immediate::new(0, 5).cookie);
        } else {
            assert_eq!(self.receive(peer).message().body, Body::PutDone(expected));
        }
        assert_eq!(told(self.event_of(1001)), Ok(5000));
        assert!(self.peers[peer].peek(&sink) == data);
    }

    /// What the node holds and has counted, for the message of a test that failed.
    pub fn picture(&mut self) -> String {
        let node = &mut self.node;
        let counts: Vec<_> = node
            .counters
            .each()
            .filter(|(_, value)| *value != 0)
            .collect();
        let (left, gauges) = (node.poller.leftovers(), node.poller.nic().gauges());
        format!("{left:?} {gauges:?} gone {:?} {counts:?}", node.gone)
    }

    /// Stops the node, and checks that everything has come back: slots, lists, buffers, windows, events,
    /// keys, and the device's queues. Events that come meanwhile are dropped.
    pub fn end(mut self) -> Vec<Reason> {
        self.node.keep_broken = false;
        self.node.maps.hold = false;
        self.node.order(Order::Stop);
        let ended = self.until(10_000_000, |lab| {
            while lab.node.events.pop().is_some() {}
            lab.node.stopped.is_some()
        });
        assert!(ended, "not stopped: {}", self.picture());
        assert_eq!(self.node.stopped, Some(Leftovers::default()));
        assert_eq!(self.node.retired, self.setup.shape.windows);
        let maps = &self.node.maps;
        assert_eq!(maps.made, maps.back, "every mapping comes back");
        assert_eq!(self.node.counters.mappings_alive.get(), 0);
        assert_eq!(self.node.counters.mappings_exposed.get(), 0);
        assert_eq!(self.node.counters.keys_alive.get(), 0);
        let gauges = self.node.poller.nic().gauges();
        assert_eq!(gauges, o2poll_soft::Gauges::default());
        self.node.gone.into_iter().map(|(_, why)| why).collect()
    }

    /// Cancels transfers of a token.
    pub fn cancel(&mut self, token: u64) {
        let token = Token(token);
        self.node.submit(Submission::Cancel { token });
    }
}

/// What an event says came of a transfer.
pub fn told(event: Event<'_>) -> Result<u32, Error> {
    match event {
        Event::Done { outcome, .. } => outcome,
        Event::Landed(landed) => landed.outcome,
        other => panic!("{other:?}"),
    }
}

/// The node's incarnation.
const STAMP: u64 = 101;
