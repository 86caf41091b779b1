//! Whole transfers between two nodes: PUT in a message, GET and PUT by RDMA.
//!
//! "two cores": a poller on each of two pinned threads, the application stepped between the polls of the
//! initiator. "one core": both pollers take turns on one thread, so that nothing crosses.
//! The floors copy the same bytes in the same order, from memory that is as cold. In `cold` rows each side has
//! 256 MiB, taken in an order that no prefetcher knows; in the others just what is in flight, so it stays in a cache.
//! Latency is from the submission's push to the pop of its event, over single transfers.

use core::sync::atomic::{AtomicU64, Ordering};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::thread;

use crossbeam_utils::CachePadded;
use o2poll_dataplane::counters::Counters;
use o2poll_dataplane::endpoint::{Event, Operation, Request, Submission, Token};
use o2poll_dataplane::memory::{Copier, PageList, Range};
use o2poll_dataplane::pool::Handle;
use o2poll_dataplane::time::Instant;
use o2poll_hal::clock::Clock;
use o2poll_hal::copy::{Method, copy};
use o2poll_soft::Profile;

use super::Spec;
use super::poll::clock;
use crate::harness::{Bound, Figure, Patience, Role, Row};
use crate::nodes::{self, BITS, End, Node, PORTAL, Plan, Scribble, lend_one};
use crate::tsc;

/// The rows of this file.
#[must_use]
pub fn specs() -> Vec<Spec> {
    let mut specs = Vec::new();
    for depth in [1, 8, 64] {
        let load = Load {
            kind: Kind::Immediate,
            length: 64,
            depth,
            cold: false,
            ..PLAIN
        };
        specs.push(load.spec());
    }
    for kind in [Kind::Get, Kind::Put] {
        for length in [4 << 10, 64 << 10, 1 << 20] {
            for depth in [1, 8, 64] {
                for cold in [false, true] {
                    if !cold || (depth == 8) == (length > 4096) && depth != 1 {
                        specs.push(
                            Load {
                                kind,
                                length,
                                depth,
                                cold,
                                ..PLAIN
                            }
                            .spec(),
                        );
                    }
                }
            }
        }
    }
    specs.push(Spec::new(
        "transfer/get-4k/1-in-flight/fresh",
        "transfer",
        2,
        fresh,
    ));
    for kind in [Kind::Get, Kind::Put] {
        for (length, depth, cold) in [
            (4 << 10, 1, false),
            (4 << 10, 8, false),
            (4 << 10, 8, true),
            (64 << 10, 8, false),
            (1 << 20, 8, false),
        ] {
            let load = Load {
                kind,
                length,
                depth,
                cold,
                ..PLAIN
            };
            let name = load.spec().name.replace("transfer/", "extension/");
            specs.push(Spec::new(name, "transfer", 1, move |row| {
                extensions(row, load)
            }));
        }
    }
    for pieces in [4, 16, 32, 64, 128, 256] {
        let load = Load {
            kind: Kind::Put,
            length: 64 << 10,
            depth: 8,
            pieces,
            ..PLAIN
        };
        specs.push(Spec::new(
            format!("source/put-64k/{pieces}-ranges"),
            "source",
            1,
            move |row| sources(row, load),
        ));
    }
    specs
}

/// What a transfer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A PUT that fits its message.
    Immediate,
    /// A GET by RDMA.
    Get,
    /// A PUT by RDMA.
    Put,
}

/// Both nodes on the calling thread, doing as many transfers as the returned closure is told: for who counts
/// instructions.
pub fn alone(kind: Kind, length: u32, depth: u16, end: End) -> impl FnMut(u64) {
    let load = Load {
        end,
        kind,
        length,
        depth,
        cold: false,
        ..PLAIN
    };
    let clock = clock();
    let [mut near, far] = nodes::pair(load.plan());
    let mut application = Application::new(&mut near, load, clock, &far);
    let mut target = Target::new(far, clock);
    move |n| {
        application.run(&mut near, n, |now| target.node.turn(now));
        target.serve(n);
    }
}

