//! Capture files (`pcap(5)`), nanosecond kind, Ethernet.

use std::io::{self, Write};

/// Writes a capture file.
#[derive(Debug)]
pub struct Writer<W> {
    to: W,
    last: u64,
}

impl<W: Write> Writer<W> {
    /// Writes the file's header.
    ///
    /// # Errors
    /// As of `to`.
    pub fn new(mut to: W) -> io::Result<Self> {
        let mut header = Vec::with_capacity(24);
        header.extend(NANOSECONDS.to_le_bytes());
        header.extend(2_u16.to_le_bytes());
        header.extend(4_u16.to_le_bytes());
        header.extend([0; 8]);
        header.extend(SNAPLEN.to_le_bytes());
        header.extend(ETHERNET.to_le_bytes());
        to.write_all(&header)?;
        Ok(Self { to, last: 0 })
    }

    /// Writes one frame, seen at `time` nanoseconds of Unix time, or when the one before was seen if that is
    /// later. `length` is that of the whole frame, of which `bytes` may be only the beginning.
    ///
    /// # Errors
    /// As of the file.
    pub fn frame(&mut self, time: u64, bytes: &[u8], length: usize) -> io::Result<()> {
        self.last = self.last.max(time);
        let narrow = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
        let kept = bytes.get(..SNAPLEN as usize).unwrap_or(bytes);
        let mut header = [0; 16];
        for (place, word) in header.as_chunks_mut::<4>().0.iter_mut().zip([
            narrow(self.last / SECOND),
            narrow(self.last % SECOND),
            narrow(kept.len() as u64),
            narrow(length as u64),
        ]) {
            *place = word.to_le_bytes();
        }
        self.to.write_all(&header)?;
        self.to.write_all(kept)
    }

    /// Writes out what is buffered.
    ///
    /// # Errors
    /// As of the file.
    pub fn finish(mut self) -> io::Result<W> {
        self.to.flush()?;
        Ok(self.to)
    }
}

/// One frame of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record<'f> {
    /// Nanoseconds of Unix time.
    pub time: u64,
    /// As many bytes as were kept.
    pub bytes: &'f [u8],
    /// Length of the whole frame.
    pub length: u32,
}

/// The frames of a little-endian capture file of Ethernet frames; `None` if it is anything else, or cut.
#[must_use]
pub fn read(file: &[u8]) -> Option<Vec<Record<'_>>> {
    let (header, mut rest) = file.split_first_chunk::<24>()?;
    let word = |bytes: &[u8], at: usize| {
        bytes
            .get(at..)
            .and_then(<[u8]>::first_chunk)
            .map(|word| u32::from_le_bytes(*word))
    };
    let fraction = match word(header, 0)? {
        NANOSECONDS => 1,
        MICROSECONDS => 1000,
        _ => return None,
    };
    if word(header, 20)? != ETHERNET {
        return None;
    }
    let mut records = Vec::new();
    while let Some((header, after)) = rest.split_first_chunk::<16>() {
        let (bytes, after) = after.split_at_checked(word(header, 8)? as usize)?;
        records.push(Record {
            time: u64::from(word(header, 0)?) * SECOND + u64::from(word(header, 4)?) * fraction,
            bytes,
            length: word(header, 12)?,
        });
        rest = after;
    }
    rest.is_empty().then_some(records)
}

const NANOSECONDS: u32 = 0xa1b2_3c4d;
const MICROSECONDS: u32 = 0xa1b2_c3d4;
const ETHERNET: u32 = 1;
const SNAPLEN: u32 = 65535;
const SECOND: u64 = 1_000_000_000;

#[cfg(test)]
mod tests {
    use super::{Record, Writer, read};

    #[test]
    fn frames_are_read_as_they_were_written_and_time_does_not_run_backwards() {
        let mut writer = Writer::new(Vec::new()).unwrap();
        writer.frame(5_000_000_007, &[1, 2, 3], 3).unwrap();
        writer.frame(4_000_000_000, &[], 60).unwrap();
        let file = writer.finish().unwrap();
        let record = |bytes, length| Record {
            time: 5_000_000_007,
            bytes,
            length,
        };
        assert_eq!(
            read(&file).unwrap(),
            [record(&[1, 2, 3][..], 3), record(&[], 60)]
        );
        assert_eq!(read(&file[..file.len() - 1]), None);
        assert_eq!(read(&file[1..]), None);
    }
}
