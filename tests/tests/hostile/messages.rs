//! Messages that no honest peer sends.

use super::*;

/// Protocol section 1.4, in its order.
#[test]
fn bytes_that_are_no_message() {
    let mut lab = lab();
    let noop = lab.peers[0].encode(Body::Noop, 0);
    let peer = &mut lab.peers[0];
    peer.encoding.checksum = Checksum::Signed;
    let summed = peer.encode(Body::Noop, 0);
    peer.encoding.checksum = Checksum::None;
    use WireError as W;
    let cases = [
        ("nothing", vec![], W::Runt),
        ("five bytes", noop[..5].to_vec(), W::Runt),
        ("magic", patch(noop.clone(), 0, &[0]), W::Magic(0x0be9_1b00)),
        ("version", patch(noop.clone(), 4, &[0x13]), W::Version(0x13)),
        ("header", noop[..47].to_vec(), W::ShortHeader),
        ("nob", patch(noop.clone(), 8, &[49]), W::Truncated(49)),
        (
            "big nob",
            patch(noop.clone(), 8, &[255; 4]),
            W::Truncated(u32::MAX),
        ),
        ("sum", patch(summed, 12, &[1, 2, 3, 4]), W::Checksum),
        ("source", patch(noop.clone(), 16, &[0xff; 8]), W::NoSource),
        ("type 0", patch(noop.clone(), 6, &[0]), W::Type(0)),
        ("type d8", patch(noop.clone(), 6, &[0xd8]), W::Type(0xd8)),
        ("no body", patch(noop.clone(), 6, &[0xd7]), W::ShortBody),
    ];
    for (what, bytes, error) in cases {
        costs_the_connection(&mut lab, what, Reason::Malformed(error), |peer| {
            peer.send(&bytes, None);
        });
    }
    ends_well(lab);
}

/// Every type, cut to every length, with and without a header that owns up to it.
#[test]
fn every_message_cut_at_every_byte() {
    let mut lab = lab();
    let sink = lab.peers[0].sink(&[10, 20], 0);
    let peer = &lab.peers[0];
    let immediate = Body::Immediate {
        header: peer.header(8, put(ENTRY, WireHandle::NONE)),
        payload: &[7; 8],
    };
    let ack = Body::PutAck {
        source_cookie: 0,
        sink_cookie: 0,
        sink: Descriptor::new(RKey(1), &sink),
    };
    let bodies = [
        Body::Noop,
        immediate,
        peer.put_req(1, ENTRY, 5000),
        Body::PutNak(nothing(0)),
        ack,
        Body::PutDone(nothing(0)),
        peer.get_req(1, ENTRY, &sink),
        Body::GetDone(nothing(0)),
    ];
    let mut tried = 0;
    for body in bodies {
        let whole = lab.peers[0].encode(body, 0);
        for length in 0..whole.len() {
            for honest in [false, true] {
                let mut bytes = whole[..length].to_vec();
                if honest && length >= 12 {
                    let nob = u32::try_from(length).unwrap();
                    bytes = patch(bytes, 8, &nob.to_ne_bytes());
                }
                let connection = lab.connection(0);
                lab.peers[0].send(&bytes, None);
                let why = lab.gone(connection);
                assert!(
                    matches!(why, Reason::Malformed(_)),
                    "{length} {why:?} {body:?}"
                );
                lab.connect(0);
                tried += 1;
            }
        }
    }
    assert!(tried > 1000, "{tried}");
    assert_eq!(lab.node.counters.protocol_errors.get(), tried);
    ends_well(lab);
}

#[test]
fn messages_of_somebody_else() {
    let mut lab = lab();
    let noop = lab.peers[0].encode(Body::Noop, 0);
    let nid = Nid::o2ib([10, 0, 0, 77], 0).0.to_ne_bytes();
    let cases = [
        ("another version", Stale::Version, 4, &[0x11][..]),
        ("source", Stale::Source, 16, &nid),
        ("its incarnation", Stale::SourceStamp, 24, &[9]),
        ("destination", Stale::Destination, 32, &nid),
        ("its incarnation", Stale::DestinationStamp, 40, &[9]),
        ("none", Stale::DestinationStamp, 40, &[0; 8]),
    ];
    for (what, why, at, with) in cases {
        let bytes = patch(noop.clone(), at, with);
        costs_the_connection(&mut lab, what, Reason::Stale(why), |peer| {
            peer.send(&bytes, None);
        });
    }
    ends_well(lab);
}

#[test]
fn more_credits_than_were_spent() {
    let mut lab = lab();
    for credits in [2, 9, 255] {
        // The GET_REQ has spent one.
        costs_the_connection(&mut lab, "credits", Reason::BadCredits, |peer| {
            let bytes = peer.encode(Body::Noop, credits);
            peer.send(&bytes, None);
        });
    }
    // Exactly what was spent is right, and once only.
    lab.ask(0, 1, GET, BULK);
    lab.receive(0);
    let connection = lab.connection(0);
    for gone in [false, true] {
        let bytes = lab.peers[0].encode(Body::Noop, 1);
        lab.peers[0].send(&bytes, None);
        lab.settle();
        assert_eq!(
            lab.node
                .gone
                .last()
                .is_some_and(|(of, _)| *of == connection),
            gone
        );
    }
    assert_eq!(lab.gone(connection), Reason::BadCredits);
    lab.connect(0);
    ends_well(lab);
}

