//! What a run found out: one value, as a table for people and as JSON for machines.

pub(crate) mod table;
#[cfg(test)]
mod tests;

use core::fmt::Write as _;

use o2poll_config::{Config, Device, Idle};
use o2poll_dataplane::counters::Counters;
use o2poll_dataplane::poller::Leftovers;
use o2poll_dataplane::time::Ticks;
use o2poll_dataplane::wire::ping::Status;
use o2poll_hal::clock::Clock;
use o2poll_hal::count_alloc;
use serde::Serialize;

use crate::copy::{Copy, Hash};
use crate::finished::{Finished, FinishedCore, FinishedNode};
use crate::job::{Job, Ping};
use crate::ledger::Ledger;
use crate::measure::{Histogram, Span};
use crate::workload::Workload;

/// Everything that is told of a run.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The node file.
    pub file: String,
    /// The device, e.g. `soft frwr`.
    pub device: String,
    /// Which core polled for which node.
    pub placement: String,
    /// What idle polling threads did: `spin` or `yield`.
    pub idle: &'static str,
    /// What a tick of the clock is.
    pub clock: String,
    /// One for each peer of each node with jobs.
    pub pings: Vec<PingLine>,
    /// Two for each copy.
    pub digests: Vec<DigestLine>,
    /// One for each kind of transfer of each job.
    pub transfers: Vec<SpanLine>,
    /// One for each job that has asked for transfers.
    pub accounts: Vec<AccountLine>,
    /// One for each workload.
    pub verifications: Vec<VerificationLine>,
    /// One for each job some of whose transfers failed with their connection and were made again.
    pub repeats: Vec<RepeatLine>,
    /// The capture, if there was one.
    pub capture: Option<CaptureLine>,
    /// Transfers and connections that failed.
    pub failures: Vec<String>,
    /// One for each node.
    pub nodes: Vec<NodeLine>,
    /// One for each polling thread.
    pub threads: Vec<ThreadLine>,
    /// It was told to end before its jobs were done.
    pub interrupted: bool,
    /// Everything was as it must be.
    pub ok: bool,
    /// What the program's exit status says.
    pub verdict: Verdict,
}

/// What a capture holds.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct CaptureLine {
    /// Frames in the file.
    pub frames: u64,
    /// Their bytes on the wire.
    pub bytes: u64,
}

/// What the exit status of a run says; the worst that applies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// Every digest and every comparison was right, and nothing was left over.
    Good,
    /// Told to end before every job had come to its end.
    CutShort,
    /// A key was still alive, something was not given back, or a polling core allocated.
    NotClean,
    /// A transfer or a connection failed.
    Failed,
    /// Bytes were not what they must be.
    Mismatch,
    /// A transfer did not end exactly once, or brought bytes that nobody has compared.
    Unaccounted,
}

impl Verdict {
    /// The exit status.
    #[must_use]
    pub const fn code(self) -> u8 {
        match self {
            Self::Good => 0,
            Self::Mismatch => 4,
            Self::Failed => 5,
            Self::NotClean => 6,
            Self::CutShort => 7,
            Self::Unaccounted => 8,
        }
    }
}

/// An LNet ping.
#[derive(Clone, Debug, Serialize)]
pub struct PingLine {
    /// Who asked.
    pub node: String,
    /// Who was asked.
    pub peer: String,
    /// The answer was good.
    pub ok: bool,
    /// What it said, or what was wrong with it.
    pub answer: String,
    /// From submission to event, in microseconds.
    pub latency_us: Option<f64>,
}

/// A SHA-256 that was compared.
#[derive(Clone, Debug, Serialize)]
pub struct DigestLine {
    /// Who compared.
    pub node: String,
    /// Of what.
    pub what: &'static str,
    /// What it must be, of the file on disk.
    pub expected: String,
    /// What it was; `null` if it did not come to that.
    pub found: Option<String>,
    /// They are the same.
    pub ok: bool,
}

