//! Connections that come and go beside one that works, on an RDMA device of this machine, in one process.
//!
//! `O2POLL_VERBS_DEVICE` names the device, whose network interface has 10.9.0.1, 10.9.0.2 and 10.9.0.3; without it nothing
//! is run, and the test says so.
#![cfg(feature = "verbs")]

use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;
use std::{env, fs, thread};

use o2poll::config::{Config, Machine};
use o2poll::dataplane::endpoint::{
    Event, MatchBits, Operation, Portal, Request, Submission, Token,
};
use o2poll::dataplane::memory::{PageList, Range};
use o2poll::dataplane::pool::Handle;
use o2poll::dataplane::wire::Nid;
use o2poll::verbs::{Control, Options};
use o2poll::{Application, NodeError, Notice, Port, Turn};

/// GETs one block after the other over the connection that it has made, and counts. At the other end it takes what it is told.
struct Reader {
    memory: Option<&'static mut PageList<'static>>,
    connection: Option<Handle>,
    done: Arc<AtomicU64>,
}

impl Application for Reader {
    fn memory(&self) -> Vec<usize> {
        vec![BLOCK as usize]
    }

    fn begin(&mut self, memory: Vec<Range<'static>>) {
        self.memory = memory.into_iter().next().map(|range| {
            let list = Box::leak(Box::new(PageList::new()));
            assert!(list.push(range).is_ok(), "one range");
            list
        });
    }

    fn notice(&mut self, notice: Notice) {
        match notice {
            Notice::Connected {
                connection, dialed, ..
            } => {
                if dialed {
                    self.connection = Some(connection);
                }
            }
            Notice::Gone { connection, .. } if self.connection != Some(connection) => {}
            Notice::Gone { .. } | Notice::GivenUp { .. } | Notice::Finish => self.connection = None,
        }
    }

    fn step(&mut self, port: &mut Port, _: Turn) -> u32 {
        while let Some(event) = port.event() {
            let Event::Done {
                outcome, memory, ..
            } = event
            else {
                continue;
            };
            self.memory = Some(memory);
            match outcome {
                Ok(_) => self.done.fetch_add(1, Ordering::Relaxed),
                Err(_) => self.done.fetch_add(FAILED, Ordering::Relaxed),
            };
        }
        let Some(connection) = self.connection else {
            return 0;
        };
        let Some(memory) = self.memory.take() else {
            return 0;
        };
        let request = Request {
            token: Token(1),
            connection,
            portal: Portal(51),
            match_bits: MatchBits(1),
            remote_offset: 0,
            memory,
            operation: Operation::Get { optimized: true },
            timeout: None,
        };
        if let Err(Submission::Transfer(request)) = port.submit(Submission::Transfer(request)) {
            self.memory = Some(request.memory);
        }
        1
    }
}

#[test]
fn five_hundred_connections_that_come_and_go_under_load_leave_nothing() {
    let Ok(device) = env::var(VARIABLE) else {
        println!("not run: {VARIABLE} names no device");
        return;
    };
    let text = NODES.replace("DEVICE", &device);
    let machine = Machine::this();
    let config = Config::parse(&text, "nodes.toml".as_ref(), &machine).unwrap();
    let [target, visitor, reader] = [0, 1, 2].map(|node| config.nodes[node].nid);
    let before = kernel_objects(&device);
    let done = Arc::new(AtomicU64::new(0));
    let options = Options {
        memory: 1 << 20,
        here: Vec::new(),
        listen: true,
    };
    let mut control = Control::start(&config, &machine, &options, |index, _, _| {
        Ok((index != 1).then(|| Reader {
            memory: None,
            connection: None,
            done: Arc::clone(&done),
        }))
    })
    .unwrap();
    control.connect(reader, target, PATIENCE).unwrap();
    cycles(&mut control, visitor, target, WARM_UP);
    let settled = Held::settled(&mut control, &device, None);
    let work = done.load(Ordering::Relaxed);
    let start = Instant::now();
    cycles(&mut control, visitor, target, CYCLES);
    let took = start.elapsed();
    let work = done.load(Ordering::Relaxed) - work;
    let after = Held::settled(&mut control, &device, Some(&settled));
    println!(
        "REMARK: {CYCLES} cycles in {:.1} s, {work} GETs of {BLOCK} bytes meanwhile; before {settled:?}; after {after:?}",
        took.as_secs_f64()
    );
    assert!(work < FAILED, "a GET of the load failed");
    assert!(work >= 10, "there was no load: {work} GETs in {took:?}");
    assert_eq!(after.objects, settled.objects, "the kernel holds more");
    assert_eq!(after.files, settled.files, "more files are open");
    assert!(
        after.kibibytes <= settled.kibibytes + SLACK,
        "{} KiB of memory have become {}",
        settled.kibibytes,
        after.kibibytes
    );
    control.finish();
    // The last GET comes back first.
    Held::settled(&mut control, &device, None);
    let finished = control.stop(PATIENCE).unwrap();
    for node in &finished.nodes {
        assert!(node.is_empty(), "{}", node.nid);
        assert_eq!(node.keys_alive(), 0, "{}", node.nid);
    }
    drop(finished);
    let give_up = Instant::now() + PATIENCE;
    while without_contexts(&kernel_objects(&device)) != without_contexts(&before) {
        assert!(
            Instant::now() < give_up,
            "the kernel still holds {}, and held {before}",
            kernel_objects(&device)
        );
        thread::sleep(Duration::from_millis(100));
    }
}

