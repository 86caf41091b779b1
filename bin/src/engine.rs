//! The control side of nodes, whatever joins them: it gives orders, hears reports, makes connections again that are
//! lost, rebuilds windows, and stops everything.
//!
//! It has no thread of its own. Whoever owns it calls [`turn`](Engine::turn) now and then, from a thread that sleeps in
//! between: polling threads have the cores. What differs from one kind of device to the other is behind [`Fabric`].

use core::time::Duration;
use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use o2poll_config::Idle;
use o2poll_dataplane::nic::Nic;
use o2poll_dataplane::peer::Terms;
use o2poll_dataplane::poller::{Leftovers, Order, Reason, Report};
use o2poll_dataplane::pool::Handle;
use o2poll_dataplane::ring::{Consumer, Producer};
use o2poll_dataplane::wire::Nid;
use o2poll_hal::clock::Clock;

use crate::NodeError;
use crate::application::{Application, Notice};
use crate::capture::Summary;
use crate::finished::{Finished, FinishedCore, FinishedNode, FinishedThread};
use crate::keeper::{Keeper, Look, Pauses};
use crate::measure::CoreCounters;
use crate::node::{Backend, Link, Node};
use crate::plan::Plan;
use crate::polling::{Ended, Flags};

/// Names one end of a connection, or of an attempt to make one, among those of its node.
pub(crate) type Id = u64;

/// The device values of a fabric.
pub(crate) type NicOf<F> = <<F as Fabric>::Backend as Backend>::Nic;

/// What joins nodes: devices, wires, a connection manager. A node is named by its place among those of the process.
pub(crate) trait Fabric {
    /// What makes a device value.
    type Backend: Backend;

    /// Sleeps until something has happened, at most so long.
    fn wait(&mut self, patience: Duration);

    /// What has happened, and what is to be done about it.
    fn run(&mut self, now: Instant) -> Result<Vec<Effect<NicOf<Self>>>, NodeError>;

    /// Lines for whoever wants to follow.
    fn log(&mut self) -> Vec<String>;

    /// Begins to connect a node to another; the name of the attempt.
    fn dial(&mut self, node: usize, peer: Nid) -> usize;

    /// How an attempt stands.
    fn outcome(&self, node: usize, dial: usize) -> Outcome;

    /// Nobody will ask for this attempt any more: it has failed, or its connection is gone.
    fn forget(&mut self, node: usize, dial: usize);

    /// A core has the queue pair and its receives are posted.
    fn ready(&mut self, node: usize, id: Id, connection: Handle);

    /// A core, or its device, has no room for the queue pair.
    fn no_room(
        &mut self,
        node: usize,
        id: Id,
        qp: <NicOf<Self> as Nic>::QueuePair,
        by_device: bool,
    );

    /// A core has given a queue pair back.
    fn gone(&mut self, node: usize, id: Id, qp: <NicOf<Self> as Nic>::QueuePair) -> Ending;

    /// Ends a connection.
    fn close(&mut self, node: usize, id: Id);

    /// Every end of a node that is not destroyed yet.
    fn alive(&self, node: usize) -> Vec<Id>;

    /// Who is at the other end.
    fn peer(&self, node: usize, id: Id) -> Option<Nid>;

    /// Makes a window for a core.
    fn window(
        &mut self,
        node: usize,
        core: usize,
    ) -> Result<<NicOf<Self> as Nic>::Window, NodeError>;

    /// What a core says of its pool of mappings, and what is to be done about it. Without one, nothing of it comes.
    fn mapping(
        &mut self,
        node: usize,
        core: usize,
        report: Report<NicOf<Self>>,
    ) -> Option<Order<NicOf<Self>>>;

    /// The device that is being taken away: told once.
    fn removed(&mut self) -> Option<String> {
        None
    }

    /// Nothing is sent any more.
    fn end(&mut self) -> Result<Option<Summary>, NodeError>;
}

/// What a core is to be told.
pub(crate) enum Effect<N: Nic> {
    /// Here is a queue pair.
    Adopt {
        node: usize,
        core: usize,
        id: Id,
        qp: N::QueuePair,
        terms: Terms,
        accepted: bool,
    },
    /// Messages may flow.
    Establish {
        node: usize,
        core: usize,
        connection: Handle,
        terms: Terms,
        dialed: bool,
    },
    /// End it.
    Close {
        node: usize,
        core: usize,
        connection: Handle,
    },
}

/// How an attempt to connect stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Trying,
    Up(Link),
    Failed(String),
}

/// The core of a connection, its name there, and its terms.
type Connected<'t> = (usize, Handle, &'t Terms);

