//! The laws of [`dataplane::nic`](o2poll_dataplane::nic), as tests for every backend.
//!
//! A backend writes a [`Bench`] (two connected devices) and says [`conformance!`](crate::conformance!). Each law is
//! one public function over a bench, and becomes one test. What a backend cannot keep it lists in
//! [`Bench::DEVIATIONS`] with the reason; a name in there that is no law is itself a failure. A law about something
//! that the device does not have, by its own capabilities, says so and holds.
//!
//! Nothing in here knows the software device. A key comes to life in the best [`Way`] that the device has; where it
//! has no registration on its queues, the control side of the bench makes it ([`Bench::mapping`],
//! [`Bench::expose`]). What only some backends can do has a default that says "not here": order faults
//! ([`Bench::delay_registrations`]), make queues of exactly the length asked for ([`Bench::made`]).
#![allow(clippy::cast_possible_truncation, clippy::cast_possible_wrap)]

pub mod access;
pub mod mapping;
pub mod queues;
pub mod registration;

use std::vec::Vec;

use o2poll_dataplane::nic::{
    Completion, Layout, Mechanisms, Nic, Qp, RKey, ReceiveQueue, Region, Rejected, Remote, Rights,
    SendWr, Sge, Status, WrId,
};

/// Which of the two devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// By custom the one whose memory is used.
    A,
    /// By custom the one that asks.
    B,
}

/// Which of the connections between them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lane {
    /// The first.
    Main,
    /// Another in the same protection domain.
    Sibling,
    /// One in another protection domain.
    Foreign,
}

/// How the queue pairs are made.
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "the usual names")]
pub struct Setup {
    pub send_depth: u32,
    pub recv_depth: u32,
    pub rnr_retry: u8,
    pub responder_resources: u8,
    /// Entries of each completion queue.
    pub cqe: u32,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            send_depth: 16,
            recv_depth: 16,
            rnr_retry: 3,
            responder_resources: 1,
            cqe: 256,
        }
    }
}

/// Two devices, each with [`MEMORY`] bytes registered in both protection domains, connected three times.
pub trait Bench: Sized {
    /// The device.
    type Nic: Nic;

    /// Laws that this backend does not keep, each with the reason.
    const DEVIATIONS: &'static [(&'static str, &'static str)] = &[];

    /// Steps that suffice for anything to happen, retries included.
    const PATIENCE: usize;

    /// A peer's SEND that names the key of a window which is not bound is refused. False where it must not be tried:
    /// rxe's kernel does not survive it.
    const SURVIVES_DEAD_KEYS: bool = true;

    /// Why there is nothing to test here: a device that was not asked for.
    #[must_use]
    fn absent() -> Option<&'static str> {
        None
    }

    /// A new pair, idle, queue pairs ready to send.
    fn new(setup: Setup) -> Self;

    /// The device of a side.
    fn nic(&mut self, side: Side) -> &mut Self::Nic;

    /// Its queue pair of a lane.
    fn qp(&self, side: Side, lane: Lane) -> Qp;

    /// How long the queues really are that were made for this setup: devices round up.
    fn made(&self, setup: Setup) -> Setup {
        setup
    }

    /// A new window in the lane's protection domain, as a control thread makes it.
    fn window(&mut self, side: Side, lane: Lane) -> <Self::Nic as Nic>::Window;

    /// A new window with a live mapping over these ranges in the lane's protection domain, and a key that no window
    /// before it had; `None` where the device has no [`Mechanisms::MAPPINGS`].
    fn mapping(
        &mut self,
        _side: Side,
        _lane: Lane,
        _ranges: &[Sge],
        _rights: Rights,
        _base: u64,
    ) -> Option<<Self::Nic as Nic>::Window> {
        None
    }

    /// What a control thread does with a window that was retired.
    fn discard(&mut self, _side: Side, window: <Self::Nic as Nic>::Window) {
        drop(window);
    }

    /// A key over a range of a side's memory in the lane's protection domain, for good: base memory with remote rights.
    /// Only asked of a device without any [`Mechanisms`]; `None` where the bench cannot make one.
    fn expose(
        &mut self,
        _side: Side,
        _lane: Lane,
        _offset: usize,
        _length: u32,
        _rights: Rights,
    ) -> Option<Remote> {
        None
    }

    /// From now on registrations of a side take so long that a message over another queue pair is there and
    /// answered before; false where that cannot be ordered.
    fn delay_registrations(&mut self, _side: Side) -> bool {
        false
    }

    /// A piece of a side's memory, with the local key of the lane's protection domain.
    fn sge(&self, side: Side, lane: Lane, offset: usize, length: u32) -> Sge;

    /// Copies out of a side's memory.
    fn peek(&self, side: Side, offset: usize, length: usize) -> Vec<u8>;

    /// Copies into it.
    fn poke(&mut self, side: Side, offset: usize, bytes: &[u8]);

    /// Polls both devices once; what completed goes to the ends of the two lists.
    fn step(&mut self, seen: &mut [Vec<Completion>; 2]);
}

