//! A load generator that shares no code with this project: requests by the virtio-blk-vhost-user driver of the `blkio`
//! crate (libblkio in Rust), which makes each request available by itself, as Linux's driver does. For the scripts that
//! compare servers.
//!
//! `blkio_load SOCKET PID randread|randwrite|read|write BS QUEUES IODEPTH SECONDS WARMUP [KEY[=VALUE]...]`: prints
//! IOPS, and the microseconds of CPU time per request of the process PID (the server). The keys, with the defaults of
//! fio's libblkio engine except for `batch`:
//!
//! * `batch=N`: completions taken at once, each replaced by a new request (64; fio: 1).
//! * `threads=N`: threads, which share the queues (one for each queue). A thread of several queues polls.
//! * `poll`: the client polls for completions, and the server never calls it.
//! * `latency`: also prints the median and the 99th percentile of the latency, in microseconds.

#![expect(unsafe_code, reason = "blkio hands completions out as uninitialised memory that it has filled in")]

use std::io::Write as _;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use blkio::{Blkio, Blkioq, Completion, MemoryRegion, ReqFlags};
use hdrhistogram::Histogram;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

const USAGE: &str = "expected SOCKET PID randread|randwrite|read|write BS QUEUES IODEPTH SECONDS WARMUP [batch=N] [threads=N] [poll] [latency]";

/// Most completions taken at once.
const MAX_BATCH: usize = 64;

/// The requested load.
#[derive(Clone, Copy)]
struct Load {
    random: bool,
    write: bool,
    bytes: usize,
    depth: usize,
    /// Blocks of the disk.
    blocks: u64,
    batch: usize,
    poll: bool,
    latency: bool,
}

/// Measurements of a run.
struct Measured {
    requests: u64,
    cpu_ticks: u64,
    time: Duration,
    latency_ns: Histogram<u64>,
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let Some(([socket, pid, rw, bytes, queues, depth, seconds, warmup], keys)) = arguments.split_first_chunk() else {
        bail!(USAGE);
    };
    let (random, write) = match rw.as_str() {
        "randread" => (true, false),
        "randwrite" => (true, true),
        "read" => (false, false),
        "write" => (false, true),
        other => bail!("rw: found {other:?}, expected randread, randwrite, read or write"),
    };
    let (queues, depth): (usize, usize) = (queues.parse()?, depth.parse()?);
    let bytes = match bytes.strip_suffix('k') {
        Some(kilobytes) => kilobytes.parse::<usize>()? << 10,
        None => bytes.parse()?,
    };
    let mut load = Load { random, write, bytes, depth, blocks: 0, batch: MAX_BATCH, poll: false, latency: false };
    let mut threads = queues;
    for key in keys {
        match key.split_once('=') {
            Some(("batch", count)) => load.batch = count.parse::<usize>()?.clamp(1, MAX_BATCH),
            Some(("threads", count)) => threads = count.parse::<usize>()?.clamp(1, queues),
            None if key == "poll" => load.poll = true,
            None if key == "latency" => load.latency = true,
            _ => bail!("found {key:?}, {USAGE}"),
        }
    }
    // A thread cannot wait for several queues.
    load.poll |= threads < queues;
    let mut client = Blkio::new("virtio-blk-vhost-user")?;
    client.set_str("path", socket)?;
    // The server of a read-only disk itself refuses writes.
    client.set_bool("read-only", !write)?;
    client.connect()?;
    client.set_i32("num-queues", i32::try_from(queues)?)?;
    load.blocks = client.get_u64("capacity")? / bytes as u64;
    let started = client.start()?;
    ensure!(started.queues.len() == queues, "the driver has {} queues", started.queues.len());
    let region = client.alloc_mem_region((queues * depth * bytes).next_multiple_of(1 << 21))?;
    client.map_mem_region(&region)?;
    let times = (Duration::from_secs_f64(warmup.parse()?), Duration::from_secs_f64(seconds.parse()?));
    let lanes: Vec<Lane> = (0..).zip(started.queues).map(|(at, queue)| Lane::new(queue, at, queues, load)).collect();
    let measured = measure(lanes, threads, load, &region, times, pid)?;
    ensure!(measured.requests > 0, "no request has completed");
    let cpu_us = measured.cpu_ticks as f64 * 1e6 / rustix::param::clock_ticks_per_second() as f64;
    let iops = measured.requests as f64 / measured.time.as_secs_f64();
    let mut stdout = std::io::stdout();
    write!(stdout, "{iops:.0} {:.2}", cpu_us / measured.requests as f64)?;
    if load.latency {
        let us = |quantile| measured.latency_ns.value_at_quantile(quantile) as f64 / 1000.0;
        write!(stdout, " {:.1} {:.1}", us(0.5), us(0.99))?;
    }
    writeln!(stdout)?;
    Ok(())
}

