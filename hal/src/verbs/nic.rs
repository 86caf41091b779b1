//! A device as one polling core sees it.

use core::mem::MaybeUninit;
use core::ptr::null_mut;
use core::sync::atomic::Ordering;
use std::sync::Arc;

use o2poll_dataplane::nic::{
    Burst, Capabilities, Completion, Fault, LKey, Layout, Nic, Qp, RKey, ReceiveQueue, Region,
    Rejected, SendWr, Sge, Status, WrId,
};
use rdma_core_sys::inline::{ibv_poll_cq, ibv_post_recv, ibv_req_notify_cq};
use rdma_core_sys::types::{ibv_recv_wr, ibv_sge, ibv_wc};

use super::DeviceError;
use super::chain::{Chain, Memories};
use super::decode::{Outcome, Token, decode};
use super::device::Device;
use super::fence::Fences;
use super::objects::{CompletionQueue, Domain, Memory, Window};
use super::probe::Findings;
use super::queue_pair::QueuePair;
use super::quirks::Quirks;
use super::raw::Cq;
use super::send::Registration;
use super::slots::{Kind, Sent, Slot};
use super::trap::Trap;
use super::windows::{Binding, Windows};

/// How much one core holds at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Queue pairs, up to 65536.
    pub queue_pairs: u32,
    /// Send work requests of one queue pair.
    pub send_wr: u32,
    /// Receives of one queue pair.
    pub recv_wr: u32,
    /// Pieces of one work request.
    pub max_sge: u32,
    /// Windows.
    pub windows: u32,
    /// Registered memories.
    pub memories: u32,
}

/// What has happened so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Calls of `ibv_post_send`.
    pub doorbells: u64,
    /// Send work requests that the device took.
    pub work_requests: u64,
    /// Requests that failed here, and went to the device as ones that fail.
    pub spoiled: u64,
    /// Chains that the device took in part.
    pub cut: u64,
    /// Completions of queue pairs that are gone, and of fences that were flushed.
    pub strangers: u64,
    /// Completions of requests that were not outstanding: a `wr_id` twice, or one that was never posted. Each puts its
    /// queue pair in error.
    pub breaches: u64,
}

/// A device of libibverbs, as one polling core sees it.
pub struct Verbs {
    // In the order of their destruction.
    pub(super) windows: Windows,
    pub(super) slots: Box<[Slot]>,
    pub(super) chain: Chain,
    pub(super) memories: Memories,
    pub(super) trap: Trap,
    cq: CompletionQueue,
    capabilities: Capabilities,
    /// [`Quirks::invalidated_flag`].
    invalidated: u32,
    limits: Limits,
    pub(super) counts: Counts,
    pub(super) fences: Fences,
}

impl Verbs {
    /// The device value of one core, which polls this completion queue.
    ///
    /// # Errors
    /// As the library says: it registers a few bytes in a protection domain of its own.
    pub fn new(
        device: &Device,
        cq: CompletionQueue,
        findings: &Findings,
        limits: Limits,
    ) -> Result<Self, DeviceError> {
        let trap = Trap::new(&Domain::of_memory(device)?)?;
        let message = device.port(1).map_or(1 << 31, |port| port.max_message);
        let capabilities = capabilities(device, findings, &limits);
        Ok(Self::of(
            cq,
            trap,
            capabilities,
            device.quirks(),
            limits,
            message,
        ))
    }

    pub(super) fn of(
        cq: CompletionQueue,
        trap: Trap,
        capabilities: Capabilities,
        quirks: Quirks,
        mut limits: Limits,
        max_message: u32,
    ) -> Self {
        limits.max_sge = limits.max_sge.max(1);
        let pairs = limits.queue_pairs.min(1 << 16) as usize;
        Self {
            windows: Windows::new(limits.windows as usize),
            slots: core::iter::repeat_with(|| Slot::empty(&limits))
                .take(pairs)
                .collect(),
            chain: Chain::new(limits.send_wr as usize, limits.max_sge as usize),
            memories: Memories::new(limits.memories as usize, max_message),
            trap,
            cq,
            capabilities,
            invalidated: quirks.invalidated_flag(),
            limits,
            counts: Counts::default(),
            fences: if quirks.contains(Quirks::BIND_IS_REPLAYED) {
                Fences::new(pairs, limits.send_wr as usize)
            } else {
                Fences::new(0, 0)
            },
        }
    }