/// Transfers of one kind.
#[derive(Clone, Debug, Serialize)]
pub struct SpanLine {
    /// Who ran them.
    pub node: String,
    /// With whom.
    pub peer: String,
    /// Which.
    pub name: &'static str,
    /// How many ended well.
    pub transfers: u64,
    /// Payload bytes.
    pub bytes: u64,
    /// From the first submission to the last event.
    pub seconds: f64,
    /// 10^9 bytes in a second of that.
    pub gb_per_s: f64,
    /// Half of them took no longer, from submission to event.
    pub p50_us: f64,
    /// 99 of 100 took no longer.
    pub p99_us: f64,
    /// The longest.
    pub max_us: f64,
    /// Ticks in polls that found something to do, of the node that ran them, per transfer.
    pub ticks_per_transfer: Option<f64>,
    /// Send work requests of the node that ran them, per transfer.
    pub work_requests_per_transfer: Option<f64>,
    /// Of its peer.
    pub peer_work_requests_per_transfer: Option<f64>,
    /// Doorbells of the node that ran them, per transfer.
    pub doorbells_per_transfer: Option<f64>,
    /// Of its peer.
    pub peer_doorbells_per_transfer: Option<f64>,
}

/// The transfers of a job: what was submitted, and what came of each.
#[derive(Clone, Debug, Serialize)]
pub struct AccountLine {
    /// Who ran it.
    pub node: String,
    /// With whom.
    pub peer: String,
    /// `pings`, `copy` or `workload`.
    pub job: &'static str,
    /// Transfers that were submitted; one that is made again is another.
    pub posted: u64,
    /// PUTs that ended well.
    pub puts: u64,
    /// Of those, the ones that fill the region before it is read: they are not timed, and not in `transfers`.
    pub fills: u64,
    /// GETs that brought all that was asked for.
    pub gets: u64,
    /// Errors, and how many transfers ended with each.
    pub failed: Vec<(String, u64)>,
    /// Of those, the ones that the node's poller refused at once.
    pub refused: u64,
    /// Transfers that have not ended.
    pub never: u64,
    /// Ends of transfers that had ended before, or had never begun.
    pub twice: u64,
}

/// What the comparisons of a workload found.
#[derive(Clone, Debug, Serialize)]
pub struct VerificationLine {
    /// Who ran it.
    pub node: String,
    /// Whether anything was compared.
    pub enabled: bool,
    /// GETs that were compared.
    pub compared: u64,
    /// Those with a wrong byte.
    pub wrong: u64,
    /// Wrong bytes that were seen.
    pub wrong_bytes: u64,
    /// Transfers that failed.
    pub failed: u64,
}

/// Transfers that were made again.
#[derive(Clone, Debug, Serialize)]
pub struct RepeatLine {
    /// Who ran them.
    pub node: String,
    /// With whom.
    pub peer: String,
    /// `copy` or `workload`.
    pub job: &'static str,
    /// How many.
    pub transfers: u64,
}

/// One core of a node.
#[derive(Clone, Debug, Serialize)]
pub struct CoreLine {
    /// Connections that it got.
    pub connections: u64,
    /// Transfers of the node that it moved.
    pub transfers: u64,
    /// Transfers of peers that it moved.
    pub peer_transfers: u64,
    /// Send work requests.
    pub work_requests: u64,
    /// Doorbells.
    pub doorbells: u64,
}

