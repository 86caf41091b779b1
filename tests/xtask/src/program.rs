//! The program itself: its shipped files, one run over the loopback, and what that run asks of the
//! kernel.

use core::time::Duration;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::command::{BUILD, cargo, run};
use crate::report::{Outcome, Report};
use crate::tools;
use crate::workspace::{Workspace, files};

pub(crate) fn steps(workspace: &Workspace, report: &mut Report) {
    report.step("program", || {
        run(
            workspace,
            "program",
            BUILD,
            cargo(workspace).args(["build", "--release"]),
        )?
        .success()?;
        Ok(Outcome::Passed(String::new()))
    });
    report.step("shipped node files", || {
        let names = files(&workspace.root.join("config"), |name| {
            name.ends_with(".toml") && name != "Cargo.toml"
        });
        if names.is_empty() {
            return Ok(Outcome::NotRun("no node files in config/".to_owned()));
        }
        for name in &names {
            let file = Path::new("config").join(name);
            let check = format!("check {name}");
            run(
                workspace,
                &check,
                RUN,
                o2poll(workspace).arg("check").arg(file),
            )?
            .success()
            .with_context(|| name.clone())?;
        }
        Ok(Outcome::Passed(format!("{} files", names.len())))
    });
    report.step("a broken node file is refused", || {
        let broken = workspace.target("xtask").join("broken.toml");
        fs::write(&broken, "no_such_key = 1\n")?;
        let finished = run(
            workspace,
            "check broken",
            RUN,
            o2poll(workspace).arg("check").arg(&broken),
        )?;
        ensure!(
            !finished.status.success(),
            "it was accepted{}",
            finished.quote()
        );
        ensure!(
            finished.output.contains("no_such_key"),
            "the key is not named{}",
            finished.quote()
        );
        Ok(Outcome::Passed(String::new()))
    });
    report.step("loopback run", || {
        if !workspace.root.join(LOOPBACK).is_file() {
            return Ok(Outcome::NotRun(format!("no {LOOPBACK}")));
        }
        let finished = run(
            workspace,
            "loopback",
            RUN,
            o2poll(workspace).args(["run", LOOPBACK]),
        )?
        .success()?;
        let allocations = allocations(&finished.output);
        ensure!(
            !allocations.is_empty(),
            "it does not say how often its polling threads allocated{}",
            finished.quote()
        );
        ensure!(
            allocations.iter().all(|count| *count == "0"),
            "its polling threads have allocated{}",
            finished.quote()
        );
        let threads = allocations.len();
        Ok(Outcome::Passed(format!("{threads} threads, no allocation")))
    });
    report.step("no system call in steady state", || steady_state(workspace));
}

/// Runs the microbenchmarks on this terminal.
pub(crate) fn bench(workspace: &Workspace, arguments: &[&str]) -> Result<bool> {
    let mut command = cargo(workspace);
    command
        .args(["run", "--release", "--package=o2poll-bench", "--"])
        .args(arguments);
    Ok(command.status()?.success())
}

fn steady_state(workspace: &Workspace) -> Result<Outcome> {
    if !workspace.root.join(LOOPBACK).is_file() {
        return Ok(Outcome::NotRun(format!("no {LOOPBACK}")));
    }
    if let Err(why) = tools::need(workspace, "strace", "strace")? {
        return Ok(Outcome::NotRun(why));
    }
    let folder = workspace.target("xtask").join("strace");
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder)?;
    let mut command = Command::new("strace");
    command.current_dir(&workspace.root);
    // One file per thread, with the time of each call.
    command
        .args(["-ff", "-ttt", "-o"])
        .arg(folder.join("thread"));
    command.arg(path(workspace)).args(["run", LOOPBACK]);
    run(workspace, "strace", RUN, &mut command)?.success()?;
    let mut polling = 0_usize;
    for name in files(&folder, |_| true) {
        let trace = fs::read_to_string(folder.join(&name))?;
        // A polling core is a thread that has pinned itself.
        if !trace.contains(" sched_setaffinity(") {
            continue;
        }
        polling += 1;
        let calls = in_the_middle(&trace).with_context(|| format!("{name} is too short"))?;
        if let Some(call) = calls.first() {
            bail!(
                "{} calls by one polling core, the first: {call}",
                calls.len()
            );
        }
    }
    ensure!(polling > 0, "no thread has pinned itself");
    Ok(Outcome::Passed(format!("{polling} polling cores")))
}

/// The calls of one thread, as `strace -ttt` writes them, in the middle half of its life. Giving way
/// to another thread is not counted: an idle core does so where threads outnumber cores.
fn in_the_middle(trace: &str) -> Option<Vec<&str>> {
    let calls: Vec<(f64, &str)> = trace
        .lines()
        .filter_map(|line| {
            let (time, call) = line.split_once(' ')?;
            Some((time.parse().ok()?, call))
        })
        .collect();
    let (first, last) = (calls.first()?.0, calls.last()?.0);
    let life = last - first;
    (life > 0.0).then(|| {
        calls
            .iter()
            .filter(|(time, call)| {
                let age = (time - first) / life;
                (0.25..0.75).contains(&age) && !call.starts_with("sched_yield(")
            })
            .map(|(_, call)| *call)
            .collect()
    })
}

/// The second column of the table of polling threads.
fn allocations(output: &str) -> Vec<&str> {
    output
        .lines()
        .skip_while(|line| !line.starts_with("polling thread  allocations"))
        .skip(1)
        .map_while(|line| line.strip_prefix("core ")?.split_whitespace().nth(1))
        .collect()
}

fn o2poll(workspace: &Workspace) -> Command {
    let mut command = Command::new(path(workspace));
    command.current_dir(&workspace.root);
    command
}

fn path(workspace: &Workspace) -> PathBuf {
    workspace.target("release").join("o2poll")
}

/// Two nodes in one process, over the software device.
const LOOPBACK: &str = "config/loopback.toml";

/// Longer than any run of a shipped file takes.
const RUN: Duration = Duration::from_secs(120);

#[cfg(test)]
mod tests {
    use super::{allocations, in_the_middle};

    #[test]
    fn allocations_are_read_from_the_table_at_the_end() {
        let output = "\
node  left over
10.0.0.1@o2ib  nothing

polling thread  allocations  preemptions  yields
core 0                    0          338       0
core 11                  17          299       0
";
        assert_eq!(allocations(output), ["0", "17"]);
        assert!(allocations("core 0  0\n").is_empty());
    }

    #[test]
    fn only_calls_in_the_middle_half_count_and_yields_do_not() {
        let trace = "\
100.0 sched_setaffinity(0, 128, [1]) = 0
101.0 mmap(NULL, 4096) = 0x7f
104.0 sched_yield() = 0
105.0 futex(0x7f, FUTEX_WAIT) = 0
109.0 munmap(0x7f, 4096) = 0
110.0 +++ exited with 0 +++
";
        assert_eq!(
            in_the_middle(trace).unwrap(),
            ["futex(0x7f, FUTEX_WAIT) = 0"]
        );
        assert_eq!(in_the_middle("").map(|calls| calls.len()), None);
        assert_eq!(
            in_the_middle("100.0 exit(0) = ?\n").map(|calls| calls.len()),
            None
        );
    }
}
