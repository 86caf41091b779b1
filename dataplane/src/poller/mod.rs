//! One core's loop, split by direction: obey, submit, complete (which receives), expire, send.
//!
//! This is the only room that calls across rooms: transfers, connections, portals and windows are
//! values that answer questions.

mod answers;
mod close;
mod complete;
mod desk;
mod fill;
mod map;
mod message;
mod obey;
mod receive;
mod record;
mod requests;
mod send;
mod sink;
mod submit;

pub use crate::connection::Reason;
use crate::connection::{Connection, Credits};
use crate::counters::Counters;
use crate::endpoint::{Event, Submission};
use crate::memory::{Buffer, Copier, Posted, Range};
use crate::nic::{Capabilities, Fault, Nic, Sge, WrId};
use crate::peer::Terms;
use crate::pool::{Handle, Pool, Queue, Slot};
use crate::portal::Attached;
use crate::registration::{
    Descriptor, Mapping, Mappings, STAGE_BYTES, Scratch, Settings, Stages, Ways,
};
use crate::ring::{Consumer, Producer};
use crate::time::{Instant, Ticks};
use crate::transfer::Transfer;
use crate::wire::{Nid, Pid, ping};
use record::{Chain, Hand, Record, Stack, Windows};

/// What the control side tells a polling core.
pub enum Order<N: Nic> {
    /// Serve this queue pair. Answered by [`Report::Ready`] or [`Report::Refused`].
    Adopt {
        /// Made on this core's protection domain and completion queue, with room for what the terms' depth needs
        /// ([`Shape::sizes`]).
        qp: N::QueuePair,
        /// What is agreed so far; on the connecting side the peer's part comes with
        /// [`Order::Establish`], and messages that arrive before it wait.
        terms: Terms,
        /// The terms are final: messages may be taken at once (a lost RTU must not stall the accepting
        /// side, LU-8303).
        accepted: bool,
        /// The control side's own name for it.
        token: u64,
    },
    /// The connection is up, with these terms. Transfers may start.
    Establish {
        /// As told by [`Report::Ready`].
        connection: Handle,
        /// What was agreed.
        terms: Terms,
    },
    /// End the connection. Answered by [`Report::Gone`], once everything of it has ended.
    Close {
        /// Which.
        connection: Handle,
    },
    /// A window to register memory with: a new one, or one rebuilt after [`Report::Broken`].
    Window {
        /// The window, no key of it alive.
        window: N::Window,
        /// As in the report; `None` for a new one.
        of: Option<Handle>,
    },
    /// The window with the live mapping that [`Report::Map`] asked for.
    Mapped {
        /// The window.
        window: N::Window,
        /// As in the report.
        of: Handle,
    },
    /// The mapping that [`Report::Map`] asked for cannot be made.
    NotMapped {
        /// As in the report.
        of: Handle,
    },
    /// Every mapping of the batch that [`Report::Flush`] ended is unmapped, and its key dead.
    Unmapped,
    /// End all connections, give up all windows. Answered by [`Report::Stopped`].
    Stop,
}

/// What a polling core tells the control side.
pub enum Report<N: Nic> {
    /// The queue pair is adopted and its receives are posted: accept or connect now.
    Ready {
        /// Its name from now on.
        connection: Handle,
        /// As in the order.
        token: u64,
    },
    /// No room for the queue pair.
    Refused {
        /// To be destroyed.
        qp: N::QueuePair,
        /// As in the order.
        token: u64,
        /// It was the device that refused it: it may take one of less depth.
        by_device: bool,
    },
    /// The connection has ended and is drained.
    Gone {
        /// Its name.
        connection: Handle,
        /// To be destroyed.
        qp: N::QueuePair,
        /// As in the order that adopted it.
        token: u64,
        /// Why.
        why: Reason,
    },
    /// A window whose key may still be alive, since its queue pair failed: destroy it, make another, and
    /// give that back with the same `of` (R7).
    Broken {
        /// To be destroyed. Before its queue pair: a bound window holds one.
        window: N::Window,
        /// Who waits for it.
        of: Option<Handle>,
    },
    /// One of the ranges that the next [`Report::Map`] is about, in order.
    Piece(Sge),
    /// Put a key with LOCAL_WRITE and REMOTE_WRITE over the pieces told since the last one, laid end to end: answered by
    /// [`Order::Mapped`] or [`Order::NotMapped`].
    Map {
        /// Who waits for it.
        of: Handle,
        /// Address of the first byte in the key's address space.
        base: u64,
    },
    /// A window with a live mapping that nobody uses: one of the batch that the next [`Report::Flush`] ends.
    Unmap {
        /// To be destroyed, with the others.
        window: N::Window,
    },
    /// Destroy the windows of the batch, all at once. Answered by [`Order::Unmapped`].
    Flush,
    /// A window given up at the end; no key of it is alive.
    Retired {
        /// To be destroyed.
        window: N::Window,
    },
    /// Nothing is left.
    Stopped(Leftovers),
}

