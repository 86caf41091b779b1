//! o2poll.

pub mod capture;
