//! A key is dead before the event says that the transfer is done, on every way a transfer can end.
//!
//! The peer keeps every key it was given. After the event it writes with the key: that must be refused,
//! leave the memory as it was, end that connection, and disturb no other.

use o2poll_dataplane::endpoint::{EntryOptions, Error, Event, Operation};
use o2poll_dataplane::nic::{RKey, Status};
use o2poll_dataplane::poller::{Order, Reason};
use o2poll_dataplane::wire::lnet;
use o2poll_dataplane::wire::{Body, Done};
use o2poll_soft::Profile;
use o2poll_tests::lab::told;
use o2poll_tests::raw_peer::Grant;
use o2poll_tests::{Lab, Setup};

/// How a key of the node gets out.
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
const LENGTH: u32 = 70_000;
const TOKEN: u64 = 1;

/// A key that is out, and what it covers.
struct Out {
    way: Way,
    grant: Grant,
    /// Address of the first byte as the test sees it.
    address: u64,
}

fn setup(profile: Profile) -> Setup {
    let mut setup = Setup::new(profile);
    setup.memory = 2 << 20;
    setup.shape.connections = 4;
    setup.shape.windows = 8;
    setup
}

fn lab(profile: Profile) -> Lab {
    Lab::connected(setup(profile), 2)
}

const GET: Operation = Operation::Get { optimized: true };
const ROUTED_GET: Operation = Operation::Get { optimized: false };
const PUT: Operation = Operation::Put {
    hdr_data: 1,
    ack: false,
};

/// Makes the node give a key to peer 0.
fn grant(lab: &mut Lab, way: Way) -> Out {
    let address;
    let grant = match way {
        Way::Get => {
            address = lab.ask(0, TOKEN, GET, LENGTH).address;
            lab.receive(0).grant()
        }
        Way::Put => {
            let options = EntryOptions::PUT | EntryOptions::EVENTS;
            address = lab.export(TOKEN, options, LENGTH).address;
            let request = lab.peers[0].put_req(99, TOKEN, LENGTH);
            lab.peers[0].say(request);
            lab.receive(0).grant()
        }
        Way::Reply => {
            address = lab.ask(0, TOKEN, ROUTED_GET, LENGTH).address;
            let handle = lab.receive(0).handle();
            let header = lab.peers[0].header(LENGTH, lnet::Body::Reply { handle });
            lab.peers[0].say(Body::PutReq { header, cookie: 98 });
            lab.receive(0).grant()
        }
    };
    assert_eq!(grant.length, LENGTH);
    assert_eq!(lab.node.counters.keys_alive.get(), 1);
    let out = Out {
        way,
        grant,
        address,
    };
    // It works, as long as it is alive.
    let id = lab.peers[0].write(grant.key, grant.address, b"first bytes");
    assert_eq!(lab.outcome(0, id), Ok(()));
    assert_eq!(lab.node.arena.peek(address, 11), b"first bytes");
    out
}

const fn done(out: &Out, status: i32) -> Body<'static> {
    let done = out.grant.done(status);
    match out.way {
        Way::Get => Body::GetDone(done),
        Way::Put | Way::Reply => Body::PutDone(done),
    }
}

/// The peer writes with a key it kept: over the connection it has, or over a new one.
fn refuses(lab: &mut Lab, out: &Out) {
    let alive = lab
        .node
        .gone
        .iter()
        .all(|(gone, _)| *gone != lab.connection(0));
    if !alive {
        lab.connect(0);
    }
    let before = lab.node.arena.peek(out.address, LENGTH as usize);
    let refused = lab.node.poller.nic().counts().refused;
    let id = lab.peers[0].write(out.grant.key, out.grant.address, &[0xbd; 200]);
    assert_eq!(lab.outcome(0, id), Err(Status::RemoteAccess));
    assert!(
        lab.node.arena.peek(out.address, LENGTH as usize) == before,
        "a dead key has written"
    );
    assert_eq!(lab.node.poller.nic().counts().refused, refused + 1);
    let why = lab.gone(lab.connection(0));
    assert!(matches!(why, Reason::Device(_)), "{why:?}");
    lab.works(1);
}

/// The windows of lost keys are held back: no event may come. Then they come back.
fn no_event_before_the_window_is_rebuilt(lab: &mut Lab) -> Event<'static> {
    assert!(lab.until(100_000, |lab| !lab.node.broken.is_empty()));
    lab.settle();
    assert!(lab.node.events.pop().is_none(), "told too early");
    assert_eq!(lab.node.counters.keys_alive.get(), 1);
    lab.works(1);
    lab.node.keep_broken = false;
    let event = lab.event();
    assert_eq!(lab.node.counters.keys_alive.get(), 0);
    event
}