/// What is still held; all zero after a clean end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Leftovers {
    /// Connection slots.
    pub connections: usize,
    /// Transfer slots.
    pub transfers: usize,
    /// Receive slots.
    pub receives: usize,
    /// Entries.
    pub entries: usize,
    /// Message buffers missing from the pool.
    pub messages: usize,
    /// Windows not in the free ring.
    pub windows: usize,
    /// Staging buffers that a transfer holds.
    pub staging: usize,
    /// Mappings, used or not.
    pub mappings: usize,
    /// Event slots reserved.
    pub events: usize,
}

/// The four rings of a core. Control and application each have their own pair, so that each ring has
/// one producer and one consumer.
pub struct Ends<'a, N: Nic> {
    /// From the control side.
    pub orders: Consumer<'a, Order<N>>,
    /// To the control side. Holds at least two reports per connection and one per window; with a pool of mappings also
    /// two more than the longest list has ranges.
    pub reports: Producer<'a, Report<N>>,
    /// From the application.
    pub submissions: Consumer<'a, Submission<'a>>,
    /// To the application. Holds at least two events more than there may be entries.
    pub events: Producer<'a, Event<'a>>,
}

/// Memory of a core's state, lent for its life. [`Shape::sizes`] says how much of each.
pub struct Storage<'a> {
    /// One per connection.
    pub connections: &'a mut [Slot<Connection<'a>>],
    /// Transfers, ours and the peers'.
    pub transfers: &'a mut [Slot<Transfer<'a>>],
    /// Posted receives.
    pub receives: &'a mut [Slot<Receive<'a>>],
    /// The free ring of windows.
    pub regions: &'a mut [Option<Descriptor>],
    /// Staging buffers of [`STAGE_BYTES`], all present at the start, registered with the device; each begins on a
    /// page; on a device with page lists too short for one, on as large a one as makes them do. Exposed ones serve a
    /// device that has nothing but the arena's key.
    pub staging: &'a mut [Option<Range<'a>>],
    /// The pool of mappings.
    pub mappings: &'a mut [Slot<Mapping>],
    /// Where mappings are looked up.
    pub ways: &'a mut [Ways],
    /// Exported memory.
    pub entries: &'a mut [Slot<crate::portal::Attached<'a>>],
    /// Message buffers, all present at the start.
    pub messages: &'a mut [Option<Buffer<'a>>],
    /// What is on each send queue.
    pub sends: &'a mut [WrId],
    /// Counters.
    pub counters: &'a Counters,
}

/// How much a core is to hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Connections.
    pub connections: usize,
    /// Largest queue depth (`peer_credits`) of a connection, 1 to 255.
    pub queue_depth: u16,
    /// Most WRITEs of one transfer on the send queue at a time, 1 to 16.
    pub writes_at_once: u16,
    /// Transfers of ours that may wait for their turn, over all connections.
    pub waiting: usize,
    /// Windows.
    pub windows: usize,
    /// Staging buffers (`staging`).
    pub staging: usize,
    /// Mappings (`fmr_pool_size`), on a device with [`Mechanisms::MAPPINGS`](crate::nic::Mechanisms::MAPPINGS).
    pub mappings: usize,
    /// From how many ranges on a source is registered, on a device that can; 0: never. Costs two work requests per
    /// transfer.
    pub register_source_from: u16,
    /// Exported entries.
    pub entries: usize,
}

