//! Orders of the control side.

use super::{Order, Poller, Reason, Receive, Received, Report, Shape};
use crate::connection::{Connection, State};
use crate::nic::Nic;
use crate::peer::Terms;
use crate::pool::Handle;
use crate::registration::Descriptor;
use crate::time::Instant;
use crate::transfer::Phase;
use crate::wire::V2;

impl<N: Nic> Poller<'_, N> {
    /// Carries out what was ordered. An order is taken only when its report has room.
    pub(super) fn obey(&mut self, now: Instant) -> u32 {
        let mut work = 0_u32;
        while !self.ends.orders.is_empty()
            && self.ends.reports.free() > 0
            && let Some(order) = self.ends.orders.pop()
        {
            work = work.saturating_add(1);
            match order {
                Order::Adopt {
                    qp,
                    terms,
                    accepted,
                    token,
                } => self.adopt(qp, terms, accepted, token, now),
                Order::Establish { connection, terms } => {
                    let choices = self.choices(&terms);
                    if let Some(state) = self.connections.get_mut(connection)
                        && state.state != State::Closing
                    {
                        if state.state == State::Adopted {
                            state.settle(terms, choices);
                        } else {
                            // Messages, and their credits, may have moved already.
                            state.state = State::Established;
                        }
                        state.last_sent = now;
                        self.list(connection);
                    }
                }
                Order::Close { connection } => self.close(connection, Reason::Closed),
                Order::Window { window, of } => self.take_window(window, of),
                Order::Mapped { window, of } => self.take_mapping(window, of),
                Order::NotMapped { of } => self.no_mapping(of),
                Order::Unmapped => self.unmapped(),
                Order::Stop => self.stop(),
            }
        }
        if self.stopping {
            work = work.saturating_add(self.wind_down());
        }
        work
    }

    fn adopt(&mut self, qp: N::QueuePair, terms: Terms, accepted: bool, token: u64, now: Instant) {
        // Version 1 has other rules for credits and NOOPs, and nobody speaks it any more.
        let fits = terms.version == V2
            && terms.queue_depth != 0
            && terms.queue_depth <= self.limits.shape.queue_depth
            && self.connections.vacant() > 0
            && !self.stopping;
        if !fits {
            let by_device = false;
            let _ = self.ends.reports.push(Report::Refused {
                qp,
                token,
                by_device,
            });
            return;
        }
        let name = match self.nic.adopt(qp) {
            Ok(name) => name,
            Err(qp) => {
                let by_device = true;
                let _ = self.ends.reports.push(Report::Refused {
                    qp,
                    token,
                    by_device,
                });
                return;
            }
        };
        let state = if accepted {
            State::Accepted
        } else {
            State::Adopted
        };
        let choices = self.choices(&terms);
        let mut connection = Connection::new(name, terms, choices, state, token, now);
        let shape = Shape {
            queue_depth: terms.queue_depth,
            ..self.limits.shape
        };
        connection.send_wr = shape.send_wr();
        let Ok(connection) = self.connections.insert(connection) else {
            return;
        };
        // `depth` for the peer's requests, `depth` for the answers to ours, two for NOOPs: all posted
        // before the peer can send the first.
        let receives = u32::from(terms.queue_depth)
            .saturating_mul(2)
            .saturating_add(2);
        for _ in 0..receives {
            let Some(buffer) = self.messages.take() else {
                break;
            };
            let receive = Receive {
                connection,
                state: Received::Lent,
            };
            match self.receives.insert(receive) {
                Ok(receive) => self.repost(connection, receive, buffer, false),
                Err(_) => self.messages.give(buffer),
            }
        }
        let _ = self.ends.reports.push(Report::Ready { connection, token });
    }

    fn take_window(&mut self, window: N::Window, of: Option<Handle>) {
        match self.nic.adopt_window(window) {
            Ok((region, key)) => {
                let descriptor = Descriptor::new(region, key);
                if let Err(descriptor) = self.windows.add(descriptor)
                    && let Some(window) = self.nic.retire_window(descriptor.region())
                {
                    let _ = self.ends.reports.push(Report::Retired { window });
                }
            }
            Err(window) => {
                let _ = self.ends.reports.push(Report::Retired { window });
            }
        }
        if let Some(transfer) = of
            && let Some(state) = self.transfers.get(transfer)
            && state.phase == Phase::Rebuilding
        {
            // The old window is destroyed, and its key with it.
            if state.role.is_sink() {
                self.key_died();
            }
            self.end(transfer);
        }
    }
}
