//! Two nodes in one thread do one of everything.

use core::sync::atomic::{AtomicU64, Ordering};
use std::collections::{BTreeMap, BTreeSet};

use o2poll::capture::{Mad, Note, Scribe};
use o2poll_dataplane::endpoint::{EntryOptions, Event, Operation};
use o2poll_dataplane::memory::PageList;
use o2poll_dataplane::peer::{Answer, Extensions, Local, Remembered, answer, request};
use o2poll_dataplane::wire::Message;
use o2poll_hal::clock::Clock;
use o2poll_hal::pcap;
use o2poll_hal::roce::icrc;
use o2poll_soft::{self as soft, Profile};
use o2poll_tests::plot::noise;
use o2poll_tests::tap::Posted;
use o2poll_tests::wireshark::{
    Dissected, Frames, Habits, OneWay, Quirks, frames, message, same, sound,
};
use o2poll_tests::{NAMES, STAMPS, Setup, World};

use crate::{NUMBERS, drain, tap};

/// A run of two nodes: what each posted, and the capture.
struct Run {
    posted: [Vec<Posted>; 2],
    conn: [Vec<u8>; 2],
    file: Vec<u8>,
    written: Vec<u8>,
}

fn local(of: usize) -> Local {
    Local {
        nid: NAMES[of],
        stamp: STAMPS[of],
        queue_depth: 8,
        max_frags: 257,
        high_water: 0,
        require_privileged_port: false,
        extensions: Extensions::empty(),
        ready: true,
    }
}

/// Node 1 dials node 0 and does one of everything, with these lengths.
fn one_of_everything(lengths: &[u32]) -> Run {
    let clock = Clock::start();
    let order: &'static AtomicU64 = Box::leak(Box::new(AtomicU64::new(0)));
    let (near, mut near_reader) = tap(order, clock);
    let (far, mut far_reader) = tap(order, clock);
    let mut setup = Setup::new(Profile::frwr());
    setup.timeout = 40_000;
    setup.keepalive = 5000;
    let mut taps = [Some(near), Some(far)].into_iter();
    let mut on = || {
        let recorder = taps.next().flatten().unwrap();
        move |wire| soft::Tap::on(wire, recorder)
    };
    let mut world = World::with(setup, [on(), on()]);
    for node in &mut world.nodes {
        node.poller.nic().log = Some(Vec::new());
    }

    // The connection manager, as both sides' rules have it.
    let asked = request(&local(1), &Remembered::new(), NAMES[0]);
    let mut known = Remembered::new();
    let Answer::Accept { reply, .. } =
        answer(&asked.private_data, None, &local(0), |_| Some(&mut known))
    else {
        panic!("refused")
    };
    let mut scribe = Scribe::new(Vec::new(), clock, &NAMES, vec![vec![1], vec![0]]).unwrap();
    let mut tell = |from, what| {
        let note = Note {
            from,
            to: 1 - from,
            transaction: 77,
            what,
        };
        let order = order.fetch_add(1, Ordering::Relaxed);
        scribe.note(order, clock.now().0, note).unwrap();
    };
    tell(
        1,
        Mad::Request {
            local: 0xa1,
            queue_pair: NUMBERS[1],
            private_data: asked.private_data.to_vec(),
        },
    );
    tell(
        0,
        Mad::Reply {
            local: 0xb2,
            remote: 0xa1,
            queue_pair: NUMBERS[0],
            private_data: reply.to_vec(),
        },
    );
    tell(
        1,
        Mad::ReadyToUse {
            local: 0xa1,
            remote: 0xb2,
        },
    );

    let [_, connection] = world.connect();
    let target = world.nodes[0].arena.flat(1 << 20, 3);
    world.export(0, 7, EntryOptions::PUT | EntryOptions::GET, target);
    let mut written = Vec::new();
    for length in lengths.iter().copied() {
        for ack in [false, true] {
            let pieces = if length > 5000 { 7 } else { 1 };
            let memory = scattered(&mut world, length, pieces);
            let bytes = noise(length, length.into());
            memory.write_at(0, &bytes);
            if length > 3976 {
                written.extend_from_slice(&bytes);
            }
            let put = Operation::Put {
                hdr_data: 0x55aa,
                ack,
            };
            transfer(&mut world, connection, 7, put, memory, Some(length));
        }
        for optimized in [true, false] {
            let memory = scattered(&mut world, length, 1);
            let get = Operation::Get { optimized };
            transfer(&mut world, connection, 7, get, memory, Some(length));
        }
    }
    // Nothing matches: PUT_NAK, GET_DONE with an error.
    for operation in [
        Operation::Put {
            hdr_data: 1,
            ack: true,
        },
        Operation::Get { optimized: true },
    ] {
        let memory = scattered(&mut world, 9000, 1);
        transfer(&mut world, connection, 8, operation, memory, None);
    }
    // NOOPs.
    for _ in 0..20_000 {
        world.step();
    }
    world.settle();
    let posted = [0, 1].map(|of| world.nodes[of].poller.nic().log.take().unwrap());
    drain(&mut scribe, [&mut near_reader, &mut far_reader]);
    let (summary, file) = scribe.finish().unwrap();
    assert_eq!((summary.lost, summary.unshown), (0, 0));
    Run {
        posted,
        conn: [asked.private_data.to_vec(), reply.to_vec()],
        file,
        written,
    }
}

