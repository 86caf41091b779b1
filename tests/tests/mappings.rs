//! The pool of mappings: found again, given back, unmapped in batches; and whatever can go wrong between the core and the
//! control side that makes them.

use o2poll_dataplane::endpoint::{EntryOptions, Error, Event, Operation, Submission};
use o2poll_dataplane::memory::PageList;
use o2poll_dataplane::nic::{RKey, Status};
use o2poll_dataplane::poller::{Order, Reason};
use o2poll_dataplane::wire::{Body, Done, lnet};
use o2poll_soft::Profile;
use o2poll_tests::lab::told;
use o2poll_tests::lend::alone;
use o2poll_tests::raw_peer::Grant;
use o2poll_tests::{Cut, Job, Jobs, Lab, Setup, World};

type Memory = &'static mut PageList<'static>;

const GET: Operation = Operation::Get { optimized: true };
const ROUTED_GET: Operation = Operation::Get { optimized: false };
const PUT: Operation = Operation::Put {
    hdr_data: 7,
    ack: true,
};
const BITS: u64 = 7;
const LENGTH: u32 = 20_000;

fn setup(pool: usize, trigger: u32) -> Setup {
    let mut setup = Setup::new(Profile::mthca());
    setup.memory = 4 << 20;
    setup.shape.connections = 4;
    setup.shape.mappings = pool;
    setup.registration.flush_trigger = trigger;
    setup.timeout = 4000;
    setup.abandon = 4000;
    setup
}

fn lab(pool: usize, trigger: u32) -> Lab {
    Lab::connected(setup(pool, trigger), 2)
}

/// A GET into this memory, as far as the peer's knowledge of its key.
fn asked(lab: &mut Lab, token: u64, memory: Memory) -> Grant {
    let connection = lab.connection(0);
    lab.node
        .submit(World::request(connection, token, BITS, 0, GET, memory));
    lab.receive(0).grant()
}

/// The peer writes so many bytes, and says so; the memory comes back.
fn answered(lab: &mut Lab, grant: Grant, fill: u8) -> Memory {
    let id = lab.peers[0].write(grant.key, grant.address, &[fill; 4000]);
    assert_eq!(lab.outcome(0, id), Ok(()));
    lab.peers[0].say(Body::GetDone(grant.done(4000)));
    let Event::Done {
        outcome, memory, ..
    } = lab.event()
    else {
        panic!("not done");
    };
    assert_eq!(outcome, Ok(4000));
    let first = memory.chunks().next().expect("not empty");
    assert!(first[..4000].iter().all(|byte| *byte == fill));
    memory
}

fn get(lab: &mut Lab, memory: Memory) -> (RKey, Memory) {
    let grant = asked(lab, 1, memory);
    (grant.key, answered(lab, grant, 0x5a))
}

/// A PUT of the peer into exported memory at an offset.
fn put(lab: &mut Lab, bits: u64) -> RKey {
    let request = lab.peers[0].put_req(99, bits, LENGTH);
    lab.peers[0].say(request);
    let grant = lab.receive(0).grant();
    let id = lab.peers[0].write(grant.key, grant.address, &[3; 100]);
    assert_eq!(lab.outcome(0, id), Ok(()));
    lab.peers[0].say(Body::PutDone(grant.done(100)));
    assert_eq!(told(lab.event()), Ok(100));
    grant.key
}

/// Hits, misses, mappings alive, and those of them that peers could use without a transfer.
fn counts(lab: &Lab) -> [u64; 4] {
    let counters = lab.node.counters;
    [
        counters.mapping_hits.get(),
        counters.mapping_misses.get(),
        counters.mappings_alive.get(),
        counters.mappings_exposed.get(),
    ]
}

#[test]
fn the_same_memory_of_the_same_owner_is_mapped_once() {
    let mut lab = lab(8, 8);
    let memory = lab.node.arena.flat(LENGTH, 5);
    let (first, memory) = get(&mut lab, memory);
    assert_eq!(counts(&lab), [0, 1, 1, 1]);
    let (again, memory) = get(&mut lab, memory);
    assert_eq!(again, first);
    assert_eq!(counts(&lab), [1, 1, 1, 1]);
    assert_eq!(lab.node.counters.mappings.get(), 2);
    // Taken out and put back, it is the next owner's.
    let range = memory.pop().expect("one range");
    memory.push(range).expect("room");
    let (other, memory) = get(&mut lab, memory);
    assert_ne!(other, first);
    assert_eq!(counts(&lab), [1, 2, 2, 2]);
    // In use, it is no exposure; it is the peer's to use.
    let grant = asked(&mut lab, 2, memory);
    assert_eq!(counts(&lab), [2, 2, 2, 1]);
    answered(&mut lab, grant, 1);
    assert_eq!(lab.node.maps.made, 2);
    assert!(lab.node.maps.batches.is_empty());
    lab.end();
}

