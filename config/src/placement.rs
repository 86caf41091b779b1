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

#[cfg(test)]
mod tests {
    use crate::{Config, Idle, Machine, Placement};
    use std::io;
    use std::path::Path;

    fn place(nodes: &[&str], allowed: &[usize], parallelism: usize) -> Placement {
        let mut text = String::from("[device]\nsoft = {}\n");
        for (i, cores) in nodes.iter().enumerate() {
            text.push_str(&format!(
                "[[node]]\nnid = \"10.0.0.{}@o2ib\"\ncores = {cores}\n",
                i + 1
            ));
        }
        let machine = Machine {
            allowed_cores: allowed.to_vec(),
            present_cores: 8,
            parallelism,
            file_size: &|_| Err(io::ErrorKind::NotFound.into()),
        };
        let config = Config::parse(&text, Path::new("x.toml"), &machine)
            .unwrap_or_else(|report| panic!("{report}"));
        config.placement(&machine)
    }

    fn pairs(placement: &Placement) -> Vec<(usize, &[usize])> {
        let threads = placement.threads.iter();
        threads
            .map(|thread| (thread.core, thread.nodes.as_slice()))
            .collect()
    }

    const AUTO: &str = "\"auto\"";

    #[test]
    fn nodes_take_a_core_each_while_there_are_some() {
        let placement = place(&[AUTO, AUTO], &[2, 5, 7], 3);
        assert_eq!(pairs(&placement), [(2, [0].as_slice()), (5, &[1])]);
        assert_eq!(
            placement.sentence,
            "core 2 polls for 10.0.0.1@o2ib, core 5 for 10.0.0.2@o2ib."
        );
    }

    #[test]
    fn auto_leaves_listed_cores_to_those_who_list_them() {
        let placement = place(&[AUTO, "[0]", "[2, 3]"], &[0, 1, 2, 3], 4);
        assert_eq!(
            pairs(&placement),
            [(1, [0].as_slice()), (0, &[1]), (2, &[2]), (3, &[2])]
        );
    }

    #[test]
    fn with_fewer_cores_than_nodes_they_share_and_it_is_said() {
        let placement = place(&[AUTO, AUTO, AUTO], &[0, 1], 2);
        assert_eq!(pairs(&placement), [(0, [0, 2].as_slice()), (1, &[1])]);
        assert_eq!(
            placement.sentence,
            "core 0 polls for 10.0.0.1@o2ib and 10.0.0.3@o2ib, core 1 for 10.0.0.2@o2ib. Nodes share a polling \
             thread: there are 3 of them, and this process may use 2 cores."
        );
        let placement = place(&["[1]", "[1]"], &[1], 1);
        assert_eq!(pairs(&placement), [(1, [0, 1].as_slice())]);
        assert!(placement.sentence.ends_with("may use 1 core."));
    }

    #[test]
    fn a_quota_counts_like_missing_cores() {
        let placement = place(&[AUTO, AUTO], &[0, 1, 2, 3], 1);
        assert_eq!(pairs(&placement), [(0, [0, 1].as_slice())]);
        assert!(
            placement.sentence.contains("CPU quota"),
            "{}",
            placement.sentence
        );
        assert_eq!(placement.idle(Idle::Auto), Idle::Spin);
        let placement = place(&["[0]", "[1]"], &[0, 1], 1);
        assert_eq!(placement.idle(Idle::Auto), Idle::Yield);
        assert_eq!(placement.idle(Idle::Spin), Idle::Spin);
    }
}
