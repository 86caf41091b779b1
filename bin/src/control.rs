//! The control side of all nodes of a file: it starts their threads, gives orders, hears reports, makes and ends
//! connections, rebuilds windows, and stops everything.
//!
//! It has no thread of its own. Whoever owns a [`Control`] calls [`turn`](Control::turn) now and then, from a
//! thread that sleeps in between: polling threads have the cores.

use core::time::Duration;
use std::collections::{HashMap, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread::JoinHandle;
use std::time::Instant;

use o2poll_config::{Config, Idle, Machine};
use o2poll_dataplane::counters::Counters;
use o2poll_dataplane::endpoint::Event;
use o2poll_dataplane::peer::Local;
use o2poll_dataplane::poller::{Leftovers, Order, Report};
use o2poll_dataplane::pool::Handle;
use o2poll_dataplane::ring::{Consumer, Producer};
use o2poll_dataplane::wire::Nid;
use o2poll_hal::clock::{self, Clock};
use o2poll_hal::cores::Switches;
use o2poll_hal::count_alloc::Counts;
use o2poll_soft::{Gauges, QueuePair, Recorder, Window};

use crate::NodeError;
use crate::application::{Application, Nobody, Notice};
use crate::capture::{Capture, Summary, Ticker};
use crate::fabric::{Dial, Effect, Id, Manager, port, wires};
use crate::maps::Maps;
use crate::node::{Blueprint, Device, Link, Node, PROTECTION_DOMAIN, SoftBackend, ring_of};
use crate::plan::Plan;
use crate::polling::{self, Ended, Flags};

/// The nodes of one file, running.
pub struct Control<A: Application> {
    plan: Plan,
    idle: Idle,
    clock: Clock,
    flags: Arc<Flags>,
    threads: Vec<(usize, JoinHandle<Option<Ended<A>>>)>,
    sides: Vec<Side>,
    manager: Manager,
    notes: Vec<String>,
    log: Vec<String>,
    /// The first thing that went wrong with a connection.
    lost: Option<NodeError>,
    closing: bool,
    capture: Option<Capture>,
}

/// The control side of one node.
struct Side {
    nid: Nid,
    orders: Producer<'static, Order<Device>>,
    /// Orders that found the ring full.
    backlog: VecDeque<Order<Device>>,
    reports: Consumer<'static, Report<Device>>,
    /// To its application; `None` where the node was handed out.
    notices: Option<Producer<'static, Notice>>,
    counters: &'static Counters,
    /// Handed out, until its owner takes it.
    node: Option<Node>,
    connections: HashMap<Handle, Id>,
    rebuilt: u64,
    maps: Maps,
    keys_alive: u64,
    stopped: Option<Leftovers>,
}

/// How everything ended.
#[derive(Debug)]
pub struct Finished<A> {
    /// One for each node, in the order of the file.
    pub nodes: Vec<FinishedNode<A>>,
    /// One for each polling thread.
    pub threads: Vec<FinishedThread>,
    /// What the capture holds, if there was one.
    pub capture: Option<Summary>,
}

/// How a node ended.
#[derive(Debug)]
pub struct FinishedNode<A> {
    /// Its name.
    pub nid: Nid,
    /// What its poller still held; `None` if it did not come to an end in time.
    pub leftovers: Option<Leftovers>,
    /// What its device still held.
    pub device: Option<Gauges>,
    /// Keys that peers could use when the last connection was told to close.
    pub keys_alive: u64,
    /// Windows that were rebuilt.
    pub windows_rebuilt: u64,
    /// What its core has counted.
    pub counters: &'static Counters,
    /// Its application.
    pub application: Option<A>,
}

/// How a polling thread ended.
#[derive(Clone, Copy, Debug)]
pub struct FinishedThread {
    /// Its core.
    pub core: usize,
    /// What it asked of the allocator while it polled.
    pub allocations: Counts,
    /// How often it was taken off its core, or gave it up, while it polled.
    pub switches: Option<Switches>,
}

/// How nodes are started.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Registered memory for the owner of a node that has no application, in bytes, less than 4 GiB.
    pub memory: usize,
    /// Write what the nodes send each other to this file, as RoCEv2 frames.
    pub pcap: Option<PathBuf>,
}

