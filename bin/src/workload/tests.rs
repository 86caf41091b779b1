//! Slots without a network.

use core::time::Duration;

use super::slot::{Layers, Slot, State};
use super::{Pattern, Portal, Workload, share, slices};
use o2poll_config::{self as config, Content, Export, ExportRef, WeightedSize};
use o2poll_dataplane::endpoint::MatchBits;
use o2poll_dataplane::memory::Range;
use o2poll_dataplane::nic::LKey;
use o2poll_dataplane::wire::Nid;

fn region(length: u64, piece: u32) -> Export {
    Export {
        name: String::from("region"),
        portal: Portal(51),
        match_bits: MatchBits(10),
        content: Content::Memory,
        length,
        piece,
        writable: true,
    }
}

fn workload(sizes: &[(u32, u32)], put: f64) -> Workload {
    let job = config::Workload {
        peer: Nid::o2ib([10, 0, 0, 1], 0),
        region: ExportRef { node: 0, export: 0 },
        sizes: sizes
            .iter()
            .map(|(bytes, weight)| WeightedSize {
                bytes: *bytes,
                weight: *weight,
            })
            .collect(),
        put,
        in_flight: 2,
        duration: Duration::from_secs(1),
        verify: true,
        seed: 1,
        repeat: true,
    };
    let mut workload = Workload::new(&job, &region(1 << 20, 1 << 20), 1000, [&[], &[]]).unwrap();
    let ranges = workload.memory();
    workload.begin(ranges.into_iter().map(|bytes| {
        let bytes: &'static mut [u8] = vec![0; bytes].leak();
        Range::of_bytes(bytes, LKey(0)).unwrap()
    }));
    workload
}

#[test]
fn slices_are_disjoint_and_inside_one_piece() {
    let error = slices(&region(4096 * 10, 4096 * 4), 4096 * 3, 3).unwrap_err();
    assert!(error.to_string().contains("larger piece"), "{error}");
    let found = slices(&region(4096 * 12, 4096 * 4), 4096 * 2, 6).unwrap();
    let mut places: Vec<u64> = found
        .iter()
        .map(|(bits, offset)| (bits.0 - 10) * 4096 * 4 + u64::from(*offset))
        .collect();
    places.dedup();
    assert_eq!(places, [0, 8192, 16384, 24576, 32768, 40960]);
}

#[test]
fn layers_tell_which_round_each_byte_is_of() {
    let mut layers = Layers::with_room(3);
    layers.put(100, 1);
    layers.put(10, 2);
    layers.put(50, 3);
    layers.put(20, 4);
    assert_eq!(layers.at(0), Some((4, 20)));
    assert_eq!(layers.at(19), Some((4, 20)));
    assert_eq!(layers.at(20), Some((3, 50)));
    assert_eq!(layers.at(99), Some((1, 100)));
    assert_eq!(layers.at(100), None);
    layers.put(100, 5);
    assert_eq!(layers.at(0), Some((5, 100)));
    assert!(layers.ends.len() <= 3);
}

/// The whole way of one slot without a network: what is PUT is kept in an array, and GET from it.
#[test]
fn what_was_put_is_found_again_and_a_wrong_byte_is_noticed() {
    let sizes = [(13, 1), (4099, 1), (40_000, 1)];
    let mut workload = workload(&sizes, 0.5);
    let mut far = vec![0_u8; 40_000];
    let seed = workload.seed;
    let pattern = |round| Pattern::new(seed, 0, round);
    let (mut gets, mut spoiled) = (0, 0);
    for step in 0..300 {
        workload.choose(0);
        let slot = &mut workload.slots[0];
        while let State::Filling(piece, within) = slot.state {
            slot.fill(pattern(slot.round), piece, within);
        }
        let length = workload.sizes[slot.size] as usize;
        let mut at = 0;
        for range in slot.memory.iter_mut().take(slot.size + 1) {
            let bytes = range.bytes_mut();
            let there = &mut far[at..at + bytes.len()];
            if slot.put {
                there.copy_from_slice(bytes);
            } else {
                bytes.copy_from_slice(there);
            }
            at += bytes.len();
        }
        assert_eq!(at, length);
        slot.prepared = true;
        if slot.put {
            slot.layers.put(length as u64, slot.round);
            continue;
        }
        gets += 1;
        let spoil = step % 3 == 0;
        if spoil {
            let at = step * 7 % slot.memory[0].bytes().len();
            slot.memory[0].bytes_mut()[at] ^= 1;
        }
        slot.state = State::Checking(0, 0);
        let mut wrong = 0;
        while let State::Checking(piece, within) = slot.state {
            wrong += slot.check(pattern, piece, within);
        }
        assert_eq!(wrong, u64::from(spoil), "step {step}");
        spoiled += u64::from(spoil);
    }
    assert!(gets > 50 && spoiled > 10, "{gets} {spoiled}");
}

