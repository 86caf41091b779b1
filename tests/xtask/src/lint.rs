//! What a reviewer should not have to say: format, lints, documentation.

use std::process::Command;

use crate::command::{BUILD, cargo, run};
use crate::report::{Outcome, Report};
use crate::workspace::Workspace;

pub(crate) fn steps(workspace: &Workspace, report: &mut Report) {
    let mut check = |name: &str, command: &mut Command| {
        report.step(name, || {
            run(workspace, name, BUILD, command)?.success()?;
            Ok(Outcome::Passed(String::new()))
        });
    };
    let cargo = |arguments: &[&str]| {
        let mut command = cargo(workspace);
        command.args(arguments);
        command
    };
    let locked = ["metadata", "--locked", "--format-version=1"];
    check("lock file", &mut cargo(&locked));
    check("lock file probe", cargo(&locked).arg(PROBE));
    check("lock file fuzz", cargo(&locked).arg(FUZZ));
    check("format", &mut cargo(&["fmt", "--all", "--check"]));
    check("format probe", &mut cargo(&["fmt", PROBE, "--check"]));
    check("format fuzz", &mut cargo(&["fmt", FUZZ, "--check"]));
    check(
        "clippy workspace",
        &mut cargo(&[
            "clippy",
            "--workspace",
            "--all-targets",
            "--",
            "-D",
            "warnings",
        ]),
    );
    // One by one too: in the workspace a crate sees features that only a neighbour has asked for.
    // Its dependencies have a line of their own.
    for member in &workspace.members {
        let package = &member.package;
        let mut command = cargo(&["clippy", "--package", package, "--all-targets", "--no-deps"]);
        check(
            &format!("clippy {package}"),
            command.args(["--", "-D", "warnings"]),
        );
    }
    check(
        "clippy probe",
        cargo(&["clippy", PROBE, "--release", "--", "-D", "warnings"])
            .env("CARGO_TARGET_DIR", workspace.target("probe")),
    );
    check(
        "documentation",
        cargo(&["doc", "--workspace", "--no-deps"]).env("RUSTDOCFLAGS", "-D warnings"),
    );
}

const PROBE: &str = "--manifest-path=tests/probe/Cargo.toml";
const FUZZ: &str = "--manifest-path=tests/fuzz/Cargo.toml";
