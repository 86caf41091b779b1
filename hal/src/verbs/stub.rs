//! A provider that is a table of our own: the post and poll path without a kernel, for tests and benches.
//!
//! It executes nothing. It notes what it is given, takes as much of a chain as it is told to, and completes what
//! it is told to, or every signalled request at once.

use core::ffi::{c_int, c_uint, c_void};
use core::sync::atomic::AtomicU32;
use std::collections::VecDeque;
use std::sync::Arc;

use o2poll_dataplane::nic::{Capabilities, LKey, Mechanisms, Rights};
use rdma_core_sys::types::{
    IBV_SEND_SIGNALED, IBV_WC_SUCCESS, IBV_WR_BIND_MW, IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE,
    IBV_WR_RDMA_WRITE_WITH_IMM, ibv_comp_channel, ibv_context, ibv_cq, ibv_mr, ibv_mw, ibv_pd,
    ibv_qp, ibv_qp_attr, ibv_recv_wr, ibv_send_wr, ibv_sge, ibv_td, ibv_wc, verbs_context,
};

mod device;

pub use self::device::{Made, Scenario};

use super::nic::{Limits, Verbs};
use super::objects::{CompletionQueue, Memory, Window};
use super::queue_pair::{QueuePair, Shape};
use super::quirks::Quirks;
use super::raw::{Calls, Context, Cq, Mr, Pd, RawQp};
use super::trap::Trap;

/// The provider, and the objects that are made with it. For one thread.
#[derive(Debug)]
pub struct Stub {
    context: Arc<Context>,
    pd: Arc<Pd>,
}

/// A send work request as the provider saw it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the library's names")]
pub struct Posted {
    pub wr_id: u64,
    pub opcode: u32,
    pub send_flags: u32,
    /// Address, length, key.
    pub pieces: Vec<(u64, u32, u32)>,
    /// `imm_data` or `invalidate_rkey`.
    pub word: u32,
    /// Address and key of an RDMA request.
    pub remote: Option<(u64, u32)>,
    pub bind: Option<Bind>,
}

/// A BIND_MW as the provider saw it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the library's names")]
pub struct Bind {
    /// `mw->rkey` at that time: which the device has.
    pub old_rkey: u32,
    pub rkey: u32,
    pub addr: u64,
    pub length: u64,
    pub mw_access_flags: u32,
}

/// What it is and does. The library's context lies in its first field.
#[repr(C)]
#[derive(Default)]
struct Provider {
    extended: verbs_context,
    scenario: Scenario,
    made: Vec<Made>,
    /// Calls that it was asked to make something by.
    asked: Vec<&'static str>,
    /// Those of its protection domains that are parent domains.
    parents: Vec<*mut ibv_pd>,
    /// Complete every receive and every signalled request at once, and note nothing.
    automatic: bool,
    sent: Vec<Posted>,
    receives: Vec<u64>,
    completions: VecDeque<ibv_wc>,
    /// Requests that it takes of each chain.
    takes: Option<usize>,
    /// Answer with this although all were taken.
    kick: c_int,
    destroyed: Vec<&'static str>,
    keys: u32,
    numbers: u32,
    /// What the next garbage is made of.
    noise: u64,
}

impl Stub {
    /// A new one. An automatic one completes every receive and every signalled request at once.
    #[must_use]
    pub fn new(automatic: bool) -> Self {
        let raw = Provider::start(Scenario::default(), automatic);
        Self::of(Arc::new(Context::new(raw, CALLS)))
    }

    fn of(context: Arc<Context>) -> Self {
        let pd = Self::domain_of(&context);
        Self { context, pd }
    }

    /// A completion queue.
    #[must_use]
    pub fn completion_queue(&self) -> CompletionQueue {
        let raw = Box::into_raw(Box::new(ibv_cq {
            context: self.context.raw,
            cqe: 1 << 16,
            ..Default::default()
        }));
        let raw = Arc::new(Cq {
            raw,
            channel: None,
            fault: AtomicU32::new(0),
            pd: None,
            context: Arc::clone(&self.context),
        });
        CompletionQueue::of(raw, 1 << 16)
    }

