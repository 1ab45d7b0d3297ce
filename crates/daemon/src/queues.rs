//! The keys of a device's queues: their workers and polling.

use std::time::Duration;

use mqblk_core::settings::{Key, SettingError, Settings};
use mqblk_engine::{Coalesce, PollPolicy, QueuePlacement, QueuePolicy, QueueSettings};
use toml::Value;

use crate::pair::{Pair, string};

/// The number of virtqueues of a disk.
pub static QUEUES: Key = Key::number("queues", 1, MAX_QUEUES as u64)
    .alias("num_queues")
    .otherwise("the number of CPUs that the process may use, at least 32")
    .about("virtqueues offered", "The guest may use fewer, and QEMU refuses more. Also `num_queues`.");
/// The least default number. QEMU asks for a queue for each of its guest's CPUs: with a vhost-user-blk device that is
/// offered fewer it ends, and 10.0 does not report that of a controller. An unused queue costs next to nothing.
pub const DEFAULT_QUEUES: u16 = 32;
/// The largest ring. Since 10.0 QEMU sets up each vhost-user ring with 1024 entries, regardless of its configuration,
/// and supports no larger ones.
pub static QUEUE_SIZE: Key = Key::text("queue-size", "N", "a power of two from 2 to 32768").alias("queue_size").default("1024").about(
    "the largest ring accepted: a power of two from 2 to 32768",
    "Also `queue_size`. The VMM chooses the size of its rings (QEMU 7.2: its `queue-size`, 128; QEMU 10.0: always 1024), and memory is taken for that \
     size. Below 128 it also limits the segments of a request, for guests without indirect descriptors.",
);
/// The worker of each queue.
pub static QUEUE_MAP: Key = Key::text("queue-map", "Q:W,...", "`QUEUE:WORKER,...` with each queue once")
    .otherwise("round-robin over all disks")
    .live()
    .about("the worker of each queue", "Queues [move](admin.md#queuemove) one after the other while the guest works.");
/// The polling of a queue.
pub static POLL: Key = Key::text("poll", "POLICY", "`off`, `adaptive[:<max us>]`, `<us>`, `busy`")
    .default("adaptive")
    .live()
    .about(
        "polling of a queue before the worker sleeps: off, adaptive[:MAX US], US (always this many microseconds), or busy (never sleep)",
        "See [polling](#polling).",
    );
/// The option of cloud-hypervisor's vhost_user_block.
pub static POLL_QUEUE: Key = Key::switch("poll_queue")
    .otherwise("as `poll` says")
    .live()
    .about("on: the default of poll; off: poll=off", "The option of cloud-hypervisor's vhost_user_block.");
/// The longest time that a call is deferred.
pub static COALESCE_US: Key = Key::number("coalesce-us", 0, 10_000).placeholder("US").default("0").live().about(
    "defer calls to the guest for at most this many microseconds while more of its requests are in flight",
    "See [calls](#calls). A change sends a deferred call.",
);
/// The number of completions that ends the deferral of a call.
pub static COALESCE_MAX: Key = Key::number("coalesce-max", 0, 65_535)
    .default("0")
    .live()
    .about("call as soon as this many completions wait; 0: any number may wait. Needs coalesce-us", "");
/// The keys of queues that all interfaces have.
pub const KEYS: &[&Key] = &[&QUEUE_MAP, &POLL, &POLL_QUEUE, &COALESCE_US, &COALESCE_MAX];
/// Maximum number of virtqueues of a device in vhost-user, and of workers of the process.
pub const MAX_QUEUES: u16 = 256;

/// The worker of each request queue of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct QueueMap {
    /// The text of `queue-map`, if it was given.
    requested: Option<String>,
    workers: Vec<u16>,
}

impl QueueMap {
    /// Takes `queue-map`. The queues have no workers yet.
    pub fn take(settings: &mut Settings) -> QueueMap {
        QueueMap { requested: settings.text(&QUEUE_MAP), workers: Vec::new() }
    }

    /// Returns true if `queue-map` was given.
    pub fn is_requested(&self) -> bool {
        self.requested.is_some()
    }

    /// Forgets the value of `queue-map`.
    pub fn forget_request(&mut self) {
        self.requested = None;
    }

