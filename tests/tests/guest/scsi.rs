//! A real guest with many disks on one virtio-scsi controller: identities, separate data, use of all queues. LUNs and
//! controllers are added, removed, grown and reset in mid-I/O.
//!
//! With `MQBLK_TEST_SERVER=qemu-storage-daemon` the guest has QEMU's own SCSI disks, to validate the tests.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, ensure};
use mqblk_core::ByteLen;
use mqblk_test_bounds::Bound;
use mqblk_tests::guest::{
    ControllerConfig, FioJobs, FioLoop, Guest, HostImage, LunConfig, ScsiDisk, ScsiHost, Shell, scsi_disks,
    wait_for_luns,
};

const MIB: u64 = 1 << 20;

/// Reads from each CPU of each of a few disks: more than a partition scan sends.
const READS: u64 = 100;

type Disks = BTreeMap<(u8, u16), ScsiDisk>;

/// Returns 32 addresses: targets and LUNs in sequence, both ends of the address range, and LUNs that need flat
/// addressing.
fn places() -> Vec<(u8, u16)> {
    let mut places: Vec<(u8, u16)> = (0..16).map(|target| (target, 0)).collect();
    places.extend((1..9).map(|lun| (3, lun)));
    places.extend([(100, 0), (100, 255), (100, 256), (100, 300), (100, 16383), (254, 0), (255, 0), (255, 1)]);
    places
}

fn serial(place: (u8, u16)) -> String {
    format!("serial-t{}-l{}", place.0, place.1)
}

#[test]
fn thirty_two_luns_and_four_queues() -> Result<()> {
    const QUEUES: u16 = 4;
    let places = places();
    assert_eq!(places.len(), 32);
    // Every disk has a different size, so that a mix-up is detected.
    let mib = |index: usize| 48 + index as u64;
    let images = (0..places.len()).map(|index| HostImage::sparse(mib(index))).collect::<Result<Vec<_>>>()?;
    let luns = places
        .iter()
        .zip(&images)
        .map(|(&place, image)| LunConfig::new(place.0, place.1, image.path()).option("serial", &serial(place)));
    let mut host = ScsiHost::start(vec![ControllerConfig::new("many", QUEUES, luns.collect())])?;
    let mut guest = host.guest()?.vcpus(QUEUES).boot()?;

    let disks = wait_for_luns(&mut guest, &places)?;
    let wwids: BTreeSet<&str> = disks.values().map(|disk| disk.wwid.as_str()).collect();
    assert_eq!(wwids.len(), places.len(), "every unit has an identification of its own: {wwids:?}");
    for (index, place) in places.iter().enumerate() {
        let disk = &disks[place];
        assert_eq!(disk.size, ByteLen(mib(index) * MIB), "{disk:?}");
        assert_eq!(
            (disk.serial.as_str(), disk.block, disk.read_only),
            (serial(*place).as_str(), 512, false),
            "{disk:?}"
        );
    }
    stamps_go_where_they_should(&mut guest, &disks, &places, &images)?;
    every_queue_serves(&mut guest, &mut host, &disks, QUEUES)?;
    verify_eight_at_once(&mut guest, &disks, &places)?;
    stamps_go_where_they_should(&mut guest, &disks, &places, &images)?;
    guest.power_off()?;
    host.stop().map(drop)
}

/// Writes each disk's address to its last block, and checks that the host's image has it there.
fn stamps_go_where_they_should(
    guest: &mut Guest,
    disks: &Disks,
    places: &[(u8, u16)],
    images: &[HostImage],
) -> Result<()> {
    let mut script = "set -e; cd /run\n".to_owned();
    let stamp = |place| format!("{}.", serial(place));
    for &place in places {
        let disk = &disks[&place];
        let last = disk.size.0 / u64::from(disk.block) - 1;
        script += &format!(
            "printf '%-512s' {} >stamp; dd if=stamp of={} bs=512 seek={last} oflag=direct conv=notrunc 2>/dev/null\n",
            stamp(place),
            disk.node()
        );
    }
    guest.must(&script)?;
    for (&place, image) in places.iter().zip(images) {
        let found = image.read(image.len() - 512, 512)?;
        let expected = format!("{:<512}", stamp(place));
        assert_eq!(String::from_utf8_lossy(&found), expected, "the last block of the image of {place:?}");
    }
    Ok(())
}

