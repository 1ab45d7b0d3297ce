//! The commands of Windows' virtio-scsi driver and of the disk class driver above it, to mqblk and to QEMU's own
//! device: mqblk carries out all that QEMU does, and refuses with the same sense data.

use std::path::Path;

use anyhow::Result;
use mqblk_tests::guest::{Vmm, with_each_vmm};
use mqblk_tests::hostile::daemon::HostileDaemon;
use mqblk_tests::hostile::fuse::HangingFile;
use mqblk_tests::hostile::wait_for;
use mqblk_tests::windows::{
    Answer, Buffer, Buffers, PAGE, QtestDevice, QtestModel, ScsiData, TaskManagement, VhostUserDevice, Vioscsi,
    new_image, pattern,
};

const MIB: u64 = 1 << 20;
/// Bytes of the disk.
const LEN: u64 = 64 * MIB;
const QUEUES: u16 = 2;
const BLOCK: u64 = 512;
/// The disk, and addresses without one.
const DISK: (u8, u8) = (0, 0);
const OTHER: (u8, u8) = (0, 1);
const NO_LUN: (u8, u8) = (0, 5);
const NO_TARGET: (u8, u8) = (7, 0);

/// Data of a command in the table.
#[derive(Clone, Copy)]
enum Data {
    None,
    /// Bytes that the driver makes room for.
    In(u64),
    Out(&'static [u8]),
}

/// A command: its name, unit, CDB and data.
type Row = (&'static str, (u8, u8), &'static [u8], Data);

/// UNMAP's parameter list: blocks 4096 and on (8), 8192 and on (16), 8193 and on (0).
const UNMAP: &[u8] = &[
    0, 54, 0, 48, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x20, 0, 0, 0, 0,
    16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x20, 1, 0, 0, 0, 0, 0, 0, 0, 0,
];
/// MODE SELECT(6)'s list: the caching page, write cache on.
const CACHING: &[u8] = &[0, 0, 0, 0, 8, 18, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// The commands with which Windows finds a disk, and looks for faults of it.
#[rustfmt::skip]
const FINDING: &[Row] = &[
    ("REPORT LUNS, 16 bytes", DISK, &[0xa0, 0, 0, 0, 0, 0, 0, 0, 0, 16, 0, 0], Data::In(16)),
    ("REPORT LUNS", DISK, &[0xa0, 0, 0, 0, 0, 0, 0, 0, 8, 8, 0, 0], Data::In(0x808)),
    ("REPORT LUNS of an absent LUN", NO_LUN, &[0xa0, 0, 0, 0, 0, 0, 0, 0, 0, 16, 0, 0], Data::In(16)),
    ("REPORT LUNS of an absent target", NO_TARGET, &[0xa0, 0, 0, 0, 0, 0, 0, 0, 0, 16, 0, 0], Data::In(16)),
    ("INQUIRY", DISK, &[0x12, 0, 0, 0, 36, 0], Data::In(36)),
    ("INQUIRY, 255 bytes", DISK, &[0x12, 0, 0, 0, 255, 0], Data::In(255)),
    ("INQUIRY, 5 bytes", DISK, &[0x12, 0, 0, 0, 5, 0], Data::In(5)),
    ("INQUIRY of an absent LUN", NO_LUN, &[0x12, 0, 0, 0, 36, 0], Data::In(36)),
    ("INQUIRY of an absent target", NO_TARGET, &[0x12, 0, 0, 0, 36, 0], Data::In(36)),
    ("VPD 00h", DISK, &[0x12, 1, 0, 0, 255, 0], Data::In(255)),
    ("VPD 80h", DISK, &[0x12, 1, 0x80, 0, 255, 0], Data::In(255)),
    ("VPD 83h", DISK, &[0x12, 1, 0x83, 0, 255, 0], Data::In(255)),
    ("VPD 83h, 4 bytes", DISK, &[0x12, 1, 0x83, 0, 4, 0], Data::In(4)),
    ("VPD B0h", DISK, &[0x12, 1, 0xb0, 0, 64, 0], Data::In(64)),
    ("VPD B1h", DISK, &[0x12, 1, 0xb1, 0, 64, 0], Data::In(64)),
    ("VPD B2h", DISK, &[0x12, 1, 0xb2, 0, 64, 0], Data::In(64)),
    ("VPD of a vendor", DISK, &[0x12, 1, 0xc9, 0, 64, 0], Data::In(64)),
    ("INQUIRY with a page, without EVPD", DISK, &[0x12, 0, 0x80, 0, 64, 0], Data::In(64)),
    ("TEST UNIT READY", DISK, &[0; 6], Data::None),
    ("TEST UNIT READY of an absent LUN", NO_LUN, &[0; 6], Data::None),
    ("REQUEST SENSE", DISK, &[0x03, 0, 0, 0, 18, 0], Data::In(18)),
    ("READ CAPACITY(10)", DISK, &[0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0], Data::In(8)),
    ("READ CAPACITY(16)", DISK, &[0x9e, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 32, 0, 0], Data::In(32)),
    ("MODE SENSE(6), caching", DISK, &[0x1a, 0, 8, 0, 192, 0], Data::In(192)),
    ("MODE SENSE(6), caching, changeable", DISK, &[0x1a, 0, 0x48, 0, 192, 0], Data::In(192)),
    ("MODE SENSE(6), caching, saved", DISK, &[0x1a, 0, 0xc8, 0, 192, 0], Data::In(192)),
    ("MODE SENSE(6), all", DISK, &[0x1a, 8, 0x3f, 0, 192, 0], Data::In(192)),
    ("MODE SENSE(10), all", DISK, &[0x5a, 0, 0x3f, 0, 0, 0, 0, 1, 0, 0], Data::In(256)),
    ("MODE SENSE(10), caching", DISK, &[0x5a, 8, 8, 0, 0, 0, 0, 0, 24, 0], Data::In(24)),
    ("MODE SENSE(6) of a vendor's page", DISK, &[0x1a, 0, 0x2a, 0, 192, 0], Data::In(192)),
    ("MODE SELECT(6), caching", DISK, &[0x15, 0x10, 0, 0, 24, 0], Data::Out(CACHING)),
    ("START STOP UNIT", DISK, &[0x1b, 0, 0, 0, 1, 0], Data::None),
    ("ALLOW MEDIUM REMOVAL", DISK, &[0x1e, 0, 0, 0, 0, 0], Data::None),
    ("SYNCHRONIZE CACHE(10)", DISK, &[0x35, 0, 0, 0, 0, 0, 0, 0, 0, 0], Data::None),
    ("SYNCHRONIZE CACHE(16)", DISK, &[0x91, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], Data::None),
    ("VERIFY(10)", DISK, &[0x2f, 0, 0, 0, 0, 16, 0, 0, 8, 0], Data::None),
    ("VERIFY(16)", DISK, &[0x8f, 0, 0, 0, 0, 0, 0, 0, 0, 16, 0, 0, 0, 8, 0, 0], Data::None),
    ("READ(6)", DISK, &[0x08, 0, 0, 16, 8, 0], Data::In(4096)),
    ("READ(10)", DISK, &[0x28, 0, 0, 0, 0, 16, 0, 0, 8, 0], Data::In(4096)),
    ("READ(10) with FUA", DISK, &[0x28, 8, 0, 0, 0, 16, 0, 0, 8, 0], Data::In(4096)),
    ("READ(12)", DISK, &[0xa8, 0, 0, 0, 0, 16, 0, 0, 0, 8, 0, 0], Data::In(4096)),
    ("READ(16)", DISK, &[0x88, 0, 0, 0, 0, 0, 0, 0, 0, 16, 0, 0, 0, 8, 0, 0], Data::In(4096)),
    ("READ(10) of no block", DISK, &[0x28, 0, 0, 0, 0, 16, 0, 0, 0, 0], Data::None),
    ("READ(10) at the end", DISK, &[0x28, 0, 0, 1, 0xff, 0xff, 0, 0, 1, 0], Data::In(512)),
    ("READ(10) beyond the end", DISK, &[0x28, 0, 0, 1, 0xff, 0xff, 0, 0, 2, 0], Data::In(1024)),
    ("READ(16) far beyond the end", DISK, &[0x88, 0, 255, 255, 255, 255, 255, 255, 255, 255, 0, 0, 0, 1, 0, 0], Data::In(512)),
    ("READ(10) of an absent LUN", NO_LUN, &[0x28, 0, 0, 0, 0, 16, 0, 0, 8, 0], Data::In(4096)),
    ("UNMAP", DISK, &[0x42, 0, 0, 0, 0, 0, 0, 0, 56, 0], Data::Out(UNMAP)),
    ("UNMAP with ANCHOR", DISK, &[0x42, 1, 0, 0, 0, 0, 0, 0, 56, 0], Data::Out(UNMAP)),
    ("UNMAP of nothing", DISK, &[0x42, 0, 0, 0, 0, 0, 0, 0, 0, 0], Data::None),
    ("WRITE SAME(16) with UNMAP", DISK, &[0x93, 8, 0, 0, 0, 0, 0, 0, 0x40, 0, 0, 0, 0, 64, 0, 0], Data::Out(&[0; 512])),
    ("WRITE SAME(10)", DISK, &[0x41, 0, 0, 0, 0x50, 0, 0, 0, 64, 0], Data::Out(&[0; 512])),
    ("PERSISTENT RESERVE IN, keys", DISK, &[0x5e, 0, 0, 0, 0, 0, 0, 0, 8, 0], Data::In(8)),
    ("RESERVE(6)", DISK, &[0x16, 0, 0, 0, 0, 0], Data::None),
    ("RELEASE(6)", DISK, &[0x17, 0, 0, 0, 0, 0], Data::None),
    ("GET LBA STATUS", DISK, &[0x9e, 0x12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 32, 0, 0], Data::In(32)),
    ("LOG SENSE, thin provisioning", DISK, &[0x4d, 0, 0x4c, 0, 0, 0, 0, 0, 64, 0], Data::In(64)),
    ("LOG SENSE, temperature", DISK, &[0x4d, 0, 0x4d, 0, 0, 0, 0, 0, 64, 0], Data::In(64)),
    ("REPORT SUPPORTED OPERATION CODES", DISK, &[0xa3, 0x0c, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0], Data::In(256)),
    ("ATA PASS-THROUGH(12)", DISK, &[0xa1, 8, 14, 0, 1, 0, 0, 0, 0, 0xec, 0, 0], Data::In(512)),
    ("ATA PASS-THROUGH(16)", DISK, &[0x85, 8, 14, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0xec, 0], Data::In(512)),
    ("SECURITY PROTOCOL IN", DISK, &[0xa2, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0], Data::In(512)),
    ("READ BUFFER, descriptor", DISK, &[0x3c, 3, 0, 0, 0, 0, 0, 0, 4, 0], Data::In(4)),
    ("READ FORMAT CAPACITIES", DISK, &[0x23, 0, 0, 0, 0, 0, 0, 0, 252, 0], Data::In(252)),
    ("GET CONFIGURATION", DISK, &[0x46, 0, 0, 0, 0, 0, 0, 0, 8, 0], Data::In(8)),
    ("READ TOC", DISK, &[0x43, 0, 0, 0, 0, 0, 0, 3, 36, 0], Data::In(804)),
    ("a vendor's command", DISK, &[0xc1, 0, 0, 0, 0, 0, 0, 0, 0, 0], Data::None),
];

/// Rows that mqblk ends otherwise than QEMU, with the reason.
const OTHERWISE: &[(&str, &str)] = &[
    ("REPORT LUNS of an absent LUN", "the target answers, whichever LUN is asked"),
    ("SYNCHRONIZE CACHE(16)", "QEMU has not got it"),
    ("PERSISTENT RESERVE IN, keys", "QEMU has it for pass-through only"),
    ("GET LBA STATUS", "QEMU has not got it"),
    ("LOG SENSE, thin provisioning", "the page is not supported; in QEMU the command"),
    ("LOG SENSE, temperature", "the page is not supported; in QEMU the command"),
    ("REPORT SUPPORTED OPERATION CODES", "QEMU has not got it"),
    ("GET CONFIGURATION", "QEMU decodes a CD drive's command for a disk"),
    ("READ TOC", "QEMU decodes a CD drive's command for a disk"),
];
/// Rows whose data are the same.
const SAME_DATA: &[&str] = &["REPORT LUNS", "REPORT LUNS, 16 bytes", "VPD 00h", "VPD 80h", "READ CAPACITY(10)"];

/// Executes each command. Returns how each ended, and its data.
fn answers(driver: &mut Vioscsi) -> Vec<(Answer, Vec<u8>)> {
    let mut buffers = Buffers::default();
    let mut execute = |address, cdb: &[u8], data| {
        buffers.free_all();
        let buffer = match data {
            Data::None => return (driver.execute(address, cdb, ScsiData::None), Vec::new()),
            Data::In(len) => buffers.scattered(4, len),
            Data::Out(bytes) => buffers.scattered(8, bytes.len() as u64),
        };
        if let Data::Out(bytes) = data {
            buffer.fill(driver.rings().memory(), bytes);
            return (driver.execute(address, cdb, ScsiData::Out(&buffer)), Vec::new());
        }
        buffer.fill(driver.rings().memory(), &vec![0; buffer.len() as usize]);
        let answer = driver.execute(address, cdb, ScsiData::In(&buffer));
        (answer, buffer.content(driver.rings().memory()))
    };
    // The first command of each unit meets the unit attention of the power on.
    while !execute(DISK, &[0; 6], Data::None).0.is_good() {}
    FINDING.iter().map(|&(_, address, cdb, data)| execute(address, cdb, data)).collect()
}

/// Starts mqblk with the image as target 0, LUN 0 of a controller.
fn serve(image: &Path) -> HostileDaemon {
    let disk = format!("interface=virtio-scsi,path={},serial=windows,queues={QUEUES}", image.display());
    HostileDaemon::start_with(2, &[("disk", &disk)], &["--sandbox", "off"])
}

/// Returns how a command ended, without the residual: QEMU pads its data.
fn end_of(answer: &Answer) -> (u8, u8, Option<(u8, u8, u8)>) {
    (answer.response, answer.status, answer.sense)
}

/// Returns the data of the row of this name.
fn data_of<'a>(answers: &'a [(Answer, Vec<u8>)], name: &str) -> &'a [u8] {
    let at = FINDING.iter().position(|row| row.0 == name).expect("a row");
    &answers[at].1
}