/// So many polls of a node that has a connection and nothing to do.
pub fn idle() -> impl FnMut(u64) {
    let clock = clock();
    let [mut near, mut far] = nodes::pair(PLAIN.plan());
    // What the connection came with is out of the way.
    far.turn(clock.now());
    move |n| {
        let now = clock.now();
        for _ in 0..n {
            near.turn(now);
        }
    }
}

/// What a row does.
#[derive(Clone, Copy, Debug)]
pub(super) struct Load {
    kind: Kind,
    length: u32,
    depth: u16,
    cold: bool,
    /// Ranges of the initiator's memory, with holes between them if there are several.
    pieces: u32,
    /// Ranges from which on a source is registered; 0: never.
    source: u16,
    end: End,
}

/// Bytes of a hole.
const HOLE: u32 = 64;

/// Memory in one range, no source registered, nothing cold.
const PLAIN: Load = Load {
    kind: Kind::Get,
    length: 4096,
    depth: 1,
    cold: false,
    pieces: 1,
    source: 0,
    end: End::Done,
};

impl Load {
    /// Copies alone, of eight buffers or of many.
    pub(super) const fn copies(length: u32, cold: bool) -> Self {
        Self {
            kind: Kind::Get,
            length,
            depth: 8,
            cold,
            ..PLAIN
        }
    }

    pub(super) const fn length(self) -> u32 {
        self.length
    }

    fn spec(self) -> Spec {
        let name = match (self.kind, self.length >> 10) {
            (Kind::Immediate, _) => format!("immediate-{}", self.length),
            (Kind::Get, 1024) => "get-1m".to_owned(),
            (Kind::Put, 1024) => "put-1m".to_owned(),
            (Kind::Get, kib) => format!("get-{kib}k"),
            (Kind::Put, kib) => format!("put-{kib}k"),
        };
        let cold = if self.cold { "/cold" } else { "" };
        let name = format!("transfer/{name}/{}-in-flight{cold}", self.depth);
        Spec::new(name, "transfer", 2, move |row| self.build(row))
    }

    /// Bytes of payload on each side.
    fn payload(self) -> usize {
        if self.cold {
            COLD
        } else {
            (self.length as usize + self.holes()) * usize::from(self.depth)
        }
    }

    /// Bytes behind the ranges.
    const fn holes(self) -> usize {
        if self.pieces == 1 {
            0
        } else {
            self.pieces as usize * HOLE as usize
        }
    }

    /// Full pipes for most of a sample, and memory that is as the sample itself leaves it: what others have put in the
    /// caches since the last one is gone after the first of many rounds. 64 MiB at most where all is cold anyway, else 256.
    fn granule(self) -> u64 {
        let most = if self.cold { GRANULE / 4 } else { GRANULE };
        let most = (most / u64::from(self.length)).max(1);
        (u64::from(self.depth) * 32).min(most)
    }

    fn build(self, row: Row) -> Row {
        let clock = clock();
        let row = row.granule(self.granule()).bytes(u64::from(self.length));
        let row = two_cores(row, self, clock);
        let row = one_core(row, self, clock);
        if self.kind == Kind::Immediate {
            return messages(row).goal(
                "messages per second, millions",
                Bound::AtLeast(5.0),
                move |row| {
                    let ours = row.outcomes.first()?;
                    (self.depth == 64).then_some(1000.0 / ours.ns.p50)
                },
            );
        }
        let row = copies(row, self);
        let (text, least) = match (self.length, self.depth, self.cold) {
            (1_048_576, 8, _) => ("speed over the best copy's", 0.95),
            (4096, 64, true) => ("speed over the best cold copy's", 0.7),
            _ => return row,
        };
        if self.kind == Kind::Put {
            return row;
        }
        row.goal(text, Bound::AtLeast(least), |row| {
            Some(row.best_floor()? / row.ticks_of(TWO)?)
        })
    }
}

