//! A request that fails for certain.

use core::ptr::NonNull;

use o2poll_dataplane::nic::{Rights, Sge};

use super::DeviceError;
use super::objects::{Domain, Memory};

/// Memory of another protection domain: a request that names it fails.
#[derive(Debug)]
pub(super) struct Trap {
    pub(super) piece: Sge,
    /// Deregistered before its bytes are freed.
    memory: Option<Memory>,
    bytes: Box<[u8; 64]>,
}

impl Trap {
    pub(super) fn new(domain: &Domain) -> Result<Self, DeviceError> {
        let mut bytes = Box::new([0; 64]);
        let base = NonNull::from(&mut *bytes).cast();
        // SAFETY: the bytes are freed after the registration (see the drop), and nobody touches them.
        let memory = unsafe { domain.register(base, 64, Rights::empty())? };
        let piece = Sge {
            address: memory.start,
            length: 1,
            lkey: memory.lkey,
        };
        Ok(Self {
            piece,
            memory: Some(memory),
            bytes,
        })
    }

    /// For providers that look at nothing.
    #[cfg(any(test, feature = "verbs-stub"))]
    pub(super) fn none() -> Self {
        Self {
            piece: Sge {
                address: 0,
                length: 1,
                lkey: o2poll_dataplane::nic::LKey(u32::MAX),
            },
            memory: None,
            bytes: Box::new([0; 64]),
        }
    }
}

impl Drop for Trap {
    fn drop(&mut self) {
        self.memory = None;
        self.bytes.fill(0);
    }
}
