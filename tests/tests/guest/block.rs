//! A real guest's use of a disk: data, a file system, discards, flushes, and the attributes that it sees.
//!
//! Full paths, because busybox's shell prefers its own programs of the same name.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use mqblk_test_bounds::Bound;
use mqblk_tests::guest::{
    DaemonDisk, DaemonProgram, FioJobs, Guest, GuestDisk, HostImage, LoopDevice, Shell, VhostUserDaemon,
};

const MIB: u64 = 1 << 20;

/// Copies the guest's own programs to /mnt and compares every byte after the page cache was dropped.
const FILL_AND_COMPARE: &str = "
set -e
mkfs.ext4 -q -F /dev/vda
mount -t ext4 /dev/vda /mnt
mkdir /mnt/a /mnt/b
cp -a /sbin /lib /mnt/a/
cp -a /mnt/a/. /mnt/b/
(cd /mnt/a && find . -type f | sort | xargs sha256sum) >/run/sums
umount /mnt
e2fsck -f -n /dev/vda
mount -t ext4 /dev/vda /mnt
(cd /mnt/a && sha256sum -c /run/sums >/dev/null)
(cd /mnt/b && sha256sum -c /run/sums >/dev/null)
";

#[test]
fn data_file_system_and_discard() -> Result<()> {
    let image = HostImage::full(192)?;
    let mut disk = DaemonDisk::new("data", image.path(), 2);
    let ours = DaemonProgram::from_environment()? == DaemonProgram::Mqblk;
    if ours {
        disk = disk.option("serial", "mqblk-serial-0123456");
    }
    let daemon = VhostUserDaemon::start(&[disk])?;
    let mut guest = Guest::builder().disk(GuestDisk::new("data", &daemon.socket("data"), 2)).boot()?;

    let sectors: u64 = guest.must("cat /sys/block/vda/size")?.parse()?;
    let bytes: u64 = guest.must("blockdev --getsize64 /dev/vda")?.parse()?;
    assert_eq!((bytes, bytes / sectors), (image.len(), 512));
    if ours {
        assert_eq!(guest.must("cat /sys/block/vda/serial")?, "mqblk-serial-0123456");
    }

    discard_and_zero(&mut guest, &image)?;

    FioJobs::verified_random_writes("/dev/vda", 3, 64, 32)
        .run(&mut guest, Bound::seconds(150))?
        .must_have_verified()?;
    let beside = image.read(160 * MIB, MIB as usize)?;
    ensure!(beside.iter().all(|&byte| byte == 0xa5), "a write went beyond fio's last block");

    guest.must_within(FILL_AND_COMPARE, Bound::seconds(120))?;
    trim(&mut guest, &image)?;
    guest.must("umount /mnt && e2fsck -f -n /dev/vda")?;
    guest.power_off()?;
    daemon.stop()?;

    let check = Command::new("e2fsck").args(["-f", "-n"]).arg(image.path()).output().context("cannot run e2fsck")?;
    ensure!(check.status.success(), "the host's e2fsck: {}", String::from_utf8_lossy(&check.stdout));
    Ok(())
}

/// Checks discard and write zeroes without and with the UNMAP flag, each on its own 16 MiB, and that nothing else
/// changes.
fn discard_and_zero(guest: &mut Guest, image: &HostImage) -> Result<()> {
    for limit in ["discard_max_bytes", "write_zeroes_max_bytes"] {
        let bytes: u64 = guest.must(&format!("cat /sys/block/vda/queue/{limit}"))?.parse()?;
        ensure!(bytes > 0, "the guest may not use it: {limit} is 0");
    }
    let full = image.allocated()?;
    ensure!(full >= image.len(), "the image should be allocated: {full} of {} bytes", image.len());

    guest.must("/sbin/blkdiscard -o 16M -l 16M /dev/vda")?;
    ensure!(image.is_hole(16 * MIB, 16 * MIB)?, "/sbin/blkdiscard left data in the host's file");
    let discarded = image.allocated()?;
    ensure!(discarded + 16 * MIB <= full + MIB, "/sbin/blkdiscard freed too little: {full} then {discarded} bytes");

    // BLKZEROOUT forbids unmapping: the range stays allocated.
    guest.must("/sbin/blkdiscard -z -o 48M -l 16M /dev/vda")?;
    ensure!(image.is_zero(48 * MIB, 16 * MIB)?, "/sbin/blkdiscard -z left data in the host's file");
    let zeroed = image.allocated()?;
    ensure!(
        zeroed + MIB > discarded,
        "/sbin/blkdiscard -z freed space that it must keep: {discarded} then {zeroed} bytes"
    );

    // Punching a hole in a block device is write-zeroes with the UNMAP flag.
    guest.must("/sbin/fallocate --punch-hole --offset 80M --length 16M /dev/vda")?;
    ensure!(image.is_zero(80 * MIB, 16 * MIB)?, "/sbin/fallocate --punch-hole left data in the host's file");
    ensure!(image.is_hole(80 * MIB, 16 * MIB)?, "/sbin/fallocate --punch-hole left no hole in the host's file");

    // A range that ends off the file system's blocks: exactly these sectors.
    guest.must("/sbin/blkdiscard -z -o 117442048 -l 1536 /dev/vda")?;
    let around = image.read(117_442_048 - 512, 512 + 1536 + 512)?;
    ensure!(around[512..2048].iter().all(|&byte| byte == 0), "three zeroed sectors are not zero");
    for (what, part) in [("before", &around[..512]), ("after", &around[2048..])] {
        ensure!(part.iter().all(|&byte| byte == 0xa5), "the sector {what} three zeroed ones was changed");
    }
    for at in [0, 32, 64, 96] {
        let kept = image.read(at * MIB, 16 * MIB as usize)?;
        ensure!(kept.iter().all(|&byte| byte == 0xa5), "the 16 MiB at {at} MiB were changed");
    }
    Ok(())
}

