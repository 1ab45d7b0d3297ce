//! Counters of queues, and their sums.

use mqblk_admin::model::{Latency, LatencyParts, Load};

use super::family::{Family, HistogramValue, Item, Labels, MetricWriter, Value};
use super::histogram::histogram;

/// Converts a number.
pub(super) fn number(value: u64) -> Option<Value> {
    Some(Value::Number(value))
}

fn bytes(value: u64) -> Option<Value> {
    Some(Value::Bytes(value))
}

fn time(ns: u64) -> Option<Value> {
    Some(Value::Nanoseconds(ns))
}

/// Converts milliseconds; 0 without any.
pub(super) fn age(ms: Option<u64>) -> Option<Value> {
    Some(Value::Seconds(ms.unwrap_or(0) as f64 / 1e3))
}

/// Of a disk, a controller or a queue. Requests are the guest's: a merged request counts as many times as it has
/// members.
pub(super) const LOAD: &[Family<Load>] = &[
    Family::gauge("in_flight_requests", "Requests in flight, parked ones too", |it| number(it.in_flight)),
    Family::gauge("oldest_request_age", "Age of the oldest request in flight, 0 without any", |it| age(it.oldest_ms)),
    Family::counter("requests", "Requests completed in all", |it| number(it.counters.requests)),
    Family::counter("reads_completed", "Reads completed, failed ones too", |it| number(it.counters.reads)),
    Family::counter("writes_completed", "Writes completed, failed ones too", |it| number(it.counters.writes)),
    Family::counter("flushes_completed", "Flushes completed", |it| number(it.counters.flushes)),
    Family::counter("discards_completed", "Discards completed", |it| number(it.counters.discards)),
    Family::counter("write_zeroes_completed", "Write-zeroes completed", |it| number(it.counters.write_zeroes)),
    Family::counter("read", "Bytes read", |it| bytes(it.counters.read_bytes)),
    Family::counter("written", "Bytes written", |it| bytes(it.counters.written_bytes)),
    Family::counter("discarded", "Bytes discarded or zeroed", |it| bytes(it.counters.other_bytes)),
    Family::counter("reads_merged", "Reads merged into the one before them", |it| number(it.counters.read_merges)),
    Family::counter("writes_merged", "Writes merged into the one before them", |it| number(it.counters.write_merges)),
    Family::counter("discards_merged", "Ranges of discards and write-zeroes merged into the one before them", |it| {
        number(it.counters.other_merges)
    }),
    Family::counter("errors", "Requests that did not succeed", |it| number(it.counters.errors)),
    Family::counter("read_errors", "Reads that did not succeed", |it| number(it.counters.read_errors)),
    Family::counter("write_errors", "Writes that did not succeed", |it| number(it.counters.write_errors)),
    Family::counter("answered_alone_requests", "Requests completed without the disk", |it| {
        number(it.counters.answered_alone)
    }),
    Family::counter("malformed_requests", "Requests that are mistakes of the guest", |it| {
        number(it.counters.malformed)
    }),
    Family::counter("kicks", "Times that the guest woke the daemon", |it| number(it.counters.kicks)),
    Family::counter("calls", "Interrupts sent to the guest", |it| number(it.counters.calls)),
    Family::counter("calls_suppressed", "Publishes for which the guest had suppressed calls", |it| {
        number(it.counters.calls_suppressed)
    }),
    Family::counter("calls_deferred", "Calls deferred for more completions", |it| number(it.counters.calls_put_off)),
    Family::counter("polls", "Polls that found requests", |it| number(it.counters.turns)),
    Family::counter("empty_polls", "Polls that found none", |it| number(it.counters.empty_turns)),
    Family::counter("arms", "Times that a queue was armed for sleep", |it| number(it.counters.arms)),
    Family::counter("empty_poll", "Time spent polling queues without finding anything, the sum of all queues", |it| {
        time(it.counters.poll_ns)
    }),
    Family::counter("busy", "Time in which queues had requests in flight, the sum of all queues", |it| {
        time(it.counters.busy_ns)
    }),
];

type Part = fn(&LatencyParts) -> &mqblk_admin::model::Distribution;

/// The histograms of latencies.
const PARTS: [(&str, &str, Part); 4] = [
    ("latency", "Time from the pull of a request to its publish", |it| &it.total),
    ("queued", "Part of the latency before the storage: from the pull to the submission", |it| &it.queued),
    ("device", "Part of the latency in the storage", |it| &it.device),
    ("publish", "Part of the latency from the storage's completion until the guest could see it", |it| &it.publish),
];

/// Writes the four histograms, each by class of operation.
pub(super) fn write_latencies(
    writer: &mut MetricWriter<'_, '_>,
    prefix: &str,
    items: &[Item<&Load>],
) -> std::fmt::Result {
    for (name, help, part) in PARTS {
        let histograms = items.iter().flat_map(|item| of_classes(&item.labels, &item.of.latency, part));
        writer.histograms(&format!("{prefix}{name}"), help, histograms.collect())?;
    }
    Ok(())
}

fn of_classes(labels: &Labels, latency: &Latency, part: Part) -> [Item<HistogramValue>; 3] {
    let Latency { reads, writes, others } = latency;
    [("read", reads), ("write", writes), ("other", others)].map(|(op, parts)| {
        let mut labels = labels.clone();
        labels.push(("op", op.to_owned()));
        Item { labels, of: histogram(part(parts)) }
    })
}
