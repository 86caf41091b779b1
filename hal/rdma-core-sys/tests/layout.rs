//! Rust's view of the structures against a C compiler's, on this machine's headers: the size of each, and
//! the offset and size of every field that is used, and the value of every constant.
#![cfg(feature = "verbs")]
#![allow(unsafe_code)]

use core::fmt::Write as _;
use core::mem::{MaybeUninit, offset_of, size_of, size_of_val};
use std::process::Command;

use rdma_core_sys::types::*;

/// One fact: how C writes it, and what Rust says.
struct Fact {
    expression: String,
    value: i128,
}

macro_rules! structures {
    ($($kind:ident $name:ident { $($($rust:ident).+ $(= $c:literal)?,)* })+) => {
        fn structures(facts: &mut Vec<Fact>) {$(
            let c = match stringify!($kind) {
                "plain" => stringify!($name).to_owned(),
                kind => format!("{kind} {}", stringify!($name)),
            };
            facts.push(Fact { expression: format!("sizeof({c})"), value: size_of::<$name>() as i128 });
            $(
                let field = stringify!($($rust).+);
                $(let field = { let _ = field; $c };)?
                let offset = offset_of!($name, $($rust).+);
                facts.push(Fact { expression: format!("offsetof({c}, {field})"), value: offset as i128 });
                let room = MaybeUninit::<$name>::zeroed();
                // SAFETY: zeros are a value of every one of these (numbers, pointers, optional functions).
                let size = unsafe { size_of_val(&(*room.as_ptr()).$($rust).+) };
                facts.push(Fact { expression: format!("sizeof((({c} *)0)->{field})"), value: size as i128 });
            )*
        )+}
    };
}

macro_rules! constants {
    ($($name:ident)+) => {
        fn constants(facts: &mut Vec<Fact>) {$(
            facts.push(Fact { expression: stringify!($name).to_owned(), value: i128::from($name) });
        )+}
    };
}

