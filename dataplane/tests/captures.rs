//! Every o2iblnd message that real nodes sent decodes, and encodes again to the same bytes.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::PathBuf;

use o2poll_dataplane::peer::{
    Answer, Extensions, Local, Next, Remembered, accepted, answer, rejected, request,
};
use o2poll_dataplane::wire::ping::{Features, PingInfo, Status};
use o2poll_dataplane::wire::{
    Body, ByteOrder, Checksum, ConnParams, Message, Nid, Pid, RejectRecord, Why, lnet, ping,
};

const FIRST: Nid = Nid::o2ib([10, 9, 0, 1], 0);
const SECOND: Nid = Nid::o2ib([10, 9, 0, 2], 0);

#[test]
fn every_captured_message_encodes_to_the_bytes_it_was_decoded_from() {
    let mut seen = BTreeMap::new();
    for (name, packets) in captures() {
        for bytes in packets.iter().filter_map(Packet::message) {
            let (message, encoding) =
                Message::decode(bytes).unwrap_or_else(|e| panic!("{name}: {e}"));
            assert_eq!(encoding.order, ByteOrder::Little, "{name}");
            assert!([FIRST, SECOND].contains(&message.envelope.source), "{name}");
            let mut again = [0xa5; 4096];
            let nob = message.encode_as(encoding, &mut again).unwrap() as usize;
            assert_eq!(again[..nob], bytes[..nob], "{name}: {message:?}");
            // Nothing hides behind what was decoded: SENDs end there, CM rooms are zero.
            assert!(bytes[nob..].iter().all(|&b| b == 0), "{name}: {message:?}");
            *seen
                .entry(format!("{:#04x}", message.body.kind()))
                .or_insert(0) += 1;
        }
    }
    // Counted by an independent script. No capture has a PUT_NAK (0xd3).
    let expected = [
        ("0xc0", 5),
        ("0xc1", 3),
        ("0xd0", 2),
        ("0xd1", 45),
        ("0xd2", 2),
        ("0xd4", 2),
        ("0xd5", 2),
        ("0xd6", 6),
        ("0xd7", 5),
    ];
    let seen: Vec<_> = seen.iter().map(|(k, n)| (k.as_str(), *n)).collect();
    assert_eq!(seen, expected);
}

#[test]
fn captured_reject_records_name_the_depth_that_would_do() {
    let mut seen = 0;
    for (name, packets) in captures() {
        for packet in &packets {
            let Packet::Reject(reason, data) = packet else {
                continue;
            };
            assert_eq!(*reason, 28, "{name}");
            let (record, order) = RejectRecord::decode(data).unwrap();
            assert_eq!((record.why, record.version), (Why::MsgQueueSize, 0x12));
            let params = ConnParams {
                queue_depth: 8,
                max_frags: 257,
                max_msg_size: 4096,
            };
            assert_eq!(record.params, Some(params));
            assert_eq!(record.encode_as(order)[..], data[..24]);
            assert!(data[24..].iter().all(|&b| b == 0));
            seen += 1;
        }
    }
    assert_eq!(seen, 2);
}

/// A kernel's requests get from us what another kernel answered, to the byte.
#[test]
fn captured_requests_are_answered_as_a_kernel_answers_them() {
    let (mut acks, mut rejects) = (0, 0);
    for (name, packets) in captures() {
        let mut known = HashMap::new();
        let mut request: Option<&[u8]> = None;
        for packet in &packets {
            let mut answered = |request: &[u8], stamp: u64, local: Nid| {
                let local = Local {
                    nid: local,
                    stamp,
                    queue_depth: 8,
                    max_frags: 257,
                    high_water: 0,
                    require_privileged_port: false,
                    extensions: Extensions::all(),
                    ready: true,
                };
                answer(request, None, &local, |nid| {
                    Some(known.entry(nid).or_insert_with(Remembered::new))
                })
            };
            match packet {
                Packet::Private(bytes) => {
                    let (message, encoding) = Message::decode(bytes).unwrap();
                    if let Body::ConnReq(_) = message.body {
                        request = Some(bytes);
                        continue;
                    }
                    let there = message.envelope;
                    let Answer::Accept { terms, reply } =
                        answered(request.unwrap(), there.source_stamp, there.source)
                    else {
                        panic!("{name}: {message:?}")
                    };
                    assert_eq!(encoding.checksum, Checksum::None);
                    assert_eq!(reply[..], bytes[..reply.len()], "{name}");
                    assert_eq!(terms.peer_stamp, there.destination_stamp);
                    acks += 1;
                }
                Packet::Reject(_, data) => {
                    let (theirs, _) = RejectRecord::decode(data).unwrap();
                    let asked = Message::decode(request.unwrap()).unwrap().0.envelope;
                    let Answer::Reject { record, .. } =
                        answered(request.unwrap(), theirs.incarnation, asked.destination)
                    else {
                        panic!("{name}: {theirs:?}")
                    };
                    assert_eq!(record[..], data[..24], "{name}");
                    rejects += 1;
                }
                Packet::Send(_) => {}
            }
        }
    }
    assert_eq!((acks, rejects), (3, 2));
}

