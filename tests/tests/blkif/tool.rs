//! `mqblk xen` and `mqblk stat` beside a daemon with Xen guests.

use std::process::{Command, Output, Stdio};

use mqblk_driver::blkfront::{BlkfrontDevice, BlkfrontOptions};
use mqblk_tests::blkif::{BlkfrontLoad, SimulatedHost};
use mqblk_tests::hostile::daemon::mqblk_bench_binary;
use mqblk_tests::hostile::{TIMEOUT, wait_for};
use mqblk_xen::vbd::XenbusState;
use serde_json::Value;

fn said(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout.clone()).expect("text")
}

/// Returns the one line on standard error of a command that failed with this code.
fn refused(output: &Output, code: i32) -> String {
    assert_eq!(output.status.code(), Some(code), "{output:?}");
    let text = String::from_utf8(output.stderr.clone()).expect("text");
    assert_eq!(text.lines().count(), 1, "{text}");
    text.trim_end().to_owned()
}

#[test]
fn a_disk_is_attached_listed_and_detached() {
    let mut host = SimulatedHost::start(&["--workers", "2", "--xen-watch"]);
    host.create_image("a.img", 8 << 20);
    let params = format!("file:{}/a.img", host.folder().display());
    let place = ["--domid", "1", "--vdev", "xvdb"];
    // A guest whose driver waits for its disk.
    let options = BlkfrontOptions {
        connect_timeout: TIMEOUT.time(),
        reply_timeout: TIMEOUT.time(),
        ..BlkfrontOptions::new(host.domain(1), 51728)
    };
    let guest = std::thread::spawn({
        let options = options.clone();
        move || BlkfrontDevice::connect(&BlkfrontOptions { queues: 2, ..options })
    });
    let output = host.run_mqblk_xen("attach", &[&place[..], &[&params]].concat());
    assert_eq!(said(&output), "attached xvdb of domain 1 (mqblk-1-51728)\n");
    let device = guest.join().unwrap().expect("a disk");

    let listed = said(&host.run_mqblk_xen("list", &[]));
    let cells: Vec<Vec<&str>> = listed.lines().map(|line| line.split_whitespace().collect()).collect();
    let most = std::thread::available_parallelism().unwrap().to_string();
    let want = [
        "mqblk-1-51728",
        "1",
        "xvdb",
        "Connected",
        "(4)",
        "Connected",
        "(4)",
        &format!("2/{most}"),
        "8M",
        "w",
        &params,
    ];
    assert_eq!(cells[1], want, "{listed}");
    let listed: Value = serde_json::from_str(&said(&host.run_mqblk_xen("list", &["--json"]))).unwrap();
    let one = &listed["devices"][0];
    assert_eq!(
        (one["vdev"].as_str(), one["sectors"].as_u64(), one["queues"].as_u64()),
        (Some("xvdb"), Some(16384), Some(2))
    );
    assert_eq!((one["backend_state"].as_u64(), one["error"].is_null()), (Some(4), true));

    let again = refused(&host.run_mqblk_xen("attach", &[&place[..], &[&params]].concat()), 1);
    assert!(
        again.starts_with("mqblk: xen attach: vdev: found xvdb, which domain 1 has already (params file:/"),
        "{again}"
    );
    // The guest does not close the device: it was notified, and the detach is still pending.
    let late = refused(&host.run_mqblk_xen("detach", &[&place[..], &["--wait", "0"]].concat()), 1);
    assert!(late.contains("expected a backend that is Closed (6)") && late.contains("--force"), "{late}");
    let guest = std::thread::spawn(move || {
        let mut device = device;
        wait_for("the request to close", || device.wait_change(TIMEOUT.time()).expect("xenstore"));
        device.stop(Vec::new())
    });
    let output = host.run_mqblk_xen("detach", &[&place[..], &["--json"]].concat());
    let report: Value = serde_json::from_str(&said(&output)).unwrap();
    assert_eq!((report["done"].as_str(), report["device"].as_str()), (Some("detached"), Some("mqblk-1-51728")));
    guest.join().unwrap().expect("an end in good order");
    assert_eq!(said(&host.run_mqblk_xen("list", &[])).lines().count(), 1);
    assert_eq!(host.store().list("/local/domain/1/device/vbd/51728").unwrap(), None);
    host.stop();
}

