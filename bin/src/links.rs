//! The connections of a node to the peers of its jobs, and how transfers are spread over them.

use o2poll_dataplane::endpoint::Error;
use o2poll_dataplane::pool::Handle;
use o2poll_dataplane::wire::Nid;

use crate::application::Notice;

/// A connection of one of the node's cores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Over {
    pub(crate) core: usize,
    pub(crate) connection: Handle,
}

/// How a transfer gets to a peer now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Over(Over),
    /// No connection is up, but one may come.
    Wait,
    /// None will come.
    Never,
}

/// All of them.
#[derive(Debug)]
pub(crate) struct Links {
    /// How many there are to be to each peer.
    each: usize,
    peers: Vec<Peer>,
    all: Vec<Link>,
    /// Where the search for one begins.
    next: usize,
}

#[derive(Debug)]
struct Peer {
    nid: Nid,
    given_up: usize,
}

#[derive(Debug)]
struct Link {
    peer: Nid,
    over: Over,
    /// Transfers that have not ended.
    out: usize,
    /// A transfer has found it closed; the control side will say so.
    closed: bool,
}

impl Links {
    /// Of so many connections to each of these peers. Allocates all it will ever need.
    pub(crate) fn new(peers: impl Iterator<Item = Nid>, each: u8) -> Self {
        let peers: Vec<Peer> = peers.map(|nid| Peer { nid, given_up: 0 }).collect();
        let each = usize::from(each.max(1));
        Self {
            each,
            // A new one may come before the old one is seen to be gone.
            all: Vec::with_capacity(2 * each * peers.len() + SPARE),
            peers,
            next: 0,
        }
    }

    /// A connection came or went.
    pub(crate) fn notice(&mut self, notice: Notice) {
        match notice {
            Notice::Connected {
                core,
                connection,
                terms,
                dialed: true,
            } if self.all.len() < self.all.capacity() => self.all.push(Link {
                peer: terms.peer,
                over: Over { core, connection },
                out: 0,
                closed: false,
            }),
            Notice::Gone { core, connection } => {
                let gone = Over { core, connection };
                self.all.retain(|link| link.over != gone);
            }
            Notice::GivenUp { peer } => {
                if let Some(peer) = self.peers.iter_mut().find(|known| known.nid == peer) {
                    peer.given_up = peer.given_up.saturating_add(1);
                }
            }
            Notice::Connected { .. } | Notice::Finish => {}
        }
    }

    /// Whether every connection is up, or given up.
    pub(crate) fn are_settled(&self) -> bool {
        self.peers.iter().all(|peer| {
            let up = self.all.iter().filter(|link| link.peer == peer.nid).count();
            up.saturating_add(peer.given_up) >= self.each
        })
    }

    /// Over which connection the next transfer to a peer goes: the one with the fewest transfers, each in its turn.
    pub(crate) fn way(&mut self, peer: Nid) -> Way {
        let count = self.all.len();
        let mut best: Option<(usize, &Link)> = None;
        for nth in 0..count {
            let at = self.next.wrapping_add(nth);
            let at = if at < count {
                at
            } else {
                at.wrapping_sub(count)
            };
            if let Some(link) = self.all.get(at)
                && link.peer == peer
                && !link.closed
                && best.is_none_or(|(_, best)| link.out < best.out)
            {
                best = Some((at, link));
            }
        }
        if let Some((at, link)) = best {
            let over = link.over;
            let next = at.wrapping_add(1);
            self.next = if next < count { next } else { 0 };
            return Way::Over(over);
        }
        let given_up = self.peers.iter().find(|known| known.nid == peer);
        if given_up.is_none_or(|peer| peer.given_up >= self.each) {
            Way::Never
        } else {
            Way::Wait
        }
    }

    /// A transfer has begun.
    pub(crate) fn begun(&mut self, over: Over) {
        if let Some(link) = self.find(over) {
            link.out = link.out.saturating_add(1);
        }
    }

    /// A transfer has ended; whether it was its connection that failed, so that it can be made again.
    pub(crate) fn ended(&mut self, over: Over, outcome: Result<u32, Error>) -> bool {
        let closed = matches!(outcome, Err(Error::ConnectionClosed | Error::NotConnected));
        if let Some(link) = self.find(over) {
            link.out = link.out.saturating_sub(1);
            link.closed |= closed;
        }
        closed
    }

    fn find(&mut self, over: Over) -> Option<&mut Link> {
        self.all.iter_mut().find(|link| link.over == over)
    }
}

