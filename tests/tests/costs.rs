//! What a PUT and a GET cost in messages, work requests, doorbells and half trips, counted on the software device and
//! compared with the table in `costs.md`. `O2POLL_UPDATE=1` writes the table anew.

use core::fmt::Write;
use std::path::Path;

use o2poll_dataplane::endpoint::{EntryOptions, Event, Operation};
use o2poll_soft::Profile;
use o2poll_tests::{Cut, Plot, Setup, World};

const SMALL: u32 = 100;
const BULK: u32 = 100_000;

const TRANSFERS: [(&str, Operation, u32); 7] = [
    ("small PUT", put(false), SMALL),
    ("small PUT, acknowledged", put(true), SMALL),
    ("small GET", get(true), SMALL),
    ("bulk PUT", put(false), BULK),
    ("bulk PUT, acknowledged", put(true), BULK),
    ("bulk GET", get(true), BULK),
    ("bulk GET answered by a REPLY", get(false), BULK),
];

const fn put(ack: bool) -> Operation {
    Operation::Put { hdr_data: 0, ack }
}

const fn get(optimized: bool) -> Operation {
    Operation::Get { optimized }
}

/// Of one transfer, initiator and target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cost {
    messages: [u64; 2],
    work_requests: [u64; 2],
    doorbells: [u64; 2],
    /// Until the initiator's application is told.
    half_trips: u32,
    /// Until the target's is.
    landed: u32,
    remote_invalidations: u64,
}

/// How the data's writer says that it is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Done,
    KillingDone,
    Immediate,
}

const ENDS: [(&str, End); 3] = [
    ("none, as toward a kernel", End::Done),
    ("DONE as SEND_WITH_INV", End::KillingDone),
    ("last data as WRITE_WITH_IMM", End::Immediate),
];

fn count(operation: Operation, length: u32, end: End) -> Cost {
    let mut setup = Setup::new(Profile::frwr());
    setup.kill_keys = end == End::KillingDone;
    setup.write_immediates = end == End::Immediate;
    let mut world = World::new(setup);
    let [connection, _] = world.connect();
    let (far, _) = Plot::new(&mut world.nodes[1].arena, length, Cut::flat(0));
    let options = EntryOptions::PUT | EntryOptions::GET | EntryOptions::EVENTS;
    world.export(1, 7, options, far);
    let (near, _) = Plot::new(&mut world.nodes[0].arena, length, Cut::flat(0));
    world.settle();
    let counters = |world: &World| {
        [0, 1].map(|of| {
            let counters = world.nodes[of].counters;
            [
                counters.messages_sent.get(),
                counters.work_requests.get(),
                counters.doorbells.get(),
                counters.remote_invalidations.get(),
            ]
        })
    };
    let before = counters(&world);
    let request = World::request(connection, 1, 7, 0, operation, near);
    world.nodes[0].submit(request);
    // One node at a time runs until it is quiet: what crosses the wire does so when they change over.
    let (mut half_trips, mut landed) = (None, None);
    for crossings in 0..10 {
        let awake = (crossings % 2) as usize;
        world.asleep = [awake != 0, awake != 1];
        world.settle();
        while let Some(event) = world.nodes[awake].events.pop() {
            match event {
                Event::Done { outcome, .. } => {
                    assert_eq!(outcome, Ok(length));
                    half_trips.get_or_insert(crossings);
                }
                Event::Landed(_) => {
                    landed.get_or_insert(crossings);
                }
                _ => panic!("{event:?}"),
            }
        }
    }
    world.asleep = [false; 2];
    world.settle();
    let after = counters(&world);
    world.end();
    let each = |what: usize| [0, 1].map(|of| after[of][what] - before[of][what]);
    Cost {
        messages: each(0),
        work_requests: each(1),
        doorbells: each(2),
        half_trips: half_trips.expect("it ended"),
        landed: landed.expect("it landed"),
        remote_invalidations: each(3).iter().sum(),
    }
}

fn table() -> String {
    let mut text = String::from(
        "# What a transfer costs\n\n\
         Counted on the software device by `tests/tests/costs.rs`, which fails when this page is no longer true. `a + b`: initiator + \
         target. A half trip is one crossing of the wire that the next step waits for; the last two columns are half trips until \
         the initiator's application, and the target's, is told. Memory in one piece; a WRITE more for every further piece beyond \
         the device's gather list, or fragment of the peer's.\n\n\
         | transfer | extension | messages | work requests | doorbells | initiator told | target told |\n\
         |---|---|---|---|---|---|---|\n",
    );
    for (name, operation, length) in TRANSFERS {
        let plain = count(operation, length, End::Done);
        for (extension, end) in ENDS {
            let cost = count(operation, length, end);
            if end != End::Done && cost == plain {
                continue;
            }
            let pair = |[a, b]: [u64; 2]| format!("{a} + {b}");
            writeln!(
                text,
                "| {name} | {extension} | {} | {} | {} | {} | {} |",
                pair(cost.messages),
                pair(cost.work_requests),
                pair(cost.doorbells),
                cost.half_trips,
                cost.landed,
            )
            .expect("a string takes all");
        }
    }
    text
}

#[test]
fn the_table_of_costs_is_what_is_counted() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/costs.md");
    let counted = table();
    if std::env::var_os("O2POLL_UPDATE").is_some() {
        std::fs::write(&path, &counted).expect("the table can be written");
    }
    let kept = std::fs::read_to_string(&path).expect("the table is kept beside the test");
    assert_eq!(
        kept, counted,
        "run this test with O2POLL_UPDATE=1 and look at what changed"
    );
}

/// LU-5783: the sink's invalidate is the work request that is saved, on every bulk transfer and on no small one.
#[test]
fn a_done_that_kills_the_key_saves_one_work_request() {
    for (name, operation, length) in TRANSFERS {
        let plain = count(operation, length, End::Done);
        let killing = count(operation, length, End::KillingDone);
        let sum = |pair: [u64; 2]| pair[0] + pair[1];
        let saved = u64::from(length == BULK);
        assert_eq!(
            sum(plain.work_requests) - sum(killing.work_requests),
            saved,
            "{name}"
        );
        assert_eq!(plain.remote_invalidations, 0, "{name}");
        assert_eq!(killing.remote_invalidations, saved, "{name}");
        assert_eq!(plain.messages, killing.messages, "{name}");
        assert!(killing.half_trips <= plain.half_trips, "{name}");
    }
}

/// The DONE is what is saved, on every bulk transfer and on no small one: a message and its work request. The sink's
/// invalidate stays, and costs it a doorbell that SEND_WITH_INV saves.
#[test]
fn a_last_write_with_immediate_data_saves_the_message_and_its_work_request() {
    for (name, operation, length) in TRANSFERS {
        let plain = count(operation, length, End::Done);
        let immediate = count(operation, length, End::Immediate);
        let saved = u64::from(length == BULK);
        let sum = |pair: [u64; 2]| pair.iter().sum::<u64>();
        assert_eq!(
            sum(plain.messages) - sum(immediate.messages),
            saved,
            "{name}"
        );
        assert_eq!(
            sum(plain.work_requests) - sum(immediate.work_requests),
            saved,
            "{name}"
        );
        assert_eq!(plain.doorbells, immediate.doorbells, "{name}");
        assert_eq!(
            (plain.half_trips, plain.landed),
            (immediate.half_trips, immediate.landed),
            "{name}"
        );
        assert_eq!(immediate.remote_invalidations, 0, "{name}");
    }
}
