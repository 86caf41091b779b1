//! Keys: how they come to life, and how they die.
#![expect(missing_docs, reason = "a law's name says it")]

use std::vec::Vec;

use o2poll_dataplane::nic::{
    Completion, LKey, Layout, Mechanisms, Nic, RKey, Rejected, Remote, Rights, SendWr, Sge, Status,
    WrId,
};

use super::Lane::{Foreign, Main, Sibling};
use super::Side::{A, B};
use super::{
    Bench, Grant, MEMORY, Registration, Setup, Way, World, done, failed, lacks, pattern, received,
};

const WRITE: Rights = Rights::REMOTE_WRITE;

fn fresh<T: Bench>() -> World<T> {
    let mut world = World::<T>::new(Setup::default());
    world.bench.poke(A, 0, &pattern(1, MEMORY));
    world.bench.poke(B, 0, &pattern(2, MEMORY));
    world
}

/// A registration of 100 bytes from 1000 on, for the caller to bend; `None` where nothing is registered on a queue.
fn order<T: Bench>(world: &mut World<T>) -> Option<Registration> {
    if !world.registers() {
        return None;
    }
    let (region, key) = world.adopt(A, Main);
    let piece = world.bench.sge(A, Main, 1000, 100);
    Some(Registration {
        region,
        key: key.rotated(),
        rights: WRITE,
        base: world.base_of(piece),
        length: 100,
        piece,
    })
}

fn run<T: Bench>(world: &mut World<T>, lane: super::Lane, id: u64, order: &Registration) {
    world.queue_registration(A, lane, id, order);
    world.doorbell(A, lane).unwrap();
}

/// It fails, and the queue pair goes to error; or the driver does not take it.
fn assert_refused<T: Bench>(world: &mut World<T>, lane: super::Lane, order: &Registration) {
    world.queue_registration(A, lane, 1, order);
    match world.doorbell(A, lane) {
        Err(told) => assert_eq!(told, Rejected { accepted: 0 }),
        Ok(()) => {
            assert_eq!(world.expect(A, 1), [failed(1, Status::Bind)]);
            let wr = world.message(A, lane, 0, 1);
            world.run(A, lane, 2, wr);
            assert_eq!(world.expect(A, 1), [failed(2, Status::Flushed)]);
        }
    }
}

pub fn a_key_may_travel_in_the_message_behind_it<T: Bench>() {
    let mut world = fresh::<T>();
    let Some(order) = order(&mut world) else {
        return;
    };
    world.post(B, Main, 7, 100_000, 64);
    world.queue_registration(A, Main, 1, &order);
    let wr = world.message(A, Main, 0, 12);
    world.queue(A, Main, 2, false, wr);
    world.doorbell(A, Main).unwrap();
    // At the first sight of the message.
    let mut seen = [Vec::new(), Vec::new()];
    while seen[1].is_empty() {
        world.bench.step(&mut seen);
    }
    assert_eq!(seen[1], [received(7, 12)]);
    let remote = Remote {
        address: order.base,
        rkey: order.key,
    };
    world.assert_written(Main, &pattern(8, 100), remote, 1000);
}

pub fn length_zero_is_refused<T: Bench>() {
    let mut world = fresh::<T>();
    let Some(mut order) = order(&mut world) else {
        return;
    };
    order.length = 0;
    order.piece.length = 0;
    assert_refused(&mut world, Main, &order);
}

pub fn a_wrong_index_is_refused<T: Bench>() {
    let mut world = fresh::<T>();
    let Some(mut order) = order(&mut world) else {
        return;
    };
    order.key.0 ^= 0x100;
    assert_refused(&mut world, Main, &order);
}

pub fn a_window_of_another_domain_is_refused<T: Bench>() {
    let mut world = fresh::<T>();
    let Some(mut order) = order(&mut world) else {
        return;
    };
    order.piece = world.bench.sge(A, Foreign, 1000, 100);
    assert_refused(&mut world, Foreign, &order);
}

pub fn memory_of_another_domain_is_refused<T: Bench>() {
    let mut world = fresh::<T>();
    let Some(mut order) = order(&mut world) else {
        return;
    };
    order.piece = world.bench.sge(A, Foreign, 1000, 100);
    assert_refused(&mut world, Main, &order);
}

