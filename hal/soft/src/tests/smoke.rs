//! The way of one transfer: register, tell, write, tell, invalidate.

use o2poll_dataplane::nic::{Completion, Layout, Nic, Remote, Rights, SendWr, WrId};

use super::pair::{Both, connected, settle};
use crate::{Profile, Window};

#[test]
fn a_get_goes_through_and_its_key_dies() {
    let Both {
        mut a,
        mut b,
        hoard: _hoard,
    } = connected(Profile::frwr(), 64);
    let (region, key) = a.soft.adopt_window(Window::new(0)).unwrap();
    let key = key.rotated();
    a.post(100, 0, 4096);
    b.post(200, 0, 4096);
    a.arena.write(8192, b"please");
    b.arena.write(8192, b"done!");
    let data: std::vec::Vec<u8> = (0..5000_u32).map(|n| n as u8).collect();
    b.arena.write(100_000, &data);

    let fragments = [a.arena.sge(20_001, 3000), a.arena.sge(50_003, 2000)];
    let register = SendWr::Register {
        region,
        key,
        rights: Rights::REMOTE_WRITE,
        base: 0x1_0000_0000,
        length: 5000,
        layout: Layout::Fragments(&fragments),
    };
    a.soft.queue(a.qp, WrId(1), false, register);
    let message = a.arena.sge(8192, 6);
    let request = SendWr::Send {
        message,
        invalidate: None,
    };
    a.soft.queue(a.qp, WrId(2), true, request);
    a.soft.doorbell(a.qp).unwrap();
    settle(&mut a, &mut b);
    assert_eq!(a.take(), [Completion::Done { id: WrId(2) }]);
    assert_eq!(
        b.take(),
        [Completion::Received {
            id: WrId(200),
            length: 6,
            imm: None,
            invalidated: None
        }]
    );
    assert_eq!(b.arena.read(0, 6), b"please");

    let local = [
        b.arena.sge(100_000, 1),
        b.arena.sge(100_001, 998),
        b.arena.sge(100_999, 4001),
    ];
    let write = SendWr::Write {
        local: &local,
        remote: Remote {
            address: 0x1_0000_0000,
            rkey: key,
        },
        imm: None,
    };
    b.soft.queue(b.qp, WrId(3), false, write);
    let done = SendWr::Send {
        message: b.arena.sge(8192, 5),
        invalidate: None,
    };
    b.soft.queue(b.qp, WrId(4), true, done);
    b.soft.doorbell(b.qp).unwrap();
    settle(&mut a, &mut b);
    assert_eq!(b.take(), [Completion::Done { id: WrId(4) }]);
    assert_eq!(
        a.take(),
        [Completion::Received {
            id: WrId(100),
            length: 5,
            imm: None,
            invalidated: None
        }]
    );
    assert_eq!(a.arena.read(20_001, 3000), data[..3000]);
    assert_eq!(a.arena.read(50_003, 2000), data[3000..]);
    assert_eq!(
        (a.arena.read(20_000, 1)[0], a.arena.read(23_001, 1)[0]),
        (0, 0)
    );

    assert_eq!(a.soft.gauges().live_keys, 1);
    a.soft
        .queue(a.qp, WrId(5), true, SendWr::Invalidate { key });
    a.soft.doorbell(a.qp).unwrap();
    settle(&mut a, &mut b);
    assert_eq!(a.take(), [Completion::Done { id: WrId(5) }]);
    assert_eq!(a.soft.gauges(), crate::Gauges::default());
    assert_eq!(b.soft.gauges(), crate::Gauges::default());
}
