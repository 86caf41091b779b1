//! Memory that a device may touch: one mapping, resident before it is handed out.
//!
//! An [`Arena`] is mapped at start, in huge pages and locked where the machine grants it, and cut
//! into [`Range`]s that never overlap. The whole of it is registered with a device once
//! ([`base`](Arena::base), [`len`](Arena::len)); the local key of that registration goes into every
//! range. What was asked for and not granted is told in a [`Note`] that says what to raise.
//!
//! Memory lands on the NUMA node of the thread that makes the arena: make it on the core that uses it.
#![allow(unsafe_code)]

use core::ptr::NonNull;
use core::sync::atomic::{AtomicUsize, Ordering};
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use o2poll_dataplane::memory::Range;
use o2poll_dataplane::nic::LKey;

use self::mapping::Mapping;

pub(crate) mod limits;
mod mapping;
mod note;

pub use self::note::{Note, Size, joined};

/// Whether an arena asks for huge pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum HugePages {
    /// From the reserved pool (`vm.nr_hugepages`) if there are enough; else transparent huge pages.
    #[default]
    Try,
    /// From the reserved pool, or no arena.
    Require,
    /// Neither.
    Off,
}

/// Whether an arena asks to be locked in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Lock {
    /// If the limit allows.
    #[default]
    Try,
    /// Or no arena.
    Require,
    /// No.
    Off,
}

/// One mapping of prefaulted memory, handed out once, front to back.
#[derive(Debug)]
pub struct Arena {
    mapping: Mapping,
    taken: AtomicUsize,
    content: usize,
}

impl Arena {
    /// Maps at least `bytes` of zeroed memory: rounded up to whole pages, all of them resident.
    ///
    /// # Errors
    /// When the memory cannot be had, or something that is required was not granted.
    pub fn new(bytes: usize, huge: HugePages, lock: Lock) -> Result<(Self, Vec<Note>), ArenaError> {
        let mut notes = Vec::new();
        let mapping = Mapping::new(bytes, huge, lock, &mut notes)?;
        let arena = Self {
            mapping,
            taken: AtomicUsize::new(0),
            content: 0,
        };
        Ok((arena, notes))
    }

    /// An arena that begins with a copy of a file: [`content`](Self::content) bytes, zeros after them.
    ///
    /// A device cannot be given a shared, read-only mapping of a file (`ibv_reg_mr(3)` asks for
    /// write access to the pages), so the file is read once, in order, and later changes to it are
    /// not seen.
    ///
    /// # Errors
    /// As for [`new`](Self::new), and when the file cannot be read, is empty, is no regular file,
    /// or loses bytes while it is read.
    pub fn from_file(
        path: &Path,
        huge: HugePages,
        lock: Lock,
    ) -> Result<(Self, Vec<Note>), ArenaError> {
        let unreadable = |source| ArenaError::File {
            path: path.to_owned(),
            source,
        };
        // Looked at before it is opened: opening a FIFO would wait for its writer.
        if !path.metadata().map_err(unreadable)?.is_file() {
            return Err(ArenaError::NoRegularFile {
                path: path.to_owned(),
            });
        }
        let mut file = File::open(path).map_err(unreadable)?;
        let length = file.metadata().map_err(unreadable)?.len();
        if length == 0 {
            return Err(ArenaError::EmptyFile {
                path: path.to_owned(),
            });
        }
        let (mut arena, notes) =
            Self::new(usize::try_from(length).unwrap_or(usize::MAX), huge, lock)?;
        arena.fill(&mut file, length, path)?;
        Ok((arena, notes))
    }

