//! Polling threads ask nothing of the allocator once they are warm.

use std::sync::Mutex;

use o2poll_hal::count_alloc::{CountAlloc, Counts, Watch, is_live};
use o2poll_soft::Profile;
use o2poll_tests::mover::{Mover, SIZES, SLOTS};
use o2poll_tests::{Setup, World};

#[global_allocator]
static ALLOCATOR: CountAlloc = CountAlloc;

const SECOND: u64 = 1_000_000_000;

#[test]
fn a_whole_run_on_two_threads_allocates_nothing_after_warm_up() {
    assert!(is_live());
    let mut world = World::new(Setup {
        timeout: 100 * SECOND,
        abandon: 100 * SECOND,
        keepalive: SECOND / 1000,
        quiet: true,
        ..Setup::new(Profile::frwr())
    });
    let connections = world.connect();
    let movers = [0, 1].map(|of| Mutex::new(Mover::new(&mut world, of, connections[of])));
    let rounds = (SLOTS * SIZES.len()) as u64;
    let counts = world.on_two_threads(|of, mut core| {
        let mut mover = movers[of].lock().expect("locked once");
        let mut run = |core: &mut o2poll_tests::threads::Core<'_>| {
            mover.begin(core.node, rounds);
            core.until(|node| {
                mover.step(node);
                mover.is_idle()
            });
            core.meet();
        };
        run(&mut core);
        let watch = Watch::start();
        for _ in 0..4 {
            run(&mut core);
        }
        let steady = watch.counts();
        // The same watch sees one, so that it was looking.
        drop(core::hint::black_box(Box::new(of)));
        (steady, watch.counts())
    });
    let one = Counts {
        allocations: 1,
        frees: 1,
    };
    assert_eq!(counts, [(Counts::default(), one); 2]);
    for mover in movers {
        assert_eq!(mover.into_inner().expect("unlocked").rounds, 5 * rounds);
    }
    world.end();
}
