//! A plan: every combination and target of a sweep, and all settings of the runs.

mod combination;
mod targets;

use std::path::PathBuf;
use std::time::Duration;

use mqblk_core::ByteLen;

use crate::interrupt::Interrupt;
use crate::machine::Machine;
use crate::words::{ClientMode, Descriptors, Distribution, Verify};

pub(crate) use combination::Combination;
pub(crate) use targets::{DeviceName, QUEUE_SIZE_KEYS, Target, TargetSource, split_pairs, value_of};

/// Most I/Os in flight on one queue: the most entries of a virtqueue.
pub(crate) const MAX_DEPTH: u32 = 32768;

/// Everything to measure, and its settings.
#[derive(Clone, Debug)]
pub struct Plan {
    /// At least one. The others are compared to the first.
    pub targets: Vec<Target>,
    /// At least one.
    pub combinations: Vec<Combination>,
    /// Name of the guest interface.
    pub interface: &'static str,
    /// The experiment, by its name in result rows.
    pub experiment: Option<&'static str>,
    /// How the client waits for completions.
    pub client: ClientMode,
    /// Share of reads of a mixed load, in percent.
    pub read_share: u8,
    /// Length of the measurement; `None`: each block once.
    pub runtime: Option<Duration>,
    /// Load before the measurement.
    pub warmup: Duration,
    /// Length of an interval of the time series; `None`: there is none.
    pub interval: Option<Duration>,
    /// Runs of each combination and target.
    pub runs: u16,
    /// Start of the range.
    pub offset: ByteLen,
    /// Length of the range; `None`: to the end of the disk.
    pub size: Option<ByteLen>,
    /// Distance of the jobs' ranges; `None`: the jobs share one range, or share it out.
    pub offset_increment: Option<ByteLen>,
    /// Distribution of random blocks.
    pub distribution: Distribution,
    /// A job flushes a disk after this many writes to it; 0: never.
    pub fsync: u32,
    /// Seed of the first run; `None`: another one each time.
    pub seed: Option<u64>,
    /// Write the range once before each run.
    pub fill: bool,
    /// Verification of the written blocks.
    pub verify: Option<Verify>,
    /// CPUs of the client's threads.
    pub pin: Vec<u16>,
    /// CPUs of the started server's workers.
    pub server_cpus: Vec<u16>,
    /// Entries of a virtqueue.
    pub queue_size: u16,
    /// Entries of a virtqueue, if chosen: a started server must take this many.
    pub chosen_queue_size: Option<u16>,
    pub descriptors: Descriptors,
    pub packed: bool,
    /// File for the JSON.
    pub json: Option<PathBuf>,
    /// A server that completes no request for this long is stuck.
    pub stuck_timeout: Duration,
    /// Ends the benchmark early.
    pub interrupt: Interrupt,
    /// Its command line: the program, then its arguments.
    pub command: Vec<String>,
    /// The machine that it runs on.
    pub machine: Machine,
}

/// A target under a combination: what a row of the results is about.
#[derive(Clone, Copy, Debug)]
pub struct Case<'a> {
    /// All settings.
    pub plan: &'a Plan,
    pub target: &'a Target,
    /// The combination, with the target's own queues.
    pub combination: Combination,
}

impl Plan {
    /// Returns a target under a combination of the sweep.
    pub fn case<'a>(&'a self, target: &'a Target, of: &Combination) -> Case<'a> {
        Case { plan: self, target, combination: target.combination(of) }
    }

    /// Returns the number of rows of the results.
    pub fn row_count(&self) -> usize {
        self.combinations.len() * self.targets.len()
    }

    /// Returns the number of all runs.
    pub fn run_count(&self) -> u64 {
        self.row_count() as u64 * u64::from(self.runs)
    }
}
