//! What joins the nodes of one process: wires between their devices, and a connection manager.
//!
//! The wires are lap rings, one in each direction for every pair of nodes. The connection manager carries the
//! private data of the RDMA CM's messages (REQ, REP, REJ, RTU, DREQ) byte for byte, as they would cross a
//! network, and follows [`peer::table`](o2poll_dataplane::peer::table) for what each of them means. One thing
//! differs from a card: a software queue pair is made connected, so the dialing side makes its own when the REP
//! has named the peer's.

#[cfg(test)]
mod tests;

mod handshake;
mod notes;
mod wires;

use core::time::Duration;
use std::collections::{HashMap, VecDeque};
use std::time::Instant;

use o2poll_dataplane::peer::table::{End, Event, State, Step, step};
use o2poll_dataplane::peer::{
    Local, Next, REPLY_BYTES, Remembered, Request, Terms, rejected, too_deep,
};
use o2poll_dataplane::pool::Handle;
use o2poll_dataplane::wire::{
    CONN_BYTES, ConnParams, MESSAGE_BYTES, Nid, REJECT_BYTES, RejectRecord, Why,
};

use crate::capture::Notes;
use crate::engine::{Ending, Id};

pub(crate) use self::wires::{port, wires};

/// One core of a node: both by their place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Seat {
    pub(crate) node: usize,
    pub(crate) core: usize,
}

/// What the control side must tell a core.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effect {
    /// Make a queue pair and give it to the core.
    Adopt {
        at: Seat,
        id: Id,
        /// Of the queue pair.
        number: u32,
        /// Where the peer's queue pair is.
        peer: Seat,
        /// Of the peer's queue pair.
        peer_number: u32,
        terms: Terms,
        accepted: bool,
    },
    /// Messages may flow.
    Establish {
        at: Seat,
        connection: Handle,
        terms: Terms,
        dialed: bool,
    },
    /// End it.
    Close { at: Seat, connection: Handle },
}

/// How an attempt to connect stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Dial {
    /// Under way.
    Trying,
    /// To be tried again.
    Pausing(Instant),
    /// Connected.
    Up {
        core: usize,
        connection: Handle,
        terms: Terms,
    },
    /// Not connected, and why.
    Failed(String),
}

impl Dial {
    /// The core, its name for the connection, and the terms, once it is connected; nothing while it is under way. Or why it
    /// is not.
    pub(crate) fn link(&self) -> Result<Option<(usize, Handle, &Terms)>, &str> {
        match self {
            Self::Trying | Self::Pausing(_) => Ok(None),
            Self::Up {
                core,
                connection,
                terms,
            } => Ok(Some((*core, *connection, terms))),
            Self::Failed(why) => Err(why),
        }
    }
}

/// A message of the connection manager, on its way.
#[derive(Clone, Copy, Debug)]
enum Message {
    Request {
        from: Seat,
        number: u32,
        private_data: [u8; CONN_BYTES],
    },
    Reply {
        answerer: Id,
        core: usize,
        number: u32,
        private_data: [u8; REPLY_BYTES],
    },
    Reject {
        reason: u16,
        private_data: [u8; REJECT_BYTES],
    },
    ReadyToUse,
    Disconnect,
}

/// Where a message goes: to a node that listens, or to one end.
#[derive(Clone, Copy, Debug)]
enum To {
    Listener { node: usize, asker: Id },
    Id(Id),
}

/// One end of a connection.
struct Endpoint {
    at: Seat,
    peer: Seat,
    peer_id: Option<Id>,
    peer_number: u32,
    number: u32,
    state: State,
    /// What was asked, on the dialing side.
    request: Option<Request>,
    /// The REP, on the other side.
    reply: Option<[u8; REPLY_BYTES]>,
    terms: Option<Terms>,
    connection: Option<Handle>,
    /// A core has its queue pair.
    adopted: bool,
    /// What a refusal said comes next.
    next: Option<Next>,
    /// The peer has closed it.
    by_peer: bool,
    dial: Option<usize>,
}

/// One node as the connection manager knows it.
struct Listener {
    local: Local,
    cores: usize,
    remembered: HashMap<Nid, Remembered>,
}

/// The connection manager of all nodes of a process.
pub(crate) struct Manager {
    nodes: Vec<Listener>,
    ends: HashMap<Id, Endpoint>,
    dials: HashMap<usize, (usize, usize, Dial)>,
    last_dial: usize,
    under_way: VecDeque<(To, Message)>,
    effects: Vec<Effect>,
    log: Vec<String>,
    /// Who writes down what is sent.
    notes: Option<Notes>,
    last_id: Id,
    last_number: u32,
}

