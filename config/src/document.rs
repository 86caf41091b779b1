//! The keys of a node file: what there may be, of which type, in which range, and its default.

mod device;
mod tunables;

use core::ops::Range;
use core::time::Duration;
use std::io;
use std::path::{Path, PathBuf};

use o2poll_dataplane::wire::Nid;
use o2poll_dataplane::wire::nid::O2IB;
use toml::de::{DeTable, DeValue};

use crate::model::{
    Cores, Device, Exposure, Extensions, MAX_IN_FLIGHT, MAX_PORTAL, MAX_TRANSFER, Memory, Tunables,
    Wish,
};
use crate::reader::{
    At, Mistakes, Section, Wrong, array, bits, boolean, choice, duration, integer, number, size,
    string,
};
use crate::report::Diagnostic;
use crate::units::not_a_nid;
use crate::{Machine, Overrides};

use self::device::device;
use self::tunables::tunables;

/// A node file with every key read and no key compared with another. `None` is a mistake that is written down.
#[derive(Debug)]
pub(crate) struct Draft {
    pub(crate) device: Option<At<Device>>,
    /// The command line has chosen its profile.
    pub(crate) profile_overridden: bool,
    pub(crate) exposure: Option<At<Exposure>>,
    pub(crate) memory: Option<Memory>,
    pub(crate) tunables: Option<Tunables>,
    pub(crate) nodes: Vec<DraftNode>,
}

#[derive(Debug)]
pub(crate) struct DraftNode {
    pub(crate) nid: Option<At<Nid>>,
    pub(crate) cores: Option<At<Cores>>,
    pub(crate) conns_per_peer: Option<u8>,
    pub(crate) extensions: Option<Extensions>,
    pub(crate) exports: Vec<DraftExport>,
    pub(crate) copy: Option<DraftCopy>,
    pub(crate) workload: Option<DraftWorkload>,
}

#[derive(Debug)]
pub(crate) struct DraftExport {
    pub(crate) span: Range<usize>,
    pub(crate) name: Option<At<String>>,
    pub(crate) portal: Option<At<u32>>,
    pub(crate) match_bits: Option<At<u64>>,
    pub(crate) piece: Option<At<u64>>,
    pub(crate) writable: Option<At<bool>>,
    /// Its bytes are a file's, even if that cannot be read; else it is memory, or a mistake.
    pub(crate) is_file: bool,
    /// The file; `None` for memory, and for a mistake.
    pub(crate) file: Option<PathBuf>,
    /// Of the file or the memory, standing where `file` or `size` says so.
    pub(crate) length: Option<At<u64>>,
    /// The file is the command line's.
    pub(crate) overridden: bool,
}

#[derive(Debug)]
pub(crate) struct DraftCopy {
    pub(crate) peer: Option<At<Nid>>,
    pub(crate) file: Option<At<String>>,
    pub(crate) into: Option<At<String>>,
    pub(crate) transfer: Option<At<u64>>,
    pub(crate) in_flight: Option<At<u32>>,
    pub(crate) repeat: Option<At<bool>>,
}

#[derive(Debug)]
pub(crate) struct DraftWorkload {
    pub(crate) peer: Option<At<Nid>>,
    pub(crate) region: Option<At<String>>,
    pub(crate) sizes: Option<At<Vec<At<u64>>>>,
    /// Empty where none are given.
    pub(crate) weights: Option<At<Vec<At<u32>>>>,
    pub(crate) put: Option<At<f64>>,
    pub(crate) in_flight: Option<At<u32>>,
    pub(crate) duration: Option<At<Duration>>,
    pub(crate) verify: Option<At<bool>>,
    pub(crate) seed: Option<At<u64>>,
    pub(crate) repeat: Option<At<bool>>,
}

