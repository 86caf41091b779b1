//! The command line.

use core::ops::RangeInclusive;
use core::sync::atomic::AtomicBool;
use core::time::Duration;
use std::fs::{self, File};
use std::io::{self, IsTerminal as _, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use clap::{Args, Parser, Subcommand, ValueEnum};
use o2poll::{Asked, Bars, Budget, Devices, NodeError, Options, Report, outline, run};
use o2poll_config::{Config, Device, Machine, Overrides, SoftProfile, parse_duration};
use o2poll_dataplane::wire::Nid;
use signal_hook::consts::{SIGINT, SIGTERM};

use crate::tools;

/// LNet's o2iblnd in user space: nodes that move PUTs and GETs by RDMA, from polling threads.
#[derive(Parser)]
#[command(name = "o2poll", version, after_help = EXAMPLES, after_long_help = STATUS)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run the nodes and jobs of a node file, and print what was found.
    Run(RunArgs),
    /// Tell every mistake of node files, or what they would do.
    Check {
        /// Node files.
        #[arg(required = true)]
        files: Vec<PathBuf>,
    },
    /// Tell what a node file takes per connection and per core, beside what ko2iblnd takes for the same.
    Plan {
        /// The node file.
        file: PathBuf,
        /// As if each node had so many peers.
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_536))]
        peers: Option<u32>,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Tell what each device and profile can do, and what becomes of which buffer on it.
    Devices(DevicesArgs),
    /// Ping another node over an RDMA device.
    Ping(tools::PingArgs),
    /// Read what another node exports into a file, over an RDMA device.
    Get(tools::GetArgs),
    /// Write a file into what another node exports, over an RDMA device.
    Put(tools::PutArgs),
    /// Print the documented node file that comes with the program.
    #[command(visible_alias = "print-default")]
    Config,
}

#[derive(Args)]
struct RunArgs {
    /// The node file.
    file: PathBuf,
    /// Export this file instead of the first that the node file exports.
    #[arg(long, value_name = "PATH")]
    export: Option<PathBuf>,
    /// Run workloads for this long, e.g. 30s.
    #[arg(long, value_name = "TIME", value_parser = duration)]
    duration: Option<Duration>,
    /// Let the software device behave like this card.
    #[arg(long, value_enum)]
    profile: Option<ProfileArg>,
    /// Do not compare what workloads GET with what they PUT: shows the speed without the checking.
    #[arg(long)]
    no_verify: bool,
    /// Seed of the workloads' sizes, order and contents.
    #[arg(long)]
    seed: Option<u64>,
    /// Write the report as JSON too; `-` is standard output, instead of the table.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// On an RDMA device: run only this node of the file; the others run elsewhere. May be given several times.
    #[arg(long, value_name = "NID", value_parser = tools::nid)]
    node: Vec<Nid>,
    /// Write what the nodes send each other to this file, as RoCEv2 frames that Wireshark dissects. Slows the
    /// run down: nothing is left out.
    #[arg(long, value_name = "FILE")]
    pcap: Option<PathBuf>,
    /// Say what happens: placement, connections.
    #[arg(short, long)]
    verbose: bool,
}

#[derive(Args)]
struct DevicesArgs {
    /// With exposure = "arena".
    #[arg(long)]
    exposed: bool,
    /// With this map_on_demand.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(0..=256))]
    map_on_demand: u16,
    /// With this max_frags.
    #[arg(long, value_name = "N", default_value_t = 257, value_parser = clap::value_parser!(u16).range(1..=257))]
    max_frags: u16,
    /// Without staging buffers.
    #[arg(long)]
    no_staging: bool,
    /// As JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum ProfileArg {
    /// Fast registration as kernel drivers have it.
    Frwr,
    /// What user space has on ConnectX-4 and later.
    Mlx5,
    /// Page lists without gaps.
    Mlx4,
    /// Type-2B memory windows only.
    Windows,
    /// The same as soft-RoCE has them.
    Rxe,
    /// No fast registration: only mappings of the control side.
    Mthca,
    /// Nothing but the key of the arena.
    Bare,
}

