//! librdmacm, as far as a connection manager with queue pairs of its own needs it.
//!
//! An [`Id`] is destroyed once, when it is dropped. `rdma_destroy_id(3)` waits for events that were not
//! acknowledged, so every event is copied and acknowledged before anybody looks at it ([`Happening`]).

use core::ffi::{CStr, c_int};
use core::fmt;
use core::mem::{size_of, zeroed};
use core::net::{Ipv4Addr, SocketAddrV4};
use core::ptr::null_mut;
use core::time::Duration;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use o2poll_dataplane::peer::table::Event;
use rdma_core_sys::types::{
    IBV_EVENT_COMM_EST, IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS, RDMA_CM_EVENT_ADDR_CHANGE,
    RDMA_CM_EVENT_ADDR_ERROR, RDMA_CM_EVENT_ADDR_RESOLVED, RDMA_CM_EVENT_CONNECT_ERROR,
    RDMA_CM_EVENT_CONNECT_REQUEST, RDMA_CM_EVENT_CONNECT_RESPONSE, RDMA_CM_EVENT_DEVICE_REMOVAL,
    RDMA_CM_EVENT_DISCONNECTED, RDMA_CM_EVENT_ESTABLISHED, RDMA_CM_EVENT_REJECTED,
    RDMA_CM_EVENT_ROUTE_ERROR, RDMA_CM_EVENT_ROUTE_RESOLVED, RDMA_CM_EVENT_TIMEWAIT_EXIT,
    RDMA_CM_EVENT_UNREACHABLE, RDMA_PS_TCP, ibv_qp_attr, ibv_qp_state, rdma_cm_event,
    rdma_cm_event_type, rdma_cm_id, rdma_conn_param, rdma_event_channel,
};
use rdma_core_sys::{Libibverbs, Librdmacm, libibverbs, librdmacm};

use super::CmError;
use crate::verbs::Device;
use crate::verbs::objects::nonblocking;
use crate::verbs::queue_pair::QueuePair;

/// Where events come in. Shared by its ids, and destroyed after them.
pub(super) struct Channel {
    raw: *mut rdma_event_channel,
    cm: &'static Librdmacm,
    verbs: &'static Libibverbs,
}

/// An `rdma_cm_id`.
#[derive(Debug)]
pub(super) struct Id {
    raw: *mut rdma_cm_id,
    channel: Arc<Channel>,
}

/// A copy of an event of librdmacm.
#[derive(Debug)]
pub(super) struct Happening {
    /// What, as the table knows it.
    pub(super) event: Event,
    /// About whom: [`Id::key`].
    pub(super) key: usize,
    /// The id that came with a request.
    pub(super) request: Option<Id>,
    /// Errno (negative), or the reason of a rejection.
    pub(super) status: i32,
    pub(super) private_data: Vec<u8>,
}

/// What both sides ask of the queue pair of a connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct Parameters<'p> {
    pub(super) private_data: &'p [u8],
    /// Of the queue pair.
    pub(super) number: u32,
}

impl Channel {
    pub(super) fn new() -> Result<Arc<Self>, CmError> {
        let cm = librdmacm().map_err(CmError::Library)?;
        let verbs = libibverbs().map_err(CmError::Library)?;
        // SAFETY: no arguments.
        let raw = unsafe { cm.rdma_create_event_channel() };
        if raw.is_null() {
            return Err(CmError::NoManager(io::Error::last_os_error()));
        }
        // SAFETY: just made. Without it `next` would sleep.
        unsafe { nonblocking((*raw).fd) };
        Ok(Arc::new(Self { raw, cm, verbs }))
    }

    /// Readable when something happened.
    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        // SAFETY: open as long as the channel is, which this borrows.
        unsafe { BorrowedFd::borrow_raw((*self.raw).fd) }
    }

    /// The next event, acknowledged; `None` when there is none.
    pub(super) fn next(self: &Arc<Self>) -> io::Result<Option<Happening>> {
        loop {
            let mut raw: *mut rdma_cm_event = null_mut();
            // SAFETY: the channel is open, and what it gives is acknowledged once, below.
            if unsafe { self.cm.rdma_get_cm_event(self.raw, &mut raw) } != 0 {
                let error = io::Error::last_os_error();
                return match error.kind() {
                    io::ErrorKind::WouldBlock => Ok(None),
                    io::ErrorKind::Interrupted => continue,
                    _ => Err(error),
                };
            }
            let happening = self.copy(raw);
            // SAFETY: taken above, and not acknowledged yet. All of it was copied.
            unsafe { self.cm.rdma_ack_cm_event(raw) };
            if happening.is_some() {
                return Ok(happening);
            }
        }
    }

    fn copy(self: &Arc<Self>, raw: *mut rdma_cm_event) -> Option<Happening> {
        // SAFETY: the library has made it, and it lives until it is acknowledged.
        let found = unsafe { &*raw };
        let event = event_of(found.event)?;
        let mut private_data = Vec::new();
        if carries_data(event) {
            // SAFETY: these events are about a connection.
            let connection = unsafe { found.param.conn };
            let length = usize::from(connection.private_data_len);
            if !connection.private_data.is_null() && length > 0 {
                // SAFETY: the library says so.
                private_data = unsafe {
                    core::slice::from_raw_parts(connection.private_data.cast::<u8>(), length)
                }
                .to_vec();
            }
        }
        // A request brings an id of its own, and is about the listener.
        let (key, request) = match event {
            Event::ConnectRequest => (
                found.listen_id.addr(),
                Some(Id {
                    raw: found.id,
                    channel: Arc::clone(self),
                }),
            ),
            _ => (found.id.addr(), None),
        };
        Some(Happening {
            event,
            key,
            request,
            status: found.status,
            private_data,
        })
    }
}