    /// Lets work requests name this memory, under the key that comes back.
    ///
    /// # Errors
    /// The memory itself, when the device value holds as many as it can.
    pub fn add_memory(&mut self, memory: Memory) -> Result<LKey, Memory> {
        self.memories.add(memory)
    }

    /// Its completion queue: what to sleep on.
    #[must_use]
    pub const fn completion_queue(&self) -> &CompletionQueue {
        &self.cq
    }

    /// What has happened so far.
    #[must_use]
    pub const fn counts(&self) -> Counts {
        self.counts
    }

    /// Adds what a completion means. There is room: as many were asked for.
    #[inline]
    fn take(&mut self, wc: &ibv_wc, out: &mut Burst) {
        let token = Token::unpack(wc.wr_id);
        let Some(slot) = self
            .slots
            .get_mut(usize::from(token.slot))
            .filter(|slot| slot.owner == Token::owner(wc.wr_id))
        else {
            self.counts.strangers = self.counts.strangers.wrapping_add(1);
            return;
        };
        let next = token.position.wrapping_add(1);
        if !slot.is_outstanding(token) {
            self.breach(token);
            return;
        }
        if token.receive {
            let Some(&id) = slot.receives.get(slot.receive_index(token.position)) else {
                return;
            };
            slot.recv_freed = next;
            match decode(wc, true, self.invalidated) {
                Outcome::Arrived(arrival) => {
                    if let Some(key) = arrival.invalidated {
                        self.windows.killed(key);
                    }
                    let _ = out.push(Completion::Received {
                        id,
                        length: arrival.length,
                        imm: arrival.imm,
                        invalidated: arrival.invalidated,
                    });
                }
                Outcome::Failed(status) => {
                    slot.failed = true;
                    self.chain.most = 0;
                    let _ = out.push(Completion::Failed { id, status });
                }
                // A receive is never one.
                Outcome::Sent => {}
            }
            return;
        }
        let Some(&Sent { id, kind, .. }) = slot.sent(token.position) else {
            return;
        };
        slot.freed = next;
        if let Outcome::Failed(status) = decode(wc, false, self.invalidated) {
            slot.failed = true;
            self.chain.most = 0;
            let status = self.explain(token, kind, status);
            let _ = out.push(Completion::Failed { id, status });
        } else if kind == Kind::Fails {
            self.surprised(token, id, out);
        } else {
            let _ = out.push(Completion::Done { id });
        }
    }

    /// The provider completes what is not outstanding. Nobody's request ends by it, and its account of this queue pair is
    /// worth nothing from here on.
    #[cold]
    fn breach(&mut self, token: Token) {
        self.counts.breaches = self.counts.breaches.wrapping_add(1);
        self.cq.raw.context.breached();
        let slot = self.slots.get(usize::from(token.slot));
        if slot.is_some_and(|slot| !slot.failed) {
            self.fail(Qp(token.slot.into()));
        }
    }

    /// A request failed: its change is undone, and if it stood for one that had to fail, why.
    #[cold]
    fn explain(&mut self, token: Token, kind: Kind, status: Status) -> Status {
        let slot = self.slots.get(usize::from(token.slot));
        let sent = slot.and_then(|slot| slot.sent(token.position));
        match (kind, sent) {
            (Kind::Changes, Some(sent)) => {
                self.windows.undo(&sent.change);
                status
            }
            // Flushed: it never had its turn.
            (Kind::Fails, Some(sent)) if status != Status::Flushed => {
                sent.verdict.unwrap_or(status)
            }
            _ => status,
        }
    }

    /// A request is done although it had to fail.
    #[cold]
    fn surprised(&mut self, token: Token, id: WrId, out: &mut Burst) {
        let Some(slot) = self.slots.get_mut(usize::from(token.slot)) else {
            return;
        };
        slot.failed = true;
        self.chain.most = 0;
        if let Some(pair) = &slot.pair {
            pair.raw.fail();
        }
        let sent = slot.sent(token.position);
        let verdict = sent.and_then(|sent| sent.verdict);
        let status = verdict.unwrap_or(Status::LocalOperation);
        let _ = out.push(Completion::Failed { id, status });
    }
}

