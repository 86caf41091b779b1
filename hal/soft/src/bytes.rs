//! The only room that touches memory: registered ranges, checked pieces of them, and the copy.
//!
//! A [`Span`] comes out of [`Memory::span`], after the check, or out of another span. So whoever holds
//! one may copy through it; no other way leads from a number to a byte.
#![allow(unsafe_code)]

use core::ptr::{self, NonNull};

use o2poll_dataplane::memory::{Copier, Range};
use o2poll_dataplane::nic::{Rights, Sge};

/// A range of memory that the device may touch: what `ibv_reg_mr` makes. A copy is for the device of another core of
/// the same node.
#[derive(Clone, Debug)]
pub struct Memory {
    address: u64,
    length: u64,
    pd: u32,
    rights: Rights,
}

impl Memory {
    /// `length` bytes at `base` in protection domain `pd`, which the device may read and write for
    /// its own side, and no peer by this alone.
    ///
    /// # Safety
    /// * The bytes are initialised and valid for reads and writes until every device that can reach
    ///   this one over its [`Wire`](crate::Wire) has been dropped, packets under way included.
    /// * While a work request or a live key covers a byte, other cores' devices may read it, and write it
    ///   where the request or the key says so. Nobody holds a reference to it that this would break.
    #[must_use]
    pub unsafe fn new(base: NonNull<u8>, length: usize, pd: u32) -> Self {
        Self {
            address: base.as_ptr().expose_provenance() as u64,
            length: length as u64,
            pd,
            rights: Rights::LOCAL_WRITE,
        }
    }

    /// A range that is lent for ever, in protection domain `pd`. Who owns the range owns its bytes, and lends
    /// them to the device with each work request, so that [`new`](Self::new)'s contract is kept.
    #[must_use]
    pub fn of_range(range: &Range<'static>, pd: u32) -> Self {
        let sge = range.sge();
        Self {
            address: sge.address,
            length: u64::from(sge.length),
            pd,
            rights: Rights::LOCAL_WRITE,
        }
    }

    /// The same memory with other rights. With a remote right its local key is a remote key too: what
    /// `exposure = "arena"` asks for. Without [`Rights::LOCAL_WRITE`] nothing writes into it.
    #[must_use]
    pub const fn with_rights(self, rights: Rights) -> Self {
        Self { rights, ..self }
    }

    pub(crate) const fn pd(&self) -> u32 {
        self.pd
    }

    pub(crate) const fn rights(&self) -> Rights {
        self.rights
    }

    /// The piece, if all of it lies inside.
    #[inline]
    pub(crate) fn span(&self, address: u64, length: u32) -> Option<Span> {
        // An address below the base wraps to an offset beyond any memory's length.
        let offset = address.wrapping_sub(self.address);
        let left = self.length.checked_sub(offset)?;
        (u64::from(length) <= left).then_some(Span { address, length })
    }

    /// The piece, if there is something in it and all of it lies inside, and the address behind it. Its local key is
    /// not looked at.
    #[inline(always)]
    pub(crate) fn piece(&self, piece: Sge) -> Option<(Span, u64)> {
        let Sge {
            address, length, ..
        } = piece;
        let end = address.wrapping_add(u64::from(length));
        let limit = self.address.wrapping_add(self.length);
        // An empty piece, and one that wraps, does not end behind its start.
        (address >= self.address && address < end && end <= limit)
            .then_some((Span { address, length }, end))
    }
}

/// A piece of registered memory, of this device or of the one that sent the packet it is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    address: u64,
    length: u32,
}

impl Span {
    /// Nothing.
    pub(crate) const EMPTY: Self = Self {
        address: 0,
        length: 0,
    };

    /// Back from the words of a packet. Only for words that [`address`](Self::address) and
    /// [`length`](Self::length) of one span gave: rings are made in pairs of devices, and their ends are
    /// private, so nothing else is ever in them.
    pub(crate) const fn of_packet(address: u64, length: u32) -> Self {
        Self { address, length }
    }

    /// Where it begins.
    #[must_use]
    pub const fn address(self) -> u64 {
        self.address
    }

