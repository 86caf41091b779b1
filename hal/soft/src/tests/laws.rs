//! The conformance suite on this device: every profile, over rings and over a wire that loses packets.
#![allow(unsafe_code)]

use std::vec::Vec;

use core::marker::PhantomData;
use core::ptr::NonNull;
use o2poll_dataplane::nic::{Burst, Completion, LKey, Nic, Qp, RKey, Remote, Rights, Sge};

use super::pair::{Hoard, device, wires};
use crate::conformance;
use crate::conformance::{Bench, Lane, MEMORY, Setup, Side};
use crate::{Limits, Lossy, Memory, Ports, Profile, QueuePair, Soft, Weather, Window};

type Device = Soft<'static, Lossy<Ports<'static, 'static>>>;

/// A kind of device.
pub(super) trait Kind {
    const PROFILE: Profile;
    const WEATHER: Weather;
    /// Laws that it does not keep, each with the reason.
    const DEVIATIONS: &'static [(&'static str, &'static str)];
}

/// Two of a kind.
pub(super) struct Two<K> {
    devices: [Device; 2],
    qps: [[Qp; 3]; 2],
    memory: [NonNull<u8>; 2],
    /// By side and protection domain.
    lkeys: [[LKey; 2]; 2],
    kind: PhantomData<K>,
    /// Mappings made.
    mappings: u8,
    /// Last: everything above borrows from it.
    hoard: Hoard,
}

impl<K: Kind> Bench for Two<K> {
    type Nic = Device;
    const DEVIATIONS: &'static [(&'static str, &'static str)] = K::DEVIATIONS;
    const PATIENCE: usize = 20_000;

    fn new(setup: Setup) -> Self {
        let mut hoard = Hoard::default();
        let mut profile = K::PROFILE;
        profile.ack_timeout = 200;
        profile.rnr_timer = 20;
        let limits = Limits {
            queue_pairs: 3,
            send_wr: setup.send_depth,
            recv_wr: setup.recv_depth,
            windows: profile.capabilities.max_windows.min(4),
            memories: 8,
            cqe: setup.cqe,
        };
        let (near, far) = wires(&mut hoard, 16);
        let mut devices = [(near, 1), (far, 2)].map(|(wire, seed)| {
            device(
                &mut hoard,
                profile,
                limits,
                Lossy::new(wire, K::WEATHER, seed),
            )
        });
        let memory = [(); 2].map(|()| hoard.bytes(MEMORY));
        let mut lkeys = [[LKey(0); 2]; 2];
        let mut qps = [[Qp(0); 3]; 2];
        for (side, device) in devices.iter_mut().enumerate() {
            for pd in [0, 1] {
                // SAFETY: the hoard keeps it until both devices are gone; `peek` and `poke` hold no reference.
                let memory = unsafe { Memory::new(memory[side], MEMORY, pd) };
                lkeys[side][pd as usize] = device.register(memory).unwrap();
            }
            for lane in 0..3_u32 {
                let own = 10 + lane * 2 + side as u32;
                let peer = 10 + lane * 2 + (1 - side as u32);
                let mut pair = QueuePair::new(own, 0, peer, setup.send_depth, setup.recv_depth);
                pair.pd = u32::from(lane == 2);
                pair.rnr_retry = setup.rnr_retry;
                pair.responder_resources = setup.responder_resources;
                // Close to the wrap.
                pair.psn = (own * 3).wrapping_neg();
                pair.path.psn = (peer * 3).wrapping_neg();
                qps[side][lane as usize] = device.adopt(pair).unwrap();
            }
        }
        Self {
            devices,
            qps,
            memory,
            lkeys,
            kind: PhantomData,
            mappings: 0,
            hoard,
        }
    }

    fn nic(&mut self, side: Side) -> &mut Device {
        &mut self.devices[side as usize]
    }

    fn qp(&self, side: Side, lane: Lane) -> Qp {
        self.qps[side as usize][lane as usize]
    }

    fn window(&mut self, _side: Side, lane: Lane) -> Window {
        Window::new(domain(lane))
    }

    fn mapping(
        &mut self,
        _side: Side,
        lane: Lane,
        ranges: &[Sge],
        rights: Rights,
        base: u64,
    ) -> Option<Window> {
        let mut list = ranges.iter().copied();
        let list = self.hoard.lend(ranges.len(), || list.next().unwrap());
        self.mappings = self.mappings.wrapping_add(1);
        let window = Window::new(domain(lane)).with_tag(self.mappings);
        let count = list.len();
        Some(window.over(list, count, rights, base))
    }

    fn expose(
        &mut self,
        side: Side,
        lane: Lane,
        offset: usize,
        length: u32,
        rights: Rights,
    ) -> Option<Remote> {
        assert!(offset + length as usize <= MEMORY);
        // SAFETY: inside the hoarded array, which the hoard keeps until both devices are gone.
        let memory = unsafe {
            let start = self.memory[side as usize].add(offset);
            Memory::new(start, length as usize, domain(lane))
        };
        let lkey = self.devices[side as usize]
            .register(memory.with_rights(rights))
            .ok()?;
        Some(Remote {
            address: self.sge(side, lane, offset, length).address,
            rkey: RKey(lkey.0),
        })
    }

