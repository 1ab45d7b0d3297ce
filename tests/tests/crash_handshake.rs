//! Daemons that are killed while a front-end sets its device up, and what a driver has configured before a kill. No VMM.

use mqblk_tests::crash::daemon::Daemon;
use mqblk_tests::hostile::event::Event;
use mqblk_tests::hostile::front_end::{FrontEnd, Inflight, Queue, RING};
use mqblk_tests::hostile::memory::START;
use mqblk_tests::hostile::ring::Places;
use mqblk_tests::hostile::socket::message as m;

/// Where a queue's requests lie.
const REQUESTS: u64 = START + 0x4000;
/// Where `writeback` is in the configuration. Source: virtio 1.3 section 5.2.4.
const WRITEBACK: u32 = 32;

fn start() -> Daemon {
    let disk = "id=d,socket=FOLDER/d.sock,storage=file,path=FOLDER/d.img,direct=off,queues=2";
    Daemon::start(&["--workers".to_owned(), "1".to_owned(), "--disk".to_owned(), disk.to_owned()], &["d.img"])
}

fn connect(daemon: &Daemon) -> FrontEnd {
    let mut guest = FrontEnd::connect(&daemon.folder().join("d.sock"), 0);
    guest.queues.push(Queue::new(&guest.memory, Places::pages(START), RING));
    guest
}

/// A front-end that has an in-flight region, and has shown it.
fn connect_and_show(daemon: &Daemon) -> (FrontEnd, Inflight) {
    let mut guest = connect(daemon);
    let region = guest.ask_inflight(2);
    guest.show_inflight(&region);
    (guest, region)
}

/// The daemon dies, and the next one finds the same guest.
fn killed(daemon: &mut Daemon, guest: FrontEnd) -> FrontEnd {
    daemon.kill();
    daemon.spawn();
    guest.again(&daemon.folder().join("d.sock"))
}

/// It reads, and goes on reading.
fn serves(guest: &mut FrontEnd) {
    for _ in 0..3 {
        guest.queues[0].read_first_sector(REQUESTS);
        assert_eq!(guest.queues[0].answer(), (0, 513));
    }
}

#[test]
fn killed_before_the_region_is_shown() {
    let mut daemon = start();
    let mut guest = connect(&daemon);
    let _forgotten = guest.ask_inflight(2);
    let mut guest = killed(&mut daemon, guest);
    // As a VMM that asks each time, and as one that shows what it was given.
    let region = guest.ask_inflight(2);
    let mut guest = killed(&mut daemon, guest);
    guest.show_inflight(&region);
    guest.start_queue(0, 0);
    serves(&mut guest);
    daemon.stop();
}

#[test]
fn killed_after_the_region_is_shown_and_before_a_queue_starts() {
    let mut daemon = start();
    let (guest, region) = connect_and_show(&daemon);
    let mut guest = killed(&mut daemon, guest);
    guest.show_inflight(&region);
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
    guest.show_inflight(&region);
    // The guest asks while nobody is there, and its kick is lost with the daemon's end of the descriptor.
    guest.queues[0].read_first_sector(REQUESTS);
    guest.queues[0].kick = Event::new();
    let mut guest = killed(&mut daemon, guest);
    guest.show_inflight(&region);
    guest.start_queue(0, 0);
    assert_eq!(guest.queues[0].answer(), (0, 513));
    serves(&mut guest);
    daemon.stop();
}

fn writeback(guest: &mut FrontEnd) -> u8 {
    let about = [WRITEBACK.to_ne_bytes(), 1_u32.to_ne_bytes(), [0; 4]].concat();
    let reply = guest.connection.ask(m::GET_CONFIG, &[&about[..], &[0]].concat());
    reply[12]
}

fn set_writeback(guest: &mut FrontEnd, on: u8) {
    let about = [WRITEBACK.to_ne_bytes(), 1_u32.to_ne_bytes(), [0; 4]].concat();
    guest.connection.tell(m::SET_CONFIG, &[&about[..], &[on]].concat(), &[]);
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
    guest.show_inflight(&region);
    assert_eq!(writeback(&mut guest), 0);
    let mut guest = killed(&mut daemon, guest);
    guest.show_inflight(&region);
    let base = guest.queues[0].ring.used();
    guest.start_queue(0, base);
    serves(&mut guest);
    assert_eq!(writeback(&mut guest), 0);
    // The guest resets the device.
    guest.connection.tell(m::RESET_DEVICE, &[], &[]);
    assert_eq!(writeback(&mut guest), 1);
    let mut guest = killed(&mut daemon, guest);
    guest.show_inflight(&region);
    assert_eq!(writeback(&mut guest), 1, "a driver that begins anew finds what there is to find");
    // So does another guest.
    drop(guest);
    let (mut other, _region) = connect_and_show(&daemon);
    assert_eq!(writeback(&mut other), 1);
    daemon.stop();
}
