//! What a peer can get wrong, and that it costs only its own connection.

use o2poll_dataplane::endpoint::{EntryOptions, Error, Event, Incoming, Operation};
use o2poll_dataplane::nic::{RKey, Status};
use o2poll_dataplane::peer::Stale;
use o2poll_dataplane::poller::{Order, Reason};
use o2poll_dataplane::wire::lnet::{self, WireHandle};
use o2poll_dataplane::wire::{
    Body, ByteOrder, Checksum, ConnParams, Descriptor, Done, Encoding, Fragment, Nid, WireError,
};
use o2poll_soft::Profile;
use o2poll_tests::lab::told;
use o2poll_tests::raw_peer::{RawPeer, get, put};
use o2poll_tests::{Lab, Setup};

const GET: Operation = Operation::Get { optimized: true };
const ROUTED_GET: Operation = Operation::Get { optimized: false };
const PUT: Operation = Operation::Put {
    hdr_data: 1,
    ack: false,
};
const ACKED_PUT: Operation = Operation::Put {
    hdr_data: 1,
    ack: true,
};
const BULK: u32 = 20_000;
const ENTRY: u64 = 42;

fn setup() -> Setup {
    let mut setup = Setup::new(Profile::frwr());
    setup.memory = 4 << 20;
    setup.shape.windows = 32;
    setup
}

fn lab() -> Lab {
    let mut lab = Lab::connected(setup(), 2);
    let options = EntryOptions::PUT | EntryOptions::GET | EntryOptions::TRUNCATE;
    lab.export(ENTRY, options, BULK);
    lab
}

/// Lets the peer do something with a GET and a PUT of it under way, and a GET with another peer. Its
/// connection must end for this reason; then it connects again, and all is well.
fn costs_the_connection(lab: &mut Lab, what: &str, why: Reason, act: impl FnOnce(&mut RawPeer)) {
    while lab.node.events.pop().is_some() {}
    let connection = lab.connection(0);
    let counters = lab.node.counters;
    let before = (
        counters.protocol_errors.get(),
        counters.connections_ended.get(),
    );
    lab.ask(0, 1, GET, BULK);
    lab.receive(0);
    let request = lab.peers[0].put_req(5, ENTRY, BULK);
    lab.peers[0].say(request);
    lab.receive(0);
    lab.ask(1, 2, GET, BULK);
    let other = lab.receive(1).grant();
    act(&mut lab.peers[0]);
    assert_eq!(lab.gone(connection), why, "{what}");
    assert_eq!(
        told(lab.event_of(1)),
        Err(Error::ConnectionClosed),
        "{what}"
    );
    let protocol = u64::from(!matches!(why, Reason::Device(_)));
    let after = (
        counters.protocol_errors.get(),
        counters.connections_ended.get(),
    );
    assert_eq!(after, (before.0 + protocol, before.1 + 1), "{what}");
    lab.peers[1].say(Body::GetDone(other.done(3)));
    assert_eq!(told(lab.event_of(2)), Ok(3), "{what}");
    lab.connect(0);
}

fn ends_well(mut lab: Lab) {
    lab.works(0);
    lab.works(1);
    lab.settle();
    lab.end();
}

fn patch(mut bytes: Vec<u8>, at: usize, with: &[u8]) -> Vec<u8> {
    bytes[at..at + with.len()].copy_from_slice(with);
    bytes
}

fn nothing(cookie: u64) -> Done {
    Done { cookie, status: 0 }
}

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

/// A transfer of the node that peer 0 could name by its cookie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// No such transfer, ever.
    Unknown,
    /// Ended.
    Over,
    /// Of another connection.
    Foreign,
    Waiting,
    Request,
    AskedPut,
    AskedGet,
    AskedReply,
    Data,
    Sent,
    SentWantsAck,
    AwaitAck,
    Answered,
    ReplyAnswered,
    Invalidating,
}

