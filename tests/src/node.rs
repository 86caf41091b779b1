//! One node: a poller, its rings, its memory, and the control side's view of it.

use std::collections::VecDeque;

use o2poll_dataplane::counters::Counters;
use o2poll_dataplane::endpoint::Submission;
use o2poll_dataplane::memory::Buffer;
use o2poll_dataplane::nic::{Fault, Nic, RKey, Rights, Sge, WrId};
use o2poll_dataplane::poller::{Ends, Leftovers, Limits, Order, Poller, Reason, Report, Storage};
use o2poll_dataplane::pool::{Handle, Slot};
use o2poll_dataplane::registration::{STAGE_BYTES, Ways};
use o2poll_dataplane::ring::{self, Consumer, Indices, Producer};
use o2poll_dataplane::time::Instant;
use o2poll_hal::clock::Clock;
use o2poll_soft as soft;
use o2poll_soft::{Lossy, Ports, Soft};

use crate::Arena;
use crate::backend::{Backend, Software};
use crate::book::{Events, Submissions, keep};
use crate::lend::{lend, lend_one};
use crate::maps::Maps;
use crate::tap::Tap;
use crate::world::Setup;

/// The device of a test node.
pub type Device = Tap<Soft<'static, Wires>>;

/// The clock of a tap.
#[derive(Clone, Copy, Debug)]
pub struct Ticker(pub Clock);

impl soft::Timer for Ticker {
    fn now(&self) -> u64 {
        self.0.now().0
    }
}

/// Its wire: with weather on it, and a tap around that.
pub type Wires = soft::Tap<'static, Lossy<Ports<'static, 'static>>, Ticker>;

/// One node of a [`World`](crate::World).
pub struct Node<B: Backend = Software> {
    /// The core.
    pub poller: Poller<'static, Tap<B::Nic>>,
    /// The control side of its device.
    pub backend: B,
    /// How much it holds.
    pub limits: Limits,
    /// Its registered memory.
    pub arena: Arena,
    /// What it counts.
    pub counters: &'static Counters,
    /// To the core, control side.
    pub orders: Producer<'static, Order<Tap<B::Nic>>>,
    reports: Consumer<'static, Report<Tap<B::Nic>>>,
    /// To the core, application side.
    pub submissions: Submissions,
    /// From the core, application side.
    pub events: Events,
    /// Connections that are adopted, in order.
    pub ready: VecDeque<Handle>,
    /// Queue pairs for which there was no room.
    pub refused: usize,
    /// Connections that have ended.
    pub gone: Vec<(Handle, Reason)>,
    /// Windows that came to be rebuilt.
    pub rebuilt: usize,
    /// Hold broken windows back instead of rebuilding them at once.
    pub keep_broken: bool,
    /// Broken windows held back.
    pub broken: Vec<(<B::Nic as Nic>::Window, Option<Handle>)>,
    /// Windows given up.
    pub retired: usize,
    /// The control side of the pool of mappings.
    pub maps: Maps<B>,
    /// What was left at the end.
    pub stopped: Option<Leftovers>,
}

fn ring_of<T>(capacity: usize) -> (Producer<'static, T>, Consumer<'static, T>) {
    let indices = lend_one(Indices::new());
    ring::index_ring(indices, lend(capacity, ring::Slot::new)).expect("a power of two")
}

impl Node {
    /// A node over its own device.
    #[must_use]
    pub fn new(
        setup: &Setup,
        limits: Limits,
        wire: Lossy<Ports<'static, 'static>>,
        now: Instant,
    ) -> Self {
        Self::over(setup, limits, soft::Tap::off(wire), now)
    }

    /// A node over its own device, on a wire that may have a tap.
    #[must_use]
    pub fn over(setup: &Setup, limits: Limits, wire: Wires, now: Instant) -> Self {
        let sizes = limits.shape.sizes();
        let device_limits = soft::Limits {
            queue_pairs: u32::try_from(sizes.connections).expect("few"),
            send_wr: sizes.send_wr,
            recv_wr: sizes.recv_wr,
            windows: u32::try_from(sizes.regions + sizes.mappings).expect("few"),
            memories: 4,
            cqe: sizes.cqe - setup.short.completions,
        };
        let device_sizes = device_limits
            .sizes(&setup.profile)
            .expect("within the profile");
        let device_storage = soft::Storage {
            queue_pairs: lend(device_sizes.queue_pairs, soft::QueuePairSlot::default),
            numbers: lend(device_sizes.numbers, u32::default),
            sends: lend(device_sizes.sends, soft::SendEntry::default),
            pieces: lend(device_sizes.pieces, Sge::default),
            receives: lend(device_sizes.receives, soft::ReceiveEntry::default),
            regions: lend(device_sizes.regions, soft::RegionSlot::default),
            fragments: lend(device_sizes.fragments, soft::Fragment::default),
            memories: lend(device_sizes.memories, || None),
            completions: lend(device_sizes.completions, soft::CompletionEntry::default),
        };
        let device =
            Soft::new(setup.profile, &device_limits, device_storage, wire).expect("sized to fit");
        Self::with(Software, device, setup, limits, now)
    }
}

