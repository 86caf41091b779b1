//! What the connection manager sends, written down for a capture.

use super::{Manager, Message, Seat, To};
use crate::capture::{Mad, Note};
use crate::engine::Id;

impl Manager {
    /// Writes down what is sent.
    pub(super) fn note(&self, to: To, message: &Message) {
        let Some(notes) = &self.notes else { return };
        let note = match to {
            To::Listener { node, asker } => self.request_note(node, asker, message),
            To::Id(id) => self.answer_note(id, message),
        };
        if let Some(note) = note {
            notes.tell(note);
        }
    }

    /// Writes down the answer to a DREQ, which nothing here waits for.
    pub(super) fn note_disconnected(&self, id: Id) {
        if let (Some(notes), Some(end)) = (&self.notes, self.ends.get(&id))
            && let Some(peer) = end.peer_id
        {
            notes.tell(Note {
                from: self.device(end.at),
                to: self.device(end.peer),
                transaction: peer,
                what: Mad::Disconnected {
                    local: short(id),
                    remote: short(peer),
                },
            });
        }
    }

    /// What is sent to one end of a connection, or of an attempt.
    fn answer_note(&self, id: Id, message: &Message) -> Option<Note> {
        let end = self.ends.get(&id)?;
        let peer = end.peer_id.unwrap_or(id);
        let (transaction, what) = match message {
            Message::Reply {
                answerer,
                number,
                private_data,
                ..
            } => {
                let what = Mad::Reply {
                    local: short(*answerer),
                    remote: short(id),
                    queue_pair: *number,
                    private_data: private_data.to_vec(),
                };
                (id, what)
            }
            Message::Reject {
                reason,
                private_data,
            } => {
                let what = Mad::Reject {
                    remote: short(id),
                    reason: *reason,
                    private_data: private_data.to_vec(),
                };
                (id, what)
            }
            Message::ReadyToUse => {
                let what = Mad::ReadyToUse {
                    local: short(peer),
                    remote: short(id),
                };
                (peer, what)
            }
            Message::Disconnect => {
                let what = Mad::Disconnect {
                    local: short(peer),
                    remote: short(id),
                    queue_pair: end.number,
                };
                (peer, what)
            }
            Message::Request { .. } => return None,
        };
        Some(Note {
            from: self.device(end.peer),
            to: self.device(end.at),
            transaction,
            what,
        })
    }

    /// A REQ is for a node, whichever of its cores will take it.
    fn request_note(&self, node: usize, asker: Id, message: &Message) -> Option<Note> {
        let Message::Request {
            from,
            number,
            private_data,
        } = message
        else {
            return None;
        };
        Some(Note {
            from: self.device(*from),
            to: self.device(Seat { node, core: 0 }),
            transaction: asker,
            what: Mad::Request {
                local: short(asker),
                queue_pair: *number,
                private_data: private_data.to_vec(),
            },
        })
    }
}

/// A name as the connection manager's messages carry it.
#[expect(clippy::cast_possible_truncation, reason = "names are numbered from 1")]
const fn short(id: Id) -> u32 {
    id as u32
}