impl Manager {
    /// Of nodes with so many cores each.
    pub(crate) fn new(nodes: impl IntoIterator<Item = (Local, usize)>) -> Self {
        Self {
            nodes: nodes
                .into_iter()
                .map(|(local, cores)| Listener {
                    local,
                    cores,
                    remembered: HashMap::new(),
                })
                .collect(),
            ends: HashMap::new(),
            dials: HashMap::new(),
            last_dial: 0,
            under_way: VecDeque::new(),
            effects: Vec::new(),
            log: Vec::new(),
            notes: None,
            last_id: 0,
            last_number: FIRST_NUMBER,
        }
    }

    /// Writes down what is sent from now on.
    pub(crate) fn tell(&mut self, notes: Notes) {
        self.notes = Some(notes);
    }

    /// Begins to connect one node to another; the name of the attempt.
    pub(crate) fn dial(&mut self, from: usize, to: usize) -> usize {
        self.last_dial += 1;
        let dial = self.last_dial;
        if to < self.nodes.len() {
            self.dials.insert(dial, (from, to, Dial::Trying));
            self.attempt(dial);
        } else {
            let failed = Dial::Failed(String::from("no such node"));
            self.dials.insert(dial, (from, to, failed));
        }
        dial
    }

    /// Nobody will ask for this attempt any more.
    pub(crate) fn forget(&mut self, dial: usize) {
        self.dials.remove(&dial);
    }

    /// The node of this name.
    pub(crate) fn node_of(&self, nid: Nid) -> Option<usize> {
        self.nodes
            .iter()
            .position(|listener| listener.local.nid == nid)
    }

    /// The place of a core's device among all of them.
    pub(crate) fn device(&self, at: Seat) -> usize {
        let before = self.nodes.iter().take(at.node);
        before.map(|listener| listener.cores).sum::<usize>() + at.core
    }

    /// The core of a node that has fewest connections.
    fn least_loaded(&self, node: usize) -> Seat {
        let cores = self.nodes.get(node).map_or(1, |listener| listener.cores);
        let load = |core: &usize| {
            let here = Seat { node, core: *core };
            self.ends.values().filter(|end| end.at == here).count()
        };
        let core = (0..cores).min_by_key(load).unwrap_or(0);
        Seat { node, core }
    }

    /// How an attempt stands.
    pub(crate) fn outcome(&self, dial: usize) -> Option<&Dial> {
        self.dials.get(&dial).map(|(_, _, state)| state)
    }

    /// What is remembered of a peer.
    #[cfg(test)]
    fn remembered(&mut self, node: usize, peer: Nid) -> &mut Remembered {
        self.nodes[node].remembered.entry(peer).or_default()
    }

    /// Delivers everything that is under way and looks at the time; what is to be done about it.
    pub(crate) fn run(&mut self, now: Instant) -> Vec<Effect> {
        let mut due = Vec::new();
        for (dial, (_, _, state)) in &mut self.dials {
            if matches!(state, Dial::Pausing(until) if *until <= now) {
                *state = Dial::Trying;
                due.push(*dial);
            }
        }
        for dial in due {
            self.attempt(dial);
        }
        while let Some((to, message)) = self.under_way.pop_front() {
            self.deliver(to, message);
        }
        core::mem::take(&mut self.effects)
    }

    /// Lines for whoever wants to follow.
    pub(crate) fn log(&mut self) -> Vec<String> {
        core::mem::take(&mut self.log)
    }

    /// A core has the queue pair and its receives are posted.
    pub(crate) fn ready(&mut self, id: Id, connection: Handle) {
        let Some(end) = self.ends.get_mut(&id) else {
            return;
        };
        end.connection = Some(connection);
        let (at, peer) = (end.at, end.peer_id);
        match end.state {
            State::PassiveWait => {
                if let (Some(private_data), Some(peer)) = (end.reply, peer) {
                    let number = end.number;
                    self.send(
                        To::Id(peer),
                        Message::Reply {
                            answerer: id,
                            core: at.core,
                            number,
                            private_data,
                        },
                    );
                }
            }
            State::Established => {
                let terms = end.terms;
                self.establish(id, terms);
                if let Some(peer) = peer {
                    self.send(To::Id(peer), Message::ReadyToUse);
                }
            }
            _ => self.effects.push(Effect::Close { at, connection }),
        }
    }

