//! Two nodes negotiate.

extern crate std;

use std::vec::Vec;

use super::{
    Answer, Extensions, Local, Next, Refusal, Refused, Remembered, Request, Stale, accepted,
    answer, rejected, request, too_deep,
};
use crate::wire::{
    Body, ByteOrder, Checksum, ConnParams, Encoding, Envelope, Message, Nid, RejectRecord, V1, V2,
    Why, WireError,
};

const A: Nid = Nid::o2ib([10, 9, 0, 1], 0);
const B: Nid = Nid::o2ib([10, 9, 0, 2], 0);

fn local(nid: Nid) -> Local {
    Local {
        nid,
        stamp: nid.0 + 1000,
        queue_depth: 8,
        max_frags: 257,
        high_water: 0,
        require_privileged_port: false,
        extensions: Extensions::empty(),
        ready: true,
    }
}

/// What A asks B for, as bytes, after a change.
fn asked(change: impl FnOnce(&mut Envelope, &mut ConnParams)) -> Vec<u8> {
    let mut envelope = Envelope {
        version: V2,
        credits: 0,
        source: A,
        source_stamp: local(A).stamp,
        destination: B,
        destination_stamp: 0,
    };
    let mut params = ConnParams {
        queue_depth: 8,
        max_frags: 257,
        max_msg_size: 4096,
    };
    change(&mut envelope, &mut params);
    params.request(&envelope).to_vec()
}

/// What B answers.
fn answered(bytes: &[u8], local: &Local, remembered: &mut Remembered) -> Answer {
    answer(bytes, Some(1023), local, |nid| {
        assert_eq!(nid, A);
        Some(remembered)
    })
}

/// What B, who does not know A, answers, as far as it is a refusal.
fn refused(bytes: &[u8], local: &Local) -> (RejectRecord, Refusal) {
    let mut remembered = Remembered::new();
    let Answer::Reject {
        record,
        why,
        refusal,
        close_others: false,
    } = answered(bytes, local, &mut remembered)
    else {
        panic!("accepted, or closes others")
    };
    let record = RejectRecord::decode(&record).unwrap().0;
    assert_eq!(record.why, why);
    // Nothing is learnt from a request that is refused for itself.
    assert_eq!(remembered, Remembered::new());
    (record, refusal)
}

/// A dials B until that leads somewhere: the number of refusals, and the depth and fragments agreed on.
fn dial(a: &Local, b: &Local, of_b: &mut Remembered, of_a: &mut Remembered) -> (u32, u16, u16) {
    for refusals in 0.. {
        let request = request(a, of_b, B);
        match answered(&request.private_data, b, of_a) {
            Answer::Accept { terms, reply } => {
                let mut room = [0; 196];
                room[..reply.len()].copy_from_slice(&reply);
                let ours = accepted(&room, &request, a, of_b).unwrap();
                assert_eq!((ours.local, ours.peer), (terms.peer, terms.local));
                assert_eq!(ours.peer_stamp, terms.local_stamp);
                assert_eq!(ours.local_stamp, terms.peer_stamp);
                assert_eq!(ours.queue_depth, terms.queue_depth);
                assert_eq!(ours.max_frags, terms.max_frags);
                assert_eq!(ours.version, terms.version);
                assert_eq!(ours.check(&terms.envelope(3)), Ok(()));
                assert_eq!(terms.check(&ours.envelope(3)), Ok(()));
                return (refusals, ours.queue_depth, ours.max_frags);
            }
            Answer::Reject { record, .. } => {
                let mut room = [0; 148];
                room[..24].copy_from_slice(&record);
                let next = rejected(28, &room, &request, a, of_b);
                assert_eq!(next, Next::Redial);
            }
        }
    }
    unreachable!()
}

