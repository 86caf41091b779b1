//! Work requests and messages of a transfer: its registration, its WRITEs, and the message that its phase
//! calls for.

use super::Limits;
use super::desk::Desk;
use super::record::What;
use super::sink::{Uncovered, describe, source_region};
use crate::connection::Connection;
use crate::memory::{Buffer, PageList};
use crate::nic::{Nic, Remote, SendWr, Sge};
use crate::peer::Immediate;
use crate::pool::{Kind, Pool, pack, pack_write};
use crate::portal::Attached;
use crate::transfer::{Cursor, Input, Message as Slot, Phase, Place, Role, Sink, Transfer};
use crate::wire::lnet::{self, WireHandle};
use crate::wire::{
    Body, Done, Envelope, Fragment, IMMEDIATE_BYTES, Message, encode_get_req, encode_immediate,
    encode_put_ack,
};

/// Most local pieces of one WRITE, whatever the device could take.
const PIECES: usize = 32;

/// Where the ping info lies in the message buffer of a transfer that writes it by RDMA.
const PING_AT: u32 = 2048;

/// Most WRITEs of one transfer on the send queue at a time: as many have ids of their own.
const WRITES_AT_ONCE: u16 = 16;

impl<'a, N: Nic> Desk<'_, 'a, N> {
    /// WRITEs, as many as may be posted at a time, and the DONE behind the last of them.
    pub(super) fn data(
        &mut self,
        state: &mut Connection<'a>,
        transfer: &mut Transfer<'a>,
        room: usize,
    ) -> Result<(), Uncovered> {
        let max_sge = (self.capabilities.max_sge as usize).clamp(1, PIECES);
        let writes = self.limits.shape.writes_at_once;
        // A REPLY has the request besides, in the share of a GET's data.
        let writes = if transfer.role == Role::Reply {
            writes.saturating_sub(1).max(1)
        } else {
            writes
        };
        let writes = writes.min(WRITES_AT_ONCE);
        let is_new = self.register_source(state, transfer);
        let room = room.saturating_sub(1).saturating_sub(usize::from(is_new));
        // The REGISTER is on the send queue until the first WRITEs are done.
        let is_source = transfer.window.is_some();
        let mut posted = 0_usize;
        let mut is_told = false;
        while transfer.cursor.written < transfer.length {
            let writes = if is_source && transfer.cursor.writes < writes {
                writes.saturating_add(1)
            } else {
                writes
            };
            if posted >= room || transfer.in_flight >= writes {
                // The rest goes when these are done; the last of them was signalled.
                return Ok(());
            }
            let cursor = transfer.cursor;
            let (remote, most_bytes) = next_target(transfer).ok_or(Uncovered)?;
            let mut pieces: heapless::Vec<Sge, PIECES> = heapless::Vec::new();
            let mut bytes = 0_u32;
            let from = transfer.cursor.written;
            if let Some((list, offset)) = memory_of(&transfer.place, self.entries) {
                let zero_based = self.capabilities.zero_based;
                if let Some(region) = source_region(transfer, list, offset, zero_based) {
                    bytes = most_bytes.min(region.length);
                    let _ = pieces.push(Sge {
                        length: bytes,
                        ..region
                    });
                } else {
                    let from = offset.saturating_add(u64::from(from));
                    for piece in list.slice(from, most_bytes).take(max_sge) {
                        bytes = bytes.saturating_add(piece.length);
                        let _ = pieces.push(piece);
                    }
                }
            } else if let (Place::Ping, Some(Slot::Home(buffer))) =
                (&transfer.place, &mut transfer.message)
            {
                let at = PING_AT as usize;
                if let Some(place) = buffer
                    .bytes()
                    .get_mut(at..)
                    .and_then(|rest| rest.first_chunk_mut())
                {
                    *place = *self.ping;
                }
                let piece = buffer.sge_at(PING_AT.saturating_add(from), most_bytes);
                bytes = piece.length;
                let _ = pieces.push(piece);
            }
            if bytes == 0 {
                // The memory is shorter than what was matched in it: cannot be.
                return Err(Uncovered);
            }
            transfer.cursor.written = from.saturating_add(bytes);
            transfer.cursor.offset = transfer.cursor.offset.saturating_add(bytes);
            // Numbered on from those of an earlier chain that the device took in part, which may be in flight.
            let id = pack_write(self.handle, transfer.cursor.writes);
            transfer.cursor.writes = transfer.cursor.writes.wrapping_add(1);
            posted = posted.wrapping_add(1);
            let is_last = transfer.cursor.written >= transfer.length;
            let is_end = posted >= room || transfer.in_flight.saturating_add(1) >= writes;
            // In place of the DONE, where there is nothing to say but that all is written.
            is_told = is_last && transfer.fills_sink && state.terms.write_immediates;
            let paid = is_told.then(|| state.credits.pay());
            let imm = paid.map(|paid| Immediate::new(paid, transfer.cookie).to_bits());
            let what = match paid {
                Some(paid) => What::Immediate {
                    cursor,
                    paid,
                    lent: transfer.is_lent(),
                },
                None => What::Write { cursor },
            };
            let link = self.link(what, transfer);
            // Where an invalidate follows, that tells of all.
            let signalled = if is_last {
                is_told && !is_source
            } else {
                is_end
            };
            // The common form by itself, as in `post`.
            if let (&[piece], None) = (&pieces[..], imm) {
                let wr = SendWr::Write {
                    local: &[piece],
                    remote,
                    imm: None,
                };
                self.nic.queue(state.qp, id, signalled, wr);
            } else {
                let wr = SendWr::Write {
                    local: &pieces,
                    remote,
                    imm,
                };
                self.nic.queue(state.qp, id, signalled, wr);
            }
            self.queued(state, transfer, link, id);
        }
        transfer.outcome = Ok(transfer.cursor.written);
        let last = if transfer.role == Role::Put && transfer.handle != WireHandle::NONE {
            Input::PostedLastWantsAck
        } else {
            Input::PostedLast
        };
        if is_told {
            transfer.posted(last);
        } else {
            self.message(state, transfer, !is_source, false, last);
        }
        Ok(())
    }

    /// Builds the transfer's next message in its buffer and puts it on the chain, which is what `posted` tells the
    /// transfer. Everything but a whole LNet message.
    pub(super) fn message(
        &mut self,
        state: &mut Connection<'a>,
        transfer: &mut Transfer<'a>,
        signalled: bool,
        credit: bool,
        posted: Input,
    ) {
        let Some(Slot::Home(mut buffer)) = transfer.message.take() else {
            return;
        };
        let paid = state.credits.pay();
        let envelope = state.terms.envelope(paid);
        let length = self.build(transfer, &envelope, buffer.bytes());
        let what = if credit {
            What::Request { paid, told: true }
        } else {
            What::Answer {
                paid,
                lent: transfer.is_lent(),
            }
        };
        self.post(state, transfer, buffer, length, what, signalled);
        transfer.posted(posted);
    }

    /// A whole LNet message.
    #[inline(always)]
    pub(super) fn immediate(
        &mut self,
        state: &mut Connection<'a>,
        transfer: &mut Transfer<'a>,
        told: bool,
    ) {
        let Some(Slot::Home(mut buffer)) = transfer.message.take() else {
            return;
        };
        let paid = state.credits.pay();
        let envelope = state.terms.envelope(paid);
        let length = self.build_immediate(transfer, &envelope, buffer.bytes());
        let what = What::Request { paid, told };
        self.post(state, transfer, buffer, length, what, told);
    }

    #[inline(always)]
    fn post(
        &mut self,
        state: &mut Connection<'a>,
        transfer: &mut Transfer<'a>,
        buffer: Buffer<'a>,
        length: u32,
        what: What,
        signalled: bool,
    ) {
        // The data is behind this on the queue: who sees the DONE finds the key dead.
        let is_done = transfer.phase == Phase::Data;
        let invalidate = (is_done && state.terms.kills_keys).then_some(transfer.sink_key);
        let sent = buffer.post();
        let message = sent.sge(length);
        let id = pack(Kind::Send, self.handle);
        let link = self.link(what, transfer);
        transfer.message = Some(Slot::Posted(sent));
        // Each form by itself: a driver that is inlined here need not find out which it is, nor have it in memory.
        if let Some(key) = invalidate {
            self.nic.queue(
                state.qp,
                id,
                signalled,
                SendWr::Send {
                    message,
                    invalidate: Some(key),
                },
            );
        } else {
            let wr = SendWr::Send {
                message,
                invalidate: None,
            };
            self.nic.queue(state.qp, id, signalled, wr);
        }
        self.queued(state, transfer, link, id);
    }

    /// Writes a whole LNet message; its length.
    #[inline(always)]
    fn build_immediate(
        &mut self,
        transfer: &Transfer<'a>,
        envelope: &Envelope,
        to: &mut [u8; 4096],
    ) -> u32 {
        let (ours, limits) = (self.ours(), self.limits);
        // Each kind in one go: a header that could be any of them would have to be put together first.
        match transfer.role {
            Role::Put => {
                let length = self.payload(transfer, to);
                whole(envelope, transfer, limits, length, put(transfer, ours), to)
            }
            Role::Get => whole(envelope, transfer, limits, 0, get(transfer, ours), to),
            Role::Ack => {
                let body = lnet::Body::Ack {
                    handle: transfer.handle,
                    match_bits: transfer.match_bits.0,
                    length: transfer.outcome.unwrap_or(0),
                };
                whole(envelope, transfer, limits, 0, body, to)
            }
            _ => {
                let length = self.payload(transfer, to);
                let body = lnet::Body::Reply {
                    handle: transfer.handle,
                };
                whole(envelope, transfer, limits, length, body, to)
            }
        }
    }

    /// Writes any other message that the transfer's phase calls for; its length. Every message fits its buffer.
    fn build(&mut self, transfer: &Transfer<'a>, envelope: &Envelope, to: &mut [u8; 4096]) -> u32 {
        let status = |status| Done {
            cookie: transfer.cookie,
            status,
        };
        let written = i32::try_from(transfer.cursor.written).unwrap_or(i32::MAX);
        // What says no more than how it went needs no header.
        match (transfer.phase, transfer.role) {
            (_, Role::Nak(errno)) => {
                return encode(envelope, Body::PutNak(status(errno)), to);
            }
            (_, Role::Refusal(errno)) => {
                return encode(envelope, Body::GetDone(status(errno)), to);
            }
            (Phase::Data, Role::Source) => {
                return encode(envelope, Body::GetDone(status(written)), to);
            }
            (Phase::Data, _) => {
                return encode(envelope, Body::PutDone(status(written)), to);
            }
            _ => {}
        }
        let cookie = self.cookie();
        if transfer.phase != Phase::Answer && transfer.role != Role::Get {
            let body = match transfer.role {
                Role::Put => put(transfer, self.ours()),
                _ => lnet::Body::Reply {
                    handle: transfer.handle,
                },
            };
            let header = header(transfer, self.limits, transfer.length, body);
            return encode(envelope, Body::PutReq { header, cookie }, to);
        }
        let ours = self.ours();
        let mut one = [Fragment::default()];
        let zero_based = self.capabilities.zero_based;
        let sink = describe(transfer, self.entries, zero_based, self.scratch, &mut one);
        let length = if transfer.phase == Phase::Answer {
            encode_put_ack(envelope, transfer.cookie, cookie, &sink, to)
        } else {
            let header = header(transfer, self.limits, 0, get(transfer, ours));
            encode_get_req(envelope, &header, cookie, &sink, to)
        };
        length.unwrap_or(0)
    }

    /// What the peer's LNet is to echo.
    #[inline]
    const fn ours(&self) -> WireHandle {
        WireHandle::from_words(self.limits.stamp, self.handle.to_bits())
    }

    /// Copies the payload of a message to where it belongs; how many bytes it has.
    #[inline(always)]
    fn payload(&self, transfer: &Transfer<'a>, to: &mut [u8; 4096]) -> u32 {
        let length = transfer.length;
        let Some(room) = to
            .get_mut(IMMEDIATE_BYTES as usize..)
            .and_then(|rest| rest.get_mut(..length as usize))
        else {
            return 0;
        };
        if let Some((list, offset)) = memory_of(&transfer.place, self.entries) {
            list.read_at(offset, room);
        } else {
            for (to, from) in room.iter_mut().zip(self.ping) {
                *to = *from;
            }
        }
        length
    }
}

