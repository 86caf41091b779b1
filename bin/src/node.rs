//! One node: its arena, the storage lent to its poller and its device, its rings, its exports.
//!
//! Everything that is lent here is lent for the life of the process ([`lend`]): a peer's device may read and
//! write a node's memory until it is gone itself, whichever thread ends first, and a process starts its nodes
//! once. So nothing of it has to be waited for or freed.

use core::sync::atomic::{AtomicU64, Ordering};
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender};

use o2poll_config::{self as config, Content, Exposure, Wish};
use o2poll_dataplane::endpoint::{Entry, EntryOptions, Event, MatchBits, Submission, Token};
use o2poll_dataplane::memory::{Buffer, MESSAGE_BYTES, PageList, Range, SharedRange};
use o2poll_dataplane::nic::{Fault, LKey, Nic, Rights, Sge, WrId};
use o2poll_dataplane::poller::{Ends, Limits, Order, Poller, Report, Storage};
use o2poll_dataplane::pool::{Handle, Slot};
use o2poll_dataplane::registration::{STAGE_BYTES, Settings, Ways};
use o2poll_dataplane::ring::{self, Consumer, Indices, Producer};
use o2poll_dataplane::time::Ticks;
use o2poll_dataplane::wire::{Nid, Pid};
use o2poll_hal::arena::{Arena, ArenaError, HugePages, Lock, Note};
use o2poll_hal::clock::Clock;
use o2poll_hal::copy::best_copy;
use o2poll_soft::{self as soft, Faults, Gauges, Ports, Profile, Recorder, Soft, Tap};

use crate::NodeError;
use crate::application::{Application, Notice, Turn};
use crate::capture::Ticker;
use crate::measure::CoreCounters;
use crate::plan::Needs;
use crate::port::Port;

/// The device of a node.
pub type Device = Soft<'static, Wires>;

/// Its wire: one ring to every other node, and a tap that is on while there is a capture.
pub type Wires = Tap<'static, Ports<'static, 'static>, Ticker>;

/// A node without an application on its polling thread: what its owner holds of it.
///
/// Submissions go in and events come out from whatever thread owns this; the node itself is polled on a
/// thread of its own. The owner's thread may sleep between looks.
#[derive(Debug)]
pub struct Node {
    pub(crate) nid: Nid,
    pub(crate) port: Port,
    pub(crate) memory: Vec<Range<'static>>,
    pub(crate) counters: CoreCounters,
}

impl Node {
    /// Its name on the fabric.
    #[must_use]
    pub const fn nid(&self) -> Nid {
        self.nid
    }

    /// Takes `bytes` of its registered memory, as one piece; `None` when there is no such piece left.
    /// What is taken moves through submissions and events, and need not come back.
    pub fn memory(&mut self, bytes: u32) -> Option<&'static mut PageList<'static>> {
        let at = self
            .memory
            .iter()
            .position(|range| range.sge().length >= bytes)?;
        let (taken, rest) = self.memory.swap_remove(at).split_at(bytes).ok()?;
        self.memory.push(rest);
        page_list(taken)
    }

    /// Submits to the node: memory is attached on every core before [`Event::Attached`] comes, and detached on every
    /// core before [`Event::Detached`] does; see [`Port::submit`]. Everything else goes to the first core.
    ///
    /// # Errors
    /// The submission, when a ring is full.
    pub fn submit(&mut self, submission: Submission<'static>) -> Result<(), Submission<'static>> {
        self.port.submit(submission)
    }

    /// Submits to one of its cores: a transfer to the one that has the connection ([`Link::core`]).
    ///
    /// # Errors
    /// The submission, when the ring is full, and for a core that the node has not.
    pub fn submit_to(
        &mut self,
        core: usize,
        submission: Submission<'static>,
    ) -> Result<(), Submission<'static>> {
        self.port.submit_to(core, submission)
    }

    /// The oldest event of some core that has not been taken.
    pub fn event(&mut self) -> Option<Event<'static>> {
        self.port.event()
    }

    /// What its cores have counted.
    #[must_use]
    pub const fn counters(&self) -> CoreCounters {
        self.counters
    }
}

