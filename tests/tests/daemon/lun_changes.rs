//! LUNs that are added, removed and resized while the userspace driver has commands in flight: every command completes,
//! no command of the other LUNs fails, and each change is an event.

use std::path::Path;
use std::process::{Child, Command as Process, Stdio};

use mqblk_admin::{Client, StatQuery};
use mqblk_core::ByteLen;
use mqblk_driver::DataSegment;
use mqblk_driver::virtio_scsi::{
    Command, CommandOutcome, ControlQueues, Lba, LogicalUnit, LunAddress, ScsiConnectOptions, ScsiController,
    ScsiEventKind, ScsiQueueSet, Sense,
};
use mqblk_memory::GuestAddress;
use mqblk_tests::hostile::daemon::mqblk_binary;
use mqblk_tests::hostile::{TIMEOUT, wait_for};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tempfile::TempDir;

/// Commands in flight on each LUN.
const DEPTH: u32 = 4;
const BLOCKS: u32 = 8;

/// A daemon with a controller `c` of two queues. Killed when a test fails.
struct Daemon {
    child: Child,
    folder: TempDir,
}

impl Daemon {
    fn start(luns: &[&str]) -> Daemon {
        let folder = tempfile::tempdir().expect("a folder");
        let at = folder.path().display().to_string();
        let controller = format!("id=c,socket={at}/c.sock,queues=2");
        let mut process = Process::new(mqblk_binary());
        process.args(["serve", "--workers", "2", "--admin", &format!("{at}/admin"), "--controller", &controller]);
        let image = std::fs::File::create(folder.path().join("disk.img")).expect("an image");
        image.set_len(16 << 20).expect("an image");
        for lun in luns {
            process.args(["--lun", &format!("controller=c,{}", lun.replace("FOLDER", &at))]);
        }
        let child = process.env_remove("RUST_LOG").stdin(Stdio::null()).spawn().expect("the daemon");
        let mut daemon = Daemon { child, folder };
        wait_for("the admin socket", || {
            assert!(daemon.child.try_wait().expect("wait").is_none(), "the daemon ended");
            Client::connect(&daemon.path().join("admin")).ok()
        });
        daemon
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    fn admin(&self) -> Client {
        Client::connect_with(&self.path().join("admin"), TIMEOUT.time()).expect("the admin socket")
    }

    fn call(&self, verb: &str, params: Value) -> Value {
        self.admin().call(verb, &params).unwrap_or_else(|error| panic!("{verb} {params}: {error}"))
    }

    fn connect(&self) -> (ScsiController, ScsiQueueSet, ControlQueues) {
        let options = ScsiConnectOptions { queues: 2, ..ScsiConnectOptions::new(self.path().join("c.sock")) };
        let mut device = ScsiController::connect(&options).expect("the controller");
        let set = device.take_queues().remove(0);
        let control = device.take_control().expect("the control queue");
        (device, set, control)
    }

    fn stop(mut self) {
        kill_process(Pid::from_child(&self.child), Signal::TERM).expect("a signal");
        assert!(self.child.wait().expect("wait").success());
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits for the next event. Returns its LUN and kind.
fn event(control: &mut ControlQueues) -> (LunAddress, ScsiEventKind) {
    let event = wait_for("an event", || control.take_event().expect("the event queue"));
    assert!(!event.missed, "{event:?}");
    (event.address.expect("an address"), event.kind)
}

const CAPACITY: ScsiEventKind = ScsiEventKind::ParameterChange { asc: 0x2a, ascq: 0x09 };

fn at(target: u8, lun: u16) -> LunAddress {
    LunAddress { target, lun }
}

/// A load: keeps commands in flight on some LUNs, and counts their results.
struct Load {
    set: ScsiQueueSet,
    units: Vec<LunAddress>,
    /// By LUN: good, unit attentions, and others.
    good: Vec<u64>,
    attentions: Vec<Sense>,
    others: Vec<(LunAddress, CommandOutcome)>,
}

impl Load {
    fn new(set: ScsiQueueSet, units: &[LunAddress]) -> Load {
        Load { set, units: units.to_vec(), good: vec![0; units.len()], attentions: Vec::new(), others: Vec::new() }
    }

    fn command(&mut self, unit: usize, slot: u32) -> Command {
        let (data, len) = self.set.queues_mut()[slot as usize % 2].data();
        let bytes = BLOCKS * 512;
        let user = unit as u32 * DEPTH + slot;
        assert!(ByteLen(u64::from((user + 1) * bytes)) <= len);
        let piece = DataSegment { address: GuestAddress(data.0 + u64::from(user * bytes)), len: bytes };
        let (to, start) = (self.units[unit], Lba(u64::from(user * BLOCKS)));
        if slot == 0 {
            Command::write(to, start, BLOCKS, piece, false)
        } else {
            Command::read(to, start, BLOCKS, piece)
        }
    }

    fn submit(&mut self, unit: usize, slot: u32) {
        let command = self.command(unit, slot);
        self.set.submit(slot as usize % 2, unit as u32 * DEPTH + slot, &command).expect("room");
    }

    /// Fills all slots of all LUNs.
    fn begin(&mut self) {
        for unit in 0..self.units.len() {
            (0..DEPTH).for_each(|slot| self.submit(unit, slot));
        }
        self.set.publish().expect("a kick");
    }

    /// Takes completions, and resubmits each command unless `last`. Returns the number of completions.
    fn turn(&mut self, last: bool) -> usize {
        let mut ended = 0;
        for queue in 0..2 {
            self.set.poll(queue).expect("an honest ring");
            while let Some(completion) = self.set.reap(queue).expect("an honest ring") {
                ended += 1;
                let (unit, slot) = ((completion.user_data / DEPTH) as usize, completion.user_data % DEPTH);
                match completion.outcome {
                    CommandOutcome::Good => self.good[unit] += 1,
                    CommandOutcome::CheckCondition(sense) if sense.key == Sense::UNIT_ATTENTION => {
                        self.attentions.push(sense)
                    }
                    other => {
                        // The LUN was removed.
                        self.others.push((self.units[unit], other));
                        continue;
                    }
                }
                if !last {
                    self.submit(unit, slot);
                }
            }
        }
        self.set.publish().expect("a kick");
        ended
    }

    /// Runs until `count` more commands of a LUN have succeeded.
    fn more(&mut self, unit: usize, count: u64) {
        let goal = self.good[unit] + count;
        wait_for("commands that succeed", || {
            self.turn(false);
            (self.good[unit] >= goal).then_some(())
        });
    }

    /// Runs while `work` is executed on another thread.
    fn during<R: Send>(&mut self, work: impl FnOnce() -> R + Send) -> R {
        std::thread::scope(|scope| {
            let thread = scope.spawn(work);
            let mut until = TIMEOUT.begin();
            while !thread.is_finished() {
                self.turn(false);
                assert!(!until.has_passed(), "the change takes for ever");
            }
            thread.join().expect("the change")
        })
    }

    fn end(mut self) -> (ScsiQueueSet, Vec<u64>) {
        wait_for("all ends", || {
            self.turn(true);
            (self.set.outstanding() == 0).then_some(())
        });
        (self.set, self.good)
    }
}

fn scan(device: &ScsiController, set: &mut ScsiQueueSet) -> Vec<LogicalUnit> {
    device.scan(set).expect("a scan")
}

#[test]
fn a_lun_is_added_and_removed_under_load() {
    let daemon = Daemon::start(&["storage=ram,size=16M", "storage=ram,size=16M,id=going,target=3,lun=2"]);
    let (device, mut set, mut control) = daemon.connect();
    assert!(device.info().hotplug && device.info().change, "{:?}", device.info());
    assert_eq!(scan(&device, &mut set).iter().map(|unit| unit.address).collect::<Vec<_>>(), [at(0, 0), at(3, 2)]);

    let mut load = Load::new(set, &[at(0, 0), at(3, 2)]);
    load.begin();
    load.more(0, 100);
    load.more(1, 100);
    let added =
        load.during(|| daemon.call("lun.add", json!({ "settings": "controller=c,storage=ram,size=32M,serial=NEW" })));
    assert_eq!((&added["lun"]["target"], &added["lun"]["state"]), (&json!(1), &json!("ready")));
    assert_eq!(event(&mut control), (at(1, 0), ScsiEventKind::Rescan));
    load.more(0, 100);

    let removed = load.during(|| daemon.call("lun.remove", json!({ "id": "going" })));
    assert_eq!(removed["lun"]["state"], "removed");
    assert_eq!(event(&mut control), (at(3, 2), ScsiEventKind::Removed));
    load.more(0, 100);
    // All commands of the removed LUN have ended, and none of the other LUN failed.
    let gone = wait_for("the ends of the unit that went", || {
        load.turn(false);
        (load.others.len() == DEPTH as usize).then(|| std::mem::take(&mut load.others))
    });
    assert!(gone.iter().all(|(unit, _)| *unit == at(3, 2)), "{gone:?}");
    let (mut set, good) = load.end();
    assert!(good[0] >= 300 && good[1] >= 100, "{good:?}");

    let stat = daemon.admin().stat(&StatQuery::default()).expect("a stat");
    let luns = &stat.controllers[0].luns;
    assert_eq!(luns.iter().map(|lun| lun.id.as_str()).collect::<Vec<_>>(), ["c:0:0", "c:1:0"]);
    let counters = &luns[0].counters;
    assert_eq!(counters.reads + counters.writes, good[0]);
    assert_eq!((counters.read_bytes + counters.written_bytes, counters.errors), (good[0] * 4096, 0));
    assert!(counters.read_ns > 0 && counters.write_ns > 0, "{counters:?}");
    assert_eq!((luns[0].in_flight, luns[1].counters.reads, luns[1].counters.writes), (0, 0, 0), "{luns:?}");

    let units = scan(&device, &mut set);
    let found: Vec<_> =
        units.iter().map(|unit| (unit.address, unit.capacity().expect("small"), unit.serial.as_deref())).collect();
    assert_eq!(found, [(at(0, 0), ByteLen(16 << 20), Some("c:0:0")), (at(1, 0), ByteLen(32 << 20), Some("NEW"))]);

    // Its address and its slot are free again.
    daemon.call(
        "lun.add",
        json!({ "controller": "c", "target": 3, "lun": 2, "settings": { "storage": "ram", "size": "1M" } }),
    );
    assert_eq!(event(&mut control), (at(3, 2), ScsiEventKind::Rescan));
    assert_eq!(scan(&device, &mut set).last().and_then(LogicalUnit::capacity), Some(ByteLen(1 << 20)));
    let stat = daemon.admin().stat(&StatQuery::default()).expect("a stat");
    let last = stat.controllers[0].luns.last().expect("it");
    assert_eq!(
        (last.id.as_str(), last.counters.reads, last.counters.writes),
        ("c:3:2", 0, 0),
        "its predecessor's are not its"
    );
    device.stop(vec![set]).expect("a stop");
    daemon.stop();
}

#[test]
fn counters_of_a_lun_survive_guests_and_changes_of_other_luns() {
    let daemon = Daemon::start(&["storage=ram,size=16M"]);
    let counted = |id: &str| {
        let stat =
            daemon.admin().stat(&StatQuery { disk: Some(id.to_owned()), ..StatQuery::default() }).expect("a stat");
        let counters = stat.controllers[0].luns[0].counters;
        counters.reads + counters.writes
    };
    let load = |unit: LunAddress| {
        let (device, set, _control) = daemon.connect();
        let mut load = Load::new(set, &[unit]);
        load.begin();
        load.more(0, 50);
        let (set, good) = load.end();
        device.stop(vec![set]).expect("a stop");
        good[0]
    };
    let add = |settings: &str| daemon.call("lun.add", json!({ "controller": "c", "settings": settings }));
    // Alone, then with others, by one guest and by others that connect and disconnect.
    let mut first = load(at(0, 0));
    assert_eq!(counted("c:0:0"), first);
    let (device, set, _control) = daemon.connect();
    let mut lasting = Load::new(set, &[at(0, 0)]);
    lasting.begin();
    lasting.more(0, 50);
    lasting.during(|| add("storage=ram,size=16M,id=second"));
    lasting.more(0, 50);
    let (set, good) = lasting.end();
    first += good[0];
    assert_eq!((counted("c:0:0"), counted("second")), (first, 0));
    device.stop(vec![set]).expect("a stop");
    first += load(at(0, 0));
    let second = load(at(1, 0));
    assert_eq!((counted("c:0:0"), counted("second")), (first, second));
    // Another LUN in its slot begins at 0.
    daemon.call("lun.remove", json!({ "id": "second" }));
    add("storage=ram,size=16M,id=third");
    assert_eq!((counted("c:0:0"), counted("third")), (first, 0));
    let third = load(at(1, 0));
    assert_eq!((counted("c:0:0"), counted("third")), (first, third));
    daemon.call("lun.remove", json!({ "id": "c:0:0" }));
    add("storage=ram,size=16M");
    assert_eq!((counted("c:0:0"), counted("third")), (0, third));
    daemon.stop();
}

#[test]
fn a_unit_grows_and_shrinks_under_load() {
    let daemon = Daemon::start(&["path=FOLDER/disk.img", "unit=c:0:0,target=9", "storage=ram,size=16M"]);
    let (device, mut set, mut control) = daemon.connect();
    let sizes = |set: &mut ScsiQueueSet| -> Vec<u64> {
        scan(&device, set).iter().map(|unit| unit.capacity().expect("small").0 >> 20).collect()
    };
    assert_eq!(sizes(&mut set), [16, 16, 16]);
    let mut load = Load::new(set, &[at(0, 0), at(9, 0), at(1, 0)]);
    load.begin();
    (0..3).for_each(|unit| load.more(unit, 100));
    load.attentions.clear();

    let image = daemon.path().join("disk.img");
    let host = std::fs::OpenOptions::new().write(true).open(&image).expect("the image");
    host.set_len(48 << 20).expect("the host grows it");
    let result = load.during(|| daemon.call("lun.resize", json!({ "id": "c:0:0" })));
    assert_eq!(result["lun"]["size_bytes"], 48 << 20);
    let mut places = [event(&mut control), event(&mut control)];
    places.sort_by_key(|(place, _)| place.target);
    assert_eq!(places, [(at(0, 0), CAPACITY), (at(9, 0), CAPACITY)]);
    let result = load
        .during(|| daemon.call("lun.resize", json!({ "controller": "c", "target": 9, "size": "32M", "shrink": true })));
    assert_eq!((&result["lun"]["id"], &result["lun"]["size_bytes"]), (&json!("c:9:0"), &json!(32 << 20)));
    event(&mut control);
    event(&mut control);
    (0..3).for_each(|unit| load.more(unit, 100));
    // Both paths of the logical unit got a unit attention with their next command; the other one, and all commands in
    // flight, continued.
    let changed = load.attentions.iter().filter(|sense| (sense.asc, sense.ascq) == (0x2a, 0x09)).count();
    assert!((2..=4).contains(&changed) && changed == load.attentions.len(), "{:?}", load.attentions);
    assert_eq!(load.others, []);
    let (mut set, _) = load.end();
    assert_eq!(sizes(&mut set), [32, 16, 32]);
    assert_eq!(std::fs::metadata(&image).expect("the image").len(), 32 << 20);
    device.stop(vec![set]).expect("a stop");
    daemon.stop();
}

#[test]
fn a_shared_logical_unit_is_one() {
    let daemon = Daemon::start(&["storage=ram,size=16M", "unit=c:0:0,target=9"]);
    let (device, mut set, _control) = daemon.connect();
    let units = scan(&device, &mut set);
    let [first, second] = units.as_slice() else { panic!("{units:?}") };
    assert_eq!((first.address, second.address), (at(0, 0), at(9, 0)));
    assert_eq!((&first.serial, &first.designators), (&second.serial, &second.designators));
    // Data written by one path is read by the other.
    let memory = std::sync::Arc::clone(set.queues_mut()[0].memory());
    let (data, _) = set.queues_mut()[0].data();
    let piece = |at: u64| DataSegment { address: GuestAddress(data.0 + at), len: 512 };
    memory.write(piece(0).address, &[0xa5; 512]).expect("shared memory");
    for (user, command) in [
        (0, Command::write(first.address, Lba(7), 1, piece(0), true)),
        (1, Command::read(second.address, Lba(7), 1, piece(4096))),
    ] {
        set.submit(0, user, &command).expect("room");
        set.publish().expect("a kick");
        let done = wait_for("an end", || {
            set.poll(0).expect("an honest ring");
            set.poll(1).expect("an honest ring");
            set.reap(0).expect("an honest ring")
        });
        assert_eq!((done.user_data, done.outcome), (user, CommandOutcome::Good));
    }
    let mut read = [0; 512];
    memory.read(piece(4096).address, &mut read).expect("shared memory");
    assert_eq!(read, [0xa5; 512]);
    // One path is removed, the logical unit stays.
    daemon.call("lun.remove", json!({ "id": "c:0:0" }));
    assert_eq!(scan(&device, &mut set).iter().map(|unit| unit.address).collect::<Vec<_>>(), [at(9, 0)]);
    device.stop(vec![set]).expect("a stop");
    daemon.stop();
}
