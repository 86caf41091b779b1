//! What Wireshark says of a capture, and what it must say of a message.

mod judge;

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use o2poll_dataplane::wire::{Body, Descriptor, Message, Nid, lnet};

pub use judge::{Frames, Habits, OneWay, Temporary, frames, message, same, sound};

/// One frame as `tshark` dissects it.
#[derive(Clone, Debug, Default)]
pub struct Dissected {
    /// Every field, in the order of the dissection.
    pub fields: Vec<Field>,
}

/// One field.
#[derive(Clone, Debug)]
pub struct Field {
    /// Its filter name.
    pub name: String,
    /// As it is shown.
    pub show: String,
    /// Its bytes in the frame, in hexadecimal digits.
    pub value: String,
}

impl Field {
    /// The number that is shown.
    #[must_use]
    pub fn number(&self) -> Option<u64> {
        let show = self.show.as_str();
        if let Some(digits) = show.strip_prefix("0x") {
            return u64::from_str_radix(digits, 16).ok();
        }
        if show.contains(':') {
            return u64::from_str_radix(&show.replace(':', ""), 16).ok();
        }
        let parts: Vec<_> = show.split('.').map(str::parse::<u8>).collect();
        if let [Ok(a), Ok(b), Ok(c), Ok(d)] = parts[..] {
            return Some(u32::from_be_bytes([a, b, c, d]).into());
        }
        show.parse::<u64>()
            .ok()
            .or_else(|| show.parse::<i64>().ok().map(i64::cast_unsigned))
    }
}

impl Dissected {
    /// The first field of this name.
    #[must_use]
    pub fn first(&self, name: &str) -> Option<&Field> {
        self.fields.iter().find(|field| field.name == name)
    }

    /// Its number.
    #[must_use]
    pub fn number(&self, name: &str) -> Option<u64> {
        self.first(name)?.number()
    }

    /// What Wireshark finds wrong with the frame, numbers left out.
    #[must_use]
    pub fn complaints(&self) -> BTreeSet<String> {
        self.fields
            .iter()
            .filter(|field| field.name == "_ws.expert.message")
            .map(|field| {
                let mut text = String::new();
                for part in field.show.split(|c: char| c.is_ascii_digit() || c == '-') {
                    if !part.is_empty() {
                        text.push_str(part);
                        text.push('#');
                    }
                }
                text
            })
            .collect()
    }

    /// What kind of frame it is, for comparing complaints.
    #[must_use]
    pub fn kind(&self) -> String {
        let opcode = self.number("infiniband.bth.opcode").unwrap_or(u64::MAX);
        let kind = self.number("lnet.ib.type").unwrap_or(0);
        let lnet = self.number("lnet.msg_type");
        let payload = self.number("lnet.payload_length").unwrap_or(0) != 0;
        let padded = match self.number("infiniband.bth.padcnt") {
            None | Some(0) => "",
            _ => ", padded",
        };
        format!("opcode {opcode:#x}, message {kind:#x}, LNet {lnet:?}, payload {payload}{padded}")
    }

    /// The fields of the LNet message, as numbers. Left out are payload, filler, and what only groups others.
    #[must_use]
    pub fn lnet(&self) -> Vec<(String, u64)> {
        self.fields
            .iter()
            .filter(|field| field.name.starts_with("lnet."))
            .filter(|field| !GROUPS.contains(&field.name.as_str()))
            .map(|field| {
                // Stamps are shown as calendar dates of something else.
                let number = if field.name.ends_with("stamp") {
                    little(&field.value)
                } else {
                    field.number()
                };
                let number = number.unwrap_or_else(|| panic!("{field:?}"));
                (field.name.clone(), number)
            })
            .collect()
    }
}

/// Dissects a capture file.
///
/// # Panics
/// When there is no `tshark`, or it cannot read the file.
#[must_use]
pub fn dissect(path: &Path) -> Vec<Dissected> {
    let mut command = Command::new("tshark");
    command.arg("-r").arg(path).args(["-T", "pdml"]);
    // These take LNet's SENDs for their own.
    for other in ["rpcordma", "iser", "nvme-rdma", "smb_direct", "smc"] {
        command.args(["--disable-protocol", other]);
    }
    command.args(["-o", "ip.check_checksum:TRUE"]);
    let output = command
        .output()
        .unwrap_or_else(|error| panic!("cannot run tshark ({error}): apt-get install tshark"));
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    pdml(&String::from_utf8(output.stdout).expect("pdml is UTF-8"))
}

