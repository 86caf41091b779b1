//! RDMA descriptors: one key, 1 to 257 fragments.

use core::fmt;

use zerocopy::{BigEndian, IntoBytes as _, LittleEndian};

use super::layout::{self, put, take};
use super::{ByteOrder, MAX_FRAGMENTS, TooLong, WireError};
use crate::nic::{RKey, Sge};

/// One contiguous piece of the peer's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Fragment {
    /// Bytes. A peer may say 0.
    pub length: u32,
    /// As the peer's key understands it: an address, or an offset from zero. Opaque to us.
    pub address: u64,
}

/// Memory that may be written under one key.
///
/// A received one reads the fragments from the message in place.
#[derive(Clone, Copy)]
pub struct Descriptor<'m> {
    key: RKey,
    list: List<'m>,
}

#[derive(Clone, Copy)]
enum List<'m> {
    Received {
        fragments: &'m [[u8; 12]],
        order: ByteOrder,
        /// Of the first fragment in the message.
        offset: u16,
    },
    Own(&'m [Fragment]),
    Pieces(&'m [Sge]),
}

impl<'m> Descriptor<'m> {
    /// One to send. [`Message::encode`](super::Message::encode) refuses a list that is empty or has more
    /// than [`MAX_FRAGMENTS`].
    #[must_use]
    pub const fn new(key: RKey, fragments: &'m [Fragment]) -> Self {
        Self {
            key,
            list: List::Own(fragments),
        }
    }

    /// One to send, with a fragment for each of these pieces of our memory, which a peer addresses as we do.
    #[must_use]
    pub const fn over(key: RKey, pieces: &'m [Sge]) -> Self {
        Self {
            key,
            list: List::Pieces(pieces),
        }
    }

    /// The key that covers all fragments.
    #[must_use]
    pub const fn key(&self) -> RKey {
        self.key
    }

    /// How many fragments.
    #[must_use]
    pub const fn len(&self) -> usize {
        match self.list {
            List::Received { fragments, .. } => fragments.len(),
            List::Own(fragments) => fragments.len(),
            List::Pieces(pieces) => pieces.len(),
        }
    }

    /// Never true of a received one.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// One fragment.
    #[must_use]
    pub fn get(&self, index: usize) -> Option<Fragment> {
        match self.list {
            List::Received {
                fragments, order, ..
            } => fragments.get(index).map(|bytes| fragment(*bytes, order)),
            List::Own(fragments) => fragments.get(index).copied(),
            List::Pieces(pieces) => pieces.get(index).map(|piece| of_piece(*piece)),
        }
    }

    /// The fragment, where there is but one, as every fast-registering peer sends.
    #[inline(always)]
    #[must_use]
    pub fn only(&self) -> Option<Fragment> {
        match self.list {
            List::Received {
                fragments: [bytes],
                order,
                ..
            } => Some(fragment(*bytes, order)),
            List::Own([fragment]) => Some(*fragment),
            List::Pieces([piece]) => Some(of_piece(*piece)),
            _ => None,
        }
    }

    /// The fragments in order.
    #[must_use]
    pub const fn iter(&self) -> Fragments<'m> {
        Fragments {
            descriptor: *self,
            next: 0,
        }
    }

    /// Bytes in all.
    #[must_use]
    pub fn length(&self) -> u64 {
        self.iter().fold(0_u64, |sum, fragment| {
            sum.saturating_add(u64::from(fragment.length))
        })
    }

    /// Where in its message the fragments stand, for who keeps the receive buffer and walks them later.
    /// One that was made here stands in no message: its place holds no fragment.
    #[must_use]
    #[expect(
        clippy::cast_possible_truncation,
        reason = "a received list has at most 257"
    )]
    pub const fn locate(&self) -> Located {
        let (offset, count, order) = match self.list {
            List::Received {
                fragments,
                order,
                offset,
            } => (offset, fragments.len() as u16, order),
            List::Own(_) | List::Pieces(_) => (0, 0, ByteOrder::NATIVE),
        };
        Located {
            key: self.key,
            offset,
            count,
            order,
        }
    }

    /// Reads one of `body`, which starts `offset` bytes into the message and ends with it.
    #[inline(always)]
    pub(super) fn decode<O: zerocopy::ByteOrder + 'static>(
        body: &'m [u8],
        offset: u16,
        order: ByteOrder,
    ) -> Result<Self, WireError> {
        let (start, rest) = take::<layout::Descriptor<O>>(body).ok_or(WireError::ShortBody)?;
        let count = start.nfrags.get();
        if count == 0 || count > u32::from(MAX_FRAGMENTS) {
            return Err(WireError::Fragments(count));
        }
        let (fragments, _) = rest.as_chunks();
        let fragments = fragments
            .get(..count as usize)
            .ok_or(WireError::DescriptorCut)?;
        Ok(Self {
            key: RKey(start.key.get()),
            list: List::Received {
                fragments,
                order,
                offset: offset.saturating_add(8),
            },
        })
    }

    /// Writes it in native order; how many bytes it has.
    #[inline(always)]
    pub(super) fn write(&self, to: &mut [u8]) -> Result<u32, TooLong> {
        if let List::Own([fragment]) = self.list
            && let Some(at) = to.first_chunk_mut::<{ SINGLE_BYTES as usize }>()
        {
            *at = zerocopy::transmute!(layout::Single::<zerocopy::NativeEndian> {
                start: layout::Descriptor {
                    key: self.key.0.into(),
                    nfrags: 1.into(),
                },
                fragment: layout::Fragment {
                    nob: fragment.length.into(),
                    address: fragment.address.into(),
                },
            });
            return Ok(SINGLE_BYTES);
        }
        let room = to.len();
        let rest = self.encode::<zerocopy::NativeEndian>(to)?;
        u32::try_from(room.saturating_sub(rest.len())).map_err(|_| TooLong)
    }

    /// Writes it; what of `to` is left behind it.
    pub(super) fn encode<'t, O: zerocopy::ByteOrder>(
        &self,
        to: &'t mut [u8],
    ) -> Result<&'t mut [u8], TooLong> {
        let count = u16::try_from(self.len()).map_err(|_| TooLong)?;
        if count == 0 || count > MAX_FRAGMENTS {
            return Err(TooLong);
        }
        let start = layout::Descriptor::<O> {
            key: self.key.0.into(),
            nfrags: u32::from(count).into(),
        };
        let to = put(&start, to)?;
        match self.list {
            List::Pieces(pieces) => put_all::<O>(pieces.iter().map(|piece| of_piece(*piece)), to),
            List::Own(fragments) => put_all::<O>(fragments.iter().copied(), to),
            List::Received { .. } => put_all::<O>(self.iter(), to),
        }
    }
}

