//! Devices are attached, used and detached, in every mode and layout, and by every kind of detach. Other guests are not
//! affected.

use std::time::Duration;

use mqblk_core::ByteLen;
use mqblk_driver::blkfront::{Abi, BlkfrontOptions, DeviceChange};
use mqblk_memory::DomainId;
use mqblk_tests::blkif::{BlkfrontLoad, SimulatedHost, start_neighbour};
use mqblk_tests::hostile::neighbour::Neighbour;
use mqblk_tests::hostile::{QUIET_TIME, wait_for};
use mqblk_tests::unprivileged::{NoThreads, run_unprivileged};
use mqblk_xen::vbd::{XenbusState, keys};

const OFFERED: &str = "id=offered,interface=xen,storage=ram,size=4M,queues=4";
const NEIGHBOUR: &str = "id=other,interface=xen,storage=ram,size=4M,queues=2";

fn neighbour(host: &SimulatedHost) -> Neighbour {
    let device = host.create_device(2, "xvdb", "mqblk:other");
    start_neighbour(BlkfrontOptions { queues: 2, ..host.frontend_options(&device) }, 5)
}

#[test]
fn every_mode_and_layout() {
    for grants in ["auto", "copy", "map", "persistent"] {
        let mut host = SimulatedHost::start(&["--workers", "2", "--disk", &format!("{OFFERED},grants={grants}")]);
        let device = host.create_device(1, "xvda", "mqblk:offered");
        host.wait_for_backend_state(&device, XenbusState::InitWait);
        let base = host.stable_resources();
        for (queues, order, abi, persistent) in [
            (1, 0, Abi::X86_64, true),
            (4, 4, Abi::X86_64, true),
            (2, 1, Abi::X86_32, false),
            (3, 2, Abi::Arm, true),
            (4, 0, Abi::X86_64, false),
        ] {
            let ring_order = Some(order);
            let mut load = BlkfrontLoad::connect(
                &BlkfrontOptions { queues, ring_order, abi, persistent, ..host.frontend_options(&device) },
                400,
                order.into(),
            );
            for _ in 0..20 {
                load.round();
            }
            assert!(load.verified > 0, "{grants} {abi:?}");
            load.finish();
            host.wait_for_backend_state(&device, XenbusState::Closed);
            assert_eq!(host.journal_count(), 0, "{grants}: a journal was left");
        }
        // All resources of the connection are freed, and the device's threads have ended.
        let now = wait_for("the rest", || {
            let now = host.resources();
            (now.mappings == 0 && now.threads <= base.threads && now.fds <= base.fds + 2).then_some(now)
        });
        assert_eq!(now.mappings, 0);
        assert_eq!(host.warnings(), Vec::<String>::new(), "{grants}");
        host.stop();
    }
}

#[test]
fn a_device_in_use_is_served_until_the_guest_closes_it() {
    let mut host = SimulatedHost::start(&["--workers", "2", "--disk", OFFERED]);
    let device = host.create_device(1, "xvda", "mqblk:offered");
    let mut load = BlkfrontLoad::connect(&BlkfrontOptions { queues: 4, ..host.frontend_options(&device) }, 400, 1);
    load.round();
    device.detach(&mut host.store()).expect("online 0, state 5");
    // The guest is notified, and uses its disk for some more time.
    assert_eq!(load.device().wait_change(Duration::from_secs(20)).expect("xenstore"), Some(DeviceChange::Closing));
    for _ in 0..20 {
        load.round();
    }
    load.finish();
    host.wait_for_backend_state(&device, XenbusState::Closed);
    // It cannot be attached again meanwhile.
    host.domain(1).store().unwrap().write(&format!("{}/state", device.frontend_path()), "1").unwrap();
    std::thread::sleep(QUIET_TIME);
    assert_eq!(host.backend_state(&mut host.store(), &device), Some(XenbusState::Closed));
    device.remove(&mut host.store()).expect("both directories");
    wait_for("the device's end", || host.log().contains("dropped device").then_some(()));
    // The disk is free again.
    let again = host.create_device(1, "xvdc", "mqblk:offered");
    BlkfrontLoad::connect(&host.frontend_options(&again), 100, 2).finish();
    assert_eq!(host.warnings(), Vec::<String>::new());
    host.stop();
}

