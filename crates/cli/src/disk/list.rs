//! `mqblk disk list`.

use std::time::Duration;

use mqblk_admin::model::{DiskList, FrontendInfo, ListedDisk, OutDisk};
use mqblk_core::ByteLen;
use serde_json::json;

use crate::call::{CallError, DaemonArgs, call, read};
use crate::table;

/// The name for messages.
const LIST: &str = "disk list";
/// The cell of a missing value.
const NONE: &str = "-";

/// Shows the disks and LUNs.
pub(super) fn list(daemon: &DaemonArgs) -> Result<String, CallError> {
    let response = call(LIST, &daemon.admin.path(), "disk.list", &json!({}))?;
    if daemon.json {
        return Ok(format!("{response}\n"));
    }
    let DiskList { disks, out } = read(LIST, response)?;
    Ok(disk_table(&disks, &out))
}

fn disk_table(disks: &[ListedDisk], out: &[OutDisk]) -> String {
    let head = ["disk", "interface", "storage", "size", "state", "errors", "vmm", "since", "queues"];
    let rows = std::iter::once(head.map(str::to_owned).to_vec()).chain(disks.iter().map(row));
    let rows = rows.chain(out.iter().map(out_row));
    let why = out.iter().map(|disk| {
        let next = short(Duration::from_nanos(disk.next_try_ns));
        format!("{} is out, and tried again in {next}: {}\n", disk.id, disk.why)
    });
    table::align(&rows.collect::<Vec<_>>()) + &why.collect::<String>()
}

/// Returns the row of a disk that is out: with the time since then, instead of a VMM.
fn out_row(disk: &OutDisk) -> Vec<String> {
    let since = short(Duration::from_nanos(disk.out_ns));
    [&disk.id, &disk.interface, NONE, NONE, "out", NONE, NONE, &since, NONE].map(str::to_owned).to_vec()
}

fn row(disk: &ListedDisk) -> Vec<String> {
    let ListedDisk { id, interface, storage, size_bytes, read_only, health, frontend, .. } = disk;
    let none = || NONE.to_owned();
    let state = match health {
        None => "opening",
        Some(health) if health.state != "running" => &health.state,
        Some(_) if *read_only == Some(true) => "read-only",
        Some(health) => &health.state,
    };
    let of_frontend = |show: fn(&FrontendInfo) -> String| frontend.as_ref().map_or_else(none, show);
    vec![
        id.clone(),
        interface.clone(),
        storage.clone().unwrap_or_else(none),
        size_bytes.map_or_else(none, |bytes| ByteLen(bytes).to_string()),
        state.to_owned(),
        health.as_ref().map_or_else(none, |health| health.failed.to_string()),
        of_frontend(
            |frontend| if frontend.pid == 0 { "connected".to_owned() } else { format!("pid {}", frontend.pid) },
        ),
        of_frontend(|frontend| short(Duration::from_nanos(frontend.connected_ns))),
        of_frontend(|frontend| frontend.queues.to_string()),
    ]
}

/// Formats a time by its largest unit.
fn short(time: Duration) -> String {
    match time.as_secs() {
        seconds @ 0..60 => format!("{seconds}s"),
        seconds @ 60..3600 => format!("{}m", seconds / 60),
        seconds @ 3600..86_400 => format!("{}h", seconds / 3600),
        seconds => format!("{}d", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use mqblk_admin::model::Health;

    use super::*;

    #[test]
    fn a_table_of_disks() {
        let health = |state: &str, failed| Some(Health { state: state.to_owned(), failed, ..Health::default() });
        let frontend = FrontendInfo { pid: 77, connected_ns: 7_300_000_000_000, features: 1, queues: 4 };
        let disk =
            ListedDisk { interface: "virtio-blk".to_owned(), size_bytes: Some(1 << 30), ..ListedDisk::default() };
        let disks = [
            ListedDisk { id: "a".to_owned(), health: health("running", 0), frontend: Some(frontend), ..disk.clone() },
            ListedDisk { id: "b".to_owned(), health: health("stopped", 3), read_only: Some(true), ..disk.clone() },
            ListedDisk { id: "c".to_owned(), size_bytes: None, ..disk },
        ];
        let out = OutDisk {
            id: "d".to_owned(),
            interface: "virtio-blk".to_owned(),
            out_ns: 61_000_000_000,
            why: "no file".to_owned(),
            ..OutDisk::default()
        };
        let table = disk_table(&disks, &[out]);
        let rows: Vec<Vec<&str>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(rows[1], ["a", "virtio-blk", "-", "1G", "running", "0", "pid", "77", "2h", "4"]);
        assert_eq!(rows[2], ["b", "virtio-blk", "-", "1G", "stopped", "3", "-", "-", "-"]);
        assert_eq!(rows[3], ["c", "virtio-blk", "-", "-", "opening", "-", "-", "-", "-"]);
        assert_eq!(rows[4], ["d", "virtio-blk", "-", "-", "out", "-", "-", "1m", "-"]);
        assert_eq!(rows[5].join(" "), "d is out, and tried again in 0s: no file");
    }

    #[test]
    fn times_have_one_unit() {
        let shown = [0, 59, 60, 7199, 86_400 * 3].map(|seconds| short(Duration::from_secs(seconds)));
        assert_eq!(shown, ["0s", "59s", "1m", "1h", "3d"]);
    }
}
