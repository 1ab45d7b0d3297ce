//! sg3-utils, sdparm and a file system on SCSI disks in a real guest: every page is readable and right, every command
//! of the tools has its effect, storage errors have the right sense data.
//!
//! The tools' exit codes are those of sg3_utils(8).

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, ensure};
use mqblk_test_bounds::Bound;
use mqblk_tests::guest::{
    ControllerConfig, DaemonProgram, FioJobs, FioLoop, Guest, HostImage, LoopDevice, LunConfig, ScsiDisk, ScsiHost,
    Shell, wait_for_luns,
};

const MIB: u64 = 1 << 20;
/// The byte that fills [`Image::full`].
const FILL: u8 = 0xa5;

/// Exit codes of the tools. Source: sg3_utils(8), "EXIT STATUS".
mod exit {
    pub(super) const MEDIUM: i32 = 3;
    pub(super) const ILLEGAL_REQUEST: i32 = 5;
    pub(super) const DATA_PROTECT: i32 = 7;
    pub(super) const INVALID_OPCODE: i32 = 9;
    pub(super) const MISCOMPARE: i32 = 14;
    pub(super) const OUT_OF_RANGE: i32 = 22;
}

/// The LUNs of target 0.
const PLAIN: (u8, u16) = (0, 0);
const LARGE_BLOCKS: (u8, u16) = (0, 1);
const READ_ONLY: (u8, u16) = (0, 2);
const FAULTY: (u8, u16) = (0, 3);
const FLUSH_COUNTED: (u8, u16) = (0, 4);
const ALL: [(u8, u16); 5] = [PLAIN, LARGE_BLOCKS, READ_ONLY, FAULTY, FLUSH_COUNTED];

/// Runs a tool that must end with this exit code, and returns its output.
fn exits(guest: &mut Guest, code: i32, command: &str) -> Result<String> {
    let ended = guest.run(command)?;
    ensure!(ended.status == code, "{command}\nexit status {}, expected {code}:\n{}", ended.status, ended.output);
    Ok(ended.output)
}

/// Runs a tool that must fail with this exit code and name this additional sense.
fn refused(guest: &mut Guest, code: i32, sense: &str, command: &str) -> Result<()> {
    let output = exits(guest, code, &format!("{command} -v 2>&1"))?;
    ensure!(output.contains(sense), "{command}: expected '{sense}' in:\n{output}");
    Ok(())
}

/// Returns the text after `name` and a colon in a tool's output.
fn field<'a>(text: &'a str, name: &str) -> Result<&'a str> {
    let of_line = |line: &'a str| line.split_once(name).and_then(|(_, rest)| rest.trim_start().strip_prefix(':'));
    text.lines().find_map(of_line).map(str::trim).with_context(|| format!("no '{name}:' in:\n{text}"))
}

/// Returns the number at the start of that text, decimal or 0x.
fn number(text: &str, name: &str) -> Result<u64> {
    let value = field(text, name)?;
    let word = value.split(|c: char| !c.is_ascii_alphanumeric()).next().unwrap_or_default();
    match word.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => word.parse(),
    }
    .with_context(|| format!("'{name}: {value}' is no number"))
}

fn has(text: &str, wanted: &[&str]) -> Result<()> {
    for part in wanted {
        ensure!(text.contains(part), "expected '{part}' in:\n{text}");
    }
    Ok(())
}

