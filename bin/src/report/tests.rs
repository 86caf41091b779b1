//! What the report says, and when it says that all is well.

use super::table::{Table, megabytes};
use super::{
    AccountLine, CoreLine, DigestLine, NodeLine, PingLine, RepeatLine, Report, SpanLine,
    ThreadLine, Verdict, VerificationLine, hex, left_over, rate,
};
use o2poll_dataplane::poller::Leftovers;

/// A core that has served so many transfers.
fn core(peer_transfers: u64) -> CoreLine {
    CoreLine {
        connections: 1,
        transfers: 0,
        peer_transfers,
        work_requests: 3 * peer_transfers,
        doorbells: peer_transfers,
    }
}

fn report() -> Report {
    let digest = |what| DigestLine {
        node: String::from("10.0.0.2@o2ib"),
        what,
        expected: hex(&[0xab; 32]),
        found: Some(hex(&[0xab; 32])),
        ok: true,
    };
    Report {
        file: String::from("x.toml"),
        device: String::from("soft frwr"),
        placement: String::from("core 0 polls for 10.0.0.1@o2ib, core 1 for 10.0.0.2@o2ib."),
        idle: "spin",
        clock: String::from("TSC at 2.100 GHz"),
        pings: vec![PingLine {
            node: String::from("10.0.0.2@o2ib"),
            peer: String::from("10.0.0.1@o2ib"),
            ok: true,
            answer: String::from("up"),
            latency_us: Some(4.25),
        }],
        digests: vec![
            digest("the file as it came"),
            digest("the file as it came back"),
        ],
        transfers: vec![SpanLine {
            node: String::from("10.0.0.2@o2ib"),
            peer: String::from("10.0.0.1@o2ib"),
            name: "workload",
            transfers: 1000,
            bytes: 4_096_000,
            seconds: 0.001,
            gb_per_s: 4.096,
            p50_us: 5.5,
            p99_us: 20.0,
            max_us: 90.0,
            ticks_per_transfer: Some(2345.0),
            work_requests_per_transfer: Some(3.0),
            peer_work_requests_per_transfer: Some(2.0),
            doorbells_per_transfer: Some(1.5),
            peer_doorbells_per_transfer: Some(1.0),
        }],
        accounts: vec![AccountLine {
            node: String::from("10.0.0.2@o2ib"),
            peer: String::from("10.0.0.1@o2ib"),
            job: "workload",
            posted: 1004,
            puts: 500,
            fills: 8,
            gets: 500,
            failed: vec![
                (String::from("timed out"), 3),
                (String::from("no such connection"), 1),
            ],
            refused: 1,
            never: 0,
            twice: 0,
        }],
        verifications: vec![VerificationLine {
            node: String::from("10.0.0.2@o2ib"),
            enabled: true,
            compared: 500,
            wrong: 0,
            wrong_bytes: 0,
            failed: 0,
        }],
        repeats: Vec::new(),
        capture: None,
        failures: Vec::new(),
        nodes: vec![NodeLine {
            nid: String::from("10.0.0.1@o2ib"),
            registrations: [7, 0, 0],
            by_mapping: 0,
            by_arena_key: 0,
            staged: 0,
            unmappable: 0,
            registered_sources: 0,
            invalidations: 6,
            remote_invalidations: 1,
            keys_alive: 0,
            windows_rebuilt: 0,
            protocol_errors: 0,
            reconnected: 0,
            left_over: Some(Vec::new()),
            counters: vec![("polls", 9)],
            cores: vec![core(7)],
        }],
        threads: vec![ThreadLine {
            core: 0,
            allocations: Some(0),
            frees: Some(0),
            preemptions: Some(2),
            yields: Some(0),
        }],
        interrupted: false,
        ok: true,
        verdict: Verdict::Good,
    }
}

type Spoil = fn(&mut Report);

#[test]
fn only_a_spotless_run_is_good() {
    assert_eq!(report().judge(), Verdict::Good);
    let spoil: [(Verdict, Spoil); 18] = [
        (Verdict::Unaccounted, |it| it.accounts[0].twice = 1),
        (Verdict::Unaccounted, |it| it.accounts[0].never = 1),
        (Verdict::Unaccounted, |it| it.accounts[0].posted += 1),
        (Verdict::Unaccounted, |it| it.accounts[0].failed[0].1 -= 1),
        // One that nobody has compared.
        (Verdict::Unaccounted, |it| it.verifications[0].compared -= 1),
        // One that its poller has ended and no job has seen end.
        (Verdict::Unaccounted, |it| {
            it.nodes[0].cores[0].transfers = 1
        }),
        (Verdict::Mismatch, |it| it.digests[0].ok = false),
        (Verdict::Mismatch, |it| it.verifications[0].wrong = 1),
        (Verdict::Failed, |it| it.failures.push(String::from("x"))),
        (Verdict::Failed, |it| it.pings[0].ok = false),
        (Verdict::Failed, |it| it.digests[1].found = None),
        (Verdict::NotClean, |it| it.nodes[0].keys_alive = 1),
        (Verdict::NotClean, |it| it.nodes[0].left_over = None),
        (Verdict::NotClean, |it| {
            it.nodes[0].left_over = Some(vec![("events", 1)])
        }),
        (Verdict::NotClean, |it| it.nodes[0].protocol_errors = 1),
        (Verdict::NotClean, |it| it.threads[0].allocations = Some(1)),
        (Verdict::NotClean, |it| it.threads[0].frees = Some(1)),
        (Verdict::CutShort, |it| {
            it.interrupted = true;
            it.digests[1].found = None;
        }),
    ];
    for (at, (verdict, spoil)) in spoil.into_iter().enumerate() {
        let mut report = report();
        spoil(&mut report);
        assert_eq!(report.judge(), verdict, "case {at}");
        assert_ne!(verdict.code(), 0);
    }
}

