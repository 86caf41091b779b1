//! What a control thread makes: protection domains, registered memory, windows, completion queues.

use core::ffi::c_int;
use core::mem::size_of;
use core::ptr::{NonNull, null_mut};
use core::sync::atomic::AtomicU32;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, RawFd};
use std::sync::Arc;

use o2poll_dataplane::memory::Range;
use o2poll_dataplane::nic::{LKey, RKey, Rights};
use rdma_core_sys::inline::{
    ibv_alloc_mw, ibv_alloc_parent_domain, ibv_alloc_td, ibv_cq_ex_to_cq, ibv_create_cq_ex,
};
use rdma_core_sys::types::{
    IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_MW_BIND, IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_WRITE,
    IBV_CQ_INIT_ATTR_MASK_FLAGS, IBV_CQ_INIT_ATTR_MASK_PD, IBV_CREATE_CQ_ATTR_SINGLE_THREADED,
    IBV_MW_TYPE_2, ibv_comp_channel, ibv_cq, ibv_cq_init_attr_ex, ibv_mw,
    ibv_parent_domain_init_attr, ibv_td_init_attr,
};

use super::device::Device;
use super::quirks::Quirks;
use super::raw::{Cq, Mr, Mw, Pd, RawQp};
use super::{DeviceError, last_error};
use crate::arena::{Arena, limits};

/// A protection domain: what is made in different ones has nothing to do with each other.
#[derive(Clone, Debug)]
pub struct Domain {
    pub(super) device: Device,
    /// Of memory and windows.
    pub(super) base: Arc<Pd>,
    /// Of queue pairs: a parent domain with a thread domain where the provider has them.
    pub(super) queues: Arc<Pd>,
    refusal: Option<Refusal>,
}

/// A provider that has something did not give it.
#[derive(Clone, Copy, Debug)]
struct Refusal {
    call: &'static str,
    errno: i32,
}

/// Memory that is registered for as long as this, or a clone of it, exists.
#[derive(Clone, Debug)]
pub struct Memory {
    pub(super) raw: Arc<Mr>,
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) lkey: LKey,
    pub(super) rights: Rights,
    pub(super) windows: bool,
}

/// A type-2 memory window.
#[derive(Debug)]
pub struct Window {
    /// Freed before what it may be bound to.
    raw: Mw,
    bound: Option<(Arc<RawQp>, Arc<Mr>)>,
}

/// The completion queue of one core. Clones are the same one: a control thread keeps one to make queue pairs.
#[derive(Clone, Debug)]
pub struct CompletionQueue {
    pub(super) raw: Arc<Cq>,
    pub(super) cqe: u32,
    /// It has room for the fences of its queue pairs.
    pub(super) fenced: bool,
    /// Entries that it has, or would have, with them.
    pub(super) with_fences: u32,
    refusal: Option<Refusal>,
}

impl Domain {
    /// A new one. One thread posts to the queue pairs that are made with it; see
    /// [`for_another_thread`](Self::for_another_thread).
    ///
    /// # Errors
    /// As the library says.
    pub fn new(device: &Device) -> Result<Self, DeviceError> {
        Ok(Self::over(device, Self::base(device)?))
    }

    fn over(device: &Device, base: Arc<Pd>) -> Self {
        let (queues, refusal) = match Self::without_locks(&base) {
            Ok(queues) => (queues, None),
            Err(refusal) => (Arc::clone(&base), refusal.worth_telling()),
        };
        Self {
            device: device.clone(),
            base,
            queues,
            refusal,
        }
    }

    /// The same protection domain for the queue pairs of another thread. Those of one thread domain share a doorbell
    /// register that is written without a lock (mlx5), so that each thread that posts has to have its own
    /// (`ibv_alloc_td(3)`). Memory and windows of the one are those of the other.
    #[must_use]
    pub fn for_another_thread(&self) -> Self {
        Self::over(&self.device, Arc::clone(&self.base))
    }

    /// One that no queue pair is made in.
    pub(super) fn of_memory(device: &Device) -> Result<Self, DeviceError> {
        let base = Self::base(device)?;
        Ok(Self {
            device: device.clone(),
            queues: Arc::clone(&base),
            base,
            refusal: None,
        })
    }

