//! Two nodes on two threads. The thread sanitizer runs this, too.

use o2poll_soft::Profile;
use o2poll_tests::mover::{Mover, SIZES, SLOTS};
use o2poll_tests::{Setup, World};

const SECOND: u64 = 1_000_000_000;

#[test]
fn two_nodes_on_two_threads_move_every_size_both_ways_and_stop() {
    for profile in [Profile::frwr(), Profile::mlx5()] {
        let mut world = World::new(Setup {
            timeout: 100 * SECOND,
            abandon: 100 * SECOND,
            keepalive: 100 * SECOND,
            ..Setup::new(profile)
        });
        let connections = world.connect();
        let movers = [0, 1].map(|of| Mover::new(&mut world, of, connections[of]));
        let movers = movers.map(std::sync::Mutex::new);
        // About four times each size in each slot.
        let rounds = (SLOTS * SIZES.len() * 4) as u64;
        world.on_two_threads(|of, mut core| {
            let mut mover = movers[of].lock().expect("locked once");
            mover.begin(core.node, rounds);
            core.until(|node| {
                mover.step(node);
                mover.is_idle()
            });
            core.meet();
            core.stop();
        });
        for (of, mover) in movers.into_iter().enumerate() {
            assert_eq!(mover.into_inner().expect("unlocked").rounds, rounds);
            let counters = world.nodes[of].counters;
            assert_eq!(counters.transfers.get(), 2 * rounds);
            assert_eq!(counters.timeouts.get() + counters.protocol_errors.get(), 0);
        }
        world.end();
    }
}
