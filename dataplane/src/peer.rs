//! What two nodes agreed on. (The rest of this room is being built.)

use crate::wire::Nid;

/// What the two ends of a connection agreed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// Our NID.
    pub local: Nid,
    /// Our incarnation.
    pub local_stamp: u64,
    /// The peer's NID.
    pub peer: Nid,
    /// The peer's incarnation.
    pub peer_stamp: u64,
    /// Protocol version, 0x12.
    pub version: u16,
    /// Peer credits of this connection.
    pub queue_depth: u16,
    /// Most fragments of a descriptor.
    pub max_frags: u16,
    /// Owed credits from which on a NOOP returns them.
    pub high_water: u16,
}