/// Refused at depth 32, we dial again with what a kernel dials again with, to the byte.
#[test]
fn a_captured_refusal_leads_to_the_request_a_kernel_made_next() {
    let packets = capture("m-asym-connect-cksum-keepalive.pcap");
    let [
        Packet::Private(first),
        Packet::Reject(reason, record),
        Packet::Private(second),
        Packet::Private(ack),
        ..,
    ] = &packets[..]
    else {
        panic!()
    };
    let (message, encoding) = Message::decode(first).unwrap();
    let local = Local {
        nid: message.envelope.source,
        stamp: message.envelope.source_stamp,
        queue_depth: 32,
        max_frags: 257,
        high_water: 0,
        require_privileged_port: false,
        extensions: Extensions::empty(),
        ready: true,
    };
    let mut remembered = Remembered::new();
    // That node sends checksums; ours does not.
    let summed = |bytes: &[u8]| {
        let mut buffer = [0; 4096];
        let plain = Message::decode(bytes).unwrap().0;
        plain.encode_as(encoding, &mut buffer).unwrap();
        buffer[..56].to_vec()
    };
    let ours = request(&local, &remembered, message.envelope.destination);
    assert_eq!(summed(&ours.private_data), *first);
    let next = rejected(*reason, record, &ours, &local, &mut remembered);
    assert_eq!(next, Next::Redial);
    let ours = request(&local, &remembered, message.envelope.destination);
    assert_eq!(summed(&ours.private_data), *second);
    let terms = accepted(ack, &ours, &local, &mut remembered).unwrap();
    assert_eq!((terms.queue_depth, terms.max_frags), (8, 257));
    assert_eq!(terms.high_water, 4);
    assert_eq!(terms.receives(), 18);
}

#[test]
fn a_kernel_before_6_2_sums_signed_bytes() {
    let mut sums = HashMap::new();
    for (_, packets) in captures() {
        for bytes in packets.iter().filter_map(Packet::message) {
            let (message, encoding) = Message::decode(bytes).unwrap();
            *sums
                .entry((message.envelope.source, encoding.checksum))
                .or_insert(0) += 1;
        }
    }
    assert!(sums[&(FIRST, Checksum::Signed)] > 5);
    assert!(
        !sums
            .keys()
            .any(|(_, checksum)| *checksum == Checksum::Unsigned)
    );
}

#[test]
fn a_captured_ping_is_answered_with_an_info_like_ours() {
    let packets = capture("a-connect-ping.pcap");
    let sends: Vec<_> = packets
        .iter()
        .filter_map(|packet| match packet {
            Packet::Send(bytes) => Some(Message::decode(bytes).unwrap().0),
            _ => None,
        })
        .collect();
    let [ask, answer] = sends[..] else {
        panic!("{sends:?}")
    };
    let Body::Immediate { header, .. } = ask.body else {
        panic!("{ask:?}")
    };
    let lnet::Body::Get {
        reply,
        match_bits: ping::MATCH_BITS,
        portal: ping::PORTAL,
        offset: 0,
        sink_length: 3960,
    } = header.body
    else {
        panic!("{header:?}")
    };
    let Body::Immediate { header, payload } = answer.body else {
        panic!("{answer:?}")
    };
    assert_eq!(header.body, lnet::Body::Reply { handle: reply });
    let info = PingInfo::decode(payload).unwrap();
    assert_eq!(info.primary(), Some(SECOND));
    assert_eq!(info.entries().count(), 1);
    assert!(info.entries().all(|entry| entry.status == Status::Up));
    assert!(
        info.features()
            .contains(Features::PLAIN | Features::MULTI_RAIL)
    );
    let ours = ping::encode(info.features(), info.pid(), info.sequence(), SECOND);
    assert_eq!(ours[..], *payload);
    assert_eq!(info.pid(), Pid::LUSTRE);
}

