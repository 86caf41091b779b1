//! Two nodes and the clock.

use core::time::Duration;
use std::time;

use o2poll_dataplane::endpoint::{
    Entry, EntryOptions, Event, MatchBits, Operation, Portal, Request, Submission, Token,
};
use o2poll_dataplane::memory::PageList;
use o2poll_dataplane::nic::Mechanisms;
use o2poll_dataplane::peer::Terms;
use o2poll_dataplane::poller::{Leftovers, Limits, Order, Reason, Shape};
use o2poll_dataplane::pool::Handle;
use o2poll_dataplane::registration::Settings;
use o2poll_dataplane::ring::{LapSlot, Returned};
use o2poll_dataplane::time::{Instant, Ticks};
use o2poll_dataplane::wire::{Nid, Pid};
use o2poll_soft::{self as soft, Lane, Lossy, Port, Ports, Profile, Weather, link};

use crate::backend::{Backend, Software};
use crate::lend::{lend, lend_all, lend_one};
use crate::node::{Node, Wires};

/// The NIDs of the two nodes.
pub const NAMES: [Nid; 2] = [Nid::o2ib([10, 0, 0, 1], 0), Nid::o2ib([10, 0, 0, 2], 0)];

/// Their incarnations.
pub const STAMPS: [u64; 2] = [101, 202];

/// What the two nodes are like.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// Their devices.
    pub profile: Profile,
    /// What of memory peers may be shown.
    pub registration: Settings,
    /// Most fragments of a descriptor, as the node sees it.
    pub max_frags: u16,
    /// How much they hold.
    pub shape: Shape,
    /// Bytes of registered memory of each.
    pub memory: usize,
    /// Slots of the submission and event rings.
    pub events: usize,
    /// Slots of the report ring.
    pub reports: usize,
    /// Ticks until a transfer times out; one step of the world is one tick.
    pub timeout: u64,
    /// Further ticks until an abandoned transfer costs its connection.
    pub abandon: u64,
    /// Idle ticks until a NOOP.
    pub keepalive: u64,
    /// Slots of each wire.
    pub wire: usize,
    /// Weather on both wires.
    pub weather: Weather,
    /// Seed of the weather.
    pub seed: u64,
    /// Each one's DONEs kill the other's keys, as between two nodes of our kind; not so toward a kernel.
    pub kill_keys: bool,
    /// Staging buffers begin on a boundary of so many bytes.
    pub stage_align: usize,
    /// The last WRITE of a transfer takes the place of its DONE. Then no DONE kills a key.
    pub write_immediates: bool,
    /// What the queues of a lab's node are short of.
    pub short: Short,
    /// Nobody listens on the device or keeps account of events, so that the nodes allocate nothing.
    pub quiet: bool,
}

/// Entries that queues have fewer than was asked for: the control of a test of their lengths.
#[derive(Clone, Copy, Debug, Default)]
pub struct Short {
    /// Of each send queue.
    pub sends: u32,
    /// Of each receive queue.
    pub receives: u32,
    /// Of the completion queue.
    pub completions: u32,
}

impl Setup {
    /// Two `peer_credits = 8` nodes of this profile, patient, in good weather.
    #[must_use]
    pub const fn new(profile: Profile) -> Self {
        Self {
            profile,
            registration: Settings::PRIVATE,
            max_frags: 257,
            shape: Shape {
                connections: 2,
                queue_depth: 8,
                writes_at_once: 4,
                waiting: 32,
                windows: if has_mappings(&profile) {
                    0
                } else if profile.capabilities.max_windows < 16 {
                    profile.capabilities.max_windows as usize
                } else {
                    16
                },
                staging: 0,
                mappings: if has_mappings(&profile) { 16 } else { 0 },
                register_source_from: 0,
                entries: 8,
            },
            memory: 24 << 20,
            events: 128,
            reports: 64,
            timeout: 1_000_000,
            abandon: 1_000_000,
            keepalive: 100_000_000,
            wire: 256,
            weather: Weather {
                drop: 0,
                repeat: 0,
                delay: 0,
                hold: 0,
            },
            seed: 1,
            kill_keys: false,
            stage_align: 4096,
            write_immediates: false,
            short: Short {
                sends: 0,
                receives: 0,
                completions: 0,
            },
            quiet: false,
        }
    }
}