/// What makes the device value of one core of a node, on the core's own thread, and registers its memory.
pub(crate) trait Backend: Send + 'static {
    /// The device value.
    type Nic: Nic + 'static;
    /// What the devices of a node's other cores must know of the memory that they share.
    type Shared: Clone + Send + 'static;

    /// Makes it.
    fn nic(&mut self, node: Nid, needs: &Needs) -> Result<Self::Nic, NodeError>;

    /// Takes a piece out of an arena, registered.
    fn take(
        &mut self,
        nic: &mut Self::Nic,
        node: Nid,
        arena: &'static Arena,
        bytes: usize,
        rights: Rights,
    ) -> Result<Range<'static>, NodeError>;

    /// All memory that was taken so far.
    fn share(&self) -> Self::Shared;

    /// Makes the memory of the node's first core known to this core's device, under the same keys. Comes before
    /// anything is taken.
    fn join(
        &mut self,
        nic: &mut Self::Nic,
        node: Nid,
        shared: Self::Shared,
    ) -> Result<(), NodeError>;

    /// What the device still holds, if it can tell.
    fn gauges(nic: &Self::Nic) -> Option<Gauges>;
}

/// The software device.
pub(crate) struct SoftBackend {
    pub(crate) profile: Profile,
    /// To every other core's device, in the order of all cores of the node file.
    pub(crate) ports: Vec<soft::Port<'static>>,
    /// For the tap on them.
    pub(crate) recorder: Option<Recorder<'static, Ticker>>,
    /// What goes wrong.
    pub(crate) faults: Option<Faults>,
    pub(crate) taken: Vec<(soft::Memory, LKey)>,
}

impl Backend for SoftBackend {
    type Nic = Device;
    type Shared = Vec<(soft::Memory, LKey)>;

    fn nic(&mut self, node: Nid, needs: &Needs) -> Result<Device, NodeError> {
        let wires = wires(core::mem::take(&mut self.ports), self.recorder.take());
        let mut device = device(needs, self.profile, wires).ok_or(NodeError::Device {
            node,
            what: "its own limits",
        })?;
        if let Some(faults) = self.faults {
            *device.faults() = faults;
        }
        Ok(device)
    }

    fn take(
        &mut self,
        nic: &mut Device,
        node: Nid,
        arena: &'static Arena,
        bytes: usize,
        rights: Rights,
    ) -> Result<Range<'static>, NodeError> {
        let range = arena
            .take(bytes, PAGE, LKey::default())
            .map_err(|source| NodeError::Take { node, source })?;
        let memory = soft::Memory::of_range(&range, PROTECTION_DOMAIN).with_rights(rights);
        let range = nic
            .register_range(range, PROTECTION_DOMAIN, rights)
            .map_err(|_| NodeError::Device {
                node,
                what: "another memory region",
            })?;
        self.taken.push((memory, range.sge().lkey));
        Ok(range)
    }

    fn share(&self) -> Self::Shared {
        self.taken.clone()
    }

    fn join(&mut self, nic: &mut Device, node: Nid, shared: Self::Shared) -> Result<(), NodeError> {
        for (memory, lkey) in shared {
            // A device numbers its memories in the order in which they come.
            if nic.register(memory).ok() != Some(lkey) {
                return Err(NodeError::Device {
                    node,
                    what: "the memory of its other cores under the same key",
                });
            }
        }
        Ok(())
    }

    fn gauges(nic: &Device) -> Option<Gauges> {
        Some(nic.gauges())
    }
}

/// What a polling thread needs to make one core of a node.
pub(crate) struct Blueprint<A, B: Backend> {
    /// The node's place in the node file.
    pub(crate) index: usize,
    pub(crate) node: config::Node,
    pub(crate) memory: config::Memory,
    pub(crate) tunables: config::Tunables,
    pub(crate) backend: B,
    pub(crate) needs: Needs,
    pub(crate) stamp: u64,
    pub(crate) orders: Consumer<'static, Order<B::Nic>>,
    pub(crate) reports: Producer<'static, Report<B::Nic>>,
    pub(crate) submissions: Consumer<'static, Submission<'static>>,
    pub(crate) events: Producer<'static, Event<'static>>,
    pub(crate) counters: CoreCounters,
    pub(crate) busy: &'static [AtomicU64],
    /// Which of the node's cores it is.
    pub(crate) core: usize,
    pub(crate) role: Role<A, B>,
}