/// A descriptor with one fragment.
const SINGLE_BYTES: u32 = 20;

impl PartialEq for Descriptor<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.key == other.key && self.iter().eq(other.iter())
    }
}

impl Eq for Descriptor<'_> {}

impl fmt::Debug for Descriptor<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Descriptor({:?}, ", self.key)?;
        f.debug_list().entries(self.iter()).finish()?;
        f.write_str(")")
    }
}

impl<'m> IntoIterator for &Descriptor<'m> {
    type Item = Fragment;
    type IntoIter = Fragments<'m>;

    fn into_iter(self) -> Fragments<'m> {
        self.iter()
    }
}

/// The fragments of a [`Descriptor`].
#[derive(Clone, Debug)]
pub struct Fragments<'m> {
    descriptor: Descriptor<'m>,
    next: usize,
}

impl Iterator for Fragments<'_> {
    type Item = Fragment;

    fn next(&mut self) -> Option<Fragment> {
        let fragment = self.descriptor.get(self.next)?;
        self.next = self.next.saturating_add(1);
        Some(fragment)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = self.descriptor.len().saturating_sub(self.next);
        (left, Some(left))
    }
}

impl ExactSizeIterator for Fragments<'_> {}

/// Where a received descriptor's fragments stand in its message. It borrows nothing: whoever holds
/// the receive buffer can go on reading with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Located {
    key: RKey,
    offset: u16,
    count: u16,
    order: ByteOrder,
}

impl Located {
    /// The key that covers all fragments.
    #[must_use]
    pub const fn key(&self) -> RKey {
        self.key
    }

    /// How many fragments.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.count as usize
    }

    /// Only of a descriptor that was not received.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// One fragment, out of the bytes of the message that the descriptor was decoded from.
    #[must_use]
    pub fn get(&self, message: &[u8], index: usize) -> Option<Fragment> {
        if index >= self.len() {
            return None;
        }
        let at = index
            .wrapping_mul(12)
            .wrapping_add(usize::from(self.offset));
        let bytes = message.get(at..)?.first_chunk()?;
        Some(fragment(*bytes, self.order))
    }
}

const fn of_piece(piece: Sge) -> Fragment {
    Fragment {
        length: piece.length,
        address: piece.address,
    }
}

/// Writes fragments one behind the other; what of `to` is left behind them.
fn put_all<O: zerocopy::ByteOrder>(
    fragments: impl ExactSizeIterator<Item = Fragment>,
    to: &mut [u8],
) -> Result<&mut [u8], TooLong> {
    let size = fragments.len().checked_mul(12).ok_or(TooLong)?;
    let (at, rest) = to.split_at_mut_checked(size).ok_or(TooLong)?;
    let (places, _) = at.as_chunks_mut::<12>();
    for (place, fragment) in places.iter_mut().zip(fragments) {
        let fragment = layout::Fragment::<O> {
            nob: fragment.length.into(),
            address: fragment.address.into(),
        };
        fragment.write_to(place).map_err(|_| TooLong)?;
    }
    Ok(rest)
}

#[inline]
fn fragment(bytes: [u8; 12], order: ByteOrder) -> Fragment {
    match order {
        ByteOrder::Little => {
            let view: layout::Fragment<LittleEndian> = zerocopy::transmute!(bytes);
            Fragment {
                length: view.nob.get(),
                address: view.address.get(),
            }
        }
        ByteOrder::Big => {
            let view: layout::Fragment<BigEndian> = zerocopy::transmute!(bytes);
            Fragment {
                length: view.nob.get(),
                address: view.address.get(),
            }
        }
    }
}
