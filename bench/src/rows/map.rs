//! What it costs to let a peer into a sink, or our own device into a source, and to shut it out again: one row for each
//! mechanism at 1, 16, 56 and 256 fragments or pages.
//!
//! Ours is what the data plane does: a window from the free ring, its next key, the layout of the page list, REGISTER
//! and SEND in one chain, and once the message is there INVALIDATE, its completion, and the window back. Beside it goes the
//! same message without a sink; the difference is the registration. The floor reads the same list, checks each piece
//! against the memory, and writes it where a device would keep it. All use 16 lists in turn, and 64 windows with two
//! places for lists each, so that all find the caches in the same state.
//!
//! * fragment list, page list, window: as said. A window is over one range, of so many pages.
//! * mapping: found in the pool, used and given back. The control side made it, and unmaps it, at its leisure.
//! * arena: nothing is registered; a fragment for each piece goes into the message, a PUT_ACK.
//! * staging: a window over one buffer, and when it is dead its bytes are copied to where they belong. The floor is that
//!   copy. One range is never staged.
//! * source: REGISTER without rights of peers, the DONE, and INVALIDATE in one chain.

use core::hint::black_box;

use o2poll_dataplane::memory::{Copier, PageList, Range};
use o2poll_dataplane::nic::{
    Burst, Capabilities, Completion, LKey, Layout, Mechanisms, Nic as _, Qp, RKey, ReceiveQueue,
    Region, Rights, SendWr, Sge, WrId,
};
use o2poll_dataplane::pool::Slot;
use o2poll_dataplane::registration::{
    Choices, Claim, Descriptor, Free, Mappings, Mechanism, Owner, SLICE, STAGE_BYTES, Scratch,
    Settings, Standing, Stock, Ways,
};
use o2poll_dataplane::wire::{self, Body, Envelope, Fragment, Message, Nid};
use o2poll_hal::copy::best_copy;
use o2poll_soft::{Limits, Profile, QueuePair, Window, loopback};

use super::Spec;
use crate::harness::{Bound, Role, Row};
use crate::nodes::{Device, Ground, device, lane, lend_one};

/// The rows of this file.
#[must_use]
pub fn specs() -> Vec<Spec> {
    let mut specs = Vec::new();
    for way in Way::ALL {
        for count in [1, 16, 56, 256] {
            if way == Way::Staging && count == 1 {
                continue;
            }
            let name = format!("map/{}/{count}-{}", way.name(), way.unit());
            specs.push(Spec::new(name, way.operation(), 1, move |row| {
                build(row, way, count)
            }));
        }
    }
    specs
}

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    FragmentList,
    PageList,
    Window,
    Mapping,
    Arena,
    Staging,
    Source,
}

impl Way {
    const ALL: [Self; 7] = [
        Self::FragmentList,
        Self::PageList,
        Self::Window,
        Self::Mapping,
        Self::Arena,
        Self::Staging,
        Self::Source,
    ];

