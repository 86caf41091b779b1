//! The laws of `dataplane::nic` on an RDMA device of this machine.
//!
//! `O2POLL_VERBS_DEVICE` names it; without that nothing is run, and each test says so. With it a device that is
//! not there is a failure. Both sides are on the one device, connected by hand over its RoCE v2 address.
//!
//! ```text
//! O2POLL_VERBS_DEVICE=rxe0 cargo test -p o2poll-hal --features verbs --test verbs_conformance -- --test-threads=1
//! ```
#![cfg(feature = "verbs")]
#![allow(unsafe_code)]

use core::alloc::Layout;
use core::marker::PhantomData;
use core::ptr::NonNull;
use core::time::Duration;
use std::alloc::{alloc_zeroed, dealloc, handle_alloc_error};
use std::sync::OnceLock;
use std::thread;
use std::time::Instant;
use std::{env, fs};

use o2poll_dataplane::nic::{
    Burst, Completion, Fault, LKey, Mechanisms, Nic, Qp, ReceiveQueue, Rights, SendWr, Sge, Status,
    WrId,
};
use o2poll_hal::verbs::{
    CompletionQueue, Device, Domain, Findings, Limits, Path, QueuePair, Quirks, Shape, Verbs,
    Window, probe,
};
use o2poll_soft::conformance;
use o2poll_soft::conformance::{Bench, Lane, MEMORY, Setup, Side, World, failed};

const VARIABLE: &str = "O2POLL_VERBS_DEVICE";

/// The device that was asked for, and what it can do.
fn device() -> Option<&'static (Device, Findings)> {
    static DEVICE: OnceLock<Option<(Device, Findings)>> = OnceLock::new();
    DEVICE
        .get_or_init(|| {
            let name = env::var(VARIABLE).ok()?;
            let device = Device::open(&name).unwrap_or_else(|error| panic!("{VARIABLE}: {error}"));
            let findings = probe(&device, 1).unwrap_or_else(|error| panic!("{VARIABLE}: {error}"));
            println!("{name}: {findings:#?}");
            let watched = device.clone();
            thread::spawn(
                move || {
                    while watched.event(Duration::from_secs(3600)).is_ok() {}
                },
            );
            Some((device, findings))
        })
        .as_ref()
}

/// A kind of device, which decides what it cannot keep.
trait Kind {
    const QUIRKS: Quirks;
    const SURVIVES_DEAD_KEYS: bool;
    const OTHER: &'static str;
    const DEVIATIONS: &'static [(&'static str, &'static str)];
}

struct Rxe;

impl Kind for Rxe {
    const QUIRKS: Quirks = Quirks::RXE;
    const SURVIVES_DEAD_KEYS: bool = false;
    const OTHER: &'static str = "the device is no rxe";
    const DEVIATIONS: &'static [(&'static str, &'static str)] = &[
        (
            "bounds_hold_to_the_byte",
            "rxe holds an access against the memory region, not the window (check_rkey)",
        ),
        (
            "a_range_that_runs_over_is_refused_whole",
            "rxe holds an access against the memory region, not the window (check_rkey)",
        ),
        (
            "a_send_that_names_a_dead_key_fails_for_its_sender",
            "rxe acknowledges a SEND_WITH_INV before it looks at the key: its sender sees a success",
        ),
        (
            "a_send_does_not_kill_what_is_not_its_own",
            "rxe looks at neither queue pair nor protection domain when a peer kills a window (rxe_invalidate_mw)",
        ),
        (
            "a_message_that_is_too_long_fails_both",
            "rxe takes it for a malformed receive, with other statuses; a_message_that_is_too_long_writes_nothing_behind_its_buffer says what holds",
        ),
        (
            "a_full_completion_queue_is_told",
            "rxe rounds a completion queue of 4 up to 7; an_overflow_is_told_to_the_core fills a whole one",
        ),
    ];
}

struct Card;

impl Kind for Card {
    const QUIRKS: Quirks = Quirks::empty();
    const SURVIVES_DEAD_KEYS: bool = true;
    const OTHER: &'static str = "the device is no card";
    const DEVIATIONS: &'static [(&'static str, &'static str)] = &[(
        "a_full_completion_queue_is_told",
        "providers round completion queues up; an_overflow_is_told_to_the_core fills a whole one",
    )];
}