fn scattered(world: &mut World, length: u32, pieces: u32) -> &'static mut PageList<'static> {
    let each = length / pieces;
    let mut lengths = vec![each; pieces as usize];
    lengths[0] += length - each * pieces;
    world.nodes[1].arena.list(&lengths, 8, 5)
}

fn transfer(
    world: &mut World,
    connection: o2poll_dataplane::pool::Handle,
    match_bits: u64,
    operation: Operation,
    memory: &'static mut PageList<'static>,
    expected: Option<u32>,
) {
    world.nodes[1].submit(World::request(
        connection, 1, match_bits, 0, operation, memory,
    ));
    match world.event(1) {
        Event::Done { outcome, .. } => {
            assert!(
                expected.is_none_or(|length| outcome == Ok(length)),
                "{outcome:?}"
            );
        }
        other => panic!("{other:?}"),
    }
}

/// Everything that is to be said about a run.
fn judge(run: &Run, frames: &Frames, habits: &Habits) -> Result<(), String> {
    for (index, (frame, seen)) in frames.iter().enumerate() {
        sound(frame, seen, habits).map_err(|why| format!("frame {}: {why}", index + 1))?;
    }
    let seen: Vec<&Dissected> = frames.iter().map(|(_, seen)| seen).collect();
    let psns = connection(run, &seen, habits.quirks)?;
    for of in [0, 1] {
        let one_way = OneWay {
            to: NUMBERS[1 - of],
            back: NUMBERS[of],
            psn: psns[of],
        };
        one_way.judge(&run.posted[of], &seen, habits)?;
    }
    Ok(())
}

/// The connection manager's part; the first PSN of each node's queue pair.
fn connection(run: &Run, seen: &[&Dissected], quirks: Quirks) -> Result<[u64; 2], String> {
    let [request, reply, ready, ..] = seen else {
        return Err(String::from("no connection"));
    };
    let must = |seen: &Dissected, fields: &[(&str, u64)]| {
        for (name, number) in fields {
            let shown = seen.number(name);
            if shown != Some(*number) {
                return Err(format!("{name} is {shown:?}, not {number:#x}"));
            }
        }
        Ok(())
    };
    let qp1 = [
        ("infiniband.bth.destqp", 1),
        ("infiniband.deth.srcqp", 1),
        ("infiniband.deth.q_key", 0x8001_0000),
    ];
    for datagram in [request, reply, ready] {
        must(datagram, &qp1)?;
    }
    must(
        request,
        &[
            ("infiniband.cm.req.serviceid.dport", 987),
            ("infiniband.cm.req.serviceid.protocol", 6),
            ("infiniband.cm.req.localqpn", NUMBERS[1].into()),
            ("infiniband.cm.req.pppmtu", 5),
            ("infiniband.cm.req.responderres", 0),
            ("infiniband.cm.req.ip_cm.sport", 1023),
            ("infiniband.cm.req.ip_cm.sip4", NAMES[1].address().into()),
            ("infiniband.cm.req.ip_cm.dip4", NAMES[0].address().into()),
        ],
    )?;
    must(
        reply,
        &[
            ("infiniband.cm.rep.localqpn", NUMBERS[0].into()),
            ("infiniband.cm.rep.remotecommid", 0xa1),
        ],
    )?;
    must(
        ready,
        &[
            ("infiniband.cm.rtu.localcommid", 0xa1),
            ("infiniband.cm.rtu.remotecommid", 0xb2),
        ],
    )?;
    for (seen, private_data) in [request, reply].into_iter().zip(&run.conn) {
        same(seen, private_data, quirks)?;
    }
    let psn = |seen: &Dissected, name| seen.number(name).ok_or_else(|| format!("no {name}"));
    Ok([
        psn(reply, "infiniband.cm.rep.startpsn")?,
        psn(request, "infiniband.cm.req.startpsn")?,
    ])
}