#[test]
fn lnet_headers_that_cannot_be() {
    use WireError as W;
    let mut lab = lab();
    let sink = [Fragment {
        length: 10,
        address: 0,
    }];
    let peer = &lab.peers[0];
    let none = WireHandle::NONE;
    let small = peer.encode(
        Body::Immediate {
            header: peer.header(8, put(ENTRY, none)),
            payload: &[7; 8],
        },
        0,
    );
    let get_small = peer.encode(
        Body::Immediate {
            header: peer.header(0, get(ENTRY, none, 10)),
            payload: &[],
        },
        0,
    );
    let put_req = peer.encode(peer.put_req(1, ENTRY, 5000), 0);
    let get_req = peer.encode(peer.get_req(1, ENTRY, &sink), 0);
    // Type at 48 + 24, payload length at 48 + 28.
    let cases = [
        ("HELLO", patch(small.clone(), 72, &[4]), W::LnetType(4)),
        ("type 9", patch(small.clone(), 72, &[9]), W::LnetType(9)),
        (
            "ACK with payload",
            patch(small.clone(), 72, &[0]),
            W::LnetPayload,
        ),
        (
            "GET with payload",
            patch(get_small, 76, &[1]),
            W::LnetPayload,
        ),
        ("cut payload", patch(small.clone(), 76, &[9]), W::LnetCut),
        (
            "more than the MTU",
            patch(put_req.clone(), 76, &((1_u32 << 20) + 1).to_le_bytes()),
            W::LnetTooLong((1 << 20) + 1),
        ),
        (
            "GET in a PUT_REQ",
            { patch(patch(put_req.clone(), 72, &[2]), 76, &[0; 4]) },
            W::LnetMismatch,
        ),
        (
            "PUT in a GET_REQ",
            patch(get_req.clone(), 72, &[1]),
            W::LnetMismatch,
        ),
        (
            "no fragment",
            patch(get_req.clone(), 132, &[0; 4]),
            W::Fragments(0),
        ),
        (
            "258 fragments",
            patch(get_req.clone(), 132, &[2, 1]),
            W::Fragments(258),
        ),
        (
            "2^32-1 fragments",
            patch(get_req.clone(), 132, &[255; 4]),
            W::Fragments(u32::MAX),
        ),
        (
            "257 that are not there",
            patch(get_req, 132, &[1, 1]),
            W::DescriptorCut,
        ),
    ];
    for (what, bytes, error) in cases {
        costs_the_connection(&mut lab, what, Reason::Malformed(error), |peer| {
            peer.send(&bytes, None);
        });
    }
    for what in ["CONNREQ", "CONNACK"] {
        let params = ConnParams {
            queue_depth: 8,
            max_frags: 257,
            max_msg_size: 4096,
        };
        costs_the_connection(&mut lab, what, Reason::UnexpectedType, |peer| {
            peer.say(if what == "CONNREQ" {
                Body::ConnReq(params)
            } else {
                Body::ConnAck(params)
            });
        });
    }
    ends_well(lab);
}

#[test]
fn messages_for_another_node() {
    let mut lab = lab();
    let none = WireHandle::NONE;
    for far in [false, true] {
        let to = if far {
            Nid::o2ib([10, 0, 0, 1], 9)
        } else {
            Nid::o2ib([10, 0, 0, 77], 0)
        };
        for kind in 0..4 {
            let act = |peer: &mut RawPeer| {
                let sink = peer.sink(&[5000], 0);
                let mut header = peer.header(4, put(ENTRY, none));
                header.destination = to;
                let payload: &[u8] = &[1; 4];
                match kind {
                    0 => peer.say(Body::Immediate { header, payload }),
                    1 => {
                        header.payload_length = 5000;
                        peer.say(Body::PutReq { header, cookie: 44 })
                    }
                    2 => {
                        header.payload_length = 0;
                        header.body = get(ENTRY, none, 100);
                        let payload = &[];
                        peer.say(Body::Immediate { header, payload })
                    }
                    _ => {
                        header.payload_length = 0;
                        header.body = get(ENTRY, none, 5000);
                        let key = peer.key();
                        peer.say(Body::GetReq {
                            header,
                            cookie: 44,
                            sink: Descriptor::new(key, &sink),
                        })
                    }
                }
            };
            // This node does not route: what is for another network is dropped, but for a GET_REQ, which
            // is never routed.
            if !far || kind == 3 {
                costs_the_connection(&mut lab, "for another", Reason::WrongAddress, |peer| {
                    act(peer);
                });
            } else {
                act(&mut lab.peers[0]);
                if kind == 1 {
                    let nak = Body::PutNak(nothing(44));
                    assert_eq!(lab.receive(0).message().body, nak);
                }
                lab.works(0);
            }
        }
    }
    ends_well(lab);
}
