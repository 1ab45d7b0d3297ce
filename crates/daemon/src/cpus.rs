//! The CPUs of this host that workers can be pinned to.

use std::collections::BTreeSet;

use mqblk_core::thread::spawn;
use mqblk_engine::pin_thread;
use rustix::thread::{CpuSet, sched_getaffinity};

/// The usable CPUs of the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cpus {
    /// Number of CPUs that this process may run on now, as `nproc` prints it.
    pub count: u16,
    /// The CPUs that a thread of this process can be pinned to.
    pub pinnable: BTreeSet<u16>,
}

impl Cpus {
    /// Queries the kernel. Tries to pin a temporary thread to each CPU: this excludes offline CPUs and those outside
    /// the cgroup's cpuset.
    pub fn of_this_host() -> Cpus {
        let allowed = sched_getaffinity(None).unwrap_or_default();
        let pinnable = spawn("cpus", || {
            let online = std::fs::read_to_string("/sys/devices/system/cpu/online").unwrap_or_default();
            parse_list(online.trim()).into_iter().filter(|cpu| pin_thread((*cpu).into()).is_ok()).collect()
        });
        let pinnable = match pinnable {
            Ok(thread) => thread.join().unwrap_or_default(),
            // No thread could be started: uses the CPUs of this thread. The start fails at the first worker, with the
            // reason.
            Err(_) => (0..CpuSet::MAX_CPU as u16).filter(|cpu| allowed.is_set((*cpu).into())).collect(),
        };
        Cpus { count: u16::try_from(allowed.count()).unwrap_or(u16::MAX).max(1), pinnable }
    }
}

/// Parses the kernel's list format: `0-3,8`. Skips malformed items.
fn parse_list(text: &str) -> BTreeSet<u16> {
    let mut cpus = BTreeSet::new();
    for item in text.split(',') {
        let (first, last) = item.split_once('-').unwrap_or((item, item));
        if let (Ok(first), Ok(last)) = (first.parse::<u16>(), last.parse::<u16>()) {
            cpus.extend(first..=last);
        }
    }
    cpus
}

/// Formats CPUs in the kernel's list format: `0-3,8`.
pub fn display_list(cpus: &BTreeSet<u16>) -> String {
    let mut runs: Vec<(u16, u16)> = Vec::new();
    for &cpu in cpus {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == cpu => *last = cpu,
            _ => runs.push((cpu, cpu)),
        }
    }
    let items: Vec<String> =
        runs.iter().map(|(a, b)| if a == b { a.to_string() } else { format!("{a}-{b}") }).collect();
    items.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_round_trip() {
        for text in ["0", "0-1", "0-3,8", "1,3,5-7", ""] {
            assert_eq!(display_list(&parse_list(text)), text);
        }
        assert_eq!(parse_list("x,1-,2"), BTreeSet::from([2]));
    }

    #[test]
    fn this_host_has_a_cpu() {
        let cpus = Cpus::of_this_host();
        assert!(cpus.count >= 1);
        assert!(!cpus.pinnable.is_empty());
    }
}
