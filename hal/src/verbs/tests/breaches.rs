//! A provider that completes what is not outstanding.

use o2poll_dataplane::nic::{Completion, Nic as _, ReceiveQueue, Status, WrId};
use rdma_core_sys::types::IBV_WC_WR_FLUSH_ERR;

use super::{SHAPE, World, done, failed};

#[test]
fn a_completion_that_comes_twice_ends_one_request_and_stops_its_queue_pair() {
    let mut world = World::new();
    let message = world.message(1);
    world.queue(1, true, message);
    world.queue(2, true, message);
    world.ring().unwrap();
    let [first, second] = world.stub.sent().try_into().unwrap();
    world.stub.complete(first.wr_id, 0);
    world.stub.complete(first.wr_id, 0);
    assert_eq!(world.poll(), [done(1)]);
    assert_eq!(world.nic.counts().breaches, 1);
    // One slot is free and not two, and the other queue pair is as it was.
    assert_eq!(world.nic.slots[0].room(), SHAPE.send_depth - 1);
    let late = world.run(3, message);
    assert!(late.pieces.is_empty(), "its queue pair is in error");
    // What is outstanding is flushed, each once, however often it is said.
    for flushed in [&second, &late, &second, &late] {
        world.stub.complete(flushed.wr_id, IBV_WC_WR_FLUSH_ERR);
    }
    assert_eq!(
        world.poll(),
        [2, 3].map(|id| failed(id, Status::Flushed)),
        "and not again"
    );
    assert_eq!(world.nic.counts().breaches, 3);
    assert_eq!(world.nic.slots[0].room(), SHAPE.send_depth);
    let other = world.qps[1];
    world.nic.queue(other, WrId(4), true, message);
    world.nic.doorbell(other).unwrap();
    let healthy = world.only();
    assert_eq!(healthy.pieces.len(), 1);
    world.stub.complete(healthy.wr_id, 0);
    assert_eq!(world.poll(), [done(4)]);
}

#[test]
fn a_completion_of_a_request_that_was_never_posted_ends_none_and_stops_its_queue_pair() {
    let message = |world: &World| world.message(1);
    for status in [0, IBV_WC_WR_FLUSH_ERR] {
        // Behind the last one; and with nothing outstanding.
        for posted in [true, false] {
            let mut world = World::new();
            if posted {
                world.queue(1, true, message(&world));
                world.ring().unwrap();
            }
            let ahead = world.nic.slots[0].send_token(u32::from(posted));
            world.stub.complete(ahead, status);
            assert_eq!(world.poll(), []);
            assert_eq!(world.nic.counts().breaches, 1);
            let room = SHAPE.send_depth - u32::from(posted);
            assert_eq!(world.nic.slots[0].room(), room);
            assert!(world.nic.slots[0].failed);
        }
    }
}

#[test]
fn a_receive_that_completes_twice_or_was_never_posted_is_given_back_once() {
    let mut world = World::new();
    let into = ReceiveQueue::Of(world.qps[0]);
    let buffer = world.piece(0, 64);
    for id in 0..2 {
        world.nic.receive(into, WrId(id), buffer).unwrap();
    }
    let receives = world.stub.received();
    world.stub.complete(receives[0], 0);
    world.stub.complete(receives[0], 0);
    world.stub.complete(receives[1] + 1, 0);
    let seen = world.poll();
    let [Completion::Received { id: WrId(0), .. }] = seen[..] else {
        panic!("{seen:?}");
    };
    assert_eq!(world.nic.counts().breaches, 2);
    // The other is still out, and comes back when it is flushed.
    world.stub.complete(receives[1], IBV_WC_WR_FLUSH_ERR);
    assert_eq!(world.poll(), [failed(1, Status::Flushed)]);
    let told = world.stub.complaints();
    assert_eq!(told.len(), 1, "{told:?}");
    assert!(told[0].contains("completed 2 work requests"), "{told:?}");
    assert!(world.stub.complaints().is_empty(), "once");
}
