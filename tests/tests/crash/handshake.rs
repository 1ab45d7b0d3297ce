//! Daemons that are killed while a frontend sets its device up, and the driver config after a kill. No VMM.

use mqblk_tests::crash::daemon::RestartableDaemon;
use mqblk_tests::hostile::eventfd::TestEventFd;
use mqblk_tests::hostile::frontend::{DEFAULT_RING_SIZE, FrontendQueue, HostileFrontend, InflightRegion};
use mqblk_tests::hostile::memory::START;
use mqblk_tests::hostile::ring::RingAddresses;
use mqblk_tests::hostile::socket::message as m;

/// The address of a queue's requests.
const REQUESTS: u64 = START + 0x4000;
/// Offset of `writeback` in the device configuration. Source: virtio 1.3 section 5.2.4.
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

/// Connects a frontend that has set an in-flight region.
fn connect_with_region(daemon: &RestartableDaemon) -> (HostileFrontend, InflightRegion) {
    let mut guest = connect(daemon);
    let region = guest.get_inflight(2);
    guest.set_inflight(&region);
    (guest, region)
}

/// Kills the daemon and reconnects the guest to the next one.
fn killed(daemon: &mut RestartableDaemon, guest: HostileFrontend) -> HostileFrontend {
    daemon.kill();
    daemon.spawn();
    guest.reconnect(&daemon.folder().join("d.sock"))
}

/// Checks that several reads are served.
fn serves(guest: &mut HostileFrontend) {
    for _ in 0..3 {
        guest.queues[0].read_first_sector(REQUESTS);
        assert_eq!(guest.queues[0].wait_completion(), (0, 513));
    }
}

#[test]
fn killed_before_the_region_is_set() {
    let mut daemon = start();
    let mut guest = connect(&daemon);
    let _forgotten = guest.get_inflight(2);
    let mut guest = killed(&mut daemon, guest);
    // As a VMM that gets a region each time, and as one that sets the first one.
    let region = guest.get_inflight(2);
    let mut guest = killed(&mut daemon, guest);
    guest.set_inflight(&region);
    guest.start_queue(0, 0);
    serves(&mut guest);
    daemon.stop();
}

#[test]
fn killed_after_the_region_is_set_and_before_a_queue_starts() {
    let mut daemon = start();
    let (guest, region) = connect_with_region(&daemon);
    let mut guest = killed(&mut daemon, guest);
    guest.set_inflight(&region);
    guest.start_queue(0, 0);
    serves(&mut guest);
    daemon.stop();
}

/// One of two queues has started, without a kick. The other never does.
#[test]
fn killed_after_a_queue_starts_and_before_its_first_request() {
    let mut daemon = start();
    let (mut guest, region) = connect_with_region(&daemon);
    guest.start_queue(0, 0);
    let mut guest = killed(&mut daemon, guest);
    guest.set_inflight(&region);
    // The guest publishes a request while no daemon runs, and its kick is lost with the daemon's end of the descriptor.
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

/// It keeps the driver's value, without another write, until the device is reset.
#[test]
fn the_cache_mode_that_a_driver_chose_survives_the_daemon() {
    let mut daemon = start();
    let (mut guest, region) = connect_with_region(&daemon);
    assert_eq!(writeback(&mut guest), 1, "what a driver finds");
    set_writeback(&mut guest, 0);
    guest.start_queue(0, 0);
    serves(&mut guest);
    // Also before a queue starts again.
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
    assert_eq!(writeback(&mut guest), 1, "a new driver finds the default");
    // Another guest also starts with the default.
    drop(guest);
    let (mut other, _region) = connect_with_region(&daemon);
    assert_eq!(writeback(&mut other), 1);
    daemon.stop();
}
