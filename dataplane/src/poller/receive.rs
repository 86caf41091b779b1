//! What peers send. Nothing of it is trusted: what cannot be ends the connection, with a named reason.

use super::{Poller, Reason, Received};
use crate::connection::State;
use crate::memory::Buffer;
use crate::nic::{Nic, RKey, ReceiveQueue, WrId};
use crate::peer::Immediate;
use crate::pool::{self, Handle, pack, unpack};
use crate::time::Instant;
use crate::transfer::{Input, Sink};
use crate::wire::lnet::{self};
use crate::wire::{Kind, Located, MESSAGE_BYTES, Opened, ping};

/// What becomes of the receive whose message was judged.
pub(super) enum Then {
    /// It is posted again; `owe`: the peer has its credit coming.
    Repost { owe: bool },
    /// It waits until there is room for what it asks.
    Hold,
    /// The same for the REPLY to a GET of ours.
    HoldReply,
    /// The transfer reads on in it, where the fragments of its peer's sink stand.
    Lend {
        to: Handle,
        located: Located,
        owe: bool,
    },
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
    /// It is no message but a WRITE of so many bytes, with this immediate data.
    written: Option<(u32, Immediate)>,
    now: Instant,
}

pub(super) const REPOST: Then = Then::Repost { owe: false };
pub(super) const REPOST_OWE: Then = Then::Repost { owe: true };

/// Bytes of our ping info.
pub(super) const PING_BYTES: u32 = 48;
const _: () = assert!(PING_BYTES as usize == ping::BYTES);

/// -ENODATA: no buffer matches.
pub(super) const ENODATA: i32 = -61;
/// -ENOMEM: the control side could not map the buffer.
pub(super) const ENOMEM: i32 = -12;
/// -ETIMEDOUT: it did not in time.
pub(super) const ETIMEDOUT: i32 = -110;
/// -EPROTONOSUPPORT: no mechanism covers the buffer.
pub(super) const EPROTONOSUPPORT: i32 = -93;

impl<'a, N: Nic> Poller<'a, N> {
    /// A receive has received.
    #[inline(never)]
    pub(super) fn received(
        &mut self,
        id: WrId,
        length: u32,
        imm: Option<u32>,
        invalidated: Option<RKey>,
        now: Instant,
    ) {
        let Some((pool::Kind::Receive, handle)) = unpack(id) else {
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
            self.list(connection);
        } else if state.state != State::Established {
            self.received_early(connection, handle, buffer, length, imm, invalidated);
            return;
        }
        let circumstances = Circumstances {
            again: false,
            counted: false,
            invalidated,
            written: imm.map(|bits| (length, Immediate::from_bits(bits))),
            now,
        };
        self.take(connection, handle, buffer, length, circumstances);
    }