const STAGES: [Stage; 15] = [
    Stage::Unknown,
    Stage::Over,
    Stage::Foreign,
    Stage::Waiting,
    Stage::Request,
    Stage::AskedPut,
    Stage::AskedGet,
    Stage::AskedReply,
    Stage::Data,
    Stage::Sent,
    Stage::SentWantsAck,
    Stage::AwaitAck,
    Stage::Answered,
    Stage::ReplyAnswered,
    Stage::Invalidating,
];

/// Brings a transfer to that stage; its cookie.
fn bring(lab: &mut Lab, stage: Stage) -> u64 {
    // In a fresh lab, slots are used in order, in their first generation.
    let nth = |index: u64| index << 32;
    match stage {
        Stage::Unknown => u64::MAX,
        Stage::Over => {
            lab.ask(0, 1, GET, BULK);
            let grant = lab.receive(0).grant();
            lab.peers[0].say(Body::GetDone(grant.done(5)));
            lab.event_of(1);
            grant.cookie
        }
        Stage::Foreign => {
            lab.ask(1, 1, GET, BULK);
            lab.receive(1).cookie()
        }
        Stage::Waiting => {
            for _ in 0..9 {
                lab.ask(0, 1, GET, BULK);
            }
            lab.settle();
            assert_eq!(lab.peers[0].inbox.len(), 8);
            nth(8)
        }
        Stage::Request => {
            for _ in 0..8 {
                lab.ask(0, 2, PUT, 10);
            }
            lab.settle();
            lab.ask(0, 1, GET, BULK);
            lab.settle();
            assert_eq!(lab.peers[0].inbox.len(), 8);
            assert_eq!(lab.node.poller.leftovers().transfers, 1);
            // The slot of the one that ended last.
            nth(7) | 1
        }
        Stage::AskedPut => {
            lab.ask(0, 1, PUT, BULK);
            lab.receive(0).cookie()
        }
        Stage::AskedGet => {
            lab.ask(0, 1, GET, BULK);
            lab.receive(0).cookie()
        }
        Stage::AskedReply => {
            lab.ask(0, 1, ROUTED_GET, BULK);
            lab.receive(0).handle().words().1
        }
        Stage::Data => {
            lab.ask(0, 1, PUT, BULK);
            let cookie = lab.receive(0).cookie();
            lab.frozen[0] = true;
            let sink = lab.peers[0].sink(&[100; 200], 0);
            let key = lab.peers[0].key();
            lab.peers[0].say(Body::PutAck {
                source_cookie: cookie,
                sink_cookie: 6,
                sink: Descriptor::new(key, &sink),
            });
            for _ in 0..20 {
                lab.step();
            }
            cookie
        }
        Stage::Sent | Stage::SentWantsAck => {
            lab.frozen[0] = true;
            let operation = if stage == Stage::Sent { PUT } else { ACKED_PUT };
            lab.ask(0, 1, operation, 10);
            for _ in 0..20 {
                lab.step();
            }
            nth(0)
        }
        Stage::AwaitAck => {
            lab.ask(0, 1, ACKED_PUT, 10);
            let cookie = lab.receive(0).handle().words().1;
            lab.settle();
            cookie
        }
        Stage::Answered => {
            let request = lab.peers[0].put_req(5, ENTRY, BULK);
            lab.peers[0].say(request);
            lab.receive(0).grant().cookie
        }
        Stage::ReplyAnswered => {
            lab.ask(0, 1, ROUTED_GET, BULK);
            let handle = lab.receive(0).handle();
            let header = lab.peers[0].header(BULK, lnet::Body::Reply { handle });
            lab.peers[0].say(Body::PutReq { header, cookie: 98 });
            lab.receive(0).grant().cookie
        }
        Stage::Invalidating => {
            lab.ask(0, 1, GET, BULK);
            let grant = lab.receive(0).grant();
            lab.frozen[0] = true;
            lab.ask(0, 3, PUT, 10);
            lab.step();
            lab.step();
            lab.peers[0].say(Body::GetDone(grant.done(5)));
            for _ in 0..20 {
                lab.step();
            }
            assert_eq!(lab.node.counters.keys_alive.get(), 1);
            grant.cookie
        }
    }
}