/// The application of the initiator: keeps so many transfers in flight.
struct Application {
    load: Load,
    connection: Handle,
    /// Payload memory that is in no transfer.
    idle: VecDeque<Range<'static>>,
    /// Offsets at the target.
    offsets: Vec<u32>,
    next: usize,
    /// Page lists that are in no transfer, with their tokens.
    lists: Vec<(usize, &'static mut PageList<'static>)>,
    /// When the transfer of each token was submitted.
    began: Vec<Instant>,
    clock: Clock,
    latency: Histogram,
    /// What the target counts, and how many transfers it will have seen.
    target: &'static Counters,
    seen: u64,
}

impl Application {
    fn new(node: &mut Node, load: Load, clock: Clock, target: &Node) -> Self {
        let order = order(load);
        let mut rest = node.payload.take();
        // Scattered lists stay as they are, and take theirs from what is left.
        let mut ranges: Vec<_> = (0..order.len())
            .map(|_| {
                if load.pieces > 1 {
                    return None;
                }
                let (head, tail) = rest.take()?.split_at(load.length).ok()?;
                rest = Some(tail);
                Some(head)
            })
            .collect();
        let mut lists: Vec<_> = (0..usize::from(load.depth))
            .map(|token| (token, lend_one(PageList::new())))
            .collect();
        if load.pieces > 1 {
            for (_, list) in &mut lists {
                rest = scatter(load, list, rest.take().expect("enough for all"));
            }
        }
        Self {
            load,
            connection: node.connections[0],
            idle: order
                .iter()
                .filter_map(|at| ranges[*at as usize].take())
                .collect(),
            offsets: order.iter().map(|at| at * load.length).collect(),
            next: 0,
            lists,
            began: vec![Instant(0); usize::from(load.depth)],
            clock,
            latency: Histogram::default(),
            target: target.counters,
            seen: 0,
        }
    }

    /// Takes what has ended and submits anew; how many have ended.
    #[inline]
    fn step(&mut self, node: &mut Node, left: &mut u64, now: Instant) -> u64 {
        let mut ended = 0;
        while let Some(event) = node.events.pop() {
            let Event::Done {
                token,
                outcome,
                memory,
            } = event
            else {
                panic!("the initiator exports nothing: {event:?}")
            };
            assert_eq!(outcome, Ok(self.load.length));
            let token = usize::try_from(token.0).expect("a small number");
            self.latency.add(now.since(self.began[token]).0);
            if self.load.pieces == 1 {
                self.idle.extend(memory.pop());
            }
            self.lists.push((token, memory));
            ended += 1;
        }
        self.submit(node, left, now);
        ended
    }

    #[inline]
    fn submit(&mut self, node: &mut Node, left: &mut u64, now: Instant) {
        while *left != 0
            && let Some((token, list)) = self.lists.pop()
        {
            *left -= 1;
            if self.load.pieces == 1 {
                let range = self.idle.pop_front().expect("more memory than lists");
                list.push(range).expect("an empty list");
            }
            let offset = self.offsets[self.next];
            self.next = if self.next + 1 == self.offsets.len() {
                0
            } else {
                self.next + 1
            };
            self.began[token] = now;
            node.submit(Submission::Transfer(Request {
                token: Token(token as u64),
                connection: self.connection,
                portal: PORTAL,
                match_bits: BITS,
                remote_offset: offset,
                memory: list,
                operation: match self.load.kind {
                    Kind::Get => Operation::Get { optimized: true },
                    Kind::Put | Kind::Immediate => Operation::Put {
                        hdr_data: 0,
                        ack: false,
                    },
                },
                timeout: None,
            }));
        }
    }

    /// So many transfers, with `between` called after each poll of ours.
    #[inline]
    fn run(&mut self, node: &mut Node, count: u64, mut between: impl FnMut(Instant) -> u32) {
        let (mut left, mut ended) = (count, 0);
        let mut now = self.clock.now();
        self.submit(node, &mut left, now);
        let mut politeness = Politeness::default();
        self.seen += count;
        // The target may need us to the end: its INVALIDATE waits until what it sent before is acknowledged.
        while ended < count || self.target.peer_transfers.get() < self.seen {
            let mut work = node.turn(now);
            now = self.clock.now();
            ended += self.step(node, &mut left, now);
            work += between(now);
            politeness.after(work);
        }
    }
}

