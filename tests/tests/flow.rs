//! Flow control: windows are never overrun, nobody waits for ever, and credits come back.
//!
//! The tap of every node panics at a message that oversteps the credits it has heard of; `rest` compares both
//! sides' accounts. What is left to these tests is to fill the windows.

use o2poll_dataplane::endpoint::{EntryOptions, Event, Operation, Submission, Token};
use o2poll_dataplane::memory::PageList;
use o2poll_dataplane::pool::Handle;
use o2poll_soft::Profile;
use o2poll_tests::plot::noise;
use o2poll_tests::{Setup, World};

type List = &'static mut PageList<'static>;

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

const SMALL: u32 = 100;
const LARGE: u32 = 6000;

/// What each node keeps doing to the other.
const MIXES: [&[(Operation, u32)]; 7] = [
    &[(GET, SMALL)],
    &[(PUT_ACK, SMALL)],
    &[(PUT, SMALL)],
    &[(PUT_ACK, LARGE)],
    &[(GET, LARGE)],
    &[(ROUTED_GET, LARGE)],
    &[
        (GET, SMALL),
        (PUT_ACK, LARGE),
        (ROUTED_GET, LARGE),
        (PUT, SMALL),
        (GET, LARGE),
        (PUT_ACK, SMALL),
        (PUT, LARGE),
        (ROUTED_GET, SMALL),
    ],
];

fn setup(depth: u16) -> Setup {
    let mut setup = Setup::new(Profile::frwr());
    setup.shape.queue_depth = depth;
    setup.shape.connections = 1;
    setup.shape.waiting = 16;
    setup.shape.entries = 1;
    setup.memory = 16 << 20;
    setup
}

/// Both nodes keep `busy` transfers going until each has done `total`, and every sixteenth step one of them
/// does not run at all.
fn flood(
    world: &mut World,
    connection: [Handle; 2],
    mix: &[(Operation, u32)],
    busy: usize,
    total: u64,
) {
    let mut spare: [Vec<List>; 2] = [0, 1].map(|at| {
        let arena = &mut world.nodes[at].arena;
        (0..busy).map(|_| arena.flat(LARGE, 1)).collect()
    });
    let (mut begun, mut done) = ([0_u64; 2], [0_u64; 2]);
    let mut idle = 0_u32;
    while done != [total; 2] {
        idle += 1;
        assert!(
            idle < 20_000,
            "stuck at {done:?} of {total}: {}",
            world.picture()
        );
        for at in 0..2 {
            while begun[at] < total
                && world.nodes[at].submissions.free() != 0
                && let Some(memory) = spare[at].pop()
            {
                let token = begun[at];
                let (operation, length) = mix[usize::try_from(token).unwrap() % mix.len()];
                let memory = cut(memory, length);
                world.nodes[at].submit(World::request(
                    connection[at],
                    token,
                    7,
                    0,
                    operation,
                    memory,
                ));
                begun[at] += 1;
            }
        }
        world.step();
        for at in 0..2 {
            while let Some(event) = world.nodes[at].events.pop() {
                match event {
                    Event::Done {
                        token: Token(token),
                        outcome,
                        memory,
                    } => {
                        let (_, length) = mix[usize::try_from(token).unwrap() % mix.len()];
                        assert_eq!(outcome, Ok(length));
                        spare[at].push(whole(world, at, memory));
                        done[at] += 1;
                        idle = 0;
                    }
                    Event::Landed(_) => idle = 0,
                    other => panic!("{other:?}"),
                }
            }
        }
    }
}

/// A list of the first bytes of a flat one. The rest is lost to the test.
fn cut(memory: List, length: u32) -> List {
    if memory.length() <= u64::from(length) {
        return memory;
    }
    let (head, _) = memory.pop().unwrap().split_at(length).unwrap();
    memory.push(head).unwrap();
    memory
}

/// A list of full length again.
fn whole(world: &mut World, of: usize, memory: List) -> List {
    if memory.length() == u64::from(LARGE) {
        memory
    } else {
        world.nodes[of].arena.flat(LARGE, 1)
    }
}

fn export(world: &mut World, options: EntryOptions) {
    for of in 0..2 {
        let memory = world.nodes[of].arena.flat(LARGE, 0);
        memory.write_at(0, &noise(LARGE, 1));
        world.export(of, 7, options, memory);
    }
}

const BOTH: EntryOptions = EntryOptions::PUT.union(EntryOptions::GET);

