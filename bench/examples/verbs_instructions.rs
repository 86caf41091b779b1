//! Posts and polls through the verbs backend, over a provider that only queues completions, for a tool that counts
//! instructions. The backend's own are those of `backend` without those of `raw`:
//!
//! ```sh
//! cargo build --release -p o2poll-bench --features verbs --example verbs_instructions
//! valgrind --tool=callgrind --toggle-collect='*measured*' target/release/examples/verbs_instructions backend register 16000
//! valgrind --tool=callgrind --toggle-collect='*measured*' target/release/examples/verbs_instructions raw register 16000
//! ```

use std::env;

use anyhow::{Context as _, Result, bail};
use o2poll_bench::rows::verbs::{Operation, backend, raw_calls};

fn main() -> Result<()> {
    let arguments: Vec<_> = env::args().skip(1).collect();
    let [who, operation, count] = &arguments[..] else {
        bail!("usage: verbs_instructions backend|raw write|send|receive|register|poll COUNT");
    };
    let operation = match &operation[..] {
        "write" => Operation::Write,
        "send" => Operation::Send,
        "receive" => Operation::Receive,
        "register" => Operation::Register,
        "poll" => Operation::Poll,
        other => bail!("{other} is none of write, send, receive, register and poll"),
    };
    let mut run = match &who[..] {
        "backend" => backend(operation),
        "raw" => raw_calls(operation),
        other => bail!("{other} is neither backend nor raw"),
    };
    let count: u64 = count.parse().context("COUNT is a number")?;
    let granule = operation.granule();
    if !count.is_multiple_of(granule) {
        bail!("COUNT is a multiple of {granule} here");
    }
    run(granule * 64);
    measured(&mut run, count);
    Ok(())
}

#[inline(never)]
fn measured(run: &mut impl FnMut(u64), count: u64) {
    run(count);
}
