//! The results: rows of JSON, and tables with ratios at the end.

use std::path::PathBuf;

use anyhow::{Context, Result};
use mqblk_tests::guest::{Accelerator, GuestCache};
use serde_json::{Value, json};

use crate::Options;
use crate::measure::Row;
use crate::servers::{Layout, Setup, Storage};

/// All rows so far.
pub(crate) struct Report {
    out: PathBuf,
    machine: Value,
    is_emulated: bool,
    rows: Vec<Row>,
}

impl Report {
    pub(crate) fn new(options: &Options) -> Result<Report> {
        let cache = GuestCache::open()?;
        let is_emulated = Accelerator::detect(&cache)? == Accelerator::Tcg;
        let version =
            |file: &str| std::fs::read_to_string(cache.folder().join(file)).unwrap_or_default().trim().to_owned();
        let cpu = std::fs::read_to_string("/proc/cpuinfo")?;
        let model = cpu.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or_default();
        let machine = json!({
            "accelerator": if is_emulated { "tcg" } else { "kvm" },
            "cpu": model.trim_start_matches([' ', '\t', ':']),
            "cpus": std::thread::available_parallelism()?.get(),
            "kernel": std::fs::read_to_string("/proc/sys/kernel/osrelease")?.trim(),
            "vmm": format!("QEMU {}", version("trixie/qemu.version")),
            "guest_kernel": version("trixie/kernel.version"),
            "poll": options.poll, "vcpus": options.vcpus, "runs": options.runs, "seconds": options.seconds,
        });
        Ok(Report { out: options.out.clone(), machine, is_emulated, rows: Vec::new() })
    }

    /// Adds a row, and writes all rows to `guest.json` and `guest.md`.
    pub(crate) fn add(&mut self, row: Row) -> Result<()> {
        self.rows.push(row);
        let json = serde_json::to_string_pretty(&json!({ "machine": self.machine, "rows": self.rows }))?;
        for (name, text) in [("guest.json", json + "\n"), ("guest.md", self.markdown())] {
            let (path, new) = (self.out.join(name), self.out.join(format!("{name}.new")));
            std::fs::write(&new, text)
                .and_then(|()| std::fs::rename(&new, &path))
                .with_context(|| path.display().to_string())?;
        }
        Ok(())
    }

    pub(crate) fn markdown(&self) -> String {
        let machine = |key: &str| self.machine[key].as_str().unwrap_or_default();
        let mut text = format!(
            "# fio in a guest\n\n{} with {} ({}), guest of {} virtual CPUs with Linux {}, on {} x {}, Linux {}. {} runs of {} s, taking turns; medians. \
             Job file: tests/guest/benchmark.fio.\n",
            machine("vmm"),
            machine("accelerator").to_uppercase(),
            if self.is_emulated { "emulation" } else { "virtualisation" },
            self.machine["vcpus"],
            machine("guest_kernel"),
            self.machine["cpus"],
            machine("cpu"),
            machine("kernel"),
            self.machine["runs"],
            self.machine["seconds"],
        );
        if self.is_emulated {
            text.push_str(
                "\nThe guest is emulated, so its drivers take most of the time and IOPS compare emulation as much as servers. \
                 Read the counts for each request and the daemon's CPU time.\n",
            );
        }
        for storage in Storage::ALL {
            for load in crate::LOADS {
                text.push_str(&self.table(storage, load));
            }
        }
        text
    }

    fn table(&self, storage: Storage, load: &str) -> String {
        let of = |server: &str| -> Vec<&Row> {
            let wanted = |row: &&Row| row.server == server && row.storage == storage.name() && row.load == load;
            self.rows.iter().filter(wanted).collect()
        };
        let setups: Vec<Setup> = Setup::all().filter(|setup| !of(&setup.name()).is_empty()).collect();
        let iops_of = |setup: Setup| median(&of(&setup.name()), |row| Some(row.iops)).unwrap_or(0.0);
        let Some(first) = setups.first().copied().map(iops_of) else { return String::new() };
        // The same server with one queue, if it was measured.
        let base = |setup: Setup| {
            let without = Setup { layout: Layout::OneQueue, ..setup };
            if setups.contains(&without) { iops_of(without) } else { first }
        };
        let mut text = format!(
            "\n## {load}, {}\n\n| server | IOPS | error | range | ratio | p50 us | p99 us | interrupts/IO | exits/IO | kicks/IO | calls/IO | merges/IO: guest | server | CPU us/IO: host | daemon |\n\
             |---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|\n",
            storage.name()
        );
        for setup in setups.iter().copied() {
            let rows = of(&setup.name());
            let cell = |of: fn(&Row) -> Option<f64>, digits: usize| {
                median(&rows, of).map_or("-".to_owned(), |value| format!("{value:.digits$}"))
            };
            let iops: Vec<f64> = rows.iter().map(|row| row.iops).collect();
            let (least, most) =
                iops.iter().fold((f64::MAX, 0.0_f64), |(least, most), one| (least.min(*one), most.max(*one)));
            let ratio = iops_of(setup) / base(setup);
            text.push_str(&format!(
                "| {} | {} | {} | {least:.0} to {most:.0} | {ratio:.2} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} |\n",
                setup.name(),
                cell(|row| Some(row.iops), 0),
                error_cell(&iops),
                cell(|row| Some(row.lat_us_p50), 0),
                cell(|row| Some(row.lat_us_p99), 0),
                cell(|row| Some(row.interrupts_per_io), 3),
                cell(|row| row.exits_per_io, 2),
                cell(|row| row.kicks_per_io, 3),
                cell(|row| row.calls_per_io, 3),
                cell(|row| Some(row.guest_merges_per_io), 3),
                cell(|row| row.server_merges_per_io, 3),
                cell(|row| Some(row.host_cpu_us_per_io), 1),
                cell(|row| row.daemon_cpu_us_per_io, 2),
            ));
        }
        text
    }
}

/// Returns the standard error of the mean, in percent of it.
fn error_cell(values: &[f64]) -> String {
    let count = values.len() as f64;
    if values.len() < 2 {
        return "-".to_owned();
    }
    let mean = values.iter().sum::<f64>() / count;
    let variance = values.iter().map(|one| (one - mean).powi(2)).sum::<f64>() / (count - 1.0);
    format!("± {:.2}%", (variance / count).sqrt() / mean * 100.0)
}

fn median(rows: &[&Row], of: impl Fn(&Row) -> Option<f64>) -> Option<f64> {
    let mut values: Vec<f64> = rows.iter().map(|row| of(row)).collect::<Option<_>>()?;
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => None,
        count if count % 2 == 1 => Some(values[middle]),
        _ => Some((values[middle - 1] + values[middle]) / 2.0),
    }
}
