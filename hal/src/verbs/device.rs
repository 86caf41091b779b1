//! Devices: which there are, what they say of themselves, and what happens to them.

use core::ffi::CStr;
use core::fmt;
use core::mem::MaybeUninit;
use core::time::Duration;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use o2poll_dataplane::nic::{Capabilities, Mechanisms};
use rdma_core_sys::inline::{ibv_query_gid_table, ibv_query_port};
use rdma_core_sys::libibverbs;
use rdma_core_sys::types::{
    IBV_DEVICE_MEM_WINDOW_TYPE_2A, IBV_DEVICE_MEM_WINDOW_TYPE_2B, IBV_EVENT_COMM_EST,
    IBV_EVENT_CQ_ERR, IBV_EVENT_DEVICE_FATAL, IBV_EVENT_QP_ACCESS_ERR, IBV_EVENT_QP_FATAL,
    IBV_EVENT_QP_REQ_ERR, IBV_GID_TYPE_ROCE_V1, IBV_GID_TYPE_ROCE_V2, IBV_LINK_LAYER_ETHERNET,
    IBV_PORT_ACTIVE, ibv_async_event, ibv_context, ibv_device_attr, ibv_gid_entry, ibv_mtu,
    ibv_port_attr,
};

use super::DeviceError;
use super::objects::{nonblocking, readable};
use super::probe::Findings;
use super::quirks::Quirks;
use super::raw::{Calls, Context, Cq};

/// An open device. Clones are the same one; it is closed when nothing that was made with it is left.
#[derive(Clone)]
pub struct Device(Arc<Inner>);

struct Inner {
    context: Arc<Context>,
    name: String,
    attr: ibv_device_attr,
    quirks: Quirks,
    /// Completion queues whose faults have to be told.
    queues: Mutex<Vec<Weak<Cq>>>,
}

/// What a port is like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Port {
    /// It carries traffic.
    pub active: bool,
    /// Bytes of payload of a packet, as `enum ibv_mtu` numbers them.
    pub mtu: ibv_mtu,
    /// Longest message in bytes.
    pub max_message: u32,
    /// Local identifier; 0 on Ethernet.
    pub lid: u16,
    /// Ethernet, not InfiniBand.
    pub ethernet: bool,
}

/// An address of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gid {
    /// Place in the table.
    pub index: u8,
    /// Port it belongs to.
    pub port: u8,
    /// The address; an IPv4 address of RoCE v2 is mapped into IPv6.
    pub bytes: [u8; 16],
    /// Which frames go out from it.
    pub kind: GidKind,
}

/// Frames of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum GidKind {
    /// InfiniBand.
    InfiniBand,
    /// Ethernet with a GRH.
    RoceV1,
    /// UDP, port 4791.
    RoceV2,
}

