//! `storage=null`: a disk that does nothing, to measure everything else.
//!
//! Writes are discarded. **Reads leave the guest's buffer unchanged**: filling it would cost more than the rest of the
//! path. Ranges, alignment and `readonly` are checked as for any disk.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mqblk_core::settings::{Key, Settings};
use mqblk_core::{
    BlockSize, ByteLen, Completion, DiscardLimits, Disk, DiskChannel, DiskError, Geometry, ImageOpener, Limits,
    OpenImage, Outcome, Request, Tag,
};
use mqblk_memory::Buffer;
use mqblk_uring::UringContext;

use crate::admission::{self, DiskSize};
use crate::keys::{BLOCK_SIZE, READONLY, SIZE};

static LATENCY_US: Key = Key::number("latency-us", 0, 60_000_000).default("0").about(
    "how long each request takes, in microseconds; 0: no time",
    "In order of submission, like null_blk's `completion_nsec`.",
);

/// The keys of `storage=null`.
pub(crate) const KEYS: &[&Key] = &[&SIZE, &LATENCY_US, &READONLY, &BLOCK_SIZE];

/// Opens a null disk.
///
/// # Errors
/// When a setting does not fit.
pub fn open(settings: &mut Settings, _: &Arc<dyn ImageOpener>) -> Result<Arc<dyn Disk<UringContext>>, DiskError> {
    let block = admission::block_size(settings)?.unwrap_or(BlockSize::B512);
    let size = admission::size(settings, block)?;
    let latency = settings.number_or_default(&LATENCY_US)?;
    let read_only = settings.switch_or_default(&READONLY)?;
    let geometry = admission::plain_geometry(size, block, read_only);
    let size = Arc::new(DiskSize::new(geometry.size));
    Ok(Arc::new(NullDisk { geometry, size, latency: Duration::from_micros(latency) }))
}

#[derive(Debug)]
struct NullDisk {
    /// The size in it is unused: see `size`.
    geometry: Geometry,
    size: Arc<DiskSize>,
    latency: Duration,
}

impl Disk<UringContext> for NullDisk {
    fn geometry(&self) -> Geometry {
        Geometry { size: self.size.get(), ..self.geometry }
    }

    fn limits(&self) -> Limits {
        let writable = !self.geometry.read_only;
        let granularity = ByteLen(u64::from(self.geometry.logical_block.bytes()));
        Limits {
            max_transfer: admission::MAX_TRANSFER,
            max_segments: u32::from(u16::MAX),
            discard: writable.then_some(DiscardLimits { granularity, max_len: self.size.get() }),
            write_zeroes: writable.then_some(self.size.get()),
            volatile_cache: false,
            cost_per_request: false,
            pins_memory: false,
        }
    }

    fn resolved(&self) -> Vec<(&'static str, String)> {
        vec![
            ("size", self.size.get().to_string()),
            ("latency-us", self.latency.as_micros().to_string()),
            ("block-size", self.geometry.logical_block.bytes().to_string()),
            ("readonly", admission::on_off(self.geometry.read_only)),
        ]
    }

    fn resize(&self, size: Option<ByteLen>) -> Result<ByteLen, DiskError> {
        if let Some(size) = size {
            admission::check_resize(&self.geometry, size)?;
            self.size.set(size);
        }
        Ok(self.size.get())
    }

    fn hand_over(&self) -> Result<Vec<OpenImage>, String> {
        Ok(Vec::new())
    }

    fn open_channel(&self, _context: &mut UringContext) -> Result<Box<dyn DiskChannel<UringContext>>, DiskError> {
        Ok(if self.latency.is_zero() {
            Box::new(ImmediateChannel { geometry: self.geometry, size: Arc::clone(&self.size) })
        } else {
            let (size, waiting) = (Arc::clone(&self.size), VecDeque::with_capacity(1024));
            Box::new(DelayedChannel { geometry: self.geometry, size, latency: self.latency, delayed: waiting })
        })
    }
}

#[inline]
fn complete(geometry: &Geometry, request: &mut Request<Buffer>) -> Completion<Buffer> {
    let outcome = admission::check_request(geometry, request).unwrap_or_else(|| {
        let done = if request.op.has_data() { request.len } else { ByteLen::ZERO };
        Outcome::Done(done)
    });
    Completion { outcome, tag: request.tag, buffer: request.buffer.take() }
}

/// A channel whose requests complete inside `submit`.
#[derive(Debug)]
struct ImmediateChannel {
    geometry: Geometry,
    size: Arc<DiskSize>,
}

impl ImmediateChannel {
    /// Completes a batch of any requests. Kept out of line: it keeps many values, which a single transfer need not pay
    /// for.
    #[inline(never)]
    fn complete_any(&self, batch: &mut Vec<Request<Buffer>>, completions: &mut Vec<Completion<Buffer>>) -> usize {
        let taken = batch.len();
        completions.extend(batch.iter_mut().map(|request| complete(&self.geometry, request)));
        batch.clear();
        taken
    }
}

