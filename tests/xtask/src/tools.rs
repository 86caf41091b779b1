//! Programs that are not Rust's: whether they are there, and getting them.

use std::env;
use std::process::{Command, Stdio};

use anyhow::Result;

use crate::command::{BUILD, run};
use crate::workspace::Workspace;

/// Makes sure of a program; why it is not there, if it is not.
pub(crate) fn need(
    workspace: &Workspace,
    program: &str,
    package: &str,
) -> Result<Result<(), String>> {
    if present(program) {
        return Ok(Ok(()));
    }
    if !is_root() || !present("apt-get") {
        return Ok(Err(format!(
            "no {program}; it is in Debian's package {package}"
        )));
    }
    let apt = |arguments: &[&str]| {
        let name = format!("apt {package}");
        let mut command = Command::new("apt-get");
        command
            .env("DEBIAN_FRONTEND", "noninteractive")
            .args(arguments);
        run(workspace, &name, BUILD, &mut command)
    };
    let install = ["install", "--yes", "--no-install-recommends", package];
    // The lists of a fresh machine are empty, those of another old.
    if !apt(&install)?.status.success() {
        apt(&["update"])?;
        apt(&install)?;
    }
    if present(program) {
        Ok(Ok(()))
    } else {
        Ok(Err(format!("apt-get could not install {package}")))
    }
}

/// Whether there is a nightly compiler.
pub(crate) fn nightly() -> bool {
    Command::new("cargo")
        .args(["+nightly", "--version"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

fn present(program: &str) -> bool {
    env::var_os("PATH")
        .is_some_and(|path| env::split_paths(&path).any(|folder| folder.join(program).is_file()))
}

fn is_root() -> bool {
    Command::new("id")
        .arg("-u")
        .output()
        .is_ok_and(|output| output.stdout == b"0\n")
}

#[cfg(test)]
mod tests {
    use super::present;

    #[test]
    fn programs_are_looked_for_on_the_path() {
        assert!(present("sh"));
        assert!(!present("no-such-program"));
    }
}
