//! The driver over the provider that is a table of our own.

mod breaches;
mod device;
mod fences;
mod keys;
mod requests;

use std::string::{String, ToString as _};
use std::vec::Vec;

use o2poll_dataplane::nic::{
    Burst, Completion, LKey, Layout, Nic, Qp, RKey, ReceiveQueue, Region, Rejected, Remote, Rights,
    SendWr, Sge, Status, WrId,
};
use rdma_core_sys::types::{
    IBV_ACCESS_REMOTE_WRITE, IBV_SEND_INLINE, IBV_SEND_SIGNALED, IBV_WC_LOC_PROT_ERR,
    IBV_WC_REM_INV_REQ_ERR, IBV_WC_WR_FLUSH_ERR, IBV_WR_BIND_MW, IBV_WR_LOCAL_INV,
    IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_SEND,
    IBV_WR_SEND_WITH_INV,
};

use super::stub::{Posted, Stub};
use super::{Limits, Quirks, Shape, Verbs};

const START: u64 = 0x10_0000;
const LENGTH: u64 = 0x10_0000;

const LIMITS: Limits = Limits {
    queue_pairs: 2,
    send_wr: 8,
    recv_wr: 4,
    max_sge: 3,
    windows: 4,
    memories: 4,
};

const SHAPE: Shape = Shape {
    send_depth: 8,
    recv_depth: 4,
    max_sge: 3,
    inline: 32,
};

/// Two queue pairs of one core.
struct World {
    // Before the provider, as the library asks.
    nic: Verbs,
    qps: [Qp; 2],
    lkey: LKey,
    stub: Stub,
}

impl World {
    fn new() -> Self {
        Self::with(Quirks::RXE)
    }

    fn with(quirks: Quirks) -> Self {
        let stub = Stub::new(false);
        let mut nic = stub.nic(LIMITS, quirks);
        let qps = [(); 2].map(|()| {
            let pair = stub.queue_pair(&nic, SHAPE);
            nic.adopt(pair).unwrap()
        });
        let lkey = nic
            .add_memory(stub.memory(START, LENGTH, Rights::LOCAL_WRITE))
            .unwrap();
        Self {
            nic,
            qps,
            lkey,
            stub,
        }
    }

    fn piece(&self, offset: u64, length: u32) -> Sge {
        Sge {
            address: START + offset,
            length,
            lkey: self.lkey,
        }
    }

    fn message(&self, length: u32) -> SendWr<'static> {
        SendWr::Send {
            message: self.piece(0, length),
            invalidate: None,
        }
    }

    fn window(&mut self) -> (Region, RKey) {
        let window = self.stub.window();
        self.nic.adopt_window(window).unwrap()
    }

    fn register(&self, region: Region, key: RKey) -> SendWr<'static> {
        let piece = self.piece(100, 50);
        SendWr::Register {
            region,
            key,
            rights: Rights::REMOTE_WRITE,
            base: piece.address,
            length: 50,
            layout: Layout::Window(piece),
        }
    }

    fn queue(&mut self, id: u64, signalled: bool, wr: SendWr<'_>) {
        self.nic.queue(self.qps[0], WrId(id), signalled, wr);
    }

    fn ring(&mut self) -> Result<(), Rejected> {
        self.nic.doorbell(self.qps[0])
    }

    /// One signalled request; as the provider saw it.
    fn run(&mut self, id: u64, wr: SendWr<'_>) -> Posted {
        self.queue(id, true, wr);
        self.ring().unwrap();
        self.only()
    }

    fn only(&self) -> Posted {
        let [posted] = self.stub.sent().try_into().unwrap();
        posted
    }

    fn poll(&mut self) -> Vec<Completion> {
        let mut burst = Burst::new();
        self.nic.poll(&mut burst).unwrap();
        burst.into_iter().collect()
    }

    /// Runs one, and it is done.
    fn finish(&mut self, wr: SendWr<'_>) -> Posted {
        let posted = self.run(77, wr);
        self.stub.complete(posted.wr_id, 0);
        assert_eq!(self.poll(), [done(77)]);
        posted
    }

    /// As if the first queue pair had sent so many more messages. It is drained.
    fn skip(&mut self, requests: u32) {
        let slot = &mut self.nic.slots[0];
        assert_eq!(slot.tail, slot.freed);
        slot.tail = slot.tail.wrapping_add(requests);
        slot.freed = slot.tail;
    }

    /// As many messages as the first queue pair has room for, in one chain, and they are done.
    fn fill_and_drain(&mut self) {
        for id in 0..SHAPE.send_depth {
            let message = self.message(1);
            self.queue(id.into(), id == SHAPE.send_depth - 1, message);
        }
        self.ring().unwrap();
        let last = self.stub.sent().pop().unwrap();
        self.stub.complete(last.wr_id, 0);
        assert_eq!(self.poll().len(), 1);
    }

    /// Runs one that must fail here: what goes to the provider is a byte under nobody's key.
    fn assert_spoiled(&mut self, wr: SendWr<'_>, status: Status) {
        let posted = self.run(5, wr);
        assert_eq!(
            (posted.opcode, posted.send_flags),
            (IBV_WR_SEND, IBV_SEND_SIGNALED)
        );
        assert_eq!(posted.pieces, [(0, 1, u32::MAX)]);
        // What is behind it is empty.
        let behind = self.run(6, self.message(9));
        assert_eq!((behind.opcode, behind.pieces.len()), (IBV_WR_SEND, 0));
        self.stub.complete(posted.wr_id, IBV_WC_LOC_PROT_ERR);
        self.stub.complete(behind.wr_id, IBV_WC_WR_FLUSH_ERR);
        assert_eq!(self.poll(), [failed(5, status), failed(6, Status::Flushed)]);
    }
}

