//! Every queue of a real guest's disk serves requests.
//!
//! One test at a time, and only after tests/guest/prepare.sh: see tests/src/guest.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use mqblk_tests::guest::{Daemon, DaemonDisk, FioJobs, Guest, GuestDisk, Image, Server};

/// Requests sent from each CPU. More than a firmware or a partition scan would ever send.
const REQUESTS: u64 = 300;

#[test]
fn two_queues_with_two_cpus() -> Result<()> {
    every_queue_serves(2)
}

#[test]
fn four_queues_with_four_cpus() -> Result<()> {
    every_queue_serves(4)
}

fn every_queue_serves(count: u16) -> Result<()> {
    let image = Image::sparse(256)?;
    let daemon = Daemon::start(&[DaemonDisk::new("many", image.path(), count)])?;
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
        .run(&mut guest, Duration::from_secs(60))?;
        ensure!(reads.reads >= REQUESTS, "fio read {} times, asked for {REQUESTS}", reads.reads);
        let after = interrupts(&mut guest, queue)?;
        ensure!(after > before, "queue {queue} raised no interrupt for {REQUESTS} reads: {before} then {after}");
    }

    let written =
        FioJobs::verified_random_writes("/dev/vda", count, 0, 32).run(&mut guest, Duration::from_secs(150))?;
    ensure!(written.writes > 0 && written.reads >= written.writes, "fio verified too little: {written:?}");
    guest.power_off()?;

    let stopped = daemon.stop()?;
    if stopped.server() == Server::Mqblk {
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

/// The guest's count of interrupts of a queue of its only virtio disk, over all its CPUs.
fn interrupts(guest: &mut Guest, queue: u16) -> Result<u64> {
    let table = guest.must("cat /proc/interrupts")?;
    let name = format!("-req.{queue}");
    let line = table.lines().find(|line| line.ends_with(&name)).with_context(|| format!("no {name} in:\n{table}"))?;
    Ok(line.split_whitespace().skip(1).map_while(|word| word.parse::<u64>().ok()).sum())
}
