//! What this device promises beyond the laws of every device.

use std::vec::Vec;

use o2poll_dataplane::nic::{
    Completion, LKey, Layout, Nic, Qp, RKey, ReceiveQueue, Region, Rejected, Remote, Rights,
    SendWr, Status, WrId,
};

use super::pair::{Arena, Both, End, Hoard, LIMITS, connected, device, lane, settle, wires};
use crate::conformance::{done, failed, pattern, received};
use crate::packet::{Opcode, Packet};
use crate::{
    Gauges, Limits, Lossy, Memory, Ports, Profile, QueuePair, Weather, Window, Wire, link, loopback,
};

/// Registers one range of `end`; its key.
fn grant<W: Wire>(end: &mut End<W>, offset: usize, length: u32) -> (Region, RKey) {
    let (region, key) = end.soft.adopt_window(Window::new(0)).unwrap();
    let key = key.rotated();
    register(end, region, key, offset, length);
    end.soft.doorbell(end.qp).unwrap();
    end.step();
    assert_eq!(end.take(), [done(1)]);
    (region, key)
}

fn register<W: Wire>(end: &mut End<W>, region: Region, key: RKey, offset: usize, length: u32) {
    let list = [end.arena.sge(offset, length)];
    let wr = SendWr::Register {
        region,
        key,
        rights: Rights::REMOTE_WRITE | Rights::REMOTE_READ,
        base: 0,
        length,
        layout: Layout::Fragments(&list),
    };
    end.soft.queue(end.qp, WrId(1), true, wr);
}

fn write<W: Wire>(end: &mut End<W>, id: u64, offset: usize, length: u32, rkey: RKey) {
    let local = [end.arena.sge(offset, length)];
    let remote = Remote { address: 0, rkey };
    let wr = SendWr::Write {
        local: &local,
        remote,
        imm: None,
    };
    end.soft.queue(end.qp, WrId(id), true, wr);
    end.soft.doorbell(end.qp).unwrap();
}

fn send<W: Wire>(end: &mut End<W>, id: u64, length: u32) {
    let wr = SendWr::Send {
        message: end.arena.sge(0, length),
        invalidate: None,
    };
    end.soft.queue(end.qp, WrId(id), true, wr);
    end.soft.doorbell(end.qp).unwrap();
}

#[test]
fn a_write_stops_where_its_key_dies() {
    for polls in 1..=3 {
        let Both {
            mut a,
            mut b,
            hoard: _hoard,
        } = connected(in_slices(), 16);
        let (_, key) = grant(&mut a, 0, 250_000);
        a.post(7, 900_000, 64);
        let bytes = pattern(1, 250_000);
        b.arena.write(0, &bytes);
        write(&mut b, 2, 0, 250_000, key);
        for _ in 0..polls {
            a.step();
        }
        let moved = polls * (64 << 10);
        assert_eq!(a.soft.counts().bytes, moved as u64);
        assert_eq!(a.arena.read(0, moved), bytes[..moved]);
        a.soft
            .queue(a.qp, WrId(3), true, SendWr::Invalidate { key });
        a.soft.doorbell(a.qp).unwrap();
        settle(&mut a, &mut b);
        assert_eq!(a.take(), [done(3), failed(7, Status::Flushed)]);
        assert_eq!(b.take(), [failed(2, Status::RemoteAccess)]);
        assert_eq!(
            a.arena.read(moved, 250_000 - moved),
            std::vec![0; 250_000 - moved]
        );
        send(&mut a, 4, 1);
        send(&mut b, 5, 1);
        settle(&mut a, &mut b);
        assert_eq!(a.take(), [failed(4, Status::Flushed)]);
        assert_eq!(b.take(), [failed(5, Status::Flushed)]);
    }
}

/// A device of which no poll moves more than one slice.
fn in_slices() -> Profile {
    Profile {
        alone: 1,
        ..Profile::frwr()
    }
}

