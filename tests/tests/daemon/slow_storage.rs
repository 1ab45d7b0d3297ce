//! A VMM stops a queue whose storage does not complete. Without a VMM.

use mqblk_tests::hostile::daemon::HostileDaemon;
use mqblk_tests::hostile::frontend::HostileFrontend;
use mqblk_tests::hostile::memory::START;
use mqblk_tests::hostile::socket::{message as m, vring_state_payload};
use mqblk_tests::hostile::wait_for;

/// Latency of a read: far above the limit, which the daemon may detect late.
const STORAGE: &str = "storage=fault,inner=ram,size=1M,queues=1,poll=off,fault-latency-us=6000000";

/// GET_VRING_BASE, for which a VMM blocks, has a time limit. The next frontend's queue starts when the request has
/// ended.
#[test]
fn a_queue_that_is_stopped_while_storage_hangs() {
    let daemon = HostileDaemon::start_with(1, &[("slow", STORAGE)], &["--drain-timeout-s", "1"]);
    let mut guest = HostileFrontend::start(&daemon.socket("slow"), 0, 1);
    guest.queues[0].read_first_sector(START + 0x4000);
    // The queue requests a kick after this request, so it was pulled.
    wait_for("the request to be taken", || (guest.queues[0].ring.avail_event() == 1).then_some(()));
    assert_eq!(
        guest.connection.try_send_acked(m::GET_VRING_BASE, &vring_state_payload(0, 0), &[]),
        None,
        "the conversation ends"
    );
    assert_eq!(guest.queues[0].ring.used(), 0, "the storage answered too early: nothing was tried");
    let is_warning =
        |line: &String| ["GET_VRING_BASE", "queue 0", "drain-timeout-s"].iter().all(|word| line.contains(word));
    wait_for("a warning", || daemon.warnings("slow").into_iter().find(is_warning));

    let mut next = HostileFrontend::start(&daemon.socket("slow"), 0, 1);
    next.queues[0].read_first_sector(START + 0x4000);
    assert_eq!(next.queues[0].wait_completion(), (0, 513));
    drop((guest, next));
    daemon.stop();
}

/// Time that a channel takes to connect, in microseconds.
const CONNECTS: u64 = 2_000_000;

/// One worker serves both disks. The other disk must make progress while the first connects.
#[test]
fn a_disk_that_connects_does_not_delay_another() {
    let connecting = format!("storage=fault,inner=ram,size=1M,queues=1,poll=off,fault-connect-us={CONNECTS}");
    let disks = [("fast", "storage=ram,size=1M,queues=1,poll=off"), ("connecting", &connecting)];
    let daemon = HostileDaemon::start(1, &disks);
    let mut fast = HostileFrontend::start(&daemon.socket("fast"), 0, 1);
    let mut connecting = HostileFrontend::start(&daemon.socket("connecting"), 0, 1);
    connecting.queues[0].read_first_sector(START + 0x4000);
    let mut reads = 0;
    while connecting.queues[0].ring.used() == 0 {
        fast.queues[0].read_first_sector(START + 0x4000);
        assert_eq!(fast.queues[0].wait_completion(), (0, 513));
        reads += 1;
    }
    assert_eq!(connecting.queues[0].wait_completion(), (0, 513));
    assert!(reads >= 100, "{reads} reads of the other disk while this one connected");
    drop((fast, connecting));
    daemon.stop();
}

/// The guest of a retrying disk does not notice repeatedly lost connections; they are logged.
#[test]
fn a_lost_connection_is_logged_and_retried() {
    let settings =
        "storage=fault,inner=ram,size=1M,queues=1,poll=off,on-error=retry:60,fault-lost-after=5,fault-connect-us=1000";
    let daemon = HostileDaemon::start_with(1, &[("remote", settings)], &["--log", "info"]);
    let mut guest = HostileFrontend::start(&daemon.socket("remote"), 0, 1);
    // The daemon observes its disks within a second.
    wait_for("the loss to be logged", || {
        guest.queues[0].read_first_sector(START + 0x4000);
        assert_eq!(guest.queues[0].wait_completion(), (0, 513));
        let lost = daemon.warnings("remote").iter().any(|line| line.contains("is lost: fault-lost-after"));
        (lost && daemon.log().contains("the connection to the storage is restored")).then_some(())
    });
    drop(guest);
    daemon.stop();
}

/// A guest disconnects while its disk still connects: nothing waits for the connection.
#[test]
fn a_guest_that_goes_while_its_disk_connects() {
    let settings = "storage=fault,inner=ram,size=1M,queues=1,poll=off,fault-connect-us=60000000";
    let daemon = HostileDaemon::start_with(1, &[("connecting", settings)], &["--drain-timeout-s", "1"]);
    for _ in 0..3 {
        let guest = HostileFrontend::start(&daemon.socket("connecting"), 0, 1);
        drop(guest);
        daemon.wait_for_session_end("connecting");
    }
    // A request that waits for the connection makes the daemon give up the session.
    let mut guest = HostileFrontend::start(&daemon.socket("connecting"), 0, 1);
    guest.queues[0].read_first_sector(START + 0x4000);
    drop(guest);
    daemon.wait_for_session_end("connecting");
    daemon.stop();
}