    const fn name(self) -> &'static str {
        match self {
            Self::FragmentList => "fragment-list",
            Self::PageList => "page-list",
            Self::Window => "window",
            Self::Mapping => "mapping",
            Self::Arena => "arena",
            Self::Staging => "staging",
            Self::Source => "source",
        }
    }

    const fn unit(self) -> &'static str {
        match self {
            Self::PageList | Self::Window | Self::Mapping => "pages",
            Self::FragmentList | Self::Arena | Self::Staging | Self::Source => "fragments",
        }
    }

    const fn operation(self) -> &'static str {
        match self {
            Self::Arena | Self::Mapping => "message",
            Self::FragmentList | Self::PageList | Self::Window | Self::Staging | Self::Source => {
                "registration"
            }
        }
    }

    /// A device on which this is the way.
    const fn profile(self) -> Profile {
        let mut profile = Profile::frwr();
        profile.capabilities.mechanisms = match self {
            Self::FragmentList | Self::Source => Mechanisms::FRAGMENTS,
            Self::PageList => Mechanisms::PAGES,
            Self::Window | Self::Staging => Mechanisms::WINDOW,
            Self::Mapping => Mechanisms::MAPPINGS,
            Self::Arena => Mechanisms::empty(),
        };
        profile
    }

    /// What the table of choices must say.
    const fn mechanism(self) -> Mechanism {
        match self {
            Self::FragmentList | Self::Source => Mechanism::FragmentList,
            Self::PageList => Mechanism::PageList,
            Self::Window => Mechanism::Window,
            Self::Mapping => Mechanism::Mapping,
            Self::Arena => Mechanism::Arena,
            Self::Staging => Mechanism::Staging,
        }
    }

    /// Bytes of a piece, and how many a list has.
    fn cut(self, count: usize) -> (u32, usize) {
        let pages = |count: usize| u32::try_from(count * 4096).expect("below 4 GiB");
        match self {
            Self::PageList | Self::Mapping => (4096, count),
            Self::Window => (pages(count), 1),
            Self::FragmentList | Self::Arena | Self::Staging | Self::Source => (3000, count),
        }
    }
}

fn build(row: Row, way: Way, count: usize) -> Row {
    let (length, pieces) = way.cut(count);
    let mut mapped = Bench::new(way, pieces, length);
    let mut plain = Bench::new(way, pieces, length);
    let row = row
        .here(Role::Ours, MAPPED, move |n| {
            (0..n).for_each(|_| mapped.with());
        })
        .here(Role::Ours, PLAIN, move |n| {
            (0..n).for_each(|_| plain.without());
        });
    if way == Way::Staging {
        let mut copy = CopyFloor::new(pieces, length);
        return row.here(Role::Floor, COPY, move |n| (0..n).for_each(|_| copy.copy()));
    }
    let mut floor = Floor::new(pieces, length);
    let row = row.here(Role::Floor, FLOOR, move |n| {
        (0..n).for_each(|_| floor.fill_and_check());
    });
    if matches!(way, Way::Arena | Way::Mapping) {
        return row;
    }
    row.goal(
        "map and unmap without the message and the floor, tsc",
        Bound::AtMost(120.0),
        |row| Some(row.ticks_of(MAPPED)? - row.ticks_of(PLAIN)? - row.ticks_of(FLOOR)?),
    )
}

/// One side of a row, for a tool that counts instructions: the message with a sink under mechanism `name` (as the rows
/// are called) of `count` fragments or pages or, not `mapped`, the same message without. `None` for no such mechanism.
#[must_use]
pub fn alone(name: &str, count: usize, mapped: bool) -> Option<impl FnMut(u64)> {
    let way = Way::ALL.into_iter().find(|way| way.name() == name)?;
    let (length, pieces) = way.cut(count);
    let mut bench = Bench::new(way, pieces, length);
    Some(move |n| {
        for _ in 0..n {
            if mapped {
                bench.with();
            } else {
                bench.without();
            }
        }
    })
}

/// A device with two queue pairs that lead to each other.
struct Bench {
    way: Way,
    device: Device,
    near: Qp,
    far: Qp,
    message: Range<'static>,
    length: u32,
    receive: Sge,
    free: Free<'static>,
    capabilities: Capabilities,
    choices: Choices,
    scratch: Scratch,
    lists: Lists,
    mappings: Mappings<'static>,
    stages: Vec<Range<'static>>,
    copier: Copier,
    burst: Burst,
    _ground: Ground,
}

