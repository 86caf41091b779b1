//! How nodes ended.

use o2poll_dataplane::counters::Counters;
use o2poll_dataplane::poller::Leftovers;
use o2poll_dataplane::wire::Nid;
use o2poll_hal::cores::Switches;
use o2poll_hal::count_alloc::Counts;
use o2poll_soft::Gauges;

use crate::capture::Summary;

/// How everything ended.
#[derive(Debug)]
pub struct Finished<A> {
    /// One for each node, in the order of the file.
    pub nodes: Vec<FinishedNode<A>>,
    /// One for each polling thread.
    pub threads: Vec<FinishedThread>,
    /// What the capture holds, if there was one.
    pub capture: Option<Summary>,
}

/// How a node ended.
#[derive(Debug)]
pub struct FinishedNode<A> {
    /// Its name.
    pub nid: Nid,
    /// One for each of its cores.
    pub cores: Vec<FinishedCore>,
    /// Connections that were lost and made again.
    pub reconnected: u64,
    /// Its application.
    pub application: Option<A>,
}

/// How one core of a node ended.
#[derive(Debug)]
pub struct FinishedCore {
    /// What its poller still held; `None` if it did not come to an end in time.
    pub leftovers: Option<Leftovers>,
    /// What its device still held.
    pub device: Option<Gauges>,
    /// Keys of transfers that nothing has ended. A key leaves this count only when it is dead for certain, so one that was
    /// forgotten stays in it.
    pub keys_alive: u64,
    /// Windows that were rebuilt.
    pub windows_rebuilt: u64,
    /// Connections that it got.
    pub connections: u64,
    /// What it has counted.
    pub counters: &'static Counters,
}

impl<A> FinishedNode<A> {
    /// Keys of transfers that nothing has ended, on all cores.
    #[must_use]
    pub fn keys_alive(&self) -> u64 {
        self.cores.iter().map(|core| core.keys_alive).sum()
    }

    /// Whether every core has come to its end and holds nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        let nothing = Some(Leftovers::default());
        self.cores.iter().all(|core| core.leftovers == nothing)
    }
}

/// How a polling thread ended.
#[derive(Clone, Copy, Debug)]
pub struct FinishedThread {
    /// Its core.
    pub core: usize,
    /// What it asked of the allocator while it polled.
    pub allocations: Counts,
    /// How often it was taken off its core, or gave it up, while it polled.
    pub switches: Option<Switches>,
}
