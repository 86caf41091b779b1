//! A real kernel without hardware: Debian's own, in QEMU, with the software RDMA device `rdma_rxe`.
//!
//! A [`Case`] is a shell script that one guest, or two on one wire, run over the host's root file system, which they
//! see read-only. What a case left in its folder is judged here, on the host.

mod accounts;
mod cable;
mod calls;
mod cases;
mod guest;
mod image;

use core::time::Duration;
use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};

use crate::command::{BUILD, cargo, run};
use crate::report::{Outcome, Report};
use crate::tools;
use crate::workspace::Workspace;

use cases::{CASES, Case, PROGRAMS, Program};
use guest::Script;
use image::Image;

/// Runs all routine cases, or the one of that name.
pub(crate) fn steps(workspace: &Workspace, report: &mut Report, only: Option<&str>) -> Result<()> {
    let chosen: Vec<&Case> = CASES
        .iter()
        .filter(|case| only.map_or(case.routine, |name| name == case.script.name))
        .collect();
    ensure!(!chosen.is_empty(), "no such case; there are\n{}", list());
    let image = prepare(workspace, report);
    let mut built: Vec<(&'static str, PathBuf)> = Vec::new();
    if image.is_some() {
        for program in PROGRAMS {
            if chosen.iter().any(|case| case.needs(program)) {
                report.step(&format!("kernel: build {}", program.variable), || {
                    built.push((program.variable, build(workspace, program)?));
                    Ok(Outcome::Passed(String::new()))
                });
            }
        }
    }
    for case in chosen {
        report.step(&format!("kernel: {}", case.script.name), || {
            let Some(image) = &image else {
                return Ok(Outcome::NotRun("no guest can be booted".to_owned()));
            };
            if case.tshark
                && let Err(why) = tools::need(workspace, "tshark", "tshark")?
            {
                return Ok(Outcome::NotRun(why));
            }
            ensure!(
                case.programs
                    .iter()
                    .all(|needed| built.iter().any(|(built, _)| *built == needed.variable)),
                "its program was not built"
            );
            let folder =
                guest::run(workspace, image, &case.script, &built).with_context(|| case.says)?;
            Ok(Outcome::Passed(
                (case.judge)(workspace, &folder).with_context(|| case.says)?,
            ))
        });
    }
    Ok(())
}

/// Builds a program for guests; its path.
fn build(workspace: &Workspace, program: &Program) -> Result<PathBuf> {
    let mut command = cargo(workspace);
    command.args(program.arguments);
    command.args(["--release", "--message-format=json-render-diagnostics"]);
    command.env("CARGO_TARGET_DIR", workspace.target("verbs"));
    // Fat LTO costs minutes and changes nothing that is looked at.
    command.env("CARGO_PROFILE_RELEASE_LTO", "off");
    command.env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16");
    let name = format!("kernel build {}", program.variable);
    let finished = run(workspace, &name, BUILD, &mut command)?.success()?;
    let path = executable(&finished.output).context("cargo names no executable")?;
    // A file of its own: the next build writes over cargo's, and a guest that runs it would crash.
    let folder = workspace.target("kernel").join("programs");
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let (partly, kept) = (folder.join("partly"), folder.join(program.variable));
    fs::copy(path, &partly)
        .and_then(|_| fs::rename(&partly, &kept))
        .with_context(|| format!("cannot copy {path}"))?;
    Ok(kept)
}

/// The last executable in cargo's messages.
fn executable(messages: &str) -> Option<&str> {
    let (_, rest) = messages.rsplit_once("\"executable\":\"")?;
    Some(rest.split_once('"')?.0)
}

/// Runs somebody's own script in one guest that has rxe0, and shows its output.
pub(crate) fn script(workspace: &Workspace, report: &mut Report, path: &str) -> Result<()> {
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {path}"))?;
    let image = prepare(workspace, report);
    let script = Script {
        name: "script",
        text: &format!("one_guest\n{text}"),
        guests: 1,
        limit: Duration::from_secs(600),
    };
    report.step("kernel: script", || {
        let Some(image) = &image else {
            return Ok(Outcome::NotRun("no guest can be booted".to_owned()));
        };
        let folder = guest::run(workspace, image, &script, &[])?;
        println!();
        print!("{}", fs::read_to_string(folder.join("a.output"))?);
        Ok(Outcome::Passed(String::new()))
    });
    Ok(())
}

/// The names of all cases and what each is about.
pub(crate) fn list() -> String {
    CASES
        .iter()
        .map(|case| format!("  {:<14}  {}\n", case.script.name, case.says))
        .collect()
}

fn prepare(workspace: &Workspace, report: &mut Report) -> Option<Image> {
    let mut image = None;
    report.step("kernel: what boots", || {
        if let Err(why) = tools::packages(workspace, PACKAGES)? {
            return Ok(Outcome::NotRun(why));
        }
        match Image::prepare(workspace)? {
            Ok(made) => {
                let remark = format!("{} {}", made.package, made.version);
                image = Some(made);
                Ok(Outcome::Passed(remark))
            }
            Err(why) => Ok(Outcome::NotRun(why)),
        }
    });
    image
}

/// What the host needs: QEMU, what a guest's first steps need, and user space's side of RDMA with its headers.
const PACKAGES: &[&str] = &[
    "qemu-system-x86",
    "busybox-static",
    "kmod",
    "iproute2",
    "python3-venv",
    "tcpdump",
    "strace",
    "rdma-core",
    "ibverbs-providers",
    "ibverbs-utils",
    "libibverbs-dev",
    "librdmacm-dev",
    "libclang-dev",
];

#[cfg(test)]
mod tests {
    use super::executable;

    #[test]
    fn the_program_is_the_last_that_cargo_names() {
        let messages = "{\"executable\":null}\n{\"executable\":\"/a/b\"}\n{\"executable\":\"/a/c\",\"fresh\":true}\n\
                        {\"reason\":\"build-finished\"}\n";
        assert_eq!(executable(messages), Some("/a/c"));
        assert_eq!(executable("{\"executable\":null}"), None);
    }
}
