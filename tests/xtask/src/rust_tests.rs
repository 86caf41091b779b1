//! What cargo tests: the workspace, the loom models, and the rings under a sanitizer.

use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::command::{BUILD, Finished, cargo, run};
use crate::report::{Outcome, Report};
use crate::tools;
use crate::workspace::{Workspace, files};

/// Every test with the checks of the test profile, and those of the `no_std` crates once more as they
/// are shipped: without overflow checks.
pub(crate) fn steps(workspace: &Workspace, report: &mut Report) {
    report.step("tests", || {
        tests(
            workspace,
            "tests",
            cargo(workspace).args(["test", "--workspace", "--no-fail-fast"]),
        )
    });
    report.step("tests as shipped", || {
        let mut command = cargo(workspace);
        command.args(["test", "--release", "--no-fail-fast"]);
        command.args(["--package=o2poll-dataplane", "--package=o2poll-soft"]);
        // Fat LTO for every test program costs minutes and changes nothing they see.
        command.env("CARGO_PROFILE_RELEASE_LTO", "off");
        command.env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16");
        command.env("CARGO_TARGET_DIR", workspace.target("shipped"));
        tests(workspace, "tests as shipped", &mut command)
    });
}

/// What two nodes say to each other, dissected by Wireshark.
pub(crate) fn wireshark(workspace: &Workspace, report: &mut Report) {
    report.step("wireshark", || {
        if let Err(why) = tools::need(workspace, "tshark", "tshark")? {
            return Ok(Outcome::NotRun(why));
        }
        let mut command = cargo(workspace);
        command.args([
            "test",
            "--package=o2poll-tests",
            "--features=wireshark",
            "--test=wireshark",
        ]);
        tests(workspace, "wireshark", &mut command)
    });
}

/// Every `tests/loom_*.rs` of a member.
pub(crate) fn loom(workspace: &Workspace, report: &mut Report) {
    let mut none = true;
    for member in &workspace.members {
        let models = files(&member.folder.join("tests"), |name| {
            name.starts_with("loom_") && name.ends_with(".rs")
        });
        for model in models {
            none = false;
            let model = model.trim_end_matches(".rs");
            let name = format!("loom {}", model.trim_start_matches("loom_"));
            report.step(&name, || {
                let mut command = cargo(workspace);
                command.args([
                    "test",
                    "--release",
                    "--package",
                    &member.package,
                    "--test",
                    model,
                ]);
                command.env("RUSTFLAGS", "--cfg loom");
                command.env("CARGO_TARGET_DIR", workspace.target("loom"));
                command.env("CARGO_PROFILE_RELEASE_LTO", "off");
                tests(workspace, &name, &mut command)
            });
        }
    }
    if none {
        report.step("loom", || {
            Ok(Outcome::NotRun("no member has tests/loom_*.rs".to_owned()))
        });
    }
}

/// What crosses threads, under ThreadSanitizer; and a planted race, which it must see.
pub(crate) fn sanitizers(workspace: &Workspace, report: &mut Report) {
    let mut step = |name: &str, run: &dyn Fn(&str) -> Result<Outcome>| {
        report.step(name, || {
            if !cfg!(all(target_arch = "x86_64", target_os = "linux")) {
                return Ok(Outcome::Nightly("only for x86-64 Linux".to_owned()));
            }
            if !tools::nightly() {
                return Ok(Outcome::Nightly("no nightly compiler".to_owned()));
            }
            run(name)
        });
    };
    step("thread sanitizer", &|name| {
        let mut command = sanitized(workspace, "tsan", "");
        command.args([
            "--tests",
            "--package=o2poll-dataplane",
            "--package=o2poll-soft",
        ]);
        tests(workspace, name, &mut command)
    });
    step("thread sanitizer two cores", &|name| {
        let mut command = sanitized(workspace, "tsan", "");
        command.args(TWO_CORES);
        tests(workspace, name, &mut command)
    });
    step("thread sanitizer control", &|name| {
        let mut command = sanitized(workspace, "tsan-plant", PLANT);
        command.args(TWO_CORES);
        let finished = run(workspace, name, BUILD, &mut command)?;
        ensure!(
            !finished.status.success(),
            "a message published without Release goes unnoticed: the sanitizer proves nothing"
        );
        ensure!(
            is_race(&finished.output),
            "it fails, but for another reason{}",
            finished.quote()
        );
        Ok(Outcome::Passed("the planted race is seen".to_owned()))
    });
}

