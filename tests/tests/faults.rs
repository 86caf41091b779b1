//! Devices that take half a chain, fail a request, refuse receives or fall silent; pools that are used up;
//! connections that end in every phase. Everything that was taken comes back, and what can still be done
//! is done, byte for byte.

use core::cell::Cell;

use o2poll_dataplane::endpoint::{EntryOptions, Error, Event, Operation, Submission, Token};
use o2poll_dataplane::nic::Status;
use o2poll_dataplane::poller::Order;
use o2poll_dataplane::pool::Handle;
use o2poll_soft::Profile;
use o2poll_tests::lend::alone;
use o2poll_tests::{Setup, World};

const BULK: u32 = 30_000;
const ENTRY: u64 = 7;

const fn put(ack: bool) -> Operation {
    Operation::Put { hdr_data: 3, ack }
}

const fn get(optimized: bool) -> Operation {
    Operation::Get { optimized }
}

/// One of each sequence.
const KINDS: [(Operation, u32); 8] = [
    (put(false), 100),
    (put(true), 100),
    (put(false), BULK),
    (put(true), BULK),
    (get(true), 100),
    (get(true), BULK),
    (get(false), BULK),
    (get(false), 0),
];

thread_local! {
    /// How the nodes of this test tell each other that data has been written.
    static END: Cell<End> = const { Cell::new(End::Done) };
}

/// The end of a bulk transfer.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    /// A DONE, as toward a kernel.
    Done,
    /// A DONE that kills the key.
    KillingDone,
    /// The last WRITE.
    Immediate,
}

const ENDS: [End; 3] = [End::Done, End::KillingDone, End::Immediate];

/// As toward a kernel, and as between two nodes of our kind.
fn all_ways(body: impl Fn()) {
    for end in ENDS {
        END.set(end);
        body();
    }
    END.set(End::Done);
}

/// Memory in several pieces with one piece per WRITE, so that bulk data goes in instalments.
fn setup(profile: Profile) -> Setup {
    let mut setup = Setup::new(profile);
    setup.profile.capabilities.max_sge = 1;
    setup.profile.slice = 8192;
    setup.shape.connections = 1;
    setup.shape.writes_at_once = 2;
    setup.kill_keys = END.get() == End::KillingDone;
    setup.write_immediates = END.get() == End::Immediate;
    setup
}

/// What a sink without a key of its own goes through: staging buffers under windows.
fn staged() -> Setup {
    let mut setup = setup(Profile::windows());
    setup.shape.staging = 4;
    setup
}

/// Nothing but the key of the arena.
fn exposed() -> Setup {
    let mut setup = setup(Profile::bare());
    setup.registration.expose_arena = true;
    setup
}

/// Staging buffers under the key of the arena.
fn exposed_stages() -> Setup {
    let mut setup = exposed();
    setup.max_frags = 1;
    setup.shape.staging = 2;
    setup
}

/// Sources of several pieces are registered.
fn registered() -> Setup {
    let mut setup = setup(Profile::frwr());
    setup.shape.register_source_from = 2;
    setup
}

/// A small pool of mappings, and staging buffers under them.
fn mapped() -> Setup {
    let mut setup = setup(Profile::mthca());
    setup.shape.staging = 2;
    setup.shape.mappings = 6;
    setup.registration.flush_trigger = 3;
    setup
}

/// Every mechanism.
fn kinds() -> [Setup; 9] {
    let mut zero_based = registered();
    zero_based.profile = setup(Profile::mlx5()).profile;
    [
        setup(Profile::frwr()),
        setup(Profile::mlx5()),
        setup(Profile::windows()),
        staged(),
        mapped(),
        exposed(),
        exposed_stages(),
        registered(),
        zero_based,
    ]
}

/// Addresses and lengths.
type Pieces = Vec<(u64, usize)>;

/// A run: which node asks for what. Both nodes export one entry, with a place for each transfer.
struct Run {
    world: World,
    connections: [Handle; 2],
    plan: Vec<(usize, Operation, u32)>,
    /// Where each node's entry lies: address and length of its pieces.
    entries: [Pieces; 2],
    done: usize,
    failed: usize,
}

fn pattern(seed: usize, length: usize) -> Vec<u8> {
    (0..length)
        .map(|n| (n.wrapping_mul(31) ^ (n >> 8) ^ seed.wrapping_mul(77)).to_le_bytes()[0])
        .collect()
}

