//! Who may touch which byte.
#![expect(missing_docs, reason = "a law's name says it")]

use std::vec::Vec;

use o2poll_dataplane::nic::{
    Completion, LKey, Nic, RKey, Remote, Rights, SendWr, Sge, Status, WrId,
};

use super::Lane::{Foreign, Main, Sibling};
use super::Side::{A, B};
use super::{Bench, MEMORY, Setup, Way, World, done, failed, pattern, received};

const WRITE: Rights = Rights::REMOTE_WRITE;

fn fresh<T: Bench>() -> World<T> {
    let mut world = World::<T>::new(Setup::default());
    world.bench.poke(A, 0, &pattern(1, MEMORY));
    world.bench.poke(B, 0, &pattern(2, MEMORY));
    world
}

pub fn bounds_hold_to_the_byte<T: Bench>() {
    let mut world = fresh::<T>();
    let grant = world.grant(A, Main, WRITE, 1001, 500);
    world.assert_written(Main, &pattern(3, 500), grant.at(0), 1001);
    world.assert_written(Main, &[0x55], grant.at(0), 1001);
    world.assert_written(Main, &[0xaa], grant.at(499), 1500);
    for (offset, length) in [(499, 2), (500, 1), (-1, 1), (0, 501), (-1, 501), (-1, 502)] {
        let mut world = fresh::<T>();
        let grant = world.grant(A, Main, WRITE, 1001, 500);
        world.assert_write_refused(Main, (0, length), grant.at(offset));
    }
}

pub fn a_range_that_runs_over_is_refused_whole<T: Bench>() {
    // Longer than any slice or packet, and only the last byte is out.
    let mut world = fresh::<T>();
    let grant = world.grant(A, Main, WRITE, 0, 150_000);
    world.assert_write_refused(Main, (0, 150_001), grant.at(0));
    // The end of the address space.
    let mut world = fresh::<T>();
    let grant = world.grant(A, Main, WRITE, 0, 100);
    let remote = Remote {
        address: u64::MAX - 1,
        rkey: grant.key,
    };
    world.assert_write_refused(Main, (0, 50), remote);
}

pub fn rights_are_kept_apart<T: Bench>() {
    for rights in [Rights::REMOTE_READ, Rights::LOCAL_WRITE, Rights::empty()] {
        let mut world = fresh::<T>();
        let grant = world.grant(A, Main, rights, 0, 100);
        world.assert_write_refused(Main, (0, 100), grant.at(0));
    }
    let mut world = fresh::<T>();
    let grant = world.grant(A, Main, WRITE, 0, 100);
    let before = world.bench.peek(B, 0, MEMORY);
    let local = [world.bench.sge(B, Main, 0, 100)];
    let wr = SendWr::Read {
        local: &local,
        remote: grant.at(0),
    };
    world.run(B, Main, 1, wr);
    assert_eq!(world.expect(B, 1), [failed(1, Status::RemoteAccess)]);
    assert!(world.bench.peek(B, 0, MEMORY) == before);
    world.assert_both_in_error(Main);
}

pub fn a_key_that_never_lived_opens_nothing<T: Bench>() {
    for key in [0, 1, 0x100, 0x1234_5678, u32::MAX] {
        let mut world = fresh::<T>();
        let remote = Remote {
            address: world.bench.sge(A, Main, 0, 1).address,
            rkey: RKey(key),
        };
        world.assert_write_refused(Main, (0, 8), remote);
    }
    // Adopted, and never registered.
    let mut world = fresh::<T>();
    if world.registers() {
        let (_, rkey) = world.adopt(A, Main);
        world.assert_write_refused(Main, (0, 8), Remote { address: 0, rkey });
    }
    // The local key of base memory is nobody's remote key.
    let mut world = fresh::<T>();
    let piece = world.bench.sge(A, Main, 0, 8);
    let remote = Remote {
        address: piece.address,
        rkey: RKey(piece.lkey.0),
    };
    world.assert_write_refused(Main, (0, 8), remote);
}

