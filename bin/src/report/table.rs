//! The report as people read it.

use core::fmt::{self, Write as _};

use super::{AccountLine, Report};

impl fmt::Display for Report {
    /// The table.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}, {}, idle = {}", self.file, self.device, self.idle)?;
        writeln!(f, "{}", self.placement)?;
        writeln!(f, "clock: {}\n", self.clock)?;
        for ping in &self.pings {
            let verdict = if ping.ok { "ok" } else { "FAILED" };
            write!(
                f,
                "ping {} from {}: {verdict}, {}",
                ping.peer, ping.node, ping.answer
            )?;
            match ping.latency_us {
                Some(latency) => writeln!(f, ", {latency:.1} us")?,
                None => writeln!(f)?,
            }
        }
        for digest in &self.digests {
            let verdict = match (&digest.found, digest.ok) {
                (None, _) => "NOT COMPARED",
                (_, true) => "ok",
                (_, false) => "MISMATCH",
            };
            let shown = digest.found.as_ref().unwrap_or(&digest.expected);
            writeln!(f, "sha-256 of {}: {verdict}  {shown}", digest.what)?;
        }
        for line in &self.verifications {
            match (line.enabled, line.wrong) {
                (false, _) => writeln!(f, "workload of {}: not verified", line.node)?,
                (true, 0) if line.compared == 0 => {
                    writeln!(f, "workload of {}: no GETs compared", line.node)?;
                }
                (true, 0) => writeln!(
                    f,
                    "workload of {}: {} GETs compared, ok",
                    line.node, line.compared
                )?,
                (true, wrong) => writeln!(
                    f,
                    "workload of {}: {} GETs compared, {wrong} MISMATCH ({} bytes)",
                    line.node, line.compared, line.wrong_bytes
                )?,
            }
        }
        for line in &self.accounts {
            writeln!(f, "{line}")?;
        }
        for line in &self.repeats {
            writeln!(
                f,
                "{} of {} with {}: {} transfers failed with their connection and were made again",
                line.job, line.node, line.peer, line.transfers
            )?;
        }
        for node in self.nodes.iter().filter(|node| node.reconnected != 0) {
            let lost = several(node.reconnected, "lost connection");
            writeln!(f, "{} made {lost} again", node.nid)?;
        }
        if let Some(capture) = &self.capture {
            writeln!(
                f,
                "capture: {} frames, {} bytes",
                capture.frames, capture.bytes
            )?;
        }
        for failure in &self.failures {
            writeln!(f, "FAILED: {failure}")?;
        }
        if self.interrupted {
            writeln!(f, "interrupted: the jobs did not run to their end")?;
        }
        let transfers = self.transfer_table();
        if transfers.rows.len() > 1 {
            write!(f, "\n{transfers}")?;
        }
        write!(f, "\n{}\n", self.node_table())?;
        let cores = self.core_table();
        if cores.rows.len() > 1 {
            writeln!(f, "{cores}")?;
        }
        write!(f, "{}", self.thread_table())
    }
}

impl fmt::Display for AccountLine {
    /// In a line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verdict = if self.is_settled() {
            "each ended once"
        } else {
            "NOT EACH ENDED ONCE"
        };
        let fills = match self.fills {
            0 => String::new(),
            fills => format!(" ({fills} to fill the region first, not timed)"),
        };
        write!(
            f,
            "{} of {} with {}: {}, {verdict}: {}{fills} and {} well",
            self.job,
            self.node,
            self.peer,
            several(self.posted, "transfer"),
            several(self.puts, "PUT"),
            several(self.gets, "GET")
        )?;
        for (error, count) in &self.failed {
            write!(f, ", {count} with `{error}`")?;
        }
        if self.never != 0 || self.twice != 0 {
            write!(f, ", {} never, {} twice", self.never, self.twice)?;
        }
        Ok(())
    }
}

