//! What must agree with what: nodes with each other and with the machine, jobs with what they name.

use crate::Machine;
use crate::document::{Draft, DraftCopy, DraftExport, DraftNode, DraftWorkload};
use crate::model::{
    Config, Content, CopyJob, Cores, Device, Export, ExportRef, Exposure, MAX_PIECES, Node,
    SoftProfile, WeightedSize, Workload,
};
use crate::reader::{At, Mistakes};
use crate::report::Diagnostic;
use crate::units::{nearest, round_up_size, show_size};
use core::fmt::Display;
use core::ops::Range;
use o2poll_dataplane::endpoint::{MatchBits, Portal};
use o2poll_dataplane::wire::Nid;
use std::path::Path;

/// Compares, and builds the configuration. `None` goes with a mistake that is written down, here or earlier.
pub(crate) fn check(
    draft: &Draft,
    origin: &Path,
    machine: &Machine<'_>,
    mistakes: &Mistakes,
) -> Option<Config> {
    way_to_large_buffers(draft, mistakes);
    distinct_nids(draft, mistakes);
    distinct_cores(draft, machine, mistakes);
    let nodes: Vec<Option<Node>> = draft
        .nodes
        .iter()
        .enumerate()
        .map(|(index, node)| {
            distinct_names(node, mistakes);
            let exports: Vec<Option<Export>> = node
                .exports
                .iter()
                .map(|draft| export(draft, mistakes))
                .collect();
            distinct_entries(node, mistakes);
            let jobs = Jobs {
                draft,
                index,
                mistakes,
            };
            // A job that is there and wrong is `Some(None)`, and so is the node then.
            let copy = node.copy.as_ref().map(|copy| jobs.copy(copy));
            let workload = node
                .workload
                .as_ref()
                .map(|workload| jobs.workload(workload));
            Some(Node {
                nid: node.nid.as_ref()?.value,
                cores: node.cores.as_ref()?.value.clone(),
                conns_per_peer: node.conns_per_peer?,
                extensions: node.extensions?,
                exports: exports.into_iter().collect::<Option<_>>()?,
                copy: match copy {
                    None => None,
                    Some(job) => Some(job?),
                },
                workload: match workload {
                    None => None,
                    Some(job) => Some(job?),
                },
            })
        })
        .collect();
    Some(Config {
        origin: origin.to_owned(),
        device: draft.device.as_ref()?.value.clone(),
        memory: draft.memory?,
        tunables: draft.tunables?,
        nodes: nodes.into_iter().collect::<Option<_>>()?,
    })
}

/// A device that has nothing but the arena's key moves no more than fits a message if that key is not given out.
fn way_to_large_buffers(draft: &Draft, mistakes: &Mistakes) {
    let (Some(device), Some(exposure)) = (&draft.device, &draft.exposure) else {
        return;
    };
    let Device::Soft(soft) = &device.value else {
        return;
    };
    if soft.profile == SoftProfile::Bare && exposure.value == Exposure::None {
        mistakes.push(
            Diagnostic::new(
                if draft.profile_overridden {
                    "--profile bare cannot put a key over one buffer"
                } else {
                    "the profile `bare` cannot put a key over one buffer"
                },
                device.span.clone(),
                "nothing but the key of the whole arena",
                "write exposure = \"arena\" under [memory], which gives that key to every peer, or choose another profile",
            )
            .and_if(exposure.given, &exposure.span, "forbids that key"),
        );
    }
    // Mappings are its only keys; the default is not 0.
    if soft.profile == SoftProfile::Mthca
        && exposure.value == Exposure::None
        && let Some(tunables) = &draft.tunables
        && tunables.fmr_pool_size == 0
    {
        mistakes.push(
            Diagnostic::new(
                if draft.profile_overridden {
                    "--profile mthca cannot put a key over one buffer with fmr_pool_size = 0"
                } else {
                    "the profile `mthca` cannot put a key over one buffer with fmr_pool_size = 0"
                },
                device.span.clone(),
                "nothing but mappings and the key of the whole arena",
                "leave fmr_pool_size out, or write exposure = \"arena\" under [memory], which gives that key to every peer",
            )
            .and_if(exposure.given, &exposure.span, "forbids that key"),
        );
    }
}

