//! Devices that hold less than they promise: the depth is lowered for one peer, and remembered.

use o2poll::config::Machine;
use o2poll::dataplane::wire::Nid;
use o2poll::{Control, Link, Options};

use crate::scene::{CLIENT, Folder, PATIENCE, SERVER, config, on_device};

/// Connects, and says how many attempts the device refused meanwhile.
fn connect(control: &mut Control<o2poll::Nobody>, from: Nid, to: Nid) -> (Link, usize) {
    control.log();
    let link = control.connect(from, to, PATIENCE).unwrap();
    // The other side may still have something to say.
    std::thread::sleep(core::time::Duration::from_millis(20));
    control.turn().unwrap();
    let refused = |line: &String| line.contains("holds no queue pair of depth");
    let said = control.log();
    (link, said.iter().filter(|line| refused(line)).count())
}

#[test]
fn lu_7124_lu_10213_lu_12901_a_refused_depth_is_halved_and_remembered_for_that_peer() {
    let folder = Folder::new("depth");
    let third = "[[node]]\nnid = \"10.0.0.3@o2ib\"";
    // A depth of 16 takes 179 send work requests, one of 8 takes 91, one of 4 takes 47.
    let config = on_device(
        &folder,
        ", granted_send_wr = 60",
        "peer_credits = 16, conns_per_peer = 2",
        ["", ""],
        third,
    );
    let third = config.nodes[2].nid;
    let options = Options::default();
    let mut control = Control::start_nodes(&config, &Machine::this(), &options).unwrap();

    // 16 is refused and 8 is, on either side: first of all by the one that was asked.
    let (link, refused) = connect(&mut control, CLIENT, SERVER);
    assert_eq!((link.queue_depth, refused), (4, 2));
    // The second connection begins there.
    let (link, refused) = connect(&mut control, CLIENT, SERVER);
    assert_eq!((link.queue_depth, refused), (4, 0));
    // So does one in the other direction: the server knows what its device held for this peer.
    let (link, refused) = connect(&mut control, SERVER, CLIENT);
    assert_eq!((link.queue_depth, refused), (4, 0));
    // Nothing is known of another peer: it is asked for the full depth.
    let (link, refused) = connect(&mut control, CLIENT, third);
    assert_eq!((link.queue_depth, refused), (4, 2));

    let finished = control.stop(PATIENCE).unwrap();
    assert!(finished.nodes.iter().all(|node| node.is_empty()));
}

#[test]
fn a_depth_that_is_held_is_not_lowered() {
    let folder = Folder::new("full-depth");
    let config = config(&folder, "peer_credits = 16", ["", ""], "");
    let mut control = Control::start_nodes(&config, &Machine::this(), &Options::default()).unwrap();
    let (link, refused) = connect(&mut control, CLIENT, SERVER);
    assert_eq!((link.queue_depth, refused), (16, 0));
    control.stop(PATIENCE).unwrap();
}

#[test]
fn a_device_that_holds_not_even_one_is_told_once() {
    let folder = Folder::new("no-depth");
    // A depth of 1 takes 14.
    let config = on_device(
        &folder,
        ", granted_send_wr = 16",
        "concurrent_writes = 16",
        ["", ""],
        "",
    );
    let mut control = Control::start_nodes(&config, &Machine::this(), &Options::default()).unwrap();
    let error = control.connect(CLIENT, SERVER, PATIENCE).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("NoResources"), "{text}");
    let lowered = control.log();
    let lowered = lowered
        .iter()
        .filter(|line| line.contains("holds no queue pair of depth"));
    assert_eq!(lowered.count(), 3, "8, 4, 2");
    control.stop(PATIENCE).unwrap();
}
