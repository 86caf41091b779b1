//! LU-3322: nodes that are not set alike come to terms and move everything both ways: what one sends the other can
//! take, every byte is where it belongs, and both accounts come back to zero.
//!
//! A node is set in six ways: the card, `exposure` with `map_on_demand`, `peer_credits`, `max_frags`, the extensions, and
//! how many WRITEs it posts at a time. That is 3150 kinds of nodes, and nearly ten million ordered pairs. What is covered:
//!
//! of the twelve settings of a pair any four, in every combination of their values (a covering array of strength 4). So
//! every card and exposure meets every other, and every depth and number of fragments every other. The first of a pair dials.
//!
//! `O2POLL_MATRIX=N` runs one in N of all pairs besides, spread evenly; 1 is all of them. A pair takes a core
//! about 1.5 ms, so that all take it four hours.

use std::collections::HashSet;
use std::thread;

use o2poll_dataplane::endpoint::Operation;
use o2poll_dataplane::peer::{Extensions, Local};
use o2poll_dataplane::registration::Settings;
use o2poll_soft::Profile;
use o2poll_tests::dial::dial;
use o2poll_tests::lend::alone;
use o2poll_tests::{Cut, Job, Jobs, NAMES, STAMPS, Setup, World};

/// The settings of a node, each the index of a value.
type Kind = [usize; 6];

/// How many values each has.
const VALUES: Kind = [7, 5, 5, 3, 3, 2];

/// `exposure = "arena"` with such a `map_on_demand`, or without.
const EXPOSURES: [Option<u16>; 5] = [None, Some(0), Some(1), Some(16), Some(257)];
const PEER_CREDITS: [u16; 5] = [1, 4, 8, 32, 255];
const MAX_FRAGS: [u16; 3] = [1, 16, 257];
const WRITES: [u16; 2] = [1, 4];

const fn profile(card: usize) -> Profile {
    match card {
        0 => Profile::frwr(),
        1 => Profile::mlx5(),
        2 => Profile::mlx4(),
        3 => Profile::windows(),
        4 => Profile::rxe(),
        5 => Profile::mthca(),
        _ => Profile::bare(),
    }
}

fn setup([card, exposure, credits, frags, _, writes]: Kind) -> Setup {
    let mut setup = Setup::new(profile(card));
    setup.registration = EXPOSURES[exposure].map_or(Settings::PRIVATE, |map_on_demand| Settings {
        expose_arena: true,
        map_on_demand,
        ..Settings::PRIVATE
    });
    setup.max_frags = MAX_FRAGS[frags];
    setup.shape.connections = 1;
    setup.shape.queue_depth = PEER_CREDITS[credits];
    setup.shape.writes_at_once = WRITES[writes];
    setup.shape.staging = 2;
    setup.shape.register_source_from = 6;
    setup.memory = (3 << 20) + setup.shape.sizes().messages * 8192;
    setup
}

fn local(of: usize, kind: Kind) -> Local {
    let [card, exposure, credits, frags, extensions, _] = kind;
    // As a node offers them: no key of the arena may be killed, and not every card can.
    let mut offer = Extensions::empty();
    if extensions != 0 && profile(card).capabilities.remote_invalidate {
        offer |= Extensions::SENDS_INVALIDATE;
        offer.set(
            Extensions::KEYS_MAY_BE_KILLED,
            EXPOSURES[exposure].is_none(),
        );
    }
    offer.set(Extensions::LAST_WRITE_IMMEDIATE, extensions == 2);
    Local {
        nid: NAMES[of],
        stamp: STAMPS[of],
        queue_depth: PEER_CREDITS[credits],
        max_frags: MAX_FRAGS[frags],
        high_water: 0,
        require_privileged_port: false,
        extensions: offer,
        ready: true,
    }
}

