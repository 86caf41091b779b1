//! Depths that a device does not hold, over the provider of our own.

use core::time::Duration;
use std::collections::VecDeque;

use o2poll_dataplane::peer::{Extensions, Local};
use o2poll_dataplane::poller;
use o2poll_dataplane::wire::Nid;

use super::{CmError, CompletionQueue, Core, Domain, SERVICE, Settings, depth_of};
use crate::verbs::stub::{Scenario, Stub};
use crate::verbs::{Device, DeviceError, Shape};

const fn settings() -> Settings {
    Settings {
        local: Local {
            nid: Nid(0),
            stamp: 1,
            queue_depth: DEPTH,
            max_frags: 256,
            high_water: 0,
            require_privileged_port: false,
            extensions: Extensions::empty(),
            ready: true,
        },
        service: SERVICE,
        privileged_port: false,
        shape: Shape {
            send_depth: 0,
            recv_depth: 0,
            max_sge: 4,
            inline: 0,
        },
        core: poller::Shape {
            connections: 1,
            queue_depth: DEPTH,
            writes_at_once: 1,
            waiting: 1,
            windows: 1,
            staging: 0,
            mappings: 0,
            register_source_from: 0,
            entries: 0,
        },
        connections: 1,
        patience: Duration::from_secs(1),
        timeout: Duration::from_secs(50),
    }
}

/// Send work requests and receives of that depth.
fn needs(queue_depth: u16) -> (u32, u32) {
    let sizes = poller::Shape {
        queue_depth,
        ..settings().core
    }
    .sizes();
    (sizes.send_wr, sizes.recv_wr)
}

fn core_on(scenario: Scenario) -> Core {
    let (device, _) = Stub::open(scenario).unwrap();
    core_of(&device)
}

fn core_of(device: &Device) -> Core {
    let domain = Domain::new(device).unwrap();
    let cq = CompletionQueue::in_domain(&domain, 1024, false).unwrap();
    Core {
        domain,
        cq,
        spare: VecDeque::new(),
        load: 0,
    }
}

/// `ibv_create_qp(3)`: EINVAL for what the device has not, ENOMEM for what is used up. Half is tried, and half of that.
#[test]
fn a_queue_pair_that_the_device_refuses_is_made_half_as_deep_until_it_is_not() {
    for errno in [libc::ENOMEM, libc::EINVAL] {
        for (held, wanted) in [(32, 32), (31, 16), (16, 16), (15, 8), (9, 8), (1, 1)] {
            let (sends, receives) = needs(held);
            let core = core_on(Scenario {
                most_wr: (sends.max(receives), errno),
                ..Scenario::default()
            });
            let made = core.make(&settings(), DEPTH).unwrap();
            assert_eq!(depth_of(&made), wanted, "{held}");
            assert_eq!(made.depths(), needs(wanted));
            // Who asks for that is given it at once.
            let again = core.make(&settings(), wanted).unwrap();
            assert_eq!(depth_of(&again), wanted);
        }
    }
}

#[test]
fn a_device_that_holds_no_queue_pair_at_all_says_why() {
    for errno in [libc::ENOMEM, libc::EINVAL] {
        let core = core_on(Scenario {
            most_wr: (1, errno),
            ..Scenario::default()
        });
        let error = core.make(&settings(), DEPTH).unwrap_err();
        let CmError::Device(DeviceError::Call { what, source, .. }) = error else {
            panic!("{error}");
        };
        assert_eq!(
            (what, source.raw_os_error()),
            ("ibv_create_qp", Some(errno))
        );
    }
}

/// Less would not help.
#[test]
fn what_is_not_a_matter_of_size_is_told_at_once() {
    let (device, stub) = Stub::open(Scenario {
        fails: vec![("create_qp", libc::EACCES)],
        ..Scenario::default()
    })
    .unwrap();
    let core = core_of(&device);
    let error = core.make(&settings(), DEPTH).unwrap_err();
    assert!(error.to_string().contains("/dev/infiniband"), "{error}");
    assert_eq!(stub.asked("create_qp"), 1);
}

/// More than the device says that it has is not asked for.
#[test]
fn what_a_device_says_of_itself_is_held_without_a_try() {
    let (device, stub) = Stub::open(Scenario {
        max_qp_wr: 30,
        ..Scenario::default()
    })
    .unwrap();
    let core = core_of(&device);
    let made = core.make(&settings(), DEPTH).unwrap();
    let (sends, receives) = made.depths();
    assert!(sends <= 30 && receives <= 30, "{sends} {receives}");
    let depth = depth_of(&made);
    assert!(depth >= 1 && needs(depth * 2).0 > 30, "{depth}");
    assert_eq!(stub.asked("create_qp"), 1);
}

const DEPTH: u16 = 32;
