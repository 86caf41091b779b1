//! The real program, run as a user runs it.

use core::time::Duration;
use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Instant;

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
    let output = o2poll(&[
        "run".as_ref(),
        file.as_os_str(),
        "--json".as_ref(),
        "-".as_ref(),
    ]);
    let report = json(&output);
    assert_eq!(output.status.code(), Some(0), "{report:#}");
    expect_spotless(&report);
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
        let output = o2poll(&[
            "run".as_ref(),
            file.as_os_str(),
            "--json".as_ref(),
            "-".as_ref(),
        ]);
        let report = json(&output);
        assert_eq!(output.status.code(), Some(0), "{report:#}");
        expect_spotless(&report);
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
    let output = o2poll(&[
        "run".as_ref(),
        file.as_os_str(),
        "--json".as_ref(),
        "-".as_ref(),
    ]);
    let report = json(&output);
    assert_eq!(output.status.code(), Some(0), "{report:#}");
    expect_spotless(&report);
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

#[test]
fn plan_tells_what_a_file_takes_beside_ko2iblnd() {
    let folder = Folder::new("plan");
    folder.write("data", data(10));
    let file = folder.write("nodes.toml", nodes("", "4 MiB", COPY));
    let plan = |more: &[&str]| {
        let mut arguments = vec!["plan", file.to_str().unwrap()];
        arguments.extend(more);
        let output = o2poll(&arguments);
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        output
    };
    let table = text(&plan(&[]).stdout);
    assert!(table.contains("send work requests"), "{table}");
    assert!(table.contains("one core, 1 peer "), "{table}");
    let one = json(&plan(&["--json"]));
    let theirs = &one["connection"]["ko2iblnd"];
    assert_eq!(
        (&theirs["send_wr"], &theirs["receives"], &theirs["cqe"]),
        (&2080.into(), &18.into(), &2098.into())
    );
    let many = json(&plan(&["--json", "--peers", "50"]));
    for (owner, connections) in [("o2poll", 100), ("ko2iblnd", 50)] {
        for (scope, plan) in [("connection", &one), ("core", &one), ("core", &many)] {
            let amounts = &plan[scope][owner];
            let number = |name: &str| amounts[name].as_u64().unwrap();
            let parts = ["message", "list", "queue", "state", "staging"];
            let sum: u64 = parts
                .iter()
                .map(|part| number(&format!("{part}_bytes")))
                .sum();
            assert_eq!(number("bytes"), sum, "{amounts}");
            assert_eq!(number("cqe"), number("send_wr") + number("receives"));
        }
        let (each, all) = (&one["connection"][owner], &many["core"][owner]);
        for name in ["connections", "send_wr", "receives", "cqe", "queue_bytes"] {
            assert_eq!(
                all[name].as_u64().unwrap(),
                connections * each[name].as_u64().unwrap(),
                "{owner} {name}"
            );
        }
    }
    assert!(
        one["connection"]["o2poll"]["send_wr"].as_u64().unwrap()
            < theirs["send_wr"].as_u64().unwrap() / 10
    );
}

/// Keys that outlive their transfers are told of before anything is started.
#[test]
fn plan_tells_what_peers_reach_beyond_their_transfers() {
    let folder = Folder::new("exposure");
    folder.write("data", data(10));
    let plan = |tunables: &str, profile: &str| {
        let text_of = nodes(tunables, "4 MiB", COPY).replace("\"frwr\"", profile);
        let file = folder.write("nodes.toml", text_of);
        let output = o2poll(&["plan".as_ref(), file.as_os_str(), "--json".as_ref()]);
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        json(&output)
    };
    assert_eq!(plan("", "\"frwr\"")["exposure"], Value::Null);
    let few = plan(
        "[tunables]\nfmr_pool_size = 20\nfmr_cache = false",
        "\"mthca\"",
    );
    let said = few["exposure"].as_str().unwrap();
    assert!(
        said.contains("up to 20 keys") && said.contains("until 15 stand"),
        "{said}"
    );
    assert!(said.contains("fmr_cache = false"), "{said}");
    assert_eq!(few["core"]["o2poll"]["windows"], 20);
    let none = plan(
        "exposure = \"arena\"\n[tunables]\nfmr_pool_size = 0",
        "\"mthca\"",
    );
    let said = none["exposure"].as_str().unwrap();
    assert!(
        said.contains("key of the arena") && !said.contains("up to"),
        "{said}"
    );
    let short = plan("", "\"mthca\", max_windows = 5");
    let said = short["notes"][0].as_str().unwrap();
    assert!(said.contains("fmr_pool_size is 5 instead of 512"), "{said}");
}

