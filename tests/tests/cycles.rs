//! Connections that come and go under load, ten thousand of them: nothing is kept of any.

use std::collections::BTreeMap;

use o2poll_dataplane::endpoint::{EntryOptions, Error, Event, Operation, Token};
use o2poll_dataplane::memory::PageList;
use o2poll_dataplane::nic::Status;
use o2poll_dataplane::poller::{Leftovers, Order};
use o2poll_dataplane::pool::Handle;
use o2poll_soft::{Gauges, Profile};
use o2poll_tests::plot::noise;
use o2poll_tests::{Setup, World};

const LENGTH: u32 = 6000;
const EACH: u64 = 6;
const ALL: [Operation; 4] = [
    Operation::Put {
        hdr_data: 0,
        ack: false,
    },
    Operation::Put {
        hdr_data: 0,
        ack: true,
    },
    Operation::Get { optimized: true },
    Operation::Get { optimized: false },
];

/// How the two part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// Once everything is done.
    Quiet,
    /// By one side's wish, whatever is under way.
    Close(usize),
    /// By a work request of one side that fails.
    Fail(usize),
    /// By a doorbell of one side of which nothing is taken, and the wish of the other.
    Cut(usize),
}

/// The same numbers on every machine and in every run.
struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: u32) -> u32 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        u32::try_from(self.0 >> 33).expect("31 bits") % bound
    }

    fn pick<'a, T>(&mut self, all: &'a [T]) -> &'a T {
        let bound = u32::try_from(all.len()).expect("few");
        &all[usize::try_from(self.below(bound)).expect("32 bits at least")]
    }
}

/// Two nodes, and the memory that each has to hand, which comes back with the events.
struct Life {
    world: World,
    lists: [Vec<&'static mut PageList<'static>>; 2],
    dice: Dice,
    at_rest: [(Leftovers, Gauges); 2],
    outcomes: BTreeMap<&'static str, u64>,
}

impl Life {
    fn new(setup: Setup, seed: u64) -> Self {
        let mut world = World::new(setup);
        let lists = [0, 1].map(|of| {
            let memory = world.nodes[of].arena.flat(LENGTH, 0);
            memory.write_at(0, &noise(LENGTH, 3));
            let options = EntryOptions::PUT | EntryOptions::GET | EntryOptions::TRUNCATE;
            world.export(of, 7, options, memory);
            (0..EACH)
                .map(|_| world.nodes[of].arena.flat(LENGTH, 0))
                .collect()
        });
        world.settle();
        let at_rest = [0, 1].map(|of| rest(&mut world, of));
        Self {
            world,
            lists,
            dice: Dice(seed),
            at_rest,
            outcomes: BTreeMap::new(),
        }
    }

    /// Everything that a life of a connection may do, and the state of before after it.
    fn cycle(&mut self, round: u64) -> End {
        let connections = self.world.connect();
        for (of, connection) in connections.into_iter().enumerate() {
            self.submit(of, connection);
        }
        let end = match self.dice.below(8) {
            0 => End::Quiet,
            1..=3 => End::Close(self.side()),
            4 | 5 => End::Fail(self.side()),
            _ => End::Cut(self.side()),
        };
        let steps = if end == End::Quiet {
            10_000
        } else {
            self.dice.below(7)
        };
        // One bit for each transfer that is not told yet.
        let mut due = [(1 << EACH) - 1; 2];
        for _ in 0..steps {
            self.world.step();
            self.take(&mut due);
            if due == [0; 2] {
                break;
            }
        }
        match end {
            End::Quiet => assert_eq!(due, [0; 2], "round {round}: {}", self.world.picture()),
            End::Close(of) => self.close(of, connections),
            End::Fail(of) => {
                self.world.nodes[of].poller.nic().faults().fail = Some((0, Status::Flushed));
            }
            End::Cut(of) => {
                self.world.nodes[of].poller.nic().faults().cut = Some(0);
                self.close(1 - of, connections);
            }
        }
        // What the fault hits, it hits now.
        for _ in 0..4 {
            self.world.step();
            self.take(&mut due);
        }
        for of in 0..2 {
            let faults = self.world.nodes[of].poller.nic().faults();
            (faults.fail, faults.cut) = (None, None);
        }
        // The connection manager tells whoever has not ended it.
        for of in 0..2 {
            self.close(of, connections);
        }
        let mut left = 100_000_u32;
        while due != [0; 2] || self.world.nodes.iter().any(|node| node.gone.is_empty()) {
            self.world.step();
            self.take(&mut due);
            left -= 1;
            assert!(
                left != 0,
                "round {round}, {end:?}: {due:?} due; {}",
                self.world.picture()
            );
        }
        self.world.settle();
        for (of, &ended) in connections.iter().enumerate() {
            assert_eq!(
                rest(&mut self.world, of),
                self.at_rest[of],
                "round {round}, {end:?}, node {of}: {}",
                self.world.picture()
            );
            let node = &mut self.world.nodes[of];
            assert_eq!(node.counters.keys_alive.get(), 0, "round {round}, {end:?}");
            assert_eq!(node.refused, 0, "round {round}: no room for a queue pair");
            let gone = core::mem::take(&mut node.gone);
            let [(connection, _)] = gone[..] else {
                panic!("round {round}: {gone:?} gone");
            };
            assert_eq!(connection, ended);
            assert_eq!(self.lists[of].len() as u64, EACH);
        }
        end
    }

