//! One frame: Ethernet, IPv4, UDP, the transport headers, the payload, the invariant CRC.

use super::{BITS_24, UDP_PORT, icrc};

/// A node's address. Its MAC address is made of it, locally administered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Address(pub [u8; 4]);

impl Address {
    pub(crate) const fn mac(self) -> [u8; 6] {
        let [a, b, c, d] = self.0;
        [0x02, 0x00, a, b, c, d]
    }

    /// As an IPv4-mapped IPv6 address, which is what the GID of a RoCEv2 port is.
    pub(crate) const fn gid(self) -> [u8; 16] {
        let [a, b, c, d] = self.0;
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, a, b, c, d]
    }

    /// Modified EUI-64 of the MAC address.
    pub(crate) const fn guid(self) -> [u8; 8] {
        let [a, b, c, d, e, f] = self.mac();
        [a ^ 2, b, c, 0xff, 0xfe, d, e, f]
    }
}

/// A header that stands behind the BTH, as the opcode says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extension {
    /// DETH: of a datagram.
    Datagram {
        /// Queue key.
        key: u32,
        /// Source queue pair.
        source: u32,
    },
    /// RETH: where a WRITE or READ goes, and how many bytes.
    Remote {
        /// Virtual address.
        address: u64,
        /// Remote key.
        key: u32,
        /// Bytes of the whole message.
        length: u32,
    },
    /// AETH: of an answer.
    Acknowledge {
        /// What kind of answer.
        syndrome: u8,
        /// Messages done.
        messages: u32,
    },
    /// `ImmDt` or IETH: immediate data, or the key to invalidate.
    Word(u32),
}

/// What a frame says.
#[derive(Clone, Copy, Debug)]
pub struct Frame<'f> {
    /// Sender.
    pub from: Address,
    /// Receiver.
    pub to: Address,
    /// UDP source port: one per queue pair, so that a network may spread them.
    pub port: u16,
    /// IPv4 identification.
    pub identification: u16,
    /// BTH opcode.
    pub opcode: u8,
    /// Destination queue pair.
    pub queue_pair: u32,
    /// An answer is asked for.
    pub acknowledge: bool,
    /// Packet sequence number.
    pub psn: u32,
    /// Headers behind the BTH.
    pub extensions: &'f [Extension],
    /// At most [`MTU`](super::MTU) bytes.
    pub payload: &'f [u8],
}

impl Frame<'_> {
    /// Appends the frame to `out`.
    pub fn write(&self, out: &mut Vec<u8>) {
        let pad = self.payload.len().wrapping_neg() & 3;
        let extensions: usize = self.extensions.iter().map(Extension::length).sum();
        let transport = 12 + extensions + self.payload.len() + pad + 4;
        out.extend(self.to.mac());
        out.extend(self.from.mac());
        out.extend(0x0800_u16.to_be_bytes());
        let packet = out.len();

        let mut ip = [0; 20];
        ip[0] = 0x45;
        ip[2..4].copy_from_slice(&half(20 + 8 + transport).to_be_bytes());
        ip[4..6].copy_from_slice(&self.identification.to_be_bytes());
        // Don't fragment.
        ip[6] = 0x40;
        ip[8] = 64;
        ip[9] = 17;
        ip[12..16].copy_from_slice(&self.from.0);
        ip[16..].copy_from_slice(&self.to.0);
        let sum = checksum(&ip);
        ip[10..12].copy_from_slice(&sum.to_be_bytes());
        out.extend(ip);

        out.extend(self.port.to_be_bytes());
        out.extend(UDP_PORT.to_be_bytes());
        out.extend(half(8 + transport).to_be_bytes());
        // No checksum: the invariant CRC covers more.
        out.extend([0, 0]);

        out.push(self.opcode);
        #[expect(clippy::cast_possible_truncation, reason = "two bits")]
        out.push((pad as u8) << 4);
        out.extend(0xffff_u16.to_be_bytes());
        out.extend((self.queue_pair & BITS_24).to_be_bytes());
        let acknowledge = u32::from(self.acknowledge) << 31;
        out.extend((acknowledge | self.psn & BITS_24).to_be_bytes());
        for extension in self.extensions {
            extension.write(out);
        }
        out.extend_from_slice(self.payload);
        out.extend(core::iter::repeat_n(0, pad));
        let crc = out.get(packet..).and_then(icrc).unwrap_or(0);
        out.extend(crc.to_le_bytes());
    }
}

impl Extension {
    const fn length(&self) -> usize {
        match self {
            Self::Datagram { .. } => 8,
            Self::Remote { .. } => 16,
            Self::Acknowledge { .. } | Self::Word(_) => 4,
        }
    }

