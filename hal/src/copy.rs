//! The copy that the software device moves bytes with.
//!
//! Two copies of the same length can differ by a factor of two in either direction, and the length does not
//! tell which way. Streaming (non-temporal) stores do not fetch the lines they overwrite, so they win where the
//! sink is cold; where the sink lies in a cache they lose, since they push it out to memory. Only the machine
//! knows, so it is asked all the time: [`best_copy`] times, per thread and per class of length, one copy in
//! [`WATCH`], compares both ways once in [`PERIOD`] copies and as soon as the cost has changed, and uses what
//! took less time for the others.
//!
//! The device copies in slices of 256 KiB at most, so the length here is a slice's, never a transfer's.
#![allow(unsafe_code)]

use o2poll_dataplane::memory::Copier;

/// A copier that follows what the caches are like, where the processor has streaming stores; else the
/// standard library's.
///
/// Below [`STREAM_FROM`] bytes it is the standard library's in any case.
#[must_use]
pub fn best_copy() -> Copier {
    #[cfg(target_arch = "x86_64")]
    if let Some(copier) = x86::adaptive() {
        return copier;
    }
    Copier::default()
}

/// One way to copy, for who measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// The standard library's.
    Plain,
    /// The `rep movsb` instruction.
    RepMovsb,
    /// Streaming stores throughout.
    Streaming,
}

impl Method {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Plain, Self::RepMovsb, Self::Streaming];

    /// For tables.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain copy",
            Self::RepMovsb => "rep movsb",
            Self::Streaming => "streaming stores",
        }
    }

    /// The copier; `None` where the processor has no such instructions.
    #[must_use]
    pub fn copier(self) -> Option<Copier> {
        match self {
            Self::Plain => Some(Copier::default()),
            #[cfg(target_arch = "x86_64")]
            Self::RepMovsb => Some(x86::rep_movsb_copier()),
            #[cfg(target_arch = "x86_64")]
            Self::Streaming => x86::streaming().map(x86::streaming_copier),
            #[cfg(not(target_arch = "x86_64"))]
            Self::RepMovsb | Self::Streaming => None,
        }
    }
}

/// Copies as much as both sides have, by `copier`.
pub fn copy(copier: Copier, to: &mut [u8], from: &[u8]) {
    let length = to.len().min(from.len());
    // SAFETY: both sides are borrowed, `to` exclusively, and have at least `length` bytes.
    unsafe { copier.copy(to.as_mut_ptr(), from.as_ptr(), length) }
}

/// What one thread has seen of one class of lengths, and what it does next.
#[derive(Clone, Copy, Debug)]
struct Choice {
    /// Ticks per 4 KiB when both were compared last; 0: not since the cost has changed.
    plain: u64,
    streaming: u64,
    stream: bool,
    task: Task,
    /// Copies since both were timed, and how many there are to be.
    since: u32,
    period: u32,
    longest: u32,
    /// Copies of a kind before those that are compared: each way leaves the sinks to the next copy as it likes them
    /// least, cold or in a cache, so that a single copy of the other way costs more than many would.
    run_up: u32,
    /// Copies of the kind being compared that are still to be timed; what those before took in all, and the longest.
    samples: u32,
    sum: u64,
    longest_copy: u64,
    /// Timed copies in a row that did not cost what was usual.
    alarms: u32,
}

/// What the next timed copy is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Task {
    /// To see whether the method in use still costs what it did.
    Watch,
    /// To compare: first a plain one ...
    Plain,
    /// ... then a streaming one.
    Streaming,
}

impl Choice {
    const fn new(longest: u32, run_up: u32) -> Self {
        Self {
            plain: 0,
            streaming: 0,
            stream: false,
            task: Task::Plain,
            since: 0,
            period: WATCH,
            longest,
            run_up,
            samples: SAMPLES,
            sum: 0,
            longest_copy: 0,
            alarms: 0,
        }
    }

    /// Whether the copies up to the next timed one, and that one, stream.
    const fn streams(&self) -> bool {
        match self.task {
            Task::Watch => self.stream,
            Task::Plain => false,
            Task::Streaming => true,
        }
    }

