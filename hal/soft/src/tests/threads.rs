//! Two cores, for real.

use core::sync::atomic::{AtomicU32, Ordering};
use core::time::Duration;
use std::thread;
use std::time::Instant;
use std::vec::Vec;

use o2poll_dataplane::nic::{
    Completion, Layout, Nic, RKey, ReceiveQueue, Remote, Rights, SendWr, Status, WrId,
};

use super::pair::{Both, End, connected};
use crate::conformance::pattern;
use crate::{Profile, QueuePair, Window, Wire};

const ROUNDS: u32 = 300;
const MESSAGE: usize = 900_000;

/// Longest wait for the other thread: if it has panicked, this one does, too.
const PATIENCE: Duration = Duration::from_secs(60);

/// Where two threads meet, again and again.
struct Gate(AtomicU32);

impl Gate {
    fn new() -> Self {
        Self(AtomicU32::new(0))
    }

    /// Says that we are here, and does something else until the other is.
    fn meet(&self, mut meanwhile: impl FnMut()) {
        // Both sides release what they did before, and acquire what the other did.
        let goal = self.0.fetch_add(1, Ordering::AcqRel) / 2 * 2 + 2;
        patiently(|| {
            meanwhile();
            self.0.load(Ordering::Acquire) >= goal
        });
    }
}

/// Tries until it is so.
fn patiently(mut so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !so() {
        thread::yield_now();
        assert!(start.elapsed() < PATIENCE, "the other thread is gone");
    }
}

/// Polls until something has completed.
fn wait<W: Wire>(end: &mut End<W>) -> Completion {
    patiently(|| {
        if end.seen.is_empty() {
            end.step();
        }
        assert_eq!(end.fault, None);
        !end.seen.is_empty()
    });
    end.seen.remove(0)
}

fn tell<W: Wire>(end: &mut End<W>, words: [u64; 3]) {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    end.arena.write(MESSAGE, &bytes);
    let wr = SendWr::Send {
        message: end.arena.sge(MESSAGE, 24),
        invalidate: None,
    };
    end.soft.queue(end.qp, WrId(1), false, wr);
}

fn heard<W: Wire>(end: &End<W>) -> [u64; 3] {
    let bytes = end.arena.read(MESSAGE + 64, 24);
    let word = |n: usize| u64::from_le_bytes(bytes[n * 8..n * 8 + 8].try_into().unwrap());
    [word(0), word(1), word(2)]
}

fn listen<W: Wire>(end: &mut End<W>) {
    let into = ReceiveQueue::Of(end.qp);
    let buffer = end.arena.sge(MESSAGE + 64, 24);
    end.soft.receive(into, WrId(2), buffer).unwrap();
}

/// Grants its memory, piece after piece, and looks at what the other wrote into it.
fn owner<W: Wire>(end: &mut End<W>) {
    let (region, mut key) = end.soft.adopt_window(Window::new(0)).unwrap();
    for round in 0..ROUNDS {
        key = key.rotated();
        let length = 1 + round * 7919 % 150_000;
        let half = length / 2;
        let list = [
            end.arena.sge(200_000, length - half),
            end.arena.sge(round as usize, half),
        ];
        let list = &list[..if half == 0 { 1 } else { 2 }];
        listen(end);
        let wr = SendWr::Register {
            region,
            key,
            rights: Rights::REMOTE_WRITE,
            base: u64::from(round) << 33,
            length,
            layout: Layout::Fragments(list),
        };
        end.soft.queue(end.qp, WrId(3), false, wr);
        tell(
            end,
            [u64::from(round) << 33, u64::from(length), u64::from(key.0)],
        );
        end.soft.doorbell(end.qp).unwrap();
        assert!(matches!(
            wait(end),
            Completion::Received { id: WrId(2), .. }
        ));
        assert_eq!(heard(end)[0], u64::from(round));
        let wanted = pattern(round, length as usize);
        let (head, tail) = wanted.split_at((length - half) as usize);
        assert!(end.arena.read(200_000, head.len()) == head, "round {round}");
        assert!(end.arena.read(round as usize, tail.len()) == tail);
        let wr = SendWr::Invalidate { key };
        end.soft.queue(end.qp, WrId(4), true, wr);
        end.soft.doorbell(end.qp).unwrap();
        assert_eq!(wait(end), Completion::Done { id: WrId(4) });
    }
}

