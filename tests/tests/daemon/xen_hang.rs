//! Storage of a Xen disk that does not answer: it blocks no other disk, no stop and no takeover, and its late effects
//! never overwrite later writes.

use std::process::Child;

use mqblk_admin::{Client, StatQuery};
use mqblk_core::{ByteLen, Sector512};
use mqblk_driver::DataSegment;
use mqblk_driver::blkfront::toolstack::Vbd;
use mqblk_driver::blkfront::{BlkfrontDevice, BlkfrontOptions, BlkfrontQueueSet, BlkfrontStatus};
use mqblk_tests::blkif::{BlkfrontLoad, SimulatedHost, start_neighbour};
use mqblk_tests::guest::LoopDevice;
use mqblk_tests::hostile::frontend::HostileFrontend;
use mqblk_tests::hostile::fuse::HangingFile;
use mqblk_tests::hostile::memory::START;
use mqblk_tests::hostile::neighbour::Neighbour;
use mqblk_tests::hostile::{TIMEOUT, wait_for};
use mqblk_xen::vbd::XenbusState;
use rustix::process::{Pid, Signal, kill_process};

/// Longer than any test.
const NEVER: &str = "3600000000";
const ADMIN: [&str; 4] = ["--workers", "2", "--admin", "FOLDER/admin"];
const OTHER: &str = "id=other,interface=xen,path=FOLDER/other.img,queues=2";
const BLOCK: usize = 4096;

/// A guest that has one request of one block in flight.
struct Guest {
    _device: BlkfrontDevice,
    set: BlkfrontQueueSet,
}

impl Guest {
    fn connect(options: &BlkfrontOptions) -> Guest {
        let mut options = options.clone();
        (options.depth, options.data_per_queue) = (8, ByteLen(64 << 10));
        let mut device = BlkfrontDevice::connect(&options).expect("the disk");
        let set = device.take_queues().pop().expect("one set of queues");
        Guest { _device: device, set }
    }

    fn submit(&mut self, write: Option<u8>) {
        let queue = &mut self.set.queues_mut()[0];
        let segment = DataSegment { address: queue.data().0, len: BLOCK as u32 };
        match write {
            Some(byte) => {
                queue.memory().write(segment.address, &[byte; BLOCK]).expect("the guest's memory");
                queue.write(0, Sector512(0), segment).expect("room");
            }
            None => queue.read(0, Sector512(0), segment).expect("room"),
        }
        queue.publish();
    }

    fn completion(&mut self) -> Option<BlkfrontStatus> {
        let queue = &mut self.set.queues_mut()[0];
        queue.poll().expect("a backend that keeps the protocol");
        queue.reap().expect("a backend that keeps the protocol").map(|one| one.status)
    }

    fn wait_completion(&mut self, what: &str) {
        assert_eq!(wait_for(what, || self.completion()), BlkfrontStatus::Ok, "{what}");
    }

    fn write(&mut self, byte: u8) {
        self.submit(Some(byte));
        self.wait_completion("a write");
    }

    fn read(&mut self) -> u8 {
        self.submit(None);
        self.wait_completion("a read");
        let queue = &mut self.set.queues_mut()[0];
        let mut first = [0];
        queue.memory().read(queue.data().0, &mut first).expect("the guest's memory");
        first[0]
    }
}

/// Starts a daemon for a disk `hung` with these settings, and another one.
fn start(hung: &str, more: &[&str]) -> SimulatedHost {
    let mut host = SimulatedHost::start(&["--xen-watch"]);
    host.stop();
    ["hung", "other"].iter().for_each(|name| drop(host.create_image(&format!("{name}.img"), 1 << 20)));
    let disk = format!("id=hung,interface=xen,queues=1,{hung}");
    host.spawn_with(&[&ADMIN[..], &["--disk", &disk, "--disk", OTHER], more].concat());
    host
}

fn neighbour(host: &SimulatedHost) -> (Vbd, Neighbour) {
    let device = host.create_device(2, "xvda", "mqblk:other");
    let options = BlkfrontOptions { queues: 2, ..host.frontend_options(&device) };
    (device, start_neighbour(options, 5))
}

fn fault(settings: &str) -> String {
    format!("storage=fault,inner=file,path=FOLDER/hung.img,{settings}")
}

fn admin(host: &SimulatedHost) -> Client {
    let path = host.folder().join("admin");
    wait_for("the admin socket", || Client::connect_with(&path, TIMEOUT.time()).ok())
}

/// Waits until a request of the disk `hung` is with its storage.
fn wait_in_flight(host: &SimulatedHost) {
    let mut admin = admin(host);
    wait_for("a request in flight", || {
        let stat = admin.stat(&StatQuery::default()).ok()?;
        let disk = stat.disks.iter().find(|disk| disk.id == "hung")?;
        (disk.totals.in_flight > 0).then_some(())
    });
}

fn wait_log(host: &SimulatedHost, what: &str, line: impl Fn(&str) -> bool) {
    wait_for(what, || host.log().lines().any(&line).then_some(()));
}

fn signal(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).expect("a signal");
}

