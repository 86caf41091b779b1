//! What peers send. Nothing of it is trusted: what cannot be ends the connection, with a named reason.

use super::{Poller, Reason, Received};
use crate::connection::State;
use crate::endpoint::{EntryOptions, Error, Event, Incoming, Landed, MatchBits, Portal, Token};
use crate::memory::Buffer;
use crate::nic::{Nic, RKey, ReceiveQueue, WrId};
use crate::pool::{Handle, Kind, pack, unpack};
use crate::portal::{self, LNET_PORTAL, PING_BITS, Question};
use crate::time::Instant;
use crate::transfer::{Cursor, Input, Message as Slot, Phase, Place, Role, Sink, Step, Transfer};
use crate::wire::lnet::{self, WireHandle};
use crate::wire::{Body, Descriptor, Done, IMMEDIATE_PAYLOAD, MESSAGE_BYTES, Message, ping};

/// What becomes of the receive whose message was judged.
enum Then {
    /// It is posted again; `owe`: the peer has its credit coming.
    Repost { owe: bool },
    /// It waits until there is room for what it asks.
    Hold,
    /// The same for the REPLY to a GET of ours.
    HoldReply,
    /// The transfer reads on in it.
    Lend { to: Handle, owe: bool },
}

/// Under which circumstances a message is judged.
#[derive(Clone, Copy)]
struct Circumstances {
    /// It was held before.
    again: bool,
    /// The credits in its header have been counted.
    counted: bool,
    /// The key of ours that it killed.
    invalidated: Option<RKey>,
    now: Instant,
}

const REPOST: Then = Then::Repost { owe: false };
const REPOST_OWE: Then = Then::Repost { owe: true };

/// Bytes of our ping info.
pub(super) const PING_BYTES: u32 = 48;
const _: () = assert!(PING_BYTES as usize == ping::BYTES);

/// -ENODATA: no buffer matches.
const ENODATA: i32 = -61;
/// -EPROTONOSUPPORT: no mechanism covers the buffer.
const EPROTONOSUPPORT: i32 = -93;

impl<'a, N: Nic> Poller<'a, N> {
    /// A receive has received.
    pub(super) fn received(
        &mut self,
        id: WrId,
        length: u32,
        invalidated: Option<RKey>,
        now: Instant,
    ) {
        let Some((Kind::Receive, handle)) = unpack(id) else {
            self.counters.stale_completions.add(1);
            return;
        };
        let Some(receive) = self.receives.get_mut(handle) else {
            self.counters.stale_completions.add(1);
            return;
        };
        let connection = receive.connection;
        let buffer = match core::mem::replace(&mut receive.state, Received::Lent) {
            Received::Posted(posted) => posted.completed(),
            other => {
                receive.state = other;
                self.counters.stale_completions.add(1);
                return;
            }
        };
        let Some(state) = self.connections.get_mut(connection) else {
            self.receives.remove(handle);
            self.messages.give(buffer);
            return;
        };
        state.posted_receives = state.posted_receives.saturating_sub(1);
        if state.state == State::Accepted {
            // The peer talks: the connection is up, whatever became of its RTU (LU-8303).
            state.state = State::Established;
        }
        match state.state {
            State::Closing => {
                self.receives.remove(handle);
                self.messages.give(buffer);
                self.list(connection);
                self.killed(invalidated);
            }
            // No key was given yet: it is somebody else's.
            State::Adopted if invalidated.is_some() => {
                self.receives.remove(handle);
                self.messages.give(buffer);
                self.killed(invalidated);
                self.close(connection, Reason::BadInvalidate);
            }
            // The peer's part of the terms is not known yet: what comes early waits (LU-10800).
            State::Adopted => {
                let held = Received::Held {
                    buffer,
                    length,
                    counted: false,
                };
                self.hold(connection, handle, held, false);
            }
            State::Accepted | State::Established => {
                let circumstances = Circumstances {
                    again: false,
                    counted: false,
                    invalidated,
                    now,
                };
                self.take(connection, handle, buffer, length, circumstances);
            }
        }
    }

