//! What a device can do, found out by doing it.
//!
//! Flags lie (LU-19179 read the wrong word of them; virtual functions offer windows that do not work), so a
//! window is bound and written through over a connection of the device with itself, killed by either side, and
//! written through again in vain.

use core::ptr::NonNull;
use core::time::Duration;
use std::collections::VecDeque;
use std::time::Instant;

use o2poll_dataplane::nic::{
    Burst, Completion, Layout, Nic, Qp, RKey, ReceiveQueue, Region, Remote, Rights, SendWr, Sge,
    Status, WrId,
};

use super::DeviceError;
use super::device::Device;
use super::nic::{Limits, Verbs};
use super::objects::{CompletionQueue, Domain};
use super::queue_pair::{Path, QueuePair, Shape};

/// What a device can do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Findings {
    /// A type-2 window can be bound, written through, and invalidated, and is closed then.
    pub windows: bool,
    /// A peer's message can invalidate it.
    pub remote_invalidate: bool,
    /// Queue pairs are used without locks.
    pub thread_domain: bool,
    /// What an operator should know, a line each.
    pub notes: Vec<String>,
}

/// Tries a device out, over this port. Takes milliseconds, and at most a few seconds.
///
/// # Errors
/// When not even a connection of the device with itself carries a message.
pub fn probe(device: &Device, port: u8) -> Result<Findings, DeviceError> {
    let mut findings = Findings {
        windows: device.offers_windows(),
        ..Findings::default()
    };
    findings
        .notes
        .extend(device.quirks().warnings().map(str::to_owned));
    device.active_port(port)?;
    let domain = Domain::new(device)?;
    findings.thread_domain = domain.has_thread_domain();
    if let Some(note) = domain.note() {
        findings.notes.push(note);
    } else if !findings.thread_domain {
        findings.notes.push(
            "the provider has no thread domains: it takes an uncontended lock for each post"
                .to_owned(),
        );
    }
    if !findings.windows {
        findings
            .notes
            .push("the device offers no type-2 memory windows".to_owned());
        return Ok(findings);
    }
    let tried = Trial::new(device, &domain, port, &findings)?;
    if let Err(what) = tried.local() {
        findings.windows = false;
        findings.notes.push(format!(
            "the device offers type-2 memory windows, but {what}"
        ));
        return Ok(findings);
    }
    match Trial::new(device, &domain, port, &findings)?.remote() {
        Ok(()) => findings.remote_invalidate = true,
        Err(what) => findings
            .notes
            .push(format!("no remote invalidation: {what}")),
    }
    Ok(findings)
}

/// A connection of a device with itself.
struct Trial<'d> {
    /// Before the memory that it uses.
    nic: Verbs,
    ends: [Qp; 2],
    seen: VecDeque<Completion>,
    domain: &'d Domain,
    memory: Sge,
    bytes: Box<[u8; 256]>,
}

impl<'d> Trial<'d> {
    fn new(
        device: &Device,
        domain: &'d Domain,
        port: u8,
        findings: &Findings,
    ) -> Result<Self, DeviceError> {
        let limits = Limits {
            queue_pairs: 2,
            send_wr: 8,
            recv_wr: 8,
            max_sge: 1,
            windows: 1,
            memories: 1,
        };
        let cq = CompletionQueue::new(device, 64, false)?;
        let shape = Shape {
            send_depth: 8,
            recv_depth: 8,
            max_sge: 1,
            inline: 0,
        };
        let mut pairs = [
            QueuePair::for_trial(domain, &cq, shape)?,
            QueuePair::for_trial(domain, &cq, shape)?,
        ];
        let gid = device.gid(port)?;
        let state = device.port(port)?;
        let numbers = [pairs[1].number(), pairs[0].number()];
        for (pair, number) in pairs.iter_mut().zip(numbers) {
            pair.connect(device, &Path::to_itself(gid, state.mtu, state.lid, number))?;
        }
        let mut bytes = Box::new([0; 256]);
        let base = NonNull::from(&mut *bytes).cast();
        let mut nic = Verbs::new(device, cq, findings, limits)?;
        let rights = Rights::LOCAL_WRITE;
        // SAFETY: the device value, which is dropped first, holds it, and the bytes are looked at as a whole only
        // when nothing is under way.
        let memory = unsafe { domain.register(base, 256, rights)? };
        let full = || DeviceError::Probe {
            what: "did not fit".to_owned(),
            device: device.name().to_owned(),
        };
        let address = memory.start;
        let lkey = nic.add_memory(memory).map_err(|_| full())?;
        let [a, b] = pairs;
        let ends = [
            nic.adopt(a).map_err(|_| full())?,
            nic.adopt(b).map_err(|_| full())?,
        ];
        Ok(Self {
            nic,
            ends,
            seen: VecDeque::new(),
            domain,
            memory: Sge {
                address,
                length: 256,
                lkey,
            },
            bytes,
        })
    }

    /// Bind, write, invalidate, and write in vain.
    fn local(mut self) -> Result<(), String> {
        let (region, key) = self.window()?;
        self.register(region, key)?;
        self.write(key, 0x5a)?;
        self.done(0, SendWr::Invalidate { key }, "it could not be invalidated")?;
        self.closed(key)
    }