/// Runs the load and measures it after the warm-up.
fn measure(
    mut lanes: Vec<Lane>,
    threads: usize,
    load: Load,
    region: &MemoryRegion,
    (warmup, seconds): (Duration, Duration),
    pid: &str,
) -> Result<Measured> {
    let done = AtomicU64::new(0);
    let begin = Instant::now() + warmup;
    let end = begin + seconds;
    let mut shares: Vec<Vec<Lane>> = (0..threads).map(|_| Vec::new()).collect();
    for at in (0..lanes.len()).rev() {
        shares[at % threads].push(lanes.remove(at));
    }
    std::thread::scope(|scope| -> Result<Measured> {
        let done = &done;
        let run = |share: Vec<Lane>| move || drive(share, load, region, done, (begin, end));
        let running: Vec<_> = shares.into_iter().map(|share| scope.spawn(run(share))).collect();
        std::thread::sleep(warmup);
        let (start, before, cpu) = (Instant::now(), done.load(Ordering::Relaxed), cpu_ticks(pid)?);
        std::thread::sleep(end.saturating_duration_since(Instant::now()));
        let (time, requests) = (start.elapsed(), done.load(Ordering::Relaxed) - before);
        let cpu_ticks = cpu_ticks(pid)? - cpu;
        let mut latency_ns = Histogram::new(3)?;
        for thread in running {
            latency_ns.add(thread.join().map_err(|_| anyhow::anyhow!("a queue's thread panicked"))??)?;
        }
        Ok(Measured { requests, cpu_ticks, time, latency_ns })
    })
}

/// A queue and its requests.
struct Lane {
    queue: Blkioq,
    number: usize,
    random: SmallRng,
    next: u64,
    in_flight: usize,
    /// Time at which the request of each slot was made available.
    begun: Vec<Instant>,
}

impl Lane {
    fn new(mut queue: Blkioq, number: usize, queues: usize, load: Load) -> Lane {
        queue.set_completion_fd_enabled(!load.poll);
        let next = load.blocks / queues as u64 * number as u64;
        let begun = vec![Instant::now(); load.depth];
        Lane { queue, number, random: SmallRng::seed_from_u64(number as u64), next, in_flight: 0, begun }
    }

    /// Makes a request available.
    fn submit(&mut self, load: Load, region: &MemoryRegion, slot: usize) {
        let block = if load.random { self.random.random_range(0..load.blocks) } else { self.next % load.blocks };
        self.next += 1;
        let (start, buffer) = (block * load.bytes as u64, region.addr + (self.number * load.depth + slot) * load.bytes);
        if load.latency {
            self.begun[slot] = Instant::now();
        }
        match load.write {
            true => self.queue.write(start, buffer as *const u8, load.bytes, slot, ReqFlags::empty()),
            false => self.queue.read(start, buffer as *mut u8, load.bytes, slot, ReqFlags::empty()),
        }
    }
}

/// Keeps `load.depth` requests in flight on each of the queues until the end. Returns the measured latencies in
/// nanoseconds.
fn drive(
    mut lanes: Vec<Lane>,
    load: Load,
    region: &MemoryRegion,
    done: &AtomicU64,
    (begin, end): (Instant, Instant),
) -> Result<Histogram<u64>> {
    let mut latency_ns = Histogram::new(3)?;
    for lane in &mut lanes {
        (0..load.depth).for_each(|slot| lane.submit(load, region, slot));
        lane.in_flight = load.depth;
    }
    let mut room: [MaybeUninit<Completion>; MAX_BATCH] = [const { MaybeUninit::uninit() }; MAX_BATCH];
    // libblkio sleeps to wait for a completion, even on a queue whose completion descriptor is disabled.
    let wait = usize::from(!load.poll);
    while lanes.iter().any(|lane| lane.in_flight > 0) {
        let now = Instant::now();
        ensure!(now < end + Duration::from_secs(20), "no completion in time");
        for lane in lanes.iter_mut().filter(|lane| lane.in_flight > 0) {
            let mut limit = Duration::from_secs(20);
            let most = load.batch.min(lane.in_flight);
            let count =
                lane.queue.do_io(&mut room[..most], wait, Some(&mut limit), None).context("no completion in time")?;
            for completion in &room[..count] {
                // SAFETY: do_io has filled in the first `count` entries.
                let completion = unsafe { completion.assume_init_ref() };
                ensure!(completion.ret == 0, "a request failed: {}", completion.ret);
                let slot = completion.user_data;
                if load.latency && now >= begin {
                    latency_ns.record(lane.begun[slot].elapsed().as_nanos() as u64)?;
                }
                match now < end {
                    true => lane.submit(load, region, slot),
                    false => lane.in_flight -= 1,
                }
            }
            done.fetch_add(count as u64, Ordering::Relaxed);
        }
    }
    Ok(latency_ns)
}

/// Returns the CPU time of a process in clock ticks (proc(5): utime and stime of `/proc/PID/stat`).
fn cpu_ticks(pid: &str) -> Result<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let field = |at: usize| fields.get(at).and_then(|field| field.parse::<u64>().ok()).context("/proc/PID/stat");
    Ok(field(11)? + field(12)?)
}
