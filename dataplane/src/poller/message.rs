//! Work requests and messages of a transfer: its registration, its WRITEs, and the message that its phase
//! calls for.

use super::Poller;
use super::record::{Link, What};
use super::send::{link_of, note};
use super::sink::{describe, source_region};
use crate::memory::PageList;
use crate::nic::{Nic, Qp, RKey, Remote, SendWr, Sge};
use crate::peer::Immediate;
use crate::pool::{Handle, Kind, Pool, pack, pack_write};
use crate::portal::Attached;
use crate::registration::Scratch;
use crate::transfer::{Cursor, Input, Message as Slot, Phase, Place, Role, Sink, Transfer};
use crate::wire::lnet::{self, WireHandle};
use crate::wire::{
    Body, Descriptor, Done, Envelope, Fragment, IMMEDIATE_BYTES, Message, encode_immediate,
};

/// Most local pieces of one WRITE, whatever the device could take.
const PIECES: usize = 32;

/// Where the ping info lies in the message buffer of a transfer that writes it by RDMA.
const PING_AT: u32 = 2048;

/// Most WRITEs of one transfer on the send queue at a time: as many have ids of their own.
const WRITES_AT_ONCE: u16 = 16;

impl<N: Nic> Poller<'_, N> {
    /// WRITEs, as many as may be posted at a time, and the DONE behind the last of them.
    pub(super) fn data(&mut self, connection: Handle, qp: Qp, handle: Handle, room: usize) {
        let (max_sge, writes) = {
            let writes = self.limits.shape.writes_at_once;
            let Some(transfer) = self.transfers.get(handle) else {
                return;
            };
            // A REPLY has the request besides, in the share of a GET's data.
            let writes = if transfer.role == Role::Reply {
                writes.saturating_sub(1).max(1)
            } else {
                writes
            };
            (
                (self.capabilities.max_sge as usize).clamp(1, PIECES),
                writes.min(WRITES_AT_ONCE),
            )
        };
        let is_new = self.register_source(connection, qp, handle);
        let room = room.saturating_sub(1).saturating_sub(usize::from(is_new));
        let mut posted = 0_usize;
        let mut is_told = false;
        loop {
            let Some(transfer) = self.transfers.get_mut(handle) else {
                return;
            };
            if transfer.cursor.written >= transfer.length {
                break;
            }
            // The REGISTER is on the send queue until the first WRITEs are done.
            let is_source = transfer.window.is_some();
            let writes = if is_source && transfer.cursor.writes < writes {
                writes.saturating_add(1)
            } else {
                writes
            };
            if posted >= room || transfer.in_flight >= writes {
                // The rest goes when these are done; the last of them was signalled.
                return;
            }
            let link = link_of(What::Write, handle, transfer);
            let Some((remote, most_bytes)) = next_target(transfer) else {
                self.close(connection, super::Reason::BadLength);
                return;
            };
            let mut pieces: heapless::Vec<Sge, PIECES> = heapless::Vec::new();
            let mut bytes = 0_u32;
            let from = transfer.cursor.written;
            if let Some((list, offset)) = memory_of(&transfer.place, &self.entries) {
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
                    *place = self.ping;
                }
                let piece = buffer.sge_at(PING_AT.saturating_add(from), most_bytes);
                bytes = piece.length;
                let _ = pieces.push(piece);
            }
            if bytes == 0 {
                // The memory is shorter than what was matched in it: cannot be.
                self.close(connection, super::Reason::BadLength);
                return;
            }
            transfer.cursor.written = from.saturating_add(bytes);
            transfer.cursor.offset = transfer.cursor.offset.saturating_add(bytes);
            // Numbered on from those of an earlier chain that the device took in part, which may be in flight.
            let id = pack_write(handle, transfer.cursor.writes);
            transfer.cursor.writes = transfer.cursor.writes.wrapping_add(1);
            posted = posted.wrapping_add(1);
            let is_last = transfer.cursor.written >= transfer.length;
            let is_end = posted >= room || transfer.in_flight.saturating_add(1) >= writes;
            // In place of the DONE, where there is nothing to say but that all is written.
            let state = self.connections.get_mut(connection);
            let state = state
                .filter(|state| is_last && transfer.fills_sink && state.terms.write_immediates);
            let paid = state.map(|state| state.credits.pay());
            let imm = paid.map(|paid| Immediate::new(paid, transfer.cookie).to_bits());
            is_told = imm.is_some();
            let link = match paid {
                Some(paid) => Link {
                    what: What::Immediate { paid },
                    ..link
                },
                None => link,
            };
            let wr = SendWr::Write {
                local: &pieces,
                remote,
                imm,
            };
            // Where an invalidate follows, that tells of all.
            let signalled = if is_last {
                is_told && !is_source
            } else {
                is_end
            };
            self.nic.queue(qp, id, signalled, wr);
            self.link(connection, link, id);
        }
        let Some(transfer) = self.transfers.get_mut(handle) else {
            return;
        };
        transfer.outcome = Ok(transfer.cursor.written);
        let wants_ack = transfer.role == Role::Put && transfer.handle != WireHandle::NONE;
        let is_registered = transfer.window.is_some();
        if !is_told {
            self.message(connection, qp, handle, !is_registered, false);
        }
        self.apply(
            handle,
            if wants_ack {
                Input::PostedLastWantsAck
            } else {
                Input::PostedLast
            },
        );
        if is_registered
            && let Some(state) = self.connections.get_mut(connection)
            && let Some(transfer) = self.transfers.get_mut(handle)
            && !transfer.queued
        {
            transfer.queued = true;
            self.transfers.push_back(&mut state.invalidates, handle);
        }
    }

    /// Builds the transfer's next message in its buffer and puts it on the chain.
    pub(super) fn message(
        &mut self,
        connection: Handle,
        qp: Qp,
        handle: Handle,
        signalled: bool,
        credit: bool,
    ) {
        let Some(state) = self.connections.get_mut(connection) else {
            return;
        };
        let cookie = self.transfers.cookie(handle);
        let Some(transfer) = self.transfers.get_mut(handle) else {
            return;
        };
        let paid = state.credits.pay();
        let what = if credit {
            What::Request { paid }
        } else {
            What::Answer { paid }
        };
        let link = link_of(what, handle, transfer);
        let envelope = state.terms.envelope(paid);
        // The data is behind this on the queue: who sees the DONE finds the key dead.
        let is_done = transfer.phase == Phase::Data;
        let invalidate = (is_done && state.terms.kills_keys).then_some(transfer.sink_key);
        let Some(Slot::Home(mut buffer)) = transfer.message.take() else {
            return;
        };
        let context = Context {
            handle,
            cookie,
            stamp: self.limits.stamp,
            local: (self.limits.nid, self.limits.pid),
            zero_based: self.capabilities.zero_based,
            ping: &self.ping,
        };
        let length = build(
            transfer,
            &self.entries,
            &envelope,
            &context,
            &mut self.scratch,
            buffer.bytes(),
        );
        let posted = buffer.post();
        let id = pack(Kind::Send, handle);
        let wr = SendWr::Send {
            message: posted.sge(length),
            invalidate,
        };
        transfer.message = Some(Slot::Posted(posted));
        transfer.in_flight = transfer.in_flight.saturating_add(1);
        self.nic.queue(qp, id, signalled, wr);
        note(
            &mut self.record,
            &mut self.chain,
            connection,
            state,
            link,
            id,
        );
    }
}

