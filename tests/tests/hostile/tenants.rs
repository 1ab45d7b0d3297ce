//! One tenant cannot take a worker from the others: its cost for them is bounded.

use mqblk_tests::hostile::daemon::HostileDaemon;
use mqblk_tests::hostile::frontend::{FrontendQueue, HostileFrontend, SEG_MAX, SIZE_MAX};
use mqblk_tests::hostile::fuse::HangingFile;
use mqblk_tests::hostile::hung_device::HungFileSystem;
use mqblk_tests::hostile::load::start_neighbour;
use mqblk_tests::hostile::memory::{FileRegion, START, mem_table_payload};
use mqblk_tests::hostile::one_region::{DATA, MEMORY, connect, offer, status, statuses};
use mqblk_tests::hostile::request::{STATUS_IOERR, STATUS_OK, header, readable, request_type, writable, write_direct};
use mqblk_tests::hostile::session::completes_read;
use mqblk_tests::hostile::socket::{VhostUserSocket, message as m, vring_state_payload};
use mqblk_tests::hostile::{TIMEOUT, wait_for};

fn take_all(queue: &mut FrontendQueue, count: usize) {
    (0..count).for_each(|_| _ = queue.wait_completion());
}

/// 16 requests of 996 MiB each at once, all to the same 4 MiB of guest memory. Before requests were cut into slices,
/// the worker handled all of them in one turn: the other disk's requests waited for 0.8 s and more, and it had 8 rounds
/// instead of about 1900.
#[test]
fn giant_requests_do_not_hold_up_other_disks() {
    const CHAINS: u16 = 16;
    const PIECES: usize = 249;
    let storages = ["storage=ram,size=1G", "storage=fault,inner=ram,size=1G,fault-jitter-us=50"];
    for (storage, kind) in storages.into_iter().zip([request_type::IN, request_type::IN]) {
        let good = ("good", "storage=ram,size=1M,queues=1");
        let daemon = HostileDaemon::start(1, &[("bad", &format!("{storage},queues=1")), good]);
        let mut frontend = connect(&daemon.socket("bad"), SIZE_MAX | SEG_MAX);
        let neighbour = start_neighbour(daemon.socket("good"), 1, 3);
        for index in 0..CHAINS {
            offer(&mut frontend, index, kind, 0, &[writable(DATA, 4 << 20); PIECES]);
        }
        let before = neighbour.rounds();
        frontend.queues[0].publish_and_kick();
        take_all(&mut frontend.queues[0], CHAINS.into());
        let rounds = neighbour.rounds() - before;
        assert_eq!(statuses(&frontend, CHAINS.into()), [STATUS_OK; CHAINS as usize]);
        // A round takes a few turns, and a turn at most one slice of 1 MiB; there are 15 936 slices.
        assert!(rounds >= 100, "{storage}: the good disk had {rounds} rounds meanwhile");
        neighbour.finish();
        daemon.stop();
    }
}

/// Before files were checked, a worker that read the ring of such a guest waited for ever. With it waited the other
/// disks, the admin socket and the stop.
#[test]
#[ignore = "needs root"]
fn as_root_memory_that_answers_no_page_fault_is_refused() {
    let daemon = HostileDaemon::start(1, &[("bad", "storage=ram,size=1M,queues=1"), ("good", "storage=ram,size=1M")]);
    let neighbour = start_neighbour(daemon.socket("good"), 1, 3);
    let hanging = HangingFile::mount(MEMORY as usize);
    let _hangs = hanging.hang();
    let file = std::fs::OpenOptions::new().read(true).write(true).open(hanging.path()).expect("the file");
    let region = FileRegion { file, ..FileRegion::new(0, 0x7f00_0000_0000, MEMORY, 0) };
    for (message, payload) in
        [(m::SET_MEM_TABLE, mem_table_payload(&[&region])), (m::ADD_MEM_REG, region.mem_reg_payload())]
    {
        let mut connection = VhostUserSocket::connect(&daemon.socket("bad"));
        connection.negotiate(0);
        assert_ne!(connection.try_send_acked(message, &payload, &[region.fd()]), Some(0));
        drop(connection);
        daemon.wait_for_session_end("bad");
    }
    let warnings = daemon.warnings("bad");
    assert!(
        warnings.iter().all(|line| line.contains("expected a memfd or a file of tmpfs or hugetlbfs")),
        "{warnings:?}"
    );
    assert_eq!(warnings.len(), 2);
    assert_eq!(hanging.waiting(), 0, "not one byte of it was read");
    neighbour.assert_progress("such memory");
    neighbour.finish();
    daemon.stop();
}

