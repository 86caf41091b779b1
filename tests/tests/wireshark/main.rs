//! The wire, judged by Wireshark.
//!
//! What two nodes post is written down where they post it. What their devices put on the wire is captured as
//! RoCEv2 frames, and `tshark` dissects the capture. Both must say the same: every field of every o2iblnd and
//! LNet message, and the transport that carries them.
//!
//! Wireshark 4.0 is not perfect in LNet either. What it gets wrong of kernel nodes' traffic (`tests/captures`) is
//! measured first, and exactly that is forgiven: notes of the same kind on frames of the same kind, and known
//! misreadings ([`Quirks`]), which say the same bytes under other names or in another order.

#![allow(clippy::missing_panics_doc, reason = "a test that panics has failed")]

mod devices;
mod nodes;
mod program;

use core::sync::atomic::AtomicU64;

use o2poll::capture::Scribe;
use o2poll_dataplane::ring::{Indices, Slot};
use o2poll_hal::clock::Clock;
use o2poll_soft as soft;
use o2poll_tests::Ticker;
use o2poll_tests::lend::lend;

/// Both ends of a tap.
fn tap(
    order: &'static AtomicU64,
    clock: Clock,
) -> (soft::Recorder<'static, Ticker>, soft::Reader<'static>) {
    let indices = Box::leak(Box::new(Indices::new()));
    soft::recorder(indices, lend(1 << 16, Slot::new), order, Ticker(clock)).unwrap()
}

fn drain(scribe: &mut Scribe<Vec<u8>>, readers: [&mut soft::Reader<'static>; 2]) {
    let mut bytes = Vec::new();
    for (node, reader) in readers.into_iter().enumerate() {
        while let Some(passed) = {
            bytes.clear();
            reader.next(|piece| bytes.extend_from_slice(piece))
        } {
            scribe.passed(node, &passed, &bytes).unwrap();
        }
    }
}

/// Queue pairs of the two nodes.
const NUMBERS: [u32; 2] = [0x11, 0x12];
