//! The limits of a disk: rules over two samples. Pure: no I/O, no clock.

use mqblk_admin::model::{PollingStat, QueueStat, Stat};

use super::evidence::{Evidence, Finding, requests_per_s, time};
use super::subject::Subject;
use super::throttle::{self, throttled};
use crate::stat::rates::{IoRates, QueueRates, Report, WorkerRates};

/// A request in flight for longer gets a sentence, in milliseconds.
const OLD_MS: u64 = 1000;
/// The share of the latency that counts as most of it, and one that should hardly occur, in percent.
const MOST: f64 = 50.0;
const NOTABLE: f64 = 25.0;
/// Utilisation at which a queue or a worker counts as full, in percent.
const FULL: f64 = 90.0;
/// A worker has time left if at least this percentage of its turns is empty.
const SPARE_TURNS: f64 = 20.0;
/// Smallest share of a worker's requests that is named, in percent.
const SHARE: f64 = 10.0;
/// Shorter requests cost more per request than for their data, in bytes.
const SMALL: f64 = 32.0 * 1024.0;
/// Fewer requests a second are limited only by their sender.
const FEW_PER_S: f64 = 10.0;
/// With more requests in flight, some can be merged.
const ALONE: f64 = 1.5;

type Rule = fn(&Evidence<'_>) -> Vec<Finding>;

/// Conditions that stop a disk. Only the first that applies is reported.
const BLOCKERS: [Rule; 2] = [stopped, unreachable];
/// Troubles that are always reported.
const TROUBLES: [Rule; 3] = [oldest, errors, refused];
/// Limits of a working disk, in the order of the sentences. A rate limit is first: where requests wait for it, the
/// others follow from it.
const LIMITS: [Rule; 9] =
    [throttled, queue_full, parts_of_latency, one_at_a_time, worker_busy, queues_unused, one_worker, polling, unmerged];

/// Returns the findings, at least one sentence. Returns `None` if the device is new in the second sample, or its
/// counters began again.
pub(super) fn findings(subject: &Subject<'_>, stat: &Stat, report: &Report) -> Option<Vec<Finding>> {
    let disk = report.disks.iter().find(|disk| disk.id == subject.device);
    let controller = report.controllers.iter().find(|controller| controller.id == subject.device);
    let (totals, queues) = match (disk, controller) {
        (Some(disk), _) => (disk.totals, &disk.queues),
        (None, Some(controller)) => (controller.totals, &controller.queues),
        (None, None) => return None,
    };
    let queues = queues.iter().filter(|queue| ["request", ""].contains(&queue.role.as_str())).collect();
    let evidence = Evidence { subject, rates: totals?, queues, report, stat };
    let all = |rules: &[Rule]| rules.iter().flat_map(|rule| rule(&evidence)).collect::<Vec<_>>();
    let mut found = all(&BLOCKERS);
    found.truncate(1);
    found.extend(all(&TROUBLES));
    if requests_per_s(&evidence.rates) <= 0.0 {
        found.extend(throttled(&evidence));
        found.extend(without_requests(&evidence).filter(|_| found.is_empty()));
    } else {
        found.extend(all(&LIMITS));
    }
    if found.is_empty() {
        found.push(nothing(&evidence));
    }
    Some(found)
}

/// Formats a number, with one decimal if it is small.
fn amount(value: f64) -> String {
    if value < 10.0 { format!("{value:.1}") } else { format!("{value:.0}") }
}

fn stopped(evidence: &Evidence<'_>) -> Vec<Finding> {
    let Some(health) = evidence.subject.health else { return Vec::new() };
    let stopped = health.stopped.iter().map(|stop| {
        let seconds = stop.stopped_ns as f64 / 1e9;
        let id = evidence.subject.id;
        let sentence = format!(
            "It has been stopped for {seconds:.1} s, because of {}; {} requests wait for `mqblk resume {id}`.",
            stop.reason, health.parked
        );
        Finding::new("stopped", sentence, &[("stopped_s", seconds), ("parked_requests", health.parked as f64)])
    });
    stopped.collect()
}

fn unreachable(evidence: &Evidence<'_>) -> Vec<Finding> {
    let Some(connections) = evidence.subject.connections else { return Vec::new() };
    let since = connections.unreachable_ns.iter().map(|ns| {
        let seconds = *ns as f64 / 1e9;
        let why = connections.last_failure.as_ref().map(|why| format!(": {why}")).unwrap_or_default();
        let sentence = format!("Its storage has not been reached for {seconds:.1} s{why}.");
        Finding::new("unreachable", sentence, &[("unreachable_s", seconds)])
    });
    since.collect()
}

fn oldest(evidence: &Evidence<'_>) -> Vec<Finding> {
    let Subject { oldest_ms, in_flight, .. } = evidence.subject;
    let old = oldest_ms.iter().filter(|ms| **ms >= OLD_MS).map(|ms| {
        let seconds = *ms as f64 / 1e3;
        let sentence = format!("The oldest of {in_flight} requests in flight has been for {seconds:.1} s.");
        Finding::new("oldest", sentence, &[("oldest_ms", *ms as f64), ("in_flight_requests", *in_flight as f64)])
    });
    old.collect()
}

fn errors(evidence: &Evidence<'_>) -> Vec<Finding> {
    let errors = evidence.rates.errors;
    let sentence = format!("{errors} requests failed while it was watched.");
    (errors > 0).then(|| Finding::new("errors", sentence, &[("failed_requests", errors as f64)])).into_iter().collect()
}

fn refused(evidence: &Evidence<'_>) -> Vec<Finding> {
    let Some(budget) = evidence.subject.budget else { return Vec::new() };
    let resources = [
        ("max-mappings", budget.mappings),
        ("max-address-space", budget.address_space_bytes),
        ("mem-budget", budget.guest_memory_bytes),
    ];
    let refused = resources.iter().filter(|(_, resource)| resource.refused > 0);
    let found = refused.map(|(key, resource)| {
        let sentence = format!("Its VMM was refused more memory by {key} {} times.", resource.refused);
        Finding::new("refused", sentence, &[("refusals", resource.refused as f64)])
    });
    found.collect()
}

/// A disk without requests: no guest is connected, nothing is sent, or nothing completes.
fn without_requests(evidence: &Evidence<'_>) -> Option<Finding> {
    let in_flight = evidence.subject.in_flight;
    let slots: u64 = evidence.subject.queues.iter().map(|queue| queue.load.slots).sum();
    Some(if in_flight > 0 {
        let sentence = format!("The storage completed none of {in_flight} requests in flight.");
        Finding::new("storage", sentence, &[("in_flight_requests", in_flight as f64)])
    } else if slots == 0 {
        Finding::new("no-guest", "No guest uses it: none of its queues is set up.".to_owned(), &[("slots", 0.0)])
    } else {
        Finding::new("idle", "Its guest sends nothing.".to_owned(), &[("requests_per_s", 0.0)])
    })
}

fn queue_full(evidence: &Evidence<'_>) -> Vec<Finding> {
    let full = evidence.queues.iter().filter_map(|queue| {
        let slots = stat_of(evidence, queue)?.load.slots;
        let size = queue.rates?.queue_size;
        (slots > 0 && size >= slots as f64 * FULL / 100.0).then(|| {
            let sentence = format!(
                "Queue {} is full: {} of its {slots} slots are in use on average; a longer ring or more queues hold more.",
                queue.queue,
                amount(size)
            );
            Finding::new("queue-full", sentence, &[("queue", queue.queue.into()), ("in_flight_requests", size), ("slots", slots as f64)])
        })
    });
    full.collect()
}

/// The parts of the latency.
fn parts_of_latency(evidence: &Evidence<'_>) -> Vec<Finding> {
    let IoRates { await_us, queued_us, device_us, publish_us, queue_size, .. } = evidence.rates;
    if await_us <= 0.0 {
        return Vec::new();
    }
    let share = |part: f64| 100.0 * part / await_us;
    // The wait for a rate limit has a sentence of its own.
    let limited_us = throttle::rates(evidence)
        .map_or(0.0, |rates| rates.throttled_await_us * rates.throttled_per_s / requests_per_s(&evidence.rates));
    let queued_us = (queued_us - limited_us).max(0.0);
    let figures = |part_us: f64| {
        [("await_us", await_us), ("part_us", part_us), ("percent", share(part_us)), ("in_flight_requests", queue_size)]
    };
    let mut found = Vec::new();
    if share(device_us) >= MOST {
        let sentence = format!(
            "The storage takes {} of the {} of a request ({:.0} percent), with {} requests in flight on average.",
            time(device_us),
            time(await_us),
            share(device_us),
            amount(queue_size)
        );
        found.push(Finding::new("storage", sentence, &figures(device_us)));
    }
    if share(queued_us) >= NOTABLE {
        let sentence = format!(
            "Requests wait {} of {} ({:.0} percent) until they are given to the storage: it has as many as it takes or as `depth` allows, \
             or other disks of the worker are served.",
            time(queued_us),
            time(await_us),
            share(queued_us)
        );
        found.push(Finding::new("queued", sentence, &figures(queued_us)));
    }
    if share(publish_us) >= NOTABLE {
        let sentence = format!(
            "Requests wait {} of {} ({:.0} percent) after the storage, until the guest is called: the worker has much to do in a turn, or the \
             call takes long.",
            time(publish_us),
            time(await_us),
            share(publish_us)
        );
        found.push(Finding::new("publish", sentence, &figures(publish_us)));
    }
    found
}

fn one_at_a_time(evidence: &Evidence<'_>) -> Vec<Finding> {
    let IoRates { queue_size, util_percent, await_us, .. } = evidence.rates;
    let Some(util) = util_percent.filter(|util| *util >= FULL && queue_size <= ALONE) else { return Vec::new() };
    let sentence = format!(
        "The guest waits for each request before it sends the next ({} in flight on average, {util:.0} percent of the time): at {} a request \
         that is {} requests a second.",
        amount(queue_size),
        time(await_us),
        amount(requests_per_s(&evidence.rates))
    );
    vec![Finding::new(
        "one-at-a-time",
        sentence,
        &[("in_flight_requests", queue_size), ("util_percent", util), ("await_us", await_us)],
    )]
}

/// Returns the numbers of the workers that have requests of the disk, ascending.
fn workers_in_use(evidence: &Evidence<'_>) -> Vec<u32> {
    let mut workers: Vec<u32> = used_queues(evidence).map(|queue| queue.worker).collect();
    workers.sort_unstable();
    workers.dedup();
    workers
}

fn used_queues<'a>(evidence: &'a Evidence<'_>) -> impl Iterator<Item = &'a QueueRates> {
    let is_used =
        |queue: &&QueueRates| queue.rates.is_some_and(|rates| requests_per_s(&rates) > 0.0 || rates.in_flight > 0);
    evidence.queues.iter().copied().filter(is_used)
}

/// Returns the last sample of a queue.
fn stat_of<'a>(evidence: &Evidence<'a>, queue: &QueueRates) -> Option<&'a QueueStat> {
    evidence.subject.queues.iter().find(|it| (&it.role, it.queue) == (&queue.role, queue.queue))
}

