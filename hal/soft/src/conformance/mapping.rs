//! Windows that come with a live mapping.
#![expect(missing_docs, reason = "a law's name says it")]

use std::vec::Vec;

use o2poll_dataplane::nic::{Mechanisms, Nic, Rights, SendWr, Sge, Status};

use super::Lane::{Foreign, Main, Sibling};
use super::Side::{A, B};
use super::registration::{pages_of, through};
use super::{Bench, MEMORY, Setup, World, failed, lacks, pattern};

const WRITE: Rights = Rights::REMOTE_WRITE;

/// `None` where the device has no mappings.
fn fresh<T: Bench>() -> Option<World<T>> {
    let mut world = World::<T>::new(Setup::default());
    if !world.has(Mechanisms::MAPPINGS) {
        lacks("mappings of the control side");
        return None;
    }
    world.bench.poke(A, 0, &pattern(1, MEMORY));
    world.bench.poke(B, 0, &pattern(2, MEMORY));
    Some(world)
}

fn ranges<T: Bench>(world: &World<T>, pieces: &[(usize, u32)]) -> Vec<Sge> {
    pieces
        .iter()
        .map(|(offset, length)| world.bench.sge(A, Main, *offset, *length))
        .collect()
}

fn base<T: Bench>(world: &mut World<T>) -> u64 {
    if world.bench.nic(A).capabilities().zero_based {
        0
    } else {
        0x7777_0000_0123
    }
}

pub fn a_mapping_lays_its_ranges_end_to_end<T: Bench>() {
    for case in 0..5 {
        let Some(mut world) = fresh::<T>() else {
            return;
        };
        let (skip, page, _) = pages_of(&mut world);
        let size = page as u32;
        let at = |n: usize| skip + n * page;
        let pieces: Vec<(usize, u32)> = match case {
            0 => Vec::from([(1001, 500)]),
            // From within a page to within a page, whole ones between, in any order.
            1 => Vec::from([(at(3) + 7, size - 7), (at(9), 3 * size), (at(1), 55)]),
            2 => Vec::from([(at(2) - 3, 3), (at(7), 1)]),
            // Neighbours are one range, wherever they touch.
            3 => Vec::from([(at(1) + 10, 10), (at(1) + 20, 30), (at(1) + 50, size)]),
            _ => Vec::from([(at(4), 100), (at(4) + 100, size - 100), (at(0), size)]),
        };
        let (list, base) = (ranges(&world, &pieces), base(&mut world));
        let grant = world.map(A, Main, &list, WRITE, base);
        through(&mut world, grant, &pieces);
    }
}

pub fn the_longest_mapping_fits_and_no_longer<T: Bench>() {
    let Some(mut world) = fresh::<T>() else {
        return;
    };
    let most = world.bench.nic(A).capabilities().max_pages as usize;
    let (skip, page, _) = pages_of(&mut world);
    let (base, size) = (base(&mut world), page as u32);
    // Every other page, again and again, and a byte of the last.
    let place = |n: usize| skip + n % 30 * 2 * page;
    let pieces: Vec<(usize, u32)> = (0..=most).map(|n| (place(n), size)).collect();
    let list = ranges(&world, &pieces);
    let window = world.bench.mapping(A, Main, &list, WRITE, base).unwrap();
    let Err(window) = world.bench.nic(A).adopt_window(window) else {
        panic!("a longer mapping than the device can have");
    };
    world.bench.discard(A, window);
    let mut list = ranges(&world, &pieces[..most]);
    list[most - 1].length = 100;
    let grant = world.map(A, Main, &list, WRITE, base);
    let last = (most as i64 - 1) * page as i64;
    world.assert_written(Main, &[7; 3], grant.at(0), place(0));
    world.assert_written(Main, &[8; 100], grant.at(last), place(most - 1));
    world.assert_write_refused(Main, (0, 2), grant.at(last + 99));
}

/// What a list of pages cannot say.
pub fn a_mapping_with_a_hole_within_a_page_is_given_back<T: Bench>() {
    let Some(mut world) = fresh::<T>() else {
        return;
    };
    let (skip, page, _) = pages_of(&mut world);
    let (base, size) = (base(&mut world), page as u32);
    for pieces in [
        [(skip, size - 1), (skip + 2 * page, size)],
        [(skip, size), (skip + 2 * page + 1, 10)],
        [(skip, 10), (skip + 20, 10)],
        [(skip + 20, 10), (skip, 10)],
    ] {
        let list = ranges(&world, &pieces);
        let Some(window) = world.bench.mapping(A, Main, &list, WRITE, base) else {
            continue;
        };
        let Err(window) = world.bench.nic(A).adopt_window(window) else {
            panic!("adopted: {pieces:?}");
        };
        world.bench.discard(A, window);
    }
}

