//! The inline functions over tables of our own.
#![cfg(feature = "verbs")]
#![allow(unsafe_code)]

use core::ffi::c_int;
use core::mem::{offset_of, size_of};
use core::ptr::{null_mut, without_provenance_mut};

use rdma_core_sys::inline::{
    ibv_alloc_mw, ibv_alloc_td, ibv_cq_ex_to_cq, ibv_create_cq_ex, ibv_inc_rkey, ibv_poll_cq,
    ibv_post_send, ibv_wr_complete, ibv_wr_send, verbs_get_ctx,
};
use rdma_core_sys::types::{
    IBV_CREATE_CQ_ATTR_SINGLE_THREADED, IBV_MW_TYPE_2, ibv_context, ibv_cq, ibv_cq_ex,
    ibv_cq_init_attr_ex, ibv_pd, ibv_qp, ibv_qp_ex, ibv_send_wr, ibv_td, ibv_td_init_attr, ibv_wc,
    verbs_context,
};

unsafe extern "C" fn no_domain(_: *mut ibv_context, _: *mut ibv_td_init_attr) -> *mut ibv_td {
    without_provenance_mut(0x1230)
}

unsafe extern "C" fn two(_: *mut ibv_cq, most: c_int, _: *mut ibv_wc) -> c_int {
    most.min(2)
}

fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap()
}

#[test]
fn an_entry_that_the_library_is_too_old_for_is_not_read() {
    let mut extended = verbs_context {
        alloc_td: Some(no_domain),
        ..Default::default()
    };
    extended.context.abi_compat = without_provenance_mut(usize::MAX);
    let whole: *mut verbs_context = &mut extended;
    let reach = size_of::<verbs_context>() - offset_of!(verbs_context, alloc_td);
    for (sz, there) in [
        (reach, true),
        (reach + 8, true),
        (reach - 8, false),
        (0, false),
    ] {
        // SAFETY: `whole` is alive, and all goes through it.
        let domain = unsafe {
            (*whole).sz = sz;
            let context = &raw mut (*whole).context;
            assert_eq!(verbs_get_ctx(context), whole);
            ibv_alloc_td(context, null_mut())
        };
        assert_eq!(!domain.is_null(), there, "{sz}");
        if !there {
            assert_eq!(errno(), libc::EOPNOTSUPP);
        }
    }
    // SAFETY: as above.
    unsafe {
        (*whole).sz = reach;
        (*whole).context.abi_compat = null_mut();
        assert!(ibv_alloc_td(&raw mut (*whole).context, null_mut()).is_null());
    }
}

/// Refuses all but a queue that one thread polls.
unsafe extern "C" fn for_one_thread(
    _: *mut ibv_context,
    attr: *mut ibv_cq_init_attr_ex,
) -> *mut ibv_cq_ex {
    // SAFETY: the test's own.
    if unsafe { (*attr).flags } == IBV_CREATE_CQ_ATTR_SINGLE_THREADED {
        without_provenance_mut(0x4560)
    } else {
        null_mut()
    }
}

#[test]
fn a_completion_queue_is_made_by_the_extended_table_alone() {
    let mut extended = verbs_context {
        sz: size_of::<verbs_context>(),
        ..Default::default()
    };
    extended.context.abi_compat = without_provenance_mut(usize::MAX);
    let whole: *mut verbs_context = &mut extended;
    let mut attr = ibv_cq_init_attr_ex::default();
    // SAFETY: both are alive, and nothing is made.
    unsafe {
        let context = &raw mut (*whole).context;
        assert!(ibv_create_cq_ex(context, &mut attr).is_null());
        assert_eq!(errno(), libc::EOPNOTSUPP);
        (*whole).create_cq_ex = Some(for_one_thread);
        assert!(ibv_create_cq_ex(context, &mut attr).is_null());
        attr.flags = IBV_CREATE_CQ_ATTR_SINGLE_THREADED;
        let made = ibv_create_cq_ex(context, &mut attr);
        assert_eq!(ibv_cq_ex_to_cq(made).addr(), 0x4560);
    }
}

#[test]
fn an_operation_that_the_provider_lacks_is_an_error_and_no_call() {
    let mut context = ibv_context::default();
    let context: *mut ibv_context = &mut context;
    let (mut qp, mut cq, mut pd) = (ibv_qp::default(), ibv_cq::default(), ibv_pd::default());
    (qp.context, cq.context, pd.context) = (context, context, context);
    let mut bad: *mut ibv_send_wr = null_mut();
    // SAFETY: all of them are alive, and nothing is called.
    unsafe {
        assert_eq!(
            ibv_post_send(&mut qp, null_mut(), &mut bad),
            libc::EOPNOTSUPP
        );
        assert_eq!(ibv_poll_cq(&mut cq, 1, null_mut()), -libc::EOPNOTSUPP);
        assert!(ibv_alloc_mw(&mut pd, IBV_MW_TYPE_2).is_null());
        assert_eq!(errno(), libc::EOPNOTSUPP);
        (*context).ops.poll_cq = Some(two);
        assert_eq!(ibv_poll_cq(&mut cq, 9, null_mut()), 2);
    }
}

#[test]
fn a_builder_that_the_queue_pair_was_not_made_for_does_nothing() {
    let mut qp = ibv_qp_ex::default();
    // SAFETY: it is alive, and nothing is called.
    unsafe {
        ibv_wr_send(&mut qp);
        assert_eq!(ibv_wr_complete(&mut qp), libc::EINVAL);
    }
}

#[test]
fn an_rkey_visits_256_tags_and_keeps_its_index() {
    let mut key = u32::MAX;
    for step in 0..256_u32 {
        assert_eq!(key, 0xffff_ff00 | (0xff + step) & 0xff);
        key = ibv_inc_rkey(key);
    }
    assert_eq!(key, u32::MAX);
}
