//! A VMM stops a queue whose storage does not complete. Without a VMM.

use mqblk_tests::hostile::daemon::HostileDaemon;
use mqblk_tests::hostile::frontend::HostileFrontend;
use mqblk_tests::hostile::memory::START;
use mqblk_tests::hostile::socket::{message as m, vring_state_payload};
use mqblk_tests::hostile::wait_for;

/// Latency of a read: far above the limit, which the daemon may detect late.
const STORAGE: &str = "storage=fault,inner=ram,size=1M,queues=1,poll=off,fault-latency-us=6000000";

/// GET_VRING_BASE, for which a VMM blocks, has a time limit. The next frontend's queue starts when the request has ended.
#[test]
fn a_queue_that_is_stopped_while_storage_hangs() {
    let daemon = HostileDaemon::start_with(1, &[("slow", STORAGE)], &["--drain-timeout-s", "1"]);
    let mut guest = HostileFrontend::start(&daemon.socket("slow"), 0, 1);
    guest.queues[0].read_first_sector(START + 0x4000);
    // The queue asks for a kick after this request: so this one was pulled.
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