impl core::fmt::Debug for Verbs {
    fn fmt(&self, out: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        out.debug_struct("Verbs")
            .field("limits", &self.limits)
            .field("counts", &self.counts)
            .finish_non_exhaustive()
    }
}

impl Nic for Verbs {
    type QueuePair = QueuePair;
    type Window = Window;

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    /// It must report to this core's completion queue.
    fn adopt(&mut self, mut qp: QueuePair) -> Result<Qp, QueuePair> {
        let fits = qp.send_depth <= self.limits.send_wr
            && qp.recv_depth <= self.limits.recv_wr
            && qp.max_sge <= self.limits.max_sge
            && Arc::ptr_eq(&qp.raw.cq, &self.cq.raw);
        let free = self.slots.iter().position(|slot| slot.pair.is_none());
        let (true, Some(at)) = (fits, free) else {
            return Err(qp);
        };
        let (Some(slot), Ok(place)) = (self.slots.get_mut(at), u16::try_from(at)) else {
            return Err(qp);
        };
        slot.fenced = self.fences.adopt(at, &mut qp);
        slot.adopt(place, qp);
        Ok(Qp(place.into()))
    }

    fn fail(&mut self, qp: Qp) {
        if let Some(slot) = self.slots.get_mut(qp.0 as usize)
            && let Some(pair) = &slot.pair
        {
            pair.raw.fail();
            slot.failed = true;
            self.chain.most = 0;
        }
    }

    /// Work requests that are outstanding never complete: drain it first. Windows that may still be bound to
    /// it hold it, so that it is destroyed after them.
    fn retire(&mut self, qp: Qp) -> Option<QueuePair> {
        if self.chain.qp == qp.0 {
            self.withdraw(qp, 0);
            self.chain.clear();
        }
        let slot = self.slots.get_mut(qp.0 as usize)?;
        for (known, window) in self.windows.iter_mut() {
            let memory = match known.binding {
                Binding::Live { owner, memory } if owner == slot.owner => memory,
                Binding::Dying { token, .. } if slot.is_done(token) => {
                    known.binding = Binding::Free;
                    continue;
                }
                Binding::Dying { token, memory } if Token::owner(token) == slot.owner => memory,
                _ => continue,
            };
            if let (Some(pair), Some(memory)) = (&slot.pair, self.memories.get(memory)) {
                window.hold(Arc::clone(&pair.raw), Arc::clone(&memory.raw));
            }
        }
        slot.retire()
    }

    fn adopt_window(&mut self, window: Window) -> Result<(Region, RKey), Window> {
        self.windows.adopt(window)
    }

    /// One that may be bound holds its queue pair and memory, which are then destroyed after it.
    fn retire_window(&mut self, region: Region) -> Option<Window> {
        if self.windows.get_mut(region.0)?.chain == self.chain.number {
            // In the open chain: it cannot go before the chain does.
            return None;
        }
        let (mut window, binding) = self.windows.retire(region)?;
        let (of, memory) = match binding {
            Binding::Free => {
                window.release();
                return Some(window);
            }
            Binding::Live { owner, memory } => (owner, memory),
            Binding::Dying { token, memory } => (token, memory),
        };
        let dying = matches!(binding, Binding::Dying { .. });
        if let Some(slot) = self.slots.get(Token::slot(of))
            && slot.owner == Token::owner(of)
            && let Some(pair) = &slot.pair
        {
            if dying && slot.is_done(of) {
                window.release();
            } else if let Some(memory) = self.memories.get(memory) {
                window.hold(Arc::clone(&pair.raw), Arc::clone(&memory.raw));
            }
        }
        Some(window)
    }

