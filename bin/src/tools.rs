//! `o2poll ping`, `get` and `put`: one node that asks another, over an RDMA device.

use core::time::Duration;
use std::path::PathBuf;
#[cfg(not(feature = "verbs"))]
use std::process::ExitCode;

use clap::Args;
use o2poll::Target;
use o2poll_dataplane::wire::Nid;

/// The other node, and from where it is asked.
#[derive(Args)]
pub(crate) struct Peer {
    /// The other node, e.g. 192.168.1.10@o2ib.
    #[arg(value_parser = nid)]
    nid: Nid,
    /// RDMA device to ask from; the first of this machine otherwise.
    #[arg(long, value_name = "NAME")]
    device: Option<String>,
    /// NID to ask as; the device's address otherwise.
    #[arg(long, value_name = "NID", value_parser = nid)]
    from: Option<Nid>,
    /// How long to wait for a connection and for each transfer.
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = crate::cli::duration)]
    timeout: Duration,
}

#[derive(Args)]
pub(crate) struct PingArgs {
    #[command(flatten)]
    peer: Peer,
    /// How often.
    #[arg(short, long, default_value_t = 1)]
    count: u32,
}

#[derive(Args)]
pub(crate) struct GetArgs {
    #[command(flatten)]
    peer: Peer,
    /// What it exports, as PORTAL:BITS, e.g. 51:0x1.
    target: Target,
    /// File to write.
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// Where to begin, in bytes.
    #[arg(long, default_value_t = 0)]
    offset: u32,
    /// Bytes; all up to the end of the export otherwise.
    #[arg(long)]
    length: Option<u32>,
}

#[derive(Args)]
pub(crate) struct PutArgs {
    /// File to read.
    file: PathBuf,
    #[command(flatten)]
    peer: Peer,
    /// What it exports, as PORTAL:BITS, e.g. 51:0x1.
    target: Target,
    /// Where to begin, in bytes.
    #[arg(long, default_value_t = 0)]
    offset: u32,
}

pub(crate) fn nid(text: &str) -> Result<Nid, String> {
    text.parse()
        .map_err(|_| format!("{}, e.g. 192.168.1.10@o2ib", o2poll_config::not_a_nid(text)))
}

#[cfg(not(feature = "verbs"))]
mod commands {
    use super::{ExitCode, GetArgs, Peer, PingArgs, PutArgs};

    pub(crate) fn ping(args: &PingArgs) -> ExitCode {
        let _ = args.count;
        not_in_this_build(&args.peer)
    }

    pub(crate) fn get(args: &GetArgs) -> ExitCode {
        let _ = (&args.target, &args.output, args.offset, args.length);
        not_in_this_build(&args.peer)
    }

    pub(crate) fn put(args: &PutArgs) -> ExitCode {
        let _ = (&args.target, &args.file, args.offset);
        not_in_this_build(&args.peer)
    }

    fn not_in_this_build(peer: &Peer) -> ExitCode {
        let _ = (&peer.device, peer.from, peer.timeout);
        eprintln!(
            "o2poll: {} can only be asked over an RDMA device, which is not in this build: build it with `cargo build \
             --release --features verbs`. The software device joins only the nodes of one process: see `o2poll run`",
            peer.nid
        );
        ExitCode::from(crate::cli::NOT_STARTED)
    }
}

#[cfg(feature = "verbs")]
mod commands {
    use core::sync::atomic::Ordering;
    use std::fs;
    use std::io::{self, Write as _};
    use std::process::ExitCode;

    use indicatif::{ProgressBar, ProgressStyle};
    use o2poll::NodeError;
    use o2poll::verbs::{CHUNK, Client};
    use o2poll_dataplane::endpoint;

    use super::{GetArgs, Peer, PingArgs, PutArgs};
    use crate::cli::{BROKEN, CUT_SHORT, NOT_STARTED};
    use crate::output::Output;

    /// What went wrong, and its exit status.
    struct Trouble(u8, String);

    impl From<NodeError> for Trouble {
        fn from(error: NodeError) -> Self {
            let status = match error {
                NodeError::Dial { .. }
                | NodeError::Lost { .. }
                | NodeError::Fault { .. }
                | NodeError::Removed { .. }
                | NodeError::Died { .. } => BROKEN,
                _ => NOT_STARTED,
            };
            Self(status, error.to_string())
        }
    }

    pub(crate) fn ping(args: &PingArgs) -> ExitCode {
        end((|| {
            let mut client = connect(&args.peer, 0)?;
            let mut lost = 0;
            for _ in 0..args.count {
                match client.ping()? {
                    Ok((pong, took)) => println!(
                        "{}: {} bytes, {} interface{}, {:?}, {:.0} us",
                        args.peer.nid,
                        pong.bytes,
                        pong.interfaces,
                        if pong.interfaces == 1 { "" } else { "s" },
                        pong.status,
                        took.as_secs_f64() * 1e6
                    ),
                    Err(error) => {
                        lost += 1;
                        println!("{}: {error}", args.peer.nid);
                    }
                }
            }
            client.close()?;
            if lost > 0 {
                return Err(Trouble(BROKEN, format!("{lost} of {} lost", args.count)));
            }
            Ok(())
        })())
    }