impl Id {
    pub(super) fn new(channel: &Arc<Channel>) -> io::Result<Self> {
        let mut raw: *mut rdma_cm_id = null_mut();
        // SAFETY: the channel is open.
        let failed = unsafe {
            channel
                .cm
                .rdma_create_id(channel.raw, &mut raw, null_mut(), RDMA_PS_TCP)
        };
        check(failed)?;
        Ok(Self {
            raw,
            channel: Arc::clone(channel),
        })
    }

    /// Names it in events.
    pub(super) fn key(&self) -> usize {
        self.raw.addr()
    }

    /// Lets several ids have the same local port, as TCP does.
    pub(super) fn reuse_address(&self) -> io::Result<()> {
        let mut on: c_int = 1;
        // SAFETY: the id is alive, and `on` as long as is said.
        check(unsafe {
            self.channel.cm.rdma_set_option(
                self.raw,
                RDMA_OPTION_ID,
                RDMA_OPTION_ID_REUSEADDR,
                (&raw mut on).cast(),
                size_of::<c_int>(),
            )
        })
    }

    pub(super) fn bind(&self, address: SocketAddrV4) -> io::Result<()> {
        let mut address = sockaddr(address);
        // SAFETY: the id is alive, and the address a `sockaddr_in`.
        check(unsafe {
            let address = (&raw mut address).cast();
            self.channel.cm.rdma_bind_addr(self.raw, address)
        })
    }

    pub(super) fn listen(&self) -> io::Result<()> {
        // SAFETY: the id is alive.
        check(unsafe { self.channel.cm.rdma_listen(self.raw, 0) })
    }

    pub(super) fn resolve_address(&self, to: SocketAddrV4, milliseconds: c_int) -> io::Result<()> {
        let mut to = sockaddr(to);
        // SAFETY: the id is alive, and the address a `sockaddr_in`.
        check(unsafe {
            let to = (&raw mut to).cast();
            self.channel
                .cm
                .rdma_resolve_addr(self.raw, null_mut(), to, milliseconds)
        })
    }

    pub(super) fn resolve_route(&self, milliseconds: c_int) -> io::Result<()> {
        // SAFETY: the id is alive.
        check(unsafe { self.channel.cm.rdma_resolve_route(self.raw, milliseconds) })
    }

    /// The device that the address led to.
    pub(super) fn device(&self) -> Option<String> {
        // SAFETY: the id is alive; once it has a device, that has a name.
        unsafe {
            let context = (*self.raw).verbs;
            if context.is_null() {
                return None;
            }
            let name = self.channel.verbs.ibv_get_device_name((*context).device);
            (!name.is_null()).then(|| CStr::from_ptr(name).to_string_lossy().into_owned())
        }
    }

    /// The peer's port.
    pub(super) fn peer_port(&self) -> u16 {
        // SAFETY: the id is alive.
        u16::from_be(unsafe { self.channel.cm.rdma_get_dst_port(self.raw) })
    }

    pub(super) fn connect(&self, parameters: Parameters<'_>) -> io::Result<()> {
        let mut raw = parameters.raw();
        // SAFETY: the id is alive; the private data is borrowed for the call.
        check(unsafe { self.channel.cm.rdma_connect(self.raw, &mut raw) })
    }

    pub(super) fn accept(&self, parameters: Parameters<'_>) -> io::Result<()> {
        let mut raw = parameters.raw();
        // SAFETY: as in `connect`.
        check(unsafe { self.channel.cm.rdma_accept(self.raw, &mut raw) })
    }