/// Reads every key.
pub(crate) fn read(
    table: &DeTable<'_>,
    origin: &Path,
    overrides: &Overrides,
    machine: &Machine<'_>,
    mistakes: &Mistakes,
) -> Draft {
    let mut files = Files {
        folder: origin.parent().unwrap_or_else(|| Path::new("")),
        replacement: overrides.export.as_deref(),
        machine,
        mistakes,
    };
    // Nothing in particular is wrong with the first line when a whole section is missing.
    let mut top = Section::new("a node file", table, 0..0, mistakes);
    let device = match top.table(
        "device",
        "[device]",
        "[device] and below it soft = { profile = \"frwr\" }",
    ) {
        Some(section) => device(section, overrides.profile, mistakes),
        None => {
            if !top.has("device") {
                missing(
                    &top,
                    mistakes,
                    "[device]",
                    "it says what the nodes are joined by; begin with [device] and soft = { profile = \"frwr\" }",
                );
            }
            None
        }
    };
    let empty = DeTable::new();
    let absent = |header| Section::new(header, &empty, 0..0, mistakes);
    let section = top.table(
        "memory",
        "[memory]",
        "[memory] and below it mlock = \"try\"",
    );
    let (memory, exposure) = memory(section.unwrap_or_else(|| absent("[memory]")));
    let section = top.table(
        "tunables",
        "[tunables]",
        "[tunables] and below it peer_credits = 8",
    );
    let tunables = tunables(section.unwrap_or_else(|| absent("[tunables]")), mistakes);
    let sections = top.tables("node", "[[node]]");
    if sections.is_empty() && !top.has("node") {
        missing(
            &top,
            mistakes,
            "[[node]]",
            "add at least one, as [[node]] and nid = \"10.0.0.1@o2ib\"",
        );
    }
    let nodes = sections
        .into_iter()
        .map(|section| node(section, &mut files, tunables.as_ref()))
        .collect();
    if let Some(path) = files.replacement {
        mistakes.push(Diagnostic::new(
            format!("--export {} has nothing to replace", path.display()),
            0..0,
            "no [[node.export]] here has a `file`",
            "add an export with file = \"..\", or leave the option out",
        ));
    }
    top.finish(|key| match key {
        "nodes" | "export" | "extensions" | "copy" | "workload" => Some("nodes are written as [[node]], and what belongs to them as [[node.export]], [node.extensions], [node.copy], [node.workload]"),
        _ => None,
    });
    Draft {
        device,
        profile_overridden: overrides.profile.is_some(),
        exposure,
        memory,
        tunables,
        nodes,
    }
}

fn missing(top: &Section<'_>, mistakes: &Mistakes, what: &str, remedy: &str) {
    mistakes.push(Diagnostic::new(
        format!("there is no {what}"),
        top.span(),
        "",
        remedy,
    ));
}

fn memory(mut section: Section<'_>) -> (Option<Memory>, Option<At<Exposure>>) {
    let wish = [
        ("try", Wish::Try),
        ("require", Wish::Require),
        ("off", Wish::Off),
    ];
    let huge_pages = section.or("huge_pages", Wish::Try, choice(&wish));
    let mlock = section.or("mlock", Wish::Try, choice(&wish));
    let exposure = section.or(
        "exposure",
        Exposure::None,
        choice(&[("none", Exposure::None), ("arena", Exposure::Arena)]),
    );
    let staging = section.or("staging", 4, integer(0..=256));
    section.finish(|_| None);
    let memory = || {
        Some(Memory {
            huge_pages: huge_pages?.value,
            mlock: mlock?.value,
            exposure: exposure.as_ref()?.value,
            staging: staging?.value,
        })
    };
    (memory(), exposure)
}

fn extensions(mut section: Section<'_>) -> Option<Extensions> {
    let default = Extensions::default();
    let send_with_invalidate = section.or(
        "send_with_invalidate",
        default.send_with_invalidate,
        boolean,
    );
    let write_with_immediate = section.or(
        "write_with_immediate",
        default.write_with_immediate,
        boolean,
    );
    section.finish(|_| None);
    Some(Extensions {
        send_with_invalidate: send_with_invalidate?.value,
        write_with_immediate: write_with_immediate?.value,
    })
}

fn node(mut section: Section<'_>, files: &mut Files<'_>, tunables: Option<&Tunables>) -> DraftNode {
    let nid = section.need("nid", "\"10.0.0.1@o2ib\"", nid);
    let cores = section.or("cores", Cores::Auto, cores(files.machine));
    // A number that is wrong there is written down already.
    let conns_default = tunables.map_or(1, |tunables| tunables.conns_per_peer);
    let conns_per_peer = section
        .or("conns_per_peer", conns_default, integer(1..=MOST_CONNS))
        .map(|at| at.value);
    let has_extensions = section.has("extensions");
    let extensions = section
        .table(
            "extensions",
            "[node.extensions]",
            "[node.extensions] and below it send_with_invalidate = true",
        )
        .map_or_else(|| (!has_extensions).then(Extensions::default), extensions);
    let exports = section
        .tables("export", "[[node.export]]")
        .into_iter()
        .map(|section| export(section, files))
        .collect();
    // A depth that is wrong is written down already; the job is not to blame.
    let in_flight = u32::from(tunables.map_or(8, |tunables| tunables.peer_credits));
    let copy = section
        .table(
            "copy",
            "[node.copy]",
            "[node.copy] and below it peer = \"10.0.0.1@o2ib\"",
        )
        .map(|section| copy(section, in_flight));
    let workload = section
        .table(
            "workload",
            "[node.workload]",
            "[node.workload] and below it peer = \"10.0.0.1@o2ib\"",
        )
        .map(|section| workload(section, in_flight));
    section.finish(|key| match key {
        "exports" => Some("each export is a [[node.export]] of its own"),
        "core" => Some("write cores = [0], or cores = \"auto\""),
        _ => None,
    });
    DraftNode {
        nid,
        cores,
        conns_per_peer,
        extensions,
        exports,
        copy,
        workload,
    }
}

