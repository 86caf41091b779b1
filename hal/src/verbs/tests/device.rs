//! Devices as they are opened, asked and let go of, over the provider of our own.

use o2poll_dataplane::nic::{Nic, Rights, SendWr, Sge, WrId};
use rdma_core_sys::types::{
    IBV_LINK_LAYER_ETHERNET, IBV_LINK_LAYER_INFINIBAND, IBV_PORT_DOWN, IBV_SEND_INLINE,
};

use super::{LENGTH, LIMITS, SHAPE, START};
use crate::verbs::device::Device;
use crate::verbs::stub::{Made, Scenario, Stub};
use crate::verbs::{
    CompletionQueue, DeviceError, Domain, Findings, Memory, QueuePair, Shape, Verbs, probe,
};

fn lock_free() -> Scenario {
    Scenario {
        thread_domains: true,
        ..Scenario::default()
    }
}

fn failing(call: &'static str, errno: i32) -> Scenario {
    Scenario {
        fails: vec![(call, errno)],
        ..lock_free()
    }
}

fn calls(made: &[Made]) -> Vec<&'static str> {
    made.iter().map(|made| made.call).collect()
}

/// Memory that nobody looks at.
fn memory(domain: &Domain) -> Memory {
    let base = core::ptr::NonNull::new(core::ptr::without_provenance_mut(
        usize::try_from(START).unwrap(),
    ));
    let length = usize::try_from(LENGTH).unwrap();
    // SAFETY: this provider keeps the address and does nothing with it.
    unsafe { domain.register(base.unwrap(), length, Rights::LOCAL_WRITE) }.unwrap()
}

#[test]
fn queues_are_made_in_the_parent_domain_and_memory_and_windows_below_it() {
    let (device, stub) = Stub::open(lock_free()).unwrap();
    let domain = Domain::new(&device).unwrap();
    let (base, parent) = (domain.base.raw.addr(), domain.queues.raw.addr());
    assert_ne!(base, parent);
    assert!(domain.has_thread_domain());
    assert_eq!(domain.note(), None);
    let cq = CompletionQueue::in_domain(&domain, 64, false).unwrap();
    assert!(cq.is_single_threaded());
    assert_eq!((cq.note(&device), cq.entries()), (None, 64));
    let pair = QueuePair::new(&domain, &cq, SHAPE).unwrap();
    let (memory, window) = (memory(&domain), domain.window().unwrap());
    let of = |call, domain| Made { call, domain };
    assert_eq!(
        stub.made(),
        [
            of("alloc_pd", 0),
            of("alloc_td", 0),
            of("alloc_parent_domain", base),
            of("create_cq_ex", parent),
            of("create_qp", parent),
            of("reg_mr", base),
            of("alloc_mw", base),
        ]
    );
    // For the checks of work requests it is one domain.
    assert_eq!(pair.raw.pd.id(), memory.domain());
    assert_eq!(window.domain(), memory.domain());
}

/// Work goes through such queues: posted, polled, and a window of the domain below bound over its memory.
#[test]
fn a_core_without_locks_posts_and_polls() {
    let (device, stub) = Stub::open(lock_free()).unwrap();
    let domain = Domain::new(&device).unwrap();
    let cq = CompletionQueue::in_domain(&domain, 64, false).unwrap();
    let findings = Findings {
        windows: true,
        ..Findings::default()
    };
    let mut nic = Verbs::new(&device, cq.clone(), &findings, LIMITS).unwrap();
    let qp = nic
        .adopt(QueuePair::new(&domain, &cq, SHAPE).unwrap())
        .unwrap();
    let lkey = nic.add_memory(memory(&domain)).unwrap();
    let (region, key) = nic.adopt_window(domain.window().unwrap()).unwrap();
    let piece = Sge {
        address: START,
        length: 50,
        lkey,
    };
    let wr = SendWr::Register {
        region,
        key: key.rotated(),
        rights: Rights::REMOTE_WRITE,
        base: START,
        length: 50,
        layout: o2poll_dataplane::nic::Layout::Window(piece),
    };
    nic.queue(qp, WrId(1), true, wr);
    nic.doorbell(qp).unwrap();
    let [posted] = stub.sent().try_into().unwrap();
    assert_eq!(posted.bind.unwrap().rkey, key.rotated().0);
    assert_eq!(nic.counts().spoiled, 0);
}

