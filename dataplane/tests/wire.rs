//! The message codec and the negotiation against arbitrary values and arbitrary bytes.

use o2poll_dataplane::nic::RKey;
use o2poll_dataplane::peer::{Answer, Extensions, Local, Remembered, answer};
use o2poll_dataplane::wire::lnet::{self, MTU, WireHandle};
use o2poll_dataplane::wire::ping::PingInfo;
use o2poll_dataplane::wire::{
    Body, ByteOrder, Checksum, ConnParams, Descriptor, Done, Encoding, Envelope, Fragment,
    IMMEDIATE_PAYLOAD, Message, Nid, Pid, RejectRecord, Why,
};
use proptest::prelude::*;

/// A body whose borrowed parts are owned.
#[derive(Clone, Debug)]
enum Owned {
    ConnReq(ConnParams),
    ConnAck(ConnParams),
    Noop,
    Immediate(lnet::Header, Vec<u8>),
    PutReq(lnet::Header, u64),
    PutNak(Done),
    PutAck(u64, u64, RKey, Vec<Fragment>),
    PutDone(Done),
    GetReq(lnet::Header, u64, RKey, Vec<Fragment>),
    GetDone(Done),
}

impl Owned {
    fn body(&self) -> Body<'_> {
        match self {
            Self::ConnReq(params) => Body::ConnReq(*params),
            Self::ConnAck(params) => Body::ConnAck(*params),
            Self::Noop => Body::Noop,
            Self::Immediate(header, payload) => Body::Immediate {
                header: *header,
                payload,
            },
            Self::PutReq(header, cookie) => Body::PutReq {
                header: *header,
                cookie: *cookie,
            },
            Self::PutNak(done) => Body::PutNak(*done),
            Self::PutAck(source_cookie, sink_cookie, key, fragments) => Body::PutAck {
                source_cookie: *source_cookie,
                sink_cookie: *sink_cookie,
                sink: Descriptor::new(*key, fragments),
            },
            Self::PutDone(done) => Body::PutDone(*done),
            Self::GetReq(header, cookie, key, fragments) => Body::GetReq {
                header: *header,
                cookie: *cookie,
                sink: Descriptor::new(*key, fragments),
            },
            Self::GetDone(done) => Body::GetDone(*done),
        }
    }
}

prop_compose! {
    fn envelope()(
        version in prop::sample::select(&[0x11, 0x12][..]),
        credits: u8,
        source in 0..u64::MAX,
        source_stamp: u64,
        destination: u64,
        destination_stamp: u64,
    ) -> Envelope {
        Envelope {
            version,
            credits,
            source: Nid(source),
            source_stamp,
            destination: Nid(destination),
            destination_stamp,
        }
    }
}

fn params() -> impl Strategy<Value = ConnParams> {
    any::<(u16, u16, u32)>().prop_map(|(queue_depth, max_frags, max_msg_size)| ConnParams {
        queue_depth,
        max_frags,
        max_msg_size,
    })
}

fn done() -> impl Strategy<Value = Done> {
    any::<(u64, i32)>().prop_map(|(cookie, status)| Done { cookie, status })
}

fn handle() -> impl Strategy<Value = WireHandle> {
    any::<[u8; 16]>().prop_map(WireHandle)
}

fn fragments() -> impl Strategy<Value = Vec<Fragment>> {
    let fragment = any::<(u32, u64)>().prop_map(|(length, address)| Fragment { length, address });
    prop::collection::vec(fragment, 1..=257)
}

fn header(
    body: impl Strategy<Value = lnet::Body>,
    longest: u32,
) -> impl Strategy<Value = lnet::Header> {
    (body, any::<(u64, u64, u32, u32)>(), 0..=longest).prop_map(|(body, ids, length)| {
        lnet::Header {
            destination: Nid(ids.0),
            source: Nid(ids.1),
            destination_pid: Pid(ids.2),
            source_pid: Pid(ids.3),
            payload_length: if body.has_payload() { length } else { 0 },
            body,
        }
    })
}

fn ack() -> impl Strategy<Value = lnet::Body> {
    (handle(), any::<(u64, u32)>()).prop_map(|(handle, (match_bits, length))| lnet::Body::Ack {
        handle,
        match_bits,
        length,
    })
}

fn put_or_reply() -> impl Strategy<Value = lnet::Body> {
    prop_oneof![
        (handle(), any::<(u64, u64, u32, u32)>()).prop_map(
            |(ack, (match_bits, hdr_data, portal, offset))| lnet::Body::Put {
                ack,
                match_bits,
                hdr_data,
                portal,
                offset,
            }
        ),
        handle().prop_map(|handle| lnet::Body::Reply { handle }),
    ]
}