/// What one core of a node does for the others.
pub(crate) enum Role<A, B: Backend> {
    /// It makes the memory that all use, and steps the application.
    First {
        /// To all cores.
        port: Port,
        notices: Consumer<'static, Notice>,
        /// What runs beside the poller; without one, a [`Node`] is handed out.
        application: Option<A>,
        /// Bytes of each range of memory for whoever uses the node.
        ranges: Vec<usize>,
        others: Vec<Sender<Common<B>>>,
    },
    /// It waits for that memory.
    Other(Receiver<Common<B>>),
}

impl<A, B: Backend> Role<A, B> {
    pub(crate) const fn is_first(&self) -> bool {
        matches!(self, Self::First { .. })
    }
}

/// Memory that all cores of a node export.
pub(crate) struct Common<B: Backend> {
    memories: B::Shared,
    /// Place of the export in the node, match bits of the piece, and where it is.
    exports: Vec<(usize, MatchBits, SharedRange<'static>)>,
}

/// An exported piece on its way to a poller.
type Piece = (usize, MatchBits, &'static mut PageList<'static>);

/// One core of a node on its polling thread.
pub(crate) struct Seat<A, B: Backend> {
    pub(crate) index: usize,
    pub(crate) core: usize,
    pub(crate) nid: Nid,
    poller: Poller<'static, B::Nic>,
    application: Option<(A, Port, Consumer<'static, Notice>)>,
    busy: &'static [AtomicU64],
    own_busy: Ticks,
}

/// What is told of a core that has been made.
pub(crate) struct Built {
    pub(crate) index: usize,
    /// What was asked of the machine and not granted.
    pub(crate) notes: Vec<Note>,
    pub(crate) node: Option<Node>,
}

impl<A: Application, B: Backend> Seat<A, B> {
    /// Makes one core of a node on the thread that will poll for it, so that its memory is near that core.
    pub(crate) fn build(
        mut plan: Blueprint<A, B>,
        clock: &Clock,
    ) -> Result<(Self, Built), NodeError> {
        let nid = plan.node.nid;
        let mut arenas = Arenas::new(nid, plan.memory);
        let first = plan.role.is_first();
        let bytes = if first {
            plan.needs.bytes
        } else {
            plan.needs.own_bytes
        };
        let arena = arenas.keep(|huge, lock| Arena::new(bytes, huge, lock))?;
        let mut device = plan.backend.nic(nid, &plan.needs)?;
        // What peers may be shown for good: `exposure = "arena"`.
        let open = match plan.memory.exposure {
            Exposure::Arena => Rights::LOCAL_WRITE | Rights::REMOTE_WRITE,
            Exposure::None => Rights::LOCAL_WRITE,
        };
        let mut exports = Vec::new();
        let mut memory = Vec::new();
        match &mut plan.role {
            Role::First { ranges, others, .. } => {
                let mut take = |arena: &'static Arena, bytes: usize, rights: Rights| {
                    plan.backend.take(&mut device, nid, arena, bytes, rights)
                };
                let pieces = exported(&plan.node, arena, open, &mut arenas, &mut take)?;
                for bytes in ranges {
                    memory.push(take(arena, *bytes, open)?);
                }
                exports = share(&plan.backend, pieces, others).map_err(|()| NodeError::Device {
                    node: nid,
                    what: "a page list",
                })?;
            }
            Role::Other(common) => {
                // It fails with the thread of the first core, which tells why.
                let common = common.recv().map_err(|_| NodeError::FirstCore(nid))?;
                plan.backend.join(&mut device, nid, common.memories)?;
                for (export, match_bits, range) in common.exports {
                    if let Some(list) = shared_list(range) {
                        exports.push((export, match_bits, list));
                    }
                }
            }
        }
        let mut take = |bytes: usize, rights: Rights| {
            plan.backend.take(&mut device, nid, arena, bytes, rights)
        };
        let mut messages = Some(take(plan.needs.messages, Rights::LOCAL_WRITE)?);
        let mut staging = match plan.needs.staging {
            0 => None,
            bytes if plan.needs.aligns_staging => on_boundary(take(bytes, open)?),
            bytes => Some(take(bytes, open)?),
        };
        let sizes = plan.needs.sizes;
        let storage = Storage {
            connections: lend(sizes.connections, Slot::vacant),
            transfers: lend(sizes.transfers, Slot::vacant),
            receives: lend(sizes.receives, Slot::vacant),
            regions: lend(sizes.regions, || None),
            staging: lend(sizes.staging, || next_range(&mut staging, STAGE_BYTES)),
            mappings: lend(sizes.mappings, Slot::vacant),
            ways: lend(sizes.ways, Ways::default),
            entries: lend(sizes.entries, Slot::vacant),
            messages: lend(sizes.messages, || next_buffer(&mut messages)),
            sends: lend(sizes.sends, WrId::default),
            counters: plan
                .counters
                .get(plan.core)
                .copied()
                .ok_or(NodeError::NoNode(nid))?,
        };
        let ends = Ends {
            orders: plan.orders,
            reports: plan.reports,
            submissions: plan.submissions,
            events: plan.events,
        };
        let limits = Limits {
            nid,
            pid: Pid::LUSTRE,
            stamp: plan.stamp,
            timeout: clock.ticks(plan.tunables.timeout),
            abandon: clock.ticks(plan.tunables.abandon_limit),
            keepalive: clock.ticks(plan.tunables.keepalive),
            shape: plan.needs.shape,
            registration: Settings {
                expose_arena: plan.memory.exposure == Exposure::Arena,
                map_on_demand: plan.tunables.map_on_demand,
                flush_trigger: plan.tunables.fmr_flush_trigger,
                cache_mappings: plan.tunables.fmr_cache,
            },
        };
        let mut poller = Poller::new(device, storage, ends, limits, clock.now())
            .map_err(|source| NodeError::Storage { node: nid, source })?;
        poller.set_copier(best_copy());
        attach_all(&mut poller, &plan.node, exports)?;
        let (application, node) = match plan.role {
            Role::First {
                port,
                notices,
                application: Some(mut application),
                ..
            } => {
                application.begin(memory);
                (Some((application, port, notices)), None)
            }
            Role::First { port, .. } => {
                let node = Node {
                    nid,
                    port,
                    memory,
                    counters: plan.counters,
                };
                (None, Some(node))
            }
            Role::Other(_) => (None, None),
        };
        let seat = Self {
            index: plan.index,
            core: plan.core,
            nid,
            poller,
            application,
            busy: plan.busy,
            own_busy: Ticks(0),
        };
        let built = Built {
            index: plan.index,
            notes: arenas.notes,
            node,
        };
        Ok((seat, built))
    }

