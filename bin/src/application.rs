//! What runs on a node's polling thread beside its poller, and the way in and out of it.

use o2poll_dataplane::memory::Range;
use o2poll_dataplane::peer::Terms;
use o2poll_dataplane::pool::Handle;
use o2poll_dataplane::time::{Instant, Ticks};
use o2poll_dataplane::wire::Nid;

use crate::port::Port;

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
