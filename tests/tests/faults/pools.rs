//! What is used up, and what takes too long.

use o2poll_dataplane::endpoint::{EntryOptions, Error, Event};
use o2poll_soft::Profile;
use o2poll_tests::lend::alone;
use o2poll_tests::{Setup, World};

use crate::{BULK, ENTRY, KINDS, Run, draw, exposed, mapped, mixed, registered, setup, staged};

/// Pools of every small size: everything waits its turn and is done.
#[test]
fn lu_9472_lu_12768_small_pools_slow_everything_down_and_stop_nothing() {
    for windows in [1, 2, 3, 5] {
        for waiting in [0, 1, 7] {
            for wire in [16, 256] {
                alone(|| {
                    let mut setup = setup(Profile::frwr());
                    setup.shape.windows = setup.shape.windows.min(windows);
                    setup.shape.waiting = waiting;
                    setup.shape.entries = 1;
                    setup.shape.connections = 1;
                    let plan = mixed(40);
                    setup.wire = wire;
                    let mut run = Run::new(setup, &plan);
                    run.submit_all(&setup);
                    run.drive(1_000_000, false, |_, _| {});
                    run.rests();
                    run.end();
                });
            }
        }
    }
}

/// Nobody takes events for long: submissions and incoming messages wait, and nothing is lost.
#[test]
fn a_full_event_ring_holds_everything_back_and_loses_nothing() {
    let mut setup = setup(Profile::frwr());
    setup.shape.entries = 2;
    setup.events = 8;
    setup.memory = 3 << 20;
    let mut world = World::new(setup);
    let connections = world.connect();
    let exported = [0, 1].map(|of| {
        let memory = world.nodes[of].arena.flat(BULK, 0);
        let options = EntryOptions::PUT | EntryOptions::GET | EntryOptions::EVENTS;
        world.export(of, ENTRY, options, memory)
    });
    let _ = exported;
    let (mut submitted, mut done, mut landed) = ([0, 0], 0, 0);
    let total = 60;
    let mut random = 5;
    for _ in 0..1_000_000 {
        for of in 0..2 {
            if submitted[of] < total && world.nodes[of].submissions.free() > 0 {
                let (operation, length) = KINDS[submitted[of] % 8];
                let memory = world.nodes[of].arena.flat(length, 1);
                let request = World::request(connections[of], 1, ENTRY, 0, operation, memory);
                world.nodes[of].submit(request);
                submitted[of] += 1;
            }
        }
        world.step();
        // A slow application, at times asleep.
        if draw(&mut random).is_multiple_of(100) {
            for node in &mut world.nodes {
                match node.events.pop() {
                    Some(Event::Done { outcome, .. }) => {
                        assert!(outcome.is_ok(), "{outcome:?}");
                        done += 1;
                    }
                    Some(Event::Landed(_)) => landed += 1,
                    Some(other) => panic!("{other:?}"),
                    None => {}
                }
            }
        }
        if (done, landed) == (2 * total, 2 * total) {
            world.end();
            return;
        }
    }
    panic!("{done} {landed} {}", world.picture());
}

#[test]
fn a_timeout_in_every_phase() {
    // So short that everything times out somewhere.
    for (timeout, kind) in (1..60).flat_map(|timeout| timeouts().map(|kind| (timeout, kind))) {
        alone(|| {
            let mut setup = kind;
            setup.timeout = timeout;
            setup.abandon = 100_000;
            let mut run = Run::new(setup, &mixed(32));
            run.submit_all(&setup);
            for _ in 0..3000 {
                run.world.step();
                for node in &mut run.world.nodes {
                    while let Some(event) = node.events.pop() {
                        match event {
                            Event::Done { outcome, .. } => {
                                assert!(matches!(outcome, Ok(_) | Err(Error::TimedOut)));
                                run.failed += usize::from(outcome.is_err());
                                run.done += 1;
                            }
                            other => panic!("{other:?}"),
                        }
                    }
                }
            }
            assert_eq!(run.done, 32, "{timeout} {}", run.world.picture());
            assert!(run.world.nodes.iter().all(|node| node.gone.is_empty()));
            run.rests();
            run.end();
        });
    }
}

fn timeouts() -> [Setup; 5] {
    [
        setup(Profile::frwr()),
        staged(),
        mapped(),
        exposed(),
        registered(),
    ]
}
