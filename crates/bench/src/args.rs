//! The command line of `mqblk bench`.

use std::path::PathBuf;

use clap::Parser;
use mqblk_core::ByteLen;

use crate::experiment::{self, Experiment};
use crate::interface::{self, InterfaceDefinition, InterfaceOptions, VirtioScsi, XenOptions};
use crate::words::{
    BlockSizes, ClientMode, CpuList, Descriptors, Distribution, IoSizes, Rw, Verify, one_of, parse_block_sizes,
    parse_cpus, parse_distribution, parse_mixed_sizes, parse_seconds, parse_size,
};

/// The options of `mqblk bench`. Words of fio mean what fio means by them.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Every combination of the lists is measured, --runs times; with several targets the runs take turns (A B A B), and the table \
shows the ratio of the medians to the first target.

A thread owns queues, one of them unless --threads says otherwise. With --jobs at least --queues, job J works on queue J \
modulo queues, and the jobs of a queue share its thread; with fewer, a job spreads its requests over several queues. Jobs that read or write in sequence share \
the range out among them; so do all that verify. With --offset-increment each has the part that fio would give it, and goes \
round in that part.

A block that is larger than what the disk takes in one request is several requests and one I/O: it is counted once, and its \
latency lasts until its last part is answered.

Examples:
  mqblk bench --disk storage=null,size=1T --poll off,static:50 --iodepth 1,32
      a disk served for the purpose by a process of its own, two poll policies taking turns
  mqblk bench --socket /run/peer.sock --label peer \\
      --disk path=a.img,readonly=on --label ours --iodepth 32 --json out.json
      another vhost-user-blk server beside ours, with ratios, and the results for a program
  mqblk bench --socket /run/disk.sock --queues 2 --rw write --bs 64k --size 256M \\
      --verify crc32c --allow-write
      writes each block once on both queues, then reads and checks all of them (destroys what was there)
  mqblk bench --socket /run/disk.sock --rw randrw --rwmixread 70 --rate-iops 1000,5000,20000 \\
      --iodepth 64 --random-distribution zipf:1.1 --fsync 32 --allow-write
      latency against load: requests start at given times, reads and writes apart (destroys what was there)
  mqblk bench --disk path=a.img,readonly=on --iodepth 32 --interval 100ms --json over-time.json
      and IOPS and latency of each tenth of a second, for `mqblk plot over-time.json -o over-time.svg --x time`
  mqblk bench --disk path=a.img --rw read --bs 512-128k --jobs 8 --queues 8 --iodepth 32 \\
      --offset-increment 1G
      eight sequential streams, a gigabyte apart, at every power of two from 512 bytes to 128 KiB
  mqblk bench --experiment block-size --disk path=a.img,readonly=on --json block-size.json
      the table of sequential reads with one queue and with eight, with and without merging, 512 bytes to 4 MiB
  mqblk bench --experiment block-size --disk path=a.img --rw write --allow-write --queues 2 \\
      --bs 4k,64k --runtime 1
      the same table of writes with two queues and two block sizes (destroys what was there)
  mqblk bench --interface virtio-scsi --disk storage=null,size=1G --targets 1,8,32 \\
      --queues 2 --iodepth 32 --queue-size 1024
      controllers with 1, 8 and 32 targets of a disk each, a job on each disk, two request queues
  mqblk bench --interface virtio-scsi --disk path=/srv/disk-{t}-{l}.img --targets 4 --luns 2 \\
      --rw read --bsrange 4k-64k
      eight files, the targets' and logical units' numbers in their names, read in blocks of mixed sizes
  mqblk bench --experiment targets --queues 1,2,4 --json targets.json
      the tables of bandwidth against targets, over all and for each, with one request queue and with many
  mqblk bench --interface xen --disk storage=null,size=1G --queues 1,4 --iodepth 32 \\
      --grants copy,persistent
      Xen's block interface on a simulated machine: frontend here, the server as its backend
  mqblk bench --interface xen --vdev xvdb --label blkback --vdev xvdc --label mqblk --iodepth 32
      two devices of the domain that this runs in, whose backends run already, without a driver in the kernel
  mqblk bench --experiment xen-queues --json xen-queues.json
      the table of IOPS against rings, with granted pages kept for each ring and for all of them in common")]
pub struct BenchArgs {
    /// Guest interface: of the servers at --socket, and of those that are started [default: virtio-blk]
    #[arg(long, value_parser = one_of(&interface::TABLE, InterfaceDefinition::possible_value))]
    pub interface: Option<&'static InterfaceDefinition>,

