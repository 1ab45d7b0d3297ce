//! For how long a thread waited for a CPU that other threads had. A hypervisor that takes the CPU away, or an interrupt, looks the same to a thread
//! that offers it; neither is helped by sleeping.

use std::fs::File;
use std::os::unix::fs::FileExt as _;

/// What Linux calls the statistics of the thread that opens it: nanoseconds on a CPU, nanoseconds in which it was ready to run and waited, and
/// time slices (Linux, `Documentation/scheduler/sched-stats.rst`).
const STATISTICS: &str = "/proc/thread-self/schedstat";

/// Longest statistics: three numbers of 64 bits, two spaces and the end of the line.
const MAX_LEN: usize = 3 * 20 + 3;

/// The run delay of one thread.
#[derive(Debug, Default)]
pub(crate) struct RunDelay {
    /// `None` where the kernel has no such file, or the thread may not read it.
    file: Option<File>,
    /// Waited when it was last read, in nanoseconds.
    last_ns: u64,
}

impl RunDelay {
    /// Opens the statistics of the calling thread. Must be called before the thread gives up to open files.
    pub(crate) fn open() -> RunDelay {
        let mut delay = RunDelay { file: File::open(STATISTICS).ok(), last_ns: 0 };
        delay.last_ns = delay.read().unwrap_or(0);
        delay
    }

    /// The thread was kept from its CPU for `away` nanoseconds just now. Returns true if that was mostly by other threads, or if nobody knows.
    pub(crate) fn is_by_others(&mut self, away: u64) -> bool {
        let Some(waited) = self.read() else { return true };
        let since = waited.saturating_sub(std::mem::replace(&mut self.last_ns, waited));
        since.saturating_mul(2) >= away
    }

    fn read(&self) -> Option<u64> {
        let mut text = [0; MAX_LEN];
        let len = self.file.as_ref()?.read_at(&mut text, 0).ok()?;
        run_delay(&text[..len])
    }
}

/// Returns the second number of the statistics.
fn run_delay(text: &[u8]) -> Option<u64> {
    std::str::from_utf8(text).ok()?.split_ascii_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_statistics_are_parsed() {
        assert_eq!(run_delay(b"123456 789 10\n"), Some(789));
        for bad in [&b""[..], b"1", b"1 x 3", b"1 -2 3", b"\xff 1 2"] {
            assert_eq!(run_delay(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn a_thread_that_waits_for_a_cpu_is_told_from_one_that_nobody_disturbs() {
        assert!(RunDelay::default().is_by_others(100_000), "nobody knows");
        let mut delay = RunDelay::open();
        if delay.file.is_none() {
            // A kernel without statistics of the scheduler.
            return;
        }
        // Two threads that compute on one CPU: one of them waits.
        let cpu = rustix::thread::sched_getcpu();
        let mut set = rustix::thread::CpuSet::new();
        set.set(cpu);
        let pin = || rustix::thread::sched_setaffinity(None, &set).expect("the CPU that it runs on");
        let stop = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|threads| {
            threads.spawn(|| {
                pin();
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
            pin();
            let before = delay.read().expect("statistics");
            while delay.read().expect("statistics") < before + 2_000_000 {
                std::hint::spin_loop();
            }
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
            assert!(delay.is_by_others(2_000_000));
            assert!(!delay.is_by_others(u64::MAX), "it did not wait for that long");
        });
    }
}
