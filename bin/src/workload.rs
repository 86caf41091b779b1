//! The second job: PUTs and GETs of mixed sizes for a while, each with its own slice of the peer's region and its
//! own piece of local memory.
//!
//! With verification a PUT carries a [`Pattern`] of its slot and round, and a slot remembers which rounds its slice
//! of the region consists of ([`Layers`]); what a GET brings is compared with that. Filling, clearing and comparing
//! happen in small bites between polls and outside of what is timed.

use core::time::Duration;

use o2poll_config::{self as config, Export};
use o2poll_dataplane::counters::Counters;
use o2poll_dataplane::endpoint::{
    Error, Event, MatchBits, Operation, Portal, Request, Submission, Token,
};
use o2poll_dataplane::memory::{PageList, Range};
use o2poll_dataplane::pool::Handle;
use o2poll_dataplane::time::{Instant, Ticks};

use crate::application::{Port, Turn};
use crate::measure::Span;
use crate::pattern::{Pattern, Random};

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
    slots: Vec<Slot>,
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
}

/// One transfer at a time, over and over.
#[derive(Debug)]
struct Slot {
    match_bits: MatchBits,
    /// Of its slice in that piece of the region.
    offset: u32,
    /// Its memory, cut where the sizes end: the first `n` pieces make the `n`th size.
    memory: Vec<Range<'static>>,
    list: Option<&'static mut PageList<'static>>,
    layers: Layers,
    round: u64,
    state: State,
    prepared: bool,
    /// What it does now: index of the size, and whether it is a PUT.
    size: usize,
    put: bool,
    submitted: Instant,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Idle,
    /// The source of a PUT is being written, or the sink of a GET cleared: piece, and where in it.
    Filling(usize, usize),
    Ready,
    Out,
    /// What a GET brought is being compared: piece, and where in it.
    Checking(usize, usize),
}

/// Which rounds a slice of the region consists of: the newest PUT covers its start, behind it lies the rest of
/// an older and longer one, and so on.
#[derive(Clone, Debug, Default)]
struct Layers {
    /// End and round, newest and shortest last.
    ends: Vec<(u64, u64)>,
}

impl Layers {
    /// Never more than there are sizes.
    fn with_room(sizes: usize) -> Self {
        Self {
            ends: Vec::with_capacity(sizes + 1),
        }
    }

    /// A PUT of this length has landed.
    fn put(&mut self, length: u64, round: u64) {
        while let Some((end, _)) = self.ends.last()
            && *end <= length
        {
            self.ends.pop();
        }
        self.ends.push((length, round));
    }

    /// The round that byte `at` is of, and where that ends; `None` where nothing was PUT.
    fn at(&self, at: u64) -> Option<(u64, u64)> {
        let found = self.ends.iter().rev().find(|(end, _)| at < *end)?;
        Some((found.1, found.0))
    }
}