/// Returns a worker's requests per second of each device, the most first.
fn requests_of_worker(report: &Report, worker: u32) -> Vec<(&str, f64)> {
    let disks = report.disks.iter().map(|disk| (disk.id.as_str(), &disk.queues));
    let devices = disks.chain(report.controllers.iter().map(|controller| (controller.id.as_str(), &controller.queues)));
    let of = |queues: &[QueueRates]| {
        let own = queues.iter().filter(|queue| queue.worker == worker);
        own.filter_map(|queue| queue.rates).map(|rates| requests_per_s(&rates)).sum::<f64>()
    };
    let mut all: Vec<(&str, f64)> =
        devices.map(|(id, queues)| (id, of(queues))).filter(|(_, rate)| *rate > 0.0).collect();
    all.sort_by(|one, other| other.1.total_cmp(&one.1));
    all
}

fn worker_busy(evidence: &Evidence<'_>) -> Vec<Finding> {
    let is_busy = |worker: &WorkerRates| {
        let turns = worker.rates.filter(|rates| rates.cpu_percent >= FULL)?;
        // A polling worker always uses its CPU: one without time left finds requests in nearly every turn.
        let all = turns.turns_per_s + turns.empty_turns_per_s;
        (all > 0.0 && 100.0 * turns.empty_turns_per_s / all < SPARE_TURNS).then_some(turns.cpu_percent)
    };
    let mut found = Vec::new();
    for number in workers_in_use(evidence) {
        let worker = evidence.report.workers.iter().find(|worker| worker.worker == number);
        let Some(cpu) = worker.and_then(is_busy) else { continue };
        let requests = requests_of_worker(evidence.report, number);
        let all: f64 = requests.iter().map(|(_, rate)| rate).sum();
        let others = requests.iter().filter(|(id, rate)| *id != evidence.subject.device && 100.0 * rate / all >= SHARE);
        let others: Vec<String> =
            others.map(|(id, rate)| format!("{id} ({:.0} percent of its requests)", 100.0 * rate / all)).collect();
        let own =
            requests.iter().find(|(id, _)| *id == evidence.subject.device).map_or(0.0, |(_, rate)| 100.0 * rate / all);
        let figures = [("worker", number.into()), ("cpu_percent", cpu), ("own_percent", own)];
        let (kind, sentence) = if others.is_empty() {
            (
                "worker-busy",
                format!(
                    "Worker {number} has no time left: it uses {cpu:.0} percent of a CPU; queues on more workers have more."
                ),
            )
        } else {
            let others = others.join(", ");
            (
                "worker-shared",
                format!("Worker {number} has no time left ({cpu:.0} percent of a CPU), and shares it with {others}."),
            )
        };
        found.push(Finding::new(kind, sentence, &figures));
    }
    found
}

