//! The nodes of a file on the software device: all in this process.

use core::time::Duration;
use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Instant;

use o2poll_config::{Config, Idle, Machine};
use o2poll_dataplane::endpoint::Event;
use o2poll_dataplane::peer::Local;
use o2poll_dataplane::poller::{Order, Report, Shape};
use o2poll_dataplane::pool::Handle;
use o2poll_dataplane::wire::Nid;
use o2poll_hal::clock::{self, Clock};
use o2poll_soft::{Faults, QueuePair, Recorder, Window};

use crate::NodeError;
use crate::application::{Application, Nobody};
use crate::capture::{Capture, Summary, Ticker};
use crate::engine::{Effect, Ending, Engine, Fabric, Id, Outcome, SHORT};
use crate::fabric::{self, Dial, Manager, NoRoom, Seat, port, wires};
use crate::finished::Finished;
use crate::maps::Maps;
use crate::measure::CoreCounters;
use crate::node::{Device, Link, Node, PROTECTION_DOMAIN, SoftBackend};
use crate::plan::{Plan, cores_of};
use crate::start::{self, Nodes, Start};

/// The nodes of one file, running.
pub struct Control<A: Application>(pub(crate) Engine<A, SoftFabric>);

/// How nodes are started.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Registered memory for the owner of a node that has no application, in bytes, less than 4 GiB.
    pub memory: usize,
    /// Write what the nodes send each other to this file, as RoCEv2 frames.
    pub pcap: Option<PathBuf>,
    /// What goes wrong on the devices of these nodes, on each core of them.
    pub faults: Vec<(Nid, Faults)>,
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
    /// and the counters of all cores of all nodes. A node without an application is handed out by [`node`](Self::node).
    /// Returns when all are polling.
    ///
    /// # Errors
    /// What could not be had. Nothing runs then.
    pub fn start(
        config: &Config,
        machine: &Machine<'_>,
        options: &Options,
        mut applications: impl FnMut(usize, &Clock, &[CoreCounters]) -> Result<Option<A>, NodeError>,
    ) -> Result<Self, NodeError> {
        let plan = Plan::new(config, machine)?;
        let clock = Clock::start();
        let counters = start::counters(config);
        let (capture, recorders) = match &options.pcap {
            Some(path) => capture(path, clock, config)?,
            None => (None, Vec::new()),
        };
        let mut recorders = recorders.into_iter();
        let devices = config.nodes.iter().map(cores_of).sum();
        let mut ports = wires(devices).into_iter();
        let stamp = clock::stamp();
        let mut nodes = Nodes::new(config);
        let mut locals = Vec::new();
        for (index, node) in config.nodes.iter().enumerate() {
            let application = applications(index, &clock, &counters)?;
            let ranges = match &application {
                Some(application) => application.memory(),
                None if options.memory == 0 => Vec::new(),
                None => vec![options.memory],
            };
            let needs = plan.of(node, &ranges)?;
            // Every life of every node has another stamp, even of two that start in one microsecond.
            let stamp = stamp.wrapping_add(u64::try_from(index).unwrap_or(0));
            let local = Local {
                nid: node.nid,
                stamp,
                queue_depth: needs.shape.queue_depth,
                max_frags: config.tunables.max_frags,
                high_water: config.tunables.peer_credits_hiw.into(),
                require_privileged_port: false,
                extensions: plan.extensions(node),
                ready: true,
            };
            locals.push((local, cores_of(node)));
            let faults = options.faults.iter().find(|(nid, _)| *nid == node.nid);
            let backend = |_| SoftBackend {
                profile: plan.profile,
                ports: ports.next().unwrap_or_default(),
                recorder: recorders.next(),
                faults: faults.map(|(_, faults)| *faults),
                taken: Vec::new(),
            };
            nodes.add(Start {
                index,
                stamp,
                counters: counters
                    .get(index)
                    .copied()
                    .ok_or(NodeError::NoNode(node.nid))?,
                application,
                ranges,
                needs,
                backends: (0..cores_of(node)).map(backend).collect(),
            })?;
        }
        let mut manager = Manager::new(locals);
        if let Some(capture) = &capture {
            manager.tell(capture.notes());
        }
        let fabric = SoftFabric {
            manager,
            shape: plan.shape,
            capture,
            maps: HashMap::new(),
        };
        let notes = plan.notes.clone();
        let engine = nodes.start(plan, clock, fabric, notes)?;
        // Memory, devices and threads are there: nothing can be in the way of a run any more.
        if let Some(capture) = &engine.fabric.capture {
            let path = capture.path();
            capture.go().map_err(|error| unwritten(path, error))?;
        }
        Ok(Self(engine))
    }

    /// What was asked for and not had: sentences with a remedy.
    #[must_use]
    pub fn notes(&self) -> &[String] {
        self.0.notes()
    }

    /// Which core polls for which node, as a sentence.
    #[must_use]
    pub fn placement(&self) -> &str {
        self.0.placement()
    }

    /// What a polling thread does when there is nothing to do.
    #[must_use]
    pub const fn idle(&self) -> Idle {
        self.0.idle()
    }

    /// The clock of all nodes.
    #[must_use]
    pub const fn clock(&self) -> Clock {
        self.0.clock()
    }

    /// Whether transfers may wait for mappings that [`turn`](Self::turn) makes: then it is called often.
    #[must_use]
    pub const fn maps(&self) -> bool {
        self.0.maps()
    }

    /// Lines about connections since the last call.
    pub fn log(&mut self) -> Vec<String> {
        self.0.log()
    }

    /// What a node's cores have counted.
    #[must_use]
    pub fn counters(&self, nid: Nid) -> Option<CoreCounters> {
        self.0.counters(nid)
    }

    /// A node that has no application, as its owner uses it.
    pub fn node(&mut self, nid: Nid) -> Option<&mut Node> {
        self.0.node(nid)
    }

    /// Takes such a node out, to be used on another thread.
    pub fn take_node(&mut self, nid: Nid) -> Option<Node> {
        self.0.take_node(nid)
    }

    /// Connects two nodes, and waits until the first may submit. A connection that is lost is not made again:
    /// [`turn`](Self::turn) tells of it.
    ///
    /// # Errors
    /// Why not.
    pub fn connect(&mut self, from: Nid, to: Nid, timeout: Duration) -> Result<Link, NodeError> {
        self.known(from, to)?;
        self.0.connect(from, to, timeout)
    }

    /// Makes `count` connections of one node to another, and waits for all of them. From then on each that is lost is made
    /// again, as the file's `reconnects` says; [`turn`](Self::turn) tells when one is given up. The node's application
    /// hears of all that in [`Notice`](crate::Notice)s.
    ///
    /// # Errors
    /// Why not.
    pub fn keep(
        &mut self,
        from: Nid,
        to: Nid,
        count: u8,
        timeout: Duration,
    ) -> Result<(), NodeError> {
        self.known(from, to)?;
        self.0.keep(from, to, count, timeout)
    }

    /// Ends a connection, and waits until it is gone on this side.
    ///
    /// # Errors
    /// When there is no such node, when the connection does not end in time, and whatever [`turn`](Self::turn) tells
    /// meanwhile.
    pub fn disconnect(&mut self, of: Nid, link: Link, timeout: Duration) -> Result<(), NodeError> {
        self.0.disconnect(of, link, timeout)
    }

    /// Ends all connections of a node with another, whoever has made them; how many. Those that are
    /// [kept](Self::keep) come back.
    ///
    /// # Errors
    /// When there is no such node.
    pub fn hang_up(&mut self, node: Nid, peer: Nid) -> Result<usize, NodeError> {
        self.0.hang_up(node, peer)
    }

    /// Waits for the next event of a node that has no application, and serves the control side meanwhile.
    ///
    /// # Errors
    /// When none comes in time, or something broke.
    pub fn wait(&mut self, nid: Nid, timeout: Duration) -> Result<Event<'static>, NodeError> {
        let give_up = Instant::now() + timeout;
        loop {
            self.0.turn(Duration::ZERO)?;
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
        self.0.finish();
    }

    /// Does what there is to do: reports, the connection manager, windows to rebuild, connections to make again. Never
    /// waits.
    ///
    /// # Errors
    /// A device or a thread that failed, or a connection that ended unasked and is not made again.
    pub fn turn(&mut self) -> Result<(), NodeError> {
        self.0.turn(Duration::ZERO)
    }

    /// Ends all connections and all nodes, joins the threads, and tells what was left.
    ///
    /// # Errors
    /// A device or a thread that failed. What does not end within `timeout` is told in the result instead.
    pub fn stop(mut self, timeout: Duration) -> Result<Finished<A>, NodeError> {
        self.0.stop(timeout)
    }

    fn known(&self, from: Nid, to: Nid) -> Result<(), NodeError> {
        let manager = &self.0.fabric.manager;
        manager.node_of(to).ok_or(NodeError::NoNode(to))?;
        if from == to {
            let why = String::from("a node does not connect to itself");
            return Err(NodeError::Dial { from, to, why });
        }
        Ok(())
    }
}

