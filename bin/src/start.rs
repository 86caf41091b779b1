//! From a plan to running nodes: rings, blueprints, threads.

use core::sync::atomic::AtomicU64;
use core::time::Duration;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};

use o2poll_config::{self as config, Config};
use o2poll_dataplane::counters::Counters;
use o2poll_dataplane::poller::Order;
use o2poll_dataplane::wire::Nid;
use o2poll_hal::arena::{ArenaError, Note, joined};
use o2poll_hal::clock::Clock;

use crate::NodeError;
use crate::application::Application;
use crate::engine::{Core, Engine, Fabric, NicOf, Side};
use crate::keeper::Pauses;
use crate::measure::CoreCounters;
use crate::node::{Backend, Blueprint, Common, Role, lend, ring_of};
use crate::plan::{Needs, Plan, SPARE_ENTRIES, cores_of, nth_of};
use crate::polling::{self, Flags};
use crate::port::Port;

/// Counters for every core of each node of a file.
pub(crate) fn counters(config: &Config) -> Vec<CoreCounters> {
    let of = |node: &config::Node| -> CoreCounters {
        lend(cores_of(node), || &*Box::leak(Box::new(Counters::new())))
    };
    config.nodes.iter().map(of).collect()
}

/// One node that is to be started.
pub(crate) struct Start<A, B> {
    /// Its place in the file.
    pub(crate) index: usize,
    pub(crate) stamp: u64,
    pub(crate) counters: CoreCounters,
    pub(crate) application: Option<A>,
    /// Bytes of each range of memory for whoever uses the node.
    pub(crate) ranges: Vec<usize>,
    /// Of each of its cores.
    pub(crate) needs: Needs,
    /// One for each of its cores.
    pub(crate) backends: Vec<B>,
}

/// Nodes that are about to be started.
pub(crate) struct Nodes<A, F: Fabric> {
    config: Config,
    sides: Vec<Side<NicOf<F>>>,
    blueprints: Vec<Blueprint<A, F::Backend>>,
}

impl<A: Application, F: Fabric> Nodes<A, F> {
    pub(crate) fn new(config: &Config) -> Self {
        Self {
            config: config.clone(),
            sides: Vec::new(),
            blueprints: Vec::new(),
        }
    }

    /// One more.
    pub(crate) fn add(&mut self, start: Start<A, F::Backend>) -> Result<(), NodeError> {
        let node = self.config.nodes.get(start.index);
        let node = node.ok_or(NodeError::NoNode(Nid::ANY))?;
        let (shape, cores) = (start.needs.shape, start.backends.len());
        let busy = lend(cores, || AtomicU64::new(0));
        // Every transfer may end before the application looks; an entry has two events.
        let events = start.needs.sizes.transfers + 2 * start.needs.sizes.entries + 16;
        let places = shape.windows + 4 * shape.connections + 16;
        let (notices, notices_in) = ring_of(4 * shape.connections * cores + 16);
        let mut side = Side {
            nid: node.nid,
            index: start.index,
            cores: Vec::new(),
            notices: start.application.is_some().then_some(notices),
            unheard: VecDeque::new(),
            counters: start.counters,
            node: None,
            reconnected: 0,
        };
        let (port, ends) = Port::new(cores, events, SPARE_ENTRIES);
        let (others, commons): (Vec<_>, VecDeque<_>) =
            (1..cores).map(|_| channel::<Common<F::Backend>>()).unzip();
        let first = Role::First {
            port,
            notices: notices_in,
            application: start.application,
            ranges: start.ranges,
            others,
        };
        let roles = core::iter::once(first).chain(commons.into_iter().map(Role::Other));
        for (core, ((backend, (submissions, events)), role)) in
            start.backends.into_iter().zip(ends).zip(roles).enumerate()
        {
            let (orders, orders_in) = ring_of(places + shape.mappings);
            let (reports_out, reports) = ring_of(places + shape.reports_of_mappings());
            side.cores.push(Core {
                orders,
                backlog: VecDeque::new(),
                reports,
                made: 0,
                rebuilt: 0,
                stopped: None,
            });
            self.blueprints.push(Blueprint {
                index: start.index,
                node: node.clone(),
                memory: self.config.memory,
                tunables: self.config.tunables,
                backend,
                needs: start.needs,
                stamp: start.stamp,
                orders: orders_in,
                reports: reports_out,
                submissions,
                events,
                counters: start.counters,
                busy,
                core,
                role,
            });
        }
        self.sides.push(side);
        Ok(())
    }