pub fn a_mapping_serves_every_queue_pair_of_its_domain<T: Bench>() {
    let Some(mut world) = fresh::<T>() else {
        return;
    };
    let base = base(&mut world);
    let list = ranges(&world, &[(3, 100)]);
    let grant = world.map(A, Main, &list, WRITE | Rights::REMOTE_READ, base);
    world.assert_written(Main, &[1; 50], grant.at(0), 3);
    world.assert_written(Sibling, &[2; 50], grant.at(50), 53);
    world.assert_write_refused(Foreign, (0, 1), grant.at(0));
}

pub fn a_mapping_of_what_is_not_ours_is_given_back<T: Bench>() {
    let Some(mut world) = fresh::<T>() else {
        return;
    };
    let base = base(&mut world);
    let good = world.bench.sge(A, Main, 0, 100);
    let foreign = world.bench.sge(A, Foreign, 0, 100);
    let over = world.bench.sge(A, Main, MEMORY - 99, 100);
    let empty = world.bench.sge(A, Main, 0, 0);
    for list in [&[][..], &[foreign], &[good, over], &[good, empty]] {
        // A bench whose control side refuses it has nothing to give to the core.
        let Some(window) = world.bench.mapping(A, Main, list, WRITE, base) else {
            continue;
        };
        let Err(window) = world.bench.nic(A).adopt_window(window) else {
            panic!("adopted: {list:?}");
        };
        world.bench.discard(A, window);
    }
    // And there is still room for a good one.
    let grant = world.map(A, Main, &[good], WRITE, base);
    world.assert_written(Main, &[1; 100], grant.at(0), 0);
}

pub fn a_retired_mapping_opens_nothing<T: Bench>() {
    let Some(mut world) = fresh::<T>() else {
        return;
    };
    let base = base(&mut world);
    let list = ranges(&world, &[(0, 100)]);
    let old = world.map(A, Main, &list, WRITE, base);
    let other = world.map(A, Main, &list, WRITE, base);
    world.assert_written(Main, &[1; 100], old.at(0), 0);
    assert!(world.kill(A, Main, old));
    world.assert_written(Main, &[2; 100], other.at(0), 0);
    // Its place is used again, its key is not.
    let new = world.map(A, Main, &list, WRITE, base);
    assert_ne!(new.key, old.key);
    world.assert_written(Main, &[3; 100], new.at(0), 0);
    world.assert_write_refused(Main, (0, 1), old.at(0));
}

/// However the control side numbers its windows.
pub fn a_dead_mapping_does_not_come_back_with_the_256th_after_it<T: Bench>() {
    for between in [0, 1, 253, 254, 255] {
        let Some(mut world) = fresh::<T>() else {
            return;
        };
        let base = base(&mut world);
        let list = ranges(&world, &[(0, 100)]);
        let old = world.map(A, Main, &list, WRITE, base);
        assert!(world.kill(A, Main, old));
        // One has its place while others come and go in the next.
        let first = world.map(A, Main, &list, WRITE, base);
        for _ in 0..between {
            let other = world.map(A, Main, &list, WRITE, base);
            assert_ne!(other.key, old.key);
            assert!(world.kill(A, Main, other));
        }
        assert!(world.kill(A, Main, first));
        let new = world.map(A, Main, &list, WRITE, base);
        assert!(new.key != old.key && new.key != first.key, "{between}");
    }
}

pub fn only_the_control_side_ends_a_mapping<T: Bench>() {
    let Some(mut world) = fresh::<T>() else {
        return;
    };
    let base = base(&mut world);
    let list = ranges(&world, &[(0, 100)]);
    let grant = world.map(A, Main, &list, WRITE, base);
    world.run(A, Main, 1, SendWr::Invalidate { key: grant.key });
    assert_eq!(world.expect(A, 1), [failed(1, Status::LocalOperation)]);
    world.assert_written(Sibling, &[1; 100], grant.at(0), 0);
    if world.bench.nic(B).capabilities().remote_invalidate {
        world.post(A, Sibling, 7, 100_000, 64);
        let wr = SendWr::Send {
            message: world.bench.sge(B, Sibling, 0, 10),
            invalidate: Some(grant.key),
        };
        world.run(B, Sibling, 2, wr);
        assert_eq!(world.expect(A, 1), [failed(7, Status::RemoteInvalidate)]);
    }
}
