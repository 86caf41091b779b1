#![no_std]
#![cfg_attr(
    not(any(test, feature = "conformance")),
    deny(
        clippy::indexing_slicing,
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic
    )
)]
//! The software RDMA device: [`Nic`] without a card.
//!
//! One [`Soft`] value per polling core. It holds the core's queue pairs, its key table and its completion
//! queue, in slices that somebody lent ([`Storage`]; [`Limits::sizes`] says how long they must be). No
//! allocator, no standard library, no thread of its own: everything happens inside [`Nic::doorbell`] and
//! [`Nic::poll`].
//!
//! A walk through the house, in the order in which the rooms import each other:
//!
//! * `bytes`: registered memory, checked spans of it, and the copy. The only `unsafe` code.
//! * `packet`: what goes from core to core. A packet holds spans, not bytes.
//! * `wire`: what carries packets: [`Ports`] of lap rings, or a [`Lossy`] wire over them.
//! * `tap`: what is sent on a wire, copied towards a thread that keeps it.
//! * `profile`: what kind of card this plays ([`Profile::frwr`] and its siblings).
//! * `lists`: what a registration becomes.
//! * `keys`: which key lies over which memory.
//! * `completion`: the completion queue.
//! * `queue_pair`: the two queues of a queue pair and its state.
//! * `settle`: what becomes of work requests: acknowledgements, retries, errors, flushes.
//! * `post`: the initiator: work requests enter their chains.
//! * `send`: chains become packets.
//! * `respond`: the responder: it runs what a peer asked.
//!
//! # Who copies
//! The core that **owns the responder queue pair** runs an inbound WRITE, READ or SEND when it polls, against
//! its own key table, and copies each byte once, from the initiator's memory to its own or back. It does so in
//! slices of [`Profile::slice`] bytes per poll, or of [`Profile::alone`] times as many while no other port has a packet, and
//! looks the key up again for each. So an INVALIDATE on that core
//! against a WRITE under way is a matter of program order, and no table is shared. The bytes are handed over by
//! the release/acquire pairs of the rings that carry request and acknowledgement.
//!
//! # Letting go
//! The peer's core reads and writes our memory. So a queue pair that goes to error with packets on the wire does
//! not flush its send queue before the peer has said that it will not touch them any more (or has been silent for
//! all retries): memory of a flushed request is the caller's again.
//!
//! # Time
//! There is no clock. Timers count polls.
//!
//! # A device in std
//! ```
//! use o2poll_dataplane::nic::Nic;
//! use o2poll_dataplane::ring::{LapSlot, Returned};
//! use o2poll_soft::{Lane, Limits, Ports, Profile, QueuePair, Soft, Storage, link};
//!
//! fn many<T: Default>(count: usize) -> Vec<T> {
//!     core::iter::repeat_with(T::default).take(count).collect()
//! }
//! let profile = Profile::frwr();
//! let limits = Limits { queue_pairs: 4, send_wr: 91, recv_wr: 18, windows: 8, memories: 1, cqe: 512 };
//! let sizes = limits.sizes(&profile).ok_or("more than this card has")?;
//! let (mut queue_pairs, mut numbers) = (many(sizes.queue_pairs), many(sizes.numbers));
//! let (mut sends, mut pieces) = (many(sizes.sends), many(sizes.pieces));
//! let (mut receives, mut regions) = (many(sizes.receives), many(sizes.regions));
//! let (mut fragments, mut memories) = (many(sizes.fragments), many(sizes.memories));
//! let mut completions = many(sizes.completions);
//! let storage = Storage {
//!     queue_pairs: &mut queue_pairs,
//!     numbers: &mut numbers,
//!     sends: &mut sends,
//!     pieces: &mut pieces,
//!     receives: &mut receives,
//!     regions: &mut regions,
//!     fragments: &mut fragments,
//!     memories: &mut memories,
//!     completions: &mut completions,
//! };
//! // One link per pair of cores; `far` goes to the other core.
//! let (mut there, mut back) = (Returned::new(), Returned::new());
//! let (mut slots, mut more) = (many::<LapSlot>(64), many::<LapSlot>(64));
//! let (near, far) = link(
//!     Lane { returned: &mut there, slots: &mut slots },
//!     Lane { returned: &mut back, slots: &mut more },
//! )
//! .ok_or("a ring has 2^n slots, n from 2 to 30")?;
//! let mut ports = [near];
//! let mut soft = Soft::new(profile, &limits, storage, Ports::new(&mut ports)).ok_or("storage")?;
//! // Number 1 here, number 2 behind port 0.
//! let qp = soft.adopt(QueuePair::new(1, 0, 2, 91, 18)).map_err(|_| "no room")?;
//! # let _ = (qp, far);
//! # Ok::<(), &str>(())
//! ```

