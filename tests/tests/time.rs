//! Deadlines, abandonment, keepalive; clocks that stand still and clocks that leap.

use o2poll_dataplane::endpoint::{EntryOptions, Error, Event, Operation, Submission, Token};
use o2poll_dataplane::memory::PageList;
use o2poll_dataplane::nic::Status;
use o2poll_dataplane::poller::{Order, Reason};
use o2poll_dataplane::pool::Handle;
use o2poll_dataplane::time::{Instant, Ticks};
use o2poll_soft::{Profile, Window};
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
const ALL: [Operation; 4] = [PUT, PUT_ACK, GET, ROUTED_GET];

const TIMEOUT: u64 = 1600;
const ABANDON: u64 = 2400;
/// A round of the clock's hand, and the few steps that things take.
const SLACK: u64 = TIMEOUT / 8 + 20;

const TOLD: EntryOptions = EntryOptions::PUT
    .union(EntryOptions::GET)
    .union(EntryOptions::EVENTS);

fn setup() -> Setup {
    let mut setup = Setup::new(Profile::frwr());
    setup.timeout = TIMEOUT;
    setup.abandon = ABANDON;
    setup
}

fn start(world: &mut World, connection: Handle, token: u64, operation: Operation, length: u32) {
    let memory = world.nodes[1].arena.flat(length, 0);
    memory.write_at(0, &noise(length, 9));
    let request = World::request(connection, token, 7, 0, operation, memory);
    world.nodes[1].submit(request);
}

fn done(world: &mut World) -> (Result<u32, Error>, &'static mut PageList<'static>) {
    match world.event(1) {
        Event::Done {
            outcome, memory, ..
        } => (outcome, memory),
        other => panic!("{other:?}"),
    }
}

fn run(world: &mut World, steps: u64) {
    for _ in 0..steps {
        world.step();
    }
}

/// Node 0 exports under EVENTS and takes no events, so that it answers nothing until somebody listens.
fn deaf_target() -> (World, [Handle; 2]) {
    let mut setup = setup();
    // One slot for the end of the entry, three for the events that still fit.
    setup.events = 4;
    setup.shape.entries = 1;
    let mut world = World::new(setup);
    let connection = world.connect();
    let memory = world.nodes[0].arena.flat(9000, 0);
    memory.write_at(0, &noise(9000, 4));
    world.export(0, 7, TOLD, memory);
    for _ in 0..3 {
        start(&mut world, connection[1], 99, PUT, 1);
        assert_eq!(done(&mut world).0, Ok(1));
    }
    world.settle();
    (world, connection)
}

/// Its application takes the events of the three PUTs.
fn listen(world: &mut World) {
    for _ in 0..3 {
        assert!(matches!(world.event(0), Event::Landed(landed) if landed.outcome == Ok(1)));
    }
}

#[test]
fn a_deadline_passes_at_the_default_or_at_the_requests_own() {
    for own in [None, Some(300_u64), Some(5000), Some(0)] {
        let mut world = World::new(setup());
        let connection = world.connect();
        // Nothing is exported: a GET in a message is dropped there.
        let memory = world.nodes[1].arena.flat(100, 0);
        let mut request = World::request(connection[1], 1, 7, 0, GET, memory);
        if let Submission::Transfer(request) = &mut request {
            request.timeout = own.map(Ticks);
        }
        world.nodes[1].submit(request);
        let from = world.now;
        assert_eq!(done(&mut world).0, Err(Error::TimedOut));
        let took = world.now.since(from).0;
        let timeout = own.unwrap_or(TIMEOUT);
        assert!(took >= timeout && took <= timeout + SLACK, "{took} {own:?}");
        assert_eq!(world.nodes[1].counters.timeouts.get(), 1);
        world.rest();
        assert!(world.nodes.iter().all(|node| node.gone.is_empty()));
        world.end();
    }
}