/// Those of one thread domain share a doorbell register that nobody locks.
#[test]
fn each_thread_that_posts_has_a_thread_domain_of_its_own_over_the_same_memory() {
    let (device, stub) = Stub::open(lock_free()).unwrap();
    let first = Domain::new(&device).unwrap();
    let second = first.for_another_thread();
    let base = first.base.raw.addr();
    assert_ne!(first.queues.raw, second.queues.raw);
    assert_ne!(first.queues.td, second.queues.td);
    assert_eq!(first.base.raw, second.base.raw);
    assert_eq!(first.queues.id(), second.queues.id());
    let made = stub.made();
    assert_eq!(
        calls(&made),
        [
            "alloc_pd",
            "alloc_td",
            "alloc_parent_domain",
            "alloc_td",
            "alloc_parent_domain"
        ]
    );
    assert_eq!(made[4].domain, base);
    // A queue pair of the one may not report to the other's queue, which nobody locks, and may to one with a lock.
    let own = CompletionQueue::in_domain(&first, 64, false).unwrap();
    let error = QueuePair::new(&second, &own, SHAPE).unwrap_err();
    assert!(matches!(error, DeviceError::Mixed { .. }), "{error}");
    QueuePair::new(&first, &own, SHAPE).unwrap();
    let locked = CompletionQueue::new(&device, 64, false).unwrap();
    for domain in [&first, &second] {
        QueuePair::new(domain, &locked, SHAPE).unwrap();
    }
    drop((own, locked, first, second));
    let order = stub.destroyed();
    let last = order.last_chunk::<5>().unwrap();
    assert_eq!(
        last,
        &[
            "dealloc_parent_domain",
            "dealloc_td",
            "dealloc_parent_domain",
            "dealloc_td",
            "dealloc_pd"
        ]
    );
}

/// Handed to a provider, an object of another device is an object of its own.
#[test]
fn a_completion_queue_of_another_device_is_refused() {
    let (one, _first) = Stub::open(lock_free()).unwrap();
    let (other, second) = Stub::open(lock_free()).unwrap();
    let domain = Domain::new(&one).unwrap();
    let cq = CompletionQueue::new(&other, 64, false).unwrap();
    let error = QueuePair::new(&domain, &cq, SHAPE).unwrap_err();
    assert!(error.to_string().contains("device stub0"), "{error}");
    assert_eq!(second.asked("create_qp"), 0);
}

/// Queue pair, completion queue, parent domain, thread domain, protection domain (`ibv_alloc_parent_domain(3)`), whoever
/// lets go first.
#[test]
fn everything_without_locks_is_destroyed_in_order_whoever_lets_go_first() {
    // All orders of four.
    for code in 0..256_usize {
        let order: [usize; 4] = core::array::from_fn(|n| code >> (2 * n) & 3);
        if (0..4).any(|n| !order.contains(&n)) {
            continue;
        }
        let (device, stub) = Stub::open(lock_free()).unwrap();
        let domain = Domain::new(&device).unwrap();
        let cq = CompletionQueue::in_domain(&domain, 64, false).unwrap();
        let pair = QueuePair::new(&domain, &cq, SHAPE).unwrap();
        let (mut device, mut domain) = (Some(device), Some(domain));
        let (mut cq, mut pair) = (Some(cq), Some(pair));
        for next in order {
            match next {
                0 => drop(device.take()),
                1 => drop(domain.take()),
                2 => drop(cq.take()),
                _ => drop(pair.take()),
            }
        }
        assert_eq!(
            stub.destroyed(),
            [
                "destroy_qp",
                "destroy_cq",
                "dealloc_parent_domain",
                "dealloc_td",
                "dealloc_pd"
            ],
            "{order:?}"
        );
    }
}