impl Run {
    fn new(mut setup: Setup, plan: &[(usize, Operation, u32)]) -> Self {
        // Each node: its messages, one entry, and what it moves, twice. Every run leaks its memory.
        let messages = setup.shape.sizes().messages * 8192;
        let staging = setup.shape.staging * ((1 << 20) + 8192);
        setup.memory = messages + staging + 3 * (BULK as usize + 16384) * plan.len() + 131072;
        let mut world = World::new(setup);
        let connections = world.connect();
        let total = BULK * u32::try_from(plan.len()).unwrap();
        let entries = [0, 1].map(|of| {
            let arena = &mut world.nodes[of].arena;
            let memory = if scatters(&setup) {
                let cuts = [BULK / 3, BULK - BULK / 3].repeat(plan.len());
                arena.list(&cuts, 5, 11)
            } else {
                arena.flat(total, 11)
            };
            memory.write_at(0, &pattern(100 + of, total as usize));
            let pieces = memory.pieces().iter();
            let pieces = pieces
                .map(|piece| (piece.address, piece.length as usize))
                .collect();
            let options = EntryOptions::PUT | EntryOptions::GET;
            world.export(of, ENTRY, options, memory);
            pieces
        });
        Self {
            world,
            connections,
            plan: plan.to_vec(),
            entries,
            done: 0,
            failed: 0,
        }
    }

    fn pieces(setup: &Setup, length: u32) -> Vec<u32> {
        if !scatters(setup) || length < 10 {
            return vec![length];
        }
        vec![
            length / 5,
            length / 5,
            1,
            length / 5,
            length - 3 * (length / 5) - 1,
        ]
    }

    fn submit_all(&mut self, setup: &Setup) {
        for (token, (of, operation, length)) in self.plan.clone().into_iter().enumerate() {
            let pieces = Self::pieces(setup, length);
            let memory = self.world.nodes[of].arena.list(&pieces, 3, 5);
            if matches!(operation, Operation::Put { .. }) {
                memory.write_at(0, &pattern(token, length as usize));
            }
            let offset = BULK * u32::try_from(token).unwrap();
            let name = u64::try_from(token).unwrap();
            let connection = self.connections[of];
            let request = World::request(connection, name, ENTRY, offset, operation, memory);
            self.world.nodes[of].submit(request);
        }
    }

    /// Takes events and checks what they say; a transfer may fail only `if` a connection may.
    fn reap(&mut self, may_fail: bool) {
        for of in 0..2 {
            while let Some(event) = self.world.nodes[of].events.pop() {
                let (token, outcome, memory) = match event {
                    Event::Done {
                        token,
                        outcome,
                        memory,
                    } => (token, outcome, memory),
                    Event::Detached { .. } if may_fail => continue,
                    other => panic!("{other:?}"),
                };
                let token = usize::try_from(token.0).unwrap();
                let (planned, operation, length) = self.plan[token];
                assert_eq!(planned, of);
                self.done += 1;
                if may_fail && outcome.is_err() {
                    self.failed += 1;
                    continue;
                }
                assert_eq!(outcome, Ok(length), "{operation:?}");
                let mut here = vec![0; length as usize];
                memory.read_at(0, &mut here);
                assert!(here == self.expected(token), "{of} {operation:?}");
            }
        }
    }

    /// What a transfer moves.
    fn expected(&self, token: usize) -> Vec<u8> {
        let (of, operation, length) = self.plan[token];
        let (from, length) = (token * BULK as usize, length as usize);
        match operation {
            Operation::Put { .. } => pattern(token, length),
            Operation::Get { .. } => pattern(101 - of, from + length)[from..].to_vec(),
        }
    }

    /// What lies in the exported memory: a PUT without an ACK says nothing about when it lands.
    fn has_landed(&self) {
        for (token, (of, operation, length)) in self.plan.iter().enumerate() {
            let arena = &self.world.nodes[1 - of].arena;
            let all = self.entries[1 - of].iter();
            let there: Vec<u8> = all
                .flat_map(|(address, length)| arena.peek(*address, *length))
                .skip(token * BULK as usize)
                .take(*length as usize)
                .collect();
            assert!(there == self.expected(token), "{of} {operation:?}");
        }
    }

    /// Steps until all transfers have ended, calling `fault` before each step.
    fn drive(&mut self, limit: u32, may_fail: bool, mut fault: impl FnMut(&mut World, u32)) -> u32 {
        for step in 0..limit {
            fault(&mut self.world, step);
            self.world.step();
            self.reap(may_fail);
            if self.done == self.plan.len() {
                return step;
            }
        }
        panic!(
            "{} of {}: {}",
            self.done,
            self.plan.len(),
            self.world.picture()
        );
    }