fn compare(ours: &[(Answer, Vec<u8>)], theirs: &[(Answer, Vec<u8>)]) {
    let otherwise: Vec<&str> = FINDING
        .iter()
        .zip(ours.iter().zip(theirs))
        .filter_map(|(row, (ours, theirs))| (end_of(&ours.0) != end_of(&theirs.0)).then_some(row.0))
        .collect();
    let expected: Vec<&str> = OTHERWISE.iter().map(|(name, _)| *name).collect();
    assert_eq!(otherwise, expected, "rows that end otherwise than in QEMU");
    for name in SAME_DATA {
        assert_eq!(data_of(ours, name), data_of(theirs, name), "{name}");
    }
    let word = |from: &[u8], at: usize| u32::from_be_bytes(from[at..at + 4].try_into().expect("4 bytes"));
    // INQUIRY: a disk, connected, not removable, data of format 2, with a command queue.
    let inquiry = data_of(ours, "INQUIRY");
    assert_eq!((inquiry[0], inquiry[1], inquiry[3] & 0xf, inquiry[7] & 2), (0, 0, 2, 2), "{inquiry:02x?}");
    assert_eq!(data_of(ours, "INQUIRY of an absent LUN")[0], 0x7f, "no device is at the LUN");
    // Block limits: "Optimize drive" needs both counts, and a granularity of a power of two from 4 KiB on.
    let limits = data_of(ours, "VPD B0h");
    let (blocks, ranges, granularity) = (word(limits, 20), word(limits, 24), word(limits, 28));
    assert!(blocks >= 8 && ranges > 0, "{blocks} blocks in {ranges} ranges");
    assert!(granularity >= 8 && granularity.is_power_of_two(), "{granularity}");
    assert_eq!(word(limits, 32), 1 << 31, "aligned to block 0");
    // Logical block provisioning: UNMAP, both kinds of WRITE SAME, thin.
    let (provisioning, reference) = (data_of(ours, "VPD B2h"), data_of(theirs, "VPD B2h"));
    assert_eq!((provisioning[5] & 0xe0, provisioning[6]), (reference[5] & 0xe0, reference[6]));
    // READ CAPACITY(16): last block, bytes of a block, and LBPME.
    let (capacity, reference) = (data_of(ours, "READ CAPACITY(16)"), data_of(theirs, "READ CAPACITY(16)"));
    assert_eq!((&capacity[..12], capacity[14] & 0x80), (&reference[..12], reference[14] & 0x80));
    // The caching page: no saved values, the write cache is on.
    let (caching, reference) = (data_of(ours, "MODE SENSE(6), caching"), data_of(theirs, "MODE SENSE(6), caching"));
    assert_eq!((caching[0], &caching[12..16]), (reference[0], &reference[12..16]));
    // Device identification: Windows' clusters need a NAA or an EUI-64 designator of the logical unit.
    let ids = data_of(ours, "VPD 83h");
    assert!(ids[4] & 0xf == 1 && matches!(ids[5] & 0x3f, 2 | 3), "{ids:02x?}");
}

