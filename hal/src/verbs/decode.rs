//! What an entry of the completion queue says.
//!
//! Of a failed one only `wr_id`, `status`, `qp_num` and `vendor_err` are defined (`ibv_poll_cq(3)`); this
//! looks at the first two. Whether it was a send or a receive is told by the id, which is ours.

use o2poll_dataplane::nic::{RKey, Status};
use rdma_core_sys::types::{
    IBV_WC_LOC_ACCESS_ERR, IBV_WC_LOC_LEN_ERR, IBV_WC_LOC_PROT_ERR, IBV_WC_LOC_QP_OP_ERR,
    IBV_WC_MW_BIND_ERR, IBV_WC_REM_ACCESS_ERR, IBV_WC_REM_INV_REQ_ERR, IBV_WC_REM_OP_ERR,
    IBV_WC_RETRY_EXC_ERR, IBV_WC_RNR_RETRY_EXC_ERR, IBV_WC_SUCCESS, IBV_WC_WITH_IMM,
    IBV_WC_WR_FLUSH_ERR, ibv_wc, ibv_wc_status,
};

/// The id of a work request as the device has it: which queue of which queue pair, and where in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Token {
    pub(super) slot: u16,
    /// Of the slot; 15 bits.
    pub(super) generation: u16,
    pub(super) receive: bool,
    pub(super) position: u32,
}

/// What a receive brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Arrival {
    pub(super) length: u32,
    pub(super) imm: Option<u32>,
    pub(super) invalidated: Option<RKey>,
}

/// What a completion says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Sent,
    Arrived(Arrival),
    Failed(Status),
}

impl Token {
    pub(super) const GENERATIONS: u16 = 0x7fff;

    /// Set in the ids of receives alone.
    pub(super) const RECEIVE: u64 = 1 << 63;

    /// What all ids of one queue pair have in common: slot and generation.
    #[inline]
    pub(super) const fn owner(id: u64) -> u64 {
        id & 0x7fff_ffff_0000_0000
    }

    /// The slot of the queue pair that an id is of.
    #[inline]
    pub(super) const fn slot(id: u64) -> usize {
        (id >> 32) as usize & 0xffff
    }

    /// The place in its queue.
    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "the lower half")]
    pub(super) const fn position(id: u64) -> u32 {
        id as u32
    }

    #[inline]
    pub(super) const fn pack(self) -> u64 {
        (self.receive as u64) << 63
            | (self.generation as u64 & 0x7fff) << 48
            | (self.slot as u64) << 32
            | self.position as u64
    }

    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "the parts of it")]
    pub(super) const fn unpack(id: u64) -> Self {
        Self {
            slot: (id >> 32) as u16,
            generation: (id >> 48) as u16 & 0x7fff,
            receive: id >> 63 != 0,
            position: id as u32,
        }
    }
}

/// Reads a completion. `invalidated` is the flag that says that a key was
/// ([`Quirks::invalidated_flag`](super::quirks::Quirks::invalidated_flag)).
#[inline]
pub(super) fn decode(wc: &ibv_wc, receive: bool, invalidated: u32) -> Outcome {
    if wc.status != IBV_WC_SUCCESS {
        return Outcome::Failed(status(wc.status, receive));
    }
    if !receive {
        return Outcome::Sent;
    }
    // SAFETY: both fields of the union are a `u32`, and `wc` is initialised.
    let word = unsafe { wc.__bindgen_anon_1.invalidated_rkey };
    let imm = wc.wc_flags & IBV_WC_WITH_IMM != 0;
    let invalidated = !imm && wc.wc_flags & invalidated != 0;
    Outcome::Arrived(Arrival {
        length: wc.byte_len,
        imm: imm.then_some(u32::from_be(word)),
        invalidated: invalidated.then_some(RKey(word)),
    })
}

/// `enum ibv_wc_status` as the contract says it.
#[cold]
const fn status(status: ibv_wc_status, receive: bool) -> Status {
    match status {
        IBV_WC_WR_FLUSH_ERR => Status::Flushed,
        IBV_WC_LOC_LEN_ERR => Status::LocalLength,
        IBV_WC_LOC_QP_OP_ERR => Status::LocalOperation,
        IBV_WC_LOC_PROT_ERR | IBV_WC_LOC_ACCESS_ERR => Status::LocalProtection,
        IBV_WC_MW_BIND_ERR => Status::Bind,
        // Of a receive: the message named a key that could not be invalidated.
        IBV_WC_REM_INV_REQ_ERR if receive => Status::RemoteInvalidate,
        IBV_WC_REM_INV_REQ_ERR => Status::RemoteInvalidRequest,
        IBV_WC_REM_ACCESS_ERR => Status::RemoteAccess,
        IBV_WC_REM_OP_ERR => Status::RemoteOperation,
        IBV_WC_RETRY_EXC_ERR => Status::RetryExceeded,
        IBV_WC_RNR_RETRY_EXC_ERR => Status::ReceiverNotReady,
        other => Status::Other(other),
    }
}

