//! The queues of a connection hold what the data plane puts there at its worst, and are not one longer than that
//! where a transfer takes one WRITE at a time.
//!
//! The worst moment is made, not computed: every transfer of both shares is brought as far as its peer must bring it, the
//! peer stops acknowledging, and then everything that is left of every transfer goes on the send queue.

use o2poll_dataplane::endpoint::{EntryOptions, Operation};
use o2poll_dataplane::poller::{Order, Shape};
use o2poll_dataplane::pool::Handle;
use o2poll_dataplane::time::Ticks;
use o2poll_dataplane::wire::{Body, Descriptor, Fragment};
use o2poll_soft::Profile;
use o2poll_tests::lend::reclaim;
use o2poll_tests::{Lab, Setup};

const BULK: u32 = 8192;
const SINK: u64 = 1;
const SOURCE: u64 = 2;
const GET: Operation = Operation::Get { optimized: true };
const PUT: Operation = Operation::Put {
    hdr_data: 0,
    ack: false,
};

/// What one transfer of a share is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// REGISTER, its message, INVALIDATE.
    Sink,
    /// WRITEs and DONE, into so many fragments.
    Source(u32),
}

fn setup(shape: Shape) -> Setup {
    let mut setup = Setup::new(Profile::frwr());
    setup.shape = shape;
    setup.memory = (usize::from(shape.queue_depth) * 12 + 64) * 8192;
    setup.wire = 2048;
    setup.events = 1024;
    setup.reports = 2048;
    setup.timeout = 80_000;
    setup.abandon = 80_000;
    setup.keepalive = 5_000;
    setup
}

const fn shape(queue_depth: u16, writes_at_once: u16) -> Shape {
    Shape {
        connections: 1,
        queue_depth,
        writes_at_once,
        waiting: 0,
        windows: 2 * queue_depth as usize,
        staging: 0,
        mappings: 0,
        register_source_from: 0,
        entries: 4,
    }
}

/// Cuts `BULK` bytes into so many fragments.
fn fragments(lab: &mut Lab, count: u32) -> Vec<Fragment> {
    let each = BULK / count;
    let mut pieces = vec![each; count as usize];
    pieces[0] += BULK - each * count;
    lab.peers[0].sink(&pieces, 0)
}

/// Runs `body` and frees what its labs stood on: there are hundreds.
#[expect(unsafe_code, reason = "the harness lends what it must take back")]
fn alone<T: Copy>(body: impl FnOnce() -> T) -> T {
    let mut result = None;
    // SAFETY: what comes out is a number; the labs are gone when the body returns.
    unsafe { reclaim(|| result = Some(body())) };
    result.expect("the body ran")
}

/// Brings both shares of the connection to their worst; how many requests are on the send queue then. One or two are NOOPs.
fn worst(lab: &mut Lab, own: Kind, peer: Kind) -> u32 {
    let depth = u64::from(lab.terms(0).queue_depth);
    lab.settle();
    let options = EntryOptions::PUT | EntryOptions::GET | EntryOptions::TRUNCATE;
    lab.export(SINK, options, BULK);
    lab.export(SOURCE, options, BULK);
    let operation = if own == Kind::Sink { GET } else { PUT };
    let mut last: Vec<Body<'static>> = Vec::new();
    let mut acks = Vec::new();
    for token in 0..depth {
        lab.ask(0, 100 + token, operation, BULK);
        let request = lab.receive(0);
        match own {
            Kind::Sink => last.push(Body::GetDone(request.grant().done(0))),
            Kind::Source(_) => acks.push(request.cookie()),
        }
    }
    if peer == Kind::Sink {
        for cookie in 0..depth {
            let request = lab.peers[0].put_req(1000 + cookie, SINK, BULK);
            lab.peers[0].say(request);
            last.push(Body::PutDone(lab.receive(0).grant().done(0)));
        }
    }
    lab.settle();
    // From here on nothing is acknowledged; and a NOOP goes first, so that nothing behind it completes.
    lab.frozen[0] = true;
    let before = queued(lab);
    lab.now = lab.now.after(Ticks(10_001));
    for _ in 0..20 {
        lab.step();
    }
    assert_eq!(queued(lab), before + 1, "the NOOP");
    for body in last {
        lab.peers[0].say(body);
    }
    if let Kind::Source(count) = own {
        let sink = fragments(lab, count);
        for cookie in acks {
            let key = lab.peers[0].key();
            lab.peers[0].say(Body::PutAck {
                source_cookie: cookie,
                sink_cookie: cookie,
                sink: Descriptor::new(key, &sink),
            });
        }
    }
    if let Kind::Source(count) = peer {
        let sink = fragments(lab, count);
        for cookie in 0..depth {
            let key_and_all = lab.peers[0].get_req(2000 + cookie, SOURCE, &sink);
            lab.peers[0].say(key_and_all);
        }
    }
    for _ in 0..200 {
        lab.step();
    }
    while lab.node.events.pop().is_some() {}
    queued(lab)
}

fn queued(lab: &Lab) -> u32 {
    queued_of(lab, lab.connection(0))
}

fn queued_of(lab: &Lab, connection: Handle) -> u32 {
    lab.node
        .poller
        .on_send_queue(connection)
        .expect("connected")
}

