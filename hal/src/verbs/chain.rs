//! The open chain: work requests as the library wants them, checked before it sees them.

use o2poll_dataplane::nic::{LKey, Layout, Remote, Rights, SendWr, Sge, Status};
use rdma_core_sys::types::{
    IBV_SEND_INLINE, IBV_SEND_SIGNALED, IBV_WR_BIND_MW, IBV_WR_LOCAL_INV, IBV_WR_RDMA_READ,
    IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_SEND, IBV_WR_SEND_WITH_INV,
    ibv_mw_bind_info, ibv_send_wr, ibv_sge, ibv_wr_opcode,
};

use super::objects::{Memory, access};
use super::windows::{Binding, Change, Windows};

/// Requests of one queue pair that are queued and not yet rung for.
pub(super) struct Chain {
    /// Linked, each with its own pieces, for the life of this.
    pub(super) wrs: Box<[ibv_send_wr]>,
    /// Pointed into by `wrs`.
    pieces: Box<[ibv_sge]>,
    stride: usize,
    pub(super) length: usize,
    /// Slot of the queue pair that it is of.
    pub(super) qp: u32,
    /// One was refused: none behind it is taken.
    pub(super) refused: bool,
    /// One that fails for certain is in it: those behind it are only flushed.
    pub(super) poisoned: bool,
    /// How many change a window.
    pub(super) changes: usize,
    /// A queue pair that queued into the chain of another.
    pub(super) stray: Option<u32>,
}

/// What the checks need to know of a queue pair.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Facts {
    pub(super) pd: usize,
    pub(super) max_sge: usize,
    pub(super) inline: u32,
    pub(super) generation: u16,
    /// It may READ.
    pub(super) reads: bool,
}

/// A request's place.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asker<'q> {
    pub(super) facts: &'q Facts,
    /// The id that the device is given.
    pub(super) token: u64,
    pub(super) qp: u32,
    pub(super) position: u32,
    pub(super) signalled: bool,
}

/// What became of a request.
#[derive(Clone, Copy, Debug)]
pub(super) enum Built {
    /// It can be handed over.
    Ready(Option<Change>),
    /// It would fail, with this status.
    Fails(Status),
    /// No device would take it.
    Refused,
}

