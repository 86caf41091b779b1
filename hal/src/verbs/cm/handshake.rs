//! From a REQ to a connection: what is asked, whom to answer how, and the queue pair that is in it.

use o2poll_dataplane::peer::table::{Event, State};
use o2poll_dataplane::peer::{Answer, Terms, accepted, answer, rejected, request, too_deep};
use o2poll_dataplane::poller;
use o2poll_dataplane::wire::{ConnParams, MESSAGE_BYTES, Nid, REJECT_BYTES, RejectRecord, V2, Why};

use super::raw::{Happening, Parameters};
use super::{CmError, Core, Dial, Effect, Failure, Id, Manager, Settings};
use crate::verbs::{DeviceError, QueuePair, Shape};

impl Manager {
    pub(super) fn connect(&mut self, id: Id) {
        let known = self.ends.get(&id).map(|end| end.peer);
        let known = known.and_then(|peer| self.remembered.get(peer));
        let wanted = known.map_or(u16::MAX, |known| known.queue_depth.min(known.held_depth));
        let wanted = wanted.min(self.settings.local.queue_depth);
        let connected = self.take_queue_pair(id, wanted).and_then(|held| {
            let end = self.ends.get_mut(&id).ok_or(Failure::Closed)?;
            if held < wanted {
                self.remembered.entry(end.peer).lower_depth(held);
                self.log
                    .push(lowered(self.settings.local.nid, wanted, end.peer, held));
            }
            let remembered = self.remembered.entry(end.peer);
            let asked = request(&self.settings.local, remembered, end.peer);
            end.request = Some(asked);
            let parameters = Parameters {
                private_data: &asked.private_data,
                number: end.number,
            };
            end.cm
                .connect(parameters)
                .map_err(|error| Failure::Call(format!("rdma_connect: {error}")))
        });
        if let Err(failure) = connected {
            self.fail(id, failure);
            self.feed(id, Event::Close);
        }
    }

    /// Gives an end a queue pair of the core that has least to do, in INIT; which depth that holds, if it cannot be the
    /// one that is wanted.
    fn take_queue_pair(&mut self, id: Id, wanted: u16) -> Result<u16, Failure> {
        let most = self.settings.connections;
        let (index, core) = self
            .cores
            .iter_mut()
            .enumerate()
            .filter(|(_, core)| core.load < most)
            .min_by_key(|(_, core)| core.load)
            .ok_or(Failure::NoRoom)?;
        let call = |error: CmError| Failure::Call(error.to_string());
        // In their order, so that one that was just given up rests longest.
        let deep = core.spare.iter().position(|qp| depth_of(qp) >= wanted);
        let spare = match deep {
            Some(deep) => core.spare.remove(deep),
            None => None,
        };
        let mut qp = match spare {
            Some(qp) => qp,
            None => match core.make(&self.settings, wanted) {
                Ok(qp) => qp,
                // One that is there already holds something.
                Err(error) => core.spare.pop_front().ok_or_else(|| call(error))?,
            },
        };
        let held = depth_of(&qp);
        let end = self.ends.get_mut(&id).ok_or(Failure::Closed)?;
        core.load += 1;
        end.core = Some(index);
        end.number = qp.number();
        let done = end.cm.initialise(&mut qp, &self.device).map_err(call);
        end.qp = Some(qp);
        done.map(|()| held)
    }

    pub(super) fn answer(&mut self, id: Id, private_data: &[u8]) {
        let Self {
            ends,
            dials,
            remembered,
            settings,
            ..
        } = self;
        let Some(end) = ends.get(&id) else {
            return;
        };
        let port = end.cm.peer_port();
        let in_use = || {
            let dialled = dials.iter().flatten().map(|(nid, _)| *nid);
            ends.values().map(|end| end.peer).chain(dialled).collect()
        };
        let mut asker = None;
        let answer = answer(private_data, Some(port), &settings.local, |nid| {
            asker = Some(nid);
            remembered.asker(nid, in_use)
        });
        let Some(end) = ends.get_mut(&id) else {
            return;
        };
        if let Some(nid) = asker {
            end.peer = nid;
        }
        match answer {
            Answer::Accept { terms, reply } => {
                end.terms = Some(terms);
                end.reply = Some(reply);
                match self.take_queue_pair(id, terms.queue_depth) {
                    Ok(held) if held < terms.queue_depth => self.refuse_depth(id, &terms, held),
                    Ok(_) => self.adopt(id, terms, true),
                    Err(Failure::NoRoom) => self.refuse_for_room(id),
                    Err(failure) => {
                        self.log
                            .push(format!("{}: cannot accept: {failure}", terms.local));
                        self.refuse_for_room(id);
                    }
                }
            }
            Answer::Reject {
                record,
                refusal,
                close_others,
                ..
            } => {
                let (local, peer) = (settings.local.nid, end.peer);
                self.log
                    .push(format!("{local}: refuses a connection: {refusal}"));
                self.reject(id, &record);
                if close_others {
                    let others = self.ends.iter().filter(|(other, end)| {
                        **other != id && end.peer == peer && end.terms.is_some()
                    });
                    let others: Vec<Id> = others.map(|(id, _)| *id).collect();
                    for id in others {
                        self.close(id);
                    }
                }
            }
        }
    }

    pub(super) fn agree(&mut self, id: Id, private_data: &[u8]) {
        let Some(end) = self.ends.get_mut(&id) else {
            return;
        };
        let Some(asked) = end.request else { return };
        let remembered = self.remembered.entry(asked.peer);
        match accepted(private_data, &asked, &self.settings.local, remembered) {
            Ok(terms) => {
                end.terms = Some(terms);
                self.adopt(id, terms, false);
            }
            Err(refusal) => {
                self.fail(id, Failure::BadAnswer(refusal.to_string()));
                self.feed(id, Event::Close);
            }
        }
    }

