//! What is told of a file or of a device without running anything.

use serde_json::Value;

use crate::{COPY, Folder, data, json, nodes, o2poll, text};

#[test]
fn plan_tells_what_a_file_takes_beside_ko2iblnd() {
    let folder = Folder::new("plan");
    folder.write("data", data(10));
    let file = folder.write("nodes.toml", nodes("", "4 MiB", COPY));
    let plan = |more: &[&str]| {
        let mut arguments = vec!["plan", file.to_str().unwrap()];
        arguments.extend(more);
        let output = o2poll(&arguments);
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        output
    };
    let table = text(&plan(&[]).stdout);
    assert!(table.contains("send work requests"), "{table}");
    assert!(table.contains("one core, 1 peer "), "{table}");
    let one = json(&plan(&["--json"]));
    let theirs = &one["connection"]["ko2iblnd"];
    assert_eq!(
        (&theirs["send_wr"], &theirs["receives"], &theirs["cqe"]),
        (&2080.into(), &18.into(), &2098.into())
    );
    let many = json(&plan(&["--json", "--peers", "50"]));
    for (owner, connections) in [("o2poll", 100), ("ko2iblnd", 50)] {
        for (scope, plan) in [("connection", &one), ("core", &one), ("core", &many)] {
            let amounts = &plan[scope][owner];
            let number = |name: &str| amounts[name].as_u64().unwrap();
            let parts = ["message", "list", "queue", "state", "staging"];
            let sum: u64 = parts
                .iter()
                .map(|part| number(&format!("{part}_bytes")))
                .sum();
            assert_eq!(number("bytes"), sum, "{amounts}");
            assert_eq!(number("cqe"), number("send_wr") + number("receives"));
        }
        let (each, all) = (&one["connection"][owner], &many["core"][owner]);
        for name in ["connections", "send_wr", "receives", "cqe", "queue_bytes"] {
            assert_eq!(
                all[name].as_u64().unwrap(),
                connections * each[name].as_u64().unwrap(),
                "{owner} {name}"
            );
        }
    }
    assert!(
        one["connection"]["o2poll"]["send_wr"].as_u64().unwrap()
            < theirs["send_wr"].as_u64().unwrap() / 10
    );
}

/// Keys that outlive their transfers are told of before anything is started.
#[test]
fn plan_tells_what_peers_reach_beyond_their_transfers() {
    let folder = Folder::new("exposure");
    folder.write("data", data(10));
    let plan = |tunables: &str, profile: &str| {
        let text_of = nodes(tunables, "4 MiB", COPY).replace("\"frwr\"", profile);
        let file = folder.write("nodes.toml", text_of);
        let output = o2poll(&["plan".as_ref(), file.as_os_str(), "--json".as_ref()]);
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        json(&output)
    };
    assert_eq!(plan("", "\"frwr\"")["exposure"], Value::Null);
    let few = plan(
        "[tunables]\nfmr_pool_size = 20\nfmr_cache = false",
        "\"mthca\"",
    );
    let said = few["exposure"].as_str().unwrap();
    assert!(
        said.contains("up to 20 keys") && said.contains("until 15 stand"),
        "{said}"
    );
    assert!(said.contains("fmr_cache = false"), "{said}");
    assert_eq!(few["core"]["o2poll"]["windows"], 20);
    let none = plan(
        "exposure = \"arena\"\n[tunables]\nfmr_pool_size = 0",
        "\"mthca\"",
    );
    let said = none["exposure"].as_str().unwrap();
    assert!(
        said.contains("key of the arena") && !said.contains("up to"),
        "{said}"
    );
    let short = plan("", "\"mthca\", max_windows = 5");
    let said = short["notes"][0].as_str().unwrap();
    assert!(said.contains("fmr_pool_size is 5 instead of 512"), "{said}");
}

