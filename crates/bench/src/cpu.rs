//! CPU time of the server and of the client's threads, and pinning.

use std::time::Duration;

use rustix::thread::{CpuSet, sched_setaffinity};
use rustix::time::{ClockId, clock_gettime};

use crate::BenchError;

/// Returns the CPU time of all live threads of process `pid`: the first field of each thread's `schedstat`, in
/// nanoseconds (Linux `Documentation/scheduler/sched-stats.rst`). `None` when it cannot be read.
pub(crate) fn process_time(pid: i32) -> Option<Duration> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).ok()?;
    let mut total = 0;
    for task in tasks.flatten() {
        // The thread may have ended since.
        let Ok(text) = std::fs::read_to_string(task.path().join("schedstat")) else { continue };
        total += text.split_ascii_whitespace().next()?.parse::<u64>().ok()?;
    }
    Some(Duration::from_nanos(total))
}

/// Returns the CPU time that this thread has used.
pub(crate) fn thread_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    // The kernel's values are never negative.
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec as u32)
}

/// Checks that threads may be pinned to all of `cpus`, the value of an option.
///
/// # Errors
/// [`BenchError::Usage`], naming the option and the CPU.
pub(crate) fn check(option: &'static str, cpus: &[u16]) -> Result<(), BenchError> {
    let mut cpus = cpus.to_vec();
    // On a separate thread, which stays pinned until it ends.
    let tried = std::thread::spawn(move || cpus.drain(..).try_for_each(|cpu| pin(option, cpu))).join();
    tried.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Pins this thread to one CPU, a value of `option`.
///
/// # Errors
/// When the CPU does not exist, or may not be used.
pub(crate) fn pin(option: &str, cpu: u16) -> Result<(), BenchError> {
    let refused = |why: String| BenchError::option(option, cpu, format!("a CPU that this process may use ({why})"));
    if usize::from(cpu) >= CpuSet::MAX_CPU {
        return Err(refused(format!("at most {}", CpuSet::MAX_CPU - 1)));
    }
    let mut set = CpuSet::new();
    set.set(cpu.into());
    sched_setaffinity(None, &set).map_err(|error| refused(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_is_counted_for_threads_and_processes() {
        let before = thread_time();
        while thread_time() < before + Duration::from_millis(5) {
            std::hint::spin_loop();
        }
        let mut busy = std::process::Command::new("sh").args(["-c", "while :; do :; done"]).spawn().unwrap();
        let mut polls = 0;
        while process_time(busy.id() as i32).unwrap() < Duration::from_millis(20) && polls < 10_000 {
            std::thread::sleep(Duration::from_millis(1));
            polls += 1;
        }
        busy.kill().unwrap();
        busy.wait().unwrap();
        assert!(polls < 10_000);
        assert_eq!(process_time(-1), None);
    }

    #[test]
    fn a_missing_cpu_is_refused() {
        for cpu in [u16::MAX, CpuSet::MAX_CPU as u16 - 1] {
            let error = std::thread::spawn(move || pin("pin", cpu)).join().unwrap().unwrap_err().to_string();
            assert!(error.starts_with(&format!("--pin: found {cpu}, expected a CPU")), "{error}");
        }
    }
}
