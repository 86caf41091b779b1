//! The ping info: what a node answers to an LNet ping, a GET of portal 0 with
//! [`MATCH_BITS`].

use zerocopy::{BigEndian, LittleEndian, NativeEndian};

use super::layout::{self, take};
use super::{ByteOrder, Nid, Pid};

/// LNet's reserved portal.
pub const PORTAL: u32 = 0;
/// Match bits of a ping, and of the PUT that pushes an info.
pub const MATCH_BITS: u64 = 0x8000_0000_0000_0000;
/// Bytes of what [`encode`] makes: two entries.
pub const BYTES: usize = 48;
/// What a kernel's discovery asks for: 16 entries.
pub const DISCOVERY_SINK: u32 = 272;
/// Most entries of a legal info (LNet's own default).
pub const MAX_ENTRIES: u32 = 4096;

bitflags::bitflags! {
    /// What a node says it can do.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct Features: u32 {
        /// The first format.
        const BASE = 0x01;
        /// Entries carry a status. Every node says so.
        const NI_STATUS = 0x02;
        /// This node does *not* route.
        const RTE_DISABLED = 0x04;
        /// Several interfaces are one peer. With DISCOVERY, kernels push their info to us and wait
        /// for the ACK.
        const MULTI_RAIL = 0x08;
        /// Takes part in discovery.
        const DISCOVERY = 0x10;
        /// Entries with 20-byte addresses follow.
        const LARGE_ADDR = 0x20;
        /// The primary NID is one of those.
        const PRIMARY_LARGE = 0x40;
        /// Metadata follow.
        const METADATA = 0x80;
        /// What a later LNet may add.
        const _ = !0;
    }
}

impl Features {
    /// A node with one interface that neither routes nor takes part in discovery: what this project
    /// answers.
    pub const PLAIN: Self = Self::NI_STATUS.union(Self::RTE_DISABLED);
}

/// State of an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Status {
    /// 0x15aac0de.
    Up,
    /// 0xdeadface.
    Down,
    /// Anything else; 0 is "invalid".
    Other(u32),
}

/// One interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its NID.
    pub nid: Nid,
    /// Its state.
    pub status: Status,
}

/// Why bytes are no ping info.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum PingError {
    /// Shorter than the shortest info there is, 32 bytes.
    #[error("shorter than the shortest ping info")]
    Short,
    /// The magic is a ping's in neither byte order.
    #[error("magic {0:#010x} is not a ping's")]
    Magic(u32),
    /// From before interfaces had a status.
    #[error("features {0:#x} lack NI_STATUS")]
    NoStatus(u32),
    /// No interface, or more than 4096.
    #[error("{0} interfaces, not 1 to 4096")]
    Count(u32),
    /// The first entry is not `0@lo`.
    #[error("first interface is not 0@lo")]
    NoLoopback,
    /// The info is longer than the buffer it was asked for with: ask again with `needed` bytes.
    #[error("cut short: the whole has {needed} bytes")]
    Truncated {
        /// Bytes of header and entries.
        needed: u32,
    },
}

/// A peer's ping info.
#[derive(Clone, Copy, Debug)]
pub struct PingInfo<'m> {
    order: ByteOrder,
    features: Features,
    pid: Pid,
    sequence: u32,
    entries: &'m [[u8; 16]],
}

impl PingInfo<'_> {
    /// Reads the payload of a REPLY to a ping, or of a push. Large addresses behind the entries are
    /// not looked at.
    ///
    /// # Errors
    /// See [`PingError`].
    pub fn decode(bytes: &[u8]) -> Result<PingInfo<'_>, PingError> {
        let (start, _) = take::<layout::Ping<LittleEndian>>(bytes).ok_or(PingError::Short)?;
        match start.magic.get() {
            MAGIC => decode::<LittleEndian>(bytes, ByteOrder::Little),
            magic if magic.swap_bytes() == MAGIC => decode::<BigEndian>(bytes, ByteOrder::Big),
            magic => Err(PingError::Magic(magic)),
        }
    }
}