#[test]
fn a_core_that_goes_takes_its_windows_queue_pairs_and_memory_before_their_domains() {
    let (device, stub) = Stub::open(lock_free()).unwrap();
    let domain = Domain::new(&device).unwrap();
    let cq = CompletionQueue::in_domain(&domain, 64, false).unwrap();
    let mut nic = Verbs::new(&device, cq.clone(), &Findings::default(), LIMITS).unwrap();
    let pair = QueuePair::new(&domain, &cq, SHAPE).unwrap();
    nic.adopt(pair).unwrap();
    nic.adopt_window(domain.window().unwrap()).unwrap();
    nic.add_memory(memory(&domain)).unwrap();
    drop((cq, domain, device));
    assert!(stub.destroyed().is_empty());
    drop(nic);
    assert_eq!(
        stub.destroyed(),
        [
            "dealloc_mw",
            "destroy_qp",
            "dereg_mr",
            // Of the request that fails for certain, in a domain of its own.
            "dereg_mr",
            "dealloc_pd",
            "destroy_cq",
            "dealloc_parent_domain",
            "dealloc_td",
            "dealloc_pd",
        ]
    );
}

#[test]
fn what_cannot_be_destroyed_is_told_by_name_and_number_and_the_rest_goes_on() {
    let calls = [
        ("dealloc_mw", libc::EBUSY),
        ("destroy_qp", libc::EINVAL),
        ("dereg_mr", libc::EBUSY),
        ("destroy_cq", libc::EBUSY),
        ("dealloc_parent_domain", libc::EBUSY),
        ("dealloc_td", libc::EIO),
    ];
    let scenario = Scenario {
        fails: calls.to_vec(),
        ..lock_free()
    };
    let (device, stub) = Stub::open(scenario).unwrap();
    let domain = Domain::new(&device).unwrap();
    let cq = CompletionQueue::in_domain(&domain, 64, false).unwrap();
    let mut nic = Verbs::new(&device, cq.clone(), &Findings::default(), LIMITS).unwrap();
    nic.adopt(QueuePair::new(&domain, &cq, SHAPE).unwrap())
        .unwrap();
    nic.adopt_window(domain.window().unwrap()).unwrap();
    assert_eq!(device.complaints(), [""; 0]);
    drop((cq, domain, nic));
    // Each is asked once, whatever it says, and in the same order.
    assert_eq!(
        stub.destroyed(),
        [
            "dealloc_mw",
            "destroy_qp",
            "dereg_mr",
            "dealloc_pd",
            "destroy_cq",
            "dealloc_parent_domain",
            "dealloc_td",
            "dealloc_pd",
        ]
    );
    let told = device.complaints();
    assert_eq!(told.len(), calls.len(), "{told:#?}");
    for ((call, errno), line) in calls.into_iter().zip(&told) {
        let call = call.replace("dealloc_parent_domain", "dealloc_pd of a parent domain");
        let said = format!("ibv_{call}: {}", std::io::Error::from_raw_os_error(errno));
        assert!(line.starts_with(&said), "{line}");
    }
    assert_eq!(device.complaints(), [""; 0], "once");
}

#[test]
fn a_device_on_which_nothing_can_be_destroyed_is_told_of_in_a_few_lines() {
    let scenario = Scenario {
        fails: vec![("dealloc_mw", libc::EBUSY)],
        ..Scenario::default()
    };
    let (device, stub) = Stub::open(scenario).unwrap();
    let domain = Domain::new(&device).unwrap();
    for _ in 0..1000 {
        drop(domain.window().unwrap());
    }
    assert_eq!(stub.destroyed().len(), 1000);
    let told = device.complaints();
    assert_eq!(told.len(), 65);
    assert_eq!(told[64], "and 936 calls more that failed");
}