#[test]
fn a_late_answer_ends_an_abandoned_transfer_quietly() {
    for operation in [PUT, PUT_ACK, GET] {
        let (mut world, connection) = deaf_target();
        start(&mut world, connection[1], 1, operation, 9000);
        run(&mut world, TIMEOUT + ABANDON / 2);
        // Its time is over, and its memory is not back: the peer may still come.
        assert_eq!(world.nodes[1].counters.timeouts.get(), 1);
        assert!(world.nodes[1].events.pop().is_none());
        let key = u64::from(operation == GET);
        assert_eq!(world.nodes[1].counters.keys_alive.get(), key);
        listen(&mut world);
        let (outcome, memory) = done(&mut world);
        assert_eq!(outcome, Err(Error::TimedOut), "{operation:?}");
        assert_eq!(memory.length(), 9000);
        assert_eq!(world.nodes[1].counters.keys_alive.get(), 0);
        assert!(matches!(world.event(0), Event::Landed(landed) if landed.outcome == Ok(9000)));
        world.rest();
        // The connection is as good as new.
        start(&mut world, connection[1], 2, GET, 9000);
        assert_eq!(done(&mut world).0, Ok(9000));
        assert!(world.nodes.iter().all(|node| node.gone.is_empty()));
        world.end();
    }
}

/// No key is out: the memory is free at the deadline, and what comes later touches nothing.
#[test]
fn a_late_reply_is_turned_down_and_touches_nothing() {
    for length in [100, 9000] {
        let (mut world, connection) = deaf_target();
        start(&mut world, connection[1], 1, ROUTED_GET, length);
        let from = world.now;
        let (outcome, memory) = done(&mut world);
        assert_eq!(outcome, Err(Error::TimedOut));
        assert!(world.now.since(from).0 <= TIMEOUT + SLACK);
        listen(&mut world);
        world.rest();
        assert!(world.nodes[0].events.pop().is_some());
        assert_eq!(world.nodes[1].counters.unknown_replies.get(), 1);
        let mut there = vec![0; length as usize];
        memory.read_at(0, &mut there);
        assert!(there == noise(length, 9));
        assert!(world.nodes.iter().all(|node| node.gone.is_empty()));
        world.end();
    }
}

#[test]
fn the_abandon_limit_closes_the_connection_and_only_then_the_memory_comes() {
    for operation in [PUT, PUT_ACK, GET] {
        let (mut world, connection) = deaf_target();
        world.nodes[1].keep_broken = true;
        start(&mut world, connection[1], 1, operation, 9000);
        let from = world.now;
        run(&mut world, 1000);
        // Younger, so not over when the older one's limit is.
        start(&mut world, connection[1], 2, GET, 8000);
        assert!(world.until(10_000, |world| !world.nodes[1].broken.is_empty()));
        let took = world.now.since(from).0;
        assert!(
            (TIMEOUT + ABANDON..=TIMEOUT + ABANDON + 2 * SLACK).contains(&took),
            "{took}"
        );
        // What had no key out is free; what had waits for its window to be destroyed.
        run(&mut world, 2000);
        let keys = usize::from(operation == GET) + 1;
        assert_eq!(world.nodes[1].broken.len(), keys);
        if operation != GET {
            let Some(Event::Done { token, outcome, .. }) = world.nodes[1].events.pop() else {
                panic!("no event");
            };
            assert_eq!((token, outcome), (Token(1), Err(Error::TimedOut)));
        }
        assert!(world.nodes[1].events.pop().is_none());
        assert_eq!(world.nodes[1].events.due(), u32::try_from(keys).unwrap());
        assert_eq!(world.nodes[1].gone, [(connection[1], Reason::TimedOut)]);
        let broken = core::mem::take(&mut world.nodes[1].broken);
        for (_destroyed, of) in broken {
            let window = Window::new(0);
            world.nodes[1].order(Order::Window { window, of });
            let Event::Done { token, outcome, .. } = world.event(1) else {
                panic!("not done");
            };
            // The younger one was past its deadline, too: it says so.
            let expected = Err(Error::TimedOut);
            assert_eq!(outcome, expected, "{token:?}");
        }
        // A new connection of the same nodes does what the old one did.
        while world.nodes[0].events.pop().is_some() {}
        assert!(world.until(1000, |world| {
            while world.nodes[0].events.pop().is_some() {}
            !world.nodes[0].gone.is_empty()
        }));
        let again = world.connect();
        assert_ne!(again, connection);
        start(&mut world, connection[1], 3, GET, 9000);
        assert_eq!(done(&mut world).0, Err(Error::NotConnected));
        start(&mut world, again[1], 4, GET, 9000);
        assert_eq!(done(&mut world).0, Ok(9000));
        world.nodes[1].keep_broken = false;
        world.end();
    }
}