    /// Looks again at messages that were held, oldest first.
    pub(super) fn take_held(&mut self, connection: Handle, now: Instant) -> u32 {
        let mut work = self.take_held_replies(connection, now);
        loop {
            let Some(state) = self.connections.get_mut(connection) else {
                return work;
            };
            if !state.takes_messages() {
                return work;
            }
            let waiting = state.held.len();
            let Some(handle) = self.receives.pop_front(&mut state.held) else {
                return work;
            };
            self.take_again(connection, handle, now);
            let stuck = self
                .connections
                .get(connection)
                .is_none_or(|state| state.held.len() >= waiting);
            if stuck {
                return work;
            }
            work = work.saturating_add(1);
        }
    }

    /// Looks at each held REPLY once: none of them waits for another.
    fn take_held_replies(&mut self, connection: Handle, now: Instant) -> u32 {
        let waiting = self
            .connections
            .get(connection)
            .map_or(0, |state| state.held_replies.len());
        for _ in 0..waiting {
            if let Some(state) = self.connections.get_mut(connection)
                && state.takes_messages()
                && let Some(handle) = self.receives.pop_front(&mut state.held_replies)
            {
                self.take_again(connection, handle, now);
            }
        }
        let left = self
            .connections
            .get(connection)
            .map_or(0, |state| state.held_replies.len());
        u32::try_from(waiting.saturating_sub(left)).unwrap_or(u32::MAX)
    }

    fn take_again(&mut self, connection: Handle, handle: Handle, now: Instant) {
        let Some(receive) = self.receives.get_mut(handle) else {
            return;
        };
        if let Received::Held {
            buffer,
            length,
            counted,
        } = core::mem::replace(&mut receive.state, Received::Lent)
        {
            let circumstances = Circumstances {
                again: true,
                counted,
                invalidated: None,
                now,
            };
            self.take(connection, handle, buffer, length, circumstances);
        }
    }

    fn take(
        &mut self,
        connection: Handle,
        handle: Handle,
        buffer: Buffer<'a>,
        length: u32,
        circumstances: Circumstances,
    ) {
        let again = circumstances.again;
        let bytes = buffer.peek().get(..length as usize).unwrap_or_default();
        let verdict = self.judge(connection, bytes, circumstances);
        match verdict {
            Ok(Then::Repost { owe }) => self.repost(connection, handle, buffer, owe),
            Ok(then @ (Then::Hold | Then::HoldReply)) => {
                if !again {
                    self.counters.holds.add(1);
                }
                let held = Received::Held {
                    buffer,
                    length,
                    counted: true,
                };
                if matches!(then, Then::Hold) {
                    self.hold(connection, handle, held, again);
                } else {
                    self.hold_reply(connection, handle, held);
                }
            }
            Ok(Then::Lend { to, owe }) => {
                let located = match Message::decode(buffer.peek()) {
                    Ok((message, _)) => match message.body {
                        Body::PutAck { sink, .. } | Body::GetReq { sink, .. } => {
                            Some(sink.locate())
                        }
                        _ => None,
                    },
                    Err(_) => None,
                };
                match (located, self.transfers.get_mut(to)) {
                    (Some(located), Some(transfer)) => {
                        transfer.sink = Sink::Many {
                            receive: handle,
                            message: buffer,
                            located,
                            owe,
                        };
                    }
                    _ => self.repost(connection, handle, buffer, owe),
                }
            }
            Err(why) => {
                self.receives.remove(handle);
                self.messages.give(buffer);
                self.killed(circumstances.invalidated);
                self.close(connection, why);
            }
        }
    }

    /// A peer killed a key that it was not to kill, perhaps that of another connection: where keys are good
    /// in a whole protection domain, the device cannot tell. Dead it is; to invalidate it once more would
    /// fail that connection, and some drivers do not survive it.
    fn killed(&mut self, key: Option<RKey>) {
        let Some(key) = key else {
            return;
        };
        for index in 0..self.transfers.capacity() {
            if let Some(handle) = self.transfers.at(index)
                && let Some(transfer) = self.transfers.get_mut(handle)
                && let Some(window) = &mut transfer.window
                && window.may_be_alive()
                && window.key() == key
            {
                window.dead();
                self.counters.remote_invalidations.add(1);
                self.key_died();
            }
        }
    }