    /// Polls once and steps the application once; whether there was anything to do.
    ///
    /// # Errors
    /// The device is unusable.
    #[inline]
    pub(crate) fn turn(&mut self, clock: &Clock) -> Result<bool, Fault> {
        let before = clock.now();
        let progress = self.poller.poll(before)?;
        let now = clock.now();
        if progress.work != 0 {
            self.own_busy = Ticks(self.own_busy.0.wrapping_add(now.since(before).0));
            if let Some(busy) = self.busy.get(self.core) {
                // Relaxed: a number for people.
                busy.store(self.own_busy.0, Ordering::Relaxed);
            }
        }
        let Some((application, port, notices)) = &mut self.application else {
            return Ok(progress.work != 0);
        };
        while let Some(notice) = notices.pop() {
            application.notice(notice);
        }
        let busy = self.busy.iter().fold(0_u64, |sum, core| {
            // Relaxed: as above.
            sum.wrapping_add(core.load(Ordering::Relaxed))
        });
        let turn = Turn {
            now,
            busy: Ticks(busy),
        };
        let stepped = application.step(port, turn);
        Ok(progress.work != 0 || stepped != 0)
    }

    /// What is left of it at the end.
    pub(crate) fn end(mut self) -> Left<A> {
        let device = B::gauges(self.poller.nic());
        Left {
            index: self.index,
            core: self.core,
            device,
            application: self.application.map(|(application, ..)| application),
        }
    }
}

/// What is left of one core of a node.
pub(crate) struct Left<A> {
    pub(crate) index: usize,
    pub(crate) core: usize,
    /// What its device still holds.
    pub(crate) device: Option<Gauges>,
    pub(crate) application: Option<A>,
}

/// Arenas that live as long as the process, and what was not granted of them.
struct Arenas {
    nid: Nid,
    huge: HugePages,
    lock: Lock,
    notes: Vec<Note>,
}

impl Arenas {
    fn new(nid: Nid, memory: config::Memory) -> Self {
        let (huge, lock) = wishes(memory);
        Self {
            nid,
            huge,
            lock,
            notes: Vec::new(),
        }
    }

