//! Guests whose virtqueues are used in order (VIRTIO_F_IN_ORDER): Linux knows it since 7.0, and QEMU 10.0 offers it. Their storage completes in another
//! order, and their daemon is killed and stopped under load.

use anyhow::Result;
use mqblk_tests::guest::{Guest, GuestBuilder, GuestKernel, Vmm};

use crate::restart::{Rings, kill_and_stop_controller, kill_and_stop_disks};

const SPLIT: Rings = Rings { packed: false, in_order: true };
const PACKED: Rings = Rings { packed: true, in_order: true };

fn guest() -> GuestBuilder {
    Guest::builder().vmm(Vmm::Trixie).kernel(GuestKernel::Backports)
}

#[test]
fn disks() -> Result<()> {
    kill_and_stop_disks(guest(), SPLIT)
}

#[test]
fn packed_disks() -> Result<()> {
    kill_and_stop_disks(guest(), PACKED)
}

#[test]
fn a_controller() -> Result<()> {
    kill_and_stop_controller(guest(), SPLIT)
}

#[test]
fn a_packed_controller() -> Result<()> {
    kill_and_stop_controller(guest(), PACKED)
}
