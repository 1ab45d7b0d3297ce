//! Guests with disks that the toolstack makes, `disk = [...]`, on a real Xen: they reboot, and migrate, are saved and
//! restored under verified load.

use anyhow::{Context, Result, ensure};
use mqblk_tests::guest::{FioLoop, Shell};
use mqblk_tests::xen::{
    BackendProgram, BlkfrontParameters, Dom0Daemon, Dom0Image, Domain, DomainConfig, HardwareQueue, XenHost,
};

/// xl's type of a disk with a script: it names no disk of the kernel's backend, and there is nothing to set up.
const TYPE: &str = "vbd";
const DISK: &str = "format=raw,access=rw,script=/bin/true";

/// The disks: the guest's name, and the daemon's.
const DISKS: [(&str, &str); 2] = [("xvda", "mqblk:kept"), ("xvdb", "file:/tmp/plain.img")];

/// Limit of the storage in writes per second, so that requests are in flight when the guest is suspended.
const WRITES_PER_SECOND: u32 = 200;

struct Rig {
    host: XenHost,
    daemon: Dom0Daemon,
    guest: Domain,
}

fn start(name: &str, memory_mib: u32) -> Result<Rig> {
    let mut host = BackendProgram::Mqblk.boot(XenHost::builder(name))?;
    let kept = Dom0Image::sparse(&mut host, "kept", 32)?;
    kept.slow_down(&mut host, WRITES_PER_SECOND)?;
    host.must("truncate -s 32M /tmp/plain.img")?;
    refuses_devices_of_the_kernel(&mut host)?;
    let kept = format!("--disk id=kept,interface=xen,path={},queues=2", kept.device());
    let daemon = Dom0Daemon::serve_type(&mut host, TYPE, &kept)?;
    let mut config = DomainConfig::new("guest").memory_mib(memory_mib);
    for (vdev, params) in DISKS {
        config = config.disk(&format!("{DISK},vdev={vdev},target={params}"));
    }
    let guest = Domain::create(&mut host, &config)?;
    Ok(Rig { host, daemon, guest })
}

/// While the kernel's backend is loaded, it serves the disks that xl makes.
fn refuses_devices_of_the_kernel(host: &mut XenHost) -> Result<()> {
    host.load("xen-blkback", "")?;
    let refused = host.run(&format!("mqblk serve --xen-watch {TYPE} </dev/null"))?;
    ensure!(
        refused.status == 1 && refused.output.contains("rmmod xen-blkback"),
        "{}: {}",
        refused.status,
        refused.output
    );
    host.must("rmmod xen-blkback").map(drop)
}

/// Loads the block driver and waits for both disks, with two rings of 2^`order` pages each.
fn load_driver(guest: &mut Domain, order: u8) -> Result<()> {
    guest.load_blkfront(BlkfrontParameters { max_ring_page_order: order, ..BlkfrontParameters::default() })?;
    DISKS.iter().try_for_each(|(vdev, _)| guest.wait_disk(vdev))?;
    check_rings(guest, order)
}

fn check_rings(guest: &mut Domain, order: u8) -> Result<()> {
    let each = |cpu| HardwareQueue { cpus: vec![cpu], tags: 32 << order };
    for (vdev, _) in DISKS {
        let found = guest.hardware_queues(vdev)?;
        ensure!(found == [each(0), each(1)], "{vdev}, order {order}: {found:?}");
    }
    Ok(())
}

/// Checks that the guest has both disks, that each load verifies what it wrote before and writes after, and that the
/// daemon has left the guest's other domain.
fn goes_on(rig: &mut Rig, loops: &[FioLoop], order: u8) -> Result<()> {
    let Rig { host, daemon, guest } = rig;
    for looping in loops {
        looping.another_pass(guest)?;
    }
    check_rings(guest, order)?;
    guest.must_have_no_warnings()?;
    let list = daemon.list(host)?;
    ensure!(list.len() == DISKS.len(), "{list:?}");
    for device in list {
        ensure!(device["domid"] == guest.id() && device["queues"] == 2, "{device}");
        ensure!(device["error"].is_null(), "{device}");
    }
    daemon.must_run(host)
}

/// Waits until the guest has requests in flight.
fn wait_for_requests(guest: &mut Domain) -> Result<()> {
    let script = "for i in $(seq 2000); do
                      read -r reads writes </sys/block/xvda/inflight; [ $((reads + writes)) -gt 8 ] && exit 0
                  done; echo \"$reads $writes\"; exit 1";
    guest.must(script).map(drop).context("no requests are in flight")
}

/// Moves the guest by a function under load.
fn moved(
    rig: Rig,
    loops: &[FioLoop],
    order: u8,
    what: &str,
    by: impl FnOnce(Domain, &mut XenHost) -> Result<Domain>,
) -> Result<Rig> {
    let Rig { mut host, daemon, mut guest } = rig;
    wait_for_requests(&mut guest)?;
    let guest = by(guest, &mut host).with_context(|| format!("{what}, order {order}"))?;
    let mut rig = Rig { host, daemon, guest };
    goes_on(&mut rig, loops, order).with_context(|| format!("after {what}, order {order}"))?;
    Ok(rig)
}

fn under_load(mut rig: Rig, order: u8) -> Result<Rig> {
    load_driver(&mut rig.guest, order)?;
    let mut loops = Vec::new();
    for (vdev, _) in DISKS {
        loops.push(FioLoop::launch(&mut rig.guest, &format!("/dev/{vdev}"), 16, 1)?);
    }
    for looping in &loops {
        looping.another_pass(&mut rig.guest)?;
    }
    let rig = moved(rig, &loops, order, "a migration", |guest, host| guest.migrate(host))?;
    let rig = moved(rig, &loops, order, "save and restore", |guest, host| guest.save(host)?.restore(host))?;
    let mut rig = moved(rig, &loops, order, "a checkpoint", |mut guest, host| {
        guest.checkpoint(host)?;
        Ok(guest)
    })?;
    for looping in loops {
        looping.end(&mut rig.guest)?;
    }
    Ok(rig)
}

fn finish(rig: Rig) -> Result<()> {
    let Rig { mut host, daemon, guest } = rig;
    guest.destroy(&mut host)?;
    daemon.stop(&mut host)?;
    host.power_off()
}

/// Rings of one page. The guest has rebooted before: xl has made its disks again.
#[test]
fn rebooted_migrated_saved_and_restored() -> Result<()> {
    if BackendProgram::from_environment()? == BackendProgram::Kernel {
        return Ok(()); // the tests are of disks that xl makes for mqblk
    }
    let Rig { mut host, daemon, mut guest } = start("migration", 256)?;
    load_driver(&mut guest, 0)?;
    let guest = guest.reboot(&mut host)?;
    finish(under_load(Rig { host, daemon, guest }, 0)?)
}

/// Rings of 16 pages: with persistent grants the driver holds 128 MiB for each disk.
#[test]
#[ignore = "long: make soak, make test-xen"]
fn migrated_with_large_rings() -> Result<()> {
    if BackendProgram::from_environment()? == BackendProgram::Kernel {
        return Ok(());
    }
    finish(under_load(start("large-rings-migrate", 512)?, 4)?)
}
