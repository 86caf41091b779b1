//! Messages, byte by byte.
#![allow(
    clippy::cast_possible_truncation,
    reason = "lengths of messages, at most 4096"
)]

extern crate std;

use std::vec::Vec;

use super::lnet::{self, WireHandle};
use super::{
    Body, ByteOrder, Checksum, ConnParams, Descriptor, Done, Encoding, Envelope, Fragment,
    IMMEDIATE_PAYLOAD, Message, Nid, Pid, TooLong, V2, WireError, encode_get_req, encode_immediate,
    encode_put_ack,
};
use crate::nic::RKey;

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

#[test]
fn every_flipped_bit_of_a_checksummed_message_is_noticed() {
    let [_, _, (message, _)] = vectors();
    for checksum in [Checksum::Signed, Checksum::Unsigned] {
        let encoding = Encoding {
            order: ByteOrder::Little,
            checksum,
        };
        let good = encoded(&message, encoding);
        for bit in 0..good.len() * 8 {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(Message::decode(&bad).is_err(), "{checksum:?}, bit {bit}");
        }
    }
}

#[test]
fn a_big_endian_sender_is_understood() {
    for (message, hex) in vectors() {
        for checksum in [Checksum::None, Checksum::Signed, Checksum::Unsigned] {
            let big = Encoding {
                order: ByteOrder::Big,
                checksum,
            };
            let there = encoded(&message, big);
            assert_eq!(there[..4], 0x0be9_1b91_u32.to_be_bytes());
            assert_eq!(Message::decode(&there), Ok((message, big)));
            // The LNet header is little-endian whoever sends it.
            if let Body::Immediate { .. } = message.body {
                assert_eq!(there[48..120], bytes(hex)[48..120]);
            }
        }
    }
    let cookie = 0x1122_3344_5566_7788;
    let nak = Message {
        envelope: envelope(),
        body: Body::PutNak(Done {
            cookie,
            status: -61,
        }),
    };
    let there = encoded(&nak, BIG);
    // A cookie is echoed byte for byte, a status is not.
    assert_eq!(there[48..56], cookie.to_ne_bytes());
    assert_eq!(there[56..60], (-61_i32).to_be_bytes());
}

#[test]
fn what_follows_the_message_is_ignored() {
    for (message, hex) in vectors() {
        let mut bytes = bytes(hex);
        bytes.extend([0xee; 140]);
        assert_eq!(Message::decode(&bytes).unwrap().0, message);
    }
}

#[test]
fn a_payload_that_is_in_place_goes_out_as_if_it_had_been_copied() {
    let payload: Vec<u8> = (0..IMMEDIATE_PAYLOAD).map(|i| i as u8).collect();
    let message = put(&payload);
    let Body::Immediate { header, .. } = message.body else {
        panic!()
    };
    let mut buffer = [0xa5; 4096];
    buffer[120..].copy_from_slice(&payload);
    assert_eq!(
        encode_immediate(&message.envelope, &header, IMMEDIATE_PAYLOAD, &mut buffer),
        Ok(4096)
    );
    assert_eq!(buffer[..], encoded(&message, Encoding::PLAIN));
    assert_eq!(
        encode_immediate(&message.envelope, &header, 3977, &mut buffer),
        Err(TooLong)
    );
    let get = lnet::Header {
        body: get(),
        ..header
    };
    assert_eq!(
        encode_immediate(&message.envelope, &get, 1, &mut buffer),
        Err(TooLong)
    );
    assert_eq!(
        encode_immediate(&message.envelope, &get, 0, &mut buffer),
        Ok(120)
    );
}

