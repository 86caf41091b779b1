//! Runs the jobs of a node file on an RDMA device.

use core::sync::atomic::AtomicBool;
use core::time::Duration;
use std::sync::Arc;

use o2poll_config::{Config, Machine};
use o2poll_dataplane::wire::Nid;

use super::{Control, Options, patience};
use crate::NodeError;
use crate::job::{Job, Progress};
use crate::report::Report;
use crate::run::{Course, Watcher, hashes, scene};

/// Runs the nodes of a file that are `here` (all of them if there is none) and their jobs. Nodes without jobs serve the
/// others: if no node here has one, until `stop` becomes true.
///
/// # Errors
/// Why it could not start, or why there is nothing to report.
pub fn run(
    config: &Config,
    machine: &Machine<'_>,
    here: &[Nid],
    stop: &AtomicBool,
    watcher: &mut dyn Watcher,
) -> Result<Report, NodeError> {
    let is_here = |nid: Nid| here.is_empty() || here.contains(&nid);
    let hashes = hashes(config, is_here)?;
    let mut progress: Vec<(Nid, Arc<Progress>)> = Vec::new();
    let options = Options {
        memory: 0,
        here: here.to_vec(),
        listen: true,
    };
    let mut control = Control::start(config, machine, &options, |index, clock, counters| {
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
        is_here: &is_here,
        progress: &progress,
        dial: patience(config),
        stop,
    };
    let failures = course.run(&mut control.0, watcher)?;
    let finished = control.stop(STOP)?;
    Ok(Report::new(config, &scene, &finished, failures))
}

/// For everything to come to its end.
const STOP: Duration = Duration::from_secs(30);
