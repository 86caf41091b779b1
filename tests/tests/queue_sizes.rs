//! The queues of a connection hold what the data plane puts there at its worst, and are not one entry longer than that.
//!
//! The worst moment is made, not computed: every transfer of both shares is brought as far as its peer must bring it, the
//! peer stops acknowledging, and then everything that is left of every transfer goes on the send queue. Then the
//! connection ends, and all of it is flushed into a completion queue of exactly the size that was asked for.
//!
//! Depths (8 to 255), WRITEs at a time (`w`, 1 to 16) and fragments of the sink (1 to 257) are too many for one
//! product. A transfer never has more than `w` WRITEs on the queue, so that fragments come in only as `min(count, w)`,
//! and by whether the DONE fits behind them (`count <= w`). That is taken apart:
//!
//! 1. all fragments and all `w`, for every pair of kinds, at depth 8: above `w` the number of fragments makes no
//!    difference, and at or below none takes more than `w` itself;
//! 2. all depths and all `w`, with as many fragments as that: the classes of 1;
//! 3. all fragments at depths between, with the `w` that nodes are shipped with.
//!
//! Each for plain sources, for registered ones, and for peers that kill keys (SEND_WITH_INV).

use o2poll_dataplane::endpoint::{EntryOptions, Operation};
use o2poll_dataplane::memory::PageList;
use o2poll_dataplane::nic::Fault;
use o2poll_dataplane::poller::{Order, Shape};
use o2poll_dataplane::pool::Handle;
use o2poll_dataplane::time::Ticks;
use o2poll_dataplane::wire::lnet::{self, WireHandle};
use o2poll_dataplane::wire::{Body, Descriptor, Fragment};
use o2poll_soft::Profile;
use o2poll_tests::lend::alone;
use o2poll_tests::raw_peer::get;
use o2poll_tests::{Lab, RawPeer, Setup, World};

const BULK: u32 = 4112;
const SINK: u64 = 1;
const SOURCE: u64 = 2;
const GET: Operation = Operation::Get { optimized: true };
const ASK: Operation = Operation::Get { optimized: false };
const PUT: Operation = Operation::Put {
    hdr_data: 0,
    ack: false,
};

/// What the transfers of a share are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// REGISTER, its message, INVALIDATE: a GET of ours, a PUT of the peer.
    Sink,
    /// The same for a GET of ours that went as a message: its REPLY comes by PUT_REQ.
    Asked,
    /// WRITEs into so many fragments, and DONE: a PUT of ours, a GET of the peer.
    Source(u32),
    /// PUT_REQ, and then the same: a GET of the peer that came as a message. It holds a credit of ours all the while, as
    /// every bulk request of ours would.
    Reply(u32),
}

/// What both sides are set to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Plain,
    /// Sources of two ranges are registered.
    Registered,
    /// DONEs kill keys.
    Kills,
    /// The last WRITE takes the place of a DONE.
    Immediate,
}

const MODES: [Mode; 4] = [Mode::Plain, Mode::Registered, Mode::Kills, Mode::Immediate];

fn shape(queue_depth: u16, writes_at_once: u16, mode: Mode) -> Shape {
    Shape {
        connections: 1,
        queue_depth,
        writes_at_once,
        waiting: 0,
        windows: 2 * usize::from(queue_depth),
        staging: 0,
        mappings: 0,
        register_source_from: if mode == Mode::Registered { 2 } else { 0 },
        entries: 4,
    }
}

fn setup(shape: Shape, mode: Mode) -> Setup {
    let mut setup = Setup::new(Profile::frwr());
    setup.shape = shape;
    setup.kill_keys = mode == Mode::Kills;
    setup.write_immediates = mode == Mode::Immediate;
    // A source is one range, or is registered.
    setup.profile.capabilities.max_sge = 2;
    setup.profile.capabilities.max_fragments = 2;
    setup.profile.capabilities.max_pages = 2;
    let depth = usize::from(shape.queue_depth);
    setup.memory = (depth * 6 + 24) * 8192;
    setup.wire = (4 * depth).next_power_of_two();
    setup.quiet = true;
    setup.events = (4 * depth).next_power_of_two();
    setup.timeout = 80_000;
    setup.abandon = 80_000;
    setup.keepalive = 5_000;
    setup
}