    /// A receive of a connection that is not established, or not any more.
    #[cold]
    fn received_early(
        &mut self,
        connection: Handle,
        handle: Handle,
        buffer: Buffer<'a>,
        length: u32,
        imm: Option<u32>,
        invalidated: Option<RKey>,
    ) {
        let is_closing = self
            .connections
            .get(connection)
            .is_none_or(|state| state.state == State::Closing);
        if !is_closing && imm.is_none() && invalidated.is_none() {
            // The peer's part of the terms is not known yet: what comes early waits (LU-10800).
            let held = Received::Held {
                buffer,
                length,
                counted: false,
            };
            self.hold(connection, handle, held, false);
            return;
        }
        self.receives.remove(handle);
        self.messages.give(buffer);
        self.killed(invalidated);
        if is_closing {
            self.list(connection);
        } else if invalidated.is_some() {
            // No key was given yet: it is somebody else's.
            self.close(connection, Reason::BadInvalidate);
        } else {
            self.close(connection, Reason::UnexpectedAnswer);
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

    #[inline(never)]
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
                written: None,
                now,
            };
            self.take(connection, handle, buffer, length, circumstances);
        }
    }

    #[inline(always)]
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
            Ok(Then::Repost { owe }) => self.post_again(connection, handle, buffer, owe),
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
            Ok(Then::Lend { to, located, owe }) => match self.transfers.get_mut(to) {
                Some(transfer) => {
                    transfer.sink = Sink::Many {
                        receive: handle,
                        message: buffer,
                        located,
                        owe,
                    };
                }
                None => self.repost(connection, handle, buffer, owe),
            },
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
                if transfer.role.is_sink() {
                    self.key_died();
                }
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
    #[inline(never)]
    pub(super) fn repost(
        &mut self,
        connection: Handle,
        handle: Handle,
        buffer: Buffer<'a>,
        owe: bool,
    ) {
        self.post_again(connection, handle, buffer, owe);
    }

    /// [`repost`](Self::repost), where it is worth to be inlined.
    #[inline(always)]
    fn post_again(&mut self, connection: Handle, handle: Handle, buffer: Buffer<'a>, owe: bool) {
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
        let id = pack(pool::Kind::Receive, handle);
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
    #[inline(always)]
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
            written,
            now,
        } = circumstances;
        if let Some((length, immediate)) = written {
            return self.immediate_arrived(connection, length, immediate);
        }
        let message = Opened::new(bytes).map_err(Reason::Malformed)?;
        let kind = message.kind().map_err(Reason::Malformed)?;
        let Some(state) = self.connections.get_mut(connection) else {
            return Ok(REPOST);
        };
        let envelope = message.envelope();
        state.terms.check(&envelope).map_err(Reason::Stale)?;
        if !counted {
            self.counters.messages_received.add(1);
            state
                .credits
                .returned(envelope.credits)
                .map_err(|_| Reason::BadCredits)?;
        }
        if invalidated.is_some() && !matches!(kind, Kind::PutDone | Kind::GetDone) {
            return Err(Reason::BadInvalidate);
        }
        match kind {
            Kind::Noop => Ok(REPOST),
            Kind::ConnReq | Kind::ConnAck => Err(Reason::UnexpectedType),
            Kind::Immediate => {
                let (header, payload) = match message.immediate() {
                    Ok(parts) => parts,
                    Err(why) => return Err(Reason::Malformed(why)),
                };
                if !self.is_for_us(header)? {
                    return Ok(REPOST_OWE);
                }
                match header.body() {
                    lnet::Body::Put { .. } => {
                        self.put_arrived(connection, header, payload, again, now)
                    }
                    lnet::Body::Get { .. } => self.get_arrived(connection, header, again, now),
                    lnet::Body::Ack { handle, length, .. } => {
                        self.ack_arrived(connection, handle, length)
                    }
                    lnet::Body::Reply { handle } => self.reply_arrived(connection, handle, payload),
                    lnet::Body::Hello { .. } => Err(Reason::UnexpectedType),
                }
            }
            Kind::PutReq => {
                let (header, cookie) = match message.put_req() {
                    Ok(parts) => parts,
                    Err(why) => return Err(Reason::Malformed(why)),
                };
                match header.body() {
                    lnet::Body::Put { .. } => {
                        self.put_req_arrived(connection, header, cookie, again, now)
                    }
                    lnet::Body::Reply { handle } => {
                        self.reply_req_arrived(connection, header, handle, cookie, again, now)
                    }
                    _ => Err(Reason::UnexpectedType),
                }
            }
            Kind::GetReq => {
                let (header, cookie, sink) = match message.get_req() {
                    Ok(parts) => parts,
                    Err(why) => return Err(Reason::Malformed(why)),
                };
                self.get_req_arrived(connection, header, cookie, &sink, again, now)
            }
            Kind::PutAck => {
                let (source_cookie, sink_cookie, sink) = match message.put_ack() {
                    Ok(parts) => parts,
                    Err(why) => return Err(Reason::Malformed(why)),
                };
                self.put_ack_arrived(connection, source_cookie, sink_cookie, &sink)
            }
            Kind::PutNak => {
                let done = message.done().map_err(Reason::Malformed)?;
                self.put_nak_arrived(connection, done)
            }
            Kind::PutDone | Kind::GetDone => {
                let done = message.done().map_err(Reason::Malformed)?;
                let input = if kind == Kind::GetDone {
                    Input::GetDone
                } else {
                    Input::PutDone
                };
                self.done_arrived(connection, done, input, invalidated)
            }
        }
    }

    /// Whether the LNet message is ours. One for another network is dropped, since this node does not
    /// route; one for another node of our own network cannot be.
    #[inline]
    pub(super) fn is_for_us(&self, header: lnet::View<'_>) -> Result<bool, Reason> {
        let (to, us) = (header.destination(), self.limits.nid);
        if to == us {
            Ok(true)
        } else if (to.lnd(), to.number()) == (us.lnd(), us.number()) {
            Err(Reason::WrongAddress)
        } else {
            Ok(false)
        }
    }
}
