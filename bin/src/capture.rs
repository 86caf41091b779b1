//! A capture of what the nodes of a process send each other, as a pcap file of RoCEv2 frames.
//!
//! Each node's device has a [`Tap`](o2poll_soft::Tap) on its wire; the control side tells what the connection
//! manager sends ([`Notes`]). A [`Scribe`] puts both in order and writes the frames; [`Capture`] runs one on a
//! thread of its own. Nothing is left out: where the thread does not follow, the devices wait for it.
//!
//! The software device asks and says some things that no card would. So sequence numbers in the file are the
//! scribe's own (24 bits, one per frame), and what a device says about letting go of a dead connection's memory
//! is not in it.

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use core::time::Duration;
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::SystemTime;

use o2poll_dataplane::ring::{Indices, Slot};
use o2poll_dataplane::time::Instant;
use o2poll_dataplane::wire::Nid;
use o2poll_hal::clock::Clock;
use o2poll_hal::pcap::Writer;
use o2poll_hal::roce::{Address, Answer, Flow, Frame, Part, Verb, cm};
use o2poll_soft::{CHUNK_BYTES, Flags, Opcode, Passed, Reader, Recorder, Said, Timer};

/// The clock of a capture.
#[derive(Clone, Copy, Debug)]
pub struct Ticker(Clock);

impl Timer for Ticker {
    #[inline]
    fn now(&self) -> u64 {
        self.0.now().0
    }
}

/// One message of the connection manager.
#[derive(Clone, Debug)]
pub struct Note {
    /// Sending node, by its place.
    pub from: usize,
    /// Receiving node.
    pub to: usize,
    /// Name of the exchange.
    pub transaction: u64,
    /// The message.
    pub what: Mad,
}

/// What a [`Note`] says; sequence numbers are the scribe's.
#[derive(Clone, Debug)]
pub enum Mad {
    /// REQ.
    Request {
        /// Name of the connection on the asking side.
        local: u32,
        /// Queue pair of the asking side.
        queue_pair: u32,
        /// CONNREQ.
        private_data: Vec<u8>,
    },
    /// REP.
    Reply {
        /// Name of the connection on the granting side.
        local: u32,
        /// On the asking side.
        remote: u32,
        /// Queue pair of the granting side.
        queue_pair: u32,
        /// CONNACK.
        private_data: Vec<u8>,
    },
    /// REJ.
    Reject {
        /// Name of the connection on the asking side.
        remote: u32,
        /// The reason.
        reason: u16,
        /// Reject record.
        private_data: Vec<u8>,
    },
    /// RTU.
    ReadyToUse {
        /// Name of the connection on the asking side.
        local: u32,
        /// On the granting side.
        remote: u32,
    },
    /// DREQ.
    Disconnect {
        /// Name of the connection on this side.
        local: u32,
        /// On the other side.
        remote: u32,
        /// Queue pair of the other side.
        queue_pair: u32,
    },
    /// DREP.
    Disconnected {
        /// Name of the connection on this side.
        local: u32,
        /// On the other side.
        remote: u32,
    },
}

/// How the control side tells of the connection manager's messages.
#[derive(Clone, Debug)]
pub struct Notes {
    order: &'static AtomicU64,
    clock: Clock,
    to: Sender<(u64, u64, Note)>,
}

impl Notes {
    /// Tells of a message that is being sent now.
    pub fn tell(&self, note: Note) {
        // Relaxed: what is sent because of this message is sent by who was told of it after this.
        let order = self.order.fetch_add(1, Ordering::Relaxed);
        // A capture that has ended listens no more.
        let _ended = self.to.send((order, self.clock.now().0, note));
    }
}

/// What a capture holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Frames in the file.
    pub frames: u64,
    /// Their bytes on the wire.
    pub bytes: u64,
    /// Packets of the devices that have no counterpart on a real wire.
    pub unshown: u64,
    /// Packets that could not be shown, because something before them was not seen.
    pub lost: u64,
}