#[test]
fn captured_bulk_transfers_hang_together_by_their_cookies() {
    let (mut puts, mut gets) = (0, 0);
    for (name, packets) in captures() {
        let mut asked: Option<(u64, u32)> = None;
        let mut granted = None;
        for bytes in packets.iter().filter_map(Packet::message) {
            match Message::decode(bytes).unwrap().0.body {
                Body::PutReq { header, cookie } => {
                    let lnet::Body::Put { portal, ack, .. } = header.body else {
                        panic!("{header:?}")
                    };
                    assert_eq!((portal, ack), (BULK, lnet::WireHandle::NONE));
                    asked = Some((cookie, header.payload_length));
                }
                Body::PutAck {
                    source_cookie,
                    sink_cookie,
                    sink,
                } => {
                    let (cookie, length) = asked.take().unwrap();
                    assert_eq!(cookie, source_cookie);
                    assert_eq!(sink.length(), u64::from(length));
                    granted = Some((sink_cookie, length));
                }
                Body::PutDone(done) => {
                    let (cookie, length) = granted.take().unwrap();
                    assert_eq!((done.cookie, done.status.cast_unsigned()), (cookie, length));
                    puts += 1;
                }
                Body::GetReq {
                    header,
                    cookie,
                    sink,
                } => {
                    let lnet::Body::Get {
                        portal,
                        offset,
                        sink_length,
                        ..
                    } = header.body
                    else {
                        panic!("{header:?}")
                    };
                    assert_eq!((portal, offset), (BULK, 0));
                    assert_eq!(sink.length(), u64::from(sink_length));
                    asked = Some((cookie, sink_length));
                }
                Body::GetDone(done) => {
                    let (cookie, length) = asked.take().unwrap();
                    assert_eq!(
                        (done.cookie, done.status.cast_unsigned()),
                        (cookie, length),
                        "{name}"
                    );
                    gets += 1;
                }
                _ => {}
            }
        }
    }
    assert_eq!((puts, gets), (2, 5));
}

#[test]
fn captured_selftest_requests_go_to_their_portals() {
    let mut portals = BTreeMap::new();
    for (_, packets) in captures() {
        for bytes in packets.iter().filter_map(Packet::message) {
            let Body::Immediate { header, payload } = Message::decode(bytes).unwrap().0.body else {
                continue;
            };
            assert_eq!(header.destination_pid, Pid::LUSTRE);
            assert_eq!(header.source_pid, Pid::LUSTRE);
            if let lnet::Body::Put {
                portal,
                hdr_data: 0,
                offset: 0,
                ack: lnet::WireHandle::NONE,
                ..
            } = header.body
            {
                assert_eq!(payload.len(), 160);
                *portals.entry(portal).or_insert(0) += 1;
            }
        }
    }
    assert_eq!(portals.keys().copied().collect::<Vec<_>>(), [50, 51, BULK]);
}

#[test]
fn a_captured_push_is_acknowledged_with_its_handle_and_length() {
    let mut pushed = HashMap::new();
    let mut acknowledged = 0;
    for bytes in capture("d-lst-session-discovery.pcap")
        .iter()
        .filter_map(Packet::message)
    {
        let Body::Immediate { header, payload } = Message::decode(bytes).unwrap().0.body else {
            continue;
        };
        match header.body {
            lnet::Body::Put {
                ack,
                match_bits: ping::MATCH_BITS,
                portal: ping::PORTAL,
                ..
            } => {
                PingInfo::decode(payload).unwrap();
                pushed.insert(ack.0, header.payload_length);
            }
            lnet::Body::Ack {
                handle,
                match_bits,
                length,
            } => {
                assert_eq!(match_bits, ping::MATCH_BITS);
                assert_eq!(pushed.remove(&handle.0), Some(length));
                acknowledged += 1;
            }
            _ => {}
        }
    }
    assert_eq!((acknowledged, pushed.len()), (2, 0));
}

#[test]
fn descriptors_can_be_read_later_from_the_kept_message() {
    let mut seen = 0;
    for (name, packets) in captures() {
        for bytes in packets.iter().filter_map(Packet::message) {
            let (message, _) = Message::decode(bytes).unwrap();
            let (Body::PutAck { sink, .. } | Body::GetReq { sink, .. }) = message.body else {
                continue;
            };
            // Fast registration: one fragment, whatever the size.
            assert_eq!((sink.len(), sink.locate().len()), (1, 1), "{name}");
            assert_eq!(sink.locate().get(bytes, 0), sink.get(0));
            assert_eq!(sink.locate().get(bytes, 1), None);
            assert!([4096, 1 << 20].contains(&sink.length()), "{name}: {sink:?}");
            seen += 1;
        }
    }
    assert_eq!(seen, 8);
}

