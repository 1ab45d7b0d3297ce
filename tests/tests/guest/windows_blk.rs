//! The requests of Windows' virtio-blk driver, to mqblk and to QEMU's own device: both complete them alike.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::Result;
use mqblk_tests::guest::{Vmm, with_each_vmm};
use mqblk_tests::hostile::daemon::HostileDaemon;
use mqblk_tests::hostile::request::STATUS_OK;
use mqblk_tests::windows::{
    Buffer, Buffers, PAGE, QtestDevice, QtestModel, VhostUserDevice, Viostor, new_image, pattern,
};

const MIB: u64 = 1 << 20;
/// Bytes of the disk.
const LEN: u64 = 64 * MIB;
const QUEUES: u16 = 2;
/// Bytes of a sector of virtio-blk.
const SECTOR: u64 = 512;

/// A buffer's offset in its first page, and its bytes. Windows' alignment of buffers is four bytes.
fn shapes(longest: u64) -> Vec<(u64, u64)> {
    let lens = [512, 1024, 4096, 4608, 64 << 10, MIB - PAGE, longest];
    let offsets = [0, 4, 0x2c4, 512, PAGE - 4];
    lens.iter().flat_map(|len| offsets.map(|offset| (offset, *len))).collect()
}

/// Writes each shape and reads it in another one.
fn shapes_are_verified(driver: &mut Viostor, name: &str) {
    let mut buffers = Buffers::default();
    let (longest, block) = (driver.limits().transfer, u64::from(driver.limits().block));
    let fits = |len: u64| len.is_multiple_of(block) && len <= longest;
    let all: Vec<_> = shapes(longest).into_iter().filter(|(_, len)| fits(*len)).collect();
    assert!(all.len() >= 15, "{name}: {all:?}");
    for (at, &(offset, len)) in all.iter().enumerate() {
        let what = format!("{name}: {len} bytes at offset {offset} of a page");
        let (sector, queue) = (at as u64 * 24, at as u16 % QUEUES);
        let bytes = pattern(sector * SECTOR, len, at as u64);
        buffers.free_all();
        let written = buffers.scattered(offset, len);
        written.fill(driver.rings().memory(), &bytes);
        driver.transfer(queue, 0, true, sector, &written);
        driver.succeeds(queue, &what);
        buffers.free_all();
        // The page that was the first is another one now.
        buffers.scattered(0, PAGE);
        let (_, other) = all[(at * 7 + 3) % all.len()];
        let read = buffers.scattered(all[(at * 5 + 2) % all.len()].0, len.min(other.max(block)));
        driver.transfer(QUEUES - 1 - queue, 1, false, sector, &read);
        driver.succeeds(QUEUES - 1 - queue, &what);
        assert!(read.content(driver.rings().memory()) == bytes[..read.len() as usize], "{what}");
    }
    // Pieces of a large page, longer than any page.
    for (offset, len) in [(4, 2 * MIB), (0, longest), (PAGE - 512, 192 << 10)] {
        buffers.free_all();
        let written = buffers.contiguous(offset, len.min(longest));
        written.fill(driver.rings().memory(), &pattern(0, written.len(), offset));
        driver.transfer(0, 2, true, 8, &written);
        driver.succeeds(0, "a piece of a large page");
        buffers.free_all();
        let read = buffers.scattered(0, written.len());
        driver.transfer(0, 2, false, 8, &read);
        driver.succeeds(0, "pages");
        assert!(read.content(driver.rings().memory()) == pattern(0, written.len(), offset), "{name}: {offset}, {len}");
    }
}

/// Writes with FUA, as a write and a flush; the image has their data.
fn fua_is_a_write_and_a_flush(driver: &mut Viostor, image: &Path, name: &str) {
    let bytes = pattern(0, 8192, 77);
    let buffer = Buffers::default().scattered(0x400, 8192);
    buffer.fill(driver.rings().memory(), &bytes);
    driver.transfer(0, 5, true, 64, &buffer);
    driver.succeeds(0, "a write");
    // The driver sends the flush from the write's own slot.
    driver.flush(0, 5);
    driver.succeeds(0, "its flush");
    let mut found = vec![0; 8192];
    File::open(image).and_then(|file| file.read_exact_at(&mut found, 64 * SECTOR)).expect("the image");
    assert!(found == bytes, "{name}");
}

