//! What fits a device, what is lowered so that it does, and what is said of it.

use o2poll_config as config;
use o2poll_config::Config;
use o2poll_dataplane::nic::Capabilities;
use o2poll_dataplane::poller::Shape;
use o2poll_dataplane::registration::{Choices, Outline, STAGE_BYTES, Settings, Stock};
use o2poll_dataplane::wire::IMMEDIATE_PAYLOAD;
use o2poll_soft::Profile;

/// The largest shape of `wanted`'s kind whose queues the device can hold. Depth is worth more than
/// WRITEs at a time.
pub(super) fn fit(wanted: Shape, profile: &Profile) -> Option<Shape> {
    (1..=wanted.queue_depth).rev().find_map(|queue_depth| {
        downwards(Shape {
            queue_depth,
            ..wanted
        })
        .find(|shape| exceeded(shape, profile).next().is_none())
    })
}

/// Shapes of the same depth, the largest first. WRITEs at a time are worth more than the registration of sources.
pub(super) fn downwards(wanted: Shape) -> impl Iterator<Item = Shape> {
    (1..=wanted.writes_at_once)
        .rev()
        .flat_map(move |writes_at_once| {
            [wanted.register_source_from, 0].map(|register_source_from| Shape {
                writes_at_once,
                register_source_from,
                ..wanted
            })
        })
}

/// The limits of the device that a shape does not keep: name, value, and what it would need.
fn exceeded(shape: &Shape, profile: &Profile) -> impl Iterator<Item = (&'static str, u32, u32)> {
    let sizes = shape.sizes();
    let capabilities = &profile.capabilities;
    [
        ("max_send_wr", capabilities.max_send_wr, sizes.send_wr),
        ("max_recv_wr", capabilities.max_recv_wr, sizes.recv_wr),
        ("max_cqe", capabilities.max_cqe, sizes.cqe),
        (
            "max_qp",
            profile.max_qp,
            u32::try_from(sizes.connections).unwrap_or(u32::MAX),
        ),
    ]
    .into_iter()
    .filter(|(_, limit, need)| need > limit)
}

/// The limits that a shape does not keep, as a sentence.
pub(super) fn too_small(shape: &Shape, profile: &Profile) -> String {
    let limits: Vec<String> = exceeded(shape, profile)
        .map(|(name, limit, need)| {
            format!("{name} of the device is {limit}, and {need} are needed")
        })
        .collect();
    if limits.is_empty() {
        return String::from("its tables would be larger than 2^22 entries");
    }
    limits.join("; ")
}

/// What was lowered, and by which limit, in a line (LU-7124, LU-10213, LU-12901: ko2iblnd did it without a word).
pub(super) fn lowered(wanted: Shape, shape: Shape, profile: &Profile) -> Option<String> {
    let changes = changes(wanted, shape);
    if changes.is_empty() {
        return None;
    }
    let limits = too_small(&wanted, profile);
    Some(format!("{limits}: {}", changes.join(", ")))
}

/// What differs of what was wanted.
pub(super) fn changes(wanted: Shape, shape: Shape) -> Vec<String> {
    let (depth, writes) = (wanted.queue_depth, wanted.writes_at_once);
    let mut changes = Vec::new();
    if shape.queue_depth != depth {
        changes.push(format!(
            "peer_credits is {} instead of {depth}",
            shape.queue_depth
        ));
    }
    if shape.writes_at_once != writes {
        changes.push(format!(
            "concurrent_writes is {} instead of {writes}",
            shape.writes_at_once
        ));
    }
    if shape.register_source_from != wanted.register_source_from {
        changes.push(String::from("sources are not registered"));
    }
    changes
}

/// Why a transfer of 1 MiB, contiguous as it may be, is not covered by a key: what is asked is the data plane's own table.
pub(super) fn short_keys(config: &Config, profile: &Profile, shape: &Shape) -> Option<String> {
    let capabilities = &profile.capabilities;
    let tunables = &config.tunables;
    let exposed = config.memory.exposure == config::Exposure::Arena;
    let settings = Settings {
        expose_arena: exposed,
        map_on_demand: tunables.map_on_demand,
        ..Settings::PRIVATE
    };
    let covers = |capabilities: &Capabilities, staging: usize, length: u32| {
        let stock = Stock {
            // On a boundary of their length, where that is of use.
            staging: (staging != 0).then_some(STAGE_SHIFT),
            mappings: shape.mappings != 0,
        };
        let outline = Outline {
            exposed,
            ..Outline::contiguous(length, 0, capabilities.page_shift)
        };
        let choices = Choices::new(capabilities, settings, tunables.max_frags, stock);
        choices.choose(&outline).is_ok()
    };
    if covers(capabilities, shape.staging, STAGE_BYTES) {
        return None;
    }
    let pages = 1_u32 << STAGE_SHIFT.saturating_sub(capabilities.page_shift);
    let longest = (1..=pages)
        .rev()
        .map(|count| count << capabilities.page_shift)
        .find(|length| covers(capabilities, shape.staging, *length))
        .map_or(IMMEDIATE_PAYLOAD, |length| length.max(IMMEDIATE_PAYLOAD));
    let long_lists = Capabilities {
        max_pages: pages,
        ..*capabilities
    };
    let mut remedies = Vec::new();
    let limit = if covers(&long_lists, shape.staging, STAGE_BYTES) {
        remedies.push(format!("raise max_pages to {pages}"));
        format!(
            "max_pages of the device is {}, and 1 MiB is {pages} pages",
            capabilities.max_pages
        )
    } else {
        String::from("the device can put no key over 1 MiB")
    };
    if shape.staging == 0 && covers(capabilities, 1, STAGE_BYTES) {
        remedies.push(String::from("set staging under [memory] to 1 or more"));
    }
    remedies.push(String::from(
        "write exposure = \"arena\" under [memory], which gives peers the key of all of it",
    ));
    Some(format!(
        "{limit}: a transfer of more than {longest} bytes may be refused, however its memory lies; {}",
        remedies.join(", or ")
    ))
}

/// log2 of the length of a staging buffer.
const STAGE_SHIFT: u8 = 20;
const _: () = assert!(1 << STAGE_SHIFT == STAGE_BYTES);