impl Outcome {
    /// That of an attempt, as the connection manager has it: the core, its name for the connection, and the terms, once it
    /// is connected.
    pub(crate) fn of<F: ToString>(attempt: Option<Result<Option<Connected<'_>>, F>>) -> Self {
        match attempt {
            Some(Ok(Some((core, connection, terms)))) => Self::Up(Link {
                core,
                connection,
                queue_depth: terms.queue_depth,
            }),
            Some(Ok(None)) => Self::Trying,
            Some(Err(failure)) => Self::Failed(failure.to_string()),
            None => Self::Failed(String::from("no such attempt")),
        }
    }
}

/// Who wanted the end of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// This node, or the peer that had made it.
    Asked,
    /// The core: it has seen an error, and says which.
    Core,
    /// Nobody here.
    Failed(String),
}

/// The control side of the nodes of a process.
pub(crate) struct Engine<A: Application, F: Fabric> {
    pub(crate) plan: Plan,
    pub(crate) idle: Idle,
    pub(crate) clock: Clock,
    pub(crate) flags: Arc<Flags>,
    pub(crate) threads: Vec<(usize, JoinHandle<Option<Ended<A>>>)>,
    pub(crate) sides: Vec<Side<NicOf<F>>>,
    pub(crate) fabric: F,
    /// Node, core and name of each, and what the fabric calls it.
    pub(crate) connections: Vec<((usize, usize, Handle), Id)>,
    /// Attempts of [`connect`](Self::connect) that have made them.
    pub(crate) dials: Vec<((usize, usize, Handle), usize)>,
    pub(crate) keepers: Vec<Keeper>,
    pub(crate) pauses: Pauses,
    pub(crate) notes: Vec<String>,
    pub(crate) log: Vec<String>,
    /// The first thing that went wrong with a connection that nobody makes again.
    pub(crate) lost: Option<NodeError>,
    pub(crate) closing: bool,
}

/// The control side of one node.
pub(crate) struct Side<N: Nic + 'static> {
    pub(crate) nid: Nid,
    /// Its place in the file.
    pub(crate) index: usize,
    pub(crate) cores: Vec<Core<N>>,
    /// To its application; `None` where the node was handed out.
    pub(crate) notices: Option<Producer<'static, Notice>>,
    /// Notices that found the ring full.
    pub(crate) unheard: VecDeque<Notice>,
    pub(crate) counters: CoreCounters,
    /// Handed out, until its owner takes it.
    pub(crate) node: Option<Node>,
    pub(crate) reconnected: u64,
}

/// The control side of one core of a node.
pub(crate) struct Core<N: Nic + 'static> {
    pub(crate) orders: Producer<'static, Order<N>>,
    /// Orders that found the ring full.
    pub(crate) backlog: VecDeque<Order<N>>,
    pub(crate) reports: Consumer<'static, Report<N>>,
    /// Connections that it got so far.
    pub(crate) made: u64,
    pub(crate) rebuilt: u64,
    pub(crate) stopped: Option<Leftovers>,
}

impl<A: Application, F: Fabric> Engine<A, F> {
    pub(crate) fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Whether transfers may wait for mappings that [`turn`](Self::turn) makes: then it is called often.
    pub(crate) const fn maps(&self) -> bool {
        self.plan.shape.mappings != 0
    }

    pub(crate) fn placement(&self) -> &str {
        &self.plan.placement.sentence
    }

    pub(crate) const fn idle(&self) -> Idle {
        self.idle
    }

    pub(crate) const fn clock(&self) -> Clock {
        self.clock
    }

    pub(crate) fn log(&mut self) -> Vec<String> {
        core::mem::take(&mut self.log)
    }

    pub(crate) fn counters(&self, nid: Nid) -> Option<CoreCounters> {
        Some(self.sides.get(self.place(nid).ok()?)?.counters)
    }

    pub(crate) fn node(&mut self, nid: Nid) -> Option<&mut Node> {
        let place = self.place(nid).ok()?;
        self.sides.get_mut(place)?.node.as_mut()
    }

    pub(crate) fn take_node(&mut self, nid: Nid) -> Option<Node> {
        let place = self.place(nid).ok()?;
        self.sides.get_mut(place)?.node.take()
    }

    fn place(&self, nid: Nid) -> Result<usize, NodeError> {
        let found = self.sides.iter().position(|side| side.nid == nid);
        found.ok_or(NodeError::NoNode(nid))
    }

