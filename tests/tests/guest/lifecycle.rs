//! Lifecycle of guests: unplug and plug, reset, a killed VMM.

use std::time::Duration;

use anyhow::{Result, ensure};
use mqblk_test_bounds::Bound;
use mqblk_tests::guest::{DaemonDisk, FioJobs, FioOutcome, Guest, GuestDisk, HostImage, Shell, VhostUserDaemon};

const MIB: u64 = 1 << 20;

/// Prints the checksum of the 64 MiB that [`endless_writes`] does not change.
const BEGINNING: &str = "set -o pipefail; dd if=/dev/vda bs=1M count=64 iflag=direct 2>/dev/null | sha256sum";

/// Returns a command that writes for ever, for guests that are killed or reset.
fn endless_writes() -> String {
    FioJobs::new(
        "--name=endless --filename=/dev/vda --ioengine=io_uring --direct=1 --iodepth=32 --thread --rw=randwrite --bs=16k \
         --offset=64M --size=64M --time_based --runtime=600",
    )
    .script("endless")
}

/// Waits until the guest's job has written to the image, so that the next action happens in mid-I/O.
fn wait_for_writes(guest: &mut Guest, job: &str, image: &HostImage) -> Result<()> {
    let before = image.allocated()?;
    let mut deadline = Bound::seconds(60).begin();
    while image.allocated()? < before + MIB {
        ensure!(guest.is_running(job)?, "the job '{job}' ended too early");
        ensure!(!deadline.has_passed(), "the job '{job}' writes nothing");
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

#[test]
#[ignore = "long: make soak, make test-guest"]
fn unplugged_and_plugged_again() -> Result<()> {
    let image = HostImage::sparse(128)?;
    let mut daemon = VhostUserDaemon::start(&[DaemonDisk::new("hot", image.path(), 2)])?;
    let disk = GuestDisk::new("hot", &daemon.socket("hot"), 2);
    let mut guest = Guest::builder().boot()?;
    assert_eq!(guest.must("ls /sys/block")?, "", "a guest without disks");

    guest.plug(&disk, "vda")?;
    FioJobs::verified_random_writes("/dev/vda", 2, 0, 16).run(&mut guest, Bound::seconds(120))?.must_have_verified()?;
    let sum = guest.must(BEGINNING)?;

    for round in 1..=3 {
        guest.unplug(&disk)?;
        assert_eq!(guest.must("ls /sys/block")?, "", "round {round}: the disk is still there");
        daemon.must_run()?;
        guest.plug(&disk, "vda")?;
        assert_eq!(guest.must("ls /sys/block/vda/mq | wc -l")?, "2", "round {round}");
        assert_eq!(guest.must(BEGINNING)?, sum, "round {round}: the data changed");
    }

    guest.start("endless", &endless_writes())?;
    wait_for_writes(&mut guest, "endless", &image)?;
    guest.unplug(&disk)?;
    let ended = guest.finish("endless", Bound::seconds(60))?;
    ensure!(ended.status != 0, "fio went on without a disk:\n{}", ended.output);
    daemon.must_run()?;
    guest.plug(&disk, "vda")?;
    assert_eq!(guest.must(BEGINNING)?, sum, "the data changed in an unplug in mid-I/O");
    FioJobs::verified_random_writes("/dev/vda", 2, 64, 16)
        .run(&mut guest, Bound::seconds(120))?
        .must_have_verified()?;

    guest.power_off()?;
    daemon.stop().map(drop)
}

#[test]
fn reset_in_mid_io() -> Result<()> {
    let image = HostImage::sparse(128)?;
    let daemon = VhostUserDaemon::start(&[DaemonDisk::new("reset", image.path(), 2)])?;
    let mut guest = Guest::builder().disk(GuestDisk::new("reset", &daemon.socket("reset"), 2)).boot()?;
    FioJobs::verified_random_writes("/dev/vda", 2, 0, 16).run(&mut guest, Bound::seconds(120))?.must_have_verified()?;
    let sum = guest.must(BEGINNING)?;

    guest.start("endless", &endless_writes())?;
    wait_for_writes(&mut guest, "endless", &image)?;
    guest.reset()?;
    ensure!(guest.run("[ -e /run/jobs/endless ]")?.status != 0, "the guest was not reset: its job's file is there");
    assert_eq!(guest.must(BEGINNING)?, sum);
    FioJobs::verified_random_writes("/dev/vda", 2, 64, 16)
        .run(&mut guest, Bound::seconds(120))?
        .must_have_verified()?;

    guest.must("sync")?;
    guest.power_off()?;
    daemon.stop().map(drop)
}

/// Memory is plugged while requests run: the server gets a new region, and soon buffers in it.
#[test]
#[ignore = "long: make soak, make test-guest"]
fn memory_plugged_in_mid_io() -> Result<()> {
    let image = HostImage::sparse(256)?;
    let daemon = VhostUserDaemon::start(&[DaemonDisk::new("grow", image.path(), 2)])?;
    let disk = GuestDisk::new("grow", &daemon.socket("grow"), 2);
    let mut guest = Guest::builder().memory_slots(3).disk(disk).boot()?;

    guest.start("verify", &FioJobs::verified_random_writes("/dev/vda", 2, 0, 64).script("verify"))?;
    wait_for_writes(&mut guest, "verify", &image)?;
    for id in ["dimm0", "dimm1", "dimm2"] {
        ensure!(guest.is_running("verify")?, "the verification ended before {id} was plugged: make it longer");
        guest.plug_memory(id, 128)?;
    }
    let outcome = guest.finish("verify", Bound::seconds(240))?;
    FioOutcome::read(outcome.status, &outcome.output)?.must_have_verified()?;

    // The page cache holds the whole disk, which is larger than the initial memory, so some of it is in the new
    // regions. The open file keeps the cache. Then the same data is read again from the server.
    let sums = guest.must(
        "exec 9</dev/vda
         sha256sum </dev/vda
         awk '/^Cached:|^Buffers:/ { kib += $2 } END { print kib }' /proc/meminfo
         echo 3 >/proc/sys/vm/drop_caches
         sha256sum </dev/vda",
    )?;
    let sums: Vec<&str> = sums.lines().collect();
    let cached: u64 = sums[1].parse()?;
    ensure!(cached > 256 << 10, "only {cached} KiB are cached: the new memory was not used");
    assert_eq!(sums[0], sums[2], "what was read into the new memory differs");
    guest.power_off()?;
    daemon.stop().map(drop)
}

#[test]
#[ignore = "long: make soak, make test-guest"]
fn a_killed_guest_does_not_affect_another() -> Result<()> {
    let (image_a, image_b) = (HostImage::sparse(128)?, HostImage::sparse(128)?);
    let mut daemon =
        VhostUserDaemon::start(&[DaemonDisk::new("a", image_a.path(), 2), DaemonDisk::new("b", image_b.path(), 2)])?;
    let disk_a = GuestDisk::new("a", &daemon.socket("a"), 2);
    let mut victim = Guest::builder().disk(disk_a.clone()).boot()?;
    let mut other_guest = Guest::builder().disk(GuestDisk::new("b", &daemon.socket("b"), 2)).boot()?;

    other_guest.start("verify", &FioJobs::verified_random_writes("/dev/vda", 2, 0, 64).script("verify"))?;
    wait_for_writes(&mut other_guest, "verify", &image_b)?;
    victim.start("endless", &endless_writes())?;
    wait_for_writes(&mut victim, "endless", &image_a)?;
    ensure!(other_guest.is_running("verify")?, "the other guest's verification ended before the kill: make it longer");
    victim.kill()?;

    let outcome = other_guest.finish("verify", Bound::seconds(240))?;
    FioOutcome::read(outcome.status, &outcome.output)?.must_have_verified()?;
    daemon.must_run()?;

    // The disk of the killed guest serves the next one.
    let mut next = Guest::builder().disk(disk_a).boot()?;
    FioJobs::verified_random_writes("/dev/vda", 2, 64, 16).run(&mut next, Bound::seconds(120))?.must_have_verified()?;
    next.power_off()?;
    other_guest.power_off()?;
    daemon.stop().map(drop)
}