/// Writes where it is told to.
fn writer<W: Wire>(end: &mut End<W>) {
    for round in 0..ROUNDS {
        assert!(matches!(
            wait(end),
            Completion::Received { id: WrId(2), .. }
        ));
        let [address, length, key] = heard(end);
        listen(end);
        let length = length as u32;
        end.arena.write(5, &pattern(round, length as usize));
        let third = length / 3;
        let local = [
            end.arena.sge(5, third),
            end.arena.sge(5 + third as usize, third),
            end.arena.sge(5 + 2 * third as usize, length - 2 * third),
        ];
        let remote = Remote {
            address,
            rkey: RKey(key as u32),
        };
        let wr = SendWr::Write {
            local: &local,
            remote,
            imm: None,
        };
        end.soft.queue(end.qp, WrId(5), true, wr);
        tell(end, [u64::from(round), 0, 0]);
        end.soft.doorbell(end.qp).unwrap();
        assert_eq!(wait(end), Completion::Done { id: WrId(5) });
    }
}

#[test]
fn two_threads_see_each_others_bytes() {
    let Both {
        mut a,
        mut b,
        hoard: _hoard,
    } = connected(Profile::frwr(), 8);
    listen(&mut b);
    thread::scope(|scope| {
        let writer = scope.spawn(|| writer(&mut b));
        owner(&mut a);
        writer.join().unwrap();
    });
    assert_eq!(a.soft.counts().refused + b.soft.counts().refused, 0);
}

/// One owner kills keys while the other writes through them: what is dead stays dead.
fn killer<W: Wire>(end: &mut End<W>, round: u32, random: &mut u32) -> bool {
    let (region, key) = end.soft.adopt_window(Window::new(0)).unwrap();
    let key = key.rotated();
    let list = [end.arena.sge(0, 80_000), end.arena.sge(100_000, 70_000)];
    listen(end);
    let wr = SendWr::Register {
        region,
        key,
        rights: Rights::REMOTE_WRITE,
        base: 0,
        length: 150_000,
        layout: Layout::Fragments(&list),
    };
    end.soft.queue(end.qp, WrId(3), false, wr);
    tell(end, [0, 150_000, u64::from(key.0)]);
    end.soft.doorbell(end.qp).unwrap();
    // At some time while the writes come.
    *random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
    let start = end.soft.counts().bytes;
    let until = start + u64::from(*random >> 8) % 400_000;
    let mut patience = 20_000;
    while end.soft.counts().bytes < until && patience != 0 {
        end.step();
        patience -= 1;
        thread::yield_now();
    }
    end.soft
        .queue(end.qp, WrId(4), true, SendWr::Invalidate { key });
    end.soft.doorbell(end.qp).unwrap();
    let killed = loop {
        match wait(end) {
            Completion::Done { id: WrId(4) } => break true,
            Completion::Failed { id: WrId(4), .. } => break false,
            _ => {}
        }
    };
    assert!(killed, "round {round}");
    let frozen = end.arena.read(0, 200_000);
    for _ in 0..200 {
        end.step();
        thread::yield_now();
    }
    assert!(end.arena.read(0, 200_000) == frozen, "round {round}");
    // Whatever the other had under way has ended in error here and there.
    patiently(|| {
        end.step();
        end.soft.gauges().receives == 0
    });
    end.soft.retire_window(region).unwrap();
    end.take();
    end.soft.retire(end.qp).is_some()
}