    /// Connects a node of this process to another, and waits until it may submit. If the connection is lost, nobody makes
    /// it again.
    pub(crate) fn connect(
        &mut self,
        from: Nid,
        to: Nid,
        timeout: Duration,
    ) -> Result<Link, NodeError> {
        let place = self.place(from)?;
        let failed = |why: String| NodeError::Dial { from, to, why };
        let dial = self.fabric.dial(place, to);
        let give_up = Instant::now() + timeout;
        loop {
            self.turn(SHORT)?;
            match self.fabric.outcome(place, dial) {
                Outcome::Up(link) => {
                    let here = (place, link.core, link.connection);
                    self.dials.push((here, dial));
                    return Ok(link);
                }
                Outcome::Failed(why) => {
                    self.fabric.forget(place, dial);
                    return Err(failed(why));
                }
                Outcome::Trying if Instant::now() >= give_up => {
                    return Err(failed(format!("no answer within {timeout:?}")));
                }
                Outcome::Trying => {}
            }
        }
    }

    /// Makes `count` connections of a node to another, waits for all of them, and from then on makes each again that
    /// is lost.
    pub(crate) fn keep(
        &mut self,
        from: Nid,
        to: Nid,
        count: u8,
        timeout: Duration,
    ) -> Result<(), NodeError> {
        let place = self.place(from)?;
        let give_up = Instant::now() + timeout;
        for _ in 0..count {
            let dial = self.fabric.dial(place, to);
            self.keepers.push(Keeper::new(place, to, dial));
        }
        loop {
            self.turn(SHORT)?;
            let mut ours = self.keepers.iter().filter(|keeper| keeper.is_of(place, to));
            if ours.all(Keeper::is_up) {
                return Ok(());
            }
            if Instant::now() >= give_up {
                return Err(NodeError::Dial {
                    from,
                    to,
                    why: format!("no answer within {timeout:?}"),
                });
            }
        }
    }

    /// Ends a connection, and waits until it is gone on this side.
    pub(crate) fn disconnect(
        &mut self,
        of: Nid,
        link: Link,
        timeout: Duration,
    ) -> Result<(), NodeError> {
        let place = self.place(of)?;
        let mut connections = self.connections.iter();
        let here = (place, link.core, link.connection);
        let Some((_, id)) = connections.find(|(known, _)| *known == here) else {
            return Ok(());
        };
        self.fabric.close(place, *id);
        let give_up = Instant::now() + timeout;
        while self.connections.iter().any(|(known, _)| *known == here) {
            if Instant::now() >= give_up {
                return Err(NodeError::Late {
                    what: "the end of a connection",
                    after: timeout,
                });
            }
            self.turn(SHORT)?;
        }
        Ok(())
    }

    /// Ends every connection that a node of this process has with another, whoever made it; how many.
    pub(crate) fn hang_up(&mut self, node: Nid, peer: Nid) -> Result<usize, NodeError> {
        let place = self.place(node)?;
        let alive = self.fabric.alive(place).into_iter();
        let with_peer: Vec<Id> = alive
            .filter(|id| self.fabric.peer(place, *id) == Some(peer))
            .collect();
        for id in &with_peer {
            self.fabric.close(place, *id);
        }
        Ok(with_peer.len())
    }

    pub(crate) fn finish(&mut self) {
        for side in &mut self.sides {
            side.notice(Notice::Finish);
        }
    }

    /// Waits until something has happened, at most so long, and does what there is to do: reports, the connection
    /// manager, windows to rebuild, connections to make again. What cores report wakes nobody, so the patience is to be
    /// short while they are waited for.
    pub(crate) fn turn(&mut self, patience: Duration) -> Result<(), NodeError> {
        self.fabric.wait(patience);
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
        for place in 0..self.sides.len() {
            let cores = self.sides.get(place).map_or(0, |side| side.cores.len());
            for core in 0..cores {
                while let Some(report) = self.core(place, core).and_then(|core| core.reports.pop())
                {
                    self.hear(place, core, report)?;
                }
            }
        }
        for effect in self.fabric.run(Instant::now())? {
            self.carry_out(effect);
        }
        if let Some(device) = self.fabric.removed() {
            self.lost = Some(NodeError::Removed { device });
        }
        self.log.extend(self.fabric.log());
        if !self.closing {
            self.look_after(Instant::now());
        }
        for side in &mut self.sides {
            side.flush();
            side.cores.iter_mut().for_each(Core::flush);
        }
        Ok(())
    }

    fn core(&mut self, place: usize, core: usize) -> Option<&mut Core<NicOf<F>>> {
        self.sides.get_mut(place)?.cores.get_mut(core)
    }