#[test]
fn commands_end_as_on_qemus_own_disk() -> Result<()> {
    let folder = tempfile::tempdir_in("/var/tmp")?;
    let image = folder.path().join("image");
    new_image(&image, LEN)?;
    let daemon = serve(&image);
    let ours = answers(&mut Vioscsi::start(Box::new(VhostUserDevice::connect(&daemon.socket("disk"))), QUEUES));
    daemon.stop();
    with_each_vmm(|vmm: Vmm| {
        let device = QtestDevice::start(vmm, QtestModel::Scsi, &image, QUEUES)?;
        compare(&ours, &answers(&mut Vioscsi::start(Box::new(device), QUEUES)));
        Ok(())
    })
}

/// Returns READ(16) or WRITE(16) of this many bytes.
fn transfer(is_write: bool, start: u64, len: u64) -> [u8; 16] {
    let mut cdb = [0; 16];
    cdb[0] = if is_write { 0x8a } else { 0x88 };
    cdb[2..10].copy_from_slice(&start.to_be_bytes());
    cdb[10..14].copy_from_slice(&((len / BLOCK) as u32).to_be_bytes());
    cdb
}

fn succeeds(driver: &mut Vioscsi, queue: u16, what: &str) -> u16 {
    let (slot, answer) = driver.wait(queue);
    assert!(answer.is_good() && answer.residual == 0, "{what}: {answer:?}");
    slot
}

