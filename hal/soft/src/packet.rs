//! What goes over the wire: one cache line less a word.
//!
//! | word | bits |
//! |---|---|
//! | 0 | opcode 8, flags 8, destination queue pair 24, source queue pair 24 |
//! | 1 | packet sequence number 32, bytes of the message from this packet on 32 |
//! | 2 | remote address |
//! | 3 | rkey 32, immediate data or key to invalidate 32 |
//! | 4, 5 | addresses of the two spans |
//! | 6 | lengths of the two spans |
//!
//! Sequence numbers are 32 bits here (24 on a real wire) and number packets per queue pair.

use o2poll_dataplane::nic::Status;
use o2poll_dataplane::ring::Message;

use crate::bytes::Span;

/// What a packet asks or says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Opcode {
    /// Part of a message.
    Send = 1,
    /// Part of an RDMA WRITE; the spans are its source.
    Write = 2,
    /// Part of an RDMA READ; the spans are its sink.
    Read = 3,
    /// Everything before the sequence number has been done.
    Ack = 4,
    /// As `Ack`, and there is no receive for the next.
    ReceiverNotReady = 5,
    /// As `Ack`, and the next was lost.
    SequenceError = 6,
    /// As `Ack`, and the next is refused: the sender's queue pair is in error.
    RefusedAccess = 7,
    /// As `RefusedAccess`: the request made no sense.
    RefusedRequest = 8,
    /// As `RefusedAccess`: the sender could not carry it out.
    RefusedOperation = 9,
    /// There is no such queue pair. Acknowledges nothing.
    Gone = 10,
    /// The sender is in error and asks to be left alone.
    Close = 11,
    /// As `Ack`, and the sender will carry out nothing of the rest: it is in error, or was asked to.
    Closed = 12,
}

impl Opcode {
    #[inline(always)]
    const fn from_bits(bits: u8) -> Option<Self> {
        Some(match bits {
            1 => Self::Send,
            2 => Self::Write,
            3 => Self::Read,
            4 => Self::Ack,
            5 => Self::ReceiverNotReady,
            6 => Self::SequenceError,
            7 => Self::RefusedAccess,
            8 => Self::RefusedRequest,
            9 => Self::RefusedOperation,
            10 => Self::Gone,
            11 => Self::Close,
            12 => Self::Closed,
            _ => return None,
        })
    }

    /// The status of the work request that is refused so.
    pub(crate) const fn verdict(self) -> Option<Status> {
        Some(match self {
            Self::RefusedAccess => Status::RemoteAccess,
            Self::RefusedRequest => Status::RemoteInvalidRequest,
            Self::RefusedOperation => Status::RemoteOperation,
            _ => return None,
        })
    }
}

bitflags::bitflags! {
    /// What is special about a packet.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Flags: u8 {
        /// The first of its message.
        const FIRST = 1;
        /// The last of its message.
        const LAST = 2;
        /// `extra` is immediate data.
        const IMMEDIATE = 4;
        /// `extra` is a key to invalidate.
        const INVALIDATE = 8;
    }
}

impl Flags {
    /// The only packet of a message that carries nothing beside its bytes.
    pub(crate) const WHOLE: Self = Self::FIRST.union(Self::LAST);
}

/// A packet. Only a device makes one: a [`Wire`](crate::Wire) may keep, drop or repeat it, and look.
///
/// It is the words that go over the wire, and what is in them is read where it stands: putting a packet together and
/// taking it apart again cost more than half of what a device does with most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet {
    opcode: Opcode,
    words: Message,
}

impl Packet {
    /// A packet without data.
    pub(crate) const fn bare(opcode: Opcode, destination: u32, source: u32, psn: u32) -> Self {
        Self {
            opcode,
            words: [
                head(opcode, Flags::empty(), Route::new(destination, source)),
                psn as u64,
                0,
                0,
                0,
                0,
                0,
            ],
        }
    }

