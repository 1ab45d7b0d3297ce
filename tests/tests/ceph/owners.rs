//! Two daemons and one image: one of them writes.

use std::process::Command;
use std::time::Duration;

use mqblk_tests::ceph::{CephCluster, POOL};
use mqblk_tests::crash::blk::{self, BlkQueues};
use mqblk_tests::hostile::daemon::{HostileDaemon, mqblk_binary};
use mqblk_tests::hostile::load::{VhostUserLoad, start_neighbour};
use mqblk_tests::hostile::timed_load::RunningTimedLoad;
use mqblk_tests::hostile::wait_for;
use rustix::process::{Pid, Signal, kill_process};

const BLOCKS: usize = 64;

/// Starts a daemon that must not start. Returns its error.
fn refused(settings: &str) -> String {
    let folder = tempfile::tempdir().unwrap();
    let disk = format!("id=b,socket={}/b.sock,{settings}", folder.path().display());
    let output = Command::new(mqblk_binary()).args(["serve", "--sandbox", "on", "--disk", &disk]).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "the host refuses: {output:?}");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// While one daemon owns the image, another is refused, even if the first is idle; a snapshot or read-only access is
/// allowed. After a stop the next daemon starts at once.
#[test]
fn a_second_daemon_is_refused_until_the_first_has_stopped() {
    let cluster = CephCluster::start();
    let settings = format!("{},queues=1", cluster.image("a", 16));
    let daemon = HostileDaemon::start(1, &[("a", &settings)]);
    let load = start_neighbour(daemon.socket("a"), 1, 1);
    let said = refused(&settings);
    let names = ["rbd:rbd/a: ", "has the exclusive lock and keeps it", "stop that user", "readonly=on"];
    assert!(names.iter().all(|part| said.contains(part)), "{said}");
    load.assert_progress("a second daemon was refused");
    let reader = HostileDaemon::start(1, &[("r", &format!("{settings},readonly=on"))]);
    reader.stop();
    let (_, generations) = load.finish();
    daemon.stop();
    assert_eq!(cluster.rbd(&["lock", "ls", "rbd/a"]), "", "the lock was released");
    cluster.check_blocks("a", &generations);
    HostileDaemon::start(1, &[("a", &settings)]).stop();

    // A process that opens the image without serving it leaves no lock behind: the next one would wait for 30 s.
    let disk = format!("id=b,socket=/nowhere/b.sock,{settings}");
    for words in [&["--print-config", "--disk", &disk][..], &["--disk", &disk], &["--disk", &disk, "--disk", "id=c"]] {
        Command::new(mqblk_binary()).arg("serve").args(words).output().unwrap();
        assert_eq!(cluster.rbd(&["lock", "ls", "rbd/a"]), "", "{words:?}");
    }
}

/// A daemon that hangs (stopped by a signal, with writes in flight) loses the image to the next one once the cluster
/// has lost it. It is fenced: none of its later writes reaches the image.
#[test]
fn a_daemon_that_was_replaced_is_fenced() {
    let cluster = CephCluster::start();
    let settings = format!("{},queues=1", cluster.image("a", 16));
    replace_while_stopped(&cluster, "a", &settings, || ());
}

/// As above, with a configuration that turns blocklisting off, lets the cluster forget a blocklisted client after a
/// second, and passes the lock to everybody who asks for it: the daemon's own options count. An image that enforces
/// other ones is refused.
#[test]
fn a_configuration_cannot_unfence_a_daemon_that_was_replaced() {
    let cluster = CephCluster::start();
    cluster.ceph(&["config", "set", "osd", "osd_client_watch_timeout", "5"]);
    cluster.image("a", 16);
    let conf = cluster.minimal_conf(
        "unfenced",
        &format!(
            "keyring = {}\nrbd_blocklist_on_break_lock = false\nrbd_blocklist_expire_seconds = 1\n\
             rbd_auto_exclusive_lock_until_manual_request = false\nrbd_disable_zero_copy_writes = false\n",
            cluster.keyring().display()
        ),
    );
    let settings = format!("storage=rbd,pool={POOL},image=a,conf={},queues=1", conf.display());
    replace_while_stopped(&cluster, "a", &settings, || {
        // The blocklist of the configuration would have forgotten the first.
        std::thread::sleep(Duration::from_secs(3));
        let listed = cluster.ceph(&["osd", "blocklist", "ls"]);
        assert!(listed.contains("127.0.0.1:0/"), "nobody is blocklisted: {listed}");
    });

    for (option, value) in [
        ("rbd_blocklist_on_break_lock", "false"),
        ("rbd_blocklist_expire_seconds", "60"),
        ("rbd_disable_zero_copy_writes", "false"),
        ("rbd_non_blocking_aio", "false"),
    ] {
        cluster.rbd(&["config", "image", "set", "rbd/a", option, value]);
        let said = refused(&settings);
        let parts =
            [&*format!("image: found rbd:rbd/a ({option}={value}: "), "`rbd config image rm` or `rbd config pool rm`"];
        assert!(parts.iter().all(|part| said.contains(part)), "{said}");
        cluster.rbd(&["config", "image", "rm", "rbd/a", option]);
    }
    HostileDaemon::start(1, &[("a", &settings)]).stop();
}