/// A node.
#[derive(Clone, Debug, Serialize)]
pub struct NodeLine {
    /// Its name.
    pub nid: String,
    /// Registrations by fragment list, page list and window.
    pub registrations: [u64; 3],
    /// Sinks that peers wrote into under a key of the pool of mappings.
    pub by_mapping: u64,
    /// Sinks that peers wrote into under the key of the arena.
    pub by_arena_key: u64,
    /// Sinks whose data came through a staging buffer.
    pub staged: u64,
    /// Sinks that no mechanism covered: refused.
    pub unmappable: u64,
    /// Sources registered for the node's own device.
    pub registered_sources: u64,
    /// Keys killed by the node's own invalidate.
    pub invalidations: u64,
    /// Keys killed by a peer's SEND_WITH_INV.
    pub remote_invalidations: u64,
    /// Keys that peers could use at the end, as the node counts and as its device does.
    pub keys_alive: u64,
    /// Windows that were rebuilt.
    pub windows_rebuilt: u64,
    /// Connections that ended because the peer broke the protocol.
    pub protocol_errors: u64,
    /// Connections that were lost and made again.
    pub reconnected: u64,
    /// What was not given back, by name; `null` if the node did not come to an end.
    pub left_over: Option<Vec<(&'static str, u64)>>,
    /// Every counter, over all cores.
    pub counters: Vec<(&'static str, u64)>,
    /// One for each core.
    pub cores: Vec<CoreLine>,
}

/// A polling thread.
#[derive(Clone, Debug, Serialize)]
pub struct ThreadLine {
    /// Its core.
    pub core: usize,
    /// Allocations while it polled; `null` where the program has no counting allocator.
    pub allocations: Option<u64>,
    /// Frees while it polled.
    pub frees: Option<u64>,
    /// How often the kernel took it off its core.
    pub preemptions: Option<u64>,
    /// How often it gave the core up.
    pub yields: Option<u64>,
}

/// Where a run took place.
#[derive(Clone, Debug)]
pub struct Scene {
    /// Which core polled for which node.
    pub placement: String,
    /// What idle polling threads did.
    pub idle: Idle,
    /// The clock.
    pub clock: Clock,
}

impl Report {
    /// Gathers what is known.
    #[must_use]
    pub fn new(
        config: &Config,
        scene: &Scene,
        finished: &Finished<Job>,
        failures: Vec<String>,
    ) -> Self {
        let clock = scene.clock;
        let counted = count_alloc::is_live();
        let mut report = Self {
            file: config.origin.display().to_string(),
            device: match &config.device {
                Device::Soft(soft) => format!("soft {}", soft.profile.name()),
                Device::Verbs(name) => format!("verbs {name}"),
                _ => String::new(),
            },
            placement: scene.placement.clone(),
            idle: match scene.idle {
                Idle::Yield => "yield",
                _ => "spin",
            },
            clock: clock.to_string(),
            pings: Vec::new(),
            digests: Vec::new(),
            transfers: Vec::new(),
            accounts: Vec::new(),
            verifications: Vec::new(),
            repeats: Vec::new(),
            capture: finished.capture.map(|capture| CaptureLine {
                frames: capture.frames,
                bytes: capture.bytes,
            }),
            failures,
            nodes: finished.nodes.iter().map(NodeLine::new).collect(),
            threads: finished
                .threads
                .iter()
                .map(|thread| ThreadLine {
                    core: thread.core,
                    allocations: counted.then_some(thread.allocations.allocations),
                    frees: counted.then_some(thread.allocations.frees),
                    preemptions: thread.switches.map(|switches| switches.involuntary),
                    yields: thread.switches.map(|switches| switches.voluntary),
                })
                .collect(),
            interrupted: false,
            ok: true,
            verdict: Verdict::Good,
        };
        for node in &finished.nodes {
            if let Some(job) = &node.application {
                report.add_job(&node.nid.to_string(), job, &clock);
            }
        }
        report.verdict = report.judge();
        report.ok = report.verdict == Verdict::Good;
        report
    }

    fn add_job(&mut self, node: &str, job: &Job, clock: &Clock) {
        self.interrupted |= job.was_cut_short();
        let asked = job.pings().iter().map(|ping| ping.peer.to_string());
        let asked: Vec<String> = asked.collect();
        self.add_account(node, &asked.join(", "), "pings", job.ping_ledger(), 0);
        for ping in job.pings() {
            self.pings.push(PingLine::new(node, ping, clock));
        }
        if let Some((peer, copy)) = &job.copy {
            self.add_copy(node, &peer.to_string(), copy, clock);
        }
        if let Some((peer, workload)) = &job.workload {
            self.add_workload(node, &peer.to_string(), workload, clock);
        }
    }

    fn add_copy(&mut self, node: &str, peer: &str, copy: &Copy, clock: &Clock) {
        for (what, found) in ["the file as it came", "the file as it came back"]
            .into_iter()
            .zip(copy.found)
        {
            self.digests.push(DigestLine {
                node: node.to_owned(),
                what,
                expected: hex(&copy.expected),
                found: found.as_ref().map(hex),
                ok: found == Some(copy.expected),
            });
        }
        let names = ["copy: GET", "copy: PUT", "copy: GET back"];
        for (name, span) in names.into_iter().zip(&copy.spans) {
            if span.transfers() != 0 {
                self.transfers
                    .push(SpanLine::whole(node, peer, name, span, clock));
            }
        }
        self.add_account(node, peer, "copy", &copy.ledger, 0);
        self.add_repeats(node, peer, "copy", copy.repeated);
        if let Some(error) = copy.failure {
            self.failures
                .push(format!("{node}: the copy failed: {error}"));
        }
    }

    fn add_workload(&mut self, node: &str, peer: &str, workload: &Workload, clock: &Clock) {
        self.verifications.push(VerificationLine {
            node: node.to_owned(),
            enabled: workload.verifies(),
            compared: workload.verified,
            wrong: workload.wrong,
            wrong_bytes: workload.wrong_bytes,
            failed: workload.failures().map_or(0, |(failed, _)| failed),
        });
        let span = &workload.span;
        if span.transfers() != 0 {
            self.transfers
                .push(SpanLine::whole(node, peer, "workload", span, clock));
            for (name, histogram, bytes) in [
                ("workload: PUT", &span.puts, span.put_bytes),
                ("workload: GET", &span.gets, span.get_bytes),
            ] {
                if histogram.count() != 0 {
                    let seconds = clock.duration(span.elapsed).as_secs_f64();
                    let line = SpanLine::part(node, peer, name, histogram, bytes, seconds, clock);
                    self.transfers.push(line);
                }
            }
        }
        self.add_account(node, peer, "workload", &workload.ledger, workload.fills);
        self.add_repeats(node, peer, "workload", workload.repeated);
        if let Some((failed, error)) = workload.failures() {
            self.failures.push(format!(
                "{node}: {failed} transfers of the workload failed, the first: {error}",
            ));
        }
    }

    fn add_account(
        &mut self,
        node: &str,
        peer: &str,
        job: &'static str,
        ledger: &Ledger,
        fills: u64,
    ) {
        if ledger.posted == 0 && ledger.twice == 0 {
            return;
        }
        let failed = ledger.failures().map(|(error, count)| {
            let why = error.map_or_else(|| String::from("other"), |error| error.to_string());
            (why, count)
        });
        self.accounts.push(AccountLine {
            node: node.to_owned(),
            peer: peer.to_owned(),
            job,
            posted: ledger.posted,
            puts: ledger.puts,
            fills,
            gets: ledger.gets,
            failed: failed.collect(),
            refused: ledger.refused,
            never: ledger.never(),
            twice: ledger.twice,
        });
    }

    fn add_repeats(&mut self, node: &str, peer: &str, job: &'static str, transfers: u64) {
        if transfers != 0 {
            self.repeats.push(RepeatLine {
                node: node.to_owned(),
                peer: peer.to_owned(),
                job,
                transfers,
            });
        }
    }

    /// Whether a workload that verifies has compared what each of its GETs brought.
    fn all_compared(&self) -> bool {
        let mut verified = self.verifications.iter().filter(|line| line.enabled);
        verified.all(|line| {
            let mut accounts = self.accounts.iter();
            let its = accounts.find(|its| its.job == "workload" && its.node == line.node);
            its.map_or(0, |its| its.gets) == line.compared
        })
    }

    /// Whether the pollers of each node with jobs have ended as many transfers as its jobs have seen end.
    fn pollers_agree(&self) -> bool {
        self.nodes.iter().all(|node| {
            let its = self.accounts.iter().filter(|its| its.node == node.nid);
            let begun = its.map(|its| its.ended().saturating_sub(its.refused));
            let polled: u64 = node.cores.iter().map(|core| core.transfers).sum();
            begun.sum::<u64>() == polled
        })
    }

    fn judge(&self) -> Verdict {
        let mut verdict = Verdict::Good;
        let mut at_least = |worse: Verdict| verdict = verdict.max(worse);
        if self
            .digests
            .iter()
            .any(|digest| !digest.ok && digest.found.is_some())
            || self.verifications.iter().any(|line| line.wrong != 0)
        {
            at_least(Verdict::Mismatch);
        }
        let settled = self.accounts.iter().all(AccountLine::is_settled);
        if !settled || !self.all_compared() || !self.pollers_agree() {
            at_least(Verdict::Unaccounted);
        }
        let bad_ping = |ping: &PingLine| !ping.ok && !self.interrupted;
        if !self.failures.is_empty() || self.pings.iter().any(bad_ping) {
            at_least(Verdict::Failed);
        }
        let clean = self.nodes.iter().all(NodeLine::is_clean)
            && self.threads.iter().all(ThreadLine::is_clean);
        if !clean {
            at_least(Verdict::NotClean);
        }
        if self.interrupted {
            at_least(Verdict::CutShort);
        } else if self.digests.iter().any(|digest| digest.found.is_none()) {
            at_least(Verdict::Failed);
        }
        verdict
    }
}

impl AccountLine {
    /// Whether each has ended once.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.never == 0 && self.twice == 0 && self.posted == self.ended()
    }

    /// Transfers that have ended.
    fn ended(&self) -> u64 {
        let failed = self.failed.iter().map(|(_, count)| count);
        failed.fold(self.puts.saturating_add(self.gets), |sum, count| {
            sum.saturating_add(*count)
        })
    }
}

impl PingLine {
    fn new(node: &str, ping: &Ping, clock: &Clock) -> Self {
        let (ok, answer, latency) = match &ping.outcome {
            Some(Ok(pong)) => {
                let status = match pong.status {
                    Status::Up => String::from("up"),
                    Status::Down => String::from("down"),
                    Status::Other(code) => format!("status {code:#x}"),
                };
                (true, status, Some(micros(pong.latency, clock)))
            }
            Some(Err(error)) => (false, error.to_string(), None),
            None => (false, String::from("not asked"), None),
        };
        Self {
            node: node.to_owned(),
            peer: ping.peer.to_string(),
            ok,
            answer,
            latency_us: latency,
        }
    }
}

impl SpanLine {
    fn whole(node: &str, peer: &str, name: &'static str, span: &Span, clock: &Clock) -> Self {
        let mut all = span.puts.clone();
        all.add(&span.gets);
        let bytes = span.put_bytes.saturating_add(span.get_bytes);
        let seconds = clock.duration(span.elapsed).as_secs_f64();
        let per = |count: u64| ratio(count, all.count());
        let cost = &span.cost;
        Self {
            ticks_per_transfer: per(cost.busy.0),
            work_requests_per_transfer: per(cost.work_requests[0]),
            peer_work_requests_per_transfer: per(cost.work_requests[1]),
            doorbells_per_transfer: per(cost.doorbells[0]),
            peer_doorbells_per_transfer: per(cost.doorbells[1]),
            ..Self::part(node, peer, name, &all, bytes, seconds, clock)
        }
    }

