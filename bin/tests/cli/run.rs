//! Runs that end well.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

use crate::{COPY, Folder, WORKLOAD, data, json, nodes, o2poll, program, shipped, text};

/// A run that ends well, and its report.
fn spotless(file: &Path) -> (Output, Value) {
    let output = o2poll(&[
        "run".as_ref(),
        file.as_os_str(),
        "--json".as_ref(),
        "-".as_ref(),
    ]);
    let report = json(&output);
    assert_eq!(output.status.code(), Some(0), "{report:#}");
    expect_spotless(&report);
    (output, report)
}

/// What must hold of every run that ended well.
fn expect_spotless(report: &Value) {
    assert_eq!(report["ok"], true, "{report:#}");
    for digest in report["digests"].as_array().unwrap() {
        assert_eq!(digest["found"], digest["expected"]);
    }
    for node in report["nodes"].as_array().unwrap() {
        assert_eq!(node["keys_alive"], 0);
        assert_eq!(node["left_over"], serde_json::json!([]));
        let died = node["invalidations"].as_u64().unwrap()
            + node["remote_invalidations"].as_u64().unwrap();
        let registered: u64 = node["registrations"]
            .as_array()
            .unwrap()
            .iter()
            .map(|count| count.as_u64().unwrap())
            .sum();
        assert_eq!(registered, died, "every key that was made has died");
    }
    // Whatever was submitted has ended once, and well, and was a transfer of the other node.
    let count = |of: &Value, name: &str| of[name].as_u64().unwrap();
    let (mut posted, mut served) = (0, 0);
    for line in report["accounts"].as_array().unwrap() {
        posted += count(line, "posted");
        assert_eq!(
            count(line, "posted"),
            count(line, "puts") + count(line, "gets")
        );
        assert_eq!((count(line, "never"), count(line, "twice")), (0, 0));
    }
    for node in report["nodes"].as_array().unwrap() {
        for core in node["cores"].as_array().unwrap() {
            served += count(core, "peer_transfers");
        }
    }
    assert!(posted > 0);
    assert_eq!(posted, served);
    for thread in report["threads"].as_array().unwrap() {
        assert_eq!(thread["allocations"], 0);
        assert_eq!(thread["frees"], 0);
    }
}

#[test]
fn a_file_in_several_pieces_is_copied_there_and_back_and_a_mix_is_verified() {
    let folder = Folder::new("copy");
    folder.write("data", data(300_001));
    let file = folder.write(
        "nodes.toml",
        nodes("", "4 MiB", &format!("{COPY}{WORKLOAD}")),
    );
    let (_, report) = spotless(&file);
    assert_eq!(report["digests"].as_array().unwrap().len(), 2);
    assert_eq!(report["pings"][0]["ok"], true);
    let transfers = report["transfers"].as_array().unwrap();
    let names: Vec<&str> = transfers
        .iter()
        .map(|line| line["name"].as_str().unwrap())
        .collect();
    assert_eq!(names[..3], ["copy: GET", "copy: PUT", "copy: GET back"]);
    for line in &transfers[..3] {
        assert_eq!(line["bytes"], 300_001);
        // Four pieces of 64 KiB in transfers of at most 40 KiB, two each, and what is left in one.
        assert_eq!(line["transfers"], 9);
        assert!(line["gb_per_s"].as_f64().unwrap() > 0.0);
        assert!(line["p50_us"].as_f64().unwrap() <= line["p99_us"].as_f64().unwrap());
        assert!(line["p99_us"].as_f64().unwrap() <= line["max_us"].as_f64().unwrap());
        assert!(line["work_requests_per_transfer"].as_f64().unwrap() >= 2.0);
    }
    assert_eq!(names[3], "workload");
    assert!(transfers[3]["transfers"].as_u64().unwrap() > 0);
    assert!(report["verifications"][0]["compared"].as_u64().unwrap() > 0);
    assert_eq!(report["verifications"][0]["wrong"], 0);
}

/// Each needs both nodes; and where both have both, WRITE_WITH_IMM goes first.
#[test]
fn extensions_are_used_where_both_nodes_have_them_on() {
    let folder = Folder::new("extensions");
    folder.write("data", data(300_001));
    let on = |invalidate: bool, immediate: bool| {
        format!(
            "[node.extensions]\nsend_with_invalidate = {invalidate}\n\
             write_with_immediate = {immediate}\n"
        )
    };
    for (first, second, invalidates, immediates) in [
        (on(false, false), on(true, true), false, false),
        (on(true, false), on(true, true), true, false),
        (on(false, true), on(true, true), false, true),
        (on(true, true), on(true, true), false, true),
    ] {
        let text = nodes("", "4 MiB", &format!("{second}{COPY}"));
        let nid = "nid = \"10.0.0.1@o2ib\"\n";
        let file = folder.write(
            "nodes.toml",
            text.replacen(nid, &format!("{nid}{first}"), 1),
        );
        let (_, report) = spotless(&file);
        let sum = |name: &str| -> u64 {
            let nodes = report["nodes"].as_array().unwrap();
            nodes
                .iter()
                .flat_map(|node| node["counters"].as_array().unwrap())
                .filter(|counter| counter[0] == name)
                .map(|counter| counter[1].as_u64().unwrap())
                .sum()
        };
        assert_eq!(sum("remote_invalidations") > 0, invalidates, "{text}");
        assert_eq!(sum("write_immediates") > 0, immediates, "{text}");
    }
}

