//! Node files of o2poll: TOML to validated plain structs.
//!
//! ```no_run
//! # fn main() -> Result<(), o2poll_config::Report> {
//! use o2poll_config::{Config, Machine};
//!
//! let config = Config::load("config/loopback.toml".as_ref())?;
//! println!("{}", config.placement(&Machine::this()).sentence);
//! # Ok(())
//! # }
//! ```
//!
//! A file goes through these rooms: `reader` walks the parsed document, keeps the place of everything it
//! reads, and goes on after a mistake; `document` knows the keys; `check` knows what must agree with what,
//! in the file and with the [`Machine`]. What comes out is a [`Config`], or a [`Report`] of every mistake.
//! The defaults are told where a user reads them: in `config/loopback.toml`.

mod check;
mod document;
mod machine;
mod model;
mod placement;
mod reader;
mod report;
mod units;

use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use toml::de::DeTable;

pub use machine::Machine;
pub use model::*;
pub use placement::{Placement, PollingThread};
pub use report::{Diagnostic, Mark, Report};
pub use units::{not_a_nid, parse_duration};

/// What the command line says instead of the file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Overrides {
    /// `--export PATH`: replaces the file of the first export that has one. Relative to the working directory.
    pub export: Option<PathBuf>,
    /// `--profile NAME`: the software device behaves like this card.
    pub profile: Option<SoftProfile>,
}

impl Config {
    /// Reads a node file and checks it for this machine.
    ///
    /// # Errors
    /// Every mistake that was found, the unreadable file included.
    pub fn load(path: &Path) -> Result<Self, Report> {
        Self::load_with(path, &Overrides::default(), &Machine::this())
    }

    /// The same with overrides, for some machine. Overrides are checked like the file's own words.
    ///
    /// # Errors
    /// Every mistake that was found.
    pub fn load_with(
        path: &Path,
        overrides: &Overrides,
        machine: &Machine<'_>,
    ) -> Result<Self, Report> {
        match read(path) {
            Ok(text) => Self::parse_with(&text, path, overrides, machine),
            Err(error) => Err(Report::new(
                path,
                "",
                vec![Diagnostic {
                    title: format!("cannot read the node file: {error}"),
                    marks: Vec::new(),
                    remedy: String::from("give the path of a node file, as config/loopback.toml"),
                }],
            )),
        }
    }

    /// Checks a text. `origin` names it in reports, and relative file names start in its folder.
    ///
    /// # Errors
    /// Every mistake that was found.
    pub fn parse(text: &str, origin: &Path, machine: &Machine<'_>) -> Result<Self, Report> {
        Self::parse_with(text, origin, &Overrides::default(), machine)
    }

    /// [`Config::parse`] with overrides.
    ///
    /// # Errors
    /// Every mistake that was found.
    pub fn parse_with(
        text: &str,
        origin: &Path,
        overrides: &Overrides,
        machine: &Machine<'_>,
    ) -> Result<Self, Report> {
        let mistakes = reader::Mistakes::default();
        let Ok(table) = DeTable::parse(text) else {
            return Err(Report::new(origin, text, report::syntax(text)));
        };
        let draft = document::read(table.get_ref(), origin, overrides, machine, &mistakes);
        let config = check::check(&draft, origin, machine, &mistakes);
        match (config, mistakes.into_inner()) {
            (Some(config), mistakes) if mistakes.is_empty() => Ok(config),
            (_, mistakes) => Err(Report::new(origin, text, mistakes)),
        }
    }

    /// Spreads the nodes over this machine's cores.
    #[must_use]
    pub fn placement(&self, machine: &Machine<'_>) -> Placement {
        Placement::new(self, machine)
    }
}

/// Checks several files for this machine, each on its own.
pub fn check<P: AsRef<Path>>(
    paths: impl IntoIterator<Item = P>,
) -> Vec<(PathBuf, Result<Config, Report>)> {
    let machine = Machine::this();
    paths
        .into_iter()
        .map(|path| {
            let path = path.as_ref();
            let result = Config::load_with(path, &Overrides::default(), &machine);
            (path.to_owned(), result)
        })
        .collect()
}

/// A node file may come through a pipe, so that its length is known only when it is read.
fn read(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    File::open(path)?
        .take(MOST_TEXT.saturating_add(1))
        .read_to_string(&mut text)?;
    if u64::try_from(text.len()).is_ok_and(|length| length <= MOST_TEXT) {
        Ok(text)
    } else {
        Err(io::Error::other("it is longer than 1 MiB"))
    }
}

/// No node file is longer.
const MOST_TEXT: u64 = 1 << 20;
