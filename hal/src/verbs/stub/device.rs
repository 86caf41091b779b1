//! The provider as a whole device: opened, asked, and made use of by the calls of the library, each of which can be told to
//! fail.

use core::cell::RefCell;
use core::ffi::{CStr, c_char, c_int, c_void};
use core::mem::{offset_of, size_of};
use core::ptr::{null_mut, without_provenance_mut};

use rdma_core_sys::types::{
    _compat_ibv_port_attr, IBV_CREATE_CQ_ATTR_SINGLE_THREADED, IBV_DEVICE_MEM_WINDOW_TYPE_2B,
    IBV_GID_TYPE_ROCE_V2, IBV_LINK_LAYER_ETHERNET, IBV_PORT_ACTIVE, ibv_async_event,
    ibv_comp_channel, ibv_context, ibv_cq, ibv_cq_ex, ibv_cq_init_attr_ex, ibv_device,
    ibv_device_attr, ibv_event_type, ibv_gid_entry, ibv_mr, ibv_mw, ibv_mw_type,
    ibv_parent_domain_init_attr, ibv_pd, ibv_port_attr, ibv_qp, ibv_qp_init_attr, ibv_td,
    ibv_td_init_attr, verbs_context,
};

use super::{CALLS, Provider, Stub, dealloc_mw, dealloc_td};
use crate::verbs::DeviceError;
use crate::verbs::device::Device;

/// What a device is like, and which of the library's calls fail.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// It is in the list of devices.
    pub there: bool,
    /// It has thread domains, parent domains, and completion queues for one thread.
    pub thread_domains: bool,
    /// By which its quirks are known.
    pub vendor_id: u32,
    /// The most of a queue pair that it says that it has (`max_qp_wr`).
    pub max_qp_wr: i32,
    /// Entries of a completion queue.
    pub max_cqe: i32,
    /// Windows that it says that it has.
    pub max_mw: i32,
    /// Memory regions.
    pub max_mr: i32,
    /// The most of a queue pair that it makes; what is beyond is refused with the error number.
    pub most_wr: (u32, i32),
    /// Most bytes inside of a work request. It grants all of them to who asks for no more (`ibv_create_qp(3)`).
    pub inline: u32,
    /// State of its port (`enum ibv_port_state`).
    pub state: u32,
    /// `IBV_LINK_LAYER_...`
    pub link_layer: u32,
    /// Which of its port's addresses there are: places in the table.
    pub gids: &'static [u32],
    /// Calls that fail, without `ibv_`, and with which error number.
    pub fails: Vec<(&'static str, i32)>,
}

/// What was made, and in which domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Made {
    /// The call, without `ibv_`.
    pub call: &'static str,
    /// Address of the protection domain or parent domain; 0 without one.
    pub domain: usize,
}

thread_local! {
    /// Of the device that is opened next on this thread.
    static NEXT: RefCell<Scenario> = RefCell::new(Scenario::default());
}

impl Stub {
    /// Opens a device by the name of `stub0`; the provider that it is.
    ///
    /// # Errors
    /// As the device says.
    pub fn open(scenario: Scenario) -> Result<(Device, Self), DeviceError> {
        NEXT.set(scenario);
        let device = Device::open_with(CALLS, NAME)?;
        let context = device.context().clone();
        Ok((device, Self::of(context)))
    }

    /// How often it was asked for something.
    #[must_use]
    pub fn asked(&self, call: &str) -> usize {
        // SAFETY: as in `made`.
        let asked = unsafe { &(*self.provider()).asked };
        asked.iter().filter(|name| **name == call).count()
    }

    /// What was made since it was last asked.
    #[must_use]
    pub fn made(&self) -> Vec<Made> {
        // SAFETY: the provider lives as long as the context, and this thread alone uses it.
        unsafe { core::mem::take(&mut (*self.provider()).made) }
    }
}

impl Default for Scenario {
    fn default() -> Self {
        Self {
            there: true,
            thread_domains: false,
            vendor_id: 0x02c9,
            max_qp_wr: 1 << 15,
            max_cqe: 1 << 20,
            max_mw: 1 << 20,
            max_mr: 1 << 20,
            most_wr: (1 << 15, libc::EINVAL),
            inline: 512,
            state: IBV_PORT_ACTIVE,
            link_layer: IBV_LINK_LAYER_ETHERNET,
            gids: &[0],
            fails: Vec::new(),
        }
    }
}

