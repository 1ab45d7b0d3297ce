//! Rings, both ends of each.
//!
//! `split/` is the split virtqueue: `device` is the device's end (the daemon), `driver` the driver's end (userspace drivers and tests).
//! `blkif/` is the ring of Xen's block interface: `back` and `front`. `wakeup` is the notification protocol that all of them use: neither
//! end sleeps while the other waits for it. The meaning of ring entries is defined elsewhere (`guest/`).
#![forbid(unsafe_code)]

pub mod blkif;
pub mod split;
pub mod wakeup;