#[test]
fn a_guest_is_notified_when_its_disk_grows() {
    let mut host = SimulatedHost::start(&["--workers", "1", "--xen-watch"]);
    let image = host.create_image("grows.img", 1 << 20);
    let device = host.create_device(1, "xvda", "file:FOLDER/grows.img");
    let mut load = BlkfrontLoad::connect(&host.frontend_options(&device), 200, 1);
    assert_eq!(load.device().info().capacity.0, 2048);
    load.round();
    std::fs::File::options().write(true).open(&image).unwrap().set_len(2 << 20).unwrap();
    let output = host.run_mqblk_xen("resize", &["--domid", "1", "--vdev", "xvda"]);
    assert!(output.status.success(), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stdout).ends_with(", 2M\n"), "{output:?}");
    let changed = load.device().wait_change(Duration::from_secs(20)).expect("xenstore");
    assert_eq!(
        changed.map(|it| matches!(it, DeviceChange::Resized(size) if size.0 == 4096)),
        Some(true),
        "{changed:?}"
    );
    let output = host.run_mqblk_xen("resize", &["--domid", "1", "--vdev", "xvda", "--size", "3M"]);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(std::fs::metadata(&image).unwrap().len(), 3 << 20);
    let output = host.run_mqblk_xen("resize", &["--domid", "1", "--vdev", "xvda", "--size", "big"]);
    assert_eq!(output.status.code(), Some(2));
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(stderr.contains("size: found \"big\", expected a size in bytes such as 4096"), "{stderr}");
    let output = host.run_mqblk_xen("resize", &["--domid", "1", "--vdev", "xvda", "--size", "1M"]);
    assert_eq!(output.status.code(), Some(1));
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        stderr.contains("size: found 1M, and the disk has 3M, expected at least 3M; a smaller disk needs --shrink"),
        "{stderr}"
    );
    let shrunk = host.run_mqblk_xen("resize", &["--domid", "1", "--vdev", "xvda", "--size", "2M", "--shrink"]);
    assert!(shrunk.status.success(), "{shrunk:?}");
    assert_eq!(std::fs::metadata(&image).unwrap().len(), 2 << 20);
    load.round();
    load.finish();
    host.stop();
}

/// A toolstack removes directories, and domains vanish, in each state of a device.
#[test]
fn devices_vanish_in_every_state() {
    let mut host = SimulatedHost::start(&["--workers", "2", "--disk", OFFERED, "--disk", NEIGHBOUR]);
    let neighbour = neighbour(&host);
    let mut base = None;
    let states = [
        XenbusState::Initialising,
        XenbusState::InitWait,
        XenbusState::Initialised,
        XenbusState::Connected,
        XenbusState::Closing,
    ];
    for (round, state) in states.into_iter().cycle().take(20).enumerate() {
        let device = host.create_device(1, "xvda", "mqblk:offered");
        let mut store = host.store();
        let front = format!("{}/state", device.frontend_path());
        let mut load = None;
        match state {
            XenbusState::Connected | XenbusState::Closing => {
                let mut found = BlkfrontLoad::connect(
                    &BlkfrontOptions { queues: 4, ..host.frontend_options(&device) },
                    400,
                    round as u64,
                );
                found.round();
                if state == XenbusState::Closing {
                    host.domain(1).store().unwrap().write(&front, "5").unwrap();
                }
                load = Some(found);
            }
            XenbusState::InitWait => host.wait_for_backend_state(&device, XenbusState::InitWait),
            // The announced rings do not exist.
            XenbusState::Initialised => host.domain(1).store().unwrap().write(&front, "3").unwrap(),
            _ => {}
        }
        match round / states.len() {
            0 => device.remove(&mut store).expect("both directories"),
            1 => store.remove(&device.backend_path()).expect("the backend's"),
            2 => store.remove(&device.frontend_path()).expect("the frontend's"),
            _ => {
                host.machine.destroy_domain(DomainId(1));
                host.machine.create_domain(DomainId(1)).expect("a domain");
            }
        }
        wait_for("the end of its rings", || {
            let closed = matches!(
                host.backend_state(&mut store, &device),
                None | Some(XenbusState::Closed | XenbusState::Initialising)
            );
            closed.then_some(())
        });
        drop(load);
        let _ = device.remove(&mut store);
        host.assert_alive("a device vanished");
        neighbour.assert_progress("a device vanished");
        wait_for("mappings of domain 1 are let go", || {
            let counters = host.machine.domain_stats(DomainId(1));
            counters.is_none_or(|counters| counters.live_mappings == 0).then_some(())
        });
        if round >= states.len() {
            let base = base.get_or_insert_with(|| host.resources().fds + 8);
            wait_for("descriptors are closed", || (host.resources().fds <= *base).then_some(()));
        }
    }
    neighbour.finish();
    host.stop();
}

