//! A connection that a node wants to have: when it is made again, and when it is given up.

use core::time::Duration;
use std::time::Instant;

use o2poll_dataplane::pool::Handle;
use o2poll_dataplane::wire::Nid;

use crate::engine::Outcome;

/// How often and how soon a lost connection is made again. ko2iblnd's first ten attempts are immediate and the rest come
/// once a second; here the first is, and pauses grow from there, since the usual peer is one that restarts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pauses {
    /// In a row; 0: never.
    pub(crate) attempts: u32,
    /// Before the second one.
    pub(crate) least: Duration,
    /// Before any.
    pub(crate) most: Duration,
}

impl Pauses {
    /// Before the attempt that follows so many others.
    fn after(&self, tries: u32) -> Duration {
        let Some(doublings) = tries.checked_sub(1) else {
            return Duration::ZERO;
        };
        let factor = 1_u32.checked_shl(doublings).unwrap_or(u32::MAX);
        self.least.saturating_mul(factor).min(self.most)
    }
}

/// One connection to one peer.
#[derive(Debug)]
pub(crate) struct Keeper {
    node: usize,
    peer: Nid,
    state: State,
    /// It has been up.
    was_up: bool,
    /// Attempts since it was lost.
    tries: u32,
    /// Why it was lost.
    why: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Dialing(usize),
    Up {
        dial: usize,
        core: usize,
        connection: Handle,
        since: Instant,
    },
    Pausing(Instant),
    GivenUp,
}

/// What is to be done for a connection now.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Look {
    Nothing,
    /// Dial.
    Dial,
    /// It is up again.
    Back,
    /// An attempt has failed; there will be another.
    Again {
        failed: usize,
        why: String,
        pause: Duration,
    },
    /// It is not made again: told once.
    GivenUp {
        failed: Option<usize>,
        why: String,
        tries: u32,
    },
}

impl Keeper {
    /// A connection that is being dialed for the first time.
    pub(crate) const fn new(node: usize, peer: Nid, dial: usize) -> Self {
        Self {
            node,
            peer,
            state: State::Dialing(dial),
            was_up: false,
            tries: 0,
            why: String::new(),
        }
    }

    /// Whose it is.
    pub(crate) const fn node(&self) -> usize {
        self.node
    }

    /// To whom.
    pub(crate) const fn peer(&self) -> Nid {
        self.peer
    }

    pub(crate) fn is_of(&self, node: usize, peer: Nid) -> bool {
        self.node == node && self.peer == peer
    }

    pub(crate) const fn is_up(&self) -> bool {
        matches!(self.state, State::Up { .. })
    }

    /// Whether it has ever been up.
    pub(crate) const fn was_up(&self) -> bool {
        self.was_up
    }

    /// Whether it is this connection of this core.
    pub(crate) fn holds(&self, node: usize, core: usize, connection: Handle) -> bool {
        let here = (core, connection);
        self.node == node
            && matches!(self.state, State::Up { core, connection, .. } if (core, connection) == here)
    }

    /// It is dialed once more.
    pub(crate) const fn dialed(&mut self, dial: usize) {
        self.tries = self.tries.saturating_add(1);
        self.state = State::Dialing(dial);
    }

    /// It has ended. The attempt that had made it is of no use any more.
    pub(crate) fn lost(&mut self, now: Instant, pauses: &Pauses, why: String) -> Option<usize> {
        let State::Up { dial, since, .. } = self.state else {
            return None;
        };
        // One that never lives long is not made for ever.
        if now.saturating_duration_since(since) >= pauses.most {
            self.tries = 0;
        }
        self.why = why;
        self.state = State::Pausing(now + pauses.after(self.tries));
        Some(dial)
    }

    /// What there is to do. `outcome` tells how an attempt stands.
    pub(crate) fn look(
        &mut self,
        now: Instant,
        pauses: &Pauses,
        outcome: impl FnOnce(usize) -> Outcome,
    ) -> Look {
        match self.state {
            State::Dialing(dial) => match outcome(dial) {
                Outcome::Trying => Look::Nothing,
                Outcome::Up(link) => {
                    self.state = State::Up {
                        dial,
                        core: link.core,
                        connection: link.connection,
                        since: now,
                    };
                    if core::mem::replace(&mut self.was_up, true) {
                        Look::Back
                    } else {
                        Look::Nothing
                    }
                }
                Outcome::Failed(why) => {
                    // One that has never been there is a mistake in the file, or a node that is not up.
                    if !self.was_up || self.tries >= pauses.attempts {
                        return self.give_up(Some(dial), why);
                    }
                    let pause = pauses.after(self.tries);
                    self.state = State::Pausing(now + pause);
                    Look::Again {
                        failed: dial,
                        why,
                        pause,
                    }
                }
            },
            State::Pausing(_) if self.tries >= pauses.attempts => {
                let why = core::mem::take(&mut self.why);
                self.give_up(None, why)
            }
            State::Pausing(until) if until <= now => Look::Dial,
            State::Pausing(_) | State::Up { .. } | State::GivenUp => Look::Nothing,
        }
    }