/// Waits for a process' end. Returns true if it was a success.
fn wait_end(child: &mut Child, what: &str) -> bool {
    wait_for(what, || child.try_wait().expect("wait")).success()
}

/// The guest closes a disk whose flush never ends: all other disks are attached, served and detached, and a stop ends
/// within its bound.
#[test]
fn a_flush_that_hangs_holds_up_no_other_disk_and_no_stop() {
    let mut host = start(&fault(&format!("fault-sync-us={NEVER}")), &["--drain-timeout-s", "1"]);
    let device = host.create_device(1, "xvda", "mqblk:hung");
    let mut guest = Guest::connect(&host.frontend_options(&device));
    guest.write(1);
    drop(guest);
    host.domain(1).store().unwrap().write(&format!("{}/state", device.frontend_path()), "6").unwrap();
    wait_log(&host, "the detach", |line| line.contains("frontend disconnected") && line.contains("mqblk-1-"));
    for round in 0..3 {
        let other = host.create_device(2, "xvda", "mqblk:other");
        let mut load = BlkfrontLoad::connect(&host.frontend_options(&other), 200, round);
        load.round();
        load.finish();
        host.wait_for_backend_state(&other, XenbusState::Closed);
        other.remove(&mut host.store()).expect("both directories");
        wait_for("the device's end", || {
            (host.log().matches("dropped device=mqblk-2-").count() > round as usize).then_some(())
        });
    }
    assert_ne!(host.backend_state(&mut host.store(), &device), Some(XenbusState::Closed), "its flush hangs");
    let mut daemon = host.take_daemon();
    signal(&daemon, Signal::TERM);
    assert!(!wait_end(&mut daemon, "the daemon's end"), "a disk was not flushed");
    let log = host.log();
    assert!(log.contains("the device is left as it is") && log.contains("hung"), "{log}");
    assert!(!log.contains("the stop does not end"), "its steps have bounds of their own:\n{log}");
}

/// A takeover while a disk's request hangs: the other disk goes over at once, under verified load. The hung one stays
/// until a signal or the drain timeout ends the old daemon, and the new one answers its request.
#[test]
fn a_takeover_leaves_a_hung_disk_behind() {
    let mut host = start(&fault(&format!("fault-latency-us={NEVER}")), &["--drain-timeout-s", "3600"]);
    let device = host.create_device(1, "xvda", "mqblk:hung");
    let mut guest = Guest::connect(&host.frontend_options(&device));
    let (other, neighbour) = neighbour(&host);
    neighbour.assert_progress("the start");
    guest.submit(Some(7));
    wait_in_flight(&host);

    let disk = "id=hung,interface=xen,queues=1,path=FOLDER/hung.img";
    let successor = host.spawn_successor(&[&ADMIN[..], &["--disk", disk, "--disk", OTHER]].concat());
    let mut old = host.replace_daemon(successor);
    wait_log(&host, "the other disk in the new daemon", |line| {
        line.contains("ring resumed") && line.contains("mqblk-2-")
    });
    neighbour.assert_progress("the takeover");
    wait_log(&host, "the new daemon to say what it waits for", |line| {
        line.contains("WARN") && line.contains("mqblk-1-") && line.contains("it waits for another daemon")
    });
    assert!(old.try_wait().expect("wait").is_none(), "it still has the hung disk:\n{}", host.log());
    assert_eq!(guest.completion(), None);
    let version = admin(&host).call("version", &serde_json::Value::Null).expect("the new daemon's admin socket");
    assert_eq!(version["pid"].as_i64(), Some(host.pid().as_raw_pid().into()), "clients reach the new daemon");

    signal(&old, Signal::TERM);
    assert!(wait_end(&mut old, "the old daemon's end"), "{}", host.log());
    guest.wait_completion("the request that hung");
    assert_eq!(guest.read(), 7);
    let log = host.log();
    assert!(log.contains("storage has not answered its requests"), "{log}");
    assert!(!log.contains("cannot be bound"), "{log}");
    neighbour.assert_progress("the old daemon's end");
    neighbour.finish();
    drop((guest, other));
    host.stop();
}

/// Requests without a journal are not left behind: the takeover is given up before the other disk is affected, and all
/// disks are served.
#[test]
fn a_takeover_is_given_up_for_a_hung_disk_without_a_journal() {
    let hung = format!("{},journal=off", fault(&format!("fault-latency-us={NEVER}")));
    let mut host = start(&hung, &["--drain-timeout-s", "1"]);
    let device = host.create_device(1, "xvda", "mqblk:hung");
    let mut guest = Guest::connect(&host.frontend_options(&device));
    let (_other, neighbour) = neighbour(&host);
    guest.submit(Some(7));
    wait_in_flight(&host);
    let disk = "id=hung,interface=xen,queues=1,journal=off,path=FOLDER/hung.img";
    let mut successor = host.spawn_successor(&[&ADMIN[..], &["--disk", disk, "--disk", OTHER]].concat());
    assert!(!wait_end(&mut successor, "the new daemon's end"));
    wait_log(&host, "the old daemon's line", |line| {
        line.contains("devices are served here again")
            && line.contains("mqblk-1-51712: found requests that storage has not answered")
    });
    host.assert_alive("the takeover");
    neighbour.assert_progress("the takeover");
    neighbour.finish();
    host.kill();
}