impl Provider {
    /// A new one: its context.
    pub(super) fn start(scenario: Scenario, automatic: bool) -> *mut ibv_context {
        let domains = scenario.thread_domains;
        let mut provider = Box::new(Self {
            automatic,
            keys: 0x100,
            noise: 0x9e37_79b9_7f4a_7c15,
            scenario,
            ..Self::default()
        });
        provider.completions.reserve(1 << 16);
        let extended = &mut provider.extended;
        extended.sz = size_of::<verbs_context>();
        extended.query_port = Some(query_port);
        if domains {
            extended.alloc_td = Some(alloc_td);
            extended.dealloc_td = Some(dealloc_td);
            extended.alloc_parent_domain = Some(alloc_parent_domain);
            extended.create_cq_ex = Some(create_cq_ex);
        }
        let context = &mut extended.context;
        context.abi_compat = without_provenance_mut(usize::MAX);
        context.async_fd = -1;
        let ops = &mut context.ops;
        ops.post_send = Some(super::post_send);
        ops.post_recv = Some(super::post_recv);
        ops.poll_cq = Some(super::poll_cq);
        ops.req_notify_cq = Some(super::req_notify_cq);
        ops.alloc_mw = Some(alloc_mw);
        ops.dealloc_mw = Some(dealloc_mw);
        let provider = Box::into_raw(provider);
        // SAFETY: it is alive; the place is inside.
        unsafe { &raw mut (*provider).extended.context }
    }

    /// # Safety
    /// The context is a provider's.
    pub(super) unsafe fn of(context: *mut ibv_context) -> *mut Self {
        let offset = offset_of!(Self, extended) + offset_of!(verbs_context, context);
        // SAFETY: as the caller says.
        unsafe { context.byte_sub(offset) }.cast()
    }

    /// Whether this call is to fail; then `errno` is set.
    fn fails(&mut self, call: &'static str) -> bool {
        self.asked.push(call);
        failure(&self.scenario, call)
            .inspect(|errno| set_errno(*errno))
            .is_some()
    }

    /// Notes that something was destroyed; the error number that this is to fail with, or 0.
    pub(super) fn destroys(&mut self, call: &'static str) -> c_int {
        self.destroyed.push(call);
        failure(&self.scenario, call).unwrap_or(0)
    }

    fn make(&mut self, call: &'static str, domain: *mut ibv_pd) {
        let domain = domain.addr();
        self.made.push(Made { call, domain });
    }

    const fn key(&mut self) -> u32 {
        self.keys += 0x100;
        self.keys
    }
}

fn failure(scenario: &Scenario, call: &str) -> Option<i32> {
    let found = scenario.fails.iter().find(|(name, _)| *name == call);
    found.map(|(_, errno)| *errno)
}

fn set_errno(errno: i32) {
    // SAFETY: the thread's own.
    unsafe { *libc::__errno_location() = errno };
}

/// Whether a call that needs no device is to fail.
fn fails_next(call: &str) -> bool {
    NEXT.with_borrow(|scenario| failure(scenario, call))
        .inspect(|errno| set_errno(*errno))
        .is_some()
}

pub(super) unsafe extern "C" fn get_device_list(count: *mut c_int) -> *mut *mut ibv_device {
    if fails_next("get_device_list") {
        return null_mut();
    }
    let there = NEXT.with_borrow(|scenario| scenario.there);
    // SAFETY: the caller's own.
    unsafe { *count = c_int::from(there) };
    Box::into_raw(Box::new(without_provenance_mut::<ibv_device>(0x10)))
}

pub(super) unsafe extern "C" fn free_device_list(list: *mut *mut ibv_device) {
    // SAFETY: made above, freed once.
    drop(unsafe { Box::from_raw(list) });
}

pub(super) const unsafe extern "C" fn get_device_name(_: *mut ibv_device) -> *const c_char {
    C_NAME.as_ptr()
}

pub(super) unsafe extern "C" fn open_device(_: *mut ibv_device) -> *mut ibv_context {
    if fails_next("open_device") {
        return null_mut();
    }
    Provider::start(NEXT.with_borrow(Clone::clone), false)
}