pub fn a_range_outside_memory_is_refused<T: Bench>() {
    let cases = [(MEMORY - 99, 0), (0, 1), (MEMORY, 0)];
    for (offset, before) in cases {
        let mut world = fresh::<T>();
        let Some(mut order) = order(&mut world) else {
            return;
        };
        order.piece = world.bench.sge(A, Main, offset, 100);
        order.piece.address -= before;
        order.base = world.base_of(order.piece);
        assert_refused(&mut world, Main, &order);
    }
    let mut world = fresh::<T>();
    let Some(mut order) = order(&mut world) else {
        return;
    };
    order.piece.lkey.0 ^= 1;
    assert_refused(&mut world, Main, &order);
}

/// A map that is shorter, or longer, than what was asked for.
pub fn lengths_must_agree<T: Bench>() {
    for length in [1, 99, 101] {
        let mut world = fresh::<T>();
        let Some(mut order) = order(&mut world) else {
            return;
        };
        order.length = length;
        assert_refused(&mut world, Main, &order);
    }
}

pub fn registering_over_a_live_key<T: Bench>() {
    let mut world = fresh::<T>();
    let Some(order) = order(&mut world) else {
        return;
    };
    run(&mut world, Main, 1, &order);
    assert_eq!(world.expect(A, 1), [done(1)]);
    let piece = world.bench.sge(A, Main, 5000, 100);
    let again = Registration {
        key: order.key.rotated(),
        piece,
        base: world.base_of(piece),
        ..order
    };
    if world.bench.nic(A).capabilities().checks_reuse {
        assert_refused(&mut world, Main, &again);
        return;
    }
    // Nobody looks: the old key is replaced without a word.
    run(&mut world, Main, 2, &again);
    assert_eq!(world.expect(A, 1), [done(2)]);
    let remote = |rkey| Remote {
        address: again.base,
        rkey,
    };
    world.assert_written(Main, &[5; 100], remote(again.key), 5000);
    world.assert_write_refused(Main, (0, 100), remote(order.key));
}

/// A driver may refuse the second of one chain; a device that takes it treats it as any other.
pub fn a_second_registration_behind_the_first_opens_one_key<T: Bench>() {
    let mut world = fresh::<T>();
    let Some(order) = order(&mut world) else {
        return;
    };
    let second = Registration {
        key: order.key.rotated(),
        ..order
    };
    world.queue_registration(A, Main, 1, &order);
    world.queue_registration(A, Main, 2, &second);
    let remote = |rkey| Remote {
        address: order.base,
        rkey,
    };
    let checks = world.bench.nic(A).capabilities().checks_reuse;
    match world.doorbell(A, Main) {
        Err(told) => {
            assert_eq!(told, Rejected { accepted: 1 });
            assert_eq!(world.expect(A, 1), [done(1)]);
            world.assert_written(Main, &[6; 100], remote(order.key), 1000);
            world.assert_write_refused(Main, (0, 100), remote(second.key));
        }
        Ok(()) if checks => {
            assert_eq!(world.expect(A, 2), [done(1), failed(2, Status::Bind)]);
        }
        Ok(()) => {
            assert_eq!(world.expect(A, 2), [done(1), done(2)]);
            world.assert_written(Main, &[6; 100], remote(second.key), 1000);
            world.assert_write_refused(Main, (0, 100), remote(order.key));
        }
    }
}

/// Behind what the queue has room for. Its region is free, and the same key can be tried again.
pub fn a_registration_that_was_not_taken_never_happened<T: Bench>() {
    let setup = Setup {
        send_depth: 4,
        ..Setup::default()
    };
    let mut world = World::<T>::new(setup);
    let Some(order) = order(&mut world) else {
        return;
    };
    let depth = world.bench.made(setup).send_depth;
    let (again, key) = world.adopt(A, Main);
    let unused = Registration {
        region: again,
        key: key.rotated(),
        ..order
    };
    // The last that fits, and one behind it.
    for id in 1..u64::from(depth) {
        world.post(B, Main, 100 + id, 0, 64);
        let wr = world.message(A, Main, 0, 1);
        world.queue(A, Main, id, true, wr);
    }
    world.queue_registration(A, Main, 1000, &order);
    world.queue_registration(A, Main, 1001, &unused);
    let told = world.doorbell(A, Main);
    assert_eq!(told, Err(Rejected { accepted: depth }));
    let seen = world.expect(A, depth as usize);
    assert_eq!(seen.last(), Some(&done(1000)));
    world.expect(B, depth as usize - 1);
    let remote = |key| Remote {
        address: order.base,
        rkey: key,
    };
    world.assert_written(Main, &[6; 100], remote(order.key), 1000);
    run(&mut world, Main, 2, &unused);
    assert_eq!(world.expect(A, 1), [done(2)]);
    world.assert_written(Main, &[7; 100], remote(unused.key), 1000);
}

