//! The reports of both sides held against each other: each transfer has ended once, and the target has served those that
//! ended well and none that nobody asked for.
//!
//! A PUT without an ACK in one message ends well when its SEND does, and then the other device has it, not yet the node: where
//! the connection ends before the node's poller has taken that completion, nobody has served it. As long as it is not taken it
//! holds a credit of its initiator, so that each connection of the target can have cost [`PEER_CREDITS`] of them and no more. A
//! transfer that failed may have been served as well and can stand for one that was lost: the bytes that workloads compare speak of that.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;

/// Reports that a case has left, as its `accounts` say which belong together; a remark.
pub(super) fn judge(folder: &Path) -> Result<String> {
    let list = fs::read_to_string(folder.join("accounts")).context("no accounts were asked for")?;
    let read = |name: &str| -> Result<Value> {
        let path = folder.join(format!("{name}.json"));
        let text = fs::read_to_string(&path).with_context(|| format!("no {}", path.display()))?;
        serde_json::from_str(&text).with_context(|| format!("{}", path.display()))
    };
    let mut all = Sums::default();
    for line in list.lines() {
        let context = || format!("accounts of {line}");
        all = all.with(judge_line(line, read).with_context(context)?);
    }
    let Sums {
        posted,
        well,
        failed,
        ..
    } = all;
    ensure!(well > 0, "no transfer has ended well");
    Ok(format!(
        "{posted} transfers, each ended once: {well} with their data, {failed} with an error"
    ))
}

/// One target and its initiators; the sums of those that had to do with no other.
fn judge_line(line: &str, read: impl Fn(&str) -> Result<Value>) -> Result<Sums> {
    let mut words = line.split_whitespace();
    let target = words.next().context("it is empty")?;
    let (mut whole, mut part) = (Sums::default(), Some(Sums::default()));
    let (mut names, mut behind) = (0, false);
    for word in words {
        match word {
            "/" => behind = true,
            "?" => part = None,
            name => {
                let sums = settled(&read(name)?).with_context(|| name.to_owned())?;
                names += 1;
                if behind {
                    part = part.map(|part| part.with(sums));
                } else {
                    whole = whole.with(sums);
                }
            }
        }
    }
    ensure!(names > 0, "it names no initiator");
    if target != "-" {
        let report = read(target)?;
        let served = served(&report).context("it has no cores")?;
        let dropped = if whole.lost || has_failures(&report)? {
            let ended = connections_ended(&report).context("no connections_ended")?;
            whole.unanswered.min(ended.saturating_mul(PEER_CREDITS))
        } else {
            0
        };
        ensure!(
            served >= whole.well - dropped,
            "{target} has served {served} transfers, and {} have ended well, of which its connections can have cost {dropped}",
            whole.well
        );
        if let Some(part) = part {
            let most = whole.begun + part.begun;
            ensure!(
                served <= most,
                "{target} has served {served} transfers, and {most} were begun"
            );
        }
    }
    Ok(part.map_or(whole, |part| whole.with(part)))
}

/// Transfers of an initiator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Sums {
    posted: u64,
    /// Those that its poller did not refuse at once.
    begun: u64,
    well: u64,
    /// Those of `well` that may have ended before the target's node had them: PUTs that need no ACK.
    unanswered: u64,
    failed: u64,
    /// A connection was lost, or may have been.
    lost: bool,
}

impl Sums {
    const fn with(self, other: Self) -> Self {
        Self {
            posted: self.posted + other.posted,
            begun: self.begun + other.begun,
            well: self.well + other.well,
            unanswered: self.unanswered + other.unanswered,
            failed: self.failed + other.failed,
            lost: self.lost || other.lost,
        }
    }
}

