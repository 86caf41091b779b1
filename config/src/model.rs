//! What a node file says, checked: plain structs without a line number in them.

use core::time::Duration;
use std::path::{Path, PathBuf};

use o2poll_dataplane::endpoint::{MatchBits, Portal};
use o2poll_dataplane::wire::Nid;

/// A node file: one device, and the nodes that stand on it.
///
/// Every reference in it leads somewhere: a [`CopyJob`] or [`Workload`] names a node and an export by
/// index, and what it asks for fits. See [`Config::load`](crate::Config::load) for what is refused.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The file this came from; relative file names in it were resolved against its folder.
    pub origin: PathBuf,
    /// What the nodes are joined by.
    pub device: Device,
    /// How memory is asked of the kernel, and what of it peers may be shown.
    pub memory: Memory,
    /// LNet's and o2iblnd's numbers, the same for every node of the file.
    pub tunables: Tunables,
    /// At least one.
    pub nodes: Vec<Node>,
}

impl Config {
    /// The export that a job names by (node, export).
    #[must_use]
    pub fn export(&self, at: ExportRef) -> Option<&Export> {
        self.nodes.get(at.node)?.exports.get(at.export)
    }

    /// Index of the node with this NID.
    #[must_use]
    pub fn node_of(&self, nid: Nid) -> Option<usize> {
        self.nodes.iter().position(|node| node.nid == nid)
    }
}

/// `[device]`
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Device {
    /// The software device: every node of the file in one process.
    Soft(Soft),
    /// `verbs = "NAME"`: a device of libibverbs. Nodes of the file may run in other processes, on other machines.
    /// Only in a build with the feature `verbs`.
    Verbs(String),
}

/// `soft = { .. }`. A limit that is `None` is the profile's own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Soft {
    /// Which card it behaves like.
    pub profile: SoftProfile,
    /// Most pieces of a registered fragment list, or of a mapping, 1 to 257.
    pub max_fragments: Option<u32>,
    /// Most pages of a registered page list, 1 to 257.
    pub max_pages: Option<u32>,
    /// Most local pieces of one work request, 1 to 257.
    pub max_sge: Option<u32>,
    /// Most send work requests of one queue pair, 16 to 65536.
    pub max_send_wr: Option<u32>,
    /// Most receives of one queue pair, 4 to 65536.
    pub max_recv_wr: Option<u32>,
    /// Most entries of one completion queue, 16 to 2^22.
    pub max_cqe: Option<u32>,
    /// Most windows (regions, mappings) of one core, 1 to 2^20.
    pub max_windows: Option<u32>,
    /// Most queue pairs of one core, 1 to 2^20.
    pub max_qp: Option<u32>,
    /// Most send work requests that a queue pair really gets, whatever `max_send_wr` promises, 16 to 65536 (LU-10213).
    pub granted_send_wr: Option<u32>,
}

/// Which card the software device behaves like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SoftProfile {
    /// Fast registration as a kernel consumer of a modern card has it.
    Frwr,
    /// User-space UMR: at most 56 fragments, zero-based.
    Mlx5,
    /// Page lists without gaps.
    Mlx4,
    /// Type-2B memory windows.
    Windows,
    /// Type-2B memory windows as soft-RoCE has them.
    Rxe,
    /// No fast registration: only mappings that the control side makes.
    Mthca,
    /// Nothing but the key of the arena.
    Bare,
}

impl SoftProfile {
    /// Each of them.
    pub const ALL: [Self; 7] = [
        Self::Frwr,
        Self::Mlx5,
        Self::Mlx4,
        Self::Windows,
        Self::Rxe,
        Self::Mthca,
        Self::Bare,
    ];

    /// As written in a file.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Frwr => "frwr",
            Self::Mlx5 => "mlx5",
            Self::Mlx4 => "mlx4",
            Self::Windows => "windows",
            Self::Rxe => "rxe",
            Self::Mthca => "mthca",
            Self::Bare => "bare",
        }
    }
}