    /// At rest nothing is held but posted receives, and credits are whole: each is with its owner, or owed
    /// and not yet worth a NOOP.
    fn rests(&mut self) {
        self.world.settle();
        if self.failed == 0 {
            self.has_landed();
        }
        let credits: Vec<_> = [0, 1]
            .map(|of| {
                let node = &self.world.nodes[of];
                node.poller.credits(self.connections[of]).expect("alive")
            })
            .into();
        for (of, node) in self.world.nodes.iter().enumerate() {
            let left = node.poller.leftovers();
            assert_eq!(
                (left.transfers, left.windows, left.staging, left.events),
                (0, 0, 0, 1),
                "{left:?}"
            );
            assert_eq!((left.receives, left.messages), (18, 18), "{left:?}");
            assert_eq!(node.counters.keys_alive.get(), 0);
            assert_eq!(node.counters.stale_completions.get(), 0);
            let (ours, theirs) = (credits[of], credits[1 - of]);
            assert_eq!(ours.available() + theirs.owed(), 8, "{credits:?}");
            assert_eq!(ours.reserved(), 8, "{credits:?}");
            assert!(!ours.at_high_water(), "{credits:?}");
        }
    }

    fn end(self) {
        self.world.end();
    }
}

/// Whether memory in several pieces can be a sink, and is no key's one range.
const fn scatters(setup: &Setup) -> bool {
    setup.profile.capabilities.max_fragments >= 2
        || setup.shape.staging != 0
        || setup.registration.expose_arena
}

/// Every chain of every sequence, cut after every prefix: one transfer at a time.
#[test]
fn lu_14733_every_chain_cut_at_every_place() {
    all_ways(cut_every_chain);
}

fn cut_every_chain() {
    let mut cuts = 0;
    for setup in kinds() {
        for (operation, length) in KINDS {
            for of in 0..2 {
                for doorbell in 0.. {
                    let mut longest = 0;
                    for prefix in 0..5 {
                        let cut = alone(|| {
                            let mut run = Run::new(setup, &[(0, operation, length)]);
                            run.submit_all(&setup);
                            let start = run.world.nodes[of].counters.doorbells.get();
                            let mut armed = false;
                            run.drive(100_000, false, |world, _| {
                                let node = &mut world.nodes[of];
                                if !armed && node.counters.doorbells.get() == start + doorbell {
                                    armed = true;
                                    node.poller.nic().faults().accept = Some(prefix);
                                }
                            });
                            run.rests();
                            let cut = run.world.nodes[of].counters.partial_doorbells.get();
                            run.world.nodes[of].poller.nic().faults().accept = None;
                            run.end();
                            cut
                        });
                        cuts += cut;
                        if cut != 0 {
                            longest = prefix + 1;
                        }
                        if cut == 0 {
                            break;
                        }
                    }
                    if longest == 0 {
                        break;
                    }
                }
            }
        }
    }
    assert!(cuts >= 100, "{cuts}");
}

/// Long chains of many transfers, cut everywhere.
#[test]
fn a_chain_of_many_transfers_cut_at_every_place() {
    let plan: Vec<_> = (0..16)
        .map(|n| (n / 8, KINDS[n % 8].0, KINDS[n % 8].1))
        .collect();
    for kind in [setup(Profile::frwr()), staged(), mapped(), registered()] {
        for doorbell in 0..5 {
            for prefix in 0..18 {
                for of in 0..2 {
                    alone(|| {
                        let setup = kind;
                        let mut run = Run::new(setup, &plan);
                        run.submit_all(&setup);
                        let start = run.world.nodes[of].counters.doorbells.get();
                        run.drive(100_000, false, |world, _| {
                            let node = &mut world.nodes[of];
                            if node.counters.doorbells.get() == start + doorbell {
                                node.poller.nic().faults().accept = Some(prefix);
                            }
                        });
                        run.rests();
                        run.end();
                    });
                }
            }
        }
    }
}

