//! Queue pairs: made and connected by a control thread, used by a core.

use std::io;
use std::sync::Arc;

use o2poll_dataplane::nic::Rights;
use rdma_core_sys::types::{
    IBV_QP_ACCESS_FLAGS, IBV_QP_AV, IBV_QP_DEST_QPN, IBV_QP_MAX_DEST_RD_ATOMIC,
    IBV_QP_MAX_QP_RD_ATOMIC, IBV_QP_MIN_RNR_TIMER, IBV_QP_PATH_MTU, IBV_QP_PKEY_INDEX, IBV_QP_PORT,
    IBV_QP_RETRY_CNT, IBV_QP_RNR_RETRY, IBV_QP_RQ_PSN, IBV_QP_SQ_PSN, IBV_QP_STATE, IBV_QP_TIMEOUT,
    IBV_QPS_ERR, IBV_QPS_INIT, IBV_QPS_RESET, IBV_QPS_RTR, IBV_QPS_RTS, IBV_QPT_RC, ibv_mtu,
    ibv_qp, ibv_qp_attr, ibv_qp_attr_mask, ibv_qp_cap, ibv_qp_init_attr,
};

use super::device::{Device, Gid};
use super::fence::Post;
use super::objects::{CompletionQueue, Domain, access};
use super::quirks::Quirks;
use super::raw::RawQp;
use super::{DeviceError, last_error};

/// How large a queue pair is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Most send work requests outstanding.
    pub send_depth: u32,
    /// Most receives posted.
    pub recv_depth: u32,
    /// Most pieces of one work request; at least one.
    pub max_sge: u32,
    /// Bytes that a message may have to be copied into the work request. A wish: where the device refuses it, as many
    /// ride inside as it grants unasked.
    pub inline: u32,
}

/// The other end of a connection, for queue pairs that no connection manager connects.
#[derive(Clone, Copy, Debug)]
pub struct Path {
    /// Our address.
    pub local: Gid,
    /// The peer's.
    pub remote: [u8; 16],
    /// The peer's local identifier; 0 on Ethernet.
    pub lid: u16,
    /// The peer's queue pair number.
    pub number: u32,
    /// As `enum ibv_mtu` numbers it.
    pub mtu: ibv_mtu,
    /// Sequence number of our first packet, 24 bits.
    pub psn: u32,
    /// Of the peer's.
    pub remote_psn: u32,
    /// READs of the peer that we serve at a time. 0 refuses them all.
    pub responder_resources: u8,
    /// READs of ours at a time. 0 means none at all: one would never complete.
    pub initiator_depth: u8,
    /// The wait for an acknowledgement is 4.096 us times two to this.
    pub timeout: u8,
    /// Times that packets are sent again without an acknowledgement, up to 7.
    pub retry_count: u8,
    /// Times that a request is tried again when the peer has no receive; 7 is for ever.
    pub rnr_retry: u8,
    /// What a peer is told to wait when we have no receive, as the InfiniBand specification encodes it (12 is 0.64 ms).
    pub rnr_timer: u8,
}

/// A queue pair (RC).
#[derive(Debug)]
pub struct QueuePair {
    /// Freed before what it may be bound to.
    pub(super) post: Option<Post>,
    pub(super) raw: Arc<RawQp>,
    pub(super) send_depth: u32,
    pub(super) recv_depth: u32,
    pub(super) max_sge: u32,
    pub(super) inline: u32,
    pub(super) initiator_depth: u8,
}

/// Why a queue pair goes without the fences of [`Quirks::BIND_IS_REPLAYED`].
enum Unfenced {
    /// Its completion queue would have to have so many entries.
    Completions(u32),
    /// It would have to have so many send work requests.
    Requests(u32),
    /// The device gave no window for them, or no memory below it.
    Refused(DeviceError),
}

impl QueuePair {
    /// A new one, in RESET, that reports to this completion queue.
    ///
    /// # Errors
    /// When the device is too small for it, when domain and completion queue do not belong together, and as the library
    /// says.
    pub fn new(domain: &Domain, cq: &CompletionQueue, shape: Shape) -> Result<Self, DeviceError> {
        let (pair, unfenced) = Self::make(domain, cq, shape)?;
        if let Some(why) = unfenced {
            why.tell(&domain.device);
        }
        Ok(pair)
    }

