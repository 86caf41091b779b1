//! Keys, floods, messages before their time, and a device that refuses.

use super::*;

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
