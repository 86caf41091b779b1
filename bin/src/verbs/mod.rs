//! Nodes on an RDMA device: their control side, and how their memory is registered.
//!
//! Where the software device joins the nodes of one process, these may be anywhere: a process runs some nodes of a file,
//! and the others run in other processes or on other machines with the same file.

mod client;
mod run;

pub use client::{CHUNK, Client, Target};
pub use run::run;

use core::time::Duration;
use std::collections::{HashMap, VecDeque};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread::JoinHandle;
use std::time::Instant;

use o2poll_config::{Config, Idle, Machine};
use o2poll_dataplane::counters::Counters;
use o2poll_dataplane::nic::Rights;
use o2poll_dataplane::peer::Local;
use o2poll_dataplane::poller::{Leftovers, Order, Report};
use o2poll_dataplane::pool::Handle;
use o2poll_dataplane::ring::{Consumer, Producer};
use o2poll_dataplane::wire::Nid;
use o2poll_hal::arena::Arena;
use o2poll_hal::clock::{self, Clock};
use o2poll_hal::verbs::cm::{self, Dial, Effect, Ending, Id, Manager, SERVICE, Settings};
use o2poll_hal::verbs::{
    CompletionQueue, Device, Domain, Findings, Limits, Memory, Quirks, Shape as PairShape, Verbs,
    probe,
};
use o2poll_soft::{Gauges, Profile};

use crate::NodeError;
use crate::application::{Application, Notice};
use crate::control::{Finished, FinishedNode, FinishedThread};
use crate::node::{Backend, Blueprint, Link, Node, ring_of};
use crate::plan::{Needs, Plan, connections};
use crate::polling::{self, Ended, Flags};

/// Makes the device value of one node.
pub(crate) struct VerbsBackend {
    device: Device,
    domain: Domain,
    cq: CompletionQueue,
    findings: Arc<Findings>,
    limits: Limits,
    /// Arenas are registered whole, once.
    arenas: Vec<(usize, Memory)>,
}

impl Backend for VerbsBackend {
    type Nic = Verbs;

    fn nic(&mut self, _: Nid, _: &Needs) -> Result<Verbs, NodeError> {
        Verbs::new(&self.device, self.cq.clone(), &self.findings, self.limits).map_err(rdma)
    }

    fn take(
        &mut self,
        nic: &mut Verbs,
        node: Nid,
        arena: &'static Arena,
        (bytes, align): (usize, usize),
        rights: Rights,
    ) -> Result<o2poll_dataplane::memory::Range<'static>, NodeError> {
        let base = arena.base().as_ptr().addr();
        let known = self.arenas.iter().find(|(at, _)| *at == base);
        let lkey = match known {
            Some((_, memory)) => memory.lkey(),
            None => {
                let memory = self.domain.register_arena(arena, rights).map_err(rdma)?;
                let lkey = memory.lkey();
                self.arenas.push((base, memory.clone()));
                nic.add_memory(memory).map_err(|_| NodeError::Device {
                    node,
                    what: "another memory region",
                })?;
                lkey
            }
        };
        arena
            .take(bytes, align, lkey)
            .map_err(|source| NodeError::Take { node, source })
    }

    fn gauges(_: &Verbs) -> Option<Gauges> {
        None
    }
}

/// How nodes are started.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Registered memory for the owner of a node that has no application, in bytes.
    pub memory: usize,
    /// Only these nodes of the file run here; all of them if there is none.
    pub here: Vec<Nid>,
    /// Take connections.
    pub listen: bool,
}

/// The control side of the nodes of a file that run in this process.
pub struct Control<A: Application> {
    plan: Plan,
    idle: Idle,
    clock: Clock,
    flags: Arc<Flags>,
    threads: Vec<(usize, JoinHandle<Option<Ended<A>>>)>,
    sides: Vec<Side>,
    device: Device,
    notes: Vec<String>,
    log: Vec<String>,
    lost: Option<NodeError>,
    /// It was told that the device goes.
    removed: bool,
    closing: bool,
}

