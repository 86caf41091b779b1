//! The transfer tests: bodies that know no device, run on software devices and, with the feature `verbs`, on an RDMA device
//! of this machine.
//!
//! `O2POLL_VERBS_DEVICE` names it; without that nothing is run there, and each test says so. With it a device that is not
//! there is a failure. Both nodes are in this process, and its tests run one at a time, since what the kernel holds is counted.
//!
//! ```text
//! O2POLL_VERBS_DEVICE=rxe0 cargo test -p o2poll-tests --features verbs --test transfers -- rxe
//! ```

mod bytes;
mod ends;
mod flights;
mod lnet;
mod shapes;
mod sizes;

/// Makes a test of each body on each backend, but for those that a device cannot play, with the reason.
macro_rules! transfers {
    (
        both { $($module:ident::$test:ident,)* }
        software { $($only:ident::$alone:ident: $why:literal,)* }
    ) => {
        mod software {
            use o2poll_tests::Software;

            $(
                #[test]
                fn $test() {
                    crate::$module::$test::<Software>();
                }
            )*
            $(
                #[test]
                fn $alone() {
                    crate::$only::$alone::<Software>();
                }
            )*
        }

        #[cfg(feature = "verbs")]
        mod rxe {
            use o2poll_tests::Rdma;

            $(
                #[test]
                fn $test() {
                    crate::device::run(crate::$module::$test::<Rdma>);
                }
            )*

            /// What is not run on a device, for the record: no test is left out in silence.
            #[test]
            fn what_is_left_out_is_said() {
                let mut left_out = vec![$((stringify!($alone), $why),)*];
                left_out.extend(crate::device::LEFT_OUT);
                crate::device::say(&left_out);
            }
        }
    };
}

transfers! {
    both {
        sizes::lu_20326_put_and_get_of_every_size_class,
        bytes::any_traffic_is_byte_exact,
        bytes::whatever_happens_each_job_has_one_event_that_is_true,
        shapes::no_profile_refuses_two_hundred_and_fifty_seven_odd_pieces,
        shapes::the_mechanism_is_chosen_per_transfer_and_counted,
        shapes::an_empty_pool_makes_transfers_wait_and_the_peers_have_their_share,
        shapes::long_source_lists_go_in_instalments,
        shapes::a_window_takes_one_contiguous_range_and_no_more,
        shapes::lu_15092_lu_9500_a_mebibyte_at_every_odd_offset,
        flights::one_eight_and_sixty_four_in_flight_both_ways,
        flights::many_transfers_that_end_with_their_last_write_leave_nothing_behind,
        flights::two_threads_move_every_size_both_ways_and_stop,
        lnet::match_bits_ignore_bits_source_and_order_choose_the_entry,
        lnet::options_say_what_may_be_done,
        lnet::too_long_is_cut_with_truncate_and_matches_nothing_without,
        lnet::lu_15851_a_local_offset_moves_on_and_ignores_the_initiators,
        lnet::once_is_once_and_the_memory_comes_back_after_the_data,
        lnet::a_disabled_ack_is_never_sent_and_costs_no_connection,
        lnet::what_matches_nothing,
        lnet::nothing_at_all_is_moved_on_every_path,
        lnet::each_path_sends_its_own_messages,
        lnet::a_ping_is_answered_with_this_nodes_info,
        lnet::a_busy_entry_is_detached_when_the_last_transfer_is_out,
        lnet::a_cancel_in_every_phase_ends_with_one_event_and_leaves_the_connection_whole,
        lnet::a_cancelled_put_whose_ack_never_comes_ends_when_it_is_sent,
        ends::what_has_arrived_is_taken_before_the_order_that_closes_its_connection,
        ends::a_late_answer_ends_a_transfer_that_timed_out_quietly,
        ends::a_cancelled_transfer_keeps_its_memory_until_its_key_is_dead,
        ends::the_abandon_limit_costs_the_connection_and_the_next_one_works,
        ends::a_connection_that_one_side_ends_in_the_middle_ends_every_transfer_once,
    }
    software {
        bytes::chains_that_the_device_takes_in_part_lose_and_repeat_nothing:
            "a kernel cannot be told to take a part of a chain",
        lnet::what_cannot_be_attached_comes_back: "nothing of it reaches a device, and it wants 4 GiB of addresses",
        lnet::what_cannot_be_sent_comes_back_with_its_memory:
            "nothing of it reaches a device, and it wants 4 GiB of addresses",
    }
}

