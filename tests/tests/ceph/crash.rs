//! Daemons that are killed and stopped under load, with the default configuration of a Ceph package: librbd has a write
//! cache (`rbd_cache`).

use mqblk_tests::ceph::{CephCluster, POOL};
use mqblk_tests::crash::blk::BlkRig;
use mqblk_tests::crash::kills::{KillPlan, is_full_run};

/// With the cluster's configuration, and with a cache set on the image itself, which overrides a client's setting.
#[test]
fn killed_and_stopped_under_load() {
    let cluster = CephCluster::start();
    let conf = std::fs::read_to_string(cluster.conf()).expect("the configuration");
    assert!(!conf.contains("rbd_cache"), "not what a package installs:\n{conf}");
    // A killed daemon's lock is broken after this time; 30 s by default.
    cluster.ceph(&["config", "set", "osd", "osd_client_watch_timeout", "5"]);
    let settings = [cluster.image("usual", 5), cluster.image("cached", 5)];
    cluster.rbd(&["config", "image", "set", &format!("{POOL}/cached"), "rbd_cache", "true"]);
    let disks = [("usual", &*settings[0]), ("cached", &settings[1])];
    let mut rig = BlkRig::start(&disks, &[]);
    let loads = rig.loads(&disks, false);
    let kills = if is_full_run() { 20 } else { 4 };
    let plan = KillPlan { kills, stops: kills / 4, max_pause_ms: 300 };
    rig.kill_and_stop("virtio-blk on rbd", loads, plan, |rig, id| {
        let log = rig.daemon.log();
        let warned = |id: &str| log.contains(&format!("rbd:{POOL}/{id}: its pool or itself has rbd_cache=true"));
        assert!(warned("cached") && !warned("usual"), "{log}");
        cluster.export(id)
    });
}
