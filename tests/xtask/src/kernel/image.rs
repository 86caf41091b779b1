//! What boots: Debian's kernel package, downloaded and unpacked but never installed, and virtme-ng in a Python
//! environment of its own. Both stay under `target/kernel`; whoever wants them anew removes that folder.

use core::time::Duration;
use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::command::run;
use crate::workspace::{Workspace, files};

/// A kernel and what boots it.
#[derive(Debug)]
pub(crate) struct Image {
    /// Debian's package, e.g. `linux-image-6.1.0-57-amd64`.
    pub(crate) package: String,
    /// Its version, e.g. `6.1.192-3`.
    pub(crate) version: String,
    /// The kernel. Its modules are where virtme looks for them, `../lib/modules`.
    pub(crate) vmlinuz: PathBuf,
    /// `bin` of the Python environment.
    bin: PathBuf,
}

impl Image {
    /// Gets what is not there yet; or says why it cannot be had here.
    pub(crate) fn prepare(workspace: &Workspace) -> Result<Result<Self, String>> {
        if !cfg!(all(target_arch = "x86_64", target_os = "linux")) {
            return Ok(Err("only for x86-64 Linux".to_owned()));
        }
        let folder = workspace.target("kernel");
        let unpacked = folder.join("unpacked");
        if vmlinuz(&unpacked).is_none() {
            match download(workspace, &folder)? {
                Ok(archive) => unpack(workspace, &archive, &unpacked)?,
                Err(why) => return Ok(Err(why)),
            }
        }
        let vmlinuz = vmlinuz(&unpacked)
            .with_context(|| format!("no boot/vmlinuz-* in {}", unpacked.display()))?;
        let bin = folder.join("venv/bin");
        if !bin.join("vng").is_file()
            && let Err(why) = virtme(workspace, &folder)?
        {
            return Ok(Err(why));
        }
        let about = fs::read_to_string(unpacked.join("about"))
            .context("the kernel was unpacked in part: remove target/kernel")?;
        let (package, version) = about
            .trim()
            .split_once('_')
            .context("target/kernel/unpacked/about is not PACKAGE_VERSION")?;
        Ok(Ok(Self {
            package: package.to_owned(),
            version: version.to_owned(),
            vmlinuz,
            bin,
        }))
    }

    /// `vng`, able to find its own parts.
    pub(crate) fn vng(&self) -> Command {
        let mut path = OsString::from(&self.bin);
        if let Some(rest) = env::var_os("PATH") {
            path.push(":");
            path.push(rest);
        }
        // depmod and modprobe are not on every user's path.
        path.push(":/usr/sbin:/sbin");
        let mut command = Command::new(self.bin.join("vng"));
        command.env("PATH", path);
        command
    }
}

/// The archive of the newest kernel that this Debian has.
fn download(workspace: &Workspace, folder: &Path) -> Result<Result<PathBuf, String>> {
    let archives = folder.join("archives");
    fs::create_dir_all(&archives).with_context(|| format!("cannot make {}", archives.display()))?;
    let depends = run(
        workspace,
        "kernel package",
        SHORT,
        Command::new("apt-cache").args(["depends", "linux-image-amd64"]),
    )?;
    let Some(package) = concrete(&depends.output) else {
        return Ok(Err(
            "apt-cache knows no linux-image-amd64: apt-get update".to_owned()
        ));
    };
    let fetched = run(
        workspace,
        "kernel download",
        FETCH,
        Command::new("apt-get")
            .current_dir(&archives)
            .args(["download", package]),
    )?;
    let prefix = format!("{package}_");
    let names = files(&archives, |name| {
        name.starts_with(&prefix) && name.ends_with(".deb")
    });
    match names.last() {
        Some(name) if fetched.status.success() => Ok(Ok(archives.join(name))),
        _ => Ok(Err(format!("apt-get could not download {package}"))),
    }
}

/// The package that Debian's `linux-image-amd64` stands for.
fn concrete(depends: &str) -> Option<&str> {
    depends
        .lines()
        .filter_map(|line| line.trim().strip_prefix("Depends: "))
        .find(|name| name.starts_with("linux-image-"))
}

/// Into a folder that gets its name when it is whole.
fn unpack(workspace: &Workspace, archive: &Path, unpacked: &Path) -> Result<()> {
    let partly = unpacked.with_extension("partly");
    for old in [&partly, unpacked] {
        if old.exists() {
            fs::remove_dir_all(old)?;
        }
    }
    run(
        workspace,
        "kernel unpack",
        FETCH,
        Command::new("dpkg-deb")
            .arg("--extract")
            .arg(archive)
            .arg(&partly),
    )?
    .success()?;
    let name = archive.file_stem().unwrap_or_default().to_string_lossy();
    let about = name.trim_end_matches("_amd64");
    fs::write(partly.join("about"), format!("{about}\n"))?;
    fs::rename(&partly, unpacked)?;
    // The archive is not needed again.
    fs::remove_file(archive)?;
    Ok(())
}

fn virtme(workspace: &Workspace, folder: &Path) -> Result<Result<(), String>> {
    let venv = folder.join("venv");
    run(
        workspace,
        "kernel venv",
        FETCH,
        Command::new("python3").args(["-m", "venv"]).arg(&venv),
    )?
    .success()?;
    let installed = run(
        workspace,
        "kernel virtme-ng",
        FETCH,
        Command::new(venv.join("bin/pip")).args(["install", "--quiet", VIRTME]),
    )?;
    if !installed.status.success() {
        return Ok(Err(format!("pip could not install {VIRTME}")));
    }
    ensure!(
        venv.join("bin/vng").is_file(),
        "{VIRTME} has no program vng"
    );
    Ok(Ok(()))
}

fn vmlinuz(unpacked: &Path) -> Option<PathBuf> {
    let boot = unpacked.join("boot");
    let names = files(&boot, |name| name.starts_with("vmlinuz-"));
    Some(boot.join(names.last()?))
}

const VIRTME: &str = "virtme-ng==1.42";

const SHORT: Duration = Duration::from_secs(60);

/// 70 MB over a slow line.
const FETCH: Duration = Duration::from_secs(10 * 60);

#[cfg(test)]
mod tests {
    use super::concrete;

    #[test]
    fn the_package_behind_the_name_is_found() {
        let depends = "linux-image-amd64\n  Depends: linux-image-6.1.0-57-amd64\n  Suggests: x\n";
        assert_eq!(concrete(depends), Some("linux-image-6.1.0-57-amd64"));
        assert_eq!(concrete("linux-image-amd64\n"), None);
    }
}
