//! What runs on a node's polling thread beside its poller, and the way in and out of it.

use o2poll_dataplane::endpoint::{Event, Submission};
use o2poll_dataplane::memory::Range;
use o2poll_dataplane::peer::Terms;
use o2poll_dataplane::pool::Handle;
use o2poll_dataplane::ring::{Consumer, Producer};
use o2poll_dataplane::time::{Instant, Ticks};
use o2poll_dataplane::wire::Nid;

/// An application that is stepped on its node's polling thread, between two polls; on a node of several cores on the
/// first one's. It reaches the other cores through its [`Port`].
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
    /// Time spent so far in polls of this node that found something to do, on all of its cores.
    pub busy: Ticks,
}

/// What the control side tells an application.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notice {
    /// A connection is up, whoever has made it.
    Connected {
        /// Which of the node's cores has it.
        core: usize,
        /// Its name for submissions to that core.
        connection: Handle,
        /// What was agreed; the peer's NID among it.
        terms: Terms,
        /// This node has made it.
        dialed: bool,
    },
    /// A connection has ended.
    Gone {
        /// Which of the node's cores had it.
        core: usize,
        /// Its name there.
        connection: Handle,
    },
    /// A connection that this node had made is lost and is not made again.
    GivenUp {
        /// Who was at its other end.
        peer: Nid,
    },
    /// Come to an end soon: begin nothing new.
    Finish,
}

/// The application's end of its node's pollers: submissions in, events out.
#[derive(Debug)]
pub struct Port {
    /// One for each core of the node.
    cores: Vec<CorePort>,
    /// The core whose events are taken first.
    next: usize,
}

/// The rings of one core.
#[derive(Debug)]
pub(crate) struct CorePort {
    pub(crate) submissions: Producer<'static, Submission<'static>>,
    pub(crate) events: Consumer<'static, Event<'static>>,
}

impl Port {
    pub(crate) const fn new(cores: Vec<CorePort>) -> Self {
        Self { cores, next: 0 }
    }

    /// Submits to the node's first core.
    ///
    /// # Errors
    /// As [`submit_to`](Self::submit_to).
    pub fn submit(&mut self, submission: Submission<'static>) -> Result<(), Submission<'static>> {
        self.submit_to(0, submission)
    }

    /// Submits to one of the node's cores: a transfer to the one that has its connection.
    ///
    /// # Errors
    /// The submission, when the ring is full: try again after the next poll. Also for a core that is none of the
    /// node's.
    pub fn submit_to(
        &mut self,
        core: usize,
        submission: Submission<'static>,
    ) -> Result<(), Submission<'static>> {
        match self.cores.get_mut(core) {
            Some(core) => core.submissions.push(submission),
            None => Err(submission),
        }
    }

    /// The oldest event of some core that has not been taken, of each core in turn.
    pub fn event(&mut self) -> Option<Event<'static>> {
        for _ in 0..self.cores.len() {
            let event = self.cores.get_mut(self.next)?.events.pop();
            let next = self.next.wrapping_add(1);
            self.next = if next < self.cores.len() { next } else { 0 };
            if event.is_some() {
                return event;
            }
        }
        None
    }

    /// How many cores the node has.
    #[must_use]
    pub const fn cores(&self) -> usize {
        self.cores.len()
    }
}
