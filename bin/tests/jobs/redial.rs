//! Connections that are lost while jobs run: what fails ends once, and the jobs go on over new ones.

use core::time::Duration;
use std::time::Instant;

use o2poll::config::Machine;
use o2poll::{Control, NodeError, Options, Verdict};

use crate::scene::{
    CLIENT, COPY, Folder, PATIENCE, SERVER, config, expect_nothing_left, run_disturbed,
    run_with_a_fault, workload,
};

#[test]
fn a_workload_goes_on_and_every_byte_is_right_whoever_ends_its_connection() {
    let folder = Folder::new("hang-up");
    let config = config(
        &folder,
        "min_reconnect = \"1ms\", max_reconnect = \"10ms\"",
        ["", ""],
        &workload("duration = \"1500ms\""),
    );
    // Some time after the client has said that it is connected, by the one side and by the other in turn.
    let connected = format!("{CLIENT}: connected with");
    let mut since = None;
    let mut times = 0;
    let finished = run_disturbed(&config, |control| {
        if control
            .log()
            .iter()
            .any(|line| line.starts_with(&connected))
            || times == 0
        {
            since.get_or_insert_with(Instant::now);
        }
        if since.is_some_and(|since: Instant| since.elapsed() > Duration::from_millis(40)) {
            let (one, other) = if times % 2 == 0 {
                (CLIENT, SERVER)
            } else {
                (SERVER, CLIENT)
            };
            control.hang_up(one, other).unwrap();
            times += 1;
            since = None;
        }
    });
    expect_nothing_left(&finished);
    let client = &finished.nodes[1];
    let (_, workload) = client
        .application
        .as_ref()
        .unwrap()
        .workload
        .as_ref()
        .unwrap();
    assert!(client.reconnected >= 2, "{} of {times}", client.reconnected);
    assert!(
        client.reconnected + 1 >= times,
        "{} of {times}",
        client.reconnected
    );
    assert_eq!((workload.failed, workload.wrong), (0, 0));
    assert!(workload.repeated > 0, "{}", workload.verified);
}

#[test]
fn a_copy_is_right_after_a_request_that_failed() {
    let folder = Folder::new("copy");
    let config = config(&folder, "", ["", ""], COPY);
    // In the GETs, in the PUTs, in the GETs back: three requests for each of 88 chunks and more.
    for after in [20, 300, 600] {
        let (report, said) = run_with_a_fault(&config, after);
        assert_eq!(report.verdict, Verdict::Good, "{report}\n{said:#?}");
        assert_eq!(report.nodes[1].reconnected, 1, "{after}: {said:#?}");
        assert!(report.repeats[0].transfers > 0);
        let lost: Vec<&String> = said
            .iter()
            .filter(|line| line.contains("has ended"))
            .collect();
        assert!(
            lost.iter()
                .any(|line| line.starts_with(&CLIENT.to_string())),
            "{said:#?}"
        );
    }
}

#[test]
fn what_is_not_to_be_repeated_is_counted_as_failed_and_the_rest_is_still_right() {
    let folder = Folder::new("no-repeat");
    let jobs = workload("duration = \"1500ms\"\nrepeat = false");
    let config = config(&folder, "", ["", ""], &jobs);
    let (report, said) = run_with_a_fault(&config, 100);
    assert_eq!(report.verdict, Verdict::Failed, "{report}");
    let line = &report.verifications[0];
    assert!(line.failed > 0 && line.failed <= 16, "{report}");
    assert_eq!(line.wrong, 0, "{report}");
    assert!(line.compared > 0, "{report}");
    assert_eq!(report.nodes[1].reconnected, 1, "{said:#?}");
    assert!(report.repeats.is_empty());
}

#[test]
fn without_reconnects_the_run_fails_and_says_which_connection_and_why() {
    let folder = Folder::new("no-reconnects");
    let config = config(&folder, "reconnects = 0", ["", ""], COPY);
    let (report, _) = run_with_a_fault(&config, 300);
    assert_eq!(report.verdict, Verdict::Failed, "{report}");
    let lost = format!("the connection of {CLIENT} to {SERVER} ended: ");
    assert!(report.repeats.is_empty(), "nothing was moved again");
    assert!(
        report.failures.iter().any(|line| line.starts_with(&lost)),
        "{report}"
    );
    assert_eq!(report.nodes[1].reconnected, 0);
}

#[test]
fn a_connection_of_an_embedder_is_not_made_again_and_its_end_is_told() {
    let folder = Folder::new("embedder");
    let config = config(&folder, "", ["", ""], "");
    let machine = Machine::this();
    let mut control = Control::start_nodes(&config, &machine, &Options::default()).unwrap();
    control.connect(CLIENT, SERVER, PATIENCE).unwrap();
    assert_eq!(control.hang_up(SERVER, CLIENT).unwrap(), 1);
    let begin = Instant::now();
    let error = loop {
        match control.turn() {
            Err(error) => break error,
            Ok(()) if begin.elapsed() > PATIENCE => panic!("{:?}", control.log()),
            Ok(()) => {}
        }
    };
    assert!(
        matches!(
            error,
            NodeError::Lost {
                node: CLIENT,
                peer: SERVER,
                ..
            }
        ),
        "{error}"
    );
    let finished = control.stop(PATIENCE).unwrap();
    assert!(finished.nodes.iter().all(|node| node.is_empty()));
}
