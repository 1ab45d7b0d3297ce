//! qcow2 images served by a daemon in the sandbox: overlays, backing files, added LUNs, kills.

use std::path::Path;
use std::process::Command;

use mqblk_admin::Client;
use mqblk_tests::hostile::daemon::{HostileDaemon, mqblk_binary};
use mqblk_tests::hostile::load::VhostUserLoad;
use mqblk_tests::hostile::wait_for;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

/// Runs `qemu-img`, and returns its exit code and its output.
fn qemu_img(arguments: &[&str]) -> (Option<i32>, String) {
    let output = Command::new("qemu-img").args(arguments).output();
    let output = output.unwrap_or_else(|error| panic!("qemu-img: {error}; apt-get install qemu-utils"));
    (output.status.code(), String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned())
}

fn make(arguments: &[&str]) {
    let (code, text) = qemu_img(&[&["create", "-q", "-f", "qcow2"], arguments].concat());
    assert_eq!(code, Some(0), "{text}");
}

#[test]
fn overlays_are_made_and_served_in_the_sandbox() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name).display().to_string();
    make(&[&at("golden.qcow2"), "4M"]);
    let settings = |name: &str| format!("storage=qcow2,base={},overlay={},queues=2", at("golden.qcow2"), at(name));
    let (first, second) = (settings("vm1.qcow2"), settings("vm2.qcow2"));
    for run in 0..2 {
        let mut daemon = HostileDaemon::start(2, &[("vm1", &first), ("vm2", &second)]);
        let mut loads = ["vm1", "vm2"].map(|id| VhostUserLoad::connect(daemon.socket(id), 2, 64, run));
        for _ in 0..30 {
            loads.iter_mut().for_each(VhostUserLoad::round);
        }
        daemon.assert_alive("I/O");
        drop(loads);
        daemon.stop();
        for name in ["vm1.qcow2", "vm2.qcow2"] {
            let (code, text) = qemu_img(&["check", &at(name)]);
            assert_eq!(code, Some(0), "{text}");
            let (_, info) = qemu_img(&["info", &at(name)]);
            assert!(info.contains("golden.qcow2") && info.contains("backing file format: qcow2"), "{info}");
        }
    }
}

/// The printed configuration opens the same disk.
#[test]
fn the_printed_configuration_opens_the_same_disk() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name).display().to_string();
    std::fs::write(at("base.raw"), vec![1; 1 << 20]).expect("a base");
    let print = |arguments: &[&str]| {
        let output = Command::new(mqblk_binary()).args(["serve", "--print-config"]).args(arguments).output();
        let output = output.expect("mqblk");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("text")
    };
    let disk = format!("id=a,socket={},storage=qcow2,base={},overlay={}", at("a.sock"), at("base.raw"), at("a.qcow2"));
    let printed = print(&["--disk", &disk]);
    assert!(printed.contains("backing = \"deny\"") && printed.contains("storage = \"qcow2\""), "{printed}");
    std::fs::write(at("config.toml"), &printed).expect("a file");
    assert_eq!(print(&["--config", &at("config.toml")]), printed);
}

/// A LUN added at run time: its backing file must be allowed by the image's rule and by the sandbox, and no overlay is
/// made.
#[test]
fn luns_follow_both_rules_at_run_time() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name).display().to_string();
    for name in ["allowed", "other"] {
        std::fs::create_dir(at(name)).expect("a folder");
        make(&[&at(&format!("{name}/base.qcow2")), "2M"]);
        let base = at(&format!("{name}/base.qcow2"));
        make(&["-b", &base, "-F", "qcow2", &at(&format!("allowed/on-{name}.qcow2"))]);
    }
    let (admin, controller) = (at("admin"), format!("id=c,socket={}", at("c.sock")));
    let allowed = at("allowed");
    let arguments = ["--admin", &admin, "--controller", &controller, "--sandbox-allow", &allowed];
    let daemon = HostileDaemon::start_with(1, &[], &arguments);
    let mut client = wait_for("the admin socket", || Client::connect(Path::new(&admin)).ok());
    let mut add = |id: &str, settings: &str| {
        let settings = format!("id={id},storage=qcow2,{settings}");
        client.call("lun.add", &json!({ "controller": "c", "settings": settings })).map_err(|error| error.to_string())
    };
    let path = |name: &str| format!("path={}", at(&format!("allowed/{name}")));
    let error = add("denied", &path("on-allowed.qcow2")).expect_err("the image's rule");
    assert!(error.contains("backing=deny") && error.contains("allowed/base.qcow2"), "{error}");
    let error = add("outside", &format!("{},backing=allow", path("on-other.qcow2"))).expect_err("the sandbox's rule");
    assert!(error.contains("other/base.qcow2") && error.contains("sandbox-allow"), "{error}");
    add("good", &format!("{},backing={}", path("on-allowed.qcow2"), at("allowed"))).expect("both allow it");
    let new = format!("base={},overlay={}", at("allowed/base.qcow2"), at("allowed/new.qcow2"));
    let error = add("new", &new).expect_err("nothing is made in the sandbox");
    assert!(error.contains("in the sandbox") && error.contains("qemu-img create"), "{error}");
    assert!(!Path::new(&at("allowed/new.qcow2")).exists());
    daemon.stop();
}

/// The next daemon repairs the image of a killed one, and the guest's data is intact.
#[test]
fn a_killed_daemon_leaves_images_that_the_next_one_repairs() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("vm.qcow2").display().to_string();
    make(&[&path, "64M"]);
    let settings = format!("storage=qcow2,path={path},queues=2");
    for seed in 0..5 {
        let mut daemon = HostileDaemon::start(2, &[("vm", &settings)]);
        let mut load = VhostUserLoad::connect(daemon.socket("vm"), 2, 512, seed);
        for _ in 0..20 + seed * 7 {
            load.round();
        }
        kill_process(Pid::from_raw(daemon.pid().cast_signed()).expect("a pid"), Signal::KILL).expect("a kill");
        daemon.wait_end();
        drop(load);
    }
    HostileDaemon::start(1, &[("vm", &settings)]).stop();
    let (code, text) = qemu_img(&["check", &path]);
    assert!(matches!(code, Some(0 | 3)), "{text}");
}
