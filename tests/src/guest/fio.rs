//! fio in the guest.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use mqblk_test_bounds::Bound;
use serde_json::Value;

use super::shell::Shell;

/// A set of fio jobs.
#[derive(Debug, Clone)]
pub struct FioJobs {
    arguments: String,
}

impl FioJobs {
    /// Creates jobs with fio's command line, without its output options.
    #[must_use]
    pub fn new(arguments: &str) -> Self {
        Self { arguments: arguments.to_owned() }
    }

    /// Creates random writes of mixed block sizes by `jobs` parallel jobs, each over its own `mib` MiB from
    /// `offset_mib` on, verified with `--verify=crc32c`.
    #[must_use]
    pub fn verified_random_writes(device: &str, jobs: u16, offset_mib: u32, mib: u32) -> Self {
        Self::new(&format!(
            "--name=verify --filename={device} --ioengine=io_uring --direct=1 --iodepth=16 --thread \
             --rw=randwrite --bssplit=512/10:1k/10:4k/40:12k/10:64k/20:256k/10 \
             --verify=crc32c --verify_fatal=1 --do_verify=1 --numjobs={jobs} \
             --offset={offset_mib}M --offset_increment={mib}M --size={mib}M"
        ))
    }

    /// Returns a script that runs the jobs and prints fio's JSON.
    #[must_use]
    pub fn script(&self, name: &str) -> String {
        format!(
            "fio {} --output-format=json --output=/run/{name}.json; status=$?; cat /run/{name}.json; exit $status",
            self.arguments
        )
    }

    /// Runs the jobs to their end.
    ///
    /// # Errors
    /// As [`FioOutcome::read`].
    pub fn run(&self, guest: &mut impl Shell, within: Bound) -> Result<FioOutcome> {
        let answer = guest.run_within(&self.script("fio"), within)?;
        FioOutcome::read(answer.status, &answer.output)
    }
}

/// Sum of the results of all jobs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FioOutcome {
    /// Completed reads, including those of the verification.
    pub reads: u64,
    /// Completed writes.
    pub writes: u64,
    /// Longest run time of a job.
    pub elapsed: Duration,
}

impl FioOutcome {
    /// Parses fio's JSON.
    ///
    /// # Errors
    /// When fio failed or a job had an error.
    pub fn read(status: i32, output: &str) -> Result<Self> {
        ensure!(status == 0, "fio failed with exit status {status}:\n{output}");
        let begin = output.find("\n{").map_or(0, |at| at + 1); // warnings come before the JSON
        let json: Value = serde_json::from_str(&output[begin..]).with_context(|| format!("fio's JSON:\n{output}"))?;
        let jobs = json["jobs"].as_array().context("fio's JSON has no jobs")?;
        ensure!(!jobs.is_empty(), "fio ran no job");
        let mut outcome = Self { reads: 0, writes: 0, elapsed: Duration::ZERO };
        for job in jobs {
            ensure!(job["error"] == 0, "fio's job {} has error {}", job["jobname"], job["error"]);
            outcome.reads += job["read"]["total_ios"].as_u64().context("total_ios")?;
            outcome.writes += job["write"]["total_ios"].as_u64().context("total_ios")?;
            let runtime = |way: &str| job[way]["runtime"].as_u64().context("runtime");
            outcome.elapsed = outcome.elapsed.max(Duration::from_millis(runtime("read")? + runtime("write")?));
        }
        Ok(outcome)
    }

    /// Checks that the jobs wrote, and read back at least every write.
    ///
    /// # Errors
    /// When they did less.
    pub fn must_have_verified(self) -> Result<Self> {
        ensure!(self.writes > 0 && self.reads >= self.writes, "fio verified too little: {self:?}");
        Ok(self)
    }
}
