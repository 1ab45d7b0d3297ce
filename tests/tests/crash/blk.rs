//! virtio-blk: daemons that are killed and stopped at random times, under overlapping requests of all sizes, which
//! complete in any order.

use std::time::Duration;

use mqblk_tests::crash::blk::BlkRig;
use mqblk_tests::crash::kills::{self, KillPlan, RunningLoad};
use mqblk_tests::crash::load::{DISK_SECTORS, LoadHistory};
use mqblk_tests::crash::oracle::SECTOR;
use mqblk_tests::guest::LoopDevice;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

/// Disks: their ids and special settings.
const DISKS: [(&str, &str); 4] = [
    ("cache", "storage=file,direct=off"),
    ("direct", "storage=file,direct=on,merge=on"),
    ("fault", "storage=fault,inner=file,direct=off,merge=on,fault-jitter-us=3000,fault-reorder=4"),
    ("qcow2", "storage=qcow2,base=FOLDER/qcow2.img,overlay=FOLDER/qcow2.qcow2"),
];

#[test]
fn killed_and_stopped_under_load() {
    kill_and_stop_under_load(false);
}

#[test]
fn killed_and_stopped_under_load_with_packed_rings() {
    kill_and_stop_under_load(true);
}

fn kill_and_stop_under_load(packed: bool) {
    let mut rig = BlkRig::start(&DISKS, &[]);
    let loads = rig.loads(&DISKS, packed);
    let name = if packed { "virtio-blk, packed rings" } else { "virtio-blk" };
    rig.kill_and_stop(name, loads, KillPlan::usual(), BlkRig::content);
}

/// Sectors are written by reading and writing a block of the device. A kill between the two, or within the write,
/// leaves their neighbours intact.
#[test]
#[ignore = "needs root"]
fn as_root_killed_and_stopped_with_blocks_smaller_than_the_device_s() {
    let backing = tempfile::NamedTempFile::new().expect("a file");
    backing.as_file().set_len(DISK_SECTORS * SECTOR as u64).expect("its size");
    let device = LoopDevice::attach_file(backing.path(), &["--sector-size", "4096"]).expect("a loop device");
    let settings = |aio: &str| format!("storage=file,path={},block-size=512,{aio}", device.path().display());
    for aio in ["aio=io_uring", "aio=threads"] {
        let zeroes = vec![0; (DISK_SECTORS * SECTOR as u64) as usize];
        std::fs::write(device.path(), zeroes).expect("an empty device");
        let settings = settings(aio);
        let disks = [("cache", settings.as_str())];
        let content = |_: &BlkRig, _: &str| std::fs::read(device.path()).expect("the device");
        let mut rig = BlkRig::start(&disks, &[]);
        let loads = rig.loads(&disks, false);
        rig.kill_and_stop(&format!("virtio-blk, small blocks, {aio}"), loads, KillPlan::usual(), content);
    }
}

/// Each request takes 0.2 s, so that some are always in flight.
const SLOW: [(&str, &str); 2] = [
    ("slow", "storage=fault,inner=file,direct=off,fault-latency-us=200000,fault-jitter-us=50000"),
    ("cache", "storage=file,direct=off"),
];

#[test]
fn killed_and_stopped_while_storage_is_slow() {
    let mut rig = BlkRig::start(&SLOW, &[]);
    let loads = rig.loads(&SLOW, false);
    rig.kill_and_stop("virtio-blk, slow storage", loads, KillPlan::slow(), BlkRig::content);
}

#[test]
fn drivers_that_die_and_reconnect_at_once() {
    let seed = kills::seed();
    let mut random = SmallRng::seed_from_u64(seed);
    for (id, settings) in [SLOW[0], DISKS[2], DISKS[1]] {
        let mut rig = BlkRig::start(&[(id, settings)], &[]);
        let mut history = LoadHistory::new(1);
        let mut kills = 0;
        for round in 0..if kills::is_full_run() { 20 } else { 4 } {
            let port = rig.connect(id, false);
            let mut load = RunningLoad::start(id, port, history, seed + round);
            load.wait_completions(random.random_range(1..60));
            std::thread::sleep(Duration::from_micros(random.random_range(0..20_000)));
            let (known, port) = load.die();
            history = known;
            // In the order of a killed process: the socket is closed first, then its memory.
            rig.devices.clear();
            drop(port);
            if random.random_ratio(1, 3) {
                rig.daemon.kill();
                rig.daemon.spawn();
                kills += 1;
            }
        }
        let port = rig.connect(id, false);
        let mut load = RunningLoad::start(id, port, history, seed);
        load.wait_completions(60);
        let ended = load.finish();
        rig.daemon.stop();
        let mut stats = rig.check(&[id], ended, BlkRig::content);
        stats.kills = kills;
        stats.log(&format!("virtio-blk, drivers that die: {id}"), seed);
    }
}

#[test]
fn stopped_while_storage_does_not_complete_in_time() {
    let disk = ("stuck", "storage=fault,inner=file,direct=off,fault-latency-us=1800000");
    let mut rig = BlkRig::start(&[disk], &["--drain-timeout-s", "1"]);
    let port = rig.connect(disk.0, false);
    rig.stop_while_stuck("virtio-blk, storage that does not answer", (disk.0, port), BlkRig::content);
}