#[test]
fn slices_are_longer_while_no_other_port_has_a_packet() {
    let mut hoard = Hoard::default();
    let (near, far) = link(lane(&mut hoard, 64), lane(&mut hoard, 64)).unwrap();
    let mut near = [Some(near), loopback(lane(&mut hoard, 64))].into_iter();
    let near = Ports::new(hoard.lend(2, || near.next().flatten().unwrap()));
    let mut far = Some(far);
    let far = Ports::new(hoard.lend(1, || far.take().unwrap()));
    let profile = Profile {
        slice: 1000,
        alone: 3,
        ..Profile::frwr()
    };
    let pair = |own, peer| QueuePair::new(own, 0, peer, 16, 16);
    let mut a = End::new(&mut hoard, profile, LIMITS, near, pair(1, 2));
    let mut b = End::new(&mut hoard, profile, LIMITS, far, pair(2, 1));
    let (_, key) = grant(&mut a, 0, 9000);
    write(&mut b, 1, 0, 9000, key);
    let mut moved = 0;
    for (crowded, expected) in [(false, 3000), (true, 1000), (true, 1000)] {
        // Every second poll would begin with the other port.
        a.soft.port = 0;
        if crowded {
            let stray = Packet::bare(Opcode::Ack, 77, 78, 0);
            assert!(a.soft.wire().send(1, &stray));
        }
        a.step();
        assert_eq!(a.soft.counts().bytes - moved, expected);
        moved = a.soft.counts().bytes;
    }
    settle(&mut a, &mut b);
    assert_eq!(
        (a.soft.counts().bytes, b.take()),
        (9000, std::vec![done(1)])
    );
}

#[test]
fn one_poll_moves_one_slice_however_many_packets() {
    let mut profile = Profile::frwr();
    profile.slice = 1000;
    let Both {
        mut a,
        mut b,
        hoard: _hoard,
    } = connected(profile, 64);
    let (_, key) = grant(&mut a, 0, 4000);
    for id in 0..10 {
        write(&mut b, id, 0, 399 + id as u32, key);
    }
    let mut before = 0;
    while b.seen.len() < 10 {
        a.step();
        b.step();
        let now = a.soft.counts().bytes;
        assert!(now - before <= 1000);
        before = now;
    }
    assert_eq!(before, (0..10).map(|id| 399 + id).sum::<u64>());
}

#[test]
fn nothing_is_flushed_while_the_peer_may_touch_it() {
    let Both {
        mut a,
        mut b,
        hoard: _hoard,
    } = connected(in_slices(), 16);
    let (_, key) = grant(&mut a, 0, 200_000);
    write(&mut b, 2, 0, 200_000, key);
    b.post(3, 500_000, 64);
    a.step();
    b.soft.fail(b.qp);
    for _ in 0..1000 {
        b.step();
    }
    // The receive is our own business; the write is not.
    assert_eq!(b.take(), [failed(3, Status::Flushed)]);
    for _ in 0..8 {
        a.step();
    }
    b.step();
    // It had been carried out by the time the peer let go.
    assert_eq!(b.take(), [done(2)]);
    // Both at once.
    let Both {
        mut a,
        mut b,
        hoard: _hoard,
    } = connected(Profile::frwr(), 16);
    send(&mut a, 1, 1);
    send(&mut b, 2, 1);
    a.soft.fail(a.qp);
    b.soft.fail(b.qp);
    settle(&mut a, &mut b);
    assert_eq!(a.take(), [failed(1, Status::Flushed)]);
    assert_eq!(b.take(), [failed(2, Status::Flushed)]);
}

#[test]
fn a_core_that_has_stopped_is_given_up_after_all_retries() {
    let mut profile = Profile::frwr();
    profile.ack_timeout = 50;
    for failing in [false, true] {
        let Both {
            a: _stopped,
            mut b,
            hoard: _hoard,
        } = connected(profile, 16);
        send(&mut b, 1, 8);
        send(&mut b, 2, 8);
        if failing {
            b.soft.fail(b.qp);
        }
        for _ in 0..2000 {
            b.step();
        }
        let first = if failing {
            Status::Flushed
        } else {
            Status::RetryExceeded
        };
        assert_eq!(b.take(), [failed(1, first), failed(2, Status::Flushed)]);
    }
}

