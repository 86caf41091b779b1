//! An application's end of its node's pollers: submissions in, events out, and entries that every core exports.
//!
//! Each core matches what comes over its own connections against its own entries, so memory that a node exports at run
//! time is attached on all of them: each gets a list of the same ranges ([`Shares`]), and the caller hears of it when the
//! last one has answered. Nothing is allocated after the start.

use std::collections::VecDeque;

use o2poll_dataplane::endpoint::{
    Entry, EntryOptions, Error, Event, MatchBits, Portal, Submission, Token,
};
use o2poll_dataplane::memory::{PageList, Shares};
use o2poll_dataplane::pool::Handle;
use o2poll_dataplane::ring::{Consumer, Producer};
use o2poll_dataplane::wire::Nid;

use crate::node::{lend, ring_of};

/// The application's end of its node's pollers: submissions in, events out.
#[derive(Debug)]
pub struct Port {
    /// One for each core of the node.
    cores: Vec<CorePort>,
    /// The core whose events are taken first.
    next: usize,
    /// Places for entries that all cores have; none on a node of one core.
    common: Vec<Place>,
    /// How many of them are on their way out.
    leaving: usize,
    /// Events that no core has: refusals, and the ends of entries that all cores had.
    answers: VecDeque<Event<'static>>,
}

/// The rings of one core.
#[derive(Debug)]
pub(crate) struct CorePort {
    pub(crate) submissions: Producer<'static, Submission<'static>>,
    pub(crate) events: Consumer<'static, Event<'static>>,
    /// Whose the next answers to an attach are, in the order of the submissions: that of a common entry, or of who asked
    /// this core alone.
    attaching: VecDeque<Option<usize>>,
    /// Detaches of the application that are not answered yet.
    detaching: usize,
    /// Detaches of the port itself that may be answered without an entry: the core has let it go before, because it stops.
    own_detaches: usize,
    /// Empty lists for its shares of common entries.
    lists: Vec<&'static mut PageList<'static>>,
}

/// A core's ends of the rings between it and a [`Port`].
pub(crate) type PollerEnds = (
    Consumer<'static, Submission<'static>>,
    Producer<'static, Event<'static>>,
);

/// A place for an entry that all cores have.
#[derive(Debug)]
struct Place {
    entry: Option<Common>,
    /// How it stands on each core.
    on: Vec<On>,
}

/// An entry that all cores have, or are to have.
#[derive(Debug)]
struct Common {
    /// As submitted; its memory is put by.
    shares: Shares<'static>,
    like: Like,
    /// Why a core would not have it.
    refused: Option<Error>,
    attached: bool,
    leaving: bool,
}

/// An entry without its memory.
#[derive(Clone, Copy, Debug)]
struct Like {
    token: Token,
    portal: Portal,
    match_bits: MatchBits,
    ignore_bits: MatchBits,
    from: Nid,
    options: EntryOptions,
}

/// How an entry stands on one core.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum On {
    /// Not there.
    Absent,
    /// The core has been asked.
    Asked,
    /// There, under this name.
    Here(Handle),
    /// The core has been told to give it back.
    Leaving,
}

impl Port {
    /// For so many cores, with rings of `events` places, and room for `entries` that all cores have.
    pub(crate) fn new(cores: usize, events: usize, entries: usize) -> (Self, Vec<PollerEnds>) {
        // A node of one core has nothing in common with another.
        let entries = if cores > 1 { entries } else { 0 };
        let (cores, ends): (Vec<_>, Vec<_>) = (0..cores)
            .map(|_| {
                let (submissions, submissions_in) = ring_of::<Submission<'static>>(events);
                let (events_out, events) = ring_of::<Event<'static>>(events);
                let port = CorePort {
                    attaching: VecDeque::with_capacity(match entries {
                        0 => 0,
                        _ => MOST_ATTACHING,
                    }),
                    detaching: 0,
                    own_detaches: 0,
                    lists: lend(entries, PageList::new).iter_mut().collect(),
                    submissions,
                    events,
                };
                (port, (submissions_in, events_out))
            })
            .unzip();
        let place = || Place {
            entry: None,
            on: vec![On::Absent; cores.len()],
        };
        let port = Self {
            next: 0,
            common: core::iter::repeat_with(place).take(entries).collect(),
            leaving: 0,
            answers: VecDeque::with_capacity(2 * entries),
            cores,
        };
        (port, ends)
    }

