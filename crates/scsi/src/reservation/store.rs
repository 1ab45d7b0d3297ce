//! Stable storage for reservations that persist through power loss (APTPL).

use std::fmt;
use std::sync::{Arc, OnceLock};

use mqblk_core::Wake;

/// Stores the reservations of one logical unit on stable storage.
pub trait ReservationStore: Send + Sync {
    /// Saves a state, which replaces all earlier ones. Must not block: workers call it while they hold a lock. The
    /// ticket is resolved, and wakes `done`, when the state is on stable storage. States are saved in order; one that
    /// is superseded before its write need not be written, and counts as saved with the later one.
    fn save(&self, state: Vec<u8>, done: Arc<dyn Wake>) -> Arc<Ticket>;
}

/// Pending result of saving a state or of aborting commands.
pub struct Ticket {
    result: OnceLock<Result<(), String>>,
    done: Arc<dyn Wake>,
}

impl Ticket {
    /// Returns an unresolved ticket, which wakes `done` when it is resolved.
    pub fn new(done: Arc<dyn Wake>) -> Arc<Ticket> {
        Arc::new(Ticket { result: OnceLock::new(), done })
    }

    /// Returns the result: success or the reason of the failure; `None` while it is pending.
    pub fn result(&self) -> Option<Result<(), String>> {
        self.result.get().cloned()
    }

    /// Sets the result and wakes the waker. Later calls do nothing.
    pub fn resolve(&self, result: Result<(), String>) {
        if self.result.set(result).is_ok() {
            self.done.wake();
        }
    }
}

impl fmt::Debug for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ticket").field("result", &self.result.get()).finish_non_exhaustive()
    }
}