/// Each answer by cookie, at each stage: only the one that is waited for is taken.
#[test]
fn every_answer_at_every_stage() {
    for stage in STAGES {
        for answer in 0..4 {
            let mut lab = lab();
            let cookie = bring(&mut lab, stage);
            let key = lab.peers[0].key();
            let sink = lab.peers[0].sink(&[BULK], 0);
            let (body, expected): (_, &[Stage]) = match answer {
                0 => (
                    Body::PutAck {
                        source_cookie: cookie,
                        sink_cookie: 1,
                        sink: Descriptor::new(key, &sink),
                    },
                    &[Stage::AskedPut],
                ),
                1 => (Body::PutNak(nothing(cookie)), &[Stage::AskedPut]),
                2 => (
                    Body::PutDone(nothing(cookie)),
                    &[Stage::Answered, Stage::ReplyAnswered],
                ),
                _ => (Body::GetDone(nothing(cookie)), &[Stage::AskedGet]),
            };
            let connection = lab.connection(0);
            let bytes = lab.peers[0].encode(body, 0);
            lab.peers[0].send(&bytes, None);
            for _ in 0..50 {
                lab.step();
            }
            lab.frozen[0] = false;
            if expected.contains(&stage) {
                lab.settle();
                assert!(lab.node.gone.is_empty(), "{stage:?} {body:?}");
            } else {
                let why = lab.gone(connection);
                assert_eq!(why, Reason::UnexpectedAnswer, "{stage:?} {body:?}");
                assert_eq!(lab.node.counters.protocol_errors.get(), 1);
                assert_eq!(lab.node.gone.len(), 1);
            }
            if stage != Stage::Foreign {
                lab.works(1);
            }
            lab.end();
        }
    }
}

#[test]
fn an_answer_twice() {
    let mut lab = lab();
    for twice in 0..4 {
        let connection = lab.connection(0);
        let stage = [
            Stage::AskedPut,
            Stage::AskedPut,
            Stage::Answered,
            Stage::AskedGet,
        ][twice];
        let cookie = bring(&mut lab, stage);
        let sink = lab.peers[0].sink(&[BULK], 0);
        let key = lab.peers[0].key();
        let body = match twice {
            0 => Body::PutAck {
                source_cookie: cookie,
                sink_cookie: 1,
                sink: Descriptor::new(key, &sink),
            },
            1 => Body::PutNak(nothing(cookie)),
            2 => Body::PutDone(nothing(cookie)),
            _ => Body::GetDone(nothing(cookie)),
        };
        for _ in 0..2 {
            let bytes = lab.peers[0].encode(body, 0);
            lab.peers[0].send(&bytes, None);
        }
        assert_eq!(lab.gone(connection), Reason::UnexpectedAnswer, "{body:?}");
        lab.connect(0);
    }
    ends_well(lab);
}

