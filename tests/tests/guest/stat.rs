//! Merging and statistics with a real guest: merged requests keep data intact, and the daemon's counters match the
//! guest's. Also the shape of a file system's buffered streams.

use anyhow::{Context, Result, ensure};
use mqblk_admin::model::{DiskStat, QueueCounters};
use mqblk_test_bounds::Bound;
use mqblk_tests::guest::{DaemonDisk, DaemonProgram, FioJobs, Guest, GuestDisk, HostImage, Shell, VhostUserDaemon};

/// The guest kernel's statistics of its disk (Documentation/block/stat.rst), and iostat's sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Seen {
    reads: u64,
    writes: u64,
    discards: u64,
    flushes: u64,
    read_kib: u64,
    written_kib: u64,
    discarded_kib: u64,
}

impl Seen {
    fn by(guest: &mut Guest, disk: &str) -> Result<Seen> {
        let line = guest.must(&format!("cat /sys/block/{disk}/stat"))?;
        let fields = line.split_whitespace().map(str::parse).collect::<Result<Vec<u64>, _>>()?;
        ensure!(fields.len() >= 17, "/sys/block/{disk}/stat has {} fields", fields.len());
        let text = guest.must(&format!("iostat -d -k -o JSON {disk}"))?;
        let json: serde_json::Value = serde_json::from_str(&text).with_context(|| format!("iostat said: {text}"))?;
        let sums = &json["sysstat"]["hosts"][0]["statistics"][0]["disk"][0];
        let sum = |name: &str| sums[name].as_u64().with_context(|| format!("no {name} in {text}"));
        Ok(Seen {
            reads: fields[0],
            // The kernel also counts the empty write that carries a flush.
            writes: fields[4] - fields[15],
            discards: fields[11],
            flushes: fields[15],
            read_kib: sum("kB_read")?,
            written_kib: sum("kB_wrtn")?,
            discarded_kib: sum("kB_dscd")?,
        })
    }

    fn since(&self, earlier: &Seen) -> Seen {
        Seen {
            reads: self.reads - earlier.reads,
            writes: self.writes - earlier.writes,
            discards: self.discards - earlier.discards,
            flushes: self.flushes - earlier.flushes,
            read_kib: self.read_kib - earlier.read_kib,
            written_kib: self.written_kib - earlier.written_kib,
            discarded_kib: self.discarded_kib - earlier.discarded_kib,
        }
    }
}

#[test]
fn the_daemon_counts_what_the_guest_counts() -> Result<()> {
    if DaemonProgram::from_environment()? != DaemonProgram::Mqblk {
        return Ok(());
    }
    let image = HostImage::sparse(256)?;
    let disk = DaemonDisk::new("seen", image.path(), 2).option("merge", "on");
    let daemon = VhostUserDaemon::start(&[disk])?;
    let mut guest = Guest::builder().disk(GuestDisk::new("seen", &daemon.socket("seen"), 2)).boot()?;

    let (seen, ours) = (Seen::by(&mut guest, "vda")?, daemon.disk_stat("seen")?);
    FioJobs::new(
        "--filename=/dev/vda --ioengine=io_uring --direct=1 --thread --group_reporting \
         --name=mixed --rw=randrw --bsrange=512-64k --size=64M --number_ios=3000 --iodepth=8 \
         --name=stream --rw=write --bs=4k --offset=64M --size=16M --iodepth=32 --iodepth_batch=16 \
         --name=again --rw=read --bs=8k --offset=64M --size=16M --iodepth=32 --iodepth_batch=16",
    )
    .run(&mut guest, Bound::seconds(150))?;
    guest.must("for at in 0 1 2 3 4 5 6 7; do /sbin/blkdiscard -o $((128 + at))M -l 1M /dev/vda; done")?;
    guest.must(
        "for at in 1 2 3 4 5; do dd if=/dev/zero of=/dev/vda bs=4k count=1 conv=fsync,notrunc 2>/dev/null; done",
    )?;
    let seen = Seen::by(&mut guest, "vda")?.since(&seen);
    let now = daemon.disk_stat("seen")?;

    let (before, after) = (&ours.totals.counters, &now.totals.counters);
    let kib = |bytes: fn(&QueueCounters) -> u64| (bytes(after) - bytes(before)) / 1024;
    let counted = Seen {
        reads: after.reads - before.reads,
        writes: after.writes - before.writes,
        discards: after.discards - before.discards,
        // The kernel completes concurrent flushes by one.
        flushes: seen.flushes,
        read_kib: kib(|counters| counters.read_bytes),
        written_kib: kib(|counters| counters.written_bytes),
        discarded_kib: kib(|counters| counters.other_bytes),
    };
    assert_eq!(counted, seen);
    let flushes = after.flushes - before.flushes;
    ensure!((5..=seen.flushes).contains(&flushes), "{flushes} flushes counted, {} in the guest", seen.flushes);
    assert_eq!((after.errors, now.totals.in_flight), (0, 0));
    consistent(&now)?;
    guest.power_off()?;
    daemon.stop().map(drop)
}

