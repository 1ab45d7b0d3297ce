//! Machine and command line of a benchmark, for the interpretation of its results.

mod description;

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::SystemTime;

use serde::Serialize;

pub(crate) use description::MachineDescription;

/// The machine that a benchmark ran on. Its serialized keys are an interface: they do not change. Unreadable values are
/// null.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Machine {
    /// Host name.
    pub host: Option<String>,
    /// Model of the first CPU, as the kernel names it.
    pub cpu: Option<String>,
    /// CPUs that are online.
    pub cores: Option<usize>,
    /// CPUs that this process may use.
    pub cores_usable: Option<usize>,
    /// The kernel's release.
    pub kernel: Option<String>,
}

impl Machine {
    /// Reads it.
    pub fn read() -> Machine {
        let cpus = read("/proc/cpuinfo").unwrap_or_default();
        Machine {
            host: read("/proc/sys/kernel/hostname"),
            cpu: cpu_model(&cpus),
            cores: Some(values(&cpus, "processor").count()).filter(|count| *count > 0),
            cores_usable: std::thread::available_parallelism().ok().map(usize::from),
            kernel: read("/proc/sys/kernel/osrelease"),
        }
    }
}

/// Returns the text of a file without the space around it.
fn read(path: impl AsRef<Path>) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

/// Returns the values of a key of /proc/cpuinfo and its like.
fn values<'a>(text: &'a str, key: &'a str) -> impl Iterator<Item = &'a str> {
    let pairs = text.lines().filter_map(|line| line.split_once(':'));
    pairs.filter(move |(found, _)| found.trim() == key).map(|(_, value)| value.trim())
}

fn cpu_model(text: &str) -> Option<String> {
    // x86, and the keys of other architectures.
    ["model name", "Model", "cpu model", "cpu", "uarch"]
        .iter()
        .find_map(|key| values(text, key).next().map(str::to_owned))
}

/// Returns the command line of this process: the program, then its arguments.
pub(crate) fn command_line() -> Vec<String> {
    std::env::args_os().map(|word| word.to_string_lossy().into_owned()).collect()
}

/// A server, as far as it is known.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ServerInfo {
    /// Path of its program; null if it cannot be read.
    pub program: Option<String>,
    /// Its version; known only of started servers.
    pub version: Option<String>,
}

/// The version of this program.
pub(crate) const VERSION: &str = env!("CARGO_PKG_VERSION");

impl ServerInfo {
    /// Describes a process. `started`: true if this program started it and may query its version.
    pub(crate) fn of(pid: Option<i32>, started: bool) -> ServerInfo {
        let program = pid.and_then(|pid| fs::read_link(format!("/proc/{pid}/exe")).ok());
        ServerInfo {
            version: started.then(|| program.as_deref().and_then(version_of)).flatten(),
            program: program.map(|path| path.display().to_string()),
        }
    }
}

/// Returns the version that `program` prints. Queried once: it is the same program each time.
fn version_of(program: &Path) -> Option<String> {
    static KNOWN: OnceLock<Option<String>> = OnceLock::new();
    let ask = || {
        let output = Command::new(program).arg("--version").stdin(Stdio::null()).output().ok()?;
        String::from_utf8(output.stdout).ok()?.split_whitespace().last().map(str::to_owned)
    };
    KNOWN.get_or_init(ask).clone()
}

/// Returns a time as RFC 3339, in UTC, to a second.
pub(crate) fn date(at: SystemTime) -> String {
    humantime::format_rfc3339_seconds(at).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpus_are_read() {
        let x86 = "processor\t: 0\nmodel name\t: A CPU @ 2.00GHz\n\nprocessor\t: 1\nmodel name\t: A CPU @ 2.00GHz\n";
        assert_eq!(cpu_model(x86).as_deref(), Some("A CPU @ 2.00GHz"));
        assert_eq!(values(x86, "processor").collect::<Vec<_>>(), ["0", "1"]);
        assert_eq!(cpu_model("processor : 0\nBogoMIPS : 50.00\n"), None);
    }

    #[test]
    fn this_machine_and_process_are_known() {
        let machine = Machine::read();
        assert!(!command_line().is_empty() && machine.cores > Some(0) && machine.kernel.is_some(), "{machine:?}");
        let own = ServerInfo::of(Some(std::process::id() as i32), false);
        assert_eq!(own.version, None);
        assert_eq!(own.program, std::env::current_exe().ok().map(|path| path.display().to_string()));
        assert_eq!(ServerInfo::of(None, false), ServerInfo::default());
    }

    #[test]
    fn dates_are_of_rfc_3339() {
        assert_eq!(date(SystemTime::UNIX_EPOCH + std::time::Duration::from_millis(86_400_500)), "1970-01-02T00:00:00Z");
    }
}