    fn base(device: &Device) -> Result<Arc<Pd>, DeviceError> {
        let context = device.context();
        // SAFETY: the context is open.
        let raw = unsafe { (context.calls.alloc_pd)(context.raw) };
        if raw.is_null() {
            return Err(last_error("ibv_alloc_pd", device));
        }
        Ok(Arc::new(Pd {
            raw,
            td: None,
            base: None,
            context: Arc::clone(context),
        }))
    }

    /// Why not, as a sentence, where the provider has thread domains and gave none. One that has none is not worth telling.
    #[must_use]
    pub fn note(&self) -> Option<String> {
        let refusal = self.refusal?;
        Some(refusal.told(
            &self.device,
            "each post takes a lock that nobody else wants",
        ))
    }

    /// Whether the provider was told that one thread alone uses each queue pair, so that it takes no lock for
    /// them (`ibv_alloc_td(3)`). Where it has no thread domains (rxe) it takes one that nobody else wants.
    #[must_use]
    pub fn has_thread_domain(&self) -> bool {
        self.queues.td.is_some()
    }

    /// Registers an arena for the life of the process.
    ///
    /// # Errors
    /// As the library says; the limit of locked memory is the usual reason.
    pub fn register_arena(
        &self,
        arena: &'static Arena,
        rights: Rights,
    ) -> Result<Memory, DeviceError> {
        // SAFETY: it is mapped for ever, and its bytes are reached through the ranges it hands out, which go to
        // the device as values.
        unsafe { self.register(arena.base(), arena.len(), rights) }
    }

    /// Registers bytes that an arena has handed out, once more and with these rights: for a key of their own, which reaches no
    /// other bytes ([`Memory::rkey`]): what `exposure = "arena"` asks for.
    ///
    /// # Errors
    /// As the library says; the limit of locked memory is the usual reason.
    pub fn register_range(
        &self,
        range: &Range<'static>,
        rights: Rights,
    ) -> Result<Memory, DeviceError> {
        let bytes = NonNull::from(range.bytes());
        // SAFETY: a range for ever is mapped for ever, by the contract of `Range::new`. What the program may write itself it reads
        // only where no submission and no descriptor has it. That a peer with the key keeps to that as well is what `exposure`
        // asks the user to trust: a peer that does not changes bytes under a reader, as it does with any card.
        unsafe { self.register(bytes.cast(), bytes.len(), rights) }
    }

    /// Registers memory.
    ///
    /// # Safety
    /// `base` points to `length` bytes that stay mapped as long as the memory or a clone of it exists, and
    /// nothing holds a Rust reference to bytes while a device may write them.
    ///
    /// # Errors
    /// As the library says.
    pub unsafe fn register(
        &self,
        base: NonNull<u8>,
        length: usize,
        rights: Rights,
    ) -> Result<Memory, DeviceError> {
        let windows = self.device.offers_windows();
        let access = access(rights) | if windows { IBV_ACCESS_MW_BIND } else { 0 };
        // SAFETY: the domain is alive; the caller promises the memory.
        let raw = unsafe {
            (self.device.calls().reg_mr)(
                self.base.raw,
                base.as_ptr().cast(),
                length,
                access.cast_signed(),
            )
        };
        if raw.is_null() {
            // Before the limit is read, which makes system calls.
            let source = io::Error::last_os_error();
            return Err(DeviceError::Register {
                bytes: length,
                limit: limits::locked_memory(),
                device: self.device.name().to_owned(),
                source,
            });
        }
        // SAFETY: it was just made.
        let lkey = LKey(unsafe { (*raw).lkey });
        let start = base.as_ptr().addr() as u64;
        Ok(Memory {
            raw: Arc::new(Mr {
                raw,
                pd: Arc::clone(&self.base),
            }),
            start,
            end: start.saturating_add(length as u64),
            lkey,
            rights,
            windows,
        })
    }

