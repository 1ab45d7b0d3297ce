//! A load generator that shares no code with this project: 4 KiB requests by the virtio-blk-vhost-user driver of the `blkio` crate (libblkio in
//! Rust), which makes each request available by itself, as Linux's driver does. For `scripts/storage-benchmark.sh` with `CLIENT=blkio`.
//!
//! `blkio_load SOCKET PID randread|randwrite|read BS QUEUES IODEPTH SECONDS WARMUP`: prints IOPS, and microseconds of CPU time that the process PID (the
//! server) took for each request. A thread for each queue.

#![expect(unsafe_code, reason = "blkio hands completions out as uninitialised memory that it has filled in")]

use std::io::Write as _;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use blkio::{Blkio, Blkioq, Completion, MemoryRegion, ReqFlags};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

/// What is asked.
#[derive(Clone, Copy)]
struct Load {
    random: bool,
    write: bool,
    bytes: usize,
    depth: usize,
    /// Blocks of the disk.
    blocks: u64,
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [socket, pid, rw, bytes, queues, depth, seconds, warmup] = arguments.as_slice() else {
        bail!("expected SOCKET PID randread|randwrite|read BS QUEUES IODEPTH SECONDS WARMUP");
    };
    let (random, write) = match rw.as_str() {
        "randread" => (true, false),
        "randwrite" => (true, true),
        "read" => (false, false),
        other => bail!("rw: found {other:?}, expected randread, randwrite or read"),
    };
    let (queues, depth): (usize, usize) = (queues.parse()?, depth.parse()?);
    let bytes = match bytes.strip_suffix('k') {
        Some(kilobytes) => kilobytes.parse::<usize>()? << 10,
        None => bytes.parse()?,
    };
    let mut client = Blkio::new("virtio-blk-vhost-user")?;
    client.set_str("path", socket)?;
    client.connect()?;
    client.set_i32("num-queues", i32::try_from(queues)?)?;
    let blocks = client.get_u64("capacity")? / bytes as u64;
    let started = client.start()?;
    ensure!(started.queues.len() == queues, "the driver has {} queues", started.queues.len());
    let load = Load { random, write, bytes, depth, blocks };
    let region = client.alloc_mem_region((queues * depth * bytes).next_multiple_of(1 << 21))?;
    client.map_mem_region(&region)?;
    let done = AtomicU64::new(0);
    let (warmup, seconds) = (Duration::from_secs_f64(warmup.parse()?), Duration::from_secs_f64(seconds.parse()?));
    let end = Instant::now() + warmup + seconds;
    let measured = std::thread::scope(|scope| -> Result<(u64, u64, Duration)> {
        let (done, region) = (&done, &region);
        let threads: Vec<_> = started
            .queues
            .into_iter()
            .enumerate()
            .map(|(number, queue)| scope.spawn(move || drive(queue, number, queues, load, region, done, end)))
            .collect();
        std::thread::sleep(warmup);
        let (start, before, cpu) = (Instant::now(), done.load(Ordering::Relaxed), cpu_ticks(pid)?);
        std::thread::sleep(end.saturating_duration_since(Instant::now()));
        let (time, requests) = (start.elapsed(), done.load(Ordering::Relaxed) - before);
        let cpu = cpu_ticks(pid)? - cpu;
        for thread in threads {
            thread.join().map_err(|_| anyhow::anyhow!("a queue's thread panicked"))??;
        }
        Ok((requests, cpu, time))
    });
    let (requests, ticks, time) = measured?;
    ensure!(requests > 0, "no request has completed");
    let cpu_us = ticks as f64 * 1e6 / rustix::param::clock_ticks_per_second() as f64;
    let iops = requests as f64 / time.as_secs_f64();
    writeln!(std::io::stdout(), "{iops:.0} {:.2}", cpu_us / requests as f64)?;
    Ok(())
}

/// Keeps `load.depth` requests in flight on a queue until `end`.
fn drive(
    mut queue: Blkioq,
    number: usize,
    queues: usize,
    load: Load,
    region: &MemoryRegion,
    done: &AtomicU64,
    end: Instant,
) -> Result<()> {
    queue.set_completion_fd_enabled(true);
    let mut random = SmallRng::seed_from_u64(number as u64);
    let mut next = load.blocks / queues as u64 * number as u64;
    let mut submit = |queue: &mut Blkioq, slot: usize| {
        let block = if load.random { random.random_range(0..load.blocks) } else { next % load.blocks };
        next += 1;
        let (start, buffer) = (block * load.bytes as u64, region.addr + (number * load.depth + slot) * load.bytes);
        match load.write {
            true => queue.write(start, buffer as *const u8, load.bytes, slot, ReqFlags::empty()),
            false => queue.read(start, buffer as *mut u8, load.bytes, slot, ReqFlags::empty()),
        }
    };
    (0..load.depth).for_each(|slot| submit(&mut queue, slot));
    let mut room: [MaybeUninit<Completion>; 64] = [const { MaybeUninit::uninit() }; 64];
    let mut in_flight = load.depth;
    while in_flight > 0 {
        let mut limit = Duration::from_secs(20);
        let most = room.len().min(in_flight);
        let count = queue.do_io(&mut room[..most], 1, Some(&mut limit), None).context("no completion in time")?;
        done.fetch_add(count as u64, Ordering::Relaxed);
        let goes_on = Instant::now() < end;
        for completion in &room[..count] {
            // SAFETY: do_io has filled in the first `count` entries.
            let completion = unsafe { completion.assume_init_ref() };
            ensure!(completion.ret == 0, "a request failed: {}", completion.ret);
            match goes_on {
                true => submit(&mut queue, completion.user_data),
                false => in_flight -= 1,
            }
        }
    }
    Ok(())
}

/// Returns the CPU time of a process in clock ticks (proc(5): utime and stime of `/proc/PID/stat`).
fn cpu_ticks(pid: &str) -> Result<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let field = |at: usize| fields.get(at).and_then(|field| field.parse::<u64>().ok()).context("/proc/PID/stat");
    Ok(field(11)? + field(12)?)
}
