//! The account of submissions and events: each submission has exactly one event.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use o2poll_dataplane::endpoint::{Error, Event, Submission};
use o2poll_dataplane::ring::{Consumer, Producer};

/// What is still due.
#[derive(Debug, Default)]
struct Book {
    transfers: HashMap<u64, u32>,
    attaching: HashMap<u64, u32>,
    attached: HashMap<u64, u32>,
    detaching: u32,
    landed: u64,
    /// Nothing is booked.
    closed: bool,
}

/// The application's end of the submission ring; what goes in is booked.
pub struct Submissions {
    ring: Producer<'static, Submission<'static>>,
    book: Arc<Mutex<Book>>,
}

/// The application's end of the event ring; what comes out is booked, and an event that nothing asked for,
/// or asked for once and told twice, panics.
pub struct Events {
    ring: Consumer<'static, Event<'static>>,
    book: Arc<Mutex<Book>>,
}

/// Both ends, on one account.
#[must_use]
pub fn keep(
    submissions: Producer<'static, Submission<'static>>,
    events: Consumer<'static, Event<'static>>,
) -> (Submissions, Events) {
    let book = Arc::new(Mutex::new(Book::default()));
    (
        Submissions {
            ring: submissions,
            book: Arc::clone(&book),
        },
        Events { ring: events, book },
    )
}

impl Submissions {
    /// Submits.
    ///
    /// # Errors
    /// The submission, when the ring is full.
    pub fn push(&mut self, submission: Submission<'static>) -> Result<(), Submission<'static>> {
        enum Due {
            Transfer(u64),
            Attach(u64),
            Detach,
            Nothing,
        }
        let due = match &submission {
            Submission::Transfer(request) => Due::Transfer(request.token.0),
            Submission::Attach(entry) => Due::Attach(entry.token.0),
            Submission::Detach { .. } => Due::Detach,
            Submission::Cancel { .. } => Due::Nothing,
        };
        self.ring.push(submission)?;
        let mut book = self.book.lock().unwrap_or_else(PoisonError::into_inner);
        if book.closed {
            return Ok(());
        }
        match due {
            Due::Transfer(token) => *book.transfers.entry(token).or_default() += 1,
            Due::Attach(token) => *book.attaching.entry(token).or_default() += 1,
            Due::Detach => book.detaching += 1,
            Due::Nothing => {}
        }
        Ok(())
    }

    /// How many submissions fit.
    pub fn free(&mut self) -> usize {
        self.ring.free()
    }
}

impl Events {
    /// The oldest event.
    pub fn pop(&mut self) -> Option<Event<'static>> {
        let event = self.ring.pop()?;
        let mut book = self.book.lock().unwrap_or_else(PoisonError::into_inner);
        if book.closed {
            return Some(event);
        }
        match &event {
            Event::Done { token, .. } => take(&mut book.transfers, token.0, &event),
            Event::Attached { token, .. } => {
                take(&mut book.attaching, token.0, &event);
                *book.attached.entry(token.0).or_default() += 1;
            }
            Event::Detached {
                entry: Some(entry),
                why: None | Some(Error::Used),
            } => {
                take(&mut book.attached, entry.token.0, &event);
            }
            Event::Detached {
                entry: Some(entry), ..
            } => take(&mut book.attaching, entry.token.0, &event),
            Event::Detached { entry: None, .. } => {
                assert!(book.detaching != 0, "nobody detached: {event:?}");
                book.detaching -= 1;
            }
            Event::Landed(landed) => {
                let there = book.attached.get(&landed.token.0).copied().unwrap_or(0);
                assert!(there != 0, "landed in no entry: {landed:?}");
                book.landed += 1;
            }
        }
        Some(event)
    }

    /// Keeps no account, and so allocates nothing. To be chosen before anything is submitted.
    pub fn close(&mut self) {
        let mut book = self.book.lock().unwrap_or_else(PoisonError::into_inner);
        book.closed = true;
    }

    /// Transfers whose event has not come yet.
    #[must_use]
    pub fn due(&self) -> u32 {
        self.book
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .transfers
            .values()
            .sum()
    }

    /// Panics unless every submission has had its event.
    pub fn audit(&self) {
        let book = self.book.lock().unwrap_or_else(PoisonError::into_inner);
        assert!(book.transfers.is_empty(), "without an event: {book:?}");
        assert!(book.attaching.is_empty(), "without an event: {book:?}");
        assert!(book.attached.is_empty(), "not given back: {book:?}");
    }
}

fn take(due: &mut HashMap<u64, u32>, token: u64, event: &Event<'_>) {
    let Some(count) = due.get_mut(&token) else {
        panic!("an event that nothing is due for: {event:?}");
    };
    *count -= 1;
    if *count == 0 {
        due.remove(&token);
    }
}