impl Default for Over {
    /// A name that no connection has: a transfer on it fails at once with `NotConnected`.
    fn default() -> Self {
        Self {
            core: 0,
            connection: Handle::from_bits(u64::MAX),
        }
    }
}

/// Connections beyond those that are wanted.
const SPARE: usize = 8;

#[cfg(test)]
mod tests {
    use super::{Links, Over, Way};
    use crate::application::Notice;
    use o2poll_dataplane::endpoint::Error;
    use o2poll_dataplane::peer::Terms;
    use o2poll_dataplane::pool::Handle;
    use o2poll_dataplane::wire::{Nid, V2};

    const PEER: Nid = Nid::o2ib([10, 0, 0, 1], 0);
    const OTHER: Nid = Nid::o2ib([10, 0, 0, 3], 0);

    fn over(core: usize, bits: u64) -> Over {
        Over {
            core,
            connection: Handle::from_bits(bits),
        }
    }

    fn connected(peer: Nid, over: Over) -> Notice {
        Notice::Connected {
            core: over.core,
            connection: over.connection,
            terms: Terms {
                local: Nid::o2ib([10, 0, 0, 2], 0),
                local_stamp: 1,
                peer,
                peer_stamp: 2,
                version: V2,
                queue_depth: 8,
                max_frags: 257,
                high_water: 4,
                kills_keys: false,
                keys_killed: false,
                write_immediates: false,
            },
            dialed: true,
        }
    }

    fn gone(over: Over) -> Notice {
        Notice::Gone {
            core: over.core,
            connection: over.connection,
        }
    }

    #[test]
    fn transfers_go_to_each_connection_in_turn_and_to_the_one_with_fewest() {
        let mut links = Links::new([PEER, OTHER].into_iter(), 2);
        let (a, b, c) = (over(0, 1), over(1, 1), over(0, 2));
        for (peer, over) in [(PEER, a), (OTHER, c), (PEER, b)] {
            assert!(!links.are_settled());
            links.notice(connected(peer, over));
        }
        let turns: Vec<Way> = (0..4).map(|_| links.way(PEER)).collect();
        assert_eq!(turns, [a, b, a, b].map(Way::Over));
        assert_eq!(links.way(OTHER), Way::Over(c));
        links.begun(a);
        assert_eq!(
            (links.way(PEER), links.way(PEER)),
            (Way::Over(b), Way::Over(b))
        );
        links.begun(b);
        links.begun(b);
        assert!(!links.ended(a, Ok(1)));
        assert_eq!(links.way(PEER), Way::Over(a));
    }

    #[test]
    fn the_other_connection_serves_while_one_is_lost() {
        let mut links = Links::new([PEER].into_iter(), 2);
        let (a, b) = (over(0, 1), over(1, 1));
        links.notice(connected(PEER, a));
        links.notice(connected(PEER, b));
        assert!(links.are_settled());
        links.begun(a);
        assert!(links.ended(a, Err(Error::ConnectionClosed)));
        // Before the control side has told.
        assert_eq!([links.way(PEER), links.way(PEER)], [Way::Over(b); 2]);
        links.notice(gone(a));
        links.notice(connected(PEER, over(0, 9)));
        let turns = [links.way(PEER), links.way(PEER)];
        assert!(turns.contains(&Way::Over(over(0, 9))), "{turns:?}");
    }

    #[test]
    fn without_a_connection_one_waits_until_the_last_is_given_up() {
        let mut links = Links::new([PEER].into_iter(), 2);
        assert_eq!(links.way(PEER), Way::Wait);
        assert_eq!(links.way(OTHER), Way::Never, "no peer of ours");
        links.notice(connected(PEER, over(0, 1)));
        links.notice(Notice::GivenUp { peer: PEER });
        assert!(links.are_settled());
        assert_eq!(links.way(PEER), Way::Over(over(0, 1)));
        links.notice(gone(over(0, 1)));
        assert_eq!(links.way(PEER), Way::Wait);
        links.notice(Notice::GivenUp { peer: PEER });
        assert_eq!(links.way(PEER), Way::Never);
    }

    #[test]
    fn only_what_failed_with_its_connection_is_made_again() {
        let mut links = Links::new([PEER].into_iter(), 1);
        for (outcome, again) in [
            (Err(Error::ConnectionClosed), true),
            (Err(Error::NotConnected), true),
            (Err(Error::TimedOut), false),
            (Err(Error::Peer(-61)), false),
            (Ok(0), false),
        ] {
            assert_eq!(links.ended(over(0, 1), outcome), again);
        }
    }
}
