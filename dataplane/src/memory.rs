//! Memory the device reads or writes: ranges, page lists, message buffers.
//!
//! Everything here is linear: a [`Range`], a [`PageList`] and a [`Buffer`] move by value through
//! submissions and events, and who does not hold one cannot reach its bytes. So there is no
//! `&mut [u8]` to memory that is posted, and no lookup that could free something twice.
#![allow(unsafe_code)]

use core::marker::PhantomData;
use core::ptr::{self, NonNull};

use crate::nic::{LKey, RKey, Sge};

mod shares;

pub use shares::Shares;

/// Bytes of a message buffer, on both sides of every o2iblnd connection (`4 << 10`).
pub const MESSAGE_BYTES: usize = 4096;

/// Most fragments of one transfer: 1 MiB at any byte offset is 257 pages (LU-15092).
pub const MAX_FRAGMENTS: usize = 257;

/// A piece of registered memory, owned.
#[derive(Debug)]
pub struct Range<'a> {
    piece: Sge,
    exposed: Option<RKey>,
    owned: PhantomData<&'a mut [u8]>,
}

impl<'a> Range<'a> {
    /// Memory that the device knows by `lkey`. `None` for a length that no descriptor can say (2^32
    /// bytes or more).
    ///
    /// # Safety
    /// `base` points to `length` bytes that are valid, initialised, and reached through nothing else for
    /// `'a`, except by the device that knows them by `lkey`.
    #[must_use]
    pub unsafe fn new(base: NonNull<u8>, length: usize, lkey: LKey) -> Option<Self> {
        Some(Self {
            piece: Sge {
                address: base.as_ptr().expose_provenance() as u64,
                length: u32::try_from(length).ok()?,
                lkey,
            },
            exposed: None,
            owned: PhantomData,
        })
    }

    /// A slice of bytes as a range, under `lkey`. `None` for 2^32 bytes or more.
    #[must_use]
    pub fn of_bytes(bytes: &'a mut [u8], lkey: LKey) -> Option<Self> {
        let length = bytes.len();
        let base = NonNull::from(bytes).cast::<u8>();
        // SAFETY: the exclusive borrow lasts for `'a`. Whether `lkey` covers it decides what a device
        // makes of it, not whether these bytes are valid.
        unsafe { Self::new(base, length, lkey) }
    }

    /// Address, length and local key.
    #[must_use]
    pub const fn sge(&self) -> Sge {
        self.piece
    }

    /// The same bytes under another local key, e.g. once a device has registered them.
    #[must_use]
    pub const fn under(self, lkey: LKey) -> Self {
        Self {
            piece: Sge { lkey, ..self.piece },
            exposed: self.exposed,
            owned: self.owned,
        }
    }

    /// The same bytes, which a device also lets peers write under `key`, for as long as it runs:
    /// `exposure = "arena"`.
    #[must_use]
    pub const fn exposed(self, key: RKey) -> Self {
        Self {
            piece: self.piece,
            exposed: Some(key),
            owned: self.owned,
        }
    }

    /// The long-lived remote key that covers it, if there is one.
    #[must_use]
    pub const fn exposure(&self) -> Option<RKey> {
        self.exposed
    }

    /// The bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: by the contract of `new` the range is valid, and nobody writes it while it is owned here
        // and not inside a submission.
        unsafe { bytes(self.piece) }
    }

    /// The bytes, to change.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`; `&mut self` makes it the only way in.
        unsafe { bytes_mut(self.piece) }
    }

    /// Gives up the way to the bytes, so that entries of several cores can lie over them.
    #[must_use]
    pub const fn share(self) -> SharedRange<'a> {
        SharedRange {
            piece: self.piece,
            exposed: self.exposed,
            owned: self.owned,
        }
    }

    /// The first `at` bytes, and the rest.
    ///
    /// # Errors
    /// The range itself, when it has fewer than `at` bytes.
    pub fn split_at(self, at: u32) -> Result<(Self, Self), Self> {
        let Some(rest) = self.piece.length.checked_sub(at) else {
            return Err(self);
        };
        let Some(address) = self.piece.address.checked_add(u64::from(at)) else {
            return Err(self);
        };
        let (lkey, exposed) = (self.piece.lkey, self.exposed);
        Ok((
            Self {
                piece: Sge {
                    length: at,
                    ..self.piece
                },
                exposed,
                owned: PhantomData,
            },
            Self {
                piece: Sge {
                    address,
                    length: rest,
                    lkey,
                },
                exposed,
                owned: PhantomData,
            },
        ))
    }
}