    /// Submits to the node: memory is attached on every core, and [`Event::Attached`] comes when all of them have it;
    /// until then a peer may be served by those that are before the others. [`Event::Detached`] comes when none has it any
    /// more, with the memory as it was. What is wanted of a core's entry alone cannot be had of several
    /// ([`Error::SeveralCores`]). Everything else goes to the first core.
    ///
    /// # Errors
    /// The submission, when a ring is full: try again after the next poll, and take events meanwhile.
    pub fn submit(&mut self, submission: Submission<'static>) -> Result<(), Submission<'static>> {
        self.let_go();
        match submission {
            Submission::Attach(entry) if self.cores.len() > 1 => {
                self.attach(entry).map_err(Submission::Attach)
            }
            Submission::Detach { entry } if self.detach(entry) => Ok(()),
            other => self.submit_to(0, other),
        }
    }

    /// Submits to one of the node's cores: a transfer to the one that has its connection, and a cancel to the same. What is
    /// attached here is exported on that core's connections only, and detached here by the name that it got.
    ///
    /// # Errors
    /// The submission, when the ring is full: try again after the next poll. Also for a core that is none of the
    /// node's.
    pub fn submit_to(
        &mut self,
        core: usize,
        submission: Submission<'static>,
    ) -> Result<(), Submission<'static>> {
        let several = self.cores.len() > 1;
        let Some(core) = self.cores.get_mut(core) else {
            return Err(submission);
        };
        let attaches = several && matches!(submission, Submission::Attach(_));
        if attaches && core.attaching.len() >= MOST_ATTACHING {
            return Err(submission);
        }
        let detaches = matches!(submission, Submission::Detach { .. });
        core.submissions.push(submission)?;
        core.detaching += usize::from(detaches);
        if attaches {
            core.attaching.push_back(None);
        }
        Ok(())
    }