/// The control side of one node.
struct Side {
    nid: Nid,
    index: usize,
    manager: Manager,
    domain: Domain,
    orders: Producer<'static, Order<Verbs>>,
    backlog: VecDeque<Order<Verbs>>,
    reports: Consumer<'static, Report<Verbs>>,
    notices: Option<Producer<'static, Notice>>,
    counters: &'static Counters,
    node: Option<Node>,
    connections: HashMap<Handle, Id>,
    rebuilt: u64,
    keys_alive: u64,
    stopped: Option<Leftovers>,
}

impl<A: Application> Control<A> {
    /// Starts nodes of a file; as the software device's control side does.
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
        let o2poll_config::Device::Verbs(name) = &config.device else {
            return Err(NodeError::UnknownDevice);
        };
        for nid in &options.here {
            config.node_of(*nid).ok_or(NodeError::NoNode(*nid))?;
        }
        let device = Device::open(name).map_err(rdma)?;
        let findings = Arc::new(probe(&device, 1).map_err(rdma)?);
        let (profile, windows) = profile(&device, &findings);
        let plan = Plan::on(
            config,
            machine,
            profile,
            windows,
            connections(config.nodes.len()),
        )?;
        let mut notes = findings.notes.clone();
        notes.extend(plan.notes.iter().cloned());
        let clock = Clock::start();
        let counters: Vec<&'static Counters> = config
            .nodes
            .iter()
            .map(|_| &*Box::leak(Box::new(Counters::new())))
            .collect();
        let stamp = clock::stamp();
        let mut sides = Vec::new();
        let mut blueprints = Vec::new();
        for (index, node) in config.nodes.iter().enumerate() {
            if !options.here.is_empty() && !options.here.contains(&node.nid) {
                blueprints.push(None);
                continue;
            }
            let application = applications(index, &clock, &counters)?;
            let ranges = match &application {
                Some(application) => application.memory(),
                None if options.memory == 0 => Vec::new(),
                None => vec![options.memory],
            };
            let needs = plan.of(node, &ranges)?;
            let shape = needs.shape;
            let stamp = stamp.wrapping_add(u64::try_from(index).unwrap_or(0));
            let max_sge = profile.capabilities.max_sge;
            let domain = Domain::new(&device).map_err(rdma)?;
            let cq = CompletionQueue::in_domain(&domain, needs.sizes.cqe, false).map_err(rdma)?;
            let settings = Settings {
                local: Local {
                    nid: node.nid,
                    stamp,
                    queue_depth: shape.queue_depth,
                    max_frags: config.tunables.max_frags,
                    high_water: config.tunables.peer_credits_hiw.into(),
                    require_privileged_port: false,
                    extensions: plan.extensions(node),
                    ready: true,
                },
                service: SERVICE,
                privileged_port: true,
                shape: PairShape {
                    send_depth: needs.sizes.send_wr,
                    recv_depth: needs.sizes.recv_wr,
                    max_sge,
                    inline: 0,
                },
                connections: shape.connections,
                patience: config.tunables.timeout,
            };
            let mut manager = Manager::new(&device, vec![(domain.clone(), cq.clone())], settings)
                .map_err(rdma)?;
            if options.listen {
                manager.listen().map_err(rdma)?;
            }
            let (orders, orders_in) = ring_of(shape.windows + 4 * shape.connections + 16);
            let (reports_out, reports) = ring_of(shape.windows + 4 * shape.connections + 16);
            let (notices, notices_in) = ring_of(4 * shape.connections + 16);
            let counters = counters
                .get(index)
                .copied()
                .ok_or(NodeError::NoNode(node.nid))?;
            let narrow = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
            blueprints.push(Some(Blueprint {
                index,
                node: node.clone(),
                memory: config.memory,
                tunables: config.tunables,
                backend: VerbsBackend {
                    device: device.clone(),
                    domain: domain.clone(),
                    cq,
                    findings: Arc::clone(&findings),
                    limits: Limits {
                        queue_pairs: narrow(needs.sizes.connections),
                        send_wr: needs.sizes.send_wr,
                        recv_wr: needs.sizes.recv_wr,
                        max_sge,
                        windows: narrow(needs.sizes.regions),
                        memories: narrow(1 + node.exports.len()),
                    },
                    arenas: Vec::new(),
                },
                needs,
                stamp,
                orders: orders_in,
                reports: reports_out,
                notices: notices_in,
                counters,
                ranges,
                application: None::<A>,
            }));
            let notices = application.is_some().then_some(notices);
            if let Some(Some(blueprint)) = blueprints.last_mut() {
                blueprint.application = application;
            }
            sides.push(Side {
                nid: node.nid,
                index,
                manager,
                domain,
                orders,
                backlog: VecDeque::new(),
                reports,
                notices,
                counters,
                node: None,
                connections: HashMap::new(),
                rebuilt: 0,
                keys_alive: 0,
                stopped: None,
            });
        }
        let mut control = Self {
            idle: plan.placement.idle(config.tunables.idle),
            notes,
            plan,
            clock,
            flags: Arc::new(Flags::default()),
            threads: Vec::new(),
            sides,
            device,
            log: Vec::new(),
            lost: None,
            removed: false,
            closing: false,
        };
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
        mut blueprints: Vec<Option<Blueprint<A, VerbsBackend>>>,
    ) -> Result<(), NodeError> {
        let (told, built) = channel();
        for thread in &self.plan.placement.threads {
            let nodes: Vec<_> = thread
                .nodes
                .iter()
                .filter_map(|index| blueprints.get_mut(*index).and_then(Option::take))
                .collect();
            if nodes.is_empty() {
                continue;
            }
            let (idle, clock, flags) = (self.idle, self.clock, Arc::clone(&self.flags));
            let thread_of = polling::spawn(thread.core, nodes, idle, clock, flags, told.clone())?;
            self.threads.push((thread.core, thread_of));
        }
        drop(told);
        for _ in 0..self.sides.len() {
            let built = built.recv().map_err(|_| NodeError::Died {
                core: self.threads.first().map_or(0, |(core, _)| *core),
            })??;
            self.notes.extend(built.notes);
            if let Some(side) = self.sides.iter_mut().find(|side| side.index == built.index) {
                side.node = built.node;
            }
        }
        // After the queue pairs that they will be bound to: see the connection manager.
        for side in &mut self.sides {
            for _ in 0..self.plan.shape.windows {
                side.new_window(None)?;
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

    /// Lines about connections since the last call.
    pub fn log(&mut self) -> Vec<String> {
        core::mem::take(&mut self.log)
    }

    /// A node that has no application, as its owner uses it.
    pub fn node(&mut self, nid: Nid) -> Option<&mut Node> {
        let side = self.sides.iter_mut().find(|side| side.nid == nid)?;
        side.node.as_mut()
    }

    /// Begins to connect; the name of the attempt.
    ///
    /// # Errors
    /// When `from` is not here.
    pub fn dial(&mut self, from: Nid, to: Nid) -> Result<usize, NodeError> {
        let side = self.sides.iter_mut().find(|side| side.nid == from);
        Ok(side.ok_or(NodeError::NoNode(from))?.manager.dial(to))
    }

    /// How an attempt stands.
    #[must_use]
    pub fn outcome(&self, from: Nid, dial: usize) -> Option<&Dial> {
        let side = self.sides.iter().find(|side| side.nid == from)?;
        side.manager.outcome(dial)
    }

    /// Connects a node of this process to any other, and waits until it may submit.
    ///
    /// # Errors
    /// Why not.
    pub fn connect(&mut self, from: Nid, to: Nid, timeout: Duration) -> Result<Link, NodeError> {
        let failed = |why: String| NodeError::Dial { from, to, why };
        let dial = self.dial(from, to)?;
        let give_up = Instant::now() + timeout;
        loop {
            self.turn(SHORT)?;
            match self.outcome(from, dial) {
                Some(Dial::Up { connection, terms }) => {
                    return Ok(Link {
                        connection: *connection,
                        queue_depth: terms.queue_depth,
                    });
                }
                Some(Dial::Failed(why)) => return Err(failed(why.to_string())),
                _ if Instant::now() >= give_up => {
                    return Err(failed(format!("no answer within {timeout:?}")));
                }
                _ => {}
            }
        }
    }

    /// Ends a connection, and waits until it is gone on this side.
    ///
    /// # Errors
    /// When `of` is not here, when the connection does not end in time, and whatever [`turn`](Self::turn) tells meanwhile.
    pub fn disconnect(
        &mut self,
        of: Nid,
        connection: Handle,
        timeout: Duration,
    ) -> Result<(), NodeError> {
        let side = self.sides.iter_mut().find(|side| side.nid == of);
        let side = side.ok_or(NodeError::NoNode(of))?;
        let Some(id) = side.connections.get(&connection).copied() else {
            return Ok(());
        };
        let dial = side.manager.dialed(id);
        side.manager.close(id);
        let give_up = Instant::now() + timeout;
        loop {
            self.turn(SHORT)?;
            let side = self.sides.iter_mut().find(|side| side.nid == of);
            let side = side.ok_or(NodeError::NoNode(of))?;
            if side.manager.peer(id).is_none() {
                if let Some(dial) = dial {
                    side.manager.forget(dial);
                }
                return Ok(());
            }
            if Instant::now() >= give_up {
                return Err(NodeError::Late {
                    what: "the end of a connection",
                    after: timeout,
                });
            }
        }
    }

    /// Tells every application to come to an end.
    pub fn finish(&mut self) {
        for side in &mut self.sides {
            side.notice(Notice::Finish);
        }
    }

    /// Sleeps until something has happened, at most so long, and does what there is to do. What cores report makes no
    /// descriptor readable, so the sleep is short while they are waited for.
    ///
    /// # Errors
    /// A device or a thread that failed, a connection that ended unasked, or, once, a device that is being removed: then
    /// its connections end, and [`stop`](Self::stop) lets go of it.
    pub fn turn(&mut self, patience: Duration) -> Result<(), NodeError> {
        let mut descriptors: Vec<BorrowedFd<'_>> = self
            .sides
            .iter()
            .map(|side| side.manager.descriptor())
            .collect();
        descriptors.push(self.device.event_descriptor());
        cm::wait(&descriptors, patience);
        self.serve()?;
        if let Some(error) = self.lost.take() {
            return Err(error);
        }
        if self.flags.has_failed() || self.threads.iter().any(|(_, thread)| thread.is_finished()) {
            return Err(self.post_mortem());
        }
        Ok(())
    }

    fn serve(&mut self) -> Result<(), NodeError> {
        while let Some(event) = self.device.event(Duration::ZERO).map_err(rdma)? {
            self.log.push(format!("{}: {event}", self.device.name()));
            for side in &mut self.sides {
                side.manager.device_event(event);
            }
        }
        for side in &mut self.sides {
            while let Some(report) = side.reports.pop() {
                let lost = side.hear(report, &mut self.log)?;
                if !self.closing && self.lost.is_none() {
                    self.lost = lost;
                }
            }
            for effect in side.manager.run(Instant::now()).map_err(rdma)? {
                side.carry_out(effect);
            }
            self.log.extend(side.manager.log());
            side.flush();
            if side.manager.is_removed() && !self.removed {
                self.removed = true;
                self.lost = Some(NodeError::Removed {
                    device: self.device.name().to_owned(),
                });
            }
        }
        Ok(())
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
            for id in side.manager.alive() {
                side.manager.close(id);
            }
        }
        self.until(give_up, |side| side.manager.alive().is_empty())?;
        for side in &mut self.sides {
            side.order(Order::Stop);
        }
        self.until(give_up, |side| side.stopped.is_some())?;
        let ended = self.join();
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
        for (core, ended) in ended {
            let ended = ended.ok_or(NodeError::Died { core })?;
            if let Some((node, fault)) = ended.fault {
                return Err(NodeError::Fault { node, fault });
            }
            threads.push(FinishedThread {
                core: ended.core,
                allocations: ended.allocations,
                switches: ended.switches,
            });
            for (index, _, application) in ended.nodes {
                let at = self.sides.iter().position(|side| side.index == index);
                if let Some(node) = at.and_then(|at| nodes.get_mut(at)) {
                    node.application = application;
                }
            }
        }
        Ok(Finished {
            nodes,
            threads,
            capture: None,
        })
    }

    fn until(&mut self, give_up: Instant, done: impl Fn(&Side) -> bool) -> Result<(), NodeError> {
        loop {
            self.serve()?;
            if self.sides.iter().all(&done) || Instant::now() >= give_up || self.flags.has_failed()
            {
                return Ok(());
            }
            std::thread::sleep(SHORT);
        }
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
            match ended.map(|ended| ended.fault) {
                Some(Some((node, fault))) => return NodeError::Fault { node, fault },
                Some(None) => {}
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
    }
}

impl Side {
    /// What it means when nobody asked for it.
    fn hear(
        &mut self,
        report: Report<Verbs>,
        log: &mut Vec<String>,
    ) -> Result<Option<NodeError>, NodeError> {
        match report {
            Report::Ready { connection, token } => {
                self.connections.insert(connection, token);
                self.manager.ready(token, connection);
            }
            Report::Refused { qp, token } => self.manager.no_room(token, qp),
            Report::Gone {
                connection,
                qp,
                token,
                why,
            } => {
                self.connections.remove(&connection);
                self.notice(Notice::Gone { connection });
                let peer = self.manager.peer(token).unwrap_or(Nid::ANY);
                let node = self.nid;
                let (lost, why) = match self.manager.gone(token, qp) {
                    Ending::Asked => (false, why.to_string()),
                    Ending::Core => (true, why.to_string()),
                    Ending::Failed(failure) => (true, failure.to_string()),
                };
                log.push(format!(
                    "{node}: the connection with {peer} has ended: {why}"
                ));
                if lost {
                    return Ok(Some(NodeError::Lost { node, peer, why }));
                }
            }
            Report::Broken { window, of } => {
                // Its key may be alive: it is destroyed, and another takes its place (R7).
                drop(window);
                self.rebuilt = self.rebuilt.saturating_add(1);
                self.new_window(of)?;
            }
            // The verbs backend has no mappings, so that no pool is made and nothing of this comes.
            Report::Piece(_) => {}
            Report::Map { of, .. } => self.order(Order::NotMapped { of }),
            Report::Unmap { window } => drop(window),
            Report::Flush => self.order(Order::Unmapped),
            Report::Retired { window } => drop(window),
            Report::Stopped(leftovers) => self.stopped = Some(leftovers),
        }
        Ok(None)
    }

    fn carry_out(&mut self, effect: Effect) {
        match effect {
            Effect::Adopt {
                id,
                qp,
                terms,
                accepted,
                ..
            } => self.order(Order::Adopt {
                qp,
                terms,
                accepted,
                token: id,
            }),
            Effect::Establish {
                connection,
                terms,
                dialed,
                ..
            } => {
                self.order(Order::Establish { connection, terms });
                self.notice(Notice::Connected {
                    connection,
                    terms,
                    dialed,
                });
            }
            Effect::Close { connection, .. } => self.order(Order::Close { connection }),
        }
    }

    fn new_window(&mut self, of: Option<Handle>) -> Result<(), NodeError> {
        let window = self.domain.window().map_err(rdma)?;
        self.order(Order::Window { window, of });
        Ok(())
    }

    fn order(&mut self, order: Order<Verbs>) {
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
        if let Some(notices) = &mut self.notices {
            let _ = notices.push(notice);
        }
    }
}

/// What the plan has to know of a device, and how many windows it has. The plan speaks of profiles of the software
/// device; of this one it looks at the capabilities.
fn profile(device: &Device, findings: &Findings) -> (Profile, u32) {
    let attributes = device.attributes();
    let most = |number: i32| u32::try_from(number).unwrap_or(0);
    let mut profile = Profile::frwr();
    let capabilities = &mut profile.capabilities;
    capabilities.max_send_wr = most(attributes.max_qp_wr);
    capabilities.max_recv_wr = most(attributes.max_qp_wr);
    capabilities.max_cqe = most(attributes.max_cqe);
    capabilities.max_sge = most(attributes.max_sge).min(MOST_SGE);
    // On rxe a peer's SEND_WITH_INV of a dead key crashes the kernel: nobody is invited to send one.
    capabilities.remote_invalidate =
        findings.remote_invalidate && !device.quirks().contains(Quirks::RXE);
    let windows = if findings.windows {
        most(attributes.max_mw)
    } else {
        0
    };
    capabilities.max_windows = windows;
    (profile, windows)
}

fn rdma(error: impl core::fmt::Display) -> NodeError {
    NodeError::Rdma(error.to_string())
}

/// Pieces of one work request: more cost room in every queue.
const MOST_SGE: u32 = 8;
/// Ranges of an arena begin at a page.
/// A control thread's nap while it waits for a core.
const SHORT: Duration = Duration::from_millis(1);