#[cfg(test)]
mod tests {
    use super::{Arrival, Outcome, Token};
    use crate::verbs::quirks::Quirks;
    use crate::verbs::stub::garbage;
    use o2poll_dataplane::nic::{RKey, Status};
    use rdma_core_sys::types::{IBV_WC_REM_INV_REQ_ERR, IBV_WC_WR_FLUSH_ERR, ibv_wc};

    const CARD: Quirks = Quirks::empty();

    fn decode(wc: &ibv_wc, receive: bool, quirks: Quirks) -> Outcome {
        super::decode(wc, receive, quirks.invalidated_flag())
    }

    /// Every byte of it is this.
    fn filled(byte: u8) -> ibv_wc {
        let mut wc = core::mem::MaybeUninit::<ibv_wc>::uninit();
        // SAFETY: it is numbers all through.
        unsafe {
            wc.as_mut_ptr().write_bytes(byte, 1);
            wc.assume_init()
        }
    }

    fn arrived(flags: u32, word: u32) -> ibv_wc {
        let mut wc = filled(0);
        wc.byte_len = 77;
        wc.wc_flags = flags;
        wc.__bindgen_anon_1.invalidated_rkey = word;
        wc
    }

    #[test]
    fn a_token_comes_back_whole() {
        for token in [
            Token {
                slot: 0,
                generation: 0,
                receive: false,
                position: 0,
            },
            Token {
                slot: 0xffff,
                generation: 0x7fff,
                receive: true,
                position: u32::MAX,
            },
            Token {
                slot: 5,
                generation: 77,
                receive: false,
                position: 0x8000_0000,
            },
        ] {
            assert_eq!(Token::unpack(token.pack()), token);
        }
    }

    #[test]
    fn nothing_but_the_status_of_a_failed_one_is_looked_at() {
        let mut noise = 3;
        let random = core::iter::repeat_with(|| garbage(&mut noise)).take(1000);
        for entry in [0x00, 0x5a, 0xa5, 0xff]
            .map(filled)
            .into_iter()
            .chain(random)
        {
            for receive in [false, true] {
                for quirks in [CARD, Quirks::RXE] {
                    let mut wc = entry;
                    wc.status = IBV_WC_WR_FLUSH_ERR;
                    let seen = decode(&wc, receive, quirks);
                    assert_eq!(seen, Outcome::Failed(Status::Flushed));
                }
            }
        }
    }

    #[test]
    fn a_send_that_is_done_says_nothing_else() {
        let mut wc = filled(0xff);
        wc.status = 0;
        assert_eq!(decode(&wc, false, Quirks::RXE), Outcome::Sent);
    }

    #[test]
    fn the_key_that_a_message_killed_is_read_by_the_drivers_own_flag() {
        let nothing = Arrival {
            length: 77,
            imm: None,
            invalidated: None,
        };
        let killed = Arrival {
            invalidated: Some(RKey(0x1234)),
            ..nothing
        };
        // 5 is what rxe says: GRH, and the kernel's bit.
        for (flags, quirks, wanted) in [
            (5, Quirks::RXE, killed),
            (1, Quirks::RXE, nothing),
            (8, Quirks::RXE, nothing),
            (8, CARD, killed),
            (9, CARD, killed),
            (4, CARD, nothing),
            (0, CARD, nothing),
        ] {
            let seen = decode(&arrived(flags, 0x1234), true, quirks);
            assert_eq!(seen, Outcome::Arrived(wanted), "{flags}");
        }
    }

    #[test]
    fn a_grh_on_every_receive_changes_nothing() {
        let seen = |flags| decode(&arrived(flags, 0), true, Quirks::RXE);
        assert_eq!(seen(0), seen(1));
    }

    #[test]
    fn immediate_data_is_big_endian_and_no_key() {
        let wanted = Arrival {
            length: 77,
            imm: Some(0x0102_0304),
            invalidated: None,
        };
        for quirks in [CARD, Quirks::RXE] {
            let wc = arrived(3 | quirks.invalidated_flag(), 0x0102_0304_u32.to_be());
            assert_eq!(decode(&wc, true, quirks), Outcome::Arrived(wanted));
        }
    }

    #[test]
    fn an_invalid_request_is_the_peers_on_a_send_and_its_key_on_a_receive() {
        let mut wc = filled(0xee);
        wc.status = IBV_WC_REM_INV_REQ_ERR;
        let told = |receive| decode(&wc, receive, Quirks::RXE);
        assert_eq!(told(false), Outcome::Failed(Status::RemoteInvalidRequest));
        assert_eq!(told(true), Outcome::Failed(Status::RemoteInvalidate));
    }

    #[test]
    fn a_status_that_nobody_knows_keeps_its_number() {
        let mut wc = filled(0);
        wc.status = 4711;
        assert_eq!(
            decode(&wc, false, CARD),
            Outcome::Failed(Status::Other(4711))
        );
    }
}