#[test]
fn each_defect_has_its_name() {
    let whole = |body| {
        encoded(
            &Message {
                envelope: envelope(),
                body,
            },
            Encoding::PLAIN,
        )
    };
    let noop = whole(Body::Noop);
    let payload = [7; 16];
    let immediate = encoded(&put(&payload), Encoding::PLAIN);
    let get_immediate = whole(Body::Immediate {
        header: header(get(), 0),
        payload: &[],
    });
    let fragments = [Fragment {
        length: 4096,
        address: 8,
    }; 2];
    let sink = Descriptor::new(RKey(7), &fragments);
    let get_req = whole(Body::GetReq {
        header: header(get(), 0),
        cookie: 1,
        sink,
    });
    let put_req = whole(Body::PutReq {
        header: header(reply(), 4096),
        cookie: 1,
    });
    let put_ack = whole(Body::PutAck {
        source_cookie: 1,
        sink_cookie: 2,
        sink,
    });

    refused(&noop[..5], WireError::Runt);
    refused(&[], WireError::Runt);
    refused(&patched(&noop, 0, &[0]), WireError::Magic(0x0be9_1b00));
    refused(&patched(&noop[..6], 4, &[0x20]), WireError::Version(0x20));
    refused(&noop[..47], WireError::ShortHeader);
    refused(&patched(&noop, 8, &[49]), WireError::Truncated(49));
    refused(
        &patched(&noop, 8, &[0xff; 4]),
        WireError::Truncated(u32::MAX),
    );
    refused(&patched(&noop, 12, &[1]), WireError::Checksum);
    refused(&patched(&noop, 16, &[0xff; 8]), WireError::NoSource);
    refused(&patched(&noop, 6, &[0xd8]), WireError::Type(0xd8));
    refused(&patched(&noop, 6, &[0]), WireError::Type(0));
    // Each type at one byte less than its least length.
    for (kind, least) in [
        (0xc0, 56),
        (0xc1, 56),
        (0xd0, 48),
        (0xd1, 120),
        (0xd2, 128),
        (0xd3, 60),
        (0xd4, 72),
        (0xd5, 60),
        (0xd6, 136),
        (0xd7, 60),
    ] {
        let bytes = patched(&get_req, 6, &[kind]);
        refused(&patched(&bytes, 8, &[least - 1, 0]), WireError::ShortBody);
        let at_least = Message::decode(&patched(&bytes, 8, &[least, 0])).err();
        assert_ne!(at_least, Some(WireError::ShortBody), "{kind:#x}");
    }
    for (message, at) in [(&get_req, 132), (&put_ack, 68)] {
        refused(&patched(message, at, &[0]), WireError::Fragments(0));
        refused(&patched(message, at, &[2, 1]), WireError::Fragments(258));
        refused(
            &patched(message, at, &[0xff; 4]),
            WireError::Fragments(u32::MAX),
        );
        refused(&patched(message, at, &[3]), WireError::DescriptorCut);
        // Fragments behind the message's own length do not count.
        let mut longer = message.clone();
        longer.extend([0; 64]);
        refused(&patched(&longer, at, &[3]), WireError::DescriptorCut);
    }
    for message in [&immediate, &put_req, &get_req] {
        refused(&patched(message, 72, &[5]), WireError::LnetType(5));
    }
    refused(&patched(&immediate, 72, &[4]), WireError::LnetType(4));
    refused(&patched(&immediate, 72, &[0]), WireError::LnetPayload);
    refused(&patched(&get_immediate, 76, &[1]), WireError::LnetPayload);
    refused(
        &patched(&put_req, 76, &[1, 0, 0x10]),
        WireError::LnetTooLong((1 << 20) + 1),
    );
    assert!(Message::decode(&patched(&put_req, 76, &[0, 0, 0x10])).is_ok());
    refused(&patched(&get_req, 72, &[1]), WireError::LnetMismatch);
    refused(
        &patched(&patched(&put_req, 76, &[0, 0]), 72, &[2]),
        WireError::LnetMismatch,
    );
    refused(&patched(&immediate, 76, &[17]), WireError::LnetCut);
}

#[test]
fn what_has_no_legal_form_is_not_encoded() {
    let long = [0; 3977];
    let many = [Fragment::default(); 258];
    let ack = |list| Body::PutAck {
        source_cookie: 1,
        sink_cookie: 2,
        sink: Descriptor::new(RKey(1), list),
    };
    let hello = lnet::Body::Hello {
        incarnation: 1,
        kind: 1,
    };
    let mut buffer = [0; 4096];
    for body in [
        put(&long).body,
        ack(&many),
        ack(&[]),
        Body::Immediate {
            header: header(reply(), 4),
            payload: &long[..5],
        },
        Body::Immediate {
            header: header(get(), 1),
            payload: &long[..1],
        },
        Body::Immediate {
            header: header(hello, 0),
            payload: &[],
        },
        Body::PutReq {
            header: header(get(), 0),
            cookie: 1,
        },
        Body::PutReq {
            header: header(reply(), (1 << 20) + 1),
            cookie: 1,
        },
        Body::GetReq {
            header: header(reply(), 0),
            cookie: 1,
            sink: Descriptor::new(RKey(1), &many[..1]),
        },
    ] {
        let message = Message {
            envelope: envelope(),
            body,
        };
        assert_eq!(message.encode(&mut buffer), Err(TooLong), "{body:?}");
    }
    let most = Message {
        envelope: envelope(),
        body: ack(&many[..257]),
    };
    assert_eq!(most.encode(&mut buffer), Ok(72 + 12 * 257));
}