/// What of a capture concerns o2iblnd.
enum Packet {
    /// Private data of a CM REQ or REP, as its receiver sees it: the whole room, in a REQ behind the 36
    /// bytes of the RDMA CM's own header.
    Private(Vec<u8>),
    /// Reason and private data of a CM REJ.
    Reject(u16, Vec<u8>),
    /// A SEND, put together again.
    Send(Vec<u8>),
}

impl Packet {
    fn message(&self) -> Option<&[u8]> {
        match self {
            Self::Private(bytes) | Self::Send(bytes) => Some(bytes),
            Self::Reject(..) => None,
        }
    }
}

fn captures() -> Vec<(String, Vec<Packet>)> {
    let mut names: Vec<_> = fs::read_dir(directory())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.ends_with(".pcap"))
        .collect();
    names.sort();
    assert_eq!(names.len(), 9);
    names
        .into_iter()
        .map(|name| (name.clone(), capture(&name)))
        .collect()
}

fn directory() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/captures")
}

/// Just enough of pcap, Ethernet, IPv4, UDP, the base transport header and the CM's MADs.
fn capture(name: &str) -> Vec<Packet> {
    let file = fs::read(directory().join(name)).unwrap();
    let (header, mut rest) = file.split_at(24);
    assert_eq!(header[..4], 0xa1b2_c3d4_u32.to_le_bytes());
    let mut packets = Vec::new();
    // By destination address and queue pair: the last sequence number, and the bytes so far.
    let mut sends: HashMap<(Vec<u8>, u32), (u32, Vec<u8>)> = HashMap::new();
    while !rest.is_empty() {
        let (record, tail) = rest.split_at(16);
        let length = u32::from_le_bytes(record[8..12].try_into().unwrap()) as usize;
        let (frame, tail) = tail.split_at(length);
        rest = tail;
        if frame[12..14] != [8, 0] || frame[23] != 17 || frame[36..38] != 4791_u16.to_be_bytes() {
            continue;
        }
        assert_eq!(frame[14], 0x45, "IPv4 without options");
        let transport = &frame[42..];
        let opcode = transport[0];
        let pad = usize::from(transport[1] >> 4 & 3);
        let queue_pair = be24(&transport[5..8]);
        let sequence = be24(&transport[9..12]);
        let payload = &transport[12..transport.len() - 4 - pad];
        let key = (frame[30..34].to_vec(), queue_pair);
        match opcode {
            SEND_FIRST | SEND_ONLY => {
                let before = sends.insert(key.clone(), (sequence, payload.to_vec()));
                assert!(before.is_none(), "{name}: a SEND inside a SEND");
            }
            SEND_MIDDLE | SEND_LAST => {
                let (last, bytes) = sends.get_mut(&key).expect("a first packet");
                assert_eq!(sequence, (*last + 1) & 0xff_ffff, "{name}");
                *last = sequence;
                bytes.extend_from_slice(payload);
            }
            UD_SEND_ONLY => packets.extend(management(&payload[8..])),
            _ => {}
        }
        if matches!(opcode, SEND_LAST | SEND_ONLY) {
            packets.push(Packet::Send(sends.remove(&key).unwrap().1));
        }
    }
    assert!(sends.is_empty(), "{name}: a SEND without its end");
    packets
}

fn management(mad: &[u8]) -> Option<Packet> {
    assert_eq!(mad.len(), 256);
    let data = &mad[24..];
    match u16::from_be_bytes([mad[16], mad[17]]) {
        0x10 => Some(Packet::Private(data[140 + 36..][..56].to_vec())),
        0x12 => Some(Packet::Reject(
            u16::from_be_bytes([data[10], data[11]]),
            data[84..][..148].to_vec(),
        )),
        0x13 => Some(Packet::Private(data[36..][..196].to_vec())),
        _ => None,
    }
}

fn be24(bytes: &[u8]) -> u32 {
    u32::from_be_bytes([0, bytes[0], bytes[1], bytes[2]])
}

/// lnet_selftest's portal for bulk and replies.
const BULK: u32 = 52;

const SEND_FIRST: u8 = 0x00;
const SEND_MIDDLE: u8 = 0x01;
const SEND_LAST: u8 = 0x02;
const SEND_ONLY: u8 = 0x04;
const UD_SEND_ONLY: u8 = 0x64;