/// Stops a daemon by a signal under load, starts a second one on the image, calls `meanwhile`, and continues the first.
fn replace_while_stopped(cluster: &CephCluster, image: &str, settings: &str, meanwhile: impl FnOnce()) {
    let first = HostileDaemon::start(1, &[("a", settings)]);
    let options = blk::connect_options(first.socket("a"), 1);
    let load = RunningTimedLoad::start("fenced", 1, 1, move || BlkQueues::connect(&options));
    let mut completed = 0;
    wait_for("the first to be busy", || {
        load.assert_runs();
        completed += load.end_phase().record.completed();
        (completed > 100).then_some(())
    });
    assert!(refused(settings).contains("has the exclusive lock and keeps it"), "the first keeps its lock");
    let pid = Pid::from_raw(first.pid().cast_signed()).unwrap();
    kill_process(pid, Signal::STOP).unwrap();

    let second = start_patiently(settings);
    // All blocks that the first has written, so that a late write of one is detected.
    let mut writer = VhostUserLoad::connect(second.socket("a"), 1, 1024, 2);
    while writer.generations().contains(&0) {
        writer.round();
    }
    meanwhile();
    kill_process(pid, Signal::CONT).unwrap();
    wait_for("the first to notice", || {
        writer.round();
        first.log().contains("rbd:rbd/a: the cluster has blocklisted this client").then_some(())
    });
    assert_eq!(first.log().matches("has blocklisted this client").count(), 1, "{}", first.log());
    wait_for("the observer's notification", || {
        first.warnings("a").iter().any(|line| line.contains("blocklisted by the cluster")).then_some(())
    });
    // Its guest sees errors, so its client panics.
    let failed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| load.finish()));
    assert!(failed.is_err(), "a fenced daemon completes requests as done");
    (0..20).for_each(|_| writer.round());
    let generations = writer.generations().to_vec();
    drop(writer);
    second.stop();
    cluster.check_blocks(image, &generations);
    drop(first);
}

/// Starts a daemon whose predecessor the cluster has not lost yet. The 30 s exceed a test's usual wait for a daemon.
fn start_patiently(settings: &str) -> HostileDaemon {
    for _ in 0..6 {
        let settings = settings.to_owned();
        let started = std::thread::spawn(move || HostileDaemon::start(1, &[("a", &settings)])).join();
        if let Ok(daemon) = started {
            return daemon;
        }
    }
    panic!("the second daemon does not get the image");
}

/// With `lock=shared-migration` both ends of a migration have the image open, and the one with running queues has the
/// lock.
#[test]
fn the_lock_goes_from_the_source_of_a_migration_to_its_destination() {
    let cluster = CephCluster::start();
    let settings = format!("{},queues=1,lock=shared-migration", cluster.image("a", 16));
    let source = HostileDaemon::start(1, &[("a", &settings)]);
    let mut load = VhostUserLoad::connect(source.socket("a"), 1, BLOCKS, 1);
    (0..50).for_each(|_| load.round());
    let destination = HostileDaemon::start(1, &[("a", &settings)]);
    let generations = load.generations().to_vec();
    assert_ne!(cluster.rbd(&["lock", "ls", "rbd/a"]), "", "the source has it");
    drop(load);
    wait_for("the source to release it", || cluster.rbd(&["lock", "ls", "rbd/a"]).is_empty().then_some(()));
    let mut load = VhostUserLoad::connect(destination.socket("a"), 1, BLOCKS, 2);
    load.read_all(&generations);
    (0..50).for_each(|_| load.round());
    let generations = load.generations().to_vec();
    drop(load);
    source.stop();
    destination.stop();
    cluster.check_blocks("a", &generations);
}