    /// One that was held before goes back to its place, a new one behind all others.
    fn hold(&mut self, connection: Handle, handle: Handle, held: Received<'a>, again: bool) {
        if let Some(receive) = self.receives.get_mut(handle) {
            receive.state = held;
        }
        if let Some(state) = self.connections.get_mut(connection) {
            if again {
                self.receives.push_front(&mut state.held, handle);
            } else {
                self.receives.push_back(&mut state.held, handle);
            }
        }
        self.list(connection);
    }

    fn hold_reply(&mut self, connection: Handle, handle: Handle, held: Received<'a>) {
        if let Some(receive) = self.receives.get_mut(handle) {
            receive.state = held;
        }
        if let Some(state) = self.connections.get_mut(connection) {
            self.receives.push_back(&mut state.held_replies, handle);
        }
        self.list(connection);
    }

    /// Posts a receive again. The credit it is worth is owed only once it is posted.
    pub(super) fn repost(
        &mut self,
        connection: Handle,
        handle: Handle,
        buffer: Buffer<'a>,
        owe: bool,
    ) {
        let alive = self
            .connections
            .get_mut(connection)
            .filter(|state| state.state != State::Closing);
        let Some(state) = alive else {
            self.receives.remove(handle);
            self.messages.give(buffer);
            return;
        };
        let Some(receive) = self.receives.get_mut(handle) else {
            self.messages.give(buffer);
            return;
        };
        let posted = buffer.post();
        let sge = posted.sge(MESSAGE_BYTES);
        let id = pack(Kind::Receive, handle);
        if self
            .nic
            .receive(ReceiveQueue::Of(state.qp), id, sge)
            .is_ok()
        {
            receive.state = Received::Posted(posted);
            state.posted_receives = state.posted_receives.saturating_add(1);
            self.counters.receives.add(1);
            if owe {
                state.credits.owe();
                if state.credits.at_high_water() {
                    self.list(connection);
                }
            }
        } else {
            receive.state = Received::Idle {
                buffer: posted.completed(),
                owe,
            };
            self.receives.push_back(&mut state.reposts, handle);
            self.list(connection);
        }
    }

    /// What a message means, and what becomes of its receive.
    fn judge(
        &mut self,
        connection: Handle,
        bytes: &[u8],
        circumstances: Circumstances,
    ) -> Result<Then, Reason> {
        let Circumstances {
            again,
            counted,
            invalidated,
            now,
        } = circumstances;
        let (message, _) = Message::decode(bytes).map_err(Reason::Malformed)?;
        let Some(state) = self.connections.get_mut(connection) else {
            return Ok(REPOST);
        };
        let envelope = &message.envelope;
        state.terms.check(envelope).map_err(Reason::Stale)?;
        if !counted {
            self.counters.messages_received.add(1);
            state
                .credits
                .returned(envelope.credits)
                .map_err(|_| Reason::BadCredits)?;
            if envelope.credits != 0 {
                self.list(connection);
            }
        }
        if invalidated.is_some() && !matches!(message.body, Body::PutDone(_) | Body::GetDone(_)) {
            return Err(Reason::BadInvalidate);
        }
        match message.body {
            Body::Noop => Ok(REPOST),
            Body::ConnReq(_) | Body::ConnAck(_) => Err(Reason::UnexpectedType),
            Body::Immediate { header, payload } => {
                if !self.is_for_us(&header)? {
                    return Ok(REPOST_OWE);
                }
                match header.body {
                    lnet::Body::Put { .. } => {
                        self.put_arrived(connection, &header, payload, again, now)
                    }
                    lnet::Body::Get { .. } => self.get_arrived(connection, &header, again, now),
                    lnet::Body::Ack { handle, length, .. } => {
                        self.ack_arrived(connection, handle, length)
                    }
                    lnet::Body::Reply { handle } => self.reply_arrived(connection, handle, payload),
                    lnet::Body::Hello { .. } => Err(Reason::UnexpectedType),
                }
            }
            Body::PutReq { header, cookie } => match header.body {
                lnet::Body::Put { .. } => {
                    self.put_req_arrived(connection, &header, cookie, again, now)
                }
                lnet::Body::Reply { handle } => {
                    self.reply_req_arrived(connection, &header, handle, cookie, again, now)
                }
                _ => Err(Reason::UnexpectedType),
            },
            Body::GetReq {
                header,
                cookie,
                sink,
            } => self.get_req_arrived(connection, &header, cookie, &sink, again, now),
            Body::PutAck {
                source_cookie,
                sink_cookie,
                sink,
            } => self.put_ack_arrived(connection, source_cookie, sink_cookie, &sink),
            Body::PutNak(done) => self.put_nak_arrived(connection, done),
            Body::PutDone(done) => {
                self.done_arrived(connection, done, Input::PutDone, invalidated)?;
                Ok(REPOST_OWE)
            }
            Body::GetDone(done) => {
                self.done_arrived(connection, done, Input::GetDone, invalidated)?;
                self.unreserve(connection);
                Ok(REPOST)
            }
        }
    }

