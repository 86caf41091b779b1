//! Sizes and durations as people write them, and as reports show them.

use core::time::Duration;

/// `64 MiB`, `4KiB`, `512`. `None` for anything else, and beyond `u64`.
pub(crate) fn parse_size(text: &str) -> Option<u64> {
    let (number, unit) = split(text)?;
    let shift = match unit {
        "" | "B" => 0,
        "KiB" | "K" | "k" => 10,
        "MiB" | "M" => 20,
        "GiB" | "G" => 30,
        "TiB" | "T" => 40,
        _ => return None,
    };
    number.checked_mul(1 << shift)
}

/// `50s`, `100 ms`, `5 min`. `None` for anything else; the unit is needed.
#[must_use]
pub fn parse_duration(text: &str) -> Option<Duration> {
    let (number, unit) = split(text)?;
    match unit {
        "us" => Some(Duration::from_micros(number)),
        "ms" => Some(Duration::from_millis(number)),
        "s" => Some(Duration::from_secs(number)),
        "min" => number.checked_mul(60).map(Duration::from_secs),
        "h" => number.checked_mul(3600).map(Duration::from_secs),
        _ => None,
    }
}

/// What is wrong with a text that is to be the NID of a node on o2ib and cannot be read as one.
#[must_use]
pub fn not_a_nid(text: &str) -> String {
    let above = |number: &str, most: u64| {
        let digits = !number.is_empty() && number.bytes().all(|digit| digit.is_ascii_digit());
        digits && number.parse().map_or(true, |number: u64| number > most)
    };
    if let Some((address, network)) = text.split_once('@') {
        if address.split('.').count() == 4
            && let Some(part) = address.split('.').find(|part| above(part, 255))
        {
            return format!("{part} in its address is out of range, 0 to 255");
        }
        if let Some(number) = network.strip_prefix("o2ib")
            && above(number, u16::MAX.into())
        {
            return format!("the number {number} of its network is out of range, 0 to 65535");
        }
    }
    String::from("ADDRESS@o2ib[NUMBER], with an IPv4 address")
}

/// A number, perhaps a space, and a unit.
fn split(text: &str) -> Option<(u64, &str)> {
    let text = text.trim();
    let digits = text
        .find(|c: char| !c.is_ascii_digit() && c != '_')
        .unwrap_or(text.len());
    let (number, unit) = text.split_at_checked(digits)?;
    let number: String = number.chars().filter(|c| *c != '_').collect();
    Some((number.parse().ok()?, unit.trim_start()))
}

/// Exact, and readable where that is not the same: `8 MiB`, `1234567 bytes (1.2 MiB)`.
pub(crate) fn show_size(bytes: u64) -> String {
    let units = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
    let Some((shift, unit)) = units.into_iter().find(|(shift, _)| bytes >> shift != 0) else {
        return format!("{bytes} bytes");
    };
    let scale = 1_u64 << shift;
    if bytes.is_multiple_of(scale) {
        return format!("{} {unit}", bytes >> shift);
    }
    let tenths = (bytes >> (shift - 10)).saturating_mul(10) >> 10;
    format!("{bytes} bytes ({}.{} {unit})", tenths / 10, tenths % 10)
}

/// As a file would have to say it: at least so much, in whole KiB or MiB.
pub(crate) fn round_up_size(bytes: u64) -> String {
    let (shift, unit) = if bytes > 1 << 20 {
        (20, "MiB")
    } else {
        (10, "KiB")
    };
    format!("{} {unit}", bytes.div_ceil(1 << shift).max(1))
}

/// `2h`, `50s`, `1500ms`.
pub(crate) fn show_duration(span: Duration) -> String {
    if span.subsec_nanos() == 0 && span.as_secs() >= 3600 && span.as_secs().is_multiple_of(3600) {
        format!("{}h", span.as_secs() / 3600)
    } else if span.subsec_nanos() == 0 {
        format!("{}s", span.as_secs())
    } else if span.subsec_nanos().is_multiple_of(1_000_000) {
        format!("{}ms", span.as_millis())
    } else {
        format!("{}us", span.as_micros())
    }
}

/// The candidate that `word` was probably meant to be.
pub(crate) fn nearest<'a>(
    word: &str,
    candidates: impl IntoIterator<Item = &'a str>,
) -> Option<&'a str> {
    // What nobody mistypes is not compared: the distance is quadratic, and the word is a stranger's.
    let longest = 64;
    if word.len() > longest {
        return None;
    }
    candidates
        .into_iter()
        .map(|candidate| {
            (
                distance(&word.to_lowercase(), &candidate.to_lowercase()),
                candidate,
            )
        })
        .filter(|(distance, candidate)| *distance <= (candidate.chars().count() / 3).max(1))
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

