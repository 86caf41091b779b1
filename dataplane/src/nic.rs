//! The contract with an RDMA device. Imports nothing: who writes a driver depends on this room only.
//!
//! One [`Nic`] value belongs to one polling core and is called by nobody else. It holds the queue
//! pairs and the registered-memory handles ("windows": a memory window, an mkey, a fast-registration
//! region) that a control thread made and sent to the core, and one completion queue for all of them.
//!
//! # Laws
//! Every driver keeps these; `o2poll-soft` has a conformance suite that says them as tests.
//!
//! 1. Work requests of one queue pair start and complete in order (RC).
//! 2. A [`SendWr::Register`] followed by a [`SendWr::Send`] on one queue pair needs no completion
//!    between them: the key may travel in that message.
//! 3. An access outside the registered range, with a dead key, in a wrong protection domain or
//!    without the right is refused; nothing of it is written; both queue pairs go to error.
//! 4. A registration of length zero is refused. An access of length zero checks no key.
//! 5. When a queue pair is in error every outstanding work request completes as
//!    [`Status::Flushed`], signalled or not.
//! 6. A slot of the send queue is free only when a later *signalled* completion has been polled.
//! 7. A full completion queue is an error ([`Fault::Overrun`]), never a silent loss.
//! 8. An invalidate waits for the work requests before it on its queue pair.
//! 9. A registration holds for other queue pairs from the poll of its completion on. Before that, a work request of
//!    another queue pair may pass it.
//!
//! # What drivers may do differently
//! * A second [`SendWr::Register`] of a region whose first is still queued may be refused when it is posted.
//! * After an error, outstanding requests are flushed when the device has let go of their memory, which may have
//!   to wait for the peer, or for all retries if the peer is silent.
//! * A SEND whose `invalidate` names a key that the peer cannot kill fails there with
//!   [`Status::RemoteInvalidate`], and its queue pair goes to error. The sender sees [`Status::RemoteOperation`],
//!   or success where the peer's device acknowledges before it looks (rxe).

/// One piece of local memory. The same bytes as `struct ibv_sge`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sge {
    /// Virtual address (or the offset, for a zero-based key) of the first byte.
    pub address: u64,
    /// Length in bytes.
    pub length: u32,
    /// Key that lets the device touch it on our behalf.
    pub lkey: LKey,
}

static_assertions::const_assert_eq!(size_of::<Sge>(), 16);

/// Local key: lets *our* device touch our memory.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct LKey(pub u32);

/// Remote key: lets *a peer* touch our memory. Upper 24 bits index, low 8 bits a tag that rotates.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct RKey(pub u32);

impl RKey {
    /// The key of the same index with the next tag; 256 steps come back to the start
    /// (`ibv_inc_rkey(3)`).
    #[must_use]
    pub const fn rotated(self) -> Self {
        Self((self.0 & 0xffff_ff00) | (self.0.wrapping_add(1) & 0xff))
    }
}

/// A queue pair that this device value has adopted: an index, valid until retired.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Qp(pub u32);

/// A window that this device value has adopted: an index, valid until retired.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Region(pub u32);

/// What the device hands back with a completion; opaque to it (`wr_id`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct WrId(pub u64);

/// Memory of a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remote {
    /// Address as the peer named it.
    pub address: u64,
    /// Key the peer granted.
    pub rkey: RKey,
}

bitflags::bitflags! {
    /// What a registration allows.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Rights: u8 {
        /// Our own device may write through the region's local key.
        const LOCAL_WRITE = 1;
        /// The peer may write.
        const REMOTE_WRITE = 2;
        /// The peer may read.
        const REMOTE_READ = 4;
    }
}

bitflags::bitflags! {
    /// Ways a device can put one key over memory.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Mechanisms: u8 {
        /// [`Layout::Fragments`]: any bytes in any order (SG_GAPS, UMR).
        const FRAGMENTS = 1;
        /// [`Layout::Pages`]: ranges of which the driver makes a list of equal pages (FRWR).
        const PAGES = 2;
        /// [`Layout::Window`]: one contiguous range (type-2 memory window).
        const WINDOW = 4;
        /// None of a queue's: the control side makes windows that come with a live mapping over whole pages, see
        /// [`Nic::adopt_window`] (the FMR pools of old cards).
        const MAPPINGS = 8;
    }
}

/// How the memory of a registration is described.
#[derive(Clone, Copy, Debug)]
pub enum Layout<'w> {
    /// One contiguous range.
    Window(Sge),
    /// Any ranges, laid end to end in the key's address space.
    Fragments(&'w [Sge]),
    /// Ranges, laid end to end, that are whole pages of `1 << shift` bytes but for the start of the first and the end of
    /// the last; those that touch are one. The driver makes the list of pages of them, as `ib_map_mr_sg()` does.
    Pages {
        /// log2 of the page size in bytes.
        shift: u8,
        /// The ranges.
        ranges: &'w [Sge],
    },
}

