//! A worker or a disk that hangs: all other requests are answered, and the daemon stops.

use std::sync::Arc;
use std::time::{Duration, Instant};

use mqblk_admin::Client;
use mqblk_core::DiskSlot;
use mqblk_driver::virtio_blk::BlkConnectOptions;
use mqblk_engine::{PlugOptions, PollPolicy};
use mqblk_tests::hostile::daemon::HostileDaemon;
use mqblk_tests::hostile::frontend::HostileFrontend;
use mqblk_tests::hostile::fuse::HangingFile;
use mqblk_tests::hostile::load::start_neighbour;
use mqblk_tests::hostile::memory::{FileRegion, START, SharedMemory};
use mqblk_tests::hostile::request::{header, readable, request_type, writable, write_direct};
use mqblk_tests::hostile::ring::RingAddresses;
use mqblk_tests::hostile::socket::{VERSION, message as m, message_bytes};
use mqblk_tests::hostile::{TIMEOUT, wait_for};
use mqblk_tests::in_process::{self, Plan};
use serde_json::json;

/// More clients than the admin socket serves at once.
const CLIENTS: usize = 17;

/// Guest address of a request's header, before its data.
const HEADER: u64 = START + 0x1_8000;

/// Guest address of the memory that answers no page fault.
const HANGING: u64 = 1 << 30;

/// Offers a read of 4 KiB: the size of a FUSE file's blocks.
fn read_first_block(frontend: &mut HostileFrontend) {
    frontend.memory.write(HEADER, &header(request_type::IN, 0));
    let queue = &mut frontend.queues[0];
    let head = write_direct(&queue.ring, &[0, 1], &[readable(HEADER, 16), writable(HEADER + 0x1000, 4097)]);
    queue.ring.offer(head);
    queue.publish_and_kick();
}

/// A worker waits for a guest's memory. Before the waits had a bound, 16 admin clients that queried this worker kept
/// all others out for ever, and the daemon did not stop.
#[test]
#[ignore = "needs root"]
fn as_root_a_worker_that_waits_in_a_page_fault_keeps_nobody_else_waiting() {
    let hanging = HangingFile::mount(1 << 20);
    let folder = tempfile::tempdir().expect("a folder");
    let admin = folder.path().join("admin");
    let disks = [("bad", "storage=ram,size=1M,queues=1,guest-memory=any"), ("good", "storage=ram,size=1M,queues=1")];
    let admin_text = admin.display().to_string();
    // The two queues are on two workers.
    let mut daemon = HostileDaemon::start_with(2, &disks, &["--admin", &admin_text, "--drain-timeout-s", "1"]);
    let file = std::fs::OpenOptions::new().read(true).write(true).open(hanging.path()).expect("the file");
    let slow = FileRegion { file, ..FileRegion::new(HANGING, 0x7e00_0000_0000, 1 << 20, 0) };
    let memory = SharedMemory { regions: vec![FileRegion::new(0, 0x7f00_0000_0000, 4 << 20, 0), slow] };
    let mut frontend = HostileFrontend::with_memory(&daemon.socket("bad"), 0, memory);
    frontend.add_queue(RingAddresses::pages(0), 64);
    let neighbour = start_neighbour(daemon.socket("good"), 1, 3);
    let hangs = hanging.hang();
    let queue = &mut frontend.queues[0];
    // The header of the request is in memory that does not answer.
    let head = write_direct(&queue.ring, &[0, 1], &[readable(HANGING, 16), writable(0x10_0000, 513)]);
    queue.ring.offer(head);
    queue.publish_and_kick();
    wait_for("a page fault that hangs", || (hanging.waiting() > 0).then_some(()));

    let clients: Vec<_> = (0..CLIENTS)
        .map(|_| {
            let admin = admin.clone();
            std::thread::spawn(move || {
                let mut client = Client::connect_with(&admin, TIMEOUT.time())?;
                client.call("stat", &json!({}))
            })
        })
        .collect();
    let replies: Vec<String> = clients
        .into_iter()
        .map(|client| client.join().expect("a client").expect_err("the worker does not answer").to_string())
        .collect();
    let unresponsive = replies.iter().filter(|reply| reply.contains("worker 0 has not answered for")).count();
    assert!(unresponsive >= CLIENTS - 1, "{replies:?}");
    let mut client = Client::connect_with(&admin, TIMEOUT.time()).expect("room for a client");
    client.call("version", &json!({})).expect("a verb that asks no worker");
    drop(client);
    neighbour.assert_progress("a worker that hangs");
    neighbour.finish();

    daemon.begin_stop();
    let log = || daemon.log();
    wait_for("the end of the other disk", || (!daemon.socket("good").exists()).then_some(()));
    wait_for("the last words", || log().contains("a worker does not end").then_some(()));
    drop(hangs);
    daemon.wait_end();
}