/// Both ways, PUTs and GETs, in messages and in bulk, into sinks of one piece, of pages, of fewer than 16 and of more, and
/// of nearly 257.
fn jobs() -> [Job; 8] {
    const PUT: Operation = Operation::Put {
        hdr_data: 7,
        ack: true,
    };
    const QUIET: Operation = Operation::Put {
        hdr_data: 8,
        ack: false,
    };
    const GET: Operation = Operation::Get { optimized: true };
    const ROUTED: Operation = Operation::Get { optimized: false };
    [
        Job::new(0, PUT, 20_000, Cut::gapped(999, 1), Cut::gapped(79, 1)),
        Job::new(1, QUIET, 20_000, Cut::flat(1), Cut::gapped(1500, 1)),
        Job::new(0, GET, 20_000, Cut::pages(7), Cut::gapped(777, 1)),
        Job::new(1, ROUTED, 20_000, Cut::gapped(1000, 1), Cut::flat(3)),
        Job::new(1, GET, 20_000, Cut::flat(9), Cut::gapped(100, 1)),
        Job::new(0, QUIET, 20_000, Cut::gapped(4000, 1), Cut::flat(5)),
        Job::new(1, PUT, 500, Cut::gapped(50, 1), Cut::flat(2)),
        Job::new(0, GET, 3000, Cut::flat(0), Cut::gapped(300, 1)),
    ]
}

/// Node 0 dials node 1. How often each way was taken, how many keys the other side killed, and how many WRITEs took
/// the place of a DONE.
fn meet(kinds: [Kind; 2]) -> [u64; 8] {
    alone(|| {
        let locals = [local(0, kinds[0]), local(1, kinds[1])];
        let (terms, _) = dial(&locals[0], &locals[1]).expect("they come to terms");
        let [one, other] = &locals;
        for (at, terms) in terms.iter().enumerate() {
            let (ours, theirs) = (&locals[at].extensions, &locals[1 - at].extensions);
            assert_eq!(terms.queue_depth, one.queue_depth.min(other.queue_depth));
            assert_eq!(terms.max_frags, one.max_frags.min(other.max_frags));
            assert_eq!(terms.kills_keys, ours.kills_keys_of(*theirs));
            assert_eq!(terms.keys_killed, theirs.kills_keys_of(*ours));
            assert_eq!(terms.write_immediates, theirs.write_immediates(*ours));
        }
        let mut world = World::mixed(kinds.map(setup));
        let connection = world.connect_on(terms);
        Jobs::run(&mut world, connection, &jobs(), |_| {});
        let mut counted = [0; 8];
        for node in &world.nodes {
            let counters = node.counters;
            for (sum, counter) in counted.iter_mut().zip([
                &counters.fragment_lists,
                &counters.page_lists,
                &counters.mappings,
                &counters.windows,
                &counters.arenas,
                &counters.stagings,
                &counters.remote_invalidations,
                &counters.write_immediates,
            ]) {
                *sum += counter.get();
            }
        }
        let why = world.end();
        assert!(why.iter().all(|reasons| reasons.len() == 1), "{kinds:?}");
        counted
    })
}

/// Each pair, on all cores, and what they have counted together.
fn meet_all(pairs: &[[Kind; 2]]) -> [u64; 8] {
    let threads = thread::available_parallelism().map_or(1, usize::from);
    let share = pairs.len().div_ceil(threads).max(1);
    let mut all = [0; 8];
    thread::scope(|scope| {
        let running: Vec<_> = pairs
            .chunks(share)
            .map(|pairs| {
                scope.spawn(move || {
                    let mut all = [0; 8];
                    for pair in pairs {
                        let counted = std::panic::catch_unwind(|| meet(*pair));
                        let counted = counted.unwrap_or_else(|_| panic!("{pair:?}"));
                        add(&mut all, counted);
                    }
                    all
                })
            })
            .collect();
        for thread in running {
            add(&mut all, thread.join().expect("told above"));
        }
    });
    all
}

