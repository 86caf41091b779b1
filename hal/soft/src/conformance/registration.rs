//! Keys: how they come to life, and how they die.
#![expect(missing_docs, reason = "a law's name says it")]

use std::vec::Vec;

use o2poll_dataplane::nic::{
    Completion, LKey, Layout, Mechanisms, Nic, RKey, Rejected, Remote, Rights, SendWr, Sge, Status,
    WrId,
};

use super::Lane::{Foreign, Main};
use super::Side::{A, B};
use super::{Bench, Grant, MEMORY, Setup, World, done, failed, pattern, received};

const WRITE: Rights = Rights::REMOTE_WRITE;

fn fresh<T: Bench>() -> World<T> {
    let mut world = World::<T>::new(Setup::default());
    world.bench.poke(A, 0, &pattern(1, MEMORY));
    world.bench.poke(B, 0, &pattern(2, MEMORY));
    world
}

/// A registration of one range, which the caller then bends.
struct Order {
    lane: super::Lane,
    key: RKey,
    region: o2poll_dataplane::nic::Region,
    base: u64,
    length: u32,
    piece: Sge,
}

impl Order {
    fn new<T: Bench>(world: &mut World<T>) -> Self {
        let (region, key) = world.adopt(A, Main);
        let piece = world.bench.sge(A, Main, 1000, 100);
        let base = if world.has(Mechanisms::FRAGMENTS) {
            0
        } else {
            piece.address
        };
        Self {
            lane: Main,
            key: key.rotated(),
            region,
            base,
            length: 100,
            piece,
        }
    }

    fn run<T: Bench>(&self, world: &mut World<T>, id: u64) {
        let list = [self.piece];
        let wr = SendWr::Register {
            region: self.region,
            key: self.key,
            rights: WRITE,
            base: self.base,
            length: self.length,
            layout: if world.has(Mechanisms::FRAGMENTS) {
                Layout::Fragments(&list)
            } else {
                Layout::Window(self.piece)
            },
        };
        world.run(A, self.lane, id, wr);
    }

    /// It fails, the queue pair goes to error, and the key opens nothing.
    fn assert_refused<T: Bench>(&self, world: &mut World<T>) {
        self.run(world, 1);
        assert_eq!(world.expect(A, 1), [failed(1, Status::Bind)]);
        let wr = world.message(A, self.lane, 0, 1);
        world.run(A, self.lane, 2, wr);
        assert_eq!(world.expect(A, 1), [failed(2, Status::Flushed)]);
    }
}

pub fn a_key_may_travel_in_the_message_behind_it<T: Bench>() {
    let mut world = fresh::<T>();
    let (region, key) = world.adopt(A, Main);
    let key = key.rotated();
    world.post(B, Main, 7, 100_000, 64);
    let base = world.register(A, Main, 1, (region, key), WRITE, 1000, 100);
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
        address: base,
        rkey: key,
    };
    world.assert_written(Main, &pattern(8, 100), remote, 1000);
}

pub fn length_zero_is_refused<T: Bench>() {
    let mut world = fresh::<T>();
    let order = Order::new(&mut world);
    let piece = Sge {
        length: 0,
        ..order.piece
    };
    let order = Order {
        length: 0,
        piece,
        ..order
    };
    order.assert_refused(&mut world);
}

pub fn a_wrong_index_is_refused<T: Bench>() {
    let mut world = fresh::<T>();
    let order = Order::new(&mut world);
    let key = RKey(order.key.0 ^ 0x100);
    Order { key, ..order }.assert_refused(&mut world);
}

pub fn a_window_of_another_domain_is_refused<T: Bench>() {
    let mut world = fresh::<T>();
    let order = Order::new(&mut world);
    let piece = world.bench.sge(A, Foreign, 1000, 100);
    let lane = Foreign;
    Order {
        lane,
        piece,
        ..order
    }
    .assert_refused(&mut world);
}

pub fn memory_of_another_domain_is_refused<T: Bench>() {
    let mut world = fresh::<T>();
    let order = Order::new(&mut world);
    let piece = world.bench.sge(A, Foreign, 1000, 100);
    Order { piece, ..order }.assert_refused(&mut world);
}

pub fn a_range_outside_memory_is_refused<T: Bench>() {
    let cases = [(MEMORY - 99, 0), (0, 1), (MEMORY, 0)];
    for (offset, before) in cases {
        let mut world = fresh::<T>();
        let order = Order::new(&mut world);
        let mut piece = world.bench.sge(A, Main, offset, 100);
        piece.address -= before;
        let base = if order.base == 0 { 0 } else { piece.address };
        Order {
            piece,
            base,
            ..order
        }
        .assert_refused(&mut world);
    }
    let mut world = fresh::<T>();
    let order = Order::new(&mut world);
    let lkey = LKey(order.piece.lkey.0 ^ 1);
    let piece = Sge {
        lkey,
        ..order.piece
    };
    Order { piece, ..order }.assert_refused(&mut world);
}

pub fn lengths_must_agree<T: Bench>() {
    for length in [99, 101] {
        let mut world = fresh::<T>();
        let order = Order::new(&mut world);
        Order { length, ..order }.assert_refused(&mut world);
    }
}

