//! The judgement of frames, with the faults that Wireshark itself has measured first.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use o2poll_dataplane::nic::RKey;
use o2poll_hal::pcap;
use o2poll_hal::roce::{MTU, icrc};

use super::{Dissected, Quirks, dissect, expected};
use crate::tap::Posted;

/// What Wireshark gets wrong of kernel nodes' traffic.
#[derive(Debug)]
pub struct Habits {
    /// Notes by kind of frame.
    pub complaints: BTreeMap<String, BTreeSet<String>>,
    /// Misreadings.
    pub quirks: Quirks,
}

impl Habits {
    /// From the captures of kernel nodes.
    ///
    /// # Panics
    /// When Wireshark's reading of them is wrong in a way that is not known.
    #[must_use]
    pub fn learn() -> Self {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("captures");
        let mut complaints: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        let mut quirks = Quirks::ALL.to_vec();
        let mut compared = 0;
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_none_or(|ending| ending != "pcap") {
                continue;
            }
            let file = fs::read(&path).unwrap();
            let frames = pcap::read(&file).unwrap();
            for (frame, seen) in frames.iter().zip(dissect(&path)) {
                complaints
                    .entry(seen.kind())
                    .or_default()
                    .extend(seen.complaints());
                // One that came in one frame, and is not checksummed.
                let Some(bytes) = message(frame.bytes) else {
                    continue;
                };
                if bytes[12..16] != [0; 4] || seen.first("lnet.ib.type").is_none() {
                    continue;
                }
                let shown = seen.lnet();
                quirks.retain(|quirks| shown == expected(bytes, *quirks));
                assert!(!quirks.is_empty(), "{path:?}: {shown:x?}");
                compared += 1;
            }
        }
        assert!(compared > 50, "{compared}");
        let [quirks] = quirks[..] else {
            panic!("{quirks:?}: captures must tell")
        };
        if quirks.early {
            // The captures have no REPLY in a PUT_REQ. Since its cookie is looked for too early, bytes are left.
            let kind = format!("opcode 0x4, message 0xd2, LNet {:?}, payload true", Some(3));
            let left = "Capture:# offset:# (length:#) msg_type:# ib_type:d#";
            complaints.entry(kind).or_default().insert(left.to_owned());
        }
        // Nor a REPLY in an IMMEDIATE that is not whole words: the pad is counted like payload, and the note is
        // the one on PUTs.
        let kind = |lnet: u8, padded: &str| {
            let lnet = Some(lnet);
            format!("opcode 0x4, message 0xd1, LNet {lnet:?}, payload true{padded}")
        };
        let on_puts = complaints.get(&kind(1, "")).cloned().unwrap_or_default();
        for lnet in [1, 3] {
            complaints.insert(kind(lnet, ", padded"), on_puts.clone());
        }
        Self { complaints, quirks }
    }

    fn forgive(&self, seen: &Dissected) -> Result<(), String> {
        let none = BTreeSet::new();
        let known = self.complaints.get(&seen.kind()).unwrap_or(&none);
        match seen.complaints().difference(known).next() {
            Some(complaint) => Err(format!("{}: {complaint}", seen.kind())),
            None => Ok(()),
        }
    }
}

/// The message of a SEND that is one frame.
#[must_use]
pub fn message(frame: &[u8]) -> Option<&[u8]> {
    let start = match *frame.get(42)? {
        0x04 => 54,
        0x17 => 58,
        _ => return None,
    };
    let pad = usize::from(frame[43] >> 4 & 3);
    Some(&frame[start..frame.len() - 4 - pad])
}

/// A capture file that goes away.
#[derive(Debug)]
pub struct Temporary(pub PathBuf);

