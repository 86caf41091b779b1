//! What each device can do, and what becomes of a buffer on it.

use core::fmt;
use std::fs;

use o2poll_config::SoftProfile;
use o2poll_dataplane::nic::{Capabilities, Mechanisms};
use o2poll_dataplane::registration::{Choices, Outline, Settings, Stock};
use o2poll_dataplane::wire::IMMEDIATE_PAYLOAD;
use serde::Serialize;

use crate::plan::profile_of;
use crate::report::table::Table;

/// What nodes are set to, as far as it decides about buffers.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Asked {
    /// `exposure = "arena"`
    pub exposed: bool,
    /// `map_on_demand`
    pub map_on_demand: u16,
    /// `max_frags`
    pub max_frags: u16,
    /// `staging` is not 0.
    pub staging: bool,
}

/// Every device and profile.
#[derive(Clone, Debug, Serialize)]
pub struct Devices {
    /// For what settings.
    pub asked: Asked,
    /// The profiles of the software device, then the RDMA devices of this machine.
    pub devices: Vec<DeviceLine>,
}

/// One of them.
#[derive(Clone, Debug, Serialize)]
pub struct DeviceLine {
    /// As a node file names it.
    pub name: String,
    /// `soft` or `verbs`.
    pub kind: &'static str,
    /// What it has; none if it could not be looked at.
    pub mechanisms: Vec<&'static str>,
    /// Most pieces of a fragment list.
    pub max_fragments: u32,
    /// Most pages of a page list or a mapping.
    pub max_pages: u32,
    /// Most send work requests of a queue pair.
    pub max_send_wr: u32,
    /// Most completion queue entries.
    pub max_cqe: u32,
    /// A peer's SEND may kill a key.
    pub remote_invalidate: bool,
    /// What becomes of each kind of buffer.
    pub buffers: Vec<BufferLine>,
    /// What else there is to say.
    pub notes: Vec<String>,
}

/// What becomes of a buffer as the sink of a transfer.
#[derive(Clone, Debug, Serialize)]
pub struct BufferLine {
    /// Which.
    pub buffer: &'static str,
    /// Bytes.
    pub bytes: u32,
    /// Separate ranges.
    pub ranges: usize,
    /// How it is covered; `None` where it is refused.
    pub mechanism: Option<&'static str>,
    /// Why.
    pub why: String,
}

impl Devices {
    /// Looks at all of them. An RDMA device is tried out, which takes up to some seconds.
    #[must_use]
    pub fn look(asked: Asked) -> Self {
        let soft = SoftProfile::ALL.into_iter().filter_map(|profile| {
            let capabilities = profile_of(profile)?.capabilities;
            Some(line(
                profile.name().to_owned(),
                "soft",
                &capabilities,
                asked,
            ))
        });
        let hardware = installed().into_iter().map(|name| hardware(name, asked));
        Self {
            asked,
            devices: soft.chain(hardware).collect(),
        }
    }
}

impl fmt::Display for Devices {
    /// A table of devices, and one of what becomes of buffers.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::new(&[
            "device",
            "mechanisms",
            "fragments",
            "pages",
            "send WRs",
            "CQEs",
            "SEND_WITH_INV",
        ]);
        for device in &self.devices {
            let mechanisms = if device.mechanisms.is_empty() {
                String::from("none")
            } else {
                device.mechanisms.join(", ")
            };
            table.row(vec![
                format!("{} {}", device.kind, device.name),
                mechanisms,
                device.max_fragments.to_string(),
                device.max_pages.to_string(),
                device.max_send_wr.to_string(),
                device.max_cqe.to_string(),
                String::from(if device.remote_invalidate {
                    "yes"
                } else {
                    "no"
                }),
            ]);
        }
        write!(f, "{table}")?;
        let asked = self.asked;
        writeln!(
            f,
            "\nexposure = \"{}\", map_on_demand = {}, max_frags = {}, staging {}:\n",
            if asked.exposed { "arena" } else { "none" },
            asked.map_on_demand,
            asked.max_frags,
            if asked.staging { "on" } else { "off" }
        )?;
        let mut head = vec![String::from("goes by")];
        head.extend(BUFFERS.iter().map(|buffer| buffer.name.to_owned()));
        let mut table = Table::new(&head.iter().map(String::as_str).collect::<Vec<_>>());
        let mut reasons: Vec<String> = Vec::new();
        for device in self.devices.iter().filter(|line| !line.buffers.is_empty()) {
            let mut row = vec![format!("{} {}", device.kind, device.name)];
            for buffer in &device.buffers {
                let mechanism = buffer.mechanism.unwrap_or("REFUSED");
                let reason = format!("{mechanism}: {}", buffer.why);
                if !reasons.contains(&reason) {
                    reasons.push(reason);
                }
                row.push(mechanism.to_owned());
            }
            table.row(row);
        }
        writeln!(f, "{table}")?;
        reasons.sort();
        for reason in reasons {
            writeln!(f, "{reason}")?;
        }
        for device in &self.devices {
            for note in &device.notes {
                writeln!(f, "{}: {note}", device.name)?;
            }
        }
        Ok(())
    }
}

