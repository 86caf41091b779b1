//! What kind of card the device plays, and how much of everything it holds.

use o2poll_dataplane::nic::{Capabilities, Mechanisms};

/// A kind of card. Every field may be changed before the device is made.
#[derive(Clone, Copy, Debug)]
pub struct Profile {
    /// What it can do, as [`Nic::capabilities`](o2poll_dataplane::nic::Nic::capabilities) says.
    pub capabilities: Capabilities,
    /// Most payload bytes that one poll moves while packets wait on several ports. The key is checked again after each
    /// slice.
    pub slice: u32,
    /// While no other port has a packet, a slice of a long one may be so many times as long: where a copy begins anew,
    /// the memory's pipeline has run empty.
    pub alone: u32,
    /// Most packets that one poll takes in.
    pub packets: u32,
    /// Polls without progress after which packets are sent again (`timeout` of a real queue pair).
    pub ack_timeout: u32,
    /// Polls that a sender waits when the receiver is not ready (`min_rnr_timer`).
    pub rnr_timer: u32,
    /// Most queue pairs of one device value.
    pub max_qp: u32,
    /// Most send work requests that a queue pair really gets. Cards promise more in `max_qp_wr` and then refuse the
    /// queue pair (LU-10213).
    pub granted_send_wr: u32,
    /// Any queue pair of the device may kill a key, whatever it is bound to and in whichever protection domain
    /// (`rxe_invalidate_mw` looks at neither).
    pub foreign_invalidate: bool,
    /// A SEND_WITH_INV whose key could not be killed fails at the receiver alone: it was acknowledged before anybody
    /// looked (rxe).
    pub silent_invalidate: bool,
}

impl Profile {
    /// A modern card as a kernel consumer sees it: `IB_WR_REG_MR` over page lists and, with
    /// `IB_MR_TYPE_SG_GAPS`, over fragment lists, up to the 257 of one o2iblnd transfer.
    #[must_use]
    pub const fn frwr() -> Self {
        Self {
            capabilities: Capabilities {
                mechanisms: Mechanisms::FRAGMENTS.union(Mechanisms::PAGES),
                max_fragments: 257,
                max_pages: 257,
                page_shift: 12,
                zero_based: false,
                checks_reuse: true,
                region_lkey: true,
                remote_invalidate: true,
                max_sge: 30,
                max_send_wr: 16384,
                max_recv_wr: 16384,
                max_cqe: 1 << 20,
                max_windows: 1 << 20,
            },
            slice: 64 << 10,
            alone: 4,
            packets: 64,
            // With all retries 2 s of bare spinning, some 10 s of a busy poller: on rings nothing is lost, so
            // this only notices a core that has stopped for good, and must not take a descheduled one for it.
            ack_timeout: 1 << 24,
            rnr_timer: 64,
            max_qp: 1 << 18,
            granted_send_wr: u32::MAX,
            foreign_invalidate: false,
            silent_invalidate: false,
        }
    }

    /// A ConnectX as user space sees it (mlx5dv UMR mkeys): zero-based keys over at most 56 inline entries,
    /// and no check whether the key is in use.
    #[must_use]
    pub const fn mlx5() -> Self {
        let mut profile = Self::frwr();
        profile.capabilities.mechanisms = Mechanisms::FRAGMENTS;
        profile.capabilities.max_fragments = 56;
        profile.capabilities.max_pages = 0;
        profile.capabilities.zero_based = true;
        profile.capabilities.checks_reuse = false;
        profile
    }

    /// A ConnectX-3 as a kernel consumer sees it: page lists, of which only the first may begin and only the last
    /// may end within a page. No `IB_DEVICE_SG_GAPS_REG`.
    #[must_use]
    pub const fn mlx4() -> Self {
        let mut profile = Self::frwr();
        profile.capabilities.mechanisms = Mechanisms::PAGES;
        profile.capabilities.max_fragments = 0;
        profile
    }

    /// A device with type-2B memory windows and nothing else, by the book: one contiguous range, for one queue
    /// pair, no local key.
    #[must_use]
    pub const fn windows() -> Self {
        let mut profile = Self::frwr();
        profile.capabilities.mechanisms = Mechanisms::WINDOW;
        profile.capabilities.max_fragments = 0;
        profile.capabilities.max_pages = 0;
        profile.capabilities.region_lkey = false;
        profile
    }

