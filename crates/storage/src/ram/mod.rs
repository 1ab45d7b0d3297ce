//! `storage=ram`: a disk in the daemon's own memory, empty at start and gone at exit.
//!
//! All workers copy to and from the same mapping; requests end inside `submit`. As on a real disk, a read that overlaps
//! a write in flight elsewhere has undefined content.

use std::sync::{Arc, Mutex};

use mqblk_core::lock::lock;
use mqblk_core::settings::{Key, Settings};
use mqblk_core::{
    BlockSize, ByteLen, ByteOffset, Completion, DiscardLimits, Disk, DiskChannel, DiskError, Geometry, ImageOpener,
    Limits, Op, OpenImage, Outcome, Request,
};
use mqblk_memory::{Buffer, Mapping};
use mqblk_uring::UringContext;

use crate::admission::{self, DiskSize};
use crate::keys::{BLOCK_SIZE, READONLY, SIZE};

static MAX_SIZE: Key =
    Key::size("max-size").otherwise("`size`").about("the largest size that it can be resized to", "");

/// The keys of `storage=ram`.
pub(crate) const KEYS: &[&Key] = &[&SIZE, &MAX_SIZE, &READONLY, &BLOCK_SIZE];

/// Limits of one request, to bound a worker's time: about 10 GB/s of zeroing and 40 GB/s of returning pages.
const MAX_ZEROES: ByteLen = ByteLen(32 << 20);
const MAX_DISCARD: ByteLen = ByteLen(256 << 20);

/// Opens a RAM disk.
///
/// # Errors
/// When a setting does not fit, or the host cannot map the memory.
pub fn open(settings: &mut Settings, _: &Arc<dyn ImageOpener>) -> Result<Arc<dyn Disk<UringContext>>, DiskError> {
    let block = admission::block_size(settings)?.unwrap_or(BlockSize::B512);
    let size = admission::size(settings, block)?;
    let read_only = settings.switch_or_default(&READONLY)?;
    let (key, max) = match settings.size(&MAX_SIZE)? {
        None => (&SIZE, size),
        Some(max) if max < size || !max.is_aligned(block) => {
            let expected = format!("a multiple of block-size {} that is not below size {size}", block.bytes());
            return Err(settings.error(&MAX_SIZE, max.to_string(), expected).into());
        }
        Some(max) => (&MAX_SIZE, max),
    };
    let too_large = |why: &dyn std::fmt::Display| {
        settings.error(key, max.to_string(), format!("a size that the host can map ({why})"))
    };
    let bytes = usize::try_from(max.0).map_err(|why| too_large(&why))?;
    let memory = Mapping::anonymous(bytes).map_err(|why| too_large(&why))?;
    Ok(Arc::new(RamDisk {
        geometry: admission::plain_geometry(size, block, read_only),
        size: Arc::new(DiskSize::new(size)),
        max_size: max,
        memory: Arc::new(memory),
        resizing: Mutex::new(()),
    }))
}

#[derive(Debug)]
struct RamDisk {
    /// The size in it is unused: see `size`.
    geometry: Geometry,
    size: Arc<DiskSize>,
    /// Bytes of the mapping.
    max_size: ByteLen,
    memory: Arc<Mapping>,
    /// Serialises resizes.
    resizing: Mutex<()>,
}

impl Disk<UringContext> for RamDisk {
    fn geometry(&self) -> Geometry {
        Geometry { size: self.size.get(), ..self.geometry }
    }

    fn limits(&self) -> Limits {
        let writable = !self.geometry.read_only;
        Limits {
            max_transfer: admission::MAX_TRANSFER,
            max_segments: u32::from(u16::MAX),
            // Only whole pages are returned to the host, but the rest is zeroed, so every discard has an effect.
            discard: writable.then_some(DiscardLimits {
                granularity: ByteLen(u64::from(self.geometry.logical_block.bytes())),
                max_len: MAX_DISCARD,
            }),
            write_zeroes: writable.then_some(MAX_ZEROES),
            volatile_cache: false,
            cost_per_request: false,
            pins_memory: false,
        }
    }

    fn resolved(&self) -> Vec<(&'static str, String)> {
        vec![
            ("size", self.size.get().to_string()),
            ("max-size", self.max_size.to_string()),
            ("block-size", self.geometry.logical_block.bytes().to_string()),
            ("readonly", admission::on_off(self.geometry.read_only)),
        ]
    }

    fn resize(&self, size: Option<ByteLen>) -> Result<ByteLen, DiskError> {
        let Some(size) = size else { return Ok(self.size.get()) };
        admission::check_resize(&self.geometry, size)?;
        if size > self.max_size {
            let expected = format!("at most max-size {}", self.max_size);
            return Err(DiskError::Size { found: size.to_string(), expected });
        }
        let _one = lock(&self.resizing);
        let before = self.size.get();
        // Content from before a shrink is cleared.
        if size > before && !self.memory.clear(ByteOffset(before.0), ByteLen(size.0 - before.0)) {
            let expected = "memory that the host can clear".to_owned();
            return Err(DiskError::Size { found: size.to_string(), expected });
        }
        self.size.set(size);
        Ok(size)
    }

    fn hand_over(&self) -> Result<Vec<OpenImage>, String> {
        Err("is in the memory of this process, and ends with it".to_owned())
    }

    fn open_channel(&self, _context: &mut UringContext) -> Result<Box<dyn DiskChannel<UringContext>>, DiskError> {
        let (size, memory) = (Arc::clone(&self.size), Arc::clone(&self.memory));
        Ok(Box::new(RamChannel { geometry: self.geometry, size, memory }))
    }
}

