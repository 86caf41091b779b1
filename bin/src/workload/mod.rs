//! The second job: PUTs and GETs of mixed sizes for a while, each with its own slice of the peer's region and its
//! own piece of local memory.
//!
//! With verification a PUT carries a `Pattern` of its slot and round, and a slot remembers which rounds its slice
//! of the region consists of (`Layers`); what a GET brings is compared with that. Filling, clearing and comparing
//! happen in small bites between polls and outside of what is timed.

mod slot;
#[cfg(test)]
mod tests;

use core::time::Duration;

use o2poll_config::{self as config, Export};
use o2poll_dataplane::endpoint::{Error, Event, MatchBits, Operation, Portal, Request, Submission};
use o2poll_dataplane::memory::{PageList, Range};
use o2poll_dataplane::time::{Instant, Ticks};
use o2poll_dataplane::wire::Nid;

use crate::application::Turn;
use crate::ledger::Ledger;
use crate::links::{Links, Over, Way};
use crate::measure::{CoreCounters, Span};
use crate::pattern::{Pattern, Random};
use crate::port::Port;
use slot::{Layers, Slot, State};

/// The job, and what came of it.
#[derive(Debug)]
pub struct Workload {
    portal: Portal,
    /// Different sizes, ascending.
    sizes: Vec<u32>,
    /// Up to which sum of weights each size goes, in the order of `sizes`.
    weights: Vec<u64>,
    /// PUTs out of 2^32.
    put: u64,
    duration: Duration,
    ticks: Ticks,
    seed: u64,
    random: Random,
    verify: bool,
    /// Whether PUTs ask for an ACK.
    ack: bool,
    slots: Vec<Slot>,
    /// The slot that is filled or compared next.
    biting: usize,
    until: Option<Instant>,
    begun: Option<Instant>,
    over: bool,
    /// Transfers that have not ended.
    out: usize,
    /// The slots are prepared before the clock starts.
    unprepared: usize,
    /// Everything that was timed.
    pub span: Span,
    /// GETs that were compared.
    pub verified: u64,
    /// GETs that brought a wrong byte.
    pub wrong: u64,
    /// Bytes that were wrong.
    pub wrong_bytes: u64,
    /// Transfers that failed.
    pub failed: u64,
    /// The first of them.
    pub failure: Option<Error>,
    /// PUTs that ended well and are not timed: they fill a slice before it is read.
    pub fills: u64,
    /// Transfers that failed with their connection and were made again.
    pub repeated: u64,
    /// All of them, one by one, those too that are not timed.
    pub ledger: Ledger,
    /// The incarnation of the peer.
    incarnation: Option<u64>,
    repeat: bool,
    peer: Nid,
}

impl Workload {
    /// A workload on a region of one peer. Counters: of the node that runs it, and of the peer.
    pub(crate) fn new(
        job: &config::Workload,
        region: &Export,
        hertz: u64,
        counters: [CoreCounters; 2],
    ) -> Result<Self, crate::NodeError> {
        let mut sorted: Vec<(u32, u64)> = job
            .sizes
            .iter()
            .map(|size| (size.bytes, u64::from(size.weight)))
            .collect();
        sorted.sort_unstable();
        sorted.dedup_by(|later, kept| {
            let same = later.0 == kept.0;
            if same {
                kept.1 += later.1;
            }
            same
        });
        if sorted.len() > MOST_SIZES {
            return Err(crate::NodeError::ManySizes {
                given: sorted.len(),
                most: MOST_SIZES,
            });
        }
        let mut sum = 0;
        let weights = sorted
            .iter()
            .map(|(_, weight)| {
                sum += weight;
                sum
            })
            .collect();
        let sizes: Vec<u32> = sorted.iter().map(|(bytes, _)| *bytes).collect();
        let places = slices(region, job.largest(), job.in_flight)?;
        let slots = places.into_iter().map(|(match_bits, offset)| Slot {
            match_bits,
            offset,
            memory: Vec::with_capacity(sizes.len()),
            list: Some(Box::leak(Box::new(PageList::new()))),
            layers: Layers::with_room(sizes.len()),
            reborn: false,
            round: 0,
            state: State::Idle,
            prepared: false,
            size: 0,
            put: true,
            submitted: Instant::default(),
            over: Over::default(),
            again: false,
        });
        let slots: Vec<Slot> = slots.collect();
        Ok(Self {
            portal: region.portal,
            weights,
            put: share(job.put),
            duration: job.duration,
            ticks: Ticks(ticks(job.duration, hertz)),
            seed: job.seed,
            random: Random::new(job.seed),
            verify: job.verify,
            // Without one a PUT is over when its message has arrived, and a GET to another core of the peer may
            // read the slice before the first core has taken it.
            ack: job.verify && counters[1].len() > 1,
            unprepared: if job.verify { slots.len() } else { 0 },
            ledger: Ledger::new(slots.len()),
            incarnation: None,
            slots,
            sizes,
            biting: 0,
            until: None,
            begun: None,
            over: false,
            out: 0,
            span: Span::new(counters),
            verified: 0,
            wrong: 0,
            wrong_bytes: 0,
            failed: 0,
            failure: None,
            fills: 0,
            repeated: 0,
            repeat: job.repeat,
            peer: job.peer,
        })
    }

