//! What happens between adoption and establishment.

use o2poll_dataplane::endpoint::{EntryOptions, Event, Operation};
use o2poll_soft::Profile;
use o2poll_tests::plot::noise;
use o2poll_tests::{Setup, World};

const PUT: Operation = Operation::Put {
    hdr_data: 0,
    ack: false,
};
const PUT_ACK: Operation = Operation::Put {
    hdr_data: 0,
    ack: true,
};
const GET: Operation = Operation::Get { optimized: true };
const ROUTED_GET: Operation = Operation::Get { optimized: false };

fn world() -> World {
    let mut world = World::new(Setup::new(Profile::frwr()));
    for of in 0..2 {
        let memory = world.nodes[of].arena.flat(9000, 0);
        memory.write_at(0, &noise(9000, 2));
        let options = EntryOptions::PUT | EntryOptions::GET;
        world.export(of, 7, options, memory);
    }
    world
}

fn done(world: &mut World, of: usize) -> Option<u32> {
    world.nodes[of].events.pop().map(|event| match event {
        Event::Done { outcome, .. } => outcome.expect("it goes well"),
        other => panic!("{other:?}"),
    })
}

/// LU-10800: the accepting side is up first, and its messages wait where the terms are not known yet.
#[test]
fn messages_before_the_terms_wait_and_none_is_lost() {
    let mut world = world();
    let [near, far] = world.adopt(8);
    world.establish(1, far, 8);
    let mut submitted = 0;
    for operation in [PUT_ACK, GET, ROUTED_GET] {
        for length in [100, 9000] {
            let memory = world.nodes[1].arena.flat(length, 0);
            let request = World::request(far, 1, 7, 0, operation, memory);
            world.nodes[1].submit(request);
            submitted += 1;
        }
    }
    assert!(!world.until(1000, |world| done(world, 1).is_some()));
    let heard = world.nodes[0].poller.nic().last();
    assert!(heard.sent.is_empty() && !heard.received.is_empty());
    world.establish(0, near, 8);
    for _ in 0..submitted {
        assert!(world.until(1000, |world| done(world, 1).is_some()));
    }
    world.rest();
    world.end();
}

/// LU-8303: the RTU is lost, so nobody tells the accepting side that it is up.
#[test]
fn a_lost_rtu_stalls_nobody() {
    let mut world = world();
    let [near, far] = world.adopt(8);
    world.establish(0, near, 8);
    for round in 0..10 {
        for operation in [PUT, PUT_ACK, GET, ROUTED_GET] {
            for length in [100, 9000] {
                let memory = world.nodes[0].arena.flat(length, 0);
                let request = World::request(near, round, 7, 0, operation, memory);
                world.nodes[0].submit(request);
                assert!(
                    world.until(1000, |world| done(world, 0).is_some()),
                    "{round} {operation:?}"
                );
            }
        }
    }
    // Twenty in a row that nothing goes back for.
    for round in 0..20 {
        let memory = world.nodes[0].arena.flat(1, 0);
        world.nodes[0].submit(World::request(near, round, 7, 0, PUT, memory));
        assert!(world.until(1000, |world| done(world, 0).is_some()));
    }
    world.rest();
    // When it is told at last, nothing is counted anew.
    world.establish(1, far, 8);
    world.rest();
    world.end();
}
