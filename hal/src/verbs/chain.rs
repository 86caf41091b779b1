//! The open chain: work requests as the library wants them, checked before it sees them.

use core::ptr::NonNull;

use o2poll_dataplane::nic::{LKey, RKey, Remote, Rights, Sge, Status};
use rdma_core_sys::types::{
    IBV_SEND_INLINE, IBV_SEND_SIGNALED, IBV_WR_BIND_MW, IBV_WR_LOCAL_INV, IBV_WR_RDMA_READ,
    IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_SEND, IBV_WR_SEND_WITH_INV, ibv_mr,
    ibv_mw, ibv_mw_bind_info, ibv_send_wr, ibv_sge, ibv_wr_opcode,
};

use super::objects::{Memory, access};

/// Requests of one queue pair that are queued and not yet rung for.
pub(super) struct Chain {
    /// Linked, each with its own pieces, for the life of this.
    wrs: Array<ibv_send_wr>,
    /// What is handed over first in place of the first request.
    head: Option<NonNull<ibv_send_wr>>,
    /// Pointed into by `wrs`.
    pieces: Array<ibv_sge>,
    stride: usize,
    pub(super) length: usize,
    /// How long it may become at least; what is not known is 0.
    pub(super) most: usize,
    /// Slot of the queue pair that it is of, or was of last.
    pub(super) qp: u32,
    /// One was refused: none behind it is taken.
    pub(super) refused: bool,
    /// One that fails for certain is in it: those behind it are only flushed.
    pub(super) poisoned: bool,
    /// One changes a window.
    pub(super) changes: bool,
    /// Of all chains there were, by which a window knows that it is in this one.
    pub(super) number: u64,
}

/// An array whose elements are pointed at for its whole life. A box would claim to be the only way to them each time that it is
/// moved or written through, and pointers from before would be void: here all ways begin at the one pointer.
pub(super) struct Array<T>(NonNull<[T]>);

/// What the checks need to know of a queue pair.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Facts {
    pub(super) pd: usize,
    /// At most the `stride` of the chain.
    pub(super) max_sge: usize,
    pub(super) inline: u32,
    /// It may READ.
    pub(super) reads: bool,
}

/// The id that the device is given, which says where the request is ([`Token`](super::decode::Token)), and whether it
/// tells when the request is done.
#[derive(Clone, Copy, Debug)]
pub(super) struct Head {
    pub(super) token: u64,
    pub(super) signalled: bool,
}

/// Why a request does not go to the device.
#[derive(Clone, Copy, Debug)]
pub(super) enum Trouble {
    /// It would fail, with this status.
    Fails(Status),
    /// No device would take it.
    Refused,
}

/// A type-2 window over memory, as its BIND_MW says it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bind {
    /// What the library knows the window by.
    pub(super) window: *mut ibv_mw,
    pub(super) memory: *mut ibv_mr,
    pub(super) key: RKey,
    pub(super) piece: Sge,
    pub(super) rights: Rights,
}

/// Registered memory as the checks want it.
#[derive(Debug)]
pub(super) struct Known {
    lkey: LKey,
    pub(super) index: u32,
    rights: Rights,
    windows: bool,
    pd: usize,
    start: u64,
    length: u64,
    pub(super) raw: *mut ibv_mr,
    memory: Memory,
}

/// All memory that requests of one core may name.
#[derive(Debug)]
pub(super) struct Memories {
    list: Vec<Known>,
    most: usize,
    max_message: u64,
}

impl Chain {
    pub(super) fn new(most: usize, stride: usize) -> Self {
        let pieces = Array::<ibv_sge>::new(most.saturating_mul(stride));
        let mut wrs = Array::<ibv_send_wr>::new(most);
        let (first, room) = (wrs.first(), pieces.first());
        for (n, wr) in wrs.all().iter_mut().enumerate() {
            // The last `next` points behind the array, and nobody follows it: a chain that ends there ends in null.
            wr.sg_list = room.wrapping_add(n.wrapping_mul(stride));
            wr.next = first.wrapping_add(n).wrapping_add(1);
        }
        Self {
            wrs,
            head: None,
            pieces,
            stride,
            length: 0,
            most: 0,
            qp: u32::MAX,
            refused: false,
            poisoned: false,
            changes: false,
            number: 1,
        }
    }

