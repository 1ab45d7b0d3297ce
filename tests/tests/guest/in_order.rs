//! Guests whose virtqueues are used in order (VIRTIO_F_IN_ORDER): Linux knows it since 7.0, and QEMU 10.0 offers it. Their storage completes in another
//! order, and their daemon is killed and stopped under load.

use anyhow::Result;
use mqblk_tests::guest::{Guest, GuestKernel, Vmm};

use crate::restart::{Devices, Rings, kill_and_stop_under};

fn kill_and_stop(packed: bool) -> Result<()> {
    let guest = Guest::builder().vmm(Vmm::Trixie).kernel(GuestKernel::Backports);
    kill_and_stop_under(guest, Rings { packed, in_order: true }, Devices::All)
}

#[test]
#[ignore = "long: make soak, make test-guest"]
fn split_rings() -> Result<()> {
    kill_and_stop(false)
}

#[test]
#[ignore = "long: make soak, make test-guest"]
fn packed_rings() -> Result<()> {
    kill_and_stop(true)
}
