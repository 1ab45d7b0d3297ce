//! Guests whose virtqueues are used in order (VIRTIO_F_IN_ORDER): Linux knows it since 7.0, and QEMU 10.0 offers it. Their storage completes in another
//! order, and their daemon is killed and stopped under load.

use anyhow::Result;
use mqblk_tests::guest::{
    ControllerConfig, DaemonDisk, Guest, GuestController, GuestDisk, GuestKernel, HostImage, LunConfig,
    VhostUserDaemon, Vmm, wait_for_luns,
};

use crate::restart::{LATE, RECONNECT, RING_PACKED, expect_feature, kill_and_stop};

/// VIRTIO_F_IN_ORDER.
const IN_ORDER: usize = 35;

/// Checks that a disk's driver uses these rings.
fn expect_rings(guest: &mut Guest, node: &str, packed: bool) -> Result<()> {
    let node = node.trim_start_matches("/dev/");
    expect_feature(guest, node, IN_ORDER)?;
    if packed { expect_feature(guest, node, RING_PACKED) } else { Ok(()) }
}

#[test]
fn disks() -> Result<()> {
    kill_and_stop_disks(false)
}

#[test]
fn packed_disks() -> Result<()> {
    kill_and_stop_disks(true)
}

fn kill_and_stop_disks(packed: bool) -> Result<()> {
    let (late, cached) = (HostImage::sparse(16)?, HostImage::sparse(16)?);
    let option = |disk: DaemonDisk, (key, value): (&str, &str)| disk.option(key, value);
    let late = LATE.into_iter().fold(DaemonDisk::new("late", late.path(), 2), option);
    let cached = DaemonDisk::new("cached", cached.path(), 2).option("direct", "off");
    let mut daemon = VhostUserDaemon::start(&[late, cached])?;
    let disk = |id: &str| {
        let disk = GuestDisk::with_defaults(id, &daemon.socket(id)).reconnect(RECONNECT).in_order();
        if packed { disk.packed() } else { disk }
    };
    let guest = Guest::builder().vmm(Vmm::Trixie).kernel(GuestKernel::Backports);
    let mut guest = guest.disk(disk("late")).disk(disk("cached")).boot()?;
    let nodes = ["/dev/vda".to_owned(), "/dev/vdb".to_owned()];
    for node in &nodes {
        expect_rings(&mut guest, node, packed)?;
    }
    kill_and_stop(&mut daemon, &mut guest, &nodes)?;
    guest.power_off()?;
    daemon.stop().map(drop)
}

#[test]
fn a_controller() -> Result<()> {
    kill_and_stop_controller(false)
}

#[test]
fn a_packed_controller() -> Result<()> {
    kill_and_stop_controller(true)
}

fn kill_and_stop_controller(packed: bool) -> Result<()> {
    let (late, cached) = (HostImage::sparse(16)?, HostImage::sparse(16)?);
    let option = |lun: LunConfig, (key, value): (&str, &str)| lun.option(key, value);
    let late = LATE.into_iter().fold(LunConfig::new(0, 0, late.path()), option);
    let cached = LunConfig::new(1, 0, cached.path()).option("direct", "off");
    let mut daemon = VhostUserDaemon::start_controllers(&[ControllerConfig::new("c", 0, vec![late, cached])])?;
    let controller = GuestController::with_defaults("c", &daemon.socket("c")).reconnect(RECONNECT);
    let controller = controller.property("in_order", true.into()).property("packed", packed.into());
    let guest = Guest::builder().vmm(Vmm::Trixie).kernel(GuestKernel::Backports);
    let mut guest = guest.controller(controller).boot()?;
    let disks = wait_for_luns(&mut guest, &[(0, 0), (1, 0)])?;
    let nodes = [disks[&(0, 0)].node(), disks[&(1, 0)].node()];
    for node in &nodes {
        expect_rings(&mut guest, node, packed)?;
    }
    kill_and_stop(&mut daemon, &mut guest, &nodes)?;
    guest.power_off()?;
    daemon.stop().map(drop)
}
