//! Runs the jobs of a node file on an RDMA device.

use core::sync::atomic::{AtomicBool, Ordering};
use core::time::Duration;
use std::sync::Arc;

use o2poll_config::{Config, Machine};
use o2poll_dataplane::wire::Nid;

use super::{Control, Options};
use crate::NodeError;
use crate::job::{Job, Progress, peers};
use crate::report::{Report, Scene};
use crate::run::{Watcher, hashes};

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
    for note in control.notes() {
        watcher.line(note, true);
    }
    watcher.line(control.placement(), false);
    let scene = Scene {
        placement: control.placement().to_owned(),
        idle: control.idle(),
        clock: control.clock(),
    };
    let mut failures = Vec::new();
    let dials: Vec<(Nid, Nid)> = config
        .nodes
        .iter()
        .filter(|node| is_here(node.nid))
        .flat_map(|node| peers(node).into_iter().map(|peer| (node.nid, peer)))
        .collect();
    let serves = dials.is_empty();
    if serves {
        watcher.line("ready: listens on port 987", true);
    }
    for (node, peer) in dials {
        if let Err(error) = control.connect(node, peer, config.tunables.timeout) {
            failures.push(error.to_string());
            break;
        }
    }
    let mut finishing = !failures.is_empty();
    if finishing {
        control.finish();
    }
    loop {
        // Relaxed: it carries nothing but itself.
        let stopped = stop.load(Ordering::Relaxed);
        let over = progress.iter().all(|(_, progress)| progress.is_over());
        if over && (!serves || stopped || finishing) {
            break;
        }
        if !finishing && stopped {
            finishing = true;
            control.finish();
        }
        match control.turn(NAP) {
            Ok(()) => {}
            // A node that only serves lives longer than its peers.
            Err(NodeError::Lost { .. }) if serves => {}
            // Its transfers fail, and the jobs come to an end by that.
            Err(error @ NodeError::Lost { .. }) => failures.push(error.to_string()),
            Err(error @ NodeError::Removed { .. }) => {
                failures.push(error.to_string());
                finishing = true;
                control.finish();
            }
            Err(error) => return Err(error),
        }
        for line in control.log() {
            watcher.line(&line, false);
        }
        watcher.look(&progress);
    }
    watcher.look(&progress);
    let finished = control.stop(STOP)?;
    Ok(Report::new(config, &scene, &finished, failures))
}

/// The control thread's longest sleep while jobs run.
const NAP: Duration = Duration::from_millis(20);
/// For everything to come to its end.
const STOP: Duration = Duration::from_secs(30);
