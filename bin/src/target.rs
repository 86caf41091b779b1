//! What another node exports, as it is named on the command line.

use core::fmt;
use core::str::FromStr;

use o2poll_config::MAX_PORTAL;
use o2poll_dataplane::endpoint::{MatchBits, Portal};

/// An export of another node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    /// Portal.
    pub portal: Portal,
    /// Match bits.
    pub match_bits: MatchBits,
}

impl FromStr for Target {
    type Err = String;

    /// `PORTAL:BITS`, each decimal or hexadecimal; portals as in a node file.
    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || String::from("write it as PORTAL:BITS, e.g. 51:0x1");
        let (portal, bits) = text.split_once(':').ok_or_else(wrong)?;
        let portal = number(portal).ok_or_else(wrong)?;
        let portal = match u32::try_from(portal) {
            Ok(0) => return Err(String::from("portal 0 is LNet's own: pings arrive there")),
            Ok(portal) if portal <= MAX_PORTAL => portal,
            _ => {
                return Err(format!(
                    "portal {portal} is out of range, 1 to {MAX_PORTAL}"
                ));
            }
        };
        Ok(Self {
            portal: Portal(portal),
            match_bits: MatchBits(number(bits).ok_or_else(wrong)?),
        })
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{:#x}", self.portal.0, self.match_bits.0)
    }
}

fn number(text: &str) -> Option<u64> {
    match text.strip_prefix("0x") {
        Some(digits) if !digits.starts_with('+') => u64::from_str_radix(digits, 16).ok(),
        Some(_) => None,
        None => text.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::Target;

    #[test]
    fn portals_have_the_range_of_a_node_file() {
        for text in ["1:0x0", "51:0x1", "63:0xffffffffffffffff"] {
            assert_eq!(text.parse::<Target>().unwrap().to_string(), text);
        }
        for (text, why) in [
            ("0:0x1", "portal 0 is LNet's own: pings arrive there"),
            ("64:0x1", "portal 64 is out of range, 1 to 63"),
            (
                "0x100000032:0x1",
                "portal 4294967346 is out of range, 1 to 63",
            ),
            ("51", "write it as PORTAL:BITS, e.g. 51:0x1"),
            ("51:", "write it as PORTAL:BITS, e.g. 51:0x1"),
            ("51:0x+1", "write it as PORTAL:BITS, e.g. 51:0x1"),
        ] {
            assert_eq!(text.parse::<Target>().unwrap_err(), why);
        }
    }
}