const fn done(id: u64) -> Completion {
    Completion::Done { id: WrId(id) }
}

const fn failed(id: u64, status: Status) -> Completion {
    Completion::Failed {
        id: WrId(id),
        status,
    }
}

#[test]
fn each_request_is_what_the_library_wants() {
    let mut world = World::new();
    let (region, key) = world.window();
    let remote = Remote {
        address: 0xfeed,
        rkey: RKey(0x55),
    };
    let local = [world.piece(0, 100), world.piece(7, 0), world.piece(200, 3)];
    let pieces = vec![(START, 100, world.lkey.0), (START + 200, 3, world.lkey.0)];

    let posted = world.finish(SendWr::Write {
        local: &local,
        remote,
        imm: None,
    });
    assert_eq!((posted.opcode, posted.word), (IBV_WR_RDMA_WRITE, 0));
    assert_eq!(
        (posted.pieces, posted.remote),
        (pieces.clone(), Some((0xfeed, 0x55)))
    );
    let posted = world.finish(SendWr::Write {
        local: &local,
        remote,
        imm: Some(0x0102_0304),
    });
    assert_eq!(posted.opcode, IBV_WR_RDMA_WRITE_WITH_IMM);
    assert_eq!(posted.word, 0x0102_0304_u32.to_be());
    let posted = world.finish(SendWr::Read {
        local: &local,
        remote,
    });
    assert_eq!((posted.opcode, posted.pieces), (IBV_WR_RDMA_READ, pieces));

    let key = key.rotated();
    let posted = world.finish(world.register(region, key));
    let bind = posted.bind.unwrap();
    // Immediate data in a BIND_MW is EINVAL.
    assert_eq!((posted.opcode, posted.word), (IBV_WR_BIND_MW, 0));
    assert_eq!((bind.addr, bind.length), (START + 100, 50));
    assert_eq!(bind.mw_access_flags, IBV_ACCESS_REMOTE_WRITE);
    let posted = world.finish(SendWr::Invalidate { key });
    assert_eq!((posted.opcode, posted.word), (IBV_WR_LOCAL_INV, key.0));
    let message = world.piece(0, 40);
    let posted = world.finish(SendWr::Send {
        message,
        invalidate: Some(RKey(0x99)),
    });
    assert_eq!((posted.opcode, posted.word), (IBV_WR_SEND_WITH_INV, 0x99));
}

