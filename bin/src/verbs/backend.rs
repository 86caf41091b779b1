//! How a core gets its device value and its memory.

use std::sync::Arc;

use o2poll_dataplane::memory::Range;
use o2poll_dataplane::nic::Rights;
use o2poll_dataplane::wire::Nid;
use o2poll_hal::arena::Arena;
use o2poll_hal::verbs::{CompletionQueue, Device, Domain, Findings, Limits, Memory, Verbs};
use o2poll_soft::Gauges;

use super::rdma;
use crate::NodeError;
use crate::node::Backend;
use crate::plan::Needs;

/// Makes the device value of one core. All cores of a node are in one protection domain, so that an arena has one key for
/// all of them.
pub(crate) struct VerbsBackend {
    pub(super) device: Device,
    pub(super) domain: Domain,
    pub(super) cq: CompletionQueue,
    pub(super) findings: Arc<Findings>,
    pub(super) limits: Limits,
    /// Arenas are registered whole, once.
    pub(super) arenas: Vec<(usize, Memory)>,
}

impl Backend for VerbsBackend {
    type Nic = Verbs;
    type Shared = Vec<Memory>;

    fn nic(&mut self, _: Nid, _: &Needs) -> Result<Verbs, NodeError> {
        Verbs::new(&self.device, self.cq.clone(), &self.findings, self.limits).map_err(rdma)
    }

    fn take(
        &mut self,
        nic: &mut Verbs,
        node: Nid,
        arena: &'static Arena,
        bytes: usize,
        rights: Rights,
    ) -> Result<Range<'static>, NodeError> {
        let base = arena.base().as_ptr().addr();
        let known = self.arenas.iter().find(|(at, _)| *at == base);
        let lkey = match known {
            Some((_, memory)) => memory.lkey(),
            None => {
                // Its key is for this node alone: no peer gets it.
                let own = rights & Rights::LOCAL_WRITE;
                let memory = self.domain.register_arena(arena, own).map_err(rdma)?;
                let lkey = memory.lkey();
                self.arenas.push((base, memory.clone()));
                add(nic, node, memory)?;
                lkey
            }
        };
        let range = arena
            .take(bytes, PAGE, lkey)
            .map_err(|source| NodeError::Take { node, source })?;
        if !rights.contains(Rights::REMOTE_WRITE) {
            return Ok(range);
        }
        // Messages are in the same arena, so its own key must not be the one that peers are told.
        let memory = self.domain.register_range(&range, rights).map_err(rdma)?;
        let rkey = memory.rkey();
        add(nic, node, memory)?;
        Ok(range.exposed(rkey))
    }

    fn share(&self) -> Vec<Memory> {
        let memories = self.arenas.iter().map(|(_, memory)| memory.clone());
        memories.collect()
    }

    fn join(&mut self, nic: &mut Verbs, node: Nid, shared: Vec<Memory>) -> Result<(), NodeError> {
        shared
            .into_iter()
            .try_for_each(|memory| add(nic, node, memory))
    }

    fn gauges(_: &Verbs) -> Option<Gauges> {
        None
    }
}

fn add(nic: &mut Verbs, node: Nid, memory: Memory) -> Result<(), NodeError> {
    let added = nic.add_memory(memory);
    added.map(|_| ()).map_err(|_| NodeError::Device {
        node,
        what: "another memory region",
    })
}

/// Ranges of an arena begin at a page.
const PAGE: usize = 4096;
