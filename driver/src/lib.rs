//! Userspace drivers: the other end of each guest interface, in this process.
//!
//! `virtio_blk/` drives any vhost-user-blk server, many queues, each owned by one thread.
#![forbid(unsafe_code)]

pub mod virtio_blk;