/// Linux's mlx4 leaves `max_mw` at 0, and has as many windows as memory regions.
#[test]
fn a_card_that_does_not_say_how_many_windows_it_has_has_as_many_as_memory_regions() {
    let findings = Findings {
        windows: true,
        ..Findings::default()
    };
    for (max_mw, max_mr, wanted) in [
        (0, 1 << 19, 1 << 19),
        (3, 1 << 19, 3),
        (1 << 20, 0, 1 << 20),
        (0, 0, 0),
        (0, -1, 0),
    ] {
        let scenario = Scenario {
            max_mw,
            max_mr,
            ..Scenario::default()
        };
        let (device, _stub) = Stub::open(scenario).unwrap();
        assert_eq!(device.windows(), wanted, "{max_mw} {max_mr}");
        // What a plan is made for, and what a core is told.
        assert_eq!(device.capabilities(&findings).max_windows, wanted);
        let cq = CompletionQueue::new(&device, 64, false).unwrap();
        let nic = Verbs::new(&device, cq, &findings, LIMITS).unwrap();
        let of_core = nic.capabilities().max_windows;
        assert_eq!(of_core, LIMITS.windows.min(wanted), "{max_mw} {max_mr}");
    }
}

/// What a device with the quirk says of queue pairs of this depth: the lines, and whether one has its fence.
fn unfenced(scenario: Scenario, entries: u32) -> (Vec<String>, bool) {
    let (device, _stub) = Stub::open(scenario).unwrap();
    let domain = Domain::new(&device).unwrap();
    let cq = CompletionQueue::new(&device, entries, false).unwrap();
    let tried = QueuePair::for_trial(&domain, &cq, SHAPE).unwrap();
    assert_eq!(device.complaints(), [""; 0], "a trial");
    let pairs = [(); 3].map(|()| QueuePair::new(&domain, &cq, SHAPE).unwrap());
    let told = device.complaints();
    let fenced = tried.post.is_some();
    assert!(pairs.iter().all(|pair| pair.post.is_some() == fenced));
    QueuePair::new(&domain, &cq, SHAPE).unwrap();
    assert_eq!(device.complaints(), [""; 0], "once");
    (told, fenced)
}

#[test]
fn a_device_that_replays_binds_says_once_why_its_queue_pairs_have_no_fences() {
    let rxe = || Scenario {
        vendor_id: 0x00ff_ffff,
        ..Scenario::default()
    };
    assert_eq!(unfenced(rxe(), 64), (vec![], true));
    for (scenario, limit) in [
        (
            Scenario {
                max_cqe: 191,
                ..rxe()
            },
            "has 192 entries, and max_cqe is 191;",
        ),
        (
            Scenario {
                max_qp_wr: 23,
                ..rxe()
            },
            "has 24 send work requests, and max_qp_wr is 23;",
        ),
        (
            Scenario {
                fails: vec![("alloc_mw", libc::ENOMEM)],
                ..rxe()
            },
            "ibv_alloc_mw",
        ),
        (
            Scenario {
                fails: vec![("reg_mr", libc::ENOMEM)],
                ..rxe()
            },
            "ibv_reg_mr of 64 B",
        ),
    ] {
        // A card needs none.
        let card = Scenario {
            vendor_id: 0x02c9,
            ..scenario.clone()
        };
        assert_eq!(unfenced(card, 64), (vec![], false));
        let (told, fenced) = unfenced(scenario, 64);
        assert!(!fenced, "{limit}");
        let [line] = &told[..] else {
            panic!("{told:#?}");
        };
        for part in ["stub0", "a lost packet may stop one", limit] {
            assert!(line.contains(part), "{line}");
        }
    }
}

