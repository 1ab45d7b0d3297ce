//! Functions of a disk on a real Xen besides reads and writes: flush, discard, read-only, large blocks, resize.

use anyhow::{Result, ensure};
use mqblk_test_bounds::Bound;
use mqblk_tests::guest::{FioJobs, Shell};
use mqblk_tests::xen::{
    BackendDisk, BackendProgram, BlkfrontParameters, Dom0Image, Domain, DomainConfig, XenBackend, XenHost,
};

const MIB: u64 = 1 << 20;

/// The disk's size in MiB, before and after.
const SIZE: u32 = 24;
const GROWN: u32 = 48;

/// Number of the guest's writes, each with or without a flush.
const FLUSHES: u64 = 20;

struct Rig {
    server: BackendProgram,
    host: XenHost,
    backend: XenBackend,
    guest: Domain,
}

#[test]
fn flush_discard_read_only_and_size() -> Result<()> {
    let server = BackendProgram::from_environment()?;
    let mut host = server.boot(XenHost::builder("disk"))?;
    let data = Dom0Image::full(&mut host, "data", SIZE)?;
    let small = Dom0Image::full(&mut host, "small", 2)?;
    let mut disks = vec![BackendDisk::new("data", &data, "queues=2"), BackendDisk::new("small", &small, "queues=2")];
    if server == BackendProgram::Mqblk {
        let image = Dom0Image::sparse(&mut host, "blocks", 32)?;
        disks.push(BackendDisk::new("blocks", &image, "queues=2,block-size=4096"));
    }
    let backend = XenBackend::start(server, &mut host, &disks)?;
    let mut guest = Domain::create(&mut host, &DomainConfig::new("guest"))?;
    guest.load_blkfront(BlkfrontParameters::default())?;
    backend.attach(&mut host, &mut guest, "xvda", "data")?;
    let mut rig = Rig { server, host, backend, guest };

    flushes_reach_the_device(&mut rig, &data)?;
    discards_make_holes(&mut rig, &data)?;
    size_follows_the_device(&mut rig, &data)?;
    rig.guest.must_have_no_warnings()?;
    read_only_is_read_only(&mut rig, &small)?;
    if rig.server == BackendProgram::Mqblk {
        large_blocks(&mut rig)?;
    }

    let Rig { mut host, backend, guest, .. } = rig;
    guest.power_off(&mut host)?;
    backend.stop(&mut host)?;
    host.power_off()
}

/// Single 4 KiB writes to a disk, one after another. `more` are arguments of each dd.
fn writes(disk: &str, more: &str) -> String {
    format!(
        "for i in $(seq {FLUSHES}); do
             dd if=/dev/zero of=/dev/{disk} bs=4k count=1 seek=$i oflag=direct {more} 2>&1 || exit
         done"
    )
}

/// Checks flushes by the count of dom0's kernel for the loop device.
fn flushes_reach_the_device(rig: &mut Rig, image: &Dom0Image) -> Result<()> {
    let Rig { host, guest, .. } = rig;
    assert_eq!(guest.must("cat /sys/block/xvda/queue/write_cache")?, "write back");
    let before = image.flushes(host)?;
    guest.must(&writes("xvda", ""))?;
    let written = image.flushes(host)?;
    assert_eq!(written, before, "a write alone flushes nothing");
    guest.must(&writes("xvda", "conv=fsync"))?;
    let flushed = image.flushes(host)? - written;
    ensure!(flushed >= FLUSHES, "the guest flushed {FLUSHES} times, dom0's device was flushed {flushed} times");
    Ok(())
}

/// Checks that exactly the range is a hole in dom0's file, and that the data around it is intact.
fn discards_make_holes(rig: &mut Rig, image: &Dom0Image) -> Result<()> {
    let Rig { host, guest, .. } = rig;
    let limit: u64 = guest.queue_attribute("xvda", "discard_max_bytes")?.parse()?;
    ensure!(limit > 0, "the guest may not discard");
    let full = image.allocated(host)?;
    ensure!(full >= u64::from(SIZE) * MIB, "the image should be allocated: {full} bytes");
    let beside = (image.checksum(host, 7, 1)?, image.checksum(host, 16, 1)?);
    guest.must("/sbin/blkdiscard -o 8M -l 8M /dev/xvda")?;
    let left = image.allocated(host)?;
    assert_eq!(left + 8 * MIB, full, "8 MiB were discarded");
    assert_eq!((image.checksum(host, 7, 1)?, image.checksum(host, 16, 1)?), beside, "what is beside was changed");
    guest.must("dd if=/dev/xvda bs=1M skip=8 count=8 iflag=direct 2>/dev/null | cmp -n 8388608 - /dev/zero").map(drop)
}

/// Checks that the connected guest sees a resize, and can use the added space.
fn size_follows_the_device(rig: &mut Rig, image: &Dom0Image) -> Result<()> {
    let Rig { host, guest, backend, .. } = rig;
    assert_eq!(guest.must("cat /sys/block/xvda/size")?, (SIZE * 2048).to_string());
    image.resize(host, GROWN)?;
    backend.report_new_size(host, guest, "xvda")?;
    guest.wait_sectors("xvda", u64::from(GROWN) * 2048)?;
    FioJobs::verified_random_writes("/dev/xvda", 2, SIZE, 4).run(guest, Bound::seconds(90))?.must_have_verified()?;
    let write_block = |block| format!("dd if=/dev/zero of=/dev/xvda bs=4k seek={block} count=1 oflag=direct");
    guest.must(&write_block(GROWN * 256 - 1))?;
    let beyond = guest.run(&write_block(GROWN * 256))?;
    ensure!(beyond.status != 0, "a write beyond the end succeeded: {}", beyond.output);
    Ok(())
}

fn read_only_is_read_only(rig: &mut Rig, image: &Dom0Image) -> Result<()> {
    let Rig { host, guest, backend, .. } = rig;
    backend.attach_readonly(host, guest, "xvdb", "small")?;
    assert_eq!(guest.must("cat /sys/block/xvdb/ro")?, "1");
    let before = image.checksum(host, 0, 2)?;
    let write = guest.run("dd if=/dev/zero of=/dev/xvdb bs=4096 count=1 oflag=direct")?;
    ensure!(write.status != 0, "a write to a read-only disk succeeded: {}", write.output);
    let seen = guest.must("dd if=/dev/xvdb bs=64k iflag=direct 2>/dev/null | sha256sum")?;
    assert_eq!(seen.split_whitespace().next(), Some(before.as_str()), "what the guest reads");
    assert_eq!(image.checksum(host, 0, 2)?, before, "a read-only disk was changed");
    backend.detach(host, guest, "xvdb")
}

fn large_blocks(rig: &mut Rig) -> Result<()> {
    let Rig { host, guest, backend, .. } = rig;
    backend.attach(host, guest, "xvdc", "blocks")?;
    assert_eq!(guest.queue_attribute("xvdc", "logical_block_size")?, "4096");
    assert_eq!(guest.must("cat /sys/block/xvdc/size")?, (32 * 2048).to_string());
    FioJobs::new(
        "--name=verify --filename=/dev/xvdc --ioengine=io_uring --direct=1 --iodepth=8 --thread --rw=randwrite \
         --bssplit=4k/50:12k/20:64k/30 --verify=crc32c --verify_fatal=1 --do_verify=1 --size=4M",
    )
    .run(guest, Bound::seconds(90))?
    .must_have_verified()?;
    guest.must_have_no_warnings()?;
    backend.detach(host, guest, "xvdc")
}
