//! What a person sees while jobs run: bars on a terminal, lines where they are wanted.

use std::collections::HashMap;
use std::io::{self, Write as _};
use std::sync::Arc;

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use o2poll_dataplane::wire::Nid;

use crate::job::Progress;
use crate::run::Watcher;

/// Bars on standard error, one for each node with jobs; none if that is no terminal.
#[derive(Debug)]
pub struct Bars {
    all: MultiProgress,
    bars: HashMap<Nid, ProgressBar>,
    /// What each was at when last looked at.
    stages: HashMap<Nid, &'static str>,
    verbose: bool,
}

impl Bars {
    /// No bar yet. Lines that are not important are shown if `verbose`.
    #[must_use]
    pub fn new(verbose: bool) -> Self {
        Self {
            all: MultiProgress::new(),
            bars: HashMap::new(),
            stages: HashMap::new(),
            verbose,
        }
    }

    /// Takes the bars away.
    pub fn clear(&mut self) {
        for bar in self.bars.values() {
            bar.finish_and_clear();
        }
        self.bars.clear();
    }
}

impl Watcher for Bars {
    fn line(&mut self, text: &str, important: bool) {
        if important || self.verbose {
            // Who does not read it any more must not end the run.
            let _ = self
                .all
                .suspend(|| writeln!(io::stderr(), "o2poll: {text}"));
        }
    }

    fn look(&mut self, nodes: &[(Nid, Arc<Progress>)]) {
        for (nid, progress) in nodes {
            if progress.is_over() {
                if let Some(bar) = self.bars.remove(nid) {
                    bar.finish_and_clear();
                }
                continue;
            }
            let stage = progress.stage();
            if self.stages.insert(*nid, stage) != Some(stage) {
                self.line(&format!("{nid}: {stage}"), false);
            }
            let bar = self
                .bars
                .entry(*nid)
                .or_insert_with(|| self.all.add(ProgressBar::new(0).with_style(style())));
            let (done, total) = progress.amount();
            let message = if stage == "workload" {
                format!("{nid} {stage} {} of {} s", done / 1000, total / 1000)
            } else {
                format!("{nid} {stage}")
            };
            bar.set_length(total.max(1));
            bar.set_position(done);
            bar.set_message(message);
        }
    }
}

fn style() -> ProgressStyle {
    ProgressStyle::with_template("{bar:40} {percent:>3}% {msg}")
        .unwrap_or_else(|_| ProgressStyle::default_bar())
}