/// The list that holds a transfer's memory, and where in it that begins.
#[inline]
pub(super) fn memory_of<'t, 'a>(
    place: &'t Place<'a>,
    entries: &'t Pool<'_, Attached<'a>>,
) -> Option<(&'t PageList<'a>, u64)> {
    match place {
        Place::Own(list) => Some((list, 0)),
        Place::Entry { entry, offset } => Some((entries.get(*entry)?.entry.memory, *offset)),
        Place::Ping | Place::Nothing => None,
    }
}

/// Address of the first byte in the key's address space. The address that goes to the peer is exactly
/// the registered one (LU-9500).
#[inline]
pub(super) fn base_of(list: &PageList<'_>, offset: u64, length: u32, zero_based: bool) -> u64 {
    if zero_based {
        return 0;
    }
    let first = if offset == 0 && length != 0 {
        list.pieces().first().copied()
    } else {
        list.slice(offset, length).next()
    };
    first.map_or(0, |piece| piece.address)
}

fn transfer_fragment(sink: &Sink<'_>, cursor: Cursor) -> Option<Fragment> {
    match sink {
        Sink::None => None,
        Sink::One(fragment) => (cursor.fragment == 0).then_some(*fragment),
        Sink::Many {
            message, located, ..
        } => located.get(message.peek(), cursor.fragment as usize),
    }
}