/// Writes by buffers of up to 513 pieces that begin anywhere in a page, and reads by others.
fn shapes_are_verified(driver: &mut Vioscsi, name: &str) {
    let longest = driver.longest_transfer();
    let mut buffers = Buffers::default();
    for (round, len) in [512, 1024, 4096, 4608, 64 << 10, MIB, longest].into_iter().enumerate() {
        for (offset, other) in [(0, 4), (4, 0x2c4), (0x2c4, 512), (512, PAGE - 4), (PAGE - 4, 0)] {
            let what = format!("{name}: {len} bytes at offset {offset}, then {other}");
            let (start, queue) = (round as u64 * 5000, round as u16 % QUEUES);
            buffers.free_all();
            let (written, bytes) = (buffers.scattered(offset, len), pattern(start, len, offset));
            written.fill(driver.rings().memory(), &bytes);
            driver.submit(queue, 0, DISK, &transfer(true, start, len), ScsiData::Out(&written));
            succeeds(driver, queue, &what);
            buffers.free_all();
            buffers.scattered(0, PAGE);
            let read = buffers.scattered(other, len);
            driver.submit(QUEUES - 1 - queue, 1, DISK, &transfer(false, start, len), ScsiData::In(&read));
            succeeds(driver, QUEUES - 1 - queue, &what);
            assert!(read.content(driver.rings().memory()) == bytes, "{what}");
        }
    }
}