/// A piece of registered memory that several cores of a node export: devices and pollers copy in and out of it, and
/// nobody has a reference to its bytes. What peers write to one place at a time is in their own hands, as on a card.
#[derive(Clone, Debug)]
pub struct SharedRange<'a> {
    piece: Sge,
    exposed: Option<RKey>,
    owned: PhantomData<&'a mut [u8]>,
}

/// Who else has the ranges of a list.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Sharing {
    #[default]
    None,
    /// Other lists, for as long as they are.
    ForGood,
    /// A list that is put by in a [`Shares`]: where that list is.
    Of(usize),
}

/// A list of ranges, in the order of the bytes: what one PUT or GET moves, or what a portal exports.
#[derive(Debug, Default)]
pub struct PageList<'a> {
    pieces: heapless::Vec<Sge, MAX_FRAGMENTS>,
    length: u64,
    shape: Shape,
    /// A range has gone out since the list was empty: nobody knows what the shape is without it.
    reshaped: bool,
    /// The remote key of all its ranges, if it is the same.
    exposed: Option<RKey>,
    /// Where anything of it is shared there is no way to the bytes but by copying.
    sharing: Sharing,
    generation: u32,
    owned: PhantomData<&'a mut [u8]>,
}

impl<'a> PageList<'a> {
    /// An empty list.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            pieces: heapless::Vec::new(),
            length: 0,
            shape: Shape::NONE,
            reshaped: false,
            exposed: None,
            sharing: Sharing::None,
            generation: 0,
            owned: PhantomData,
        }
    }

    /// Appends a range that other lists may have too. From then on the list gives no reference to any of its bytes, and
    /// no range back.
    ///
    /// # Errors
    /// The range, when the list holds [`MAX_FRAGMENTS`] already, or is one of [`Shares`].
    pub fn push_shared(&mut self, range: SharedRange<'a>) -> Result<(), SharedRange<'a>> {
        let owned = Range {
            piece: range.piece,
            exposed: range.exposed,
            owned: PhantomData,
        };
        self.push(owned).map_err(Range::share)?;
        self.sharing = Sharing::ForGood;
        Ok(())
    }

    /// Appends a range. Empty ranges are legal and dropped.
    ///
    /// # Errors
    /// The range, when the list holds [`MAX_FRAGMENTS`] already, or is one of [`Shares`].
    pub fn push(&mut self, range: Range<'a>) -> Result<(), Range<'a>> {
        if matches!(self.sharing, Sharing::Of(_)) {
            return Err(range);
        }
        if range.piece.length == 0 {
            return Ok(());
        }
        let length = u64::from(range.piece.length);
        let is_first = self.pieces.is_empty();
        match self.pieces.push(range.piece) {
            Ok(()) => {
                if is_first {
                    self.exposed = range.exposed;
                } else if self.exposed != range.exposed {
                    self.exposed = None;
                }
                self.length = self.length.saturating_add(length);
                self.shape.add(range.piece);
                self.generation = self.generation.wrapping_add(1);
                Ok(())
            }
            Err(_) => Err(range),
        }
    }

    /// Takes the last range out; none of a list with shared ones.
    pub fn pop(&mut self) -> Option<Range<'a>> {
        if self.sharing != Sharing::None {
            return None;
        }
        let piece = self.pieces.pop()?;
        self.length = self.length.saturating_sub(u64::from(piece.length));
        self.reshaped = !self.pieces.is_empty();
        if !self.reshaped {
            self.shape = Shape::NONE;
        }
        self.generation = self.generation.wrapping_add(1);
        Some(Range {
            piece,
            exposed: self.exposed,
            owned: PhantomData,
        })
    }

    /// The long-lived remote key over all of it, if there is one: a list whose ranges are exposed under different
    /// keys is not exposed.
    #[must_use]
    pub const fn exposed(&self) -> Option<RKey> {
        self.exposed
    }

    /// Bytes in all.
    #[must_use]
    pub const fn length(&self) -> u64 {
        self.length
    }

    /// How often ranges have come in or gone out, modulo 2^32: with the place of the list it tells whether memory is
    /// still with the owner that it was mapped for.
    #[must_use]
    pub const fn generation(&self) -> u32 {
        self.generation
    }

    /// The ranges as the device sees them.
    #[must_use]
    pub fn pieces(&self) -> &[Sge] {
        &self.pieces
    }

    /// The shape of bytes `[offset, offset + length)`. That of all of them is known as ranges come in.
    #[inline]
    pub(crate) fn shape(&self, offset: u64, length: u32) -> Shape {
        if self.is_whole(offset, length) && !self.reshaped {
            return self.shape;
        }
        self.shape_of_part(offset, length)
    }

    #[inline(never)]
    fn shape_of_part(&self, offset: u64, length: u32) -> Shape {
        Shape::of(self.slice(offset, length))
    }

    /// Whether these are all of its bytes.
    #[inline]
    pub(crate) fn is_whole(&self, offset: u64, length: u32) -> bool {
        offset == 0 && u64::from(length) == self.length
    }

    /// The bytes of each range in turn; none of a list with shared ranges.
    pub fn chunks(&self) -> impl Iterator<Item = &[u8]> {
        self.owned_pieces().iter().map(|piece| {
            // SAFETY: each piece came in as an owned `Range`, and the list is not inside a submission
            // while somebody holds `&self`.
            unsafe { bytes(*piece) }
        })
    }

    /// The bytes of each range in turn, to change; none of a list with shared ranges.
    pub fn chunks_mut(&mut self) -> impl Iterator<Item = &mut [u8]> {
        self.owned_pieces().iter().map(|piece| {
            // SAFETY: as in `chunks`; ranges do not overlap, since each was owned.
            unsafe { bytes_mut(*piece) }
        })
    }

    /// The ranges, if all of them are this list's alone.
    fn owned_pieces(&self) -> &[Sge] {
        match self.sharing {
            Sharing::None => &self.pieces,
            _ => &[],
        }
    }

    /// The pieces of bytes `[offset, offset + length)`, in order. Shorter where the list ends.
    #[inline]
    pub fn slice(&self, offset: u64, length: u32) -> impl Iterator<Item = Sge> + '_ {
        let mut pieces = self.pieces.iter();
        let (mut skip, mut left) = (offset, length);
        core::iter::from_fn(move || {
            while left != 0 {
                let piece = pieces.next()?;
                let Some(from) = u32::try_from(skip).ok().filter(|from| *from < piece.length)
                else {
                    skip = skip.saturating_sub(u64::from(piece.length));
                    continue;
                };
                let take = piece.length.wrapping_sub(from).min(left);
                (skip, left) = (0, left.wrapping_sub(take));
                return Some(Sge {
                    address: piece.address.wrapping_add(u64::from(from)),
                    length: take,
                    lkey: piece.lkey,
                });
            }
            None
        })
    }

    /// The piece that is bytes `[offset, offset + length)`, where the list is but one range, as most are.
    #[inline]
    fn only(&self, offset: u64, length: usize) -> Option<Sge> {
        let [range] = self.pieces.as_slice() else {
            return None;
        };
        let length = u32::try_from(length).ok()?;
        let end = offset.checked_add(u64::from(length))?;
        (end <= u64::from(range.length)).then_some(Sge {
            address: range.address.wrapping_add(offset),
            length,
            lkey: range.lkey,
        })
    }

    /// Copies `from` into the list at `offset`; how many bytes found room.
    ///
    /// For the data plane's own use on lists it holds: the small payloads that ride in a message.
    pub fn write_at(&mut self, offset: u64, from: &[u8]) -> usize {
        let write = |piece: Sge, from: &[u8]| {
            let to = ptr::with_exposed_provenance_mut::<u8>(address(piece));
            // SAFETY: both callers give a piece of a range this list owns or shares, as long as `from`; both are valid for as
            // long as the list is. `&mut self` keeps references out, and of a shared range nobody has one. The device
            // writes into it only under a key that the poller granted and saw die.
            unsafe { ptr::copy(from.as_ptr(), to, from.len()) };
        };
        if let Some(piece) = self.only(offset, from.len()) {
            write(piece, from);
            return from.len();
        }
        let length = u32::try_from(from.len()).unwrap_or(u32::MAX);
        let mut rest = from;
        let mut copied = 0_usize;
        for piece in self.slice(offset, length) {
            let Some((head, tail)) = rest.split_at_checked(piece.length as usize) else {
                break;
            };
            write(piece, head);
            copied = copied.saturating_add(head.len());
            rest = tail;
        }
        copied
    }

    /// Copies `length` bytes at `at` of a range that a device has written into the list at `offset`; how many there
    /// were, and found room.
    pub fn copy_in(
        &mut self,
        offset: u64,
        from: &Range<'_>,
        at: u32,
        length: u32,
        copier: Copier,
    ) -> u32 {
        let length = length.min(from.piece.length.saturating_sub(at));
        let mut copied = 0_u32;
        for piece in self.slice(offset, length) {
            let source = Sge {
                address: from
                    .piece
                    .address
                    .wrapping_add(u64::from(at.wrapping_add(copied))),
                ..piece
            };
            let to = ptr::with_exposed_provenance_mut::<u8>(address(piece));
            let from = ptr::with_exposed_provenance::<u8>(address(source));
            // SAFETY: `piece` is a part of a range this list owns or shares: `&mut self` keeps references out, and of a
            // shared range nobody has one. The source begins `at + copied` bytes into the other range, and `at + copied + piece.length` is at most its length, since
            // the pieces of the slice are `length` bytes together. Both were exposed by `Range::new`.
            unsafe { copier.copy(to, from, piece.length as usize) };
            copied = copied.wrapping_add(piece.length);
        }
        copied
    }

    /// Copies bytes at `offset` out of the list; how many there were.
    pub fn read_at(&self, offset: u64, to: &mut [u8]) -> usize {
        let read = |piece: Sge, to: &mut [u8]| {
            let from = ptr::with_exposed_provenance::<u8>(address(piece));
            // SAFETY: both callers give a piece of a range this list owns or shares, as long as `to`, both valid for as long
            // as the list is. Nobody in this core writes to it. Other cores may, where it is shared, as a device may
            // under a live key: then what is read is theirs to say, and nothing here depends on it.
            unsafe { ptr::copy(from, to.as_mut_ptr(), to.len()) };
        };
        if let Some(piece) = self.only(offset, to.len()) {
            read(piece, to);
            return to.len();
        }
        let length = u32::try_from(to.len()).unwrap_or(u32::MAX);
        let mut rest = to;
        let mut copied = 0_usize;
        for piece in self.slice(offset, length) {
            let Some((head, tail)) = rest.split_at_mut_checked(piece.length as usize) else {
                break;
            };
            read(piece, head);
            copied = copied.saturating_add(head.len());
            rest = tail;
        }
        copied
    }
}

