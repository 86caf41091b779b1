//! From a REQ to a connection: what is asked, and whom to answer how.

use o2poll_dataplane::peer::table::Event;
use o2poll_dataplane::peer::{Answer, Terms, accepted, answer, request};
use o2poll_dataplane::wire::REJECT_BYTES;

use super::{Dial, Effect, Listener, Manager, Message, To};
use crate::engine::Id;

impl Manager {
    pub(super) fn connect(&mut self, id: Id) {
        let Some(end) = self.ends.get_mut(&id) else {
            return;
        };
        let peer = self.nodes[end.peer.node].local.nid;
        let listener = &mut self.nodes[end.at.node];
        let remembered = listener.remembered.entry(peer).or_default();
        let asked = request(&listener.local, remembered, peer);
        end.request = Some(asked);
        let message = Message::Request {
            from: end.at,
            number: end.number,
            private_data: asked.private_data,
        };
        let to = To::Listener {
            node: end.peer.node,
            asker: id,
        };
        self.send(to, message);
    }

    pub(super) fn answer(&mut self, id: Id, private_data: &[u8]) {
        let Some(end) = self.ends.get_mut(&id) else {
            return;
        };
        let Listener {
            local, remembered, ..
        } = &mut self.nodes[end.at.node];
        let answer = answer(private_data, None, local, move |nid| {
            Some(remembered.entry(nid).or_default())
        });
        match answer {
            Answer::Accept { terms, reply } => {
                end.terms = Some(terms);
                end.reply = Some(reply);
                self.adopt(id, terms, true);
            }
            Answer::Reject {
                record,
                refusal,
                close_others,
                ..
            } => {
                let (node, peer) = (end.at.node, end.peer.node);
                self.log
                    .push(format!("{}: refuses a connection: {refusal}", local.nid));
                self.reject(id, record);
                if close_others {
                    let others: Vec<Id> = self
                        .ends
                        .iter()
                        .filter(|(_, end)| end.at.node == node && end.peer.node == peer)
                        .filter(|(_, end)| end.terms.is_some())
                        .map(|(id, _)| *id)
                        .collect();
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
        let listener = &mut self.nodes[end.at.node];
        let remembered = listener.remembered.entry(asked.peer).or_default();
        match accepted(private_data, &asked, &listener.local, remembered) {
            Ok(terms) => {
                end.terms = Some(terms);
                self.adopt(id, terms, false);
            }
            Err(refusal) => {
                self.fail(id, refusal.to_string());
                self.feed(id, Event::Close);
            }
        }
    }

    pub(super) fn adopt(&mut self, id: Id, terms: Terms, accepted: bool) {
        let Some(end) = self.ends.get_mut(&id) else {
            return;
        };
        end.adopted = true;
        self.effects.push(Effect::Adopt {
            at: end.at,
            id,
            number: end.number,
            peer: end.peer,
            peer_number: end.peer_number,
            terms,
            accepted,
        });
    }

    pub(super) fn reject(&mut self, id: Id, private_data: [u8; REJECT_BYTES]) {
        if let Some(end) = self.ends.get_mut(&id) {
            // It is told by the REJ, and by nothing else.
            if let Some(peer) = end.peer_id.take() {
                let reason = CM_CONSUMER_DEFINED;
                self.send(
                    To::Id(peer),
                    Message::Reject {
                        reason,
                        private_data,
                    },
                );
            }
        }
        self.feed(id, Event::Close);
    }

    pub(super) fn establish(&mut self, id: Id, terms: Option<Terms>) {
        let Some(end) = self.ends.get_mut(&id) else {
            return;
        };
        let (Some(connection), Some(terms)) = (end.connection, terms) else {
            return;
        };
        self.effects.push(Effect::Establish {
            at: end.at,
            connection,
            terms,
            dialed: end.dial.is_some(),
        });
        self.log.push(format!(
            "{}: connected with {}: queue depth {}, {} fragments",
            terms.local, terms.peer, terms.queue_depth, terms.max_frags
        ));
        if let Some(dial) = end.dial
            && let Some((_, _, state)) = self.dials.get_mut(&dial)
        {
            *state = Dial::Up {
                core: end.at.core,
                connection,
                terms,
            };
        }
    }
}

/// CM reject reason "consumer defined": the private data tell.
const CM_CONSUMER_DEFINED: u16 = 28;
