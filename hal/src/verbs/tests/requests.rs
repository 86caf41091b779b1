//! Immediate data and invalidation by the peer, as they are in memory, and what is refused of either queue.

use o2poll_dataplane::nic::{
    Completion, Nic, RKey, ReceiveQueue, Rejected, Remote, Rights, SendWr, Sge, WrId,
};
use rdma_core_sys::types::{
    IBV_SEND_INLINE, IBV_SEND_SIGNALED, IBV_WC_GRH, IBV_WC_MW_BIND_ERR, IBV_WC_RECV,
    IBV_WC_RECV_RDMA_WITH_IMM, IBV_WC_WITH_IMM, IBV_WC_WITH_INV, IBV_WR_BIND_MW,
    IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_SEND, IBV_WR_SEND_WITH_INV, ibv_wc,
};

use super::{START, World};
use crate::verbs::Quirks;

const REMOTE: Remote = Remote {
    address: 0x0102_0304_0506_0708,
    rkey: RKey(0x55aa),
};

/// A receive of 64 bytes on the first queue pair: its id on the device.
fn receive(world: &mut World, id: u64) -> u64 {
    let into = ReceiveQueue::Of(world.qps[0]);
    let buffer = world.piece(0, 64);
    world.nic.receive(into, WrId(id), buffer).unwrap();
    let [receive] = world.stub.received().try_into().unwrap();
    receive
}

/// `imm_data` is a `__be32` (`ibv_post_send(3)`): the most significant byte comes first in memory.
#[test]
fn a_write_with_immediate_data_has_it_in_network_order_behind_its_own_opcode() {
    for (imm, bytes) in [
        (0x0102_0304, [1, 2, 3, 4]),
        (0, [0; 4]),
        (1, [0, 0, 0, 1]),
        (0xff00_0000, [0xff, 0, 0, 0]),
    ] {
        for (length, flags) in [
            (0, IBV_SEND_SIGNALED),
            (32, IBV_SEND_SIGNALED | IBV_SEND_INLINE),
            (33, IBV_SEND_SIGNALED),
        ] {
            let mut world = World::new();
            let local = [world.piece(7, length)];
            let posted = world.finish(SendWr::Write {
                local: &local,
                remote: REMOTE,
                imm: Some(imm),
            });
            assert_eq!(posted.opcode, IBV_WR_RDMA_WRITE_WITH_IMM);
            assert_eq!(posted.word.to_ne_bytes(), bytes);
            assert_eq!(posted.remote, Some((REMOTE.address, REMOTE.rkey.0)));
            assert_eq!(posted.send_flags, flags, "{length}");
            let pieces = match length {
                0 => vec![],
                _ => vec![(START + 7, length, world.lkey.0)],
            };
            assert_eq!(posted.pieces, pieces);
        }
    }
}

/// `invalidate_rkey` is a `uint32_t`: the host's order.
#[test]
fn a_send_that_invalidates_names_the_peers_key_in_host_order() {
    let mut world = World::new();
    for key in [0x0102_0304_u32, 0, u32::MAX] {
        for length in [0, 40] {
            let message = world.piece(0, length);
            let posted = world.finish(SendWr::Send {
                message,
                invalidate: Some(RKey(key)),
            });
            assert_eq!(posted.opcode, IBV_WR_SEND_WITH_INV);
            assert_eq!(posted.word.to_ne_bytes(), key.to_ne_bytes());
            assert_eq!(posted.send_flags, IBV_SEND_SIGNALED);
        }
    }
    // What a request before it said is not left behind.
    let posted = world.finish(world.message(40));
    assert_eq!((posted.opcode, posted.word), (IBV_WR_SEND, 0));
}

#[test]
fn immediate_data_arrives_with_the_length_that_was_written() {
    for quirks in [Quirks::empty(), Quirks::RXE] {
        for flags in [IBV_WC_WITH_IMM, IBV_WC_WITH_IMM | IBV_WC_GRH] {
            let mut world = World::with(quirks);
            for (bytes, imm) in [
                ([1, 2, 3, 4], 0x0102_0304),
                ([0; 4], 0),
                ([0xff; 4], u32::MAX),
            ] {
                let mut wc = ibv_wc {
                    wr_id: receive(&mut world, 8),
                    opcode: IBV_WC_RECV_RDMA_WITH_IMM,
                    byte_len: 1 << 20,
                    wc_flags: flags,
                    ..Default::default()
                };
                wc.__bindgen_anon_1.imm_data = u32::from_ne_bytes(bytes);
                world.stub.complete_as(wc);
                let arrived = Completion::Received {
                    id: WrId(8),
                    length: 1 << 20,
                    imm: Some(imm),
                    invalidated: None,
                };
                assert_eq!(world.poll(), [arrived]);
            }
        }
    }
}