#[test]
fn lengths_that_cannot_be() {
    let mut lab = lab();
    for (stage, status) in [
        (Stage::AskedGet, BULK.cast_signed() + 1),
        (Stage::AskedGet, i32::MAX),
        (Stage::Answered, BULK.cast_signed() + 1),
        (Stage::Answered, i32::MAX),
        (Stage::ReplyAnswered, BULK.cast_signed() + 1),
        (Stage::AskedPut, 1),
        (Stage::AskedPut, i32::MAX),
    ] {
        let connection = lab.connection(0);
        let cookie = bring(&mut lab, stage);
        let done = Done { cookie, status };
        lab.peers[0].say(match stage {
            Stage::AskedGet => Body::GetDone(done),
            Stage::AskedPut => Body::PutNak(done),
            _ => Body::PutDone(done),
        });
        assert_eq!(
            lab.gone(connection),
            Reason::BadLength,
            "{stage:?} {status}"
        );
        lab.connect(0);
    }
    // A REPLY, small or bulk, that is longer than the sink; an ACK for more than was sent.
    for kind in 0..3 {
        let connection = lab.connection(0);
        let operation = if kind == 2 { ACKED_PUT } else { ROUTED_GET };
        let at = lab.ask(0, 1, operation, 100).address;
        let before = lab.node.arena.peek(at, 200);
        let handle = lab.receive(0).handle();
        let peer = &mut lab.peers[0];
        let reply = lnet::Body::Reply { handle };
        let ack = lnet::Body::Ack {
            handle,
            match_bits: 7,
            length: 101,
        };
        match kind {
            0 => peer.say(Body::Immediate {
                header: peer.header(101, reply),
                payload: &[1; 101],
            }),
            1 => peer.say(Body::PutReq {
                header: peer.header(101, reply),
                cookie: 5,
            }),
            _ => peer.say(Body::Immediate {
                header: peer.header(0, ack),
                payload: &[],
            }),
        };
        assert_eq!(lab.gone(connection), Reason::BadLength, "{kind}");
        assert_eq!(lab.node.arena.peek(at, 200), before);
        lab.connect(0);
    }
    ends_well(lab);
}

/// ACKs and REPLYs whose handle names nothing are dropped, as LNet does, and their credit goes back.
#[test]
fn junk_handles_are_dropped_silently() {
    let mut lab = lab();
    lab.ask(1, 1, ROUTED_GET, 100);
    let foreign = lab.receive(1).handle();
    lab.ask(0, 2, ACKED_PUT, 100);
    let put_handle = lab.receive(0).handle();
    lab.ask(0, 3, GET, BULK);
    let waiting = lab.receive(0);
    let get_handle = waiting.handle();
    let mut dropped = 0;
    for handle in [
        WireHandle::NONE,
        WireHandle([0; 16]),
        WireHandle::from_words(101, u64::MAX),
        WireHandle::from_words(102, put_handle.words().1),
        foreign,
        put_handle,
        get_handle,
    ] {
        for kind in 0..3 {
            if kind == 0 && handle == put_handle {
                continue;
            }
            let reply = lnet::Body::Reply { handle };
            let ack = lnet::Body::Ack {
                handle,
                match_bits: 7,
                length: 1,
            };
            let peer = &mut lab.peers[0];
            match kind {
                0 => peer.say(Body::Immediate {
                    header: peer.header(0, ack),
                    payload: &[],
                }),
                1 => peer.say(Body::Immediate {
                    header: peer.header(50, reply),
                    payload: &[1; 50],
                }),
                _ => peer.say(Body::PutReq {
                    header: peer.header(50, reply),
                    cookie: 9,
                }),
            };
            dropped += 1;
            if kind == 2 {
                assert_eq!(lab.receive(0).message().body, Body::PutNak(nothing(9)));
            }
            lab.settle();
        }
    }
    assert_eq!(lab.node.counters.unknown_replies.get(), dropped);
    assert!(lab.node.gone.is_empty());
    lab.peers[0].say(Body::GetDone(waiting.grant().done(0)));
    assert_eq!(told(lab.event_of(3)), Ok(0));
    // All credits are back: those of the peer, but for what is still owed.
    lab.settle();
    assert!(lab.peers[0].spent < 4, "{}", lab.peers[0].spent);
    ends_well(lab);
}

