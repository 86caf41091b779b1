//! Runs that somebody ends.

use core::time::Duration;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use crate::{COPY, Folder, WORKLOAD, data, nodes, program};

#[test]
fn an_interrupt_drains_and_prints() {
    let folder = Folder::new("interrupt");
    folder.write("data", data(50_000));
    let long = WORKLOAD.replace("300ms", "10 min");
    let file = folder.write("nodes.toml", nodes("", "4 MiB", &format!("{COPY}{long}")));
    for signal in ["INT", "TERM"] {
        let (mut child, mut lines) = started(&file);
        kill(&child, signal);
        let status = wait(&mut child, Duration::from_secs(60));
        assert_eq!(
            status,
            Some(7),
            "all that was compared was right, and the workload did not run to its end"
        );
        let mut table = String::new();
        while let Ok(1..) = lines.read_line(&mut table) {}
        assert!(table.contains("interrupted"), "{table}");
        assert!(table.contains("keys alive"), "{table}");
        assert!(
            table.contains("sha-256 of the file as it came back: ok"),
            "{table}"
        );
    }
}

#[test]
fn a_second_interrupt_ends_at_once() {
    let folder = Folder::new("twice");
    folder.write("data", data(50_000));
    let long = WORKLOAD.replace("300ms", "10 min");
    let file = folder.write("nodes.toml", nodes("", "4 MiB", &format!("{COPY}{long}")));
    // Which thread takes which signal is the kernel's choice. Where both are taken at once, neither is the second,
    // and the run drains as after one.
    let ended_at_once = (0..30).any(|_| {
        let (mut child, mut lines) = started(&file);
        // Both are there before it can react to one.
        for signal in ["STOP", "INT", "TERM", "CONT"] {
            kill(&child, signal);
        }
        let status = wait(&mut child, Duration::from_secs(60));
        assert!(matches!(status, Some(7 | 130 | 143)), "{status:?}");
        let at_once = status != Some(7);
        if at_once {
            let mut table = String::new();
            assert_eq!(lines.read_line(&mut table).unwrap(), 0, "{table}");
        }
        at_once
    });
    assert!(ended_at_once);
}

/// A run that has told that its nodes are connected, and the copy is over.
fn started(file: &Path) -> (Child, BufReader<std::process::ChildStdout>) {
    let mut child = program()
        .arg("run")
        .arg(file)
        .arg("-v")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut errors = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    while !line.contains("10.0.0.2@o2ib: workload") {
        line.clear();
        assert_ne!(errors.read_line(&mut line).unwrap(), 0, "it ended early");
    }
    // Whatever else it says must not fill the pipe.
    std::thread::spawn(move || std::io::copy(&mut errors, &mut std::io::sink()));
    let lines = BufReader::new(child.stdout.take().unwrap());
    (child, lines)
}

fn kill(child: &Child, signal: &str) {
    let status = Command::new("kill")
        .args(["-s", signal, &child.id().to_string()])
        .status();
    assert!(status.unwrap().success());
}

fn wait(child: &mut Child, patience: Duration) -> Option<i32> {
    let give_up = Instant::now() + patience;
    while Instant::now() < give_up {
        if let Some(status) = child.try_wait().unwrap() {
            return status.code();
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    child.kill().unwrap();
    panic!("it did not end");
}
