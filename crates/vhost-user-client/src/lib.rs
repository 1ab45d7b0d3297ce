//! vhost-user frontend for userspace drivers: sets up the queues of a backend, as a VMM does.
//!
//! The `vhost` crate sends the messages. This crate adds retries while the server starts, a bound on every wait, errors
//! that name the message, and the order of the messages. Source: QEMU's
//! `docs/interop/vhost-user.rst`.
#![forbid(unsafe_code)]

mod backend_channel;
mod client;
mod watchdog;

pub use backend_channel::{BackendChannel, ConfigChange};
pub use client::{Client, ClientError, HangupMonitor, InflightMemory, QueueSetup, SharedRegion};
pub use vmm_sys_util::eventfd::EventFd;

/// Virtio feature bits that any device may have. Source: virtio 1.3 section 6; bit 30 from vhost-user.
pub mod features {
    /// VIRTIO_F_INDIRECT_DESC.
    pub const INDIRECT_DESC: u64 = 1 << 28;
    /// VIRTIO_F_EVENT_IDX.
    pub const EVENT_IDX: u64 = 1 << 29;
    /// VHOST_USER_F_PROTOCOL_FEATURES.
    pub const PROTOCOL_FEATURES: u64 = 1 << 30;
    /// VIRTIO_F_VERSION_1.
    pub const VERSION_1: u64 = 1 << 32;
    /// VIRTIO_F_RING_PACKED.
    pub const RING_PACKED: u64 = 1 << 34;
}