/// Checks that fstrim, which sends many ranges, frees the blocks of deleted files on the host.
fn trim(guest: &mut Guest, image: &HostImage) -> Result<()> {
    guest.must("sync; fstrim /mnt")?;
    let before = image.allocated()?;
    guest.must("rm -r /mnt/b; sync; fstrim /mnt")?;
    let after = image.allocated()?;
    ensure!(after + 4 * MIB < before, "fstrim freed too little in the host: {before} then {after} bytes");
    guest.must("cd /mnt/a; echo 3 >/proc/sys/vm/drop_caches; sha256sum -c /run/sums >/dev/null").map(drop)
}

#[test]
#[ignore = "long: make soak, make test-guest"]
fn block_devices_read_only_and_flush() -> Result<()> {
    let (image_4096, image_512, image_ro) = (HostImage::full(64)?, HostImage::full(64)?, HostImage::full(16)?);
    let (loop_4096, loop_512) = (LoopDevice::attach(&image_4096, 4096)?, LoopDevice::attach(&image_512, 512)?);
    let daemon = VhostUserDaemon::start(&[
        DaemonDisk::new("big", loop_4096.path(), 2).option("block-size", "4096"),
        DaemonDisk::new("small", loop_512.path(), 2),
        DaemonDisk::new("ro", image_ro.path(), 2).option("readonly", "on"),
    ])?;
    let mut guest = Guest::builder()
        .disk(GuestDisk::new("big", &daemon.socket("big"), 2))
        .disk(GuestDisk::new("small", &daemon.socket("small"), 2))
        .disk(GuestDisk::new("ro", &daemon.socket("ro"), 2))
        .boot()?;

    topology_is_the_hosts(&mut guest, "vda", &loop_4096)?;
    topology_is_the_hosts(&mut guest, "vdb", &loop_512)?;
    FioJobs::new(
        "--name=verify --filename=/dev/vda --ioengine=io_uring --direct=1 --iodepth=8 --thread --rw=randwrite \
         --bssplit=4k/50:12k/20:64k/30 --verify=crc32c --verify_fatal=1 --do_verify=1 --size=32M",
    )
    .run(&mut guest, Bound::seconds(120))?
    .must_have_verified()?;

    read_only_is_read_only(&mut guest, &image_ro)?;
    flush_reaches_the_device(&mut guest, &loop_512)?;
    write_through_is_durable(&mut guest, &loop_512)?;
    guest.power_off()?;

    let stopped = daemon.stop()?;
    if stopped.server() == DaemonProgram::Mqblk {
        let flushes = stopped.queue_counter("small", 0, "flushes")? + stopped.queue_counter("small", 1, "flushes")?;
        ensure!(flushes >= FLUSHES, "{flushes} flushes counted, the guest asked for {FLUSHES} or more");
    }
    Ok(())
}

fn topology_is_the_hosts(guest: &mut Guest, name: &str, host: &LoopDevice) -> Result<()> {
    let mut attributes = vec!["logical_block_size", "physical_block_size", "minimum_io_size"];
    if DaemonProgram::from_environment()? == DaemonProgram::Mqblk {
        attributes.push("optimal_io_size"); // qemu-storage-daemon always says one block
    }
    for attribute in attributes {
        let seen = guest.must(&format!("cat /sys/block/{name}/queue/{attribute}"))?;
        assert_eq!(seen, host.queue_attribute(attribute)?, "{attribute} of {name}");
    }
    Ok(())
}