impl From<ProfileArg> for SoftProfile {
    fn from(profile: ProfileArg) -> Self {
        match profile {
            ProfileArg::Frwr => Self::Frwr,
            ProfileArg::Mlx5 => Self::Mlx5,
            ProfileArg::Mlx4 => Self::Mlx4,
            ProfileArg::Windows => Self::Windows,
            ProfileArg::Rxe => Self::Rxe,
            ProfileArg::Mthca => Self::Mthca,
            ProfileArg::Bare => Self::Bare,
        }
    }
}

/// Does what the command line says.
pub(crate) fn main() -> ExitCode {
    match Cli::parse().command {
        Command::Run(args) => run_file(&args),
        Command::Check { files } => check(&files),
        Command::Plan { file, peers, json } => plan(&file, peers, json),
        Command::Devices(args) => devices(&args),
        Command::Ping(args) => tools::ping(&args),
        Command::Get(args) => tools::get(&args),
        Command::Put(args) => tools::put(&args),
        Command::Config => print(SHIPPED),
    }
}

fn run_file(args: &RunArgs) -> ExitCode {
    let overrides = Overrides {
        export: args.export.clone(),
        profile: args.profile.map(SoftProfile::from),
    };
    let machine = Machine::this();
    let config = match Config::load_with(&args.file, &overrides, &machine) {
        Ok(config) => override_jobs(config, args),
        Err(report) => {
            eprint!("{}", report.render(io::stderr().is_terminal()));
            return ExitCode::from(MISTAKES);
        }
    };
    let soft = matches!(config.device, Device::Soft(_));
    let wrong = match (soft, &args.pcap) {
        (true, _) if !args.node.is_empty() => {
            "--node is for nodes on an RDMA device: the software device joins only the nodes of one process"
        }
        (false, Some(_)) => {
            "--pcap is for the software device: on an RDMA device capture UDP port 4791 with tcpdump"
        }
        _ => "",
    };
    if !wrong.is_empty() {
        eprintln!("o2poll: {wrong}");
        return ExitCode::from(MISTAKES);
    }
    if let Err(error) = outline(&config, &machine) {
        eprintln!("o2poll: {}: {error}", args.file.display());
        return ExitCode::from(MISTAKES);
    }
    if let Some(why) = overwritten(&config, args) {
        eprintln!("o2poll: {why}");
        return ExitCode::from(MISTAKES);
    }
    // Before the run, which may be long.
    if let Some(path) = &args.json
        && path != Path::new("-")
        && let Err(error) = File::options().append(true).create(true).open(path)
    {
        eprintln!(
            "o2poll: cannot write the report to {}: {error}; give another file to --json",
            path.display()
        );
        return ExitCode::from(NOT_STARTED);
    }
    let stop = match on_signals() {
        Ok(stop) => stop,
        Err(error) => {
            eprintln!("o2poll: cannot catch signals: {error}");
            return ExitCode::from(NOT_STARTED);
        }
    };
    let mut bars = Bars::new(args.verbose);
    let options = Options {
        pcap: args.pcap.clone(),
        ..Options::default()
    };
    let outcome = if matches!(config.device, Device::Soft(_)) {
        run(&config, &machine, &options, &stop, &mut bars)
    } else {
        on_device(&config, &machine, &args.node, &stop, &mut bars)
    };
    bars.clear();
    let report = match outcome {
        Ok(report) => report,
        Err(error) => {
            eprintln!("o2poll: {error}");
            return ExitCode::from(match error {
                NodeError::Fault { .. } | NodeError::Died { .. } => BROKEN,
                _ => NOT_STARTED,
            });
        }
    };
    if let Err(error) = write(&report, args.json.as_deref()) {
        eprintln!("o2poll: cannot write the report: {error}");
        return ExitCode::from(BROKEN);
    }
    ExitCode::from(report.verdict.code())
}