#[derive(Debug)]
struct RamChannel {
    geometry: Geometry,
    size: Arc<DiskSize>,
    memory: Arc<Mapping>,
}

impl RamChannel {
    #[inline]
    fn execute(&self, context: &UringContext, request: &Request<Buffer>) -> Outcome {
        if let Some(outcome) = admission::check_request(&self.geometry, request) {
            return outcome;
        }
        let Request { start, len, .. } = *request;
        let done = match (request.op, &request.buffer) {
            (Op::Flush, _) => return Outcome::Done(ByteLen::ZERO),
            (Op::Read | Op::Write { .. }, Some(buffer)) if context.buffers.len(buffer) != len => false,
            (Op::Read, Some(buffer)) if !context.buffers.fill_from(buffer, &self.memory, start) => {
                return admission::FAULT;
            }
            (Op::Write { .. }, Some(buffer)) if !context.buffers.store_to(buffer, &self.memory, start) => {
                return admission::FAULT;
            }
            (Op::Read | Op::Write { .. }, Some(_)) => true,
            (Op::Read | Op::Write { .. }, None) => false,
            (Op::Discard { .. } | Op::WriteZeroes { may_unmap: true, .. }, _) => self.memory.clear(start, len),
            (Op::WriteZeroes { may_unmap: false, .. }, _) => self.write_zeroes(start, len),
        };
        match done {
            true if request.op.has_data() => Outcome::Done(len),
            true => Outcome::Done(ByteLen::ZERO),
            false => admission::INVALID,
        }
    }

    /// Zeroes a range and keeps its pages.
    fn write_zeroes(&self, start: ByteOffset, len: ByteLen) -> bool {
        static ZEROES: [u8; 1 << 16] = [0; 1 << 16];
        let mut at = start.0;
        let mut left = len.0;
        while left > 0 {
            let run = left.min(ZEROES.len() as u64);
            if !self.memory.write(ByteOffset(at), &ZEROES[..run as usize]) {
                return false;
            }
            (at, left) = (at + run, left - run);
        }
        true
    }
}

impl DiskChannel<UringContext> for RamChannel {
    fn submit(
        &mut self,
        context: &mut UringContext,
        batch: &mut Vec<Request<Buffer>>,
        completions: &mut Vec<Completion<Buffer>>,
    ) -> usize {
        self.geometry.size = self.size.get();
        let taken = batch.len();
        completions.extend(batch.drain(..).map(|request| Completion {
            outcome: self.execute(context, &request),
            tag: request.tag,
            buffer: request.buffer,
        }));
        taken
    }

    fn reap(&mut self, _context: &mut UringContext, _finished: &mut Vec<Completion<Buffer>>) -> usize {
        0
    }

    fn outstanding(&self) -> u32 {
        0
    }

    fn close(&mut self, _context: &mut UringContext) {}
}

#[cfg(test)]
mod tests {
    use mqblk_core::ByteLen;

    use crate::conformance::{TestTarget, run};

    #[test]
    fn conforms() {
        run(&TestTarget { kind: "ram", settings: &[("size", "8M")], keeps_data: true, seed: 1 });
    }

    #[test]
    fn conforms_with_large_blocks() {
        run(&TestTarget {
            kind: "ram",
            settings: &[("size", "5124K"), ("block-size", "4096")],
            keeps_data: true,
            seed: 2,
        });
    }

    #[test]
    fn conforms_with_space_to_grow() {
        run(&TestTarget { kind: "ram", settings: &[("size", "2M"), ("max-size", "3M")], keeps_data: true, seed: 3 });
    }

    #[test]
    fn it_grows_as_far_as_was_reserved() {
        let settings = [("size", "1M"), ("max-size", "2M")];
        let disk = TestTarget { kind: "ram", settings: &settings, keeps_data: true, seed: 0 }.open(&[]).unwrap();
        assert_eq!(disk.resize(Some(ByteLen(2 << 20))).unwrap(), ByteLen(2 << 20));
        let error = disk.resize(Some(ByteLen((2 << 20) + 512))).unwrap_err().to_string();
        assert!(error.starts_with("size: found ") && error.ends_with("expected at most max-size 2M"), "{error}");
    }

    #[test]
    fn settings_that_do_not_fit() {
        for (settings, want) in [
            (&[][..], "size: found nothing, expected the disk's size"),
            (&[("size", "0")], "size: found 0 bytes, expected a multiple of block-size 512 above 0"),
            (&[("size", "1000")], "size: found 1000 bytes, expected a multiple of block-size 512 above 0"),
            (&[("size", "512"), ("block-size", "4096")], "expected a multiple of block-size 4096 above 0"),
            (&[("size", "1M"), ("block-size", "1024")], "block-size: found \"1024\", expected one of 512, 4096"),
            (&[("size", "1M"), ("readonly", "yes")], "readonly: found \"yes\", expected on or off"),
            (
                &[("size", "1M"), ("max-size", "512K")],
                "max-size: found 512K, expected a multiple of block-size 512 that is",
            ),
            (&[("size", "8191P")], "size: found 8191P, expected a size that the host can map"),
            (&[("size", "8388607T")], "size: found 8388607T, expected a size that the host can map"),
        ] {
            let trial = TestTarget { kind: "ram", settings, keeps_data: true, seed: 0 };
            let error = trial.open(&[]).map(|_| ()).unwrap_err().to_string();
            assert!(error.starts_with("disk \"trial\": ") && error.contains(want), "{settings:?}: {error}");
        }
    }
}