/// Checks that the sums of the queues are the totals, and that every request has one latency.
fn consistent(disk: &DiskStat) -> Result<()> {
    let total = disk.totals.counters;
    let sum = |what: fn(&QueueCounters) -> u64| disk.queues.iter().map(|queue| what(&queue.load.counters)).sum::<u64>();
    for (name, what) in [
        ("requests", (|it| it.requests) as fn(&QueueCounters) -> u64),
        ("reads", |it| it.reads),
        ("writes", |it| it.writes),
        ("kicks", |it| it.kicks),
        ("write_merges", |it| it.write_merges),
    ] {
        assert_eq!(sum(what), what(&total), "{name}");
    }
    let latency = &disk.totals.latency;
    let others = total.flushes + total.discards + total.write_zeroes;
    for (parts, count) in [(&latency.reads, total.reads), (&latency.writes, total.writes), (&latency.others, others)] {
        for part in [&parts.queued, &parts.device, &parts.publish, &parts.total] {
            assert_eq!(part.count, count);
        }
    }
    Ok(())
}

/// Streams, random writes, discards and flushes at the same time, with everything enabled that may reorder or delay.
#[test]
#[ignore = "long: make soak, make test-guest"]
fn verified_data_survives_merging_under_storms() -> Result<()> {
    if DaemonProgram::from_environment()? != DaemonProgram::Mqblk {
        return Ok(());
    }
    let image = HostImage::sparse(256)?;
    let disk = DaemonDisk::new("storm", image.path(), 2)
        .option("merge", "on")
        .option("coalesce-us", "100")
        .option("coalesce-max", "8");
    let daemon = VhostUserDaemon::start(&[disk])?;
    let mut guest = Guest::builder().disk(GuestDisk::new("storm", &daemon.socket("storm"), 2)).boot()?;
    // The guest's own merging would leave little to merge.
    guest.must("echo 2 >/sys/block/vda/queue/nomerges")?;

    let verify = "--verify=crc32c --verify_fatal=1 --do_verify=1";
    let jobs = FioJobs::new(&format!(
        "--filename=/dev/vda --direct=1 --thread --ioengine=io_uring \
         --name=stream --rw=write --bs=4k --iodepth=32 --iodepth_batch=16 --numjobs=2 --size=16M --offset_increment=16M {verify} \
         --name=small --rw=write --bs=512 --iodepth=32 --iodepth_batch=32 --offset=32M --size=2M {verify} \
         --name=random --rw=randwrite --bssplit=4k/60:16k/30:64k/10 --iodepth=16 --offset=64M --size=24M {verify} \
         --name=flushes --rw=randwrite --bs=4k --iodepth=4 --fsync=1 --offset=96M --size=2M {verify} \
         --name=discards --ioengine=psync --rw=randtrim --bs=64k --offset=128M --size=64M --number_ios=600"
    ));
    jobs.run(&mut guest, Bound::seconds(240))?.must_have_verified()?;
    let stat = daemon.disk_stat("storm")?;
    let counters = &stat.totals.counters;
    ensure!(counters.write_merges > 1000, "streams of 4 KiB and 512 B were merged: {} times", counters.write_merges);
    ensure!(counters.read_merges > 1000, "and when they were read back: {} times", counters.read_merges);
    ensure!(counters.flushes > 100 && counters.discards >= 600, "{counters:?}");
    assert_eq!(counters.errors, 0);
    consistent(&stat)?;
    guest.power_off()?;
    daemon.stop().map(drop)
}

