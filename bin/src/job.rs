//! What a node of the program does: it pings the peers of its jobs, copies a file, runs a workload. A node without
//! jobs only serves.

use core::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::Arc;

use o2poll_config::{self as config, Config};
use o2poll_dataplane::endpoint::{self, Event, MatchBits, Operation, Portal, Request, Submission};
use o2poll_dataplane::memory::{PageList, Range};
use o2poll_dataplane::time::{Instant, Ticks};
use o2poll_dataplane::wire::Nid;
use o2poll_dataplane::wire::ping::{self, PingError, PingInfo};

use crate::NodeError;
use crate::application::{Application, Notice, Turn};
use crate::copy::{Copy, Hash, Part};
use crate::ledger::Ledger;
use crate::links::{Links, Over, Way};
use crate::measure::CoreCounters;
use crate::port::Port;
use crate::workload::Workload;

/// The jobs of one node, one after the other.
#[derive(Debug)]
pub struct Job {
    /// Connections that this node has made.
    links: Links,
    pings: Vec<Ping>,
    ping_memory: Option<&'static mut PageList<'static>>,
    ledger: Ledger,
    /// The copy, and whose file it is.
    pub copy: Option<(Nid, Copy)>,
    /// The workload, and whose region it works on.
    pub workload: Option<(Nid, Workload)>,
    stage: Stage,
    finish: bool,
    progress: Arc<Progress>,
}

/// What came of a ping.
#[derive(Debug)]
pub struct Ping {
    /// Who was asked.
    pub peer: Nid,
    /// What it answered.
    pub outcome: Option<Result<Pong, NoPong>>,
    submitted: Instant,
    over: Over,
}

/// A good answer to a ping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pong {
    /// Bytes of the answer.
    pub bytes: u32,
    /// Interfaces that it names, the loopback aside.
    pub interfaces: usize,
    /// The first one's state.
    pub status: ping::Status,
    /// From submission to event.
    pub latency: Ticks,
}

/// A bad answer to a ping.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoPong {
    /// None came.
    #[error("no answer: {0}")]
    Failed(#[from] endpoint::Error),
    /// It is no ping info.
    #[error("bad answer: {0}")]
    Malformed(#[from] PingError),
    /// It is another node's.
    #[error("the answer is of {0}")]
    OtherNode(Nid),
}

/// What a node is at, for whoever looks from another thread.
#[derive(Debug, Default)]
pub struct Progress {
    stage: AtomicU8,
    done: AtomicU64,
    total: AtomicU64,
    over: AtomicBool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Waiting for the connections.
    Connecting,
    /// The next ping to send, and whether it is out.
    Pinging(usize, bool),
    Copying,
    Working,
    Over,
}

impl Progress {
    /// What it does now, in a word or two.
    #[must_use]
    pub fn stage(&self) -> &'static str {
        // Relaxed, here and below: numbers for people.
        let stage = usize::from(self.stage.load(Ordering::Relaxed));
        STAGES.get(stage).copied().unwrap_or_default()
    }

    /// How much of that is done, and how much there is: bytes of a copy, milliseconds of a workload.
    #[must_use]
    pub fn amount(&self) -> (u64, u64) {
        (
            self.done.load(Ordering::Relaxed),
            self.total.load(Ordering::Relaxed),
        )
    }

    /// Whether nothing is left to do.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    fn tell(&self, stage: usize, done: u64, total: u64) {
        self.stage
            .store(u8::try_from(stage).unwrap_or(0), Ordering::Relaxed);
        self.done.store(done, Ordering::Relaxed);
        self.total.store(total, Ordering::Relaxed);
    }
}

impl Job {
    /// The jobs of a node of a file. `expected` is the SHA-256 of the file that its copy job names; `counters` are
    /// those of every core of each node, in the order of the file.
    ///
    /// # Errors
    /// A job that cannot be done as it is asked for.
    pub fn new(
        config: &Config,
        index: usize,
        expected: Option<Hash>,
        hertz: u64,
        counters: &[CoreCounters],
    ) -> Result<Self, NodeError> {
        let node = config.nodes.get(index);
        let both = |peer: usize| -> Option<[CoreCounters; 2]> {
            Some([*counters.get(index)?, *counters.get(peer)?])
        };
        let copy = node.and_then(|node| node.copy.as_ref()).zip(expected);
        let copy = copy.and_then(|(job, expected)| {
            let (file, into) = (config.export(job.file)?, config.export(job.into)?);
            let copy = Copy::new(job, file, into, expected, both(job.file.node)?);
            Some((job.peer, copy))
        });
        let workload = match node.and_then(|node| node.workload.as_ref()) {
            Some(job) => match (config.export(job.region), both(job.region.node)) {
                (Some(region), Some(counters)) => {
                    Some((job.peer, Workload::new(job, region, hertz, counters)?))
                }
                _ => None,
            },
            None => None,
        };
        let pings = node
            .map(peers)
            .unwrap_or_default()
            .into_iter()
            .map(|peer| Ping {
                peer,
                outcome: None,
                submitted: Instant::default(),
                over: Over::default(),
            });
        let pings: Vec<Ping> = pings.collect();
        let progress = Arc::new(Progress::default());
        // A node without jobs is over from the start.
        progress.over.store(pings.is_empty(), Ordering::Relaxed);
        Ok(Self {
            links: Links::new(
                pings.iter().map(|ping| ping.peer),
                node.map_or(1, |node| node.conns_per_peer),
            ),
            stage: if pings.is_empty() {
                Stage::Over
            } else {
                Stage::Connecting
            },
            ledger: Ledger::new(pings.len()),
            pings,
            ping_memory: None,
            copy,
            workload,
            finish: false,
            progress,
        })
    }

