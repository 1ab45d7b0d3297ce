//! A well-behaved client beside the one under test: a thread that writes and verifies until it is stopped.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use super::wait_for;

/// Blocks that a neighbour uses.
pub const NEIGHBOUR_BLOCKS: usize = 200;

/// A client that a neighbour's thread runs.
pub trait NeighbourClient {
    /// Writes blocks, and reads and verifies others.
    ///
    /// # Panics
    /// When a completion is wrong or missing.
    fn round(&mut self);

    /// Returns the number of blocks verified.
    fn verified(&self) -> u64;

    /// Disconnects in good order. Returns the generation of each block; 0: never written.
    ///
    /// # Panics
    /// When the backend does not close.
    fn end(self) -> Vec<u32>;
}

/// The thread.
#[derive(Debug)]
pub struct Neighbour {
    stop: Arc<AtomicBool>,
    rounds: Arc<AtomicU64>,
    thread: Option<JoinHandle<(u64, Vec<u32>)>>,
}

impl Neighbour {
    /// Starts the thread, which rests for `pause` after each round.
    ///
    /// # Panics
    /// When the client fails.
    pub fn start<C: NeighbourClient>(pause: Duration, connect: impl FnOnce() -> C + Send + 'static) -> Neighbour {
        let (stop, rounds) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (stop2, rounds2) = (Arc::clone(&stop), Arc::clone(&rounds));
        let thread = std::thread::spawn(move || {
            let mut client = connect();
            // The first rounds may have nothing to read: a neighbour of a short test goes on until it has verified.
            while !stop2.load(Ordering::Relaxed) || client.verified() == 0 {
                client.round();
                rounds2.fetch_add(1, Ordering::Relaxed);
                // Leaves CPU time to the tests, and lets the daemon go idle as with a real guest.
                std::thread::sleep(pause);
            }
            (client.verified(), client.end())
        });
        Neighbour { stop, rounds, thread: Some(thread) }
    }

    /// Returns the number of completed rounds.
    pub fn rounds(&self) -> u64 {
        self.rounds.load(Ordering::Relaxed)
    }

    /// Returns whether the client has failed.
    pub fn has_failed(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits for two more rounds, at least one of which began after the call.
    ///
    /// # Panics
    /// When none ends.
    pub fn assert_progress(&self, after: &str) {
        let now = self.rounds();
        wait_for(&format!("a neighbour's next round after {after}"), || {
            assert!(!self.has_failed(), "after {after}: the neighbour failed");
            (self.rounds() >= now + 2).then_some(())
        });
    }

    /// Stops the thread. Returns the number of verified blocks (at least 1) and the generation of each block; 0: never
    /// written.
    ///
    /// # Errors
    /// The panic of a client that has failed.
    pub fn try_finish(mut self) -> std::thread::Result<(u64, Vec<u32>)> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().expect("a running neighbour").join()
    }

    /// As [`try_finish`](Self::try_finish).
    ///
    /// # Panics
    /// When the client has failed.
    pub fn finish(self) -> (u64, Vec<u32>) {
        self.try_finish().expect("a neighbour that has not failed")
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}