#[test]
fn a_peer_that_stops_polling_is_noticed_and_everything_comes_back() {
    for operation in ALL {
        for length in [100, 9000] {
            for after in 0..25 {
                let mut setup = setup();
                setup.profile.ack_timeout = 100;
                setup.profile.slice = 1000;
                let mut world = World::new(setup);
                let connection = world.connect();
                let memory = world.nodes[0].arena.flat(9000, 0);
                world.export(0, 7, TOLD, memory);
                for token in 0..12 {
                    start(&mut world, connection[1], token, operation, length);
                }
                run(&mut world, after);
                world.asleep[0] = true;
                let mut broken = 0;
                for _ in 0..12 {
                    match done(&mut world).0 {
                        Ok(bytes) => assert_eq!(bytes, length),
                        Err(Error::ConnectionClosed | Error::TimedOut) => broken += 1,
                        other => panic!("{other:?}"),
                    }
                }
                assert!(world.until(20_000, |world| {
                    broken == 0 || !world.nodes[1].gone.is_empty()
                }));
                if broken != 0 {
                    let why = world.nodes[1].gone[0].1;
                    let expected = [
                        Reason::Device(Status::RetryExceeded),
                        Reason::Device(Status::Flushed),
                        Reason::TimedOut,
                    ];
                    assert!(expected.contains(&why), "{why:?}");
                    let left = world.nodes[1].poller.leftovers();
                    assert_eq!((left.connections, left.transfers), (0, 0));
                }
                world.asleep[0] = false;
                world.end();
            }
        }
    }
}

/// The other way round: the initiator of a PUT stops between PUT_ACK and PUT_DONE.
#[test]
fn an_entrys_memory_comes_back_from_a_peer_that_never_writes() {
    let mut world = World::new(setup());
    let connection = world.connect();
    let memory = world.nodes[0].arena.flat(9000, 0);
    let entry = world.export(0, 7, TOLD, memory);
    start(&mut world, connection[1], 1, PUT_ACK, 9000);
    while world.nodes[0].counters.keys_alive.get() == 0 {
        for asleep in [[true, false], [false, true]] {
            world.asleep = asleep;
            world.step();
        }
    }
    world.nodes[0].submit(Submission::Detach { entry });
    run(&mut world, TIMEOUT + ABANDON - SLACK);
    assert!(world.nodes[0].events.pop().is_none(), "its key is out");
    assert!(world.nodes[0].gone.is_empty());
    run(&mut world, 3 * SLACK);
    assert_eq!(world.nodes[0].counters.connections_ended.get(), 1);
    assert!(world.nodes[0].events.pop().is_none(), "not drained");
    world.asleep = [false; 2];
    match world.event(0) {
        Event::Landed(landed) => assert_eq!(landed.outcome, Err(Error::TimedOut)),
        other => panic!("{other:?}"),
    }
    assert!(matches!(
        world.event(0),
        Event::Detached { entry: Some(entry), why: None } if entry.memory.length() == 9000
    ));
    assert_eq!(world.nodes[0].rebuilt, 1);
    assert_eq!(done(&mut world).0, Err(Error::ConnectionClosed));
    world.end();
}

#[test]
fn an_idle_connection_is_kept_alive_and_a_busy_one_needs_nothing() {
    let mut setup = setup();
    setup.keepalive = 500;
    let mut world = World::new(setup);
    let connection = world.connect();
    let memory = world.nodes[0].arena.flat(100, 0);
    world.export(0, 7, TOLD ^ EntryOptions::EVENTS, memory);
    run(&mut world, 7000);
    for node in &mut world.nodes {
        let noops = node.poller.nic().last().sent("NOOP");
        assert!((7000 / (500 + SLACK)..=14).contains(&noops), "{noops}");
    }
    let before = [0, 1].map(|at| world.nodes[at].counters.noops.get());
    for token in 0..35 {
        start(&mut world, connection[1], token, PUT_ACK, 100);
        assert_eq!(done(&mut world).0, Ok(100));
        run(&mut world, 200);
    }
    let after = [0, 1].map(|at| world.nodes[at].counters.noops.get());
    assert_eq!(before, after);
    assert_eq!(
        world.nodes[0].poller.nic().last().received["NOOP"],
        before[1]
    );
    world.end();
}

