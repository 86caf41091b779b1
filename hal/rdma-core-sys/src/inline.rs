//! What the headers define as C inlines: calls through the provider's function tables.
//!
//! The tables hang off `ibv_context`. `ibv_context.ops` has a fixed size; `verbs_context` lies in front of
//! it and grows at its front, so its `sz` says which entries the library knows. `ibv_qp_ex` and
//! `mlx5dv_qp_ex` have an entry for each operation that their queue pair was made for
//! (`send_ops_flags`); the others are null, and C calls them all the same. Here each answers for itself:
//! an entry that is null is `EOPNOTSUPP` where the function can say so, and nothing at all where it cannot.
//!
//! # Safety
//! For all: pointers come from this library, their objects are alive, and arguments are as the manual page
//! of the same name asks.
#![allow(clippy::missing_safety_doc, reason = "one text for all of them, above")]
#![allow(non_snake_case, reason = "C's names")]

use core::ffi::c_int;
use core::mem::{offset_of, size_of};
use core::ptr::{null_mut, write_bytes};

use libc::{EINVAL, EOPNOTSUPP};

use crate::load::{Libibverbs, Libmlx5};
use crate::types::{
    _compat_ibv_port_attr, IBV_QP_INIT_ATTR_PD, ibv_context, ibv_cq, ibv_cq_ex,
    ibv_cq_init_attr_ex, ibv_gid_entry, ibv_mw, ibv_mw_bind_info, ibv_mw_type,
    ibv_parent_domain_init_attr, ibv_pd, ibv_port_attr, ibv_qp, ibv_qp_ex, ibv_qp_init_attr,
    ibv_qp_init_attr_ex, ibv_recv_wr, ibv_send_wr, ibv_sge, ibv_td, ibv_td_init_attr, ibv_wc,
    mlx5dv_mkey, mlx5dv_mkey_conf_attr, mlx5dv_mkey_err, mlx5dv_mr_interleaved, mlx5dv_qp_ex,
    verbs_context,
};

/// The extended context of a provider that has one.
#[must_use]
pub unsafe fn verbs_get_ctx(context: *mut ibv_context) -> *mut verbs_context {
    // SAFETY: `context` is alive.
    let mark = unsafe { (*context).abi_compat };
    // `__VERBS_ABI_IS_EXTENDED`: all ones.
    if mark.addr() != usize::MAX {
        return null_mut();
    }
    // SAFETY: the mark says that it lies inside of a `verbs_context`.
    unsafe { context.byte_sub(offset_of!(verbs_context, context)) }.cast()
}

/// The entry `$op` of the extended context, if library and provider have it.
macro_rules! extended {
    ($context:expr, $op:ident) => {{
        let context: *mut ibv_context = $context;
        // SAFETY: `context` is alive.
        let extended = unsafe { verbs_get_ctx(context) };
        // An entry is there if the library's structure reaches as far to the front.
        const REACH: usize = size_of::<verbs_context>() - offset_of!(verbs_context, $op);
        // SAFETY: `sz` lies behind every entry that may be missing, and the entry is read only when it is there.
        if !extended.is_null() && unsafe { (*extended).sz } >= REACH {
            // SAFETY: as above.
            unsafe { (*extended).$op }
        } else {
            None
        }
    }};
}

/// `ibv_post_send(3)`. The hot path.
#[inline]
pub unsafe fn ibv_post_send(
    qp: *mut ibv_qp,
    wr: *mut ibv_send_wr,
    bad_wr: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: `qp` is alive, and so is its context.
    match unsafe { (*(*qp).context).ops.post_send } {
        // SAFETY: as the caller promises.
        Some(op) => unsafe { op(qp, wr, bad_wr) },
        None => EOPNOTSUPP,
    }
}

/// `ibv_post_recv(3)`. The hot path.
#[inline]
pub unsafe fn ibv_post_recv(
    qp: *mut ibv_qp,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: `qp` is alive, and so is its context.
    match unsafe { (*(*qp).context).ops.post_recv } {
        // SAFETY: as the caller promises.
        Some(op) => unsafe { op(qp, wr, bad_wr) },
        None => EOPNOTSUPP,
    }
}

