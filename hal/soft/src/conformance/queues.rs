//! Order, room, errors.
#![expect(missing_docs, reason = "a law's name says it")]

use std::vec::Vec;

use o2poll_dataplane::nic::{
    Burst, Completion, Fault, Nic, RKey, ReceiveQueue, Rejected, Rights, SendWr, Sge, Status, WrId,
};

use super::Lane::{Main, Sibling};
use super::Side::{A, B};
use super::{Bench, Setup, World, done, failed, pattern, received};

fn fresh<T: Bench>() -> World<T> {
    World::<T>::new(Setup::default())
}

pub fn sends_arrive_in_order<T: Bench>() {
    let mut world = fresh::<T>();
    for round in 0..20_u64 {
        for n in 0..8_usize {
            world.post(A, Main, 100 + n as u64, 4096 + n * 64, 64);
            world
                .bench
                .poke(B, n * 64, &pattern(n as u32 + round as u32, n * 9));
            let wr = world.message(B, Main, n * 64, n as u32 * 9);
            world.queue(B, Main, n as u64, n % 3 == 0 || n == 7, wr);
        }
        world.doorbell(B, Main).unwrap();
        assert_eq!(world.expect(B, 4), [0, 3, 6, 7].map(done));
        let arrived: Vec<Completion> = (0..8).map(|n| received(100 + n, n as u32 * 9)).collect();
        assert_eq!(world.expect(A, 8), arrived);
        for n in 0..8_usize {
            let sent = pattern(n as u32 + round as u32, n * 9);
            assert_eq!(world.bench.peek(A, 4096 + n * 64, n * 9), sent);
        }
    }
}

pub fn what_was_written_is_there_when_the_message_is<T: Bench>() {
    let mut world = fresh::<T>();
    let grant = world.grant(A, Main, Rights::REMOTE_WRITE, 0, 150_000);
    let bytes = pattern(5, 150_000);
    world.bench.poke(B, 0, &bytes);
    world.post(A, Main, 3, 200_000, 64);
    let local = [world.bench.sge(B, Main, 0, 150_000)];
    let remote = grant.at(0);
    let wr = SendWr::Write {
        local: &local,
        remote,
        imm: None,
    };
    world.queue(B, Main, 1, false, wr);
    let wr = world.message(B, Main, 0, 1);
    world.queue(B, Main, 2, true, wr);
    world.doorbell(B, Main).unwrap();
    let mut seen = [Vec::new(), Vec::new()];
    while seen[0].is_empty() {
        world.bench.step(&mut seen);
    }
    assert_eq!(seen[0], [received(3, 1)]);
    assert!(world.bench.peek(A, 0, 150_000) == bytes);
}

pub fn errors_flush_both_queues_signalled_or_not<T: Bench>() {
    let mut world = fresh::<T>();
    for n in 0..3 {
        world.post(B, Main, 100 + n, 0, 64);
    }
    // A has no receive: nothing of this completes before the error.
    for n in 0..5 {
        let wr = world.message(B, Main, 0, 8);
        world.queue(B, Main, n, n % 2 == 0, wr);
    }
    world.doorbell(B, Main).unwrap();
    let qp = world.bench.qp(B, Main);
    world.bench.nic(B).fail(qp);
    let seen = world.expect(B, 8);
    let of = |range: core::ops::Range<u64>| -> Vec<Completion> {
        let ours = |id: &WrId| range.contains(&id.0);
        seen.iter()
            .filter(|one| matches!(one, Completion::Failed { id, .. } if ours(id)))
            .copied()
            .collect()
    };
    let flushed = |range: core::ops::Range<u64>| -> Vec<Completion> {
        range.map(|id| failed(id, Status::Flushed)).collect()
    };
    assert_eq!(of(0..5), flushed(0..5));
    assert_eq!(of(100..103), flushed(100..103));
    // Others do not notice.
    world.post(A, Sibling, 3, 0, 64);
    let wr = world.message(B, Sibling, 0, 8);
    world.run(B, Sibling, 1, wr);
    assert_eq!(world.expect(B, 1), [done(1)]);
    assert_eq!(world.expect(A, 1), [received(3, 8)]);
}

