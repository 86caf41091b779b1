//! What two o2poll nodes do for each other that o2iblnd does not know.
//!
//! The protocol's version stays 0x12. A CONNREQ says what its sender offers in its `credits` byte: ko2iblnd
//! sends 0 there and does not read it. A node that understands that adds a record behind byte 56 of its CONNACK, where a kernel's tail
//! is zero. So nothing costs another dial, Wireshark dissects both messages as ever, and a kernel
//! is never met with anything but its own protocol: who gets no record uses no extension.

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

    /// Whether the DONEs of `self` kill keys of `sink`.
    #[must_use]
    pub const fn kills_keys_of(self, sink: Self) -> bool {
        self.contains(Self::SENDS_INVALIDATE) && sink.contains(Self::KEYS_MAY_BE_KILLED)
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
    use super::{Extensions, REPLY_BYTES};

    #[test]
    fn a_record_comes_back_and_every_other_byte_of_it_counts() {
        for bits in 0..4 {
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
        assert_eq!(Extensions::of_request(0xfc), Extensions::empty());
    }

    #[test]
    fn keys_are_killed_only_where_one_sends_so_and_the_other_lets_it() {
        let (sends, lets) = (Extensions::SENDS_INVALIDATE, Extensions::KEYS_MAY_BE_KILLED);
        assert!(sends.kills_keys_of(lets));
        assert!(!sends.kills_keys_of(sends));
        assert!(!lets.kills_keys_of(lets));
        assert!(Extensions::all().kills_keys_of(Extensions::all()));
    }
}