    /// Whether the LNet message is ours. One for another network is dropped, since this node does not
    /// route; one for another node of our own network cannot be.
    fn is_for_us(&self, header: &lnet::Header) -> Result<bool, Reason> {
        let (to, us) = (header.destination, self.limits.nid);
        if to == us {
            Ok(true)
        } else if (to.lnd(), to.number()) == (us.lnd(), us.number()) {
            Err(Reason::WrongAddress)
        } else {
            Ok(false)
        }
    }

    /// A transfer of this connection by the cookie we gave the peer.
    fn by_cookie(&mut self, connection: Handle, cookie: u64) -> Result<Handle, Reason> {
        let handle = Handle::from_bits(cookie);
        match self.transfers.get(handle) {
            Some(transfer) if transfer.connection == connection => Ok(handle),
            _ => Err(Reason::UnexpectedAnswer),
        }
    }

    /// A GET or PUT of ours by the LNet handle we gave the peer.
    fn by_handle(&self, connection: Handle, handle: WireHandle, role: Role) -> Option<Handle> {
        let (stamp, bits) = handle.words();
        let handle = Handle::from_bits(bits);
        let transfer = self.transfers.get(handle)?;
        (stamp == self.limits.stamp && transfer.connection == connection && transfer.role == role)
            .then_some(handle)
    }

    fn unreserve(&mut self, connection: Handle) {
        if let Some(state) = self.connections.get_mut(connection) {
            state.credits.unreserve();
        }
        self.list(connection);
    }

    fn put_ack_arrived(
        &mut self,
        connection: Handle,
        source_cookie: u64,
        sink_cookie: u64,
        sink: &Descriptor<'_>,
    ) -> Result<Then, Reason> {
        let handle = self.by_cookie(connection, source_cookie)?;
        let lend = sink.len() > 1;
        if let Some(transfer) = self.transfers.get_mut(handle)
            && transfer.phase == Phase::AskedPut
        {
            transfer.cookie = sink_cookie;
            transfer.sink_key = sink.key();
            transfer.length = u32::try_from(sink.length())
                .unwrap_or(u32::MAX)
                .min(transfer.length);
            if let (false, Some(fragment)) = (lend, sink.get(0)) {
                transfer.sink = Sink::One(fragment);
            }
            transfer.reserved = false;
        }
        if self.apply(handle, Input::PutAck) == Step::Violation {
            return Err(Reason::UnexpectedAnswer);
        }
        self.unreserve(connection);
        Ok(if lend {
            Then::Lend {
                to: handle,
                owe: false,
            }
        } else {
            REPOST
        })
    }

    fn put_nak_arrived(&mut self, connection: Handle, done: Done) -> Result<Then, Reason> {
        let handle = self.by_cookie(connection, done.cookie)?;
        if let Some(transfer) = self.transfers.get_mut(handle)
            && transfer.phase == Phase::AskedPut
        {
            // 0: the sink wants nothing, or nothing there matched; LNet calls that a success.
            transfer.outcome = match done.status {
                0 => Ok(0),
                status if status < 0 => Err(Error::Peer(status)),
                _ => return Err(Reason::BadLength),
            };
            transfer.reserved = false;
        }
        if self.apply(handle, Input::PutNak) == Step::Violation {
            return Err(Reason::UnexpectedAnswer);
        }
        self.unreserve(connection);
        Ok(REPOST)
    }