    /// A packet with data, or for data.
    #[inline(always)]
    pub(crate) const fn request(opcode: Opcode, flags: Flags, route: Route, body: &Body) -> Self {
        let (first, second) = body.spans;
        Self {
            opcode,
            words: [
                head(opcode, flags, route),
                pair(body.psn, body.remaining),
                body.address,
                pair(body.rkey, body.extra),
                first.address(),
                second.address(),
                pair(first.length(), second.length()),
            ],
        }
    }

    /// What it asks or says.
    #[must_use]
    pub const fn opcode(&self) -> Opcode {
        self.opcode
    }

    /// What is special about it.
    #[must_use]
    pub const fn flags(&self) -> Flags {
        let [head, ..] = self.words;
        Flags::from_bits_truncate(byte(head >> 8))
    }

    /// Numbers of the queue pair it goes to and of the one it comes from.
    #[must_use]
    pub const fn queue_pairs(&self) -> (u32, u32) {
        (self.destination(), self.source())
    }

    pub(crate) const fn destination(&self) -> u32 {
        let [head, ..] = self.words;
        low(head >> 16) & NUMBER
    }

    pub(crate) const fn source(&self) -> u32 {
        let [head, ..] = self.words;
        low(head >> 40)
    }

    /// From which queue pair to which.
    pub(crate) const fn route(&self) -> Route {
        let [head, ..] = self.words;
        Route(head >> 16)
    }

    /// Packet sequence number.
    #[must_use]
    pub const fn psn(&self) -> u32 {
        let [_, order, ..] = self.words;
        low(order)
    }

    /// Remote address and key of a WRITE or READ.
    #[must_use]
    pub const fn remote(&self) -> (u64, u32) {
        let [_, _, address, keys, ..] = self.words;
        (address, low(keys))
    }

    /// Immediate data or key to invalidate, as the flags say.
    #[must_use]
    pub const fn extra(&self) -> u32 {
        let [_, _, _, keys, ..] = self.words;
        high(keys)
    }

    /// Bytes in this packet.
    #[must_use]
    pub const fn length(&self) -> u32 {
        let [.., lengths] = self.words;
        low(lengths).wrapping_add(high(lengths))
    }

    /// Bytes of the message from the start of this packet on.
    #[must_use]
    pub const fn remaining(&self) -> u32 {
        let [_, order, ..] = self.words;
        high(order)
    }

    /// Where its bytes are.
    pub(crate) const fn spans(&self) -> (Span, Span) {
        let [_, _, _, _, first, second, lengths] = self.words;
        (
            Span::of_packet(first, low(lengths)),
            Span::of_packet(second, high(lengths)),
        )
    }

    /// The one span of a packet that is a whole request in one piece; `None` for any other.
    #[inline(always)]
    pub(crate) const fn whole(&self) -> Option<Span> {
        let [head, order, _, _, first, _, lengths] = self.words;
        // One length, and so many bytes in all.
        let whole = byte(head >> 8) == Flags::WHOLE.bits() && lengths == order >> 32;
        if whole {
            Some(Span::of_packet(first, low(lengths)))
        } else {
            None
        }
    }

    #[inline(always)]
    pub(crate) const fn words(&self) -> &Message {
        &self.words
    }

    #[inline(always)]
    pub(crate) const fn from_words(words: Message) -> Option<Self> {
        let [head, ..] = words;
        match Opcode::from_bits(byte(head)) {
            Some(opcode) => Some(Self { opcode, words }),
            None => None,
        }
    }

    /// The first span of a packet in words.
    #[inline(always)]
    pub(crate) const fn first_span(words: Message) -> Span {
        let [_, _, _, _, first, _, lengths] = words;
        Span::of_packet(first, low(lengths))
    }
}

/// What a packet with data says beside where it goes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Body {
    pub(crate) psn: u32,
    /// Bytes of the message from this packet on.
    pub(crate) remaining: u32,
    pub(crate) address: u64,
    pub(crate) rkey: u32,
    pub(crate) extra: u32,
    pub(crate) spans: (Span, Span),
}

/// Numbers of the queue pair that a packet goes to and of the one it comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Route(u64);

impl Route {
    pub(crate) const fn new(destination: u32, source: u32) -> Self {
        Self((destination & NUMBER) as u64 | ((source & NUMBER) as u64) << 24)
    }