impl<'m> PingInfo<'m> {
    /// What the node can do.
    #[must_use]
    pub const fn features(&self) -> Features {
        self.features
    }

    /// Its LNet process id.
    #[must_use]
    pub const fn pid(&self) -> Pid {
        self.pid
    }

    /// Grows with every change of the info.
    #[must_use]
    pub const fn sequence(&self) -> u32 {
        self.sequence
    }

    /// The NID the node goes by: its first interface after the loopback.
    #[must_use]
    pub fn primary(&self) -> Option<Nid> {
        self.entries().next().map(|entry| entry.nid)
    }

    /// Its interfaces without the loopback, whose entry is the [`sequence`](Self::sequence).
    pub fn entries(&self) -> impl Iterator<Item = Entry> + use<'m> {
        let order = self.order;
        self.entries.iter().skip(1).map(move |bytes| {
            let (nid, status) = entry(*bytes, order);
            Entry {
                nid,
                status: Status::from_code(status),
            }
        })
    }
}

impl Status {
    /// Its number.
    #[must_use]
    pub const fn code(self) -> u32 {
        match self {
            Self::Up => UP,
            Self::Down => DOWN,
            Self::Other(code) => code,
        }
    }

    /// By number.
    #[must_use]
    pub const fn from_code(code: u32) -> Self {
        match code {
            UP => Self::Up,
            DOWN => Self::Down,
            code => Self::Other(code),
        }
    }
}

/// The info of a node with one interface, `nid`, that is up. Native order.
///
/// `sequence` must change whenever anything else does.
#[must_use]
pub fn encode(features: Features, pid: Pid, sequence: u32, nid: Nid) -> [u8; BYTES] {
    let entry = |nid: Nid, status: u32| layout::PingEntry::<NativeEndian> {
        nid: nid.0.into(),
        status: status.into(),
        msg_size: 0.into(),
    };
    let start = layout::Ping::<NativeEndian> {
        magic: MAGIC.into(),
        features: features.bits().into(),
        pid: pid.0.into(),
        nnis: 2.into(),
    };
    zerocopy::transmute!(layout::PingPlain {
        start,
        loopback: entry(Nid::LOOPBACK, sequence),
        own: entry(nid, Status::Up.code()),
    })
}

fn decode<O: zerocopy::ByteOrder + 'static>(
    bytes: &[u8],
    order: ByteOrder,
) -> Result<PingInfo<'_>, PingError> {
    let (start, rest) = take::<layout::Ping<O>>(bytes).ok_or(PingError::Short)?;
    let features = Features::from_bits_retain(start.features.get());
    if !features.contains(Features::NI_STATUS) {
        return Err(PingError::NoStatus(features.bits()));
    }
    let count = start.nnis.get();
    if count == 0 || count > MAX_ENTRIES {
        return Err(PingError::Count(count));
    }
    let (entries, _) = rest.as_chunks();
    let (loopback, sequence) = entry(*entries.first().ok_or(PingError::Short)?, order);
    if loopback != Nid::LOOPBACK {
        return Err(PingError::NoLoopback);
    }
    let entries = entries
        .get(..count as usize)
        .ok_or_else(|| PingError::Truncated {
            needed: count.saturating_mul(16).saturating_add(16),
        })?;
    Ok(PingInfo {
        order,
        features,
        pid: Pid(start.pid.get()),
        sequence,
        entries,
    })
}

fn entry(bytes: [u8; 16], order: ByteOrder) -> (Nid, u32) {
    match order {
        ByteOrder::Little => {
            let view: layout::PingEntry<LittleEndian> = zerocopy::transmute!(bytes);
            (Nid(view.nid.get()), view.status.get())
        }
        ByteOrder::Big => {
            let view: layout::PingEntry<BigEndian> = zerocopy::transmute!(bytes);
            (Nid(view.nid.get()), view.status.get())
        }
    }
}

