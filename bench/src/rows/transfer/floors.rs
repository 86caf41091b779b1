//! The floors: the same copies by one core, without anything around them.

use std::sync::{Arc, Mutex};

use o2poll_dataplane::memory::Copier;
use o2poll_hal::copy::{Method, copy};

use super::{Load, order};
use crate::harness::{Role, Row};
use crate::nodes;

/// The same copies by one core, without anything around them.
pub(super) fn copies(row: Row, load: Load) -> Row {
    let floors = Floors::new(load);
    Method::ALL
        .into_iter()
        .filter_map(|method| Some((method, method.copier()?)))
        .fold(row, |row, (method, copier)| {
            row.here(Role::Floor, method.name(), floors.batch(copier))
        })
}

/// Memory of the copies that transfers are compared with. Those of one row share it, and take turns.
pub(in crate::rows) struct Floors {
    load: Load,
    shared: Arc<Mutex<Copies>>,
}

struct Copies {
    to: nodes::Bytes,
    from: nodes::Bytes,
    order: Vec<u32>,
    next: usize,
}

impl Floors {
    pub(in crate::rows) fn new(load: Load) -> Self {
        let copies = Copies {
            to: nodes::Bytes::new(load.payload()),
            from: nodes::Bytes::new(load.payload()),
            order: order(load),
            next: 0,
        };
        Self {
            load,
            shared: Arc::new(Mutex::new(copies)),
        }
    }

    /// Copies one buffer after the other.
    pub(in crate::rows) fn batch(&self, copier: Copier) -> impl FnMut(u64) + Send + use<> {
        let (shared, length) = (Arc::clone(&self.shared), self.load.length as usize);
        move |n| {
            let mut copies = shared.lock().expect("no panic");
            let Copies {
                to,
                from,
                order,
                next,
            } = &mut *copies;
            for _ in 0..n {
                let at = order[*next] as usize * length;
                *next = if *next + 1 == order.len() {
                    0
                } else {
                    *next + 1
                };
                copy(copier, &mut to[at..at + length], &from[at..at + length]);
            }
        }
    }
}
