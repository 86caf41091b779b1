//! What the verbs backend costs, beside the calls of libibverbs that it makes.
//!
//! Over a provider of our own that does nothing but queue completions, so that what is left is the backend; and, when
//! `O2POLL_VERBS_DEVICE` names one, over a device that is connected to itself.
#![allow(unsafe_code)]

use core::hint::black_box;
use core::mem::MaybeUninit;
use core::ptr::null_mut;
use std::env;
use std::sync::Arc;
use std::thread;

use o2poll_dataplane::nic::{
    Burst, Completion, Layout, Nic as _, Qp, RKey, ReceiveQueue, Region, Remote, Rights, SendWr,
    Sge, WrId,
};
use o2poll_hal::arena::{Arena, HugePages, Lock};
use o2poll_hal::verbs::stub::Stub;
use o2poll_hal::verbs::{
    CompletionQueue, Device, Domain, Findings, Limits, Memory, Path, QueuePair, Quirks, Shape,
    Verbs, Window, probe,
};
use rdma_core_sys::inline::{ibv_poll_cq, ibv_post_recv, ibv_post_send};
use rdma_core_sys::types::{
    IBV_SEND_INLINE, IBV_SEND_SIGNALED, IBV_WR_BIND_MW, IBV_WR_LOCAL_INV, IBV_WR_RDMA_WRITE,
    IBV_WR_SEND, ibv_mw_bind_info, ibv_recv_wr, ibv_send_wr, ibv_sge, ibv_wc,
};

use super::Spec;
use crate::harness::{Bound, Role, Row};

/// What is done over the provider of our own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// A short WRITE, in a chain of [`CHAIN`] with one doorbell and one completion.
    Write,
    /// A short SEND, in such a chain.
    Send,
    /// A receive, posted and completed, [`CHAIN`] of them to a poll.
    Receive,
    /// A REGISTER and its INVALIDATE, with one doorbell and one completion.
    Register,
    /// A poll that finds nothing.
    Poll,
}

/// The rows of this file.
#[must_use]
pub fn specs() -> Vec<Spec> {
    let mut specs: Vec<Spec> = Operation::ALL
        .into_iter()
        .map(|operation| {
            let (name, counted) = operation.row();
            Spec::new(name, counted, 1, move |row| over_stub(row, operation))
        })
        .collect();
    let Ok(name) = env::var("O2POLL_VERBS_DEVICE") else {
        return specs;
    };
    let opened = Device::open(&name).unwrap_or_else(|error| panic!("O2POLL_VERBS_DEVICE: {error}"));
    let findings = probe(&opened, 1).unwrap_or_else(|error| panic!("O2POLL_VERBS_DEVICE: {error}"));
    let card = Arc::new((opened, findings));
    let device = Arc::clone(&card);
    specs.push(Spec::new(
        "verbs/device/write",
        "work request",
        1,
        move |row| device_writes(row.granule(CHAIN as u64), &device),
    ));
    for (length, name) in [
        (4 << 10, "verbs/device/register-4KiB"),
        (1 << 20, "verbs/device/register-1MiB"),
    ] {
        let device = Arc::clone(&card);
        specs.push(Spec::new(name, "registration", 1, move |row| {
            device_registrations(row, &device, length)
        }));
    }
    specs
}

/// Does so many of an operation through the backend, over the provider of our own; a multiple of
/// [`granule`](Operation::granule).
#[must_use]
pub fn backend(operation: Operation) -> Box<dyn FnMut(u64) + Send> {
    let mut ours = Ours::over_stub();
    match operation {
        Operation::Write => Box::new(move |n| (0..n / CHAIN as u64).for_each(|_| ours.writes())),
        Operation::Send => Box::new(move |n| (0..n / CHAIN as u64).for_each(|_| ours.sends())),
        Operation::Receive => {
            Box::new(move |n| (0..n / CHAIN as u64).for_each(|_| ours.receives()))
        }
        Operation::Register => Box::new(move |n| (0..n).for_each(|_| ours.registers())),
        Operation::Poll => Box::new(move |n| (0..n).for_each(|_| ours.polls())),
    }
}