/// Lengths of the slices of a [`Storage`], and of the queues of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// [`Storage::connections`].
    pub connections: usize,
    /// [`Storage::transfers`].
    pub transfers: usize,
    /// [`Storage::receives`].
    pub receives: usize,
    /// [`Storage::regions`].
    pub regions: usize,
    /// [`Storage::staging`].
    pub staging: usize,
    /// [`Storage::mappings`].
    pub mappings: usize,
    /// [`Storage::ways`].
    pub ways: usize,
    /// [`Storage::entries`].
    pub entries: usize,
    /// [`Storage::messages`].
    pub messages: usize,
    /// [`Storage::sends`].
    pub sends: usize,
    /// Send work requests of one queue pair.
    pub send_wr: u32,
    /// Receives of one queue pair.
    pub recv_wr: u32,
    /// Completion queue entries.
    pub cqe: u32,
}

impl Shape {
    /// Work requests of one connection: own transfers, the peers', two NOOPs and one to drain.
    ///
    /// A GET of ours is REGISTER, SEND, INVALIDATE; a PUT of ours PUT_REQ, `w` WRITEs, DONE. A peer's
    /// PUT is REGISTER, PUT_ACK, INVALIDATE; its GET `w` WRITEs, DONE. Where sources are registered, REGISTER and
    /// INVALIDATE stand around the `w` WRITEs and their DONE.
    #[must_use]
    pub fn send_wr(&self) -> u32 {
        let (depth, writes) = (u32::from(self.queue_depth), u32::from(self.writes_at_once));
        let source = if self.register_source_from == 0 { 0 } else { 2 };
        let own = writes.saturating_add(2).saturating_add(source).max(3);
        let peer = writes.saturating_add(1).saturating_add(source).max(3);
        depth
            .saturating_mul(own.saturating_add(peer))
            .saturating_add(3)
    }

    /// Reports that the pool of mappings may want room for: what a list and a batch take.
    #[must_use]
    pub const fn reports_of_mappings(&self) -> usize {
        match self.mappings {
            0 => 0,
            mappings => mappings.saturating_add(map::REPORTS),
        }
    }

    /// How long each slice must be.
    #[must_use]
    pub fn sizes(&self) -> Sizes {
        let depth = usize::from(self.queue_depth);
        let recv_wr = u32::from(self.queue_depth)
            .saturating_mul(2)
            .saturating_add(2);
        let receives = self.connections.saturating_mul(recv_wr as usize);
        // `depth` of our own, `depth` of the peer's, and one to turn down a REPLY that comes too late.
        let shares = self
            .connections
            .saturating_mul(depth.saturating_mul(2).saturating_add(1));
        let send_wr = self.send_wr();
        Sizes {
            connections: self.connections,
            transfers: shares.saturating_add(self.waiting),
            receives,
            regions: self.windows,
            staging: self.staging,
            mappings: self.mappings,
            // Twice as many places as mappings, four to a set.
            ways: match self.mappings {
                0 => 0,
                mappings => mappings.next_power_of_two().div_ceil(2),
            },
            entries: self.entries,
            messages: receives
                .saturating_add(shares)
                .saturating_add(self.connections.saturating_mul(2)),
            sends: self
                .connections
                .saturating_mul((send_wr as usize).next_power_of_two()),
            send_wr,
            recv_wr,
            cqe: u32::try_from(self.connections)
                .unwrap_or(u32::MAX)
                .saturating_mul(send_wr.saturating_add(recv_wr)),
        }
    }
}

/// Numbers and names of a node that its core needs.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Our NID.
    pub nid: Nid,
    /// Our process id.
    pub pid: Pid,
    /// Our incarnation.
    pub stamp: u64,
    /// How long a transfer may take unless it says otherwise (`timeout`).
    pub timeout: Ticks,
    /// How much longer an abandoned transfer waits for a late answer before its connection is closed.
    pub abandon: Ticks,
    /// Idle time after which a NOOP shows that we live.
    pub keepalive: Ticks,
    /// What is to be held.
    pub shape: Shape,
    /// What of memory peers may be shown.
    pub registration: Settings,
}

/// Lent storage that is shorter than [`Shape::sizes`] says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} has {have} places and needs {need}")]
pub struct TooSmall {
    /// Which slice.
    pub what: &'static str,
    /// Its length.
    pub have: usize,
    /// The least it must have.
    pub need: usize,
}

/// What one call of [`Poller::poll`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Things done: 0 says that the core was idle.
    pub work: u32,
    /// By when it must be called again, whatever happens.
    pub next: Instant,
}

