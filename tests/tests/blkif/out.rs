//! A disk that cannot be served when the daemon starts: its guest waits, new or not, and gets the disk once it can be
//! served.

use mqblk_admin::Client;
use mqblk_driver::blkfront::BlkfrontOptions;
use mqblk_driver::blkfront::toolstack::Vbd;
use mqblk_memory::DomainId;
use mqblk_tests::blkif::{BlkfrontLoad, SimulatedHost};
use mqblk_tests::hostile::{TIMEOUT, wait_for};
use mqblk_xen::vbd::XenbusState;
use serde_json::{Value, json};

const BYTES: u64 = 1 << 20;
/// The number of the device xvda.
const XVDA: u32 = 51712;

fn call(host: &SimulatedHost, verb: &str, params: &Value) -> Result<Value, String> {
    let connect = || Client::connect_with(&host.folder().join("admin"), TIMEOUT.time()).ok();
    wait_for("the admin socket", connect).call(verb, params).map_err(|error| error.to_string())
}

/// Returns true if the disk is out. Other disks may be out while the kernel still has requests of a killed daemon.
fn is_out(host: &SimulatedHost, id: &str) -> bool {
    let list = call(host, "disk.list", &Value::Null).expect("a list");
    list["out"].as_array().expect("a list").iter().any(|disk| disk["id"] == id)
}

/// `vdev`: the keys by which the configuration attaches the disk to the guest. Empty: its toolstack attaches it.
fn a_guest_waits_for_its_disk(vdev: &str, watch: &[&str]) {
    let disk = |id: &str| {
        let vdev = if id == "a" { vdev } else { "" };
        format!("id={id},interface=xen,queues=1,path=FOLDER/{id}.img{vdev}")
    };
    let arguments = ["--workers", "2", "--sandbox", "on", "--admin", "FOLDER/admin", "--disk", &disk("a"), "--disk"];
    let mut host = SimulatedHost::start(&["--workers", "1", "--disk", "id=none,interface=xen,storage=ram,size=1M"]);
    host.create_image("b.img", BYTES);
    host.stop();
    host.spawn_with(&[&arguments[..], &[&disk("b")], watch].concat());
    assert!(is_out(&host, "a") && !is_out(&host, "b"));
    let why = call(&host, "disk.retry", &json!({ "id": "a" })).expect_err("it is not there");
    assert!(why.contains("No such file"), "{why}");

    // The toolstack has made the device, or the daemon will. The guest is new.
    let other = host.create_device(1, "xvdb", "mqblk:b");
    let device = match vdev {
        "" => host.create_device(1, "xvda", "mqblk:a"),
        _ => Vbd::new("mqblk", DomainId(1), XVDA, "mqblk:a"),
    };
    let options = |device| BlkfrontOptions { queues: 1, ..host.frontend_options(device) };
    let mut neighbour = BlkfrontLoad::connect(&options(&other), 100, 1);
    let of_guest = options(&device);
    let guest = std::thread::spawn(move || {
        let mut load = BlkfrontLoad::connect(&of_guest, 100, 2);
        load.round();
        load
    });
    neighbour.round();
    assert!(!guest.is_finished(), "its disk is not there");
    host.create_image("a.img", BYTES);
    call(&host, "disk.retry", &json!({ "id": "a" })).expect("it is there");
    let mut load = guest.join().expect("a guest that notices nothing");

    // The next daemon does not find it, and tries it again by itself.
    let (image, away) = (host.folder().join("a.img"), host.folder().join("away.img"));
    for _ in 0..2 {
        host.kill();
        std::fs::rename(&image, &away).expect("it moves");
        host.spawn();
        assert!(is_out(&host, "a"));
        neighbour.round();
        assert_eq!(host.backend_state(&mut host.store(), &device), Some(XenbusState::Connected), "the guest keeps it");
        std::fs::rename(&away, &image).expect("it moves back");
        load.round();
        wait_for("the end of the try", || (!is_out(&host, "a")).then_some(()));
    }
    load.verify_all();
    load.finish();
    neighbour.finish();
    host.stop();
}

#[test]
fn of_a_guest_whose_toolstack_names_it() {
    a_guest_waits_for_its_disk("", &[]);
}

#[test]
fn where_every_device_is_served() {
    a_guest_waits_for_its_disk("", &["--xen-watch"]);
}

#[test]
fn where_the_configuration_attaches_it() {
    a_guest_waits_for_its_disk(",domid=1,vdev=xvda", &[]);
}