    /// PUT_DONE or GET_DONE: the data is in our memory, and the key to it must die now.
    fn done_arrived(
        &mut self,
        connection: Handle,
        done: Done,
        input: Input,
        invalidated: Option<RKey>,
    ) -> Result<(), Reason> {
        let handle = self.by_cookie(connection, done.cookie)?;
        let Some(transfer) = self.transfers.get_mut(handle) else {
            return Err(Reason::UnexpectedAnswer);
        };
        let waits = matches!(
            (transfer.phase, input),
            (Phase::Answered, Input::PutDone) | (Phase::AskedGet, Input::GetDone)
        );
        if !waits {
            return Err(Reason::UnexpectedAnswer);
        }
        let outcome = match u32::try_from(done.status) {
            Ok(bytes) if bytes <= transfer.length => Ok(bytes),
            Ok(_) => return Err(Reason::BadLength),
            Err(_) => Err(Error::Peer(done.status)),
        };
        if let Some(key) = invalidated {
            match &mut transfer.window {
                Some(window) if window.may_be_alive() && window.key() == key => {
                    window.dead();
                }
                _ => return Err(Reason::BadInvalidate),
            }
        }
        transfer.outcome = outcome;
        let alive = transfer.window.as_ref();
        let dead = !alive.is_some_and(crate::registration::Descriptor::may_be_alive);
        if input == Input::GetDone {
            transfer.reserved = false;
        }
        self.apply(handle, input);
        if invalidated.is_some() {
            self.counters.remote_invalidations.add(1);
            self.key_died();
        }
        if dead {
            self.apply(handle, Input::Dead);
        }
        Ok(())
    }

    fn ack_arrived(
        &mut self,
        connection: Handle,
        handle: WireHandle,
        length: u32,
    ) -> Result<Then, Reason> {
        let known = self.by_handle(connection, handle, Role::Put);
        let mut ignored = true;
        if let Some(handle) = known
            && let Some(transfer) = self.transfers.get_mut(handle)
            && transfer.handle != WireHandle::NONE
        {
            if length > transfer.length {
                return Err(Reason::BadLength);
            }
            // An ACK that nobody waits for says nothing.
            if matches!(transfer.phase, Phase::SentWantsAck | Phase::AwaitAck) {
                transfer.outcome = Ok(length);
            }
            ignored = self.apply(handle, Input::Ack) == Step::Ignore;
        }
        if ignored {
            self.counters.unknown_replies.add(1);
        }
        Ok(REPOST_OWE)
    }

    fn reply_arrived(
        &mut self,
        connection: Handle,
        handle: WireHandle,
        payload: &[u8],
    ) -> Result<Then, Reason> {
        let Some(handle) = self.by_handle(connection, handle, Role::Get) else {
            self.counters.unknown_replies.add(1);
            return Ok(REPOST_OWE);
        };
        let Some(transfer) = self.transfers.get_mut(handle) else {
            return Ok(REPOST_OWE);
        };
        if transfer.phase != Phase::AskedReply {
            self.counters.unknown_replies.add(1);
            return Ok(REPOST_OWE);
        }
        let length = u32::try_from(payload.len()).unwrap_or(u32::MAX);
        if length > transfer.length {
            return Err(Reason::BadLength);
        }
        if let Place::Own(memory) = &mut transfer.place {
            memory.write_at(0, payload);
        }
        transfer.outcome = Ok(length);
        self.apply(handle, Input::Reply);
        Ok(REPOST_OWE)
    }

