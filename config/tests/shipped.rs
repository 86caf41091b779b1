//! The node files that are shipped, and how a file becomes a configuration.

use std::path::{Path, PathBuf};
use std::{fs, io};

use o2poll_config::{
    Config, Content, Cores, Device, ExportRef, Exposure, Extensions, Idle, Machine, Overrides,
    SoftProfile, Wish, check,
};

#[test]
fn every_shipped_file_is_sound_on_this_machine() {
    let paths = shipped();
    assert!(paths.len() >= 2);
    for (path, result) in check(&paths) {
        let config = result.unwrap_or_else(|report| panic!("{report}"));
        assert_eq!(config.origin, path);
        assert!(!config.placement(&Machine::this()).threads.is_empty());
    }
}

#[test]
fn every_shipped_file_keeps_several_transfers_in_flight() {
    for path in shipped() {
        let config = Config::load(&path).unwrap();
        for job in config.nodes.iter().filter_map(|node| node.copy.as_ref()) {
            let file = config.export(job.file).unwrap();
            assert!(
                file.length > 2 * u64::from(job.transfer),
                "{}",
                path.display()
            );
        }
    }
}

/// Uncommenting every default in the documented file changes nothing.
#[test]
fn the_defaults_are_what_the_shipped_file_says() {
    let path = folder().join("loopback.toml");
    let text = fs::read_to_string(&path).unwrap();
    let mut uncommented = 0;
    let told: Vec<&str> = text
        .lines()
        .map(|line| {
            let Some(setting) = line.strip_prefix("# ") else {
                return line;
            };
            let is_key = |key: &str| {
                !key.is_empty() && key.bytes().all(|b| b == b'_' || b.is_ascii_lowercase())
            };
            if setting
                .split_once(" = ")
                .is_some_and(|(key, _)| is_key(key))
            {
                uncommented += 1;
                setting
            } else {
                line
            }
        })
        .collect();
    assert!(uncommented >= 15, "{uncommented}");
    let machine = Machine::this();
    let told = Config::parse(&told.join("\n"), &path, &machine)
        .unwrap_or_else(|report| panic!("{report}"));
    let silent = Config::parse(&text, &path, &machine).unwrap();
    assert_eq!(told, silent);
}

#[test]
fn a_file_says_what_it_says() {
    let config = Config::parse(ALL, Path::new("conf/node.toml"), &machine())
        .unwrap_or_else(|report| panic!("{report}"));
    let Device::Soft(soft) = &config.device else {
        panic!("a software device");
    };
    assert_eq!(soft.profile, SoftProfile::Mlx5);
    assert_eq!(
        (soft.max_fragments, soft.max_sge, soft.max_windows),
        (Some(16), None, Some(64))
    );
    assert_eq!((soft.max_qp, soft.max_recv_wr), (Some(3), None));
    assert_eq!(
        (config.memory.huge_pages, config.memory.mlock),
        (Wish::Off, Wish::Require)
    );
    assert_eq!(
        (config.memory.exposure, config.memory.staging),
        (Exposure::Arena, 0)
    );
    let tunables = &config.tunables;
    assert_eq!((tunables.map_on_demand, tunables.max_frags), (32, 16));
    assert_eq!(tunables.register_sources_from, 64);
    assert_eq!(
        (tunables.fmr_pool_size, tunables.fmr_flush_trigger),
        (100, 75)
    );
    assert!(!tunables.fmr_cache);
    assert_eq!((tunables.peer_credits, tunables.peer_credits_hiw), (32, 16));
    assert_eq!(
        (tunables.timeout.as_millis(), tunables.keepalive.as_secs()),
        (1500, 30)
    );
    assert_eq!(tunables.idle, Idle::Yield);

    let [first, second] = config.nodes.as_slice() else {
        panic!("two nodes");
    };
    assert_eq!(
        (first.nid.to_string().as_str(), &first.cores),
        ("10.0.0.1@o2ib2", &Cores::Listed(vec![1]))
    );
    let [file, scratch] = first.exports.as_slice() else {
        panic!("two exports");
    };
    assert_eq!(file.content, Content::File(PathBuf::from("conf/data/file")));
    assert_eq!(
        (file.length, file.piece, file.writable),
        (5000, 4096, false)
    );
    let bits: Vec<u64> = file.pieces().map(|piece| piece.match_bits.0).collect();
    assert_eq!(bits, [0xffff_ffff_0000_0001, 0xffff_ffff_0000_0002]);
    assert_eq!(
        (scratch.length, scratch.portal.0, scratch.match_bits.0),
        (32 << 20, 51, u64::MAX)
    );
    assert!(scratch.writable);

    assert_eq!(
        first.extensions,
        Extensions {
            send_with_invalidate: false,
            write_with_immediate: true,
        }
    );
    assert_eq!(second.extensions, Extensions::default());
    assert_eq!(second.cores, Cores::Auto);
    let copy = second.copy.as_ref().unwrap();
    assert_eq!(copy.file, ExportRef { node: 0, export: 0 });
    assert_eq!(copy.into, ExportRef { node: 0, export: 1 });
    assert_eq!((copy.transfer, copy.in_flight), (1 << 20, 32));
    let workload = second.workload.as_ref().unwrap();
    assert_eq!(workload.region, copy.into);
    let sizes: Vec<(u32, u32)> = workload
        .sizes
        .iter()
        .map(|size| (size.bytes, size.weight))
        .collect();
    assert_eq!(sizes, [(4096, 3), (1 << 20, 1)]);
    assert_eq!(workload.largest(), 1 << 20);
    assert_eq!((workload.in_flight, workload.seed), (4, u64::MAX));
    assert!((workload.put - 1.0).abs() < f64::EPSILON);
    assert!(!workload.verify);
}