/// Two cores of one device.
struct Two<K> {
    // In the order of their destruction.
    nics: [Verbs; 2],
    domains: [Domain; 2],
    memory: [Bytes; 2],
    qps: [[Qp; 3]; 2],
    /// By side and protection domain.
    lkeys: [[LKey; 2]; 2],
    kind: PhantomData<K>,
}

impl<K: Kind> Bench for Two<K> {
    type Nic = Verbs;
    const DEVIATIONS: &'static [(&'static str, &'static str)] = K::DEVIATIONS;
    const PATIENCE: usize = 400_000;
    const SURVIVES_DEAD_KEYS: bool = K::SURVIVES_DEAD_KEYS;

    fn absent() -> Option<&'static str> {
        match device() {
            None => Some("O2POLL_VERBS_DEVICE names no device"),
            Some((device, _)) if device.quirks() != K::QUIRKS => Some(K::OTHER),
            Some(_) => None,
        }
    }

    fn new(setup: Setup) -> Self {
        let (device, findings) = device().expect("asked before");
        let domains = [(); 2].map(|()| Domain::new(device).unwrap());
        let memory = [(); 2].map(|()| Bytes::new(MEMORY));
        let limits = Limits {
            queue_pairs: 3,
            send_wr: setup.send_depth,
            recv_wr: setup.recv_depth,
            max_sge: 16,
            windows: 4,
            memories: 2,
        };
        let mut nics = [(); 2].map(|()| {
            let cq = CompletionQueue::new(device, setup.cqe, false).unwrap();
            Verbs::new(device, cq, findings, limits).unwrap()
        });
        let mut lkeys = [[LKey(0); 2]; 2];
        for (side, nic) in nics.iter_mut().enumerate() {
            for (pd, domain) in domains.iter().enumerate() {
                // SAFETY: the bytes are freed after the device values, and looked at by copy alone.
                let memory =
                    unsafe { domain.register(memory[side].base, MEMORY, Rights::LOCAL_WRITE) };
                lkeys[side][pd] = nic.add_memory(memory.unwrap()).unwrap();
            }
        }
        let shape = Shape {
            send_depth: setup.send_depth,
            recv_depth: setup.recv_depth,
            max_sge: 16,
            inline: 64,
        };
        let gid = device.gid(1).unwrap();
        let port = device.port(1).unwrap();
        let mut qps = [[Qp(0); 3]; 2];
        for lane in 0..3 {
            let domain = &domains[usize::from(lane == 2)];
            let mut pairs = [0, 1]
                .map(|side| QueuePair::new(domain, nics[side].completion_queue(), shape).unwrap());
            let numbers = [pairs[1].number(), pairs[0].number()];
            for (pair, number) in pairs.iter_mut().zip(numbers) {
                let path = Path {
                    timeout: 8,
                    retry_count: 7,
                    rnr_retry: setup.rnr_retry,
                    rnr_timer: 8,
                    responder_resources: setup.responder_resources,
                    ..Path::to_itself(gid, port.mtu, port.lid, number)
                };
                pair.connect(device, &path).unwrap();
            }
            for (side, pair) in pairs.into_iter().enumerate() {
                qps[side][lane] = nics[side].adopt(pair).unwrap();
            }
        }
        Self {
            nics,
            domains,
            memory,
            qps,
            lkeys,
            kind: PhantomData,
        }
    }

    fn nic(&mut self, side: Side) -> &mut Verbs {
        &mut self.nics[side as usize]
    }

    fn qp(&self, side: Side, lane: Lane) -> Qp {
        self.qps[side as usize][lane as usize]
    }

    fn window(&mut self, _side: Side, lane: Lane) -> Window {
        self.domains[usize::from(lane == Lane::Foreign)]
            .window()
            .unwrap()
    }

    fn sge(&self, side: Side, lane: Lane, offset: usize, length: u32) -> Sge {
        Sge {
            address: self.memory[side as usize].base.as_ptr() as u64 + offset as u64,
            length,
            lkey: self.lkeys[side as usize][usize::from(lane == Lane::Foreign)],
        }
    }

    fn peek(&self, side: Side, offset: usize, length: usize) -> Vec<u8> {
        assert!(offset + length <= MEMORY);
        let mut bytes = vec![0; length];
        // SAFETY: inside; a copy through a pointer, while nothing that the law waits for is under way.
        unsafe {
            let from = self.memory[side as usize].base.as_ptr().add(offset);
            bytes.as_mut_ptr().copy_from_nonoverlapping(from, length);
        }
        bytes
    }

    fn poke(&mut self, side: Side, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= MEMORY);
        // SAFETY: as in `peek`.
        unsafe {
            let to = self.memory[side as usize].base.as_ptr().add(offset);
            to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
        }
    }

    fn step(&mut self, seen: &mut [Vec<Completion>; 2]) {
        let mut idle = true;
        for (nic, seen) in self.nics.iter_mut().zip(seen) {
            let mut burst = Burst::new();
            nic.poll(&mut burst).unwrap();
            idle &= burst.is_empty();
            seen.extend(burst);
        }
        if idle {
            // A kernel that plays the card needs the core.
            thread::yield_now();
        }
    }
}

