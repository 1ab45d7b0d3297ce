//! Loads that run while their backend is ended, and how often it is.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use mqblk_driver::Waker;
use mqblk_test_bounds::Bound;
use rand::RngExt;

use super::load::{CrashLoad, LoadControl, LoadHistory};
use super::stats::print_uncaptured;
use crate::load_queues::DeviceQueues;

/// A request that takes longer counts as hung.
pub(super) const HANG_TIMEOUT: Bound = Bound::seconds(90);

/// Number of kills and stops of a backend.
#[derive(Clone, Copy, Debug)]
pub struct KillPlan {
    /// SIGKILLs.
    pub kills: u32,
    /// SIGTERMs.
    pub stops: u32,
    /// Longest pause between two of them in milliseconds.
    pub max_pause_ms: u64,
}

impl KillPlan {
    /// Returns 100 kills and 50 stops if `MQBLK_CRASH=full`, else a tenth.
    pub fn usual() -> KillPlan {
        match is_full_run() {
            true => KillPlan { kills: 100, stops: 50, max_pause_ms: 60 },
            false => KillPlan { kills: 10, stops: 5, max_pause_ms: 60 },
        }
    }

    /// Returns a fifth of the kills and stops if `MQBLK_CRASH=full`, else a few: for slow requests.
    pub fn slow() -> KillPlan {
        match is_full_run() {
            true => KillPlan { kills: 20, stops: 10, max_pause_ms: 100 },
            false => KillPlan { kills: 4, stops: 2, max_pause_ms: 100 },
        }
    }
}

/// Returns true if `MQBLK_CRASH=full`.
pub fn is_full_run() -> bool {
    std::env::var("MQBLK_CRASH").is_ok_and(|value| value == "full")
}

/// Returns the seed of a run: `MQBLK_CRASH_SEED`, or a random one. Prints it.
pub fn seed() -> u64 {
    let given = std::env::var("MQBLK_CRASH_SEED").ok().map(|text| text.parse().expect("MQBLK_CRASH_SEED: a number"));
    let seed = given.unwrap_or_else(|| rand::rng().random_range(0..1 << 32));
    print_uncaptured(&format!("MQBLK_CRASH_SEED={seed}"));
    seed
}

/// A running load.
pub struct RunningLoad<P> {
    shared: Arc<LoadControl>,
    waker: Waker,
    thread: Option<JoinHandle<(LoadHistory, P)>>,
    name: String,
}

impl<P: DeviceQueues + Send + 'static> RunningLoad<P> {
    /// Starts a load in its thread.
    ///
    /// # Panics
    /// When no thread can be started.
    pub fn start(name: &str, port: P, history: LoadHistory, seed: u64) -> RunningLoad<P> {
        let shared = Arc::new(LoadControl::default());
        let mut load = CrashLoad::new(name, port, history, &shared, seed);
        let waker = load.waker();
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || load.run());
        RunningLoad { shared, waker, thread: Some(thread.expect("a thread")), name: name.to_owned() }
    }

    /// Returns the number of completions so far.
    pub fn completed(&self) -> u64 {
        self.shared.completed.load(Ordering::Relaxed)
    }

    /// Waits until `done` returns true. Panics if the load has panicked.
    fn wait_until(&mut self, mut done: impl FnMut(&RunningLoad<P>) -> bool) {
        let mut last = (self.completed(), Instant::now());
        while !done(self) {
            if self.thread.as_ref().is_some_and(JoinHandle::is_finished) {
                self.join();
                panic!("{}: the load has ended by itself", self.name);
            }
            if self.completed() != last.0 {
                last = (self.completed(), Instant::now());
            }
            if HANG_TIMEOUT.is_exceeded_since(last.1) {
                self.shared.hangs.store(true, Ordering::Relaxed);
                self.waker.wake();
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits for `more` completions.
    ///
    /// # Panics
    /// On timeout, or when a completion is wrong.
    pub fn wait_completions(&mut self, more: u64) {
        let until = self.completed() + more;
        self.wait_until(|load| load.completed() >= until);
    }

    fn join(&mut self) -> (LoadHistory, P) {
        let joined = self.thread.take().expect("a load that runs").join();
        // The thread has printed the message.
        joined.unwrap_or_else(|_| panic!("{}: the load has failed", self.name))
    }

    fn end(mut self) -> (LoadHistory, P) {
        let mut last = (self.completed(), Instant::now());
        while !self.thread.as_ref().is_some_and(JoinHandle::is_finished) {
            // Also wakes a wait that began before `die` was set.
            if self.shared.die.load(Ordering::Relaxed) {
                self.waker.wake();
            }
            if self.completed() != last.0 {
                last = (self.completed(), Instant::now());
            }
            if HANG_TIMEOUT.is_exceeded_since(last.1) {
                self.shared.hangs.store(true, Ordering::Relaxed);
                self.waker.wake();
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        self.join()
    }

    /// Waits for the requests in flight, then ends the load.
    ///
    /// # Panics
    /// When the load has failed.
    pub fn finish(self) -> (LoadHistory, P) {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.end()
    }

    /// Ends the load with requests in flight, which are never reaped.
    ///
    /// # Panics
    /// When the load has failed.
    pub fn die(self) -> (LoadHistory, P) {
        self.shared.die.store(true, Ordering::Relaxed);
        self.end()
    }
}

/// Returns the number of replayed requests in the log.
pub fn replayed_requests(log: &str) -> u64 {
    let number = |line: &str, key: &str| -> Option<u64> {
        line.split(key).nth(1)?.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
    };
    log.lines()
        .filter_map(|line| match line.contains("replaying unanswered requests") {
            true => number(line, "requests="),
            false => number(line, "replayed="),
        })
        .sum()
}

/// Drops a file from the host's page cache, after writing it back.
pub fn drop_page_cache(path: &std::path::Path) {
    if let Ok(file) = std::fs::File::open(path) {
        let _ = file.sync_data();
        let _ = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed);
    }
}
