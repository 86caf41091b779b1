//! What can be wrong with a message.

/// Why bytes are no legal message. One variant per check, in the order in which they are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum WireError {
    /// Fewer than six bytes: not even magic and version.
    #[error("shorter than magic and version")]
    Runt,
    /// The magic is o2iblnd's in neither byte order.
    #[error("magic {0:#010x} is not o2iblnd's")]
    Magic(u32),
    /// Neither 0x11 nor 0x12.
    #[error("protocol version {0:#x} is neither 0x11 nor 0x12")]
    Version(u16),
    /// Fewer bytes than the header has.
    #[error("shorter than its header")]
    ShortHeader,
    /// The header counts more bytes than were received.
    #[error("says it has {0} bytes and has fewer")]
    Truncated(u32),
    /// A checksum that fits neither variant. On an IMMEDIATE with payload this is also what a 2.15 or
    /// later kernel with `cksum=1` sends (LU-14008: the payload is not in the buffer it sums).
    #[error("checksum does not fit, neither over signed nor over unsigned bytes")]
    Checksum,
    /// The source NID is "any".
    #[error("has no source NID")]
    NoSource,
    /// A type code that does not exist.
    #[error("message type {0:#04x} does not exist")]
    Type(u8),
    /// Fewer bytes than its type needs.
    #[error("shorter than its type needs")]
    ShortBody,
    /// A descriptor with no fragment, or with more than 257.
    #[error("descriptor of {0} fragments, not 1 to 257")]
    Fragments(u32),
    /// The descriptor has more fragments than the message has room for.
    #[error("descriptor reaches past the end of the message")]
    DescriptorCut,
    /// An LNet type that does not exist, or HELLO, which only stream LNDs have.
    #[error("LNet type {0} does not exist on o2iblnd")]
    LnetType(u32),
    /// An ACK or a GET with payload.
    #[error("LNet ACK or GET with payload")]
    LnetPayload,
    /// A PUT or a REPLY of more than 1 MiB.
    #[error("LNet payload of {0} bytes, more than 1 MiB")]
    LnetTooLong(u32),
    /// Something else than a PUT or REPLY in a PUT_REQ, or than a GET in a GET_REQ.
    #[error("LNet type does not belong into this message")]
    LnetMismatch,
    /// An IMMEDIATE with less payload than its LNet header says.
    #[error("LNet payload reaches past the end of the message")]
    LnetCut,
}

/// What was to be encoded has no legal form of at most 4096 bytes: a payload that is too long or is not
/// what its LNet header says, or a descriptor of no or too many fragments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[error("does not fit an o2iblnd message")]
pub struct TooLong;
