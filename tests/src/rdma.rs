//! Nodes over an RDMA device of this machine: both on the one device, their queue pairs connected by hand over its
//! RoCE v2 address.
//!
//! A [`World`] of these plays the connection manager as well: a node whose peer has ended a connection is told so, as a
//! DREQ would.
#![allow(unsafe_code)]

use core::ptr::NonNull;
use core::time::Duration;
use std::sync::OnceLock;
use std::{env, thread};

use o2poll_dataplane::nic::{LKey, Nic, Rights, Sge};
use o2poll_dataplane::poller::{Limits, Order};
use o2poll_dataplane::pool::Handle;
use o2poll_hal::verbs::{
    self as verbs, CompletionQueue, Device, Domain, Findings, Path, QueuePair, Quirks, Verbs,
    Window, probe,
};
use o2poll_soft::{Faults, Gauges, Profile};

use crate::backend::Backend;
use crate::node::Node;
use crate::world::{Setup, World};

/// Names the device.
pub const VARIABLE: &str = "O2POLL_VERBS_DEVICE";

/// The device that was asked for, and what it can do.
pub fn device() -> Option<&'static (Device, Findings)> {
    static DEVICE: OnceLock<Option<(Device, Findings)>> = OnceLock::new();
    DEVICE
        .get_or_init(|| {
            let name = env::var(VARIABLE).ok()?;
            let device = Device::open(&name).unwrap_or_else(|error| panic!("{VARIABLE}: {error}"));
            let findings = probe(&device, 1).unwrap_or_else(|error| panic!("{VARIABLE}: {error}"));
            // A queue pair is destroyed only when its events have been taken.
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

fn chosen() -> &'static (Device, Findings) {
    device().unwrap_or_else(|| panic!("{VARIABLE} names no device"))
}

/// The control side of a node on an RDMA device.
#[derive(Debug)]
pub struct Rdma {
    domain: Domain,
    /// Connections whose peer has ended them.
    told: Vec<Handle>,
}

impl Rdma {
    fn node(setup: &Setup, limits: Limits) -> Node<Self> {
        let (device, findings) = chosen();
        let domain = Domain::new(device).expect("a protection domain");
        let sizes = limits.shape.sizes();
        let cq = CompletionQueue::new(device, sizes.cqe, false).expect("a completion queue");
        let narrow = |count: usize| u32::try_from(count).expect("few");
        let most = verbs::Limits {
            queue_pairs: narrow(sizes.connections),
            send_wr: sizes.send_wr,
            recv_wr: sizes.recv_wr,
            max_sge: setup.profile.capabilities.max_sge,
            windows: narrow(sizes.regions),
            memories: 1,
        };
        let nic = Verbs::new(device, cq, findings, most).expect("a device value");
        let (asked, has) = (&setup.profile.capabilities, nic.capabilities());
        assert_eq!(
            (asked.mechanisms, asked.max_sge),
            (has.mechanisms, has.max_sge),
            "the model thinks of another device"
        );
        let told = Vec::new();
        Node::with(
            Self { domain, told },
            nic,
            setup,
            limits,
            World::<Self>::START,
        )
    }
}

impl Backend for Rdma {
    type Nic = Verbs;

    const REAL: bool = true;

    const PACE: u64 = 100_000;

    fn world(setups: [Setup; 2]) -> World<Self> {
        let setups = setups.map(|setup| Setup {
            timeout: setup.timeout * Self::PACE,
            abandon: setup.abandon * Self::PACE,
            keepalive: setup.keepalive * Self::PACE,
            ..setup
        });
        let nodes =
            [0, 1].map(|at| Self::node(&setups[at], World::<Self>::limits(&setups[at], at)));
        World::over(setups, nodes)
    }

    /// One: what the driver makes of this device.
    fn profiles() -> Vec<Profile> {
        let (device, findings) = chosen();
        let mut profile = Profile::rxe();
        assert!(findings.windows, "{findings:?}");
        // On rxe a peer's SEND_WITH_INV of a dead key crashes the kernel: nobody is invited to send one.
        profile.capabilities.remote_invalidate =
            findings.remote_invalidate && !device.quirks().contains(Quirks::RXE);
        vec![profile]
    }

    fn plays(profile: &Profile) -> bool {
        profile.capabilities.mechanisms == Self::plain().capabilities.mechanisms
    }

    fn register(
        &mut self,
        nic: &mut Verbs,
        base: NonNull<u8>,
        length: usize,
        rights: Rights,
    ) -> LKey {
        // SAFETY: leaked by the arena, or freed after the device value, which holds the memory; its bytes are handed out
        // once by `take`, and looked at from outside only through `peek`, which copies.
        let memory = unsafe { self.domain.register(base, length, rights) };
        let memory = memory.unwrap_or_else(|error| panic!("{error}"));
        nic.add_memory(memory).expect("room for one memory")
    }

    fn window(&mut self) -> Window {
        self.domain
            .window()
            .unwrap_or_else(|error| panic!("{error}"))
    }

    fn mapping(_: &'static mut [Sge], _: usize, _: Rights, _: u64) -> Window {
        unreachable!("this driver has no mappings, so that no core asks for one")
    }

    fn unmap(_: Window) -> Option<&'static mut [Sge]> {
        unreachable!("this driver has no mappings, so that none comes back")
    }

    fn join(nodes: [&mut Node<Self>; 2], _: [u32; 2]) -> [QueuePair; 2] {
        let (device, _) = chosen();
        let gid = device.gid(1).expect("an address");
        let port = device.port(1).expect("a port");
        let mut pairs = nodes.map(|node| {
            let sizes = node.limits.shape.sizes();
            let nic = node.poller.nic();
            let shape = verbs::Shape {
                send_depth: sizes.send_wr,
                recv_depth: sizes.recv_wr,
                max_sge: nic.capabilities().max_sge,
                inline: 0,
            };
            QueuePair::new(&node.backend.domain, nic.completion_queue(), shape)
                .unwrap_or_else(|error| panic!("{error}"))
        });
        let [near, far] = pairs.each_ref().map(QueuePair::number);
        for (pair, number) in pairs.iter_mut().zip([far, near]) {
            let path = Path {
                // 8.6 s. Nothing is lost on the way from a device to itself: what is not acknowledged sooner is late, because
                // the machine is busy, and sending it again would make that worse.
                timeout: 21,
                retry_count: 6,
                rnr_retry: 6,
                ..Path::to_itself(gid, port.mtu, port.lid, number)
            };
            let connected = pair.connect(device, &path);
            connected.unwrap_or_else(|error| panic!("{error}"));
        }
        pairs
    }

    fn gauges(_: &Verbs) -> Option<Gauges> {
        None
    }

    fn faults(_: &mut Verbs) -> Option<&mut Faults> {
        None
    }

    fn between(world: &mut World<Self>, busy: bool) {
        if !busy {
            // A kernel that plays the card needs the core.
            thread::yield_now();
        }
        let ended = |node: &Node<Self>, of| node.gone.iter().any(|(handle, _)| *handle == of);
        if world.nodes.iter().all(|node| node.gone.is_empty()) {
            return;
        }
        for pair in world.connections().to_vec() {
            for (at, connection) in pair.into_iter().enumerate() {
                let node = &world.nodes[at];
                let left = ended(&world.nodes[1 - at], pair[1 - at]) && !ended(node, connection);
                if left && !node.backend.told.contains(&connection) {
                    let node = &mut world.nodes[at];
                    node.backend.told.push(connection);
                    node.order(Order::Close { connection });
                }
            }
        }
    }
}
