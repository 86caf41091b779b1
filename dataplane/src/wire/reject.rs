//! The record that a rejected CM REQ gets as private data.

use zerocopy::{BigEndian, LittleEndian};

use super::layout::{self, RejectStart, Start, take};
use super::message::raw_params;
use super::{
    ByteOrder, ConnParams, MAGIC, MESSAGE_BYTES, REJECT_BYTES, UNIFIED_MAGIC, V1, V2, WireError,
};

/// Why a connection request was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Why {
    /// Both dial each other and the rejecter wins.
    ConnRace,
    /// No resources.
    NoResources,
    /// Never again with this request.
    Fatal,
    /// Another protocol version is spoken there: the record's.
    ConnUncompat,
    /// The request was meant for, or came from, an earlier life of a node.
    ConnStale,
    /// More fragments asked for than the record grants.
    RdmaFrags,
    /// More peer credits asked for than the record grants.
    MsgQueueSize,
    /// Reserved; without a listener the CM itself rejects, with its own reason 8.
    InvalidSrvId,
    /// The node is starting (2.16 and later, LU-16393).
    Early,
    /// A number without a name.
    Unknown(u8),
}

impl Why {
    /// Its number.
    #[must_use]
    pub const fn code(self) -> u8 {
        match self {
            Self::ConnRace => 1,
            Self::NoResources => 2,
            Self::Fatal => 3,
            Self::ConnUncompat => 4,
            Self::ConnStale => 5,
            Self::RdmaFrags => 6,
            Self::MsgQueueSize => 7,
            Self::InvalidSrvId => 8,
            Self::Early => 9,
            Self::Unknown(code) => code,
        }
    }

    /// By number.
    #[must_use]
    pub const fn from_code(code: u8) -> Self {
        match code {
            1 => Self::ConnRace,
            2 => Self::NoResources,
            3 => Self::Fatal,
            4 => Self::ConnUncompat,
            5 => Self::ConnStale,
            6 => Self::RdmaFrags,
            7 => Self::MsgQueueSize,
            8 => Self::InvalidSrvId,
            9 => Self::Early,
            code => Self::Unknown(code),
        }
    }
}

/// A reject record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RejectRecord {
    /// What the rejecter speaks.
    pub version: u16,
    /// Why.
    pub why: Why,
    /// Incarnation of the rejecter: 0 if it found no interface of that NID, all ones
    /// ([`UNKNOWN`](Self::UNKNOWN)) in a record that has none.
    pub incarnation: u64,
    /// What the rejecter would accept; `None` in a version 1 or short record. Never to be adopted from
    /// a FATAL one.
    pub params: Option<ConnParams>,
}

impl RejectRecord {
    /// The incarnation of a record that names none.
    pub const UNKNOWN: u64 = u64::MAX;

    /// Reads the private data of a CM REJ with reason 28 ("consumer defined").
    ///
    /// # Errors
    /// [`Runt`](WireError::Runt) below seven bytes, [`Magic`](WireError::Magic),
    /// [`Version`](WireError::Version).
    pub fn decode(bytes: &[u8]) -> Result<(Self, ByteOrder), WireError> {
        let (start, _) = take::<RejectStart<LittleEndian>>(bytes).ok_or(WireError::Runt)?;
        match start.start.magic.get() {
            MAGIC | UNIFIED_MAGIC => Ok((decode::<LittleEndian>(bytes)?, ByteOrder::Little)),
            magic if matches!(magic.swap_bytes(), MAGIC | UNIFIED_MAGIC) => {
                Ok((decode::<BigEndian>(bytes)?, ByteOrder::Big))
            }
            magic => Err(WireError::Magic(magic)),
        }
    }

    /// The record in native order. Without `params` it says what ko2iblnd says before it has found
    /// an interface: depth 0, fragments 0, 4096 bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; REJECT_BYTES] {
        self.encode_as(ByteOrder::NATIVE)
    }

    /// The record in either order.
    #[must_use]
    pub fn encode_as(&self, order: ByteOrder) -> [u8; REJECT_BYTES] {
        match order {
            ByteOrder::Little => encode::<LittleEndian>(self),
            ByteOrder::Big => encode::<BigEndian>(self),
        }
    }
}

