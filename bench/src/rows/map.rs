//! What a registration costs: map, chain, unmap.
//!
//! Ours is what the data plane does for a sink: a window from the free ring, its next key, the layout of the page
//! list, REGISTER and SEND in one chain, and once the message is there INVALIDATE, its completion, and the
//! window back. Beside it goes the same message without a sink; the difference is the registration. The
//! floor reads the same list, checks each piece against the memory, and writes it where a device would keep it.
//! All use 16 lists in turn, and 64 windows with two places for lists each.

use core::hint::black_box;

use o2poll_dataplane::memory::PageList;
use o2poll_dataplane::nic::{
    Burst, Capabilities, Completion, LKey, Mechanisms, Nic as _, Qp, ReceiveQueue, Rights, SendWr,
    Sge, WrId,
};
use o2poll_dataplane::registration::{Choices, Descriptor, Free, Scratch, Settings};
use o2poll_soft::{Limits, Profile, QueuePair, Window, loopback};

use super::Spec;
use crate::harness::{Bound, Role, Row};
use crate::nodes::{Device, Ground, device, lane, lend_one};

/// The rows of this file.
#[must_use]
pub fn specs() -> Vec<Spec> {
    let fragments = [1, 16, 56].map(|pieces| (format!("map/{pieces}-fragments"), pieces, 3000));
    fragments
        .into_iter()
        .chain([("map/256-pages".to_owned(), 256, 4096)])
        .map(|(name, pieces, length)| {
            Spec::new(name, "registration", 1, move |row| {
                build(row, pieces, length)
            })
        })
        .collect()
}

fn build(row: Row, pieces: usize, length: u32) -> Row {
    let mut profile = Profile::frwr();
    if length == 4096 {
        profile.capabilities.mechanisms = Mechanisms::PAGES;
    }
    let mut mapped = Bench::new(profile, pieces, length);
    let mut plain = Bench::new(profile, pieces, length);
    let mut floor = Floor::new(pieces, length);
    row.here(Role::Ours, MAPPED, move |n| {
        (0..n).for_each(|_| mapped.with_registration());
    })
    .here(Role::Ours, PLAIN, move |n| {
        (0..n).for_each(|_| plain.without());
    })
    .here(Role::Floor, FLOOR, move |n| {
        (0..n).for_each(|_| floor.fill_and_check());
    })
    .goal(
        "map and unmap without the message and the floor, tsc",
        Bound::AtMost(120.0),
        |row| Some(row.ticks_of(MAPPED)? - row.ticks_of(PLAIN)? - row.ticks_of(FLOOR)?),
    )
}

/// A device with two queue pairs that lead to each other.
struct Bench {
    device: Device,
    near: Qp,
    far: Qp,
    message: Sge,
    receive: Sge,
    free: Free<'static>,
    capabilities: Capabilities,
    choices: Choices,
    scratch: Scratch,
    lists: Lists,
    burst: Burst,
    _ground: Ground,
}

impl Bench {
    fn new(profile: Profile, pieces: usize, length: u32) -> Self {
        let limits = Limits {
            queue_pairs: 2,
            send_wr: 64,
            recv_wr: 64,
            windows: 64,
            memories: 1,
            cqe: 256,
        };
        let mut ground = Ground::new(Lists::bytes(pieces) + (64 << 10));
        let port = loopback(lane()).expect("a power of two");
        let (mut device, lkey) = device(profile, &limits, vec![port], &ground);
        let [near, far] = [(1, 2), (2, 1)].map(|(ours, theirs)| {
            let pair = QueuePair::new(ours, 0, theirs, limits.send_wr, limits.recv_wr);
            device.adopt(pair).expect("room for two")
        });
        let mut free = Free::new(Vec::leak((0..64).map(|_| None).collect()));
        for _ in 0..64 {
            let (region, key) = device.adopt_window(Window::new(0)).expect("room");
            free.give(Descriptor::new(region, key)).expect("room");
        }
        let [message, receive] = [0, 1].map(|_| ground.take(4096, lkey).sge());
        device
            .receive(ReceiveQueue::Of(far), WrId(2), receive)
            .expect("room");
        let capabilities = *device.capabilities();
        let choices = Choices::new(&capabilities, Settings::PRIVATE, 257, false);
        Self {
            device,
            near,
            far,
            message: Sge {
                length: 148,
                ..message
            },
            receive,
            free,
            capabilities,
            choices,
            scratch: Scratch::new(),
            lists: Lists::new(&mut ground, lkey, pieces, length),
            burst: Burst::new(),
            _ground: ground,
        }
    }