pub fn registering_over_a_live_key<T: Bench>() {
    let mut world = fresh::<T>();
    let order = Order::new(&mut world);
    order.run(&mut world, 1);
    assert_eq!(world.expect(A, 1), [done(1)]);
    let again = Order {
        key: order.key.rotated(),
        piece: world.bench.sge(A, Main, 5000, 100),
        ..order
    };
    let checks = world.bench.nic(A).capabilities().checks_reuse;
    let remote = |rkey| Remote {
        address: again.base,
        rkey,
    };
    if checks {
        let base = if again.base == 0 {
            0
        } else {
            again.piece.address
        };
        Order { base, ..again }.assert_refused(&mut world);
        return;
    }
    // Nobody looks: the old key is replaced without a word.
    again.run(&mut world, 2);
    assert_eq!(world.expect(A, 1), [done(2)]);
    world.assert_written(Main, &[5; 100], remote(again.key), 5000);
    world.assert_write_refused(Main, (0, 100), remote(order.key));
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
    let grant = Grant { region, key, base };
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

/// Registers whole pages of A from `first_offset` on, in the order given.
fn register_pages<T: Bench>(
    world: &mut World<T>,
    pages: &[u64],
    first_offset: u32,
    length: u32,
) -> Grant {
    let (region, key) = world.adopt(A, Main);
    let key = key.rotated();
    let shift = world.bench.nic(A).capabilities().page_shift;
    let base = 0x4000_0000 + u64::from(first_offset);
    let wr = SendWr::Register {
        region,
        key,
        rights: WRITE,
        base,
        length,
        layout: Layout::Pages {
            shift,
            first_offset,
            pages,
        },
    };
    world.run(A, Main, 1, wr);
    Grant { region, key, base }
}

/// The first page-aligned offset of A's memory, the page size, and how to name a page.
fn pages_of<T: Bench>(world: &mut World<T>) -> (usize, usize, impl Fn(usize) -> u64 + use<T>) {
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
    let grant = register_pages(&mut world, &order.map(&name), 777, length as u32);
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

pub fn a_crooked_page_list_is_refused<T: Bench>() {
    if !World::<T>::new(Setup::default()).has(Mechanisms::PAGES) {
        return;
    }
    let page = {
        let mut world = fresh::<T>();
        pages_of(&mut world).1 as u32
    };
    // Page numbers, an amount to move them by, offset in the first, length.
    let cases: [(&[usize], u64, u32, u32); 6] = [
        (&[0, 1], 1, 0, 2 * page),
        (&[0, 1], 0, 0, 2 * page + 1),
        (&[0, 1], 0, 1, 2 * page),
        (&[0, 1], 0, page, page),
        (&[0, 1, 2], 0, 0, 2 * page),
        (&[0, 1 << 20], 0, 0, 2 * page),
    ];
    for (numbers, moved, offset, length) in cases {
        let mut world = fresh::<T>();
        let (_, _, name) = pages_of(&mut world);
        let pages: Vec<u64> = numbers.iter().map(|n| name(*n) + moved).collect();
        register_pages(&mut world, &pages, offset, length);
        assert_eq!(world.expect(A, 1), [failed(1, Status::Bind)], "{numbers:?}");
    }
}

pub fn a_second_invalidate_is_refused<T: Bench>() {
    for wrong in [false, true] {
        let mut world = fresh::<T>();
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
    if !world.bench.nic(B).capabilities().region_lkey {
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

pub fn a_send_kills_the_key_it_names<T: Bench>() {
    let mut world = fresh::<T>();
    if !world.bench.nic(B).capabilities().remote_invalidate {
        return;
    }
    let grant = world.grant(A, Main, WRITE, 0, 100);
    let other = world.grant(A, Main, WRITE, 200, 100);
    world.assert_written(Main, &[3; 100], grant.at(0), 0);
    world.post(A, Main, 7, 100_000, 64);
    let wr = SendWr::Send {
        message: world.bench.sge(B, Main, 0, 10),
        invalidate: Some(grant.key),
    };
    world.run(B, Main, 1, wr);
    assert_eq!(world.expect(B, 1), [done(1)]);
    let arrived = Completion::Received {
        id: WrId(7),
        length: 10,
        imm: None,
        invalidated: Some(grant.key),
    };
    assert_eq!(world.expect(A, 1), [arrived]);
    world.assert_written(Main, &[4; 100], other.at(0), 200);
    world.assert_write_refused(Main, (0, 1), grant.at(0));
}

pub fn a_send_that_names_a_dead_key_fails_both<T: Bench>() {
    let mut world = fresh::<T>();
    if !world.bench.nic(B).capabilities().remote_invalidate {
        return;
    }
    let grant = world.grant(A, Main, WRITE, 0, 100);
    world.post(A, Main, 7, 100_000, 64);
    world.post(A, Main, 8, 100_000, 64);
    let wr = SendWr::Send {
        message: world.bench.sge(B, Main, 0, 10),
        invalidate: Some(grant.key.rotated()),
    };
    world.run(B, Main, 1, wr);
    assert_eq!(
        world.expect(A, 2),
        [
            failed(7, Status::RemoteInvalidate),
            failed(8, Status::Flushed)
        ]
    );
    assert_eq!(world.expect(B, 1), [failed(1, Status::RemoteOperation)]);
    world.assert_both_in_error(Main);
}

pub fn a_failed_registration_leaves_no_key<T: Bench>() {
    let mut world = fresh::<T>();
    let order = Order::new(&mut world);
    let lane = Foreign;
    let piece = world.bench.sge(A, Foreign, 1000, 100);
    let order = Order {
        lane,
        piece,
        ..order
    };
    order.assert_refused(&mut world);
    let remote = Remote {
        address: order.base,
        rkey: order.key,
    };
    world.assert_write_refused(Main, (0, 100), remote);
}