#[test]
fn a_descriptor_is_read_from_the_message_it_came_in() {
    let fragments: Vec<_> = (1..=257)
        .map(|i| Fragment {
            length: i,
            address: u64::from(i) << 40,
        })
        .collect();
    for encoding in [Encoding::PLAIN, BIG] {
        for body in [
            Body::PutAck {
                source_cookie: 1,
                sink_cookie: 2,
                sink: Descriptor::new(RKey(0xabcd), &fragments),
            },
            Body::GetReq {
                header: header(get(), 0),
                cookie: 3,
                sink: Descriptor::new(RKey(0xabcd), &fragments),
            },
        ] {
            let bytes = encoded(
                &Message {
                    envelope: envelope(),
                    body,
                },
                encoding,
            );
            let (message, _) = Message::decode(&bytes).unwrap();
            assert_eq!(message.body, body);
            let (Body::PutAck { sink, .. } | Body::GetReq { sink, .. }) = message.body else {
                panic!()
            };
            assert_eq!(sink.length(), 257 * 258 / 2);
            assert_eq!(sink.iter().len(), 257);
            let located = sink.locate();
            assert_eq!(located.key(), RKey(0xabcd));
            for (i, fragment) in fragments.iter().enumerate() {
                assert_eq!(located.get(&bytes, i).as_ref(), Some(fragment));
            }
            for past in [257, usize::MAX / 12 + 2, usize::MAX] {
                assert_eq!((located.get(&bytes, past), sink.get(past)), (None, None));
            }
            assert_eq!(located.get(&bytes[..bytes.len() - 1], 256), None);
        }
    }
    let own = Descriptor::new(RKey(1), &fragments).locate();
    assert!(own.is_empty());
    assert_eq!(own.get(&[0; 4096], 0), None);
}

const BIG: Encoding = Encoding {
    order: ByteOrder::Big,
    checksum: Checksum::None,
};

fn header(body: lnet::Body, payload_length: u32) -> lnet::Header {
    lnet::Header {
        destination: B,
        source: A,
        destination_pid: Pid::LUSTRE,
        source_pid: Pid(0x8000_0001),
        payload_length,
        body,
    }
}

fn put(payload: &[u8]) -> Message<'_> {
    let body = lnet::Body::Put {
        ack: WireHandle::NONE,
        match_bits: 0x1234,
        hdr_data: 0x5678,
        portal: 28,
        offset: 512,
    };
    Message {
        envelope: envelope(),
        body: Body::Immediate {
            header: header(body, payload.len() as u32),
            payload,
        },
    }
}

fn get() -> lnet::Body {
    lnet::Body::Get {
        reply: WireHandle::from_words(1, 2),
        match_bits: 3,
        portal: 4,
        offset: 5,
        sink_length: 6,
    }
}

fn reply() -> lnet::Body {
    lnet::Body::Reply {
        handle: WireHandle::from_words(1, 2),
    }
}

fn patched(bytes: &[u8], at: usize, with: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes[at..at + with.len()].copy_from_slice(with);
    bytes
}

fn refused(bytes: &[u8], why: WireError) {
    assert_eq!(Message::decode(bytes).map(|(message, _)| message), Err(why));
}

#[test]
fn a_request_and_its_answer_written_in_one_go_are_those_of_any_message() {
    let header = lnet::Header {
        destination: B,
        source: A,
        destination_pid: Pid(12345),
        source_pid: Pid(54321),
        payload_length: 0,
        body: lnet::Body::Get {
            reply: WireHandle::from_words(1, 2),
            match_bits: 3,
            portal: 4,
            offset: 5,
            sink_length: 6,
        },
    };
    let fragments: [Fragment; 3] = core::array::from_fn(|at| Fragment {
        length: 100 + at as u32,
        address: 0x1_2345_6789 << at,
    });
    for count in 0..=fragments.len() {
        let sink = Descriptor::new(RKey(0x0102_0304), &fragments[..count]);
        let (cookie, other) = (0x1122_3344_5566_7788, 99);
        let get_req = Body::GetReq {
            header,
            cookie,
            sink,
        };
        let put_ack = Body::PutAck {
            source_cookie: cookie,
            sink_cookie: other,
            sink,
        };
        for (body, is_get) in [(get_req, true), (put_ack, false)] {
            let envelope = envelope();
            let (mut ours, mut any) = ([0xa5; 4096], [0xa5; 4096]);
            let nob = if is_get {
                encode_get_req(&envelope, &header, cookie, &sink, &mut ours)
            } else {
                encode_put_ack(&envelope, cookie, other, &sink, &mut ours)
            };
            assert_eq!(nob, Message { envelope, body }.encode(&mut any));
            let Ok(nob) = nob else {
                assert_eq!(count, 0);
                continue;
            };
            assert_eq!(ours[..nob as usize], any[..nob as usize], "{count}");
            let (read, _) = Message::decode(&ours[..nob as usize]).unwrap();
            assert_eq!(read.body, body);
        }
        let only = (count == 1).then_some(fragments[0]);
        assert_eq!(sink.only(), only);
    }
    let put = lnet::Header {
        body: lnet::Body::Reply {
            handle: WireHandle::NONE,
        },
        ..header
    };
    let sink = Descriptor::new(RKey(1), &fragments);
    let refused = encode_get_req(&envelope(), &put, 1, &sink, &mut [0; 4096]);
    assert_eq!(refused, Err(TooLong));
}
