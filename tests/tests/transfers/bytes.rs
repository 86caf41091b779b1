//! Byte-exact: random PUTs and GETs beside a plain model, both nodes initiating at once.

use core::cell::Cell;

use o2poll_dataplane::endpoint::{Operation, Submission, Token};
use o2poll_dataplane::nic::Status;
use o2poll_dataplane::poller::{Order, Shape};
use o2poll_dataplane::pool::Handle;
use o2poll_dataplane::time::Ticks;
use o2poll_soft::{Profile, Weather};
use o2poll_tests::lend::alone;
use o2poll_tests::{Backend, Cut, Job, Jobs, Setup, World};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

#[derive(Clone, Debug)]
struct Case {
    setups: [Setup; 2],
    depth: u16,
    jobs: Vec<Job>,
}

fn profiles<B: Backend>() -> BoxedStrategy<Profile> {
    if B::REAL {
        let plain = B::plain();
        let max_sge = prop_oneof![Just(1_u32), 2..8_u32, Just(30)];
        return max_sge
            .prop_map(move |max_sge| {
                let mut profile = plain;
                profile.capabilities.max_sge = max_sge;
                profile
            })
            .boxed();
    }
    let shapes = (0..9_u8, prop_oneof![Just(1_u32), 2..8_u32, Just(30)]);
    let drawn = shapes.prop_map(|(kind, max_sge)| {
        let mut profile = match kind {
            0 | 4 => Profile::frwr(),
            1 => Profile::mlx5(),
            2 => Profile::mlx4(),
            3 => Profile::windows(),
            5 => Profile::rxe(),
            6 => Profile::bare(),
            7 => Profile::mthca(),
            _ => Profile::mlx5(),
        };
        if kind == 4 {
            profile.capabilities.max_fragments = 4;
        }
        profile.capabilities.max_sge = max_sge;
        profile
    });
    drawn.boxed()
}

fn weathers() -> impl Strategy<Value = Weather> {
    prop_oneof![
        Just(Weather::default()),
        (0..24_u8, 0..24_u8, 0..32_u8, 1..30_u8).prop_map(|(drop, repeat, delay, hold)| Weather {
            drop,
            repeat,
            delay,
            hold,
        }),
    ]
}

fn cuts() -> impl Strategy<Value = Cut> {
    let piece = prop_oneof![
        Just(u32::MAX),
        Just(4096_u32),
        1..2000_u32,
        2000..200_000_u32,
    ];
    let hole = prop_oneof![Just(0_u32), 1..100_u32, Just(4096)];
    let offset = prop_oneof![Just(0_u16), Just(1), Just(4095), 0..4096_u16];
    (offset, piece, 0..4096_u32, hole).prop_map(|(offset, piece, trim, hole)| Cut {
        offset,
        piece,
        trim,
        hole,
    })
}

fn lengths() -> impl Strategy<Value = u32> {
    prop_oneof![
        2 => 0..200_u32,
        2 => 3970..3985_u32,
        4 => 3977..70_000_u32,
        1 => 70_000..=1_048_576_u32,
        1 => Just(1_048_576_u32),
    ]
}

fn jobs() -> impl Strategy<Value = Job> {
    let operation = prop_oneof![
        (any::<u64>(), any::<bool>()).prop_map(|(hdr_data, ack)| Operation::Put { hdr_data, ack }),
        any::<bool>().prop_map(|optimized| Operation::Get { optimized }),
    ];
    let place = (prop_oneof![Just(0_u32), 0..9000_u32], 0..300_u32);
    let gap = prop_oneof![Just(0_u32), 0..40_u32];
    (
        0..2_usize,
        operation,
        lengths(),
        place,
        cuts(),
        cuts(),
        any::<bool>(),
        gap,
    )
        .prop_map(
            |(from, operation, length, (remote_offset, tail), near, far, told, gap)| Job {
                from,
                operation,
                length,
                remote_offset,
                tail,
                near,
                far,
                told,
                gap,
            },
        )
}

