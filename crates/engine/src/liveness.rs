//! Checks that all workers respond: for a service manager that restarts a daemon that does not.

use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crate::engine::Engine;
use crate::mailbox::Mailbox;
use crate::worker::Worker;
use crate::workers::WorkerList;

/// Queries the workers, each by one message at a time.
pub struct LivenessProbe {
    list: Weak<WorkerList>,
    workers: Vec<ProbedWorker>,
}

/// A worker, and its missing reply.
struct ProbedWorker {
    mailbox: Mailbox<Worker>,
    pending: Option<Receiver<()>>,
}

impl Engine {
    /// Returns a probe of all workers.
    pub fn liveness(&self) -> LivenessProbe {
        let mut probe = LivenessProbe { list: Arc::downgrade(self.worker_list()), workers: Vec::new() };
        probe.follow_workers();
        probe
    }
}

impl LivenessProbe {
    /// Follows the engine's current workers. After the engine's end it keeps the last ones.
    fn follow_workers(&mut self) {
        let Some(list) = self.list.upgrade() else { return };
        let make = |mailbox| ProbedWorker { mailbox, pending: None };
        list.follow(&mut self.workers, |probed| &probed.mailbox, make);
    }

    /// Returns the workers, by number, that do not respond within `wait`, or have ended. One that has not replied to an
    /// earlier message is not sent another one.
    pub fn unresponsive(&mut self, wait: Duration) -> Vec<usize> {
        self.follow_workers();
        let deadline = Instant::now() + wait;
        // All are queried before waiting for the first.
        self.workers.iter_mut().for_each(ProbedWorker::ask);
        let silent = self
            .workers
            .iter_mut()
            .enumerate()
            .filter_map(|(number, worker)| (!worker.has_replied(deadline)).then_some(number));
        silent.collect()
    }
}

impl ProbedWorker {
    fn ask(&mut self) {
        if self.pending.is_none() {
            let (reply, wait) = sync_channel(1);
            // An ended worker drops the sender.
            let _ = self.mailbox.send(Box::new(move |_: &mut Worker| _ = reply.send(())));
            self.pending = Some(wait);
        }
    }

    fn has_replied(&mut self, deadline: Instant) -> bool {
        let Some(wait) = &self.pending else { return false };
        let reply = wait.recv_timeout(deadline.saturating_duration_since(Instant::now()));
        if reply != Err(RecvTimeoutError::Timeout) {
            self.pending = None;
        }
        reply.is_ok()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use mqblk_uring::UringOptions;

    use super::*;
    use crate::engine::EngineOptions;

    /// Only a failing test waits that long.
    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn a_worker_that_waits_is_named_until_it_responds_and_gets_one_message() {
        let options = EngineOptions { workers: 2, pin: Vec::new(), context: UringOptions::default() };
        let engine = Engine::start(&options).unwrap();
        let mut probe = engine.liveness();
        assert_eq!(probe.unresponsive(LONG), [0; 0]);
        let (release, wait) = channel::<()>();
        let (entered, is_in) = channel();
        let blocked = engine.mailboxes()[1].clone();
        let block = move |_: &mut Worker| {
            entered.send(()).unwrap();
            let _ = wait.recv();
        };
        blocked.send(Box::new(block)).unwrap();
        is_in.recv_timeout(LONG).unwrap();
        for _ in 0..3 {
            assert!(probe.unresponsive(Duration::from_millis(20)).contains(&1));
        }
        drop(release);
        assert_eq!(probe.unresponsive(LONG), [0; 0], "it answers the first message, which is the only one");
        drop(engine);
        assert_eq!(probe.unresponsive(LONG), [0, 1], "they have ended");
    }
}
