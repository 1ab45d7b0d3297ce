//! The kernel's scheduling groups of sessions (autogroups, sched(7)).

const SETTING: &str = "/proc/sys/kernel/sched_autogroup_enabled";

/// No autogroups while this value exists; then as before.
///
/// With autogroups, a session's processes share the CPUs as one with all others, kernel threads included, and priorities count only within a session. A
/// direct write to a file ends in a kernel thread of its CPU (`iomap_dio_complete_work`); on Linux 6.18 it was seen to wait for up to 180 ms
/// beside a session with many runnable threads, while a thread of the same priority in that session ran 1,200 times.
#[derive(Debug)]
pub struct NoAutogroups {
    before: Option<String>,
}

impl NoAutogroups {
    /// Turns them off. Needs root; without it, or on a kernel without autogroups, nothing changes.
    pub fn begin() -> NoAutogroups {
        let before = setting_if_on().filter(|_| std::fs::write(SETTING, "0").is_ok());
        NoAutogroups { before }
    }

    /// Returns true if the kernel has autogroups now.
    pub fn are_on() -> bool {
        setting_if_on().is_some()
    }
}

/// Returns the setting, unless autogroups are off or the kernel has none.
fn setting_if_on() -> Option<String> {
    std::fs::read_to_string(SETTING).ok().filter(|setting| setting.trim() != "0")
}

impl Drop for NoAutogroups {
    fn drop(&mut self) {
        if let Some(before) = &self.before {
            let _ = std::fs::write(SETTING, before);
        }
    }
}
