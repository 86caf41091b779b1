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
    // With one WRITE at a time a depth of 16 takes 99 send work requests, one of 8 takes 51, one of 4 takes 27.
    let config = on_device(
        &folder,
        ", granted_send_wr = 30",
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
fn a_device_that_grants_less_lowers_concurrent_writes_before_the_depth_and_says_so() {
    let folder = Folder::new("writes");
    // A depth of 8 takes 91 send work requests with four WRITEs at a time, 75 with three, 59 with two.
    let started = |granted: &str, writes: &str| {
        let device = format!(", granted_send_wr = {granted}");
        let config = on_device(&folder, &device, writes, ["", ""], "");
        let options = Options::default();
        let mut control = Control::start_nodes(&config, &Machine::this(), &options).unwrap();
        let notes = control.notes().to_vec();
        let (link, refused) = connect(&mut control, CLIENT, SERVER);
        control.stop(PATIENCE).unwrap();
        (link.queue_depth, refused, notes)
    };
    let (depth, refused, notes) = started("60", "concurrent_writes = 4");
    assert_eq!((depth, refused), (8, 0), "{notes:?}");
    let note = notes.iter().find(|note| note.contains("concurrent_writes"));
    assert_eq!(
        note.map(String::as_str),
        Some(
            "the device grants no queue pair with the 91 send work requests of peer_credits = 8 and \
             concurrent_writes = 4: concurrent_writes is 2 instead of 4"
        )
    );
    let (depth, refused, notes) = started("91", "concurrent_writes = 4");
    assert_eq!((depth, refused), (8, 0));
    assert!(!notes.iter().any(|note| note.contains("concurrent_writes")));
    // Not even one at a time at the full depth: the depth is lowered when it is asked for, as far as it must be.
    let (depth, refused, notes) = started("16", "concurrent_writes = 16");
    assert_eq!((depth, refused), (2, 2), "8 and 4");
    assert!(
        notes
            .iter()
            .any(|note| note.contains("concurrent_writes is 1 instead of 16"))
    );
}
