//! For tests of in-flight tables: a process that dies at any store.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

thread_local! {
    /// Stores left until the process dies.
    static LIFE: Cell<u64> = const { Cell::new(u64::MAX) };
}

/// Panic payload: the process died here.
struct ProcessDied;

/// Called before each store of a table, and before completions become visible in the ring.
pub(crate) fn crash_point() {
    LIFE.set(match LIFE.get() {
        0 => resume_unwind(Box::new(ProcessDied)),
        left => left - 1,
    });
}

/// Runs `work` until store `stores`. Returns true if it finished.
pub(crate) fn run_until_crash(stores: u64, work: impl FnOnce()) -> bool {
    LIFE.set(stores);
    let ended = catch_unwind(AssertUnwindSafe(work));
    LIFE.set(u64::MAX);
    match ended {
        Ok(()) => true,
        Err(why) if why.is::<ProcessDied>() => false,
        Err(why) => resume_unwind(why),
    }
}
