//! The clock of limits, which all workers share: a worker's own clock is not comparable with another's.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Instant;

/// The process' monotonic clock, or one that a test sets.
#[derive(Clone, Debug, Default)]
pub struct LimitClock(Option<Arc<AtomicU64>>);

static START: LazyLock<Instant> = LazyLock::new(Instant::now);

impl LimitClock {
    /// Returns a clock that shows what is stored in `ns`.
    pub fn manual(ns: &Arc<AtomicU64>) -> LimitClock {
        LimitClock(Some(Arc::clone(ns)))
    }

    /// Returns the time in nanoseconds, since an arbitrary start.
    #[inline]
    pub fn now_ns(&self) -> u64 {
        match &self.0 {
            // 64 bits hold 584 years.
            None => START.elapsed().as_nanos() as u64,
            Some(ns) => ns.load(Ordering::Relaxed),
        }
    }
}
