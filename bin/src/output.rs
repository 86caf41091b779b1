//! A file that is written whole or not at all.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};

use crate::cli::is_direct;

/// What is written to a file until it is complete. It is a file beside that one until then, so that what was there before stays
/// as it was if the rest does not come. Devices and pipes are written directly.
#[derive(Debug)]
pub(crate) struct Output {
    file: File,
    /// The file beside it, and its name in the end.
    beside: Option<(PathBuf, PathBuf)>,
}

impl Output {
    /// Whether `path` can be written, as far as can be told. Changes nothing.
    pub(crate) fn try_out(path: &Path) -> io::Result<()> {
        if is_direct(path) {
            return Ok(());
        }
        Self::begin(path).map(drop)
    }

    /// Begins to write what is to become `path`.
    pub(crate) fn begin(path: &Path) -> io::Result<Self> {
        if is_direct(path) {
            // Appended, where the shell has led it into a file.
            let file = File::options().append(true).open(path)?;
            return Ok(Self { file, beside: None });
        }
        // Of a link it is the file that is written, not the link.
        let path = match fs::canonicalize(path) {
            Ok(found) => found,
            Err(error) if error.kind() == ErrorKind::NotFound => path.to_owned(),
            Err(error) => return Err(error),
        };
        let name = path.file_name().ok_or(ErrorKind::IsADirectory)?;
        let mut hidden = OsString::from(".");
        hidden.push(name);
        hidden.push(format!(".{}.part", std::process::id()));
        let permissions = match File::options().append(true).open(&path) {
            Ok(old) => Some(old.metadata()?.permissions()),
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            Err(error) => return Err(error),
        };
        let beside = path.with_file_name(hidden);
        let file = File::options()
            .write(true)
            .create_new(true)
            .open(&beside)
            .map_err(|error| {
                io::Error::new(error.kind(), format!("{}: {error}", beside.display()))
            })?;
        let output = Self {
            file,
            beside: Some((beside, path)),
        };
        if let Some(permissions) = permissions {
            output.file.set_permissions(permissions)?;
        }
        Ok(output)
    }

    /// Nothing that is written stands beside anything: it is gone when it is written.
    pub(crate) const fn is_direct(&self) -> bool {
        self.beside.is_none()
    }

    /// It is complete.
    pub(crate) fn finish(mut self) -> io::Result<()> {
        self.file.flush()?;
        let Some((beside, path)) = self.beside.take() else {
            return Ok(());
        };
        fs::rename(&beside, path).inspect_err(|_| {
            let _ = fs::remove_file(&beside);
        })
    }
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Drop for Output {
    /// It has not become complete.
    fn drop(&mut self) {
        if let Some((beside, _)) = &self.beside {
            let _ = fs::remove_file(beside);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Output;
    use std::fs;
    use std::io::Write as _;
    use std::os::unix::fs::PermissionsExt as _;
    use std::path::{Path, PathBuf};

    /// A folder of this test, gone when the test is.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let path =
                std::env::temp_dir().join(format!("o2poll-output-{}-{name}", std::process::id()));
            fs::create_dir_all(&path).unwrap();
            Self(path)
        }

        fn names(&self) -> Vec<String> {
            let entries = fs::read_dir(&self.0).unwrap();
            let name = |entry: fs::DirEntry| entry.file_name().into_string().unwrap();
            let mut names: Vec<String> = entries.map(|entry| name(entry.unwrap())).collect();
            names.sort();
            names
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn what_does_not_become_complete_changes_and_leaves_nothing() {
        let folder = Folder::new("half");
        let (old, new) = (folder.0.join("old"), folder.0.join("new"));
        fs::write(&old, b"as it was").unwrap();
        for path in [&old, &new] {
            Output::try_out(path).unwrap();
            let mut output = Output::begin(path).unwrap();
            output.write_all(b"half").unwrap();
            assert!(!output.is_direct());
            drop(output);
        }
        assert_eq!(fs::read(&old).unwrap(), b"as it was");
        assert_eq!(folder.names(), ["old"]);
    }

    #[test]
    fn what_is_complete_takes_the_place_of_the_file_and_keeps_its_mode() {
        let folder = Folder::new("whole");
        let (file, link) = (folder.0.join("file"), folder.0.join("link"));
        fs::write(&file, b"longer than what comes").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        let mut output = Output::begin(&link).unwrap();
        output.write_all(b"new").unwrap();
        output.finish().unwrap();
        assert_eq!(fs::read(&file).unwrap(), b"new");
        assert_eq!(
            fs::metadata(&file).unwrap().permissions().mode() & 0o777,
            0o640
        );
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(folder.names(), ["file", "link"]);
    }

    #[test]
    fn a_device_is_written_directly_and_what_cannot_be_written_is_told_at_once() {
        let mut output = Output::begin(Path::new("/dev/null")).unwrap();
        output.write_all(b"gone").unwrap();
        assert!(output.is_direct());
        output.finish().unwrap();
        let folder = Folder::new("wrong");
        assert!(Output::try_out(&folder.0).is_err(), "a folder");
        assert!(Output::try_out(&folder.0.join("none/file")).is_err());
        assert!(folder.names().is_empty());
    }
}