/// The same word is the one or the other: a number that happens to be a key of ours kills nothing.
#[test]
fn immediate_data_that_looks_like_a_key_of_ours_kills_nothing() {
    for flags in [IBV_WC_WITH_IMM, IBV_WC_WITH_IMM | IBV_WC_WITH_INV] {
        let mut world = World::with(Quirks::empty());
        let (region, first) = world.window();
        let key = first.rotated();
        world.finish(world.register(region, key));
        let mut wc = ibv_wc {
            wr_id: receive(&mut world, 8),
            opcode: IBV_WC_RECV_RDMA_WITH_IMM,
            wc_flags: flags,
            ..Default::default()
        };
        wc.__bindgen_anon_1.imm_data = key.0;
        world.stub.complete_as(wc);
        let [
            Completion::Received {
                imm, invalidated, ..
            },
        ] = world.poll()[..]
        else {
            panic!("one receive");
        };
        assert_eq!((imm, invalidated), (Some(u32::from_be(key.0)), None));
        // It is live, so that it can be invalidated and not be bound again.
        world.finish(SendWr::Invalidate { key });
    }
}

#[test]
fn a_key_that_a_message_killed_is_told_and_its_window_may_be_bound_again() {
    for (quirks, flag) in [(Quirks::empty(), IBV_WC_WITH_INV), (Quirks::RXE, 1 << 2)] {
        for grh in [0, IBV_WC_GRH] {
            let mut world = World::with(quirks);
            let (region, first) = world.window();
            let key = first.rotated();
            world.finish(world.register(region, key));
            let mut wc = ibv_wc {
                wr_id: receive(&mut world, 8),
                opcode: IBV_WC_RECV,
                byte_len: 40,
                wc_flags: flag | grh,
                ..Default::default()
            };
            wc.__bindgen_anon_1.invalidated_rkey = key.0;
            world.stub.complete_as(wc);
            let arrived = Completion::Received {
                id: WrId(8),
                length: 40,
                imm: None,
                invalidated: Some(key),
            };
            assert_eq!(world.poll(), [arrived]);
            // On whichever queue pair.
            let other = world.qps[1];
            world
                .nic
                .queue(other, WrId(3), true, world.register(region, key.rotated()));
            world.nic.doorbell(other).unwrap();
            let posted = world.only();
            assert_eq!(posted.opcode, IBV_WR_BIND_MW);
            assert_eq!(posted.bind.unwrap().old_rkey, key.0);
        }
    }
}

/// A message of no one's key, or with a tag that the window does not have: told, and nothing is dead by it.
#[test]
fn a_key_that_is_not_on_the_device_kills_nothing() {
    let mut world = World::with(Quirks::empty());
    let (region, first) = world.window();
    let key = first.rotated();
    world.finish(world.register(region, key));
    for wrong in [first, key.rotated(), RKey(key.0 ^ 0x100), RKey(0)] {
        let mut wc = ibv_wc {
            wr_id: receive(&mut world, 8),
            opcode: IBV_WC_RECV,
            wc_flags: IBV_WC_WITH_INV,
            ..Default::default()
        };
        wc.__bindgen_anon_1.invalidated_rkey = wrong.0;
        world.stub.complete_as(wc);
        let [Completion::Received { invalidated, .. }] = world.poll()[..] else {
            panic!("one receive");
        };
        assert_eq!(invalidated, Some(wrong));
    }
    world.finish(SendWr::Invalidate { key });
}

/// A provider takes 31 bits of a length (mlx5), and a receive that claims more than a message can have is a mistake.
#[test]
fn a_receive_longer_than_any_message_is_refused() {
    let mut world = World::new();
    let lkey = world
        .nic
        .add_memory(world.stub.memory(0, 1 << 33, Rights::LOCAL_WRITE))
        .unwrap();
    let into = ReceiveQueue::Of(world.qps[0]);
    for (length, taken) in [(1 << 30, true), ((1 << 30) + 1, false), (u32::MAX, false)] {
        let buffer = Sge {
            address: 0,
            length,
            lkey,
        };
        assert_eq!(world.nic.receive(into, WrId(1), buffer).is_ok(), taken);
    }
    assert_eq!(world.stub.received().len(), 1);
}