/// Software devices, their wires, and the connection manager of the process.
pub(crate) struct SoftFabric {
    manager: Manager,
    shape: Shape,
    capture: Option<Capture>,
    /// Of each core.
    maps: HashMap<(usize, usize), Maps>,
}

impl Fabric for SoftFabric {
    type Backend = SoftBackend;

    fn wait(&mut self, patience: Duration) {
        if !patience.is_zero() {
            std::thread::sleep(patience);
        }
    }

    fn run(&mut self, now: Instant) -> Result<Vec<Effect<Device>>, NodeError> {
        let effects = self.manager.run(now);
        Ok(effects
            .into_iter()
            .map(|effect| self.told(effect))
            .collect())
    }

    fn log(&mut self) -> Vec<String> {
        self.manager.log()
    }

    fn dial(&mut self, node: usize, peer: Nid) -> usize {
        // Whom nobody knows is no node's place, and refuses.
        let peer = self.manager.node_of(peer).unwrap_or(usize::MAX);
        self.manager.dial(node, peer)
    }

    fn outcome(&self, _: usize, dial: usize) -> Outcome {
        Outcome::of(self.manager.outcome(dial).map(Dial::link))
    }

    fn forget(&mut self, _: usize, dial: usize) {
        self.manager.forget(dial);
    }

