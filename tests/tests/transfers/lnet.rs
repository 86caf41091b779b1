//! What LNet's rules say of matching, cutting, answering and refusing.

use o2poll_dataplane::endpoint::{
    Entry, EntryOptions, Error, Event, Incoming, Landed, MatchBits, Operation, Portal, Request,
    Submission, Token,
};
use o2poll_dataplane::memory::{PageList, Range};
use o2poll_dataplane::nic::LKey;
use o2poll_dataplane::pool::Handle;
use o2poll_dataplane::time::Ticks;
use o2poll_dataplane::wire::{Nid, Pid, ping};
use o2poll_tests::lend::alone;
use o2poll_tests::plot::noise;
use o2poll_tests::{Backend, NAMES, Setup, World};

type List = &'static mut PageList<'static>;

/// Node 0 exports, node 1 initiates.
struct Bench<B: Backend> {
    world: World<B>,
    connection: [Handle; 2],
}

const PUT: Operation = Operation::Put {
    hdr_data: 0x1234_5678_9abc_def0,
    ack: false,
};
const PUT_ACK: Operation = Operation::Put {
    hdr_data: 0x1234_5678_9abc_def0,
    ack: true,
};
const GET: Operation = Operation::Get { optimized: true };
const ROUTED_GET: Operation = Operation::Get { optimized: false };
const ALL: [Operation; 4] = [PUT, PUT_ACK, GET, ROUTED_GET];

/// One that goes as a message, one that does not.
const SIZES: [u32; 2] = [1000, 9000];

impl<B: Backend> Bench<B> {
    fn new() -> Self {
        let mut setup = Setup::new(B::plain());
        setup.memory = 6 << 20;
        setup.timeout = 4000;
        setup.abandon = 4000;
        Self::of(setup)
    }

    fn of(setup: Setup) -> Self {
        let mut world = B::world([setup; 2]);
        let connection = world.connect();
        Self { world, connection }
    }

    fn memory(&mut self, of: usize, length: u32) -> List {
        self.world.nodes[of].arena.flat(length, 5)
    }

    fn attach(&mut self, token: u64, bits: u64, ignore: u64, options: EntryOptions, memory: List) {
        let entry = Entry {
            token: Token(token),
            portal: Portal(5),
            match_bits: MatchBits(bits),
            ignore_bits: MatchBits(ignore),
            from: Nid::ANY,
            options,
            memory,
        };
        assert_eq!(self.attach_entry(entry), None);
    }

    fn attach_entry(&mut self, entry: Entry<'static>) -> Option<Error> {
        self.world.nodes[0].submit(Submission::Attach(entry));
        match self.world.event(0) {
            Event::Attached { .. } => None,
            Event::Detached { why, .. } => why,
            other => panic!("{other:?}"),
        }
    }

    /// Starts a transfer by node 1 with noise in its memory.
    fn start(&mut self, operation: Operation, bits: u64, offset: u32, length: u32) {
        let memory = self.memory(1, length);
        memory.write_at(0, &noise(length, 5));
        let request = World::request(self.connection[1], 1, bits, offset, operation, memory);
        self.world.nodes[1].submit(request);
    }

    fn done(&mut self) -> (Result<u32, Error>, List) {
        match self.world.event(1) {
            Event::Done {
                outcome, memory, ..
            } => (outcome, memory),
            other => panic!("{other:?}"),
        }
    }

    fn transfer(
        &mut self,
        operation: Operation,
        bits: u64,
        offset: u32,
        length: u32,
    ) -> Result<u32, Error> {
        self.start(operation, bits, offset, length);
        self.done().0
    }

    /// What comes of a transfer that is never answered: by its own clock.
    fn transfer_in_vain(
        &mut self,
        operation: Operation,
        bits: u64,
        length: u32,
    ) -> Result<u32, Error> {
        self.start(operation, bits, 0, length);
        self.world.rest();
        let timeout = Ticks(self.world.setup().timeout);
        self.world.now = self.world.now.after(timeout);
        self.done().0
    }