    /// A REPLY too large for a message: our GET becomes a sink.
    fn reply_req_arrived(
        &mut self,
        connection: Handle,
        header: &lnet::Header,
        handle: WireHandle,
        cookie: u64,
        again: bool,
        now: Instant,
    ) -> Result<Then, Reason> {
        let ours = self.is_for_us(header)?;
        let known = self
            .by_handle(connection, handle, Role::Get)
            .filter(|handle| {
                ours && self
                    .transfers
                    .get(*handle)
                    .is_some_and(|transfer| transfer.phase == Phase::AskedReply)
            });
        let Some(handle) = known else {
            if !again {
                self.counters.unknown_replies.add(1);
            }
            return Ok(self.refuse_reply(connection, 0, cookie, now));
        };
        let too_long = self
            .transfers
            .get(handle)
            .is_none_or(|transfer| header.payload_length > transfer.length);
        if too_long {
            return Err(Reason::BadLength);
        }
        if header.payload_length == 0 {
            let then = self.refuse_reply(connection, 0, cookie, now);
            if !matches!(then, Then::HoldReply) {
                self.apply(handle, Input::Reply);
            }
            return Ok(then);
        }
        let Some(transfer) = self.transfers.get_mut(handle) else {
            return Ok(REPOST);
        };
        // For a small GET nobody checked yet whether a window could cover its memory.
        let mappable = match &transfer.place {
            Place::Own(memory) => {
                let pieces = memory.slice(0, header.payload_length);
                self.scratch.lay_out(&self.capabilities, pieces).is_some()
            }
            _ => false,
        };
        if !mappable {
            let then = self.refuse_reply(connection, EPROTONOSUPPORT, cookie, now);
            if !matches!(then, Then::HoldReply) {
                if let Some(transfer) = self.transfers.get_mut(handle) {
                    transfer.outcome = Err(Error::Unmappable);
                }
                self.apply(handle, Input::Reply);
            }
            return Ok(then);
        }
        let Some(window) = self.windows.take(true) else {
            return Ok(Then::HoldReply);
        };
        transfer.window = Some(window);
        transfer.cookie = cookie;
        transfer.length = header.payload_length;
        self.apply(handle, Input::ReplyRequest);
        Ok(REPOST)
    }

    /// Whether a request that just came must queue behind others that wait.
    fn must_queue(&self, connection: Handle, again: bool) -> bool {
        !again
            && self
                .connections
                .get(connection)
                .is_some_and(|state| !state.held.is_empty())
    }

    /// Whether there is a share of the queue pair, a slot and a buffer for a transfer of the peer.
    fn has_share(&self, connection: Handle) -> bool {
        self.has_shares(connection, 0)
    }

    fn has_shares(&self, connection: Handle, extra: u16) -> bool {
        !self.messages.is_empty()
            && self.transfers.vacant() > 0
            && self
                .connections
                .get(connection)
                .is_some_and(|state| state.peers < state.terms.queue_depth.saturating_add(extra))
    }

    /// Starts a transfer of the peer. `has_share` said that there is room.
    fn admit(&mut self, mut transfer: Transfer<'a>) -> Option<Handle> {
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

    fn blank(
        &self,
        connection: Handle,
        role: Role,
        header: Option<&lnet::Header>,
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
            message: None,
            cookie: 0,
            sink: Sink::None,
            sink_key: RKey(0),
            cursor: Cursor::default(),
            token: Token(0),
            portal: Portal(0),
            match_bits: MatchBits(0),
            remote_offset: 0,
            hdr_data: 0,
            handle: WireHandle::NONE,
            peer: header.map_or((self.limits.nid, self.limits.pid), |header| {
                (header.source, header.source_pid)
            }),
            event: false,
            queued: false,
            reserved: false,
            admitted: true,
        }
    }

    /// Answers with PUT_NAK or a negative GET_DONE.
    fn refuse(
        &mut self,
        connection: Handle,
        role: Role,
        cookie: u64,
        again: bool,
        now: Instant,
    ) -> Result<Then, Reason> {
        if self.must_queue(connection, again) || !self.has_share(connection) {
            return Ok(Then::Hold);
        }
        self.turn_down(connection, role, cookie, now);
        Ok(REPOST_OWE)
    }

    /// Answers a REPLY that nobody waits for with PUT_NAK.
    ///
    /// It may take one slot beyond the peer's share. That share may be full of REPLYs of ours, which wait for
    /// the answers of a peer in the same position: both had given up on their GETs.
    fn refuse_reply(&mut self, connection: Handle, status: i32, cookie: u64, now: Instant) -> Then {
        if !self.has_shares(connection, 1) {
            return Then::HoldReply;
        }
        self.turn_down(connection, Role::Nak(status), cookie, now);
        REPOST_OWE
    }