    /// Bytes.
    #[must_use]
    pub const fn length(self) -> u32 {
        self.length
    }

    /// The first `at` bytes, or all, and the rest.
    pub(crate) fn cut(self, at: u32) -> (Self, Self) {
        let at = at.min(self.length);
        (
            Self { length: at, ..self },
            Self {
                address: self.address.wrapping_add(u64::from(at)),
                length: self.length.wrapping_sub(at),
            },
        )
    }

    /// Fetches the first lines, for a copy that comes soon.
    #[inline]
    pub(crate) fn prefetch(self) {
        #[cfg(target_arch = "x86_64")]
        {
            use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            let mut at = self.pointer().cast_const().cast::<i8>();
            let fetch = |line: *const i8| {
                // SAFETY: SSE belongs to every x86-64; a prefetch never faults and changes nothing.
                unsafe { _mm_prefetch::<_MM_HINT_T0>(line) }
            };
            let lines = self.length.min(PREFETCH).div_ceil(64);
            for _ in 0..lines >> 3 {
                for line in 0..8_usize {
                    fetch(at.wrapping_add(line.wrapping_mul(64)));
                }
                at = at.wrapping_add(512);
            }
            for _ in 0..lines & 7 {
                fetch(at);
                at = at.wrapping_add(64);
            }
        }
    }

    fn pointer(self) -> *mut u8 {
        #[expect(
            clippy::cast_possible_truncation,
            reason = "came from a pointer in `Memory::new`"
        )]
        ptr::with_exposed_provenance_mut(self.address as usize)
    }
}

/// A piece of a key's address space: a span, and where in the key it begins.
#[derive(Clone, Copy, Debug, Default)]
pub struct Fragment {
    address: u64,
    length: u32,
    start: u32,
}

static_assertions::const_assert_eq!(size_of::<Fragment>(), 16);

impl Fragment {
    /// A span, `start` bytes into the key. A list of 2^32 bytes or more is never used.
    #[expect(clippy::cast_possible_truncation, reason = "as said")]
    pub(crate) const fn new(span: Span, start: u64) -> Self {
        Self {
            address: span.address,
            length: span.length,
            start: start as u32,
        }
    }

    /// So many bytes that follow belong to it.
    pub(crate) const fn grow(&mut self, length: u32) {
        self.length = self.length.wrapping_add(length);
    }

    pub(crate) const fn span(self) -> Span {
        Span {
            address: self.address,
            length: self.length,
        }
    }

    /// Offset in the key of the first byte.
    pub(crate) const fn start(self) -> u32 {
        self.start
    }

    /// Offset behind the last.
    pub(crate) const fn end(self) -> u32 {
        self.start.wrapping_add(self.length)
    }
}

/// Spans one after another.
pub(crate) trait Pieces {
    /// The next bytes, at most `most`; `None` at the end. Never empty.
    fn next(&mut self, most: u32) -> Option<Span>;

    /// Leaves out the next `count` bytes.
    fn skip(&mut self, mut count: u32) {
        while count != 0 {
            let Some(span) = self.next(count) else { return };
            count = count.wrapping_sub(span.length);
        }
    }
}

/// The (up to) two spans of a packet.
pub(crate) struct Pair(pub(crate) Span, pub(crate) Span);

impl Pieces for Pair {
    fn next(&mut self, most: u32) -> Option<Span> {
        if self.0.length == 0 {
            self.0 = core::mem::replace(&mut self.1, Span::EMPTY);
        }
        let (taken, rest) = self.0.cut(most);
        self.0 = rest;
        (taken.length != 0).then_some(taken)
    }
}

/// Copies at most `most` bytes, as many as both sides have; how many.
pub(crate) fn run(copier: Copier, to: &mut impl Pieces, from: &mut impl Pieces, most: u32) -> u32 {
    let mut copied = 0_u32;
    while copied < most {
        let Some(mut source) = from.next(most.wrapping_sub(copied)) else {
            return copied;
        };
        while source.length != 0 {
            let Some(sink) = to.next(source.length) else {
                return copied;
            };
            let (now, rest) = source.cut(sink.length);
            // SAFETY: both spans were checked against a `Memory` whose contract makes them valid for as
            // long as a device can hold them, and have the same length. They may overlap.
            unsafe { copier.copy(sink.pointer(), now.pointer(), now.length as usize) };
            copied = copied.wrapping_add(now.length);
            source = rest;
        }
    }
    copied
}

