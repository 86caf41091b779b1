//! A program with the backend in it starts where rdma-core is not installed.
#![cfg(all(feature = "verbs", target_os = "linux"))]

use std::fs;

use o2poll_hal::verbs::Device;

/// Names of mapped files.
fn mapped(name: &str) -> bool {
    fs::read_to_string("/proc/self/maps")
        .unwrap()
        .contains(name)
}

#[test]
fn libibverbs_is_loaded_when_a_device_is_asked_for_and_not_before() {
    assert!(!mapped("libibverbs"), "linked, or loaded too early");
    assert!(!mapped("librdmacm") && !mapped("libmlx5"));
    match Device::names() {
        // Where there is no library, or no kernel module, somebody is told what to do about it.
        Err(error) => {
            let text = error.to_string();
            assert!(
                text.contains("apt-get install") || text.contains("ib_uverbs"),
                "{text}"
            );
        }
        Ok(_) => assert!(mapped("libibverbs")),
    }
    let error = Device::open("o2poll-no-such-device")
        .unwrap_err()
        .to_string();
    assert!(!error.is_empty());
}