    fn landed(&mut self) -> Landed {
        match self.world.event(0) {
            Event::Landed(landed) => landed,
            other => panic!("{other:?}"),
        }
    }

    fn sent(&mut self, of: usize, kind: &str) -> u64 {
        self.world.nodes[of].poller.nic().last().sent(kind)
    }

    fn end(mut self) {
        self.world.rest();
        assert!(self.world.nodes.iter().all(|node| node.gone.is_empty()));
        self.world.end();
    }
}

fn incoming(operation: Operation) -> Incoming {
    match operation {
        Operation::Put { hdr_data, .. } => Incoming::Put { hdr_data },
        Operation::Get { .. } => Incoming::Get,
    }
}

fn bytes_of(list: &PageList<'_>) -> Vec<u8> {
    list.chunks().flatten().copied().collect()
}

const BOTH: EntryOptions = EntryOptions::PUT.union(EntryOptions::GET);

pub(crate) fn match_bits_ignore_bits_source_and_order_choose_the_entry<B: Backend>() {
    for length in SIZES {
        alone(|| {
            let mut bench = Bench::<B>::new();
            let told = BOTH | EntryOptions::EVENTS;
            for (token, bits, ignore) in
                [(1, 0x10, 0), (2, 0x20, 0x0f), (3, 0x20, 0xff), (4, 0x10, 0)]
            {
                let memory = bench.memory(0, length);
                bench.attach(token, bits, ignore, told, memory);
            }
            let memory = bench.memory(0, length);
            let entry = Entry {
                token: Token(5),
                portal: Portal(5),
                match_bits: MatchBits(0x140),
                ignore_bits: MatchBits(0),
                from: NAMES[0],
                options: told,
                memory,
            };
            assert_eq!(bench.attach_entry(entry), None);
            for operation in ALL {
                for (bits, token) in [(0x10, 1), (0x20, 2), (0x2f, 2), (0x31, 3), (0xd0, 3)] {
                    assert_eq!(bench.transfer(operation, bits, 0, length), Ok(length));
                    let landed = bench.landed();
                    assert_eq!((landed.token, landed.match_bits.0), (Token(token), bits));
                }
            }
            // Bits that no entry has, bits of one that takes another source, a portal that nobody listens on.
            for bits in [0x110, 0x120, 0x140] {
                bench.start(PUT, bits, 0, length);
                let expected = if length > 3976 { 0 } else { length };
                assert_eq!(bench.done().0, Ok(expected));
            }
            bench.world.rest();
            assert_eq!(bench.world.nodes[0].counters.unmatched.get(), 3);
            assert!(bench.world.nodes[0].events.pop().is_none());
            bench.end();
        });
    }
}

pub(crate) fn options_say_what_may_be_done<B: Backend>() {
    let mut bench = Bench::<B>::new();
    let memory = bench.memory(0, 9000);
    bench.attach(1, 1, 0, EntryOptions::PUT, memory);
    let memory = bench.memory(0, 9000);
    bench.attach(2, 2, 0, EntryOptions::GET, memory);
    assert_eq!(bench.transfer(PUT_ACK, 1, 0, 9000), Ok(9000));
    assert_eq!(bench.transfer(PUT_ACK, 2, 0, 9000), Ok(0));
    assert_eq!(bench.transfer(GET, 2, 0, 9000), Ok(9000));
    assert_eq!(bench.transfer(GET, 1, 0, 9000), Err(Error::Peer(-61)));
    bench.end();
}

