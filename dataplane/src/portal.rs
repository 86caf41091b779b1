//! Which buffer an incoming PUT or GET lands in.
//!
//! Entries are tried in the order in which they were attached; the first that matches portal, match
//! bits, source and length is taken, as LNet does.

use crate::endpoint::{Entry, EntryOptions, MatchBits, Portal};
use crate::pool::{Handle, Pool, Queue};
use crate::wire::Nid;

/// Portal of LNet itself: ping and discovery.
pub const LNET_PORTAL: Portal = Portal(0);

/// Match bits of the LNet ping and of the discovery push.
pub const PING_BITS: MatchBits = MatchBits(0x8000_0000_0000_0000);

/// An entry in use.
#[derive(Debug)]
pub struct Attached<'a> {
    pub(crate) entry: Entry<'a>,
    /// Where the next transfer lands, with [`EntryOptions::LOCAL_OFFSET`].
    pub(crate) offset: u64,
    /// Transfers that move in it now.
    pub(crate) busy: u32,
    /// Matches nothing any more; goes back when no longer busy.
    pub(crate) leaving: Option<Leaving>,
}

/// Why an entry leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leaving {
    Asked,
    Used,
}

/// What an incoming message asks for.
#[derive(Clone, Copy, Debug)]
pub struct Question {
    /// PUT or GET.
    pub put: bool,
    /// Portal.
    pub portal: Portal,
    /// Match bits.
    pub match_bits: MatchBits,
    /// The initiator.
    pub from: Nid,
    /// Its offset.
    pub offset: u32,
    /// Its length.
    pub length: u32,
}

/// Where it lands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Match {
    /// In which entry.
    pub entry: Handle,
    /// Where in its memory.
    pub offset: u64,
    /// How much of it.
    pub length: u32,
}

impl<'a> Attached<'a> {
    /// An entry as submitted.
    #[must_use]
    pub const fn new(entry: Entry<'a>) -> Self {
        Self {
            entry,
            offset: 0,
            busy: 0,
            leaving: None,
        }
    }

    /// Offset and length of what lands here; `None` when it does not match.
    #[inline]
    fn accepts(&self, question: &Question) -> Option<(u64, u32)> {
        let entry = &self.entry;
        let wanted = if question.put {
            EntryOptions::PUT
        } else {
            EntryOptions::GET
        };
        let differing = (entry.match_bits.0 ^ question.match_bits.0) & !entry.ignore_bits.0;
        if self.leaving.is_some()
            || entry.portal != question.portal
            || differing != 0
            || !entry.options.contains(wanted)
            || (entry.from != Nid::ANY && entry.from != question.from)
        {
            return None;
        }
        let offset = if entry.options.contains(EntryOptions::LOCAL_OFFSET) {
            self.offset
        } else {
            u64::from(question.offset)
        };
        let room = entry.memory.length().saturating_sub(offset);
        let length = u32::try_from(room).unwrap_or(u32::MAX).min(question.length);
        if length < question.length && !entry.options.contains(EntryOptions::TRUNCATE) {
            return None;
        }
        Some((offset, length))
    }

    /// A transfer moves in it no longer; whether it is leaving.
    #[inline]
    pub(crate) const fn disengage(&mut self) -> bool {
        self.busy = self.busy.saturating_sub(1);
        self.leaving.is_some()
    }

    /// A transfer begins to move where it matched.
    #[inline]
    pub fn engage(&mut self, found: &Match) {
        self.busy = self.busy.saturating_add(1);
        if self.entry.options.contains(EntryOptions::LOCAL_OFFSET) {
            self.offset = found.offset.saturating_add(u64::from(found.length));
        }
        if self.entry.options.contains(EntryOptions::ONCE) {
            self.leaving = Some(Leaving::Used);
        }
    }
}