/// How a node covers its sinks and reads its sources.
fn nodes<B: Backend>() -> impl Strategy<Value = Setup> {
    (
        profiles::<B>(),
        prop_oneof![Just(1_u16), Just(2), Just(4), Just(16)],
        prop_oneof![Just(1_usize), Just(2), Just(3), Just(16)],
        0..4_usize,
        any::<bool>(),
        prop_oneof![Just(0_u16), Just(1), Just(2), Just(257)],
        prop_oneof![Just(1_u16), Just(16), Just(257)],
        prop_oneof![Just(0_u16), Just(1), Just(2), Just(6)],
    )
        .prop_map(
            |(profile, writes, windows, staging, exposed, on_demand, max_frags, source)| {
                let mut setup = Setup::new(profile);
                setup.profile.ack_timeout = 300;
                setup.max_frags = max_frags;
                setup.registration.expose_arena = exposed;
                setup.registration.map_on_demand = on_demand;
                setup.shape.writes_at_once = writes;
                setup.shape.windows = windows.min(setup.shape.windows);
                setup.shape.staging = staging;
                setup.shape.register_source_from = source;
                setup.shape.entries = 16;
                setup
            },
        )
}

fn cases_of<B: Backend>() -> impl Strategy<Value = Case> {
    (
        [nodes::<B>(), nodes::<B>()],
        any::<bool>(),
        weathers(),
        (any::<u64>(), 0..3_u8),
        1..9_u16,
        proptest::collection::vec(jobs(), 1..14),
    )
        .prop_map(
            |([first, second], mixed, weather, (seed, extension), depth, jobs)| {
                let setups = [first, if mixed { second } else { first }].map(|setup| Setup {
                    weather,
                    seed,
                    memory: room(&first.shape, &jobs).max(room(&second.shape, &jobs)),
                    kill_keys: extension == 1,
                    write_immediates: extension == 2,
                    ..setup
                });
                Case {
                    setups,
                    depth,
                    jobs,
                }
            },
        )
}

/// Bytes that either node needs for its messages, its staging buffers and all jobs.
fn room(shape: &Shape, jobs: &[Job]) -> usize {
    let span = |cut: &Cut, total: u32| {
        let holes = cut.lengths(total).len() * cut.hole as usize;
        total as usize + holes + 3 * 4096
    };
    let jobs = jobs.iter().map(|job| {
        let total = job.remote_offset + job.length + job.tail;
        span(&job.near, job.length).max(span(&job.far, total)) + 2 * 4096
    });
    let sizes = shape.sizes();
    (1 << 20) + sizes.messages * 8192 + sizes.staging * (2 << 20) + jobs.sum::<usize>()
}

/// Now and then a device takes only part of a chain, or refuses a receive.
fn fumble<B: Backend>(seed: u64) -> impl FnMut(&mut World<B>) {
    let mut draw = splitmix(seed);
    move |world| {
        let draw = draw();
        let nic = world.nodes[(draw & 1) as usize].poller.nic();
        let faults = B::faults(nic).expect("a device that can be ordered to");
        match draw >> 1 & 7 {
            0 | 1 => faults.accept = u32::try_from(draw >> 4 & 7).ok(),
            2 => faults.refuse_receives = 1,
            _ => {}
        }
    }
}

