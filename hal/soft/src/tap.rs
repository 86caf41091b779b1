//! A tap on a wire: what is sent is copied, with its bytes, towards a thread that keeps it.
//!
//! A [`Tap`] stands around a [`Wire`] and looks at the sending side of its device. What passes goes into a ring
//! of [`Chunk`]s that somebody lent, and comes out of the [`Reader`] at its other end. The copy is complete: a
//! full ring is a full wire, so the device waits (as on a slow link) and nothing is missed. Without a
//! [`Recorder`] a tap costs one branch per packet.
//!
//! # Order
//! The taps of a fabric share one counter. A packet's [`order`](Passed::order) is drawn before it is sent, so a
//! packet that answers another has the greater number, whatever cores they were sent on. Every number that was
//! drawn comes out of some reader; one whose packet found the wire full comes out with no packet.

use core::sync::atomic::{AtomicU64, Ordering};

use o2poll_dataplane::ring::{Consumer, Indices, Producer, Slot, index_ring};

use crate::bytes::{Pair, read_out};
use crate::packet::{Flags, Opcode, Packet};
use crate::wire::Wire;

/// Reads time, in ticks of whoever makes the tap.
pub trait Timer {
    /// Now.
    fn now(&self) -> u64;
}

/// A [`Wire`] with an ear on it.
#[derive(Debug)]
pub struct Tap<'t, W, T> {
    wire: W,
    recorder: Option<Recorder<'t, T>>,
}

impl<'t, W, T> Tap<'t, W, T> {
    /// The wire as it is.
    #[must_use]
    pub const fn off(wire: W) -> Self {
        Self {
            wire,
            recorder: None,
        }
    }

    /// The wire, and what is sent on it is recorded.
    #[must_use]
    pub const fn on(wire: W, recorder: Recorder<'t, T>) -> Self {
        Self {
            wire,
            recorder: Some(recorder),
        }
    }

    /// The wire itself.
    pub const fn wire(&mut self) -> &mut W {
        &mut self.wire
    }
}

impl<W: Wire, T: Timer> Wire for Tap<'_, W, T> {
    fn ports(&self) -> u16 {
        self.wire.ports()
    }

    #[inline]
    fn send(&mut self, port: u16, packet: &Packet) -> bool {
        match &mut self.recorder {
            None => self.wire.send(port, packet),
            Some(recorder) => recorder.send(&mut self.wire, port, packet),
        }
    }

    #[inline]
    fn peek(&mut self, port: u16) -> Option<Packet> {
        self.wire.peek(port)
    }

    #[inline]
    fn prefetch(&mut self, port: u16) {
        self.wire.prefetch(port);
    }

    #[inline]
    fn pop(&mut self, port: u16) {
        self.wire.pop(port);
    }

    fn step(&mut self) {
        self.wire.step();
    }
}

/// The writing end of a tap.
#[derive(Debug)]
pub struct Recorder<'t, T> {
    chunks: Producer<'t, Chunk>,
    order: &'t AtomicU64,
    timer: T,
    /// Most bytes of one packet that are kept, so that each fits into an empty ring.
    most: u32,
}

/// Makes both ends of a tap; `None` unless the slots are a power of two, at least 2. Of a packet that has more
/// bytes than fit into the ring ([`CHUNK_BYTES`] to a slot, one slot less) only the first are kept.
#[must_use]
pub fn recorder<'t, T>(
    indices: &'t mut Indices,
    slots: &'t mut [Slot<Chunk>],
    order: &'t AtomicU64,
    timer: T,
) -> Option<(Recorder<'t, T>, Reader<'t>)> {
    let room = slots.len().checked_sub(1).filter(|room| *room != 0)?;
    let most = u32::try_from(room.saturating_mul(CHUNK_BYTES)).unwrap_or(u32::MAX);
    let (chunks, read) = index_ring(indices, slots)?;
    let recorder = Recorder {
        chunks,
        order,
        timer,
        most,
    };
    Some((recorder, Reader { chunks: read }))
}

impl<T: Timer> Recorder<'_, T> {
    /// Sends and records a packet, or neither.
    #[inline(never)]
    fn send(&mut self, wire: &mut impl Wire, port: u16, packet: &Packet) -> bool {
        // The bytes of a READ's spans are yet to come.
        let captured = if packet.opcode() == Opcode::Read {
            0
        } else {
            packet.length().min(self.most)
        };
        let chunks = (captured as usize).div_ceil(CHUNK_BYTES);
        let Some(mut places) = self.chunks.reserve(chunks.wrapping_add(1)) else {
            return false;
        };
        // Relaxed: a packet that answers this one is sent by a core that has taken this one off the wire, which
        // is a release and an acquire after this; so it draws later.
        let order = self.order.fetch_add(1, Ordering::Relaxed);
        let time = self.timer.now();
        let sent = wire.send(port, packet);
        let head = Head {
            order,
            time,
            port,
            sent,
            captured: if sent { captured } else { 0 },
        };
        let mut full = places.push(head.chunk(packet)).is_err();
        if sent {
            // The peer may be at work on them already. They stay ours to read until it says that it is done,
            // and nobody hears that before this device polls again.
            let (first, second) = packet.spans();
            let mut spans = Pair(first, second);
            let mut left = captured as usize;
            while left != 0 && !full {
                let mut chunk = Chunk::EMPTY;
                let most = left.min(CHUNK_BYTES);
                let Some(room) = chunk.0.get_mut(..most) else {
                    break;
                };
                read_out(&mut spans, room);
                full = places.push(chunk).is_err();
                left = left.wrapping_sub(most);
            }
        }
        sent
    }
}