/// What happened to a device (`ibv_get_async_event(3)`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// The first message came to a queue pair before its connection was confirmed: the connection manager
    /// should be told (`rdma_notify(3)`). The queue pair's number.
    Established(u32),
    /// A queue pair went to error: its number, and the library's name for it.
    QueuePair(u32, &'static str),
    /// A completion queue overflowed: the core that polls it gets [`Overrun`](o2poll_dataplane::nic::Fault).
    CompletionQueue,
    /// The device is gone: all cores that use it are told.
    DeviceGone,
    /// Anything else, by the library's name.
    Other(&'static str),
}

impl Device {
    /// The names of the devices of this machine.
    ///
    /// # Errors
    /// When libibverbs is not there, or cannot say.
    pub fn names() -> Result<Vec<String>, DeviceError> {
        let library = libibverbs().map_err(DeviceError::Library)?;
        let list = List::new(Calls::of(library))?;
        Ok(list.iter().map(|(name, _)| name).collect())
    }

    /// Opens a device.
    ///
    /// # Errors
    /// When libibverbs is not there, when there is no such device, and as the library says.
    pub fn open(name: &str) -> Result<Self, DeviceError> {
        let library = libibverbs().map_err(DeviceError::Library)?;
        Self::open_with(Calls::of(library), name)
    }

    pub(super) fn open_with(calls: Calls, name: &str) -> Result<Self, DeviceError> {
        let list = List::new(calls)?;
        let failed = |what, source| DeviceError::Call {
            what,
            device: name.to_owned(),
            source,
        };
        let Some((_, device)) = list.iter().find(|(found, _)| found == name) else {
            let have: Vec<String> = list.iter().map(|(name, _)| name).collect();
            return Err(DeviceError::NoDevice {
                name: name.to_owned(),
                have: if have.is_empty() {
                    "none".to_owned()
                } else {
                    have.join(", ")
                },
            });
        };
        // SAFETY: it is in the list, which is not freed yet.
        let raw = unsafe { (calls.open_device)(device) };
        if raw.is_null() {
            return Err(failed("ibv_open_device", io::Error::last_os_error()));
        }
        let context = Arc::new(Context::new(raw, calls));
        let mut attr = ibv_device_attr::default();
        // SAFETY: the context is open.
        let errno = unsafe { (calls.query_device)(raw, &mut attr) };
        if errno != 0 {
            return Err(failed("ibv_query_device", answered(errno)));
        }
        // SAFETY: the context is open. Who waits for events does so with `poll(2)`.
        unsafe { nonblocking((*raw).async_fd) };
        Ok(Self(Arc::new(Inner {
            context,
            name: name.to_owned(),
            attr,
            quirks: Quirks::of_vendor(attr.vendor_id),
            queues: Mutex::new(Vec::new()),
        })))
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// What has gone wrong with it since it was last asked, where nobody could be told: calls that were to destroy something
    /// and failed, by name and error number, completions of requests that were not outstanding, and, once for each cause,
    /// why queue pairs go without the fences of [`Quirks::BIND_IS_REPLAYED`]. What nobody has asked for
    /// when the device is closed goes to standard error.
    #[must_use]
    pub fn complaints(&self) -> Vec<String> {
        self.0.context.complaints()
    }

    /// What is known to be different on it.
    #[must_use]
    pub fn quirks(&self) -> Quirks {
        self.0.quirks
    }

    /// What it says of itself (`ibv_query_device(3)`).
    #[must_use]
    pub fn attributes(&self) -> &ibv_device_attr {
        &self.0.attr
    }

    /// Its context, for libraries that stand beside libibverbs. Valid while a clone of this exists.
    #[must_use]
    pub fn raw_context(&self) -> *mut ibv_context {
        self.0.context.raw
    }

    /// Whether it says that it has type-2 windows. [`probe`](super::probe) finds out.
    #[must_use]
    pub fn offers_windows(&self) -> bool {
        let flags = IBV_DEVICE_MEM_WINDOW_TYPE_2A | IBV_DEVICE_MEM_WINDOW_TYPE_2B;
        self.0.attr.device_cap_flags & flags != 0
    }

    /// The most type-2 windows that it has. Linux's mlx4 says that it has them and leaves `max_mw` at 0: its windows are of
    /// the table of its memory regions, so that `max_mr` is their limit as well.
    #[must_use]
    pub fn windows(&self) -> u32 {
        let attr = &self.0.attr;
        match count(attr.max_mw) {
            0 if self.offers_windows() => count(attr.max_mr),
            most => most,
        }
    }

    /// What the data plane may count on: what it says of itself, and what was [found out](super::probe).
    #[must_use]
    pub fn capabilities(&self, findings: &Findings) -> Capabilities {
        let attr = &self.0.attr;
        Capabilities {
            mechanisms: if findings.windows {
                Mechanisms::WINDOW
            } else {
                Mechanisms::empty()
            },
            max_fragments: 0,
            max_pages: 0,
            page_shift: 12,
            zero_based: false,
            // Whether the device does or not: this driver does.
            checks_reuse: true,
            region_lkey: false,
            remote_invalidate: findings.remote_invalidate,
            max_sge: count(attr.max_sge),
            max_send_wr: count(attr.max_qp_wr),
            max_recv_wr: count(attr.max_qp_wr),
            max_cqe: count(attr.max_cqe),
            max_windows: self.windows(),
        }
    }

    /// What a port is like now. They are counted from 1.
    ///
    /// # Errors
    /// When there is no such port, and as the library says.
    pub fn port(&self, port: u8) -> Result<Port, DeviceError> {
        let mut attr = ibv_port_attr::default();
        let have = self.0.attr.phys_port_cnt;
        if port == 0 || port > have {
            return Err(DeviceError::NoPort {
                device: self.0.name.clone(),
                port,
                have,
            });
        }
        let symbol = self.calls().query_port;
        // SAFETY: the context is open.
        let errno = unsafe { ibv_query_port(symbol, self.raw_context(), port, &mut attr) };
        if errno != 0 {
            return Err(DeviceError::Call {
                what: "ibv_query_port",
                device: self.0.name.clone(),
                source: answered(errno),
            });
        }
        Ok(Port {
            active: attr.state == IBV_PORT_ACTIVE,
            mtu: attr.active_mtu,
            max_message: attr.max_msg_sz,
            lid: attr.lid,
            ethernet: u32::from(attr.link_layer) == IBV_LINK_LAYER_ETHERNET,
        })
    }

    /// The same of one that carries traffic.
    ///
    /// # Errors
    /// When there is no such port, when it is not active, and as the library says.
    pub fn active_port(&self, port: u8) -> Result<Port, DeviceError> {
        let found = self.port(port)?;
        if found.active {
            return Ok(found);
        }
        Err(DeviceError::PortDown {
            device: self.0.name.clone(),
            port,
            remedy: if found.ethernet {
                "bring its network interface up, and see that its cable is in (`rdma link show`, `ip link`)"
            } else {
                "see that its cable is in and that a subnet manager runs (`ibstat`)"
            },
        })
    }

    /// All its addresses.
    ///
    /// # Errors
    /// As the library says.
    pub fn gids(&self) -> Result<Vec<Gid>, DeviceError> {
        let mut table = vec![ibv_gid_entry::default(); 256];
        // SAFETY: the context is open, and the table as long as is said.
        let count = unsafe {
            ibv_query_gid_table(
                self.calls().query_gid_table,
                self.raw_context(),
                table.as_mut_ptr(),
                table.len(),
            )
        };
        let Ok(count) = usize::try_from(count) else {
            let errno = i32::try_from(count.unsigned_abs()).unwrap_or(libc::EIO);
            return Err(DeviceError::Call {
                what: "ibv_query_gid_table",
                device: self.0.name.clone(),
                source: io::Error::from_raw_os_error(errno),
            });
        };
        let gids = table.iter().take(count).filter_map(|entry| {
            Some(Gid {
                index: u8::try_from(entry.gid_index).ok()?,
                port: u8::try_from(entry.port_num).ok()?,
                // SAFETY: every view of the union is 16 bytes of number.
                bytes: unsafe { entry.gid.raw },
                kind: match entry.gid_type {
                    IBV_GID_TYPE_ROCE_V1 => GidKind::RoceV1,
                    IBV_GID_TYPE_ROCE_V2 => GidKind::RoceV2,
                    _ => GidKind::InfiniBand,
                },
            })
        });
        Ok(gids.collect())
    }

    /// The address of a port that connections go out from: RoCE v2 with an IPv4 address before one without,
    /// any of RoCE v2 before the others.
    ///
    /// # Errors
    /// As [`gids`](Self::gids), and when the port has none.
    pub fn gid(&self, port: u8) -> Result<Gid, DeviceError> {
        let mut gids = self.gids()?;
        gids.retain(|gid| gid.port == port);
        gids.sort_by_key(|gid| (gid.kind != GidKind::RoceV2, gid.ipv4().is_none(), gid.index));
        gids.first().copied().ok_or_else(|| DeviceError::NoGid {
            device: self.0.name.clone(),
            port,
        })
    }

    /// Readable when something happened; then call [`event`](Self::event).
    #[must_use]
    pub fn event_descriptor(&self) -> BorrowedFd<'_> {
        // SAFETY: open as long as the context is, which this borrows.
        unsafe { BorrowedFd::borrow_raw((*self.raw_context()).async_fd) }
    }

    /// Waits for something to happen, and tells the cores that it concerns. `None` when nothing did in time.
    ///
    /// Some control thread must do this all the time: a queue pair or completion queue is destroyed only
    /// when its events have been taken, and a core learns of an overrun by it alone.
    ///
    /// # Errors
    /// As the library says.
    pub fn event(&self, patience: Duration) -> Result<Option<Event>, DeviceError> {
        let patience = i32::try_from(patience.as_millis()).unwrap_or(i32::MAX);
        let failed = |source| DeviceError::Call {
            what: "ibv_get_async_event",
            device: self.0.name.clone(),
            source,
        };
        if !readable(self.event_descriptor(), patience).map_err(failed)? {
            return Ok(None);
        }
        let mut raw = MaybeUninit::<ibv_async_event>::zeroed();
        // SAFETY: the context is open. What it gives is acknowledged once, below.
        if unsafe { (self.calls().get_async_event)(self.raw_context(), raw.as_mut_ptr()) } != 0 {
            let error = io::Error::last_os_error();
            return match error.kind() {
                // Another thread was faster.
                io::ErrorKind::WouldBlock => Ok(None),
                _ => Err(failed(error)),
            };
        }
        // SAFETY: the library has filled it, and zeros would be a value as well.
        let mut raw = unsafe { raw.assume_init() };
        let event = self.read(&raw);
        // SAFETY: taken above, and not acknowledged yet.
        unsafe { (self.calls().ack_async_event)(&mut raw) };
        Ok(Some(event))
    }

    pub(super) fn context(&self) -> &Arc<Context> {
        &self.0.context
    }

    pub(super) fn calls(&self) -> &Calls {
        &self.0.context.calls
    }

    /// A completion queue wants to be told of its fault.
    pub(super) fn watch(&self, cq: &Arc<Cq>) {
        let mut queues = self.0.queues.lock().unwrap_or_else(PoisonError::into_inner);
        queues.retain(|queue| queue.strong_count() > 0);
        queues.push(Arc::downgrade(cq));
    }

    fn read(&self, event: &ibv_async_event) -> Event {
        let queues = self.0.queues.lock().unwrap_or_else(PoisonError::into_inner);
        match event.event_type {
            IBV_EVENT_CQ_ERR => {
                // SAFETY: an event of this kind names a completion queue.
                let cq = unsafe { event.element.cq };
                for queue in queues.iter().filter_map(Weak::upgrade) {
                    if queue.raw == cq {
                        queue.set_fault(Cq::OVERRUN);
                    }
                }
                Event::CompletionQueue
            }
            IBV_EVENT_DEVICE_FATAL => {
                for queue in queues.iter().filter_map(Weak::upgrade) {
                    queue.set_fault(Cq::GONE);
                }
                Event::DeviceGone
            }
            IBV_EVENT_COMM_EST => Event::Established(number(event)),
            IBV_EVENT_QP_FATAL | IBV_EVENT_QP_REQ_ERR | IBV_EVENT_QP_ACCESS_ERR => {
                Event::QueuePair(number(event), self.event_name(event.event_type))
            }
            other => Event::Other(self.event_name(other)),
        }
    }

    fn event_name(&self, event: u32) -> &'static str {
        // SAFETY: it knows all numbers, and answers with a constant, which is mapped for ever.
        let name = unsafe { CStr::from_ptr((self.calls().event_type_str)(event)) };
        name.to_str().unwrap_or("unknown event")
    }
}