#[test]
fn two_nodes_with_the_same_settings_agree_at_once() {
    let (mut of_a, mut of_b) = (Remembered::new(), Remembered::new());
    let agreed = dial(&local(A), &local(B), &mut of_b, &mut of_a);
    assert_eq!(agreed, (0, 8, 257));
    assert_eq!(of_a.stamp, Some(local(A).stamp));
    assert_eq!(of_b.stamp, Some(local(B).stamp));
}

#[test]
fn the_smaller_depth_and_the_fewer_fragments_win_from_either_side() {
    for ((depth_a, frags_a), (depth_b, frags_b)) in [
        ((32, 257), (8, 257)),
        ((8, 257), (32, 257)),
        ((8, 257), (8, 256)),
        ((8, 1), (8, 257)),
        ((64, 257), (4, 16)),
        ((1, 1), (255, 257)),
    ] {
        let a = Local {
            queue_depth: depth_a,
            max_frags: frags_a,
            ..local(A)
        };
        let b = Local {
            queue_depth: depth_b,
            max_frags: frags_b,
            ..local(B)
        };
        let (mut of_a, mut of_b) = (Remembered::new(), Remembered::new());
        let refusals = u32::from(depth_a > depth_b) + u32::from(frags_a > frags_b);
        let agreed = (depth_a.min(depth_b), frags_a.min(frags_b));
        assert_eq!(
            dial(&a, &b, &mut of_b, &mut of_a),
            (refusals, agreed.0, agreed.1)
        );
        // The next time it is known.
        assert_eq!(dial(&a, &b, &mut of_b, &mut of_a), (0, agreed.0, agreed.1));
    }
}

#[test]
fn a_restarted_peer_is_refused_once_and_its_old_connections_close() {
    let (mut of_a, mut of_b) = (Remembered::new(), Remembered::new());
    dial(&local(A), &local(B), &mut of_b, &mut of_a);
    let reborn = Local {
        stamp: 7,
        ..local(A)
    };
    let first = request(&reborn, &Remembered::new(), B);
    let Answer::Reject {
        why: Why::ConnStale,
        refusal: Refusal::OtherLife,
        close_others: true,
        ..
    } = answered(&first.private_data, &local(B), &mut of_a)
    else {
        panic!()
    };
    let mut of_b = Remembered::new();
    assert_eq!(dial(&reborn, &local(B), &mut of_b, &mut of_a), (0, 8, 257));
    // Once its last connection is gone, another life is nothing special.
    of_a.forget_life();
    let mut of_b = Remembered::new();
    assert_eq!(
        dial(&local(A), &local(B), &mut of_b, &mut of_a),
        (0, 8, 257)
    );
}

#[test]
fn a_peer_that_takes_us_for_our_former_life_is_told_so() {
    let (mut of_a, mut of_b) = (Remembered::new(), Remembered::new());
    dial(&local(A), &local(B), &mut of_b, &mut of_a);
    let reborn = Local {
        stamp: 7,
        ..local(B)
    };
    let mut of_a = Remembered::new();
    assert_eq!(dial(&local(A), &reborn, &mut of_b, &mut of_a), (1, 8, 257));
    assert_eq!(of_b.stamp, Some(7));
}

#[test]
fn what_another_life_granted_is_forgotten() {
    let mut of_b = Remembered::new();
    of_b.learn(V2, 1);
    of_b.queue_depth = 4;
    of_b.max_frags = 16;
    of_b.learn(V2, 1);
    assert_eq!((of_b.queue_depth, of_b.max_frags), (4, 16));
    of_b.learn(V2, 2);
    assert_eq!(request(&local(A), &of_b, B).params.queue_depth, 8);
    assert_eq!(request(&local(A), &of_b, B).params.max_frags, 257);
}