/// Page-aligned bytes.
struct Bytes {
    base: NonNull<u8>,
    layout: Layout,
}

impl Bytes {
    fn new(length: usize) -> Self {
        let layout = Layout::from_size_align(length, 4096).unwrap();
        // SAFETY: the length is not 0.
        let base = NonNull::new(unsafe { alloc_zeroed(layout) });
        let base = base.unwrap_or_else(|| handle_alloc_error(layout));
        Self { base, layout }
    }
}

impl Drop for Bytes {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, freed once.
        unsafe { dealloc(self.base.as_ptr(), self.layout) };
    }
}

conformance!(rxe, Two<Rxe>);
conformance!(card, Two<Card>);

/// A law that holds on every device, whatever kind; or it says that there is none.
fn on_the_device(law: impl FnOnce(World<Two<Rxe>>)) {
    if device().is_some() {
        law(World::new(Setup::default()));
    } else {
        println!("not run: {VARIABLE} names no device");
    }
}

#[test]
fn the_probe_finds_windows_that_a_peer_can_invalidate() {
    on_the_device(|mut world| {
        let (_, findings) = device().unwrap();
        assert!(findings.windows, "{findings:?}");
        assert!(findings.remote_invalidate, "{findings:?}");
        assert!(world.has(Mechanisms::WINDOW));
    });
}

#[test]
fn a_message_that_is_too_long_writes_nothing_behind_its_buffer() {
    on_the_device(|mut world| {
        let before = world.bench.peek(Side::A, 0, MEMORY);
        world.bench.poke(Side::B, 0, &[0x77; 64]);
        world.post(Side::A, Lane::Main, 3, 1000, 63);
        world.post(Side::A, Lane::Main, 4, 2000, 64);
        let wr = world.message(Side::B, Lane::Main, 0, 64);
        world.run(Side::B, Lane::Main, 1, wr);
        for (side, count) in [(Side::B, 1), (Side::A, 2)] {
            for completion in world.expect(side, count) {
                assert!(
                    matches!(completion, Completion::Failed { .. }),
                    "{completion:?}"
                );
            }
        }
        let after = world.bench.peek(Side::A, 0, MEMORY);
        assert!(after[1063..] == before[1063..] && after[..1000] == before[..1000]);
        world.assert_both_in_error(Lane::Main);
    });
}

/// rxe's doorbell is a `write(2)`, a card's is a store.
#[test]
fn a_chain_is_one_doorbell_and_a_poll_is_none() {
    on_the_device(|mut world| {
        let (device, _) = device().unwrap();
        let each = u64::from(device.quirks() == Quirks::RXE);
        for n in 0..8 {
            world.post(Side::A, Lane::Main, n, 0, 64);
        }
        let before = writes();
        for id in 0..8 {
            let wr = world.message(Side::B, Lane::Main, 0, 4);
            world.queue(Side::B, Lane::Main, id, id == 7, wr);
        }
        assert_eq!(writes(), before);
        world.doorbell(Side::B, Lane::Main).unwrap();
        assert_eq!(writes(), before + each);
        for _ in 0..1000 {
            let _ = world.bench.nic(Side::B).poll(&mut Burst::new());
        }
        assert_eq!(writes(), before + each);
    });
}