/// VHOST_F_LOG_ALL (QEMU's `vhost-user.rst`): a migrating guest is not taken over.
const LOG_ALL: u64 = 1 << 26;

/// A frontend whose request hangs in the storage of its disk.
fn hang_virtio_request(host: &SimulatedHost) -> HostileFrontend {
    let mut guest = HostileFrontend::start(&host.folder().join("slow.sock"), LOG_ALL, 1);
    guest.queues[0].read_first_sector(START + 0x4000);
    // The queue requests a kick after this request, so it was pulled.
    wait_for("the request to be taken", || (guest.queues[0].ring.avail_event() == 1).then_some(()));
    guest
}

/// A signal ends the successor while it waits for the old daemon's storage, and the takeover while the old daemon waits
/// for it. Xen disks are served throughout.
#[test]
fn a_signal_ends_a_takeover_that_waits_for_storage() {
    for ends_successor in [true, false] {
        let mut host = start("storage=ram,size=1M", &[]);
        host.stop();
        let slow = format!("id=slow,socket=FOLDER/slow.sock,queues=1,{}", fault(&format!("fault-latency-us={NEVER}")));
        let arguments = [&ADMIN[..], &["--drain-timeout-s", "3600", "--disk", &slow, "--disk", OTHER]].concat();
        host.spawn_with(&arguments);
        let (_other, neighbour) = neighbour(&host);
        let guest = hang_virtio_request(&host);
        let mut successor = host.spawn_successor(&arguments);
        wait_log(&host, "the drain", |line| line.contains("waiting for storage since") && line.contains("slow"));
        neighbour.assert_progress("the takeover's begin");
        let what = match ends_successor {
            true => {
                signal(&successor, Signal::TERM);
                "a signal ends the successor"
            }
            false => {
                host.request_stop();
                "the daemon stops"
            }
        };
        assert!(!wait_end(&mut successor, "the successor's end"));
        wait_log(&host, "the old daemon's line", |line| {
            line.contains("devices are served here again") && line.contains(what)
        });
        host.assert_alive("the successor's end");
        if ends_successor {
            neighbour.assert_progress("the successor's end");
        }
        // The drain timeout is longer than the test.
        host.kill_now();
        drop((guest, neighbour));
    }
}

/// End of a daemon that has a write in the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    TakenOver,
    Stopped,
    Killed,
}

/// A write that the kernel executes late: the next daemon serves the disk when it has ended, so that no later write is
/// undone. The image's lock does not fence it: it is shared in a takeover, and off in the other cases.
#[test]
#[ignore = "needs root"]
fn as_root_a_late_write_never_lands_on_a_later_one() {
    for ending in [Ending::TakenOver, Ending::Stopped, Ending::Killed] {
        let file = HangingFile::mount(1 << 20);
        let device = LoopDevice::attach_file(&file.path(), &["--direct-io=on"]).expect("a loop device");
        let lock = if ending == Ending::TakenOver { "exclusive" } else { "off" };
        let disk = format!("id=hung,interface=xen,queues=1,lock={lock},path={}", device.path().display());
        let mut host = SimulatedHost::start(&["--xen-watch"]);
        host.stop();
        let arguments = [&ADMIN[..], &["--drain-timeout-s", "1", "--disk", &disk]].concat();
        host.spawn_with(&arguments);
        let vbd = host.create_device(1, "xvda", "mqblk:hung");
        let mut guest = Guest::connect(&host.frontend_options(&vbd));
        guest.write(1);
        let hangs = file.hang();
        guest.submit(Some(2));
        wait_for("the write to be with the file", || (file.waiting() > 0).then_some(()));
        hangs.answer_new();
        match ending {
            Ending::TakenOver => {
                let successor = host.spawn_successor(&arguments);
                let mut old = host.replace_daemon(successor);
                assert!(wait_end(&mut old, "the old daemon's end"), "{}", host.log());
            }
            Ending::Stopped => {
                let mut old = host.take_daemon();
                signal(&old, Signal::TERM);
                wait_end(&mut old, "the old daemon's end");
                host.spawn();
            }
            Ending::Killed => {
                host.kill();
                host.spawn();
            }
        }
        wait_log(&host, "the new daemon to say what it waits for", |line| {
            line.contains("WARN") && line.contains("mqblk-1-") && line.contains("it waits for another daemon")
        });
        assert_eq!(guest.completion(), None, "{ending:?}");
        assert_eq!(file.waiting(), 1, "{ending:?}: the old write is all that waits");
        drop(hangs);
        guest.wait_completion("the late write");
        guest.write(3);
        assert_eq!(guest.read(), 3, "{ending:?}");
        drop(guest);
        host.stop();
        let log = host.log();
        assert!(!log.contains("cannot be bound"), "{ending:?}:\n{log}");
    }
}