/// The sums of a report in which each transfer has ended once, and each GET of a workload that verifies was compared, with
/// no byte wrong.
fn settled(report: &Value) -> Result<Sums> {
    let lines = report["accounts"].as_array().context("no accounts")?;
    let mut sums = Sums::default();
    let mut gets = 0;
    for line in lines {
        let count = |name: &str| {
            let count = line[name].as_u64();
            count.with_context(|| format!("no {name} in {line}"))
        };
        let mut failed = 0;
        for pair in line["failed"].as_array().context("no failures")? {
            let why = pair[0].as_str().unwrap_or_default();
            ensure!(!why.is_empty(), "an error without a name: {line}");
            failed += pair[1].as_u64().context("no count")?;
        }
        let well = count("puts")? + count("gets")?;
        if count("never")? != 0 || count("twice")? != 0 || count("posted")? != well + failed {
            bail!("not each has ended once: {line}");
        }
        if line["job"] == "workload" {
            gets += count("gets")?;
        }
        // A copy asks for an ACK to each of its PUTs. A workload does so only where it verifies over several cores.
        let unanswered = if line["job"] == "copy" {
            0
        } else {
            count("puts")?
        };
        sums = sums.with(Sums {
            posted: count("posted")?,
            begun: count("posted")? - count("refused")?,
            well,
            unanswered,
            failed,
            lost: failed != 0,
        });
    }
    sums.lost |= has_failures(report)? || reconnected(report).context("no reconnected")? != 0;
    ensure!(sums.posted > 0, "no transfer was submitted");
    for line in report["verifications"]
        .as_array()
        .context("no comparisons")?
    {
        ensure!(line["wrong"] == 0, "wrong bytes: {line}");
        ensure!(
            line["enabled"] != true || line["compared"] == gets,
            "{gets} GETs ended well: {line}"
        );
    }
    Ok(sums)
}

/// Transfers of peers that a target has ended.
fn served(report: &Value) -> Option<u64> {
    let nodes = report["nodes"].as_array()?;
    let mut cores = nodes.iter().map(|node| node["cores"].as_array());
    cores.try_fold(0, |sum, cores| {
        let mut served = cores?.iter().map(|core| core["peer_transfers"].as_u64());
        served.try_fold(sum, |sum, served| Some(sum + served?))
    })
}

/// Connections that a target's pollers have ended, in order or not.
fn connections_ended(report: &Value) -> Option<u64> {
    let mut nodes = report["nodes"].as_array()?.iter();
    nodes.try_fold(0, |sum, node| {
        let mut counters = node["counters"].as_array()?.iter();
        let counter = counters.find(|counter| counter[0] == "connections_ended")?;
        Some(sum + counter[1].as_u64()?)
    })
}

/// Connections that an initiator has lost and made again.
fn reconnected(report: &Value) -> Option<u64> {
    let mut nodes = report["nodes"].as_array()?.iter();
    nodes.try_fold(0, |sum, node| Some(sum + node["reconnected"].as_u64()?))
}

/// Whether something failed: a lost connection that was not made again does.
fn has_failures(report: &Value) -> Result<bool> {
    let failures = report["failures"].as_array().context("no failures")?;
    Ok(!failures.is_empty())
}

/// The default, which node files of cases leave alone: messages that a peer has sent and this side has not taken in.
const PEER_CREDITS: u64 = 8;

#[cfg(test)]
mod tests {
    use super::{Sums, judge_line, settled};
    use anyhow::{Result, bail};
    use serde_json::{Value, json};

    /// 10 were submitted: 3 PUTs and 4 GETs ended well, 3 failed, with their connection.
    fn initiator() -> Value {
        json!({
            "accounts": [{
                "job": "workload", "posted": 10, "puts": 3, "gets": 4, "failed": [["connection closed", 2],
                ["no such connection", 1]], "refused": 1, "never": 0, "twice": 0,
            }],
            "verifications": [{ "enabled": true, "compared": 4, "wrong": 0 }],
            "failures": [],
            "nodes": [{ "reconnected": 1 }],
        })
    }

    /// All of 60 ended well over one connection, 20 of them PUTs with an ACK, 30 without.
    fn whole() -> Value {
        let line = |job, puts, gets| {
            json!({
                "job": job, "posted": puts + gets, "puts": puts, "gets": gets, "failed": [], "refused": 0, "never": 0,
                "twice": 0,
            })
        };
        json!({
            "accounts": [line("copy", 20, 4), line("workload", 30, 6)],
            "verifications": [{ "enabled": true, "compared": 6, "wrong": 0 }],
            "failures": [],
            "nodes": [{ "reconnected": 0 }],
        })
    }

