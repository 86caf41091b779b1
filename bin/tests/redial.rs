//! Connections that are lost while jobs run: what fails ends once, and the jobs go on over new ones.

use core::sync::atomic::AtomicBool;
use core::time::Duration;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use o2poll::config::{Config, Machine};
use o2poll::dataplane::nic::Status;
use o2poll::dataplane::wire::Nid;
use o2poll::{
    Control, Faults, Finished, Job, NodeError, Options, Progress, Report, Verdict, Watcher, run,
};

const SERVER: Nid = Nid::o2ib([10, 0, 0, 1], 0);
const CLIENT: Nid = Nid::o2ib([10, 0, 0, 2], 0);
const PATIENCE: Duration = Duration::from_secs(60);

/// A server with a file and a region, and a client with the given jobs.
fn config(folder: &Folder, tunables: &str, nodes: [&str; 2], jobs: &str) -> Config {
    let text = format!(
        r#"
device = {{ soft = {{ profile = "frwr" }} }}
memory = {{ huge_pages = "off", mlock = "off" }}
tunables = {{ {tunables} }}
[[node]]
nid = "{SERVER}"
{}
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
size = "8 MiB"
writable = true
[[node]]
nid = "{CLIENT}"
{}
{jobs}
"#,
        nodes[0], nodes[1]
    );
    Config::parse(&text, &folder.0.join("nodes.toml"), &Machine::this())
        .unwrap_or_else(|report| panic!("{report}"))
}

const COPY: &str = r#"
[node.copy]
peer = "10.0.0.1@o2ib"
file = "file"
into = "scratch"
transfer = "8 KiB"
"#;

fn workload(more: &str) -> String {
    format!(
        r#"
[node.workload]
peer = "10.0.0.1@o2ib"
region = "scratch"
sizes = ["1 KiB", "4001", "128 KiB"]
in_flight = 16
{more}
"#
    )
}

