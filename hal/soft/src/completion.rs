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
    tail: usize,
    count: usize,
    overrun: bool,
}

impl<'a> CompletionQueue<'a> {
    pub(crate) const fn new(entries: &'a mut [CompletionEntry]) -> Self {
        Self {
            entries,
            head: 0,
            tail: 0,
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
        match self.entries.get_mut(self.tail) {
            Some(slot) if self.count < length => {
                *slot = entry;
                self.count = self.count.wrapping_add(1);
                self.tail = self.tail.wrapping_add(1);
                if self.tail == length {
                    self.tail = 0;
                }
            }
            _ => self.overrun = true,
        }
    }

    /// Takes the oldest out, at most so many, and not beyond the end of the ring's memory: who wants more asks again.
    #[inline]
    pub(crate) fn take(&mut self, most: usize) -> &[CompletionEntry] {
        let rest = self.entries.get(self.head..).unwrap_or_default();
        let count = self.count.min(most).min(rest.len());
        self.count = self.count.wrapping_sub(count);
        self.head = self.head.wrapping_add(count);
        if self.head >= self.entries.len() {
            self.head = 0;
        }
        rest.get(..count).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use super::{CompletionEntry, CompletionQueue};

    #[test]
    fn what_is_taken_at_once_ends_where_the_memory_does() {
        let mut entries = [CompletionEntry::default(); 4];
        let mut queue = CompletionQueue::new(&mut entries);
        let mut frees = 0;
        let mut push = |queue: &mut CompletionQueue<'_>| {
            queue.push(CompletionEntry {
                frees,
                ..CompletionEntry::default()
            });
            frees += 1;
        };
        let taken = |queue: &mut CompletionQueue<'_>, most| -> Vec<u32> {
            queue.take(most).iter().map(|entry| entry.frees).collect()
        };
        (0..3).for_each(|_| push(&mut queue));
        assert_eq!(taken(&mut queue, 2), [0, 1]);
        (0..3).for_each(|_| push(&mut queue));
        assert_eq!(taken(&mut queue, 9), [2, 3]);
        assert_eq!(taken(&mut queue, 9), [4, 5]);
        assert_eq!(taken(&mut queue, 9), []);
        assert_eq!(queue.len(), 0);
    }

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
                let [entry] = queue.take(1) else {
                    panic!("there is one more");
                };
                assert_eq!(entry.frees, round * 3 + n);
            }
            assert!(queue.take(1).is_empty());
        }
        for _ in 0..4 {
            queue.push(CompletionEntry::default());
        }
        assert!(queue.overrun());
    }
}
