//! No buffer is refused for its shape: windows, staging buffers and the arena's key, and which is chosen.

use o2poll_dataplane::endpoint::Operation;
use o2poll_soft::Profile;
use o2poll_tests::lend::alone;
use o2poll_tests::{Backend, Cut, Job, Jobs, Setup};

const PUT: Operation = Operation::Put {
    hdr_data: 7,
    ack: true,
};
const GET: Operation = Operation::Get { optimized: true };
const ROUTED_GET: Operation = Operation::Get { optimized: false };
const MEBIBYTE: u32 = 1 << 20;

/// A node that refuses no shape: staging buffers, and the arena's key where there is no other.
fn willing(profile: Profile) -> Setup {
    let mut setup = Setup::new(profile);
    setup.shape.staging = 2;
    setup.shape.register_source_from = 6;
    setup.registration.expose_arena = profile.capabilities.max_windows == 0;
    setup
}

pub(crate) fn no_profile_refuses_two_hundred_and_fifty_seven_odd_pieces<B: Backend>() {
    for profile in B::profiles() {
        for operation in [PUT, GET, ROUTED_GET] {
            alone(|| {
                let setup = willing(profile);
                let mut world = B::world([setup; 2]);
                let connection = world.connect();
                let length = 4081 * 256;
                let cut = Cut::gapped(4081, 1);
                assert_eq!(cut.lengths(length).len(), 257);
                let jobs = [
                    Job::new(0, operation, length, cut, cut),
                    Job::new(1, operation, length, cut, Cut::flat(1)),
                    Job::new(0, operation, MEBIBYTE, Cut::flat(4095), cut),
                    Job::new(1, operation, 4000, Cut::gapped(17, 1), Cut::gapped(16, 1)),
                ];
                Jobs::run(&mut world, connection, &jobs, |_| {});
                for node in &world.nodes {
                    assert_eq!(node.counters.unmappable.get(), 0);
                }
                world.end();
            });
        }
    }
}

/// Runs the jobs; WRITEs and windows of both nodes.
fn run<B: Backend>(mut setup: Setup, jobs: &[Job]) -> [[u64; 2]; 2] {
    setup.memory = 4 << 20;
    alone(|| {
        let mut world = B::world([setup; 2]);
        let connection = world.connect();
        Jobs::run(&mut world, connection, jobs, |_| {});
        let counted = [0, 1].map(|at| {
            let node = &mut world.nodes[at];
            [node.poller.nic().last().writes, node.counters.windows.get()]
        });
        world.end();
        counted
    })
}

/// What node 1 counts for one PUT of node 0 into such a sink.
fn counted<B: Backend>(setups: [Setup; 2], far: Cut) -> [u64; 6] {
    let setups = setups.map(|setup| Setup {
        memory: 6 << 20,
        ..setup
    });
    alone(|| {
        let mut world = B::world(setups);
        let connection = world.connect();
        let jobs = [Job::new(0, PUT, 40_000, Cut::flat(0), far)];
        Jobs::run(&mut world, connection, &jobs, |_| {});
        let counters = world.nodes[1].counters;
        let counted = [
            counters.fragment_lists.get(),
            counters.page_lists.get(),
            counters.windows.get(),
            counters.mappings.get(),
            counters.arenas.get(),
            counters.stagings.get(),
        ];
        // A staging buffer of a device that has nothing else goes by the same key.
        let is_bare = setups[1].profile.capabilities.max_windows == 0;
        let is_out = counters.arenas.get() != 0 || is_bare;
        assert_eq!(counters.arena_exposed.get(), u64::from(is_out));
        world.end();
        counted
    })
}

pub(crate) fn the_mechanism_is_chosen_per_transfer_and_counted<B: Backend>() {
    let plain = |profile| {
        let mut setup = willing(profile);
        setup.registration.expose_arena = false;
        setup
    };
    let exposed = |profile, map_on_demand, max_frags| {
        let mut setup = plain(profile);
        setup.registration.expose_arena = true;
        setup.registration.map_on_demand = map_on_demand;
        setup.max_frags = max_frags;
        setup
    };
    let ten = Cut::gapped(4096, 1);
    for (setup, far, expected) in [
        (plain(Profile::frwr()), ten, [1, 0, 0, 0, 0, 0]),
        (plain(Profile::mlx4()), Cut::pages(5), [0, 1, 0, 0, 0, 0]),
        (plain(Profile::mlx4()), ten, [0, 0, 0, 0, 0, 1]),
        (plain(Profile::rxe()), Cut::flat(5), [0, 0, 1, 0, 0, 0]),
        (plain(Profile::rxe()), ten, [0, 0, 0, 0, 0, 1]),
        (exposed(Profile::rxe(), 1, 257), ten, [0, 0, 0, 0, 1, 0]),
        (exposed(Profile::rxe(), 1, 9), ten, [0, 0, 0, 0, 0, 1]),
        (exposed(Profile::frwr(), 1, 257), ten, [1, 0, 0, 0, 0, 0]),
        (exposed(Profile::frwr(), 10, 257), ten, [1, 0, 0, 0, 0, 0]),
        (exposed(Profile::frwr(), 11, 257), ten, [0, 0, 0, 0, 1, 0]),
        (exposed(Profile::frwr(), 0, 257), ten, [0, 0, 0, 0, 1, 0]),
        (exposed(Profile::frwr(), 0, 9), ten, [1, 0, 0, 0, 0, 0]),
        (exposed(Profile::bare(), 1, 1), ten, [0, 0, 0, 0, 0, 1]),
        (plain(Profile::mthca()), Cut::pages(5), [0, 0, 0, 1, 0, 0]),
        (plain(Profile::mthca()), ten, [0, 0, 0, 0, 0, 1]),
        (
            exposed(Profile::mthca(), 1, 16),
            Cut::pages(0),
            [0, 0, 0, 1, 0, 0],
        ),
        (exposed(Profile::mthca(), 1, 16), ten, [0, 0, 0, 0, 1, 0]),
    ] {
        assert_eq!(ten.lengths(40_000).len(), 10);
        if !B::plays(&setup.profile) {
            continue;
        }
        assert_eq!(
            counted::<B>([setup; 2], far),
            expected,
            "{:?}",
            setup.profile
        );
    }
    // The shorter of the two says how many fragments the sink may send.
    let [mut source, sink] = [exposed(Profile::rxe(), 1, 257); 2];
    source.max_frags = 9;
    assert_eq!(counted::<B>([source, sink], ten), [0, 0, 0, 0, 0, 1]);
}

