//! The wire, judged by Wireshark.
//!
//! What two nodes post is written down where they post it. What their devices put on the wire is captured as
//! RoCEv2 frames, and `tshark` dissects the capture. Both must say the same: every field of every o2iblnd and
//! LNet message, and the transport that carries them.
//!
//! Wireshark 4.0 is not perfect in LNet either. What it gets wrong of kernel nodes' traffic (`tests/captures`) is
//! measured first, and exactly that is forgiven: notes of the same kind on frames of the same kind, and known
//! misreadings ([`Quirks`]), which say the same bytes under other names or in another order.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};

use o2poll::capture::{Mad, Note, Scribe, Ticker, tap};
use o2poll_config::{Config, Machine};
use o2poll_dataplane::endpoint::{EntryOptions, Event, Operation};
use o2poll_dataplane::memory::PageList;
use o2poll_dataplane::nic::{
    Burst, Completion, Layout, Nic as _, Qp, RKey, ReceiveQueue, Remote, Rights, SendWr, Sge,
    Status, WrId,
};
use o2poll_dataplane::peer::{Answer, Local, Remembered, answer, request};
use o2poll_dataplane::ring::{LapSlot, Returned};
use o2poll_dataplane::wire::{Body, Message, Nid, lnet};
use o2poll_hal::clock::Clock;
use o2poll_hal::pcap;
use o2poll_hal::roce::{MTU, icrc};
use o2poll_soft::{self as soft, Profile};
use o2poll_tests::node::lend;
use o2poll_tests::plot::noise;
use o2poll_tests::tap::Posted;
use o2poll_tests::wireshark::{Dissected, Quirks, dissect, expected};
use o2poll_tests::{Arena, NAMES, STAMPS, Setup, World};

/// What Wireshark gets wrong of kernel nodes' traffic.
struct Habits {
    complaints: BTreeMap<String, BTreeSet<String>>,
    quirks: Quirks,
}

impl Habits {
    fn learn() -> Self {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("captures");
        let mut complaints: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        let mut quirks = Quirks::ALL.to_vec();
        let mut compared = 0;
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_none_or(|ending| ending != "pcap") {
                continue;
            }
            let file = fs::read(&path).unwrap();
            let frames = pcap::read(&file).unwrap();
            for (frame, seen) in frames.iter().zip(dissect(&path)) {
                complaints
                    .entry(seen.kind())
                    .or_default()
                    .extend(seen.complaints());
                // One that came in one frame, and is not checksummed.
                let Some(bytes) = message(frame.bytes) else {
                    continue;
                };
                if bytes[12..16] != [0; 4] || seen.first("lnet.ib.type").is_none() {
                    continue;
                }
                let shown = seen.lnet();
                quirks.retain(|quirks| shown == expected(bytes, *quirks));
                assert!(!quirks.is_empty(), "{path:?}: {shown:x?}");
                compared += 1;
            }
        }
        assert!(compared > 50, "{compared}");
        let [quirks] = quirks[..] else {
            panic!("{quirks:?}: captures must tell")
        };
        if quirks.early {
            // The captures have no REPLY in a PUT_REQ. Since its cookie is looked for too early, bytes are left.
            let kind = format!("opcode 0x4, message 0xd2, LNet {:?}, payload true", Some(3));
            let left = "Capture:# offset:# (length:#) msg_type:# ib_type:d#";
            complaints.entry(kind).or_default().insert(left.to_owned());
        }
        // Nor a REPLY in an IMMEDIATE that is not whole words: the pad is counted like payload, and the note is
        // the one on PUTs.
        let kind = |lnet: u8, padded: &str| {
            let lnet = Some(lnet);
            format!("opcode 0x4, message 0xd1, LNet {lnet:?}, payload true{padded}")
        };
        let on_puts = complaints.get(&kind(1, "")).cloned().unwrap_or_default();
        for lnet in [1, 3] {
            complaints.insert(kind(lnet, ", padded"), on_puts.clone());
        }
        Self { complaints, quirks }
    }

    fn forgive(&self, seen: &Dissected) -> Result<(), String> {
        let none = BTreeSet::new();
        let known = self.complaints.get(&seen.kind()).unwrap_or(&none);
        match seen.complaints().difference(known).next() {
            Some(complaint) => Err(format!("{}: {complaint}", seen.kind())),
            None => Ok(()),
        }
    }
}