#[test]
fn an_entry_that_was_attached_anew_is_another_owner() {
    let mut lab = lab(8, 8);
    let options = EntryOptions::PUT | EntryOptions::EVENTS;
    let mut keys = Vec::new();
    lab.export(BITS, options, LENGTH);
    for _ in 0..2 {
        keys.push(put(&mut lab, BITS));
    }
    assert_eq!(keys[0], keys[1]);
    assert_eq!(counts(&lab), [1, 1, 1, 1]);
    // The same ranges, detached and attached.
    let Event::Detached {
        entry: Some(mut entry),
        ..
    } = detach(&mut lab)
    else {
        panic!("not detached");
    };
    entry.match_bits.0 += 1;
    lab.node.submit(Submission::Attach(entry));
    assert!(matches!(lab.event(), Event::Attached { .. }));
    assert_ne!(put(&mut lab, BITS + 1), keys[0]);
    assert_eq!(counts(&lab), [1, 2, 2, 2]);
    lab.end();
}

/// Detaches the entry in the first slot.
fn detach(lab: &mut Lab) -> Event<'static> {
    let entry = o2poll_dataplane::pool::Handle::from_bits(0);
    lab.node.submit(Submission::Detach { entry });
    lab.event()
}

#[test]
fn unused_mappings_are_unmapped_together_when_enough_of_them_stand() {
    let mut lab = lab(8, 4);
    let mut keys = Vec::new();
    for number in 1..=10 {
        let memory = lab.node.arena.flat(LENGTH, 5);
        let (key, _) = get(&mut lab, memory);
        assert!(!keys.contains(&key), "a key that is used again");
        keys.push(key);
        lab.settle();
        let unused = number % 4;
        assert_eq!(counts(&lab)[2..], [unused, unused], "{number}");
    }
    assert_eq!(lab.node.maps.batches, [4, 4]);
    assert_eq!(lab.node.counters.mapping_flushes.get(), 2);
    assert_eq!(lab.node.counters.mappings_unmapped.get(), 8);
    lab.end();
}

#[test]
fn without_a_cache_each_mapping_serves_one_transfer() {
    let mut setup = setup(8, 1);
    setup.registration.cache_mappings = false;
    let mut lab = Lab::connected(setup, 2);
    let mut memory = lab.node.arena.flat(LENGTH, 5);
    let mut last = RKey(0);
    for round in 1..=5 {
        let (key, back) = get(&mut lab, memory);
        memory = back;
        assert_ne!(key, last);
        last = key;
        lab.settle();
        assert_eq!(counts(&lab), [0, round, 0, 0]);
    }
    assert_eq!(lab.node.maps.batches, [1; 5]);
    lab.end();
}

/// What it costs that a key outlives its transfer, and when that ends.
#[test]
fn a_peer_reaches_the_memory_until_the_batch_is_unmapped_and_no_longer() {
    let mut lab = lab(8, 2);
    let memory = lab.node.arena.flat(LENGTH, 5);
    let at = memory.pieces()[0].address;
    let grant = asked(&mut lab, 1, memory);
    answered(&mut lab, grant, 1);
    assert_eq!(lab.node.counters.mappings_exposed.get(), 1);
    let late = lab.peers[0].write(grant.key, grant.address, &[0xbd; 10]);
    assert_eq!(lab.outcome(0, late), Ok(()));
    assert_eq!(
        lab.node.arena.peek(at, 11)[..11],
        [&[0xbd; 10][..], &[1]].concat()
    );
    // It reaches nothing else.
    let memory = lab.node.arena.flat(LENGTH, 5);
    get(&mut lab, memory);
    lab.settle();
    assert_eq!(counts(&lab)[2..], [0, 0]);
    assert_eq!(lab.node.poller.nic().gauges().live_keys, 0);
    let late = lab.peers[0].write(grant.key, grant.address, &[0xaa; 10]);
    assert_eq!(lab.outcome(0, late), Err(Status::RemoteAccess));
    assert!(matches!(lab.gone(lab.connection(0)), Reason::Device(_)));
    assert_eq!(lab.node.arena.peek(at, 10), [0xbd; 10]);
    lab.works(1);
    lab.end();
}

