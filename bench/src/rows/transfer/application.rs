//! What runs beside the pollers: an initiator that keeps transfers in flight, and a target that answers.

use std::collections::VecDeque;
use std::thread;

use o2poll_dataplane::counters::Counters;
use o2poll_dataplane::endpoint::{Event, Operation, Request, Submission, Token};
use o2poll_dataplane::memory::{PageList, Range};
use o2poll_dataplane::pool::Handle;
use o2poll_dataplane::time::Instant;
use o2poll_hal::clock::Clock;

use super::histogram::Histogram;
use super::{Kind, Load, order, scatter};
use crate::nodes::{BITS, Node, PORTAL, lend_one};

/// The application of the initiator: keeps so many transfers in flight.
pub(super) struct Application {
    load: Load,
    connection: Handle,
    /// Payload memory that is in no transfer.
    idle: VecDeque<Range<'static>>,
    /// Offsets at the target.
    pub(super) offsets: Vec<u32>,
    next: usize,
    /// Page lists that are in no transfer, with their tokens.
    lists: Vec<(usize, &'static mut PageList<'static>)>,
    /// When the transfer of each token was submitted.
    began: Vec<Instant>,
    clock: Clock,
    pub(super) latency: Histogram,
    /// What the target counts, and how many transfers it will have seen.
    target: &'static Counters,
    seen: u64,
}

impl Application {
    pub(super) fn new(node: &mut Node, load: Load, clock: Clock, target: &Node) -> Self {
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
    pub(super) fn run(
        &mut self,
        node: &mut Node,
        count: u64,
        mut between: impl FnMut(Instant) -> u32,
    ) {
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
pub(super) struct Target {
    pub(super) node: Node,
    seen: u64,
    clock: Clock,
}

impl Target {
    pub(super) fn new(mut node: Node, clock: Clock) -> Self {
        node.export();
        Self {
            node,
            seen: 0,
            clock,
        }
    }

    pub(super) fn serve(&mut self, count: u64) {
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

/// Polls without work until the core is offered to others.
const IDLE: u32 = if cfg!(test) { 50 } else { 20_000 };
