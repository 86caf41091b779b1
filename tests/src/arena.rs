//! Registered memory of a test node, leaked.
#![allow(unsafe_code)]

use core::ptr::NonNull;

use o2poll_dataplane::memory::{PageList, Range};
use o2poll_dataplane::nic::{LKey, RKey, Rights};
use o2poll_soft::{Memory, Soft, Wire};

use crate::lend::{lend_all, lend_one};

/// A bump allocator over leaked memory that a device knows.
pub struct Arena {
    base: NonNull<u8>,
    length: usize,
    used: usize,
    lkey: LKey,
    exposed: bool,
}

/// The right to look at an arena's bytes from outside.
#[derive(Clone, Copy, Debug)]
pub struct View {
    base: NonNull<u8>,
    length: usize,
}
// SAFETY: the pointer is to leaked memory that only this value hands out.
unsafe impl Send for Arena {}

// SAFETY: as for the arena; it only copies out.
unsafe impl Send for View {}

impl Arena {
    /// `length` bytes, page-aligned, registered with `device`. What [`take`](Self::take) gives out, and the
    /// guard around it, is filled with `0xee`.
    pub fn new<W: Wire>(device: &mut Soft<'static, W>, length: usize) -> Self {
        Self::granting(device, length, Rights::LOCAL_WRITE)
    }

    /// The same, with rights of peers: with one of them the local key is a remote key over all of it.
    pub fn granting<W: Wire>(device: &mut Soft<'static, W>, length: usize, rights: Rights) -> Self {
        Self::registered(length, rights, |base| {
            // SAFETY: leaked, so valid for ever; handed out once by `take`, and looked at from outside only
            // through `peek`, which copies.
            let memory = unsafe { Memory::new(base, length, 0) }.with_rights(rights);
            device.register(memory).expect("room for one memory")
        })
    }

    /// The same, registered by `register`, which is told where the bytes begin and says which key they have.
    pub fn registered(
        length: usize,
        rights: Rights,
        register: impl FnOnce(NonNull<u8>) -> LKey,
    ) -> Self {
        // Zeroed, so that pages nobody takes cost nothing.
        let backing = lend_all(vec![0_u8; length + 4096]);
        let start = backing.as_ptr().align_offset(4096);
        let base = NonNull::from(&mut backing[start..start + length]).cast::<u8>();
        let lkey = register(base);
        Self {
            base,
            length,
            used: 0,
            lkey,
            exposed: rights.contains(Rights::REMOTE_WRITE),
        }
    }

    /// The next `length` bytes, beginning `offset` bytes into a page.
    pub fn take(&mut self, length: usize, offset: usize) -> Range<'static> {
        let from = self.used;
        let start = (from + GUARD).next_multiple_of(4096) + offset;
        self.used = start + length + GUARD;
        assert!(self.used <= self.length, "test arena too small");
        // SAFETY: inside the leaked arena, and behind everything that was handed out.
        unsafe { self.base.add(from).write_bytes(FILL, self.used - from) };
        // SAFETY: inside the leaked arena, and never handed out again.
        let range = unsafe { Range::new(self.base.add(start), length, self.lkey) };
        let range = range.expect("below 4 GiB");
        if self.exposed {
            range.exposed(RKey(self.lkey.0))
        } else {
            range
        }
    }

    /// The next `length` bytes that begin at a multiple of `align`, at least a page, and of nothing larger.
    pub fn aligned(&mut self, length: usize, align: usize) -> Range<'static> {
        let first = self.base.addr().get() + (self.used + GUARD).next_multiple_of(4096);
        let start = first.next_multiple_of(align);
        let is_even = (start / align).is_multiple_of(2);
        let odd = if is_even { start + align } else { start };
        self.used += odd - first;
        self.take(length, 0)
    }

    /// A list of pieces of these lengths, with `hole` bytes between them.
    pub fn list(
        &mut self,
        pieces: &[u32],
        hole: u32,
        offset: usize,
    ) -> &'static mut PageList<'static> {
        let total: usize = pieces.iter().map(|piece| (piece + hole) as usize).sum();
        let mut rest = self.take(total, offset);
        let list = lend_one(PageList::new());
        for piece in pieces {
            let (head, tail) = rest.split_at(*piece).expect("counted above");
            let (_hole, tail) = tail.split_at(hole).expect("counted above");
            list.push(head).expect("at most 257 pieces");
            rest = tail;
        }
        list
    }

    /// The key over all of it.
    #[must_use]
    pub const fn key(&self) -> LKey {
        self.lkey
    }

    /// One piece of `length` bytes.
    pub fn flat(&mut self, length: u32, offset: usize) -> &'static mut PageList<'static> {
        self.list(&[length], 0, offset)
    }

    /// What is in memory at an address now, whoever owns it.
    #[must_use]
    pub fn peek(&self, address: u64, length: usize) -> Vec<u8> {
        self.view().copy(address, length)
    }

    /// The right to look.
    #[must_use]
    pub const fn view(&self) -> View {
        View {
            base: self.base,
            length: self.length,
        }
    }
}

impl View {
    /// What is in memory at an address now, whoever owns it.
    #[must_use]
    pub fn copy(&self, address: u64, length: usize) -> Vec<u8> {
        let offset =
            usize::try_from(address - self.base.as_ptr() as u64).expect("an address of this arena");
        assert!(offset + length <= self.length);
        // SAFETY: inside the leaked arena; all devices run on this thread.
        unsafe { core::slice::from_raw_parts(self.base.as_ptr().add(offset), length) }.to_vec()
    }
}

/// What memory is filled with before its first use.
pub const FILL: u8 = 0xee;

/// Bytes on either side of what is handed out that belong to nobody.
pub const GUARD: usize = 64;