pub(crate) fn too_long_is_cut_with_truncate_and_matches_nothing_without<B: Backend>() {
    for operation in ALL {
        for length in SIZES {
            // Room for the rest of a message, for the rest of a bulk transfer, for nothing, and beyond the end.
            for (offset, room) in [(0, 700), (0, 8000), (600, 100), (800, 0), (u32::MAX, 0)] {
                alone(|| {
                    let mut bench = Bench::<B>::new();
                    let size = if room == 8000 { 8000 } else { 700 };
                    let cut = length.min(room);
                    let memory = bench.memory(0, size);
                    memory.write_at(0, &noise(size, 3));
                    let options = BOTH | EntryOptions::EVENTS;
                    bench.attach(1, 1, 0, options | EntryOptions::TRUNCATE, memory);
                    bench.start(operation, 1, offset, length);
                    let (outcome, memory) = bench.done();
                    // Who sends a message and asks for no ACK is not told.
                    let told = if operation == PUT && length <= 3976 {
                        length
                    } else {
                        cut
                    };
                    let what =
                        format!("{operation:?} of {length} at {offset} with room for {room}");
                    assert_eq!(outcome, Ok(told), "{what}");
                    let expected = Landed {
                        token: Token(1),
                        operation: incoming(operation),
                        nid: NAMES[1],
                        pid: Pid::LUSTRE,
                        match_bits: MatchBits(1),
                        offset,
                        outcome: Ok(cut),
                    };
                    assert_eq!(bench.landed(), expected, "{what}");
                    if incoming(operation) == Incoming::Get {
                        let mut expected = noise(length, 5);
                        let from = noise(size, 3);
                        for (at, byte) in expected.iter_mut().enumerate().take(cut as usize) {
                            *byte = from[at + offset as usize];
                        }
                        assert!(
                            bytes_of(memory) == expected,
                            "{what}: nothing behind the cut"
                        );
                    }
                    bench.end();
                });
            }
        }
    }
    let mut bench = Bench::<B>::new();
    let memory = bench.memory(0, 8999);
    bench.attach(1, 1, 0, BOTH, memory);
    assert_eq!(bench.transfer(PUT_ACK, 1, 0, 9000), Ok(0));
    assert_eq!(bench.transfer(PUT_ACK, 1, 5000, 4000), Ok(0));
    assert_eq!(
        bench.transfer(GET, 1, u32::MAX, 9000),
        Err(Error::Peer(-61))
    );
    assert_eq!(bench.transfer(PUT_ACK, 1, 4999, 4000), Ok(4000));
    bench.end();
}

pub(crate) fn lu_15851_a_local_offset_moves_on_and_ignores_the_initiators<B: Backend>() {
    let mut bench = Bench::<B>::new();
    let memory = bench.memory(0, 30_000);
    let options = BOTH | EntryOptions::LOCAL_OFFSET | EntryOptions::EVENTS | EntryOptions::TRUNCATE;
    bench.attach(1, 1, 0, options, memory);
    let mut at = 0;
    for (operation, length) in [
        (PUT_ACK, 1000),
        (PUT, 9000),
        (GET, 9000),
        (PUT_ACK, 0),
        (ROUTED_GET, 5000),
        (PUT, 500),
        (PUT_ACK, 9000),
        (GET, 9000),
    ] {
        bench.start(operation, 1, 77, length);
        let (outcome, _) = bench.done();
        let cut = length.min(30_000 - at);
        assert_eq!(outcome, Ok(cut));
        let landed = bench.landed();
        assert_eq!((landed.offset, landed.outcome), (at, Ok(cut)));
        at += cut;
    }
    assert_eq!(at, 30_000);
    bench.end();
}

pub(crate) fn once_is_once_and_the_memory_comes_back_after_the_data<B: Backend>() {
    for operation in ALL {
        for length in SIZES {
            alone(|| {
                let mut bench = Bench::<B>::new();
                let options = BOTH | EntryOptions::ONCE | EntryOptions::EVENTS;
                let memory = bench.memory(0, length);
                bench.attach(1, 1, 0, options, memory);
                let memory = bench.memory(0, length);
                bench.attach(2, 1, 0, options, memory);
                // Both at once: the second finds the first in use.
                bench.start(operation, 1, 0, length);
                bench.start(operation, 1, 0, length);
                assert_eq!((bench.done().0, bench.done().0), (Ok(length), Ok(length)));
                let mut order = Vec::new();
                while order.len() < 4 {
                    match bench.world.event(0) {
                        Event::Landed(landed) => order.push((landed.token.0, "landed")),
                        Event::Detached {
                            entry: Some(entry),
                            why: Some(Error::Used),
                        } => {
                            if incoming(operation) != Incoming::Get {
                                assert!(bytes_of(entry.memory) == noise(length, 5));
                            }
                            order.push((entry.token.0, "back"));
                        }
                        other => panic!("{other:?}"),
                    }
                }
                for token in [1, 2] {
                    let place = |what| order.iter().position(|seen| *seen == (token, what));
                    assert!(place("landed") < place("back"), "{order:?}");
                }
                assert_eq!(bench.transfer(GET, 1, 0, 9000), Err(Error::Peer(-61)));
                bench.end();
            });
        }
    }
}