/// Discards as those of "Optimize drive": as many ranges as the driver sends, of any alignment. The other blocks keep
/// their data.
fn discards_leave_the_rest(driver: &mut Viostor, name: &str) {
    let limits = driver.limits();
    assert!(limits.discard_ranges > 0 && limits.discard_sectors >= 8, "{name}: {limits:?}");
    let alignment = limits.discard_alignment;
    assert!(alignment == 0 || alignment >= 4096 && alignment.is_power_of_two(), "{name}: {limits:?}");
    let (start, block) = (16 * MIB / SECTOR, u64::from(limits.block) / SECTOR);
    let mut buffers = Buffers::default();
    let buffer = buffers.scattered(0, MIB / 2);
    let bytes = pattern(start * SECTOR, MIB / 2, 5);
    buffer.fill(driver.rings().memory(), &bytes);
    driver.transfer(0, 0, true, start, &buffer);
    driver.succeeds(0, "a write");
    let ranges: Vec<(u64, u32)> = (0..u64::from(limits.discard_ranges))
        .map(|index| (start + index * 48 + index % 3 * block, (16 + index % 2 * block) as u32))
        .collect();
    driver.unmap(1, 3, &ranges);
    let (slot, status) = driver.wait(1);
    assert_eq!((slot, status), (3, STATUS_OK), "{name}: {} ranges", ranges.len());
    buffers.free_all();
    let read = buffers.scattered(0, MIB / 2);
    driver.transfer(0, 1, false, start, &read);
    driver.succeeds(0, "a read");
    let found = read.content(driver.rings().memory());
    for sector in 0..MIB / 2 / SECTOR {
        let range = |&(from, count): &(u64, u32)| (from..from + u64::from(count)).contains(&(start + sector));
        let at = (sector * SECTOR) as usize..((sector + 1) * SECTOR) as usize;
        let kept = found[at.clone()] == bytes[at.clone()];
        // A device may keep what it should discard.
        let zero = found[at].iter().all(|byte| *byte == 0);
        assert!(kept || zero && ranges.iter().any(range), "{name}: sector {sector}");
    }
}

/// Resets the device with requests in flight, and goes on with the same slots.
fn resets_go_on(driver: &mut Viostor, name: &str) {
    let mut buffers = Buffers::default();
    let old: Vec<Buffer> = (0..16).map(|_| buffers.scattered(0x200, 32 << 10)).collect();
    for round in 0..5 {
        for (slot, buffer) in old.iter().enumerate() {
            buffer.fill(driver.rings().memory(), &pattern(slot as u64 * MIB, 32 << 10, round));
            driver.transfer(slot as u16 % QUEUES, slot as u16, true, slot as u64 * MIB / SECTOR, buffer);
        }
        driver.reset_bus();
        // Windows sends the same requests again.
        for (slot, buffer) in old.iter().enumerate() {
            driver.transfer(slot as u16 % QUEUES, slot as u16, true, slot as u64 * MIB / SECTOR, buffer);
        }
        for slot in 0..old.len() as u16 {
            driver.succeeds(slot % QUEUES, "a write after the reset");
        }
        for (slot, buffer) in old.iter().enumerate() {
            buffer.fill(driver.rings().memory(), &vec![0; 32 << 10]);
            driver.transfer(0, slot as u16, false, slot as u64 * MIB / SECTOR, buffer);
            driver.succeeds(0, "a read after the reset");
            let found = buffer.content(driver.rings().memory());
            assert!(found == pattern(slot as u64 * MIB, 32 << 10, round), "{name}: round {round}, slot {slot}");
        }
    }
}

fn all_of_it(driver: &mut Viostor, image: &Path, name: &str) {
    assert_eq!(driver.limits().sectors, LEN / SECTOR, "{name}");
    assert!(driver.limits().transfer >= 256 << 10, "{name}: {:?}", driver.limits());
    assert_eq!(driver.serial(), *b"windows\0\0\0\0\0\0\0\0\0\0\0\0\0", "{name}");
    shapes_are_verified(driver, name);
    fua_is_a_write_and_a_flush(driver, image, name);
    discards_leave_the_rest(driver, name);
    resets_go_on(driver, name);
}

#[test]
fn viostor_on_mqblk() -> Result<()> {
    for keys in ["direct=on", "direct=off", "direct=on,block-size=4096"] {
        let folder = tempfile::tempdir_in("/var/tmp")?;
        let image = folder.path().join("image");
        new_image(&image, LEN)?;
        let disk = format!("path={},serial=windows,queues={QUEUES},queue-size=256,{keys}", image.display());
        let daemon = HostileDaemon::start_with(2, &[("disk", &disk)], &["--sandbox", "off"]);
        let mut driver = Viostor::start(Box::new(VhostUserDevice::connect(&daemon.socket("disk"))), QUEUES);
        all_of_it(&mut driver, &image, keys);
        assert_eq!(daemon.warnings("disk"), [""; 0], "{keys}");
        drop(driver);
        daemon.stop();
    }
    Ok(())
}

/// The reference: the driver is right about QEMU's own device.
#[test]
fn viostor_on_qemus_own_device() -> Result<()> {
    with_each_vmm(|vmm: Vmm| {
        let folder = tempfile::tempdir_in("/var/tmp")?;
        let image = folder.path().join("image");
        new_image(&image, LEN)?;
        let device = QtestDevice::start(vmm, QtestModel::Blk, &image, QUEUES)?;
        let mut driver = Viostor::start(Box::new(device), QUEUES);
        all_of_it(&mut driver, &image, "QEMU");
        Ok(())
    })
}
