//! Rings, both ends of each.
//!
//! `split/` is the split virtqueue: `device` takes requests off it (our daemon), `driver` puts them on (our userspace
//! drivers and every test). `blkif/` is the ring of Xen's block interface: `back` and `front`. `wakeup` is how neither end of any of
//! them sleeps while the other waits for it. What an element means is said elsewhere.
#![forbid(unsafe_code)]

pub mod blkif;
pub mod split;
pub mod wakeup;
