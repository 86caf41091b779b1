//! What goes before a BIND on a device that carries one out again.

use std::vec::Vec;

use o2poll_dataplane::nic::{Nic as _, RKey, Region, Rights, SendWr, WrId};
use rdma_core_sys::types::{IBV_WC_WR_FLUSH_ERR, IBV_WR_BIND_MW, IBV_WR_LOCAL_INV, IBV_WR_SEND};

use super::super::fence::Post;
use super::super::slots::NOBODY;
use super::super::stub::{Posted, Stub};
use super::super::{Limits, Quirks, Verbs};
use super::{LIMITS, SHAPE, START, World, failed};
use o2poll_dataplane::nic::{Completion, Status};

/// One queue pair, whose first window is its own.
fn fenced(limits: Limits) -> World {
    let stub = Stub::new(false);
    let mut nic: Verbs = stub.nic(limits, Quirks::RXE);
    let qps = [(); 2].map(|()| {
        let mut pair = stub.queue_pair(&nic, SHAPE);
        let memory = stub.memory(START, 64, Rights::LOCAL_WRITE);
        pair.post = Some(Post::of(stub.window(), memory));
        nic.adopt(pair).unwrap()
    });
    let memory = stub.memory(START, super::LENGTH, Rights::LOCAL_WRITE);
    let lkey = nic.add_memory(memory).unwrap();
    World {
        nic,
        qps,
        lkey,
        stub,
    }
}

fn opcodes(sent: &[Posted]) -> Vec<u32> {
    sent.iter().map(|posted| posted.opcode).collect()
}

/// rxe's requester, as far as BINDs go: a BIND behind something that waits for the peer would be carried out again.
#[derive(Default)]
struct Device {
    /// The key of the queue pair's own window, and whether it is bound.
    own: Option<(u32, bool)>,
    /// Something waits for the peer since the last LOCAL_INV.
    wire: bool,
    fences: usize,
}

impl Device {
    fn run(&mut self, sent: &[Posted]) {
        for posted in sent {
            let own = posted.wr_id == NOBODY;
            assert!(!own || posted.send_flags == 0, "a fence is signalled");
            match posted.opcode {
                IBV_WR_LOCAL_INV => {
                    self.wire = false;
                    if own {
                        let now = self.own.expect("a window that was never bound");
                        assert_eq!(now, (posted.word, true), "an invalidate of another key");
                        self.own = Some((now.0, false));
                        self.fences += 1;
                    }
                }
                IBV_WR_BIND_MW => {
                    assert!(!self.wire, "a BIND that may be carried out again");
                    if own {
                        let bind = posted.bind.unwrap();
                        let (key, bound) = self.own.unwrap_or((bind.old_rkey, false));
                        assert_eq!((bind.old_rkey, false), (key, bound));
                        assert_eq!(bind.rkey >> 8, key >> 8);
                        assert_ne!(bind.rkey, key);
                        self.own = Some((bind.rkey, true));
                    }
                }
                _ => self.wire = true,
            }
        }
    }
}

#[test]
fn a_bind_goes_behind_a_fence_where_it_could_overtake_something() {
    let mut world = fenced(LIMITS);
    let windows = [(); 2].map(|()| world.window());
    let keys = windows.map(|(_, key)| key.rotated());
    world.queue(1, false, world.message(1));
    world.ring().unwrap();
    let own = [IBV_WR_LOCAL_INV, IBV_WR_BIND_MW];
    assert_eq!(opcodes(&world.stub.sent()), [IBV_WR_BIND_MW, IBV_WR_SEND]);
    for (n, (region, _)) in windows.into_iter().enumerate() {
        world.queue(2, false, world.register(region, keys[n]));
        world.queue(3, n == 1, world.message(1));
    }
    world.ring().unwrap();
    let sent = world.stub.sent();
    let each = [own[0], own[1], IBV_WR_BIND_MW, IBV_WR_SEND];
    assert_eq!(opcodes(&sent), [each, each].concat());
    assert_eq!(world.nic.counts().work_requests, 5, "fences do not count");
    assert_eq!(world.nic.counts().doorbells, 2);
    // All of it is done, and what follows overtakes nothing.
    world.stub.complete(sent[7].wr_id, 0);
    assert_eq!(world.poll().len(), 1);
    world.queue(4, false, SendWr::Invalidate { key: keys[0] });
    world.queue(5, true, world.register(windows[0].0, keys[0].rotated()));
    world.ring().unwrap();
    assert_eq!(opcodes(&world.stub.sent()), own);
}

