//! What the machine does not grant, and the remedy that is told for it.

use std::path::Path;
use std::process::{Command, Output, Stdio};

use crate::{Folder, o2poll, text};

/// Two arenas, one for each node.
fn file(folder: &Folder, memory: &str) -> std::path::PathBuf {
    folder.write(
        "nodes.toml",
        format!(
            "[device]\nsoft = {{ profile = \"frwr\" }}\n[memory]\nstaging = 0\n{memory}\n[[node]]\nnid = \"10.0.0.1@o2ib\"\n\
             [[node.export]]\nname = \"scratch\"\nportal = 50\nmatch_bits = 1\nsize = \"128 KiB\"\n\
             [[node]]\nnid = \"10.0.0.2@o2ib\"\n"
        ),
    )
}

/// A run that may lock so many KiB and no more, whoever runs it.
fn limited(kib: u64, file: &Path) -> Output {
    let script = "ulimit -l \"$1\" || exit 99; [ \"$(id -u)\" = 0 ] || exec \"$2\" run \"$3\"
        exec setpriv --bounding-set -ipc_lock --inh-caps -ipc_lock \"$2\" run \"$3\"";
    Command::new("sh")
        .args(["-c", script, "sh", &kib.to_string()])
        .arg(env!("CARGO_BIN_EXE_o2poll"))
        .arg(file)
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

/// The limit that is told.
fn told(said: &str) -> u64 {
    let (_, after) = said.split_once("`ulimit -l ").expect(said);
    after.split_once('`').unwrap().0.parse().expect(said)
}

#[test]
fn a_limit_on_locked_memory_raised_as_told_is_enough_for_the_whole_process() {
    let folder = Folder::new("memlock");
    for (lock, refused) in [("try", 0), ("require", 3)] {
        let memory = format!("huge_pages = \"off\"\nmlock = \"{lock}\"");
        let file = file(&folder, &memory);
        let output = limited(64, &file);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(refused), "{said}");
        assert_eq!(said.matches("not locked").count(), 1, "{said}");
        let enough = told(&said);
        let output = limited(enough, &file);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{said}");
        assert!(!said.contains("not locked"), "{said}");
        // And no more than that.
        let output = limited(enough - 4, &file);
        assert_eq!(told(&text(&output.stderr)), enough);
    }
}

#[test]
fn huge_pages_that_are_not_there_are_one_note_of_the_process() {
    let folder = Folder::new("huge");
    let file = file(&folder, "huge_pages = \"try\"");
    let output = o2poll(&["run".as_ref(), file.as_os_str()]);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{said}");
    // On a machine that has reserved some there is nothing to say.
    assert!(said.matches("vm.nr_hugepages=").count() <= 1, "{said}");
    assert!(!said.contains("10.0.0."), "{said}");
}