#[test]
fn full_windows_both_ways_never_deadlock_at_any_depth() {
    for depth in [1, 2, 3, 4, 5, 6, 7, 8, 32, 255] {
        for writes_at_once in [1, 4] {
            for mix in MIXES {
                let mut setup = setup(depth);
                setup.shape.writes_at_once = writes_at_once;
                setup.shape.windows = usize::from(depth);
                setup.events = 1024;
                setup.memory = 32 << 20;
                let mut world = World::new(setup);
                let connection = world.connect();
                export(&mut world, BOTH | EntryOptions::EVENTS);
                let busy = usize::from(depth) * 2;
                flood(&mut world, connection, mix, busy, 3 * u64::from(depth) + 20);
                world.rest();
                if mix.len() > 1 {
                    // The windows were full indeed.
                    for node in &mut world.nodes {
                        let heard = node.poller.nic().last();
                        assert_eq!(heard.most_outstanding, u64::from(depth));
                    }
                }
                assert_eq!(
                    world.end(),
                    [0, 1].map(|_| vec![o2poll_dataplane::poller::Reason::Closed])
                );
            }
        }
    }
}

#[test]
fn one_or_two_windows_are_enough_for_both_directions() {
    for windows in [1, 2, 3] {
        for depth in [1, 2, 8] {
            for mix in MIXES {
                let mut setup = setup(depth);
                setup.shape.windows = windows;
                let mut world = World::new(setup);
                let connection = world.connect();
                export(&mut world, BOTH);
                flood(&mut world, connection, mix, 20, 60);
                world.rest();
                world.end();
            }
        }
    }
}

/// One entry is attached: its end has a slot, and two more are the least with which anything can be asked.
#[test]
fn the_smallest_event_ring_makes_progress_and_loses_no_event() {
    for mix in MIXES {
        for depth in [1, 8] {
            let mut setup = setup(depth);
            setup.events = 4;
            let mut world = World::new(setup);
            let connection = world.connect();
            export(&mut world, BOTH | EntryOptions::EVENTS);
            flood(&mut world, connection, mix, 20, 100);
            world.rest();
            world.end();
        }
    }
}

#[test]
fn the_smaller_of_two_depths_is_kept() {
    for depth in [1, 4, 8] {
        for mix in MIXES {
            let mut setup = setup(8);
            setup.shape.windows = 16;
            let mut world = World::new(setup);
            let connection = world.connect_at(depth);
            export(&mut world, BOTH);
            flood(&mut world, connection, mix, 24, 80);
            world.rest();
            if mix.len() > 1 {
                let heard = world.nodes[0].poller.nic().last();
                assert_eq!(heard.most_outstanding, u64::from(depth));
            }
            world.end();
        }
    }
}

#[test]
fn an_idle_side_returns_credits_at_high_water_and_not_before() {
    let mut world = World::new(setup(8));
    let connection = world.connect();
    export(&mut world, BOTH);
    // PUTs without an ACK: nothing goes back by itself. High water is 4.
    for count in 1..=20_u64 {
        let memory = world.nodes[1].arena.flat(SMALL, 0);
        let request = World::request(connection[1], count, 7, 0, PUT, memory);
        world.nodes[1].submit(request);
        assert!(matches!(
            world.event(1),
            Event::Done {
                outcome: Ok(SMALL),
                ..
            }
        ));
        world.rest();
        let heard = world.nodes[0].poller.nic().last();
        assert_eq!(heard.sent("NOOP"), count / 4);
        assert_eq!(heard.owed, count % 4);
        assert_eq!(world.nodes[0].counters.noops.get(), count / 4);
    }
    // An ACK takes along what is owed.
    for (count, ack) in [(21, PUT), (22, PUT), (23, PUT_ACK)] {
        let memory = world.nodes[1].arena.flat(SMALL, 0);
        let request = World::request(connection[1], count, 7, 0, ack, memory);
        world.nodes[1].submit(request);
        assert!(matches!(world.event(1), Event::Done { .. }));
    }
    world.rest();
    let heard = world.nodes[0].poller.nic().last();
    assert_eq!((heard.sent("NOOP"), heard.owed), (5, 0));
    world.end();
}

/// A GET_REQ's credit is back long before its GET_DONE; what bounds the unanswered ones is their reserve.
#[test]
fn bulk_requests_keep_to_their_reserve() {
    for depth in [1, 2, 4] {
        let mut setup = setup(depth);
        // Data is slow.
        setup.profile.slice = 500;
        let mut world = World::new(setup);
        let connection = world.connect();
        export(&mut world, BOTH);
        let mix = [(GET, LARGE), (GET, LARGE), (ROUTED_GET, LARGE)];
        flood(&mut world, connection, &mix, 16, 60);
        world.rest();
        for node in &mut world.nodes {
            let heard = node.poller.nic().last();
            assert!(heard.most_bulk > u64::from(depth) / 2);
        }
        world.end();
    }
}