impl Bench {
    fn new(way: Way, pieces: usize, length: u32) -> Self {
        let limits = Limits {
            queue_pairs: 2,
            send_wr: 64,
            recv_wr: 64,
            windows: 64,
            memories: 1,
            cqe: 256,
        };
        let profile = way.profile();
        let stages = if way == Way::Staging { 2 } else { 0 };
        let stage_bytes = STAGE_BYTES as usize;
        let bytes = Lists::bytes(pieces, length) + stages * stage_bytes + (64 << 10);
        let mut ground = Ground::new(bytes);
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
        let message = ground.take(4096, lkey);
        let receive = ground.take(4096, lkey).sge();
        device
            .receive(ReceiveQueue::Of(far), WrId(2), receive)
            .expect("room");
        let settings = Settings {
            expose_arena: way == Way::Arena,
            map_on_demand: 0,
            ..Settings::PRIVATE
        };
        let stock = Stock {
            staging: (stages != 0).then_some(12),
            mappings: way == Way::Mapping,
        };
        let capabilities = *device.capabilities();
        let choices = Choices::new(&capabilities, settings, 257, stock);
        let mut this = Self {
            way,
            device,
            near,
            far,
            message,
            length: 148,
            receive,
            free,
            capabilities,
            choices,
            scratch: Scratch::new(),
            stages: (0..stages)
                .map(|_| ground.take(stage_bytes, lkey))
                .collect(),
            lists: Lists::new(&mut ground, lkey, pieces, length, way == Way::Arena),
            mappings: Mappings::new(
                Vec::leak((0..2 * Lists::COUNT).map(|_| Slot::vacant()).collect()),
                Vec::leak(vec![Ways::default(); 2 * Lists::COUNT]),
                2 * Lists::COUNT,
                true,
            ),
            copier: best_copy(),
            burst: Burst::new(),
            _ground: ground,
        };
        if way == Way::Mapping {
            this.map_all();
        }
        this
    }

    /// What the control side does when a list is seen for the first time.
    fn map_all(&mut self) {
        for at in 0..u32::try_from(Lists::COUNT).expect("few") {
            self.lists.next();
            let Claim::New(mapping) = self.claim() else {
                panic!("not seen before, and there is room");
            };
            self.mappings.made(mapping, Region(at), RKey(at << 8));
            self.mappings.release(mapping, true);
        }
    }

    fn claim(&mut self) -> Claim {
        let list = self.lists.current();
        let owner = Owner::List {
            at: core::ptr::from_ref(&*list).addr() as u64,
            generation: list.generation(),
        };
        let length = u32::try_from(list.length()).expect("below 4 GiB");
        let pieces = self.scratch.joined(list, 0, length);
        self.mappings
            .claim(owner, pieces.expect("at most 257"), true, true)
    }

    fn with(&mut self) {
        let list = self.lists.next();
        let length = u32::try_from(list.length()).expect("below 4 GiB");
        let chosen = self
            .choices
            .choose_for(list, 0, length)
            .expect("a shape that this device takes");
        assert_eq!(chosen.mechanism, self.way.mechanism());
        match self.way {
            Way::FragmentList | Way::PageList | Way::Window => self.sink(length),
            Way::Mapping => self.mapped(),
            Way::Arena => self.exposed(length),
            Way::Staging => self.staged(length),
            Way::Source => self.source(length),
        }
    }

    fn sink(&mut self, length: u32) {
        let window = self.register(self.way.mechanism(), length, PEERS);
        self.send(false);
        self.until([WrId(2)]);
        self.kill(window, [WrId(3)]);
    }

    /// One that is there already: nothing goes to the device but the message.
    fn mapped(&mut self) {
        let Claim::Found(mapping) = self.claim() else {
            panic!("mapped before");
        };
        let standing = self.mappings.standing(mapping);
        assert!(matches!(standing, Some(Standing::Live(_))));
        self.mappings.tell(mapping);
        self.send(true);
        self.until([WrId(2), WrId(1)]);
        self.mappings.release(mapping, true);
    }

    /// The key is needed until the DONE is gone, which needs no answer: one chain.
    fn source(&mut self, length: u32) {
        let window = self.register(Mechanism::FragmentList, length, Rights::empty());
        self.queue(false);
        self.kill(window, [WrId(2), WrId(3)]);
    }