/// Of a run of messages only the last is signalled. Where the device takes but the beginning of it, and nobody wants the
/// rest any more, that is told of all the same.
#[test]
fn the_beginning_of_a_run_is_told_of_though_the_rest_is_cancelled() {
    const RUN: u32 = 4;
    // As often the device takes nothing of the next chain either, which has the request that tells.
    for (taken, refusals) in (1..=RUN).flat_map(|taken| [(taken, 0), (taken, 1), (taken, 3)]) {
        alone(|| {
            let mut world = World::new(setup(Profile::frwr()));
            let [connection, _] = world.connect();
            let far = world.nodes[1].arena.flat(100, 1);
            world.export(1, ENTRY, EntryOptions::PUT, far);
            world.settle();
            for token in 0..RUN {
                let near = world.nodes[0].arena.flat(100, 2);
                let request =
                    World::request(connection, u64::from(token), ENTRY, 0, put(false), near);
                world.nodes[0].submit(request);
            }
            let node = &mut world.nodes[0];
            node.poller.nic().faults().accept = Some(taken);
            let before = node.counters.doorbells.get();
            world.step();
            let node = &mut world.nodes[0];
            node.poller.nic().faults().accept = None;
            assert_eq!(node.counters.doorbells.get(), before + 1, "one chain");
            for token in taken..RUN {
                let token = Token(u64::from(token));
                node.submit(Submission::Cancel { token });
            }
            for _ in 0..refusals {
                world.nodes[0].poller.nic().faults().accept = Some(0);
                world.step();
            }
            world.nodes[0].poller.nic().faults().accept = None;
            for _ in 0..RUN {
                let Event::Done { token, outcome, .. } = world.event(0) else {
                    panic!("nothing else ends");
                };
                let expected = if token.0 < u64::from(taken) {
                    Ok(100)
                } else {
                    Err(Error::Cancelled)
                };
                assert_eq!(outcome, expected, "{token:?} of {taken}, {refusals}");
            }
            world.rest();
            world.end();
        });
    }
}

/// splitmix64.
fn draw(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn mixed(count: usize) -> Vec<(usize, Operation, u32)> {
    (0..count)
        .map(|n| (n % 2, KINDS[n / 2 % 8].0, KINDS[n / 2 % 8].1))
        .collect()
}

#[test]
fn chains_cut_and_receives_refused_at_random_all_the_time() {
    for seed in 0..40_u32 {
        alone(|| {
            END.set(ENDS[seed as usize % 3]);
            let mut setup = kinds()[(seed / 2 % 8) as usize];
            setup.shape.writes_at_once = 1 + u16::try_from(seed % 5).unwrap();
            setup.shape.windows = setup.shape.windows.min(2 + (seed % 7) as usize);
            let mut run = Run::new(setup, &mixed(48));
            run.submit_all(&setup);
            let mut random = u64::from(seed);
            run.drive(1_000_000, false, |world, _| {
                for node in &mut world.nodes {
                    let faults = node.poller.nic().faults();
                    if !draw(&mut random).is_multiple_of(4) {
                        faults.accept = Some((draw(&mut random) % 6) as u32);
                    }
                    if draw(&mut random).is_multiple_of(8) {
                        faults.refuse_receives = (draw(&mut random) % 5) as u32;
                    }
                }
            });
            for node in &mut run.world.nodes {
                let faults = node.poller.nic().faults();
                (faults.accept, faults.refuse_receives) = (None, 0);
                assert!(node.counters.partial_doorbells.get() > 5);
            }
            run.rests();
            run.end();
        });
    }
}

#[test]
fn receives_refused_from_the_start_are_posted_later() {
    let setup = setup(Profile::frwr());
    let mut world = World::new(setup);
    for node in &mut world.nodes {
        node.poller.nic().faults().refuse_receives = 100;
    }
    world.connect();
    for _ in 0..200 {
        world.step();
    }
    for node in &mut world.nodes {
        assert_eq!(node.poller.nic().faults().refuse_receives, 0);
        assert_eq!(node.poller.nic().gauges().receives, 18);
    }
    world.end();
}

/// What is done to a run in the middle of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Blow {
    Close(usize),
    Fail(usize, Status),
    Cut(usize),
    Stop(usize),
}