/// Enough XML for `tshark -T pdml`: tags with attributes in double quotes, no text between them.
fn pdml(text: &str) -> Vec<Dissected> {
    let mut frames: Vec<Dissected> = Vec::new();
    for tag in text.split('<').skip(1) {
        let Some((name, attributes)) = tag.split_once([' ', '>']) else {
            continue;
        };
        match name {
            "packet" => frames.push(Dissected::default()),
            "field" => {
                let frame = frames.last_mut().expect("fields stand in packets");
                frame.fields.push(Field {
                    name: attribute(attributes, "name"),
                    show: attribute(attributes, "show"),
                    value: attribute(attributes, "value"),
                });
            }
            _ => {}
        }
    }
    frames
}

fn attribute(text: &str, name: &str) -> String {
    let start = format!("{name}=\"");
    let mut rest = text;
    while let Some(at) = rest.find(&start) {
        let whole = at == 0 || rest[..at].ends_with(' ');
        rest = &rest[at + start.len()..];
        if whole {
            let value = rest.split('"').next().unwrap_or_default();
            return value
                .replace("&lt;", "<")
                .replace("&gt;", ">")
                .replace("&quot;", "\"")
                .replace("&amp;", "&");
        }
    }
    String::new()
}

/// What Wireshark takes wrongly. Of 4.0 both are true.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quirks {
    /// It does not skip the unused end of an LNet header before what follows it in a GET_REQ (four bytes) or in a
    /// PUT_REQ for a REPLY (24 bytes).
    pub early: bool,
    /// It reads the handle of an ACK as big-endian words.
    pub big_endian_ack: bool,
}

impl Quirks {
    /// Every combination.
    pub const ALL: [Self; 4] = [
        Self::of(false, false),
        Self::of(true, false),
        Self::of(false, true),
        Self::of(true, true),
    ];

    const fn of(early: bool, big_endian_ack: bool) -> Self {
        Self {
            early,
            big_endian_ack,
        }
    }
}

/// What Wireshark must show of a message's fields, in its order and under its names.
///
/// # Panics
/// When the bytes are not a message.
#[must_use]
pub fn expected(bytes: &[u8], quirks: Quirks) -> Vec<(String, u64)> {
    let (message, _) = Message::decode(bytes).expect("a message");
    let envelope = message.envelope;
    let mut fields = Fields(Vec::new(), quirks);
    fields.put("ib.magic", 0x0be9_1b91);
    fields.put("ib.version", envelope.version.into());
    fields.put("ib.type", message.body.kind().into());
    fields.put("ib.credits", envelope.credits.into());
    fields.put("ib.nob", length(&message.body).into());
    fields.put("ksm_csum", 0);
    fields.nid(envelope.source);
    fields.put("ib.srcstamp", envelope.source_stamp);
    fields.nid(envelope.destination);
    fields.put("ib.dststamp", envelope.destination_stamp);
    match message.body {
        Body::ConnReq(params) | Body::ConnAck(params) => {
            fields.put("connparam.qdepth", params.queue_depth.into());
            fields.put("connparam.max_frags", params.max_frags.into());
            fields.put("connparam.max_size", params.max_msg_size.into());
        }
        Body::Noop => {}
        Body::Immediate { header, .. } => fields.header(&header),
        Body::PutReq { header, cookie } => {
            fields.header(&header);
            let reply = matches!(header.body, lnet::Body::Reply { .. });
            // Then the unused end is all that it shows.
            fields.put(
                "o2ib.cookie",
                if quirks.early && reply { 0 } else { cookie },
            );
        }
        Body::PutAck {
            source_cookie,
            sink_cookie,
            sink,
        } => {
            fields.put("o2ib.src_cookie", source_cookie);
            fields.put("o2ib.dest_cookie", sink_cookie);
            fields.descriptor(&sink);
        }
        Body::GetReq {
            header,
            cookie,
            sink,
        } => {
            fields.header(&header);
            if quirks.early {
                fields.descriptor_early(bytes);
            } else {
                fields.put("o2ib.cookie", cookie);
                fields.descriptor(&sink);
            }
        }
        Body::PutNak(done) | Body::PutDone(done) | Body::GetDone(done) => {
            fields.put("o2ib.cookie", done.cookie);
            fields.put("o2ib.status", i64::from(done.status).cast_unsigned());
        }
    }
    fields.0
}

/// Bytes of the message, told from what it says.
fn length(body: &Body<'_>) -> u32 {
    let fragments = |sink: &Descriptor<'_>| 8 + 12 * u32::try_from(sink.len()).expect("few");
    48 + match body {
        Body::ConnReq(_) | Body::ConnAck(_) => 8,
        Body::Noop => 0,
        Body::Immediate { payload, .. } => 72 + u32::try_from(payload.len()).expect("short"),
        Body::PutReq { .. } => 80,
        Body::PutNak(_) | Body::PutDone(_) | Body::GetDone(_) => 12,
        Body::PutAck { sink, .. } => 16 + fragments(sink),
        Body::GetReq { sink, .. } => 80 + fragments(sink),
    }
}

