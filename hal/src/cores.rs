//! Cores: which there are, staying on one, and how often a thread was taken off it.

use std::io;

use crate::procfs;

/// Cores the calling thread may run on, ascending: what `taskset(1)` and the cpuset leave of those
/// that are online. Ask before the first [`pin`]; afterwards the answer is that one core.
///
/// # Errors
/// When `/proc` is not mounted.
pub fn allowed() -> io::Result<Vec<usize>> {
    let status = procfs::thread_status()?;
    procfs::field(&status, "Cpus_allowed_list")
        .and_then(parse)
        .ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::InvalidData,
                "no Cpus_allowed_list in /proc/thread-self/status",
            )
        })
}

/// Keeps the calling thread on `core`, and reads back that it is so.
///
/// # Errors
/// When the kernel refuses, or did something else. The thread is then where it was.
pub fn pin(core: usize) -> Result<(), PinError> {
    let before = allowed()?;
    // `core_affinity` has room for 1024 cores, and panics beyond.
    let taken = core < 1024 && core_affinity::set_for_current(core_affinity::CoreId { id: core });
    let after = allowed()?;
    if taken && after == [core] {
        return Ok(());
    }
    Err(PinError::Refused {
        core,
        allowed: CoreList(before),
    })
}

/// How often the calling thread left its core so far.
///
/// # Errors
/// When `/proc` is not mounted.
pub fn switches() -> io::Result<Switches> {
    let status = procfs::thread_status()?;
    let count = |name| {
        procfs::number(&status, name).ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::InvalidData,
                format!("no {name} in /proc/thread-self/status"),
            )
        })
    };
    Ok(Switches {
        voluntary: count("voluntary_ctxt_switches")?,
        involuntary: count("nonvoluntary_ctxt_switches")?,
    })
}

/// Context switches of one thread (`proc_pid_status(5)`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Switches {
    /// The thread slept or yielded.
    pub voluntary: u64,
    /// The kernel took the core away: on a polling core, time in which nothing was polled.
    pub involuntary: u64,
}

impl Switches {
    /// What was added since `earlier`.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Self {
        Self {
            voluntary: self.voluntary.saturating_sub(earlier.voluntary),
            involuntary: self.involuntary.saturating_sub(earlier.involuntary),
        }
    }
}

/// Why a thread is not on the core it was meant for.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PinError {
    /// Not a core of this process.
    #[error(
        "core {core} is not available: this thread may run on {allowed}; choose one of those, or widen its cpuset or taskset(1) mask"
    )]
    Refused {
        /// Asked for.
        core: usize,
        /// What the kernel would have granted.
        allowed: CoreList,
    },
    /// `/proc` cannot be read, so that nothing can be said.
    #[error("cannot see which cores this thread may run on; is /proc mounted?")]
    Unknown(#[from] io::Error),
}

/// Cores for people, as the kernel writes them: `0-3,8`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CoreList(pub Vec<usize>);

impl core::fmt::Display for CoreList {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let runs = self
            .0
            .chunk_by(|before, after| before.checked_add(1) == Some(*after));
        for (nth, run) in runs.enumerate() {
            if nth != 0 {
                f.write_str(",")?;
            }
            match run {
                [first, .., last] => write!(f, "{first}-{last}")?,
                [only] => write!(f, "{only}")?,
                [] => {}
            }
        }
        Ok(())
    }
}

/// `0-3,8` as numbers (`cpuset(7)`, list format).
fn parse(list: &str) -> Option<Vec<usize>> {
    let mut cores = Vec::new();
    for part in list.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        cores.extend(first..=last);
    }
    Some(cores)
}

#[cfg(test)]
mod tests {
    use super::{CoreList, PinError, Switches, allowed, parse, pin, switches};

    #[test]
    fn core_lists_round_trip() {
        for (text, cores) in [
            ("0", vec![0]),
            ("0-1", vec![0, 1]),
            ("1,3,5-7,9", vec![1, 3, 5, 6, 7, 9]),
        ] {
            assert_eq!(parse(text).unwrap(), cores);
            assert_eq!(CoreList(cores).to_string(), text);
        }
        for text in ["", "a", "1-", "1-2-3"] {
            assert_eq!(parse(text), None, "{text}");
        }
    }

    #[test]
    fn a_pinned_thread_may_run_on_that_core_alone() {
        let cores = allowed().unwrap();
        for core in cores.clone() {
            std::thread::spawn(move || {
                pin(core).unwrap();
                assert_eq!(allowed().unwrap(), [core]);
            })
            .join()
            .unwrap();
        }
        assert_eq!(allowed().unwrap(), cores);
    }

    #[test]
    fn a_core_that_is_not_there_is_named_beside_those_that_are() {
        let cores = allowed().unwrap();
        for core in [1023, 1024, usize::MAX] {
            let error = pin(core).unwrap_err();
            assert!(matches!(error, PinError::Refused { .. }));
            let text = error.to_string();
            assert!(text.contains(&format!("core {core} ")), "{text}");
            assert!(
                text.contains(&CoreList(cores.clone()).to_string()),
                "{text}"
            );
        }
        assert_eq!(allowed().unwrap(), cores);
    }

    #[test]
    fn sleeping_is_a_voluntary_switch() {
        let before = switches().unwrap();
        std::thread::sleep(core::time::Duration::from_millis(2));
        let spent = switches().unwrap().since(before);
        assert!(spent.voluntary >= 1);
        assert_eq!(before.since(before), Switches::default());
    }
}
