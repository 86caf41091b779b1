//! A last WRITE with immediate data in place of a DONE: what it says, what it does not, and what of it is not believed.

use o2poll_dataplane::endpoint::{EntryOptions, Error, Operation};
use o2poll_dataplane::nic::{RKey, Status};
use o2poll_dataplane::peer::Immediate;
use o2poll_dataplane::poller::Reason;
use o2poll_dataplane::wire::lnet::{self, WireHandle};
use o2poll_dataplane::wire::{Body, Descriptor, Done, Fragment};
use o2poll_soft::Profile;
use o2poll_tests::lab::told;
use o2poll_tests::raw_peer::{Grant, get};
use o2poll_tests::{Lab, Setup};

const LENGTH: u32 = 70_000;
const TOKEN: u64 = 1;
const SOURCE: u64 = 7;
const GET: Operation = Operation::Get { optimized: true };
const ROUTED_GET: Operation = Operation::Get { optimized: false };
const PUT: Operation = Operation::Put {
    hdr_data: 1,
    ack: false,
};

/// How a sink of the node comes to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// GET_REQ of the node.
    Get,
    /// The peer's PUT_REQ, answered by PUT_ACK.
    Put,
    /// GET of the node as a message, answered by a REPLY in a PUT_REQ, answered by PUT_ACK.
    Reply,
}

const WAYS: [Way; 3] = [Way::Get, Way::Put, Way::Reply];

fn setup(profile: Profile) -> Setup {
    let mut setup = Setup::new(profile);
    setup.memory = 2 << 20;
    setup.shape.connections = 4;
    setup.shape.windows = 8;
    setup.write_immediates = true;
    setup
}

fn lab() -> Lab {
    Lab::connected(setup(Profile::frwr()), 2)
}

/// Makes the node give a key to peer 0; with the address of the first byte as the test sees it.
fn grant(lab: &mut Lab, way: Way) -> (Grant, u64) {
    match way {
        Way::Get => {
            let address = lab.ask(0, TOKEN, GET, LENGTH).address;
            (lab.receive(0).grant(), address)
        }
        Way::Put => {
            let options = EntryOptions::PUT | EntryOptions::EVENTS;
            let address = lab.export(TOKEN, options, LENGTH).address;
            let request = lab.peers[0].put_req(99, TOKEN, LENGTH);
            lab.peers[0].say(request);
            (lab.receive(0).grant(), address)
        }
        Way::Reply => {
            let address = lab.ask(0, TOKEN, ROUTED_GET, LENGTH).address;
            let handle = lab.receive(0).handle();
            let header = lab.peers[0].header(LENGTH, lnet::Body::Reply { handle });
            lab.peers[0].say(Body::PutReq { header, cookie: 98 });
            (lab.receive(0).grant(), address)
        }
    }
}

fn pattern() -> Vec<u8> {
    (0..LENGTH).map(|n| (n % 251) as u8).collect()
}

/// The peer writes with a key it kept, over the connection it has.
fn refuses(lab: &mut Lab, grant: &Grant, address: u64) {
    let before = lab.node.arena.peek(address, LENGTH as usize);
    let id = lab.peers[0].write(grant.key, grant.address, &[0xbd; 200]);
    assert_eq!(lab.outcome(0, id), Err(Status::RemoteAccess));
    assert!(lab.node.arena.peek(address, LENGTH as usize) == before);
    let connection = lab.connection(0);
    assert!(matches!(lab.gone(connection), Reason::Device(_)));
}

/// What the peer does ends this connection, and disturbs no other.
fn ends(lab: &mut Lab, why: Reason) {
    assert_eq!(lab.gone(lab.connection(0)), why);
    lab.works(1);
}

fn write(lab: &mut Lab, grant: &Grant, bytes: &[u8], immediate: Immediate) -> u64 {
    lab.peers[0].write_with(grant.key, grant.address, bytes, Some(immediate))
}

