//! Takeovers of qcow2 images, whose tables are in the memory of the daemon that serves them. See `takeover` for the
//! behaviour of any disk.

use std::path::Path;

use mqblk_tests::crash::blk::disk_content;
use mqblk_tests::crash::blk::{self, BlkQueues};
use mqblk_tests::crash::daemon::RestartableDaemon;
use mqblk_tests::crash::kills::{self, RunningLoad};
use mqblk_tests::crash::load::LoadHistory;
use mqblk_tests::crash::scsi::{self, ScsiQueues};
use mqblk_tests::hostile::load::VhostUserLoad;
use mqblk_tests::hostile::{TIMEOUT, wait_for};

fn words<const N: usize>(words: [&str; N]) -> Vec<String> {
    words.map(str::to_owned).into()
}

/// Checks a load's data in the image of its only disk.
fn check(folder: &Path, id: &str, history: &mut LoadHistory) {
    let found = history.check_disk(0, &disk_content(folder, id));
    found.unwrap_or_else(|why| panic!("the image of {id}: {why}"));
}

/// One unit of two controllers, both with running queues, and with the same base as another disk. No process may read
/// tables that the other still changes, and closing one of two disks keeps the lock of the other.
#[test]
fn one_image_of_two_controllers_goes_over_as_a_whole() {
    let arguments = words([
        "--workers",
        "2",
        "--admin",
        "FOLDER/admin",
        "--controller",
        "id=a,socket=FOLDER/a.sock,queues=2",
        "--controller",
        "id=b,socket=FOLDER/b.sock,queues=2",
        "--lun",
        "controller=a,id=unit,target=0,lun=0,storage=qcow2,base=FOLDER/base.img,overlay=FOLDER/unit.qcow2",
        "--lun",
        "controller=b,unit=unit,target=0,lun=0",
        "--disk",
        "id=other,socket=FOLDER/other.sock,queues=1,storage=qcow2,base=FOLDER/base.img,overlay=FOLDER/other.qcow2",
    ]);
    let mut daemon = RestartableDaemon::start(&arguments, &["base.img"]);
    let folder = daemon.folder().to_owned();
    let seed = kills::seed();
    let connect = |id: &str| ScsiQueues::connect(&scsi::connect_options(folder.join(format!("{id}.sock")), 2));
    let ((_first, port), (second, other)) = (connect("a"), connect("b"));
    let mut load = RunningLoad::start("a", port, LoadHistory::new(1), seed);
    let mut neighbour = VhostUserLoad::connect(folder.join("other.sock"), 1, 64, seed);
    for _ in 0..6 {
        daemon.take_over();
        load.wait_completions(50);
        neighbour.round();
    }
    // The second one has a served frontend too.
    drop((second, other));
    let (_again, other) = connect("b");
    load.wait_completions(50);
    daemon.take_over();
    load.wait_completions(50);
    let (mut history, port) = load.finish();
    drop((port, other, neighbour));
    daemon.stop();
    check(&folder, "unit", &mut history);
    let log = daemon.log();
    assert!(!log.contains("was not closed"), "{log}");
    assert_eq!(log.matches("handed over; this process ends").count(), 7, "{log}");
}

/// Requests in flight cannot be left to the successor like those of raw images, because they change tables. It gets the
/// image when they are done, and the other disk does not wait for that.
#[test]
fn an_image_with_requests_that_the_storage_does_not_answer_goes_over_when_they_are_done() {
    let slow = "id=slow,socket=FOLDER/slow.sock,queues=2,storage=fault,inner=qcow2,base=FOLDER/slow.img,overlay=FOLDER/slow.qcow2,\
                fault-latency-us=3000000,fault-jitter-us=1000000";
    let fast = "id=cache,socket=FOLDER/cache.sock,path=FOLDER/cache.img,queues=2,direct=off";
    let arguments =
        words(["--workers", "2", "--admin", "FOLDER/admin", "--drain-timeout-s", "1", "--disk", slow, "--disk", fast]);
    let mut daemon = RestartableDaemon::start(&arguments, &["slow.img", "cache.img"]);
    let folder = daemon.folder().to_owned();
    let connect = |id: &str| BlkQueues::connect(&blk::connect_options(folder.join(format!("{id}.sock")), 2));
    let (slow, fast) = (connect("slow"), connect("cache"));
    let seed = kills::seed();
    let mut loads = [("slow", slow.1, seed), ("cache", fast.1, seed + 1)]
        .map(|(id, port, seed)| RunningLoad::start(id, port, LoadHistory::new(1), seed));
    loads[0].wait_completions(1);
    daemon.take_over();
    loads.iter_mut().for_each(|load| load.wait_completions(20));
    let ended = loads.map(RunningLoad::finish);
    daemon.stop();
    for ((mut history, port), id) in ended.into_iter().zip(["slow", "cache"]) {
        drop(port);
        check(&folder, id, &mut history);
    }
    let log = daemon.log();
    assert!(log.contains("is a qcow2 image with requests that the storage has not answered"), "{log}");
    assert_eq!(
        (log.matches("frontend connected").count(), log.matches("frontend taken over").count()),
        (2, 2),
        "{log}"
    );
}

/// A successor that is killed while it serves the image leaves it as a crash does: the old daemon loads it again, and
/// repairs it.
#[test]
fn the_old_daemon_serves_on_what_a_killed_successor_has_changed() {
    // The image is handed over first, and the other disk drains for as long as its requests take.
    let image =
        "id=image,socket=FOLDER/image.sock,queues=2,storage=qcow2,base=FOLDER/image.img,overlay=FOLDER/image.qcow2";
    let slow = "id=slow,socket=FOLDER/slow.sock,path=FOLDER/slow.img,queues=1,storage=fault,inner=file,direct=off,\
                fault-latency-us=4000000,fault-jitter-us=1000000";
    let arguments = words(["--workers", "2", "--admin", "FOLDER/admin", "--disk", image, "--disk", slow]);
    let mut daemon = RestartableDaemon::start(&arguments, &["image.img", "slow.img"]);
    let folder = daemon.folder().to_owned();
    let connect =
        |id: &str, queues| BlkQueues::connect(&blk::connect_options(folder.join(format!("{id}.sock")), queues));
    let ((mut frontend, port), (_slow, slow)) = (connect("image", 2), connect("slow", 1));
    let seed = kills::seed();
    let mut loads = [("image", port, seed), ("slow", slow, seed + 1)]
        .map(|(id, port, seed)| RunningLoad::start(id, port, LoadHistory::new(1), seed));
    for kill in 1..=3 {
        loads[1].wait_completions(1);
        let mut successor = daemon.spawn_successor(None);
        let taken = || daemon.log().matches("frontend taken over").count();
        wait_for("the image to be served by the successor", || (taken() >= kill).then_some(()));
        loads[0].wait_completions(50);
        assert!(!daemon.log().contains("handed over; this process ends"), "the slow disk was too fast");
        successor.kill().expect("a signal");
        successor.wait().expect("its end");
        wait_for("the old daemon's line", || {
            (daemon.log().matches("devices are served here again").count() == kill).then_some(())
        });
        frontend.reconnect(TIMEOUT.time()).expect("a connection to the old daemon");
        loads[0].wait_completions(50);
        daemon.assert_alive();
    }
    let ended = loads.map(RunningLoad::finish);
    daemon.stop();
    for ((mut history, port), id) in ended.into_iter().zip(["image", "slow"]) {
        drop(port);
        check(&folder, id, &mut history);
    }
    assert!(daemon.log().contains("was not closed"), "the image was repaired:\n{}", daemon.log());
}