/// The reading end of a tap.
#[derive(Debug)]
pub struct Reader<'t> {
    chunks: Consumer<'t, Chunk>,
}

impl Reader<'_> {
    /// The oldest that has passed and was not read; its bytes are given to `take`, piece by piece.
    pub fn next(&mut self, mut take: impl FnMut(&[u8])) -> Option<Passed> {
        let (head, said) = Head::of(&self.chunks.pop()?)?;
        let mut left = head.captured as usize;
        // All of a record is published at once.
        while left != 0 {
            let chunk = self.chunks.pop()?;
            let bytes = chunk.0.get(..left).unwrap_or(&chunk.0);
            take(bytes);
            left = left.wrapping_sub(bytes.len());
        }
        Some(Passed {
            order: head.order,
            time: head.time,
            port: head.port,
            captured: head.captured,
            said: head.sent.then_some(said).flatten(),
        })
    }
}

/// What has passed a tap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Passed {
    /// Its place among all packets of all taps that share a counter.
    pub order: u64,
    /// When, as the [`Timer`] said.
    pub time: u64,
    /// The port it was sent on.
    pub port: u16,
    /// How many of its bytes were kept.
    pub captured: u32,
    /// The packet; `None` if the wire was full, and it was not sent.
    pub said: Option<Said>,
}

/// A packet without the places of its bytes, which nobody but a device may touch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Said {
    /// What it asks or says.
    pub opcode: Opcode,
    /// What is special about it.
    pub flags: Flags,
    /// Number of the queue pair it goes to.
    pub destination: u32,
    /// Number of the queue pair it comes from.
    pub source: u32,
    /// Packet sequence number.
    pub psn: u32,
    /// Bytes of the message from the start of this packet on.
    pub remaining: u32,
    /// Remote address and key of a WRITE or READ.
    pub remote: (u64, u32),
    /// Immediate data or key to invalidate, as the flags say.
    pub extra: u32,
    /// Bytes in this packet.
    pub length: u32,
}

/// One slot of a tap's ring.
#[derive(Clone, Copy, Debug)]
pub struct Chunk([u8; CHUNK_BYTES]);

impl Chunk {
    const EMPTY: Self = Self([0; CHUNK_BYTES]);
}

/// Bytes of a [`Chunk`].
pub const CHUNK_BYTES: usize = 256;

/// What a record says beside the packet.
struct Head {
    order: u64,
    time: u64,
    port: u16,
    sent: bool,
    captured: u32,
}

impl Head {
    fn chunk(&self, packet: &Packet) -> Chunk {
        let [head, order, address, keys, ..] = *packet.words();
        let words = [
            self.order,
            self.time,
            u64::from(self.port) | u64::from(self.sent) << 16 | u64::from(self.captured) << 32,
            head,
            order,
            address,
            keys,
            u64::from(packet.length()),
        ];
        let mut chunk = Chunk::EMPTY;
        let (places, _) = chunk.0.as_chunks_mut::<8>();
        for (place, word) in places.iter_mut().zip(words) {
            *place = word.to_ne_bytes();
        }
        chunk
    }

    #[expect(
        clippy::cast_possible_truncation,
        reason = "fields are cut out of words"
    )]
    fn of(chunk: &Chunk) -> Option<(Self, Option<Said>)> {
        let (words, _) = chunk.0.as_chunks::<8>();
        let word = |at: usize| words.get(at).map(|bytes| u64::from_ne_bytes(*bytes));
        let about = word(2)?;
        let head = Self {
            order: word(0)?,
            time: word(1)?,
            port: about as u16,
            sent: about >> 16 & 1 != 0,
            captured: (about >> 32) as u32,
        };
        let said = Packet::from_words([word(3)?, word(4)?, word(5)?, word(6)?, 0, 0, 0]);
        let length = word(7)? as u32;
        let said = said.map(|packet| Said {
            opcode: packet.opcode(),
            flags: packet.flags(),
            destination: packet.destination(),
            source: packet.source(),
            psn: packet.psn(),
            remaining: packet.remaining(),
            remote: packet.remote(),
            extra: packet.extra(),
            length,
        });
        Some((head, said))
    }
}
