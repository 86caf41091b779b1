//! Any bytes as a message, a reject record, a ping info.

use o2poll_dataplane::wire::lnet;
use o2poll_dataplane::wire::ping::{MAX_ENTRIES, PingInfo, Status};
use o2poll_dataplane::wire::{Body, HEADER_BYTES, Message, RejectRecord};

/// A message that decodes is legal, so that it encodes; and if it says nothing that the decoder does
/// not look at, it encodes to the bytes it came from.
pub fn message(bytes: &[u8]) {
    let Ok((message, encoding)) = Message::decode(bytes) else {
        return;
    };
    if let Body::PutAck { sink, .. } | Body::GetReq { sink, .. } = message.body {
        let located = sink.locate();
        assert_eq!(sink.iter().count(), located.len());
        for (at, fragment) in sink.iter().enumerate() {
            assert_eq!(located.get(bytes, at), Some(fragment));
        }
        assert_eq!(located.get(bytes, located.len()), None);
    }
    if let Body::Immediate { header, payload } = message.body {
        assert_eq!(header.payload_length as usize, payload.len());
    }

    let mut again = [0xa5; 4096];
    let length = message.encode_as(encoding, &mut again).expect("legal") as usize;
    let again = &again[..length];
    assert_eq!(Message::decode(again), Ok((message, encoding_of(again))));

    // The number of bytes, in the sender's order, behind magic, version, type and credits.
    let mut nob = [bytes[8], bytes[9], bytes[10], bytes[11]];
    if bytes[0] != 0x91 {
        nob.reverse();
    }
    let nob = u32::from_le_bytes(nob) as usize;
    assert!(length <= nob, "nothing is made up");
    let idle = unread(&message.body);
    let silent = bytes[nob.min(idle.start)..nob.min(idle.end)]
        .iter()
        .all(|byte| *byte == 0);
    if length == nob && silent {
        assert_eq!(again, &bytes[..nob]);
    }
}

/// A reject record that decodes is written again as it was, as far as its version says anything.
pub fn reject(bytes: &[u8]) {
    let Ok((record, order)) = RejectRecord::decode(bytes) else {
        return;
    };
    let again = record.encode_as(order);
    let (reread, _) = RejectRecord::decode(&again).expect("ours");
    assert_eq!((reread.version, reread.why), (record.version, record.why));
    if record.params.is_some() {
        assert_eq!(reread, record);
        // But for the old magic, and the byte of padding.
        assert_eq!(again[4..7], bytes[4..7]);
        assert_eq!(again[8..], bytes[8..24]);
    }
}

/// A ping info that decodes has at most as many entries as LNet allows, and all of them can be looked at.
pub fn ping(bytes: &[u8]) {
    let Ok(info) = PingInfo::decode(bytes) else {
        return;
    };
    let entries: Vec<_> = info.entries().collect();
    assert!(entries.len() < MAX_ENTRIES as usize);
    assert!((entries.len() + 2) * 16 <= bytes.len());
    assert_eq!(info.primary(), entries.first().map(|entry| entry.nid));
    for entry in entries {
        assert_eq!(Status::from_code(entry.status.code()), entry.status);
    }
}

/// How a message that was just encoded reads.
fn encoding_of(bytes: &[u8]) -> o2poll_dataplane::wire::Encoding {
    Message::decode(bytes).expect("just encoded").1
}

/// The part of an LNet header that its type has no use for.
fn unread(body: &Body<'_>) -> core::ops::Range<usize> {
    let (Body::Immediate { header, .. }
    | Body::PutReq { header, .. }
    | Body::GetReq { header, .. }) = body
    else {
        return 0..0;
    };
    let used = 32
        + match header.body {
            lnet::Body::Ack { .. } => 28,
            lnet::Body::Put { .. } => 40,
            lnet::Body::Get { .. } => 36,
            lnet::Body::Reply { .. } => 16,
            lnet::Body::Hello { .. } => unreachable!("refused"),
        };
    let start = HEADER_BYTES as usize;
    start + used..start + lnet::HEADER_BYTES
}
