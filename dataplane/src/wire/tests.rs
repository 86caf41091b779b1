//! Messages, byte by byte.
#![allow(
    clippy::cast_possible_truncation,
    reason = "lengths of messages, at most 4096"
)]

extern crate std;

use std::vec::Vec;

use super::lnet::{self, WireHandle};
use super::{
    Body, ByteOrder, Checksum, ConnParams, Encoding, Envelope, IMMEDIATE_PAYLOAD, Message, Nid,
    Pid, V2, WireError, encode_immediate,
};

const A: Nid = Nid::o2ib([192, 168, 1, 10], 0);
const B: Nid = Nid::o2ib([192, 168, 2, 5], 0);

const CONNREQ: &str = "911be90b1200c00038000000000000000a01a8c000000500bc9a7856341206000502a8c00000050000000000000000000800010100100000";
const NOOP: &str = "911be90b1200d00430000000000000000a01a8c00000050001000000000000000502a8c0000005000200000000000000";
const PING: &str = "911be90b1200d10078000000000000000a01a8c00000050001000000000000000502a8c00000050002000000000000000502a8c0000005000a01a8c0000005003930000039300000020000000000000011111111111111112222222222222222000000000000008000000000000000001001000000000000";

fn bytes(hex: &str) -> Vec<u8> {
    (0..hex.len() / 2)
        .map(|i| u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).unwrap())
        .collect()
}

fn envelope() -> Envelope {
    Envelope {
        version: V2,
        credits: 0,
        source: A,
        source_stamp: 1,
        destination: B,
        destination_stamp: 2,
    }
}

fn encoded(message: &Message<'_>, encoding: Encoding) -> Vec<u8> {
    // A used buffer, so that a byte nobody wrote shows.
    let mut buffer = [0xa5; 4096];
    let nob = message.encode_as(encoding, &mut buffer).unwrap();
    buffer[..nob as usize].to_vec()
}

fn sealed(hex: &str, sum: u32) -> Vec<u8> {
    let mut bytes = bytes(hex);
    bytes[12..16].copy_from_slice(&sum.to_le_bytes());
    bytes
}

/// The vectors of the protocol's description, made by a script of its own.
fn vectors() -> [(Message<'static>, &'static str); 3] {
    let connreq = Message {
        envelope: Envelope {
            source_stamp: 0x0006_1234_5678_9abc,
            destination_stamp: 0,
            ..envelope()
        },
        body: Body::ConnReq(ConnParams {
            queue_depth: 8,
            max_frags: 257,
            max_msg_size: 4096,
        }),
    };
    let noop = Message {
        envelope: Envelope {
            credits: 4,
            ..envelope()
        },
        body: Body::Noop,
    };
    let ping = Message {
        envelope: envelope(),
        body: Body::Immediate {
            header: lnet::Header {
                destination: B,
                source: A,
                destination_pid: Pid::LUSTRE,
                source_pid: Pid::LUSTRE,
                payload_length: 0,
                body: lnet::Body::Get {
                    reply: WireHandle::from_words(0x1111_1111_1111_1111, 0x2222_2222_2222_2222),
                    match_bits: 1 << 63,
                    portal: 0,
                    offset: 0,
                    sink_length: 272,
                },
            },
            payload: &[],
        },
    };
    [(connreq, CONNREQ), (noop, NOOP), (ping, PING)]
}

#[test]
fn known_messages_decode_and_encode_to_the_byte() {
    let plain = Encoding {
        order: ByteOrder::Little,
        checksum: Checksum::None,
    };
    for (message, hex) in vectors() {
        assert_eq!(encoded(&message, plain), bytes(hex));
        assert_eq!(Message::decode(&bytes(hex)), Ok((message, plain)));
    }
}

#[test]
fn both_checksum_variants_are_known() {
    let [connreq, noop, _] = vectors();
    for ((message, hex), signed, unsigned) in [
        (connreq, 0x95c5_fa94, 0x6746_2b55),
        (noop, 0x4a41_e6f6, 0x4b13_6726),
    ] {
        for (checksum, sum) in [(Checksum::Signed, signed), (Checksum::Unsigned, unsigned)] {
            let encoding = Encoding {
                order: ByteOrder::Little,
                checksum,
            };
            let bytes = sealed(hex, sum);
            assert_eq!(encoded(&message, encoding), bytes);
            assert_eq!(Message::decode(&bytes), Ok((message, encoding)));
        }
        assert_eq!(
            Message::decode(&sealed(hex, signed ^ 1)),
            Err(WireError::Checksum)
        );
    }
}