    fn hear(
        &mut self,
        place: usize,
        nth: usize,
        report: Report<NicOf<F>>,
    ) -> Result<(), NodeError> {
        match report {
            Report::Ready { connection, token } => {
                if let Some(core) = self.core(place, nth) {
                    core.made = core.made.saturating_add(1);
                }
                self.connections.push(((place, nth, connection), token));
                self.fabric.ready(place, token, connection);
            }
            Report::Refused {
                qp,
                token,
                by_device,
            } => self.fabric.no_room(place, token, qp, by_device),
            Report::Gone {
                connection,
                qp,
                token,
                why,
            } => {
                let peer = self.fabric.peer(place, token).unwrap_or(Nid::ANY);
                let ending = self.fabric.gone(place, token, qp);
                self.ended(place, nth, connection, peer, ending, why);
            }
            Report::Broken { window, of } => {
                // Its key may be alive: it is destroyed, and another takes its place (R7).
                drop(window);
                let window = self.fabric.window(place, nth)?;
                if let Some(core) = self.core(place, nth) {
                    core.rebuilt = core.rebuilt.saturating_add(1);
                    core.order(Order::Window { window, of });
                }
            }
            mapping @ (Report::Piece(_)
            | Report::Map { .. }
            | Report::Unmap { .. }
            | Report::Flush) => {
                if let Some(order) = self.fabric.mapping(place, nth, mapping)
                    && let Some(core) = self.core(place, nth)
                {
                    core.order(order);
                }
            }
            Report::Retired { window } => drop(window),
            Report::Stopped(leftovers) => {
                if let Some(core) = self.core(place, nth) {
                    core.stopped = Some(leftovers);
                }
            }
        }
        Ok(())
    }

    /// A connection has ended: its application is told, and it is made again where this node had made it.
    fn ended(
        &mut self,
        place: usize,
        nth: usize,
        connection: Handle,
        peer: Nid,
        ending: Ending,
        why: Reason,
    ) {
        let Some(side) = self.sides.get_mut(place) else {
            return;
        };
        side.notice(Notice::Gone {
            core: nth,
            connection,
        });
        let node = side.nid;
        let here = (place, nth, connection);
        self.connections.retain(|(known, _)| *known != here);
        if let Some(at) = self.dials.iter().position(|(known, _)| *known == here) {
            let (_, dial) = self.dials.swap_remove(at);
            self.fabric.forget(place, dial);
        }
        let asked = ending == Ending::Asked;
        let why = match ending {
            Ending::Failed(why) => why,
            Ending::Asked | Ending::Core => why.to_string(),
        };
        self.log.push(format!(
            "{node}: the connection with {peer} has ended: {why}"
        ));
        if self.closing {
            return;
        }
        let mut keepers = self.keepers.iter_mut();
        if let Some(keeper) = keepers.find(|keeper| keeper.holds(place, nth, connection)) {
            if let Some(dial) = keeper.lost(Instant::now(), &self.pauses, why) {
                self.fabric.forget(place, dial);
            }
            return;
        }
        // Where connections are made again, whoever was asked waits to be asked again: who asks tells if it gives up.
        let waits = !self.keepers.is_empty();
        if !asked && !waits && self.lost.is_none() {
            self.lost = Some(NodeError::Lost { node, peer, why });
        }
    }

    /// Makes lost connections again.
    fn look_after(&mut self, now: Instant) {
        for keeper in &mut self.keepers {
            let (place, peer) = (keeper.node(), keeper.peer());
            let fabric = &mut self.fabric;
            let look = keeper.look(now, &self.pauses, |dial| fabric.outcome(place, dial));
            let Some(side) = self.sides.get_mut(place) else {
                continue;
            };
            let node = side.nid;
            match look {
                Look::Nothing => {}
                Look::Dial => keeper.dialed(fabric.dial(place, peer)),
                Look::Back => side.reconnected = side.reconnected.saturating_add(1),
                Look::Again { failed, why, pause } => {
                    fabric.forget(place, failed);
                    self.log.push(format!(
                        "{node}: cannot connect to {peer} again: {why}; the next attempt is in {pause:?}"
                    ));
                }
                Look::GivenUp { failed, why, tries } => {
                    if let Some(dial) = failed {
                        fabric.forget(place, dial);
                    }
                    side.notice(Notice::GivenUp { peer });
                    let why = match tries {
                        0 => why,
                        tries => format!("{why}; given up after {tries} attempts to connect again"),
                    };
                    let was_up = keeper.was_up();
                    self.lost.get_or_insert_with(|| {
                        if was_up {
                            NodeError::Lost { node, peer, why }
                        } else {
                            let (from, to) = (node, peer);
                            NodeError::Dial { from, to, why }
                        }
                    });
                }
            }
        }
    }