    /// Whether every transfer ended well and every byte that was compared was right.
    #[must_use]
    pub const fn is_good(&self) -> bool {
        self.failed == 0 && self.wrong == 0
    }

    /// Whether what comes back is compared.
    #[must_use]
    pub const fn verifies(&self) -> bool {
        self.verify
    }

    /// How long it was to run.
    #[must_use]
    pub const fn duration(&self) -> Duration {
        self.duration
    }

    /// Bytes of each range that it needs.
    pub(crate) fn memory(&self) -> Vec<usize> {
        let largest = self.sizes.last().map_or(0, |bytes| *bytes as usize);
        vec![largest; self.slots.len()]
    }

    /// Takes that memory.
    pub(crate) fn begin(&mut self, memory: impl Iterator<Item = Range<'static>>) {
        for (slot, whole) in self.slots.iter_mut().zip(memory) {
            let (mut rest, mut cut) = (Some(whole), 0);
            for size in &self.sizes {
                let piece = rest
                    .take()
                    .and_then(|range| range.split_at(size - cut).ok());
                if let Some((first, after)) = piece {
                    slot.memory.push(first);
                    rest = Some(after);
                    cut = *size;
                }
            }
        }
    }

    /// A connection is up, with this incarnation of the peer. Another than before has a region of its own, which is clear: what
    /// was PUT into the old one has died with it.
    pub(crate) fn met(&mut self, incarnation: u64) {
        let before = self.incarnation.replace(incarnation);
        if before.is_some_and(|before| before != incarnation) {
            for slot in &mut self.slots {
                slot.reborn = true;
                slot.begin_anew();
            }
        }
    }

    /// Whether there is nothing left to do.
    pub(crate) const fn is_over(&self) -> bool {
        self.over
    }

    /// Milliseconds since the clock started, and how many there will be.
    pub(crate) fn clock(&self, now: Instant) -> (u64, u64) {
        let since = self.begun.map_or(Ticks(0), |begun| now.since(begun));
        let total = self.duration.as_millis();
        let done = u128::from(since.0) * total / u128::from(self.ticks.0.max(1));
        let narrow = |millis: u128| u64::try_from(millis).unwrap_or(u64::MAX);
        (narrow(done.min(total)), narrow(total))
    }

    /// One step; how much was done.
    pub(crate) fn step(
        &mut self,
        port: &mut Port,
        links: &mut Links,
        turn: Turn,
        finish: bool,
    ) -> u32 {
        if self.over {
            return 0;
        }
        let mut work = 0;
        // Whatever has ended is timed before anything slow is done.
        while let Some(event) = port.event() {
            work += 1;
            self.ended(event, links, turn);
        }
        if self.unprepared == 0 && self.until.is_none() {
            self.begun = Some(turn.now);
            self.until = Some(turn.now.after(self.ticks));
            self.span.begin(turn);
        }
        let stop = finish
            || self.failed >= MOST_FAILURES
            || self.until.is_some_and(|until| turn.now >= until);
        work += self.submit_all(port, links, turn, stop);
        work += self.bite();
        let idle = self.slots.iter().all(|slot| slot.state == State::Idle);
        if stop && idle {
            self.over = true;
            work += 1;
        }
        work
    }