pub fn another_queue_pair_waits_for_the_registration<T: Bench>() {
    // Who waits finds it.
    let mut world = fresh::<T>();
    let Some(first) = order(&mut world) else {
        return;
    };
    run(&mut world, Main, 1, &first);
    assert_eq!(world.expect(A, 1), [done(1)]);
    let lane = if world.way() == Way::Window {
        Main
    } else {
        Sibling
    };
    let remote = Remote {
        address: first.base,
        rkey: first.key,
    };
    world.assert_written(lane, &[3; 100], remote, 1000);
    // Who does not wait may be faster: the key goes out over another queue pair, and is used before it lives.
    let mut world = fresh::<T>();
    let Some(late) = order(&mut world) else {
        return;
    };
    if !world.bench.delay_registrations(A) {
        lacks("way to delay a registration");
        return;
    }
    let before = world.bench.peek(A, 0, MEMORY);
    world.post(B, Sibling, 7, 100_000, 64);
    run(&mut world, Main, 1, &late);
    let wr = world.message(A, Sibling, 0, 12);
    world.run(A, Sibling, 2, wr);
    assert_eq!(world.expect(A, 1), [done(2)]);
    assert_eq!(world.expect(B, 1), [received(7, 12)]);
    world.write(
        B,
        Main,
        3,
        (0, 100),
        Remote {
            address: late.base,
            rkey: late.key,
        },
    );
    assert_eq!(world.expect(B, 1), [failed(3, Status::RemoteAccess)]);
    assert_eq!(world.expect(A, 1), [failed(1, Status::Flushed)]);
    assert!(world.bench.peek(A, 0, MEMORY) == before, "bytes moved");
}

/// Registers fragments of A and writes through all of them.
fn through_fragments<T: Bench>(pieces: &[(usize, u32)]) {
    let mut world = fresh::<T>();
    let (region, key) = world.adopt(A, Main);
    let key = key.rotated();
    let zero = world.bench.nic(A).capabilities().zero_based;
    let base = if zero { 0 } else { 0x7777_0000_0123 };
    let list: Vec<Sge> = pieces
        .iter()
        .map(|(offset, length)| world.bench.sge(A, Main, *offset, *length))
        .collect();
    let length: u32 = pieces.iter().map(|piece| piece.1).sum();
    let wr = SendWr::Register {
        region,
        key,
        rights: WRITE,
        base,
        length,
        layout: Layout::Fragments(&list),
    };
    world.run(A, Main, 1, wr);
    assert_eq!(world.expect(A, 1), [done(1)]);
    let grant = Grant {
        region: Some(region),
        key,
        base,
    };
    through(&mut world, grant, pieces);
}

/// Writes through all pieces of a key, in parts that respect no border, and one byte too many.
pub(super) fn through<T: Bench>(world: &mut World<T>, grant: Grant, pieces: &[(usize, u32)]) {
    let length: u32 = pieces.iter().map(|piece| piece.1).sum();
    let mut model = world.bench.peek(A, 0, MEMORY);
    let source = world.bench.peek(B, 0, length as usize);
    let places: Vec<usize> = pieces
        .iter()
        .flat_map(|(offset, length)| *offset..*offset + *length as usize)
        .collect();
    let cuts = [0, 1, length / 3, length / 2 + 1, length - 1, length];
    for (from, to) in cuts.iter().zip(&cuts[1..]).rev() {
        let local = (*from as usize, to - from);
        world.write(B, Main, 2, local, grant.at(i64::from(*from)));
        assert_eq!(world.expect(B, 1), [done(2)]);
        for at in *from as usize..*to as usize {
            model[places[at]] = source[at];
        }
        assert!(world.bench.peek(A, 0, MEMORY) == model);
    }
    world.assert_write_refused(Main, (0, 2), grant.at(i64::from(length) - 1));
}

