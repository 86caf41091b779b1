//! What a peer can get wrong, and that it costs only its own connection.

mod answers;
mod connections;
mod messages;

use o2poll_dataplane::endpoint::{EntryOptions, Error, Event, Incoming, Operation};
use o2poll_dataplane::nic::{RKey, Status};
use o2poll_dataplane::peer::Stale;
use o2poll_dataplane::poller::{Order, Reason};
use o2poll_dataplane::wire::lnet::{self, WireHandle};
use o2poll_dataplane::wire::{
    Body, ByteOrder, Checksum, ConnParams, Descriptor, Done, Encoding, Fragment, Nid, WireError,
};
use o2poll_soft::Profile;
use o2poll_tests::lab::told;
use o2poll_tests::raw_peer::{RawPeer, get, put};
use o2poll_tests::{Lab, Setup};

const GET: Operation = Operation::Get { optimized: true };
const ROUTED_GET: Operation = Operation::Get { optimized: false };
const PUT: Operation = Operation::Put {
    hdr_data: 1,
    ack: false,
};
const ACKED_PUT: Operation = Operation::Put {
    hdr_data: 1,
    ack: true,
};
const BULK: u32 = 20_000;
const ENTRY: u64 = 42;

fn setup() -> Setup {
    let mut setup = Setup::new(Profile::frwr());
    setup.memory = 4 << 20;
    setup.shape.windows = 32;
    setup
}

fn lab() -> Lab {
    let mut lab = Lab::connected(setup(), 2);
    let options = EntryOptions::PUT | EntryOptions::GET | EntryOptions::TRUNCATE;
    lab.export(ENTRY, options, BULK);
    lab
}

/// Lets the peer do something with a GET and a PUT of it under way, and a GET with another peer. Its
/// connection must end for this reason; then it connects again, and all is well.
fn costs_the_connection(lab: &mut Lab, what: &str, why: Reason, act: impl FnOnce(&mut RawPeer)) {
    while lab.node.events.pop().is_some() {}
    let connection = lab.connection(0);
    let counters = lab.node.counters;
    let before = (
        counters.protocol_errors.get(),
        counters.connections_ended.get(),
    );
    lab.ask(0, 1, GET, BULK);
    lab.receive(0);
    let request = lab.peers[0].put_req(5, ENTRY, BULK);
    lab.peers[0].say(request);
    lab.receive(0);
    lab.ask(1, 2, GET, BULK);
    let other = lab.receive(1).grant();
    act(&mut lab.peers[0]);
    assert_eq!(lab.gone(connection), why, "{what}");
    assert_eq!(
        told(lab.event_of(1)),
        Err(Error::ConnectionClosed),
        "{what}"
    );
    let protocol = u64::from(!matches!(why, Reason::Device(_)));
    let after = (
        counters.protocol_errors.get(),
        counters.connections_ended.get(),
    );
    assert_eq!(after, (before.0 + protocol, before.1 + 1), "{what}");
    lab.peers[1].say(Body::GetDone(other.done(3)));
    assert_eq!(told(lab.event_of(2)), Ok(3), "{what}");
    lab.connect(0);
}

fn ends_well(mut lab: Lab) {
    lab.works(0);
    lab.works(1);
    lab.settle();
    lab.end();
}

fn patch(mut bytes: Vec<u8>, at: usize, with: &[u8]) -> Vec<u8> {
    bytes[at..at + with.len()].copy_from_slice(with);
    bytes
}

fn nothing(cookie: u64) -> Done {
    Done { cookie, status: 0 }
}