pub fn an_invalidated_key_opens_nothing<T: Bench>() {
    let mut world = fresh::<T>();
    let grant = world.grant(A, Main, WRITE, 0, 100);
    world.assert_written(Main, &[1; 100], grant.at(0), 0);
    if world.kill(A, Main, grant) {
        world.assert_write_refused(Main, (0, 1), grant.at(0));
    }
}

pub fn the_key_before_and_the_key_after_open_nothing<T: Bench>() {
    for stale in [false, true] {
        let mut world = fresh::<T>();
        let old = world.grant(A, Main, WRITE, 0, 100);
        if !world.kill(A, Main, old) {
            return;
        }
        let new = world.grant_again(A, Main, old, WRITE, 0, 100);
        assert_ne!(new.key, old.key, "a dead key stays dead");
        world.assert_written(Main, &[9; 100], new.at(0), 0);
        let rkey = if stale { old.key } else { new.key.rotated() };
        let remote = Remote { rkey, ..new.at(0) };
        world.assert_write_refused(Main, (0, 1), remote);
    }
}

pub fn no_other_tag_of_256_opens<T: Bench>() {
    for step in 1..256_u32 {
        let mut world = fresh::<T>();
        let grant = world.grant(A, Main, WRITE, 0, 100);
        let tag = (grant.key.0 & 0xff).wrapping_add(step) & 0xff;
        let rkey = RKey(grant.key.0 & !0xff | tag);
        let address = grant.base;
        world.write(B, Main, 1, (0, 1), Remote { address, rkey });
        let refused = [failed(1, Status::RemoteAccess)];
        assert_eq!(world.expect(B, 1), refused, "tag {tag}");
    }
}

pub fn all_256_tags_serve_in_turn<T: Bench>() {
    let mut world = fresh::<T>();
    let mut grant = world.grant(A, Main, WRITE, 64, 100);
    for round in 0..300_u32 {
        world.assert_written(Main, &pattern(round, 100), grant.at(0), 64);
        if !world.kill(A, Main, grant) {
            return;
        }
        grant = world.grant_again(A, Main, grant, WRITE, 64, 100);
    }
}

pub fn a_key_of_another_domain_opens_nothing<T: Bench>() {
    let mut world = fresh::<T>();
    let grant = world.grant(A, Foreign, WRITE, 0, 100);
    world.assert_written(Foreign, &[7; 100], grant.at(0), 0);
    world.assert_write_refused(Main, (0, 100), grant.at(0));
}

pub fn a_key_is_not_killed_from_another_domain<T: Bench>() {
    let mut world = fresh::<T>();
    let grant = world.grant(A, Foreign, WRITE, 0, 100);
    world.run(A, Main, 1, SendWr::Invalidate { key: grant.key });
    assert_eq!(world.expect(A, 1), [failed(1, Status::LocalOperation)]);
    world.assert_written(Foreign, &[8; 100], grant.at(0), 0);
}

pub fn a_sibling_uses_a_key_but_not_a_window<T: Bench>() {
    let mut world = fresh::<T>();
    let grant = world.grant(A, Main, WRITE, 0, 100);
    if world.way() == Way::Window {
        world.assert_write_refused(Sibling, (0, 100), grant.at(0));
        world.assert_written(Main, &[7; 100], grant.at(0), 0);
    } else {
        world.assert_written(Sibling, &[7; 100], grant.at(0), 0);
    }
}

pub fn a_sibling_kills_a_key_but_not_a_window<T: Bench>() {
    let mut world = fresh::<T>();
    if !world.registers() {
        return;
    }
    let grant = world.grant(A, Main, WRITE, 0, 100);
    world.run(A, Sibling, 1, SendWr::Invalidate { key: grant.key });
    if world.way() == Way::Window {
        assert_eq!(world.expect(A, 1), [failed(1, Status::LocalOperation)]);
        world.assert_written(Main, &[7; 100], grant.at(0), 0);
    } else {
        assert_eq!(world.expect(A, 1), [done(1)]);
        world.assert_write_refused(Main, (0, 100), grant.at(0));
    }
}