#[test]
fn lu_12901_what_the_device_does_not_hold_is_neither_asked_for_nor_granted_in_any_life_of_the_peer()
{
    let (mut of_a, mut of_b) = (Remembered::new(), Remembered::new());
    of_b.lower_depth(4);
    of_b.lower_depth(6);
    assert_eq!(request(&local(A), &of_b, B).params.queue_depth, 4);
    of_b.learn(V2, 1);
    of_b.learn(V2, 2);
    assert_eq!(request(&local(A), &of_b, B).params.queue_depth, 4);
    of_b.lower_depth(0);
    assert_eq!(request(&local(A), &of_b, B).params.queue_depth, 1);

    // The one that is asked says what it holds, and is asked for that.
    of_a.lower_depth(3);
    let mut of_b = Remembered::new();
    assert_eq!(
        dial(&local(A), &local(B), &mut of_b, &mut of_a),
        (1, 3, 257)
    );
    assert_eq!(
        dial(&local(A), &local(B), &mut of_b, &mut of_a),
        (0, 3, 257)
    );
    // Version 1 knows one depth, and is told that it is no use.
    let record = too_deep(V1, &local(B), &of_a);
    assert_eq!(record.why, Why::Fatal);
}

#[test]
fn lu_13662_requests_are_refused_for_the_first_thing_that_is_wrong() {
    let b = local(B);
    let good = |_: &mut Envelope, _: &mut ConnParams| {};
    let grants = Some(ConnParams {
        queue_depth: 8,
        max_frags: 257,
        max_msg_size: 4096,
    });

    let strict = Local {
        require_privileged_port: true,
        ..b
    };
    for (port, accepts) in [(Some(1023), true), (Some(1024), false), (None, false)] {
        let mut of_a = Remembered::new();
        let reply = answer(&asked(good), port, &strict, |_| Some(&mut of_a));
        match reply {
            Answer::Accept { .. } => assert!(accepts),
            Answer::Reject { why, refusal, .. } => {
                assert_eq!((why, refusal, accepts), (Why::Fatal, Refusal::Port, false));
            }
        }
    }

    // Nothing is granted, and no incarnation told, before the interface is found.
    let mut other_version = asked(good);
    other_version[4] = 0x20;
    let starting = Local { ready: false, ..b };
    let elsewhere = asked(|e, _| e.destination = A);
    for (bytes, local, why, refusal) in [
        (
            &asked(good)[..5],
            &b,
            Why::Fatal,
            Refusal::Unreadable(WireError::Runt),
        ),
        (
            &other_version[..],
            &b,
            Why::Fatal,
            Refusal::Unreadable(WireError::Version(0x20)),
        ),
        (&asked(good)[..], &starting, Why::Early, Refusal::NotReady),
        (&elsewhere[..], &b, Why::Fatal, Refusal::NotHere(A)),
    ] {
        let (record, because) = refused(bytes, local);
        assert_eq!((record.why, because), (why, refusal));
        assert_eq!(record.version, V2);
        assert_eq!(record.incarnation, 0);
        assert_eq!(record.params.unwrap().queue_depth, 0);
    }

    let mut done = [0; 4096];
    let noop = Message {
        envelope: Envelope {
            version: V2,
            credits: 0,
            source: A,
            source_stamp: 1,
            destination: B,
            destination_stamp: 0,
        },
        body: Body::Noop,
    };
    noop.encode(&mut done).unwrap();
    for (bytes, why, refusal) in [
        (
            asked(|e, p| {
                e.destination_stamp = 1;
                p.queue_depth = 0;
            }),
            Why::ConnStale,
            Refusal::StaleDestination,
        ),
        (done[..56].to_vec(), Why::Fatal, Refusal::Type(0xd0)),
        (
            asked(|_, p| p.queue_depth = 0),
            Why::Fatal,
            Refusal::NoDepth,
        ),
        (
            asked(|_, p| (p.queue_depth, p.max_frags) = (9, 258)),
            Why::MsgQueueSize,
            Refusal::Depth(9),
        ),
        (asked(|_, p| p.max_frags = 0), Why::Fatal, Refusal::NoFrags),
        (
            asked(|_, p| (p.max_frags, p.max_msg_size) = (258, 4097)),
            Why::RdmaFrags,
            Refusal::Frags(258),
        ),
        (
            asked(|_, p| p.max_msg_size = 4097),
            Why::Fatal,
            Refusal::MessageSize(4097),
        ),
    ] {
        let (record, because) = refused(&bytes, &b);
        assert_eq!((record.why, because), (why, refusal));
        assert_eq!((record.incarnation, record.params), (b.stamp, grants));
    }

    let full = answer(&asked(good), None, &b, |_| None);
    let Answer::Reject {
        why: Why::NoResources,
        refusal: Refusal::NoRoom,
        ..
    } = full
    else {
        panic!("{full:?}")
    };
}

