//! Metrics from a sample. Names and units are stable, like the fields of `stat`: docs/metrics.md lists them.

mod devices;
mod family;
mod grants;
mod histogram;
mod load;
mod storage;

use mqblk_admin::model::{OutDisk, Stat, WorkerStat};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, prometheus_text, text};
use prometheus_client::registry::Registry;

use crate::accept::TextFormat;
use crate::request::Detail;
use family::{Family, Item, MetricWriter, Value};

/// The sample of the process, besides `stat`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ProcessSample {
    /// Start time of the daemon, in seconds since 1970.
    pub start_time_s: f64,
    /// CPU time of all threads, in nanoseconds.
    pub cpu_ns: u64,
}

/// Returns the metrics of a sample as text. Histograms need its buckets, series of queues its queues.
///
/// # Errors
/// When the encoder fails, which would be a bug.
pub fn encode(stat: Stat, process: ProcessSample, format: TextFormat, detail: Detail) -> Result<String, String> {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(StatCollector { stat, process, detail }));
    let mut text = String::new();
    let encoded = match format {
        TextFormat::OpenMetrics => text::encode(&mut text, &registry),
        TextFormat::Prometheus => prometheus_text::encode(&mut text, &registry),
    };
    encoded.map_err(|error| format!("the metrics cannot be encoded: {error}"))?;
    Ok(text)
}

#[derive(Debug)]
struct StatCollector {
    stat: Stat,
    process: ProcessSample,
    detail: Detail,
}

impl Collector for StatCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> std::fmt::Result {
        let mut writer = MetricWriter::new(&mut encoder);
        let Stat { version, disks, controllers, workers, out, .. } = &self.stat;
        let build = Item { labels: vec![("version", version.clone())], of: () };
        writer.info("mqblk_build", "The daemon's version", &[build])?;
        writer.families("process_", PROCESS, &[Item { labels: Vec::new(), of: &self.process }])?;
        devices::write(&mut writer, disks, controllers, self.detail)?;
        let labels = |disk: &OutDisk| vec![("disk", disk.id.clone()), ("interface", disk.interface.clone())];
        let items: Vec<_> = out.iter().map(|disk| Item { labels: labels(disk), of: disk }).collect();
        writer.families("mqblk_out_", OUT, &items)?;
        writer.families("mqblk_", DISKS_OUT, &[Item { labels: Vec::new(), of: &out.len() }])?;
        let workers =
            workers.iter().map(|worker| Item { labels: vec![("worker", worker.worker.to_string())], of: worker });
        writer.families("mqblk_worker_", WORKER, &workers.collect::<Vec<_>>())
    }
}

const PROCESS: &[Family<ProcessSample>] = &[
    Family::gauge("start_time", "When the daemon was started, since 1970", |it| Some(Value::Seconds(it.start_time_s))),
    Family::counter("cpu", "CPU time of all threads", |it| Some(Value::Nanoseconds(it.cpu_ns))),
];

const DISKS_OUT: &[Family<usize>] =
    &[Family::gauge("disks_out", "Disks and LUNs that cannot be served now", |it| Some(Value::Number(*it as u64)))];

const OUT: &[Family<OutDisk>] = &[
    Family::gauge("time", "For how long a disk or LUN has been out", |it| Some(Value::Nanoseconds(it.out_ns))),
    Family::counter("tries", "How often a disk or LUN that is out was tried", |it| {
        Some(Value::Number(it.tries.into()))
    }),
];

const WORKER: &[Family<WorkerStat>] = &[
    Family::gauge("queues", "Queues that the worker serves", |it| Some(Value::Number(it.queues.into()))),
    Family::counter("turns", "Turns in which something happened", |it| Some(Value::Number(it.turns))),
    Family::counter("empty_turns", "Turns in which nothing happened", |it| Some(Value::Number(it.empty_turns))),
    Family::counter("sleeps", "Times that the worker slept", |it| Some(Value::Number(it.sleeps))),
    Family::counter("sleep", "Time asleep", |it| Some(Value::Nanoseconds(it.slept_ns))),
    Family::counter("cpu", "CPU time of the worker's thread", |it| Some(Value::Nanoseconds(it.cpu_ns))),
    Family::counter("merge_splits", "Merged requests that failed and were repeated one by one", |it| {
        Some(Value::Number(it.merge_splits))
    }),
];

#[cfg(test)]
mod tests;