#[test]
fn pages_commands_and_errors() -> Result<()> {
    if DaemonProgram::from_environment()? != DaemonProgram::Mqblk {
        return Ok(()); // QEMU's own disk has few of these commands
    }
    let images =
        [HostImage::full(64)?, HostImage::full(64)?, HostImage::full(16)?, HostImage::full(32)?, HostImage::full(16)?];
    let [plain, large, read_only, faulty, counted] = &images;
    let counted = LoopDevice::attach(counted, 512)?;
    let lun = |place: (u8, u16), image: &HostImage| {
        LunConfig::new(place.0, place.1, image.path()).option("serial", &format!("serial {}", place.1))
    };
    let luns = vec![
        lun(PLAIN, plain),
        lun(LARGE_BLOCKS, large).option("block-size", "4096"),
        lun(READ_ONLY, read_only).option("readonly", "on"),
        lun(FAULTY, faulty)
            .option("storage", "fault")
            .option("inner", "file")
            .option("fail-read", "8M+4K:EIO")
            .option("fail-write", "12M+4K:EIO"),
        LunConfig::new(FLUSH_COUNTED.0, FLUSH_COUNTED.1, counted.path()).option("serial", "serial 4"),
    ];
    let mut host = ScsiHost::start(vec![ControllerConfig::new("c", 2, luns)])?;
    let mut guest = host.guest()?.boot()?;
    let disks = wait_for_luns(&mut guest, &ALL)?;
    for (place, block) in [(PLAIN, 512), (LARGE_BLOCKS, 4096)] {
        let disk = &disks[&place];
        assert_eq!((disk.block, disk.serial.as_str()), (block, format!("serial {}", place.1).as_str()));
        vital_product_data(&mut guest, disk)?;
        capacity_and_luns(&mut guest, disk)?;
        modes_and_logs(&mut guest, disk)?;
    }
    operation_codes(&mut guest, &disks[&PLAIN])?;
    for (place, image) in [(PLAIN, plain), (LARGE_BLOCKS, large)] {
        tools_change_what_they_say(&mut guest, &disks[&place], image)?;
    }
    read_only_is_read_only(&mut guest, &disks[&READ_ONLY], read_only)?;
    errors_stay_where_they_are(&mut guest, &disks)?;
    cache_and_durability(&mut guest, &disks[&FLUSH_COUNTED], &counted)?;
    file_system(&mut guest, &disks[&PLAIN], plain)?;
    FioJobs::new(&format!(
        "--name=large --filename={} --ioengine=io_uring --direct=1 --thread --iodepth=8 --rw=randwrite \
         --bssplit=4k/60:12k/20:64k/20 --verify=crc32c --verify_fatal=1 --do_verify=1 --size=8M",
        disks[&LARGE_BLOCKS].node()
    ))
    .run(&mut guest, Bound::seconds(120))?
    .must_have_verified()?;
    for lun in host.daemon()?.controller_stat("c")?.luns {
        let fails = (lun.target, lun.lun) == (u32::from(FAULTY.0), u32::from(FAULTY.1));
        ensure!((lun.counters.errors > 0) == fails, "errors, and only of the faulty LUN: {lun:?}");
    }
    guest.power_off()?;
    host.stop().map(drop)
}

/// Checks that every listed VPD page can be read, and that they match the kernel's view.
fn vital_product_data(guest: &mut Guest, disk: &ScsiDisk) -> Result<()> {
    let (node, block) = (disk.node(), u64::from(disk.block));
    let listed = guest.must(&format!("sg_vpd -r -p 0 {node} | tail -c +5 | od -An -v -tx1"))?;
    let pages: Vec<&str> = listed.split_whitespace().collect();
    assert_eq!(pages, ["00", "80", "83", "b0", "b1", "b2"]);
    let mut all = String::new();
    for page in pages {
        all += &exits(guest, 0, &format!("sg_vpd -p 0x{page} {node}"))?;
    }
    assert_eq!(field(&all, "Unit serial number")?, disk.serial);
    has(
        &all,
        &[
            "designator type: NAA",
            "Non-rotating medium",
            "Unmap command supported (LBPU): 1",
            "Write same (16) with unmap bit supported (LBPWS): 1",
            "Write same (10) with unmap bit supported (LBPWS10): 1",
            "Logical block provisioning read zeros (LBPRZ): 1",
            "Provisioning type: 2 (thin provisioned)",
        ],
    )?;
    for (limit, least) in [
        ("Maximum compare and write length", 1),
        ("Maximum transfer length", MIB / block),
        ("Maximum unmap LBA count", MIB / block),
        ("Maximum unmap block descriptor count", 1),
        ("Maximum write same length", MIB / block),
    ] {
        let found = number(&all, limit)?;
        ensure!(found >= least, "{limit}: {found} blocks, expected {least} or more:\n{all}");
    }
    let name = &disk.name;
    let discard: u64 = guest.must(&format!("cat /sys/block/{name}/queue/discard_max_hw_bytes"))?.parse()?;
    assert_eq!(discard, number(&all, "Maximum unmap LBA count")? * block, "the kernel's limit of a discard");
    assert_eq!(guest.must(&format!("cat /sys/block/{name}/queue/rotational"))?, "0");
    assert_eq!(guest.must(&format!("cat /sys/block/{name}/device/scsi_disk/*/provisioning_mode"))?, "unmap");
    refused(guest, exit::ILLEGAL_REQUEST, "Invalid field in cdb", &format!("sg_vpd --force -p 0xde {node}"))?;
    let designators = exits(guest, 0, &format!("sdparm --inquiry --page=di {node}"))?;
    has(&designators, &["Device identification VPD page", "NAA"])?;
    exits(guest, 0, &format!("sdparm --inquiry --all {node}")).map(drop)
}