/// Resets with commands in flight. The driver completes them itself at once, and uses their tags again, whether the
/// device has returned them or not.
fn resets_go_on(driver: &mut Vioscsi, name: &str) {
    const OLD: u16 = 16;
    let mut buffers = Buffers::default();
    let old: Vec<Buffer> = (0..OLD).map(|_| buffers.scattered(0x200, 32 << 10)).collect();
    for round in 0..5 {
        for slot in 0..OLD {
            let (buffer, start) = (&old[usize::from(slot)], u64::from(slot) * 2048);
            buffer.fill(driver.rings().memory(), &pattern(start, 32 << 10, round));
            driver.submit(slot % QUEUES, slot, DISK, &transfer(true, start, 32 << 10), ScsiData::Out(buffer));
        }
        driver.send_reset();
        assert_eq!(driver.wait_reset(), TaskManagement(0), "{name}: FUNCTION COMPLETE");
        // All are returned by then, carried out or aborted; none is lost.
        for slot in 0..OLD {
            let (_, answer) = driver.wait(slot % QUEUES);
            // OK, ABORTED or RESET; GOOD or TASK ABORTED.
            assert!(matches!((answer.response, answer.status), (0, 0 | 0x40) | (2 | 4, _)), "{name}: {answer:?}");
        }
        // The unit attention of the reset.
        while !driver.execute(DISK, &[0; 6], ScsiData::None).is_good() {}
        for slot in 0..OLD {
            let (buffer, start) = (&old[usize::from(slot)], u64::from(slot) * 2048);
            driver.submit(slot % QUEUES, slot, DISK, &transfer(true, start, 32 << 10), ScsiData::Out(buffer));
        }
        for slot in 0..OLD {
            succeeds(driver, slot % QUEUES, "a write after the reset");
        }
        for slot in 0..OLD {
            let (buffer, start) = (&old[usize::from(slot)], u64::from(slot) * 2048);
            buffer.fill(driver.rings().memory(), &vec![0; 32 << 10]);
            driver.submit(0, slot, DISK, &transfer(false, start, 32 << 10), ScsiData::In(buffer));
            succeeds(driver, 0, "a read after the reset");
            let found = buffer.content(driver.rings().memory());
            assert!(found == pattern(start, 32 << 10, round), "{name}: round {round}, slot {slot}");
        }
    }
}

