//! Where things are.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// The repository.
#[derive(Debug)]
pub(crate) struct Workspace {
    pub(crate) root: PathBuf,
    pub(crate) members: Vec<Member>,
}

/// A crate of the workspace.
#[derive(Debug)]
pub(crate) struct Member {
    pub(crate) package: String,
    pub(crate) folder: PathBuf,
}

impl Workspace {
    pub(crate) fn find() -> Result<Self> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../..")
            .canonicalize()
            .context("the repository that this was built in is gone")?;
        let manifest = read(&root.join("Cargo.toml"))?;
        let list = value(&manifest, "members").context("no members in Cargo.toml")?;
        let members = list
            .split('"')
            .skip(1)
            .step_by(2)
            .map(|folder| {
                let folder = root.join(folder);
                let manifest = read(&folder.join("Cargo.toml"))?;
                let package = value(&manifest, "name")
                    .with_context(|| format!("no name in {}", folder.display()))?
                    .trim_matches('"')
                    .to_owned();
                Ok(Member { package, folder })
            })
            .collect::<Result<_>>()?;
        Ok(Self { root, members })
    }

    /// A folder under `target` for builds with flags of their own.
    pub(crate) fn target(&self, name: &str) -> PathBuf {
        self.root.join("target").join(name)
    }
}

/// The names of the files in `folder` that `keep` likes, sorted. None if there is no folder.
pub(crate) fn files(folder: &Path, keep: impl Fn(&str) -> bool) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(folder)
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| keep(name))
        .collect();
    names.sort();
    names
}

/// The rest of the line `key = ...`.
fn value<'t>(manifest: &'t str, key: &str) -> Option<&'t str> {
    manifest.lines().find_map(|line| {
        let (name, value) = line.split_once('=')?;
        (name.trim() == key).then(|| value.trim())
    })
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::{Workspace, files};

    #[test]
    fn members_are_found_by_folder_and_name() {
        let workspace = Workspace::find().unwrap();
        let has = |package: &str, folder: &str| {
            workspace.members.iter().any(|member| {
                member.package == package && member.folder == workspace.root.join(folder)
            })
        };
        assert!(has("o2poll-dataplane", "dataplane"));
        assert!(has("o2poll-soft", "hal/soft"));
        assert!(has("xtask", "tests/xtask"));
        assert_eq!(
            files(&workspace.root.join("tests/xtask"), |name| name
                == "Cargo.toml"),
            ["Cargo.toml"]
        );
        assert!(files(&workspace.root.join("nowhere"), |_| true).is_empty());
    }
}
