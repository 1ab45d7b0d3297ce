//! The lock of an image through takeovers: the daemon that runs queues on it has it.

use std::process::Command;

use mqblk_tests::crash::daemon::RestartableDaemon;
use mqblk_tests::crash::scsi::{self, ScsiQueues};
use mqblk_tests::hostile::daemon::mqblk_binary;
use mqblk_tests::hostile::wait_for;

/// Returns true if another daemon may have the image.
fn is_free(daemon: &RestartableDaemon) -> bool {
    let folder = daemon.folder().display();
    let disk = format!("id=other,socket={folder}/other.sock,path={folder}/unit.img");
    let output = Command::new(mqblk_binary()).args(["serve", "--print-config", "--disk", &disk]).output();
    let output = output.expect("mqblk");
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() || text.contains("in use by another process"), "{text}");
    output.status.success()
}

/// One unit of two controllers, handed over one after the other. The first process still uses the lock when the second
/// one has its first controller, and gives up its last one before the second has both.
#[test]
fn a_lock_of_two_devices_goes_to_the_successor() {
    let arguments = [
        "--admin",
        "FOLDER/admin",
        "--controller",
        "id=a,socket=FOLDER/a.sock,queues=1",
        "--controller",
        "id=b,socket=FOLDER/b.sock,queues=1",
        "--lun",
        "controller=a,id=unit,target=0,lun=0,path=FOLDER/unit.img,lock=shared-migration",
        "--lun",
        "controller=b,unit=unit,target=0,lun=0",
    ]
    .map(str::to_owned);
    let mut daemon = RestartableDaemon::start(&arguments, &["unit.img"]);
    let connect = |daemon: &RestartableDaemon, id: &str| {
        ScsiQueues::connect(&scsi::connect_options(daemon.folder().join(format!("{id}.sock")), 1))
    };
    let (first, second) = (connect(&daemon, "a"), connect(&daemon, "b"));
    assert!(!is_free(&daemon));
    for _ in 0..2 {
        daemon.take_over();
        assert!(!is_free(&daemon), "after a takeover:\n{}", daemon.log());
    }
    // A successor that gives up has held the lock too.
    let nothing =
        ["--admin", "FOLDER/admin"].map(|word| word.replace("FOLDER", &daemon.folder().display().to_string()));
    let mut successor = daemon.spawn_successor(Some(&nothing));
    let status = wait_for("the successor to give up", || successor.try_wait().expect("wait"));
    assert!(!status.success());
    daemon.assert_alive();
    assert!(!is_free(&daemon), "after a takeover that was given up:\n{}", daemon.log());
    // The leftovers of the takeovers do not hold it.
    drop(first);
    assert!(!is_free(&daemon), "the other one uses it");
    drop(second);
    wait_for("the lock to be given back", || is_free(&daemon).then_some(()));
    daemon.stop();
}