/// `cargo test` of a build with ThreadSanitizer, in a target folder of its own.
fn sanitized(workspace: &Workspace, folder: &str, flags: &str) -> Command {
    let suppressions = workspace.root.join("tests/xtask/tsan.supp");
    let mut command = Command::new("cargo");
    command.current_dir(&workspace.root);
    command.args(["+nightly", "test", "--target=x86_64-unknown-linux-gnu"]);
    command.env_remove("CARGO").env_remove("RUSTUP_TOOLCHAIN");
    let sanitizer = "-Zsanitizer=thread -Cunsafe-allow-abi-mismatch=sanitizer";
    command.env("RUSTFLAGS", format!("{sanitizer} {flags}"));
    command.env(
        "TSAN_OPTIONS",
        format!("suppressions={}", suppressions.display()),
    );
    command.env("CARGO_TARGET_DIR", workspace.target(folder));
    command
}

/// Whether the sanitizer saw a race over a slot of the lap ring.
fn is_race(output: &str) -> bool {
    let mut reports = output.split("WARNING: ThreadSanitizer: data race").skip(1);
    reports.any(|report| report.contains("ring/lap.rs"))
}

/// Two pollers on two threads.
const TWO_CORES: [&str; 2] = ["--package=o2poll-tests", "--test=two_cores"];

/// The lap word is stored Relaxed.
const PLANT: &str = "--cfg o2poll_plant=\"lap\"";

/// Runs `cargo test`; how many tests passed.
fn tests(workspace: &Workspace, name: &str, command: &mut Command) -> Result<Outcome> {
    let finished = run(workspace, name, BUILD, command)?;
    if !finished.status.success() {
        return Err(anyhow::anyhow!("{}", failures(&finished)));
    }
    let passed = passed(&finished.output).context("cargo test printed no result")?;
    ensure!(passed > 0, "not one test was run{}", finished.quote());
    Ok(Outcome::Passed(format!("{passed} tests")))
}

/// The names of the tests that failed, which may stand far above the end of the output.
fn failures(finished: &Finished) -> String {
    let failed: Vec<&str> = finished
        .output
        .lines()
        .filter(|line| line.starts_with("test ") && line.ends_with("... FAILED"))
        .collect();
    let panics: Vec<&str> = finished
        .output
        .lines()
        .filter(|line| line.contains("panicked at") || line.starts_with("WARNING: ThreadSanitizer"))
        .collect();
    format!(
        "{}\n{}\n{}{}",
        finished.status,
        failed.join("\n"),
        panics.join("\n"),
        finished.quote()
    )
}

/// The sum over all lines `test result: ok. N passed; ...`; `None` if there is none.
pub(crate) fn passed(output: &str) -> Option<u64> {
    let counts: Vec<u64> = output
        .lines()
        .filter_map(|line| {
            let rest = line.strip_prefix("test result: ok. ")?;
            rest.split_once(" passed")?.0.parse().ok()
        })
        .collect();
    (!counts.is_empty()).then(|| counts.iter().sum())
}

#[cfg(test)]
mod tests {
    use super::{is_race, passed};

    #[test]
    fn passed_tests_are_summed_over_all_programs() {
        let output = "running 2 tests\ntest result: ok. 2 passed; 0 failed; 0 ignored\n\
                      test result: ok. 40 passed; 0 failed\nother\n";
        assert_eq!(passed(output), Some(42));
        assert_eq!(passed("error: no such package"), None);
    }

    #[test]
    fn only_a_race_over_the_lap_ring_is_the_planted_one() {
        let race = |place: &str| {
            format!("==1==\nWARNING: ThreadSanitizer: data race (pid=1)\n  #0 push {place}:9\n")
        };
        assert!(is_race(&race("dataplane/src/ring/lap.rs")));
        assert!(!is_race(&race("library/std/src/thread.rs")));
        assert!(!is_race("dataplane/src/ring/lap.rs: error\n"));
    }
}
