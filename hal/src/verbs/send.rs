//! The send side of the contract: requests into the open chain, and the chain to the device.

use core::ptr::null_mut;

use o2poll_dataplane::nic::{Qp, RKey, Rejected, Remote, Rights, Sge, Status, WrId};
use rdma_core_sys::inline::ibv_post_send;
use rdma_core_sys::types::{ibv_qp, ibv_send_wr};

use super::chain::{Bind, Facts, Head, Trouble};
use super::nic::Verbs;
use super::slots::{Kind, Slot};
use super::windows::{Binding, Change};

/// What [`Nic::queue`](o2poll_dataplane::nic::Nic::queue) is given besides the request itself.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request {
    pub(super) qp: u32,
    pub(super) id: WrId,
    pub(super) signalled: bool,
}

/// A [`SendWr::Register`](o2poll_dataplane::nic::SendWr::Register) of one range.
#[derive(Clone, Copy, Debug)]
pub(super) struct Registration {
    /// Index of the window.
    pub(super) region: u32,
    pub(super) key: RKey,
    pub(super) rights: Rights,
    pub(super) base: u64,
    pub(super) length: u32,
    pub(super) piece: Sge,
}

/// [`Nic::queue`](o2poll_dataplane::nic::Nic::queue), once for each kind of request: where it is known which it is,
/// nothing has to be asked.
impl Verbs {
    pub(super) fn add_send(&mut self, request: Request, message: Sge, invalidate: Option<RKey>) {
        self.add(request, Kind::Plain, |verbs, head| {
            let facts = facts(&verbs.slots, head)?;
            let memories = &verbs.memories;
            verbs.chain.send(facts, head, memories, message, invalidate)
        });
    }

    pub(super) fn add_write(
        &mut self,
        request: Request,
        local: &[Sge],
        remote: Remote,
        imm: Option<u32>,
    ) {
        self.add(request, Kind::Plain, |verbs, head| {
            let facts = facts(&verbs.slots, head)?;
            let memories = &verbs.memories;
            verbs.chain.write(facts, head, memories, local, remote, imm)
        });
    }

    pub(super) fn add_read(&mut self, request: Request, local: &[Sge], remote: Remote) {
        self.add(request, Kind::Plain, |verbs, head| {
            let facts = facts(&verbs.slots, head)?;
            let memories = &verbs.memories;
            verbs.chain.read(facts, head, memories, local, remote)
        });
    }

    /// A REGISTER: a BIND_MW, if it is one that can only be right.
    pub(super) fn add_register(&mut self, request: Request, what: &Registration) {
        self.add(request, Kind::Changes, |verbs, head| {
            verbs.register(head, what)
        });
    }

    /// An INVALIDATE: a LOCAL_INV, if the key is live on this very queue pair.
    pub(super) fn add_invalidate(&mut self, request: Request, key: RKey) {
        self.add(request, Kind::Changes, |verbs, head| {
            verbs.invalidate(head, key)
        });
    }

    /// One that no device of this backend takes.
    #[cold]
    pub(super) fn add_refused(&mut self, request: Request) {
        self.add(request, Kind::Plain, |_, _| Err(Trouble::Refused));
    }

