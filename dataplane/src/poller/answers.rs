//! What answers transfers of ours: by cookie (PUT_ACK, PUT_NAK, PUT_DONE, GET_DONE) or by LNet handle (ACK,
//! REPLY).

use super::receive::{EPROTONOSUPPORT, REPOST, REPOST_OWE, Then};
use super::{Poller, Reason};
use crate::endpoint::Error;
use crate::nic::{Nic, RKey};
use crate::peer::Immediate;
use crate::pool::Handle;
use crate::time::Instant;
use crate::transfer::{Input, Phase, Place, Role, Sink, Step};
use crate::wire::lnet::{self, WireHandle};
use crate::wire::{Descriptor, Done, Fragment};

impl<N: Nic> Poller<'_, N> {
    /// A transfer of this connection by the cookie we gave the peer.
    pub(super) fn by_cookie(&mut self, connection: Handle, cookie: u64) -> Result<Handle, Reason> {
        let handle = self.transfers.by_cookie(cookie);
        match handle.and_then(|handle| self.transfers.get(handle).zip(Some(handle))) {
            Some((transfer, handle)) if transfer.connection == connection => Ok(handle),
            _ => Err(Reason::UnexpectedAnswer),
        }
    }

    /// A GET or PUT of ours by the LNet handle we gave the peer.
    pub(super) fn by_handle(
        &self,
        connection: Handle,
        handle: WireHandle,
        role: Role,
    ) -> Option<Handle> {
        let (stamp, bits) = handle.words();
        let handle = Handle::from_bits(bits);
        let transfer = self.transfers.get(handle)?;
        (stamp == self.limits.stamp && transfer.connection == connection && transfer.role == role)
            .then_some(handle)
    }

    pub(super) fn unreserve(&mut self, connection: Handle) {
        if let Some(state) = self.connections.get_mut(connection) {
            state.credits.unreserve();
        }
    }

    pub(super) fn put_ack_arrived(
        &mut self,
        connection: Handle,
        source_cookie: u64,
        sink_cookie: u64,
        sink: &Descriptor<'_>,
    ) -> Result<Then, Reason> {
        let handle = self.by_cookie(connection, source_cookie)?;
        let only = sink.only();
        let lend = only.is_none();
        if let Some(transfer) = self.transfers.get_mut(handle)
            && transfer.phase == Phase::AskedPut
        {
            transfer.cookie = sink_cookie;
            transfer.sink_key = sink.key();
            let room = room_in(sink, only);
            transfer.length = room.min(transfer.length);
            transfer.fills_sink = transfer.length == room;
            if let Some(fragment) = only {
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
                located: sink.locate(),
                owe: false,
            }
        } else {
            REPOST
        })
    }

    pub(super) fn put_nak_arrived(
        &mut self,
        connection: Handle,
        done: Done,
    ) -> Result<Then, Reason> {
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
    #[inline(always)]
    pub(super) fn done_arrived(
        &mut self,
        connection: Handle,
        done: Done,
        input: Input,
        invalidated: Option<RKey>,
    ) -> Result<Then, Reason> {
        let handle = self.by_cookie(connection, done.cookie)?;
        self.moved(connection, handle, done.status, input, invalidated)
    }

    /// A WRITE with immediate data: as a PUT_DONE or GET_DONE that says that all of the sink is written. Like a DONE it
    /// proves nothing: a WRITE of no bytes checks no key.
    pub(super) fn immediate_arrived(
        &mut self,
        connection: Handle,
        length: u32,
        immediate: Immediate,
    ) -> Result<Then, Reason> {
        let Some(state) = self.connections.get_mut(connection) else {
            return Ok(REPOST);
        };
        if !state.terms.write_immediates {
            return Err(Reason::UnexpectedType);
        }
        state
            .credits
            .returned(immediate.credits)
            .map_err(|_| Reason::BadCredits)?;
        let handle = self
            .transfers
            .by_short(immediate.cookie)
            .ok_or(Reason::UnexpectedAnswer)?;
        let (input, whole) = match self.transfers.get(handle) {
            Some(transfer) if transfer.connection == connection => (
                if transfer.phase == Phase::AskedGet {
                    Input::GetDone
                } else {
                    Input::PutDone
                },
                transfer.length,
            ),
            _ => return Err(Reason::UnexpectedAnswer),
        };
        if length > whole {
            return Err(Reason::BadLength);
        }
        let status = i32::try_from(whole).map_err(|_| Reason::BadLength)?;
        self.moved(connection, handle, status, input, None)
    }

    /// The peer is done with the sink of this transfer.
    fn moved(
        &mut self,
        connection: Handle,
        handle: Handle,
        status: i32,
        input: Input,
        invalidated: Option<RKey>,
    ) -> Result<Then, Reason> {
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
        let outcome = match u32::try_from(status) {
            Ok(bytes) if bytes <= transfer.length => Ok(bytes),
            Ok(_) => return Err(Reason::BadLength),
            Err(_) => Err(Error::Peer(status)),
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
        // What was staged is copied when its turn comes, and not before its invalidate's would have.
        let dead = !alive.is_some_and(crate::registration::Descriptor::may_be_alive)
            && transfer.stage.is_none();
        if input == Input::GetDone {
            transfer.reserved = false;
        }
        self.advance(handle, input);
        if invalidated.is_some() {
            self.counters.remote_invalidations.add(1);
            self.key_died();
        }
        if dead {
            self.apply(handle, Input::Dead);
        }
        Ok(if input == Input::GetDone {
            self.unreserve(connection);
            REPOST
        } else {
            REPOST_OWE
        })
    }

    pub(super) fn ack_arrived(
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

    pub(super) fn reply_arrived(
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
    pub(super) fn reply_req_arrived(
        &mut self,
        connection: Handle,
        header: lnet::View<'_>,
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
            .is_none_or(|transfer| header.payload_length() > transfer.length);
        if too_long {
            return Err(Reason::BadLength);
        }
        if header.payload_length() == 0 {
            let then = self.refuse_reply(connection, 0, cookie, now);
            if !matches!(then, Then::HoldReply) {
                self.apply(handle, Input::Reply);
            }
            return Ok(then);
        }
        let length = header.payload_length();
        let Ok(mechanism) = self.choose_own(handle, length) else {
            self.counters.unmappable.add(u64::from(!again));
            let then = self.refuse_reply(connection, EPROTONOSUPPORT, cookie, now);
            if !matches!(then, Then::HoldReply) {
                if let Some(transfer) = self.transfers.get_mut(handle) {
                    transfer.outcome = Err(Error::Unmappable);
                }
                self.apply(handle, Input::Reply);
            }
            return Ok(then);
        };
        if !self.cover_own(handle, mechanism, length) {
            return Ok(Then::HoldReply);
        }
        if let Some(transfer) = self.transfers.get_mut(handle) {
            transfer.cookie = cookie;
            transfer.length = length;
        }
        let input = if self.takes_mapping(handle) {
            Input::Unmapped
        } else {
            Input::ReplyRequest
        };
        self.apply(handle, input);
        Ok(REPOST)
    }
}

/// Bytes that a peer's sink takes; `only` is its fragment, where it has but one.
#[inline(always)]
pub(super) fn room_in(sink: &Descriptor<'_>, only: Option<Fragment>) -> u32 {
    match only {
        Some(fragment) => fragment.length,
        None => u32::try_from(sink.length()).unwrap_or(u32::MAX),
    }
}