fn queues_unused(evidence: &Evidence<'_>) -> Vec<Finding> {
    let (used, offered) = (used_queues(evidence).count(), evidence.subject.queue_count as usize);
    if used == 0 || used >= offered || requests_per_s(&evidence.rates) < FEW_PER_S {
        return Vec::new();
    }
    let set_up = evidence
        .subject
        .queues
        .iter()
        .filter(|queue| ["request", ""].contains(&queue.role.as_str()) && queue.load.slots > 0);
    let set_up = set_up.count();
    let why = match set_up < offered && set_up > 0 {
        true => format!("; its VMM has set up {set_up}"),
        false => String::new(),
    };
    let sentence = format!("The guest uses {used} of {offered} queues{why}.");
    let figures = [("used_queues", used as f64), ("set_up_queues", set_up as f64), ("queues", offered as f64)];
    vec![Finding::new("queues-unused", sentence, &figures)]
}

fn one_worker(evidence: &Evidence<'_>) -> Vec<Finding> {
    let (used, workers) = (used_queues(evidence).count(), workers_in_use(evidence));
    let ([worker], all) = (&workers[..], evidence.stat.workers.len()) else { return Vec::new() };
    if used < 2 || all < 2 {
        return Vec::new();
    }
    let sentence = format!("All {used} queues that the guest uses are on worker {worker} of {all}.");
    vec![Finding::new(
        "one-worker",
        sentence,
        &[("used_queues", used as f64), ("worker", (*worker).into()), ("workers", all as f64)],
    )]
}