    #[expect(
        clippy::inline_always,
        reason = "what is the same for all kinds of requests, in each of them"
    )]
    #[inline(always)]
    fn add(
        &mut self,
        Request { qp, id, signalled }: Request,
        kind: Kind,
        build: impl FnOnce(&mut Self, Head) -> Result<(), Trouble>,
    ) {
        if (self.chain.qp != qp || self.chain.length >= self.chain.most) && !self.open(qp) {
            return;
        }
        let Some(slot) = self.slots.get_mut(qp as usize) else {
            return;
        };
        let position = slot.position_of(self.chain.length);
        let head = Head {
            qp,
            position,
            token: slot.send_token(position),
            signalled,
        };
        let hollow = self.chain.poisoned || slot.failed;
        let at = slot.send_index(position);
        if let Some(sent) = slot.sends.get_mut(at) {
            sent.id = id;
            sent.kind = if hollow { Kind::Plain } else { kind };
        }
        if hollow {
            self.chain.hollow(self.chain.length, head.token);
        } else if let Err(trouble) = build(self, head) {
            match trouble {
                Trouble::Fails(status) => self.spoil(head, status),
                Trouble::Refused => return self.chain.refuse(),
            }
        }
        self.chain.length = self.chain.length.wrapping_add(1);
    }

    #[inline]
    fn register(&mut self, head: Head, what: &Registration) -> Result<(), Trouble> {
        let &Registration {
            region,
            key,
            rights,
            base,
            length,
            piece,
        } = what;
        let fails = Trouble::Fails(Status::Bind);
        let facts = facts(&self.slots, head)?;
        let window = self.windows.get_mut(region).ok_or(fails)?;
        if window.queued {
            // The next chain can take it.
            return Err(Trouble::Refused);
        }
        let known = self.memories.find(piece, facts.pd).ok_or(fails)?;
        let before =
            unbound(&self.slots, window.binding, head.qp, facts.generation).ok_or(fails)?;
        // A window has no local key, hence no right of ours.
        let rights = rights.difference(Rights::LOCAL_WRITE);
        let right = length != 0
            && piece.length == length
            && base == piece.address
            && known.carries(rights)
            && key.0 >> 8 == window.key.0 >> 8
            && key != window.key
            && window.pd == facts.pd;
        if !right {
            return Err(fails);
        }
        let bind = Bind {
            region,
            window: window.raw,
            memory: known.raw,
            key,
            piece,
            rights,
        };
        self.chain.bind(head, &bind)?;
        let key_before = window.key;
        let live = Binding::Live {
            qp: head.qp,
            generation: facts.generation,
            memory: known.index,
        };
        let serial = window.change(key, live);
        window.queued = true;
        self.note(
            head,
            Change {
                region,
                register: true,
                serial,
                key_before,
                before,
            },
        );
        Ok(())
    }

    #[inline]
    fn invalidate(&mut self, head: Head, key: RKey) -> Result<(), Trouble> {
        let fails = Trouble::Fails(Status::LocalOperation);
        let own = (head.qp, facts(&self.slots, head)?.generation);
        let region = self.windows.find(key).ok_or(fails)?;
        let window = self.windows.get_mut(region).ok_or(fails)?;
        let Binding::Live {
            qp,
            generation,
            memory,
        } = window.binding
        else {
            return Err(fails);
        };
        if window.key != key || (qp, generation) != own {
            return Err(fails);
        }
        self.chain.invalidate(head, key)?;
        let dying = Binding::Dying {
            qp,
            generation,
            position: head.position,
            memory,
        };
        let serial = window.change(key, dying);
        self.note(
            head,
            Change {
                region,
                register: false,
                serial,
                key_before: key,
                before: Binding::Live {
                    qp,
                    generation,
                    memory,
                },
            },
        );
        Ok(())
    }

    /// Notes what a request changes.
    #[inline]
    fn note(&mut self, head: Head, change: Change) {
        if let Some(slot) = self.slots.get_mut(head.qp as usize)
            && let Some(note) = slot.notes.get_mut(slot.send_index(head.position))
        {
            note.change = change;
        }
    }

    /// One that fails for certain goes in place of one that would fail, and why is noted.
    #[cold]
    fn spoil(&mut self, head: Head, status: Status) {
        self.chain.spoil(head.token, self.trap.piece);
        self.chain.poisoned = true;
        self.counts.spoiled = self.counts.spoiled.wrapping_add(1);
        if let Some(slot) = self.slots.get_mut(head.qp as usize)
            && let Some(note) = slot.notes.get_mut(slot.send_index(head.position))
        {
            note.verdict = Some(status);
        }
        if let Some(slot) = self.slots.get_mut(head.qp as usize)
            && let Some(sent) = slot.sends.get_mut(slot.send_index(head.position))
        {
            sent.kind = Kind::Fails;
        }
    }

    /// Opens the chain for a queue pair, or finds it more room; whether there is any.
    #[inline(never)]
    fn open(&mut self, qp: u32) -> bool {
        let chain = &mut self.chain;
        let slot = self.slots.get_mut(qp as usize);
        if chain.qp != qp && chain.qp != u32::MAX {
            // In the chain of another: its own doorbell will tell.
            if let Some(slot) = slot {
                slot.stray = true;
            }
            return false;
        }
        chain.qp = qp;
        if chain.refused {
            return false;
        }
        // One that went astray was before this one.
        if let Some(slot) = slot
            && !slot.raw.is_null()
            && !slot.stray
        {
            chain.most = chain.wrs.len().min(slot.room() as usize);
        }
        if chain.length >= chain.most {
            chain.refuse();
            return false;
        }
        true
    }
}