impl Temporary {
    /// A file with these bytes.
    ///
    /// # Panics
    /// When it cannot be written.
    #[must_use]
    pub fn new(name: &str, bytes: &[u8]) -> Self {
        let thread = std::thread::current().id();
        let name = format!("o2poll-{}-{thread:?}-{name}.pcap", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::write(&path, bytes).unwrap();
        Self(path)
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// Frames, and what Wireshark says of them.
pub type Frames = Vec<(Vec<u8>, Dissected)>;

/// Dissects a capture.
///
/// # Panics
/// When it is not one.
#[must_use]
pub fn frames(file: &[u8]) -> Frames {
    let temporary = Temporary::new("judged", file);
    let seen = dissect(&temporary.0);
    let frames = pcap::read(file).unwrap();
    assert_eq!(frames.len(), seen.len());
    let bytes = frames.iter().map(|frame| frame.bytes.to_vec());
    bytes.zip(seen).collect()
}

/// The frame as such: lengths, checksums, nothing malformed.
///
/// # Errors
/// What is wrong with it.
pub fn sound(frame: &[u8], seen: &Dissected, habits: &Habits) -> Result<(), String> {
    habits.forgive(seen)?;
    let (packet, crc) = frame[14..].split_last_chunk::<4>().ok_or("short")?;
    if icrc(packet) != Some(u32::from_le_bytes(*crc)) {
        return Err(String::from("ICRC"));
    }
    let must = [
        ("ip.checksum.status", 1),
        ("udp.dstport", 4791),
        ("infiniband.bth.p_key", 0xffff),
        ("infiniband.invariant.crc", u32::from_be_bytes(*crc).into()),
        ("ip.len", frame.len() as u64 - 14),
        ("udp.length", frame.len() as u64 - 34),
    ];
    for (name, number) in must {
        // Wireshark shows no CRC of a malformed message.
        let shown = seen.number(name);
        let missing = name.ends_with("crc") && shown.is_none() && !seen.complaints().is_empty();
        if shown != Some(number) && !missing {
            return Err(format!("{name} is {shown:?}, not {number:#x}"));
        }
    }
    Ok(())
}

/// A message as dissected, and as posted.
///
/// # Errors
/// The first difference.
pub fn same(seen: &Dissected, bytes: &[u8], quirks: Quirks) -> Result<(), String> {
    let (shown, meant) = (seen.lnet(), expected(bytes, quirks));
    if shown == meant {
        return Ok(());
    }
    let differing = shown
        .iter()
        .zip(&meant)
        .find(|(shown, meant)| shown != meant);
    Err(match differing {
        Some((shown, meant)) => format!("shows {shown:x?}, not {meant:x?}"),
        None => format!("{} fields, not {}", shown.len(), meant.len()),
    })
}

/// One direction of the connection.
#[derive(Clone, Copy, Debug)]
pub struct OneWay {
    /// Queue pair that the requests go to.
    pub to: u32,
    /// Queue pair that they come from.
    pub back: u32,
    /// Sequence number of the first.
    pub psn: u64,
}

impl OneWay {
    /// Requests in the order in which they were posted, under consecutive numbers, and all acknowledged.
    ///
    /// # Errors
    /// What is wrong first.
    pub fn judge(
        &self,
        posted: &[Posted],
        seen: &[&Dissected],
        habits: &Habits,
    ) -> Result<(), String> {
        let opcode = |seen: &Dissected| seen.number("infiniband.bth.opcode").unwrap_or(u64::MAX);
        let goes = |seen: &Dissected, number: u32| {
            seen.number("infiniband.bth.destqp") == Some(number.into())
        };
        let mut requests = seen
            .iter()
            .filter(|seen| goes(seen, self.to) && opcode(seen) != ACKNOWLEDGE);
        let mut psn = self.psn;
        let mut next = || {
            let seen = requests.next().ok_or("a frame is missing")?;
            if seen.number("infiniband.bth.psn") != Some(psn) {
                return Err(format!(
                    "PSN {:?}, not {psn}",
                    seen.number("infiniband.bth.psn")
                ));
            }
            psn = (psn + 1) & 0xff_ffff;
            Ok(seen)
        };
        for posted in posted {
            match posted {
                Posted::Message(bytes, key) => {
                    let seen = next()?;
                    let meant = if key.is_some() { 0x17 } else { 0x04 };
                    let invalidated = key.map(|RKey(key)| u64::from(key));
                    if opcode(seen) != meant || seen.number("infiniband.ieth") != invalidated {
                        return Err(format!("{:#x} is not a SEND", opcode(seen)));
                    }
                    same(seen, bytes, habits.quirks)?;
                }
                Posted::Write(remote, length, imm) => {
                    let frames = (*length as usize).div_ceil(MTU).max(1);
                    for index in 0..frames {
                        let seen = next()?;
                        let meant = match (index == 0, index + 1 == frames, imm) {
                            (true, true, None) => 0x0a,
                            (true, true, Some(_)) => 0x0b,
                            (true, false, _) => 0x06,
                            (false, false, _) => 0x07,
                            (false, true, None) => 0x08,
                            (false, true, Some(_)) => 0x09,
                        };
                        let reth = [
                            ("infiniband.reth.va", remote.address),
                            ("infiniband.reth.r_key", remote.rkey.0.into()),
                            ("infiniband.reth.dmalen", (*length).into()),
                        ];
                        let right = opcode(seen) == meant
                            && reth.iter().all(|(name, number)| {
                                seen.number(name) == (index == 0).then_some(*number)
                            });
                        if !right {
                            return Err(format!("{:#x}: not {posted:?}", opcode(seen)));
                        }
                    }
                }
            }
        }
        if requests.next().is_some() {
            return Err(String::from("a frame that nobody posted"));
        }
        // Acknowledgements never go back, and the last is for everything.
        let (mut last, mut count) = (0, 0);
        for seen in seen
            .iter()
            .filter(|seen| goes(seen, self.back) && opcode(seen) == ACKNOWLEDGE)
        {
            if seen.number("infiniband.aeth.syndrome.opcode") != Some(0) {
                return Err(String::from("a refusal"));
            }
            let number = |name| seen.number(name).unwrap_or(u64::MAX);
            let at = number("infiniband.bth.psn").wrapping_sub(self.psn) & 0xff_ffff;
            let messages = number("infiniband.aeth.msn");
            if at < last || messages < count || messages > posted.len() as u64 {
                return Err(format!("acknowledges {at} after {last}"));
            }
            (last, count) = (at, messages);
        }
        let sent = psn.wrapping_sub(self.psn + 1) & 0xff_ffff;
        if (last, count) != (sent, posted.len() as u64) {
            return Err(format!("acknowledged {last} of {sent}, {count} messages"));
        }
        Ok(())
    }
}

const ACKNOWLEDGE: u64 = 0x11;