#[test]
fn killing_keys_at_the_wrong_moment() {
    let mut lab = lab();
    // With a message that is no DONE.
    let junk = Body::Immediate {
        header: lab.peers[0].header(8, put(4444, WireHandle::NONE)),
        payload: &[0; 8],
    };
    for body in [Body::Noop, junk] {
        let connection = lab.connection(0);
        lab.ask(0, 1, GET, BULK);
        let key = lab.receive(0).grant().key;
        lab.peers[0].say_and_kill(body, Some(key));
        assert_eq!(lab.gone(connection), Reason::BadInvalidate);
        assert_eq!(told(lab.event_of(1)), Err(Error::ConnectionClosed));
        lab.connect(0);
    }
    // With the DONE of another transfer.
    let connection = lab.connection(0);
    lab.ask(0, 1, GET, BULK);
    lab.ask(0, 2, GET, BULK);
    let (one, two) = (lab.receive(0).grant(), lab.receive(0).grant());
    lab.peers[0].say_and_kill(Body::GetDone(one.done(1)), Some(two.key));
    assert_eq!(lab.gone(connection), Reason::BadInvalidate);
    lab.connect(0);
    // A dead key, one that never was, and one of a memory.
    lab.ask(0, 6, GET, BULK);
    let dead = lab.receive(0).grant();
    lab.peers[0].say(Body::GetDone(dead.done(1)));
    assert_eq!(told(lab.event_of(6)), Ok(1));
    let memory = RKey(lab.node.arena.key().0);
    for key in [dead.key, RKey(0), RKey(u32::MAX), memory] {
        let why = Reason::Device(Status::RemoteInvalidate);
        costs_the_connection(&mut lab, "kill", why, |peer| {
            peer.say_and_kill(Body::Noop, Some(key));
        });
    }
    // The key of another connection's transfer: the device cannot tell them apart. That transfer, whose
    // data has come already, still ends well; it is not invalidated twice.
    lab.ask(1, 5, GET, BULK);
    let victim = lab.receive(1).grant();
    let id = lab.peers[1].write(victim.key, victim.address, &[1; 300]);
    assert_eq!(lab.outcome(1, id), Ok(()));
    let connection = lab.connection(0);
    lab.peers[0].say_and_kill(Body::Noop, Some(victim.key));
    assert_eq!(lab.gone(connection), Reason::BadInvalidate);
    lab.peers[1].say(Body::GetDone(victim.done(300)));
    assert_eq!(told(lab.event_of(5)), Ok(300));
    assert_eq!(lab.node.counters.keys_alive.get(), 0);
    lab.connect(0);
    ends_well(lab);
}

/// A window that is bound to its queue pair cannot be killed over another.
#[test]
fn a_bound_window_is_out_of_reach_of_others() {
    let mut setup = setup();
    setup.profile = Profile::windows();
    let mut lab = Lab::connected(setup, 2);
    lab.ask(1, 5, GET, BULK);
    let victim = lab.receive(1).grant();
    let connection = lab.connection(0);
    lab.peers[0].say_and_kill(Body::Noop, Some(victim.key));
    let why = Reason::Device(Status::RemoteInvalidate);
    assert_eq!(lab.gone(connection), why);
    lab.peers[1].write(victim.key, victim.address, &[1; 300]);
    lab.peers[1].say(Body::GetDone(victim.done(300)));
    assert_eq!(told(lab.event_of(5)), Ok(300));
    lab.connect(0);
    ends_well(lab);
}

