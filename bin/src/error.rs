//! What can go wrong outside of a transfer, with the place and the remedy.

use core::time::Duration;
use std::io;
use std::path::PathBuf;

use o2poll_config::Report;
use o2poll_dataplane::endpoint;
use o2poll_dataplane::nic::Fault;
use o2poll_dataplane::poller::TooSmall;
use o2poll_dataplane::wire::Nid;
use o2poll_hal::arena::{ArenaError, TakeError};
use o2poll_hal::cores::PinError;

/// Why nodes did not start, or did not go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NodeError {
    /// The node file has mistakes.
    #[error("{0}")]
    Config(Report),
    /// The device is of a kind that this build does not know.
    #[error(
        "this build has no such device: use `soft`, or build with `cargo build --features verbs`"
    )]
    UnknownDevice,
    /// An RDMA device, or its connection manager.
    #[error("{0}")]
    Rdma(String),
    /// The capture file.
    #[error("cannot write the capture to {}: {source}; give another file to --pcap", path.display())]
    Capture {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Not even a queue depth of 1 fits.
    #[error(
        "the device cannot hold one transfer of each connection: {0}; raise that in [device], or make fewer connections"
    )]
    SmallDevice(String),
    /// Keys of the device are too short for a whole transfer.
    #[error("{0}")]
    ShortKeys(String),
    /// Windows for one direction only, or none.
    #[error("the device has {}", few_windows(*most))]
    FewWindows {
        /// How many.
        most: usize,
    },
    /// Two nodes work on one export.
    #[error(
        "{first} and {second} both write to the export `{export}`, and each would find what the other wrote: \
         give them one each"
    )]
    TwoWriters {
        /// One.
        first: Nid,
        /// The other.
        second: Nid,
        /// Its name.
        export: String,
    },
    /// A region in pieces that do not hold the workload's slices.
    #[error(
        "the export `{export}` in pieces of {piece} bytes has room for {room} slices of {largest} bytes, and \
         {in_flight} are needed: choose a larger piece"
    )]
    SmallPieces {
        /// Its name.
        export: String,
        /// Bytes of a piece.
        piece: u32,
        /// Slices that fit.
        room: usize,
        /// Bytes of a slice.
        largest: u32,
        /// Slices needed.
        in_flight: u32,
    },
    /// More sizes than one page list can tell apart.
    #[error("a workload takes at most {most} different sizes, and {given} are given")]
    ManySizes {
        /// Given.
        given: usize,
        /// Most.
        most: usize,
    },
    /// A file that is to be copied.
    #[error("cannot read {}: {source}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// No memory.
    #[error("no memory for {node}: {source}")]
    Arena {
        /// For which node.
        node: Nid,
        /// Why.
        source: ArenaError,
    },
    /// An arena that is too small: a miscalculation of ours.
    #[error("the arena of {node} is too small: {source}")]
    Take {
        /// Of which node.
        node: Nid,
        /// Why.
        source: TakeError,
    },
    /// The device did not take what it was sized for.
    #[error("the device of {node} has no room for {what}")]
    Device {
        /// Of which node.
        node: Nid,
        /// For what.
        what: &'static str,
    },
    /// The poller's storage is too small.
    #[error("the storage of {node} is too small: {source}")]
    Storage {
        /// Of which node.
        node: Nid,
        /// What.
        source: TooSmall,
    },
    /// An export was refused by the node's own poller.
    #[error("{node} cannot export `{export}`: {why:?}")]
    Export {
        /// Which node.
        node: Nid,
        /// Its name.
        export: String,
        /// Why.
        why: Option<endpoint::Error>,
    },
    /// Another core of the node waited for it.
    #[error("the first core of {0} did not start")]
    FirstCore(Nid),
    /// A core cannot be polled on.
    #[error("cannot poll on core {core}: {source}")]
    Pin {
        /// Which.
        core: usize,
        /// Why.
        source: PinError,
    },
    /// A thread cannot be made.
    #[error("cannot start the polling thread of core {core}: {source}")]
    Thread {
        /// Of which core.
        core: usize,
        /// Why.
        source: io::Error,
    },
    /// A thread ended by itself.
    #[error("the polling thread of core {core} has died")]
    Died {
        /// Of which core.
        core: usize,
    },
    /// A node's device is unusable.
    #[error("the device of {node} failed: {fault:?}")]
    Fault {
        /// Of which node.
        node: Nid,
        /// How.
        fault: Fault,
    },
    /// A device that somebody takes away.
    #[error("the device {device} is being removed, which waits until nobody uses it")]
    Removed {
        /// Which.
        device: String,
    },
    /// No such node here.
    #[error("no node {0} here")]
    NoNode(Nid),
    /// No connection.
    #[error("{from} cannot connect to {to}: {why}")]
    Dial {
        /// Who asked.
        from: Nid,
        /// Whom.
        to: Nid,
        /// Why not.
        why: String,
    },
    /// A connection ended that was still needed.
    #[error("the connection of {node} to {peer} ended: {why}")]
    Lost {
        /// One end.
        node: Nid,
        /// The other.
        peer: Nid,
        /// Why.
        why: String,
    },
    /// Something took too long.
    #[error("{what} did not come within {after:?}")]
    Late {
        /// What.
        what: &'static str,
        /// How long it was waited for.
        after: Duration,
    },
}

fn few_windows(most: usize) -> &'static str {
    if most == 0 {
        return "no memory windows, by its own word (max_mw and max_mr are 0), and transfers need them; use another device, \
                or a function of it that has some";
    }
    "one memory window, and each direction needs one: the GETs of two nodes could hold the only one of each while their \
     PUTs wait for it; use another device, or a function of it that has more (max_mw)"
}
