//! Two devices by hand, for what o2iblnd sends seldom or never.

use core::sync::atomic::AtomicU64;
use std::collections::BTreeMap;

use o2poll::capture::Scribe;
use o2poll_dataplane::nic::{
    Burst, Completion, Layout, Nic as _, Qp, ReceiveQueue, Remote, Rights, SendWr, Sge, Status,
    WrId,
};
use o2poll_dataplane::ring::{LapSlot, Returned};
use o2poll_hal::clock::Clock;
use o2poll_soft::{self as soft, Profile};
use o2poll_tests::lend::lend;
use o2poll_tests::wireshark::{Habits, Quirks, frames, sound};
use o2poll_tests::{Arena, NAMES, Ticker};

use crate::{NUMBERS, drain, tap};

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
            let word = number("infiniband.immdt").or_else(|| number("infiniband.ieth"));
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