fn distinct_nids(draft: &Draft, mistakes: &Mistakes) {
    let nids: Vec<&At<Nid>> = draft
        .nodes
        .iter()
        .filter_map(|node| node.nid.as_ref())
        .collect();
    for (i, nid) in nids.iter().enumerate() {
        if let Some(first) = nids.iter().take(i).find(|first| first.value == nid.value) {
            mistakes.push(
                Diagnostic::new(
                    format!("a second node is named {}", nid.value),
                    nid.span.clone(),
                    "",
                    "give each node a NID of its own",
                )
                .and(first.span.clone(), "the first one"),
            );
        }
    }
}

/// Two pollers on one core take turns of milliseconds, and each looks dead to the other meanwhile. Where
/// there is one core only there is no choice, and the placement puts both into one thread.
fn distinct_cores(draft: &Draft, machine: &Machine<'_>, mistakes: &Mistakes) {
    if machine.allowed_cores.len() <= 1 {
        return;
    }
    let mut taken: Vec<(usize, &Range<usize>)> = Vec::new();
    for node in &draft.nodes {
        let Some(At {
            value: Cores::Listed(cores),
            span,
            ..
        }) = &node.cores
        else {
            continue;
        };
        for core in cores {
            match taken.iter().find(|(other, _)| other == core) {
                Some((_, first)) => mistakes.push(
                    Diagnostic::new(
                        format!("core {core} polls for another node already"),
                        span.clone(),
                        "",
                        format!(
                            "choose another of {}, or cores = \"auto\", which shares a polling thread where it must",
                            numbers(&machine.allowed_cores)
                        ),
                    )
                    .and((*first).clone(), "listed here first"),
                ),
                None => taken.push((*core, span)),
            }
        }
    }
}

fn distinct_names(node: &DraftNode, mistakes: &Mistakes) {
    let names: Vec<&At<String>> = node
        .exports
        .iter()
        .filter_map(|export| export.name.as_ref())
        .collect();
    for (i, name) in names.iter().enumerate() {
        if let Some(first) = names.iter().take(i).find(|first| first.value == name.value) {
            mistakes.push(
                Diagnostic::new(
                    format!("this node has two exports named `{}`", name.value),
                    name.span.clone(),
                    "",
                    "give each export of a node a name of its own",
                )
                .and(first.span.clone(), "the first one"),
            );
        }
    }
}

/// A match entry that never matches because another stands before it.
fn distinct_entries(node: &DraftNode, mistakes: &Mistakes) {
    let mut taken: Vec<(u32, u64, u64, &Range<usize>)> = Vec::new();
    for export in &node.exports {
        let (Some(portal), Some(first), Some(count)) =
            (&export.portal, &export.match_bits, pieces(export))
        else {
            continue;
        };
        let last = first.value.saturating_add(count.saturating_sub(1));
        let clash = taken.iter().find(|(other, from, to, _)| {
            *other == portal.value && *from <= last && first.value <= *to
        });
        if let Some((_, from, to, span)) = clash {
            mistakes.push(
                Diagnostic::new(
                    format!(
                        "two exports of this node answer to the same match bits on portal {}",
                        portal.value
                    ),
                    first.span.clone(),
                    format!("takes {}", span_of_bits(first.value, last)),
                    format!(
                        "begin at {:#x}, or choose another portal",
                        to.saturating_add(1)
                    ),
                )
                .and(
                    (*span).clone(),
                    format!("takes {}", span_of_bits(*from, *to)),
                ),
            );
        }
        taken.push((portal.value, first.value, last, &first.span));
    }
}

