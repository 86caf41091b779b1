//! What peers ask: PUTs and GETs, in a message or in bulk. Each takes its share of the queue pair, its slot,
//! its window and its event's place together, or is held.

use super::answers::room_in;
use super::receive::{ENODATA, EPROTONOSUPPORT, PING_BYTES, REPOST_OWE, Then};
use super::{Poller, Reason};
use crate::endpoint::{EntryOptions, Event, Incoming, Landed, MatchBits, Portal, Token};
use crate::nic::{Nic, RKey};
use crate::pool::Handle;
use crate::portal::{self, LNET_PORTAL, PING_BITS, Question};
use crate::time::Instant;
use crate::transfer::{Cursor, Input, Message as Slot, Phase, Place, Role, Sink, Transfer};
use crate::wire::lnet::{self, WireHandle};
use crate::wire::{Descriptor, IMMEDIATE_PAYLOAD};

impl<'a, N: Nic> Poller<'a, N> {
    /// Whether a request that just came must queue behind others that wait.
    #[inline]
    pub(super) fn must_queue(&self, connection: Handle, again: bool) -> bool {
        !again
            && self
                .connections
                .get(connection)
                .is_some_and(|state| !state.held.is_empty())
    }

    /// Whether there is a share of the queue pair, a slot and a buffer for a transfer of the peer.
    #[inline]
    pub(super) fn has_share(&self, connection: Handle) -> bool {
        self.has_shares(connection, 0)
    }

    #[inline]
    pub(super) fn has_shares(&self, connection: Handle, extra: u16) -> bool {
        !self.messages.is_empty()
            && self.transfers.vacant() > 0
            && self
                .connections
                .get(connection)
                .is_some_and(|state| state.peers < state.terms.queue_depth.saturating_add(extra))
    }

    /// Whether a request that just came has its turn, and a share.
    #[inline(always)]
    fn may_start(&self, connection: Handle, again: bool) -> bool {
        !self.messages.is_empty()
            && self.transfers.vacant() > 0
            && self.connections.get(connection).is_some_and(|state| {
                (again || state.held.is_empty()) && state.peers < state.terms.queue_depth
            })
    }

    /// Starts a transfer of the peer. Whoever calls has found that there is room.
    #[inline(always)]
    pub(super) fn admit(&mut self, mut transfer: Transfer<'a>) -> Option<Handle> {
        transfer.message = self.messages.take().map(Slot::Home);
        let connection = transfer.connection;
        match self.transfers.insert(transfer) {
            Ok(handle) => {
                if let Some(state) = self.connections.get_mut(connection) {
                    state.peers = state.peers.saturating_add(1);
                }
                Some(handle)
            }
            Err(transfer) => {
                if let Some(message) = transfer.message {
                    self.messages.give(message.into_buffer());
                }
                None
            }
        }
    }

