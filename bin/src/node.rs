//! One node: its arena, the storage lent to its poller and its device, its rings, its exports.
//!
//! Everything that is lent here is lent for the life of the process ([`lend`]): a peer's device may read and
//! write a node's memory until it is gone itself, whichever thread ends first, and a process starts its nodes
//! once. So nothing of it has to be waited for or freed.

use o2poll_config::{self as config, Content, Exposure, Wish};
use o2poll_dataplane::counters::Counters;
use o2poll_dataplane::endpoint::{Entry, EntryOptions, Event, MatchBits, Submission, Token};
use o2poll_dataplane::memory::{Buffer, MESSAGE_BYTES, PageList, Range};
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
use o2poll_soft::{self as soft, Gauges, Ports, Profile, Recorder, Soft, Tap};

use crate::NodeError;
use crate::application::{Application, Notice, Port, Turn};
use crate::capture::Ticker;
use crate::plan::Needs;

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
    pub(crate) counters: &'static Counters,
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

    /// Submits.
    ///
    /// # Errors
    /// The submission, when the ring is full.
    pub fn submit(&mut self, submission: Submission<'static>) -> Result<(), Submission<'static>> {
        self.port.submit(submission)
    }

    /// The oldest event that has not been taken.
    pub fn event(&mut self) -> Option<Event<'static>> {
        self.port.event()
    }

    /// What its core has counted.
    #[must_use]
    pub const fn counters(&self) -> &'static Counters {
        self.counters
    }
}

/// What makes the device value of a node, on the node's own thread, and registers its memory.
pub(crate) trait Backend: Send + 'static {
    /// The device value.
    type Nic: Nic + 'static;

    /// Makes it.
    fn nic(&mut self, node: Nid, needs: &Needs) -> Result<Self::Nic, NodeError>;

    /// Takes a piece out of an arena, registered: so many bytes, on a boundary of so many.
    fn take(
        &mut self,
        nic: &mut Self::Nic,
        node: Nid,
        arena: &'static Arena,
        bytes_and_align: (usize, usize),
        rights: Rights,
    ) -> Result<Range<'static>, NodeError>;

    /// What the device still holds, if it can tell.
    fn gauges(nic: &Self::Nic) -> Option<Gauges>;
}

/// The software device.
pub(crate) struct SoftBackend {
    pub(crate) profile: Profile,
    /// To every other node's device, in the order of the node file.
    pub(crate) ports: Vec<soft::Port<'static>>,
    /// For the tap on them.
    pub(crate) recorder: Option<Recorder<'static, Ticker>>,
}

impl Backend for SoftBackend {
    type Nic = Device;

    fn nic(&mut self, node: Nid, needs: &Needs) -> Result<Device, NodeError> {
        let wires = wires(core::mem::take(&mut self.ports), self.recorder.take());
        device(needs, self.profile, wires).ok_or(NodeError::Device {
            node,
            what: "its own limits",
        })
    }

    fn take(
        &mut self,
        nic: &mut Device,
        node: Nid,
        arena: &'static Arena,
        (bytes, align): (usize, usize),
        rights: Rights,
    ) -> Result<Range<'static>, NodeError> {
        let range = arena
            .take(bytes, align, LKey::default())
            .map_err(|source| NodeError::Take { node, source })?;
        nic.register_range(range, PROTECTION_DOMAIN, rights)
            .map_err(|_| NodeError::Device {
                node,
                what: "another memory region",
            })
    }

    fn gauges(nic: &Device) -> Option<Gauges> {
        Some(nic.gauges())
    }
}

/// What a polling thread needs to make a node.
pub(crate) struct Blueprint<A, B: Backend> {
    /// Its place in the node file.
    pub(crate) index: usize,
    pub(crate) node: config::Node,
    pub(crate) memory: config::Memory,
    pub(crate) tunables: config::Tunables,
    pub(crate) backend: B,
    pub(crate) needs: Needs,
    pub(crate) stamp: u64,
    pub(crate) orders: Consumer<'static, Order<B::Nic>>,
    pub(crate) reports: Producer<'static, Report<B::Nic>>,
    pub(crate) notices: Consumer<'static, Notice>,
    pub(crate) counters: &'static Counters,
    /// What runs beside the poller; without one, a [`Node`] is handed out.
    pub(crate) application: Option<A>,
    /// Bytes of each range of memory for whoever uses the node.
    pub(crate) ranges: Vec<usize>,
}

/// A node on its polling thread.
pub(crate) struct Seat<A, B: Backend> {
    pub(crate) index: usize,
    pub(crate) nid: Nid,
    poller: Poller<'static, B::Nic>,
    notices: Consumer<'static, Notice>,
    application: Option<(A, Port)>,
    busy: Ticks,
}

/// What is told of a node that has been made.
pub(crate) struct Built {
    pub(crate) index: usize,
    /// What was asked of the machine and not granted.
    pub(crate) notes: Vec<String>,
    pub(crate) node: Option<Node>,
}

