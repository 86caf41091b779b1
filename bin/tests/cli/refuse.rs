//! What is refused, and how it is said.

use std::fs;
use std::path::Path;

use o2poll::Verdict;

use crate::{COPY, Folder, WORKLOAD, data, nodes, o2poll, program, shipped, text};

#[test]
fn check_tells_every_mistake_and_run_refuses_with_the_same_text() {
    let folder = Folder::new("check");
    folder.write("data", data(10));
    let good = folder.write(
        "good.toml",
        nodes("", "4 MiB", &format!("{COPY}{WORKLOAD}")),
    );
    let mistakes = nodes(
        "[tunables]\npeer_credits = 7\nidle = \"never\"",
        "4 MiB",
        "",
    );
    let bad = folder.write("bad.toml", mistakes);
    let output = o2poll(&["check".as_ref(), good.as_os_str()]);
    assert_eq!(output.status.code(), Some(0));
    let said = text(&output.stdout);
    assert!(said.contains("good.toml: ok: core"), "{said}");
    assert!(said.contains("MiB of memory for 10.0.0.1@o2ib"), "{said}");
    assert!(said.contains("copies `file` of 10.0.0.1@o2ib"), "{said}");
    let output = o2poll(&["check".as_ref(), good.as_os_str(), bad.as_os_str()]);
    assert_eq!(output.status.code(), Some(1));
    let said = text(&output.stdout);
    assert!(
        said.contains("peer_credits") && said.contains("never"),
        "{said}"
    );
    assert!(
        said.contains("good.toml: ok"),
        "one bad file does not hide the others: {said}"
    );
    let told = o2poll(&["check".as_ref(), bad.as_os_str()]);
    let refused = o2poll(&["run".as_ref(), bad.as_os_str()]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(refused.stdout.is_empty());
    assert_eq!(text(&refused.stderr), text(&told.stdout));
}

#[test]
fn a_region_that_is_too_small_is_refused_before_anything_starts() {
    let folder = Folder::new("region");
    folder.write("data", data(300_000));
    let file = folder.write("nodes.toml", nodes("", "256 KiB", COPY));
    let output = o2poll(&["run".as_ref(), file.as_os_str()]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        text(&output.stderr).contains("scratch"),
        "{}",
        text(&output.stderr)
    );
    // Large enough as a whole, but no slice fits into its pieces: only a run finds that out, and check asks it.
    let large = WORKLOAD.replace("128 KiB", "1 MiB");
    let file = folder.write("pieces.toml", nodes("", "8 MiB", &large));
    for verb in ["check", "run"] {
        let output = o2poll(&[verb.as_ref(), file.as_os_str()]);
        assert_eq!(output.status.code(), Some(1));
        let said = format!("{}{}", text(&output.stdout), text(&output.stderr));
        assert!(said.contains("choose a larger piece"), "{said}");
    }
}

#[test]
fn a_run_is_not_made_whose_report_cannot_be_written_and_no_report_is_lost() {
    let folder = Folder::new("unwritable");
    folder.write("data", data(50_000));
    let file = folder.write("nodes.toml", nodes("", "4 MiB", COPY));
    let run = |json: &Path| {
        o2poll(&[
            "run".as_ref(),
            file.as_os_str(),
            "--json".as_ref(),
            json.as_os_str(),
        ])
    };
    let missing = folder.0.join("none/report.json");
    let output = run(&missing);
    assert_eq!(output.status.code(), Some(3));
    let said = text(&output.stderr);
    assert!(said.contains(missing.to_str().unwrap()), "{said}");
    assert!(output.stdout.is_empty(), "nothing ran");
    // A disk that is full is seen too late.
    let output = run(Path::new("/dev/full"));
    assert_eq!(output.status.code(), Some(5));
    assert!(text(&output.stderr).contains("cannot write the report"));
    assert!(text(&output.stdout).contains("keys alive"));
}

#[test]
fn nothing_that_a_run_reads_is_overwritten() {
    let folder = Folder::new("overwritten");
    let exported = folder.write("data", data(50_000));
    let file = folder.write("nodes.toml", nodes("", "4 MiB", COPY));
    let link = folder.0.join("link");
    std::os::unix::fs::symlink(&exported, &link).unwrap();
    let both = folder.0.join("both");
    for (options, what) in [
        (vec!["--json".as_ref(), file.as_path()], "the node file"),
        (vec!["--pcap".as_ref(), file.as_path()], "the node file"),
        (vec!["--pcap".as_ref(), exported.as_path()], "exported"),
        (vec!["--json".as_ref(), link.as_path()], "exported"),
        (
            vec!["--json".as_ref(), &both, "--pcap".as_ref(), &both],
            "--json and --pcap both",
        ),
    ] {
        let before = (fs::read(&file).unwrap(), fs::read(&exported).unwrap());
        let output = program().arg("run").arg(&file).args(options).output();
        let output = output.unwrap();
        assert_eq!(output.status.code(), Some(1), "{what}");
        let said = text(&output.stderr);
        assert!(said.contains(what), "{said}");
        let after = (fs::read(&file).unwrap(), fs::read(&exported).unwrap());
        assert!(before == after, "{what}");
    }
}

#[test]
fn a_check_that_cannot_be_printed_ends_with_a_status() {
    let folder = Folder::new("unprinted");
    folder.write("data", data(50_000));
    let good = folder.write("good.toml", nodes("", "4 MiB", COPY));
    let bad = folder.write("bad.toml", "nodes = 1");
    for file in [good, bad] {
        let full = fs::OpenOptions::new().write(true).open("/dev/full");
        let output = program()
            .arg("check")
            .arg(file)
            .stdout(full.unwrap())
            .output()
            .unwrap();
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(5), "{said}");
        assert!(said.starts_with("o2poll: cannot print"), "{said}");
    }
}