/// LNet sends no ACK then; its initiator waits in vain, and gives up by its own clock.
pub(crate) fn a_disabled_ack_is_never_sent_and_costs_no_connection<B: Backend>() {
    for length in SIZES {
        alone(|| {
            let mut bench = Bench::<B>::new();
            let options = BOTH | EntryOptions::ACK_DISABLE | EntryOptions::EVENTS;
            let memory = bench.memory(0, length);
            bench.attach(1, 1, 0, options, memory);
            assert_eq!(
                bench.transfer_in_vain(PUT_ACK, 1, length),
                Err(Error::TimedOut)
            );
            assert_eq!(bench.landed().outcome, Ok(length));
            assert_eq!(bench.transfer(PUT, 1, 0, length), Ok(length));
            assert_eq!(bench.landed().outcome, Ok(length));
            bench.end();
        });
    }
}

pub(crate) fn what_matches_nothing<B: Backend>() {
    let mut bench = Bench::<B>::new();
    // A bulk PUT has succeeded with nothing, whether or not it asked for an ACK.
    assert_eq!(bench.transfer(PUT, 1, 0, 9000), Ok(0));
    assert_eq!(bench.transfer(PUT_ACK, 1, 0, 9000), Ok(0));
    // A PUT in a message is dropped, and no ACK comes.
    assert_eq!(bench.transfer(PUT, 1, 0, 100), Ok(100));
    assert_eq!(
        bench.transfer_in_vain(PUT_ACK, 1, 100),
        Err(Error::TimedOut)
    );
    // A GET_REQ is answered with -ENODATA, a GET in a message is dropped.
    assert_eq!(bench.transfer(GET, 1, 0, 9000), Err(Error::Peer(-61)));
    assert_eq!(bench.transfer_in_vain(GET, 1, 100), Err(Error::TimedOut));
    assert_eq!(
        bench.transfer_in_vain(ROUTED_GET, 1, 9000),
        Err(Error::TimedOut)
    );
    assert_eq!(bench.world.nodes[0].counters.unmatched.get(), 7);
    bench.end();
}

pub(crate) fn nothing_at_all_is_moved_on_every_path<B: Backend>() {
    let mut bench = Bench::<B>::new();
    let options = BOTH | EntryOptions::EVENTS;
    let memory = bench.memory(0, 0);
    bench.attach(1, 1, 0, options, memory);
    let memory = bench.memory(0, 10);
    bench.attach(2, 2, 0, options | EntryOptions::TRUNCATE, memory);
    for operation in ALL {
        for (bits, offset, length) in [(1, 0, 0), (2, 0, 0), (2, 10, 0), (2, 99, 0), (2, 10, 9000)]
        {
            assert_eq!(
                bench.transfer(operation, bits, offset, length),
                Ok(0),
                "{operation:?} {bits} {offset} {length}"
            );
            let landed = bench.landed();
            assert_eq!(
                (landed.operation, landed.outcome),
                (incoming(operation), Ok(0))
            );
        }
    }
    // Not a byte by RDMA, and no key for it.
    for node in &mut bench.world.nodes {
        assert_eq!(node.poller.nic().last().writes, 0);
    }
    bench.end();
}

