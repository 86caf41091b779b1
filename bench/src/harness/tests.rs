use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;
use std::sync::Arc;

use core_affinity::CoreId;

use super::{
    Bound, Contender, Cores, Effort, Figure, Judged, LEAST_BATCH, Measured, Outcome, Role, Row,
    Sample,
};
use crate::stats::Summary;
use crate::tsc::Calibration;

const ANYWHERE: Cores = Cores {
    near: CoreId { id: 0 },
    far: CoreId { id: 0 },
};

fn effort() -> Effort {
    Effort {
        samples: 12,
        least_samples: 12,
        at_most: Duration::ZERO,
        sample_here: Duration::from_nanos(1),
        sample_across: Duration::from_nanos(1),
        least_batch: LEAST_BATCH,
        tries: 5,
    }
}

fn calibration() -> Calibration {
    Calibration::over(Duration::from_millis(2))
}

#[test]
fn contenders_take_turns_and_do_whole_granules() {
    let log = Arc::new(std::sync::Mutex::new(Vec::new()));
    let row = ["a", "b", "c"].into_iter().fold(
        Row::new("turns", "step", ANYWHERE).granule(48),
        |row, name| {
            let log = Arc::clone(&log);
            row.here(Role::Ours, name, move |n| {
                assert!(n >= LEAST_BATCH && n.is_multiple_of(48));
                log.lock().unwrap().push(name);
            })
        },
    );
    let measured = row.measure(&effort(), &calibration());
    let log = log.lock().unwrap();
    // Behind the warming up, every three samples are one of each, and each is first in turn.
    let taken = &log[log.len() - 36..];
    for (turn, three) in taken.chunks(3).enumerate() {
        let first = ["a", "b", "c"][turn % 3];
        assert_eq!(three[0], first);
        assert!(["a", "b", "c"].iter().all(|name| three.contains(name)));
    }
    assert!(
        measured
            .outcomes
            .iter()
            .all(|outcome| outcome.samples == 12)
    );
}

#[test]
fn both_halves_do_the_same_number_of_operations_at_the_same_time() {
    let ball = Arc::new(AtomicU64::new(0));
    let (near, far) = (Arc::clone(&ball), Arc::clone(&ball));
    let turn = |ball: &AtomicU64, odd: u64| {
        while ball.load(Ordering::Acquire) % 2 != odd {
            std::thread::yield_now();
        }
        ball.fetch_add(1, Ordering::AcqRel);
    };
    let row = Row::new("ping-pong", "round trip", ANYWHERE).across(
        Role::Floor,
        "one line",
        move |n| (0..n).for_each(|_| turn(&near, 0)),
        move |n| (0..n).for_each(|_| turn(&far, 1)),
    );
    let measured = row.measure(&effort(), &calibration());
    assert_eq!(measured.outcomes[0].samples, 12);
    assert!(measured.outcomes[0].ticks.min > 0.0);
    let count = ball.load(Ordering::Acquire);
    assert!(count >= 2 * 12 * LEAST_BATCH && count.is_multiple_of(2));
}

#[test]
fn a_ratio_is_the_contenders_median_over_ours() {
    let outcome = |p50: f64, preempted| Outcome {
        name: String::new(),
        role: Role::Rival,
        batch: 64,
        samples: 100,
        preempted,
        ticks: Summary {
            min: 1.0,
            p50,
            p99: 1000.0,
        },
        ns: Summary::of(vec![1.0]).unwrap(),
        paired: None,
        figures: Vec::new(),
    };
    let measured = Measured {
        name: String::new(),
        operation: "step",
        bytes: 0,
        outcomes: vec![outcome(4.0, 0), outcome(10.0, 11)],
        goals: Vec::new(),
        distance: None,
    };
    let [ours, rival] = &measured.outcomes[..] else {
        panic!("two outcomes")
    };
    assert_eq!((measured.ratio(ours), measured.ratio(rival)), (1.0, 2.5));
    assert!(!ours.flagged() && rival.flagged());
}

#[test]
fn goals_are_judged_by_the_medians_and_figures_forget_the_warming_up() {
    let seen = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&seen);
    let row = Row::new("goals", "step", ANYWHERE)
        .here(Role::Ours, "a", move |n| {
            count.fetch_add(n, Ordering::Relaxed);
        })
        .figures(move || {
            vec![Figure {
                name: "steps",
                value: seen.swap(0, Ordering::Relaxed) as f64,
            }]
        })
        .across_timed(Role::Floor, "b", |n| n * 10, |_| ())
        .goal("ten ticks", Bound::AtLeast(10.0), |row| row.ticks_of("b"))
        .goal("less", Bound::AtMost(9.0), |row| row.best_floor())
        .goal("nothing", Bound::AtMost(9.0), |row| row.ticks_of("c"));
    let measured = row.measure(&effort(), &calibration());
    let reached: Vec<_> = measured.goals.iter().map(Judged::reached).collect();
    assert_eq!(reached, [true, false]);
    let [a, b] = &measured.outcomes[..] else {
        panic!("two outcomes")
    };
    assert_eq!(a.figures[0].value, 12.0 * a.batch as f64);
    assert!(b.figures.is_empty());
    assert_eq!(b.ticks.p50, 10.0);
}

#[test]
fn preempted_samples_are_counted_and_left_out() {
    let outcome = |cut: usize| {
        let samples: Vec<_> = (0..10)
            .map(|n| Sample {
                ticks: if n < cut { 1e6 } else { 5.0 },
                preempted: n < cut,
            })
            .collect();
        let contender = Contender {
            name: String::new(),
            role: Role::Ours,
            here: Box::new(|_| None),
            figures: None,
            partner: None,
        };
        Outcome::of(contender, 64, &samples, &calibration()).unwrap()
    };
    assert_eq!((outcome(3).preempted, outcome(3).ticks.p99), (3, 5.0));
    // Too many to leave out: then the figures say how it was.
    assert_eq!((outcome(8).preempted, outcome(8).ticks.p50), (8, 1e6));
}