impl Control<Nobody> {
    /// Starts every node of a file; each is handed out by [`node`](Self::node). Jobs of the file are not looked at.
    ///
    /// # Errors
    /// What could not be had. Nothing runs then.
    pub fn start_nodes(
        config: &Config,
        machine: &Machine<'_>,
        options: &Options,
    ) -> Result<Self, NodeError> {
        Self::start(config, machine, options, |_, _, _| Ok(None))
    }
}

impl<A: Application> Control<A> {
    /// Starts every node of a file, each with what `applications` gives for its place in the file; it is told the clock,
    /// and the counters of all nodes. A node without an application is handed out by [`node`](Self::node). Returns
    /// when all are polling.
    ///
    /// # Errors
    /// What could not be had. Nothing runs then.
    pub fn start(
        config: &Config,
        machine: &Machine<'_>,
        options: &Options,
        mut applications: impl FnMut(
            usize,
            &Clock,
            &[&'static Counters],
        ) -> Result<Option<A>, NodeError>,
    ) -> Result<Self, NodeError> {
        let plan = Plan::new(config, machine)?;
        let clock = Clock::start();
        let counters: Vec<&'static Counters> = config
            .nodes
            .iter()
            .map(|_| &*Box::leak(Box::new(Counters::new())))
            .collect();
        let (capture, recorders) = match &options.pcap {
            Some(path) => capture(path, clock, config)?,
            None => (None, Vec::new()),
        };
        let mut recorders = recorders.into_iter();
        let stamp = clock::stamp();
        let mut sides = Vec::new();
        let mut blueprints = Vec::new();
        let mut locals = Vec::new();
        let mut ports = wires(config.nodes.len()).into_iter();
        for (index, node) in config.nodes.iter().enumerate() {
            let application = applications(index, &clock, &counters)?;
            let ranges = match &application {
                Some(application) => application.memory(),
                None if options.memory == 0 => Vec::new(),
                None => vec![options.memory],
            };
            let needs = plan.of(node, &ranges)?;
            let shape = needs.shape;
            let places = shape.windows + 4 * shape.connections + 16;
            let (orders, orders_in) = ring_of(places + shape.mappings);
            let (reports_out, reports) = ring_of(places + shape.reports_of_mappings());
            let (notices, notices_in) = ring_of(4 * shape.connections + 16);
            let counters = counters
                .get(index)
                .copied()
                .ok_or(NodeError::NoNode(node.nid))?;
            // Every life of every node has another stamp, even of two that start in one microsecond.
            let stamp = stamp.wrapping_add(u64::try_from(index).unwrap_or(0));
            locals.push(Local {
                nid: node.nid,
                stamp,
                queue_depth: shape.queue_depth,
                max_frags: config.tunables.max_frags,
                high_water: config.tunables.peer_credits_hiw.into(),
                require_privileged_port: false,
                extensions: plan.extensions(node),
                ready: true,
            });
            sides.push(Side {
                nid: node.nid,
                orders,
                backlog: VecDeque::new(),
                reports,
                notices: application.is_some().then_some(notices),
                counters,
                node: None,
                connections: HashMap::new(),
                rebuilt: 0,
                maps: Maps::default(),
                keys_alive: 0,
                stopped: None,
            });
            blueprints.push(Some(Blueprint {
                index,
                node: node.clone(),
                memory: config.memory,
                tunables: config.tunables,
                backend: SoftBackend {
                    profile: plan.profile,
                    ports: ports.next().unwrap_or_default(),
                    recorder: recorders.next(),
                },
                needs,
                stamp,
                orders: orders_in,
                reports: reports_out,
                notices: notices_in,
                counters,
                application,
                ranges,
            }));
        }
        let mut control = Self {
            idle: plan.placement.idle(config.tunables.idle),
            notes: plan.notes.clone(),
            plan,
            clock,
            flags: Arc::new(Flags::default()),
            threads: Vec::new(),
            sides,
            manager: Manager::new(locals),
            log: Vec::new(),
            lost: None,
            closing: false,
            capture,
        };
        if let Some(capture) = &control.capture {
            control.manager.tell(capture.notes());
        }
        match control.spawn(blueprints) {
            Ok(()) => Ok(control),
            Err(error) => {
                control.join();
                Err(error)
            }
        }
    }

    fn spawn(
        &mut self,
        mut blueprints: Vec<Option<Blueprint<A, SoftBackend>>>,
    ) -> Result<(), NodeError> {
        let (told, built) = channel();
        for thread in &self.plan.placement.threads {
            let nodes = thread
                .nodes
                .iter()
                .filter_map(|index| blueprints.get_mut(*index).and_then(Option::take))
                .collect();
            let (idle, clock, flags) = (self.idle, self.clock, Arc::clone(&self.flags));
            let thread_of = polling::spawn(thread.core, nodes, idle, clock, flags, told.clone())?;
            self.threads.push((thread.core, thread_of));
        }
        drop(told);
        for _ in 0..self.sides.len() {
            // A large file takes its time to be read; a thread that dies drops its end.
            let built = match built.recv_timeout(START) {
                Ok(built) => built?,
                Err(RecvTimeoutError::Timeout) => {
                    return Err(NodeError::Late {
                        what: "the memory of a node",
                        after: START,
                    });
                }
                Err(RecvTimeoutError::Disconnected) => {
                    let core = self.threads.first().map_or(0, |(core, _)| *core);
                    return Err(NodeError::Died { core });
                }
            };
            for note in built.notes {
                if !self.notes.contains(&note) {
                    self.notes.push(note);
                }
            }
            if let Some(side) = self.sides.get_mut(built.index) {
                side.node = built.node;
            }
        }
        let windows = self.plan.shape.windows;
        for side in &mut self.sides {
            for _ in 0..windows {
                side.order(Order::Window {
                    window: Window::new(PROTECTION_DOMAIN),
                    of: None,
                });
            }
        }
        Ok(())
    }

    /// What was asked for and not had: sentences with a remedy.
    #[must_use]
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Which core polls for which node, as a sentence.
    #[must_use]
    pub fn placement(&self) -> &str {
        &self.plan.placement.sentence
    }

    /// What a polling thread does when there is nothing to do.
    #[must_use]
    pub const fn idle(&self) -> Idle {
        self.idle
    }

    /// The clock of all nodes.
    #[must_use]
    pub const fn clock(&self) -> Clock {
        self.clock
    }

    /// Whether transfers may wait for mappings that [`turn`](Self::turn) makes: then it is called often.
    #[must_use]
    pub const fn maps(&self) -> bool {
        self.plan.shape.mappings != 0
    }

    /// Lines about connections since the last call.
    pub fn log(&mut self) -> Vec<String> {
        core::mem::take(&mut self.log)
    }

    /// What a node's core has counted.
    #[must_use]
    pub fn counters(&self, nid: Nid) -> Option<&'static Counters> {
        let side = self.sides.iter().find(|side| side.nid == nid)?;
        Some(side.counters)
    }

