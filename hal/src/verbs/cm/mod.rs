//! The connection manager of one node on an RDMA device, over librdmacm.
//!
//! It listens and dials (port 987), carries o2iblnd's private data, and asks
//! [`dataplane::peer`](o2poll_dataplane::peer) for everything that is a decision: what an event means in a state
//! ([`table::step`](o2poll_dataplane::peer::table::step)), whom to accept, what follows a refusal. It has no thread: a control
//! thread sleeps on its [`descriptor`](Manager::descriptor) and calls [`run`](Manager::run).
//!
//! Queue pairs are made outside of librdmacm, since the core that uses one destroys nothing and other drivers make
//! theirs in other ways. All of a node are made **when it starts**, before its windows: on rxe a killed process waits
//! 50 s for each queue pair that is younger than a window that is bound to it. One that comes back from its core is
//! reset and goes to the end of the queue.
//!
//! ```text
//! dial                                              listen
//!   rdma_bind_addr (port below 1024)                  CONNECT_REQUEST: answer()
//!   ADDR_RESOLVED, ROUTE_RESOLVED                       INIT, RTR, RTS; Effect::Adopt
//!     INIT; rdma_connect                              ready: rdma_accept
//!   CONNECT_RESPONSE: accepted()                      ESTABLISHED, or data before the RTU: Effect::Establish
//!     RTR, RTS; Effect::Adopt
//!   ready: rdma_establish, Effect::Establish
//! either: Effect::Close, the core drains, gone: rdma_destroy_id, RESET
//! ```

mod handshake;
mod known;
mod model;
mod raw;
#[cfg(test)]
mod tests;

use core::net::{Ipv4Addr, SocketAddrV4};
use core::time::Duration;
use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::sync::Arc;
use std::time::Instant;

use o2poll_dataplane::peer::table::{End, Event, State, Step, step};
use o2poll_dataplane::peer::{Next, REPLY_BYTES, Request, Terms};
use o2poll_dataplane::pool::Handle;
use o2poll_dataplane::wire::Nid;

use self::handshake::depth_of;
use self::known::Known;
pub use self::model::{CmError, Dial, Effect, Ending, Failure, Settings};
use self::raw::{Channel, Happening, Id as CmId, Parameters};
use super::{CompletionQueue, Device, Domain, QueuePair};

/// Names one end of a connection, or of an attempt to make one.
pub type Id = u64;

/// One core's queue pairs.
#[derive(Debug)]
struct Core {
    domain: Domain,
    cq: CompletionQueue,
    spare: VecDeque<QueuePair>,
    /// Connections and attempts that have one of its queue pairs.
    load: usize,
}

/// One end of a connection.
#[derive(Debug)]
struct Endpoint {
    cm: CmId,
    peer: Nid,
    state: State,
    core: Option<usize>,
    /// While no core has it.
    qp: Option<QueuePair>,
    /// Of the queue pair.
    number: u32,
    adopted: bool,
    connection: Option<Handle>,
    request: Option<Request>,
    reply: Option<[u8; REPLY_BYTES]>,
    terms: Option<Terms>,
    next: Option<Next>,
    failure: Option<Failure>,
    dial: Option<usize>,
    give_up: Instant,
}

/// The connection manager of a node.
#[derive(Debug)]
pub struct Manager {
    device: Device,
    channel: Arc<Channel>,
    settings: Settings,
    cores: Vec<Core>,
    listener: Option<CmId>,
    ends: HashMap<Id, Endpoint>,
    keys: HashMap<usize, Id>,
    remembered: Known,
    dials: Vec<Option<(Nid, Dial)>>,
    effects: Vec<Effect>,
    log: Vec<String>,
    unprivileged: bool,
    removed: bool,
    last_id: Id,
}

impl Manager {
    /// A manager with queue pairs for each core, given as its protection domain and completion queue.
    ///
    /// # Errors
    /// What is missing.
    pub fn new(
        device: &Device,
        cores: Vec<(Domain, CompletionQueue)>,
        settings: Settings,
    ) -> Result<Self, CmError> {
        let channel = Channel::new()?;
        let mut made = Vec::new();
        for (domain, cq) in cores {
            let mut core = Core {
                domain,
                cq,
                spare: VecDeque::new(),
                load: 0,
            };
            let mut depth = settings.local.queue_depth;
            // Two more: while one is being drained the next may be asked for.
            for _ in 0..settings.connections + SPARE {
                let qp = core.make(&settings, depth)?;
                depth = depth_of(&qp);
                core.spare.push_back(qp);
            }
            made.push(core);
        }
        Ok(Self {
            device: device.clone(),
            channel,
            settings,
            cores: made,
            listener: None,
            ends: HashMap::new(),
            keys: HashMap::new(),
            remembered: Known::default(),
            dials: Vec::new(),
            effects: Vec::new(),
            log: Vec::new(),
            unprivileged: false,
            removed: false,
            last_id: 0,
        })
    }