/// `[memory]`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// Arenas in huge pages.
    pub huge_pages: Wish,
    /// Arenas locked in memory.
    pub mlock: Wish,
    /// Whether a peer may be given the key that lies over a whole arena. Default none.
    pub exposure: Exposure,
    /// Buffers of 1 MiB per core that data is copied through where no key can lie over the buffer itself, 0 to
    /// 256. Default 4.
    pub staging: u16,
}

/// What a peer may be given a key to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exposure {
    /// The bytes of one transfer, for as long as it takes.
    None,
    /// The arena with everything in it, for as long as the node runs.
    Arena,
}

/// How much something is wanted that the kernel may refuse.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wish {
    /// Go on without it, with a line that says so.
    Try,
    /// Refuse to start without it.
    Require,
    /// Do not ask.
    Off,
}

/// `[tunables]`: ko2iblnd's names and, where it has one, its default.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tunables {
    /// Queue depth to ask for, 8 to 255. Default 8.
    pub peer_credits: u8,
    /// Return credits by a NOOP when this many are owed; within [peer_credits / 2, peer_credits - 1].
    /// Default peer_credits / 2 (LU-12569, LU-15828).
    pub peer_credits_hiw: u8,
    /// Most fragments of one RDMA descriptor, 1 to 257. Default 257.
    pub max_frags: u16,
    /// Where [`Exposure::Arena`] allows it, a buffer of fewer fragments than this is described by the arena's key, and
    /// registered from here on; 0 registers nothing. 0 to 256. Default 1: everything is registered.
    pub map_on_demand: u16,
    /// A source of so many ranges is registered, where the device can do that for itself, and written with one WRITE; 0
    /// never, 0 to 257. Default 0: on the software device gathering is faster for any number of ranges.
    pub register_sources_from: u16,
    /// Mappings of one core, on a device that has no registration of its own (`mthca`), 0 to 65536; 0 keeps none.
    /// Default 512.
    pub fmr_pool_size: u32,
    /// Unused mappings are unmapped when so many of them stand, 1 to `fmr_pool_size`. Default three quarters of it.
    pub fmr_flush_trigger: u32,
    /// A mapping may serve another transfer of the same memory. Default true.
    pub fmr_cache: bool,
    /// A transfer's deadline, and how long a peer may be silent. Default 50 s.
    pub timeout: Duration,
    /// How long past its deadline a transfer holds its key before its connection is closed. Default 50 s.
    pub abandon_limit: Duration,
    /// A connection idle for this long sends a NOOP. Default 100 s.
    pub keepalive: Duration,
    /// Connections that a node makes to each peer of its jobs, 1 to 64; its transfers are spread over them. Default 1.
    pub conns_per_peer: u8,
    /// How often in a row a node tries to make a connection again that it has lost, 0 to 10000; 0 gives up at once.
    /// Default 20.
    pub reconnects: u16,
    /// The pause before the second of these attempts; the first is made at once, and each later pause is twice the one
    /// before, 1 ms to 1 h. Default 100 ms.
    pub min_reconnect: Duration,
    /// The longest such pause, 1 ms to 1 h. Default 1 s, ko2iblnd's pause.
    pub max_reconnect: Duration,
    /// WRITEs posted at a time for one transfer, 1 to 64; more go in instalments. Default 4.
    pub concurrent_writes: u8,
    /// What a polling thread does that found nothing to do.
    pub idle: Idle,
}

/// What a polling thread does that found nothing to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Idle {
    /// [`Placement::idle`](crate::Placement::idle) decides: spin unless polling threads outnumber processors.
    Auto,
    /// Poll again.
    Spin,
    /// Give the processor to whoever waits for it.
    Yield,
}

/// `[[node]]`
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// Its name on the fabric; unlike any other in the file, and on an o2ib network.
    pub nid: Nid,
    /// Where it polls.
    pub cores: Cores,
    /// Connections that it makes to each peer of its jobs. Default: [`Tunables::conns_per_peer`].
    pub conns_per_peer: u8,
    /// What it does with a peer that is o2poll too, and never with a kernel.
    pub extensions: Extensions,
    /// What peers may reach.
    pub exports: Vec<Export>,
    /// Its first job.
    pub copy: Option<CopyJob>,
    /// Its second job.
    pub workload: Option<Workload>,
}

