//! Handshakes between nodes whose cores take every queue pair, or none.

use super::{Dial, Effect, Handle, Id, Manager, NoRoom, PAUSE, port, wires};
use crate::pattern::Random;
use o2poll_dataplane::peer::{Extensions, Local};
use o2poll_dataplane::wire::Nid;
use std::time::Instant;

fn local(last: u8, queue_depth: u16, max_frags: u16) -> Local {
    Local {
        nid: Nid::o2ib([10, 0, 0, last], 0),
        stamp: 1000 + u64::from(last),
        queue_depth,
        max_frags,
        high_water: 0,
        require_privileged_port: false,
        extensions: Extensions::all(),
        ready: true,
    }
}

/// Nodes of one core each.
fn manager(locals: [Local; 2]) -> Manager {
    Manager::new(locals.map(|local| (local, 1)))
}

fn all(manager: &Manager) -> Vec<Id> {
    (0..2).flat_map(|node| manager.alive(node)).collect()
}

/// Cores that take every queue pair, or none.
fn settle(manager: &mut Manager, room: bool) -> Vec<Effect> {
    let mut all = Vec::new();
    loop {
        let effects = manager.run(Instant::now());
        if effects.is_empty() {
            return all;
        }
        for effect in effects {
            match effect {
                Effect::Adopt { id, .. } if room => manager.ready(id, handle(id)),
                Effect::Adopt { id, .. } => manager.no_room(id, NoRoom::Full),
                Effect::Close { connection, .. } => {
                    manager.gone(connection.to_bits());
                }
                Effect::Establish { .. } => {}
            }
            all.push(effect);
        }
    }
}

fn handle(id: Id) -> Handle {
    Handle::from_bits(id)
}

#[test]
fn ports_lead_where_they_are_numbered() {
    let ports = wires(3);
    assert!(ports.iter().all(|ports| ports.len() == 2));
    assert_eq!((port(0, 1), port(0, 2)), (0, 1));
    assert_eq!((port(1, 0), port(1, 2)), (0, 1));
    assert_eq!((port(2, 0), port(2, 1)), (0, 1));
}

#[test]
fn both_ends_agree_and_both_are_told() {
    let mut manager = manager([local(1, 8, 257), local(2, 8, 257)]);
    let dial = manager.dial(1, 0);
    let effects = settle(&mut manager, true);
    let Some(Dial::Up { terms, .. }) = manager.outcome(dial) else {
        panic!("{:?}", manager.outcome(dial));
    };
    assert_eq!((terms.queue_depth, terms.max_frags), (8, 257));
    assert_eq!((terms.local_stamp, terms.peer_stamp), (1002, 1001));
    let mut numbers = Vec::new();
    for effect in &effects {
        if let Effect::Adopt {
            number,
            peer_number,
            ..
        } = effect
        {
            numbers.push((*number, *peer_number));
        }
    }
    let [(a, b), (c, d)] = numbers[..] else {
        panic!("{effects:?}")
    };
    assert_eq!((a, b), (d, c), "each queue pair names the other");
    let told = effects
        .iter()
        .filter(|effect| matches!(effect, Effect::Establish { .. }));
    assert_eq!(told.count(), 2);
    for id in all(&manager) {
        manager.close(id);
    }
    settle(&mut manager, true);
    assert!(all(&manager).is_empty());
}

#[test]
fn a_deeper_or_wider_request_is_redialed_with_what_the_peer_grants() {
    for (asker, grants) in [
        ((32, 257), (8, 257)),
        ((8, 257), (8, 32)),
        ((64, 256), (16, 16)),
    ] {
        let mut manager = manager([local(1, grants.0, grants.1), local(2, asker.0, asker.1)]);
        let dial = manager.dial(1, 0);
        settle(&mut manager, true);
        let Some(Dial::Up { terms, .. }) = manager.outcome(dial) else {
            panic!("{:?}", manager.outcome(dial));
        };
        assert_eq!((terms.queue_depth, terms.max_frags), grants);
        assert!(!manager.log().is_empty());
    }
}

#[test]
fn a_stale_incarnation_is_forgotten_and_dialed_again() {
    let mut manager = manager([local(1, 8, 257), local(2, 8, 257)]);
    manager.remembered(1, Nid::o2ib([10, 0, 0, 1], 0)).stamp = Some(77);
    let dial = manager.dial(1, 0);
    settle(&mut manager, true);
    assert!(matches!(manager.outcome(dial), Some(Dial::Up { .. })));
    assert_eq!(
        manager.remembered(1, Nid::o2ib([10, 0, 0, 1], 0)).stamp,
        Some(1001)
    );
}