    /// Soft-RoCE as user space sees it: [`windows`](Self::windows) with the limits of `rxe_param.h`, and two of
    /// its ways: whoever is on the device may kill a window, and the sender of a SEND_WITH_INV that could not be
    /// obeyed is not told. That the kernel's looks at the bounds of the memory instead of the window's is not
    /// played, nor that it crashes on a second invalidate: here both are refused.
    #[must_use]
    pub const fn rxe() -> Self {
        let mut profile = Self::windows();
        profile.capabilities.max_sge = 32;
        profile.capabilities.max_send_wr = 1 << 20;
        profile.capabilities.max_recv_wr = 1 << 20;
        profile.capabilities.max_cqe = 32_767;
        profile.capabilities.max_windows = 1 << 19;
        profile.foreign_invalidate = true;
        profile.silent_invalidate = true;
        profile
    }

    /// A card without fast registration, as the InfiniHosts of `ib_mthca`: a key lies over a list of pages only
    /// where the control side has put it there before ([`Window::over`](crate::Window::over)). No key is killed
    /// from a queue, and none by a peer.
    #[must_use]
    pub const fn mthca() -> Self {
        let mut profile = Self::frwr();
        profile.capabilities.mechanisms = Mechanisms::MAPPINGS;
        profile.capabilities.max_fragments = 0;
        profile.capabilities.remote_invalidate = false;
        profile
    }

    /// Nothing but the key of base memory: what a card without windows and without mappings leaves.
    #[must_use]
    pub const fn bare() -> Self {
        let mut profile = Self::frwr();
        profile.capabilities.mechanisms = Mechanisms::empty();
        profile.capabilities.max_fragments = 0;
        profile.capabilities.max_pages = 0;
        profile.capabilities.max_windows = 0;
        profile.capabilities.region_lkey = false;
        profile.capabilities.remote_invalidate = false;
        profile
    }

    /// Longest list of one registration.
    const fn list(&self) -> usize {
        let (fragments, pages) = (self.capabilities.max_fragments, self.capabilities.max_pages);
        let most = if fragments > pages { fragments } else { pages };
        if most == 0 { 1 } else { most as usize }
    }
}

/// How much one device value holds.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Queue pairs.
    pub queue_pairs: u32,
    /// Deepest send queue of one queue pair.
    pub send_wr: u32,
    /// Deepest receive queue of one queue pair.
    pub recv_wr: u32,
    /// Windows, mappings among them.
    pub windows: u32,
    /// Base memory regions.
    pub memories: u32,
    /// Entries of the completion queue.
    pub cqe: u32,
}

/// How long the slices of a [`Storage`](crate::Storage) must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "fields as in `Storage`")]
pub struct Sizes {
    pub queue_pairs: usize,
    pub numbers: usize,
    pub sends: usize,
    pub pieces: usize,
    pub receives: usize,
    pub regions: usize,
    pub fragments: usize,
    pub memories: usize,
    pub completions: usize,
}

impl Limits {
    /// Lengths for a device of this profile; `None` when they overflow or exceed what the profile allows.
    #[must_use]
    pub fn sizes(&self, profile: &Profile) -> Option<Sizes> {
        let capabilities = &profile.capabilities;
        if self.send_wr > capabilities.max_send_wr
            || self.recv_wr > capabilities.max_recv_wr
            || self.cqe > capabilities.max_cqe
            || self.windows > capabilities.max_windows
            || self.queue_pairs > profile.max_qp
            || self.windows > MOST
            || self.memories > MOST
            || self.queue_pairs > MOST
        {
            return None;
        }
        let queue_pairs = self.queue_pairs as usize;
        let sends = queue_pairs.checked_mul(self.send_stride()?)?;
        Some(Sizes {
            queue_pairs,
            numbers: queue_pairs.checked_mul(2)?.checked_next_power_of_two()?,
            sends,
            pieces: sends.checked_mul(profile.piece_stride())?,
            receives: queue_pairs.checked_mul(self.receive_stride()?)?,
            regions: self.windows as usize,
            fragments: (self.windows as usize)
                .checked_mul(2)?
                .checked_mul(profile.list())?,
            memories: self.memories as usize,
            completions: self.cqe as usize,
        })
    }

    /// Slots of a send queue: a power of two, so that positions may run freely.
    pub(crate) fn send_stride(&self) -> Option<usize> {
        (self.send_wr as usize).checked_next_power_of_two()
    }

    pub(crate) fn receive_stride(&self) -> Option<usize> {
        (self.recv_wr as usize).checked_next_power_of_two()
    }
}

impl Profile {
    /// Scatter/gather elements of a work request beyond the first, which stands in the entry itself.
    pub(crate) const fn piece_stride(&self) -> usize {
        (self.capabilities.max_sge as usize).saturating_sub(1)
    }

    pub(crate) const fn fragment_stride(&self) -> usize {
        self.list()
    }
}

/// A key's index has 24 bits, and two kinds of keys share them.
const MOST: u32 = 1 << 22;
