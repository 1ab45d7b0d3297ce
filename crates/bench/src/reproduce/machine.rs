//! The machine of the results.

use std::path::Path;

use serde::Serialize;

use crate::machine::{Machine, VERSION, date};

/// Description of a machine: lines of a name and a value.
#[derive(Clone, Debug, Serialize)]
pub(super) struct MachineDescription {
    /// Cores that this process may use.
    pub cores: usize,
    /// (Name, value).
    pub facts: Vec<(&'static str, String)>,
}

impl MachineDescription {
    /// Describes this machine, and the storage of `folder`. Unreadable values are named unknown.
    pub(super) fn read(folder: &Path) -> MachineDescription {
        let machine = Machine::read();
        let cores = machine.cores_usable.unwrap_or(1);
        let text = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let cpuinfo = text("/proc/cpuinfo");
        let virtualised =
            if is_virtual(&cpuinfo) { "yes: other guests of the host may disturb" } else { "not that the CPU says" };
        let facts = vec![
            ("CPU", or_unknown(machine.cpu)),
            ("cores", format!("{cores} for this process, {} in all", machine.cores.unwrap_or(cores))),
            ("memory", or_unknown(memory(&text("/proc/meminfo")))),
            ("virtual machine", virtualised.to_owned()),
            ("kernel", or_unknown(machine.kernel)),
            ("mitigations", mitigations(Path::new("/sys/devices/system/cpu/vulnerabilities"))),
            ("CPU frequency governor", or_unknown(governor())),
            ("load before", or_unknown(load(&text("/proc/loadavg")))),
            ("storage of the scratch folder", storage(folder)),
            ("mqblk", VERSION.to_owned()),
            ("date", date(std::time::SystemTime::now())),
        ];
        MachineDescription { cores, facts }
    }
}

fn or_unknown(value: Option<String>) -> String {
    value.unwrap_or_else(|| "unknown".into())
}

/// Returns the value behind `name :` in a file of the kernel.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let values = text.lines().filter_map(|line| line.split_once(':'));
    values.filter(|(key, _)| key.trim() == name).map(|(_, value)| value.trim()).next()
}

fn is_virtual(cpuinfo: &str) -> bool {
    field(cpuinfo, "flags").is_some_and(|flags| flags.split(' ').any(|flag| flag == "hypervisor"))
}

fn memory(meminfo: &str) -> Option<String> {
    let kib: u64 = field(meminfo, "MemTotal")?.split(' ').next()?.parse().ok()?;
    Some(format!("{:.1} GiB", kib as f64 / f64::from(1 << 20)))
}

/// Returns the CPU's vulnerabilities with the kernel's mitigations, without those that do not affect it.
fn mitigations(folder: &Path) -> String {
    let Ok(entries) = std::fs::read_dir(folder) else { return "unknown".into() };
    let read = |entry: std::fs::DirEntry| {
        let text = std::fs::read_to_string(entry.path()).ok()?;
        Some((entry.file_name().to_string_lossy().into_owned(), text.trim().to_owned()))
    };
    let mut all: Vec<(String, String)> =
        entries.flatten().filter_map(read).filter(|(_, text)| text != "Not affected").collect();
    all.sort();
    match all.is_empty() {
        true => "none needed".into(),
        false => all.iter().map(|(name, text)| format!("{name}: {text}")).collect::<Vec<_>>().join("; "),
    }
}

fn governor() -> Option<String> {
    let text = std::fs::read_to_string("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor");
    Some(text.map_or_else(|_| "none that this system shows".into(), |text| text.trim().to_owned()))
}

fn load(loadavg: &str) -> Option<String> {
    let mut words = loadavg.split(' ');
    let (one, five) = (words.next()?, words.next()?);
    Some(format!("{one} threads on average over a minute, {five} over five"))
}

/// Returns the file system and the device of a folder.
fn storage(folder: &Path) -> String {
    let folder = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let Some(mount) = mount_of(&mounts, &folder) else { return format!("{}: unknown", folder.display()) };
    let device = format!("/sys/dev/block/{}", mount.device);
    let read = |name: &str| {
        // A partition has the queue of its disk.
        let text = ["queue", "../queue"].map(|queue| std::fs::read_to_string(format!("{device}/{queue}/{name}")));
        text.into_iter().flatten().next().map(|text| text.trim().to_owned())
    };
    let mut words = vec![format!("{} on {}", mount.file_system, mount.source)];
    words.extend(
        read("rotational")
            .map(|rotational| if rotational == "0" { "not rotating".into() } else { "rotating".to_owned() }),
    );
    words.extend(read("scheduler").map(|scheduler| format!("scheduler {scheduler}")));
    words.extend(read("write_cache").map(|cache| format!("write cache: {cache}")));
    words.extend(read("max_sectors_kb").map(|most| format!("at most {most} KiB a request")));
    words.join(", ")
}

#[derive(Debug, PartialEq, Eq)]
struct MountDescription<'a> {
    device: &'a str,
    file_system: &'a str,
    source: &'a str,
}

/// Returns the mount that holds `folder`, of the lines of `/proc/self/mountinfo` (proc(5)).
fn mount_of<'a>(mounts: &'a str, folder: &Path) -> Option<MountDescription<'a>> {
    let parse = |line: &'a str| {
        let (before, after) = line.split_once(" - ")?;
        let before: Vec<&str> = before.split(' ').collect();
        let mut after = after.split(' ');
        let mount = MountDescription { device: before.get(2)?, file_system: after.next()?, source: after.next()? };
        Some((*before.get(4)?, mount))
    };
    let holds = |(point, _): &(&str, MountDescription<'_>)| folder.starts_with(point);
    // Of equally long ones the last covers the others.
    mounts.lines().filter_map(parse).filter(holds).max_by_key(|(point, _)| point.len()).map(|(_, mount)| mount)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_mount_point_holds_a_folder() {
        let mounts = "22 1 254:0 / / rw - ext4 /dev/vda rw\n30 22 0:25 / /dev/shm rw,nosuid shared:4 - tmpfs shm rw\n";
        let of = |folder: &str| mount_of(mounts, Path::new(folder)).map(|mount| (mount.device, mount.file_system));
        assert_eq!(of("/dev/shm/x"), Some(("0:25", "tmpfs")));
        assert_eq!(of("/dev/shmem"), Some(("254:0", "ext4")));
        assert_eq!(mount_of("", Path::new("/")), None);
    }

    #[test]
    fn every_fact_has_a_value() {
        let machine = MachineDescription::read(Path::new("/"));
        assert!(machine.cores > 0 && machine.facts.iter().all(|(_, value)| !value.is_empty()), "{machine:?}");
        assert_eq!(memory("MemTotal:       16384000 kB\n").as_deref(), Some("15.6 GiB"));
        assert!(is_virtual("flags\t\t: fpu hypervisor sse\n") && !is_virtual("flags : fpu\n"));
    }
}
