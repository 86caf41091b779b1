//! The mapping under an arena: `mmap(2)`, `madvise(2)`, `mlock(2)`, `munmap(2)`.

use core::ptr::{self, NonNull};
use std::io;

use super::limits;
use super::{ArenaError, HugePages, Lock, Note};

/// Anonymous, private, resident memory; unmapped when dropped.
#[derive(Debug)]
pub(super) struct Mapping {
    base: NonNull<u8>,
    length: usize,
    huge: bool,
    locked: bool,
}

// SAFETY: the mapping is plain memory that belongs to the process, not to a thread.
unsafe impl Send for Mapping {}
// SAFETY: through `&Mapping` only its address and length can be read.
unsafe impl Sync for Mapping {}

impl Mapping {
    pub(super) fn new(
        bytes: usize,
        huge: HugePages,
        lock: Lock,
        notes: &mut Vec<Note>,
    ) -> Result<Self, ArenaError> {
        if bytes == 0 {
            return Err(ArenaError::Empty);
        }
        let mut mapping = match huge {
            HugePages::Off => Self::small(bytes, false, notes)?,
            HugePages::Try => match Self::reserved(bytes) {
                Ok(mapping) => mapping,
                Err(note) => {
                    let mapping = Self::small(bytes, true, notes)?;
                    notes.insert(0, note);
                    mapping
                }
            },
            HugePages::Require => Self::reserved(bytes).map_err(ArenaError::Required)?,
        };
        if lock != Lock::Off {
            match mapping.lock() {
                Ok(()) => {}
                Err(note) if lock == Lock::Require => return Err(ArenaError::Required(note)),
                Err(note) => notes.push(note),
            }
        }
        Ok(mapping)
    }

    pub(super) const fn base(&self) -> NonNull<u8> {
        self.base
    }

    pub(super) const fn len(&self) -> usize {
        self.length
    }

    pub(super) const fn has_huge_pages(&self) -> bool {
        self.huge
    }

    pub(super) const fn is_locked(&self) -> bool {
        self.locked
    }

