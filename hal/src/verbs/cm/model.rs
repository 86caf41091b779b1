//! What a manager is told, and what it tells.

use core::net::SocketAddrV4;
use core::time::Duration;
use std::io;
use std::time::Instant;

use o2poll_dataplane::peer::{Local, Refused, Terms};
use o2poll_dataplane::poller;
use o2poll_dataplane::pool::Handle;

use super::Id;
use crate::verbs::{DeviceError, QueuePair, Shape};

/// How a node connects.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// The node.
    pub local: Local,
    /// Port that it listens on, and that it dials: ko2iblnd's `service`, 987.
    pub service: u16,
    /// Dial from a port below 1024, as ko2iblnd's `use_privileged_port` does. Without the permission for it, another
    /// port is taken and it is said.
    pub privileged_port: bool,
    /// Size of every queue pair.
    pub shape: Shape,
    /// What a core holds. Where the device refuses a queue pair of the full depth, one of half of it has what this says
    /// of that depth.
    pub core: poller::Shape,
    /// Most connections of one core.
    pub connections: usize,
    /// How long an attempt may take.
    pub patience: Duration,
    /// How long a transfer may take: the device gives up a peer that acknowledges nothing no later, nominally; a card may
    /// take four times as long (IB spec, 9.7.6.1.3), and it is never shortened to less than 0.4 s.
    pub timeout: Duration,
}

/// What the control side must tell a core.
#[derive(Debug)]
pub enum Effect {
    /// Give the queue pair to the core.
    Adopt {
        /// Which core.
        core: usize,
        /// For [`Manager::ready`](super::Manager::ready), [`Manager::no_room`](super::Manager::no_room) and
        /// [`Manager::gone`](super::Manager::gone).
        id: Id,
        /// Connected, in RTS.
        qp: QueuePair,
        /// What was agreed.
        terms: Terms,
        /// This node was asked.
        accepted: bool,
    },
    /// Messages may flow.
    Establish {
        /// Which core.
        core: usize,
        /// As told by the core.
        connection: Handle,
        /// What was agreed.
        terms: Terms,
        /// This node has asked.
        dialed: bool,
    },
    /// End it.
    Close {
        /// Which core.
        core: usize,
        /// As told by the core.
        connection: Handle,
    },
}

/// How an attempt to connect stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Dial {
    /// Under way.
    Trying,
    /// To be tried again then.
    Pausing(Instant),
    /// Connected.
    Up {
        /// The core that has it.
        core: usize,
        /// As the core named it.
        connection: Handle,
        /// What was agreed.
        terms: Terms,
    },
    /// Not connected, or no longer.
    Failed(Failure),
}

impl Dial {
    /// The core, its name for the connection, and the terms, once it is connected; nothing while it is under way.
    ///
    /// # Errors
    /// Why it is not connected.
    pub const fn link(&self) -> Result<Option<(usize, Handle, &Terms)>, &Failure> {
        match self {
            Self::Trying | Self::Pausing(_) => Ok(None),
            Self::Up {
                core,
                connection,
                terms,
            } => Ok(Some((*core, *connection, terms))),
            Self::Failed(failure) => Err(failure),
        }
    }
}

/// Who wanted the end of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ending {
    /// This node, or a peer that had made the connection.
    Asked,
    /// The core: it has seen an error, and says which.
    Core,
    /// Nobody here.
    Failed(Failure),
}

/// Why there is no connection.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// No address or no route.
    #[error("no route to it: is its address right, and in a network of {device}?")]
    NoRoute {
        /// Our device.
        device: String,
    },
    /// The route leads elsewhere.
    #[error("the route to it leads over {found}, not over {device}")]
    OtherDevice {
        /// Where it leads.
        found: String,
        /// Our device.
        device: String,
    },
    /// Refused.
    #[error(transparent)]
    Refused(#[from] Refused),
    /// Its answer is wrong.
    #[error("its answer is not accepted: {0}")]
    BadAnswer(String),
    /// No answer.
    #[error(
        "no answer: is the node up, and does its network carry RDMA (RoCE v2 is UDP port 4791)?"
    )]
    Silent,
    /// It went away.
    #[error("broken off by the peer")]
    BrokenOff,
    /// We did.
    #[error("closed by this node")]
    Closed,
    /// The device went away.
    #[error("the device {0} was removed")]
    DeviceRemoved(String),
    /// All queue pairs are in use.
    #[error("this node has no room for another connection")]
    NoRoom,
    /// A call of the library failed.
    #[error("{0}")]
    Call(String),
}

/// Why the connection manager cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CmError {
    /// librdmacm cannot be used.
    #[error(transparent)]
    Library(&'static rdma_core_sys::LoadError),
    /// The kernel's side is not there.
    #[error(
        "the RDMA connection manager cannot be used: {0}; is the kernel module rdma_ucm loaded, and \
         /dev/infiniband/rdma_cm accessible?"
    )]
    NoManager(io::Error),
    /// Not permitted to listen.
    #[error(
        "{address} cannot be listened on: ports below 1024 need CAP_NET_BIND_SERVICE: run as root, or `setcap \
         cap_net_bind_service+ep` the program"
    )]
    NotPermitted {
        /// Where.
        address: SocketAddrV4,
    },
    /// Somebody else listens.
    #[error("{address} is taken: does another node, or the kernel's LNet, listen there?")]
    Taken {
        /// Where.
        address: SocketAddrV4,
    },
    /// Not our address.
    #[error(
        "{address} is not an address of an RDMA device of this machine; see `ip addr` and `rdma link`"
    )]
    NotOurs {
        /// Where.
        address: SocketAddrV4,
    },
    /// The address is another device's.
    #[error("{address} belongs to the device {found}, not to {device}")]
    OtherDevice {
        /// Where.
        address: SocketAddrV4,
        /// Whose it is.
        found: String,
        /// The one that is used.
        device: String,
    },
    /// The device refused something.
    #[error(transparent)]
    Device(DeviceError),
    /// A call of librdmacm failed.
    #[error("{what}: {source}")]
    Call {
        /// Which.
        what: &'static str,
        /// As it says.
        source: io::Error,
    },
}