/// A node that answers, until so many transfers of its peer have ended.
struct Target {
    node: Node,
    seen: u64,
    clock: Clock,
}

impl Target {
    fn new(mut node: Node, clock: Clock) -> Self {
        node.export();
        Self {
            node,
            seen: 0,
            clock,
        }
    }

    fn serve(&mut self, count: u64) {
        self.seen += count;
        let mut politeness = Politeness::default();
        while self.node.counters.peer_transfers.get() < self.seen {
            politeness.after(self.node.turn(self.clock.now()));
        }
    }
}

/// Pauses when nothing has happened, as the program does: the other thread may run on the other half of the same core.
/// When nothing has happened for long it may need this one.
#[derive(Default)]
struct Politeness(u32);

impl Politeness {
    #[inline]
    fn after(&mut self, work: u32) {
        self.0 = if work == 0 { self.0 + 1 } else { 0 };
        if self.0 == IDLE {
            self.0 = 0;
            thread::yield_now();
        } else if self.0 != 0 {
            core::hint::spin_loop();
        }
    }
}

/// Fills a list with ranges of equal length, and holes between; what is left of the memory.
fn scatter(
    load: Load,
    list: &mut PageList<'static>,
    from: Range<'static>,
) -> Option<Range<'static>> {
    let each = load.length / load.pieces;
    let mut rest = Some(from);
    for _ in 0..load.pieces {
        let (piece, tail) = rest.take()?.split_at(each).ok()?;
        list.push(piece).expect("no more than a list holds");
        rest = match tail.split_at(HOLE) {
            Ok((_, tail)) => Some(tail),
            Err(tail) => Some(tail),
        };
    }
    rest
}

/// A PUT out of many ranges: registered and written with one WRITE, beside gathered by as many as it takes.
fn sources(row: Row, load: Load) -> Row {
    let clock = clock();
    let row = row.granule(load.granule()).bytes(u64::from(load.length));
    let put = |source: u16| {
        let load = Load { source, ..load };
        let [mut near, far] = nodes::pair(load.plan());
        let mut application = Application::new(&mut near, load, clock, &far);
        let mut target = Target::new(far, clock);
        move |n| {
            application.run(&mut near, n, |now| target.node.turn(now));
            target.serve(n);
        }
    };
    row.here(Role::Ours, "registered", put(2))
        .here(Role::Rival, "gathered", put(0))
}

/// Each end of a transfer beside the others, on one core.
fn extensions(row: Row, load: Load) -> Row {
    let clock = clock();
    let row = row.granule(load.granule()).bytes(u64::from(load.length));
    [
        (Role::Ours, "WRITE_WITH_IMM", End::Immediate),
        (Role::Rival, "SEND_WITH_INV", End::KillingDone),
        (Role::Rival, "as toward a kernel", End::Done),
    ]
    .into_iter()
    .fold(row, |row, (role, name, end)| {
        let load = Load { end, ..load };
        let [mut near, far] = nodes::pair(load.plan());
        let mut application = Application::new(&mut near, load, clock, &far);
        let mut target = Target::new(far, clock);
        row.here(role, name, move |n| {
            application.run(&mut near, n, |now| target.node.turn(now));
            target.serve(n);
        })
    })
}

fn two_cores(row: Row, load: Load, clock: Clock) -> Row {
    let [mut near, far] = nodes::pair(load.plan());
    let application = Application::new(&mut near, load, clock, &far);
    let counters = [near.counters, far.counters];
    let mut target = Target::new(far, clock);
    let shared = Arc::new(Mutex::new((application, near)));
    let figures = Arc::clone(&shared);
    let mut before = [[0; 3]; 2];
    row.across(
        Role::Ours,
        TWO,
        move |n| {
            let mut both = shared.lock().expect("no panic");
            let (application, near) = &mut *both;
            application.run(near, n, |_| 0);
        },
        move |n| target.serve(n),
    )
    .figures(move || {
        let mut both = figures.lock().expect("no panic");
        told(&mut both.0.latency, clock, counters, &mut before)
    })
}