    /// Gives every idle slot something to do, and submits what is ready.
    fn submit_all(&mut self, port: &mut Port, links: &mut Links, turn: Turn, stop: bool) -> u32 {
        let mut work = 0;
        for index in 0..self.slots.len() {
            let Some(slot) = self.slots.get(index) else {
                break;
            };
            match slot.state {
                State::Idle if stop => {}
                // The others wait until all are prepared, so that the clock sees only the mix.
                State::Idle if slot.prepared && self.unprepared != 0 => {}
                State::Idle => {
                    self.choose(index);
                    work += 1;
                }
                // Nothing that has not begun is begun any more.
                State::Filling(..) | State::Ready if stop => self.rest(index),
                State::Filling(..) | State::Out | State::Checking(..) => {}
                State::Ready => {}
            }
            if self
                .slots
                .get(index)
                .is_some_and(|slot| slot.state == State::Ready)
                && self.submit(index, port, links, turn)
            {
                work += 1;
            }
        }
        work
    }

    fn rest(&mut self, index: usize) {
        if let Some(slot) = self.slots.get_mut(index) {
            slot.state = State::Idle;
        }
    }

    /// Chooses what a slot does next. The first of a verified slot is a PUT of the largest size, not timed, so
    /// that there is something to compare with.
    fn choose(&mut self, index: usize) {
        let prepares = self.verify && self.slots.get(index).is_some_and(|slot| !slot.prepared);
        let (size, put) = if prepares {
            (self.sizes.len().saturating_sub(1), true)
        } else {
            let most = self.weights.last().copied().unwrap_or(1).max(1);
            let drawn = self.random.below(most);
            let size = self.weights.partition_point(|sum| *sum <= drawn);
            let put = self.random.next() >> 32 < self.put;
            (size, put)
        };
        if let Some(slot) = self.slots.get_mut(index) {
            slot.again = false;
            slot.size = size;
            slot.put = put;
            slot.round += u64::from(put);
            slot.state = if self.verify {
                State::Filling(0, 0)
            } else {
                State::Ready
            };
        }
    }

    fn submit(&mut self, index: usize, port: &mut Port, links: &mut Links, turn: Turn) -> bool {
        let Some(slot) = self.slots.get_mut(index) else {
            return false;
        };
        let over = match links.way(self.peer) {
            Way::Over(over) => over,
            Way::Wait => return false,
            // It fails at once, and that is told.
            Way::Never => Over::default(),
        };
        let Some(list) = slot.list.take() else {
            return false;
        };
        for range in slot.memory.drain(..=slot.size) {
            // At most `MOST_SIZES` pieces, so there is room.
            let _ = list.push(range);
        }
        let token = self.ledger.token(index);
        let request = Request {
            token,
            connection: over.connection,
            portal: self.portal,
            match_bits: slot.match_bits,
            remote_offset: slot.offset,
            memory: list,
            operation: if slot.put {
                Operation::Put {
                    hdr_data: slot.round,
                    ack: self.ack,
                }
            } else {
                Operation::Get { optimized: true }
            },
            timeout: None,
        };
        slot.submitted = turn.now;
        match port.submit_to(over.core, Submission::Transfer(request)) {
            Ok(()) => {
                links.begun(over);
                let length = self.sizes.get(slot.size).copied();
                self.ledger.posted(token, slot.put, length);
                slot.over = over;
                if core::mem::take(&mut slot.again) && over != Over::default() {
                    self.repeated += 1;
                }
                slot.state = State::Out;
                self.out += 1;
                true
            }
            Err(submission) => {
                if let Submission::Transfer(request) = submission {
                    slot.take_back(request.memory);
                }
                false
            }
        }
    }

    /// How many transfers have failed, and the first error: those too that failed with their connection and that the end
    /// came before they were made again.
    #[must_use]
    pub fn failures(&self) -> Option<(u64, Error)> {
        let left = self.slots.iter().filter(|slot| slot.again).count();
        let failed = self.failed + left as u64;
        (failed != 0).then(|| (failed, self.failure.unwrap_or(Error::ConnectionClosed)))
    }

