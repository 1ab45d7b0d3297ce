//! A daemon of many disks: the cost of an idle disk, and the connections that reach its listening socket.

use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use mqblk_admin::Client;
use mqblk_core::ByteLen;
use mqblk_driver::virtio_blk::{BlkConnectOptions, BlkDevice};
use mqblk_tests::hostile::daemon::{HostileDaemon, HostileDaemonResources};
use mqblk_tests::hostile::load::start_neighbour;
use mqblk_tests::hostile::socket::{VhostUserSocket, message as m};
use mqblk_tests::hostile::{TIMEOUT, wait_for};
use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};

const DISKS: usize = 300;
const FILES: usize = 30;
/// The daemon's pause after a failed accept.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);
/// Connections of a disk at once, then per second.
const CONNECTION_BURST: usize = 1000;
const CONNECTIONS_PER_SECOND: usize = 50;

fn start(count: usize, settings: &str, arguments: &[&str]) -> HostileDaemon {
    let ids: Vec<String> = (0..count).map(|number| format!("d{number}")).collect();
    let disks: Vec<(&str, &str)> = ids.iter().map(|id| (id.as_str(), settings)).collect();
    HostileDaemon::start_with(1, &disks, arguments)
}

fn connect(daemon: &HostileDaemon, disk: usize) -> BlkDevice {
    let options = BlkConnectOptions {
        queues: 1,
        queue_size: 16,
        data_per_queue: ByteLen(4096),
        connect_timeout: TIMEOUT.time(),
        reply_timeout: TIMEOUT.time(),
        ..BlkConnectOptions::new(daemon.socket(&format!("d{disk}")))
    };
    BlkDevice::connect(&options).expect("a connection")
}

/// Returns the resources and threads of a daemon without frontends. Leaves out the threads of io_uring, which the
/// kernel starts and ends at any time.
fn idle_usage(daemon: &HostileDaemon) -> (HostileDaemonResources, usize) {
    wait_for("the end of the control threads", || (daemon.thread_count("vhost-") == 0).then_some(()));
    let now = || (daemon.resources(), daemon.thread_count("").saturating_sub(daemon.thread_count("iou-")));
    let mut last = now();
    // Other threads of the connections end a moment later.
    wait_for("the daemon's rest", || {
        std::thread::sleep(Duration::from_millis(100));
        let before = std::mem::replace(&mut last, now());
        (before == last).then_some(last)
    })
}

/// Removes the last disks of a daemon. Each releases this many descriptors, and no thread: an idle disk has no more. A
/// daemon is compared only with itself, because another one may have inherited descriptors of other clients in this
/// process.
fn remove(daemon: &HostileDaemon, disks: std::ops::Range<usize>, fds_each: usize) {
    let (before, threads) = idle_usage(daemon);
    let mut admin = Client::connect(&daemon.folder().join("admin.sock")).expect("the admin socket");
    for disk in disks.clone() {
        admin.call("disk.remove", &serde_json::json!({ "id": format!("d{disk}") })).expect("a removal");
        assert!(!daemon.socket(&format!("d{disk}")).exists());
    }
    drop(admin);
    let fds = before.fds - disks.len() * fds_each;
    daemon.wait_for_resources(HostileDaemonResources { fds, ..before }, "the removals");
    assert_eq!(idle_usage(daemon).1, threads, "threads of {} disks less", disks.len());
}

#[test]
fn an_idle_disk_costs_a_descriptor_and_no_thread() {
    let daemon = start(DISKS, "storage=null,size=1G,queues=1", &[]);
    let usage = idle_usage(&daemon);
    let devices: Vec<BlkDevice> = (0..DISKS).map(|disk| connect(&daemon, disk)).collect();
    // A new thread initially has the name of the control thread that started it.
    wait_for("a control thread for each frontend", || (daemon.thread_count("vhost-") == DISKS).then_some(()));
    drop(devices);
    wait_for("what it had before the frontends", || (idle_usage(&daemon) == usage).then_some(()));
    remove(&daemon, 1..DISKS, 1);
    drop(connect(&daemon, 0));
    daemon.stop();
    // A file needs one descriptor more.
    let daemon = start(FILES, "path=IMAGE,queues=1", &[]);
    remove(&daemon, 1..FILES, 2);
    daemon.stop();
}

/// Returns the folder in /proc of a thread of the daemon.
fn task_of(daemon: &HostileDaemon, name: &str) -> PathBuf {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", daemon.pid())).expect("the daemon's threads");
    let named = |path: &PathBuf| std::fs::read_to_string(path.join("comm")).is_ok_and(|found| found.trim() == name);
    tasks.flatten().map(|task| task.path()).find(named).unwrap_or_else(|| panic!("no thread {name:?}"))
}

