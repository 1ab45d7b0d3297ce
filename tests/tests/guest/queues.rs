//! Every queue of a real guest's disk serves requests.

use anyhow::{Context, Result, ensure};
use mqblk_test_bounds::Bound;
use mqblk_tests::guest::{
    DaemonDisk, DaemonProgram, FioJobs, FioOutcome, Guest, GuestDisk, HostImage, Shell, VhostUserDaemon,
};

/// Requests from each CPU: more than a firmware or a partition scan sends.
const REQUESTS: u64 = 300;

#[test]
fn four_queues_with_four_cpus() -> Result<()> {
    let count = 4;
    let image = HostImage::sparse(256)?;
    let daemon = VhostUserDaemon::start(&[DaemonDisk::new("many", image.path(), count)])?;
    let mut guest = Guest::builder().vcpus(count).disk(GuestDisk::new("many", &daemon.socket("many"), count)).boot()?;

    let queues = guest.must("ls /sys/block/vda/mq | sort -n | tr '\\n' ' '")?;
    let expected: Vec<String> = (0..count).map(|queue| queue.to_string()).collect();
    assert_eq!(queues.split_whitespace().collect::<Vec<_>>(), expected);

    for queue in 0..count {
        let cpus = guest.must(&format!("cat /sys/block/vda/mq/{queue}/cpu_list"))?;
        assert_eq!(cpus.trim(), queue.to_string(), "as many queues as CPUs: each has its own");
        let before = interrupts(&mut guest, queue)?;
        let reads = FioJobs::new(&format!(
            "--name=pinned --filename=/dev/vda --ioengine=io_uring --direct=1 --iodepth=4 --thread --rw=randread \
             --bs=4k --norandommap --cpus_allowed={queue} --number_ios={REQUESTS}"
        ))
        .run(&mut guest, Bound::seconds(60))?;
        ensure!(reads.reads >= REQUESTS, "fio read {} times, asked for {REQUESTS}", reads.reads);
        let after = interrupts(&mut guest, queue)?;
        ensure!(after > before, "queue {queue} raised no interrupt for {REQUESTS} reads: {before} then {after}");
    }

    let written = FioJobs::verified_random_writes("/dev/vda", count, 0, 8)
        .run(&mut guest, Bound::seconds(150))?
        .must_have_verified()?;
    guest.power_off()?;

    let stopped = daemon.stop()?;
    if stopped.server() == DaemonProgram::Mqblk {
        for queue in 0..count {
            let requests = stopped.queue_counter("many", queue, "requests")?;
            ensure!(
                requests >= REQUESTS,
                "queue {queue} served {requests} requests, the guest sent {REQUESTS} or more"
            );
            let kicks = stopped.queue_counter("many", queue, "kicks")?;
            ensure!(kicks > 0, "queue {queue} was never kicked");
        }
        let total = |name| (0..count).map(|queue| stopped.queue_counter("many", queue, name)).sum::<Result<u64>>();
        let (reads, writes) = (total("reads")?, total("writes")?);
        let all_reads = written.reads + REQUESTS * u64::from(count);
        ensure!(reads >= all_reads, "{reads} reads counted, fio alone made {all_reads}");
        ensure!(writes >= written.writes, "{writes} writes counted, fio alone made {}", written.writes);
    }
    Ok(())
}

