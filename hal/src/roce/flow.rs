//! One direction of a connection: requests as frames, and the answers to them.

use std::borrow::Cow;
use std::collections::VecDeque;

use super::{Address, BITS_24, Extension, Frame, MTU};

/// What is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// SEND.
    Send,
    /// RDMA WRITE.
    Write,
    /// RDMA READ. Only its request is shown; its bytes are not.
    Read,
}

/// Part of a message, as the device that asks cuts it: a whole one, or several of any length.
#[derive(Clone, Copy, Debug)]
pub struct Part<'b> {
    /// What is asked.
    pub verb: Verb,
    /// The parts of a flow are numbered one by one. A number that comes again is sent again.
    pub order: u32,
    /// The last of its message.
    pub last: bool,
    /// Bytes of the message from the start of this part on.
    pub remaining: u32,
    /// Remote address of this part.
    pub address: u64,
    /// Remote key.
    pub key: u32,
    /// Immediate data, on the last part.
    pub immediate: Option<u32>,
    /// Key to invalidate, on the last part.
    pub invalidate: Option<u32>,
    /// Bytes of this part.
    pub length: u32,
    /// The bytes, or the first of them where not all were kept.
    pub bytes: &'b [u8],
}

/// What is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Everything before is done.
    Acknowledged,
    /// And there is no receive for the next; try again after this (encoded as in the AETH, 5 bits).
    ReceiverNotReady(u8),
    /// And the next was lost.
    SequenceError,
    /// And the next makes no sense.
    InvalidRequest,
    /// And the next may not touch what it wants to.
    RemoteAccess,
    /// And the next could not be done.
    RemoteOperation,
}

/// Requests from one queue pair to another, and the answers to them.
#[derive(Debug)]
pub struct Flow {
    from: (Address, u32),
    to: (Address, u32),
    /// Where each part begins that is not acknowledged, and, last, where the next will.
    positions: VecDeque<Position>,
}

/// Where a part begins.
#[derive(Clone, Debug)]
struct Position {
    order: u32,
    /// Sequence number of the first frame of its message.
    psn: u32,
    /// Messages before this one.
    messages: u32,
    /// Bytes of the message before it.
    offset: usize,
    /// Those of them that did not fill a frame.
    carry: Vec<u8>,
    /// All bytes before it were kept.
    whole: bool,
}

impl Flow {
    /// From a queue pair to another (address and number). The first part has this order, and the first frame
    /// this sequence number.
    #[must_use]
    pub fn new(from: (Address, u32), to: (Address, u32), order: u32, psn: u32) -> Self {
        let start = Position {
            order,
            psn: psn & BITS_24,
            messages: 0,
            offset: 0,
            carry: Vec::new(),
            whole: true,
        };
        Self {
            from,
            to,
            positions: VecDeque::from([start]),
        }
    }

