//! What polling threads asked of the kernel, call by call, held against what their nodes counted, and what transfers
//! cost, held against the software device and against the page that says so.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::workspace::{Workspace, files};

/// Jobs that ended well under `strace`, one with GETs only and one with PUTs only.
pub(super) fn judge(workspace: &Workspace, folder: &Path) -> Result<String> {
    let page = fs::read_to_string(workspace.root.join("tests/tests/costs.md"))?;
    let mut doorbells = 0;
    for (puts, workload) in [("0.0", "small GET"), ("1.0", "small PUT")] {
        let [soft, verbs] = ["soft", "verbs"].map(|device| -> Result<Value> {
            let path = folder.join(format!("{device}.{puts}.json"));
            let text =
                fs::read_to_string(&path).with_context(|| format!("no {}", path.display()))?;
            Ok(serde_json::from_str(&text)?)
        });
        let (soft, verbs) = (soft?, verbs?);
        for (job, row) in [
            ("copy: GET", "bulk GET"),
            ("copy: PUT", "bulk PUT, acknowledged"),
            ("workload", workload),
        ] {
            let cost = cost(&page, row).with_context(|| format!("costs.md has no row {row}"))?;
            let (on_soft, expected) = counted(&soft, job).with_context(|| format!("no {job}"))?;
            let (on_rxe, found) = counted(&verbs, job).with_context(|| format!("no {job}"))?;
            for (((what, cost), expected), found) in WHAT.iter().zip(cost).zip(expected).zip(found)
            {
                let more = found - expected / on_soft * on_rxe;
                // The page is about single transfers: a target that is sent PUTs and sends nothing gives credits back now and
                // then, and many at once where it comes late.
                let gives_credits = cost == 0.0;
                let off = if gives_credits { more } else { more.abs() };
                ensure!(
                    off <= EDGE,
                    "{job}: {found} {what} for {on_rxe} transfers, and {expected} for {on_soft} on the software device"
                );
                ensure!(
                    gives_credits || (found - cost * on_rxe).abs() <= EDGE,
                    "{job}: {found} {what} for {on_rxe} transfers, where costs.md says {cost} each"
                );
            }
        }
        doorbells += threads(&folder.join(format!("calls.{puts}")), &verbs)?;
    }
    Ok(format!("{doorbells} doorbells, as many calls"))
}

/// Every polling thread has made exactly as many calls that post as its node has rung doorbells, and in the middle of them
/// no other; the doorbells.
fn threads(folder: &Path, report: &Value) -> Result<u64> {
    let mut rung: Vec<u64> = Vec::new();
    for node in report["nodes"].as_array().context("no nodes")? {
        let counters = node["counters"].as_array().context("no counters")?;
        let doorbells = counters.iter().find(|pair| pair[0] == "doorbells");
        rung.push(
            doorbells
                .and_then(|pair| pair[1].as_u64())
                .context("no doorbells")?,
        );
    }
    let mut posted: Vec<u64> = Vec::new();
    for name in files(folder, |_| true) {
        let trace = fs::read_to_string(folder.join(&name))?;
        // A polling thread has pinned itself.
        if !trace.contains(" sched_setaffinity(") {
            continue;
        }
        let calls: Vec<&str> = trace.lines().map(call).collect();
        let posts: Vec<usize> = (0..calls.len()).filter(|at| is_post(calls[*at])).collect();
        posted.push(posts.len() as u64);
        ensure!(
            posts.len() >= LEAST,
            "{name}: only {} doorbells",
            posts.len()
        );
        // Between the first quarter of its doorbells and the last: no connection is made or ended there.
        let middle = posts[posts.len() / 4]..=posts[posts.len() * 3 / 4];
        let mut others: BTreeMap<&str, u64> = BTreeMap::new();
        for call in calls[middle].iter().filter(|call| !is_post(call)) {
            if !call.starts_with("sched_yield(") {
                *others.entry(call).or_default() += 1;
            }
        }
        if let Some((call, times)) = others.first_key_value() {
            bail!("{name}: neither a doorbell nor giving way: {call}, {times} times");
        }
    }
    rung.sort_unstable();
    posted.sort_unstable();
    ensure!(
        rung == posted,
        "doorbells that nodes have rung: {rung:?}; calls that post, of polling threads: {posted:?}"
    );
    Ok(rung.iter().sum())
}

/// A line of `strace -ttt` without its time.
fn call(line: &str) -> &str {
    line.split_once(' ').map_or("", |(_, call)| call)
}

/// rxe's doorbell: `write(2)` of IB_USER_VERBS_CMD_POST_SEND, 28, to the device.
fn is_post(call: &str) -> bool {
    call.starts_with("write(")
        && call
            .split_once(", ")
            .is_some_and(|(_, data)| data.starts_with("\"\\34\\0\\0\\0\"..."))
}

