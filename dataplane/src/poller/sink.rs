//! Sinks and sources under a key: what was chosen for a sink, its registration and its descriptor, a source's own
//! registration, and the copy out of a staging buffer.

use super::Poller;
use super::desk::Desk;
use super::message::{base_of, memory_of};
use super::record::{What, Windows};
use crate::connection::Connection;
use crate::counters::Counters;
use crate::endpoint::Error;
use crate::memory::PageList;
use crate::nic::{Capabilities, LKey, Mechanisms, Nic, Rights, SendWr, Sge};
use crate::peer::Terms;
use crate::pool::{Handle, Kind, Pool, pack};
use crate::portal::Attached;
use crate::registration::{Choices, Descriptor, Mechanism, Refused, SLICE, Scratch, Stages, Stock};
use crate::transfer::{Input, Phase, Place, Transfer};
use crate::wire::{self, Fragment};

impl<'a, N: Nic> Poller<'a, N> {
    /// What a connection with these terms may do with a sink.
    pub(super) const fn choices(&self, terms: &Terms) -> Choices {
        let stock = Stock {
            staging: self.stages.alignment(),
            mappings: self.mappings.total() != 0,
        };
        let settings = self.limits.registration;
        Choices::new(&self.capabilities, settings, terms.max_frags, stock)
    }

    /// What becomes of a sink of this connection in exported memory.
    pub(super) fn choose_in(
        &mut self,
        connection: Handle,
        entry: Handle,
        offset: u64,
        length: u32,
    ) -> Result<Mechanism, Refused> {
        let state = self.connections.get(connection).ok_or(Refused::Empty)?;
        let attached = self.entries.get(entry).ok_or(Refused::Empty)?;
        let list = &*attached.entry.memory;
        let chosen = state.choices.choose_for(list, offset, length)?;
        Ok(chosen.mechanism)
    }

    /// What becomes of a sink in the memory of a transfer of ours. It is chosen once.
    pub(super) fn choose_own(&mut self, handle: Handle, length: u32) -> Result<Mechanism, Refused> {
        let transfer = self.transfers.get_mut(handle).ok_or(Refused::Empty)?;
        let state = self.connections.get(transfer.connection);
        let state = state.ok_or(Refused::Empty)?;
        choose(transfer, &state.choices, length)
    }

    /// Gives a transfer what a sink so covered needs, as [`cover`].
    pub(super) fn cover(
        &mut self,
        transfer: &mut Transfer<'a>,
        mechanism: Mechanism,
        length: u32,
    ) -> bool {
        let Some(state) = self.connections.get(transfer.connection) else {
            return false;
        };
        let takes_window = state.choices.takes_window(mechanism, length);
        let (windows, stages) = (&mut self.windows, &mut self.stages);
        cover(
            transfer,
            takes_window,
            mechanism,
            false,
            windows,
            stages,
            self.counters,
        )
    }

    /// The same for one of ours that has its slot.
    pub(super) fn cover_own(&mut self, handle: Handle, mechanism: Mechanism, length: u32) -> bool {
        let Some(transfer) = self.transfers.get_mut(handle) else {
            return false;
        };
        let Some(state) = self.connections.get(transfer.connection) else {
            return false;
        };
        let takes_window = state.choices.takes_window(mechanism, length);
        let (windows, stages) = (&mut self.windows, &mut self.stages);
        cover(
            transfer,
            takes_window,
            mechanism,
            true,
            windows,
            stages,
            self.counters,
        )
    }

    /// The key of a transfer's sink is dead. What lies in a staging buffer is copied now.
    pub(super) fn died(&mut self, handle: Handle) {
        let is_staged = self.transfers.get(handle).is_some_and(|state| {
            state.stage.is_some() && state.abandoned.is_none() && matches!(state.outcome, Ok(1..))
        });
        let input = if is_staged {
            Input::Staged
        } else {
            Input::Dead
        };
        self.apply(handle, input);
    }