    /// Starts their threads. Returns when all are polling.
    pub(crate) fn start(
        self,
        plan: Plan,
        clock: Clock,
        fabric: F,
        notes: Vec<String>,
    ) -> Result<Engine<A, F>, NodeError> {
        let tunables = &self.config.tunables;
        let mut engine = Engine {
            idle: plan.placement.idle(tunables.idle),
            plan,
            clock,
            flags: Arc::new(Flags::default()),
            threads: Vec::new(),
            sides: self.sides,
            fabric,
            connections: Vec::new(),
            dials: Vec::new(),
            keepers: Vec::new(),
            pauses: Pauses {
                attempts: tunables.reconnects.into(),
                least: tunables.min_reconnect,
                most: tunables.max_reconnect,
            },
            notes,
            log: Vec::new(),
            lost: None,
            closing: false,
        };
        // An engine that is dropped ends the threads that it has.
        spawn(&mut engine, self.blueprints)?;
        Ok(engine)
    }
}

fn spawn<A: Application, F: Fabric>(
    engine: &mut Engine<A, F>,
    mut blueprints: Vec<Blueprint<A, F::Backend>>,
) -> Result<(), NodeError> {
    let (told, built) = channel();
    let cores = blueprints.len();
    let wanted = blueprints
        .iter()
        .map(lockable)
        .fold(0, usize::saturating_add);
    for thread in &engine.plan.placement.threads {
        let here = |plan: &mut Blueprint<A, F::Backend>| {
            thread.nodes.contains(&plan.index) && nth_of(&plan.node, thread.core) == plan.core
        };
        let seats: Vec<_> = blueprints.extract_if(.., here).collect();
        if seats.is_empty() {
            continue;
        }
        let (idle, clock, flags) = (engine.idle, engine.clock, Arc::clone(&engine.flags));
        let spawned = polling::spawn(thread.core, seats, idle, clock, flags, told.clone())?;
        engine.threads.push((thread.core, spawned));
    }
    drop(told);
    // A core that waits for the first one's memory fails when that one does, which knows why.
    let mut failed = None;
    let mut notes = Vec::new();
    for _ in 0..cores {
        // A large file takes its time to be read; a thread that dies drops its end.
        match built.recv_timeout(START) {
            Ok(Ok(built)) => {
                notes.extend(built.notes);
                let mut sides = engine.sides.iter_mut();
                if let Some(side) = sides.find(|side| side.index == built.index)
                    && built.node.is_some()
                {
                    side.node = built.node;
                }
            }
            Ok(Err(error @ NodeError::FirstCore(_))) => {
                failed.get_or_insert(error);
            }
            Ok(Err(error)) => return Err(of_the_process(error, wanted)),
            Err(RecvTimeoutError::Timeout) => {
                return Err(NodeError::Late {
                    what: "the memory of a node",
                    after: START,
                });
            }
            Err(RecvTimeoutError::Disconnected) => {
                let core = engine.threads.first().map_or(0, |(core, _)| *core);
                failed.get_or_insert(NodeError::Died { core });
            }
        }
    }
    if let Some(error) = failed {
        return Err(error);
    }
    engine.notes.extend(joined(&notes).iter().map(note));
    // After the queue pairs that they will be bound to: see the connection manager of RDMA devices.
    for (node, side) in engine.sides.iter_mut().enumerate() {
        for (nth, core) in side.cores.iter_mut().enumerate() {
            for _ in 0..engine.plan.shape.windows {
                let window = engine.fabric.window(node, nth)?;
                core.order(Order::Window { window, of: None });
            }
        }
    }
    Ok(())
}

/// Bytes that a core of a node wants locked if that is asked for: its arena, and one for each file.
fn lockable<A, B: Backend>(plan: &Blueprint<A, B>) -> usize {
    let pages = |bytes: usize| bytes.saturating_add(4095) & !4095;
    if !plan.role.is_first() {
        return pages(plan.needs.own_bytes);
    }
    let files = plan
        .node
        .exports
        .iter()
        .filter(|export| export.file().is_some())
        .map(|export| pages(usize::try_from(export.length).unwrap_or(usize::MAX)));
    files.fold(pages(plan.needs.bytes), usize::saturating_add)
}

/// The limit on locked memory counts for the process: an arena that must be locked and cannot be tells what all of them want.
fn of_the_process(error: NodeError, all: usize) -> NodeError {
    match error {
        NodeError::Arena {
            node,
            source:
                ArenaError::Required(Note::NotLocked {
                    bytes,
                    wanted,
                    limit,
                    errno,
                    ..
                }),
        } => NodeError::Arena {
            node,
            source: ArenaError::Required(Note::NotLocked {
                bytes,
                wanted: wanted.max(all),
                limit,
                errno,
            }),
        },
        other => other,
    }
}

/// What was tried and not had, with what the node file can say to it.
fn note(note: &Note) -> String {
    match note {
        Note::NoHugePages { .. } => {
            format!("{note}, or say huge_pages = \"off\" under [memory]; it runs without them")
        }
        note => note.to_string(),
    }
}

/// How long nodes may take to get their memory.
const START: Duration = Duration::from_secs(600);