    /// How far it is, for another thread.
    #[must_use]
    pub fn progress(&self) -> Arc<Progress> {
        Arc::clone(&self.progress)
    }

    /// The peers that answered a ping, or did not.
    #[must_use]
    pub fn pings(&self) -> &[Ping] {
        &self.pings
    }

    /// All pings that were sent, one by one.
    #[must_use]
    pub const fn ping_ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// Whether it was told to end before everything was done.
    #[must_use]
    pub const fn was_cut_short(&self) -> bool {
        self.finish
    }

    fn ping(&mut self, port: &mut Port, turn: Turn, at: usize, out: bool) -> u32 {
        if out {
            let Some(event) = port.event() else { return 0 };
            match self.ponged(event, turn, at) {
                Some(true) => self.stage = Stage::Pinging(at + 1, false),
                Some(false) => self.stage = Stage::Pinging(at, false),
                None => {}
            }
            return 1;
        }
        let peer = self
            .pings
            .get(at)
            .filter(|_| !self.finish)
            .map(|ping| ping.peer);
        let Some(peer) = peer else {
            self.stage = if self.copy.is_some() {
                Stage::Copying
            } else {
                Stage::Working
            };
            return 1;
        };
        let over = match self.links.way(peer) {
            Way::Over(over) => over,
            Way::Wait => return 0,
            Way::Never => Over::default(),
        };
        let Some(memory) = self.ping_memory.take() else {
            return 0;
        };
        let token = self.ledger.token(at);
        let request = Request {
            token,
            connection: over.connection,
            portal: Portal(ping::PORTAL),
            match_bits: MatchBits(ping::MATCH_BITS),
            remote_offset: 0,
            memory,
            operation: Operation::Get { optimized: false },
            timeout: None,
        };
        match port.submit_to(over.core, Submission::Transfer(request)) {
            Ok(()) => {
                self.links.begun(over);
                self.ledger.posted(token, false, None);
                if let Some(ping) = self.pings.get_mut(at) {
                    ping.submitted = turn.now;
                    ping.over = over;
                }
                self.stage = Stage::Pinging(at, true);
                1
            }
            Err(submission) => {
                if let Submission::Transfer(request) = submission {
                    self.ping_memory = Some(request.memory);
                }
                0
            }
        }
    }

    /// Takes an answer in; false when the ping is to be sent again, since its connection has failed, and `None` when it is not
    /// the answer.
    fn ponged(&mut self, event: Event<'static>, turn: Turn, at: usize) -> Option<bool> {
        let Event::Done {
            token,
            outcome,
            memory,
        } = event
        else {
            return None;
        };
        let (_, outcome) = self.ledger.ended(token, outcome)?;
        let over = self.pings.get(at).map(|ping| ping.over).unwrap_or_default();
        if self.links.ended(over, outcome) && over != Over::default() {
            self.ping_memory = Some(memory);
            return Some(false);
        }
        if let Some(ping) = self.pings.get_mut(at) {
            let latency = turn.now.since(ping.submitted);
            let bytes = memory.chunks().next().unwrap_or_default();
            ping.outcome = Some(match outcome {
                Ok(length) => judge(ping.peer, bytes, length, latency),
                Err(error) => Err(error.into()),
            });
        }
        self.ping_memory = Some(memory);
        Some(true)
    }

    fn tell(&self, turn: Turn) {
        let copying = |copy: &Copy, stage| {
            self.progress
                .tell(stage, copy.moved, copy.length.saturating_mul(3));
        };
        match (self.stage, &self.copy, &self.workload) {
            (Stage::Connecting | Stage::Pinging(..), _, _) => self.progress.tell(0, 0, 0),
            (Stage::Copying, Some((_, copy)), _) => match copy.part() {
                Part::Get => copying(copy, 1),
                Part::Hash(_) => copying(copy, 2),
                Part::Put | Part::Clear => copying(copy, 3),
                Part::Back | Part::Over => copying(copy, 4),
            },
            (Stage::Working, _, Some((_, workload))) => {
                let (done, total) = workload.clock(turn.now);
                self.progress.tell(5, done, total);
            }
            _ => {}
        }
    }
}

