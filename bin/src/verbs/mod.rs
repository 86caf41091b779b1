//! Nodes on an RDMA device: their control side, and how their memory is registered.
//!
//! Where the software device joins the nodes of one process, these may be anywhere: a process runs some nodes of a file,
//! and the others run in other processes or on other machines with the same file.

mod backend;
mod client;
mod fabric;
mod run;

pub use crate::target::Target;
pub use client::{CHUNK, Client};
pub use run::run;

use core::time::Duration;
use std::sync::Arc;

use o2poll_config::{Config, Exposure, Idle, Machine};
use o2poll_dataplane::peer::Local;
use o2poll_dataplane::poller::Sizes;
use o2poll_dataplane::wire::Nid;
use o2poll_hal::clock::{self, Clock};
use o2poll_hal::verbs::cm::{Manager, SERVICE, Settings};
use o2poll_hal::verbs::{
    CompletionQueue, Device, Domain, Findings, Limits, QueuePair, Quirks, Shape as PairShape, probe,
};
use o2poll_soft::Profile;

use crate::NodeError;
use crate::application::Application;
use crate::engine::Engine;
use crate::finished::Finished;
use crate::measure::CoreCounters;
use crate::node::{Link, Node};
use crate::plan::{Plan, connections, cores_of};
use crate::start::{self, Nodes, Start};
use backend::VerbsBackend;
use fabric::{Side, VerbsFabric};

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
pub struct Control<A: Application>(pub(crate) Engine<A, VerbsFabric>);

impl<A: Application> Control<A> {
    /// Starts nodes of a file; as the software device's control side does.
    ///
    /// # Errors
    /// What could not be had. Nothing runs then.
    pub fn start(
        config: &Config,
        machine: &Machine<'_>,
        options: &Options,
        mut applications: impl FnMut(usize, &Clock, &[CoreCounters]) -> Result<Option<A>, NodeError>,
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
        let mut plan = Plan::on(config, machine, profile, windows, connections(config))?;
        // Not all of a node's work needs such transfers.
        plan.notes.extend(plan.short_keys.take());
        plan.try_out(|sizes| grants(&device, sizes, profile.capabilities.max_sge));
        let mut notes = findings.notes.clone();
        notes.extend(plan.notes.iter().cloned());
        let clock = Clock::start();
        let counters = start::counters(config);
        let stamp = clock::stamp();
        let mut nodes = Nodes::new(config);
        let mut sides = Vec::new();
        for (index, node) in config.nodes.iter().enumerate() {
            if !options.here.is_empty() && !options.here.contains(&node.nid) {
                continue;
            }
            let application = applications(index, &clock, &counters)?;
            let ranges = match &application {
                Some(application) => application.memory(),
                None if options.memory == 0 => Vec::new(),
                None => vec![options.memory],
            };
            let needs = plan.of(node, &ranges)?;
            let stamp = stamp.wrapping_add(u64::try_from(index).unwrap_or(0));
            let max_sge = profile.capabilities.max_sge;
            let domain = Domain::new(&device).map_err(rdma)?;
            // A thread domain for each core. The completion queue has a lock: control resets and destroys queue pairs, and
            // cleans it of theirs, while the core polls.
            let mut cores = Vec::new();
            for core in 0..cores_of(node) {
                let domain = match core {
                    0 => domain.clone(),
                    _ => domain.for_another_thread(),
                };
                notes.extend(domain.note().filter(|note| !notes.contains(note)));
                let cq = CompletionQueue::new(&device, needs.sizes.cqe, false).map_err(rdma)?;
                cores.push((domain, cq));
            }
            let settings = Settings {
                local: Local {
                    nid: node.nid,
                    stamp,
                    queue_depth: needs.shape.queue_depth,
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
                core: needs.shape,
                connections: needs.shape.connections,
                patience: patience(config),
                timeout: config.tunables.timeout,
            };
            let mut manager = Manager::new(&device, cores.clone(), settings).map_err(rdma)?;
            if options.listen {
                manager.listen().map_err(rdma)?;
            }
            let narrow = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
            let exposed = match config.memory.exposure {
                Exposure::Arena => {
                    let pieces = node.exports.iter().map(|export| export.pieces().count());
                    pieces.sum::<usize>() + ranges.len() + 1
                }
                Exposure::None => 0,
            };
            let backends = cores.into_iter().map(|(domain, cq)| VerbsBackend {
                device: device.clone(),
                domain,
                cq,
                findings: Arc::clone(&findings),
                limits: Limits {
                    queue_pairs: narrow(needs.sizes.connections),
                    send_wr: needs.sizes.send_wr,
                    recv_wr: needs.sizes.recv_wr,
                    max_sge,
                    windows: narrow(needs.sizes.regions),
                    // Its own arena, the first core's, one for each exported file, and what peers are told a key of.
                    memories: narrow(2 + node.exports.len() + exposed),
                },
                arenas: Vec::new(),
            });
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
                backends: backends.collect(),
            })?;
            sides.push(Side { manager, domain });
        }
        let fabric = VerbsFabric::new(device, sides);
        Ok(Self(nodes.start(plan, clock, fabric, notes)?))
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