structures! {
    struct ibv_sge { addr, length, lkey, }
    struct ibv_send_wr {
        wr_id, next, sg_list, num_sge, opcode, send_flags,
        __bindgen_anon_1.imm_data = "imm_data",
        __bindgen_anon_1.invalidate_rkey = "invalidate_rkey",
        wr.rdma.remote_addr, wr.rdma.rkey,
        __bindgen_anon_2.bind_mw.mw = "bind_mw.mw",
        __bindgen_anon_2.bind_mw.rkey = "bind_mw.rkey",
        __bindgen_anon_2.bind_mw.bind_info = "bind_mw.bind_info",
    }
    struct ibv_mw_bind_info { mr, addr, length, mw_access_flags, }
    struct ibv_recv_wr { wr_id, next, sg_list, num_sge, }
    struct ibv_wc {
        wr_id, status, opcode, vendor_err, byte_len, qp_num, src_qp, wc_flags, pkey_index, slid, sl,
        dlid_path_bits,
        __bindgen_anon_1.imm_data = "imm_data",
        __bindgen_anon_1.invalidated_rkey = "invalidated_rkey",
    }
    struct ibv_context { device, ops, cmd_fd, async_fd, num_comp_vectors, mutex, abi_compat, }
    struct ibv_context_ops {
        alloc_mw, bind_mw, dealloc_mw, poll_cq, req_notify_cq, post_send, post_recv,
    }
    struct verbs_context {
        query_port, alloc_parent_domain, dealloc_td, alloc_td, create_qp_ex, sz, context,
    }
    struct ibv_device { node_type, transport_type, name, dev_name, dev_path, ibdev_path, }
    struct ibv_device_attr {
        fw_ver, node_guid, vendor_id, vendor_part_id, max_mr_size, max_qp, max_qp_wr, device_cap_flags,
        max_sge, max_cq, max_cqe, max_mr, max_pd, max_qp_rd_atom, max_qp_init_rd_atom, max_mw,
        phys_port_cnt,
    }
    struct ibv_port_attr { state, max_mtu, active_mtu, gid_tbl_len, max_msg_sz, lid, link_layer, flags, }
    union ibv_gid { raw, global.subnet_prefix, global.interface_id, }
    struct ibv_gid_entry { gid, gid_index, port_num, gid_type, ndev_ifindex, }
    struct ibv_pd { context, handle, }
    struct ibv_td { context, }
    struct ibv_td_init_attr { comp_mask, }
    struct ibv_parent_domain_init_attr { pd, td, comp_mask, alloc, free, pd_context, }
    struct ibv_mr { context, pd, addr, length, handle, lkey, rkey, }
    struct ibv_mw { context, pd, rkey, handle, type_ = "type", }
    struct ibv_comp_channel { context, fd, refcnt, }
    struct ibv_cq { context, channel, cq_context, handle, cqe, mutex, cond, comp_events_completed, async_events_completed, }
    struct ibv_qp { context, qp_context, pd, send_cq, recv_cq, srq, handle, qp_num, state, qp_type, mutex, cond, events_completed, }
    struct ibv_qp_cap { max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data, }
    struct ibv_qp_init_attr { qp_context, send_cq, recv_cq, srq, cap, qp_type, sq_sig_all, }
    struct ibv_qp_init_attr_ex {
        qp_context, send_cq, recv_cq, srq, cap, qp_type, sq_sig_all, comp_mask, pd, send_ops_flags,
    }
    struct ibv_qp_attr {
        qp_state, cur_qp_state, path_mtu, path_mig_state, qkey, rq_psn, sq_psn, dest_qp_num,
        qp_access_flags, cap, ah_attr, pkey_index, sq_draining, max_rd_atomic, max_dest_rd_atomic,
        min_rnr_timer, port_num, timeout, retry_cnt, rnr_retry,
    }
    struct ibv_ah_attr { grh, dlid, sl, src_path_bits, static_rate, is_global, port_num, }
    struct ibv_global_route { dgid, flow_label, sgid_index, hop_limit, traffic_class, }
    struct ibv_async_event {
        event_type,
        element.cq, element.qp, element.port_num,
    }
    struct ibv_qp_ex {
        qp_base, comp_mask, wr_id, wr_flags, wr_bind_mw, wr_local_inv, wr_rdma_read, wr_rdma_write,
        wr_rdma_write_imm, wr_send, wr_send_inv, wr_set_sge, wr_set_sge_list, wr_start, wr_complete,
        wr_abort,
    }
    struct rdma_event_channel { fd, }
    struct rdma_cm_id {
        verbs, channel, context, qp, route, ps, port_num, event, send_cq_channel, send_cq,
        recv_cq_channel, recv_cq, srq, pd, qp_type,
    }
    struct rdma_route { addr, path_rec, num_paths, }
    struct rdma_addr {
        __bindgen_anon_1.src_addr = "src_addr",
        __bindgen_anon_1.src_storage = "src_storage",
        __bindgen_anon_2.dst_addr = "dst_addr",
        __bindgen_anon_2.dst_storage = "dst_storage",
    }
    struct rdma_conn_param {
        private_data, private_data_len, responder_resources, initiator_depth, flow_control, retry_count,
        rnr_retry_count, srq, qp_num,
    }
    struct rdma_cm_event { id, listen_id, event, status, param.conn = "param.conn", }
    struct mlx5dv_context_attr { flags, comp_mask, }
    struct mlx5dv_mkey { lkey, rkey, }
    struct mlx5dv_mkey_init_attr { pd, create_flags, max_entries, }
    struct mlx5dv_mkey_conf_attr { conf_flags, comp_mask, }
    struct mlx5dv_mr_interleaved { addr, bytes_count, bytes_skip, lkey, }
    struct mlx5dv_qp_init_attr { comp_mask, create_flags, send_ops_flags, }
    struct mlx5dv_qp_ex {
        comp_mask, wr_mr_interleaved, wr_mr_list, wr_mkey_configure, wr_set_mkey_access_flags,
        wr_set_mkey_layout_list, wr_set_mkey_layout_interleaved,
    }
    struct mlx5dv_mkey_err { err_type, }
    plain sockaddr_storage { ss_family, }
    plain sockaddr_in { sin_family, sin_port, sin_addr, }
    plain pthread_mutex_t {}
    plain pthread_cond_t {}
}

/// As the headers have them in C.
#[expect(non_camel_case_types, reason = "C's names")]
type sockaddr_storage = libc::sockaddr_storage;
#[expect(non_camel_case_types, reason = "C's names")]
type sockaddr_in = libc::sockaddr_in;
#[expect(non_camel_case_types, reason = "C's names")]
type pthread_mutex_t = libc::pthread_mutex_t;
#[expect(non_camel_case_types, reason = "C's names")]
type pthread_cond_t = libc::pthread_cond_t;

