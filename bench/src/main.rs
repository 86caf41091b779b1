//! Measures and reports; see the library.

use core::time::Duration;
use std::fs;
use std::io::{self, Write as _};
use std::path::PathBuf;

use anyhow::{Context as _, Result, bail};
use clap::Parser;
use o2poll_bench::harness::Effort;
use o2poll_bench::machine::{self, Load, Machine};
use o2poll_bench::tsc::Calibration;
use o2poll_bench::{rows, table};
use serde_json::json;

/// Cycle-level microbenchmarks of o2poll, with floors and rivals.
///
/// Figures are per operation: TSC reference cycles and nanoseconds; least, median and 99th percentile
/// of batch means. "to ours" is the median over that of the row's first line; in brackets the interval, with 95 % confidence,
/// of the median of the ratios of samples that were taken in the same turn.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// Only rows whose name contains one of these
    filter: Vec<String>,
    /// The same as the positional filter
    #[arg(long = "filter", value_name = "FILTER")]
    more: Vec<String>,
    /// A fraction of a second per row: for a look, not for a report
    #[arg(long)]
    quick: bool,
    /// Writes the figures to FILE as well
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Names the rows and measures nothing
    #[arg(long)]
    list: bool,
    /// The two cores to measure on, as NEAR,FAR [default: the first two]
    #[arg(long, value_name = "NEAR,FAR", value_parser = pair)]
    cores: Option<(usize, usize)>,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let mut specs = rows::all();
    let filters: Vec<_> = arguments.filter.iter().chain(&arguments.more).collect();
    specs.retain(|spec| {
        filters.is_empty() || filters.iter().any(|filter| spec.name.contains(*filter))
    });
    if specs.is_empty() {
        bail!("no row's name contains any of {filters:?}; `--list` names them");
    }
    if arguments.list {
        for spec in specs {
            say(&spec.name)?;
        }
        return Ok(());
    }

    let (cores, count) = machine::cores(arguments.cores)?;
    if !core_affinity::set_for_current(cores.near) {
        bail!("cannot pin the measuring thread to core {}", cores.near.id);
    }
    let before = Load::now();
    let calibration = Calibration::over(Duration::from_millis(200));
    let machine = Machine::describe(cores, count, calibration, Load::now().since(before));
    say(&format!("{}\n\n{}", machine.text(), table::head()))?;

    let effort = if arguments.quick {
        Effort::quick()
    } else {
        Effort::full()
    };
    let before = Load::now();
    let mut measured = Vec::new();
    for spec in specs {
        if spec.cores > 1 && cores.near == cores.far {
            say(&format!(
                "{}: not run, needs {} cores\n",
                spec.name, spec.cores
            ))?;
            continue;
        }
        let apart = || (spec.cores > 1).then(|| rows::floor::distance(cores, &calibration));
        let before = apart();
        let mut row = spec.build(cores).measure(&effort, &calibration);
        row.distance = before.zip(apart());
        say(&table::text(&row))?;
        measured.push(row);
    }
    let (busy, stolen) = Load::now().since(before);
    say(&format!(
        "meanwhile the machine was {busy:.0} % busy, ourselves included, and {stolen:.1} % of its time was stolen"
    ))?;

    if let Some(path) = arguments.json {
        let report = json!({
            "machine": machine.json(),
            "busy_percent": busy,
            "stolen_percent": stolen,
            "rows": measured.iter().map(table::json).collect::<Vec<_>>(),
        });
        fs::write(&path, format!("{report:#}\n"))
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// Writes to standard output; a reader that has gone is an error, not a panic.
fn say(text: &str) -> Result<()> {
    writeln!(io::stdout(), "{text}").context("cannot write to standard output")
}

fn pair(text: &str) -> Result<(usize, usize)> {
    let (near, far) = text.split_once(',').context("two core numbers, as 0,1")?;
    Ok((near.trim().parse()?, far.trim().parse()?))
}
