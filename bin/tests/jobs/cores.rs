//! Nodes on several cores, and several connections to a peer.

use o2poll::config::Machine;
use o2poll::{NodeLine, Options, Verdict};

use crate::scene::{CLIENT, COPY, Folder, config, run_with, run_with_a_fault, workload};

/// Two cores for one node; the other one shares a thread with it.
fn two_cores() -> Option<String> {
    let cores = Machine::this().allowed_cores;
    let [first, second, ..] = cores[..] else {
        eprintln!("not run: this process may use one core only");
        return None;
    };
    Some(format!("cores = [{first}, {second}]"))
}

fn moved(node: &NodeLine) -> Vec<u64> {
    let cores = node.cores.iter();
    cores
        .map(|core| core.transfers + core.peer_transfers)
        .collect()
}

#[test]
fn a_server_on_two_cores_serves_each_connection_on_a_core_of_its_own() {
    let Some(cores) = two_cores() else { return };
    let folder = Folder::new("server");
    let jobs = format!("{COPY}{}", workload("duration = \"1s\""));
    let config = config(&folder, "", [&cores, "conns_per_peer = 2"], &jobs);
    let (report, said) = run_with(&config, &Options::default());
    assert_eq!(report.verdict, Verdict::Good, "{report}\n{said:#?}");
    assert!(report.digests.iter().all(|digest| digest.ok), "{report}");
    assert!(report.verifications[0].compared > 0, "{report}");
    let [server, client] = &report.nodes[..] else {
        panic!("{report}")
    };
    assert_eq!(server.cores.len(), 2);
    assert!(server.cores.iter().all(|core| core.connections == 1));
    assert_eq!(client.cores[0].connections, 2);
    // Both halves see the same transfers, and each core its share of them.
    let (served, asked) = (moved(server), moved(client));
    assert_eq!(served.iter().sum::<u64>(), asked[0], "{report}");
    assert!(served.iter().all(|count| *count > 1), "{served:?}");
    assert_eq!(
        server
            .counters
            .iter()
            .find(|(name, _)| *name == "peer_transfers"),
        Some(&("peer_transfers", asked[0]))
    );
    let text = report.to_string();
    assert!(text.contains("10.0.0.1@o2ib, second"), "{text}");
}

#[test]
fn a_put_to_a_server_on_two_cores_is_over_when_the_server_has_taken_it() {
    let Some(cores) = two_cores() else { return };
    let folder = Folder::new("order");
    let puts = |more: &str| {
        let jobs = workload(&format!("duration = \"300ms\"\nput = 1.0\n{more}"))
            .replace("[\"1 KiB\", \"4001\", \"128 KiB\"]", "[\"1 KiB\"]");
        let config = config(&folder, "", [&cores, "conns_per_peer = 4"], &jobs);
        let (report, said) = run_with(&config, &Options::default());
        assert_eq!(report.verdict, Verdict::Good, "{report}\n{said:#?}");
        let count = |node: &NodeLine, name| {
            let found = node.counters.iter().find(|(known, _)| *known == name);
            found.map_or(0, |(_, count)| *count)
        };
        (
            count(&report.nodes[1], "transfers"),
            count(&report.nodes[0], "messages_sent"),
        )
    };
    // Each is told by an ACK, as a GET over the other core's connection may follow at once.
    let (made, told) = puts("");
    assert!(made > 16 && told >= made, "{told} messages for {made} PUTs");
    // Where nothing is compared, none is.
    let (made, told) = puts("verify = false");
    assert!(made > 16 && told < 16, "{told} messages for {made} PUTs");
}

#[test]
fn a_client_on_two_cores_spreads_its_transfers_over_four_connections() {
    let Some(cores) = two_cores() else { return };
    let folder = Folder::new("client");
    let jobs = format!("{COPY}{}", workload("duration = \"1s\""));
    let nodes = ["", &format!("{cores}\nconns_per_peer = 4")];
    let config = config(&folder, "", nodes, &jobs);
    let (report, said) = run_with(&config, &Options::default());
    assert_eq!(report.verdict, Verdict::Good, "{report}\n{said:#?}");
    let client = &report.nodes[1];
    let made: Vec<u64> = client.cores.iter().map(|core| core.connections).collect();
    assert_eq!(made, [2, 2]);
    let moved = moved(client);
    assert!(moved.iter().all(|count| *count > 1), "{moved:?}");
    assert!(report.verifications[0].compared > 0, "{report}");
}