/// Of two staging buffers one is ours: a second GET waits for it, and a peer's PUT does not.
pub(crate) fn an_empty_pool_makes_transfers_wait_and_the_peers_have_their_share<B: Backend>() {
    let mut setup = Setup::new(Profile::windows());
    setup.shape.staging = 2;
    let mut world = B::world([setup; 2]);
    let connection = world.connect();
    let mut jobs = Vec::new();
    for from in [0, 1] {
        for operation in [PUT, GET, ROUTED_GET, GET] {
            jobs.push(Job::new(
                from,
                operation,
                300_000,
                Cut::gapped(9000, 1),
                Cut::gapped(7000, 1),
            ));
        }
    }
    Jobs::run(&mut world, connection, &jobs, |_| {});
    for node in &world.nodes {
        assert_eq!(node.counters.stagings.get(), 4, "three GETs, and a PUT");
        assert!(node.counters.waits.get() != 0);
        assert_eq!(node.counters.staged_bytes.get(), 4 * 300_000);
    }
    world.end();
}

pub(crate) fn long_source_lists_go_in_instalments<B: Backend>() {
    let at_once: &[u16] = if B::REAL { &[1, 4] } else { &[1, 2, 4, 16] };
    for (max_sge, pieces) in [(1_u32, 40_u32), (4, 100), (30, 257), (7, 257)] {
        for &writes_at_once in at_once {
            for operation in [PUT, GET, ROUTED_GET] {
                let mut setup = Setup::new(B::plain());
                setup.profile.capabilities.max_sge = max_sge;
                setup.shape.writes_at_once = writes_at_once;
                let length = pieces * 400;
                let even = Cut {
                    trim: 0,
                    ..Cut::gapped(400, 1)
                };
                let (mut near, mut far) = (Cut::flat(9), even);
                if operation == PUT {
                    core::mem::swap(&mut near, &mut far);
                }
                // Three at a time: their instalments interleave.
                let jobs = [Job::new(1, operation, length, near, far); 3];
                let counted = run::<B>(setup, &jobs);
                let source = usize::from(operation == PUT);
                let writes = 3 * u64::from(pieces.div_ceil(max_sge));
                assert_eq!(counted[source][0], writes, "{max_sge} {writes_at_once}");
            }
        }
    }
}

pub(crate) fn a_window_takes_one_contiguous_range_and_no_more<B: Backend>() {
    let setup = Setup::new(Profile::windows());
    for operation in [PUT, GET, ROUTED_GET] {
        let counted = run::<B>(
            setup,
            &[
                Job::new(0, operation, 50_000, Cut::flat(1), Cut::flat(4095)),
                Job::new(
                    1,
                    operation,
                    50_000,
                    Cut::gapped(999, 1),
                    Cut::gapped(999, 1),
                ),
                Job::new(1, operation, 3976, Cut::gapped(99, 1), Cut::gapped(99, 1)),
            ],
        );
        // Where the first job's sink is.
        let sink = usize::from(operation == PUT);
        assert_eq!((counted[sink][1], counted[1 - sink][1]), (1, 0));
    }
}

pub(crate) fn lu_15092_lu_9500_a_mebibyte_at_every_odd_offset<B: Backend>() {
    for profile in [Profile::frwr(), Profile::mlx5(), Profile::rxe()] {
        for (offset, operation) in [1, 4095]
            .into_iter()
            .flat_map(|offset| [PUT, GET, ROUTED_GET].map(|operation| (offset, operation)))
            .filter(|_| B::plays(&profile))
        {
            let (near, far) = (Cut::flat(offset), Cut::flat(4096 - offset));
            let jobs = [Job::new(0, operation, MEBIBYTE, near, far)];
            run::<B>(Setup::new(profile), &jobs);
        }
    }
}