/// What the defaults of registration are is a matter of safety: no key outlives its transfer unless asked for.
#[test]
fn a_file_that_says_nothing_exposes_nothing() {
    let text = "[device]\nsoft = {}\n[[node]]\nnid = \"10.0.0.1@o2ib\"\n";
    let config = Config::parse(text, Path::new("x.toml"), &machine()).unwrap();
    assert_eq!(config.memory.exposure, Exposure::None);
    let tunables = &config.tunables;
    assert_eq!((tunables.map_on_demand, tunables.max_frags), (1, 257));
    assert_eq!(
        (tunables.fmr_pool_size, tunables.fmr_flush_trigger),
        (512, 384)
    );
    assert!(tunables.fmr_cache);
}

#[test]
fn every_profile_has_a_name_of_its_own() {
    for profile in SoftProfile::ALL {
        let text = format!(
            "[device]\nsoft = {{ profile = \"{}\" }}\n[memory]\nexposure = \"arena\"\n[[node]]\nnid = \"10.0.0.1@o2ib\"\n",
            profile.name()
        );
        let config = Config::parse(&text, Path::new("x.toml"), &machine())
            .unwrap_or_else(|report| panic!("{report}"));
        assert!(matches!(config.device, Device::Soft(soft) if soft.profile == profile));
    }
}

#[test]
fn the_command_line_replaces_the_first_exported_file_only() {
    let text = ALL.replace(
        "[[node.export]] # memory",
        "[[node.export]]\nname = \"other\"\nportal = 52\nmatch_bits = 1\nfile = \"data/file\"\n[[node.export]]",
    );
    let overrides = Overrides {
        export: Some(PathBuf::from("elsewhere/larger")),
        ..Overrides::default()
    };
    let config = Config::parse_with(&text, Path::new("conf/node.toml"), &overrides, &machine())
        .unwrap_or_else(|report| panic!("{report}"));
    let files: Vec<(&Path, u64)> = config
        .nodes
        .iter()
        .flat_map(|node| &node.exports)
        .filter_map(|export| Some((export.file()?, export.length)))
        .collect();
    assert_eq!(
        files,
        [
            (Path::new("elsewhere/larger"), 9000),
            (Path::new("conf/data/file"), 5000)
        ]
    );
}

#[test]
fn a_stream_that_never_ends_is_not_read_to_its_end() {
    let report = Config::load(Path::new("/dev/zero")).unwrap_err();
    assert!(
        report.render(false).contains("longer than 1 MiB"),
        "{report}"
    );
}

fn machine() -> Machine<'static> {
    Machine {
        allowed_cores: vec![0, 1],
        present_cores: 2,
        parallelism: 2,
        file_size: &|path| match path.to_str() {
            Some("conf/data/file") => Ok(5000),
            Some("elsewhere/larger") => Ok(9000),
            _ => Err(io::ErrorKind::NotFound.into()),
        },
    }
}

fn folder() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn shipped() -> Vec<PathBuf> {
    fs::read_dir(folder())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|found| found == "toml"))
        .filter(|path| path.file_name().is_some_and(|name| name != "Cargo.toml"))
        .collect()
}

const ALL: &str = r#"
[device]
soft = { profile = "mlx5", max_fragments = 16, max_windows = 64, max_qp = 3 }
[memory]
huge_pages = "off"
mlock = "require"
exposure = "arena"
staging = 0
[tunables]
peer_credits = 32
map_on_demand = 32
register_sources_from = 64
fmr_pool_size = 100
fmr_cache = false
max_frags = 16
timeout = "1500ms"
keepalive = 30
idle = "yield"
[[node]]
nid = "10.0.0.1@o2ib2"
cores = [1]
[node.extensions]
send_with_invalidate = false
write_with_immediate = true
[[node.export]]
name = "file"
portal = 50
match_bits = "0xffff_ffff_0000_0001"
file = "data/file"
piece = "4 KiB"
[[node.export]] # memory
name = "scratch"
portal = 51
match_bits = "18446744073709551615"
size = "32 MiB"
piece = "1 GiB"
writable = true
[[node]]
nid = "10.0.0.2@o2ib2"
[node.copy]
peer = "10.0.0.1@o2ib2"
file = "file"
into = "scratch"
[node.workload]
peer = "10.0.0.1@o2ib2"
region = "scratch"
sizes = [4096, "1 MiB"]
weights = [3, 1]
put = 1
in_flight = 4
duration = "100ms"
verify = false
seed = 0xffff_ffff_ffff_ffff
"#;
