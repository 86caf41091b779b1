//! The control side of a core's pool of mappings, on the software device: it makes the windows that come with a live
//! mapping, and ends them in batches.

use o2poll_dataplane::nic::{Nic, Rights, Sge};
use o2poll_dataplane::poller::Order;
use o2poll_dataplane::pool::Handle;
use o2poll_soft::Window;

use crate::node::{PROTECTION_DOMAIN, lend};

/// What it has been told of so far.
#[derive(Debug, Default)]
pub(crate) struct Maps {
    /// Of the next mapping.
    pieces: Vec<Sge>,
    /// Of the next batch.
    batch: Vec<Window>,
    /// Lists that no window has: they are lent for good, and used again.
    lists: Vec<&'static mut [Sge]>,
}

impl Maps {
    /// A range of the next mapping.
    pub(crate) fn piece(&mut self, piece: Sge) {
        self.pieces.push(piece);
    }

    /// Makes a mapping over the ranges told since the last.
    pub(crate) fn map<N: Nic<Window = Window>>(&mut self, of: Handle, base: u64) -> Order<N> {
        let list = self.lists.pop();
        let list = list.unwrap_or_else(|| lend(LONGEST, Sge::default));
        let count = self.pieces.len();
        if count > list.len() {
            // No data plane tells of so many.
            self.pieces.clear();
            self.lists.push(list);
            return Order::NotMapped { of };
        }
        for (place, piece) in list.iter_mut().zip(self.pieces.drain(..)) {
            *place = piece;
        }
        // The device names its key: a dead one comes back after 256 in the same place.
        let rights = Rights::LOCAL_WRITE | Rights::REMOTE_WRITE;
        let window = Window::new(PROTECTION_DOMAIN);
        Order::Mapped {
            window: window.over(list, count, rights, base),
            of,
        }
    }

    /// A window of the next batch.
    pub(crate) fn unmap(&mut self, window: Window) {
        self.batch.push(window);
    }

    /// Ends the batch.
    pub(crate) fn flush<N: Nic>(&mut self) -> Order<N> {
        // A software window is nothing but a value: letting go of it destroys it.
        let lists = self.batch.drain(..).filter_map(|mut window| window.unmap());
        self.lists.extend(lists);
        Order::Unmapped
    }
}

/// Ranges of the longest transfer.
const LONGEST: usize = o2poll_dataplane::memory::MAX_FRAGMENTS;