/// R10: what the device refused is looked at again by the next poll, whether or not anything happens.
#[test]
fn a_noop_that_the_device_refuses_is_tried_again() {
    let mut world = World::new(setup(8));
    let connection = world.connect();
    export(&mut world, BOTH);
    for count in 1..=4 {
        // The fourth brings node 0 to its high-water mark, and it has nothing else to send.
        if count == 4 {
            world.nodes[0].poller.nic().faults().accept = Some(0);
        }
        let memory = world.nodes[1].arena.flat(SMALL, 0);
        let request = World::request(connection[1], count, 7, 0, PUT, memory);
        world.nodes[1].submit(request);
        assert!(matches!(
            world.event(1),
            Event::Done {
                outcome: Ok(SMALL),
                ..
            }
        ));
        world.settle();
    }
    assert_eq!(world.nodes[0].counters.partial_doorbells.get(), 1);
    assert_eq!(world.nodes[0].poller.nic().last().sent("NOOP"), 1);
    world.rest();
    world.end();
}

#[test]
fn a_burst_waits_for_the_window_and_never_for_the_receiver() {
    let mut world = World::new(setup(8));
    let connection = world.connect();
    export(&mut world, BOTH);
    // The peer does not poll: eight messages are out, the rest waits.
    world.asleep[0] = true;
    for count in 0..16 {
        let memory = world.nodes[1].arena.flat(SMALL, 0);
        let request = World::request(connection[1], count, 7, 0, PUT, memory);
        world.nodes[1].submit(request);
    }
    for _ in 0..1000 {
        world.step();
    }
    assert_eq!(world.nodes[1].poller.nic().last().outstanding, 8);
    assert!(world.nodes[1].events.pop().is_none());
    world.asleep[0] = false;
    for _ in 0..16 {
        assert!(matches!(
            world.event(1),
            Event::Done {
                outcome: Ok(SMALL),
                ..
            }
        ));
    }
    world.rest();
    assert_eq!(world.nodes[1].poller.nic().counts().retries, 0);
    world.end();
}

/// An application that does not look at its events holds its own incoming traffic back, and loses nothing.
#[test]
fn an_application_that_takes_no_events_holds_its_peer_back() {
    let mut setup = setup(4);
    setup.events = 4;
    let mut world = World::new(setup);
    let connection = world.connect();
    export(&mut world, BOTH | EntryOptions::EVENTS);
    for round in 0..6_u64 {
        for (operation, length) in [(PUT, SMALL), (PUT_ACK, LARGE), (GET, LARGE), (GET, SMALL)] {
            let memory = world.nodes[1].arena.flat(length, 0);
            let request = World::request(connection[1], round, 7, 0, operation, memory);
            world.until(100, |world| world.nodes[1].submissions.free() != 0);
            if world.nodes[1].submissions.free() != 0 {
                world.nodes[1].submit(request);
            }
            while world.nodes[1].events.pop().is_some() {}
        }
    }
    for _ in 0..2000 {
        world.step();
        while world.nodes[1].events.pop().is_some() {}
    }
    assert!(world.nodes[0].counters.holds.get() != 0);
    assert!(world.nodes[1].events.due() != 0);
    let mut landed = 0;
    assert!(world.until(5000, |world| {
        while let Some(event) = world.nodes[0].events.pop() {
            assert!(matches!(event, Event::Landed(_)));
            landed += 1;
        }
        while world.nodes[1].events.pop().is_some() {}
        world.nodes[1].events.due() == 0
    }));
    world.rest();
    while world.nodes[0].events.pop().is_some() {
        landed += 1;
    }
    let submitted = world.nodes[1].counters.transfers.get();
    assert_eq!(landed, submitted);
    world.end();
}

/// Cancelled GETs leave REPLYs behind that wait for credits; both sides at once.
#[test]
fn a_storm_of_cancels_leaves_both_windows_whole() {
    for depth in [1, 2, 8] {
        let mut setup = setup(depth);
        setup.timeout = 3000;
        setup.abandon = 100_000;
        let mut world = World::new(setup);
        let connection = world.connect();
        export(&mut world, BOTH);
        let mut ended = 0;
        for round in 0..200_u64 {
            for (at, connection) in connection.into_iter().enumerate() {
                let operation = [GET, ROUTED_GET, PUT_ACK][(round % 3) as usize];
                let length = [SMALL, LARGE][(round / 3 % 2) as usize];
                let memory = world.nodes[at].arena.flat(length, 0);
                let request = World::request(connection, round, 7, 0, operation, memory);
                world.until(100_000, |world| world.nodes[at].submissions.free() > 1);
                world.nodes[at].submit(request);
            }
            for _ in 0..round % 5 {
                world.step();
            }
            for at in 0..2 {
                let token = Token(round);
                world.nodes[at].submit(Submission::Cancel { token });
            }
            for node in &mut world.nodes {
                while node.events.pop().is_some() {
                    ended += 1;
                }
            }
        }
        world.until(100_000, |world| {
            for node in &mut world.nodes {
                while node.events.pop().is_some() {
                    ended += 1;
                }
            }
            ended == 400
        });
        assert_eq!(ended, 400, "{}", world.picture());
        world.until(10_000, |_| false);
        world.rest();
        flood(&mut world, connection, MIXES[6], 8, 40);
        assert!(world.nodes.iter().all(|node| node.gone.is_empty()));
        world.end();
    }
}