/// Checks by the guest's interrupts and the daemon's counters that requests from each CPU go to its own queue.
fn every_queue_serves(guest: &mut Guest, host: &mut ScsiHost, disks: &Disks, queues: u16) -> Result<()> {
    for disk in disks.values() {
        let count = guest.must(&format!("ls /sys/block/{}/mq | wc -l", disk.name))?;
        assert_eq!(count, queues.to_string(), "hardware queues of {disk:?}");
    }
    let chosen: Vec<&ScsiDisk> = disks.values().step_by(8).collect();
    for queue in 0..queues {
        let before = interrupts(guest, queues)?;
        let mut arguments = "--ioengine=io_uring --direct=1 --iodepth=4 --thread --rw=randread --bs=4k --norandommap \
             --size=16M"
            .to_owned();
        for disk in &chosen {
            arguments += &format!(
                " --name={} --filename={} --cpus_allowed={queue} --number_ios={READS}",
                disk.name,
                disk.node()
            );
        }
        let reads = FioJobs::new(&arguments).run(guest, Bound::seconds(90))?.reads;
        ensure!(reads >= READS * chosen.len() as u64, "fio read {reads} times");
        let after = interrupts(guest, queues)?;
        let raised: Vec<u64> = after.iter().zip(&before).map(|(after, before)| after - before).collect();
        ensure!(raised[usize::from(queue)] > 0, "reads on CPU {queue} raised interrupts of the queues: {raised:?}");
    }
    if host.is_mqblk() {
        let stat = host.daemon()?.controller_stat("many")?;
        let served: Vec<u64> =
            stat.queues.iter().filter(|queue| queue.role == "request").map(|queue| queue.load.counters.reads).collect();
        assert_eq!((served.len(), stat.luns.len()), (usize::from(queues), disks.len()), "{stat:?}");
        let wanted = READS * chosen.len() as u64;
        ensure!(
            served.iter().all(|&reads| reads >= wanted),
            "{wanted} reads on each CPU, but the queues served {served:?}"
        );
        ensure!(stat.luns.iter().all(|lun| lun.state == "ready" && lun.counters.errors == 0), "{:?}", stat.luns);
        for disk in &chosen {
            let place = (u32::from(disk.target), u32::from(disk.lun));
            let lun = stat.luns.iter().find(|lun| (lun.target, lun.lun) == place).context("no such LUN in stat")?;
            ensure!(lun.counters.reads >= READS * u64::from(queues), "{READS} reads from each CPU: {lun:?}");
        }
    }
    Ok(())
}

/// Returns the guest's count of interrupts of each request queue of its only controller, over all its CPUs.
fn interrupts(guest: &mut Guest, queues: u16) -> Result<Vec<u64>> {
    let table = guest.must("cat /proc/interrupts")?;
    let lines = table.lines().filter(|line| line.ends_with("-request"));
    let sum = |line: &str| line.split_whitespace().skip(1).map_while(|word| word.parse::<u64>().ok()).sum();
    let sums: Vec<u64> = lines.map(sum).collect();
    ensure!(sums.len() == usize::from(queues), "expected {queues} request queues in:\n{table}");
    Ok(sums)
}

/// Runs fio on eight disks at once, each with its own depth and mix of sizes.
fn verify_eight_at_once(guest: &mut Guest, disks: &Disks, places: &[(u8, u16)]) -> Result<()> {
    const MIXES: [(&str, u32); 4] = [
        ("--bs=4k", 1),
        ("--bssplit=512/20:4k/40:16k/20:64k/20", 16),
        ("--bssplit=4k/60:12k/20:256k/20", 8),
        ("--bsrange=512-64k", 32),
    ];
    let mut arguments = "--ioengine=io_uring --direct=1 --thread --rw=randwrite --verify=crc32c --verify_fatal=1 \
         --do_verify=1 --size=6M"
        .to_owned();
    for (index, place) in places.iter().step_by(4).enumerate() {
        let (mix, depth) = MIXES[index % MIXES.len()];
        arguments += &format!(" --name=verify{index} --filename={} {mix} --iodepth={depth}", disks[place].node());
    }
    FioJobs::new(&arguments).run(guest, Bound::seconds(240))?.must_have_verified().map(drop)
}