/// How many transfers of this name a report has, and the numbers of [`WHAT`] in all.
fn counted(report: &Value, job: &str) -> Option<(f64, [f64; 4])> {
    let lines = report["transfers"].as_array()?;
    let line = lines.iter().find(|line| line["name"] == job)?;
    let transfers = line["transfers"].as_f64().filter(|count| *count > 0.0)?;
    let mut found = [0.0; 4];
    for (key, found) in KEYS.iter().zip(&mut found) {
        *found = (line[key].as_f64()? * transfers).round();
    }
    Some((transfers, found))
}

/// What the page says of one transfer between two nodes without extensions.
fn cost(page: &str, row: &str) -> Option<[f64; 4]> {
    let line = page
        .lines()
        .find(|line| line.starts_with(&format!("| {row} | none")))?;
    let cells: Vec<&str> = line.split('|').map(str::trim).collect();
    let pair = |cell: &str| -> Option<[f64; 2]> {
        let (near, far) = cell.split_once(" + ")?;
        Some([near.parse().ok()?, far.parse().ok()?])
    };
    let [requests, peers_requests] = pair(cells.get(4)?)?;
    let [doorbells, peers_doorbells] = pair(cells.get(5)?)?;
    Some([requests, peers_requests, doorbells, peers_doorbells])
}

const WHAT: [&str; 4] = [
    "work requests of the initiator",
    "of the target",
    "doorbells of the initiator",
    "of the target",
];

const KEYS: [&str; 4] = [
    "work_requests_per_transfer",
    "peer_work_requests_per_transfer",
    "doorbells_per_transfer",
    "peer_doorbells_per_transfer",
];

/// The last transfer's INVALIDATE and the first one's may be counted with the next job.
const EDGE: f64 = 2.0;

/// Doorbells that a polling thread must have rung, to say anything.
const LEAST: usize = 50;

#[cfg(test)]
mod tests {
    use super::{cost, counted, is_post, threads};
    use serde_json::json;
    use std::{env, fs, process};

    #[test]
    fn a_row_of_the_page_is_read() {
        let page = "| bulk GET | none, as toward a kernel | 1 + 1 | 3 + 2 | 2 + 1 | 2 | 3 |\n\
                    | bulk GET | DONE as SEND_WITH_INV | 1 + 1 | 2 + 2 | 1 + 1 | 2 | 3 |\n";
        assert_eq!(cost(page, "bulk GET"), Some([3.0, 2.0, 2.0, 1.0]));
        assert_eq!(cost(page, "bulk PUT"), None);
    }

    #[test]
    fn totals_come_out_of_what_a_report_says_per_transfer() {
        let report = json!({ "transfers": [{
            "name": "copy: GET", "transfers": 3, "work_requests_per_transfer": 8.0 / 3.0,
            "peer_work_requests_per_transfer": 2.0, "doorbells_per_transfer": 5.0 / 3.0, "peer_doorbells_per_transfer": 1.0,
        }] });
        assert_eq!(
            counted(&report, "copy: GET"),
            Some((3.0, [8.0, 6.0, 5.0, 3.0]))
        );
        assert_eq!(counted(&report, "workload"), None);
    }

    #[test]
    fn a_call_too_many_and_one_of_another_kind_are_found() {
        let post = r#"write(5, "\34\0\0\0"..., 32) = 32"#;
        assert!(is_post(post));
        assert!(!is_post(r#"write(5, "\35\0\0\0"..., 32) = 32"#));
        let folder = env::temp_dir().join(format!("o2poll-calls-{}", process::id()));
        fs::create_dir_all(&folder).unwrap();
        let report =
            |rung: u64| json!({ "nodes": [{ "counters": [["polls", 7], ["doorbells", rung]] }] });
        let thread = |planted: &str| {
            let mut text = String::from("100.0 sched_setaffinity(0, 8, [1]) = 0\n");
            for n in 1..100 {
                text += &format!("1{n:02}.0 {}\n", if n == 50 { planted } else { post });
            }
            text += "200.0 exit(0) = ?\n";
            fs::write(folder.join("thread.1"), text).unwrap();
        };
        thread(post);
        assert_eq!(threads(&folder, &report(99)).unwrap(), 99);
        assert!(threads(&folder, &report(98)).is_err());
        thread("futex(0x7f, FUTEX_WAKE, 1) = 0");
        assert!(threads(&folder, &report(98)).is_err());
        thread("sched_yield() = 0");
        assert_eq!(threads(&folder, &report(98)).unwrap(), 98);
        fs::remove_dir_all(&folder).unwrap();
    }
}
