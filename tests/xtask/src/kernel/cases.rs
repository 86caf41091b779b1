//! The cases, and what each must have left behind.

use core::fmt::Write as _;
use core::time::Duration;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use super::accounts;
use super::calls;
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
    /// What has to be built for it; the path of each is in its variable.
    pub(crate) programs: &'static [&'static Program],
    /// Whether Wireshark is needed.
    pub(crate) tshark: bool,
    /// Looks at what was left in the folder; a remark.
    pub(crate) judge: fn(&Workspace, &Path) -> Result<String>,
}

impl Case {
    pub(crate) fn needs(&self, program: &Program) -> bool {
        let mut needed = self.programs.iter();
        needed.any(|needed| needed.variable == program.variable)
    }
}

pub(crate) const CASES: &[Case] = &[
    Case {
        script: Script {
            name: "wire",
            text: include_str!("../../guest/wire.sh"),
            guests: 2,
            limit: Duration::from_secs(360),
        },
        says: "RoCE between two guests is seen by tcpdump and understood by tshark",
        routine: true,
        programs: &[],
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
        says: "a guest has rxe0, its user space finds it, and the verbs driver keeps the laws of the contract there",
        routine: true,
        programs: &[&CONFORMANCE],
        tshark: false,
        judge: conformance,
    },
    Case {
        script: Script {
            name: "transfers",
            text: include_str!("../../guest/transfers.sh"),
            guests: 1,
            limit: Duration::from_secs(600),
        },
        says: "the transfer tests hold on rxe0: the bodies that run on the software device, and the same model beside them",
        routine: true,
        programs: &[&TRANSFERS],
        tshark: false,
        judge: transfers,
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
        programs: &[&O2POLL],
        tshark: false,
        judge: accounted,
    },
    Case {
        script: Script {
            name: "kill",
            text: include_str!("../../guest/kill.sh"),
            guests: 1,
            limit: Duration::from_secs(600),
        },
        says: "a killed process is gone within 5 s, each transfer of its peer ends once, and a target serves the next one",
        routine: true,
        programs: &[&O2POLL],
        tshark: false,
        judge: accounted,
    },
    Case {
        script: Script {
            name: "redial",
            text: include_str!("../../guest/redial.sh"),
            guests: 1,
            limit: Duration::from_secs(600),
        },
        says: "a peer that is killed and comes back is connected again, on two cores and over two connections",
        routine: true,
        programs: &[&O2POLL],
        tshark: false,
        judge: accounted,
    },
    Case {
        script: Script {
            name: "cycles",
            text: include_str!("../../guest/cycles.sh"),
            guests: 1,
            limit: Duration::from_secs(600),
        },
        says: "500 connections that come and go under load leave neither kernel objects nor files nor memory behind",
        routine: true,
        programs: &[&O2POLL, &CYCLES],
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
        routine: true,
        programs: &[&O2POLL],
        tshark: true,
        judge: capture,
    },
    Case {
        script: Script {
            name: "link",
            text: include_str!("../../guest/link.sh"),
            guests: 2,
            limit: Duration::from_secs(600),
        },
        says: "a cable that is cut for 5 s or for longer, or a peer that restarts, costs at most transfers; each \
               ends once, with its data or an error that has a name, data flows again between the same processes, and no key is left over",
        routine: true,
        programs: &[&O2POLL],
        tshark: false,
        judge: accounted,
    },
    Case {
        script: Script {
            name: "calls",
            text: include_str!("../../guest/calls.sh"),
            guests: 1,
            limit: Duration::from_secs(420),
        },
        says: "a doorbell is one system call and a poll none; a transfer costs what it costs on the software device",
        routine: true,
        programs: &[&O2POLL],
        tshark: false,
        judge: calls::judge,
    },
    Case {
        script: Script {
            name: "faults",
            text: include_str!("../../guest/faults.sh"),
            guests: 1,
            limit: Duration::from_secs(480),
        },
        says: "a port that goes down, a device that is taken away and missing rights are told in plain words, and kill nobody",
        routine: true,
        programs: &[&O2POLL],
        tshark: false,
        judge: accounted,
    },
    Case {
        script: Script {
            name: "speed",
            text: include_str!("../../guest/speed.sh"),
            guests: 1,
            limit: Duration::from_secs(300),
        },
        says: "the driver is measured beside raw calls, and windows beside ibv_reg_mr, in at least 30 blocks",
        routine: true,
        programs: &[&BENCH],
        tshark: false,
        judge: speed,
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

pub(crate) const PROGRAMS: &[&Program] = &[&O2POLL, &CONFORMANCE, &TRANSFERS, &CYCLES, &BENCH];

const O2POLL: Program = Program {
    variable: "O2POLL",
    arguments: &["build", "--package=o2poll", "--features=verbs"],
};

const CONFORMANCE: Program = Program {
    variable: "CONFORMANCE",
    arguments: &[
        "test",
        "--no-run",
        "--package=o2poll-hal",
        "--features=verbs",
        "--test=verbs_conformance",
    ],
};

const TRANSFERS: Program = Program {
    variable: "TRANSFERS",
    arguments: &[
        "test",
        "--no-run",
        "--package=o2poll-tests",
        // So that the program is the one that other cases have.
        "--features=verbs,o2poll/verbs",
        "--test=transfers",
    ],
};

const CYCLES: Program = Program {
    variable: "CYCLES",
    arguments: &[
        "test",
        "--no-run",
        "--package=o2poll",
        "--features=verbs",
        "--test=verbs_cycles",
    ],
};

const BENCH: Program = Program {
    variable: "BENCH",
    arguments: &["build", "--package=o2poll-bench", "--features=verbs"],
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

/// As [`output`]; and the reports of both sides say that each transfer has ended once.
fn accounted(workspace: &Workspace, folder: &Path) -> Result<String> {
    let remark = output(workspace, folder)?;
    let accounts = accounts::judge(folder)?;
    Ok(if remark.is_empty() {
        accounts
    } else {
        format!("{remark}; {accounts}")
    })
}

fn conformance(_: &Workspace, folder: &Path) -> Result<String> {
    device(folder)?;
    let text = fs::read_to_string(folder.join("a.output"))?;
    Ok(format!("{} tests", ran_all(&text)?))
}

/// Each test that the program has for a device was run, and what is left out is named.
fn transfers(_: &Workspace, folder: &Path) -> Result<String> {
    let text = fs::read_to_string(folder.join("a.output"))?;
    let passed = ran_all(&text)?;
    let left_out = text.lines().filter(|line| line.starts_with("left out on"));
    let left_out = left_out.count();
    ensure!(left_out > 0, "nothing says what is left out");
    Ok(format!("{passed} tests; left out by name: {left_out}"))
}

/// Of the output of a program that has listed its tests and has run them: how many.
fn ran_all(text: &str) -> Result<u64> {
    let listed = text.lines().filter(|line| line.ends_with(": test")).count() as u64;
    let passed = crate::rust_tests::passed(text).unwrap_or(0);
    ensure!(listed > 0, "the program has no test for a device");
    ensure!(
        passed == listed,
        "{passed} tests have passed, and the program has {listed}"
    );
    ensure!(
        !text.contains("not run:"),
        "tests say that they were not run"
    );
    Ok(passed)
}

/// What both nodes say, as Wireshark's dissector of LNet reads it: the handshake, every kind of message that the job needs,
/// each as long as it says, and the WRITEs between them.
fn capture(workspace: &Workspace, folder: &Path) -> Result<String> {
    let frames = tshark(
        workspace,
        &folder.join("wire.pcap"),
        &[
            "ip.src",
            "infiniband.bth.opcode",
            "lnet.ib.type",
            "lnet.ib.nob",
            "udp.length",
            "lnet.payload_length",
            "_ws.malformed",
        ],
    )?;
    let mut seen: BTreeMap<(&str, &str), u64> = BTreeMap::new();
    for fields in &frames {
        let [source, opcode, kind, nob, length, payload, malformed] = fields.as_slice() else {
            continue;
        };
        // Wireshark 4.0 takes the unused end of a GET_REQ's LNet header for what follows it, and has no place for the payload
        // of a message: a descriptor with many fragments, and bytes left over.
        let misread = kind == "0xd6" || (kind == "0xd1" && payload.parse().unwrap_or(0) > 0);
        ensure!(
            malformed.is_empty() || misread,
            "Wireshark calls a message of type {kind:?}, opcode {opcode}, malformed"
        );
        let what = match (opcode.as_str(), kind.as_str()) {
            (SEND_ONLY, kind) if !kind.is_empty() => {
                // UDP header, base transport header, invariant CRC.
                let carried = length.parse::<u32>()?.saturating_sub(8 + 12 + 4);
                ensure!(
                    nob.parse::<u32>()? == carried,
                    "a message of type {kind} says that it has {nob} bytes, and has {carried}"
                );
                kind
            }
            (_, "") if [WRITE_FIRST, WRITE_ONLY].contains(&opcode.as_str()) => "WRITE",
            (_, kind) => kind,
        };
        *seen.entry((source, what)).or_default() += 1;
    }
    let mut remark = String::new();
    for (source, what, name) in [
        (INITIATOR, "0xc0", "CONNREQ"),
        (TARGET, "0xc1", "CONNACK"),
        (INITIATOR, "0xd1", "IMMEDIATE"),
        (INITIATOR, "0xd2", "PUT_REQ"),
        // PUT_NAK's number is 0xd3, and nothing is refused.
        (TARGET, "0xd4", "PUT_ACK"),
        (INITIATOR, "0xd5", "PUT_DONE"),
        (INITIATOR, "0xd6", "GET_REQ"),
        (TARGET, "0xd7", "GET_DONE"),
        (INITIATOR, "WRITE", "WRITEs"),
        (TARGET, "WRITE", "WRITEs"),
    ] {
        let count = seen.get(&(source, what)).copied().unwrap_or(0);
        ensure!(count > 0, "no {name} from {source}");
        write!(remark, "{count} {name}, ")?;
    }
    let other = seen.keys().find(|(_, what)| *what == "0xd3");
    ensure!(other.is_none(), "a PUT was refused");
    Ok(remark.trim_end_matches(", ").to_owned())
}

/// That enough was measured; how fast is a remark, not a judgement.
fn speed(_: &Workspace, folder: &Path) -> Result<String> {
    let text = fs::read_to_string(folder.join("bench.json"))?;
    let report: Value = serde_json::from_str(&text)?;
    let mut remarks = Vec::new();
    for name in [
        "verbs/device/write",
        "verbs/device/register-4KiB",
        "verbs/device/register-1MiB",
    ] {
        let mut rows = report["rows"].as_array().context("no rows")?.iter();
        let row = rows.find(|row| row["row"] == name);
        let paired = &row.with_context(|| format!("no row {name}"))?["contenders"][1]["paired_ratio_to_ours"];
        let [blocks, p50, low, high] =
            ["blocks", "p50", "low", "high"].map(|key| paired[key].as_f64().unwrap_or(0.0));
        ensure!(blocks >= 30.0, "{name}: {blocks} blocks");
        let what = name.trim_start_matches("verbs/device/");
        remarks.push(format!("{what} {p50:.2} ({low:.2} to {high:.2})"));
    }
    Ok(format!(
        "raw calls, or ibv_reg_mr, over ours: {}",
        remarks.join(", ")
    ))
}

fn device(folder: &Path) -> Result<()> {
    let devices = fs::read_to_string(folder.join("devices"))?;
    ensure!(
        devices
            .lines()
            .any(|line| line.split_whitespace().next() == Some("rxe0")),
        "no rxe0 in what ibv_devices wrote"
    );
    Ok(())
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

const TARGET: &str = "10.9.0.1";
const INITIATOR: &str = "10.9.0.2";

/// Opcodes of RC.
const SEND_ONLY: &str = "4";
const WRITE_FIRST: &str = "6";
const WRITE_ONLY: &str = "10";

#[cfg(test)]
mod tests {
    use super::ran_all;

    #[test]
    fn a_test_that_was_not_run_is_missed() {
        let listed = "rxe::one: test\nrxe::two: test\n\n2 tests, 0 benchmarks\n";
        let result = |passed: u32| format!("test result: ok. {passed} passed; 0 failed\n");
        assert_eq!(ran_all(&format!("{listed}{}", result(2))).unwrap(), 2);
        for text in [
            format!("{listed}{}", result(1)),
            result(2),
            format!("{listed}not run: no device\n{}", result(2)),
            listed.to_owned(),
            String::new(),
        ] {
            assert!(ran_all(&text).is_err(), "{text}");
        }
    }
}