#[test]
fn short_messages_ride_inside_and_only_signalled_ones_report() {
    let mut world = World::new();
    for (length, inline) in [(0, false), (1, true), (32, true), (33, false)] {
        for signalled in [false, true] {
            let message = world.message(length);
            world.queue(1, signalled, message);
            world.ring().unwrap();
            let posted = world.only();
            assert_eq!(posted.send_flags & IBV_SEND_INLINE != 0, inline, "{length}");
            assert_eq!(posted.send_flags & IBV_SEND_SIGNALED != 0, signalled);
            if signalled {
                world.stub.complete(posted.wr_id, 0);
                assert_eq!(world.poll(), [done(1)]);
            }
        }
    }
    // A READ brings bytes, so none of it rides inside.
    let local = [world.piece(0, 8)];
    let remote = Remote {
        address: 0,
        rkey: RKey(1),
    };
    let posted = world.finish(SendWr::Read {
        local: &local,
        remote,
    });
    assert_eq!(posted.send_flags, IBV_SEND_SIGNALED);
}

#[test]
fn the_chain_is_one_call_in_order() {
    let mut world = World::new();
    for id in 0..8 {
        let message = world.message(id);
        world.queue(u64::from(id), id == 7, message);
    }
    world.ring().unwrap();
    let sent = world.stub.sent();
    let lengths: Vec<u32> = sent
        .iter()
        .map(|one| one.pieces.first().map_or(0, |piece| piece.1))
        .collect();
    assert_eq!(lengths, [0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(world.nic.counts().doorbells, 1);
    world.stub.complete(sent[7].wr_id, 0);
    assert_eq!(world.poll(), [done(7)]);
}

#[test]
fn slots_are_free_only_when_a_later_signalled_one_was_polled() {
    let mut world = World::new();
    for round in 0..3 {
        for id in 0..8 {
            let message = world.message(1);
            world.queue(id, id == 3, message);
        }
        world.ring().unwrap();
        let sent = world.stub.sent();
        assert_eq!(sent.len(), 8, "{round}");
        let message = world.message(1);
        world.queue(99, true, message);
        assert_eq!(world.ring(), Err(Rejected { accepted: 0 }));
        world.stub.complete(sent[3].wr_id, 0);
        assert_eq!(world.poll(), [done(3)]);
        // Four are free, and four are not known to be done.
        for id in 0..5 {
            let message = world.message(1);
            world.queue(id, id == 3, message);
        }
        assert_eq!(world.ring(), Err(Rejected { accepted: 4 }));
        let sent = world.stub.sent();
        world.stub.complete(sent[3].wr_id, 0);
        assert_eq!(world.poll(), [done(3)]);
    }
}

#[test]
fn memory_that_is_not_ours_never_reaches_the_provider() {
    let remote = Remote {
        address: 0,
        rkey: RKey(1),
    };
    let bends: [fn(&mut Sge); 5] = [
        |piece| piece.lkey = LKey(0),
        |piece| piece.lkey.0 ^= 0x100,
        |piece| piece.address = START - 1,
        |piece| piece.address = START + LENGTH - 7,
        |piece| piece.address = u64::MAX,
    ];
    for bend in bends {
        let mut world = World::new();
        let mut piece = world.piece(0, 8);
        bend(&mut piece);
        let local = [world.piece(0, 1), piece];
        let wr = SendWr::Write {
            local: &local,
            remote,
            imm: None,
        };
        world.assert_spoiled(wr, Status::LocalProtection);
        // A receive is refused.
        let mut world = World::new();
        let into = ReceiveQueue::Of(world.qps[0]);
        assert!(world.nic.receive(into, WrId(1), piece).is_err());
        assert!(world.stub.received().is_empty());
    }
    // Not ours to write.
    let mut world = World::new();
    let lkey = world
        .nic
        .add_memory(world.stub.memory(0, 100, Rights::empty()))
        .unwrap();
    let local = [Sge {
        address: 0,
        length: 8,
        lkey,
    }];
    world.finish(SendWr::Write {
        local: &local,
        remote,
        imm: None,
    });
    world.assert_spoiled(
        SendWr::Read {
            local: &local,
            remote,
        },
        Status::LocalProtection,
    );
    // Longer than any message.
    let mut world = World::new();
    let lkey = world
        .nic
        .add_memory(world.stub.memory(0, 1 << 32, Rights::LOCAL_WRITE))
        .unwrap();
    let local = [Sge {
        address: 0,
        length: (1 << 30) + 1,
        lkey,
    }];
    let wr = SendWr::Write {
        local: &local,
        remote,
        imm: None,
    };
    world.assert_spoiled(wr, Status::LocalLength);
}

#[test]
fn what_no_device_takes_is_refused_and_nothing_behind_it_is_taken() {
    let mut world = World::new();
    let local = [world.piece(0, 1); 4];
    let remote = Remote {
        address: 0,
        rkey: RKey(1),
    };
    let message = world.message(1);
    world.queue(1, true, message);
    world.queue(
        2,
        true,
        SendWr::Write {
            local: &local,
            remote,
            imm: None,
        },
    );
    world.queue(3, true, message);
    assert_eq!(world.ring(), Err(Rejected { accepted: 1 }));
    assert_eq!(world.stub.sent().len(), 1);
    // A list, which windows do not have.
    let (region, key) = world.window();
    let layout = Layout::Fragments(&local[..1]);
    let rights = Rights::REMOTE_WRITE;
    let key = key.rotated();
    world.queue(
        4,
        true,
        SendWr::Register {
            region,
            key,
            rights,
            base: 0,
            length: 1,
            layout,
        },
    );
    assert_eq!(world.ring(), Err(Rejected { accepted: 0 }));
    // A window twice in a chain: the provider would read a key that the device does not have yet.
    let (again, after) = (
        world.register(region, key),
        world.register(region, key.rotated()),
    );
    world.queue(5, false, again);
    world.queue(6, false, SendWr::Invalidate { key });
    world.queue(7, true, after);
    assert_eq!(world.ring(), Err(Rejected { accepted: 2 }));
    // The next chain takes it.
    assert_eq!(world.stub.sent().len(), 2);
    let posted = world.run(7, after);
    assert_eq!(posted.bind.unwrap().old_rkey, key.0);
}

#[test]
fn one_chain_is_open_at_a_time() {
    let mut world = World::new();
    let message = world.message(1);
    let other = world.qps[1];
    world.queue(1, true, message);
    world.nic.queue(other, WrId(2), true, message);
    assert_eq!(world.nic.doorbell(other), Err(Rejected { accepted: 0 }));
    world.ring().unwrap();
    assert_eq!(world.stub.sent().len(), 1);
    world.nic.queue(other, WrId(2), true, message);
    world.nic.doorbell(other).unwrap();
    assert_eq!(world.stub.sent().len(), 1);
}

#[test]
fn a_failed_queue_pair_posts_nothing_but_empty_messages() {
    let mut world = World::new();
    let (region, key) = world.window();
    let live = world.window();
    world.finish(world.register(live.0, live.1.rotated()));
    let qp = world.qps[0];
    // One is in the open chain when it fails, others come late.
    world.queue(1, false, world.register(region, key.rotated()));
    world.nic.fail(qp);
    world.queue(
        2,
        false,
        SendWr::Invalidate {
            key: live.1.rotated(),
        },
    );
    let message = world.message(4);
    world.queue(3, false, message);
    world.ring().unwrap();
    let sent = world.stub.sent();
    assert_eq!(sent.len(), 3);
    for one in &sent {
        assert_eq!(
            (one.opcode, one.send_flags),
            (IBV_WR_SEND, IBV_SEND_SIGNALED)
        );
        assert!(one.pieces.is_empty());
        world.stub.complete(one.wr_id, IBV_WC_WR_FLUSH_ERR);
    }
    assert_eq!(
        world.poll(),
        [1, 2, 3].map(|id| failed(id, Status::Flushed))
    );
    // rxe may never flush a receive that comes after the error.
    let buffer = world.piece(0, 64);
    assert!(
        world
            .nic
            .receive(ReceiveQueue::Of(qp), WrId(4), buffer)
            .is_err()
    );
    assert!(world.stub.received().is_empty());
    // The window of the first is as it was.
    let other = world.qps[1];
    world
        .nic
        .queue(other, WrId(5), true, world.register(region, key.rotated()));
    world.nic.doorbell(other).unwrap();
    assert_eq!(world.only().bind.unwrap().old_rkey, key.0);
}

#[test]
fn a_request_that_had_to_fail_and_did_not_stops_its_queue_pair() {
    let mut world = World::new();
    let (_, key) = world.window();
    let posted = world.run(5, SendWr::Invalidate { key });
    world.stub.complete(posted.wr_id, 0);
    assert_eq!(world.poll(), [failed(5, Status::LocalOperation)]);
    let late = world.run(6, world.message(9));
    assert!(late.pieces.is_empty());
}

#[test]
fn a_request_that_was_flushed_before_its_turn_is_flushed() {
    let mut world = World::new();
    let (_, key) = world.window();
    let posted = world.run(5, SendWr::Invalidate { key });
    world.stub.complete(posted.wr_id, IBV_WC_WR_FLUSH_ERR);
    assert_eq!(world.poll(), [failed(5, Status::Flushed)]);
}

#[test]
fn a_failed_receive_of_an_invalidation_is_told_as_such() {
    let mut world = World::new();
    let into = ReceiveQueue::Of(world.qps[0]);
    let buffer = world.piece(0, 64);
    world.nic.receive(into, WrId(8), buffer).unwrap();
    let [receive] = world.stub.received().try_into().unwrap();
    world.stub.complete(receive, IBV_WC_REM_INV_REQ_ERR);
    assert_eq!(world.poll(), [failed(8, Status::RemoteInvalidate)]);
    assert!(world.nic.receive(into, WrId(9), buffer).is_err());
}

#[test]
fn a_kick_that_failed_leaves_all_of_the_chain_in_the_queue() {
    let mut world = World::new();
    world.stub.fail_the_kick(5);
    let message = world.message(1);
    world.queue(1, false, message);
    world.queue(2, true, message);
    assert_eq!(world.ring(), Ok(()));
    let sent = world.stub.sent();
    world.stub.complete(sent[1].wr_id, IBV_WC_WR_FLUSH_ERR);
    assert_eq!(world.poll(), [failed(2, Status::Flushed)]);
}

#[test]
fn receives_are_counted() {
    let mut world = World::new();
    let into = ReceiveQueue::Of(world.qps[0]);
    let buffer = world.piece(0, 64);
    for round in 0..5 {
        for id in 0..4 {
            world.nic.receive(into, WrId(id), buffer).unwrap();
        }
        assert!(world.nic.receive(into, WrId(9), buffer).is_err(), "{round}");
        for (id, receive) in world.stub.received().into_iter().enumerate() {
            world.stub.complete(receive, 0);
            let seen = world.poll();
            let [Completion::Received { id: told, .. }] = seen[..] else {
                panic!("{seen:?}");
            };
            assert_eq!(told, WrId(id as u64));
        }
    }
    assert!(
        world
            .nic
            .receive(ReceiveQueue::Shared, WrId(9), buffer)
            .is_err()
    );
}

#[test]
fn completions_of_a_queue_pair_that_is_gone_are_counted_and_nothing_else() {
    let mut world = World::new();
    let posted = world.run(1, world.message(1));
    let pair = world.nic.retire(world.qps[0]).unwrap();
    world.stub.complete(posted.wr_id, 0);
    assert_eq!(world.poll(), []);
    // The slot has a new owner.
    assert_eq!(world.nic.adopt(pair).unwrap(), world.qps[0]);
    world.stub.complete(posted.wr_id, 0);
    assert_eq!(world.poll(), []);
    assert_eq!(world.nic.counts().strangers, 2);
    let posted = world.run(2, world.message(1));
    world.stub.complete(posted.wr_id, 0);
    assert_eq!(world.poll(), [done(2)]);
    assert!(world.nic.retire(Qp(7)).is_none());
}

#[test]
fn what_has_no_room_comes_back() {
    let mut world = World::new();
    let third = world.stub.queue_pair(&world.nic, SHAPE);
    assert!(world.nic.adopt(third).is_err());
    let elsewhere = world.stub.nic(LIMITS, Quirks::RXE);
    world.nic.retire(world.qps[1]).unwrap();
    let stranger = world.stub.queue_pair(&elsewhere, SHAPE);
    assert!(
        world.nic.adopt(stranger).is_err(),
        "it reports to another completion queue"
    );
    let deep = Shape {
        send_depth: 9,
        ..SHAPE
    };
    let deep = world.stub.queue_pair(&world.nic, deep);
    assert!(world.nic.adopt(deep).is_err());
    for _ in 0..4 {
        world.window();
    }
    let fifth = world.stub.window();
    assert!(world.nic.adopt_window(fifth).is_err());
}

/// Windows before what they are bound to, all before the completion queue and the protection domain.
#[test]
fn everything_is_destroyed_in_the_order_that_drivers_want() {
    // Dropped as a whole.
    let mut world = World::new();
    let (region, key) = world.window();
    world.finish(world.register(region, key.rotated()));
    let World { nic, stub, .. } = world;
    drop(nic);
    let order = stub.destroyed();
    assert_eq!(order[0], "dealloc_mw");
    assert_eq!(*order.last().unwrap(), "destroy_cq");
    // The queue pair first, while the window is live on it.
    let mut world = World::new();
    let (region, key) = world.window();
    world.finish(world.register(region, key.rotated()));
    let pair = world.nic.retire(world.qps[0]).unwrap();
    drop(pair);
    assert!(
        world.stub.destroyed().is_empty(),
        "the window is bound to it"
    );
    let window = world.nic.retire_window(region).unwrap();
    drop(window);
    assert_eq!(world.stub.destroyed(), ["dealloc_mw", "destroy_qp"]);
    // The window is given back live, and its queue pair after it.
    let mut world = World::new();
    let (region, key) = world.window();
    world.finish(world.register(region, key.rotated()));
    let window = world.nic.retire_window(region).unwrap();
    let pair = world.nic.retire(world.qps[0]).unwrap();
    drop(pair);
    assert!(world.stub.destroyed().is_empty());
    drop(window);
    assert_eq!(world.stub.destroyed(), ["dealloc_mw", "destroy_qp"]);
    // A free window holds nothing.
    let mut world = World::new();
    let (region, key) = world.window();
    let key = key.rotated();
    world.finish(world.register(region, key));
    world.finish(SendWr::Invalidate { key });
    drop(world.nic.retire(world.qps[0]).unwrap());
    assert_eq!(world.stub.destroyed(), ["destroy_qp"]);
    drop(world.nic.retire_window(region).unwrap());
    assert_eq!(world.stub.destroyed(), ["dealloc_mw"]);
}

#[test]
fn a_device_value_goes_to_another_thread() {
    const fn sendable<T: Send>() {}
    sendable::<Verbs>();
    sendable::<super::QueuePair>();
    sendable::<super::Window>();
}

#[test]
fn memory_that_cannot_be_registered_is_told_beside_the_limit_with_a_limit_that_is_enough() {
    let error = |errno, limit| super::DeviceError::Register {
        bytes: 9 << 20,
        limit,
        device: String::from("rxe0"),
        source: std::io::Error::from_raw_os_error(errno),
    };
    assert_eq!(
        error(libc::ENOMEM, Some(8 << 20)).to_string(),
        "ibv_reg_mr of 9 MiB on device rxe0: Cannot allocate memory (os error 12): the limit of locked memory is 8 MiB for \
         all that is registered: raise it with `ulimit -l 17408`, memlock in limits.conf(5) or LimitMEMLOCK= in the unit, \
         or give the program CAP_IPC_LOCK"
    );
    for other in [
        error(libc::ENOMEM, None),
        error(libc::EINVAL, Some(8 << 20)),
    ] {
        let text = other.to_string();
        assert!(text.contains("9 MiB") && !text.contains("8 MiB"), "{text}");
    }
}