    /// A core has no room for the queue pair, or its device holds none of that depth: then less is asked for, now and
    /// whenever there is another connection with that peer (LU-7124, LU-10213, LU-12901).
    pub(crate) fn no_room(&mut self, id: Id, why: NoRoom) {
        let Some(end) = self.ends.get_mut(&id) else {
            return;
        };
        end.adopted = false;
        if matches!(end.state, State::Closing | State::Disconnected) {
            // It was given up meanwhile, and waited for the core.
            self.feed(id, Event::Drained);
            return;
        }
        let Listener {
            local, remembered, ..
        } = &mut self.nodes[end.at.node];
        if let (
            NoRoom::Depth,
            Some(
                terms @ Terms {
                    queue_depth: 2.., ..
                },
            ),
        ) = (why, end.terms)
        {
            let depth = terms.queue_depth / 2;
            let remembered = remembered.entry(terms.peer).or_default();
            remembered.lower_depth(depth);
            self.log.push(format!(
                "{}: its device holds no queue pair of depth {} for {}: {depth} from now on",
                local.nid, terms.queue_depth, terms.peer
            ));
            if end.state == State::PassiveWait {
                let record = too_deep(terms.version, local, remembered);
                self.reject(id, record.encode());
            } else {
                end.next = Some(Next::Redial);
                self.feed(id, Event::Close);
            }
            return;
        }
        let local = *local;
        let record = RejectRecord {
            version: end.terms.map_or(0x12, |terms| terms.version),
            why: Why::NoResources,
            incarnation: local.stamp,
            params: Some(ConnParams {
                queue_depth: local.queue_depth,
                max_frags: local.max_frags,
                max_msg_size: MESSAGE_BYTES,
            }),
        };
        self.log
            .push(format!("{}: no room for another connection", local.nid));
        if end.state == State::PassiveWait {
            self.reject(id, record.encode());
        } else {
            self.fail(
                id,
                String::from("this node has no room for another connection"),
            );
            self.feed(id, Event::Close);
        }
    }

    /// Ends a connection from this side.
    pub(crate) fn close(&mut self, id: Id) {
        self.feed(id, Event::Close);
    }

    /// Every end of a node that is not destroyed yet.
    pub(crate) fn alive(&self, node: usize) -> Vec<Id> {
        let here = self.ends.iter().filter(|(_, end)| end.at.node == node);
        here.map(|(id, _)| *id).collect()
    }

    /// The two nodes of an end: whose it is, and the other.
    pub(crate) fn nodes_of(&self, id: Id) -> Option<(Nid, Nid)> {
        let end = self.ends.get(&id)?;
        Some((
            self.nodes[end.at.node].local.nid,
            self.nodes[end.peer.node].local.nid,
        ))
    }

    /// A core has given the queue pair back; who wanted that.
    pub(crate) fn gone(&mut self, id: Id) -> Ending {
        let ending = self.ends.get(&id).map_or(Ending::Asked, |end| {
            match end.state {
                State::PassiveWait | State::Established => Ending::Core,
                // Who was asked may be left when its peer has done what it wanted.
                _ if end.by_peer && end.dial.is_some() => {
                    Ending::Failed(String::from("broken off by the peer"))
                }
                _ => Ending::Asked,
            }
        });
        let unasked = ending == Ending::Core;
        if let Some(end) = self.ends.get_mut(&id) {
            end.adopted = false;
            end.connection = None;
        }
        if unasked {
            // The core has seen an error: for the connection manager that is this side's wish.
            self.feed(id, Event::Close);
        } else {
            self.feed(id, Event::Drained);
        }
        ending
    }

    fn attempt(&mut self, dial: usize) {
        let Some(&(from, to, _)) = self.dials.get(&dial) else {
            return;
        };
        // Which of the peer's cores it will be, the REP says.
        let peer = Seat { node: to, core: 0 };
        let id = self.add(self.least_loaded(from), peer, State::Init);
        if let Some(end) = self.ends.get_mut(&id) {
            end.dial = Some(dial);
        }
        // Within one process every address resolves.
        self.feed(id, Event::AddrResolved);
    }

    fn add(&mut self, at: Seat, peer: Seat, state: State) -> Id {
        self.last_id += 1;
        self.last_number = ((self.last_number + 1) & 0x00ff_ffff).max(FIRST_NUMBER);
        let end = Endpoint {
            at,
            peer,
            peer_id: None,
            peer_number: 0,
            number: self.last_number,
            state,
            request: None,
            reply: None,
            terms: None,
            connection: None,
            adopted: false,
            next: None,
            by_peer: false,
            dial: None,
        };
        self.ends.insert(self.last_id, end);
        self.last_id
    }

    fn send(&mut self, to: To, message: Message) {
        self.note(to, &message);
        self.under_way.push_back((to, message));
    }