/// Where the next WRITE goes, and how much fits there. Fragments of no length are passed over.
fn next_target(transfer: &mut Transfer<'_>) -> Option<(Remote, u32)> {
    loop {
        let fragment = transfer_fragment(&transfer.sink, transfer.cursor)?;
        let room = fragment.length.saturating_sub(transfer.cursor.offset);
        if room == 0 {
            transfer.cursor.fragment = transfer.cursor.fragment.checked_add(1)?;
            transfer.cursor.offset = 0;
            continue;
        }
        let left = transfer.length.saturating_sub(transfer.cursor.written);
        let remote = Remote {
            address: fragment
                .address
                .wrapping_add(u64::from(transfer.cursor.offset)),
            rkey: transfer.sink_key,
        };
        return Some((remote, room.min(left)));
    }
}

/// The LNet header of a message of this transfer.
#[inline]
const fn header(
    transfer: &Transfer<'_>,
    limits: &Limits,
    payload_length: u32,
    body: lnet::Body,
) -> lnet::Header {
    lnet::Header {
        destination: transfer.peer.0,
        source: limits.nid,
        destination_pid: transfer.peer.1,
        source_pid: limits.pid,
        payload_length,
        body,
    }
}

#[inline(always)]
fn whole(
    envelope: &Envelope,
    transfer: &Transfer<'_>,
    limits: &Limits,
    length: u32,
    body: lnet::Body,
    to: &mut [u8; 4096],
) -> u32 {
    let header = header(transfer, limits, length, body);
    encode_immediate(envelope, &header, length, to).unwrap_or(0)
}

/// The body of a PUT; `ours` is what an ACK is to echo.
#[inline]
fn put(transfer: &Transfer<'_>, ours: WireHandle) -> lnet::Body {
    let (stamp, object) = ours.words();
    // Word by word, not byte by byte.
    let all = if transfer.handle == WireHandle::NONE {
        u64::MAX
    } else {
        0
    };
    lnet::Body::Put {
        ack: WireHandle::from_words(stamp | all, object | all),
        match_bits: transfer.match_bits.0,
        hdr_data: transfer.hdr_data,
        portal: transfer.portal.0,
        offset: transfer.remote_offset,
    }
}

/// The body of a GET; `ours` is what a REPLY is to echo.
#[inline]
const fn get(transfer: &Transfer<'_>, ours: WireHandle) -> lnet::Body {
    lnet::Body::Get {
        reply: ours,
        match_bits: transfer.match_bits.0,
        portal: transfer.portal.0,
        offset: transfer.remote_offset,
        sink_length: transfer.length,
    }
}

#[inline(always)]
fn encode(envelope: &Envelope, body: Body<'_>, to: &mut [u8; 4096]) -> u32 {
    let message = Message {
        envelope: *envelope,
        body,
    };
    message.encode(to).unwrap_or(0)
}
