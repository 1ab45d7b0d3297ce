//! Virtqueues, both ends of each.
//!
//! `split/` is the split virtqueue: `device` takes requests off it (our daemon), `driver` puts them on (our userspace
//! drivers and every test). Nothing here knows what an element means.
#![forbid(unsafe_code)]

pub mod split;
