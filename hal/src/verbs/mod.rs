//! RDMA devices, by libibverbs.
//!
//! [`Verbs`] is the device as one polling core sees it (`dataplane::nic`). It registers with **type-2 memory
//! windows**: a registration is a BIND_MW on the queue, without a system call, and one contiguous range.
//! libibverbs is loaded when the first device is asked for, so a program with this in it starts where
//! rdma-core is not installed.
//!
//! | room | what lives there |
//! |---|---|
//! | [`device`](Device) | which devices there are, their ports and addresses, what happens to them |
//! | [`objects`](Domain) | protection domains, registered memory, windows, completion queues |
//! | [`queue_pair`](QueuePair) | queue pairs, and how they are connected |
//! | [`nic`](Verbs) | the contract: adopt and retire, receive and poll |
//! | `send` | the send side of it: requests into the open chain, and the chain to the device |
//! | `chain` | work requests as the library wants them, checked before it sees them |
//! | `slots` | what the driver keeps of each queue pair |
//! | `windows` | the driver's own account of keys |
//! | `fence` | what keeps rxe from carrying a BIND out twice |
//! | `trap` | a request that fails for certain |
//! | `decode` | what a completion says |
//! | [`cm`] | connections to other nodes, over librdmacm |
//! | [`quirks`](Quirks) | what some drivers do differently, by name |
//! | [`probe`](probe()) | what a device can do, found out by doing it |
//!
//! # A control thread and a core
//! A control thread opens the device, makes a [`Domain`] and one [`CompletionQueue`] per core, registers memory, and
//! makes [`QueuePair`]s and [`Window`]s. The core adopts them by value and gives them back the same way. Whichever way
//! they are dropped, the library's objects are destroyed in the order it asks for.
//!
//! # What is refused here
//! A provider checks next to nothing, and rxe's kernel crashes when a window is invalidated that is not bound. So
//! a request that must fail (a range outside of memory, a foreign key, a live window bound again) never reaches
//! the provider: in its place goes one that fails for certain, a byte under the key of another protection
//! domain, and its completion is told with the status of the request it stands for. Ones behind it become empty
//! messages, which are only flushed. The queue pair goes to error, as the contract says, and everything completes
//! in order.
#![allow(unsafe_code)]

use std::io;

use crate::arena::Size;

mod chain;
pub mod cm;
mod decode;
mod device;
mod fence;
mod nic;
mod objects;
mod probe;
mod queue_pair;
mod quirks;
mod raw;
mod send;
mod slots;
#[cfg(any(test, feature = "verbs-stub"))]
pub mod stub;
#[cfg(test)]
mod tests;
mod trap;
mod windows;

pub use self::device::{Device, Event, Gid, GidKind, Port};
pub use self::nic::{Counts, Limits, Verbs};
pub use self::objects::{CompletionQueue, Domain, Memory, Window};
pub use self::probe::{Findings, probe};
pub use self::queue_pair::{Path, QueuePair, Shape};
pub use self::quirks::Quirks;

/// Why something of a device could not be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// libibverbs cannot be used.
    #[error(transparent)]
    Library(&'static rdma_core_sys::LoadError),
    /// The kernel offers no devices to user space.
    #[error("this kernel offers no RDMA devices to user space ({0}): modprobe ib_uverbs")]
    NoKernel(io::Error),
    /// A call of the library failed.
    #[error("{what} on device {device}: {source}{}", remedy(what, source))]
    Call {
        /// Which.
        what: &'static str,
        /// On which device.
        device: String,
        /// As the library says.
        source: io::Error,
    },
    /// Memory that could not be registered. All that a process has registered counts against its limit of locked
    /// memory, unless it has CAP_IPC_LOCK.
    #[error("ibv_reg_mr of {} on device {device}: {source}{}", Size(*bytes), unlock(source, *bytes, *limit))]
    Register {
        /// How much was to be registered.
        bytes: usize,
        /// The limit of locked memory (`RLIMIT_MEMLOCK`) in bytes, if there is one.
        limit: Option<usize>,
        /// On which device.
        device: String,
        /// As the library says.
        source: io::Error,
    },
    /// There is no such device.
    #[error("there is no RDMA device {name}; there are: {have}. See `rdma link show`")]
    NoDevice {
        /// Asked for.
        name: String,
        /// There.
        have: String,
    },
    /// There is no such port.
    #[error("device {device} has no port {port}: {have} of them, counted from 1")]
    NoPort {
        /// Which device.
        device: String,
        /// Asked for.
        port: u8,
        /// How many there are.
        have: u8,
    },
    /// A port that carries nothing.
    #[error("port {port} of device {device} is not active: {remedy}")]
    PortDown {
        /// Which device.
        device: String,
        /// Which port.
        port: u8,
        /// What to do about it.
        remedy: &'static str,
    },
    /// A port without an address.
    #[error(
        "port {port} of device {device} has no address: give its network interface one, and bring it up"
    )]
    NoGid {
        /// Which device.
        device: String,
        /// Which port.
        port: u8,
    },
    /// A completion queue of another device, or one without a lock that was made for another thread.
    #[error(
        "a queue pair of device {device} cannot report to this completion queue: make both with the same domain"
    )]
    Mixed {
        /// Of the queue pair.
        device: String,
    },
    /// More than the device has.
    #[error("{what}: {asked} were asked for, and device {device} has {most}")]
    TooMany {
        /// Of what.
        what: &'static str,
        /// Asked for.
        asked: u32,
        /// There.
        most: u32,
        /// Which device.
        device: String,
    },
    /// The device did not do what it said it could, or not in time.
    #[error("device {device} was tried and {what}")]
    Probe {
        /// What happened.
        what: String,
        /// Which device.
        device: String,
    },
}

/// What to do about an error of the library.
fn remedy(what: &str, error: &io::Error) -> &'static str {
    match (what, error.raw_os_error()) {
        ("ibv_create_qp", Some(libc::ENOMEM)) => {
            ": ask for less (peer_credits), or raise the limit of locked memory (ulimit -l, LimitMEMLOCK=)"
        }
        (_, Some(libc::ENOMEM)) => ": raise the limit of locked memory (ulimit -l, LimitMEMLOCK=)",
        (_, Some(libc::EPERM | libc::EACCES)) => ": this needs access to /dev/infiniband/*",
        ("ibv_open_device", Some(libc::ENOENT | libc::ENODEV | libc::ENXIO)) => {
            ": there is no node of it in /dev/infiniband: modprobe ib_uverbs, and in a container pass the directory in"
        }
        _ => "",
    }
}

/// What to do about memory that cannot be registered.
fn unlock(error: &io::Error, bytes: usize, limit: Option<usize>) -> String {
    match (error.raw_os_error(), limit) {
        (Some(libc::ENOMEM), Some(limit)) => format!(
            ": the limit of locked memory is {} for all that is registered: raise it with `ulimit -l {}`, memlock \
             in limits.conf(5) or LimitMEMLOCK= in the unit, or give the program CAP_IPC_LOCK",
            Size(limit),
            // What else is registered fits into the limit.
            bytes.saturating_add(limit).div_ceil(1024)
        ),
        _ => remedy("ibv_reg_mr", error).to_owned(),
    }
}

fn last_error(what: &'static str, device: &Device) -> DeviceError {
    DeviceError::Call {
        what,
        device: device.name().to_owned(),
        source: io::Error::last_os_error(),
    }
}
