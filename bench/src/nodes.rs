//! Whole nodes of the data plane over the software device, joined by the rings of production.
//!
//! Memory comes from one [`Arena`] per node: message buffers in front, the rest for payload. State is leaked:
//! a row lives as long as the program, near enough. Payload is not: it goes with the last of the nodes that can
//! reach it.
#![allow(unsafe_code)]

use std::sync::Arc;

use o2poll_dataplane::counters::Counters;
use o2poll_dataplane::endpoint::{
    Entry, EntryOptions, Event, MatchBits, Portal, Submission, Token,
};
use o2poll_dataplane::memory::{Buffer, MESSAGE_BYTES, PageList, Range};
use o2poll_dataplane::nic::{LKey, Sge, WrId};
use o2poll_dataplane::peer::Terms;
use o2poll_dataplane::poller::{Ends, Limits, Order, Poller, Report, Shape, Storage};
use o2poll_dataplane::pool::{Handle, Slot};
use o2poll_dataplane::registration::Settings;
use o2poll_dataplane::ring::{self, Consumer, Indices, LapSlot, Producer, Returned};
use o2poll_dataplane::time::{Instant, Ticks};
use o2poll_dataplane::wire::{Nid, Pid};
use o2poll_hal::arena::{Arena, HugePages, Lock};
use o2poll_hal::copy::best_copy;
use o2poll_soft::{
    self as soft, Lane, Memory, Port, Ports, Profile, QueuePair, Soft, Window, link,
};

/// The device of a node.
pub type Device = Soft<'static, Ports<'static, 'static>>;

/// A node: its core, and both sides that talk to it.
pub struct Node {
    /// The core.
    pub poller: Poller<'static, Device>,
    /// What it counts.
    pub counters: &'static Counters,
    /// To the core, application side.
    pub submissions: Producer<'static, Submission<'static>>,
    /// From the core, application side.
    pub events: Consumer<'static, Event<'static>>,
    /// Its connections, in the order of its ports.
    pub connections: Vec<Handle>,
    /// Payload memory, until somebody takes it.
    pub payload: Option<Range<'static>>,
    orders: Producer<'static, Order<Device>>,
    reports: Consumer<'static, Report<Device>>,
    ready: Vec<Handle>,
    terms: Vec<Terms>,
    /// Behind everything that points into it. Of the peer too: our device reads it.
    _memory: Vec<Arc<Arena>>,
}

/// Memory of a node.
pub struct Ground {
    arena: Arc<Arena>,
    used: usize,
}

impl Ground {
    /// So many bytes, resident.
    #[must_use]
    pub fn new(bytes: usize) -> Self {
        let (arena, _) = Arena::new(bytes, HugePages::Try, Lock::Off).expect("memory for a row");
        Self {
            arena: Arc::new(arena),
            used: 0,
        }
    }

    /// The next `bytes`, at a page's start. Who keeps the range keeps the ground.
    #[must_use]
    pub fn take(&mut self, bytes: usize, lkey: LKey) -> Range<'static> {
        let at = self.used.next_multiple_of(4096);
        assert!(at + bytes <= self.arena.len(), "the ground is sized to fit");
        self.used = at + bytes;
        // SAFETY: inside the arena by the assertion, zeroed and hence initialised. The counter only grows, so
        // nothing else is given these bytes. Who keeps the range keeps the arena, as said above.
        unsafe { Range::new(self.arena.base().add(at), bytes, lkey) }.expect("below 4 GiB")
    }
}

/// How a row's nodes are.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Queue depth (`peer_credits`).
    pub depth: u16,
    /// Bytes of payload memory of each.
    pub payload: usize,
    /// The device.
    pub profile: Profile,
    /// Ranges from which on a source is registered; 0: never.
    pub source: u16,
    /// The end of a bulk transfer.
    pub end: End,
}

/// How a node says that the data it writes is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// By a DONE, as toward a kernel.
    Done,
    /// By a DONE that kills the key of the sink (SEND_WITH_INV).
    KillingDone,
    /// With the last of it (WRITE_WITH_IMM).
    Immediate,
}