/// `[node.extensions]`: what goes beyond ko2iblnd. Each is used if both sides of a connection have it on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extensions {
    /// The answer to a GET or PUT_REQ kills the sink's key as it arrives (SEND_WITH_INV). Default true.
    pub send_with_invalidate: bool,
    /// The last data of a GET or PUT has immediate data, which takes the place of that answer (WRITE_WITH_IMM). Goes before
    /// `send_with_invalidate`, where both sides have both. Default false.
    pub write_with_immediate: bool,
}

impl Default for Extensions {
    fn default() -> Self {
        Self {
            send_with_invalidate: true,
            write_with_immediate: false,
        }
    }
}

/// `cores = ..`
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cores {
    /// [`Config::placement`](crate::Config::placement) chooses one.
    Auto,
    /// These, each allowed to this process and named once; never empty. One polling thread each; connections go to
    /// the one that has fewest.
    Listed(Vec<usize>),
}

/// `[[node.export]]`
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Export {
    /// How jobs of the file refer to it; unique in its node.
    pub name: String,
    /// Never 0, which is LNet's own.
    pub portal: Portal,
    /// Of the first piece; piece `i` answers to `match_bits + i`.
    pub match_bits: MatchBits,
    /// Where the bytes come from.
    pub content: Content,
    /// Bytes, at least 1. A file's length when the file was checked.
    pub length: u64,
    /// Bytes of one piece, less than 4 GiB since offsets on the wire have 32 bits. The last may be shorter.
    pub piece: u32,
    /// Peers may PUT here; they may always GET.
    pub writable: bool,
}

impl Export {
    /// The entries that it takes, in order.
    pub fn pieces(&self) -> impl Iterator<Item = Piece> + '_ {
        let piece = u64::from(self.piece.max(1));
        (0..self.length.div_ceil(piece)).map(move |i| {
            let offset = i.saturating_mul(piece);
            Piece {
                match_bits: MatchBits(self.match_bits.0.wrapping_add(i)),
                offset,
                length: u32::try_from(piece.min(self.length.saturating_sub(offset)))
                    .unwrap_or(self.piece),
            }
        })
    }

    /// Where byte `offset` of the export is: match bits, offset there, and how many bytes its piece
    /// still has from there on (0 at or past the end).
    #[must_use]
    pub fn locate(&self, offset: u64) -> Location {
        let piece = u64::from(self.piece.max(1));
        let inside = offset % piece;
        let room = self
            .length
            .saturating_sub(offset)
            .min(piece.saturating_sub(inside));
        Location {
            match_bits: MatchBits(self.match_bits.0.wrapping_add(offset / piece)),
            offset: u32::try_from(inside).unwrap_or(u32::MAX),
            room: u32::try_from(room).unwrap_or(u32::MAX),
        }
    }

    /// The exported file.
    #[must_use]
    pub fn file(&self) -> Option<&Path> {
        match &self.content {
            Content::File(path) => Some(path),
            Content::Memory => None,
        }
    }
}

/// Where an export's bytes come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// A regular file that could be opened for reading when it was checked.
    File(PathBuf),
    /// Memory, zeros at first.
    Memory,
}

/// One entry of an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// What it answers to.
    pub match_bits: MatchBits,
    /// Its first byte in the export.
    pub offset: u64,
    /// Its bytes.
    pub length: u32,
}

/// A byte of an export, as a peer must ask for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Location {
    /// The piece.
    pub match_bits: MatchBits,
    /// Offset in the piece.
    pub offset: u32,
    /// Bytes from here to the end of the piece.
    pub room: u32,
}

/// An export of some node of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExportRef {
    /// Index in [`Config::nodes`].
    pub node: usize,
    /// Index in [`Node::exports`].
    pub export: usize,
}

