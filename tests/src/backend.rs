//! What nodes under test stand on: devices, and the control side's part of them.

use core::ptr::NonNull;

use o2poll_dataplane::nic::{LKey, Nic, Rights, Sge};
use o2poll_soft::{self as soft, Faults, Gauges, Profile, QueuePair, Soft, Window};

use crate::node::{Node, Wires};
use crate::world::{Setup, World};

/// The control side of one node's device. The bodies of the transfer tests are the same on all of them.
pub trait Backend: Sized + 'static {
    /// The device as the core sees it.
    type Nic: Nic + 'static;

    /// Real time goes by on it: a step may find nothing to do although something is under way.
    const REAL: bool;

    /// Ticks that go by where a [`Setup`] says one: so much longer are its timeouts. Who waits for one lets the clock leap.
    const PACE: u64;

    /// Two nodes on it, not yet connected.
    fn world(setups: [Setup; 2]) -> World<Self>;

    /// The kinds of devices that it can be, the one that most tests are content with first.
    fn profiles() -> Vec<Profile>;

    /// Whether it can be a device that is known by these capabilities.
    fn plays(profile: &Profile) -> bool;

    /// The first of [`profiles`](Self::profiles).
    #[must_use]
    fn plain() -> Profile {
        let [first, ..] = Self::profiles()[..] else {
            unreachable!("there is one")
        };
        first
    }

    /// Lets the device reach memory that lives for ever; its key.
    fn register(
        &mut self,
        nic: &mut Self::Nic,
        base: NonNull<u8>,
        length: usize,
        rights: Rights,
    ) -> LKey;

    /// A new window.
    fn window(&mut self) -> <Self::Nic as Nic>::Window;

    /// A window with a live mapping of these many ranges of a list.
    fn mapping(
        list: &'static mut [Sge],
        count: usize,
        rights: Rights,
        base: u64,
    ) -> <Self::Nic as Nic>::Window;

    /// The list of a mapping that is to die.
    fn unmap(window: <Self::Nic as Nic>::Window) -> Option<&'static mut [Sge]>;

    /// Two queue pairs, one for each node, joined. `numbers` are theirs, where the device does not choose them.
    fn join(nodes: [&mut Node<Self>; 2], numbers: [u32; 2]) -> [<Self::Nic as Nic>::QueuePair; 2];

    /// What the device holds now, where it can be asked.
    fn gauges(nic: &Self::Nic) -> Option<Gauges>;

    /// The faults that it can be ordered to make, if it can.
    fn faults(nic: &mut Self::Nic) -> Option<&mut Faults>;

    /// Between two steps: what the machine around the nodes does.
    fn between(world: &mut World<Self>, busy: bool);
}

/// Software devices, wired to each other.
#[derive(Clone, Copy, Debug, Default)]
pub struct Software;

impl Backend for Software {
    type Nic = Soft<'static, Wires>;

    const REAL: bool = false;

    const PACE: u64 = 1;

    fn world(setups: [Setup; 2]) -> World {
        World::mixed(setups)
    }

    fn profiles() -> Vec<Profile> {
        vec![
            Profile::frwr(),
            Profile::mlx5(),
            Profile::mlx4(),
            Profile::windows(),
            Profile::rxe(),
            Profile::mthca(),
            Profile::bare(),
        ]
    }

    fn plays(_: &Profile) -> bool {
        true
    }

    #[allow(unsafe_code)]
    fn register(
        &mut self,
        nic: &mut Self::Nic,
        base: NonNull<u8>,
        length: usize,
        rights: Rights,
    ) -> LKey {
        // SAFETY: leaked by the arena, so valid for ever; handed out once by its `take`, and looked at from outside
        // only through `peek`, which copies.
        let memory = unsafe { soft::Memory::new(base, length, 0) }.with_rights(rights);
        nic.register(memory).expect("room for one memory")
    }

    fn window(&mut self) -> Window {
        Window::new(0)
    }

    fn mapping(list: &'static mut [Sge], count: usize, rights: Rights, base: u64) -> Window {
        Window::new(0).over(list, count, rights, base)
    }

    fn unmap(mut window: Window) -> Option<&'static mut [Sge]> {
        window.unmap()
    }

    fn join(nodes: [&mut Node<Self>; 2], numbers: [u32; 2]) -> [QueuePair; 2] {
        let [first, second] = numbers;
        let [near, far] = nodes.map(|node| node.limits.shape.sizes());
        [
            QueuePair::new(first, 0, second, near.send_wr, near.recv_wr),
            QueuePair::new(second, 0, first, far.send_wr, far.recv_wr),
        ]
    }

    fn gauges(nic: &Self::Nic) -> Option<Gauges> {
        Some(nic.gauges())
    }

    fn faults(nic: &mut Self::Nic) -> Option<&mut Faults> {
        Some(nic.faults())
    }

    fn between(_: &mut World, _: bool) {}
}