    /// Into the queue of those that are copied.
    pub(super) fn enqueue_copy(&mut self, connection: Handle, handle: Handle) {
        if let Some(state) = self.connections.get_mut(connection)
            && let Some(transfer) = self.transfers.get_mut(handle)
            && !transfer.queued
        {
            transfer.queued = true;
            self.transfers.push_back(&mut state.copies, handle);
            self.list(connection);
        }
    }

    /// Copies a slice of each transfer that has data in a staging buffer, to where it belongs.
    pub(super) fn copy_slices(&mut self, connection: Handle) -> u32 {
        let waiting = self
            .connections
            .get(connection)
            .map_or(0, |state| state.copies.len());
        let mut work = 0_u32;
        for _ in 0..waiting {
            let Some(state) = self.connections.get_mut(connection) else {
                return work;
            };
            let Some(handle) = self.transfers.pop_front(&mut state.copies) else {
                return work;
            };
            let Some(transfer) = self.transfers.get_mut(handle) else {
                continue;
            };
            transfer.queued = false;
            if transfer.phase != Phase::Copying {
                continue;
            }
            work = work.saturating_add(1);
            let bytes = transfer.outcome.unwrap_or(0);
            let Some(stage) = &mut transfer.stage else {
                continue;
            };
            let copied = stage.copied();
            let most = bytes.saturating_sub(copied).min(SLICE);
            let list = match &mut transfer.place {
                Place::Own(list) => Some((&mut **list, 0)),
                Place::Entry { entry, offset } => self
                    .entries
                    .get_mut(*entry)
                    .map(|attached| (&mut *attached.entry.memory, *offset)),
                Place::Ping | Place::Nothing => None,
            };
            let done = list.map_or(0, |(list, offset)| {
                let offset = offset.saturating_add(u64::from(copied));
                list.copy_in(offset, stage.range(), copied, most, self.copier)
            });
            stage.advance(done);
            self.counters.staged_bytes.add(u64::from(done));
            if done == 0 || stage.copied() >= bytes {
                self.apply(handle, Input::Copied);
            } else {
                self.enqueue_copy(connection, handle);
            }
        }
        work
    }

    /// A GET of ours that no mechanism covers ends before it has begun.
    pub(super) fn refuse_own(&mut self, handle: Handle) {
        if let Some(transfer) = self.transfers.get_mut(handle) {
            transfer.queued = false;
            transfer.abandoned = Some(Error::Unmappable);
        }
        self.apply(handle, Input::Expired);
    }
}