/// Characters to insert, remove, replace or swap with the next (optimal string alignment).
fn distance(a: &str, b: &str) -> usize {
    let a: Vec<char> = a.chars().collect();
    let b: Vec<char> = b.chars().collect();
    let at = |text: &[char], i: usize| i.checked_sub(1).and_then(|i| text.get(i).copied());
    let mut rows: Vec<Vec<usize>> = vec![(0..=b.len()).collect()];
    for i in 1..=a.len() {
        let mut row = vec![i];
        for j in 1..=b.len() {
            let cell = |up: usize, left: usize| {
                let above = rows
                    .get(i.wrapping_sub(up))
                    .and_then(|row| row.get(j.wrapping_sub(left)));
                above.copied().unwrap_or(usize::MAX - 1)
            };
            let left = row.last().copied().unwrap_or(usize::MAX - 1);
            let mut best = (cell(1, 0) + 1).min(left + 1);
            best = best.min(cell(1, 1) + usize::from(at(&a, i) != at(&b, j)));
            if i > 1 && j > 1 && at(&a, i) == at(&b, j - 1) && at(&a, i - 1) == at(&b, j) {
                best = best.min(cell(2, 2) + 1);
            }
            row.push(best);
        }
        rows.push(row);
    }
    rows.last().and_then(|row| row.last()).copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::{
        distance, nearest, not_a_nid, parse_duration, parse_size, round_up_size, show_duration,
        show_size,
    };
    use core::time::Duration;

    #[test]
    fn sizes_are_read_with_and_without_units() {
        for (text, bytes) in [
            ("512", 512),
            ("4 KiB", 4096),
            ("4KiB", 4096),
            ("64 MiB", 64 << 20),
            (" 1 GiB ", 1 << 30),
            ("1_000", 1000),
            ("2T", 2 << 40),
        ] {
            assert_eq!(parse_size(text), Some(bytes), "{text}");
        }
        for text in [
            "",
            "MiB",
            "4 KB",
            "-1",
            "1.5 MiB",
            "99999999999999999999",
            "99999999 TiB",
            "é",
        ] {
            assert_eq!(parse_size(text), None, "{text}");
        }
    }

    #[test]
    fn durations_need_a_unit() {
        for (text, millis) in [
            ("50s", 50_000),
            ("100 ms", 100),
            ("5 min", 300_000),
            ("1h", 3_600_000),
        ] {
            assert_eq!(
                parse_duration(text),
                Some(Duration::from_millis(millis)),
                "{text}"
            );
        }
        for text in [
            "",
            "50",
            "s",
            "5 weeks",
            "-1s",
            "99999999999999999999s",
            "18446744073709551615h",
        ] {
            assert_eq!(parse_duration(text), None, "{text}");
        }
    }

    #[test]
    fn the_part_of_a_nid_that_is_out_of_range_is_named() {
        for (text, why) in [
            ("10.0.0.256@o2ib", "256 in its address"),
            ("10.0.0.1@o2ib999999", "the number 999999 of its network"),
            (
                "10.0.0.1@o2ib99999999999999999999999",
                "the number 99999999999999999999999 of",
            ),
            ("300.0.0@o2ib", "ADDRESS@o2ib[NUMBER]"),
            ("10.0.0.1@", "ADDRESS@o2ib[NUMBER]"),
            ("10.0.0.1", "ADDRESS@o2ib[NUMBER]"),
        ] {
            assert!(not_a_nid(text).starts_with(why), "{}", not_a_nid(text));
        }
    }

    #[test]
    fn what_is_shown_can_be_read_back() {
        for bytes in [1, 1023, 1024, 8 << 20, 3 << 30] {
            let shown = show_size(bytes).replace(" bytes", "");
            assert_eq!(parse_size(&shown), Some(bytes));
            assert!(parse_size(&round_up_size(bytes)).unwrap() >= bytes);
        }
        assert_eq!(show_size(1_234_567), "1234567 bytes (1.1 MiB)");
        assert_eq!(
            show_size(u64::MAX),
            "18446744073709551615 bytes (16777215.9 TiB)"
        );
        for micros in [1, 1500, 1_000_000, 2_500_000, 7_200_000_000] {
            let span = Duration::from_micros(micros);
            assert_eq!(parse_duration(&show_duration(span)), Some(span));
        }
    }

    #[test]
    fn a_slip_of_the_keyboard_is_recognised() {
        assert_eq!(distance("kitten", "sitting"), 3);
        assert_eq!(distance("", "abc"), 3);
        assert_eq!(distance("flie", "file"), 1);
        let keys = ["peer_credits", "peer_credits_hiw", "timeout", "put"];
        assert_eq!(nearest("peer_credit", keys), Some("peer_credits"));
        assert_eq!(nearest("Timeout", keys), Some("timeout"));
        assert_eq!(nearest("pu", keys), Some("put"));
        assert_eq!(nearest("colour", keys), None);
    }
}