#[test]
fn a_device_that_carries_no_bind_out_again_gets_no_fences() {
    let mut world = World::with(Quirks::empty());
    let (region, key) = world.window();
    world.queue(1, false, world.message(1));
    world.queue(2, true, world.register(region, key.rotated()));
    world.ring().unwrap();
    assert_eq!(opcodes(&world.stub.sent()), [IBV_WR_SEND, IBV_WR_BIND_MW]);
}

#[test]
fn a_fence_that_is_flushed_is_told_to_nobody() {
    let mut world = fenced(LIMITS);
    let (region, key) = world.window();
    world.queue(1, false, world.message(1));
    world.queue(2, true, world.register(region, key.rotated()));
    world.ring().unwrap();
    let sent = world.stub.sent();
    assert_eq!(sent.len(), 5);
    for posted in &sent {
        world.stub.complete(posted.wr_id, IBV_WC_WR_FLUSH_ERR);
    }
    let told = [failed(1, Status::Flushed), failed(2, Status::Flushed)];
    assert_eq!(world.poll(), told);
}

/// Whatever is queued, and however much of it is taken, the window of the queue pair is what its next fence says.
#[test]
fn fences_are_right_in_every_mix_also_when_a_chain_is_taken_in_part() {
    let mut draw = 7_u64;
    let mut below = |bound: u64| {
        draw = draw
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        usize::try_from((draw >> 33) % bound).unwrap()
    };
    let mut cut = 0;
    for _ in 0..200 {
        let mut world = fenced(LIMITS);
        let mut device = Device::default();
        // Where each window is: its key, and whether it is live.
        let mut windows: Vec<(Region, RKey, bool)> = (0..LIMITS.windows)
            .map(|_| world.window())
            .map(|(region, key)| (region, key, false))
            .collect();
        let mut last = None;
        for _ in 0..40 {
            let before = windows.clone();
            let mut touched = Vec::new();
            let count = 1 + below(4);
            let mut states = std::vec![before.clone()];
            for _ in 0..count {
                let at = below(LIMITS.windows.into());
                let (region, key, live) = windows[at];
                let wr = match below(3) {
                    1 if !live && !touched.contains(&at) => {
                        touched.push(at);
                        windows[at] = (region, key.rotated(), true);
                        world.register(region, key.rotated())
                    }
                    2 if live => {
                        windows[at].2 = false;
                        SendWr::Invalidate { key }
                    }
                    _ => world.message(1),
                };
                world.queue(1, true, wr);
                states.push(windows.clone());
            }
            let takes = (below(3) == 0).then(|| below(6));
            world.stub.take(takes);
            let rung = world.ring();
            world.stub.take(None);
            let sent = world.stub.sent();
            device.run(&sent);
            let ours: Vec<&Posted> = sent.iter().filter(|it| it.wr_id != NOBODY).collect();
            if let Err(rejected) = rung {
                cut += 1;
                assert_eq!(rejected.accepted as usize, ours.len());
            } else {
                assert_eq!(ours.len(), count);
            }
            windows = states.swap_remove(ours.len());
            last = ours.last().map(|it| it.wr_id).or(last);
            // Room for the next, and sometimes nothing is under way.
            let token = last.filter(|_| below(2) == 0 || world.nic.slots[0].room() < 4);
            if let Some(token) = token {
                world.stub.complete(token, 0);
                let done = Completion::Done { id: WrId(1) };
                assert_eq!(world.poll(), [done]);
                last = None;
                // Everything before it is acknowledged.
                device.wire = false;
            }
        }
        assert!(device.fences > 0);
    }
    assert!(cut > 100, "{cut}");
}
