//! What this machine and this process can give.

use std::fs;
use std::io;

use super::note::Pool;
use crate::procfs;

/// The least of what bounds a mapping in small pages, and who says so. `None` where nobody does.
pub(super) fn available() -> Option<(usize, &'static str)> {
    let machine = fs::read_to_string("/proc/meminfo")
        .ok()
        .and_then(|text| procfs::number(&text, "MemAvailable"))
        .map(|kib| (bytes(kib), "MemAvailable in /proc/meminfo"));
    machine.into_iter().chain(cgroup()).min()
}

/// The pool of reserved huge pages.
pub(super) fn huge_pages() -> Option<Pool> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let page = bytes(procfs::number(&text, "Hugepagesize")?);
    let count = |name| usize::try_from(procfs::number(&text, name)?).ok();
    let free = count("HugePages_Free")?;
    let all = count("HugePages_Total").unwrap_or(free);
    page.is_power_of_two().then_some(Pool { page, free, all })
}

/// Bytes that the process has locked, for which the limit counts.
pub(super) fn locked() -> usize {
    let text = fs::read_to_string("/proc/self/status").unwrap_or_default();
    procfs::number(&text, "VmLck").map_or(0, bytes)
}

/// Whether `madvise(MADV_HUGEPAGE)` means anything here.
pub(super) fn transparent_huge_pages() -> bool {
    fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled")
        .is_ok_and(|text| !text.contains("[never]"))
}

/// How much of the mapping that holds `address` is in transparent huge pages.
pub(super) fn transparent_huge_bytes(address: usize) -> Option<usize> {
    let text = fs::read_to_string("/proc/self/smaps").ok()?;
    let mut inside = false;
    for line in text.lines() {
        if let Some((start, end)) = span(line) {
            inside = (start..end).contains(&address);
        } else if inside && line.starts_with("AnonHugePages:") {
            return procfs::number(line, "AnonHugePages").map(bytes);
        }
    }
    None
}

/// The limit on locked memory; `None` if there is none.
pub(crate) fn locked_memory() -> Option<usize> {
    let text = fs::read_to_string("/proc/self/limits").ok()?;
    let line = text.lines().find(|line| line.starts_with(MAX_LOCKED))?;
    line.get(MAX_LOCKED.len()..)?
        .split_whitespace()
        .next()?
        .parse()
        .ok()
}

/// `errno` of the system call that has just failed.
pub(super) fn errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

/// What the memory control group allows, version 2 or 1. Only the innermost group is asked.
fn cgroup() -> Option<(usize, &'static str)> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    groups.lines().find_map(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, path) = (parts.next()?, parts.next()?);
        let file = if controllers.is_empty() {
            format!("/sys/fs/cgroup{path}/memory.max")
        } else if controllers == "memory" {
            format!("/sys/fs/cgroup/memory{path}/memory.limit_in_bytes")
        } else {
            return None;
        };
        let limit = fs::read_to_string(file).ok()?.trim().parse().ok()?;
        Some((limit, "memory limit of the control group"))
    })
}

/// The addresses of a mapping, if this line of smaps begins one.
fn span(line: &str) -> Option<(usize, usize)> {
    let (start, end) = line.split_whitespace().next()?.split_once('-')?;
    Some((
        usize::from_str_radix(start, 16).ok()?,
        usize::from_str_radix(end, 16).ok()?,
    ))
}

fn bytes(kib: u64) -> usize {
    usize::try_from(kib)
        .unwrap_or(usize::MAX)
        .saturating_mul(1024)
}

const MAX_LOCKED: &str = "Max locked memory";

#[cfg(test)]
mod tests {
    use super::{available, span, transparent_huge_bytes};

    #[test]
    fn this_machine_says_what_it_has() {
        let (bytes, _) = available().unwrap();
        assert!(bytes > 1 << 20);
    }

    #[test]
    fn the_mapping_around_an_address_is_found() {
        assert_eq!(
            span("7f00-7f80 rw-p 00000000 00:00 0"),
            Some((0x7f00, 0x7f80))
        );
        assert_eq!(span("AnonHugePages:  0 kB"), None);
        let here = 0_u8;
        assert!(transparent_huge_bytes(core::ptr::from_ref(&here).addr()).is_some());
        assert_eq!(transparent_huge_bytes(0), None);
    }
}