/// `rdma-core` answers EOPNOTSUPP for what a provider does not have: that is no news. Anything else is.
#[test]
fn a_provider_without_thread_domains_is_passed_over_and_one_that_refuses_is_told_of() {
    // rxe.
    let (device, _stub) = Stub::open(Scenario::default()).unwrap();
    let domain = Domain::new(&device).unwrap();
    assert!(!domain.has_thread_domain());
    assert_eq!(domain.note(), None);
    assert_eq!(domain.base.raw, domain.queues.raw);
    let cq = CompletionQueue::in_domain(&domain, 64, false).unwrap();
    assert!(!cq.is_single_threaded());
    assert_eq!(cq.note(&device), None);

    for call in ["alloc_td", "alloc_parent_domain"] {
        for (errno, told) in [
            (libc::EOPNOTSUPP, false),
            (libc::ENOMEM, true),
            (libc::EINVAL, true),
            (libc::EACCES, true),
        ] {
            let (device, stub) = Stub::open(failing(call, errno)).unwrap();
            let domain = Domain::new(&device).unwrap();
            assert!(!domain.has_thread_domain());
            assert_eq!(domain.note().is_some(), told, "{call} {errno}");
            if let Some(note) = domain.note() {
                assert!(
                    note.starts_with(&format!("ibv_{call} on device stub0: ")),
                    "{note}"
                );
            }
            // A thread domain that nothing was made in does not stay.
            let lost: &[&str] = match call {
                "alloc_td" => &[],
                _ => &["dealloc_td"],
            };
            assert_eq!(stub.destroyed(), lost);
            // All that the domain is for can be made.
            let cq = CompletionQueue::in_domain(&domain, 64, false).unwrap();
            assert!(!cq.is_single_threaded());
            QueuePair::new(&domain, &cq, SHAPE).unwrap();
        }
    }
    for (errno, told) in [(libc::EOPNOTSUPP, false), (libc::ENOMEM, true)] {
        let (device, stub) = Stub::open(failing("create_cq_ex", errno)).unwrap();
        let domain = Domain::new(&device).unwrap();
        let cq = CompletionQueue::in_domain(&domain, 64, false).unwrap();
        assert!(domain.has_thread_domain() && !cq.is_single_threaded());
        assert_eq!(cq.note(&device).is_some(), told, "{errno}");
        let made = stub.made();
        assert_eq!(calls(&made).last(), Some(&"create_cq"));
        // It holds no domain that it was not made in.
        drop(domain);
        assert!(stub.destroyed().contains(&"dealloc_parent_domain"));
    }
}

#[test]
fn messages_ride_inside_as_far_as_the_device_grants_it_and_no_further_than_was_asked() {
    for (granted, wish, inline) in [
        (0, 0, 0),
        (0, 64, 0),
        (64, 0, 0),
        (64, 64, 64),
        // Refused, and then what the device grants unasked.
        (64, 65, 64),
        (64, 256, 64),
        (256, 64, 64),
        (256, 256, 256),
        (256, 512, 256),
    ] {
        let scenario = Scenario {
            inline: granted,
            ..lock_free()
        };
        let (device, stub) = Stub::open(scenario).unwrap();
        let domain = Domain::new(&device).unwrap();
        let cq = CompletionQueue::in_domain(&domain, 64, false).unwrap();
        let shape = Shape {
            inline: wish,
            ..SHAPE
        };
        let pair = QueuePair::new(&domain, &cq, shape).unwrap();
        assert_eq!(pair.inline(), inline, "{granted} {wish}");
        let mut nic = Verbs::new(&device, cq, &Findings::default(), LIMITS).unwrap();
        let qp = nic.adopt(pair).unwrap();
        let lkey = nic.add_memory(memory(&domain)).unwrap();
        for length in [1, 63, 64, 65, 255, 256, 257] {
            let message = Sge {
                address: START,
                length,
                lkey,
            };
            let invalidate = None;
            nic.queue(
                qp,
                WrId(1),
                true,
                SendWr::Send {
                    message,
                    invalidate,
                },
            );
            nic.doorbell(qp).unwrap();
            let [posted] = stub.sent().try_into().unwrap();
            assert_eq!(
                posted.send_flags & IBV_SEND_INLINE != 0,
                length <= inline,
                "{granted} {wish} {length}"
            );
            stub.complete(posted.wr_id, 0);
            let mut burst = o2poll_dataplane::nic::Burst::new();
            nic.poll(&mut burst).unwrap();
            assert_eq!(burst.len(), 1);
        }
    }
}