    fn keep(
        &mut self,
        make: impl FnOnce(HugePages, Lock) -> Result<(Arena, Vec<Note>), ArenaError>,
    ) -> Result<&'static Arena, NodeError> {
        let node = self.nid;
        let (arena, said) =
            make(self.huge, self.lock).map_err(|source| NodeError::Arena { node, source })?;
        self.notes.extend(said);
        Ok(Box::leak(Box::new(arena)))
    }
}

/// Takes the memory of every export of a node.
fn exported(
    node: &config::Node,
    arena: &'static Arena,
    open: Rights,
    arenas: &mut Arenas,
    take: &mut impl FnMut(&'static Arena, usize, Rights) -> Result<Range<'static>, NodeError>,
) -> Result<Vec<(usize, MatchBits, Range<'static>)>, NodeError> {
    let mut pieces = Vec::new();
    for (place, export) in node.exports.iter().enumerate() {
        let mut of_file =
            |path: &Path| arenas.keep(|huge, lock| Arena::from_file(path, huge, lock));
        let (arena, rights) = match &export.content {
            // Nothing writes into a file's copy, not even our own device.
            Content::File(path) if !export.writable => (of_file(path)?, Rights::empty()),
            Content::File(path) => (of_file(path)?, open),
            Content::Memory if export.writable => (arena, open),
            Content::Memory => (arena, Rights::LOCAL_WRITE),
        };
        for piece in export.pieces() {
            let range = take(arena, piece.length as usize, rights)?;
            pieces.push((place, piece.match_bits, range));
        }
    }
    Ok(pieces)
}

/// Tells the other cores of a node what all of them export, and keeps one share.
fn share<B: Backend>(
    backend: &B,
    pieces: Vec<(usize, MatchBits, Range<'static>)>,
    others: &[Sender<Common<B>>],
) -> Result<Vec<Piece>, ()> {
    if others.is_empty() {
        let own = pieces
            .into_iter()
            .map(|(place, bits, range)| Some((place, bits, page_list(range)?)));
        return own.collect::<Option<_>>().ok_or(());
    }
    let exports: Vec<_> = pieces
        .into_iter()
        .map(|(place, bits, range)| (place, bits, range.share()))
        .collect();
    for other in others {
        // One that has died tells why.
        let _ = other.send(Common {
            memories: backend.share(),
            exports: exports.clone(),
        });
    }
    let own = exports
        .into_iter()
        .map(|(place, bits, range)| Some((place, bits, shared_list(range)?)));
    own.collect::<Option<_>>().ok_or(())
}

/// Exports all pieces.
fn attach_all<N: Nic>(
    poller: &mut Poller<'static, N>,
    node: &config::Node,
    pieces: Vec<Piece>,
) -> Result<(), NodeError> {
    for (place, match_bits, memory) in pieces {
        let Some(export) = node.exports.get(place) else {
            continue;
        };
        let refused = |why| NodeError::Export {
            node: node.nid,
            export: export.name.clone(),
            why,
        };
        let mut options = EntryOptions::GET;
        options.set(EntryOptions::PUT, export.writable);
        let entry = Entry {
            token: Token(match_bits.0),
            portal: export.portal,
            match_bits,
            ignore_bits: MatchBits(0),
            from: Nid::ANY,
            options,
            memory,
        };
        poller
            .export(entry)
            .map_err(|(_, why)| refused(Some(why)))?;
    }
    Ok(())
}

fn wires(ports: Vec<soft::Port<'static>>, recorder: Option<Recorder<'static, Ticker>>) -> Wires {
    let ports = Ports::new(ports.leak());
    match recorder {
        Some(recorder) => Tap::on(ports, recorder),
        None => Tap::off(ports),
    }
}

fn device(needs: &Needs, profile: Profile, wires: Wires) -> Option<Device> {
    let sizes = needs.device;
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
    let mut device = Soft::new(profile, &needs.limits, storage, wires)?;
    device.set_copier(best_copy());
    Some(device)
}

/// A page list of one range that other cores have too.
fn shared_list(range: SharedRange<'static>) -> Option<&'static mut PageList<'static>> {
    let mut list = PageList::new();
    list.push_shared(range).ok()?;
    Some(Box::leak(Box::new(list)))
}

/// A page list of one range.
pub(crate) fn page_list(range: Range<'static>) -> Option<&'static mut PageList<'static>> {
    let mut list = PageList::new();
    list.push(range).ok()?;
    Some(Box::leak(Box::new(list)))
}

/// From the first boundary of a staging buffer's length on, so that a device with short page lists covers one in few
/// large pages.
fn on_boundary(range: Range<'static>) -> Option<Range<'static>> {
    let length = u64::from(STAGE_BYTES);
    let begin = range.sge().address;
    let skip = begin.next_multiple_of(length) - begin;
    let (_, rest) = range.split_at(u32::try_from(skip).ok()?).ok()?;
    Some(rest)
}

fn next_buffer(rest: &mut Option<Range<'static>>) -> Option<Buffer<'static>> {
    Buffer::new(next_range(rest, u32::try_from(MESSAGE_BYTES).ok()?)?).ok()
}

fn next_range(rest: &mut Option<Range<'static>>, bytes: u32) -> Option<Range<'static>> {
    let (first, after) = rest.take()?.split_at(bytes).ok()?;
    *rest = Some(after);
    Some(first)
}

/// A slice that is lent for the life of the process.
pub(crate) fn lend<T>(count: usize, make: impl FnMut() -> T) -> &'static mut [T] {
    core::iter::repeat_with(make)
        .take(count)
        .collect::<Vec<T>>()
        .leak()
}

/// A ring for at least so many values.
pub(crate) fn ring_of<T>(least: usize) -> (Producer<'static, T>, Consumer<'static, T>) {
    let indices = Box::leak(Box::new(Indices::new()));
    let slots = lend(least.max(1).next_power_of_two(), ring::Slot::new);
    ring::index_ring(indices, slots).expect("a power of two of slots")
}

const fn wishes(memory: config::Memory) -> (HugePages, Lock) {
    let huge = match memory.huge_pages {
        Wish::Try => HugePages::Try,
        Wish::Require => HugePages::Require,
        Wish::Off => HugePages::Off,
    };
    let lock = match memory.mlock {
        Wish::Try => Lock::Try,
        Wish::Require => Lock::Require,
        Wish::Off => Lock::Off,
    };
    (huge, lock)
}

/// Names a connection as its owner sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Link {
    /// Which core of the node that asked has it; 0 is the first.
    pub core: usize,
    /// For submissions to that core.
    pub connection: Handle,
    /// Agreed queue depth.
    pub queue_depth: u16,
}

const PAGE: usize = 4096;

/// All of a node is in one protection domain.
pub(crate) const PROTECTION_DOMAIN: u32 = 0;