/// One work request for the send queue. Borrowed lists are copied before the call returns.
#[derive(Clone, Copy, Debug)]
pub enum SendWr<'w> {
    /// A message into the peer's next receive.
    Send {
        /// The message.
        message: Sge,
        /// A key of the *peer* that its device invalidates before the receive completes
        /// (SEND_WITH_INV).
        invalidate: Option<RKey>,
    },
    /// RDMA WRITE.
    Write {
        /// Source, gathered in order; at most [`Capabilities::max_sge`] pieces.
        local: &'w [Sge],
        /// Sink.
        remote: Remote,
        /// Immediate data: the write then also consumes a receive of the peer.
        imm: Option<u32>,
    },
    /// RDMA READ.
    Read {
        /// Sink, scattered in order.
        local: &'w [Sge],
        /// Source.
        remote: Remote,
    },
    /// Put `key` over memory (REG_MR, BIND_MW, a UMR), on the queue, without a system call.
    Register {
        /// Which window.
        region: Region,
        /// The key to answer to from now on. The caller rotates the tag; the index is the window's.
        key: RKey,
        /// Who may do what.
        rights: Rights,
        /// Address of the first byte in the key's address space; 0 where
        /// [`Capabilities::zero_based`].
        base: u64,
        /// Bytes in all, not 0.
        length: u32,
        /// The memory.
        layout: Layout<'w>,
    },
    /// Kill a key of ours (LOCAL_INV).
    Invalidate {
        /// The key.
        key: RKey,
    },
}

impl SendWr<'_> {
    /// A WRITE of no bytes: no key is checked and nothing is moved, but it completes behind what was queued before it.
    pub(crate) const NOTHING: Self = Self::Write {
        local: &[],
        remote: Remote {
            address: 0,
            rkey: RKey(0),
        },
        imm: None,
    };
}

/// What came of a work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Completion {
    /// A signalled send work request is done, and so is every one before it on its queue pair.
    Done {
        /// As given to [`Nic::queue`].
        id: WrId,
    },
    /// A message, or a write with immediate data, has arrived.
    Received {
        /// As given to [`Nic::receive`].
        id: WrId,
        /// Bytes in the buffer. For a write with immediate data the bytes that were written, none of which are
        /// in the buffer.
        length: u32,
        /// Immediate data.
        imm: Option<u32>,
        /// The key of ours that the peer's message killed before this completion.
        invalidated: Option<RKey>,
    },
    /// A work request of either queue failed. Nothing but the id and the status is defined
    /// (`ibv_poll_cq(3)`).
    Failed {
        /// As given when it was posted.
        id: WrId,
        /// Why.
        status: Status,
    },
}

/// Why a work request failed (`enum ibv_wc_status`, reduced to what anyone acts on).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Status {
    /// The queue pair was in error before this request ran.
    Flushed,
    /// A local length or scatter/gather problem; on a receive: the message was too long.
    LocalLength,
    /// The local queue pair refused the operation (e.g. invalidating a free key).
    LocalOperation,
    /// A local key or range is not ours.
    LocalProtection,
    /// The registration was refused (bad range, length zero, region already live).
    Bind,
    /// The peer refused the access: key, range or right.
    RemoteAccess,
    /// The peer refused the request (e.g. no responder resources, message too long for it).
    RemoteInvalidRequest,
    /// The peer's queue pair failed while serving it; also of a SEND whose `invalidate` it could not obey.
    RemoteOperation,
    /// On a receive: the peer's SEND_WITH_INV named a key that could not be invalidated.
    RemoteInvalidate,
    /// No answer after all retries.
    RetryExceeded,
    /// The peer had no receive posted, retries used up.
    ReceiverNotReady,
    /// Anything else, as the driver numbers it.
    Other(u32),
}

/// A doorbell that the device took only in part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rejected {
    /// How many of the open chain's requests, from its start, were accepted. The rest never
    /// happened.
    pub accepted: u32,
}

/// The device value as a whole is unusable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// The completion queue overflowed: completions are lost.
    Overrun,
    /// The device went away.
    DeviceGone,
}

/// Where a receive goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReceiveQueue {
    /// The receive queue of one queue pair.
    Of(Qp),
    /// The shared receive queue of the core, where the device has one.
    Shared,
}

/// Completions of one poll.
pub type Burst = heapless::Vec<Completion, 32>;