    fn delay_registrations(&mut self, side: Side) -> bool {
        self.devices[side as usize].faults().late_registrations = Some(2000);
        true
    }

    fn sge(&self, side: Side, lane: Lane, offset: usize, length: u32) -> Sge {
        let address = self.memory[side as usize].as_ptr() as u64;
        Sge {
            address: address + offset as u64,
            length,
            lkey: self.lkeys[side as usize][domain(lane) as usize],
        }
    }

    fn peek(&self, side: Side, offset: usize, length: usize) -> Vec<u8> {
        assert!(offset + length <= MEMORY);
        // SAFETY: inside the hoarded array, and the devices run on this thread.
        unsafe {
            let at = self.memory[side as usize].as_ptr().add(offset);
            core::slice::from_raw_parts(at, length).to_vec()
        }
    }

    fn poke(&mut self, side: Side, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= MEMORY);
        // SAFETY: as in `peek`.
        unsafe {
            let at = self.memory[side as usize].as_ptr().add(offset);
            at.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
        }
    }

    fn step(&mut self, seen: &mut [Vec<Completion>; 2]) {
        for (device, seen) in self.devices.iter_mut().zip(seen) {
            let mut burst = Burst::new();
            device.poll(&mut burst).unwrap();
            seen.extend(burst);
        }
    }
}

fn domain(lane: Lane) -> u32 {
    u32::from(lane == Lane::Foreign)
}

const CLEAR: Weather = Weather {
    drop: 0,
    repeat: 0,
    delay: 0,
    hold: 0,
};

const STORM: Weather = Weather {
    drop: 20,
    repeat: 20,
    delay: 30,
    hold: 20,
};

macro_rules! kinds {
    ($($name:ident: $profile:ident, $weather:ident, $deviations:ident;)+) => {$(
        pub(super) struct $name;

        impl Kind for $name {
            const PROFILE: Profile = Profile::$profile();
            const WEATHER: Weather = $weather;
            const DEVIATIONS: &'static [(&'static str, &'static str)] = $deviations;
        }
    )+};
}

const ALL_KEPT: &[(&str, &str)] = &[];

const OF_RXE: &[(&str, &str)] = &[
    (
        "a_key_is_not_killed_from_another_domain",
        "rxe_invalidate_mw looks at no protection domain",
    ),
    (
        "a_sibling_kills_a_key_but_not_a_window",
        "rxe_invalidate_mw looks at no queue pair",
    ),
    (
        "a_send_does_not_kill_what_is_not_its_own",
        "rxe_invalidate_mw looks at neither for a peer's SEND either",
    ),
    (
        "a_send_that_names_a_dead_key_fails_for_its_sender",
        "the acknowledgement is out before the key is looked at",
    ),
];

kinds! {
    Frwr: frwr, CLEAR, ALL_KEPT;
    Mlx5: mlx5, CLEAR, ALL_KEPT;
    Mlx4: mlx4, CLEAR, ALL_KEPT;
    Windows: windows, CLEAR, ALL_KEPT;
    Rxe: rxe, CLEAR, OF_RXE;
    Mthca: mthca, CLEAR, ALL_KEPT;
    Bare: bare, CLEAR, ALL_KEPT;
    FrwrInStorm: frwr, STORM, ALL_KEPT;
    Mlx5InStorm: mlx5, STORM, ALL_KEPT;
    MthcaInStorm: mthca, STORM, ALL_KEPT;
}

conformance!(frwr, Two<Frwr>);
conformance!(mlx5, Two<Mlx5>);
conformance!(mlx4, Two<Mlx4>);
conformance!(windows, Two<Windows>);
conformance!(rxe, Two<Rxe>);
conformance!(mthca, Two<Mthca>);
conformance!(bare, Two<Bare>);
conformance!(frwr_in_storm, Two<FrwrInStorm>);
conformance!(mlx5_in_storm, Two<Mlx5InStorm>);
conformance!(mthca_in_storm, Two<MthcaInStorm>);

/// What is listed as not kept is really not kept: a reason that is no longer true goes.
#[test]
fn each_deviation_is_one() {
    let laws: [(&str, fn()); 4] = [
        (
            "a_key_is_not_killed_from_another_domain",
            conformance::access::a_key_is_not_killed_from_another_domain::<Two<Rxe>>,
        ),
        (
            "a_sibling_kills_a_key_but_not_a_window",
            conformance::access::a_sibling_kills_a_key_but_not_a_window::<Two<Rxe>>,
        ),
        (
            "a_send_does_not_kill_what_is_not_its_own",
            conformance::registration::a_send_does_not_kill_what_is_not_its_own::<Two<Rxe>>,
        ),
        (
            "a_send_that_names_a_dead_key_fails_for_its_sender",
            conformance::registration::a_send_that_names_a_dead_key_fails_for_its_sender::<Two<Rxe>>,
        ),
    ];
    assert_eq!(laws.map(|law| law.0).to_vec(), {
        let listed = OF_RXE.iter().map(|deviation| deviation.0);
        listed.collect::<Vec<_>>()
    });
    for (name, law) in laws {
        assert!(std::panic::catch_unwind(law).is_err(), "{name} is kept");
    }
}