/// With as many requests as the kernel has threads for, a worker's ring did no asynchronous work for its other disks.
#[test]
#[ignore = "needs root"]
fn as_root_an_image_that_hangs_does_not_hold_up_other_disks() {
    let hanging = HangingFile::mount(8 << 20);
    let bad = format!("storage=file,path={},queues=1", hanging.path().display());
    // The neighbour's requests go through the ring too, because they bypass the page cache.
    let daemon = HostileDaemon::start(1, &[("bad", &bad), ("good", "storage=file,path=IMAGE,queues=1")]);
    let mut frontend = connect(&daemon.socket("bad"), 0);
    let neighbour = start_neighbour(daemon.socket("good"), 1, 3);
    let hangs = hanging.hang();
    for index in 0..64 {
        offer(&mut frontend, index, request_type::IN, 0, &[writable(DATA, 4096)]);
    }
    frontend.queues[0].publish_and_kick();
    wait_for("requests that hang", || (hanging.waiting() >= 4).then_some(()));
    (0..20).for_each(|_| neighbour.assert_progress("an image that hangs"));
    assert_eq!(frontend.queues[0].ring.used(), 0);
    drop(hangs);
    take_all(&mut frontend.queues[0], 64);
    assert_eq!(statuses(&frontend, 64), [STATUS_OK; 64]);
    neighbour.finish();
    daemon.stop();
}

/// Fills a queue with requests of one kind to an image of a local file system whose device hangs. Then sends requests
/// of all kinds to a good disk on the same worker.
fn a_device_that_hangs(settings: &str, kind: u32) {
    let data = |kind: u32| match kind {
        request_type::IN => vec![writable(DATA, 4096)],
        request_type::OUT => vec![readable(DATA, 4096)],
        _ => vec![],
    };
    let system = HungFileSystem::mount(16 << 20);
    let bad = format!("storage=file,path={},queues=1{settings}", system.image().display());
    let good = format!("storage=file,path=IMAGE,queues=1{settings}");
    let daemon = HostileDaemon::start(1, &[("bad", &bad), ("good", &good)]);
    let (mut frontend, mut other) = (connect(&daemon.socket("bad"), 0), connect(&daemon.socket("good"), 0));
    let hangs = system.hang();
    for index in 0..64_u16 {
        // Far apart: each needs another part of the extent tree.
        offer(&mut frontend, index, kind, u64::from(index) * 512, &data(kind));
    }
    frontend.queues[0].publish_and_kick();
    wait_for("requests that hang", || (system.waiting() >= 1).then_some(()));
    for slot in 0..60_u16 {
        let kind = [request_type::IN, request_type::OUT, request_type::FLUSH][usize::from(slot % 3)];
        offer(&mut other, slot, kind, 0, &data(kind));
        other.queues[0].publish_and_kick();
        _ = other.queues[0].wait_completion();
        assert_eq!(status(&other, slot), STATUS_OK, "{kind} of the good disk");
    }
    drop(hangs);
    take_all(&mut frontend.queues[0], 64);
    assert_eq!(statuses(&frontend, 64), [STATUS_OK; 64]);
    daemon.stop();
}

/// Before a kernel thread made the first access to each part of a file, the worker waited for blocks of the file system
/// within the submission.
#[test]
#[ignore = "needs root"]
fn as_root_reads_of_a_device_that_hangs_do_not_hold_up_other_disks() {
    a_device_that_hangs("", request_type::IN);
    a_device_that_hangs(",direct=off", request_type::IN);
}

#[test]
#[ignore = "needs root"]
fn as_root_writes_to_a_device_that_hangs_do_not_hold_up_other_disks() {
    a_device_that_hangs("", request_type::OUT);
    a_device_that_hangs(",direct=off", request_type::OUT);
}