struct Fields(Vec<(String, u64)>, Quirks);

impl Fields {
    fn put(&mut self, name: &str, number: u64) {
        self.0.push((format!("lnet.{name}"), number));
    }

    fn nid(&mut self, nid: Nid) {
        self.put("nid.addr", nid.address().into());
        self.put("nid.net_interface", nid.number().into());
        self.put("nid.type", nid.lnd().into());
    }

    fn header(&mut self, header: &lnet::Header) {
        self.nid(header.destination);
        self.nid(header.source);
        // Wireshark's names of the two are exchanged: the destination's stands first.
        self.put("src_pid", header.destination_pid.0.into());
        self.put("dest_pid", header.source_pid.0.into());
        self.put("msg_type", header.body.kind().into());
        self.put("payload_length", header.payload_length.into());
        let swap = self.1.big_endian_ack && matches!(header.body, lnet::Body::Ack { .. });
        let mut handle = |handle: lnet::WireHandle| {
            let (mut interface, mut object) = handle.words();
            if swap {
                (interface, object) = (interface.swap_bytes(), object.swap_bytes());
            }
            self.put("msg_dst_interface_cookie", interface);
            self.put("msg_dst_object_cookie", object);
        };
        match header.body {
            lnet::Body::Ack {
                handle: of,
                match_bits,
                length,
            } => {
                handle(of);
                self.put("msg_dst_match_bits", match_bits);
                self.put("msg_length", length.into());
            }
            lnet::Body::Put {
                ack,
                match_bits,
                hdr_data,
                portal,
                offset,
            } => {
                handle(ack);
                self.put("msg_dst_match_bits", match_bits);
                self.put("msg_hdr_data", hdr_data);
                self.put("ptl_index", portal.into());
                self.put("offset", offset.into());
            }
            lnet::Body::Get {
                reply,
                match_bits,
                portal,
                offset,
                sink_length,
            } => {
                handle(reply);
                self.put("msg_dst_match_bits", match_bits);
                self.put("ptl_index", portal.into());
                self.put("src_offset", offset.into());
                self.put("sink_length", sink_length.into());
            }
            lnet::Body::Reply { handle: of } => handle(of),
            lnet::Body::Hello { .. } => panic!("o2iblnd carries no HELLO"),
        }
    }

    fn descriptor(&mut self, sink: &Descriptor<'_>) {
        self.put("rdma.key", sink.key().0.into());
        self.put("rdma.nfrags", sink.len() as u64);
        for fragment in sink {
            self.put("rdma_frag.size", fragment.length.into());
            self.put("rdma_frag.addr", fragment.address);
        }
    }

    /// The unused end of the GET's header is taken for the start of the cookie, and so on: it says the same
    /// bytes under the names of their neighbours, all but the last four.
    fn descriptor_early(&mut self, bytes: &[u8]) {
        let half = |at: usize| {
            let word = bytes.get(at..at + 4)?;
            Some(u64::from(u32::from_le_bytes(word.try_into().ok()?)))
        };
        let double = |at: usize| Some(half(at)? | half(at + 4)? << 32);
        self.put("o2ib.cookie", double(116).expect("long enough"));
        self.put("rdma.key", half(124).expect("long enough"));
        let count = half(128).expect("long enough");
        self.put("rdma.nfrags", count);
        for index in 0..usize::try_from(count).expect("64 bits") {
            let at = 132 + 12 * index;
            let (Some(size), Some(address)) = (half(at), double(at + 4)) else {
                return;
            };
            self.put("rdma_frag.size", size);
            self.put("rdma_frag.addr", address);
        }
    }
}

fn little(value: &str) -> Option<u64> {
    u64::from_str_radix(value, 16).ok().map(u64::swap_bytes)
}

const GROUPS: [&str; 8] = [
    "lnet.src_nid",
    "lnet.dest_nid",
    "lnet.rdma",
    "lnet.connparam",
    "lnet.payload",
    "lnet.ptl_filler",
    // Complaints.
    "lnet.bad_buflen",
    "lnet.bad_type",
];

#[cfg(test)]
mod tests {
    use super::pdml;

    #[test]
    fn fields_are_read_out_of_pdml() {
        let frames = pdml(
            "<pdml>\n<packet>\n<proto name=\"p\" show=\"x\">\n\
             <field name=\"a.b\" showname=\"show=&quot;1&quot;\" show=\"&lt;2&gt;\" value=\"02\"/>\n\
             <field name=\"c\" show=\"10.0.0.1\" value=\"\">\n</field></proto></packet><packet></packet></pdml>",
        );
        assert_eq!(frames.len(), 2);
        assert_eq!(frames[0].first("a.b").unwrap().show, "<2>");
        assert_eq!(frames[0].number("c"), Some(0x0a00_0001));
        assert!(frames[1].fields.is_empty());
    }
}