    fn write(&self, out: &mut Vec<u8>) {
        match *self {
            Self::Datagram { key, source } => {
                out.extend(key.to_be_bytes());
                out.extend((source & BITS_24).to_be_bytes());
            }
            Self::Remote {
                address,
                key,
                length,
            } => {
                out.extend(address.to_be_bytes());
                out.extend(key.to_be_bytes());
                out.extend(length.to_be_bytes());
            }
            Self::Acknowledge { syndrome, messages } => {
                out.extend((u32::from(syndrome) << 24 | messages & BITS_24).to_be_bytes());
            }
            Self::Word(word) => out.extend(word.to_be_bytes()),
        }
    }
}

/// The Internet checksum (RFC 1071).
fn checksum(header: &[u8; 20]) -> u16 {
    let (words, _) = header.as_chunks::<2>();
    let sum: u32 = words
        .iter()
        .map(|word| u32::from(u16::from_be_bytes(*word)))
        .sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    #[expect(clippy::cast_possible_truncation, reason = "folded twice")]
    let folded = ((folded & 0xffff) + (folded >> 16)) as u16;
    !folded
}

/// A length that an IPv4 packet of one MTU cannot exceed.
fn half(length: usize) -> u16 {
    u16::try_from(length).unwrap_or(u16::MAX)
}

#[cfg(test)]
mod tests {
    use super::{Address, Extension, Frame};
    use crate::pcap;
    use std::path::Path;

    /// Frames of kernel nodes, taken apart and made again: the same bytes, MAC addresses aside.
    #[test]
    fn captured_frames_are_made_again_to_the_byte() {
        let mut seen = [0; 256];
        for name in [
            "a-connect-ping",
            "b-write-4k",
            "b-read-4k",
            "m-asym-connect-cksum-keepalive",
        ] {
            let path = Path::new(env!("CARGO_MANIFEST_DIR"))
                .join("../tests/captures")
                .join(name)
                .with_extension("pcap");
            for record in pcap::read(&std::fs::read(path).unwrap()).unwrap() {
                let bytes = record.bytes;
                let word = |at: usize| u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap());
                let double = |at: usize| u64::from(word(at)) << 32 | u64::from(word(at + 4));
                let short = |at: usize| u16::from_be_bytes(bytes[at..at + 2].try_into().unwrap());
                let opcode = bytes[42];
                let (extensions, payload): (Vec<Extension>, usize) = match opcode {
                    0x64 => {
                        let extension = Extension::Datagram {
                            key: word(54),
                            source: word(58),
                        };
                        (vec![extension], 62)
                    }
                    0x11 => {
                        let extension = Extension::Acknowledge {
                            syndrome: bytes[54],
                            messages: word(54),
                        };
                        (vec![extension], 58)
                    }
                    0x06 | 0x0a => {
                        let extension = Extension::Remote {
                            address: double(54),
                            key: word(62),
                            length: word(66),
                        };
                        (vec![extension], 70)
                    }
                    0x00..=0x02 | 0x04 | 0x07 | 0x08 => (Vec::new(), 54),
                    other => panic!("{other:#x}"),
                };
                seen[usize::from(opcode)] += 1;
                let pad = usize::from(bytes[43] >> 4 & 3);
                let frame = Frame {
                    from: Address(bytes[26..30].try_into().unwrap()),
                    to: Address(bytes[30..34].try_into().unwrap()),
                    port: short(34),
                    identification: short(18),
                    opcode,
                    queue_pair: word(46),
                    acknowledge: bytes[50] & 0x80 != 0,
                    psn: word(50),
                    extensions: &extensions,
                    payload: &bytes[payload..bytes.len() - 4 - pad],
                };
                let mut out = Vec::new();
                frame.write(&mut out);
                assert_eq!(out[12..], bytes[12..], "{name}: {frame:?}");
            }
        }
        for opcode in [0x64, 0x11, 0x06, 0x04] {
            assert!(seen[opcode] > 3, "{opcode:#x}");
        }
    }

    #[test]
    fn payloads_are_padded_to_words() {
        for length in 0..9 {
            let frame = Frame {
                from: Address([10, 0, 0, 1]),
                to: Address([10, 0, 0, 2]),
                port: 0xc001,
                identification: 0,
                opcode: 4,
                queue_pair: 7,
                acknowledge: true,
                psn: 1,
                extensions: &[],
                payload: &[0xab; 9][..length],
            };
            let mut out = Vec::new();
            frame.write(&mut out);
            assert_eq!(out.len(), 54 + length.next_multiple_of(4) + 4);
            assert_eq!(
                usize::from(out[43] >> 4),
                length.next_multiple_of(4) - length
            );
        }
    }
}
