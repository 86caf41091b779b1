//! Raw bindings to libibverbs, librdmacm and libmlx5.
//!
//! With the feature `verbs` types and signatures come from the installed headers (bindgen) when this is
//! built, and functions from the installed libraries (`dlopen(3)`) when it runs: a program with these
//! bindings starts where rdma-core is not installed, and says what to install when it is asked for a
//! device. Without the feature this crate is empty and needs nothing but Rust.
//!
//! | room | what lives there |
//! |---|---|
//! | `types` | structures and constants, as the headers name them |
//! | `load` | the three libraries as structures of function pointers, each loaded once |
//! | `inline` | the functions that the headers define as C inlines: they go through tables of the provider |
//!
//! rdma-core 44 (Debian 12) is the oldest that will do. Structures that grow at their end
//! (`verbs_context` grows at its front) may be shorter in the library than in the headers: whoever reads
//! such a field asks for its presence first, as `inline` does.
//!
//! Everything here is as unsafe as C. `o2poll-hal` is the safe side.
#![cfg_attr(feature = "verbs", allow(unsafe_code))]

#[cfg(feature = "verbs")]
pub mod inline;
#[cfg(feature = "verbs")]
pub mod load;

/// Structures and constants as rdma-core's headers name them, made by bindgen. Enumerations are plain
/// integers, since a library may say a value that its headers do not know.
#[cfg(feature = "verbs")]
#[allow(
    missing_docs,
    non_camel_case_types,
    non_snake_case,
    unreachable_pub,
    unnameable_types,
    clippy::all,
    clippy::ptr_as_ptr,
    clippy::std_instead_of_core,
    clippy::undocumented_unsafe_blocks,
    clippy::use_self,
    reason = "generated, and named by C"
)]
pub mod types {
    use libc::{
        pthread_cond_t, pthread_mutex_t, sockaddr, sockaddr_in, sockaddr_in6, sockaddr_storage,
    };

    include!(concat!(env!("OUT_DIR"), "/types.rs"));
}

#[cfg(feature = "verbs")]
pub use self::load::{Libibverbs, Libmlx5, Librdmacm, LoadError, libibverbs, libmlx5, librdmacm};
