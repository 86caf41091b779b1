//! Wires between software devices: lap rings, one in each direction for every pair of them.

use o2poll_dataplane::ring::{LapSlot, Returned};
use o2poll_soft::{Lane, Port, link};

use crate::node::lend;

/// For each device the ports to every other, in the order of the devices: those of the first node's cores, of the
/// second's, and so on.
pub(crate) fn wires(devices: usize) -> Vec<Vec<Port<'static>>> {
    let lane = || Lane {
        returned: Box::leak(Box::new(Returned::new())),
        slots: lend(LANE_SLOTS, LapSlot::new),
    };
    let mut ports: Vec<Vec<Port<'static>>> = (0..devices).map(|_| Vec::new()).collect();
    for far in 0..devices {
        // Ports of devices before `far` come to it in order, and its own to each of those in order too.
        let (before, after) = ports.split_at_mut(far);
        let Some(own) = after.first_mut() else { break };
        for near in before {
            let (here, there) = link(lane(), lane()).expect("a power of two of slots");
            near.push(here);
            own.push(there);
        }
    }
    ports
}

/// The port of device `from` that leads to device `to`, as [`wires`] numbers them.
pub(crate) fn port(from: usize, to: usize) -> u16 {
    let port = if to < from { to } else { to.saturating_sub(1) };
    u16::try_from(port).unwrap_or(u16::MAX)
}

/// Packets under way from one device to another. Few, so that the ring stays in the first-level caches of both cores.
const LANE_SLOTS: usize = 64;