/// A capture under way.
#[derive(Debug)]
pub struct Capture {
    path: PathBuf,
    file: File,
    sure: Arc<AtomicBool>,
    notes: Notes,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<io::Result<Summary>>,
}

impl Capture {
    /// Begins to write `path`, for nodes of these names. `ports` tells, for each, which node each port of its wire
    /// leads to. Returns the recorders of their taps. What is in the file already stays until [`go`](Self::go).
    ///
    /// # Errors
    /// The file cannot be written, or the thread cannot be had.
    pub fn begin(
        path: &Path,
        clock: Clock,
        nodes: &[Nid],
        ports: Vec<Vec<usize>>,
    ) -> io::Result<(Self, Vec<Recorder<'static, Ticker>>)> {
        let file = File::options()
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)?;
        let sure = Arc::new(AtomicBool::new(false));
        let gate = Gate {
            file: file.try_clone()?,
            sure: Arc::clone(&sure),
        };
        let to = BufWriter::with_capacity(1 << 20, gate);
        let scribe = Scribe::new(to, clock, nodes, ports)?;
        let order: &'static AtomicU64 = Box::leak(Box::new(AtomicU64::new(0)));
        let mut readers = Vec::new();
        let mut recorders = Vec::new();
        for _ in nodes {
            let (recorder, reader) = tap(order, clock);
            recorders.push(recorder);
            readers.push(reader);
        }
        let (to, from) = channel();
        let notes = Notes { order, clock, to };
        let stop = Arc::new(AtomicBool::new(false));
        let thread = {
            let stop = Arc::clone(&stop);
            thread::Builder::new()
                .name(String::from("o2poll-pcap"))
                .spawn(move || keep(scribe, readers, &from, &stop))?
        };
        let capture = Self {
            path: path.to_owned(),
            file,
            sure,
            notes,
            stop,
            thread,
        };
        Ok((capture, recorders))
    }

    /// The nodes run: from now on the file is written, and what was in it before is gone.
    ///
    /// # Errors
    /// As of the file.
    pub fn go(&self) -> io::Result<()> {
        if self.file.metadata()?.is_file() {
            self.file.set_len(0)?;
        }
        // Release pairs with the Acquire in `Gate::write`: what is written comes after.
        self.sure.store(true, Ordering::Release);
        Ok(())
    }

    /// Which file it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// For the control side.
    #[must_use]
    pub fn notes(&self) -> Notes {
        self.notes.clone()
    }

    /// Ends the capture. Everything that was sent before is in it.
    ///
    /// # Errors
    /// The file could not be written to its end; also without [`go`](Self::go), when nothing is written.
    pub fn end(self) -> io::Result<Summary> {
        // Release pairs with the Acquire in `keep`: what was recorded before is found after.
        self.stop.store(true, Ordering::Release);
        self.thread
            .join()
            .unwrap_or_else(|_| Err(io::Error::other("the thread that writes it has died")))
    }
}

/// A file that is written only when its time has come.
#[derive(Debug)]
struct Gate {
    file: File,
    sure: Arc<AtomicBool>,
}