    /// Those of xen.
    #[command(flatten)]
    pub(crate) xen: XenOptions,

    /// Socket of a running vhost-user server; may be repeated
    #[arg(long, value_name = "PATH")]
    pub socket: Vec<PathBuf>,

    /// Disk to serve for each run: the argument of `mqblk serve --disk` without a socket; may be repeated. With
    /// virtio-scsi each logical unit is one; {t} and {l} stand for its target and number
    #[arg(long, value_name = "KEY=VALUE,...")]
    pub disk: Vec<String>,

    /// Names for the targets in the results, in order: sockets or devices first, then disks [default: what was given]
    #[arg(long, value_name = "NAME")]
    pub label: Vec<String>,

    /// Poll policies of the server, with --disk: off, adaptive, adaptive:MAX_US, US, busy [default: the server's]
    #[arg(long, value_delimiter = ',', value_name = "POLICY,...")]
    pub poll: Vec<String>,

    /// CPUs of the server's workers, with --disk (`mqblk serve --pin`)
    #[arg(long, value_name = "CPU,...", value_parser = parse_cpus)]
    pub server_cpus: Option<CpuList>,

    /// Worker threads of the server, with --disk (`mqblk serve --workers`) [default: the server's]
    #[arg(long, value_name = "N", conflicts_with = "server_cpus", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub server_workers: Option<u16>,

    /// How the client waits for answers: it polls, or sleeps until it is called
    #[arg(long, value_enum, default_value_t = ClientMode::Wait)]
    pub client: ClientMode,

    /// A published table to reproduce and to print in its form; what is given beside it overrides its own choice
    #[arg(long, value_name = "NAME", value_parser = one_of(&experiment::ALL, Experiment::possible_value))]
    pub experiment: Option<&'static Experiment>,

    /// Load: read, write, rw, randread, randwrite, randrw, trim, randtrim [default: randread]
    #[arg(long, value_enum, value_delimiter = ',')]
    pub rw: Vec<Rw>,

    /// Share of reads with rw and randrw, in percent
    #[arg(long, value_name = "PERCENT", default_value_t = 50, value_parser = clap::value_parser!(u8).range(0..=100))]
    pub rwmixread: u8,

    /// Bytes of an I/O; 512-4M: every power of two from one to the other [default: 4k]
    #[arg(long, alias = "blocksize", value_delimiter = ',', value_name = "SIZE,...", value_parser = parse_block_sizes)]
    pub bs: Vec<BlockSizes>,

    /// Bytes of an I/O, of mixed sizes: each a multiple of the smaller one up to the larger, all as likely (fio's
    /// bsrange)
    #[arg(long, value_delimiter = ',', value_name = "SIZE-SIZE,...", value_parser = parse_mixed_sizes, conflicts_with = "bs")]
    pub bsrange: Vec<IoSizes>,

    /// Those of virtio-scsi.
    #[command(flatten)]
    pub(crate) scsi: VirtioScsi,

    /// I/Os in flight, of each job [default: 1]
    #[arg(long, value_delimiter = ',', value_name = "N,...", value_parser = clap::value_parser!(u16).range(1..))]
    pub iodepth: Vec<u16>,

    /// Queues to use [default: 1]
    #[arg(long, value_delimiter = ',', value_name = "N,...", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub queues: Vec<u16>,

    /// Jobs [default: one for each queue, with virtio-scsi for each logical unit]
    #[arg(long, alias = "numjobs", value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub jobs: Option<u16>,

    /// Client threads, at most one for each queue and each job [default: as many]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub threads: Option<u16>,

    /// I/Os to submit at once and to wait for at once (fio's iodepth_batch and iodepth_batch_complete_min); 0: iodepth
    /// [default: 1]
    #[arg(long, aliases = ["iodepth_batch", "iodepth-batch"], value_delimiter = ',', value_name = "N,...")]
    pub batch: Vec<u16>,

    /// I/Os per second that each job starts, whether or not those before have completed; latencies are counted from
    /// when an I/O was to start (fio's rate_iops) [default: an I/O starts when another one has completed]
    #[arg(long, alias = "rate_iops", value_delimiter = ',', value_name = "N,...", value_parser = clap::value_parser!(u32).range(1..=100_000_000))]
    pub rate_iops: Vec<u32>,

    /// A job flushes the disk after each N writes; 0: never. Flushes are counted apart
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub fsync: u32,

    /// Which blocks a random load prefers: random, none; zipf:THETA, few, scattered over the range
    #[arg(long, alias = "random_distribution", value_name = "random|zipf:THETA", default_value = "random", value_parser = parse_distribution)]
    pub random_distribution: Distribution,