#[test]
fn a_packet_that_was_overtaken_by_its_own_flush_is_not_carried_out() {
    let mut hoard = Hoard::default();
    let (near, far) = wires(&mut hoard, 16);
    let slow = Weather {
        delay: u8::MAX,
        hold: 100,
        ..Weather::default()
    };
    let near = Lossy::new(near, Weather::default(), 1);
    let far = Lossy::new(far, Weather::default(), 2);
    let pair = |own, peer| QueuePair::new(own, 0, peer, 8, 8);
    let mut a = End::new(&mut hoard, Profile::frwr(), LIMITS, near, pair(1, 2));
    let mut b = End::new(&mut hoard, Profile::frwr(), LIMITS, far, pair(2, 1));
    let (_, key) = grant(&mut a, 0, 64);
    b.arena.write(0, &[7; 64]);
    // Of so many packets that are held back, some are held long.
    b.soft.wire().set_weather(slow);
    for id in 0..8 {
        write(&mut b, id, 0, 64, key);
    }
    b.soft.wire().set_weather(Weather::default());
    b.soft.fail(b.qp);
    b.step();
    a.step();
    let before = a.arena.read(0, 64);
    b.step();
    let flushed: Vec<_> = (0..8).map(|id| failed(id, Status::Flushed)).collect();
    assert_eq!(b.take(), flushed);
    for _ in 0..3 {
        settle(&mut a, &mut b);
    }
    assert_eq!(a.arena.read(0, 64), before);
    assert_eq!(before, [0; 64]);
}

#[test]
fn a_queue_pair_that_is_not_there_answers_at_once() {
    for failing in [false, true] {
        // The default timeout is millions of polls.
        let Both {
            mut a,
            mut b,
            hoard: _hoard,
        } = connected(Profile::frwr(), 16);
        a.soft.retire(a.qp).unwrap();
        send(&mut b, 1, 8);
        let status = if failing {
            b.soft.fail(b.qp);
            Status::Flushed
        } else {
            Status::RetryExceeded
        };
        settle(&mut a, &mut b);
        assert_eq!(b.take(), [failed(1, status)]);
        assert!(a.soft.counts().strangers != 0);
    }
}

#[test]
fn a_tiny_ring_never_locks_up() {
    let Both {
        mut a,
        mut b,
        hoard: _hoard,
    } = connected(Profile::frwr(), 4);
    for n in 0..32 {
        a.post(100 + n, 1000, 64);
        b.post(100 + n, 1000, 64);
    }
    for n in 0..32 {
        send(&mut a, n, 9);
        send(&mut b, n, 9);
    }
    settle(&mut a, &mut b);
    for end in [&mut a, &mut b] {
        let seen = end.take();
        let sent: Vec<_> = (0..32).map(done).collect();
        let arrived: Vec<_> = (100..132).map(|id| received(id, 9)).collect();
        let of = |wanted: &[Completion]| -> Vec<Completion> {
            let is = |one: &&Completion| wanted.contains(one);
            seen.iter().filter(is).copied().collect()
        };
        assert_eq!(of(&sent), sent);
        assert_eq!(of(&arrived), arrived);
        assert_eq!(end.soft.gauges(), Gauges::default());
        assert_eq!(end.soft.counts().retries, 0);
    }
}

#[test]
fn two_queue_pairs_of_one_device_talk_through_a_loopback() {
    let mut hoard = Hoard::default();
    let lane = lane(&mut hoard, 8);
    let mut port = Some(loopback(lane).unwrap());
    let wire = Ports::new(hoard.lend(1, || port.take().unwrap()));
    let pair = QueuePair::new(1, 0, 2, 8, 8);
    let mut end = End::new(&mut hoard, Profile::frwr(), LIMITS, wire, pair);
    let other = end.soft.adopt(QueuePair::new(2, 0, 1, 8, 8)).unwrap();
    let (_, key) = grant(&mut end, 10, 1000);
    let bytes = pattern(1, 1010);
    end.arena.write(0, &bytes);
    end.qp = other;
    // Source and sink overlap.
    write(&mut end, 5, 0, 1000, key);
    end.step();
    end.step();
    assert_eq!(end.take(), [done(5)]);
    assert_eq!(end.arena.read(10, 1000), bytes[..1000]);
}