pub(crate) fn each_path_sends_its_own_messages<B: Backend>() {
    for (operation, length, theirs, ours) in [
        (PUT, 1000, "IMMEDIATE", ""),
        (PUT_ACK, 1000, "IMMEDIATE", "IMMEDIATE"),
        (GET, 1000, "IMMEDIATE", "IMMEDIATE"),
        (ROUTED_GET, 1000, "IMMEDIATE", "IMMEDIATE"),
        (PUT, 9000, "PUT_REQ PUT_DONE", "PUT_ACK"),
        (PUT_ACK, 9000, "PUT_REQ PUT_DONE", "PUT_ACK IMMEDIATE"),
        (GET, 9000, "GET_REQ", "GET_DONE"),
        // The REPLY rides in a PUT_REQ.
        (ROUTED_GET, 9000, "IMMEDIATE PUT_ACK", "PUT_REQ PUT_DONE"),
    ] {
        alone(|| {
            let mut bench = Bench::<B>::new();
            let memory = bench.memory(0, length);
            bench.attach(1, 1, 0, BOTH, memory);
            assert_eq!(bench.transfer(operation, 1, 0, length), Ok(length));
            bench.world.rest();
            for (of, kinds) in [(1, theirs), (0, ours)] {
                let sent = bench.world.nodes[of].poller.nic().last().sent;
                let sent: Vec<_> = sent
                    .into_iter()
                    .filter(|(kind, _)| *kind != "NOOP")
                    .collect();
                let mut expected: Vec<_> = kinds.split_whitespace().map(|kind| (kind, 1)).collect();
                expected.sort_unstable();
                assert_eq!(sent, expected, "{operation:?} of {length}");
            }
            bench.end();
        });
    }
}

pub(crate) fn a_ping_is_answered_with_this_nodes_info<B: Backend>() {
    let mut bench = Bench::<B>::new();
    for (operation, length, kind) in [
        (GET, ping::DISCOVERY_SINK, "IMMEDIATE"),
        (GET, 3976, "IMMEDIATE"),
        (GET, 3977, "GET_DONE"),
        (GET, 1 << 20, "GET_DONE"),
        (ROUTED_GET, 5000, "IMMEDIATE"),
        (GET, 16, "IMMEDIATE"),
    ] {
        let before = bench.sent(0, kind);
        let memory = bench.memory(1, length);
        memory.write_at(0, &noise(length, 5));
        bench.world.nodes[1].submit(Submission::Transfer(Request {
            token: Token(1),
            connection: bench.connection[1],
            portal: Portal(ping::PORTAL),
            match_bits: MatchBits(ping::MATCH_BITS),
            remote_offset: 0,
            memory,
            operation,
            timeout: None,
        }));
        let (outcome, memory) = bench.done();
        let told = length.min(48);
        assert_eq!(outcome, Ok(told));
        assert_eq!(bench.sent(0, kind), before + 1, "{length}");
        let there = bytes_of(memory);
        assert!(there[told as usize..] == noise(length, 5)[told as usize..]);
        if length >= 48 {
            let info = ping::PingInfo::decode(&there).unwrap();
            assert_eq!(info.primary(), Some(NAMES[0]));
            assert_eq!(info.pid(), Pid::LUSTRE);
            let entries: Vec<_> = info.entries().collect();
            assert_eq!((entries.len(), entries[0].nid), (1, NAMES[0]));
            assert_eq!(entries[0].status, ping::Status::Up);
            assert!(info.features().contains(ping::Features::PLAIN));
        }
    }
    // A PUT to where pings go lands nowhere.
    let memory = bench.memory(1, 9000);
    bench.world.nodes[1].submit(Submission::Transfer(Request {
        token: Token(1),
        connection: bench.connection[1],
        portal: Portal(ping::PORTAL),
        match_bits: MatchBits(ping::MATCH_BITS),
        remote_offset: 0,
        memory,
        operation: PUT,
        timeout: None,
    }));
    assert_eq!(bench.done().0, Ok(0));
    bench.end();
}