/// A file system on the disk, written and read through the page cache.
#[test]
#[ignore = "long: make soak, make test-guest"]
fn buffered_streams_of_a_file_system() -> Result<()> {
    if DaemonProgram::from_environment()? != DaemonProgram::Mqblk {
        return Ok(());
    }
    let images = [HostImage::sparse(256)?, HostImage::sparse(256)?];
    let disks: Vec<DaemonDisk> = ["on", "off"]
        .iter()
        .zip(&images)
        .map(|(merge, image)| DaemonDisk::new(merge, image.path(), 2).option("merge", merge))
        .collect();
    let daemon = VhostUserDaemon::start(&disks)?;
    let mut builder = Guest::builder();
    for id in ["on", "off"] {
        builder = builder.disk(GuestDisk::new(id, &daemon.socket(id), 2));
    }
    let mut guest = builder.boot()?;

    let mut table = "guest merges  disk      stream  requests  KiB/request  merged by us\n".to_owned();
    for (nomerges, guest_merges) in [(0, "yes"), (2, "no")] {
        for (disk, name) in [("on", "vda"), ("off", "vdb")] {
            guest.must(&format!(
                "set -e; echo {nomerges} >/sys/block/{name}/queue/nomerges; /sbin/mkfs.ext4 -q -F /dev/{name}; \
                 mkdir -p /mnt/{name}; mount -t ext4 /dev/{name} /mnt/{name}"
            ))?;
            let stream = |rw: &str, more: &str| {
                format!(
                    "--name=buffered --directory=/mnt/{name} --ioengine=psync --direct=0 --thread --numjobs=2 --size=24M --bs=4k --rw={rw} {more}"
                )
            };
            for (rw, more) in
                [("write", "--end_fsync=1 --do_verify=0 --verify=crc32c"), ("read", "--verify=crc32c --verify_fatal=1")]
            {
                guest.must("sync; echo 3 >/proc/sys/vm/drop_caches")?;
                let before = daemon.disk_stat(disk)?.totals.counters;
                FioJobs::new(&stream(rw, more)).run(&mut guest, Bound::seconds(120))?;
                guest.must("sync")?;
                let after = daemon.disk_stat(disk)?.totals.counters;
                let (requests, bytes, merged) = match rw {
                    "write" => (
                        after.writes - before.writes,
                        after.written_bytes - before.written_bytes,
                        after.write_merges - before.write_merges,
                    ),
                    _ => (
                        after.reads - before.reads,
                        after.read_bytes - before.read_bytes,
                        after.read_merges - before.read_merges,
                    ),
                };
                let kib = bytes / 1024 / requests.max(1);
                table +=
                    &format!("{guest_merges:<12}  merge={disk:<3} {rw:>6}  {requests:>8}  {kib:>11}  {merged:>12}\n");
                ensure!(bytes >= 48 << 20, "{rw}: {bytes} bytes reached the disk, fio moved 48 MiB");
                ensure!(disk == "on" || merged == 0, "merge=off merged {merged} requests");
            }
            guest.must(&format!("umount /mnt/{name} && e2fsck -f -n /dev/{name}"))?;
        }
    }
    print(&table);
    guest.power_off()?;
    daemon.stop().map(drop)
}

/// Shown with `--nocapture`.
#[expect(clippy::print_stdout, reason = "what is printed this way the test program may hold back")]
fn print(table: &str) {
    println!("\n{table}");
}
