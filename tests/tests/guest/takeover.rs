//! New daemons take over under real guests that write and verify. QEMU is not configured to reconnect, so a lost
//! connection would show.

use anyhow::{Context, Result, ensure};
use mqblk_tests::guest::{
    ControllerConfig, DaemonDisk, FioLoop, Guest, GuestController, GuestDisk, HostImage, LunConfig, Shell,
    VhostUserDaemon, wait_for_luns, with_each_vmm,
};

/// Takeovers of each guest, unless `MQBLK_TAKEOVERS` is set.
const TAKEOVERS: u32 = 2;

/// Writes of each disk between two takeovers.
const WRITES: u32 = 100;

fn takeovers() -> Result<u32> {
    match std::env::var("MQBLK_TAKEOVERS") {
        Ok(text) => text.parse().with_context(|| format!("MQBLK_TAKEOVERS: found {text:?}, expected a number")),
        Err(_) => Ok(TAKEOVERS),
    }
}

fn take_over(daemon: &mut VhostUserDaemon, guest: &mut Guest, nodes: &[String]) -> Result<()> {
    guest.must("dmesg -c >/dev/null")?;
    let loops = nodes.iter().map(|node| FioLoop::start(guest, node, 32, 4)).collect::<Result<Vec<_>>>()?;
    for round in 0..takeovers()? {
        daemon.take_over().with_context(|| format!("takeover {round}"))?;
        for looping in &loops {
            let written = looping.wait_for_writes(guest, WRITES);
            written.with_context(|| format!("round {round}; the daemon:\n{}", daemon.log()))?;
        }
        ensure!(!daemon.log().contains("frontend connected"), "a frontend has connected again:\n{}", daemon.log());
    }
    // A pass verifies all its writes, including those in flight.
    for looping in loops {
        looping.end(guest)?;
    }
    let errors = guest.must("dmesg | grep -iE 'I/O error|blk_update_request|timed out|abort|reset' | head || true")?;
    ensure!(errors.is_empty(), "the guest's kernel says:\n{errors}");
    Ok(())
}

#[test]
fn disks_and_a_controller() -> Result<()> {
    with_each_vmm(|vmm| {
        let images = [HostImage::sparse(16)?, HostImage::sparse(16)?, HostImage::sparse(16)?];
        let disks = [
            DaemonDisk::new("direct", images[0].path(), 2),
            DaemonDisk::new("cached", images[1].path(), 2).option("direct", "off"),
        ];
        let luns = vec![LunConfig::new(0, 0, images[2].path())];
        let mut daemon = VhostUserDaemon::start_all(&disks, &[ControllerConfig::new("c", 0, luns)])?;
        let disk = |id: &str| GuestDisk::with_defaults(id, &daemon.socket(id));
        let controller = GuestController::with_defaults("c", &daemon.socket("c"));
        let builder = Guest::builder().vmm(vmm).disk(disk("direct")).disk(disk("cached"));
        let mut guest = builder.controller(controller).boot()?;
        let lun = wait_for_luns(&mut guest, &[(0, 0)])?[&(0, 0)].node();
        take_over(&mut daemon, &mut guest, &["/dev/vda".to_owned(), "/dev/vdb".to_owned(), lun])?;
        // The guest's VMM uses the connection of the last daemon: it resets the devices and starts them again.
        guest.reset()?;
        guest.must("dd if=/dev/vda of=/dev/null bs=1M count=4 iflag=direct")?;
        guest.power_off()?;
        daemon.stop().map(drop)
    })
}