    /// The timed copy took so long; how many copies follow until the next one that is timed.
    fn record(&mut self, ticks: u64, length: usize) -> u32 {
        let cost = ticks
            .saturating_mul(4096)
            .checked_div(length as u64)
            .unwrap_or(0)
            .max(1);
        if !matches!(self.task, Task::Watch) {
            self.sum = self.sum.saturating_add(cost);
            self.longest_copy = self.longest_copy.max(cost);
            self.samples -= 1;
            if self.samples != 0 {
                return 0;
            }
        }
        let sampled = self.task != Task::Watch;
        // One that was interrupted says nothing.
        let usual = ((self.sum - self.longest_copy) / u64::from(SAMPLES - 1)).max(1);
        (self.samples, self.sum, self.longest_copy) = (SAMPLES, 0, 0);
        let mean = if self.streams() {
            &mut self.streaming
        } else {
            &mut self.plain
        };
        let before = *mean;
        if sampled {
            *mean = usual;
        }
        match self.task {
            Task::Watch => {
                let changed = cost > before + before / 2 || before > cost + cost / 2;
                self.since = self.since.saturating_add(WATCH);
                self.alarms = if changed { self.alarms + 1 } else { 0 };
                if self.alarms == ALARMS {
                    self.alarms = 0;
                    // What was seen before says nothing of now.
                    (self.plain, self.streaming) = (0, 0);
                    self.period = WATCH;
                }
                if self.since >= self.period {
                    self.since = 0;
                    self.task = Task::Plain;
                    return if self.stream { self.run_up } else { 0 };
                }
                WATCH
            }
            Task::Plain => {
                self.task = Task::Streaming;
                self.run_up
            }
            Task::Streaming => {
                self.task = Task::Watch;
                let (chosen, other) = if self.stream {
                    (self.streaming, self.plain)
                } else {
                    (self.plain, self.streaming)
                };
                // A change has to be worth it.
                if other < chosen - chosen / 16 {
                    self.stream = !self.stream;
                    self.period = AGAIN;
                } else {
                    // Confirmed: the next time can be later. A wrong copy costs more than itself, by what
                    // it leaves in the caches and what not.
                    self.period = (self.period * 2).min(self.longest).max(AGAIN);
                }
                WATCH
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use core::arch::asm;
    use core::arch::x86_64::{
        __m128i, __m256i, __m512i, _MM_HINT_NTA, _mm_loadu_si128, _mm_mfence, _mm_prefetch,
        _mm_sfence, _mm_stream_si128, _mm256_loadu_si256, _mm256_stream_si256, _mm512_loadu_si512,
        _mm512_stream_si512, _rdtsc,
    };
    use core::cell::Cell;
    use core::ptr;

    use super::{CLASSES, Choice, Copier, PERIOD, RUN_UP, STREAM_FROM, class, overlap};

    type Copy = unsafe fn(*mut u8, *const u8, usize);

    /// The widest streaming stores of this processor.
    pub(super) fn streaming() -> Option<Copy> {
        if is_x86_feature_detected!("avx512f") {
            Some(stream_512)
        } else if is_x86_feature_detected!("avx2") {
            Some(stream_256)
        } else {
            // Part of every x86-64.
            Some(stream_128)
        }
    }

    pub(super) const fn streaming_copier(copy: Copy) -> Copier {
        // SAFETY: `copy` came from `streaming`; each of those does what `ptr::copy` does (they fall back to it
        // for overlapping ranges) and ends with an `sfence` behind its streaming stores.
        unsafe { Copier::new(copy) }
    }

    pub(super) const fn rep_movsb_copier() -> Copier {
        // SAFETY: `rep_movsb` falls back to `ptr::copy` for overlapping ranges; its stores may be written
        // out of order among themselves, but not past later stores (Intel SDM volume 1, 7.3.9.3).
        unsafe { Copier::new(rep_movsb) }
    }

    pub(super) fn adaptive() -> Option<Copier> {
        let copy: Copy = if is_x86_feature_detected!("avx512f") {
            adaptive_512
        } else if is_x86_feature_detected!("avx2") {
            adaptive_256
        } else {
            adaptive_128
        };
        // SAFETY: each adaptive copy is `ptr::copy` or one of `streaming`'s.
        Some(unsafe { Copier::new(copy) })
    }

    /// One class of lengths; what each copy needs stands by itself.
    struct Class {
        /// Copies until the next one that is timed.
        left: Cell<u32>,
        stream: Cell<bool>,
        choice: Cell<Choice>,
    }

    impl Class {
        const fn new(longest: u32, run_up: u32) -> Self {
            Self {
                left: Cell::new(0),
                stream: Cell::new(false),
                choice: Cell::new(Choice::new(longest, run_up)),
            }
        }
    }

    std::thread_local! {
        static CHOICES: [Class; CLASSES] = const {
            let [a, b, c, d, e, f, g] = RUN_UP;
            [
                Class::new(PERIOD, a),
                Class::new(PERIOD, b),
                Class::new(PERIOD, c),
                Class::new(PERIOD, d),
                Class::new(PERIOD, e),
                Class::new(PERIOD, f),
                Class::new(PERIOD, g),
            ]
        };
    }

    /// # Safety
    /// As for [`ptr::copy`]; the processor has AVX-512F.
    unsafe fn adaptive_512(to: *mut u8, from: *const u8, length: usize) {
        // SAFETY: by the caller's word.
        unsafe { adapt(stream_512, to, from, length) }
    }

    /// # Safety
    /// As for [`ptr::copy`]; the processor has AVX2.
    unsafe fn adaptive_256(to: *mut u8, from: *const u8, length: usize) {
        // SAFETY: by the caller's word.
        unsafe { adapt(stream_256, to, from, length) }
    }

    /// # Safety
    /// As for [`ptr::copy`].
    unsafe fn adaptive_128(to: *mut u8, from: *const u8, length: usize) {
        // SAFETY: by the caller's word.
        unsafe { adapt(stream_128, to, from, length) }
    }

    /// # Safety
    /// As for [`ptr::copy`], and for `stream`.
    #[inline(always)]
    unsafe fn adapt(stream: Copy, to: *mut u8, from: *const u8, length: usize) {
        if length < STREAM_FROM {
            // SAFETY: by the caller's word.
            return unsafe { ptr::copy(from, to, length) };
        }
        CHOICES.with(|choices| {
            let Some(class) = choices.get(class(length)) else {
                return;
            };
            match class.left.get().checked_sub(1) {
                // SAFETY: by the caller's word.
                None => unsafe { timed(class, stream, to, from, length) },
                Some(left) => {
                    class.left.set(left);
                    if class.stream.get() {
                        // SAFETY: by the caller's word.
                        unsafe { stream(to, from, length) }
                    } else {
                        // SAFETY: by the caller's word.
                        unsafe { ptr::copy(from, to, length) }
                    }
                }
            }
        });
    }

    /// # Safety
    /// As for [`ptr::copy`], and for `stream`.
    #[cold]
    unsafe fn timed(class: &Class, stream: Copy, to: *mut u8, from: *const u8, length: usize) {
        let mut choice = class.choice.get();
        let copy: Copy = if choice.streams() { stream } else { move_bytes };
        // SAFETY: RDTSC and MFENCE belong to every x86-64. The fences keep the copy's stores, which may be on
        // their way to memory when it returns, inside what is timed.
        let began = unsafe {
            _mm_mfence();
            _rdtsc()
        };
        // SAFETY: by the caller's word.
        unsafe { copy(to, from, length) };
        // SAFETY: as above.
        let ticks = unsafe {
            _mm_mfence();
            _rdtsc().wrapping_sub(began)
        };
        class.left.set(choice.record(ticks, length));
        class.stream.set(choice.streams());
        class.choice.set(choice);
    }

    /// # Safety
    /// As for [`ptr::copy`].
    unsafe fn move_bytes(to: *mut u8, from: *const u8, length: usize) {
        // SAFETY: by the caller's word.
        unsafe { ptr::copy(from, to, length) }
    }

    /// # Safety
    /// As for [`ptr::copy`].
    unsafe fn rep_movsb(to: *mut u8, from: *const u8, length: usize) {
        if overlap(to, from, length) {
            // SAFETY: by the caller's word.
            return unsafe { ptr::copy(from, to, length) };
        }
        // SAFETY: reads and writes `length` bytes that are the caller's, upwards: the direction flag is
        // clear whenever Rust code runs.
        unsafe {
            asm!(
                "rep movsb",
                inout("rcx") length => _,
                inout("rdi") to => _,
                inout("rsi") from => _,
                options(nostack, preserves_flags)
            );
        }
    }

    /// A streaming copy by vectors of one width.
    macro_rules! stream {
        ($name:ident, $feature:literal, $vector:ty, $load:ident, $store:ident) => {
            /// # Safety
            #[doc = concat!("As for [`ptr::copy`]; the processor has ", $feature, ".")]
            #[target_feature(enable = $feature)]
            unsafe fn $name(to: *mut u8, from: *const u8, length: usize) {
                const WIDTH: usize = size_of::<$vector>();
                if overlap(to, from, length) || length < 2 * BLOCK {
                    // SAFETY: by the caller's word.
                    return unsafe { ptr::copy(from, to, length) };
                }
                // Streaming stores want an aligned sink, and whole lines of it.
                let head = to.addr().wrapping_neg() % LINE;
                let end = head + (length - head) / BLOCK * BLOCK;
                // SAFETY: `head` is less than a line, hence less than `length`.
                unsafe { ptr::copy_nonoverlapping(from, to, head) };
                let mut at = head;
                while at < end {
                    let ahead = at + AHEAD;
                    if ahead < length {
                        for line in 0..BLOCK / LINE {
                            // It touches nothing and never faults.
                            _mm_prefetch::<_MM_HINT_NTA>(
                                from.wrapping_add(ahead + line * LINE).cast::<i8>(),
                            );
                        }
                    }
                    // SAFETY: `at + BLOCK <= end <= length`; the loads need no alignment, and the
                    // stores have it: `to + head` is a multiple of a line, and so is every step from there.
                    unsafe {
                        let mut vectors: [$vector; BLOCK / WIDTH] = core::mem::zeroed();
                        for (n, vector) in vectors.iter_mut().enumerate() {
                            *vector = $load(from.add(at + n * WIDTH).cast());
                        }
                        for (n, vector) in vectors.iter().enumerate() {
                            $store(to.add(at + n * WIDTH).cast::<$vector>(), *vector);
                        }
                    }
                    at += BLOCK;
                }
                // SAFETY: `end <= length`.
                unsafe { ptr::copy_nonoverlapping(from.add(end), to.add(end), length - end) };
                // Streaming stores are weakly ordered; behind this fence a release store is seen after them.
                _mm_sfence();
            }
        };
    }

    stream!(
        stream_512,
        "avx512f",
        __m512i,
        _mm512_loadu_si512,
        _mm512_stream_si512
    );
    stream!(
        stream_256,
        "avx2",
        __m256i,
        _mm256_loadu_si256,
        _mm256_stream_si256
    );
    stream!(
        stream_128,
        "sse2",
        __m128i,
        _mm_loadu_si128,
        _mm_stream_si128
    );

    const LINE: usize = 64;
    /// What one turn of the loop moves.
    const BLOCK: usize = 256;
    /// How far ahead the source is fetched: the hardware's prefetcher starts anew on every page.
    const AHEAD: usize = 1024;
}

fn overlap(to: *mut u8, from: *const u8, length: usize) -> bool {
    let (to, from) = (to.addr(), from.addr());
    to.abs_diff(from) < length
}

/// Lengths of one power of two behave alike.
const fn class(length: usize) -> usize {
    let class = (length / STREAM_FROM).checked_ilog2();
    match class {
        Some(class) if (class as usize) < CLASSES => class as usize,
        Some(_) => CLASSES - 1,
        None => 0,
    }
}

/// Shorter copies never stream: a page is the least that a bulk transfer moves.
pub const STREAM_FROM: usize = 4096;

/// Where nothing changes, both ways are compared once in so many copies.
pub const PERIOD: u32 = 16_384;

/// Copies between two comparisons at least, unless the cost has changed: one takes [`RUN_UP`] of each way, and half of
/// these are by the worse.
const AGAIN: u32 = 4096;

/// Copies of one way before it is timed, per class: of 64 KiB and more as many as push what the other way has left out of most
/// caches.
const RUN_UP: [u32; CLASSES] = [256, 256, 256, 256, 256, 128, 64];

/// Copies of each way that are timed when both are compared.
const SAMPLES: u32 = 5;

/// So many timed copies in a row that cost something else bring the comparison forward.
const ALARMS: u32 = 3;

/// One copy in so many is timed by the method in use: a change of its cost brings the comparison forward.
pub const WATCH: u32 = 64;

/// 4 KiB to 256 KiB and more.
const CLASSES: usize = 7;

#[cfg(test)]
mod tests {
    #![allow(clippy::cast_possible_truncation)]

    use super::{
        CLASSES, Choice, Copier, Method, PERIOD, STREAM_FROM, WATCH, best_copy, class, copy,
    };

    fn copiers() -> Vec<(&'static str, Copier)> {
        let mut all: Vec<_> = Method::ALL
            .into_iter()
            .filter_map(|method| Some((method.name(), method.copier()?)))
            .collect();
        all.push(("best", best_copy()));
        all
    }

    fn pattern(length: usize) -> Vec<u8> {
        (0..length).map(|n| (n * 31 + n / 251) as u8).collect()
    }

    /// The bytes around the sink show whether too much was written.
    #[test]
    fn every_alignment_and_the_lengths_around_each_threshold() {
        let lengths = [
            0, 1, 63, 64, 65, 255, 256, 257, 511, 512, 513, 575, 576, 1023, 1024, 1025, 4095, 4096,
            4097, 4351, 65_535, 65_536, 65_600,
        ];
        let from = pattern(66_000 + 64);
        let mut sink = vec![0_u8; 66_000 + 64];
        for (name, copier) in copiers() {
            for to_at in 0..64 {
                for length in lengths {
                    // The source at every alignment against it, but not all pairs of the long ones.
                    for from_at in [to_at, 0, (to_at * 7 + length + 1) % 64] {
                        let area = &mut sink[..to_at + length + 64];
                        area.fill(0xee);
                        copy(
                            copier,
                            &mut area[to_at..to_at + length],
                            &from[from_at..from_at + length],
                        );
                        let (before, rest) = area.split_at(to_at);
                        let (copied, behind) = rest.split_at(length);
                        assert!(
                            copied == &from[from_at..from_at + length]
                                && before.iter().chain(behind).all(|byte| *byte == 0xee),
                            "{name}: {length} bytes from {from_at} to {to_at}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn every_pair_of_alignments_at_one_length() {
        let from = pattern(5000 + 64);
        for (name, copier) in copiers() {
            for to_at in 0..64 {
                for from_at in 0..64 {
                    let mut sink = vec![0; 5000 + 64];
                    copy(copier, &mut sink[to_at..to_at + 5000], &from[from_at..]);
                    assert!(
                        sink[to_at..to_at + 5000] == from[from_at..from_at + 5000],
                        "{name}"
                    );
                }
            }
        }
    }

    #[test]
    fn overlapping_ranges_move_as_a_whole() {
        for (name, copier) in copiers() {
            for length in [1_usize, 300, 4096, 70_000] {
                for distance in [1_usize, 63, 64, 1000] {
                    for up in [false, true] {
                        let mut bytes = pattern(length + distance);
                        let mut expected = bytes.clone();
                        let (from, to) = if up { (0, distance) } else { (distance, 0) };
                        expected.copy_within(from..from + length, to);
                        let base = bytes.as_mut_ptr();
                        // SAFETY: both ranges lie in the vector.
                        unsafe { copier.copy(base.add(to), base.add(from), length) };
                        assert!(
                            bytes == expected,
                            "{name}: {length} by {distance}, up: {up}"
                        );
                    }
                }
            }
        }
    }

    /// Another thread that sees the flag sees every byte.
    #[test]
    fn a_release_store_publishes_what_was_streamed() {
        use core::sync::atomic::{AtomicU32, Ordering};
        use std::sync::Mutex;
        let from = pattern(16 << 10);
        for (name, copier) in copiers() {
            let sink = Mutex::new(vec![0_u8; 16 << 10]);
            let flag = AtomicU32::new(0);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    for round in 1..=200 {
                        while flag.load(Ordering::Acquire) != round * 2 - 1 {
                            std::thread::yield_now();
                        }
                        let seen = sink.lock().unwrap();
                        assert!(*seen == from, "{name}");
                        drop(seen);
                        flag.store(round * 2, Ordering::Release);
                    }
                });
                for round in 1..=200 {
                    let mut area = sink.lock().unwrap();
                    area.fill(0);
                    copy(copier, &mut area, &from);
                    drop(area);
                    flag.store(round * 2 - 1, Ordering::Release);
                    while flag.load(Ordering::Acquire) != round * 2 {
                        std::thread::yield_now();
                    }
                }
            });
        }
    }

    /// Of the next copies, how many were timed, and how many of the others streamed, when the two cost so much.
    fn run(choice: &mut Choice, copies: u32, plain: u64, streaming: u64) -> (u32, u32) {
        let (mut timed, mut streamed, mut left) = (0, 0, 0);
        for _ in 0..copies {
            if left == 0 {
                timed += 1;
                let cost = if choice.streams() { streaming } else { plain };
                left = choice.record(cost, STREAM_FROM);
            } else {
                left -= 1;
                streamed += u32::from(choice.streams());
            }
        }
        (timed, streamed)
    }

    #[test]
    fn what_takes_less_time_is_used_and_a_change_is_noticed_soon() {
        let mut choice = Choice::new(PERIOD, 0);
        let all = 20 * PERIOD;
        let (timed, streamed) = run(&mut choice, all, 1000, 400);
        assert_eq!(timed + streamed, all, "from the first on");
        assert_eq!((choice.period, choice.stream), (PERIOD, true));
        // The sink is in a cache now: both cost less.
        run(&mut choice, 16 * WATCH, 200, 250);
        assert!(!choice.stream);
        let (timed, streamed) = run(&mut choice, all, 200, 250);
        assert_eq!(streamed, 0);
        assert!(timed < all / 60, "measuring is rare: {timed}");
        // Too close to call: it stays.
        assert_eq!(run(&mut choice, all, 250, 240).1, 0);
        // And back.
        run(&mut choice, 16 * WATCH, 1000, 400);
        assert!(choice.stream);
    }

    /// A sink that fits a cache, where a plain copy costs little if the copies before it were plain as well.
    #[test]
    fn streaming_does_not_hold_on_by_keeping_the_sink_cold() {
        let mut choice = Choice::new(PERIOD, 64);
        run(&mut choice, 4 * PERIOD, 1000, 400);
        assert!(choice.stream);
        let (mut left, mut plain_before) = (0, 0);
        for _ in 0..4 * PERIOD {
            let streams = if left == 0 {
                let streams = choice.streams();
                let cost = match (streams, plain_before) {
                    (true, _) => 400,
                    (false, 0..32) => 700,
                    (false, _) => 150,
                };
                left = choice.record(cost, STREAM_FROM);
                streams
            } else {
                left -= 1;
                choice.streams()
            };
            plain_before = if streams { 0 } else { plain_before + 1 };
        }
        assert!(!choice.stream);
    }

    #[test]
    fn one_interrupted_copy_changes_nothing() {
        let mut choice = Choice::new(PERIOD, 0);
        run(&mut choice, 20 * PERIOD, 200, 400);
        choice.record(1_000_000, STREAM_FROM);
        assert!(!choice.stream);
        assert_eq!(run(&mut choice, 20 * PERIOD, 200, 400).1, 0);
    }

    #[test]
    fn classes_are_powers_of_two_up_to_a_slice() {
        assert_eq!(class(STREAM_FROM), 0);
        assert_eq!(class(8191), 0);
        assert_eq!(class(8192), 1);
        assert_eq!(class(65_536), 4);
        assert_eq!(class(262_144), CLASSES - 1);
        assert_eq!(class(usize::MAX), CLASSES - 1);
    }
}