    fn ended(&mut self, event: Event<'static>, links: &mut Links, turn: Turn) {
        let Event::Done {
            token,
            outcome,
            memory,
        } = event
        else {
            return;
        };
        let Some((index, outcome)) = self.ledger.ended(token, outcome) else {
            return;
        };
        let Some(slot) = self.slots.get_mut(index) else {
            return;
        };
        slot.take_back(memory);
        self.out = self.out.saturating_sub(1);
        if links.ended(slot.over, outcome) && self.repeat && slot.over != Over::default() {
            // The source of a PUT is as it was, and what is in the sink of a GET is right or still cleared.
            slot.state = State::Ready;
            slot.again = true;
            slot.begin_anew();
            return;
        }
        let prepared = core::mem::replace(&mut slot.prepared, true);
        if !prepared && self.verify {
            self.unprepared = self.unprepared.saturating_sub(1);
        }
        slot.state = State::Idle;
        match outcome {
            Ok(bytes) => {
                if slot.put {
                    slot.layers.put(bytes.into(), slot.round);
                } else if self.verify {
                    slot.state = State::Checking(0, 0);
                }
                if prepared || !self.verify {
                    let latency = turn.now.since(slot.submitted);
                    self.span.record(slot.put, bytes, latency);
                    self.span.end(turn);
                } else {
                    self.fills += 1;
                }
            }
            Err(error) => {
                // Nobody knows how much of a PUT has landed: its slice is written anew before it is read.
                slot.prepared &= !slot.put;
                self.failed += 1;
                self.failure.get_or_insert(error);
            }
        }
        slot.begin_anew();
    }

    /// Fills, clears or compares a little: of one slot until that is done, then of the next.
    fn bite(&mut self) -> u32 {
        let count = self.slots.len();
        for _ in 0..count {
            let index = self.biting;
            if self.bite_of(index) {
                return 1;
            }
            self.biting = if index + 1 < count { index + 1 } else { 0 };
        }
        0
    }

    /// A bite of one slot, if it needs one.
    fn bite_of(&mut self, index: usize) -> bool {
        let seed = self.seed;
        let Some(slot) = self.slots.get_mut(index) else {
            return false;
        };
        let pattern = |round| Pattern::new(seed, index as u64, round);
        match slot.state {
            State::Filling(piece, within) => slot.fill(pattern(slot.round), piece, within),
            State::Checking(piece, within) => {
                let wrong = slot.check(pattern, piece, within);
                if wrong != 0 {
                    // Counted once for each GET: what is wrong early ends the comparison.
                    slot.state = State::Idle;
                    self.wrong += 1;
                    self.wrong_bytes += wrong;
                }
                if slot.state == State::Idle {
                    self.verified += 1;
                    slot.begin_anew();
                }
            }
            State::Idle | State::Ready | State::Out => return false,
        }
        true
    }
}

/// A slice of the region for each slot: match bits, and offset in that piece.
fn slices(
    region: &Export,
    largest: u32,
    in_flight: u32,
) -> Result<Vec<(MatchBits, u32)>, crate::NodeError> {
    let largest = largest.max(1);
    let wanted = usize::try_from(in_flight).unwrap_or(usize::MAX);
    let all = region.pieces().flat_map(|piece| {
        (0..piece.length / largest).map(move |n| (piece.match_bits, n * largest))
    });
    let slices: Vec<(MatchBits, u32)> = all.take(wanted).collect();
    if slices.len() < wanted {
        return Err(crate::NodeError::SmallPieces {
            export: region.name.clone(),
            piece: region.piece,
            room: slices.len(),
            largest,
            in_flight,
        });
    }
    Ok(slices)
}

/// A share out of 2^32.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "between 0 and 2^32"
)]
fn share(part: f64) -> u64 {
    (part.clamp(0.0, 1.0) * 4_294_967_296.0) as u64
}

fn ticks(span: Duration, hertz: u64) -> u64 {
    let ticks = span.as_nanos() * u128::from(hertz) / 1_000_000_000;
    u64::try_from(ticks).unwrap_or(u64::MAX)
}

/// A page list has 257 places.
const MOST_SIZES: usize = 256;
/// After so many failed transfers there is no point in going on.
const MOST_FAILURES: u64 = 100;
