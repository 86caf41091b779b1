//! Any text as a node file.

use std::path::Path;

use o2poll_config::{Config, Machine, Overrides};

#[path = "../../../config/tests/promises/mod.rs"]
mod promises;

/// A text is a configuration that keeps its promises, or there is a report that can be shown.
pub fn config(bytes: &[u8]) {
    let Ok(text) = core::str::from_utf8(bytes) else {
        return;
    };
    let machine = Machine {
        allowed_cores: vec![0, 1],
        present_cores: 2,
        parallelism: 2,
        file_size: &|path| match path.as_os_str().len() {
            0..100 => Ok(10_000),
            _ => Err(std::io::ErrorKind::NotFound.into()),
        },
    };
    for export in [None, Some("other".into())] {
        let overrides = Overrides {
            export,
            ..Overrides::default()
        };
        match Config::parse_with(text, Path::new("x.toml"), &overrides, &machine) {
            Ok(config) => promises::keeps(&config, &machine),
            Err(report) => {
                assert!(!report.diagnostics().is_empty());
                for color in [false, true] {
                    assert!(report.render(color).contains("error"));
                }
            }
        }
    }
}