pub fn fragments_lie_end_to_end<T: Bench>() {
    if !World::<T>::new(Setup::default()).has(Mechanisms::FRAGMENTS) {
        return;
    }
    through_fragments::<T>(&[(5, 1), (3, 1), (100, 77)]);
    // Neighbours, backwards, and far apart.
    through_fragments::<T>(&[(0, 10), (10, 10), (20, 4096), (90_001, 70_000), (50_000, 3)]);
}

pub fn the_longest_list_fits_and_no_longer<T: Bench>() {
    let mut world = fresh::<T>();
    if !world.has(Mechanisms::FRAGMENTS) {
        return;
    }
    let most = world.bench.nic(A).capabilities().max_fragments as usize;
    let pieces: Vec<(usize, u32)> = (0..most)
        .map(|n| (n * 601 + n % 7, 1 + (n * 97 % 577) as u32))
        .collect();
    through_fragments::<T>(&pieces);
    let (region, key) = world.adopt(A, Main);
    let list: Vec<Sge> = (0..=most)
        .map(|n| world.bench.sge(A, Main, n * 2, 1))
        .collect();
    let wr = SendWr::Register {
        region,
        key: key.rotated(),
        rights: WRITE,
        base: 0,
        length: most as u32 + 1,
        layout: Layout::Fragments(&list),
    };
    world.queue(A, Main, 1, true, wr);
    let told = world.doorbell(A, Main);
    assert_eq!(told, Err(Rejected { accepted: 0 }));
}

/// Registers ranges of A, address and length of each, as a list of pages of `1 << shift` bytes.
fn register_pages<T: Bench>(
    world: &mut World<T>,
    shift: u8,
    ranges: &[(u64, u32)],
    length: u32,
) -> Grant {
    let (region, key) = world.adopt(A, Main);
    let key = key.rotated();
    let lkey = world.bench.sge(A, Main, 0, 0).lkey;
    let first = ranges.first().map_or(0, |range| range.0);
    let base = 0x4000_0000 + (first & ((1 << shift) - 1));
    let ranges: Vec<Sge> = ranges
        .iter()
        .map(|&(address, length)| Sge {
            address,
            length,
            lkey,
        })
        .collect();
    let wr = SendWr::Register {
        region,
        key,
        rights: WRITE,
        base,
        length,
        layout: Layout::Pages {
            shift,
            ranges: &ranges,
        },
    };
    world.run(A, Main, 1, wr);
    Grant {
        region: Some(region),
        key,
        base,
    }
}

/// The first page-aligned offset of A's memory, the page size, and how to name a page.
pub(super) fn pages_of<T: Bench>(
    world: &mut World<T>,
) -> (usize, usize, impl Fn(usize) -> u64 + use<T>) {
    let page = 1_usize << world.bench.nic(A).capabilities().page_shift;
    let start = world.bench.sge(A, Main, 0, 0).address;
    let skip = start.next_multiple_of(page as u64) - start;
    let first = start + skip;
    (skip as usize, page, move |n| first + (n * page) as u64)
}

pub fn pages_lie_end_to_end<T: Bench>() {
    let mut world = fresh::<T>();
    if !world.has(Mechanisms::PAGES) {
        return;
    }
    let (skip, page, name) = pages_of(&mut world);
    let order = [7, 3, 4, 11];
    let length = 3 * page - 100;
    let shift = world.bench.nic(A).capabilities().page_shift;
    // From 777 on, two pages that touch, and the start of the last.
    let (whole, last) = (page as u32, length - (3 * page - 777));
    let ranges = [
        (name(7) + 777, whole - 777),
        (name(3), whole),
        (name(4), whole),
        (name(11), last as u32),
    ];
    let grant = register_pages(&mut world, shift, &ranges, length as u32);
    assert_eq!(world.expect(A, 1), [done(1)]);
    let mut model = world.bench.peek(A, 0, MEMORY);
    let bytes = world.bench.peek(B, 0, length);
    world.write(B, Main, 2, (0, length as u32), grant.at(0));
    assert_eq!(world.expect(B, 1), [done(2)]);
    for (at, byte) in bytes.iter().enumerate() {
        let place = at + 777;
        model[skip + order[place / page] * page + place % page] = *byte;
    }
    assert!(world.bench.peek(A, 0, MEMORY) == model);
    world.assert_write_refused(Main, (0, 2), grant.at(length as i64 - 1));
}

