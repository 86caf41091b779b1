//! A polling thread: pinned, made of its nodes' turns, and watched.

use core::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread::JoinHandle;

use o2poll_config::Idle;
use o2poll_dataplane::nic::Fault;
use o2poll_dataplane::wire::Nid;
use o2poll_hal::clock::Clock;
use o2poll_hal::cores::{self, Switches};
use o2poll_hal::count_alloc::{Counts, Watch};

use crate::NodeError;
use crate::application::Application;
use crate::node::{Backend, Blueprint, Built, Left, Seat};

/// What all threads share.
#[derive(Debug, Default)]
pub(crate) struct Flags {
    /// Everybody is to end now.
    quit: AtomicBool,
    /// Some device has failed; the thread's report says which.
    failed: AtomicBool,
}

impl Flags {
    pub(crate) fn quit(&self) {
        // Relaxed: it carries nothing but itself; `join` orders the rest.
        self.quit.store(true, Ordering::Relaxed);
    }

    pub(crate) fn has_failed(&self) -> bool {
        // Relaxed: as in `quit`.
        self.failed.load(Ordering::Relaxed)
    }
}

/// What a thread tells when it has ended.
pub(crate) struct Ended<A> {
    pub(crate) core: usize,
    /// Allocations and frees between the first and the last poll.
    pub(crate) allocations: Counts,
    /// How often the thread was taken off its core, or gave it up, meanwhile.
    pub(crate) switches: Option<Switches>,
    /// What is left of each core of a node that it polled for.
    pub(crate) left: Vec<Left<A>>,
    /// The node whose device failed.
    pub(crate) fault: Option<(Nid, Fault)>,
}

/// Starts a thread. It pins itself, makes its nodes, tells each of them or why not, and polls until it
/// is to quit.
pub(crate) fn spawn<A: Application, B: Backend>(
    core: usize,
    nodes: Vec<Blueprint<A, B>>,
    idle: Idle,
    clock: Clock,
    flags: Arc<Flags>,
    told: Sender<Result<Built, NodeError>>,
) -> Result<JoinHandle<Option<Ended<A>>>, NodeError> {
    std::thread::Builder::new()
        .name(format!("o2poll-{core}"))
        .spawn(move || {
            let made = make(core, nodes, &clock, &told);
            match made {
                Ok(seats) => {
                    drop(told);
                    Some(run(core, seats, idle, &clock, &flags))
                }
                Err(error) => {
                    let _ = told.send(Err(error));
                    None
                }
            }
        })
        .map_err(|source| NodeError::Thread { core, source })
}

fn make<A: Application, B: Backend>(
    core: usize,
    nodes: Vec<Blueprint<A, B>>,
    clock: &Clock,
    told: &Sender<Result<Built, NodeError>>,
) -> Result<Vec<Seat<A, B>>, NodeError> {
    cores::pin(core).map_err(|source| NodeError::Pin { core, source })?;
    let mut seats = Vec::new();
    // First cores wait for nobody, and the others for those.
    let (first, other): (Vec<_>, Vec<_>) = nodes.into_iter().partition(|plan| plan.role.is_first());
    for plan in first.into_iter().chain(other) {
        let (seat, built) = Seat::build(plan, clock)?;
        seats.push(seat);
        let _ = told.send(Ok(built));
    }
    Ok(seats)
}

fn run<A: Application, B: Backend>(
    core: usize,
    mut seats: Vec<Seat<A, B>>,
    idle: Idle,
    clock: &Clock,
    flags: &Flags,
) -> Ended<A> {
    let before = cores::switches().ok();
    let watch = Watch::start();
    let fault = poll(&mut seats, idle, clock, flags);
    let allocations = watch.counts();
    drop(watch);
    let after = cores::switches().ok();
    Ended {
        core,
        allocations,
        switches: before.zip(after).map(|(before, after)| after.since(before)),
        left: seats.into_iter().map(Seat::end).collect(),
        fault,
    }
}

/// The loop. Nothing in it allocates, locks, or makes a system call, the yield of an idle turn aside.
fn poll<A: Application, B: Backend>(
    seats: &mut [Seat<A, B>],
    idle: Idle,
    clock: &Clock,
    flags: &Flags,
) -> Option<(Nid, Fault)> {
    // Relaxed: as in `Flags::quit`.
    while !flags.quit.load(Ordering::Relaxed) {
        let mut busy = false;
        for seat in &mut *seats {
            match seat.turn(clock) {
                Ok(did) => busy |= did,
                Err(fault) => {
                    // Relaxed: as in `Flags::quit`.
                    flags.failed.store(true, Ordering::Relaxed);
                    return Some((seat.nid, fault));
                }
            }
        }
        if busy {
            continue;
        }
        match idle {
            Idle::Yield => std::thread::yield_now(),
            _ => core::hint::spin_loop(),
        }
    }
    None
}