#[test]
fn a_small_request_is_granted_as_it_is() {
    for (queue_depth, max_frags) in [(1, 1), (4, 256), (8, 257)] {
        let bytes = asked(|_, p| (p.queue_depth, p.max_frags) = (queue_depth, max_frags));
        let Answer::Accept { terms, reply } = answered(&bytes, &local(B), &mut Remembered::new())
        else {
            panic!()
        };
        let (message, encoding) = Message::decode(&reply).unwrap();
        assert_eq!(encoding, Encoding::PLAIN);
        let granted = ConnParams {
            queue_depth,
            max_frags,
            max_msg_size: 4096,
        };
        assert_eq!(message.body, Body::ConnAck(granted));
        assert_eq!(message.envelope, terms.envelope(0));
        assert_eq!(terms.queue_depth, queue_depth);
    }
}

#[test]
fn a_request_of_the_other_byte_order_is_understood() {
    let bytes = asked(|_, _| {});
    let (message, _) = Message::decode(&bytes).unwrap();
    let big = Encoding {
        order: ByteOrder::Big,
        checksum: Checksum::Unsigned,
    };
    let mut buffer = [0; 4096];
    message.encode_as(big, &mut buffer).unwrap();
    let here = answered(&bytes, &local(B), &mut Remembered::new());
    let there = answered(&buffer[..56], &local(B), &mut Remembered::new());
    assert_eq!(here, there);
    assert!(matches!(here, Answer::Accept { .. }));
}

#[test]
fn version_one_has_its_own_depth_and_says_fatal() {
    let deep = Local {
        queue_depth: 32,
        ..local(B)
    };
    let bytes = asked(|e, p| (e.version, p.queue_depth) = (V1, 9));
    let (record, _) = refused(&bytes, &deep);
    assert_eq!((record.why, record.version), (Why::Fatal, V1));
    let bytes = asked(|e, _| e.version = V1);
    let Answer::Accept { terms, .. } = answered(&bytes, &deep, &mut Remembered::new()) else {
        panic!()
    };
    assert_eq!(
        (terms.version, terms.high_water, terms.receives()),
        (V1, 7, 16)
    );
}

