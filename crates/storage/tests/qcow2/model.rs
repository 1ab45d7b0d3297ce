//! Random requests to an image, and its expected content.

use std::path::Path;
use std::sync::Arc;

use mqblk_core::settings::Settings;
use mqblk_core::{ByteLen, Disk, Op, Outcome};
use mqblk_storage::conformance::{TestRequest, TestWorker};
use mqblk_uring::{FixedBufferUse, UringContext};
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};

use crate::tools::text;

const SECTOR: u64 = 512;
/// Longest transfer, in sectors.
const LONGEST: u64 = 512;
/// Longest small write, in sectors.
const SMALL: u64 = 8;

/// Opens an image with more settings.
pub(crate) fn open(path: &Path, more: &[(&str, &str)]) -> Result<Arc<dyn Disk<UringContext>>, String> {
    let mut settings = Settings::new("disk \"a\"");
    for (key, value) in [("path", text(path))].iter().chain(more) {
        settings.insert(key, value).expect("each key once");
    }
    mqblk_storage::open("qcow2", &mut settings).map_err(|error| error.to_string())
}

/// An open image, and its content.
pub(crate) struct Model {
    pub(crate) disk: Arc<dyn Disk<UringContext>>,
    worker: Option<TestWorker>,
    pub(crate) content: Vec<u8>,
    random: SmallRng,
}

impl Model {
    pub(crate) fn new(disk: Arc<dyn Disk<UringContext>>, content: Vec<u8>, seed: u64) -> Model {
        assert_eq!(disk.geometry().size.0, content.len() as u64);
        let worker = Some(TestWorker::new(disk.as_ref(), 32, FixedBufferUse::Off));
        Model { disk, worker, content, random: SmallRng::seed_from_u64(seed) }
    }

    fn worker(&mut self) -> &mut TestWorker {
        self.worker.as_mut().expect("it is open")
    }

    fn range(&mut self, longest: u64) -> (u64, u64) {
        let sectors = self.content.len() as u64 / SECTOR;
        let start = self.random.random_range(0..sectors);
        let len = self.random.random_range(1..=longest.min(sectors - start));
        (start * SECTOR, len * SECTOR)
    }

    /// Executes `count` random requests one after the other, and reads the whole disk at the end. Returns the first
    /// outcome that is not success.
    pub(crate) fn run(&mut self, count: u32) -> Option<Outcome> {
        for _ in 0..count {
            let outcome = match self.random.random_range(0..10) {
                0..=5 => self.write(LONGEST),
                6 => self.discard(),
                7..=8 => self.zeroes(),
                _ => self.worker().run_one(TestRequest::without_data(Op::Flush, 0, 0)),
            };
            if !matches!(outcome, Outcome::Done(_)) {
                return Some(outcome);
            }
        }
        self.verify();
        None
    }

    /// Writes `count` times a few sectors, with a flush now and then, and reads the whole disk at the end.
    pub(crate) fn write_small(&mut self, count: u32) {
        for _ in 0..count {
            assert!(matches!(self.write(SMALL), Outcome::Done(_)));
            if self.random.random_ratio(1, 100) {
                let flush = TestRequest::without_data(Op::Flush, 0, 0);
                assert!(matches!(self.worker().run_one(flush), Outcome::Done(_)));
            }
        }
        self.verify();
    }

    fn write(&mut self, longest: u64) -> Outcome {
        let (start, len) = self.range(longest);
        let bytes: Vec<u8> = (0..len).map(|_| self.random.random()).collect();
        self.worker().write_memory(0, &bytes);
        let fua = self.random.random_bool(0.1);
        let outcome = self.worker().run_one(TestRequest::with_data(Op::Write { fua }, start, len, 0));
        if matches!(outcome, Outcome::Done(_)) {
            self.content[start as usize..(start + len) as usize].copy_from_slice(&bytes);
        }
        outcome
    }

    fn zeroes(&mut self) -> Outcome {
        let (start, len) = self.range(4 * LONGEST);
        let op = Op::WriteZeroes { may_unmap: self.random.random(), fua: false };
        let outcome = self.worker().run_one(TestRequest::without_data(op, start, len));
        if matches!(outcome, Outcome::Done(_)) {
            self.content[start as usize..(start + len) as usize].fill(0);
        }
        outcome
    }

    fn discard(&mut self) -> Outcome {
        let Some(limits) = self.disk.limits().discard else { return Outcome::Done(ByteLen::ZERO) };
        let (start, len) = self.range(8 * LONGEST);
        let outcome = self.worker().run_one(TestRequest::without_data(Op::Discard { secure: false }, start, len));
        // Whole clusters, and the last one of the disk.
        let (cluster, size) = (limits.granularity.0, self.content.len() as u64);
        let (first, end) = (start.next_multiple_of(cluster), start + len);
        let last = if end == size { end } else { end / cluster * cluster };
        if first < last {
            self.content[first as usize..last as usize].fill(0);
        }
        outcome
    }

    /// Reads the whole disk.
    pub(crate) fn verify(&mut self) {
        let step = 1 << 20;
        for start in (0..self.content.len()).step_by(step) {
            let len = step.min(self.content.len() - start);
            let read = TestRequest::with_data(Op::Read, start as u64, len as u64, 0);
            assert_eq!(self.worker().run_one(read), Outcome::Done(ByteLen(len as u64)));
            let found = self.worker().read_memory(0, len);
            let wrong = found.iter().zip(&self.content[start..]).position(|(found, expected)| found != expected);
            assert_eq!(wrong.map(|at| start + at), None, "the first wrong byte");
        }
    }

    /// Resizes the disk.
    pub(crate) fn resize(&mut self, size: u64) {
        self.worker.take().expect("it is open").close();
        assert_eq!(self.disk.resize(Some(ByteLen(size))).expect("another size"), ByteLen(size));
        self.content.resize(size as usize, 0);
        self.worker = Some(TestWorker::new(self.disk.as_ref(), 32, FixedBufferUse::Off));
    }

    /// Closes the image. Returns its expected content.
    pub(crate) fn close(mut self) -> Vec<u8> {
        self.worker.take().expect("it is open").close();
        self.content
    }
}
