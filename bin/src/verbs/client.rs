//! One node that asks another: ping, get, put.

use core::time::Duration;
use std::time::Instant;

use o2poll_config::{Config, Machine};
use o2poll_dataplane::endpoint::{
    self, Event, MatchBits, Operation, Portal, Request, Submission, Token,
};
use o2poll_dataplane::memory::PageList;
use o2poll_dataplane::time::Ticks;
use o2poll_dataplane::wire::Nid;
use o2poll_dataplane::wire::ping;
use o2poll_hal::verbs::Device;

use super::{Control, Options, rdma};
use crate::NodeError;
use crate::application::Nobody;
use crate::engine::SHORT;
use crate::job::{NoPong, Pong, judge};
use crate::node::{Link, Node};
use crate::target::Target;

/// A connection of a short-lived node to another.
pub struct Client {
    control: Control<Nobody>,
    from: Nid,
    to: Nid,
    link: Link,
    /// For a connection, and for a transfer with all its repetitions.
    timeout: Duration,
    /// Memory of transfers that have ended, of each length once.
    lists: Vec<&'static mut PageList<'static>>,
}

impl Client {
    /// Starts a node on a device and connects it. Without a device the only one of this machine is taken; without a
    /// name the node has the device's first IPv4 address, in the other node's LNet network. Memory is registered for
    /// transfers of up to `longest` bytes ([`CHUNK`] at most); a [`ping`](Self::ping) always fits.
    ///
    /// # Errors
    /// Why there is no connection.
    pub fn connect(
        to: Nid,
        device: Option<&str>,
        from: Option<Nid>,
        timeout: Duration,
        longest: u32,
    ) -> Result<Self, NodeError> {
        let name = match device {
            Some(name) => name.to_owned(),
            None => Device::names()
                .map_err(rdma)?
                .first()
                .cloned()
                .ok_or_else(|| NodeError::Rdma(String::from("this machine has no RDMA device")))?,
        };
        let from = match from {
            Some(from) => from,
            None => {
                let device = Device::open(&name).map_err(rdma)?;
                let address = device
                    .gids()
                    .map_err(rdma)?
                    .iter()
                    .filter_map(o2poll_hal::verbs::Gid::ipv4)
                    .find(|address| Nid::o2ib(*address, to.number()) != to)
                    .ok_or_else(|| {
                        NodeError::Rdma(format!(
                            "device {name} has no IPv4 address to ask from: give its network interface one, or say --from"
                        ))
                    })?;
                Nid::o2ib(address, to.number())
            }
        };
        let machine = Machine::this();
        let config = config(&name, from, timeout, &machine)?;
        let options = Options {
            memory: memory(longest),
            here: Vec::new(),
            listen: false,
        };
        let mut control = Control::start(&config, &machine, &options, |_, _, _| Ok(None))?;
        let link = control.connect(from, to, timeout)?;
        Ok(Self {
            control,
            from,
            to,
            link,
            timeout,
            lists: Vec::new(),
        })
    }

    /// The node that asks.
    #[must_use]
    pub const fn from(&self) -> Nid {
        self.from
    }

    /// An LNet ping; what came and how long it took.
    ///
    /// # Errors
    /// A node that died.
    pub fn ping(&mut self) -> Result<Result<(Pong, Duration), NoPong>, NodeError> {
        let target = Target {
            portal: Portal(ping::PORTAL),
            match_bits: MatchBits(ping::MATCH_BITS),
        };
        let get = Operation::Get { optimized: false };
        let to = self.to;
        let start = Instant::now();
        let (outcome, memory) = self.transfer(target, 0, ping::DISCOVERY_SINK, get, &[])?;
        let took = start.elapsed();
        let bytes = memory.chunks().next().unwrap_or_default();
        let answer = match outcome {
            Ok(length) => judge(to, bytes, length, Ticks(0)).map(|pong| (pong, took)),
            Err(error) => Err(error.into()),
        };
        Ok(answer)
    }

    /// Reads up to 1 MiB; the bytes, or why not.
    ///
    /// # Errors
    /// A node that died.
    pub fn get(
        &mut self,
        target: Target,
        offset: u32,
        length: u32,
    ) -> Result<Result<Vec<u8>, endpoint::Error>, NodeError> {
        let get = Operation::Get { optimized: true };
        let (outcome, memory) = self.transfer(target, offset, length, get, &[])?;
        Ok(outcome.map(|length| {
            let bytes = memory.chunks().flatten().copied();
            bytes.take(length as usize).collect()
        }))
    }

    /// Writes up to 1 MiB; the bytes that were taken, or why not.
    ///
    /// # Errors
    /// A node that died.
    pub fn put(
        &mut self,
        target: Target,
        offset: u32,
        bytes: &[u8],
    ) -> Result<Result<u32, endpoint::Error>, NodeError> {
        let put = Operation::Put {
            hdr_data: 0,
            ack: true,
        };
        let length = u32::try_from(bytes.len()).unwrap_or(CHUNK).min(CHUNK);
        Ok(self.transfer(target, offset, length, put, bytes)?.0)
    }

    /// Ends the node.
    ///
    /// # Errors
    /// What was wrong with it.
    pub fn close(self) -> Result<(), NodeError> {
        self.control.stop(Duration::from_secs(20)).map(|_| ())
    }

