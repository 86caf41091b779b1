//! Two connected devices, one thread.
#![allow(unsafe_code)]

use std::boxed::Box;
use std::vec::Vec;

use core::ptr::NonNull;
use o2poll_dataplane::nic::{Burst, Completion, Fault, LKey, Nic, Qp, ReceiveQueue, Sge, WrId};
use o2poll_dataplane::ring::{LapSlot, Returned};

use crate::{
    CompletionEntry, Fragment, Lane, Limits, Memory, Port, Ports, Profile, QueuePair,
    QueuePairSlot, ReceiveEntry, RegionSlot, SendEntry, Soft, Storage, Wire, link,
};

pub(super) const LIMITS: Limits = Limits {
    queue_pairs: 8,
    send_wr: 64,
    recv_wr: 64,
    windows: 16,
    memories: 4,
    cqe: 512,
};

/// A device over leaked storage.
pub(super) fn device<W: Wire>(profile: Profile, limits: Limits, wire: W) -> Soft<'static, W> {
    fn lend<T>(count: usize, make: impl FnMut() -> T) -> &'static mut [T] {
        let all: Vec<T> = core::iter::repeat_with(make).take(count).collect();
        all.leak()
    }
    let sizes = limits.sizes(&profile).unwrap();
    let storage = Storage {
        queue_pairs: lend(sizes.queue_pairs, QueuePairSlot::default),
        numbers: lend(sizes.numbers, u32::default),
        sends: lend(sizes.sends, SendEntry::default),
        pieces: lend(sizes.pieces, Sge::default),
        receives: lend(sizes.receives, ReceiveEntry::default),
        regions: lend(sizes.regions, RegionSlot::default),
        fragments: lend(sizes.fragments, Fragment::default),
        memories: lend(sizes.memories, || None),
        completions: lend(sizes.completions, CompletionEntry::default),
    };
    Soft::new(profile, &limits, storage, wire).unwrap()
}

fn lane(slots: usize) -> Lane<'static> {
    let all: Vec<LapSlot> = core::iter::repeat_with(LapSlot::new).take(slots).collect();
    Lane {
        returned: Box::leak(Box::new(Returned::new())),
        slots: all.leak(),
    }
}

/// Two wires that lead to each other.
pub(super) fn wires(slots: usize) -> (Ports<'static, 'static>, Ports<'static, 'static>) {
    let (near, far) = link(lane(slots), lane(slots)).unwrap();
    let one = |port: Port<'static>| Ports::new(Box::leak(Box::new([port])));
    (one(near), one(far))
}

/// Memory of one side, registered.
pub(super) struct Arena {
    base: NonNull<u8>,
    pub(super) length: usize,
    pub(super) lkey: LKey,
}

impl Arena {
    pub(super) fn new<W: Wire>(soft: &mut Soft<'_, W>, length: usize) -> Self {
        let bytes: &'static mut [u8] = std::vec![0_u8; length].leak();
        let base = NonNull::from(bytes).cast();
        // SAFETY: leaked, and touched by nobody while the device works (`read`, `write` copy).
        let memory = unsafe { Memory::new(base, length, 0) };
        let lkey = soft.register(memory).unwrap();
        Self { base, length, lkey }
    }

    pub(super) fn address(&self, offset: usize) -> u64 {
        self.base.as_ptr() as u64 + offset as u64
    }

    pub(super) fn sge(&self, offset: usize, length: u32) -> Sge {
        Sge {
            address: self.address(offset),
            length,
            lkey: self.lkey,
        }
    }

    pub(super) fn read(&self, offset: usize, length: usize) -> Vec<u8> {
        assert!(offset + length <= self.length);
        // SAFETY: inside the leaked array; the devices run on this thread or have let go.
        unsafe { core::slice::from_raw_parts(self.base.as_ptr().add(offset), length).to_vec() }
    }

    pub(super) fn write(&mut self, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= self.length);
        // SAFETY: as in `read`.
        unsafe {
            self.base
                .as_ptr()
                .add(offset)
                .copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
        }
    }
}

/// One side: device, memory, one queue pair, what has completed.
pub(super) struct End<W: Wire> {
    pub(super) soft: Soft<'static, W>,
    pub(super) qp: Qp,
    pub(super) arena: Arena,
    pub(super) seen: Vec<Completion>,
    pub(super) fault: Option<Fault>,
}

impl<W: Wire> End<W> {
    pub(super) fn new(profile: Profile, limits: Limits, wire: W, pair: QueuePair) -> Self {
        let mut soft = device(profile, limits, wire);
        let arena = Arena::new(&mut soft, 1 << 20);
        let qp = soft.adopt(pair).unwrap();
        Self {
            soft,
            qp,
            arena,
            seen: Vec::new(),
            fault: None,
        }
    }

    pub(super) fn step(&mut self) {
        let mut burst = Burst::new();
        match self.soft.poll(&mut burst) {
            Ok(()) => self.seen.extend(burst),
            Err(fault) => self.fault = Some(fault),
        }
    }

    pub(super) fn post(&mut self, id: u64, offset: usize, length: u32) {
        let buffer = self.arena.sge(offset, length);
        self.soft
            .receive(ReceiveQueue::Of(self.qp), WrId(id), buffer)
            .unwrap();
    }

    pub(super) fn take(&mut self) -> Vec<Completion> {
        core::mem::take(&mut self.seen)
    }
}

/// Both sides, over rings of so many slots.
pub(super) fn connected(
    profile: Profile,
    slots: usize,
) -> (End<Ports<'static, 'static>>, End<Ports<'static, 'static>>) {
    let (near, far) = wires(slots);
    (
        End::new(profile, LIMITS, near, QueuePair::new(1, 0, 2, 32, 32)),
        End::new(profile, LIMITS, far, QueuePair::new(2, 0, 1, 32, 32)),
    )
}

pub(super) fn settle<V: Wire, W: Wire>(a: &mut End<V>, b: &mut End<W>) {
    for _ in 0..100 {
        a.step();
        b.step();
    }
}
