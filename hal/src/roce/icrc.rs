//! The invariant CRC of a RoCEv2 packet.

/// The invariant CRC over an IPv4 packet that carries RoCEv2, from the IP header to the last byte before the CRC
/// itself; it follows in little-endian order. `None` unless all headers are there, without IP options.
///
/// Fields that a router or switch may change count as ones: type of service, time to live, both checksums, and
/// the congestion bits of the BTH; before them stand eight bytes of ones in the place of a local route header
/// (InfiniBand specification volume 1, annex A17.3.3).
#[must_use]
pub fn icrc(packet: &[u8]) -> Option<u32> {
    let (headers, rest) = packet.split_first_chunk::<HEADERS>()?;
    if headers[0] != 0x45 {
        return None;
    }
    let mut masked = [0xff; 8 + HEADERS];
    masked[8..].copy_from_slice(headers);
    for variant in VARIANT {
        masked[8 + variant] = 0xff;
    }
    Some(!feed(feed(u32::MAX, &masked), rest))
}

/// IPv4, UDP and the BTH.
const HEADERS: usize = 20 + 8 + 12;

const VARIANT: [usize; 7] = [1, 8, 10, 11, 20 + 6, 20 + 7, 28 + 4];

/// The CRC-32 of Ethernet, least significant bit first, eight bytes at a time.
fn feed(crc: u32, bytes: &[u8]) -> u32 {
    let (eights, rest) = bytes.as_chunks::<8>();
    let crc = eights.iter().fold(crc, |crc, [a, b, c, d, e, f, g, h]| {
        let [w, x, y, z] = crc.to_le_bytes();
        TABLES[7][usize::from(a ^ w)]
            ^ TABLES[6][usize::from(b ^ x)]
            ^ TABLES[5][usize::from(c ^ y)]
            ^ TABLES[4][usize::from(d ^ z)]
            ^ TABLES[3][usize::from(*e)]
            ^ TABLES[2][usize::from(*f)]
            ^ TABLES[1][usize::from(*g)]
            ^ TABLES[0][usize::from(*h)]
    });
    rest.iter().fold(crc, |crc, byte| {
        crc >> 8 ^ TABLES[0][usize::from(crc.to_le_bytes()[0] ^ byte)]
    })
}

/// `TABLES[n][b]`: what byte `b` does to the CRC when `n` bytes follow it.
static TABLES: [[u32; 256]; 8] = tables();

const fn tables() -> [[u32; 256]; 8] {
    let mut tables = [[0; 256]; 8];
    let mut byte = 0;
    while byte < 256 {
        #[expect(clippy::cast_possible_truncation, reason = "less than 256")]
        let mut crc = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = crc >> 1 ^ if crc & 1 == 0 { 0 } else { POLYNOMIAL };
            bit += 1;
        }
        tables[0][byte] = crc;
        byte += 1;
    }
    let mut after = 1;
    while after < 8 {
        let mut byte = 0;
        while byte < 256 {
            let crc = tables[after - 1][byte];
            tables[after][byte] = crc >> 8 ^ tables[0][(crc & 0xff) as usize];
            byte += 1;
        }
        after += 1;
    }
    tables
}

const POLYNOMIAL: u32 = 0xedb8_8320;

#[cfg(test)]
mod tests {
    use super::{feed, icrc};
    use crate::pcap;
    use std::fs;
    use std::path::Path;

    #[test]
    fn the_crc_is_ethernets() {
        assert_eq!(!feed(u32::MAX, b"123456789"), 0xcbf4_3926);
    }

    /// Kernel nodes made these; their receiver has checked each.
    #[test]
    fn captured_packets_of_kernel_nodes_carry_this_icrc() {
        let captures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/captures");
        let mut checked = 0;
        for entry in fs::read_dir(captures).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_none_or(|ending| ending != "pcap") {
                continue;
            }
            for record in pcap::read(&fs::read(&path).unwrap()).unwrap() {
                let Some(packet) = record.bytes.get(14..) else {
                    panic!("{path:?}: no IP header")
                };
                let (packet, crc) = packet.split_last_chunk::<4>().unwrap();
                assert_eq!(
                    icrc(packet),
                    Some(u32::from_le_bytes(*crc)),
                    "{path:?}, packet {}",
                    checked
                );
                let mut other = packet.to_vec();
                other[41] ^= 0x10;
                assert_ne!(icrc(&other), icrc(packet));
                checked += 1;
            }
        }
        assert!(checked > 200, "{checked}");
    }

    #[test]
    fn what_routers_change_does_not_count_and_the_rest_does() {
        let mut packet = [0x45; 64];
        let before = icrc(&packet);
        for at in [1, 8, 10, 11, 26, 27, 32] {
            packet[at] ^= 0xff;
        }
        assert_eq!(icrc(&packet), before);
        for at in [2, 9, 12, 24, 28, 33, 36, 40, 63] {
            let mut other = packet;
            other[at] ^= 1;
            assert_ne!(icrc(&other), before, "byte {at}");
        }
        assert_eq!(icrc(&packet[..39]), None);
        packet[0] = 0x46;
        assert_eq!(icrc(&packet), None);
    }
}