/// System calls of this thread that write.
fn writes() -> u64 {
    let counts = fs::read_to_string("/proc/thread-self/io").expect("a kernel that counts");
    let writes = counts.lines().find_map(|line| line.strip_prefix("syscw: "));
    writes.unwrap().parse().unwrap()
}

/// Whether its sender is told or not, and it is not on rxe.
#[test]
fn a_send_that_names_a_dead_key_fails_its_receiver() {
    on_the_device(|mut world| {
        let grant = world.grant(Side::A, Lane::Main, Rights::REMOTE_WRITE, 0, 100);
        world.post(Side::A, Lane::Main, 7, 100_000, 64);
        world.post(Side::A, Lane::Main, 8, 100_000, 64);
        let wr = SendWr::Send {
            message: world.bench.sge(Side::B, Lane::Main, 0, 10),
            // A tag that never was: a key that is only free would crash rxe's kernel.
            invalidate: Some(grant.key.rotated()),
        };
        world.run(Side::B, Lane::Main, 1, wr);
        assert_eq!(
            world.expect(Side::A, 2),
            [
                failed(7, Status::RemoteInvalidate),
                failed(8, Status::Flushed)
            ]
        );
    });
}

#[test]
fn an_overflow_is_told_to_the_core() {
    let Some((device, findings)) = device() else {
        println!("not run: {VARIABLE} names no device");
        return;
    };
    let domain = Domain::new(device).unwrap();
    let memory = Bytes::new(4096);
    let cq = CompletionQueue::new(device, 4, false).unwrap();
    let most = cq.entries() + 1;
    let limits = Limits {
        queue_pairs: 1,
        send_wr: 1,
        recv_wr: most,
        max_sge: 1,
        windows: 0,
        memories: 1,
    };
    let mut nic = Verbs::new(device, cq, findings, limits).unwrap();
    // SAFETY: the bytes are freed after the device value, and nobody looks at them.
    let registered = unsafe {
        domain
            .register(memory.base, 4096, Rights::LOCAL_WRITE)
            .unwrap()
    };
    let buffer = Sge {
        address: memory.base.as_ptr() as u64,
        length: 64,
        lkey: nic.add_memory(registered).unwrap(),
    };
    let shape = Shape {
        send_depth: 1,
        recv_depth: most,
        max_sge: 1,
        inline: 0,
    };
    let mut pair = QueuePair::new(&domain, nic.completion_queue(), shape).unwrap();
    let (gid, port) = (device.gid(1).unwrap(), device.port(1).unwrap());
    let itself = Path::to_itself(gid, port.mtu, port.lid, pair.number());
    pair.connect(device, &itself).unwrap();
    let qp = nic.adopt(pair).unwrap();
    for id in 0..u64::from(most) {
        nic.receive(ReceiveQueue::Of(qp), WrId(id), buffer).unwrap();
    }
    nic.fail(qp);
    // Not polled before all are flushed: polling makes room.
    thread::sleep(Duration::from_millis(500));
    let deadline = Instant::now() + Duration::from_secs(10);
    while nic.poll(&mut Burst::new()) != Err(Fault::Overrun) {
        assert!(Instant::now() < deadline, "{most} completions, no overrun");
        thread::yield_now();
    }
}

/// rxe waits 50 s for a window that is bound to a queue pair that goes first.
#[test]
fn a_queue_pair_that_is_dropped_before_its_bound_window_does_not_wait() {
    on_the_device(|mut world| {
        let grant = world.grant(Side::A, Lane::Main, Rights::REMOTE_WRITE, 0, 100);
        let qp = world.bench.qp(Side::A, Lane::Main);
        let start = Instant::now();
        // In an order that a control thread that knows nothing of it might choose.
        let pair = world.bench.nic(Side::A).retire(qp).unwrap();
        drop(pair);
        let window = world
            .bench
            .nic(Side::A)
            .retire_window(grant.region.unwrap())
            .unwrap();
        drop(window);
        drop(world);
        let took = start.elapsed();
        assert!(took < Duration::from_secs(5), "{took:?}");
    });
}
