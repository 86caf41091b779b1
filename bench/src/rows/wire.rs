//! Encoding and decoding of each message of o2iblnd, against a copy of its bytes.

use core::hint::black_box;

use o2poll_dataplane::nic::RKey;
use o2poll_dataplane::wire::lnet::{self, Header, WireHandle};
use o2poll_dataplane::wire::{
    Body, ConnParams, Descriptor, Done, Envelope, Fragment, Message, Nid, Pid, V2,
};

use super::Spec;
use crate::harness::{Role, Row};

/// The rows of this file.
#[must_use]
pub fn specs() -> Vec<Spec> {
    messages()
        .into_iter()
        .map(|(name, message)| {
            Spec::new(format!("wire/{name}"), "message", 1, move |row| {
                build(row, message)
            })
        })
        .collect()
}

fn build(row: Row, message: Message<'static>) -> Row {
    let mut bytes = [0_u8; 4096];
    let length = message.encode(&mut bytes).expect("a legal message") as usize;
    let (mut to, mut copied, from) = ([0_u8; 4096], [0_u8; 4096], bytes);
    row.bytes(length as u64)
        .here(Role::Ours, "encode", move |n| {
            for _ in 0..n {
                let length = black_box(&message).encode(black_box(&mut to));
                black_box(length.is_ok());
            }
        })
        .here(Role::Ours, "decode", move |n| {
            for _ in 0..n {
                let message = &black_box(&bytes)[..black_box(length)];
                let decoded = Message::decode(message);
                black_box(decoded.is_ok());
                black_box(&decoded);
            }
        })
        .here(Role::Floor, "copy of the bytes", move |n| {
            for _ in 0..n {
                let length = black_box(length);
                copied[..length].copy_from_slice(&black_box(&from)[..length]);
                black_box(&copied);
            }
        })
}

fn messages() -> Vec<(&'static str, Message<'static>)> {
    let params = ConnParams {
        queue_depth: 8,
        max_frags: 257,
        max_msg_size: 4096,
    };
    let done = Done {
        cookie: 77,
        status: 1 << 20,
    };
    let sink = |count: u16| {
        let fragments = (0..u64::from(count)).map(|n| Fragment {
            length: 4096,
            address: 0x7f00_0000_0000 + n * 8192,
        });
        Descriptor::new(RKey(0x1234_5678), Vec::leak(fragments.collect()))
    };
    let immediate = |length: u32| Body::Immediate {
        header: put(length),
        payload: Vec::leak(vec![7; length as usize]),
    };
    let put_ack = |count| Body::PutAck {
        source_cookie: 5,
        sink_cookie: 6,
        sink: sink(count),
    };
    let get_req = |count| Body::GetReq {
        header: get(),
        cookie: 5,
        sink: sink(count),
    };
    let put_req = Body::PutReq {
        header: put(1 << 20),
        cookie: 5,
    };
    [
        ("connreq", Body::ConnReq(params)),
        ("connack", Body::ConnAck(params)),
        ("noop", Body::Noop),
        ("immediate-64", immediate(64)),
        ("immediate-3976", immediate(3976)),
        ("put-req", put_req),
        ("put-nak", Body::PutNak(done)),
        ("put-ack-1", put_ack(1)),
        ("put-ack-257", put_ack(257)),
        ("put-done", Body::PutDone(done)),
        ("get-req-1", get_req(1)),
        ("get-req-257", get_req(257)),
        ("get-done", Body::GetDone(done)),
    ]
    .map(|(name, body)| {
        let envelope = Envelope {
            version: V2,
            credits: 3,
            source: NEAR,
            source_stamp: 1,
            destination: FAR,
            destination_stamp: 2,
        };
        (name, Message { envelope, body })
    })
    .into()
}

fn put(length: u32) -> Header {
    header(
        length,
        lnet::Body::Put {
            ack: WireHandle::from_words(1, 2),
            match_bits: 7,
            hdr_data: 9,
            portal: 5,
            offset: 0,
        },
    )
}

fn get() -> Header {
    header(
        0,
        lnet::Body::Get {
            reply: WireHandle::from_words(1, 2),
            match_bits: 7,
            portal: 5,
            offset: 0,
            sink_length: 1 << 20,
        },
    )
}

const fn header(payload_length: u32, body: lnet::Body) -> Header {
    Header {
        destination: FAR,
        source: NEAR,
        destination_pid: Pid::LUSTRE,
        source_pid: Pid::LUSTRE,
        payload_length,
        body,
    }
}

const NEAR: Nid = Nid::o2ib([10, 0, 0, 1], 0);
const FAR: Nid = Nid::o2ib([10, 0, 0, 2], 0);
