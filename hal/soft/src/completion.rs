//! The completion queue: a ring that remembers which slots each completion gives back.

use o2poll_dataplane::nic::{Completion, Status, WrId};

/// Which queue of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Send,
    Receive,
}

/// One completion, and what is free once it has been polled.
#[derive(Clone, Copy, Debug)]
pub struct CompletionEntry {
    pub(crate) completion: Completion,
    pub(crate) queue_pair: u32,
    pub(crate) generation: u32,
    pub(crate) side: Side,
    /// Everything on that side before this position is free.
    pub(crate) frees: u32,
}

impl Default for CompletionEntry {
    fn default() -> Self {
        Self {
            completion: Completion::Failed {
                id: WrId(0),
                status: Status::Flushed,
            },
            queue_pair: u32::MAX,
            generation: 0,
            side: Side::Send,
            frees: 0,
        }
    }
}

/// A ring of any length.
#[derive(Debug)]
pub(crate) struct CompletionQueue<'a> {
    entries: &'a mut [CompletionEntry],
    head: usize,
    count: usize,
    overrun: bool,
}

impl<'a> CompletionQueue<'a> {
    pub(crate) const fn new(entries: &'a mut [CompletionEntry]) -> Self {
        Self {
            entries,
            head: 0,
            count: 0,
            overrun: false,
        }
    }

    /// Whether a completion was lost.
    pub(crate) const fn overrun(&self) -> bool {
        self.overrun
    }

    pub(crate) const fn len(&self) -> usize {
        self.count
    }

    /// Inlined, so that an entry is written where it stays: see `Soft::append`.
    #[inline(always)]
    pub(crate) fn push(&mut self, entry: CompletionEntry) {
        let length = self.entries.len();
        let mut at = self.head.wrapping_add(self.count);
        if at >= length {
            at = at.wrapping_sub(length);
        }
        match self.entries.get_mut(at) {
            Some(slot) if self.count < length => {
                *slot = entry;
                self.count = self.count.wrapping_add(1);
            }
            _ => self.overrun = true,
        }
    }

    #[inline]
    pub(crate) fn pop(&mut self) -> Option<&CompletionEntry> {
        self.count = self.count.checked_sub(1)?;
        let entry = self.entries.get(self.head)?;
        self.head = self.head.wrapping_add(1);
        if self.head >= self.entries.len() {
            self.head = 0;
        }
        Some(entry)
    }
}

#[cfg(test)]
mod tests {
    use super::{CompletionEntry, CompletionQueue};

    #[test]
    fn a_ring_of_odd_length_keeps_order_and_tells_when_it_is_full() {
        let mut entries = [CompletionEntry::default(); 3];
        let mut queue = CompletionQueue::new(&mut entries);
        for round in 0..7 {
            for n in 0..3 {
                queue.push(CompletionEntry {
                    frees: round * 3 + n,
                    ..CompletionEntry::default()
                });
            }
            assert!(!queue.overrun() && queue.len() == 3);
            for n in 0..3 {
                assert_eq!(queue.pop().unwrap().frees, round * 3 + n);
            }
            assert!(queue.pop().is_none());
        }
        for _ in 0..4 {
            queue.push(CompletionEntry::default());
        }
        assert!(queue.overrun());
    }
}