    fn side(&mut self) -> usize {
        *self.dice.pick(&[0, 1])
    }

    fn submit(&mut self, of: usize, connection: Handle) {
        for (token, memory) in (0..).zip(core::mem::take(&mut self.lists[of])) {
            let operation = *self.dice.pick(&ALL);
            let request = World::request(connection, token, 7, 0, operation, memory);
            self.world.nodes[of].submit(request);
        }
    }

    /// Takes what has come, each transfer's memory with it.
    fn take(&mut self, due: &mut [u64; 2]) {
        for (of, due) in due.iter_mut().enumerate() {
            while let Some(event) = self.world.nodes[of].events.pop() {
                let Event::Done {
                    token,
                    outcome,
                    memory,
                } = event
                else {
                    panic!("{event:?}");
                };
                let Token(token) = token;
                assert!(*due >> token & 1 == 1, "{token} told twice");
                *due &= !(1 << token);
                self.lists[of].push(memory);
                let name = match outcome {
                    Ok(length) => {
                        assert_eq!(length, LENGTH);
                        "done"
                    }
                    Err(Error::ConnectionClosed) => "connection closed",
                    Err(_) => "failed",
                };
                *self.outcomes.entry(name).or_default() += 1;
            }
        }
    }

    fn close(&mut self, of: usize, connections: [Handle; 2]) {
        let connection = connections[of];
        if self.world.nodes[of].gone.is_empty() {
            self.world.nodes[of].order(Order::Close { connection });
        }
    }
}

fn rest(world: &mut World, of: usize) -> (Leftovers, Gauges) {
    let poller = &mut world.nodes[of].poller;
    (poller.leftovers(), poller.nic().gauges())
}

fn cycles(setup: Setup, seed: u64, rounds: u64) {
    let mut life = Life::new(setup, seed);
    let mut ends = BTreeMap::new();
    for round in 0..rounds {
        *ends.entry(format!("{:?}", life.cycle(round))).or_insert(0) += 1;
    }
    // Each way to part was met in mid-transfer often enough to mean something.
    assert_eq!(ends.len(), 7, "{ends:?}");
    let [done, lost] =
        ["done", "connection closed"].map(|name| life.outcomes.get(name).copied().unwrap_or(0));
    let all = rounds * 2 * EACH;
    assert!(
        done > all / 10 && lost > all / 10,
        "{all}: {:?}",
        life.outcomes
    );
    life.world.end();
}

fn setup(profile: Profile) -> Setup {
    let mut setup = Setup::new(profile);
    setup.memory = 1 << 20;
    setup.profile.ack_timeout = 300;
    // Nobody keeps a record of what the device was asked: it would grow with every connection.
    setup.quiet = true;
    setup
}

#[test]
fn ten_thousand_connections_that_end_under_load_leave_nothing() {
    cycles(setup(Profile::mlx5()), 1, 10_000);
    cycles(setup(Profile::rxe()), 2, 10_000);
}
