//! Measures fio in a real guest whose disks are served by mqblk, by qemu-storage-daemon and by QEMU itself in turn,
//! with the same job file (`tests/guest/benchmark.fio`). `scripts/guest-benchmarks.sh` prepares the guest and runs it.
//!
//! ```text
//! guest_bench [--runs N] [--seconds S] [--vcpus N] [--out FOLDER] [--servers NAME,...] [--loads NAME,...] [--poll POLICY]
//!    [--layouts each,1-thread,1-queue]
//! ```
//!
//! Without KVM the guest's instructions are emulated: then IOPS are mostly those of the emulator; compare the counts
//! (interrupts, kicks and merges per request, the daemon's CPU time).

mod measure;
mod report;
mod servers;

use std::io::Write;
use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};

use servers::{Layout, Server, Setup, Storage};

const USAGE: &str = "usage: guest_bench [--runs N] [--seconds S] [--vcpus N] [--out FOLDER] [--servers NAME,...] [--loads NAME,...] [--poll POLICY] [--layouts each,1-thread,1-queue]";

/// Sections of the job file.
const LOADS: [&str; 5] = ["latency", "random-reads", "random-writes", "sequential-reads", "large-reads"];

/// The options.
struct Options {
    runs: usize,
    seconds: u32,
    vcpus: u16,
    out: PathBuf,
    servers: Vec<Server>,
    loads: Vec<&'static str>,
    layouts: Vec<Layout>,
    /// Poll policy of mqblk.
    poll: String,
}

impl Options {
    fn parse(words: impl Iterator<Item = String>) -> Result<Options> {
        let mut options = Options {
            runs: 3,
            seconds: 2,
            vcpus: 2,
            out: "results".into(),
            servers: Server::ALL.to_vec(),
            loads: LOADS.to_vec(),
            layouts: vec![Layout::Each],
            poll: "auto".to_owned(),
        };
        let mut words = words;
        while let Some(word) = words.next() {
            let value = words.next().with_context(|| format!("{word}: found no value\n{USAGE}"))?;
            let number = || value.parse::<u32>().with_context(|| format!("{word}: found '{value}', expected a number"));
            match word.as_str() {
                "--runs" => options.runs = number()? as usize,
                "--seconds" => options.seconds = number()?,
                "--vcpus" => options.vcpus = u16::try_from(number()?)?,
                "--poll" => options.poll = value,
                "--out" => options.out = value.into(),
                "--servers" => options.servers = value.split(',').map(Server::find).collect::<Result<_>>()?,
                "--layouts" => options.layouts = value.split(',').map(Layout::find).collect::<Result<_>>()?,
                "--loads" => options.loads = value.split(',').map(load_of).collect::<Result<_>>()?,
                _ => bail!("found '{word}'\n{USAGE}"),
            }
        }
        for (name, number) in
            [("runs", options.runs), ("seconds", options.seconds as usize), ("vcpus", options.vcpus.into())]
        {
            ensure!(number > 0, "--{name}: found 0, expected at least 1");
        }
        Ok(options)
    }
}

fn load_of(name: &str) -> Result<&'static str> {
    let found = LOADS.into_iter().find(|load| *load == name);
    found.with_context(|| format!("--loads: found '{name}', expected some of {}", LOADS.join(", ")))
}

fn main() -> Result<()> {
    let options = Options::parse(std::env::args().skip(1))?;
    std::fs::create_dir_all(&options.out).with_context(|| format!("--out {}", options.out.display()))?;
    let image = mqblk_tests::guest::HostImage::full(measure::IMAGE_MIB)?;
    let mut report = report::Report::new(&options)?;
    let setups: Vec<Setup> = Setup::all()
        .filter(|setup| options.servers.contains(&setup.server) && options.layouts.contains(&setup.layout))
        .collect();
    ensure!(!setups.is_empty(), "--layouts: found none that these servers have, expected 'each' for virtio-scsi");
    for run in 1..=options.runs {
        // Each run begins with another server.
        let mut setups = setups.clone();
        let first = (run - 1) % setups.len();
        setups.rotate_left(first);
        for setup in setups {
            writeln!(std::io::stderr(), "run {run} of {}: {}", options.runs, setup.name())?;
            let mut machine = setup.boot(image.path(), &options).with_context(|| setup.name())?;
            for storage in Storage::ALL {
                for load in &options.loads {
                    let row = measure::measure(&mut machine, storage, load, &options);
                    report.add(row.with_context(|| format!("{}, {}, {load}", setup.name(), storage.name()))?)?;
                }
            }
            machine.end()?;
        }
    }
    Ok(std::io::stdout().write_all(report.markdown().as_bytes())?)
}