/// Bytes of memory of each side.
pub const MEMORY: usize = 256 << 10;

/// How a device puts a key over memory, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// REGISTER of a fragment list.
    Fragments,
    /// REGISTER of a page list.
    Pages,
    /// REGISTER of a window.
    Window,
    /// The control side maps.
    Mapping,
    /// The control side registers base memory for good.
    Exposure,
}

/// A key that is live.
#[derive(Clone, Copy, Debug)]
pub struct Grant {
    /// Its window; none where base memory is exposed.
    pub region: Option<Region>,
    /// Its key.
    pub key: RKey,
    /// Where its address space begins.
    pub base: u64,
}

impl Grant {
    /// Bytes from `offset` on, as a peer names them.
    #[must_use]
    pub const fn at(&self, offset: i64) -> Remote {
        Remote {
            address: self.base.wrapping_add_signed(offset),
            rkey: self.key,
        }
    }
}

/// A REGISTER of one range, in a device's own way.
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "as in `SendWr::Register`")]
pub struct Registration {
    pub region: Region,
    pub key: RKey,
    pub rights: Rights,
    pub base: u64,
    pub length: u32,
    pub piece: Sge,
}

/// A bench with what has completed so far, and the common moves.
pub struct World<B: Bench> {
    /// The bench.
    pub bench: B,
    seen: [Vec<Completion>; 2],
}

impl<B: Bench> World<B> {
    /// A fresh one.
    #[must_use]
    pub fn new(setup: Setup) -> Self {
        Self {
            bench: B::new(setup),
            seen: [Vec::new(), Vec::new()],
        }
    }

    /// Whether every one of these mechanisms is there.
    pub fn has(&mut self, mechanisms: Mechanisms) -> bool {
        let capabilities = self.bench.nic(Side::A).capabilities();
        capabilities.mechanisms.contains(mechanisms)
    }

    /// In which way keys come to life here.
    pub fn way(&mut self) -> Way {
        let mechanisms = self.bench.nic(Side::A).capabilities().mechanisms;
        for (mechanism, way) in [
            (Mechanisms::FRAGMENTS, Way::Fragments),
            (Mechanisms::PAGES, Way::Pages),
            (Mechanisms::WINDOW, Way::Window),
            (Mechanisms::MAPPINGS, Way::Mapping),
        ] {
            if mechanisms.contains(mechanism) {
                return way;
            }
        }
        Way::Exposure
    }

    /// Whether keys come to life and die on a queue; says so where they do not.
    pub fn registers(&mut self) -> bool {
        let way = self.way();
        let registers = matches!(way, Way::Fragments | Way::Pages | Way::Window);
        registers || lacks("registration on a queue")
    }