#[test]
fn a_key_that_a_lost_transfer_gave_out_serves_no_other() {
    for cancels in [false, true] {
        let mut lab = lab(8, 8);
        let memory = lab.node.arena.flat(LENGTH, 5);
        let grant = asked(&mut lab, 1, memory);
        let connection = lab.connection(0);
        if cancels {
            lab.cancel(1);
            lab.settle();
            assert!(lab.node.events.pop().is_none(), "the peer may write yet");
            lab.peers[0].say(Body::GetDone(grant.done(0)));
        } else {
            lab.node.order(Order::Close { connection });
        }
        let Event::Done {
            outcome, memory, ..
        } = lab.event()
        else {
            panic!("not done");
        };
        assert!(outcome.is_err());
        if !cancels {
            lab.settle();
            lab.connect(0);
        }
        let (key, _) = get(&mut lab, memory);
        assert_ne!(key, grant.key);
        assert_eq!(counts(&lab), [0, 2, 2, 2]);
        lab.end();
    }
}

/// What ends a transfer that waits for its mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Blow {
    Cancel,
    TimeOut,
    Close,
    Refuse,
    Spoil,
    Stop,
}

const BLOWS: [Blow; 6] = [
    Blow::Cancel,
    Blow::TimeOut,
    Blow::Close,
    Blow::Refuse,
    Blow::Spoil,
    Blow::Stop,
];

fn strike(lab: &mut Lab, blow: Blow, token: u64) -> Error {
    match blow {
        Blow::Cancel => {
            lab.cancel(token);
            Error::Cancelled
        }
        Blow::TimeOut => {
            lab.now.0 += 4001;
            Error::TimedOut
        }
        Blow::Close => {
            let connection = lab.connection(0);
            lab.node.order(Order::Close { connection });
            Error::ConnectionClosed
        }
        Blow::Refuse => {
            lab.node.maps.refuse = true;
            lab.node.maps.hold = false;
            Error::Unmappable
        }
        Blow::Spoil => {
            lab.node.maps.spoil = true;
            lab.node.maps.hold = false;
            Error::Unmappable
        }
        Blow::Stop => {
            lab.node.order(Order::Stop);
            Error::ConnectionClosed
        }
    }
}

#[test]
fn a_get_that_waits_for_its_mapping_can_end_and_the_mapping_stays_for_the_next() {
    for blow in BLOWS {
        let mut lab = lab(8, 8);
        lab.node.maps.hold = true;
        let memory = lab.node.arena.flat(LENGTH, 5);
        let connection = lab.connection(0);
        lab.node
            .submit(World::request(connection, 1, BITS, 0, GET, memory));
        lab.settle();
        assert_eq!(lab.node.maps.asked.len(), 1);
        assert!(lab.peers[0].inbox.is_empty(), "nothing is asked before");
        let why = strike(&mut lab, blow, 1);
        let Event::Done {
            outcome, memory, ..
        } = lab.event()
        else {
            panic!("not done");
        };
        assert_eq!(outcome, Err(why), "{blow:?}");
        if blow == Blow::Stop {
            lab.end();
            continue;
        }
        // The answer comes late.
        (
            lab.node.maps.hold,
            lab.node.maps.refuse,
            lab.node.maps.spoil,
        ) = (false, false, false);
        lab.settle();
        let late = u64::from(!matches!(blow, Blow::Refuse | Blow::Spoil));
        assert_eq!(counts(&lab), [0, 1, late, 0], "{blow:?}");
        assert_eq!(lab.node.counters.mapping_refusals.get(), 1 - late);
        assert_eq!(lab.node.counters.unmappable.get(), 1 - late);
        if blow == Blow::Close {
            lab.connect(0);
        } else {
            assert!(lab.node.gone.is_empty(), "{blow:?} costs no connection");
        }
        get(&mut lab, memory);
        assert_eq!(counts(&lab), [late, 2 - late, 1, 1], "{blow:?}");
        lab.end();
    }
}

