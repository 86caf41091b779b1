//! What of the machine a node file is checked against.

use core::fmt;
use std::fs::{self, File};
use std::io;
use std::path::Path;

/// A machine, as far as a node file depends on it. A value, so that a file can be checked for another.
#[derive(Clone)]
pub struct Machine<'a> {
    /// Cores that this process may run on, ascending.
    pub allowed_cores: Vec<usize>,
    /// Cores that there are: 0 to this.
    pub present_cores: usize,
    /// How many threads really run at once: `allowed_cores`, or less under a CPU quota.
    pub parallelism: usize,
    /// Length of a regular file that can be read.
    pub file_size: &'a dyn Fn(&Path) -> io::Result<u64>,
}

impl Machine<'static> {
    /// This one, for this process: its affinity mask as `/proc/self/status` has it, and its CPU quota.
    #[must_use]
    pub fn this() -> Self {
        let parallelism = std::thread::available_parallelism().map_or(1, usize::from);
        let allowed_cores = fs::read_to_string("/proc/self/status")
            .ok()
            .and_then(|status| allowed_in(&status))
            .unwrap_or_else(|| (0..parallelism).collect());
        let beyond = |cores: &[usize]| cores.iter().max().map_or(0, |last| last.saturating_add(1));
        let present_cores = fs::read_to_string("/sys/devices/system/cpu/present")
            .ok()
            .and_then(|list| core_list(&list))
            .map_or(0, |cores| beyond(&cores))
            .max(beyond(&allowed_cores));
        Self {
            allowed_cores,
            present_cores,
            parallelism,
            file_size: &regular_file_size,
        }
    }
}

impl fmt::Debug for Machine<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Machine")
            .field("allowed_cores", &self.allowed_cores)
            .field("present_cores", &self.present_cores)
            .field("parallelism", &self.parallelism)
            .finish_non_exhaustive()
    }
}

/// Looks before it opens: opening a FIFO would wait for a writer.
fn regular_file_size(path: &Path) -> io::Result<u64> {
    let kind = fs::metadata(path)?.file_type();
    if kind.is_dir() {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    if !kind.is_file() {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "not a regular file",
        ));
    }
    Ok(File::open(path)?.metadata()?.len())
}

/// The `Cpus_allowed_list` line of proc_pid_status(5).
fn allowed_in(status: &str) -> Option<Vec<usize>> {
    status
        .lines()
        .find_map(|line| line.strip_prefix("Cpus_allowed_list:"))
        .and_then(core_list)
}

/// The list format of cpuset(7), as `0-3,8`.
fn core_list(text: &str) -> Option<Vec<usize>> {
    let mut cores = Vec::new();
    for range in text.trim().split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        if last < first || last >= MOST_CORES {
            return None;
        }
        cores.extend(first..=last);
    }
    cores.sort_unstable();
    cores.dedup();
    Some(cores)
}

/// More than any kernel is built for (CONFIG_NR_CPUS).
const MOST_CORES: usize = 1 << 16;

#[cfg(test)]
mod tests {
    use super::{Machine, allowed_in, core_list, regular_file_size};
    use std::path::Path;

    #[test]
    fn core_lists_are_read_as_the_kernel_writes_them() {
        assert_eq!(core_list("0-1\n"), Some(vec![0, 1]));
        assert_eq!(core_list("3"), Some(vec![3]));
        assert_eq!(core_list("0-2,8,10-11"), Some(vec![0, 1, 2, 8, 10, 11]));
        for text in ["", "a", "2-1", "1-", "0-99999999999", "0-99999999"] {
            assert_eq!(core_list(text), None, "{text}");
        }
        let status = "Name:\tx\nCpus_allowed:\t5\nCpus_allowed_list:\t0,2\n";
        assert_eq!(allowed_in(status), Some(vec![0, 2]));
        assert_eq!(allowed_in("Name:\tx\n"), None);
    }

    #[test]
    fn this_machine_has_a_core_for_this_test() {
        let machine = Machine::this();
        assert!(!machine.allowed_cores.is_empty());
        assert!(machine.parallelism >= 1);
        assert!(
            machine
                .allowed_cores
                .iter()
                .all(|core| *core < machine.present_cores)
        );
    }

    #[test]
    fn only_a_regular_file_has_a_size() {
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        assert!(regular_file_size(&here.join("Cargo.toml")).unwrap() > 0);
        assert!(regular_file_size(here).is_err());
        assert!(regular_file_size(Path::new("/dev/zero")).is_err());
        assert!(regular_file_size(&here.join("no such file")).is_err());
    }
}
