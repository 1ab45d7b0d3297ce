//! The fuzz targets: each module is a function that turns any bytes into mostly valid input, and an exact oracle for
//! the outcome. `cargo fuzz` runs them from `fuzz/`; `tests/replay.rs` replays the committed corpora and runs generated
//! input.
#![forbid(unsafe_code)]

pub mod admin;
pub mod blkif;
mod blkif_device;
pub mod blkif_entries;
mod blkif_guest;
pub mod config;
pub mod inflight;
pub mod journal;
mod memory_disk;
pub mod qcow2_image;
mod ring_guest;
mod scsi_commands;
mod scsi_control;
mod scsi_controller;
mod scsi_medium;
mod scsi_unit;
pub mod vhost_user;
mod vhost_user_machine;
mod vhost_user_messages;
mod vhost_user_session;
mod vhost_user_wire;
pub mod virtio_blk;
mod virtio_blk_requests;
pub mod virtio_scsi;
mod xen_host;
pub mod xenstore;
mod xenstore_guest;
mod xenstore_model;

/// A target: its name, also that of its folder in `fuzz/corpus`, and its function.
pub type FuzzTarget = (&'static str, fn(&[u8]));

/// All targets.
pub const TARGETS: [FuzzTarget; 11] = [
    ("virtio_blk", virtio_blk::target),
    ("virtio_scsi", virtio_scsi::target),
    ("blkif", blkif::target),
    ("xenstore", xenstore::target),
    ("blkif_entries", blkif_entries::target),
    ("journal", journal::target),
    ("config", config::target),
    ("inflight", inflight::target),
    ("admin", admin::target),
    ("vhost_user", vhost_user::target),
    ("qcow2_image", qcow2_image::target),
];