/// The same by the raw calls, with requests that were written beforehand.
#[must_use]
pub fn raw_calls(operation: Operation) -> Box<dyn FnMut(u64) + Send> {
    let mut raw = Raw::over_stub();
    match operation {
        Operation::Write => Box::new(move |n| (0..n / CHAIN as u64).for_each(|_| raw.post())),
        Operation::Send => {
            for wr in &mut raw.wrs {
                wr.opcode = IBV_WR_SEND;
            }
            Box::new(move |n| (0..n / CHAIN as u64).for_each(|_| raw.post()))
        }
        Operation::Receive => Box::new(move |n| (0..n / CHAIN as u64).for_each(|_| raw.receive())),
        Operation::Register => {
            raw.as_registration();
            Box::new(move |n| (0..n).for_each(|_| raw.post()))
        }
        Operation::Poll => Box::new(move |n| (0..n).for_each(|_| assert_eq!(raw.poll(), 0))),
    }
}

impl Operation {
    /// All of them.
    pub const ALL: [Self; 5] = [
        Self::Write,
        Self::Send,
        Self::Receive,
        Self::Register,
        Self::Poll,
    ];

    /// Its row, and what is counted there.
    const fn row(self) -> (&'static str, &'static str) {
        match self {
            Self::Write => ("verbs/stub/write", "work request"),
            Self::Send => ("verbs/stub/send", "work request"),
            Self::Receive => ("verbs/stub/receive", "receive"),
            Self::Register => ("verbs/stub/register", "registration"),
            Self::Poll => ("verbs/stub/poll", "poll"),
        }
    }

    /// How many are done at a time.
    #[must_use]
    pub const fn granule(self) -> u64 {
        match self {
            Self::Write | Self::Send | Self::Receive => CHAIN as u64,
            Self::Register | Self::Poll => 1,
        }
    }
}

fn over_stub(row: Row, operation: Operation) -> Row {
    // Two requests, a doorbell and a poll.
    let (text, most) = if operation == Operation::Register {
        ("backend without the raw calls, tsc for two requests", 80.0)
    } else {
        ("backend without the raw calls, tsc", 40.0)
    };
    row.granule(operation.granule())
        .here(Role::Ours, BACKEND, backend(operation))
        .here(Role::Floor, RAW, raw_calls(operation))
        .goal(text, Bound::AtMost(most), |row| {
            Some(row.ticks_of(BACKEND)? - row.ticks_of(RAW)?)
        })
}

fn device_writes(row: Row, card: &(Device, Findings)) -> Row {
    let (mut ours, mut raw) = (Ours::over_device(card, 4096), Raw::over_device(card, 4096));
    row.here(Role::Ours, BACKEND, move |n| {
        (0..n / CHAIN as u64).for_each(|_| ours.writes());
    })
    .here(Role::Floor, RAW, move |n| {
        (0..n / CHAIN as u64).for_each(|_| raw.post());
    })
    .goal("backend over the raw calls", Bound::AtMost(1.02), |row| {
        Some(row.ticks_of(BACKEND)? / row.ticks_of(RAW)?)
    })
}

fn device_registrations(row: Row, card: &(Device, Findings), length: u32) -> Row {
    let mut ours = Ours::over_device(card, length);
    let domain = Domain::new(&card.0).expect("a protection domain");
    let (arena, _) = Arena::new(length as usize, HugePages::Off, Lock::Try).expect("memory");
    row.here(Role::Ours, "BIND_MW and LOCAL_INV", move |n| {
        (0..n).for_each(|_| ours.registers());
    })
    .here(Role::Rival, "ibv_reg_mr and ibv_dereg_mr", move |n| {
        for _ in 0..n {
            // SAFETY: mapped as long as this closure exists, and nobody looks at it.
            let memory = unsafe { domain.register(arena.base(), arena.len(), Rights::LOCAL_WRITE) };
            drop(memory.expect("room to lock it"));
        }
    })
    .goal(
        "reg_mr and dereg_mr over bind and invalidate",
        Bound::AtLeast(1.0),
        |row| {
            Some(
                row.ticks_of("ibv_reg_mr and ibv_dereg_mr")?
                    / row.ticks_of("BIND_MW and LOCAL_INV")?,
            )
        },
    )
}

/// The backend, with one connection that leads to itself.
struct Ours {
    nic: Verbs,
    near: Qp,
    local: Sge,
    remote: Remote,
    region: Region,
    key: RKey,
    /// After the device value.
    _keeps: Keeps,
}