#[test]
fn the_data_is_there_and_the_key_is_dead_when_the_application_is_told() {
    for profile in [Profile::frwr(), Profile::mlx5(), Profile::windows()] {
        for way in WAYS {
            let mut lab = Lab::connected(setup(profile), 2);
            let (grant, address) = grant(&mut lab, way);
            lab.peers[0].fill(grant, &pattern());
            assert_eq!(told(lab.event()), Ok(LENGTH), "{way:?}");
            assert!(lab.node.arena.peek(address, LENGTH as usize) == pattern());
            assert_eq!(lab.node.counters.keys_alive.get(), 0);
            assert_eq!(lab.node.counters.invalidations.get(), 1);
            // All credits are where they were: the connection goes on.
            for _ in 0..20 {
                lab.works(0);
            }
            refuses(&mut lab, &grant, address);
            lab.works(1);
            lab.end();
        }
    }
}

/// The event waits for the INVALIDATE, and that for the work requests before it.
#[test]
fn a_write_after_the_immediate_may_land_until_the_key_is_dead_and_the_event_is_not_out_before() {
    for way in WAYS {
        let mut lab = lab();
        let (grant, address) = grant(&mut lab, way);
        lab.frozen[0] = true;
        lab.ask(0, 2, PUT, 10_000);
        for _ in 0..5 {
            lab.step();
        }
        lab.peers[0].fill(grant, &pattern());
        for _ in 0..50 {
            lab.step();
        }
        assert!(lab.node.events.pop().is_none(), "{way:?}: told too early");
        lab.peers[0].write(grant.key, grant.address, b"late bytes");
        for _ in 0..50 {
            lab.step();
        }
        assert_eq!(lab.node.arena.peek(address, 10), b"late bytes");
        lab.frozen[0] = false;
        let event = if way == Way::Put {
            lab.event()
        } else {
            lab.event_of(TOKEN)
        };
        assert_eq!(told(event), Ok(LENGTH));
        refuses(&mut lab, &grant, address);
        lab.end();
    }
}

#[test]
fn a_late_one_ends_a_transfer_that_timed_out_or_was_cancelled() {
    for way in WAYS {
        for cancel in [false, true] {
            if cancel && way == Way::Put {
                // Only our own transfers can be cancelled.
                continue;
            }
            let mut setup = setup(Profile::frwr());
            setup.timeout = 2000;
            let mut lab = Lab::connected(setup, 2);
            let (grant, address) = grant(&mut lab, way);
            if cancel {
                lab.cancel(TOKEN);
            }
            for _ in 0..5000 {
                lab.step();
            }
            assert!(lab.node.events.pop().is_none(), "{way:?}: told too early");
            lab.peers[0].fill(grant, &pattern());
            let why = if cancel {
                Error::Cancelled
            } else {
                Error::TimedOut
            };
            assert_eq!(told(lab.event()), Err(why), "{way:?}");
            assert!(lab.node.gone.is_empty(), "a late one costs nothing");
            refuses(&mut lab, &grant, address);
            lab.end();
        }
    }
}

/// A DONE still says what an immediate cannot.
#[test]
fn a_peer_may_say_done_where_it_could_have_said_it_with_the_data() {
    for way in WAYS {
        for (status, expected) in [
            (LENGTH.cast_signed(), Ok(LENGTH)),
            (12, Ok(12)),
            (-5, Err(Error::Peer(-5))),
        ] {
            let mut lab = lab();
            let (grant, address) = grant(&mut lab, way);
            let done = grant.done(status);
            lab.peers[0].say(match way {
                Way::Get => Body::GetDone(done),
                Way::Put | Way::Reply => Body::PutDone(done),
            });
            assert_eq!(told(lab.event()), expected, "{way:?}");
            lab.works(0);
            refuses(&mut lab, &grant, address);
            lab.end();
        }
    }
}

/// A WRITE of no bytes checks no key: an immediate is believed as a DONE is, and no more is touched than was granted.
#[test]
fn one_without_bytes_is_a_done_that_says_all() {
    for way in WAYS {
        let mut lab = lab();
        let (grant, address) = grant(&mut lab, way);
        let immediate = Immediate::new(0, grant.cookie);
        let dead = Grant {
            key: RKey(0),
            ..grant
        };
        write(&mut lab, &dead, &[], immediate);
        assert_eq!(told(lab.event()), Ok(LENGTH), "{way:?}");
        refuses(&mut lab, &grant, address);
        lab.end();
    }
}