/// Two nodes with a connection between them.
#[must_use]
pub fn pair(plan: Plan) -> [Node; 2] {
    let (near, far) = link(lane(), lane()).expect("a power of two");
    let grounds = [Ground::new(plan.bytes(1)), Ground::new(plan.bytes(1))];
    let arenas: Vec<_> = grounds.iter().map(|each| Arc::clone(&each.arena)).collect();
    let [near_ground, far_ground] = grounds;
    let mut nodes = [
        Node::new(plan, NAMES[0], vec![near], near_ground, arenas.clone()),
        Node::new(plan, NAMES[1], vec![far], far_ground, arenas),
    ];
    nodes[0].adopt(plan, 0, NAMES[1]);
    nodes[1].adopt(plan, 0, NAMES[0]);
    for node in &mut nodes {
        node.establish();
    }
    nodes
}

/// A node with so many connections, each to a node that never says anything.
#[must_use]
pub fn idle(plan: Plan, connections: u16) -> Node {
    let (near, far): (Vec<_>, Vec<_>) = (0..connections)
        .map(|_| link(lane(), lane()).expect("a power of two"))
        .unzip();
    // The far ends stay, and nobody looks at them.
    lend(far);
    let ground = Ground::new(plan.bytes(usize::from(connections)));
    let arenas = vec![Arc::clone(&ground.arena)];
    let mut node = Node::new(plan, NAMES[0], near, ground, arenas);
    for port in 0..connections {
        node.adopt(plan, port, NAMES[1]);
    }
    node.establish();
    node
}

impl Plan {
    fn shape(&self, connections: usize) -> Shape {
        Shape {
            connections,
            queue_depth: self.depth,
            writes_at_once: 4,
            waiting: usize::from(self.depth),
            windows: usize::from(self.depth) * 2,
            staging: 0,
            mappings: 0,
            register_source_from: self.source,
            entries: 4,
        }
    }

    fn bytes(&self, connections: usize) -> usize {
        let messages = self.shape(connections).sizes().messages;
        messages * MESSAGE_BYTES + self.payload.next_multiple_of(4096) + 8192
    }
}

impl Node {
    fn new(
        plan: Plan,
        nid: Nid,
        ports: Vec<Port<'static>>,
        mut ground: Ground,
        memory: Vec<Arc<Arena>>,
    ) -> Self {
        let shape = plan.shape(ports.len());
        let sizes = shape.sizes();
        let device_limits = soft::Limits {
            queue_pairs: count(sizes.connections),
            send_wr: sizes.send_wr,
            recv_wr: sizes.recv_wr,
            windows: count(sizes.regions),
            memories: 1,
            cqe: sizes.cqe,
        };
        let (device, lkey) = device(plan.profile, &device_limits, ports, &ground);
        let counters: &'static Counters = Box::leak(Box::new(Counters::new()));
        let storage = Storage {
            connections: places(sizes.connections, Slot::vacant),
            transfers: places(sizes.transfers, Slot::vacant),
            receives: places(sizes.receives, Slot::vacant),
            regions: places(sizes.regions, || None),
            staging: &mut [],
            mappings: &mut [],
            ways: &mut [],
            entries: places(sizes.entries, Slot::vacant),
            messages: places(sizes.messages, || {
                Some(Buffer::new(ground.take(MESSAGE_BYTES, lkey)).expect("long enough"))
            }),
            sends: places(sizes.sends, || WrId(0)),
            counters,
        };
        let payload = ground.take(plan.payload, lkey);
        let (orders, orders_in) = index(64);
        let (reports_out, reports) = index(256);
        let (submissions, submissions_in) = index(256);
        let (events_out, events) = index(256);
        let ends = Ends {
            orders: orders_in,
            reports: reports_out,
            submissions: submissions_in,
            events: events_out,
        };
        let limits = Limits {
            nid,
            pid: Pid::LUSTRE,
            stamp: STAMP,
            timeout: Ticks(LONG),
            abandon: Ticks(LONG),
            keepalive: Ticks(LONG),
            shape,
            registration: Settings::PRIVATE,
        };
        let poller = Poller::new(device, storage, ends, limits, NOW).expect("sized to fit");
        let mut node = Self {
            poller,
            counters,
            submissions,
            events,
            connections: Vec::new(),
            payload: Some(payload),
            orders,
            reports,
            ready: Vec::new(),
            terms: Vec::new(),
            _memory: memory,
        };
        for _ in 0..shape.windows {
            node.order(Order::Window {
                window: Window::new(0),
                of: None,
            });
        }
        node
    }