/// Returns a sentence on the current polling of most of the guest's queues, and its reason; empty if it uses none.
fn poll_window(evidence: &Evidence<'_>) -> String {
    let states: Vec<_> = used_queues(evidence).filter_map(|queue| stat_of(evidence, queue)?.polling.as_ref()).collect();
    let often = |state: &&PollingStat| states.iter().filter(|other| other.reason == state.reason).count();
    let Some(PollingStat { reason, window_ns, timer_ns }) = states.iter().copied().max_by_key(often) else {
        return String::new();
    };
    let window = window_ns.map_or_else(|| "always open".to_owned(), |ns| format!("{} us", ns / 1000));
    let state = match (reason.as_str(), timer_ns) {
        ("expected", _) => format!("{window}, because requests come soon"),
        ("quiet", _) => "closed, because none came soon".to_owned(),
        ("cpu-wanted", Some(ns)) => {
            format!("closed, because other threads want the CPU; a timer looks every {} us", ns / 1000)
        }
        ("cpu-wanted", None) => "closed, because other threads want the CPU".to_owned(),
        _ => format!("{window}, as `poll` says"),
    };
    format!(" The window now: {state}.")
}

fn polling(evidence: &Evidence<'_>) -> Vec<Finding> {
    let IoRates { poll_percent, kicks_per_s, .. } = evidence.rates;
    let requests = requests_per_s(&evidence.rates);
    let kicked = 100.0 * kicks_per_s / requests;
    if requests < FEW_PER_S || kicked < FULL {
        return Vec::new();
    }
    let figures = [("poll_percent", poll_percent), ("kicks_per_s", kicks_per_s), ("requests_per_s", requests)];
    let found = if poll_percent >= 1.0 {
        let sentence = format!(
            "The poll window is never hit: the queues are polled for {poll_percent:.0} percent of the time, and still {kicked:.0} percent of \
             the requests come with a kick; a longer window (`poll`) catches them, a shorter one saves the CPU time.{}",
            poll_window(evidence)
        );
        Finding::new("poll-missed", sentence, &figures)
    } else {
        let sentence = format!(
            "{kicked:.0} percent of the requests wake the worker with a kick; a poll window (`poll`) makes them faster.{}",
            poll_window(evidence)
        );
        Finding::new("kicked", sentence, &figures)
    };
    vec![found]
}

