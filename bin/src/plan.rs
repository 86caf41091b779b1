//! What a node file asks for, in numbers: how many of everything, and what the device can hold of it.

mod fit;

use o2poll_config as config;
use o2poll_config::{Config, Content, Device, Machine, Placement, SoftProfile};
use o2poll_dataplane::memory::MESSAGE_BYTES;
use o2poll_dataplane::nic::Mechanisms;
use o2poll_dataplane::peer::Extensions;
use o2poll_dataplane::poller::{Shape, Sizes};
use o2poll_dataplane::registration::STAGE_BYTES;
use o2poll_dataplane::wire::Nid;
use o2poll_soft::{self as soft, Profile};

use self::fit::{changes, downwards, fit, lowered, short_keys, too_small};
use crate::NodeError;

/// A node file in numbers.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    /// Which core polls for which nodes.
    pub(crate) placement: Placement,
    /// The software device.
    pub(crate) profile: Profile,
    /// What every core holds, its entries aside.
    pub(crate) shape: Shape,
    /// No key outlives its transfer.
    pub(crate) keys_are_short: bool,
    /// What peers may reach beyond their transfers, as a sentence.
    pub(crate) exposure: Option<String>,
    /// What was made smaller than asked for, as sentences.
    pub(crate) notes: Vec<String>,
    /// Why not every transfer can have a key, as a sentence.
    pub(crate) short_keys: Option<String>,
}

impl Plan {
    /// Works it out.
    ///
    /// # Errors
    /// What cannot be done on this device, or not by this program.
    pub(crate) fn new(config: &Config, machine: &Machine<'_>) -> Result<Self, NodeError> {
        Self::for_connections(config, machine, connections(config))
    }