/// The library alone.
struct Raw {
    pairs: Vec<QueuePair>,
    cq: CompletionQueue,
    wrs: Box<[ibv_send_wr]>,
    pieces: Box<[ibv_sge]>,
    /// After all of the above.
    keeps: Keeps,
}

/// What must outlive a device value.
#[derive(Default)]
struct Keeps {
    window: Option<Window>,
    _memory: Option<Memory>,
    _arena: Option<Arena>,
    _stub: Option<Stub>,
}

impl Ours {
    fn over_stub() -> Self {
        let stub = Stub::new(true);
        let mut nic = stub.nic(LIMITS, Quirks::empty());
        let near = nic.adopt(stub.queue_pair(&nic, SHAPE)).expect("room");
        let memory = stub.memory(1 << 20, 1 << 20, Rights::LOCAL_WRITE);
        let lkey = nic.add_memory(memory).expect("room");
        let (region, key) = nic.adopt_window(stub.window()).expect("room");
        let local = Sge {
            address: 1 << 20,
            length: LENGTH,
            lkey,
        };
        Self {
            nic,
            near,
            local,
            remote: Remote {
                address: 1 << 20,
                rkey: RKey(0x1234),
            },
            region,
            key,
            _keeps: Keeps {
                _stub: Some(stub),
                ..Keeps::default()
            },
        }
    }

    fn over_device((device, findings): &(Device, Findings), length: u32) -> Self {
        let domain = Domain::new(device).expect("a protection domain");
        let cq = CompletionQueue::new(device, 256, false).expect("a completion queue");
        let mut nic = Verbs::new(device, cq, findings, LIMITS).expect("a device value");
        let (arena, _) = Arena::new(length as usize, HugePages::Off, Lock::Try).expect("memory");
        let rights = Rights::LOCAL_WRITE;
        // SAFETY: the arena is dropped after the device value, and nobody looks at it.
        let memory = unsafe { domain.register(arena.base(), arena.len(), rights) };
        let lkey = nic
            .add_memory(memory.expect("room to lock it"))
            .expect("room");
        let [near, far] = loopback(device, &domain, nic.completion_queue())
            .map(|pair| nic.adopt(pair).expect("room"));
        let local = Sge {
            address: arena.base().as_ptr() as u64,
            length,
            lkey,
        };
        // What the writes go to is registered by the far end, and another window is there to be registered.
        let [(sink, open), (region, key)] = [(); 2].map(|()| {
            nic.adopt_window(domain.window().expect("a window"))
                .expect("room")
        });
        let rkey = open.rotated();
        let mut ours = Self {
            nic,
            near: far,
            local,
            remote: Remote {
                address: local.address,
                rkey,
            },
            region: sink,
            key: rkey,
            _keeps: Keeps {
                _arena: Some(arena),
                ..Keeps::default()
            },
        };
        ours.register(rkey, true);
        ours.await_one();
        (ours.near, ours.region, ours.key) = (near, region, key);
        ours.local.length = length;
        ours
    }

    /// A chain of short writes, of which the last is signalled, and its completion.
    fn writes(&mut self) {
        let local = [Sge {
            length: LENGTH,
            ..self.local
        }];
        for n in 0..CHAIN {
            let wr = SendWr::Write {
                local: &local,
                remote: self.remote,
                imm: None,
            };
            self.nic
                .queue(self.near, WrId(n as u64), n + 1 == CHAIN, wr);
        }
        self.nic.doorbell(self.near).expect("room");
        self.await_one();
    }

    /// A chain of short messages, of which the last is signalled, and its completion.
    fn sends(&mut self) {
        let message = Sge {
            length: LENGTH,
            ..self.local
        };
        for n in 0..CHAIN {
            let wr = SendWr::Send {
                message,
                invalidate: None,
            };
            self.nic
                .queue(self.near, WrId(n as u64), n + 1 == CHAIN, wr);
        }
        self.nic.doorbell(self.near).expect("room");
        self.await_one();
    }

