//! The next daemons keep the properties that a Xen guest was given of its disk, regardless of their configurations,
//! until the guest is gone.

use mqblk_driver::blkfront::BlkfrontOptions;
use mqblk_driver::blkfront::toolstack::Vbd;
use mqblk_tests::blkif::{BlkfrontLoad, SimulatedHost};
use mqblk_tests::hostile::wait_for;
use mqblk_xen::vbd::XenbusState;

const STATE: [&str; 6] = ["--workers", "1", "--state", "FOLDER/daemon.state", "--admin", "FOLDER/admin"];

fn spawn(host: &mut SimulatedHost, block_size: u32) {
    let disk = format!("id=a,interface=xen,queues=1,path=FOLDER/a.img,block-size={block_size}");
    host.spawn_with(&[&STATE[..], &["--xen-watch", "--disk", &disk]].concat());
}

fn block_size(host: &SimulatedHost, device: &Vbd) -> Option<String> {
    host.store().read(&format!("{}/sector-size", device.backend_path())).expect("xenstore")
}

fn connect(host: &SimulatedHost, device: &Vbd) -> BlkfrontLoad {
    let options = BlkfrontOptions { queues: 1, ..host.frontend_options(device) };
    BlkfrontLoad::connect(&options, 100, 1)
}

fn recorded(host: &SimulatedHost) -> Vec<bool> {
    let state = std::fs::read_to_string(host.folder().join("daemon.state")).expect("the state file");
    ["xen/disk/a", "xen/device/"].iter().map(|key| state.contains(key)).collect()
}

#[test]
fn a_guest_keeps_what_it_was_given() {
    let mut host = SimulatedHost::start(&["--workers", "1", "--xen-watch"]);
    ["a.img", "b.img"].iter().for_each(|name| drop(host.create_image(name, 1 << 20)));
    host.stop();
    spawn(&mut host, 512);
    let devices =
        [("xvda", "mqblk:a"), ("xvdb", "file:FOLDER/b.img")].map(|(vdev, params)| host.create_device(1, vdev, params));
    let mut loads = devices.each_ref().map(|device| connect(&host, device));
    let before = devices.each_ref().map(|device| block_size(&host, device));
    assert_eq!((before[0].as_deref(), recorded(&host)), (Some("512"), vec![true, true]));
    for end in ["kill", "stop", "takeover"] {
        match end {
            "kill" => host.kill(),
            "stop" => host.stop(),
            _ => host.take_over(),
        }
        if end != "takeover" {
            spawn(&mut host, 4096);
        }
        loads.iter_mut().for_each(BlkfrontLoad::round);
        assert_eq!(devices.each_ref().map(|device| block_size(&host, device)), before, "{end}");
        assert_eq!(recorded(&host), [true, true], "{end}");
    }
    let line = "disk \"a\": block-size: the guest has 512, found 4096 in the configuration";
    assert!(host.log().matches(line).count() >= 3, "of each daemon:\n{}", host.log());

    // After it leaves, the next guest gets the configured properties.
    loads.into_iter().for_each(|load| drop(load.finish()));
    wait_for("the end of both", || {
        let mut store = host.store();
        let closed = |device| host.backend_state(&mut store, device) == Some(XenbusState::Closed);
        devices.iter().all(closed).then_some(())
    });
    assert_eq!(recorded(&host), [false, false]);
    host.stop();
    host.spawn();
    let load = connect(&host, &devices[0]);
    assert_eq!(block_size(&host, &devices[0]).as_deref(), Some("4096"));
    load.finish();
    host.stop();
}
