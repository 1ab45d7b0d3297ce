//! Disks that grow under a real guest: Linux is notified, and uses the added space, while fio verifies.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Result, ensure};
use mqblk_test_bounds::Bound;
use mqblk_tests::guest::{
    ControllerConfig, DaemonDisk, DaemonProgram, FioJobs, FioLoop, Guest, GuestController, GuestDisk, HostImage,
    LunConfig, Shell, VhostUserDaemon,
};

const MIB: u64 = 1 << 20;

/// Waits until the guest has seen the size, without a rescan.
fn seen(guest: &mut Guest, disk: &str, mib: u64) -> Result<()> {
    let sectors = mib * MIB / 512;
    let script = format!(
        "for i in $(seq 300); do [ $(cat /sys/block/{disk}/size) = {sectors} ] && exit 0; sleep 0.1; done; \
         cat /sys/block/{disk}/size; exit 1"
    );
    guest.must(&script).map(drop)
}

/// Writes and verifies the last MiBs, and checks that nothing is beyond them.
fn is_usable(guest: &mut Guest, disk: &str, mib: u64) -> Result<()> {
    FioJobs::verified_random_writes(&format!("/dev/{disk}"), 1, u32::try_from(mib - 2)?, 2)
        .run(guest, Bound::seconds(120))?
        .must_have_verified()?;
    let beyond = format!("dd if=/dev/zero of=/dev/{disk} bs=4k seek={} count=1 oflag=direct", mib * 256);
    let ended = guest.run(&beyond)?;
    ensure!(ended.status != 0, "a write beyond the end succeeded: {}", ended.output);
    Ok(())
}

/// By command with a size, by command after a change on the host, and automatically.
fn grows_three_times(
    guest: &mut Guest,
    daemon: &mut VhostUserDaemon,
    id: &str,
    disk: &str,
    image: &Path,
) -> Result<()> {
    let load = FioLoop::start(guest, &format!("/dev/{disk}"), 8, 4)?;
    let by_host =
        |mib: u64| -> Result<()> { Ok(std::fs::File::options().write(true).open(image)?.set_len(mib * MIB)?) };
    let output = daemon.run_verb(&["resize"], &[id, "40M"])?;
    assert_eq!(output, format!("resized {id} from 32M to 40M; the guest was notified\n"));
    seen(guest, disk, 40)?;
    is_usable(guest, disk, 40)?;

    by_host(48)?;
    let output = daemon.run_verb(&["resize"], &[id])?;
    // Unless the daemon has noticed it meanwhile.
    ensure!(output.contains("48M"), "{output}");
    seen(guest, disk, 48)?;
    is_usable(guest, disk, 48)?;

    by_host(64)?;
    seen(guest, disk, 64)?;
    is_usable(guest, disk, 64)?;
    load.another_pass(guest)?;

    ensure!(daemon.run_verb(&["resize"], &[id, "32M"]).is_err(), "it shrinks unasked");
    assert_eq!(std::fs::metadata(image)?.len(), 64 * MIB);
    let output = daemon.run_verb(&["resize"], &[id, "32M", "--shrink"])?;
    assert_eq!(output, format!("resized {id} from 64M to 32M; the guest was notified\n"));
    seen(guest, disk, 32)?;
    is_usable(guest, disk, 32)?;
    load.end(guest)?;
    daemon.must_run()
}

#[test]
fn a_virtio_blk_disk() -> Result<()> {
    if DaemonProgram::from_environment()? != DaemonProgram::Mqblk {
        return Ok(());
    }
    let image = HostImage::sparse(32)?;
    let mut daemon = VhostUserDaemon::start(&[DaemonDisk::new("grow", image.path(), 2)])?;
    let mut guest = Guest::builder().disk(GuestDisk::new("grow", &daemon.socket("grow"), 2)).boot()?;
    seen(&mut guest, "vda", 32)?;
    grows_three_times(&mut guest, &mut daemon, "grow", "vda", image.path())?;
    guest.power_off()?;
    daemon.stop().map(drop)
}

#[test]
#[ignore = "long: make soak, make test-guest"]
fn a_disk_that_changed_while_the_guest_booted() -> Result<()> {
    if DaemonProgram::from_environment()? != DaemonProgram::Mqblk {
        return Ok(());
    }
    let image = HostImage::sparse(32)?;
    let mut daemon = VhostUserDaemon::start(&[DaemonDisk::new("early", image.path(), 1)])?;
    // Starts before QEMU connects and ends long after, so that it covers a device that the guest's driver has not
    // started. The guest is booted on this thread because it ends with its thread.
    let booted = AtomicBool::new(false);
    let mut guest = std::thread::scope(|scope| -> Result<Guest> {
        let resizing = scope.spawn(|| -> Result<()> {
            for mib in 33..1000 {
                if booted.load(Ordering::SeqCst) {
                    break;
                }
                daemon.run_verb(&["resize"], &["early", &format!("{mib}M")])?;
                std::thread::sleep(Duration::from_millis(200));
            }
            Ok(())
        });
        let guest = Guest::builder().disk(GuestDisk::new("early", &daemon.socket("early"), 1)).boot();
        booted.store(true, Ordering::SeqCst);
        resizing.join().expect("no panic")?;
        guest
    })?;
    let mib = std::fs::metadata(image.path())?.len() / MIB;
    ensure!(mib > 33, "the boot was too quick to resize anything: {mib} MiB");
    seen(&mut guest, "vda", mib)?;
    is_usable(&mut guest, "vda", mib)?;
    guest.power_off()?;
    daemon.must_run()?;
    daemon.stop().map(drop)
}

#[test]
#[ignore = "long: make soak, make test-guest"]
fn a_lun() -> Result<()> {
    if DaemonProgram::from_environment()? != DaemonProgram::Mqblk {
        return Ok(());
    }
    let image = HostImage::sparse(32)?;
    let mut daemon =
        VhostUserDaemon::start_controllers(&[ControllerConfig::new("c", 2, vec![LunConfig::new(0, 0, image.path())])])?;
    let mut guest = Guest::builder().controller(GuestController::vhost_user("c", &daemon.socket("c"), 2)).boot()?;
    seen(&mut guest, "sda", 32)?;
    grows_three_times(&mut guest, &mut daemon, "c:0:0", "sda", image.path())?;
    guest.power_off()?;
    daemon.stop().map(drop)
}
