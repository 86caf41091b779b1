//! The send side of the contract: requests into the open chain, and the chain to the device.

use core::ptr::{null, null_mut};

use o2poll_dataplane::nic::{Qp, RKey, Rejected, Remote, Rights, Sge, Status, WrId};
use rdma_core_sys::inline::ibv_post_send;
use rdma_core_sys::types::{ibv_qp, ibv_send_wr};

use super::chain::{Bind, Chain, Facts, Head, Trouble};
use super::decode::Token;
use super::nic::{Counts, Verbs};
use super::slots::{Kind, Slot};
use super::windows::{Binding, Change};

/// What becomes of the next request.
enum Opened {
    /// It is looked at.
    Plain,
    /// It is only flushed.
    Hollow,
    /// It is not taken.
    Refused,
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
    pub(super) fn add_send(
        &mut self,
        qp: Qp,
        id: WrId,
        signalled: bool,
        message: Sge,
        invalidate: Option<RKey>,
    ) {
        self.add(qp, id, signalled, Kind::Plain, |verbs, head| {
            let facts = facts(&verbs.slots, qp)?;
            let memories = &verbs.memories;
            verbs.chain.send(facts, head, memories, message, invalidate)
        });
    }

    pub(super) fn add_write(
        &mut self,
        qp: Qp,
        id: WrId,
        signalled: bool,
        local: &[Sge],
        remote: Remote,
        imm: Option<u32>,
    ) {
        self.add(qp, id, signalled, Kind::Plain, |verbs, head| {
            let facts = facts(&verbs.slots, qp)?;
            let memories = &verbs.memories;
            verbs.chain.write(facts, head, memories, local, remote, imm)
        });
    }

    pub(super) fn add_read(
        &mut self,
        qp: Qp,
        id: WrId,
        signalled: bool,
        local: &[Sge],
        remote: Remote,
    ) {
        self.add(qp, id, signalled, Kind::Plain, |verbs, head| {
            let facts = facts(&verbs.slots, qp)?;
            let memories = &verbs.memories;
            verbs.chain.read(facts, head, memories, local, remote)
        });
    }

    /// A REGISTER: a BIND_MW, if it is one that can only be right.
    #[inline(never)]
    pub(super) fn add_register(&mut self, qp: Qp, id: WrId, signalled: bool, what: &Registration) {
        self.add(qp, id, signalled, Kind::Changes, |verbs, head| {
            verbs.register(qp, head, what)
        });
    }

    /// An INVALIDATE: a LOCAL_INV, if the key is live on this very queue pair.
    #[inline(never)]
    pub(super) fn add_invalidate(&mut self, qp: Qp, id: WrId, signalled: bool, key: RKey) {
        self.add(qp, id, signalled, Kind::Changes, |verbs, head| {
            verbs.invalidate(qp, head, key)
        });
    }

    /// One that no device of this backend takes.
    #[cold]
    pub(super) fn add_refused(&mut self, qp: Qp, id: WrId, signalled: bool) {
        let refused = |_: &mut Self, _| Err(Trouble::Refused);
        self.add(qp, id, signalled, Kind::Plain, refused);
    }

