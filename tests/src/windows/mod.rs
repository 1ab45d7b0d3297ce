//! Windows' virtio drivers, viostor (virtio-blk) and vioscsi (virtio-scsi), as far as a device sees them: the feature
//! bits that they accept, the segments and fields of their requests, and their resets. The facts are from the public
//! source of *kvm-guest-drivers-windows*, 2026.
//!
//! The same driver runs on a [`VhostUserDevice`], which `mqblk` serves, and on a [`QtestDevice`], QEMU's own, whose
//! answers are the reference.

mod buffer;
mod device;
mod qtest;
mod rings;
mod vhost_user;
mod vioscsi;
mod viostor;

pub use buffer::{Buffer, Buffers};
pub use device::Device;
pub use qtest::{QtestDevice, QtestModel};
pub use rings::DriverRings;
pub use vhost_user::VhostUserDevice;
pub use vioscsi::{Answer, ScsiData, TaskManagement, Vioscsi};
pub use viostor::{Viostor, ViostorLimits};

use std::fs::File;
use std::path::Path;

use rustix::fs::{FallocateFlags, fallocate};

use crate::hostile::memory::{FileRegion, SharedMemory};

/// Bytes of guest memory, which begins at guest address 0.
const MEMORY: u64 = 32 << 20;
/// Bytes of a page.
pub const PAGE: u64 = 4096;

/// Returns guest memory in a file.
fn memory(file: File) -> SharedMemory {
    SharedMemory { regions: vec![FileRegion { file, guest: 0, user: 0x7f00_0000_0000, len: MEMORY, offset: 0 }] }
}

/// Makes an image of `len` bytes for a test. All of it is allocated, so that reads are of the storage.
///
/// # Errors
/// When the file exists, or there is no room.
pub fn new_image(path: &Path, len: u64) -> std::io::Result<()> {
    let file = File::create_new(path)?;
    Ok(fallocate(&file, FallocateFlags::empty(), 0, len)?)
}

/// Returns bytes that depend on their place on the disk, and on `seed`.
pub fn pattern(from: u64, len: u64, seed: u64) -> Vec<u8> {
    (from..from + len).map(|at| (at ^ at >> 9 ^ at >> 17 ^ seed.wrapping_mul(0x9d)) as u8).collect()
}
