//! Attacks that go on until they are stopped: each is a thread of its own with a disk of its own, beside the verifying disks.
//!
//! An attack is a guest whose rings are hostile (`guests`, `controllers`), a frontend whose messages are (`frontends`), or a client of
//! the admin socket (`admin_clients`). Its thread has the lowest priority: it uses what CPU time the daemon and the verifying clients leave, because
//! on a host a guest's own CPU time is not the daemon's to share out. What the daemon does for it has the daemon's priority.

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

/// What an attack shares with the test.
#[derive(Clone, Debug, Default)]
pub struct AttackControl {
    stop: Arc<AtomicBool>,
    steps: Arc<AtomicU64>,
}

impl AttackControl {
    /// Returns true if the attack must end.
    pub fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Counts a step: a connection, a batch of requests, or a message.
    pub fn count(&self) {
        self.steps.fetch_add(1, Ordering::Relaxed);
    }

    /// Sleeps, and counts nothing.
    pub fn pause(&self, time: Duration) {
        std::thread::sleep(time);
    }
}

/// An attack: returns when its control says so.
pub type Attack = Box<dyn FnOnce(&AttackControl) + Send>;

/// An attack that goes on.
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
            // Of this thread only: Linux takes 0 for the caller.
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
    /// When it has.
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
    /// When it does not end in time: the daemon has left it without an answer. When it has failed.
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