    /// The oldest event of some core that has not been taken, of each core in turn.
    pub fn event(&mut self) -> Option<Event<'static>> {
        self.let_go();
        if let Some(answer) = self.answers.pop_front() {
            return Some(answer);
        }
        for _ in 0..self.cores.len() {
            let core = self.next;
            let next = core.wrapping_add(1);
            self.next = if next < self.cores.len() { next } else { 0 };
            while let Some(event) = self.cores.get_mut(core)?.events.pop() {
                let event = self.hear(core, event);
                if event.is_some() {
                    return event;
                }
            }
        }
        None
    }

    /// How many cores the node has.
    #[must_use]
    pub const fn cores(&self) -> usize {
        self.cores.len()
    }

    /// Asks every core to attach it, or none.
    fn attach(&mut self, entry: Entry<'static>) -> Result<(), Entry<'static>> {
        if self.answers.len() == self.answers.capacity() {
            return Err(entry);
        }
        let of_one = EntryOptions::ONCE | EntryOptions::LOCAL_OFFSET;
        let free = self.common.iter().position(|place| place.entry.is_none());
        let place = match free {
            Some(place) if !entry.options.intersects(of_one) => place,
            _ => {
                let why = match free {
                    None => Error::NoRoom,
                    Some(_) => Error::SeveralCores,
                };
                self.answers.push_back(Event::Detached {
                    entry: Some(entry),
                    why: Some(why),
                });
                return Ok(());
            }
        };
        let ready = self.cores.iter_mut().all(|core| {
            core.submissions.free() > 0
                && core.attaching.len() < MOST_ATTACHING
                && !core.lists.is_empty()
        });
        let Some(slot) = self.common.get_mut(place).filter(|_| ready) else {
            return Err(entry);
        };
        let (like, memory) = Like::split(entry);
        let mut shares = Shares::new(memory);
        for (core, on) in self.cores.iter_mut().zip(&mut slot.on) {
            let Some(list) = core.lists.pop() else {
                continue;
            };
            shares.share(list);
            // There is room, and nobody else puts anything in.
            if core
                .submissions
                .push(Submission::Attach(like.with(list)))
                .is_ok()
            {
                core.attaching.push_back(Some(place));
                *on = On::Asked;
            }
        }
        slot.entry = Some(Common {
            shares,
            like,
            refused: None,
            attached: false,
            leaving: false,
        });
        Ok(())
    }

    /// Begins to take an entry back that all cores have; whether there is one of this name.
    fn detach(&mut self, name: Handle) -> bool {
        let named = |place: &&mut Place| {
            place.on.first() == Some(&On::Here(name))
                && place
                    .entry
                    .as_ref()
                    .is_some_and(|entry| entry.attached && !entry.leaving)
        };
        let Some(place) = self.common.iter_mut().find(named) else {
            return false;
        };
        if let Some(entry) = &mut place.entry {
            entry.leaving = true;
            self.leaving += 1;
        }
        self.let_go();
        true
    }

    /// Tells cores to give back what is on its way out, as far as there is room in their rings.
    fn let_go(&mut self) {
        if self.leaving == 0 {
            return;
        }
        let leaving = |place: &&mut Place| place.entry.as_ref().is_some_and(|entry| entry.leaving);
        for place in self.common.iter_mut().filter(leaving) {
            for (core, on) in self.cores.iter_mut().zip(&mut place.on) {
                if let On::Here(entry) = *on
                    && core.submissions.push(Submission::Detach { entry }).is_ok()
                {
                    *on = On::Leaving;
                    core.own_detaches += 1;
                }
            }
        }
    }

    /// What an event of a core is to the application: nothing, while other cores have still to say the same.
    fn hear(&mut self, core: usize, event: Event<'static>) -> Option<Event<'static>> {
        if self.common.is_empty() {
            return Some(event);
        }
        match event {
            Event::Attached { entry, .. } => match self.answered(core) {
                None => Some(event),
                Some(place) => {
                    self.stands(place, core, On::Here(entry), None);
                    self.settle(place)
                }
            },
            Event::Detached {
                entry: Some(entry),
                why,
            } => {
                // An answer to an attach, or the end of what was attached.
                let refused = why.filter(|why| *why != Error::Used);
                let place = match refused {
                    Some(_) => self.answered(core),
                    None => self.place_of(&entry),
                };
                let Some(place) = place else {
                    if let (None, Some(core)) = (why, self.cores.get_mut(core)) {
                        core.detaching = core.detaching.saturating_sub(1);
                    }
                    return Some(Event::Detached {
                        entry: Some(entry),
                        why,
                    });
                };
                self.take_back(place, core, entry);
                self.stands(place, core, On::Absent, refused);
                self.settle(place)
            }
            Event::Detached { entry: None, .. } => self
                .cores
                .get_mut(core)?
                .answers_the_application()
                .then_some(event),
            Event::Landed(_) | Event::Done { .. } => Some(event),
        }
    }

    /// A core has answered its oldest attach: the place of a common entry, if it was for one.
    fn answered(&mut self, core: usize) -> Option<usize> {
        self.cores.get_mut(core)?.attaching.pop_front().flatten()
    }

    /// The common entry that this is a core's share of.
    fn place_of(&self, share: &Entry<'static>) -> Option<usize> {
        let of = |place: &Place| {
            let entry = place.entry.as_ref();
            entry.is_some_and(|entry| entry.shares.has(share.memory))
        };
        self.common.iter().position(of)
    }

    fn take_back(&mut self, place: usize, core: usize, share: Entry<'static>) {
        let entry = self.common.get_mut(place);
        let entry = entry.and_then(|place| place.entry.as_mut());
        if let (Some(entry), Some(core)) = (entry, self.cores.get_mut(core))
            && entry.shares.take_back(share.memory)
        {
            core.lists.push(share.memory);
        }
    }

    /// How it stands on a core from now on. What one core has not, none is to have.
    fn stands(&mut self, place: usize, core: usize, how: On, refused: Option<Error>) {
        let Some(place) = self.common.get_mut(place) else {
            return;
        };
        if let Some(on) = place.on.get_mut(core) {
            *on = how;
        }
        let Some(entry) = &mut place.entry else {
            return;
        };
        entry.refused = entry.refused.or(refused);
        if how == On::Absent && !entry.leaving {
            entry.leaving = true;
            self.leaving += 1;
        }
        self.let_go();
    }

    /// The event of a common entry, once the last core has said what it has to say.
    fn settle(&mut self, at: usize) -> Option<Event<'static>> {
        let place = self.common.get_mut(at)?;
        let entry = place.entry.as_mut()?;
        if !entry.leaving {
            let all = place.on.iter().all(|on| matches!(on, On::Here(_)));
            let (true, Some(On::Here(name))) = (all, place.on.first()) else {
                return None;
            };
            entry.attached = true;
            return Some(Event::Attached {
                token: entry.like.token,
                entry: *name,
            });
        }
        if place.on.iter().any(|on| *on != On::Absent) {
            return None;
        }
        let entry = place.entry.take()?;
        self.leaving -= 1;
        // The answer to the attach was never given where it ended before all had it.
        let early = (!entry.attached).then_some(Error::ShuttingDown);
        let why = entry.refused.or(early);
        let memory = entry.shares.whole().ok()?;
        Some(Event::Detached {
            entry: Some(entry.like.with(memory)),
            why,
        })
    }
}

