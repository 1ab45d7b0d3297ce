//! The properties of a device that a guest was given stay while the guest lives, through restarts and changes of the
//! daemon, its configuration and its host.

use std::path::Path;

use mqblk_core::Sector512;
use mqblk_driver::DataSegment;
use mqblk_driver::virtio_blk::{BlkConnectOptions, BlkDevice, BlkQueueSet, BlkStatus, SectorRange};
use mqblk_driver::virtio_scsi::{Cdb, Command, CommandData, ScsiConnectOptions, ScsiController, ScsiQueueSet};
use mqblk_tests::crash::daemon::RestartableDaemon;
use mqblk_tests::hostile::{TIMEOUT, wait_for};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Ways to end a daemon whose guest stays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Kill,
    Stop,
    TakeOver,
}

/// Starts a daemon with a virtio-blk disk and a controller with a LUN. `state`: with a state file.
fn start(disk: &str, controller: &str, lun: &str, state: bool) -> RestartableDaemon {
    let mut arguments = vec!["--workers".to_owned(), "1".to_owned(), "--admin".to_owned(), "FOLDER/admin".to_owned()];
    if state {
        arguments.extend(["--state".to_owned(), "FOLDER/state".to_owned()]);
    }
    arguments.extend(["--disk".to_owned(), format!("id=a,path=FOLDER/a.img,socket=FOLDER/a.sock,{disk}")]);
    arguments.extend(["--controller".to_owned(), format!("id=c,socket=FOLDER/c.sock,{controller}")]);
    arguments.extend(["--lun".to_owned(), format!("controller=c,target=0,path=FOLDER/b.img,{lun}")]);
    RestartableDaemon::start(&arguments, &["a.img", "b.img"])
}

/// Ends the daemon, and restarts it with the current configuration. Returns true if its guests have to reconnect.
fn restart(daemon: &mut RestartableDaemon, end: End) -> bool {
    match end {
        End::Kill => daemon.kill(),
        End::Stop => daemon.stop(),
        End::TakeOver => {
            let arguments = daemon.arguments().to_vec();
            daemon.take_over_with(&arguments);
            return false;
        }
    }
    daemon.spawn();
    true
}

/// The guest of the disk.
struct BlkGuest {
    device: BlkDevice,
    set: BlkQueueSet,
}

impl BlkGuest {
    fn connect(socket: &Path, queues: u16, queue_size: u16) -> BlkGuest {
        let timeouts = BlkConnectOptions::new(socket);
        let options = BlkConnectOptions {
            queues,
            queue_size,
            connect_timeout: TIMEOUT.time(),
            reply_timeout: TIMEOUT.time(),
            ..timeouts
        };
        let mut device = BlkDevice::connect(&options).expect("the disk");
        let set = device.take_queues().remove(0);
        BlkGuest { device, set }
    }

    fn finish(&mut self, queue: usize) -> BlkStatus {
        self.set.queues_mut()[queue].publish().expect("the kick");
        wait_for("a completion", || {
            // A starting daemon calls its guests once.
            self.set.wait_at_most(1, TIMEOUT.time()).expect("a device that keeps the protocol");
            let queue = &mut self.set.queues_mut()[queue];
            queue.poll().expect("a device that keeps the protocol");
            queue.reap().expect("a device that keeps the protocol").map(|done| done.status)
        })
    }

    fn data(&self, queue: usize, len: u32) -> DataSegment {
        DataSegment { address: self.set.queues()[queue].data().0, len }
    }

    fn read(&mut self, queue: usize, start: u64) -> BlkStatus {
        let data = self.data(queue, 512);
        self.set.queues_mut()[queue].read(0, Sector512(start), data).expect("room");
        self.finish(queue)
    }

    fn write(&mut self, start: u64, bytes: &[u8]) -> BlkStatus {
        let data = self.data(0, bytes.len() as u32);
        let queue = &mut self.set.queues_mut()[0];
        queue.memory().write(data.address, bytes).expect("its memory");
        queue.write(0, Sector512(start), data).expect("room");
        self.finish(0)
    }

    fn discard(&mut self) -> BlkStatus {
        let range = SectorRange { start: Sector512(64), sectors: 64, unmap: false };
        self.set.queues_mut()[0].discard(0, &[range]).expect("room");
        self.finish(0)
    }