/// LU-7124, LU-10213, LU-12901: never without a word, and never a depth that the device does not hold.
#[test]
fn a_limit_that_lowers_the_depth_is_named_with_both_depths() {
    let folder = Folder::new("limits");
    folder.write("data", data(10));
    for (limit, least) in [
        ("max_send_wr = 64", "max_send_wr of the device is 64"),
        ("max_recv_wr = 10", "max_recv_wr of the device is 10"),
        ("max_cqe = 100", "max_cqe of the device is 100"),
    ] {
        let text_of = nodes("[tunables]\npeer_credits = 16", "4 MiB", COPY).replace(
            "profile = \"frwr\"",
            &format!("profile = \"frwr\", {limit}"),
        );
        let file = folder.write("nodes.toml", text_of);
        let output = o2poll(&["plan".as_ref(), file.as_os_str(), "--json".as_ref()]);
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        let plan = json(&output);
        let depth = plan["peer_credits"].as_u64().unwrap();
        assert!((1..16).contains(&depth), "{limit}: {depth}");
        let note = plan["notes"][0].as_str().unwrap();
        assert!(note.contains(least), "{note}");
        let both = format!("peer_credits is {depth} instead of 16");
        assert!(note.contains(&both), "{note}");
        assert_eq!(note.lines().count(), 1);
    }
    let text_of =
        nodes("", "4 MiB", COPY).replace("profile = \"frwr\"", "profile = \"frwr\", max_qp = 1");
    let file = folder.write("nodes.toml", text_of);
    let output = o2poll(&["plan".as_ref(), file.as_os_str()]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        text(&output.stderr).contains("max_qp = 1"),
        "{}",
        text(&output.stderr)
    );
}

#[test]
fn devices_tells_what_becomes_of_each_buffer() {
    let table = text(&o2poll(&["devices"]).stdout);
    for said in [
        "soft mlx4",
        "page lists",
        "exposure = \"none\", map_on_demand = 1",
        "staging: ",
    ] {
        assert!(table.contains(said), "{said}: {table}");
    }
    let way = |arguments: &[&str], profile: &str, buffer: &str| -> Value {
        let mut all = vec!["devices", "--json"];
        all.extend(arguments);
        let found = json(&o2poll(&all));
        let device = found["devices"]
            .as_array()
            .unwrap()
            .iter()
            .find(|line| line["name"] == profile);
        let buffers = device.unwrap()["buffers"].as_array().unwrap().clone();
        let line = buffers.into_iter().find(|line| line["buffer"] == buffer);
        line.unwrap()["mechanism"].clone()
    };
    assert_eq!(way(&[], "rxe", "1 MiB contiguous"), "window");
    assert_eq!(way(&[], "rxe", "16 with gaps"), "staging");
    assert_eq!(way(&["--exposed"], "rxe", "16 with gaps"), "arena");
    assert_eq!(
        way(&["--exposed", "--max-frags", "8"], "rxe", "16 with gaps"),
        "staging"
    );
    assert_eq!(way(&["--no-staging"], "rxe", "16 with gaps"), Value::Null);
}