fn get() -> impl Strategy<Value = lnet::Body> {
    (handle(), any::<(u64, u32, u32, u32)>()).prop_map(
        |(reply, (match_bits, portal, offset, sink_length))| lnet::Body::Get {
            reply,
            match_bits,
            portal,
            offset,
            sink_length,
        },
    )
}

fn body() -> impl Strategy<Value = Owned> {
    let immediate = header(prop_oneof![ack(), put_or_reply(), get()], IMMEDIATE_PAYLOAD)
        .prop_flat_map(|header| {
            let payload = prop::collection::vec(any::<u8>(), header.payload_length as usize);
            (Just(header), payload)
        });
    prop_oneof![
        params().prop_map(Owned::ConnReq),
        params().prop_map(Owned::ConnAck),
        Just(Owned::Noop),
        immediate.prop_map(|(header, payload)| Owned::Immediate(header, payload)),
        (header(put_or_reply(), MTU), any::<u64>()).prop_map(|(h, c)| Owned::PutReq(h, c)),
        done().prop_map(Owned::PutNak),
        (any::<(u64, u64, u32)>(), fragments()).prop_map(|((a, b, key), list)| Owned::PutAck(
            a,
            b,
            RKey(key),
            list
        )),
        done().prop_map(Owned::PutDone),
        (header(get(), 0), any::<(u64, u32)>(), fragments())
            .prop_map(|(h, (c, key), list)| Owned::GetReq(h, c, RKey(key), list)),
        done().prop_map(Owned::GetDone),
    ]
}

fn encoding() -> impl Strategy<Value = Encoding> {
    let orders = prop::sample::select(&[ByteOrder::Little, ByteOrder::Big][..]);
    let sums = prop::sample::select(&[Checksum::None, Checksum::Signed, Checksum::Unsigned][..]);
    (orders, sums).prop_map(|(order, checksum)| Encoding { order, checksum })
}

/// Bytes that a test of the decoder starts from: mostly a real message.
fn encoded() -> impl Strategy<Value = Vec<u8>> {
    (envelope(), body(), encoding()).prop_map(|(envelope, owned, encoding)| {
        let message = Message {
            envelope,
            body: owned.body(),
        };
        let mut buffer = [0xa5; 4096];
        let nob = message.encode_as(encoding, &mut buffer).unwrap();
        buffer[..nob as usize].to_vec()
    })
}

/// Decodes, and looks at everything that came out.
fn walk(bytes: &[u8]) {
    let Ok((message, encoding)) = Message::decode(bytes) else {
        return;
    };
    if let Body::PutAck { sink, .. } | Body::GetReq { sink, .. } = message.body {
        let located = sink.locate();
        assert_eq!(sink.iter().count(), located.len());
        for (i, fragment) in sink.iter().enumerate() {
            assert_eq!(located.get(bytes, i), Some(fragment));
        }
    }
    if let Body::Immediate { header, payload } = message.body {
        assert_eq!(header.payload_length as usize, payload.len());
    }
    // What decodes is legal, so that it can be sent on, and reads the same there.
    let mut again = [0xa5; 4096];
    let nob = message.encode_as(encoding, &mut again).unwrap();
    let (reread, _) = Message::decode(&again[..nob as usize]).unwrap();
    assert_eq!(reread, message);
}