/// Whether nodes with this device have a pool of mappings.
const fn has_mappings(profile: &Profile) -> bool {
    profile
        .capabilities
        .mechanisms
        .contains(Mechanisms::MAPPINGS)
}

/// Two nodes, joined.
pub struct World<B: Backend = Software> {
    /// The nodes.
    pub nodes: [Node<B>; 2],
    /// The time.
    pub now: Instant,
    /// Ticks of one step.
    pub tick: u64,
    /// Nodes that are not stepped: a peer that has stopped polling.
    pub asleep: [bool; 2],
    setups: [Setup; 2],
    numbers: u32,
    high_water: [u64; 2],
    /// Both names of every connection so far.
    connections: Vec<[Handle; 2]>,
}

impl World {
    /// Two nodes, not yet connected.
    #[must_use]
    pub fn new(setup: Setup) -> Self {
        Self::with(setup, [soft::Tap::off, soft::Tap::off])
    }

    /// Two nodes that are not alike, not yet connected. Wires, clock and queue depth are the first's.
    #[must_use]
    pub fn mixed(setups: [Setup; 2]) -> Self {
        Self::of(setups, [soft::Tap::off, soft::Tap::off])
    }

    /// Two nodes, not yet connected, each on what is made of its wire.
    #[must_use]
    pub fn with(
        setup: Setup,
        taps: [impl FnOnce(Lossy<Ports<'static, 'static>>) -> Wires; 2],
    ) -> Self {
        Self::of([setup; 2], taps)
    }

    fn of(
        setups: [Setup; 2],
        taps: [impl FnOnce(Lossy<Ports<'static, 'static>>) -> Wires; 2],
    ) -> Self {
        let [setup, other] = setups;
        let lane = || Lane {
            returned: lend_one(Returned::new()),
            slots: lend(setup.wire, LapSlot::new),
        };
        let (near, far) = link(lane(), lane()).expect("a power of two");
        let ports = |port: Port<'static>, seed| {
            Lossy::new(Ports::new(lend_all(vec![port])), setup.weather, seed)
        };
        let [near_tap, far_tap] = taps;
        let near = near_tap(ports(near, setup.seed));
        let far = far_tap(ports(far, !setup.seed));
        let [ours, theirs] = [0, 1].map(|at| Self::limits(&setups[at], at));
        let nodes = [
            Node::over(&setup, ours, near, Self::START),
            Node::over(&other, theirs, far, Self::START),
        ];
        Self::over(setups, nodes)
    }

    /// A request to the entry of [`export`](Self::export).
    pub fn request(
        connection: Handle,
        token: u64,
        match_bits: u64,
        remote_offset: u32,
        operation: Operation,
        memory: &'static mut PageList<'static>,
    ) -> Submission<'static> {
        Submission::Transfer(Request {
            token: Token(token),
            connection,
            portal: Portal(5),
            match_bits: MatchBits(match_bits),
            remote_offset,
            memory,
            operation,
            timeout: None,
        })
    }
}

impl<B: Backend> World<B> {
    /// When it begins.
    pub const START: Instant = Instant(1);

    /// What a node of this kind holds.
    #[must_use]
    pub const fn limits(setup: &Setup, at: usize) -> Limits {
        Limits {
            nid: NAMES[at],
            pid: Pid::LUSTRE,
            stamp: STAMPS[at],
            timeout: Ticks(setup.timeout),
            abandon: Ticks(setup.abandon),
            keepalive: Ticks(setup.keepalive),
            shape: setup.shape,
            registration: setup.registration,
        }
    }

