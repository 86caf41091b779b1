//! The first job: a file is GET whole from a peer, PUT into a region there, and GET back.
//!
//! After each way here the bytes are hashed. Hashing, and the clearing of the sinks before the second GET (or
//! the bytes of the first would be found there again), stand outside the spans that are timed.

use o2poll_config::{CopyJob, Export, MAX_TRANSFER};
use o2poll_dataplane::endpoint::{Error, Event, MatchBits, Operation, Portal, Request, Submission};
use o2poll_dataplane::memory::{PageList, Range};
use o2poll_dataplane::time::Instant;
use o2poll_dataplane::wire::Nid;
use sha2::{Digest, Sha256};

use crate::application::Turn;
use crate::ledger::Ledger;
use crate::links::{Links, Over, Way};
use crate::measure::{CoreCounters, Span};
use crate::port::Port;

/// A SHA-256.
pub type Hash = [u8; 32];

/// Where a piece of the file is at the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    portal: Portal,
    match_bits: MatchBits,
    offset: u32,
}

/// A piece of the file that moves in one transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Chunk {
    length: u32,
    file: Place,
    into: Place,
}

/// What the job is at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// The file comes.
    Get,
    /// What has come is hashed: after the first GET (0), or the second (1).
    Hash(usize),
    /// It goes into the region.
    Put,
    /// The sinks are cleared.
    Clear,
    /// It comes back.
    Back,
    /// Nothing any more.
    Over,
}

/// The job, and what came of it.
#[derive(Debug)]
pub struct Copy {
    chunks: Vec<Chunk>,
    /// Bytes of each piece of memory, in chunks that follow each other.
    groups: Vec<usize>,
    in_flight: usize,
    data: Vec<Option<Range<'static>>>,
    began: Vec<Instant>,
    lists: Vec<&'static mut PageList<'static>>,
    /// The connection that each chunk was given to.
    over: Vec<Over>,
    /// Chunks whose transfer failed with its connection.
    again: Vec<usize>,
    peer: Nid,
    repeat: bool,
    part: Part,
    /// The chunk that is looked at next, and where in it.
    next: usize,
    within: usize,
    /// Transfers that have not ended.
    out: usize,
    hasher: Sha256,
    /// GET, PUT, GET back.
    pub spans: [Span; 3],
    /// What was asked for.
    pub expected: Hash,
    /// What came the first time, and what came back.
    pub found: [Option<Hash>; 2],
    /// The first transfer that failed.
    pub failure: Option<Error>,
    /// Transfers that failed with their connection and were made again.
    pub repeated: u64,
    /// All of them, one by one.
    pub ledger: Ledger,
    /// Bytes moved so far, of three times the file.
    pub(crate) moved: u64,
    pub(crate) length: u64,
}

impl Copy {
    /// A copy of `file` into `into`, both of one peer. Counters: of the node that runs it, and of the peer.
    pub(crate) fn new(
        job: &CopyJob,
        file: &Export,
        into: &Export,
        expected: Hash,
        counters: [CoreCounters; 2],
    ) -> Self {
        let chunks = chunks(file, into, job.transfer.clamp(1, MAX_TRANSFER));
        let in_flight = usize::try_from(job.in_flight).unwrap_or(1).max(1);
        let mut groups = Vec::new();
        for chunk in &chunks {
            let bytes = chunk.length as usize;
            match groups.last_mut() {
                Some(sum) if *sum + bytes <= GROUP => *sum += bytes,
                _ => groups.push(bytes),
            }
        }
        Self {
            groups,
            in_flight,
            over: vec![Over::default(); chunks.len()],
            again: Vec::with_capacity(in_flight),
            peer: job.peer,
            repeat: job.repeat,
            data: Vec::new(),
            began: vec![Instant::default(); chunks.len()],
            lists: Vec::new(),
            part: Part::Get,
            next: 0,
            within: 0,
            out: 0,
            hasher: Sha256::new(),
            spans: core::array::from_fn(|_| Span::new(counters)),
            expected,
            found: [None, None],
            failure: None,
            repeated: 0,
            ledger: Ledger::new(chunks.len()),
            moved: 0,
            length: file.length,
            chunks,
        }
    }