fn line(name: String, kind: &'static str, capabilities: &Capabilities, asked: Asked) -> DeviceLine {
    let mechanisms = [
        (Mechanisms::FRAGMENTS, "fragment lists"),
        (Mechanisms::PAGES, "page lists"),
        (Mechanisms::WINDOW, "windows"),
        (Mechanisms::MAPPINGS, "mappings"),
    ]
    .into_iter()
    .filter(|(mechanism, _)| capabilities.mechanisms.contains(*mechanism))
    .map(|(_, name)| name)
    .collect();
    DeviceLine {
        name,
        kind,
        mechanisms,
        max_fragments: capabilities.max_fragments,
        max_pages: capabilities.max_pages,
        max_send_wr: capabilities.max_send_wr,
        max_cqe: capabilities.max_cqe,
        remote_invalidate: capabilities.remote_invalidate,
        buffers: BUFFERS
            .iter()
            .map(|buffer| becomes(buffer, capabilities, asked))
            .collect(),
        notes: Vec::new(),
    }
}

/// A kind of buffer.
struct Kind {
    name: &'static str,
    bytes: u32,
    ranges: usize,
    /// Pages, if all of it is whole ones.
    pages: Option<usize>,
}

/// Asks the data plane's own table of choices.
fn becomes(buffer: &Kind, capabilities: &Capabilities, asked: Asked) -> BufferLine {
    let (mechanism, why) = if buffer.bytes <= IMMEDIATE_PAYLOAD {
        let why = format!("at most {IMMEDIATE_PAYLOAD} bytes");
        (Some("the message"), why)
    } else {
        let settings = Settings {
            expose_arena: asked.exposed,
            map_on_demand: asked.map_on_demand,
            ..Settings::PRIVATE
        };
        let stock = Stock {
            // On a boundary of its length, as a node makes it.
            staging: asked.staging.then_some(20),
            mappings: true,
        };
        let choices = Choices::new(capabilities, settings, asked.max_frags, stock);
        let outline = Outline {
            length: buffer.bytes,
            fragments: buffer.ranges,
            pages: buffer.pages,
            exposed: asked.exposed,
        };
        match choices.choose(&outline) {
            Ok(choice) => (Some(choice.mechanism.name()), choice.why.to_string()),
            Err(refused) => (None, refused.to_string()),
        }
    };
    BufferLine {
        buffer: buffer.name,
        bytes: buffer.bytes,
        ranges: buffer.ranges,
        mechanism,
        why,
    }
}