fn one_core(row: Row, load: Load, clock: Clock) -> Row {
    let [mut near, far] = nodes::pair(load.plan());
    let application = Application::new(&mut near, load, clock, &far);
    let counters = [near.counters, far.counters];
    let mut target = Target::new(far, clock);
    let shared = Arc::new(Mutex::new((application, near)));
    let figures = Arc::clone(&shared);
    let mut before = [[0; 3]; 2];
    row.here(Role::Ours, ONE, move |n| {
        let mut both = shared.lock().expect("no panic");
        let (application, near) = &mut *both;
        application.run(near, n, |now| target.node.turn(now));
        target.serve(n);
    })
    .figures(move || {
        let mut both = figures.lock().expect("no panic");
        told(&mut both.0.latency, clock, counters, &mut before)
    })
}

impl Load {
    fn plan(self) -> Plan {
        Plan {
            depth: self.depth.max(8),
            payload: self.payload(),
            profile: Profile::frwr(),
            source: self.source,
            end: self.end,
        }
    }
}

/// The figures of a contender since they were last asked for.
fn told(
    latency: &mut Histogram,
    clock: Clock,
    counters: [&'static Counters; 2],
    before: &mut [[u64; 3]; 2],
) -> Vec<Figure> {
    let now = counters.map(|each| {
        [
            each.transfers.get() + each.peer_transfers.get(),
            each.work_requests.get(),
            each.doorbells.get(),
        ]
    });
    let per = |side: usize, what: usize| {
        let transfers = (now[side][0] - before[side][0]).max(1);
        (now[side][what] - before[side][what]) as f64 / transfers as f64
    };
    let ns = |ticks: u64| ticks as f64 * 1e9 / clock.hertz() as f64;
    let figures = [
        ("ns latency p50", ns(latency.percentile(50))),
        ("ns p99", ns(latency.percentile(99))),
        ("work requests here", per(0, 1)),
        ("at the target", per(1, 1)),
        ("doorbells here", per(0, 2)),
        ("at target", per(1, 2)),
    ];
    *before = now;
    latency.clear();
    figures
        .into_iter()
        .map(|(name, value)| Figure { name, value })
        .collect()
}

/// The same copies by one core, without anything around them.
fn copies(row: Row, load: Load) -> Row {
    let floors = Floors::new(load);
    Method::ALL
        .into_iter()
        .filter_map(|method| Some((method, method.copier()?)))
        .fold(row, |row, (method, copier)| {
            row.here(Role::Floor, method.name(), floors.batch(copier))
        })
}

/// Memory of the copies that transfers are compared with. Those of one row share it, and take turns.
pub(super) struct Floors {
    load: Load,
    shared: Arc<Mutex<Copies>>,
}

struct Copies {
    to: nodes::Bytes,
    from: nodes::Bytes,
    order: Vec<u32>,
    next: usize,
}

impl Floors {
    pub(super) fn new(load: Load) -> Self {
        let copies = Copies {
            to: nodes::Bytes::new(load.payload()),
            from: nodes::Bytes::new(load.payload()),
            order: order(load),
            next: 0,
        };
        Self {
            load,
            shared: Arc::new(Mutex::new(copies)),
        }
    }

    /// Copies one buffer after the other.
    pub(super) fn batch(&self, copier: Copier) -> impl FnMut(u64) + Send + use<> {
        let (shared, length) = (Arc::clone(&self.shared), self.load.length as usize);
        move |n| {
            let mut copies = shared.lock().expect("no panic");
            let Copies {
                to,
                from,
                order,
                next,
            } = &mut *copies;
            for _ in 0..n {
                let at = order[*next] as usize * length;
                *next = if *next + 1 == order.len() {
                    0
                } else {
                    *next + 1
                };
                copy(copier, &mut to[at..at + length], &from[at..at + length]);
            }
        }
    }
}

/// In which order buffers are used: shuffled where they are cold, the same each time.
fn order(load: Load) -> Vec<u32> {
    let count = u32::try_from(load.payload() / load.length as usize).expect("below 4 GiB");
    let mut order: Vec<u32> = (0..count).collect();
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    for at in (1..order.len()).rev() {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let other = usize::try_from(random % (at as u64 + 1)).expect("an index");
        order.swap(at, other);
    }
    order
}

/// What a message in a ring costs, there and back, as often as a device sends one.
fn messages(row: Row) -> Row {
    super::floor::one_line(row)
}

/// A 4 KiB GET of what the target's core has just written: the payload crosses, and is not in our cache.
///
/// In turns, 64 at a time: the target writes all 64 buffers, which does not count, then they are fetched one
/// after another.
fn fresh(row: Row) -> Row {
    let clock = clock();
    let load = Load {
        kind: Kind::Get,
        length: 4096,
        depth: 1,
        cold: false,
        ..PLAIN
    };
    let plan = Plan {
        payload: FRESH * 4096,
        ..load.plan()
    };
    let [mut near, far] = nodes::pair(plan);
    let mut application = Application::new(&mut near, load, clock, &far);
    application.offsets = (0..64).map(|at| at * 4096).collect();
    let mut scribble = Scribble::over(&far, 1);
    let mut target = Target::new(far, clock);
    let gate = Arc::new(Gate::default());
    let far_gate = Arc::clone(&gate);
    let row = row.granule(FRESH as u64).bytes(4096).across_timed(
        Role::Ours,
        TWO,
        move |n| {
            (0..n / FRESH as u64)
                .map(|_| {
                    gate.pass();
                    let from = tsc::start();
                    application.run(&mut near, FRESH as u64, |_| 0);
                    tsc::stop().wrapping_sub(from)
                })
                .sum()
        },
        move |n| {
            for _ in 0..n / FRESH as u64 {
                scribble.write(FRESH * 4096);
                far_gate.open();
                target.serve(FRESH as u64);
            }
        },
    );
    // The floor: a line there and back for each, and the copy.
    let [mut near, far] = nodes::pair(plan);
    let mut scribble = Scribble::over(&far, 1);
    let source = far.payload.as_ref().map(Range::sge).expect("not exported");
    let mut sink = near.payload.take().expect("not taken");
    let gate = Arc::new(Gate::default());
    let far_gate = Arc::clone(&gate);
    let ball = Arc::new(CachePadded::new(AtomicU64::new(0)));
    let far_ball = Arc::clone(&ball);
    let (mut sent, mut returned) = (0, 0);
    let copier = o2poll_hal::copy::Method::Plain
        .copier()
        .expect("always there");
    let reader = nodes::Reader::new(source, &near);
    row.across_timed(
        Role::Floor,
        "line there and back, and the copy",
        move |n| {
            (0..n / FRESH as u64)
                .map(|_| {
                    gate.pass();
                    let from = tsc::start();
                    for at in 0..FRESH {
                        // Release and Acquire pair with the other half's.
                        ball.store(sent + 1, Ordering::Release);
                        sent += 2;
                        await_value(&ball, sent);
                        let from = reader.bytes(at * 4096, 4096);
                        copy(copier, &mut sink.bytes_mut()[..4096], from);
                    }
                    tsc::stop().wrapping_sub(from)
                })
                .sum()
        },
        move |n| {
            let _kept = &far;
            for _ in 0..n / FRESH as u64 {
                scribble.write(FRESH * 4096);
                far_gate.open();
                for _ in 0..FRESH {
                    await_value(&far_ball, returned + 1);
                    returned += 2;
                    far_ball.store(returned, Ordering::Release);
                }
            }
        },
    )
    .goal(
        "time over that of a line there and back and a copy",
        Bound::AtMost(1.7),
        |row| Some(row.ticks_of(TWO)? / row.best_floor()?),
    )
}

/// Opened by one thread, passed by the other, again and again.
#[derive(Default)]
struct Gate {
    opened: CachePadded<AtomicU64>,
    passed: CachePadded<AtomicU64>,
}

impl Gate {
    fn open(&self) {
        // Release pairs with the Acquire in `pass`. One thread opens.
        self.opened.fetch_add(1, Ordering::Release);
    }

    fn pass(&self) {
        let next = self.passed.load(Ordering::Relaxed) + 1;
        self.passed.store(next, Ordering::Relaxed);
        let mut patience = Patience::default();
        // Acquire pairs with the Release in `open`.
        while self.opened.load(Ordering::Acquire) < next {
            patience.wait();
        }
    }
}

#[inline]
fn await_value(line: &AtomicU64, value: u64) {
    let mut patience = Patience::default();
    // Acquire pairs with the sender's Release.
    while line.load(Ordering::Acquire) != value {
        patience.wait();
    }
}

/// Counts by size: 16 classes to each power of two, so within 7 %.
struct Histogram {
    counts: Vec<u32>,
    all: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self {
            counts: vec![0; 61 * 16],
            all: 0,
        }
    }
}