#[cfg(any(test, feature = "conformance"))]
extern crate std;

mod bytes;
mod completion;
#[cfg(any(test, feature = "conformance"))]
pub mod conformance;
mod keys;
mod lists;
mod packet;
mod post;
mod profile;
mod queue_pair;
mod respond;
mod send;
mod settle;
mod tap;
mod wire;

#[cfg(test)]
mod tests;

use o2poll_dataplane::memory::Range;
use o2poll_dataplane::nic::{
    Burst, Capabilities, Fault, LKey, Nic, Qp, RKey, ReceiveQueue, Region, Rejected, Rights,
    SendWr, Sge, Status, WrId,
};

pub use bytes::{Fragment, Memory, Span};
pub use completion::CompletionEntry;
pub use keys::{RegionSlot, Window};
pub use o2poll_dataplane::memory::Copier;
pub use packet::{Flags, Opcode, Packet};
pub use profile::{Limits, Profile, Sizes};
pub use queue_pair::{Path, QueuePair, QueuePairSlot, ReceiveEntry, SendEntry};
pub use tap::{CHUNK_BYTES, Chunk, Passed, Reader, Recorder, Said, Tap, Timer, recorder};
pub use wire::{Lane, Lossy, Port, Ports, Weather, Wire, link, loopback};

use completion::{CompletionQueue, Side};
use keys::Keys;
use queue_pair::{NONE, State, Table, Timers};

/// Everything a device keeps, lent by the core's thread. Lengths by [`Limits::sizes`]; fill with `default()`.
#[derive(Debug)]
pub struct Storage<'a> {
    /// Queue pairs.
    pub queue_pairs: &'a mut [QueuePairSlot],
    /// Queue pairs by number.
    pub numbers: &'a mut [u32],
    /// Send queues.
    pub sends: &'a mut [SendEntry],
    /// Scatter/gather lists of the send queues.
    pub pieces: &'a mut [Sge],
    /// Receive queues.
    pub receives: &'a mut [ReceiveEntry],
    /// Adopted windows.
    pub regions: &'a mut [RegionSlot],
    /// Their lists.
    pub fragments: &'a mut [Fragment],
    /// Base memory regions.
    pub memories: &'a mut [Option<Memory>],
    /// The completion queue.
    pub completions: &'a mut [CompletionEntry],
}

/// What a test makes go wrong. All off by default.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    /// The next doorbell takes only so many requests of its chain.
    pub accept: Option<u32>,
    /// After this many more requests have begun to run, the next fails with this status.
    pub fail: Option<(u32, Status)>,
    /// So many posts of receives are refused.
    pub refuse_receives: u32,
    /// A registration takes so many polls more when its turn has come: work requests of other queue pairs, and
    /// what they bring about at the peer, pass it.
    pub late_registrations: Option<u32>,
    /// After this many more packets, all are lost (a cut cable).
    pub cut: Option<u32>,
}

/// What is in use. Everything is 0 when everything has been given back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Gauges {
    /// Region keys that are live.
    pub live_keys: usize,
    /// Send queue slots in use, whether the request is done or not.
    pub send_slots: usize,
    /// Receives posted and not completed.
    pub receives: usize,
    /// Completions not yet polled.
    pub completions: usize,
}

/// What has happened so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Doorbells rung.
    pub doorbells: u64,
    /// Send work requests taken.
    pub work_requests: u64,
    /// Packets given to the wire.
    pub packets: u64,
    /// Times that a queue pair went back to send packets again.
    pub retries: u64,
    /// Accesses of peers that were refused.
    pub refused: u64,
    /// Packets for queue pairs that do not exist.
    pub strangers: u64,
    /// Payload bytes copied.
    pub bytes: u64,
}

