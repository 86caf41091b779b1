//! What some drivers do differently, by name.

use o2poll_dataplane::nic::Status;
use rdma_core_sys::types::{IBV_WC_IP_CSUM_OK, IBV_WC_WITH_INV};

bitflags::bitflags! {
    /// What a driver is known to do differently from the specification, or to leave to its user.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Quirks: u32 {
        /// A receive whose message invalidated a key says so in bit 2 of `wc_flags`, the kernel's bit, not in
        /// bit 3, user space's (rxe: `IB_WC_WITH_INVALIDATE` against `IBV_WC_WITH_INV`).
        const INVALIDATED_IS_BIT_2 = 1;
        /// Every receive says that it has a GRH (rxe).
        const GRH_ALWAYS = 1 << 1;
        /// An access through a window is held against the memory region below it, not against the window
        /// (rxe `check_rkey`).
        const BOUNDS_OF_THE_REGION = 1 << 2;
        /// To invalidate a window that is not bound is a NULL dereference in the kernel (rxe
        /// `rxe_do_invalidate_mw`).
        const FREE_WINDOW_IS_FATAL = 1 << 3;
        /// Any queue pair of the device may invalidate a window (rxe `rxe_invalidate_mw`).
        const ANYONE_INVALIDATES = 1 << 4;
        /// A SEND_WITH_INV that fails at the receiver is a success for its sender (rxe).
        const SENDER_NOT_TOLD = 1 << 5;
        /// Destroying a queue pair waits, 50 s long, for windows that are bound to it (rxe).
        const WINDOW_HOLDS_QUEUE_PAIR = 1 << 6;
        /// A receive that is posted in the error state may never be flushed (rxe).
        const LATE_RECEIVE_IS_LOST = 1 << 7;
        /// Seven retries, the most that there are, mean for ever (rxe `rxe_completer`).
        const SEVEN_RETRIES_ARE_FOREVER = 1 << 8;
        /// Where a packet was lost, a BIND behind it that is done is carried out again, and fails; then the queue pair takes in
        /// no acknowledgement any more (rxe `req_retry`).
        const BIND_IS_REPLAYED = 1 << 9;
    }
}

impl Quirks {
    /// rxe of Linux 6.1, soft-RoCE.
    pub const RXE: Self = Self::all();

    /// What is known of a device, by its vendor. rxe calls itself 0xffffff.
    #[must_use]
    pub const fn of_vendor(vendor_id: u32) -> Self {
        match vendor_id {
            0x00ff_ffff => Self::RXE,
            _ => Self::empty(),
        }
    }

    /// The bit of a receive's `wc_flags` that says that a key was invalidated. No other bit of it says
    /// anything that this driver acts on, except that of immediate data: flags are never compared as a whole.
    #[must_use]
    pub const fn invalidated_flag(self) -> u32 {
        if self.contains(Self::INVALIDATED_IS_BIT_2) {
            IBV_WC_IP_CSUM_OK
        } else {
            IBV_WC_WITH_INV
        }
    }

    /// The retry count to ask for: a peer that is gone must be noticed.
    #[must_use]
    pub const fn retries(self, asked: u8) -> u8 {
        if asked >= 7 && self.contains(Self::SEVEN_RETRIES_ARE_FOREVER) {
            6
        } else {
            asked
        }
    }

    /// What an operator should know of it, a line each.
    pub fn warnings(self) -> impl Iterator<Item = &'static str> {
        const WARNINGS: [(Quirks, &str); 3] = [
            (
                Quirks::BOUNDS_OF_THE_REGION,
                "a key opens the whole memory region on this device, not only the range that was registered: for tests only",
            ),
            (
                Quirks::FREE_WINDOW_IS_FATAL,
                "a peer can crash this kernel with a SEND_WITH_INV of a dead key: connect only to peers you trust",
            ),
            (
                Quirks::SENDER_NOT_TOLD,
                "a SEND_WITH_INV that a peer could not carry out is not told to its sender on this device",
            ),
        ];
        WARNINGS
            .into_iter()
            .filter(move |(quirk, _)| self.contains(*quirk))
            .map(|(_, text)| text)
    }

    /// Whether a completion with this status may have been seen by the peer as a success.
    #[must_use]
    pub fn is_told_here_only(self, status: Status) -> bool {
        self.contains(Self::SENDER_NOT_TOLD) && status == Status::RemoteInvalidate
    }
}

#[cfg(test)]
mod tests {
    use super::Quirks;
    use o2poll_dataplane::nic::Status;

    #[test]
    fn rxe_is_known_by_its_vendor_and_a_card_has_no_quirks() {
        assert_eq!(Quirks::of_vendor(0x00ff_ffff), Quirks::RXE);
        assert_eq!(Quirks::of_vendor(0x0000_02c9), Quirks::empty());
    }

    #[test]
    fn the_flag_of_an_invalidated_key_is_the_kernels_on_rxe() {
        assert_eq!(Quirks::RXE.invalidated_flag(), 1 << 2);
        assert_eq!(Quirks::empty().invalidated_flag(), 1 << 3);
    }

    #[test]
    fn retries_end() {
        assert_eq!(Quirks::RXE.retries(7), 6);
        assert_eq!(Quirks::RXE.retries(3), 3);
        assert_eq!(Quirks::empty().retries(7), 7);
    }

    #[test]
    fn an_operator_is_warned_of_bounds_that_nobody_checks() {
        let warnings: Vec<&str> = Quirks::RXE.warnings().collect();
        assert_eq!(warnings.len(), 3);
        assert!(
            warnings
                .iter()
                .any(|text| text.contains("whole memory region"))
        );
        assert_eq!(Quirks::empty().warnings().count(), 0);
    }

    #[test]
    fn a_failed_remote_invalidation_is_seen_by_the_receiver_alone() {
        assert!(Quirks::RXE.is_told_here_only(Status::RemoteInvalidate));
        assert!(!Quirks::RXE.is_told_here_only(Status::RemoteAccess));
        assert!(!Quirks::empty().is_told_here_only(Status::RemoteInvalidate));
    }
}
