//! Tests of the whole device.
#![allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]

mod device;
mod laws;
mod model;
mod pair;
mod script;
mod smoke;
mod tap;
mod threads;
