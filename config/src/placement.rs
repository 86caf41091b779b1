//! Which core polls for which node.

use crate::{Config, Cores, Idle, Machine};
use core::fmt::Write as _;

/// Which core polls for which node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// One polling thread per core, each core once, in the order of their first nodes.
    pub threads: Vec<PollingThread>,
    /// The same as a sentence or two, for a person.
    pub sentence: String,
    parallelism: usize,
}

/// A thread that polls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PollingThread {
    /// The core it is pinned to.
    pub core: usize,
    /// Indices in [`Config::nodes`]; more than one where there are fewer cores than nodes.
    pub nodes: Vec<usize>,
}

impl Placement {
    /// Spreads nodes over cores: listed cores first, then each `cores = "auto"` over allowed cores that
    /// nobody has listed, and where those run out, onto the thread with the fewest nodes. Never makes more threads
    /// for `auto` than really run at once.
    pub(crate) fn new(config: &Config, machine: &Machine<'_>) -> Self {
        let mut threads: Vec<PollingThread> = Vec::new();
        for (index, node) in config.nodes.iter().enumerate() {
            let Cores::Listed(cores) = &node.cores else {
                continue;
            };
            for &core in cores {
                match threads.iter_mut().find(|thread| thread.core == core) {
                    Some(thread) => thread.nodes.push(index),
                    None => threads.push(PollingThread {
                        core,
                        nodes: vec![index],
                    }),
                }
            }
        }
        for (index, node) in config.nodes.iter().enumerate() {
            if node.cores != Cores::Auto {
                continue;
            }
            let free = machine
                .allowed_cores
                .iter()
                .copied()
                .find(|core| threads.iter().all(|thread| thread.core != *core))
                .filter(|_| threads.is_empty() || threads.len() < machine.parallelism);
            match free {
                Some(core) => threads.push(PollingThread {
                    core,
                    nodes: vec![index],
                }),
                None => match threads.iter_mut().min_by_key(|thread| thread.nodes.len()) {
                    Some(thread) => thread.nodes.push(index),
                    None => threads.push(PollingThread {
                        core: 0,
                        nodes: vec![index],
                    }),
                },
            }
        }
        for thread in &mut threads {
            thread.nodes.sort_unstable();
        }
        threads.sort_by_key(|thread| thread.nodes.first().copied());
        let sentence = sentence(config, machine, &threads);
        Self {
            threads,
            sentence,
            parallelism: machine.parallelism,
        }
    }

    /// What an idle polling thread does: [`Idle::Auto`] becomes `Spin`, or `Yield` where there are more
    /// polling threads than really run at once.
    #[must_use]
    pub const fn idle(&self, wanted: Idle) -> Idle {
        match wanted {
            Idle::Auto if self.threads.len() > self.parallelism => Idle::Yield,
            Idle::Auto => Idle::Spin,
            said => said,
        }
    }
}

/// `core 0 polls for 10.0.0.1@o2ib, core 1 for 10.0.0.2@o2ib.`
fn sentence(config: &Config, machine: &Machine<'_>, threads: &[PollingThread]) -> String {
    let mut text = String::new();
    for (i, thread) in threads.iter().enumerate() {
        let (before, verb) = if i == 0 {
            ("core", " polls")
        } else {
            (", core", "")
        };
        let _ = write!(text, "{before} {}{verb} for ", thread.core);
        for (j, node) in thread.nodes.iter().enumerate() {
            let Some(node) = config.nodes.get(*node) else {
                continue;
            };
            let before = if j == 0 { "" } else { " and " };
            let _ = write!(text, "{before}{}", node.nid);
        }
    }
    text.push('.');
    if threads.iter().any(|thread| thread.nodes.len() > 1) {
        let cores = machine.allowed_cores.len();
        if machine.parallelism < cores {
            let _ = write!(
                text,
                " Nodes share a polling thread: this process may use {cores} cores, but its CPU quota only \
                 keeps {} busy.",
                machine.parallelism
            );
        } else {
            let what = if cores == 1 { "core" } else { "cores" };
            let _ = write!(
                text,
                " Nodes share a polling thread: there are {} of them, and this process may use {cores} {what}.",
                config.nodes.len()
            );
        }
    }
    text
}