    /// What a target has served on two cores, and how many connections it has ended.
    fn target(served: u64, ended: u64) -> Value {
        json!({
            "nodes": [{
                "cores": [{ "peer_transfers": 1 }, { "peer_transfers": served - 1 }],
                "counters": [["polls", 77], ["connections_ended", ended]],
            }],
            "failures": [],
        })
    }

    fn held(line: &str, served: u64) -> Result<Sums> {
        judge_line(line, |name| match name {
            "t" => Ok(target(served, 1)),
            "i" => Ok(initiator()),
            _ => bail!("no {name}"),
        })
    }

    type Change<'a> = &'a dyn Fn(&mut Value, &mut Value);

    /// Whether the reports agree where `reports` has changed them: the initiator's, the target's.
    fn agree(served: u64, ended: u64, change: impl Fn(&mut Value, &mut Value)) -> bool {
        let (mut ours, mut theirs) = (whole(), target(served, ended));
        change(&mut ours, &mut theirs);
        let reports = |name: &str| Ok(if name == "t" { &theirs } else { &ours }.clone());
        judge_line("t i", reports).is_ok()
    }

    #[test]
    fn a_lost_and_a_doubled_transfer_are_found() {
        let sums = Sums {
            posted: 10,
            begun: 9,
            well: 7,
            unanswered: 3,
            failed: 3,
            lost: true,
        };
        assert_eq!(settled(&initiator()).unwrap(), sums);
        let planted: [(&str, Value); 7] = [
            ("/accounts/0/never", json!(1)),
            ("/accounts/0/twice", json!(1)),
            ("/accounts/0/posted", json!(11)),
            ("/accounts/0/gets", json!(5)),
            ("/accounts/0/failed/0/0", json!("")),
            ("/verifications/0/compared", json!(3)),
            ("/verifications/0/wrong", json!(1)),
        ];
        for (place, value) in planted {
            let mut report = initiator();
            *report.pointer_mut(place).unwrap() = value;
            assert!(settled(&report).is_err(), "{place}");
        }
    }

    #[test]
    fn the_sides_must_agree() {
        for (line, served, agree) in [
            ("t i", 7, true),
            ("t i", 9, true),
            // A GET that ended well here was not served there, or one was served that had not been begun.
            ("t i", 3, false),
            ("t i", 10, false),
            ("t / i", 2, true),
            ("t / i", 10, false),
            ("t i / i", 18, true),
            ("t i / i", 19, false),
            ("t i / ?", 99, true),
            ("t i / ?", 3, false),
            ("- i", 99, true),
            ("t", 7, false),
            ("t missing", 7, false),
            ("missing i", 7, false),
        ] {
            assert_eq!(held(line, served).is_ok(), agree, "{line}, {served}");
        }
    }

    #[test]
    fn where_no_connection_was_lost_one_lost_transfer_is_found() {
        for (served, fits) in [(59, false), (60, true), (61, false)] {
            assert_eq!(agree(served, 1, |_, _| ()), fits, "{served}");
        }
    }

    #[test]
    fn a_lost_connection_costs_no_more_than_its_credits_and_no_transfer_that_was_answered() {
        let again = |ours: &mut Value, _: &mut Value| ours["nodes"][0]["reconnected"] = json!(1);
        let ours_failed =
            |ours: &mut Value, _: &mut Value| ours["failures"] = json!(["it is gone"]);
        let theirs_failed =
            |_: &mut Value, theirs: &mut Value| theirs["failures"] = json!(["it is gone"]);
        let changes: [Change<'_>; 3] = [&again, &ours_failed, &theirs_failed];
        for change in changes {
            for (served, ended, fits) in [
                (60, 1, true),
                (52, 1, true),
                (51, 1, false),
                (44, 2, true),
                (43, 2, false),
                // 20 PUTs with their ACKs, 10 GETs.
                (30, 99, true),
                (29, 99, false),
                (61, 99, false),
            ] {
                assert_eq!(agree(served, ended, change), fits, "{served}, {ended}");
            }
        }
        let silent = |ours: &mut Value, theirs: &mut Value| {
            again(ours, theirs);
            theirs["nodes"][0]["counters"] = json!([]);
        };
        assert!(!agree(60, 1, silent));
    }
}
