//! The worker threads of an engine, which come and go while queues are served.
//!
//! Workers are numbered from 0 without gaps: the last one is removed.

use std::sync::mpsc::sync_channel;
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use mqblk_core::lock::lock;
use mqblk_core::thread::spawn;
use mqblk_core::thread_role::{ThreadRole, enter};
use mqblk_uring::UringOptions;

use crate::attach_error::WorkerError;
use crate::cpu::pin_thread;
use crate::mailbox::Mailbox;
use crate::sleep_cost;
use crate::worker::Worker;

/// Time for the workers to end, and the interval at which it is checked. A worker that waits in a system call or a page
/// fault is abandoned.
const END_TIMEOUT: Duration = Duration::from_secs(5);
const END_CHECK: Duration = Duration::from_millis(1);

struct WorkerThread {
    mailbox: Mailbox<Worker>,
    cpu: Option<usize>,
    thread: Option<JoinHandle<()>>,
}

/// Error of removing the last worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RemoveWorkerError {
    /// It is the only one.
    #[error("it is the only worker")]
    Only,
    /// It serves queues.
    #[error("it serves {0} queues")]
    InUse(usize),
    /// It does not respond.
    #[error(transparent)]
    Worker(#[from] WorkerError),
}

/// The workers, by number.
#[derive(Default)]
pub(crate) struct WorkerList {
    threads: Mutex<Vec<WorkerThread>>,
    /// Locked for reading until a queue is attached; locked for writing to remove a worker.
    attaching: RwLock<()>,
}

impl WorkerList {
    fn lock(&self) -> MutexGuard<'_, Vec<WorkerThread>> {
        lock(&self.threads)
    }

    /// Returns the number of workers, at least 1.
    pub(crate) fn len(&self) -> usize {
        self.lock().len()
    }

    /// Returns the number and the mailbox of worker `worker` (modulo their number).
    pub(crate) fn mailbox(&self, worker: usize) -> (u32, Mailbox<Worker>) {
        let threads = self.lock();
        let number = worker % threads.len();
        (number as u32, threads[number].mailbox.clone())
    }

    /// Returns the mailboxes of all.
    pub(crate) fn mailboxes(&self) -> Vec<Mailbox<Worker>> {
        self.lock().iter().map(|worker| worker.mailbox.clone()).collect()
    }

    /// Updates `followed`, a list with an entry for each worker, to the current workers: `make` makes the entry of a
    /// worker that is new or replaces another.
    pub(crate) fn follow<T>(
        &self,
        followed: &mut Vec<T>,
        mailbox_of: impl Fn(&T) -> &Mailbox<Worker>,
        make: impl Fn(Mailbox<Worker>) -> T,
    ) {
        let mailboxes = self.mailboxes();
        followed.truncate(mailboxes.len());
        for (number, mailbox) in mailboxes.into_iter().enumerate() {
            match followed.get_mut(number) {
                Some(one) if mailbox_of(one).is_same(&mailbox) => {}
                Some(one) => *one = make(mailbox),
                None => followed.push(make(mailbox)),
            }
        }
    }

    /// Returns the CPU that each is pinned to.
    pub(crate) fn cpus(&self) -> Vec<Option<usize>> {
        self.lock().iter().map(|worker| worker.cpu).collect()
    }

    /// Keeps workers from being removed until the result is dropped.
    pub(crate) fn begin_attach(&self) -> RwLockReadGuard<'_, ()> {
        self.attaching.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin_removal(&self) -> RwLockWriteGuard<'_, ()> {
        self.attaching.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts one more worker. Returns its number.
    ///
    /// # Errors
    /// When a thread or its io_uring cannot be created; the text names it.
    pub(crate) fn add(&self, cpu: Option<usize>, context: UringOptions) -> std::io::Result<usize> {
        let _alone = self.begin_removal();
        // A worker itself may not start a thread.
        sleep_cost::measure();
        let number = self.len();
        let worker = spawn_worker(number, cpu, context)?;
        self.lock().push(worker);
        Ok(number)
    }

    /// Ends the last worker, which serves no queue.
    ///
    /// # Errors
    /// When it serves one, is the only one, or does not respond: it continues then.
    pub(crate) fn remove_last(&self) -> Result<usize, RemoveWorkerError> {
        let _alone = self.begin_removal();
        let number = self.len() - 1;
        if number == 0 {
            return Err(RemoveWorkerError::Only);
        }
        match self.mailbox(number).1.call(Worker::stop_if_unused)? {
            0 => {}
            queues => return Err(RemoveWorkerError::InUse(queues)),
        }
        let removed = self.lock().pop();
        end(removed.into_iter().collect(), number);
        Ok(number)
    }
}

