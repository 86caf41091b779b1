//! Two nodes on two threads: the same pollers as in a [`World`], but nobody takes turns.

use core::sync::atomic::{AtomicUsize, Ordering};
use core::time::Duration;
use std::thread;
use std::time;

use o2poll_dataplane::poller::Order;
use o2poll_dataplane::time::{Instant, Ticks};

use crate::{Backend, Node, Software, World};

/// One node on a thread of its own.
pub struct Core<'w, B: Backend = Software> {
    /// The node.
    pub node: &'w mut Node<B>,
    first: Instant,
    start: time::Instant,
    met: &'w AtomicUsize,
    meetings: usize,
    idle: u32,
}

impl<B: Backend> Core<'_, B> {
    /// One turn. Gives way to the other thread if there was nothing to do for a while, or if there is
    /// only one processor.
    pub fn step(&mut self) {
        let elapsed = self.start.elapsed();
        assert!(elapsed < LONGEST, "no end in sight");
        let nanoseconds = u64::try_from(elapsed.as_nanos()).expect("short");
        if self.node.step(self.first.after(Ticks(nanoseconds))) {
            self.idle = 0;
            return;
        }
        self.idle = self.idle.saturating_add(1);
        if self.idle > PATIENCE {
            thread::yield_now();
        }
    }

    /// Goes on until `done`.
    pub fn until(&mut self, mut done: impl FnMut(&mut Node<B>) -> bool) {
        while !done(self.node) {
            self.step();
        }
    }

    /// Goes on until the other thread has come here, too.
    pub fn meet(&mut self) {
        self.meetings += 1;
        // Relaxed: what the threads tell each other goes through the device's rings.
        self.met.fetch_add(1, Ordering::Relaxed);
        while self.met.load(Ordering::Relaxed) < 2 * self.meetings {
            self.step();
        }
    }

    /// Stops the node, while the other is stopping, too. Events that come meanwhile are dropped.
    pub fn stop(&mut self) {
        self.node.order(Order::Stop);
        self.until(|node| {
            while node.events.pop().is_some() {}
            node.stopped.is_some()
        });
        // Without this one the other could not tell that its queue pair was let go of.
        self.meet();
    }
}

impl<B: Backend> World<B>
where
    Node<B>: Send,
{
    /// Runs `body` for each node at the same time; the world's own clock goes on from there. Time is
    /// counted in nanoseconds meanwhile.
    pub fn on_two_threads<R: Send>(
        &mut self,
        body: impl Fn(usize, Core<'_, B>) -> R + Sync,
    ) -> [R; 2] {
        let met = AtomicUsize::new(0);
        let (start, first) = (time::Instant::now(), self.now);
        let core = |node| Core {
            node,
            first,
            start,
            met: &met,
            meetings: 0,
            idle: 0,
        };
        let [left, right] = &mut self.nodes;
        let (left, right, body) = (core(left), core(right), &body);
        let results = thread::scope(|scope| {
            let other = scope.spawn(move || body(1, right));
            let this = body(0, left);
            [this, other.join().expect("the other thread has failed")]
        });
        let elapsed = u64::try_from(start.elapsed().as_nanos()).expect("short");
        self.now = first.after(Ticks(elapsed));
        results
    }
}

/// Idle turns until the other thread may have the processor.
const PATIENCE: u32 = 200;

/// Much more than any test takes, sanitizers and neighbours included.
const LONGEST: Duration = Duration::from_secs(240);
