//! [tunables]: what ko2iblnd has as module parameters, and the times of this program.

use core::time::Duration;

use crate::model::{Idle, Tunables};
use crate::reader::{At, Mistakes, Section, boolean, choice, duration, integer};
use crate::report::Diagnostic;

use super::MOST_CONNS;

pub(super) fn tunables(mut section: Section<'_>, mistakes: &Mistakes) -> Option<Tunables> {
    let peer_credits = section.or("peer_credits", 8_u8, integer(8..=255));
    let hiw = section.or("peer_credits_hiw", None, |found| {
        integer(1_u8..=254)(found).map(Some)
    });
    let max_frags = section.or("max_frags", 257, integer(1..=257));
    let map_on_demand = section.or("map_on_demand", 1, integer(0..=256));
    let register_sources_from = section.or("register_sources_from", 0, integer(0..=257));
    let fmr_pool_size = section.or("fmr_pool_size", 512_u32, integer(0..=65_536));
    let fmr_flush_trigger = section.or("fmr_flush_trigger", None, |found| {
        integer(1_u32..=65_536)(found).map(Some)
    });
    let fmr_cache = section.or("fmr_cache", true, boolean);
    let span = Duration::from_millis(1)..=Duration::from_secs(86_400);
    let timeout = section.or("timeout", Duration::from_secs(50), duration(span.clone()));
    let abandon_limit = section.or(
        "abandon_limit",
        Duration::from_secs(50),
        duration(span.clone()),
    );
    let keepalive = section.or("keepalive", Duration::from_secs(100), duration(span));
    let conns_per_peer = section.or("conns_per_peer", 1, integer(1..=MOST_CONNS));
    let reconnects = section.or("reconnects", 20, integer(0..=10_000));
    let pause = Duration::from_millis(1)..=Duration::from_secs(3600);
    let min_reconnect = section.or(
        "min_reconnect",
        Duration::from_millis(100),
        duration(pause.clone()),
    );
    let max_reconnect = section.or("max_reconnect", Duration::from_secs(1), duration(pause));
    let concurrent_writes = section.or("concurrent_writes", 4, integer(1..=64));
    let idle = section.or(
        "idle",
        Idle::Auto,
        choice(&[
            ("auto", Idle::Auto),
            ("spin", Idle::Spin),
            ("yield", Idle::Yield),
        ]),
    );
    section.finish(ko2iblnd_only);

    if let (Some(least), Some(most)) = (&min_reconnect, &max_reconnect)
        && least.value > most.value
    {
        let at = if least.given { least } else { most };
        mistakes.push(Diagnostic::new(
            "`min_reconnect` is longer than `max_reconnect`",
            at.span.clone(),
            format!("{:?}, and {:?} at most", least.value, most.value),
            "pauses grow from the first to the second: make the first one shorter",
        ));
    }

    // ko2iblnd clamps the mark without a word (LU-12569, LU-15828).
    let credits = peer_credits.as_ref().map(|at| at.value);
    let hiw = match (hiw?, credits) {
        (At { value: None, .. }, credits) => credits.map(|credits| credits / 2),
        (
            At {
                value: Some(hiw),
                span,
                ..
            },
            Some(credits),
        ) => {
            let (least, most) = (credits / 2, credits.saturating_sub(1));
            if !(least..=most).contains(&hiw) {
                mistakes.push(Diagnostic::new(
                    "`peer_credits_hiw` is out of range",
                    span,
                    format!("{least} to {most} with peer_credits = {credits}"),
                    format!("leave it out for {least}, half of peer_credits"),
                ));
            }
            Some(hiw)
        }
        (
            At {
                value: Some(hiw), ..
            },
            None,
        ) => Some(hiw),
    };
    let (pool, trigger) = (fmr_pool_size?.value, fmr_flush_trigger?);
    if let Some(given) = trigger.value
        && pool != 0
        && given > pool
    {
        mistakes.push(Diagnostic::new(
            "`fmr_flush_trigger` is out of range",
            trigger.span,
            format!("1 to {pool} with fmr_pool_size = {pool}"),
            format!(
                "leave it out for {}, three quarters of fmr_pool_size",
                three_quarters(pool)
            ),
        ));
    }
    Some(Tunables {
        peer_credits: credits?,
        peer_credits_hiw: hiw?,
        max_frags: max_frags?.value,
        map_on_demand: map_on_demand?.value,
        register_sources_from: register_sources_from?.value,
        fmr_pool_size: pool,
        fmr_flush_trigger: trigger.value.unwrap_or_else(|| three_quarters(pool)),
        fmr_cache: fmr_cache?.value,
        timeout: timeout?.value,
        abandon_limit: abandon_limit?.value,
        keepalive: keepalive?.value,
        conns_per_peer: conns_per_peer?.value,
        reconnects: reconnects?.value,
        min_reconnect: min_reconnect?.value,
        max_reconnect: max_reconnect?.value,
        concurrent_writes: concurrent_writes?.value,
        idle: idle?.value,
    })
}

/// Of a pool of mappings: ko2iblnd's 384 of 512.
const fn three_quarters(pool: u32) -> u32 {
    let most = pool - pool / 4;
    if most == 0 { 1 } else { most }
}

/// What becomes of ko2iblnd's other parameters.
fn ko2iblnd_only(name: &str) -> Option<&'static str> {
    Some(match name {
        "cksum" => "checksums are never sent: kernels disagree on the sign of a byte in them",
        "use_fastreg_gaps" => {
            "the mechanism of registration is chosen for each transfer from what the device has"
        }
        "min_reconnectms" => "write min_reconnect = \"100ms\"",
        "max_reconnectms" => "write max_reconnect = \"1s\"",
        "ntx" => "descriptors are sized from peer_credits and the number of nodes",
        "exposure" | "staging" => "it belongs under [memory]",
        "nscheds" => "the number of polling threads follows from `cores` of the nodes",
        "concurrent_sends" => {
            "send queues are sized for every credit; concurrent_writes bounds the WRITEs of one transfer"
        }
        "credits" | "peer_buffer_credits" => {
            "each peer has peer_credits, and there is no bound over all peers"
        }
        "wrq_sge" => {
            "work requests carry as many pieces as the device takes; see max_sge of [device]"
        }
        "service"
        | "ipif_name"
        | "ib_mtu"
        | "tos"
        | "retry_count"
        | "rnr_retry_count"
        | "dev_failover"
        | "require_privileged_port"
        | "use_privileged_port"
        | "peer_timeout" => "it has no meaning on the software device",
        _ => return None,
    })
}