impl<A: Application, B: Backend> Seat<A, B> {
    /// Makes a node on the thread that will poll for it, so that its memory is near that core.
    pub(crate) fn build(
        mut plan: Blueprint<A, B>,
        clock: &Clock,
    ) -> Result<(Self, Built), NodeError> {
        let nid = plan.node.nid;
        let (huge, lock) = wishes(plan.memory);
        let mut notes = Vec::new();
        let mut keep = |made: Result<(Arena, Vec<Note>), ArenaError>| {
            let (arena, said) = made.map_err(|source| NodeError::Arena { node: nid, source })?;
            notes.extend(said.into_iter().map(|note| format!("{nid}: {note}")));
            Ok::<&'static Arena, NodeError>(Box::leak(Box::new(arena)))
        };
        let arena = keep(Arena::new(plan.needs.bytes, huge, lock))?;
        let mut device = plan.backend.nic(nid, &plan.needs)?;
        // What peers may be shown for good: `exposure = "arena"`.
        let open = match plan.memory.exposure {
            Exposure::Arena => Rights::LOCAL_WRITE | Rights::REMOTE_WRITE,
            Exposure::None => Rights::LOCAL_WRITE,
        };
        let mut aligned = |arena: &'static Arena, bytes: usize, align: usize, rights: Rights| {
            let piece = (bytes, align);
            plan.backend.take(&mut device, nid, arena, piece, rights)
        };
        let mut messages = Some(aligned(
            arena,
            plan.needs.messages,
            PAGE,
            Rights::LOCAL_WRITE,
        )?);
        let mut staging = match plan.needs.staging {
            0 => None,
            // So that few large pages cover one, where a device takes short lists only.
            bytes => Some(aligned(arena, bytes, STAGE_BYTES as usize, open)?),
        };
        let mut registered = |arena: &'static Arena, bytes: usize, rights: Rights| {
            aligned(arena, bytes, PAGE, rights)
        };
        let mut exports = Vec::new();
        for export in &plan.node.exports {
            let (arena, rights) = match &export.content {
                // Nothing writes into a file's copy, not even our own device.
                Content::File(path) if !export.writable => {
                    (keep(Arena::from_file(path, huge, lock))?, Rights::empty())
                }
                Content::File(path) => (keep(Arena::from_file(path, huge, lock))?, open),
                Content::Memory if export.writable => (arena, open),
                Content::Memory => (arena, Rights::LOCAL_WRITE),
            };
            for piece in export.pieces() {
                let range = registered(arena, piece.length as usize, rights)?;
                exports.push((export, piece.match_bits, range));
            }
        }
        let mut memory = Vec::new();
        for bytes in &plan.ranges {
            memory.push(registered(arena, *bytes, open)?);
        }
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
            counters: plan.counters,
        };
        // Every transfer may end before the application looks; an entry has two events.
        let events = sizes.transfers + 2 * sizes.entries + 16;
        let (submissions, submissions_in) = ring_of(events);
        let (events_out, events) = ring_of(events);
        let ends = Ends {
            orders: plan.orders,
            reports: plan.reports,
            submissions: submissions_in,
            events: events_out,
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
        let mut port = Port {
            submissions,
            events,
        };
        for (export, match_bits, range) in exports {
            attach(
                &mut poller,
                &mut port,
                nid,
                clock,
                export,
                match_bits,
                range,
            )?;
        }
        let (application, node) = match plan.application {
            Some(mut application) => {
                application.begin(memory);
                (Some((application, port)), None)
            }
            None => {
                let node = Node {
                    nid,
                    port,
                    memory,
                    counters: plan.counters,
                };
                (None, Some(node))
            }
        };
        let seat = Self {
            index: plan.index,
            nid,
            poller,
            notices: plan.notices,
            application,
            busy: Ticks(0),
        };
        let built = Built {
            index: plan.index,
            notes,
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
            self.busy = Ticks(self.busy.0.wrapping_add(now.since(before).0));
        }
        let Some((application, port)) = &mut self.application else {
            return Ok(progress.work != 0);
        };
        while let Some(notice) = self.notices.pop() {
            application.notice(notice);
        }
        let turn = Turn {
            now,
            busy: self.busy,
        };
        let stepped = application.step(port, turn);
        Ok(progress.work != 0 || stepped != 0)
    }

    /// What its device still holds, and its application, at the end.
    pub(crate) fn end(mut self) -> (usize, Option<Gauges>, Option<A>) {
        let gauges = B::gauges(self.poller.nic());
        let application = self.application.map(|(application, _)| application);
        (self.index, gauges, application)
    }
}

/// Exports one piece, and waits for the poller to say so.
fn attach<N: Nic>(
    poller: &mut Poller<'static, N>,
    port: &mut Port,
    node: Nid,
    clock: &Clock,
    export: &config::Export,
    match_bits: MatchBits,
    range: Range<'static>,
) -> Result<(), NodeError> {
    let refused = |why| NodeError::Export {
        node,
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
        memory: page_list(range).ok_or_else(|| refused(None))?,
    };
    port.submit(Submission::Attach(entry))
        .map_err(|_| refused(None))?;
    poller
        .poll(clock.now())
        .map_err(|fault| NodeError::Fault { node, fault })?;
    match port.event() {
        Some(Event::Attached { .. }) => Ok(()),
        Some(Event::Detached { why, .. }) => Err(refused(why)),
        _ => Err(refused(None)),
    }
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

/// A page list of one range.
pub(crate) fn page_list(range: Range<'static>) -> Option<&'static mut PageList<'static>> {
    let mut list = PageList::new();
    list.push(range).ok()?;
    Some(Box::leak(Box::new(list)))
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
    /// For submissions of the node that asked.
    pub connection: Handle,
    /// Agreed queue depth.
    pub queue_depth: u16,
}

const PAGE: usize = 4096;

/// All of a node is in one protection domain.
pub(crate) const PROTECTION_DOMAIN: u32 = 0;
