#![no_std]
//! Placeholder while the room is being built.