/// Whatever came astray, its own doorbell tells, and nothing that comes behind it goes before it.
#[test]
fn a_request_that_went_astray_is_told_and_passed_by_none() {
    let mut world = World::new();
    let message = world.message(1);
    let [first, second] = world.qps;
    world.nic.queue(first, WrId(1), true, message);
    world.nic.queue(second, WrId(2), true, message);
    world.nic.doorbell(first).unwrap();
    // The chain is free, but the one before is still to be told.
    world.nic.queue(second, WrId(3), true, message);
    assert_eq!(world.nic.doorbell(second), Err(Rejected { accepted: 0 }));
    assert_eq!(world.stub.sent().len(), 1);
    // Told once.
    assert_eq!(world.nic.doorbell(second), Ok(()));
    world.nic.queue(second, WrId(4), true, message);
    assert_eq!(world.nic.doorbell(second), Ok(()));
    assert_eq!(world.stub.sent().len(), 1);
    // It does not outlive its queue pair.
    world.nic.queue(first, WrId(5), true, message);
    world.nic.queue(second, WrId(6), true, message);
    world.nic.doorbell(first).unwrap();
    let pair = world.nic.retire(second).unwrap();
    assert_eq!(world.nic.adopt(pair).unwrap(), second);
    world.nic.queue(second, WrId(7), true, message);
    assert_eq!(world.nic.doorbell(second), Ok(()));
}

/// Its key may still be live: whoever bound it again would leave two keys over memory that is no longer the first one's.
#[test]
fn a_window_that_came_back_bound_is_not_adopted_again() {
    let mut world = World::new();
    let (region, first) = world.window();
    let key = first.rotated();
    world.finish(world.register(region, key));
    let window = world.nic.retire_window(region).unwrap();
    let window = world.nic.adopt_window(window).unwrap_err();
    drop(window);
    // One whose key is known to be dead is.
    let (region, first) = world.window();
    let key = first.rotated();
    world.finish(world.register(region, key));
    world.finish(SendWr::Invalidate { key });
    let window = world.nic.retire_window(region).unwrap();
    assert_eq!(window.key(), key);
    assert_eq!(world.nic.adopt_window(window).unwrap(), (region, key));
}

/// The library's `ibv_mw` has the key that the device has, whatever became of the last registration.
#[test]
fn a_window_that_is_given_back_says_which_key_the_device_has() {
    // Taken, not taken, taken and failed.
    for case in 0..3 {
        let mut world = World::new();
        let (region, first) = world.window();
        let key = first.rotated();
        let wr = world.register(region, key);
        if case == 1 {
            world.stub.take(Some(0));
            world.queue(1, true, wr);
            assert!(
                world.nic.retire_window(region).is_none(),
                "it is in the open chain"
            );
            assert_eq!(world.ring(), Err(Rejected { accepted: 0 }));
        } else {
            let posted = world.run(1, wr);
            if case == 2 {
                world.stub.complete(posted.wr_id, IBV_WC_MW_BIND_ERR);
                assert_eq!(world.poll().len(), 1);
            }
        }
        let window = world.nic.retire_window(region).unwrap();
        let wanted = if case == 0 { key } else { first };
        assert_eq!(window.key(), wanted, "{case}");
    }
}

/// Room that a poll made while a chain was open can be used by it.
#[test]
fn a_chain_grows_with_what_is_polled_while_it_is_open() {
    let mut world = World::new();
    let message = world.message(1);
    for id in 0..7 {
        world.queue(id, id == 6, message);
    }
    world.ring().unwrap();
    let sent = world.stub.sent();
    world.queue(7, true, message);
    world.stub.complete(sent[6].wr_id, 0);
    assert_eq!(world.poll().len(), 1);
    for id in 8..15 {
        world.queue(id, id == 14, message);
    }
    assert_eq!(world.ring(), Ok(()));
    assert_eq!(world.stub.sent().len(), 8);
}

/// Nothing of a queue pair that is not held reaches the provider, by no call.
#[test]
fn nothing_goes_to_a_queue_pair_that_is_not_held() {
    let mut world = World::new();
    let message = world.message(1);
    let gone = world.qps[1];
    drop(world.nic.retire(gone).unwrap());
    let buffer = world.piece(0, 64);
    for qp in [
        gone,
        o2poll_dataplane::nic::Qp(2),
        o2poll_dataplane::nic::Qp(u32::MAX - 1),
    ] {
        world.nic.queue(qp, WrId(1), true, message);
        assert_eq!(world.nic.doorbell(qp), Err(Rejected { accepted: 0 }));
        let posted = world.nic.receive(ReceiveQueue::Of(qp), WrId(1), buffer);
        assert_eq!(posted, Err(Rejected { accepted: 0 }));
        world.nic.fail(qp);
        assert!(world.nic.retire(qp).is_none());
    }
    assert!(world.stub.sent().is_empty() && world.stub.received().is_empty());
    // And the chain is free.
    let posted = world.run(2, message);
    assert_eq!(posted.opcode, IBV_WR_SEND);
}
