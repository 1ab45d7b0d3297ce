//! Disks and LUNs that cannot be served now: each is *out*, with the reason, and is retried while all others are
//! served.
//!
//! A disk is out if the host refuses something that its settings name ([`ConfigError::is_from_host`]): a missing or
//! locked file, an image of another format, a server that does not answer. Settings that are wrong on any host are the
//! operator's mistake, and keep the daemon from starting.

use std::sync::Arc;
use std::time::{Duration, Instant};

use mqblk_core::lock::RankedMutex;
use mqblk_core::settings::Settings;
use mqblk_core::thread::spawn_scoped;

use crate::change::ChangeSource;
use crate::config_error::ConfigError;
use crate::file_use::FileUse;

/// The time between a failure and the next try: doubled after each, up to the longest.
const FIRST_WAIT: Duration = Duration::from_secs(1);
const LONGEST_WAIT: Duration = Duration::from_secs(60);
/// Number of threads that open storage, so that servers that do not answer take their timeout once, not once each.
const OPENED_AT_ONCE: usize = 16;

/// A disk or LUN that cannot be served now.
#[derive(Clone, Debug)]
pub struct OutDisk {
    /// Its id.
    pub id: String,
    /// The word of its interface.
    pub interface: &'static str,
    /// The keys with which [`DaemonState::add_disk`](crate::DaemonState::add_disk) serves it.
    pub settings: Settings,
    /// The source of its addition.
    pub origin: ChangeSource,
    /// The files that it needs while it is served. The sandbox allows no others.
    pub files: Vec<FileUse>,
    /// The reason.
    pub why: String,
    /// Begin of being out.
    pub since: Instant,
    /// Number of tries.
    pub tries: u32,
    /// Time of the next try.
    pub next: Instant,
}

impl OutDisk {
    /// Returns the record of a disk that `why` keeps out from now on.
    pub fn new(
        id: String,
        interface: &'static str,
        settings: Settings,
        origin: ChangeSource,
        why: &dyn std::error::Error,
    ) -> OutDisk {
        let since = Instant::now();
        let files = Vec::new();
        OutDisk {
            id,
            interface,
            settings,
            origin,
            files,
            why: why.to_string(),
            since,
            tries: 1,
            next: since + FIRST_WAIT,
        }
    }

    /// Logs that it is out, with the reason.
    pub(crate) fn log(&self) {
        let OutDisk { id, why, .. } = self;
        tracing::error!(disk = id, "not served: {why}; it is tried again, at once by `mqblk disk retry {id}`");
    }

    /// Returns the time until the next try.
    fn wait(&self) -> Duration {
        LONGEST_WAIT.min(FIRST_WAIT * 2_u32.saturating_pow(self.tries.saturating_sub(1).min(16)))
    }
}

/// Decides about disks that cannot be opened while a configuration is opened.
#[derive(Debug, Default)]
pub struct Admission {
    /// True if a disk that cannot be served keeps the daemon from starting.
    pub strict: bool,
    /// The disks that are out.
    pub out: Vec<OutDisk>,
    /// The error of the first one.
    pub first: Option<ConfigError>,
    /// The workers of their queues.
    pub freed_queues: Vec<u16>,
}

impl Admission {
    /// Returns the opened disk; `None` if it is out: `disk` describes it.
    ///
    /// # Errors
    /// If its settings are wrong, or all disks must be served.
    pub fn admit<T>(
        &mut self,
        opened: Result<T, ConfigError>,
        origin: ChangeSource,
        disk: impl FnOnce(&ConfigError) -> OutDisk,
    ) -> Result<Option<T>, ConfigError> {
        match opened {
            Ok(opened) => Ok(Some(opened)),
            Err(error) if origin == ChangeSource::Configuration && (self.strict || !error.is_from_host()) => Err(error),
            Err(error) => {
                self.out.push(disk(&error));
                self.first.get_or_insert(error);
                Ok(None)
            }
        }
    }
}

/// The disks of a running daemon that are out.
#[derive(Debug)]
pub struct OutDisks(RankedMutex<Vec<OutDisk>>);

impl OutDisks {
    /// Returns these disks.
    pub fn new(disks: Vec<OutDisk>) -> Arc<OutDisks> {
        Arc::new(OutDisks(RankedMutex::leaf(disks)))
    }

    /// Returns all disks.
    pub fn list(&self) -> Vec<OutDisk> {
        self.0.lock().clone()
    }

    /// Returns the disk of this id.
    pub fn find(&self, id: &str) -> Option<OutDisk> {
        self.0.lock().iter().find(|disk| disk.id == id).cloned()
    }