    fn part(
        node: &str,
        peer: &str,
        name: &'static str,
        latency: &Histogram,
        bytes: u64,
        seconds: f64,
        clock: &Clock,
    ) -> Self {
        Self {
            node: node.to_owned(),
            peer: peer.to_owned(),
            name,
            transfers: latency.count(),
            bytes,
            seconds,
            gb_per_s: rate(bytes, seconds),
            p50_us: micros(latency.quantile(500), clock),
            p99_us: micros(latency.quantile(990), clock),
            max_us: micros(latency.most(), clock),
            ticks_per_transfer: None,
            work_requests_per_transfer: None,
            peer_work_requests_per_transfer: None,
            doorbells_per_transfer: None,
            peer_doorbells_per_transfer: None,
        }
    }
}

impl NodeLine {
    fn new<A>(node: &FinishedNode<A>) -> Self {
        let sum = |of: fn(&Counters) -> u64| -> u64 {
            node.cores.iter().map(|core| of(core.counters)).sum()
        };
        // Both must say that nobody can get in: the poller counts grants, the device looks at its table.
        let keys = |core: &FinishedCore| {
            let device = core.device.map_or(0, |gauges| gauges.live_keys as u64);
            core.keys_alive.max(device)
        };
        let mut counters: Vec<(&'static str, u64)> = Vec::new();
        for core in &node.cores {
            for (at, (name, count)) in core.counters.each().enumerate() {
                match counters.get_mut(at) {
                    Some((_, sum)) => *sum = sum.saturating_add(count),
                    None => counters.push((name, count)),
                }
            }
        }
        Self {
            nid: node.nid.to_string(),
            registrations: [
                sum(|core| core.fragment_lists.get()),
                sum(|core| core.page_lists.get()),
                sum(|core| core.windows.get()),
            ],
            by_mapping: sum(|core| core.mappings.get()),
            by_arena_key: sum(|core| core.arenas.get()),
            staged: sum(|core| core.stagings.get()),
            unmappable: sum(|core| core.unmappable.get()),
            registered_sources: sum(|core| core.source_lists.get()),
            invalidations: sum(|core| core.invalidations.get()),
            remote_invalidations: sum(|core| core.remote_invalidations.get()),
            keys_alive: node.cores.iter().map(keys).sum(),
            windows_rebuilt: node.cores.iter().map(|core| core.windows_rebuilt).sum(),
            protocol_errors: sum(|core| core.protocol_errors.get()),
            reconnected: node.reconnected,
            left_over: all_left_over(&node.cores),
            counters,
            cores: node.cores.iter().map(CoreLine::new).collect(),
        }
    }

    fn is_clean(&self) -> bool {
        self.keys_alive == 0
            && self.protocol_errors == 0
            && self.left_over.as_ref().is_some_and(Vec::is_empty)
    }
}

impl CoreLine {
    fn new(core: &FinishedCore) -> Self {
        let counters = core.counters;
        Self {
            connections: core.connections,
            transfers: counters.transfers.get(),
            peer_transfers: counters.peer_transfers.get(),
            work_requests: counters.work_requests.get(),
            doorbells: counters.doorbells.get(),
        }
    }
}

impl ThreadLine {
    fn is_clean(&self) -> bool {
        self.allocations.unwrap_or(0) == 0 && self.frees.unwrap_or(0) == 0
    }
}

/// What all cores hold together; `None` if one did not come to its end.
fn all_left_over(cores: &[FinishedCore]) -> Option<Vec<(&'static str, u64)>> {
    let mut sums: Vec<(&'static str, u64)> = Vec::new();
    for core in cores {
        for (name, count) in left_over(&core.leftovers?) {
            match sums.iter_mut().find(|(known, _)| *known == name) {
                Some((_, sum)) => *sum = sum.saturating_add(count),
                None => sums.push((name, count)),
            }
        }
    }
    Some(sums)
}

fn left_over(left: &Leftovers) -> Vec<(&'static str, u64)> {
    [
        ("connections", left.connections),
        ("transfers", left.transfers),
        ("receives", left.receives),
        ("entries", left.entries),
        ("message buffers", left.messages),
        ("windows", left.windows),
        ("staging buffers", left.staging),
        ("mappings", left.mappings),
        ("events", left.events),
    ]
    .into_iter()
    .filter(|(_, count)| *count != 0)
    .map(|(name, count)| (name, count as u64))
    .collect()
}

fn hex(hash: &Hash) -> String {
    hash.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn micros(span: Ticks, clock: &Clock) -> f64 {
    clock.nanoseconds(span) as f64 / 1000.0
}

fn rate(bytes: u64, seconds: f64) -> f64 {
    if seconds > 0.0 {
        bytes as f64 / seconds / 1e9
    } else {
        0.0
    }
}

fn ratio(part: u64, whole: u64) -> Option<f64> {
    (whole != 0).then(|| part as f64 / whole as f64)
}