    /// Lines about connections since the last call.
    pub fn log(&mut self) -> Vec<String> {
        self.0.log()
    }

    /// A node that has no application, as its owner uses it.
    pub fn node(&mut self, nid: Nid) -> Option<&mut Node> {
        self.0.node(nid)
    }

    /// Connects a node of this process to any other, and waits until it may submit. A connection that is lost is not
    /// made again: [`turn`](Self::turn) tells of it.
    ///
    /// # Errors
    /// Why not.
    pub fn connect(&mut self, from: Nid, to: Nid, timeout: Duration) -> Result<Link, NodeError> {
        self.0.connect(from, to, timeout)
    }

    /// Makes `count` connections of a node of this process to any other, waits for all of them, and from then on makes
    /// each again that is lost, as the file's `reconnects` says.
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
        self.0.keep(from, to, count, timeout)
    }

    /// Ends a connection, and waits until it is gone on this side.
    ///
    /// # Errors
    /// When `of` is not here, when the connection does not end in time, and whatever [`turn`](Self::turn) tells meanwhile.
    pub fn disconnect(&mut self, of: Nid, link: Link, timeout: Duration) -> Result<(), NodeError> {
        self.0.disconnect(of, link, timeout)
    }

    /// Tells every application to come to an end.
    pub fn finish(&mut self) {
        self.0.finish();
    }

    /// Sleeps until something has happened, at most so long, and does what there is to do. What cores report makes no
    /// descriptor readable, so the sleep is to be short while they are waited for.
    ///
    /// # Errors
    /// A device or a thread that failed, a connection that ended unasked and is not made again, or, once, a device that is
    /// being removed: then its connections end, and [`stop`](Self::stop) lets go of it.
    pub fn turn(&mut self, patience: Duration) -> Result<(), NodeError> {
        self.0.turn(patience)
    }

    /// Ends all connections and all nodes, joins the threads, and tells what was left.
    ///
    /// # Errors
    /// A device or a thread that failed. What does not end within `timeout` is told in the result instead.
    pub fn stop(mut self, timeout: Duration) -> Result<Finished<A>, NodeError> {
        self.0.stop(timeout)
    }
}

/// What the plan has to know of a device, and how many windows it has. The plan speaks of profiles of the software
/// device; of this one it looks at the capabilities.
fn profile(device: &Device, findings: &Findings) -> (Profile, u32) {
    let mut capabilities = device.capabilities(findings);
    capabilities.max_sge = capabilities.max_sge.min(MOST_SGE);
    // On rxe a peer's SEND_WITH_INV of a dead key crashes the kernel: nobody is invited to send one.
    capabilities.remote_invalidate &= !device.quirks().contains(Quirks::RXE);
    if !findings.windows {
        capabilities.max_windows = 0;
    }
    let windows = capabilities.max_windows;
    let profile = Profile {
        capabilities,
        ..Profile::frwr()
    };
    (profile, windows)
}

/// Whether the device makes a queue pair of this size. What is wrong besides is told when the nodes' own are made.
fn grants(device: &Device, sizes: &Sizes, max_sge: u32) -> bool {
    let shape = PairShape {
        send_depth: sizes.send_wr,
        recv_depth: sizes.recv_wr,
        max_sge,
        inline: 0,
    };
    let made = Domain::new(device).and_then(|domain| {
        let cq = CompletionQueue::new(device, sizes.send_wr.saturating_add(sizes.recv_wr), false)?;
        QueuePair::for_trial(&domain, &cq, shape)
    });
    made.is_ok()
}

/// For an attempt to connect. A kernel's connection manager sends a REQ or REP that was lost again after some six seconds: an
/// attempt that ends before gains nothing by it.
pub(crate) fn patience(config: &Config) -> Duration {
    config.tunables.timeout.max(PATIENCE)
}

fn rdma(error: impl core::fmt::Display) -> NodeError {
    NodeError::Rdma(error.to_string())
}

/// Three REQs.
const PATIENCE: Duration = Duration::from_secs(20);
/// Pieces of one work request: more cost room in every queue.
const MOST_SGE: u32 = 8;