    fn ready(&mut self, _: usize, id: Id, connection: Handle) {
        self.manager.ready(id, connection);
    }

    // A software queue pair or window is nothing but a value: letting go of it destroys it.
    fn no_room(&mut self, _: usize, id: Id, _: QueuePair, by_device: bool) {
        let why = if by_device {
            NoRoom::Depth
        } else {
            NoRoom::Full
        };
        self.manager.no_room(id, why);
    }

    fn gone(&mut self, _: usize, id: Id, _: QueuePair) -> Ending {
        self.manager.gone(id)
    }

    fn close(&mut self, _: usize, id: Id) {
        self.manager.close(id);
    }

    fn alive(&self, node: usize) -> Vec<Id> {
        self.manager.alive(node)
    }

    fn peer(&self, _: usize, id: Id) -> Option<Nid> {
        self.manager.nodes_of(id).map(|(_, peer)| peer)
    }

    fn window(&mut self, _: usize, _: usize) -> Result<Window, NodeError> {
        Ok(Window::new(PROTECTION_DOMAIN))
    }

    fn mapping(
        &mut self,
        node: usize,
        core: usize,
        report: Report<Device>,
    ) -> Option<Order<Device>> {
        let maps = self.maps.entry((node, core)).or_default();
        match report {
            Report::Piece(piece) => maps.piece(piece),
            Report::Map { of, base } => return Some(maps.map(of, base)),
            Report::Unmap { window } => maps.unmap(window),
            Report::Flush => return Some(maps.flush()),
            _ => {}
        }
        None
    }

    fn end(&mut self) -> Result<Option<Summary>, NodeError> {
        let Some(capture) = self.capture.take() else {
            return Ok(None);
        };
        let path = capture.path().to_owned();
        let summary = capture.end().map_err(|error| unwritten(&path, error))?;
        Ok(Some(summary))
    }
}

impl SoftFabric {
    fn told(&self, effect: fabric::Effect) -> Effect<Device> {
        match effect {
            fabric::Effect::Adopt {
                at,
                id,
                number,
                peer,
                peer_number,
                terms,
                accepted,
            } => {
                // As deep as was agreed: what else the device has is for other peers.
                let shape = Shape {
                    queue_depth: terms.queue_depth,
                    ..self.shape
                };
                let sizes = shape.sizes();
                let wire = port(self.manager.device(at), self.manager.device(peer));
                let mut qp =
                    QueuePair::new(number, wire, peer_number, sizes.send_wr, sizes.recv_wr);
                qp.pd = PROTECTION_DOMAIN;
                Effect::Adopt {
                    node: at.node,
                    core: at.core,
                    id,
                    qp,
                    terms,
                    accepted,
                }
            }
            fabric::Effect::Establish {
                at: Seat { node, core },
                connection,
                terms,
                dialed,
            } => Effect::Establish {
                node,
                core,
                connection,
                terms,
                dialed,
            },
            fabric::Effect::Close {
                at: Seat { node, core },
                connection,
            } => Effect::Close {
                node,
                core,
                connection,
            },
        }
    }
}

/// Begins a capture of all nodes: of each core's device.
fn capture(
    path: &Path,
    clock: Clock,
    config: &Config,
) -> Result<(Option<Capture>, Vec<Recorder<'static, Ticker>>), NodeError> {
    let nodes = config.nodes.iter();
    let names: Vec<Nid> = nodes
        .flat_map(|node| core::iter::repeat_n(node.nid, cores_of(node)))
        .collect();
    let ports = (0..names.len())
        .map(|device| (0..names.len()).filter(|other| *other != device).collect())
        .collect();
    let (capture, recorders) =
        Capture::begin(path, clock, &names, ports).map_err(|error| unwritten(path, error))?;
    Ok((Some(capture), recorders))
}

fn unwritten(path: &Path, source: io::Error) -> NodeError {
    NodeError::Capture {
        path: path.to_owned(),
        source,
    }
}
