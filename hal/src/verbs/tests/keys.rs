//! Windows and their keys.

use o2poll_dataplane::nic::{
    Completion, Layout, Nic, RKey, ReceiveQueue, Region, Rejected, Rights, SendWr, Sge, Status,
    WrId,
};
use rdma_core_sys::types::{
    IBV_WC_MW_BIND_ERR, IBV_WC_WR_FLUSH_ERR, IBV_WR_BIND_MW, IBV_WR_LOCAL_INV, IBV_WR_SEND, ibv_wc,
};

use super::{LENGTH, LIMITS, START, World, done, failed};
use crate::verbs::stub::Stub;
use crate::verbs::{Limits, Quirks};

#[test]
fn a_key_moves_only_with_a_bind_that_was_accepted() {
    let mut world = World::new();
    let (region, first) = world.window();
    let (second, third) = (first.rotated(), first.rotated().rotated());
    // Refused: the device still has the first.
    world.stub.take(Some(0));
    world.queue(1, true, world.register(region, second));
    assert_eq!(world.ring(), Err(Rejected { accepted: 0 }));
    world.stub.take(None);
    let posted = world.finish(world.register(region, second));
    assert_eq!(posted.bind.unwrap().old_rkey, first.0);
    world.finish(SendWr::Invalidate { key: second });
    // Accepted: now it has the second.
    let posted = world.finish(world.register(region, third));
    assert_eq!(
        (posted.bind.unwrap().old_rkey, posted.bind.unwrap().rkey),
        (second.0, third.0)
    );
}

#[test]
fn a_chain_that_was_taken_in_part_leaves_the_rest_undone() {
    for taken in 0..4 {
        let mut world = World::new();
        let (region, first) = world.window();
        let key = first.rotated();
        let other = world.window();
        let message = world.message(4);
        world.stub.take(Some(taken));
        world.queue(1, false, world.register(region, key));
        world.queue(2, false, message);
        world.queue(3, false, world.register(other.0, other.1.rotated()));
        world.queue(4, true, SendWr::Invalidate { key });
        let accepted = u32::try_from(taken).unwrap();
        assert_eq!(world.ring(), Err(Rejected { accepted }));
        world.stub.take(None);
        assert_eq!(world.stub.sent().len(), taken);
        // Exactly what was not taken can be asked for again.
        if taken < 1 {
            world.queue(1, false, world.register(region, key));
        }
        if taken < 3 {
            world.queue(3, false, world.register(other.0, other.1.rotated()));
        }
        world.queue(4, true, SendWr::Invalidate { key });
        world.ring().unwrap();
        let sent = world.stub.sent();
        assert_eq!(sent.last().unwrap().opcode, IBV_WR_LOCAL_INV);
        assert!(
            sent.iter().all(|one| one.pieces.is_empty()),
            "none of them was spoiled: {sent:?}"
        );
        assert_eq!(world.nic.counts().spoiled, 0);
    }
}

#[test]
fn a_bind_that_failed_gives_the_key_back() {
    for (status, told) in [
        (IBV_WC_MW_BIND_ERR, Status::Bind),
        (IBV_WC_WR_FLUSH_ERR, Status::Flushed),
    ] {
        let mut world = World::new();
        let (region, first) = world.window();
        let second = first.rotated();
        let third = second.rotated();
        // Register, invalidate, register again on the way; all of it comes back.
        let mut sent = vec![world.run(1, world.register(region, second))];
        sent.push(world.run(2, SendWr::Invalidate { key: second }));
        sent.push(world.run(3, world.register(region, third)));
        world.stub.complete(sent[0].wr_id, status);
        world.stub.complete(sent[1].wr_id, IBV_WC_WR_FLUSH_ERR);
        assert_eq!(world.poll(), [failed(1, told), failed(2, Status::Flushed)]);
        // On another queue pair it is as before.
        let again = world.qps[1];
        world
            .nic
            .queue(again, WrId(4), true, world.register(region, second));
        world.nic.doorbell(again).unwrap();
        let posted = world.only();
        assert_eq!(
            (posted.opcode, posted.bind.unwrap().old_rkey),
            (IBV_WR_BIND_MW, first.0)
        );
        // What still comes back of the first changes nothing of it.
        world.stub.complete(sent[2].wr_id, IBV_WC_WR_FLUSH_ERR);
        world.stub.complete(posted.wr_id, 0);
        assert_eq!(world.poll(), [failed(3, Status::Flushed), done(4)]);
        world
            .nic
            .queue(again, WrId(5), true, SendWr::Invalidate { key: second });
        world.nic.doorbell(again).unwrap();
        assert_eq!(world.only().opcode, IBV_WR_LOCAL_INV);
    }
}