    /// Gives the frames of a part to `emit`, each with the number of its payload bytes that are known; false if
    /// a part before it is missing, or it was acknowledged already.
    pub fn part(&mut self, part: &Part<'_>, mut emit: impl FnMut(Frame<'_>, usize)) -> bool {
        let Some(at) = self.find(part.order) else {
            return false;
        };
        let total = at.offset.saturating_add(part.remaining as usize);
        let frames = total.div_ceil(MTU).max(1);
        let mut next = Position {
            order: part.order.wrapping_add(1),
            offset: at.offset.saturating_add(part.length as usize),
            carry: Vec::new(),
            whole: at.whole && part.bytes.len() == part.length as usize,
            ..*at
        };
        match part.verb {
            Verb::Read => {
                if at.offset == 0 {
                    let extensions = [remote(part, total, part.address)];
                    let frame = self.request(0x0c, at.psn, true, &extensions, &[]);
                    emit(frame, 0);
                }
            }
            Verb::Send | Verb::Write => {
                next.carry = self.frames(part, at, frames, total, &mut emit);
            }
        }
        if part.last {
            next.psn = at.psn.wrapping_add(narrow(frames)) & BITS_24;
            next.messages = at.messages.wrapping_add(1);
            next.offset = 0;
            next.carry = Vec::new();
            next.whole = true;
        }
        if self
            .positions
            .back()
            .is_some_and(|back| back.order == part.order)
        {
            self.positions.push_back(next);
        }
        true
    }

    /// The answer as it stands before the part of this order; `None` if that is not known any more.
    pub fn answer(&mut self, order: u32, answer: Answer, mut emit: impl FnMut(Frame<'_>)) -> bool {
        let Some(at) = self.find(order) else {
            return false;
        };
        let next = at.psn.wrapping_add(narrow(at.offset / MTU));
        let (psn, syndrome) = match answer {
            Answer::Acknowledged => (next.wrapping_sub(1), NO_CREDIT),
            Answer::ReceiverNotReady(timer) => (next, 0x20 | timer & 0x1f),
            Answer::SequenceError => (next, 0x60),
            Answer::InvalidRequest => (next, 0x61),
            Answer::RemoteAccess => (next, 0x62),
            Answer::RemoteOperation => (next, 0x63),
        };
        let extension = Extension::Acknowledge {
            syndrome,
            messages: at.messages,
        };
        emit(Frame {
            from: self.to.0,
            to: self.from.0,
            port: port(self.to.1, self.from.1),
            identification: 0,
            opcode: 0x11,
            queue_pair: self.from.1,
            acknowledge: false,
            psn,
            extensions: &[extension],
            payload: &[],
        });
        while self
            .positions
            .front()
            .is_some_and(|front| front.order != order)
        {
            self.positions.pop_front();
        }
        true
    }

    fn find(&self, order: u32) -> Option<&Position> {
        let first = self.positions.front()?.order;
        self.positions.get(order.wrapping_sub(first) as usize)
    }

    /// The frames of a SEND or WRITE that this part completes; what is left for the next.
    fn frames(
        &self,
        part: &Part<'_>,
        at: &Position,
        frames: usize,
        total: usize,
        emit: &mut impl FnMut(Frame<'_>, usize),
    ) -> Vec<u8> {
        let length = at.carry.len() + part.length as usize;
        let known = if at.whole {
            at.carry.len() + part.bytes.len()
        } else {
            0
        };
        let data = if at.carry.is_empty() && part.bytes.len() == part.length as usize {
            Cow::Borrowed(part.bytes)
        } else {
            let mut data = at.carry.clone();
            data.extend_from_slice(part.bytes);
            data.resize(length, 0);
            Cow::Owned(data)
        };
        let mut index = at.offset / MTU;
        let mut done = 0;
        while length - done >= MTU || (part.last && index < frames) {
            let payload = &data[done..length.min(done + MTU)];
            let (first, last) = (index == 0, index + 1 == frames);
            let mut extensions = Vec::new();
            if part.verb == Verb::Write && first {
                let before = narrow(at.offset);
                let start = part.address.wrapping_sub(u64::from(before));
                extensions.push(remote(part, total, start));
            }
            let word = if last {
                part.immediate.or(part.invalidate)
            } else {
                None
            };
            extensions.extend(word.map(Extension::Word));
            let kind = match (part.verb, word, part.invalidate) {
                (_, None, _) => Tail::Bare,
                (Verb::Send, Some(_), Some(_)) => Tail::Invalidate,
                (_, Some(_), _) => Tail::Immediate,
            };
            let base = if part.verb == Verb::Write { 6 } else { 0 };
            let opcode = match (first, last, kind) {
                (true, false, _) => base,
                (false, false, _) => base + 1,
                (false, true, Tail::Bare) => base + 2,
                (false, true, Tail::Immediate) => base + 3,
                (true, true, Tail::Bare) => base + 4,
                (true, true, Tail::Immediate) => base + 5,
                (false, true, Tail::Invalidate) => 0x16,
                (true, true, Tail::Invalidate) => 0x17,
            };
            let psn = at.psn.wrapping_add(narrow(index));
            let frame = self.request(opcode, psn, last, &extensions, payload);
            emit(frame, known.saturating_sub(done).min(payload.len()));
            done += payload.len();
            index += 1;
        }
        data[done..].to_vec()
    }

    fn request<'f>(
        &self,
        opcode: u8,
        psn: u32,
        acknowledge: bool,
        extensions: &'f [Extension],
        payload: &'f [u8],
    ) -> Frame<'f> {
        Frame {
            from: self.from.0,
            to: self.to.0,
            port: port(self.from.1, self.to.1),
            identification: 0,
            opcode,
            queue_pair: self.to.1,
            acknowledge,
            psn,
            extensions,
            payload,
        }
    }
}

/// What the last frame of a message carries besides.
#[derive(Clone, Copy)]
enum Tail {
    Bare,
    Immediate,
    Invalidate,
}