    /// Polls until `count` completions are there, and a little more; takes all.
    pub fn expect(&mut self, side: Side, count: usize) -> Vec<Completion> {
        for _ in 0..B::PATIENCE {
            if self.seen[side as usize].len() >= count {
                break;
            }
            self.bench.step(&mut self.seen);
        }
        self.settle();
        let seen = core::mem::take(&mut self.seen[side as usize]);
        assert_eq!(seen.len(), count, "completions of side {side:?}: {seen:?}");
        seen
    }

    /// Polls for a while.
    pub fn settle(&mut self) {
        for _ in 0..64 {
            self.bench.step(&mut self.seen);
        }
    }

    /// Queues one request.
    pub fn queue(&mut self, side: Side, lane: Lane, id: u64, signalled: bool, wr: SendWr<'_>) {
        let qp = self.bench.qp(side, lane);
        self.bench.nic(side).queue(qp, WrId(id), signalled, wr);
    }

    /// Rings.
    ///
    /// # Errors
    /// As the device says.
    pub fn doorbell(&mut self, side: Side, lane: Lane) -> Result<(), Rejected> {
        let qp = self.bench.qp(side, lane);
        self.bench.nic(side).doorbell(qp)
    }

    /// One signalled request in a chain of its own.
    pub fn run(&mut self, side: Side, lane: Lane, id: u64, wr: SendWr<'_>) {
        self.queue(side, lane, id, true, wr);
        self.doorbell(side, lane).unwrap();
    }

    /// Posts a receive.
    pub fn post(&mut self, side: Side, lane: Lane, id: u64, offset: usize, length: u32) {
        let buffer = self.bench.sge(side, lane, offset, length);
        let into = ReceiveQueue::Of(self.bench.qp(side, lane));
        let posted = self.bench.nic(side).receive(into, WrId(id), buffer);
        posted.unwrap();
    }