    fn deliver(&mut self, to: To, message: Message) {
        let id = match (to, message) {
            (
                To::Listener { node, asker },
                Message::Request {
                    from,
                    number,
                    private_data,
                },
            ) => {
                let id = self.add(self.least_loaded(node), from, State::Init);
                if let Some(end) = self.ends.get_mut(&id) {
                    end.peer_id = Some(asker);
                    end.peer_number = number;
                }
                if self.feed(id, Event::ConnectRequest) == Step::Answer {
                    self.answer(id, &private_data);
                }
                return;
            }
            (To::Id(id), _) => id,
            (To::Listener { .. }, _) => return,
        };
        match message {
            Message::Reply {
                answerer,
                core,
                number,
                private_data,
            } => {
                let waits = |end: &Endpoint| end.state == State::ActiveConnect;
                if !self.ends.get(&id).is_some_and(waits) {
                    // The attempt was given up meanwhile: the connection manager refuses a REP that nobody waits for.
                    self.feed(answerer, Event::Rejected);
                    return;
                }
                if let Some(end) = self.ends.get_mut(&id) {
                    end.peer_id = Some(answerer);
                    end.peer.core = core;
                    end.peer_number = number;
                }
                if self.feed(id, Event::ConnectResponse) == Step::Agree {
                    self.agree(id, &private_data);
                }
            }
            Message::Reject {
                reason,
                private_data,
            } => {
                if let Some(end) = self.ends.get_mut(&id)
                    && let Some(request) = &end.request
                {
                    let listener = &mut self.nodes[end.at.node];
                    let remembered = listener.remembered.entry(request.peer).or_default();
                    let local = &listener.local;
                    let next = rejected(reason, &private_data, request, local, remembered);
                    self.log.push(format!(
                        "{}: {} refused the connection: {next:?}",
                        local.nid, request.peer
                    ));
                    end.next = Some(next);
                }
                self.feed(id, Event::Rejected);
            }
            Message::ReadyToUse => {
                self.feed(id, Event::Established);
            }
            Message::Disconnect => {
                self.note_disconnected(id);
                self.feed(id, Event::Disconnected);
            }
            Message::Request { .. } => {}
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
            Step::Ignore | Step::Note | Step::Answer | Step::Agree | Step::Notify => {}
            Step::ResolveRoute => {
                self.feed(id, Event::RouteResolved);
            }
            Step::Connect => self.connect(id),
            Step::Establish => {
                let terms = end.terms;
                self.establish(id, terms);
            }
            Step::End(why) => self.end(id, why),
            Step::Destroy => self.destroy(id),
        }
        what
    }

    fn end(&mut self, id: Id, why: End) {
        let Some(end) = self.ends.get_mut(&id) else {
            return;
        };
        let (at, adopted, connection, again) =
            (end.at, end.adopted, end.connection, end.next.is_some());
        if end.state == State::Closing
            && let Some(peer) = end.peer_id
        {
            self.send(To::Id(peer), Message::Disconnect);
        }
        if why == End::ByPeer
            && let Some(end) = self.ends.get_mut(&id)
        {
            end.by_peer = true;
        }
        if !again {
            self.fail(id, String::from(words(why)));
        }
        match (adopted, connection) {
            (false, _) => {
                self.feed(id, Event::Drained);
            }
            (true, Some(connection)) => self.effects.push(Effect::Close { at, connection }),
            // Its core will say that it is ready; then it is closed.
            (true, None) => {}
        }
    }

    fn destroy(&mut self, id: Id) {
        let Some(end) = self.ends.remove(&id) else {
            return;
        };
        let (Some(dial), Some(next)) = (end.dial, end.next) else {
            return;
        };
        let Some((_, _, state)) = self.dials.get_mut(&dial) else {
            return;
        };
        match next {
            Next::Redial => self.attempt(dial),
            Next::RedialLater | Next::Wait => *state = Dial::Pausing(Instant::now() + PAUSE),
            Next::Fail(refused) => *state = Dial::Failed(refused.to_string()),
        }
    }

    /// The attempt of this end, if it is one that nothing is known of yet, has failed.
    fn fail(&mut self, id: Id, why: String) {
        if let Some(dial) = self.ends.get(&id).and_then(|end| end.dial)
            && let Some((_, _, state @ (Dial::Trying | Dial::Up { .. }))) =
                self.dials.get_mut(&dial)
        {
            *state = Dial::Failed(why);
        }
    }
}

/// How it ended, for people.
const fn words(why: End) -> &'static str {
    match why {
        End::NoAddress => "its address was not found",
        End::NoRoute => "there is no route to it",
        End::ConnectError => "the handshake failed",
        End::Unreachable => "it does not answer",
        End::Rejected => "refused",
        End::Reset => "broken off by the peer",
        End::ByPeer => "closed by the peer",
        End::ByUs => "closed by this node",
        End::TimedOut => "not made in time",
        End::DeviceRemoved => "the device was removed",
    }
}

/// Why a core does not take a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoRoom {
    /// All its connections are in use.
    Full,
    /// Its device refuses a queue pair of that depth.
    Depth,
}

/// What ko2iblnd waits before it dials again.
const PAUSE: Duration = Duration::from_secs(1);
/// Queue pairs 0 and 1 of a port are the management agents' own; cards leave some more out.
const FIRST_NUMBER: u32 = 0x10;