/// The list that holds a transfer's memory, and where in it that begins.
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
pub(super) fn base_of(list: &PageList<'_>, offset: u64, length: u32, zero_based: bool) -> u64 {
    if zero_based {
        return 0;
    }
    list.slice(offset, length)
        .next()
        .map_or(0, |piece| piece.address)
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

/// What a message needs to know of its sender.
struct Context<'c> {
    handle: Handle,
    /// What the peer is to echo.
    cookie: u64,
    stamp: u64,
    local: (crate::wire::Nid, crate::wire::Pid),
    zero_based: bool,
    ping: &'c [u8],
}

/// Writes the message that the transfer's phase calls for; its length. Every message fits its buffer.
fn build<'a>(
    transfer: &Transfer<'a>,
    entries: &Pool<'_, Attached<'a>>,
    envelope: &Envelope,
    context: &Context<'_>,
    scratch: &mut Scratch,
    to: &mut [u8; 4096],
) -> u32 {
    let cookie = context.cookie;
    let status = |status| Done {
        cookie: transfer.cookie,
        status,
    };
    let written = i32::try_from(transfer.cursor.written).unwrap_or(i32::MAX);
    // What says no more than how it went needs no header.
    let done = match (transfer.phase, transfer.role) {
        (_, Role::Nak(errno)) => Some(Body::PutNak(status(errno))),
        (_, Role::Refusal(errno)) => Some(Body::GetDone(status(errno))),
        (Phase::Data, Role::Source) => Some(Body::GetDone(status(written))),
        (Phase::Data, _) => Some(Body::PutDone(status(written))),
        _ => None,
    };
    if let Some(body) = done {
        return encode(envelope, body, to);
    }
    let mut one = [Fragment::default()];
    let sink = if transfer.role.is_sink() && transfer.mechanism.is_some() {
        describe(transfer, entries, context.zero_based, scratch, &mut one)
    } else {
        Descriptor::new(RKey::default(), &[])
    };
    if transfer.phase == Phase::Answer {
        let body = Body::PutAck {
            source_cookie: transfer.cookie,
            sink_cookie: cookie,
            sink,
        };
        return encode(envelope, body, to);
    }
    let ours = WireHandle::from_words(context.stamp, context.handle.to_bits());
    let header = lnet::Header {
        destination: transfer.peer.0,
        source: context.local.0,
        destination_pid: transfer.peer.1,
        source_pid: context.local.1,
        payload_length: match transfer.role {
            Role::Put | Role::Reply => transfer.length,
            _ => 0,
        },
        body: match transfer.role {
            Role::Put => lnet::Body::Put {
                ack: if transfer.handle == WireHandle::NONE {
                    WireHandle::NONE
                } else {
                    ours
                },
                match_bits: transfer.match_bits.0,
                hdr_data: transfer.hdr_data,
                portal: transfer.portal.0,
                offset: transfer.remote_offset,
            },
            Role::Get => lnet::Body::Get {
                reply: ours,
                match_bits: transfer.match_bits.0,
                portal: transfer.portal.0,
                offset: transfer.remote_offset,
                sink_length: transfer.length,
            },
            Role::Ack => lnet::Body::Ack {
                handle: transfer.handle,
                match_bits: transfer.match_bits.0,
                length: transfer.outcome.unwrap_or(0),
            },
            _ => lnet::Body::Reply {
                handle: transfer.handle,
            },
        },
    };
    let body = match transfer.role {
        Role::Get if transfer.bulk => Body::GetReq {
            header,
            cookie,
            sink,
        },
        _ if transfer.bulk => Body::PutReq { header, cookie },
        _ => {
            let payload = payload(transfer, entries, context, header.payload_length, to);
            return encode_immediate(envelope, &header, payload, to).unwrap_or(0);
        }
    };
    encode(envelope, body, to)
}

#[inline]
fn encode(envelope: &Envelope, body: Body<'_>, to: &mut [u8; 4096]) -> u32 {
    let message = Message {
        envelope: *envelope,
        body,
    };
    message.encode(to).unwrap_or(0)
}

/// Copies the payload of an IMMEDIATE to where it belongs; how many bytes it has.
fn payload<'a>(
    transfer: &Transfer<'a>,
    entries: &Pool<'_, Attached<'a>>,
    context: &Context<'_>,
    length: u32,
    to: &mut [u8; 4096],
) -> u32 {
    let Some(room) = to
        .get_mut(IMMEDIATE_BYTES as usize..)
        .and_then(|rest| rest.get_mut(..length as usize))
    else {
        return 0;
    };
    if let Some((list, offset)) = memory_of(&transfer.place, entries) {
        list.read_at(offset, room);
    } else {
        for (to, from) in room.iter_mut().zip(context.ping) {
            *to = *from;
        }
    }
    length
}