    /// Allocates a type-2 window, free. A system call: never on the hot path.
    ///
    /// On rxe a killed process waits 50 s for each queue pair that was made after a window that is bound to
    /// it: make windows after the queue pairs.
    ///
    /// # Errors
    /// As the library says, and when the device has none.
    pub fn window(&self) -> Result<Window, DeviceError> {
        // SAFETY: the domain is alive.
        let raw = unsafe { ibv_alloc_mw(self.base.raw, IBV_MW_TYPE_2) };
        if raw.is_null() {
            return Err(last_error("ibv_alloc_mw", &self.device));
        }
        Ok(Window::of(raw, Arc::clone(&self.base)))
    }

    /// A parent domain that says that one thread uses what is made in it.
    fn without_locks(base: &Arc<Pd>) -> Result<Arc<Pd>, Refusal> {
        let context = &base.context;
        let mut attr = ibv_td_init_attr::default();
        // SAFETY: the context is open.
        let td = unsafe { ibv_alloc_td(context.raw, &mut attr) };
        if td.is_null() {
            return Err(Refusal::of("ibv_alloc_td"));
        }
        let mut attr = ibv_parent_domain_init_attr {
            pd: base.raw,
            td,
            ..Default::default()
        };
        // SAFETY: all three are alive.
        let raw = unsafe { ibv_alloc_parent_domain(context.raw, &mut attr) };
        if raw.is_null() {
            let refusal = Refusal::of("ibv_alloc_parent_domain");
            // SAFETY: it was just made, and nothing stands on it.
            unsafe { rdma_core_sys::inline::ibv_dealloc_td(td) };
            return Err(refusal);
        }
        Ok(Arc::new(Pd {
            raw,
            td: Some(td),
            base: Some(Arc::clone(base)),
            context: Arc::clone(context),
        }))
    }
}

impl Refusal {
    /// Of the call that was just made.
    fn of(call: &'static str) -> Self {
        let errno = io::Error::last_os_error().raw_os_error().unwrap_or(0);
        Self { call, errno }
    }

    fn worth_telling(self) -> Option<Self> {
        (self.errno != libc::EOPNOTSUPP).then_some(self)
    }

    fn told(self, device: &Device, hence: &str) -> String {
        let Self { call, errno } = self;
        let error = io::Error::from_raw_os_error(errno);
        format!("{call} on device {}: {error}: {hence}", device.name())
    }
}

impl Memory {
    /// The key that a work request of the same protection domain names it by.
    #[must_use]
    pub const fn lkey(&self) -> LKey {
        self.lkey
    }

    /// The key that a peer names it by, as long as this value or a clone of it lives; of use where it was registered with a
    /// remote right.
    #[must_use]
    pub fn rkey(&self) -> RKey {
        // SAFETY: `raw` came from `ibv_reg_mr` and is deregistered when the last clone goes; the library does not write it.
        RKey(unsafe { (*self.raw.raw).rkey })
    }

    pub(super) fn domain(&self) -> usize {
        self.raw.pd.id()
    }
}

impl Window {
    pub(super) const fn of(raw: *mut ibv_mw, pd: Arc<Pd>) -> Self {
        Self {
            raw: Mw { raw, pd },
            bound: None,
        }
    }

    /// The key that is on the device now.
    #[must_use]
    pub fn key(&self) -> RKey {
        // SAFETY: alive as long as this is, and written only by the driver that holds this.
        RKey(unsafe { (*self.raw.raw).rkey })
    }

    /// The library's, for calls that are not here. Valid as long as this is.
    #[must_use]
    pub const fn raw(&self) -> *mut ibv_mw {
        self.raw.raw
    }

    pub(super) fn domain(&self) -> usize {
        self.raw.pd.id()
    }

    /// Another one of the same protection domain, free.
    pub(super) fn another(&self) -> io::Result<Self> {
        // SAFETY: the domain is alive.
        let raw = unsafe { ibv_alloc_mw(self.raw.pd.raw, IBV_MW_TYPE_2) };
        if raw.is_null() {
            return Err(io::Error::last_os_error());
        }
        Ok(Self::of(raw, Arc::clone(&self.raw.pd)))
    }

    /// It may still be bound, and is freed before these are.
    pub(super) fn hold(&mut self, qp: Arc<RawQp>, memory: Arc<Mr>) {
        self.bound = Some((qp, memory));
    }

    /// Whether it may still be bound, which only its end ends.
    pub(super) const fn is_held(&self) -> bool {
        self.bound.is_some()
    }