    /// Seed of all that is random: a benchmark with the same seed does the same blocks in the same order [default:
    /// another one each time]
    #[arg(long, alias = "randseed", value_name = "N")]
    pub seed: Option<u64>,

    /// Time to measure, in seconds, or with a unit: 500ms, 2m; longer if no I/O completes in it; 0: until each block
    /// was done once [default: 5, with --verify 0]
    #[arg(long, value_name = "TIME", value_parser = parse_seconds)]
    pub runtime: Option<f64>,

    /// Runs of each combination [default: 3, without a --runtime 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub runs: Option<u16>,

    /// Taken for fio's sake: a --runtime is always a time to measure
    #[arg(long, alias = "time_based")]
    pub time_based: bool,

    /// Time to run before the measurement starts [default: 1, without a --runtime 0]
    #[arg(long, aliases = ["ramp_time", "ramp-time"], value_name = "TIME", value_parser = parse_seconds)]
    pub warmup: Option<f64>,

    /// Record a time series, too: I/Os per second and latency in each interval of this length, at least 1ms (fio's
    /// log_avg_msec); goes to --json, and `mqblk plot --x time` draws it [default: none]
    #[arg(long, value_name = "TIME", value_parser = parse_seconds)]
    pub interval: Option<f64>,

    /// fio's word for --interval, in milliseconds
    #[arg(long, alias = "log_avg_msec", value_name = "MS", hide = true, conflicts_with = "interval", value_parser = clap::value_parser!(u32).range(1..=86_400_000))]
    pub log_avg_msec: Option<u32>,

    /// Where the range to work on starts
    #[arg(long, value_name = "SIZE", default_value = "0", value_parser = parse_size)]
    pub offset: ByteLen,

    /// Length of the range to work on, with --offset-increment of each job's part [default: to the end of the disk, or
    /// to where the next job starts]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub size: Option<ByteLen>,

    /// Job J starts at --offset plus J times this, and has a part of its own (fio's offset_increment); 0: all on the
    /// same part
    #[arg(long, alias = "offset_increment", value_name = "SIZE", value_parser = parse_size)]
    pub offset_increment: Option<ByteLen>,

    /// Write blocks that can be checked, and check all that was written at the end
    #[arg(long, value_enum, value_name = "METHOD")]
    pub verify: Option<Verify>,

    /// Write the range once before each run, unmeasured: what was never written may cost nothing to read. Of itself
    /// with --experiment targets, where all targets are disks in memory
    #[arg(long)]
    pub fill: bool,

    /// Let a benchmark that writes destroy what is on the disk
    #[arg(long)]
    pub allow_write: bool,

    /// CPUs of the client's threads, in turn [default: not pinned]
    #[arg(long, value_name = "CPU,...", value_parser = parse_cpus)]
    pub pin: Option<CpuList>,

    /// Entries of each virtqueue [default: 256]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(4..=32768))]
    pub queue_size: Option<u16>,

    /// How requests lie in the ring: direct descriptors, an indirect table each, or what the depth allows
    #[arg(long, value_enum, default_value_t = Descriptors::Auto)]
    pub descriptors: Descriptors,

    /// Use packed virtqueues; the server must offer them [default: split ones]
    #[arg(long)]
    pub packed: bool,

    /// Write the results as JSON to this file, after each run as far as they are; -: to standard output, and the table
    /// to standard error
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

impl BenchArgs {
    /// Returns the options that concern interfaces.
    pub(crate) fn interface_options(&self) -> InterfaceOptions<'_> {
        InterfaceOptions {
            xen: &self.xen,
            scsi: &self.scsi,
            socket: &self.socket,
            disk: &self.disk,
            queue_size: self.queue_size,
            descriptors: self.descriptors,
            packed: self.packed,
        }
    }

    /// Returns the chosen interface.
    pub(crate) fn definition(&self) -> &'static InterfaceDefinition {
        self.interface.unwrap_or(&interface::TABLE[0])
    }
}

/// A command line without a program: options of `mqblk bench`.
#[derive(Debug, Parser)]
#[command(name = "bench", no_binary_name = true)]
struct BenchOptions {
    #[command(flatten)]
    args: BenchArgs,
}

/// Parses options of `mqblk bench`.
///
/// # Errors
/// As a user sees them.
pub(crate) fn parse_options(options: &[impl AsRef<str>]) -> Result<BenchArgs, clap::Error> {
    BenchOptions::try_parse_from(options.iter().map(AsRef::as_ref)).map(|options| options.args)
}