impl Workload {
    /// A workload on a region of one peer. Counters: of the node that runs it, and of the peer.
    pub(crate) fn new(
        job: &config::Workload,
        region: &Export,
        hertz: u64,
        counters: [&'static Counters; 2],
    ) -> Result<Self, crate::Error> {
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
            return Err(crate::Error::ManySizes {
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
            round: 0,
            state: State::Idle,
            prepared: false,
            size: 0,
            put: true,
            submitted: Instant::default(),
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
            unprepared: if job.verify { slots.len() } else { 0 },
            slots,
            sizes,
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
        connection: Handle,
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
            self.ended(event, turn);
        }
        if self.unprepared == 0 && self.until.is_none() {
            self.begun = Some(turn.now);
            self.until = Some(turn.now.after(self.ticks));
            self.span.begin(turn);
        }
        let stop = finish
            || self.failed >= MOST_FAILURES
            || self.until.is_some_and(|until| turn.now >= until);
        work += self.submit_all(port, connection, turn, stop);
        work += self.bite();
        let idle = self.slots.iter().all(|slot| slot.state == State::Idle);
        if stop && idle {
            self.over = true;
            work += 1;
        }
        work
    }

    /// Gives every idle slot something to do, and submits what is ready.
    fn submit_all(&mut self, port: &mut Port, connection: Handle, turn: Turn, stop: bool) -> u32 {
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
                && self.submit(index, port, connection, turn)
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

    fn submit(&mut self, index: usize, port: &mut Port, connection: Handle, turn: Turn) -> bool {
        let Some(slot) = self.slots.get_mut(index) else {
            return false;
        };
        let Some(list) = slot.list.take() else {
            return false;
        };
        for range in slot.memory.drain(..=slot.size) {
            // At most `MOST_SIZES` pieces, so there is room.
            let _ = list.push(range);
        }
        let request = Request {
            token: Token(index as u64),
            connection,
            portal: self.portal,
            match_bits: slot.match_bits,
            remote_offset: slot.offset,
            memory: list,
            operation: if slot.put {
                Operation::Put {
                    hdr_data: slot.round,
                    ack: false,
                }
            } else {
                Operation::Get { optimized: true }
            },
            timeout: None,
        };
        slot.submitted = turn.now;
        match port.submit(Submission::Transfer(request)) {
            Ok(()) => {
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

    fn ended(&mut self, event: Event<'static>, turn: Turn) {
        let Event::Done {
            token,
            outcome,
            memory,
        } = event
        else {
            return;
        };
        let index = usize::try_from(token.0).unwrap_or(usize::MAX);
        let Some(slot) = self.slots.get_mut(index) else {
            return;
        };
        slot.take_back(memory);
        self.out = self.out.saturating_sub(1);
        let length = self.sizes.get(slot.size).copied().unwrap_or(0);
        let outcome = match outcome {
            Ok(bytes) if bytes != length => Err(Error::NoRoom),
            other => other,
        };
        let prepared = core::mem::replace(&mut slot.prepared, true);
        if !prepared && self.verify {
            self.unprepared = self.unprepared.saturating_sub(1);
        }
        slot.state = State::Idle;
        match outcome {
            Ok(bytes) => {
                if slot.put {
                    slot.layers.put(length.into(), slot.round);
                } else if self.verify {
                    slot.state = State::Checking(0, 0);
                }
                if prepared || !self.verify {
                    let latency = turn.now.since(slot.submitted);
                    self.span.record(slot.put, bytes, latency);
                    self.span.end(turn);
                }
            }
            Err(error) => {
                self.failed += 1;
                self.failure.get_or_insert(error);
            }
        }
    }

    /// Fills, clears or compares a little, of the first slot that needs it.
    fn bite(&mut self) -> u32 {
        let seed = self.seed;
        for (index, slot) in (0..).zip(&mut self.slots) {
            match slot.state {
                State::Filling(piece, within) => {
                    slot.fill(Pattern::new(seed, index, slot.round), piece, within);
                    return 1;
                }
                State::Checking(piece, within) => {
                    let wrong = slot.check(|round| Pattern::new(seed, index, round), piece, within);
                    if wrong != 0 {
                        // Counted once for each GET: what is wrong early ends the comparison.
                        slot.state = State::Idle;
                        self.wrong += 1;
                        self.wrong_bytes += wrong;
                    }
                    if slot.state == State::Idle {
                        self.verified += 1;
                    }
                    return 1;
                }
                _ => {}
            }
        }
        0
    }
}

impl Slot {
    /// The pieces come back in the order in which they were.
    fn take_back(&mut self, list: &'static mut PageList<'static>) {
        // `memory` has room: it held them before.
        let at = self.memory.len();
        while let Some(range) = list.pop() {
            self.memory.push(range);
        }
        // What was taken were the first pieces, last one first; the rest stayed behind them.
        self.memory.rotate_left(at);
        let taken = self.memory.len() - at;
        if let Some(first) = self.memory.get_mut(..taken) {
            first.reverse();
        }
        self.list = Some(list);
    }

    /// Where a piece begins in the slice.
    fn start(&self, piece: usize) -> u64 {
        let before = self.memory.iter().take(piece);
        before.map(|range| u64::from(range.sge().length)).sum()
    }

    /// One bite of the source of a PUT, or of the sink of a GET: that gets the complement of what must come, so
    /// that a GET that moves nothing is noticed.
    fn fill(&mut self, pattern: Pattern, piece: usize, within: usize) {
        let start = self.start(piece);
        let put = self.put;
        let Some(range) = self.memory.get_mut(piece) else {
            self.state = State::Ready;
            return;
        };
        // Pieces begin where a size ends, which need not be a multiple of 8.
        let skew = usize::try_from(start % 8).unwrap_or(0);
        let left = range.bytes_mut().get_mut(within..).unwrap_or_default();
        let length = left.len();
        let bite = length.min(bite_at(within, skew));
        if let Some(bytes) = left.get_mut(..bite) {
            if put {
                fill_at(pattern, start + within as u64, bytes);
            } else {
                bytes.iter_mut().for_each(|byte| *byte = !*byte);
            }
        }
        self.state = if bite < length {
            State::Filling(piece, within + bite)
        } else if piece < self.size {
            State::Filling(piece + 1, 0)
        } else {
            State::Ready
        };
    }

    /// One bite of what a GET brought; how many bytes were wrong.
    fn check(&mut self, pattern: impl Fn(u64) -> Pattern, piece: usize, within: usize) -> u64 {
        let start = self.start(piece);
        let Some(range) = self.memory.get(piece) else {
            self.state = State::Idle;
            return 0;
        };
        let left = range.bytes().get(within..).unwrap_or_default();
        let length = left.len();
        let at = start + within as u64;
        // Nothing was PUT here: nothing is known of it. Only without preparation, which there always is.
        let (round, end) = self.layers.at(at).unwrap_or((0, u64::MAX));
        let layer = usize::try_from(end - at).unwrap_or(usize::MAX);
        let bite = length.min(BITE).min(layer);
        let bytes = left.get(..bite).unwrap_or(left);
        let wrong = differences_at(pattern(round), at, bytes);
        self.state = if bite < length {
            State::Checking(piece, within + bite)
        } else if piece < self.size {
            State::Checking(piece + 1, 0)
        } else {
            State::Idle
        };
        wrong
    }
}

/// Fills from any offset on.
fn fill_at(pattern: Pattern, offset: u64, bytes: &mut [u8]) {
    let (head, rest) = split_at_word(offset, bytes.len());
    if head != 0 {
        let mut word = [0; 8];
        pattern.fill(offset - offset % 8, &mut word);
        let from = word.iter().skip(usize::try_from(offset % 8).unwrap_or(0));
        for (byte, value) in bytes.iter_mut().take(head).zip(from) {
            *byte = *value;
        }
    }
    if let Some(bytes) = bytes.get_mut(head..) {
        pattern.fill(rest, bytes);
    }
}

/// Compares from any offset on.
fn differences_at(pattern: Pattern, offset: u64, bytes: &[u8]) -> u64 {
    let (head, rest) = split_at_word(offset, bytes.len());
    let mut wrong = 0;
    if head != 0 {
        let mut word = [0; 8];
        pattern.fill(offset - offset % 8, &mut word);
        let right = word.iter().skip(usize::try_from(offset % 8).unwrap_or(0));
        wrong = bytes
            .iter()
            .take(head)
            .zip(right)
            .map(|(a, b)| u64::from(a != b))
            .sum();
    }
    wrong + pattern.differences(rest, bytes.get(head..).unwrap_or_default())
}

/// Bytes up to the next multiple of 8, and that multiple.
fn split_at_word(offset: u64, length: usize) -> (usize, u64) {
    let next = offset.next_multiple_of(8);
    let head = usize::try_from(next - offset).unwrap_or(0).min(length);
    (head, next)
}

/// A bite that ends at a multiple of 8 of the slice, where it can.
const fn bite_at(within: usize, skew: usize) -> usize {
    BITE - (within + skew) % 8
}

/// A slice of the region for each slot: match bits, and offset in that piece.
fn slices(
    region: &Export,
    largest: u32,
    in_flight: u32,
) -> Result<Vec<(MatchBits, u32)>, crate::Error> {
    let largest = largest.max(1);
    let wanted = usize::try_from(in_flight).unwrap_or(usize::MAX);
    let all = region.pieces().flat_map(|piece| {
        (0..piece.length / largest).map(move |n| (piece.match_bits, n * largest))
    });
    let slices: Vec<(MatchBits, u32)> = all.take(wanted).collect();
    if slices.len() < wanted {
        return Err(crate::Error::SmallPieces {
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
/// Bytes that one step fills or compares.
const BITE: usize = 16 << 10;
/// After so many failed transfers there is no point in going on.
const MOST_FAILURES: u64 = 100;

#[cfg(test)]
mod tests {
    use super::{BITE, Layers, Pattern, Portal, Workload, differences_at, fill_at, share, slices};
    use core::time::Duration;
    use o2poll_config::{self as config, Content, Export, ExportRef, WeightedSize};
    use o2poll_dataplane::counters::Counters;
    use o2poll_dataplane::endpoint::MatchBits;
    use o2poll_dataplane::memory::Range;
    use o2poll_dataplane::nic::LKey;
    use o2poll_dataplane::wire::Nid;

    fn region(length: u64, piece: u32) -> Export {
        Export {
            name: String::from("region"),
            portal: Portal(51),
            match_bits: MatchBits(10),
            content: Content::Memory,
            length,
            piece,
            writable: true,
        }
    }

    fn workload(sizes: &[(u32, u32)], put: f64) -> Workload {
        let counters: &'static Counters = Box::leak(Box::new(Counters::new()));
        let job = config::Workload {
            peer: Nid::o2ib([10, 0, 0, 1], 0),
            region: ExportRef { node: 0, export: 0 },
            sizes: sizes
                .iter()
                .map(|(bytes, weight)| WeightedSize {
                    bytes: *bytes,
                    weight: *weight,
                })
                .collect(),
            put,
            in_flight: 2,
            duration: Duration::from_secs(1),
            verify: true,
            seed: 1,
        };
        let mut workload =
            Workload::new(&job, &region(1 << 20, 1 << 20), 1000, [counters, counters]).unwrap();
        let ranges = workload.memory();
        workload.begin(ranges.into_iter().map(|bytes| {
            let bytes: &'static mut [u8] = vec![0; bytes].leak();
            Range::of_bytes(bytes, LKey(0)).unwrap()
        }));
        workload
    }

    #[test]
    fn slices_are_disjoint_and_inside_one_piece() {
        let region = region(4096 * 10, 4096 * 4);
        let slices = slices(&region, 4096 * 3, 3).unwrap_err();
        assert!(slices.to_string().contains("larger piece"), "{slices}");
        let region = super::tests::region(4096 * 12, 4096 * 4);
        let slices = super::slices(&region, 4096 * 2, 6).unwrap();
        let mut places: Vec<u64> = slices
            .iter()
            .map(|(bits, offset)| (bits.0 - 10) * 4096 * 4 + u64::from(*offset))
            .collect();
        places.dedup();
        assert_eq!(places, [0, 8192, 16384, 24576, 32768, 40960]);
    }

    #[test]
    fn layers_tell_which_round_each_byte_is_of() {
        let mut layers = Layers::with_room(3);
        layers.put(100, 1);
        layers.put(10, 2);
        layers.put(50, 3);
        layers.put(20, 4);
        assert_eq!(layers.at(0), Some((4, 20)));
        assert_eq!(layers.at(19), Some((4, 20)));
        assert_eq!(layers.at(20), Some((3, 50)));
        assert_eq!(layers.at(99), Some((1, 100)));
        assert_eq!(layers.at(100), None);
        layers.put(100, 5);
        assert_eq!(layers.at(0), Some((5, 100)));
        assert!(layers.ends.len() <= 3);
    }

    #[test]
    fn any_offset_fills_and_compares_alike() {
        let pattern = Pattern::new(1, 1, 1);
        let mut whole = [0; 200];
        pattern.fill(0, &mut whole);
        for start in 0..40_usize {
            for length in 0..40 {
                let mut bytes = vec![0; length];
                fill_at(pattern, start as u64, &mut bytes);
                assert_eq!(bytes, whole[start..start + length], "{start} {length}");
                assert_eq!(differences_at(pattern, start as u64, &bytes), 0);
                for at in 0..length {
                    bytes[at] ^= 0x80;
                    assert_eq!(differences_at(pattern, start as u64, &bytes), 1);
                    bytes[at] ^= 0x80;
                }
            }
        }
    }

    /// The whole way of one slot without a network: what is PUT is kept in an array, and GET from it.
    #[test]
    fn what_was_put_is_found_again_and_a_wrong_byte_is_noticed() {
        let sizes = [(13, 1), (4099, 1), (40_000, 1)];
        let mut workload = workload(&sizes, 0.5);
        let mut far = vec![0_u8; 40_000];
        let seed = workload.seed;
        let pattern = |round| Pattern::new(seed, 0, round);
        let (mut gets, mut spoiled) = (0, 0);
        for step in 0..300 {
            workload.choose(0);
            let slot = &mut workload.slots[0];
            while let super::State::Filling(piece, within) = slot.state {
                slot.fill(pattern(slot.round), piece, within);
            }
            let length = workload.sizes[slot.size] as usize;
            let mut at = 0;
            for range in slot.memory.iter_mut().take(slot.size + 1) {
                let bytes = range.bytes_mut();
                let there = &mut far[at..at + bytes.len()];
                if slot.put {
                    there.copy_from_slice(bytes);
                } else {
                    bytes.copy_from_slice(there);
                }
                at += bytes.len();
            }
            assert_eq!(at, length);
            slot.prepared = true;
            if slot.put {
                slot.layers.put(length as u64, slot.round);
                continue;
            }
            gets += 1;
            let spoil = step % 3 == 0;
            if spoil {
                let at = step * 7 % slot.memory[0].bytes().len();
                slot.memory[0].bytes_mut()[at] ^= 1;
            }
            slot.state = super::State::Checking(0, 0);
            let mut wrong = 0;
            while let super::State::Checking(piece, within) = slot.state {
                wrong += slot.check(pattern, piece, within);
            }
            assert_eq!(wrong, u64::from(spoil), "step {step}");
            spoiled += u64::from(spoil);
        }
        assert!(gets > 50 && spoiled > 10, "{gets} {spoiled}");
    }

    #[test]
    fn a_get_that_moves_nothing_is_noticed() {
        let mut workload = workload(&[(4096, 1)], 0.0);
        let seed = workload.seed;
        let pattern = |round| Pattern::new(seed, 0, round);
        workload.choose(0);
        let slot = &mut workload.slots[0];
        assert!(slot.put, "the first is a PUT, whatever the share");
        for _ in 0..2 {
            while let super::State::Filling(piece, within) = slot.state {
                slot.fill(pattern(slot.round), piece, within);
            }
            slot.layers.put(4096, slot.round);
            slot.put = false;
            slot.state = super::State::Filling(0, 0);
        }
        slot.state = super::State::Checking(0, 0);
        assert_eq!(slot.check(pattern, 0, 0), 4096);
    }

    #[test]
    fn memory_comes_back_in_its_order() {
        let mut workload = workload(&[(8, 1), (16, 1), (BITE as u32, 1)], 1.0);
        let slot = &mut workload.slots[0];
        let places = |slot: &super::Slot| -> Vec<u64> {
            slot.memory
                .iter()
                .map(|range| range.sge().address)
                .collect()
        };
        let before = places(slot);
        for size in 0..3 {
            let list = slot.list.take().unwrap();
            for range in slot.memory.drain(..=size) {
                list.push(range).unwrap();
            }
            slot.take_back(list);
            assert_eq!(places(slot), before, "{size}");
        }
    }

    #[test]
    fn sizes_are_drawn_by_their_weights_and_puts_by_their_share() {
        let mut workload = workload(&[(64, 3), (4096, 1), (64, 2)], 0.25);
        assert_eq!(workload.sizes, [64, 4096]);
        for slot in &mut workload.slots {
            slot.prepared = true;
        }
        let (mut small, mut puts) = (0, 0);
        for _ in 0..6000 {
            workload.choose(0);
            small += u32::from(workload.slots[0].size == 0);
            puts += u32::from(workload.slots[0].put);
        }
        assert!((4800..5200).contains(&small), "{small}");
        assert!((1350..1650).contains(&puts), "{puts}");
        assert_eq!(share(0.0), 0);
        assert_eq!(share(1.0), 1 << 32);
    }

    #[test]
    fn the_same_seed_draws_the_same() {
        let draw = || {
            let mut workload = workload(&[(64, 3), (4096, 1)], 0.5);
            let mut seen = Vec::new();
            for _ in 0..100 {
                workload.slots[0].prepared = true;
                workload.choose(0);
                seen.push((workload.slots[0].size, workload.slots[0].put));
            }
            seen
        };
        assert_eq!(draw(), draw());
    }
}