#[cfg(feature = "verbs")]
fn on_device(
    config: &Config,
    machine: &Machine<'_>,
    here: &[Nid],
    stop: &AtomicBool,
    bars: &mut Bars,
) -> Result<Report, NodeError> {
    o2poll::verbs::run(config, machine, here, stop, bars)
}

#[cfg(not(feature = "verbs"))]
fn on_device(
    _: &Config,
    _: &Machine<'_>,
    _: &[Nid],
    _: &AtomicBool,
    _: &mut Bars,
) -> Result<Report, NodeError> {
    Err(NodeError::UnknownDevice)
}

/// What `--json` or `--pcap` would destroy: what the run reads, or each other's file.
fn overwritten(config: &Config, args: &RunArgs) -> Option<String> {
    let identity = |path: &Path| {
        let found = fs::metadata(path).ok().filter(fs::Metadata::is_file)?;
        Some((found.dev(), found.ino()))
    };
    let exported = config.nodes.iter().flat_map(|node| &node.exports);
    let mut others: Vec<(&str, &Path)> = vec![("the node file", &args.file)];
    others.extend(exported.filter_map(|export| Some(("exported", export.file()?))));
    for (option, path) in [("--json", &args.json), ("--pcap", &args.pcap)] {
        let Some(path) = path else { continue };
        let ours = identity(path);
        for (what, other) in &others {
            if path == other && *what == "--json" || ours.is_some() && ours == identity(other) {
                let path = path.display();
                return Some(match *what {
                    "--json" => {
                        format!("--json and --pcap both write to {path}: give them a file each")
                    }
                    what => format!(
                        "{option} would overwrite {path}, which is {what}: give another file"
                    ),
                });
            }
        }
        others.push((option, path));
    }
    None
}

fn override_jobs(mut config: Config, args: &RunArgs) -> Config {
    for node in &mut config.nodes {
        if let Some(workload) = &mut node.workload {
            if let Some(duration) = args.duration {
                workload.duration = duration;
            }
            if let Some(seed) = args.seed {
                workload.seed = seed;
            }
            workload.verify &= !args.no_verify;
        }
    }
    config
}

fn write(report: &Report, json: Option<&Path>) -> io::Result<()> {
    let text = || {
        let mut text = serde_json::to_string_pretty(report).map_err(io::Error::other)?;
        text.push('\n');
        Ok::<String, io::Error>(text)
    };
    let mut out = io::stdout().lock();
    let written = match json {
        Some(path) if path == Path::new("-") => return out.write_all(text()?.as_bytes()),
        Some(path) => text().and_then(|text| fs::write(path, text)),
        None => Ok(()),
    };
    // Even if the file could not be written: a run cannot be had again.
    write!(out, "{report}")?;
    written
}

fn check(files: &[PathBuf]) -> ExitCode {
    let machine = Machine::this();
    let mut sound = true;
    let mut out = io::stdout().lock();
    for (path, result) in o2poll_config::check(files) {
        let outlined = result.map(|config| outline(&config, &machine));
        sound &= matches!(outlined, Ok(Ok(_)));
        let written = match outlined {
            Ok(Ok(text)) => writeln!(out, "{}: ok: {text}", path.display()),
            Ok(Err(error)) => writeln!(out, "{}: {error}", path.display()),
            Err(report) => write!(out, "{}", report.render(out.is_terminal())),
        };
        if let Err(error) = written {
            return unprinted(&error);
        }
    }
    if sound {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(MISTAKES)
    }
}

fn plan(file: &Path, peers: Option<u32>, json: bool) -> ExitCode {
    let machine = Machine::this();
    let config = match Config::load_with(file, &Overrides::default(), &machine) {
        Ok(config) => config,
        Err(report) => {
            eprint!("{}", report.render(io::stderr().is_terminal()));
            return ExitCode::from(MISTAKES);
        }
    };
    let peers = peers.and_then(|peers| usize::try_from(peers).ok());
    match Budget::new(&config, &machine, peers) {
        Ok(budget) => print_as(&budget, json),
        Err(error) => {
            eprintln!("o2poll: {}: {error}", file.display());
            ExitCode::from(MISTAKES)
        }
    }
}