/// LU-7124, LU-10213, LU-12901: never without a word, and never a depth that the device does not hold.
#[test]
fn a_limit_that_lowers_the_depth_is_named_with_both_depths() {
    let folder = Folder::new("limits");
    folder.write("data", data(10));
    for (limit, least) in [
        ("max_send_wr = 64", "max_send_wr of the device is 64"),
        ("max_recv_wr = 10", "max_recv_wr of the device is 10"),
        ("max_cqe = 100", "max_cqe of the device is 100"),
    ] {
        let text_of = nodes("[tunables]\npeer_credits = 16", "4 MiB", COPY).replace(
            "profile = \"frwr\"",
            &format!("profile = \"frwr\", {limit}"),
        );
        let file = folder.write("nodes.toml", text_of);
        let output = o2poll(&["plan".as_ref(), file.as_os_str(), "--json".as_ref()]);
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        let plan = json(&output);
        let depth = plan["peer_credits"].as_u64().unwrap();
        assert!((1..16).contains(&depth), "{limit}: {depth}");
        let note = plan["notes"][0].as_str().unwrap();
        assert!(note.contains(least), "{note}");
        let both = format!("peer_credits is {depth} instead of 16");
        assert!(note.contains(&both), "{note}");
        assert_eq!(note.lines().count(), 1);
    }
    let text_of =
        nodes("", "4 MiB", COPY).replace("profile = \"frwr\"", "profile = \"frwr\", max_qp = 1");
    let file = folder.write("nodes.toml", text_of);
    let output = o2poll(&["plan".as_ref(), file.as_os_str()]);
    assert_eq!(output.status.code(), Some(1));
    let said = text(&output.stderr);
    assert!(
        said.contains("max_qp of the device is 1, and 2 are needed"),
        "{said}"
    );
    assert!(!said.contains("max_send_wr"), "{said}");
}

#[test]
fn a_device_whose_keys_are_too_short_for_a_transfer_does_not_pass_the_check() {
    let folder = Folder::new("short-keys");
    folder.write("data", data(10));
    let device = "profile = \"mthca\", max_pages = 1";
    let text_of = nodes("", "4 MiB", COPY).replace("profile = \"frwr\"", device);
    let file = folder.write("nodes.toml", text_of);
    for verb in ["check", "run"] {
        let output = o2poll(&[verb.as_ref(), file.as_os_str()]);
        assert_eq!(output.status.code(), Some(1));
        let said = text(&output.stdout) + &text(&output.stderr);
        for part in [
            "max_pages of the device is 1",
            "more than 4096 bytes",
            "raise max_pages to 256",
        ] {
            assert!(said.contains(part), "{said}");
        }
    }
}

#[test]
fn devices_tells_what_becomes_of_each_buffer() {
    let table = text(&o2poll(&["devices"]).stdout);
    for said in [
        "soft mlx4",
        "page lists",
        "exposure = \"none\", map_on_demand = 1",
        "staging: ",
    ] {
        assert!(table.contains(said), "{said}: {table}");
    }
    let way = |arguments: &[&str], profile: &str, buffer: &str| -> Value {
        let mut all = vec!["devices", "--json"];
        all.extend(arguments);
        let found = json(&o2poll(&all));
        let device = found["devices"]
            .as_array()
            .unwrap()
            .iter()
            .find(|line| line["name"] == profile);
        let buffers = device.unwrap()["buffers"].as_array().unwrap().clone();
        let line = buffers.into_iter().find(|line| line["buffer"] == buffer);
        line.unwrap()["mechanism"].clone()
    };
    assert_eq!(way(&[], "rxe", "1 MiB contiguous"), "window");
    assert_eq!(way(&[], "rxe", "16 with gaps"), "staging");
    assert_eq!(way(&["--exposed"], "rxe", "16 with gaps"), "arena");
    assert_eq!(
        way(&["--exposed", "--max-frags", "8"], "rxe", "16 with gaps"),
        "staging"
    );
    assert_eq!(way(&["--no-staging"], "rxe", "16 with gaps"), Value::Null);
}