    /// Takes the next `bytes`, at an address that is a multiple of `align`. The device knows them
    /// by `lkey`, the key under which the whole arena is registered.
    ///
    /// # Errors
    /// When there is not as much left; nothing is taken then.
    pub fn take(&self, bytes: usize, align: usize, lkey: LKey) -> Result<Range<'_>, TakeError> {
        if !align.is_power_of_two() {
            return Err(TakeError::Alignment { align });
        }
        if u32::try_from(bytes).is_err() {
            return Err(TakeError::TooLong { bytes });
        }
        let base = self.mapping.base().as_ptr().addr();
        let place = |taken: usize| {
            let start = base.checked_add(taken)?.checked_next_multiple_of(align)? - base;
            let end = start.checked_add(bytes)?;
            (end <= self.mapping.len()).then_some((start, end))
        };
        // Relaxed: the read-modify-write alone makes the pieces disjoint, and nothing is published by it.
        let taken = self
            .taken
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |taken| {
                place(taken).map(|(_, end)| end)
            });
        let exhausted = |taken| TakeError::Exhausted {
            bytes,
            left: self.mapping.len().saturating_sub(taken),
            arena: self.mapping.len(),
        };
        let (start, _) = taken
            .ok()
            .and_then(place)
            .ok_or_else(|| exhausted(self.taken.load(Ordering::Relaxed)))?;
        // SAFETY: `place` keeps `start + bytes` within the mapping.
        let piece = unsafe { self.mapping.base().add(start) };
        // The counter only grows, so no other range holds any of these bytes, and the arena itself touches them only in
        // `fill`, before it can be borrowed. Whether `lkey` is theirs is for the device to check, which refuses a wrong one.
        // SAFETY: `bytes` bytes of the mapping, zeroed or file content and hence initialised, are held by nobody else, as
        // said above; the mapping lives until the arena drops, and the range borrows the arena.
        unsafe { Range::new(piece, bytes, lkey) }.ok_or(TakeError::TooLong { bytes })
    }

    /// The first byte, to register the whole arena with a device.
    #[must_use]
    pub const fn base(&self) -> NonNull<u8> {
        self.mapping.base()
    }

    /// Bytes in all, whole pages.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.mapping.len()
    }

    /// An arena is never empty.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        false
    }

    /// Bytes copied from a file; 0 if there was none.
    #[must_use]
    pub const fn content(&self) -> usize {
        self.content
    }

    /// Bytes not handed out yet.
    #[must_use]
    pub fn left(&self) -> usize {
        // Relaxed: a number for people.
        self.mapping
            .len()
            .saturating_sub(self.taken.load(Ordering::Relaxed))
    }

    /// Whether it consists of reserved huge pages.
    #[must_use]
    pub const fn has_huge_pages(&self) -> bool {
        self.mapping.has_huge_pages()
    }

    /// Whether it cannot be paged out.
    #[must_use]
    pub const fn is_locked(&self) -> bool {
        self.mapping.is_locked()
    }

    /// Reads `length` bytes into the front. Nobody has taken a range yet.
    fn fill(&mut self, from: &mut impl Read, length: u64, path: &Path) -> Result<(), ArenaError> {
        let content = usize::try_from(length).unwrap_or(usize::MAX);
        let Some(bytes) = self.mapping.bytes_mut().get_mut(..content) else {
            return Err(ArenaError::File {
                path: path.to_owned(),
                source: io::ErrorKind::OutOfMemory.into(),
            });
        };
        from.read_exact(bytes).map_err(|source| {
            let path = path.to_owned();
            if source.kind() == io::ErrorKind::UnexpectedEof {
                ArenaError::ShrunkFile { path, length }
            } else {
                ArenaError::File { path, source }
            }
        })?;
        self.content = content;
        Ok(())
    }
}

/// Why there is no arena.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ArenaError {
    /// Zero bytes.
    #[error("an arena of 0 bytes was asked for")]
    Empty,
    /// More than there is, found before the kernel has to kill somebody.
    #[error(
        "an arena of {} was asked for, but only {} can be had ({limit}): ask for less, or give this process more memory",
        Size(*bytes), Size(*available)
    )]
    NoMemory {
        /// Asked for.
        bytes: usize,
        /// Can be had.
        available: usize,
        /// Who says so.
        limit: &'static str,
    },
    /// `mmap(2)` or `madvise(2)` said no.
    #[error("an arena of {} could not be mapped", Size(*bytes))]
    Map {
        /// Asked for.
        bytes: usize,
        /// Why.
        source: io::Error,
    },
    /// Required, but not granted.
    #[error("{0}; this arena requires it")]
    Required(Note),
    /// The file cannot be read.
    #[error("cannot read {}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A directory, a device, a pipe.
    #[error("{} is not a regular file: only those have a length to export", path.display())]
    NoRegularFile {
        /// Which.
        path: PathBuf,
    },
    /// Nothing to export.
    #[error("{} is empty: there is nothing to export", path.display())]
    EmptyFile {
        /// Which.
        path: PathBuf,
    },
    /// Somebody truncated it.
    #[error("{} had {length} bytes when it was opened and lost some while it was read: try again when nobody writes to it", path.display())]
    ShrunkFile {
        /// Which.
        path: PathBuf,
        /// Bytes when it was opened.
        length: u64,
    },
}