    /// A device value over it.
    #[must_use]
    pub fn nic(&self, limits: Limits, quirks: Quirks) -> Verbs {
        let cq = self.completion_queue();
        let capabilities = Capabilities {
            mechanisms: Mechanisms::WINDOW,
            max_fragments: 0,
            max_pages: 0,
            page_shift: 12,
            zero_based: false,
            checks_reuse: true,
            region_lkey: false,
            remote_invalidate: true,
            max_sge: limits.max_sge,
            max_send_wr: limits.send_wr,
            max_recv_wr: limits.recv_wr,
            max_cqe: 1 << 16,
            max_windows: limits.windows,
        };
        Verbs::of(cq, Trap::none(), capabilities, quirks, limits, 1 << 30)
    }

    /// A queue pair that reports to it, ready to send.
    #[must_use]
    pub fn queue_pair(&self, nic: &Verbs, shape: Shape) -> QueuePair {
        self.queue_pair_of(nic.completion_queue(), shape)
    }

    /// A queue pair that reports to this completion queue, ready to send.
    #[must_use]
    pub fn queue_pair_of(&self, cq: &CompletionQueue, shape: Shape) -> QueuePair {
        let provider = self.provider();
        // SAFETY: the provider lives as long as the context, and this thread alone uses it.
        let number = unsafe {
            (*provider).numbers += 1;
            (*provider).numbers
        };
        let raw = Box::into_raw(Box::new(ibv_qp {
            context: self.context.raw,
            qp_num: number,
            ..Default::default()
        }));
        QueuePair {
            post: None,
            raw: Arc::new(RawQp {
                raw,
                pd: Arc::clone(&self.pd),
                cq: Arc::clone(&cq.raw),
            }),
            send_depth: shape.send_depth,
            recv_depth: shape.recv_depth,
            max_sge: shape.max_sge.max(1),
            inline: shape.inline,
            initiator_depth: 1,
        }
    }

    /// A free window.
    #[must_use]
    pub fn window(&self) -> Window {
        let rkey = self.key();
        let raw = Box::into_raw(Box::new(ibv_mw {
            context: self.context.raw,
            rkey,
            ..Default::default()
        }));
        Window::of(raw, Arc::clone(&self.pd))
    }

    /// Memory at an address that nobody looks at.
    #[must_use]
    pub fn memory(&self, start: u64, length: u64, rights: Rights) -> Memory {
        Self::memory_of(&self.pd, self.key(), start, length, rights)
    }

    /// The same in a protection domain of its own.
    #[must_use]
    pub fn foreign_memory(&self, start: u64, length: u64, rights: Rights) -> Memory {
        let pd = Self::domain_of(&self.context);
        Self::memory_of(&pd, self.key(), start, length, rights)
    }

    /// What was posted since it was last asked.
    #[must_use]
    pub fn sent(&self) -> Vec<Posted> {
        // SAFETY: as in `queue_pair`.
        unsafe { core::mem::take(&mut (*self.provider()).sent) }
    }

    /// How many receives were posted since it was last asked.
    #[must_use]
    pub fn received(&self) -> Vec<u64> {
        // SAFETY: as in `queue_pair`.
        unsafe { core::mem::take(&mut (*self.provider()).receives) }
    }

    /// From now on it takes this many requests of each chain; `None` for all.
    pub fn take(&self, most: Option<usize>) {
        // SAFETY: as in `queue_pair`.
        unsafe { (*self.provider()).takes = most };
    }

    /// From now on a chain that was taken whole is answered with this error number, as rxe does when its
    /// doorbell fails.
    pub fn fail_the_kick(&self, errno: i32) {
        // SAFETY: as in `queue_pair`.
        unsafe { (*self.provider()).kick = errno };
    }

    /// Completes something. With an error all other fields are garbage, another at each: only `wr_id`, `status`, `qp_num`
    /// and `vendor_err` of such an entry are defined (`ibv_poll_cq(3)`).
    pub fn complete(&self, wr_id: u64, status: u32) {
        let mut wc = if status == IBV_WC_SUCCESS {
            ibv_wc::default()
        } else {
            // SAFETY: as in `queue_pair`.
            garbage(unsafe { &mut (*self.provider()).noise })
        };
        wc.wr_id = wr_id;
        wc.status = status;
        self.complete_as(wc);
    }

