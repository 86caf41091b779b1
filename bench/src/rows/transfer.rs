//! Whole transfers between two nodes: PUT in a message, GET and PUT by RDMA.
//!
//! "two cores": a poller on each of two pinned threads, the application stepped between the polls of the
//! initiator. "one core": both pollers take turns on one thread, so that nothing crosses.
//! The floors copy the same bytes in the same order, from memory that is as cold. In `cold` rows each side has
//! 256 MiB, taken in an order that no prefetcher knows; in the others just what is in flight, so it stays in a cache.
//! Latency is from the submission's push to the pop of its event, over single transfers.

mod application;
mod floors;
mod fresh;
mod histogram;

use std::sync::{Arc, Mutex};

use o2poll_dataplane::counters::Counters;
use o2poll_dataplane::memory::{PageList, Range};
use o2poll_hal::clock::Clock;
use o2poll_soft::Profile;

use self::application::{Application, Target};
pub(super) use self::floors::Floors;
use self::floors::copies;
use self::fresh::fresh;
use self::histogram::Histogram;
use super::Spec;
use super::poll::clock;
use crate::harness::{Bound, Figure, Role, Row};
use crate::nodes::{self, End, Plan};

/// All rows of transfers.
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

const TWO: &str = "two pollers on two cores";
const ONE: &str = "two pollers on one core";

/// Payload of each side in a cold row; several times any cache.
const COLD: usize = if cfg!(test) { 16 << 20 } else { 256 << 20 };

/// Most bytes of a granule.
const GRANULE: u64 = if cfg!(test) { 4 << 20 } else { 256 << 20 };