    /// Assigns `queues` queues as in `queue-map`, else as `placement` chooses.
    ///
    /// # Errors
    /// If `queue-map` is invalid.
    pub fn assign(
        &mut self,
        settings: &Settings,
        queues: u16,
        placement: &mut QueuePlacement,
    ) -> Result<(), SettingError> {
        self.workers = match &self.requested {
            Some(text) => parse(settings, text, queues, placement.workers())?,
            None => placement.round_robin(queues),
        };
        placement.place(&self.workers);
        Ok(())
    }

    /// Assigns all queues to one worker, by default that of the first queue, because a disk's storage has one channel.
    ///
    /// # Errors
    /// If `queue-map` conflicts.
    pub fn keep_on_one_worker(&mut self, settings: &Settings, worker: Option<u16>) -> Result<(), SettingError> {
        let Some(worker) = worker.or_else(|| self.workers.first().copied()) else { return Ok(()) };
        if self.is_on(worker) {
            return Ok(());
        }
        if let Some(text) = &self.requested {
            let expected = format!("worker {worker} for all queues: this storage serves one connection at a time");
            return Err(settings.error(&QUEUE_MAP, format!("{text:?}"), expected));
        }
        tracing::info!(
            "{}: all queues are on worker {worker}: the storage serves one connection at a time",
            settings.subject()
        );
        self.workers.fill(worker);
        Ok(())
    }

    /// Returns true if all queues are on this worker.
    pub fn is_on(&self, worker: u16) -> bool {
        self.workers.iter().all(|one| *one == worker)
    }

    /// Returns the worker of each queue.
    pub fn workers(&self) -> &[u16] {
        &self.workers
    }

    /// Returns `queue-map` with its value, if it was given. A printed default would fix the workers of a configuration
    /// made from the output.
    pub fn pair(&self) -> Option<Pair> {
        self.is_requested().then(|| map_pair(&self.workers))
    }

    /// Returns the worker of each queue, for the engine.
    pub fn to_engine(&self) -> Vec<usize> {
        self.workers.iter().map(|worker| usize::from(*worker)).collect()
    }
}

impl From<Vec<u16>> for QueueMap {
    fn from(workers: Vec<u16>) -> QueueMap {
        QueueMap { requested: None, workers }
    }
}

/// Takes a device's polling and the coalescing of its calls. Keys that are not given keep the value of `current`.
///
/// # Errors
/// If a value is invalid.
pub fn take_policy(settings: &mut Settings, current: QueuePolicy) -> Result<QueuePolicy, SettingError> {
    let (poll, coalesce) = (take_poll(settings, current.poll)?, take_coalesce(settings, current.coalesce)?);
    Ok(QueuePolicy { poll, coalesce })
}

fn take_poll(settings: &mut Settings, current: PollPolicy) -> Result<PollPolicy, SettingError> {
    let switch = settings.switch(&POLL_QUEUE)?;
    let Some(text) = settings.text(&POLL) else {
        return Ok(match switch {
            None => current,
            Some(false) => PollPolicy::Off,
            Some(true) => PollPolicy::default(),
        });
    };
    if let Some(on) = switch {
        let found = format!("{text:?}, and {POLL_QUEUE}={on}");
        return Err(settings.error(&POLL, found, "one of the two"));
    }
    text.parse().map_err(|expected: String| settings.error(&POLL, format!("{text:?}"), expected))
}

/// Takes the coalescing of calls. Without a time there is no number.
fn take_coalesce(settings: &mut Settings, current: Coalesce) -> Result<Coalesce, SettingError> {
    let us = settings.number(&COALESCE_US)?;
    let delay = us.map_or(current.delay, Duration::from_micros);
    let answers = settings.number(&COALESCE_MAX)?;
    if delay.is_zero() && answers.is_some_and(|answers| answers > 0) {
        let found = format!("a number of completions, but {COALESCE_US} is 0");
        return Err(settings.error(
            &COALESCE_MAX,
            found,
            format!("{COALESCE_US} with it: the longest time that a call is deferred"),
        ));
    }
    let answers = answers.map_or(current.answers, |answers| answers as u32);
    Ok(Coalesce { delay, answers: if delay.is_zero() { 0 } else { answers } })
}

/// Returns the keys of polling and of coalescing with their values.
pub fn policy_pairs(policy: QueuePolicy) -> Vec<Pair> {
    let QueuePolicy { poll, coalesce } = policy;
    vec![
        (POLL.name, string(&poll.to_string())),
        (COALESCE_US.name, Value::Integer(coalesce.delay.as_micros() as i64)),
        (COALESCE_MAX.name, Value::Integer(coalesce.answers.into())),
    ]
}

