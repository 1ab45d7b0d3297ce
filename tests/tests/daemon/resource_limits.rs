//! A daemon at the host's resource limits, and the cost of many idle disks.

#![allow(clippy::print_stdout, reason = "figures for people")]

use std::fs::File;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use mqblk_admin::Client;
use mqblk_core::ByteLen;
use mqblk_driver::virtio_blk::{BlkConnectOptions, BlkDevice};
use mqblk_tests::hostile::daemon::{HostileDaemon, mqblk_binary};
use mqblk_tests::hostile::load::{VhostUserLoad, start_neighbour};
use mqblk_tests::hostile::socket::{VhostUserSocket, message as m};
use mqblk_tests::hostile::usage::ProcessUsage;
use mqblk_tests::hostile::{TIMEOUT, wait_for};
use mqblk_tests::unprivileged::{NoThreads, run_unprivileged};
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, prlimit};

fn options(socket: &Path, queues: u16, size: u16) -> BlkConnectOptions {
    BlkConnectOptions {
        queues,
        queue_size: size,
        data_per_queue: ByteLen(4096),
        connect_timeout: TIMEOUT.time(),
        reply_timeout: Duration::from_secs(60),
        ..BlkConnectOptions::new(socket)
    }
}

fn pid(daemon: &HostileDaemon) -> Pid {
    Pid::from_raw(daemon.pid() as i32).expect("a process")
}

/// Returns the private resident memory of the process in KiB, without memory shared with frontends.
fn own_memory(daemon: &HostileDaemon) -> u64 {
    ProcessUsage::of(daemon.pid()).memory_kib
}

/// Returns the limit with which the daemon can open this many more files. It bounds their numbers, and some lower
/// numbers are free.
fn limit_for(daemon: &HostileDaemon, room: usize) -> u64 {
    let folder = std::fs::read_dir(format!("/proc/{}/fd", daemon.pid())).expect("its descriptors");
    let number = |entry: std::io::Result<std::fs::DirEntry>| entry.ok()?.file_name().to_str()?.parse::<u64>().ok();
    let used: std::collections::HashSet<u64> = folder.filter_map(number).collect();
    (0..).filter(|number| !used.contains(number)).nth(room).expect("there are always more")
}

#[test]
fn out_of_descriptors() {
    let disks = [("good", "storage=ram,size=1M,queues=1"), ("bad", "storage=ram,size=1M,queues=16")];
    let mut daemon = HostileDaemon::start(2, &disks);
    let neighbour = start_neighbour(daemon.socket("good"), 1, 1);
    let base = daemon.stable_resources();
    // The daemon has raised its own limit to the hard limit.
    let highest = getrlimit(Resource::Nofile).maximum;
    let before = Rlimit { current: highest, maximum: highest };
    // From no room, where not even an accept succeeds, to room for half of the queues.
    for room in [0, 1, 2, 3, 5, 8, 13, 21, 34] {
        let limit = Rlimit { current: Some(limit_for(&daemon, room)), maximum: before.maximum };
        prlimit(Some(pid(&daemon)), Resource::Nofile, limit).expect("a lower limit");
        let tried = BlkDevice::connect(&BlkConnectOptions {
            reply_timeout: Duration::from_millis(300),
            ..options(&daemon.socket("bad"), 16, 64)
        });
        assert!(tried.is_err(), "{room} descriptors are enough for 16 queues");
        neighbour.assert_progress("a lack of descriptors");
        prlimit(Some(pid(&daemon)), Resource::Nofile, before).expect("the limit as it was");
        daemon.wait_for_session_end("bad");
        daemon.assert_alive("a lack of descriptors");
        daemon.wait_for_resources(base, "a lack of descriptors");
    }
    let warnings = daemon.warnings("bad");
    assert!(!warnings.is_empty() && warnings.len() < 40, "{warnings:#?}");
    let mut load = VhostUserLoad::connect(daemon.socket("bad"), 16, 200, 3);
    load.round();
    assert!(
        load.verified > 0 || {
            load.round();
            load.verified > 0
        }
    );
    drop(load);
    neighbour.finish();
    daemon.stop();
}