    /// One that is to show what the device grants or can do, and is gone before it could lose a packet: what it has to go
    /// without is told to nobody.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn for_trial(
        domain: &Domain,
        cq: &CompletionQueue,
        shape: Shape,
    ) -> Result<Self, DeviceError> {
        Self::make(domain, cq, shape).map(|(pair, _)| pair)
    }

    fn make(
        domain: &Domain,
        cq: &CompletionQueue,
        mut shape: Shape,
    ) -> Result<(Self, Option<Unfenced>), DeviceError> {
        shape.max_sge = shape.max_sge.max(1);
        let device = &domain.device;
        let elsewhere = !Arc::ptr_eq(device.context(), &cq.raw.context);
        let unlocked = cq.raw.pd.as_ref();
        if elsewhere || unlocked.is_some_and(|pd| !Arc::ptr_eq(pd, &domain.queues)) {
            return Err(DeviceError::Mixed {
                device: device.name().to_owned(),
            });
        }
        let attr = device.attributes();
        for (what, asked, most) in [
            (
                "send work requests of a queue pair",
                shape.send_depth,
                attr.max_qp_wr,
            ),
            ("receives of a queue pair", shape.recv_depth, attr.max_qp_wr),
            ("pieces of a work request", shape.max_sge, attr.max_sge),
        ] {
            let most = u32::try_from(most).unwrap_or(0);
            if asked > most {
                return Err(DeviceError::TooMany {
                    what,
                    asked,
                    most,
                    device: device.name().to_owned(),
                });
            }
        }
        // A provider that cannot inline as much refuses the queue pair.
        let most = u32::try_from(attr.max_qp_wr).unwrap_or(0);
        let deep = shape.send_depth.saturating_mul(3);
        let wants = device.quirks().contains(Quirks::BIND_IS_REPLAYED) && device.offers_windows();
        let mut unfenced = if !wants {
            None
        } else if !cq.fenced {
            Some(Unfenced::Completions(cq.with_fences))
        } else if deep > most {
            Some(Unfenced::Requests(deep))
        } else {
            None
        };
        let fenced = wants && unfenced.is_none();
        let room = Shape {
            send_depth: if fenced { deep } else { shape.send_depth },
            ..shape
        };
        let mut raw = Self::create(domain, cq, room, shape.inline);
        if raw.is_err() && shape.inline > 0 {
            raw = Self::create(domain, cq, room, 0);
        }
        let (raw, cap) = raw?;
        let raw = Arc::new(RawQp {
            raw,
            pd: Arc::clone(&domain.queues),
            cq: Arc::clone(&cq.raw),
        });
        // Without one it works until a packet is lost.
        let post = match fenced.then(|| Post::new(domain)).transpose() {
            Ok(post) => post,
            Err(error) => {
                unfenced = Some(Unfenced::Refused(error));
                None
            }
        };
        let pair = Self {
            post,
            raw,
            send_depth: shape.send_depth,
            recv_depth: shape.recv_depth,
            max_sge: shape.max_sge,
            // Some providers leave what was asked for in place of what was granted: never more than the wish.
            inline: cap.max_inline_data.min(shape.inline),
            initiator_depth: 0,
        };
        Ok((pair, unfenced))
    }

    /// Its number.
    #[must_use]
    pub fn number(&self) -> u32 {
        // SAFETY: alive as long as this is.
        unsafe { (*self.raw.raw).qp_num }
    }

    /// Bytes that a message may have to be copied into the work request.
    #[must_use]
    pub const fn inline(&self) -> u32 {
        self.inline
    }

    /// Most send work requests outstanding, and most receives posted.
    #[must_use]
    pub const fn depths(&self) -> (u32, u32) {
        (self.send_depth, self.recv_depth)
    }

    /// The library's, for calls that are not here. Valid as long as this is.
    #[must_use]
    pub fn raw(&self) -> *mut ibv_qp {
        self.raw.raw
    }

    /// Connects it: INIT, RTR, RTS.
    ///
    /// # Errors
    /// As the library says.
    pub fn connect(&mut self, device: &Device, path: &Path) -> Result<(), DeviceError> {
        let mut rights = Rights::REMOTE_WRITE | Rights::LOCAL_WRITE;
        // Without the right a READ is refused; without it and without resources rxe's requests never end.
        if path.responder_resources > 0 {
            rights |= Rights::REMOTE_READ;
        }
        let mut attr = ibv_qp_attr {
            qp_state: IBV_QPS_INIT,
            pkey_index: 0,
            port_num: path.local.port,
            qp_access_flags: access(rights),
            ..Default::default()
        };
        let mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
        self.modify(device, &mut attr, mask)?;
        attr.qp_state = IBV_QPS_RTR;
        attr.path_mtu = path.mtu;
        attr.dest_qp_num = path.number;
        attr.rq_psn = path.remote_psn & 0x00ff_ffff;
        attr.max_dest_rd_atomic = path.responder_resources;
        attr.min_rnr_timer = path.rnr_timer;
        attr.ah_attr.is_global = 1;
        attr.ah_attr.grh.dgid.raw = path.remote;
        attr.ah_attr.grh.sgid_index = path.local.index;
        attr.ah_attr.grh.hop_limit = 64;
        attr.ah_attr.dlid = path.lid;
        attr.ah_attr.port_num = path.local.port;
        let mask = IBV_QP_STATE
            | IBV_QP_AV
            | IBV_QP_PATH_MTU
            | IBV_QP_DEST_QPN
            | IBV_QP_RQ_PSN
            | IBV_QP_MAX_DEST_RD_ATOMIC
            | IBV_QP_MIN_RNR_TIMER;
        self.modify(device, &mut attr, mask)?;
        attr.qp_state = IBV_QPS_RTS;
        attr.timeout = path.timeout;
        attr.retry_cnt = path.retry_count;
        attr.rnr_retry = path.rnr_retry;
        attr.sq_psn = path.psn & 0x00ff_ffff;
        attr.max_rd_atomic = path.initiator_depth;
        let mask = IBV_QP_STATE
            | IBV_QP_TIMEOUT
            | IBV_QP_RETRY_CNT
            | IBV_QP_RNR_RETRY
            | IBV_QP_SQ_PSN
            | IBV_QP_MAX_QP_RD_ATOMIC;
        self.modify(device, &mut attr, mask)
    }

    /// Back to RESET, as it was made: for the next connection.
    ///
    /// # Errors
    /// As the library says.
    pub fn reset(&mut self, device: &Device) -> Result<(), DeviceError> {
        let mut attr = ibv_qp_attr {
            qp_state: IBV_QPS_RESET,
            ..Default::default()
        };
        self.modify(device, &mut attr, IBV_QP_STATE)?;
        if let Some(post) = &mut self.post {
            post.renew().map_err(|source| DeviceError::Call {
                what: "ibv_alloc_mw",
                device: device.name().to_owned(),
                source,
            })?;
        }
        Ok(())
    }

    /// `ibv_modify_qp(3)`: for attributes that a connection manager makes (`rdma_init_qp_attr(3)`).
    ///
    /// # Errors
    /// As the library says.
    pub fn modify(
        &mut self,
        device: &Device,
        attr: &mut ibv_qp_attr,
        mask: ibv_qp_attr_mask,
    ) -> Result<(), DeviceError> {
        if mask & IBV_QP_RETRY_CNT != 0 {
            attr.retry_cnt = device.quirks().retries(attr.retry_cnt);
        }
        // SAFETY: the queue pair is alive, and `attr` is plain numbers, borrowed for the call.
        let failed =
            unsafe { (self.raw.context().calls.modify_qp)(self.raw.raw, attr, mask.cast_signed()) };
        if failed != 0 {
            return Err(DeviceError::Call {
                what: "ibv_modify_qp",
                device: device.name().to_owned(),
                source: io::Error::from_raw_os_error(failed),
            });
        }
        if mask & IBV_QP_MAX_QP_RD_ATOMIC != 0 {
            self.initiator_depth = attr.max_rd_atomic;
        }
        Ok(())
    }

    fn create(
        domain: &Domain,
        cq: &CompletionQueue,
        shape: Shape,
        inline: u32,
    ) -> Result<(*mut ibv_qp, ibv_qp_cap), DeviceError> {
        let device = &domain.device;
        let mut attr = ibv_qp_init_attr {
            send_cq: cq.raw.raw,
            recv_cq: cq.raw.raw,
            qp_type: IBV_QPT_RC,
            cap: ibv_qp_cap {
                max_send_wr: shape.send_depth,
                max_recv_wr: shape.recv_depth,
                max_send_sge: shape.max_sge,
                max_recv_sge: 1,
                max_inline_data: inline,
            },
            ..Default::default()
        };
        // SAFETY: domain and completion queue are alive, and held by what is made of the answer.
        let raw = unsafe { (device.calls().create_qp)(domain.queues.raw, &mut attr) };
        if raw.is_null() {
            return Err(last_error("ibv_create_qp", device));
        }
        Ok((raw, attr.cap))
    }
}

