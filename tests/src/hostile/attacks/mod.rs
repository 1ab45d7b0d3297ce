//! Attacks that go on until they are stopped. Each has a thread and a disk of its own, beside the verifying disks.
//!
//! An attack is a hostile guest (`guests`, `controllers`), a hostile frontend (`frontends`), or a client of the admin
//! socket (`admin_clients`). Its thread has the lowest priority and uses the CPU time that the daemon and the verifying
//! clients leave: on a host, the daemon does not share out a guest's own CPU time. The daemon's work for the attack has
//! the daemon's priority.

pub mod admin_clients;
pub mod controllers;
pub mod frontends;
pub mod guests;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use super::TIMEOUT;

/// Lowest priority of a thread.
const LOWEST_PRIORITY: i32 = 19;

/// State that an attack shares with the test.
#[derive(Clone, Debug, Default)]
pub struct AttackControl {
    stop: Arc<AtomicBool>,
    steps: Arc<AtomicU64>,
}

impl AttackControl {
    /// Returns true if the attack must stop.
    pub fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Counts a step: a connection, a batch of requests, or a message.
    pub fn count(&self) {
        self.steps.fetch_add(1, Ordering::Relaxed);
    }

    /// Sleeps without counting a step.
    pub fn pause(&self, time: Duration) {
        std::thread::sleep(time);
    }
}

/// An attack. Returns when its control is stopped.
pub type Attack = Box<dyn FnOnce(&AttackControl) + Send>;

/// A running attack.
#[derive(Debug)]
pub struct RunningAttack {
    /// Its name.
    pub name: &'static str,
    control: AttackControl,
    thread: Option<JoinHandle<()>>,
}

impl RunningAttack {
    /// Starts the thread.
    ///
    /// # Panics
    /// When the thread cannot lower its priority.
    pub fn start(name: &'static str, attack: Attack) -> RunningAttack {
        let control = AttackControl::default();
        let shared = control.clone();
        let thread = std::thread::spawn(move || {
            // Of this thread only: 0 is the caller's thread.
            rustix::process::setpriority_process(None, LOWEST_PRIORITY).expect("a lower priority");
            attack(&shared);
        });
        RunningAttack { name, control, thread: Some(thread) }
    }

    /// Returns the number of steps so far.
    pub fn steps(&self) -> u64 {
        self.control.steps.load(Ordering::Relaxed)
    }

    /// Checks that it has not failed.
    ///
    /// # Panics
    /// When it has failed.
    pub fn assert_runs(&self) {
        let ended = self.thread.as_ref().is_none_or(JoinHandle::is_finished);
        assert!(!ended, "the attack '{}' failed: the daemon did not do its part", self.name);
    }

    /// Asks the attack to end.
    pub fn begin_stop(&self) {
        self.control.stop.store(true, Ordering::Relaxed);
    }

    /// Waits until the attack has ended. Returns its number of steps.
    ///
    /// # Panics
    /// When it has failed, or does not end in time because the daemon left it without an answer.
    pub fn finish(mut self) -> u64 {
        self.begin_stop();
        let thread = self.thread.take().expect("a running attack");
        let mut until = TIMEOUT.times(3).begin();
        while !thread.is_finished() {
            assert!(!until.has_passed(), "the attack '{}' does not end", self.name);
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(thread.join().is_ok(), "the attack '{}' failed: the daemon did not do its part", self.name);
        self.steps()
    }
}

impl Drop for RunningAttack {
    fn drop(&mut self) {
        self.begin_stop();
    }
}
