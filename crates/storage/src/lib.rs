//! Storage backends and their registry.
//!
//! A backend is a folder here and a line in [`registry`]. It implements [`Disk`](mqblk_core::Disk) and
//! [`DiskChannel`](mqblk_core::DiskChannel) for a worker's [`UringContext`](mqblk_uring::UringContext) and is
//! independent of guests, rings and transports.
#![forbid(unsafe_code)]

mod admission;
pub mod blocking;
pub mod conformance;
pub mod connection;
pub mod fault;
pub mod file;
pub mod host_images;
mod keys;
mod lock_mode;
#[cfg(feature = "nbd")]
pub mod nbd;
pub mod null;
pub mod observers;
#[cfg(feature = "qcow2")]
pub mod qcow2;
pub mod ram;
pub mod rbd;
pub mod registry;
mod remote_requests;
mod secret_file;
#[cfg(any(feature = "nbd", feature = "qcow2"))]
mod zeroes;

pub use registry::{TEST_KINDS, backend_keys, backend_names, backend_of_format, backend_of_path, open, open_with};