/// The message of a SEND that is one frame.
fn message(frame: &[u8]) -> Option<&[u8]> {
    let start = match *frame.get(42)? {
        0x04 => 54,
        0x17 => 58,
        _ => return None,
    };
    let pad = usize::from(frame[43] >> 4 & 3);
    Some(&frame[start..frame.len() - 4 - pad])
}

/// A capture file that goes away.
struct Temporary(PathBuf);

impl Temporary {
    fn new(name: &str, bytes: &[u8]) -> Self {
        let thread = std::thread::current().id();
        let name = format!("o2poll-{}-{thread:?}-{name}.pcap", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::write(&path, bytes).unwrap();
        Self(path)
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// A run of two nodes: what each posted, and the capture.
struct Run {
    posted: [Vec<Posted>; 2],
    conn: [Vec<u8>; 2],
    file: Vec<u8>,
    written: Vec<u8>,
}

const NUMBERS: [u32; 2] = [0x11, 0x12];

fn local(of: usize) -> Local {
    Local {
        nid: NAMES[of],
        stamp: STAMPS[of],
        queue_depth: 8,
        max_frags: 257,
        high_water: 0,
        require_privileged_port: false,
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
        let order = order.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
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

/// Frames, and what Wireshark says of them.
type Frames = Vec<(Vec<u8>, Dissected)>;

fn frames(file: &[u8]) -> Frames {
    let temporary = Temporary::new("judged", file);
    let seen = dissect(&temporary.0);
    let frames = pcap::read(file).unwrap();
    assert_eq!(frames.len(), seen.len());
    let bytes = frames.iter().map(|frame| frame.bytes.to_vec());
    bytes.zip(seen).collect()
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

/// The frame as such.
fn sound(frame: &[u8], seen: &Dissected, habits: &Habits) -> Result<(), String> {
    habits.forgive(seen)?;
    let (packet, crc) = frame[14..].split_last_chunk::<4>().ok_or("short")?;
    if icrc(packet) != Some(u32::from_le_bytes(*crc)) {
        return Err(String::from("ICRC"));
    }
    let must = [
        ("ip.checksum.status", 1),
        ("udp.dstport", 4791),
        ("infiniband.bth.p_key", 0xffff),
        ("infiniband.invariant.crc", u32::from_be_bytes(*crc).into()),
        ("ip.len", frame.len() as u64 - 14),
        ("udp.length", frame.len() as u64 - 34),
    ];
    for (name, number) in must {
        // Wireshark shows no CRC of a malformed message.
        let shown = seen.number(name);
        let missing = name.ends_with("crc") && shown.is_none() && !seen.complaints().is_empty();
        if shown != Some(number) && !missing {
            return Err(format!("{name} is {shown:?}, not {number:#x}"));
        }
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
    let psn = |seen: &Dissected, name| seen.number(name).ok_or(format!("no {name}"));
    Ok([
        psn(reply, "infiniband.cm.rep.startpsn")?,
        psn(request, "infiniband.cm.req.startpsn")?,
    ])
}

/// A message as dissected, and as posted.
fn same(seen: &Dissected, bytes: &[u8], quirks: Quirks) -> Result<(), String> {
    let (shown, meant) = (seen.lnet(), expected(bytes, quirks));
    if shown == meant {
        return Ok(());
    }
    let differing = shown
        .iter()
        .zip(&meant)
        .find(|(shown, meant)| shown != meant);
    Err(match differing {
        Some((shown, meant)) => format!("shows {shown:x?}, not {meant:x?}"),
        None => format!("{} fields, not {}", shown.len(), meant.len()),
    })
}

/// One direction of the connection.
struct OneWay {
    to: u32,
    back: u32,
    psn: u64,
}

impl OneWay {
    fn judge(&self, posted: &[Posted], seen: &[&Dissected], habits: &Habits) -> Result<(), String> {
        let opcode = |seen: &Dissected| seen.number("infiniband.bth.opcode").unwrap_or(u64::MAX);
        let goes = |seen: &Dissected, number: u32| {
            seen.number("infiniband.bth.destqp") == Some(number.into())
        };
        let mut requests = seen
            .iter()
            .filter(|seen| goes(seen, self.to) && opcode(seen) != ACKNOWLEDGE);
        let mut psn = self.psn;
        let mut next = || {
            let seen = requests.next().ok_or("a frame is missing")?;
            if seen.number("infiniband.bth.psn") != Some(psn) {
                return Err(format!(
                    "PSN {:?}, not {psn}",
                    seen.number("infiniband.bth.psn")
                ));
            }
            psn = (psn + 1) & 0xff_ffff;
            Ok(seen)
        };
        for posted in posted {
            match posted {
                Posted::Message(bytes, key) => {
                    let seen = next()?;
                    let meant = if key.is_some() { 0x17 } else { 0x04 };
                    let invalidated = key.map(|RKey(key)| u64::from(key));
                    if opcode(seen) != meant || seen.number("infiniband.ieth") != invalidated {
                        return Err(format!("{:#x} is not a SEND", opcode(seen)));
                    }
                    same(seen, bytes, habits.quirks)?;
                }
                Posted::Write(remote, length, imm) => {
                    let frames = (*length as usize).div_ceil(MTU).max(1);
                    for index in 0..frames {
                        let seen = next()?;
                        let meant = match (index == 0, index + 1 == frames, imm) {
                            (true, true, None) => 0x0a,
                            (true, true, Some(_)) => 0x0b,
                            (true, false, _) => 0x06,
                            (false, false, _) => 0x07,
                            (false, true, None) => 0x08,
                            (false, true, Some(_)) => 0x09,
                        };
                        let reth = [
                            ("infiniband.reth.va", remote.address),
                            ("infiniband.reth.r_key", remote.rkey.0.into()),
                            ("infiniband.reth.dmalen", (*length).into()),
                        ];
                        let right = opcode(seen) == meant
                            && reth.iter().all(|(name, number)| {
                                seen.number(name) == (index == 0).then_some(*number)
                            });
                        if !right {
                            return Err(format!("{:#x}: not {posted:?}", opcode(seen)));
                        }
                    }
                }
            }
        }
        if requests.next().is_some() {
            return Err(String::from("a frame that nobody posted"));
        }
        // Acknowledgements never go back, and the last is for everything.
        let (mut last, mut count) = (0, 0);
        for seen in seen
            .iter()
            .filter(|seen| goes(seen, self.back) && opcode(seen) == ACKNOWLEDGE)
        {
            if seen.number("infiniband.aeth.syndrome.opcode") != Some(0) {
                return Err(String::from("a refusal"));
            }
            let number = |name| seen.number(name).unwrap_or(u64::MAX);
            let at = number("infiniband.bth.psn").wrapping_sub(self.psn) & 0xff_ffff;
            let messages = number("infiniband.aeth.msn");
            if at < last || messages < count || messages > posted.len() as u64 {
                return Err(format!("acknowledges {at} after {last}"));
            }
            (last, count) = (at, messages);
        }
        let sent = psn.wrapping_sub(self.psn + 1) & 0xff_ffff;
        if (last, count) != (sent, posted.len() as u64) {
            return Err(format!("acknowledged {last} of {sent}, {count} messages"));
        }
        Ok(())
    }
}

const ACKNOWLEDGE: u64 = 0x11;

fn drain(scribe: &mut Scribe<Vec<u8>>, readers: [&mut soft::Reader<'static>; 2]) {
    let mut bytes = Vec::new();
    for (node, reader) in readers.into_iter().enumerate() {
        while let Some(passed) = {
            bytes.clear();
            reader.next(|piece| bytes.extend_from_slice(piece))
        } {
            scribe.passed(node, &passed, &bytes).unwrap();
        }
    }
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

/// One device, one queue pair, and a page of memory.
struct Device {
    soft: soft::Soft<'static, soft::Tap<'static, soft::Ports<'static, 'static>, Ticker>>,
    qp: Qp,
    memory: Sge,
    completed: Vec<Completion>,
}

impl Device {
    fn new(
        port: soft::Port<'static>,
        recorder: soft::Recorder<'static, Ticker>,
        numbers: (u32, u32),
    ) -> Self {
        let profile = Profile {
            rnr_timer: 4,
            ..Profile::frwr()
        };
        let limits = soft::Limits {
            queue_pairs: 1,
            send_wr: 16,
            recv_wr: 16,
            windows: 2,
            memories: 1,
            cqe: 64,
        };
        let sizes = limits.sizes(&profile).unwrap();
        let storage = soft::Storage {
            queue_pairs: lend(sizes.queue_pairs, soft::QueuePairSlot::default),
            numbers: lend(sizes.numbers, u32::default),
            sends: lend(sizes.sends, soft::SendEntry::default),
            pieces: lend(sizes.pieces, Sge::default),
            receives: lend(sizes.receives, soft::ReceiveEntry::default),
            regions: lend(sizes.regions, soft::RegionSlot::default),
            fragments: lend(sizes.fragments, soft::Fragment::default),
            memories: lend(sizes.memories, || None),
            completions: lend(sizes.completions, soft::CompletionEntry::default),
        };
        let wire = soft::Tap::on(soft::Ports::new(Box::leak(Box::new([port]))), recorder);
        let mut soft = soft::Soft::new(profile, &limits, storage, wire).unwrap();
        let memory = Arena::new(&mut soft, 16384).take(8192, 0).sge();
        let pair = soft::QueuePair::new(numbers.0, 0, numbers.1, 16, 16);
        let qp = soft.adopt(pair).unwrap();
        Self {
            soft,
            qp,
            memory,
            completed: Vec::new(),
        }
    }

    fn post(&mut self, wr: SendWr<'_>) {
        self.soft.queue(self.qp, WrId(1), true, wr);
        self.soft.doorbell(self.qp).unwrap();
    }

    fn receive(&mut self) {
        let into = ReceiveQueue::Of(self.qp);
        self.soft.receive(into, WrId(2), self.memory).unwrap();
    }

    fn poll(&mut self) {
        let mut burst = Burst::new();
        self.soft.poll(&mut burst).unwrap();
        self.completed.extend(burst);
    }
}

/// What o2iblnd sends seldom or never: keys that are killed from afar, immediate data, refusals.
#[test]
fn wireshark_shows_invalidations_immediate_data_and_refusals() {
    let clock = Clock::start();
    let order: &'static AtomicU64 = Box::leak(Box::new(AtomicU64::new(0)));
    let lane = || soft::Lane {
        returned: Box::leak(Box::new(Returned::new())),
        slots: lend(64, LapSlot::new),
    };
    let (near, far) = soft::link(lane(), lane()).unwrap();
    let (near_recorder, mut near_reader) = tap(order, clock);
    let (far_recorder, mut far_reader) = tap(order, clock);
    let mut a = Device::new(near, near_recorder, (NUMBERS[0], NUMBERS[1]));
    let mut b = Device::new(far, far_recorder, (NUMBERS[1], NUMBERS[0]));
    let both = |a: &mut Device, b: &mut Device| {
        for _ in 0..50 {
            a.poll();
            b.poll();
        }
    };
    let (region, key) = b.soft.adopt_window(soft::Window::new(0)).unwrap();
    let key = key.rotated();
    let sink = b.memory;
    b.post(SendWr::Register {
        region,
        key,
        rights: Rights::REMOTE_WRITE,
        base: sink.address,
        length: 4097,
        layout: Layout::Fragments(&[Sge {
            length: 4097,
            ..sink
        }]),
    });
    let short = Sge {
        length: 5,
        ..a.memory
    };
    // No receive, for a while.
    a.post(SendWr::Send {
        message: short,
        invalidate: None,
    });
    for _ in 0..3 {
        a.poll();
        b.poll();
    }
    b.receive();
    both(&mut a, &mut b);
    b.receive();
    let remote = Remote {
        address: sink.address,
        rkey: key,
    };
    let local = [Sge {
        length: 4097,
        ..a.memory
    }];
    a.post(SendWr::Write {
        local: &local,
        remote,
        imm: Some(0xabcd_0123),
    });
    both(&mut a, &mut b);
    b.receive();
    a.post(SendWr::Send {
        message: short,
        invalidate: Some(key),
    });
    both(&mut a, &mut b);
    a.post(SendWr::Write {
        local: &[short],
        remote,
        imm: None,
    });
    both(&mut a, &mut b);
    assert!(a.completed.contains(&Completion::Failed {
        id: WrId(1),
        status: Status::RemoteAccess
    }));

    let mut scribe = Scribe::new(Vec::new(), clock, &NAMES, vec![vec![1], vec![0]]).unwrap();
    drain(&mut scribe, [&mut near_reader, &mut far_reader]);
    let (summary, file) = scribe.finish().unwrap();
    assert_eq!(summary.lost, 0);
    let habits = Habits {
        complaints: BTreeMap::new(),
        quirks: Quirks::ALL[0],
    };
    let frames = frames(&file);
    let psn = frames[0].1.number("infiniband.bth.psn").unwrap();
    let story: Vec<_> = frames
        .iter()
        .map(|(frame, seen)| {
            sound(frame, seen, &habits).unwrap();
            let number = |name| seen.number(name);
            let psn = (number("infiniband.bth.psn").unwrap() - psn) & 0xff_ffff;
            let opcode = number("infiniband.bth.opcode").unwrap();
            let syndrome = number("infiniband.aeth.syndrome");
            let word = number("infiniband.immdt").or(number("infiniband.ieth"));
            (opcode, psn, syndrome, word)
        })
        .collect();
    let refused = story.iter().filter(|frame| frame.2 == Some(0x2c)).count();
    assert!(refused > 0, "{story:x?}");
    let (first, rest) = story.split_at(2 * refused);
    for pair in first.chunks(2) {
        // Sent, refused for a while, and sent again under the same number.
        assert_eq!(pair, [(0x04, 0, None, None), (0x11, 0, Some(0x2c), None)]);
    }
    assert_eq!(
        rest,
        [
            (0x04, 0, None, None),
            (0x11, 0, Some(0x1f), None),
            (0x06, 1, None, None),
            (0x09, 2, None, Some(0xabcd_0123)),
            (0x11, 2, Some(0x1f), None),
            (0x17, 3, None, Some(key.0.into())),
            (0x11, 3, Some(0x1f), None),
            (0x0a, 4, None, None),
            (0x11, 4, Some(0x62), None),
        ]
    );
}

struct Silent;

impl o2poll::Watcher for Silent {
    fn line(&mut self, _: &str, _: bool) {}

    fn look(&mut self, _: &[(Nid, Arc<o2poll::Progress>)]) {}
}

/// `o2poll run --pcap`: two polling threads and a control thread, a copy and a workload.
#[test]
fn wireshark_shows_a_run_of_the_program() {
    let habits = Habits::learn();
    let path = Temporary::new("run", &[]);
    let exported = Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml");
    let text = format!(
        r#"
        [device]
        soft = {{ profile = "frwr" }}
        [memory]
        huge_pages = "off"
        mlock = "off"
        [[node]]
        nid = "{}"
        [[node.export]]
        name = "file"
        portal = 50
        match_bits = 1
        file = "{}"
        [[node.export]]
        name = "scratch"
        portal = 51
        match_bits = 1
        size = "1 MiB"
        writable = true
        [[node]]
        nid = "{}"
        [node.copy]
        peer = "{0}"
        file = "file"
        into = "scratch"
        transfer = "4 KiB"
        [node.workload]
        peer = "{0}"
        region = "scratch"
        sizes = ["1 KiB", "4 KiB", "40 KiB"]
        in_flight = 3
        duration = "5ms"
        "#,
        NAMES[0],
        exported.display(),
        NAMES[1],
    );
    let machine = Machine::this();
    let config = Config::parse(&text, Path::new("run.toml"), &machine)
        .unwrap_or_else(|report| panic!("{report}"));
    let options = o2poll::Options {
        pcap: Some(path.0.clone()),
        ..o2poll::Options::default()
    };
    let stop = AtomicBool::new(false);
    let report = o2poll::run(&config, &machine, &options, &stop, &mut Silent).unwrap();
    assert!(report.ok, "{report}");

    let frames = frames(&fs::read(&path.0).unwrap());
    assert_eq!(report.capture.unwrap().frames, frames.len() as u64);
    for (index, (frame, seen)) in frames.iter().enumerate() {
        sound(frame, seen, &habits).unwrap_or_else(|why| panic!("frame {}: {why}", index + 1));
    }
    // REQ, REP, RTU; at the end both sides say DREQ, and DREP to the other's.
    let datagrams: Vec<_> = frames
        .iter()
        .filter_map(|(_, seen)| seen.number("infiniband.mad.attributeid"))
        .collect();
    assert_eq!(datagrams[..3], [0x10, 0x13, 0x14]);
    let mut end = datagrams[3..].to_vec();
    end.sort_unstable();
    assert_eq!(end, [0x15, 0x15, 0x16, 0x16]);
    let number = |frame: usize, name| frames[frame].1.number(name).unwrap();
    let ends = [
        (
            "infiniband.cm.req.localqpn",
            "infiniband.cm.req.startpsn",
            0,
        ),
        (
            "infiniband.cm.rep.localqpn",
            "infiniband.cm.rep.startpsn",
            1,
        ),
    ]
    .map(|(name, psn, frame)| (number(frame, name) as u32, number(frame, psn)));

    let counted = |of: usize, name| {
        let counters = &report.nodes[of].counters;
        counters.iter().find(|(of, _)| *of == name).unwrap().1
    };
    // Each direction: what the frames' own bytes say was posted is what Wireshark shows, in sequence.
    let seen: Vec<_> = frames.iter().map(|(_, seen)| seen).collect();
    let (mut kinds, mut asked) = (BTreeMap::new(), 0);
    for (of, there) in [(0, 1), (1, 0)] {
        let posted = posted(frames.iter().map(|(frame, _)| &frame[..]), ends[there].0);
        let mut messages = 0;
        for posted in &posted {
            let Posted::Message(bytes, _) = posted else {
                continue;
            };
            let (message, _) = Message::decode(bytes).unwrap();
            // NOOPs are counted apart.
            messages += u64::from(message.body != Body::Noop);
            *kinds.entry(message.body.kind()).or_insert(0_u64) += 1;
            let header = match message.body {
                Body::Immediate { header, .. }
                | Body::PutReq { header, .. }
                | Body::GetReq { header, .. } => header,
                _ => continue,
            };
            let (from, to) = (NAMES[1 - of], NAMES[of]);
            assert_eq!((header.source, header.destination), (from, to));
            if let lnet::Body::Put { .. } | lnet::Body::Get { .. } = header.body {
                asked += 1;
            }
        }
        assert_eq!(messages, counted(1 - of, "messages_sent"));
        let one_way = OneWay {
            to: ends[there].0,
            back: ends[of].0,
            psn: ends[of].1,
        };
        one_way
            .judge(&posted, &seen, &habits)
            .unwrap_or_else(|why| panic!("to {}: {why}", NAMES[1 - of]));
    }
    // As many PUTs and GETs as the dialing core has counted, NOOPs too; every bulk transfer has come to its end.
    assert_eq!(asked, counted(1, "transfers"), "{report}");
    let noops = counted(0, "noops") + counted(1, "noops");
    assert_eq!(kinds.get(&0xd0).copied().unwrap_or(0), noops);
    assert_eq!(kinds[&0xd2], kinds[&0xd4]);
    assert_eq!(kinds[&0xd2], kinds[&0xd5]);
    assert_eq!(kinds[&0xd6], kinds[&0xd7]);
    assert!(kinds[&0xd1] > 2 && kinds[&0xd2] > 0 && kinds[&0xd6] > 0);
}

/// What the frames to a queue pair say was posted.
fn posted<'f>(frames: impl Iterator<Item = &'f [u8]>, to: u32) -> Vec<Posted> {
    let word = |frame: &[u8], at: usize| u32::from_be_bytes(frame[at..at + 4].try_into().unwrap());
    frames
        .filter(|frame| word(frame, 46) & 0xff_ffff == to)
        .filter_map(|frame| match frame[42] {
            0x04 => Some(Posted::Message(message(frame)?.to_vec(), None)),
            0x17 => {
                let key = RKey(word(frame, 54));
                Some(Posted::Message(message(frame)?.to_vec(), Some(key)))
            }
            0x06 | 0x0a => {
                let remote = Remote {
                    address: u64::from(word(frame, 54)) << 32 | u64::from(word(frame, 58)),
                    rkey: RKey(word(frame, 62)),
                };
                Some(Posted::Write(remote, word(frame, 66), None))
            }
            _ => None,
        })
        .collect()
}
