//! [device]: the software device with its limits, or an RDMA device by its name.

use toml::de::DeValue;

use crate::model::{Device, Soft, SoftProfile};
use crate::reader::{At, Mistakes, Section, Wrong, choice, integer};
use crate::report::Diagnostic;

pub(super) fn device(
    mut section: Section<'_>,
    replacement: Option<SoftProfile>,
    mistakes: &Mistakes,
) -> Option<At<Device>> {
    let soft = section
        .table("soft", "`soft`", "soft = { profile = \"frwr\" }")
        .map(|section| soft(section, replacement));
    if section.has("verbs") {
        let verbs = section.or("verbs", String::new(), verbs);
        if let Some(name) = verbs {
            if section.has("soft") {
                mistakes.push(Diagnostic::new(
                    "[device] names two devices",
                    section.span(),
                    "",
                    "leave soft or verbs out",
                ));
            }
            section.finish(|_| None);
            return Some(At {
                value: Device::Verbs(name.value),
                span: name.span,
                given: name.given,
            });
        }
    } else if !section.has("soft") {
        mistakes.push(Diagnostic::new(
            "[device] names no device",
            section.span(),
            "",
            "add soft = { profile = \"frwr\" }",
        ));
    }
    section.finish(|_| None);
    soft.flatten()
}

fn verbs(found: &DeValue<'_>) -> Result<String, Wrong> {
    if !cfg!(feature = "verbs") {
        return Err(Wrong::new(
            "is not in this build",
            "a device of libibverbs",
            "use soft = { profile = \"frwr\" }, the software device, or build with `cargo build --features verbs`",
        ));
    }
    match found {
        DeValue::String(name) if !name.is_empty() => Ok(name.to_string()),
        _ => Err(Wrong::kind("the name of a device", found, "\"rxe0\"")),
    }
}

/// Stands where its profile does.
fn soft(mut section: Section<'_>, replacement: Option<SoftProfile>) -> Option<At<Device>> {
    let names = SoftProfile::ALL.map(|profile| (profile.name(), profile));
    let profile = section.or("profile", SoftProfile::Frwr, choice(&names));
    let mut limit = |key, range| {
        section
            .or(key, None, |found| integer(range)(found).map(Some))
            .map(|at| at.value)
    };
    let max_fragments = limit("max_fragments", 1..=257);
    let max_pages = limit("max_pages", 1..=257);
    let max_sge = limit("max_sge", 1..=257);
    let max_send_wr = limit("max_send_wr", 16..=65_536);
    let max_recv_wr = limit("max_recv_wr", 4..=65_536);
    let max_cqe = limit("max_cqe", 16..=4_194_304);
    // One for each direction at least: the GETs of two nodes could hold the only window of each while their PUTs wait for it.
    let max_windows = limit("max_windows", 2..=1_048_576);
    let max_qp = limit("max_qp", 1..=1_048_576);
    let granted_send_wr = limit("granted_send_wr", 16..=65_536);
    section.finish(|key| match key {
        "max_qp_wr" => Some("it has two names here: max_send_wr and max_recv_wr"),
        "windows" => Some("it is named max_windows"),
        "max_mr" | "max_mw" | "max_regions" | "max_mappings" => {
            Some("max_windows counts windows, regions and mappings of one core")
        }
        _ => None,
    });
    let profile = profile?;
    Some(At {
        value: Device::Soft(Soft {
            profile: replacement.unwrap_or(profile.value),
            max_fragments: max_fragments?,
            max_pages: max_pages?,
            max_sge: max_sge?,
            max_send_wr: max_send_wr?,
            max_recv_wr: max_recv_wr?,
            max_cqe: max_cqe?,
            max_windows: max_windows?,
            max_qp: max_qp?,
            granted_send_wr: granted_send_wr?,
        }),
        span: profile.span,
        given: profile.given,
    })
}
