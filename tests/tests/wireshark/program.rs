//! A run of the program.

use core::sync::atomic::AtomicBool;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use o2poll_config::{Config, Machine};
use o2poll_dataplane::nic::{RKey, Remote};
use o2poll_dataplane::wire::{Body, Message, Nid, lnet};
use o2poll_tests::NAMES;
use o2poll_tests::tap::Posted;
use o2poll_tests::wireshark::{Habits, OneWay, Temporary, frames, message, sound};

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
    .map(|(name, psn, frame)| {
        (
            u32::try_from(number(frame, name)).unwrap(),
            number(frame, psn),
        )
    });

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
            let (Body::Immediate { header, .. }
            | Body::PutReq { header, .. }
            | Body::GetReq { header, .. }) = message.body
            else {
                continue;
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