/// RDMA devices that the kernel has, by name. Whether they can be used is another question.
fn installed() -> Vec<String> {
    let Ok(entries) = fs::read_dir("/sys/class/infiniband") else {
        return Vec::new();
    };
    let mut names: Vec<String> = entries
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

#[cfg(not(feature = "verbs"))]
fn hardware(name: String, _: Asked) -> DeviceLine {
    unknown(
        name,
        String::from("not looked at: this build has no libibverbs; build with --features verbs"),
    )
}

#[cfg(feature = "verbs")]
fn hardware(name: String, asked: Asked) -> DeviceLine {
    use o2poll_hal::verbs::{Device, probe};
    let found = Device::open(&name).and_then(|device| {
        let findings = probe(&device, 1)?;
        Ok((device, findings))
    });
    let (device, findings) = match found {
        Ok(found) => found,
        Err(error) => return unknown(name, error.to_string()),
    };
    let capabilities = device.capabilities(&findings);
    let mut line = line(name, "verbs", &capabilities, asked);
    line.notes = findings.notes;
    line
}

fn unknown(name: String, note: String) -> DeviceLine {
    DeviceLine {
        buffers: Vec::new(),
        notes: vec![note],
        ..line(name, "verbs", &nothing(), NOTHING_ASKED)
    }
}

/// A device of which nothing is known.
const fn nothing() -> Capabilities {
    Capabilities {
        mechanisms: Mechanisms::empty(),
        max_fragments: 0,
        max_pages: 0,
        page_shift: 12,
        zero_based: false,
        checks_reuse: true,
        region_lkey: false,
        remote_invalidate: false,
        max_sge: 0,
        max_send_wr: 0,
        max_recv_wr: 0,
        max_cqe: 0,
        max_windows: 0,
    }
}

const NOTHING_ASKED: Asked = Asked {
    exposed: false,
    map_on_demand: 1,
    max_frags: 1,
    staging: false,
};

/// The pages and pieces lie apart.
const BUFFERS: [Kind; 5] = [
    Kind {
        name: "1 MiB contiguous",
        bytes: 1 << 20,
        ranges: 1,
        pages: Some(256),
    },
    Kind {
        name: "256 whole pages",
        bytes: 1 << 20,
        ranges: 256,
        pages: Some(256),
    },
    Kind {
        name: "16 with gaps",
        bytes: 64_000,
        ranges: 16,
        pages: None,
    },
    Kind {
        name: "200 with gaps",
        bytes: 800_000,
        ranges: 200,
        pages: None,
    },
    Kind {
        name: "2 KiB",
        bytes: 2048,
        ranges: 1,
        pages: Some(1),
    },
];

#[cfg(test)]
mod tests {
    use super::{Asked, Devices};

    fn goes_by(asked: Asked, device: &str, buffer: &str) -> Option<&'static str> {
        let devices = Devices::look(asked).devices;
        let device = devices.into_iter().find(|line| line.name == device);
        let buffers = device.unwrap().buffers;
        let buffer = buffers.into_iter().find(|line| line.buffer == buffer);
        buffer.unwrap().mechanism
    }

    const DEFAULT: Asked = Asked {
        exposed: false,
        map_on_demand: 1,
        max_frags: 257,
        staging: true,
    };

    #[test]
    fn each_profile_goes_its_own_way() {
        for (device, buffer, wanted) in [
            ("frwr", "200 with gaps", Some("fragment list")),
            ("mlx5", "16 with gaps", Some("fragment list")),
            ("mlx5", "200 with gaps", Some("staging")),
            ("mlx4", "256 whole pages", Some("page list")),
            ("mlx4", "16 with gaps", Some("staging")),
            ("windows", "1 MiB contiguous", Some("window")),
            ("rxe", "256 whole pages", Some("staging")),
            ("mthca", "1 MiB contiguous", Some("mapping")),
            ("mthca", "256 whole pages", Some("mapping")),
            ("mthca", "16 with gaps", Some("staging")),
            ("bare", "1 MiB contiguous", None),
            ("bare", "2 KiB", Some("the message")),
        ] {
            assert_eq!(
                goes_by(DEFAULT, device, buffer),
                wanted,
                "{device} {buffer}"
            );
        }
    }

    #[test]
    fn what_is_asked_for_decides() {
        let exposed = Asked {
            exposed: true,
            ..DEFAULT
        };
        assert_eq!(goes_by(exposed, "bare", "1 MiB contiguous"), Some("arena"));
        assert_eq!(goes_by(exposed, "rxe", "16 with gaps"), Some("arena"));
        assert_eq!(
            goes_by(exposed, "frwr", "1 MiB contiguous"),
            Some("fragment list")
        );
        let on_demand = Asked {
            map_on_demand: 32,
            ..exposed
        };
        assert_eq!(goes_by(on_demand, "frwr", "16 with gaps"), Some("arena"));
        assert_eq!(
            goes_by(on_demand, "frwr", "200 with gaps"),
            Some("fragment list")
        );
        let unstaged = Asked {
            staging: false,
            ..DEFAULT
        };
        assert_eq!(goes_by(unstaged, "rxe", "256 whole pages"), None);
    }
}
