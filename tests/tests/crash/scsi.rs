//! virtio-scsi: daemons that are killed and stopped at random times. Logical units of different speed share queues,
//! with multi-step commands and task management functions among the reads and writes.

use mqblk_tests::crash::kills::KillPlan;
use mqblk_tests::crash::scsi::ScsiRig;

/// Logical units, in the order of their numbers.
const UNITS: [(&str, &str); 3] = [
    ("cache", "storage=file,direct=off"),
    ("fault", "storage=fault,inner=file,direct=off,merge=on,fault-jitter-us=3000,fault-reorder=4"),
    ("direct", "storage=file,direct=on,merge=on"),
];

#[test]
fn killed_and_stopped_under_load() {
    kill_and_stop_under_load(false);
}

#[test]
fn killed_and_stopped_under_load_with_packed_rings() {
    kill_and_stop_under_load(true);
}

fn kill_and_stop_under_load(packed: bool) {
    let mut rig = ScsiRig::start(&UNITS, &[]);
    let load = (UNITS.map(|(name, _)| name).to_vec(), rig.connect(packed));
    let name = if packed { "virtio-scsi, packed rings" } else { "virtio-scsi" };
    let stats = rig.kill_and_stop(name, vec![load], KillPlan::usual(), ScsiRig::image);
    assert!(stats.compare_writes > 0, "no COMPARE AND WRITE succeeded");
}

/// Each request of one of them takes 0.2 s, beside fast ones on the same queues.
const SLOW: [(&str, &str); 2] = [
    ("slow", "storage=fault,inner=file,direct=off,fault-latency-us=200000,fault-jitter-us=50000"),
    ("cache", "storage=file,direct=off"),
];

#[test]
fn killed_and_stopped_while_a_unit_is_slow() {
    let mut rig = ScsiRig::start(&SLOW, &[]);
    let load = (SLOW.map(|(name, _)| name).to_vec(), rig.connect(false));
    rig.kill_and_stop("virtio-scsi, a slow unit", vec![load], KillPlan::slow(), ScsiRig::image);
}

#[test]
fn stopped_while_a_unit_does_not_complete_in_time() {
    let unit = ("stuck", "storage=fault,inner=file,direct=off,fault-latency-us=1800000");
    let mut rig = ScsiRig::start(&[unit], &["--drain-timeout-s", "1"]);
    let port = rig.connect(false);
    rig.stop_while_stuck("virtio-scsi, a unit that does not answer", (unit.0, port), ScsiRig::image);
}