fn devices(args: &DevicesArgs) -> ExitCode {
    let asked = Asked {
        exposed: args.exposed,
        map_on_demand: args.map_on_demand,
        max_frags: args.max_frags,
        staging: !args.no_staging,
    };
    print_as(&Devices::look(asked), args.json)
}

fn print_as(what: &(impl serde::Serialize + core::fmt::Display), json: bool) -> ExitCode {
    if !json {
        return print(&what.to_string());
    }
    match serde_json::to_string_pretty(what) {
        Ok(text) => print(&format!("{text}\n")),
        Err(error) => {
            eprintln!("o2poll: {error}");
            ExitCode::from(BROKEN)
        }
    }
}

fn print(text: &str) -> ExitCode {
    match io::stdout().lock().write_all(text.as_bytes()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => unprinted(&error),
    }
}

fn unprinted(error: &io::Error) -> ExitCode {
    // Whoever has closed a pipe has read enough, and is told by the status only.
    if error.kind() != io::ErrorKind::BrokenPipe {
        eprintln!("o2poll: cannot print: {error}");
    }
    ExitCode::from(BROKEN)
}

/// The first signal asks for an early end, the second ends at once.
fn on_signals() -> io::Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        let status = 128 + signal;
        signal_hook::flag::register_conditional_shutdown(signal, status, Arc::clone(&stop))?;
        signal_hook::flag::register(signal, Arc::clone(&stop))?;
    }
    Ok(stop)
}

pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let duration =
        parse_duration(text).ok_or_else(|| String::from("write it as 30s, 500ms or 2min"))?;
    if DURATIONS.contains(&duration) {
        Ok(duration)
    } else {
        Err(String::from("choose a value from 1ms to 720h"))
    }
}

/// As in a node file.
const DURATIONS: RangeInclusive<Duration> =
    Duration::from_millis(1)..=Duration::from_secs(720 * 3600);

/// The documented node file.
const SHIPPED: &str = include_str!("../../config/loopback.toml");

/// Exit status: a node file has mistakes.
const MISTAKES: u8 = 1;
/// Exit status: memory, a core, or a file could not be had.
pub(crate) const NOT_STARTED: u8 = 3;
/// Exit status: a transfer, a connection, a device or a thread failed.
pub(crate) const BROKEN: u8 = 5;

const EXAMPLES: &str = "\
Examples:
  o2poll run config/loopback.toml                        two nodes, no hardware
  o2poll run config/loopback.toml --export big.iso       copy another file
  o2poll run config/loopback.toml --profile mlx5 --duration 30s --no-verify
  o2poll run config/loopback.toml --json report.json
  o2poll run config/loopback.toml --duration 1s --pcap run.pcap
  o2poll check config/loopback.toml
  o2poll plan config/loopback.toml --peers 500           what that takes, beside ko2iblnd
  o2poll devices                                         what becomes of which buffer where
  o2poll config > my.toml";

const STATUS: &str = "\
Examples:
  o2poll run config/loopback.toml                        two nodes, no hardware
  o2poll run config/loopback.toml --export big.iso       copy another file
  o2poll run config/loopback.toml --profile mlx5 --duration 30s --no-verify
  o2poll run config/loopback.toml --json report.json
  o2poll run config/loopback.toml --duration 1s --pcap run.pcap
  o2poll check config/loopback.toml
  o2poll plan config/loopback.toml --peers 500           what that takes, beside ko2iblnd
  o2poll devices                                         what becomes of which buffer where
  o2poll config > my.toml

Exit status:
  0    every digest and comparison was right, no key was alive and nothing was left at the end
  1    a node file has mistakes; nothing was started
  2    the command line cannot be understood
  3    it could not start: memory, a core, a file
  4    bytes were not what they must be
  5    a transfer, a connection, a device or a thread failed, or the report could not be written
  6    a key was alive, something was not given back, or a polling core allocated
  7    interrupted before a copy had been compared
  8    a transfer did not end exactly once, or brought bytes that nobody compared
  130  interrupted twice (143 by SIGTERM)";