    /// A SEND of our own memory.
    pub fn message(&self, side: Side, lane: Lane, offset: usize, length: u32) -> SendWr<'static> {
        SendWr::Send {
            message: self.bench.sge(side, lane, offset, length),
            invalidate: None,
        }
    }

    /// A signalled WRITE of our own memory.
    pub fn write(&mut self, side: Side, lane: Lane, id: u64, local: (usize, u32), remote: Remote) {
        let local = [self.bench.sge(side, lane, local.0, local.1)];
        let wr = SendWr::Write {
            local: &local,
            remote,
            imm: None,
        };
        self.run(side, lane, id, wr);
    }

    /// Adopts a new window.
    pub fn adopt(&mut self, side: Side, lane: Lane) -> (Region, RKey) {
        let window = self.bench.window(side, lane);
        let adopted = self.bench.nic(side).adopt_window(window);
        let Ok(adopted) = adopted else {
            panic!("no room for a window");
        };
        adopted
    }

    /// Queues a registration of one range by whatever mechanism there is; where its address space begins.
    #[expect(clippy::too_many_arguments, reason = "a registration has that many")]
    pub fn register(
        &mut self,
        side: Side,
        lane: Lane,
        id: u64,
        (region, key): (Region, RKey),
        rights: Rights,
        offset: usize,
        length: u32,
    ) -> u64 {
        let piece = self.bench.sge(side, lane, offset, length);
        let base = self.base_of(piece);
        let order = Registration {
            region,
            key,
            rights,
            base,
            length,
            piece,
        };
        self.queue_registration(side, lane, id, &order);
        base
    }

    /// Where the address space of a key over this piece is asked to begin.
    pub fn base_of(&mut self, piece: Sge) -> u64 {
        let way = self.way();
        let capabilities = self.bench.nic(Side::A).capabilities();
        let page = 1_u64 << capabilities.page_shift;
        match way {
            // A window is addressed as the memory is.
            Way::Window | Way::Exposure => piece.address,
            _ if capabilities.zero_based => 0,
            // As page tables have it: the same offset in the page.
            Way::Pages => (0x0123_4567_89ab_c001 & !(page - 1)) | (piece.address & (page - 1)),
            _ => 0x0123_4567_89ab_c001,
        }
    }

    /// Queues a registration as it is, right or wrong.
    pub fn queue_registration(&mut self, side: Side, lane: Lane, id: u64, order: &Registration) {
        let piece = order.piece;
        let list = [piece];
        let shift = self.bench.nic(side).capabilities().page_shift;
        let layout = match self.way() {
            Way::Fragments => Layout::Fragments(&list),
            Way::Pages => Layout::Pages {
                shift,
                ranges: &list,
            },
            _ => Layout::Window(piece),
        };
        let wr = SendWr::Register {
            region: order.region,
            key: order.key,
            rights: order.rights,
            base: order.base,
            length: order.length,
            layout,
        };
        self.queue(side, lane, id, true, wr);
    }

    /// Puts a key over one range, and waits for it.
    pub fn grant(
        &mut self,
        side: Side,
        lane: Lane,
        rights: Rights,
        offset: usize,
        length: u32,
    ) -> Grant {
        match self.way() {
            Way::Mapping => {
                let piece = self.bench.sge(side, lane, offset, length);
                let base = self.base_of(piece);
                self.map(side, lane, &[piece], rights, base)
            }
            Way::Exposure => {
                let exposed = self.bench.expose(side, lane, offset, length, rights);
                let exposed = exposed.expect("a device without mechanisms exposes base memory");
                Grant {
                    region: None,
                    key: exposed.rkey,
                    base: exposed.address,
                }
            }
            _ => {
                let window = self.adopt(side, lane);
                self.grant_on(side, lane, window, rights, offset, length)
            }
        }
    }

    /// Registers one range on a window whose key was last this, and waits for it.
    pub fn grant_on(
        &mut self,
        side: Side,
        lane: Lane,
        (region, key): (Region, RKey),
        rights: Rights,
        offset: usize,
        length: u32,
    ) -> Grant {
        let key = key.rotated();
        let base = self.register(side, lane, GRANT, (region, key), rights, offset, length);
        self.doorbell(side, lane).unwrap();
        assert_eq!(self.expect(side, 1), [done(GRANT)]);
        Grant {
            region: Some(region),
            key,
            base,
        }
    }

    /// The control side puts a key over ranges.
    pub fn map(
        &mut self,
        side: Side,
        lane: Lane,
        ranges: &[Sge],
        rights: Rights,
        base: u64,
    ) -> Grant {
        let window = self.bench.mapping(side, lane, ranges, rights, base);
        let window = window.expect("a device with mappings has a bench that makes them");
        let Ok((region, key)) = self.bench.nic(side).adopt_window(window) else {
            panic!("a mapping was not adopted");
        };
        Grant {
            region: Some(region),
            key,
            base,
        }
    }

    /// Ends a key in the way that it was made, and waits for it; false where it is for good.
    pub fn kill(&mut self, side: Side, lane: Lane, grant: Grant) -> bool {
        match (self.way(), grant.region) {
            (Way::Exposure, _) | (_, None) => lacks("a key that can be killed"),
            (Way::Mapping, Some(region)) => {
                let window = self.bench.nic(side).retire_window(region);
                self.bench.discard(side, window.expect("was adopted"));
                true
            }
            _ => {
                self.invalidate(side, lane, grant.key);
                true
            }
        }
    }

    /// The next key after one that was killed: of the same window where windows are used again.
    pub fn grant_again(
        &mut self,
        side: Side,
        lane: Lane,
        old: Grant,
        rights: Rights,
        offset: usize,
        length: u32,
    ) -> Grant {
        match (self.way(), old.region) {
            (Way::Mapping | Way::Exposure, _) | (_, None) => {
                self.grant(side, lane, rights, offset, length)
            }
            (_, Some(region)) => {
                self.grant_on(side, lane, (region, old.key), rights, offset, length)
            }
        }
    }

    /// Invalidates a key and waits for it.
    pub fn invalidate(&mut self, side: Side, lane: Lane, key: RKey) {
        self.run(side, lane, GRANT, SendWr::Invalidate { key });
        assert_eq!(self.expect(side, 1), [done(GRANT)]);
    }

    /// Both queue pairs of the lane are in error: what is posted now comes back flushed.
    pub fn assert_both_in_error(&mut self, lane: Lane) {
        for side in [Side::A, Side::B] {
            let wr = self.message(side, lane, 0, 1);
            self.run(side, lane, PROBE, wr);
            assert_eq!(self.expect(side, 1), [failed(PROBE, Status::Flushed)]);
        }
    }

    /// A WRITE from B to A is refused: nothing of A's memory changes, and both queue pairs go to error.
    pub fn assert_write_refused(&mut self, lane: Lane, local: (usize, u32), remote: Remote) {
        let before = self.bench.peek(Side::A, 0, MEMORY);
        self.post(Side::A, lane, RECEIVE, MEMORY - 64, 64);
        self.write(Side::B, lane, 1, local, remote);
        let refused = [failed(1, Status::RemoteAccess)];
        assert_eq!(self.expect(Side::B, 1), refused);
        let flushed = [failed(RECEIVE, Status::Flushed)];
        assert_eq!(self.expect(Side::A, 1), flushed);
        assert!(self.bench.peek(Side::A, 0, MEMORY) == before, "bytes moved");
        self.assert_both_in_error(lane);
    }

    /// A WRITE from B to A is done.
    pub fn assert_written(&mut self, lane: Lane, bytes: &[u8], remote: Remote, lands: usize) {
        self.bench.poke(Side::B, 0, bytes);
        let length = u32::try_from(bytes.len()).unwrap();
        self.write(Side::B, lane, 1, (0, length), remote);
        assert_eq!(self.expect(Side::B, 1), [done(1)]);
        assert_eq!(self.bench.peek(Side::A, lands, bytes.len()), bytes);
    }
}

