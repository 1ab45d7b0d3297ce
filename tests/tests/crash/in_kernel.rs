//! Requests of a killed daemon that are still in the kernel: the next daemon's queues wait for them. The disks are
//! files of the test's own file system, which holds reads and writes until the test releases them. As with a block
//! device, the kernel continues direct transfers after their process is gone. Also checks the durability of writes.
//! Needs root and /dev/fuse.

use std::sync::Arc;

use mqblk_tests::crash::daemon::RestartableDaemon;
use mqblk_tests::hostile::frontend::{DEFAULT_RING_SIZE, FrontendQueue, HostileFrontend};
use mqblk_tests::hostile::memory::START;
use mqblk_tests::hostile::request::{header, readable, request_type, writable, write_direct};
use mqblk_tests::hostile::ring::RingAddresses;
use mqblk_tests::hostile::socket::message as m;
use mqblk_tests::hostile::wait_for;
use mqblk_tests::power::{CacheModel, PowerLog, PowerMount};

const SIZE: usize = 1 << 20;
const PAGE: usize = 4096;
const REQUEST: u64 = START + 0x4000;
const DATA: u64 = START + 0x5000;
/// The daemon's log line while it waits.
const WAITS: &str = "queues wait for the storage to end requests";

struct Rig {
    log: Arc<PowerLog>,
    mount: PowerMount,
    daemon: RestartableDaemon,
}

impl Rig {
    /// Starts a daemon.
    fn start(settings: &str) -> Rig {
        let log = Arc::<PowerLog>::default();
        let mount = PowerMount::with_surviving_io(&log, &[("disk", SIZE), ("marks", 512)]).expect("a mount");
        let path = mount.path("disk");
        let disk =
            format!("id=d,socket=FOLDER/d.sock,storage=file,path={},direct=on,aio=io_uring,{settings}", path.display());
        let daemon =
            RestartableDaemon::start(&["--workers".to_owned(), "1".to_owned(), "--disk".to_owned(), disk], &[]);
        Rig { log, mount, daemon }
    }

    fn connect(&self) -> HostileFrontend {
        let mut guest = HostileFrontend::connect(&self.daemon.folder().join("d.sock"), 0);
        guest.queues.push(FrontendQueue::new(&guest.memory, RingAddresses::pages(START), DEFAULT_RING_SIZE));
        guest
    }

    fn killed(&mut self, guest: HostileFrontend) -> HostileFrontend {
        self.daemon.kill();
        self.daemon.spawn();
        guest.reconnect(&self.daemon.folder().join("d.sock"))
    }
}

/// Reads or writes the disk's first page.
fn submit(guest: &mut HostileFrontend, is_write: bool) {
    let queue = &mut guest.queues[0];
    queue.ring.memory.write(REQUEST, &header(if is_write { request_type::OUT } else { request_type::IN }, 0));
    let data = if is_write { readable(DATA, PAGE as u32) } else { writable(DATA, PAGE as u32) };
    write_direct(&queue.ring, &[0, 1, 2], &[readable(REQUEST, 16), data, writable(REQUEST + 16, 1)]);
    queue.ring.offer(0);
    queue.publish_and_kick();
}

/// Kills the daemon while the kernel has one of its requests, and checks that the next one completes nothing until that
/// has ended.
fn killed_with_a_request_in_the_kernel(settings: &str, is_write: bool) -> (Rig, HostileFrontend) {
    let mut rig = Rig::start(settings);
    let mut guest = rig.connect();
    let region = guest.get_inflight(1);
    guest.set_inflight(&region);
    guest.start_queue(0, 0);
    guest.memory.write(DATA, &[1; PAGE]);
    rig.mount.hold();
    submit(&mut guest, is_write);
    wait_for("the kernel to have the request", || (rig.mount.held() > 0).then_some(()));
    let mut guest = rig.killed(guest);
    rig.mount.stop_holding();
    guest.set_inflight(&region);
    guest.start_queue(0, 0);
    wait_for("a daemon that waits", || {
        assert_eq!(guest.queues[0].ring.used(), 0, "it answers while a request of the daemon before is under way");
        rig.daemon.log().contains(WAITS).then_some(())
    });
    assert!(rig.mount.held() > 0 && guest.queues[0].ring.used() == 0);
    rig.mount.release_held();
    guest.queues[0].wait_completion();
    (rig, guest)
}

#[test]
#[ignore = "needs root"]
fn as_root_a_late_read_does_not_overwrite_reused_memory() {
    for settings in ["lock=off", "readonly=on"] {
        let (mut rig, guest) = killed_with_a_request_in_the_kernel(settings, false);
        assert_eq!(guest.memory.read(DATA, PAGE), [0; PAGE], "{settings}");
        rig.daemon.stop();
    }
}

#[test]
#[ignore = "needs root"]
fn as_root_a_late_write_does_not_overwrite_a_newer_one() {
    let (mut rig, mut guest) = killed_with_a_request_in_the_kernel("lock=off", true);
    guest.memory.write(DATA, &[2; PAGE]);
    submit(&mut guest, true);
    guest.queues[0].wait_completion();
    assert_eq!(rig.mount.held(), 0);
    let found = std::fs::read(rig.mount.path("disk")).expect("the disk");
    assert_eq!(found[..PAGE], [2; PAGE]);
    rig.daemon.stop();
}

/// Returns the number of sectors of the last write that a power cut could lose now.
fn lost(rig: &Rig, byte: u8) -> usize {
    let at = rig.log.position();
    let cut = |seed| rig.log.cut(0, SIZE, at, CacheModel::Honest, seed);
    (0..20).map(|seed| cut(seed)[..PAGE].chunks(512).filter(|sector| **sector != [byte; 512]).count()).sum()
}

#[test]
#[ignore = "needs root"]
fn as_root_writes_are_durable_at_the_next_daemon_if_the_driver_chose_that() {
    let mut rig = Rig::start("cache=writeback");
    let mut guest = rig.connect();
    let region = guest.get_inflight(1);
    guest.set_inflight(&region);
    guest.start_queue(0, 0);
    guest.memory.write(DATA, &[1; PAGE]);
    submit(&mut guest, true);
    guest.queues[0].wait_completion();
    assert!(lost(&rig, 1) > 0, "a disk with a cache loses what was not flushed: nothing is tried here");
    let about = [32_u32.to_ne_bytes(), 1_u32.to_ne_bytes(), [0; 4]].concat();
    guest.connection.send_acked(m::SET_CONFIG, &[&about[..], &[0]].concat(), &[]);
    for byte in [2, 3] {
        guest.memory.write(DATA, &[byte; PAGE]);
        submit(&mut guest, true);
        guest.queues[0].wait_completion();
        assert_eq!(lost(&rig, byte), 0);
        guest = rig.killed(guest);
        guest.set_inflight(&region);
        let base = guest.queues[0].ring.used();
        guest.start_queue(0, base);
    }
    rig.daemon.stop();
}