fn export(draft: &DraftExport, mistakes: &Mistakes) -> Option<Export> {
    let mut sound = true;
    if let (Some(writable), true) = (&draft.writable, draft.is_file)
        && writable.value
    {
        sound = false;
        mistakes.push(Diagnostic::new(
            "an exported file cannot be writable",
            writable.span.clone(),
            "",
            "leave it out; peers PUT into memory, an export with size = \"..\"",
        ));
    }
    if let (Some(length), Some(piece), Some(count)) = (&draft.length, &draft.piece, pieces(draft)) {
        if count > MAX_PIECES {
            sound = false;
            mistakes.push(
                Diagnostic::new(
                    format!("this export takes {count} entries"),
                    length.span.clone(),
                    format!("{} in pieces of {}", show_size(length.value), show_size(piece.value)),
                    format!("one export takes at most {MAX_PIECES}: choose a larger piece, less than 4 GiB, or export less"),
                )
                .and_if(piece.given, &piece.span, "pieces are this long"),
            );
        } else if let Some(first) = &draft.match_bits
            && first.value.checked_add(count.saturating_sub(1)).is_none()
        {
            sound = false;
            mistakes.push(
                Diagnostic::new(
                    "the match bits of this export run past 64 bits",
                    first.span.clone(),
                    format!("{count} pieces from here on"),
                    "begin lower, or choose a larger piece",
                )
                .and(length.span.clone(), show_size(length.value)),
            );
        }
    }
    let content = match (&draft.file, draft.is_file) {
        (Some(path), _) => Content::File(path.clone()),
        (None, false) => Content::Memory,
        (None, true) => return None,
    };
    sound.then_some(Export {
        name: draft.name.as_ref()?.value.clone(),
        portal: Portal(draft.portal.as_ref()?.value),
        match_bits: MatchBits(draft.match_bits.as_ref()?.value),
        content,
        length: draft.length.as_ref()?.value,
        piece: u32::try_from(draft.piece.as_ref()?.value).ok()?,
        writable: draft.writable.as_ref()?.value,
    })
}

/// Jobs of one node.
struct Jobs<'a> {
    draft: &'a Draft,
    /// Which node.
    index: usize,
    mistakes: &'a Mistakes,
}

impl<'a> Jobs<'a> {
    fn copy(&self, job: &DraftCopy) -> Option<CopyJob> {
        let peer = self.peer(job.peer.as_ref());
        let file = peer.and_then(|peer| self.export(peer, job.file.as_ref()?));
        let into = peer.and_then(|peer| self.export(peer, job.into.as_ref()?));
        let mut sound = true;
        if let (Some((_, export)), Some(name)) = (file, &job.file)
            && !export.is_file
        {
            sound = false;
            self.mistakes.push(
                Diagnostic::new(
                    format!("`{}` is not a file", name.value),
                    name.span.clone(),
                    "",
                    "name an export with file = \"..\": the job compares what arrives with the file itself",
                )
                .and(export.span.clone(), "memory"),
            );
        }
        if let (Some((_, export)), Some(name)) = (into, &job.into) {
            sound &= self.writable(export, name);
            if let Some((_, file)) = file
                && let (Some(needed), Some(room)) = (&file.length, &export.length)
                && file.is_file
                && needed.value > room.value
                && !export.is_file
            {
                sound = false;
                let what = match (&file.file, file.overridden) {
                    (Some(path), true) => {
                        format!("--export {}: {}", path.display(), show_size(needed.value))
                    }
                    _ => show_size(needed.value),
                };
                self.mistakes.push(
                    Diagnostic::new(
                        format!(
                            "`{}` has room for {}, and the file has {}",
                            name.value,
                            show_size(room.value),
                            show_size(needed.value)
                        ),
                        room.span.clone(),
                        show_size(room.value),
                        format!("give it size = \"{}\"", round_up_size(needed.value)),
                    )
                    .and(needed.span.clone(), what)
                    .and(name.span.clone(), "the copy goes here"),
                );
            }
        }
        sound.then_some(CopyJob {
            peer: job.peer.as_ref()?.value,
            file: file?.0,
            into: into?.0,
            transfer: u32::try_from(job.transfer.as_ref()?.value).ok()?,
            in_flight: job.in_flight.as_ref()?.value,
            repeat: job.repeat.as_ref()?.value,
        })
    }