proptest! {
    #[test]
    fn what_is_encoded_decodes_to_the_same(
        envelope in envelope(),
        owned in body(),
        encoding in encoding(),
    ) {
        let message = Message { envelope, body: owned.body() };
        let mut buffer = [0xa5; 4096];
        let nob = message.encode_as(encoding, &mut buffer).unwrap() as usize;
        let (decoded, read) = Message::decode(&buffer).unwrap();
        prop_assert_eq!(decoded, message);
        prop_assert_eq!(read.order, encoding.order);
        // The variants agree on a message without a byte of 0x80 or more.
        let ascii = buffer[..nob].iter().enumerate().all(|(i, b)| b.is_ascii() || (12..16).contains(&i));
        prop_assert!(read.checksum == encoding.checksum
            || (ascii && encoding.checksum == Checksum::Unsigned && read.checksum == Checksum::Signed));
    }

    #[test]
    fn a_damaged_message_is_decoded_or_refused(
        mut bytes in encoded(),
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        header_damage in prop::option::of((0_usize..140, any::<u8>())),
        cut in prop::option::of(any::<prop::sample::Index>()),
        clear_sum: bool,
    ) {
        for (at, value) in damage {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if let Some((at, value)) = header_damage && let Some(byte) = bytes.get_mut(at) {
            *byte = value;
        }
        if clear_sum {
            bytes[12..16].fill(0);
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        walk(&bytes);
    }

    #[test]
    fn arbitrary_bytes_are_decoded_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..5000)) {
        walk(&bytes);
        let _ = RejectRecord::decode(&bytes);
        let _ = PingInfo::decode(&bytes).map(|info| info.entries().count());
    }

    #[test]
    fn arbitrary_bytes_behind_a_good_start_are_decoded_or_refused(
        mut bytes in prop::collection::vec(any::<u8>(), 48..4200),
        kind in prop::sample::select(&[0xc0, 0xc1, 0xd0, 0xd1, 0xd2, 0xd3, 0xd4, 0xd5, 0xd6, 0xd7][..]),
        lnet_type in 0_u8..6,
        small in any::<[u8; 2]>(),
    ) {
        bytes[..8].copy_from_slice(&[0x91, 0x1b, 0xe9, 0x0b, 0x12, 0, kind, 0]);
        let nob = u32::try_from(bytes.len()).unwrap();
        bytes[8..12].copy_from_slice(&nob.to_le_bytes());
        bytes[12..16].fill(0);
        if let Some(lnet) = bytes.get_mut(72..80) {
            lnet.copy_from_slice(&[lnet_type, 0, 0, 0, small[0], small[1], 0, 0]);
        }
        for at in [68, 132] {
            if let Some(count) = bytes.get_mut(at..at + 4) && [0xd4, 0xd6].contains(&kind) {
                count.copy_from_slice(&[small[0], small[1] & 1, 0, 0]);
            }
        }
        walk(&bytes);
        if let Some(ping) = bytes.get_mut(..16) {
            ping.copy_from_slice(&[0x67, 0x6e, 0x69, 0x70, 2, 0, 0, 0, 0, 0, 0, 0, small[0], 0, 0, 0]);
        }
        let _ = PingInfo::decode(&bytes).map(|info| info.entries().count());
    }
}

fn local(nid: Nid) -> Local {
    Local {
        nid,
        stamp: 7,
        queue_depth: 16,
        max_frags: 200,
        high_water: 0,
        require_privileged_port: false,
        extensions: Extensions::all(),
        ready: true,
    }
}

proptest! {
    #[test]
    fn whatever_a_peer_asks_for_the_terms_are_within_ours(
        version in prop::sample::select(&[0x11, 0x12][..]),
        depth in 0_u16..20,
        frags in prop_oneof![0_u16..3, 198_u16..203, any::<u16>()],
        size in prop::sample::select(&[0, 4095, 4096, 4097, u32::MAX][..]),
        stamp in 0_u64..2,
        destination_stamp in prop::sample::select(&[0, 7, 8][..]),
        damage in prop::option::of((0_usize..56, any::<u8>())),
    ) {
        let (us, them) = (Nid::o2ib([10, 0, 0, 1], 0), Nid::o2ib([10, 0, 0, 2], 0));
        let envelope = Envelope {
            version,
            credits: 0,
            source: them,
            source_stamp: stamp,
            destination: us,
            destination_stamp,
        };
        let params = ConnParams { queue_depth: depth, max_frags: frags, max_msg_size: size };
        let mut asked = params.request(&envelope);
        if let Some((at, value)) = damage {
            asked[at] = value;
        }
        let mut remembered = Remembered::new();
        remembered.learn(0x12, 1);
        match answer(&asked, None, &local(us), |_| Some(&mut remembered)) {
            Answer::Accept { terms, reply } => {
                let deepest = if terms.version == 0x11 { 8 } else { 16 };
                prop_assert!((1..=deepest).contains(&terms.queue_depth));
                prop_assert!((1..=200).contains(&terms.max_frags));
                prop_assert!((1..=terms.queue_depth.max(7)).contains(&terms.high_water));
                let (message, _) = Message::decode(&reply).unwrap();
                prop_assert_eq!(message.envelope, terms.envelope(0));
                let offer = Extensions::of_request(asked[7]);
                prop_assert_eq!(reply[56..].iter().all(|byte| *byte == 0), offer.is_empty());
                let immediates = offer.contains(Extensions::LAST_WRITE_IMMEDIATE);
                prop_assert_eq!(terms.write_immediates, immediates);
                prop_assert_eq!(
                    terms.kills_keys,
                    !immediates && offer.contains(Extensions::KEYS_MAY_BE_KILLED)
                );
                prop_assert_eq!(
                    terms.keys_killed,
                    !immediates && offer.contains(Extensions::SENDS_INVALIDATE)
                );
            }
            Answer::Reject { record, why, close_others, .. } => {
                let (record, _) = RejectRecord::decode(&record).unwrap();
                prop_assert_eq!(record.why, why);
                prop_assert!(!close_others || why == Why::ConnStale);
            }
        }
    }
}