#[cfg(feature = "verbs")]
mod device {
    use core::time::Duration;
    use std::process::Command;
    use std::sync::{Mutex, PoisonError};
    use std::thread;
    use std::time::Instant;

    use o2poll_tests::rdma::{VARIABLE, device};

    /// Runs a test on the device, and wants the kernel to hold no more afterwards; or says that there is no device.
    pub(crate) fn run(test: fn()) {
        let Some((device, _)) = device() else {
            println!("not run: {VARIABLE} names no device");
            return;
        };
        // What the test before has left, if it has said so: to ask costs an emulated machine more than many a test.
        let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        let before = known.take();
        let before = before.unwrap_or_else(|| kernel_objects(device.name()));
        let start = Instant::now();
        test();
        println!("took {:.1} s", start.elapsed().as_secs_f64());
        let give_up = Instant::now() + Duration::from_secs(30);
        while kernel_objects(device.name()) != before {
            assert!(
                Instant::now() < give_up,
                "the kernel holds {}, and held {before}",
                kernel_objects(device.name())
            );
            thread::sleep(Duration::from_millis(50));
        }
        *known = Some(before);
    }

    /// What the kernel held after the last test. Tests of the device run one at a time.
    static KNOWN: Mutex<Option<String>> = Mutex::new(None);

    /// Names what is not run, and why.
    pub(crate) fn say(left_out: &[(&str, &str)]) {
        let Some((device, _)) = device() else {
            println!("not run: {VARIABLE} names no device");
            return;
        };
        for (what, why) in left_out {
            println!("left out on {}: {what}: {why}", device.name());
        }
    }

    /// What the kernel holds of the device (`rdma-resource(8)`).
    fn kernel_objects(device: &str) -> String {
        let output = Command::new("rdma")
            .args(["resource", "show", device])
            .output()
            .expect("rdma(8), of iproute2");
        assert!(output.status.success(), "{output:?}");
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    }

    /// Parts of the transfer suite that stand on software devices alone.
    pub(crate) const LEFT_OUT: [(&str, &str); 7] = [
        (
            "fragment lists, page lists, mappings and registered sources (shapes.rs, mechanisms.rs, mappings.rs)",
            "rdma_rxe has no user-space registration but type-2 windows; a sink of many pieces is staged, or goes under the arena's key",
        ),
        (
            "DONEs that kill a key (SEND_WITH_INV)",
            "rdma_rxe crashes when a peer's SEND_WITH_INV names a window that is not bound, so that nodes on it do not agree on it",
        ),
        (
            "peers that write under dead keys or out of bounds (dead_keys.rs, immediates.rs, chaos.rs)",
            "rdma_rxe holds an access against the memory region and not the window; conformance has what it keeps",
        ),
        (
            "weather and failing requests (faults, bytes.rs)",
            "a kernel cannot be told to lose a packet or to fail a request; the cases link, kill and faults do it from outside",
        ),
        (
            "queues of exactly the length that is needed (queue_sizes.rs)",
            "rdma_rxe rounds queues up",
        ),
        (
            "a GET in a_busy_entry_is_detached_when_the_last_transfer_is_out (lnet.rs)",
            "the device writes and tells its node so while the initiator does not poll: the transfer cannot be held where the entry is busy",
        ),
        (
            "that a cancel comes too late at one moment and in time at another (a_cancel_in_every_phase, lnet.rs)",
            "what a step of the nodes finds depends on how fast the kernel is; what must hold after either is checked",
        ),
    ];
}
