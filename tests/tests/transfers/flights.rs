//! Many transfers at a time, both ways, on one core and on two.

use o2poll_dataplane::endpoint::{EntryOptions, Event, Operation};
use o2poll_tests::lend::alone;
use o2poll_tests::mover::{self, SIZES, SLOTS};
use o2poll_tests::{Backend, Cut, Job, Jobs, Node, Plot, Setup, World};

const PUT: Operation = Operation::Put {
    hdr_data: 7,
    ack: true,
};
const QUIET: Operation = Operation::Put {
    hdr_data: 8,
    ack: false,
};
const GET: Operation = Operation::Get { optimized: true };
const ROUTED_GET: Operation = Operation::Get { optimized: false };

/// As many from each side as a connection carries, messages and bulk transfers of all kinds between each other.
pub(crate) fn one_eight_and_sixty_four_in_flight_both_ways<B: Backend>() {
    for depth in [1_u16, 8, 64] {
        alone(|| {
            let mut setup = Setup::new(B::plain());
            setup.shape.queue_depth = depth;
            setup.shape.windows = usize::from(depth).max(2);
            setup.shape.entries = 64;
            setup.shape.waiting = 64;
            setup.memory = 16 << 20;
            setup.events = 256;
            let mut world = B::world([setup; 2]);
            let connection = world.connect();
            let kinds = [PUT, GET, QUIET, ROUTED_GET];
            let jobs: Vec<Job> = (0..u32::from(depth.max(2)))
                .flat_map(|n| [(0, n), (1, n + 1)])
                .map(|(from, n)| {
                    let length = [1, 9000, 3976, 3977, 20_000, 4097][n as usize % 6];
                    let operation = kinds[n as usize / 6 % 4];
                    Job::new(from, operation, length, Cut::flat(1), Cut::flat(4095))
                })
                .collect();
            Jobs::run(&mut world, connection, &jobs, |_| {});
            for node in &mut world.nodes {
                let heard = node.poller.nic().last();
                assert!(heard.most_outstanding <= u64::from(depth));
                assert!(depth < 8 || heard.most_outstanding > u64::from(depth) / 2);
            }
            world.end();
        });
    }
}

/// No DONE, no key killed from afar, and every credit comes back.
pub(crate) fn many_transfers_that_end_with_their_last_write_leave_nothing_behind<B: Backend>() {
    const LENGTH: u32 = 70_000;
    const SOURCE: u64 = 7;
    let mut setup = Setup::new(B::plain());
    setup.memory = 4 << 20;
    setup.shape.windows = 8;
    setup.write_immediates = true;
    let mut world = B::world([setup; 2]);
    let connection = world.connect();
    for at in 0..2 {
        let (memory, _) = Plot::new(&mut world.nodes[at].arena, LENGTH, Cut::flat(0));
        let options = EntryOptions::PUT | EntryOptions::GET;
        world.export(at, SOURCE, options, memory);
    }
    for round in 0..40 {
        for (at, connection) in connection.into_iter().enumerate() {
            let (memory, _) = Plot::new(&mut world.nodes[at].arena, 10_000, Cut::flat(3));
            let operation = if round % 2 == 0 { GET } else { QUIET };
            let request = World::request(connection, round, SOURCE, 0, operation, memory);
            world.nodes[at].submit(request);
        }
        for at in 0..2 {
            match world.event(at) {
                Event::Done { outcome, .. } => assert_eq!(outcome, Ok(10_000)),
                other => panic!("{other:?}"),
            }
        }
        world.rest();
    }
    for node in &mut world.nodes {
        assert_eq!(node.counters.write_immediates.get(), 40);
        assert_eq!(node.counters.remote_invalidations.get(), 0);
        let heard = node.poller.nic().last();
        assert_eq!((heard.sent("PUT_DONE"), heard.sent("GET_DONE")), (0, 0));
    }
    world.end();
}

pub(crate) fn two_threads_move_every_size_both_ways_and_stop<B: Backend>()
where
    Node<B>: Send,
{
    let times = if B::REAL { 1 } else { 4 };
    mover::on_two_threads::<B>(B::plain(), (SLOTS * SIZES.len() * times) as u64);
}