/// What of a run of ranges decides which keys can lie over it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Shape {
    /// Ranges, those that touch under one local key counted as one.
    fragments: usize,
    /// Address of the first byte.
    first: u64,
    /// Address behind the last.
    end: u64,
    last: LKey,
    /// On both sides of each hole, the address: all of them or'ed.
    holes: u64,
}

impl Shape {
    /// Of nothing.
    const NONE: Self = Self {
        fragments: 0,
        first: 0,
        end: 0,
        last: LKey(0),
        holes: 0,
    };

    /// Of these ranges, none of which is empty.
    pub(crate) fn of(pieces: impl Iterator<Item = Sge>) -> Self {
        let mut shape = Self::NONE;
        for piece in pieces {
            shape.add(piece);
        }
        shape
    }

    /// One range more, not an empty one.
    #[inline]
    fn add(&mut self, piece: Sge) {
        let touches = self.end == piece.address;
        if self.fragments == 0 {
            self.first = piece.address;
        } else if !touches {
            self.holes |= self.end | piece.address;
        }
        if self.fragments == 0 || !touches || self.last != piece.lkey {
            self.fragments = self.fragments.wrapping_add(1);
        }
        self.last = piece.lkey;
        self.end = piece.address.wrapping_add(u64::from(piece.length));
    }