fn export(mut section: Section<'_>, files: &mut Files<'_>) -> DraftExport {
    let name = section.need("name", "\"scratch\"", string);
    let portal = section.need("portal", "50", portal);
    let match_bits = section.need("match_bits", "0x1", bits);
    let piece = section.or("piece", DEFAULT_PIECE, piece);
    let writable = section.or("writable", false, boolean);
    let (has_file, has_size) = (section.has("file"), section.has("size"));
    let mut export = DraftExport {
        span: section.span(),
        name,
        portal,
        match_bits,
        piece,
        writable,
        is_file: has_file,
        file: None,
        length: None,
        overridden: false,
    };
    if has_file {
        let said = section.need("file", "\"../README.md\"", string);
        export.overridden = files.replacement.is_some();
        if let Some(path) = files
            .replacement
            .take()
            .map(PathBuf::from)
            .or_else(|| said.as_ref().map(|said| files.folder.join(&said.value)))
        {
            let span = said.map_or_else(|| section.span(), |said| said.span);
            export.length = files.length(&path, span, export.overridden);
            export.file = Some(path);
        }
        if has_size {
            let _: Option<At<()>> = section.or("size", (), |_| {
                Err(Wrong::new(
                    "and `file` exclude each other",
                    "a file has its own size",
                    "leave one of them out: file = \"..\" exports a file, size = \"..\" memory",
                ))
            });
        }
    } else {
        // Address space is what bounds it; a number beyond that is a slip.
        export.length = if has_size {
            section.need("size", "\"8 MiB\"", size(1 << 46))
        } else {
            let _: Option<At<()>> = section.need(
                "file",
                "\"../README.md\" for a file, or size = \"8 MiB\" for memory",
                |_| Ok(()),
            );
            None
        };
    }
    section.finish(|_| None);
    export
}

fn copy(mut section: Section<'_>, in_flight_default: u32) -> DraftCopy {
    let copy = DraftCopy {
        peer: section.need("peer", "\"10.0.0.1@o2ib\", a node of this file", nid),
        file: section.need(
            "file",
            "the name of an export of the peer with a file",
            string,
        ),
        into: section.need("into", "the name of a writable export of the peer", string),
        transfer: section.or("transfer", MAX_TRANSFER.into(), size(MAX_TRANSFER.into())),
        in_flight: section.or("in_flight", in_flight_default, integer(1..=MAX_IN_FLIGHT)),
        repeat: section.or("repeat", true, boolean),
    };
    section.finish(|_| None);
    copy
}

fn workload(mut section: Section<'_>, in_flight_default: u32) -> DraftWorkload {
    let workload = DraftWorkload {
        peer: section.need("peer", "\"10.0.0.1@o2ib\", a node of this file", nid),
        region: section.need(
            "region",
            "the name of a writable export of the peer",
            string,
        ),
        sizes: section.need("sizes", SIZES, array(size(MAX_TRANSFER.into()), SIZES)),
        weights: section.or(
            "weights",
            Vec::new(),
            array(integer(1..=1_000_000), "[3, 2, 1]"),
        ),
        put: section.or("put", 0.5, number(0.0..=1.0)),
        in_flight: section.or("in_flight", in_flight_default, integer(1..=MAX_IN_FLIGHT)),
        duration: section.or(
            "duration",
            Duration::from_secs(5),
            duration(Duration::from_millis(1)..=Duration::from_secs(30 * 86_400)),
        ),
        verify: section.or("verify", true, boolean),
        seed: section.or("seed", 1, bits),
        repeat: section.or("repeat", true, boolean),
    };
    section.finish(|_| None);
    workload
}

/// Files as exports need them.
struct Files<'a> {
    /// Where relative names start.
    folder: &'a Path,
    /// Instead of the next one.
    replacement: Option<&'a Path>,
    machine: &'a Machine<'a>,
    mistakes: &'a Mistakes,
}