    /// Asks for a connection on a port.
    fn adopt(&mut self, plan: Plan, port: u16, peer: Nid) {
        let sizes = plan.shape(1).sizes();
        // Both ends of a link have the same number, on devices of their own.
        let number = u32::from(port) + 1;
        let terms = Terms {
            local: if peer == NAMES[1] { NAMES[0] } else { NAMES[1] },
            local_stamp: STAMP,
            peer,
            peer_stamp: STAMP,
            version: 0x12,
            queue_depth: plan.depth,
            max_frags: 257,
            high_water: (plan.depth / 2).max(1),
            kills_keys: plan.end == End::KillingDone,
            keys_killed: plan.end == End::KillingDone,
            write_immediates: plan.end == End::Immediate,
        };
        self.terms.push(terms);
        self.order(Order::Adopt {
            qp: QueuePair::new(number, port, number, sizes.send_wr, sizes.recv_wr),
            terms,
            accepted: false,
            token: u64::from(port),
        });
    }

    fn establish(&mut self) {
        self.connections = core::mem::take(&mut self.ready);
        for (connection, terms) in self.connections.clone().into_iter().zip(self.terms.clone()) {
            self.order(Order::Establish { connection, terms });
        }
    }

    fn order(&mut self, order: Order<Device>) {
        assert!(self.orders.push(order).is_ok(), "one at a time");
        self.turn(NOW);
        while let Some(report) = self.reports.pop() {
            match report {
                Report::Ready { connection, .. } => self.ready.push(connection),
                _ => panic!("a node that is starting up reports nothing else"),
            }
        }
    }

    /// One turn of the core; what it did.
    #[inline]
    pub fn turn(&mut self, now: Instant) -> u32 {
        self.poller.poll(now).expect("a healthy device").work
    }

    /// Exports payload memory, all that is left of it, under [`PORTAL`] and [`BITS`].
    pub fn export(&mut self) {
        let list = lend_one(PageList::new());
        let range = self.payload.take().expect("exported once");
        list.push(range).expect("an empty list");
        self.submit(Submission::Attach(Entry {
            token: Token(0),
            portal: PORTAL,
            match_bits: BITS,
            ignore_bits: MatchBits(0),
            from: Nid::ANY,
            options: EntryOptions::PUT | EntryOptions::GET,
            memory: list,
        }));
        self.turn(NOW);
        match self.events.pop() {
            Some(Event::Attached { .. }) => {}
            other => panic!("not attached: {other:?}"),
        }
    }

    /// Submits; the ring has room for all that a row has in flight.
    #[inline]
    pub fn submit(&mut self, submission: Submission<'static>) {
        assert!(self.submissions.push(submission).is_ok());
    }
}

/// Writes over memory of a node that no transfer moves in now, as an application that owns it would.
pub struct Scribble {
    piece: Sge,
    round: u8,
    _memory: Arc<Arena>,
}

impl Scribble {
    /// Over the payload memory of `node`, which is about to be exported.
    #[must_use]
    pub fn over(node: &Node, which: usize) -> Self {
        let payload = node.payload.as_ref().expect("not yet exported");
        Self {
            piece: payload.sge(),
            round: 0,
            _memory: Arc::clone(&node._memory[which]),
        }
    }

    /// Writes every byte of the first `length`, so that the lines are this core's.
    pub fn write(&mut self, length: usize) {
        self.round = self.round.wrapping_add(1);
        let length = length.min(self.piece.length as usize);
        let base = core::ptr::with_exposed_provenance_mut::<u8>(
            usize::try_from(self.piece.address).expect("an address of this process"),
        );
        // SAFETY: inside the arena, which is kept; the row sees to it that no transfer is under way, and that
        // the flags by which it does are release and acquire.
        unsafe { base.write_bytes(self.round, length) }
    }
}

/// Payload memory of another node, to be read while no transfer moves in it.
pub struct Reader {
    base: *const u8,
    length: usize,
    _memory: Vec<Arc<Arena>>,
}

impl Reader {
    /// `piece` is payload memory of the peer of `node`.
    #[must_use]
    pub fn new(piece: Sge, node: &Node) -> Self {
        let at = usize::try_from(piece.address).expect("an address of this process");
        Self {
            base: core::ptr::with_exposed_provenance(at),
            length: piece.length as usize,
            _memory: node._memory.clone(),
        }
    }