/// `ibv_poll_cq(3)`: how many, or negative. The hot path.
#[inline]
pub unsafe fn ibv_poll_cq(cq: *mut ibv_cq, num_entries: c_int, wc: *mut ibv_wc) -> c_int {
    // SAFETY: `cq` is alive, and so is its context.
    match unsafe { (*(*cq).context).ops.poll_cq } {
        // SAFETY: as the caller promises.
        Some(op) => unsafe { op(cq, num_entries, wc) },
        None => -EOPNOTSUPP,
    }
}

/// `ibv_req_notify_cq(3)`.
#[inline]
pub unsafe fn ibv_req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    // SAFETY: `cq` is alive, and so is its context.
    match unsafe { (*(*cq).context).ops.req_notify_cq } {
        // SAFETY: as the caller promises.
        Some(op) => unsafe { op(cq, solicited_only) },
        None => EOPNOTSUPP,
    }
}

/// `ibv_alloc_mw(3)`; null with `errno` set.
pub unsafe fn ibv_alloc_mw(pd: *mut ibv_pd, kind: ibv_mw_type) -> *mut ibv_mw {
    // SAFETY: `pd` is alive, and so is its context.
    match unsafe { (*(*pd).context).ops.alloc_mw } {
        // SAFETY: as the caller promises.
        Some(op) => unsafe { op(pd, kind) },
        None => unsupported(),
    }
}

/// `ibv_dealloc_mw(3)`.
pub unsafe fn ibv_dealloc_mw(mw: *mut ibv_mw) -> c_int {
    // SAFETY: `mw` is alive, and so is its context.
    match unsafe { (*(*mw).context).ops.dealloc_mw } {
        // SAFETY: as the caller promises.
        Some(op) => unsafe { op(mw) },
        None => EOPNOTSUPP,
    }
}

/// `ibv_inc_rkey(3)`: the next of 256 tags, and the same index.
#[must_use]
pub const fn ibv_inc_rkey(rkey: u32) -> u32 {
    (rkey & !0xff) | (rkey.wrapping_add(1) & 0xff)
}

/// `ibv_query_port(3)`: `symbol`, the library's of that name, fills a shorter structure.
pub unsafe fn ibv_query_port(
    symbol: unsafe extern "C" fn(*mut ibv_context, u8, *mut _compat_ibv_port_attr) -> c_int,
    context: *mut ibv_context,
    port_num: u8,
    port_attr: *mut ibv_port_attr,
) -> c_int {
    if let Some(op) = extended!(context, query_port) {
        // SAFETY: as the caller promises; the provider fills no more than the size that it is told.
        return unsafe { op(context, port_num, port_attr, size_of::<ibv_port_attr>()) };
    }
    // SAFETY: as the caller promises. The structures are the same as far as the shorter one goes.
    unsafe {
        write_bytes(port_attr, 0, 1);
        symbol(context, port_num, port_attr.cast::<_compat_ibv_port_attr>())
    }
}

/// `ibv_query_gid_ex(3)`: an entry of the GID table with its type.
pub unsafe fn ibv_query_gid_ex(
    library: &Libibverbs,
    context: *mut ibv_context,
    port_num: u32,
    gid_index: u32,
    entry: *mut ibv_gid_entry,
) -> c_int {
    let size = size_of::<ibv_gid_entry>();
    // SAFETY: as the caller promises.
    unsafe { library._ibv_query_gid_ex(context, port_num, gid_index, entry, 0, size) }
}

/// `ibv_query_gid_table(3)`: how many entries are valid, or negative. `symbol` is the library's `_ibv_query_gid_table`.
pub unsafe fn ibv_query_gid_table(
    symbol: unsafe extern "C" fn(*mut ibv_context, *mut ibv_gid_entry, usize, u32, usize) -> isize,
    context: *mut ibv_context,
    entries: *mut ibv_gid_entry,
    max_entries: usize,
) -> isize {
    let size = size_of::<ibv_gid_entry>();
    // SAFETY: as the caller promises.
    unsafe { symbol(context, entries, max_entries, 0, size) }
}

