//! A guest that floods xenstore below its own directory does not affect other guests.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use mqblk_driver::blkfront::BlkfrontOptions;
use mqblk_memory::DomainId;
use mqblk_tests::blkif::{BlkfrontLoad, SimulatedHost, start_neighbour};
use mqblk_tests::hostile::wait_for;
use mqblk_xen::vbd::XenbusState;

#[test]
fn a_guest_that_writes_all_the_time_does_not_slow_down_others() {
    let disks = ["a", "b", "c"].map(|id| format!("id={id},interface=xen,storage=ram,size=4M,queues=2"));
    let mut host =
        SimulatedHost::start(&["--workers", "2", "--disk", &disks[0], "--disk", &disks[1], "--disk", &disks[2]]);
    let flooder = host.create_device(1, "xvda", "mqblk:a");
    let other = host.create_device(2, "xvda", "mqblk:b");
    let neighbour = start_neighbour(BlkfrontOptions { queues: 2, ..host.frontend_options(&other) }, 3);
    let base = host.stable_resources();
    let (stop, written) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let floods: Vec<_> = (0..2)
        .map(|thread| {
            let (stop, written) = (Arc::clone(&stop), Arc::clone(&written));
            let mut store = host.domain(1).store().unwrap();
            let front = flooder.frontend_path();
            std::thread::spawn(move || {
                for number in 0_u64.. {
                    if stop.load(Ordering::Relaxed) {
                        return;
                    }
                    // States, keys of rings, and nodes below the watched one.
                    let (key, value) = match (number + thread) % 4 {
                        0 => ("state".to_owned(), (number % 9).to_string()),
                        1 => ("state".to_owned(), "3".to_owned()),
                        2 => (format!("state/{}", number % 100), "x".to_owned()),
                        _ => ("ring-ref".to_owned(), number.to_string()),
                    };
                    // Writes beyond its quota are refused.
                    let _ = store.write(&format!("{front}/{key}"), &value);
                    written.fetch_add(1, Ordering::Relaxed);
                }
            })
        })
        .collect();
    wait_for("a flood", || (written.load(Ordering::Relaxed) > 2_000).then_some(()));
    let mut round = 0;
    while round < 5 || written.load(Ordering::Relaxed) < 5_000 {
        neighbour.assert_progress("a flood");
        // Other devices are attached and detached meanwhile.
        let device = host.create_device(2, "xvdb", "mqblk:c");
        let mut load =
            BlkfrontLoad::connect(&BlkfrontOptions { queues: 2, ..host.frontend_options(&device) }, 200, round);
        load.round();
        load.finish();
        host.wait_for_backend_state(&device, XenbusState::Closed);
        device.remove(&mut host.store()).unwrap();
        wait_for("the disk to be free", || {
            (host.log().matches("dropped device=mqblk-2-51728").count() > round as usize).then_some(())
        });
        round += 1;
    }
    stop.store(true, Ordering::Relaxed);
    floods.into_iter().for_each(|flood| flood.join().unwrap());
    // The device is served after the flood.
    let mut store = host.store();
    flooder.create(&mut store).unwrap();
    let mut load = BlkfrontLoad::connect(&BlkfrontOptions { queues: 2, ..host.frontend_options(&flooder) }, 100, 1);
    load.round();
    load.finish();
    host.wait_for_backend_state(&flooder, XenbusState::Closed);
    neighbour.finish();
    host.wait_for_backend_state(&other, XenbusState::Closed);
    wait_for("the rest", || {
        let now = host.resources();
        (now.fds <= base.fds && now.mappings == 0).then_some(())
    });
    host.stop();
}

/// A waiting device does not block other devices: here it waits for slow storage while its rings are torn down.
#[test]
fn a_slow_teardown_blocks_no_other_device() {
    let slow = "id=slow,interface=xen,storage=fault,inner=ram,size=4M,queues=2,fault-latency-us=3000000";
    let quick = "id=quick,interface=xen,storage=ram,size=4M,queues=2";
    let mut host = SimulatedHost::start(&["--workers", "2", "--disk", slow, "--disk", quick]);
    let device = host.create_device(1, "xvda", "mqblk:slow");
    let mut slow = mqblk_driver::blkfront::BlkfrontDevice::connect(&host.frontend_options(&device)).unwrap();
    let mut set = slow.take_queues().pop().unwrap();
    let queue = &mut set.queues_mut()[0];
    let (address, _) = queue.data();
    let piece = mqblk_driver::DataSegment { address, len: 4096 };
    queue.read(0, mqblk_core::Sector512(0), piece).unwrap();
    queue.publish();
    // The guest vanishes with a request at the storage.
    wait_for("a request in flight", || (host.machine.stats().events_sent > 0).then_some(()));
    std::thread::sleep(Duration::from_millis(50));
    device.remove(&mut host.store()).unwrap();
    let mut beside = 0;
    for round in 0..3 {
        let other = host.create_device(2, "xvda", "mqblk:quick");
        let mut load =
            BlkfrontLoad::connect(&BlkfrontOptions { queues: 2, ..host.frontend_options(&other) }, 200, round);
        load.round();
        load.finish();
        host.wait_for_backend_state(&other, XenbusState::Closed);
        other.remove(&mut host.store()).unwrap();
        beside += u32::from(host.machine.domain_stats(DomainId(1)).unwrap().live_mappings > 0);
    }
    assert!(beside > 0, "the slow one ended first each time: nothing was tried");
    wait_for("the slow end", || (host.machine.domain_stats(DomainId(1)).unwrap().live_mappings == 0).then_some(()));
    drop((slow, set));
    host.stop();
}