/// A receive, posted or held.
#[derive(Debug)]
pub struct Receive<'a> {
    pub(crate) connection: Handle,
    pub(crate) state: Received<'a>,
}

/// Where the buffer of a receive is.
#[derive(Debug)]
pub(crate) enum Received<'a> {
    /// With the device.
    Posted(Posted<'a>),
    /// Here, full, and waiting for a slot.
    Held {
        buffer: Buffer<'a>,
        length: u32,
        /// The credits in its header have been counted.
        counted: bool,
    },
    /// Here, empty, and refused by the device: to be posted again. The peer has its credit coming then.
    Idle { buffer: Buffer<'a>, owe: bool },
    /// Lent to a transfer that still reads the descriptor in it.
    Lent,
}

/// One polling core.
///
/// `poll` is to be called again and again by the one thread that owns the value, with a time that never
/// goes back. What the application submits comes in through a ring and what has ended goes out through
/// another; both may belong to the same thread (`loop { poller.poll(now); app.step(); }`).
pub struct Poller<'a, N: Nic> {
    nic: N,
    capabilities: Capabilities,
    limits: Limits,
    ends: Ends<'a, N>,
    counters: &'a Counters,
    connections: Pool<'a, Connection<'a>>,
    transfers: Pool<'a, Transfer<'a>>,
    receives: Pool<'a, Receive<'a>>,
    entries: Pool<'a, Attached<'a>>,
    messages: Stack<'a>,
    windows: Windows<'a>,
    stages: Stages<'a>,
    mappings: Mappings<'a>,
    /// From how many ranges on a source is registered.
    source_from: usize,
    copier: Copier,
    record: Record<'a>,
    /// Entries, in the order in which they were attached.
    attached: Queue,
    /// Connections to be looked at in the send stage.
    listed: Queue,
    /// Event slots that transfers and entries have coming.
    events_due: usize,
    /// A transfer at the head of the submissions, for which there is no slot.
    pending: Option<Submission<'a>>,
    /// Transfers of ours that hold a slot, and how many may.
    own: usize,
    own_most: usize,
    chain: Chain,
    scratch: Scratch,
    hand: Hand,
    ping: [u8; ping::BYTES],
    stopping: bool,
    stopped: bool,
}

impl<'a, N: Nic> Poller<'a, N> {
    /// A poller over what is lent to it.
    ///
    /// # Errors
    /// The slice that is too short, or the device limit that is.
    pub fn new(
        nic: N,
        storage: Storage<'a>,
        mut ends: Ends<'a, N>,
        limits: Limits,
        now: Instant,
    ) -> Result<Self, TooSmall> {
        let sizes = limits.shape.sizes();
        let capabilities = *nic.capabilities();
        for (what, have, need) in [
            ("connections", storage.connections.len(), sizes.connections),
            ("transfers", storage.transfers.len(), sizes.transfers),
            ("receives", storage.receives.len(), sizes.receives),
            ("regions", storage.regions.len(), sizes.regions),
            ("staging", whole(storage.staging), sizes.staging),
            ("mappings", storage.mappings.len(), sizes.mappings),
            ("ways", storage.ways.len(), sizes.ways),
            (
                "the report ring",
                ends.reports.free(),
                if sizes.mappings == 0 { 0 } else { map::REPORTS },
            ),
            ("entries", storage.entries.len(), sizes.entries),
            ("messages", storage.messages.len(), sizes.messages),
            ("sends", storage.sends.len(), sizes.sends),
            // Each entry keeps a slot for its end. With fewer than two besides, nothing could be asked any more.
            (
                "the event ring",
                ends.events.free(),
                sizes.entries.saturating_add(2),
            ),
            (
                "the device's send queue",
                capabilities.max_send_wr as usize,
                sizes.send_wr as usize,
            ),
            (
                "the device's receive queue",
                capabilities.max_recv_wr as usize,
                sizes.recv_wr as usize,
            ),
            (
                "the device's completion queue",
                capabilities.max_cqe as usize,
                sizes.cqe as usize,
            ),
        ] {
            if have < need {
                return Err(TooSmall { what, have, need });
            }
        }
        let shares = sizes
            .connections
            .saturating_mul(usize::from(limits.shape.queue_depth).saturating_add(1));
        let transfers = Pool::new(storage.transfers);
        Ok(Self {
            capabilities,
            counters: storage.counters,
            connections: Pool::new(storage.connections),
            own_most: transfers.capacity().saturating_sub(shares),
            hand: Hand::new(transfers.capacity(), limits.timeout, now),
            transfers,
            receives: Pool::new(storage.receives),
            entries: Pool::new(storage.entries),
            messages: Stack::new(storage.messages),
            windows: Windows::new(storage.regions),
            stages: Stages::new(storage.staging),
            mappings: Mappings::new(
                storage.mappings,
                storage.ways,
                usize::try_from(limits.registration.flush_trigger).unwrap_or(usize::MAX),
                limits.registration.cache_mappings,
            ),
            source_from: sink::source_from(
                limits.shape.register_source_from,
                &capabilities,
                limits.shape.writes_at_once,
            ),
            copier: Copier::default(),
            record: Record::new(storage.sends, sizes.send_wr),
            attached: Queue::new(),
            listed: Queue::new(),
            events_due: 0,
            pending: None,
            own: 0,
            chain: Chain::new(),
            scratch: Scratch::new(),
            ping: ping::encode(ping::Features::PLAIN, limits.pid, 1, limits.nid),
            stopping: false,
            stopped: false,
            nic,
            limits,
            ends,
        })
    }