    fn transfer(
        &mut self,
        target: Target,
        remote_offset: u32,
        length: u32,
        operation: Operation,
        bytes: &[u8],
    ) -> Result<(Result<u32, endpoint::Error>, &mut PageList<'static>), NodeError> {
        let node = self
            .control
            .node(self.from)
            .ok_or(NodeError::NoNode(self.from))?;
        // Each transfer is as long as its memory.
        let known = self
            .lists
            .iter()
            .position(|list| list.length() == u64::from(length));
        let mut memory = match known {
            Some(at) => self.lists.swap_remove(at),
            None => node.memory(length).ok_or(NodeError::Device {
                node: self.from,
                what: "another transfer",
            })?,
        };
        if !bytes.is_empty() {
            memory.write_at(0, bytes);
        }
        let give_up = Instant::now() + self.timeout;
        loop {
            let request = Request {
                token: Token(0),
                connection: self.link.connection,
                portal: target.portal,
                match_bits: target.match_bits,
                remote_offset,
                memory,
                operation,
                timeout: None,
            };
            node_of(&mut self.control, self.from)?
                .submit_to(self.link.core, Submission::Transfer(request))
                .map_err(|_| NodeError::Device {
                    node: self.from,
                    what: "another transfer",
                })?;
            let mut why = None;
            let (outcome, back) = loop {
                match self.control.turn(SHORT) {
                    Ok(()) => {}
                    // The transfer ends by that.
                    Err(lost @ NodeError::Lost { .. }) => why = Some(lost),
                    Err(error) => return Err(error),
                }
                if let Some(Event::Done {
                    outcome, memory, ..
                }) = node_of(&mut self.control, self.from)?.event()
                {
                    break (outcome, memory);
                }
            };
            memory = back;
            match outcome {
                Err(endpoint::Error::ConnectionClosed | endpoint::Error::NotConnected) => {
                    self.connect_again(give_up, why)?;
                }
                outcome => {
                    self.lists.push(memory);
                    let memory = self.lists.last_mut().ok_or(NodeError::NoNode(self.from))?;
                    return Ok((outcome, memory));
                }
            }
        }
    }

    /// Makes the connection again that is lost, until there is no time left; then that is told once, with what was first
    /// known of it.
    fn connect_again(&mut self, give_up: Instant, why: Option<NodeError>) -> Result<(), NodeError> {
        let mut why = why;
        let mut pause = Duration::from_millis(50);
        loop {
            let left = give_up.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(why.unwrap_or_else(|| NodeError::Lost {
                    node: self.from,
                    peer: self.to,
                    why: String::from("it ended while a transfer was under way"),
                }));
            }
            match self.control.connect(self.from, self.to, left) {
                Ok(link) => {
                    self.link = link;
                    return Ok(());
                }
                Err(error @ (NodeError::Lost { .. } | NodeError::Dial { .. })) => {
                    why.get_or_insert(error);
                }
                Err(error) => return Err(error),
            }
            std::thread::sleep(pause.min(left));
            pause = pause.saturating_mul(2).min(Duration::from_secs(1));
        }
    }
}

/// The node file of one that only asks.
fn config(
    device: &str,
    from: Nid,
    timeout: Duration,
    machine: &Machine<'_>,
) -> Result<Config, NodeError> {
    let seconds = timeout.as_secs().max(1);
    // Its memory is in pieces of one range each, which never go through staging buffers.
    let text = format!(
        "[device]\nverbs = {device:?}\n[memory]\nhuge_pages = \"off\"\nstaging = 0\n[tunables]\n\
         timeout = \"{seconds}s\"\nidle = \"yield\"\n[[node]]\nnid = \"{from}\"\n"
    );
    Config::parse(&text, "command line".as_ref(), machine).map_err(NodeError::Config)
}

/// Bytes for one transfer of full length, one of each half, quarter and so on, and a ping.
fn memory(longest: u32) -> usize {
    let longest = usize::try_from(longest.min(CHUNK)).unwrap_or(0);
    longest
        .saturating_mul(3)
        .saturating_add(ping::DISCOVERY_SINK as usize)
}

fn node_of(control: &mut Control<Nobody>, nid: Nid) -> Result<&mut Node, NodeError> {
    control.node(nid).ok_or(NodeError::NoNode(nid))
}

/// Bytes of one transfer: the most that LNet has.
pub const CHUNK: u32 = 1 << 20;

#[cfg(test)]
mod tests {
    use super::{CHUNK, config, memory};
    use crate::plan::{Plan, connections};
    use core::time::Duration;
    use o2poll_config::Machine;
    use o2poll_dataplane::wire::Nid;
    use o2poll_soft::Profile;
    use std::io;

    /// Bytes that a client registers on a device with windows.
    fn registered(longest: u32) -> usize {
        let machine = Machine {
            allowed_cores: vec![0, 1],
            present_cores: 2,
            parallelism: 2,
            file_size: &|_| Err(io::ErrorKind::NotFound.into()),
        };
        let from = Nid::o2ib([10, 0, 0, 1], 0);
        let config = config("rxe0", from, Duration::from_secs(10), &machine)
            .unwrap_or_else(|error| panic!("{error}"));
        let connections = connections(&config);
        let plan = Plan::on(&config, &machine, Profile::rxe(), u32::MAX, connections).unwrap();
        assert_eq!(plan.shape.connections, 1);
        let ranges = [memory(longest)];
        plan.of(&config.nodes[0], &ranges).unwrap().bytes
    }

    #[test]
    fn a_ping_registers_the_messages_of_one_connection_and_a_page() {
        let bytes = registered(0);
        assert!(bytes <= 256 << 10, "{bytes}");
    }

    #[test]
    fn a_bulk_transfer_fits_into_half_of_the_usual_limit_of_locked_memory() {
        let bytes = registered(CHUNK);
        assert!(bytes < 4 << 20, "{bytes}");
    }
}