#[test]
fn a_get_that_moves_nothing_is_noticed() {
    let mut workload = workload(&[(4096, 1)], 0.0);
    let seed = workload.seed;
    let pattern = |round| Pattern::new(seed, 0, round);
    workload.choose(0);
    let slot = &mut workload.slots[0];
    assert!(slot.put, "the first is a PUT, whatever the share");
    for _ in 0..2 {
        while let State::Filling(piece, within) = slot.state {
            slot.fill(pattern(slot.round), piece, within);
        }
        slot.layers.put(4096, slot.round);
        slot.put = false;
        slot.state = State::Filling(0, 0);
    }
    slot.state = State::Checking(0, 0);
    assert_eq!(slot.check(pattern, 0, 0), 4096);
}

/// What the new life of a peer has is clear, and what its old life had is forgotten only when nothing of it is under way.
#[test]
fn after_a_new_life_of_the_peer_its_region_is_clear() {
    let mut workload = workload(&[(64, 1), (4096, 1)], 0.0);
    let pattern = |_| -> Pattern { panic!("nothing was PUT") };
    workload.met(7);
    for slot in &mut workload.slots {
        slot.prepared = true;
        slot.layers.put(4096, 1);
    }
    workload.met(7);
    assert_eq!(workload.slots[0].layers.at(9), Some((1, 4096)));
    workload.slots[1].state = State::Out;
    workload.met(8);
    assert_eq!(workload.slots[1].layers.at(9), Some((1, 4096)));
    let check = |slot: &mut Slot| {
        slot.size = 1;
        slot.state = State::Checking(0, 0);
        let mut wrong = 0;
        while let State::Checking(piece, within) = slot.state {
            wrong += slot.check(pattern, piece, within);
        }
        wrong
    };
    let slot = &mut workload.slots[0];
    assert_eq!(check(slot), 0, "the memory is clear");
    slot.memory[1].bytes_mut()[5] = 1;
    assert_eq!(check(slot), 1);
    // A shorter PUT lies over it.
    slot.layers.put(64, 3);
    assert_eq!(slot.layers.at(63), Some((3, 64)));
    assert_eq!(slot.check(pattern, 1, 0), 1);
    let late = &mut workload.slots[1];
    late.state = State::Idle;
    late.begin_anew();
    assert_eq!(check(late), 0);
}

#[test]
fn memory_comes_back_in_its_order() {
    let mut workload = workload(&[(8, 1), (16, 1), (16 << 10, 1)], 1.0);
    let slot = &mut workload.slots[0];
    let places = |slot: &Slot| -> Vec<u64> {
        slot.memory
            .iter()
            .map(|range| range.sge().address)
            .collect()
    };
    let before = places(slot);
    for size in 0..3 {
        let list = slot.list.take().unwrap();
        for range in slot.memory.drain(..=size) {
            list.push(range).unwrap();
        }
        slot.take_back(list);
        assert_eq!(places(slot), before, "{size}");
    }
}

#[test]
fn sizes_are_drawn_by_their_weights_and_puts_by_their_share() {
    let mut workload = workload(&[(64, 3), (4096, 1), (64, 2)], 0.25);
    assert_eq!(workload.sizes, [64, 4096]);
    for slot in &mut workload.slots {
        slot.prepared = true;
    }
    let (mut small, mut puts) = (0, 0);
    for _ in 0..6000 {
        workload.choose(0);
        small += u32::from(workload.slots[0].size == 0);
        puts += u32::from(workload.slots[0].put);
    }
    assert!((4800..5200).contains(&small), "{small}");
    assert!((1350..1650).contains(&puts), "{puts}");
    assert_eq!(share(0.0), 0);
    assert_eq!(share(1.0), 1 << 32);
}

#[test]
fn the_same_seed_draws_the_same() {
    let draw = || {
        let mut workload = workload(&[(64, 3), (4096, 1)], 0.5);
        let mut seen = Vec::new();
        for _ in 0..100 {
            workload.slots[0].prepared = true;
            workload.choose(0);
            seen.push((workload.slots[0].size, workload.slots[0].put));
        }
        seen
    };
    assert_eq!(draw(), draw());
}

#[test]
fn every_slot_gets_its_bites() {
    let mut workload = workload(&[(100_000, 1)], 1.0);
    for index in 0..2 {
        workload.choose(index);
    }
    let mut bites = 0;
    while workload.bite() != 0 {
        bites += 1;
        assert!(bites < 100);
    }
    assert!(workload.slots.iter().all(|slot| slot.state == State::Ready));
    assert_eq!(bites, 2 * 100_000_usize.div_ceil(16 << 10));
}