fn read_only_is_read_only(guest: &mut Guest, image: &HostImage) -> Result<()> {
    assert_eq!(guest.must("cat /sys/block/vdc/ro")?, "1");
    let write = guest.run("dd if=/dev/zero of=/dev/vdc bs=4096 count=1 oflag=direct")?;
    ensure!(write.status != 0, "a write to a read-only disk succeeded: {}", write.output);
    let discard = guest.run("/sbin/blkdiscard /dev/vdc")?;
    ensure!(discard.status != 0, "a discard of a read-only disk succeeded: {}", discard.output);
    let sum = guest.must("sha256sum </dev/vdc")?;
    let expected = Command::new("sha256sum").arg(image.path()).output()?;
    assert_eq!(sum.split_whitespace().next(), String::from_utf8(expected.stdout)?.split_whitespace().next());
    let kept = image.read(0, image.len() as usize)?;
    ensure!(kept.iter().all(|&byte| byte == 0xa5), "a read-only disk was changed");
    Ok(())
}

/// Number of the guest's writes, each with or without a flush.
const FLUSHES: u64 = 20;

/// Single 4 KiB writes to a device, one after another. `more` are arguments of each dd.
fn writes(device: &str, more: &str) -> String {
    format!(
        "for i in $(seq {FLUSHES}); do
             dd if=/dev/zero of={device} bs=4k count=1 seek=$i oflag=direct {more} 2>&1 || exit
         done"
    )
}

/// Checks flushes by the host kernel's count for the loop device: only fdatasync or O_DSYNC of its node causes one.
fn flush_reaches_the_device(guest: &mut Guest, device: &LoopDevice) -> Result<()> {
    if DaemonProgram::from_environment()? == DaemonProgram::QemuStorageDaemon {
        guest.must("echo 'write back' >/sys/block/vdb/cache_type")?; // it begins with write through
    }
    assert_eq!(guest.must("cat /sys/block/vdb/cache_type")?, "write back");
    let before = device.flushes()?;
    guest.must(&writes("/dev/vdb", ""))?;
    let written = device.flushes()?;
    assert_eq!(written, before, "write back: a write alone flushes nothing");
    guest.must(&writes("/dev/vdb", "conv=fsync"))?;
    let flushed = device.flushes()? - written;
    ensure!(flushed >= FLUSHES, "the guest flushed {FLUSHES} times, the host's device was flushed {flushed} times");
    Ok(())
}

/// Checks CONFIG_WCE: with the cache disabled each write is durable before its completion; then the cache is enabled
/// again.
fn write_through_is_durable(guest: &mut Guest, device: &LoopDevice) -> Result<()> {
    guest.must("echo 'write through' >/sys/block/vdb/cache_type")?;
    assert_eq!(guest.must("cat /sys/block/vdb/cache_type")?, "write through");
    let before = device.flushes()?;
    guest.must(&writes("/dev/vdb", ""))?;
    let flushed = device.flushes()? - before;
    // QEMU 7.2 counts a write as dirty only after its emulated FUA: the first one after a flush is not flushed.
    let wanted =
        if DaemonProgram::from_environment()? == DaemonProgram::QemuStorageDaemon { FLUSHES - 1 } else { FLUSHES };
    ensure!(flushed >= wanted, "write through: {FLUSHES} writes, but the host's device was flushed {flushed} times");

    guest.must("echo 'write back' >/sys/block/vdb/cache_type")?;
    assert_eq!(guest.must("cat /sys/block/vdb/cache_type")?, "write back");
    let before = device.flushes()?;
    guest.must(&writes("/dev/vdb", ""))?;
    assert_eq!(device.flushes()?, before, "write back again: a write alone flushes nothing");
    Ok(())
}

/// A disk with `cache=writethrough` reports that, and each write is durable before its completion.
#[test]
fn served_write_through() -> Result<()> {
    if DaemonProgram::from_environment()? == DaemonProgram::QemuStorageDaemon {
        return Ok(()); // it has no such option
    }
    let image = HostImage::full(16)?;
    let device = LoopDevice::attach(&image, 512)?;
    let daemon =
        VhostUserDaemon::start(&[DaemonDisk::new("through", device.path(), 1).option("cache", "writethrough")])?;
    let mut guest = Guest::builder().disk(GuestDisk::new("through", &daemon.socket("through"), 1)).boot()?;
    assert_eq!(guest.must("cat /sys/block/vda/cache_type")?, "write through");
    let before = device.flushes()?;
    guest.must(&writes("/dev/vda", ""))?;
    let flushed = device.flushes()? - before;
    ensure!(flushed >= FLUSHES, "{FLUSHES} writes, but the host's device was flushed {flushed} times");
    guest.power_off()?;
    daemon.stop().map(drop)
}