/// The same with an image. A message that waits for its requests does not delay the stop, and so does not affect the
/// other disks.
#[test]
#[ignore = "needs root"]
fn as_root_a_reset_that_waits_for_storage_does_not_hold_up_the_stop() {
    let hanging = HangingFile::mount(8 << 20);
    let bad = format!("storage=file,path={},queues=1", hanging.path().display());
    let disks = [("bad", bad.as_str()), ("good", "storage=ram,size=1M,queues=1")];
    let mut daemon = HostileDaemon::start_with(1, &disks, &["--drain-timeout-s", "2"]);
    let mut frontend = HostileFrontend::start(&daemon.socket("bad"), 0, 1);
    let neighbour = start_neighbour(daemon.socket("good"), 1, 3);
    let hangs = hanging.hang();
    read_first_block(&mut frontend);
    wait_for("a read that hangs", || (hanging.waiting() > 0).then_some(()));
    // The reset is not answered: the daemon waits for the read. The reply to the second message shows that the session
    // reads both.
    let both = [m::GET_FEATURES, m::RESET_DEVICE].map(|message| message_bytes(message, VERSION, 0, &[])).concat();
    frontend.connection.send_bytes(&both, &[]);
    frontend.connection.receive();
    neighbour.assert_progress("a reset that waits");
    neighbour.finish();
    daemon.begin_stop();
    wait_for("the end of the other disk", || (!daemon.socket("good").exists()).then_some(()));
    // The disk's own threads cannot end before.
    drop(hangs);
    daemon.wait_end();
    let warnings = daemon.warnings("bad");
    assert!(warnings.iter().any(|line| line.contains("RESET_DEVICE: ")), "{warnings:?}");
}

/// Closing a disk waits for its requests. Before, it held the session's lock meanwhile, and no message was answered.
#[test]
#[ignore = "needs root"]
fn as_root_a_frontend_is_answered_while_a_disk_is_closed_that_hangs() {
    let hanging = HangingFile::mount(8 << 20);
    let path = hanging.path().display().to_string();
    let plan = Plan {
        disk: in_process::disk("file", &[("path", &path)]),
        workers: 1,
        policy: PollPolicy::Off.into(),
        plug: PlugOptions::default(),
        health: Default::default(),
    };
    let folder = tempfile::tempdir().expect("a folder");
    let options = BlkConnectOptions::new(folder.path().join("socket"));
    let (server, _engine) = in_process::serve(plan, &options);
    let server = Arc::new(server);
    let mut frontend = HostileFrontend::start(&options.socket, 0, 1);
    let hangs = hanging.hang();
    read_first_block(&mut frontend);
    wait_for("a read that hangs", || (hanging.waiting() > 0).then_some(()));
    let closing = {
        let server = Arc::clone(&server);
        std::thread::spawn(move || server.close_disk(DiskSlot::FIRST))
    };
    // The close reaches the worker at some time in this loop.
    let until = Instant::now() + Duration::from_millis(500);
    while Instant::now() < until {
        frontend.connection.request_u64(m::GET_FEATURES);
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(!closing.is_finished(), "its read is in flight");
    drop(hangs);
    closing.join().expect("closed");
    let (_, length) = frontend.queues[0].wait_completion();
    assert_eq!(length, 4097);
    server.stop();
}
