//! The kernel's scheduling groups of sessions (autogroups, sched(7)).

const SETTING: &str = "/proc/sys/kernel/sched_autogroup_enabled";

/// Turns autogroups off while this value exists.
///
/// With autogroups, the processes of a session share the CPUs as one scheduling unit with all other sessions and the
/// kernel threads. Priorities count only within a session. A direct write to a file ends in a kernel thread of its CPU
/// (`iomap_dio_complete_work`). On Linux 6.18 that thread waited up to 180 ms beside a session with many runnable
/// threads, while a thread of the same priority in that session ran 1,200 times.
#[derive(Debug)]
pub struct NoAutogroups {
    before: Option<String>,
}

impl NoAutogroups {
    /// Turns autogroups off. Needs root; without it, or on a kernel without autogroups, nothing changes.
    pub fn begin() -> NoAutogroups {
        let before = setting_if_on().filter(|_| std::fs::write(SETTING, "0").is_ok());
        NoAutogroups { before }
    }

    /// Returns true if autogroups are on.
    pub fn are_on() -> bool {
        setting_if_on().is_some()
    }
}

/// Returns the setting, or `None` if autogroups are off or not supported.
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