    fn staged(&mut self, length: u32) {
        let by = self.choices.over_stage(length).expect("a window");
        let window = self.register(by, length, PEERS);
        self.send(false);
        self.until([WrId(2)]);
        self.kill(window, [WrId(3)]);
        let (stage, list) = (&self.stages[self.lists.turn() % 2], self.lists.current());
        let mut copied = 0;
        while copied < length {
            let most = SLICE.min(length - copied);
            copied += list.copy_in(copied.into(), stage, copied, most, self.copier);
        }
    }

    fn exposed(&mut self, length: u32) {
        let list = self.lists.current();
        let key = list.exposed().expect("exposed");
        let pieces = self.scratch.joined(list, 0, length);
        let sink = wire::Descriptor::over(key, pieces.expect("at most 257"));
        self.length = acknowledge(&mut self.message, sink);
        self.send(true);
        self.until([WrId(2), WrId(1)]);
    }

    fn without(&mut self) {
        let list = self.lists.next();
        if self.way == Way::Arena {
            let fragment = Fragment {
                length: u32::try_from(list.length()).expect("below 4 GiB"),
                address: list.pieces()[0].address,
            };
            let sink = wire::Descriptor::new(RKey(1 << 8), core::slice::from_ref(&fragment));
            self.length = acknowledge(&mut self.message, sink);
        }
        black_box(list);
        self.send(true);
        self.until([WrId(2), WrId(1)]);
    }

    /// A window from the free ring goes over the current list or, staged, over a buffer.
    fn register(&mut self, by: Mechanism, length: u32, rights: Rights) -> Descriptor {
        let capabilities = &self.capabilities;
        let list = self.lists.current();
        let mut descriptor = self.free.take().expect("64 for one");
        let (layout, base): (Option<Layout<'_>>, u64) = if self.way == Way::Staging {
            let stage = self.stages[self.lists.turn() % 2].sge();
            let piece = Sge { length, ..stage };
            let pieces = core::iter::once(piece);
            let layout = self.scratch.lay_out_pieces(by, capabilities, pieces);
            (layout, piece.address)
        } else {
            let base = list.slice(0, length).next();
            let layout = self.scratch.lay_out(by, capabilities, list, 0, length);
            (layout, base.map_or(0, |piece| piece.address))
        };
        descriptor.name();
        let register = SendWr::Register {
            region: descriptor.region(),
            key: descriptor.key(),
            rights,
            base,
            length,
            layout: layout.expect("as chosen"),
        };
        self.device.queue(self.near, WrId(4), false, register);
        descriptor.registered();
        descriptor
    }

    /// INVALIDATE, and when that and whatever else is waited for is done, the window goes back.
    fn kill<const N: usize>(&mut self, mut window: Descriptor, wanted: [WrId; N]) {
        let key = window.key();
        self.device
            .queue(self.near, WrId(3), true, SendWr::Invalidate { key });
        window.invalidating();
        self.device.doorbell(self.near).expect("taken whole");
        self.until(wanted);
        window.dead();
        self.free.give(window).expect("its place");
    }

    fn queue(&mut self, signalled: bool) {
        let wr = SendWr::Send {
            message: Sge {
                length: self.length,
                ..self.message.sge()
            },
            invalidate: None,
        };
        self.device.queue(self.near, WrId(1), signalled, wr);
    }

    fn send(&mut self, signalled: bool) {
        self.queue(signalled);
        self.device.doorbell(self.near).expect("taken whole");
    }

    /// Polls until these have completed.
    fn until<const N: usize>(&mut self, wanted: [WrId; N]) {
        let mut left = wanted.map(Some);
        loop {
            self.burst.clear();
            self.device.poll(&mut self.burst).expect("no overrun");
            for completion in &self.burst {
                let done = match *completion {
                    Completion::Done { id } => id,
                    Completion::Received { id, .. } => {
                        self.device
                            .receive(ReceiveQueue::Of(self.far), WrId(2), self.receive)
                            .expect("room");
                        id
                    }
                    Completion::Failed { id, status } => panic!("{id:?}: {status:?}"),
                };
                for each in &mut left {
                    each.take_if(|wanted| *wanted == done);
                }
            }
            if left.iter().all(Option::is_none) {
                return;
            }
        }
    }
}

