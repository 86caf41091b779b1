//! The connection manager's messages, as management datagrams between the QP1s of two ports.
//!
//! Layouts: InfiniBand specification volume 1, chapter 12.6 (CM messages), 13.4.3 (MADs), and annex A11 for what
//! the RDMA CM puts before the consumer's private data of a REQ.

use super::flow::port;
use super::{Address, BITS_24, Extension, Frame};

/// A message. The names of connections are those of their sides: a side chooses its own and repeats the peer's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message<'m> {
    /// REQ: asks for a connection.
    Request(Request<'m>),
    /// REP: grants it.
    Reply {
        /// Name on the granting side.
        local: u32,
        /// Name on the asking side.
        remote: u32,
        /// Queue pair of the granting side.
        queue_pair: u32,
        /// Sequence number of its first frame.
        psn: u32,
        /// READs it serves at a time.
        responder_resources: u8,
        /// At most 196 bytes.
        private_data: &'m [u8],
    },
    /// REJ: refuses it.
    Reject {
        /// Name on the asking side.
        remote: u32,
        /// Why; 28 is the consumer's own reason.
        reason: u16,
        /// At most 148 bytes.
        private_data: &'m [u8],
    },
    /// RTU: has seen the REP.
    ReadyToUse {
        /// Name on the asking side.
        local: u32,
        /// Name on the granting side.
        remote: u32,
    },
    /// DREQ: ends the connection.
    Disconnect {
        /// Name on this side.
        local: u32,
        /// Name on the other.
        remote: u32,
        /// Queue pair of the other.
        queue_pair: u32,
    },
    /// DREP: has seen that.
    Disconnected {
        /// Name on this side.
        local: u32,
        /// Name on the other.
        remote: u32,
    },
}

/// What a REQ says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request<'m> {
    /// Name on the asking side.
    pub local: u32,
    /// Port of the RDMA CM's TCP port space that is asked for; 987 for o2iblnd.
    pub service: u16,
    /// Port that asks.
    pub source_port: u16,
    /// Queue pair of the asking side.
    pub queue_pair: u32,
    /// Sequence number of its first frame.
    pub psn: u32,
    /// READs it serves at a time.
    pub responder_resources: u8,
    /// Times that it sends again.
    pub retry_count: u8,
    /// Times that it sends again when there was no receive.
    pub rnr_retry_count: u8,
    /// At most 56 bytes.
    pub private_data: &'m [u8],
}

impl Message<'_> {
    /// Gives the frame of the message to `emit`. `psn` counts the datagrams of the sender's QP1; `transaction`
    /// is the same for all messages of one exchange.
    pub fn write(
        &self,
        from: Address,
        to: Address,
        psn: u32,
        transaction: u64,
        emit: impl FnOnce(Frame<'_>),
    ) {
        let datagram = self.datagram(from, to, transaction);
        let extension = Extension::Datagram {
            key: QP1_KEY,
            source: 1,
        };
        emit(Frame {
            from,
            to,
            port: port(1, 1),
            identification: 0,
            opcode: UD_SEND_ONLY,
            queue_pair: 1,
            acknowledge: false,
            psn,
            extensions: &[extension],
            payload: &datagram,
        });
    }

    fn datagram(&self, from: Address, to: Address, transaction: u64) -> [u8; 256] {
        let mut mad = [0; 256];
        let (header, data) = mad.split_at_mut(24);
        header[..4].copy_from_slice(&[1, 7, 2, 3]);
        header[8..16].copy_from_slice(&transaction.to_be_bytes());
        let (attribute, private_at, private): (u16, usize, &[u8]) = match *self {
            Self::Request(request) => {
                request.put(from, to, data);
                (0x10, 140 + IP_HEADER, request.private_data)
            }
            Self::Reject {
                remote,
                reason,
                private_data,
            } => {
                word(data, 4, remote);
                data[10..12].copy_from_slice(&reason.to_be_bytes());
                (0x12, 84, private_data)
            }
            Self::Reply {
                local,
                remote,
                queue_pair,
                psn,
                responder_resources,
                private_data,
            } => {
                word(data, 0, local);
                word(data, 4, remote);
                word(data, 12, queue_pair << 8);
                word(data, 20, psn << 8);
                data[24] = responder_resources;
                data[26] = TARGET_ACK_DELAY << 3 | END_TO_END;
                data[27] = 6 << 5;
                data[28..36].copy_from_slice(&from.guid());
                (0x13, 36, private_data)
            }
            Self::ReadyToUse { local, remote } => {
                word(data, 0, local);
                word(data, 4, remote);
                (0x14, 8, &[])
            }
            Self::Disconnect {
                local,
                remote,
                queue_pair,
            } => {
                word(data, 0, local);
                word(data, 4, remote);
                word(data, 8, queue_pair << 8);
                (0x15, 12, &[])
            }
            Self::Disconnected { local, remote } => {
                word(data, 0, local);
                word(data, 4, remote);
                (0x16, 8, &[])
            }
        };
        header[16..18].copy_from_slice(&attribute.to_be_bytes());
        for (place, byte) in data[private_at..].iter_mut().zip(private) {
            *place = *byte;
        }
        mad
    }
}