#[test]
fn errors_are_reported() {
    let mut host = SimulatedHost::start(&["--workers", "1", "--xen-watch"]);
    for (action, arguments, code, want) in [
        (
            "attach",
            &["--domid", "1", "--vdev", "vda", "null:1G"][..],
            2,
            "xen attach: vdev: found \"vda\", expected xvda to",
        ),
        (
            "attach",
            &["--domid", "1", "--vdev", "xvda", "raw:/a"],
            2,
            "xen attach: params: found \"raw:/a\", expected file:/PATH, null:SIZE or mqblk:DISK-ID",
        ),
        (
            "attach",
            &["--domid", "1", "--vdev", "xvda", "--type", "a/b", "null:1G"],
            2,
            "xen attach: type: found \"a/b\"",
        ),
        (
            "attach",
            &["--domid", "77", "--vdev", "xvda", "null:1G"],
            1,
            "xen attach: domid: found 77, expected a domain that is there",
        ),
        (
            "attach",
            &["--domid", "1", "--vdev", "xvda", "file:/nowhere"],
            1,
            "xen attach: mqblk-1-51712: the backend says: 19 params: path: found \"/nowhere\"",
        ),
        (
            "attach",
            &["--domid", "1", "--vdev", "xvdb", "--wait", "1", "null:1G"],
            1,
            "xen attach: mqblk-1-51728: found backend state 2 and frontend state 1 after 1s, expected both Connected (4) (does the guest have a driver?)",
        ),
        (
            "attach",
            &["--domid", "1", "--vdev", "xvdc", "--wait", "1", "--type", "other", "null:1G"],
            1,
            "xen attach: other-1-51744: found backend state 1 and frontend state 1 after 1s, expected both Connected (4) (does a backend for this type run?)",
        ),
        (
            "detach",
            &["--domid", "1", "--vdev", "xvdz"],
            1,
            "xen detach: vdev: found xvdz, which domain 1 does not have with a backend of type mqblk",
        ),
        (
            "resize",
            &["--domid", "1", "--vdev", "xvdz"],
            1,
            "xen resize: vdev: found xvdz, which domain 1 does not have",
        ),
    ] {
        let text = refused(&host.run_mqblk_xen(action, arguments), code);
        assert!(text.starts_with(&format!("mqblk: {want}")), "{arguments:?}: {text}");
    }
    // A vdev of another backend.
    let taken = refused(&host.run_mqblk_xen("attach", &["--domid", "1", "--vdev", "xvdc", "null:1G"]), 1);
    assert!(taken.contains("which domain 1 has already (backend /local/domain/0/backend/other/1/51744)"), "{taken}");
    for vdev in ["xvda", "xvdb"] {
        said(&host.run_mqblk_xen("detach", &["--domid", "1", "--vdev", vdev, "--force"]));
    }
    let listed = said(&host.run_mqblk_xen("list", &["--type", "other"]));
    assert!(listed.contains("Initialising (1)") && listed.contains("null:1G"), "{listed}");
    host.assert_alive("mistakes");
    // Another daemon for the same type.
    let mut command = Command::new(mqblk_bench_binary());
    command.args(["serve", "--xen-watch", "--workers", "1", "--xen"]).arg(host.folder().join("xen"));
    command.arg("--xen-state").arg(host.folder().join("state")).env("RUST_LOG", "off");
    let text = refused(&command.stdin(Stdio::null()).output().unwrap(), 1);
    assert_eq!(
        text,
        "mqblk: serve: xen: found another process that serves every device of type \"mqblk\", expected none"
    );
    host.stop();
    // Without a Xen.
    let mut command = Command::new(mqblk_bench_binary());
    let output = command.args(["xen", "list", "--xen", "/nowhere"]).stdin(Stdio::null()).output().unwrap();
    let text = refused(&output, 1);
    assert!(text.starts_with("mqblk: xen: ") && text.contains("/nowhere"), "{text}");
}