    fn turn_down(&mut self, connection: Handle, role: Role, cookie: u64, now: Instant) {
        let mut transfer = self.blank(connection, role, None, now);
        transfer.cookie = cookie;
        if let Some(handle) = self.admit(transfer) {
            self.apply(handle, Input::Completed);
        }
    }

    /// Where an incoming PUT or GET lands. `Some(None)`: nowhere.
    fn look_up(&mut self, header: &lnet::Header) -> Option<portal::Match> {
        let question = match header.body {
            lnet::Body::Put {
                match_bits,
                portal,
                offset,
                ..
            } => Question {
                put: true,
                portal: Portal(portal),
                match_bits: MatchBits(match_bits),
                from: header.source,
                offset,
                length: header.payload_length,
            },
            lnet::Body::Get {
                match_bits,
                portal,
                offset,
                sink_length,
                ..
            } => Question {
                put: false,
                portal: Portal(portal),
                match_bits: MatchBits(match_bits),
                from: header.source,
                offset,
                length: sink_length.min(lnet::MTU),
            },
            _ => return None,
        };
        portal::find(&self.entries, &self.attached, &question)
    }

    /// The options and token of a matched entry, and whether its event, if it wants one, has room.
    fn prepare(&mut self, found: &portal::Match) -> Option<(EntryOptions, Token)> {
        let attached = self.entries.get(found.entry)?;
        let (options, token) = (attached.entry.options, attached.entry.token);
        if options.contains(EntryOptions::EVENTS) && self.ends.events.free() <= self.events_due {
            return None;
        }
        Some((options, token))
    }