    pub(super) fn reject(&self, private_data: &[u8]) -> io::Result<()> {
        let length = u8::try_from(private_data.len()).unwrap_or(0);
        // SAFETY: the id is alive; the private data is as long as is said, and borrowed for the call.
        check(unsafe {
            let data = private_data.as_ptr().cast();
            self.channel.cm.rdma_reject(self.raw, data, length)
        })
    }

    /// Sends the RTU.
    pub(super) fn establish(&self) -> io::Result<()> {
        // SAFETY: the id is alive.
        check(unsafe { self.channel.cm.rdma_establish(self.raw) })
    }

    /// The RTU is lost, but data came.
    pub(super) fn notify_established(&self) -> io::Result<()> {
        // SAFETY: the id is alive.
        check(unsafe { self.channel.cm.rdma_notify(self.raw, IBV_EVENT_COMM_EST) })
    }

    pub(super) fn disconnect(&self) -> io::Result<()> {
        // SAFETY: the id is alive.
        check(unsafe { self.channel.cm.rdma_disconnect(self.raw) })
    }

    /// RESET to INIT.
    pub(super) fn initialise(&self, qp: &mut QueuePair, device: &Device) -> Result<(), CmError> {
        self.move_on(qp, device, IBV_QPS_INIT, Duration::MAX)
    }

    /// INIT to RTS: both sides can send and receive. Without an acknowledgement all retries nominally end
    /// within `patience`; a card may take four times as long (IB spec, 9.7.6.1.3), and they are never shortened to less
    /// than 0.4 s.
    pub(super) fn make_ready(
        &self,
        qp: &mut QueuePair,
        device: &Device,
        patience: Duration,
    ) -> Result<(), CmError> {
        // Again: before the REQ was sent, the kernel answered with no access rights at all.
        self.move_on(qp, device, IBV_QPS_INIT, patience)?;
        self.move_on(qp, device, IBV_QPS_RTR, patience)?;
        self.move_on(qp, device, IBV_QPS_RTS, patience)
    }

    fn move_on(
        &self,
        qp: &mut QueuePair,
        device: &Device,
        state: ibv_qp_state,
        patience: Duration,
    ) -> Result<(), CmError> {
        let mut attr = ibv_qp_attr {
            qp_state: state,
            ..Default::default()
        };
        let mut mask: c_int = 0;
        // SAFETY: the id is alive; both are borrowed for the call.
        let failed = unsafe {
            self.channel
                .cm
                .rdma_init_qp_attr(self.raw, &mut attr, &mut mask)
        };
        check(failed).map_err(|source| CmError::Call {
            what: "rdma_init_qp_attr",
            source,
        })?;
        // Neither side READs.
        attr.max_dest_rd_atomic = 0;
        attr.max_rd_atomic = 0;
        // The manager's is 2 s on RoCE, whoever is waiting: then two losses in a row outlast a short timeout.
        attr.timeout = attr.timeout.min(ack_timeout(patience));
        qp.modify(device, &mut attr, mask.cast_unsigned())
            .map_err(CmError::Device)
    }
}

impl Parameters<'_> {
    fn raw(&self) -> rdma_conn_param {
        // SAFETY: numbers and a pointer, for which zeros are values.
        let mut raw: rdma_conn_param = unsafe { zeroed() };
        raw.private_data = self.private_data.as_ptr().cast();
        raw.private_data_len = u8::try_from(self.private_data.len()).unwrap_or(0);
        raw.retry_count = RETRIES;
        raw.rnr_retry_count = RNR_RETRIES;
        raw.qp_num = self.number;
        raw
    }
}

impl fmt::Debug for Channel {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "Channel({:?})", self.descriptor())
    }
}

impl Drop for Id {
    fn drop(&mut self) {
        // SAFETY: made or got once; all its events are acknowledged.
        unsafe { self.channel.cm.rdma_destroy_id(self.raw) };
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // SAFETY: made once; its ids held it by count.
        unsafe { self.cm.rdma_destroy_event_channel(self.raw) };
    }
}

// SAFETY: librdmacm may be called from any thread (rdma_cm(7)), and a control thread owns these.
unsafe impl Send for Channel {}
// SAFETY: as above; the library locks what is shared.
unsafe impl Sync for Channel {}
// SAFETY: as above.
unsafe impl Send for Id {}