/// Registered memory as the checks want it.
#[derive(Debug)]
struct Known {
    lkey: LKey,
    pd: usize,
    start: u64,
    end: u64,
    rights: Rights,
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
        let mut pieces = vec![ibv_sge::default(); most.saturating_mul(stride)].into_boxed_slice();
        let mut wrs = vec![ibv_send_wr::default(); most].into_boxed_slice();
        for (wr, pieces) in wrs.iter_mut().zip(pieces.chunks_mut(stride.max(1))) {
            wr.sg_list = pieces.as_mut_ptr();
        }
        let first = wrs.as_mut_ptr();
        for n in 0..most {
            // SAFETY: `n` is in the array, and the one after the last may be pointed to.
            unsafe { (*first.add(n)).next = first.add(n + 1) };
        }
        Self {
            wrs,
            pieces,
            stride,
            length: 0,
            qp: u32::MAX,
            refused: false,
            poisoned: false,
            changes: 0,
            stray: None,
        }
    }

    pub(super) const fn clear(&mut self) {
        self.length = 0;
        self.qp = u32::MAX;
        self.refused = false;
        self.poisoned = false;
        self.changes = 0;
    }

    /// Writes the next request; it is not part of the chain before `length` says so.
    #[inline]
    pub(super) fn build(
        &mut self,
        wr: &SendWr<'_>,
        asker: &Asker<'_>,
        memories: &Memories,
        windows: &mut Windows,
        free: impl Fn(Binding) -> bool,
    ) -> Built {
        let start = self.length.wrapping_mul(self.stride);
        let end = start.wrapping_add(self.stride);
        let (Some(out), Some(pieces)) = (
            self.wrs.get_mut(self.length),
            self.pieces.get_mut(start..end),
        ) else {
            return Built::Refused;
        };
        out.wr_id = asker.token;
        out.send_flags = if asker.signalled {
            IBV_SEND_SIGNALED
        } else {
            0
        };
        match *wr {
            SendWr::Send {
                message,
                invalidate,
            } => {
                let list = [message];
                let gathered = memories.gather(&list, asker, Rights::empty(), pieces);
                let opcode = if invalidate.is_some() {
                    IBV_WR_SEND_WITH_INV
                } else {
                    IBV_WR_SEND
                };
                let word = invalidate.map_or(0, |key| key.0);
                carry(out, opcode, word, gathered, asker.facts.inline)
            }
            SendWr::Write { local, remote, imm } => {
                let gathered = memories.gather(local, asker, Rights::empty(), pieces);
                let opcode = if imm.is_some() {
                    IBV_WR_RDMA_WRITE_WITH_IMM
                } else {
                    IBV_WR_RDMA_WRITE
                };
                aim(out, remote);
                carry(
                    out,
                    opcode,
                    imm.unwrap_or(0).to_be(),
                    gathered,
                    asker.facts.inline,
                )
            }
            SendWr::Read { local, remote } => {
                if !asker.facts.reads {
                    // Nothing was negotiated for it, and it would never complete.
                    return Built::Refused;
                }
                let gathered = memories.gather(local, asker, Rights::LOCAL_WRITE, pieces);
                aim(out, remote);
                carry(out, IBV_WR_RDMA_READ, 0, gathered, 0)
            }
            SendWr::Register {
                region,
                key,
                rights,
                base,
                length,
                layout,
            } => {
                let Layout::Window(piece) = layout else {
                    return Built::Refused;
                };
                let Some(slot) = windows.get_mut(region) else {
                    return Built::Fails(Status::Bind);
                };
                if slot.queued {
                    // The next chain can take it.
                    return Built::Refused;
                }
                let known = memories.find(piece, asker.facts.pd);
                // A window has no local key, hence no right of ours.
                let remote = rights.difference(Rights::LOCAL_WRITE);
                let Some((memory, known)) = known else {
                    return Built::Fails(Status::Bind);
                };
                let right = length != 0
                    && piece.length == length
                    && base == piece.address
                    && known.memory.windows
                    && allows(known.rights, remote)
                    && key.0 >> 8 == slot.key.0 >> 8
                    && key != slot.key
                    && slot.pd == asker.facts.pd
                    && free(slot.binding);
                if !right {
                    return Built::Fails(Status::Bind);
                }
                out.opcode = IBV_WR_BIND_MW;
                out.num_sge = 0;
                // Not zero is EINVAL (rxe).
                out.__bindgen_anon_1.imm_data = 0;
                let binding = Binding::Live {
                    qp: asker.qp,
                    generation: asker.facts.generation,
                    memory,
                };
                // SAFETY: nobody but the provider reads this part of the union, and only of a BIND_MW.
                let bind = unsafe { &mut out.__bindgen_anon_2.bind_mw };
                bind.mw = slot.raw;
                bind.rkey = key.0;
                bind.bind_info = ibv_mw_bind_info {
                    mr: known.memory.raw.raw,
                    addr: piece.address,
                    length: u64::from(length),
                    mw_access_flags: access(remote),
                };
                Built::Ready(windows.change(region, true, key, binding))
            }
            SendWr::Invalidate { key } => {
                let Some(region) = windows.find(key) else {
                    return Built::Fails(Status::LocalOperation);
                };
                let bound = windows.get_mut(region).map(|slot| (slot.key, slot.binding));
                let Some((
                    bound,
                    Binding::Live {
                        qp,
                        generation,
                        memory,
                    },
                )) = bound
                else {
                    return Built::Fails(Status::LocalOperation);
                };
                if bound != key || qp != asker.qp || generation != asker.facts.generation {
                    return Built::Fails(Status::LocalOperation);
                }
                out.opcode = IBV_WR_LOCAL_INV;
                out.num_sge = 0;
                out.__bindgen_anon_1.invalidate_rkey = key.0;
                let binding = Binding::Dying {
                    qp,
                    generation,
                    position: asker.position,
                    memory,
                };
                Built::Ready(windows.change(region, false, key, binding))
            }
        }
    }

    /// In place of one that would fail: it does so on any device, and nothing leaves.
    pub(super) fn spoil(&mut self, token: u64, trap: Sge) {
        if let Some(out) = self.wrs.get_mut(self.length)
            && let Some(piece) = self.pieces.get_mut(self.length.wrapping_mul(self.stride))
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
        if let Some(out) = self.wrs.get_mut(at) {
            out.wr_id = token;
            out.opcode = IBV_WR_SEND;
            out.send_flags = IBV_SEND_SIGNALED;
            out.num_sge = 0;
            out.__bindgen_anon_1.imm_data = 0;
        }
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
        if self.list.len() >= self.most || self.list.iter().any(|known| known.lkey == lkey) {
            return Err(memory);
        }
        self.list.push(Known {
            lkey,
            pd: memory.domain(),
            start: memory.start,
            end: memory.end,
            rights: memory.rights,
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
            || self
                .find(piece, pd)
                .is_some_and(|(_, known)| known.rights.contains(Rights::LOCAL_WRITE))
    }

    /// The memory that a piece lies in, whole, in this protection domain. There are few.
    #[inline]
    fn find(&self, piece: Sge, pd: usize) -> Option<(u32, &Known)> {
        let end = piece.address.checked_add(u64::from(piece.length))?;
        self.list
            .iter()
            .zip(0..)
            .find(|(known, _)| known.lkey == piece.lkey)
            .filter(|(known, _)| known.pd == pd && known.start <= piece.address && end <= known.end)
            .map(|(known, index)| (index, known))
    }

    /// Copies the pieces that are not empty (mlx5 takes 0 for 2 GiB): how many, and their length in all.
    #[inline]
    fn gather(
        &self,
        list: &[Sge],
        asker: &Asker<'_>,
        needs: Rights,
        out: &mut [ibv_sge],
    ) -> Result<(i32, u64), Built> {
        if list.len() > asker.facts.max_sge {
            return Err(Built::Refused);
        }
        let (mut count, mut total) = (0, 0_u64);
        let mut room = out.iter_mut();
        for piece in list.iter().filter(|piece| piece.length != 0) {
            let known = self.find(*piece, asker.facts.pd);
            if !known.is_some_and(|(_, known)| known.rights.contains(needs)) {
                return Err(Built::Fails(Status::LocalProtection));
            }
            let Some(room) = room.next() else {
                return Err(Built::Refused);
            };
            *room = raw_piece(*piece);
            count += 1;
            total = total.wrapping_add(u64::from(piece.length));
        }
        if total > self.max_message {
            return Err(Built::Fails(Status::LocalLength));
        }
        Ok((count, total))
    }
}

#[inline]
fn carry(
    out: &mut ibv_send_wr,
    opcode: ibv_wr_opcode,
    word: u32,
    gathered: Result<(i32, u64), Built>,
    inline: u32,
) -> Built {
    let (count, total) = match gathered {
        Ok(gathered) => gathered,
        Err(built) => return built,
    };
    out.opcode = opcode;
    out.num_sge = count;
    out.__bindgen_anon_1.imm_data = word;
    if total <= u64::from(inline) && total != 0 {
        out.send_flags |= IBV_SEND_INLINE;
    }
    Built::Ready(None)
}

#[inline]
fn aim(out: &mut ibv_send_wr, remote: Remote) {
    // SAFETY: nobody but the provider reads this part of the union, and only of an RDMA request.
    let rdma = unsafe { &mut out.wr.rdma };
    rdma.remote_addr = remote.address;
    rdma.rkey = remote.rkey.0;
}

/// A window that a peer may write through lies over memory that we may write.
const fn allows(memory: Rights, remote: Rights) -> bool {
    !remote.contains(Rights::REMOTE_WRITE) || memory.contains(Rights::LOCAL_WRITE)
}

#[inline]
const fn raw_piece(piece: Sge) -> ibv_sge {
    ibv_sge {
        addr: piece.address,
        length: piece.length,
        lkey: piece.lkey.0,
    }
}
