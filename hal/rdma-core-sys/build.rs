//! Generates the bindings from the installed headers, with the feature `verbs`; does nothing without it.

#[cfg(not(feature = "verbs"))]
fn main() {}

#[cfg(feature = "verbs")]
fn main() {
    verbs::generate();
}

#[cfg(feature = "verbs")]
mod verbs {
    use std::env;
    use std::path::{Path, PathBuf};

    use bindgen::callbacks::{DeriveTrait, ImplementsTrait, ParseCallbacks};
    use bindgen::{Builder, EnumVariation, RustEdition};

    const HEADERS: [&str; 3] = [
        "infiniband/verbs.h",
        "rdma/rdma_cma.h",
        "infiniband/mlx5dv.h",
    ];

    const MISSING: &str = "the feature `verbs` needs the headers of rdma-core 44 or newer and libclang: \
         apt-get install libibverbs-dev librdmacm-dev libclang-dev";

    /// Types by name; what they contain comes with them.
    const TYPES: &str = "ibv_(wc|send_wr|recv_wr|sge|mw|mw_type|mr|pd|td|cq|cq_ex|cq_init_attr_ex|cq_init_attr_mask|create_cq_attr_flags|\
         qp|qp_ex|comp_channel|context|device|\
         device_attr|port_attr|port_state|mtu|gid|gid_entry|gid_type|qp_init_attr|qp_init_attr_ex|qp_attr|\
         qp_attr_mask|qp_state|qp_type|qp_create_send_ops_flags|qp_init_attr_mask|access_flags|send_flags|\
         wr_opcode|wc_opcode|wc_status|wc_flags|async_event|event_type|td_init_attr|\
         parent_domain_init_attr|parent_domain_init_attr_mask|device_cap_flags|node_type|transport_type|\
         rate|mig_state|atomic_cap)|verbs_context|_compat_ibv_port_attr|\
         rdma_(cm_id|event_channel|cm_event|cm_event_type|conn_param|port_space)|\
         mlx5dv_(qp_ex|mkey|mkey_init_attr|mkey_init_attr_flags|mkey_conf_attr|mkey_conf_flags|\
         mr_interleaved|qp_init_attr|qp_init_attr_mask|qp_create_flags|qp_create_send_ops_flags|\
         context_attr|context_attr_flags|wc_opcode|mkey_err|mkey_err_type)";

    /// Constants of enumerations that have no name.
    const CONSTANTS: &str = "RDMA_OPTION_.*|IBV_GID_TYPE_.*|IBV_LINK_LAYER_.*";

    /// These are libc's own.
    const LIBC: [&str; 9] = [
        "sockaddr",
        "sockaddr_in",
        "sockaddr_in6",
        "sockaddr_storage",
        "in_addr",
        "in6_addr",
        "sa_family_t",
        "pthread_mutex_t",
        "pthread_cond_t",
    ];

    const LIBIBVERBS: &str = "ibv_(get_device_list|free_device_list|get_device_name|get_device_guid|open_device|\
         close_device|query_device|query_port|query_gid|alloc_pd|dealloc_pd|reg_mr|\
         dereg_mr|create_comp_channel|destroy_comp_channel|create_cq|destroy_cq|get_cq_event|\
         ack_cq_events|create_qp|modify_qp|query_qp|destroy_qp|qp_to_qp_ex|get_async_event|\
         ack_async_event|wc_status_str|event_type_str|fork_init)|_ibv_query_gid_table|_ibv_query_gid_ex";

    const LIBRDMACM: &str = "rdma_(create_event_channel|destroy_event_channel|create_id|destroy_id|bind_addr|listen|\
         resolve_addr|resolve_route|connect|accept|reject|establish|disconnect|notify|get_cm_event|\
         ack_cm_event|set_option|migrate_id|get_src_port|get_dst_port|event_str|init_qp_attr|\
         get_devices|free_devices)";

    const LIBMLX5: &str = "mlx5dv_(is_supported|open_device|create_qp|qp_ex_from_ibv_qp_ex|create_mkey|destroy_mkey)|\
         _mlx5dv_mkey_check";

    /// libc's structures can be copied and zeroed.
    #[derive(Debug)]
    struct Plain;

    impl ParseCallbacks for Plain {
        fn blocklisted_type_implements_trait(
            &self,
            _name: &str,
            derive: DeriveTrait,
        ) -> Option<ImplementsTrait> {
            match derive {
                DeriveTrait::Copy => Some(ImplementsTrait::Yes),
                _ => Some(ImplementsTrait::Manually),
            }
        }
    }

    pub(super) fn generate() {
        println!("cargo:rerun-if-changed=build.rs");
        let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
        let types = base()
            .allowlist_type(TYPES)
            .allowlist_var(CONSTANTS)
            .ignore_functions()
            .parse_callbacks(Box::new(Plain));
        let types = LIBC
            .iter()
            .fold(types, |types, name| types.blocklist_type(name));
        write(types, &out.join("types.rs"));
        for (name, functions) in [
            ("Libibverbs", LIBIBVERBS),
            ("Librdmacm", LIBRDMACM),
            ("Libmlx5", LIBMLX5),
        ] {
            let library = base()
                .allowlist_function(functions)
                .blocklist_type(".*")
                .dynamic_library_name(name)
                .dynamic_link_require_all(true);
            write(library, &out.join(format!("{name}.rs")));
        }
    }

    fn base() -> Builder {
        let includes: String = HEADERS
            .iter()
            .map(|name| format!("#include <{name}>\n"))
            .collect();
        Builder::default()
            .header_contents("rdma_core.h", &includes)
            .default_enum_style(EnumVariation::Consts)
            .prepend_enum_name(false)
            .derive_debug(false)
            .derive_default(true)
            .generate_comments(false)
            .layout_tests(true)
            .rust_edition(RustEdition::Edition2024)
            .wrap_unsafe_ops(true)
            .formatter(bindgen::Formatter::None)
    }

    fn write(builder: Builder, to: &Path) {
        let bindings = match builder.generate() {
            Ok(bindings) => bindings,
            Err(error) => panic!("{error}\n{MISSING}"),
        };
        if let Err(error) = bindings.write_to_file(to) {
            panic!("cannot write {}: {error}", to.display());
        }
    }
}
