//! What was asked for and not granted, in words an operator can act on.

use core::fmt;

/// Something an arena wanted and did not get. One line, with what to raise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Note {
    /// The pool of reserved huge pages is too small.
    NoHugePages {
        /// Bytes asked for, whole huge pages.
        bytes: usize,
        /// Bytes of one huge page.
        page: usize,
        /// Free huge pages, if known.
        free: Option<usize>,
    },
    /// Transparent huge pages are switched off.
    NoTransparentHugePages {
        /// Bytes asked for.
        bytes: usize,
    },
    /// Some of it is in small pages.
    FewTransparentHugePages {
        /// Bytes asked for.
        bytes: usize,
        /// Bytes in huge pages.
        huge: usize,
    },
    /// The limit on locked memory is too low.
    NotLocked {
        /// Bytes to lock.
        bytes: usize,
        /// The limit, `None` when that is not the reason.
        limit: Option<usize>,
        /// As `mlock(2)` said it.
        errno: i32,
    },
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::NoHugePages { bytes, page, free } => {
                let wanted = bytes / page.max(1);
                write!(
                    f,
                    "{} in {wanted} huge pages of {} were not granted",
                    Size(bytes),
                    Size(page)
                )?;
                if let Some(free) = free {
                    write!(f, " ({free} are free)")?;
                }
                let missing = wanted.saturating_sub(free.unwrap_or(0)).max(1);
                write!(f, ": raise vm.nr_hugepages by {missing}")
            }
            Self::NoTransparentHugePages { bytes } => write!(
                f,
                "{} are in small pages: set /sys/kernel/mm/transparent_hugepage/enabled to madvise, or raise vm.nr_hugepages",
                Size(bytes)
            ),
            Self::FewTransparentHugePages { bytes, huge } => write!(
                f,
                "{} of {} are in transparent huge pages, the rest in small ones: memory is fragmented; raise vm.nr_hugepages early after boot",
                Size(huge),
                Size(bytes)
            ),
            Self::NotLocked {
                bytes,
                limit: Some(limit),
                ..
            } => write!(
                f,
                "{} are not locked in memory, the limit is {}: raise it with `ulimit -l {}`, memlock in limits.conf(5) or LimitMEMLOCK= in the unit",
                Size(bytes),
                Size(limit),
                bytes.div_ceil(1024)
            ),
            Self::NotLocked {
                bytes,
                limit: None,
                errno,
            } => write!(
                f,
                "{} are not locked in memory ({}): see `ulimit -l`, LimitMEMLOCK= in the unit, and free memory",
                Size(bytes),
                std::io::Error::from_raw_os_error(errno)
            ),
        }
    }
}

/// Bytes for people: `8 KiB`, `1.5 GiB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size(pub usize);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (unit, name) = UNITS
            .into_iter()
            .find(|(unit, _)| self.0 >= *unit)
            .unwrap_or((1, "B"));
        let tenths = (self.0 % unit) as u128 * 10 / unit as u128;
        match tenths {
            0 => write!(f, "{} {name}", self.0 / unit),
            _ => write!(f, "{}.{tenths} {name}", self.0 / unit),
        }
    }
}

const UNITS: [(usize, &str); 4] = [
    (1 << 40, "TiB"),
    (1 << 30, "GiB"),
    (1 << 20, "MiB"),
    (1 << 10, "KiB"),
];

#[cfg(test)]
mod tests {
    use super::{Note, Size};

    #[test]
    fn sizes_read_as_people_write_them() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (8192, "8 KiB"),
            (1536 << 20, "1.5 GiB"),
            (usize::MAX, "16777215.9 TiB"),
        ] {
            assert_eq!(Size(bytes).to_string(), text);
        }
    }

    #[test]
    fn every_note_says_what_to_raise() {
        let bytes = 512 << 20;
        for (note, remedy) in [
            (
                Note::NoHugePages {
                    bytes,
                    page: 2 << 20,
                    free: Some(56),
                },
                "512 MiB in 256 huge pages of 2 MiB were not granted (56 are free): raise vm.nr_hugepages by 200",
            ),
            (
                Note::NotLocked {
                    bytes,
                    limit: Some(8 << 20),
                    errno: libc::ENOMEM,
                },
                "512 MiB are not locked in memory, the limit is 8 MiB: raise it with `ulimit -l 524288`, \
                 memlock in limits.conf(5) or LimitMEMLOCK= in the unit",
            ),
        ] {
            assert_eq!(note.to_string(), remedy);
        }
        let other = Note::NotLocked {
            bytes,
            limit: None,
            errno: libc::EAGAIN,
        };
        assert!(other.to_string().contains("ulimit -l"));
        for note in [
            Note::NoTransparentHugePages { bytes },
            Note::FewTransparentHugePages {
                bytes,
                huge: 2 << 20,
            },
        ] {
            assert!(note.to_string().contains("vm.nr_hugepages"));
        }
    }
}