impl Request<'_> {
    fn put(&self, from: Address, to: Address, data: &mut [u8]) {
        word(data, 0, self.local);
        let service = TCP_PORT_SPACE << 16 | u64::from(self.service);
        data[8..16].copy_from_slice(&service.to_be_bytes());
        data[16..24].copy_from_slice(&from.guid());
        word(
            data,
            32,
            self.queue_pair << 8 | u32::from(self.responder_resources),
        );
        // Initiator depth: it never reads.
        word(data, 36, 0);
        data[43] = RESPONSE_TIMEOUT << 3 | END_TO_END;
        word(data, 44, (self.psn & BITS_24) << 8);
        data[47] = RESPONSE_TIMEOUT << 3 | self.retry_count & 7;
        data[48..50].copy_from_slice(&[0xff, 0xff]);
        data[50] = PATH_MTU << 4 | self.rnr_retry_count & 7;
        data[51] = MOST_CM_RETRIES << 4;
        // The primary path; RoCE has no LIDs, and this one no flow label and no rate.
        data[52..56].copy_from_slice(&[0xff; 4]);
        data[56..72].copy_from_slice(&from.gid());
        data[72..88].copy_from_slice(&to.gid());
        data[93] = 64;
        data[95] = LOCAL_ACK_TIMEOUT << 3;
        // The RDMA CM's own header.
        let ip = &mut data[140..][..IP_HEADER];
        ip[1] = 4 << 4;
        ip[2..4].copy_from_slice(&self.source_port.to_be_bytes());
        ip[16..20].copy_from_slice(&from.0);
        ip[32..36].copy_from_slice(&to.0);
    }
}

fn word(data: &mut [u8], at: usize, word: u32) {
    data[at..at + 4].copy_from_slice(&word.to_be_bytes());
}

/// `RDMA_PS_TCP`, the RDMA CM's port space of reliable connections.
const TCP_PORT_SPACE: u64 = 0x0106;
/// The RDMA CM's header in a REQ's private data.
const IP_HEADER: usize = 36;
/// The queue key of QP1.
const QP1_KEY: u32 = 0x8001_0000;
const UD_SEND_ONLY: u8 = 0x64;
/// 4096 bytes, as a path record says it.
const PATH_MTU: u8 = 5;
/// What kernel nodes say (4 s, 15 times).
const RESPONSE_TIMEOUT: u8 = 20;
const MOST_CM_RETRIES: u8 = 15;
const END_TO_END: u8 = 1;
const TARGET_ACK_DELAY: u8 = 15;
const LOCAL_ACK_TIMEOUT: u8 = 19;

#[cfg(test)]
mod tests {
    use super::{Message, Request};
    use crate::pcap;
    use crate::roce::Address;
    use std::path::Path;

    /// The datagrams of kernel nodes, taken apart and made again.
    #[test]
    fn captured_datagrams_are_made_again_to_the_byte() {
        let mut seen = [0; 8];
        for name in ["a-connect-ping", "m-asym-connect-cksum-keepalive"] {
            let path = Path::new(env!("CARGO_MANIFEST_DIR"))
                .join("../tests/captures")
                .join(name)
                .with_extension("pcap");
            for record in pcap::read(&std::fs::read(path).unwrap()).unwrap() {
                if record.bytes[42] != 0x64 {
                    continue;
                }
                let address = |at: usize| Address(record.bytes[at..at + 4].try_into().unwrap());
                let (from, to) = (address(26), address(30));
                let mut theirs = record.bytes[62..318].to_vec();
                let data = theirs[24..].to_vec();
                let word = |at: usize| u32::from_be_bytes(data[at..at + 4].try_into().unwrap());
                let transaction = u64::from_be_bytes(theirs[8..16].try_into().unwrap());
                let (local, remote) = (word(0), word(4));
                let message = match theirs[17] {
                    0x10 => {
                        // What differs from path to path: MTU, flow label.
                        theirs[24 + 50] = 5 << 4 | theirs[24 + 50] & 0xf;
                        theirs[24 + 88..24 + 91].fill(0);
                        Message::Request(Request {
                            local,
                            service: 987,
                            source_port: u16::from_be_bytes([data[142], data[143]]),
                            queue_pair: word(32) >> 8,
                            psn: word(44) >> 8,
                            responder_resources: 0,
                            retry_count: 5,
                            rnr_retry_count: 6,
                            private_data: &data[176..],
                        })
                    }
                    0x12 => Message::Reject {
                        remote,
                        reason: 28,
                        private_data: &data[84..],
                    },
                    0x13 => Message::Reply {
                        local,
                        remote,
                        queue_pair: word(12) >> 8,
                        psn: word(20) >> 8,
                        responder_resources: 0,
                        private_data: &data[36..],
                    },
                    0x14 => Message::ReadyToUse { local, remote },
                    0x15 => Message::Disconnect {
                        local,
                        remote,
                        queue_pair: word(8) >> 8,
                    },
                    0x16 => Message::Disconnected { local, remote },
                    other => panic!("{other:#x}"),
                };
                seen[usize::from(theirs[17] & 7)] += 1;
                let mut ours = message.datagram(from, to, transaction);
                // Whose card it is.
                let guid = match message {
                    Message::Request(_) => Some(16),
                    Message::Reply { .. } => Some(28),
                    _ => None,
                };
                if let Some(at) = guid {
                    assert_ne!(ours[24 + at..][..8], [0; 8]);
                    ours[24 + at..][..8].copy_from_slice(&data[at..][..8]);
                }
                assert_eq!(ours[..], theirs[..], "{name}: {message:?}");
            }
        }
        // REQ, REJ, REP, RTU, DREQ, DREP.
        for attribute in [0, 2, 3, 4, 5, 6] {
            assert!(seen[attribute] > 0, "{seen:?}");
        }
    }
}
