//! What holds for options that were not given.

use mqblk_core::ByteLen;

use crate::args::{Args, BlockSizes, Rw};

/// Values for options that were not given.
#[derive(Clone, Debug)]
pub struct Defaults {
    /// `--rw`.
    pub rw: Rw,
    /// `--bs`.
    pub bs: BlockSizes,
    /// `--iodepth`.
    pub iodepth: u16,
    /// `--queues`.
    pub queues: u16,
    /// `--jobs`; `None`: one for each queue.
    pub jobs: Option<u16>,
    /// `--runtime` in seconds, where each block is not done once.
    pub runtime: f64,
    /// `--warmup` in seconds, where there is a runtime.
    pub warmup: f64,
}

/// Runs of each combination where there is a runtime: a mean has an error.
const RUNS: u16 = 3;

impl Default for Defaults {
    fn default() -> Defaults {
        let bs = BlockSizes(vec![ByteLen(4096)]);
        Defaults { rw: Rw::Randread, bs, iodepth: 1, queues: 1, jobs: None, runtime: 5.0, warmup: 1.0 }
    }
}

impl Defaults {
    /// `args` with nothing missing but what has no default.
    pub fn fill(&self, args: &Args) -> Args {
        let mut args = args.clone();
        fn fill<T: Clone>(list: &mut Vec<T>, default: &T) {
            if list.is_empty() {
                list.push(default.clone());
            }
        }
        fill(&mut args.rw, &self.rw);
        fill(&mut args.bs, &self.bs);
        fill(&mut args.iodepth, &self.iodepth);
        fill(&mut args.queues, &self.queues);
        args.jobs = args.jobs.or(self.jobs);
        let runtime = if args.verify.is_some() { 0.0 } else { self.runtime };
        let once = *args.runtime.get_or_insert(runtime) == 0.0;
        args.warmup.get_or_insert(if once { 0.0 } else { self.warmup });
        args.runs.get_or_insert(if once { 1 } else { RUNS });
        args
    }
}

impl std::fmt::Display for Defaults {
    /// As options.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Defaults { rw, bs, iodepth, queues, jobs, runtime, warmup } = self;
        write!(f, "--rw {} --bs {bs} --iodepth {iodepth} --queues {queues}", rw.name())?;
        if let Some(jobs) = jobs {
            write!(f, " --jobs {jobs}")?;
        }
        write!(f, " --runtime {runtime} --warmup {warmup}")
    }
}
