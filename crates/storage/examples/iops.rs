//! Benchmark of a storage backend without a guest: 4 KiB random reads or writes through one channel.
//!
//! ```text
//! cargo run --release -p mqblk-storage --example iops -- file path=/dev/shm/x.img
//! cargo run --release -p mqblk-storage --example iops -- file path=x.img depth=1 rw=randwrite seconds=5
//! ```
//!
//! The first argument is the backend; `rw` (randread, randwrite), `bs`, `depth`, `batch` (completions to wait for),
//! `chunk` (requests to submit to the kernel at once), `seconds`, `spin` (poll the ring instead of sleeping) and
//! `memory-shift` (bytes by which buffers are misaligned) are the benchmark's; the other `KEY=VALUE`s are the disk's. A
//! write benchmark destroys the content.
#![forbid(unsafe_code)]

use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mqblk_core::settings::{Key, Settings};
use mqblk_core::{ByteLen, ByteOffset, Completion, Op, Request, Tag};
use mqblk_memory::{Buffer, GuestAddress, GuestMemory, PooledContext as _, Region};
use mqblk_uring::{FixedBufferUse, UringContext, UringOptions, Wait};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

static RW: Key = Key::words("rw", &["randread", "randwrite"]).default("randread");
static BS: Key = Key::size("bs");
static DEPTH: Key = Key::number("depth", 1, 1024).default("32");
static BATCH: Key = Key::number("batch", 1, 1024).default("1");
static SPIN: Key = Key::switch("spin");
static CHUNK: Key = Key::number("chunk", 1, 1024).default("1024");
static MEMORY_SHIFT: Key = Key::number("memory-shift", 0, 4095);
static SECONDS: Key = Key::number("seconds", 1, 3600).default("3");

type Failure = Box<dyn std::error::Error>;

fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn main() -> Result<(), Failure> {
    let mut arguments = std::env::args().skip(1);
    let kind = arguments.next().ok_or("which backend?")?;
    let mut settings = Settings::new("iops");
    for argument in arguments {
        let (key, value) = argument.split_once('=').ok_or("expected KEY=VALUE")?;
        settings.insert(key, value)?;
    }
    let op = match settings.word(&RW)? {
        Some("randwrite") => Op::Write { fua: false },
        _ => Op::Read,
    };
    let len = settings.size(&BS)?.unwrap_or(ByteLen(4096)).0;
    let depth = settings.number_or_default(&DEPTH)?;
    let batch = settings.number_or_default(&BATCH)? as usize;
    let spin = settings.switch_or_default(&SPIN)?;
    let chunk = settings.number_or_default(&CHUNK)? as usize;
    let shift = settings.number_or_default(&MEMORY_SHIFT)?;
    let time = Duration::from_secs(settings.number_or_default(&SECONDS)?);
    let disk = mqblk_storage::open(&kind, &mut settings)?;
    settings.finish()?;

    let mut context = UringContext::new(UringOptions::default())?;
    let stride = len.next_multiple_of(4096) + 4096;
    let region = Region::shared("iops", stride * depth, GuestAddress(0))?.0;
    let memory = Arc::new(GuestMemory::new(vec![Arc::new(region)])?);
    let lease = context.adopt(memory, FixedBufferUse::Auto)?;
    let mut channel = disk.open_channel(&mut context)?;
    let blocks = disk.geometry().size.0 / len;
    let mut random = SmallRng::seed_from_u64(1);
    let mut batch_of: Vec<Request<Buffer>> = Vec::new();
    let mut idle: Vec<(Tag, Buffer)> = Vec::new();
    for at in 0..depth {
        let buffer = context.buffers.take(lease);
        context.buffers.push(&buffer, GuestAddress(at * stride + shift), len as u32, 1).map_err(|_| "not mapped")?;
        idle.push((Tag::new(0, at as u16), buffer));
    }
    let mut completions: Vec<Completion<Buffer>> = Vec::new();
    let (start, cpu) = (Instant::now(), cpu_time());
    let (mut done, mut turns, mut empty) = (0_u64, 0_u64, 0_u64);
    while start.elapsed() < time {
        for (tag, buffer) in idle.drain(..) {
            let start = ByteOffset(random.random_range(0..blocks) * len);
            batch_of.push(Request { start, len: ByteLen(len), tag, buffer: Some(buffer), op });
            if batch_of.len() == chunk {
                channel.submit(&mut context, &mut batch_of, &mut completions);
                context.turn(Wait::No);
            }
        }
        if !batch_of.is_empty() {
            channel.submit(&mut context, &mut batch_of, &mut completions);
        }
        // Completions of an earlier turn are taken first: a wait is for requests still in flight.
        channel.reap(&mut context, &mut completions);
        if completions.len() < batch && channel.outstanding() > 0 {
            turns += 1;
            empty += u64::from(context.turn(if spin { Wait::No } else { Wait::Completion }) == 0);
        }
        channel.reap(&mut context, &mut completions);
        for completion in completions.drain(..) {
            assert!(completion.outcome.is_done(), "{:?}", completion.outcome);
            done += 1;
            idle.extend(completion.buffer.map(|buffer| (completion.tag, buffer)));
        }
    }
    let (wall, cpu) = (start.elapsed(), cpu_time() - cpu);
    writeln!(
        std::io::stdout(),
        "{kind} depth {depth}: {:.0} IOPS, {:.2} us of CPU per I/O, {:.0}% of a core, {:.2} I/Os per wait, {empty} empty",
        done as f64 / wall.as_secs_f64(),
        cpu.as_secs_f64() * 1e6 / done as f64,
        cpu.as_secs_f64() / wall.as_secs_f64() * 100.0,
        done as f64 / turns.max(1) as f64,
    )?;
    while channel.outstanding() > 0 {
        channel.reap(&mut context, &mut completions);
        context.turn(Wait::AtMost(Duration::from_millis(10)));
    }
    channel.close(&mut context);
    Ok(())
}
