//! What the node remembers of other nodes, between their connections.

use std::collections::HashMap;

use o2poll_dataplane::peer::Remembered;
use o2poll_dataplane::wire::Nid;

/// By NID. Anybody can ask in anybody's name, so names that nobody uses any more make room for new ones.
#[derive(Debug, Default)]
pub(super) struct Known {
    nodes: HashMap<Nid, Remembered>,
}

impl Known {
    pub(super) fn get(&self, nid: Nid) -> Option<&Remembered> {
        self.nodes.get(&nid)
    }

    /// Of a node that is dialled, or has a connection.
    pub(super) fn entry(&mut self, nid: Nid) -> &mut Remembered {
        self.nodes.entry(nid).or_default()
    }

    /// Of a node that asks. Where there are as many as can be, those are forgotten that are not `in_use`; `None` if all of them
    /// are.
    pub(super) fn asker(
        &mut self,
        nid: Nid,
        in_use: impl FnOnce() -> Vec<Nid>,
    ) -> Option<&mut Remembered> {
        if self.nodes.len() >= MOST && !self.nodes.contains_key(&nid) {
            let mut used = in_use();
            used.sort_unstable_by_key(|nid| nid.0);
            self.nodes
                .retain(|nid, _| used.binary_search_by_key(&nid.0, |nid| nid.0).is_ok());
            if self.nodes.len() >= MOST {
                return None;
            }
        }
        Some(self.entry(nid))
    }

    /// The last connection to the node is gone.
    pub(super) fn gone(&mut self, nid: Nid) {
        if let Some(remembered) = self.nodes.get_mut(&nid) {
            remembered.forget_life();
            if *remembered == Remembered::default() {
                self.nodes.remove(&nid);
            }
        }
    }
}

/// Nodes that are remembered at once.
const MOST: usize = 65536;

#[cfg(test)]
mod tests {
    use super::{Known, MOST};
    use o2poll_dataplane::wire::Nid;

    #[test]
    fn names_that_nobody_uses_do_not_keep_other_nodes_out() {
        let mut known = Known::default();
        let (ours, dialled) = (Nid(7), Nid(8));
        known.entry(ours).learn(0x12, 5);
        known.entry(dialled).lower_depth(3);
        for name in 0..3 * MOST as u64 {
            let asker = known.asker(Nid(100 + name), || vec![dialled, ours]);
            asker.expect("a name in use is two of them").lower_depth(9);
            assert!(known.nodes.len() <= MOST);
        }
        assert_eq!(known.get(ours).unwrap().stamp, Some(5));
        assert_ne!(known.get(dialled), Some(&Default::default()));
    }

    #[test]
    fn only_when_all_names_are_in_use_is_a_new_one_refused() {
        let mut known = Known::default();
        let all: Vec<Nid> = (0..MOST as u64).map(Nid).collect();
        for nid in &all {
            assert!(known.asker(*nid, Vec::new).is_some());
        }
        assert!(known.asker(Nid(1 << 40), || all.clone()).is_none());
        let again = known.asker(all[3], || panic!("it has its place"));
        assert!(again.is_some());
        assert!(known.asker(Nid(1 << 40), || all[1..].to_vec()).is_some());
    }

    #[test]
    fn of_a_node_without_a_connection_only_what_holds_for_every_life_is_kept() {
        let mut known = Known::default();
        known.entry(Nid(1)).learn(0x12, 5);
        known.entry(Nid(2)).lower_depth(3);
        for name in [1, 2, 3] {
            known.gone(Nid(name));
        }
        assert_eq!(known.get(Nid(1)), None);
        assert!(known.get(Nid(2)).is_some());
        assert_eq!(known.nodes.len(), 1);
    }
}