/// Copies as much as both spans have, of one message or so.
#[inline]
pub(crate) fn move_whole(copier: Copier, to: Span, from: Span) {
    let length = from.length.min(to.length) as usize;
    // SAFETY: as in `run`: both spans were checked and have `length` bytes. They may overlap.
    unsafe { copier.copy(to.pointer(), from.pointer(), length) };
}

/// Copies out of checked memory, as much as both sides have; how much.
pub(crate) fn read_out(from: &mut impl Pieces, to: &mut [u8]) -> usize {
    let mut rest = to;
    let mut copied = 0_usize;
    while let Ok(most @ 1..) = u32::try_from(rest.len()) {
        let Some(span) = from.next(most) else { break };
        let Some((now, after)) = rest.split_at_mut_checked(span.length as usize) else {
            break;
        };
        // SAFETY: the span was checked against a `Memory` whose contract makes it valid to read for as long
        // as a device can hold it; `now` is as long, and nobody else's.
        unsafe { ptr::copy(span.pointer(), now.as_mut_ptr(), now.len()) };
        copied = copied.wrapping_add(now.len());
        rest = after;
    }
    copied
}

/// Asks for the first lines of a message buffer that another core has read, to be written again soon.
#[inline]
pub(crate) fn prefetch_to_write(address: u64, length: u32) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        let lines = u64::from(length.min(MESSAGE).div_ceil(64));
        for line in 0..lines {
            let at = address.wrapping_add(line.wrapping_mul(64));
            // SAFETY: a prefetch never faults and changes nothing, whatever the address; a processor without this
            // one does nothing.
            unsafe {
                core::arch::asm!("prefetchw [{}]", in(reg) at, options(nostack, preserves_flags));
            }
        }
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = (address, length);
}

/// Bytes that [`prefetch_to_write`] asks for at most.
#[cfg(all(target_arch = "x86_64", not(miri)))]
const MESSAGE: u32 = 256;

/// Bytes that [`Span::prefetch`] asks for: as many lines as a core waits for at a time, about.
#[cfg(target_arch = "x86_64")]
const PREFETCH: u32 = 2048;

#[cfg(test)]
mod tests {
    use super::{Copier, Memory, Pair, Pieces, Span, run};
    use core::ptr::NonNull;

    fn memory(bytes: &mut [u8]) -> Memory {
        let length = bytes.len();
        // SAFETY: the tests keep the array longer than every span of it.
        unsafe { Memory::new(NonNull::new(bytes.as_mut_ptr()).unwrap(), length, 0) }
    }

    #[test]
    fn a_span_ends_where_its_memory_ends() {
        let mut bytes = [0; 16];
        let memory = memory(&mut bytes);
        let base = memory.address;
        assert!(memory.span(base, 16).is_some());
        assert!(memory.span(base + 16, 0).is_some());
        assert!(memory.span(base, 17).is_none());
        assert!(memory.span(base + 1, 16).is_none());
        assert!(memory.span(base - 1, 1).is_none());
        assert!(memory.span(u64::MAX, 2).is_none());
    }

    #[test]
    fn pieces_of_unequal_length_meet() {
        let mut bytes = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];
        let memory = memory(&mut bytes);
        let at = |offset: u64, length| memory.span(memory.address + offset, length).unwrap();
        let mut from = Pair(at(0, 3), at(4, 3));
        let mut to = Pair(at(8, 1), at(10, 5));
        from.skip(1);
        assert_eq!(run(Copier::default(), &mut to, &mut from, 100), 5);
        assert!(from.next(1).is_none());
        assert_eq!(to.next(9).map(Span::length), Some(1));
        assert_eq!(bytes[8..], [1, 9, 2, 4, 5, 6, 14, 15]);
    }
}