impl<B: Backend> Node<B> {
    /// A node over this device.
    #[must_use]
    pub fn with(
        mut backend: B,
        mut device: B::Nic,
        setup: &Setup,
        limits: Limits,
        now: Instant,
    ) -> Self {
        let sizes = limits.shape.sizes();
        let rights = if setup.registration.expose_arena {
            Rights::LOCAL_WRITE | Rights::REMOTE_WRITE
        } else {
            Rights::LOCAL_WRITE
        };
        let mut arena = Arena::registered(setup.memory, rights, |base| {
            backend.register(&mut device, base, setup.memory, rights)
        });
        let counters: &'static Counters = lend_one(Counters::new());
        let storage = Storage {
            connections: lend(sizes.connections, Slot::vacant),
            transfers: lend(sizes.transfers, Slot::vacant),
            receives: lend(sizes.receives, Slot::vacant),
            regions: lend(sizes.regions, || None),
            staging: lend(sizes.staging, || {
                Some(arena.aligned(STAGE_BYTES as usize, setup.stage_align))
            }),
            mappings: lend(sizes.mappings, Slot::vacant),
            ways: lend(sizes.ways, Ways::default),
            entries: lend(sizes.entries, Slot::vacant),
            messages: lend(sizes.messages, || {
                Some(Buffer::new(arena.take(4096, 0)).expect("long enough"))
            }),
            sends: lend(sizes.sends, || WrId(0)),
            counters,
        };
        let orders = setup.shape.windows + setup.shape.mappings + 16;
        let (orders, orders_in) = ring_of(orders.next_power_of_two().max(64));
        let pooled = if sizes.mappings == 0 { 0 } else { 512 };
        let (reports_out, reports) = ring_of(setup.reports.max(pooled));
        let (submissions, submissions_in) = ring_of(setup.events);
        let (events_out, events) = ring_of(setup.events);
        let ends = Ends {
            orders: orders_in,
            reports: reports_out,
            submissions: submissions_in,
            events: events_out,
        };
        let (submissions, mut events) = keep(submissions, events);
        let mut device = Tap::new(device, arena.view());
        if setup.registration.expose_arena {
            device.expose(RKey(arena.key().0));
        }
        device.set_terms(limits.shape.queue_depth, setup.max_frags);
        if setup.quiet {
            device.be_quiet();
            events.close();
        }
        let poller = Poller::new(device, storage, ends, limits, now).expect("sized to fit");
        let mut node = Self {
            poller,
            backend,
            limits,
            arena,
            counters,
            orders,
            reports,
            submissions,
            events,
            ready: VecDeque::new(),
            refused: 0,
            gone: Vec::new(),
            rebuilt: 0,
            keep_broken: false,
            broken: Vec::new(),
            retired: 0,
            maps: Maps::default(),
            stopped: None,
        };
        for _ in 0..sizes.regions {
            let window = node.backend.window();
            node.order(Order::Window { window, of: None });
            node.poller.poll(now).expect("a healthy device");
        }
        node
    }

    /// Gives an order.
    pub fn order(&mut self, order: Order<Tap<B::Nic>>) {
        assert!(self.orders.push(order).is_ok(), "order ring full");
    }

    /// Submits; the ring must have room.
    pub fn submit(&mut self, submission: Submission<'static>) {
        assert!(
            self.submissions.push(submission).is_ok(),
            "submission ring full"
        );
    }

    /// One turn of the core and of its control side; whether anything happened.
    pub fn step(&mut self, now: Instant) -> bool {
        self.try_step(now).expect("a healthy device")
    }

    /// The same with a device that may become unusable.
    ///
    /// # Errors
    /// What is wrong with the device.
    pub fn try_step(&mut self, now: Instant) -> Result<bool, Fault> {
        let progress = self.poller.poll(now)?;
        let mut busy = progress.work != 0;
        while let Some(report) = self.reports.pop() {
            busy = true;
            match report {
                Report::Ready { connection, .. } => self.ready.push_back(connection),
                Report::Refused { .. } => self.refused += 1,
                Report::Gone {
                    connection, why, ..
                } => self.gone.push((connection, why)),
                Report::Broken { window, of } if self.keep_broken => {
                    self.broken.push((window, of));
                }
                Report::Broken { window, of } => {
                    // At once: its queue pair's end, which follows, waits for it.
                    drop(window);
                    self.rebuild(of);
                }
                Report::Retired { .. } => self.retired += 1,
                Report::Piece(piece) => self.maps.piece(piece),
                Report::Map { of, base } => self.maps.map(of, base),
                Report::Unmap { window } => self.maps.unmap(window),
                Report::Flush => self.maps.flush(),
                Report::Stopped(leftovers) => self.stopped = Some(leftovers),
            }
        }
        while let Some(order) = self.maps.answer() {
            busy = true;
            self.order(order);
        }
        if !self.keep_broken {
            for (broken, of) in core::mem::take(&mut self.broken) {
                drop(broken);
                self.rebuild(of);
            }
        }
        Ok(busy)
    }

    /// A window in place of one that is destroyed.
    fn rebuild(&mut self, of: Option<Handle>) {
        self.rebuilt += 1;
        let window = self.backend.window();
        self.order(Order::Window { window, of });
    }
}