    /// Completes something as given.
    pub fn complete_as(&self, wc: ibv_wc) {
        // SAFETY: as in `queue_pair`.
        unsafe { (*self.provider()).completions.push_back(wc) };
    }

    /// What was destroyed, in order.
    #[must_use]
    pub fn destroyed(&self) -> Vec<&'static str> {
        // SAFETY: as in `queue_pair`.
        unsafe { core::mem::take(&mut (*self.provider()).destroyed) }
    }

    /// What has gone wrong since it was last asked.
    #[must_use]
    pub fn complaints(&self) -> Vec<String> {
        self.context.complaints()
    }

    fn provider(&self) -> *mut Provider {
        // SAFETY: its context is a provider's.
        unsafe { Provider::of(self.context.raw) }
    }

    fn key(&self) -> u32 {
        // SAFETY: as in `queue_pair`.
        unsafe {
            (*self.provider()).keys += 0x100;
            (*self.provider()).keys
        }
    }

    fn domain_of(context: &Arc<Context>) -> Arc<Pd> {
        Arc::new(Pd {
            raw: Box::into_raw(Box::new(ibv_pd {
                context: context.raw,
                ..Default::default()
            })),
            td: None,
            base: None,
            context: Arc::clone(context),
        })
    }

    fn memory_of(pd: &Arc<Pd>, lkey: u32, start: u64, length: u64, rights: Rights) -> Memory {
        let raw = Box::into_raw(Box::new(ibv_mr {
            context: pd.context.raw,
            lkey,
            ..Default::default()
        }));
        Memory {
            raw: Arc::new(Mr {
                raw,
                pd: Arc::clone(pd),
            }),
            start,
            end: start + length,
            lkey: LKey(lkey),
            rights,
            windows: true,
        }
    }
}

/// An entry whose every byte is random.
pub(super) fn garbage(noise: &mut u64) -> ibv_wc {
    let bytes = [(); size_of::<ibv_wc>()].map(|()| {
        *noise ^= *noise << 13;
        *noise ^= *noise >> 7;
        *noise ^= *noise << 17;
        noise.to_le_bytes()[7]
    });
    // SAFETY: as many bytes, and it is numbers all through.
    unsafe { core::mem::transmute::<[u8; size_of::<ibv_wc>()], ibv_wc>(bytes) }
}

unsafe extern "C" fn post_send(
    qp: *mut ibv_qp,
    mut wr: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: the queue pair and the chain are alive, as `ibv_post_send(3)` asks, and the context is a provider's.
    unsafe {
        let provider = &mut *Provider::of((*qp).context);
        let mut count = 0;
        while !wr.is_null() {
            if provider.takes.is_some_and(|most| count >= most) {
                *bad = wr;
                return libc::ENOMEM;
            }
            if !provider.automatic {
                provider.sent.push(seen(&*wr));
            } else if (*wr).send_flags & IBV_SEND_SIGNALED != 0 {
                provider.completions.push_back(ibv_wc {
                    wr_id: (*wr).wr_id,
                    ..Default::default()
                });
            }
            count += 1;
            wr = (*wr).next;
        }
        provider.kick
    }
}

/// # Safety
/// Its lists are alive.
unsafe fn seen(wr: &ibv_send_wr) -> Posted {
    let count = usize::try_from(wr.num_sge).unwrap_or(0);
    let remote = matches!(
        wr.opcode,
        IBV_WR_RDMA_WRITE | IBV_WR_RDMA_WRITE_WITH_IMM | IBV_WR_RDMA_READ
    );
    // SAFETY: as the caller says; which part of a union is meant is told by the opcode.
    unsafe {
        let pieces = (0..count).map(|n| {
            let piece: ibv_sge = *wr.sg_list.add(n);
            (piece.addr, piece.length, piece.lkey)
        });
        Posted {
            wr_id: wr.wr_id,
            opcode: wr.opcode,
            send_flags: wr.send_flags,
            pieces: pieces.collect(),
            word: wr.__bindgen_anon_1.invalidate_rkey,
            remote: remote.then_some((wr.wr.rdma.remote_addr, wr.wr.rdma.rkey)),
            bind: (wr.opcode == IBV_WR_BIND_MW).then(|| {
                let bind = wr.__bindgen_anon_2.bind_mw;
                Bind {
                    old_rkey: (*bind.mw).rkey,
                    rkey: bind.rkey,
                    addr: bind.bind_info.addr,
                    length: bind.bind_info.length,
                    mw_access_flags: bind.bind_info.mw_access_flags,
                }
            }),
        }
    }
}