impl DiskChannel<UringContext> for ImmediateChannel {
    fn submit(
        &mut self,
        _context: &mut UringContext,
        batch: &mut Vec<Request<Buffer>>,
        completions: &mut Vec<Completion<Buffer>>,
    ) -> usize {
        self.geometry.size = self.size.get();
        if let [only] = batch.as_mut_slice()
            && completions.len() < completions.capacity()
            && admission::is_valid_transfer(&self.geometry, only)
        {
            completions.push(Completion {
                outcome: Outcome::Done(only.len),
                tag: only.tag,
                buffer: only.buffer.take(),
            });
            batch.clear();
            return 1;
        }
        self.complete_any(batch, completions)
    }

    fn reap(&mut self, _context: &mut UringContext, _finished: &mut Vec<Completion<Buffer>>) -> usize {
        0
    }

    fn outstanding(&self) -> u32 {
        0
    }

    fn close(&mut self, _context: &mut UringContext) {}
}

/// A channel whose requests complete a fixed time after submission.
#[derive(Debug)]
struct DelayedChannel {
    geometry: Geometry,
    size: Arc<DiskSize>,
    latency: Duration,
    /// Completion time of each, earliest first: all have one latency.
    delayed: VecDeque<(Instant, Completion<Buffer>)>,
}

impl DiskChannel<UringContext> for DelayedChannel {
    fn submit(
        &mut self,
        _context: &mut UringContext,
        batch: &mut Vec<Request<Buffer>>,
        _finished: &mut Vec<Completion<Buffer>>,
    ) -> usize {
        self.geometry.size = self.size.get();
        let taken = batch.len();
        // The clock itself, not the context's cached time: it is as old as the turn, and a request would complete early
        // by this age.
        let due = Instant::now() + self.latency;
        self.delayed.extend(batch.iter_mut().map(|request| (due, complete(&self.geometry, request))));
        batch.clear();
        taken
    }

    fn reap(&mut self, _context: &mut UringContext, completions: &mut Vec<Completion<Buffer>>) -> usize {
        if self.delayed.is_empty() {
            return 0;
        }
        let now = Instant::now();
        let before = completions.len();
        let due = self.delayed.partition_point(|(due, _)| *due <= now);
        completions.extend(self.delayed.drain(..due).map(|(_, completion)| completion));
        completions.len() - before
    }

    fn cancel(&mut self, _context: &mut UringContext, tags: &[Tag], completions: &mut Vec<Completion<Buffer>>) {
        self.delayed.retain_mut(|(_, completion)| {
            let chosen = tags.binary_search(&completion.tag).is_ok();
            if chosen {
                completions.push(Completion {
                    outcome: Outcome::Aborted,
                    tag: completion.tag,
                    buffer: completion.buffer.take(),
                });
            }
            !chosen
        });
    }

    fn outstanding(&self) -> u32 {
        self.delayed.len() as u32
    }

    fn deadline(&self) -> Option<Instant> {
        self.delayed.front().map(|(due, _)| *due)
    }

    fn close(&mut self, _context: &mut UringContext) {}
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use mqblk_core::{ByteLen, Op, Outcome};
    use mqblk_uring::FixedBufferUse;

    use crate::conformance::{TestRequest, TestTarget, TestWorker, cancel, run};

    #[test]
    fn conforms() {
        run(&TestTarget { kind: "null", settings: &[("size", "4M")], keeps_data: false, seed: 1 });
    }

    #[test]
    fn conforms_with_latency() {
        let settings = [("size", "4M"), ("latency-us", "20"), ("block-size", "4096")];
        run(&TestTarget { kind: "null", settings: &settings, keeps_data: false, seed: 2 });
    }

    #[test]
    fn a_read_leaves_the_buffer_as_it_is() {
        let disk =
            TestTarget { kind: "null", settings: &[("size", "1M")], keeps_data: false, seed: 0 }.open(&[]).unwrap();
        let mut worker = TestWorker::new(disk.as_ref(), 8, FixedBufferUse::Off);
        worker.write_memory(0, &[0x5a; 4096]);
        assert_eq!(worker.run_one(TestRequest::with_data(Op::Read, 0, 4096, 0)), Outcome::Done(ByteLen(4096)));
        assert_eq!(worker.read_memory(0, 4096), [0x5a; 4096]);
        worker.close();
    }

    #[test]
    fn delayed_requests_complete_when_they_are_cancelled() {
        let settings = [("size", "16M"), ("latency-us", "2000")];
        let trial = TestTarget { kind: "null", settings: &settings, keeps_data: false, seed: 5 };
        let seen = cancel::some_of_many(&trial, &trial.open(&[]).unwrap());
        assert!(seen.aborted > 0, "{seen:?}");
    }

    #[test]
    fn nothing_completes_before_its_time() {
        let settings = [("size", "1M"), ("latency-us", "30000")];
        let disk = TestTarget { kind: "null", settings: &settings, keeps_data: false, seed: 0 }.open(&[]).unwrap();
        let mut worker = TestWorker::new(disk.as_ref(), 8, FixedBufferUse::Off);
        let start = Instant::now();
        worker.run(&[
            TestRequest::with_data(Op::Read, 0, 512, 0),
            TestRequest::with_data(Op::Read, 512, 512, 0),
            TestRequest::without_data(Op::Flush, 0, 0),
        ]);
        assert!(start.elapsed() >= Duration::from_millis(30));
        worker.close();
    }
}