#[test]
fn the_worst_decides() {
    let mut report = report();
    report.nodes[0].keys_alive = 1;
    report.failures.push(String::from("x"));
    assert_eq!(report.judge(), Verdict::Failed);
    report.digests[0].ok = false;
    assert_eq!(report.judge(), Verdict::Mismatch);
    report.accounts[0].twice = 1;
    assert_eq!(report.judge(), Verdict::Unaccounted);
}

#[test]
fn an_end_before_time_is_told_even_if_all_that_was_compared_is_right() {
    let mut report = report();
    report.interrupted = true;
    assert_eq!(report.judge(), Verdict::CutShort);
    assert!(report.to_string().contains("interrupted"));
}

#[test]
fn the_table_says_what_was_wrong() {
    let text = report().to_string();
    assert!(
        text.contains("sha-256 of the file as it came: ok  abab"),
        "{text}"
    );
    assert!(
        text.contains("ping 10.0.0.1@o2ib from 10.0.0.2@o2ib: ok, up, 4.2 us"),
        "{text}"
    );
    assert!(text.contains("500 GETs compared, ok"), "{text}");
    assert!(text.contains("3.00 + 2.00"), "{text}");
    assert!(text.contains("tsc/transfer"), "{text}");
    assert!(!text.contains("MISMATCH"), "{text}");
    assert!(
        text.contains(
            "workload of 10.0.0.2@o2ib with 10.0.0.1@o2ib: 1004 transfers, each ended once: 500 PUTs (8 to fill the region first, \
             not timed) and 500 GETs well, \
             3 with `timed out`, 1 with `no such connection`\n"
        ),
        "{text}"
    );
    let mut report = report();
    report.verifications[0].compared = 0;
    assert!(report.to_string().contains("no GETs compared\n"));
    report.verifications[0].compared = 500;
    report.digests[0].ok = false;
    report.verifications[0].wrong = 3;
    report.nodes[0].left_over = Some(vec![("windows", 2)]);
    report.threads[0].allocations = None;
    report.accounts[0].never = 2;
    report.clock = String::from("CLOCK_MONOTONIC, not the TSC: as asked");
    let text = report.to_string();
    assert!(text.contains("as it came: MISMATCH"), "{text}");
    assert!(text.contains("3 MISMATCH"), "{text}");
    assert!(text.contains("NOT EACH ENDED ONCE"), "{text}");
    assert!(text.contains(", 2 never, 0 twice"), "{text}");
    assert!(text.contains("2 windows"), "{text}");
    assert!(text.contains("not counted"), "{text}");
    assert!(text.contains("ns/transfer"), "{text}");
}

#[test]
fn what_was_made_again_and_what_each_core_did_is_told_and_is_no_fault() {
    let plain = report().to_string();
    assert!(
        !plain.contains("again") && !plain.contains("core of"),
        "{plain}"
    );
    let mut report = report();
    report.repeats.push(RepeatLine {
        node: String::from("10.0.0.2@o2ib"),
        peer: String::from("10.0.0.1@o2ib"),
        job: "workload",
        transfers: 5,
    });
    report.nodes[0].reconnected = 2;
    report.nodes[0].cores.push(core(4321));
    assert_eq!(report.judge(), Verdict::Good);
    let text = report.to_string();
    assert!(
        text.contains("workload of 10.0.0.2@o2ib with 10.0.0.1@o2ib: 5 transfers failed"),
        "{text}"
    );
    assert!(
        text.contains("10.0.0.1@o2ib made 2 lost connections again"),
        "{text}"
    );
    assert!(text.contains("10.0.0.1@o2ib, second"), "{text}");
    assert!(text.contains("4321"), "{text}");
}

#[test]
fn columns_line_up() {
    let mut table = Table::new(&["a", "bbb"]);
    table.row(vec![String::from("longer"), String::from("1")]);
    table.row(vec![String::from("x"), String::from("12345")]);
    assert_eq!(
        table.to_string(),
        "a         bbb\nlonger      1\nx       12345\n"
    );
}

#[test]
fn the_json_has_the_same_numbers() {
    let json = serde_json::to_value(report()).unwrap();
    assert_eq!(json["ok"], true);
    assert_eq!(json["verdict"], "good");
    assert_eq!(json["transfers"][0]["transfers"], 1000);
    assert_eq!(json["transfers"][0]["gb_per_s"], 4.096);
    assert_eq!(
        json["nodes"][0]["registrations"],
        serde_json::json!([7, 0, 0])
    );
    assert_eq!(json["threads"][0]["allocations"], 0);
    assert_eq!(json["digests"][1]["ok"], true);
}

#[test]
fn only_what_is_left_is_listed() {
    assert!(left_over(&Leftovers::default()).is_empty());
    let left = Leftovers {
        windows: 3,
        events: 1,
        ..Leftovers::default()
    };
    assert_eq!(left_over(&left), [("windows", 3), ("events", 1)]);
}

#[test]
fn no_time_is_no_rate() {
    assert_eq!(rate(100, 0.0), 0.0);
    assert_eq!(rate(2_000_000_000, 2.0), 1.0);
}

#[test]
fn small_amounts_are_not_shown_as_nothing() {
    assert_eq!(megabytes(0), "0");
    assert_eq!(megabytes(32_768), "0.033");
    assert_eq!(megabytes(9_999_000), "9.999");
    assert_eq!(megabytes(474_800_000), "474.8");
}