pub fn a_late_request_comes_back_flushed<T: Bench>() {
    let mut world = fresh::<T>();
    let window = world.registers().then(|| world.adopt(B, Main));
    let qp = world.bench.qp(B, Main);
    world.bench.nic(B).fail(qp);
    let mut flushed = Vec::new();
    if let Some((region, key)) = window {
        let rights = Rights::REMOTE_WRITE;
        world.register(B, Main, 1, (region, key.rotated()), rights, 0, 64);
        flushed.push(failed(1, Status::Flushed));
    }
    let key = RKey(0x100);
    world.queue(B, Main, 2, false, SendWr::Invalidate { key });
    let wr = world.message(B, Main, 0, 8);
    world.queue(B, Main, 3, false, wr);
    world.doorbell(B, Main).unwrap();
    flushed.extend([2, 3].map(|id| failed(id, Status::Flushed)));
    assert_eq!(world.expect(B, flushed.len()), flushed);
}

pub fn a_late_receive_is_refused<T: Bench>() {
    let mut world = fresh::<T>();
    let qp = world.bench.qp(B, Main);
    world.bench.nic(B).fail(qp);
    let buffer = world.bench.sge(B, Main, 0, 64);
    let posted = world
        .bench
        .nic(B)
        .receive(ReceiveQueue::Of(qp), WrId(1), buffer);
    assert_eq!(posted, Err(Rejected { accepted: 0 }));
    assert_eq!(world.expect(B, 0), []);
}

pub fn a_receiver_that_gets_ready_is_served<T: Bench>() {
    let mut world = World::<T>::new(Setup {
        rnr_retry: 7,
        ..Setup::default()
    });
    world.bench.poke(B, 0, b"first second");
    let wr = world.message(B, Main, 0, 5);
    world.queue(B, Main, 1, true, wr);
    let wr = world.message(B, Main, 6, 6);
    world.queue(B, Main, 2, true, wr);
    world.doorbell(B, Main).unwrap();
    for _ in 0..20 {
        world.settle();
    }
    assert_eq!(world.expect(B, 0), []);
    world.post(A, Main, 3, 100, 64);
    assert_eq!(world.expect(B, 1), [done(1)]);
    for _ in 0..5 {
        world.settle();
    }
    world.post(A, Main, 4, 200, 64);
    assert_eq!(world.expect(B, 1), [done(2)]);
    assert_eq!(world.expect(A, 2), [received(3, 5), received(4, 6)]);
    assert_eq!(world.bench.peek(A, 100, 5), b"first");
    assert_eq!(world.bench.peek(A, 200, 6), b"second");
}

pub fn a_receiver_that_never_is_fails_the_send<T: Bench>() {
    let mut world = fresh::<T>();
    for id in [1, 2] {
        let wr = world.message(B, Main, 0, 8);
        world.queue(B, Main, id, true, wr);
    }
    world.doorbell(B, Main).unwrap();
    assert_eq!(
        world.expect(B, 2),
        [
            failed(1, Status::ReceiverNotReady),
            failed(2, Status::Flushed)
        ]
    );
}

pub fn a_peer_that_is_gone_fails_the_send<T: Bench>() {
    for retired in [false, true] {
        let mut world = fresh::<T>();
        let qp = world.bench.qp(A, Main);
        world.bench.nic(A).fail(qp);
        world.settle();
        if retired {
            assert!(world.bench.nic(A).retire(qp).is_some());
        }
        let wr = world.message(B, Main, 0, 8);
        world.run(B, Main, 1, wr);
        let gone = [failed(1, Status::RetryExceeded)];
        assert_eq!(world.expect(B, 1), gone);
    }
}

/// A world whose queues are short, and how short they are.
fn short<T: Bench>(setup: Setup) -> (World<T>, Setup) {
    let world = World::<T>::new(setup);
    let made = world.bench.made(setup);
    (world, made)
}

pub fn a_chain_that_is_too_long_is_taken_in_part<T: Bench>() {
    let (mut world, made) = short::<T>(Setup {
        send_depth: 4,
        ..Setup::default()
    });
    let depth = u64::from(made.send_depth);
    for n in 0..depth + 2 {
        world.post(A, Main, 100 + n, 0, 64);
    }
    for id in 0..depth + 2 {
        let wr = world.message(B, Main, 0, id as u32);
        world.queue(B, Main, id, true, wr);
    }
    let told = world.doorbell(B, Main);
    let accepted = made.send_depth;
    assert_eq!(told, Err(Rejected { accepted }));
    let sent: Vec<Completion> = (0..depth).map(done).collect();
    assert_eq!(world.expect(B, sent.len()), sent);
    let arrived: Vec<Completion> = (0..depth).map(|n| received(100 + n, n as u32)).collect();
    assert_eq!(world.expect(A, arrived.len()), arrived);
    // The next chain starts clean.
    let wr = world.message(B, Main, 0, 9);
    world.run(B, Main, 1009, wr);
    assert_eq!(world.expect(B, 1), [done(1009)]);
    assert_eq!(world.expect(A, 1), [received(100 + depth, 9)]);
}