/// A list that would be too long is shorter in larger pages.
pub fn pages_may_be_larger_than_the_smallest<T: Bench>() {
    let mut world = fresh::<T>();
    if !world.has(Mechanisms::PAGES) {
        return;
    }
    let shift = world.bench.nic(A).capabilities().page_shift + 3;
    let page = 1_usize << shift;
    let start = world.bench.sge(A, Main, 0, 0).address;
    let first = start.next_multiple_of(page as u64);
    let skip = (first - start) as usize;
    let length = 2 * page as u32 - 700;
    let ranges = [
        (first + 2 * page as u64 + 700, page as u32 - 700),
        (first, page as u32),
    ];
    let grant = register_pages(&mut world, shift, &ranges, length);
    assert_eq!(world.expect(A, 1), [done(1)]);
    let turn = page - 700;
    world.assert_written(Main, &[4; 9], grant.at(0), skip + 2 * page + 700);
    world.assert_written(Main, &[5; 9], grant.at(turn as i64), skip);
    world.assert_written(
        Main,
        &[6; 9],
        grant.at(i64::from(length) - 9),
        skip + page - 9,
    );
    world.assert_write_refused(Main, (0, 2), grant.at(i64::from(length) - 1));
}

pub fn a_crooked_page_list_is_refused<T: Bench>() {
    if !World::<T>::new(Setup::default()).has(Mechanisms::PAGES) {
        return;
    }
    let (page, smallest) = {
        let mut world = fresh::<T>();
        let page = pages_of(&mut world).1 as u32;
        (page, world.bench.nic(A).capabilities().page_shift)
    };
    /// Its number, and bytes that are left out at its start and at its end.
    type Page = (usize, u32, u32);
    // Pages, how many bits their size is below the smallest, and how many bytes more than theirs are asked for.
    let cases: [(&[Page], u8, u32); 8] = [
        (&[(0, 0, 1), (2, 0, 0)], 0, 0),
        (&[(0, 0, 0), (2, 1, 0)], 0, 0),
        (&[(0, 0, 0), (2, 1, 1), (4, 0, 0)], 0, 0),
        (&[(0, 0, 0), (2, 0, page)], 0, 0),
        (&[(0, 0, 0), (2, 0, 0)], 1, 0),
        (&[(0, 0, 0), (2, 0, 0)], 0, 1),
        (&[(0, 0, 0), (1 << 20, 0, 0)], 0, 0),
        (&[(1 << 20, 0, 0), (0, 0, 0)], 0, 0),
    ];
    for (pages, smaller, longer) in cases {
        let mut world = fresh::<T>();
        let (_, _, name) = pages_of(&mut world);
        let ranges: Vec<(u64, u32)> = pages
            .iter()
            .map(|(n, start, end)| (name(*n) + u64::from(*start), page - start - end))
            .collect();
        let length: u32 = ranges.iter().map(|range| range.1).sum();
        register_pages(&mut world, smallest - smaller, &ranges, length + longer);
        assert_eq!(world.expect(A, 1), [failed(1, Status::Bind)], "{pages:?}");
    }
}