    /// As many receives as a chain has requests, and their completions.
    fn receives(&mut self) {
        let into = ReceiveQueue::Of(self.near);
        for n in 0..CHAIN {
            let posted = self.nic.receive(into, WrId(n as u64), self.local);
            posted.expect("room");
        }
        let mut burst = Burst::new();
        self.nic.poll(&mut burst).expect("a device that works");
        assert_eq!(burst.len(), CHAIN, "this provider completes at once");
    }

    fn polls(&mut self) {
        let mut burst = Burst::new();
        self.nic.poll(&mut burst).expect("a device that works");
        assert!(burst.is_empty(), "nothing was posted");
    }

    /// A window over all of the memory, closed again, and the completion.
    fn registers(&mut self) {
        self.key = self.key.rotated();
        let key = self.key;
        self.register(key, false);
        self.nic
            .queue(self.near, WrId(2), true, SendWr::Invalidate { key });
        self.nic.doorbell(self.near).expect("room");
        self.await_one();
    }

    fn register(&mut self, key: RKey, alone: bool) {
        let wr = SendWr::Register {
            region: self.region,
            key,
            rights: Rights::REMOTE_WRITE,
            base: self.local.address,
            length: self.local.length,
            layout: Layout::Window(self.local),
        };
        self.nic.queue(self.near, WrId(1), alone, wr);
        if alone {
            self.nic.doorbell(self.near).expect("room");
        }
    }

    fn await_one(&mut self) {
        loop {
            let mut burst = Burst::new();
            self.nic.poll(&mut burst).expect("a device that works");
            match burst.first() {
                Some(Completion::Done { .. }) => return,
                Some(other) => panic!("{other:?}"),
                // A kernel that plays the card may want the core.
                None => thread::yield_now(),
            }
        }
    }
}

impl Raw {
    fn over_stub() -> Self {
        let stub = Stub::new(true);
        let cq = stub.completion_queue();
        let pair = stub.queue_pair_of(&cq, SHAPE);
        let window = stub.window();
        let piece = ibv_sge {
            addr: 1 << 20,
            length: LENGTH,
            lkey: 0x200,
        };
        let mut raw = Self {
            cq,
            pairs: vec![pair],
            wrs: Box::default(),
            pieces: Box::default(),
            keeps: Keeps {
                window: Some(window),
                _stub: Some(stub),
                ..Keeps::default()
            },
        };
        raw.as_writes(piece, 1 << 20, 0x1234);
        raw
    }

    fn over_device((device, _): &(Device, Findings), length: u32) -> Self {
        let domain = Domain::new(device).expect("a protection domain");
        let cq = CompletionQueue::new(device, 256, false).expect("a completion queue");
        let pairs = loopback(device, &domain, &cq);
        let (arena, _) = Arena::new(length as usize, HugePages::Off, Lock::Try).expect("memory");
        let rights = Rights::LOCAL_WRITE | Rights::REMOTE_WRITE;
        // SAFETY: kept with the registration, and nobody looks at it.
        let memory = unsafe { domain.register(arena.base(), arena.len(), rights) };
        let memory = memory.expect("room to lock it");
        let piece = ibv_sge {
            addr: arena.base().as_ptr() as u64,
            length: LENGTH,
            lkey: memory.lkey().0,
        };
        let rkey = memory.lkey().0;
        let mut raw = Self {
            cq,
            pairs: pairs.into(),
            wrs: Box::default(),
            pieces: Box::default(),
            keeps: Keeps {
                _memory: Some(memory),
                _arena: Some(arena),
                ..Keeps::default()
            },
        };
        raw.as_writes(piece, piece.addr, rkey);
        raw
    }

    fn as_writes(&mut self, piece: ibv_sge, remote: u64, rkey: u32) {
        self.pieces = vec![piece; CHAIN].into();
        self.wrs = self
            .pieces
            .iter_mut()
            .map(|piece| {
                let mut wr = ibv_send_wr {
                    sg_list: piece,
                    num_sge: 1,
                    opcode: IBV_WR_RDMA_WRITE,
                    send_flags: IBV_SEND_INLINE,
                    ..Default::default()
                };
                wr.wr.rdma.remote_addr = remote;
                wr.wr.rdma.rkey = rkey;
                wr
            })
            .collect();
        self.link();
    }

