//! A buffer is not refused for its shape: every mechanism, on both sides. `matrix.rs` has nodes that are not alike.

use o2poll_dataplane::endpoint::{Error, Event, Operation, Submission};
use o2poll_dataplane::nic::{Sge, Status};
use o2poll_dataplane::poller::{Order, Reason, Shape};
use o2poll_dataplane::wire::Body;
use o2poll_soft::Profile;
use o2poll_tests::lab::told;
use o2poll_tests::raw_peer::Grant;
use o2poll_tests::{Cut, Job, Jobs, Lab, Setup, World};

const PUT: Operation = Operation::Put {
    hdr_data: 7,
    ack: true,
};
const GET: Operation = Operation::Get { optimized: true };
const ROUTED_GET: Operation = Operation::Get { optimized: false };
const MEBIBYTE: u32 = 1 << 20;

/// A registered source takes one WRITE for each fragment of the sink, however many pieces it has.
#[test]
fn a_registered_source_is_written_at_once() {
    for (profile, operation) in [Profile::frwr(), Profile::mlx5()]
        .into_iter()
        .flat_map(|profile| [PUT, GET, ROUTED_GET].map(|operation| (profile, operation)))
    {
        let mut setup = Setup::new(profile);
        setup.profile.capabilities.max_sge = 1;
        setup.shape.writes_at_once = 1;
        setup.shape.register_source_from = 2;
        let mut world = World::new(setup);
        let connection = world.connect();
        let (mut near, mut far) = (Cut::flat(9), Cut::gapped(2000, 1));
        if operation == PUT {
            core::mem::swap(&mut near, &mut far);
        }
        let jobs = [Job::new(0, operation, 80_000, near, far); 3];
        Jobs::run(&mut world, connection, &jobs, |_| {});
        let source = usize::from(operation != PUT);
        let node = &mut world.nodes[source];
        assert_eq!(node.poller.nic().last().writes, 3, "{operation:?}");
        assert_eq!(node.counters.source_lists.get(), 3);
        assert_eq!(node.counters.invalidations.get(), 3, "its key dies, too");
        world.end();
    }
    let shape = |register_source_from| Shape {
        queue_depth: 8,
        writes_at_once: 1,
        register_source_from,
        ..Setup::new(Profile::frwr()).shape
    };
    assert_eq!((shape(0).send_wr(), shape(2).send_wr()), (51, 75));
}

/// A lab whose node stages what lies in two pieces, and the address of each.
fn lab() -> Lab {
    let mut setup = Setup::new(Profile::windows());
    setup.memory = 10 << 20;
    setup.shape.connections = 4;
    setup.shape.windows = 8;
    setup.shape.staging = 2;
    setup.timeout = 4000;
    setup.abandon = 4000;
    Lab::connected(setup, 2)
}

fn ask(lab: &mut Lab, token: u64, length: u32) -> (Vec<Sge>, Grant) {
    let memory = lab
        .node
        .arena
        .list(&[length / 2, length - length / 2], 3, 5);
    let pieces = memory.pieces().to_vec();
    let connection = lab.connection(0);
    let request = World::request(connection, token, 7, 0, GET, memory);
    lab.node.submit(request);
    (pieces, lab.receive(0).grant())
}

fn peek(lab: &Lab, pieces: &[Sge]) -> Vec<u8> {
    pieces
        .iter()
        .flat_map(|piece| lab.node.arena.peek(piece.address, piece.length as usize))
        .collect()
}

#[test]
fn only_what_arrived_is_copied_and_only_when_the_key_is_dead() {
    for status in [0, 1, 60_000, 200_000, -5] {
        let mut lab = lab();
        let (pieces, grant) = ask(&mut lab, 1, 200_000);
        assert_eq!(grant.length, 200_000);
        let before = peek(&lab, &pieces);
        let id = lab.peers[0].write(grant.key, grant.address, &[0x5a; 4000]);
        assert_eq!(lab.outcome(0, id), Ok(()));
        lab.settle();
        assert!(peek(&lab, &pieces) == before, "copied before the DONE");
        assert_eq!(lab.node.poller.leftovers().staging, 1);
        lab.peers[0].say(Body::GetDone(grant.done(status)));
        let expected = u32::try_from(status).map_err(|_| Error::Peer(status));
        assert_eq!(told(lab.event()), expected);
        let copied = u64::from(expected.unwrap_or(0));
        assert_eq!(lab.node.counters.staged_bytes.get(), copied);
        let after = peek(&lab, &pieces);
        let written = usize::try_from(copied.min(4000)).unwrap();
        assert!(after[..written].iter().all(|byte| *byte == 0x5a));
        let rest = usize::try_from(copied).unwrap();
        assert!(after[rest..] == before[rest..]);
        assert_eq!(lab.node.poller.leftovers().staging, 0);
        // The peer kept the key.
        let id = lab.peers[0].write(grant.key, grant.address, &[0xbd; 200]);
        assert_eq!(lab.outcome(0, id), Err(Status::RemoteAccess));
        assert!(matches!(lab.gone(lab.connection(0)), Reason::Device(_)));
        assert!(peek(&lab, &pieces) == after);
        lab.works(1);
        lab.end();
    }
}