#[test]
fn one_that_was_not_agreed_on_ends_the_connection() {
    for way in WAYS {
        let mut setup = setup(Profile::frwr());
        setup.write_immediates = false;
        let mut lab = Lab::connected(setup, 2);
        let (grant, _) = grant(&mut lab, way);
        lab.peers[0].fill(grant, &pattern());
        assert_eq!(told(lab.event()), Err(Error::ConnectionClosed));
        ends(&mut lab, Reason::UnexpectedType);
        lab.end();
    }
}

/// Every bit of the name counts: a slot that is free, another generation of it, one beyond all slots.
#[test]
fn one_for_nobody_ends_the_connection() {
    for bit in 0..24 {
        let way = WAYS[bit % 3];
        let mut lab = lab();
        let (grant, _) = grant(&mut lab, way);
        let wrong = Immediate::new(0, grant.cookie ^ 1 << bit);
        write(&mut lab, &grant, b"bytes", wrong);
        assert_eq!(told(lab.event()), Err(Error::ConnectionClosed), "bit {bit}");
        ends(&mut lab, Reason::UnexpectedAnswer);
        lab.end();
    }
}

#[test]
fn one_that_comes_twice_ends_the_connection() {
    for way in WAYS {
        let mut lab = lab();
        let (grant, address) = grant(&mut lab, way);
        lab.peers[0].fill(grant, &pattern());
        assert_eq!(told(lab.event()), Ok(LENGTH));
        // Without a byte: the key is dead.
        write(&mut lab, &grant, &[], Immediate::new(0, grant.cookie));
        ends(&mut lab, Reason::UnexpectedAnswer);
        assert!(lab.node.arena.peek(address, LENGTH as usize) == pattern());
        lab.end();
    }
}

/// And one behind a DONE, before the invalidate is through.
#[test]
fn one_behind_a_done_ends_the_connection() {
    for way in WAYS {
        let mut lab = lab();
        let (grant, _) = grant(&mut lab, way);
        let done = grant.done(12);
        lab.peers[0].say(match way {
            Way::Get => Body::GetDone(done),
            Way::Put | Way::Reply => Body::PutDone(done),
        });
        write(&mut lab, &grant, &[], Immediate::new(0, grant.cookie));
        ends(&mut lab, Reason::UnexpectedAnswer);
        lab.end();
    }
}

#[test]
fn one_for_a_transfer_of_another_connection_ends_its_own() {
    for way in WAYS {
        let mut lab = lab();
        let (grant, _) = grant(&mut lab, way);
        let immediate = Immediate::new(0, grant.cookie);
        lab.peers[1].write_with(grant.key, grant.address, &[], Some(immediate));
        assert_eq!(lab.gone(lab.connection(1)), Reason::UnexpectedAnswer);
        // Whose it was has lost nothing.
        lab.peers[0].fill(grant, &pattern());
        assert_eq!(told(lab.event()), Ok(LENGTH), "{way:?}");
        lab.works(0);
        lab.end();
    }
}

/// A PUT that waits for its PUT_ACK, and one that is being written, have no sink here.
#[test]
fn one_for_a_transfer_without_a_sink_ends_the_connection() {
    for acknowledged in [false, true] {
        let mut lab = lab();
        lab.ask(0, TOKEN, PUT, LENGTH);
        let cookie = lab.receive(0).cookie();
        if acknowledged {
            lab.frozen[0] = true;
            let sink = lab.peers[0].sink(&[LENGTH], 0);
            let key = lab.peers[0].key();
            lab.peers[0].say(Body::PutAck {
                source_cookie: cookie,
                sink_cookie: 5,
                sink: Descriptor::new(key, &sink),
            });
        }
        let immediate = Immediate::new(0, cookie);
        lab.peers[0].write_with(RKey(0), 0, &[], Some(immediate));
        for _ in 0..100 {
            lab.step();
        }
        lab.frozen[0] = false;
        ends(&mut lab, Reason::UnexpectedAnswer);
        lab.end();
    }
}

#[test]
fn one_with_more_credits_than_were_spent_ends_the_connection() {
    for way in WAYS {
        let mut lab = lab();
        let (grant, _) = grant(&mut lab, way);
        let immediate = Immediate::new(255, grant.cookie);
        write(&mut lab, &grant, b"bytes", immediate);
        ends(&mut lab, Reason::BadCredits);
        lab.end();
    }
}