#[test]
fn an_acknowledgement_is_checked_against_what_was_asked() {
    let of_b = Remembered {
        queue_depth: 6,
        max_frags: 200,
        ..Remembered::new()
    };
    let asked = request(&local(A), &of_b, B);
    assert_eq!((asked.params.queue_depth, asked.params.max_frags), (6, 200));
    let envelope = Envelope {
        version: V2,
        credits: 0,
        source: B,
        source_stamp: 5,
        destination: A,
        destination_stamp: local(A).stamp,
    };
    let good = asked.params;
    let judge = |bytes: &[u8]| {
        let mut of_b = of_b;
        let result = accepted(bytes, &asked, &local(A), &mut of_b);
        assert_eq!(of_b.stamp, result.ok().map(|terms| terms.peer_stamp));
        result
    };
    let terms = judge(&good.acknowledge(&envelope)).unwrap();
    assert_eq!((terms.queue_depth, terms.max_frags), (6, 200));
    // A peer may grant less.
    let less = ConnParams {
        queue_depth: 2,
        max_frags: 1,
        ..good
    };
    let terms = judge(&less.acknowledge(&envelope)).unwrap();
    assert_eq!((terms.queue_depth, terms.max_frags), (2, 1));
    assert_eq!((terms.high_water, terms.receives()), (1, 6));

    let with = |change: fn(&mut Envelope, &mut ConnParams)| {
        let (mut envelope, mut params) = (envelope, good);
        change(&mut envelope, &mut params);
        judge(&params.acknowledge(&envelope)).unwrap_err()
    };
    let not_an_ack = judge(&good.request(&envelope));
    assert_eq!(not_an_ack, Err(Refusal::Type(0xc0)));
    let silent = judge(&[0; 196]);
    assert_eq!(silent, Err(Refusal::Unreadable(WireError::Magic(0))));
    assert_eq!(with(|e, _| e.version = V1), Refusal::Version(V1));
    assert_eq!(with(|_, p| p.queue_depth = 0), Refusal::NoDepth);
    assert_eq!(with(|_, p| p.queue_depth = 7), Refusal::Depth(7));
    assert_eq!(with(|_, p| p.max_frags = 0), Refusal::NoFrags);
    assert_eq!(with(|_, p| p.max_frags = 201), Refusal::Frags(201));
    assert_eq!(
        with(|_, p| p.max_msg_size = 8192),
        Refusal::MessageSize(8192)
    );
    assert_eq!(with(|e, _| e.source = A), Refusal::OtherNode(A));
    assert_eq!(with(|e, _| e.destination = B), Refusal::NotHere(B));
    assert_eq!(
        with(|e, _| e.destination_stamp = 0),
        Refusal::StaleDestination
    );
}

/// A dialed B at depth 8 with 257 fragments, and gets this record.
fn after(record: RejectRecord, of_b: &mut Remembered) -> (Next, Request) {
    let a = local(A);
    let mut room = [0; 148];
    room[..24].copy_from_slice(&record.encode());
    let next = rejected(28, &room, &request(&a, of_b, B), &a, of_b);
    (next, request(&a, of_b, B))
}

fn record(why: Why, queue_depth: u16, max_frags: u16) -> RejectRecord {
    RejectRecord {
        version: V2,
        why,
        incarnation: 77,
        params: Some(ConnParams {
            queue_depth,
            max_frags,
            max_msg_size: 4096,
        }),
    }
}

#[test]
fn each_reason_for_a_refusal_has_its_own_policy() {
    for (why, depth, frags, expected, asks) in [
        (Why::ConnRace, 8, 257, Next::Wait, (8, 257, None)),
        (Why::Early, 0, 0, Next::RedialLater, (8, 257, None)),
        (Why::ConnStale, 8, 257, Next::Redial, (8, 257, Some(77))),
        (Why::RdmaFrags, 8, 256, Next::Redial, (8, 256, Some(77))),
        (Why::RdmaFrags, 8, 257, fail(Why::RdmaFrags), (8, 257, None)),
        (Why::RdmaFrags, 8, 0, fail(Why::RdmaFrags), (8, 257, None)),
        (Why::MsgQueueSize, 4, 257, Next::Redial, (4, 257, Some(77))),
        (
            Why::MsgQueueSize,
            8,
            257,
            fail(Why::MsgQueueSize),
            (8, 257, None),
        ),
        (
            Why::MsgQueueSize,
            0,
            257,
            fail(Why::MsgQueueSize),
            (8, 257, None),
        ),
        // Smaller values in a FATAL record are not an offer.
        (Why::Fatal, 4, 16, fail(Why::Fatal), (8, 257, None)),
        (
            Why::NoResources,
            4,
            16,
            fail(Why::NoResources),
            (8, 257, None),
        ),
        (
            Why::ConnUncompat,
            8,
            257,
            fail(Why::ConnUncompat),
            (8, 257, None),
        ),
        (
            Why::InvalidSrvId,
            8,
            257,
            fail(Why::InvalidSrvId),
            (8, 257, None),
        ),
        (
            Why::Unknown(99),
            8,
            257,
            fail(Why::Unknown(99)),
            (8, 257, None),
        ),
    ] {
        let mut of_b = Remembered::new();
        let (next, asked) = after(record(why, depth, frags), &mut of_b);
        assert_eq!(next, expected, "{why:?}");
        let asked = (asked.params.queue_depth, asked.params.max_frags, of_b.stamp);
        assert_eq!(asked, asks, "{why:?}");
        assert_eq!(of_b.races_lost, u8::from(why == Why::ConnRace));
    }
}

