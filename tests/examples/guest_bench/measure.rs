//! One load on one disk of a guest: fio's results, and counters.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use mqblk_test_bounds::Bound;
use mqblk_tests::guest::Shell;
use serde::Serialize;
use serde_json::Value;

use crate::Options;
use crate::servers::{Machine, Server, Storage};

/// Length of the file, in MiB.
pub(crate) const IMAGE_MIB: u64 = 512;

const JOB_FILE: &str = include_str!("../../guest/benchmark.fio");

/// The result of a load. Counters that a server does not have are null.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) server: String,
    pub(crate) storage: &'static str,
    pub(crate) load: String,
    pub(crate) iops: f64,
    pub(crate) bw_bytes_per_s: f64,
    pub(crate) lat_us_mean: f64,
    pub lat_us_p50: f64,
    pub lat_us_p99: f64,
    /// Interrupts of the guest per request.
    pub(crate) interrupts_per_io: f64,
    /// Exits of the virtual CPUs per request. Only with KVM.
    pub(crate) exits_per_io: Option<f64>,
    /// Kicks that arrived at the daemon, and calls that it sent, per request. Only of mqblk.
    pub(crate) kicks_per_io: Option<f64>,
    pub(crate) calls_per_io: Option<f64>,
    /// Requests merged by the guest, and by mqblk, per request.
    pub(crate) guest_merges_per_io: f64,
    pub(crate) server_merges_per_io: Option<f64>,
    /// CPU time of QEMU and the daemon, and of the daemon alone, per request.
    pub(crate) host_cpu_us_per_io: f64,
    pub(crate) daemon_cpu_us_per_io: Option<f64>,
}

/// Counters since the start of a machine.
#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    interrupts: u64,
    guest_merges: u64,
    exits: Option<u64>,
    kicks: Option<u64>,
    calls: Option<u64>,
    server_merges: Option<u64>,
    qemu_cpu_us: f64,
    daemon_cpu_us: Option<f64>,
}

/// Runs a section of the job file.
pub(crate) fn measure(machine: &mut Machine, storage: Storage, load: &str, options: &Options) -> Result<Row> {
    let disk = machine.disk(storage);
    let before = Counts::of(machine, disk)?;
    let script = format!(
        "cat >/run/benchmark.fio <<'END'\n{JOB_FILE}\nEND\n\
         DISK=/dev/{disk} JOBS={} RUNTIME={} fio --section={load} --output-format=json --output=/run/fio.json /run/benchmark.fio >&2 || exit
         cat /run/fio.json",
        options.vcpus, options.seconds
    );
    let answer = machine.guest.run_within(&script, Bound::seconds(options.seconds + 120))?;
    ensure!(answer.status == 0, "fio failed with exit status {}:\n{}", answer.status, answer.output);
    let after = Counts::of(machine, disk)?;
    let begin = answer.output.find("\n{").map_or(0, |at| at + 1);
    let json: Value = serde_json::from_str(&answer.output[begin..]).with_context(|| answer.output.clone())?;
    let job = &json["jobs"][0];
    ensure!(job["error"] == 0, "fio's job {load} has error {}", job["error"]);
    let way = if load.ends_with("writes") { &job["write"] } else { &job["read"] };
    let number = |value: &Value| value.as_f64().with_context(|| format!("fio's JSON lacks a number: {way}"));
    // The counts also cover the ramp.
    let seconds = f64::from(options.seconds) + 0.5;
    let ios = number(&way["iops"])? * seconds;
    ensure!(ios > 0.0, "fio did nothing");
    let each = |later: u64, earlier: u64| later.saturating_sub(earlier) as f64 / ios;
    let both = |later: Option<u64>, earlier: Option<u64>| Some(each(later?, earlier?));
    let daemon_cpu = after.daemon_cpu_us.zip(before.daemon_cpu_us).map(|(after, before)| after - before);
    let percentile = |name: &str| number(&way["clat_ns"]["percentile"][name]).map(|ns| ns / 1e3);
    Ok(Row {
        server: machine.setup.name(),
        storage: storage.name(),
        load: load.to_owned(),
        iops: number(&way["iops"])?,
        bw_bytes_per_s: number(&way["bw_bytes"])?,
        lat_us_mean: number(&way["clat_ns"]["mean"])? / 1e3,
        lat_us_p50: percentile("50.000000")?,
        lat_us_p99: percentile("99.000000")?,
        interrupts_per_io: each(after.interrupts, before.interrupts),
        exits_per_io: both(after.exits, before.exits),
        kicks_per_io: both(after.kicks, before.kicks),
        calls_per_io: both(after.calls, before.calls),
        guest_merges_per_io: each(after.guest_merges, before.guest_merges),
        server_merges_per_io: both(after.server_merges, before.server_merges),
        host_cpu_us_per_io: (after.qemu_cpu_us - before.qemu_cpu_us + daemon_cpu.unwrap_or(0.0)) / ios,
        daemon_cpu_us_per_io: daemon_cpu.map(|cpu| cpu / ios),
    })
}