/// What an unlucky world does to two nodes, drawn from a seed: at each step, but where time is real only after one in which a
/// node found something to do, or a slow device would have nearly all jobs end before a byte has moved.
fn mishaps<B: Backend>(
    connection: [Handle; 2],
    jobs: usize,
    mut draw: impl FnMut() -> u64,
) -> impl FnMut(&mut World<B>) {
    let mut sleeps = [0_u32; 2];
    let mut seen = 0;
    move |world| {
        for (left, asleep) in sleeps.iter_mut().zip(&mut world.asleep) {
            *left = left.saturating_sub(1);
            *asleep = *left != 0;
        }
        let busy = world.nodes.iter().map(|node| {
            let counters = &node.counters;
            counters.polls.get() - counters.idle_polls.get()
        });
        let before = core::mem::replace(&mut seen, busy.sum());
        if B::REAL && seen == before {
            return;
        }
        let chance = draw();
        let at = (chance >> 32 & 1) as usize;
        let node = &mut world.nodes[at];
        match chance % 1024 {
            0..16 if node.submissions.free() != 0 => {
                let token = Token(draw() % jobs as u64);
                node.submit(Submission::Cancel { token });
            }
            16..24 => sleeps[at] = 1 + (draw() % 300) as u32,
            24..26 => sleeps[at] = 1 + (draw() % 6000) as u32,
            26 => {
                let connection = connection[at];
                node.order(Order::Close { connection });
            }
            27..80 => {
                // Where there is one that can be ordered to.
                if let Some(faults) = B::faults(node.poller.nic()) {
                    match chance % 1024 {
                        27 => faults.fail = Some((2, Status::RemoteAccess)),
                        28..60 => faults.accept = Some((draw() % 8) as u32),
                        _ => faults.refuse_receives = 1,
                    }
                }
            }
            80..84 => world.now = world.now.after(Ticks(draw() % 2000 * B::PACE)),
            _ => {}
        }
    }
}

fn splitmix(mut state: u64) -> impl FnMut() -> u64 {
    move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

/// Runs a law over random cases, as many as `O2POLL_CASES` says if that is set; how many that were.
fn many<B: Backend>(cases: u32, law: impl Fn(Case)) -> u32 {
    let cases = std::env::var("O2POLL_CASES")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(cases);
    let config = ProptestConfig {
        cases,
        // One that does not end is waited for each time.
        max_shrink_iters: if B::REAL { 0 } else { 60 },
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    let mut runner = TestRunner::new(config);
    let result = runner.run(&cases_of::<B>(), |case| {
        law(case);
        Ok(())
    });
    if let Err(error) = result {
        panic!("{error}");
    }
    cases
}

pub(crate) fn any_traffic_is_byte_exact<B: Backend>() {
    many::<B>(if B::REAL { 12 } else { 96 }, |case| {
        alone(|| {
            let mut world = B::world(case.setups);
            let connection = world.connect_at(case.depth);
            Jobs::run(&mut world, connection, &case.jobs, |_| {});
            world.end();
        });
    });
}

pub(crate) fn chains_that_the_device_takes_in_part_lose_and_repeat_nothing<B: Backend>() {
    many::<B>(96, |case| {
        alone(|| {
            let mut world = B::world(case.setups);
            let connection = world.connect_at(case.depth);
            let fumble = fumble(case.setups[0].seed);
            Jobs::run(&mut world, connection, &case.jobs, fumble);
            world.end();
        });
    });
}

pub(crate) fn whatever_happens_each_job_has_one_event_that_is_true<B: Backend>() {
    let (jobs, moved) = (Cell::new(0), Cell::new(0));
    let cases = many::<B>(if B::REAL { 12 } else { 96 }, |case| {
        jobs.set(jobs.get() + case.jobs.len());
        alone(|| {
            let setups = case.setups.map(|setup| Setup {
                timeout: 3000,
                abandon: 3000,
                keepalive: 2500,
                ..setup
            });
            let mut world = B::world(setups);
            let connection = world.connect_at(case.depth);
            let mishaps = mishaps(connection, case.jobs.len(), splitmix(setups[0].seed));
            let those = Jobs::run_through(&mut world, connection, &case.jobs, mishaps);
            moved.set(moved.get() + those);
            world.end();
        });
    });
    let (jobs, moved) = (jobs.get(), moved.get());
    println!("{moved} of {jobs} jobs in {cases} cases moved data");
    // Of many cases most end without harm.
    assert!(
        moved != 0 || cases < 12,
        "not one of {jobs} jobs moved data"
    );
}