fn loads(driver: &mut Vioscsi, name: &str) {
    while !driver.execute(DISK, &[0; 6], ScsiData::None).is_good() {}
    assert!(driver.longest_transfer() >= 256 << 10, "{name}");
    shapes_are_verified(driver, name);
    resets_go_on(driver, name);
}

#[test]
fn vioscsi_on_mqblk() -> Result<()> {
    let folder = tempfile::tempdir_in("/var/tmp")?;
    let image = folder.path().join("image");
    new_image(&image, LEN)?;
    let daemon = serve(&image);
    loads(&mut Vioscsi::start(Box::new(VhostUserDevice::connect(&daemon.socket("disk"))), QUEUES), "mqblk");
    assert_eq!(daemon.warnings("disk"), [""; 0]);
    daemon.stop();
    Ok(())
}

/// The reference: the driver is right about QEMU's own device.
#[test]
fn vioscsi_on_qemus_own_device() -> Result<()> {
    with_each_vmm(|vmm: Vmm| {
        let folder = tempfile::tempdir_in("/var/tmp")?;
        let image = folder.path().join("image");
        new_image(&image, LEN)?;
        let device = QtestDevice::start(vmm, QtestModel::Scsi, &image, QUEUES)?;
        loads(&mut Vioscsi::start(Box::new(device), QUEUES), "QEMU");
        Ok(())
    })
}