    /// Ranges, those that touch under one local key counted as one.
    pub(crate) const fn fragments(self) -> usize {
        self.fragments
    }

    /// Pages of `1 << shift` bytes that `length` bytes of this shape take, if only the first begins and only the last
    /// ends within one (LU-11064, LU-20399).
    pub(crate) fn pages(self, shift: u8, length: u32) -> Option<usize> {
        let within = 1_u64.checked_shl(u32::from(shift))?.wrapping_sub(1);
        if self.holes & within != 0 || self.fragments == 0 {
            return None;
        }
        let bytes = (self.first & within).checked_add(u64::from(length))?;
        usize::try_from(bytes.checked_add(within)? >> shift).ok()
    }
}

/// A message buffer that we hold.
#[derive(Debug)]
pub struct Buffer<'a> {
    piece: Sge,
    owned: PhantomData<&'a mut [u8]>,
}

impl<'a> Buffer<'a> {
    /// The first [`MESSAGE_BYTES`] of a range.
    ///
    /// # Errors
    /// The range, when it is shorter.
    pub fn new(range: Range<'a>) -> Result<Self, Range<'a>> {
        if (range.piece.length as usize) < MESSAGE_BYTES {
            return Err(range);
        }
        Ok(Self {
            piece: range.piece,
            owned: PhantomData,
        })
    }

    /// The bytes.
    pub fn bytes(&mut self) -> &mut [u8; MESSAGE_BYTES] {
        let base = ptr::with_exposed_provenance_mut::<[u8; MESSAGE_BYTES]>(address(self.piece));
        // SAFETY: at least `MESSAGE_BYTES` owned bytes by `new`; a posted buffer is a `Posted`, not this.
        unsafe { &mut *base }
    }

    /// The bytes, to read.
    #[must_use]
    pub fn peek(&self) -> &[u8; MESSAGE_BYTES] {
        let base = ptr::with_exposed_provenance::<[u8; MESSAGE_BYTES]>(address(self.piece));
        // SAFETY: as in `bytes`.
        unsafe { &*base }
    }

    /// `length` bytes at `offset`, for data that rides behind the message in the same buffer.
    #[must_use]
    pub fn sge_at(&self, offset: u32, length: u32) -> Sge {
        let offset = offset.min(4096);
        Sge {
            address: self.piece.address.wrapping_add(u64::from(offset)),
            length: length.min(4096_u32.saturating_sub(offset)),
            lkey: self.piece.lkey,
        }
    }

    /// Gives it to the device.
    #[must_use]
    pub const fn post(self) -> Posted<'a> {
        Posted(self)
    }
}