    /// Adds a disk.
    pub(crate) fn add(&self, disk: OutDisk) {
        disk.log();
        self.0.lock().push(disk);
    }

    /// Removes a disk: it is served, or no longer wanted.
    pub fn remove(&self, id: &str) -> Option<OutDisk> {
        let mut disks = self.0.lock();
        let at = disks.iter().position(|disk| disk.id == id)?;
        Some(disks.remove(at))
    }

    /// Records another failed try. Logs the reason if it is new.
    pub(crate) fn failed(&self, id: &str, why: &str) {
        let mut disks = self.0.lock();
        let Some(disk) = disks.iter_mut().find(|disk| disk.id == id) else { return };
        disk.tries = disk.tries.saturating_add(1);
        disk.next = Instant::now() + disk.wait();
        let is_new = disk.why != why;
        why.clone_into(&mut disk.why);
        drop(disks);
        if is_new {
            tracing::error!(disk = id, "still not served: {why}");
        }
    }

    /// Returns the ids of those whose next try is due.
    pub(crate) fn due(&self, now: Instant) -> Vec<String> {
        self.0.lock().iter().filter(|disk| disk.next <= now).map(|disk| disk.id.clone()).collect()
    }
}

/// Opens all `items`, some in parallel. The results are in the order of `items`.
pub fn open_all<T: Send, R: Send>(items: Vec<T>, open: impl Fn(T) -> R + Sync) -> Vec<R> {
    let threads = OPENED_AT_ONCE.min(items.len());
    if threads < 2 {
        return items.into_iter().map(open).collect();
    }
    let (waiting, opened) = (RankedMutex::leaf(items.into_iter().enumerate()), RankedMutex::leaf(Vec::new()));
    let next = || waiting.lock().next();
    let work = || {
        while let Some((index, item)) = next() {
            let result = open(item);
            opened.lock().push((index, result));
        }
    };
    std::thread::scope(|scope| {
        // If a thread cannot be started, the others do its work.
        (1..threads).for_each(|_| drop(spawn_scoped(scope, "open-disk", work)));
        work();
    });
    let mut opened = std::mem::take(&mut *opened.lock());
    opened.sort_unstable_by_key(|(index, _)| *index);
    opened.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk(id: &str) -> OutDisk {
        let settings = Settings::new("disk");
        let why = settings.refused("path", "nothing", "a file");
        OutDisk::new(id.to_owned(), "virtio-blk", settings, ChangeSource::Configuration, &why)
    }

    #[test]
    fn what_the_host_refuses_is_out_and_what_is_wrong_is_an_error() {
        let refused = || ConfigError::Setting(Settings::new("disk").refused("path", "nothing", "a file"));
        let wrong = || ConfigError::Setting(Settings::new("disk").error("pth", "an unknown key", "path"));
        let admit = |error, origin, strict| {
            let mut admission = Admission { strict, ..Admission::default() };
            let admitted = admission.admit(Err::<(), _>(error), origin, |_| disk("a"));
            admitted.map(|opened| (opened.is_none(), admission.out.len())).map_err(|error| error.to_string())
        };
        assert_eq!(admit(refused(), ChangeSource::Configuration, false), Ok((true, 1)));
        assert!(admit(refused(), ChangeSource::Configuration, true).is_err());
        assert!(admit(wrong(), ChangeSource::Configuration, false).is_err());
        // A disk added at run time never keeps the configuration from being served.
        assert_eq!(admit(wrong(), ChangeSource::RunTime, true), Ok((true, 1)));
    }

    #[test]
    fn waits_grow_up_to_the_longest() {
        let out = OutDisks::new(vec![disk("a"), disk("b")]);
        let mut waits = Vec::new();
        for _ in 0..40 {
            out.failed("a", "still");
            let now = out.find("a").unwrap();
            waits.push(now.wait());
        }
        assert!(waits.is_sorted() && waits[0] == 2 * FIRST_WAIT && *waits.last().unwrap() == LONGEST_WAIT, "{waits:?}");
        let later = Instant::now() + FIRST_WAIT;
        assert_eq!(out.due(later), ["b"]);
        assert_eq!(out.remove("b").map(|disk| disk.why), Some("disk: path: found nothing, expected a file".to_owned()));
        assert!(out.due(later).is_empty() && out.remove("b").is_none());
    }

    #[test]
    fn results_are_in_order() {
        assert_eq!(open_all((0..100).collect(), |number| number * 2), (0..200).step_by(2).collect::<Vec<_>>());
        assert_eq!(open_all(vec![1], |number| number), [1]);
    }
}