fn capacity_and_luns(guest: &mut Guest, disk: &ScsiDisk) -> Result<()> {
    let (node, last) = (disk.node(), disk.size.0 / u64::from(disk.block) - 1);
    for variant in ["", "--16"] {
        let text = exits(guest, 0, &format!("sg_readcap {variant} {node}"))?;
        has(&text, &[&format!("Last LBA={last} "), &format!("Logical block length={} bytes", disk.block)])?;
        if variant == "--16" {
            has(&text, &["lbpme=1, lbprz=1", "prot_en=0"])?;
        }
    }
    let luns = exits(guest, 0, &format!("sg_luns {node}"))?;
    let found: Vec<&str> = luns.lines().map(str::trim).filter(|line| line.len() == 16).collect();
    let expected: Vec<String> = ALL.iter().map(|&(_, lun)| format!("{lun:04x}000000000000")).collect();
    assert_eq!(found, expected, "{luns}");

    let inquiry = exits(guest, 0, &format!("sg_inq {node}"))?;
    has(
        &inquiry,
        &["Vendor identification: mqblk", "Product identification: virtual disk", "PQual=0  PDT=0", "CmdQue=1"],
    )?;
    assert_eq!(field(&inquiry, "Unit serial number")?, disk.serial);
    for command in ["sg_turs", "sg_requests", "sg_sync", "sg_prevent --prevent=0", "sg_start --start"] {
        exits(guest, 0, &format!("{command} {node}"))?;
    }
    Ok(())
}

/// Checks mode pages by both lengths of the command and with all four kinds of values, and log pages.
fn modes_and_logs(guest: &mut Guest, disk: &ScsiDisk) -> Result<()> {
    let node = disk.node();
    for six in ["", "--six"] {
        for control in 0..=2 {
            let modes = exits(guest, 0, &format!("sg_modes --all {six} --control={control} {node}"))?;
            has(&modes, &[">> Caching", ">> Control", "WP=0, DpoFua=1"])?;
        }
        let saved = format!("sg_modes --page=8 {six} --control=3 {node}");
        refused(guest, exit::ILLEGAL_REQUEST, "Saving parameters not supported", &saved)?;
    }
    refused(guest, exit::ILLEGAL_REQUEST, "Invalid field in cdb", &format!("sg_modes --page=0x1c {node}"))?;

    // It reads every known page and saved values, and ends with this code where there are none.
    let all = exits(guest, exit::ILLEGAL_REQUEST, &format!("sdparm --all {node}"))?;
    has(&all, &["Caching (SBC) mode page:", "Control mode page:"])?;
    let wce = |guest: &mut Guest| exits(guest, exit::ILLEGAL_REQUEST, &format!("sdparm --quiet --get=WCE {node}"));
    has(&wce(guest)?, &["WCE           1  [cha: y, def:  1]"])?;
    exits(guest, 0, &format!("sdparm --quiet --clear=WCE {node}"))?;
    has(&wce(guest)?, &["WCE           0  [cha: y, def:  1]"])?;
    exits(guest, 0, &format!("sdparm --quiet --set=WCE {node}"))?;
    has(&wce(guest)?, &["WCE           1  [cha: y, def:  1]"])?;
    let unchangeable = guest.run(&format!("sdparm --quiet --set=RCD {node}"))?;
    ensure!(unchangeable.status != 0, "a bit that cannot be changed was changed:\n{}", unchangeable.output);

    assert_eq!(guest.must(&format!("sg_logs --raw {node} | od -An -v -tx1"))?.trim(), "00 00 00 01 00");
    let lists = exits(guest, 0, &format!("sg_logs --page=0,0xff {node}"))?;
    has(&lists, &["Supported log pages [sp]", "Supported log pages and subpages [ssp]"])?;
    exits(guest, 0, &format!("sg_logs --all {node}"))?;
    refused(guest, exit::ILLEGAL_REQUEST, "field in cdb illegal", &format!("sg_logs --page=0x0d {node}"))
}