#[test]
fn faults_come_when_they_are_asked_for() {
    let Both {
        mut a,
        mut b,
        hoard: _hoard,
    } = connected(Profile::frwr(), 16);
    // A doorbell that takes a part: the key of the part that never happened is free again.
    let (region, key) = a.soft.adopt_window(Window::new(0)).unwrap();
    for n in 0..8 {
        b.post(100 + n, 0, 64);
    }
    a.soft.faults().accept = Some(1);
    let message = a.arena.sge(0, 8);
    let note = SendWr::Send {
        message,
        invalidate: None,
    };
    a.soft.queue(a.qp, WrId(2), true, note);
    register(&mut a, region, key.rotated(), 0, 64);
    assert_eq!(a.soft.doorbell(a.qp), Err(Rejected { accepted: 1 }));
    settle(&mut a, &mut b);
    assert_eq!(a.take(), [done(2)]);
    assert_eq!(a.soft.gauges().live_keys, 0);
    register(&mut a, region, key.rotated(), 0, 64);
    a.soft.doorbell(a.qp).unwrap();
    settle(&mut a, &mut b);
    assert_eq!(a.take(), [done(1)]);

    a.soft.faults().refuse_receives = 1;
    let into = ReceiveQueue::Of(a.qp);
    let buffer = a.arena.sge(0, 64);
    let refused = a.soft.receive(into, WrId(5), buffer);
    assert_eq!(refused, Err(Rejected { accepted: 0 }));
    assert_eq!(a.soft.receive(into, WrId(5), buffer), Ok(()));

    // What is before the one that fails is served, what is behind it is flushed.
    let (second, other) = a.soft.adopt_window(Window::new(0)).unwrap();
    a.soft.faults().fail = Some((1, Status::Other(77)));
    a.soft.queue(a.qp, WrId(6), true, note);
    register(&mut a, second, other.rotated(), 0, 64);
    a.soft.queue(a.qp, WrId(7), false, note);
    a.soft.doorbell(a.qp).unwrap();
    settle(&mut a, &mut b);
    let mut seen = a.take();
    seen.retain(|one| *one != failed(5, Status::Flushed));
    assert_eq!(
        seen,
        [
            done(6),
            failed(1, Status::Other(77)),
            failed(7, Status::Flushed)
        ]
    );
    assert_eq!(b.take(), [received(100, 8), received(101, 8)]);
    assert_eq!(a.soft.gauges().live_keys, 1);
}

#[test]
fn a_cut_cable_is_noticed_and_a_short_cut_is_survived() {
    let mut profile = Profile::frwr();
    profile.ack_timeout = 50;
    for short in [true, false] {
        let Both {
            mut a,
            mut b,
            hoard: _hoard,
        } = connected(profile, 16);
        for n in 0..8 {
            b.post(100 + n, 0, 64);
        }
        a.soft.faults().cut = Some(2);
        for id in 0..4 {
            send(&mut a, id, 1);
        }
        for _ in 0..120 {
            a.step();
            b.step();
        }
        if short {
            a.soft.faults().cut = None;
        }
        for _ in 0..1500 {
            a.step();
            b.step();
        }
        if short {
            assert_eq!(a.take(), [0, 1, 2, 3].map(done));
            assert_eq!(b.take(), [100, 101, 102, 103].map(|id| received(id, 1)));
        } else {
            let (gone, flushed) = (Status::RetryExceeded, Status::Flushed);
            let wanted = [done(0), done(1), failed(2, gone), failed(3, flushed)];
            assert_eq!(a.take(), wanted);
            assert_eq!(b.take(), [received(100, 1), received(101, 1)]);
        }
    }
}

#[test]
fn a_retired_window_is_dead_and_its_place_is_free() {
    let Both {
        mut a,
        mut b,
        hoard: _hoard,
    } = connected(Profile::frwr(), 16);
    let (region, key) = grant(&mut a, 0, 64);
    let window = a.soft.retire_window(region).unwrap();
    assert!(a.soft.retire_window(region).is_none());
    assert_eq!(a.soft.gauges().live_keys, 0);
    // It remembers the tag it was used with.
    assert_eq!(a.soft.adopt_window(window).unwrap(), (region, key));
    write(&mut b, 1, 0, 8, key);
    settle(&mut a, &mut b);
    assert_eq!(b.take(), [failed(1, Status::RemoteAccess)]);
}