    /// It is bound to nothing.
    pub(super) fn release(&mut self) {
        self.bound = None;
    }
}

impl CompletionQueue {
    /// A completion queue with at least `entries`, room for every send and receive of all queue pairs that
    /// report to it: after an error all of them complete, signalled or not. With `notify` it can be slept on.
    ///
    /// # Errors
    /// As the library says.
    pub fn new(device: &Device, entries: u32, notify: bool) -> Result<Self, DeviceError> {
        Self::create(device, None, entries, notify)
    }

    /// The same for queue pairs of this domain alone, and for **one thread alone**: the one that polls is also the one that
    /// resets and destroys them. Either walks through the completion queue (mlx5 `mlx5_cq_clean`), and mlx5 aborts the
    /// process when it finds another thread there. Who destroys elsewhere, as a control thread does, takes
    /// [`new`](Self::new), whose lock nobody else wants as a rule.
    ///
    /// Where the provider has [thread domains](Domain::has_thread_domain) it takes no lock then (`ibv_create_cq_ex(3)`,
    /// IBV_CREATE_CQ_ATTR_SINGLE_THREADED and the parent domain); where it does not want that, it is a queue as any other.
    ///
    /// # Errors
    /// As the library says.
    pub fn in_domain(domain: &Domain, entries: u32, notify: bool) -> Result<Self, DeviceError> {
        let single = domain
            .has_thread_domain()
            .then(|| Arc::clone(&domain.queues));
        Self::create(&domain.device, single, entries, notify)
    }

    /// Whether the provider was told that one thread polls it.
    #[must_use]
    pub fn is_single_threaded(&self) -> bool {
        self.raw.pd.is_some()
    }

    /// Why not, as a sentence, where the provider has such queues and gave none.
    #[must_use]
    pub fn note(&self, device: &Device) -> Option<String> {
        let refusal = self.refusal?;
        Some(refusal.told(device, "each poll takes a lock that nobody else wants"))
    }

    #[cfg(any(test, feature = "verbs-stub"))]
    pub(super) const fn of(raw: Arc<Cq>, cqe: u32) -> Self {
        Self {
            raw,
            cqe,
            fenced: true,
            with_fences: cqe,
            refusal: None,
        }
    }

    fn create(
        device: &Device,
        mut domain: Option<Arc<Pd>>,
        entries: u32,
        notify: bool,
    ) -> Result<Self, DeviceError> {
        let context = device.context();
        let most = u32::try_from(device.attributes().max_cqe).unwrap_or(0);
        if entries > most {
            return Err(DeviceError::TooMany {
                what: "entries of a completion queue",
                asked: entries,
                most,
                device: device.name().to_owned(),
            });
        }
        // In an error each request of the driver's own completes, too, and those are two for one at most.
        let wanted = entries.saturating_mul(3);
        let fences = device.quirks().contains(Quirks::BIND_IS_REPLAYED);
        let fenced = fences && wanted <= most;
        let entries = if fenced { wanted } else { entries };
        let entries = c_int::try_from(entries).unwrap_or(c_int::MAX);
        let channel = if notify {
            // SAFETY: the context is open.
            let channel = unsafe { (context.calls.create_comp_channel)(context.raw) };
            if channel.is_null() {
                return Err(last_error("ibv_create_comp_channel", device));
            }
            // SAFETY: just made. Without it `take_notifications` would sleep.
            unsafe { nonblocking((*channel).fd) };
            Some(channel)
        } else {
            None
        };
        let given = channel.unwrap_or(null_mut());
        let (mut raw, mut refusal) = (null_mut(), None);
        if let Some(pd) = &domain {
            raw = Self::single_threaded(pd, entries, given);
            if raw.is_null() {
                refusal = Refusal::of("ibv_create_cq_ex").worth_telling();
            }
        }
        if raw.is_null() {
            domain = None;
            // SAFETY: the context is open, the channel is its own or null, and vector 0 always exists.
            raw = unsafe { (context.calls.create_cq)(context.raw, entries, null_mut(), given, 0) };
        }
        if raw.is_null() {
            let error = last_error("ibv_create_cq", device);
            if let Some(channel) = channel {
                // SAFETY: just made, and nothing stands on it.
                unsafe { (context.calls.destroy_comp_channel)(channel) };
            }
            return Err(error);
        }
        // SAFETY: just made.
        let cqe = u32::try_from(unsafe { (*raw).cqe }).unwrap_or(0);
        let raw = Arc::new(Cq {
            raw,
            channel,
            fault: AtomicU32::new(0),
            pd: domain,
            context: Arc::clone(context),
        });
        device.watch(&raw);
        Ok(Self {
            raw,
            cqe,
            fenced,
            with_fences: wanted,
            refusal,
        })
    }