/// A completion.
#[must_use]
pub const fn done(id: u64) -> Completion {
    Completion::Done { id: WrId(id) }
}

/// A failed one.
#[must_use]
pub const fn failed(id: u64, status: Status) -> Completion {
    Completion::Failed {
        id: WrId(id),
        status,
    }
}

/// A message that came.
#[must_use]
pub const fn received(id: u64, length: u32) -> Completion {
    Completion::Received {
        id: WrId(id),
        length,
        imm: None,
        invalidated: None,
    }
}

/// Bytes that tell where they belong.
#[must_use]
pub fn pattern(seed: u32, length: usize) -> Vec<u8> {
    let mut x = seed.wrapping_mul(0x9e37_79b9) | 1;
    core::iter::repeat_with(|| {
        x ^= x << 13;
        x ^= x >> 17;
        x ^= x << 5;
        x.to_le_bytes()[1]
    })
    .take(length)
    .collect()
}

/// Runs one law, or says why not.
pub fn judge<B: Bench>(name: &str, law: impl FnOnce()) {
    for (deviation, reason) in B::DEVIATIONS {
        assert!(LAWS.contains(deviation), "no such law: {deviation}");
        if *deviation == name {
            std::println!("not kept here: {name}: {reason}");
            return;
        }
    }
    if let Some(reason) = B::absent() {
        std::println!("not run: {name}: {reason}");
        return;
    }
    law();
}

/// Says that a law is about something that this device does not have. False.
pub fn lacks(what: &str) -> bool {
    std::println!("not applicable here: the device has no {what}");
    false
}

const GRANT: u64 = 9001;
const PROBE: u64 = 9002;
const RECEIVE: u64 = 9003;

