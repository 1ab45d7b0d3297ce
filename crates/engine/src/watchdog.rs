//! Logs storage that hangs: a request that does not complete, or a worker that does not respond because it waits for
//! storage in a system call. Once for each hang, and once when it is over.

use std::collections::HashMap;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel, sync_channel};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use mqblk_core::thread::spawn;

use crate::engine::Engine;
use crate::errors::DiskHealth;
use crate::mailbox::Mailbox;
use crate::worker::{Age, Worker};
use crate::workers::WorkerList;

/// Checks within the configured time, and the bounds of the pause between two.
const CHECKS: u32 = 4;
const SHORTEST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// A thread that checks the workers. Ends when it is dropped.
#[derive(Debug)]
pub struct Watchdog {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Engine {
    /// Watches all disks: a request that has been in flight for `long` is logged. Parked requests are not: the stop of
    /// their disk was logged.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub fn watch(&self, long: Duration) -> std::io::Result<Watchdog> {
        let list = Arc::downgrade(self.worker_list());
        let mut monitor = Monitor { long, list, workers: Vec::new(), hung: HashMap::new() };
        let (stop, stopped) = channel();
        let pause = (long / CHECKS).clamp(SHORTEST_PAUSE, LONGEST_PAUSE);
        let thread = spawn("watchdog", move || {
            while stopped.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
                monitor.check();
            }
        })?;
        Ok(Watchdog { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A worker, and the query without a reply.
struct WatchedWorker {
    mailbox: Mailbox<Worker>,
    pending: Option<(Instant, Receiver<Vec<Age>>)>,
    stuck: bool,
}

impl WatchedWorker {
    fn new(mailbox: Mailbox<Worker>) -> WatchedWorker {
        WatchedWorker { mailbox, pending: None, stuck: false }
    }

    /// Queries the ages of the worker's requests. `None`: it has not replied within 20 ms, or has ended.
    fn query(&mut self, number: usize, long: Duration) -> Option<Vec<Age>> {
        const REPLY_TIME: Duration = Duration::from_millis(20);
        if self.pending.is_none() {
            let (reply, wait) = sync_channel(1);
            let sent = self.mailbox.send(Box::new(move |worker: &mut Worker| {
                let _ = reply.send(worker.ages());
            }));
            sent.ok()?;
            self.pending = Some((Instant::now(), wait));
        }
        let (since, wait) = self.pending.as_ref()?;
        let reply = match wait.try_recv() {
            Err(TryRecvError::Empty) => wait.recv_timeout(REPLY_TIME).ok(),
            reply => reply.ok(),
        };
        let waited = since.elapsed();
        if reply.is_none() && waited >= long && !self.stuck {
            self.stuck = true;
            let waited_s = waited.as_secs();
            tracing::warn!(
                worker = number,
                waited_s,
                "a worker does not respond: it waits for storage in a system call"
            );
        }
        if reply.is_some() {
            self.pending = None;
            if std::mem::take(&mut self.stuck) {
                tracing::info!(worker = number, waited_s = waited.as_secs(), "the worker responds again");
            }
        }
        reply
    }
}

/// The watchdog's state.
struct Monitor {
    long: Duration,
    list: Weak<WorkerList>,
    workers: Vec<WatchedWorker>,
    /// Disks with a request that hangs, by the address of their health, and the start of the hang.
    hung: HashMap<usize, (Arc<DiskHealth>, Instant)>,
}

impl Monitor {
    /// Watches the workers that there are now.
    fn follow_workers(&mut self) {
        let Some(list) = self.list.upgrade() else { return };
        list.follow(&mut self.workers, |watched| &watched.mailbox, WatchedWorker::new);
    }

    fn check(&mut self) {
        self.follow_workers();
        let mut ages: HashMap<usize, Age> = HashMap::new();
        let mut all = true;
        for (number, worker) in self.workers.iter_mut().enumerate() {
            let Some(found) = worker.query(number, self.long) else {
                all = false;
                continue;
            };
            for age in found {
                let key = Arc::as_ptr(&age.health).addr();
                match ages.get_mut(&key) {
                    Some(other) => {
                        other.oldest = other.oldest.max(age.oldest);
                        other.in_flight += age.in_flight;
                    }
                    None => _ = ages.insert(key, age),
                }
            }
        }
        self.log_changes(&ages, all);
    }

    /// Logs disks that began or ceased to hang. `all`: all workers have replied, so that a disk without an age has
    /// nothing in flight.
    fn log_changes(&mut self, ages: &HashMap<usize, Age>, all: bool) {
        for (key, age) in ages.iter().filter(|(_, age)| age.oldest >= self.long && !age.health.is_stopped()) {
            if !self.hung.contains_key(key) {
                let since = Instant::now().checked_sub(age.oldest).unwrap_or_else(Instant::now);
                self.hung.insert(*key, (Arc::clone(&age.health), since));
                tracing::warn!(
                    disk = age.health.name(),
                    oldest_ms = age.oldest.as_millis() as u64,
                    in_flight = age.in_flight,
                    "the storage hangs: it has not completed a request for long"
                );
            }
        }
        let (long, hung) = (self.long, &mut self.hung);
        hung.retain(|key, (health, since)| {
            let age = ages.get(key);
            let ended = age.map_or(all, |age| age.oldest < long || age.health.is_stopped());
            if ended {
                let hung_ms = since.elapsed().as_millis() as u64;
                tracing::info!(disk = health.name(), hung_ms, "the storage answers again");
            }
            !ended
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mqblk_uring::UringOptions;

    use crate::engine::EngineOptions;

    #[test]
    fn a_worker_that_waits_in_a_system_call_is_stuck_until_it_replies() {
        let options = EngineOptions { workers: 1, pin: Vec::new(), context: UringOptions::default() };
        let engine = Engine::start(&options).unwrap();
        let mailbox = engine.mailboxes()[0].clone();
        let mut watched = WatchedWorker::new(mailbox.clone());
        let long = Duration::from_millis(1);
        while watched.query(0, long).is_none() {}
        let (release, wait) = channel::<()>();
        mailbox.send(Box::new(move |_| _ = wait.recv())).unwrap();
        while !watched.stuck {
            watched.query(0, long);
        }
        assert!(watched.query(0, long).is_none());
        drop(release);
        while watched.query(0, long).is_none() {}
        assert!(!watched.stuck && watched.pending.is_none());
    }
}
