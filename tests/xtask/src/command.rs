//! Other programs: run to their end or to a time limit, with their output in a file.

use core::time::Duration;
use std::env;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::IsTerminal;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, bail};

use crate::workspace::Workspace;

/// What a program left behind.
#[derive(Debug)]
pub(crate) struct Finished {
    pub(crate) status: ExitStatus,
    pub(crate) output: String,
    log: PathBuf,
}

impl Finished {
    /// An error with the end of the output, unless the program said that all went well.
    pub(crate) fn success(self) -> Result<Self> {
        if !self.status.success() {
            bail!("{}{}", self.status, self.quote());
        }
        Ok(self)
    }

    /// The end of the output, to follow a message.
    pub(crate) fn quote(&self) -> String {
        let lines: Vec<&str> = self.output.lines().collect();
        let end = lines
            .get(lines.len().saturating_sub(TAIL)..)
            .unwrap_or_default();
        format!(
            "\n  | {}\n  all of it: {}",
            end.join("\n  | "),
            self.log.display()
        )
    }
}

/// Cargo in the root of the workspace, with the toolchain that runs this.
pub(crate) fn cargo(workspace: &Workspace) -> Command {
    let program = env::var_os("CARGO").unwrap_or_else(|| OsString::from("cargo"));
    let mut command = Command::new(program);
    command.current_dir(&workspace.root);
    // Not where the caller's environment says: the steps have to find what they build.
    command.env("CARGO_TARGET_DIR", workspace.root.join("target"));
    command
}

/// Runs a command for at most `limit`. Its output goes to `target/xtask/NAME.log`.
pub(crate) fn run(
    workspace: &Workspace,
    name: &str,
    limit: Duration,
    command: &mut Command,
) -> Result<Finished> {
    let folder = workspace.target("xtask");
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let log = folder.join(format!("{}.log", name.replace([' ', '/'], "-")));
    let file = File::create(&log).with_context(|| format!("cannot write {}", log.display()))?;
    command
        .stdin(Stdio::null())
        .stdout(file.try_clone()?)
        .stderr(file);
    // Of its own group, so that a hung test dies with the cargo that started it. Not under a
    // terminal, whose interrupt key speaks to one group.
    let grouped = !std::io::stdin().is_terminal();
    if grouped {
        command.process_group(0);
    }
    let program = command.get_program().to_string_lossy().into_owned();
    let mut child = command
        .spawn()
        .with_context(|| format!("cannot start {program}"))?;
    let status = wait(&mut child, limit, grouped)?;
    let output = String::from_utf8_lossy(&fs::read(&log)?).into_owned();
    let finished = |status| Finished {
        status,
        output,
        log,
    };
    match status {
        Some(status) => Ok(finished(status)),
        None => {
            let killed = finished(ExitStatus::default());
            bail!("no end after {} s{}", limit.as_secs(), killed.quote())
        }
    }
}

/// `None` if it had to be killed.
fn wait(child: &mut Child, limit: Duration, grouped: bool) -> Result<Option<ExitStatus>> {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if start.elapsed() >= limit {
            break;
        }
        thread::sleep(Duration::from_millis(20));
    }
    if grouped {
        // The shell's own kill: a bare Debian has no other.
        let kill = format!("kill -KILL -{}", child.id());
        let _ = Command::new("sh").args(["-c", &kill]).status();
    }
    child.kill()?;
    child.wait()?;
    Ok(None)
}

/// Enough for a build from nothing on two cores.
pub(crate) const BUILD: Duration = Duration::from_secs(15 * 60);

/// Lines of output that a failure shows.
const TAIL: usize = 40;

#[cfg(test)]
mod tests {
    use super::{Workspace, run};
    use core::time::Duration;
    use std::process::Command;

    #[test]
    fn output_of_both_streams_is_kept_and_a_bad_end_is_an_error() {
        let workspace = Workspace::find().unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", "echo out; echo err >&2; exit 3"]);
        let finished = run(
            &workspace,
            "test of output",
            Duration::from_secs(60),
            &mut command,
        )
        .unwrap();
        assert_eq!(finished.output, "out\nerr\n");
        assert!(
            finished
                .success()
                .unwrap_err()
                .to_string()
                .contains("| err")
        );
    }

    #[test]
    fn what_does_not_end_is_killed() {
        let workspace = Workspace::find().unwrap();
        let mut command = Command::new("sleep");
        command.arg("600");
        let error = run(&workspace, "test of hanging", Duration::ZERO, &mut command).unwrap_err();
        assert!(error.to_string().contains("no end after 0 s"));
    }
}