impl Report {
    fn transfer_table(&self) -> Table {
        let ticks = if self.clock.starts_with("TSC") {
            "tsc/transfer"
        } else {
            "ns/transfer"
        };
        let mut table = Table::new(&[
            "transfers",
            "count",
            "MB",
            "GB/s",
            "p50 us",
            "p99 us",
            "max us",
            ticks,
            "WRs/transfer",
            "doorbells/transfer",
        ]);
        for line in &self.transfers {
            let pair = |ours: Option<f64>, theirs: Option<f64>| match (ours, theirs) {
                (Some(ours), Some(theirs)) => format!("{ours:.2} + {theirs:.2}"),
                _ => String::new(),
            };
            table.row(vec![
                line.name.to_owned(),
                line.transfers.to_string(),
                megabytes(line.bytes),
                format!("{:.2}", line.gb_per_s),
                format!("{:.1}", line.p50_us),
                format!("{:.1}", line.p99_us),
                format!("{:.1}", line.max_us),
                line.ticks_per_transfer
                    .map_or_else(String::new, |ticks| format!("{ticks:.0}")),
                pair(
                    line.work_requests_per_transfer,
                    line.peer_work_requests_per_transfer,
                ),
                pair(
                    line.doorbells_per_transfer,
                    line.peer_doorbells_per_transfer,
                ),
            ]);
        }
        table
    }

    /// What each core of a node of several has moved.
    fn core_table(&self) -> Table {
        let mut table = Table::new(&[
            "core of",
            "connections",
            "transfers",
            "of peers",
            "WRs",
            "doorbells",
        ]);
        for node in self.nodes.iter().filter(|node| node.cores.len() > 1) {
            for (nth, core) in node.cores.iter().enumerate() {
                table.row(vec![
                    format!("{}, {}", node.nid, ORDINALS.get(nth).unwrap_or(&"another")),
                    core.connections.to_string(),
                    core.transfers.to_string(),
                    core.peer_transfers.to_string(),
                    core.work_requests.to_string(),
                    core.doorbells.to_string(),
                ]);
            }
        }
        table
    }

    fn node_table(&self) -> Table {
        let mut table = Table::new(&[
            "node",
            "registrations",
            "mappings",
            "arena key",
            "staged",
            "refused",
            "invalidations",
            "by the peer",
            "rebuilt",
            "keys alive",
            "left over",
        ]);
        for node in &self.nodes {
            let left = match &node.left_over {
                None => String::from("DID NOT END"),
                Some(left) if left.is_empty() => String::from("nothing"),
                Some(left) => left.iter().fold(String::new(), |mut text, (name, count)| {
                    let comma = if text.is_empty() { "" } else { ", " };
                    let _ = write!(text, "{comma}{count} {name}");
                    text
                }),
            };
            table.row(vec![
                node.nid.clone(),
                node.registrations.iter().sum::<u64>().to_string(),
                node.by_mapping.to_string(),
                node.by_arena_key.to_string(),
                node.staged.to_string(),
                node.unmappable.to_string(),
                node.invalidations.to_string(),
                node.remote_invalidations.to_string(),
                node.windows_rebuilt.to_string(),
                node.keys_alive.to_string(),
                left,
            ]);
        }
        table
    }

    fn thread_table(&self) -> Table {
        let mut table = Table::new(&["polling thread", "allocations", "preemptions", "yields"]);
        let count = |count: Option<u64>| {
            count.map_or_else(|| String::from("not counted"), |count| count.to_string())
        };
        for thread in &self.threads {
            table.row(vec![
                format!("core {}", thread.core),
                count(thread.allocations),
                count(thread.preemptions),
                count(thread.yields),
            ]);
        }
        table
    }
}

/// Rows of text; the first column is aligned left, the others right.
pub(crate) struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    pub(crate) fn new(head: &[&str]) -> Self {
        Self {
            rows: vec![head.iter().map(|cell| (*cell).to_owned()).collect()],
        }
    }

    pub(crate) fn row(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        for row in &self.rows {
            let mut line = String::new();
            for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
                if column == 0 {
                    let _ = write!(line, "{cell:<width$}");
                } else {
                    let _ = write!(line, "  {cell:>width$}");
                }
            }
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

/// So many of them.
fn several(count: u64, what: &str) -> String {
    let plural = if count == 1 { "" } else { "s" };
    format!("{count} {what}{plural}")
}

/// Three digits of what is there, or more.
pub(super) fn megabytes(bytes: u64) -> String {
    let amount = bytes as f64 / 1e6;
    match bytes {
        0 => String::from("0"),
        1..10_000_000 => format!("{amount:.3}"),
        _ => format!("{amount:.1}"),
    }
}

const ORDINALS: [&str; 8] = [
    "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth",
];
