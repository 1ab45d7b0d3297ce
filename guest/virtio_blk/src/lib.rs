//! The virtio-blk personality: what a ring element means
#![forbid(unsafe_code)]
