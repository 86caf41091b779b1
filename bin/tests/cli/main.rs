//! The real program, run as a user runs it.

mod interrupt;
mod limits;
mod plan;
mod refuse;
mod run;

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

/// A folder of this test, gone when the test is.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("o2poll-cli-{}-{name}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn write(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.join(name);
        fs::write(&path, content).unwrap();
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn program() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_o2poll"));
    command.stdin(Stdio::null());
    command
}

fn o2poll<S: AsRef<OsStr>>(arguments: &[S]) -> Output {
    program().args(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn shipped(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../config")
        .join(name)
}

/// Two nodes, with whatever else is to be in the file. `head` stands before the first node, `jobs` in the second.
fn nodes(head: &str, region: &str, jobs: &str) -> String {
    format!(
        r#"
[device]
soft = {{ profile = "frwr" }}
[memory]
huge_pages = "off"
mlock = "off"
{head}
[[node]]
nid = "10.0.0.1@o2ib"
[[node.export]]
name = "file"
portal = 50
match_bits = 0x10
file = "data"
piece = "64 KiB"
[[node.export]]
name = "scratch"
portal = 51
match_bits = 0x1
size = "{region}"
piece = "256 KiB"
writable = true
[[node]]
nid = "10.0.0.2@o2ib"
{jobs}
"#
    )
}

const COPY: &str = r#"
[node.copy]
peer = "10.0.0.1@o2ib"
file = "file"
into = "scratch"
transfer = "40 KiB"
"#;

const WORKLOAD: &str = r#"
[node.workload]
peer = "10.0.0.1@o2ib"
region = "scratch"
sizes = ["1 KiB", "4001", "128 KiB"]
in_flight = 8
duration = "300ms"
"#;

fn data(length: usize) -> Vec<u8> {
    let mut state = 1_u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    (0..length).map(|_| next()).collect()
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}{}", text(&output.stdout), text(&output.stderr)))
}