const fn fail(why: Why) -> Next {
    Next::Fail(Refused::Peer(why))
}

#[test]
fn a_peer_of_version_one_is_dialed_in_its_own_version() {
    for why in [Why::Fatal, Why::ConnUncompat] {
        let mut of_b = Remembered::new();
        let old = RejectRecord {
            version: V1,
            ..record(why, 8, 256)
        };
        let (next, asked) = after(old, &mut of_b);
        assert_eq!((next, asked.version), (Next::Redial, V1));
        assert_eq!(asked.private_data[4], 0x11);
        // It does not help twice.
        assert_eq!(after(old, &mut of_b).0, fail(why));
    }
    let shallow = Local {
        queue_depth: 4,
        ..local(A)
    };
    let mut of_b = Remembered::new();
    let old = RejectRecord {
        version: V1,
        ..record(Why::Fatal, 8, 256)
    };
    let asked = request(&shallow, &of_b, B);
    let next = rejected(28, &old.encode(), &asked, &shallow, &mut of_b);
    assert_eq!((next, of_b), (fail(Why::Fatal), Remembered::new()));
}

#[test]
fn a_stale_record_without_an_incarnation_clears_ours() {
    let mut of_b = Remembered::new();
    of_b.learn(V2, 5);
    for incarnation in [0, RejectRecord::UNKNOWN] {
        let anonymous = RejectRecord {
            incarnation,
            ..record(Why::ConnStale, 8, 257)
        };
        let (next, asked) = after(anonymous, &mut of_b);
        assert_eq!(next, Next::Redial);
        assert_eq!(asked.private_data[40..48], [0; 8]);
    }
}

#[test]
fn the_connection_managers_own_reasons() {
    let a = local(A);
    let mut of_b = Remembered::new();
    let asked = request(&a, &of_b, B);
    let mut after = |reason| rejected(reason, &[0; 148], &asked, &a, &mut of_b);
    assert_eq!(after(8), Next::Fail(Refused::NoListener));
    assert_eq!(after(10), Next::Redial);
    assert_eq!(after(1), Next::Fail(Refused::Manager(1)));
    // A listener elsewhere on the same device: reason 28 without a record.
    let empty = Next::Fail(Refused::Unreadable(WireError::Magic(0)));
    assert_eq!(after(28), empty);
}

#[test]
fn redials_in_a_row_get_slower_until_one_succeeds() {
    let (mut of_a, mut of_b) = (Remembered::new(), Remembered::new());
    for _ in 0..3 {
        for _ in 0..10 {
            let next = after(record(Why::ConnStale, 8, 257), &mut of_b).0;
            assert_eq!(next, Next::Redial);
        }
        for _ in 0..300 {
            let next = after(record(Why::ConnStale, 8, 257), &mut of_b).0;
            assert_eq!(next, Next::RedialLater);
        }
        of_b.forget_life();
        dial(&local(A), &local(B), &mut of_b, &mut of_a);
    }
}

#[test]
fn races_are_counted_until_a_connection_is_made_from_either_side() {
    let mut of_b = Remembered::new();
    for _ in 0..300 {
        assert_eq!(
            after(record(Why::ConnRace, 8, 257), &mut of_b).0,
            Next::Wait
        );
    }
    assert_eq!(of_b.races_lost, 255);
    let b_asks_a = request(&local(B), &Remembered::new(), A);
    let reply = answer(&b_asks_a.private_data, None, &local(A), |_| Some(&mut of_b));
    assert!(matches!(reply, Answer::Accept { .. }));
    assert_eq!(of_b.races_lost, 0);
}