    /// Works it out as if each core had so many connections.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub(crate) fn for_connections(
        config: &Config,
        machine: &Machine<'_>,
        connections: usize,
    ) -> Result<Self, NodeError> {
        let Device::Soft(device) = &config.device else {
            return Err(NodeError::UnknownDevice);
        };
        let most = device.max_windows.unwrap_or(u32::MAX);
        let profile = profile(config)?;
        let mut plan = Self::on(config, machine, profile, most, connections)?;
        if let Some(short) = plan.short_keys.take() {
            return Err(NodeError::ShortKeys(short));
        }
        plan.try_out(|sizes| sizes.send_wr <= profile.granted_send_wr);
        Ok(plan)
    }

    /// Works it out for a device with the capabilities of this profile, and so many windows.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub(crate) fn on(
        config: &Config,
        machine: &Machine<'_>,
        profile: Profile,
        most: u32,
        connections: usize,
    ) -> Result<Self, NodeError> {
        let placement = config.placement(machine);
        one_writer_each(config)?;
        let tunables = &config.tunables;
        let wanted = Shape {
            connections,
            queue_depth: tunables.peer_credits.into(),
            writes_at_once: u16::from(tunables.concurrent_writes).min(MOST_WRITES),
            waiting: waiting(config),
            windows: 0,
            staging: config.memory.staging.into(),
            mappings: 0,
            register_source_from: if registers_sources(&profile) {
                tunables.register_sources_from
            } else {
                0
            },
            entries: 0,
        };
        let mut notes = Vec::new();
        let mut shape =
            fit(wanted, &profile).ok_or_else(|| Self::small_device(&wanted, &profile))?;
        notes.extend(lowered(wanted, shape, &profile));
        // Every transfer that a connection can carry at once may hold a window: our own, and the peer's.
        let on_queues = Mechanisms::FRAGMENTS | Mechanisms::PAGES | Mechanisms::WINDOW;
        let windows = if profile.capabilities.mechanisms.intersects(on_queues) {
            2 * shape.connections * usize::from(shape.queue_depth)
        } else {
            0
        };
        let most =
            usize::try_from(most.min(profile.capabilities.max_windows)).unwrap_or(usize::MAX);
        if windows != 0 && most < LEAST_WINDOWS {
            return Err(NodeError::FewWindows { most });
        }
        if windows > most {
            notes.push(format!(
                "the device has {most} windows where {windows} could be in use at a time: some transfers will wait \
                 for one"
            ));
        }
        shape.windows = windows.min(most);
        if profile
            .capabilities
            .mechanisms
            .contains(Mechanisms::MAPPINGS)
        {
            let pool = usize::try_from(tunables.fmr_pool_size).unwrap_or(usize::MAX);
            // Windows and mappings are of the same table.
            shape.mappings = pool.min(most.saturating_sub(shape.windows));
            if shape.mappings < pool {
                notes.push(format!(
                    "fmr_pool_size is {} instead of {pool}: max_windows of the device is {most}",
                    shape.mappings
                ));
            }
        }
        Ok(Self {
            placement,
            profile,
            shape,
            keys_are_short: config.memory.exposure == config::Exposure::None && shape.mappings == 0,
            exposure: exposure(config, &shape),
            short_keys: short_keys(config, &profile, &shape),
            notes,
        })
    }

    /// Lowers the WRITEs at a time where the device does not grant a queue pair of the full depth with so many, whatever it
    /// promises; `grants` makes one. What it still does not hold then is a matter of each connection's depth.
    pub(crate) fn try_out(&mut self, mut grants: impl FnMut(&Sizes) -> bool) {
        let asked = self.shape;
        let least = Shape {
            writes_at_once: 1,
            register_source_from: 0,
            ..asked
        };
        self.shape = downwards(asked)
            .find(|shape| grants(&shape.sizes()))
            .unwrap_or(least);
        let changes = changes(asked, self.shape);
        if !changes.is_empty() {
            self.notes.push(format!(
                "the device grants no queue pair with the {} send work requests of peer_credits = {} and \
                 concurrent_writes = {}: {}",
                asked.send_wr(),
                asked.queue_depth,
                asked.writes_at_once,
                changes.join(", ")
            ));
        }
    }

    /// What a node offers to nodes of its own kind. Keys of the arena outlive every transfer, so where they are given out
    /// no peer may kill what it is given.
    pub(crate) fn extensions(&self, node: &config::Node) -> Extensions {
        let mut offer = Extensions::empty();
        if node.extensions.send_with_invalidate && self.profile.capabilities.remote_invalidate {
            offer |= Extensions::SENDS_INVALIDATE;
            if self.keys_are_short {
                offer |= Extensions::KEYS_MAY_BE_KILLED;
            }
        }
        offer.set(
            Extensions::LAST_WRITE_IMMEDIATE,
            node.extensions.write_with_immediate,
        );
        offer
    }

    /// Not even one transfer of each connection fits: by which limits.
    pub(crate) fn small_device(wanted: &Shape, profile: &Profile) -> NodeError {
        let least = Shape {
            queue_depth: 1,
            writes_at_once: 1,
            register_source_from: 0,
            ..*wanted
        };
        NodeError::SmallDevice(too_small(&least, profile))
    }

    /// What one node holds.
    pub(crate) fn of(
        &self,
        node: &config::Node,
        application: &[usize],
    ) -> Result<Needs, NodeError> {
        let pieces: usize = node
            .exports
            .iter()
            .map(|export| export.pieces().count())
            .sum();
        let shape = Shape {
            entries: pieces + SPARE_ENTRIES,
            ..self.shape
        };
        let sizes = shape.sizes();
        let ranges = 2 + pieces + application.len() + 1;
        let narrow = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        let limits = soft::Limits {
            queue_pairs: narrow(sizes.connections),
            send_wr: sizes.send_wr,
            recv_wr: sizes.recv_wr,
            windows: narrow(sizes.regions.saturating_add(sizes.mappings)),
            memories: narrow(ranges),
            cqe: sizes.cqe,
        };
        let device = limits
            .sizes(&self.profile)
            .ok_or_else(|| NodeError::SmallDevice(too_small(&shape, &self.profile)))?;
        let exported = node
            .exports
            .iter()
            .filter(|export| matches!(export.content, Content::Memory))
            .flat_map(config::Export::pieces)
            .map(|piece| piece.length as usize);
        let messages = sizes.messages.saturating_mul(MESSAGE_BYTES);
        // One more, to begin on a boundary of their length, where they may go by page lists. What a window covers lies anywhere.
        let lists = Mechanisms::PAGES | Mechanisms::MAPPINGS;
        let aligns_staging = self.profile.capabilities.mechanisms.intersects(lists);
        let staging = match sizes.staging {
            0 => 0,
            buffers => buffers
                .saturating_add(usize::from(aligns_staging))
                .saturating_mul(STAGE_BYTES as usize),
        };
        let paged = |sum: usize, bytes: usize| sum.saturating_add(bytes.saturating_add(PAGE));
        let own_bytes = [messages, staging].into_iter().fold(0, paged);
        let bytes = exported
            .chain(application.iter().copied())
            .fold(own_bytes, paged);
        Ok(Needs {
            shape,
            sizes,
            limits,
            device,
            messages,
            staging,
            aligns_staging,
            own_bytes,
            bytes,
        })
    }
}

