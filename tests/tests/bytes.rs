//! Byte-exact: random PUTs and GETs beside a plain model, both nodes initiating at once.

use o2poll_dataplane::endpoint::Operation;
use o2poll_soft::{Profile, Weather};
use o2poll_tests::{Cut, Job, Jobs, Setup, World};
use proptest::prelude::*;

#[derive(Clone, Debug)]
struct Case {
    setup: Setup,
    depth: u16,
    jobs: Vec<Job>,
}

fn profiles() -> impl Strategy<Value = Profile> {
    let shapes = (0..5_u8, prop_oneof![Just(1_u32), 2..8_u32, Just(30)]);
    shapes.prop_map(|(kind, max_sge)| {
        let mut profile = if kind % 2 == 0 {
            Profile::frwr()
        } else {
            Profile::mlx5()
        };
        if kind == 4 {
            profile.capabilities.max_fragments = 4;
        }
        profile.capabilities.max_sge = max_sge;
        profile
    })
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

fn cases() -> impl Strategy<Value = Case> {
    (
        profiles(),
        weathers(),
        any::<u64>(),
        1..9_u16,
        prop_oneof![Just(1_u16), Just(2), Just(4), Just(16)],
        prop_oneof![Just(1_usize), Just(2), Just(3), Just(16)],
        proptest::collection::vec(jobs(), 1..14),
    )
        .prop_map(|(profile, weather, seed, depth, writes, windows, jobs)| {
            let mut setup = Setup::new(profile);
            setup.profile.ack_timeout = 300;
            setup.weather = weather;
            setup.seed = seed;
            setup.memory = 64 << 20;
            setup.shape.writes_at_once = writes;
            setup.shape.windows = windows;
            setup.shape.entries = 16;
            Case { setup, depth, jobs }
        })
}

fn run(setup: Setup, depth: u16, jobs: &[Job]) -> World {
    let mut world = World::new(setup);
    let connection = world.connect_at(depth);
    Jobs::run(&mut world, connection, jobs, |_| {});
    world
}

/// Now and then a device takes only part of a chain, or refuses a receive.
fn fumble(mut seed: u64) -> impl FnMut(&mut World) {
    move |world| {
        seed = seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let draw = seed >> 32;
        let faults = world.nodes[(draw & 1) as usize].poller.nic().faults();
        match draw >> 1 & 7 {
            0 | 1 => faults.accept = u32::try_from(draw >> 4 & 7).ok(),
            2 => faults.refuse_receives = 1,
            _ => {}
        }
    }
}

fn many(cases: u32) -> ProptestConfig {
    let cases = std::env::var("O2POLL_CASES")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(cases);
    ProptestConfig {
        cases,
        max_shrink_iters: 400,
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(many(96))]

    #[test]
    fn any_traffic_is_byte_exact(case in cases()) {
        run(case.setup, case.depth, &case.jobs).end();
    }

    #[test]
    fn chains_that_the_device_takes_in_part_lose_and_repeat_nothing(case in cases()) {
        let mut world = World::new(case.setup);
        let connection = world.connect_at(case.depth);
        Jobs::run(&mut world, connection, &case.jobs, fumble(case.setup.seed));
        world.end();
    }
}
