//! Pinning of threads.

use std::io::{Error, ErrorKind, Result};

use rustix::thread::{CpuSet, sched_setaffinity};

/// Pins this thread to a CPU.
///
/// # Errors
/// When the CPU does not exist, or may not be used.
pub fn pin_thread(cpu: usize) -> Result<()> {
    if cpu >= CpuSet::MAX_CPU {
        return Err(Error::new(ErrorKind::InvalidInput, format!("no CPU {cpu}")));
    }
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set).map_err(|error| Error::new(error.kind(), format!("pinning to CPU {cpu}: {error}")))
}