pub fn unsignalled_requests_hold_their_slots<T: Bench>() {
    let (mut world, made) = short::<T>(Setup {
        send_depth: 4,
        ..Setup::default()
    });
    let depth = u64::from(made.send_depth);
    for n in 0..2 * depth {
        world.post(A, Main, 100 + n, 0, 64);
    }
    for id in 1..depth {
        let wr = world.message(B, Main, 0, 1);
        world.queue(B, Main, id, false, wr);
    }
    world.doorbell(B, Main).unwrap();
    let most = made.send_depth as usize;
    assert_eq!(world.expect(A, most - 1).len(), most - 1);
    assert_eq!(world.expect(B, 0), []);
    // All but one are done, and nobody knows: there is room for one more.
    for id in 1003..1005 {
        let wr = world.message(B, Main, 0, 1);
        world.queue(B, Main, id, true, wr);
    }
    let told = world.doorbell(B, Main);
    assert_eq!(told, Err(Rejected { accepted: 1 }));
    assert_eq!(world.expect(B, 1), [done(1003)]);
    for id in 1..=depth {
        let wr = world.message(B, Main, 0, 1);
        world.queue(B, Main, id, id == depth, wr);
    }
    assert_eq!(world.doorbell(B, Main), Ok(()));
    assert_eq!(world.expect(B, 1), [done(depth)]);
}

pub fn a_full_receive_queue_refuses<T: Bench>() {
    let (mut world, made) = short::<T>(Setup {
        recv_depth: 2,
        ..Setup::default()
    });
    for n in 0..u64::from(made.recv_depth) {
        world.post(A, Main, n, 0, 64);
    }
    let into = ReceiveQueue::Of(world.bench.qp(A, Main));
    let buffer = world.bench.sge(A, Main, 0, 64);
    let posted = world.bench.nic(A).receive(into, WrId(1002), buffer);
    assert_eq!(posted, Err(Rejected { accepted: 0 }));
    let wr = world.message(B, Main, 0, 1);
    world.run(B, Main, 1, wr);
    assert_eq!(world.expect(A, 1), [received(0, 1)]);
    world.post(A, Main, 1003, 0, 64);
}

pub fn a_full_completion_queue_is_told<T: Bench>() {
    let (mut world, made) = short::<T>(Setup {
        cqe: 4,
        recv_depth: 64,
        ..Setup::default()
    });
    let posted = made.recv_depth;
    assert!(posted > made.cqe, "{made:?}");
    for n in 0..u64::from(posted) {
        world.post(B, Main, n, 0, 64);
    }
    let qp = world.bench.qp(B, Main);
    let nic = world.bench.nic(B);
    nic.fail(qp);
    let told = (0..T::PATIENCE).any(|_| nic.poll(&mut Burst::new()) == Err(Fault::Overrun));
    assert!(told, "{posted} completions in a queue of {}", made.cqe);
}

pub fn too_many_pieces_are_refused<T: Bench>() {
    let mut world = fresh::<T>();
    let grant = world.grant(A, Main, Rights::REMOTE_WRITE, 0, 4096);
    let most = world.bench.nic(B).capabilities().max_sge as usize;
    let local: Vec<Sge> = (0..=most).map(|n| world.bench.sge(B, Main, n, 1)).collect();
    let remote = grant.at(0);
    let imm = None;
    let long = SendWr::Write {
        local: &local,
        remote,
        imm,
    };
    let fits = SendWr::Write {
        local: &local[..most],
        remote,
        imm,
    };
    world.queue(B, Main, 1, true, fits);
    world.queue(B, Main, 2, true, long);
    world.queue(B, Main, 3, true, fits);
    // Nothing behind the refused one is taken.
    assert_eq!(world.doorbell(B, Main), Err(Rejected { accepted: 1 }));
    assert_eq!(world.expect(B, 1), [done(1)]);
}
