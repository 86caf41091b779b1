//! The device's copy against those it chooses from.

use o2poll_hal::copy::{Method, best_copy};

use super::Spec;
use super::transfer::{Floors, Load};
use crate::harness::{Bound, Role, Row};

/// The rows of this file.
#[must_use]
pub fn specs() -> Vec<Spec> {
    let mut specs = Vec::new();
    for length in [4 << 10, 16 << 10, 64 << 10] {
        for cold in [false, true] {
            let state = if cold { "cold" } else { "hot" };
            let name = format!("copy/{}k/{state}", length >> 10);
            specs.push(Spec::new(name, "copy", 1, move |row| {
                build(row, Load::copies(length, cold))
            }));
        }
    }
    specs
}

fn build(row: Row, load: Load) -> Row {
    let floors = Floors::new(load);
    let others = Method::ALL
        .into_iter()
        .filter_map(|method| Some((Role::Floor, method.name(), method.copier()?)));
    [(Role::Ours, BEST, best_copy())]
        .into_iter()
        .chain(others)
        .fold(
            // They share their buffers: most of a batch is to find them as it leaves them.
            row.bytes(u64::from(load.length())).granule(512),
            |row, (role, name, copier)| row.here(role, name, floors.batch(copier)),
        )
        .goal(
            "speed over the best of the others",
            Bound::AtLeast(0.95),
            |row| Some(row.best_floor()? / row.ticks_of(BEST)?),
        )
}

const BEST: &str = "best_copy";