    /// Connects the queue pair and gives it to its core.
    fn adopt(&mut self, id: Id, terms: Terms, accepted: bool) {
        let Some(end) = self.ends.get_mut(&id) else {
            return;
        };
        let (Some(mut qp), Some(core)) = (end.qp.take(), end.core) else {
            return;
        };
        match end
            .cm
            .make_ready(&mut qp, &self.device, self.settings.timeout)
        {
            Ok(()) => {
                end.adopted = true;
                self.effects.push(Effect::Adopt {
                    core,
                    id,
                    qp,
                    terms,
                    accepted,
                });
            }
            Err(error) => {
                end.qp = Some(qp);
                self.log
                    .push(format!("{}: cannot connect: {error}", terms.local));
                if accepted {
                    self.refuse_for_room(id);
                } else {
                    self.fail(id, Failure::Call(error.to_string()));
                    self.feed(id, Event::Close);
                }
            }
        }
    }

    /// The device holds no queue pair of the depth that was asked for: the asker may have less, now and later (LU-7124,
    /// LU-10213, LU-12901).
    fn refuse_depth(&mut self, id: Id, terms: &Terms, held: u16) {
        let local = self.settings.local;
        let remembered = self.remembered.entry(terms.peer);
        remembered.lower_depth(held);
        let record = too_deep(terms.version, &local, remembered);
        self.log
            .push(lowered(local.nid, terms.queue_depth, terms.peer, held));
        self.reject(id, &record.encode());
    }

    pub(super) fn refuse_for_room(&mut self, id: Id) {
        let Some(end) = self.ends.get(&id) else {
            return;
        };
        let local = self.settings.local;
        self.log
            .push(format!("{}: no room for another connection", local.nid));
        if end.state == State::PassiveWait {
            let record = RejectRecord {
                version: end.terms.map_or(V2, |terms| terms.version),
                why: Why::NoResources,
                incarnation: local.stamp,
                params: Some(ConnParams {
                    queue_depth: local.queue_depth,
                    max_frags: local.max_frags,
                    max_msg_size: MESSAGE_BYTES,
                }),
            };
            self.reject(id, &record.encode());
        } else {
            self.fail(id, Failure::NoRoom);
            self.feed(id, Event::Close);
        }
    }

    fn reject(&mut self, id: Id, record: &[u8; REJECT_BYTES]) {
        if let Some(end) = self.ends.get(&id)
            && let Err(error) = end.cm.reject(record)
        {
            self.log
                .push(format!("{}: rdma_reject: {error}", self.settings.local.nid));
        }
        self.feed(id, Event::Close);
    }

    /// Asks what follows a refusal. The attempt goes first.
    pub(super) fn rejected(&mut self, id: Id, happening: &Happening) {
        let Some(end) = self.ends.get_mut(&id) else {
            return;
        };
        let Some(request) = &end.request else { return };
        let reason = u16::try_from(happening.status).unwrap_or(0);
        let remembered = self.remembered.entry(request.peer);
        let local = &self.settings.local;
        let next = rejected(reason, &happening.private_data, request, local, remembered);
        self.log.push(format!(
            "{}: {} refused the connection: {next:?}",
            local.nid, request.peer
        ));
        end.next = Some(next);
    }

    pub(super) fn establish(&mut self, id: Id) {
        let Some(end) = self.ends.get_mut(&id) else {
            return;
        };
        let (Some(core), Some(connection), Some(terms)) = (end.core, end.connection, end.terms)
        else {
            return;
        };
        self.effects.push(Effect::Establish {
            core,
            connection,
            terms,
            dialed: end.dial.is_some(),
        });
        self.log.push(format!(
            "{}: connected with {}: queue depth {}, {} fragments",
            terms.local, terms.peer, terms.queue_depth, terms.max_frags
        ));
        if let Some(dial) = end.dial
            && let Some(Some((_, state))) = self.dials.get_mut(dial)
        {
            *state = Dial::Up {
                core,
                connection,
                terms,
            };
        }
    }
}

impl Core {
    /// Makes a queue pair of this depth, or of half of it, and so on down to 1, where the device refuses more.
    pub(super) fn make(&self, settings: &Settings, depth: u16) -> Result<QueuePair, CmError> {
        let mut depth = depth.max(1);
        loop {
            let sizes = poller::Shape {
                queue_depth: depth,
                ..settings.core
            }
            .sizes();
            let shape = Shape {
                send_depth: sizes.send_wr,
                recv_depth: sizes.recv_wr,
                ..settings.shape
            };
            match QueuePair::new(&self.domain, &self.cq, shape) {
                Err(error) if depth > 1 && is_too_much(&error) => depth /= 2,
                made => return made.map_err(CmError::Device),
            }
        }
    }
}

/// The depth of which a queue pair holds all receives.
pub(super) fn depth_of(qp: &QueuePair) -> u16 {
    let (_, receives) = qp.depths();
    u16::try_from(receives.saturating_sub(2) / 2).unwrap_or(u16::MAX)
}

/// Whether less may be had. `ibv_create_qp(3)`: EINVAL for what the device has not, ENOMEM for what is used up.
fn is_too_much(error: &DeviceError) -> bool {
    match error {
        DeviceError::TooMany { .. } => true,
        DeviceError::Call { source, .. } => {
            matches!(source.raw_os_error(), Some(libc::ENOMEM | libc::EINVAL))
        }
        _ => false,
    }
}

fn lowered(node: Nid, wanted: u16, peer: Nid, held: u16) -> String {
    format!(
        "{node}: its device holds no queue pair of depth {wanted} for {peer}: {held} from now on"
    )
}