fn event_of(raw: rdma_cm_event_type) -> Option<Event> {
    Some(match raw {
        RDMA_CM_EVENT_ADDR_RESOLVED => Event::AddrResolved,
        RDMA_CM_EVENT_ADDR_ERROR => Event::AddrError,
        RDMA_CM_EVENT_ROUTE_RESOLVED => Event::RouteResolved,
        RDMA_CM_EVENT_ROUTE_ERROR => Event::RouteError,
        RDMA_CM_EVENT_CONNECT_REQUEST => Event::ConnectRequest,
        RDMA_CM_EVENT_CONNECT_RESPONSE => Event::ConnectResponse,
        RDMA_CM_EVENT_CONNECT_ERROR => Event::ConnectError,
        RDMA_CM_EVENT_UNREACHABLE => Event::Unreachable,
        RDMA_CM_EVENT_REJECTED => Event::Rejected,
        RDMA_CM_EVENT_ESTABLISHED => Event::Established,
        RDMA_CM_EVENT_DISCONNECTED => Event::Disconnected,
        RDMA_CM_EVENT_DEVICE_REMOVAL => Event::DeviceRemoval,
        RDMA_CM_EVENT_ADDR_CHANGE => Event::AddrChange,
        RDMA_CM_EVENT_TIMEWAIT_EXIT => Event::TimewaitExit,
        // Multicast, which nobody here asks for, and what later libraries may say.
        _ => return None,
    })
}

const fn carries_data(event: Event) -> bool {
    matches!(
        event,
        Event::ConnectRequest | Event::ConnectResponse | Event::Rejected | Event::Established
    )
}

/// The longest wait for an acknowledgement, 4.096 us times two to this, with which the first try and all that follow it
/// nominally end within `patience`. A card may take four times as long (IB spec, 9.7.6.1.3), and it is never less than
/// [`LEAST_ACK_TIMEOUT`]: six tries of 67 ms, 0.4 s, however short `patience` is.
fn ack_timeout(patience: Duration) -> u8 {
    let each = patience.as_nanos() / u128::from(RETRIES + 1) / ACK_UNIT;
    let exponent = each.max(1).ilog2().clamp(LEAST_ACK_TIMEOUT, 31);
    u8::try_from(exponent).unwrap_or(31)
}

fn sockaddr(address: SocketAddrV4) -> libc::sockaddr_in {
    let ip: Ipv4Addr = *address.ip();
    // SAFETY: numbers, for which zeros are values.
    let mut raw: libc::sockaddr_in = unsafe { zeroed() };
    raw.sin_family = libc::sa_family_t::try_from(libc::AF_INET).unwrap_or(0);
    raw.sin_port = address.port().to_be();
    raw.sin_addr.s_addr = u32::from_ne_bytes(ip.octets());
    raw
}

fn check(failed: c_int) -> io::Result<()> {
    if failed == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Of `rdma_set_option(3)`; the headers have no name for their kind.
const RDMA_OPTION_ID: c_int = 0;
const RDMA_OPTION_ID_REUSEADDR: c_int = 1;

/// As ko2iblnd's `retry_count` and `rnr_retry_count`.
const RETRIES: u8 = 5;
const RNR_RETRIES: u8 = 6;

/// Of the wait for an acknowledgement, in nanoseconds (IB spec, 11.2.4.2).
const ACK_UNIT: u128 = 4096;
/// 67 ms: less takes a busy peer for one that is gone.
const LEAST_ACK_TIMEOUT: u32 = 14;

#[cfg(test)]
mod tests {
    use super::{RETRIES, ack_timeout, sockaddr};
    use core::net::{Ipv4Addr, SocketAddrV4};
    use core::time::Duration;

    #[test]
    fn all_retries_of_the_device_nominally_end_within_the_timeout_of_a_transfer() {
        for seconds in [1, 5, 10, 15, 20, 50, 300] {
            let wait = Duration::from_nanos(4096 << ack_timeout(Duration::from_secs(seconds)));
            let all = wait * u32::from(RETRIES + 1);
            let patience = Duration::from_secs(seconds);
            assert!(
                all <= patience && all * 2 > patience,
                "{seconds} s: {all:?}"
            );
        }
        assert_eq!(ack_timeout(Duration::ZERO), 14);
        assert_eq!(ack_timeout(Duration::MAX), 31);
    }

    #[test]
    fn no_timeout_of_a_transfer_makes_all_retries_shorter_than_what_is_documented() {
        for milliseconds in 0..=2000 {
            let patience = Duration::from_millis(milliseconds);
            let wait = Duration::from_nanos(4096 << ack_timeout(patience));
            let all = wait * u32::from(RETRIES + 1);
            assert!(all >= Duration::from_millis(402), "{patience:?}: {all:?}");
            assert!(
                all <= patience.max(Duration::from_millis(403)),
                "{patience:?}: {all:?}"
            );
        }
    }

    #[test]
    fn addresses_are_in_network_order() {
        let raw = sockaddr(SocketAddrV4::new(Ipv4Addr::new(10, 9, 0, 1), 987));
        assert_eq!(i32::from(raw.sin_family), libc::AF_INET);
        assert_eq!(raw.sin_port.to_ne_bytes(), [0x03, 0xdb]);
        assert_eq!(raw.sin_addr.s_addr.to_ne_bytes(), [10, 9, 0, 1]);
    }
}
