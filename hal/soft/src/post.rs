//! The initiator's first half: work requests enter the send queue, chain by chain.

use o2poll_dataplane::nic::{Rejected, SendWr, Sge, Status, WrId};

use crate::Soft;
use crate::keys::NotStaged;
use crate::lists::Order;
use crate::profile::Profile;
use crate::queue_pair::{Held, Marks, SendEntry, State, Work};
use crate::settle::drop_staged;
use crate::wire::Wire;

impl<W: Wire> Soft<'_, W> {
    /// Adds a request to the open chain, or latches that it cannot be.
    ///
    /// Inlined: a caller knows what it posts, and what is left then is to fill in a line. Behind a call the request would be
    /// written to memory in small pieces and read back in larger ones, which a core does not forward.
    #[inline(always)]
    pub(crate) fn append(&mut self, index: u32, id: WrId, signalled: bool, wr: SendWr<'_>) {
        let mut marks = Marks::empty();
        marks.set(Marks::SIGNALLED, signalled);
        let bare = SendEntry::bare(id, Work::Send, marks);
        let plain = SendEntry {
            marks: marks.union(Marks::PLAIN),
            ..bare
        };
        match wr {
            SendWr::Send {
                message,
                invalidate: None,
            } => self.enter(
                index,
                SendEntry {
                    length: message.length,
                    pieces: 1,
                    first: message,
                    ..plain
                },
            ),
            SendWr::Write {
                local: [only],
                remote,
                imm: None,
            } => self.enter(
                index,
                SendEntry {
                    work: Work::Write,
                    address: remote.address,
                    rkey: remote.rkey.0,
                    length: only.length,
                    pieces: 1,
                    first: *only,
                    ..plain
                },
            ),
            SendWr::Invalidate { key } => self.enter(
                index,
                SendEntry {
                    work: Work::Invalidate,
                    rkey: key.0,
                    ..bare
                },
            ),
            SendWr::Register {
                region,
                key,
                rights,
                base,
                length,
                layout,
            } => {
                let order = Order {
                    region,
                    key,
                    rights,
                    base,
                    length,
                    layout,
                };
                self.append_register(index, id, marks, &order);
            }
            _ => self.append_any(index, bare, &wr),
        }
    }

    /// A request of one piece at most, where nothing but its length can be wrong.
    #[inline(always)]
    fn enter(&mut self, index: u32, mut entry: SendEntry) {
        let Some(Held {
            slot, mut sends, ..
        }) = self.table.held(index)
        else {
            return;
        };
        if entry.length > MOST_BYTES {
            entry = entry.too_long();
        }
        let depth = slot.pair.as_ref().map_or(0, |pair| pair.send_depth);
        if slot.latched || slot.open.wrapping_sub(slot.freed) >= depth {
            slot.latched = true;
        } else if let Some(place) = sends.at(slot.open) {
            *place = entry;
            slot.open = slot.open.wrapping_add(1);
        }
    }

    /// A registration, whose list is staged as it enters.
    #[inline(always)]
    fn append_register(&mut self, index: u32, id: WrId, mut marks: Marks, order: &Order<'_>) {
        let Some(Held {
            slot, mut sends, ..
        }) = self.table.held(index)
        else {
            return;
        };
        let Some(pair) = &slot.pair else {
            return;
        };
        // Nothing is staged that does not enter.
        if slot.latched || slot.open.wrapping_sub(slot.freed) >= pair.send_depth {
            slot.latched = true;
            return;
        }
        let Some(place) = sends.at(slot.open) else {
            return;
        };
        let capabilities = &self.profile.capabilities;
        let mut failure = None;
        match self.keys.stage(pair.asker(), order, capabilities) {
            Ok(()) => marks.insert(Marks::STAGED),
            Err(NotStaged::Fail(status)) => failure = Some(status),
            Err(NotStaged::Reject) => {
                slot.latched = true;
                return;
            }
        }
        *place = SendEntry {
            rkey: order.key.0,
            extra: order.region.0,
            failure,
            ..SendEntry::bare(id, Work::Register, marks)
        };
        slot.open = slot.open.wrapping_add(1);
    }

    #[inline(never)]
    fn append_any(&mut self, index: u32, bare: SendEntry, wr: &SendWr<'_>) {
        let Some(mut held) = self.table.held(index) else {
            return;
        };
        if held.slot.latched {
            return;
        }
        match write_entry(&mut held, &self.profile, bare, wr) {
            Some(()) => held.slot.open = held.slot.open.wrapping_add(1),
            None => held.slot.latched = true,
        }
    }

    /// Takes the open chain, all or its first part, and starts on it.
    pub(crate) fn ring(&mut self, index: u32) -> Result<(), Rejected> {
        self.counts.doorbells = self.counts.doorbells.wrapping_add(1);
        let Some(held) = self.table.held(index) else {
            return Err(Rejected { accepted: 0 });
        };
        let Held {
            slot, mut sends, ..
        } = held;
        let length = slot.open.wrapping_sub(slot.tail);
        let mut accepted = length;
        if self.faulty
            && let Some(most) = self.faults.accept.take()
            && most < length
        {
            accepted = most;
            slot.latched = true;
            for extra in most..length {
                if let Some(entry) = sends.at(slot.tail.wrapping_add(extra)) {
                    drop_staged(entry, &mut self.keys);
                }
            }
        }
        slot.tail = slot.tail.wrapping_add(accepted);
        slot.open = slot.tail;
        let whole = !core::mem::replace(&mut slot.latched, false);
        self.counts.work_requests = self.counts.work_requests.wrapping_add(u64::from(accepted));
        // An INVALIDATE that waits for what was sent before goes on when that is acknowledged.
        let waits = slot.sent != slot.completed
            && slot.answer.is_none()
            && slot.state == State::Ready
            && sends.get(slot.sent).is_some_and(SendEntry::waits);
        if !waits {
            self.serve(index);
        }
        if whole {
            Ok(())
        } else {
            Err(Rejected { accepted })
        }
    }
}

