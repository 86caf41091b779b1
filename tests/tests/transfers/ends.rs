//! How transfers end that do not end well, and that their connection, or the next one, is as good as new.

use o2poll_dataplane::endpoint::{EntryOptions, Error, Event, Operation, Submission, Token};
use o2poll_dataplane::memory::PageList;
use o2poll_dataplane::poller::{Order, Reason};
use o2poll_dataplane::pool::Handle;
use o2poll_dataplane::time::Ticks;
use o2poll_tests::lend::alone;
use o2poll_tests::plot::noise;
use o2poll_tests::{Backend, Cut, Job, Jobs, Setup, World};

const PUT: Operation = Operation::Put {
    hdr_data: 0,
    ack: false,
};
const PUT_ACK: Operation = Operation::Put {
    hdr_data: 0,
    ack: true,
};
const GET: Operation = Operation::Get { optimized: true };
const LENGTH: u32 = 9000;

/// Node 0 exports under EVENTS and takes no events, so that it answers nothing until somebody listens.
fn deaf_target<B: Backend>() -> (World<B>, [Handle; 2]) {
    let mut setup = Setup::new(B::plain());
    // One slot for the end of the entry, three for the events that still fit.
    setup.events = 4;
    setup.shape.entries = 1;
    setup.memory = 4 << 20;
    let mut world = B::world([setup; 2]);
    let connection = world.connect();
    let memory = world.nodes[0].arena.flat(LENGTH, 0);
    memory.write_at(0, &noise(LENGTH, 4));
    let options = EntryOptions::PUT | EntryOptions::GET | EntryOptions::EVENTS;
    world.export(0, 7, options, memory);
    for _ in 0..3 {
        start(&mut world, connection[1], 99, PUT, 1);
        assert_eq!(done(&mut world).0, Ok(1));
    }
    world.rest();
    (world, connection)
}

/// A peer that says good-bye has often sent something just before.
pub(crate) fn what_has_arrived_is_taken_before_the_order_that_closes_its_connection<B: Backend>() {
    let mut world = B::world([Setup::new(B::plain()); 2]);
    let connection = world.connect();
    let memory = world.nodes[0].arena.flat(LENGTH, 0);
    world.export(0, 7, EntryOptions::PUT | EntryOptions::EVENTS, memory);
    world.asleep[0] = true;
    start(&mut world, connection[1], 1, PUT, 64);
    for _ in 0..200 {
        world.step();
        if B::REAL {
            std::thread::sleep(core::time::Duration::from_millis(1));
        }
    }
    world.nodes[0].order(Order::Close {
        connection: connection[0],
    });
    world.asleep[0] = false;
    let event = world.event(0);
    assert!(matches!(event, Event::Landed { .. }), "{event:?}");
    world.end();
}

fn start<B: Backend>(
    world: &mut World<B>,
    connection: Handle,
    token: u64,
    operation: Operation,
    length: u32,
) {
    let memory = world.nodes[1].arena.flat(length, 0);
    memory.write_at(0, &noise(length, 9));
    let request = World::request(connection, token, 7, 0, operation, memory);
    world.nodes[1].submit(request);
}

fn done<B: Backend>(world: &mut World<B>) -> (Result<u32, Error>, &'static mut PageList<'static>) {
    match world.event(1) {
        Event::Done {
            outcome, memory, ..
        } => (outcome, memory),
        other => panic!("{other:?}"),
    }
}

/// Lets the clock of both nodes leap.
fn leap<B: Backend>(world: &mut World<B>, ticks: u64) {
    world.now = world.now.after(Ticks(ticks));
}

/// Until the request has come to the target, which holds it.
fn arrived<B: Backend>(world: &mut World<B>) {
    let came = world.until(10_000, |world| {
        let heard = world.nodes[0].poller.nic().last();
        ["GET_REQ", "PUT_REQ"]
            .iter()
            .any(|kind| heard.received.contains_key(kind))
    });
    assert!(came, "no request: {}", world.picture());
}

/// Its application takes the events of the three PUTs.
fn listen<B: Backend>(world: &mut World<B>) {
    for _ in 0..3 {
        assert!(matches!(world.event(0), Event::Landed(landed) if landed.outcome == Ok(1)));
    }
}

/// Past the deadline of the transfer of node 1.
fn time_out<B: Backend>(world: &mut World<B>) {
    let timeout = world.setup().timeout;
    leap(world, timeout);
    let over = world.until(10_000, |world| world.nodes[1].counters.timeouts.get() != 0);
    assert!(over, "no timeout: {}", world.picture());
}

fn has_none<B: Backend>(world: &mut World<B>) {
    for _ in 0..1000 {
        world.step();
        assert!(
            world.nodes[1].events.pop().is_none(),
            "the peer may come yet"
        );
    }
}