#[test]
fn a_node_that_is_starting_is_asked_again_later() {
    let starting = Local {
        ready: false,
        ..local(1, 8, 257)
    };
    let mut manager = manager([starting, local(2, 8, 257)]);
    let dial = manager.dial(1, 0);
    settle(&mut manager, true);
    assert!(matches!(manager.outcome(dial), Some(Dial::Pausing(_))));
    manager.nodes[0].local.ready = true;
    let effects = manager.run(Instant::now() + PAUSE * 2);
    assert_eq!(effects.len(), 1, "{effects:?}");
}

#[test]
fn no_room_is_told_to_the_asker() {
    let mut manager = manager([local(1, 8, 257), local(2, 8, 257)]);
    let dial = manager.dial(1, 0);
    settle(&mut manager, false);
    let Some(Dial::Failed(why)) = manager.outcome(dial) else {
        panic!("{:?}", manager.outcome(dial));
    };
    assert!(why.contains("NoResources"), "{why}");
    assert!(all(&manager).is_empty());
}

/// What cores still have to do, done in any order.
enum Task {
    Adopt(Id, bool),
    Close(Handle),
}

#[test]
fn whatever_is_closed_and_whenever_every_end_is_destroyed_and_every_attempt_is_decided() {
    for seed in 1..400 {
        let mut random = Random::new(seed);
        let mut manager = Manager::new([(local(1, 16, 257), 2), (local(2, 8, 257), 1)]);
        let mut tasks: Vec<Task> = Vec::new();
        let mut dials = Vec::new();
        let mut live: Vec<Id> = Vec::new();
        let mut now = Instant::now();
        let last = 120;
        for step in 0..10 * last {
            match random.below(6) {
                0 if step < last => {
                    let from = usize::from(random.below(2) == 0);
                    dials.push(manager.dial(from, 1 - from));
                }
                // A core has seen an error.
                2 if step < last && !live.is_empty() => {
                    let at = pick(&mut random, live.len());
                    let id = live.swap_remove(at);
                    tasks
                        .retain(|task| !matches!(task, Task::Close(known) if *known == handle(id)));
                    manager.gone(id);
                }
                1 if step < last => {
                    let alive = all(&manager);
                    if let Some(id) = alive.get(pick(&mut random, 8)) {
                        manager.close(*id);
                    }
                }
                _ if step >= last && tasks.is_empty() => {
                    all(&manager).into_iter().for_each(|id| manager.close(id));
                    now += PAUSE;
                }
                _ => {
                    let at = pick(&mut random, tasks.len().max(1));
                    if at < tasks.len() {
                        match tasks.swap_remove(at) {
                            Task::Adopt(id, true) => {
                                live.push(id);
                                manager.ready(id, handle(id));
                            }
                            Task::Adopt(id, false) if random.below(2) == 0 => {
                                manager.no_room(id, NoRoom::Full);
                            }
                            Task::Adopt(id, false) => manager.no_room(id, NoRoom::Depth),
                            Task::Close(connection) => {
                                live.retain(|id| handle(*id) != connection);
                                manager.gone(connection.to_bits());
                            }
                        }
                    }
                }
            }
            for effect in manager.run(now) {
                match effect {
                    Effect::Adopt { id, .. } => tasks.push(Task::Adopt(id, random.below(8) != 0)),
                    Effect::Close { connection, .. } => tasks.push(Task::Close(connection)),
                    Effect::Establish { .. } => {}
                }
            }
        }
        assert!(tasks.is_empty(), "seed {seed}");
        assert!(
            all(&manager).is_empty(),
            "seed {seed}: {:?}",
            states(&manager)
        );
        assert!(live.is_empty(), "seed {seed}");
        for dial in dials {
            let outcome = manager.outcome(dial);
            assert!(
                matches!(outcome, Some(Dial::Failed(_))),
                "seed {seed}: {outcome:?}"
            );
            manager.forget(dial);
        }
        assert!(manager.dials.is_empty());
    }
}

/// One of so many.
fn pick(random: &mut Random, count: usize) -> usize {
    usize::try_from(random.below(count as u64)).unwrap()
}

fn states(manager: &Manager) -> Vec<String> {
    let ends = manager.ends.values();
    ends.map(|end| format!("{:?} {} {:?}", end.state, end.adopted, end.connection))
        .collect()
}

#[test]
fn ten_thousand_connections_are_forgotten_one_by_one() {
    let mut manager = manager([local(1, 8, 257), local(2, 8, 257)]);
    for _ in 0..10_000 {
        let dial = manager.dial(1, 0);
        settle(&mut manager, true);
        assert!(matches!(manager.outcome(dial), Some(Dial::Up { .. })));
        for id in all(&manager) {
            manager.close(id);
        }
        settle(&mut manager, true);
        manager.forget(dial);
        manager.log();
        assert!(manager.ends.is_empty() && manager.dials.is_empty());
        assert!(manager.under_way.is_empty());
    }
}