/// How much of everything one core of a node needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Needs {
    pub(crate) shape: Shape,
    pub(crate) sizes: Sizes,
    pub(crate) limits: soft::Limits,
    pub(crate) device: soft::Sizes,
    /// Bytes of message buffers.
    pub(crate) messages: usize,
    /// Bytes of staging buffers, and what it takes to begin them on a boundary.
    pub(crate) staging: usize,
    /// They begin on a boundary of their length.
    pub(crate) aligns_staging: bool,
    /// Bytes of its arena, if it is not the node's first core.
    pub(crate) own_bytes: usize,
    /// Bytes of the first core's arena, exported files aside.
    pub(crate) bytes: usize,
}

/// What outlives a transfer.
fn exposure(config: &Config, shape: &Shape) -> Option<String> {
    if config.memory.exposure == config::Exposure::Arena {
        return Some(String::from(
            "exposure = \"arena\": a peer that is told the key of the arena reaches all of it for as long as the node \
             runs",
        ));
    }
    let tunables = &config.tunables;
    let again = if tunables.fmr_cache {
        "and may serve the next transfer of the same memory"
    } else {
        "and serves no other transfer"
    };
    (shape.mappings != 0).then(|| {
        format!(
            "mappings: up to {} keys of a core are alive when their transfers have ended; each stays so until {} stand \
             unused (fmr_flush_trigger), {again} (fmr_cache = {})",
            shape.mappings, tunables.fmr_flush_trigger, tunables.fmr_cache
        )
    })
}

/// Whether a source can be registered for the device's own use.
const fn registers_sources(profile: &Profile) -> bool {
    let capabilities = &profile.capabilities;
    capabilities.mechanisms.contains(Mechanisms::FRAGMENTS) && capabilities.region_lkey
}

fn profile(config: &Config) -> Result<Profile, NodeError> {
    let Device::Soft(device) = &config.device else {
        return Err(NodeError::UnknownDevice);
    };
    let mut profile = profile_of(device.profile).ok_or(NodeError::UnknownDevice)?;
    if let Some(given) = device.max_qp {
        profile.max_qp = given;
    }
    if let Some(given) = device.granted_send_wr {
        profile.granted_send_wr = given;
    }
    let capabilities = &mut profile.capabilities;
    for (limit, given) in [
        (&mut capabilities.max_fragments, device.max_fragments),
        (&mut capabilities.max_pages, device.max_pages),
        (&mut capabilities.max_sge, device.max_sge),
        (&mut capabilities.max_send_wr, device.max_send_wr),
        (&mut capabilities.max_recv_wr, device.max_recv_wr),
        (&mut capabilities.max_cqe, device.max_cqe),
        (&mut capabilities.max_windows, device.max_windows),
    ] {
        if let Some(given) = given {
            *limit = given;
        }
    }
    Ok(profile)
}

/// `None` for a profile that this program does not know.
pub(crate) const fn profile_of(profile: SoftProfile) -> Option<Profile> {
    Some(match profile {
        SoftProfile::Frwr => Profile::frwr(),
        SoftProfile::Mlx5 => Profile::mlx5(),
        SoftProfile::Mlx4 => Profile::mlx4(),
        SoftProfile::Windows => Profile::windows(),
        SoftProfile::Rxe => Profile::rxe(),
        SoftProfile::Mthca => Profile::mthca(),
        SoftProfile::Bare => Profile::bare(),
        _ => return None,
    })
}

/// Connections that a core must hold: those that a node makes to every other and those that come from there, shared out
/// over its cores; the most of any node.
pub(crate) fn connections(config: &Config) -> usize {
    let conns = |node: &config::Node| usize::from(node.conns_per_peer);
    let sum: usize = config.nodes.iter().map(conns).sum();
    let others = config.nodes.len().saturating_sub(1);
    config
        .nodes
        .iter()
        .map(|node| {
            let all = conns(node) * others + (sum - conns(node));
            all.div_ceil(cores_of(node))
        })
        .fold(1, usize::max)
}

/// How many cores poll for a node.
pub(crate) fn cores_of(node: &config::Node) -> usize {
    match &node.cores {
        config::Cores::Auto => 1,
        config::Cores::Listed(cores) => cores.len().max(1),
    }
}

/// The core that is the `nth` of a node in the order of the file.
pub(crate) fn nth_of(node: &config::Node, core: usize) -> usize {
    match &node.cores {
        config::Cores::Auto => 0,
        config::Cores::Listed(cores) => cores.iter().position(|own| *own == core).unwrap_or(0),
    }
}

/// Transfers of an application that may wait for their turn.
fn waiting(config: &Config) -> usize {
    let jobs = config.nodes.iter().flat_map(|node| {
        let copy = node.copy.as_ref().map(|job| job.in_flight);
        let workload = node.workload.as_ref().map(|job| job.in_flight);
        [copy, workload]
    });
    let most = jobs.flatten().max().unwrap_or(0);
    usize::try_from(most).unwrap_or(0).max(64)
}

