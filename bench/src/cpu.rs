//! CPU time of the server and of our threads, and pinning.

use std::time::Duration;

use rustix::thread::{CpuSet, sched_setaffinity};
use rustix::time::{ClockId, clock_gettime};

use crate::BenchError;

/// CPU time that process `pid` has used, all its threads that live: the first field of each thread's `schedstat`, in
/// nanoseconds (Linux `Documentation/scheduler/sched-stats.rst`). `None` when it cannot be read.
pub fn of_process(pid: i32) -> Option<Duration> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).ok()?;
    let mut total = 0;
    for task in tasks.flatten() {
        // A thread may end between the two.
        let Ok(text) = std::fs::read_to_string(task.path().join("schedstat")) else { continue };
        total += text.split_ascii_whitespace().next()?.parse::<u64>().ok()?;
    }
    Some(Duration::from_nanos(total))
}

/// CPU time that this thread has used.
pub fn of_this_thread() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    // The kernel's values are never negative.
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec as u32)
}

/// Keeps this thread on one CPU.
///
/// # Errors
/// When there is no such CPU, or it may not be used.
pub fn pin(cpu: u16) -> Result<(), BenchError> {
    let refused = |why: String| BenchError::option("pin", cpu, format!("a CPU that this process may use ({why})"));
    if usize::from(cpu) >= CpuSet::MAX_CPU {
        return Err(refused(format!("at most {}", CpuSet::MAX_CPU - 1)));
    }
    let mut set = CpuSet::new();
    set.set(cpu.into());
    sched_setaffinity(None, &set).map_err(|error| refused(error.to_string()))
}
