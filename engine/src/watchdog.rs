//! Tells in the log of storage that hangs: of a request that does not end, and of a worker that does not answer because it waits for
//! the storage in a system call. Once for each hang, and once when it is over.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::engine::Engine;
use crate::errors::DiskHealth;
use crate::mailbox::Mailbox;
use crate::worker::Worker;

/// How often it looks: so many times within the time that is long, but not more often and not less.
const LOOKS: u32 = 4;
const OFTEN: Duration = Duration::from_millis(50);
const SELDOM: Duration = Duration::from_secs(5);

/// A thread that looks at the workers. Ends when it is dropped.
#[derive(Debug)]
pub struct Watchdog {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// The oldest request of a disk that one worker has.
pub(crate) struct Age {
    pub(crate) health: Arc<DiskHealth>,
    pub(crate) oldest: Duration,
    pub(crate) in_flight: usize,
}

impl Engine {
    /// Watches all disks: a request that has been in flight for `long` is told of. Requests that are parked are not: their disk
    /// has told of that.
    ///
    /// # Errors
    /// When there is no thread.
    pub fn watch(&self, long: Duration) -> std::io::Result<Watchdog> {
        let workers = self.mailboxes().map(|mailbox| Watched { mailbox: mailbox.clone(), asked: None, stuck: false });
        let mut eye = Eye { long, workers: workers.collect(), hung: HashMap::new() };
        let (stop, stopped) = channel();
        let pause = (long / LOOKS).clamp(OFTEN, SELDOM);
        let thread = std::thread::Builder::new().name("watchdog".to_owned()).spawn(move || {
            while stopped.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
                eye.look();
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

/// A worker, and what it was asked and has not answered.
struct Watched {
    mailbox: Mailbox,
    asked: Option<(Instant, Receiver<Vec<Age>>)>,
    stuck: bool,
}

impl Watched {
    /// What it answers within a moment. `None`: it has not, or is gone.
    fn ask(&mut self, number: usize, long: Duration) -> Option<Vec<Age>> {
        const MOMENT: Duration = Duration::from_millis(20);
        if self.asked.is_none() {
            let (answer, wait) = sync_channel(1);
            // A worker with a full mailbox is asked next time: whoever filled it waits for it, too.
            let asked = self.mailbox.try_send(Box::new(move |worker: &mut Worker| {
                let _ = answer.send(worker.ages());
            }));
            asked.ok()?;
            self.asked = Some((Instant::now(), wait));
        }
        let (since, wait) = self.asked.as_ref()?;
        let answer = match wait.try_recv() {
            Err(TryRecvError::Empty) => wait.recv_timeout(MOMENT).ok(),
            answer => answer.ok(),
        };
        let waited = since.elapsed();
        if answer.is_none() && waited >= long && !self.stuck {
            self.stuck = true;
            let waited_s = waited.as_secs();
            tracing::warn!(
                worker = number,
                waited_s,
                "a worker does not answer: it waits for storage in a system call"
            );
        }
        if answer.is_some() {
            self.asked = None;
            if std::mem::take(&mut self.stuck) {
                tracing::info!(worker = number, waited_s = waited.as_secs(), "the worker answers again");
            }
        }
        answer
    }
}

/// What is known of the disks.
struct Eye {
    long: Duration,
    workers: Vec<Watched>,
    /// Disks with a request that hangs, by address, and since when.
    hung: HashMap<usize, (Arc<DiskHealth>, Instant)>,
}

impl Eye {
    fn look(&mut self) {
        let mut ages: HashMap<usize, Age> = HashMap::new();
        let mut all = true;
        for (number, worker) in self.workers.iter_mut().enumerate() {
            let Some(found) = worker.ask(number, self.long) else {
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
        self.judge(&ages, all);
    }

    /// `all`: all workers have answered, so that a disk that is missing has nothing in flight.
    fn judge(&mut self, ages: &HashMap<usize, Age>, all: bool) {
        for (key, age) in ages.iter().filter(|(_, age)| age.oldest >= self.long && !age.health.is_stopped()) {
            if !self.hung.contains_key(key) {
                let since = Instant::now().checked_sub(age.oldest).unwrap_or_else(Instant::now);
                self.hung.insert(*key, (Arc::clone(&age.health), since));
                tracing::warn!(
                    disk = age.health.name(),
                    oldest_ms = age.oldest.as_millis() as u64,
                    in_flight = age.in_flight,
                    "the storage hangs: it has not ended a request for long"
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
    fn a_worker_that_waits_in_a_system_call_is_stuck_until_it_answers() {
        let options = EngineOptions { workers: 1, pin: Vec::new(), context: UringOptions::default() };
        let engine = Engine::start(&options).unwrap();
        let mailbox = engine.mailboxes().next().unwrap().clone();
        let mut watched = Watched { mailbox: mailbox.clone(), asked: None, stuck: false };
        let long = Duration::from_millis(1);
        while watched.ask(0, long).is_none() {}
        let (release, wait) = channel::<()>();
        mailbox.send(Box::new(move |_| _ = wait.recv())).unwrap();
        while !watched.stuck {
            watched.ask(0, long);
        }
        assert!(watched.ask(0, long).is_none());
        drop(release);
        while watched.ask(0, long).is_none() {}
        assert!(!watched.stuck && watched.asked.is_none());
    }
}