#[test]
fn check_tells_every_mistake_and_run_refuses_with_the_same_text() {
    let folder = Folder::new("check");
    folder.write("data", data(10));
    let good = folder.write(
        "good.toml",
        nodes("", "4 MiB", &format!("{COPY}{WORKLOAD}")),
    );
    let mistakes = nodes(
        "[tunables]\npeer_credits = 7\nidle = \"never\"",
        "4 MiB",
        "",
    );
    let bad = folder.write("bad.toml", mistakes);
    let output = o2poll(&["check".as_ref(), good.as_os_str()]);
    assert_eq!(output.status.code(), Some(0));
    let said = text(&output.stdout);
    assert!(said.contains("good.toml: ok: core"), "{said}");
    assert!(said.contains("MiB of memory for 10.0.0.1@o2ib"), "{said}");
    assert!(said.contains("copies `file` of 10.0.0.1@o2ib"), "{said}");
    let output = o2poll(&["check".as_ref(), good.as_os_str(), bad.as_os_str()]);
    assert_eq!(output.status.code(), Some(1));
    let said = text(&output.stdout);
    assert!(
        said.contains("peer_credits") && said.contains("never"),
        "{said}"
    );
    assert!(
        said.contains("good.toml: ok"),
        "one bad file does not hide the others: {said}"
    );
    let told = o2poll(&["check".as_ref(), bad.as_os_str()]);
    let refused = o2poll(&["run".as_ref(), bad.as_os_str()]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(refused.stdout.is_empty());
    assert_eq!(text(&refused.stderr), text(&told.stdout));
}

#[test]
fn a_region_that_is_too_small_is_refused_before_anything_starts() {
    let folder = Folder::new("region");
    folder.write("data", data(300_000));
    let file = folder.write("nodes.toml", nodes("", "256 KiB", COPY));
    let output = o2poll(&["run".as_ref(), file.as_os_str()]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        text(&output.stderr).contains("scratch"),
        "{}",
        text(&output.stderr)
    );
    // Large enough as a whole, but no slice fits into its pieces: only a run finds that out, and check asks it.
    let large = WORKLOAD.replace("128 KiB", "1 MiB");
    let file = folder.write("pieces.toml", nodes("", "8 MiB", &large));
    for verb in ["check", "run"] {
        let output = o2poll(&[verb.as_ref(), file.as_os_str()]);
        assert_eq!(output.status.code(), Some(1));
        let said = format!("{}{}", text(&output.stdout), text(&output.stderr));
        assert!(said.contains("choose a larger piece"), "{said}");
    }
}

#[test]
fn a_run_is_not_made_whose_report_cannot_be_written_and_no_report_is_lost() {
    let folder = Folder::new("unwritable");
    folder.write("data", data(50_000));
    let file = folder.write("nodes.toml", nodes("", "4 MiB", COPY));
    let run = |json: &Path| {
        o2poll(&[
            "run".as_ref(),
            file.as_os_str(),
            "--json".as_ref(),
            json.as_os_str(),
        ])
    };
    let missing = folder.0.join("none/report.json");
    let output = run(&missing);
    assert_eq!(output.status.code(), Some(3));
    let said = text(&output.stderr);
    assert!(said.contains(missing.to_str().unwrap()), "{said}");
    assert!(output.stdout.is_empty(), "nothing ran");
    // A disk that is full is seen too late.
    let output = run(Path::new("/dev/full"));
    assert_eq!(output.status.code(), Some(5));
    assert!(text(&output.stderr).contains("cannot write the report"));
    assert!(text(&output.stdout).contains("keys alive"));
}

#[test]
fn nothing_that_a_run_reads_is_overwritten() {
    let folder = Folder::new("overwritten");
    let exported = folder.write("data", data(50_000));
    let file = folder.write("nodes.toml", nodes("", "4 MiB", COPY));
    let link = folder.0.join("link");
    std::os::unix::fs::symlink(&exported, &link).unwrap();
    let both = folder.0.join("both");
    for (options, what) in [
        (vec!["--json".as_ref(), file.as_path()], "the node file"),
        (vec!["--pcap".as_ref(), file.as_path()], "the node file"),
        (vec!["--pcap".as_ref(), exported.as_path()], "exported"),
        (vec!["--json".as_ref(), link.as_path()], "exported"),
        (
            vec!["--json".as_ref(), &both, "--pcap".as_ref(), &both],
            "--json and --pcap both",
        ),
    ] {
        let before = (fs::read(&file).unwrap(), fs::read(&exported).unwrap());
        let output = program().arg("run").arg(&file).args(options).output();
        let output = output.unwrap();
        assert_eq!(output.status.code(), Some(1), "{what}");
        let said = text(&output.stderr);
        assert!(said.contains(what), "{said}");
        let after = (fs::read(&file).unwrap(), fs::read(&exported).unwrap());
        assert!(before == after, "{what}");
    }
}

#[test]
fn a_check_that_cannot_be_printed_ends_with_a_status() {
    let folder = Folder::new("unprinted");
    folder.write("data", data(50_000));
    let good = folder.write("good.toml", nodes("", "4 MiB", COPY));
    let bad = folder.write("bad.toml", "nodes = 1");
    for file in [good, bad] {
        let full = fs::OpenOptions::new().write(true).open("/dev/full");
        let output = program()
            .arg("check")
            .arg(file)
            .stdout(full.unwrap())
            .output()
            .unwrap();
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(5), "{said}");
        assert!(said.starts_with("o2poll: cannot print"), "{said}");
    }
}