#[test]
fn an_invalidate_that_was_flushed_leaves_the_key_alive() {
    let mut world = World::new();
    let (region, first) = world.window();
    let key = first.rotated();
    world.finish(world.register(region, key));
    let posted = world.run(2, SendWr::Invalidate { key });
    world.stub.complete(posted.wr_id, IBV_WC_WR_FLUSH_ERR);
    assert_eq!(world.poll(), [failed(2, Status::Flushed)]);
    // It may not be bound again: it is live until a control thread destroys it.
    let other = world.qps[1];
    world
        .nic
        .queue(other, WrId(3), true, world.register(region, key.rotated()));
    world.nic.doorbell(other).unwrap();
    assert_eq!(world.only().opcode, IBV_WR_SEND);
}

#[test]
fn a_window_is_bound_elsewhere_only_after_its_invalidate_is_done() {
    for finished in [false, true] {
        let mut world = World::new();
        let (region, first) = world.window();
        let key = first.rotated();
        world.finish(world.register(region, key));
        let posted = world.run(2, SendWr::Invalidate { key });
        if finished {
            world.stub.complete(posted.wr_id, 0);
            assert_eq!(world.poll(), [done(2)]);
        }
        let other = world.qps[1];
        world
            .nic
            .queue(other, WrId(3), true, world.register(region, key.rotated()));
        world.nic.doorbell(other).unwrap();
        assert_eq!(world.only().opcode == IBV_WR_BIND_MW, finished);
    }
}

#[test]
fn a_window_is_bound_elsewhere_however_long_its_invalidate_has_been_done() {
    // Positions of a queue are 32 bits: once around, and half again.
    for steps in 1..=12 {
        let mut world = World::new();
        let (region, first) = world.window();
        let key = first.rotated();
        world.finish(world.register(region, key));
        world.finish(SendWr::Invalidate { key });
        for _ in 0..steps {
            world.skip(1 << 29);
            world.fill_and_drain();
        }
        let other = world.qps[1];
        world
            .nic
            .queue(other, WrId(3), true, world.register(region, key.rotated()));
        world.nic.doorbell(other).unwrap();
        assert_eq!(world.only().opcode, IBV_WR_BIND_MW, "{steps} x 2^29");
        assert_eq!(world.nic.counts().spoiled, 0);
    }
}

#[test]
fn a_window_whose_invalidate_is_queued_is_not_free_whatever_its_position() {
    // Around where the windows are looked through, where the sign changes and where positions begin again.
    for at in [1_u32 << 30, 1 << 31, 0] {
        for before in 0..12 {
            let mut world = World::new();
            let (region, first) = world.window();
            let key = first.rotated();
            world.skip(at.wrapping_sub(before));
            world.finish(world.register(region, key));
            let posted = world.run(2, SendWr::Invalidate { key });
            for id in 0..7 {
                world.run(id, world.message(1));
            }
            let other = world.qps[1];
            world
                .nic
                .queue(other, WrId(3), true, world.register(region, key.rotated()));
            world.nic.doorbell(other).unwrap();
            assert_eq!(world.only().opcode, IBV_WR_SEND);
            assert_eq!(world.nic.counts().spoiled, 1, "{before} before {at}");
            // Behind it on its own queue it may come.
            world.stub.complete(posted.wr_id, 0);
            assert_eq!(world.poll(), [done(2)]);
            let posted = world.run(4, world.register(region, key.rotated()));
            assert_eq!(posted.opcode, IBV_WR_BIND_MW);
        }
    }
}