fn remote(part: &Part<'_>, total: usize, address: u64) -> Extension {
    Extension::Remote {
        address,
        key: part.key,
        length: narrow(total),
    }
}

/// The UDP source port of what a queue pair sends to another: from the dynamic range, as a card takes it.
pub(crate) const fn port(from: u32, to: u32) -> u16 {
    let mixed = from.wrapping_mul(0x9e37_79b1) ^ to.wrapping_mul(0x85eb_ca77);
    0xc000 | (mixed >> 16) as u16
}

/// A message has less than 4 GiB.
fn narrow(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

/// An acknowledgement that says nothing of receives posted.
const NO_CREDIT: u8 = 0x1f;

#[cfg(test)]
#[allow(clippy::cast_possible_truncation)]
mod tests {
    use super::super::{Address, Extension, MTU};
    use super::{Answer, Flow, Part, Verb};

    const NEAR: (Address, u32) = (Address([10, 0, 0, 1]), 0x11);
    const FAR: (Address, u32) = (Address([10, 0, 0, 2]), 0x12);

    fn bytes(count: usize) -> Vec<u8> {
        (0..count).map(|n| (n % 251) as u8).collect()
    }

    /// What a frame said: opcode, PSN, known payload, extensions.
    type Seen = (u8, u32, Vec<u8>, Vec<Extension>);

    fn send(flow: &mut Flow, part: &Part<'_>) -> Vec<Seen> {
        let mut seen = Vec::new();
        let taken = flow.part(part, |frame, known| {
            assert_eq!(frame.queue_pair, FAR.1);
            let payload = frame.payload[..known].to_vec();
            seen.push((
                frame.opcode,
                frame.psn & 0xff_ffff,
                payload,
                frame.extensions.to_vec(),
            ));
        });
        assert!(taken);
        seen
    }

    fn answer(flow: &mut Flow, order: u32, answer: Answer) -> Option<(u32, u8, u32)> {
        let mut seen = None;
        flow.answer(order, answer, |frame| {
            assert_eq!((frame.opcode, frame.queue_pair), (0x11, NEAR.1));
            let [Extension::Acknowledge { syndrome, messages }] = frame.extensions else {
                panic!("{frame:?}")
            };
            seen = Some((frame.psn & 0xff_ffff, *syndrome, *messages));
        });
        seen
    }

    const PART: Part<'static> = Part {
        verb: Verb::Write,
        order: 0,
        last: true,
        remaining: 0,
        address: 0x1000,
        key: 7,
        immediate: None,
        invalidate: None,
        length: 0,
        bytes: &[],
    };

    /// Parts of odd lengths make the frames of one message, each full but the last, whatever the cut.
    #[test]
    fn parts_of_any_length_become_full_frames_in_sequence() {
        let data = bytes(3 * MTU + 5);
        for cut in [
            vec![3 * MTU + 5],
            vec![1, 3 * MTU + 4],
            vec![MTU, MTU, MTU + 5],
            vec![MTU - 1, 2, 2 * MTU, 4],
            vec![3 * MTU + 4, 1],
        ] {
            // The sequence numbers wrap.
            let mut flow = Flow::new(NEAR, FAR, 40, 0xff_fffe);
            let mut seen = Vec::new();
            let mut at = 0;
            for (number, length) in cut.iter().enumerate() {
                let part = Part {
                    order: 40 + number as u32,
                    last: at + length == data.len(),
                    remaining: (data.len() - at) as u32,
                    address: 0x1000 + at as u64,
                    length: *length as u32,
                    bytes: &data[at..at + length],
                    ..PART
                };
                seen.extend(send(&mut flow, &part));
                at += length;
            }
            let opcodes: Vec<_> = seen
                .iter()
                .map(|(opcode, psn, ..)| (*opcode, *psn))
                .collect();
            assert_eq!(
                opcodes,
                [(6, 0xff_fffe), (7, 0xff_ffff), (7, 0), (8, 1)],
                "{cut:?}"
            );
            let payload: Vec<u8> = seen.iter().flat_map(|seen| seen.2.clone()).collect();
            assert_eq!(payload, data, "{cut:?}");
            let reth = Extension::Remote {
                address: 0x1000,
                key: 7,
                length: data.len() as u32,
            };
            assert_eq!(seen[0].3, [reth]);
            assert!(seen[1..].iter().all(|seen| seen.3.is_empty()));
            let end = 40 + cut.len() as u32;
            assert_eq!(
                answer(&mut flow, end, Answer::Acknowledged),
                Some((1, 0x1f, 1))
            );
            assert_eq!(answer(&mut flow, 40, Answer::Acknowledged), None);
        }
    }

    #[test]
    fn what_is_sent_again_has_the_same_numbers() {
        let data = bytes(2 * MTU);
        let mut flow = Flow::new(NEAR, FAR, 0, 100);
        let parts = [0, 1].map(|number: u32| Part {
            order: number,
            last: number == 1,
            remaining: if number == 0 {
                2 * MTU as u32
            } else {
                MTU as u32 + 6
            },
            length: if number == 0 {
                MTU as u32 - 6
            } else {
                MTU as u32 + 6
            },
            bytes: if number == 0 {
                &data[..MTU - 6]
            } else {
                &data[MTU - 6..]
            },
            address: if number == 0 {
                0x1000
            } else {
                0x1000 + MTU as u64 - 6
            },
            ..PART
        });
        assert_eq!(send(&mut flow, &parts[0]), []);
        let once = send(&mut flow, &parts[1]);
        assert_eq!(once.len(), 2);
        // The second part alone, and both.
        assert_eq!(send(&mut flow, &parts[1]), once);
        assert_eq!(send(&mut flow, &parts[0]), []);
        assert_eq!(send(&mut flow, &parts[1]), once);
        assert_eq!(
            answer(&mut flow, 1, Answer::SequenceError),
            Some((100, 0x60, 0))
        );
        assert_eq!(send(&mut flow, &parts[1]), once);
        let late = Part { order: 5, ..PART };
        assert!(!flow.part(&late, |_, _| panic!("a part is missing")));
    }

    #[test]
    fn every_opcode_of_a_message_that_fits_one_frame() {
        let data = bytes(10);
        let part = |verb, immediate, invalidate| Part {
            verb,
            immediate,
            invalidate,
            remaining: 10,
            length: 10,
            bytes: &data,
            ..PART
        };
        let reth = Extension::Remote {
            address: 0x1000,
            key: 7,
            length: 10,
        };
        let word = Extension::Word(9);
        for (part, opcode, extensions) in [
            (part(Verb::Send, None, None), 0x04, vec![]),
            (part(Verb::Send, Some(9), None), 0x05, vec![word]),
            (part(Verb::Send, None, Some(9)), 0x17, vec![word]),
            (part(Verb::Write, None, None), 0x0a, vec![reth]),
            (part(Verb::Write, Some(9), None), 0x0b, vec![reth, word]),
        ] {
            let mut flow = Flow::new(NEAR, FAR, 0, 0);
            let expected = (opcode, 0, data.clone(), extensions);
            assert_eq!(send(&mut flow, &part), [expected]);
        }
        let mut flow = Flow::new(NEAR, FAR, 0, 0);
        let read = part(Verb::Read, None, None);
        assert_eq!(send(&mut flow, &read), [(0x0c, 0, vec![], vec![reth])]);
        // Nothing is a frame too.
        let mut flow = Flow::new(NEAR, FAR, 0, 0);
        let empty = Part {
            verb: Verb::Send,
            ..PART
        };
        assert_eq!(send(&mut flow, &empty), [(0x04, 0, vec![], vec![])]);
    }

    #[test]
    fn refusals_name_the_frame_and_count_the_messages_before_it() {
        let mut flow = Flow::new(NEAR, FAR, 0, 9);
        for order in 0..3 {
            send(&mut flow, &Part { order, ..PART });
        }
        for (of, syndrome) in [
            (Answer::ReceiverNotReady(14), 0x2e),
            (Answer::InvalidRequest, 0x61),
            (Answer::RemoteAccess, 0x62),
            (Answer::RemoteOperation, 0x63),
        ] {
            assert_eq!(answer(&mut flow, 2, of), Some((11, syndrome, 2)));
        }
    }

    #[test]
    fn bytes_that_were_not_kept_are_not_made_up() {
        let data = bytes(100);
        let mut flow = Flow::new(NEAR, FAR, 0, 0);
        let first = Part {
            last: false,
            remaining: 2 * MTU as u32,
            length: MTU as u32,
            bytes: &data,
            ..PART
        };
        let second = Part {
            order: 1,
            remaining: MTU as u32,
            length: MTU as u32,
            bytes: &data,
            ..PART
        };
        let seen = [send(&mut flow, &first), send(&mut flow, &second)].concat();
        assert_eq!(seen[0].2, data);
        assert_eq!(seen[1].2, []);
    }
}
