//! The log for a misconfigured VMM: too many queues, and memory that is not shared. Without a VMM.

use mqblk_tests::hostile::daemon::HostileDaemon;
use mqblk_tests::hostile::frontend::{DEFAULT_RING_SIZE, HostileFrontend};
use mqblk_tests::hostile::memory::{SEAM, START};
use mqblk_tests::hostile::ring::RingAddresses;
use mqblk_tests::hostile::socket::{message as m, vring_state_payload};
use mqblk_tests::hostile::wait_for;

fn daemon(disks: &[&str]) -> HostileDaemon {
    let disks: Vec<_> = disks.iter().map(|id| (*id, "storage=ram,size=1M,queues=2")).collect();
    HostileDaemon::start(1, &disks)
}

/// Waits for a warning about a disk with all of these words.
fn wait_for_warning(daemon: &HostileDaemon, id: &str, wanted: &[&str]) -> String {
    let good = |line: &String| wanted.iter().all(|word| line.contains(word));
    wait_for("the daemon's warning", || daemon.warnings(id).into_iter().find(good))
}

#[test]
fn more_queues_than_are_offered() {
    let daemon = daemon(&["few"]);
    let mut frontend = HostileFrontend::start(&daemon.socket("few"), 0, 2);
    assert_ne!(
        frontend.connection.try_send_acked(m::SET_VRING_NUM, &vring_state_payload(2, DEFAULT_RING_SIZE.into()), &[]),
        Some(0)
    );
    wait_for_warning(&daemon, "few", &["found 2", "expected one below 2", "queues=", "num_queues="]);
    daemon.stop();
}

/// QEMU leaves memory without a descriptor out of the table.
#[test]
fn a_ring_in_memory_that_the_vmm_keeps() {
    let daemon = daemon(&["keeps"]);
    let mut frontend = HostileFrontend::connect(&daemon.socket("keeps"), 0);
    let queue = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        frontend.add_queue(RingAddresses::pages(1 << 40), DEFAULT_RING_SIZE);
    }));
    drop(queue); // the daemon may have closed the connection before the last message
    wait_for_warning(&daemon, "keeps", &["queue 0: descriptor table", "expected one in a memory region", "share=on"]);
    daemon.stop();
}

/// With share=off QEMU passes descriptors, but the guest's writes stay private.
#[test]
fn memory_that_the_vmm_maps_privately() {
    let daemon = daemon(&["private", "shared", "idle"]);
    let mut shared = HostileFrontend::start(&daemon.socket("shared"), 0, 1);
    let queue = &mut shared.queues[0];
    queue.read_first_sector(START + 0x4000);
    queue.wait_completion();

    // QEMU itself kicks, later versions several times, and this guest has no request.
    let idle = HostileFrontend::start(&daemon.socket("idle"), 0, 1);
    idle.memory.write(SEAM - 1, &[1]);
    idle.queues[0].kick.add(1);

    // Kicks without visible writes of the guest. Several times, because kicks that the daemon has not seen yet count as
    // one.
    let private = HostileFrontend::start(&daemon.socket("private"), 0, 1);
    wait_for("the daemon's warning", || {
        private.queues[0].kick.add(1);
        idle.queues[0].kick.add(1);
        (!daemon.warnings("private").is_empty()).then_some(())
    });
    wait_for_warning(&daemon, "private", &["private memory", "share=on", "shared=on"]);
    for id in ["shared", "idle"] {
        assert_eq!(daemon.warnings(id), Vec::<String>::new());
    }
    drop((private, shared, idle));
    daemon.stop();
}