/// Mistakes of a toolstack and of a guest are written to the device's `error` node.
#[test]
fn mistakes_are_written_to_the_error_node() {
    let mut host = SimulatedHost::start(&["--workers", "1", "--xen-watch", "--disk", OFFERED]);
    let mut store = host.store();
    for (params, want) in [
        ("", "22 params: found \"\", expected file:PATH, null:SIZE or mqblk:DISK-ID"),
        ("dev/sdb", "22 params: found \"dev/sdb\", expected file:PATH"),
        ("/nowhere/disk", "19 params: path: found \"/nowhere/disk\" (No such file"),
        ("file:/nowhere", "19 params: path: found \"/nowhere\" (No such file"),
        ("null:x", "22 params: found \"null:x\", expected null: with a size"),
        (
            "mqblk:nothing",
            "19 params: found disk \"nothing\", expected one that the daemon offers to Xen guests: offered",
        ),
    ] {
        let device = host.create_device(1, "xvdd", params);
        host.wait_for_backend_state(&device, XenbusState::Closing);
        let error = host.backend_error(&device).unwrap_or_default();
        assert!(error.starts_with(want), "{params}: {error}");
        // The frontend, which never saw a ready backend, closes.
        store.write(&format!("{}/state", device.frontend_path()), "6").unwrap();
        host.wait_for_backend_state(&device, XenbusState::Closed);
        device.remove(&mut store).unwrap();
    }
    let device = host.create_device(1, "xvda", "mqblk:offered");
    for (pairs, want) in [
        (&[][..], "2 ring-ref: found nothing, expected a grant reference"),
        (
            &[("multi-queue-num-queues", "5")][..],
            "22 multi-queue-num-queues: found \"5\", expected a number from 1 to 4",
        ),
        (&[("multi-queue-num-queues", "0")][..], "22 multi-queue-num-queues: found \"0\""),
        (&[("multi-queue-num-queues", "\u{7f}x")][..], "22 multi-queue-num-queues: found"),
        (&[("ring-page-order", "9")][..], "22 ring-page-order: found \"9\", expected a decimal number of at most 4"),
        (&[("protocol", "sparc-abi")][..], "22 protocol: found \"sparc-abi\", expected one of x86_64-abi"),
        (&[("ring-ref", "7"), ("event-channel", "-1")][..], "22 event-channel: found \"-1\""),
        (
            &[("ring-ref", "4000000000"), ("event-channel", "1")][..],
            "22 ring 0: ring-ref: found [4000000000], which cannot be mapped",
        ),
    ] {
        let front = device.frontend_path();
        let mut guest = host.domain(1).store().unwrap();
        host.wait_for_backend_state(&device, XenbusState::InitWait);
        guest
            .transaction(|transaction| {
                for key in ["multi-queue-num-queues", "ring-page-order", "protocol", "ring-ref", "event-channel"] {
                    transaction.remove(&format!("{front}/{key}"))?;
                }
                for (key, value) in pairs {
                    transaction.write(&format!("{front}/{key}"), value)?;
                }
                transaction.write(&format!("{front}/state"), "3")
            })
            .unwrap();
        host.wait_for_backend_state(&device, XenbusState::Closing);
        let error = host.backend_error(&device).unwrap_or_default();
        assert!(error.starts_with(want), "{pairs:?}: {error}");
        guest.write(&format!("{front}/state"), "6").unwrap();
        host.wait_for_backend_state(&device, XenbusState::Closed);
        guest.write(&format!("{front}/state"), "1").unwrap();
    }
    // Then the guest writes valid keys.
    for key in ["ring-ref", "event-channel"] {
        let _ = host.domain(1).store().unwrap().remove(&format!("{}/{key}", device.frontend_path()));
    }
    let mut load = BlkfrontLoad::connect(&BlkfrontOptions { queues: 4, ..host.frontend_options(&device) }, 400, 1);
    load.round();
    assert_eq!(host.backend_error(&device), None, "what was wrong is right now");
    load.finish();
    host.stop();
}