pub fn an_access_of_length_zero_checks_no_key<T: Bench>() {
    let mut world = fresh::<T>();
    let remote = Remote {
        address: 0xdead,
        rkey: RKey(0xdead_beef),
    };
    let empty = [world.bench.sge(B, Main, 0, 0)];
    for local in [&empty[..], &[]] {
        let imm = None;
        world.run(B, Main, 1, SendWr::Write { local, remote, imm });
        assert_eq!(world.expect(B, 1), [done(1)]);
        world.run(B, Main, 2, SendWr::Read { local, remote });
        assert_eq!(world.expect(B, 1), [done(2)]);
        world.post(A, Main, 3, 0, 64);
        let imm = Some(77);
        world.run(B, Main, 4, SendWr::Write { local, remote, imm });
        assert_eq!(world.expect(B, 1), [done(4)]);
        let arrived = Completion::Received {
            id: WrId(3),
            length: 0,
            imm,
            invalidated: None,
        };
        assert_eq!(world.expect(A, 1), [arrived]);
    }
}

pub fn reads_fetch_what_is_there<T: Bench>() {
    let mut world = fresh::<T>();
    let grant = world.grant(A, Main, Rights::REMOTE_READ, 3, 100_000);
    let local = [
        world.bench.sge(B, Main, 1, 10),
        world.bench.sge(B, Main, 100, 0),
        world.bench.sge(B, Main, 5000, 90_000),
        world.bench.sge(B, Main, 20, 33),
    ];
    let remote = grant.at(7);
    let before = world.bench.peek(B, 0, MEMORY);
    world.run(
        B,
        Main,
        1,
        SendWr::Read {
            local: &local,
            remote,
        },
    );
    assert_eq!(world.expect(B, 1), [done(1)]);
    let source = world.bench.peek(A, 10, 90_043);
    let mut wanted = before;
    wanted[1..11].copy_from_slice(&source[..10]);
    wanted[5000..95_000].copy_from_slice(&source[10..90_010]);
    wanted[20..53].copy_from_slice(&source[90_010..]);
    assert!(world.bench.peek(B, 0, MEMORY) == wanted);
}

pub fn a_read_without_responder_resources_is_refused<T: Bench>() {
    let mut world = World::<T>::new(Setup {
        responder_resources: 0,
        ..Setup::default()
    });
    let grant = world.grant(A, Main, Rights::REMOTE_READ, 0, 100);
    let local = [world.bench.sge(B, Main, 0, 100)];
    let remote = grant.at(0);
    world.run(
        B,
        Main,
        1,
        SendWr::Read {
            local: &local,
            remote,
        },
    );
    let refused = [failed(1, Status::RemoteInvalidRequest)];
    assert_eq!(world.expect(B, 1), refused);
    world.assert_both_in_error(Main);
}

/// The request fails locally, and only the local queue pair goes to error.
fn refused_at_home<T: Bench>(mut world: World<T>, piece: Sge) {
    let wr = SendWr::Send {
        message: piece,
        invalidate: None,
    };
    world.run(B, Main, 1, wr);
    assert_eq!(world.expect(B, 1), [failed(1, Status::LocalProtection)]);
    let wr = world.message(B, Main, 0, 1);
    world.run(B, Main, 2, wr);
    assert_eq!(world.expect(B, 1), [failed(2, Status::Flushed)]);
}

pub fn a_local_key_must_be_ours<T: Bench>() {
    for lkey in [0, 0x100, 0xffff_ffff] {
        let world = fresh::<T>();
        let piece = world.bench.sge(B, Main, 0, 8);
        let lkey = LKey(lkey);
        refused_at_home(world, Sge { lkey, ..piece });
    }
    let world = fresh::<T>();
    let piece = world.bench.sge(B, Foreign, 0, 8);
    refused_at_home(world, piece);
}

