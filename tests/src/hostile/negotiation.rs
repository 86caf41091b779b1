//! Any private data at any state of the negotiation.

use arbitrary::{Arbitrary, Unstructured};
use o2poll_dataplane::peer::{
    Answer, Extensions, Local, Next, Remembered, Terms, accepted, answer, rejected, request,
};
use o2poll_dataplane::wire::{
    Body, ByteOrder, ConnParams, Envelope, Message, Nid, RejectRecord, V1, V2, Why,
};

/// One thing that a peer does.
#[derive(Arbitrary, Debug)]
enum Act {
    /// It asks.
    Ask {
        port: Option<u16>,
        room: bool,
        data: Data,
    },
    /// It grants what it was asked.
    Grant(Data),
    /// It refuses.
    Refuse { reason: Reason, data: Data },
    /// Its last connection is gone.
    Forget,
    /// The device here could not hold so much.
    Lower(u16),
}

/// Private data: bytes, or something that is nearly right.
#[derive(Arbitrary, Debug)]
enum Data {
    Bytes(Vec<u8>),
    Conn {
        request: bool,
        old: bool,
        stamps: (Stamp, Stamp),
        depth: u8,
        frags: u16,
        small: bool,
        patch: Option<(u8, u8)>,
        /// The `credits` byte: what is offered.
        offer: u8,
        tail: Tail,
    },
    Record {
        old: bool,
        why: u8,
        stamp: Stamp,
        params: Option<(u8, u16)>,
        patch: Option<(u8, u8)>,
        swapped: bool,
    },
}

/// What stands behind byte 56.
#[derive(Arbitrary, Debug)]
enum Tail {
    /// Nothing: the private data end there.
    Cut,
    /// What a kernel leaves there.
    Zero,
    /// A record, perhaps with one byte changed.
    Record { bits: u8, patch: Option<(u8, u8)> },
    /// Anything.
    Bytes(Vec<u8>),
}