#[test]
fn a_disk_of_the_configuration_has_one_guest_at_a_time() {
    let mut host = SimulatedHost::start(&["--workers", "1", "--disk", OFFERED]);
    let first = host.create_device(1, "xvda", "mqblk:offered");
    let mut load = BlkfrontLoad::connect(&host.frontend_options(&first), 100, 1);
    let second = host.create_device(2, "xvda", "mqblk:offered");
    host.wait_for_backend_state(&second, XenbusState::Closing);
    let error = host.backend_error(&second).unwrap_or_default();
    assert!(error.starts_with("19 params: found \"mqblk:offered\", which is attached as mqblk-1-51712"), "{error}");
    load.round();
    load.finish();
    // A device of another daemon of the same type is left alone.
    let foreign = host.create_device(2, "xvdc", "mqblk:somewhere-else");
    std::thread::sleep(QUIET_TIME);
    assert_eq!(host.backend_state(&mut host.store(), &foreign), Some(XenbusState::Initialising));
    assert_eq!(host.backend_error(&foreign), None);
    host.stop();
}

#[test]
fn a_read_only_device_is_reported_and_the_toolstack_can_disable_discard() {
    let mut host = SimulatedHost::start(&["--workers", "1", "--xen-watch"]);
    host.create_image("a.img", 1 << 20);
    let mut device = mqblk_driver::blkfront::toolstack::Vbd::new(
        "mqblk",
        DomainId(1),
        51712,
        &format!("file:{}/a.img", host.folder().display()),
    );
    device.writable = false;
    device.discard = false;
    device.create(&mut host.store()).unwrap();
    let options = BlkfrontOptions { data_per_queue: ByteLen(4096), ..host.frontend_options(&device) };
    let connected = mqblk_driver::blkfront::BlkfrontDevice::connect(&options).unwrap();
    let mut store = host.store();
    let mut read = |key: &str| store.read(&format!("{}/{key}", device.backend_path())).unwrap();
    assert_eq!(read(keys::INFO).as_deref(), Some("4"));
    assert_eq!(read(keys::FEATURE_DISCARD).as_deref(), Some("0"));
    assert_eq!(read(keys::DISCARD_GRANULARITY), None);
    assert_eq!(read(keys::SECTORS).as_deref(), Some("2048"));
    assert_eq!(read(keys::MAX_RING_PAGES).as_deref(), Some("16"));
    connected.stop(vec![]).unwrap();
    host.stop();
}

#[test]
fn without_threads_devices_wait_and_the_daemon_stops() {
    if !run_unprivileged("lifecycle::without_threads_devices_wait_and_the_daemon_stops") {
        return;
    }
    let mut host = SimulatedHost::start(&["--workers", "2", "--disk", OFFERED, "--disk", NEIGHBOUR]);
    let others = neighbour(&host);
    let without = NoThreads::of(host.pid());
    let device = host.create_device(1, "xvda", "mqblk:offered");
    wait_for("a refusal in the log", || host.log().contains("will retry").then_some(()));
    others.assert_progress("a lack of threads");
    drop(without);
    host.wait_for_backend_state(&device, XenbusState::InitWait);
    let mut load = BlkfrontLoad::connect(&BlkfrontOptions { queues: 4, ..host.frontend_options(&device) }, 400, 1);
    load.round();
    others.finish();
    let _without = NoThreads::of(host.pid());
    host.stop();
    assert!(host.log().contains("its requests in flight are not waited for"), "{}", host.log());
}