#[test]
fn a_peer_of_the_other_byte_order_with_checksums() {
    for order in [ByteOrder::Little, ByteOrder::Big] {
        for checksum in [Checksum::None, Checksum::Signed, Checksum::Unsigned] {
            let mut lab = lab();
            lab.peers[0].encoding = Encoding { order, checksum };
            lab.works(0);
            // Its PUT, bulk and small with an ACK, and its GET as a message.
            let request = lab.peers[0].put_req(5, ENTRY, BULK);
            lab.peers[0].say(request);
            let grant = lab.receive(0).grant();
            lab.peers[0].write(grant.key, grant.address, &[0xa5; BULK as usize]);
            lab.peers[0].say(Body::PutDone(grant.done(BULK.cast_signed())));
            let ours = WireHandle([9; 16]);
            let peer = &mut lab.peers[0];
            peer.say(Body::Immediate {
                header: peer.header(3, put(ENTRY, ours)),
                payload: &[0xc3; 3],
            });
            let expected = lnet::Body::Ack {
                handle: ours,
                match_bits: ENTRY,
                length: 3,
            };
            assert_eq!(lab.receive(0).header().body, expected);
            let peer = &mut lab.peers[0];
            peer.say(Body::Immediate {
                header: peer.header(0, get(ENTRY, ours, 5)),
                payload: &[],
            });
            let reply = lab.receive(0);
            let Body::Immediate { header, payload } = reply.message().body else {
                panic!("no REPLY");
            };
            assert_eq!(header.body, lnet::Body::Reply { handle: ours });
            assert_eq!(payload, [0xc3, 0xc3, 0xc3, 0xa5, 0xa5]);
            ends_well(lab);
        }
    }
}

/// Far more than its credits allow. What it takes is its own share and no more.
#[test]
fn a_flood_drowns_only_its_own_connection() {
    for kind in 0..5 {
        let mut setup = setup();
        setup.timeout = 20_000;
        setup.abandon = 20_000;
        let mut lab = Lab::connected(setup, 2);
        let options = EntryOptions::PUT | EntryOptions::GET | EntryOptions::TRUNCATE;
        lab.export(ENTRY, options, BULK);
        let ours = WireHandle([9; 16]);
        for n in 0..60 {
            let peer = &mut lab.peers[0];
            let sink = peer.sink(&[100, 100], 0);
            let body = match kind {
                0 => Body::Noop,
                1 => Body::Immediate {
                    header: peer.header(3, put(ENTRY, ours)),
                    payload: &[1; 3],
                },
                2 => Body::Immediate {
                    header: peer.header(0, get(ENTRY, ours, 5)),
                    payload: &[],
                },
                3 => peer.put_req(n, ENTRY, BULK),
                _ => peer.get_req(n, ENTRY, &sink),
            };
            // No credit ever goes back to the node.
            let bytes = peer.encode(body, 0);
            peer.send(&bytes, None);
            peer.owed = 0;
        }
        lab.frozen[0] = kind == 4;
        for _ in 0..500 {
            lab.step();
        }
        lab.frozen[0] = false;
        lab.works(1);
        let left = lab.node.poller.leftovers();
        assert!(left.transfers <= 8 && left.windows <= 8, "{kind} {left:?}");
        for _ in 0..100_000 {
            lab.step();
        }
        lab.works(1);
        let connection = lab.connection(0);
        lab.node.order(Order::Close { connection });
        lab.gone(connection);
        lab.connect(0);
        ends_well(lab);
    }
}