pub(crate) fn what_cannot_be_attached_comes_back<B: Backend>() {
    let mut setup = Setup::new(B::plain());
    setup.shape.entries = 2;
    let mut bench = Bench::<B>::of(setup);
    let entry = |bench: &mut Bench<B>, portal: u32| Entry {
        token: Token(portal.into()),
        portal: Portal(portal),
        match_bits: MatchBits(1),
        ignore_bits: MatchBits(0),
        from: Nid::ANY,
        options: BOTH,
        memory: bench.memory(0, 10),
    };
    let reserved = entry(&mut bench, 0);
    assert_eq!(bench.attach_entry(reserved), Some(Error::ReservedPortal));
    // 4 GiB in two ranges: offsets on the wire have 32 bits. Never touched, so never there.
    let (low, high) = Vec::leak(vec![0_u8; 1 << 32]).split_at_mut(1 << 31);
    let large = entry(&mut bench, 3);
    for half in [low, high] {
        let range = Range::of_bytes(half, LKey(0)).unwrap();
        large.memory.push(range).unwrap();
    }
    assert_eq!(bench.attach_entry(large), Some(Error::NoRoom));
    for portal in [1, 2] {
        let entry = entry(&mut bench, portal);
        assert_eq!(bench.attach_entry(entry), None);
    }
    let third = entry(&mut bench, 3);
    assert_eq!(bench.attach_entry(third), Some(Error::NoRoom));
    bench.end();
}

pub(crate) fn what_cannot_be_sent_comes_back_with_its_memory<B: Backend>() {
    let mut bench = Bench::<B>::new();
    let mut refused = |operation, length: u32, connection: Option<Handle>, expected| {
        let memory = bench.memory(1, length);
        let connection = connection.unwrap_or(bench.connection[1]);
        let request = World::request(connection, 1, 1, 0, operation, memory);
        bench.world.nodes[1].submit(request);
        let (outcome, memory) = bench.done();
        assert_eq!(outcome, Err(expected));
        assert_eq!(memory.length(), u64::from(length));
    };
    for operation in ALL {
        refused(operation, (1 << 20) + 1, None, Error::TooLong);
        let stale = Handle::from_bits(0x77);
        refused(operation, 1, Some(stale), Error::NotConnected);
    }
    let (low, high) = Vec::leak(vec![0_u8; 1 << 32]).split_at_mut(1 << 31);
    let memory = bench.memory(1, 1);
    for half in [low, high] {
        let range = Range::of_bytes(half, LKey(0)).unwrap();
        memory.push(range).unwrap();
    }
    let request = World::request(bench.connection[1], 1, 1, 0, PUT, memory);
    bench.world.nodes[1].submit(request);
    assert_eq!(bench.done().0, Err(Error::TooLong));
    bench.end();
}

pub(crate) fn a_busy_entry_is_detached_when_the_last_transfer_is_out<B: Backend>() {
    for operation in ALL {
        // A device writes and says so without the peer's core.
        if B::REAL && operation == GET {
            continue;
        }
        alone(|| {
            let mut bench = Bench::<B>::new();
            let memory = bench.memory(0, 9000);
            let options = BOTH | EntryOptions::EVENTS;
            let entry = bench.world.export(0, 1, options, memory);
            bench.start(operation, 1, 0, 9000);
            // Turn by turn, so that node 1 stops before it has seen the answer.
            while bench.world.nodes[0].poller.leftovers().transfers == 0 {
                for asleep in [[true, false], [false, true]] {
                    bench.world.asleep = asleep;
                    bench.world.step();
                }
            }
            let detach = |bench: &mut Bench<B>| {
                bench.world.nodes[0].submit(Submission::Detach { entry });
            };
            detach(&mut bench);
            for _ in 0..500 {
                bench.world.step();
            }
            assert!(bench.world.nodes[0].events.pop().is_none(), "{operation:?}");
            // Asking twice is answered at once, with nothing.
            detach(&mut bench);
            let event = bench.world.event(0);
            assert!(matches!(
                event,
                Event::Detached {
                    entry: None,
                    why: None
                }
            ));
            bench.world.asleep = [false; 2];
            assert_eq!(bench.landed().outcome, Ok(9000), "{operation:?}");
            match bench.world.event(0) {
                Event::Detached {
                    entry: Some(entry),
                    why: None,
                } => {
                    let expected = match incoming(operation) {
                        Incoming::Get => vec![0xee; 9000],
                        Incoming::Put { .. } => noise(9000, 5),
                    };
                    assert!(bytes_of(entry.memory) == expected);
                }
                other => panic!("{other:?}"),
            }
            assert_eq!(bench.done().0, Ok(9000));
            assert_eq!(bench.transfer(PUT_ACK, 1, 0, 9000), Ok(0), "gone");
            bench.end();
        });
    }
}