#[test]
fn what_does_not_fit_comes_back() {
    let mut hoard = Hoard::default();
    let (wire, _far) = wires(&mut hoard, 4);
    let limits = Limits {
        queue_pairs: 2,
        windows: 1,
        memories: 1,
        ..LIMITS
    };
    let mut soft = device(&mut hoard, Profile::frwr(), limits, wire);
    assert_eq!(soft.adopt(QueuePair::new(7, 0, 1, 64, 64)).unwrap(), Qp(0));
    let refused = [
        QueuePair::new(7, 0, 1, 1, 1),
        QueuePair::new(8, 1, 1, 1, 1),
        QueuePair::new(8, 0, 1, 65, 1),
        QueuePair::new(8, 0, 1, 1, 65),
        QueuePair::new(1 << 24, 0, 1, 1, 1),
    ];
    for pair in refused {
        let number = pair.number;
        assert_eq!(soft.adopt(pair).unwrap_err().number, number);
    }
    soft.adopt(QueuePair::new(8, 0, 1, 64, 64)).unwrap();
    soft.adopt(QueuePair::new(9, 0, 1, 1, 1)).unwrap_err();
    assert_eq!(soft.retire(Qp(0)).unwrap().number, 7);
    assert!(soft.retire(Qp(0)).is_none());
    assert_eq!(soft.adopt(QueuePair::new(9, 0, 1, 1, 1)).unwrap(), Qp(0));
    soft.adopt_window(Window::new(0)).unwrap();
    soft.adopt_window(Window::new(0)).unwrap_err();
    let arena = Arena::new(&mut hoard, &mut soft, 64);
    assert_eq!(arena.length, 64);
    let base = hoard.bytes(8);
    // SAFETY: the hoard outlives the device.
    #[allow(unsafe_code)]
    let memory = unsafe { Memory::new(base, 8, 0) };
    soft.register(memory).unwrap_err();
    // Limits beyond the card's, and storage beyond the limits.
    let many = Limits {
        send_wr: 16385,
        ..LIMITS
    };
    assert!(many.sizes(&Profile::frwr()).is_none());
}

#[test]
fn queue_pairs_are_told_apart_by_number_and_rebuilt_in_place() {
    let mut hoard = Hoard::default();
    let (near, far) = wires(&mut hoard, 16);
    let numbers: Vec<u32> = (0..8).map(|n| n * 4096 + 5).collect();
    let pair = |own: u32, peer: u32| QueuePair::new(own, 0, peer, 8, 8);
    let first = pair(numbers[0], numbers[0]);
    let mut a = End::new(&mut hoard, Profile::frwr(), LIMITS, near, first);
    let first = pair(numbers[0], numbers[0]);
    let mut b = End::new(&mut hoard, Profile::frwr(), LIMITS, far, first);
    let mut qps = std::vec![(a.qp, b.qp)];
    for number in &numbers[1..] {
        let near = a.soft.adopt(pair(*number, *number)).unwrap();
        let far = b.soft.adopt(pair(*number, *number)).unwrap();
        qps.push((near, far));
    }
    for round in 0..3 {
        for (n, (near, far)) in qps.iter().enumerate() {
            (a.qp, b.qp) = (*near, *far);
            b.post(n as u64, 0, 64);
            send(&mut a, n as u64, n as u32);
        }
        settle(&mut a, &mut b);
        let all = |make: fn(u64) -> Completion| -> Vec<Completion> { (0..8).map(make).collect() };
        assert_eq!(a.take(), all(done));
        assert_eq!(b.take(), all(|n| received(n, n as u32)));
        // Every other one is rebuilt, under a new number.
        for (n, (near, far)) in qps.iter_mut().enumerate().filter(|(n, _)| n % 2 == 0) {
            a.soft.retire(*near).unwrap();
            b.soft.retire(*far).unwrap();
            let number = numbers[n] + 8 * (round + 1);
            *near = a.soft.adopt(pair(number, number)).unwrap();
            *far = b.soft.adopt(pair(number, number)).unwrap();
        }
    }
    assert_eq!(a.soft.counts().strangers, 0);
}

#[test]
fn completions_of_a_retired_queue_pair_free_nothing_of_its_successor() {
    let Both {
        mut a,
        b: _b,
        hoard: _hoard,
    } = connected(Profile::frwr(), 16);
    a.post(1, 0, 64);
    a.soft.fail(a.qp);
    a.soft.retire(a.qp).unwrap();
    let mut next = QueuePair::new(1, 0, 2, 1, 1);
    next.rnr_retry = 7;
    assert_eq!(a.soft.adopt(next).unwrap(), a.qp);
    a.post(3, 0, 64);
    a.step();
    assert_eq!(a.take(), [failed(1, Status::Flushed)]);
    let into = ReceiveQueue::Of(a.qp);
    let buffer = a.arena.sge(0, 64);
    let full = a.soft.receive(into, WrId(4), buffer);
    assert_eq!(full, Err(Rejected { accepted: 0 }));
}

