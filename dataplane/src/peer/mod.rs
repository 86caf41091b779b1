//! What two nodes agree on before the first message, and what is remembered of a node.
//!
//! Nothing here does I/O or reads a clock: the private data of a connection manager event goes in,
//! what to answer comes out. [`answer`] is the passive side; [`request`], [`accepted`] and
//! [`rejected`] are the active one. [`table`] says what each event of the connection manager means
//! in each state of a connection.
//!
//! Races. When both nodes dial at once, ko2iblnd lets one side refuse (CONN_RACE), and which side
//! changed with 2.16: LU-17743 compares a hash of the NIDs where older nodes compare the NIDs as
//! numbers, so that two kernels can refuse each other. Its way out is that the refused side is let
//! through after 20 lost races (LU-7646). This node never refuses for a race: several connections
//! to one peer are legal (LU-8943), and an accepted one serves both. Refused itself, it waits for
//! the peer's request, and dials again if none comes ([`Next::Wait`]).

pub mod extensions;
mod negotiation;
pub mod table;

pub use extensions::{Extensions, Immediate, REPLY_BYTES};
pub use negotiation::{
    Answer, Next, Refusal, Refused, Request, accepted, answer, rejected, request, too_deep,
};

use crate::wire::{Envelope, MAX_FRAGMENTS, Nid, V1, V2};

/// This node, as it negotiates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Local {
    /// Its NID.
    pub nid: Nid,
    /// Its incarnation: microseconds of wall clock when it started.
    pub stamp: u64,
    /// `peer_credits`: the most it agrees to. At least 1; below 8 version 1 is not spoken.
    pub queue_depth: u16,
    /// Most fragments of a descriptor it agrees to, 1 to [`MAX_FRAGMENTS`].
    pub max_frags: u16,
    /// `peer_credits_hiw`: how many credits it may owe before it returns them by a NOOP, at its own
    /// depth. 0 is the default, half of it.
    pub high_water: u16,
    /// Whether a peer must dial from a port below 1024.
    pub require_privileged_port: bool,
    /// What it offers to nodes of its own kind.
    pub extensions: Extensions,
    /// Whether it takes connections yet.
    pub ready: bool,
}

impl Local {
    /// High-water mark of a connection of that depth: in proportion, since a mark above a small
    /// negotiated depth is never reached (LU-12569), and one just below it comes too late (LU-15828).
    /// At least 1.
    #[must_use]
    pub fn high_water(&self, version: u16, queue_depth: u16) -> u16 {
        if version == V1 {
            return V1_HIGH_WATER;
        }
        let own = self.queue_depth;
        let mark = self.high_water.min(own.saturating_sub(1)).max(own / 2);
        u32::from(queue_depth)
            .wrapping_mul(u32::from(mark))
            .checked_div(u32::from(own))
            .and_then(|scaled| u16::try_from(scaled).ok())
            .unwrap_or(0)
            .max(1)
    }

    /// The deepest queue it agrees to.
    fn deepest(&self, version: u16) -> u16 {
        match version {
            V1 => self.queue_depth.min(V1_DEPTH),
            _ => self.queue_depth,
        }
    }
}

/// What is kept of one NID between connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remembered {
    /// The version it speaks.
    pub version: u16,
    /// Its incarnation, if it has told.
    pub stamp: Option<u64>,
    /// The depth it is known to grant; more than any, if nobody knows better.
    pub queue_depth: u16,
    /// The depth that this node's device is known to hold for it; more than any, if it has refused none.
    pub held_depth: u16,
    /// The fragments it is known to grant.
    pub max_frags: u16,
    /// Races lost against it since the last connection. Only for who looks; see the module.
    pub races_lost: u8,
    /// Redials in a row that were told to happen at once.
    pub redials: u8,
}