    fn zeroes(&mut self) -> BlkStatus {
        let range = SectorRange { start: Sector512(3), sectors: 2, unmap: true };
        self.set.queues_mut()[0].write_zeroes(0, &[range]).expect("room");
        self.finish(0)
    }

    fn serial(&mut self) -> String {
        let data = self.data(0, 20);
        self.set.queues_mut()[0].get_id(0, data.address).expect("room");
        assert_eq!(self.finish(0), BlkStatus::Ok);
        let mut text = [0; 20];
        self.set.queues()[0].memory().read(data.address, &mut text).expect("its memory");
        String::from_utf8_lossy(&text).trim_end_matches('\0').to_owned()
    }
}

/// The guest of the controller.
struct ScsiGuest {
    controller: ScsiController,
    set: ScsiQueueSet,
}

/// The guest's queries of its LUN: INQUIRY, its pages 80h, 83h, B0h, B1h and B2h, and READ CAPACITY (16).
const QUESTIONS: [[u8; 16]; 7] = [
    [0x12, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    [0x12, 1, 0x80, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    [0x12, 1, 0x83, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    [0x12, 1, 0xb0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    [0x12, 1, 0xb1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    [0x12, 1, 0xb2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    [0x9e, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0],
];

impl ScsiGuest {
    fn connect(socket: &Path, queues: u16) -> ScsiGuest {
        let mut options = ScsiConnectOptions::new(socket);
        options.queues = queues;
        (options.connect_timeout, options.reply_timeout) = (TIMEOUT.time(), TIMEOUT.time());
        let mut controller = ScsiController::connect(&options).expect("the controller");
        let mut set = controller.take_queues().remove(0);
        controller.scan(&mut set).expect("its units");
        ScsiGuest { controller, set }
    }

    /// Returns all answers about its LUN.
    fn answers(&mut self) -> Vec<Vec<u8>> {
        // A restart has raised a unit attention, which scanning clears.
        let units = self.controller.scan(&mut self.set).expect("its units");
        let address = units.first().expect("one").address;
        let (at, memory) = {
            let queue = &self.set.queues_mut()[0];
            (queue.data().0, queue.memory().clone())
        };
        let answers = QUESTIONS.map(|cdb| {
            let data = DataSegment { address: at, len: 256 };
            memory.write(at, &[0; 256]).expect("its memory");
            let command = Command { address, cdb: Cdb::raw(&cdb), data: CommandData::In(data) };
            self.set.submit(0, 0, &command).expect("room");
            self.set.publish().expect("the kick");
            wait_for("a completion", || {
                self.set.wait_at_most(1, TIMEOUT.time()).expect("a device that keeps the protocol");
                self.set.poll(0).expect("a device that keeps the protocol");
                self.set.reap(0).expect("a device that keeps the protocol")
            });
            let mut bytes = vec![0; 256];
            memory.read(at, &mut bytes).expect("its memory");
            bytes
        });
        answers.into()
    }
}

/// The changed settings of the disk, the controller and the LUN, before.
const BEFORE: [&str; 3] =
    ["queues=3,queue-size=128,block-size=512,serial=given", "queues=3,queue-size=256", "block-size=512,serial=lun"];
const AFTER: [&str; 3] = [
    "queues=2,queue-size=64,block-size=4096,serial=other,discard=ignore",
    "queues=2,queue-size=512",
    "block-size=4096,serial=unlike,unit-name=another,vendor=V,product=P,discard=ignore",
];

#[test]
fn guests_keep_what_they_were_given() {
    for (end, state) in [(End::Kill, true), (End::Stop, true), (End::TakeOver, true), (End::TakeOver, false)] {
        let mut daemon = start(BEFORE[0], BEFORE[1], BEFORE[2], state);
        let mut blk = BlkGuest::connect(&daemon.folder().join("a.sock"), 3, 128);
        let mut scsi = ScsiGuest::connect(&daemon.folder().join("c.sock"), 3);
        let (info, serial, answers) = (*blk.device.info(), blk.serial(), scsi.answers());
        assert!(info.discard.is_some() && info.block_size.bytes() == 512 && serial == "given", "{info:?}");
        for (before, after) in BEFORE.iter().zip(AFTER) {
            daemon.replace_in_arguments(before, after);
        }
        if restart(&mut daemon, end) {
            blk.device.reconnect(TIMEOUT.time()).unwrap_or_else(|error| panic!("{end:?}: {error}\n{}", daemon.log()));
            scsi.controller.reconnect(TIMEOUT.time()).unwrap_or_else(|error| panic!("{end:?}: {error}"));
        }
        assert_eq!(*blk.device.refresh().expect("its configuration"), info, "{end:?}");
        assert_eq!(blk.serial(), serial, "{end:?}");
        assert_eq!(scsi.answers(), answers, "{end:?}");
        for queue in 0..3 {
            assert_eq!(blk.read(queue, 3), BlkStatus::Ok, "{end:?}: queue {queue}");
        }
        for status in [blk.write(5, &[7; 512]), blk.discard(), blk.zeroes()] {
            assert_eq!(status, BlkStatus::Ok, "{end:?}");
        }
        let log = daemon.log();
        for line in [
            "disk \"a\": queues: the guest has 3, found 2 in the configuration",
            "disk \"a\": queue-size: the guest has 128, found 64 in the configuration",
            "disk \"a\": block-size: the guest has 512, found 4096 in the configuration",
            "disk \"a\": serial: the guest has \"given\", found \"other\"",
            "disk \"a\": discard: the guest has it",
            "lun \"c:0:0\": block-size: the guest has 512, found 4096 in the configuration",
            "lun \"c:0:0\": unit-name: the guest has",
        ] {
            assert_eq!(log.matches(line).count(), 1, "{end:?}: {line}\n{log}");
        }
        // The properties end with their guests: the next ones get the configured ones.
        let disconnected = || daemon.log().matches("frontend disconnected").count();
        let before = disconnected();
        drop((blk, scsi));
        wait_for("the guests' end", || (disconnected() >= before + 2).then_some(()));
        restart(&mut daemon, End::Stop);
        let blk = BlkGuest::connect(&daemon.folder().join("a.sock"), 2, 64);
        let info = blk.device.info();
        assert_eq!((info.block_size.bytes(), info.queues, info.discard), (4096, 2, None), "{end:?}");
        assert_ne!(ScsiGuest::connect(&daemon.folder().join("c.sock"), 2).answers(), answers, "{end:?}");
        daemon.stop();
    }
}

/// The number of queues defaults to that of the CPUs.
#[test]
fn fewer_cpus_take_no_queue_from_a_guest() {
    let all = sched_getaffinity(None).expect("the CPUs");
    let mut one = CpuSet::new();
    one.set((0..CpuSet::MAX_CPU).find(|cpu| all.is_set(*cpu)).expect("a CPU"));
    let mut daemon = start("cache=writeback", "queues=1", "cache=writeback", true);
    let socket = daemon.folder().join("a.sock");
    let queues = BlkGuest::connect(&socket, 1, 64).device.info().queues;
    let mut guest = BlkGuest::connect(&socket, queues, 64);
    daemon.kill();
    sched_setaffinity(None, &one).expect("a CPU");
    daemon.spawn();
    sched_setaffinity(None, &all).expect("the CPUs");
    guest.device.reconnect(TIMEOUT.time()).expect("the same disk");
    assert_eq!(guest.device.info().queues, queues);
    for queue in 0..queues {
        assert_eq!(guest.read(queue.into(), 0), BlkStatus::Ok);
    }
    daemon.stop();
}

/// A raw image belongs to its guest: no content that the guest writes keeps its disk or others from being served.
#[test]
fn a_guest_s_image_signature_does_not_keep_its_disk_from_being_served() {
    for end in [End::Kill, End::Stop] {
        let mut daemon = start("queues=1", "queues=1", "cache=writeback", true);
        let socket = daemon.folder().join("a.sock");
        let mut guest = BlkGuest::connect(&socket, 1, 64);
        let mut first = vec![0; 512];
        first[..8].copy_from_slice(b"QFI\xfb\0\0\0\x03");
        assert_eq!(guest.write(0, &first), BlkStatus::Ok);
        // With or without the guest.
        drop(guest);
        wait_for("the guest's end", || daemon.log().contains("frontend disconnected").then_some(()));
        restart(&mut daemon, end);
        let mut guest = BlkGuest::connect(&socket, 1, 64);
        assert_eq!(guest.read(0, 0), BlkStatus::Ok, "{end:?}");
        daemon.stop();
    }
}