/// Answers with the error number, as `ibv_query_device(3)` says.
pub(super) unsafe extern "C" fn query_device(
    context: *mut ibv_context,
    attr: *mut ibv_device_attr,
) -> c_int {
    // SAFETY: both are alive, and the context is a provider's.
    unsafe {
        let scenario = &(*Provider::of(context)).scenario;
        if let Some(errno) = failure(scenario, "query_device") {
            return errno;
        }
        attr.write(ibv_device_attr {
            vendor_id: scenario.vendor_id,
            max_qp_wr: scenario.max_qp_wr,
            max_sge: 30,
            max_cqe: scenario.max_cqe,
            max_mw: scenario.max_mw,
            max_mr: scenario.max_mr,
            device_cap_flags: IBV_DEVICE_MEM_WINDOW_TYPE_2B,
            phys_port_cnt: 1,
            ..Default::default()
        });
    }
    0
}

unsafe extern "C" fn query_port(
    context: *mut ibv_context,
    _: u8,
    attr: *mut ibv_port_attr,
    _: usize,
) -> c_int {
    // SAFETY: as in `query_device`.
    unsafe {
        let scenario = &(*Provider::of(context)).scenario;
        if let Some(errno) = failure(scenario, "query_port") {
            return errno;
        }
        attr.write(ibv_port_attr {
            state: scenario.state,
            link_layer: u8::try_from(scenario.link_layer).unwrap_or(0),
            max_msg_sz: 1 << 30,
            active_mtu: 3,
            ..Default::default()
        });
    }
    0
}

/// What libraries have that know no extended context.
pub(super) const unsafe extern "C" fn query_port_of_old(
    _: *mut ibv_context,
    _: u8,
    _: *mut _compat_ibv_port_attr,
) -> c_int {
    libc::EINVAL
}

pub(super) unsafe extern "C" fn query_gid_table(
    context: *mut ibv_context,
    entries: *mut ibv_gid_entry,
    most: usize,
    _: u32,
    _: usize,
) -> isize {
    // SAFETY: as in `query_device`; there is room for `most`.
    unsafe {
        let scenario = &(*Provider::of(context)).scenario;
        if let Some(errno) = failure(scenario, "query_gid_table") {
            return -(errno as isize);
        }
        let gids = scenario.gids.iter().take(most);
        for (n, place) in gids.enumerate() {
            entries.add(n).write(ibv_gid_entry {
                gid_index: *place,
                port_num: 1,
                gid_type: IBV_GID_TYPE_ROCE_V2,
                ..Default::default()
            });
        }
        scenario.gids.len().min(most).cast_signed()
    }
}

pub(super) unsafe extern "C" fn get_async_event(
    _: *mut ibv_context,
    _: *mut ibv_async_event,
) -> c_int {
    set_errno(libc::EAGAIN);
    -1
}

pub(super) const unsafe extern "C" fn ack_async_event(_: *mut ibv_async_event) {}

pub(super) const unsafe extern "C" fn event_type_str(_: ibv_event_type) -> *const c_char {
    c"an event".as_ptr()
}

/// A call that makes an object, unless it is told to fail.
macro_rules! makes {
    ($provider:ident, $context:expr, $call:literal, $domain:expr, $object:expr) => {
        // SAFETY: the context is a provider's, and its parents are alive.
        unsafe {
            let $provider = &mut *Provider::of($context);
            if $provider.fails($call) {
                return null_mut();
            }
            $provider.make($call, $domain);
            Box::into_raw(Box::new($object))
        }
    };
}

pub(super) unsafe extern "C" fn alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    makes!(
        provider,
        context,
        "alloc_pd",
        null_mut(),
        ibv_pd {
            context,
            ..Default::default()
        }
    )
}

unsafe extern "C" fn alloc_td(context: *mut ibv_context, _: *mut ibv_td_init_attr) -> *mut ibv_td {
    makes!(
        provider,
        context,
        "alloc_td",
        null_mut(),
        ibv_td { context }
    )
}