/// The first entry that takes it. Its memory is marked busy by [`Attached::engage`].
#[must_use]
pub fn find(entries: &Pool<'_, Attached<'_>>, order: &Queue, question: &Question) -> Option<Match> {
    entries.iter(order).find_map(|(entry, attached)| {
        let (offset, length) = attached.accepts(question)?;
        Some(Match {
            entry,
            offset,
            length,
        })
    })
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::{Attached, Match, PING_BITS, Question, find};
    use crate::endpoint::{Entry, EntryOptions, MatchBits, Portal, Token};
    use crate::memory::{PageList, Range};
    use crate::nic::LKey;
    use crate::pool::{Pool, Queue, Slot};
    use crate::wire::Nid;
    use std::boxed::Box;

    const PEER: Nid = Nid::o2ib([10, 0, 0, 2], 0);

    fn entry(bytes: usize, bits: u64, ignore: u64, options: EntryOptions) -> Entry<'static> {
        let list = Box::leak(Box::new(PageList::new()));
        let memory = Box::leak(std::vec![0_u8; bytes].into_boxed_slice());
        list.push(Range::of_bytes(memory, LKey(1)).unwrap())
            .unwrap();
        Entry {
            token: Token(0),
            portal: Portal(5),
            match_bits: MatchBits(bits),
            ignore_bits: MatchBits(ignore),
            from: Nid::ANY,
            options,
            memory: list,
        }
    }

    fn ask(bits: u64, offset: u32, length: u32) -> Question {
        Question {
            put: true,
            portal: Portal(5),
            match_bits: MatchBits(bits),
            from: PEER,
            offset,
            length,
        }
    }

    #[test]
    fn the_first_that_matches_in_order_of_attachment() {
        let mut slots = [const { Slot::vacant() }; 4];
        let mut pool = Pool::new(&mut slots);
        let mut order = Queue::new();
        let put = EntryOptions::PUT;
        let filler = pool.insert(Attached::new(entry(1, 0, 0, put))).unwrap();
        let exact = pool.insert(Attached::new(entry(100, 7, 0, put))).unwrap();
        pool.remove(filler);
        let loose = pool
            .insert(Attached::new(entry(
                100,
                0,
                0xff,
                put | EntryOptions::TRUNCATE,
            )))
            .unwrap();
        for handle in [exact, loose] {
            pool.push_back(&mut order, handle);
        }
        let at = |question| {
            find(&pool, &order, &question)
                .map(|found: Match| (found.entry, found.offset, found.length))
        };
        assert_eq!(at(ask(7, 10, 90)), Some((exact, 10, 90)));
        assert_eq!(
            at(ask(7, 10, 91)),
            Some((loose, 10, 90)),
            "too long for the first, cut by the second"
        );
        assert_eq!(at(ask(7, 200, 1)), Some((loose, 200, 0)));
        assert_eq!(at(ask(0x107, 0, 1)), None);
        assert_eq!(
            at(Question {
                put: false,
                ..ask(7, 0, 1)
            }),
            None
        );
        assert_eq!(
            at(Question {
                portal: Portal(6),
                ..ask(7, 0, 1)
            }),
            None
        );
        assert_eq!(at(ask(PING_BITS.0, 0, 1)), None);
    }

    #[test]
    fn local_offsets_move_on_and_once_is_once() {
        let mut slots = [const { Slot::vacant() }; 1];
        let mut pool = Pool::new(&mut slots);
        let mut order = Queue::new();
        let options = EntryOptions::PUT | EntryOptions::LOCAL_OFFSET | EntryOptions::TRUNCATE;
        let handle = pool
            .insert(Attached::new(entry(100, 7, 0, options)))
            .unwrap();
        pool.push_back(&mut order, handle);
        let found = find(&pool, &order, &ask(7, 55, 60)).unwrap();
        assert_eq!((found.offset, found.length), (0, 60));
        pool.get_mut(found.entry).unwrap().engage(&found);
        let found = find(&pool, &order, &ask(7, 55, 60)).unwrap();
        assert_eq!((found.offset, found.length), (60, 40));
        pool.get_mut(handle).unwrap().entry.options |= EntryOptions::ONCE;
        pool.get_mut(found.entry).unwrap().engage(&found);
        assert_eq!(find(&pool, &order, &ask(7, 0, 0)), None);
    }

    #[test]
    fn a_named_source_is_the_only_one() {
        let mut slots = [const { Slot::vacant() }; 1];
        let mut pool = Pool::new(&mut slots);
        let mut order = Queue::new();
        let mut only = entry(100, 7, 0, EntryOptions::PUT);
        only.from = PEER;
        let handle = pool.insert(Attached::new(only)).unwrap();
        pool.push_back(&mut order, handle);
        assert!(find(&pool, &order, &ask(7, 0, 1)).is_some());
        let other = Question {
            from: Nid::o2ib([10, 0, 0, 3], 0),
            ..ask(7, 0, 1)
        };
        assert!(find(&pool, &order, &other).is_none());
    }
}
