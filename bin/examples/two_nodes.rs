//! Two nodes in one process: the second PUTs a greeting into the first one's memory and GETs it back.
//!
//! ```text
//! cargo run --example two_nodes
//! ```

use core::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use o2poll::config::{Config, Machine};
use o2poll::dataplane::endpoint::{
    Event, MatchBits, Operation, Portal, Request, Submission, Token,
};
use o2poll::dataplane::memory::PageList;
use o2poll::dataplane::wire::Nid;
use o2poll::{Control, Link, Nobody, Options};

/// What could as well stand in a file.
const NODES: &str = r#"
device = { soft = { profile = "frwr" } }

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

const PATIENCE: Duration = Duration::from_secs(20);

fn main() -> Result<()> {
    let machine = Machine::this();
    let config = Config::parse(NODES, "two_nodes.toml".as_ref(), &machine)?;
    let [server, client] = config.nodes.as_slice() else {
        bail!("two nodes were asked for");
    };
    let (server, client) = (server.nid, client.nid);

    // One megabyte of registered memory for whoever uses a node.
    let mut control = Control::start_nodes(
        &config,
        &machine,
        &Options {
            memory: 1 << 20,
            ..Options::default()
        },
    )?;
    println!("{}", control.placement());
    let link = control.connect(client, server, PATIENCE)?;
    println!(
        "{client} is connected with {server}: queue depth {}",
        link.queue_depth
    );

    // 64 KiB do not fit into a message: they move by RDMA WRITE, under a key made for this one transfer.
    let node = control
        .node(client)
        .context("the client is not handed out")?;
    let memory = node.memory(64 << 10).context("no memory left")?;
    let greeting: Vec<u8> = b"hello, ".iter().copied().cycle().take(64 << 10).collect();
    memory.write_at(0, &greeting);

    let put = Operation::Put {
        hdr_data: 0,
        ack: true,
    };
    let memory = transfer(&mut control, client, link, put, memory)?;
    memory.chunks_mut().for_each(|chunk| chunk.fill(0));
    let get = Operation::Get { optimized: true };
    let memory = transfer(&mut control, client, link, get, memory)?;
    let mut back = vec![0; greeting.len()];
    memory.read_at(0, &mut back);
    ensure!(back == greeting, "something else came back");
    println!("what came back is what was sent");

    let finished = control.stop(PATIENCE)?;
    for node in &finished.nodes {
        // One core polls for each.
        let counters = node.cores[0].counters;
        println!(
            "{}: {} work requests, {} doorbells, {} keys killed, {} alive",
            node.nid,
            counters.work_requests.get(),
            counters.doorbells.get(),
            // By its own invalidate, and by the peer's SEND_WITH_INV.
            counters.invalidations.get() + counters.remote_invalidations.get(),
            node.keys_alive(),
        );
    }
    Ok(())
}

/// One transfer, start to end. The memory is ours again when it returns.
fn transfer(
    control: &mut Control<Nobody>,
    client: Nid,
    link: Link,
    operation: Operation,
    memory: &'static mut PageList<'static>,
) -> Result<&'static mut PageList<'static>> {
    let request = Request {
        token: Token(1),
        connection: link.connection,
        portal: Portal(51),
        match_bits: MatchBits(1),
        remote_offset: 0,
        memory,
        operation,
        timeout: None,
    };
    let node = control
        .node(client)
        .context("the client is not handed out")?;
    node.submit_to(link.core, Submission::Transfer(request))
        .map_err(|_| anyhow!("the submission ring is full"))?;
    match control.wait(client, PATIENCE)? {
        Event::Done {
            outcome, memory, ..
        } => {
            let bytes = outcome.map_err(|error| anyhow!("the transfer failed: {error}"))?;
            println!("{operation:?} moved {bytes} bytes");
            Ok(memory)
        }
        other => bail!("not the event of a transfer: {other:?}"),
    }
}
