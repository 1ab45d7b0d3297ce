//! The daemon is killed and stopped under real guests that write and verify, and restarted: they see only a delay.
//!
//! `MQBLK_RESTARTS` is the number of kills and stops in each test (1).

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use mqblk_tests::guest::{
    ControllerConfig, DaemonDisk, FioLoop, Guest, GuestController, GuestDisk, HostImage, LunConfig, Shell,
    VhostUserDaemon, Vmm, wait_for_luns,
};

const RECONNECT: Duration = Duration::from_secs(1);

/// Most additional rounds when no kill has found a request in flight. There is none between two passes, and a busy host
/// spends most of the time there.
const MORE_ROUNDS: u32 = 20;

/// Kills, and stops, in a short run.
const ROUNDS: u32 = 1;

fn rounds() -> Result<u32> {
    match std::env::var("MQBLK_RESTARTS") {
        Ok(text) => text.parse().with_context(|| format!("MQBLK_RESTARTS: found {text:?}, expected a number")),
        Err(_) => Ok(ROUNDS),
    }
}

/// Writes of each disk after a start of the daemon: all of those in flight, and more.
const WRITES: u32 = 100;

/// Kills and stops the daemon in turn under loops that verify. Each loop must make progress after each, and its last
/// pass must verify.
fn kill_and_stop(daemon: &mut VhostUserDaemon, guest: &mut Guest, nodes: &[String]) -> Result<()> {
    guest.must("dmesg -c >/dev/null")?;
    // The first disk is slow and has long passes, so that kills find requests of it in flight.
    let mib = |at: usize| if at == 0 { 8 } else { 4 };
    let start = |(at, node): (usize, &String)| FioLoop::start(guest, node, 32, mib(at));
    let loops = nodes.iter().enumerate().map(start).collect::<Result<Vec<_>>>()?;
    let mut taken_up = 0;
    let rounds = 2 * rounds()?;
    for round in 0..rounds + MORE_ROUNDS {
        if round >= rounds && taken_up > 0 {
            break;
        }
        loops[0].wait_for_writes(guest, 4)?;
        // At another point of the pass each time.
        std::thread::sleep(Duration::from_millis(u64::from(round % 7) * 20));
        match round % 2 {
            0 => daemon.crash_and_restart(),
            _ => daemon.stop_and_restart(),
        }?;
        for looping in &loops {
            let written = looping.wait_for_writes(guest, WRITES);
            written.with_context(|| format!("round {round}; the daemon:\n{}", daemon.log()))?;
        }
        taken_up += daemon.log().matches("replaying unanswered requests").count();
    }
    ensure!(taken_up > 0, "no kill has found a request under way");
    for looping in loops {
        looping.end(guest)?;
    }
    // The guest sees no error. Linux 7.3 reports its clock source when an emulated CPU has not run.
    let errors = guest.must(
        "dmesg | grep -iE 'I/O error|blk_update_request|timed out|abort|reset' | grep -v ' clocksource: ' | head || true",
    )?;
    ensure!(errors.is_empty(), "the guest's kernel says:\n{errors}");
    Ok(())
}

/// A disk that completes out of order and late, and one in the host's page cache.
const LATE: [(&str, &str); 5] = [
    ("storage", "fault"),
    ("inner", "file"),
    ("fault-latency-us", "60000"),
    ("fault-jitter-us", "20000"),
    ("fault-reorder", "4"),
];

/// Checks that a disk's driver has accepted packed rings.
fn expect_packed(guest: &mut Guest, node: &str) -> Result<()> {
    let node = node.trim_start_matches("/dev/");
    // A string of 64 digits, bit 0 first. A controller's disk is some levels below the virtio device.
    let features = guest.must(&format!(
        "at=$(readlink -f /sys/block/{node}/device); while [ ! -e $at/features ]; do at=${{at%/*}}; done; cat $at/features"
    ))?;
    // VIRTIO_F_RING_PACKED.
    ensure!(features.trim().as_bytes().get(34) == Some(&b'1'), "{node}: bit 34 of the features {features}");
    Ok(())
}

/// Kills and stops a daemon under a guest with two disks and a controller of two LUNs: of each pair one completes late,
/// the other is in the page cache.
fn kill_and_stop_under(vmm: Vmm, packed: bool) -> Result<()> {
    // Debian 12's QEMU does not reconnect with vhost-user-scsi.
    let has_controller = vmm != Vmm::System;
    let images: Vec<HostImage> = (0..4).map(|_| HostImage::sparse(16)).collect::<Result<_>>()?;
    let late = DaemonDisk::new("late", images[0].path(), 2);
    let late = LATE.into_iter().fold(late, |disk, (key, value)| disk.option(key, value));
    let cached = DaemonDisk::new("cached", images[1].path(), 2).option("direct", "off");
    let late_lun =
        LATE.into_iter().fold(LunConfig::new(0, 0, images[2].path()), |lun, (key, value)| lun.option(key, value));
    let cached_lun = LunConfig::new(1, 0, images[3].path()).option("direct", "off");
    let controllers =
        if has_controller { vec![ControllerConfig::new("c", 0, vec![late_lun, cached_lun])] } else { vec![] };
    let mut daemon = VhostUserDaemon::start_all(&[late, cached], &controllers)?;
    let disk = |id: &str| {
        let disk = GuestDisk::with_defaults(id, &daemon.socket(id)).reconnect(RECONNECT);
        if packed { disk.packed() } else { disk }
    };
    let mut guest = Guest::builder().vmm(vmm).disk(disk("late")).disk(disk("cached"));
    if has_controller {
        let controller = GuestController::with_defaults("c", &daemon.socket("c")).reconnect(RECONNECT);
        guest = guest.controller(if packed { controller.property("packed", true.into()) } else { controller });
    }
    let mut guest = guest.boot()?;
    let mut nodes = vec!["/dev/vda".to_owned(), "/dev/vdb".to_owned()];
    if has_controller {
        let luns = wait_for_luns(&mut guest, &[(0, 0), (1, 0)])?;
        nodes.extend([luns[&(0, 0)].node(), luns[&(1, 0)].node()]);
    }
    nodes.iter().filter(|_| packed).try_for_each(|node| expect_packed(&mut guest, node))?;
    kill_and_stop(&mut daemon, &mut guest, &nodes)?;
    guest.power_off()?;
    daemon.stop().map(drop)
}

/// The VMMs of a run: all of them in a long one.
fn vmms() -> Result<Vec<Vmm>> {
    if rounds()? > ROUNDS { Vmm::all() } else { Ok(vec![Vmm::newest()?]) }
}

#[test]
fn split_rings() -> Result<()> {
    vmms()?.into_iter().try_for_each(|vmm| kill_and_stop_under(vmm, false))
}

#[test]
#[ignore = "long: make soak, make test-guest"]
fn packed_rings() -> Result<()> {
    vmms()?.into_iter().try_for_each(|vmm| kill_and_stop_under(vmm, true))
}
