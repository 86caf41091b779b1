//! Network identifiers.

use core::fmt;
use core::str::FromStr;

/// An LNet network identifier with a 4-byte address: `192.168.1.10@o2ib`.
///
/// `(net << 32) | address`, `net = (LND type << 16) | number`; the address is IPv4 as a host number.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Nid(pub u64);

/// LNet process id. Lustre and LNet itself use [`Pid::LUSTRE`].
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Pid(pub u32);

impl Pid {
    /// 12345.
    pub const LUSTRE: Self = Self(12345);
}

/// LND type of o2iblnd.
pub const O2IB: u16 = 5;
/// LND type of the loopback.
pub const LO: u16 = 9;
/// LND type of socklnd.
pub const TCP: u16 = 2;

impl Nid {
    /// All ones: no NID in particular.
    pub const ANY: Self = Self(u64::MAX);
    /// `0@lo`.
    pub const LOOPBACK: Self = Self::new(LO, 0, 0);

    /// From its parts.
    #[must_use]
    pub const fn new(lnd: u16, number: u16, address: u32) -> Self {
        Self(((lnd as u64) << 48) | ((number as u64) << 32) | address as u64)
    }

    /// `a.b.c.d@o2ib<number>`.
    #[must_use]
    pub const fn o2ib(address: [u8; 4], number: u16) -> Self {
        Self::new(O2IB, number, u32::from_be_bytes(address))
    }

    /// LND type.
    #[must_use]
    pub const fn lnd(self) -> u16 {
        (self.0 >> 48) as u16
    }

    /// Number of the network.
    #[must_use]
    #[expect(
        clippy::cast_possible_truncation,
        reason = "sixteen bits in the middle"
    )]
    pub const fn number(self) -> u16 {
        (self.0 >> 32) as u16
    }

    /// The 4-byte address.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "the lower half")]
    pub const fn address(self) -> u32 {
        self.0 as u32
    }
}

impl fmt::Display for Nid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == Self::ANY {
            return f.write_str("<any>");
        }
        let [a, b, c, d] = self.address().to_be_bytes();
        match self.lnd() {
            LO => write!(f, "{}@lo", self.address())?,
            O2IB => write!(f, "{a}.{b}.{c}.{d}@o2ib")?,
            TCP => write!(f, "{a}.{b}.{c}.{d}@tcp")?,
            lnd => write!(f, "{a}.{b}.{c}.{d}@<{lnd}>")?,
        }
        match self.number() {
            0 => Ok(()),
            number => write!(f, "{number}"),
        }
    }
}

/// A text that is no NID.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a NID: expected ADDRESS@o2ib[NUMBER], as in 192.168.1.10@o2ib")]
pub struct NotANid;

impl FromStr for Nid {
    type Err = NotANid;

    fn from_str(text: &str) -> Result<Self, NotANid> {
        let (address, net) = text.split_once('@').ok_or(NotANid)?;
        let (lnd, number) = [("o2ib", O2IB), ("tcp", TCP), ("lo", LO)]
            .into_iter()
            .find_map(|(name, lnd)| net.strip_prefix(name).map(|number| (lnd, number)))
            .ok_or(NotANid)?;
        let number = match number {
            "" => 0,
            digits if digits.bytes().all(|b| b.is_ascii_digit()) => {
                digits.parse().map_err(|_| NotANid)?
            }
            _ => return Err(NotANid),
        };
        let address = if lnd == LO {
            address.parse().map_err(|_| NotANid)?
        } else {
            let address: core::net::Ipv4Addr = address.parse().map_err(|_| NotANid)?;
            u32::from_be_bytes(address.octets())
        };
        Ok(Self::new(lnd, number, address))
    }
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::Nid;
    use std::string::ToString;

    #[test]
    fn texts_round_trip() {
        for (text, bits) in [
            ("192.168.1.10@o2ib", 0x0005_0000_C0A8_010A),
            ("192.168.1.10@o2ib1", 0x0005_0001_C0A8_010A),
            ("0@lo", 0x0009_0000_0000_0000),
            ("10.0.0.1@tcp7", 0x0002_0007_0A00_0001),
        ] {
            let nid: Nid = text.parse().unwrap();
            assert_eq!(nid, Nid(bits));
            assert_eq!(nid.to_string(), text);
        }
        for text in [
            "",
            "10.0.0.1",
            "10.0.0.1@",
            "10.0.0.1@ib",
            "10.0.0@o2ib",
            "1.1.1.1@o2ib65536",
            "1.1.1.1@o2ib-1",
        ] {
            assert!(text.parse::<Nid>().is_err(), "{text}");
        }
    }
}