impl Application for Job {
    fn memory(&self) -> Vec<usize> {
        let mut ranges = Vec::new();
        if !self.pings.is_empty() {
            ranges.push(ping::DISCOVERY_SINK as usize);
        }
        if let Some((_, copy)) = &self.copy {
            ranges.extend(copy.memory());
        }
        if let Some((_, workload)) = &self.workload {
            ranges.extend(workload.memory());
        }
        ranges
    }

    fn begin(&mut self, memory: Vec<Range<'static>>) {
        let mut memory = memory.into_iter();
        if !self.pings.is_empty() {
            self.ping_memory = memory.next().and_then(crate::node::page_list);
        }
        if let Some((_, copy)) = &mut self.copy {
            let count = copy.memory().len();
            copy.begin(memory.by_ref().take(count));
        }
        if let Some((_, workload)) = &mut self.workload {
            workload.begin(memory);
        }
    }

    fn notice(&mut self, notice: Notice) {
        match notice {
            Notice::Finish => self.finish = self.stage != Stage::Over,
            Notice::Connected { terms, .. } => {
                if let Some((peer, workload)) = &mut self.workload
                    && *peer == terms.peer
                {
                    workload.met(terms.peer_stamp);
                }
                self.links.notice(notice);
            }
            Notice::Gone { .. } | Notice::GivenUp { .. } => self.links.notice(notice),
        }
    }

    fn step(&mut self, port: &mut Port, turn: Turn) -> u32 {
        let work = match self.stage {
            Stage::Over => 0,
            Stage::Connecting => {
                let all = self.links.are_settled();
                if all || self.finish {
                    self.stage = Stage::Pinging(0, false);
                }
                u32::from(all)
            }
            Stage::Pinging(at, out) => self.ping(port, turn, at, out),
            Stage::Copying => {
                let finish = self.finish;
                match &mut self.copy {
                    Some((_, copy)) if copy.part() != Part::Over => {
                        copy.step(port, &mut self.links, turn, finish)
                    }
                    _ => {
                        self.stage = Stage::Working;
                        1
                    }
                }
            }
            Stage::Working => {
                let finish = self.finish;
                match &mut self.workload {
                    Some((_, workload)) if !workload.is_over() => {
                        workload.step(port, &mut self.links, turn, finish)
                    }
                    _ => {
                        self.stage = Stage::Over;
                        self.progress.over.store(true, Ordering::Relaxed);
                        1
                    }
                }
            }
        };
        if work != 0 {
            self.tell(turn);
        }
        work
    }
}

/// The peers of a node's jobs, each once.
#[must_use]
pub fn peers(node: &config::Node) -> Vec<Nid> {
    let copy = node.copy.as_ref().map(|job| job.peer);
    let workload = node.workload.as_ref().map(|job| job.peer);
    let mut peers: Vec<Nid> = [copy, workload].into_iter().flatten().collect();
    peers.dedup();
    peers
}

pub(crate) fn judge(peer: Nid, bytes: &[u8], length: u32, latency: Ticks) -> Result<Pong, NoPong> {
    let answer = bytes.get(..length as usize).unwrap_or(bytes);
    let info = PingInfo::decode(answer)?;
    match info.primary() {
        Some(nid) if nid == peer => {}
        other => return Err(NoPong::OtherNode(other.unwrap_or(Nid::ANY))),
    }
    Ok(Pong {
        bytes: length,
        interfaces: info.entries().count(),
        status: info
            .entries()
            .next()
            .map_or(ping::Status::Down, |entry| entry.status),
        latency,
    })
}

/// As [`Progress`] numbers them.
const STAGES: [&str; 6] = [
    "connecting",
    "get",
    "sha-256",
    "put",
    "get back",
    "workload",
];

#[cfg(test)]
mod tests {
    use super::{Nid, NoPong, judge};
    use o2poll_dataplane::time::Ticks;
    use o2poll_dataplane::wire::Pid;
    use o2poll_dataplane::wire::ping::{self, Features, Status};

    const PEER: Nid = Nid::o2ib([10, 0, 0, 1], 0);

    #[test]
    fn only_the_peers_own_whole_info_is_a_pong() {
        let info = ping::encode(Features::PLAIN, Pid::LUSTRE, 1, PEER);
        let pong = judge(PEER, &info, 48, Ticks(9)).unwrap();
        assert_eq!((pong.bytes, pong.interfaces), (48, 1));
        assert_eq!((pong.status, pong.latency), (Status::Up, Ticks(9)));
        let other = Nid::o2ib([10, 0, 0, 9], 0);
        assert_eq!(
            judge(other, &info, 48, Ticks(9)),
            Err(NoPong::OtherNode(PEER))
        );
        assert!(matches!(
            judge(PEER, &info, 47, Ticks(9)),
            Err(NoPong::Malformed(_))
        ));
        assert!(matches!(
            judge(PEER, &[0; 272], 272, Ticks(9)),
            Err(NoPong::Malformed(_))
        ));
        assert!(matches!(
            judge(PEER, &[], 0, Ticks(9)),
            Err(NoPong::Malformed(_))
        ));
    }
}