#[test]
fn out_of_threads() {
    if !run_unprivileged("resource_limits::out_of_threads") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let admin = folder.path().join("admin");
    let small = "storage=ram,size=1M,queues=1";
    let disks = [("good", small), ("other", "storage=ram,size=1M,queues=2"), ("third", small)];
    let mut daemon = HostileDaemon::start_with(1, &disks, &["--admin", &admin.display().to_string()]);
    let neighbour = start_neighbour(daemon.socket("good"), 1, 1);
    let version = || Client::connect_with(&admin, TIMEOUT.time())?.call("version", &serde_json::json!({}));
    version().expect("an answer");
    let mut load = VhostUserLoad::connect(daemon.socket("other"), 2, 200, 3);
    let without = NoThreads::of(pid(&daemon));
    // Without new threads, their work is done by others, refused, or waits: a new frontend needs one.
    load.round();
    let mut late = VhostUserSocket::connect(&daemon.socket("third"));
    wait_for("the warning", || {
        daemon.warnings("third").into_iter().find(|line| line.contains("thread \"vhost-third\""))
    });
    let refusal = version().expect_err("there is no thread for a client").to_string();
    assert!(refusal.contains("thread \"admin-client\"") && refusal.contains("LimitNPROC="), "{refusal}");
    assert!(daemon.log().contains("an admin client was refused: thread \"admin-client\""), "{}", daemon.log());
    neighbour.assert_progress("a lack of threads");
    daemon.assert_alive("a lack of threads");
    drop(without);
    version().expect("an answer");
    assert_ne!(late.request_u64(m::GET_FEATURES), 0, "the frontend that has waited");
    drop((load, late));
    neighbour.finish();
    let _without = NoThreads::of(pid(&daemon));
    daemon.stop();
}

#[test]
fn a_start_without_threads_is_refused() {
    if !run_unprivileged("resource_limits::a_start_without_threads_is_refused") {
        return;
    }
    let mut command = Command::new("prlimit");
    command.args(["--nproc=0", "--"]).arg(mqblk_binary()).args(["serve", "--workers", "1", "--disk"]);
    let folder = tempfile::tempdir().expect("a folder");
    command.arg(format!("id=a,socket={}/a.sock,storage=ram,size=1M", folder.path().display()));
    command.env_remove("RUST_LOG").stdin(Stdio::null());
    let out = command.output().expect("the daemon");
    let output = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{output}");
    assert!(output.contains("expected room for one more thread (ulimit -u, LimitNPROC=, TasksMax=)"), "{output}");
}

/// Returns the command under a limit of locked memory, without CAP_IPC_LOCK, which would override it.
fn under_memlock(kib: u64, arguments: &[&str]) -> Command {
    // Timeout ends it if it starts after all. In the foreground, because otherwise timeout also signals its group: a
    // second SIGTERM makes the daemon exit at once with a nonzero code.
    let mut command = Command::new("timeout");
    command.args(["--foreground", "--preserve-status", "60", "prlimit", &format!("--memlock={}", kib << 10)]);
    if rustix::process::geteuid().is_root() {
        command.args(["setpriv", "--bounding-set", "-ipc_lock", "--inh-caps", "-ipc_lock"]);
    }
    command.arg(mqblk_binary()).arg("serve").args(arguments).env_remove("RUST_LOG").stdin(Stdio::null());
    command
}