/// rxe's kernel dereferences NULL when it is told to invalidate a window that is not bound.
#[test]
fn a_window_that_is_not_bound_is_never_invalidated() {
    // Never bound.
    let mut world = World::new();
    let (_, key) = world.window();
    world.assert_spoiled(SendWr::Invalidate { key }, Status::LocalOperation);
    // Invalidated before.
    let mut world = World::new();
    let (region, first) = world.window();
    let key = first.rotated();
    world.finish(world.register(region, key));
    world.finish(SendWr::Invalidate { key });
    world.assert_spoiled(SendWr::Invalidate { key }, Status::LocalOperation);
    // Killed by the peer.
    let mut world = World::new();
    let (region, first) = world.window();
    let key = first.rotated();
    world.finish(world.register(region, key));
    let into = ReceiveQueue::Of(world.qps[0]);
    let buffer = world.piece(0, 64);
    world.nic.receive(into, WrId(8), buffer).unwrap();
    let [receive] = world.stub.received().try_into().unwrap();
    let mut wc = ibv_wc {
        wr_id: receive,
        byte_len: 10,
        wc_flags: 5,
        ..Default::default()
    };
    wc.__bindgen_anon_1.invalidated_rkey = key.0;
    world.stub.complete_as(wc);
    let invalidated = Some(key);
    let arrived = Completion::Received {
        id: WrId(8),
        length: 10,
        imm: None,
        invalidated,
    };
    assert_eq!(world.poll(), [arrived]);
    world.assert_spoiled(SendWr::Invalidate { key }, Status::LocalOperation);
    // Bound by another queue pair; with another tag; nobody's.
    let mut world = World::new();
    let (region, first) = world.window();
    let key = first.rotated();
    let other = world.qps[1];
    world
        .nic
        .queue(other, WrId(1), true, world.register(region, key));
    world.nic.doorbell(other).unwrap();
    assert_eq!(world.stub.sent().len(), 1);
    world.assert_spoiled(SendWr::Invalidate { key }, Status::LocalOperation);
    for wrong in [1, 0x100, 0x1234_5600] {
        let mut world = World::new();
        let (region, first) = world.window();
        let key = first.rotated();
        world.finish(world.register(region, key));
        let key = RKey(key.0 ^ wrong);
        world.assert_spoiled(SendWr::Invalidate { key }, Status::LocalOperation);
    }
}

#[test]
fn a_registration_that_is_not_right_never_reaches_the_provider() {
    type Bend = fn(&mut World, &mut Sge, &mut u64, &mut u32, &mut RKey);
    let bends: [Bend; 11] = [
        |_, piece, _, length, _| (piece.length, *length) = (0, 0),
        |_, _, _, length, _| *length += 1,
        |_, piece, _, _, _| piece.length += 1,
        |_, _, base, _, _| *base += 1,
        |_, _, base, _, _| *base = 0,
        |_, piece, base, _, _| (piece.address, *base) = (START - 1, START - 1),
        |_, piece, base, _, _| (piece.address, *base) = (START + LENGTH - 49, START + LENGTH - 49),
        |_, piece, base, _, _| (piece.address, *base) = (u64::MAX - 3, u64::MAX - 3),
        |_, _, _, _, key| key.0 ^= 0x100,
        |_, _, _, _, key| key.0 = key.0 & !0xff | key.0.wrapping_sub(1) & 0xff,
        |_, piece, _, _, _| piece.lkey.0 ^= 1,
    ];
    for bend in bends {
        let mut world = World::new();
        let (region, key) = world.window();
        let mut piece = world.piece(100, 50);
        let (mut base, mut length, mut key) = (piece.address, 50, key.rotated());
        bend(&mut world, &mut piece, &mut base, &mut length, &mut key);
        let layout = Layout::Window(piece);
        let rights = Rights::REMOTE_WRITE;
        let wr = SendWr::Register {
            region,
            key,
            rights,
            base,
            length,
            layout,
        };
        world.assert_spoiled(wr, Status::Bind);
    }
    // Memory of another protection domain.
    let mut world = World::new();
    let (region, key) = world.window();
    let foreign = world.stub.foreign_memory(0, LENGTH, Rights::LOCAL_WRITE);
    let lkey = world.nic.add_memory(foreign).unwrap();
    let piece = Sge {
        address: 0,
        length: 50,
        lkey,
    };
    let layout = Layout::Window(piece);
    let rights = Rights::REMOTE_WRITE;
    let wr = SendWr::Register {
        region,
        key: key.rotated(),
        rights,
        base: 0,
        length: 50,
        layout,
    };
    world.assert_spoiled(wr, Status::Bind);
    // A window that a peer writes through, over memory that we may not write.
    let mut world = World::new();
    let (region, key) = world.window();
    let lkey = world
        .nic
        .add_memory(world.stub.memory(0, 100, Rights::empty()))
        .unwrap();
    let layout = Layout::Window(Sge {
        address: 0,
        length: 50,
        lkey,
    });
    let wr = SendWr::Register {
        region,
        key: key.rotated(),
        rights,
        base: 0,
        length: 50,
        layout,
    };
    world.assert_spoiled(wr, Status::Bind);
    // A window that is live, and one that is not there.
    let mut world = World::new();
    let (region, key) = world.window();
    world.finish(world.register(region, key.rotated()));
    let again = world.register(region, key.rotated().rotated());
    world.assert_spoiled(again, Status::Bind);
    let mut world = World::new();
    let nowhere = world.register(Region(3), RKey(0x100));
    world.assert_spoiled(nowhere, Status::Bind);
}