impl Write for Gate {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // Acquire pairs with the Release in `Capture::go`.
        if !self.sure.load(Ordering::Acquire) {
            return Err(io::Error::other("the nodes have not started"));
        }
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// Both ends of one node's tap.
fn tap(order: &'static AtomicU64, clock: Clock) -> (Recorder<'static, Ticker>, Reader<'static>) {
    let indices = Box::leak(Box::new(Indices::new()));
    let slots = core::iter::repeat_with(Slot::new)
        .take(RING_BYTES / CHUNK_BYTES)
        .collect::<Vec<_>>()
        .leak();
    o2poll_soft::recorder(indices, slots, order, Ticker(clock)).expect("a power of two of slots")
}

/// The capturing thread.
fn keep(
    mut scribe: Scribe<BufWriter<Gate>>,
    mut readers: Vec<Reader<'static>>,
    notes: &Receiver<(u64, u64, Note)>,
    stop: &AtomicBool,
) -> io::Result<Summary> {
    // After an error the devices still must not wait.
    let mut outcome = Ok(());
    let mut bytes = Vec::new();
    loop {
        let last = stop.load(Ordering::Acquire);
        let mut busy = false;
        for (node, reader) in readers.iter_mut().enumerate() {
            while let Some(passed) = {
                bytes.clear();
                reader.next(|piece| bytes.extend_from_slice(piece))
            } {
                busy = true;
                if outcome.is_ok() {
                    outcome = scribe.passed(node, &passed, &bytes);
                }
            }
        }
        while let Ok((order, time, note)) = notes.try_recv() {
            busy = true;
            if outcome.is_ok() {
                outcome = scribe.note(order, time, note);
            }
        }
        if last && !busy {
            break;
        }
        if !busy {
            thread::sleep(IDLE);
        }
    }
    outcome?;
    scribe.finish().map(|(summary, _)| summary)
}

/// Puts what passed in order and writes it as frames.
#[derive(Debug)]
pub struct Scribe<W: Write> {
    to: Writer<W>,
    clock: Clock,
    /// One moment, as the clock and as the calendar say it.
    epoch: (u64, u64),
    nodes: Vec<Side>,
    /// By the node and the number of the queue pair that asks.
    flows: HashMap<(usize, u32), (Flow, u32)>,
    waiting: BTreeMap<u64, Waiting>,
    /// The order that is to be written next.
    next: u64,
    summary: Summary,
    frame: Vec<u8>,
}

/// One node.
#[derive(Debug)]
struct Side {
    address: Address,
    ports: Vec<usize>,
    /// IPv4 identification of its next frame.
    identification: u16,
    /// Sequence number of the next datagram of its QP1.
    datagram: u32,
    /// Last port that it dialed from.
    dialed_from: u16,
}

/// What has come before its turn.
#[derive(Debug)]
enum Waiting {
    Void,
    Packet {
        time: u64,
        node: usize,
        peer: usize,
        said: Said,
        bytes: Vec<u8>,
    },
    Note {
        time: u64,
        note: Note,
    },
}

impl<W: Write> Scribe<W> {
    /// Writes to `to`; the rest as of [`Capture::begin`].
    ///
    /// # Errors
    /// As of `to`.
    pub fn new(to: W, clock: Clock, nodes: &[Nid], ports: Vec<Vec<usize>>) -> io::Result<Self> {
        let calendar = SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .map_or(0, |since| u64::try_from(since.as_nanos()).unwrap_or(0));
        let nodes = nodes
            .iter()
            .zip(ports)
            .map(|(nid, ports)| Side {
                address: Address(nid.address().to_be_bytes()),
                ports,
                identification: 0,
                datagram: 0,
                dialed_from: FIRST_PORT,
            })
            .collect();
        Ok(Self {
            to: Writer::new(to)?,
            clock,
            epoch: (clock.now().0, calendar),
            nodes,
            flows: HashMap::new(),
            waiting: BTreeMap::new(),
            next: 0,
            summary: Summary::default(),
            frame: Vec::new(),
        })
    }

    /// Something has passed the tap of a node.
    ///
    /// # Errors
    /// As of the file.
    pub fn passed(&mut self, node: usize, passed: &Passed, bytes: &[u8]) -> io::Result<()> {
        let peer = self
            .nodes
            .get(node)
            .and_then(|side| side.ports.get(usize::from(passed.port)));
        let waiting = match (passed.said, peer) {
            (Some(said), Some(peer)) => Waiting::Packet {
                time: passed.time,
                node,
                peer: *peer,
                said,
                bytes: bytes.to_vec(),
            },
            _ => Waiting::Void,
        };
        self.waiting.insert(passed.order, waiting);
        self.write()
    }

    /// The connection manager has sent something.
    ///
    /// # Errors
    /// As of the file.
    pub fn note(&mut self, order: u64, time: u64, note: Note) -> io::Result<()> {
        self.waiting.insert(order, Waiting::Note { time, note });
        self.write()
    }