    /// Of these nodes.
    #[must_use]
    pub const fn over(setups: [Setup; 2], nodes: [Node<B>; 2]) -> Self {
        Self {
            nodes,
            now: Self::START,
            tick: 1,
            asleep: [false; 2],
            setups,
            // Queue pairs 0 and 1 are the management agents' own.
            numbers: 0x10,
            high_water: [u64::MAX; 2],
            connections: Vec::new(),
        }
    }

    /// One step of everything; whether anything happened.
    pub fn step(&mut self) -> bool {
        self.now = self.now.after(Ticks(self.tick));
        let now = self.now;
        let mut busy = false;
        for (node, asleep) in self.nodes.iter_mut().zip(self.asleep) {
            if !asleep {
                busy |= node.step(now);
            }
        }
        B::between(self, busy);
        busy
    }

    /// Steps until `done`, at most `limit` times, or [`LONGEST`] where time is real; whether it was done.
    pub fn until(&mut self, limit: u32, mut done: impl FnMut(&mut Self) -> bool) -> bool {
        let mut patience = Patience::new::<B>(limit);
        while patience.lasts() {
            if done(self) {
                return true;
            }
            self.step();
        }
        done(self)
    }

    /// Steps until nothing has happened for a while. Where time is real, more may be under way.
    pub fn settle(&mut self) {
        let mut quiet = 0;
        while quiet < 20 {
            quiet = if self.step() { 0 } else { quiet + 1 };
        }
    }

    /// What the nodes are like.
    #[must_use]
    pub const fn setup(&self) -> &Setup {
        self.setup_of(0)
    }

    /// What one node is like.
    #[must_use]
    pub const fn setup_of(&self, node: usize) -> &Setup {
        let [first, second] = &self.setups;
        if node == 0 { first } else { second }
    }