fn decode<O: zerocopy::ByteOrder>(bytes: &[u8]) -> Result<RejectRecord, WireError> {
    let (begin, _) = take::<RejectStart<O>>(bytes).ok_or(WireError::Runt)?;
    let version = begin.start.version.get();
    if version != V1 && version != V2 {
        return Err(WireError::Version(version));
    }
    let mut record = RejectRecord {
        version,
        why: Why::from_code(begin.why),
        incarnation: RejectRecord::UNKNOWN,
        params: None,
    };
    if let (V2, Some((whole, _))) = (version, take::<layout::Reject<O>>(bytes)) {
        record.incarnation = whole.incarnation.get();
        record.params = Some(ConnParams {
            queue_depth: whole.params.queue_depth.get(),
            max_frags: whole.params.max_frags.get(),
            max_msg_size: whole.params.max_msg_size.get(),
        });
    }
    Ok(record)
}

fn encode<O: zerocopy::ByteOrder>(record: &RejectRecord) -> [u8; REJECT_BYTES] {
    let params = record.params.unwrap_or(ConnParams {
        queue_depth: 0,
        max_frags: 0,
        max_msg_size: MESSAGE_BYTES,
    });
    let whole = layout::Reject::<O> {
        begin: RejectStart {
            start: Start {
                magic: MAGIC.into(),
                version: record.version.into(),
            },
            why: record.why.code(),
        },
        pad: 0,
        incarnation: record.incarnation.into(),
        params: raw_params(&params),
    };
    zerocopy::transmute!(whole)
}

#[cfg(test)]
mod tests {
    use super::{ByteOrder, ConnParams, RejectRecord, V1, V2, Why, WireError};

    fn record() -> RejectRecord {
        RejectRecord {
            version: V2,
            why: Why::MsgQueueSize,
            incarnation: 0x0006_6172_90ad_15a3,
            params: Some(ConnParams {
                queue_depth: 8,
                max_frags: 257,
                max_msg_size: 4096,
            }),
        }
    }

    #[test]
    fn records_round_trip_in_both_orders() {
        for order in [ByteOrder::Little, ByteOrder::Big] {
            for code in 0..=255 {
                let why = Why::from_code(code);
                assert_eq!(why.code(), code);
                let record = RejectRecord { why, ..record() };
                let mut room = [0; 148];
                room[..24].copy_from_slice(&record.encode_as(order));
                assert_eq!(RejectRecord::decode(&room), Ok((record, order)));
            }
        }
    }

    #[test]
    fn old_and_short_records_name_no_values() {
        let bare = RejectRecord {
            incarnation: RejectRecord::UNKNOWN,
            params: None,
            ..record()
        };
        let bytes = record().encode();
        for length in [7, 8, 23] {
            let short = RejectRecord::decode(&bytes[..length]).unwrap().0;
            assert_eq!(short, bare);
        }
        let old = RejectRecord {
            version: V1,
            ..record()
        };
        let bare = RejectRecord {
            version: V1,
            ..bare
        };
        assert_eq!(RejectRecord::decode(&old.encode()).unwrap().0, bare);
    }

    #[test]
    fn without_values_it_says_what_a_kernel_says() {
        // As a kernel answered a CONNREQ of version 0x20.
        let record = RejectRecord {
            version: V2,
            why: Why::Fatal,
            incarnation: 0,
            params: None,
        };
        let bytes = record.encode_as(ByteOrder::Little);
        let expected = *b"\x91\x1b\xe9\x0b\x12\0\x03\0\0\0\0\0\0\0\0\0\0\0\0\0\0\x10\0\0";
        assert_eq!(bytes, expected);
    }

    #[test]
    fn what_is_no_record_is_refused() {
        let bytes = record().encode_as(ByteOrder::Little);
        assert_eq!(RejectRecord::decode(&bytes[..6]), Err(WireError::Runt));
        assert_eq!(RejectRecord::decode(&[0; 148]), Err(WireError::Magic(0)));
        let mut other = bytes;
        other[4] = 0x20;
        assert_eq!(RejectRecord::decode(&other), Err(WireError::Version(0x20)));
        for magic in [0x4572_6963_u32.to_le_bytes(), 0x0be9_1b91_u32.to_le_bytes()] {
            let mut other = bytes;
            other[..4].copy_from_slice(&magic);
            assert_eq!(RejectRecord::decode(&other).unwrap().0, record());
        }
    }
}
