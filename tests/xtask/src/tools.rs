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
    install(workspace, &[package])?;
    if present(program) {
        Ok(Ok(()))
    } else {
        Ok(Err(format!("apt-get could not install {package}")))
    }
}

/// Makes sure of Debian packages; which are not there, if some are not.
pub(crate) fn packages(workspace: &Workspace, packages: &[&str]) -> Result<Result<(), String>> {
    if !present("dpkg-query") || !present("apt-get") {
        return Ok(Err("this is not a Debian".to_owned()));
    }
    let missing = missing(packages)?;
    if missing.is_empty() {
        return Ok(Ok(()));
    }
    if !is_root() {
        return Ok(Err(format!("missing packages: {}", missing.join(" "))));
    }
    install(workspace, &missing)?;
    match self::missing(packages)? {
        none if none.is_empty() => Ok(Ok(())),
        some => Ok(Err(format!("apt-get could not install {}", some.join(" ")))),
    }
}

/// Those that are not installed.
fn missing<'p>(packages: &[&'p str]) -> Result<Vec<&'p str>> {
    // Complains about those that it does not know, and lists the others.
    let listed = Command::new("dpkg-query")
        .args(["--show", "--showformat=${Package} ${db:Status-Status}\\n"])
        .args(packages)
        .output()?;
    let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
    Ok(packages
        .iter()
        .copied()
        .filter(|package| {
            !listed
                .lines()
                .any(|line| line == format!("{package} installed"))
        })
        .collect())
}

fn install(workspace: &Workspace, packages: &[&str]) -> Result<()> {
    let apt = |arguments: &[&str]| {
        let name = format!("apt {}", packages.first().unwrap_or(&""));
        let mut command = Command::new("apt-get");
        command
            .env("DEBIAN_FRONTEND", "noninteractive")
            .args(arguments);
        run(workspace, &name, BUILD, &mut command)
    };
    let mut install = vec!["install", "--yes", "--no-install-recommends"];
    install.extend(packages);
    // The lists of a fresh machine are empty, those of another old.
    if !apt(&install)?.status.success() {
        apt(&["update"])?;
        apt(&install)?;
    }
    Ok(())
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
    use super::{missing, present};

    #[test]
    fn packages_that_nobody_has_are_missing() {
        if !present("dpkg-query") {
            return;
        }
        assert_eq!(
            missing(&["dpkg", "no-such-package"]).unwrap(),
            ["no-such-package"]
        );
    }

    #[test]
    fn programs_are_looked_for_on_the_path() {
        assert!(present("sh"));
        assert!(!present("no-such-program"));
    }
}