    /// A PUT in a message.
    fn put_arrived(
        &mut self,
        connection: Handle,
        header: &lnet::Header,
        payload: &[u8],
        again: bool,
        now: Instant,
    ) -> Result<Then, Reason> {
        let lnet::Body::Put {
            ack,
            match_bits,
            hdr_data,
            ..
        } = header.body
        else {
            return Err(Reason::UnexpectedType);
        };
        if self.must_queue(connection, again) {
            return Ok(Then::Hold);
        }
        let Some(found) = self.look_up(header) else {
            self.counters.unmatched.add(1);
            return Ok(REPOST_OWE);
        };
        let Some((options, token)) = self.prepare(&found) else {
            return Ok(Then::Hold);
        };
        let wants_ack = ack != WireHandle::NONE && !options.contains(EntryOptions::ACK_DISABLE);
        if wants_ack && !self.has_share(connection) {
            return Ok(Then::Hold);
        }
        portal::engage(&mut self.entries, &found);
        if let Some(attached) = self.entries.get_mut(found.entry) {
            let taken = payload.get(..found.length as usize).unwrap_or(payload);
            attached.entry.memory.write_at(found.offset, taken);
        }
        if options.contains(EntryOptions::EVENTS) && self.reserve_event() {
            self.tell(Event::Landed(Landed {
                token,
                operation: Incoming::Put { hdr_data },
                nid: header.source,
                pid: header.source_pid,
                match_bits: MatchBits(match_bits),
                offset: u32::try_from(found.offset).unwrap_or(u32::MAX),
                outcome: Ok(found.length),
            }));
        }
        self.release_entry(found.entry);
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
    fn get_arrived(
        &mut self,
        connection: Handle,
        header: &lnet::Header,
        again: bool,
        now: Instant,
    ) -> Result<Then, Reason> {
        let lnet::Body::Get {
            reply,
            match_bits,
            portal,
            sink_length,
            ..
        } = header.body
        else {
            return Err(Reason::UnexpectedType);
        };
        if self.must_queue(connection, again) || !self.has_share(connection) {
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
            let Some(found) = self.look_up(header) else {
                self.counters.unmatched.add(1);
                return Ok(REPOST_OWE);
            };
            let Some((options, token)) = self.prepare(&found) else {
                return Ok(Then::Hold);
            };
            transfer.token = token;
            transfer.event = options.contains(EntryOptions::EVENTS) && self.reserve_event();
            portal::engage(&mut self.entries, &found);
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

    const fn is_ping(portal: u32, match_bits: u64) -> bool {
        portal == LNET_PORTAL.0 && match_bits == PING_BITS.0
    }

    /// A PUT that asks where its data is to be written.
    fn put_req_arrived(
        &mut self,
        connection: Handle,
        header: &lnet::Header,
        cookie: u64,
        again: bool,
        now: Instant,
    ) -> Result<Then, Reason> {
        let lnet::Body::Put {
            ack,
            match_bits,
            hdr_data,
            ..
        } = header.body
        else {
            return Err(Reason::UnexpectedType);
        };
        let ours = self.is_for_us(header)?;
        if self.must_queue(connection, again) || !self.has_share(connection) {
            return Ok(Then::Hold);
        }
        let found = if ours { self.look_up(header) } else { None };
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
            let mappable = self.entries.get(found.entry).is_some_and(|attached| {
                let list = &*attached.entry.memory;
                self.scratch
                    .can_lay_out(&self.capabilities, list, found.offset, found.length)
            });
            if !mappable {
                return self.refuse(connection, Role::Nak(EPROTONOSUPPORT), cookie, again, now);
            }
            let Some(window) = self.windows.take(false) else {
                return Ok(Then::Hold);
            };
            transfer.window = Some(window);
        }
        transfer.event = options.contains(EntryOptions::EVENTS) && self.reserve_event();
        portal::engage(&mut self.entries, &found);
        transfer.place = Place::Entry {
            entry: found.entry,
            offset: found.offset,
        };
        let answered = transfer.role == Role::Sink;
        if let Some(handle) = self.admit(transfer) {
            self.apply(handle, Input::Completed);
        }
        // After a PUT_ACK this receive is the one for the PUT_DONE, and the credit comes back after that.
        Ok(Then::Repost { owe: !answered })
    }

    /// A GET whose data we write.
    fn get_req_arrived(
        &mut self,
        connection: Handle,
        header: &lnet::Header,
        cookie: u64,
        sink: &Descriptor<'_>,
        again: bool,
        now: Instant,
    ) -> Result<Then, Reason> {
        let lnet::Body::Get {
            match_bits, portal, ..
        } = header.body
        else {
            return Err(Reason::UnexpectedType);
        };
        if header.destination != self.limits.nid {
            return Err(Reason::WrongAddress);
        }
        if self.must_queue(connection, again) || !self.has_share(connection) {
            return Ok(Then::Hold);
        }
        let mut transfer = self.blank(connection, Role::Source, Some(header), now);
        transfer.phase = Phase::Data;
        transfer.cookie = cookie;
        transfer.match_bits = MatchBits(match_bits);
        transfer.sink_key = sink.key();
        let room = u32::try_from(sink.length()).unwrap_or(u32::MAX);
        if Self::is_ping(portal, match_bits) {
            transfer.place = Place::Ping;
            transfer.length = room.min(PING_BYTES);
        } else {
            let Some(found) = self.look_up(header) else {
                self.counters.unmatched.add(1);
                return self.refuse(connection, Role::Refusal(ENODATA), cookie, again, now);
            };
            let Some((options, token)) = self.prepare(&found) else {
                return Ok(Then::Hold);
            };
            transfer.token = token;
            transfer.event = options.contains(EntryOptions::EVENTS) && self.reserve_event();
            portal::engage(&mut self.entries, &found);
            transfer.place = Place::Entry {
                entry: found.entry,
                offset: found.offset,
            };
            transfer.length = found.length.min(room);
        }
        transfer.outcome = Ok(transfer.length);
        let lend = sink.len() > 1;
        if let (false, Some(fragment)) = (lend, sink.get(0)) {
            transfer.sink = Sink::One(fragment);
        }
        let Some(handle) = self.admit(transfer) else {
            return Ok(REPOST_OWE);
        };
        self.apply(handle, Input::Completed);
        Ok(if lend {
            Then::Lend {
                to: handle,
                owe: true,
            }
        } else {
            REPOST_OWE
        })
    }
}