/// Two nodes that write to one export would each find what the other has written.
fn one_writer_each(config: &Config) -> Result<(), NodeError> {
    let mut writers: Vec<(config::ExportRef, Nid)> = Vec::new();
    for node in &config.nodes {
        let copy = node.copy.as_ref().map(|job| job.into);
        let workload = node.workload.as_ref().map(|job| job.region);
        for at in [copy, workload].into_iter().flatten() {
            match writers.iter().find(|(other, _)| *other == at) {
                Some((_, first)) if *first != node.nid => {
                    return Err(NodeError::TwoWriters {
                        first: *first,
                        second: node.nid,
                        export: config
                            .export(at)
                            .map_or_else(String::new, |export| export.name.clone()),
                    });
                }
                Some(_) => {}
                None => writers.push((at, node.nid)),
            }
        }
    }
    Ok(())
}

/// The data plane's limit of [`Shape::writes_at_once`].
const MOST_WRITES: u16 = 16;
/// Entries that an application may attach itself.
pub(crate) const SPARE_ENTRIES: usize = 16;
/// Own sinks and those of peers have half of the windows each: with one, two nodes that ask each other at the very same time
/// would wait until a timeout.
const LEAST_WINDOWS: usize = 2;
/// Ranges of an arena begin at a page.
const PAGE: usize = 4096;

#[cfg(test)]
mod tests {
    use super::{Plan, fit};
    use crate::NodeError;
    use o2poll_config::{Config, Machine};
    use o2poll_dataplane::poller::Shape;
    use o2poll_soft::Profile;
    use std::io;
    use std::path::Path;