#[test]
#[ignore = "long: make soak, make test-guest"]
fn luns_come_and_go_under_load() -> Result<()> {
    const ID: &str = "hot";
    let image = || HostImage::sparse(32);
    let (first, second, late, far) = (image()?, image()?, image()?, image()?);
    let lun = |target, number, image: &HostImage| {
        LunConfig::new(target, number, image.path()).option("serial", &serial((target, number)))
    };
    let loaded = [lun(0, 0, &first), lun(1, 0, &second)];
    let mut host = ScsiHost::start(vec![ControllerConfig::new(ID, 2, loaded.to_vec())])?;
    let mut guest = host.guest()?.boot()?;
    let at_first = [(0, 0), (1, 0)];
    let disks = wait_for_luns(&mut guest, &at_first)?;
    let loads = [
        FioLoop::start(&mut guest, &disks[&(0, 0)].node(), 16, 4)?,
        FioLoop::start(&mut guest, &disks[&(1, 0)].node(), 4, 4)?,
    ];

    // One at a target in use, one at a new target, without a rescan. Three times, because an address may be reused.
    let added = [(lun(0, 5, &late), &late), (lun(77, 0, &far), &far)];
    for round in 1..=3 {
        for (lun, _) in &added {
            host.add_lun(&mut guest, ID, lun)?;
        }
        let disks =
            wait_for_luns(&mut guest, &[(0, 0), (0, 5), (1, 0), (77, 0)]).with_context(|| format!("round {round}"))?;
        for (lun, image) in &added {
            let disk = &disks[&(lun.target, lun.lun)];
            assert_eq!(
                (disk.size, disk.serial.as_str()),
                (ByteLen(image.len()), serial((lun.target, lun.lun)).as_str())
            );
            verify_once(&mut guest, disk)?;
        }
        for (lun, _) in &added {
            host.remove_lun(&mut guest, ID, lun)?;
        }
        wait_for_luns(&mut guest, &at_first).with_context(|| format!("round {round}, after the removal"))?;
    }
    removed_in_mid_io(&mut guest, &host, ID, &added[0].0)?;
    wait_for_luns(&mut guest, &at_first)?;
    resets_lose_nothing(&mut guest, &disks[&(0, 0)], &loads[0])?;
    grows(&mut guest, &host, ID, (&loaded[1], &second), &loads[1])?;
    for load in loads {
        load.end(&mut guest)?;
    }
    controller_unplugged_and_plugged_again(&mut guest, &mut host, ID)?;
    guest.power_off()?;
    host.stop().map(drop)
}

fn verify_once(guest: &mut Guest, disk: &ScsiDisk) -> Result<()> {
    FioJobs::verified_random_writes(&disk.node(), 1, 0, 2)
        .run(guest, Bound::seconds(120))?
        .must_have_verified()
        .map(drop)
}

/// Starts endless writes to the disk; waits until they have begun.
fn write_endlessly(guest: &mut Guest, name: &str, disk: &ScsiDisk) -> Result<()> {
    let jobs = FioJobs::new(&format!(
        "--name=endless --filename={} --allow_file_create=0 --ioengine=io_uring --direct=1 --iodepth=32 --thread \
         --rw=randwrite --bs=16k --size=16M --time_based --runtime=900",
        disk.node()
    ));
    let written = format!("awk '{{ print $5 }}' /sys/block/{}/stat", disk.name);
    let before: u64 = guest.must(&written)?.parse()?;
    guest.start(name, &jobs.script(name))?;
    guest
        .must(&format!(
            "for i in $(seq 600); do [ $({written}) -ge {} ] && exit 0; sleep 0.1; done; exit 1",
            before + 100
        ))
        .map(drop)
        .with_context(|| format!("{name} writes nothing"))
}

