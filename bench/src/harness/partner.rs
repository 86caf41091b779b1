//! The other half of a contender: a thread on the other core.

use core::hint;
use core::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::Arc;
use std::thread;

use core_affinity::CoreId;
use crossbeam_utils::CachePadded;

use super::Batch;
use crate::tsc;

/// Waits politely: spins at first, then lets others have the core, so that a partner that was
/// preempted by us can come back.
#[derive(Debug, Default)]
pub struct Patience(u32);

impl Patience {
    /// Called after an attempt that got nowhere.
    #[inline]
    pub fn wait(&mut self) {
        self.0 += 1;
        if self.0 & 0x3fff == 0 {
            thread::yield_now();
        } else {
            hint::spin_loop();
        }
    }
}

/// The other half of a contender: a thread on the other core, asleep between samples so that it
/// does not disturb the others'.
pub(super) struct Partner {
    shared: Arc<Shared>,
    thread: Option<thread::JoinHandle<()>>,
}

/// How the two halves meet. Written once per sample.
#[derive(Default)]
struct Shared {
    /// Operations asked for; 0: none.
    wanted: CachePadded<AtomicU64>,
    /// The partner is awake and on its mark.
    ready: CachePadded<AtomicBool>,
    /// The measuring thread has seen that, and begins.
    go: CachePadded<AtomicBool>,
    /// The partner has done its operations.
    done: CachePadded<AtomicBool>,
    /// The row is over.
    over: AtomicBool,
    /// Involuntary context switches of the partner during the sample.
    preempted: AtomicI64,
}

impl Partner {
    pub(super) fn start(core: CoreId, mut far: Batch) -> Self {
        let shared = Arc::new(Shared::default());
        let seen = Arc::clone(&shared);
        let thread = thread::spawn(move || {
            core_affinity::set_for_current(core);
            loop {
                // Acquire pairs with the Release in `begin` and in `drop`.
                let wanted = seen.wanted.swap(0, Ordering::Acquire);
                if wanted == 0 {
                    if seen.over.load(Ordering::Acquire) {
                        return;
                    }
                    thread::park();
                    continue;
                }
                let before = tsc::preemptions();
                // Release pairs with the Acquire in `begin`.
                seen.ready.store(true, Ordering::Release);
                let mut patience = Patience::default();
                // Acquire pairs with the Release in `begin`.
                while !seen.go.swap(false, Ordering::Acquire) {
                    patience.wait();
                }
                far(wanted);
                // Release pairs with the Acquire in `Running::wait`.
                seen.done.store(true, Ordering::Release);
                // Release pairs with the Acquire in `Running::preempted`, which waits for it.
                seen.preempted
                    .store(tsc::preemptions() - before, Ordering::Release);
            }
        });
        Self {
            shared,
            thread: Some(thread),
        }
    }

    /// Wakes the partner and returns when both may begin.
    pub(super) fn begin(&mut self, operations: u64) -> Running<'_> {
        self.shared.preempted.store(-1, Ordering::Relaxed);
        // Release pairs with the Acquire of the partner's swap.
        self.shared.wanted.store(operations, Ordering::Release);
        if let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
        let mut patience = Patience::default();
        // Acquire pairs with the partner's Release.
        while !self.shared.ready.swap(false, Ordering::Acquire) {
            patience.wait();
        }
        // Release pairs with the Acquire of the partner's swap.
        self.shared.go.store(true, Ordering::Release);
        Running(&self.shared)
    }
}

impl Drop for Partner {
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // The partner of a half that panicked waits for ever. One that panicked has said so itself.
            if !thread::panicking() {
                let _ = thread.join();
            }
        }
    }
}

/// A sample on two cores, begun.
pub(super) struct Running<'a>(&'a Shared);

impl Running<'_> {
    #[inline]
    pub(super) fn wait(&self) {
        let mut patience = Patience::default();
        // Acquire pairs with the partner's Release.
        while !self.0.done.swap(false, Ordering::Acquire) {
            patience.wait();
        }
    }

    pub(super) fn preempted(&self) -> bool {
        let mut patience = Patience::default();
        loop {
            // Acquire pairs with the partner's Release.
            match self.0.preempted.load(Ordering::Acquire) {
                -1 => patience.wait(),
                count => return count != 0,
            }
        }
    }
}