/// A software RDMA device, as one polling core sees it.
pub struct Soft<'a, W> {
    profile: Profile,
    copier: Copier,
    wire: W,
    table: Table<'a>,
    keys: Keys<'a>,
    completions: CompletionQueue<'a>,
    /// Answers to queue pairs that wrote to nobody: port, their number, number they wrote to.
    strangers: heapless::Deque<(u16, u32, u32), 16>,
    polls: u64,
    /// Port that is looked at first.
    port: u16,
    timers: Timers,
    faults: Faults,
    /// Faults may have been ordered.
    faulty: bool,
    counts: Counts,
}

impl<'a, W: Wire> Soft<'a, W> {
    /// A device of this profile; `None` when the storage is shorter than [`Limits::sizes`] says.
    #[must_use]
    pub fn new(profile: Profile, limits: &Limits, storage: Storage<'a>, wire: W) -> Option<Self> {
        let sizes = limits.sizes(&profile)?;
        let slots = storage.queue_pairs.get_mut(..sizes.queue_pairs)?;
        let numbers = storage.numbers.get_mut(..sizes.numbers)?;
        let regions = storage.regions.get_mut(..sizes.regions)?;
        let memories = storage.memories.get_mut(..sizes.memories)?;
        slots.fill_with(QueuePairSlot::default);
        numbers.fill(NONE);
        regions.fill_with(RegionSlot::default);
        memories.fill_with(|| None);
        Some(Self {
            // A poll does something.
            profile: Profile {
                slice: profile.slice.max(1),
                alone: profile.alone.max(1),
                packets: profile.packets.max(1),
                ..profile
            },
            copier: Copier::default(),
            wire,
            table: Table {
                slots,
                numbers,
                sends: storage.sends.get_mut(..sizes.sends)?,
                pieces: storage.pieces.get_mut(..sizes.pieces)?,
                receives: storage.receives.get_mut(..sizes.receives)?,
                send_stride: limits.send_stride()?,
                piece_stride: profile.piece_stride(),
                receive_stride: limits.receive_stride()?,
                high: 0,
                first: NONE,
                last: NONE,
                listed: 0,
            },
            keys: Keys::new(
                regions,
                storage.fragments.get_mut(..sizes.fragments)?,
                profile.fragment_stride(),
                memories,
            ),
            completions: CompletionQueue::new(storage.completions.get_mut(..sizes.completions)?),
            strangers: heapless::Deque::new(),
            polls: 0,
            port: 0,
            timers: Timers::new(),
            faults: Faults::default(),
            faulty: false,
            counts: Counts::default(),
        })
    }

    /// Moves bytes another way from now on.
    pub const fn set_copier(&mut self, copier: Copier) {
        self.copier = copier;
    }

    /// Registers base memory, for the life of the device. The local key is a remote key as well if the
    /// memory was given a remote right.
    ///
    /// # Errors
    /// The memory itself, when the device holds as many as it can.
    pub fn register(&mut self, memory: Memory) -> Result<LKey, Memory> {
        self.keys.add_memory(memory)
    }

    /// Registers a range that is lent for ever, with these rights; it comes back under its local key, and
    /// exposed if a peer has one of them.
    ///
    /// # Errors
    /// The range as it was, when the device holds as many as it can.
    pub fn register_range(
        &mut self,
        range: Range<'static>,
        pd: u32,
        rights: Rights,
    ) -> Result<Range<'static>, Range<'static>> {
        match self.register(Memory::of_range(&range, pd).with_rights(rights)) {
            Ok(lkey) if rights.intersects(Rights::REMOTE_WRITE | Rights::REMOTE_READ) => {
                Ok(range.under(lkey).exposed(RKey(lkey.0)))
            }
            Ok(lkey) => Ok(range.under(lkey)),
            Err(_) => Err(range),
        }
    }

    /// What goes wrong from now on.
    pub const fn faults(&mut self) -> &mut Faults {
        self.faulty = true;
        &mut self.faults
    }

    /// The wire.
    pub const fn wire(&mut self) -> &mut W {
        &mut self.wire
    }

    /// What has happened so far.
    #[must_use]
    pub const fn counts(&self) -> Counts {
        self.counts
    }

