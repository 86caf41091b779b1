//! What every configuration keeps. Whole-system tests hold it against stranger texts, too.

use o2poll_config::{Config, Cores, Device, Exposure, Idle, Machine, SoftProfile};

/// What the documentation of [`Config`] says of every value of it.
pub(crate) fn keeps(config: &Config, machine: &Machine<'_>) {
    assert!(!config.nodes.is_empty());
    let tunables = &config.tunables;
    assert!(tunables.peer_credits >= 8 && (1..=257).contains(&tunables.max_frags));
    assert!(tunables.map_on_demand <= 256 && tunables.register_sources_from <= 257);
    assert!(config.memory.staging <= 256);
    let pool = tunables.fmr_pool_size;
    let trigger = tunables.fmr_flush_trigger;
    assert!(pool <= 65_536 && (1..=65_536).contains(&trigger) && (pool == 0 || trigger <= pool));
    let Device::Soft(soft) = &config.device else {
        panic!("a software device");
    };
    assert!(soft.profile != SoftProfile::Bare || config.memory.exposure == Exposure::Arena);
    assert!(
        (tunables.peer_credits / 2..tunables.peer_credits).contains(&tunables.peer_credits_hiw)
    );
    for (index, node) in config.nodes.iter().enumerate() {
        assert_eq!(config.node_of(node.nid), Some(index));
        for export in &node.exports {
            assert!(export.portal.0 != 0 && export.length > 0);
            assert_eq!(
                export
                    .pieces()
                    .map(|piece| u64::from(piece.length))
                    .sum::<u64>(),
                export.length
            );
            assert!(export.file().is_none() || !export.writable);
        }
        if let Some(copy) = &node.copy {
            let (file, into) = (
                config.export(copy.file).unwrap(),
                config.export(copy.into).unwrap(),
            );
            assert!(file.file().is_some() && into.writable && into.length >= file.length);
            assert!(copy.transfer > 0 && copy.in_flight > 0);
            assert_eq!(config.node_of(copy.peer), Some(copy.file.node));
        }
        if let Some(workload) = &node.workload {
            let region = config.export(workload.region).unwrap();
            assert!(region.writable);
            assert!(u64::from(workload.largest()) * u64::from(workload.in_flight) <= region.length);
            assert!((0.0..=1.0).contains(&workload.put));
            assert!(
                workload
                    .sizes
                    .iter()
                    .all(|size| size.bytes > 0 && size.weight > 0)
            );
        }
    }

    let placement = config.placement(machine);
    let mut cores: Vec<usize> = placement.threads.iter().map(|thread| thread.core).collect();
    assert!(
        cores
            .iter()
            .all(|core| machine.allowed_cores.contains(core))
    );
    cores.sort_unstable();
    cores.dedup();
    assert_eq!(cores.len(), placement.threads.len());
    for (index, node) in config.nodes.iter().enumerate() {
        let on: Vec<usize> = placement
            .threads
            .iter()
            .filter(|thread| thread.nodes.contains(&index))
            .map(|thread| thread.core)
            .collect();
        match &node.cores {
            Cores::Auto => assert_eq!(on.len(), 1),
            Cores::Listed(cores) => {
                assert!(cores.len() == on.len() && cores.iter().all(|core| on.contains(core)))
            }
        }
        assert!(placement.sentence.contains(&node.nid.to_string()));
    }
    let shared = placement
        .threads
        .iter()
        .any(|thread| thread.nodes.len() > 1);
    assert_eq!(
        shared,
        placement.sentence.contains("share a polling thread")
    );
    let crowded = placement.threads.len() > machine.parallelism;
    assert_eq!(
        placement.idle(Idle::Auto),
        if crowded { Idle::Yield } else { Idle::Spin }
    );
}