pub fn the_longest_page_list_fits_and_no_longer<T: Bench>() {
    if !World::<T>::new(Setup::default()).has(Mechanisms::PAGES) {
        return;
    }
    for more in [0, 1] {
        let mut world = fresh::<T>();
        let (_, page, name) = pages_of(&mut world);
        let capabilities = *world.bench.nic(A).capabilities();
        // From the last byte of a page on, which counts as a whole one. There may not be so much memory: then it fails
        // later, and otherwise.
        let length = ((capabilities.max_pages as usize - 1) * page + 1 + more) as u32;
        let (region, key) = world.adopt(A, Main);
        let lkey = world.bench.sge(A, Main, 0, 0).lkey;
        let address = name(0) + page as u64 - 1;
        let ranges = [Sge {
            address,
            length,
            lkey,
        }];
        let wr = SendWr::Register {
            region,
            key: key.rotated(),
            rights: WRITE,
            base: address,
            length,
            layout: Layout::Pages {
                shift: capabilities.page_shift,
                ranges: &ranges,
            },
        };
        world.queue(A, Main, 1, true, wr);
        let told = world.doorbell(A, Main);
        if more == 0 {
            assert_eq!(told, Ok(()));
            world.expect(A, 1);
        } else {
            assert_eq!(told, Err(Rejected { accepted: 0 }));
        }
    }
}

pub fn a_second_invalidate_is_refused<T: Bench>() {
    for wrong in [false, true] {
        let mut world = fresh::<T>();
        if !world.registers() {
            return;
        }
        let grant = world.grant(A, Main, WRITE, 0, 100);
        let key = if wrong {
            grant.key.rotated()
        } else {
            world.invalidate(A, Main, grant.key);
            grant.key
        };
        world.run(A, Main, 1, SendWr::Invalidate { key });
        assert_eq!(world.expect(A, 1), [failed(1, Status::LocalOperation)]);
        let wr = world.message(A, Main, 0, 1);
        world.run(A, Main, 2, wr);
        assert_eq!(world.expect(A, 1), [failed(2, Status::Flushed)]);
    }
}

pub fn base_memory_cannot_be_invalidated<T: Bench>() {
    let mut world = fresh::<T>();
    let key = RKey(world.bench.sge(A, Main, 0, 0).lkey.0);
    world.run(A, Main, 1, SendWr::Invalidate { key });
    assert_eq!(world.expect(A, 1), [failed(1, Status::LocalOperation)]);
}

pub fn an_invalidate_waits_for_what_is_before_it<T: Bench>() {
    let mut world = fresh::<T>();
    if !world.bench.nic(B).capabilities().region_lkey || !world.registers() {
        lacks("region with a local key");
        return;
    }
    let grant = world.grant(A, Main, WRITE, 0, 150_000);
    // B registers its source, writes through that key, and kills it, in one chain.
    let (region, key) = world.adopt(B, Main);
    let key = key.rotated();
    let base = world.register(B, Main, 1, (region, key), Rights::empty(), 33, 150_000);
    let local = [Sge {
        address: base,
        length: 150_000,
        lkey: LKey(key.0),
    }];
    let remote = grant.at(0);
    let imm = None;
    world.queue(
        B,
        Main,
        2,
        false,
        SendWr::Write {
            local: &local,
            remote,
            imm,
        },
    );
    world.queue(B, Main, 3, true, SendWr::Invalidate { key });
    world.doorbell(B, Main).unwrap();
    assert_eq!(world.expect(B, 2), [done(1), done(3)]);
    let source = world.bench.peek(B, 33, 150_000);
    assert!(world.bench.peek(A, 0, 150_000) == source);
    // And dead it is.
    world.run(
        B,
        Main,
        4,
        SendWr::Write {
            local: &local,
            remote,
            imm,
        },
    );
    assert_eq!(world.expect(B, 1), [failed(4, Status::LocalProtection)]);
}

/// Whether a SEND can kill a key here; says so where it cannot.
fn sends_kill<T: Bench>(world: &mut World<T>) -> bool {
    world.registers()
        && (world.bench.nic(B).capabilities().remote_invalidate || lacks("SEND_WITH_INV"))
}

/// B sends ten bytes that kill a key of A.
fn send_that_kills<T: Bench>(world: &mut World<T>, lane: super::Lane, id: u64, key: RKey) {
    let wr = SendWr::Send {
        message: world.bench.sge(B, lane, 0, 10),
        invalidate: Some(key),
    };
    world.run(B, lane, id, wr);
}