/// What was posted, by type of message.
fn kinds(run: &Run) -> BTreeMap<u8, usize> {
    let mut kinds = BTreeMap::new();
    for posted in run.posted.iter().flatten() {
        if let Posted::Message(bytes, _) = posted {
            let (message, _) = Message::decode(bytes).unwrap();
            *kinds.entry(message.body.kind()).or_default() += 1;
        }
    }
    kinds
}

#[test]
fn wireshark_shows_what_was_posted() {
    let habits = Habits::learn();
    let run = one_of_everything(&[
        0,
        1,
        2,
        3,
        100,
        3976,
        3977,
        4096,
        4097,
        65536,
        300_001,
        1 << 20,
    ]);
    let kinds = kinds(&run);
    for kind in 0xd0..=0xd7 {
        assert!(kinds.contains_key(&kind), "no message {kind:#x}: {kinds:?}");
    }
    judge(&run, &frames(&run.file), &habits).unwrap();
    // Beside the fields: payloads, and what Wireshark does not show.
    for of in [0, 1] {
        let posted = run.posted[of].iter().filter_map(|posted| match posted {
            Posted::Message(bytes, _) => Some(bytes.clone()),
            Posted::Write(..) => None,
        });
        let shown = pcap::read(&run.file)
            .unwrap()
            .into_iter()
            .filter_map(|frame| {
                let from = frame.bytes[26..30] == NAMES[of].address().to_be_bytes();
                message(frame.bytes).filter(|_| from).map(<[u8]>::to_vec)
            });
        assert!(posted.eq(shown));
    }
    bytes_written(&run);
}