/// Why a range could not be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TakeError {
    /// The arena is too small.
    #[error(
        "{} more do not fit: {} of this arena's {} are left; make it larger",
        Size(*bytes), Size(*left), Size(*arena)
    )]
    Exhausted {
        /// Asked for.
        bytes: usize,
        /// Left, before alignment.
        left: usize,
        /// In all.
        arena: usize,
    },
    /// One range has less than 4 GiB, as everything a work request describes.
    #[error("{} are too long for one range: take several of less than 4 GiB", Size(*bytes))]
    TooLong {
        /// Asked for.
        bytes: usize,
    },
    /// Not a power of two.
    #[error("{align} is no alignment: it must be a power of two")]
    Alignment {
        /// Asked for.
        align: usize,
    },
}

#[cfg(test)]
mod tests {
    use super::{Arena, ArenaError, HugePages, Lock, TakeError};
    use o2poll_dataplane::memory::{Buffer, Range};
    use o2poll_dataplane::nic::LKey;
    use std::path::{Path, PathBuf};

    fn plain(bytes: usize) -> Arena {
        Arena::new(bytes, HugePages::Off, Lock::Off).unwrap().0
    }

    /// A file of this test, gone when the test is.
    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str, content: &[u8]) -> Self {
            let path = std::env::temp_dir().join(format!("o2poll-{}-{name}", std::process::id()));
            std::fs::write(&path, content).unwrap();
            Self(path)
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.0);
        }
    }

    #[test]
    fn ranges_are_aligned_disjoint_zeroed_and_inside() {
        let arena = plain(1 << 20);
        let (first, last) = (
            arena.base().as_ptr() as u64,
            arena.base().as_ptr() as u64 + arena.len() as u64,
        );
        let mut end = first;
        let mut taken: Vec<Range<'_>> = Vec::new();
        for (bytes, align) in [
            (1, 1),
            (100, 64),
            (4096, 4096),
            (0, 1),
            (70_000, 65_536),
            (3, 2),
        ] {
            let range = arena.take(bytes, align, LKey(5)).unwrap();
            let sge = range.sge();
            assert_eq!(sge.address % align as u64, 0);
            assert_eq!((sge.length as usize, sge.lkey), (bytes, LKey(5)));
            assert!(sge.address >= end && sge.address + sge.length as u64 <= last);
            assert!(range.bytes().iter().all(|byte| *byte == 0));
            end = sge.address + sge.length as u64;
            taken.push(range);
        }
        for (mark, range) in (1..).zip(&mut taken) {
            range.bytes_mut().fill(mark);
        }
        for (mark, range) in (1..).zip(&taken) {
            assert!(range.bytes().iter().all(|byte| *byte == mark));
        }
    }

    #[test]
    fn what_does_not_fit_takes_nothing() {
        let arena = plain(8192);
        let whole = arena.len();
        assert!(matches!(
            arena.take(whole + 1, 1, LKey(0)),
            Err(TakeError::Exhausted { .. })
        ));
        assert_eq!(arena.left(), whole);
        let range = arena.take(whole, 4096, LKey(0)).unwrap();
        assert_eq!(range.sge().length as usize, whole);
        let full = arena.take(1, 1, LKey(0)).unwrap_err();
        assert_eq!(
            full.to_string(),
            "1 B more do not fit: 0 B of this arena's 8 KiB are left; make it larger"
        );
        assert!(arena.take(0, 1, LKey(0)).is_ok());
    }

    #[test]
    fn bad_alignments_and_lengths_are_told_apart() {
        let arena = plain(4096);
        for align in [0, 3, 4097] {
            assert_eq!(
                arena.take(1, align, LKey(0)).unwrap_err(),
                TakeError::Alignment { align }
            );
        }
        assert_eq!(
            arena.take(1 << 32, 1, LKey(0)).unwrap_err(),
            TakeError::TooLong { bytes: 1 << 32 }
        );
        assert!(matches!(
            arena.take(1, 1 << 63, LKey(0)),
            Err(TakeError::Exhausted { .. })
        ));
    }

    #[test]
    fn threads_never_share_a_byte() {
        let arena = plain(1 << 20);
        std::thread::scope(|scope| {
            for mark in 1..=4_u8 {
                let arena = &arena;
                scope.spawn(move || {
                    let mut mine = Vec::new();
                    while let Ok(mut range) = arena.take(1000, 8, LKey(0)) {
                        range.bytes_mut().fill(mark);
                        mine.push(range);
                    }
                    for range in mine {
                        assert!(range.bytes().iter().all(|byte| *byte == mark));
                    }
                });
            }
        });
        assert!(arena.left() < 1008);
    }

    #[test]
    fn a_page_is_a_message_buffer() {
        let arena = plain(4096);
        let mut buffer = Buffer::new(arena.take(4096, 64, LKey(1)).unwrap()).unwrap();
        buffer.bytes()[4095] = 7;
        assert_eq!(buffer.peek()[4095], 7);
    }

    #[test]
    fn huge_pages_and_lock_are_tried_and_each_refusal_is_one_note() {
        let (arena, notes) = Arena::new(3 << 20, HugePages::Try, Lock::Try).unwrap();
        assert_eq!(arena.len() % 4096, 0);
        assert!(arena.len() >= 3 << 20);
        assert!(arena.has_huge_pages() || !notes.is_empty());
        if !arena.is_locked() {
            assert!(
                notes
                    .iter()
                    .any(|note| note.to_string().contains("ulimit -l"))
            );
        }
        for note in notes {
            assert!(!note.to_string().contains('\n'));
        }
    }

    #[test]
    fn more_than_the_machine_has_is_refused_with_a_remedy() {
        let error = Arena::new(1 << 46, HugePages::Off, Lock::Off).unwrap_err();
        assert!(matches!(error, ArenaError::NoMemory { .. }), "{error}");
        assert!(error.to_string().contains("ask for less"), "{error}");
        let error = Arena::new(1 << 46, HugePages::Require, Lock::Off).unwrap_err();
        assert!(error.to_string().contains("vm.nr_hugepages"), "{error}");
        let error = Arena::new(usize::MAX, HugePages::Try, Lock::Try).unwrap_err();
        assert!(matches!(error, ArenaError::NoMemory { .. }), "{error}");
        assert!(matches!(
            Arena::new(0, HugePages::Off, Lock::Off),
            Err(ArenaError::Empty)
        ));
    }

    #[test]
    fn a_file_is_copied_whole_and_the_copy_is_private() {
        let bytes: Vec<u8> = (0..10_001_u32)
            .map(|n| n.to_le_bytes()[0] ^ n.to_le_bytes()[1])
            .collect();
        let file = Scratch::new("copy", &bytes);
        let (arena, _) = Arena::from_file(&file.0, HugePages::Off, Lock::Off).unwrap();
        assert_eq!(arena.content(), bytes.len());
        let mut front = arena.take(5000, 1, LKey(0)).unwrap();
        let back = arena.take(5001, 1, LKey(0)).unwrap();
        assert_eq!([front.bytes(), back.bytes()].concat(), bytes);
        let tail = arena.take(arena.left(), 1, LKey(0)).unwrap();
        assert!(tail.bytes().iter().all(|byte| *byte == 0));
        front.bytes_mut().fill(0);
        assert_eq!(std::fs::read(&file.0).unwrap(), bytes);
    }

    #[test]
    fn what_is_no_file_to_export_is_named() {
        let load = |path: &Path| {
            Arena::from_file(path, HugePages::Off, Lock::Off)
                .unwrap_err()
                .to_string()
        };
        let empty = Scratch::new("empty", b"");
        assert!(load(&empty.0).contains("is empty"));
        assert!(load(Path::new("/dev/zero")).contains("not a regular file"));
        assert!(load(&std::env::temp_dir()).contains("not a regular file"));
        assert!(load(Path::new("/nonexistent/o2poll")).contains("/nonexistent/o2poll"));
    }

    #[test]
    fn a_file_larger_than_memory_is_refused_before_it_is_read() {
        let file = Scratch::new("sparse", b"");
        let sparse = std::fs::File::options().write(true).open(&file.0).unwrap();
        // Sparse, and larger than any machine's memory; not every file system can.
        if sparse.set_len(1 << 43).is_err() {
            return;
        }
        let error = Arena::from_file(&file.0, HugePages::Off, Lock::Off).unwrap_err();
        assert!(matches!(error, ArenaError::NoMemory { .. }), "{error}");
    }

    #[test]
    fn a_file_that_shrinks_while_it_is_read_is_an_error() {
        let mut arena = plain(4096);
        let mut short: &[u8] = &[1; 99];
        let error = arena.fill(&mut short, 100, Path::new("log")).unwrap_err();
        assert!(
            matches!(error, ArenaError::ShrunkFile { length: 100, .. }),
            "{error}"
        );
        assert_eq!(arena.content(), 0);
    }
}
