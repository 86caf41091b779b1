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

/// A packet. Only a device makes one: a [`Wire`](crate::Wire) may keep, drop or repeat it, and look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet {
    pub(crate) opcode: Opcode,
    pub(crate) flags: Flags,
    pub(crate) destination: u32,
    pub(crate) source: u32,
    pub(crate) psn: u32,
    pub(crate) remaining: u32,
    pub(crate) address: u64,
    pub(crate) rkey: u32,
    pub(crate) extra: u32,
    pub(crate) spans: (Span, Span),
}

impl Packet {
    /// A packet without data.
    pub(crate) const fn bare(opcode: Opcode, destination: u32, source: u32, psn: u32) -> Self {
        Self {
            opcode,
            flags: Flags::empty(),
            destination,
            source,
            psn,
            remaining: 0,
            address: 0,
            rkey: 0,
            extra: 0,
            spans: (Span::EMPTY, Span::EMPTY),
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
        self.flags
    }

    /// Numbers of the queue pair it goes to and of the one it comes from.
    #[must_use]
    pub const fn queue_pairs(&self) -> (u32, u32) {
        (self.destination, self.source)
    }

    /// Packet sequence number.
    #[must_use]
    pub const fn psn(&self) -> u32 {
        self.psn
    }

    /// Remote address and key of a WRITE or READ.
    #[must_use]
    pub const fn remote(&self) -> (u64, u32) {
        (self.address, self.rkey)
    }

    /// Immediate data or key to invalidate, as the flags say.
    #[must_use]
    pub const fn extra(&self) -> u32 {
        self.extra
    }

    /// Bytes in this packet.
    #[must_use]
    pub const fn length(&self) -> u32 {
        self.spans.0.length().wrapping_add(self.spans.1.length())
    }

    /// Bytes of the message from the start of this packet on.
    #[must_use]
    pub const fn remaining(&self) -> u32 {
        self.remaining
    }

    #[inline]
    pub(crate) fn to_words(self) -> Message {
        [
            u64::from(self.opcode as u8)
                | u64::from(self.flags.bits()) << 8
                | u64::from(self.destination & NUMBER) << 16
                | u64::from(self.source & NUMBER) << 40,
            u64::from(self.psn) | u64::from(self.remaining) << 32,
            self.address,
            u64::from(self.rkey) | u64::from(self.extra) << 32,
            self.spans.0.address(),
            self.spans.1.address(),
            u64::from(self.spans.0.length()) | u64::from(self.spans.1.length()) << 32,
        ]
    }

    /// The first span of a packet in words.
    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "as in `from_words`")]
    pub(crate) const fn first_span(words: Message) -> Span {
        let [_, _, _, _, first, _, lengths] = words;
        Span::of_packet(first, lengths as u32)
    }

    #[inline]
    #[expect(
        clippy::cast_possible_truncation,
        reason = "fields are cut out of words"
    )]
    pub(crate) const fn from_words(words: Message) -> Option<Self> {
        let [head, order, address, keys, first, second, lengths] = words;
        let Some(opcode) = Opcode::from_bits(head as u8) else {
            return None;
        };
        Some(Self {
            opcode,
            flags: Flags::from_bits_truncate((head >> 8) as u8),
            destination: (head >> 16) as u32 & NUMBER,
            source: (head >> 40) as u32,
            psn: order as u32,
            remaining: (order >> 32) as u32,
            address,
            rkey: keys as u32,
            extra: (keys >> 32) as u32,
            spans: (
                Span::of_packet(first, lengths as u32),
                Span::of_packet(second, (lengths >> 32) as u32),
            ),
        })
    }
}

/// Whether sequence number (or ring position) `a` comes before `b`, on the circle.
pub(crate) const fn before(a: u32, b: u32) -> bool {
    a.wrapping_sub(b) > u32::MAX >> 1
}

/// Queue pair numbers have 24 bits.
pub(crate) const NUMBER: u32 = 0x00ff_ffff;

#[cfg(test)]
mod tests {
    use super::{Flags, Opcode, Packet, Span, before};

    #[test]
    fn packets_round_trip_through_words() {
        for opcode in (0..=255).filter_map(Opcode::from_bits) {
            let packet = Packet {
                opcode,
                flags: Flags::FIRST | Flags::INVALIDATE,
                destination: 0x00fe_dcba,
                source: 0x0012_3456,
                psn: 0xffff_fffe,
                remaining: 0x8000_0001,
                address: u64::MAX - 5,
                rkey: 0xdead_beef,
                extra: 0x0bad_cafe,
                spans: (
                    Span::of_packet(0x7fff_1234_5678_9abc, 0xffff_ffff),
                    Span::of_packet(0x1122_3344_5566_7788, 0x0102_0304),
                ),
            };
            assert_eq!(Packet::from_words(packet.to_words()), Some(packet));
        }
        assert_eq!(Packet::from_words([0; 7]), None);
    }

    #[test]
    fn order_holds_across_the_wrap() {
        assert!(before(u32::MAX, 0) && before(0, 1) && !before(1, 1) && !before(0, u32::MAX));
    }
}
