//! What a job has asked for and what came of it, transfer by transfer: each has a name of its own and must end once, with
//! all of its bytes or with an error.

use o2poll_dataplane::endpoint::{Error, Token};

/// The transfers of one job, at most one at a time in each of its places.
#[derive(Debug)]
pub struct Ledger {
    /// What is under way in each place.
    out: Vec<Option<Asked>>,
    /// The name of the last one; those of one place never repeat within 2^32 transfers.
    serial: u32,
    /// Transfers that were submitted.
    pub posted: u64,
    /// PUTs that ended well.
    pub puts: u64,
    /// GETs that brought all that was asked for.
    pub gets: u64,
    /// The errors of those that failed, and how often each was the reason.
    errors: [Option<(Error, u64)>; MOST_ERRORS],
    /// Failures for other reasons than the first [`MOST_ERRORS`].
    other: u64,
    /// Of those that failed, the ones that the poller refused before they had a slot: it does not count them.
    pub refused: u64,
    /// Events of transfers that were not under way: they had ended, or were never submitted.
    pub twice: u64,
}

/// A transfer that is under way.
#[derive(Clone, Copy, Debug)]
struct Asked {
    serial: u32,
    put: bool,
    /// Bytes that it must move; `None` where the peer decides.
    length: Option<u32>,
}

impl Ledger {
    /// Of a job that has so many transfers under way at most.
    pub(crate) fn new(places: usize) -> Self {
        Self {
            out: vec![None; places],
            serial: 0,
            posted: 0,
            puts: 0,
            gets: 0,
            errors: [None; MOST_ERRORS],
            other: 0,
            refused: 0,
            twice: 0,
        }
    }

    /// The name that the next transfer has, in this place.
    #[inline]
    pub(crate) const fn token(&self, place: usize) -> Token {
        Token((self.serial.wrapping_add(1) as u64) << 32 | (place as u64 & PLACE))
    }

    /// It has been submitted under that name: a PUT or not, of so many bytes.
    #[inline]
    pub(crate) fn posted(&mut self, token: Token, put: bool, length: Option<u32>) {
        self.serial = serial(token);
        self.posted = self.posted.wrapping_add(1);
        if let Some(out) = self.out.get_mut(place(token)) {
            *out = Some(Asked {
                serial: self.serial,
                put,
                length,
            });
        }
    }

    /// It has ended: in which place, and with what. A peer that moves less than it was asked for has not done it. `None` for
    /// what is not under way, which is counted and is nobody's.
    #[inline]
    pub(crate) fn ended(
        &mut self,
        token: Token,
        outcome: Result<u32, Error>,
    ) -> Option<(usize, Result<u32, Error>)> {
        let place = place(token);
        let out = self.out.get_mut(place);
        let known = out.and_then(|out| out.take_if(|asked| asked.serial == serial(token)));
        let Some(asked) = known else {
            self.twice = self.twice.saturating_add(1);
            return None;
        };
        let outcome = match outcome {
            Ok(bytes) if asked.length.is_some_and(|length| length != bytes) => Err(Error::NoRoom),
            other => other,
        };
        match outcome {
            Ok(_) if asked.put => self.puts = self.puts.wrapping_add(1),
            Ok(_) => self.gets = self.gets.wrapping_add(1),
            Err(error) => self.failed(error),
        }
        Some((place, outcome))
    }

    /// Transfers that have not ended.
    #[must_use]
    pub fn never(&self) -> u64 {
        self.out.iter().flatten().count() as u64
    }

    /// Why transfers failed, and how many for each reason; `None` for all reasons but the first few.
    pub fn failures(&self) -> impl Iterator<Item = (Option<Error>, u64)> + '_ {
        let other = (self.other != 0).then_some((None, self.other));
        let named = self.errors.iter().flatten();
        named
            .map(|(error, count)| (Some(*error), *count))
            .chain(other)
    }

    #[cold]
    fn failed(&mut self, error: Error) {
        if REFUSALS.contains(&error) {
            self.refused = self.refused.wrapping_add(1);
        }
        for known in &mut self.errors {
            let (of, count) = known.get_or_insert((error, 0));
            if *of == error {
                *count = count.wrapping_add(1);
                return;
            }
        }
        self.other = self.other.wrapping_add(1);
    }
}

/// Where the transfer of that name is.
#[inline]
const fn place(token: Token) -> usize {
    (token.0 & PLACE) as usize
}

#[inline]
const fn serial(token: Token) -> u32 {
    (token.0 >> 32) as u32
}

/// The part of a name that says where.
const PLACE: u64 = 0xffff_ffff;