/// What interrupts a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Blow {
    Cancel,
    TimeOut,
    Close,
    Stop,
}

#[test]
fn a_copy_goes_in_slices_and_can_be_interrupted() {
    for blow in [Blow::Cancel, Blow::TimeOut, Blow::Close, Blow::Stop] {
        let mut lab = lab();
        let (_, grant) = ask(&mut lab, 1, MEBIBYTE);
        lab.peers[0].say(Body::GetDone(grant.done(1 << 20)));
        let copied = |lab: &Lab| lab.node.counters.staged_bytes.get();
        assert!(lab.until(1000, |lab| copied(lab) != 0));
        for turns in 1..4 {
            assert_eq!(copied(&lab), turns * 65_536, "one slice per poll");
            lab.step();
        }
        let connection = lab.connection(0);
        let why = match blow {
            Blow::Cancel => {
                lab.cancel(1);
                Error::Cancelled
            }
            Blow::TimeOut => {
                lab.now.0 += 5000;
                Error::TimedOut
            }
            Blow::Close => {
                lab.node.order(Order::Close { connection });
                Error::ConnectionClosed
            }
            Blow::Stop => {
                lab.node.order(Order::Stop);
                Error::ConnectionClosed
            }
        };
        match told(lab.event_of(1)) {
            // The hand of the clock may come round too late for it.
            Ok(MEBIBYTE) if blow == Blow::TimeOut => {}
            outcome => assert_eq!(outcome, Err(why), "{blow:?}"),
        }
        assert_eq!(lab.node.counters.keys_alive.get(), 0);
        let left = lab.node.poller.leftovers();
        assert_eq!((left.staging, left.windows), (0, 0));
        if blow != Blow::Stop {
            lab.works(1);
        }
        lab.end();
    }
}

/// The arena's key cannot be killed: a transfer that is given up keeps its memory until its connection has ended.
#[test]
fn memory_under_the_arena_key_comes_back_with_the_end_of_its_connection() {
    for late in [false, true] {
        let mut setup = Setup::new(Profile::rxe());
        setup.memory = 2 << 20;
        setup.shape.connections = 4;
        setup.registration.expose_arena = true;
        setup.registration.map_on_demand = 0;
        setup.timeout = 4000;
        setup.abandon = 4000;
        let mut lab = Lab::connected(setup, 2);
        let piece = lab.ask(0, 1, GET, 20_000);
        let grant = lab.receive(0).grant();
        assert_eq!(grant.address, piece.address);
        assert_eq!(lab.node.counters.arena_exposed.get(), 1);
        assert_eq!(lab.node.counters.keys_alive.get(), 0);
        lab.cancel(1);
        for _ in 0..1000 {
            lab.step();
        }
        assert!(lab.node.events.pop().is_none(), "the peer may write yet");
        if late {
            lab.peers[0].say(Body::GetDone(grant.done(20_000)));
        }
        assert_eq!(told(lab.event()), Err(Error::Cancelled));
        assert_eq!(lab.node.gone.is_empty(), late);
        lab.works(1);
        lab.end();
    }
}

/// A page list that is too short for a megabyte covers a staging buffer in larger pages, if that lies well.
#[test]
fn short_page_lists_cover_a_staging_buffer_in_larger_pages() {
    for (pages, align, moves) in [
        (256, 4096, true),
        (16, 1 << 16, true),
        (3, 1 << 20, true),
        (16, 1 << 15, false),
    ] {
        let mut setup = Setup::new(Profile::mlx4());
        setup.profile.capabilities.max_pages = pages;
        setup.shape.staging = 2;
        setup.stage_align = align;
        let mut world = World::new(setup);
        let connection = world.connect();
        let length = MEBIBYTE - 512;
        if moves {
            let jobs = [PUT, GET, ROUTED_GET].map(|operation| {
                Job::new(
                    0,
                    operation,
                    length,
                    Cut::gapped(65_000, 1),
                    Cut::gapped(65_001, 1),
                )
            });
            Jobs::run(&mut world, connection, &jobs, |_| {});
            let staged = |at: usize| world.nodes[at].counters.stagings.get();
            assert_eq!((staged(0), staged(1)), (2, 1));
        } else {
            let memory = world.nodes[0].arena.list(&[length / 2, length / 2], 8, 3);
            let request = World::request(connection[0], 1, 40, 0, GET, memory);
            world.nodes[0].submit(request);
            assert_eq!(told(world.event(0)), Err(Error::Unmappable));
        }
        world.end();
    }
}

/// Without windows, staging buffers or an exposed arena nothing covers a buffer, and that is said.
#[test]
fn a_device_without_any_key_refuses_by_name() {
    let mut setup = Setup::new(Profile::bare());
    setup.shape.staging = 1;
    let mut world = World::new(setup);
    let connection = world.connect();
    let memory = world.nodes[0].arena.flat(5000, 0);
    let submission: Submission<'static> = World::request(connection[0], 1, 40, 0, GET, memory);
    world.nodes[0].submit(submission);
    let Event::Done { outcome, .. } = world.event(0) else {
        panic!("not done");
    };
    assert_eq!(outcome, Err(Error::Unmappable));
    assert_eq!(world.nodes[0].counters.unmappable.get(), 1);
    world.end();
}