    /// Ends the file; what was written to.
    ///
    /// # Errors
    /// As of the file.
    pub fn finish(mut self) -> io::Result<(Summary, W)> {
        // A device that died in the middle of a packet leaves a hole.
        while let Some((order, _)) = self.waiting.first_key_value() {
            self.next = *order;
            self.write()?;
        }
        Ok((self.summary, self.to.finish()?))
    }

    /// Writes what is next, as far as it has come.
    fn write(&mut self) -> io::Result<()> {
        while let Some(waiting) = self.waiting.remove(&self.next) {
            self.next += 1;
            match waiting {
                Waiting::Void => {}
                Waiting::Packet {
                    time,
                    node,
                    peer,
                    said,
                    bytes,
                } => self.packet(time, node, peer, &said, &bytes)?,
                Waiting::Note { time, note } => self.datagram(time, &note)?,
            }
        }
        Ok(())
    }

    fn packet(
        &mut self,
        time: u64,
        node: usize,
        peer: usize,
        said: &Said,
        bytes: &[u8],
    ) -> io::Result<()> {
        let verb = match said.opcode {
            Opcode::Send => Verb::Send,
            Opcode::Write => Verb::Write,
            Opcode::Read => Verb::Read,
            _ => return self.answer(time, node, peer, said),
        };
        let (Some(near), Some(far)) = (self.nodes.get(node), self.nodes.get(peer)) else {
            return Ok(());
        };
        let ends = ((near.address, said.source), (far.address, said.destination));
        let (mut flow, acknowledged) =
            self.flows.remove(&(node, said.source)).unwrap_or_else(|| {
                let flow = Flow::new(ends.0, ends.1, said.psn, first_psn(said.source));
                (flow, said.psn)
            });
        let mark = |flag| said.flags.contains(flag).then_some(said.extra);
        let part = Part {
            verb,
            order: said.psn,
            last: said.flags.contains(Flags::LAST),
            remaining: said.remaining,
            address: said.remote.0,
            key: said.remote.1,
            immediate: mark(Flags::IMMEDIATE),
            invalidate: mark(Flags::INVALIDATE),
            length: said.length,
            bytes,
        };
        let mut outcome = Ok(());
        let shown = flow.part(&part, |frame, known| {
            if outcome.is_ok() {
                outcome = self.put(time, node, frame, known);
            }
        });
        if !shown {
            self.summary.lost += 1;
        }
        self.flows.insert((node, said.source), (flow, acknowledged));
        outcome
    }

    fn answer(&mut self, time: u64, node: usize, peer: usize, said: &Said) -> io::Result<()> {
        let Some((mut flow, acknowledged)) = self.flows.remove(&(peer, said.destination)) else {
            self.summary.unshown += 1;
            return Ok(());
        };
        let answer = match said.opcode {
            Opcode::Ack => Some(Answer::Acknowledged),
            // To a card it would be one.
            Opcode::Closed if said.psn != acknowledged => Some(Answer::Acknowledged),
            Opcode::ReceiverNotReady => Some(Answer::ReceiverNotReady(RNR_TIMER)),
            Opcode::SequenceError => Some(Answer::SequenceError),
            Opcode::RefusedAccess => Some(Answer::RemoteAccess),
            Opcode::RefusedRequest => Some(Answer::InvalidRequest),
            Opcode::RefusedOperation => Some(Answer::RemoteOperation),
            _ => None,
        };
        let mut outcome = Ok(());
        let mut now = acknowledged;
        match answer {
            None => self.summary.unshown += 1,
            Some(answer) => {
                let shown = flow.answer(said.psn, answer, |frame| {
                    outcome = self.put(time, node, frame, 0);
                });
                if shown {
                    now = said.psn;
                } else {
                    self.summary.lost += 1;
                }
            }
        }
        self.flows.insert((peer, said.destination), (flow, now));
        outcome
    }