fn pest<W: Wire>(end: &mut End<W>, round: u32) {
    assert!(matches!(wait(end), Completion::Received { .. }));
    let [address, length, key] = heard(end);
    end.arena
        .write(5, &pattern(round, usize::try_from(length).unwrap()));
    let local = [end.arena.sge(5, length as u32)];
    let remote = Remote {
        address,
        rkey: RKey(key as u32),
    };
    let wr = SendWr::Write {
        local: &local,
        remote,
        imm: None,
    };
    let status = loop {
        end.soft.queue(end.qp, WrId(5), true, wr);
        end.soft.doorbell(end.qp).unwrap();
        match wait(end) {
            Completion::Done { .. } => {}
            Completion::Failed { status, .. } => break status,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(status, Status::RemoteAccess, "round {round}");
    end.soft.retire(end.qp).unwrap();
}

#[test]
fn a_key_that_was_killed_in_the_middle_of_writes_stays_dead() {
    let Both {
        mut a,
        mut b,
        hoard: _hoard,
    } = connected(Profile::frwr(), 8);
    let gate = Gate::new();
    let pair = |round: u32, own: u32| {
        let number = 100 + round * 2;
        QueuePair::new(number + own, 0, number + 1 - own, 32, 32)
    };
    thread::scope(|scope| {
        let pest = scope.spawn(|| {
            for round in 0..60 {
                b.qp = b.soft.adopt(pair(round, 1)).unwrap();
                listen(&mut b);
                gate.meet(|| ());
                pest(&mut b, round);
                gate.meet(|| ());
            }
        });
        let mut random = 1;
        for round in 0..60 {
            a.qp = a.soft.adopt(pair(round, 0)).unwrap();
            gate.meet(|| ());
            assert!(killer(&mut a, round, &mut random));
            gate.meet(|| ());
        }
        pest.join().unwrap();
    });
}

#[test]
fn what_was_flushed_is_the_callers_again() {
    let Both {
        mut a,
        mut b,
        hoard: _hoard,
    } = connected(Profile::frwr(), 8);
    let gate = Gate::new();
    let pair = |round: u32, own: u32| {
        let number = 100 + round * 2;
        QueuePair::new(number + own, 0, number + 1 - own, 32, 32)
    };
    const LENGTH: usize = 500_000;
    let (region, mut key) = a.soft.adopt_window(Window::new(0)).unwrap();
    thread::scope(|scope| {
        let fickle = scope.spawn(|| {
            let mut random = 5_u32;
            for round in 0..60 {
                b.qp = b.soft.adopt(pair(round, 1)).unwrap();
                listen(&mut b);
                gate.meet(|| ());
                assert!(matches!(wait(&mut b), Completion::Received { .. }));
                let rkey = RKey(heard(&b)[2] as u32);
                b.arena.write(0, &std::vec![1; LENGTH]);
                let local = [b.arena.sge(0, LENGTH as u32)];
                let remote = Remote { address: 0, rkey };
                let wr = SendWr::Write {
                    local: &local,
                    remote,
                    imm: None,
                };
                b.soft.queue(b.qp, WrId(5), true, wr);
                b.soft.doorbell(b.qp).unwrap();
                random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                for _ in 0..random >> 24 {
                    b.step();
                }
                b.soft.fail(b.qp);
                patiently(|| {
                    b.step();
                    b.soft.gauges().send_slots == 0
                });
                // Ours again: the other must not see this.
                b.arena.write(0, &std::vec![2; LENGTH]);
                gate.meet(|| ());
                b.soft.retire(b.qp).unwrap();
                b.take();
            }
        });
        for round in 0..60 {
            a.qp = a.soft.adopt(pair(round, 0)).unwrap();
            key = key.rotated();
            a.arena.write(0, &std::vec![0; LENGTH]);
            let list = [a.arena.sge(0, LENGTH as u32)];
            let wr = SendWr::Register {
                region,
                key,
                rights: Rights::REMOTE_WRITE,
                base: 0,
                length: LENGTH as u32,
                layout: Layout::Fragments(&list),
            };
            a.soft.queue(a.qp, WrId(3), false, wr);
            tell(&mut a, [0, 0, u64::from(key.0)]);
            gate.meet(|| ());
            a.soft.doorbell(a.qp).unwrap();
            // The other comes when it has been told that we let go, and for that we must poll.
            gate.meet(|| a.step());
            for _ in 0..50 {
                a.step();
            }
            let landed = a.arena.read(0, LENGTH);
            assert!(landed.iter().all(|byte| *byte < 2), "round {round}");
            assert!(landed.is_sorted_by(|one, next| one >= next));
            a.soft
                .queue(a.qp, WrId(4), true, SendWr::Invalidate { key });
            a.soft.doorbell(a.qp).unwrap();
            assert_eq!(wait(&mut a), Completion::Done { id: WrId(4) });
            a.soft.retire(a.qp).unwrap();
            a.take();
        }
        fickle.join().unwrap();
    });
}
