//! Connections that end at every step, and requests that fail, each in turn.

use o2poll_dataplane::nic::Status;
use o2poll_dataplane::poller::Order;
use o2poll_soft::Profile;
use o2poll_tests::Setup;
use o2poll_tests::lend::alone;

use crate::{Run, all_ways, exposed, exposed_stages, mapped, mixed, registered, setup, staged};

/// What is done to a run in the middle of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Blow {
    Close(usize),
    Fail(usize, Status),
    Cut(usize),
    Stop(usize),
}

/// At every step of a run one thing goes wrong for good. Every transfer is told exactly once, everything
/// comes back, and a new connection works.
fn strike(kind: Setup, blow: Blow, stride: usize) {
    let plan = mixed(32);
    let (mut at, mut failed) = (0, 0);
    loop {
        let (hit, more) = alone(|| {
            let mut failed = 0;
            let mut setup = kind;
            setup.shape.connections = 3;
            setup.profile.ack_timeout = 300;
            setup.timeout = 50_000;
            setup.abandon = 50_000;
            let mut run = Run::new(setup, &plan);
            let connections = run.connections;
            run.submit_all(&setup);
            let mut closed = [false; 2];
            let last = run.drive(1_000_000, true, |world, step| {
                if step == at {
                    match blow {
                        Blow::Close(of) => {
                            let connection = connections[of];
                            world.nodes[of].order(Order::Close { connection });
                        }
                        Blow::Fail(of, status) => {
                            world.nodes[of].poller.nic().faults().fail = Some((0, status));
                        }
                        Blow::Cut(of) => world.nodes[of].poller.nic().faults().cut = Some(0),
                        Blow::Stop(of) => world.nodes[of].order(Order::Stop),
                    }
                }
                // The connection manager tells the other side.
                for of in 0..2 {
                    let connection = connections[1 - of];
                    if !closed[1 - of]
                        && world.nodes[of]
                            .gone
                            .iter()
                            .any(|(gone, _)| *gone == connections[of])
                    {
                        closed[1 - of] = true;
                        world.nodes[1 - of].order(Order::Close { connection });
                    }
                }
            });
            let hit = last >= at;
            for node in &mut run.world.nodes {
                let faults = node.poller.nic().faults();
                (faults.cut, faults.fail) = (None, None);
            }
            if hit && !matches!(blow, Blow::Stop(_)) {
                for (of, connection) in connections.into_iter().enumerate() {
                    run.world.nodes[of].order(Order::Close { connection });
                }
                assert!(run.world.until(1_000_000, |world| {
                    let gone = |of: usize| {
                        let mut all = world.nodes[of].gone.iter();
                        all.any(|(gone, _)| *gone == connections[of])
                    };
                    gone(0) && gone(1)
                }));
                failed += run.failed;
                run.connections = run.world.connect();
                (run.done, run.failed) = (0, 0);
                run.submit_all(&setup);
                run.drive(1_000_000, false, |_, _| {});
                run.rests();
            }
            run.end();
            (hit, failed)
        });
        failed += more;
        if !hit {
            assert!(at > 10);
            assert!(failed > 0 || matches!(blow, Blow::Stop(_)));
            return;
        }
        at += u32::try_from(stride).unwrap();
    }
}

#[test]
fn a_close_at_every_step() {
    all_ways(|| {
        strike(setup(Profile::frwr()), Blow::Close(0), 2);
        strike(setup(Profile::frwr()), Blow::Close(1), 3);
    });
}

#[test]
fn lu_19875_a_stop_at_every_step() {
    strike(setup(Profile::frwr()), Blow::Stop(0), 2);
    strike(setup(Profile::frwr()), Blow::Stop(1), 3);
    strike(mapped(), Blow::Stop(0), 5);
}

#[test]
fn a_failed_request_at_every_step() {
    for status in [Status::LocalProtection, Status::Bind, Status::RemoteAccess] {
        strike(setup(Profile::frwr()), Blow::Fail(0, status), 2);
        strike(setup(Profile::frwr()), Blow::Fail(1, status), 5);
    }
}

#[test]
fn a_cut_cable_at_every_step() {
    strike(setup(Profile::frwr()), Blow::Cut(0), 3);
    all_ways(|| strike(setup(Profile::frwr()), Blow::Cut(1), 5));
}

/// The same, while data is in staging buffers, under the key of the arena, or read through a source's own key.
#[test]
fn what_goes_wrong_for_good_at_every_step_of_the_other_mechanisms() {
    for kind in [
        staged(),
        mapped(),
        exposed(),
        exposed_stages(),
        registered(),
    ] {
        for of in 0..2 {
            strike(kind, Blow::Close(of), 5);
            strike(kind, Blow::Stop(of), 7);
            strike(kind, Blow::Fail(of, Status::RemoteAccess), 7);
            strike(kind, Blow::Cut(of), 9);
        }
    }
}

/// The k-th request of a run fails, for every k.
#[test]
fn every_request_fails_once() {
    all_ways(fail_every_request);
}

fn fail_every_request() {
    let plan = mixed(16);
    for of in 0..2 {
        for k in 0.. {
            let hit = alone(|| {
                let mut setup = setup(Profile::frwr());
                setup.timeout = 20_000;
                setup.abandon = 20_000;
                let mut run = Run::new(setup, &plan);
                let connections = run.connections;
                run.submit_all(&setup);
                run.world.nodes[of].poller.nic().faults().fail = Some((k, Status::LocalOperation));
                let mut told = false;
                run.drive(1_000_000, true, |world, _| {
                    if !told && !world.nodes[of].gone.is_empty() {
                        told = true;
                        let connection = connections[1 - of];
                        world.nodes[1 - of].order(Order::Close { connection });
                    }
                });
                run.world.settle();
                let hit = run.world.nodes[of].poller.nic().faults().fail.is_none();
                run.world.nodes[of].poller.nic().faults().fail = None;
                run.end();
                hit
            });
            if !hit {
                assert!(k > 30, "{k}");
                break;
            }
        }
    }
}