impl CorePort {
    /// Whether a detach that named nothing was the application's. One such answer is like another, so what counts is how many
    /// each of the two has asked for.
    const fn answers_the_application(&mut self) -> bool {
        if self.detaching > 0 {
            self.detaching -= 1;
            return true;
        }
        if self.own_detaches > 0 {
            self.own_detaches -= 1;
            return false;
        }
        true
    }
}

impl Like {
    fn split(entry: Entry<'static>) -> (Self, &'static mut PageList<'static>) {
        let like = Self {
            token: entry.token,
            portal: entry.portal,
            match_bits: entry.match_bits,
            ignore_bits: entry.ignore_bits,
            from: entry.from,
            options: entry.options,
        };
        (like, entry.memory)
    }

    fn with(self, memory: &'static mut PageList<'static>) -> Entry<'static> {
        Entry {
            token: self.token,
            portal: self.portal,
            match_bits: self.match_bits,
            ignore_bits: self.ignore_bits,
            from: self.from,
            options: self.options,
            memory,
        }
    }
}

/// Most attaches of one core that are not answered yet, on a node of several.
const MOST_ATTACHING: usize = 64;

#[cfg(test)]
mod tests {
    use super::{PollerEnds, Port};
    use crate::node::lend;
    use o2poll_dataplane::endpoint::{
        Entry, EntryOptions, Event, MatchBits, Portal, Submission, Token,
    };
    use o2poll_dataplane::memory::PageList;
    use o2poll_dataplane::pool::Handle;
    use o2poll_dataplane::wire::Nid;