/// Each way to fail says where, and what to do.
#[test]
fn a_device_that_cannot_be_had_is_named_with_the_remedy() {
    let list = |errno| Stub::open(failing("get_device_list", errno)).unwrap_err();
    let no_kernel = list(libc::ENOSYS);
    assert!(matches!(no_kernel, DeviceError::NoKernel(_)));
    assert!(
        no_kernel.to_string().contains("modprobe ib_uverbs"),
        "{no_kernel}"
    );

    let absent = Scenario {
        there: false,
        ..Scenario::default()
    };
    let absent = Stub::open(absent).unwrap_err().to_string();
    assert!(absent.contains("no RDMA device stub0"), "{absent}");
    assert!(
        absent.contains("there are: none") && absent.contains("rdma link show"),
        "{absent}"
    );

    for (call, errno, remedies) in [
        (
            "open_device",
            libc::ENOENT,
            &["/dev/infiniband", "modprobe ib_uverbs"][..],
        ),
        (
            "open_device",
            libc::ENXIO,
            &["/dev/infiniband", "modprobe ib_uverbs"],
        ),
        (
            "open_device",
            libc::EACCES,
            &["access to /dev/infiniband/*"],
        ),
        ("open_device", libc::EPERM, &["access to /dev/infiniband/*"]),
        ("open_device", libc::ENOMEM, &["ulimit -l", "LimitMEMLOCK="]),
        (
            "query_device",
            libc::EACCES,
            &["access to /dev/infiniband/*"],
        ),
    ] {
        let error = Stub::open(failing(call, errno)).unwrap_err();
        assert_told(&error, call, errno, remedies);
    }
}

#[test]
fn memory_and_queues_that_cannot_be_had_are_named_with_the_remedy() {
    let room = &["ulimit -l", "LimitMEMLOCK="][..];
    let access = &["access to /dev/infiniband/*"][..];
    for (errno, remedies) in [
        (libc::ENOMEM, room),
        (libc::EACCES, access),
        (libc::EPERM, access),
    ] {
        for call in ["alloc_pd", "reg_mr", "alloc_mw", "create_cq", "create_qp"] {
            // Without thread domains, so that `create_cq` is called.
            let scenario = Scenario {
                fails: vec![(call, errno)],
                ..Scenario::default()
            };
            let (device, _stub) = Stub::open(scenario).unwrap();
            let error = all_of(&device).unwrap_err();
            assert_told(&error, call, errno, remedies);
        }
    }
    let (device, _stub) = Stub::open(failing("create_comp_channel", libc::EMFILE)).unwrap();
    let error = CompletionQueue::new(&device, 64, true).unwrap_err();
    assert_told(&error, "create_comp_channel", libc::EMFILE, &[]);
    // Less may be had.
    let (device, _stub) = Stub::open(failing("create_qp", libc::ENOMEM)).unwrap();
    let error = all_of(&device).unwrap_err();
    assert!(error.to_string().contains("peer_credits"), "{error}");
}

/// Larger than the device says that it can be, nothing is asked for.
#[test]
fn queues_that_are_larger_than_the_device_are_told_with_what_it_has() {
    let (device, stub) = Stub::open(lock_free()).unwrap();
    let domain = Domain::new(&device).unwrap();
    let most = u32::try_from(device.attributes().max_cqe).unwrap();
    let cq = CompletionQueue::new(&device, most, false).unwrap();
    let mut told = vec![
        CompletionQueue::new(&device, most + 1, false).unwrap_err(),
        CompletionQueue::in_domain(&domain, u32::MAX, false).unwrap_err(),
    ];
    for shape in [
        Shape {
            send_depth: (1 << 15) + 1,
            ..SHAPE
        },
        Shape {
            recv_depth: u32::MAX,
            ..SHAPE
        },
        Shape {
            max_sge: 31,
            ..SHAPE
        },
    ] {
        told.push(QueuePair::new(&domain, &cq, shape).unwrap_err());
    }
    for error in told {
        assert!(matches!(error, DeviceError::TooMany { .. }), "{error}");
        let text = error.to_string();
        assert!(
            text.contains("were asked for, and device stub0 has"),
            "{text}"
        );
    }
    assert_eq!(stub.asked("create_cq") + stub.asked("create_qp"), 1);
}