    /// Bind, let the peer kill it, and write in vain.
    fn remote(mut self) -> Result<(), String> {
        let (region, key) = self.window()?;
        self.register(region, key)?;
        self.write(key, 0xa5)?;
        let into = ReceiveQueue::Of(self.ends[0]);
        let buffer = self.piece(128, 64);
        self.nic
            .receive(into, WrId(9), buffer)
            .map_err(|_| "a receive was refused".to_owned())?;
        let wr = SendWr::Send {
            message: self.piece(64, 4),
            invalidate: Some(key),
        };
        self.post(1, wr)?;
        let mut killed = false;
        for _ in 0..2 {
            match self.next()? {
                Completion::Received { invalidated, .. } => killed = invalidated == Some(key),
                Completion::Done { .. } => {}
                Completion::Failed { status, .. } => {
                    return Err(format!("a SEND_WITH_INV failed: {status:?}"));
                }
            }
        }
        if !killed {
            return Err("a SEND_WITH_INV did not tell the key that it killed".to_owned());
        }
        self.closed(key)
    }

    fn window(&mut self) -> Result<(Region, RKey), String> {
        let window = self.domain.window().map_err(|error| error.to_string())?;
        let (region, key) = self
            .nic
            .adopt_window(window)
            .map_err(|_| "there was no room for one".to_owned())?;
        Ok((region, key.rotated()))
    }

    fn register(&mut self, region: Region, key: RKey) -> Result<(), String> {
        let piece = self.piece(1, 32);
        let wr = SendWr::Register {
            region,
            key,
            rights: Rights::REMOTE_WRITE,
            base: piece.address,
            length: piece.length,
            layout: Layout::Window(piece),
        };
        self.done(0, wr, "one could not be bound")
    }

    /// The peer writes eight bytes through it, which must arrive.
    fn write(&mut self, key: RKey, byte: u8) -> Result<(), String> {
        self.bytes[64..72].fill(byte);
        let local = [self.piece(64, 8)];
        let remote = Remote {
            address: self.memory.address + 5,
            rkey: key,
        };
        let imm = None;
        let local = &local;
        self.done(
            1,
            SendWr::Write { local, remote, imm },
            "a write through one failed",
        )?;
        // SAFETY: the write is acknowledged, and nothing else is under way.
        let seen = unsafe { core::ptr::from_ref(&*self.bytes).read_volatile() };
        if seen[5..13] != [byte; 8] || seen[4] != 0 || seen[13] != 0 {
            return Err("a write through one did not arrive".to_owned());
        }
        Ok(())
    }

    /// The peer's next write fails.
    fn closed(&mut self, key: RKey) -> Result<(), String> {
        let local = [self.piece(64, 8)];
        let remote = Remote {
            address: self.memory.address + 5,
            rkey: key,
        };
        let imm = None;
        let local = &local;
        self.post(1, SendWr::Write { local, remote, imm })?;
        match self.next()? {
            Completion::Failed {
                status: Status::RemoteAccess,
                ..
            } => Ok(()),
            other => Err(format!("a dead key was not refused: {other:?}")),
        }
    }

    fn piece(&self, offset: u64, length: u32) -> Sge {
        Sge {
            address: self.memory.address + offset,
            length,
            ..self.memory
        }
    }

    fn post(&mut self, end: usize, wr: SendWr<'_>) -> Result<(), String> {
        self.nic.queue(self.ends[end], WrId(1), true, wr);
        let rung = self.nic.doorbell(self.ends[end]);
        rung.map_err(|_| "a work request was refused".to_owned())
    }

    fn done(&mut self, end: usize, wr: SendWr<'_>, otherwise: &str) -> Result<(), String> {
        self.post(end, wr)?;
        match self.next()? {
            Completion::Done { .. } => Ok(()),
            other => Err(format!("{otherwise}: {other:?}")),
        }
    }

    /// The next completion, which must come within two seconds.
    fn next(&mut self) -> Result<Completion, String> {
        let deadline = Instant::now() + Duration::from_secs(2);
        loop {
            if let Some(completion) = self.seen.pop_front() {
                return Ok(completion);
            }
            let mut burst = Burst::new();
            let polled = self.nic.poll(&mut burst);
            polled.map_err(|fault| format!("the completion queue failed: {fault:?}"))?;
            self.seen.extend(burst);
            if Instant::now() > deadline {
                return Err("nothing completed within 2 s".to_owned());
            }
            std::thread::yield_now();
        }
    }
}

impl Path {
    /// From a device to a queue pair of its own.
    #[must_use]
    pub const fn to_itself(gid: super::Gid, mtu: u32, lid: u16, number: u32) -> Self {
        Self {
            local: gid,
            remote: gid.bytes,
            lid,
            number,
            mtu,
            psn: 0x00ff_fff0,
            remote_psn: 0x00ff_fff0,
            responder_resources: 1,
            initiator_depth: 1,
            timeout: 14,
            retry_count: 3,
            rnr_retry: 3,
            rnr_timer: 12,
        }
    }
}