    pub(super) const fn clear(&mut self) {
        (self.length, self.most) = (0, 0);
        self.number = self.number.wrapping_add(1);
        self.qp = u32::MAX;
        self.refused = false;
        self.poisoned = false;
        self.changes = false;
    }

    /// Its first request and its last one, if it has `count` of them.
    #[inline]
    pub(super) fn ends(&mut self, count: usize) -> Option<(*mut ibv_send_wr, *mut ibv_send_wr)> {
        let last = count.checked_sub(1).filter(|last| *last < self.wrs.len())?;
        let first = self.wrs.first();
        let head = self.head.map_or(first, NonNull::as_ptr);
        Some((head, first.wrapping_add(last)))
    }

    /// What its request `at` does.
    pub(super) fn opcode(&mut self, at: usize) -> ibv_wr_opcode {
        self.wrs.all().get(at).map_or(0, |wr| wr.opcode)
    }

    /// Its request `at`, for one that leads to it.
    pub(super) const fn link(&self, at: usize) -> *mut ibv_send_wr {
        self.wrs.first().wrapping_add(at)
    }

    /// The request before `at` leads to this one, which is alive as long as that is so; none before the first, and this one is
    /// handed over first.
    pub(super) fn lead(&mut self, at: usize, to: *mut ibv_send_wr) {
        match at.checked_sub(1) {
            None => self.head = NonNull::new(to),
            Some(before) => {
                if let Some(wr) = self.wrs.all().get_mut(before) {
                    wr.next = to;
                }
            }
        }
    }

    /// The request before `at` leads to it again.
    pub(super) fn unlead(&mut self, at: usize) {
        if at == 0 {
            self.head = None;
        } else {
            self.lead(at, self.link(at));
        }
    }

    /// How many were taken, if this one was the first that was not.
    pub(super) fn taken(&self, bad: *const ibv_send_wr) -> usize {
        let offset = bad.addr().wrapping_sub(self.wrs.first().addr());
        let taken = offset / size_of::<ibv_send_wr>();
        // A pointer that is none of ours blames nobody: then it is safer to hold that none was taken.
        if taken < self.length { taken } else { 0 }
    }

    /// Requests that it has room for.
    #[inline]
    pub(super) const fn room(&self) -> usize {
        self.wrs.len()
    }

    /// All of it was taken. The next one is likely to be of the same queue pair.
    #[inline]
    pub(super) const fn begin_again(&mut self) {
        let (qp, left) = (self.qp, self.most.saturating_sub(self.length));
        self.clear();
        (self.qp, self.most) = (qp, left);
    }

    /// One has been queued or refused, and not been rung for.
    pub(super) const fn is_open(&self) -> bool {
        self.length > 0 || self.refused
    }

    /// From now on none is taken.
    pub(super) const fn refuse(&mut self) {
        self.refused = true;
        self.most = 0;
    }

    // These write the next request, which is not part of the chain before `length` says so.

    /// SEND, or SEND_WITH_INV.
    #[inline]
    pub(super) fn send(
        &mut self,
        facts: &Facts,
        head: Head,
        memories: &Memories,
        message: Sge,
        invalidate: Option<RKey>,
    ) -> Result<(), Trouble> {
        let out = next(self.wrs.all(), self.length)?;
        match invalidate {
            Some(key) => begin(out, head, IBV_WR_SEND_WITH_INV, key.0),
            None => begin(out, head, IBV_WR_SEND, 0),
        }
        let at = self.length.wrapping_mul(self.stride);
        let total = memories.gather(
            out,
            self.pieces.all(),
            at,
            facts,
            &[message],
            Rights::empty(),
        )?;
        ride_inside(out, total, facts);
        Ok(())
    }

