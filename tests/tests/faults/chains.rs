//! Chains that are taken in part, and receives that are refused.

use o2poll_dataplane::endpoint::{EntryOptions, Error, Event, Submission, Token};
use o2poll_soft::Profile;
use o2poll_tests::World;
use o2poll_tests::lend::alone;

use crate::{
    END, ENDS, ENTRY, KINDS, Run, all_ways, draw, kinds, mapped, mixed, put, registered, setup,
    staged,
};

/// Every chain of every sequence, cut after every prefix: one transfer at a time.
#[test]
fn lu_14733_every_chain_cut_at_every_place() {
    all_ways(cut_every_chain);
}

fn cut_every_chain() {
    let mut cuts = 0;
    for setup in kinds() {
        for (operation, length) in KINDS {
            for of in 0..2 {
                for doorbell in 0.. {
                    let mut longest = 0;
                    for prefix in 0..5 {
                        let cut = alone(|| {
                            let mut run = Run::new(setup, &[(0, operation, length)]);
                            run.submit_all(&setup);
                            let start = run.world.nodes[of].counters.doorbells.get();
                            let mut armed = false;
                            run.drive(100_000, false, |world, _| {
                                let node = &mut world.nodes[of];
                                if !armed && node.counters.doorbells.get() == start + doorbell {
                                    armed = true;
                                    node.poller.nic().faults().accept = Some(prefix);
                                }
                            });
                            run.rests();
                            let cut = run.world.nodes[of].counters.partial_doorbells.get();
                            run.world.nodes[of].poller.nic().faults().accept = None;
                            run.end();
                            cut
                        });
                        cuts += cut;
                        if cut != 0 {
                            longest = prefix + 1;
                        }
                        if cut == 0 {
                            break;
                        }
                    }
                    if longest == 0 {
                        break;
                    }
                }
            }
        }
    }
    assert!(cuts >= 100, "{cuts}");
}

/// Long chains of many transfers, cut everywhere.
#[test]
fn a_chain_of_many_transfers_cut_at_every_place() {
    let plan: Vec<_> = (0..16)
        .map(|n| (n / 8, KINDS[n % 8].0, KINDS[n % 8].1))
        .collect();
    for kind in [setup(Profile::frwr()), staged(), mapped(), registered()] {
        for doorbell in 0..5 {
            for prefix in 0..18 {
                for of in 0..2 {
                    alone(|| {
                        let setup = kind;
                        let mut run = Run::new(setup, &plan);
                        run.submit_all(&setup);
                        let start = run.world.nodes[of].counters.doorbells.get();
                        run.drive(100_000, false, |world, _| {
                            let node = &mut world.nodes[of];
                            if node.counters.doorbells.get() == start + doorbell {
                                node.poller.nic().faults().accept = Some(prefix);
                            }
                        });
                        run.rests();
                        run.end();
                    });
                }
            }
        }
    }
}

/// Of a run of messages only the last is signalled. Where the device takes but the beginning of it, and nobody wants the
/// rest any more, that is told of all the same.
#[test]
fn the_beginning_of_a_run_is_told_of_though_the_rest_is_cancelled() {
    const RUN: u32 = 4;
    // As often the device takes nothing of the next chain either, which has the request that tells.
    for (taken, refusals) in (1..=RUN).flat_map(|taken| [(taken, 0), (taken, 1), (taken, 3)]) {
        alone(|| {
            let mut world = World::new(setup(Profile::frwr()));
            let [connection, _] = world.connect();
            let far = world.nodes[1].arena.flat(100, 1);
            world.export(1, ENTRY, EntryOptions::PUT, far);
            world.settle();
            for token in 0..RUN {
                let near = world.nodes[0].arena.flat(100, 2);
                let request =
                    World::request(connection, u64::from(token), ENTRY, 0, put(false), near);
                world.nodes[0].submit(request);
            }
            let node = &mut world.nodes[0];
            node.poller.nic().faults().accept = Some(taken);
            let before = node.counters.doorbells.get();
            world.step();
            let node = &mut world.nodes[0];
            node.poller.nic().faults().accept = None;
            assert_eq!(node.counters.doorbells.get(), before + 1, "one chain");
            for token in taken..RUN {
                let token = Token(u64::from(token));
                node.submit(Submission::Cancel { token });
            }
            for _ in 0..refusals {
                world.nodes[0].poller.nic().faults().accept = Some(0);
                world.step();
            }
            world.nodes[0].poller.nic().faults().accept = None;
            for _ in 0..RUN {
                let Event::Done { token, outcome, .. } = world.event(0) else {
                    panic!("nothing else ends");
                };
                let expected = if token.0 < u64::from(taken) {
                    Ok(100)
                } else {
                    Err(Error::Cancelled)
                };
                assert_eq!(outcome, expected, "{token:?} of {taken}, {refusals}");
            }
            world.rest();
            world.end();
        });
    }
}

#[test]
fn chains_cut_and_receives_refused_at_random_all_the_time() {
    for seed in 0..40_u32 {
        alone(|| {
            END.set(ENDS[seed as usize % 3]);
            let mut setup = kinds()[(seed / 2 % 8) as usize];
            setup.shape.writes_at_once = 1 + u16::try_from(seed % 5).unwrap();
            setup.shape.windows = setup.shape.windows.min(2 + (seed % 7) as usize);
            let mut run = Run::new(setup, &mixed(48));
            run.submit_all(&setup);
            let mut random = u64::from(seed);
            run.drive(1_000_000, false, |world, _| {
                for node in &mut world.nodes {
                    let faults = node.poller.nic().faults();
                    if !draw(&mut random).is_multiple_of(4) {
                        faults.accept = Some((draw(&mut random) % 6) as u32);
                    }
                    if draw(&mut random).is_multiple_of(8) {
                        faults.refuse_receives = (draw(&mut random) % 5) as u32;
                    }
                }
            });
            for node in &mut run.world.nodes {
                let faults = node.poller.nic().faults();
                (faults.accept, faults.refuse_receives) = (None, 0);
                assert!(node.counters.partial_doorbells.get() > 5);
            }
            run.rests();
            run.end();
        });
    }
}

#[test]
fn receives_refused_from_the_start_are_posted_later() {
    let setup = setup(Profile::frwr());
    let mut world = World::new(setup);
    for node in &mut world.nodes {
        node.poller.nic().faults().refuse_receives = 100;
    }
    world.connect();
    for _ in 0..200 {
        world.step();
    }
    for node in &mut world.nodes {
        assert_eq!(node.poller.nic().faults().refuse_receives, 0);
        assert_eq!(node.poller.nic().gauges().receives, 18);
    }
    world.end();
}