/// More queues than CPUs, more queues than the VMM sets up, memory above 4 GiB, every ring size.
#[test]
#[ignore = "long: make soak, make test-guest"]
fn odd_shapes() -> Result<()> {
    let images = [HostImage::sparse(64)?, HostImage::sparse(64)?, HostImage::sparse(64)?];
    let ids = ["small", "large", "single"];
    let disks: Vec<DaemonDisk> =
        ids.iter().zip(&images).map(|(id, image)| DaemonDisk::new(id, image.path(), 8)).collect();
    let mut daemon = VhostUserDaemon::start(&disks)?;
    let disk = |id: &str, queues| GuestDisk::new(id, &daemon.socket(id), queues);
    let mut guest = Guest::builder()
        .memory_mib(4608)
        .disk(disk("small", 4).queue_size(16))
        .disk(disk("large", 8).queue_size(256))
        .disk(disk("single", 1).queue_size(64))
        .boot()?;

    for (name, hardware_queues) in [("vda", "2"), ("vdb", "2"), ("vdc", "1")] {
        // The guest's driver uses no more queues than it has CPUs.
        assert_eq!(guest.must(&format!("ls /sys/block/{name}/mq | wc -l"))?, hardware_queues, "{name}");
        guest.start(name, &FioJobs::verified_random_writes(&format!("/dev/{name}"), 2, 0, 16).script(name))?;
    }
    for name in ["vda", "vdb", "vdc"] {
        let ended = guest.finish(name, Bound::seconds(240))?;
        FioOutcome::read(ended.status, &ended.output)?.must_have_verified()?;
    }
    guest.power_off()?;

    let too_many = GuestDisk::new("small", &daemon.socket("small"), 16);
    ensure!(Guest::builder().disk(too_many).boot().is_err(), "QEMU got 16 queues of a disk that has 8");
    daemon.must_run()?;
    let mut again = Guest::builder().disk(GuestDisk::new("small", &daemon.socket("small"), 8)).boot()?;
    again.must("dd if=/dev/vda of=/dev/null bs=1M count=8 iflag=direct 2>/dev/null")?;
    again.power_off()?;
    daemon.stop().map(drop)
}

/// A disk of each poll policy in one guest, first busy at the same time, then with one small request at a time and
/// gaps.
#[test]
#[ignore = "long: make soak, make test-guest"]
fn every_poll_policy_serves() -> Result<()> {
    let policies = ["off", "static:50", "adaptive:200", "busy"];
    let ours = DaemonProgram::from_environment()? == DaemonProgram::Mqblk;
    let mut images = Vec::new();
    let mut disks = Vec::new();
    for (index, policy) in policies.iter().enumerate() {
        let image = HostImage::sparse(64)?;
        let disk = DaemonDisk::new(&format!("poll{index}"), image.path(), 2);
        disks.push(if ours { disk.option("poll", policy) } else { disk });
        images.push(image);
    }
    let daemon = VhostUserDaemon::start(&disks)?;
    let mut builder = Guest::builder();
    for index in 0..policies.len() {
        let id = format!("poll{index}");
        builder = builder.disk(GuestDisk::new(&id, &daemon.socket(&id), 2));
    }
    let mut guest = builder.boot()?;

    let names = ["vda", "vdb", "vdc", "vdd"];
    for name in names {
        guest.start(name, &FioJobs::verified_random_writes(&format!("/dev/{name}"), 2, 0, 8).script(name))?;
    }
    for name in names {
        let ended = guest.finish(name, Bound::seconds(240))?;
        FioOutcome::read(ended.status, &ended.output)?.must_have_verified()?;
    }
    for (name, policy) in names.iter().zip(policies) {
        let reads = FioJobs::new(&format!(
            "--name=gaps --filename=/dev/{name} --ioengine=psync --direct=1 --thread --numjobs=2 --rw=randread --bs=4k \
             --norandommap --number_ios={REQUESTS} --thinktime=1000 --thinktime_blocks=3"
        ))
        .run(&mut guest, Bound::seconds(120))?;
        ensure!(reads.reads >= 2 * REQUESTS, "poll={policy}: {} reads", reads.reads);
    }
    guest.power_off()?;
    daemon.stop().map(drop)
}

/// Returns the guest's count of interrupts of a queue of its only virtio disk, over all its CPUs.
fn interrupts(guest: &mut Guest, queue: u16) -> Result<u64> {
    let table = guest.must("cat /proc/interrupts")?;
    let name = format!("-req.{queue}");
    let line = table.lines().find(|line| line.ends_with(&name)).with_context(|| format!("no {name} in:\n{table}"))?;
    Ok(line.split_whitespace().skip(1).map_while(|word| word.parse::<u64>().ok()).sum())
}
