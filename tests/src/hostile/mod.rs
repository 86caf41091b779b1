//! What must hold whatever bytes come in.
//!
//! Each function takes bytes and panics if a promise is broken. The fuzz targets in `tests/fuzz` are
//! nothing but these, and `tests/corpora.rs` holds them against what the fuzzers have kept, with any
//! compiler.
#![allow(
    clippy::cast_possible_truncation,
    reason = "numbers that a plan has bounded, or that may be anything"
)]

mod config;
mod connection;
mod negotiation;
mod peer;
mod plan;
mod wire;

pub use config::config;
pub use connection::connection;
pub use negotiation::conn;
pub use wire::{message, ping, reject};

/// A check by the name of its fuzz target.
pub type Check = fn(&[u8]);

/// All of them.
pub const CHECKS: [(&str, Check); 6] = [
    ("config", config),
    ("conn", conn),
    ("connection", connection),
    ("message", message),
    ("ping", ping),
    ("reject", reject),
];
