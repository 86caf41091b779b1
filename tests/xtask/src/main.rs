//! The task runner: `cargo xtask VERB`. Its verbs are in [`HELP`].
//!
//! A verb is a list of steps ([`report`]). Every step runs whatever became of the others, prints one
//! line, and leaves its output under `target/xtask`.

mod command;
mod fuzz;
mod kernel;
mod lint;
mod probe;
mod program;
mod report;
mod rust_tests;
mod tools;
mod workspace;

use std::env;
use std::io::Write as _;
use std::process::ExitCode;

use anyhow::{Context, Result, bail, ensure};

use crate::report::Report;
use crate::workspace::Workspace;

fn main() -> ExitCode {
    let words: Vec<String> = env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match verb(&words) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::from(2)
        }
    }
}

/// Does what is asked; whether all of it went well.
fn verb(words: &[&str]) -> Result<bool> {
    let workspace = Workspace::find()?;
    if let Some(mut text) = help(words) {
        text += &match words.first() {
            Some(&"fuzz") => format!("\ntargets: {}\n", fuzz::known(&workspace).join(", ")),
            Some(&"kernel") => format!("\ncases:\n{}", kernel::list()),
            Some(&"locate") => format!("\nplants: {}\n", probe::plants().join(", ")),
            _ => String::new(),
        };
        // Who closes the pipe has seen enough.
        let _ = std::io::stdout().write_all(text.as_bytes());
        return Ok(true);
    }
    match *words {
        ["test"] => test(&workspace, Report::new(false)),
        ["test", "--strict"] => test(&workspace, Report::new(true)),
        ["ci"] => {
            let mut report = Report::new(true);
            lint::steps(&workspace, &mut report);
            test(&workspace, report)
        }
        ["probe"] => {
            let mut report = Report::new(false);
            probe::steps(&workspace, &mut report);
            Ok(report.finish())
        }
        ["locate", ref features @ ..] => probe::locate(&workspace, features),
        ["loom"] => {
            let mut report = Report::new(false);
            rust_tests::loom(&workspace, &mut report);
            Ok(report.finish())
        }
        ["program"] => {
            let mut report = Report::new(false);
            program::steps(&workspace, &mut report);
            Ok(report.finish())
        }
        ["sanitize"] => {
            let mut report = Report::new(false);
            rust_tests::sanitizers(&workspace, &mut report);
            Ok(report.finish())
        }
        ["fuzz", ref words @ ..] => {
            let asked = fuzz::Asked::parse(words, &fuzz::known(&workspace))?;
            let mut report = Report::new(false);
            fuzz::targets(&workspace, &mut report, asked);
            Ok(report.finish())
        }
        ["wireshark"] => {
            let mut report = Report::new(false);
            rust_tests::wireshark(&workspace, &mut report);
            Ok(report.finish())
        }
        ["kernel", ref words @ ..] => kernel_verb(&workspace, words),
        ["bench", ref arguments @ ..] => program::bench(&workspace, arguments),
        _ => bail!(
            "no such task: `{}`\n\n{}",
            words.join(" "),
            words
                .first()
                .and_then(|verb| usage(verb))
                .unwrap_or_else(|| HELP.to_owned())
        ),
    }
}

/// What is printed for who asks for help: of a verb, if it is named.
fn help(words: &[&str]) -> Option<String> {
    let asks = |word: &&str| matches!(*word, "--help" | "-h");
    let verb = match *words {
        [] | ["help"] => return Some(HELP.to_owned()),
        ["help", verb] => verb,
        [first, ..] if asks(&first) => return Some(HELP.to_owned()),
        [verb, ref rest @ ..] if rest.iter().any(asks) => verb,
        _ => return None,
    };
    Some(usage(verb).unwrap_or_else(|| HELP.to_owned()))
}

/// What [`HELP`] says of a verb: lines that begin with it, and those that go on.
fn usage(verb: &str) -> Option<String> {
    let mut text = String::new();
    let mut ours = false;
    for line in HELP.lines() {
        if !line.starts_with("   ") {
            ours = line.split_whitespace().next() == Some(verb) && line.starts_with("  ");
        }
        if ours {
            text.push_str(line);
            text.push('\n');
        }
    }
    (!text.is_empty()).then(|| format!("cargo xtask VERB\n\n{text}"))
}

