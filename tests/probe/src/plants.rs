//! Mistakes, one per feature, each of which must keep the probe from linking.

#[cfg(feature = "plant-alloc")]
extern crate alloc;

/// Takes what each plant needs from outside, so that none is decided at compile time.
type Plant = fn(&mut [u64; 8], &[u64], usize) -> u64;

/// Keeps the planted mistakes alive.
pub fn keep() {
    const PLANTS: &[Plant] = &[
        #[cfg(feature = "plant-index")]
        |table, _, at| table[at],
        #[cfg(feature = "plant-slice")]
        |table, _, at| table[..at].len() as u64,
        #[cfg(feature = "plant-copy")]
        |table, from, _| {
            table.copy_from_slice(from);
            table.len() as u64
        },
        #[cfg(feature = "plant-divide")]
        |table, _, at| table.len() as u64 / at as u64,
        #[cfg(feature = "plant-unwrap")]
        |_, from, at| *from.get(at).unwrap(),
        #[cfg(feature = "plant-overflow")]
        |_, _, at| (at as u64).checked_add(1).expect("overflow"),
        #[cfg(feature = "plant-alloc")]
        |_, _, at| *core::hint::black_box(alloc::boxed::Box::new(at as u64)),
    ];
    core::hint::black_box(PLANTS);
}
