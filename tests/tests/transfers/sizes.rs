//! One of each length: around the borders of a message, a page and a transfer.
#![allow(clippy::cast_possible_truncation)]

use o2poll_dataplane::endpoint::{EntryOptions, Event, Operation};
use o2poll_soft::Profile;
use o2poll_tests::lend::alone;
use o2poll_tests::{Backend, Setup, World};

fn bytes(length: usize, seed: u8) -> Vec<u8> {
    (0..length)
        .map(|n| (n as u8).wrapping_mul(31).wrapping_add(seed))
        .collect()
}

pub(crate) fn lu_20326_put_and_get_of_every_size_class<B: Backend>() {
    for profile in [Profile::frwr(), Profile::mlx5(), Profile::rxe()] {
        if !B::plays(&profile) {
            continue;
        }
        let mut setup = Setup::new(profile);
        setup.memory = 6 << 20;
        for (length, offset) in [
            (0_u32, 0),
            (1, 1),
            (3976, 0),
            (3977, 5),
            (4095, 1),
            (4096, 0),
            (4097, 4095),
            (65535, 0),
            (65536, 8),
            (65537, 1),
            ((1 << 20) - 1, 3),
            (1 << 20, 1),
            (1 << 20, 4095),
        ] {
            for ack in [false, true] {
                alone(|| {
                    let mut world = B::world([setup; 2]);
                    let [_, connection] = world.connect();
                    let memory = world.nodes[0].arena.flat(1 << 20, 3);
                    let options = EntryOptions::PUT | EntryOptions::GET;
                    world.export(0, 7, options, memory);
                    let source = world.nodes[1].arena.flat(length, offset);
                    source.write_at(0, &bytes(length as usize, 9));
                    let put = Operation::Put { hdr_data: 5, ack };
                    world.nodes[1].submit(World::request(connection, 1, 7, 0, put, source));
                    match world.event(1) {
                        Event::Done { outcome, .. } => {
                            assert_eq!(outcome, Ok(length), "{length} {ack}")
                        }
                        other => panic!("{other:?}"),
                    }
                    for optimized in [true, false] {
                        let sink = world.nodes[1].arena.flat(length, offset);
                        let get = Operation::Get { optimized };
                        world.nodes[1].submit(World::request(connection, 2, 7, 0, get, sink));
                        match world.event(1) {
                            Event::Done {
                                outcome, memory, ..
                            } => {
                                assert_eq!(outcome, Ok(length), "{length} {optimized}");
                                let mut back = vec![0; length as usize];
                                memory.read_at(0, &mut back);
                                assert!(back == bytes(length as usize, 9), "{length} {optimized}");
                            }
                            other => panic!("{other:?}"),
                        }
                    }
                    world.end();
                });
            }
        }
    }
}