#[test]
fn lu_15828_the_high_water_mark_scales_with_the_depth() {
    for (own, mark, depth, expected) in [
        (8, 0, 8, 4),
        (32, 0, 8, 4),
        (32, 0, 32, 16),
        (32, 31, 8, 7),
        (32, 99, 32, 31),
        (32, 3, 32, 16),
        (8, 0, 1, 1),
        (1, 0, 1, 1),
        (255, 254, 255, 254),
        (0, 0, 0, 1),
    ] {
        let local = Local {
            queue_depth: own,
            high_water: mark,
            ..local(A)
        };
        assert_eq!(
            local.high_water(V2, depth),
            expected,
            "{own} {mark} {depth}"
        );
        assert!(depth < 1 || local.high_water(V2, depth) <= depth);
        assert_eq!(local.high_water(V1, 8), 7);
    }
}

#[test]
fn messages_of_another_life_or_node_are_stale() {
    let Answer::Accept { terms, .. } =
        answered(&asked(|_, _| {}), &local(B), &mut Remembered::new())
    else {
        panic!()
    };
    let good = Envelope {
        version: V2,
        credits: 0,
        source: A,
        source_stamp: local(A).stamp,
        destination: B,
        destination_stamp: local(B).stamp,
    };
    assert_eq!(terms.check(&good), Ok(()));
    let bad = |change: fn(&mut Envelope)| {
        let mut envelope = good;
        change(&mut envelope);
        terms.check(&envelope).unwrap_err()
    };
    assert_eq!(bad(|e| e.version = V1), Stale::Version);
    assert_eq!(bad(|e| e.source = B), Stale::Source);
    assert_eq!(bad(|e| e.destination = A), Stale::Destination);
    assert_eq!(bad(|e| e.source_stamp = 0), Stale::SourceStamp);
    assert_eq!(bad(|e| e.destination_stamp = 0), Stale::DestinationStamp);
    let other = super::Terms {
        peer_stamp: 1,
        ..terms
    };
    assert!(terms.same_life(&terms) && !terms.same_life(&other));
}

#[test]
fn extensions_need_both_sides_and_a_kernel_sees_none_of_them() {
    let node = |nid, extensions| Local {
        extensions,
        ..local(nid)
    };
    let offers = [
        Extensions::empty(),
        Extensions::SENDS_INVALIDATE,
        Extensions::KEYS_MAY_BE_KILLED,
        Extensions::all(),
    ];
    for ours in offers {
        for theirs in offers {
            let (a, b) = (node(A, ours), node(B, theirs));
            let asked = request(&a, &Remembered::new(), B);
            assert_eq!(asked.private_data[7], ours.bits());
            let Answer::Accept { terms, reply } =
                answered(&asked.private_data, &b, &mut Remembered::new())
            else {
                panic!("refused");
            };
            // A kernel asks with 0 and is answered with what a kernel answers.
            assert_eq!(reply[56..].iter().all(|byte| *byte == 0), ours.is_empty());
            let mut room = [0; 196];
            room[..reply.len()].copy_from_slice(&reply);
            let agreed = accepted(&room, &asked, &a, &mut Remembered::new()).unwrap();
            assert_eq!(agreed.kills_keys, ours.kills_keys_of(theirs));
            assert_eq!(agreed.keys_killed, theirs.kills_keys_of(ours));
            assert_eq!(
                (terms.kills_keys, terms.keys_killed),
                (agreed.keys_killed, agreed.kills_keys),
                "both sides agree"
            );
            // A record nobody asked for, and junk where it belongs, change nothing.
            if ours.is_empty() {
                room[56..64].copy_from_slice(&Extensions::all().record());
            } else {
                room[56..].fill(0xa5);
            }
            let agreed = accepted(&room, &asked, &a, &mut Remembered::new()).unwrap();
            assert!(!agreed.kills_keys && !agreed.keys_killed);
        }
    }
}
