//! What the application asks for.

use super::Poller;
use crate::connection::State;
use crate::endpoint::{Entry, Error, Event, Operation, Request, Submission, Token};
use crate::nic::{Nic, RKey};
use crate::pool::Handle;
use crate::portal::{Attached, LNET_PORTAL, Leaving};
use crate::time::Instant;
use crate::transfer::{Cursor, Input, Phase, Place, Role, Sink, Transfer, step};
use crate::wire::lnet::{MTU, WireHandle};
use crate::wire::{IMMEDIATE_PAYLOAD, Nid};

impl<'a, N: Nic> Poller<'a, N> {
    /// Takes submissions in order, as long as there is room for the events. A transfer for which there is
    /// no slot stays at the head; what needs none goes on until one comes.
    pub(super) fn submit(&mut self, now: Instant) -> u32 {
        let mut work = 0_u32;
        if self.pending.is_none() && self.ends.submissions.is_empty() {
            return 0;
        }
        // An entry needs two: one to say that it is attached, one for its end.
        while self.ends.events.free() > self.events_due.saturating_add(1) {
            let next = if self.pending.is_none() {
                self.ends.submissions.pop()
            } else if self.own < self.own_most {
                self.pending.take()
            } else {
                return work;
            };
            match next {
                None => return work,
                Some(Submission::Transfer(_)) if self.own >= self.own_most => {
                    self.pending = next;
                    return work;
                }
                Some(Submission::Transfer(request)) => {
                    // It was seen that there is room.
                    self.events_due = self.events_due.wrapping_add(1);
                    self.start(request, now);
                }
                Some(Submission::Attach(entry)) => self.attach(entry),
                Some(Submission::Detach { entry }) => self.detach(entry),
                Some(Submission::Cancel { token }) => self.cancel(token, now),
            }
            work = work.saturating_add(1);
        }
        work
    }

    fn start(&mut self, request: Request<'a>, now: Instant) {
        let (token, connection) = (request.token, request.connection);
        let length = match self.judge_request(&request) {
            Ok(length) => length,
            Err(error) => {
                self.tell(Event::Done {
                    token,
                    outcome: Err(error),
                    memory: request.memory,
                });
                return;
            }
        };
        let large = length > IMMEDIATE_PAYLOAD;
        let (role, bulk, hdr_data, wants_ack) = match request.operation {
            Operation::Put { hdr_data, ack } => (Role::Put, large, hdr_data, ack),
            Operation::Get { optimized } => (Role::Get, large && optimized, 0, false),
        };
        let timeout = request.timeout.unwrap_or(self.limits.timeout);
        // Any handle but NONE asks for an ACK; the real one is made when the message is. Word by word, not byte by byte.
        let (stamp, all) = if wants_ack {
            (self.limits.stamp, 0)
        } else {
            (u64::MAX, u64::MAX)
        };
        let handle = WireHandle::from_words(stamp, all);
        let mut transfer = Transfer {
            connection,
            role,
            phase: Phase::Waiting,
            bulk,
            in_flight: 0,
            deadline: now.after(timeout),
            abandoned: None,
            outcome: Ok(0),
            place: Place::Own(request.memory),
            length,
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
            token,
            portal: request.portal,
            match_bits: request.match_bits,
            remote_offset: request.remote_offset,
            hdr_data,
            handle,
            peer: (Nid::ANY, self.limits.pid),
            event: true,
            queued: true,
            reserved: false,
            admitted: false,
        };
        let Some(state) = self.connections.get_mut(connection) else {
            return;
        };
        // What needs no more than its share and a buffer has it here and now, if nobody waits before it. A sink waits until
        // what has come in was served: the last window may be what that needs.
        let is_ready = !(role == Role::Get && large)
            && state.waiting.is_empty()
            && state.has_own_share()
            && !self.messages.is_empty();
        let queue = if is_ready {
            state.admit(&mut transfer, self.messages.take(), self.limits.pid);
            (transfer.phase, _) = step(Phase::Waiting, Input::Admitted);
            state.queue_of(&mut transfer)
        } else {
            &mut state.waiting
        };
        // `own < own_most` was checked: there is a slot.
        if let Ok(handle) = self.transfers.insert(transfer) {
            self.own = self.own.wrapping_add(1);
            self.transfers.push_back(queue, handle);
        }
        self.list(connection);
    }

    /// The length of a request that can be served.
    fn judge_request(&mut self, request: &Request<'a>) -> Result<u32, Error> {
        if self.stopping {
            return Err(Error::ShuttingDown);
        }
        match self.connections.get(request.connection) {
            Some(state) if state.state != State::Closing => {}
            _ => return Err(Error::NotConnected),
        }
        let length = u32::try_from(request.memory.length()).map_err(|_| Error::TooLong)?;
        if length > MTU {
            return Err(Error::TooLong);
        }
        Ok(length)
    }

