//! Defaults of options.

use std::sync::Arc;

use mqblk_core::ByteLen;

use crate::args::{BenchArgs, BlockSizes, IoSizes, Rw};
use crate::interface::{Interface, TABLE};

/// Values of options that were not given.
#[derive(Clone, Debug)]
pub struct Defaults {
    /// `--interface`, and its own options.
    pub interface: Arc<dyn Interface>,
    /// `--disk`, where there is no `--socket` either.
    pub disk: Option<&'static str>,
    /// `--fill`, where all targets are disks in memory, made for each run.
    pub fill: bool,
    /// `--rw`.
    pub rw: Rw,
    /// `--bs`, or mixed sizes.
    pub bs: Result<BlockSizes, IoSizes>,
    /// `--iodepth`.
    pub iodepth: u16,
    /// `--batch`.
    pub batch: u16,
    /// `--queues`.
    pub queues: &'static [u16],
    /// `--jobs`; `None`: one for each queue, or for each logical unit.
    pub jobs: Option<u16>,
    /// `--runtime` in seconds, unless each block is done once.
    pub runtime: f64,
    /// `--warmup` in seconds, if there is a runtime.
    pub warmup: f64,
}

/// Runs of each combination with a runtime: several, so that the mean has a standard error.
const DEFAULT_RUNS: u16 = 3;

impl Default for Defaults {
    fn default() -> Defaults {
        let bs = BlockSizes(vec![ByteLen(4096)]);
        Defaults {
            interface: (TABLE[0].options)(),
            disk: None,
            fill: false,
            rw: Rw::Randread,
            bs: Ok(bs),
            iodepth: 1,
            batch: 1,
            queues: &[1],
            jobs: None,
            runtime: 5.0,
            warmup: 1.0,
        }
    }
}

impl Defaults {
    /// Returns `args` with the defaults of all options that were not given.
    pub fn apply(&self, args: &BenchArgs) -> BenchArgs {
        let mut args = args.clone();
        fn fill<T: Clone>(list: &mut Vec<T>, default: &[T]) {
            if list.is_empty() {
                list.extend_from_slice(default);
            }
        }
        let own = self.interface.definition();
        let chosen = args.interface.get_or_insert(own);
        if chosen.name == own.name {
            args.interfaces.set(args.interfaces.of(own).with_defaults(&*self.interface));
        }
        let running = !args.socket.is_empty() || args.interfaces.has_devices();
        if let (false, true, Some(disk)) = (running, args.disk.is_empty(), self.disk) {
            args.disk.push(disk.to_owned());
        }
        fill(&mut args.rw, &[self.rw]);
        if args.bs.is_empty() && args.bsrange.is_empty() {
            match &self.bs {
                Ok(sizes) => args.bs.push(sizes.clone()),
                Err(mixed) => args.bsrange.push(*mixed),
            }
        }
        fill(&mut args.iodepth, &[self.iodepth]);
        fill(&mut args.batch, &[self.batch]);
        fill(&mut args.queues, self.queues);
        args.jobs = args.jobs.or(self.jobs);
        let runtime = if args.verify.is_some() { 0.0 } else { self.runtime };
        let once = *args.runtime.get_or_insert(runtime) == 0.0;
        args.warmup.get_or_insert(if once { 0.0 } else { self.warmup });
        args.runs.get_or_insert(if once { 1 } else { DEFAULT_RUNS });
        args
    }
}

impl std::fmt::Display for Defaults {
    /// Writes the defaults as options.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Defaults { interface, disk, fill, rw, bs, iodepth, batch, queues, jobs, runtime, warmup } = self;
        let list = |numbers: &[u16]| numbers.iter().map(u16::to_string).collect::<Vec<_>>().join(",");
        let own = interface.default_options();
        if interface.definition().name != TABLE[0].name {
            write!(f, "--interface {}{} ", interface.definition().name, own.disks)?;
        }
        if let Some(disk) = disk {
            write!(f, "--disk {disk} ")?;
        }
        if *fill {
            write!(f, "--fill ")?;
        }
        write!(f, "--rw {} ", rw.name())?;
        match bs {
            Ok(sizes) => write!(f, "--bs {sizes}")?,
            Err(mixed) => write!(f, "--bsrange {mixed}")?,
        }
        write!(f, " --iodepth {iodepth}")?;
        if *batch != 1 {
            write!(f, " --batch {batch}")?;
        }
        write!(f, " --queues {}", list(queues))?;
        if let Some(jobs) = jobs {
            write!(f, " --jobs {jobs}")?;
        }
        write!(f, "{} --runtime {runtime} --warmup {warmup}", own.queues)
    }
}
