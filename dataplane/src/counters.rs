//! What an operator reads: written by one core, read by any.

use core::sync::atomic::{AtomicU64, Ordering};

/// A number that one thread changes and any may read.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Zero.
    #[must_use]
    pub const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Adds; only the owning core calls this, so that no read-modify-write is needed.
    pub fn add(&self, amount: u64) {
        // Relaxed: one writer, and a reader orders nothing by it.
        let value = self.0.load(Ordering::Relaxed).wrapping_add(amount);
        self.0.store(value, Ordering::Relaxed);
    }

    /// Sets a gauge.
    pub fn set(&self, value: u64) {
        // Relaxed: as in `add`.
        self.0.store(value, Ordering::Relaxed);
    }

    /// The value now.
    #[must_use]
    pub fn get(&self) -> u64 {
        // Relaxed: as in `add`.
        self.0.load(Ordering::Relaxed)
    }
}

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counters of one polling core.
        #[derive(Debug, Default)]
        pub struct Counters {
            $($(#[$doc])* pub $name: Counter,)*
        }

        impl Counters {
            /// All zero.
            #[must_use]
            pub const fn new() -> Self {
                Self { $($name: Counter::new(),)* }
            }

            /// Every counter with its name, in the order of declaration.
            pub fn each(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
                [$((stringify!($name), &self.$name),)*].into_iter().map(|(name, counter)| (name, counter.get()))
            }
        }
    };
}

counters! {
    /// Calls of the poll loop.
    polls,
    /// Calls that found nothing to do.
    idle_polls,
    /// Send work requests accepted by the device.
    work_requests,
    /// Doorbells rung.
    doorbells,
    /// Doorbells that the device took only in part.
    partial_doorbells,
    /// Receives posted.
    receives,
    /// Transfers of ours that ended, well or not.
    transfers,
    /// Transfers of peers that ended, well or not.
    peer_transfers,
    /// Payload bytes that transfers of ours moved.
    bytes,
    /// Messages sent.
    messages_sent,
    /// Messages received.
    messages_received,
    /// WRITEs with immediate data sent, each in place of a DONE.
    write_immediates,
    /// NOOPs sent to return credits or to keep a connection alive.
    noops,
    /// Sinks registered by fragment list.
    fragment_lists,
    /// Sinks registered by page list.
    page_lists,
    /// Sinks registered by window.
    windows,
    /// Sinks covered by a mapping of the pool.
    mappings,
    /// Sinks described by the key of the arena.
    arenas,
    /// Sinks whose data came through a staging buffer.
    stagings,
    /// Sinks that nothing covered.
    unmappable,
    /// Bytes copied out of staging buffers.
    staged_bytes,
    /// Sources registered for our own device alone.
    source_lists,
    /// 1 once a peer has been told the key of the arena.
    arena_exposed,
    /// Mappings that a transfer found in the pool, live or on their way.
    mapping_hits,
    /// Mappings that the control side was asked for.
    mapping_misses,
    /// Mappings that the control side could not make.
    mapping_refusals,
    /// Batches of mappings that were unmapped.
    mapping_flushes,
    /// Mappings that were unmapped.
    mappings_unmapped,
    /// Mappings that are live now.
    mappings_alive,
    /// Mappings that are live now, whose keys peers were told, and that no transfer uses: what peers can reach beyond
    /// their transfers.
    mappings_exposed,
    /// Keys killed by our own invalidate.
    invalidations,
    /// Keys killed by the peer's SEND_WITH_INV.
    remote_invalidations,
    /// Windows given to the control side to be rebuilt.
    windows_broken,
    /// Keys of single transfers that a peer could use now; the arena's and those of mappings are not in it.
    keys_alive,
    /// Transfers whose deadline passed.
    timeouts,
    /// Transfers that waited for a window, a credit or a slot.
    waits,
    /// Incoming messages that had to be held for lack of a slot.
    holds,
    /// Incoming PUTs and GETs that matched nothing.
    unmatched,
    /// ACKs and REPLYs whose handle named nothing.
    unknown_replies,
    /// Completions for something that is gone.
    stale_completions,
    /// Connections that ended.
    connections_ended,
    /// Connections ended because the peer broke the protocol.
    protocol_errors,
}