    #[inline(always)]
    pub(super) fn blank(
        &self,
        connection: Handle,
        role: Role,
        header: Option<lnet::View<'_>>,
        now: Instant,
    ) -> Transfer<'a> {
        Transfer {
            connection,
            role,
            phase: Phase::Answer,
            bulk: false,
            in_flight: 0,
            deadline: now.after(self.limits.timeout),
            abandoned: None,
            outcome: Ok(0),
            place: Place::Nothing,
            length: 0,
            window: None,
            mechanism: None,
            stage: None,
            mapping: None,
            looked: None,
            message: None,
            cookie: 0,
            sink: Sink::None,
            sink_key: RKey(0),
            fills_sink: false,
            cursor: Cursor::default(),
            token: Token(0),
            portal: Portal(0),
            match_bits: MatchBits(0),
            remote_offset: 0,
            hdr_data: 0,
            handle: WireHandle::NONE,
            peer: header.map_or((self.limits.nid, self.limits.pid), |header| {
                (header.source(), header.source_pid())
            }),
            event: false,
            queued: false,
            reserved: false,
            admitted: true,
        }
    }

    /// Answers with PUT_NAK or a negative GET_DONE.
    pub(super) fn refuse(
        &mut self,
        connection: Handle,
        role: Role,
        cookie: u64,
        again: bool,
        now: Instant,
    ) -> Result<Then, Reason> {
        if !self.may_start(connection, again) {
            return Ok(Then::Hold);
        }
        self.turn_down(connection, role, cookie, now);
        Ok(REPOST_OWE)
    }

    /// Answers a REPLY that nobody waits for with PUT_NAK.
    ///
    /// It may take one slot beyond the peer's share. That share may be full of REPLYs of ours, which wait for
    /// the answers of a peer in the same position: both had given up on their GETs.
    pub(super) fn refuse_reply(
        &mut self,
        connection: Handle,
        status: i32,
        cookie: u64,
        now: Instant,
    ) -> Then {
        if !self.has_shares(connection, 1) {
            return Then::HoldReply;
        }
        self.turn_down(connection, Role::Nak(status), cookie, now);
        REPOST_OWE
    }

    pub(super) fn turn_down(&mut self, connection: Handle, role: Role, cookie: u64, now: Instant) {
        let mut transfer = self.blank(connection, role, None, now);
        transfer.cookie = cookie;
        if let Some(handle) = self.admit(transfer) {
            self.apply(handle, Input::Completed);
        }
    }

    /// Where an incoming PUT or GET lands; `None`: nowhere.
    fn look_up(&self, question: &Question) -> Option<portal::Match> {
        portal::find(&self.entries, &self.attached, question)
    }

    /// The options and token of a matched entry, and whether its event, if it wants one, has room.
    #[inline]
    fn prepare(&mut self, found: &portal::Match) -> Option<(EntryOptions, Token)> {
        let attached = self.entries.get(found.entry)?;
        let (options, token) = (attached.entry.options, attached.entry.token);
        if options.contains(EntryOptions::EVENTS) && self.ends.events.free() <= self.events_due {
            return None;
        }
        Some((options, token))
    }

    /// A PUT in a message.
    #[inline(always)]
    pub(super) fn put_arrived(
        &mut self,
        connection: Handle,
        header: lnet::View<'_>,
        payload: &[u8],
        again: bool,
        now: Instant,
    ) -> Result<Then, Reason> {
        let lnet::Body::Put {
            ack,
            match_bits,
            hdr_data,
            portal,
            offset,
        } = header.body()
        else {
            return Err(Reason::UnexpectedType);
        };
        if self.must_queue(connection, again) {
            return Ok(Then::Hold);
        }
        let question = of_put(header, portal, match_bits, offset);
        let Some(found) = self.look_up(&question) else {
            self.counters.unmatched.add(1);
            return Ok(REPOST_OWE);
        };
        let has_share = ack == WireHandle::NONE || self.has_share(connection);
        let Some(attached) = self.entries.get_mut(found.entry) else {
            return Ok(REPOST_OWE);
        };
        let (options, token) = (attached.entry.options, attached.entry.token);
        let wants_ack = ack != WireHandle::NONE && !options.contains(EntryOptions::ACK_DISABLE);
        let wants_event = options.contains(EntryOptions::EVENTS);
        if (wants_ack && !has_share) || (wants_event && self.ends.events.free() <= self.events_due)
        {
            return Ok(Then::Hold);
        }
        attached.engage(&found);
        let taken = payload.get(..found.length as usize).unwrap_or(payload);
        attached.entry.memory.write_at(found.offset, taken);
        let leaves = attached.disengage();
        if wants_event && self.reserve_event() {
            self.tell(Event::Landed(Landed {
                token,
                operation: Incoming::Put { hdr_data },
                nid: header.source(),
                pid: header.source_pid(),
                match_bits: MatchBits(match_bits),
                offset: u32::try_from(found.offset).unwrap_or(u32::MAX),
                outcome: Ok(found.length),
            }));
        }
        if leaves {
            self.let_go(found.entry);
        }
        if wants_ack {
            let mut transfer = self.blank(connection, Role::Ack, Some(header), now);
            transfer.phase = Phase::Waiting;
            transfer.handle = ack;
            transfer.match_bits = MatchBits(match_bits);
            transfer.outcome = Ok(found.length);
            if let Some(handle) = self.admit(transfer) {
                self.apply(handle, Input::Admitted);
            }
        } else {
            self.counters.peer_transfers.add(1);
        }
        Ok(REPOST_OWE)
    }

    /// A GET in a message: answered by a REPLY.
    pub(super) fn get_arrived(
        &mut self,
        connection: Handle,
        header: lnet::View<'_>,
        again: bool,
        now: Instant,
    ) -> Result<Then, Reason> {
        let lnet::Body::Get {
            reply,
            match_bits,
            portal,
            offset,
            sink_length,
        } = header.body()
        else {
            return Err(Reason::UnexpectedType);
        };
        if !self.may_start(connection, again) {
            return Ok(Then::Hold);
        }
        let mut transfer = self.blank(connection, Role::Reply, Some(header), now);
        transfer.phase = Phase::Waiting;
        transfer.handle = reply;
        transfer.match_bits = MatchBits(match_bits);
        if Self::is_ping(portal, match_bits) {
            transfer.place = Place::Ping;
            transfer.length = sink_length.min(PING_BYTES);
        } else {
            let question = of_get(header, portal, match_bits, offset, sink_length);
            let Some(found) = self.look_up(&question) else {
                self.counters.unmatched.add(1);
                return Ok(REPOST_OWE);
            };
            let Some((options, token)) = self.prepare(&found) else {
                return Ok(Then::Hold);
            };
            transfer.token = token;
            transfer.event = options.contains(EntryOptions::EVENTS) && self.reserve_event();
            if let Some(attached) = self.entries.get_mut(found.entry) {
                attached.engage(&found);
            }
            transfer.place = Place::Entry {
                entry: found.entry,
                offset: found.offset,
            };
            transfer.length = found.length;
            transfer.bulk = found.length > IMMEDIATE_PAYLOAD;
        }
        if let Some(handle) = self.admit(transfer) {
            self.apply(handle, Input::Admitted);
        }
        Ok(REPOST_OWE)
    }

    pub(super) const fn is_ping(portal: u32, match_bits: u64) -> bool {
        portal == LNET_PORTAL.0 && match_bits == PING_BITS.0
    }

    /// A PUT that asks where its data is to be written.
    pub(super) fn put_req_arrived(
        &mut self,
        connection: Handle,
        header: lnet::View<'_>,
        cookie: u64,
        again: bool,
        now: Instant,
    ) -> Result<Then, Reason> {
        let lnet::Body::Put {
            ack,
            match_bits,
            hdr_data,
            portal,
            offset,
        } = header.body()
        else {
            return Err(Reason::UnexpectedType);
        };
        let ours = self.is_for_us(header)?;
        if !self.may_start(connection, again) {
            return Ok(Then::Hold);
        }
        let question = of_put(header, portal, match_bits, offset);
        let found = ours.then(|| self.look_up(&question)).flatten();
        let Some(found) = found else {
            self.counters.unmatched.add(1);
            return self.refuse(connection, Role::Nak(0), cookie, again, now);
        };
        let Some((options, token)) = self.prepare(&found) else {
            return Ok(Then::Hold);
        };
        let wants_ack = ack != WireHandle::NONE && !options.contains(EntryOptions::ACK_DISABLE);
        let mut transfer = self.blank(connection, Role::Sink, Some(header), now);
        transfer.cookie = cookie;
        transfer.length = found.length;
        transfer.match_bits = MatchBits(match_bits);
        transfer.hdr_data = hdr_data;
        transfer.token = token;
        transfer.handle = if wants_ack { ack } else { WireHandle::NONE };
        if found.length == 0 {
            // Nothing to be written: PUT_NAK with status 0, and the PUT has succeeded.
            transfer.role = Role::Nak(0);
        } else {
            let chosen = self.choose_in(connection, found.entry, found.offset, found.length);
            let Ok(mechanism) = chosen else {
                self.counters.unmappable.add(u64::from(!again));
                return self.refuse(connection, Role::Nak(EPROTONOSUPPORT), cookie, again, now);
            };
            if !self.cover(&mut transfer, mechanism, found.length) {
                return Ok(Then::Hold);
            }
            transfer.mechanism = Some(mechanism);
        }
        transfer.event = options.contains(EntryOptions::EVENTS) && self.reserve_event();
        if let Some(attached) = self.entries.get_mut(found.entry) {
            attached.engage(&found);
        }
        transfer.place = Place::Entry {
            entry: found.entry,
            offset: found.offset,
        };
        let answered = transfer.role == Role::Sink;
        if let Some(handle) = self.admit(transfer) {
            let input = if self.takes_mapping(handle) {
                Input::Unmapped
            } else {
                Input::Completed
            };
            self.apply(handle, input);
        }
        // After a PUT_ACK this receive is the one for the PUT_DONE, and the credit comes back after that.
        Ok(Then::Repost { owe: !answered })
    }

    /// A GET whose data we write.
    #[inline(always)]
    pub(super) fn get_req_arrived(
        &mut self,
        connection: Handle,
        header: lnet::View<'_>,
        cookie: u64,
        sink: &Descriptor<'_>,
        again: bool,
        now: Instant,
    ) -> Result<Then, Reason> {
        let lnet::Body::Get {
            match_bits,
            portal,
            offset,
            sink_length,
            ..
        } = header.body()
        else {
            return Err(Reason::UnexpectedType);
        };
        if header.destination() != self.limits.nid {
            return Err(Reason::WrongAddress);
        }
        if !self.may_start(connection, again) {
            return Ok(Then::Hold);
        }
        let mut transfer = self.blank(connection, Role::Source, Some(header), now);
        transfer.phase = Phase::Data;
        transfer.cookie = cookie;
        transfer.match_bits = MatchBits(match_bits);
        transfer.sink_key = sink.key();
        let only = sink.only();
        let room = room_in(sink, only);
        if Self::is_ping(portal, match_bits) {
            transfer.place = Place::Ping;
            transfer.length = room.min(PING_BYTES);
        } else {
            let question = of_get(header, portal, match_bits, offset, sink_length);
            let Some(found) = self.look_up(&question) else {
                self.counters.unmatched.add(1);
                return self.refuse(connection, Role::Refusal(ENODATA), cookie, again, now);
            };
            let Some((options, token)) = self.prepare(&found) else {
                return Ok(Then::Hold);
            };
            transfer.token = token;
            transfer.event = options.contains(EntryOptions::EVENTS) && self.reserve_event();
            if let Some(attached) = self.entries.get_mut(found.entry) {
                attached.engage(&found);
            }
            transfer.place = Place::Entry {
                entry: found.entry,
                offset: found.offset,
            };
            transfer.length = found.length.min(room);
        }
        transfer.fills_sink = transfer.length == room;
        transfer.outcome = Ok(transfer.length);
        let lend = only.is_none();
        if let Some(fragment) = only {
            transfer.sink = Sink::One(fragment);
        }
        let Some(handle) = self.admit(transfer) else {
            return Ok(REPOST_OWE);
        };
        self.advance(handle, Input::Completed);
        Ok(if lend {
            Then::Lend {
                to: handle,
                located: sink.locate(),
                owe: true,
            }
        } else {
            REPOST_OWE
        })
    }
}

/// Where a PUT lands.
#[inline]
fn of_put(header: lnet::View<'_>, portal: u32, match_bits: u64, offset: u32) -> Question {
    Question {
        put: true,
        portal: Portal(portal),
        match_bits: MatchBits(match_bits),
        from: header.source(),
        offset,
        length: header.payload_length(),
    }
}

/// Where a GET of so many bytes lands.
#[inline]
fn of_get(
    header: lnet::View<'_>,
    portal: u32,
    match_bits: u64,
    offset: u32,
    sink_length: u32,
) -> Question {
    Question {
        put: false,
        portal: Portal(portal),
        match_bits: MatchBits(match_bits),
        from: header.source(),
        offset,
        length: sink_length.min(lnet::MTU),
    }
}