/// The connection ends while everything is on its queues: all of it is flushed at once, into a completion queue of
/// exactly the size that was asked for.
fn flush(mut lab: Lab) {
    let connection = lab.connection(0);
    lab.frozen[0] = false;
    lab.node.order(Order::Close { connection });
    lab.gone(connection);
    lab.end();
}

fn measure(shape: Shape, own: Kind, peer: Kind) -> u32 {
    alone(|| {
        let mut lab = Lab::connected(setup(shape), 1);
        let count = worst(&mut lab, own, peer);
        flush(lab);
        count
    })
}

/// Chains that the device cut at the worst moment where its send queue is so many entries short, and whether the drain
/// of an end in that moment found its place.
fn squeezed(short: u32) -> (u64, bool) {
    alone(|| {
        let shape = shape(DEPTH_THAT_FILLS, 1);
        let mut setup = setup(shape);
        setup.short = short;
        let mut lab = Lab::connected(setup, 1);
        let used = worst(&mut lab, Kind::Sink, Kind::Sink);
        let connection = lab.connection(0);
        lab.node.order(Order::Close { connection });
        lab.step();
        lab.step();
        let cut = lab.node.counters.partial_doorbells.get();
        let drains = queued_of(&lab, connection) == used + DRAIN;
        lab.frozen[0] = false;
        lab.gone(connection);
        lab.end();
        (cut, drains)
    })
}

#[test]
fn one_entry_less_and_the_worst_moment_does_not_fit() {
    assert_eq!(squeezed(0), (0, true));
    assert_eq!(squeezed(1), (0, false));
    assert_ne!(squeezed(2).0, 0);
}

/// A depth at which both NOOPs are on the queue in the worst moment.
const DEPTH_THAT_FILLS: u16 = 32;

/// The last place, which is for the drain.
const DRAIN: u32 = 1;

#[test]
fn lu_9943_with_one_write_at_a_time_the_send_queue_is_exactly_long_enough() {
    let mut full = 0;
    for depth in 8..=255 {
        let shape = shape(depth, 1);
        let used = measure(shape, Kind::Sink, Kind::Sink);
        let transfers = 6 * u32::from(depth);
        assert!((transfers + 1..=transfers + 2).contains(&used), "{depth}");
        assert!(used + DRAIN <= shape.send_wr(), "depth {depth}");
        // One place less, and this moment would not fit.
        full += u32::from(used + DRAIN == shape.send_wr());
    }
    assert!(full > 200, "{full}");
}

#[test]
fn lu_10459_no_number_of_fragments_takes_more_than_there_is() {
    for writes in [1, 2, 4, 16] {
        let shape = shape(8, writes);
        let mut most = 0;
        for count in (1..=257).filter(|count| *count <= 20 || count % 16 == 1) {
            let kinds = [Kind::Sink, Kind::Source(count)];
            for own in kinds {
                for peer in kinds {
                    let used = measure(shape, own, peer);
                    assert!(
                        used + DRAIN <= shape.send_wr(),
                        "{own:?} {peer:?} at once {writes}"
                    );
                    most = most.max(used);
                }
            }
        }
        // A PUT of ours posts its WRITEs only when its PUT_REQ is off the queue: of its `w + 2` one is to spare. And a
        // chain that is full ends an instalment early.
        let spare = if writes == 1 { 0 } else { 8 };
        assert!(most + DRAIN + spare <= shape.send_wr(), "{writes} at once");
        if writes <= 4 {
            assert!(most + DRAIN + spare + 4 >= shape.send_wr(), "{most}");
        }
    }
}

#[test]
fn at_depths_between_the_largest_share_decides() {
    for depth in [9, 31, 64, 128, 255] {
        for writes in [2, 4, 16] {
            let shape = shape(depth, writes);
            let sources = measure(
                shape,
                Kind::Source(writes.into()),
                Kind::Source(writes.into()),
            );
            assert!(sources + DRAIN <= shape.send_wr(), "{depth} {writes}");
        }
    }
}

/// Everything that a core holds is on its queues, and all connections fail in the same moment.
#[test]
fn lu_12279_lu_12065_all_connections_flushed_at_once_do_not_overrun_the_completion_queue() {
    for kind in [Kind::Sink, Kind::Source(4)] {
        let shape = Shape {
            connections: 3,
            windows: 48,
            entries: 8,
            ..shape(8, 4)
        };
        let mut lab = Lab::connected(setup(shape), 3);
        let mut used = worst(&mut lab, kind, kind);
        lab.frozen[0] = true;
        // `worst` plays peer 0: the others change places with it.
        for other in 1..3 {
            lab.peers.swap(0, other);
            lab.connections.swap(0, other);
            lab.frozen.swap(0, other);
            used += worst(&mut lab, kind, kind);
        }
        let sizes = shape.sizes();
        let receives = 3 * sizes.recv_wr;
        assert!(used + receives <= sizes.cqe);
        let connections: Vec<_> = (0..3).map(|peer| lab.connection(peer)).collect();
        for connection in &connections {
            lab.node.order(Order::Close {
                connection: *connection,
            });
        }
        lab.frozen.fill(false);
        for connection in connections {
            lab.gone(connection);
        }
        lab.end();
    }
}
