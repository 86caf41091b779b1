//! What the nodes of a file take, beside what ko2iblnd takes for the same depth and fragments.

use core::fmt;

use o2poll_config::{Config, Device, Machine};
use o2poll_dataplane::connection::Connection;
use o2poll_dataplane::memory::{Buffer, MESSAGE_BYTES, Range};
use o2poll_dataplane::nic::{Sge, WrId};
use o2poll_dataplane::poller::{Receive, Shape};
use o2poll_dataplane::pool::Slot;
use o2poll_dataplane::registration::{Descriptor, Mapping, STAGE_BYTES, Ways};
use o2poll_dataplane::transfer::Transfer;
use o2poll_soft as soft;
use o2poll_soft::Profile;
use serde::Serialize;

use crate::NodeError;
use crate::plan::Plan;
use crate::report::table::Table;

/// Queue sizes and memory of one connection, and of all that a core holds. Bytes of exports and of jobs are not
/// in it: they are the same for whoever serves them.
#[derive(Clone, Debug, Serialize)]
pub struct Budget {
    /// The node file.
    pub file: String,
    /// What its nodes are joined by.
    pub device: &'static str,
    /// Queue depth that the device holds.
    pub peer_credits: u16,
    /// Most fragments of a descriptor.
    pub max_frags: u16,
    /// Peers of each node.
    pub peers: usize,
    /// One connection.
    pub connection: Pair,
    /// One core of a node on one, with all its peers.
    pub core: Pair,
    /// What peers may reach beyond their transfers.
    pub exposure: Option<String>,
    /// What was made smaller than the file asks for.
    pub notes: Vec<String>,
}

/// Ours, and theirs for the same.
#[derive(Clone, Debug, Serialize)]
pub struct Pair {
    /// This program.
    pub o2poll: Amounts,
    /// The kernel's driver, as of Lustre 2.14 and later.
    pub ko2iblnd: Amounts,
}

/// How much of everything.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Amounts {
    /// Connections: this program has one in each direction.
    pub connections: usize,
    /// Send work requests.
    pub send_wr: usize,
    /// Receives.
    pub receives: usize,
    /// Completion queue entries.
    pub cqe: usize,
    /// Windows and mappings, or FastReg descriptors.
    pub windows: usize,
    /// Page lists, or tables of as many fragments: two of a window on the software device, one of each descriptor
    /// of ko2iblnd.
    pub page_lists: usize,
    /// Bytes of message buffers, for both directions.
    pub message_bytes: usize,
    /// Bytes of page lists, and of ko2iblnd's transfer descriptors with their tables.
    pub list_bytes: usize,
    /// Bytes of queues, at 64 bytes an entry, send and receive and completion.
    pub queue_bytes: usize,
    /// Bytes of everything else that a transfer, a receive, a connection or a window is kept in.
    pub state_bytes: usize,
    /// Bytes of staging buffers.
    pub staging_bytes: usize,
    /// The sum of the bytes.
    pub bytes: usize,
}

impl Budget {
    /// Works it out; with `peers`, as if each node had so many.
    ///
    /// # Errors
    /// As [`run`](crate::run).
    pub fn new(
        config: &Config,
        machine: &Machine<'_>,
        peers: Option<usize>,
    ) -> Result<Self, NodeError> {
        let peers = peers.unwrap_or_else(|| config.nodes.len().saturating_sub(1).max(1));
        let conns = usize::from(config.tunables.conns_per_peer);
        let connections = peers.saturating_mul(2).saturating_mul(conns);
        let plan = Plan::for_connections(config, machine, connections)?;
        let depth = usize::from(plan.shape.queue_depth);
        let frags = config.tunables.max_frags;
        let one = Shape {
            connections: 1,
            windows: plan
                .shape
                .windows
                .checked_div(plan.shape.connections)
                .unwrap_or(0)
                .min(2 * depth),
            staging: 0,
            mappings: 0,
            waiting: 0,
            ..plan.shape
        };
        let kernel = |connections| kernel(connections, depth, usize::from(frags));
        Ok(Self {
            file: config.origin.display().to_string(),
            device: match &config.device {
                Device::Soft(soft) => soft.profile.name(),
                _ => "?",
            },
            peer_credits: plan.shape.queue_depth,
            max_frags: frags,
            peers,
            connection: Pair {
                o2poll: ours(&one, &plan.profile)?,
                ko2iblnd: kernel(1).without_pools(),
            },
            core: Pair {
                o2poll: ours(&plan.shape, &plan.profile)?,
                ko2iblnd: kernel(peers),
            },
            exposure: plan.exposure,
            notes: plan.notes,
        })
    }
}