impl Histogram {
    #[inline]
    fn add(&mut self, ticks: u64) {
        self.counts[Self::class(ticks)] += 1;
        self.all += 1;
    }

    fn clear(&mut self) {
        self.counts.fill(0);
        self.all = 0;
    }

    #[inline]
    fn class(ticks: u64) -> usize {
        let power = 63 - (ticks | 16).leading_zeros();
        let within = (ticks >> (power - 4)) & 15;
        ((power - 4) * 16) as usize
            + usize::try_from(within).expect("four bits")
            + 16 * usize::from(ticks >= 16)
    }

    /// The upper end of the class in which the percentile lies.
    fn percentile(&self, percent: u64) -> u64 {
        let wanted = (self.all * percent).div_ceil(100).max(1);
        let mut seen = 0;
        for (class, count) in self.counts.iter().enumerate() {
            seen += u64::from(*count);
            if seen >= wanted {
                return Self::end(class);
            }
        }
        0
    }

    fn end(class: usize) -> u64 {
        let (power, within) = (class / 16, class as u64 % 16);
        match power.checked_sub(1) {
            None => within,
            Some(shift) => ((16 + within + 1) << shift) - 1,
        }
    }
}

const TWO: &str = "two pollers on two cores";
const ONE: &str = "two pollers on one core";