impl Remembered {
    /// Nothing known.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            version: V2,
            stamp: None,
            queue_depth: u16::MAX,
            held_depth: u16::MAX,
            max_frags: MAX_FRAGMENTS,
            races_lost: 0,
            redials: 0,
        }
    }

    /// The node has told its version and incarnation. What another life of it granted is forgotten.
    pub const fn learn(&mut self, version: u16, stamp: u64) {
        if let Some(known) = self.stamp
            && known != stamp
        {
            self.queue_depth = u16::MAX;
            self.max_frags = MAX_FRAGMENTS;
        }
        self.version = version;
        self.stamp = Some(stamp);
    }

    /// The last connection to the node is gone: the next request may come from another life, or
    /// another version, without being stale.
    pub const fn forget_life(&mut self) {
        self.version = V2;
        self.stamp = None;
    }

    /// This machine's device could not hold the depth: ask this node for less, and grant it no more (LU-12901). That
    /// holds for every life of the node.
    pub fn lower_depth(&mut self, queue_depth: u16) {
        self.held_depth = self.held_depth.min(queue_depth).max(1);
    }

    /// A connection was agreed on.
    const fn settled(&mut self) {
        self.races_lost = 0;
        self.redials = 0;
    }
}

impl Default for Remembered {
    fn default() -> Self {
        Self::new()
    }
}

/// What two nodes have agreed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// This node.
    pub local: Nid,
    /// Its incarnation.
    pub local_stamp: u64,
    /// The other.
    pub peer: Nid,
    /// Its incarnation.
    pub peer_stamp: u64,
    /// [`V1`] or [`V2`].
    pub version: u16,
    /// Credits of either side.
    pub queue_depth: u16,
    /// Most fragments of a descriptor.
    pub max_frags: u16,
    /// Owed credits from which on a NOOP returns them.
    pub high_water: u16,
    /// Our DONEs are SEND_WITH_INV and kill the peer's keys.
    pub kills_keys: bool,
    /// The peer's DONEs kill ours.
    pub keys_killed: bool,
    /// Where all of a sink is written the last WRITE has immediate data, ours and the peer's, and no DONE follows.
    pub write_immediates: bool,
}

impl Terms {
    /// What an outgoing message carries.
    #[must_use]
    pub const fn envelope(&self, credits: u8) -> Envelope {
        Envelope {
            version: self.version,
            credits,
            source: self.local,
            source_stamp: self.local_stamp,
            destination: self.peer,
            destination_stamp: self.peer_stamp,
        }
    }

    /// Whether an incoming message is of this connection. If not, the connection must be closed.
    ///
    /// # Errors
    /// What is not as agreed.
    pub fn check(&self, envelope: &Envelope) -> Result<(), Stale> {
        if envelope.version != self.version {
            Err(Stale::Version)
        } else if envelope.source != self.peer {
            Err(Stale::Source)
        } else if envelope.destination != self.local {
            Err(Stale::Destination)
        } else if envelope.source_stamp != self.peer_stamp {
            Err(Stale::SourceStamp)
        } else if envelope.destination_stamp != self.local_stamp {
            Err(Stale::DestinationStamp)
        } else {
            Ok(())
        }
    }

    /// Whether both are connections to the same life of the same node. When one is established, the
    /// older ones of which this is not true must be closed: their peer is gone.
    #[must_use]
    pub fn same_life(&self, other: &Self) -> bool {
        self.peer == other.peer
            && self.peer_stamp == other.peer_stamp
            && self.version == other.version
    }

    /// Receives to post before the connection is made: the peer's requests, its answers to ours, and
    /// two NOOPs that need no credit.
    #[must_use]
    pub fn receives(&self) -> u32 {
        let noops = if self.version == V1 { 0 } else { 2 };
        u32::from(self.queue_depth)
            .wrapping_mul(2)
            .wrapping_add(noops)
    }
}

/// Why a message is not of the connection it came on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Stale {
    /// It is in another version of the protocol than was agreed.
    #[error("message in another protocol version than the connection's")]
    Version,
    /// It is from another node.
    #[error("message from another node than the connection's")]
    Source,
    /// It is for another node.
    #[error("message for another node")]
    Destination,
    /// Its sender has restarted, or is an older life.
    #[error("message from another incarnation of the peer")]
    SourceStamp,
    /// It is for an older life of this node.
    #[error("message for another incarnation of this node")]
    DestinationStamp,
}

/// The depth of every version 1 connection.
const V1_DEPTH: u16 = 8;
/// The high-water mark of every version 1 connection.
const V1_HIGH_WATER: u16 = 7;

#[cfg(test)]
mod tests;
