//! No text takes the reader by surprise: it gives a configuration that keeps its promises, or a report.

use std::io;
use std::path::Path;

use o2poll_config::{Config, Machine, Overrides, SoftProfile};
use promises::keeps;
use proptest::prelude::*;
use proptest::sample::{Index, select};

mod promises;

const SHIPPED: &str = include_str!("../loopback.toml");

const KEYS: &[&str] = &[
    "device",
    "soft",
    "verbs",
    "profile",
    "max_sge",
    "max_qp",
    "memory",
    "mlock",
    "exposure",
    "staging",
    "tunables",
    "peer_credits",
    "peer_credits_hiw",
    "map_on_demand",
    "register_sources_from",
    "fmr_pool_size",
    "fmr_flush_trigger",
    "fmr_cache",
    "timeout",
    "idle",
    "node",
    "nid",
    "cores",
    "extensions",
    "send_with_invalidate",
    "write_with_immediate",
    "export",
    "name",
    "portal",
    "match_bits",
    "file",
    "size",
    "piece",
    "writable",
    "copy",
    "peer",
    "into",
    "transfer",
    "in_flight",
    "workload",
    "region",
    "sizes",
    "weights",
    "put",
    "duration",
    "verify",
    "seed",
    "zz",
];

const VALUES: &[&str] = &[
    "0",
    "1",
    "8",
    "-1",
    "255",
    "0xffffffffffffffff",
    "99999999999999999999999999999999999999999999",
    "1.5",
    "-inf",
    "nan",
    "true",
    "\"\"",
    "\"auto\"",
    "\"try\"",
    "\"frwr\"",
    "\"10.0.0.1@o2ib\"",
    "\"10.0.0.2@o2ib\"",
    "\"file\"",
    "\"scratch\"",
    "\"4 KiB\"",
    "\"1 MiB\"",
    "\"17179869184 GiB\"",
    "\"é\"",
    "[]",
    "[0]",
    "[0, 0]",
    "[\"1 MiB\", 0]",
    "{}",
    "{ profile = \"mlx5\" }",
    "{ profile = \"bare\" }",
    "\"arena\"",
    "[{}]",
    "1979-05-27",
    "'''",
    "\"",
    "[[[[[[[[",
    "{",
];

const HEADERS: &[&str] = &[
    "[device]",
    "[memory]",
    "[tunables]",
    "[[node]]",
    "[node]",
    "[[node.export]]",
    "[node.export]",
    "[node.extensions]",
    "[node.copy]",
    "[node.workload]",
    "[",
    "[[x",
    "[node.copy.zz]",
];

fn line() -> impl Strategy<Value = String> {
    prop_oneof![
        6 => (select(KEYS), select(VALUES)).prop_map(|(key, value)| format!("{key} = {value}\n")),
        2 => select(HEADERS).prop_map(|header| format!("{header}\n")),
        1 => "\\PC{0,20}\r?\n",
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn of_characters(text in "(?s).{0,200}") {
        judge(&text)?;
    }

    #[test]
    fn of_lines_that_look_like_a_node_file(lines in prop::collection::vec(line(), 0..40)) {
        judge(&lines.concat())?;
    }

    #[test]
    fn of_a_good_file_with_a_few_lines_changed(
        changes in prop::collection::vec((any::<Index>(), line(), any::<bool>()), 1..4),
    ) {
        let mut lines: Vec<String> = SHIPPED.lines().map(|line| format!("{line}\n")).collect();
        for (at, line, replace) in changes {
            let at = at.index(lines.len());
            if replace {
                lines[at] = line;
            } else {
                lines.insert(at, line);
            }
        }
        judge(&lines.concat())?;
    }

    #[test]
    fn of_a_good_file_with_a_value_changed(at in any::<Index>(), value in select(VALUES)) {
        let mut lines: Vec<String> = SHIPPED.lines().map(str::to_owned).collect();
        let settings: Vec<usize> = (0..lines.len()).filter(|i| lines[*i].contains(" = ")).collect();
        let line = &mut lines[settings[at.index(settings.len())]];
        let (key, _) = line.split_once(" = ").unwrap();
        *line = format!("{} = {value}", key.trim_start_matches("# "));
        judge(&lines.join("\n"))?;
    }

    #[test]
    fn of_a_good_file_with_a_line_missing(at in any::<Index>()) {
        let mut lines: Vec<&str> = SHIPPED.lines().filter(|line| !line.starts_with('#')).collect();
        lines.remove(at.index(lines.len()));
        judge(&lines.join("\n"))?;
    }

    #[test]
    fn of_a_good_file_cut_short(end in 0..SHIPPED.len()) {
        judge(&SHIPPED[..end])?;
    }

    #[test]
    fn nodes_are_placed_once_and_on_allowed_cores(
        pins in prop::collection::vec(prop::option::of(0_usize..6), 1..10),
        allowed in prop::collection::btree_set(0_usize..6, 1..6),
        quota in 1_usize..8,
    ) {
        let mut text = String::from("[device]\nsoft = {}\n");
        for (i, pin) in pins.iter().enumerate() {
            text.push_str(&format!("[[node]]\nnid = \"10.0.0.{}@o2ib\"\n", i + 1));
            if let Some(core) = pin {
                text.push_str(&format!("cores = [{core}]\n"));
            }
        }
        let allowed: Vec<usize> = allowed.into_iter().collect();
        let machine = Machine { parallelism: quota.min(allowed.len()), allowed_cores: allowed, present_cores: 6, file_size: &no_file };
        if let Ok(config) = Config::parse(&text, Path::new("x.toml"), &machine) {
            keeps(&config, &machine);
        }
    }
}

#[test]
fn brackets_nested_deeper_than_any_stack_are_refused() {
    for open in ["[", "{a=", "[{a=["] {
        let text = format!("[device]\nsoft = {}", open.repeat(100_000));
        assert!(Config::parse(&text, Path::new("x.toml"), &machine()).is_err());
    }
}

fn judge(text: &str) -> Result<(), TestCaseError> {
    let machine = machine();
    for (export, profile) in [
        (None, None),
        (Some("other".into()), Some(SoftProfile::Bare)),
    ] {
        let overrides = Overrides { export, profile };
        match Config::parse_with(text, Path::new("x.toml"), &overrides, &machine) {
            Ok(config) => keeps(&config, &machine),
            Err(report) => {
                prop_assert!(!report.diagnostics().is_empty());
                for color in [false, true] {
                    prop_assert!(report.render(color).contains("error"));
                }
            }
        }
    }
    Ok(())
}

fn machine() -> Machine<'static> {
    Machine {
        allowed_cores: vec![0, 1],
        present_cores: 2,
        parallelism: 2,
        file_size: &|_| Ok(10_000),
    }
}

fn no_file(_: &Path) -> io::Result<u64> {
    Err(io::ErrorKind::NotFound.into())
}
