//! `o2poll check` without o2poll: what is wrong with these node files, and where would they run?
use std::io::IsTerminal as _;
use std::process::ExitCode;

use o2poll_config::{Machine, check};

fn main() -> ExitCode {
    let color = std::io::stdout().is_terminal();
    let mut code = ExitCode::SUCCESS;
    for (path, result) in check(std::env::args_os().skip(1).map(std::path::PathBuf::from)) {
        match result {
            Ok(config) => println!(
                "{}: {}",
                path.display(),
                config.placement(&Machine::this()).sentence
            ),
            Err(report) => {
                print!("{}", report.render(color));
                code = ExitCode::FAILURE;
            }
        }
    }
    code
}