/// Errors that are told apart.
const MOST_ERRORS: usize = 6;

/// What a poller says of a request that it does not begin.
const REFUSALS: [Error; 3] = [Error::NotConnected, Error::ShuttingDown, Error::TooLong];

#[cfg(test)]
mod tests {
    use super::{Ledger, MOST_ERRORS};
    use o2poll_dataplane::endpoint::{Error, Token};

    /// Submits one in this place.
    fn post(ledger: &mut Ledger, place: usize, put: bool) -> Token {
        let token = ledger.token(place);
        assert_eq!(token, ledger.token(place), "a full ring changes nothing");
        ledger.posted(token, put, Some(8));
        token
    }

    fn settled(ledger: &Ledger) -> bool {
        let failed: u64 = ledger.failures().map(|(_, count)| count).sum();
        ledger.twice == 0
            && ledger.never() == 0
            && ledger.posted == ledger.puts + ledger.gets + failed
    }

    #[test]
    fn each_transfer_is_counted_by_how_it_ended() {
        let mut ledger = Ledger::new(3);
        let put = post(&mut ledger, 0, true);
        let get = post(&mut ledger, 2, false);
        let short = post(&mut ledger, 1, false);
        assert_eq!(ledger.never(), 3);
        assert_eq!(ledger.ended(get, Ok(8)), Some((2, Ok(8))));
        assert_eq!(ledger.ended(put, Ok(8)), Some((0, Ok(8))));
        assert_eq!(
            ledger.ended(short, Ok(7)),
            Some((1, Err(Error::NoRoom))),
            "fewer bytes than asked for are not its data"
        );
        let lost = post(&mut ledger, 1, true);
        let closed = Err(Error::NotConnected);
        assert_eq!(ledger.ended(lost, closed), Some((1, closed)));
        assert_eq!((ledger.posted, ledger.puts, ledger.gets), (4, 1, 1));
        assert_eq!(ledger.refused, 1);
        let failures: Vec<_> = ledger.failures().collect();
        assert_eq!(
            failures,
            [(Some(Error::NoRoom), 1), (Some(Error::NotConnected), 1)]
        );
        assert!(settled(&ledger));
    }

    #[test]
    fn an_event_that_comes_twice_is_found_whatever_is_under_way_in_its_place() {
        let mut ledger = Ledger::new(1);
        let first = post(&mut ledger, 0, false);
        assert!(ledger.ended(first, Ok(8)).is_some());
        assert!(settled(&ledger));
        assert_eq!(ledger.ended(first, Ok(8)), None);
        assert_eq!(ledger.twice, 1);
        assert!(!settled(&ledger));
        let second = post(&mut ledger, 0, false);
        assert_eq!(ledger.ended(first, Ok(8)), None, "it is not the second's");
        assert_eq!((ledger.twice, ledger.never()), (2, 1));
        assert!(ledger.ended(second, Ok(8)).is_some());
        assert_eq!((ledger.gets, ledger.never()), (2, 0));
    }

    #[test]
    fn an_event_that_never_comes_is_found() {
        let mut ledger = Ledger::new(2);
        let _lost = post(&mut ledger, 0, false);
        let other = post(&mut ledger, 1, false);
        assert!(ledger.ended(other, Ok(8)).is_some());
        assert_eq!((ledger.twice, ledger.never()), (0, 1));
        assert!(!settled(&ledger));
        // Its place is used again, as if it had ended: it is missing in the sum.
        let next = post(&mut ledger, 0, false);
        assert!(ledger.ended(next, Ok(8)).is_some());
        assert_eq!((ledger.twice, ledger.never()), (0, 0));
        assert!(!settled(&ledger));
    }

    #[test]
    fn an_event_of_nobody_is_found() {
        let mut ledger = Ledger::new(1);
        assert_eq!(ledger.ended(Token(0), Ok(8)), None);
        assert_eq!(ledger.ended(Token(1 << 32 | 7), Ok(8)), None);
        assert_eq!(ledger.twice, 2);
    }

    #[test]
    fn no_failure_goes_uncounted_however_many_reasons_there_are() {
        let mut ledger = Ledger::new(1);
        for errno in 1..=10 {
            let token = post(&mut ledger, 0, true);
            ledger.ended(token, Err(Error::Peer(-errno)));
        }
        let failures: Vec<_> = ledger.failures().collect();
        assert_eq!(failures.len(), MOST_ERRORS + 1);
        assert_eq!(failures.last(), Some(&(None, 4)));
        assert!(settled(&ledger));
    }
}