    #[expect(
        clippy::inline_always,
        reason = "what is the same for all kinds of requests, in each of them"
    )]
    #[inline(always)]
    fn add(
        &mut self,
        qp: Qp,
        id: WrId,
        signalled: bool,
        kind: Kind,
        build: impl FnOnce(&mut Self, Head) -> Result<(), Trouble>,
    ) {
        if self.chain.qp != qp.0 || self.chain.length >= self.chain.most {
            match self.open(qp) {
                Opened::Plain => {}
                Opened::Hollow => return self.hollow(qp, id),
                Opened::Refused => return,
            }
        }
        let Some(slot) = self.slots.get_mut(qp.0 as usize) else {
            return;
        };
        let position = slot.position_of(self.chain.length);
        let head = Head {
            token: slot.send_token(position),
            signalled,
        };
        if let Some(sent) = slot.sent_mut(position) {
            sent.id = id;
            sent.kind = kind;
        }
        if let Err(trouble) = build(self, head) {
            match trouble {
                Trouble::Fails(status) => self.spoil(qp, position, status),
                Trouble::Refused => return self.chain.refuse(),
            }
        }
        self.chain.length = self.chain.length.wrapping_add(1);
    }

    #[inline]
    fn register(&mut self, qp: Qp, head: Head, what: &Registration) -> Result<(), Trouble> {
        let fails = Trouble::Fails(Status::Bind);
        let slot = self.slots.get(qp.0 as usize).ok_or(Trouble::Refused)?;
        let (facts, owner) = (&slot.facts, slot.owner);
        let window = self.windows.get_mut(what.region).ok_or(fails)?;
        if window.chain == self.chain.number {
            // The provider reads the key before it from `ibv_mw` when the chain is posted: the next one can take it.
            return Err(Trouble::Refused);
        }
        let bound = window.binding;
        let clear = unbound(&self.slots, bound, owner).ok_or(fails)?;
        let known = self.memories.find(what.piece, facts.pd).ok_or(fails)?;
        // A window has no local key, hence no right of ours.
        let rights = what.rights.difference(Rights::LOCAL_WRITE);
        let right = what.length != 0
            && what.piece.length == what.length
            && what.base == what.piece.address
            && known.carries(rights)
            && what.key.0 >> 8 == window.key.0 >> 8
            && what.key != window.key
            && window.pd == facts.pd;
        if !right {
            return Err(fails);
        }
        let bind = Bind {
            window: window.raw,
            memory: known.raw,
            key: what.key,
            piece: what.piece,
            rights,
        };
        self.chain.bind(head, &bind)?;
        let key_before = window.key;
        let live = Binding::Live {
            owner,
            memory: known.index,
        };
        // SAFETY: it holds a window, or it would not have been found.
        unsafe { window.settle() };
        window.chain = self.chain.number;
        let serial = window.change(what.key, live);
        self.note(
            qp,
            head,
            Change {
                region: what.region,
                serial,
                key_before,
                before: if clear { Binding::Free } else { bound },
            },
        );
        Ok(())
    }

    #[inline]
    fn invalidate(&mut self, qp: Qp, head: Head, key: RKey) -> Result<(), Trouble> {
        let fails = Trouble::Fails(Status::LocalOperation);
        let slot = self.slots.get(qp.0 as usize).ok_or(Trouble::Refused)?;
        let region = self.windows.find(key).ok_or(fails)?;
        let window = self.windows.get_mut(region).ok_or(fails)?;
        let Binding::Live { owner, memory } = window.binding else {
            return Err(fails);
        };
        if window.key != key || owner != slot.owner {
            return Err(fails);
        }
        self.chain.invalidate(head, key)?;
        let dying = Binding::Dying {
            token: head.token,
            memory,
        };
        let serial = window.change(key, dying);
        self.note(
            qp,
            head,
            Change {
                region,
                serial,
                key_before: key,
                before: Binding::Live { owner, memory },
            },
        );
        Ok(())
    }

    /// Notes what a request changes.
    #[inline]
    fn note(&mut self, qp: Qp, head: Head, change: Change) {
        if let Some(slot) = self.slots.get_mut(qp.0 as usize)
            && let Some(sent) = slot.sent_mut(Token::position(head.token))
        {
            sent.change = change;
        }
    }

    /// One that is only flushed goes in place of any other.
    #[cold]
    fn hollow(&mut self, qp: Qp, id: WrId) {
        let at = self.chain.length;
        if let Some(slot) = self.slots.get_mut(qp.0 as usize) {
            let position = slot.position_of(at);
            self.chain.hollow(at, slot.send_token(position));
            if let Some(sent) = slot.sent_mut(position) {
                (sent.id, sent.kind) = (id, Kind::Plain);
            }
            self.chain.length = at.wrapping_add(1);
        }
    }

    /// One that fails for certain goes in place of one that would fail, and why is noted.
    #[cold]
    fn spoil(&mut self, qp: Qp, position: u32, status: Status) {
        self.chain.poisoned = true;
        self.chain.most = 0;
        self.counts.spoiled = self.counts.spoiled.wrapping_add(1);
        if let Some(slot) = self.slots.get_mut(qp.0 as usize) {
            let token = slot.send_token(position);
            self.chain.spoil(token, self.trap.piece);
            if let Some(sent) = slot.sent_mut(position) {
                sent.kind = Kind::Fails;
                sent.verdict = Some(status);
            }
        }
    }

    /// Opens the chain for a queue pair, or finds it more room.
    #[inline(never)]
    fn open(&mut self, qp: Qp) -> Opened {
        let chain = &mut self.chain;
        let slot = self.slots.get_mut(qp.0 as usize);
        if chain.qp != qp.0 && chain.is_open() {
            // In the chain of another: its own doorbell will tell.
            if let Some(slot) = slot {
                slot.stray = true;
            }
            return Opened::Refused;
        }
        chain.qp = qp.0;
        let Some(slot) = slot.filter(|slot| !slot.raw.is_null()) else {
            chain.refuse();
            return Opened::Refused;
        };
        let most = chain.room().min(slot.room() as usize);
        // No chain is longer than its room: this comes at least that often.
        if slot.is_to_be_swept() {
            self.windows.sweep(slot);
        }
        // One that went astray was before this one.
        if chain.refused || slot.stray || chain.length >= most {
            chain.refuse();
            return Opened::Refused;
        }
        if chain.poisoned || slot.failed {
            // Each comes here.
            chain.most = 0;
            return Opened::Hollow;
        }
        chain.most = most;
        Opened::Plain
    }
}

