//! What keeps rxe from carrying a BIND out twice ([`Quirks::BIND_IS_REPLAYED`](super::Quirks)).
//!
//! Where a packet was lost, rxe's requester begins again with the oldest request that is not acknowledged, and carries out
//! again what is behind it: also a BIND that is done, which fails the second time. So no BIND may be carried out while a request
//! before it is on its way. A LOCAL_INV waits on rxe until all before it have completed (Linux 6.0 and later). Each queue
//! pair has a window of its own over bytes that nobody uses, and its LOCAL_INV and BIND go before a BIND of ours that could
//! overtake something. They are in the chain that is posted and nowhere else: not signalled, in slots of the send queue that
//! nobody counts, and their completions, which only an error makes, are a stranger's.

use core::ptr::NonNull;
use std::io;

use o2poll_dataplane::nic::{RKey, Rights};
use rdma_core_sys::types::{
    IBV_WR_BIND_MW, IBV_WR_LOCAL_INV, ibv_mr, ibv_mw, ibv_mw_bind_info, ibv_send_wr,
};

use super::DeviceError;
use super::chain::{Array, Chain};
use super::nic::Counts;
use super::objects::{Domain, Memory, Window};
use super::queue_pair::QueuePair;
use super::send;
use super::slots::{NOBODY, Slot};

/// The window of a queue pair, and what it lies over.
#[derive(Debug)]
pub(super) struct Post {
    /// A device value has had it, and its key and what it is bound to are not known.
    used: bool,
    /// Freed before the queue pair that it may be bound to, and before its memory.
    window: Window,
    memory: Memory,
    /// Nobody touches them.
    _bytes: Option<Box<[u8; 64]>>,
}

/// What the driver knows of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fence {
    window: *mut ibv_mw,
    memory: *mut ibv_mr,
    address: u64,
    /// The key that the device will have when everything that was posted has run.
    key: RKey,
    /// It is bound then.
    bound: bool,
    /// Something that waits for the peer may be under way behind the last LOCAL_INV.
    wire: bool,
}

/// All of one core, and room for those of one chain.
pub(super) struct Fences {
    /// Of each queue pair.
    of: Box<[Option<Fence>]>,
    /// Two for each.
    wrs: Array<ibv_send_wr>,
    /// Copies that say which key the device has at that time; a provider looks at nothing else.
    windows: Array<ibv_mw>,
    /// Before which request of the chain each is.
    places: Vec<usize>,
}

impl Post {
    /// For a queue pair that was just made: a window that is bound to a queue pair must be younger than it.
    pub(super) fn new(domain: &Domain) -> Result<Self, DeviceError> {
        let mut bytes = Box::new([0; 64]);
        let base = NonNull::from(&mut *bytes).cast();
        // SAFETY: the bytes are freed after the registration, which is the field before them, and nobody touches them.
        let memory = unsafe { domain.register(base, 64, Rights::LOCAL_WRITE)? };
        Ok(Self {
            used: false,
            window: domain.window()?,
            memory,
            _bytes: Some(bytes),
        })
    }

    /// A window that is bound to nothing: what became of the one before is not known when its queue pair has failed.
    pub(super) fn renew(&mut self) -> io::Result<()> {
        if self.used {
            self.window = self.window.another()?;
            self.used = false;
        }
        Ok(())
    }

    #[cfg(test)]
    pub(super) const fn of(window: Window, memory: Memory) -> Self {
        Self {
            used: false,
            window,
            memory,
            _bytes: None,
        }
    }

    /// For the device value that uses it next.
    pub(super) fn fence(&mut self) -> Option<Fence> {
        (!core::mem::replace(&mut self.used, true)).then(|| Fence {
            window: self.window.raw(),
            memory: self.memory.raw.raw,
            address: self.memory.start,
            key: self.window.key(),
            bound: false,
            wire: true,
        })
    }
}

impl Fences {
    /// For so many queue pairs, and chains of so many requests.
    pub(super) fn new(pairs: usize, most: usize) -> Self {
        // One more for the first of a queue pair.
        let most = if most == 0 { 0 } else { most.saturating_add(1) };
        Self {
            of: vec![None; pairs].into_boxed_slice(),
            wrs: Array::new(most.saturating_mul(2)),
            windows: Array::new(most),
            places: Vec::with_capacity(most),
        }
    }

    /// Takes a queue pair in; whether its chains get fences.
    pub(super) fn adopt(&mut self, at: usize, pair: &mut QueuePair) -> bool {
        let fence = pair.post.as_mut().and_then(Post::fence);
        let Some(of) = self.of.get_mut(at) else {
            return false;
        };
        *of = fence;
        fence.is_some()
    }

    fn set(&mut self, at: usize, fence: Fence) {
        if let Some(of) = self.of.get_mut(at) {
            *of = Some(fence);
        }
    }