/// Where peers have the key of the arena, the device does not know how long a sink is.
#[test]
fn one_of_more_bytes_than_the_sink_has_ends_the_connection() {
    for way in WAYS {
        let mut setup = setup(Profile::frwr());
        setup.registration.expose_arena = true;
        setup.registration.map_on_demand = 0;
        let mut lab = Lab::connected(setup, 2);
        let (grant, _) = grant(&mut lab, way);
        let bytes = vec![7; LENGTH as usize + 1];
        write(&mut lab, &grant, &bytes, Immediate::new(0, grant.cookie));
        ends(&mut lab, Reason::BadLength);
        lab.end();
    }
}

#[test]
fn one_before_the_connection_is_established_ends_it() {
    let mut lab = Lab::new(setup(Profile::frwr()), 2);
    lab.connect(1);
    let connection = lab.adopt(0, false);
    lab.peers[0].write_with(RKey(0), 0, &[], Some(Immediate::new(0, 0)));
    assert_eq!(lab.gone(connection), Reason::UnexpectedAnswer);
    lab.works(1);
    lab.end();
}

/// A sink in many fragments is told with the last of its WRITEs; one that is not filled is told by a DONE.
#[test]
fn what_falls_short_is_said_by_a_done() {
    let exports = EntryOptions::GET | EntryOptions::TRUNCATE;
    for (pieces, fills) in [
        (&[LENGTH][..], true),
        (&[LENGTH - 10, 3, 7], true),
        (&[LENGTH, 1], false),
        (&[LENGTH + 1], false),
    ] {
        let mut lab = lab();
        let from = lab.export(SOURCE, exports, LENGTH);
        let sink = lab.peers[0].sink(pieces, 5);
        let request = lab.peers[0].get_req(2000, SOURCE, &sink);
        lab.peers[0].say(request);
        if fills {
            let (immediate, length) = lab.immediate(0);
            assert_eq!(immediate.cookie, 2000);
            assert_eq!(Some(&length), pieces.last());
        } else {
            let status = LENGTH.cast_signed();
            let done = Body::GetDone(Done {
                cookie: 2000,
                status,
            });
            assert_eq!(lab.receive(0).message().body, done);
            assert_eq!(lab.peers[0].immediates.len(), 0);
        }
        let mut written = lab.peers[0].peek(&sink);
        written.truncate(LENGTH as usize);
        assert!(written == lab.node.arena.peek(from.address, LENGTH as usize));
        lab.works(0);
        lab.end();
    }
}

/// A refusal is no success.
#[test]
fn what_is_refused_is_said_by_a_done_or_a_nak() {
    let mut lab = lab();
    let sink = lab.peers[0].sink(&[LENGTH], 0);
    let request = lab.peers[0].get_req(2000, 12345, &sink);
    lab.peers[0].say(request);
    assert!(matches!(
        lab.receive(0).message().body,
        Body::GetDone(Done { status: ..=-1, .. })
    ));
    let request = lab.peers[0].put_req(2001, 12345, LENGTH);
    lab.peers[0].say(request);
    assert!(matches!(lab.receive(0).message().body, Body::PutNak(_)));
    assert_eq!(lab.peers[0].immediates.len(), 0);
    lab.works(0);
    lab.end();
}

/// A REPLY in a PUT_REQ is a PUT as any.
#[test]
fn a_large_reply_is_told_with_its_data() {
    let mut lab = lab();
    lab.export(SOURCE, EntryOptions::GET, LENGTH);
    let body = get(SOURCE, WireHandle::from_words(7, 3), LENGTH);
    let header = lab.peers[0].header(0, body);
    let payload = &[];
    lab.peers[0].say(Body::Immediate { header, payload });
    let source_cookie = lab.receive(0).cookie();
    let sink: Vec<Fragment> = lab.peers[0].sink(&[LENGTH], 0);
    let key = lab.peers[0].key();
    lab.peers[0].say(Body::PutAck {
        source_cookie,
        sink_cookie: 0xabcd_ef12_3456,
        sink: Descriptor::new(key, &sink),
    });
    assert_eq!(lab.immediate(0).0.cookie, 0x12_3456);
    lab.works(0);
    lab.end();
}