#[test]
fn after_success_and_after_a_negative_status() {
    for profile in [Profile::frwr(), Profile::mlx5(), Profile::windows()] {
        for way in WAYS {
            for (status, expected) in [
                (LENGTH.cast_signed(), Ok(LENGTH)),
                (12, Ok(12)),
                (0, Ok(0)),
                (-5, Err(Error::Peer(-5))),
            ] {
                let mut lab = lab(profile);
                let out = grant(&mut lab, way);
                let done = done(&out, status);
                lab.peers[0].say(done);
                assert_eq!(told(lab.event()), expected, "{way:?}");
                refuses(&mut lab, &out);
                lab.end();
            }
        }
    }
}

/// An INVALIDATE waits for the work requests before it. As long as it does, the key is alive, and the
/// event must not be out: the late write lands.
#[test]
fn the_event_waits_until_the_invalidate_is_done_and_not_only_posted() {
    for way in WAYS {
        let mut lab = lab(Profile::frwr());
        let out = grant(&mut lab, way);
        lab.frozen[0] = true;
        lab.ask(0, 2, PUT, 10_000);
        for _ in 0..5 {
            lab.step();
        }
        let body = done(&out, 12);
        lab.peers[0].say(body);
        for _ in 0..50 {
            lab.step();
        }
        assert!(lab.node.events.pop().is_none(), "{way:?}: told too early");
        assert_eq!(lab.node.counters.keys_alive.get(), 1);
        lab.peers[0].write(out.grant.key, out.grant.address, b"late bytes");
        for _ in 0..50 {
            lab.step();
        }
        assert_eq!(lab.node.arena.peek(out.address, 10), b"late bytes");
        lab.frozen[0] = false;
        let event = if way == Way::Put {
            lab.event()
        } else {
            lab.event_of(TOKEN)
        };
        assert_eq!(told(event), Ok(12));
        assert_eq!(lab.node.counters.keys_alive.get(), 0);
        refuses(&mut lab, &out);
        lab.end();
    }
}

#[test]
fn after_the_peer_has_killed_it_itself() {
    for profile in [Profile::frwr(), Profile::mlx5(), Profile::windows()] {
        for way in WAYS {
            let mut lab = lab(profile);
            let out = grant(&mut lab, way);
            let body = done(&out, 12);
            lab.peers[0].say_and_kill(body, Some(out.grant.key));
            assert_eq!(told(lab.event()), Ok(12), "{way:?}");
            let counters = lab.node.counters;
            assert_eq!(counters.remote_invalidations.get(), 1);
            assert_eq!(counters.invalidations.get(), 0);
            refuses(&mut lab, &out);
            lab.end();
        }
    }
}

#[test]
fn after_a_late_done_of_a_transfer_that_timed_out_or_was_cancelled() {
    for way in WAYS {
        for (cancel, kill, status) in [
            (false, false, 12),
            (false, true, 12),
            (false, false, -5),
            (true, false, 12),
            (true, true, -5),
        ] {
            if cancel && way == Way::Put {
                // Only our own transfers can be cancelled.
                continue;
            }
            let mut setup = setup(Profile::frwr());
            setup.timeout = 2000;
            let mut lab = Lab::connected(setup, 2);
            let out = grant(&mut lab, way);
            if cancel {
                lab.cancel(TOKEN);
            }
            for _ in 0..5000 {
                lab.step();
            }
            assert!(lab.node.events.pop().is_none(), "{way:?}: told too early");
            assert_eq!(lab.node.counters.keys_alive.get(), 1);
            // The peer may still write, and does.
            let id = lab.peers[0].write(out.grant.key, out.grant.address, b"late bytes");
            assert_eq!(lab.outcome(0, id), Ok(()));
            let body = done(&out, status);
            let key = kill.then_some(out.grant.key);
            lab.peers[0].say_and_kill(body, key);
            let why = if cancel {
                Error::Cancelled
            } else {
                Error::TimedOut
            };
            assert_eq!(told(lab.event()), Err(why), "{way:?}");
            assert!(lab.node.gone.is_empty(), "a late DONE costs nothing");
            refuses(&mut lab, &out);
            lab.end();
        }
    }
}