    /// Whether a connection has ended.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.nodes
            .iter()
            .any(|node| node.counters.connections_ended.get() != 0)
    }

    /// Steps until nothing moves any more, retransmissions included (where time is real, until what is checked holds), and checks what holds at rest where no
    /// connection has ended: no key is alive, no bulk request is open, and every credit that one side misses
    /// the other owes, below its high-water mark.
    pub fn rest(&mut self) {
        for node in &mut self.nodes {
            node.maps.hold = false;
        }
        let quiet_steps = if B::REAL {
            200
        } else {
            40 + 3 * u64::from(self.setups[0].profile.ack_timeout.min(1000))
        };
        let mut patience = Patience::new::<B>(200_000);
        let mut quiet = 0;
        while quiet < quiet_steps || B::REAL && !self.is_at_rest() {
            quiet = if self.step() { 0 } else { quiet + 1 };
            if !patience.lasts() {
                // Said below, one by one.
                assert!(
                    B::REAL && quiet >= quiet_steps,
                    "never at rest: {}",
                    self.picture()
                );
                break;
            }
        }
        if self.has_ended() {
            return;
        }
        let heard = [0, 1].map(|at| self.nodes[at].poller.nic().last());
        let picture = self.picture();
        for (at, node) in self.nodes.iter_mut().enumerate() {
            let (ours, theirs) = (&heard[at], &heard[1 - at]);
            // Mappings stay for the next transfer.
            let mapped = node.counters.mappings_alive.get();
            if let Some(gauges) = B::gauges(node.poller.nic()) {
                assert_eq!(gauges.live_keys as u64, mapped);
            }
            assert_eq!(node.counters.keys_alive.get(), 0);
            assert_eq!(
                ours.bulk, 0,
                "a bulk request without an answer: {heard:#?} {picture}"
            );
            assert_eq!(
                ours.outstanding, theirs.owed,
                "a credit was lost: {heard:#?} {picture}"
            );
            assert!(ours.owed < self.high_water[at], "credits kept at rest");
        }
    }

    /// What [`rest`](Self::rest) checks.
    fn is_at_rest(&mut self) -> bool {
        if self.has_ended() {
            return true;
        }
        let heard = [0, 1].map(|at| self.nodes[at].poller.nic().last());
        let keys = self.nodes.iter().map(|node| node.counters.keys_alive.get());
        keys.sum::<u64>() == 0
            && (0..2).all(|at| {
                let (ours, theirs) = (&heard[at], &heard[1 - at]);
                ours.bulk == 0 && ours.outstanding == theirs.owed && ours.owed < self.high_water[at]
            })
    }

    /// Both names of every connection so far.
    #[must_use]
    pub fn connections(&self) -> &[[Handle; 2]] {
        &self.connections
    }

    /// Connects the two nodes; their names of the connection.
    pub fn connect(&mut self) -> [Handle; 2] {
        self.connect_at(self.setups[0].shape.queue_depth)
    }

    /// Connects the two nodes with this queue depth.
    pub fn connect_at(&mut self, queue_depth: u16) -> [Handle; 2] {
        let handles = self.adopt(queue_depth);
        for (at, connection) in handles.into_iter().enumerate() {
            self.establish(at, connection, queue_depth);
        }
        self.step();
        handles
    }

    /// Connects the two nodes on these terms.
    pub fn connect_on(&mut self, terms: [Terms; 2]) -> [Handle; 2] {
        let handles = self.adopt_on(terms);
        for ((node, connection), terms) in self.nodes.iter_mut().zip(handles).zip(terms) {
            node.order(Order::Establish { connection, terms });
        }
        self.step();
        handles
    }

    /// Has both nodes adopt a queue pair of a connection from node 0 to node 1, which is not established yet.
    pub fn adopt(&mut self, queue_depth: u16) -> [Handle; 2] {
        self.adopt_on([self.terms(0, queue_depth), self.terms(1, queue_depth)])
    }

    fn adopt_on(&mut self, terms: [Terms; 2]) -> [Handle; 2] {
        self.high_water = terms.map(|terms| u64::from(terms.high_water.max(1)));
        let number = self.numbers;
        self.numbers += 2;
        for (node, terms) in self.nodes.iter_mut().zip(&terms) {
            let nic = node.poller.nic();
            nic.set_terms(terms.queue_depth, terms.max_frags);
        }
        let qps = B::join(self.nodes.each_mut(), [number + 1, number + 2]);
        for (at, qp) in qps.into_iter().enumerate() {
            self.nodes[at].order(Order::Adopt {
                qp,
                terms: terms[at],
                accepted: at == 1,
                token: u64::from(number),
            });
        }
        assert!(self.until(100, |world| {
            world.nodes.iter().all(|node| !node.ready.is_empty())
        }));
        let handles = [0, 1].map(|at| self.nodes[at].ready.pop_front().expect("waited for"));
        self.connections.push(handles);
        handles
    }

    /// Tells one node that its connection is up.
    pub fn establish(&mut self, at: usize, connection: Handle, queue_depth: u16) {
        let terms = self.terms(at, queue_depth);
        self.nodes[at].order(Order::Establish { connection, terms });
    }

    fn terms(&self, of: usize, queue_depth: u16) -> Terms {
        // The arena's key outlives every transfer: nobody may kill what such a node gives out.
        let lets = |node: usize| {
            let setup = &self.setups[node];
            // And a device that knows nothing of it sends none either.
            let both = self
                .setups
                .iter()
                .all(|setup| setup.profile.capabilities.remote_invalidate);
            both && !setup.registration.expose_arena && !self.setups[0].write_immediates
        };
        Terms {
            local: NAMES[of],
            local_stamp: STAMPS[of],
            peer: NAMES[1 - of],
            peer_stamp: STAMPS[1 - of],
            version: 0x12,
            queue_depth,
            max_frags: self.setups[0].max_frags.min(self.setups[1].max_frags),
            high_water: queue_depth / 2,
            kills_keys: self.setups[0].kill_keys && lets(1 - of),
            keys_killed: self.setups[0].kill_keys && lets(of),
            write_immediates: self.setups[0].write_immediates,
        }
    }

    /// Exports memory of a node under portal 5 and these match bits; the entry's name.
    pub fn export(
        &mut self,
        of: usize,
        match_bits: u64,
        options: EntryOptions,
        memory: &'static mut PageList<'static>,
    ) -> Handle {
        self.nodes[of].submit(Submission::Attach(Entry {
            token: Token(match_bits),
            portal: Portal(5),
            match_bits: MatchBits(match_bits),
            ignore_bits: MatchBits(0),
            from: Nid::ANY,
            options,
            memory,
        }));
        self.step();
        match self.nodes[of].events.pop() {
            Some(Event::Attached { entry, .. }) => entry,
            other => panic!("not attached: {other:?}"),
        }
    }

    /// Steps until the node has an event.
    pub fn event(&mut self, of: usize) -> Event<'static> {
        let mut found = None;
        self.until(3_000_000, |world| {
            found = world.nodes[of].events.pop();
            found.is_some()
        });
        found.unwrap_or_else(|| panic!("no event; {}", self.picture()))
    }

    /// What both nodes hold and have counted, for the message of a test that failed.
    pub fn picture(&mut self) -> String {
        self.nodes
            .iter_mut()
            .map(|node| {
                let counts: Vec<_> = node
                    .counters
                    .each()
                    .filter(|(_, value)| *value != 0)
                    .collect();
                format!(
                    "{:?} {:?} gone {:?} {counts:?}\n",
                    node.poller.leftovers(),
                    B::gauges(node.poller.nic()),
                    node.gone
                )
            })
            .collect()
    }

    /// Ends both nodes, and checks that everything has come back: slots, lists, buffers, windows, credits,
    /// events, keys, and the devices' queues. Events that come meanwhile are dropped.
    pub fn end(mut self) -> [Vec<Reason>; 2] {
        for node in &mut self.nodes {
            node.order(Order::Stop);
        }
        let ended = self.until(100_000, |world| {
            for node in &mut world.nodes {
                node.maps.hold = false;
                while node.events.pop().is_some() {}
            }
            world.nodes.iter().all(|node| node.stopped.is_some())
        });
        let windows = self.setups.map(|setup| setup.shape.windows);
        for (node, windows) in self.nodes.iter_mut().zip(windows) {
            assert!(
                ended,
                "not stopped: {:?} {:?}",
                node.poller.leftovers(),
                B::gauges(node.poller.nic())
            );
            while node.events.pop().is_some() {}
            node.events.audit();
            assert_eq!(node.stopped, Some(Leftovers::default()));
            assert_eq!(node.retired, windows);
            assert_eq!(node.maps.made, node.maps.back, "every mapping comes back");
            assert_eq!(node.counters.mappings_alive.get(), 0);
            assert_eq!(node.counters.mappings_exposed.get(), 0);
            assert_eq!(node.counters.keys_alive.get(), 0);
            let gauges = B::gauges(node.poller.nic()).unwrap_or_default();
            assert_eq!(gauges, o2poll_soft::Gauges::default());
        }
        self.nodes
            .map(|node| node.gone.into_iter().map(|(_, why)| why).collect())
    }
}

/// How long something is waited for.
#[derive(Debug)]
pub struct Patience {
    left: u32,
    until: Option<time::Instant>,
}

impl Patience {
    /// So many steps, or [`LONGEST`] where time is real.
    #[must_use]
    pub fn new<B: Backend>(steps: u32) -> Self {
        Self {
            left: steps,
            until: B::REAL.then(|| time::Instant::now() + LONGEST),
        }
    }

    /// Whether there is another step to be made.
    pub fn lasts(&mut self) -> bool {
        match self.until {
            Some(until) => time::Instant::now() < until,
            None => {
                let left = self.left.checked_sub(1);
                self.left = left.unwrap_or(0);
                left.is_some()
            }
        }
    }
}

/// Much more than anything takes, on an emulated processor of a busy host.
pub const LONGEST: Duration = Duration::from_secs(90);