impl<'a, N: Nic> Desk<'_, 'a, N> {
    /// Puts the transfer's key over its sink, if that is not done yet and there is one.
    ///
    /// # Errors
    /// What was chosen cannot.
    pub(super) fn register(
        &mut self,
        state: &mut Connection<'a>,
        transfer: &mut Transfer<'a>,
    ) -> Result<(), Uncovered> {
        let link = self.link(What::Register, transfer);
        let length = transfer.length;
        let by = match transfer.mechanism {
            Some(Mechanism::Staging) => state.choices.over_stage(length),
            chosen => chosen,
        };
        let by = by.ok_or(Uncovered)?;
        if by == Mechanism::Arena {
            // Its key is good for as long as the node runs, and from here on a peer knows it.
            self.counters.arena_exposed.set(1);
            return Ok(());
        }
        if by == Mechanism::Mapping {
            let lease = transfer.mapping.ok_or(Uncovered)?;
            self.mappings.tell(lease.mapping);
            return Ok(());
        }
        let window = transfer.window.as_mut().ok_or(Uncovered)?;
        // A chain that was taken in part: its REGISTER went, its message did not.
        if !window.needs_register() {
            return Ok(());
        }
        let zero_based = self.capabilities.zero_based;
        let (layout, base) = if let Some(stage) = &transfer.stage {
            let piece = Sge {
                length,
                ..stage.range().sge()
            };
            let pieces = core::iter::once(piece);
            let shift = state.choices.stage_shift(length);
            let capabilities = Capabilities {
                page_shift: shift.unwrap_or(self.capabilities.page_shift),
                ..*self.capabilities
            };
            let layout = self.scratch.lay_out_pieces(by, &capabilities, pieces);
            (layout, if zero_based { 0 } else { piece.address })
        } else {
            let (list, offset) = memory_of(&transfer.place, self.entries).ok_or(Uncovered)?;
            let layout = self
                .scratch
                .lay_out(by, self.capabilities, list, offset, length);
            (layout, base_of(list, offset, length, zero_based))
        };
        let layout = layout.ok_or(Uncovered)?;
        window.name();
        let id = pack(Kind::Register, self.handle);
        let wr = SendWr::Register {
            region: window.region(),
            key: window.key(),
            rights: Rights::LOCAL_WRITE | Rights::REMOTE_WRITE,
            base,
            length,
            layout,
        };
        self.nic.queue(state.qp, id, false, wr);
        window.registered();
        let alive = self.counters.keys_alive.get();
        self.counters.keys_alive.set(alive.saturating_add(1));
        self.queued(state, transfer, link, id);
        Ok(())
    }

    /// Registers a source of many ranges before its first WRITE, if that saves more than it costs: then one WRITE
    /// reads all of them under the region's own key, which gives no right to anybody else. True if a REGISTER went on
    /// the chain. Nobody waits for that: without a free window the ranges are gathered as they are.
    pub(super) fn register_source(
        &mut self,
        state: &mut Connection<'a>,
        transfer: &mut Transfer<'a>,
    ) -> bool {
        let Some((list, offset)) = memory_of(&transfer.place, self.entries) else {
            return false;
        };
        // Most sources are told off here.
        if list.pieces().len() < self.source_from || transfer.role.is_sink() {
            return false;
        }
        let link = self.link(What::Register, transfer);
        let own = transfer.role.is_own();
        match &transfer.window {
            Some(window) if !window.needs_register() => return false,
            Some(_) => {}
            None => {
                let is_first = transfer.cursor.written == 0;
                let fragments = list.slice(offset, transfer.length).count();
                if !is_first || fragments < self.source_from {
                    return false;
                }
            }
        }
        let by = Mechanism::FragmentList;
        let length = transfer.length;
        let layout = self
            .scratch
            .lay_out(by, self.capabilities, list, offset, length);
        let Some(layout) = layout else {
            return false;
        };
        if transfer.window.is_none() {
            transfer.window = self.windows.take(own);
            if transfer.window.is_some() {
                self.counters.source_lists.add(1);
            }
        }
        let Some(window) = transfer.window.as_mut() else {
            return false;
        };
        window.name();
        let id = pack(Kind::Register, self.handle);
        let wr = SendWr::Register {
            region: window.region(),
            key: window.key(),
            // To read it locally needs none.
            rights: Rights::empty(),
            base: base_of(list, offset, length, self.capabilities.zero_based),
            length,
            layout,
        };
        self.nic.queue(state.qp, id, false, wr);
        window.registered();
        self.queued(state, transfer, link, id);
        true
    }
}

/// What becomes of a sink in the memory of a transfer of ours. It is chosen once.
#[inline(always)]
pub(super) fn choose(
    transfer: &mut Transfer<'_>,
    choices: &Choices,
    length: u32,
) -> Result<Mechanism, Refused> {
    if let Some(mechanism) = transfer.mechanism {
        return Ok(mechanism);
    }
    let Place::Own(list) = &transfer.place else {
        return Err(Refused::Empty);
    };
    let chosen = choices.choose_for(list, 0, length)?;
    transfer.mechanism = Some(chosen.mechanism);
    Ok(chosen.mechanism)
}