    fn as_registration(&mut self) {
        let mut bind = ibv_send_wr {
            opcode: IBV_WR_BIND_MW,
            ..Default::default()
        };
        let window = self.keeps.window.as_ref().map_or(null_mut(), Window::raw);
        bind.__bindgen_anon_2.bind_mw.mw = window;
        bind.__bindgen_anon_2.bind_mw.bind_info = ibv_mw_bind_info {
            addr: 1 << 20,
            length: 4096,
            ..Default::default()
        };
        let invalidate = ibv_send_wr {
            opcode: IBV_WR_LOCAL_INV,
            ..Default::default()
        };
        self.wrs = [bind, invalidate].into();
        self.link();
    }

    fn link(&mut self) {
        let first = self.wrs.as_mut_ptr();
        for n in 1..self.wrs.len() {
            // SAFETY: inside.
            unsafe { (*first.add(n - 1)).next = first.add(n) };
        }
        if let Some(last) = self.wrs.last_mut() {
            last.send_flags |= IBV_SEND_SIGNALED;
        }
    }

    /// Posts the chain and polls until its completion is there.
    fn post(&mut self) {
        let mut bad = null_mut();
        let mut entries = [const { MaybeUninit::<ibv_wc>::uninit() }; 32];
        // SAFETY: queue pair, completion queue, memory and requests are alive; there is room for 32.
        unsafe {
            let posted = ibv_post_send(self.pairs[0].raw(), self.wrs.as_mut_ptr(), &mut bad);
            assert_eq!(posted, 0, "the queue is as long as the chain");
            while ibv_poll_cq(self.cq.raw(), 32, entries.as_mut_ptr().cast()) == 0 {
                thread::yield_now();
            }
            assert_eq!(entries[0].assume_init_ref().status, 0, "the chain failed");
        }
    }

    /// Posts as many receives as a chain has requests, one by one, and polls for them.
    fn receive(&mut self) {
        let mut bad = null_mut();
        let mut wr = ibv_recv_wr {
            sg_list: self.pieces.as_mut_ptr(),
            num_sge: 1,
            ..Default::default()
        };
        for n in 0..CHAIN {
            wr.wr_id = n as u64;
            // SAFETY: queue pair, memory and request are alive.
            let posted = unsafe { ibv_post_recv(self.pairs[0].raw(), &mut wr, &mut bad) };
            assert_eq!(posted, 0, "the queue is as long as the chain");
        }
        assert_eq!(self.poll(), CHAIN, "this provider completes at once");
    }

    fn poll(&mut self) -> usize {
        let mut entries = [const { MaybeUninit::<ibv_wc>::uninit() }; 32];
        // SAFETY: the completion queue is alive; there is room for 32.
        let count = unsafe { ibv_poll_cq(self.cq.raw(), 32, entries.as_mut_ptr().cast()) };
        black_box(&mut entries);
        usize::try_from(count).expect("a device that works")
    }
}

// SAFETY: the raw pointers are to its own boxes and to objects of the library, which may be called from any thread.
unsafe impl Send for Raw {}
// SAFETY: its provider is used by one thread at a time: that which has the device value beside it.
unsafe impl Send for Keeps {}

/// Two queue pairs that lead to each other.
fn loopback(device: &Device, domain: &Domain, cq: &CompletionQueue) -> [QueuePair; 2] {
    let mut pairs = [(); 2].map(|()| QueuePair::new(domain, cq, SHAPE).expect("a queue pair"));
    let (gid, port) = (
        device.gid(1).expect("an address"),
        device.port(1).expect("a port"),
    );
    let numbers = [pairs[1].number(), pairs[0].number()];
    for (pair, number) in pairs.iter_mut().zip(numbers) {
        let path = Path::to_itself(gid, port.mtu, port.lid, number);
        pair.connect(device, &path).expect("a connection");
    }
    pairs
}

const BACKEND: &str = "Nic::queue, doorbell, poll";
const RAW: &str = "ibv_post_send, ibv_poll_cq";

/// Requests of one chain.
const CHAIN: usize = 16;

/// Bytes of a write: they ride inside.
const LENGTH: u32 = 32;

const LIMITS: Limits = Limits {
    queue_pairs: 2,
    send_wr: 64,
    recv_wr: 16,
    max_sge: 4,
    windows: 4,
    memories: 2,
};

const SHAPE: Shape = Shape {
    send_depth: 64,
    recv_depth: 16,
    max_sge: 4,
    inline: 64,
};