/// At every step of a run one thing goes wrong for good. Every transfer is told exactly once, everything
/// comes back, and a new connection works.
fn strike(kind: Setup, blow: Blow, stride: usize) {
    let plan = mixed(32);
    let (mut at, mut failed) = (0, 0);
    loop {
        let (hit, more) = alone(|| {
            let mut failed = 0;
            let mut setup = kind;
            setup.shape.connections = 3;
            setup.profile.ack_timeout = 300;
            setup.timeout = 50_000;
            setup.abandon = 50_000;
            let mut run = Run::new(setup, &plan);
            let connections = run.connections;
            run.submit_all(&setup);
            let mut closed = [false; 2];
            let last = run.drive(1_000_000, true, |world, step| {
                if step == at {
                    match blow {
                        Blow::Close(of) => {
                            let connection = connections[of];
                            world.nodes[of].order(Order::Close { connection });
                        }
                        Blow::Fail(of, status) => {
                            world.nodes[of].poller.nic().faults().fail = Some((0, status));
                        }
                        Blow::Cut(of) => world.nodes[of].poller.nic().faults().cut = Some(0),
                        Blow::Stop(of) => world.nodes[of].order(Order::Stop),
                    }
                }
                // The connection manager tells the other side.
                for of in 0..2 {
                    let connection = connections[1 - of];
                    if !closed[1 - of]
                        && world.nodes[of]
                            .gone
                            .iter()
                            .any(|(gone, _)| *gone == connections[of])
                    {
                        closed[1 - of] = true;
                        world.nodes[1 - of].order(Order::Close { connection });
                    }
                }
            });
            let hit = last >= at;
            for node in &mut run.world.nodes {
                let faults = node.poller.nic().faults();
                (faults.cut, faults.fail) = (None, None);
            }
            if hit && !matches!(blow, Blow::Stop(_)) {
                for (of, connection) in connections.into_iter().enumerate() {
                    run.world.nodes[of].order(Order::Close { connection });
                }
                assert!(run.world.until(1_000_000, |world| {
                    let gone = |of: usize| {
                        let mut all = world.nodes[of].gone.iter();
                        all.any(|(gone, _)| *gone == connections[of])
                    };
                    gone(0) && gone(1)
                }));
                failed += run.failed;
                run.connections = run.world.connect();
                (run.done, run.failed) = (0, 0);
                run.submit_all(&setup);
                run.drive(1_000_000, false, |_, _| {});
                run.rests();
            }
            run.end();
            (hit, failed)
        });
        failed += more;
        if !hit {
            assert!(at > 10);
            assert!(failed > 0 || matches!(blow, Blow::Stop(_)));
            return;
        }
        at += u32::try_from(stride).unwrap();
    }
}

#[test]
fn a_close_at_every_step() {
    all_ways(|| {
        strike(setup(Profile::frwr()), Blow::Close(0), 2);
        strike(setup(Profile::frwr()), Blow::Close(1), 3);
    });
}

#[test]
fn lu_19875_a_stop_at_every_step() {
    strike(setup(Profile::frwr()), Blow::Stop(0), 2);
    strike(setup(Profile::frwr()), Blow::Stop(1), 3);
    strike(mapped(), Blow::Stop(0), 5);
}

#[test]
fn a_failed_request_at_every_step() {
    for status in [Status::LocalProtection, Status::Bind, Status::RemoteAccess] {
        strike(setup(Profile::frwr()), Blow::Fail(0, status), 2);
        strike(setup(Profile::frwr()), Blow::Fail(1, status), 5);
    }
}

#[test]
fn a_cut_cable_at_every_step() {
    strike(setup(Profile::frwr()), Blow::Cut(0), 3);
    all_ways(|| strike(setup(Profile::frwr()), Blow::Cut(1), 5));
}

/// The same, while data is in staging buffers, under the key of the arena, or read through a source's own key.
#[test]
fn what_goes_wrong_for_good_at_every_step_of_the_other_mechanisms() {
    for kind in [
        staged(),
        mapped(),
        exposed(),
        exposed_stages(),
        registered(),
    ] {
        for of in 0..2 {
            strike(kind, Blow::Close(of), 5);
            strike(kind, Blow::Stop(of), 7);
            strike(kind, Blow::Fail(of, Status::RemoteAccess), 7);
            strike(kind, Blow::Cut(of), 9);
        }
    }
}

/// The k-th request of a run fails, for every k.
#[test]
fn every_request_fails_once() {
    all_ways(fail_every_request);
}