    /// Whether it did all it had to and every byte was as expected.
    #[must_use]
    pub fn is_good(&self) -> bool {
        self.failure.is_none() && self.found == [Some(self.expected); 2]
    }

    /// Bytes of each range that it needs.
    pub(crate) fn memory(&self) -> Vec<usize> {
        self.groups.clone()
    }

    /// Takes that memory.
    pub(crate) fn begin(&mut self, memory: impl Iterator<Item = Range<'static>>) {
        let mut memory = memory;
        let mut rest: Option<Range<'static>> = None;
        for chunk in &self.chunks {
            let whole = match rest.take() {
                Some(range) if range.sge().length >= chunk.length => Some(range),
                _ => memory.next(),
            };
            let taken = whole.and_then(|range| range.split_at(chunk.length).ok());
            self.data.push(taken.map(|(first, after)| {
                rest = Some(after);
                first
            }));
        }
        for _ in 0..self.in_flight.min(self.chunks.len()) {
            self.lists.push(Box::leak(Box::new(PageList::new())));
        }
    }

    /// What it is at.
    pub(crate) const fn part(&self) -> Part {
        self.part
    }

    /// One step; how much was done.
    pub(crate) fn step(
        &mut self,
        port: &mut Port,
        links: &mut Links,
        turn: Turn,
        finish: bool,
    ) -> u32 {
        match self.part {
            Part::Get => self.transfer(port, links, turn, finish, 0),
            Part::Put => self.transfer(port, links, turn, finish, 1),
            Part::Back => self.transfer(port, links, turn, finish, 2),
            Part::Hash(_) | Part::Clear if finish => {
                self.go_to(Part::Over);
                1
            }
            Part::Hash(way) => self.hash(way),
            Part::Clear => self.clear(),
            Part::Over => 0,
        }
    }

    /// Keeps `in_flight` transfers going until every chunk has moved.
    fn transfer(
        &mut self,
        port: &mut Port,
        links: &mut Links,
        turn: Turn,
        finish: bool,
        way: usize,
    ) -> u32 {
        let mut work = 0;
        while let Some(event) = port.event() {
            work += 1;
            self.ended(event, links, turn, way);
        }
        let stop = finish || self.failure.is_some();
        while !stop && self.has_more() && self.submit(port, links, turn, way) {
            work += 1;
        }
        if self.out == 0 && (stop || !self.has_more()) {
            if let Some(span) = self.spans.get_mut(way) {
                span.end(turn);
            }
            self.go_to(match way {
                _ if stop => Part::Over,
                0 => Part::Hash(0),
                1 => Part::Clear,
                _ => Part::Hash(1),
            });
            work += 1;
        }
        work
    }

    const fn has_more(&self) -> bool {
        self.next < self.chunks.len() || !self.again.is_empty()
    }