    const NOTHING: Event<'static> = Event::Detached {
        entry: None,
        why: None,
    };

    /// A node of two cores, which answer by hand, and an entry that both have under these names.
    fn attached() -> (Port, [PollerEnds; 2], [Entry<'static>; 2], [Handle; 2]) {
        let (mut port, ends) = Port::new(2, 16, 2);
        let mut ends: [PollerEnds; 2] = ends.try_into().unwrap();
        let memory = lend(1, PageList::new).iter_mut().next().unwrap();
        let submission = Submission::Attach(Entry {
            token: Token(7),
            portal: Portal(60),
            match_bits: MatchBits(5),
            ignore_bits: MatchBits(0),
            from: Nid::ANY,
            options: EntryOptions::PUT,
            memory,
        });
        assert!(port.submit(submission).is_ok());
        let names = [3, 4].map(Handle::from_bits);
        let mut name = names.iter();
        let shares = ends.each_mut().map(|(submissions, events)| {
            let Some(Submission::Attach(share)) = submissions.pop() else {
                panic!("not attached");
            };
            let (token, entry) = (share.token, *name.next().unwrap());
            events.push(Event::Attached { token, entry }).unwrap();
            share
        });
        let answer = port.event();
        let named = matches!(answer, Some(Event::Attached { entry, .. }) if entry == names[0]);
        assert!(named, "{answer:?}");
        (port, ends, shares, names)
    }

    fn ended(share: Entry<'static>) -> Event<'static> {
        Event::Detached {
            entry: Some(share),
            why: None,
        }
    }

    fn gives_back(port: &mut Port) {
        let event = port.event();
        let whole = matches!(
            event,
            Some(Event::Detached {
                entry: Some(_),
                why: None
            })
        );
        assert!(whole, "{event:?}");
    }

    fn says_nothing(port: &mut Port) {
        let event = port.event();
        assert!(event.is_none(), "{event:?}");
    }

    fn says_that_nothing_was_named(port: &mut Port) {
        let event = port.event();
        let nothing = matches!(
            event,
            Some(Event::Detached {
                entry: None,
                why: None
            })
        );
        assert!(nothing, "{event:?}");
    }

    fn detached(ends: &mut PollerEnds, name: Handle) {
        let told = ends.0.pop();
        let detach = matches!(told, Some(Submission::Detach { entry }) if entry == name);
        assert!(detach, "{told:?}");
    }

    #[test]
    fn cores_that_stop_one_after_the_other_say_nothing_that_the_application_has_not_asked_for() {
        let (mut port, mut ends, [first, second], names) = attached();
        ends[0].1.push(ended(first)).unwrap();
        says_nothing(&mut port);
        // The second core has stopped as well by the time that it looks at what the port tells it.
        ends[1].1.push(ended(second)).unwrap();
        detached(&mut ends[1], names[1]);
        ends[1].1.push(NOTHING).unwrap();
        gives_back(&mut port);
        says_nothing(&mut port);
    }

    #[test]
    fn a_core_that_stops_while_the_application_detaches_is_not_heard_twice() {
        let (mut port, mut ends, [first, second], names) = attached();
        let submission = Submission::Detach { entry: names[0] };
        assert!(port.submit(submission).is_ok());
        for (ends, (share, name)) in ends.iter_mut().zip([first, second].into_iter().zip(names)) {
            // It was busy, so that its end comes behind the answer.
            detached(ends, name);
            ends.1.push(NOTHING).unwrap();
            ends.1.push(ended(share)).unwrap();
        }
        gives_back(&mut port);
        says_nothing(&mut port);
    }

    #[test]
    fn the_application_is_told_of_each_detach_of_its_own_that_named_nothing() {
        let (mut port, mut ends, [first, second], names) = attached();
        assert!(
            port.submit(Submission::Detach { entry: names[0] }).is_ok(),
            "a full ring"
        );
        for (ends, (share, name)) in ends.iter_mut().zip([first, second].into_iter().zip(names)) {
            detached(ends, name);
            ends.1.push(ended(share)).unwrap();
        }
        gives_back(&mut port);
        // By a name that is dead, twice, on either core.
        for (core, (ends, entry)) in ends.iter_mut().zip(names).enumerate() {
            for _ in 0..2 {
                let submission = Submission::Detach { entry };
                assert!(port.submit_to(core, submission).is_ok());
                detached(ends, entry);
                ends.1.push(NOTHING).unwrap();
            }
            says_that_nothing_was_named(&mut port);
            says_that_nothing_was_named(&mut port);
        }
        says_nothing(&mut port);
    }
}