#[test]
fn after_the_abandon_limit_the_connection_ends_and_then_the_window_is_rebuilt() {
    for way in WAYS {
        for cancel in [false, true] {
            if cancel && way == Way::Put {
                continue;
            }
            let mut setup = setup(Profile::frwr());
            setup.timeout = 4000;
            setup.abandon = 4000;
            let mut lab = Lab::connected(setup, 2);
            lab.node.keep_broken = true;
            let out = grant(&mut lab, way);
            if cancel {
                lab.cancel(TOKEN);
            }
            let why = if cancel {
                Error::Cancelled
            } else {
                Error::TimedOut
            };
            let event = no_event_before_the_window_is_rebuilt(&mut lab);
            assert_eq!(told(event), Err(why), "{way:?}");
            assert_eq!(lab.gone(lab.connection(0)), Reason::TimedOut);
            refuses(&mut lab, &out);
            lab.end();
        }
    }
}

/// How a connection fails while a key is out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Failure {
    /// The control side closes it.
    Close,
    /// The peer sends garbage.
    Garbage,
    /// The peer answers with a cookie that names nothing.
    WrongCookie,
    /// A work request of the node fails.
    WorkRequest,
    /// The INVALIDATE fails.
    Invalidate,
    /// The peer's queue pair is in error.
    PeerGone,
    /// The peer is silent for all retries.
    Silence,
    /// The peer kills a key that is not its own, and names its transfer.
    WrongKey,
}

const FAILURES: [Failure; 8] = [
    Failure::Close,
    Failure::Garbage,
    Failure::WrongCookie,
    Failure::WorkRequest,
    Failure::Invalidate,
    Failure::PeerGone,
    Failure::Silence,
    Failure::WrongKey,
];

#[test]
fn after_a_failed_connection_only_when_the_control_side_has_rebuilt_the_window() {
    for failure in FAILURES {
        for way in WAYS {
            let mut profile = Profile::frwr();
            profile.ack_timeout = 400;
            let mut lab = lab(profile);
            lab.node.keep_broken = true;
            let out = grant(&mut lab, way);
            let connection = lab.connection(0);
            let nothing = Done {
                cookie: 12345,
                status: 0,
            };
            // What the connection had decided stays decided.
            let mut expected = Err(Error::ConnectionClosed);
            match failure {
                Failure::Close => lab.node.order(Order::Close { connection }),
                Failure::Garbage => {
                    lab.peers[0].send(b"no message at all", None);
                }
                Failure::WrongCookie => {
                    lab.peers[0].say(Body::GetDone(nothing));
                }
                Failure::WorkRequest => {
                    lab.node.poller.nic().faults().fail = Some((0, Status::LocalProtection));
                    lab.ask(0, 2, PUT, 100);
                }
                Failure::Invalidate => {
                    lab.node.poller.nic().faults().fail = Some((0, Status::LocalOperation));
                    let body = done(&out, 12);
                    lab.peers[0].say(body);
                    expected = Ok(12);
                }
                Failure::PeerGone => {
                    lab.peers[0].die();
                    lab.ask(0, 2, PUT, 100);
                }
                Failure::Silence => {
                    lab.frozen[0] = true;
                    lab.ask(0, 2, PUT, 100);
                }
                Failure::WrongKey => {
                    let body = done(&out, 12);
                    let key = RKey(out.grant.key.0 ^ 0x100);
                    lab.peers[0].say_and_kill(body, Some(key));
                }
            }
            let mut event = lab_event_but_not_of(&mut lab, 2);
            assert!(event.is_none(), "{failure:?} {way:?} told too early");
            event = Some(no_event_before_the_window_is_rebuilt(&mut lab));
            let outcome = event.map(told);
            assert_eq!(outcome, Some(expected), "{failure:?} {way:?}");
            let why = lab.gone(connection);
            let fits = match failure {
                Failure::Close => why == Reason::Closed,
                Failure::Garbage => matches!(why, Reason::Malformed(_)),
                Failure::WrongCookie => why == Reason::UnexpectedAnswer,
                Failure::WorkRequest => why == Reason::Device(Status::LocalProtection),
                Failure::Invalidate => why == Reason::Device(Status::LocalOperation),
                Failure::PeerGone | Failure::Silence => {
                    why == Reason::Device(Status::RetryExceeded)
                }
                Failure::WrongKey => matches!(why, Reason::Device(_)),
            };
            assert!(fits, "{failure:?} {way:?} {why:?}");
            lab.frozen[0] = false;
            refuses(&mut lab, &out);
            lab.end();
        }
    }
}

/// Waits for the broken window; events of the helper transfer `token` are dropped on the way.
fn lab_event_but_not_of(lab: &mut Lab, token: u64) -> Option<Event<'static>> {
    let mut found = None;
    let broken = lab.until(1_000_000, |lab| {
        while let Some(event) = lab.node.events.pop() {
            match event {
                Event::Done { token: of, .. } if of.0 == token => {}
                other => found = Some(other),
            }
        }
        !lab.node.broken.is_empty()
    });
    assert!(broken, "{}", lab.picture());
    while let Some(event) = lab.node.events.pop() {
        match event {
            Event::Done { token: of, .. } if of.0 == token => {}
            other => found = Some(other),
        }
    }
    found
}