    /// Hands the chain over with its fences, and is [`send::post`] otherwise.
    #[cold]
    pub(super) fn post(
        &mut self,
        at: usize,
        chain: &mut Chain,
        counts: &mut Counts,
        slot: &Slot,
    ) -> usize {
        let drained = slot.tail == slot.freed;
        let Some(mut fence) = self.of.get(at).copied().flatten() else {
            return send::post(chain, counts, slot.raw);
        };
        if !chain.changes && (fence.bound || fence.wire && !drained) {
            fence.wire = true;
            self.set(at, fence);
            return send::post(chain, counts, slot.raw);
        }
        let before = fence;
        self.weave(chain, &mut fence, drained);
        let answer = send::hand_over(chain, counts, slot.raw);
        for at in &self.places {
            chain.unlead(*at);
        }
        let Err(bad) = answer else {
            self.set(at, fence);
            return chain.length;
        };
        // Only so many were taken, and half of the next one.
        let (taken, whole, half) = match self.find(bad) {
            Some((nth, half)) => (self.places.get(nth).map_or(0, |at| *at), nth, half),
            None => {
                let taken = chain.taken(bad);
                let whole = self.places.iter().filter(|at| **at <= taken).count();
                (taken, whole, false)
            }
        };
        let keys = core::iter::successors(Some(before.key), |key| Some(key.rotated()));
        let fence = Fence {
            key: keys
                .take(whole.wrapping_add(1))
                .last()
                .unwrap_or(before.key),
            bound: (before.bound || whole > 0) && !half,
            // Behind the LOCAL_INV of a fence there is nothing.
            wire: !half,
            ..before
        };
        self.set(at, fence);
        taken
    }

    /// Puts fences into a chain: before the first request, if the window is bound to nothing and can be bound there, and before
    /// each BIND that may overtake something.
    fn weave(&mut self, chain: &mut Chain, fence: &mut Fence, drained: bool) {
        self.places.clear();
        fence.wire &= !drained;
        if !fence.bound && !fence.wire {
            self.put(chain, 0, fence);
        }
        for at in 0..chain.length {
            match chain.opcode(at) {
                IBV_WR_LOCAL_INV => fence.wire = false,
                IBV_WR_BIND_MW if fence.wire && fence.bound => self.put(chain, at, fence),
                IBV_WR_BIND_MW => {}
                _ => fence.wire = true,
            }
        }
    }

    /// One before this request.
    fn put(&mut self, chain: &mut Chain, at: usize, fence: &mut Fence) {
        let nth = self.places.len();
        let (first, second) = (nth.wrapping_mul(2), nth.wrapping_mul(2).wrapping_add(1));
        let first_wr = self.wrs.first().wrapping_add(first);
        let second_wr = self.wrs.first().wrapping_add(second);
        let window = self.windows.first().wrapping_add(nth);
        let (Some(copy), true) = (
            self.windows.all().get_mut(nth),
            nth < self.places.capacity(),
        ) else {
            return;
        };
        // SAFETY: the window is held by the queue pair, which its slot holds, and nobody writes it.
        *copy = unsafe { *fence.window };
        copy.rkey = fence.key.0;
        let next = fence.key.rotated();
        if let Some(wr) = self.wrs.all().get_mut(first) {
            local(wr, IBV_WR_LOCAL_INV, fence.key.0);
            wr.next = second_wr;
        }
        if let Some(wr) = self.wrs.all().get_mut(second) {
            local(wr, IBV_WR_BIND_MW, 0);
            wr.next = chain.link(at);
            // SAFETY: nobody but the provider reads this part of the union, and only of a BIND_MW.
            let to = unsafe { &mut wr.__bindgen_anon_2.bind_mw };
            to.mw = window;
            to.rkey = next.0;
            to.bind_info = ibv_mw_bind_info {
                mr: fence.memory,
                addr: fence.address,
                length: 1,
                mw_access_flags: 0,
            };
        }
        // One that is bound to nothing is not invalidated: rxe's kernel does not survive it.
        chain.lead(at, if fence.bound { first_wr } else { second_wr });
        self.places.push(at);
        fence.key = next;
        (fence.bound, fence.wire) = (true, false);
    }

    /// The one of them that the provider has refused, and whether its LOCAL_INV was taken.
    fn find(&self, bad: *const ibv_send_wr) -> Option<(usize, bool)> {
        let offset = bad.addr().checked_sub(self.wrs.first().addr())?;
        let index = offset / size_of::<ibv_send_wr>();
        let nth = index / 2;
        (nth < self.places.len()).then_some((nth, index & 1 != 0))
    }
}

fn local(wr: &mut ibv_send_wr, opcode: u32, word: u32) {
    wr.wr_id = NOBODY;
    wr.opcode = opcode;
    wr.send_flags = 0;
    wr.num_sge = 0;
    wr.__bindgen_anon_1.invalidate_rkey = word;
}