    /// A node that has no application, as its owner uses it.
    pub fn node(&mut self, nid: Nid) -> Option<&mut Node> {
        let side = self.sides.iter_mut().find(|side| side.nid == nid)?;
        side.node.as_mut()
    }

    /// Takes such a node out, to be used on another thread.
    pub fn take_node(&mut self, nid: Nid) -> Option<Node> {
        let side = self.sides.iter_mut().find(|side| side.nid == nid)?;
        side.node.take()
    }

    /// Connects two nodes, and waits until the first may submit.
    ///
    /// # Errors
    /// Why not.
    pub fn connect(&mut self, from: Nid, to: Nid, timeout: Duration) -> Result<Link, NodeError> {
        let index = |nid| {
            let found = self.sides.iter().position(|side| side.nid == nid);
            found.ok_or(NodeError::NoNode(nid))
        };
        let (near, far) = (index(from)?, index(to)?);
        let failed = |why: String| NodeError::Dial { from, to, why };
        if near == far {
            return Err(failed(String::from("a node does not connect to itself")));
        }
        let dial = self.manager.dial(near, far);
        let give_up = Instant::now() + timeout;
        loop {
            self.turn()?;
            match self.manager.outcome(dial) {
                Some(Dial::Up { connection, terms }) => {
                    return Ok(Link {
                        connection: *connection,
                        queue_depth: terms.queue_depth,
                    });
                }
                Some(Dial::Failed(why)) => return Err(failed(why.clone())),
                _ if Instant::now() >= give_up => {
                    return Err(failed(format!("no answer within {timeout:?}")));
                }
                _ => std::thread::sleep(SHORT),
            }
        }
    }