#[test]
fn the_shipped_files_run_and_the_table_is_for_people() {
    for name in ["loopback.toml", "loopback-mlx5.toml"] {
        let file = shipped(name);
        let output = o2poll(&[
            "run".as_ref(),
            file.as_os_str(),
            "--duration".as_ref(),
            "200ms".as_ref(),
        ]);
        let table = text(&output.stdout);
        assert_eq!(
            output.status.code(),
            Some(0),
            "{table}{}",
            text(&output.stderr)
        );
        assert_eq!(table.matches("sha-256 of the file").count(), 2);
        assert!(
            !table.contains("MISMATCH") && !table.contains("FAILED"),
            "{table}"
        );
        for word in [
            "GB/s",
            "p99 us",
            "keys alive",
            "allocations",
            "preemptions",
            "ping",
        ] {
            assert!(table.contains(word), "{word}: {table}");
        }
        // No terminal, no bar.
        assert!(!text(&output.stderr).contains('\r'));
    }
}

#[test]
fn another_file_another_profile_and_no_verification() {
    let folder = Folder::new("override");
    folder.write("data", data(1000));
    let other = folder.write("other", data(70_000));
    let file = folder.write(
        "nodes.toml",
        nodes("", "4 MiB", &format!("{COPY}{WORKLOAD}")),
    );
    let report = folder.0.join("report.json");
    let output = program()
        .arg("run")
        .arg(&file)
        .arg("--export")
        .arg(&other)
        .args([
            "--profile",
            "mlx5",
            "--no-verify",
            "--duration",
            "100ms",
            "--json",
        ])
        .arg(&report)
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stdout));
    assert!(text(&output.stdout).contains("not verified"));
    let report: Value = serde_json::from_slice(&fs::read(report).unwrap()).unwrap();
    expect_spotless(&report);
    assert_eq!(report["device"], "soft mlx5");
    assert_eq!(report["transfers"][0]["bytes"], 70_000);
    assert_eq!(report["verifications"][0]["compared"], 0);
}

#[test]
fn with_one_core_both_nodes_share_a_thread_and_it_is_said() {
    let core = first_allowed_core();
    let folder = Folder::new("one-core");
    folder.write("data", data(100_000));
    let file = folder.write(
        "nodes.toml",
        nodes("", "4 MiB", &format!("{COPY}{WORKLOAD}")),
    );
    let output = Command::new("taskset")
        .args(["-c", &core, env!("CARGO_BIN_EXE_o2poll"), "run"])
        .arg(&file)
        .args(["--json", "-", "-v"])
        .output()
        .unwrap();
    let report = json(&output);
    assert_eq!(output.status.code(), Some(0), "{report:#}");
    expect_spotless(&report);
    assert_eq!(report["threads"].as_array().unwrap().len(), 1);
    assert!(
        report["placement"]
            .as_str()
            .unwrap()
            .contains("share a polling thread")
    );
    assert!(text(&output.stderr).contains("share a polling thread"));
}

#[test]
fn a_small_device_is_used_within_its_limits_and_it_is_said() {
    let folder = Folder::new("small");
    folder.write("data", data(200_000));
    let text_of = nodes("", "4 MiB", &format!("{COPY}{WORKLOAD}")).replace(
        "profile = \"frwr\"",
        "profile = \"frwr\", max_fragments = 4, max_sge = 2, max_send_wr = 40, max_cqe = 128, max_windows = 5",
    );
    let file = folder.write("nodes.toml", text_of);
    let (output, _) = spotless(&file);
    assert!(
        text(&output.stderr).contains("peer_credits is"),
        "{}",
        text(&output.stderr)
    );
}

/// Each profile that has a way to large buffers: page lists, windows, mappings, staging, the arena's key.
#[test]
fn every_profile_moves_the_same_bytes() {
    let folder = Folder::new("profiles");
    folder.write("data", data(200_000));
    let closed = nodes("", "4 MiB", &format!("{COPY}{WORKLOAD}"));
    let exposed = closed.replace("mlock = \"off\"", "mlock = \"off\"\nexposure = \"arena\"");
    let (closed, exposed) = (
        folder.write("closed.toml", closed),
        folder.write("exposed.toml", exposed),
    );
    for (profile, file) in [
        ("mlx5", &closed),
        ("mlx4", &closed),
        ("windows", &closed),
        ("rxe", &closed),
        ("mthca", &closed),
        ("bare", &exposed),
    ] {
        let output = o2poll(&[
            "run".as_ref(),
            file.as_os_str(),
            "--profile".as_ref(),
            profile.as_ref(),
            "--json".as_ref(),
            "-".as_ref(),
        ]);
        assert_eq!(
            output.status.code(),
            Some(0),
            "{profile}: {}",
            text(&output.stderr)
        );
        expect_spotless(&json(&output));
    }
    let refused = o2poll(&[
        "run".as_ref(),
        closed.as_os_str(),
        "--profile".as_ref(),
        "bare".as_ref(),
    ]);
    assert_eq!(refused.status.code(), Some(1));
    let said = text(&refused.stderr);
    assert!(said.contains("--profile bare"), "{said}");
    assert!(said.contains("exposure = \"arena\""), "{said}");
}

fn first_allowed_core() -> String {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    let list = line.unwrap().trim();
    list.split([',', '-']).next().unwrap().to_owned()
}