    /// One that a single thread polls; null where the provider refuses the flag or the parent domain.
    fn single_threaded(pd: &Pd, entries: c_int, channel: *mut ibv_comp_channel) -> *mut ibv_cq {
        let mut attr = ibv_cq_init_attr_ex {
            cqe: entries.cast_unsigned(),
            channel,
            comp_mask: IBV_CQ_INIT_ATTR_MASK_FLAGS | IBV_CQ_INIT_ATTR_MASK_PD,
            flags: IBV_CREATE_CQ_ATTR_SINGLE_THREADED,
            parent_domain: pd.raw,
            ..Default::default()
        };
        // SAFETY: context, channel and domain are alive, and the last is held by what is made of the answer. Without
        // `wc_flags` it is polled with `ibv_poll_cq(3)`.
        ibv_cq_ex_to_cq(unsafe { ibv_create_cq_ex(pd.context.raw, &mut attr) })
    }

    /// Entries it has; a provider may round up.
    #[must_use]
    pub const fn entries(&self) -> u32 {
        self.cqe
    }

    /// The library's, for calls that are not here. Valid as long as this is.
    #[must_use]
    pub fn raw(&self) -> *mut ibv_cq {
        self.raw.raw
    }

    /// Readable when the queue was armed and something has completed.
    #[must_use]
    pub fn notification(&self) -> Option<BorrowedFd<'_>> {
        let channel = self.raw.channel?;
        // SAFETY: the channel, and with it its descriptor, lives as long as this does.
        Some(unsafe { BorrowedFd::borrow_raw((*channel).fd) })
    }

    /// Takes what made [`notification`](Self::notification) readable, and acknowledges it.
    pub fn take_notifications(&self) {
        let Some(channel) = self.raw.channel else {
            return;
        };
        let calls = self.raw.context.calls;
        loop {
            let (mut cq, mut context) = (null_mut(), null_mut());
            // SAFETY: the channel is alive and does not block; what it names is our queue, its only one.
            unsafe {
                if (calls.get_cq_event)(channel, &mut cq, &mut context) != 0 {
                    return;
                }
                (calls.ack_cq_events)(cq, 1);
            }
        }
    }
}

/// `enum ibv_access_flags`.
pub(super) const fn access(rights: Rights) -> u32 {
    let mut access = 0;
    if rights.contains(Rights::LOCAL_WRITE) {
        access |= IBV_ACCESS_LOCAL_WRITE;
    }
    if rights.contains(Rights::REMOTE_WRITE) {
        access |= IBV_ACCESS_REMOTE_WRITE;
    }
    if rights.contains(Rights::REMOTE_READ) {
        access |= IBV_ACCESS_REMOTE_READ;
    }
    access
}

/// # Safety
/// `fd` is open.
pub(super) unsafe fn nonblocking(fd: RawFd) {
    // SAFETY: as the caller says. A failure means that it stays as it was.
    unsafe {
        let flags = libc::fcntl(fd, libc::F_GETFL);
        if flags >= 0 {
            libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK);
        }
    }
}

/// Waits until it is readable.
pub(super) fn readable(fd: impl AsFd, milliseconds: c_int) -> io::Result<bool> {
    use std::os::fd::AsRawFd as _;
    let mut poll = libc::pollfd {
        fd: fd.as_fd().as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one element, borrowed for the call.
    match unsafe { libc::poll(&mut poll, 1, milliseconds) } {
        0 => Ok(false),
        1.. => Ok(true),
        _ => Err(io::Error::last_os_error()),
    }
}

const _: () = assert!(
    size_of::<Window>() <= 64,
    "it travels through rings by value"
);