#[test]
fn disks_of_the_configuration_are_attached_at_the_start() {
    let mut host = SimulatedHost::start(&[
        "--workers",
        "2",
        "--admin",
        "FOLDER/admin.sock",
        "--disk",
        "id=root,interface=xen,domid=1,vdev=xvda,storage=ram,size=4M,queues=2,grants=persistent",
        "--disk",
        "id=socket,socket=FOLDER/vhost.sock,storage=ram,size=1M,queues=1",
        "--xen-watch",
    ]);
    let options = BlkfrontOptions {
        queues: 2,
        connect_timeout: TIMEOUT.time(),
        reply_timeout: TIMEOUT.time(),
        ..BlkfrontOptions::new(host.domain(1), 51712)
    };
    let mut load = BlkfrontLoad::connect(&options, 200, 1);
    (0..30).for_each(|_| load.round());
    let found = host.create_device(2, "xvdc", "null:1G");
    let _found = BlkfrontDevice::connect(&host.frontend_options(&found)).expect("a disk");
    let stat = |arguments: &[&str]| {
        let mut command = Command::new(mqblk_bench_binary());
        command.args(["stat", "--socket"]).arg(host.folder().join("admin.sock")).args(arguments);
        said(&command.stdin(Stdio::null()).output().unwrap())
    };
    let report: Value = serde_json::from_str(&stat(&["--json"])).unwrap();
    let disks = report["stat"]["disks"].as_array().expect("disks").clone();
    let ids: Vec<_> =
        disks.iter().map(|disk| (disk["id"].as_str().unwrap(), disk["interface"].as_str().unwrap())).collect();
    assert_eq!(ids, [("root", "xen"), ("socket", "virtio-blk"), ("mqblk-2-51744", "xen")]);
    let root = &disks[0];
    assert!(root["totals"]["counters"]["writes"].as_u64() > Some(100), "{root}");
    let grants = &root["grants"];
    assert!(grants["persistent_hits"].as_u64() > Some(100) && grants["held"].as_u64() >= Some(16), "{grants}");
    assert_eq!(grants["copies"], 0, "{grants}");
    assert!(disks[1].get("grants").is_none());
    let table = stat(&["--queues"]);
    assert!(table.lines().any(|line| line.starts_with("grants ")), "{table}");
    assert!(stat(&["--disk", "mqblk-2-51744"]).contains("mqblk-2-51744"));
    // The statistics survive the connection.
    load.finish();
    let writes = |report: &Value| report["stat"]["disks"][0]["totals"]["counters"]["writes"].as_u64().unwrap();
    let before = writes(&report);
    let now: Value = serde_json::from_str(&stat(&["--json", "--disk", "root"])).unwrap();
    assert_eq!(writes(&now), before);
    assert_eq!(now["stat"]["disks"][0]["grants"]["held"], 0);

    // The next daemon finds the device, and attaches no second one.
    host.stop();
    host.spawn();
    let mut load = BlkfrontLoad::connect(&options, 200, 2);
    load.round();
    load.finish();
    host.stop();
}

#[test]
fn a_daemon_that_cannot_attach_leaves_no_device() {
    let host = SimulatedHost::start(&["--workers", "1", "--xen-watch"]);
    let taken = host.create_device(2, "xvda", "null:1G");
    host.wait_for_backend_state(&taken, XenbusState::InitWait);
    let mut command = Command::new(mqblk_bench_binary());
    command.args(["serve", "--xen"]).arg(host.folder().join("xen")).arg("--xen-state").arg(host.folder().join("other"));
    command.args(["--disk", "id=x,interface=xen,domid=1,vdev=xvda,storage=null,size=1G"]);
    command.args(["--disk", "id=y,interface=xen,domid=2,vdev=xvda,storage=null,size=1G"]);
    let output = command.env("RUST_LOG", "off").stdin(Stdio::null()).output().unwrap();
    let text = refused(&output, 1);
    let want =
        "mqblk: disk \"y\": vdev: found xvda, which domain 2 has already (params null:1G), expected one that is free";
    assert_eq!(text, want);
    assert_eq!(host.store().list("/local/domain/1/device/vbd/51712").unwrap(), None);
    assert_eq!(host.store().list("/local/domain/0/backend/mqblk/1").unwrap().unwrap_or_default(), Vec::<String>::new());
}