#[test]
fn without_locked_memory() {
    let folder = tempfile::tempdir().expect("a folder");
    let socket = |id: &str| folder.path().join(format!("{id}.sock"));
    let disk = |id: &str, fixed| {
        format!("id={id},socket={},storage=ram,size=1M,queues=1,fixed-buffers={fixed}", socket(id).display())
    };
    let out = under_memlock(0, &["--workers", "1", "--disk", &disk("none", "auto")]).output().expect("the daemon");
    let output = String::from_utf8_lossy(&out.stderr).into_owned();
    // Kernels count different parts of a ring.
    if !out.status.success() {
        assert!(
            output.contains("memlock limit: found 0 KiB, expected at least 128 KiB") && output.contains("LimitMEMLOCK"),
            "{output}"
        );
    }

    // Enough for the rings, but not for 16 MiB of a guest: `on` reports that, `auto` does without.
    let log = folder.path().join("log");
    let [on, auto] = [disk("on", "on"), disk("auto", "auto")];
    let mut daemon = under_memlock(4096, &["--workers", "1", "--disk", &on, "--disk", &auto])
        .stderr(File::create(&log).expect("a log"))
        .spawn()
        .expect("the daemon");
    wait_for("the daemon's sockets", || (socket("on").exists() && socket("auto").exists()).then_some(()));
    let large = |id: &str| BlkConnectOptions { data_per_queue: ByteLen(16 << 20), ..options(&socket(id), 1, 128) };
    BlkDevice::connect(&large("on")).expect_err("memory that may not be locked");
    wait_for("what to do", || {
        let output = std::fs::read_to_string(&log).expect("the log");
        (output.contains("fixed-buffers=on") && output.contains("memlock limit: found 4096 KiB")).then_some(())
    });
    drop(BlkDevice::connect(&large("auto")).expect("a connection without locked memory"));
    rustix::process::kill_process(Pid::from_raw(daemon.id() as i32).expect("a process"), Signal::TERM)
        .expect("SIGTERM");
    assert!(daemon.wait().expect("its end").success());
}

#[test]
fn a_thousand_quick_connections_cost_no_memory() {
    let daemon = HostileDaemon::start(1, &[("a", "storage=ram,size=1M,queues=2")]);
    let socket = daemon.socket("a");
    let come_and_go = |count: usize| {
        for number in 0..count {
            match number % 10 {
                0 => drop(BlkDevice::connect(&options(&socket, 2, 128)).expect("a connection")),
                1..4 => assert_ne!(VhostUserSocket::connect(&socket).request_u64(m::GET_FEATURES), 0),
                _ => drop(VhostUserSocket::connect(&socket)),
            }
        }
        daemon.wait_for_session_end("a");
        daemon.stable_resources()
    };
    let base = come_and_go(200);
    let memory = own_memory(&daemon);
    assert_eq!(come_and_go(1000), base);
    let grown = own_memory(&daemon).saturating_sub(memory);
    assert!(grown < 1024, "1000 connections have cost {grown} KiB");
    daemon.stop();
}

/// The bound is far above the measured value (docs/reliability.md), and far below a table for the largest ring of each
/// queue.
#[test]
fn many_large_idle_disks() {
    const DISKS: usize = 64;
    const QUEUES: u16 = 16;
    const ENTRIES: u16 = 1024;
    let ids: Vec<String> = (0..DISKS).map(|number| format!("d{number}")).collect();
    let settings = format!("storage=null,size=1G,queues={QUEUES},queue-size={ENTRIES}");
    let disks: Vec<(&str, &str)> = ids.iter().map(|id| (id.as_str(), settings.as_str())).collect();
    let daemon = HostileDaemon::start(2, &disks);
    let base = daemon.stable_resources();
    let idle = own_memory(&daemon);
    let mut devices: Vec<BlkDevice> = Vec::new();
    for id in &ids {
        devices.push(BlkDevice::connect(&options(&daemon.socket(id), QUEUES, ENTRIES)).expect("a connection"));
    }
    let connected = own_memory(&daemon);
    let queues = DISKS as u64 * u64::from(QUEUES);
    println!(
        "{DISKS} disks: {} KiB in all, {} KiB a disk; connected with {QUEUES} queues of {ENTRIES}: {} KiB a disk, {} KiB a queue",
        idle,
        idle / DISKS as u64,
        (connected - idle) / DISKS as u64,
        (connected - idle) / queues
    );
    assert!(
        (connected - idle) / queues < 1024,
        "an idle queue of {ENTRIES} entries costs {} KiB",
        (connected - idle) / queues
    );
    drop(devices);
    daemon.wait_for_resources(base, "64 disks with 16 queues");
    // Allocated memory is kept for the next connections. The statistics of used queues take more than a queue.
    let after = own_memory(&daemon);
    assert!(after < connected * 2, "{connected} KiB while connected, {after} KiB after that");
    daemon.stop();
}