    fn submit(&mut self, port: &mut Port, links: &mut Links, turn: Turn, way: usize) -> bool {
        let index = self.again.last().copied().unwrap_or(self.next);
        let Some(chunk) = self.chunks.get(index) else {
            return false;
        };
        let over = match links.way(self.peer) {
            Way::Over(over) => over,
            Way::Wait => return false,
            // It fails at once, and that is told.
            Way::Never => Over::default(),
        };
        let Some(list) = self.lists.pop() else {
            return false;
        };
        if let Some(range) = self.data.get_mut(index).and_then(Option::take) {
            // The list is empty, so there is room.
            let _ = list.push(range);
        }
        let (place, operation) = match way {
            0 => (chunk.file, Operation::Get { optimized: true }),
            // The ACK says that the peer took it all.
            1 => (
                chunk.into,
                Operation::Put {
                    hdr_data: 0,
                    ack: true,
                },
            ),
            _ => (chunk.into, Operation::Get { optimized: true }),
        };
        let token = self.ledger.token(index);
        let request = Request {
            token,
            connection: over.connection,
            portal: place.portal,
            match_bits: place.match_bits,
            remote_offset: place.offset,
            memory: list,
            operation,
            timeout: None,
        };
        match port.submit_to(over.core, Submission::Transfer(request)) {
            Ok(()) => {
                links.begun(over);
                self.ledger.posted(token, way == 1, Some(chunk.length));
                if let Some(place) = self.over.get_mut(index) {
                    *place = over;
                }
                if let Some(began) = self.began.get_mut(index) {
                    *began = turn.now;
                }
                if let Some(span) = self.spans.get_mut(way) {
                    span.begin(turn);
                }
                if self.again.pop().is_none() {
                    self.next += 1;
                } else if over != Over::default() {
                    self.repeated += 1;
                }
                self.out += 1;
                true
            }
            Err(submission) => {
                if let Submission::Transfer(request) = submission {
                    self.take_back(index, request.memory);
                }
                false
            }
        }
    }

    fn ended(&mut self, event: Event<'static>, links: &mut Links, turn: Turn, way: usize) {
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
        self.take_back(index, memory);
        self.out = self.out.saturating_sub(1);
        let Some(began) = self.began.get(index) else {
            return;
        };
        let over = self.over.get(index).copied().unwrap_or_default();
        if links.ended(over, outcome) && self.repeat && over != Over::default() {
            self.again.push(index);
            return;
        }
        match outcome {
            Ok(bytes) => {
                self.moved = self.moved.saturating_add(bytes.into());
                if let Some(span) = self.spans.get_mut(way) {
                    span.record(way == 1, bytes, turn.now.since(*began));
                }
            }
            Err(error) => self.fail(error),
        }
    }

    fn fail(&mut self, error: Error) {
        self.failure.get_or_insert(error);
    }

    fn take_back(&mut self, index: usize, list: &'static mut PageList<'static>) {
        if let Some(place) = self.data.get_mut(index) {
            *place = list.pop();
        }
        self.lists.push(list);
    }

    fn hash(&mut self, way: usize) -> u32 {
        let Some(range) = self.data.get(self.next) else {
            let digest = self.hasher.finalize_reset();
            if let Some(found) = self.found.get_mut(way) {
                *found = Some(digest.into());
            }
            self.go_to(if way == 0 { Part::Put } else { Part::Over });
            return 1;
        };
        let bytes = range.as_ref().map_or(&[][..], Range::bytes);
        let left = bytes.get(self.within..).unwrap_or_default();
        let slice = left.get(..SLICE).unwrap_or(left);
        self.hasher.update(slice);
        self.advance(slice.len(), left.len());
        1
    }

    fn clear(&mut self) -> u32 {
        let Some(range) = self.data.get_mut(self.next) else {
            self.go_to(Part::Back);
            return 1;
        };
        let bytes = range.as_mut().map_or(&mut [][..], Range::bytes_mut);
        let left = bytes.get_mut(self.within..).unwrap_or_default();
        let length = left.len();
        let slice = left.len().min(SLICE);
        if let Some(slice) = left.get_mut(..slice) {
            // The complement: nothing of it can pass for what is to come.
            for byte in slice {
                *byte = !*byte;
            }
        }
        self.advance(slice, length);
        1
    }

    const fn advance(&mut self, done: usize, left: usize) {
        if done == left {
            self.next += 1;
            self.within = 0;
        } else {
            self.within += done;
        }
    }

    fn go_to(&mut self, part: Part) {
        self.part = part;
        self.again.clear();
        self.next = 0;
        self.within = 0;
    }
}

