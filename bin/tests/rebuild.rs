//! A peer that stops answering: the transfer's key dies with its window, another takes its place, and the next
//! connection works.

use core::sync::atomic::{AtomicBool, Ordering};
use core::time::Duration;
use std::sync::Arc;

use o2poll::config::{Config, Machine};
use o2poll::dataplane::endpoint::{
    Error, Event, MatchBits, Operation, Portal, Request, Submission, Token,
};
use o2poll::dataplane::memory::{PageList, Range};
use o2poll::dataplane::poller::Leftovers;
use o2poll::dataplane::wire::Nid;
use o2poll::{Application, Control, Link, NodeError, Notice, Options, Port, Turn};

/// Blocks its node's polling thread once when it is told to, as no application should.
struct Sleeper {
    sleep: Arc<AtomicBool>,
}

impl Application for Sleeper {
    fn begin(&mut self, _: Vec<Range<'static>>) {}

    fn notice(&mut self, _: Notice) {}

    fn step(&mut self, _: &mut Port, _: Turn) -> u32 {
        if self.sleep.swap(false, Ordering::Relaxed) {
            std::thread::sleep(Duration::from_secs(4));
        }
        0
    }
}

const NODES: &str = r#"
device = { soft = { profile = "frwr" } }
memory = { huge_pages = "off", mlock = "off" }
tunables = { timeout = "1s", abandon_limit = "1s", idle = "yield" }
[[node]]
nid = "10.0.0.1@o2ib"
[[node.export]]
name = "scratch"
portal = 51
match_bits = 0x1
size = "1 MiB"
writable = true
[[node]]
nid = "10.0.0.2@o2ib"
"#;

const PATIENCE: Duration = Duration::from_secs(60);

fn submit(
    control: &mut Control<Sleeper>,
    client: Nid,
    link: Link,
    memory: &'static mut PageList<'static>,
) {
    let request = Request {
        token: Token(1),
        connection: link.connection,
        portal: Portal(51),
        match_bits: MatchBits(1),
        remote_offset: 0,
        memory,
        operation: Operation::Get { optimized: true },
        timeout: None,
    };
    let node = control.node(client).unwrap();
    assert!(
        node.submit_to(link.core, Submission::Transfer(request))
            .is_ok()
    );
}

fn get(
    control: &mut Control<Sleeper>,
    client: Nid,
    link: Link,
    memory: &'static mut PageList<'static>,
) -> (Result<u32, Error>, &'static mut PageList<'static>) {
    submit(control, client, link, memory);
    loop {
        match control.wait(client, PATIENCE) {
            Ok(Event::Done {
                outcome, memory, ..
            }) => return (outcome, memory),
            Ok(other) => panic!("{other:?}"),
            // That is told as well, by whichever comes first.
            Err(NodeError::Lost { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }
}

/// A server that can be put to sleep, and a client.
fn nodes() -> Option<(Control<Sleeper>, Arc<AtomicBool>, [Nid; 2])> {
    let machine = Machine::this();
    if machine.parallelism < 2 {
        eprintln!("not run: on one core the sleeper would stop the client's clock too");
        return None;
    }
    let config = Config::parse(NODES, "nodes.toml".as_ref(), &machine).unwrap();
    let (server, client) = (config.nodes[0].nid, config.nodes[1].nid);
    let sleep = Arc::new(AtomicBool::new(false));
    let options = Options {
        memory: 1 << 20,
        ..Options::default()
    };
    let control = Control::start(&config, &machine, &options, |index, _, _| {
        Ok((index == 0).then(|| Sleeper {
            sleep: Arc::clone(&sleep),
        }))
    })
    .unwrap();
    Some((control, sleep, [server, client]))
}

#[test]
fn a_window_whose_key_may_be_alive_is_replaced_and_the_node_goes_on() {
    let Some((mut control, sleep, [server, client])) = nodes() else {
        return;
    };
    let memory = control.node(client).unwrap().memory(100_000).unwrap();

    let link = control.connect(client, server, PATIENCE).unwrap();
    let (outcome, memory) = get(&mut control, client, link, memory);
    assert_eq!(outcome, Ok(100_000));

    sleep.store(true, Ordering::Relaxed);
    while sleep.load(Ordering::Relaxed) {
        std::thread::sleep(Duration::from_millis(1));
    }
    let (outcome, memory) = get(&mut control, client, link, memory);
    assert_eq!(outcome, Err(Error::TimedOut));

    // The peer is awake again; whatever is left of the old connection goes while the new one is made.
    let link = loop {
        match control.connect(client, server, PATIENCE) {
            Ok(link) => break link,
            Err(NodeError::Lost { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    };
    let (outcome, _) = get(&mut control, client, link, memory);
    assert_eq!(outcome, Ok(100_000));

    let finished = control.stop(PATIENCE).unwrap();
    for node in &finished.nodes {
        let core = &node.cores[0];
        assert_eq!(core.leftovers, Some(Leftovers::default()), "{}", node.nid);
        assert_eq!(core.keys_alive, 0);
        assert_eq!(core.device.unwrap().live_keys, 0);
    }
    let core = &finished.nodes[1].cores[0];
    assert_eq!(core.windows_rebuilt, 1);
    assert_eq!(core.counters.windows_broken.get(), 1);
}

#[test]
fn a_node_that_is_stopped_while_a_transfer_is_under_way_has_no_key_alive_at_the_end() {
    let Some((mut control, sleep, [server, client])) = nodes() else {
        return;
    };
    let memory = control.node(client).unwrap().memory(100_000).unwrap();
    let link = control.connect(client, server, PATIENCE).unwrap();
    sleep.store(true, Ordering::Relaxed);
    while sleep.load(Ordering::Relaxed) {
        std::thread::sleep(Duration::from_millis(1));
    }
    submit(&mut control, client, link, memory);
    let counters = control.node(client).unwrap().counters();
    while counters[0].keys_alive.get() == 0 {
        std::thread::yield_now();
    }

    let finished = control.stop(PATIENCE).unwrap();
    for node in &finished.nodes {
        assert_eq!(node.keys_alive(), 0, "{}", node.nid);
        assert_eq!(node.cores[0].device.unwrap().live_keys, 0);
        assert!(node.is_empty(), "{:?}", node.cores);
    }
}
