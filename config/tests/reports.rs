//! Every report as a person sees it: `golden/NAME.toml` gives `golden/NAME.txt`.
//! `UPDATE_GOLDEN=1 cargo test -p o2poll-config` writes them anew; read the difference before it is committed.

use std::path::{Path, PathBuf};
use std::{fs, io};

use o2poll_config::{Config, Machine, Overrides, SoftProfile};

#[test]
fn reports_read_as_they_did() {
    let update = std::env::var_os("UPDATE_GOLDEN").is_some();
    let mut different = Vec::new();
    let mut seen = 0;
    for path in files(&golden(), "toml") {
        let text = fs::read_to_string(&path).unwrap();
        let rendered = match parse(&path, &text) {
            Ok(_) => panic!("{} has no mistake", path.display()),
            Err(report) => report.render(false),
        };
        let expected = path.with_extension("txt");
        if update {
            fs::write(&expected, &rendered).unwrap();
        } else if fs::read_to_string(&expected).ok().as_deref() != Some(&rendered) {
            different.push(format!("{}:\n{rendered}", expected.display()));
        }
        seen += 1;
    }
    assert!(seen >= 10, "where are the golden files?");
    assert!(different.is_empty(), "{}", different.join("\n"));
}

#[test]
fn every_report_belongs_to_a_file() {
    for path in files(&golden(), "txt") {
        assert!(path.with_extension("toml").exists(), "{}", path.display());
    }
}

#[test]
fn every_mark_lies_in_the_text_and_every_mistake_has_a_remedy() {
    for path in files(&golden(), "toml") {
        let text = fs::read_to_string(&path).unwrap();
        let report = parse(&path, &text).unwrap_err();
        for diagnostic in report.diagnostics() {
            let title = &diagnostic.title;
            assert!(!diagnostic.remedy.is_empty(), "{title}");
            assert!(!diagnostic.marks.is_empty(), "{title}");
            for mark in &diagnostic.marks {
                assert!(text.get(mark.span.clone()).is_some(), "{title}");
            }
        }
    }
}

#[test]
fn colour_comes_only_when_asked_for() {
    let path = golden().join("syntax.toml");
    let text = fs::read_to_string(&path).unwrap();
    let report = parse(&path, &text).unwrap_err();
    assert!(!report.render(false).contains('\x1b'));
    assert!(!report.to_string().contains('\x1b'));
    assert!(report.render(true).contains('\x1b'));
}

#[test]
fn a_file_that_cannot_be_read_is_a_report_too() {
    let missing = golden().join("no such file.toml");
    let report = Config::load(&missing).unwrap_err();
    assert_eq!(report.diagnostics().len(), 1);
    assert!(report.render(false).contains("no such file.toml"));
    let not_text = Config::load(Path::new(env!("CARGO_MANIFEST_DIR"))).unwrap_err();
    assert!(not_text.render(false).contains("cannot read"));
}

/// Leading comments say what the golden machine and command line are: `# --export PATH`, `# one core`.
fn parse(path: &Path, text: &str) -> Result<Config, o2poll_config::Report> {
    let directives = || text.lines().map_while(|line| line.strip_prefix("# "));
    let overrides = Overrides {
        export: directives()
            .find_map(|line| line.strip_prefix("--export "))
            .map(PathBuf::from),
        profile: directives().find_map(|line| {
            let name = line.strip_prefix("--profile ")?;
            SoftProfile::ALL
                .into_iter()
                .find(|profile| profile.name() == name)
        }),
    };
    let one = directives().any(|line| line == "one core");
    let machine = Machine {
        allowed_cores: if one { vec![1] } else { vec![0, 1, 3] },
        present_cores: 8,
        parallelism: if one { 1 } else { 3 },
        file_size: &file_size,
    };
    // The path on this machine does not belong into a report that is compared.
    let origin = Path::new("golden").join(path.file_name().unwrap());
    Config::parse_with(text, &origin, &overrides, &machine)
}

fn file_size(path: &Path) -> io::Result<u64> {
    match path.file_name().and_then(|name| name.to_str()) {
        Some("small.bin") => Ok(10_000),
        Some("big.bin") => Ok(100 << 20),
        Some("huge.bin") => Ok(1 << 44),
        Some("odd.bin") => Ok((8 << 20) + 1),
        Some("empty.bin") => Ok(0),
        Some("folder") => Err(io::ErrorKind::IsADirectory.into()),
        Some("secret.bin") => Err(io::ErrorKind::PermissionDenied.into()),
        Some("device") => Err(io::Error::other("not a regular file")),
        _ => Err(io::ErrorKind::NotFound.into()),
    }
}

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
}

fn files(folder: &Path, extension: &str) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|found| found == extension))
        .collect();
    files.sort();
    files
}