#[test]
fn a_peer_whose_sink_is_not_mapped_is_told_so_and_keeps_its_connection() {
    for blow in BLOWS {
        if blow == Blow::Cancel {
            continue;
        }
        let mut lab = lab(8, 8);
        lab.node.maps.hold = true;
        lab.export(BITS, EntryOptions::PUT | EntryOptions::EVENTS, LENGTH);
        let request = lab.peers[0].put_req(99, BITS, LENGTH);
        lab.peers[0].say(request);
        lab.settle();
        assert_eq!(lab.node.maps.asked.len(), 1);
        let why = strike(&mut lab, blow, 0);
        let status = match blow {
            Blow::TimeOut => -110,
            _ => -12,
        };
        if !matches!(blow, Blow::Close | Blow::Stop) {
            let answer = lab.receive(0);
            let told = Done { cookie: 99, status };
            assert_eq!(answer.message().body, Body::PutNak(told), "{blow:?}");
        }
        assert_eq!(told(lab.event()), Err(why), "{blow:?}");
        (
            lab.node.maps.hold,
            lab.node.maps.refuse,
            lab.node.maps.spoil,
        ) = (false, false, false);
        lab.settle();
        if matches!(blow, Blow::TimeOut | Blow::Refuse | Blow::Spoil) {
            assert!(lab.node.gone.is_empty(), "{blow:?}");
            put(&mut lab, BITS);
        }
        lab.end();
    }
}

/// A REPLY too long for a message comes as a PUT_REQ, and is turned down like one.
#[test]
fn a_reply_whose_sink_is_not_mapped_is_turned_down() {
    for blow in BLOWS {
        let mut lab = lab(8, 8);
        lab.node.maps.hold = true;
        let memory = lab.node.arena.flat(LENGTH, 5);
        let connection = lab.connection(0);
        lab.node
            .submit(World::request(connection, 1, BITS, 0, ROUTED_GET, memory));
        let handle = lab.receive(0).handle();
        let header = lab.peers[0].header(LENGTH, lnet::Body::Reply { handle });
        lab.peers[0].say(Body::PutReq { header, cookie: 98 });
        lab.settle();
        assert_eq!(lab.node.maps.asked.len(), 1);
        let why = strike(&mut lab, blow, 1);
        let status = match blow {
            Blow::TimeOut | Blow::Cancel => -110,
            _ => -12,
        };
        if !matches!(blow, Blow::Close | Blow::Stop) {
            let answer = lab.receive(0);
            let told = Done { cookie: 98, status };
            assert_eq!(answer.message().body, Body::PutNak(told), "{blow:?}");
        }
        assert_eq!(told(lab.event()), Err(why), "{blow:?}");
        if !matches!(blow, Blow::Close | Blow::Stop) {
            (
                lab.node.maps.hold,
                lab.node.maps.refuse,
                lab.node.maps.spoil,
            ) = (false, false, false);
            lab.settle();
            assert!(lab.node.gone.is_empty(), "{blow:?}");
            lab.works(0);
        }
        lab.end();
    }
}

/// Of two mappings one is for our own transfers: a second GET waits for it, and a peer's PUT does not.
#[test]
fn our_own_transfers_leave_the_peers_their_half_of_the_pool() {
    let mut lab = lab(2, 2);
    let options = EntryOptions::PUT | EntryOptions::EVENTS;
    lab.export(BITS, options, LENGTH);
    let first = lab.node.arena.flat(LENGTH, 5);
    let grant = asked(&mut lab, 1, first);
    let second = lab.node.arena.flat(LENGTH, 5);
    let connection = lab.connection(0);
    lab.node
        .submit(World::request(connection, 2, BITS, 0, GET, second));
    lab.settle();
    assert!(lab.peers[0].inbox.is_empty(), "the second waits");
    assert!(lab.node.counters.waits.get() != 0);
    put(&mut lab, BITS);
    // An unused mapping is no help to who may not have another.
    lab.settle();
    assert!(lab.peers[0].inbox.is_empty());
    answered(&mut lab, grant, 1);
    let grant = lab.receive(0).grant();
    answered(&mut lab, grant, 2);
    lab.end();
}

/// The trigger is never reached, and places are needed: unused mappings make room.
#[test]
fn a_pool_whose_places_are_all_taken_is_flushed_before_its_time() {
    let mut lab = lab(3, 3);
    let held = lab.node.arena.flat(LENGTH, 5);
    let grant = asked(&mut lab, 1, held);
    for _ in 0..5 {
        let memory = lab.node.arena.flat(LENGTH, 5);
        let connection = lab.connection(0);
        lab.node
            .submit(World::request(connection, 2, BITS, 0, GET, memory));
        let other = lab.receive(0).grant();
        answered(&mut lab, other, 4);
    }
    assert!(lab.node.maps.batches.iter().all(|batch| *batch <= 2));
    assert_eq!(lab.node.maps.batches.iter().sum::<usize>(), 4);
    answered(&mut lab, grant, 1);
    lab.end();
}

