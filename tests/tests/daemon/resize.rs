//! A virtio-blk disk that is resized while the project's driver has verified requests in flight: by command, by the
//! host, shrinking, and with a frontend that cannot be notified or does not reply.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use mqblk_admin::Client;
use mqblk_driver::virtio_blk::BlkStatus;
use mqblk_tests::hostile::daemon::mqblk_binary;
use mqblk_tests::hostile::load::{BLOCK, VhostUserLoad};
use mqblk_tests::hostile::{TIMEOUT, wait_for};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tempfile::TempDir;

/// Initial blocks of an image.
const BLOCKS: usize = 256;
const BYTES: u64 = (BLOCKS * BLOCK) as u64;

/// A daemon with an admin socket and a log. Killed when a test fails.
struct Daemon {
    child: Child,
    folder: TempDir,
}

impl Daemon {
    /// Starts a daemon. Disks by id and other settings; `FOLDER` is a folder of its own.
    fn start(disks: &[(&str, &str)]) -> Daemon {
        let folder = tempfile::tempdir().expect("a folder");
        let at = folder.path().display().to_string();
        let mut process = Command::new(mqblk_binary());
        process.args(["serve", "--workers", "2", "--admin", &format!("{at}/admin")]);
        for (id, settings) in disks {
            File::create(folder.path().join(format!("{id}.img")))
                .and_then(|file| file.set_len(BYTES))
                .expect("an image");
            let settings = settings.replace("FOLDER", &at);
            process.args(["--disk", &format!("id={id},socket={at}/{id}.sock,queues=2,{settings}")]);
        }
        let log = File::create(folder.path().join("log")).expect("a log");
        process.env_remove("RUST_LOG").stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let mut daemon = Daemon { child: process.spawn().expect("the daemon"), folder };
        wait_for("the admin socket", || {
            assert!(daemon.child.try_wait().expect("wait").is_none(), "the daemon ended: {}", daemon.log());
            Client::connect(&daemon.path("admin")).ok()
        });
        daemon
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn image(&self, id: &str) -> File {
        File::options().write(true).open(self.path(&format!("{id}.img"))).expect("the image")
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.path("log")).expect("the log")
    }