unsafe extern "C" fn alloc_parent_domain(
    context: *mut ibv_context,
    attr: *mut ibv_parent_domain_init_attr,
) -> *mut ibv_pd {
    // SAFETY: it is alive.
    let (pd, td) = unsafe { ((*attr).pd, (*attr).td) };
    if pd.is_null() || td.is_null() {
        set_errno(libc::EINVAL);
        return null_mut();
    }
    let parent = makes!(
        provider,
        context,
        "alloc_parent_domain",
        pd,
        ibv_pd {
            context,
            ..Default::default()
        }
    );
    // SAFETY: as in `makes`.
    unsafe { (*Provider::of(context)).parents.push(parent) };
    parent
}

unsafe extern "C" fn alloc_mw(pd: *mut ibv_pd, type_: ibv_mw_type) -> *mut ibv_mw {
    // SAFETY: it is alive.
    let context = unsafe { (*pd).context };
    makes!(
        provider,
        context,
        "alloc_mw",
        pd,
        ibv_mw {
            context,
            pd,
            rkey: provider.key(),
            type_,
            ..Default::default()
        }
    )
}

pub(super) unsafe extern "C" fn reg_mr(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    _: c_int,
) -> *mut ibv_mr {
    // SAFETY: it is alive.
    let context = unsafe { (*pd).context };
    makes!(
        provider,
        context,
        "reg_mr",
        pd,
        ibv_mr {
            context,
            pd,
            addr,
            length,
            lkey: provider.key(),
            ..Default::default()
        }
    )
}

pub(super) unsafe extern "C" fn create_comp_channel(
    context: *mut ibv_context,
) -> *mut ibv_comp_channel {
    // SAFETY: as in `makes`.
    if !unsafe { (*Provider::of(context)).fails("create_comp_channel") } {
        set_errno(libc::EOPNOTSUPP);
    }
    null_mut()
}

pub(super) unsafe extern "C" fn create_cq(
    context: *mut ibv_context,
    cqe: c_int,
    _: *mut c_void,
    channel: *mut ibv_comp_channel,
    _: c_int,
) -> *mut ibv_cq {
    makes!(
        provider,
        context,
        "create_cq",
        null_mut(),
        ibv_cq {
            context,
            channel,
            cqe,
            ..Default::default()
        }
    )
}

/// For one thread alone. Another is refused, as by a provider that has no such queues.
unsafe extern "C" fn create_cq_ex(
    context: *mut ibv_context,
    attr: *mut ibv_cq_init_attr_ex,
) -> *mut ibv_cq_ex {
    // SAFETY: they are alive.
    let (attr, provider) = unsafe { (&*attr, &*Provider::of(context)) };
    let single = attr.flags & IBV_CREATE_CQ_ATTR_SINGLE_THREADED != 0;
    if !single || !provider.parents.contains(&attr.parent_domain) {
        set_errno(libc::EINVAL);
        return null_mut();
    }
    let cqe = c_int::try_from(attr.cqe).unwrap_or(c_int::MAX);
    makes!(
        provider,
        context,
        "create_cq_ex",
        attr.parent_domain,
        ibv_cq {
            context,
            cqe,
            ..Default::default()
        }
    )
    .cast()
}

pub(super) unsafe extern "C" fn create_qp(
    pd: *mut ibv_pd,
    attr: *mut ibv_qp_init_attr,
) -> *mut ibv_qp {
    // SAFETY: all are alive.
    let (context, attr) = unsafe { ((*pd).context, &mut *attr) };
    // SAFETY: as in `makes`.
    let scenario = unsafe { &(*Provider::of(context)).scenario };
    let (most, errno) = scenario.most_wr;
    if attr.cap.max_send_wr > most || attr.cap.max_recv_wr > most {
        set_errno(errno);
        return null_mut();
    }
    if attr.cap.max_inline_data > scenario.inline {
        set_errno(libc::EINVAL);
        return null_mut();
    }
    attr.cap.max_inline_data = scenario.inline;
    makes!(
        provider,
        context,
        "create_qp",
        pd,
        ibv_qp {
            context,
            pd,
            send_cq: attr.send_cq,
            recv_cq: attr.recv_cq,
            qp_num: {
                provider.numbers += 1;
                provider.numbers
            },
            ..Default::default()
        }
    )
}

/// What it calls itself.
const NAME: &str = "stub0";

const C_NAME: &CStr = c"stub0";