/// `ibv_alloc_td(3)`; null with `errno` set.
pub unsafe fn ibv_alloc_td(
    context: *mut ibv_context,
    init_attr: *mut ibv_td_init_attr,
) -> *mut ibv_td {
    match extended!(context, alloc_td) {
        // SAFETY: as the caller promises.
        Some(op) => unsafe { op(context, init_attr) },
        None => unsupported(),
    }
}

/// `ibv_dealloc_td(3)`.
pub unsafe fn ibv_dealloc_td(td: *mut ibv_td) -> c_int {
    // SAFETY: `td` is alive.
    match extended!(unsafe { (*td).context }, dealloc_td) {
        // SAFETY: as the caller promises.
        Some(op) => unsafe { op(td) },
        None => EOPNOTSUPP,
    }
}

/// `ibv_alloc_parent_domain(3)`; null with `errno` set.
pub unsafe fn ibv_alloc_parent_domain(
    context: *mut ibv_context,
    attr: *mut ibv_parent_domain_init_attr,
) -> *mut ibv_pd {
    match extended!(context, alloc_parent_domain) {
        // SAFETY: as the caller promises.
        Some(op) => unsafe { op(context, attr) },
        None => unsupported(),
    }
}

/// `ibv_create_cq_ex(3)`; null with `errno` set.
pub unsafe fn ibv_create_cq_ex(
    context: *mut ibv_context,
    attr: *mut ibv_cq_init_attr_ex,
) -> *mut ibv_cq_ex {
    match extended!(context, create_cq_ex) {
        // SAFETY: as the caller promises.
        Some(op) => unsafe { op(context, attr) },
        None => unsupported(),
    }
}

/// `ibv_cq_ex_to_cq(3)`: it begins with the fields of an `ibv_cq`.
#[must_use]
pub const fn ibv_cq_ex_to_cq(cq: *mut ibv_cq_ex) -> *mut ibv_cq {
    cq.cast()
}

/// `ibv_create_qp_ex(3)`; null with `errno` set.
pub unsafe fn ibv_create_qp_ex(
    library: &Libibverbs,
    context: *mut ibv_context,
    attr: *mut ibv_qp_init_attr_ex,
) -> *mut ibv_qp {
    // SAFETY: `attr` is alive.
    let (mask, pd) = unsafe { ((*attr).comp_mask, (*attr).pd) };
    if mask == IBV_QP_INIT_ATTR_PD {
        // SAFETY: the longer structure begins with the shorter one.
        return unsafe { library.ibv_create_qp(pd, attr.cast::<ibv_qp_init_attr>()) };
    }
    match extended!(context, create_qp_ex) {
        // SAFETY: as the caller promises.
        Some(op) => unsafe { op(context, attr) },
        None => unsupported(),
    }
}