impl Files<'_> {
    fn length(&self, path: &Path, span: Range<usize>, overridden: bool) -> Option<At<u64>> {
        let why = match (self.machine.file_size)(path) {
            Ok(0) => String::from("it is empty, and there is nothing to move"),
            Ok(length) => {
                return Some(At {
                    value: length,
                    span,
                    given: true,
                });
            }
            Err(error) => match error.kind() {
                io::ErrorKind::NotFound => String::from("there is no such file"),
                io::ErrorKind::PermissionDenied => String::from("this process may not read it"),
                io::ErrorKind::IsADirectory => String::from("it is a directory"),
                _ => error.to_string(),
            },
        };
        let (label, remedy) = if overridden {
            (
                "replaced by --export",
                "give --export a file that can be read; it is looked for from the working directory",
            )
        } else {
            (
                "",
                "name a file that can be read; it is looked for from the folder of the node file",
            )
        };
        self.mistakes.push(Diagnostic::new(
            format!("cannot export {}: {why}", path.display()),
            span,
            label,
            remedy,
        ));
        None
    }
}

fn nid(found: &DeValue<'_>) -> Result<Nid, Wrong> {
    let DeValue::String(text) = found else {
        return Err(Wrong::kind("a NID", found, "\"10.0.0.1@o2ib\""));
    };
    let wrong = |label: &str| {
        Wrong::new(
            "is not the NID of a node on o2ib",
            label,
            "as in \"10.0.0.1@o2ib\" or \"10.0.0.1@o2ib3\"",
        )
    };
    let nid: Nid = text.parse().map_err(|_| wrong(&not_a_nid(text)))?;
    let address = core::net::Ipv4Addr::from(nid.address());
    if nid.lnd() != O2IB {
        Err(wrong("a network of another kind"))
    } else if address.is_unspecified() || address.is_broadcast() || address.is_multicast() {
        Err(wrong("not the address of one machine"))
    } else {
        Ok(nid)
    }
}

fn portal(found: &DeValue<'_>) -> Result<u32, Wrong> {
    if let Ok(0) = integer(0..=0)(found) {
        return Err(Wrong::new(
            "is 0",
            "LNet's own: pings arrive there",
            format!("choose a value from 1 to {MAX_PORTAL}, as portal = 50"),
        ));
    }
    integer(1..=MAX_PORTAL)(found)
}

/// Whole pages, so that a piece of a file starts on one.
fn piece(found: &DeValue<'_>) -> Result<u64, Wrong> {
    let remedy = "whole pages of 4 KiB, and less than 4 GiB, as in \"1 GiB\"";
    let piece = size(u64::MAX)(found)?;
    if piece > u64::from(u32::MAX) {
        Err(Wrong::new(
            "is too large",
            "offsets on the wire have 32 bits",
            remedy,
        ))
    } else if piece.is_multiple_of(4096) {
        Ok(piece)
    } else {
        Err(Wrong::new("is not a multiple of 4 KiB", "", remedy))
    }
}

fn cores(machine: &Machine<'_>) -> impl Fn(&DeValue<'_>) -> Result<Cores, Wrong> {
    move |found| {
        let example = "[0], or \"auto\"";
        match found {
            DeValue::String(text) if text == "auto" => return Ok(Cores::Auto),
            DeValue::String(_) => {
                return Err(Wrong::new(
                    "must be \"auto\" or an array of cores",
                    "",
                    format!("as in {example}"),
                ));
            }
            _ => {}
        }
        let allowed = crate::check::numbers(&machine.allowed_cores);
        let one = |found: &DeValue<'_>| {
            let core = integer(0..=usize::MAX)(found)?;
            if machine.allowed_cores.contains(&core) {
                Ok(core)
            } else if core >= machine.present_cores {
                let last = machine.present_cores.saturating_sub(1);
                Err(Wrong::new(
                    "is not a core of this machine",
                    format!("the last one is {last}"),
                    format!("this process may run on {allowed}"),
                ))
            } else {
                Err(Wrong::new(
                    "is not allowed to this process",
                    "outside its affinity mask",
                    format!("it may run on {allowed}; taskset or the cpuset of its cgroup says so"),
                ))
            }
        };
        let listed = array(one, example)(found)?;
        let mut cores: Vec<usize> = Vec::new();
        for At { value: core, .. } in listed {
            if cores.contains(&core) {
                return Err(Wrong::new(
                    format!("names core {core} twice"),
                    "",
                    "one polling thread is all a core can use",
                ));
            }
            cores.push(core);
        }
        Ok(Cores::Listed(cores))
    }
}

/// The size that a file's pieces have if nothing is said.
const DEFAULT_PIECE: u64 = 1 << 30;

/// Most connections of a node to one peer.
const MOST_CONNS: u8 = 64;

const SIZES: &str = "[\"4 KiB\", \"1 MiB\"]";