    fn with_registration(&mut self) {
        let list = self.lists.next();
        let length = u32::try_from(list.length()).expect("below 4 GiB");
        let mut descriptor = self.free.take().expect("64 for one");
        let chosen = self
            .choices
            .choose_for(&mut self.scratch, list, 0, length)
            .expect("a shape that this device takes");
        let layout = self
            .scratch
            .lay_out(chosen.mechanism, &self.capabilities, list, 0, length)
            .expect("as chosen");
        let base = list
            .slice(0, length)
            .next()
            .map_or(0, |piece| piece.address);
        descriptor.name();
        let register = SendWr::Register {
            region: descriptor.region(),
            key: descriptor.key(),
            rights: Rights::LOCAL_WRITE | Rights::REMOTE_WRITE,
            base,
            length,
            layout,
        };
        self.device.queue(self.near, WrId(1), false, register);
        descriptor.registered();
        self.send(false);
        self.until(WrId(2));
        let key = descriptor.key();
        self.device
            .queue(self.near, WrId(3), true, SendWr::Invalidate { key });
        descriptor.invalidating();
        self.device.doorbell(self.near).expect("taken whole");
        self.until(WrId(3));
        descriptor.dead();
        self.free.give(descriptor).expect("its place");
    }

    fn without(&mut self) {
        black_box(self.lists.next());
        self.send(true);
        self.until(WrId(2));
        self.until(WrId(1));
    }

    fn send(&mut self, signalled: bool) {
        let wr = SendWr::Send {
            message: self.message,
            invalidate: None,
        };
        self.device.queue(self.near, WrId(1), signalled, wr);
        self.device.doorbell(self.near).expect("taken whole");
    }

    /// Polls until this has completed.
    fn until(&mut self, wanted: WrId) {
        loop {
            self.burst.clear();
            self.device.poll(&mut self.burst).expect("no overrun");
            let mut found = false;
            for completion in &self.burst {
                let id = match *completion {
                    Completion::Done { id } => id,
                    Completion::Received { id, .. } => {
                        self.device
                            .receive(ReceiveQueue::Of(self.far), WrId(2), self.receive)
                            .expect("room");
                        id
                    }
                    Completion::Failed { id, status } => panic!("{id:?}: {status:?}"),
                };
                found |= id == wanted;
            }
            if found {
                return;
            }
        }
    }
}

/// Page lists with a hole behind each piece, so that none become one.
struct Lists {
    all: Vec<&'static PageList<'static>>,
    next: usize,
}

impl Lists {
    const COUNT: usize = 16;

    const fn bytes(pieces: usize) -> usize {
        Self::COUNT * pieces * 8192
    }

    fn new(ground: &mut Ground, lkey: LKey, pieces: usize, length: u32) -> Self {
        let list = |_| {
            let list = lend_one(PageList::new());
            for _ in 0..pieces {
                let (piece, _hole) = ground
                    .take(8192, lkey)
                    .split_at(length)
                    .expect("less than two pages");
                list.push(piece).expect("at most 257");
            }
            &*list
        };
        Self {
            all: (0..Self::COUNT).map(list).collect(),
            next: 0,
        }
    }

    #[inline]
    fn next(&mut self) -> &'static PageList<'static> {
        self.next = (self.next + 1) % Self::COUNT;
        self.all[self.next]
    }
}

/// What a device keeps of a piece.
#[derive(Clone, Copy, Default)]
struct Entry {
    _address: u64,
    _length: u32,
    _start: u32,
}

/// The same lists, checked and written once.
struct Floor {
    lists: Lists,
    lkey: LKey,
    base: u64,
    end: u64,
    places: Vec<[Entry; 257]>,
    place: usize,
    _ground: Ground,
}

impl Floor {
    fn new(pieces: usize, length: u32) -> Self {
        let lkey = LKey(1 << 8);
        let mut ground = Ground::new(Lists::bytes(pieces) + (64 << 10));
        let base = ground.take(4096, lkey).sge().address;
        Self {
            lists: Lists::new(&mut ground, lkey, pieces, length),
            lkey,
            base,
            end: base + Lists::bytes(pieces) as u64 + 4096,
            places: vec![[Entry::default(); 257]; 128],
            place: 0,
            _ground: ground,
        }
    }

    fn fill_and_check(&mut self) {
        let list = self.lists.next();
        self.place = (self.place + 1) % self.places.len();
        let place = &mut self.places[self.place];
        let mut start = 0;
        for (piece, entry) in list.pieces().iter().zip(place.iter_mut()) {
            let end = piece.address + u64::from(piece.length);
            assert!(
                piece.lkey == self.lkey
                    && piece.length != 0
                    && piece.address >= self.base
                    && end <= self.end
            );
            *entry = Entry {
                _address: piece.address,
                _length: piece.length,
                _start: start,
            };
            start += piece.length;
        }
        assert_eq!(u64::from(start), list.length());
        black_box(place);
    }
}

const MAPPED: &str = "message with map and unmap";
const PLAIN: &str = "message without";
const FLOOR: &str = "fill and check the list";