    /// Waits for the next event of a node that has no application, and serves the control side meanwhile.
    ///
    /// # Errors
    /// When none comes in time, or something broke.
    pub fn wait(&mut self, nid: Nid, timeout: Duration) -> Result<Event<'static>, NodeError> {
        let give_up = Instant::now() + timeout;
        loop {
            self.turn()?;
            let node = self.node(nid).ok_or(NodeError::NoNode(nid))?;
            if let Some(event) = node.event() {
                return Ok(event);
            }
            if Instant::now() >= give_up {
                return Err(NodeError::Late {
                    what: "an event",
                    after: timeout,
                });
            }
            std::thread::sleep(SHORT);
        }
    }

    /// Tells every application to come to an end.
    pub fn finish(&mut self) {
        for side in &mut self.sides {
            side.notice(Notice::Finish);
        }
    }

    /// Does what there is to do: reports, the connection manager, windows to rebuild. Never waits.
    ///
    /// # Errors
    /// A device or a thread that failed, or a connection that ended unasked.
    pub fn turn(&mut self) -> Result<(), NodeError> {
        self.serve();
        if let Some(error) = self.lost.take() {
            return Err(error);
        }
        if self.flags.has_failed() || self.threads.iter().any(|(_, thread)| thread.is_finished()) {
            return Err(self.post_mortem());
        }
        Ok(())
    }

    fn serve(&mut self) {
        for index in 0..self.sides.len() {
            while let Some(report) = self
                .sides
                .get_mut(index)
                .and_then(|side| side.reports.pop())
            {
                self.hear(index, report);
            }
        }
        for effect in self.manager.run(Instant::now()) {
            self.carry_out(effect);
        }
        self.log.extend(self.manager.log());
        for side in &mut self.sides {
            side.flush();
        }
    }

    fn hear(&mut self, index: usize, report: Report<Device>) {
        let Some(side) = self.sides.get_mut(index) else {
            return;
        };
        match report {
            Report::Ready { connection, token } => {
                side.connections.insert(connection, token);
                self.manager.ready(token, connection);
            }
            // A software queue pair or window is nothing but a value: letting go of it destroys it.
            Report::Refused { qp: _, token } => {
                self.manager.no_room(token);
            }
            Report::Gone {
                connection,
                qp: _,
                token,
                why,
            } => {
                side.connections.remove(&connection);
                side.notice(Notice::Gone { connection });
                let ends = self.manager.nodes_of(token);
                let unasked = self.manager.gone(token);
                if let Some((node, peer)) = ends {
                    self.log.push(format!(
                        "{node}: the connection with {peer} has ended: {why}"
                    ));
                    if unasked && !self.closing && self.lost.is_none() {
                        self.lost = Some(NodeError::Lost {
                            node,
                            peer,
                            why: why.to_string(),
                        });
                    }
                }
            }
            Report::Broken { window: _, of } => {
                // Its key may be alive: it is not used again, and another takes its place (R7).
                side.rebuilt = side.rebuilt.saturating_add(1);
                side.order(Order::Window {
                    window: Window::new(PROTECTION_DOMAIN),
                    of,
                });
            }
            Report::Piece(piece) => side.maps.piece(piece),
            Report::Map { of, base } => {
                let order = side.maps.map(of, base);
                side.order(order);
            }
            Report::Unmap { window } => side.maps.unmap(window),
            Report::Flush => {
                let order = side.maps.flush();
                side.order(order);
            }
            Report::Retired { window: _ } => {}
            Report::Stopped(leftovers) => side.stopped = Some(leftovers),
        }
    }

    fn carry_out(&mut self, effect: Effect) {
        match effect {
            Effect::Adopt {
                node,
                id,
                number,
                peer,
                peer_number,
                terms,
                accepted,
            } => {
                let sizes = self.plan.shape.sizes();
                let mut qp = QueuePair::new(
                    number,
                    port(node, peer),
                    peer_number,
                    sizes.send_wr,
                    sizes.recv_wr,
                );
                qp.pd = PROTECTION_DOMAIN;
                if let Some(side) = self.sides.get_mut(node) {
                    side.order(Order::Adopt {
                        qp,
                        terms,
                        accepted,
                        token: id,
                    });
                }
            }
            Effect::Establish {
                node,
                connection,
                terms,
                dialed,
            } => {
                if let Some(side) = self.sides.get_mut(node) {
                    side.order(Order::Establish { connection, terms });
                    side.notice(Notice::Connected {
                        connection,
                        terms,
                        dialed,
                    });
                }
            }
            Effect::Close { node, connection } => {
                if let Some(side) = self.sides.get_mut(node) {
                    side.order(Order::Close { connection });
                }
            }
        }
    }

    /// Ends all connections and all nodes, joins the threads, and tells what was left.
    ///
    /// # Errors
    /// A device or a thread that failed. What does not end within `timeout` is told in the result instead.
    pub fn stop(mut self, timeout: Duration) -> Result<Finished<A>, NodeError> {
        self.closing = true;
        let give_up = Instant::now() + timeout;
        for side in &mut self.sides {
            side.keys_alive = side.counters.keys_alive.get();
        }
        for id in self.manager.alive() {
            self.manager.close(id);
        }
        self.until(give_up, |control| control.manager.alive().is_empty());
        for side in &mut self.sides {
            side.order(Order::Stop);
        }
        self.until(give_up, |control| {
            control.sides.iter().all(|side| side.stopped.is_some())
        });
        let mut nodes: Vec<FinishedNode<A>> = self
            .sides
            .iter()
            .map(|side| FinishedNode {
                nid: side.nid,
                leftovers: side.stopped,
                device: None,
                keys_alive: side.keys_alive,
                windows_rebuilt: side.rebuilt,
                counters: side.counters,
                application: None,
            })
            .collect();
        let mut threads = Vec::new();
        for (core, ended) in self.join() {
            let ended = ended.ok_or(NodeError::Died { core })?;
            if let Some((node, fault)) = ended.fault {
                return Err(NodeError::Fault { node, fault });
            }
            threads.push(FinishedThread {
                core: ended.core,
                allocations: ended.allocations,
                switches: ended.switches,
            });
            for (index, gauges, application) in ended.nodes {
                if let Some(node) = nodes.get_mut(index) {
                    node.device = gauges;
                    node.application = application;
                }
            }
        }
        let capture = self.end_capture().transpose()?;
        Ok(Finished {
            nodes,
            threads,
            capture,
        })
    }

    fn until(&mut self, give_up: Instant, done: impl Fn(&Self) -> bool) {
        loop {
            self.serve();
            if done(self) || Instant::now() >= give_up || self.flags.has_failed() {
                return;
            }
            std::thread::sleep(SHORT);
        }
    }

    /// Ends the capture, once nothing is sent any more.
    fn end_capture(&mut self) -> Option<Result<Summary, NodeError>> {
        self.capture
            .take()
            .map(|capture| capture.end().map_err(NodeError::Capture))
    }

    fn join(&mut self) -> Vec<(usize, Option<Ended<A>>)> {
        self.flags.quit();
        self.threads
            .drain(..)
            .map(|(core, thread)| (core, thread.join().ok().flatten()))
            .collect()
    }

    /// Which thread ended by itself, and why.
    fn post_mortem(&mut self) -> NodeError {
        let mut died = 0;
        for (core, ended) in self.join() {
            match ended {
                Some(Ended {
                    fault: Some((node, fault)),
                    ..
                }) => return NodeError::Fault { node, fault },
                Some(_) => {}
                None => died = core,
            }
        }
        NodeError::Died { core: died }
    }
}

