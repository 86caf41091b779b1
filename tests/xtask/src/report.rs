//! Steps, what became of them, and the table at the end.

use core::time::Duration;
use std::io::Write;
use std::time::Instant;

use anyhow::Result;

/// What became of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// It did what its name says. A remark, if there is one.
    Passed(String),
    /// It could not be run, and why.
    NotRun(String),
    /// It needs a nightly compiler, which no machine must have.
    Nightly(String),
}

/// All steps so far.
#[derive(Debug)]
pub(crate) struct Report {
    strict: bool,
    start: Instant,
    steps: Vec<Step>,
}

#[derive(Debug)]
struct Step {
    name: String,
    verdict: Verdict,
    remark: String,
    took: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Passed,
    Failed,
    Skipped,
}

impl Report {
    /// If `strict`, a step that is not run has failed, unless it needs a nightly compiler.
    pub(crate) fn new(strict: bool) -> Self {
        Self {
            strict,
            start: Instant::now(),
            steps: Vec::new(),
        }
    }

    /// Runs a step and prints its line. An error is the step's failure, not the end.
    pub(crate) fn step(&mut self, name: &str, run: impl FnOnce() -> Result<Outcome>) {
        print!("{name:<WIDTH$} ");
        let _ = std::io::stdout().flush();
        let start = Instant::now();
        let outcome = run();
        let took = start.elapsed();
        let (verdict, remark) = match outcome {
            Ok(Outcome::Passed(remark)) => (Verdict::Passed, remark),
            Ok(Outcome::Nightly(why)) => (Verdict::Skipped, format!("not run: {why}")),
            Ok(Outcome::NotRun(why)) if self.strict => (Verdict::Failed, format!("not run: {why}")),
            Ok(Outcome::NotRun(why)) => (Verdict::Skipped, format!("not run: {why}")),
            Err(error) => (Verdict::Failed, format!("{error:#}")),
        };
        println!("{} {:6.1} s  {remark}", verdict.word(), took.as_secs_f64());
        // The table has one line for each step.
        let remark = remark.lines().next().unwrap_or("").to_owned();
        self.steps.push(Step {
            name: name.to_owned(),
            verdict,
            remark,
            took,
        });
    }

    /// Prints the table; whether nothing has failed.
    pub(crate) fn finish(&self) -> bool {
        println!();
        for step in &self.steps {
            println!(
                "{:<WIDTH$} {} {:6.1} s  {}",
                step.name,
                step.verdict.word(),
                step.took.as_secs_f64(),
                step.remark
            );
        }
        println!(
            "{:<WIDTH$}        {:6.1} s\n",
            "in all",
            self.start.elapsed().as_secs_f64()
        );
        println!("{}", self.last_line());
        self.count(Verdict::Failed) == 0
    }

    fn last_line(&self) -> String {
        format!(
            "{} passed, {} failed, {} skipped",
            self.count(Verdict::Passed),
            self.count(Verdict::Failed),
            self.count(Verdict::Skipped)
        )
    }

    fn count(&self, verdict: Verdict) -> usize {
        self.steps
            .iter()
            .filter(|step| step.verdict == verdict)
            .count()
    }
}

impl Verdict {
    const fn word(self) -> &'static str {
        match self {
            Self::Passed => "ok    ",
            Self::Failed => "FAILED",
            Self::Skipped => "-     ",
        }
    }
}

const WIDTH: usize = 40;

#[cfg(test)]
mod tests {
    use super::{Outcome, Report};

    fn after(strict: bool) -> Report {
        let mut report = Report::new(strict);
        report.step("passes", || Ok(Outcome::Passed(String::new())));
        report.step("has no tool", || {
            Ok(Outcome::NotRun("no strace".to_owned()))
        });
        report.step("has no nightly", || {
            Ok(Outcome::Nightly("no nightly".to_owned()))
        });
        report
    }

    #[test]
    fn what_is_not_run_passes_unless_strict() {
        let report = after(false);
        assert_eq!(report.last_line(), "1 passed, 0 failed, 2 skipped");
        assert!(report.finish());
    }

    #[test]
    fn strict_forgives_only_a_missing_nightly() {
        let report = after(true);
        assert_eq!(report.last_line(), "1 passed, 1 failed, 1 skipped");
        assert!(!report.finish());
    }

    #[test]
    fn a_failure_does_not_stop_the_steps_after_it() {
        let mut report = Report::new(false);
        report.step("fails", || anyhow::bail!("as planned"));
        report.step("runs", || Ok(Outcome::Passed(String::new())));
        assert_eq!(report.last_line(), "1 passed, 1 failed, 0 skipped");
        assert!(!report.finish());
    }
}
