//! The RDMA connection manager as the engine sees it: one manager for each node.

use core::time::Duration;
use std::io::{self, Write as _};
use std::os::fd::BorrowedFd;
use std::time::Instant;

use o2poll_dataplane::poller::{Order, Report};
use o2poll_dataplane::pool::Handle;
use o2poll_dataplane::wire::Nid;
use o2poll_hal::verbs::cm::{self, Dial, Manager};
use o2poll_hal::verbs::{Device, Domain, QueuePair, Verbs, Window};

use super::backend::VerbsBackend;
use super::rdma;
use crate::NodeError;
use crate::capture::Summary;
use crate::engine::{Effect, Ending, Fabric, Id, Outcome};

/// An RDMA device, and the nodes of the process on it.
pub(crate) struct VerbsFabric {
    device: Device,
    sides: Vec<Side>,
    log: Vec<String>,
    /// It was told that the device goes.
    removed: bool,
}

/// What one node has.
pub(crate) struct Side {
    pub(super) manager: Manager,
    pub(super) domain: Domain,
}

impl VerbsFabric {
    pub(super) const fn new(device: Device, sides: Vec<Side>) -> Self {
        Self {
            device,
            sides,
            log: Vec::new(),
            removed: false,
        }
    }

    fn manager(&mut self, node: usize) -> Option<&mut Manager> {
        Some(&mut self.sides.get_mut(node)?.manager)
    }
}

impl Fabric for VerbsFabric {
    type Backend = VerbsBackend;

    fn wait(&mut self, patience: Duration) {
        let mut descriptors: Vec<BorrowedFd<'_>> = self
            .sides
            .iter()
            .map(|side| side.manager.descriptor())
            .collect();
        descriptors.push(self.device.event_descriptor());
        // It counts in milliseconds, and a patience of less than one must not become a spin.
        let least = if patience.is_zero() { 0 } else { 1 };
        cm::wait(&descriptors, patience.max(Duration::from_millis(least)));
    }

    fn run(&mut self, now: Instant) -> Result<Vec<Effect<Verbs>>, NodeError> {
        while let Some(event) = self.device.event(Duration::ZERO).map_err(rdma)? {
            self.log.push(format!("{}: {event}", self.device.name()));
            for side in &mut self.sides {
                side.manager.device_event(event);
            }
        }
        let complaints = self.device.complaints();
        let named = complaints
            .into_iter()
            .map(|complaint| format!("{}: {complaint}", self.device.name()));
        self.log.extend(named);
        let mut effects = Vec::new();
        for (node, side) in self.sides.iter_mut().enumerate() {
            let new = side.manager.run(now).map_err(rdma)?;
            effects.extend(new.into_iter().map(|effect| told(node, effect)));
            self.log.extend(side.manager.log());
        }
        Ok(effects)
    }

    fn log(&mut self) -> Vec<String> {
        core::mem::take(&mut self.log)
    }

    fn dial(&mut self, node: usize, peer: Nid) -> usize {
        self.manager(node).map_or(0, |manager| manager.dial(peer))
    }

    fn outcome(&self, node: usize, dial: usize) -> Outcome {
        let side = self.sides.get(node);
        let attempt = side.and_then(|side| side.manager.outcome(dial));
        Outcome::of(attempt.map(Dial::link))
    }

    fn forget(&mut self, node: usize, dial: usize) {
        if let Some(manager) = self.manager(node) {
            manager.forget(dial);
        }
    }

    fn ready(&mut self, node: usize, id: Id, connection: Handle) {
        if let Some(manager) = self.manager(node) {
            manager.ready(id, connection);
        }
    }

    fn no_room(&mut self, node: usize, id: Id, qp: QueuePair, _: bool) {
        if let Some(manager) = self.manager(node) {
            manager.no_room(id, qp);
        }
    }

    fn gone(&mut self, node: usize, id: Id, qp: QueuePair) -> Ending {
        match self.manager(node).map(|manager| manager.gone(id, qp)) {
            Some(cm::Ending::Core) => Ending::Core,
            Some(cm::Ending::Failed(failure)) => Ending::Failed(failure.to_string()),
            Some(cm::Ending::Asked) | None => Ending::Asked,
        }
    }

    fn close(&mut self, node: usize, id: Id) {
        if let Some(manager) = self.manager(node) {
            manager.close(id);
        }
    }

    fn alive(&self, node: usize) -> Vec<Id> {
        let side = self.sides.get(node);
        side.map_or_else(Vec::new, |side| side.manager.alive())
    }

    fn peer(&self, node: usize, id: Id) -> Option<Nid> {
        self.sides.get(node)?.manager.peer(id)
    }

    fn window(&mut self, node: usize, _: usize) -> Result<Window, NodeError> {
        let side = self.sides.get(node).ok_or(NodeError::UnknownDevice)?;
        side.domain.window().map_err(rdma)
    }

    // This backend has no mappings, so that no pool is made and nothing of this comes.
    fn mapping(&mut self, _: usize, _: usize, report: Report<Verbs>) -> Option<Order<Verbs>> {
        match report {
            Report::Map { of, .. } => Some(Order::NotMapped { of }),
            Report::Flush => Some(Order::Unmapped),
            _ => None,
        }
    }

    fn removed(&mut self) -> Option<String> {
        let removed = self.sides.iter().any(|side| side.manager.is_removed());
        let first = removed && !self.removed;
        self.removed |= removed;
        first.then(|| self.device.name().to_owned())
    }

    fn end(&mut self) -> Result<Option<Summary>, NodeError> {
        Ok(None)
    }
}

impl Drop for VerbsFabric {
    /// What goes wrong while the last of it is destroyed has nobody else to be told to.
    fn drop(&mut self) {
        self.sides.clear();
        for complaint in self.device.complaints() {
            // A pipe that nobody reads must not become a panic in a drop.
            let _ = writeln!(io::stderr(), "{}: {complaint}", self.device.name());
        }
    }
}

fn told(node: usize, effect: cm::Effect) -> Effect<Verbs> {
    match effect {
        cm::Effect::Adopt {
            core,
            id,
            qp,
            terms,
            accepted,
        } => Effect::Adopt {
            node,
            core,
            id,
            qp,
            terms,
            accepted,
        },
        cm::Effect::Establish {
            core,
            connection,
            terms,
            dialed,
        } => Effect::Establish {
            node,
            core,
            connection,
            terms,
            dialed,
        },
        cm::Effect::Close { core, connection } => Effect::Close {
            node,
            core,
            connection,
        },
    }
}
