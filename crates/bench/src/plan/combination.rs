//! A combination of the values that a sweep measures.

use crate::words::{IoSizes, Rw};

/// One combination of the sweep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Combination {
    /// Operation and order of the I/Os.
    pub rw: Rw,
    /// Bytes of an I/O.
    pub sizes: IoSizes,
    pub queues: u16,
    /// Targets; 1 where the interface has none.
    pub targets: u16,
    /// Logical units of each target; 1 where the interface has none.
    pub luns: u16,
    pub jobs: u16,
    /// Most client threads.
    pub max_threads: u16,
    /// I/Os in flight, of each job.
    pub iodepth: u16,
    /// I/Os submitted and waited for at once.
    pub batch: u16,
    /// I/Os per second that each job starts; `None`: one when another has completed.
    pub rate_iops: Option<u32>,
}

impl Combination {
    /// Returns the number of disks: all logical units.
    pub fn disks(&self) -> u16 {
        // The interface has checked that there are few enough.
        self.targets * self.luns
    }

    /// Returns the number of client threads: each owns queues, and has jobs.
    pub fn threads(&self) -> u16 {
        self.max_threads.min(self.jobs).min(self.queues)
    }

    /// Returns the most I/Os in flight on one queue.
    pub fn depth_per_queue(&self) -> u32 {
        let threads = self.threads();
        // For the thread that has the most jobs on the fewest queues.
        let (jobs, queues) = (self.jobs.div_ceil(threads), self.queues / threads);
        // Fewer jobs than queues take the queues in turn, and may all be on the same one.
        let on_one = if jobs >= queues { jobs.div_ceil(queues) } else { jobs };
        u32::from(on_one) * u32::from(self.iodepth)
    }
}
