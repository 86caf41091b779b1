//! The link-time proof, its planted mistakes, and the lines behind a proof that fails.

use core::time::Duration;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::command::{BUILD, Finished, cargo, run};
use crate::report::{Outcome, Report};
use crate::tools;
use crate::workspace::Workspace;

/// Links and runs the probe, then demands that no planted mistake links.
pub(crate) fn steps(workspace: &Workspace, report: &mut Report) {
    report.step("probe", || {
        let finished = build(workspace, &[])?;
        if undefined(&finished.output, PANIC) {
            bail!(
                "something can panic; `cargo xtask locate` says where{}",
                finished.quote()
            );
        }
        finished.success()?;
        let mut command = Command::new(program(workspace));
        run(
            workspace,
            "probe run",
            Duration::from_secs(60),
            &mut command,
        )?
        .success()?;
        Ok(Outcome::Passed(String::new()))
    });
    for (plant, expected) in PLANTS {
        report.step(&format!("probe control {plant}"), || {
            let finished = build(workspace, &[plant])?;
            ensure!(
                !finished.status.success(),
                "the planted mistake links: the probe proves nothing"
            );
            let found = match expected {
                Expected::Panic => undefined(&finished.output, PANIC),
                Expected::Message(message) => finished.output.contains(message),
            };
            ensure!(
                found,
                "it fails, but for another reason{}",
                finished.quote()
            );
            Ok(Outcome::Passed("does not link, as it must".to_owned()))
        });
    }
}

/// The names of the planted mistakes.
pub(crate) fn plants() -> Vec<&'static str> {
    PLANTS.iter().map(|(plant, _)| *plant).collect()
}

/// Prints the source lines that can panic; whether there are none.
pub(crate) fn locate(workspace: &Workspace, plants: &[&str]) -> Result<bool> {
    let known = self::plants();
    if let Some(wrong) = plants.iter().find(|plant| !known.contains(plant)) {
        bail!("no such plant: `{wrong}`; there are {}", known.join(", "));
    }
    for program in ["objdump", "addr2line"] {
        if let Err(why) = tools::need(workspace, program, "binutils")? {
            bail!("{why}");
        }
    }
    let features: Vec<&str> = ["locate"]
        .into_iter()
        .chain(plants.iter().copied())
        .collect();
    build(workspace, &features)?.success()?;
    let program = program(workspace);
    let mut objdump = Command::new("objdump");
    objdump.args(["--disassemble", "--no-show-raw-insn", "--demangle"]);
    let listing = output(objdump.arg(&program))?;
    let calls = panicking_calls(&listing);
    if calls.is_empty() {
        println!("no call into the panicking parts of core");
        return Ok(true);
    }
    let mut addr2line = Command::new("addr2line");
    addr2line.args(["--inlines", "--functions", "--demangle", "--addresses"]);
    let lines = output(addr2line.arg("--exe").arg(&program).args(&calls))?;
    for (place, times) in places(&lines) {
        // As people know it: from the root of the repository.
        let root = format!("{}/", workspace.root.display());
        println!("{times:4}  {}", place.replace(&root, ""));
    }
    Ok(false)
}

fn build(workspace: &Workspace, features: &[&str]) -> Result<Finished> {
    let name = format!("probe build {}", features.join(" "));
    let mut command = cargo(workspace);
    command.args([
        "build",
        "--release",
        "--manifest-path=tests/probe/Cargo.toml",
    ]);
    command.args(["--features", &features.join(",")]);
    // Flags from outside, such as another linker or overflow checks, would prove something else.
    command
        .env_remove("RUSTFLAGS")
        .env("CARGO_TARGET_DIR", workspace.target("probe"));
    run(workspace, name.trim(), BUILD, &mut command)
}

fn program(workspace: &Workspace) -> PathBuf {
    workspace.target("probe").join("release/o2poll-probe")
}

fn output(command: &mut Command) -> Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command
        .output()
        .with_context(|| format!("cannot start {name}"))?;
    ensure!(output.status.success(), "{name}: {}", output.status);
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Whether a linker misses `symbol`: "undefined symbol" says lld, "undefined reference to" GNU ld.
fn undefined(output: &str, symbol: &str) -> bool {
    output
        .lines()
        .any(|line| line.contains("undefined ") && line.contains(symbol))
}