impl Counts {
    fn of(machine: &mut Machine, disk: &str) -> Result<Counts> {
        // Fields of /sys/block/DISK/stat: 2 and 6 are merges (Documentation/block/stat.rst).
        let script = format!(
            "awk '/virtio[0-9]+-re?q/ {{ for (at = 2; at <= NF && $at ~ /^[0-9]+$/; at++) sum += $at }} END {{ print sum + 0 }}' /proc/interrupts
             awk '{{ print $2 + $6 }}' /sys/block/{disk}/stat"
        );
        let text = machine.guest.must(&script)?;
        let mut numbers = text.split_whitespace().map(|word| word.parse::<u64>().with_context(|| text.clone()));
        let mut next = || numbers.next().with_context(|| text.clone())?;
        let mut counts = Counts { interrupts: next()?, guest_merges: next()?, ..Counts::default() };
        let qemu = machine.guest.pid();
        counts.qemu_cpu_us = cpu_us(qemu)?;
        counts.exits = kvm_exits(qemu);
        let Some(daemon) = &machine.daemon else { return Ok(counts) };
        counts.daemon_cpu_us = Some(cpu_us(daemon.pid())?);
        let load = match machine.setup.server {
            Server::MqblkBlk => daemon.disk_stat(if disk == "vda" { "null" } else { "file" })?.totals.counters,
            Server::MqblkScsi => daemon.controller_stat("scsi")?.totals.counters,
            _ => return Ok(counts),
        };
        counts.kicks = Some(load.kicks);
        counts.calls = Some(load.calls);
        counts.server_merges = Some(load.read_merges + load.write_merges);
        Ok(counts)
    }
}

/// Returns the CPU time of a process in microseconds, user and system (proc_pid_stat(5)).
fn cpu_us(pid: u32) -> Result<f64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The program's name, in parentheses, may contain spaces.
    let fields: Vec<&str> = text.rsplit_once(')').map_or("", |(_, rest)| rest).split_whitespace().collect();
    let ticks = |at: usize| fields.get(at).and_then(|word| word.parse::<f64>().ok()).context("/proc/PID/stat");
    // USER_HZ is 100 on all architectures of Linux that QEMU's guests run on here.
    Ok((ticks(11)? + ticks(12)?) * 10_000.0)
}

/// Returns the number of exits of a QEMU's virtual CPUs from the guest, by KVM's statistics in debugfs.
fn kvm_exits(pid: u32) -> Option<u64> {
    let folder = std::fs::read_dir("/sys/kernel/debug/kvm").ok()?;
    let of_process = |name: &str| name.starts_with(&format!("{pid}-"));
    let found: Option<PathBuf> =
        folder.flatten().find(|entry| entry.file_name().to_str().is_some_and(of_process)).map(|entry| entry.path());
    std::fs::read_to_string(found?.join("exits")).ok()?.trim().parse().ok()
}