impl Unfenced {
    /// Once for each cause, as the device's complaint.
    fn tell(self, device: &Device) {
        let attr = device.attributes();
        let (cause, why) = match self {
            Self::Completions(needed) => (
                "max_cqe",
                format!(
                    "a completion queue with room for them has {needed} entries, and max_cqe is {}; a smaller queue depth \
                     or fewer connections of a core leave room",
                    attr.max_cqe
                ),
            ),
            Self::Requests(needed) => (
                "max_qp_wr",
                format!(
                    "a queue pair with room for them has {needed} send work requests, and max_qp_wr is {}; a smaller \
                     queue depth leaves room",
                    attr.max_qp_wr
                ),
            ),
            Self::Refused(error) => ("a window", error.to_string()),
        };
        device.context().complain_once(cause, || {
            format!(
                "queue pairs of device {} have no fences before their BINDs, so that a lost packet may stop one until its \
                 transfers time out: {why}",
                device.name()
            )
        });
    }
}

impl RawQp {
    /// Puts it in error. A system call.
    pub(super) fn fail(&self) {
        let mut attr = ibv_qp_attr {
            qp_state: IBV_QPS_ERR,
            ..Default::default()
        };
        // SAFETY: the queue pair is alive. It fails only where there is nothing left to fail: in RESET, or when
        // the device is gone.
        unsafe {
            (self.context().calls.modify_qp)(self.raw, &mut attr, IBV_QP_STATE.cast_signed())
        };
    }
}