unsafe extern "C" fn post_recv(
    qp: *mut ibv_qp,
    wr: *mut ibv_recv_wr,
    _bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: as in `post_send`.
    unsafe {
        let provider = &mut *Provider::of((*qp).context);
        if provider.automatic {
            provider.completions.push_back(ibv_wc {
                wr_id: (*wr).wr_id,
                ..Default::default()
            });
        } else {
            provider.receives.push((*wr).wr_id);
        }
    }
    0
}

unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, most: c_int, wc: *mut ibv_wc) -> c_int {
    // SAFETY: as in `post_send`; there is room for `most`.
    unsafe {
        let provider = &mut *Provider::of((*cq).context);
        let mut count = 0;
        while count < most {
            let Some(next) = provider.completions.pop_front() else {
                break;
            };
            wc.offset(count as isize).write(next);
            count += 1;
        }
        count
    }
}

const unsafe extern "C" fn req_notify_cq(_: *mut ibv_cq, _: c_int) -> c_int {
    0
}

/// Notes that it was destroyed, and frees it, also where it is told to fail: it is asked once.
macro_rules! destroys {
    ($($name:ident($type:ty);)+) => {$(
        unsafe extern "C" fn $name(object: *mut $type) -> c_int {
            // SAFETY: made by `Box` here, destroyed once; the context outlives it.
            unsafe {
                let context: *mut ibv_context = (*object).context;
                drop(Box::from_raw(object));
                (*Provider::of(context)).destroys(stringify!($name))
            }
        }
    )+};
}

destroys! {
    dealloc_mw(ibv_mw);
    dealloc_td(ibv_td);
    dereg_mr(ibv_mr);
    destroy_cq(ibv_cq);
    destroy_qp(ibv_qp);
}

unsafe extern "C" fn dealloc_pd(pd: *mut ibv_pd) -> c_int {
    // SAFETY: as in `destroys`.
    unsafe {
        let provider = &mut *Provider::of((*pd).context);
        let parent = provider.parents.contains(&pd);
        provider.parents.retain(|known| *known != pd);
        drop(Box::from_raw(pd));
        provider.destroys(if parent {
            "dealloc_parent_domain"
        } else {
            "dealloc_pd"
        })
    }
}

unsafe extern "C" fn close_device(context: *mut ibv_context) -> c_int {
    // SAFETY: made by `Box` as a provider, closed once, last of all.
    unsafe { drop(Box::from_raw(Provider::of(context))) };
    0
}

const unsafe extern "C" fn destroy_comp_channel(_: *mut ibv_comp_channel) -> c_int {
    0
}

unsafe extern "C" fn modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, _mask: c_int) -> c_int {
    // SAFETY: both are alive.
    unsafe { (*qp).state = (*attr).qp_state };
    0
}

const unsafe extern "C" fn get_cq_event(
    _: *mut ibv_comp_channel,
    _: *mut *mut ibv_cq,
    _: *mut *mut c_void,
) -> c_int {
    -1
}

const unsafe extern "C" fn ack_cq_events(_: *mut ibv_cq, _: c_uint) {}

const CALLS: Calls = Calls {
    get_device_list: device::get_device_list,
    free_device_list: device::free_device_list,
    get_device_name: device::get_device_name,
    open_device: device::open_device,
    close_device,
    query_device: device::query_device,
    query_port: device::query_port_of_old,
    query_gid_table: device::query_gid_table,
    get_async_event: device::get_async_event,
    ack_async_event: device::ack_async_event,
    event_type_str: device::event_type_str,
    alloc_pd: device::alloc_pd,
    dealloc_pd,
    reg_mr: device::reg_mr,
    dereg_mr,
    create_comp_channel: device::create_comp_channel,
    destroy_comp_channel,
    create_cq: device::create_cq,
    destroy_cq,
    get_cq_event,
    ack_cq_events,
    create_qp: device::create_qp,
    modify_qp,
    destroy_qp,
};
