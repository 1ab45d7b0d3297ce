//! Daemons that are killed while a front-end sets its device up, and what a driver has configured before a kill. No VMM.

use mqblk_tests::crash::daemon::RestartableDaemon;
use mqblk_tests::hostile::eventfd::TestEventFd;
use mqblk_tests::hostile::frontend::{DEFAULT_RING_SIZE, FrontendQueue, HostileFrontend, InflightRegion};
use mqblk_tests::hostile::memory::START;
use mqblk_tests::hostile::ring::RingAddresses;
use mqblk_tests::hostile::socket::message as m;

/// Where a queue's requests lie.
const REQUESTS: u64 = START + 0x4000;
/// Where `writeback` is in the configuration. Source: virtio 1.3 section 5.2.4.
const WRITEBACK: u32 = 32;

fn start() -> RestartableDaemon {
    let disk = "id=d,socket=FOLDER/d.sock,storage=file,path=FOLDER/d.img,direct=off,queues=2";
    RestartableDaemon::start(
        &["--workers".to_owned(), "1".to_owned(), "--disk".to_owned(), disk.to_owned()],
        &["d.img"],
    )
}

fn connect(daemon: &RestartableDaemon) -> HostileFrontend {
    let mut guest = HostileFrontend::connect(&daemon.folder().join("d.sock"), 0);
    guest.queues.push(FrontendQueue::new(&guest.memory, RingAddresses::pages(START), DEFAULT_RING_SIZE));
    guest
}

/// A front-end that has an in-flight region, and has shown it.
fn connect_and_show(daemon: &RestartableDaemon) -> (HostileFrontend, InflightRegion) {
    let mut guest = connect(daemon);
    let region = guest.get_inflight(2);
    guest.set_inflight(&region);
    (guest, region)
}

/// The daemon dies, and the next one finds the same guest.
fn killed(daemon: &mut RestartableDaemon, guest: HostileFrontend) -> HostileFrontend {
    daemon.kill();
    daemon.spawn();
    guest.reconnect(&daemon.folder().join("d.sock"))
}

/// It reads, and goes on reading.
fn serves(guest: &mut HostileFrontend) {
    for _ in 0..3 {
        guest.queues[0].read_first_sector(REQUESTS);
        assert_eq!(guest.queues[0].wait_completion(), (0, 513));
    }
}

#[test]
fn killed_before_the_region_is_shown() {
    let mut daemon = start();
    let mut guest = connect(&daemon);
    let _forgotten = guest.get_inflight(2);
    let mut guest = killed(&mut daemon, guest);
    // As a VMM that asks each time, and as one that shows what it was given.
    let region = guest.get_inflight(2);
    let mut guest = killed(&mut daemon, guest);
    guest.set_inflight(&region);
    guest.start_queue(0, 0);
    serves(&mut guest);
    daemon.stop();
}

#[test]
fn killed_after_the_region_is_shown_and_before_a_queue_starts() {
    let mut daemon = start();
    let (guest, region) = connect_and_show(&daemon);
    let mut guest = killed(&mut daemon, guest);
    guest.set_inflight(&region);
    guest.start_queue(0, 0);
    serves(&mut guest);
    daemon.stop();
}

/// One of two queues has begun, without a kick; the other never does.
#[test]
fn killed_after_a_queue_starts_and_before_its_first_request() {
    let mut daemon = start();
    let (mut guest, region) = connect_and_show(&daemon);
    guest.start_queue(0, 0);
    let mut guest = killed(&mut daemon, guest);
    guest.set_inflight(&region);
    // The guest asks while nobody is there, and its kick is lost with the daemon's end of the descriptor.
    guest.queues[0].read_first_sector(REQUESTS);
    guest.queues[0].kick = TestEventFd::new();
    let mut guest = killed(&mut daemon, guest);
    guest.set_inflight(&region);
    guest.start_queue(0, 0);
    assert_eq!(guest.queues[0].wait_completion(), (0, 513));
    serves(&mut guest);
    daemon.stop();
}

fn writeback(guest: &mut HostileFrontend) -> u8 {
    let about = [WRITEBACK.to_ne_bytes(), 1_u32.to_ne_bytes(), [0; 4]].concat();
    let reply = guest.connection.request(m::GET_CONFIG, &[&about[..], &[0]].concat());
    reply[12]
}

fn set_writeback(guest: &mut HostileFrontend, on: u8) {
    let about = [WRITEBACK.to_ne_bytes(), 1_u32.to_ne_bytes(), [0; 4]].concat();
    guest.connection.send_acked(m::SET_CONFIG, &[&about[..], &[on]].concat(), &[]);
}

/// As the driver wrote it, without its writing it again; until it begins anew.
#[test]
fn the_cache_mode_that_a_driver_chose_outlives_the_daemon() {
    let mut daemon = start();
    let (mut guest, region) = connect_and_show(&daemon);
    assert_eq!(writeback(&mut guest), 1, "what a driver finds");
    set_writeback(&mut guest, 0);
    guest.start_queue(0, 0);
    serves(&mut guest);
    // Before a queue starts again, too.
    let mut guest = killed(&mut daemon, guest);
    guest.set_inflight(&region);
    assert_eq!(writeback(&mut guest), 0);
    let mut guest = killed(&mut daemon, guest);
    guest.set_inflight(&region);
    let base = guest.queues[0].ring.used();
    guest.start_queue(0, base);
    serves(&mut guest);
    assert_eq!(writeback(&mut guest), 0);
    // The guest resets the device.
    guest.connection.send_acked(m::RESET_DEVICE, &[], &[]);
    assert_eq!(writeback(&mut guest), 1);
    let mut guest = killed(&mut daemon, guest);
    guest.set_inflight(&region);
    assert_eq!(writeback(&mut guest), 1, "a driver that begins anew finds what there is to find");
    // So does another guest.
    drop(guest);
    let (mut other, _region) = connect_and_show(&daemon);
    assert_eq!(writeback(&mut other), 1);
    daemon.stop();
}
