//! Two nodes on two threads. The thread sanitizer runs this, too.

use o2poll_soft::Profile;
use o2poll_tests::Software;
use o2poll_tests::mover::{SIZES, SLOTS, on_two_threads};

#[test]
fn two_nodes_on_two_threads_move_every_size_both_ways_and_stop() {
    for profile in [Profile::frwr(), Profile::mlx5()] {
        // About four times each size in each slot.
        on_two_threads::<Software>(profile, (SLOTS * SIZES.len() * 4) as u64);
    }
}