/// The chain, to the device.
impl Verbs {
    /// [`Nic::doorbell`](o2poll_dataplane::nic::Nic::doorbell).
    #[inline]
    pub(super) fn ring(&mut self, qp: Qp) -> Result<(), Rejected> {
        let (count, refused) = (self.chain.length, self.chain.refused);
        let Some(slot) = self
            .slots
            .get(qp.0 as usize)
            .filter(|_| count > 0 && self.chain.qp == qp.0)
        else {
            return self.ring_for_nothing(qp);
        };
        let raw = slot.raw;
        if slot.failed {
            self.give_up(qp.0);
        }
        let taken = self.post(raw, count);
        for region in self.chain.registers(taken) {
            self.windows.accept(region);
        }
        if taken < count {
            self.withdraw(qp.0, taken);
            self.counts.cut = self.counts.cut.wrapping_add(1);
        }
        self.counts.work_requests = self.counts.work_requests.wrapping_add(taken as u64);
        let mut accepted = 0;
        if let Some(slot) = self.slots.get_mut(qp.0 as usize) {
            // One that fails for certain is in it, or one that cannot be: later ones are only flushed.
            slot.failed |= self.chain.poisoned && (taken == count || slot.has_verdict(taken));
            let tail = slot.position_of(taken);
            accepted = tail.wrapping_sub(slot.tail);
            slot.tail = tail;
        }
        self.chain.clear();
        if refused || taken < count {
            return Err(Rejected { accepted });
        }
        Ok(())
    }

    /// The doorbell of an empty chain, or of one that is another's.
    #[cold]
    fn ring_for_nothing(&mut self, qp: Qp) -> Result<(), Rejected> {
        let slot = self.slots.get_mut(qp.0 as usize);
        let stray = slot.is_some_and(|slot| core::mem::take(&mut slot.stray));
        let own = self.chain.qp == qp.0;
        let refused = own && self.chain.refused;
        if own {
            self.chain.clear();
        }
        if stray || refused {
            return Err(Rejected { accepted: 0 });
        }
        Ok(())
    }

    /// Hands `count` requests over: how many were taken.
    #[inline]
    fn post(&mut self, raw: *mut ibv_qp, count: usize) -> usize {
        let first = self.chain.wrs.as_mut_ptr();
        let Some(last) = self.chain.wrs.get_mut(count.wrapping_sub(1)) else {
            return 0;
        };
        let next = core::mem::replace(&mut last.next, null_mut());
        let mut bad: *mut ibv_send_wr = null_mut();
        // SAFETY: the queue pair is held by its slot; the requests are linked, end in null, and name memory and
        // windows that this value holds. The library reads them and returns.
        let failed = unsafe { ibv_post_send(raw, first, &mut bad) };
        if let Some(last) = self.chain.wrs.get_mut(count.wrapping_sub(1)) {
            last.next = next;
        }
        self.counts.doorbells = self.counts.doorbells.wrapping_add(1);
        if failed == 0 || bad.is_null() {
            // Without a request to blame all of them are in the queue, and only the kick failed (rxe).
            return count;
        }
        let offset = bad.addr().wrapping_sub(first.addr());
        let taken = offset / size_of::<ibv_send_wr>();
        // A pointer that is none of ours blames nobody: then it is safer to hold that none was taken.
        if taken < count { taken } else { 0 }
    }

    /// Those of the chain from `from` on never were.
    #[cold]
    pub(super) fn withdraw(&mut self, qp: u32, from: usize) {
        let Some(slot) = self.slots.get(qp as usize).filter(|_| self.chain.changes) else {
            return;
        };
        for n in (from..self.chain.length).rev() {
            if let Some((Kind::Changes, note)) = slot.queued(n) {
                self.windows.withdraw(&note.change);
            }
        }
    }

    /// The queue pair failed while the chain was open: all of it is only flushed.
    #[cold]
    fn give_up(&mut self, qp: u32) {
        self.withdraw(qp, 0);
        let Some(slot) = self.slots.get_mut(qp as usize) else {
            return;
        };
        for n in 0..self.chain.length {
            let position = slot.position_of(n);
            self.chain.hollow(n, slot.send_token(position));
            let at = slot.send_index(position);
            if let Some(sent) = slot.sends.get_mut(at) {
                sent.kind = Kind::Plain;
            }
        }
        self.chain.forget_changes();
    }
}

#[inline]
fn facts(slots: &[Slot], head: Head) -> Result<&Facts, Trouble> {
    let slot = slots.get(head.qp as usize).ok_or(Trouble::Refused)?;
    Ok(&slot.facts)
}

/// What a window is bound to before a REGISTER of this queue pair may bind it: nothing, or something that goes before.
/// `None`: something that may be live then.
#[inline]
fn unbound(slots: &[Slot], binding: Binding, qp: u32, generation: u16) -> Option<Binding> {
    match binding {
        Binding::Free => Some(Binding::Free),
        Binding::Live { .. } => None,
        // Its INVALIDATE is done, or goes before on the same queue.
        Binding::Dying {
            qp: of,
            generation: its,
            position,
            memory,
        } => {
            if slots
                .get(of as usize)
                .is_some_and(|slot| slot.is_done(its, position))
            {
                Some(Binding::Free)
            } else if (of, its) == (qp, generation) {
                Some(Binding::Dying {
                    qp: of,
                    generation: its,
                    position,
                    memory,
                })
            } else {
                None
            }
        }
    }
}