    /// RDMA WRITE. Immediate data is big-endian for the library (`ibv_post_send(3)`).
    #[inline]
    pub(super) fn write(
        &mut self,
        facts: &Facts,
        head: Head,
        memories: &Memories,
        local: &[Sge],
        remote: Remote,
        imm: Option<u32>,
    ) -> Result<(), Trouble> {
        let out = next(self.wrs.all(), self.length)?;
        match imm {
            Some(imm) => begin(out, head, IBV_WR_RDMA_WRITE_WITH_IMM, imm.to_be()),
            None => begin(out, head, IBV_WR_RDMA_WRITE, 0),
        }
        aim(out, remote);
        let at = self.length.wrapping_mul(self.stride);
        let total = memories.gather(out, self.pieces.all(), at, facts, local, Rights::empty())?;
        ride_inside(out, total, facts);
        Ok(())
    }

    /// RDMA READ. It brings bytes, so that none ride inside.
    #[inline]
    pub(super) fn read(
        &mut self,
        facts: &Facts,
        head: Head,
        memories: &Memories,
        local: &[Sge],
        remote: Remote,
    ) -> Result<(), Trouble> {
        if !facts.reads {
            // Nothing was negotiated for it, and it would never complete.
            return Err(Trouble::Refused);
        }
        let out = next(self.wrs.all(), self.length)?;
        begin(out, head, IBV_WR_RDMA_READ, 0);
        aim(out, remote);
        let at = self.length.wrapping_mul(self.stride);
        memories.gather(
            out,
            self.pieces.all(),
            at,
            facts,
            local,
            Rights::LOCAL_WRITE,
        )?;
        Ok(())
    }

    /// BIND_MW.
    #[inline]
    pub(super) fn bind(&mut self, head: Head, bind: &Bind) -> Result<(), Trouble> {
        let out = next(self.wrs.all(), self.length)?;
        // Immediate data that is not zero is EINVAL (rxe).
        begin(out, head, IBV_WR_BIND_MW, 0);
        // SAFETY: nobody but the provider reads this part of the union, and only of a BIND_MW.
        let to = unsafe { &mut out.__bindgen_anon_2.bind_mw };
        to.mw = bind.window;
        to.rkey = bind.key.0;
        to.bind_info = ibv_mw_bind_info {
            mr: bind.memory,
            addr: bind.piece.address,
            length: u64::from(bind.piece.length),
            mw_access_flags: access(bind.rights),
        };
        self.changes = true;
        Ok(())
    }

    /// LOCAL_INV.
    #[inline]
    pub(super) fn invalidate(&mut self, head: Head, key: RKey) -> Result<(), Trouble> {
        let out = next(self.wrs.all(), self.length)?;
        begin(out, head, IBV_WR_LOCAL_INV, key.0);
        self.changes = true;
        Ok(())
    }

    /// All of it is flushed: nothing of it changes a window, or fails of itself.
    pub(super) const fn forget_changes(&mut self) {
        self.changes = false;
        self.poisoned = false;
    }

    /// In place of one that would fail: it does so on any device, and nothing leaves.
    pub(super) fn spoil(&mut self, token: u64, trap: Sge) {
        if let Some(out) = self.wrs.all().get_mut(self.length)
            && let Some(piece) = self
                .pieces
                .all()
                .get_mut(self.length.wrapping_mul(self.stride))
        {
            *piece = raw_piece(trap);
            out.wr_id = token;
            out.opcode = IBV_WR_SEND;
            out.send_flags = IBV_SEND_SIGNALED;
            out.num_sge = 1;
            out.__bindgen_anon_1.imm_data = 0;
        }
    }

    /// In place of one that is only flushed. Empty, so that nothing happens even if it were not.
    pub(super) fn hollow(&mut self, at: usize, token: u64) {
        if let Some(out) = self.wrs.all().get_mut(at) {
            out.wr_id = token;
            out.opcode = IBV_WR_SEND;
            out.send_flags = IBV_SEND_SIGNALED;
            out.num_sge = 0;
            out.__bindgen_anon_1.imm_data = 0;
        }
    }
}

impl<T: Clone + Default> Array<T> {
    pub(super) fn new(length: usize) -> Self {
        let all = vec![T::default(); length].into_boxed_slice();
        Self(NonNull::from(Box::leak(all)))
    }
}

impl<T> Array<T> {
    /// To its first element, and good for all of them until it is dropped.
    #[inline]
    pub(super) const fn first(&self) -> *mut T {
        self.0.as_ptr().cast()
    }

    #[inline]
    const fn len(&self) -> usize {
        self.0.len()
    }