    /// What is in use now. Walks the tables: for tests and reports.
    #[must_use]
    pub fn gauges(&self) -> Gauges {
        let mut gauges = Gauges {
            live_keys: self.keys.live(),
            completions: self.completions.len(),
            ..Gauges::default()
        };
        for slot in self.table.slots.iter().filter(|slot| slot.pair.is_some()) {
            let sends = slot.open.wrapping_sub(slot.freed) as usize;
            let receives = slot.recv_tail.wrapping_sub(slot.recv_head) as usize;
            gauges.send_slots = gauges.send_slots.saturating_add(sends);
            gauges.receives = gauges.receives.saturating_add(receives);
        }
        gauges
    }

    /// Everything that a poll does before it reports.
    fn step(&mut self) {
        self.polls = self.polls.wrapping_add(1);
        self.wire.step();
        self.take_in();
        for _ in 0..self.table.listed {
            if let Some(index) = self.table.unlist() {
                self.serve(index);
            }
        }
        if self.polls >= self.timers.alarm {
            self.tick();
        }
    }
}

impl<W: Wire> Nic for Soft<'_, W> {
    type QueuePair = QueuePair;
    type Window = Window;

    fn capabilities(&self) -> &Capabilities {
        &self.profile.capabilities
    }

    fn adopt(&mut self, qp: QueuePair) -> Result<Qp, QueuePair> {
        if qp.path.port >= self.wire.ports() || qp.send_depth > self.profile.granted_send_wr {
            return Err(qp);
        }
        self.table.adopt(qp).map(Qp)
    }

    fn fail(&mut self, qp: Qp) {
        self.enter_error(qp.0, Status::Flushed, false);
    }

    /// As `ibv_destroy_qp`: work requests that are outstanding never complete, so drain it first.
    fn retire(&mut self, qp: Qp) -> Option<QueuePair> {
        self.release_staged(qp.0);
        self.table.retire(qp.0)
    }

    fn adopt_window(&mut self, window: Window) -> Result<(Region, RKey), Window> {
        self.keys.adopt(window, &self.profile.capabilities)
    }

    /// Its key is dead from here on.
    fn retire_window(&mut self, region: Region) -> Option<Window> {
        self.keys.retire(region)
    }

    #[inline(always)]
    fn queue(&mut self, qp: Qp, id: WrId, signalled: bool, wr: SendWr<'_>) {
        self.append(qp.0, id, signalled, wr);
    }

    fn doorbell(&mut self, qp: Qp) -> Result<(), Rejected> {
        self.ring(qp.0)
    }

    #[inline(never)]
    fn receive(&mut self, into: ReceiveQueue, id: WrId, buffer: Sge) -> Result<(), Rejected> {
        let none = Rejected { accepted: 0 };
        if self.faulty
            && let Some(left) = self.faults.refuse_receives.checked_sub(1)
        {
            self.faults.refuse_receives = left;
            return Err(none);
        }
        let ReceiveQueue::Of(qp) = into else {
            return Err(none);
        };
        let mut held = self.table.held(qp.0).ok_or(none)?;
        let depth = held.slot.pair.as_ref().map_or(0, |pair| pair.recv_depth);
        let used = held.slot.recv_tail.wrapping_sub(held.slot.recv_freed);
        if held.slot.state != State::Ready || used >= depth {
            return Err(none);
        }
        let entry = held.receives.at(held.slot.recv_tail).ok_or(none)?;
        (entry.id, entry.buffer) = (id, buffer);
        held.slot.recv_tail = held.slot.recv_tail.wrapping_add(1);
        Ok(())
    }

    fn poll(&mut self, out: &mut Burst) -> Result<(), Fault> {
        self.step();
        if self.completions.overrun() {
            return Err(Fault::Overrun);
        }
        while self.completions.len() != 0 && !out.is_full() {
            let room = out.capacity().saturating_sub(out.len());
            for entry in self.completions.take(room) {
                if let Some(slot) = self.table.slot(entry.queue_pair)
                    && slot.generation == entry.generation
                {
                    match entry.side {
                        Side::Send => slot.freed = entry.frees,
                        Side::Receive => slot.recv_freed = entry.frees,
                    }
                }
                // There is room: never refused.
                let _taken = out.push(entry.completion);
            }
        }
        Ok(())
    }

    /// Nothing to arm: this device has no interrupt, and does nothing unless it is polled.
    fn arm(&mut self) -> Result<(), Fault> {
        if self.completions.overrun() {
            return Err(Fault::Overrun);
        }
        Ok(())
    }
}
