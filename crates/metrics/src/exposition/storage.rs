//! The storage of disks and LUNs: its failures and connections; and counters of LUNs.

use mqblk_admin::model::{ConnectionsStat, Health, LunStat};

use super::family::{Family, Value};
use super::load::{age, number};

/// Of a disk or a LUN.
pub(super) const HEALTH: &[Family<Health>] = &[
    Family::gauge("stopped", "1 while an error policy has stopped the disk, else 0", |it| {
        Some(Value::Flag(it.stopped.is_some()))
    }),
    Family::gauge("out_of_space", "1 while the disk is stopped for a lack of space, else 0", |it| {
        Some(Value::Flag(it.stopped.as_ref().is_some_and(|stopped| stopped.enospc)))
    }),
    Family::gauge("parked_requests", "Requests that wait for mqblk resume", |it| number(it.parked)),
    Family::counter("stops", "Times that an error policy stopped the disk", |it| number(it.stops)),
    Family::counter("retries", "Times that a request was tried again", |it| number(it.retries)),
    Family::counter("failed_requests", "Requests completed with an error of the storage", |it| number(it.failed)),
    Family::gauge("last_failure_age", "Time since the last request that was completed with an error", |it| {
        it.last_failure.as_ref().map(|last| Value::Nanoseconds(last.ago_ns))
    }),
    Family::counter("throttled_requests", "Requests that waited for a rate limit", |it| {
        number(it.throttle.as_ref()?.throttled)
    }),
    Family::counter("throttled", "Total time that requests waited for a rate limit", |it| {
        Some(Value::Nanoseconds(it.throttle.as_ref()?.throttled_ns))
    }),
    Family::gauge("throttle_waiting_requests", "Requests that wait for a rate limit now", |it| {
        number(it.throttle.as_ref()?.waiting)
    }),
];

/// Of a disk or a LUN whose storage has connections.
pub(super) const CONNECTIONS: &[Family<ConnectionsStat>] = &[
    Family::gauge("storage_reachable", "1 while the storage is reached, else 0", |it| {
        Some(Value::Flag(it.unreachable_ns.is_none()))
    }),
    Family::gauge("storage_unreachable", "How long the storage has not been reached, 0 while it is", |it| {
        Some(Value::Nanoseconds(it.unreachable_ns.unwrap_or(0)))
    }),
    Family::gauge("storage_connections", "Connections to the storage", |it| number(it.counters.connected)),
    Family::counter("storage_connections_made", "Connections made", |it| number(it.counters.made)),
    Family::counter("storage_connections_lost", "Connections lost", |it| number(it.counters.lost)),
    Family::counter("storage_connection_failures", "Attempts to connect that failed", |it| {
        number(it.counters.failed_attempts)
    }),
    Family::counter("storage_requests_repeated", "Requests sent again after a lost connection", |it| {
        number(it.counters.repeated)
    }),
    Family::counter("storage_errors", "Requests that the storage refused", |it| number(it.counters.errors)),
    Family::counter("storage_sent", "Bytes sent to the storage", |it| Some(Value::Bytes(it.counters.sent_bytes))),
    Family::counter("storage_received", "Bytes received from the storage", |it| {
        Some(Value::Bytes(it.counters.received_bytes))
    }),
];

/// Of a LUN. Requests are those to the storage.
pub(super) const LUN: &[Family<LunStat>] = &[
    Family::gauge("in_flight_requests", "Requests in flight", |it| number(it.in_flight)),
    Family::gauge("oldest_request_age", "Age of the oldest request in flight, 0 without any", |it| age(it.oldest_ms)),
    Family::counter("reads_completed", "Reads completed, failed ones too", |it| number(it.counters.reads)),
    Family::counter("writes_completed", "Writes completed, failed ones too", |it| number(it.counters.writes)),
    Family::counter("others_completed", "Flushes, discards and write-zeroes completed", |it| {
        number(it.counters.others)
    }),
    Family::counter("read", "Bytes read", |it| Some(Value::Bytes(it.counters.read_bytes))),
    Family::counter("written", "Bytes written", |it| Some(Value::Bytes(it.counters.written_bytes))),
    Family::counter("errors", "Requests that did not succeed", |it| number(it.counters.errors)),
    Family::counter("read_time", "Total latency of the reads", |it| Some(Value::Nanoseconds(it.counters.read_ns))),
    Family::counter("write_time", "Total latency of the writes", |it| Some(Value::Nanoseconds(it.counters.write_ns))),
    Family::counter("other_time", "Total latency of flushes, discards and write-zeroes", |it| {
        Some(Value::Nanoseconds(it.counters.other_ns))
    }),
];