impl fmt::Display for Event {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Established(number) => {
                write!(
                    out,
                    "queue pair {number} has a message before its connection was confirmed"
                )
            }
            Self::QueuePair(number, what) => write!(out, "queue pair {number}: {what}"),
            Self::CompletionQueue => out.write_str("a completion queue is full"),
            Self::DeviceGone => out.write_str("the device is gone"),
            Self::Other(what) => out.write_str(what),
        }
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "Device({})", self.0.name)
    }
}

impl Gid {
    /// The IPv4 address of RoCE v2.
    #[must_use]
    pub fn ipv4(&self) -> Option<[u8; 4]> {
        let (prefix, address) = self.bytes.split_last_chunk::<4>()?;
        (prefix == [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff]).then_some(*address)
    }
}

/// The list of devices, freed when it is dropped.
struct List {
    calls: Calls,
    raw: *mut *mut rdma_core_sys::types::ibv_device,
    count: usize,
}

impl List {
    fn new(calls: Calls) -> Result<Self, DeviceError> {
        let mut count = 0;
        // SAFETY: `count` is borrowed for the call.
        let raw = unsafe { (calls.get_device_list)(&mut count) };
        if raw.is_null() {
            return Err(DeviceError::NoKernel(io::Error::last_os_error()));
        }
        Ok(Self {
            calls,
            raw,
            count: usize::try_from(count).unwrap_or(0),
        })
    }

