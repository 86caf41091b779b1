//! What two o2poll nodes do for each other that o2iblnd does not know.
//!
//! The protocol's version stays 0x12. A CONNREQ says what its sender offers in its `credits` byte: ko2iblnd
//! sends 0 there and does not read it. A node that understands that adds a record behind byte 56 of its CONNACK, where a kernel's tail
//! is zero. So nothing costs another dial, Wireshark dissects both messages as ever, and a kernel
//! is never met with anything but its own protocol: who gets no record uses no extension.

use crate::pool::{SHORT_BITS, short_of};
use crate::wire::CONN_BYTES;

bitflags::bitflags! {
    /// What a node offers.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct Extensions: u8 {
        /// It can send its PUT_DONE and GET_DONE as SEND_WITH_INV, which kills the sink's key.
        const SENDS_INVALIDATE = 1;
        /// Every key it grants may be killed so: its device takes SEND_WITH_INV, and no key of it outlives one
        /// transfer.
        const KEYS_MAY_BE_KILLED = 2;
        /// Where all of a sink is written, the last WRITE has immediate data and no DONE follows, and the peer may do the
        /// same. See [`Immediate`].
        const LAST_WRITE_IMMEDIATE = 4;
    }
}

impl Extensions {
    /// What the `credits` byte of a CONNREQ offers. Bits nobody knows are of a later version, and no offer.
    #[must_use]
    pub const fn of_request(credits: u8) -> Self {
        Self::from_bits_truncate(credits)
    }

    /// The record behind byte 56 of a CONNACK: magic, its length, its version, the offer, zero.
    #[must_use]
    pub const fn record(self) -> [u8; RECORD_BYTES] {
        let [a, b, c, d] = MAGIC;
        [a, b, c, d, RECORD_LENGTH, VERSION, self.bits(), 0]
    }

    /// What the private data of a CM REP offer. Anything but a whole record of a version we know is what a kernel
    /// sends, and offers nothing.
    #[must_use]
    pub fn of_reply(private_data: &[u8]) -> Self {
        match private_data.get(CONN_BYTES..).and_then(<[u8]>::first_chunk) {
            Some([a, b, c, d, RECORD_LENGTH, VERSION, bits, _]) if [*a, *b, *c, *d] == MAGIC => {
                Self::from_bits_truncate(*bits)
            }
            _ => Self::empty(),
        }
    }

    /// Whether the DONEs of `self` kill keys of `sink`. Where there are no DONEs but of transfers that fell short, they
    /// kill nothing: the two extensions exclude each other.
    #[must_use]
    pub const fn kills_keys_of(self, sink: Self) -> bool {
        self.contains(Self::SENDS_INVALIDATE)
            && sink.contains(Self::KEYS_MAY_BE_KILLED)
            && !self.write_immediates(sink)
    }

    /// Whether the last WRITEs of either take the place of its DONEs.
    #[must_use]
    pub const fn write_immediates(self, other: Self) -> bool {
        self.intersection(other)
            .contains(Self::LAST_WRITE_IMMEDIATE)
    }
}

/// The 32 bits of immediate data in place of a DONE: all of the sink is written.
///
/// It consumes a receive like the DONE that it replaces, and like that no credit. Anything but that a sink was written
/// to its last byte (a failure, or data that fell short) is said by a DONE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Immediate {
    /// Credits that come back: the upper 8 bits.
    pub credits: u8,
    /// The low 24 bits of the sink's cookie.
    pub cookie: u32,
}

impl Immediate {
    /// For the transfer to which the peer gave this cookie.
    #[must_use]
    pub const fn new(credits: u8, cookie: u64) -> Self {
        Self {
            credits,
            cookie: short_of(cookie),
        }
    }

    /// As [`SendWr::Write`](crate::nic::SendWr::Write) has it.
    #[must_use]
    pub const fn to_bits(self) -> u32 {
        ((self.credits as u32) << SHORT_BITS) | self.cookie
    }

    /// The inverse. Any word is one.
    #[must_use]
    pub const fn from_bits(bits: u32) -> Self {
        Self {
            credits: (bits >> SHORT_BITS) as u8,
            cookie: short_of(bits as u64),
        }
    }
}

/// Bytes of the record.
pub const RECORD_BYTES: usize = 8;

/// Bytes of private data in a CM REP of ours: a CONNACK and a record, or zeros in place of that.
pub const REPLY_BYTES: usize = CONN_BYTES + RECORD_BYTES;

/// "o2px", in this order of bytes on every machine.
const MAGIC: [u8; 4] = *b"o2px";
const RECORD_LENGTH: u8 = 8;
const VERSION: u8 = 1;

#[cfg(test)]
mod tests {
    extern crate std;
    use super::{Extensions, Immediate, REPLY_BYTES};

    #[test]
    fn a_record_comes_back_and_every_other_byte_of_it_counts() {
        for bits in 0..8 {
            let offer = Extensions::of_request(bits);
            let mut reply = std::vec![0_u8; 196];
            reply[56..64].copy_from_slice(&offer.record());
            assert_eq!(Extensions::of_reply(&reply), offer);
            assert_eq!(Extensions::of_reply(&reply[..REPLY_BYTES]), offer);
            assert_eq!(
                Extensions::of_reply(&reply[..REPLY_BYTES - 1]),
                Extensions::empty(),
                "cut"
            );
            for at in 56..62 {
                let mut other = reply.clone();
                other[at] ^= 0x10;
                assert_eq!(Extensions::of_reply(&other), Extensions::empty(), "{at}");
            }
        }
    }

    #[test]
    fn what_a_kernel_sends_offers_nothing() {
        assert_eq!(Extensions::of_request(0), Extensions::empty());
        assert_eq!(Extensions::of_reply(&[0; 196]), Extensions::empty());
        assert_eq!(Extensions::of_reply(&[]), Extensions::empty());
    }

    #[test]
    fn bits_of_a_later_version_are_no_offer() {
        assert_eq!(Extensions::of_request(0xf8), Extensions::empty());
    }

    #[test]
    fn keys_are_killed_only_where_one_sends_so_and_the_other_lets_it() {
        let (sends, lets) = (Extensions::SENDS_INVALIDATE, Extensions::KEYS_MAY_BE_KILLED);
        assert!(sends.kills_keys_of(lets));
        assert!(!sends.kills_keys_of(sends));
        assert!(!lets.kills_keys_of(lets));
        assert!((sends | lets).kills_keys_of(sends | lets));
    }

    #[test]
    fn where_both_write_immediates_no_done_kills_a_key() {
        let immediate = Extensions::LAST_WRITE_IMMEDIATE;
        let kills = Extensions::SENDS_INVALIDATE | Extensions::KEYS_MAY_BE_KILLED;
        assert!(immediate.write_immediates(Extensions::all()));
        assert!(!Extensions::all().kills_keys_of(Extensions::all()));
        assert!(!kills.write_immediates(Extensions::all()));
        assert!(kills.kills_keys_of(Extensions::all()));
        assert!(Extensions::all().kills_keys_of(kills));
    }

    #[test]
    fn an_immediate_has_the_credits_above_the_cookie() {
        let immediate = Immediate::new(0xfe, 0x0012_3456_7878_9abc);
        assert_eq!(immediate.to_bits(), 0xfe78_9abc);
        for bits in [0, 1, 0x00ff_ffff, 0x0100_0000, u32::MAX, 0x8421_7777] {
            assert_eq!(Immediate::from_bits(bits).to_bits(), bits);
        }
    }
}