fn test(workspace: &Workspace, mut report: Report) -> Result<bool> {
    rust_tests::steps(workspace, &mut report);
    rust_tests::loom(workspace, &mut report);
    probe::steps(workspace, &mut report);
    program::steps(workspace, &mut report);
    rust_tests::wireshark(workspace, &mut report);
    rust_tests::sanitizers(workspace, &mut report);
    fuzz::steps(workspace, &mut report);
    kernel::steps(workspace, &mut report, None)?;
    Ok(report.finish())
}

fn kernel_verb(workspace: &Workspace, words: &[&str]) -> Result<bool> {
    let (mut strict, mut case, mut script) = (false, None, None);
    let mut words = words.iter().copied();
    while let Some(word) = words.next() {
        match word {
            "--strict" => strict = true,
            "--case" => case = Some(words.next().context("--case NAME")?),
            "--script" => script = Some(words.next().context("--script FILE")?),
            _ => bail!(
                "kernel [--strict] [--case NAME | --script FILE], with NAME one of\n{}",
                kernel::list()
            ),
        }
    }
    ensure!(
        case.is_none() || script.is_none(),
        "--case or --script, not both"
    );
    let mut report = Report::new(strict);
    match script {
        Some(path) => kernel::script(workspace, &mut report, path)?,
        None => kernel::steps(workspace, &mut report, case)?,
    }
    Ok(report.finish())
}

const HELP: &str = "\
cargo xtask VERB

  test            every test: cargo's, loom models, the link-time probe with its planted mistakes,
                  shipped node files, a loopback run, the wire as Wireshark reads it. Installs
                  what is missing with apt-get if run as root; what cannot be run is listed and passes
  test --strict   the same, and what was not run fails, except for parts that need a nightly compiler
  ci              formatting, lints, documentation, then test --strict
  probe           the link-time proof that the data plane cannot panic or allocate
  locate [PLANT]  the source lines that can panic, for a probe that does not link
  loom            the loom models of the rings
  program         the program: shipped node files, a loopback run, its system calls
  sanitize        what crosses threads under the thread sanitizer; needs a nightly compiler
  fuzz [SECONDS] [TARGET]
                  the fuzz targets, each for so long; needs a nightly compiler and cargo-fuzz
  wireshark       captures of two nodes, judged by tshark
  kernel [--strict] [--case NAME]
                  all cases, or one, on a real kernel: Debian's in QEMU, with the software RDMA device
                  rdma_rxe. Downloads that kernel; installs nothing of it
  kernel --script FILE
                  a shell script of yours in such a guest, in which rxe0 exists
  bench [ARGS]    the microbenchmarks
";

#[cfg(test)]
mod tests {
    use super::{HELP, help, usage};

    #[test]
    fn help_is_given_for_every_verb_wherever_it_is_asked_for() {
        let verbs = [
            "test",
            "ci",
            "probe",
            "locate",
            "loom",
            "program",
            "sanitize",
            "fuzz",
            "wireshark",
            "kernel",
            "bench",
        ];
        for verb in verbs {
            let text = usage(verb).unwrap();
            assert!(text.contains(&format!("\n  {verb} ")), "{text}");
            for words in [
                &[verb, "--help"] as &[_],
                &[verb, "-h"],
                &["help", verb],
                &[verb, "5", "--help"],
            ] {
                assert_eq!(help(words).as_ref(), Some(&text), "{words:?}");
            }
            assert_eq!(help(&[verb]), None);
        }
        assert_eq!(usage("kernel").unwrap().lines().count(), 7);
        for words in [
            &[] as &[_],
            &["help"],
            &["--help"],
            &["-h"],
            &["nonsense", "-h"],
        ] {
            assert_eq!(help(words).as_deref(), Some(HELP), "{words:?}");
        }
        assert_eq!(help(&["kernel", "--case", "x"]), None);
    }
}