    fn stop(mut self) {
        kill_process(Pid::from_child(&self.child), Signal::TERM).expect("a signal");
        assert!(self.child.wait().expect("wait").success(), "{}", self.log());
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Calls `resize`. Returns the result, or the error's text.
fn resize(admin: &Path, params: &Value) -> Result<Value, String> {
    let mut client = Client::connect_with(admin, TIMEOUT.time()).expect("the admin socket");
    client.call("resize", params).map_err(|error| error.to_string())
}

/// Runs the load while `resize` runs, and takes notifications if it listens. Returns the result and the number of
/// notifications.
fn resize_under(load: &mut VhostUserLoad, admin: PathBuf, params: Value) -> (Value, u32) {
    let asking = std::thread::spawn(move || resize(&admin, &params));
    let mut notified = 0;
    while !asking.is_finished() {
        load.round();
        notified += u32::from(load.device().wait_config_change(Duration::ZERO).expect("the server's messages"));
    }
    load.round();
    notified += u32::from(load.device().wait_config_change(Duration::ZERO).expect("the server's messages"));
    (asking.join().expect("no panic").expect("it can be resized"), notified)
}

fn blocks(load: &mut VhostUserLoad) -> u64 {
    load.device().info().capacity.0 * 512 / BLOCK as u64
}

#[test]
fn a_disk_grows_and_shrinks_under_load() {
    for storage in ["path=FOLDER/a.img", "storage=ram,size=1M,max-size=16M", "storage=null,size=1M"] {
        let daemon = Daemon::start(&[("a", storage)]);
        let verifies = !storage.contains("null");
        let used = if verifies { BLOCKS } else { 1 };
        let mut load = VhostUserLoad::connect_with_config_changes(daemon.path("a.sock"), 2, used, 1);
        assert_eq!(blocks(&mut load), BLOCKS as u64);
        assert_eq!(load.try_read(BLOCKS as u64), BlkStatus::IoError, "beyond the end");
        if !verifies {
            // It stores nothing, so only the sizes can be checked.
            let asking = {
                let admin = daemon.path("admin");
                std::thread::spawn(move || resize(&admin, &json!({ "id": "a", "size": "2M" })))
            };
            assert!(load.device().wait_config_change(TIMEOUT.time()).expect("a message"));
            assert_eq!(asking.join().expect("no panic").expect("it grows")["guest"], "told");
            assert_eq!((blocks(&mut load), load.try_read(2 * BLOCKS as u64 - 1)), (2 * BLOCKS as u64, BlkStatus::Ok));
            daemon.stop();
            continue;
        }
        for round in 2..=6_u64 {
            let (result, notified) =
                resize_under(&mut load, daemon.path("admin"), json!({ "id": "a", "size": round * BYTES }));
            let want =
                json!({ "id": "a", "before_bytes": (round - 1) * BYTES, "size_bytes": round * BYTES, "guest": "told" });
            assert_eq!((result, notified), (want, 1));
            assert_eq!(blocks(&mut load), round * BLOCKS as u64);
            // The added space can be written and read.
            load.use_blocks(round as usize * BLOCKS);
            (0..20).for_each(|_| load.round());
            assert_eq!(load.try_read(round * BLOCKS as u64), BlkStatus::IoError, "beyond the new end");
        }
        // The same size again is no change.
        let (result, notified) = resize_under(&mut load, daemon.path("admin"), json!({ "id": "a", "size": 6 * BYTES }));
        assert_eq!((&result["guest"], notified), (&json!("unchanged"), 0));

        let refused =
            resize(&daemon.path("admin"), &json!({ "id": "a", "size": BYTES })).expect_err("it shrinks unasked");
        let want = "size: found 1M, and the disk has 6M, expected at least 6M; a smaller disk needs --shrink";
        assert!(refused.contains(want), "{refused}");
        assert_eq!(load.try_read(6 * BLOCKS as u64 - 1), BlkStatus::Ok, "nothing has changed");
        load.use_blocks(BLOCKS);
        let shrink = json!({ "id": "a", "size": BYTES, "shrink": true });
        let (result, notified) = resize_under(&mut load, daemon.path("admin"), shrink);
        assert_eq!((&result["size_bytes"], &result["guest"], notified), (&json!(BYTES), &json!("told"), 1));
        assert_eq!((blocks(&mut load), load.try_read(BLOCKS as u64)), (BLOCKS as u64, BlkStatus::IoError));
        if storage.starts_with("path") {
            assert_eq!(std::fs::metadata(daemon.path("a.img")).expect("the image").len(), BYTES);
        }
        (0..20).for_each(|_| load.round());
        // The truncated data is gone. A disk that has grown again reads as zeroes there, which the load does not
        // expect.
        drop(load);
        daemon.stop();
    }
}

#[test]
fn invalid_resizes_are_refused_with_the_reason() {
    let daemon = Daemon::start(&[("a", "path=FOLDER/a.img"), ("b", "path=FOLDER/b.img,readonly=on")]);
    let admin = daemon.path("admin");
    for (params, want) in [
        (json!({}), "params.id: found nothing, expected the id of a disk, a LUN or a Xen device"),
        (json!({ "id": "x" }), "params.id: found \"x\", expected one of a, b"),
        (json!({ "id": "a", "size": "big" }), "params.size: found \"big\", expected a size in bytes"),
        (
            json!({ "id": "a", "size": 2_000_001 }),
            "params.size: found 2000001 bytes, expected a multiple of block-size 512",
        ),
        (
            json!({ "id": "a", "size": 0, "shrink": true }),
            "params.size: found 0 bytes, expected a multiple of block-size 512",
        ),
        (json!({ "id": "a", "shrink": 1 }), "params.shrink: found the number 1, expected a boolean"),
        (
            json!({ "id": "b", "size": "2M" }),
            "params.size: found 2097152 bytes, expected no change of a disk with readonly=on",
        ),
    ] {
        let error = resize(&admin, &params).expect_err("it is refused");
        assert!(error.contains(want), "{params}: {error}");
    }
    // No frontend is connected, and the storage is unchanged.
    let result = resize(&admin, &json!({ "id": "b" })).expect("a look");
    assert_eq!((&result["size_bytes"], &result["guest"]), (&json!(BYTES), &json!("unchanged")));
    daemon.image("b").set_len(2 * BYTES).expect("the host may");
    let sizes = || resize(&admin, &json!({ "id": "b" })).expect("a look")["size_bytes"].clone();
    wait_for("a larger read-only disk", || (sizes() == json!(2 * BYTES)).then_some(()));
    daemon.stop();
}

#[test]
fn a_frontend_that_cannot_be_notified_or_does_not_reply() {
    let daemon = Daemon::start(&[("a", "path=FOLDER/a.img")]);
    let grow = |size: u64| json!({ "id": "a", "size": size * BYTES });
    assert_eq!(resize(&daemon.path("admin"), &grow(2)).expect("it grows")["guest"], "no-guest");
    let mut deaf = VhostUserLoad::connect(daemon.path("a.sock"), 2, 2 * BLOCKS, 1);
    let (result, notified) = resize_under(&mut deaf, daemon.path("admin"), grow(3));
    assert_eq!((&result["guest"], notified), (&json!("at-reconnect"), 0));
    assert_eq!(deaf.try_read(3 * BLOCKS as u64 - 1), BlkStatus::Ok, "who knows may use it");
    drop(deaf);

    // A frontend that passes a socket and never reads it: others wait for a bounded time, and its disk is still served.
    let mut silent = VhostUserLoad::connect_with_config_changes(daemon.path("a.sock"), 2, 3 * BLOCKS, 2);
    assert_eq!(blocks(&mut silent), 3 * BLOCKS as u64, "it connected after the change");
    let (admin, params) = (daemon.path("admin"), grow(4));
    let asking = std::thread::spawn(move || resize(&admin, &params));
    while !asking.is_finished() {
        silent.round();
    }
    assert_eq!(asking.join().expect("no panic").expect("it grows")["guest"], "unanswered");
    assert_eq!(silent.try_read(4 * BLOCKS as u64 - 1), BlkStatus::Ok);
    // Its control thread still replies.
    assert_eq!(silent.device().refresh().expect("GET_CONFIG").capacity.0, 4 * BYTES / 512);
    drop(silent);
    daemon.stop();
}

#[test]
fn the_daemon_detects_that_a_file_has_grown() {
    let daemon = Daemon::start(&[("on", "path=FOLDER/on.img"), ("off", "path=FOLDER/off.img,watch-size=off")]);
    let mut watched = VhostUserLoad::connect_with_config_changes(daemon.path("on.sock"), 2, BLOCKS, 1);
    let mut left = VhostUserLoad::connect_with_config_changes(daemon.path("off.sock"), 2, BLOCKS, 2);
    for times in 2..=3_u64 {
        daemon.image("off").set_len(times * BYTES).expect("the host may");
        daemon.image("on").set_len(times * BYTES).expect("the host may");
        wait_for("the news", || {
            watched.round();
            left.round();
            watched.device().wait_config_change(Duration::ZERO).expect("the server's messages").then_some(())
        });
        assert_eq!(blocks(&mut watched), times * BLOCKS as u64);
        watched.use_blocks(times as usize * BLOCKS);
        (0..20).for_each(|_| watched.round());
    }
    assert!(!left.device().wait_config_change(Duration::ZERO).expect("no message"), "it is not watched");
    assert_eq!(left.device().refresh().expect("GET_CONFIG").capacity.0, BYTES / 512);

    // A file truncated by others is logged, and the guest's disk keeps its size.
    watched.use_blocks(BLOCKS);
    daemon.image("on").set_len(2 * BYTES).expect("the host may");
    let warned = "the storage has become smaller than the guest's disk: requests past its end fail";
    wait_for("the warning", || {
        watched.round();
        daemon.log().contains(warned).then_some(())
    });
    assert_eq!(watched.device().refresh().expect("GET_CONFIG").capacity.0, 3 * BYTES / 512);
    assert!(!watched.device().wait_config_change(Duration::ZERO).expect("no message"));
    assert_eq!(watched.try_read(3 * BLOCKS as u64 - 1), BlkStatus::IoError);
    let (result, notified) = resize_under(&mut watched, daemon.path("admin"), json!({ "id": "on", "shrink": true }));
    assert_eq!((&result["size_bytes"], notified), (&json!(2 * BYTES), 1));
    daemon.stop();
}

/// Needs root and the loop driver; without them nothing is tested.
#[test]
fn the_daemon_detects_that_a_block_device_has_grown() {
    struct Loop(String);
    impl Drop for Loop {
        fn drop(&mut self) {
            let _ = Command::new("losetup").args(["-d", &self.0]).status();
        }
    }
    let folder = tempfile::tempdir().expect("a folder");
    let image = folder.path().join("image");
    File::create(&image).and_then(|file| file.set_len(BYTES)).expect("an image");
    let made = Command::new("losetup").args(["--find", "--show"]).arg(&image).stderr(Stdio::null()).output();
    let Some(made) = made.ok().filter(|made| made.status.success()) else { return };
    let device = Loop(String::from_utf8(made.stdout).expect("a path").trim().to_owned());
    let daemon = Daemon::start(&[("a", &format!("path={}", device.0))]);
    let mut load = VhostUserLoad::connect_with_config_changes(daemon.path("a.sock"), 2, BLOCKS, 1);
    File::options().write(true).open(&image).and_then(|file| file.set_len(2 * BYTES)).expect("the host may");
    assert!(Command::new("losetup").args(["-c", &device.0]).status().expect("losetup").success());
    wait_for("the news", || {
        load.round();
        load.device().wait_config_change(Duration::ZERO).expect("the server's messages").then_some(())
    });
    assert_eq!(blocks(&mut load), 2 * BLOCKS as u64);
    load.use_blocks(2 * BLOCKS);
    (0..20).for_each(|_| load.round());
    let error = resize(&daemon.path("admin"), &json!({ "id": "a", "size": 3 * BYTES })).expect_err("the host's affair");
    assert!(error.contains("expected no size: the host gives a block device its size"), "{error}");
    drop(load);
    daemon.stop();
}
