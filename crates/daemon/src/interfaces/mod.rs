//! The guest interfaces, each in a folder of its own.

pub mod virtio_blk;
pub mod virtio_scsi;
pub mod xen;

use crate::interface::Interfaces;

/// The guest interfaces of the program. The first is the default of the key `interface`.
pub const INTERFACES: Interfaces =
    Interfaces(&[&virtio_blk::VirtioBlkInterface, &virtio_scsi::VirtioScsiInterface, &xen::XenInterface]);