pub(crate) fn a_cancel_in_every_phase_ends_with_one_event_and_leaves_the_connection_whole<
    B: Backend,
>() {
    for operation in ALL {
        for length in [0_usize, 1000, 9000] {
            let mut outcomes = [0, 0];
            for after in moments::<B>(60) {
                alone(|| {
                    let mut setup = Setup::new(B::plain());
                    // What a window does not cover.
                    setup.shape.staging = if B::REAL { 2 } else { 0 };
                    setup.memory = 8 << 20;
                    // Slow, so that the phases lie apart.
                    setup.profile.slice = 600;
                    setup.profile.capabilities.max_sge = 1;
                    setup.shape.writes_at_once = 2;
                    setup.timeout = 4000;
                    setup.abandon = 4000;
                    let mut bench = Bench::<B>::of(setup);
                    let memory = bench.memory(0, 9000);
                    let options = BOTH | EntryOptions::TRUNCATE;
                    bench.attach(1, 1, 0, options, memory);
                    let memory = bench.world.nodes[1]
                        .arena
                        .list(&vec![900; length / 900], 8, 0);
                    let length = u32::try_from(memory.length()).unwrap();
                    let request = World::request(bench.connection[1], 1, 1, 0, operation, memory);
                    bench.world.nodes[1].submit(request);
                    for _ in 0..after {
                        bench.world.step();
                    }
                    let token = Token(1);
                    bench.world.nodes[1].submit(Submission::Cancel { token });
                    match bench.done().0 {
                        Ok(bytes) => {
                            assert_eq!(bytes, length);
                            outcomes[0] += 1;
                        }
                        Err(Error::Cancelled) => outcomes[1] += 1,
                        other => panic!("{operation:?} of {length} after {after}: {other:?}"),
                    }
                    bench.world.rest();
                    assert_eq!(bench.transfer(PUT_ACK, 1, 0, 5000), Ok(5000));
                    bench.end();
                });
            }
            assert!(
                B::REAL || outcomes.iter().all(|count| *count != 0),
                "{outcomes:?}"
            );
        }
    }
}

/// An application that gives up on a PUT whose ACK will never come must not lose the connection for it.
pub(crate) fn a_cancelled_put_whose_ack_never_comes_ends_when_it_is_sent<B: Backend>() {
    for length in SIZES {
        for after in moments::<B>(40) {
            alone(|| {
                let mut bench = Bench::<B>::new();
                let options = BOTH | EntryOptions::ACK_DISABLE;
                let memory = bench.memory(0, length);
                bench.attach(1, 1, 0, options, memory);
                bench.start(PUT_ACK, 1, 0, length);
                for _ in 0..after {
                    bench.world.step();
                }
                let token = Token(1);
                bench.world.nodes[1].submit(Submission::Cancel { token });
                assert_eq!(bench.done().0, Err(Error::Cancelled), "after {after}");
                bench.end();
            });
        }
    }
}

/// Steps after which something is done to a transfer: all up to `most`, or some where a step is no measure of progress.
fn moments<B: Backend>(most: u32) -> Vec<u32> {
    if B::REAL {
        vec![0, 7, 60]
    } else {
        (0..most).collect()
    }
}