    fn workload(&self, job: &DraftWorkload) -> Option<Workload> {
        let peer = self.peer(job.peer.as_ref());
        let region = peer.and_then(|peer| self.export(peer, job.region.as_ref()?));
        let mut sound = true;
        if let (Some((_, export)), Some(name)) = (region, &job.region) {
            sound &= self.writable(export, name);
            if let (Some(room), Some(sizes), Some(in_flight)) =
                (&export.length, &job.sizes, &job.in_flight)
                && let Some(largest) = sizes.value.iter().max_by_key(|size| size.value)
                && !export.is_file
            {
                let needed = largest.value.saturating_mul(in_flight.value.into());
                if needed > room.value {
                    sound = false;
                    self.mistakes.push(
                        Diagnostic::new(
                            format!(
                                "`{}` has room for {}, and {} transfers of {} side by side need {}",
                                name.value,
                                show_size(room.value),
                                in_flight.value,
                                show_size(largest.value),
                                show_size(needed)
                            ),
                            room.span.clone(),
                            show_size(room.value),
                            format!(
                                "give it size = \"{}\", or the workload a smaller in_flight",
                                round_up_size(needed)
                            ),
                        )
                        .and(largest.span.clone(), "the largest size")
                        .and_if(
                            in_flight.given,
                            &in_flight.span,
                            "so many at a time",
                        ),
                    );
                }
            }
        }
        if let (Some(sizes), Some(weights)) = (&job.sizes, &job.weights)
            && weights.given
            && weights.value.len() != sizes.value.len()
        {
            sound = false;
            self.mistakes.push(
                Diagnostic::new(
                    "`weights` does not have one weight for each size",
                    weights.span.clone(),
                    format!("{} of these", weights.value.len()),
                    "give as many weights as sizes, or leave them out and all are equal",
                )
                .and(
                    sizes.span.clone(),
                    format!("{} of these", sizes.value.len()),
                ),
            );
        }
        let weights = &job.weights.as_ref()?.value;
        let sizes = job
            .sizes
            .as_ref()?
            .value
            .iter()
            .enumerate()
            .map(|(i, size)| {
                Some(WeightedSize {
                    bytes: u32::try_from(size.value).ok()?,
                    weight: weights.get(i).map_or(1, |weight| weight.value),
                })
            })
            .collect::<Option<_>>()?;
        sound.then_some(Workload {
            peer: job.peer.as_ref()?.value,
            region: region?.0,
            sizes,
            put: job.put.as_ref()?.value,
            in_flight: job.in_flight.as_ref()?.value,
            duration: job.duration.as_ref()?.value,
            verify: job.verify.as_ref()?.value,
            seed: job.seed.as_ref()?.value,
            repeat: job.repeat.as_ref()?.value,
        })
    }