    /// Copies out of staging buffers another way from now on.
    pub const fn set_copier(&mut self, copier: Copier) {
        self.copier = copier;
    }

    /// One turn of the loop. Never blocks.
    ///
    /// # Errors
    /// The device is unusable.
    pub fn poll(&mut self, now: Instant) -> Result<Progress, Fault> {
        let mut work = 0_u32;
        if !self.ends.orders.is_empty() {
            // What had arrived when the peer said good-bye is taken before its connection is closed.
            work = self.complete(now)?;
        }
        work = work.saturating_add(self.obey(now));
        work = work.saturating_add(self.submit(now));
        work = work.saturating_add(self.complete(now)?);
        work = work.saturating_add(self.expire(now));
        work = work.saturating_add(self.send(now));
        work = work.saturating_add(self.unmap());
        self.counters.polls.add(1);
        if work == 0 {
            self.counters.idle_polls.add(1);
        }
        Ok(Progress {
            work,
            next: now.after(self.hand.turn()),
        })
    }

    /// The device, for a simulation that steps it or looks at it.
    pub const fn nic(&mut self) -> &mut N {
        &mut self.nic
    }

    /// What is held now.
    #[must_use]
    pub fn leftovers(&self) -> Leftovers {
        Leftovers {
            connections: self.connections.len(),
            transfers: self.transfers.len(),
            receives: self.receives.len(),
            entries: self.entries.len(),
            messages: self.messages.missing(),
            windows: self.windows.missing(),
            staging: self.stages.missing(),
            mappings: self.mappings.len(),
            events: self.events_due,
        }
    }

    /// Flow control of a connection, to look at.
    #[must_use]
    pub fn credits(&self, connection: Handle) -> Option<Credits> {
        Some(self.connections.get(connection)?.credits)
    }

    /// Work requests of a connection that the device has not given back, to look at.
    #[must_use]
    pub fn on_send_queue(&self, connection: Handle) -> Option<u32> {
        Some(self.connections.get(connection)?.on_send_queue())
    }

    /// Puts a connection on the list of those the send stage looks at. It stays there while it
    /// [has work](Connection::has_work): who frees what it waits for needs not list it again.
    #[inline]
    fn list(&mut self, connection: Handle) {
        if let Some(state) = self.connections.get_mut(connection)
            && !state.listed
        {
            state.listed = true;
            self.connections.push_back(&mut self.listed, connection);
        }
    }

    /// Reserves room for one event that will come later.
    fn reserve_event(&mut self) -> bool {
        let room = self.ends.events.free() > self.events_due;
        if room {
            self.events_due = self.events_due.wrapping_add(1);
        }
        room
    }

    /// Sends an event whose room was reserved.
    fn tell(&mut self, event: Event<'a>) {
        self.events_due = self.events_due.saturating_sub(1);
        // Room was reserved and only this core puts events in.
        let _ = self.ends.events.push(event);
    }
}

/// Staging buffers that are long enough.
fn whole(buffers: &[Option<Range<'_>>]) -> usize {
    buffers
        .iter()
        .flatten()
        .filter(|range| range.sge().length >= STAGE_BYTES)
        .count()
}
