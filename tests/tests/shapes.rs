//! Which shapes of memory go under one key, by which mechanism, and in how many WRITEs.

use o2poll_dataplane::endpoint::{Error, Event, Operation};
use o2poll_dataplane::nic::Mechanisms;
use o2poll_soft::Profile;
use o2poll_tests::{Cut, Job, Jobs, Setup, World};

const PUT: Operation = Operation::Put {
    hdr_data: 7,
    ack: true,
};
const GET: Operation = Operation::Get { optimized: true };
const ROUTED_GET: Operation = Operation::Get { optimized: false };

/// Runs the jobs; registrations by fragment list and by page list of both nodes, and WRITEs of both.
fn run(setup: Setup, jobs: &[Job]) -> [[u64; 3]; 2] {
    let mut world = World::new(setup);
    let connection = world.connect();
    Jobs::run(&mut world, connection, jobs, |_| {});
    let counted = [0, 1].map(|at| {
        let node = &mut world.nodes[at];
        let writes = node.poller.nic().last().writes;
        let counters = node.counters;
        [
            counters.fragment_lists.get(),
            counters.page_lists.get(),
            writes,
        ]
    });
    world.end();
    counted
}

fn pages_only() -> Setup {
    let mut setup = Setup::new(Profile::frwr());
    setup.profile.capabilities.mechanisms = Mechanisms::PAGES;
    setup
}

#[test]
fn lu_8057_two_hundred_and_fifty_seven_fragments_go_under_one_key() {
    let cut = Cut {
        trim: 1,
        ..Cut::gapped(4081, 0)
    };
    let length = 4081 * 256;
    assert_eq!(cut.lengths(length).len(), 257);
    for operation in [PUT, GET, ROUTED_GET] {
        let counted = run(
            Setup::new(Profile::frwr()),
            &[Job::new(1, operation, length, cut, cut)],
        );
        let lists: u64 = counted.iter().map(|node| node[0]).sum();
        assert_eq!(lists, 1, "one registration for the whole sink");
    }
}

#[test]
fn a_mebibyte_at_an_odd_offset_is_a_list_of_257_pages() {
    let counted = run(
        pages_only(),
        &[Job::new(1, GET, 1 << 20, Cut::pages(1), Cut::flat(0))],
    );
    assert_eq!(counted[1][..2], [0, 1]);
}

#[test]
fn page_lists_take_page_shaped_memory() {
    for offset in [0, 1, 4095] {
        for operation in [PUT, GET, ROUTED_GET] {
            let cut = Cut::pages(offset);
            let counted = run(pages_only(), &[Job::new(0, operation, 100_000, cut, cut)]);
            let sink = usize::from(operation == PUT);
            assert_eq!(counted[sink][..2], [0, 1], "{offset} {operation:?}");
        }
    }
}

#[test]
fn lu_10089_lu_20400_page_lists_refuse_gaps_by_name_and_leak_nothing() {
    // `Jobs` expects what the rule says; here it is said once more, in words.
    let mut world = World::new(pages_only());
    let connection = world.connect();
    for (operation, near, far) in [
        (GET, Cut::gapped(1000, 0), Cut::flat(0)),
        (ROUTED_GET, Cut::gapped(1000, 0), Cut::flat(0)),
        (PUT, Cut::flat(0), Cut::gapped(1000, 0)),
    ] {
        let arena = &mut world.nodes[0].arena;
        let (sink, _) = o2poll_tests::Plot::new(arena, 9000, far);
        let options = o2poll_dataplane::endpoint::EntryOptions::PUT
            | o2poll_dataplane::endpoint::EntryOptions::GET;
        let entry = world.export(0, 40, options, sink);
        let arena = &mut world.nodes[1].arena;
        let (memory, plot) = o2poll_tests::Plot::new(arena, 9000, near);
        let submission = World::request(connection[1], 1, 40, 0, operation, memory);
        world.nodes[1].submit(submission);
        let Event::Done { outcome, .. } = world.event(1) else {
            panic!("not done");
        };
        let expected = match operation {
            PUT => Error::Peer(-93),
            _ => Error::Unmappable,
        };
        assert_eq!(outcome, Err(expected), "{operation:?}");
        plot.check(&world.nodes[1].arena, "refused");
        world.rest();
        for node in &world.nodes {
            let left = node.poller.leftovers();
            assert_eq!((left.transfers, left.windows), (0, 0));
        }
        world.nodes[0].submit(o2poll_dataplane::endpoint::Submission::Detach { entry });
        assert!(matches!(world.event(0), Event::Detached { why: None, .. }));
    }
    // The first ends on a page boundary, and the second does not begin on one.
    let late = Cut {
        hole: 4100,
        ..Cut::pages(0)
    };
    let jobs = [GET, ROUTED_GET].map(|operation| Job::new(1, operation, 8192, late, Cut::flat(0)));
    Jobs::run(&mut world, connection, &jobs, |_| {});
    // The connection is as good as new.
    Jobs::run(
        &mut world,
        connection,
        &[Job::new(1, GET, 9000, Cut::flat(0), Cut::gapped(500, 0))],
        |_| {},
    );
    world.end();
}

#[test]
fn page_shaped_lists_beyond_a_short_fragment_list_go_as_page_lists() {
    let mut setup = Setup::new(Profile::frwr());
    setup.profile.capabilities.max_fragments = 4;
    for operation in [PUT, GET] {
        let cut = Cut::pages(0);
        assert_eq!(cut.lengths(1 << 20).len(), 256);
        let counted = run(setup, &[Job::new(0, operation, 1 << 20, cut, cut)]);
        let sink = usize::from(operation == PUT);
        assert_eq!(counted[sink][..2], [0, 1], "256 pages");
        let counted = run(
            setup,
            &[Job::new(
                0,
                operation,
                16384,
                Cut::gapped(4096, 0),
                Cut::gapped(4096, 0),
            )],
        );
        assert_eq!(counted[sink][..2], [1, 0], "4 fragments");
    }
    // Five fragments with gaps fit neither.
    let refused = Job::new(0, GET, 4096 * 4 + 1, Cut::gapped(4096, 0), Cut::flat(0));
    assert_eq!(run(setup, &[refused])[0][..2], [0, 0]);
}