const MAGIC: u32 = 0x7069_6e67;
const UP: u32 = 0x15aa_c0de;
const DOWN: u32 = 0xdead_face;

#[cfg(test)]
mod tests {
    extern crate std;

    use std::vec::Vec;

    use super::{ByteOrder, Entry, Features, Nid, Pid, PingError, PingInfo, Status, encode};

    const OWN: Nid = Nid::o2ib([10, 9, 0, 1], 0);

    fn info() -> [u8; 48] {
        encode(Features::PLAIN, Pid::LUSTRE, 7, OWN)
    }

    /// The same info as a node of the other byte order sends it.
    fn swapped(info: &[u8]) -> Vec<u8> {
        let (words, rest) = info.split_at(16);
        let mut bytes: Vec<u8> = words
            .chunks(4)
            .flat_map(|word| word.iter().rev().copied())
            .collect();
        for entry in rest.chunks(16) {
            for field in [&entry[..8], &entry[8..12], &entry[12..]] {
                bytes.extend(field.iter().rev());
            }
        }
        bytes
    }

    #[test]
    fn an_info_says_what_it_was_made_of_in_both_orders() {
        for bytes in [info().to_vec(), swapped(&info())] {
            let info = PingInfo::decode(&bytes).unwrap();
            assert_eq!(info.features(), Features::PLAIN);
            assert_eq!(info.features().bits(), 6);
            assert_eq!((info.pid(), info.sequence()), (Pid::LUSTRE, 7));
            assert_eq!(info.primary(), Some(OWN));
            let entries: Vec<_> = info.entries().collect();
            let up = Entry {
                nid: OWN,
                status: Status::Up,
            };
            assert_eq!(entries, [up]);
        }
    }

    #[test]
    fn the_info_of_a_node_with_many_interfaces_is_walked() {
        let mut bytes = info().to_vec();
        bytes[12] = 5;
        for (i, status) in [super::DOWN, 0, 9].into_iter().enumerate() {
            bytes.extend((OWN.0 + 1 + i as u64).to_ne_bytes());
            bytes.extend(status.to_ne_bytes());
            bytes.extend([0; 4]);
        }
        let statuses: Vec<_> = PingInfo::decode(&bytes)
            .unwrap()
            .entries()
            .map(|entry| entry.status)
            .collect();
        let expected = [Status::Up, Status::Down, Status::Other(0), Status::Other(9)];
        assert_eq!(statuses, expected);
        assert_eq!(
            PingInfo::decode(&bytes[..95]).err(),
            Some(PingError::Truncated { needed: 96 })
        );
    }

    #[test]
    fn each_defect_has_its_name() {
        let with = |at: usize, word: u32| {
            let mut bytes = info();
            bytes[at..at + 4].copy_from_slice(&word.to_ne_bytes());
            bytes
        };
        let refused = |bytes: &[u8], why| assert_eq!(PingInfo::decode(bytes).err(), Some(why));
        refused(&info()[..15], PingError::Short);
        refused(&info()[..31], PingError::Short);
        refused(&with(0, 0), PingError::Magic(0));
        refused(&with(4, 1), PingError::NoStatus(1));
        refused(&with(12, 0), PingError::Count(0));
        refused(&with(12, 4097), PingError::Count(4097));
        refused(&with(16, 1), PingError::NoLoopback);
        refused(&with(12, 4096), PingError::Truncated { needed: 65552 });
        refused(&info()[..47], PingError::Truncated { needed: 48 });
    }

    #[test]
    fn features_without_a_name_survive() {
        let info = encode(Features::from_bits_retain(0x8002), Pid::LUSTRE, 1, OWN);
        let info = PingInfo::decode(&info).unwrap();
        assert_eq!(info.features().bits(), 0x8002);
        assert_eq!(info.order, ByteOrder::NATIVE);
    }
}