/// Before flushes were grouped and the ring had as many kernel threads as operations, eight of them blocked the flushes
/// of all other disks.
#[test]
#[ignore = "needs root"]
fn as_root_flushes_of_a_device_that_hangs_do_not_hold_up_other_disks() {
    a_device_that_hangs("", request_type::FLUSH);
}

/// Formerly the table of guarded mappings had 4096 slots, and mappings beyond were not guarded: the first access to a
/// truncated file ended the daemon.
#[test]
fn memory_is_guarded_however_many_mappings_there_are() {
    const GUESTS: usize = 9;
    const REGIONS: u64 = 510;
    let ids: Vec<String> = (0..GUESTS).map(|at| format!("bad{at}")).collect();
    let mut disks: Vec<(&str, &str)> = ids.iter().map(|id| (id.as_str(), "storage=ram,size=1M,queues=1")).collect();
    disks.push(("good", "storage=ram,size=1M,queues=1"));
    let daemon = HostileDaemon::start(1, &disks);
    let neighbour = start_neighbour(daemon.socket("good"), 1, 3);
    let whole = FileRegion::new(0, 0, 4096, 0);
    let region = |at: u64| {
        let file = whole.file.try_clone().expect("a descriptor");
        FileRegion { file, ..FileRegion::new((1 << 32) + at * 8192, 0x6000_0000_0000 + at * 8192, 4096, 0) }
    };
    let connect_all = |id: &String| {
        let mut frontend = HostileFrontend::start(&daemon.socket(id), 0, 1);
        for region in (0..REGIONS).map(region) {
            frontend.connection.send_acked(m::ADD_MEM_REG, &region.mem_reg_payload(), &[region.fd()]);
        }
        frontend
    };
    let mut frontends: Vec<HostileFrontend> = ids.iter().map(connect_all).collect();
    whole.file.set_len(0).expect("shorter");
    // The newest mapping.
    let last = frontends.last_mut().expect("a guest");
    last.memory.write(START + 0x1_8000, &header(request_type::IN, 0));
    let pieces = [readable(START + 0x1_8000, 16), writable(region(REGIONS - 1).guest, 513)];
    let queue = &mut last.queues[0];
    let head = write_direct(&queue.ring, &[0, 1], &pieces);
    queue.ring.offer(head);
    queue.publish_and_kick();
    assert!(queue.wait_retired(TIMEOUT.time()), "a queue whose memory is lost ends");
    neighbour.assert_progress("memory that was cut off");
    neighbour.finish();
    drop(frontends);
    daemon.stop();
}

/// Connects `times` times and causes a line in the log each time.
fn complain(daemon: &HostileDaemon, times: usize) {
    for _ in 0..times {
        let mut connection = VhostUserSocket::connect(&daemon.socket("bad"));
        connection.negotiate(0);
        assert_ne!(connection.try_send_acked(m::SET_VRING_NUM, &vring_state_payload(0, 3), &[]), Some(0));
    }
    daemon.wait_for_session_end("bad");
}

const TWO_DISKS: [(&str, &str); 2] =
    [("bad", "storage=ram,size=1M,queues=1"), ("good", "storage=ram,size=1M,queues=1")];

#[test]
fn log_lines_of_a_disk_are_limited() {
    let daemon = HostileDaemon::start(1, &TWO_DISKS);
    complain(&daemon, 1300);
    let lines = daemon.warnings("bad").len();
    // Each connection adds a line.
    assert!((400..1000).contains(&lines), "{lines} lines");
    drop(HostileFrontend::start(&daemon.socket("good"), 0, 1));
    wait_for("a line of the other disk", || {
        daemon
            .log()
            .lines()
            .any(|line| line.contains("frontend disconnected") && line.contains("disk=\"good\""))
            .then_some(())
    });
    // The lines are 10 a second again.
    wait_for("the number of lines left out", || {
        complain(&daemon, 1);
        daemon.log().contains("lines about the next one's disk were left out").then_some(())
    });
    daemon.stop();
}