/// How many requests one transfer has on the send queue at most, when its peer has done its part.
fn most(kind: Kind, shape: &Shape, mode: Mode) -> u32 {
    let writes = u32::from(shape.writes_at_once);
    let key = u32::from(mode == Mode::Registered);
    let data = |count: u32, writes: u32| {
        let done = u32::from(mode != Mode::Immediate);
        let done = if count <= writes { done + key } else { 0 };
        key + count.min(writes) + done
    };
    match kind {
        // A message that tells a key to one who will kill it is signalled: it is off the queue, and its REGISTER.
        Kind::Sink | Kind::Asked if mode == Mode::Kills => 1,
        Kind::Sink | Kind::Asked => 3,
        Kind::Source(count) => data(count, writes),
        // The PUT_REQ has its place in the share of the data.
        Kind::Reply(count) => data(count, (writes - 1).max(1)),
    }
}

/// Cuts `BULK` bytes into so many fragments.
fn fragments(lab: &mut Lab, count: u32) -> Vec<Fragment> {
    let each = BULK / count;
    let mut pieces = vec![each; count as usize];
    pieces[0] += BULK - each * count;
    lab.peers[0].sink(&pieces, 0)
}

/// Brings both shares of the connection to their worst; how many requests are on the send queue then. One or two are NOOPs.
fn worst(lab: &mut Lab, own: Kind, peer: Kind) -> u32 {
    let depth = u64::from(lab.terms(0).queue_depth);
    lab.settle();
    let options = EntryOptions::PUT | EntryOptions::GET | EntryOptions::TRUNCATE;
    lab.export(SINK, options, BULK);
    let source = halves(lab);
    lab.export_list(SOURCE, options, source);
    let mut last: Vec<Body<'static>> = Vec::new();
    let (mut acks, mut asked) = (Vec::new(), Vec::new());
    let connection = lab.connection(0);
    for token in 0..depth {
        let operation = match own {
            Kind::Sink => GET,
            Kind::Asked => ASK,
            Kind::Source(_) | Kind::Reply(_) => PUT,
        };
        let memory = halves(lab);
        let request = World::request(connection, 100 + token, 7, 0, operation, memory);
        lab.node.submit(request);
        let request = lab.receive(0);
        match own {
            Kind::Sink => last.push(Body::GetDone(request.grant().done(0))),
            Kind::Asked => asked.push(request.handle()),
            Kind::Source(_) | Kind::Reply(_) => acks.push(request.cookie()),
        }
    }
    for cookie in 0..depth {
        match peer {
            Kind::Sink | Kind::Asked => {
                let request = lab.peers[0].put_req(1000 + cookie, SINK, BULK);
                lab.peers[0].say(request);
                last.push(Body::PutDone(lab.receive(0).grant().done(0)));
            }
            Kind::Reply(_) => {
                let body = get(SOURCE, WireHandle::from_words(7, cookie), BULK);
                let header = lab.peers[0].header(0, body);
                let payload = &[];
                lab.peers[0].say(Body::Immediate { header, payload });
                acks.push(lab.receive(0).cookie());
            }
            Kind::Source(_) => {}
        }
    }
    for (cookie, handle) in (3000..).zip(asked) {
        let header = lab.peers[0].header(BULK, lnet::Body::Reply { handle });
        lab.peers[0].say(Body::PutReq { header, cookie });
        last.push(Body::PutDone(lab.receive(0).grant().done(0)));
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
    if let (Kind::Source(count), _) | (_, Kind::Reply(count)) = (own, peer) {
        let sink = fragments(lab, count);
        let key = lab.peers[0].key();
        for cookie in acks {
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
            let request = lab.peers[0].get_req(2000 + cookie, SOURCE, &sink);
            lab.peers[0].say(request);
        }
    }
    let mut quiet = 0;
    while quiet < 5 {
        quiet = if lab.step() { 0 } else { quiet + 1 };
    }
    while lab.node.events.pop().is_some() {}
    queued(lab)
}

/// Memory of the node in two ranges.
fn halves(lab: &mut Lab) -> &'static mut PageList<'static> {
    lab.node.arena.list(&[BULK / 2; 2], 8, 5)
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

/// The connection ends while everything is on its queues.
fn flush(mut lab: Lab) {
    let connection = lab.connection(0);
    lab.frozen[0] = false;
    lab.node.order(Order::Close { connection });
    lab.gone(connection);
    lab.end();
}

fn measure(shape: Shape, mode: Mode, own: Kind, peer: Kind) -> u32 {
    alone(|| {
        let mut lab = Lab::connected(setup(shape, mode), 1);
        let used = worst(&mut lab, own, peer);
        flush(lab);
        used
    })
}

/// Makes the worst moment of such transfers, checks that it is that and fits, and tells how many requests it took.
fn check(shape: Shape, mode: Mode, own: Kind, peer: Kind) -> u32 {
    let used = measure(shape, mode, own, peer);
    let case = format!("{shape:?} {mode:?} {own:?} {peer:?}: {used}");
    assert!(used + DRAIN <= shape.send_wr(), "does not fit: {case}");
    let (one, other) = (most(own, &shape, mode), most(peer, &shape, mode));
    let all = u32::from(shape.queue_depth) * (one + other);
    assert!(used <= all + NOOPS, "more than was thought of: {case}");
    // WRITEs that do not fit into a chain any more wait for those that did.
    let is_cut = |kind| matches!(kind, Kind::Source(_) | Kind::Reply(_));
    let cut = if is_cut(own) || is_cut(peer) {
        (all / CHAIN + 2) * one.max(other)
    } else {
        0
    };
    assert!(used + cut > all, "not the worst: {case}");
    used
}

#[test]
fn lu_9943_with_one_write_at_a_time_the_send_queue_is_exactly_long_enough() {
    let mut full = 0;
    for depth in 8..=255 {
        let shape = shape(depth, 1, Mode::Plain);
        let used = check(shape, Mode::Plain, Kind::Sink, Kind::Sink);
        let all = 6 * u32::from(depth) + NOOPS;
        assert_eq!(all + DRAIN, shape.send_wr());
        // One place less, and this moment would not fit.
        full += u32::from(used == all);
    }
    assert!(full > 200, "{full}");
}

/// All depths and WRITEs at a time, with so many fragments that the DONE goes right behind them.
fn all_depths_and_writes(mode: Mode) {
    for depth in 8..=255 {
        for writes in 1..=16 {
            let shape = shape(depth, writes, mode);
            let kind = Kind::Source(writes.into());
            check(shape, mode, kind, kind);
            // Of what is asked for only the place of our PUT_REQ is free then, which is done before its PUT_ACK is
            // answered; and with one WRITE at a time sinks take more.
            if writes > 1 || mode == Mode::Registered {
                let each = 2 * most(kind, &shape, mode) + PUT_REQ;
                let all = u32::from(depth) * each + NOOPS + DRAIN;
                assert_eq!(all, shape.send_wr(), "{shape:?}");
            }
        }
    }
}

#[test]
fn lu_10459_no_depth_and_no_number_of_writes_takes_more_than_there_is() {
    all_depths_and_writes(Mode::Plain);
}

#[test]
fn nor_where_sources_are_registered() {
    all_depths_and_writes(Mode::Registered);
}

#[test]
fn nor_where_dones_kill_keys() {
    some_writes_at_all_depths(Mode::Kills);
}

#[test]
fn nor_where_a_write_takes_the_place_of_a_done() {
    some_writes_at_all_depths(Mode::Immediate);
}

fn some_writes_at_all_depths(mode: Mode) {
    for depth in 8..=255 {
        let writes = depth % 16 + 1;
        let shape = shape(depth, writes, mode);
        let source = Kind::Source(writes.into());
        for (own, peer) in [(Kind::Sink, source), (source, Kind::Sink)] {
            check(shape, mode, own, peer);
        }
    }
}

/// Fragments count only up to the WRITEs that are posted at a time: all of both, at depth 8.
fn all_fragments(mode: Mode, pair: fn(u32) -> [Kind; 2]) {
    for writes in 1..=16 {
        let shape = shape(8, writes, mode);
        let [own, peer] = pair(u32::from(writes) + 1);
        let beyond = check(shape, mode, own, peer);
        for count in 1..=257 {
            let [own, peer] = pair(count);
            let used = check(shape, mode, own, peer);
            if count > writes.into() {
                assert_eq!(used, beyond, "{shape:?} {own:?} {peer:?}");
            }
        }
    }
}

#[test]
fn lu_10459_fragments_count_up_to_the_writes_at_a_time_in_our_share() {
    for mode in MODES {
        all_fragments(mode, |count| [Kind::Source(count), Kind::Sink]);
    }
}

#[test]
fn lu_10459_fragments_count_up_to_the_writes_at_a_time_in_the_peers_share() {
    for mode in MODES {
        all_fragments(mode, |count| [Kind::Sink, Kind::Source(count)]);
    }
}

#[test]
fn lu_10459_fragments_count_up_to_the_writes_at_a_time_where_the_peer_asked_by_a_message() {
    // Who kills keys makes a difference to sinks alone.
    for mode in [Mode::Plain, Mode::Registered] {
        all_fragments(mode, |count| [Kind::Asked, Kind::Reply(count)]);
    }
}

#[test]
fn lu_10459_fragments_count_up_to_the_writes_at_a_time_in_both_shares() {
    for mode in [Mode::Plain, Mode::Registered] {
        all_fragments(mode, |count| [Kind::Source(count), Kind::Source(count)]);
    }
}

#[test]
fn all_fragments_at_depths_between() {
    for (depth, mode) in [
        (31, Mode::Plain),
        (64, Mode::Registered),
        (128, Mode::Kills),
    ] {
        for count in 1..=257 {
            let kind = Kind::Source(count);
            check(shape(depth, 4, mode), mode, kind, kind);
        }
    }
    for mode in MODES {
        for count in [1, 4, 5, 257] {
            let kind = Kind::Source(count);
            check(shape(255, 4, mode), mode, kind, kind);
        }
    }
}

/// Chains that the device cut at the worst moment where its send queue is so many entries short, and whether the drain
/// of an end in that moment found its place.
fn squeezed(sends: u32) -> (u64, bool) {
    alone(|| {
        let mut setup = setup(shape(DEPTH_THAT_FILLS, 1, Mode::Plain), Mode::Plain);
        setup.short.sends = sends;
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
fn one_entry_less_of_the_send_queue_and_the_worst_moment_does_not_fit() {
    assert_eq!(squeezed(0), (0, true));
    assert_eq!(squeezed(1), (0, false));
    assert_ne!(squeezed(2).0, 0);
}

/// All that a peer may send before a receive is posted again: an answer to each transfer of ours, a request for each of its
/// credits, and two NOOPs, half of our credits in each. How often it was told that there is no receive, where there are
/// so many less; and in the end it is all served.
fn without_a_receive(depth: u16, receives: u32) -> u64 {
    alone(|| {
        let mut setup = setup(shape(depth, 1, Mode::Plain), Mode::Plain);
        setup.short.receives = receives;
        let mut lab = Lab::connected(setup, 1);
        let source = halves(&mut lab);
        lab.export_list(SOURCE, EntryOptions::GET, source);
        let depth = u32::from(depth);
        for token in 0..depth.into() {
            lab.ask(0, token, GET, BULK);
        }
        let grants: Vec<_> = (0..depth).map(|_| lab.receive(0).grant()).collect();
        lab.settle();
        let posted = lab.node.poller.nic().gauges().receives;
        assert_eq!(posted, (2 * depth + NOOPS - receives) as usize);
        lab.node.poller.nic().late = true;
        for credits in [depth / 2, depth - depth / 2] {
            let peer = &mut lab.peers[0];
            let credits = u8::try_from(credits).unwrap();
            peer.owed -= u16::from(credits);
            peer.spent_by_node -= i32::from(credits);
            let noop = peer.encode(Body::Noop, credits);
            peer.send(&noop, None);
        }
        let sink = fragments(&mut lab, 1);
        for (grant, cookie) in grants.iter().zip(0..) {
            lab.peers[0].say(Body::GetDone(grant.done(0)));
            let request = lab.peers[0].get_req(cookie, SOURCE, &sink);
            lab.peers[0].say(request);
        }
        for _ in 0..200 {
            lab.step();
        }
        assert_eq!(lab.node.poller.nic().gauges().receives, 0);
        let retries = lab.peers[0].device.counts().retries;
        lab.node.poller.nic().late = false;
        for _ in 0..depth {
            assert!(matches!(
                lab.receive(0).message().body,
                Body::GetDone(done) if done.status == BULK.cast_signed()
            ));
        }
        lab.end();
        retries
    })
}

#[test]
fn a_peer_never_finds_no_receive_and_with_one_less_it_does() {
    for depth in 8..=255 {
        assert_eq!(without_a_receive(depth, 0), 0, "{depth}");
    }
    for depth in [8, 9, 64, 255] {
        assert_ne!(without_a_receive(depth, 1), 0, "{depth}");
    }
}

/// Everything that a core holds is on its queues and none of it carried out, all connections end in the same moment, and
/// the core looks at its completion queue, which has so many entries less, only when all of it is there. How full it is
/// then, or that it overran.
fn flushed_at_once(shape: Shape, completions: usize) -> Result<usize, Fault> {
    alone(|| {
        let mut setup = setup(shape, Mode::Plain);
        setup.memory *= shape.connections;
        setup.events *= 4;
        setup.short.completions = u32::try_from(completions).unwrap();
        let count = u8::try_from(shape.connections).unwrap();
        let mut lab = Lab::connected(setup, count);
        let mut names = Vec::new();
        for peer in 0..shape.connections {
            // `worst` plays peer 0: the others change places with it.
            lab.peers.swap(0, peer);
            lab.connections.swap(0, peer);
            lab.frozen.swap(0, peer);
            let kind = Kind::Source(shape.writes_at_once.into());
            worst(&mut lab, kind, kind);
            names.push(lab.connection(0));
        }
        let sends: u32 = names
            .iter()
            .map(|name| queued_of(&lab, *name) + DRAIN)
            .sum();
        // But for those that are lent to transfers whose DONE is not posted.
        let receives = lab.node.poller.nic().gauges().receives;
        lab.node.poller.nic().late = true;
        for connection in &names {
            let connection = *connection;
            lab.node.order(Order::Close { connection });
        }
        let mut fullest = 0;
        for step in 0..200 {
            // By now the drains are posted.
            if step == 5 {
                lab.peers.iter_mut().for_each(RawPeer::die);
                lab.frozen.fill(false);
            }
            lab.now = lab.now.after(Ticks(1));
            lab.node.try_step(lab.now)?;
            for (peer, frozen) in lab.peers.iter_mut().zip(&lab.frozen) {
                if !frozen {
                    peer.step();
                }
            }
            fullest = fullest.max(lab.node.poller.nic().gauges().completions);
        }
        assert_eq!(fullest, sends as usize + receives);
        lab.node.poller.nic().late = false;
        for connection in names {
            lab.gone(connection);
        }
        lab.end();
        Ok(fullest)
    })
}

#[test]
fn lu_12279_lu_12065_all_flushed_at_once_do_not_overrun_the_completion_queue_and_one_less_does() {
    for (depth, writes, connections) in [(8, 1, 1), (8, 4, 3), (32, 2, 3), (255, 4, 2), (9, 16, 5)]
    {
        let shape = Shape {
            connections,
            windows: 2 * usize::from(depth) * connections,
            entries: 4 * connections,
            ..shape(depth, writes, Mode::Plain)
        };
        let size = shape.sizes().cqe as usize;
        let all = flushed_at_once(shape, 0).expect("as long as was asked for");
        let spare = size.checked_sub(all).expect("it fits");
        assert_eq!(flushed_at_once(shape, spare), Ok(all));
        assert_eq!(flushed_at_once(shape, spare + 1), Err(Fault::Overrun));
    }
}

/// However a connection ends in the worst moment of each kind, nothing is lost and nothing is left.
#[test]
fn the_worst_moment_ends_well_however_it_ends() {
    for mode in MODES {
        for (own, peer) in [
            (Kind::Sink, Kind::Sink),
            (Kind::Asked, Kind::Reply(4)),
            (Kind::Source(4), Kind::Source(257)),
        ] {
            for dies in [false, true] {
                for late in [0, 1, 40] {
                    alone(|| {
                        let mut lab = Lab::connected(setup(shape(12, 4, mode), mode), 1);
                        worst(&mut lab, own, peer);
                        let connection = lab.connection(0);
                        lab.node.poller.nic().late = late != 0;
                        lab.frozen[0] = false;
                        if dies {
                            lab.peers[0].die();
                        } else {
                            lab.node.order(Order::Close { connection });
                        }
                        for _ in 0..late {
                            lab.step();
                        }
                        lab.node.poller.nic().late = false;
                        lab.gone(connection);
                        lab.end();
                    });
                }
            }
        }
    }
}

/// A depth at which both NOOPs are on the queue in the worst moment.
const DEPTH_THAT_FILLS: u16 = 32;

/// The last place, which is for the drain.
const DRAIN: u32 = 1;

/// On the send queue at a time, and of a peer without a receive posted again.
const NOOPS: u32 = 2;

/// The place of a request of ours that is done.
const PUT_REQ: u32 = 1;

/// Requests of one doorbell.
const CHAIN: u32 = 64;