/// Returns the keys of queues that are served, with their values.
pub fn queue_settings_pairs(queues: &QueueSettings) -> Vec<Pair> {
    std::iter::once(current_map_pair(queues)).chain(policy_pairs(queues.policy)).collect()
}

/// Returns `queue-map` of queues that are served, with its value.
pub fn current_map_pair(queues: &QueueSettings) -> Pair {
    map_pair(&workers_of(queues))
}

/// Returns the worker of each queue that is served.
pub fn workers_of(queues: &QueueSettings) -> Vec<u16> {
    queues.map.iter().map(|worker| *worker as u16).collect()
}

/// Takes `queue-map` of a device with `queues` queues. `None`: it was not given.
///
/// # Errors
/// If the value is invalid.
pub fn take_queue_map(settings: &mut Settings, queues: u16, workers: u16) -> Result<Option<Vec<u16>>, SettingError> {
    settings.text(&QUEUE_MAP).map(|text| parse(settings, &text, queues, workers)).transpose()
}

/// Parses `QUEUE:WORKER,...`. Each of the `queues` queues must appear once.
///
/// # Errors
/// If the text has another form, names a queue or worker that does not exist, or omits a queue.
fn parse(settings: &Settings, text: &str, queues: u16, workers: u16) -> Result<Vec<u16>, SettingError> {
    let mut map: Vec<Option<u16>> = vec![None; usize::from(queues)];
    for pair in text.split(',') {
        let numbers = pair.split_once(':').and_then(|(queue, worker)| Some((number(queue)?, number(worker)?)));
        let Some((queue, worker)) = numbers else {
            return Err(settings.error(
                &QUEUE_MAP,
                format!("{pair:?}"),
                "QUEUE:WORKER pairs separated by commas, such as 0:0,1:1",
            ));
        };
        if worker >= workers {
            return Err(settings.error(
                &QUEUE_MAP,
                format!("worker {worker}"),
                format!("workers from 0 to {}", workers - 1),
            ));
        }
        match map.get_mut(usize::from(queue)) {
            None => {
                return Err(settings.error(
                    &QUEUE_MAP,
                    format!("queue {queue}"),
                    format!("queues from 0 to {}", queues - 1),
                ));
            }
            Some(Some(_)) => return Err(settings.error(&QUEUE_MAP, format!("queue {queue} twice"), "each queue once")),
            Some(slot) => *slot = Some(worker),
        }
    }
    if let Some(queue) = map.iter().position(Option::is_none) {
        return Err(settings.error(
            &QUEUE_MAP,
            format!("no worker for queue {queue}"),
            format!("one for each of the {queues} queues"),
        ));
    }
    Ok(map.into_iter().flatten().collect())
}

fn number(text: &str) -> Option<u16> {
    text.parse().ok().filter(|_| text.bytes().all(|byte| byte.is_ascii_digit()))
}

fn map_pair(map: &[u16]) -> Pair {
    (QUEUE_MAP.name, string(&display(map)))
}

/// Formats the map for [`parse`].
fn display(map: &[u16]) -> String {
    let pairs: Vec<String> = map.iter().enumerate().map(|(queue, worker)| format!("{queue}:{worker}")).collect();
    pairs.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_are_assigned_in_turns_or_as_the_map_says() {
        let mut placement = QueuePlacement::new(2);
        let mut assign = |map: Option<&str>, queues| {
            let mut settings = Settings::new("disk");
            map.map_or(Ok(()), |map| settings.insert(&QUEUE_MAP, map)).unwrap();
            let mut map = QueueMap::take(&mut settings);
            map.assign(&settings, queues, &mut placement).unwrap();
            (map.workers().to_vec(), map.pair().map(|(_, text)| text))
        };
        assert_eq!(assign(None, 1), (vec![0], None));
        assert_eq!(assign(None, 2), (vec![1, 0], None));
        assert_eq!(assign(Some("1:0,0:1"), 2), (vec![1, 0], Some(string("0:1,1:0"))));
    }

    #[test]
    fn maps_round_trip() {
        let settings = Settings::new("disk");
        for (text, queues, workers) in [("0:0", 1, 1), ("0:1,1:0", 2, 2), ("0:0,1:0,2:3", 3, 4)] {
            assert_eq!(display(&parse(&settings, text, queues, workers).unwrap()), text);
        }
        assert_eq!(parse(&settings, "1:0,0:1", 2, 2).unwrap(), [1, 0]);
    }
}
