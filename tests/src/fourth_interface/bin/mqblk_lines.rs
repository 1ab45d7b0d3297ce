//! The `mqblk` program with a fourth guest interface.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use mqblk_daemon::interface::Interfaces;
use mqblk_daemon::interfaces::{virtio_blk, virtio_scsi, xen};
use mqblk_tests::fourth_interface::LineInterface;

const INTERFACES: Interfaces = Interfaces(&[
    &virtio_blk::VirtioBlkInterface,
    &virtio_scsi::VirtioScsiInterface,
    &xen::XenInterface,
    &LineInterface,
]);

fn main() -> ExitCode {
    mqblk_cli::run(INTERFACES)
}