#[test]
fn both_nodes_on_jobs_with_one_and_with_two_connections() {
    let folder = Folder::new("mixed");
    let of_server = r#"
[[node.export]]
name = "mine"
portal = 52
match_bits = 0x1
size = "8 MiB"
writable = true
"#;
    // The server's own workload is on the client's region, over one connection; the client's goes over two.
    let back = workload("duration = \"1s\"")
        .replace("10.0.0.1@o2ib", "10.0.0.2@o2ib")
        .replace("scratch", "mine");
    let jobs = format!("{of_server}{}", workload("duration = \"1s\""));
    let mut config = config(
        &folder,
        "conns_per_peer = 2",
        ["conns_per_peer = 1", ""],
        &jobs,
    );
    let text = std::fs::read_to_string(&config.origin).unwrap();
    let text = text.replacen("[[node.export]]", &format!("{back}[[node.export]]"), 1);
    config = o2poll::config::Config::parse(&text, &config.origin, &Machine::this())
        .unwrap_or_else(|report| panic!("{report}"));
    let (report, said) = run_with(&config, &Options::default());
    assert_eq!(report.verdict, Verdict::Good, "{report}\n{said:#?}");
    for node in &report.nodes {
        assert_eq!(node.cores[0].connections, 3, "{said:#?}");
        assert!(node.cores[0].transfers > 1 && node.cores[0].peer_transfers > 1);
    }
    assert!(report.verifications.iter().all(|line| line.compared > 0));
}

#[test]
fn one_connection_of_two_is_lost_and_the_other_serves_until_it_is_back() {
    let folder = Folder::new("one-of-two");
    let jobs = format!("{COPY}{}", workload("duration = \"1s\""));
    let config = config(&folder, "", ["", "conns_per_peer = 2"], &jobs);
    let (report, said) = run_with_a_fault(&config, 100);
    assert_eq!(report.verdict, Verdict::Good, "{report}\n{said:#?}");
    let client = &report.nodes[1];
    assert_eq!((client.reconnected, client.cores[0].connections), (1, 3));
    // At most what one connection carries.
    assert!((1..=8).contains(&report.repeats[0].transfers), "{report}");
}

#[test]
fn a_lost_connection_of_a_node_on_two_cores_comes_back_to_the_core_that_has_fewest() {
    let Some(cores) = two_cores() else { return };
    let folder = Folder::new("two-cores-lost");
    let jobs = format!("{COPY}{}", workload("duration = \"1s\""));
    let nodes = ["", &format!("{cores}\nconns_per_peer = 2")];
    let config = config(&folder, "", nodes, &jobs);
    // Each core's device fails one request.
    let (report, said) = run_with_a_fault(&config, 30);
    assert_eq!(report.verdict, Verdict::Good, "{report}\n{said:#?}");
    let client = &report.nodes[1];
    assert_eq!(client.reconnected, 2, "{said:#?}");
    let made: u64 = client.cores.iter().map(|core| core.connections).sum();
    assert_eq!(made, 4);
    assert!(client.cores.iter().all(|core| core.connections >= 1));
    assert!(
        said.iter()
            .any(|line| line.starts_with(&CLIENT.to_string()))
    );
}

#[test]
fn a_capture_of_nodes_on_several_cores_is_complete() {
    let Some(cores) = two_cores() else { return };
    let folder = Folder::new("pcap");
    let config = config(&folder, "", [&cores, "conns_per_peer = 2"], COPY);
    let options = Options {
        pcap: Some(folder.path("frames.pcap")),
        ..Options::default()
    };
    let (report, said) = run_with(&config, &options);
    assert_eq!(report.verdict, Verdict::Good, "{report}\n{said:#?}");
    assert!(report.capture.unwrap().frames > 3 * 88, "{report}");
}