    /// All bytes. The caller owns the mapping alone: no range has been handed out.
    pub(super) const fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: `length` zeroed bytes are mapped at `base`. `&mut self` is the only borrow of the
        // mapping, and ranges, which borrow the arena around it, cannot exist beside it.
        unsafe { core::slice::from_raw_parts_mut(self.base.as_ptr(), self.length) }
    }

    /// From the pool of reserved huge pages, whose memory is set aside and never paged out.
    fn reserved(bytes: usize) -> Result<Self, Note> {
        let pool = limits::huge_pages();
        let page = pool.map_or(HUGE_PAGE, |pool| pool.page);
        let length = bytes.checked_next_multiple_of(page);
        let refused = Note::NoHugePages {
            bytes: length.unwrap_or(bytes),
            page,
            free: pool.map(|pool| pool.free),
            pool: pool.map_or(0, |pool| pool.all),
        };
        let length = length.ok_or(refused)?;
        let base = map(length, libc::MAP_HUGETLB).map_err(|_| refused)?;
        let mapping = Self {
            base,
            length,
            huge: true,
            locked: false,
        };
        // A control group can refuse pages that mmap(2) has promised: better told now than by SIGBUS.
        mapping.populate().map_err(|_| refused)?;
        mapping.keep_from_children();
        Ok(mapping)
    }

    /// In small pages, at a multiple of 2 MiB if the kernel may join them to transparent huge ones.
    fn small(bytes: usize, transparent: bool, notes: &mut Vec<Note>) -> Result<Self, ArenaError> {
        let page = if transparent && bytes >= HUGE_PAGE {
            HUGE_PAGE
        } else {
            small_page()
        };
        // Without this check the kernel grants the mapping and kills a process when it is touched.
        if let Some((available, limit)) = limits::available()
            && bytes > available
        {
            return Err(ArenaError::NoMemory {
                bytes,
                available,
                limit,
            });
        }
        let failed = |source| ArenaError::Map { bytes, source };
        let too_long = || failed(io::ErrorKind::OutOfMemory.into());
        let length = bytes
            .checked_next_multiple_of(small_page())
            .ok_or_else(too_long)?;
        let mapping = Self::aligned(length, page).map_err(failed)?;
        let advised = transparent && page == HUGE_PAGE && mapping.join_pages();
        mapping.populate().map_err(failed)?;
        mapping.keep_from_children();
        if transparent {
            let huge = limits::transparent_huge_bytes(mapping.base.as_ptr().addr()).unwrap_or(0);
            // What does not fill a huge page is small in any case.
            let whole = length - length % HUGE_PAGE;
            if whole != 0 && !advised {
                notes.push(Note::NoTransparentHugePages { bytes: length });
            } else if huge < whole {
                notes.push(Note::FewTransparentHugePages {
                    bytes: length,
                    huge,
                });
            }
        }
        Ok(mapping)
    }

    /// `length` bytes at a multiple of `align`, both whole pages.
    fn aligned(length: usize, align: usize) -> io::Result<Self> {
        let slack = align.saturating_sub(small_page());
        let whole = length
            .checked_add(slack)
            .ok_or(io::ErrorKind::OutOfMemory)?;
        let start = map(whole, 0)?;
        let skip = start.as_ptr().align_offset(align).min(slack);
        // SAFETY: `skip <= slack`, so `skip + length <= whole`: inside the new mapping.
        let base = unsafe { start.add(skip) };
        // SAFETY: as above; one past the end at most.
        let end = unsafe { base.add(length) };
        // SAFETY: the pages before `base` and from `end` on belong to the new mapping, and nobody
        // knows them.
        unsafe {
            unmap(start, skip);
            unmap(end, slack - skip);
        }
        Ok(Self {
            base,
            length,
            huge: false,
            locked: false,
        })
    }

    /// Asks for transparent huge pages; whether the kernel will try.
    fn join_pages(&self) -> bool {
        self.advise(libc::MADV_HUGEPAGE).is_ok() && limits::transparent_huge_pages()
    }

    /// Makes every page resident and writable now.
    fn populate(&self) -> io::Result<()> {
        loop {
            match self.advise(libc::MADV_POPULATE_WRITE) {
                Ok(()) => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // Linux before 5.14 does not know the advice.
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => break,
                Err(error) => return Err(error),
            }
        }
        for offset in (0..self.length).step_by(small_page()) {
            // SAFETY: `offset < length`, so the byte is mapped, and nobody else knows the mapping yet.
            unsafe { self.base.add(offset).write_volatile(0) };
        }
        Ok(())
    }

    /// A child process gets no copy: copy-on-write would move pages away from under the device
    /// (`ibv_fork_init(3)`). The kernel refuses this for no mapping made here.
    fn keep_from_children(&self) {
        let _ = self.advise(libc::MADV_DONTFORK);
    }

    fn advise(&self, advice: libc::c_int) -> io::Result<()> {
        let base = self.base.as_ptr().cast();
        // SAFETY: the range is this mapping, and none of the advices used here drops its content.
        match unsafe { libc::madvise(base, self.length, advice) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    fn lock(&mut self) -> Result<(), Note> {
        // Reserved huge pages are never paged out, and locking them would count against the limit.
        // SAFETY: locking changes no content, and the range is this mapping.
        if self.huge || unsafe { libc::mlock(self.base.as_ptr().cast(), self.length) } == 0 {
            self.locked = true;
            return Ok(());
        }
        let errno = limits::errno();
        let over_limit = matches!(errno, libc::ENOMEM | libc::EPERM);
        Err(Note::NotLocked {
            bytes: self.length,
            wanted: limits::locked().saturating_add(self.length),
            limit: limits::locked_memory().filter(|_| over_limit),
            errno,
        })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and ranges, which borrow the arena around it, are gone.
        unsafe { unmap(self.base, self.length) };
    }
}

fn map(length: usize, flags: libc::c_int) -> io::Result<NonNull<u8>> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | flags;
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping at an address of the kernel's choosing touches nothing that exists.
    let base = unsafe { libc::mmap(ptr::null_mut(), length, access, flags, -1, 0) };
    if base == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    NonNull::new(base.cast()).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
}

/// # Safety
/// Whole pages that are mapped and that nobody will use again; or a length of 0.
unsafe fn unmap(base: NonNull<u8>, length: usize) {
    if length != 0 {
        // SAFETY: by the caller's word.
        unsafe { libc::munmap(base.as_ptr().cast(), length) };
    }
}

fn small_page() -> usize {
    // SAFETY: asks for a constant of the system.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(size).unwrap_or(4096)
}

/// Where `/proc/meminfo` does not say.
const HUGE_PAGE: usize = 2 << 20;

#[cfg(test)]
mod tests {
    use super::{HUGE_PAGE, Mapping, small_page};
    use crate::arena::limits;

    #[test]
    fn the_slack_around_an_aligned_mapping_is_given_back() {
        let page = small_page();
        for length in [page, 5 * page, HUGE_PAGE + page] {
            let mapping = Mapping::aligned(length, HUGE_PAGE).unwrap();
            assert_eq!(mapping.base().as_ptr().addr() % HUGE_PAGE, 0);
            assert_eq!(mapping.len(), length);
        }
    }

    #[test]
    fn every_page_is_resident_from_the_start() {
        let mut notes = Vec::new();
        let mapping = Mapping::small(64 * small_page(), false, &mut notes).unwrap();
        let mut resident = [0_u8; 64];
        let base = mapping.base().as_ptr().cast();
        // SAFETY: the range is the mapping, and `resident` has one byte for each of its pages.
        let answer = unsafe { libc::mincore(base, mapping.len(), resident.as_mut_ptr()) };
        assert_eq!(answer, 0);
        assert!(resident.iter().all(|page| page & 1 == 1));
        assert!(limits::transparent_huge_bytes(mapping.base().as_ptr().addr()).is_some());
    }
}