/// Addresses of the calls and jumps from elsewhere into the panicking parts of `core`.
fn panicking_calls(listing: &str) -> Vec<&str> {
    let mut inside = false;
    let mut calls = Vec::new();
    for line in listing.lines() {
        if line.ends_with(">:") {
            inside = is_panic(line);
        } else if !inside
            && let Some((address, code)) = line.split_once(":\t")
            && let Some((operation, target)) = code.split_once(char::is_whitespace)
            && (operation.starts_with(['c', 'j']) || operation.starts_with('b'))
            && is_panic(target)
        {
            calls.push(address.trim());
        }
    }
    calls
}

fn is_panic(symbol: &str) -> bool {
    PANICKING.iter().any(|room| symbol.contains(room))
}

/// From the output of addr2line: for each address the innermost lines of this repository, counted.
fn places(lines: &str) -> BTreeMap<String, usize> {
    let mut places = BTreeMap::new();
    for block in lines.split("\n0x") {
        let frames: Vec<&str> = block.lines().skip(1).collect();
        let ours: Vec<String> = frames
            .chunks_exact(2)
            .filter_map(|frame| match frame {
                [function, place] => Some((function, place)),
                _ => None,
            })
            .filter(|(_, place)| !place.contains("/rustc/") && !place.contains("/rustlib/"))
            .map(|(function, place)| format!("{place} in {function}"))
            .take(2)
            .collect();
        let place = if ours.is_empty() {
            frames.join(" ")
        } else {
            ours.join("\n        from ")
        };
        *places.entry(place).or_insert(0) += 1;
    }
    places
}

/// What a planted mistake must be stopped by.
#[derive(Clone, Copy, Debug)]
enum Expected {
    Panic,
    Message(&'static str),
}

const PLANTS: [(&str, Expected); 7] = [
    ("plant-index", Expected::Panic),
    ("plant-slice", Expected::Panic),
    ("plant-copy", Expected::Panic),
    ("plant-divide", Expected::Panic),
    ("plant-unwrap", Expected::Panic),
    ("plant-overflow", Expected::Panic),
    (
        "plant-alloc",
        Expected::Message("no global memory allocator found"),
    ),
];

/// What the probe's panic handler calls, and nobody defines.
const PANIC: &str = "dataplane_hot_path_can_panic";

/// In the names of the functions of `core` that do not come back.
const PANICKING: [&str; 5] = [
    "core::panicking::",
    "core::cell::panic",
    "_fail>",
    "_fail::",
    "_failed>",
];

#[cfg(test)]
mod tests {
    use super::{panicking_calls, places, undefined};

    #[test]
    fn both_linkers_are_understood() {
        for output in [
            "rust-lld: error: undefined symbol: dataplane_hot_path_can_panic",
            "main.rs:39: undefined reference to `dataplane_hot_path_can_panic'",
        ] {
            assert!(undefined(output, "dataplane_hot_path_can_panic"));
        }
        assert!(!undefined(
            "error: cannot find dataplane_hot_path_can_panic",
            "dataplane_hot_path_can_panic"
        ));
        assert!(!undefined(
            "undefined symbol: memcpy",
            "dataplane_hot_path_can_panic"
        ));
    }

    #[test]
    fn calls_into_panics_are_found_but_not_those_among_panics() {
        let listing = "\
0000000000001000 <o2poll_dataplane::pool::Pool<T>::insert>:
    1000:\tpush   %rax
    1001:\tcall   2000 <core::panicking::panic_bounds_check>
    1006:\tcall   3000 <memcpy>
0000000000002000 <core::panicking::panic_bounds_check>:
    2000:\tcall   2100 <core::panicking::panic_fmt>
";
        assert_eq!(panicking_calls(listing), ["1001"]);
    }

    #[test]
    fn a_place_is_the_innermost_line_of_ours_and_its_caller() {
        let lines = "\
0x0000000000001001
index
/rustc/abc/library/core/src/slice/mod.rs:1
insert
/src/dataplane/src/pool.rs:150
keep
/src/tests/probe/src/rooms.rs:20
0x0000000000001009
index
/rustc/abc/library/core/src/slice/mod.rs:1
insert
/src/dataplane/src/pool.rs:150
keep
/src/tests/probe/src/rooms.rs:20
";
        let places = places(lines);
        assert_eq!(places.len(), 1);
        let (place, times) = places.first_key_value().unwrap();
        assert_eq!(*times, 2);
        assert!(
            place.starts_with("/src/dataplane/src/pool.rs:150 in insert\n"),
            "{place}"
        );
    }
}