#[test]
fn a_duration_is_told_its_range() {
    for (given, said) in [
        ("0s", "1ms to 720h"),
        ("999us", "1ms to 720h"),
        ("721h", "1ms to 720h"),
        ("5", "write it as 30s"),
    ] {
        let output = o2poll(&["run", "none.toml", "--duration", given]);
        assert_eq!(output.status.code(), Some(2));
        assert!(text(&output.stderr).contains(said), "{given}");
    }
}

#[test]
fn a_core_that_is_not_allowed_is_refused_with_those_that_are() {
    let folder = Folder::new("core");
    folder.write("data", data(10));
    let text_of = nodes("", "1 MiB", "").replace(
        "nid = \"10.0.0.2@o2ib\"",
        "nid = \"10.0.0.2@o2ib\"\ncores = [1000]",
    );
    let file = folder.write("nodes.toml", text_of);
    let output = o2poll(&["run".as_ref(), file.as_os_str()]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        text(&output.stderr).contains("1000"),
        "{}",
        text(&output.stderr)
    );
}

#[test]
fn memory_that_cannot_be_had_is_told_before_anything_runs() {
    let folder = Folder::new("memory");
    folder.write("data", data(10));
    let text_of = nodes("", "1000 TiB", "")
        .replace("256 KiB", "1 GiB")
        .replace("1000 TiB", "4 TiB");
    let file = folder.write("nodes.toml", text_of);
    let output = o2poll(&["run".as_ref(), file.as_os_str()]);
    assert_eq!(output.status.code(), Some(3), "{}", text(&output.stderr));
    let said = text(&output.stderr);
    assert!(
        said.contains("10.0.0.1@o2ib") && said.contains("ask for less"),
        "{said}"
    );
}

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
            Some(0),
            "the copy had been compared, and the rest drained"
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
        assert!(matches!(status, Some(0 | 130 | 143)), "{status:?}");
        let at_once = status != Some(0);
        if at_once {
            let mut table = String::new();
            assert_eq!(lines.read_line(&mut table).unwrap(), 0, "{table}");
        }
        at_once
    });
    assert!(ended_at_once);
}

#[test]
fn the_shipped_file_is_printed_as_it_is() {
    let output = o2poll(&["config"]);
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(output.stdout, fs::read(shipped("loopback.toml")).unwrap());
    let help = text(&o2poll(&["--help"]).stdout);
    for word in [
        "Examples:",
        "Exit status:",
        "o2poll run config/loopback.toml",
    ] {
        assert!(help.contains(word), "{help}");
    }
    assert_eq!(o2poll(&["no-such-verb"]).status.code(), Some(2));
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

fn first_allowed_core() -> String {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    let list = line.unwrap().trim();
    list.split([',', '-']).next().unwrap().to_owned()
}