impl SendEntry {
    /// A request that will fail.
    #[cold]
    const fn too_long(mut self) -> Self {
        self.failure = Some(Status::LocalLength);
        self.length = 0;
        self.marks = self.marks.difference(Marks::PLAIN);
        self
    }
}

/// Writes a request into the slot at `open`; `None` if it cannot be posted.
fn write_entry(
    held: &mut Held<'_>,
    profile: &Profile,
    bare: SendEntry,
    wr: &SendWr<'_>,
) -> Option<()> {
    let Held { slot, sends, .. } = held;
    let capabilities = &profile.capabilities;
    let pair = slot.pair.as_ref()?;
    let position = slot.open;
    if position.wrapping_sub(slot.freed) >= pair.send_depth {
        return None;
    }
    let mut entry = bare;
    let list: &[Sge] = match wr {
        SendWr::Send {
            message,
            invalidate,
        } => {
            if let Some(key) = invalidate {
                if !capabilities.remote_invalidate {
                    return None;
                }
                entry.marks.insert(Marks::INVALIDATE);
                entry.extra = key.0;
            }
            core::slice::from_ref(message)
        }
        SendWr::Write { local, remote, imm } => {
            entry.work = Work::Write;
            (entry.address, entry.rkey) = (remote.address, remote.rkey.0);
            if let Some(data) = imm {
                entry.marks.insert(Marks::IMMEDIATE);
                entry.extra = *data;
            }
            local
        }
        SendWr::Read { local, remote } => {
            entry.work = Work::Read;
            (entry.address, entry.rkey) = (remote.address, remote.rkey.0);
            local
        }
        // `append` has dealt with it.
        SendWr::Register { .. } => return None,
        SendWr::Invalidate { key } => {
            entry.work = Work::Invalidate;
            entry.rkey = key.0;
            &[]
        }
    };
    if list.len() > capabilities.max_sge as usize {
        return None;
    }
    if let Some((first, rest)) = list.split_first() {
        if !sends.store(position, rest) {
            return None;
        }
        let length = list.iter().fold(0_u64, |sum, piece| {
            sum.wrapping_add(u64::from(piece.length))
        });
        entry.first = *first;
        // Bounded by `max_sge`.
        entry.pieces = u32::try_from(list.len()).unwrap_or(u32::MAX);
        match u32::try_from(length) {
            Ok(length) if length <= MOST_BYTES => entry.length = length,
            _ => entry.failure = Some(Status::LocalLength),
        }
    }
    let one = matches!(entry.work, Work::Send | Work::Write) && entry.pieces <= 1;
    entry
        .marks
        .set(Marks::PLAIN, one && entry.failure.is_none());
    *sends.at(position)? = entry;
    Some(())
}

/// Longest message (`max_msg_sz` of every card).
const MOST_BYTES: u32 = 1 << 31;
