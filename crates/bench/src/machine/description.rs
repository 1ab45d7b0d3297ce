//! A machine in words, for the report of experiments.

use std::path::Path;

use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
use serde::Serialize;

use super::{Machine, VERSION, date, read, values};

/// Description of a machine: lines of a name and a value.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct MachineDescription {
    /// Cores that this process may use.
    pub cores: usize,
    /// (Name, value).
    pub facts: Vec<(&'static str, String)>,
}

impl MachineDescription {
    /// Describes this machine, and the storage of `folder`. Unreadable values are named unknown.
    pub(crate) fn read(folder: &Path) -> MachineDescription {
        let machine = Machine::read();
        let cores = machine.cores_usable.unwrap_or(1);
        let cpuinfo = read("/proc/cpuinfo").unwrap_or_default();
        let virtualised =
            if is_virtual(&cpuinfo) { "yes: other guests of the host may disturb" } else { "not that the CPU says" };
        let governor = read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor");
        let facts = vec![
            ("CPU", or_unknown(machine.cpu)),
            ("cores", format!("{cores} for this process, {} in all", machine.cores.unwrap_or(cores))),
            ("memory", or_unknown(read("/proc/meminfo").and_then(|text| memory(&text)))),
            ("virtual machine", virtualised.to_owned()),
            ("kernel", or_unknown(machine.kernel)),
            ("mitigations", mitigations(Path::new("/sys/devices/system/cpu/vulnerabilities"))),
            ("CPU frequency governor", governor.unwrap_or_else(|| "none that this system shows".into())),
            ("load before", or_unknown(read("/proc/loadavg").and_then(|text| load(&text)))),
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

fn is_virtual(cpuinfo: &str) -> bool {
    values(cpuinfo, "flags").next().is_some_and(|flags| flags.split(' ').any(|flag| flag == "hypervisor"))
}

fn memory(meminfo: &str) -> Option<String> {
    let kib: u64 = values(meminfo, "MemTotal").next()?.split(' ').next()?.parse().ok()?;
    Some(format!("{:.1} GiB", kib as f64 / f64::from(1 << 20)))
}

/// Returns the CPU's vulnerabilities with the kernel's mitigations, without those that do not affect it.
fn mitigations(folder: &Path) -> String {
    let Ok(entries) = std::fs::read_dir(folder) else { return "unknown".into() };
    let entries = entries.flatten().filter_map(|entry| Some((entry.file_name(), read(entry.path())?)));
    let entries = entries.filter(|(_, text)| text != "Not affected");
    let mut all: Vec<String> = entries.map(|(name, text)| format!("{}: {text}", name.display())).collect();
    all.sort();
    if all.is_empty() { "none needed".into() } else { all.join("; ") }
}

fn load(loadavg: &str) -> Option<String> {
    let mut words = loadavg.split(' ');
    let (one, five) = (words.next()?, words.next()?);
    Some(format!("{one} threads on average over a minute, {five} over five"))
}

/// Returns the file system and the device of a folder.
fn storage(folder: &Path) -> String {
    let number = statx(CWD, folder, AtFlags::empty(), StatxFlags::MNT_ID).map(|found| found.stx_mnt_id.to_string());
    let mounts = read("/proc/self/mountinfo").unwrap_or_default();
    let mount = number.ok().and_then(|number| mount(&mounts, &number));
    let Some([device, file_system, source]) = mount else { return format!("{}: unknown", folder.display()) };
    let mut words = vec![format!("{file_system} on {source}")];
    // A partition has the queue of its disk.
    let of_queue = |name: &str| {
        ["queue", "../queue"].iter().find_map(|queue| read(format!("/sys/dev/block/{device}/{queue}/{name}")))
    };
    words.extend(
        of_queue("rotational").map(|rotational| if rotational == "0" { "not rotating" } else { "rotating" }.into()),
    );
    words.extend(of_queue("scheduler").map(|scheduler| format!("scheduler {scheduler}")));
    words.extend(of_queue("write_cache").map(|cache| format!("write cache: {cache}")));
    words.extend(of_queue("max_sectors_kb").map(|most| format!("at most {most} KiB a request")));
    words.join(", ")
}

/// Returns device, file system and source of a mount, of the lines of `/proc/self/mountinfo` (proc(5)).
fn mount<'a>(mounts: &'a str, number: &str) -> Option<[&'a str; 3]> {
    let line = mounts.lines().find(|line| line.split(' ').next() == Some(number))?;
    let mut fields = line.split(' ');
    let device = fields.nth(2)?;
    let mut after = fields.skip_while(|field| *field != "-").skip(1);
    Some([device, after.next()?, after.next()?])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mount_of_a_folder_is_found() {
        let mounts = "22 1 254:0 / / rw - ext4 /dev/vda rw\n30 22 0:25 / /dev/shm rw,nosuid shared:4 - tmpfs shm rw\n";
        assert_eq!(mount(mounts, "30"), Some(["0:25", "tmpfs", "shm"]));
        assert_eq!(mount(mounts, "22"), Some(["254:0", "ext4", "/dev/vda"]));
        assert_eq!((mount(mounts, "2"), mount("", "22")), (None, None));
        // A file system within the root's.
        assert!(storage(Path::new("/proc/sys")).starts_with("proc on "), "{}", storage(Path::new("/proc/sys")));
        assert_eq!(storage(Path::new("/none")), "/none: unknown");
    }

    #[test]
    fn every_fact_has_a_value() {
        let machine = MachineDescription::read(Path::new("/"));
        assert!(machine.cores > 0 && machine.facts.iter().all(|(_, value)| !value.is_empty()), "{machine:?}");
        assert_eq!(memory("MemTotal:       16384000 kB\n").as_deref(), Some("15.6 GiB"));
        assert!(is_virtual("flags\t\t: fpu hypervisor sse\n") && !is_virtual("flags : fpu\n"));
    }
}