/// Writes a PUT_ACK with this sink; its length.
fn acknowledge(message: &mut Range<'_>, sink: wire::Descriptor<'_>) -> u32 {
    let envelope = Envelope {
        version: 0x12,
        credits: 0,
        source: NAMES[0],
        source_stamp: 1,
        destination: NAMES[1],
        destination_stamp: 1,
    };
    let body = Body::PutAck {
        source_cookie: 1,
        sink_cookie: 2,
        sink,
    };
    let bytes = message.bytes_mut().first_chunk_mut().expect("4096");
    Message { envelope, body }.encode(bytes).expect("it fits")
}

/// Page lists with a hole behind each piece, so that none become one.
struct Lists {
    all: Vec<&'static mut PageList<'static>>,
    turn: usize,
}

impl Lists {
    const COUNT: usize = 16;

    /// Of a piece with its hole.
    const fn stride(length: u32) -> usize {
        (length as usize).next_multiple_of(4096) + 4096
    }

    const fn bytes(pieces: usize, length: u32) -> usize {
        Self::COUNT * pieces * Self::stride(length)
    }

    fn new(ground: &mut Ground, lkey: LKey, pieces: usize, length: u32, exposed: bool) -> Self {
        let list = |_| {
            let list = lend_one(PageList::new());
            for _ in 0..pieces {
                let (piece, _hole) = ground
                    .take(Self::stride(length), lkey)
                    .split_at(length)
                    .expect("longer by a page");
                let piece = if exposed {
                    piece.exposed(RKey(lkey.0))
                } else {
                    piece
                };
                list.push(piece).expect("at most 257");
            }
            list
        };
        Self {
            all: (0..Self::COUNT).map(list).collect(),
            turn: 0,
        }
    }

    #[inline]
    fn next(&mut self) -> &mut PageList<'static> {
        self.turn = (self.turn + 1) % Self::COUNT;
        self.current()
    }

    /// As given last.
    #[inline]
    fn current(&mut self) -> &mut PageList<'static> {
        self.all[self.turn]
    }

    const fn turn(&self) -> usize {
        self.turn
    }
}

/// The bytes of a staged transfer, copied to where they belong and nothing else.
struct CopyFloor {
    lists: Lists,
    stages: [Range<'static>; 2],
    copier: Copier,
    _ground: Ground,
}

impl CopyFloor {
    fn new(pieces: usize, length: u32) -> Self {
        let lkey = LKey(1 << 8);
        let stage_bytes = STAGE_BYTES as usize;
        let mut ground = Ground::new(Lists::bytes(pieces, length) + 2 * stage_bytes + (64 << 10));
        Self {
            stages: [0, 1].map(|_| ground.take(stage_bytes, lkey)),
            lists: Lists::new(&mut ground, lkey, pieces, length, false),
            copier: best_copy(),
            _ground: ground,
        }
    }

    fn copy(&mut self) {
        let list = self.lists.next();
        let length = u32::try_from(list.length()).expect("below 4 GiB");
        let stage = &self.stages[self.lists.turn() % 2];
        let list = self.lists.current();
        assert_eq!(list.copy_in(0, stage, 0, length, self.copier), length);
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
        let mut ground = Ground::new(Lists::bytes(pieces, length) + (64 << 10));
        let base = ground.take(4096, lkey).sge().address;
        Self {
            lists: Lists::new(&mut ground, lkey, pieces, length, false),
            lkey,
            base,
            end: base + Lists::bytes(pieces, length) as u64 + 4096,
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
const COPY: &str = "the bare copy";

/// What a sink's key allows.
const PEERS: Rights = Rights::LOCAL_WRITE.union(Rights::REMOTE_WRITE);

const NAMES: [Nid; 2] = [Nid::o2ib([10, 0, 0, 1], 0), Nid::o2ib([10, 0, 0, 2], 0)];
