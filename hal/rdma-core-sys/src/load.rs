//! The libraries, each loaded once and never unloaded.
//!
//! Every function is a field and a method of its library's structure; the signatures are those of the
//! headers. A library that lacks one of them is too old and is refused as a whole.

use std::sync::OnceLock;

pub use self::generated::{Libibverbs, Libmlx5, Librdmacm};

#[allow(
    missing_docs,
    non_snake_case,
    unreachable_pub,
    clippy::all,
    clippy::std_instead_of_core,
    clippy::undocumented_unsafe_blocks,
    clippy::use_self,
    reason = "generated, and named by C"
)]
mod generated {
    use crate::types::*;
    use libc::sockaddr;

    include!(concat!(env!("OUT_DIR"), "/Libibverbs.rs"));
    include!(concat!(env!("OUT_DIR"), "/Librdmacm.rs"));
    include!(concat!(env!("OUT_DIR"), "/Libmlx5.rs"));
}

/// Why a library cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// `dlopen(3)` said no.
    #[error("{library} cannot be loaded: install it (Debian: apt-get install {package}). {reason}")]
    Missing {
        /// File name.
        library: &'static str,
        /// Debian's package.
        package: &'static str,
        /// As the loader says it.
        reason: String,
    },
    /// It lacks a function.
    #[error(
        "{library} is too old: rdma-core 44 or newer is needed (Debian: apt-get install {package}). {reason}"
    )]
    TooOld {
        /// File name.
        library: &'static str,
        /// Debian's package.
        package: &'static str,
        /// As the loader says it.
        reason: String,
    },
}

/// libibverbs.
///
/// # Errors
/// When it is not installed, or too old. The answer is the same for the life of the process.
pub fn libibverbs() -> Result<&'static Libibverbs, &'static LoadError> {
    static LOADED: OnceLock<Result<Libibverbs, LoadError>> = OnceLock::new();
    LOADED
        .get_or_init(|| load("libibverbs.so.1", "libibverbs1 ibverbs-providers"))
        .as_ref()
}

/// librdmacm.
///
/// # Errors
/// When it is not installed, or too old. The answer is the same for the life of the process.
pub fn librdmacm() -> Result<&'static Librdmacm, &'static LoadError> {
    static LOADED: OnceLock<Result<Librdmacm, LoadError>> = OnceLock::new();
    LOADED
        .get_or_init(|| load("librdmacm.so.1", "librdmacm1"))
        .as_ref()
}

/// libmlx5, which is also the provider of mlx5 cards that libibverbs itself loads.
///
/// # Errors
/// When it is not installed, or too old. The answer is the same for the life of the process.
pub fn libmlx5() -> Result<&'static Libmlx5, &'static LoadError> {
    static LOADED: OnceLock<Result<Libmlx5, LoadError>> = OnceLock::new();
    LOADED
        .get_or_init(|| load("libmlx5.so.1", "ibverbs-providers"))
        .as_ref()
}

/// A structure of function pointers.
trait Functions: Sized {
    /// # Safety
    /// `library` is the one that these functions are declared for.
    unsafe fn of(library: libloading::Library) -> Result<Self, libloading::Error>;
}

macro_rules! functions {
    ($($name:ident)+) => {$(
        impl Functions for $name {
            unsafe fn of(library: libloading::Library) -> Result<Self, libloading::Error> {
                // SAFETY: the caller promises that the symbols have the headers' types.
                unsafe { Self::from_library(library) }
            }
        }
    )+};
}

functions!(Libibverbs Librdmacm Libmlx5);

fn load<F: Functions>(library: &'static str, package: &'static str) -> Result<F, LoadError> {
    // SAFETY: the initialisers of rdma-core's libraries register nothing but providers, and may run on any
    // thread. It stays loaded, since what it is put into is never dropped.
    let opened = unsafe { libloading::Library::new(library) };
    let opened = opened.map_err(|error| LoadError::Missing {
        library,
        package,
        reason: error.to_string(),
    })?;
    // SAFETY: the soname stands for the interface that the headers describe; a name without a version means
    // the newest version of a symbol (dlsym(3)), which is what the headers describe.
    let functions = unsafe { F::of(opened) };
    functions.map_err(|error| LoadError::TooOld {
        library,
        package,
        reason: error.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::{Libibverbs, LoadError, load};

    #[test]
    fn a_missing_library_is_named_with_the_package_that_has_it() {
        let Err(error) = load::<Libibverbs>("libo2poll-nothing.so.1", "a-package") else {
            panic!("loaded");
        };
        assert!(matches!(error, LoadError::Missing { .. }));
        let text = error.to_string();
        assert!(text.contains("libo2poll-nothing.so.1"), "{text}");
        assert!(text.contains("apt-get install a-package"), "{text}");
    }

    #[test]
    fn a_library_without_the_functions_is_too_old() {
        let Err(error) = load::<Libibverbs>("libc.so.6", "a-package") else {
            panic!("loaded");
        };
        assert!(matches!(error, LoadError::TooOld { .. }), "{error}");
        assert!(error.to_string().contains("ibv_"), "{error}");
    }

    /// A symbol with two versions: `IBVERBS_1.0` takes other structures than the headers have.
    #[test]
    fn the_newest_version_of_a_symbol_is_taken() {
        let ours = super::libibverbs().unwrap();
        // SAFETY: a lookup in a library that is loaded.
        let (old, new) = unsafe {
            let library = libc::dlopen(c"libibverbs.so.1".as_ptr(), libc::RTLD_LAZY);
            let name = c"ibv_create_qp".as_ptr();
            (
                libc::dlvsym(library, name, c"IBVERBS_1.0".as_ptr()),
                libc::dlvsym(library, name, c"IBVERBS_1.1".as_ptr()),
            )
        };
        assert!(!old.is_null() && old != new);
        assert_eq!(ours.ibv_create_qp as usize, new as usize);
    }
}