    fn machine() -> Machine<'static> {
        Machine {
            allowed_cores: vec![0, 1],
            present_cores: 2,
            parallelism: 2,
            file_size: &|_| Err(io::ErrorKind::NotFound.into()),
        }
    }

    fn plan(text: &str) -> Result<Plan, NodeError> {
        let machine = machine();
        let config = Config::parse(text, Path::new("x.toml"), &machine)
            .unwrap_or_else(|report| panic!("{report}"));
        Plan::new(&config, &machine)
    }

    fn nodes(device: &str, first: &str) -> String {
        format!(
            "[device]\nsoft = {{ {device} }}\n[[node]]\nnid = \"10.0.0.1@o2ib\"\n{first}\n\
             [[node]]\nnid = \"10.0.0.2@o2ib\"\n"
        )
    }

    #[test]
    fn each_transfer_of_either_side_can_have_a_window() {
        let plan = plan(&nodes("", "")).unwrap();
        assert_eq!(plan.shape.connections, 2);
        assert_eq!(plan.shape.windows, 2 * 2 * 8);
        assert!(plan.notes.is_empty());
    }

    #[test]
    fn lu_7124_lu_10213_a_small_device_lowers_the_depth_and_says_so() {
        let plan = plan(&nodes("max_send_wr = 40", "")).unwrap();
        assert!(plan.shape.send_wr() <= 40);
        assert!(plan.shape.queue_depth < 8);
        assert!(
            plan.notes[0].contains("peer_credits is"),
            "{:?}",
            plan.notes
        );
    }

    #[test]
    fn few_windows_are_used_and_it_is_said() {
        let plan = plan(&nodes("max_windows = 3", "")).unwrap();
        assert_eq!(plan.shape.windows, 3);
        assert!(plan.notes[0].contains("3 windows"), "{:?}", plan.notes);
    }

    #[test]
    fn a_device_that_is_too_small_is_refused_by_the_limit_that_is_too_small() {
        for (device, said) in [
            (
                "max_cqe = 16",
                "max_cqe of the device is 16, and 26 are needed;",
            ),
            ("max_qp = 1", "max_qp of the device is 1, and 2 are needed;"),
        ] {
            let error = plan(&nodes(device, "")).unwrap_err().to_string();
            assert!(error.contains(said), "{error}");
            let others = ["max_send_wr", "max_recv_wr", "max_cqe", "max_qp"];
            let named = others.iter().filter(|limit| error.contains(**limit));
            assert_eq!(named.count(), 1, "{error}");
        }
    }

    #[test]
    fn a_device_whose_keys_are_too_short_for_a_megabyte_is_refused_with_limit_and_remedy() {
        let with = |device: &str, memory: &str| {
            let text = format!("[memory]\n{memory}\n{}", nodes(device, ""));
            plan(&text).map(|_| ()).map_err(|error| error.to_string())
        };
        let said = with("profile = \"mthca\", max_pages = 1", "").unwrap_err();
        assert_eq!(
            said,
            "max_pages of the device is 1, and 1 MiB is 256 pages: a transfer of more than 4096 bytes may be refused, \
             however its memory lies; raise max_pages to 256, or write exposure = \"arena\" under [memory], which gives \
             peers the key of all of it"
        );
        let said = with("profile = \"mthca\", max_pages = 255", "").unwrap_err();
        assert!(said.contains("more than 1044480 bytes"), "{said}");
        for (device, memory) in [
            ("profile = \"mthca\", max_pages = 256", ""),
            ("profile = \"mthca\", max_pages = 1", "exposure = \"arena\""),
            // Larger pages do for a staging buffer.
            ("profile = \"mlx4\", max_pages = 1", ""),
            ("profile = \"windows\"", "staging = 0"),
        ] {
            assert_eq!(with(device, memory), Ok(()), "{device}");
        }
        let said = with("profile = \"mlx4\", max_pages = 1", "staging = 0").unwrap_err();
        assert!(said.contains("set staging under [memory]"), "{said}");
    }

    #[test]
    fn a_device_with_a_single_window_is_refused_as_a_node_file_is() {
        let on = |most: u32| {
            let machine = machine();
            let config = Config::parse(&nodes("", ""), Path::new("x.toml"), &machine)
                .unwrap_or_else(|report| panic!("{report}"));
            Plan::on(&config, &machine, Profile::windows(), most, 2)
        };
        let error = on(1).unwrap_err();
        assert!(matches!(error, NodeError::FewWindows { most: 1 }));
        assert!(error.to_string().contains("max_mw"), "{error}");
        assert!(
            error.to_string().contains("has one memory window,"),
            "{error}"
        );
        let error = on(0).unwrap_err();
        assert!(matches!(error, NodeError::FewWindows { most: 0 }));
        assert!(
            error.to_string().contains("has no memory windows,"),
            "{error}"
        );
        assert_eq!(on(2).unwrap().shape.windows, 2);
        // Its own limit counts as well.
        let mut profile = Profile::windows();
        profile.capabilities.max_windows = 1;
        let machine = machine();
        let config = Config::parse(&nodes("", ""), Path::new("x.toml"), &machine)
            .unwrap_or_else(|report| panic!("{report}"));
        assert!(Plan::on(&config, &machine, profile, u32::MAX, 2).is_err());
    }

    #[test]
    fn a_device_that_holds_no_transfer_fits_nothing() {
        let mut profile = Profile::frwr();
        let wanted = Shape {
            connections: 1,
            queue_depth: 8,
            writes_at_once: 4,
            waiting: 1,
            windows: 1,
            staging: 0,
            mappings: 0,
            register_source_from: 0,
            entries: 1,
        };
        assert_eq!(fit(wanted, &profile), Some(wanted));
        profile.capabilities.max_send_wr = 3;
        assert_eq!(fit(wanted, &profile), None);
    }

    #[test]
    fn connections_are_shared_out_over_the_cores_of_a_node() {
        let of = |first: &str, tunables: &str| {
            let text = format!("[tunables]\n{tunables}\n{}", nodes("", first));
            plan(&text).unwrap().shape.connections
        };
        assert_eq!(of("", ""), 2);
        assert_eq!(of("conns_per_peer = 3", ""), 4);
        assert_eq!(of("", "conns_per_peer = 4"), 8);
        // The second node has one core for all eight.
        assert_eq!(of("cores = [0, 1]", "conns_per_peer = 4"), 8);
        let both = nodes("", "cores = [0]\nconns_per_peer = 2");
        assert_eq!(plan(&both).unwrap().shape.windows, 2 * 3 * 8);
    }

    #[test]
    fn two_nodes_may_not_write_to_one_export() {
        let job = |last: u8| {
            format!(
                "[[node]]\nnid = \"10.0.0.{last}@o2ib\"\n[node.workload]\npeer = \"10.0.0.1@o2ib\"\n\
                 region = \"r\"\nsizes = [\"4 KiB\"]\n"
            )
        };
        let text = format!(
            "[device]\nsoft = {{}}\n[[node]]\nnid = \"10.0.0.1@o2ib\"\n[[node.export]]\nname = \"r\"\nportal = 9\n\
             match_bits = 0x1\nsize = \"1 MiB\"\nwritable = true\n{}{}",
            job(2),
            job(3)
        );
        let error = plan(&text).unwrap_err();
        assert!(
            matches!(&error, NodeError::TwoWriters { export, .. } if export == "r"),
            "{error}"
        );
    }
}