/// The chain, to the device.
impl Verbs {
    /// [`Nic::doorbell`](o2poll_dataplane::nic::Nic::doorbell).
    #[inline]
    pub(super) fn ring(&mut self, qp: Qp) -> Result<(), Rejected> {
        let Self {
            slots,
            chain,
            fences,
            counts,
            ..
        } = self;
        let count = chain.length;
        if count == 0 || chain.qp != qp.0 {
            return self.ring_for_nothing(qp);
        }
        let Some(slot) = slots.get_mut(qp.0 as usize) else {
            return Ok(());
        };
        if slot.failed {
            return self.ring_in_vain(qp);
        }
        let taken = if slot.fenced {
            fences.post(qp.0 as usize, chain, counts, slot)
        } else {
            post(chain, counts, slot.raw)
        };
        if taken < count || chain.poisoned || chain.refused {
            return self.taken_in_part(qp, taken);
        }
        slot.tail = slot.position_of(count);
        counts.work_requests = counts.work_requests.wrapping_add(count as u64);
        chain.begin_again();
        Ok(())
    }

    /// The queue pair failed while the chain was open, or before.
    #[cold]
    fn ring_in_vain(&mut self, qp: Qp) -> Result<(), Rejected> {
        self.give_up(qp);
        let raw = self.slots.get(qp.0 as usize).map(|slot| slot.raw);
        let taken = raw.map_or(0, |raw| post(&mut self.chain, &mut self.counts, raw));
        self.taken_in_part(qp, taken)
    }

