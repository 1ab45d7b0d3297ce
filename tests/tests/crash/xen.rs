//! Xen: backends that are killed and stopped at random times, under overlapping requests of all sizes, which complete
//! in any order.

use mqblk_tests::crash::kills::KillPlan;
use mqblk_tests::crash::xen::XenRig;

/// Disks: their ids and special settings.
const DISKS: [(&str, &str); 3] = [
    ("cache", "storage=file,direct=off,grants=map"),
    ("direct", "storage=file,direct=on,merge=on,grants=copy"),
    ("fault", "storage=fault,inner=file,direct=off,merge=on,grants=persistent,fault-jitter-us=3000,fault-reorder=4"),
];

#[test]
fn killed_and_stopped_under_load() {
    let mut rig = XenRig::start(&DISKS);
    let loads = DISKS.map(|(id, _)| (vec![id], rig.connect(id))).into();
    rig.kill_and_stop("xen", loads, KillPlan::usual(), XenRig::image);
}