    /// Takes connections from now on.
    ///
    /// # Errors
    /// Why it cannot.
    pub fn listen(&mut self) -> Result<(), CmError> {
        let address = SocketAddrV4::new(ip(self.settings.local.nid), self.settings.service);
        let call = |what| move |source| CmError::Call { what, source };
        let id = CmId::new(&self.channel).map_err(call("rdma_create_id"))?;
        // Attempts of ours may hold the same port.
        id.reuse_address().map_err(call("rdma_set_option"))?;
        let refused = |source: io::Error| match source.raw_os_error() {
            Some(libc::EACCES | libc::EPERM) => CmError::NotPermitted { address },
            Some(libc::EADDRINUSE) => CmError::Taken { address },
            Some(libc::EADDRNOTAVAIL | libc::ENODEV) => CmError::NotOurs { address },
            _ => CmError::Call {
                what: "rdma_listen",
                source,
            },
        };
        id.bind(address).map_err(refused)?;
        match id.device() {
            Some(found) if found != self.device.name() => {
                return Err(CmError::OtherDevice {
                    address,
                    found,
                    device: self.device.name().to_owned(),
                });
            }
            _ => {}
        }
        id.listen().map_err(refused)?;
        self.listener = Some(id);
        Ok(())
    }

    /// Readable when [`run`](Self::run) has something to do.
    #[must_use]
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.channel.descriptor()
    }

    /// Begins to connect to another node; the name of the attempt. Several connections to one node are legal
    /// (`conns_per_peer`): dial as often. The name is remembered until the attempt is [forgotten](Self::forget).
    pub fn dial(&mut self, peer: Nid) -> usize {
        let named = Some((peer, Dial::Trying));
        let dial = match self.dials.iter().position(Option::is_none) {
            Some(free) => {
                self.dials[free] = named;
                free
            }
            None => {
                self.dials.push(named);
                self.dials.len() - 1
            }
        };
        self.attempt(dial);
        dial
    }

    /// How an attempt stands.
    #[must_use]
    pub fn outcome(&self, dial: usize) -> Option<&Dial> {
        let (_, state) = self.dials.get(dial)?.as_ref()?;
        Some(state)
    }

    /// Nobody asks for an attempt any more: its name is free for another. Nothing happens while the attempt is under way
    /// or its connection lives.
    pub fn forget(&mut self, dial: usize) {
        if self.ends.values().any(|end| end.dial == Some(dial)) {
            return;
        }
        if let Some(named) = self.dials.get_mut(dial)
            && !matches!(named, Some((_, Dial::Trying | Dial::Pausing(_))))
        {
            *named = None;
        }
    }

    /// The attempt that has made this end, if this node has asked.
    #[must_use]
    pub fn dialed(&self, id: Id) -> Option<usize> {
        self.ends.get(&id)?.dial
    }

    /// Lines for whoever wants to follow.
    pub fn log(&mut self) -> Vec<String> {
        core::mem::take(&mut self.log)
    }

    /// Whether an attempt had to go out from a port of 1024 or above, which some peers refuse.
    #[must_use]
    pub const fn is_unprivileged(&self) -> bool {
        self.unprivileged
    }

    /// Whether the device is being removed. The removal waits, for ever if need be, until everything that was made on the
    /// device is destroyed and the device is closed: what is left to do is to come to an end.
    #[must_use]
    pub const fn is_removed(&self) -> bool {
        self.removed
    }

    /// Takes what has happened, looks at the time, and says what is to be done.
    ///
    /// # Errors
    /// When events cannot be read any more.
    pub fn run(&mut self, now: Instant) -> Result<Vec<Effect>, CmError> {
        while let Some(happening) = self.channel.next().map_err(|source| CmError::Call {
            what: "rdma_get_cm_event",
            source,
        })? {
            self.take(happening);
        }
        let late: Vec<Id> = self
            .ends
            .iter()
            .filter(|(_, end)| end.give_up <= now)
            .map(|(id, _)| *id)
            .collect();
        for id in late {
            self.feed(id, Event::Deadline);
        }
        for dial in 0..self.dials.len() {
            if let Some(Some((_, state @ Dial::Pausing(_)))) = self.dials.get_mut(dial)
                && matches!(state, Dial::Pausing(until) if *until <= now)
            {
                *state = Dial::Trying;
                self.attempt(dial);
            }
        }
        Ok(core::mem::take(&mut self.effects))
    }

    /// What happened to the device ([`Device::event`]); every manager on it must hear of it.
    pub fn device_event(&mut self, event: super::Event) {
        match event {
            super::Event::Established(number) => {
                let found = self
                    .ends
                    .iter()
                    .find(|(_, end)| end.adopted && end.number == number);
                if let Some(id) = found.map(|(id, _)| *id) {
                    self.feed(id, Event::CommEst);
                }
            }
            super::Event::DeviceGone => {
                self.removed = true;
                for id in self.alive() {
                    self.feed(id, Event::DeviceRemoval);
                }
            }
            // Their core sees the completions.
            super::Event::QueuePair(..)
            | super::Event::CompletionQueue
            | super::Event::Other(_) => {}
        }
    }

    /// A core has the queue pair and its receives are posted.
    pub fn ready(&mut self, id: Id, connection: Handle) {
        let Some(end) = self.ends.get_mut(&id) else {
            return;
        };
        end.connection = Some(connection);
        let done = match end.state {
            State::PassiveWait => match (&end.reply, end.number) {
                (Some(private_data), number) => end
                    .cm
                    .accept(Parameters {
                        private_data,
                        number,
                    })
                    .map_err(|error| format!("rdma_accept: {error}")),
                _ => Ok(()),
            },
            State::Established => match end.cm.establish() {
                Ok(()) => {
                    self.establish(id);
                    return;
                }
                Err(error) => Err(format!("rdma_establish: {error}")),
            },
            _ => {
                if let Some(core) = end.core {
                    self.effects.push(Effect::Close { core, connection });
                }
                return;
            }
        };
        if let Err(why) = done {
            self.fail(id, Failure::Call(why));
            self.feed(id, Event::Close);
        }
    }

    /// A core has no room for the queue pair.
    pub fn no_room(&mut self, id: Id, qp: QueuePair) {
        let Some(end) = self.ends.get_mut(&id) else {
            return;
        };
        end.adopted = false;
        end.qp = Some(qp);
        if matches!(end.state, State::Closing | State::Disconnected) {
            // It was given up meanwhile, and waited for the core.
            self.feed(id, Event::Drained);
            return;
        }
        self.refuse_for_room(id);
    }

    /// A core has given the queue pair back; who wanted the end.
    pub fn gone(&mut self, id: Id, qp: QueuePair) -> Ending {
        let Some(end) = self.ends.get_mut(&id) else {
            return Ending::Asked;
        };
        end.adopted = false;
        end.connection = None;
        end.qp = Some(qp);
        let unasked = matches!(end.state, State::PassiveWait | State::Established);
        let ending = match (&end.failure, end.dial) {
            _ if unasked => Ending::Core,
            // Who was asked may be left when its peer has done what it wanted.
            (Some(Failure::Closed) | None, _) | (Some(Failure::BrokenOff), None) => Ending::Asked,
            (Some(failure), _) => Ending::Failed(failure.clone()),
        };
        // The core has seen an error: for the connection manager that is this side's wish.
        self.feed(
            id,
            if unasked {
                Event::Close
            } else {
                Event::Drained
            },
        );
        ending
    }

    /// Ends a connection from this side.
    pub fn close(&mut self, id: Id) {
        self.feed(id, Event::Close);
    }

    /// Every end that is not destroyed yet.
    #[must_use]
    pub fn alive(&self) -> Vec<Id> {
        self.ends.keys().copied().collect()
    }

    /// The node at the other end.
    #[must_use]
    pub fn peer(&self, id: Id) -> Option<Nid> {
        self.ends.get(&id).map(|end| end.peer)
    }

    fn attempt(&mut self, dial: usize) {
        let Some(Some((peer, _))) = self.dials.get(dial) else {
            return;
        };
        let peer = *peer;
        let to = SocketAddrV4::new(ip(peer), self.settings.service);
        let begun = self
            .source()
            .and_then(|cm| cm.resolve_address(to, RESOLVE).map(|()| cm));
        match begun {
            Ok(cm) => {
                let id = self.add(cm, peer);
                if let Some(end) = self.ends.get_mut(&id) {
                    end.dial = Some(dial);
                }
            }
            Err(error) => {
                let failure = match error.raw_os_error() {
                    Some(
                        libc::ENETUNREACH | libc::EHOSTUNREACH | libc::ENODEV | libc::EADDRNOTAVAIL,
                    ) => self.no_route(),
                    _ => Failure::Call(format!("rdma_resolve_addr: {error}")),
                };
                if let Some(Some((_, state))) = self.dials.get_mut(dial) {
                    *state = Dial::Failed(failure);
                }
            }
        }
    }

    /// An id that is bound to this node's address, and to a port below 1024 if that is wanted and permitted.
    fn source(&mut self) -> io::Result<CmId> {
        let address = ip(self.settings.local.nid);
        if self.settings.privileged_port && !self.unprivileged {
            for port in (1..1024).rev() {
                // An id whose binding failed is bound to nothing, but not every kernel lets it be tried again.
                let id = CmId::new(&self.channel)?;
                id.reuse_address()?;
                match id.bind(SocketAddrV4::new(address, port)) {
                    Ok(()) => return Ok(id),
                    Err(error) => match error.raw_os_error() {
                        Some(libc::EADDRINUSE | libc::EADDRNOTAVAIL) => {}
                        Some(libc::EACCES | libc::EPERM) => {
                            self.unprivileged = true;
                            self.log.push(format!(
                                "{}: dials from a port above 1023, since ports below need CAP_NET_BIND_SERVICE: peers \
                                 with require_privileged_port=1 will refuse it",
                                self.settings.local.nid
                            ));
                            break;
                        }
                        _ => return Err(error),
                    },
                }
            }
        }
        let id = CmId::new(&self.channel)?;
        id.bind(SocketAddrV4::new(address, 0))?;
        Ok(id)
    }

    fn add(&mut self, cm: CmId, peer: Nid) -> Id {
        self.last_id += 1;
        let id = self.last_id;
        self.keys.insert(cm.key(), id);
        let end = Endpoint {
            cm,
            peer,
            state: State::Init,
            core: None,
            qp: None,
            number: 0,
            adopted: false,
            connection: None,
            request: None,
            reply: None,
            terms: None,
            next: None,
            failure: None,
            dial: None,
            give_up: Instant::now() + self.settings.patience,
        };
        self.ends.insert(id, end);
        id
    }

    fn take(&mut self, mut happening: Happening) {
        self.removed |= happening.event == Event::DeviceRemoval;
        if let Some(cm) = happening.request.take() {
            // Whose it is, its private data say.
            let id = self.add(cm, Nid::ANY);
            if self.feed(id, Event::ConnectRequest) == Step::Answer {
                self.answer(id, &happening.private_data);
            }
            return;
        }
        let Some(id) = self.keys.get(&happening.key).copied() else {
            if happening.event == Event::DeviceRemoval {
                // The listener's: nobody can come any more, and connections have events of their own.
                self.listener = None;
                self.log.push(format!(
                    "{}: the device {} is being removed",
                    self.settings.local.nid,
                    self.device.name()
                ));
            }
            return;
        };
        if happening.event == Event::Rejected {
            self.rejected(id, &happening);
        }
        let step = self.feed(id, happening.event);
        match step {
            Step::Agree => self.agree(id, &happening.private_data),
            Step::Note => self.log.push(format!(
                "{}: {:?} (status {}) where it was not expected",
                self.settings.local.nid, happening.event, happening.status
            )),
            _ => {}
        }
    }

    /// Runs one event through the table, and does what it asks for where that needs nothing else.
    fn feed(&mut self, id: Id, event: Event) -> Step {
        let Some(end) = self.ends.get_mut(&id) else {
            return Step::Ignore;
        };
        let (next, what) = step(end.state, event);
        end.state = next;
        match what {
            Step::Ignore | Step::Note | Step::Answer | Step::Agree => {}
            Step::Notify => {
                // It fails when the RTU has come meanwhile.
                let _ = end.cm.notify_established();
            }
            Step::ResolveRoute => self.resolve_route(id),
            Step::Connect => self.connect(id),
            Step::Establish => self.establish(id),
            Step::End(why) => self.end(id, why),
            Step::Destroy => self.destroy(id),
        }
        what
    }

    fn resolve_route(&mut self, id: Id) {
        let Some(end) = self.ends.get(&id) else {
            return;
        };
        let failure = match end.cm.device() {
            Some(found) if found != self.device.name() => Failure::OtherDevice {
                found,
                device: self.device.name().to_owned(),
            },
            _ => match end.cm.resolve_route(RESOLVE) {
                Ok(()) => return,
                Err(error) => Failure::Call(format!("rdma_resolve_route: {error}")),
            },
        };
        self.fail(id, failure);
        self.feed(id, Event::Close);
    }

    fn end(&mut self, id: Id, why: End) {
        let failure = match why {
            End::Rejected => None,
            End::NoAddress | End::NoRoute => Some(self.no_route()),
            End::ConnectError | End::Unreachable | End::TimedOut => Some(Failure::Silent),
            End::Reset | End::ByPeer => Some(Failure::BrokenOff),
            End::ByUs => Some(Failure::Closed),
            End::DeviceRemoved => Some(Failure::DeviceRemoved(self.device.name().to_owned())),
        };
        let Some(end) = self.ends.get_mut(&id) else {
            return;
        };
        if end.state == State::Closing {
            // Not where it never was connected, or the peer was first.
            let _ = end.cm.disconnect();
        }
        let (core, adopted, connection) = (end.core, end.adopted, end.connection);
        if let Some(failure) = failure {
            self.fail(id, failure);
        }
        match (adopted, connection, core) {
            (false, ..) => {
                self.feed(id, Event::Drained);
            }
            (true, Some(connection), Some(core)) => {
                self.effects.push(Effect::Close { core, connection });
            }
            // Its core will say that it is ready; then it is closed.
            (true, ..) => {}
        }
    }

    fn destroy(&mut self, id: Id) {
        let Some(mut end) = self.ends.remove(&id) else {
            return;
        };
        self.keys.remove(&end.cm.key());
        let (peer, dial, next) = (end.peer, end.dial, end.next);
        let failure = end.failure.take();
        let (core, qp) = (end.core, end.qp.take());
        // The id goes before its queue pair is used again.
        drop(end);
        if let Some(core) = core.and_then(|core| self.cores.get_mut(core)) {
            core.load = core.load.saturating_sub(1);
            // One that cannot be reset is destroyed, and another is made when it is needed.
            if let Some(mut qp) = qp
                && qp.reset(&self.device).is_ok()
            {
                core.spare.push_back(qp);
            }
        }
        if next.is_none() && !self.ends.values().any(|end| end.peer == peer) {
            self.remembered.gone(peer);
        }
        let Some(Some((_, state))) = dial.and_then(|dial| self.dials.get_mut(dial)) else {
            return;
        };
        match (next, failure, dial) {
            (Some(Next::Redial), _, Some(dial)) => self.attempt(dial),
            (Some(Next::RedialLater | Next::Wait), ..) => {
                *state = Dial::Pausing(Instant::now() + PAUSE);
            }
            (Some(Next::Fail(refused)), ..) => *state = Dial::Failed(refused.into()),
            (_, Some(failure), _) => *state = Dial::Failed(failure),
            _ => {}
        }
    }

    /// Why it ends: what is known first counts.
    fn fail(&mut self, id: Id, failure: Failure) {
        if let Some(end) = self.ends.get_mut(&id) {
            end.failure.get_or_insert(failure);
        }
    }

    fn no_route(&self) -> Failure {
        Failure::NoRoute {
            device: self.device.name().to_owned(),
        }
    }
}

/// Sleeps until one of them is readable, at most so long (`poll(2)`).
pub fn wait(descriptors: &[BorrowedFd<'_>], patience: Duration) {
    let mut polled: Vec<libc::pollfd> = descriptors
        .iter()
        .map(|descriptor| libc::pollfd {
            fd: descriptor.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        })
        .collect();
    let count = libc::nfds_t::try_from(polled.len()).unwrap_or(0);
    let patience = i32::try_from(patience.as_millis()).unwrap_or(i32::MAX);
    // SAFETY: as many elements as is said, borrowed for the call. Whatever it answers, the caller looks.
    unsafe { libc::poll(polled.as_mut_ptr(), count, patience) };
}

fn ip(nid: Nid) -> Ipv4Addr {
    Ipv4Addr::from_bits(nid.address())
}

/// ko2iblnd's port.
pub const SERVICE: u16 = 987;

/// What ko2iblnd waits before it dials again.
const PAUSE: Duration = Duration::from_secs(1);

/// For an address or a route, in milliseconds.
const RESOLVE: i32 = 5000;

/// Queue pairs of a core beyond its connections.
const SPARE: usize = 2;
