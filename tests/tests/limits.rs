//! What happens when something is used up: it is refused, or waits, and nothing is lost.

use o2poll_dataplane::endpoint::{
    Entry, EntryOptions, Error, Event, MatchBits, Operation, Portal, Submission, Token,
};
use o2poll_dataplane::poller::Order;
use o2poll_dataplane::wire::{Body, Nid};
use o2poll_soft::{Profile, QueuePair};
use o2poll_tests::lab::told;
use o2poll_tests::{Lab, Setup};

const GET: Operation = Operation::Get { optimized: true };

fn setup() -> Setup {
    let mut setup = Setup::new(Profile::frwr());
    setup.memory = 4 << 20;
    setup.shape.connections = 1;
    setup.shape.waiting = 0;
    setup.shape.entries = 2;
    setup
}

#[test]
fn an_entry_too_many_comes_back_with_its_memory() {
    let mut lab = Lab::connected(setup(), 1);
    for n in 0..2 {
        lab.export(n, EntryOptions::PUT, 100);
    }
    let memory = lab.node.arena.flat(100, 0);
    lab.node.submit(Submission::Attach(Entry {
        token: Token(9),
        portal: Portal(5),
        match_bits: MatchBits(9),
        ignore_bits: MatchBits(0),
        from: Nid::ANY,
        options: EntryOptions::PUT,
        memory,
    }));
    match lab.event() {
        Event::Detached { entry, why } => {
            let entry = entry.expect("with its memory");
            let got = (entry.token, entry.memory.length(), why);
            assert_eq!(got, (Token(9), 100, Some(Error::NoRoom)));
        }
        other => panic!("{other:?}"),
    }
    lab.works(0);
    lab.end();
}

#[test]
fn a_connection_too_many_or_too_deep_is_refused() {
    let mut lab = Lab::connected(setup(), 1);
    let sizes = setup().shape.sizes();
    for depth in [8, 9, 0] {
        let mut terms = lab.terms(0);
        terms.queue_depth = depth;
        lab.node.order(Order::Adopt {
            qp: QueuePair::new(77, 0, 78, sizes.send_wr, sizes.recv_wr),
            terms,
            accepted: false,
            token: 1,
        });
    }
    lab.settle();
    assert_eq!(lab.node.refused, 3);
    lab.works(0);
    // Once there is room, one that fits is taken.
    let connection = lab.connection(0);
    lab.node.order(Order::Close { connection });
    lab.gone(connection);
    lab.connect(0);
    lab.works(0);
    lab.end();
}

/// The application may give up on transfers even when there is no slot for another.
#[test]
fn cancelling_needs_no_free_slot() {
    let mut lab = Lab::connected(setup(), 1);
    let mut asked = Vec::new();
    for token in 0..8 {
        lab.ask(0, token, GET, 5000);
        asked.push(lab.receive(0).grant());
    }
    // A ninth waits in the ring, and gets its turn in the end.
    for token in 0..8 {
        lab.cancel(token);
    }
    lab.ask(0, 8, GET, 5000);
    lab.settle();
    for grant in asked {
        lab.peers[0].say(Body::GetDone(grant.done(0)));
    }
    for _ in 0..8 {
        assert_eq!(told(lab.event()), Err(Error::Cancelled));
    }
    let grant = lab.receive(0).grant();
    lab.peers[0].say(Body::GetDone(grant.done(4)));
    assert_eq!(told(lab.event_of(8)), Ok(4));
    lab.end();
}