    /// Index of the node that a job talks to.
    fn peer(&self, peer: Option<&At<Nid>>) -> Option<usize> {
        let peer = peer?;
        let nids = || {
            self.draft
                .nodes
                .iter()
                .map(|node| node.nid.as_ref().map(|nid| nid.value))
        };
        let wrong = |title: String, remedy: String| {
            self.mistakes
                .push(Diagnostic::new(title, peer.span.clone(), "", remedy));
            None
        };
        let others: Vec<Nid> = nids()
            .enumerate()
            .filter(|(index, _)| *index != self.index)
            .filter_map(|(_, nid)| nid)
            .collect();
        let Some(index) = nids().position(|nid| nid == Some(peer.value)) else {
            // It may be the node whose own NID could not be read.
            if nids().any(|nid| nid.is_none()) {
                return None;
            }
            return wrong(
                format!("no node of this file is named {}", peer.value),
                if others.is_empty() {
                    String::from(
                        "add a second [[node]] with this NID: nodes are joined within one file",
                    )
                } else {
                    format!("the other nodes are {}", numbers(&others))
                },
            );
        };
        if index == self.index {
            return wrong(
                String::from("a node is not its own peer"),
                if others.is_empty() {
                    String::from(
                        "add a second [[node]]: the software device joins the nodes of one file",
                    )
                } else {
                    format!("the other nodes are {}", numbers(&others))
                },
            );
        }
        let own = self.draft.nodes.get(self.index)?.nid.as_ref()?;
        if own.value.number() != peer.value.number() {
            self.mistakes.push(
                Diagnostic::new(
                    format!("{} is on another network", peer.value),
                    peer.span.clone(),
                    "",
                    "give both NIDs the same network, as in @o2ib: nothing routes between networks",
                )
                .and(own.span.clone(), "this node"),
            );
            return None;
        }
        Some(index)
    }

    /// The peer's export of this name.
    fn export(&self, node: usize, name: &At<String>) -> Option<(ExportRef, &'a DraftExport)> {
        let exports = &self.draft.nodes.get(node)?.exports;
        let names = || {
            exports
                .iter()
                .map(|export| export.name.as_ref().map(|name| name.value.as_str()))
        };
        if let Some(export) = names().position(|other| other == Some(&name.value)) {
            return Some((ExportRef { node, export }, exports.get(export)?));
        }
        // It may be the one whose name could not be read.
        if names().all(|name| name.is_some()) {
            let known: Vec<&str> = names().flatten().collect();
            self.mistakes.push(Diagnostic::new(
                format!("the peer exports nothing named `{}`", name.value),
                name.span.clone(),
                nearest(&name.value, known.iter().copied())
                    .map_or_else(String::new, |meant| format!("did you mean \"{meant}\"?")),
                if known.is_empty() {
                    String::from("it exports nothing at all: add a [[node.export]] to it")
                } else {
                    format!("it exports {}", numbers(&known))
                },
            ));
        }
        None
    }

    fn writable(&self, export: &DraftExport, name: &At<String>) -> bool {
        let Some(writable) = &export.writable else {
            return true;
        };
        if export.is_file {
            self.mistakes.push(
                Diagnostic::new(
                    format!("`{}` is a file, and peers PUT into memory only", name.value),
                    name.span.clone(),
                    "",
                    "name an export with size = \"..\" and writable = true",
                )
                .and(export.span.clone(), "this export"),
            );
            return false;
        }
        if !writable.value {
            self.mistakes.push(
                Diagnostic::new(
                    format!("`{}` is not writable", name.value),
                    name.span.clone(),
                    "",
                    if writable.given {
                        "make it writable = true"
                    } else {
                        "add writable = true to the export"
                    },
                )
                .and(
                    writable.span.clone(),
                    if writable.given { "" } else { "this export" },
                ),
            );
            return false;
        }
        true
    }
}

/// Entries that the export takes.
fn pieces(export: &DraftExport) -> Option<u64> {
    let piece = export.piece.as_ref()?.value;
    Some(export.length.as_ref()?.value.div_ceil(piece.max(1)))
}

fn span_of_bits(first: u64, last: u64) -> String {
    if first == last {
        format!("{first:#x}")
    } else {
        format!("{first:#x} to {last:#x}, one for each piece")
    }
}

/// `0, 1 and 4`
pub(crate) fn numbers<T: Display>(items: &[T]) -> String {
    match items {
        [] => String::from("none"),
        [only] => only.to_string(),
        [most @ .., last] => {
            let most: Vec<String> = most.iter().map(ToString::to_string).collect();
            format!("{} and {last}", most.join(", "))
        }
    }
}
