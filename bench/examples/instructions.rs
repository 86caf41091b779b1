//! Runs transfers between two nodes on one thread, for a tool that counts instructions:
//!
//! ```sh
//! cargo build --release -p o2poll-bench --example instructions
//! valgrind --tool=callgrind --toggle-collect='*measured*' target/release/examples/instructions get 4096 1 2000
//! ```
//!
//! `idle COUNT` instead of a transfer: polls that find nothing.

use std::env;

use anyhow::{Context as _, Result, bail};
use o2poll_bench::nodes::End;
use o2poll_bench::rows::transfer::{Kind, alone, idle};

fn main() -> Result<()> {
    let arguments: Vec<_> = env::args().skip(1).collect();
    if let [kind, count] = &arguments[..]
        && kind == "idle"
    {
        let mut run = idle();
        measured(&mut run, count.parse().context("COUNT is a number")?);
        return Ok(());
    }
    let [kind, length, depth, count, rest @ ..] = &arguments[..] else {
        bail!(
            "usage: instructions immediate|get|put LENGTH IN_FLIGHT COUNT [done|inv|imm], or idle COUNT"
        );
    };
    let kind = match &kind[..] {
        "immediate" => Kind::Immediate,
        "get" => Kind::Get,
        "put" => Kind::Put,
        other => bail!("{other} is none of immediate, get and put"),
    };
    let end = match rest.first().map_or("done", |end| &end[..]) {
        "done" => End::Done,
        "inv" => End::KillingDone,
        "imm" => End::Immediate,
        other => bail!("{other} is none of done, inv and imm"),
    };
    let mut run = alone(
        kind,
        length.parse().context("LENGTH is in bytes")?,
        depth.parse().context("IN_FLIGHT is a number")?,
        end,
    );
    let count = count.parse().context("COUNT is a number")?;
    run(1000);
    measured(&mut run, count);
    Ok(())
}

#[inline(never)]
fn measured(run: &mut impl FnMut(u64), count: u64) {
    run(count);
}
