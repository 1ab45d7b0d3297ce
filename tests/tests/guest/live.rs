//! Every verb that changes a running daemon, while fio verifies in a real guest on a virtio-blk disk and on a LUN of a
//! controller.

use std::path::Path;

use anyhow::{Result, ensure};
use mqblk_tests::guest::{
    DaemonDisk, DaemonProgram, FioLoop, Guest, GuestController, GuestDisk, HostImage, Shell, VhostUserDaemon,
};

/// The changes, in order.
const CHANGES: &[(&str, &[&str])] = &[
    ("worker add", &[]),
    ("worker add", &["--pin", "0"]),
    ("disk set", &["blk", "queue-map=0:1,1:2"]),
    ("controller set", &["c", "queue-map=0:2,1:1", "poll=adaptive:200"]),
    ("disk set", &["blk", "poll=busy", "merge=off", "depth=1"]),
    ("disk set", &["c:0:0", "merge=off", "depth=2", "iops=400"]),
    ("disk set", &["blk", "poll=off", "coalesce-us=200", "coalesce-max=4", "merge=on"]),
    ("queue move", &["blk", "0", "--worker", "2"]),
    ("queue move", &["c", "1", "--worker", "2"]),
    ("disk set", &["blk", "depth=0", "merge-bytes=64K", "limit-group=gold"]),
    ("disk set", &["c:0:0", "iops=off", "depth=0", "merge=auto", "limit-group=gold"]),
    ("limit-group set", &["gold", "iops=500", "bandwidth=20M"]),
    ("limit-group set", &["gold", "iops=off", "bandwidth=off"]),
    ("log", &["debug"]),
    ("controller set", &["c", "poll=off", "coalesce-us=100"]),
    ("log", &["info"]),
    ("worker remove", &[]),
    ("worker remove", &[]),
    ("disk set", &["blk", "poll=static:50", "coalesce-us=0", "merge=auto", "merge-bytes=1M"]),
];

fn change(daemon: &VhostUserDaemon, verb: &str, arguments: &[&str]) -> Result<String> {
    daemon.run_verb(&verb.split(' ').collect::<Vec<_>>(), arguments)
}

fn add_disk(daemon: &VhostUserDaemon, image: &Path) -> Result<()> {
    let settings = format!("id=more,path={},socket={},queues=1", image.display(), daemon.socket("more").display());
    change(daemon, "disk add", &[&settings]).map(drop)
}

#[test]
#[ignore = "long: make soak, make test-guest"]
fn every_verb_while_fio_verifies() -> Result<()> {
    if DaemonProgram::from_environment()? != DaemonProgram::Mqblk {
        return Ok(());
    }
    let images = [HostImage::sparse(16)?, HostImage::sparse(16)?, HostImage::sparse(16)?];
    let disk = DaemonDisk::new("blk", images[0].path(), 2);
    let mut daemon =
        VhostUserDaemon::start_with(&[disk], &["--workers", "1", "--limit-group", "name=gold,iops=100000"])?;
    let socket = daemon.socket("c");
    change(&daemon, "controller add", &[&format!("id=c,socket={},queues=2", socket.display())])?;
    change(&daemon, "lun add", &[&format!("controller=c,path={}", images[1].path().display())])?;
    let controller = GuestController::vhost_user("c", &socket, 2);
    let mut guest = Guest::builder().disk(GuestDisk::new("blk", &daemon.socket("blk"), 2)).boot()?;
    guest.plug_controller(&controller)?;
    guest.must("for i in $(seq 300); do [ -e /sys/block/sda/size ] && exit 0; sleep 0.1; done; exit 1")?;

    let loads = [FioLoop::start(&mut guest, "/dev/vda", 8, 2)?, FioLoop::start(&mut guest, "/dev/sda", 8, 2)?];
    for (verb, arguments) in CHANGES {
        change(&daemon, verb, arguments)?;
        loads.iter().try_for_each(|load| load.wait_for_writes(&mut guest, 20))?;
    }
    let queues = change(&daemon, "queue list", &[])?;
    let on_first = queues.lines().skip(1).all(|line| line.split_whitespace().last() == Some("0"));
    ensure!(on_first && queues.lines().count() == 5, "{queues}");

    // Disks and LUNs are added and removed meanwhile, and a connected guest is queried.
    add_disk(&daemon, images[2].path())?;
    let more = GuestDisk::new("more", &daemon.socket("more"), 1);
    guest.plug(&more, "vdb")?;
    guest.must("dd if=/dev/urandom of=/run/data bs=1M count=1 2>/dev/null; dd if=/run/data of=/dev/vdb bs=1M oflag=direct 2>/dev/null; \
                dd if=/dev/vdb bs=1M count=1 iflag=direct 2>/dev/null | cmp - /run/data")?;
    ensure!(change(&daemon, "disk remove", &["more"]).is_err(), "its guest is connected");
    guest.unplug(&more)?;
    change(&daemon, "disk remove", &["more"])?;
    change(&daemon, "lun add", &[&format!("controller=c,target=3,path={}", images[2].path().display())])?;
    guest.must("for i in $(seq 300); do [ -e /sys/block/sdb/size ] && exit 0; sleep 0.1; done; exit 1")?;
    change(&daemon, "lun remove", &["c:3:0"])?;
    ensure!(change(&daemon, "controller remove", &["c"]).is_err(), "its guest is connected");
    loads.iter().try_for_each(|load| load.another_pass(&mut guest))?;
    for load in loads {
        load.end(&mut guest)?;
    }
    guest.unplug_controller(&controller)?;
    change(&daemon, "controller remove", &["c"])?;
    guest.power_off()?;
    daemon.must_run()?;
    let counters = daemon.disk_stat("blk")?.totals.counters;
    ensure!(counters.errors == 0 && counters.malformed == 0 && counters.writes > 0, "{counters:?}");
    daemon.stop().map(drop)
}
