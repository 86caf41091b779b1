//! Registers and invalidates, for a tool that counts instructions; see the rows `map`:
//!
//! ```sh
//! cargo build --release -p o2poll-bench --example registrations
//! valgrind --tool=callgrind --toggle-collect='*measured*' target/release/examples/registrations page-list 256 with 2000
//! ```

use std::env;

use anyhow::{Context as _, Result, bail};
use o2poll_bench::rows::map::alone;

fn main() -> Result<()> {
    let arguments: Vec<_> = env::args().skip(1).collect();
    let [name, pieces, side, count] = &arguments[..] else {
        bail!("usage: registrations MECHANISM FRAGMENTS with|without COUNT");
    };
    let mapped = match &side[..] {
        "with" => true,
        "without" => false,
        other => bail!("{other} is neither with nor without"),
    };
    let pieces = pieces.parse().context("FRAGMENTS is a number")?;
    let count = count.parse().context("COUNT is a number")?;
    let mut run = alone(name, pieces, mapped)
        .with_context(|| format!("{name} is no mechanism of the rows map/"))?;
    run(1000);
    measured(&mut run, count);
    Ok(())
}

#[inline(never)]
fn measured(run: &mut impl FnMut(u64), count: u64) {
    run(count);
}
