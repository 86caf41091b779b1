//! The cases, and what each must have left behind.

use core::time::Duration;
use std::fs;
use std::path::Path;

use anyhow::{Result, ensure};

use super::guest::Script;
use crate::command::run;
use crate::workspace::Workspace;

/// Something that must hold on a real kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Case {
    pub(crate) script: Script<'static>,
    /// What must hold.
    pub(crate) says: &'static str,
    /// Whether Wireshark is needed.
    pub(crate) tshark: bool,
    /// Looks at what was left in the folder; a remark.
    pub(crate) judge: fn(&Workspace, &Path) -> Result<String>,
}

pub(crate) const CASES: &[Case] = &[
    Case {
        script: Script {
            name: "device",
            text: include_str!("../../guest/device.sh"),
            guests: 1,
            limit: Duration::from_secs(60),
        },
        says: "a guest has rxe0, and its user space finds it",
        tshark: false,
        judge: device,
    },
    Case {
        script: Script {
            name: "wire",
            text: include_str!("../../guest/wire.sh"),
            guests: 2,
            limit: Duration::from_secs(180),
        },
        says: "RoCE between two guests is seen by tcpdump and understood by tshark",
        tshark: true,
        judge: wire,
    },
];

fn device(_: &Workspace, folder: &Path) -> Result<String> {
    let devices = fs::read_to_string(folder.join("devices"))?;
    ensure!(
        devices
            .lines()
            .any(|line| line.split_whitespace().next() == Some("rxe0")),
        "no rxe0 in what ibv_devices wrote"
    );
    Ok(String::new())
}

fn wire(workspace: &Workspace, folder: &Path) -> Result<String> {
    let frames = tshark(
        workspace,
        &folder.join("wire.pcap"),
        &["ip.src", "infiniband.bth.opcode"],
    )?;
    // 10 messages of 4096 bytes each way over a path MTU of 1024: SEND First, Middle, Last are 0, 1, 2.
    for source in ["10.9.0.1", "10.9.0.2"] {
        let last = frames
            .iter()
            .filter(|fields| *fields == &[source, "2"])
            .count();
        ensure!(
            last >= 10,
            "{last} last packets of messages from {source} are in the capture instead of 10"
        );
    }
    Ok(format!("{} frames", frames.len()))
}

/// These fields of each RoCEv2 frame of a capture.
fn tshark(workspace: &Workspace, capture: &Path, fields: &[&str]) -> Result<Vec<Vec<String>>> {
    let mut command = std::process::Command::new("tshark");
    command.arg("-r").arg(capture).args(["-T", "fields"]);
    command.args(["-Y", "infiniband", "-E", "separator=\t"]);
    for field in fields {
        command.args(["-e", field]);
    }
    let finished = run(
        workspace,
        "kernel tshark",
        Duration::from_secs(60),
        &mut command,
    )?
    .success()?;
    Ok(finished
        .output
        .lines()
        .map(|line| line.split('\t').map(str::to_owned).collect())
        .filter(|found: &Vec<String>| found.len() == fields.len())
        .collect())
}
