//! Rings in order (VIRTIO_F_IN_ORDER) of hostile guests, and over storage that hangs: nothing is used out of order, a broken ring is given up,
//! and nothing else notices.

use std::time::Duration;

use mqblk_tests::hostile::daemon::HostileDaemon;
use mqblk_tests::hostile::frontend::HostileFrontend;
use mqblk_tests::hostile::fuse::HangingFile;
use mqblk_tests::hostile::load::VhostUserNeighbour;
use mqblk_tests::hostile::memory::START;
use mqblk_tests::hostile::request::{STATUS_OK, STATUS_POISON, header, readable, request_type, writable, write_direct};
use mqblk_tests::hostile::ring::RingAddresses;
use mqblk_tests::hostile::{TIMEOUT, wait_for};

/// Entries of the ring.
const SIZE: u16 = 64;
/// Where requests' headers are, and what is written for them: data, then the status.
const HEADERS: u64 = START + 0x1_8000;
const REPLIES: u64 = START + 0x2_0000;
const REPLY: u64 = 0x2000;
/// Bytes of the data of a read, and of the disk's id, which does not come from the storage.
const BLOCK: u32 = 4096;
const ID: u32 = 20;

/// Offers request `number`, in these two descriptors. Returns its head.
fn offer(frontend: &mut HostileFrontend, number: u64, kind: u32, descriptors: [u16; 2]) -> u16 {
    let bytes = if kind == request_type::IN { BLOCK } else { ID };
    let (at, reply) = (HEADERS + 16 * number, REPLIES + REPLY * number);
    frontend.memory.write(at, &header(kind, 0));
    frontend.memory.write(reply + u64::from(bytes), &[STATUS_POISON]);
    let queue = &mut frontend.queues[0];
    let head = write_direct(&queue.ring, &descriptors, &[readable(at, 16), writable(reply, bytes + 1)]);
    queue.ring.offer(head);
    head
}

/// Waits until the status of a request for the id is written.
fn wait_status(frontend: &HostileFrontend, number: u64) {
    let status = || frontend.memory.read(REPLIES + REPLY * number + u64::from(ID), 1)[0];
    wait_for("a status", || (status() == STATUS_OK).then_some(()));
}

/// Returns the head and the length of a used element.
fn used_element(frontend: &HostileFrontend, at: u64) -> (u32, u32) {
    let at = frontend.queues[0].ring.addresses.used + 4 + 8 * at;
    (frontend.memory.read_u32(at), frontend.memory.read_u32(at + 4))
}

fn wait_used(frontend: &HostileFrontend, index: u16) {
    wait_for("used requests", || (frontend.queues[0].ring.used() == index).then_some(()));
}

/// A daemon with a disk that can hang, and a guest of this disk.
fn with_hanging_disk(test: impl FnOnce(&HostileDaemon, &HangingFile, &mut HostileFrontend)) {
    let hanging = HangingFile::mount(8 << 20);
    let bad = format!("storage=file,path={},queues=1", hanging.path().display());
    let disks = [("bad", bad.as_str()), ("good", "storage=ram,size=1M,queues=1")];
    let mut daemon = HostileDaemon::start_with(1, &disks, &["--drain-timeout-s", "2"]);
    let mut frontend = HostileFrontend::connect_in_order(&daemon.socket("bad"));
    frontend.add_queue(RingAddresses::pages(START), SIZE);
    let neighbour = VhostUserNeighbour::start(daemon.socket("good"), 1, 3);
    test(&daemon, &hanging, &mut frontend);
    neighbour.assert_progress("rings in order");
    assert!(neighbour.finish() > 0);
    daemon.assert_alive("rings in order");
    daemon.stop();
}

/// Requests that complete behind one that the storage does not complete are held back until that one is complete.
#[test]
fn requests_behind_one_that_hangs_wait_for_it() {
    with_hanging_disk(|_, hanging, frontend| {
        let first = offer(frontend, 0, request_type::GET_ID, [0, 1]);
        frontend.queues[0].publish_and_kick();
        wait_used(frontend, 1);
        assert_eq!(used_element(frontend, 0), (first.into(), ID + 1));

        let hangs = hanging.hang();
        offer(frontend, 1, request_type::IN, [2, 3]);
        frontend.queues[0].publish_and_kick();
        wait_for("a request that hangs", || (hanging.waiting() > 0).then_some(()));
        for number in 2..5 {
            offer(frontend, number, request_type::GET_ID, [2 * number as u16, 2 * number as u16 + 1]);
        }
        frontend.queues[0].publish_and_kick();
        (2..5).for_each(|number| wait_status(frontend, number));
        assert_eq!(frontend.queues[0].ring.used(), 1, "used before the request in front of it");

        drop(hangs);
        wait_used(frontend, 5);
        // All were written completely.
        assert_eq!(used_element(frontend, 1), (8, ID + 1));
    });
}

/// A chain that is complete and held back is in flight: to make it available again breaks the protocol.
#[test]
fn a_chain_that_is_held_back_is_in_flight() {
    with_hanging_disk(|daemon, hanging, frontend| {
        let hangs = hanging.hang();
        offer(frontend, 0, request_type::IN, [0, 1]);
        frontend.queues[0].publish_and_kick();
        wait_for("a request that hangs", || (hanging.waiting() > 0).then_some(()));
        let head = offer(frontend, 1, request_type::GET_ID, [2, 3]);
        frontend.queues[0].publish_and_kick();
        wait_status(frontend, 1);
        frontend.queues[0].ring.offer(head);
        frontend.queues[0].publish_and_kick();
        assert!(frontend.queues[0].wait_retired(TIMEOUT.time()), "the queue was not retired");
        wait_for("the reason", || {
            daemon.warnings("bad").into_iter().find(|line| line.contains("made available again before it was used"))
        });
        drop(hangs);
    });
}

/// A driver uses descriptors in the order of the table. One that does not is served all the same, in the order of its available ring.
#[test]
fn descriptors_in_any_order_are_served() {
    let daemon = HostileDaemon::start(1, &[("bad", "storage=ram,size=1M,queues=1")]);
    let mut frontend = HostileFrontend::connect_in_order(&daemon.socket("bad"));
    frontend.add_queue(RingAddresses::pages(START), SIZE);
    for (number, descriptors) in [(0, [63, 0]), (1, [5, 4]), (2, [40, 9])] {
        offer(&mut frontend, number, request_type::GET_ID, descriptors);
    }
    frontend.queues[0].publish_and_kick();
    wait_used(&frontend, 3);
    assert_eq!(used_element(&frontend, 0), (40, ID + 1), "one element, in the place of the first");
    assert!(!frontend.queues[0].wait_retired(Duration::ZERO));
    daemon.stop();
}