#[test]
fn windows_are_found_by_their_keys_whoever_comes_and_goes() {
    let mut world = World::new();
    let mut held: Vec<(Region, RKey)> = (0..4).map(|_| world.window()).collect();
    for round in 0..20 {
        let (region, _) = held.remove(round % 3);
        assert!(world.nic.retire_window(region).is_some());
        assert!(world.nic.retire_window(region).is_none());
        held.push(world.window());
        for (region, key) in held.clone() {
            let key = key.rotated();
            world.finish(world.register(region, key));
            world.finish(SendWr::Invalidate { key });
            let window = world.nic.retire_window(region).unwrap();
            let again = world.nic.adopt_window(window).unwrap();
            assert_eq!(again, (region, key));
            *held.iter_mut().find(|one| one.0 == region).unwrap() = again;
        }
    }
}

/// Starting a node adopts tens of thousands of windows, and none may look at all that came before it.
#[test]
fn a_window_is_placed_without_a_look_at_the_others_and_found_whoever_has_gone() {
    const MOST: u32 = 300;
    let stub = Stub::new(false);
    let limits = Limits {
        windows: MOST,
        ..LIMITS
    };
    let mut nic = stub.nic(limits, Quirks::RXE);
    let mut held = Vec::new();
    for n in 0..MOST {
        let (region, key) = nic.adopt_window(stub.window()).unwrap();
        assert_eq!(region.0, n);
        assert_eq!(nic.windows.vacant_from, n as usize + 1);
        held.push((region, key));
    }
    assert!(nic.adopt_window(stub.window()).is_err());
    let mut random = 7_usize;
    let mut next = |most: usize| {
        random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        (random >> 33) % most
    };
    for _ in 0..200 {
        // Many leave, in any order, and as many come.
        let mut gone = Vec::new();
        for _ in 0..next(60) {
            let (region, key) = held.swap_remove(next(held.len()));
            assert!(nic.retire_window(region).is_some());
            gone.push((region.0, key));
        }
        for (_, key) in &gone {
            assert_eq!(nic.windows.find(*key), None);
        }
        for (region, key) in &held {
            assert_eq!(nic.windows.find(*key), Some(region.0));
        }
        gone.sort_unstable_by_key(|(region, _)| *region);
        if let Some((lowest, _)) = gone.first() {
            assert!(nic.windows.vacant_from <= *lowest as usize);
        }
        for (lowest, _) in gone {
            let (region, key) = nic.adopt_window(stub.window()).unwrap();
            assert_eq!(region.0, lowest, "the lowest place first");
            held.push((region, key));
        }
    }
}