/// Checks that I/O on a removed LUN ends soon, with errors.
fn removed_in_mid_io(guest: &mut Guest, host: &ScsiHost, controller: &str, lun: &LunConfig) -> Result<()> {
    host.add_lun(guest, controller, lun)?;
    let disks = wait_for_luns(guest, &[(0, 0), (1, 0), (lun.target, lun.lun)])?;
    write_endlessly(guest, "gone", &disks[&(lun.target, lun.lun)])?;
    host.remove_lun(guest, controller, lun)?;
    let ended = guest.finish("gone", Bound::seconds(120))?;
    ensure!(ended.status != 0, "fio went on without a LUN:\n{}", ended.output);
    Ok(())
}

/// Resets the LUN through the guest's driver while fio verifies. Also tries target and host resets, which Linux's
/// virtio-scsi driver lacks.
fn resets_lose_nothing(guest: &mut Guest, disk: &ScsiDisk, load: &FioLoop) -> Result<()> {
    for _ in 0..5 {
        guest.must(&format!("sg_reset --device --no-esc {}", disk.node()))?;
    }
    for wider in ["--target", "--bus", "--host"] {
        guest.run(&format!("sg_reset {wider} --no-esc {}", disk.node()))?;
    }
    load.another_pass(guest)
}

/// Grows the image twice in mid-I/O. The guest is notified by an event, and can use the added space.
fn grows(
    guest: &mut Guest,
    host: &ScsiHost,
    controller: &str,
    (lun, image): (&LunConfig, &HostImage),
    load: &FioLoop,
) -> Result<()> {
    for mib in [40, 64] {
        // The second time the host's file is grown directly, and the daemon is asked to resize to it.
        let by_hand = mib == 64 && host.is_mqblk();
        if by_hand {
            std::fs::File::options().write(true).open(image.path())?.set_len(mib * MIB)?;
        }
        host.resize_lun(guest, controller, lun, (!by_hand).then_some(mib * MIB))?;
        let wanted = ByteLen(mib * MIB);
        let disk = seen_with_size(guest, (lun.target, lun.lun), wanted)?;
        assert_eq!(std::fs::metadata(image.path())?.len(), mib * MIB);
        FioJobs::verified_random_writes(&disk.node(), 1, u32::try_from(mib - 2)?, 2)
            .run(guest, Bound::seconds(120))?
            .must_have_verified()?;
    }
    load.another_pass(guest)
}

/// Waits until the guest has seen the size, without a rescan.
fn seen_with_size(guest: &mut Guest, place: (u8, u16), wanted: ByteLen) -> Result<ScsiDisk> {
    for _ in 0..300 {
        let disks = scsi_disks(guest)?;
        let disk = disks.into_iter().find(|disk| (disk.target, disk.lun) == place).context("the disk is gone")?;
        if disk.size == wanted {
            return Ok(disk);
        }
        guest.must("sleep 0.1")?;
    }
    anyhow::bail!("the guest has not seen {wanted} at {place:?}: {:?}", scsi_disks(guest)?)
}

fn controller_unplugged_and_plugged_again(guest: &mut Guest, host: &mut ScsiHost, id: &str) -> Result<()> {
    let places = [(0, 0), (1, 0)];
    for round in 1..=2 {
        let disks = wait_for_luns(guest, &places)?;
        let sum = guest.must(&format!("sha256sum <{}", disks[&(1, 0)].node()))?;
        let endless = format!("unplug{round}");
        write_endlessly(guest, &endless, &disks[&(0, 0)])?;
        guest.unplug_controller(&host.controller(id)?)?;
        let ended = guest.finish(&endless, Bound::seconds(120))?;
        ensure!(ended.status != 0, "fio went on without a controller:\n{}", ended.output);
        wait_for_luns(guest, &[])?;
        host.must_run()?;

        guest.plug_controller(&host.controller(id)?)?;
        let disks = wait_for_luns(guest, &places).with_context(|| format!("round {round}: plugged again"))?;
        assert_eq!(guest.must(&format!("sha256sum <{}", disks[&(1, 0)].node()))?, sum, "round {round}: other data");
        verify_once(guest, &disks[&(0, 0)])?;
    }
    Ok(())
}