/// `[node.copy]`: GET the file whole, compare its SHA-256, PUT it into a region, GET it back, compare.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyJob {
    /// Who exports both; another node of the file, on the same network.
    pub peer: Nid,
    /// A [`Content::File`] of that node.
    pub file: ExportRef,
    /// A writable export of that node, as long as the file or longer.
    pub into: ExportRef,
    /// Bytes of one transfer, 1 to 1 MiB. Default 1 MiB.
    pub transfer: u32,
    /// Transfers at a time, 1 to [`MAX_IN_FLIGHT`]. Default: peer_credits.
    pub in_flight: u32,
    /// A transfer that fails with its connection is made again. Default true.
    pub repeat: bool,
}

/// `[node.workload]`: PUTs and GETs of mixed sizes, for a while.
#[derive(Clone, Debug, PartialEq)]
pub struct Workload {
    /// Who exports the region; another node of the file, on the same network.
    pub peer: Nid,
    /// A writable export of that node, with room for `in_flight` transfers of the largest size side by side.
    pub region: ExportRef,
    /// At least one.
    pub sizes: Vec<WeightedSize>,
    /// Share of PUTs, 0 to 1; the others are GETs. Default 0.5.
    pub put: f64,
    /// Transfers at a time, 1 to [`MAX_IN_FLIGHT`]. Default: peer_credits.
    pub in_flight: u32,
    /// How long. Default 5 s.
    pub duration: Duration,
    /// Compare what comes back with what was written. Default true.
    pub verify: bool,
    /// Of sizes, order and contents. Default 1.
    pub seed: u64,
    /// A transfer that fails with its connection is made again. Default true.
    pub repeat: bool,
}

impl Workload {
    /// Its largest size.
    #[must_use]
    pub fn largest(&self) -> u32 {
        self.sizes.iter().map(|size| size.bytes).max().unwrap_or(0)
    }
}

/// One size of a workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightedSize {
    /// 1 to 1 MiB.
    pub bytes: u32,
    /// Of this out of the sum of all weights, at least 1. Default 1.
    pub weight: u32,
}

/// Largest PUT or GET: the LNet MTU, 1 MiB.
pub const MAX_TRANSFER: u32 = 1 << 20;

/// The last portal: LNet has 64 (MAX_PORTALS).
pub const MAX_PORTAL: u32 = 63;

/// Most transfers that one job keeps going.
pub const MAX_IN_FLIGHT: u32 = 1024;

/// Most entries that one export may take.
pub const MAX_PIECES: u64 = 4096;

#[cfg(test)]
mod tests {
    use super::{Content, Export, Location, MatchBits, Piece, Portal};

    fn export(length: u64, piece: u32) -> Export {
        Export {
            name: String::from("x"),
            portal: Portal(50),
            match_bits: MatchBits(7),
            content: Content::Memory,
            length,
            piece,
            writable: true,
        }
    }

    #[test]
    fn pieces_cover_every_byte_once() {
        for (length, piece, count) in [
            (1, 4096, 1),
            (4096, 4096, 1),
            (4097, 4096, 2),
            (1 << 33, 1 << 30, 8),
        ] {
            let export = export(length, piece);
            let pieces: Vec<Piece> = export.pieces().collect();
            assert_eq!(pieces.len(), count);
            let mut next = 0;
            for (i, piece) in pieces.iter().enumerate() {
                assert_eq!(piece.offset, next);
                assert_eq!(piece.match_bits.0, 7 + i as u64);
                assert!(piece.length > 0);
                next += u64::from(piece.length);
            }
            assert_eq!(next, length);
        }
    }

    #[test]
    fn a_location_agrees_with_the_pieces() {
        let export = export(10_000, 4096);
        for piece in export.pieces() {
            for inside in [0, 1, piece.length - 1] {
                assert_eq!(
                    export.locate(piece.offset + u64::from(inside)),
                    Location {
                        match_bits: piece.match_bits,
                        offset: inside,
                        room: piece.length - inside
                    }
                );
            }
        }
        assert_eq!(export.locate(10_000).room, 0);
        assert_eq!(export.locate(1 << 40).room, 0);
    }
}
