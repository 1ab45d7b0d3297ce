//! Where reservations are kept when they must outlive a loss of power (APTPL).

use std::fmt;
use std::sync::{Arc, OnceLock};

use mqblk_core::Wake;

/// Keeps the state of one unit on stable storage.
pub trait Keeper: Send + Sync {
    /// Takes the whole state, which replaces what was given before. Must not block: workers call it, under a lock. The
    /// ticket says when it is on stable storage, and rings `done` then. States are given in order; one that a later one replaces before
    /// it was written need not be written, and is kept when the later one is.
    fn save(&self, state: Vec<u8>, done: Arc<dyn Wake>) -> Arc<Ticket>;
}

/// What becomes of a state that was given to a [`Keeper`].
pub struct Ticket {
    result: OnceLock<Result<(), String>>,
    done: Arc<dyn Wake>,
}

impl Ticket {
    /// Not decided yet; `done` rings when it is.
    pub fn new(done: Arc<dyn Wake>) -> Arc<Ticket> {
        Arc::new(Ticket { result: OnceLock::new(), done })
    }

    /// `None` while it is not decided; then that it is on stable storage, or why not.
    pub fn result(&self) -> Option<Result<(), String>> {
        self.result.get().cloned()
    }

    /// Decides, once: later calls do nothing.
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
