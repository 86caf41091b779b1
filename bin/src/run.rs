//! Runs the jobs of a node file, from its start to the report.

use core::sync::atomic::{AtomicBool, Ordering};
use core::time::Duration;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;
use std::sync::Arc;

use o2poll_config::{Config, Device, Machine};
use o2poll_dataplane::wire::Nid;
use sha2::{Digest as _, Sha256};

use crate::capture::Summary;
use crate::control::{Control, Options};
use crate::copy::Hash;
use crate::engine::{Engine, Fabric};
use crate::job::{Job, Progress, peers};
use crate::plan::{Plan, cores_of};
use crate::report::{Report, Scene};
use crate::start;
use crate::{Application as _, NodeError};

/// Who watches a run.
pub trait Watcher {
    /// Something worth a line: what was not granted, a connection that came or went.
    fn line(&mut self, text: &str, important: bool);

    /// Called every few milliseconds while jobs run.
    fn look(&mut self, nodes: &[(Nid, Arc<Progress>)]);
}

/// Runs every job of a node file. When `stop` becomes true, jobs come to an early end.
///
/// # Errors
/// Why it could not start, or why there is nothing to report.
pub fn run(
    config: &Config,
    machine: &Machine<'_>,
    options: &Options,
    stop: &AtomicBool,
    watcher: &mut dyn Watcher,
) -> Result<Report, NodeError> {
    let hashes = hashes(config, |_| true)?;
    let mut progress: Vec<(Nid, Arc<Progress>)> = Vec::new();
    let mut control = Control::start(config, machine, options, |index, clock, counters| {
        let expected = hashes.get(index).copied().flatten();
        let job = Job::new(config, index, expected, clock.hertz(), counters)?;
        if let Some(node) = config.nodes.get(index) {
            progress.push((node.nid, job.progress()));
        }
        Ok(Some(job))
    })?;
    let scene = scene(&control.0);
    let course = Course {
        config,
        is_here: &|_| true,
        progress: &progress,
        dial: DIAL,
        stop,
    };
    let mut failures = course.run(&mut control.0, watcher)?;
    let finished = control.stop(STOP)?;
    if let Some(Summary { lost: 1.., .. }) = finished.capture {
        failures.push(String::from("the capture is not complete"));
    }
    Ok(Report::new(config, &scene, &finished, failures))
}

/// Where a run takes place.
pub(crate) fn scene<F: Fabric>(engine: &Engine<Job, F>) -> Scene {
    Scene {
        placement: engine.placement().to_owned(),
        idle: engine.idle(),
        clock: engine.clock(),
    }
}

/// The course of a run, from the first connection to the end of the last job.
pub(crate) struct Course<'a> {
    pub(crate) config: &'a Config,
    /// Which nodes of the file run in this process.
    pub(crate) is_here: &'a dyn Fn(Nid) -> bool,
    pub(crate) progress: &'a [(Nid, Arc<Progress>)],
    /// For the first connections.
    pub(crate) dial: Duration,
    pub(crate) stop: &'a AtomicBool,
}

impl Course<'_> {
    /// Runs it; what failed, as sentences. Nodes that have no jobs, and no other node here that has one, serve until they
    /// are stopped.
    pub(crate) fn run<F: Fabric>(
        &self,
        engine: &mut Engine<Job, F>,
        watcher: &mut dyn Watcher,
    ) -> Result<Vec<String>, NodeError> {
        for note in engine.notes() {
            watcher.line(note, true);
        }
        watcher.line(engine.placement(), false);
        let mut failures = Vec::new();
        let dials: Vec<(&o2poll_config::Node, Nid)> = self
            .config
            .nodes
            .iter()
            .filter(|node| (self.is_here)(node.nid))
            .flat_map(|node| peers(node).into_iter().map(move |peer| (node, peer)))
            .collect();
        let serves = dials.is_empty() && matches!(self.config.device, Device::Verbs(_));
        if serves {
            watcher.line("ready: listens on port 987", true);
        } else if dials.is_empty() {
            watcher.line(IDLE, true);
        }
        for (node, peer) in dials {
            if let Err(error) = engine.keep(node.nid, peer, node.conns_per_peer, self.dial) {
                failures.push(error.to_string());
                break;
            }
        }
        let mut finishing = !failures.is_empty();
        if finishing {
            engine.finish();
        }
        loop {
            // Relaxed: it carries nothing but itself.
            let stopped = self.stop.load(Ordering::Relaxed);
            let over = self.progress.iter().all(|(_, progress)| progress.is_over());
            if over && (!serves || stopped || finishing) {
                break;
            }
            if !finishing && stopped {
                finishing = true;
                engine.finish();
            }
            match engine.turn(if engine.maps() { SHORT_NAP } else { NAP }) {
                Ok(()) => {}
                // A node that only serves lives longer than its peers.
                Err(NodeError::Lost { .. }) if serves => {}
                // It is given up: its transfers fail, and the jobs come to an end by that.
                Err(error @ (NodeError::Lost { .. } | NodeError::Dial { .. })) => {
                    failures.push(error.to_string());
                }
                Err(error @ NodeError::Removed { .. }) => {
                    failures.push(error.to_string());
                    finishing = true;
                    engine.finish();
                }
                Err(error) => return Err(error),
            }
            for line in engine.log() {
                watcher.line(&line, false);
            }
            watcher.look(self.progress);
        }
        watcher.look(self.progress);
        Ok(failures)
    }
}