    /// Attaches an entry without an event for it, e.g. before there is an application. Its end has one.
    ///
    /// # Errors
    /// The entry as it was, and what is wrong with it.
    pub fn export(&mut self, entry: Entry<'a>) -> Result<Handle, (Entry<'a>, Error)> {
        if self.ends.events.free() <= self.events_due {
            return Err((entry, Error::NoRoom));
        }
        self.insert_entry(entry)
    }

    fn attach(&mut self, entry: Entry<'a>) {
        let token = entry.token;
        // One slot for this answer, one for the end of the entry.
        self.reserve_event();
        match self.insert_entry(entry) {
            Ok(entry) => self.tell(Event::Attached { token, entry }),
            Err((entry, why)) => self.tell(Event::Detached {
                entry: Some(entry),
                why: Some(why),
            }),
        }
    }

    fn insert_entry(&mut self, entry: Entry<'a>) -> Result<Handle, (Entry<'a>, Error)> {
        let refusal = if entry.portal == LNET_PORTAL {
            Some(Error::ReservedPortal)
        } else if self.stopping {
            Some(Error::ShuttingDown)
        } else if u32::try_from(entry.memory.length()).is_err() {
            Some(Error::NoRoom)
        } else {
            None
        };
        if let Some(why) = refusal {
            return Err((entry, why));
        }
        let handle = self
            .entries
            .insert(Attached::new(entry))
            .map_err(|attached| (attached.entry, Error::NoRoom))?;
        self.entries.push_back(&mut self.attached, handle);
        self.reserve_event();
        Ok(handle)
    }

    fn detach(&mut self, handle: Handle) {
        match self.entries.get_mut(handle) {
            Some(attached) if attached.leaving.is_none() => {
                attached.leaving = Some(Leaving::Asked);
                self.let_go(handle);
            }
            _ => {
                self.reserve_event();
                self.tell(Event::Detached {
                    entry: None,
                    why: None,
                });
            }
        }
    }

    /// Gives an entry back that is leaving and no longer busy.
    pub(super) fn let_go(&mut self, handle: Handle) {
        let Some(attached) = self.entries.get(handle) else {
            return;
        };
        let Some(leaving) = attached.leaving else {
            return;
        };
        if attached.busy != 0 {
            return;
        }
        self.entries.unlink(&mut self.attached, handle);
        if let Some(attached) = self.entries.remove(handle) {
            self.tell(Event::Detached {
                entry: Some(attached.entry),
                why: match leaving {
                    Leaving::Asked => None,
                    Leaving::Used => Some(Error::Used),
                },
            });
        }
    }

    fn cancel(&mut self, token: Token, now: Instant) {
        for index in 0..self.transfers.capacity() {
            let Some(handle) = self.transfers.at(index) else {
                continue;
            };
            let ours = self
                .transfers
                .get(handle)
                .is_some_and(|state| state.role.is_own() && state.token == token);
            if ours {
                self.abandon(handle, Error::Cancelled, now);
            }
        }
    }

    /// Looks at the slots the clock's hand passes.
    pub(super) fn expire(&mut self, now: Instant) -> u32 {
        for _ in 0..self.hand.advance(now) {
            let index = self.hand.next();
            if let Some(connection) = self.connections.at(index) {
                self.keep_alive(connection, now);
            }
            let Some(handle) = self.transfers.at(index) else {
                continue;
            };
            let Some(state) = self.transfers.get(handle) else {
                continue;
            };
            if now < state.deadline || matches!(state.phase, Phase::Lost | Phase::Rebuilding) {
                continue;
            }
            if state.abandoned.is_some() {
                // Its key, or its place on the send queue, can only be had back by ending the connection.
                let connection = state.connection;
                self.close(connection, super::Reason::TimedOut);
            } else {
                self.counters.timeouts.add(1);
                self.abandon(handle, Error::TimedOut, now);
            }
        }
        0
    }

    /// Its time is over. What no key and no work request holds ends now; the rest waits for a late
    /// answer, or for the end of its connection.
    fn abandon(&mut self, handle: Handle, why: Error, now: Instant) {
        let abandon = self.limits.abandon;
        let Some(state) = self.transfers.get_mut(handle) else {
            return;
        };
        if state.abandoned.is_none() {
            state.abandoned = Some(why);
            state.deadline = now.after(abandon);
        }
        self.apply(handle, Input::Expired);
    }
}