    fn datagram(&mut self, time: u64, note: &Note) -> io::Result<()> {
        let (Some(near), Some(far)) = (self.nodes.get(note.from), self.nodes.get(note.to)) else {
            return Ok(());
        };
        let (from, to, psn) = (near.address, far.address, near.datagram);
        let mut dialed_from = near.dialed_from;
        let message = match &note.what {
            Mad::Request {
                local,
                queue_pair,
                private_data,
            } => {
                let source_port = dialed_from;
                dialed_from = dialed_from
                    .checked_sub(1)
                    .filter(|port| *port != 0)
                    .unwrap_or(FIRST_PORT);
                cm::Message::Request(cm::Request {
                    local: *local,
                    service: SERVICE,
                    source_port,
                    queue_pair: *queue_pair,
                    psn: first_psn(*queue_pair),
                    responder_resources: 0,
                    retry_count: RETRY_COUNT,
                    rnr_retry_count: RNR_RETRY_COUNT,
                    private_data,
                })
            }
            Mad::Reply {
                local,
                remote,
                queue_pair,
                private_data,
            } => cm::Message::Reply {
                local: *local,
                remote: *remote,
                queue_pair: *queue_pair,
                psn: first_psn(*queue_pair),
                responder_resources: 0,
                private_data,
            },
            Mad::Reject {
                remote,
                reason,
                private_data,
            } => cm::Message::Reject {
                remote: *remote,
                reason: *reason,
                private_data,
            },
            Mad::ReadyToUse { local, remote } => cm::Message::ReadyToUse {
                local: *local,
                remote: *remote,
            },
            Mad::Disconnect {
                local,
                remote,
                queue_pair,
            } => cm::Message::Disconnect {
                local: *local,
                remote: *remote,
                queue_pair: *queue_pair,
            },
            Mad::Disconnected { local, remote } => cm::Message::Disconnected {
                local: *local,
                remote: *remote,
            },
        };
        if let Some(side) = self.nodes.get_mut(note.from) {
            side.datagram = side.datagram.wrapping_add(1);
            side.dialed_from = dialed_from;
        }
        let mut outcome = Ok(());
        message.write(from, to, psn, note.transaction, |frame| {
            let known = frame.payload.len();
            outcome = self.put(time, note.from, frame, known);
        });
        outcome
    }

    /// Writes a frame of a node, of whose payload so many bytes are known.
    fn put(&mut self, time: u64, node: usize, frame: Frame<'_>, known: usize) -> io::Result<()> {
        let identification = self.nodes.get_mut(node).map_or(0, |side| {
            side.identification = side.identification.wrapping_add(1);
            side.identification
        });
        let frame = Frame {
            identification,
            ..frame
        };
        self.frame.clear();
        frame.write(&mut self.frame);
        let length = self.frame.len();
        let missing = frame.payload.len().saturating_sub(known);
        if missing != 0 {
            // Neither padding nor CRC is known without it.
            let pad = frame.payload.len().wrapping_neg() & 3;
            self.frame
                .truncate(length.saturating_sub(missing + pad + 4));
        }
        self.summary.frames += 1;
        self.summary.bytes += length as u64;
        let (ticks, calendar) = self.epoch;
        let since = Instant(time).since(Instant(ticks));
        let time = calendar.saturating_add(self.clock.nanoseconds(since));
        self.to.frame(time, &self.frame, length)
    }
}

/// The first sequence number of a queue pair's frames: any will do, as long as the CM says the same.
const fn first_psn(queue_pair: u32) -> u32 {
    queue_pair.wrapping_mul(0x9e37_79b1) >> 8
}

/// For each node: 15 WRITEs of the largest kind.
const RING_BYTES: usize = 16 << 20;
/// How long the thread rests that found nothing.
const IDLE: Duration = Duration::from_micros(500);
/// o2iblnd's port (`service`).
const SERVICE: u16 = 987;
/// The RDMA CM dials from privileged ports, downwards.
const FIRST_PORT: u16 = 1023;
/// What kernel nodes say.
const RETRY_COUNT: u8 = 5;
const RNR_RETRY_COUNT: u8 = 6;
/// 0.64 ms, as the AETH says it.
const RNR_TIMER: u8 = 12;