    #[inline]
    pub(super) const fn all(&mut self) -> &mut [T] {
        // SAFETY: from a box, and dropped with this alone. Pointers of `first` are read and written through in `hand_over` only,
        // while it borrows the chain mutably, and the library keeps none of them: not while this reference lives. It is made
        // of the pointer that they are copies of, so that it takes nothing from them.
        unsafe { self.0.as_mut() }
    }
}

impl<T> Drop for Array<T> {
    fn drop(&mut self) {
        // SAFETY: from a box, and nobody has it any longer.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

impl Known {
    /// A window with these rights of a peer may lie over it: one that it may write through over memory that we may
    /// write (`ibv_bind_mw(3)`).
    pub(super) const fn carries(&self, rights: Rights) -> bool {
        self.windows
            && (!rights.contains(Rights::REMOTE_WRITE) || self.rights.contains(Rights::LOCAL_WRITE))
    }
}

impl Memories {
    pub(super) fn new(most: usize, max_message: u32) -> Self {
        Self {
            list: Vec::with_capacity(most),
            most,
            max_message: u64::from(max_message),
        }
    }

    pub(super) fn add(&mut self, memory: Memory) -> Result<LKey, Memory> {
        let lkey = memory.lkey();
        let Ok(index) = u32::try_from(self.list.len()) else {
            return Err(memory);
        };
        if self.list.len() >= self.most || self.list.iter().any(|known| known.lkey == lkey) {
            return Err(memory);
        }
        self.list.push(Known {
            lkey,
            index,
            rights: memory.rights,
            windows: memory.windows,
            pd: memory.domain(),
            start: memory.start,
            length: memory.end.saturating_sub(memory.start),
            raw: memory.raw.raw,
            memory,
        });
        Ok(lkey)
    }

    pub(super) fn get(&self, index: u32) -> Option<&Memory> {
        self.list.get(index as usize).map(|known| &known.memory)
    }

    /// Whether a receive may go there.
    #[inline]
    pub(super) fn takes(&self, piece: Sge, pd: usize) -> bool {
        piece.length == 0
            || u64::from(piece.length) <= self.max_message
                && self
                    .find(piece, pd)
                    .is_some_and(|known| known.rights.contains(Rights::LOCAL_WRITE))
    }

    /// The memory that a piece lies in, whole, in this protection domain. There are few.
    #[inline]
    pub(super) fn find(&self, piece: Sge, pd: usize) -> Option<&Known> {
        let known = self.list.iter().find(|known| known.lkey == piece.lkey)?;
        // Wraps, and is more than any length, if it begins before.
        let offset = piece.address.wrapping_sub(known.start);
        let left = known.length.checked_sub(offset)?;
        (known.pd == pd && u64::from(piece.length) <= left).then_some(known)
    }

    /// Gives a request its pieces, whose room begins at `at`: their length in all.
    #[inline]
    fn gather(
        &self,
        out: &mut ibv_send_wr,
        room: &mut [ibv_sge],
        at: usize,
        facts: &Facts,
        list: &[Sge],
        needs: Rights,
    ) -> Result<u64, Trouble> {
        let &[piece] = list else {
            return self.gather_list(out, room, at, facts, list, needs);
        };
        if piece.length == 0 {
            return Ok(0);
        }
        self.check(piece, facts, needs)?;
        *room.get_mut(at).ok_or(Trouble::Refused)? = raw_piece(piece);
        out.num_sge = 1;
        let total = u64::from(piece.length);
        if total > self.max_message {
            return Err(Trouble::Fails(Status::LocalLength));
        }
        Ok(total)
    }

    /// Those that are empty are left out (mlx5 takes 0 for 2 GiB).
    #[inline(never)]
    fn gather_list(
        &self,
        out: &mut ibv_send_wr,
        room: &mut [ibv_sge],
        at: usize,
        facts: &Facts,
        list: &[Sge],
        needs: Rights,
    ) -> Result<u64, Trouble> {
        if list.len() > facts.max_sge {
            return Err(Trouble::Refused);
        }
        let mut room = room.get_mut(at..).unwrap_or_default().iter_mut();
        let (mut count, mut total) = (0, 0_u64);
        for &piece in list.iter().filter(|piece| piece.length != 0) {
            self.check(piece, facts, needs)?;
            *room.next().ok_or(Trouble::Refused)? = raw_piece(piece);
            count += 1;
            total = total.wrapping_add(u64::from(piece.length));
        }
        if total > self.max_message {
            return Err(Trouble::Fails(Status::LocalLength));
        }
        out.num_sge = count;
        Ok(total)
    }

    #[inline]
    fn check(&self, piece: Sge, facts: &Facts, needs: Rights) -> Result<(), Trouble> {
        match self.find(piece, facts.pd) {
            Some(known) if known.rights.contains(needs) => Ok(()),
            _ => Err(Trouble::Fails(Status::LocalProtection)),
        }
    }
}

#[inline]
fn next(wrs: &mut [ibv_send_wr], at: usize) -> Result<&mut ibv_send_wr, Trouble> {
    wrs.get_mut(at).ok_or(Trouble::Refused)
}

/// `word` is `imm_data` or `invalidate_rkey`.
#[inline]
const fn begin(out: &mut ibv_send_wr, head: Head, opcode: ibv_wr_opcode, word: u32) {
    out.wr_id = head.token;
    out.opcode = opcode;
    out.num_sge = 0;
    out.send_flags = if head.signalled { IBV_SEND_SIGNALED } else { 0 };
    out.__bindgen_anon_1.imm_data = word;
}

/// Short ones do.
#[inline]
const fn ride_inside(out: &mut ibv_send_wr, total: u64, facts: &Facts) {
    if total <= facts.inline as u64 && total != 0 {
        out.send_flags |= IBV_SEND_INLINE;
    }
}

#[inline]
fn aim(out: &mut ibv_send_wr, remote: Remote) {
    // SAFETY: nobody but the provider reads this part of the union, and only of an RDMA request.
    let rdma = unsafe { &mut out.wr.rdma };
    rdma.remote_addr = remote.address;
    rdma.rkey = remote.rkey.0;
}

#[inline]
const fn raw_piece(piece: Sge) -> ibv_sge {
    ibv_sge {
        addr: piece.address,
        length: piece.length,
        lkey: piece.lkey.0,
    }
}

#[cfg(test)]
mod tests {
    use super::{Chain, Head};
    use o2poll_dataplane::nic::{LKey, RKey, Sge};
    use rdma_core_sys::types::{IBV_WR_LOCAL_INV, IBV_WR_SEND};
    use std::vec::Vec;

    /// What a provider does. With a checker of Rust's rules of aliasing (Miri) it fails if a write voids the pointers.
    #[test]
    fn a_provider_may_follow_the_pointers_of_a_chain_that_was_written_again_and_moved() {
        let mut chain = Chain::new(4, 2);
        for round in 0..3 {
            let trap = Sge {
                address: 0x1000 + round,
                length: 1,
                lkey: LKey(7),
            };
            for n in 0..3 {
                chain.hollow(n, 0);
            }
            for token in [round, round + 10] {
                chain.spoil(token, trap);
                chain.length += 1;
            }
            let head = Head {
                token: round + 20,
                signalled: true,
            };
            assert!(chain.invalidate(head, RKey(9)).is_ok());
            chain.length += 1;
            chain = *core::hint::black_box(std::boxed::Box::new(chain));
            let (first, last) = chain.ends(3).unwrap();
            let mut seen = Vec::new();
            // SAFETY: three requests, of which two have a piece; nothing refers to them.
            unsafe {
                (*last).wr_id += 100;
                let mut at = first;
                loop {
                    let wr = &*at;
                    let pieces = (0..wr.num_sge).map(|n| (*wr.sg_list.offset(n as isize)).addr);
                    seen.push((wr.wr_id, wr.opcode, pieces.collect::<Vec<_>>()));
                    if at == last {
                        break;
                    }
                    at = wr.next;
                }
            }
            let wanted = [
                (round, IBV_WR_SEND, std::vec![trap.address]),
                (round + 10, IBV_WR_SEND, std::vec![trap.address]),
                (round + 120, IBV_WR_LOCAL_INV, Vec::new()),
            ];
            assert_eq!(seen, wanted);
            chain.clear();
        }
    }
}
