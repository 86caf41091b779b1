//! What was asked for and not granted, in words an operator can act on.

use core::fmt;

use super::limits;

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
        /// Huge pages of the pool, free or not; 0 if not known.
        pool: usize,
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
        /// Bytes that the process wants locked in all, those that are locked included: for what the limit counts.
        wanted: usize,
        /// The limit, `None` when that is not the reason.
        limit: Option<usize>,
        /// As `mlock(2)` said it.
        errno: i32,
    },
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::NoHugePages {
                bytes,
                page,
                free,
                pool,
            } => {
                let wanted = bytes / page.max(1);
                let (noun, verb) = plural(wanted);
                write!(
                    f,
                    "{wanted} huge {noun} of {} {verb} wanted ({})",
                    Size(page),
                    Size(bytes)
                )?;
                if let Some(free) = free {
                    write!(f, " and {free} {} free", plural(free).1)?;
                }
                let missing = wanted.saturating_sub(free.unwrap_or(0)).max(1);
                let enough = pool.saturating_add(missing);
                write!(f, ": reserve enough with `sysctl vm.nr_hugepages={enough}`")
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
                wanted,
                limit: Some(limit),
                ..
            } => write!(
                f,
                "{} of {} are not locked in memory, the limit of the process is {}: raise it with `ulimit -l {}`, memlock in limits.conf(5) or LimitMEMLOCK= in the unit",
                Size(bytes),
                Size(wanted),
                Size(limit),
                wanted.div_ceil(1024)
            ),
            Self::NotLocked {
                bytes,
                limit: None,
                errno,
                ..
            } => write!(
                f,
                "{} are not locked in memory ({}): see `ulimit -l`, LimitMEMLOCK= in the unit, and free memory",
                Size(bytes),
                std::io::Error::from_raw_os_error(errno)
            ),
        }
    }
}

/// The notes of all arenas of a process as one of each kind, in the order of [`Note`]: limits and pools are for all of them.
#[must_use]
pub fn joined(notes: &[Note]) -> Vec<Note> {
    join(notes, limits::huge_pages(), limits::locked())
}

/// With what the pool of huge pages has and what is locked now, after every arena has got what it can get.
fn join(notes: &[Note], now: Option<Pool>, locked: usize) -> Vec<Note> {
    let mut sums: [Option<Note>; 4] = [None; 4];
    for note in notes {
        let place = match note {
            Note::NoHugePages { .. } => 0,
            Note::NoTransparentHugePages { .. } => 1,
            Note::FewTransparentHugePages { .. } => 2,
            Note::NotLocked { .. } => 3,
        };
        if let Some(sum) = sums.get_mut(place) {
            *sum = Some(sum.map_or(*note, |sum| sum.and(*note)));
        }
    }
    for note in sums.iter_mut().flatten() {
        match note {
            Note::NoHugePages { free, pool, .. } => {
                if let Some(now) = now {
                    (*free, *pool) = (Some(now.free), now.all);
                }
            }
            Note::NotLocked { bytes, wanted, .. } => *wanted = locked.saturating_add(*bytes),
            _ => {}
        }
    }
    sums.into_iter().flatten().collect()
}

impl Note {
    /// Both, of one kind.
    const fn and(self, other: Self) -> Self {
        let mut sum = self;
        match (&mut sum, other) {
            (Self::NoHugePages { bytes, .. }, Self::NoHugePages { bytes: more, .. })
            | (
                Self::NoTransparentHugePages { bytes },
                Self::NoTransparentHugePages { bytes: more },
            )
            | (Self::NotLocked { bytes, .. }, Self::NotLocked { bytes: more, .. }) => {
                *bytes = bytes.saturating_add(more);
            }
            (
                Self::FewTransparentHugePages { bytes, huge },
                Self::FewTransparentHugePages {
                    bytes: more,
                    huge: more_huge,
                },
            ) => {
                *bytes = bytes.saturating_add(more);
                *huge = huge.saturating_add(more_huge);
            }
            _ => {}
        }
        sum
    }
}

/// Reserved huge pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pool {
    /// Bytes of a page.
    pub(super) page: usize,
    /// Pages that nobody has.
    pub(super) free: usize,
    /// Pages.
    pub(super) all: usize,
}

const fn plural(count: usize) -> (&'static str, &'static str) {
    if count == 1 {
        ("page", "is")
    } else {
        ("pages", "are")
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
    use super::{Note, Pool, Size, join};

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
                    pool: 100,
                },
                "256 huge pages of 2 MiB are wanted (512 MiB) and 56 are free: reserve enough with \
                 `sysctl vm.nr_hugepages=300`",
            ),
            (
                Note::NoHugePages {
                    bytes: 2 << 20,
                    page: 2 << 20,
                    free: Some(1),
                    pool: 1,
                },
                "1 huge page of 2 MiB is wanted (2 MiB) and 1 is free: reserve enough with `sysctl vm.nr_hugepages=2`",
            ),
            (
                Note::NotLocked {
                    bytes,
                    wanted: bytes + (4 << 20),
                    limit: Some(8 << 20),
                    errno: libc::ENOMEM,
                },
                "512 MiB of 516 MiB are not locked in memory, the limit of the process is 8 MiB: raise it with \
                 `ulimit -l 528384`, memlock in limits.conf(5) or LimitMEMLOCK= in the unit",
            ),
        ] {
            assert_eq!(note.to_string(), remedy);
        }
        let other = Note::NotLocked {
            bytes,
            wanted: bytes,
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

    #[test]
    fn the_notes_of_a_process_are_one_of_each_kind_with_the_sum() {
        let (page, errno) = (2 << 20, libc::ENOMEM);
        let huge = |pages: usize, free| Note::NoHugePages {
            bytes: pages * page,
            page,
            free: Some(free),
            pool: 4,
        };
        let unlocked = |bytes, wanted| Note::NotLocked {
            bytes,
            wanted,
            limit: Some(8 << 20),
            errno,
        };
        let few = |bytes, huge| Note::FewTransparentHugePages { bytes, huge };
        let notes = [
            unlocked(5 << 20, 5 << 20),
            huge(11, 4),
            few(8 << 20, 2 << 20),
            huge(1, 1),
            unlocked(3 << 20, 9 << 20),
            few(2 << 20, 0),
            huge(5, 4),
        ];
        let now = Pool {
            page,
            free: 2,
            all: 4,
        };
        let sums = join(&notes, Some(now), 6 << 20);
        assert_eq!(
            sums,
            [
                huge(17, 2),
                few(10 << 20, 2 << 20),
                unlocked(8 << 20, 14 << 20)
            ]
        );
        // Whoever does what is said has enough: of pages for all, and of what is locked and what is still to be.
        assert!(
            sums[0].to_string().contains("vm.nr_hugepages=19"),
            "{}",
            sums[0]
        );
        assert!(
            sums[2].to_string().contains("ulimit -l 14336`"),
            "{}",
            sums[2]
        );
        let mut other_order = notes;
        other_order.reverse();
        assert_eq!(join(&other_order, Some(now), 6 << 20), sums);
        assert!(join(&[], Some(now), 0).is_empty());
    }
}