constants! {
    IBV_WR_RDMA_WRITE IBV_WR_RDMA_WRITE_WITH_IMM IBV_WR_SEND IBV_WR_RDMA_READ IBV_WR_LOCAL_INV
    IBV_WR_BIND_MW IBV_WR_SEND_WITH_INV
    IBV_SEND_FENCE IBV_SEND_SIGNALED IBV_SEND_SOLICITED IBV_SEND_INLINE
    IBV_WC_SEND IBV_WC_RDMA_WRITE IBV_WC_RDMA_READ IBV_WC_BIND_MW IBV_WC_LOCAL_INV IBV_WC_RECV
    IBV_WC_RECV_RDMA_WITH_IMM
    IBV_WC_GRH IBV_WC_WITH_IMM IBV_WC_IP_CSUM_OK IBV_WC_WITH_INV
    IBV_WC_SUCCESS IBV_WC_LOC_LEN_ERR IBV_WC_LOC_QP_OP_ERR IBV_WC_LOC_PROT_ERR IBV_WC_WR_FLUSH_ERR
    IBV_WC_MW_BIND_ERR IBV_WC_BAD_RESP_ERR IBV_WC_LOC_ACCESS_ERR IBV_WC_REM_INV_REQ_ERR
    IBV_WC_REM_ACCESS_ERR IBV_WC_REM_OP_ERR IBV_WC_RETRY_EXC_ERR IBV_WC_RNR_RETRY_EXC_ERR
    IBV_WC_FATAL_ERR IBV_WC_RESP_TIMEOUT_ERR IBV_WC_GENERAL_ERR
    IBV_ACCESS_LOCAL_WRITE IBV_ACCESS_REMOTE_WRITE IBV_ACCESS_REMOTE_READ IBV_ACCESS_MW_BIND
    IBV_ACCESS_ZERO_BASED
    IBV_DEVICE_MEM_WINDOW IBV_DEVICE_MEM_MGT_EXTENSIONS IBV_DEVICE_MEM_WINDOW_TYPE_2A
    IBV_DEVICE_MEM_WINDOW_TYPE_2B
    IBV_MW_TYPE_1 IBV_MW_TYPE_2
    IBV_QPS_RESET IBV_QPS_INIT IBV_QPS_RTR IBV_QPS_RTS IBV_QPS_SQD IBV_QPS_SQE IBV_QPS_ERR
    IBV_QPT_RC
    IBV_QP_STATE IBV_QP_ACCESS_FLAGS IBV_QP_PKEY_INDEX IBV_QP_PORT IBV_QP_AV IBV_QP_PATH_MTU
    IBV_QP_TIMEOUT IBV_QP_RETRY_CNT IBV_QP_RNR_RETRY IBV_QP_RQ_PSN IBV_QP_MAX_QP_RD_ATOMIC
    IBV_QP_MIN_RNR_TIMER IBV_QP_SQ_PSN IBV_QP_MAX_DEST_RD_ATOMIC IBV_QP_CAP IBV_QP_DEST_QPN
    IBV_QP_INIT_ATTR_PD IBV_QP_INIT_ATTR_SEND_OPS_FLAGS
    IBV_QP_EX_WITH_RDMA_WRITE IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM IBV_QP_EX_WITH_SEND
    IBV_QP_EX_WITH_RDMA_READ IBV_QP_EX_WITH_LOCAL_INV IBV_QP_EX_WITH_BIND_MW
    IBV_QP_EX_WITH_SEND_WITH_INV
    IBV_MTU_256 IBV_MTU_512 IBV_MTU_1024 IBV_MTU_2048 IBV_MTU_4096
    IBV_PORT_ACTIVE IBV_LINK_LAYER_INFINIBAND IBV_LINK_LAYER_ETHERNET
    IBV_GID_TYPE_IB IBV_GID_TYPE_ROCE_V1 IBV_GID_TYPE_ROCE_V2
    IBV_EVENT_CQ_ERR IBV_EVENT_QP_FATAL IBV_EVENT_QP_REQ_ERR IBV_EVENT_QP_ACCESS_ERR
    IBV_EVENT_COMM_EST IBV_EVENT_QP_LAST_WQE_REACHED IBV_EVENT_DEVICE_FATAL IBV_EVENT_PORT_ACTIVE
    IBV_EVENT_PORT_ERR IBV_EVENT_GID_CHANGE
    RDMA_CM_EVENT_ADDR_RESOLVED RDMA_CM_EVENT_ADDR_ERROR RDMA_CM_EVENT_ROUTE_RESOLVED
    RDMA_CM_EVENT_ROUTE_ERROR RDMA_CM_EVENT_CONNECT_REQUEST RDMA_CM_EVENT_CONNECT_RESPONSE
    RDMA_CM_EVENT_CONNECT_ERROR RDMA_CM_EVENT_UNREACHABLE RDMA_CM_EVENT_REJECTED
    RDMA_CM_EVENT_ESTABLISHED RDMA_CM_EVENT_DISCONNECTED RDMA_CM_EVENT_DEVICE_REMOVAL
    RDMA_CM_EVENT_ADDR_CHANGE RDMA_CM_EVENT_TIMEWAIT_EXIT
    RDMA_PS_TCP RDMA_OPTION_ID RDMA_OPTION_ID_TOS RDMA_OPTION_ID_REUSEADDR RDMA_OPTION_ID_ACK_TIMEOUT
    MLX5DV_WC_UMR MLX5DV_CONTEXT_FLAGS_DEVX
    MLX5DV_MKEY_INIT_ATTR_FLAGS_INDIRECT MLX5DV_MKEY_INIT_ATTR_FLAGS_UPDATE_TAG
    MLX5DV_MKEY_INIT_ATTR_FLAGS_REMOTE_INVALIDATE
    MLX5DV_QP_INIT_ATTR_MASK_QP_CREATE_FLAGS MLX5DV_QP_INIT_ATTR_MASK_SEND_OPS_FLAGS
    MLX5DV_QP_CREATE_DISABLE_SCATTER_TO_CQE MLX5DV_QP_EX_WITH_MKEY_CONFIGURE
    MLX5DV_QP_EX_WITH_MR_LIST MLX5DV_QP_EX_WITH_MR_INTERLEAVED
}