impl Drop for WorkerList {
    /// Stops the workers. Queues that are still attached are cut off: their contexts cancel operations in flight.
    fn drop(&mut self) {
        let threads = std::mem::take(&mut *self.lock());
        for worker in &threads {
            let _ = worker.mailbox.send(Box::new(Worker::stop));
        }
        end(threads, 0);
    }
}

/// Waits for threads that have been stopped. `first`: the number of the first.
fn end(threads: Vec<WorkerThread>, first: usize) {
    let deadline = Instant::now() + END_TIMEOUT;
    for (number, worker) in (first..).zip(threads) {
        let Some(thread) = worker.thread else { continue };
        while !thread.is_finished() && Instant::now() < deadline {
            std::thread::sleep(END_CHECK);
        }
        if thread.is_finished() {
            let _ = thread.join();
        } else {
            tracing::error!(worker = number, "a worker does not end: it waits for storage or memory");
        }
    }
}

/// Starts one worker thread and waits until its io_uring is set up.
fn spawn_worker(number: usize, cpu: Option<usize>, context: UringOptions) -> std::io::Result<WorkerThread> {
    let (mailbox, receiver) = Mailbox::new(number as u32)?;
    let (ready, started) = sync_channel(1);
    let thread = spawn(format!("worker-{number}"), move || {
        let made = cpu
            .map_or(Ok(()), pin_thread)
            .and_then(|()| enter(ThreadRole::Worker))
            .and_then(|()| Worker::new(context, receiver));
        let mut worker = match made {
            Ok(worker) => worker,
            Err(error) => {
                let _ = ready.send(Err(error));
                return;
            }
        };
        let _ = ready.send(Ok(()));
        let ran = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| worker.run()));
        if ran.is_err() {
            // A bug in the daemon. Its queues would hang for ever; a daemon that died is restarted and resumes.
            tracing::error!(worker = number, "a worker thread panicked: the process ends");
            std::process::abort();
        }
    })?;
    match started.recv() {
        Ok(Ok(())) => Ok(WorkerThread { mailbox, cpu, thread: Some(thread) }),
        Ok(Err(error)) => Err(std::io::Error::new(error.kind(), format!("worker {number}: {error}"))),
        Err(_) => Err(std::io::Error::other(format!("worker {number} ended while starting"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{Engine, EngineOptions};

    #[test]
    fn workers_come_and_go_and_are_numbered_without_gaps() {
        let engine =
            Engine::start(&EngineOptions { workers: 1, pin: Vec::new(), context: UringOptions::default() }).unwrap();
        let mut probe = engine.liveness();
        assert_eq!(engine.remove_last_worker(), Err(RemoveWorkerError::Only));
        assert_eq!((engine.add_worker(None).unwrap(), engine.add_worker(None).unwrap()), (1, 2));
        assert_eq!((engine.workers(), engine.stats().unwrap().len()), (3, 3));
        let long = Duration::from_secs(60);
        assert_eq!(probe.unresponsive(long), [0; 0], "it asks the new ones too");
        assert!(engine.add_worker(Some(1_000_000)).unwrap_err().to_string().contains("no CPU 1000000"));
        assert_eq!(engine.remove_last_worker(), Ok(2));
        assert_eq!(probe.unresponsive(long), [0; 0], "one that was removed is not missed");
        assert_eq!((engine.add_worker(Some(0)).unwrap(), engine.cpus()), (2, vec![None, None, Some(0)]));
        assert_eq!(engine.stats().unwrap().len(), 3);
    }
}