/// A message buffer that the device holds: no access until it completes.
#[derive(Debug)]
pub struct Posted<'a>(Buffer<'a>);

impl<'a> Posted<'a> {
    /// The first `length` bytes as a piece for a work request; at most the buffer.
    #[must_use]
    pub fn sge(&self, length: u32) -> Sge {
        Sge {
            length: length.min(4096),
            ..self.0.piece
        }
    }

    /// The device is done with it.
    #[must_use]
    pub const fn completed(self) -> Buffer<'a> {
        self.0
    }
}

/// What moves bytes for a device without one of its own; the standard library's copy by default.
#[derive(Clone, Copy, Debug)]
pub struct Copier(unsafe fn(*mut u8, *const u8, usize));

impl Copier {
    /// A copy of the caller's, e.g. with non-temporal stores.
    ///
    /// # Safety
    /// Called with a sink, a source and a length, it does what [`core::ptr::copy`] does, overlapping ranges
    /// included, and its stores are ordered before a later release store of the same thread (`sfence` after
    /// non-temporal ones).
    #[must_use]
    pub const unsafe fn new(copy: unsafe fn(*mut u8, *const u8, usize)) -> Self {
        Self(copy)
    }

    /// Copies `length` bytes; the ranges may overlap.
    ///
    /// # Safety
    /// As for [`core::ptr::copy`] with bytes.
    #[inline]
    pub unsafe fn copy(self, to: *mut u8, from: *const u8, length: usize) {
        // SAFETY: by the caller's word, and by that of who made the copier.
        unsafe { (self.0)(to, from, length) }
    }
}

impl Default for Copier {
    fn default() -> Self {
        Self(move_bytes)
    }
}

/// # Safety
/// As for [`core::ptr::copy`].
unsafe fn move_bytes(to: *mut u8, from: *const u8, length: usize) {
    // SAFETY: by the caller's word.
    unsafe { ptr::copy(from, to, length) }
}

#[expect(clippy::cast_possible_truncation, reason = "came from a pointer")]
const fn address(piece: Sge) -> usize {
    piece.address as usize
}

/// # Safety
/// The piece is a live part of an owned range that nobody writes for the lifetime chosen.
unsafe fn bytes<'b>(piece: Sge) -> &'b [u8] {
    let base = ptr::with_exposed_provenance::<u8>(address(piece));
    // SAFETY: by the caller's word; the provenance was exposed by `Range::new`.
    unsafe { core::slice::from_raw_parts(base, piece.length as usize) }
}

/// # Safety
/// The piece is a live part of an owned range that nobody else touches for the lifetime chosen.
unsafe fn bytes_mut<'b>(piece: Sge) -> &'b mut [u8] {
    let base = ptr::with_exposed_provenance_mut::<u8>(address(piece));
    // SAFETY: by the caller's word; the provenance was exposed by `Range::new`.
    unsafe { core::slice::from_raw_parts_mut(base, piece.length as usize) }
}