/// Connects and disconnects so often.
fn cycles(control: &mut Control<Reader>, from: Nid, to: Nid, count: usize) {
    for cycle in 0..count {
        let link = control
            .connect(from, to, PATIENCE)
            .unwrap_or_else(|error| panic!("cycle {cycle}: {error}"));
        control
            .disconnect(from, link, PATIENCE)
            .unwrap_or_else(|error| panic!("cycle {cycle}: {error}"));
        // Lines nobody reads.
        drop(control.log());
    }
}

/// What a process and the kernel for it hold.
#[derive(Debug, PartialEq, Eq)]
struct Held {
    files: usize,
    /// Of data: heap, stacks and private mappings.
    kibibytes: u64,
    objects: String,
}

impl Held {
    fn now(device: &str) -> Self {
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let data = status
            .lines()
            .find_map(|line| line.strip_prefix("VmData:"))
            .unwrap();
        Self {
            files: fs::read_dir("/proc/self/fd").unwrap().count(),
            kibibytes: data.trim().trim_end_matches(" kB").parse().unwrap(),
            objects: kernel_objects(device),
        }
    }

    /// When the far ends are gone as well: what two looks in a row, or a look and `wanted`, agree about; or the last look.
    fn settled(control: &mut Control<Reader>, device: &str, wanted: Option<&Self>) -> Self {
        let give_up = Instant::now() + Duration::from_secs(20);
        let mut last = Self::now(device);
        loop {
            let until = Instant::now() + Duration::from_secs(1);
            while Instant::now() < until {
                match control.turn(Duration::from_millis(10)) {
                    Ok(()) | Err(NodeError::Lost { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
            }
            let now = Self::now(device);
            let same = |other: &Self| (now.files, &now.objects) == (other.files, &other.objects);
            if same(wanted.unwrap_or(&last)) || Instant::now() > give_up {
                return now;
            }
            last = now;
        }
    }
}

/// What the kernel holds of the device, for everybody (`rdma-resource(8)`).
fn kernel_objects(device: &str) -> String {
    let output = Command::new("rdma")
        .args(["resource", "show", device])
        .output()
        .expect("rdma(8), of iproute2");
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

/// librdmacm has a context of its own, which it keeps for the life of the process.
fn without_contexts(objects: &str) -> Vec<&str> {
    let words: Vec<&str> = objects.split_whitespace().collect();
    let at = words.iter().position(|word| *word == "ctx");
    let of_contexts = at.map_or(0..0, |at| at..at + 2);
    (0..)
        .zip(words)
        .filter(|(at, _)| !of_contexts.contains(at))
        .map(|(_, word)| word)
        .collect()
}

const VARIABLE: &str = "O2POLL_VERBS_DEVICE";

const NODES: &str = r#"
device = { verbs = "DEVICE" }
memory = { huge_pages = "off", mlock = "try" }
tunables = { timeout = "20s", idle = "yield" }

[[node]]
nid = "10.9.0.1@o2ib"
export = [{ name = "block", portal = 51, match_bits = 0x1, size = "64 KiB" }]

[[node]]
nid = "10.9.0.2@o2ib"

[[node]]
nid = "10.9.0.3@o2ib"
"#;

const CYCLES: usize = 500;

/// Until everything has been used once.
const WARM_UP: usize = 20;

/// Bytes of a GET.
const BLOCK: u32 = 8192;

/// Counts as so many GETs.
const FAILED: u64 = 1 << 32;

/// KiB that the heap may grow by: less than one of a cycle's objects each time.
const SLACK: u64 = 128;

const PATIENCE: Duration = Duration::from_secs(60);