fn fail_every_request() {
    let plan = mixed(16);
    for of in 0..2 {
        for k in 0.. {
            let hit = alone(|| {
                let mut setup = setup(Profile::frwr());
                setup.timeout = 20_000;
                setup.abandon = 20_000;
                let mut run = Run::new(setup, &plan);
                let connections = run.connections;
                run.submit_all(&setup);
                run.world.nodes[of].poller.nic().faults().fail = Some((k, Status::LocalOperation));
                let mut told = false;
                run.drive(1_000_000, true, |world, _| {
                    if !told && !world.nodes[of].gone.is_empty() {
                        told = true;
                        let connection = connections[1 - of];
                        world.nodes[1 - of].order(Order::Close { connection });
                    }
                });
                run.world.settle();
                let hit = run.world.nodes[of].poller.nic().faults().fail.is_none();
                run.world.nodes[of].poller.nic().faults().fail = None;
                run.end();
                hit
            });
            if !hit {
                assert!(k > 30, "{k}");
                break;
            }
        }
    }
}

/// Pools of every small size: everything waits its turn and is done.
#[test]
fn lu_9472_lu_12768_small_pools_slow_everything_down_and_stop_nothing() {
    for windows in [1, 2, 3, 5] {
        for waiting in [0, 1, 7] {
            for wire in [16, 256] {
                alone(|| {
                    let mut setup = setup(Profile::frwr());
                    setup.shape.windows = setup.shape.windows.min(windows);
                    setup.shape.waiting = waiting;
                    setup.shape.entries = 1;
                    setup.shape.connections = 1;
                    let plan = mixed(40);
                    setup.wire = wire;
                    let mut run = Run::new(setup, &plan);
                    run.submit_all(&setup);
                    run.drive(1_000_000, false, |_, _| {});
                    run.rests();
                    run.end();
                });
            }
        }
    }
}

/// Nobody takes events for long: submissions and incoming messages wait, and nothing is lost.
#[test]
fn a_full_event_ring_holds_everything_back_and_loses_nothing() {
    let mut setup = setup(Profile::frwr());
    setup.shape.entries = 2;
    setup.events = 8;
    setup.memory = 3 << 20;
    let mut world = World::new(setup);
    let connections = world.connect();
    let exported = [0, 1].map(|of| {
        let memory = world.nodes[of].arena.flat(BULK, 0);
        let options = EntryOptions::PUT | EntryOptions::GET | EntryOptions::EVENTS;
        world.export(of, ENTRY, options, memory)
    });
    let _ = exported;
    let (mut submitted, mut done, mut landed) = ([0, 0], 0, 0);
    let total = 60;
    let mut random = 5;
    for _ in 0..1_000_000 {
        for of in 0..2 {
            if submitted[of] < total && world.nodes[of].submissions.free() > 0 {
                let (operation, length) = KINDS[submitted[of] % 8];
                let memory = world.nodes[of].arena.flat(length, 1);
                let request = World::request(connections[of], 1, ENTRY, 0, operation, memory);
                world.nodes[of].submit(request);
                submitted[of] += 1;
            }
        }
        world.step();
        // A slow application, at times asleep.
        if draw(&mut random).is_multiple_of(100) {
            for node in &mut world.nodes {
                match node.events.pop() {
                    Some(Event::Done { outcome, .. }) => {
                        assert!(outcome.is_ok(), "{outcome:?}");
                        done += 1;
                    }
                    Some(Event::Landed(_)) => landed += 1,
                    Some(other) => panic!("{other:?}"),
                    None => {}
                }
            }
        }
        if (done, landed) == (2 * total, 2 * total) {
            world.end();
            return;
        }
    }
    panic!("{done} {landed} {}", world.picture());
}

#[test]
fn a_timeout_in_every_phase() {
    // So short that everything times out somewhere.
    for (timeout, kind) in (1..60).flat_map(|timeout| timeouts().map(|kind| (timeout, kind))) {
        alone(|| {
            let mut setup = kind;
            setup.timeout = timeout;
            setup.abandon = 100_000;
            let mut run = Run::new(setup, &mixed(32));
            run.submit_all(&setup);
            for _ in 0..3000 {
                run.world.step();
                for node in &mut run.world.nodes {
                    while let Some(event) = node.events.pop() {
                        match event {
                            Event::Done { outcome, .. } => {
                                assert!(matches!(outcome, Ok(_) | Err(Error::TimedOut)));
                                run.failed += usize::from(outcome.is_err());
                                run.done += 1;
                            }
                            other => panic!("{other:?}"),
                        }
                    }
                }
            }
            assert_eq!(run.done, 32, "{timeout} {}", run.world.picture());
            assert!(run.world.nodes.iter().all(|node| node.gone.is_empty()));
            run.rests();
            run.end();
        });
    }
}

fn timeouts() -> [Setup; 5] {
    [
        setup(Profile::frwr()),
        staged(),
        mapped(),
        exposed(),
        registered(),
    ]
}