/// Builders and setters of `ibv_qp_ex` (`ibv_wr_post(3)`) and `mlx5dv_qp_ex` (`mlx5dv_wr_post(3)`). They
/// answer nothing: `ibv_wr_complete` tells. One that its queue pair was not made for does nothing.
macro_rules! builders {
    ($($(#[$doc:meta])* $name:ident($queue:ty, $op:ident $(, $argument:ident: $type:ty)*);)+) => {$(
        $(#[$doc])*
        #[inline]
        pub unsafe fn $name(qp: *mut $queue $(, $argument: $type)*) {
            // SAFETY: `qp` is alive.
            if let Some(op) = unsafe { (*qp).$op } {
                // SAFETY: as the caller promises.
                unsafe { op(qp $(, $argument)*) }
            }
        }
    )+};
}

builders! {
    /// Begins a critical section of the queue pair.
    ibv_wr_start(ibv_qp_ex, wr_start);
    /// Forgets everything since `ibv_wr_start`.
    ibv_wr_abort(ibv_qp_ex, wr_abort);
    /// Type-2 window bind: the application names the key.
    ibv_wr_bind_mw(ibv_qp_ex, wr_bind_mw, mw: *mut ibv_mw, rkey: u32, info: *const ibv_mw_bind_info);
    /// LOCAL_INV.
    ibv_wr_local_inv(ibv_qp_ex, wr_local_inv, invalidate_rkey: u32);
    /// RDMA READ.
    ibv_wr_rdma_read(ibv_qp_ex, wr_rdma_read, rkey: u32, remote_addr: u64);
    /// RDMA WRITE.
    ibv_wr_rdma_write(ibv_qp_ex, wr_rdma_write, rkey: u32, remote_addr: u64);
    /// RDMA WRITE with immediate data, big-endian.
    ibv_wr_rdma_write_imm(ibv_qp_ex, wr_rdma_write_imm, rkey: u32, remote_addr: u64, imm_data: u32);
    /// SEND.
    ibv_wr_send(ibv_qp_ex, wr_send);
    /// SEND_WITH_INV.
    ibv_wr_send_inv(ibv_qp_ex, wr_send_inv, invalidate_rkey: u32);
    /// One piece.
    ibv_wr_set_sge(ibv_qp_ex, wr_set_sge, lkey: u32, addr: u64, length: u32);
    /// Pieces. rdma-core before 64 gets the length wrong on rxe.
    ibv_wr_set_sge_list(ibv_qp_ex, wr_set_sge_list, num_sge: usize, sg_list: *const ibv_sge);
    /// Begins the configuration of an mkey; `num_setters` setters follow.
    mlx5dv_wr_mkey_configure(mlx5dv_qp_ex, wr_mkey_configure, mkey: *mut mlx5dv_mkey, num_setters: u8, attr: *mut mlx5dv_mkey_conf_attr);
    /// Setter: access rights (`ibv_access_flags`).
    mlx5dv_wr_set_mkey_access_flags(mlx5dv_qp_ex, wr_set_mkey_access_flags, access_flags: u32);
    /// Setter: the pieces, laid end to end from address 0.
    mlx5dv_wr_set_mkey_layout_list(mlx5dv_qp_ex, wr_set_mkey_layout_list, num_sges: u16, sge: *const ibv_sge);
    /// Setter: a repeated pattern.
    mlx5dv_wr_set_mkey_layout_interleaved(mlx5dv_qp_ex, wr_set_mkey_layout_interleaved, repeat_count: u32, num_interleaved: u16, data: *const mlx5dv_mr_interleaved);
    /// UMR over a list of memory regions in one call.
    mlx5dv_wr_mr_list(mlx5dv_qp_ex, wr_mr_list, mkey: *mut mlx5dv_mkey, access_flags: u32, num_sges: u16, sge: *mut ibv_sge);
    /// UMR over a repeated pattern in one call.
    mlx5dv_wr_mr_interleaved(mlx5dv_qp_ex, wr_mr_interleaved, mkey: *mut mlx5dv_mkey, access_flags: u32, repeat_count: u32, num_interleaved: u16, data: *mut mlx5dv_mr_interleaved);
}

/// `ibv_wr_complete(3)`: all since `ibv_wr_start` or nothing.
#[inline]
pub unsafe fn ibv_wr_complete(qp: *mut ibv_qp_ex) -> c_int {
    // SAFETY: `qp` is alive.
    match unsafe { (*qp).wr_complete } {
        // SAFETY: as the caller promises.
        Some(op) => unsafe { op(qp) },
        None => EINVAL,
    }
}

/// `mlx5dv_mkey_check(3)`: what went wrong with an mkey.
pub unsafe fn mlx5dv_mkey_check(
    library: &Libmlx5,
    mkey: *mut mlx5dv_mkey,
    error: *mut mlx5dv_mkey_err,
) -> c_int {
    // SAFETY: as the caller promises.
    unsafe { library._mlx5dv_mkey_check(mkey, error, size_of::<mlx5dv_mkey_err>()) }
}

fn unsupported<T>() -> *mut T {
    // SAFETY: the thread's own `errno`.
    unsafe { *libc::__errno_location() = EOPNOTSUPP };
    null_mut()
}