    fn iter(&self) -> impl Iterator<Item = (String, *mut rdma_core_sys::types::ibv_device)> + '_ {
        (0..self.count).map(|n| {
            // SAFETY: the list has `count` entries and is not freed yet, and so are the names.
            unsafe {
                let device = *self.raw.add(n);
                let name = CStr::from_ptr((self.calls.get_device_name)(device));
                (name.to_string_lossy().into_owned(), device)
            }
        })
    }
}

impl Drop for List {
    fn drop(&mut self) {
        // SAFETY: got from the library, freed once. Open devices do not need it.
        unsafe { (self.calls.free_device_list)(self.raw) };
    }
}

/// A limit, as libibverbs numbers it. It is negative where the kernel's does not fit.
fn count(number: i32) -> u32 {
    u32::try_from(number).unwrap_or(0)
}

/// What a call says that answers with an error number, or with -1 and `errno`.
fn answered(answer: i32) -> io::Error {
    if answer > 0 {
        io::Error::from_raw_os_error(answer)
    } else {
        io::Error::last_os_error()
    }
}

/// The queue pair of an event that has one.
fn number(event: &ibv_async_event) -> u32 {
    // SAFETY: the caller looked at the kind; the queue pair is not destroyed before the event is acknowledged.
    unsafe { (*event.element.qp).qp_num }
}