/// Checks the supported operation codes, also one by one, and that all others are refused.
fn operation_codes(guest: &mut Guest, disk: &ScsiDisk) -> Result<()> {
    const WANTED: [&str; 42] = [
        "00", "03", "08", "0a", "12", "15", "16", "17", "1a", "1b", "1e", "25", "28", "2a", "2e", "2f", "35", "37",
        "41", "42", "4d", "55", "56", "57", "5a", "5e", "5f", "88", "89", "8a", "8e", "8f", "91", "93", "9e", "a0",
        "a3", "a8", "aa", "ae", "af", "b7",
    ];
    let node = disk.node();
    let list = exits(guest, 0, &format!("sg_opcodes {node}"))?;
    let rows = list.lines().skip_while(|line| !line.starts_with("---")).skip(1);
    let found: BTreeSet<&str> = rows.filter_map(|line| line.split_whitespace().next()).collect();
    let missing: Vec<_> = WANTED.iter().filter(|code| !found.contains(*code)).collect();
    ensure!(missing.is_empty(), "not listed: {missing:?} in:\n{list}");
    for (code, action) in [("0x28", ""), ("0x42", ""), ("0x93", ""), ("0x9e", "--sa=0x10"), ("0x5f", "--sa=4")] {
        let one = exits(guest, 0, &format!("sg_opcodes --opcode={code} {action} {node}"))?;
        has(&one, &["Command is supported [conforming to SCSI standard]", "Usage data:"])?;
    }
    let none = exits(guest, 0, &format!("sg_opcodes --opcode=0xc1 {node}"))?;
    has(&none, &["NOT supported"])?;
    let tasks = exits(guest, 0, &format!("sg_opcodes --tmf {node}"))?;
    has(
        &tasks,
        &["Abort task\n", "Abort task set", "Clear task set", "Logical unit reset", "I_T nexus reset", "Query task\n"],
    )?;
    refused(
        guest,
        exit::INVALID_OPCODE,
        "Invalid command operation code",
        &format!("sg_raw {node} c1 00 00 00 00 00"),
    )?;
    refused(
        guest,
        exit::INVALID_OPCODE,
        "Invalid command operation code",
        &format!("sg_raw {node} 84 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00"),
    )
}

/// Returns a byte range in blocks of the disk, for the options of the tools.
fn blocks(disk: &ScsiDisk, at: u64, len: u64) -> String {
    let block = u64::from(disk.block);
    format!("--lba={} --num={}", at / block, len / block)
}

fn is_all(image: &HostImage, at: u64, len: u64, byte: u8) -> Result<()> {
    let found = image.read(at, usize::try_from(len)?)?;
    let wrong = found.iter().position(|&found| found != byte);
    ensure!(
        wrong.is_none(),
        "the image at {at}+{len}: found {:#x} at {wrong:?}, expected {byte:#x} all over",
        found[wrong.unwrap_or(0)]
    );
    Ok(())
}

