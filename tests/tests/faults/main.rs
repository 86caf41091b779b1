//! Devices that take half a chain, fail a request, refuse receives or fall silent; pools that are used up;
//! connections that end in every phase. Everything that was taken comes back, and what can still be done
//! is done, byte for byte.

mod blows;
mod chains;
mod pools;

use core::cell::Cell;

use o2poll_dataplane::endpoint::{EntryOptions, Event, Operation};
use o2poll_dataplane::pool::Handle;
use o2poll_soft::Profile;
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
