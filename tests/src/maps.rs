//! The control side of a node's pool of mappings.

use std::collections::VecDeque;

use o2poll_dataplane::nic::{Nic, Rights, Sge};
use o2poll_dataplane::poller::Order;
use o2poll_dataplane::pool::Handle;

use crate::backend::{Backend, Software};
use crate::lend::lend;
use crate::tap::Tap;

/// What is asked for, made, and given back.
pub struct Maps<B: Backend = Software> {
    /// Answer nothing for now.
    pub hold: bool,
    /// Refuse every mapping that is answered.
    pub refuse: bool,
    /// Answered with a window that the device does not take.
    pub spoil: bool,
    /// Not answered yet.
    pub asked: VecDeque<(Handle, u64, Vec<Sge>)>,
    /// Mappings made.
    pub made: usize,
    /// Mappings that came back to be unmapped.
    pub back: usize,
    /// How many each batch had.
    pub batches: Vec<usize>,
    pieces: Vec<Sge>,
    batch: Vec<<B::Nic as Nic>::Window>,
    /// Batches that are not answered yet.
    flushed: usize,
    lists: Vec<&'static mut [Sge]>,
}

impl<B: Backend> Maps<B> {
    /// A piece of the next mapping.
    pub fn piece(&mut self, piece: Sge) {
        self.pieces.push(piece);
    }

    /// A mapping is asked for.
    pub fn map(&mut self, of: Handle, base: u64) {
        let pieces = core::mem::take(&mut self.pieces);
        self.asked.push_back((of, base, pieces));
    }

    /// A window of the batch.
    pub fn unmap(&mut self, window: <B::Nic as Nic>::Window) {
        self.back += 1;
        self.batch.push(window);
    }

    /// The end of the batch.
    pub fn flush(&mut self) {
        self.batches.push(self.batch.len());
        for window in self.batch.drain(..) {
            self.lists.extend(B::unmap(window));
        }
        self.flushed += 1;
    }

    /// The next answer, if there is one to give.
    pub fn answer(&mut self) -> Option<Order<Tap<B::Nic>>> {
        if self.hold {
            return None;
        }
        if let Some(flushed) = self.flushed.checked_sub(1) {
            self.flushed = flushed;
            return Some(Order::Unmapped);
        }
        let (of, base, pieces) = self.asked.pop_front()?;
        if self.refuse {
            return Some(Order::NotMapped { of });
        }
        let list = self.lists.pop();
        let list = list.unwrap_or_else(|| lend(LONGEST, Sge::default));
        list[..pieces.len()].copy_from_slice(&pieces);
        if self.spoil {
            list[0].length = 0;
        }
        self.made += 1;
        let rights = Rights::LOCAL_WRITE | Rights::REMOTE_WRITE;
        let window = B::mapping(list, pieces.len(), rights, base);
        Some(Order::Mapped { window, of })
    }
}

impl<B: Backend> Default for Maps<B> {
    fn default() -> Self {
        Self {
            hold: false,
            refuse: false,
            spoil: false,
            asked: VecDeque::new(),
            made: 0,
            back: 0,
            batches: Vec::new(),
            pieces: Vec::new(),
            batch: Vec::new(),
            flushed: 0,
            lists: Vec::new(),
        }
    }
}

const LONGEST: usize = 257;