#[test]
fn a_port_that_carries_nothing_is_named_before_anything_is_tried_over_it() {
    for (link_layer, remedy) in [
        (IBV_LINK_LAYER_ETHERNET, "bring its network interface up"),
        (IBV_LINK_LAYER_INFINIBAND, "subnet manager"),
    ] {
        let scenario = Scenario {
            state: IBV_PORT_DOWN,
            link_layer,
            ..lock_free()
        };
        let (device, stub) = Stub::open(scenario).unwrap();
        let error = probe(&device, 1).unwrap_err();
        assert!(matches!(error, DeviceError::PortDown { port: 1, .. }));
        let text = error.to_string();
        assert!(
            text.contains("port 1 of device stub0 is not active"),
            "{text}"
        );
        assert!(text.contains(remedy), "{text}");
        assert!(stub.made().is_empty());
    }
    let (device, _stub) = Stub::open(lock_free()).unwrap();
    for wrong in [0, 2, 255] {
        for error in [
            probe(&device, wrong).unwrap_err(),
            device.port(wrong).unwrap_err(),
        ] {
            let text = error.to_string();
            assert!(
                text.contains(&format!("has no port {wrong}: 1 of them")),
                "{text}"
            );
        }
    }
    let (device, _stub) = Stub::open(failing("query_port", libc::EIO)).unwrap();
    assert_told(&device.port(1).unwrap_err(), "query_port", libc::EIO, &[]);
}

#[test]
fn a_port_without_an_address_says_so() {
    let scenario = Scenario {
        gids: &[],
        ..lock_free()
    };
    let (device, _stub) = Stub::open(scenario).unwrap();
    for error in [device.gid(1).unwrap_err(), probe(&device, 1).unwrap_err()] {
        assert!(
            matches!(error, DeviceError::NoGid { port: 1, .. }),
            "{error}"
        );
        let text = error.to_string();
        assert!(
            text.contains("port 1 of device stub0 has no address"),
            "{text}"
        );
        assert!(text.contains("give its network interface one"), "{text}");
    }
    // A table with holes is not one without addresses.
    let scenario = Scenario {
        gids: &[3, 5],
        ..lock_free()
    };
    let (device, _stub) = Stub::open(scenario).unwrap();
    assert_eq!(device.gid(1).unwrap().index, 3);
    let error = device.gid(2).unwrap_err();
    assert!(
        matches!(error, DeviceError::NoGid { port: 2, .. }),
        "{error}"
    );
    // The table could not be read: with the error of the kernel, not with that of the call before.
    let (device, _stub) = Stub::open(failing("query_gid_table", libc::EACCES)).unwrap();
    let remedies = &["access to /dev/infiniband/*"][..];
    assert_told(
        &device.gid(1).unwrap_err(),
        "query_gid_table",
        libc::EACCES,
        remedies,
    );
}

#[test]
fn locked_memory_that_runs_out_while_a_device_is_tried_is_told_with_the_remedy() {
    let (device, stub) = Stub::open(failing("reg_mr", libc::ENOMEM)).unwrap();
    let error = probe(&device, 1).unwrap_err();
    assert_told(&error, "reg_mr", libc::ENOMEM, &["ulimit -l"]);
    // And nothing of the attempt is left.
    let made = stub.made().len() - 1;
    assert_eq!(stub.destroyed().len(), made + 1);
}

/// A queue pair with all that it stands on.
fn all_of(device: &Device) -> Result<(), DeviceError> {
    let domain = Domain::new(device)?;
    let base = core::ptr::NonNull::dangling();
    // SAFETY: this provider does nothing with it.
    let _memory = unsafe { domain.register(base, 1, Rights::LOCAL_WRITE) }?;
    let _window = domain.window()?;
    let cq = CompletionQueue::in_domain(&domain, 64, false)?;
    QueuePair::new(&domain, &cq, SHAPE).map(drop)
}

#[track_caller]
fn assert_told(error: &DeviceError, call: &str, errno: i32, remedies: &[&str]) {
    let text = error.to_string();
    let (what, source) = match error {
        DeviceError::Call { what, source, .. } => (*what, source),
        DeviceError::Register { source, .. } => ("ibv_reg_mr", source),
        _ => panic!("{text}"),
    };
    assert_eq!(what, format!("ibv_{call}"), "{text}");
    assert_eq!(source.raw_os_error(), Some(errno), "{text}");
    assert!(text.contains("on device stub0"), "{text}");
    for remedy in remedies {
        assert!(text.contains(remedy), "{text}");
    }
}