    /// The device took the first `taken` of the chain: not all that came, or not as they came.
    #[cold]
    fn taken_in_part(&mut self, qp: Qp, taken: usize) -> Result<(), Rejected> {
        let (count, refused) = (self.chain.length, self.chain.refused);
        if taken < count {
            self.withdraw(qp, taken);
            self.counts.cut = self.counts.cut.wrapping_add(1);
        }
        if let Some(slot) = self.slots.get_mut(qp.0 as usize) {
            // One that fails for certain is in it, or one that cannot be: later ones are only flushed.
            slot.failed |= self.chain.poisoned && (taken == count || slot.has_verdict(taken));
            slot.tail = slot.position_of(taken);
        }
        self.counts.work_requests = self.counts.work_requests.wrapping_add(taken as u64);
        self.chain.clear();
        if refused || taken < count {
            let accepted = u32::try_from(taken).unwrap_or(u32::MAX);
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

    /// Those of the chain from `from` on never were.
    #[cold]
    pub(super) fn withdraw(&mut self, qp: Qp, from: usize) {
        let Some(slot) = self.slots.get(qp.0 as usize).filter(|_| self.chain.changes) else {
            return;
        };
        for n in (from..self.chain.length).rev() {
            if let Some(sent) = slot.queued(n).filter(|sent| sent.kind == Kind::Changes) {
                self.windows.withdraw(&sent.change);
            }
        }
    }

    /// The queue pair failed while the chain was open: all of it is only flushed.
    #[cold]
    fn give_up(&mut self, qp: Qp) {
        self.withdraw(qp, 0);
        let Some(slot) = self.slots.get_mut(qp.0 as usize) else {
            return;
        };
        for n in 0..self.chain.length {
            let position = slot.position_of(n);
            self.chain.hollow(n, slot.send_token(position));
            if let Some(sent) = slot.sent_mut(position) {
                sent.kind = Kind::Plain;
            }
        }
        self.chain.forget_changes();
    }
}

/// Hands the chain over: how many of its requests were taken. The queue pair is alive.
#[inline]
pub(super) fn post(chain: &mut Chain, counts: &mut Counts, raw: *mut ibv_qp) -> usize {
    match hand_over(chain, counts, raw) {
        Ok(()) => chain.length,
        Err(bad) => chain.taken(bad),
    }
}

/// Hands the chain over, or says which request was the first that was not taken. The queue pair is alive.
#[inline]
pub(super) fn hand_over(
    chain: &mut Chain,
    counts: &mut Counts,
    raw: *mut ibv_qp,
) -> Result<(), *const ibv_send_wr> {
    counts.doorbells = counts.doorbells.wrapping_add(1);
    let Some((first, last)) = chain.ends(chain.length) else {
        return Err(null());
    };
    let mut bad: *mut ibv_send_wr = null_mut();
    // The chain is borrowed mutably, so that no reference to one of its requests or to a piece is alive. `first`, `next` and
    // `sg_list` are copies of the pointers that the chain writes through itself (`Array`), so that no write since has made them
    // void. Each `next` is the request behind it, or a fence that leads to it, of an array of the same kind that is borrowed as
    // well; hence the first leads to the last, and with the link after that one taken out they end in null; `num_sge` is at most
    // the pieces that were written at `sg_list`. The library reads them, writes none, and keeps no pointer when it returns
    // (`ibv_post_send(3)`).
    // SAFETY: `first` and `last` are requests of the chain or fences before them, `first` leads to `last` and no further, and
    // nothing else refers to them. The queue pair is held by its slot, and the requests name memory and windows that the device
    // value or the queue pair holds.
    let failed = unsafe {
        let next = core::mem::replace(&mut (*last).next, null_mut());
        let failed = ibv_post_send(raw, first, &mut bad);
        (*last).next = next;
        failed
    };
    // Without a request to blame all of them are in the queue, and only the kick failed (rxe).
    if failed == 0 || bad.is_null() {
        Ok(())
    } else {
        Err(bad)
    }
}

#[inline]
fn facts(slots: &[Slot], qp: Qp) -> Result<&Facts, Trouble> {
    let slot = slots.get(qp.0 as usize).ok_or(Trouble::Refused)?;
    Ok(&slot.facts)
}

/// Whether a window is bound to nothing when a REGISTER of this queue pair comes, or (`false`) to something that goes before
/// it; `None` for something that may be live then.
#[inline]
fn unbound(slots: &[Slot], binding: Binding, owner: u64) -> Option<bool> {
    match binding {
        Binding::Free => Some(true),
        Binding::Live { .. } => None,
        Binding::Dying { token, .. } => {
            let slot = slots.get(Token::slot(token));
            if slot.is_some_and(|slot| slot.is_done(token)) {
                Some(true)
            } else {
                // Its INVALIDATE goes before on the same queue.
                (Token::owner(token) == owner).then_some(false)
            }
        }
    }
}