pub fn a_local_range_must_be_ours<T: Bench>() {
    let world = fresh::<T>();
    let piece = world.bench.sge(B, Main, MEMORY - 8, 9);
    refused_at_home(world, piece);
    let world = fresh::<T>();
    let mut piece = world.bench.sge(B, Main, 0, 9);
    piece.address -= 1;
    refused_at_home(world, piece);
    // A later piece of several: nothing of the earlier ones is written.
    let mut world = fresh::<T>();
    let grant = world.grant(A, Main, WRITE, 0, 1000);
    let before = world.bench.peek(A, 0, MEMORY);
    let mut local = [world.bench.sge(B, Main, 0, 10); 5];
    local[4].address = world.bench.sge(B, Main, MEMORY - 9, 0).address;
    let remote = grant.at(0);
    let imm = None;
    world.run(
        B,
        Main,
        1,
        SendWr::Write {
            local: &local,
            remote,
            imm,
        },
    );
    assert_eq!(world.expect(B, 1), [failed(1, Status::LocalProtection)]);
    assert!(world.bench.peek(A, 0, MEMORY) == before);
}

pub fn an_immediate_takes_a_receive<T: Bench>() {
    let mut world = fresh::<T>();
    let grant = world.grant(A, Main, WRITE, 0, 80_000);
    world.post(A, Main, 3, MEMORY - 64, 64);
    let local: Vec<Sge> = (0..8)
        .map(|n| world.bench.sge(B, Main, n * 10_001, 10_000))
        .collect();
    let wr = SendWr::Write {
        local: &local,
        remote: grant.at(0),
        imm: Some(0xfeed_f00d),
    };
    world.run(B, Main, 1, wr);
    assert_eq!(world.expect(B, 1), [done(1)]);
    let arrived = Completion::Received {
        id: WrId(3),
        length: 80_000,
        imm: Some(0xfeed_f00d),
        invalidated: None,
    };
    assert_eq!(world.expect(A, 1), [arrived]);
    let source = world.bench.peek(B, 70_007, 10_000);
    assert_eq!(world.bench.peek(A, 70_000, 10_000), source);
}

pub fn writes_gather_their_pieces<T: Bench>() {
    let mut world = fresh::<T>();
    let most = world.bench.nic(B).capabilities().max_sge as usize;
    let grant = world.grant(A, Main, WRITE, 17, 60_000);
    for count in [1, 2, 3, 4, 5, most] {
        let lengths: Vec<u32> = (0..count as u32).map(|n| n * 37 % 101 + n % 3).collect();
        let local: Vec<Sge> = lengths
            .iter()
            .enumerate()
            .map(|(n, length)| world.bench.sge(B, Main, n * 1013, *length))
            .collect();
        let mut wanted = Vec::new();
        for (n, length) in lengths.iter().enumerate() {
            wanted.extend(world.bench.peek(B, n * 1013, *length as usize));
        }
        let remote = grant.at(5);
        let imm = None;
        world.run(
            B,
            Main,
            1,
            SendWr::Write {
                local: &local,
                remote,
                imm,
            },
        );
        assert_eq!(world.expect(B, 1), [done(1)]);
        assert_eq!(world.bench.peek(A, 22, wanted.len()), wanted);
    }
}

pub fn a_message_that_is_too_long_fails_both<T: Bench>() {
    let mut world = fresh::<T>();
    let before = world.bench.peek(A, 0, MEMORY);
    world.post(A, Main, 3, 1000, 63);
    world.post(A, Main, 4, 2000, 64);
    let wr = world.message(B, Main, 0, 64);
    world.run(B, Main, 1, wr);
    let refused = [failed(1, Status::RemoteInvalidRequest)];
    assert_eq!(world.expect(B, 1), refused);
    assert_eq!(
        world.expect(A, 2),
        [failed(3, Status::LocalLength), failed(4, Status::Flushed)]
    );
    assert!(world.bench.peek(A, 1063, 1000) == before[1063..2063]);
    world.assert_both_in_error(Main);
}

pub fn a_long_message_arrives_whole<T: Bench>() {
    let mut world = fresh::<T>();
    world.post(A, Main, 3, 0, 200_000);
    let wr = world.message(B, Main, 1, 200_000);
    world.run(B, Main, 1, wr);
    assert_eq!(world.expect(B, 1), [done(1)]);
    assert_eq!(world.expect(A, 1), [received(3, 200_000)]);
    let source = world.bench.peek(B, 1, 200_000);
    assert!(world.bench.peek(A, 0, 200_000) == source);
}