    #[expect(
        clippy::inline_always,
        reason = "callers know which kind of request it is"
    )]
    #[inline(always)]
    fn queue(&mut self, qp: Qp, id: WrId, signalled: bool, wr: SendWr<'_>) {
        match wr {
            SendWr::Send {
                message,
                invalidate,
            } => self.add_send(qp, id, signalled, message, invalidate),
            SendWr::Write { local, remote, imm } => {
                self.add_write(qp, id, signalled, local, remote, imm);
            }
            SendWr::Read { local, remote } => self.add_read(qp, id, signalled, local, remote),
            SendWr::Register {
                region,
                key,
                rights,
                base,
                length,
                layout: Layout::Window(piece),
            } => {
                let what = Registration {
                    region: region.0,
                    key,
                    rights,
                    base,
                    length,
                    piece,
                };
                self.add_register(qp, id, signalled, &what);
            }
            SendWr::Register { .. } => self.add_refused(qp, id, signalled),
            SendWr::Invalidate { key } => self.add_invalidate(qp, id, signalled, key),
        }
    }

    #[inline]
    fn doorbell(&mut self, qp: Qp) -> Result<(), Rejected> {
        self.ring(qp)
    }

    #[inline]
    fn receive(&mut self, into: ReceiveQueue, id: WrId, buffer: Sge) -> Result<(), Rejected> {
        let none = Rejected { accepted: 0 };
        let ReceiveQueue::Of(qp) = into else {
            return Err(none);
        };
        let slot = self.slots.get_mut(qp.0 as usize).ok_or(none)?;
        let used = slot.recv_tail.wrapping_sub(slot.recv_freed);
        // One that is posted in the error state may never come back (rxe).
        if slot.failed || slot.raw.is_null() || used >= slot.recv_depth {
            return Err(none);
        }
        if !self.memories.takes(buffer, slot.facts.pd) {
            return Err(none);
        }
        let mut piece = ibv_sge {
            addr: buffer.address,
            length: buffer.length,
            lkey: buffer.lkey.0,
        };
        let mut wr = ibv_recv_wr {
            wr_id: slot.receive_token(slot.recv_tail),
            next: null_mut(),
            sg_list: &mut piece,
            num_sge: i32::from(buffer.length != 0),
        };
        let mut bad: *mut ibv_recv_wr = null_mut();
        // SAFETY: the queue pair is held by its slot, the request names memory that this value holds, and the
        // library copies it before it returns.
        if unsafe { ibv_post_recv(slot.raw, &mut wr, &mut bad) } != 0 {
            return Err(none);
        }
        let at = slot.receive_index(slot.recv_tail);
        if let Some(room) = slot.receives.get_mut(at) {
            *room = id;
        }
        slot.recv_tail = slot.recv_tail.wrapping_add(1);
        Ok(())
    }

    #[inline]
    fn poll(&mut self, out: &mut Burst) -> Result<(), Fault> {
        // Relaxed: a flag that is looked at again and again.
        match self.cq.raw.fault.load(Ordering::Relaxed) {
            0 => {}
            Cq::OVERRUN => return Err(Fault::Overrun),
            _ => return Err(Fault::DeviceGone),
        }
        let mut entries = [const { MaybeUninit::<ibv_wc>::uninit() }; 32];
        let room = out.capacity().wrapping_sub(out.len()).min(entries.len());
        let most = i32::try_from(room).unwrap_or(0);
        // SAFETY: the completion queue is held by this value, and there is room for `most`.
        let count = unsafe { ibv_poll_cq(self.cq.raw.raw, most, entries.as_mut_ptr().cast()) };
        let Ok(count) = usize::try_from(count) else {
            return Err(Fault::DeviceGone);
        };
        for entry in entries.iter().take(count) {
            // SAFETY: the library says that it has filled this one. What is not defined of a failed one is not
            // looked at, and an `ibv_wc` is numbers all through.
            let wc = unsafe { entry.assume_init_ref() };
            self.take(wc, out);
        }
        Ok(())
    }

    fn arm(&mut self) -> Result<(), Fault> {
        // SAFETY: the completion queue is held by this value.
        if unsafe { ibv_req_notify_cq(self.cq.raw.raw, 0) } != 0 {
            return Err(Fault::DeviceGone);
        }
        Ok(())
    }
}

// SAFETY: the raw pointers are to objects that this value holds and alone uses; the library may be called from
// any thread.
unsafe impl Send for Verbs {}

/// What the data plane may count on.
pub(super) fn capabilities(device: &Device, findings: &Findings, limits: &Limits) -> Capabilities {
    let all = device.capabilities(findings);
    Capabilities {
        max_sge: limits.max_sge.min(all.max_sge),
        max_send_wr: limits.send_wr.min(all.max_send_wr),
        max_recv_wr: limits.recv_wr.min(all.max_recv_wr),
        max_windows: limits.windows.min(all.max_windows),
        ..all
    }
}