#[cfg(test)]
mod tests {
    use super::{Buffer, Copier, LKey, PageList, RKey, Range};

    #[test]
    fn a_shared_range_is_copied_through_and_never_lent_or_given_back() {
        let mut memory = [0; 8];
        let shared = Range::of_bytes(&mut memory, LKey(1)).unwrap().share();
        let (mut one, mut other) = (PageList::new(), PageList::new());
        one.push_shared(shared.clone()).unwrap();
        other.push_shared(shared).unwrap();
        assert_eq!(one.write_at(2, &[7, 8]), 2);
        let mut found = [0; 4];
        assert_eq!(other.read_at(1, &mut found), 4);
        assert_eq!(found, [0, 7, 8, 0]);
        assert_eq!(one.pieces(), other.pieces());
        for list in [&mut one, &mut other] {
            assert_eq!(list.length(), 8);
            assert!(list.pop().is_none());
            assert_eq!(list.chunks().count() + list.chunks_mut().count(), 0);
        }
    }

    fn range(bytes: &mut [u8]) -> Range<'_> {
        Range::of_bytes(bytes, LKey(7)).unwrap()
    }

    #[test]
    fn lu_9983_lists_read_and_write_across_holes() {
        let mut backing = [0_u8; 64];
        let (left, right) = range(&mut backing).split_at(10).unwrap();
        let (_hole, right) = right.split_at(5).unwrap();
        let mut list = PageList::new();
        list.push(left).unwrap();
        list.push(right).unwrap();
        assert_eq!(list.length(), 59);
        assert_eq!(list.write_at(8, &[1, 2, 3, 4]), 4);
        let mut back = [0; 4];
        assert_eq!(list.read_at(8, &mut back), 4);
        assert_eq!(back, [1, 2, 3, 4]);
        assert_eq!(list.read_at(57, &mut back), 2);
        let slice: heapless::Vec<_, 4> = list.slice(8, 4).collect();
        assert_eq!((slice[0].length, slice[1].length), (2, 2));
        assert_eq!(list.pop().unwrap().sge().length, 49);
        assert_eq!(list.length(), 10);
        drop(list);
        assert_eq!(&backing[8..17], &[1, 2, 0, 0, 0, 0, 0, 3, 4]);
    }

    #[test]
    fn a_list_is_exposed_where_all_of_it_is_by_one_key() {
        let mut backing = [0_u8; 64];
        let (first, rest) = range(&mut backing).exposed(RKey(5)).split_at(8).unwrap();
        let (second, third) = rest.split_at(8).unwrap();
        assert_eq!(third.exposure(), Some(RKey(5)));
        let mut list = PageList::new();
        assert_eq!(list.exposed(), None);
        list.push(first).unwrap();
        list.push(second).unwrap();
        assert_eq!(list.exposed(), Some(RKey(5)));
        assert_eq!(list.pop().unwrap().exposure(), Some(RKey(5)));
        list.push(third.exposed(RKey(6))).unwrap();
        assert_eq!(list.exposed(), None);
    }

    #[test]
    fn copies_from_a_range_stop_at_either_end() {
        let (mut staged, mut backing) = ([0_u8; 16], [0_u8; 32]);
        for (n, byte) in (0..).zip(&mut staged) {
            *byte = n;
        }
        let from = range(&mut staged);
        let (left, right) = range(&mut backing).split_at(3).unwrap();
        let (_hole, right) = right.split_at(2).unwrap();
        let (right, _) = right.split_at(5).unwrap();
        let mut list = PageList::new();
        list.push(left).unwrap();
        list.push(right).unwrap();
        let copier = Copier::default();
        assert_eq!(list.copy_in(1, &from, 10, 4, copier), 4);
        assert_eq!(list.copy_in(6, &from, 1, 9, copier), 2, "the list ends");
        assert_eq!(list.copy_in(5, &from, 15, 9, copier), 1, "the range ends");
        assert_eq!(list.copy_in(0, &from, 16, 9, copier), 0);
        drop(list);
        assert_eq!(backing[..10], [0, 10, 11, 0, 0, 12, 13, 15, 1, 2]);
    }

    #[test]
    fn a_short_range_is_no_buffer() {
        let mut backing = [0_u8; 4095];
        assert!(Buffer::new(range(&mut backing)).is_err());
    }
}