/// What a run of this file would do, in a line; or why it would refuse to.
///
/// # Errors
/// What `run` would say.
pub fn outline(config: &Config, machine: &Machine<'_>) -> Result<String, NodeError> {
    if let Device::Verbs(name) = &config.device {
        let nodes: Vec<String> = config
            .nodes
            .iter()
            .map(|node| node.nid.to_string())
            .collect();
        return Ok(format!(
            "device {name} of the machine that runs it; nodes {}",
            nodes.join(", ")
        ));
    }
    let plan = Plan::new(config, machine)?;
    let counters = start::counters(config);
    let mut parts = vec![plan.placement.sentence.trim_end_matches('.').to_owned()];
    let mut memory = Vec::new();
    let mut jobs = Vec::new();
    for (index, node) in config.nodes.iter().enumerate() {
        let job = Job::new(config, index, Some(Hash::default()), 1, &counters)?;
        let needs = plan.of(node, &job.memory())?;
        let files: u64 = node
            .exports
            .iter()
            .filter(|export| export.file().is_some())
            .map(|export| export.length)
            .sum();
        let bytes = needs
            .bytes
            .saturating_add(usize::try_from(files).unwrap_or(usize::MAX));
        let others = needs
            .own_bytes
            .saturating_mul(cores_of(node).saturating_sub(1));
        let bytes = bytes.saturating_add(others);
        memory.push(format!("{} of memory for {}", mebibytes(bytes), node.nid));
        if let Some(copy) = &node.copy {
            let name = config.export(copy.file).map_or("", |export| &export.name);
            jobs.push(format!("{} copies `{name}` of {}", node.nid, copy.peer));
        }
        if let Some(workload) = &node.workload {
            let name = config
                .export(workload.region)
                .map_or("", |export| &export.name);
            jobs.push(format!(
                "{} works on `{name}` of {} for {:?}",
                node.nid, workload.peer, workload.duration
            ));
        }
    }
    parts.push(memory.join(", "));
    parts.extend(jobs);
    parts.extend(plan.notes);
    Ok(parts.join("; "))
}

/// The SHA-256 of each node's file to copy, read from the disk: not from memory that anybody has moved.
pub(crate) fn hashes(
    config: &Config,
    of_node: impl Fn(Nid) -> bool,
) -> Result<Vec<Option<Hash>>, NodeError> {
    let of = |node: &o2poll_config::Node| {
        let export = config.export(node.copy.as_ref()?.file)?;
        let path = export.file()?;
        Some(hash(path).map_err(|source| NodeError::File {
            path: path.to_owned(),
            source,
        }))
    };
    config
        .nodes
        .iter()
        .map(|node| of(node).filter(|_| of_node(node.nid)).transpose())
        .collect()
}

fn hash(path: &Path) -> io::Result<Hash> {
    let mut file = File::open(path)?;
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        let read = file.read(&mut buffer)?;
        match buffer.get(..read) {
            Some(bytes) if !bytes.is_empty() => hasher.update(bytes),
            _ => return Ok(hasher.finalize().into()),
        }
    }
}

fn mebibytes(bytes: usize) -> String {
    format!("{} MiB", bytes.div_ceil(1 << 20))
}

/// What a file does that gives nobody anything to do.
const IDLE: &str =
    "no node of this file has a job, so nothing moves: add [node.copy] or [node.workload] to one";
/// Its sleep where transfers wait for the mappings that it makes.
const SHORT_NAP: Duration = Duration::from_micros(200);
/// The control thread's sleep while jobs run: long, since it takes a core from a poller when it wakes.
const NAP: Duration = Duration::from_millis(20);
/// For a connection within one process.
const DIAL: Duration = Duration::from_secs(20);
/// For everything to come to its end.
const STOP: Duration = Duration::from_secs(20);

#[cfg(test)]
mod tests {
    use super::hash;

    #[test]
    fn a_file_is_hashed_whole() {
        let path = std::env::temp_dir().join(format!("o2poll-hash-{}", std::process::id()));
        std::fs::write(&path, b"abc").unwrap();
        let found = hash(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        // FIPS 180-2, appendix B.1.
        assert_eq!(found[..4], [0xba, 0x78, 0x16, 0xbf]);
        assert_eq!(found[28..], [0xf2, 0x00, 0x15, 0xad]);
    }
}