/// Formerly each thread that logged to a full pipe waited for its reader: workers and control threads alike.
#[test]
fn a_log_that_nobody_reads_holds_up_nothing() {
    let daemon = HostileDaemon::start_unread(1, &TWO_DISKS);
    let neighbour = start_neighbour(daemon.socket("good"), 1, 3);
    // More than the 64 KiB of a pipe.
    complain(&daemon, 900);
    (0..5).for_each(|_| neighbour.assert_progress("a full pipe"));
    assert!(completes_read(&mut HostileFrontend::start(&daemon.socket("bad"), 0, 1), 0));
    neighbour.finish();
    daemon.stop();
}

/// Windows' driver accepts SEG_MAX, sends up to 515 segments, and does not look at SIZE_MAX.
#[test]
fn limits_that_a_driver_has_accepted_are_advice() {
    let daemon = HostileDaemon::start(1, &[("bad", "storage=ram,size=1G,queues=1"), ("good", "storage=ram,size=1M")]);
    // Apart, so that none are adjacent.
    let pieces = |from: u64, count: u64, len: u32, write: bool| -> Vec<_> {
        let places = (0..count).map(|index| from + index * 2 * u64::from(len));
        places.map(|at| if write { readable(at, len) } else { writable(at, len) }).collect()
    };
    let half = DATA + (2 << 20);
    for without in [0, SEG_MAX | SIZE_MAX] {
        for count in [126, 135, 254, 515, 1024_u64] {
            let mut frontend = connect(&daemon.socket("bad"), without);
            let filled: Vec<u8> = (0..2 << 20).map(|at: u32| (at / 512 + at % 251 + count as u32) as u8).collect();
            frontend.memory.write(DATA, &filled);
            for (kind, pieces) in [
                (request_type::OUT, pieces(DATA, count, 512, true)),
                (request_type::IN, pieces(half, count, 512, false)),
            ] {
                offer(&mut frontend, 0, kind, 0, &pieces);
                frontend.queues[0].publish_and_kick();
                take_all(&mut frontend.queues[0], 1);
                assert_eq!(status(&frontend, 0), STATUS_OK, "without {without:#x}: {count} pieces");
            }
            for index in 0..count {
                let of = |at: u64| frontend.memory.read(at + index * 1024, 512);
                assert!(of(DATA) == of(half), "without {without:#x}: piece {index} of {count}");
            }
        }
        for (from, len) in [(DATA, 4 << 20), (DATA - 512, (4 << 20) + 512)] {
            let mut frontend = connect(&daemon.socket("bad"), without);
            offer(&mut frontend, 0, request_type::IN, 0, &[writable(from, len)]);
            frontend.queues[0].publish_and_kick();
            take_all(&mut frontend.queues[0], 1);
            assert_eq!(status(&frontend, 0), STATUS_OK, "without {without:#x}: a piece of {len}");
        }
    }
    assert_eq!(daemon.warnings("bad"), [""; 0]);
    daemon.stop();
}

/// The driver waits for each, and the log says once what is wrong.
#[test]
fn a_request_of_too_many_segments_fails_with_a_status() {
    let daemon = HostileDaemon::start(1, &[("bad", "storage=ram,size=1G,queues=1"), ("good", "storage=ram,size=1M")]);
    let mut frontend = connect(&daemon.socket("bad"), 0);
    for count in [1025, 1500, 2046] {
        let pieces: Vec<_> = (0..count).map(|index| writable(DATA + index * 1024, 512)).collect();
        offer(&mut frontend, 0, request_type::IN, 0, &pieces);
        frontend.queues[0].publish_and_kick();
        take_all(&mut frontend.queues[0], 1);
        assert_eq!(status(&frontend, 0), STATUS_IOERR, "{count} pieces");
    }
    let lines = daemon.warnings("bad");
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(lines[0].contains("more segments than the host transfers at once"), "{lines:?}");
    offer(&mut frontend, 0, request_type::IN, 0, &[writable(DATA, 512)]);
    frontend.queues[0].publish_and_kick();
    take_all(&mut frontend.queues[0], 1);
    assert_eq!(status(&frontend, 0), STATUS_OK, "the queue is as good as before");
    daemon.stop();
}