/// A folder of this test with a file in it, gone when the test is.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path =
            std::env::temp_dir().join(format!("o2poll-redial-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        let data: Vec<u8> = (0..700_001_u32).map(|n| (n.wrapping_mul(n) >> 7) as u8).collect();
        std::fs::write(path.join("data"), data).unwrap();
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Keeps what is said.
#[derive(Default)]
struct Ear(Vec<String>);

impl Watcher for Ear {
    fn line(&mut self, text: &str, _: bool) {
        self.0.push(text.to_owned());
    }

    fn look(&mut self, _: &[(Nid, Arc<Progress>)]) {}
}

/// A run in which the client's device fails one request, after so many.
fn run_with_a_fault(config: &Config, after: u32) -> (Report, Vec<String>) {
    let faults = Faults {
        fail: Some((after, Status::RetryExceeded)),
        ..Faults::default()
    };
    let options = Options {
        faults: vec![(CLIENT, faults)],
        ..Options::default()
    };
    let mut ear = Ear::default();
    let stop = AtomicBool::new(false);
    let report = run(config, &Machine::this(), &options, &stop, &mut ear).unwrap();
    (report, ear.0)
}

/// Runs the client's jobs, and now and then `disturb`s.
fn run_disturbed(config: &Config, mut disturb: impl FnMut(&mut Control<Job>)) -> Finished<Job> {
    let machine = Machine::this();
    let mut progress = None;
    let mut control =
        Control::start(config, &machine, &Options::default(), |index, clock, counters| {
            let expected = (index == 1).then_some(<[u8; 32]>::default());
            let job = Job::new(config, index, expected, clock.hertz(), counters)?;
            if index == 1 {
                progress = Some(job.progress());
            }
            Ok(Some(job))
        })
        .unwrap();
    let progress = progress.unwrap();
    let conns = config.nodes[1].conns_per_peer;
    control.keep(CLIENT, SERVER, conns, PATIENCE).unwrap();
    let begin = Instant::now();
    while !progress.is_over() {
        assert!(begin.elapsed() < PATIENCE, "{:?}", control.log());
        control.turn().unwrap();
        disturb(&mut control);
        std::thread::sleep(Duration::from_millis(1));
    }
    control.stop(PATIENCE).unwrap()
}

fn expect_nothing_left(finished: &Finished<Job>) {
    for node in &finished.nodes {
        assert!(node.is_empty(), "{node:?}");
        for core in &node.cores {
            assert_eq!(core.counters.keys_alive.get(), 0);
            assert_eq!(core.device.unwrap().live_keys, 0);
            assert_eq!(core.device.unwrap().send_slots, 0);
        }
    }
}

#[test]
fn a_workload_goes_on_and_every_byte_is_right_whoever_ends_its_connection() {
    let folder = Folder::new("hang-up");
    let config = config(
        &folder,
        "min_reconnect = \"1ms\", max_reconnect = \"10ms\"",
        ["", ""],
        &workload("duration = \"1500ms\""),
    );
    let mut last = Instant::now();
    let mut times = 0;
    let finished = run_disturbed(&config, |control| {
        if last.elapsed() > Duration::from_millis(80) {
            let (one, other) = if times % 2 == 0 {
                (CLIENT, SERVER)
            } else {
                (SERVER, CLIENT)
            };
            control.hang_up(one, other).unwrap();
            times += 1;
            last = Instant::now();
        }
    });
    assert!(times >= 5, "{times}");
    let client = &finished.nodes[1];
    let (_, workload) = client.application.as_ref().unwrap().workload.as_ref().unwrap();
    assert!(client.reconnected + 1 >= times, "{}", client.reconnected);
    assert_eq!((workload.failed, workload.wrong), (0, 0));
    assert!(workload.repeated > 0 && workload.verified > 100, "{workload:?}");
    expect_nothing_left(&finished);
}

#[test]
fn a_copy_is_right_after_a_request_that_failed() {
    let folder = Folder::new("copy");
    let config = config(&folder, "", ["", ""], COPY);
    // In the GETs, in the PUTs, in the GETs back: three requests for each of 88 chunks and more.
    for after in [20, 300, 600] {
        let (report, said) = run_with_a_fault(&config, after);
        assert_eq!(report.verdict, Verdict::Good, "{report}\n{said:#?}");
        assert_eq!(report.nodes[1].reconnected, 1, "{after}: {said:#?}");
        assert!(report.repeats[0].transfers > 0);
        let lost: Vec<&String> = said.iter().filter(|line| line.contains("has ended")).collect();
        assert!(
            lost.iter().any(|line| line.starts_with(&CLIENT.to_string())),
            "{said:#?}"
        );
    }
}

#[test]
fn what_is_not_to_be_repeated_is_counted_as_failed_and_the_rest_is_still_right() {
    let folder = Folder::new("no-repeat");
    let jobs = workload("duration = \"500ms\"\nrepeat = false");
    let config = config(&folder, "", ["", ""], &jobs);
    let (report, said) = run_with_a_fault(&config, 2000);
    assert_eq!(report.verdict, Verdict::Failed, "{report}");
    let line = &report.verifications[0];
    assert!(line.failed > 0 && line.failed <= 16, "{report}");
    assert_eq!(line.wrong, 0, "{report}");
    assert!(line.compared > 16, "{report}");
    assert_eq!(report.nodes[1].reconnected, 1, "{said:#?}");
    assert!(report.repeats.is_empty());
}

#[test]
fn without_reconnects_the_run_fails_and_says_which_connection_and_why() {
    let folder = Folder::new("no-reconnects");
    let config = config(&folder, "reconnects = 0", ["", ""], COPY);
    let (report, _) = run_with_a_fault(&config, 300);
    assert_eq!(report.verdict, Verdict::Failed, "{report}");
    let lost = format!("the connection of {CLIENT} to {SERVER} ended: ");
    assert!(report.repeats.is_empty(), "nothing was moved again");
    assert!(
        report.failures.iter().any(|line| line.starts_with(&lost)),
        "{report}"
    );
    assert_eq!(report.nodes[1].reconnected, 0);
}

#[test]
fn a_connection_of_an_embedder_is_not_made_again_and_its_end_is_told() {
    let folder = Folder::new("embedder");
    let config = config(&folder, "", ["", ""], "");
    let machine = Machine::this();
    let mut control = Control::start_nodes(&config, &machine, &Options::default()).unwrap();
    control.connect(CLIENT, SERVER, PATIENCE).unwrap();
    assert_eq!(control.hang_up(SERVER, CLIENT).unwrap(), 1);
    let begin = Instant::now();
    let error = loop {
        match control.turn() {
            Err(error) => break error,
            Ok(()) if begin.elapsed() > PATIENCE => panic!("{:?}", control.log()),
            Ok(()) => {}
        }
    };
    assert!(
        matches!(error, NodeError::Lost { node: CLIENT, peer: SERVER, .. }),
        "{error}"
    );
    let finished = control.stop(PATIENCE).unwrap();
    assert!(finished.nodes.iter().all(|node| node.is_empty()));
}
