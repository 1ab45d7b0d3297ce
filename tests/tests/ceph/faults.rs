//! Parts of the cluster fail under a load that verifies its reads.

use std::time::Duration;

use mqblk_tests::ceph::CephCluster;
use mqblk_tests::hostile::daemon::HostileDaemon;
use mqblk_tests::hostile::load::start_neighbour;

/// The OSDs are killed in mid-I/O and restarted, one after the other: each must get the missed writes from the other.
/// Meanwhile the monitor is killed, without which no client learns of a change.
#[test]
fn osds_and_the_monitor_are_killed_in_mid_io() {
    let cluster = CephCluster::start();
    let settings = format!("{},queues=2", cluster.image("a", 16));
    let daemon = HostileDaemon::start(2, &[("a", &settings)]);
    let load = start_neighbour(daemon.socket("a"), 2, 1);
    for name in ["osd.0", "osd.1", "mon.a"] {
        cluster.kill(name);
        load.assert_progress(&format!("{name} was killed"));
        cluster.revive();
        load.assert_progress(&format!("{name} was revived"));
        wait_until_clean(&cluster);
    }
    let (verified, generations) = load.finish();
    assert!(verified > 0);
    assert_eq!(daemon.warnings("a"), [""; 0], "no request has failed");
    daemon.stop();
    cluster.check_blocks("a", &generations);
}

/// Requests wait while there is no OSD: none fails, and all continue when one is back.
#[test]
fn requests_wait_for_a_cluster_that_is_away() {
    let cluster = CephCluster::start();
    let settings = format!("{},queues=2", cluster.image("a", 16));
    let daemon = HostileDaemon::start(1, &[("a", &settings), ("other", "storage=ram,size=4M,queues=1")]);
    let load = start_neighbour(daemon.socket("a"), 2, 1);
    let other = start_neighbour(daemon.socket("other"), 1, 2);
    cluster.kill("osd.0");
    cluster.kill("osd.1");
    // Requests already sent have completed.
    std::thread::sleep(Duration::from_millis(500));
    let stuck = load.rounds();
    other.assert_progress("the OSDs were killed");
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!(load.rounds(), stuck, "requests complete without storage");
    other.assert_progress("requests wait");
    cluster.revive();
    load.assert_progress("the OSDs were revived");
    let (_, generations) = load.finish();
    other.finish();
    assert_eq!(daemon.warnings("a"), [""; 0], "no request has failed");
    daemon.stop();
    cluster.check_blocks("a", &generations);
}

/// Waits until both OSDs have all data again.
fn wait_until_clean(cluster: &CephCluster) {
    for _ in 0..300 {
        let pgs = cluster.ceph(&["pg", "stat"]);
        if pgs.contains("8 active+clean;") {
            return;
        }
        std::thread::sleep(Duration::from_millis(200));
    }
    panic!("the cluster does not recover: {}", cluster.ceph(&["pg", "stat"]));
}
