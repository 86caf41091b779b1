//! Tests of the whole device.
#![allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]

mod laws;
mod pair;
mod smoke;
