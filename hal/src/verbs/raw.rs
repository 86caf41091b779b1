//! Objects of libibverbs, each destroyed once, after everything that stands on it.
//!
//! Each holds its parents by reference count, so that the order that the library asks for holds whichever
//! way the pieces are dropped: window before queue pair and memory region, these before the completion
//! queue and the protection domain, all before the context. A window that may still be bound holds the queue
//! pair and the memory region that it is bound to: rxe waits 50 s for the window when the queue pair goes
//! first, and `ibv_dereg_mr(3)` refuses.

use core::ffi::{c_char, c_int, c_uint, c_void};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::io::{self, Write as _};
use std::sync::{Arc, Mutex, PoisonError};

use rdma_core_sys::Libibverbs;
use rdma_core_sys::inline::{ibv_dealloc_mw, ibv_dealloc_td};
use rdma_core_sys::types::{
    _compat_ibv_port_attr, ibv_async_event, ibv_comp_channel, ibv_context, ibv_cq, ibv_device,
    ibv_device_attr, ibv_event_type, ibv_gid_entry, ibv_mr, ibv_mw, ibv_pd, ibv_qp, ibv_qp_attr,
    ibv_qp_init_attr, ibv_td,
};

/// What is called of the library: its functions, or those of a provider that plays it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Calls {
    pub(super) get_device_list: unsafe extern "C" fn(*mut c_int) -> *mut *mut ibv_device,
    pub(super) free_device_list: unsafe extern "C" fn(*mut *mut ibv_device),
    pub(super) get_device_name: unsafe extern "C" fn(*mut ibv_device) -> *const c_char,
    pub(super) open_device: unsafe extern "C" fn(*mut ibv_device) -> *mut ibv_context,
    pub(super) close_device: unsafe extern "C" fn(*mut ibv_context) -> c_int,
    pub(super) query_device: unsafe extern "C" fn(*mut ibv_context, *mut ibv_device_attr) -> c_int,
    pub(super) query_port:
        unsafe extern "C" fn(*mut ibv_context, u8, *mut _compat_ibv_port_attr) -> c_int,
    pub(super) query_gid_table:
        unsafe extern "C" fn(*mut ibv_context, *mut ibv_gid_entry, usize, u32, usize) -> isize,
    pub(super) get_async_event:
        unsafe extern "C" fn(*mut ibv_context, *mut ibv_async_event) -> c_int,
    pub(super) ack_async_event: unsafe extern "C" fn(*mut ibv_async_event),
    pub(super) event_type_str: unsafe extern "C" fn(ibv_event_type) -> *const c_char,
    pub(super) alloc_pd: unsafe extern "C" fn(*mut ibv_context) -> *mut ibv_pd,
    pub(super) dealloc_pd: unsafe extern "C" fn(*mut ibv_pd) -> c_int,
    pub(super) reg_mr: unsafe extern "C" fn(*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr,
    pub(super) dereg_mr: unsafe extern "C" fn(*mut ibv_mr) -> c_int,
    pub(super) create_comp_channel: unsafe extern "C" fn(*mut ibv_context) -> *mut ibv_comp_channel,
    pub(super) destroy_comp_channel: unsafe extern "C" fn(*mut ibv_comp_channel) -> c_int,
    pub(super) create_cq: unsafe extern "C" fn(
        *mut ibv_context,
        c_int,
        *mut c_void,
        *mut ibv_comp_channel,
        c_int,
    ) -> *mut ibv_cq,
    pub(super) destroy_cq: unsafe extern "C" fn(*mut ibv_cq) -> c_int,
    pub(super) get_cq_event:
        unsafe extern "C" fn(*mut ibv_comp_channel, *mut *mut ibv_cq, *mut *mut c_void) -> c_int,
    pub(super) ack_cq_events: unsafe extern "C" fn(*mut ibv_cq, c_uint),
    pub(super) create_qp: unsafe extern "C" fn(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp,
    pub(super) modify_qp: unsafe extern "C" fn(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int,
    pub(super) destroy_qp: unsafe extern "C" fn(*mut ibv_qp) -> c_int,
}

impl Calls {
    pub(super) const fn of(library: &Libibverbs) -> Self {
        Self {
            get_device_list: library.ibv_get_device_list,
            free_device_list: library.ibv_free_device_list,
            get_device_name: library.ibv_get_device_name,
            open_device: library.ibv_open_device,
            close_device: library.ibv_close_device,
            query_device: library.ibv_query_device,
            query_port: library.ibv_query_port,
            query_gid_table: library._ibv_query_gid_table,
            get_async_event: library.ibv_get_async_event,
            ack_async_event: library.ibv_ack_async_event,
            event_type_str: library.ibv_event_type_str,
            alloc_pd: library.ibv_alloc_pd,
            dealloc_pd: library.ibv_dealloc_pd,
            reg_mr: library.ibv_reg_mr,
            dereg_mr: library.ibv_dereg_mr,
            create_comp_channel: library.ibv_create_comp_channel,
            destroy_comp_channel: library.ibv_destroy_comp_channel,
            create_cq: library.ibv_create_cq,
            destroy_cq: library.ibv_destroy_cq,
            get_cq_event: library.ibv_get_cq_event,
            ack_cq_events: library.ibv_ack_cq_events,
            create_qp: library.ibv_create_qp,
            modify_qp: library.ibv_modify_qp,
            destroy_qp: library.ibv_destroy_qp,
        }
    }
}

#[derive(Debug)]
pub(super) struct Context {
    pub(super) raw: *mut ibv_context,
    pub(super) calls: Calls,
    complaints: Mutex<Complaints>,
    /// Completions of requests that were not outstanding. Counted by cores, told by who asks for complaints.
    breaches: AtomicU64,
}

/// What went wrong with a device where nobody could be told.
#[derive(Debug, Default)]
struct Complaints {
    lines: Vec<String>,
    /// Beyond [`MOST_COMPLAINTS`].
    more: u64,
    /// Of the breaches.
    told: u64,
    /// What is said once.
    once: Vec<&'static str>,
}

/// A protection domain, or a parent domain over one.
#[derive(Debug)]
pub(super) struct Pd {
    pub(super) raw: *mut ibv_pd,
    pub(super) td: Option<*mut ibv_td>,
    pub(super) base: Option<Arc<Self>>,
    pub(super) context: Arc<Context>,
}

#[derive(Debug)]
pub(super) struct Mr {
    pub(super) raw: *mut ibv_mr,
    pub(super) pd: Arc<Pd>,
}

#[derive(Debug)]
pub(super) struct Cq {
    pub(super) raw: *mut ibv_cq,
    pub(super) channel: Option<*mut ibv_comp_channel>,
    /// 0, or why it is unusable. Written by who reads asynchronous events, read by the core.
    pub(super) fault: AtomicU32,
    /// The parent domain that it was made in, if one thread polls it.
    pub(super) pd: Option<Arc<Pd>>,
    pub(super) context: Arc<Context>,
}

#[derive(Debug)]
pub(super) struct RawQp {
    pub(super) raw: *mut ibv_qp,
    pub(super) pd: Arc<Pd>,
    pub(super) cq: Arc<Cq>,
}

#[derive(Debug)]
pub(super) struct Mw {
    pub(super) raw: *mut ibv_mw,
    pub(super) pd: Arc<Pd>,
}

impl Context {
    pub(super) fn new(raw: *mut ibv_context, calls: Calls) -> Self {
        Self {
            raw,
            calls,
            complaints: Mutex::default(),
            breaches: AtomicU64::new(0),
        }
    }

    /// A provider has completed a request that was not outstanding. Called on polling cores.
    pub(super) fn breached(&self) {
        // Relaxed: a number for people.
        self.breaches.fetch_add(1, Ordering::Relaxed);
    }

    /// What has gone wrong since it was last asked.
    pub(super) fn complaints(&self) -> Vec<String> {
        let mut known = self
            .complaints
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let mut lines = core::mem::take(&mut known.lines);
        let more = core::mem::take(&mut known.more);
        if more != 0 {
            lines.push(format!("and {more} calls more that failed"));
        }
        // Relaxed: as in `breached`.
        let breaches = self.breaches.load(Ordering::Relaxed);
        if breaches != known.told {
            lines.push(format!(
                "the provider has completed {} work requests that were not outstanding (a wr_id twice, or one that was \
                 never posted): their queue pairs were put in error",
                breaches.wrapping_sub(known.told)
            ));
            known.told = breaches;
        }
        lines
    }

    /// Keeps a line that is said once for each cause, as long as the device is open.
    pub(super) fn complain_once(&self, cause: &'static str, line: impl FnOnce() -> String) {
        let mut known = self
            .complaints
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if !known.once.contains(&cause) {
            known.once.push(cause);
            known.lines.push(line());
        }
    }

    /// Keeps what a call that destroys something has answered: 0, or an error number. It is made once, whatever it says:
    /// the kernel takes back what is left when the process ends.
    fn destroyed(&self, call: &str, answer: c_int) {
        if answer == 0 {
            return;
        }
        let error = match answer {
            // As older libraries answer.
            -1 => io::Error::last_os_error(),
            number => io::Error::from_raw_os_error(number.saturating_abs()),
        };
        let mut known = self
            .complaints
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if known.lines.len() < MOST_COMPLAINTS {
            known.lines.push(format!(
                "{call}: {error}: what it should have destroyed is left until the process ends"
            ));
        } else {
            known.more = known.more.saturating_add(1);
        }
    }
}

impl Pd {
    /// Tells protection domains apart: that of a parent domain is the one below it.
    pub(super) fn id(&self) -> usize {
        match &self.base {
            Some(base) => base.id(),
            None => self.raw.addr(),
        }
    }
}

impl Cq {
    pub(super) const OVERRUN: u32 = 1;
    pub(super) const GONE: u32 = 2;

    pub(super) fn set_fault(&self, fault: u32) {
        // Relaxed: a flag that is looked at again and again; nothing else is published by it.
        self.fault.store(fault, Ordering::Relaxed);
    }
}

impl RawQp {
    pub(super) fn context(&self) -> &Arc<Context> {
        &self.pd.context
    }
}

impl Drop for Context {
    /// Whoever could have asked for complaints is gone, so what is left of them goes to standard error.
    fn drop(&mut self) {
        // SAFETY: opened, closed once, and everything made with it held it by count.
        let answer = unsafe { (self.calls.close_device)(self.raw) };
        self.destroyed("ibv_close_device", answer);
        for complaint in self.complaints() {
            // A pipe that nobody reads must not become a panic in a drop.
            let _ = writeln!(io::stderr(), "an RDMA device that was closed: {complaint}");
        }
    }
}

impl Drop for Pd {
    fn drop(&mut self) {
        let call = match self.base {
            Some(_) => "ibv_dealloc_pd of a parent domain",
            None => "ibv_dealloc_pd",
        };
        // SAFETY: allocated, freed once; all that was made in it held it by count.
        let answer = unsafe { (self.context.calls.dealloc_pd)(self.raw) };
        self.context.destroyed(call, answer);
        if let Some(td) = self.td {
            // SAFETY: allocated, freed once, after its parent domain (ibv_alloc_parent_domain(3)).
            let answer = unsafe { ibv_dealloc_td(td) };
            self.context.destroyed("ibv_dealloc_td", answer);
        }
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        // SAFETY: registered, deregistered once; windows that may be bound to it held it by count.
        let answer = unsafe { (self.pd.context.calls.dereg_mr)(self.raw) };
        self.pd.context.destroyed("ibv_dereg_mr", answer);
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        // SAFETY: created, destroyed once; its queue pairs held it by count. Every event was acknowledged when
        // it was taken, so that this does not wait.
        let answer = unsafe { (self.context.calls.destroy_cq)(self.raw) };
        self.context.destroyed("ibv_destroy_cq", answer);
        if let Some(channel) = self.channel {
            // SAFETY: created, destroyed once, after its completion queue.
            let answer = unsafe { (self.context.calls.destroy_comp_channel)(channel) };
            self.context.destroyed("ibv_destroy_comp_channel", answer);
        }
    }
}

impl Drop for RawQp {
    fn drop(&mut self) {
        // SAFETY: created, destroyed once; windows that may be bound to it held it by count.
        let answer = unsafe { (self.context().calls.destroy_qp)(self.raw) };
        self.context().destroyed("ibv_destroy_qp", answer);
    }
}

impl Drop for Mw {
    fn drop(&mut self) {
        // SAFETY: allocated, freed once. A bound window is unbound by it (ibv_alloc_mw(3)).
        let answer = unsafe { ibv_dealloc_mw(self.raw) };
        self.pd.context.destroyed("ibv_dealloc_mw", answer);
    }
}

/// libibverbs may be called from any thread (its own manual), and objects are freed by whoever is last.
macro_rules! any_thread {
    ($($name:ident)+) => {$(
        // SAFETY: the pointer is used through the library alone, which locks where it must.
        unsafe impl Send for $name {}
        // SAFETY: as above; a shared reference changes nothing but atomics.
        unsafe impl Sync for $name {}
    )+};
}

any_thread!(Context Pd Mr Cq RawQp Mw);

/// Complaints that are kept until somebody asks.
const MOST_COMPLAINTS: usize = 64;