    pub(crate) fn get(args: &GetArgs) -> ExitCode {
        end((|| {
            let unwritten = |error: io::Error| local("write", &args.output.display(), &error);
            // Told before anybody is asked, and begun only when there is somebody to ask.
            Output::try_out(&args.output).map_err(unwritten)?;
            let mut client = connect(&args.peer, CHUNK)?;
            let stop = crate::cli::on_signals()
                .map_err(|error| Trouble(NOT_STARTED, format!("cannot catch signals: {error}")))?;
            let mut file = Output::begin(&args.output).map_err(unwritten)?;
            let bar = bar(args.length.map(u64::from));
            let (mut at, mut size) = (args.offset, CHUNK);
            let end_at = args.length.map(|length| args.offset.saturating_add(length));
            let mut got = 0_u64;
            loop {
                let left = end_at.map_or(u32::MAX, |end| end.saturating_sub(at));
                let length = size.min(left);
                if length == 0 {
                    break;
                }
                // Relaxed: it carries nothing but itself.
                if stop.load(Ordering::Relaxed) {
                    return Err(Trouble(CUT_SHORT, format!("interrupted at offset {at}")));
                }
                // What is short goes as a message, and one that matches nothing is dropped without an answer, as in LNet. So
                // a short piece is asked for together with what is there already.
                let again = match end_at {
                    None if length < SHORT => SHORT.min(at - args.offset),
                    _ => 0,
                };
                match client.get(args.target, at - again, length + again)? {
                    Ok(mut bytes) => {
                        bytes.drain(..bytes.len().min(again as usize));
                        file.write_all(&bytes).map_err(unwritten)?;
                        got += bytes.len() as u64;
                        at = at.saturating_add(length);
                        bar.inc(bytes.len() as u64);
                    }
                    // It ends before: how long it is, only a smaller transfer tells.
                    Err(endpoint::Error::Peer(ENODATA)) if end_at.is_none() => size = length / 2,
                    Err(endpoint::Error::TimedOut) if end_at.is_none() && length < SHORT => {
                        let hint = "nothing there is so long, or nobody answers: say --length";
                        return Err(Trouble(BROKEN, format!("at offset {at}: {hint}")));
                    }
                    Err(error) => return Err(Trouble(BROKEN, at_offset(&error, at))),
                }
            }
            bar.finish_and_clear();
            client.close()?;
            if got == 0 && args.length != Some(0) {
                return Err(Trouble(
                    BROKEN,
                    format!("{} exports nothing as {}", args.peer.nid, args.target),
                ));
            }
            let direct = file.is_direct();
            file.finish().map_err(unwritten)?;
            // Standard output may be what it was written to.
            if direct {
                eprintln!("{got} bytes");
            } else {
                println!("{got} bytes");
            }
            Ok(())
        })())
    }

    pub(crate) fn put(args: &PutArgs) -> ExitCode {
        end((|| {
            let bytes = fs::read(&args.file)
                .map_err(|error| local("read", &args.file.display(), &error))?;
            let mut client = connect(&args.peer, CHUNK)?;
            let bar = bar(Some(bytes.len() as u64));
            let mut at = args.offset;
            for chunk in bytes.chunks(CHUNK as usize) {
                let taken = client
                    .put(args.target, at, chunk)?
                    .map_err(|error| Trouble(BROKEN, at_offset(&error, at)))?;
                if taken as usize != chunk.len() {
                    return Err(Trouble(
                        BROKEN,
                        format!(
                            "{} took {taken} of {} bytes at offset {at}: is the export writable, and large enough?",
                            args.peer.nid,
                            chunk.len()
                        ),
                    ));
                }
                at = at.saturating_add(taken);
                bar.inc(u64::from(taken));
            }
            bar.finish_and_clear();
            client.close()?;
            println!("{} bytes", bytes.len());
            Ok(())
        })())
    }

    fn connect(peer: &Peer, longest: u32) -> Result<Client, Trouble> {
        Ok(Client::connect(
            peer.nid,
            peer.device.as_deref(),
            peer.from,
            peer.timeout,
            longest,
        )?)
    }

    fn local(what: &str, path: &dyn core::fmt::Display, error: &io::Error) -> Trouble {
        Trouble(NOT_STARTED, format!("cannot {what} {path}: {error}"))
    }

    fn at_offset(error: &endpoint::Error, at: u32) -> String {
        format!("at offset {at}: {error}")
    }

    fn bar(length: Option<u64>) -> ProgressBar {
        let (bar, template) = match length {
            Some(length) => (
                ProgressBar::new(length),
                "{bar:40} {bytes}/{total_bytes} {bytes_per_sec}",
            ),
            None => (
                ProgressBar::new_spinner(),
                "{spinner} {bytes} {bytes_per_sec}",
            ),
        };
        match ProgressStyle::with_template(template) {
            Ok(style) => bar.with_style(style),
            Err(_) => bar,
        }
    }

    fn end(outcome: Result<(), Trouble>) -> ExitCode {
        match outcome {
            Ok(()) => ExitCode::SUCCESS,
            Err(Trouble(status, why)) => {
                eprintln!("o2poll: {why}");
                ExitCode::from(status)
            }
        }
    }

    /// Longer than what fits into a message.
    const SHORT: u32 = 4096;
    /// Nothing there matches.
    const ENODATA: i32 = -61;
}

pub(crate) use commands::{get, ping, put};
