//! Posting and polling allocate nothing, whatever becomes of the requests.
#![cfg(feature = "verbs-stub")]

use o2poll_dataplane::nic::{
    Burst, Completion, Layout, Nic, Qp, ReceiveQueue, Remote, Rights, SendWr, Sge, WrId,
};
use o2poll_hal::count_alloc::{CountAlloc, Counts, Watch, is_live};
use o2poll_hal::verbs::stub::Stub;
use o2poll_hal::verbs::{Limits, Quirks, Shape, Verbs};

#[global_allocator]
static ALLOCATOR: CountAlloc = CountAlloc;

#[test]
fn the_hot_path_allocates_nothing() {
    assert!(is_live());
    let stub = Stub::new(true);
    let limits = Limits {
        queue_pairs: 1,
        send_wr: 16,
        recv_wr: 2,
        max_sge: 2,
        windows: 2,
        memories: 1,
    };
    let mut nic = stub.nic(limits, Quirks::RXE);
    let shape = Shape {
        send_depth: 16,
        recv_depth: 2,
        max_sge: 2,
        inline: 16,
    };
    let qp = nic.adopt(stub.queue_pair(&nic, shape)).unwrap();
    let memory = stub.memory(4096, 8192, Rights::LOCAL_WRITE);
    let lkey = nic.add_memory(memory).unwrap();
    let (region, mut key) = nic.adopt_window(stub.window()).unwrap();
    let piece = Sge {
        address: 4096,
        length: 100,
        lkey,
    };
    let local = [piece; 2];
    let remote = Remote {
        address: 0,
        rkey: key,
    };

    let watch = Watch::start();
    let mut seen = 0;
    for round in 0..1000 {
        key = key.rotated();
        let register = SendWr::Register {
            region,
            key,
            rights: Rights::REMOTE_WRITE,
            base: piece.address,
            length: piece.length,
            layout: Layout::Window(piece),
        };
        nic.queue(qp, WrId(round), false, register);
        let send = SendWr::Send {
            message: piece,
            invalidate: None,
        };
        nic.queue(qp, WrId(round), false, send);
        let imm = None;
        let local = &local;
        nic.queue(qp, WrId(round), false, SendWr::Write { local, remote, imm });
        nic.queue(qp, WrId(round), true, SendWr::Invalidate { key });
        nic.doorbell(qp).unwrap();
        seen += drain(&mut nic);
    }
    assert_eq!(seen, 1000);
    let into = ReceiveQueue::Of(qp);
    nic.receive(into, WrId(1), piece).unwrap();
    nic.receive(into, WrId(2), piece).unwrap();
    assert!(nic.receive(into, WrId(3), piece).is_err());
    // Too long a chain, too many pieces, a request that must fail, and what comes behind it.
    for id in 0..20 {
        nic.queue(qp, WrId(id), true, SendWr::Invalidate { key });
    }
    assert!(nic.doorbell(qp).is_err());
    drain(&mut nic);
    nic.fail(qp);
    refused(&mut nic, qp, &[piece; 3]);
    assert_eq!(watch.counts(), Counts::default());
}

fn refused(nic: &mut Verbs, qp: Qp, local: &[Sge]) {
    let remote = Remote {
        address: 0,
        rkey: o2poll_dataplane::nic::RKey(1),
    };
    let imm = None;
    nic.queue(qp, WrId(1), true, SendWr::Write { local, remote, imm });
    let _ = nic.doorbell(qp);
    drain(nic);
}

fn drain(nic: &mut Verbs) -> usize {
    let mut burst = Burst::new();
    nic.poll(&mut burst).unwrap();
    burst
        .iter()
        .filter(|completion| matches!(completion, Completion::Done { .. }))
        .count()
}