/// On the connecting side nothing is known of the peer before `Establish`: messages wait, in order.
#[test]
fn what_comes_before_establish_waits_and_is_then_judged() {
    let mut setup = setup();
    setup.shape.connections = 4;
    let mut lab = Lab::new(setup, 2);
    lab.connect(1);
    let options = EntryOptions::PUT | EntryOptions::EVENTS | EntryOptions::LOCAL_OFFSET;
    let at = lab.export(ENTRY, options, 100).address;
    lab.adopt(0, false);
    for n in 1..=4 {
        let peer = &mut lab.peers[0];
        peer.say(Body::Immediate {
            header: peer.header(1, put(ENTRY, WireHandle::NONE)),
            payload: &[n],
        });
    }
    lab.settle();
    assert!(lab.node.events.pop().is_none());
    assert_eq!(lab.node.counters.messages_received.get(), 0);
    lab.establish(0);
    for offset in 0..4 {
        match lab.event() {
            Event::Landed(landed) => assert_eq!(landed.offset, offset),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(lab.node.arena.peek(at, 4), [1, 2, 3, 4]);
    lab.works(0);
    // Garbage waits too.
    for kill in [false, true] {
        let connection = lab.adopt(0, false);
        lab.peers[0].send(b"garbage", None);
        lab.settle();
        let gone = |lab: &mut Lab| lab.node.gone.iter().any(|(of, _)| *of == connection);
        assert!(!gone(&mut lab));
        if kill {
            // Or nobody ever looks at it.
            lab.node.order(Order::Close { connection });
            assert_eq!(lab.gone(connection), Reason::Closed);
        } else {
            lab.establish(0);
            let why = Reason::Malformed(WireError::ShortHeader);
            assert!(
                matches!(lab.gone(connection), Reason::Malformed(_)),
                "{why:?}"
            );
        }
        lab.works(1);
    }
    lab.connect(0);
    ends_well(lab);
}

/// On the accepting side the terms are final at once: the first message stands for a lost RTU (LU-8303).
#[test]
fn what_comes_before_establish_on_the_accepting_side_is_served_at_once() {
    let mut lab = Lab::new(setup(), 2);
    lab.connect(1);
    let options = EntryOptions::PUT | EntryOptions::GET | EntryOptions::TRUNCATE;
    let at = lab.export(ENTRY, options, BULK).address;
    lab.adopt(0, true);
    let request = lab.peers[0].put_req(5, ENTRY, BULK);
    lab.peers[0].say(request);
    let grant = lab.receive(0).grant();
    lab.peers[0].write(grant.key, grant.address, &[0xa5; 100]);
    lab.peers[0].say(Body::PutDone(grant.done(100)));
    lab.settle();
    assert_eq!(lab.node.arena.peek(at, 100), [0xa5; 100]);
    // An Establish that comes late changes nothing: credits that have moved stay moved.
    let sink = lab.peers[0].sink(&[100], 0);
    let request = lab.peers[0].get_req(6, ENTRY, &sink);
    lab.peers[0].say(request);
    lab.establish(0);
    lab.receive(0);
    assert_eq!(lab.peers[0].peek(&sink), [0xa5; 100]);
    ends_well(lab);

    // A broken message on such a connection.
    let mut lab = Lab::new(setup(), 2);
    lab.connect(1);
    let connection = lab.adopt(0, true);
    lab.peers[0].say(Body::GetDone(nothing(0)));
    assert_eq!(lab.gone(connection), Reason::UnexpectedAnswer);
    lab.connect(0);
    ends_well(lab);
}

/// A message longer than the buffer, and a WRITE with the wrong key: the device ends the connection.
#[test]
fn what_the_device_refuses() {
    let mut lab = lab();
    // A message that is longer than its buffer.
    let connection = lab.connection(0);
    lab.peers[0].send_long(5000);
    let why = Reason::Device(Status::LocalLength);
    assert_eq!(lab.gone(connection), why);
    lab.connect(0);
    let memory = lab.node.arena.key().0;
    for key in [0x1234_5678, 0, memory] {
        let why = Reason::Device(Status::Flushed);
        costs_the_connection(&mut lab, "write", why, |peer| {
            peer.write(RKey(key), 4096, &[1; 10]);
        });
    }
    ends_well(lab);
}

/// A PUT_REQ of nothing is refused with status 0, which is how it succeeds.
#[test]
fn a_put_request_of_nothing_has_landed() {
    let mut lab = lab();
    lab.export(5, EntryOptions::PUT | EntryOptions::EVENTS, 100);
    let request = lab.peers[0].put_req(6, 5, 0);
    lab.peers[0].say(request);
    let Event::Landed(landed) = lab.event() else {
        panic!("not told");
    };
    let expected = (Incoming::Put { hdr_data: 77 }, Ok(0));
    assert_eq!((landed.operation, landed.outcome), expected);
    assert_eq!(lab.receive(0).message().body, Body::PutNak(nothing(6)));
    ends_well(lab);
}
