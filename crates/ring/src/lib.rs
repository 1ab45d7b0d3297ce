//! Rings, both ends of each.
//!
//! `virtqueue` is the device's end of a virtqueue of any format, for devices and transports; `format` is what formats
//! have in common. `split/` is the split virtqueue: `device` is the device's end (the daemon), `driver` the driver's
//! end (userspace drivers and tests). `packed/` is the packed virtqueue, with the same two ends, and `driver_ring` the
//! driver's end of either. `blkif/` is the ring of Xen's block interface: `back` and `front`. `wakeup` is the
//! notification protocol that all of them use: neither end sleeps while the other waits for it. The meaning of ring
//! entries is defined elsewhere (`virtio-blk`, `virtio-scsi`, `blkif`).
#![forbid(unsafe_code)]

pub mod blkif;
#[cfg(test)]
mod crash_points;
pub mod driver_ring;
pub mod format;
mod inflight_words;
pub mod packed;
pub mod split;
pub mod virtqueue;
pub mod wakeup;
