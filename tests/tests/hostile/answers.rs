//! Answers that nobody waits for.

use super::*;

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
fn lu_17689_lengths_that_cannot_be() {
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