impl fmt::Display for Budget {
    /// Two tables.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{}, {}, peer_credits = {}, max_frags = {}",
            self.file, self.device, self.peer_credits, self.max_frags
        )?;
        for note in self.notes.iter().chain(&self.exposure) {
            writeln!(f, "{note}")?;
        }
        let peers = if self.peers == 1 { "peer" } else { "peers" };
        let core = format!("one core, {} {peers}", self.peers);
        for (title, pair) in [("one connection", &self.connection), (&core, &self.core)] {
            let mut table = Table::new(&[title, "o2poll", "ko2iblnd"]);
            let (ours, theirs) = (pair.o2poll, pair.ko2iblnd);
            for (name, ours, theirs) in [
                ("connections", ours.connections, theirs.connections),
                ("send work requests", ours.send_wr, theirs.send_wr),
                ("receives", ours.receives, theirs.receives),
                ("completion queue entries", ours.cqe, theirs.cqe),
                ("windows, FastReg descriptors", ours.windows, theirs.windows),
                ("page lists", ours.page_lists, theirs.page_lists),
            ] {
                table.row(vec![name.to_owned(), count(ours), count(theirs)]);
            }
            for (name, ours, theirs) in [
                ("message buffers", ours.message_bytes, theirs.message_bytes),
                ("page lists, tables", ours.list_bytes, theirs.list_bytes),
                ("queues", ours.queue_bytes, theirs.queue_bytes),
                ("state", ours.state_bytes, theirs.state_bytes),
                ("staging", ours.staging_bytes, theirs.staging_bytes),
                ("total", ours.bytes, theirs.bytes),
            ] {
                table.row(vec![name.to_owned(), kibibytes(ours), kibibytes(theirs)]);
            }
            write!(f, "\n{table}")?;
        }
        writeln!(
            f,
            "\nko2iblnd: Lustre 2.14 and later with its defaults. It keeps {NTX} transfer descriptors and {FMR_POOL_SIZE} FastReg\n\
             descriptors for an interface; {} KiB a descriptor is an estimate, and its other state is not counted.",
            TX_BYTES >> 10
        )
    }
}

impl Amounts {
    fn summed(self) -> Self {
        let parts = [
            self.message_bytes,
            self.list_bytes,
            self.queue_bytes,
            self.state_bytes,
            self.staging_bytes,
        ];
        Self {
            bytes: parts
                .iter()
                .fold(0, |sum: usize, part| sum.saturating_add(*part)),
            ..self
        }
    }

    /// What ko2iblnd keeps for an interface, not for a connection.
    fn without_pools(self) -> Self {
        Self {
            windows: 0,
            page_lists: 0,
            list_bytes: 0,
            ..self
        }
        .summed()
    }
}