#[test]
fn a_clock_that_stands_still_changes_nothing_but_time() {
    let mut world = World::new(setup());
    world.tick = 0;
    let connection = world.connect();
    let memory = world.nodes[0].arena.flat(9000, 0);
    world.export(0, 7, TOLD, memory);
    for operation in ALL {
        for length in [0, 100, 9000] {
            start(&mut world, connection[1], 1, operation, length);
            assert_eq!(done(&mut world).0, Ok(length));
            assert!(matches!(world.event(0), Event::Landed(_)));
        }
    }
    // Never answered, and never over.
    let memory = world.nodes[1].arena.flat(10, 0);
    let request = World::request(connection[1], 1, 8, 0, GET, memory);
    world.nodes[1].submit(request);
    run(&mut world, 10 * TIMEOUT);
    assert_eq!((world.nodes[1].events.due(), world.now), (1, Instant(1)));
    world.end();
}

#[test]
fn leaps_of_the_clock_break_nothing() {
    let leaps = [1, 1 << 20, 1 << 40, u64::MAX / 2, u64::MAX];
    for (leap, patient) in leaps
        .into_iter()
        .flat_map(|leap| [(leap, true), (leap, false)])
    {
        for after in 0..30 {
            let mut setup = setup();
            setup.keepalive = 500;
            if patient {
                setup.timeout = u64::MAX;
                setup.abandon = u64::MAX;
            }
            let mut world = World::new(setup);
            let connection = world.connect();
            let memory = world.nodes[0].arena.flat(9000, 0);
            world.export(0, 7, TOLD ^ EntryOptions::EVENTS, memory);
            for (token, operation) in (0..).zip(ALL) {
                start(&mut world, connection[1], token, operation, 9000);
            }
            run(&mut world, after);
            world.now = world.now.after(Ticks(leap));
            for _ in ALL {
                let outcome = done(&mut world).0;
                let over = [Err(Error::TimedOut), Err(Error::ConnectionClosed)];
                assert!(
                    outcome == Ok(9000) || !patient && leap > 1 && over.contains(&outcome)
                        // At the end of time every deadline has come.
                        || leap == u64::MAX && over.contains(&outcome),
                    "{leap} {patient} {outcome:?}"
                );
            }
            world.end();
        }
    }
}

#[test]
fn an_end_at_any_moment_gives_everything_back() {
    for after in 0..70 {
        for close in [false, true] {
            let mut setup = setup();
            setup.profile.slice = 1000;
            setup.shape.windows = 3;
            let mut world = World::new(setup);
            let connection = world.connect();
            for of in 0..2 {
                let memory = world.nodes[of].arena.flat(9000, 0);
                world.export(of, 7, TOLD, memory);
            }
            for (token, operation) in (0..16).zip(ALL.into_iter().cycle()) {
                for (of, connection) in connection.into_iter().enumerate() {
                    let memory = world.nodes[of].arena.flat(9000, 0);
                    let request = World::request(connection, token, 7, 0, operation, memory);
                    world.nodes[of].submit(request);
                }
            }
            run(&mut world, after);
            if close {
                // One side closes; the other learns it from its device.
                let connection = connection[0];
                world.nodes[0].order(Order::Close { connection });
                let mut ended = 0;
                world.until(20_000, |world| {
                    for node in &mut world.nodes {
                        while let Some(event) = node.events.pop() {
                            ended += u32::from(matches!(event, Event::Done { .. }));
                        }
                    }
                    world.nodes.iter().all(|node| !node.gone.is_empty())
                        && world.nodes.iter().all(|node| node.events.due() == 0)
                });
                assert_eq!(ended, 32, "{}", world.picture());
                assert_eq!(world.nodes[0].gone[0].1, Reason::Closed);
            }
            world.end();
        }
    }
}