#[test]
fn structures_and_constants_are_what_a_c_compiler_says() {
    let mut facts = Vec::new();
    structures(&mut facts);
    constants(&mut facts);
    let answers = compiled(&facts);
    let wrong: Vec<String> = facts
        .iter()
        .zip(&answers)
        .filter(|(fact, answer)| fact.value != **answer)
        .map(|(fact, answer)| format!("{}: {answer} in C, {} in Rust", fact.expression, fact.value))
        .collect();
    assert!(facts.len() > 400, "{} facts", facts.len());
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// What the C compiler makes of each expression.
fn compiled(facts: &[Fact]) -> Vec<i128> {
    let mut source = String::from(
        "#include <stdio.h>\n#include <stddef.h>\n#include <pthread.h>\n#include <netinet/in.h>\n\
         #include <infiniband/verbs.h>\n#include <rdma/rdma_cma.h>\n#include <infiniband/mlx5dv.h>\n\
         typedef struct sockaddr_storage sockaddr_storage;\ntypedef struct sockaddr_in sockaddr_in;\n\
         int main(void) {\n",
    );
    for fact in facts {
        writeln!(
            source,
            "printf(\"%lld\\n\", (long long)({}));",
            fact.expression
        )
        .unwrap();
    }
    source.push_str("return 0; }\n");
    let place = std::env::temp_dir().join(format!("o2poll-layout-{}", std::process::id()));
    std::fs::create_dir_all(&place).unwrap();
    let (file, program) = (place.join("layout.c"), place.join("layout"));
    std::fs::write(&file, source).unwrap();
    let compiler = Command::new("cc")
        .arg("-o")
        .arg(&program)
        .arg(&file)
        .output();
    let compiler = compiler.expect("a C compiler is needed: apt-get install gcc libc6-dev");
    assert!(
        compiler.status.success(),
        "{}",
        String::from_utf8_lossy(&compiler.stderr)
    );
    let printed = Command::new(&program).output().unwrap();
    std::fs::remove_dir_all(&place).unwrap();
    let answers: Vec<i128> = String::from_utf8(printed.stdout)
        .unwrap()
        .lines()
        .map(|line| line.parse().unwrap())
        .collect();
    assert_eq!(answers.len(), facts.len());
    answers
}