/// Runs each command on its own 64 KiB, and checks its effect in the image, and that nothing else changes.
fn tools_change_what_they_say(guest: &mut Guest, disk: &ScsiDisk, image: &HostImage) -> Result<()> {
    const LEN: u64 = 64 << 10;
    let (node, block) = (disk.node(), u64::from(disk.block));
    let one = format!("bs={block} count=1 2>/dev/null");
    guest.must(&format!(
        "cd /run; tr '\\0' '\\245' </dev/zero | dd of=fill {one}; tr '\\0' 'W' </dev/zero | dd of=w {one}
         cat fill w >swap; for i in $(seq 8); do cat w; done >w8; for i in $(seq 8); do cat fill; done >fill8"
    ))?;
    let at = |index: u64| 16 * MIB + 2 * index * LEN;
    let all = |index| blocks(disk, at(index), LEN);

    exits(guest, 0, &format!("sg_write_same {} --in=/run/w {node}", all(0)))?;
    exits(guest, 0, &format!("sg_write_same --16 {} --in=/run/w {node}", all(1)))?;
    exits(guest, 0, &format!("sg_write_same --16 --ndob {} {node}", all(2)))?;
    exits(guest, 0, &format!("sg_write_same --16 --unmap {} --in=/dev/zero {node}", all(3)))?;
    exits(guest, 0, &format!("sg_unmap --force {} {node}", all(4)))?;
    let lba = |index| at(index) / block;
    let several = format!("--lba={},{} --num={},{}", lba(5), lba(6), LEN / block, LEN / block);
    exits(guest, 0, &format!("sg_unmap --force {several} {node}"))?;
    exits(
        guest,
        0,
        &format!("sg_write_verify {} --ilen={} --in=/run/w8 {node}", blocks(disk, at(7), 8 * block), 8 * block),
    )?;
    let swap = format!("sg_compare_and_write --lba={} --num=1 --in=/run/swap --xferlen={} {node}", lba(8), 2 * block);
    exits(guest, 0, &swap)?;
    exits(guest, exit::MISCOMPARE, &swap)?;
    exits(guest, 0, &format!("sg_sync {node}"))?;
    for (index, byte) in [(0, b'W'), (1, b'W'), (2, 0), (3, 0), (4, 0), (5, 0), (6, 0)] {
        is_all(image, at(index), LEN, byte)?;
    }
    for index in 3..=6 {
        ensure!(image.is_hole(at(index), LEN)?, "unmap number {index} left no hole");
    }
    is_all(image, at(7), 8 * block, b'W')?;
    is_all(image, at(8), block, b'W')?;
    is_all(image, at(8) + block, LEN, FILL)?;
    for index in 0..8 {
        is_all(image, at(index) + LEN, LEN, FILL)?;
    }

    exits(guest, 0, &format!("sg_verify --lba=0 --count=64 {node}"))?;
    let compare = |file: &str| format!("sg_verify --lba=0 --count=8 --ndo={} --in=/run/{file} {node}", 8 * block);
    exits(guest, 0, &compare("fill8"))?;
    exits(guest, exit::MISCOMPARE, &compare("w8"))?;
    let end = disk.size.0 / block;
    let beyond = "Logical block address out of range";
    refused(guest, exit::OUT_OF_RANGE, beyond, &format!("sg_verify --lba={end} --count=1 {node}"))?;
    refused(guest, exit::OUT_OF_RANGE, beyond, &format!("sg_write_same --lba={} --num=2 --in=/run/w {node}", end - 1))?;
    let status = exits(guest, 0, &format!("sg_get_lba_status --lba={} {node}", lba(3)))?;
    has(&status, &["LBA: 0x"])?;
    refused(guest, exit::OUT_OF_RANGE, beyond, &format!("sg_get_lba_status --lba={end} {node}"))?;
    // READ(6), READ(12) and READ(16) of block 0.
    for cdb in
        ["08 00 00 00 01 00", "a8 00 00 00 00 00 00 00 00 01 00 00", "88 00 00 00 00 00 00 00 00 00 00 00 00 01 00 00"]
    {
        exits(guest, 0, &format!("sg_raw -r {block} -o /run/read {node} {cdb} && cmp /run/read /run/fill"))?;
    }
    Ok(())
}