impl<A: Application> Drop for Control<A> {
    /// Ends the threads, whatever state they are in.
    fn drop(&mut self) {
        self.join();
        // What is there is there; who stops properly is told of an error.
        let _ = self.end_capture();
    }
}

/// Begins a capture of all nodes.
fn capture(
    path: &Path,
    clock: Clock,
    config: &Config,
) -> Result<(Option<Capture>, Vec<Recorder<'static, Ticker>>), NodeError> {
    let names: Vec<Nid> = config.nodes.iter().map(|node| node.nid).collect();
    let ports = (0..names.len())
        .map(|node| (0..names.len()).filter(|other| *other != node).collect())
        .collect();
    let (capture, recorders) =
        Capture::begin(path, clock, &names, ports).map_err(NodeError::Capture)?;
    Ok((Some(capture), recorders))
}

impl Side {
    fn order(&mut self, order: Order<Device>) {
        self.backlog.push_back(order);
        self.flush();
    }

    fn flush(&mut self) {
        while let Some(order) = self.backlog.pop_front() {
            if let Err(order) = self.orders.push(order) {
                self.backlog.push_front(order);
                return;
            }
        }
    }

    fn notice(&mut self, notice: Notice) {
        // The ring holds several for each connection, and an application takes all at every step.
        if let Some(notices) = &mut self.notices {
            let _ = notices.push(notice);
        }
    }
}

/// A control thread's nap while it waits for a core.
const SHORT: Duration = Duration::from_micros(500);
/// How long nodes may take to get their memory.
const START: Duration = Duration::from_secs(600);