impl Tail {
    fn bytes(&self) -> Vec<u8> {
        match self {
            Self::Cut => Vec::new(),
            Self::Zero => vec![0; 140],
            Self::Record { bits, patch } => {
                let mut bytes = Extensions::of_request(*bits).record().to_vec();
                bytes.resize(140, 0);
                if let Some((at, value)) = patch {
                    bytes[usize::from(*at) % 140] = *value;
                }
                bytes
            }
            Self::Bytes(bytes) => bytes.clone(),
        }
    }
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Stamp {
    Zero,
    Ours,
    Other(u64),
}

impl Stamp {
    fn value(self, local: &Local) -> u64 {
        match self {
            Self::Zero => 0,
            Self::Ours => local.stamp,
            Self::Other(stamp) => stamp,
        }
    }
}

impl Data {
    fn bytes(&self, local: &Local) -> Vec<u8> {
        let version = |old| if old { V1 } else { V2 };
        let conn_params = |depth: u8, frags, small| ConnParams {
            queue_depth: depth.into(),
            max_frags: frags,
            max_msg_size: if small { 2048 } else { 4096 },
        };
        let (mut bytes, patch) = match *self {
            Self::Bytes(ref bytes) => (bytes.clone(), None),
            Self::Conn {
                request,
                old,
                stamps,
                depth,
                frags,
                small,
                patch,
                offer,
                ref tail,
            } => {
                let envelope = Envelope {
                    version: version(old),
                    credits: offer,
                    source: THEM,
                    source_stamp: stamps.0.value(local),
                    destination: US,
                    destination_stamp: stamps.1.value(local),
                };
                let params = conn_params(depth, frags, small);
                let bytes = if request {
                    params.request(&envelope)
                } else {
                    params.acknowledge(&envelope)
                };
                let mut bytes = bytes.to_vec();
                bytes.extend(tail.bytes());
                (bytes, patch)
            }
            Self::Record {
                old,
                why,
                stamp,
                params,
                patch,
                swapped,
            } => {
                let record = RejectRecord {
                    version: version(old),
                    why: Why::from_code(why),
                    incarnation: stamp.value(local),
                    params: params.map(|(depth, frags)| conn_params(depth, frags, false)),
                };
                let order = if swapped {
                    ByteOrder::Big
                } else {
                    ByteOrder::Little
                };
                (record.encode_as(order).to_vec(), patch)
            }
        };
        if let Some((at, value)) = patch
            && let Some(byte) = bytes.get_mut(usize::from(at))
        {
            *byte = value;
        }
        bytes
    }
}

#[derive(Arbitrary, Debug)]
enum Reason {
    Consumer,
    NoListener,
    Stale,
    Other(u16),
}

#[derive(Arbitrary, Debug)]
struct Case {
    stamp: u64,
    queue_depth: u8,
    max_frags: u16,
    high_water: u16,
    privileged: bool,
    ready: bool,
    offer: u8,
    acts: Vec<Act>,
}

/// Whatever a peer sends, the terms are within what this node agrees to, its next request is legal, and
/// it does not dial for ever without a pause.
pub fn conn(bytes: &[u8]) {
    let Ok(case) = Case::arbitrary_take_rest(Unstructured::new(bytes)) else {
        return;
    };
    let local = Local {
        nid: US,
        stamp: case.stamp,
        queue_depth: u16::from(case.queue_depth).max(1),
        max_frags: case.max_frags % 257 + 1,
        high_water: case.high_water,
        require_privileged_port: case.privileged,
        extensions: Extensions::of_request(case.offer),
        ready: case.ready,
    };
    let mut remembered = Remembered::new();
    let mut at_once = 0;
    for act in &case.acts {
        let asked = request(&local, &remembered, THEM);
        let (message, _) = Message::decode(&asked.private_data).expect("ours");
        let Body::ConnReq(params) = message.body else {
            panic!("a request is a CONNREQ");
        };
        assert_eq!(params, asked.params);
        assert!((1..=deepest(&local, asked.version)).contains(&params.queue_depth));
        assert!((1..=local.max_frags).contains(&params.max_frags));
        let before = remembered;
        match act {
            Act::Ask { port, room, data } => {
                let bytes = data.bytes(&local);
                let given = answer(&bytes, *port, &local, |_| room.then_some(&mut remembered));
                match given {
                    Answer::Accept { terms, reply } => {
                        assert!(local.ready && *room);
                        assert!(!local.require_privileged_port || port.is_some_and(|p| p < 1024));
                        within(&terms, &local);
                        let (message, _) = Message::decode(&reply).expect("ours");
                        assert_eq!(message.envelope, terms.envelope(0));
                        assert_eq!(remembered.stamp, Some(terms.peer_stamp));
                        agreed(&terms, Extensions::of_request(bytes[7]), &local);
                        let silent = reply[56..].iter().all(|byte| *byte == 0);
                        assert_eq!(silent, Extensions::of_request(bytes[7]).is_empty());
                        at_once = 0;
                    }
                    Answer::Reject {
                        record,
                        why,
                        close_others,
                        ..
                    } => {
                        let (record, _) = RejectRecord::decode(&record).expect("ours");
                        assert_eq!(record.why, why);
                        assert!(!close_others || why == Why::ConnStale);
                        assert!(
                            close_others || remembered == before,
                            "refused, yet believed"
                        );
                    }
                }
            }
            Act::Grant(data) => {
                let bytes = data.bytes(&local);
                match accepted(&bytes, &asked, &local, &mut remembered) {
                    Ok(terms) => {
                        within(&terms, &local);
                        // Only a record to the byte offers anything.
                        let theirs = (0..8).map(Extensions::of_request).find(|offer| {
                            let record = offer.record();
                            bytes.get(56..62) == Some(&record[..6])
                                && bytes.len() >= 64
                                && Extensions::of_request(bytes[62]) == *offer
                        });
                        agreed(&terms, theirs.unwrap_or_default(), &local);
                        assert_eq!((terms.peer, terms.version), (THEM, asked.version));
                        assert!(terms.queue_depth <= params.queue_depth);
                        assert!(terms.max_frags <= params.max_frags);
                        at_once = 0;
                    }
                    Err(_) => assert_eq!(remembered, before, "refused, yet believed"),
                }
            }
            Act::Refuse { reason, data } => {
                let reason = match reason {
                    Reason::Consumer => 28,
                    Reason::NoListener => 8,
                    Reason::Stale => 10,
                    Reason::Other(reason) => *reason,
                };
                match rejected(reason, &data.bytes(&local), &asked, &local, &mut remembered) {
                    Next::Redial => {
                        at_once += 1;
                        assert!(at_once <= 10, "dials for ever");
                    }
                    Next::RedialLater | Next::Wait | Next::Fail(_) => {}
                }
            }
            Act::Forget => remembered.forget_life(),
            Act::Lower(depth) => remembered.lower_depth(*depth),
        }
    }
}

fn within(terms: &Terms, local: &Local) {
    assert_eq!((terms.local, terms.local_stamp), (local.nid, local.stamp));
    assert!((1..=deepest(local, terms.version)).contains(&terms.queue_depth));
    assert!((1..=local.max_frags).contains(&terms.max_frags));
    assert!(terms.high_water >= 1);
    // Version 1 has a mark of its own.
    assert!(terms.version == V1 || terms.high_water <= terms.queue_depth);
}

fn agreed(terms: &Terms, theirs: Extensions, local: &Local) {
    assert_eq!(terms.kills_keys, local.extensions.kills_keys_of(theirs));
    assert_eq!(terms.keys_killed, theirs.kills_keys_of(local.extensions));
    let immediates = local.extensions.write_immediates(theirs);
    assert_eq!(terms.write_immediates, immediates);
    assert!(!immediates || !terms.kills_keys && !terms.keys_killed);
}

fn deepest(local: &Local, version: u16) -> u16 {
    match version {
        V1 => local.queue_depth.min(8),
        _ => local.queue_depth,
    }
}

const US: Nid = Nid::o2ib([192, 168, 2, 5], 0);
const THEM: Nid = Nid::o2ib([192, 168, 1, 10], 0);
