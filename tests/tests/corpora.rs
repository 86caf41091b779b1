//! What the fuzzers have kept, and what they once found, on any compiler.

use std::fs;
use std::path::Path;

use o2poll_tests::hostile::CHECKS;

#[test]
fn everything_that_the_fuzzers_kept_still_passes() {
    for (name, check) in CHECKS {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("fuzz/corpus")
            .join(name);
        let mut files: Vec<_> = fs::read_dir(&folder)
            .unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
            .map(|entry| entry.unwrap().path())
            .collect();
        files.sort();
        assert!(files.len() > 5, "{name} has a corpus");
        for file in files {
            println!("{}", file.display());
            check(&fs::read(&file).unwrap());
        }
    }
}
