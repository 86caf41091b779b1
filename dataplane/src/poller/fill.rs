//! What goes on the open chain of one connection: first what kills keys, then answers, then what needs credits, then a NOOP.

use super::desk::Desk;
use super::record::{CHAIN, Link, What};
use super::sink::Uncovered;
use crate::connection::Connection;
use crate::nic::{Nic, SendWr};
use crate::pool::{Handle, Kind, Pool, pack};
use crate::transfer::{Input, Phase, Role, Transfer};
use crate::wire::lnet::WireHandle;
use crate::wire::{Body, Message};

/// Where filling the chain stopped.
pub(super) enum Filled {
    /// Nothing more may go now.
    AsMuchAsMay,
    /// There is more, and only the chain was full.
    Chain,
    /// At a transfer whose key is dead without an invalidate of ours.
    UpToDead(Handle),
    /// At one whose memory is not what was matched.
    UpToUncovered,
}

/// What became of a transfer that was to invalidate its key.
enum Invalidated {
    /// It is on the chain.
    Queued,
    /// There was nothing to invalidate.
    Dead,
    /// The DONE of a registered source was not taken: that goes first.
    WantsDone,
}

impl<'a, N: Nic> Desk<'_, 'a, N> {
    /// Queues what may go now on the open chain.
    pub(super) fn fill(
        &mut self,
        state: &mut Connection<'a>,
        transfers: &mut Pool<'a, Transfer<'a>>,
    ) -> Filled {
        let registers = self.source_from != usize::MAX;
        loop {
            while !state.reserve.is_empty() && state.credits.reserve() {
                if let Some((handle, transfer)) = transfers.take_front(&mut state.reserve) {
                    transfer.reserved = true;
                    transfers.push_back(&mut state.credited, handle);
                }
            }
            let room = room_of(state.send_wr, state.on_send_queue()) as usize;
            let left = CHAIN.saturating_sub(self.chain.len());
            let both = room.min(left);
            // How many work requests must go together. The queue is sized for exactly this: who asks for more than the next
            // step takes waits when it is full but for one, with an invalidate in hand.
            let stop = |step| {
                if room >= step {
                    Filled::Chain
                } else {
                    Filled::AsMuchAsMay
                }
            };
            if let Some(handle) = state.untold {
                if both < 1 {
                    return stop(1);
                }
                state.untold = None;
                self.tell_of(state, transfers, handle);
            } else if !state.invalidates.is_empty() {
                if both < 1 {
                    return stop(1);
                }
                let Some((handle, transfer)) = transfers.take_front(&mut state.invalidates) else {
                    return Filled::AsMuchAsMay;
                };
                self.handle = handle;
                match self.invalidate(state, transfer) {
                    Invalidated::Queued => {}
                    Invalidated::Dead => return Filled::UpToDead(handle),
                    Invalidated::WantsDone => {
                        transfer.queued = true;
                        transfers.push_back(&mut state.answers, handle);
                    }
                }
            } else if !state.answers.is_empty() {
                if both < MOST_OF_A_STEP {
                    let step = step_of(transfers.first(&state.answers), registers);
                    if both < step {
                        return stop(step);
                    }
                }
                let Some((handle, transfer)) = transfers.take_front(&mut state.answers) else {
                    return Filled::AsMuchAsMay;
                };
                self.handle = handle;
                match self.answer(state, transfer, both) {
                    Err(Uncovered) => return Filled::UpToUncovered,
                    Ok(false) => {}
                    Ok(true) => {
                        transfer.queued = true;
                        transfers.push_back(&mut state.invalidates, handle);
                    }
                }
            } else if state.credits.available() > 0 && !state.credited.is_empty() {
                if both < MOST_OF_A_STEP {
                    let bulk = transfers
                        .first(&state.credited)
                        .is_some_and(|first| first.bulk);
                    let step = if bulk { 2 } else { 1 };
                    if both < step {
                        return stop(step);
                    }
                }
                let Some((handle, transfer)) = transfers.take_front(&mut state.credited) else {
                    return Filled::AsMuchAsMay;
                };
                self.handle = handle;
                if transfer.bulk {
                    self.request_bulk(state, transfer);
                    continue;
                }
                // Of a run of messages the last is signalled: that the next is one of it is certain.
                let follows = both > 1
                    && state.credits.available() > 1
                    && transfers
                        .first(&state.credited)
                        .is_some_and(|next| !next.bulk);
                if let Some(transfer) = transfers.get_mut(handle) {
                    self.request_message(state, transfer, !follows);
                }
            } else {
                if both < 1 {
                    return stop(1);
                }
                if state.wants_noop(false) {
                    self.noop(state);
                }
                return Filled::AsMuchAsMay;
            }
        }
    }

    /// The transfer's invalidate, or what tells as much.
    #[inline(always)]
    fn invalidate(
        &mut self,
        state: &mut Connection<'a>,
        transfer: &mut Transfer<'a>,
    ) -> Invalidated {
        transfer.queued = false;
        if transfer.phase == Phase::Data {
            return Invalidated::WantsDone;
        }
        let link = self.link(What::Invalidate, transfer);
        let window = transfer.window.as_mut();
        let Some(window) = window.filter(|window| window.needs_invalidate()) else {
            // Never invalidate what is not live: some devices' drivers do not survive it.
            // A source's key is for our own device, and no DONE kills it.
            let is_told = transfer.role.is_sink() && state.terms.keys_killed;
            if transfer.in_flight != 0 && transfer.window.is_some() && !is_told {
                self.fence(What::Fence, state, transfer);
                transfer.posted(Input::PostedInvalidate);
                return Invalidated::Queued;
            }
            return Invalidated::Dead;
        };
        let wr = SendWr::Invalidate { key: window.key() };
        window.invalidating();
        let id = pack(Kind::Invalidate, self.handle);
        self.queue(state, transfer, link, id, true, wr);
        transfer.posted(Input::PostedInvalidate);
        Invalidated::Queued
    }

    /// The device took only the beginning of a run of messages: a signalled request tells when that is done.
    #[cold]
    fn tell_of(
        &mut self,
        state: &mut Connection<'a>,
        transfers: &mut Pool<'a, Transfer<'a>>,
        handle: Handle,
    ) {
        if let Some(transfer) = transfers.get_mut(handle)
            && transfer.in_flight != 0
        {
            self.handle = handle;
            self.fence(What::Tell, state, transfer);
        }
    }

    /// What needs no credit: PUT_ACK, a refusal, or WRITEs and their DONE. True if an invalidate is to follow.
    #[inline(always)]
    fn answer(
        &mut self,
        state: &mut Connection<'a>,
        transfer: &mut Transfer<'a>,
        room: usize,
    ) -> Result<bool, Uncovered> {
        transfer.queued = false;
        match (transfer.phase, transfer.role) {
            (Phase::Data, _) => self.data(state, transfer, room)?,
            (_, Role::Nak(_) | Role::Refusal(_)) => {
                self.message(state, transfer, true, false, Input::PostedLast);
            }
            _ => {
                self.register(state, transfer)?;
                // The invalidate that follows where there is a window tells that this is done, too.
                let told = transfer.window.is_none() || state.terms.keys_killed;
                self.message(state, transfer, told, false, Input::PostedPutAck);
            }
        }
        // The DONE of a registered source is on the chain: its invalidate follows.
        Ok(transfer.window.is_some()
            && !transfer.role.is_sink()
            && matches!(transfer.phase, Phase::Sent | Phase::SentWantsAck))
    }

    /// A whole LNet message, which needs a credit.
    #[inline(always)]
    fn request_message(
        &mut self,
        state: &mut Connection<'a>,
        transfer: &mut Transfer<'a>,
        told: bool,
    ) {
        transfer.queued = false;
        if !state.credits.spend() {
            return;
        }
        let role = transfer.role;
        if matches!(role, Role::Put | Role::Reply) {
            transfer.outcome = Ok(transfer.length);
        }
        self.immediate(state, transfer, told);
        let wants_ack = role == Role::Put && transfer.handle != WireHandle::NONE;
        transfer.posted(match role {
            Role::Get => Input::PostedGet,
            _ if wants_ack => Input::PostedLastWantsAck,
            _ => Input::PostedLast,
        });
    }

    /// A PUT_REQ or GET_REQ, which needs a credit.
    #[inline(always)]
    fn request_bulk(&mut self, state: &mut Connection<'a>, transfer: &mut Transfer<'a>) {
        transfer.queued = false;
        if !state.credits.spend() {
            return;
        }
        let posted = if transfer.role == Role::Get {
            // What was chosen for it when it was admitted covers it.
            let _ = self.register(state, transfer);
            Input::PostedGetReq
        } else {
            Input::PostedPutReq
        };
        // Whether no invalidate will tell of its messages.
        let told = transfer.window.is_none() || state.terms.keys_killed;
        self.message(state, transfer, told, true, posted);
    }

    /// Returns credits, or shows that we live.
    pub(super) fn noop(&mut self, state: &mut Connection<'a>) {
        let Some(mut buffer) = self.messages.take() else {
            return;
        };
        let paid = state.credits.pay();
        let message = Message {
            envelope: state.terms.envelope(paid),
            body: Body::Noop,
        };
        let length = message.encode(buffer.bytes()).unwrap_or(0);
        let posted = buffer.post();
        let id = pack(Kind::Noop, self.connection);
        let wr = SendWr::Send {
            message: posted.sge(length),
            invalidate: None,
        };
        self.nic.queue(state.qp, id, true, wr);
        // `wants_noop` saw that there is room.
        let _ = state.noops.push_back(posted);
        let link = Link {
            what: What::Noop { paid },
            handle: self.connection,
            phase: Phase::Sent,
        };
        self.note(state, link, id);
    }
}

/// The most that [`step_of`] says of any transfer.
const MOST_OF_A_STEP: usize = 3;

/// The most work requests of a transfer's next step that must go together: REGISTER or a WRITE, and the message behind.
/// A source that is registered has both.
const fn step_of(transfer: Option<&Transfer<'_>>, registers: bool) -> usize {
    match transfer {
        Some(Transfer {
            phase: Phase::Data, ..
        }) if registers => 3,
        Some(Transfer {
            role: Role::Nak(_) | Role::Refusal(_) | Role::Ack,
            ..
        }) => 1,
        _ => 2,
    }
}

/// Room on a send queue with so many requests. The last place is for the drain.
pub(super) const fn room_of(send_wr: u32, used: u32) -> u32 {
    send_wr.saturating_sub(1).saturating_sub(used)
}
