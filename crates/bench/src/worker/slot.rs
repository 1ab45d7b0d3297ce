//! I/Os in flight, and the jobs that they belong to.

use mqblk_core::Sector512;
use mqblk_memory::GuestAddress;

use super::series::SeriesSettings;
use crate::device::{IoOp, TransferStatus};
use crate::pattern::{AccessPattern, BlockOp};
use crate::verification::BlockGenerations;
use crate::words::ClientMode;

/// A job of this thread on one disk. A job with several disks takes them in turn.
#[derive(Debug)]
pub(crate) struct DiskJob {
    /// Number of the job; the same for all its disks.
    pub number: u16,
    pub disk: u16,
    /// Its next blocks.
    pub pattern: AccessPattern,
    /// Generations of the blocks that it wrote, if they are verified.
    pub generations: Option<BlockGenerations>,
    /// Writes since its last flush.
    pub unflushed: u32,
    /// The block from which on it reads back what was written; `None`: it has its usual load.
    pub read_back: Option<u64>,
}

impl DiskJob {
    /// Returns its next operation, and the number of its blocks, at most `most`. `VERIFY`: it may read back.
    #[inline]
    pub(super) fn next_run<const VERIFY: bool>(&mut self, most: u32) -> Option<(BlockOp, u32)> {
        if let (true, Some(from)) = (VERIFY, &mut self.read_back) {
            let block = self.generations.as_ref()?.next_written(*from)?;
            *from = block + 1;
            return Some((BlockOp { op: IoOp::Read, block }, 1));
        }
        self.pattern.next_run(most)
    }
}

/// Slot of one I/O in flight.
#[derive(Clone, Copy, Debug)]
pub(super) struct IoSlot<S> {
    pub(super) address: GuestAddress,
    /// Start or due time.
    pub(super) start_ns: u64,
    pub(super) block: u64,
    pub(super) generation: u32,
    /// Index in the thread's jobs.
    pub(super) job: u16,
    pub(super) queue: u16,
    pub(super) op: IoOp,
    /// The disk, if there are several.
    pub(super) disk: u16,
    /// Bytes, if sizes are mixed.
    pub(super) len: u32,
    /// Requests that have not completed.
    pub(super) pending_parts: u32,
    /// The first bad status of its requests so far.
    pub(super) status: S,
}

impl<S: TransferStatus> IoSlot<S> {
    /// Records that one of its requests has failed.
    #[cold]
    pub(super) fn part_failed(&mut self, status: &S) {
        if self.status == S::GOOD {
            self.status = *status;
        }
    }
}

/// Settings of a client thread.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WorkerSettings {
    /// Bytes of a block: of the smallest I/O.
    pub bs: u32,
    /// Sectors of a block.
    pub bs_sectors: Sector512,
    /// Blocks of the largest I/O.
    pub most_blocks: u32,
    pub disks: u16,
    /// Jobs of all threads.
    pub jobs: u16,
    /// Most bytes of a request. A larger I/O is several.
    pub request_len: u32,
    /// Start of block 0.
    pub base: Sector512,
    /// Requests to submit, and to wait for, at once.
    pub batch: u16,
    /// I/Os in flight of each job.
    pub iodepth: u16,
    /// I/Os per second that each job starts; `None`: one when another has completed.
    pub rate: Option<u32>,
    /// A job flushes a disk after this many writes to it; 0: never.
    pub fsync: u32,
    /// How to wait for completions.
    pub client: ClientMode,
    /// True if blocks are verified.
    pub verify: bool,
    /// The time series to record, if any.
    pub series: Option<SeriesSettings>,
}

impl WorkerSettings {
    /// Returns true if I/Os differ in size or disk: a flush has no size.
    pub(super) fn is_mixed(&self) -> bool {
        self.most_blocks > 1 || self.disks > 1 || self.fsync > 0
    }

    /// Returns the bytes of the largest I/O.
    pub(super) fn max_len(&self) -> u32 {
        self.bs * self.most_blocks
    }
}

/// Returns the next operation of a job, and its blocks. `current`: the index of its last one's disk; moves on to the
/// job's next disk that has something left to do.
pub(super) fn next_of_job<const VERIFY: bool>(
    jobs: &mut [DiskJob],
    next_disk: &[u16],
    current: &mut u16,
    most: u32,
) -> Option<(BlockOp, u32)> {
    let start = *current;
    loop {
        *current = next_disk[usize::from(*current)];
        let next = jobs[usize::from(*current)].next_run::<VERIFY>(most);
        if next.is_some() || *current == start {
            return next;
        }
    }
}