pub fn a_send_kills_the_key_it_names<T: Bench>() {
    let mut world = fresh::<T>();
    if !sends_kill(&mut world) {
        return;
    }
    let grant = world.grant(A, Main, WRITE, 0, 100);
    let other = world.grant(A, Main, WRITE, 200, 100);
    world.assert_written(Main, &[3; 100], grant.at(0), 0);
    world.post(A, Main, 7, 100_000, 64);
    send_that_kills(&mut world, Main, 1, grant.key);
    assert_eq!(world.expect(B, 1), [done(1)]);
    let arrived = Completion::Received {
        id: WrId(7),
        length: 10,
        imm: None,
        invalidated: Some(grant.key),
    };
    assert_eq!(world.expect(A, 1), [arrived]);
    world.assert_written(Main, &[4; 100], other.at(0), 200);
    // It is free to be registered again, and the old key stays dead.
    let again = world.grant_again(A, Main, grant, WRITE, 0, 100);
    world.assert_written(Main, &[5; 100], again.at(0), 0);
    world.assert_write_refused(Main, (0, 1), grant.at(0));
}

/// The next key of a live window, one of no window, one that was killed.
fn dead_keys<T: Bench>(world: &mut World<T>) -> [RKey; 3] {
    let grant = world.grant(A, Main, WRITE, 0, 100);
    let dead = world.grant(A, Main, WRITE, 200, 100);
    world.invalidate(A, Main, dead.key);
    [grant.key.rotated(), RKey(0xdead_be00), dead.key]
}

/// How many of them may be tried.
const fn dead_keys_to_try<T: Bench>() -> usize {
    if T::SURVIVES_DEAD_KEYS { 3 } else { 2 }
}

pub fn a_send_that_names_a_dead_key_fails_its_receive<T: Bench>() {
    for which in 0..dead_keys_to_try::<T>() {
        let mut world = fresh::<T>();
        if !sends_kill(&mut world) {
            return;
        }
        let key = dead_keys(&mut world)[which];
        world.post(A, Main, 7, 100_000, 64);
        world.post(A, Main, 8, 100_000, 64);
        send_that_kills(&mut world, Main, 1, key);
        assert_eq!(
            world.expect(A, 2),
            [
                failed(7, Status::RemoteInvalidate),
                failed(8, Status::Flushed)
            ]
        );
        let wr = world.message(A, Main, 0, 1);
        world.run(A, Main, 2, wr);
        assert_eq!(world.expect(A, 1), [failed(2, Status::Flushed)]);
    }
}

pub fn a_send_that_names_a_dead_key_fails_for_its_sender<T: Bench>() {
    for which in 0..dead_keys_to_try::<T>() {
        let mut world = fresh::<T>();
        if !sends_kill(&mut world) {
            return;
        }
        let key = dead_keys(&mut world)[which];
        world.post(A, Main, 7, 100_000, 64);
        send_that_kills(&mut world, Main, 1, key);
        assert_eq!(world.expect(B, 1), [failed(1, Status::RemoteOperation)]);
        world.expect(A, 1);
        world.assert_both_in_error(Main);
    }
}

/// Neither a key of another domain, nor a window of another queue pair, nor base memory.
pub fn a_send_does_not_kill_what_is_not_its_own<T: Bench>() {
    for lane in [Foreign, Sibling, Main] {
        let mut world = fresh::<T>();
        if !sends_kill(&mut world) {
            return;
        }
        if lane == Sibling && world.way() != Way::Window {
            // A key of its own domain is its own.
            continue;
        }
        let grant = world.grant(A, lane, WRITE, 0, 100);
        let key = match lane {
            Main => RKey(world.bench.sge(A, Main, 0, 0).lkey.0),
            _ => grant.key,
        };
        world.post(A, Main, 7, 100_000, 64);
        send_that_kills(&mut world, Main, 1, key);
        assert_eq!(
            world.expect(A, 1),
            [failed(7, Status::RemoteInvalidate)],
            "{lane:?}"
        );
        if lane != Main {
            world.expect(B, 1);
            world.assert_written(lane, &[4; 100], grant.at(0), 0);
        }
    }
}

pub fn a_failed_registration_leaves_no_key<T: Bench>() {
    let mut world = fresh::<T>();
    let Some(mut order) = order(&mut world) else {
        return;
    };
    order.piece = world.bench.sge(A, Foreign, 1000, 100);
    assert_refused(&mut world, Foreign, &order);
    let remote = Remote {
        address: order.base,
        rkey: order.key,
    };
    world.assert_write_refused(Main, (0, 100), remote);
}