#[test]
fn an_arena_key_opens_what_it_was_asked_to() {
    let Both {
        mut a,
        mut b,
        mut hoard,
    } = connected(Profile::frwr(), 16);
    let base = hoard.bytes(128);
    // SAFETY: the hoard outlives the devices.
    #[allow(unsafe_code)]
    let memory = unsafe { Memory::new(base, 128, 0) };
    let rights = Rights::LOCAL_WRITE | Rights::REMOTE_WRITE;
    let LKey(key) = a.soft.register(memory.with_rights(rights)).unwrap();
    b.arena.write(0, &[7; 128]);
    let local = [b.arena.sge(0, 100)];
    let remote = |offset: u64| Remote {
        address: base.as_ptr() as u64 + offset,
        rkey: RKey(key),
    };
    let wr = |offset| SendWr::Write {
        local: &local,
        remote: remote(offset),
        imm: None,
    };
    b.soft.queue(b.qp, WrId(1), true, wr(28));
    b.soft.queue(b.qp, WrId(2), true, wr(29));
    b.soft.doorbell(b.qp).unwrap();
    settle(&mut a, &mut b);
    assert_eq!(b.take(), [done(1), failed(2, Status::RemoteAccess)]);
}

#[test]
fn a_list_waits_in_its_region_for_its_turn() {
    // Two registrations of one region in one chain: the second has nowhere to wait, and is told so.
    let Both {
        mut a,
        mut b,
        hoard: _hoard,
    } = connected(Profile::mlx5(), 16);
    let (region, key) = a.soft.adopt_window(Window::new(0)).unwrap();
    let (one, two) = (key.rotated(), key.rotated().rotated());
    register(&mut a, region, one, 0, 64);
    register(&mut a, region, two, 100, 64);
    assert_eq!(a.soft.doorbell(a.qp), Err(Rejected { accepted: 1 }));
    register(&mut a, region, two, 100, 64);
    a.soft.doorbell(a.qp).unwrap();
    settle(&mut a, &mut b);
    assert_eq!(a.take(), [done(1), done(1)]);
    b.arena.write(0, &[3; 64]);
    write(&mut b, 3, 0, 64, two);
    settle(&mut a, &mut b);
    assert_eq!(a.arena.read(100, 64), [3; 64]);
}

#[test]
fn a_key_lives_until_the_last_write_through_it_is_acknowledged() {
    let mut profile = Profile::frwr();
    profile.ack_timeout = 50;
    let Both {
        mut a,
        mut b,
        hoard: _hoard,
    } = connected(profile, 16);
    let (_, sink) = grant(&mut a, 0, 64);
    let (_, source) = grant(&mut b, 100, 64);
    b.arena.write(100, &[9; 64]);
    // The first copy of the write is lost, so it is read again through the key.
    b.soft.faults().cut = Some(0);
    let mut piece = b.arena.sge(0, 64);
    (piece.address, piece.lkey) = (0, LKey(source.0));
    let remote = Remote {
        address: 0,
        rkey: sink,
    };
    let wr = SendWr::Write {
        local: &[piece],
        remote,
        imm: None,
    };
    b.soft.queue(b.qp, WrId(2), false, wr);
    let wr = SendWr::Invalidate { key: source };
    b.soft.queue(b.qp, WrId(3), true, wr);
    b.soft.doorbell(b.qp).unwrap();
    b.step();
    assert_eq!(b.soft.gauges().live_keys, 1);
    b.soft.faults().cut = None;
    settle(&mut a, &mut b);
    assert_eq!(b.take(), [done(3)]);
    assert_eq!(a.arena.read(0, 64), [9; 64]);
    assert_eq!(b.soft.gauges().live_keys, 0);
}

#[test]
fn a_gap_is_told_and_filled_without_waiting() {
    // The default timeout is millions of polls.
    let Both {
        mut a,
        mut b,
        hoard: _hoard,
    } = connected(Profile::frwr(), 16);
    for n in 0..4 {
        a.post(100 + n, 0, 64);
    }
    b.soft.faults().cut = Some(0);
    send(&mut b, 1, 1);
    b.soft.faults().cut = None;
    for id in 2..5 {
        send(&mut b, id, 1);
    }
    settle(&mut a, &mut b);
    assert_eq!(b.take(), [1, 2, 3, 4].map(done));
    assert_eq!(a.take(), [100, 101, 102, 103].map(|id| received(id, 1)));
    assert_eq!(b.soft.counts().retries, 1);
}

#[test]
fn a_device_moves_to_its_thread() {
    fn send<T: Send>() {}
    send::<crate::Soft<'static, Ports<'static, 'static>>>();
    send::<QueuePair>();
    send::<Window>();
}