/// What a device can do. Decided by executing a probe where a flag is known to lie (LU-19179).
#[derive(Clone, Copy, Debug)]
pub struct Capabilities {
    /// Registration mechanisms.
    pub mechanisms: Mechanisms,
    /// Most pieces of a [`Layout::Fragments`].
    pub max_fragments: u32,
    /// Most pages of a [`Layout::Pages`], and of a mapping that the control side makes.
    pub max_pages: u32,
    /// Smallest log2 of a page size for [`Layout::Pages`]; log2 of that of a mapping.
    pub page_shift: u8,
    /// A key's address space starts at 0, not at a chosen `base` (UMR mkeys).
    pub zero_based: bool,
    /// The device itself refuses to register over a live region.
    pub checks_reuse: bool,
    /// A region's key may be used as a local key.
    pub region_lkey: bool,
    /// [`SendWr::Send`] may carry `invalidate`, and a peer's may kill our keys.
    pub remote_invalidate: bool,
    /// Most pieces of `local` in a [`SendWr::Write`] or [`SendWr::Read`].
    pub max_sge: u32,
    /// Most send work requests of one queue pair.
    pub max_send_wr: u32,
    /// Most receives of one queue pair.
    pub max_recv_wr: u32,
    /// Most entries of a completion queue.
    pub max_cqe: u32,
    /// Most windows, those with a live mapping among them.
    pub max_windows: u32,
}

/// An RDMA device as one polling core sees it.
///
/// Sends are queued on one *open chain* at a time: any number of [`queue`](Nic::queue) calls for
/// one queue pair, then its [`doorbell`](Nic::doorbell). Errors inside the chain are latched and
/// told by the doorbell, so that queueing itself is branch-free for the caller.
pub trait Nic {
    /// Made and destroyed by a control thread, moved through rings.
    type QueuePair: Send;
    /// A memory window, mkey or region; same road. A broken one goes back to be rebuilt.
    type Window: Send;

    /// What the device can do.
    fn capabilities(&self) -> &Capabilities;

    /// Takes a queue pair over from the control thread; gives it back when there is no room.
    ///
    /// # Errors
    /// The queue pair itself, when the device value holds as many as it can.
    fn adopt(&mut self, qp: Self::QueuePair) -> Result<Qp, Self::QueuePair>;

    /// Moves the queue pair to the error state, so that everything outstanding is flushed. Only
    /// on the way down: a driver may need a system call here.
    fn fail(&mut self, qp: Qp);

    /// Gives a drained queue pair back to the control thread; `None` for an index that is not held.
    fn retire(&mut self, qp: Qp) -> Option<Self::QueuePair>;

    /// Takes a window over, with the key that is on the device now (its tag is the last used).
    ///
    /// With [`Mechanisms::MAPPINGS`] a window may come with a **live mapping**: the control side has put its key over
    /// a list of ranges, laid end to end from a base address of its choice, with rights. They are whole pages but for the
    /// start of the first and the end of the last, [`Capabilities::max_pages`] at most. Then the key returned
    /// is good on every queue pair of the protection domain from now on, and until
    /// [`retire_window`](Self::retire_window) and the control side have ended it: no REGISTER goes on its region, no
    /// INVALIDATE and no peer's SEND kills it.
    ///
    /// # Errors
    /// The window itself, when the device value holds as many as it can, or cannot map what it is over.
    fn adopt_window(&mut self, window: Self::Window) -> Result<(Region, RKey), Self::Window>;

    /// Gives a window back. Its key may still be live until the control thread has destroyed it. A live mapping is
    /// part of it: its memory is nobody else's before then.
    fn retire_window(&mut self, region: Region) -> Option<Self::Window>;

    /// Adds a work request to the open chain.
    fn queue(&mut self, qp: Qp, id: WrId, signalled: bool, wr: SendWr<'_>);

    /// Hands the open chain to the device.
    ///
    /// # Errors
    /// How many requests of the chain were accepted, when not all were.
    fn doorbell(&mut self, qp: Qp) -> Result<(), Rejected>;

    /// Posts a receive.
    ///
    /// # Errors
    /// When the queue is full or the queue pair is in error; nothing was posted.
    fn receive(&mut self, into: ReceiveQueue, id: WrId, buffer: Sge) -> Result<(), Rejected>;

    /// Fills `out` with what has completed, at most a burst. `out` comes empty.
    ///
    /// # Errors
    /// The device value is unusable.
    fn poll(&mut self, out: &mut Burst) -> Result<(), Fault>;

    /// Asks for a notification at the next completion (`idle = "sleep"`).
    ///
    /// # Errors
    /// The device value is unusable.
    fn arm(&mut self) -> Result<(), Fault>;
}

#[cfg(test)]
mod tests {
    use super::RKey;

    /// R5 of the registration rules: 256 rotations repeat the key, and the index never moves.
    #[test]
    fn rotation_visits_every_tag_and_keeps_the_index() {
        let start = RKey(0xffff_ffff);
        let mut key = start;
        let mut seen = [false; 256];
        for _ in 0..256 {
            assert_eq!(key.0 >> 8, 0x00ff_ffff);
            let tag = (key.0 & 0xff) as usize;
            assert!(!seen[tag]);
            seen[tag] = true;
            key = key.rotated();
        }
        assert_eq!(key, start);
    }
}
