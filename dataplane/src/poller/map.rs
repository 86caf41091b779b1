//! Sinks that go by a mapping of the pool: they wait for it in a phase of their own, while the control side makes it.
//! And the way back: unused mappings are unmapped in batches.

use super::message::{base_of, memory_of};
use super::receive::{ENOMEM, ETIMEDOUT, Then};
use super::{Poller, Report};
use crate::endpoint::Error;
use crate::memory::MAX_FRAGMENTS;
use crate::nic::{Nic, Sge};
use crate::pool::Handle;
use crate::registration::{Claim, Lease, Next, Owner, Standing};
use crate::time::Instant;
use crate::transfer::{Input, Phase, Place, Role};

impl<N: Nic> Poller<'_, N> {
    /// Whether the sink of this transfer goes by a mapping.
    pub(super) fn takes_mapping(&self, handle: Handle) -> bool {
        let Some(transfer) = self.transfers.get(handle) else {
            return false;
        };
        let (Some(state), Some(mechanism)) = (
            self.connections.get(transfer.connection),
            transfer.mechanism,
        ) else {
            return false;
        };
        transfer.role.is_sink() && state.choices.takes_mapping(mechanism, transfer.length)
    }

    /// Into the queue of those that wait for a mapping.
    pub(super) fn enqueue_map(&mut self, connection: Handle, handle: Handle) {
        if let Some(state) = self.connections.get_mut(connection)
            && let Some(transfer) = self.transfers.get_mut(handle)
            && !transfer.queued
        {
            transfer.queued = true;
            transfer.looked = None;
            self.transfers.push_back(&mut state.mappings, handle);
            self.list(connection);
        }
    }

    /// Looks once at every transfer that waits for a mapping.
    pub(super) fn map_waiting(&mut self, connection: Handle, now: Instant) -> u32 {
        let waiting = self
            .connections
            .get(connection)
            .map_or(0, |state| state.mappings.len());
        let mut work = 0_u32;
        for _ in 0..waiting {
            let Some(state) = self.connections.get_mut(connection) else {
                return work;
            };
            let Some(handle) = self.transfers.pop_front(&mut state.mappings) else {
                return work;
            };
            let Some(transfer) = self.transfers.get_mut(handle) else {
                continue;
            };
            transfer.queued = false;
            let done = if transfer.abandoned.is_some() {
                self.give_up(connection, handle, ETIMEDOUT, now)
            } else {
                match self.look(handle) {
                    Standing::Live(_) => {
                        self.apply(handle, Input::Mapped);
                        true
                    }
                    Standing::Refused => self.give_up(connection, handle, ENOMEM, now),
                    Standing::Asked => false,
                }
            };
            if done {
                work = work.saturating_add(1);
            } else if let Some(state) = self.connections.get_mut(connection)
                && let Some(transfer) = self.transfers.get_mut(handle)
            {
                transfer.queued = true;
                self.transfers.push_back(&mut state.mappings, handle);
            }
        }
        work
    }

    /// How the mapping of a transfer stands; one is looked for, or asked for, where it has none.
    fn look(&mut self, handle: Handle) -> Standing {
        let lease = self.transfers.get(handle).and_then(|it| it.mapping);
        let mapping = match lease {
            Some(lease) => Some(lease.mapping),
            None => self.claim(handle),
        };
        let Some(mapping) = mapping else {
            return Standing::Asked;
        };
        let standing = self.mappings.standing(mapping);
        let standing = standing.unwrap_or(Standing::Refused);
        let key = match standing {
            Standing::Live(key) => Some(key),
            Standing::Asked | Standing::Refused => None,
        };
        if let Some(transfer) = self.transfers.get_mut(handle) {
            transfer.mapping = Some(Lease { mapping, key });
        }
        standing
    }

    /// A mapping for this transfer's sink: one that is there, or one that the control side is asked for. `None` where it
    /// has to wait for a place, or for room in the ring.
    fn claim(&mut self, handle: Handle) -> Option<Handle> {
        let transfer = self.transfers.get_mut(handle)?;
        if transfer.looked == Some(self.mappings.epoch()) {
            return None;
        }
        let zero_based = self.capabilities.zero_based;
        let one;
        let (owner, pieces, base) = if let Some(stage) = &transfer.stage {
            let choices = &self.connections.get(transfer.connection)?.choices;
            let piece = Sge {
                length: choices.mapped_stage(),
                ..stage.range().sge()
            };
            let base = if zero_based { 0 } else { piece.address };
            one = [piece];
            (Owner::Stage, one.as_slice(), base)
        } else {
            let owner = match &transfer.place {
                Place::Own(list) => Owner::List {
                    at: core::ptr::from_ref(&**list).addr() as u64,
                    generation: list.generation(),
                },
                Place::Entry { entry, .. } => Owner::Entry(*entry),
                Place::Ping | Place::Nothing => return None,
            };
            let (list, offset) = memory_of(&transfer.place, &self.entries)?;
            let length = transfer.length;
            let base = base_of(list, offset, length, zero_based);
            let pieces = self.scratch.joined(list, offset, length)?;
            (owner, pieces, base)
        };
        // All of it at once, or nothing: a list that is told in part would go to the next.
        let room = self.ends.reports.free() > pieces.len().saturating_add(1);
        let own = transfer.role.is_own();
        match self.mappings.claim(owner, pieces, own, room) {
            Claim::Found(mapping) => {
                self.counters.mapping_hits.add(1);
                self.note_mappings();
                Some(mapping)
            }
            Claim::New(mapping) => {
                self.counters.mapping_misses.add(1);
                for piece in pieces {
                    let _ = self.ends.reports.push(Report::Piece(*piece));
                }
                let _ = self.ends.reports.push(Report::Map { of: mapping, base });
                self.note_mappings();
                Some(mapping)
            }
            Claim::Short => {
                self.counters.waits.add(1);
                if room {
                    transfer.looked = Some(self.mappings.epoch());
                }
                None
            }
        }
    }

    /// A transfer ends without its mapping; false where its peer cannot be told yet.
    fn give_up(&mut self, connection: Handle, handle: Handle, status: i32, now: Instant) -> bool {
        let Some(transfer) = self.transfers.get_mut(handle) else {
            return true;
        };
        let (phase, role, cookie) = (transfer.phase, transfer.role, transfer.cookie);
        if phase == Phase::MapAnswer && role.is_own() {
            // The REPLY is turned down as one that nobody waits for.
            let then = self.refuse_reply(connection, status, cookie, now);
            if matches!(then, Then::HoldReply) {
                return false;
            }
        }
        // No PUT_ACK goes, and no PUT_DONE will come that would bring the credit of the request back.
        if phase == Phase::MapAnswer
            && let Some(state) = self.connections.get_mut(connection)
        {
            state.credits.owe();
        }
        let Some(transfer) = self.transfers.get_mut(handle) else {
            return true;
        };
        if transfer.abandoned.is_none() {
            self.counters.unmappable.add(1);
            transfer.abandoned = Some(Error::Unmappable);
        }
        let input = if phase == Phase::MapAnswer && role == Role::Sink {
            transfer.role = Role::Nak(status);
            Input::Mapped
        } else {
            Input::Unmappable
        };
        let (lease, stage) = (transfer.mapping.take(), transfer.stage.take());
        if let Some(lease) = lease {
            self.give_mapping(lease, true);
        }
        if let Some(stage) = stage {
            self.stages.give(stage, role.is_own());
        }
        self.apply(handle, input);
        true
    }

    /// A transfer is done with its mapping, which stays live; `again`: another may use it.
    pub(super) fn give_mapping(&mut self, lease: Lease, again: bool) {
        self.mappings.release(lease.mapping, again);
        self.note_mappings();
    }

    /// The control side has made a mapping. Who asked for it may be gone: then it is there for the next.
    pub(super) fn take_mapping(&mut self, window: N::Window, of: Handle) {
        let adopted = if self.mappings.is_asked(of) {
            self.nic.adopt_window(window)
        } else {
            Err(window)
        };
        match adopted {
            Ok((region, key)) => self.mappings.made(of, region, key),
            Err(window) => {
                // There is room for this report, or the order would not have been taken.
                let _ = self.ends.reports.push(Report::Unmap { window });
                self.no_mapping(of);
            }
        }
        self.note_mappings();
    }

    /// The control side has not made it.
    pub(super) fn no_mapping(&mut self, of: Handle) {
        if self.mappings.is_asked(of) {
            self.counters.mapping_refusals.add(1);
            self.mappings.refused(of);
        }
    }

    /// The control side has ended a batch.
    pub(super) const fn unmapped(&mut self) {
        self.mappings.unmapped();
    }

    /// Sends unused mappings to the control side, some per poll, when a batch is due; and frees those of an ended one,
    /// some per poll, too.
    pub(super) fn unmap(&mut self) -> u32 {
        // At the end, when no transfer can come any more.
        let end = self.stopping && self.transfers.is_empty();
        let mut work = self.mappings.free(PER_POLL);
        if work != 0 {
            self.note_mappings();
        }
        self.mappings.begin(end);
        // The last place is for the end of the batch.
        while self.mappings.is_filling() && work < PER_POLL && self.ends.reports.free() > 1 {
            work = work.saturating_add(1);
            match self.mappings.next_unused() {
                Next::Skip => {}
                Next::Unmap(region) => {
                    self.counters.mappings_unmapped.add(1);
                    if let Some(window) = self.nic.retire_window(region) {
                        let _ = self.ends.reports.push(Report::Unmap { window });
                    }
                }
                Next::End => {
                    if self.mappings.is_flushed() {
                        self.counters.mapping_flushes.add(1);
                        let _ = self.ends.reports.push(Report::Flush);
                    }
                }
            }
        }
        work
    }

    fn note_mappings(&self) {
        let (live, exposed) = (self.mappings.live(), self.mappings.exposed());
        self.counters.mappings_alive.set(live as u64);
        self.counters.mappings_exposed.set(exposed as u64);
    }
}

/// Most mappings of a batch that one poll looks at, or frees.
const PER_POLL: u32 = 32;

/// The longest list, its [`Report::Map`], and one to spare.
pub(super) const REPORTS: usize = MAX_FRAGMENTS + 2;