    pub(crate) const fn destination(self) -> u32 {
        low(self.0) & NUMBER
    }

    /// That of no packet.
    pub(crate) const NONE: Self = Self(u64::MAX);
}

const fn head(opcode: Opcode, flags: Flags, route: Route) -> u64 {
    opcode as u64 | (flags.bits() as u64) << 8 | route.0 << 16
}

const fn pair(first: u32, second: u32) -> u64 {
    first as u64 | (second as u64) << 32
}

#[expect(clippy::cast_possible_truncation, reason = "what it is for")]
const fn low(word: u64) -> u32 {
    word as u32
}

#[expect(clippy::cast_possible_truncation, reason = "what it is for")]
const fn byte(word: u64) -> u8 {
    word as u8
}

const fn high(word: u64) -> u32 {
    low(word >> 32)
}

/// Whether sequence number (or ring position) `a` comes before `b`, on the circle.
pub(crate) const fn before(a: u32, b: u32) -> bool {
    a.wrapping_sub(b) > u32::MAX >> 1
}

/// Queue pair numbers have 24 bits.
pub(crate) const NUMBER: u32 = 0x00ff_ffff;

#[cfg(test)]
mod tests {
    use super::{Body, Flags, Opcode, Packet, Route, Span, before};

    #[test]
    fn packets_say_what_they_were_made_of() {
        let spans = (
            Span::of_packet(0x7fff_1234_5678_9abc, 0xffff_ff00),
            Span::of_packet(0x1122_3344_5566_7788, 0x0000_0004),
        );
        let body = Body {
            psn: 0xffff_fffe,
            remaining: 0x8000_0001,
            address: u64::MAX - 5,
            rkey: 0xdead_beef,
            extra: 0x0bad_cafe,
            spans,
        };
        let route = Route::new(0xfffe_dcba, 0xff12_3456);
        let flags = Flags::FIRST | Flags::INVALIDATE;
        for opcode in (0..=255).filter_map(Opcode::from_bits) {
            let packet = Packet::request(opcode, flags, route, &body);
            assert_eq!(Packet::from_words(*packet.words()), Some(packet));
            assert_eq!((packet.opcode(), packet.flags()), (opcode, flags));
            assert_eq!(packet.queue_pairs(), (0x00fe_dcba, 0x0012_3456));
            assert_eq!(packet.route(), route);
            assert_eq!(
                (packet.psn(), packet.remaining()),
                (body.psn, body.remaining)
            );
            assert_eq!(packet.remote(), (body.address, body.rkey));
            assert_eq!(packet.extra(), body.extra);
            assert_eq!((packet.spans(), packet.length()), (spans, 0xffff_ff04));
            assert_eq!(Packet::first_span(*packet.words()), spans.0);
        }
        assert_eq!(Packet::from_words([0; 7]), None);
    }

    #[test]
    fn only_a_whole_message_in_one_span_is_whole() {
        let span = |length| Span::of_packet(64, length);
        let packet = |flags, remaining, first, second| {
            let body = Body {
                psn: 0,
                remaining,
                address: 0,
                rkey: 0,
                extra: 0,
                spans: (span(first), span(second)),
            };
            Packet::request(Opcode::Send, flags, Route::new(1, 2), &body).whole()
        };
        let whole = Flags::WHOLE;
        assert_eq!(packet(whole, 9, 9, 0), Some(span(9)));
        assert_eq!(packet(whole, 0, 0, 0), Some(span(0)));
        for other in [
            packet(Flags::FIRST, 9, 9, 0),
            packet(whole | Flags::IMMEDIATE, 9, 9, 0),
            packet(whole | Flags::INVALIDATE, 9, 9, 0),
            packet(whole, 9, 8, 0),
            packet(whole, 9, 8, 1),
            packet(whole, 9, 9, 9),
            packet(whole, 9, 0, 9),
        ] {
            assert_eq!(other, None);
        }
    }

    #[test]
    fn order_holds_across_the_wrap() {
        assert!(before(u32::MAX, 0) && before(0, 1) && !before(1, 1) && !before(0, u32::MAX));
    }
}