fn read_only_is_read_only(guest: &mut Guest, disk: &ScsiDisk, image: &HostImage) -> Result<()> {
    ensure!(disk.read_only, "{disk:?}");
    // The kernel does not open the disk's own node for writing.
    let generic = guest.must(&format!("ls /sys/block/{}/device/scsi_generic", disk.name))?;
    has(&exits(guest, 0, &format!("sg_modes --all /dev/{generic}"))?, &["WP=1"])?;
    let protected = "Write protected";
    let range = blocks(disk, MIB, MIB);
    refused(guest, exit::DATA_PROTECT, protected, &format!("sg_write_same {range} --in=/dev/zero /dev/{generic}"))?;
    refused(guest, exit::DATA_PROTECT, protected, &format!("sg_write_same --16 --ndob {range} /dev/{generic}"))?;
    refused(
        guest,
        exit::DATA_PROTECT,
        protected,
        &format!("sg_raw -s 512 -i /dev/zero /dev/{generic} 2a 00 00 00 00 00 00 00 01 00"),
    )?;
    exits(guest, 0, &format!("sg_verify --readonly --lba=0 --count=64 /dev/{generic}"))?;
    is_all(image, 0, image.len(), FILL)
}

/// Checks that the faulty LUN reports the location and the reason, while its neighbours verify.
fn errors_stay_where_they_are(guest: &mut Guest, disks: &BTreeMap<(u8, u16), ScsiDisk>) -> Result<()> {
    let (disk, neighbour) = (&disks[&FAULTY], &disks[&LARGE_BLOCKS]);
    let node = disk.node();
    let load = FioLoop::start(guest, &neighbour.node(), 8, 4)?;
    guest.must("dmesg -c >/dev/null")?;
    // The kernel's handling of the additional sense: a read with a medium error is not repeated.
    let read = ("if={node} of=/dev/null iflag=direct skip", 8 * MIB, "No data available", "Unrecovered read error");
    let write = ("if=/dev/zero of={node} oflag=direct seek", 12 * MIB, "Input/output error", "Write error");
    for (what, at, errno, sense) in [read, write] {
        let copy = |block: u64| format!("dd bs=4k count=1 {}={block} 2>&1", what.replace("{node}", &node));
        let block = at / 4096;
        exits(guest, 0, &copy(block - 1))?;
        has(&exits(guest, 1, &copy(block))?, &[errno])?;
        exits(guest, 0, &copy(block + 1))?;
        let place = format!("dev {}, sector {} ", disk.name, at / 512);
        has(&guest.must("dmesg -c")?, &["Medium Error", sense, &place])?;
    }
    let sector = (8 * MIB / 512) as u32;
    let [a, b, c, d] = sector.to_be_bytes();
    let read = format!("sg_raw -r 512 {node} 28 00 {a:02x} {b:02x} {c:02x} {d:02x} 00 00 01 00");
    refused(guest, exit::MEDIUM, "Unrecovered read error", &read)?;
    load.another_pass(guest)?;
    load.end(guest)
}

/// Number of the guest's writes, each with or without a flush.
const WRITES: u64 = 20;

fn writes(node: &str, more: &str) -> String {
    format!(
        "for i in $(seq {WRITES}); do
             dd if=/dev/zero of={node} bs=4k count=1 seek=$i oflag=direct{more} 2>&1 || exit
         done"
    )
}