pub(crate) fn a_late_answer_ends_a_transfer_that_timed_out_quietly<B: Backend>() {
    for operation in [PUT, PUT_ACK, GET] {
        alone(|| {
            let (mut world, connection) = deaf_target::<B>();
            start(&mut world, connection[1], 1, operation, LENGTH);
            arrived(&mut world);
            time_out(&mut world);
            // Its time is over, and its memory is not back.
            has_none(&mut world);
            let key = u64::from(operation == GET);
            assert_eq!(world.nodes[1].counters.keys_alive.get(), key);
            listen(&mut world);
            let (outcome, memory) = done(&mut world);
            assert_eq!(outcome, Err(Error::TimedOut), "{operation:?}");
            assert_eq!(memory.length(), u64::from(LENGTH));
            assert_eq!(world.nodes[1].counters.keys_alive.get(), 0);
            let event = world.event(0);
            assert!(matches!(event, Event::Landed(landed) if landed.outcome == Ok(LENGTH)));
            world.rest();
            start(&mut world, connection[1], 2, GET, LENGTH);
            assert_eq!(done(&mut world).0, Ok(LENGTH));
            assert!(!world.has_ended());
            world.end();
        });
    }
}

pub(crate) fn a_cancelled_transfer_keeps_its_memory_until_its_key_is_dead<B: Backend>() {
    for operation in [PUT, PUT_ACK, GET] {
        alone(|| {
            let (mut world, connection) = deaf_target::<B>();
            start(&mut world, connection[1], 1, operation, LENGTH);
            arrived(&mut world);
            let token = Token(1);
            world.nodes[1].submit(Submission::Cancel { token });
            if operation == GET {
                has_none(&mut world);
            }
            listen(&mut world);
            assert_eq!(done(&mut world).0, Err(Error::Cancelled), "{operation:?}");
            assert_eq!(world.nodes[1].counters.keys_alive.get(), 0);
            world.rest();
            assert!(!world.has_ended());
            world.end();
        });
    }
}

pub(crate) fn the_abandon_limit_costs_the_connection_and_the_next_one_works<B: Backend>() {
    for operation in [PUT, PUT_ACK, GET] {
        alone(|| {
            let (mut world, connection) = deaf_target::<B>();
            start(&mut world, connection[1], 1, operation, LENGTH);
            arrived(&mut world);
            time_out(&mut world);
            let abandon = world.setup().abandon;
            leap(&mut world, abandon);
            // For a GET: when the window that its key was on has been destroyed.
            assert_eq!(done(&mut world).0, Err(Error::TimedOut), "{operation:?}");
            assert_eq!(world.nodes[1].gone, [(connection[1], Reason::TimedOut)]);
            assert_eq!(world.nodes[1].rebuilt, usize::from(operation == GET));
            assert_eq!(world.nodes[1].counters.keys_alive.get(), 0);
            assert!(world.until(100_000, |world| {
                while world.nodes[0].events.pop().is_some() {}
                !world.nodes[0].gone.is_empty()
            }));
            works_again(&mut world, connection[1], 7);
            world.end();
        });
    }
}

/// Over a new connection, and not over the old one.
fn works_again<B: Backend>(world: &mut World<B>, old: Handle, bits: u64) {
    let again = world.connect();
    assert_ne!(again[1], old);
    for (connection, expected) in [
        (old, Err(Error::NotConnected)),
        (again[1], Ok(LENGTH)),
        (again[1], Ok(LENGTH)),
    ] {
        let memory = world.nodes[1].arena.flat(LENGTH, 9);
        let request = World::request(connection, 1000, bits, 0, GET, memory);
        world.nodes[1].submit(request);
        assert_eq!(done(world).0, expected);
    }
}

pub(crate) fn a_connection_that_one_side_ends_in_the_middle_ends_every_transfer_once<B: Backend>() {
    for (closes, after) in [(0, 1), (1, 20), (0, 100), (1, 400)] {
        alone(|| {
            let mut setup = Setup::new(B::plain());
            setup.memory = 6 << 20;
            setup.shape.entries = 16;
            setup.profile.ack_timeout = 300;
            let mut world = B::world([setup; 2]);
            let connection = world.connect();
            let jobs: Vec<Job> = [PUT, PUT_ACK, GET, Operation::Get { optimized: false }]
                .into_iter()
                .flat_map(|operation| [(operation, 100), (operation, 200_000)])
                .zip([0, 1, 1, 0, 0, 1, 1, 0])
                .map(|((operation, length), from)| {
                    Job::new(from, operation, length, Cut::flat(1), Cut::flat(4095))
                })
                .collect();
            let mut steps = 0;
            Jobs::run_through(&mut world, connection, &jobs, |world| {
                steps += 1;
                if steps == after {
                    let connection = connection[closes];
                    world.nodes[closes].order(Order::Close { connection });
                }
            });
            if steps < after {
                let connection = connection[closes];
                world.nodes[closes].order(Order::Close { connection });
            }
            if !B::REAL && world.nodes[1 - closes].gone.is_empty() {
                // As a DREQ would have it.
                let connection = connection[1 - closes];
                world.nodes[1 - closes].order(Order::Close { connection });
            }
            assert!(world.until(100_000, |world| {
                world.nodes.iter().all(|node| node.gone.len() == 1)
            }));
            assert_eq!(world.nodes[closes].gone[0].1, Reason::Closed);
            let memory = world.nodes[0].arena.flat(LENGTH, 0);
            world.export(0, 77, EntryOptions::GET, memory);
            works_again(&mut world, connection[1], 77);
            world.end();
        });
    }
}