/// Cuts the file at every multiple of `transfer`, and where a piece of either export ends.
fn chunks(file: &Export, into: &Export, transfer: u32) -> Vec<Chunk> {
    let mut chunks = Vec::new();
    let mut offset = 0;
    while offset < file.length {
        let (from, to) = (file.locate(offset), into.locate(offset));
        let length = transfer.min(from.room).min(to.room);
        if length == 0 {
            // The file is longer than the region, which the node file's check refuses.
            break;
        }
        chunks.push(Chunk {
            length,
            file: Place {
                portal: file.portal,
                match_bits: from.match_bits,
                offset: from.offset,
            },
            into: Place {
                portal: into.portal,
                match_bits: to.match_bits,
                offset: to.offset,
            },
        });
        offset += u64::from(length);
    }
    chunks
}

/// Most bytes of one range of memory.
const GROUP: usize = 1 << 30;
/// Bytes that one step hashes or clears.
const SLICE: usize = 16 << 10;

#[cfg(test)]
mod tests {
    use super::{Copy, Portal, chunks};
    use o2poll_config::{Content, CopyJob, Export, ExportRef};
    use o2poll_dataplane::endpoint::MatchBits;
    use o2poll_dataplane::wire::Nid;

    fn export(portal: u32, length: u64, piece: u32) -> Export {
        Export {
            name: String::from("x"),
            portal: Portal(portal),
            match_bits: MatchBits(1),
            content: Content::Memory,
            length,
            piece,
            writable: true,
        }
    }

    fn copy(file: &Export, into: &Export, transfer: u32) -> Copy {
        let at = ExportRef { node: 0, export: 0 };
        let job = CopyJob {
            peer: Nid::o2ib([10, 0, 0, 1], 0),
            file: at,
            into: at,
            transfer,
            in_flight: 4,
            repeat: true,
        };
        Copy::new(&job, file, into, [7; 32], [&[], &[]])
    }

    #[test]
    fn chunks_cover_the_file_once_and_never_cross_a_piece() {
        let file = export(50, 100_000, 4096 * 3);
        let into = export(51, 200_000, 4096 * 5);
        let chunks = chunks(&file, &into, 10_000);
        let total: u64 = chunks.iter().map(|chunk| u64::from(chunk.length)).sum();
        assert_eq!(total, 100_000);
        let mut at = 0;
        for chunk in &chunks {
            for (export, place) in [(&file, chunk.file), (&into, chunk.into)] {
                let piece = (place.match_bits.0 - 1) * u64::from(export.piece);
                assert_eq!(piece + u64::from(place.offset), at);
                assert!(place.offset + chunk.length <= export.piece);
            }
            assert!(chunk.length <= 10_000);
            at += u64::from(chunk.length);
        }
    }

    #[test]
    fn memory_is_asked_for_in_ranges_that_a_descriptor_can_say() {
        let file = export(50, 5 << 30, 1 << 30);
        let copy = copy(&file, &file, 1 << 20);
        let ranges = copy.memory();
        assert_eq!(ranges.len(), 5);
        assert!(ranges.iter().all(|bytes| u32::try_from(*bytes).is_ok()));
        assert_eq!(ranges.iter().sum::<usize>(), 5 << 30);
    }

    #[test]
    fn one_wrong_byte_is_a_mismatch() {
        let file = export(50, 4096, 4096);
        let mut copy = copy(&file, &file, 4096);
        assert!(!copy.is_good(), "nothing has been hashed");
        copy.found = [Some([7; 32]), Some([7; 32])];
        assert!(copy.is_good());
        for way in 0..2 {
            let mut wrong = [7; 32];
            wrong[31] = 6;
            copy.found = [Some([7; 32]); 2];
            copy.found[way] = Some(wrong);
            assert!(!copy.is_good());
        }
        copy.found = [Some([7; 32]), None];
        assert!(!copy.is_good());
    }
}
