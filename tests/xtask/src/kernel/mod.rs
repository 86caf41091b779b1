//! A real kernel without hardware: Debian's own, in QEMU, with the software RDMA device `rdma_rxe`.
//!
//! A [`Case`] is a shell script that one guest, or two on one wire, run over the host's root file system, which they
//! see read-only. What a case left in its folder is judged here, on the host.

mod cases;
mod guest;
mod image;

use core::time::Duration;
use std::fs;

use anyhow::{Context, Result, ensure};

use crate::report::{Outcome, Report};
use crate::tools;
use crate::workspace::Workspace;

use cases::{CASES, Case};
use guest::Script;
use image::Image;

/// Runs all cases, or the one of that name.
pub(crate) fn steps(workspace: &Workspace, report: &mut Report, only: Option<&str>) -> Result<()> {
    let chosen: Vec<&Case> = CASES
        .iter()
        .filter(|case| only.is_none_or(|name| name == case.script.name))
        .collect();
    ensure!(!chosen.is_empty(), "no such case; there are\n{}", list());
    let image = prepare(workspace, report);
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
            let folder =
                guest::run(workspace, image, &case.script, &[]).with_context(|| case.says)?;
            Ok(Outcome::Passed(
                (case.judge)(workspace, &folder).with_context(|| case.says)?,
            ))
        });
    }
    Ok(())
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