/// Gives a transfer the window and the staging buffer that a sink so covered needs, all or nothing, out of our share
/// (`own`) or the peers'. False if there is not what it needs.
#[inline(always)]
pub(super) fn cover<'a>(
    transfer: &mut Transfer<'a>,
    takes_window: bool,
    mechanism: Mechanism,
    own: bool,
    windows: &mut Windows<'_>,
    stages: &mut Stages<'a>,
    counters: &Counters,
) -> bool {
    let takes_stage = mechanism == Mechanism::Staging;
    if (takes_window && !windows.has(own)) || (takes_stage && !stages.has(own)) {
        return false;
    }
    let counter = match mechanism {
        Mechanism::FragmentList => &counters.fragment_lists,
        Mechanism::PageList => &counters.page_lists,
        Mechanism::Window => &counters.windows,
        Mechanism::Mapping => &counters.mappings,
        Mechanism::Arena => &counters.arenas,
        Mechanism::Staging => &counters.stagings,
    };
    counter.add(1);
    if takes_window {
        transfer.window = windows.take(own);
    }
    if takes_stage {
        transfer.stage = stages.take(own);
    }
    true
}

/// What was chosen for a sink does not cover it, or its descriptor is shorter than was said: cannot be.
#[derive(Debug)]
pub(super) struct Uncovered;

/// The sink of a transfer as its peer is told of it.
pub(super) fn describe<'s, 'a>(
    transfer: &'s Transfer<'a>,
    entries: &'s Pool<'_, Attached<'a>>,
    zero_based: bool,
    scratch: &'s mut Scratch,
    one: &'s mut [Fragment; 1],
) -> wire::Descriptor<'s> {
    let mapped = transfer.mapping.and_then(|lease| lease.key);
    let key = transfer.window.as_ref().map(Descriptor::key).or(mapped);
    let length = transfer.length;
    let [fragment] = one;
    if let Some(stage) = &transfer.stage {
        let range = stage.range();
        let address = if key.is_some() && zero_based {
            0
        } else {
            range.sge().address
        };
        *fragment = Fragment { length, address };
        let key = key.or_else(|| range.exposure()).unwrap_or_default();
        return wire::Descriptor::new(key, one);
    }
    let Some((list, offset)) = memory_of(&transfer.place, entries) else {
        return wire::Descriptor::new(key.unwrap_or_default(), &[]);
    };
    if transfer.mechanism == Some(Mechanism::Arena) {
        let pieces = scratch.joined(list, offset, length);
        let key = list.exposed().unwrap_or_default();
        return wire::Descriptor::over(key, pieces.unwrap_or_default());
    }
    *fragment = Fragment {
        length,
        address: base_of(list, offset, length, zero_based),
    };
    wire::Descriptor::new(key.unwrap_or_default(), one)
}

/// The registered source of a transfer, from byte `from` on; `None` where it is gathered as it is.
pub(super) fn source_region(
    transfer: &Transfer<'_>,
    list: &PageList<'_>,
    offset: u64,
    zero_based: bool,
) -> Option<Sge> {
    let window = transfer
        .window
        .as_ref()
        .filter(|window| !transfer.role.is_sink() && window.needs_invalidate())?;
    let base = base_of(list, offset, transfer.length, zero_based);
    let written = transfer.cursor.written;
    Some(Sge {
        address: base.wrapping_add(u64::from(written)),
        length: transfer.length.saturating_sub(written),
        lkey: LKey(window.key().0),
    })
}

/// From how many ranges on a source is registered on this device; none has so many where it cannot.
pub(super) fn source_from(given: u16, capabilities: &Capabilities, writes_at_once: u16) -> usize {
    let has = capabilities.mechanisms.contains(Mechanisms::FRAGMENTS) && capabilities.region_lkey;
    if given == 0 || !has {
        return usize::MAX;
    }
    // What would take more than one instalment of WRITEs is registered from fewer on.
    let gathered = u64::from(capabilities.max_sge).saturating_mul(u64::from(writes_at_once));
    let one_go = usize::try_from(gathered.saturating_add(1)).unwrap_or(usize::MAX);
    usize::from(given).min(one_go)
}
