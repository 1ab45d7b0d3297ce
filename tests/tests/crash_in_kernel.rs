//! Requests of a killed daemon that the kernel still has: the next daemon's queues wait for them. The disks are files of a file system
//! of the test's own, which holds reads and writes back until it is told; as with a block device, the kernel goes on with direct
//! transfers when the process that asked for them is gone. What is written is seen with its promises, too. Needs root and /dev/fuse.

use std::sync::Arc;

use mqblk_tests::crash::daemon::Daemon;
use mqblk_tests::crash::report::say;
use mqblk_tests::hostile::front_end::{FrontEnd, Queue, RING};
use mqblk_tests::hostile::memory::START;
use mqblk_tests::hostile::request::{direct, header, kind, readable, writable};
use mqblk_tests::hostile::ring::Places;
use mqblk_tests::hostile::socket::message as m;
use mqblk_tests::hostile::wait_for;
use mqblk_tests::power::{Cache, PowerLog, PowerMount};

const SIZE: usize = 1 << 20;
const PAGE: usize = 4096;
const REQUEST: u64 = START + 0x4000;
const DATA: u64 = START + 0x5000;
/// What the daemon logs when it waits.
const WAITS: &str = "queues wait for the storage to end requests";

struct Rig {
    log: Arc<PowerLog>,
    mount: PowerMount,
    daemon: Daemon,
}

impl Rig {
    /// `None`, and a line that says so, where there is no FUSE for this process.
    fn start(settings: &str) -> Option<Rig> {
        if std::fs::File::open("/dev/fuse").is_err() {
            say("not run: it needs root and /dev/fuse");
            return None;
        }
        let log = Arc::<PowerLog>::default();
        let mount = PowerMount::that_outlives(&log, &[("disk", SIZE), ("marks", 512)]).expect("a mount");
        let path = mount.path("disk");
        let disk = format!("id=d,socket=FOLDER/d.sock,storage=file,path={},direct=on,{settings}", path.display());
        let daemon = Daemon::start(&["--workers".to_owned(), "1".to_owned(), "--disk".to_owned(), disk], &[]);
        Some(Rig { log, mount, daemon })
    }

    fn connect(&self) -> FrontEnd {
        let mut guest = FrontEnd::connect(&self.daemon.folder().join("d.sock"), 0);
        guest.queues.push(Queue::new(&guest.memory, Places::pages(START), RING));
        guest
    }

    fn killed(&mut self, guest: FrontEnd) -> FrontEnd {
        self.daemon.kill();
        self.daemon.spawn();
        guest.again(&self.daemon.folder().join("d.sock"))
    }
}

/// Reads or writes the disk's first page.
fn ask(guest: &mut FrontEnd, is_write: bool) {
    let queue = &mut guest.queues[0];
    queue.ring.memory.write(REQUEST, &header(if is_write { kind::OUT } else { kind::IN }, 0));
    let data = if is_write { readable(DATA, PAGE as u32) } else { writable(DATA, PAGE as u32) };
    direct(&queue.ring, &[0, 1, 2], &[readable(REQUEST, 16), data, writable(REQUEST + 16, 1)]);
    queue.ring.offer(0);
    queue.go();
}

/// Kills the daemon while the kernel has a request of its, and sees that the next one answers no sooner than it has ended.
fn killed_with_a_request_in_the_kernel(settings: &str, is_write: bool) -> Option<(Rig, FrontEnd)> {
    let mut rig = Rig::start(settings)?;
    let mut guest = rig.connect();
    let region = guest.ask_inflight(1);
    guest.show_inflight(&region);
    guest.start_queue(0, 0);
    guest.memory.write(DATA, &[1; PAGE]);
    rig.mount.hold();
    ask(&mut guest, is_write);
    wait_for("the kernel to have the request", || (rig.mount.held() > 0).then_some(()));
    let mut guest = rig.killed(guest);
    rig.mount.let_others_pass();
    guest.show_inflight(&region);
    guest.start_queue(0, 0);
    wait_for("a daemon that waits", || {
        assert_eq!(guest.queues[0].ring.used(), 0, "it answers while a request of the daemon before is under way");
        rig.daemon.log().contains(WAITS).then_some(())
    });
    assert!(rig.mount.held() > 0 && guest.queues[0].ring.used() == 0);
    rig.mount.let_go();
    guest.queues[0].answer();
    Some((rig, guest))
}

#[test]
fn a_late_read_does_not_land_in_memory_that_is_used_for_something_else() {
    for settings in ["lock=off", "readonly=on"] {
        let Some((mut rig, guest)) = killed_with_a_request_in_the_kernel(settings, false) else { return };
        assert_eq!(guest.memory.read(DATA, PAGE), [0; PAGE], "{settings}");
        rig.daemon.stop();
    }
}

#[test]
fn a_late_write_does_not_land_on_a_newer_one() {
    let Some((mut rig, mut guest)) = killed_with_a_request_in_the_kernel("lock=off", true) else { return };
    guest.memory.write(DATA, &[2; PAGE]);
    ask(&mut guest, true);
    guest.queues[0].answer();
    assert_eq!(rig.mount.held(), 0);
    let found = std::fs::read(rig.mount.path("disk")).expect("the disk");
    assert_eq!(found[..PAGE], [2; PAGE]);
    rig.daemon.stop();
}

/// Sectors of a disk whose power is cut now that may lack what was just answered.
fn lost(rig: &Rig, byte: u8) -> usize {
    let at = rig.log.position();
    let cut = |seed| rig.log.cut(0, SIZE, at, Cache::Honest, seed);
    (0..20).map(|seed| cut(seed)[..PAGE].chunks(512).filter(|sector| **sector != [byte; 512]).count()).sum()
}

#[test]
fn writes_are_durable_at_the_next_daemon_if_the_driver_chose_that() {
    let Some(mut rig) = Rig::start("cache=writeback") else { return };
    let mut guest = rig.connect();
    let region = guest.ask_inflight(1);
    guest.show_inflight(&region);
    guest.start_queue(0, 0);
    guest.memory.write(DATA, &[1; PAGE]);
    ask(&mut guest, true);
    guest.queues[0].answer();
    assert!(lost(&rig, 1) > 0, "a disk with a cache loses what was not flushed: nothing is tried here");
    let about = [32_u32.to_ne_bytes(), 1_u32.to_ne_bytes(), [0; 4]].concat();
    guest.connection.tell(m::SET_CONFIG, &[&about[..], &[0]].concat(), &[]);
    for byte in [2, 3] {
        guest.memory.write(DATA, &[byte; PAGE]);
        ask(&mut guest, true);
        guest.queues[0].answer();
        assert_eq!(lost(&rig, byte), 0);
        guest = rig.killed(guest);
        guest.show_inflight(&region);
        let base = guest.queues[0].ring.used();
        guest.start_queue(0, base);
    }
    rig.daemon.stop();
}