fn add(all: &mut [u64; 8], counted: [u64; 8]) {
    for (all, counted) in all.iter_mut().zip(counted) {
        *all += counted;
    }
}

/// Pairs in which any four of the twelve settings have every combination of their values; and how many combinations that
/// are. Row by row: a combination that is missing, and of a few ways to fill the rest the one that has most of what is
/// missing.
fn covering() -> (Vec<[Kind; 2]>, usize) {
    let values: Vec<usize> = VALUES.into_iter().chain(VALUES).collect();
    let fours: Vec<[usize; 4]> = (0..1_usize << values.len())
        .filter(|set| set.count_ones() == 4)
        .map(|set| {
            let mut members = (0..values.len()).filter(|at| set >> at & 1 != 0);
            core::array::from_fn(|_| members.next().expect("four"))
        })
        .collect();
    let mut missing: Vec<Vec<bool>> = fours
        .iter()
        .map(|four| vec![true; four.iter().map(|at| values[*at]).product()])
        .collect();
    let count = missing.iter().map(Vec::len).sum();
    let place = |four: &[usize; 4], row: &[usize]| {
        four.iter()
            .fold(0, |place, at| place * values[*at] + row[*at])
    };
    let mut random = Random(0x02b0_11ed);
    let mut rows = Vec::new();
    for first in 0..fours.len() {
        while let Some(wanted) = missing[first].iter().position(|missing| *missing) {
            let best = (0..10)
                .map(|_| {
                    let mut row: Vec<usize> =
                        values.iter().map(|values| random.below(*values)).collect();
                    let mut rest = wanted;
                    for at in fours[first].iter().rev() {
                        row[*at] = rest % values[*at];
                        rest /= values[*at];
                    }
                    let gain = fours
                        .iter()
                        .zip(&missing)
                        .filter(|(four, missing)| missing[place(four, &row)])
                        .count();
                    (gain, row)
                })
                .max()
                .expect("ten");
            let row = best.1;
            for (four, missing) in fours.iter().zip(&mut missing) {
                missing[place(four, &row)] = false;
            }
            rows.push([0, 6].map(|from| core::array::from_fn(|at| row[from + at])));
        }
    }
    (rows, count)
}

/// The kind of this number.
fn numbered(mut number: usize) -> Kind {
    VALUES.map(|values| {
        let value = number % values;
        number /= values;
        value
    })
}

#[derive(Clone, Copy)]
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 33).expect("31 bits") % end
    }
}

#[test]
fn lu_3322_any_four_settings_in_every_combination_move_everything_both_ways() {
    let (pairs, combinations) = covering();
    let counted = meet_all(&pairs);
    assert!(counted.iter().all(|count| *count > 100), "{counted:?}");
    // That they are all there is counted once more.
    let mut seen = HashSet::new();
    for pair in &pairs {
        let row = pair.as_flattened();
        for a in 0..12 {
            for b in a + 1..12 {
                for c in b + 1..12 {
                    for d in c + 1..12 {
                        seen.insert([a, b, c, d].map(|at| (at, row[at])));
                    }
                }
            }
        }
    }
    assert_eq!(seen.len(), combinations);
}

/// Where it is asked for.
#[test]
fn lu_3322_every_pair_that_is_asked_for() {
    let Some(every) = std::env::var("O2POLL_MATRIX").ok() else {
        return;
    };
    let every: usize = every.parse().expect("O2POLL_MATRIX is a number");
    let kinds: usize = VALUES.iter().product();
    let all = kinds * kinds;
    // A step without a factor in common with any number of values: neighbours have nothing in common.
    let step = 1_000_003;
    let pairs: Vec<_> = (0..all / every.max(1))
        .map(|turn| turn * step % all)
        .map(|number| [numbered(number % kinds), numbered(number / kinds)])
        .collect();
    let began = std::time::Instant::now();
    meet_all(&pairs);
    eprintln!("{} pairs in {:?}", pairs.len(), began.elapsed());
}