/// From the lengths that a core's storage and its device's really have.
fn ours(shape: &Shape, profile: &Profile) -> Result<Amounts, NodeError> {
    let sizes = shape.sizes();
    let narrow = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
    let limits = soft::Limits {
        queue_pairs: narrow(sizes.connections),
        send_wr: sizes.send_wr,
        recv_wr: sizes.recv_wr,
        windows: narrow(sizes.regions.saturating_add(sizes.mappings)),
        memories: 1,
        cqe: sizes.cqe,
    };
    let device = limits
        .sizes(profile)
        .ok_or_else(|| Plan::small_device(shape, profile))?;
    let (send_wr, receives) = (
        sizes.connections.saturating_mul(sizes.send_wr as usize),
        sizes.receives,
    );
    let cqe = sizes.cqe as usize;
    let state = [
        sizes
            .connections
            .saturating_mul(size_of::<Slot<Connection<'_>>>()),
        sizes
            .transfers
            .saturating_mul(size_of::<Slot<Transfer<'_>>>()),
        sizes
            .receives
            .saturating_mul(size_of::<Slot<Receive<'_>>>()),
        sizes
            .regions
            .saturating_mul(size_of::<Option<Descriptor>>()),
        sizes.staging.saturating_mul(size_of::<Option<Range<'_>>>()),
        sizes.mappings.saturating_mul(size_of::<Slot<Mapping>>()),
        sizes.ways.saturating_mul(size_of::<Ways>()),
        sizes
            .messages
            .saturating_mul(size_of::<Option<Buffer<'_>>>()),
        sizes.sends.saturating_mul(size_of::<WrId>()),
        device
            .queue_pairs
            .saturating_mul(size_of::<soft::QueuePairSlot>()),
        device.pieces.saturating_mul(size_of::<Sge>()),
        device.regions.saturating_mul(size_of::<soft::RegionSlot>()),
    ];
    Ok(Amounts {
        connections: sizes.connections,
        send_wr,
        receives,
        cqe,
        windows: sizes.regions.saturating_add(sizes.mappings),
        page_lists: sizes
            .regions
            .saturating_add(sizes.mappings)
            .saturating_mul(2),
        message_bytes: sizes.messages.saturating_mul(MESSAGE_BYTES),
        list_bytes: device.fragments.saturating_mul(size_of::<soft::Fragment>()),
        queue_bytes: queues(send_wr, receives, cqe),
        state_bytes: state
            .iter()
            .fold(0, |sum: usize, part| sum.saturating_add(*part)),
        staging_bytes: sizes.staging.saturating_mul(STAGE_BYTES as usize),
        bytes: 0,
    }
    .summed())
}

/// Lustre 2.14 and later with its defaults: a send queue of `max_frags + 3` per unit of depth (LU-9943), as many
/// completions as requests of both queues (LU-12065), `2 * depth + 2` receives of a message each; for each interface
/// 512 transfer descriptors (`ntx`), and 512 FastReg descriptors (`fmr_pool_size`).
fn kernel(connections: usize, depth: usize, frags: usize) -> Amounts {
    let each = |count: usize| connections.saturating_mul(count);
    let send_wr = each(frags.saturating_add(3).saturating_mul(depth));
    let receives = each(depth.saturating_mul(2).saturating_add(2));
    let cqe = send_wr.saturating_add(receives);
    Amounts {
        connections,
        send_wr,
        receives,
        cqe,
        windows: FMR_POOL_SIZE,
        page_lists: NTX,
        message_bytes: receives.saturating_mul(MESSAGE_BYTES),
        list_bytes: NTX.saturating_mul(TX_BYTES),
        queue_bytes: queues(send_wr, receives, cqe),
        state_bytes: 0,
        staging_bytes: 0,
        bytes: 0,
    }
    .summed()
}

fn queues(send_wr: usize, receives: usize, cqe: usize) -> usize {
    send_wr
        .saturating_add(receives)
        .saturating_add(cqe)
        .saturating_mul(ENTRY_BYTES)
}

fn count(count: usize) -> String {
    match count {
        0 => String::from("-"),
        count => count.to_string(),
    }
}

fn kibibytes(bytes: usize) -> String {
    match bytes {
        0 => String::from("-"),
        bytes => format!("{} KiB", bytes.div_ceil(1024)),
    }
}

/// The least that a queue entry takes on an mlx5: a work queue's basic block, a completion.
const ENTRY_BYTES: usize = 64;
/// ko2iblnd's transfer descriptors of one interface.
const NTX: usize = 512;
/// ko2iblnd's FastReg descriptors of one interface and CPU partition.
const FMR_POOL_SIZE: usize = 512;
/// One transfer descriptor of ko2iblnd: a message, and tables for 257 fragments (scatterlist, work requests, two
/// scatter/gather entries each, descriptor, pages). An estimate from the sizes of their entries.
const TX_BYTES: usize = 40 << 10;

#[cfg(test)]
mod tests {
    use super::kernel;

    /// LU-12901's formulas at the depths that are met in the field.
    #[test]
    fn ko2iblnd_takes_what_its_source_says() {
        for (depth, send_wr, receives, cqe, messages) in [
            (8, 2080, 18, 2098, 72 << 10),
            (16, 4160, 34, 4194, 136 << 10),
            (32, 8320, 66, 8386, 264 << 10),
            (128, 33_280, 258, 33_538, 1032 << 10),
        ] {
            let one = kernel(1, depth, 257).without_pools();
            assert_eq!(
                (one.send_wr, one.receives, one.cqe, one.message_bytes),
                (send_wr, receives, cqe, messages)
            );
            let many = kernel(10, depth, 257);
            assert_eq!(many.send_wr, 10 * send_wr);
            assert_eq!(
                many.bytes,
                10 * one.bytes + many.list_bytes,
                "pools are there once"
            );
        }
        assert_eq!(kernel(1, 8, 1).send_wr, 32);
    }
}