#[test]
fn two_transfers_of_the_same_memory_wait_for_one_mapping() {
    let mut lab = lab(8, 8);
    lab.export(BITS, EntryOptions::PUT | EntryOptions::EVENTS, LENGTH);
    lab.node.maps.hold = true;
    for cookie in [5, 6] {
        let request = lab.peers[0].put_req(cookie, BITS, LENGTH);
        lab.peers[0].say(request);
    }
    lab.settle();
    assert_eq!(lab.node.maps.asked.len(), 1);
    lab.node.maps.hold = false;
    let grants = [(); 2].map(|()| lab.receive(0).grant());
    assert_eq!(grants[0].key, grants[1].key);
    assert_eq!(counts(&lab), [1, 1, 1, 0]);
    for grant in grants {
        lab.peers[0].say(Body::PutDone(grant.done(0)));
        assert_eq!(told(lab.event()), Ok(0));
    }
    assert_eq!(counts(&lab), [1, 1, 1, 1]);
    lab.end();
}

/// What no list of pages covers goes through a staging buffer, which is mapped as a whole, and once.
#[test]
fn a_staging_buffer_has_a_mapping_of_its_own() {
    let mut setup = setup(8, 8);
    setup.shape.staging = 1;
    let mut lab = Lab::connected(setup, 2);
    for length in [LENGTH, 3 * LENGTH, 5000] {
        let memory = lab.node.arena.list(&[length / 2, length / 2], 3, 5);
        let pieces = memory.pieces().to_vec();
        let grant = asked(&mut lab, 1, memory);
        assert_eq!(grant.length, length);
        let id = lab.peers[0].write(grant.key, grant.address, &[0x5a; 4000]);
        assert_eq!(lab.outcome(0, id), Ok(()));
        lab.peers[0].say(Body::GetDone(grant.done(4000)));
        assert_eq!(told(lab.event()), Ok(4000));
        let first = lab.node.arena.peek(pieces[0].address, 2500);
        assert!(first.iter().all(|byte| *byte == 0x5a));
    }
    assert_eq!(lab.node.counters.stagings.get(), 3);
    assert_eq!(counts(&lab), [2, 1, 1, 1]);
    lab.end();
}

/// Everything at once, with a control side that answers when it likes.
#[test]
fn all_transfers_move_while_the_pool_is_short_and_its_control_side_slow() {
    for seed in 0..24_usize {
        alone(|| {
            let mut setup = Setup::new(Profile::mthca());
            setup.shape.staging = [0, 1, 2][seed % 3];
            setup.shape.mappings = [2, 3, 5, 16][seed % 4];
            setup.registration.flush_trigger = [1, 2, 16][seed / 4 % 3];
            setup.registration.cache_mappings = !seed.is_multiple_of(5);
            let mut world = World::new(setup);
            let connection = world.connect_at([1, 2, 8][seed / 2 % 3]);
            let mut jobs = Vec::new();
            for n in 0..12_u16 {
                let operation = [PUT, GET, ROUTED_GET][(usize::from(n) + seed) % 3];
                let odd = Cut {
                    offset: 3,
                    piece: 5000,
                    trim: 1,
                    hole: 8,
                };
                let cut = match n % 4 {
                    0 if setup.shape.staging != 0 => odd,
                    1 => Cut::pages(n),
                    _ => Cut::flat(n * 100),
                };
                let from = usize::from(n / 3 % 2);
                jobs.push(Job::new(
                    from,
                    operation,
                    9000 + u32::from(n) * 4001,
                    cut,
                    cut,
                ));
            }
            let mut state = (seed as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
            Jobs::run(&mut world, connection, &jobs, |world| {
                for node in &mut world.nodes {
                    state ^= state << 13;
                    state ^= state >> 7;
                    state ^= state << 17;
                    if state.is_multiple_of(16) {
                        node.maps.hold ^= true;
                    }
                }
            });
            for node in &world.nodes {
                let counters = node.counters;
                assert_eq!(counters.unmappable.get(), 0);
                let each = counters.mapping_hits.get() + counters.mapping_misses.get();
                assert_eq!(each, counters.mappings.get() + counters.stagings.get());
            }
            world.end();
        });
    }
}
