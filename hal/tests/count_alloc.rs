//! The counting allocator, installed.

use core::hint::black_box;

use o2poll_hal::count_alloc::{CountAlloc, Counts, Watch, is_live, total};

#[global_allocator]
static ALLOCATOR: CountAlloc = CountAlloc;

/// One test, since the total is the process's.
#[test]
fn watched_threads_are_counted_and_others_are_not() {
    assert!(is_live());
    assert_eq!(total(), Counts::default(), "the self-test leaves no trace");

    drop(black_box(vec![1, 2, 3]));
    assert_eq!(
        total(),
        Counts::default(),
        "an unwatched thread is not counted"
    );

    let watch = Watch::start();
    assert_eq!(watch.counts(), Counts::default());
    let mut block = black_box(Vec::<u8>::with_capacity(10));
    block.reserve_exact(1000);
    drop(black_box(block));
    let inner = Watch::start();
    drop(black_box(vec![0_u8; 100]));
    assert_eq!(
        inner.counts(),
        Counts {
            allocations: 1,
            frees: 1
        }
    );
    drop(inner);
    assert_eq!(
        watch.counts(),
        Counts {
            allocations: 3,
            frees: 2
        }
    );
    drop(watch);
    drop(black_box(vec![1]));

    let elsewhere = std::thread::spawn(|| {
        let watch = Watch::start();
        drop(black_box(Box::new(1)));
        watch.counts()
    });
    assert_eq!(
        elsewhere.join().unwrap(),
        Counts {
            allocations: 1,
            frees: 1
        }
    );
    assert_eq!(
        total(),
        Counts {
            allocations: 4,
            frees: 3
        }
    );
}
