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
    /// Whether it is run when no case is named. Others have not been seen to pass yet.
    pub(crate) routine: bool,
    /// What has to be built for it; its path is in the variable.
    pub(crate) program: Option<&'static Program>,
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
            limit: Duration::from_secs(180),
        },
        says: "a guest has rxe0, and its user space finds it",
        routine: true,
        program: None,
        tshark: false,
        judge: device,
    },
    Case {
        script: Script {
            name: "wire",
            text: include_str!("../../guest/wire.sh"),
            guests: 2,
            limit: Duration::from_secs(360),
        },
        says: "RoCE between two guests is seen by tcpdump and understood by tshark",
        routine: true,
        program: None,
        tshark: true,
        judge: wire,
    },
    Case {
        script: Script {
            name: "conformance",
            text: include_str!("../../guest/conformance.sh"),
            guests: 1,
            limit: Duration::from_secs(600),
        },
        says: "the verbs driver keeps the laws of the contract on rxe0",
        routine: true,
        program: Some(&CONFORMANCE),
        tshark: false,
        judge: conformance,
    },
    Case {
        script: Script {
            name: "pair",
            text: include_str!("../../guest/pair.sh"),
            guests: 1,
            limit: Duration::from_secs(480),
        },
        says: "two processes ping, get, put, copy a file and run a workload, and the kernel holds nothing after",
        routine: true,
        program: Some(&O2POLL),
        tshark: false,
        judge: output,
    },
    Case {
        script: Script {
            name: "kill",
            text: include_str!("../../guest/kill.sh"),
            guests: 1,
            limit: Duration::from_secs(600),
        },
        says: "a killed process is gone within 5 s, its peer names what happened, and a target serves the next one",
        routine: true,
        program: Some(&O2POLL),
        tshark: false,
        judge: output,
    },
    Case {
        script: Script {
            name: "redial",
            text: include_str!("../../guest/redial.sh"),
            guests: 1,
            limit: Duration::from_secs(600),
        },
        says: "a peer that is killed and comes back is connected again, on two cores and over two connections",
        routine: false,
        program: Some(&O2POLL),
        tshark: false,
        judge: output,
    },
    Case {
        script: Script {
            name: "cycles",
            text: include_str!("../../guest/cycles.sh"),
            guests: 1,
            limit: Duration::from_secs(480),
        },
        says: "connecting and disconnecting leaves neither kernel objects nor files behind",
        routine: true,
        program: Some(&O2POLL),
        tshark: false,
        judge: output,
    },
    Case {
        script: Script {
            name: "capture",
            text: include_str!("../../guest/capture.sh"),
            guests: 2,
            limit: Duration::from_secs(300),
        },
        says: "two nodes on two machines; Wireshark reads what they say to each other",
        routine: false,
        program: Some(&O2POLL),
        tshark: true,
        judge: capture,
    },
    Case {
        script: Script {
            name: "link",
            text: include_str!("../../guest/link.sh"),
            guests: 2,
            limit: Duration::from_secs(300),
        },
        says: "a link that is down for 5 s costs time only; one that is down for longer ends connections, not processes",
        routine: false,
        program: Some(&O2POLL),
        tshark: false,
        judge: output,
    },
];

/// Something that is built before guests boot; they see the host's files.
#[derive(Debug)]
pub(crate) struct Program {
    /// The variable of scripts that names it.
    pub(crate) variable: &'static str,
    /// What cargo is asked for.
    pub(crate) arguments: &'static [&'static str],
}

pub(crate) const O2POLL: Program = Program {
    variable: "O2POLL",
    arguments: &["build", "--package=o2poll", "--features=verbs"],
};

pub(crate) const CONFORMANCE: Program = Program {
    variable: "CONFORMANCE",
    arguments: &[
        "test",
        "--no-run",
        "--package=o2poll-hal",
        "--features=verbs",
        "--test=verbs_conformance",
    ],
};

/// What the script printed last that is worth a remark: it has judged by itself.
fn output(_: &Workspace, folder: &Path) -> Result<String> {
    let text = fs::read_to_string(folder.join("a.output"))?;
    ensure!(!text.is_empty(), "the script has printed nothing");
    Ok(text
        .lines()
        .rfind(|line| line.contains("REMARK: "))
        .and_then(|line| line.split_once("REMARK: "))
        .map_or_else(String::new, |(_, remark)| remark.to_owned()))
}

fn conformance(_: &Workspace, folder: &Path) -> Result<String> {
    let text = fs::read_to_string(folder.join("a.output"))?;
    let passed = crate::rust_tests::passed(&text).unwrap_or(0);
    ensure!(passed > 0, "not one test was run");
    ensure!(
        !text.contains("not run:"),
        "tests say that they were not run"
    );
    Ok(format!("{passed} tests"))
}

/// What both nodes say, as Wireshark's dissector of LNet reads it.
fn capture(workspace: &Workspace, folder: &Path) -> Result<String> {
    let frames = tshark(
        workspace,
        &folder.join("wire.pcap"),
        &[
            "ip.src",
            "infiniband.bth.opcode",
            "lnet.msg_type",
            "_ws.malformed",
        ],
    )?;
    let of = |source: &str, test: &dyn Fn(&[String]) -> bool| {
        frames
            .iter()
            .filter(|fields| fields.first().is_some_and(|found| found == source) && test(fields))
            .count()
    };
    let is = |at: usize, value: &'static str| {
        move |fields: &[String]| fields.get(at).is_some_and(|found| found == value)
    };
    ensure!(
        frames
            .iter()
            .all(|fields| fields.get(3).is_none_or(String::is_empty)),
        "Wireshark calls frames malformed"
    );
    let mut remark = Vec::new();
    for source in ["10.9.0.1", "10.9.0.2"] {
        let lnet = of(source, &|fields: &[String]| {
            fields.get(2).is_some_and(|kind| !kind.is_empty())
        });
        ensure!(lnet > 0, "Wireshark finds no LNet message from {source}");
        // RDMA WRITE First is 6, Only is 10.
        let writes = of(source, &is(1, "6")) + of(source, &is(1, "10"));
        ensure!(writes > 0, "no RDMA WRITE from {source}");
        remark.push(format!("{source}: {lnet} messages, {writes} WRITEs"));
    }
    Ok(remark.join("; "))
}

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
    command.args([
        "-Y",
        "infiniband",
        "-E",
        "separator=/t",
        "-E",
        "occurrence=f",
    ]);
    // Other protocols claim the same messages by guessing.
    for other in ["rpcordma", "iser", "nvme-rdma", "smb_direct", "smc"] {
        command.args(["--disable-protocol", other]);
    }
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
        .filter(|line| line.contains('\t'))
        .map(|line| line.split('\t').map(str::to_owned).collect())
        .filter(|found: &Vec<String>| found.len() == fields.len())
        .collect())
}
