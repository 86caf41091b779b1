//! The list of o2iblnd's bugs beside this file names tests that exist.

use std::collections::HashSet;
use std::fs;
use std::path::Path;

/// Names of all functions under a folder.
fn functions(folder: &Path, found: &mut HashSet<String>) {
    for entry in fs::read_dir(folder).expect("a folder of the repository") {
        let path = entry.expect("readable").path();
        if path.is_dir() {
            if path.file_name().is_none_or(|name| name != "target") {
                functions(&path, found);
            }
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(&path).expect("UTF-8");
            let is_suite = text.contains("macro_rules! transfers");
            let mut is_test = false;
            for line in text.lines().map(str::trim) {
                if line.starts_with("#[test]") {
                    is_test = true;
                } else if let Some(rest) = line.strip_prefix("fn ") {
                    // Properties stand in a `proptest!` block and span lines; what has arguments there is a test, too.
                    if is_test && let Some((name, _)) = rest.split_once('(') {
                        found.insert(name.to_owned());
                    }
                    is_test = false;
                } else if is_suite && let Some((module, name)) = listed(line) {
                    // The macro makes a test of it.
                    let body = path.with_file_name(module).with_extension("rs");
                    let bodies = fs::read_to_string(body).unwrap_or_default();
                    if bodies.contains(&format!("pub(crate) fn {name}<")) {
                        found.insert(name.to_owned());
                    }
                }
            }
        }
    }
}

/// A line `module::body,` of the list of transfer tests.
fn listed(line: &str) -> Option<(&str, &str)> {
    let (module, name) = line.strip_suffix(',')?.split_once("::")?;
    let is_name = |text: &str| {
        text.bytes()
            .all(|byte| byte == b'_' || byte.is_ascii_alphanumeric())
    };
    (is_name(module) && is_name(name)).then_some((module, name))
}

#[test]
fn every_row_names_a_test_that_exists_or_says_why_it_cannot_occur() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let root = here.parent().expect("in a workspace");
    let mut known = HashSet::new();
    for folder in ["bin", "config", "dataplane", "hal", "tests"] {
        functions(&root.join(folder), &mut known);
    }
    let list = fs::read_to_string(here.join("tests/lustre_bugs.md")).expect("beside this file");
    let mut rows = 0;
    for row in list.lines().filter(|line| line.starts_with("| LU-")) {
        rows += 1;
        let here = row.split(" | ").nth(2).expect("three columns");
        let names: Vec<_> = here.split('`').skip(1).step_by(2).collect();
        if here.starts_with("cannot occur: ") {
            continue;
        }
        assert!(!names.is_empty(), "{row}");
        for name in names {
            assert!(known.contains(name), "no test {name}: {row}");
        }
    }
    assert_eq!(rows, 40, "one for each");
}