    fn carry_out(&mut self, effect: Effect<NicOf<F>>) {
        match effect {
            Effect::Adopt {
                node,
                core,
                id: token,
                qp,
                terms,
                accepted,
            } => {
                if let Some(core) = self.core(node, core) {
                    core.order(Order::Adopt {
                        qp,
                        terms,
                        accepted,
                        token,
                    });
                }
            }
            Effect::Establish {
                node,
                core,
                connection,
                terms,
                dialed,
            } => {
                if let Some(core) = self.core(node, core) {
                    core.order(Order::Establish { connection, terms });
                }
                if let Some(side) = self.sides.get_mut(node) {
                    side.notice(Notice::Connected {
                        core,
                        connection,
                        terms,
                        dialed,
                    });
                }
            }
            Effect::Close {
                node,
                core,
                connection,
            } => {
                if let Some(core) = self.core(node, core) {
                    core.order(Order::Close { connection });
                }
            }
        }
    }

    /// Ends all connections and all nodes, joins the threads, and tells what was left.
    pub(crate) fn stop(&mut self, timeout: Duration) -> Result<Finished<A>, NodeError> {
        self.closing = true;
        let give_up = Instant::now() + timeout;
        for place in 0..self.sides.len() {
            for id in self.fabric.alive(place) {
                self.fabric.close(place, id);
            }
        }
        self.until(give_up, |engine| {
            (0..engine.sides.len()).all(|place| engine.fabric.alive(place).is_empty())
        })?;
        for core in self.sides.iter_mut().flat_map(|side| &mut side.cores) {
            core.order(Order::Stop);
        }
        self.until(give_up, |engine| {
            let mut cores = engine.sides.iter().flat_map(|side| &side.cores);
            cores.all(|core| core.stopped.is_some())
        })?;
        let mut nodes: Vec<FinishedNode<A>> = self.sides.iter().map(Side::finished).collect();
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
            for left in ended.left {
                let at = self.sides.iter().position(|side| side.index == left.index);
                let Some(node) = at.and_then(|at| nodes.get_mut(at)) else {
                    continue;
                };
                if let Some(core) = node.cores.get_mut(left.core) {
                    core.device = left.device;
                }
                if let Some(application) = left.application {
                    node.application = Some(application);
                }
            }
        }
        Ok(Finished {
            nodes,
            threads,
            capture: self.fabric.end()?,
        })
    }

    fn until(&mut self, give_up: Instant, done: impl Fn(&Self) -> bool) -> Result<(), NodeError> {
        loop {
            self.serve()?;
            if done(self) || Instant::now() >= give_up || self.flags.has_failed() {
                return Ok(());
            }
            std::thread::sleep(SHORT);
        }
    }

    pub(crate) fn join(&mut self) -> Vec<(usize, Option<Ended<A>>)> {
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

impl<A: Application, F: Fabric> Drop for Engine<A, F> {
    /// Ends the threads, whatever state they are in.
    fn drop(&mut self) {
        self.join();
        // What is there is there; who stops properly is told of an error.
        let _ = self.fabric.end();
    }
}

impl<N: Nic + 'static> Side<N> {
    fn notice(&mut self, notice: Notice) {
        if self.notices.is_some() {
            self.unheard.push_back(notice);
        }
        self.flush();
    }

    /// Tells what was not heard yet. None is lost: an application that misses one would wait for ever.
    fn flush(&mut self) {
        let Some(notices) = &mut self.notices else {
            return;
        };
        while let Some(notice) = self.unheard.pop_front() {
            if let Err(notice) = notices.push(notice) {
                self.unheard.push_front(notice);
                return;
            }
        }
    }

    fn finished<A>(&self) -> FinishedNode<A> {
        let cores = self.cores.iter().zip(self.counters);
        FinishedNode {
            nid: self.nid,
            cores: cores
                .map(|(core, counters)| FinishedCore {
                    leftovers: core.stopped,
                    device: None,
                    keys_alive: counters.keys_alive.get(),
                    windows_rebuilt: core.rebuilt,
                    connections: core.made,
                    counters,
                })
                .collect(),
            reconnected: self.reconnected,
            application: None,
        }
    }
}

impl<N: Nic + 'static> Core<N> {
    pub(crate) fn order(&mut self, order: Order<N>) {
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
}

/// A control thread's nap while it waits for a core.
pub(crate) const SHORT: Duration = Duration::from_micros(500);
