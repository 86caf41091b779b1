//! What runs on a node's polling thread beside its poller, and the way in and out of it.

use o2poll_dataplane::endpoint::{Event, Submission};
use o2poll_dataplane::memory::Range;
use o2poll_dataplane::peer::Terms;
use o2poll_dataplane::pool::Handle;
use o2poll_dataplane::ring::{Consumer, Producer};
use o2poll_dataplane::time::{Instant, Ticks};

/// An application that is stepped on its node's polling thread, between two polls.
///
/// A step must be short, since peers wait while it runs, and must not block. From the first step on it
/// must not allocate either; the report of a run says whether it did.
pub trait Application: Send + 'static {
    /// Bytes of each range of registered memory that it wants, each less than 4 GiB.
    fn memory(&self) -> Vec<usize> {
        Vec::new()
    }

    /// Called once before the first step, on the polling thread, with that memory, page-aligned. May allocate.
    fn begin(&mut self, memory: Vec<Range<'static>>);

    /// The control side has something to say.
    fn notice(&mut self, notice: Notice);

    /// One step; how much was done, 0 for nothing.
    fn step(&mut self, port: &mut Port, turn: Turn) -> u32;
}

/// No application: of nodes that are all handed out.
#[derive(Clone, Copy, Debug)]
pub enum Nobody {}

impl Application for Nobody {
    fn begin(&mut self, _: Vec<Range<'static>>) {
        match *self {}
    }

    fn notice(&mut self, _: Notice) {
        match *self {}
    }

    fn step(&mut self, _: &mut Port, _: Turn) -> u32 {
        match *self {}
    }
}

/// The moment of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    /// The time, after the poll before it.
    pub now: Instant,
    /// Time spent so far in polls of this node that found something to do.
    pub busy: Ticks,
}

/// What the control side tells an application.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notice {
    /// A connection is up, whoever has made it.
    Connected {
        /// Its name for submissions.
        connection: Handle,
        /// What was agreed; the peer's NID among it.
        terms: Terms,
        /// This node has made it.
        dialed: bool,
    },
    /// A connection has ended.
    Gone {
        /// Its name.
        connection: Handle,
    },
    /// Come to an end soon: begin nothing new.
    Finish,
}

/// The application's end of a poller: submissions in, events out.
#[derive(Debug)]
pub struct Port {
    pub(crate) submissions: Producer<'static, Submission<'static>>,
    pub(crate) events: Consumer<'static, Event<'static>>,
}

impl Port {
    /// Submits.
    ///
    /// # Errors
    /// The submission, when the ring is full: try again after the next poll.
    pub fn submit(&mut self, submission: Submission<'static>) -> Result<(), Submission<'static>> {
        self.submissions.push(submission)
    }

    /// The oldest event that has not been taken.
    pub fn event(&mut self) -> Option<Event<'static>> {
        self.events.pop()
    }
}
