//! The control side of a node's pool of mappings.

use std::collections::VecDeque;

use o2poll_dataplane::nic::{Rights, Sge};
use o2poll_dataplane::poller::Order;
use o2poll_dataplane::pool::Handle;
use o2poll_soft::Window;

use crate::lend::lend;
use crate::node::Device;

/// What is asked for, made, and given back.
#[derive(Debug, Default)]
pub struct Maps {
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
    batch: Vec<Window>,
    /// Batches that are not answered yet.
    flushed: usize,
    lists: Vec<&'static mut [Sge]>,
}

impl Maps {
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
    pub fn unmap(&mut self, window: Window) {
        self.back += 1;
        self.batch.push(window);
    }

    /// The end of the batch.
    pub fn flush(&mut self) {
        self.batches.push(self.batch.len());
        for mut window in self.batch.drain(..) {
            self.lists.extend(window.unmap());
        }
        self.flushed += 1;
    }

    /// The next answer, if there is one to give.
    pub fn answer(&mut self) -> Option<Order<Device>> {
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
        let window = Window::new(0);
        Some(Order::Mapped {
            window: window.over(list, pieces.len(), rights, base),
            of,
        })
    }
}

const LONGEST: usize = 257;
