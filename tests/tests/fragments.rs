//! The node writes into any legal descriptor of a peer: up to 257 fragments, empty ones, in instalments,
//! in either byte order, byte for byte.

use o2poll_dataplane::endpoint::{EntryOptions, Event, Operation};
use o2poll_dataplane::nic::Status;
use o2poll_dataplane::poller::Reason;
use o2poll_dataplane::wire::{Body, ByteOrder, Checksum, Descriptor, Done, Encoding, Fragment};
use o2poll_soft::Profile;
use o2poll_tests::{Lab, Setup, World};

const PUT: Operation = Operation::Put {
    hdr_data: 1,
    ack: false,
};

fn lab(writes_at_once: u16, max_sge: u32) -> Lab {
    let mut profile = Profile::frwr();
    profile.capabilities.max_sge = max_sge;
    let mut setup = Setup::new(profile);
    setup.memory = 4 << 20;
    setup.shape.writes_at_once = writes_at_once;
    Lab::connected(setup, 2)
}

fn bytes(length: u32) -> Vec<u8> {
    (0..length).map(|n| (n % 251) as u8).collect()
}

/// Shapes of a sink of `length` bytes.
fn shapes(length: u32) -> Vec<(&'static str, Vec<u32>)> {
    let even = length / 257;
    let mut many = vec![even; 256];
    many.push(length - even * 256);
    let mut with_empty = vec![0, length / 3, 0, 0, length - length / 3, 0];
    with_empty.resize(20, 0);
    vec![
        ("one", vec![length]),
        ("two", vec![1, length - 1]),
        ("257", many),
        ("empty ones between", with_empty),
        ("larger than the transfer", vec![length, length, 77]),
        ("last of 257 takes all", {
            let mut shape = vec![0; 256];
            shape.push(length);
            shape
        }),
    ]
}

/// The node moves `length` bytes into such a sink, by PUT or by serving a GET; what it says it moved.
fn fill(lab: &mut Lab, put: bool, length: u32, sink: &[Fragment]) -> i32 {
    let key = lab.peers[0].key();
    if put {
        let source = lab
            .node
            .arena
            .list(&[length / 3, length - length / 3], 5, 3);
        source.write_at(0, &bytes(length));
        let request = World::request(lab.connection(0), 1, 7, 0, PUT, source);
        lab.node.submit(request);
        let source_cookie = lab.receive(0).cookie();
        lab.peers[0].say(Body::PutAck {
            source_cookie,
            sink_cookie: 6,
            sink: Descriptor::new(key, sink),
        });
        let Body::PutDone(Done { cookie: 6, status }) = lab.receive(0).message().body else {
            panic!("no PUT_DONE");
        };
        match lab.event() {
            Event::Done { outcome, .. } => assert_eq!(outcome, Ok(status.cast_unsigned())),
            other => panic!("{other:?}"),
        }
        status
    } else {
        let request = lab.peers[0].get_req(6, 42, sink);
        lab.peers[0].say(request);
        let Body::GetDone(Done { cookie: 6, status }) = lab.receive(0).message().body else {
            panic!("no GET_DONE");
        };
        status
    }
}

#[test]
fn lu_9425_every_descriptor_is_filled_in_order_and_nothing_beside_it() {
    for (writes_at_once, max_sge) in [(1, 1), (4, 30), (16, 2)] {
        for order in [ByteOrder::Little, ByteOrder::Big] {
            let mut lab = lab(writes_at_once, max_sge);
            let checksum = Checksum::Unsigned;
            lab.peers[0].encoding = Encoding { order, checksum };
            let length = 70_001;
            let exported = lab.export(42, EntryOptions::GET | EntryOptions::TRUNCATE, length);
            let content = lab.node.arena.peek(exported.address, length as usize);
            for put in [true, false] {
                for (name, shape) in shapes(length) {
                    let sink = lab.peers[0].sink(&shape, 3);
                    let moved = fill(&mut lab, put, length, &sink);
                    assert_eq!(moved, length.cast_signed(), "{name}");
                    let all = lab.peers[0].peek(&sink);
                    let (data, rest) = all.split_at(length as usize);
                    let expected = if put { bytes(length) } else { content.clone() };
                    assert!(data == expected, "{put} {name}");
                    assert!(rest.iter().all(|byte| *byte == 0xee), "{put} {name}");
                    // The three bytes between any two.
                    for piece in &sink {
                        let end = piece.address + u64::from(piece.length);
                        assert_eq!(lab.peers[0].arena.peek(end, 3), [0xee; 3], "{put} {name}");
                    }
                }
            }
            assert_eq!(lab.end(), [Reason::Closed; 2]);
        }
    }
}

#[test]
fn a_sink_that_is_too_small_gets_what_fits() {
    for put in [true, false] {
        let mut lab = lab(4, 30);
        lab.export(42, EntryOptions::GET | EntryOptions::TRUNCATE, 70_000);
        for shape in [vec![5000], vec![1, 2, 0, 3], vec![0], vec![0; 257]] {
            let sink = lab.peers[0].sink(&shape, 3);
            let room: u32 = shape.iter().sum();
            let moved = fill(&mut lab, put, 70_000, &sink);
            assert_eq!(moved, room.cast_signed());
        }
        assert_eq!(lab.end(), [Reason::Closed; 2]);
    }
}

/// The second of several WRITEs is refused: those before it were unsignalled and are done, those behind it
/// are flushed, and the connection must be drained of all of them.
#[test]
fn a_fragment_that_may_not_be_written_ends_the_connection() {
    for put in [true, false] {
        for bad in [0, 1, 2, 6] {
            let mut lab = lab(4, 30);
            lab.export(42, EntryOptions::GET, 70_000);
            let mut sink = lab.peers[0].sink(&[10_000; 7], 3);
            sink[bad].address = 64;
            let key = lab.peers[0].key();
            if put {
                lab.ask(0, 1, PUT, 70_000);
                let source_cookie = lab.receive(0).cookie();
                lab.peers[0].say(Body::PutAck {
                    source_cookie,
                    sink_cookie: 6,
                    sink: Descriptor::new(key, &sink),
                });
            } else {
                let request = lab.peers[0].get_req(6, 42, &sink);
                lab.peers[0].say(request);
            }
            let why = lab.gone(lab.connection(0));
            assert_eq!(why, Reason::Device(Status::RemoteAccess), "{put} {bad}");
            lab.connect(0);
            let sink = lab.peers[0].sink(&[70_000], 0);
            let moved = fill(&mut lab, false, 70_000, &sink);
            assert_eq!(moved, 70_000);
            lab.end();
        }
    }
}
