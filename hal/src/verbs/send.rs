//! The send side of the contract: requests into the open chain, and the chain to the device.

use core::ptr::null_mut;

use o2poll_dataplane::nic::{Layout, Qp, RKey, Rejected, Rights, SendWr, Status, WrId};
use rdma_core_sys::inline::ibv_post_send;
use rdma_core_sys::types::{ibv_qp, ibv_send_wr};

use super::chain::{Bind, Built, Head};
use super::nic::Verbs;
use super::slots::{Kind, Slot};
use super::windows::{Binding, Change};

/// Place of a request in a send queue.
#[derive(Clone, Copy, Debug)]
struct Place {
    /// Slot of the queue pair.
    qp: u32,
    position: u32,
}

impl Verbs {
    /// [`Nic::queue`](o2poll_dataplane::nic::Nic::queue).
    #[inline]
    pub(super) fn add(&mut self, qp: Qp, id: WrId, signalled: bool, wr: &SendWr<'_>) {
        let chain = &self.chain;
        if (chain.qp != qp.0 || chain.length >= chain.most) && !self.open(qp) {
            return;
        }
        let (chain, memories) = (&mut self.chain, &self.memories);
        let Some(slot) = self.slots.get(qp.0 as usize) else {
            return;
        };
        let facts = &slot.facts;
        let position = slot.position_of(chain.length);
        let place = Place { qp: qp.0, position };
        let head = Head {
            token: slot.send_token(position),
            signalled,
        };
        let built = if chain.poisoned || slot.failed {
            chain.hollow(chain.length, head.token);
            Built::Ready
        } else {
            match *wr {
                SendWr::Send {
                    message,
                    invalidate,
                } => chain.send(facts, head, memories, message, invalidate),
                SendWr::Write { local, remote, imm } => {
                    chain.write(facts, head, memories, local, remote, imm)
                }
                SendWr::Read { local, remote } => chain.read(facts, head, memories, local, remote),
                SendWr::Register { .. } => self.register(place, head, wr),
                SendWr::Invalidate { key } => self.invalidate(place, head, key),
            }
        };
        let kind = match built {
            Built::Ready => Kind::Plain,
            Built::Changes => {
                self.chain.changes = true;
                Kind::Changes
            }
            Built::Fails(status) => {
                self.spoil(place, head, status);
                Kind::Fails
            }
            Built::Refused => return self.chain.refuse(),
        };
        if let Some(slot) = self.slots.get_mut(qp.0 as usize)
            && let Some(sent) = slot.sends.get_mut(slot.send_index(position))
        {
            sent.id = id;
            sent.kind = kind;
            self.chain.length = self.chain.length.wrapping_add(1);
        }
    }

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

    /// Opens the chain for a queue pair, or finds it more room; whether there is any.
    #[inline(never)]
    fn open(&mut self, qp: Qp) -> bool {
        let chain = &mut self.chain;
        let slot = self.slots.get_mut(qp.0 as usize);
        if chain.qp != qp.0 && chain.qp != u32::MAX {
            // In the chain of another: its own doorbell will tell.
            if let Some(slot) = slot {
                slot.stray = true;
            }
            return false;
        }
        chain.qp = qp.0;
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

    /// A REGISTER: a BIND_MW, if it is one that can only be right.
    #[inline]
    fn register(&mut self, place: Place, head: Head, wr: &SendWr<'_>) -> Built {
        let &SendWr::Register {
            region,
            key,
            rights,
            base,
            length,
            layout: Layout::Window(piece),
        } = wr
        else {
            return Built::Refused;
        };
        let Some(slot) = self.slots.get(place.qp as usize) else {
            return Built::Refused;
        };
        let (generation, pd) = (slot.facts.generation, slot.facts.pd);
        let Some(window) = self.windows.get_mut(region.0) else {
            return Built::Fails(Status::Bind);
        };
        if window.queued {
            // The next chain can take it.
            return Built::Refused;
        }
        let Some((memory, known)) = self.memories.find(piece, pd) else {
            return Built::Fails(Status::Bind);
        };
        let Some(before) = unbound(&self.slots, window.binding, place.qp, generation) else {
            return Built::Fails(Status::Bind);
        };
        // A window has no local key, hence no right of ours.
        let rights = rights.difference(Rights::LOCAL_WRITE);
        let right = length != 0
            && piece.length == length
            && base == piece.address
            && known.carries(rights)
            && key.0 >> 8 == window.key.0 >> 8
            && key != window.key
            && window.pd == pd;
        if !right {
            return Built::Fails(Status::Bind);
        }
        let bind = Bind {
            region: region.0,
            window: window.raw,
            memory: known.raw,
            key,
            piece,
            rights,
        };
        let built = self.chain.bind(head, &bind);
        if let Built::Changes = built {
            let key_before = window.key;
            let live = Binding::Live {
                qp: place.qp,
                generation,
                memory,
            };
            let serial = window.change(key, live);
            window.queued = true;
            self.note(
                place,
                Change {
                    region: region.0,
                    register: true,
                    serial,
                    key_before,
                    before,
                },
            );
        }
        built
    }

    /// An INVALIDATE: a LOCAL_INV, if the key is live on this very queue pair.
    #[inline]
    fn invalidate(&mut self, place: Place, head: Head, key: RKey) -> Built {
        let fails = Built::Fails(Status::LocalOperation);
        let Some(slot) = self.slots.get(place.qp as usize) else {
            return Built::Refused;
        };
        let own = (place.qp, slot.facts.generation);
        let Some(region) = self.windows.find(key) else {
            return fails;
        };
        let Some(window) = self.windows.get_mut(region) else {
            return fails;
        };
        let Binding::Live {
            qp,
            generation,
            memory,
        } = window.binding
        else {
            return fails;
        };
        if window.key != key || (qp, generation) != own {
            return fails;
        }
        let built = self.chain.invalidate(head, key);
        if let Built::Changes = built {
            let dying = Binding::Dying {
                qp,
                generation,
                position: place.position,
                memory,
            };
            let serial = window.change(key, dying);
            self.note(
                place,
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
        }
        built
    }

    /// Notes what a request changes.
    #[inline]
    fn note(&mut self, place: Place, change: Change) {
        if let Some(slot) = self.slots.get_mut(place.qp as usize)
            && let Some(note) = slot.notes.get_mut(slot.send_index(place.position))
        {
            note.change = change;
        }
    }

    /// One that fails for certain goes in place of one that would fail, and why is noted.
    #[cold]
    fn spoil(&mut self, place: Place, head: Head, status: Status) {
        self.chain.spoil(head.token, self.trap.piece);
        self.chain.poisoned = true;
        self.counts.spoiled = self.counts.spoiled.wrapping_add(1);
        if let Some(slot) = self.slots.get_mut(place.qp as usize)
            && let Some(note) = slot.notes.get_mut(slot.send_index(place.position))
        {
            note.verdict = Some(status);
        }
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