/// One wrong bit is seen, wherever it is.
#[test]
fn one_wrong_bit_fails_the_judgement() {
    let habits = Habits::learn();
    let run = one_of_everything(&[100, 5000]);
    let frames_of = pcap::read(&run.file).unwrap();
    let originals: Vec<Vec<u8>> = frames_of.iter().map(|frame| frame.bytes.to_vec()).collect();
    let mut wrong: Vec<(String, usize, Vec<u8>)> = Vec::new();
    let mut tried = BTreeSet::new();
    for (index, original) in originals.iter().enumerate() {
        let Some(bytes) = message(original) else {
            continue;
        };
        let kind = Message::decode(bytes).unwrap().0.body.kind();
        if !tried.insert(kind) {
            continue;
        }
        let start = original.len() - bytes.len() - 4 - (bytes.len().wrapping_neg() & 3);
        for (field, place) in places(kind) {
            let mut other = original.clone();
            other[start + place] ^= 1;
            seal(&mut other);
            wrong.push((format!("{field} of {kind:#x}"), index, other));
        }
        for (field, place) in [
            ("PSN", 53),
            ("queue pair", 49),
            ("opcode", 42),
            ("length", 17),
        ] {
            let mut other = original.clone();
            other[place] ^= 2;
            seal(&mut other);
            wrong.push((format!("{field} of {kind:#x}"), index, other));
        }
        let mut other = original.clone();
        *other.last_mut().unwrap() ^= 1;
        wrong.push((format!("ICRC of {kind:#x}"), index, other));
    }
    assert_eq!(tried.len(), 8);
    for (index, original) in originals.iter().enumerate() {
        let places: &[(&str, usize)] = match original[42] {
            0x06 | 0x0a => &[("address", 60), ("rkey", 65), ("DMA length", 69)],
            0x11 => &[("syndrome", 54), ("acknowledged PSN", 51), ("MSN", 56)],
            _ => continue,
        };
        for (field, place) in places {
            let mut other = original.clone();
            other[*place] ^= 0x20;
            seal(&mut other);
            wrong.push((format!("{field} of {:#x}", original[42]), index, other));
        }
    }
    // All of them behind the capture, to be dissected at once; then each in the place of what it was.
    let mut writer = pcap::Writer::new(Vec::new()).unwrap();
    for bytes in originals
        .iter()
        .chain(wrong.iter().map(|(_, _, bytes)| bytes))
    {
        writer.frame(0, bytes, bytes.len()).unwrap();
    }
    let mut frames = frames(&writer.finish().unwrap());
    let mut others = frames.split_off(originals.len());
    judge(&run, &frames, &habits).unwrap();
    assert!(others.len() > 80, "{}", others.len());
    for ((what, index, _), other) in wrong.iter().zip(&mut others) {
        core::mem::swap(&mut frames[*index], other);
        assert!(
            judge(&run, &frames, &habits).is_err(),
            "{what} is not noticed"
        );
        core::mem::swap(&mut frames[*index], other);
    }
}

/// Some byte of every field of a message, by its type.
fn places(kind: u8) -> Vec<(&'static str, usize)> {
    let mut places = vec![
        ("magic", 1),
        ("version", 5),
        ("type", 6),
        ("credits", 7),
        ("nob", 9),
        ("source NID", 16),
        ("source stamp", 27),
        ("destination NID", 35),
        ("destination stamp", 41),
    ];
    if matches!(kind, 0xd1 | 0xd2 | 0xd6) {
        places.extend([
            ("LNet destination", 48),
            ("LNet source", 56),
            ("destination pid", 65),
            ("source pid", 69),
            ("LNet type", 72),
            ("payload length", 77),
            ("handle", 81),
            ("object", 89),
            ("match bits", 97),
        ]);
    }
    match kind {
        0xd2 => places.extend([
            ("hdr_data", 105),
            ("portal", 112),
            ("offset", 117),
            ("cookie", 121),
        ]),
        0xd4 => places.extend([
            ("source cookie", 49),
            ("sink cookie", 57),
            ("key", 65),
            ("fragments", 68),
            ("length", 73),
            ("address", 78),
        ]),
        0xd6 => places.extend([
            ("portal", 104),
            ("source offset", 109),
            ("sink length", 113),
            ("cookie", 121),
            ("key", 129),
            ("fragments", 132),
            ("length", 137),
            ("address", 142),
        ]),
        0xd3 | 0xd5 | 0xd7 => places.extend([("cookie", 49), ("status", 57)]),
        _ => {}
    }
    places
}

/// Makes the ICRC right again.
fn seal(frame: &mut [u8]) {
    let end = frame.len() - 4;
    let crc = icrc(&frame[14..end]).unwrap();
    frame[end..].copy_from_slice(&crc.to_le_bytes());
}

/// The bytes of node 1's WRITEs, and of nobody else's, are those of its memory.
fn bytes_written(run: &Run) {
    let mut found = Vec::new();
    for frame in pcap::read(&run.file).unwrap() {
        let start = match frame.bytes[42] {
            0x06 | 0x0a => 70,
            0x07 | 0x08 => 54,
            _ => continue,
        };
        if frame.bytes[26..30] == NAMES[1].address().to_be_bytes() {
            let pad = usize::from(frame.bytes[43] >> 4 & 3);
            found.extend_from_slice(&frame.bytes[start..frame.bytes.len() - 4 - pad]);
        }
    }
    assert!(
        found == run.written,
        "{} {}",
        found.len(),
        run.written.len()
    );
}