fn unmerged(evidence: &Evidence<'_>) -> Vec<Finding> {
    let IoRates { reads_per_s, writes_per_s, read_merges_per_s, write_merges_per_s, queue_size, .. } = evidence.rates;
    let transfers = reads_per_s + writes_per_s;
    let bytes = (evidence.rates.read_bytes_per_s + evidence.rates.written_bytes_per_s) / transfers.max(1e-9);
    let merged = 100.0 * (read_merges_per_s + write_merges_per_s) / transfers.max(1e-9);
    let Some(merge) = evidence.subject.merge else { return Vec::new() };
    if transfers < FEW_PER_S || bytes >= SMALL || merged >= 1.0 {
        return Vec::new();
    }
    let storage = evidence.subject.storage.unwrap_or_default();
    let workers = workers_in_use(evidence).len();
    let why = if merge == "off" {
        "merge=off".to_owned()
    } else if merge == "auto" && ["null", "ram"].contains(&storage) {
        format!("storage={storage} gains nothing by it (merge=auto)")
    } else if bytes * 2.0 > evidence.subject.merge_bytes as f64 {
        format!("two of them are longer than merge-bytes={}", evidence.subject.merge_bytes)
    } else if queue_size < ALONE {
        format!("only {} are in flight on average", amount(queue_size))
    } else if workers > 1 {
        format!("their ranges do not touch, or those that do are on different ones of {workers} workers")
    } else {
        "their ranges do not touch".to_owned()
    };
    let sentence = format!("Requests of {} kB on average are not merged, because {why}.", amount(bytes / 1024.0));
    vec![Finding::new(
        "unmerged",
        sentence,
        &[("request_bytes", bytes), ("merged_percent", merged), ("in_flight_requests", queue_size)],
    )]
}

/// A disk that could do more.
fn nothing(evidence: &Evidence<'_>) -> Finding {
    let requests = requests_per_s(&evidence.rates);
    let util = evidence.rates.util_percent;
    let busy = util.map(|util| format!(", and it is busy for {util:.0} percent of the time")).unwrap_or_default();
    let sentence = format!(
        "Nothing limits it: its guest sends {} requests a second, which take {} each{busy}.",
        amount(requests),
        time(evidence.rates.await_us)
    );
    let mut figures = vec![("requests_per_s", requests), ("await_us", evidence.rates.await_us)];
    figures.extend(util.map(|util| ("util_percent", util)));
    Finding::new("nothing", sentence, &figures)
}

#[cfg(test)]
#[path = "findings_tests.rs"]
mod tests;
