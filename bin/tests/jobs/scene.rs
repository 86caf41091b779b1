//! Two nodes, their jobs, and what goes wrong meanwhile.

use core::sync::atomic::AtomicBool;
use core::time::Duration;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use o2poll::config::{Config, Machine};
use o2poll::dataplane::nic::Status;
use o2poll::dataplane::wire::Nid;
use o2poll::{Control, Faults, Finished, Job, Options, Progress, Report, Watcher, run};

pub(crate) const SERVER: Nid = Nid::o2ib([10, 0, 0, 1], 0);
pub(crate) const CLIENT: Nid = Nid::o2ib([10, 0, 0, 2], 0);
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// A server with a file and a region, and a client with the given jobs.
pub(crate) fn config(folder: &Folder, tunables: &str, nodes: [&str; 2], jobs: &str) -> Config {
    on_device(folder, "", tunables, nodes, jobs)
}

/// The same on a device with other limits.
pub(crate) fn on_device(
    folder: &Folder,
    limits: &str,
    tunables: &str,
    nodes: [&str; 2],
    jobs: &str,
) -> Config {
    let text = format!(
        r#"
device = {{ soft = {{ profile = "frwr"{limits} }} }}
memory = {{ huge_pages = "off", mlock = "off" }}
tunables = {{ idle = "yield", {tunables} }}
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
    let origin = folder.path("nodes.toml");
    std::fs::write(&origin, &text).unwrap();
    Config::parse(&text, &origin, &Machine::this()).unwrap_or_else(|report| panic!("{report}"))
}

pub(crate) const COPY: &str = r#"
[node.copy]
peer = "10.0.0.1@o2ib"
file = "file"
into = "scratch"
transfer = "8 KiB"
"#;

pub(crate) fn workload(more: &str) -> String {
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

/// A folder of this test with a file in it, gone when the test is. While a test has one no other runs: polling threads
/// need their cores.
pub(crate) struct Folder(
    PathBuf,
    #[expect(dead_code, reason = "held")] MutexGuard<'static, ()>,
);

static TURN: Mutex<()> = Mutex::new(());

impl Folder {
    pub(crate) fn new(name: &str) -> Self {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let path =
            std::env::temp_dir().join(format!("o2poll-redial-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        let data: Vec<u8> = (0..700_001_u32)
            .map(|n| (n.wrapping_mul(n) >> 7).to_le_bytes()[0])
            .collect();
        std::fs::write(path.join("data"), data).unwrap();
        Self(path, turn)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
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
pub(crate) fn run_with_a_fault(config: &Config, after: u32) -> (Report, Vec<String>) {
    let faults = Faults {
        fail: Some((after, Status::RetryExceeded)),
        ..Faults::default()
    };
    let options = Options {
        faults: vec![(CLIENT, faults)],
        ..Options::default()
    };
    run_with(config, &options)
}

/// A run; its report, and what was said meanwhile.
pub(crate) fn run_with(config: &Config, options: &Options) -> (Report, Vec<String>) {
    let mut ear = Ear::default();
    let stop = AtomicBool::new(false);
    let report = run(config, &Machine::this(), options, &stop, &mut ear).unwrap();
    (report, ear.0)
}

/// Runs the client's jobs, and now and then `disturb`s.
pub(crate) fn run_disturbed(
    config: &Config,
    mut disturb: impl FnMut(&mut Control<Job>),
) -> Finished<Job> {
    let machine = Machine::this();
    let mut progress = None;
    let mut control = Control::start(
        config,
        &machine,
        &Options::default(),
        |index, clock, counters| {
            let expected = (index == 1).then_some(<[u8; 32]>::default());
            let job = Job::new(config, index, expected, clock.hertz(), counters)?;
            if index == 1 {
                progress = Some(job.progress());
            }
            Ok(Some(job))
        },
    )
    .unwrap();
    let progress = progress.unwrap();
    let conns = config.nodes[1].conns_per_peer;
    control.keep(CLIENT, SERVER, conns, PATIENCE).unwrap();
    let begin = Instant::now();
    while !progress.is_over() {
        assert!(begin.elapsed() < PATIENCE, "{:?}", control.log());
        control.turn().unwrap();
        disturb(&mut control);
        for line in control.log() {
            eprintln!("{:?} {line}", begin.elapsed());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    control.stop(Duration::from_secs(20)).unwrap()
}

pub(crate) fn expect_nothing_left(finished: &Finished<Job>) {
    for node in &finished.nodes {
        assert!(
            node.is_empty(),
            "{}: {:?}",
            node.nid,
            node.cores
                .iter()
                .map(|core| (core.leftovers, core.device))
                .collect::<Vec<_>>()
        );
        for core in &node.cores {
            assert_eq!(core.counters.keys_alive.get(), 0);
            assert_eq!(core.device.unwrap().live_keys, 0);
            assert_eq!(core.device.unwrap().send_slots, 0);
        }
    }
}
