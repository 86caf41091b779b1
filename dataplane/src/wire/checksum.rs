//! The optional checksum of a message.

use super::{ByteOrder, Checksum};

/// Where the checksum stands in a message.
const FIELD: core::ops::Range<usize> = 12..16;

/// Which variant the received, non-zero `sum` is of the whole `message`; `None` if of neither.
pub(super) fn recognise(message: &[u8], sum: u32) -> Option<Checksum> {
    // One pass for both: a message is at most 4 KiB, and a node that sums is rare.
    let (mut signed, mut unsigned) = (0_u32, 0_u32);
    for (at, &byte) in message.iter().enumerate() {
        let byte = if FIELD.contains(&at) { 0 } else { byte };
        signed = step(signed, sign_extend(byte));
        unsigned = step(unsigned, u32::from(byte));
    }
    if sum == never_zero(signed) {
        Some(Checksum::Signed)
    } else if sum == never_zero(unsigned) {
        Some(Checksum::Unsigned)
    } else {
        None
    }
}

/// Sums the whole `message`, whose field is zero, and writes the sum there.
pub(super) fn seal(message: &mut [u8], order: ByteOrder, checksum: Checksum) {
    let sum = match checksum {
        Checksum::None => return,
        Checksum::Signed => message
            .iter()
            .fold(0, |sum, &byte| step(sum, sign_extend(byte))),
        Checksum::Unsigned => message
            .iter()
            .fold(0, |sum, &byte| step(sum, u32::from(byte))),
    };
    let sum = match order {
        ByteOrder::Little => never_zero(sum).to_le_bytes(),
        ByteOrder::Big => never_zero(sum).to_be_bytes(),
    };
    for (to, from) in message.iter_mut().skip(FIELD.start).zip(sum) {
        *to = from;
    }
}

const fn step(sum: u32, byte: u32) -> u32 {
    sum.rotate_left(1).wrapping_add(byte)
}

const fn sign_extend(byte: u8) -> u32 {
    (byte.cast_signed() as i32).cast_unsigned()
}

/// Zero on the wire means "not checksummed".
const fn never_zero(sum: u32) -> u32 {
    if sum == 0 { 1 } else { sum }
}