    fn give_up(&mut self, failed: Option<usize>, why: String) -> Look {
        self.state = State::GivenUp;
        Look::GivenUp {
            failed,
            why,
            tries: self.tries,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Keeper, Look, Pauses};
    use crate::engine::Outcome;
    use crate::node::Link;
    use core::time::Duration;
    use o2poll_dataplane::pool::Handle;
    use o2poll_dataplane::wire::Nid;
    use std::time::Instant;

    const PEER: Nid = Nid::o2ib([10, 0, 0, 1], 0);
    const PAUSES: Pauses = Pauses {
        attempts: 4,
        least: Duration::from_millis(100),
        most: Duration::from_millis(250),
    };

    fn up(bits: u64) -> Outcome {
        Outcome::Up(Link {
            core: 1,
            connection: Handle::from_bits(bits),
            queue_depth: 8,
        })
    }

    fn failed() -> Outcome {
        Outcome::Failed(String::from("nobody there"))
    }

    /// A keeper whose connection 7 is up since `now`.
    fn kept(now: Instant) -> Keeper {
        let mut keeper = Keeper::new(0, PEER, 3);
        assert_eq!(keeper.look(now, &PAUSES, |_| up(7)), Look::Nothing);
        assert!(keeper.holds(0, 1, Handle::from_bits(7)));
        assert!(!keeper.holds(0, 0, Handle::from_bits(7)));
        keeper
    }

    #[test]
    fn the_first_attempt_is_made_at_once_and_pauses_grow_to_the_longest() {
        let mut now = Instant::now();
        let mut keeper = kept(now);
        now += Duration::from_secs(9);
        assert_eq!(keeper.lost(now, &PAUSES, String::from("cut")), Some(3));
        for (dial, pause) in [(4, 100), (5, 200), (6, 250)] {
            assert_eq!(keeper.look(now, &PAUSES, |_| failed()), Look::Dial);
            keeper.dialed(dial);
            let look = keeper.look(now, &PAUSES, |_| Outcome::Trying);
            assert_eq!(look, Look::Nothing);
            let pause = Duration::from_millis(pause);
            let Look::Again {
                failed: last,
                pause: found,
                ..
            } = keeper.look(now, &PAUSES, |_| failed())
            else {
                panic!("given up early");
            };
            assert_eq!((last, found), (dial, pause));
            now += pause - Duration::from_millis(1);
            assert_eq!(keeper.look(now, &PAUSES, |_| failed()), Look::Nothing);
            now += Duration::from_millis(1);
        }
        assert_eq!(keeper.look(now, &PAUSES, |_| failed()), Look::Dial);
        keeper.dialed(8);
        let look = keeper.look(now, &PAUSES, |_| failed());
        assert!(
            matches!(
                &look,
                Look::GivenUp {
                    failed: Some(8),
                    tries: 4,
                    ..
                }
            ),
            "{look:?}"
        );
        let after = keeper.look(now, &PAUSES, |_| up(1));
        assert_eq!(after, Look::Nothing, "told once");
    }

    #[test]
    fn one_that_dies_again_and_again_is_given_up_and_one_that_lived_is_not() {
        let mut now = Instant::now();
        let mut keeper = kept(now);
        let again = |keeper: &mut Keeper, now: Instant| {
            let look = keeper.look(now, &PAUSES, |_| failed());
            if look == Look::Dial {
                keeper.dialed(1);
                assert_eq!(keeper.look(now, &PAUSES, |_| up(7)), Look::Back);
            }
            look
        };
        for _ in 0..20 {
            now += PAUSES.most;
            keeper.lost(now, &PAUSES, String::from("cut"));
            assert_eq!(again(&mut keeper, now), Look::Dial);
        }
        let mut dials = 1;
        loop {
            keeper.lost(now, &PAUSES, String::from("cut"));
            match again(&mut keeper, now + PAUSES.most) {
                Look::Dial => dials += 1,
                Look::GivenUp {
                    failed: None, why, ..
                } => {
                    assert_eq!(why, "cut");
                    break;
                }
                other => panic!("{other:?}"),
            }
            now += PAUSES.most;
            now += Duration::from_millis(1);
            // It lived a moment only.
        }
        assert_eq!(dials, PAUSES.attempts);
    }

    #[test]
    fn one_that_was_never_there_is_given_up_at_its_first_failure() {
        let now = Instant::now();
        let mut keeper = Keeper::new(0, PEER, 3);
        assert!(!keeper.was_up());
        assert!(matches!(
            keeper.look(now, &PAUSES, |_| failed()),
            Look::GivenUp {
                failed: Some(3),
                tries: 0,
                ..
            }
        ));
    }
}
