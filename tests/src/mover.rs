//! An application: PUTs, GETs back what it has put, and compares; all sizes, several at a time.

use std::sync::Mutex;

use o2poll_dataplane::endpoint::{EntryOptions, Event, Operation, Token};
use o2poll_dataplane::memory::PageList;
use o2poll_dataplane::pool::Handle;
use o2poll_soft::Profile;

use crate::{Backend, Node, Setup, World};

/// Lengths of the transfers: none, both sides of what fits into a message, pages, the LNet MTU.
pub const SIZES: [u32; 7] = [0, 1, 3976, 3977, 4096, 65_536, 1 << 20];

/// Transfers at a time.
pub const SLOTS: usize = 4;

/// The application of one node. It allocates when it is made, and never again.
#[derive(Debug)]
pub struct Mover {
    connection: Handle,
    slots: Vec<Slot>,
    /// PUTs that came back unharmed.
    pub rounds: u64,
    left: u64,
}

/// One transfer at a time, in a megabyte of the peer's memory that nobody else uses.
#[derive(Debug)]
struct Slot {
    /// One list of each size, here while no transfer has it.
    lists: [Option<&'static mut PageList<'static>>; SIZES.len()],
    round: u64,
}

impl Mover {
    /// An application on node `of`, with memory of its own on the other node. `connection` is the
    /// node's own name of the connection to the other.
    pub fn new<B: Backend>(world: &mut World<B>, of: usize, connection: Handle) -> Self {
        let there = world.nodes[1 - of]
            .arena
            .flat(MEBIBYTE * u32::try_from(SLOTS).expect("few slots"), 9);
        world.export(
            1 - of,
            MATCH_BITS,
            EntryOptions::PUT | EntryOptions::GET,
            there,
        );
        let arena = &mut world.nodes[of].arena;
        let mut list = |size: u32| {
            let (half, hole) = (size / 2, 3);
            arena.list(&[half, size - half], hole, size as usize % 64)
        };
        let slots = (0..SLOTS)
            .map(|_| Slot {
                lists: SIZES.map(|size| Some(list(size))),
                round: 0,
            })
            .collect();
        Self {
            connection,
            slots,
            rounds: 0,
            left: 0,
        }
    }

    /// Begins so many more rounds, spread over the slots.
    pub fn begin<B: Backend>(&mut self, node: &mut Node<B>, rounds: u64) {
        assert!(self.is_idle());
        self.left = rounds;
        for slot in 0..SLOTS {
            self.put(node, slot);
        }
    }

    /// Whether nothing is under way and nothing left to begin.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.left == 0
            && self
                .slots
                .iter()
                .all(|slot| slot.lists.iter().all(Option::is_some))
    }

    /// Takes all events of its node, and goes on.
    pub fn step<B: Backend>(&mut self, node: &mut Node<B>) {
        while let Some(event) = node.events.pop() {
            let Event::Done {
                token: Token(token),
                outcome,
                memory,
            } = event
            else {
                panic!("not asked for: {event:?}");
            };
            let (slot, get) = (usize::try_from(token / 2).expect("a slot"), token % 2 == 1);
            let round = self.slots[slot].round;
            let length = SIZES[which(slot, round)];
            assert_eq!(outcome, Ok(length), "round {round}, GET: {get}");
            if get {
                let found = memory.chunks().flatten().copied();
                assert!(
                    found.eq(pattern(slot, round, length)),
                    "{length} bytes of round {round} came back changed"
                );
                self.slots[slot].lists[which(slot, round)] = Some(memory);
                self.slots[slot].round += 1;
                self.rounds += 1;
                self.put(node, slot);
            } else {
                for chunk in memory.chunks_mut() {
                    chunk.fill(0);
                }
                let optimized = (round / 7).is_multiple_of(2);
                self.submit(node, slot, Operation::Get { optimized }, memory);
            }
        }
    }

    fn put<B: Backend>(&mut self, node: &mut Node<B>, slot: usize) {
        let Some(left) = self.left.checked_sub(1) else {
            return;
        };
        self.left = left;
        let round = self.slots[slot].round;
        let which = which(slot, round);
        let memory = self.slots[slot].lists[which].take().expect("at home");
        let mut bytes = pattern(slot, round, SIZES[which]);
        for (to, from) in memory.chunks_mut().flatten().zip(&mut bytes) {
            *to = from;
        }
        let put = Operation::Put {
            hdr_data: round,
            ack: round.is_multiple_of(3),
        };
        self.submit(node, slot, put, memory);
    }

    fn submit<B: Backend>(
        &self,
        node: &mut Node<B>,
        slot: usize,
        operation: Operation,
        memory: &'static mut PageList<'static>,
    ) {
        let get = u64::from(matches!(operation, Operation::Get { .. }));
        let slot = slot as u64;
        let offset = u32::try_from(slot).expect("few slots") * MEBIBYTE;
        node.submit(World::request(
            self.connection,
            slot * 2 + get,
            MATCH_BITS,
            offset,
            operation,
            memory,
        ));
    }
}

/// Two nodes on a thread each move `rounds` of all sizes both ways, and stop.
pub fn on_two_threads<B: Backend>(profile: Profile, rounds: u64)
where
    Node<B>: Send,
{
    let mut setup = Setup {
        // In nanoseconds there.
        timeout: 100 * SECOND / B::PACE,
        abandon: 100 * SECOND / B::PACE,
        keepalive: 100 * SECOND / B::PACE,
        ..Setup::new(profile)
    };
    // Its lists have two pieces, and a window covers one.
    setup.shape.staging = if B::REAL { 4 } else { 0 };
    let mut world = B::world([setup; 2]);
    let connections = world.connect();
    let movers = [0, 1].map(|of| Mutex::new(Mover::new(&mut world, of, connections[of])));
    world.on_two_threads(|of, mut core| {
        let mut mover = movers[of].lock().expect("locked once");
        mover.begin(core.node, rounds);
        core.until(|node| {
            mover.step(node);
            mover.is_idle()
        });
        core.meet();
        core.stop();
    });
    for (of, mover) in movers.into_iter().enumerate() {
        assert_eq!(mover.into_inner().expect("unlocked").rounds, rounds);
        let counters = world.nodes[of].counters;
        assert_eq!(counters.transfers.get(), 2 * rounds);
        assert_eq!(counters.timeouts.get() + counters.protocol_errors.get(), 0);
    }
    world.end();
}

/// Slots go through the sizes at different speeds, so that all combinations come up.
fn which(slot: usize, round: u64) -> usize {
    let round = usize::try_from(round).expect("not so many rounds");
    (round + slot) % SIZES.len()
}

/// The bytes of a round: no two alike.
fn pattern(slot: usize, round: u64, length: u32) -> impl Iterator<Item = u8> {
    let mut state = (round << 8 | slot as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..length).map(move |_| {
        state = state.wrapping_mul(0xd129_42fd_9af1_3f75).wrapping_add(7);
        (state >> 56) as u8
    })
}

const SECOND: u64 = 1_000_000_000;
const MATCH_BITS: u64 = 0x77;
const MEBIBYTE: u32 = 1 << 20;