#[test]
fn a_duration_is_told_its_range() {
    for (given, said) in [
        ("0s", "1ms to 720h"),
        ("999us", "1ms to 720h"),
        ("721h", "1ms to 720h"),
        ("5", "write it as 30s"),
    ] {
        let output = o2poll(&["run", "none.toml", "--duration", given]);
        assert_eq!(output.status.code(), Some(2));
        assert!(text(&output.stderr).contains(said), "{given}");
    }
}

#[test]
fn a_core_that_is_not_allowed_is_refused_with_those_that_are() {
    let folder = Folder::new("core");
    folder.write("data", data(10));
    let text_of = nodes("", "1 MiB", "").replace(
        "nid = \"10.0.0.2@o2ib\"",
        "nid = \"10.0.0.2@o2ib\"\ncores = [1000]",
    );
    let file = folder.write("nodes.toml", text_of);
    let output = o2poll(&["run".as_ref(), file.as_os_str()]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        text(&output.stderr).contains("1000"),
        "{}",
        text(&output.stderr)
    );
}

#[test]
fn memory_that_cannot_be_had_is_told_before_anything_runs() {
    let folder = Folder::new("memory");
    folder.write("data", data(10));
    let text_of = nodes("", "1000 TiB", "")
        .replace("256 KiB", "1 GiB")
        .replace("1000 TiB", "4 TiB");
    let file = folder.write("nodes.toml", text_of);
    let output = o2poll(&["run".as_ref(), file.as_os_str()]);
    assert_eq!(output.status.code(), Some(3), "{}", text(&output.stderr));
    let said = text(&output.stderr);
    assert!(
        said.contains("10.0.0.1@o2ib") && said.contains("ask for less"),
        "{said}"
    );
}

#[test]
fn the_shipped_file_is_printed_as_it_is() {
    let output = o2poll(&["config"]);
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(output.stdout, fs::read(shipped("loopback.toml")).unwrap());
    let help = text(&o2poll(&["--help"]).stdout);
    for word in [
        "Examples:",
        "Exit status:",
        "o2poll run config/loopback.toml",
    ] {
        assert!(help.contains(word), "{help}");
    }
    for verdict in [
        Verdict::Good,
        Verdict::CutShort,
        Verdict::NotClean,
        Verdict::Failed,
        Verdict::Mismatch,
        Verdict::Unaccounted,
    ] {
        let line = format!("\n  {}    ", verdict.code());
        assert!(help.contains(&line), "{verdict:?}: {help}");
    }
    assert_eq!(o2poll(&["no-such-verb"]).status.code(), Some(2));
}
