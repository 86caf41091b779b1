//! The report, as text and as JSON.

use core::fmt::Write as _;

use serde_json::{Value, json};

use crate::harness::{Bound, Judged, Measured, Outcome, Role};
use crate::stats::Summary;

/// The head of the table; what the columns mean.
#[must_use]
pub fn head() -> String {
    format!(
        "{:<34} {:>6} {:>8} {:>8} {:>8}   {:>8} {:>8} {:>8}   {:>7}\n",
        "", "", "tsc min", "p50", "p99", "ns min", "p50", "p99", "to ours"
    )
}

/// One row: its name, then a line per contender.
#[must_use]
pub fn text(row: &Measured) -> String {
    let mut out = format!("{}, per {}", row.name, row.operation);
    if let Some((before, after)) = row.distance {
        // Writing to a String does not fail.
        let _ = write!(
            out,
            "; a line there and back took {before:.0} ns before, {after:.0} after"
        );
    }
    out.push('\n');
    for outcome in &row.outcomes {
        line(&mut out, row, outcome);
    }
    for goal in &row.goals {
        let _ = writeln!(
            out,
            "  goal: {} {}: {}, {}",
            goal.text,
            bound(goal),
            figure(goal.value),
            verdict(goal)
        );
    }
    out
}

fn bound(goal: &Judged) -> String {
    match goal.bound {
        Bound::AtLeast(least) => format!("at least {}", figure(least)),
        Bound::AtMost(most) => format!("at most {}", figure(most)),
    }
}

fn verdict(goal: &Judged) -> &'static str {
    if goal.reached() { "reached" } else { "missed" }
}

fn line(out: &mut String, row: &Measured, outcome: &Outcome) {
    let Outcome { ticks, ns, .. } = outcome;
    let _ = write!(
        out,
        "  {:<32} {:>6} {:>8} {:>8} {:>8}   {:>8} {:>8} {:>8}   {:>6}x",
        outcome.name,
        outcome.role.name(),
        figure(ticks.min),
        figure(ticks.p50),
        figure(ticks.p99),
        figure(ns.min),
        figure(ns.p50),
        figure(ns.p99),
        figure(row.ratio(outcome)),
    );
    if let Some(paired) = outcome.paired.filter(|_| outcome.role != Role::Ours) {
        let _ = write!(
            out,
            "  ({} to {} in {} blocks)",
            figure(paired.low),
            figure(paired.high),
            paired.blocks
        );
    }
    if outcome.flagged() {
        let _ = write!(
            out,
            "  preempted in {} of {} samples",
            outcome.preempted, outcome.samples
        );
    }
    out.push('\n');
    let speed = row
        .gigabytes(outcome)
        .map(|speed| format!("{} GB/s", figure(speed)));
    let figures = outcome
        .figures
        .iter()
        .map(|extra| format!("{} {}", figure(extra.value), extra.name));
    let all: Vec<_> = speed.into_iter().chain(figures).collect();
    if !all.is_empty() {
        let _ = writeln!(out, "      {}", all.join(", "));
    }
}

/// Three digits that count.
fn figure(value: f64) -> String {
    match value {
        v if v < 10.0 => format!("{v:.2}"),
        v if v < 100.0 => format!("{v:.1}"),
        v => format!("{v:.0}"),
    }
}

/// One row for machines.
#[must_use]
pub fn json(row: &Measured) -> Value {
    json!({
        "row": row.name,
        "operation": row.operation,
        "bytes": row.bytes,
        "goals": row.goals.iter().map(|goal| json!({
            "goal": format!("{} {}", goal.text, bound(goal)),
            "value": goal.value,
            "reached": goal.reached(),
        })).collect::<Vec<_>>(),
        "line_round_trip_ns": row.distance.map(|(before, after)| [before, after]),
        "contenders": row.outcomes.iter().map(|outcome| json!({
            "name": outcome.name,
            "role": outcome.role.name(),
            "samples": outcome.samples,
            "operations_per_sample": outcome.batch,
            "preempted_samples": outcome.preempted,
            "flagged": outcome.flagged(),
            "tsc": summary(outcome.ticks),
            "ns": summary(outcome.ns),
            "ratio_to_ours": row.ratio(outcome),
            "paired_ratio_to_ours": outcome.paired.map(|paired| json!({
                "blocks": paired.blocks, "p50": paired.p50, "low": paired.low, "high": paired.high,
            })),
            "gigabytes_per_second": row.gigabytes(outcome),
            "figures": outcome.figures.iter()
                .map(|extra| (extra.name.to_owned(), json!(extra.value)))
                .collect::<serde_json::Map<_, _>>(),
        })).collect::<Vec<_>>(),
    })
}

fn summary(summary: Summary) -> Value {
    json!({ "min": summary.min, "p50": summary.p50, "p99": summary.p99 })
}

#[cfg(test)]
mod tests {
    use super::{json, text};
    use crate::harness::{Bound, Figure, Judged, Measured, Outcome, Role};
    use crate::stats::Summary;

    fn outcome(name: &str, role: Role, p50: f64, preempted: usize) -> Outcome {
        let ticks = Summary {
            min: p50 / 2.0,
            p50,
            p99: p50 * 10.0,
        };
        Outcome {
            name: name.to_owned(),
            role,
            batch: 64,
            samples: 20,
            preempted,
            ticks,
            ns: ticks.map(|ticks| ticks / 2.0),
            paired: None,
            figures: Vec::new(),
        }
    }

    fn row() -> Measured {
        Measured {
            name: "ring/same-core".to_owned(),
            operation: "object",
            outcomes: vec![
                outcome("index ring", Role::Ours, 2.0, 0),
                outcome("rtrb", Role::Rival, 5.0, 3),
            ],
            bytes: 0,
            goals: Vec::new(),
            distance: Some((60.0, 330.4)),
        }
    }

    #[test]
    fn the_table_names_unit_ratio_and_preemption() {
        let text = text(&row());
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(
            lines[0],
            "ring/same-core, per object; a line there and back took 60 ns before, 330 after"
        );
        assert!(lines[1].trim_end().ends_with("1.00x"), "{}", lines[1]);
        assert!(
            lines[2].ends_with("2.50x  preempted in 3 of 20 samples"),
            "{}",
            lines[2]
        );
    }

    #[test]
    fn goals_speed_and_figures_are_told() {
        let mut row = row();
        row.bytes = 4096;
        row.outcomes[0].figures.push(Figure {
            name: "doorbells",
            value: 2.0,
        });
        for most in [1.0, 3.0] {
            row.goals.push(Judged {
                text: "ours over the floor",
                bound: Bound::AtMost(most),
                value: 2.0,
            });
        }
        let text = text(&row);
        assert!(text.contains("      4096 GB/s, 2.00 doorbells\n"), "{text}");
        assert!(
            text.contains("  goal: ours over the floor at most 1.00: 2.00, missed\n"),
            "{text}"
        );
        assert!(text.contains("at most 3.00: 2.00, reached\n"), "{text}");
        let json = json(&row);
        assert_eq!(json["goals"][0]["reached"], false);
        assert_eq!(json["contenders"][0]["figures"]["doorbells"], 2.0);
        assert_eq!(json["contenders"][0]["gigabytes_per_second"], 4096.0);
    }

    #[test]
    fn the_json_says_the_same() {
        let json = json(&row());
        assert_eq!(json["contenders"][1]["ratio_to_ours"], 2.5);
        assert_eq!(json["contenders"][1]["ns"]["p50"], 2.5);
        assert_eq!(json["contenders"][1]["flagged"], true);
        assert_eq!(json["contenders"][0]["flagged"], false);
    }
}
