//! An image that changes while it is served: snapshots, and resizes.

use std::time::Duration;

use mqblk_admin::Client;
use mqblk_tests::ceph::CephCluster;
use mqblk_tests::hostile::daemon::HostileDaemon;
use mqblk_tests::hostile::load::{BLOCK, VhostUserLoad};
use mqblk_tests::hostile::{TIMEOUT, wait_for};
use serde_json::json;

const BLOCKS: usize = 64;

/// A snapshot between two rounds has the data written before it, for Ceph's program and for a daemon that serves it
/// while the image is in use.
#[test]
fn a_snapshot_is_taken_while_the_image_is_served() {
    let cluster = CephCluster::start();
    let settings = cluster.image("a", 16);
    let daemon = HostileDaemon::start(1, &[("a", &format!("{settings},queues=1"))]);
    let mut load = VhostUserLoad::connect(daemon.socket("a"), 1, BLOCKS, 1);
    (0..50).for_each(|_| load.round());
    cluster.rbd(&["snap", "create", "--no-progress", "rbd/a@s"]);
    let before = load.generations().to_vec();
    (0..50).for_each(|_| load.round());
    assert_ne!(load.generations(), before);
    cluster.check_blocks("a@s", &before);

    // Served at the same time, without its lock.
    let reader = HostileDaemon::start(1, &[("s", &format!("{settings},snap=s,queues=1"))]);
    let mut snapshot = VhostUserLoad::connect(reader.socket("s"), 1, BLOCKS, 2);
    assert!(snapshot.device().info().read_only, "a snapshot is not written");
    snapshot.read_all(&before);
    (0..20).for_each(|_| load.round());
    snapshot.read_all(&before);
    drop(snapshot);
    reader.stop();
    let after = load.generations().to_vec();
    drop(load);
    daemon.stop();
    cluster.check_blocks("a", &after);
}

/// The image grows by Ceph's program, and the guest is notified without a command. It shrinks and grows by the daemon's
/// command.
#[test]
fn an_image_gets_another_size_under_load() {
    let cluster = CephCluster::start();
    let settings = format!("{},queues=1", cluster.image("a", 8));
    let folder = tempfile::tempdir().unwrap();
    let admin = folder.path().join("admin");
    let daemon = HostileDaemon::start_with(1, &[("a", &settings)], &["--admin", &admin.display().to_string()]);
    let mut load = VhostUserLoad::connect_with_config_changes(daemon.socket("a"), 1, BLOCKS, 1);
    let bytes = |load: &mut VhostUserLoad| load.device().info().capacity.0 * 512;
    assert_eq!(bytes(&mut load), 8 << 20);
    cluster.rbd(&["resize", "--no-progress", "rbd/a", "--size", "12M"]);
    wait_for("the guest's notification", || {
        load.round();
        load.device().wait_config_change(Duration::ZERO).expect("the server's messages").then_some(())
    });
    assert_eq!(bytes(&mut load), 12 << 20);
    // The added space is used.
    load.use_blocks((12 << 20) / BLOCK);
    (0..50).for_each(|_| load.round());

    for mib in [4_u64, 10] {
        load.use_blocks((4 << 20) / BLOCK);
        let asking = std::thread::spawn({
            let admin = admin.clone();
            move || {
                let mut client = Client::connect_with(&admin, TIMEOUT.time()).expect("the admin socket");
                client.call("resize", &json!({ "id": "a", "size": mib << 20, "shrink": true }))
            }
        });
        while !asking.is_finished() {
            load.round();
            let _ = load.device().wait_config_change(Duration::ZERO).expect("the server's messages");
        }
        let result = asking.join().expect("no panic").expect("it can be resized");
        assert_eq!(result["size_bytes"], mib << 20, "{result}");
        let found: serde_json::Value =
            serde_json::from_str(&cluster.rbd(&["info", "--format", "json", "rbd/a"])).unwrap();
        assert_eq!(found["size"], mib << 20, "{found}");
        load.round();
        assert_eq!(bytes(&mut load), mib << 20);
    }
    let mut generations = load.generations().to_vec();
    // Truncated data does not reappear.
    generations.resize((10 << 20) / BLOCK, 0);
    drop(load);
    daemon.stop();
    cluster.check_blocks("a", &generations);
}