#[test]
fn after_stop_only_when_the_control_side_has_rebuilt_the_window() {
    for way in WAYS {
        let mut lab = lab(Profile::frwr());
        lab.node.keep_broken = true;
        grant(&mut lab, way);
        lab.node.order(Order::Stop);
        assert!(lab.until(10_000, |lab| !lab.node.broken.is_empty()));
        lab.settle();
        assert!(lab.node.events.pop().is_none(), "{way:?}: told too early");
        assert!(lab.node.stopped.is_none());
        lab.node.keep_broken = false;
        assert_eq!(told(lab.event()), Err(Error::ConnectionClosed));
        assert_eq!(lab.node.counters.keys_alive.get(), 0);
        assert!(lab.until(10_000, |lab| lab.node.stopped.is_some()));
        assert_eq!(lab.node.stopped, Some(Default::default()));
    }
}

/// No key is made for what needs none.
#[test]
fn a_put_of_ours_and_a_refusal_never_have_a_key() {
    let mut lab = lab(Profile::frwr());
    for status in [0, -12] {
        let at = lab.ask(0, 3, PUT, LENGTH).address;
        let before = lab.node.arena.peek(at, LENGTH as usize);
        let cookie = lab.receive(0).cookie();
        lab.peers[0].say(Body::PutNak(Done { cookie, status }));
        let expected = if status == 0 {
            Ok(0)
        } else {
            Err(Error::Peer(-12))
        };
        assert_eq!(told(lab.event()), expected);
        assert!(lab.node.arena.peek(at, LENGTH as usize) == before);
    }
    let refused = lab.peers[0].put_req(4, 4444, LENGTH);
    lab.peers[0].say(refused);
    let nak = Done {
        cookie: 4,
        status: 0,
    };
    assert_eq!(lab.receive(0).message().body, Body::PutNak(nak));
    assert_eq!(lab.node.counters.fragment_lists.get(), 0);
    lab.end();
}

/// REGISTER was taken, its message was not, and the application gives up in between.
#[test]
fn a_key_whose_message_never_went_out_dies_too() {
    let mut lab = lab(Profile::frwr());
    lab.node.poller.nic().faults().accept = Some(1);
    let at = lab.ask(0, TOKEN, GET, LENGTH).address;
    lab.step();
    assert_eq!(lab.node.counters.partial_doorbells.get(), 1);
    assert_eq!(lab.node.counters.keys_alive.get(), 1);
    lab.cancel(TOKEN);
    assert_eq!(told(lab.event()), Err(Error::Cancelled));
    assert_eq!(lab.node.counters.keys_alive.get(), 0);
    assert_eq!(lab.node.poller.nic().gauges().live_keys, 0);
    assert!(lab.node.gone.is_empty());
    lab.settle();
    assert!(lab.peers[0].inbox.is_empty(), "nothing was asked");
    let _ = at;
    lab.works(0);
    lab.works(1);
    lab.end();
}

/// The next transfers over the same window have other keys: the old ones stay dead while those live.
#[test]
fn a_kept_key_does_not_come_back_to_life_with_the_next_transfer_over_its_window() {
    for profile in [Profile::frwr(), Profile::mlx5(), Profile::windows()] {
        for cut in [None, Some(0), Some(1)] {
            let mut setup = setup(profile);
            setup.shape.windows = 2;
            let mut lab = Lab::connected(setup, 2);
            let mut kept = Vec::new();
            for round in 0..5 {
                // A chain that the device does not take (in full) must not lose count of the keys.
                lab.node.poller.nic().faults().accept = cut;
                let at = lab.ask(0, TOKEN, GET, LENGTH).address;
                let grant = lab.receive(0).grant();
                let before = lab.node.arena.peek(at, LENGTH as usize);
                for key in &kept {
                    assert_ne!(*key, grant.key);
                }
                if round == 4 {
                    let id = lab.peers[0].write(kept[3], grant.address, b"with the last key");
                    assert_eq!(lab.outcome(0, id), Err(Status::RemoteAccess));
                    assert_eq!(lab.node.arena.peek(at, LENGTH as usize), before);
                    break;
                }
                kept.push(grant.key);
                lab.peers[0].say(Body::GetDone(grant.done(0)));
                assert_eq!(told(lab.event_of(TOKEN)), Ok(0));
            }
            lab.works(1);
            lab.end();
        }
    }
}