/// Returns the number of times that a thread went to sleep.
fn sleeps(task: &std::path::Path) -> usize {
    let status = std::fs::read_to_string(task.join("status")).expect("the thread's status");
    let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:")).expect("its switches");
    line.trim().parse().expect("a number")
}

#[test]
fn without_descriptors_frontends_wait_and_nothing_spins() {
    const FRONTENDS: usize = 5;
    let mut daemon = start(FRONTENDS + 1, "storage=ram,size=1M,queues=1", &[]);
    let neighbour = start_neighbour(daemon.socket(&format!("d{FRONTENDS}")), 1, 1);
    let base = daemon.stable_resources();
    let pid = Pid::from_raw(daemon.pid() as i32).expect("a process");
    let highest = getrlimit(Resource::Nofile).maximum;
    let used = std::fs::read_dir(format!("/proc/{}/fd", daemon.pid())).expect("its descriptors").flatten();
    let used: Vec<u64> = used.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    let first_free = (0..).find(|number| !used.contains(number)).expect("there is always one");
    prlimit(Some(pid), Resource::Nofile, Rlimit { current: Some(first_free), maximum: highest })
        .expect("a lower limit");

    let listener = task_of(&daemon, "listener");
    let (before, begin) = (sleeps(&listener), Instant::now());
    let sockets = (0..FRONTENDS).map(|disk| VhostUserSocket::connect(&daemon.socket(&format!("d{disk}"))));
    let mut sockets: Vec<VhostUserSocket> = sockets.collect();
    wait_for("each disk's warning", || {
        let warned = (0..FRONTENDS).all(|disk| !daemon.warnings(&format!("d{disk}")).is_empty());
        warned.then_some(())
    });
    neighbour.assert_progress("a lack of descriptors");
    std::thread::sleep(10 * ACCEPT_RETRY);
    let (slept, tries) = (sleeps(&listener) - before, begin.elapsed().as_millis() / ACCEPT_RETRY.as_millis());
    let most = (FRONTENDS + 1) * (tries as usize + 2);
    assert!(slept <= most, "the thread that waits for frontends has woken {slept} times, expected at most {most}");
    for disk in 0..FRONTENDS {
        let warnings = daemon.warnings(&format!("d{disk}"));
        assert!(matches!(&warnings[..], [one] if one.contains("cannot be accepted for now")), "{warnings:?}");
    }
    prlimit(Some(pid), Resource::Nofile, Rlimit { current: highest, maximum: highest }).expect("the limit as it was");
    for socket in &mut sockets {
        assert_ne!(socket.request_u64(m::GET_FEATURES), 0);
    }
    drop(sockets);
    daemon.assert_alive("a lack of descriptors");
    daemon.wait_for_resources(base, "a lack of descriptors");
    neighbour.finish();
    daemon.stop();
}

#[test]
fn a_process_that_connects_and_disconnects_in_a_loop_is_slowed_down_alone() {
    const MORE: usize = 60;
    let daemon = start(3, "storage=ram,size=1M,queues=1", &[]);
    let neighbour = start_neighbour(daemon.socket("d2"), 1, 1);
    let base = daemon.stable_resources();
    let (socket, begin) = (daemon.socket("d0"), Instant::now());
    for _ in 0..CONNECTION_BURST + MORE {
        // Waits while the backlog is full.
        drop(UnixStream::connect(&socket).expect("it listens"));
    }
    let count = daemon.log().lines().filter(|line| line.contains("frontend connected disk=\"d0\"")).count();
    // The first one is from the start of the test.
    let most = 1 + CONNECTION_BURST + CONNECTIONS_PER_SECOND * (begin.elapsed().as_secs() as usize + 2);
    assert!(count <= most, "{count} connections were served, expected at most {most}");
    assert!(daemon.stat("d0").budget.expect("a budget").delayed_connections > 0);
    neighbour.assert_progress("the loop");
    // Frontends of another disk do not wait.
    daemon.wait_for_session_end("d1");
    assert_eq!(daemon.stat("d1").budget.expect("a budget").delayed_connections, 0);
    // Queued behind the others in the backlog.
    daemon.wait_for_session_end("d0");
    daemon.wait_for_resources(base, "the loop");
    wait_for("the end of the control thread", || (daemon.thread_count("vhost-d0") == 0).then_some(()));
    neighbour.finish();
    daemon.stop();
}
