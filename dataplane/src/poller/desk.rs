//! Where a step of one transfer puts its work requests, and writes them down.

use super::record::{Chain, Link, Record, Stack, What, Windows};
use super::{Limits, Poller};
use crate::connection::Connection;
use crate::counters::Counters;
use crate::nic::{Capabilities, Nic, SendWr, WrId};
use crate::pool::{Cookies, Handle, Kind, Pool, pack};
use crate::portal::Attached;
use crate::registration::{Mappings, Scratch};
use crate::transfer::Transfer;
use crate::wire::ping;

/// What puts work requests of a connection's transfers on the open chain: the device, and everything that is written down
/// of them. The poller without its connections and transfers, so that the one is looked up once for a whole chain, and
/// a transfer once for a whole step (twice for a message).
pub(super) struct Desk<'p, 'a, N: Nic> {
    pub(super) nic: &'p mut N,
    pub(super) capabilities: &'p Capabilities,
    pub(super) limits: &'p Limits,
    pub(super) counters: &'a Counters,
    pub(super) entries: &'p Pool<'a, Attached<'a>>,
    pub(super) messages: &'p mut Stack<'a>,
    pub(super) windows: &'p mut Windows<'a>,
    pub(super) mappings: &'p mut Mappings<'a>,
    pub(super) scratch: &'p mut Scratch,
    pub(super) ping: &'p [u8; ping::BYTES],
    pub(super) source_from: usize,
    pub(super) chain: &'p mut Chain,
    record: &'p mut Record<'a>,
    cookies: Cookies,
    pub(super) connection: Handle,
    /// The transfer's whose turn it is.
    pub(super) handle: Handle,
}

impl<'a, N: Nic> Desk<'_, 'a, N> {
    /// One work request of the transfer; `link` says how it was before.
    #[inline(always)]
    pub(super) fn queue(
        &mut self,
        state: &mut Connection<'a>,
        transfer: &mut Transfer<'a>,
        link: Link,
        id: WrId,
        signalled: bool,
        wr: SendWr<'_>,
    ) {
        self.nic.queue(state.qp, id, signalled, wr);
        self.queued(state, transfer, link, id);
    }

    /// Writes down a work request that is on the device's chain.
    #[inline(always)]
    pub(super) fn queued(
        &mut self,
        state: &mut Connection<'a>,
        transfer: &mut Transfer<'a>,
        link: Link,
        id: WrId,
    ) {
        transfer.in_flight = transfer.in_flight.wrapping_add(1);
        self.note(state, link, id);
    }

    /// One work request more on the send queue of the connection.
    #[inline(always)]
    pub(super) fn note(&mut self, state: &mut Connection<'_>, link: Link, id: WrId) {
        self.record.set(self.connection, state.head, id);
        state.head = state.head.wrapping_add(1);
        // `fill` keeps room for a whole step.
        let _ = self.chain.push(link);
    }

    /// The transfer's, as its peer is told.
    #[inline]
    pub(super) const fn cookie(&self) -> u64 {
        self.cookies.of(self.handle)
    }

    /// How the transfer is now, for the work request that comes next.
    #[inline(always)]
    pub(super) const fn link(&self, what: What, transfer: &Transfer<'_>) -> Link {
        Link {
            what,
            handle: self.handle,
            phase: transfer.phase,
        }
    }

    /// A signalled request that does nothing (a WRITE of no bytes checks no key), to tell that the unsignalled ones before
    /// it are done: instead of the invalidate, where the peer's has come first, or behind the beginning of a run.
    pub(super) fn fence(
        &mut self,
        what: What,
        state: &mut Connection<'a>,
        transfer: &mut Transfer<'a>,
    ) {
        let link = self.link(what, transfer);
        let id = pack(Kind::Fence, self.handle);
        self.queue(state, transfer, link, id, true, SendWr::NOTHING);
    }
}

impl<'a, N: Nic> Poller<'a, N> {
    /// A connection, all transfers, and what puts work requests on the chain.
    #[inline(always)]
    pub(super) fn desk(&mut self, connection: Handle) -> Option<Parts<'_, 'a, N>> {
        let state = self.connections.get_mut(connection)?;
        let desk = Desk {
            nic: &mut self.nic,
            capabilities: &self.capabilities,
            limits: &self.limits,
            counters: self.counters,
            entries: &self.entries,
            messages: &mut self.messages,
            windows: &mut self.windows,
            mappings: &mut self.mappings,
            scratch: &mut self.scratch,
            ping: &self.ping,
            source_from: self.source_from,
            chain: &mut self.chain,
            record: &mut self.record,
            cookies: self.transfers.cookies(),
            connection,
            handle: connection,
        };
        Some((desk, state, &mut self.transfers))
    }
}

/// What [`Poller::desk`] takes the poller apart into.
type Parts<'p, 'a, N> = (
    Desk<'p, 'a, N>,
    &'p mut Connection<'a>,
    &'p mut Pool<'a, Transfer<'a>>,
);