    /// `length` bytes from `at` on.
    #[must_use]
    pub fn bytes(&self, at: usize, length: usize) -> &[u8] {
        assert!(at + length <= self.length);
        // SAFETY: inside the peer's arena, which is kept; it is written between the turns of a row only, by
        // flags that are release and acquire, and then nobody holds what this returns.
        unsafe { core::slice::from_raw_parts(self.base.add(at), length) }
    }
}

// SAFETY: it only reads, and what it reads is kept.
unsafe impl Send for Reader {}

/// Plain memory that is as the nodes' is: in huge pages where they can be had.
pub struct Bytes(Arena);

impl Bytes {
    /// So many bytes, or somewhat more.
    #[must_use]
    pub fn new(length: usize) -> Self {
        let (arena, _) = Arena::new(length, HugePages::Try, Lock::Off).expect("memory for a row");
        Self(arena)
    }
}

impl core::ops::Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: all of the arena, which is initialised and of which nothing was handed out.
        unsafe { core::slice::from_raw_parts(self.0.base().as_ptr(), self.0.len()) }
    }
}

impl core::ops::DerefMut for Bytes {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`; `&mut self` is the only borrow.
        unsafe { core::slice::from_raw_parts_mut(self.0.base().as_ptr(), self.0.len()) }
    }
}

/// A device that knows the ground by the key it returns. Who keeps the device keeps the ground.
#[must_use]
pub fn device(
    profile: Profile,
    limits: &soft::Limits,
    ports: Vec<Port<'static>>,
    ground: &Ground,
) -> (Device, LKey) {
    let room = limits.sizes(&profile).expect("within the profile");
    let storage = soft::Storage {
        queue_pairs: places(room.queue_pairs, soft::QueuePairSlot::default),
        numbers: places(room.numbers, u32::default),
        sends: places(room.sends, soft::SendEntry::default),
        pieces: places(room.pieces, Sge::default),
        receives: places(room.receives, soft::ReceiveEntry::default),
        regions: places(room.regions, soft::RegionSlot::default),
        fragments: places(room.fragments, soft::Fragment::default),
        memories: places(room.memories, || None),
        completions: places(room.completions, soft::CompletionEntry::default),
    };
    let wire = Ports::new(lend(ports));
    let mut device = Soft::new(profile, limits, storage, wire).expect("sized to fit");
    device.set_copier(best_copy());
    // SAFETY: the arena is initialised, and who keeps a device of this wire keeps it longer: a node in its last
    // field. Its bytes are reached through ranges and by the devices only.
    let known = unsafe { Memory::new(ground.arena.base(), ground.arena.len(), 0) };
    let lkey = device.register(known).expect("room for one");
    (device, lkey)
}

/// Memory for one direction of a link.
#[must_use]
pub fn lane() -> Lane<'static> {
    Lane {
        returned: lend_one(Returned::new()),
        slots: places(64, LapSlot::new),
    }
}

fn index<T>(capacity: usize) -> (Producer<'static, T>, Consumer<'static, T>) {
    ring::index_ring(lend_one(Indices::new()), places(capacity, ring::Slot::new))
        .expect("a power of two")
}

/// A value that lives for ever.
pub fn lend_one<T>(value: T) -> &'static mut T {
    Box::leak(Box::new(value))
}

fn lend<T>(values: Vec<T>) -> &'static mut [T] {
    values.leak()
}

fn places<T>(count: usize, make: impl FnMut() -> T) -> &'static mut [T] {
    lend(core::iter::repeat_with(make).take(count).collect())
}

fn count(places: usize) -> u32 {
    u32::try_from(places).expect("few")
}

/// Where [`Node::export`] exports.
pub const PORTAL: Portal = Portal(5);
/// And under which match bits.
pub const BITS: MatchBits = MatchBits(7);

const NAMES: [Nid; 2] = [Nid::o2ib([10, 0, 0, 1], 0), Nid::o2ib([10, 0, 0, 2], 0)];
const STAMP: u64 = 1;
/// Longer than any row: nothing times out.
const LONG: u64 = 1 << 60;
/// Before any reading of a clock.
const NOW: Instant = Instant(1);