/// Makes a module of tests, one per law, for a [`Bench`](crate::conformance::Bench).
#[macro_export]
macro_rules! conformance {
    ($module:ident, $bench:ty) => {
        mod $module {
            #[allow(unused_imports)]
            use super::*;
            type UnderTest = $bench;
            $crate::laws!(law_tests);
        }
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! law_tests {
    ($($room:ident: $($law:ident)+;)+) => {$($(
        #[test]
        fn $law() {
            $crate::conformance::judge::<UnderTest>(
                stringify!($law),
                $crate::conformance::$room::$law::<UnderTest>,
            );
        }
    )+)+};
}

#[doc(hidden)]
#[macro_export]
macro_rules! law_names {
    ($($room:ident: $($law:ident)+;)+) => {
        /// The name of every law.
        pub const LAWS: &[&str] = &[$($(stringify!($law),)+)+];
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! laws {
    ($then:ident) => {
        $crate::$then! {
        access:
            bounds_hold_to_the_byte
            a_range_that_runs_over_is_refused_whole
            rights_are_kept_apart
            a_key_that_never_lived_opens_nothing
            an_invalidated_key_opens_nothing
            the_key_before_and_the_key_after_open_nothing
            no_other_tag_of_256_opens
            all_256_tags_serve_in_turn
            a_key_of_another_domain_opens_nothing
            a_key_is_not_killed_from_another_domain
            a_sibling_uses_a_key_but_not_a_window
            a_sibling_kills_a_key_but_not_a_window
            an_access_of_length_zero_checks_no_key
            reads_fetch_what_is_there
            a_read_without_responder_resources_is_refused
            a_local_key_must_be_ours
            a_local_range_must_be_ours
            an_immediate_takes_a_receive
            writes_gather_their_pieces
            a_message_that_is_too_long_fails_both
            a_long_message_arrives_whole;
        registration:
            a_key_may_travel_in_the_message_behind_it
            length_zero_is_refused
            a_wrong_index_is_refused
            a_window_of_another_domain_is_refused
            memory_of_another_domain_is_refused
            a_range_outside_memory_is_refused
            lengths_must_agree
            registering_over_a_live_key
            a_second_registration_behind_the_first_opens_one_key
            a_registration_that_was_not_taken_never_happened
            another_queue_pair_waits_for_the_registration
            fragments_lie_end_to_end
            the_longest_list_fits_and_no_longer
            pages_lie_end_to_end
            pages_may_be_larger_than_the_smallest
            a_crooked_page_list_is_refused
            the_longest_page_list_fits_and_no_longer
            a_second_invalidate_is_refused
            base_memory_cannot_be_invalidated
            an_invalidate_waits_for_what_is_before_it
            a_send_kills_the_key_it_names
            a_send_that_names_a_dead_key_fails_its_receive
            a_send_that_names_a_dead_key_fails_for_its_sender
            a_send_does_not_kill_what_is_not_its_own
            a_failed_registration_leaves_no_key;
        mapping:
            a_mapping_lays_its_ranges_end_to_end
            the_longest_mapping_fits_and_no_longer
            a_mapping_with_a_hole_within_a_page_is_given_back
            a_mapping_serves_every_queue_pair_of_its_domain
            a_mapping_of_what_is_not_ours_is_given_back
            a_retired_mapping_opens_nothing
            a_dead_mapping_does_not_come_back_with_the_256th_after_it
            only_the_control_side_ends_a_mapping;
        queues:
            sends_arrive_in_order
            what_was_written_is_there_when_the_message_is
            errors_flush_both_queues_signalled_or_not
            a_late_request_comes_back_flushed
            a_late_receive_is_refused
            a_receiver_that_gets_ready_is_served
            a_receiver_that_never_is_fails_the_send
            a_peer_that_is_gone_fails_the_send
            a_chain_that_is_too_long_is_taken_in_part
            unsignalled_requests_hold_their_slots
            a_full_receive_queue_refuses
            a_full_completion_queue_is_told
            too_many_pieces_are_refused;
            }
    };
}

laws!(law_names);
