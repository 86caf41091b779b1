//! o2poll: LNet's o2iblnd in user space, as a library. The program of the same name is a thin layer over it.
//!
//! A [`Control`] is the control side of all nodes of a node file. It starts one polling thread per core, gives
//! memory and a device to each node, makes connections, rebuilds windows, and stops everything. A node is used in
//! one of two ways:
//!
//! * as a [`Node`], from any thread of the embedder's: submissions go in through one ring, events come out of
//!   another, and the owner may sleep between looks. That is what the example does;
//! * by an [`Application`] that is stepped on the node's own polling thread, which is how the program's jobs run
//!   ([`Job`]: ping, copy, workload): with as many threads as cores, an application that spins on a thread of its
//!   own would starve the pollers.
//!
//! ```
//! use core::time::Duration;
//! use o2poll::config::{Config, Machine};
//! use o2poll::dataplane::endpoint::{
//!     Event, MatchBits, Operation, Portal, Request, Submission, Token,
//! };
//! use o2poll::{Control, Options};
//!
//! # fn main() -> Result<(), Box<dyn core::error::Error>> {
//! let machine = Machine::this();
//! let nodes = r#"
//!     device = { soft = { profile = "frwr" } }
//!     memory = { huge_pages = "off", mlock = "off" }
//!     [[node]]
//!     nid = "10.0.0.1@o2ib"
//!     export = [{ name = "scratch", portal = 51, match_bits = 0x1, size = "1 MiB", writable = true }]
//!     [[node]]
//!     nid = "10.0.0.2@o2ib"
//! "#;
//! let config = Config::parse(nodes, "nodes.toml".as_ref(), &machine)?;
//! let (server, client) = (config.nodes[0].nid, config.nodes[1].nid);
//!
//! let mut control = Control::start_nodes(&config, &machine, &Options { memory: 1 << 20, ..Options::default() })?;
//! let patience = Duration::from_secs(20);
//! let link = control.connect(client, server, patience)?;
//! let node = control.node(client).ok_or("not handed out")?;
//! let memory = node.memory(100_000).ok_or("no memory")?;
//! memory.write_at(0, &[7; 100_000]);
//!
//! // PUT it, then GET it back into the same memory.
//! let put = Operation::Put { hdr_data: 0, ack: true };
//! let get = Operation::Get { optimized: true };
//! let mut memory = memory;
//! for operation in [put, get] {
//!     let request = Request {
//!         token: Token(1),
//!         connection: link.connection,
//!         portal: Portal(51),
//!         match_bits: MatchBits(1),
//!         remote_offset: 0,
//!         memory,
//!         operation,
//!         timeout: None,
//!     };
//!     let node = control.node(client).ok_or("not handed out")?;
//!     node.submit_to(link.core, Submission::Transfer(request)).map_err(|_| "ring full")?;
//!     let Event::Done { outcome, memory: back, .. } = control.wait(client, patience)? else {
//!         return Err("another event".into());
//!     };
//!     assert_eq!(outcome, Ok(100_000));
//!     // The memory is ours again, and no key to it is alive: look at it, and clear it.
//!     assert!(back.chunks().flatten().all(|byte| *byte == 7));
//!     back.chunks_mut().for_each(|chunk| chunk.fill(0));
//!     memory = back;
//! }
//! let finished = control.stop(patience)?;
//! assert!(finished.nodes.iter().all(|node| node.keys_alive() == 0));
//! # Ok(())
//! # }
//! ```
//!
//! A walk through the house:
//!
//! | room | what lives there |
//! |---|---|
//! | `error` | what can go wrong outside of a transfer |
//! | `application` | [`Application`], what it is told |
//! | `port` | [`Port`]: submissions to the cores of a node, and their events |
//! | `plan` | a node file in numbers: how many of everything, and what the device holds of it |
//! | `budget`, `devices` | what that takes beside ko2iblnd; what becomes of a buffer on each device |
//! | `node` | arena, lent storage, rings, exports of one node; [`Node`] |
//! | `polling` | the loop of a polling thread |
//! | `fabric` | wires between software devices, and the connection manager of one process |
//! | `keeper`, `links` | when a lost connection is made again; over which one a transfer goes |
//! | `engine`, `start`, `finished` | the control side of whatever device: orders, reports, beginning and end |
//! | `control` | [`Control`]: the engine on the software device; `verbs::Control` on RDMA devices |
//! | [`capture`] | what nodes send each other, as a capture file |
//! | `measure`, `pattern` | latencies and costs; contents that can be checked |
//! | `copy`, `workload`, `job`, `ledger` | what the program's nodes do, and that each transfer of it ends once |
//! | `target` | what another node exports, in words |
//! | `run`, `report`, `progress` | a whole run, what it found, what is seen meanwhile |
//!
//! # Memory
//! Whatever is lent to a poller or a device is lent for the life of the process and never freed: a peer's device
//! may touch a node's memory until it is gone itself. A process is meant to start its nodes once.

pub use o2poll_config as config;
pub use o2poll_dataplane as dataplane;

mod application;
mod budget;
pub mod capture;
mod control;
mod copy;
mod devices;
mod engine;
mod error;
mod fabric;
mod finished;
mod job;
mod keeper;
mod ledger;
mod links;
mod maps;
mod measure;
mod node;
mod pattern;
mod plan;
mod polling;
mod port;
mod progress;
mod report;
mod run;
mod start;
mod target;
#[cfg(feature = "verbs")]
pub mod verbs;
mod workload;

pub use application::{Application, Nobody, Notice, Turn};
pub use budget::{Amounts, Budget, Pair};
pub use control::{Control, Options};
pub use copy::{Copy, Hash};
pub use devices::{Asked, BufferLine, DeviceLine, Devices};
pub use error::NodeError;
pub use finished::{Finished, FinishedCore, FinishedNode, FinishedThread};
pub use job::{Job, NoPong, Ping, Pong, Progress, peers};
pub use ledger::Ledger;
pub use measure::{CoreCounters, Cost, Histogram, Span};
pub use node::{Device, Link, Node, Wires};
pub use o2poll_soft::Faults;
pub use port::Port;
pub use progress::Bars;
pub use report::{
    AccountLine, CaptureLine, CoreLine, DigestLine, NodeLine, PingLine, RepeatLine, Report, Scene,
    SpanLine, ThreadLine, Verdict, VerificationLine,
};
pub use run::{Watcher, outline, run};
pub use target::Target;
pub use workload::Workload;