/// Windows gives commands up after a minute: it resets the unit, completes them itself, and sends them again with the
/// same tags, while the device still has the old ones. Once storage answers, each is returned once, and no data are of
/// an old one.
#[test]
#[ignore = "needs root"]
fn as_root_commands_are_sent_again_while_storage_is_away() -> Result<()> {
    const COMMANDS: u16 = 8;
    let hanging = HangingFile::mount(8 << 20);
    let lun =
        |number, path: &Path| format!("controller=c,target=0,lun={number},block-size=512,path={}", path.display());
    let folder = tempfile::tempdir_in("/var/tmp")?;
    let (image, socket) = (folder.path().join("image"), folder.path().join("c.sock"));
    new_image(&image, LEN)?;
    let (controller, [away, other]) =
        (format!("id=c,socket={},queues={QUEUES}", socket.display()), [lun(0, &hanging.path()), lun(1, &image)]);
    let arguments = ["--controller", &controller, "--lun", &away, "--lun", &other, "--sandbox", "off"];
    let daemon = HostileDaemon::start_with(2, &[], &arguments);
    let mut driver = Vioscsi::start(Box::new(VhostUserDevice::connect(&socket)), QUEUES);
    for unit in [DISK, OTHER] {
        while !driver.execute(unit, &[0; 6], ScsiData::None).is_good() {}
    }
    let mut buffers = Buffers::default();
    let old: Vec<Buffer> = (0..COMMANDS).map(|_| buffers.scattered(0, PAGE)).collect();
    let new: Vec<Buffer> = (0..COMMANDS).map(|_| buffers.scattered(0, PAGE)).collect();
    let start = |slot: u16| u64::from(slot) * 64;
    let hangs = hanging.hang();
    for slot in 0..COMMANDS {
        let buffer = &old[usize::from(slot)];
        buffer.fill(driver.rings().memory(), &pattern(start(slot), PAGE, 1));
        driver.submit(slot % QUEUES, slot, DISK, &transfer(true, start(slot), PAGE), ScsiData::Out(buffer));
    }
    wait_for("writes that hang", || (hanging.waiting() > 0).then_some(()));
    driver.send_reset();
    for slot in 0..COMMANDS {
        let buffer = &new[usize::from(slot)];
        buffer.fill(driver.rings().memory(), &pattern(start(slot), PAGE, 2));
        let (cdb, data) = (transfer(true, start(slot) + 1024, PAGE), ScsiData::Out(buffer));
        driver.submit_tagged(slot % QUEUES, COMMANDS + slot, slot, DISK, &cdb, data);
    }
    // Another unit of the controller is served meanwhile.
    let read = buffers.scattered(0, PAGE);
    driver.submit(1, 3 * COMMANDS, OTHER, &transfer(false, 0, PAGE), ScsiData::In(&read));
    // The reset has ended commands that had not reached storage.
    let mut returned = Vec::new();
    let answer = loop {
        match driver.wait(1) {
            (slot, answer) if slot == 3 * COMMANDS => break answer,
            (slot, _) => returned.push(slot),
        }
    };
    assert!(answer.is_good(), "the other unit: {answer:?}");
    drop(hangs);
    assert_eq!(driver.wait_reset(), TaskManagement(0), "FUNCTION COMPLETE");
    for queue in 0..QUEUES {
        let missing = (0..2 * COMMANDS).filter(|slot| slot % QUEUES == queue && !returned.contains(slot)).count();
        (0..missing).for_each(|_| returned.push(driver.wait(queue).0));
    }
    returned.sort_unstable();
    assert_eq!(returned, (0..2 * COMMANDS).collect::<Vec<_>>(), "each command once");
    while !driver.execute(DISK, &[0; 6], ScsiData::None).is_good() {}
    // The driver sends what was not carried out once more.
    for slot in 0..COMMANDS {
        let buffer = &new[usize::from(slot)];
        driver.submit(0, slot, DISK, &transfer(true, start(slot), PAGE), ScsiData::Out(buffer));
        succeeds(&mut driver, 0, "a write after all");
        driver.submit(0, slot, DISK, &transfer(false, start(slot), PAGE), ScsiData::In(&old[usize::from(slot)]));
        succeeds(&mut driver, 0, "its read");
        let found = old[usize::from(slot)].content(driver.rings().memory());
        assert!(found == pattern(start(slot), PAGE, 2), "slot {slot}");
    }
    drop(driver);
    daemon.stop();
    Ok(())
}
