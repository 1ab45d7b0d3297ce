//! The daemon is killed and stopped under real guests that write and verify, and started again: they see a delay only.
//!
//! `MQBLK_RESTARTS=20` kills and stops it that often in each test; twice each by default.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use mqblk_tests::guest::{
    ControllerConfig, DaemonDisk, FioLoop, Guest, GuestController, GuestDisk, HostImage, LunConfig, Shell,
    VhostUserDaemon, Vmm, wait_for_luns, with_each_vmm,
};

pub(crate) const RECONNECT: Duration = Duration::from_secs(1);

/// Most rounds more, when no kill has found a request under way: between two passes there is none, and where the host is busy most of the
/// time is between two.
const MORE_ROUNDS: u32 = 20;

fn rounds() -> Result<u32> {
    match std::env::var("MQBLK_RESTARTS") {
        Ok(text) => text.parse().with_context(|| format!("MQBLK_RESTARTS: found {text:?}, expected a number")),
        Err(_) => Ok(2),
    }
}

/// Kills and stops the daemon in turn under loops that verify. Each loop must complete another pass after each.
pub(crate) fn kill_and_stop(daemon: &mut VhostUserDaemon, guest: &mut Guest, nodes: &[String]) -> Result<()> {
    guest.must("dmesg -c >/dev/null")?;
    let loops = nodes.iter().map(|node| FioLoop::start(guest, node, 32, 4)).collect::<Result<Vec<_>>>()?;
    let mut taken_up = 0;
    let rounds = 2 * rounds()?;
    for round in 0..rounds + MORE_ROUNDS {
        if round >= rounds && taken_up > 0 {
            break;
        }
        // At another point of a pass each time.
        std::thread::sleep(Duration::from_millis(u64::from(round % 7) * 90));
        match round % 2 {
            0 => daemon.crash_and_restart(),
            _ => daemon.stop_and_restart(),
        }?;
        for looping in &loops {
            looping.another_pass(guest).with_context(|| format!("round {round}; the daemon:\n{}", daemon.log()))?;
        }
        taken_up += daemon.log().matches("requests taken up again").count();
    }
    ensure!(taken_up > 0, "no kill has found a request under way");
    for looping in loops {
        looping.end(guest)?;
    }
    // The guest sees no error.
    let errors = guest.must("dmesg | grep -iE 'I/O error|blk_update_request|timed out|abort|reset' | head || true")?;
    ensure!(errors.is_empty(), "the guest's kernel says:\n{errors}");
    Ok(())
}

/// A disk that completes out of order and late, and one in the host's page cache.
pub(crate) const LATE: [(&str, &str); 5] = [
    ("storage", "fault"),
    ("inner", "file"),
    ("fault-latency-us", "60000"),
    ("fault-jitter-us", "20000"),
    ("fault-reorder", "4"),
];

#[test]
fn disks() -> Result<()> {
    kill_and_stop_disks(false)
}

#[test]
fn packed_disks() -> Result<()> {
    kill_and_stop_disks(true)
}

fn kill_and_stop_disks(packed: bool) -> Result<()> {
    with_each_vmm(|vmm| {
        let (late, cached) = (HostImage::sparse(16)?, HostImage::sparse(16)?);
        let option = |disk: DaemonDisk, (key, value): (&str, &str)| disk.option(key, value);
        let late = LATE.into_iter().fold(DaemonDisk::new("late", late.path(), 2), option);
        let cached = DaemonDisk::new("cached", cached.path(), 2).option("direct", "off");
        let mut daemon = VhostUserDaemon::start(&[late, cached])?;
        let disk = |id: &str| {
            let disk = GuestDisk::with_defaults(id, &daemon.socket(id)).reconnect(RECONNECT);
            if packed { disk.packed() } else { disk }
        };
        let mut guest = Guest::builder().vmm(vmm).disk(disk("late")).disk(disk("cached")).boot()?;
        for device in ["vda", "vdb"].into_iter().filter(|_| packed) {
            expect_feature(&mut guest, device, RING_PACKED)?;
        }
        kill_and_stop(&mut daemon, &mut guest, &["/dev/vda".to_owned(), "/dev/vdb".to_owned()])?;
        guest.power_off()?;
        daemon.stop().map(drop)
    })
}

/// VIRTIO_F_RING_PACKED.
pub(crate) const RING_PACKED: usize = 34;

/// Checks that a disk's driver has accepted a feature.
pub(crate) fn expect_feature(guest: &mut Guest, node: &str, bit: usize) -> Result<()> {
    // A string of 64 digits, bit 0 first. A controller's disk is some levels below the virtio device.
    let features = guest.must(&format!(
        "at=$(readlink -f /sys/block/{node}/device); while [ ! -e $at/features ]; do at=${{at%/*}}; done; cat $at/features"
    ))?;
    ensure!(features.trim().as_bytes().get(bit) == Some(&b'1'), "{node}: bit {bit} of the features {features}");
    Ok(())
}

#[test]
fn a_packed_controller() -> Result<()> {
    let (late, cached) = (HostImage::sparse(16)?, HostImage::sparse(16)?);
    let option = |lun: LunConfig, (key, value): (&str, &str)| lun.option(key, value);
    let late = LATE.into_iter().fold(LunConfig::new(0, 0, late.path()), option);
    let cached = LunConfig::new(1, 0, cached.path()).option("direct", "off");
    let mut daemon = VhostUserDaemon::start_controllers(&[ControllerConfig::new("c", 0, vec![late, cached])])?;
    let controller = GuestController::with_defaults("c", &daemon.socket("c")).reconnect(RECONNECT);
    let controller = controller.property("packed", true.into());
    let mut guest = Guest::builder().vmm(Vmm::Trixie).controller(controller).boot()?;
    let disks = wait_for_luns(&mut guest, &[(0, 0), (1, 0)])?;
    let nodes = [disks[&(0, 0)].node(), disks[&(1, 0)].node()];
    for node in &nodes {
        expect_feature(&mut guest, node.trim_start_matches("/dev/"), RING_PACKED)?;
    }
    kill_and_stop(&mut daemon, &mut guest, &nodes)?;
    guest.power_off()?;
    daemon.stop().map(drop)
}

/// Debian 12's QEMU does not reconnect with vhost-user-scsi.
#[test]
fn a_controller() -> Result<()> {
    let (late, cached) = (HostImage::sparse(16)?, HostImage::sparse(16)?);
    let option = |lun: LunConfig, (key, value): (&str, &str)| lun.option(key, value);
    let late = LATE.into_iter().fold(LunConfig::new(0, 0, late.path()), option);
    let cached = LunConfig::new(1, 0, cached.path()).option("direct", "off");
    let mut daemon = VhostUserDaemon::start_controllers(&[ControllerConfig::new("c", 0, vec![late, cached])])?;
    let controller = GuestController::with_defaults("c", &daemon.socket("c")).reconnect(RECONNECT);
    let mut guest = Guest::builder().vmm(Vmm::Trixie).controller(controller).boot()?;
    let disks = wait_for_luns(&mut guest, &[(0, 0), (1, 0)])?;
    let nodes = [disks[&(0, 0)].node(), disks[&(1, 0)].node()];
    kill_and_stop(&mut daemon, &mut guest, &nodes)?;
    guest.power_off()?;
    daemon.stop().map(drop)
}
