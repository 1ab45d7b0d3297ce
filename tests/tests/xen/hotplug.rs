//! One guest device is attached and detached again and again, also under load, and as a disk of more than 2 TiB.

use anyhow::{Context, Result, ensure};
use mqblk_test_bounds::Bound;
use mqblk_tests::guest::{FioJobs, Shell};
use mqblk_tests::xen::{
    BackendDisk, BackendProgram, BlkfrontParameters, Dom0Image, Domain, DomainConfig, XenBackend, XenHost,
};

const ROUNDS: u32 = 50;
/// Rounds after which the daemon has what it keeps for later devices.
const FIRST_ROUNDS: u32 = 5;

/// Size of the large disk.
const LARGE_MIB: u32 = 3 << 20;

/// Returns the daemon's descriptors and threads.
fn resources(host: &mut XenHost) -> Result<(u32, u32)> {
    let text = host.must("cd /proc/$(cat /run/mqblk.pid) && ls fd | wc -l && ls task | wc -l")?;
    let mut numbers = text.lines().map(|line| line.trim().parse::<u32>());
    let mut number = || numbers.next().context("two numbers")?.map_err(anyhow::Error::from);
    Ok((number()?, number()?))
}

/// Waits until the daemon has no more resources than before.
fn wait_for_resources(host: &mut XenHost, most: (u32, u32)) -> Result<()> {
    let mut deadline = Bound::seconds(60).begin();
    loop {
        let found = resources(host)?;
        if found.0 <= most.0 && found.1 <= most.1 {
            return Ok(());
        }
        ensure!(!deadline.has_passed(), "(descriptors, threads): {found:?}, expected at most {most:?}");
        std::thread::sleep(std::time::Duration::from_millis(200));
    }
}

/// Each round verifies the block of the round before, and writes its own.
fn again_and_again(host: &mut XenHost, backend: &XenBackend, guest: &mut Domain) -> Result<()> {
    let mut before = None;
    for round in 1..=ROUNDS {
        backend.attach(host, guest, "xvda", "disk").with_context(|| format!("round {round}"))?;
        let last = round - 1;
        let found = guest.must(&format!(
            "dd if=/dev/xvda bs=4k count=1 skip={last} iflag=direct 2>/dev/null | tr -d '\\0'; echo
             printf %-4096s round-{round} | dd of=/dev/xvda bs=4k count=1 seek={round} oflag=direct 2>/dev/null"
        ))?;
        let expected = if last == 0 { String::new() } else { format!("round-{last}") };
        ensure!(found.trim() == expected, "round {round}: found {found:?}, expected {expected:?}");
        backend.detach(host, guest, "xvda").with_context(|| format!("round {round}"))?;
        if round == FIRST_ROUNDS && backend.mqblk().is_some() {
            before = Some(resources(host)?);
        }
    }
    before.map_or(Ok(()), |before| wait_for_resources(host, before))
}

/// The device goes while the guest writes: its requests fail, and the next device serves.
fn under_load(host: &mut XenHost, backend: &XenBackend, guest: &mut Domain) -> Result<()> {
    for round in 1..=3 {
        backend.attach(host, guest, "xvda", "disk")?;
        let load = FioJobs::new(
            "--name=endless --filename=/dev/xvda --ioengine=io_uring --direct=1 --iodepth=16 --thread --rw=randwrite \
             --bs=16k --offset=8M --size=4M --time_based --runtime=600",
        );
        let name = format!("endless{round}");
        guest.start(&name, &load.script(&name))?;
        guest.must("until [ $(awk '{ print $5 }' /sys/block/xvda/stat) -gt 50 ]; do sleep 0.1; done")?;
        backend.detach(host, guest, "xvda").with_context(|| format!("under load, round {round}"))?;
        let ended = guest.finish(&name, Bound::seconds(90))?;
        ensure!(ended.status != 0, "fio has not noticed: {}", ended.output);
    }
    backend.attach(host, guest, "xvda", "disk")?;
    FioJobs::verified_random_writes("/dev/xvda", 1, 0, 2).run(guest, Bound::seconds(90))?.must_have_verified()?;
    backend.detach(host, guest, "xvda")
}

/// Blocks on both sides of 2 TiB, where a 32-bit number of sectors ends, and the last one.
fn more_than_two_tib(host: &mut XenHost, backend: &XenBackend, guest: &mut Domain, image: &Dom0Image) -> Result<()> {
    backend.attach(host, guest, "xvdb", "large")?;
    assert_eq!(guest.must("cat /sys/block/xvdb/size")?, (u64::from(LARGE_MIB) * 2048).to_string());
    let last = u64::from(LARGE_MIB) * 256 - 1;
    let two_tib = 1_u64 << 29;
    for block in [0, two_tib - 1, two_tib, last] {
        guest.must(&format!(
            "set -e
             printf %-4096s block-{block} | dd of=/dev/xvdb bs=4k count=1 seek={block} oflag=direct 2>/dev/null
             dd if=/dev/xvdb bs=4k count=1 skip={block} iflag=direct 2>/dev/null | grep -q '^block-{block} '"
        ))?;
    }
    for block in [0, two_tib - 1, two_tib, last] {
        let path = image.path();
        host.must(&format!("dd if={path} bs=4k count=1 skip={block} 2>/dev/null | grep -q '^block-{block} '"))
            .with_context(|| format!("block {block} of the image"))?;
    }
    // A discard across 2 TiB leaves the last block.
    let length = last - (two_tib - 1);
    guest.must(&format!("/sbin/blkdiscard -o {} -l {} /dev/xvdb", (two_tib - 1) * 4096, length * 4096))?;
    guest.must(&format!(
        "for block in {} {two_tib}; do
             dd if=/dev/xvdb bs=4k count=1 skip=$block iflag=direct 2>/dev/null | cmp -n 4096 - /dev/zero || exit
         done
         dd if=/dev/xvdb bs=4k count=1 skip={last} iflag=direct 2>/dev/null | grep -q '^block-{last} '",
        two_tib - 1
    ))?;
    backend.detach(host, guest, "xvdb")
}

#[test]
#[ignore = "long: make soak, make test-xen"]
fn attached_and_detached_fifty_times() -> Result<()> {
    let server = BackendProgram::from_environment()?;
    let mut host = server.boot(XenHost::builder("hotplug"))?;
    let image = Dom0Image::sparse(&mut host, "disk", 16)?;
    let large = Dom0Image::sparse(&mut host, "large", LARGE_MIB)?;
    let disks = [BackendDisk::new("disk", &image, "queues=2"), BackendDisk::new("large", &large, "queues=2")];
    let backend = XenBackend::start(server, &mut host, &disks)?;
    let mut guest = Domain::create(&mut host, &DomainConfig::new("guest"))?;
    guest.load_blkfront(BlkfrontParameters::default())?;
    more_than_two_tib(&mut host, &backend, &mut guest, &large)?;
    again_and_again(&mut host, &backend, &mut guest)?;
    guest.must_have_no_warnings()?;
    under_load(&mut host, &backend, &mut guest)?;
    guest.power_off(&mut host)?;
    backend.stop(&mut host)?;
    host.power_off()
}
