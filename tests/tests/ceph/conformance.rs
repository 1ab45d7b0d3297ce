//! The conformance suite on real images, and the errors of an open.

use mqblk_storage::conformance::{TestTarget, run};
use mqblk_tests::ceph::{CephCluster, POOL};

#[test]
fn real_images_conform() {
    let cluster = CephCluster::start();
    let conf = cluster.conf().display().to_string();
    cluster.image("plain", 8);
    let settings = [("pool", POOL), ("image", "plain"), ("conf", &conf)];
    run(&TestTarget { kind: "rbd", settings: &settings, keeps_data: true, seed: 1 });

    // Objects of another size, in a namespace, with large blocks, handed over between users.
    cluster.rbd(&["namespace", "create", "rbd/blue"]);
    cluster.rbd(&["create", "rbd/blue/large", "--size", "8M", "--object-size", "64K"]);
    let settings = [
        ("pool", POOL),
        ("namespace", "blue"),
        ("image", "large"),
        ("conf", &conf),
        ("user", "admin"),
        ("block-size", "4096"),
        ("lock", "shared-migration"),
    ];
    run(&TestTarget { kind: "rbd", settings: &settings, keeps_data: true, seed: 2 });

    // Without the features that need a lock.
    cluster.rbd(&["create", "rbd/simple", "--size", "8M", "--image-feature", "layering"]);
    let settings = [("pool", POOL), ("image", "simple"), ("conf", &conf)];
    run(&TestTarget { kind: "rbd", settings: &settings, keeps_data: true, seed: 3 });
}

/// Each error names its key, the value with the cluster's answer, and the expected value.
#[test]
fn what_cannot_be_opened_is_named() {
    let cluster = CephCluster::start();
    let conf = cluster.conf().display().to_string();
    cluster.image("a", 8);
    let missing = format!("{conf}.none");
    let open = |settings: &[(&str, &str)]| {
        let trial = TestTarget { kind: "rbd", settings, keeps_data: true, seed: 0 };
        trial.open(&[]).map(drop).expect_err("it opens").to_string()
    };
    for (settings, begin, end) in [
        (
            &[("pool", "none"), ("image", "a"), ("conf", &*conf)][..],
            "disk \"trial\": pool: found \"none\" (opening the pool: No such file or directory (os error 2)), expected a pool",
            "",
        ),
        (
            &[("pool", POOL), ("image", "none"), ("conf", &conf)],
            "disk \"trial\": image: found rbd:rbd/none (opening the image: No such file or directory (os error 2)), expected",
            "`rbd ls rbd` lists them",
        ),
        (
            &[("pool", POOL), ("image", "a"), ("snap", "none"), ("conf", &conf)],
            "disk \"trial\": snap: found rbd:rbd/a@none (opening the image: No such file or directory (os error 2)), expected",
            "client.admin may read",
        ),
        (
            &[("pool", POOL), ("image", "a"), ("conf", &missing)],
            "disk \"trial\": conf: found \"",
            "the configuration file of a Ceph cluster, which this user may read",
        ),
    ] {
        let error = open(settings);
        assert!(error.starts_with(begin) && error.ends_with(end), "{error}");
    }
    // Monitors that do not answer within the time of the configuration.
    let silent = format!("{conf}.silent");
    std::fs::write(&silent, "[global]\nmon_host = [v2:127.0.0.1:9]\nclient_mount_timeout = 2\n").unwrap();
    let error = open(&[("pool", POOL), ("image", "a"), ("conf", &silent)]);
    assert!(error.contains("conf: found") && error.contains("(connecting to the cluster: "), "{error}");
    assert!(error.contains("expected a cluster whose monitors answer in time (client_mount_timeout)"), "{error}");
}
