//! The fuzz targets, for a while.

use core::time::Duration;
use std::fs;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::command::{BUILD, run};
use crate::report::{Outcome, Report};
use crate::tools;
use crate::workspace::{Workspace, files};

/// Runs every target for a few seconds from its corpus.
pub(crate) fn steps(workspace: &Workspace, report: &mut Report) {
    // One seed: whoever reads of a failure sees the same inputs go in, and a change is judged by what it changed.
    all(workspace, report, SHORT, None, Some(1));
}

/// Runs one target or all of them, each for so long, with inputs that no run had before.
pub(crate) fn targets(workspace: &Workspace, report: &mut Report, asked: Asked<'_>) {
    all(workspace, report, asked.seconds, asked.target, None);
}

/// What is to be run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Asked<'a> {
    seconds: u64,
    target: Option<&'a str>,
}

impl<'a> Asked<'a> {
    /// `[SECONDS] [TARGET]`, with one of the known targets.
    pub(crate) fn parse(words: &[&'a str], known: &[String]) -> Result<Self> {
        let (seconds, target) = match *words {
            [] => (SHORT, None),
            [first] => match first.parse() {
                Ok(seconds) => (seconds, None),
                Err(_) => (SHORT, Some(first)),
            },
            [seconds, target] => {
                let parsed = seconds.parse();
                let wrong = || format!("`{seconds}` is no number of seconds: {USAGE}");
                (parsed.with_context(wrong)?, Some(target))
            }
            _ => bail!("{USAGE}"),
        };
        if let Some(target) = target
            && !known.iter().any(|known| known == target)
        {
            bail!(
                "no such target: `{target}`; there are {}: {USAGE}",
                known.join(", ")
            );
        }
        Ok(Self { seconds, target })
    }
}

/// The names of the targets.
pub(crate) fn known(workspace: &Workspace) -> Vec<String> {
    let sources = files(&workspace.root.join(FOLDER).join("fuzz_targets"), |name| {
        name.ends_with(".rs")
    });
    let names = sources.iter().map(|name| name.trim_end_matches(".rs"));
    names.map(str::to_owned).collect()
}

fn all(
    workspace: &Workspace,
    report: &mut Report,
    seconds: u64,
    only: Option<&str>,
    seed: Option<u32>,
) {
    let mut missing = None;
    report.step("fuzz build", || {
        missing = why_not();
        if let Some(why) = &missing {
            return Ok(Outcome::Nightly(why.clone()));
        }
        build(workspace)?;
        Ok(Outcome::Passed(String::new()))
    });
    if missing.is_some() {
        return;
    }
    for target in known(workspace) {
        if only.is_none_or(|only| only == target) {
            report.step(&format!("fuzz {target}"), || {
                fuzz(workspace, &target, seconds, seed)
            });
        }
    }
}

/// What is missing, if anything.
fn why_not() -> Option<String> {
    if !cfg!(all(target_arch = "x86_64", target_os = "linux")) {
        return Some("only for x86-64 Linux".to_owned());
    }
    if !tools::nightly() {
        return Some("no nightly compiler".to_owned());
    }
    let present = Command::new("cargo")
        .args(["+nightly", "fuzz", "--version"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success());
    (!present).then(|| "no cargo-fuzz: `cargo install cargo-fuzz`".to_owned())
}

fn build(workspace: &Workspace) -> Result<()> {
    let mut command = Command::new("cargo");
    command.current_dir(&workspace.root);
    command.args(["+nightly", "fuzz", "build", "--fuzz-dir", FOLDER]);
    command.args(["--target", TRIPLE]);
    command.env_remove("CARGO").env_remove("RUSTUP_TOOLCHAIN");
    command.env("CARGO_TARGET_DIR", workspace.target("fuzz"));
    run(workspace, "fuzz build", BUILD, &mut command)?.success()?;
    Ok(())
}

fn fuzz(workspace: &Workspace, target: &str, seconds: u64, seed: Option<u32>) -> Result<Outcome> {
    // What is new goes here, and not into the repository.
    let found = workspace.target("xtask").join("fuzz").join(target);
    fs::create_dir_all(&found).with_context(|| format!("cannot make {}", found.display()))?;
    let program = workspace
        .target("fuzz")
        .join(TRIPLE)
        .join("release")
        .join(target);
    let mut command = Command::new(program);
    command.current_dir(&workspace.root);
    command.arg(&found);
    command.arg(workspace.root.join(FOLDER).join("corpus").join(target));
    command.arg(format!("-max_total_time={seconds}"));
    // Nought lets libFuzzer choose.
    command.arg(format!("-seed={}", seed.unwrap_or(0)));
    command.arg(format!("-artifact_prefix={}/", found.display()));
    // Rings and pools are lent for ever where a check does not take them back.
    command.args(["-detect_leaks=0", "-print_final_stats=1"]);
    command.args(["-max_len=4096", "-len_control=0", "-timeout=60"]);
    let limit = Duration::from_secs(seconds.saturating_add(GRACE));
    let finished = run(workspace, &format!("fuzz {target}"), limit, &mut command)?;
    if !finished.status.success() {
        let panic = finished
            .output
            .lines()
            .skip_while(|line| !line.contains("panicked at"))
            .take(2)
            .collect::<Vec<_>>()
            .join(": ");
        bail!(
            "{panic}; the input is in {}{}",
            found.display(),
            finished.quote()
        );
    }
    let runs = runs(&finished.output).context("it did not say how often it ran")?;
    if runs == 0 {
        bail!("not one run{}", finished.quote());
    }
    Ok(Outcome::Passed(format!("{runs} runs")))
}

fn runs(output: &str) -> Option<u64> {
    output.lines().find_map(|line| {
        line.strip_prefix("stat::number_of_executed_units:")?
            .trim()
            .parse()
            .ok()
    })
}

/// Seconds for each target where nobody says.
const SHORT: u64 = 8;

const USAGE: &str = "cargo xtask fuzz [SECONDS] [TARGET]";

/// To read a corpus, and to finish the last run.
const GRACE: u64 = 120;

const FOLDER: &str = "tests/fuzz";
const TRIPLE: &str = "x86_64-unknown-linux-gnu";

#[cfg(test)]
mod tests {
    use super::{Asked, SHORT, runs};

    #[test]
    fn wrong_words_are_refused_before_anything_is_built() {
        let known = ["conn", "message"].map(str::to_owned);
        let parse = |words: &[&'static str]| Asked::parse(words, &known);
        let asked = |seconds, target| Asked { seconds, target };
        assert_eq!(parse(&[]).unwrap(), asked(SHORT, None));
        assert_eq!(parse(&["30"]).unwrap(), asked(30, None));
        assert_eq!(parse(&["conn"]).unwrap(), asked(SHORT, Some("conn")));
        assert_eq!(parse(&["5", "message"]).unwrap(), asked(5, Some("message")));
        for (words, said) in [
            (
                &["con"] as &[_],
                "no such target: `con`; there are conn, message",
            ),
            (&["--max"], "no such target: `--max`"),
            (&["5", "x"], "no such target: `x`"),
            (&["message", "5"], "`message` is no number of seconds"),
            (&["5", "conn", "message"], "fuzz [SECONDS] [TARGET]"),
        ] {
            let error = format!("{:#}", parse(words).unwrap_err());
            assert!(error.contains(said), "{words:?}: {error}");
            assert!(error.contains("[SECONDS] [TARGET]"), "{words:?}: {error}");
        }
    }

    #[test]
    fn the_number_of_runs_is_read_as_libfuzzer_writes_it() {
        let output =
            "Done\nstat::number_of_executed_units: 4680\nstat::average_exec_per_sec:     76\n";
        assert_eq!(runs(output), Some(4680));
        assert_eq!(runs("INFO: Seed: 1\n"), None);
    }
}
