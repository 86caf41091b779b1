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

/// Memory that is lent for as long as anybody likes, and freed when this is dropped: last.
#[derive(Default)]
pub(super) struct Hoard(Vec<Box<dyn FnOnce()>>);

impl Hoard {
    pub(super) fn lend<T: 'static>(
        &mut self,
        count: usize,
        make: impl FnMut() -> T,
    ) -> &'static mut [T] {
        let all: Box<[T]> = core::iter::repeat_with(make).take(count).collect();
        let all = Box::into_raw(all);
        // SAFETY: made by `into_raw`, freed once, and whoever drops a hoard has dropped the borrowers.
        self.0
            .push(Box::new(move || drop(unsafe { Box::from_raw(all) })));
        // SAFETY: as above, and this is the only reference.
        unsafe { &mut *all }
    }

    pub(super) fn bytes(&mut self, count: usize) -> NonNull<u8> {
        NonNull::from(self.lend(count, || 0_u8)).cast()
    }
}

impl Drop for Hoard {
    fn drop(&mut self) {
        for free in self.0.drain(..) {
            free();
        }
    }
}

/// A device.
pub(super) fn device<W: Wire>(
    hoard: &mut Hoard,
    profile: Profile,
    limits: Limits,
    wire: W,
) -> Soft<'static, W> {
    let sizes = limits.sizes(&profile).unwrap();
    let storage = Storage {
        queue_pairs: hoard.lend(sizes.queue_pairs, QueuePairSlot::default),
        numbers: hoard.lend(sizes.numbers, u32::default),
        sends: hoard.lend(sizes.sends, SendEntry::default),
        pieces: hoard.lend(sizes.pieces, Sge::default),
        receives: hoard.lend(sizes.receives, ReceiveEntry::default),
        regions: hoard.lend(sizes.regions, RegionSlot::default),
        fragments: hoard.lend(sizes.fragments, Fragment::default),
        memories: hoard.lend(sizes.memories, || None),
        completions: hoard.lend(sizes.completions, CompletionEntry::default),
    };
    Soft::new(profile, &limits, storage, wire).unwrap()
}

pub(super) fn lane(hoard: &mut Hoard, slots: usize) -> Lane<'static> {
    Lane {
        returned: &mut hoard.lend(1, Returned::new)[0],
        slots: hoard.lend(slots, LapSlot::new),
    }
}

/// Two wires that lead to each other.
pub(super) fn wires(
    hoard: &mut Hoard,
    slots: usize,
) -> (Ports<'static, 'static>, Ports<'static, 'static>) {
    let (there, back) = (lane(hoard, slots), lane(hoard, slots));
    let (near, far) = link(there, back).unwrap();
    let mut one = |port: Port<'static>| {
        let mut port = Some(port);
        Ports::new(hoard.lend(1, || port.take().unwrap()))
    };
    (one(near), one(far))
}

/// Memory of one side, registered.
pub(super) struct Arena {
    base: NonNull<u8>,
    pub(super) length: usize,
    pub(super) lkey: LKey,
}

impl Arena {
    pub(super) fn new<W: Wire>(hoard: &mut Hoard, soft: &mut Soft<'_, W>, length: usize) -> Self {
        let base = hoard.bytes(length);
        // SAFETY: the hoard outlives the devices; `read` and `write` hold no reference.
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
        // SAFETY: inside the hoarded array; the devices run on this thread or have let go.
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

// SAFETY: the bytes belong to the hoard and to no thread.
unsafe impl Send for Arena {}

/// One side: device, memory, one queue pair, what has completed.
pub(super) struct End<W: Wire> {
    pub(super) soft: Soft<'static, W>,
    pub(super) qp: Qp,
    pub(super) arena: Arena,
    pub(super) seen: Vec<Completion>,
    pub(super) fault: Option<Fault>,
}

impl<W: Wire> End<W> {
    pub(super) fn new(
        hoard: &mut Hoard,
        profile: Profile,
        limits: Limits,
        wire: W,
        pair: QueuePair,
    ) -> Self {
        let mut soft = device(hoard, profile, limits, wire);
        let arena = Arena::new(hoard, &mut soft, 1 << 20);
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

/// Both sides, and what they borrow from.
pub(super) struct Both {
    pub(super) a: End<Ports<'static, 'static>>,
    pub(super) b: End<Ports<'static, 'static>>,
    pub(super) hoard: Hoard,
}

/// Both sides, over rings of so many slots.
pub(super) fn connected(profile: Profile, slots: usize) -> Both {
    let mut hoard = Hoard::default();
    let (near, far) = wires(&mut hoard, slots);
    let pair = |number, peer| QueuePair::new(number, 0, peer, 32, 32);
    Both {
        a: End::new(&mut hoard, profile, LIMITS, near, pair(1, 2)),
        b: End::new(&mut hoard, profile, LIMITS, far, pair(2, 1)),
        hoard,
    }
}

pub(super) fn settle<V: Wire, W: Wire>(a: &mut End<V>, b: &mut End<W>) {
    for _ in 0..100 {
        a.step();
        b.step();
    }
}