/// Checks SYNCHRONIZE CACHE, FUA and WCE: the host's kernel counts the flushes of the loop device.
fn cache_and_durability(guest: &mut Guest, disk: &ScsiDisk, host: &LoopDevice) -> Result<()> {
    let node = disk.node();
    let cache = format!("/sys/block/{}/device/scsi_disk/*/cache_type", disk.name);
    let flushes = |guest: &mut Guest, script: &str| -> Result<u64> {
        let before = host.flushes()?;
        guest.must(script)?;
        Ok(host.flushes()? - before)
    };
    assert_eq!(guest.must(&format!("cat {cache}"))?, "write back");
    assert_eq!(guest.must(&format!("cat /sys/block/{}/queue/fua", disk.name))?, "1");
    assert_eq!(flushes(guest, &writes(&node, ""))?, 0, "a write alone flushes nothing");
    let synchronized = flushes(guest, &writes(&node, " conv=fsync"))?;
    ensure!(synchronized >= WRITES, "{WRITES} times SYNCHRONIZE CACHE, {synchronized} flushes");
    let synchronous = FioJobs::new(&format!(
        "--name=fua --filename={node} --ioengine=psync --direct=1 --sync=dsync --rw=write --bs=4k --size={}k",
        4 * WRITES
    ));
    let fua = flushes(guest, &synchronous.script("fua"))?;
    ensure!(fua >= WRITES, "{WRITES} writes with FUA, {fua} flushes");

    // Disabled by the kernel's own MODE SELECT, and enabled again by sdparm's.
    guest.must(&format!("echo 'write through' | tee {cache}"))?;
    has(&exits(guest, exit::ILLEGAL_REQUEST, &format!("sdparm --quiet --get=WCE {node}"))?, &["WCE           0"])?;
    let through = flushes(guest, &writes(&node, ""))?;
    ensure!(through >= WRITES, "write through: {WRITES} writes, {through} flushes");
    exits(guest, 0, &format!("sdparm --quiet --set=WCE {node}"))?;
    guest.must(&format!("echo 1 >/sys/block/{}/device/rescan", disk.name))?;
    assert_eq!(guest.must(&format!("cat {cache}"))?, "write back");
    assert_eq!(flushes(guest, &writes(&node, ""))?, 0, "write back again: a write alone flushes nothing");
    Ok(())
}

/// Checks with ext4 mounted with discard, and fstrim, that deleted data is freed on the host.
fn file_system(guest: &mut Guest, disk: &ScsiDisk, image: &HostImage) -> Result<()> {
    let node = disk.node();
    guest.must_within(
        &format!(
            "set -e
             mkfs.ext4 -q -F {node}
             mount -t ext4 -o discard {node} /mnt
             mkdir /mnt/a /mnt/b /mnt/c
             cp -a /sbin /mnt/a/
             cp -a /mnt/a/. /mnt/b/
             cp -a /mnt/a/. /mnt/c/
             (cd /mnt/a && find . -type f | sort | xargs sha256sum) >/run/sums
             sync; fstrim /mnt"
        ),
        Bound::seconds(120),
    )?;
    let full = image.allocated()?;
    // The journal's commit discards.
    guest.must("rm -r /mnt/b; sync")?;
    let mut discarded = image.allocated()?;
    for _ in 0..100 {
        if discarded + 2 * MIB < full {
            break;
        }
        guest.must("sync; sleep 0.1")?;
        discarded = image.allocated()?;
    }
    ensure!(discarded + 2 * MIB < full, "mount -o discard freed too little: {full} then {discarded} bytes");
    guest.must("set -e; mount -o remount,nodiscard /mnt; rm -r /mnt/c; sync; fstrim /mnt")?;
    let trimmed = image.allocated()?;
    ensure!(trimmed + 2 * MIB < discarded, "fstrim freed too little: {discarded} then {trimmed} bytes");
    guest.must(&format!(
        "set -e
         echo 3 >/proc/sys/vm/drop_caches
         cd /mnt/a; sha256sum -c /run/sums >/dev/null; cd /
         umount /mnt; e2fsck -f -n {node}"
    ))?;
    Ok(())
}