/// Polls without work until the core is offered to others.
const IDLE: u32 = if cfg!(test) { 50 } else { 20_000 };

/// Payload of each side in a cold row; several times any cache.
const COLD: usize = if cfg!(test) { 16 << 20 } else { 256 << 20 };

/// Most bytes of a granule.
const GRANULE: u64 = if cfg!(test) { 4 << 20 } else { 256 << 20 };

/// Buffers that the target writes between turns: half of a core's own cache.
const FRESH: usize = 64;

#[cfg(test)]
mod tests {
    use super::Histogram;

    #[test]
    fn percentiles_are_within_a_sixteenth_above() {
        for scale in [1, 7, 100, 12_345, 1 << 40] {
            let mut histogram = Histogram::default();
            for value in 1..=1000 {
                histogram.add(value * scale);
            }
            for percent in [1, 50, 99, 100] {
                let (found, exact) = (histogram.percentile(percent), percent * 10 * scale);
                assert!(
                    found >= exact && found <= exact + exact / 15,
                    "{found} {exact}"
                );
            }
            histogram.clear();
            assert_eq!(histogram.percentile(50), 0);
        }
    }

    #[test]
    fn classes_go_up_with_what_is_in_them() {
        for value in (0..5000).chain([1 << 30, (1 << 62) + 1]) {
            let class = Histogram::class(value);
            assert!(value <= Histogram::end(class), "{value}");
            assert!(class == 0 || value > Histogram::end(class - 1), "{value}");
        }
    }
}
