//! Changes while requests run, against a real daemon: memory is added and removed, kick and call descriptors are
//! replaced, queues are stopped and started, and the guest truncates or rewrites its own memory. No request is lost,
//! all data is verified.

use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use mqblk_tests::hostile::daemon::HostileDaemon;
use mqblk_tests::hostile::eventfd::TestEventFd;
use mqblk_tests::hostile::frontend::{DEFAULT_RING_SIZE, EVENT_IDX, HostileFrontend, QUEUE_SHARE};
use mqblk_tests::hostile::load::start_neighbour;
use mqblk_tests::hostile::memory::{FileRegion, SEAM, START, SharedMemory, mem_table_payload};
use mqblk_tests::hostile::queue_load::{QUEUE_LOAD_MEMORY, QueueLoad, QueueLoadArea, RunningQueueLoad};
use mqblk_tests::hostile::request::{STATUS_OK, header, readable, request_type, writable, write_direct};
use mqblk_tests::hostile::ring::{RawDescriptor, RingAddresses};
use mqblk_tests::hostile::ring_fixture::{read_disk, write_disk};
use mqblk_tests::hostile::socket::{message as m, vring_state_payload};
use mqblk_tests::hostile::{QUIET_TIME, wait_for};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use rustix::fd::AsFd;

const DISK: usize = 1 << 20;

/// The storages under test: one completes at once, one through io_uring, and one late and out of order.
const STORAGES: [&str; 3] = [
    "storage=ram,size=1M,queues=3",
    "storage=file,path=IMAGE,queues=3",
    "storage=fault,inner=ram,size=1M,fault-jitter-us=1500,fault-reorder=5,queues=3",
];

fn start(settings: &str, workers: usize) -> HostileDaemon {
    HostileDaemon::start(workers, &[("bad", settings), ("good", "storage=ram,size=1M,queues=1")])
}

/// The first guest address of the pushers. Single requests use the memory between the rings and this.
const PUSHERS: u64 = START + 0x4_0000;

const _: () = assert!(START + 3 * QUEUE_SHARE <= START + 0x2_0000 && PUSHERS + 3 * QUEUE_LOAD_MEMORY <= SEAM);

/// Returns the memory of queue `index`'s pusher.
fn place(index: u64) -> QueueLoadArea {
    QueueLoadArea { memory: PUSHERS + index * QUEUE_LOAD_MEMORY, sector: index * 600, blocks: 140, seed: index }
}

/// Starts pushers on all queues but the last.
fn push(frontend: &mut HostileFrontend, queues: usize) -> Vec<RunningQueueLoad> {
    let taken = frontend.queues.drain(..queues);
    (0..).zip(taken).map(|(index, queue)| RunningQueueLoad::start(QueueLoad::new(queue, place(index)))).collect()
}

fn finish(pushing: Vec<RunningQueueLoad>, daemon: &HostileDaemon) {
    let pushers: Vec<QueueLoad> = pushing.into_iter().map(RunningQueueLoad::finish).collect();
    let _ = daemon;
    for (index, pusher) in (0_u64..).zip(pushers) {
        assert!(pusher.model().iter().any(|byte| *byte != 0), "queue {index} wrote nothing");
    }
}

/// Reads sector `sector` into `at`, on the queue without a pusher. Returns true if the data is `expected`.
fn reads_into(frontend: &mut HostileFrontend, at: &FileRegion, sector: u64, expected: &[u8]) {
    let own = START + 0x2_0000;
    frontend.memory.write(own, &header(request_type::IN, sector));
    let pieces = [readable(own, 16), writable(at.guest + 8, 513)];
    let queue = frontend.queues.last_mut().expect("a queue");
    let head = write_direct(&queue.ring, &[0, 1], &pieces);
    queue.ring.offer(head);
    queue.publish_and_kick();
    assert_eq!(queue.wait_completion(), (0, 513), "a read into new memory");
    let mut found = [0xee; 513];
    at.file.read_exact_at(&mut found, at.offset + 8).expect("memory");
    assert!(found[..512] == *expected && found[512] == STATUS_OK, "data in new memory");
}

#[test]
fn memory_changes_while_requests_run() {
    for settings in STORAGES {
        let daemon = start(settings, 2);
        let mut last = vec![0; 512];
        SmallRng::seed_from_u64(9).fill(&mut last[..]);
        let mut whole = vec![0; DISK];
        whole[DISK - 512..].copy_from_slice(&last);
        write_disk(&daemon.socket("bad"), &whole);
        let mut frontend = HostileFrontend::start(&daemon.socket("bad"), 0, 3);
        let pushing = push(&mut frontend, 2);
        // Regions of odd sizes are added, used, and removed, one by one and all at once.
        let more: Vec<FileRegion> = (0..6)
            .map(|at| {
                FileRegion::new(0x100_0000 * (at + 1), 0x6000_0000_0000 + (at << 32), 4096 * 3 + 77 * at, 0x800 * at)
            })
            .collect();
        let mut in_table = [false; 6];
        let mut random = SmallRng::seed_from_u64(4);
        for round in 0..60 {
            let at = random.random_range(0..more.len());
            if random.random_bool(0.2) {
                frontend.set_memory_table();
                in_table = [false; 6];
            } else if random.random_bool(0.2) {
                let all: Vec<&FileRegion> = frontend.memory.regions.iter().chain(&more).collect();
                let fds: Vec<_> = all.iter().map(|region| region.fd()).collect();
                frontend.connection.send_acked(m::SET_MEM_TABLE, &mem_table_payload(&all), &fds);
                in_table = [true; 6];
            } else if in_table[at] {
                frontend.connection.send_acked(m::REM_MEM_REG, &more[at].mem_reg_payload(), &[]);
                in_table[at] = false;
            } else {
                frontend.connection.send_acked(m::ADD_MEM_REG, &more[at].mem_reg_payload(), &[more[at].fd()]);
                in_table[at] = true;
            }
            if in_table[at] {
                reads_into(&mut frontend, &more[at], (DISK / 512 - 1) as u64, &last);
            }
            if round % 10 == 0 {
                pushing.iter().for_each(|it| it.assert_progress("a change of memory"));
            }
        }
        finish(pushing, &daemon);
        assert_eq!(daemon.warnings("bad"), Vec::<String>::new());
        daemon.stop();
    }
}

#[test]
fn kick_and_call_descriptors_change_while_requests_run() {
    for (settings, without) in STORAGES.into_iter().zip([0, EVENT_IDX, 0]) {
        let daemon = start(settings, 1);
        let mut frontend = HostileFrontend::start(&daemon.socket("bad"), without, 1);
        let queue = frontend.queues.remove(0);
        let pusher = QueueLoad::new(queue, place(0));
        let bells = pusher.bells();
        let pushing = RunningQueueLoad::start(pusher);
        for round in 0..300 {
            let mut bells = bells.lock().expect("the bells");
            if round % 3 != 0 {
                let kick = if round % 2 == 0 { TestEventFd::new() } else { TestEventFd::blocking() };
                frontend.connection.send_acked(m::SET_VRING_KICK, &0_u64.to_ne_bytes(), &[kick.as_fd()]);
                bells.kick = kick;
            }
            if round % 2 == 0 {
                let call = if round % 4 == 0 { TestEventFd::new() } else { TestEventFd::blocking() };
                frontend.connection.send_acked(m::SET_VRING_CALL, &0_u64.to_ne_bytes(), &[call.as_fd()]);
                bells.call = call;
            }
            drop(bells);
            if round % 20 == 0 {
                pushing.assert_progress("a change of bells");
            }
        }
        let mut pusher = pushing.finish();
        (0..20).for_each(|_| pusher.run_one_by_call());
        frontend.stop_queue(0);
        assert_eq!(daemon.warnings("bad"), Vec::<String>::new());
        daemon.stop();
    }
}

#[test]
fn a_queue_is_disabled_and_enabled_while_requests_run() {
    for settings in STORAGES {
        let daemon = start(settings, 1);
        let mut frontend = HostileFrontend::start(&daemon.socket("bad"), 0, 2);
        let pushing = push(&mut frontend, 1);
        let memory = Arc::clone(&frontend.memory);
        let used = || memory.read_u16(RingAddresses::pages(START).used + 2);
        for round in 0..40 {
            frontend.connection.send_acked(m::SET_VRING_ENABLE, &vring_state_payload(0, 0), &[]);
            if round % 8 == 0 {
                let in_flight = || daemon.stat("bad").totals.in_flight;
                wait_for("the end of the requests in flight", || (in_flight() == 0).then_some(()));
                let before = used();
                std::thread::sleep(QUIET_TIME);
                assert_eq!(used(), before, "a queue that is off gave answers");
            }
            frontend.connection.send_acked(m::SET_VRING_ENABLE, &vring_state_payload(0, 1), &[]);
            if round % 4 == 0 {
                pushing[0].assert_progress("being switched on");
            }
        }
        finish(pushing, &daemon);
        daemon.stop();
    }
}

#[test]
fn a_queue_is_stopped_and_started_while_requests_run() {
    for settings in STORAGES {
        let daemon = start(settings, 2);
        let mut frontend = HostileFrontend::start(&daemon.socket("bad"), 0, 1);
        let queue = frontend.queues.remove(0);
        let at = queue.ring.addresses;
        let pusher = QueueLoad::new(queue, place(0));
        let bells = pusher.bells();
        let memory = Arc::clone(&frontend.memory);
        let pushing = RunningQueueLoad::start(pusher);
        for round in 0..100 {
            let base = frontend.stop_queue(0);
            assert_eq!(base, memory.read_u16(at.used + 2), "a stopped queue has requests in flight");
            if round % 10 == 0 {
                std::thread::sleep(QUIET_TIME);
                assert_eq!(base, memory.read_u16(at.used + 2), "a stopped queue gave an answer");
            }
            let bells = bells.lock().expect("the bells");
            let addresses = frontend.vring_addr_payload(0, at);
            let c = &mut frontend.connection;
            c.send_acked(m::SET_VRING_BASE, &vring_state_payload(0, base.into()), &[]);
            c.send_acked(m::SET_VRING_ADDR, &addresses, &[]);
            c.send_acked(m::SET_VRING_CALL, &0_u64.to_ne_bytes(), &[bells.call.as_fd()]);
            c.send_acked(m::SET_VRING_KICK, &0_u64.to_ne_bytes(), &[bells.kick.as_fd()]);
            drop(bells);
            pushing.assert_progress("a new start");
        }
        finish(vec![pushing], &daemon);
        daemon.stop();
    }
}

#[test]
fn a_device_is_reset_while_requests_run() {
    for settings in STORAGES {
        let daemon = start(settings, 2);
        let neighbour = start_neighbour(daemon.socket("good"), 1, 5);
        let mut frontend = HostileFrontend::connect(&daemon.socket("bad"), 0);
        for round in 0..40_u16 {
            frontend.queues.clear();
            frontend.memory.write(START, &[0; 0x8000]);
            frontend.memory.write(START + 0x2_0000, &header(request_type::IN, u64::from(round)));
            frontend.add_queue(RingAddresses::pages(START), DEFAULT_RING_SIZE);
            let queue = &mut frontend.queues[0];
            for slot in 0..21 {
                let data = START + 0x3_0000 + 0x1000 * u64::from(slot);
                let pieces = [readable(START + 0x2_0000, 16), writable(data, 512), writable(data + 1024, 1)];
                let head = write_direct(&queue.ring, &[slot * 3, slot * 3 + 1, slot * 3 + 2], &pieces);
                queue.ring.offer(head);
            }
            queue.publish_and_kick();
            if round % 2 == 0 {
                wait_for("some answers", || queue.ring.take());
            }
            frontend.connection.send_acked(m::RESET_DEVICE, &[], &[]);
            // The daemon must not access the memory from here on.
            let before = frontend.memory.read(START, 0x8_0000);
            if round % 8 == 0 {
                std::thread::sleep(QUIET_TIME);
            }
            assert!(frontend.memory.read(START, 0x8_0000) == before, "memory changed after a reset");
            let (features, protocol) = (frontend.features, frontend.connection.request_u64(m::GET_PROTOCOL_FEATURES));
            frontend.connection.send_acked(m::SET_PROTOCOL_FEATURES, &protocol.to_ne_bytes(), &[]);
            frontend.connection.send_acked(m::SET_FEATURES, &features.to_ne_bytes(), &[]);
        }
        neighbour.assert_progress("resets");
        neighbour.finish();
        assert_eq!(daemon.warnings("bad"), Vec::<String>::new());
        daemon.stop();
    }
}

/// Truncates the file of region `which` to `len` bytes while requests run, and checks that other guests are not
/// affected.
fn cut_off(settings: &str, which: usize, len: u64) {
    let mut daemon = start(settings, 1);
    let neighbour = start_neighbour(daemon.socket("good"), 1, 6);
    let base = daemon.stable_resources();
    let mut frontend = HostileFrontend::start(&daemon.socket("bad"), 0, 1);
    // Reads into the second region; the ring is in the first.
    let mut hang = mqblk_tests::hostile::TIMEOUT.begin();
    let mut stop = None;
    let mut cut = false;
    let mut slot = 0;
    frontend.memory.write(START + 0x2_0000, &header(request_type::IN, 0));
    while stop.is_none_or(|stop| Instant::now() < stop) {
        assert!(!hang.has_passed(), "requests before the truncation: not within {}", hang.bound());
        let queue = &mut frontend.queues[0];
        let pieces = [readable(START + 0x2_0000, 16), writable(SEAM + 0x8000, 8192), writable(START + 0x2_1000, 1)];
        if cut && which == 0 {
            // The ring is gone. Kicks go on.
            queue.kick.add(1);
            std::thread::sleep(Duration::from_millis(1));
            continue;
        }
        let head = write_direct(&queue.ring, &[slot, slot + 1, slot + 2], &pieces);
        slot = (slot + 3) % 63;
        queue.ring.offer(head);
        queue.publish_and_kick();
        if cut {
            std::thread::sleep(Duration::from_millis(1));
        } else if queue.ring.avail > 50 {
            // With requests in flight.
            frontend.memory.regions[which].file.set_len(len).expect("truncation");
            cut = true;
            stop = Some(Instant::now() + Duration::from_millis(150));
        } else {
            queue.wait_completion();
        }
    }
    daemon.assert_alive("a truncation");
    neighbour.assert_progress("a truncation");
    drop(frontend);
    daemon.wait_for_session_end("bad");
    daemon.wait_for_resources(base, "a truncation");
    let lost = daemon.warnings("bad").iter().filter(|line| line.contains("shared memory was lost")).count();
    assert!(lost <= 1, "{lost} lines for one truncation");
    assert_eq!(read_disk(&daemon.socket("bad"), DISK), vec![0; DISK], "the disk");
    neighbour.finish();
    daemon.stop();
}

#[test]
fn memory_is_truncated_while_requests_run() {
    for settings in STORAGES {
        for which in [0, 1] {
            cut_off(settings, which, 0);
        }
    }
    cut_off(STORAGES[0], 0, 0x1000);
    cut_off(STORAGES[0], 1, 0x9000);
}

/// Sends a write of two pages at `data` to the disk's start, with its header at `header_at`.
fn write_from(frontend: &mut HostileFrontend, header_at: u64, data: u64) {
    let queue = &mut frontend.queues[0];
    let pieces = [readable(header_at, 16), readable(data, 8192), writable(START + 0x2_1000, 1)];
    let head = write_direct(&queue.ring, &[0, 1, 2], &pieces);
    queue.ring.offer(head);
    queue.publish_and_kick();
}

/// A request with its data, header or ring in truncated memory does not succeed, writes nothing, and ends its queue.
/// `data_only`: the header stays.
fn write_of_lost_memory(settings: &str, data_only: bool) {
    let mut daemon = start(settings, 1);
    let neighbour = start_neighbour(daemon.socket("good"), 1, 8);
    let mut frontend = HostileFrontend::start(&daemon.socket("bad"), 0, 1);
    let header_at = if data_only { START + 0x2_0000 } else { SEAM + 0x4000 };
    frontend.memory.write(header_at, &header(request_type::OUT, 0));
    frontend.memory.write(SEAM + 0x8000, &[0xa5; 8192]);
    write_from(&mut frontend, header_at, SEAM + 0x8000);
    frontend.queues[0].wait_completion();
    assert_eq!(frontend.memory.read(START + 0x2_1000, 1), [STATUS_OK]);

    let intact = if data_only { 0x9000 } else { 0 };
    frontend.memory.regions[1].file.set_len(intact).expect("truncation");
    frontend.memory.write(START + 0x2_1000, &[0xee]);
    // The second page of the data is lost, or all of the request except its descriptors.
    write_from(&mut frontend, header_at, SEAM + 0x8000);
    let status = |frontend: &HostileFrontend| frontend.memory.read(START + 0x2_1000, 1)[0];
    wait_for("the end of the queue or of the request", || {
        (status(&frontend) != 0xee || frontend.queues[0].wait_retired(Duration::ZERO)).then_some(())
    });
    // Registered memory keeps its pages for direct I/O: then the data is intact.
    if !data_only || settings != STORAGES[1] {
        assert_ne!(status(&frontend), STATUS_OK, "{settings}: a write of lost memory is done");
    }
    daemon.assert_alive("a write of lost memory");
    neighbour.assert_progress("a write of lost memory");
    drop(frontend);
    daemon.wait_for_session_end("bad");
    let disk = read_disk(&daemon.socket("bad"), DISK);
    assert!(disk[..4096] == [0xa5; 4096] && disk[4096..8192] == [0xa5; 4096], "{settings}: zeroes were written");
    neighbour.finish();
    daemon.stop();
}

#[test]
fn lost_memory_is_never_taken_for_data() {
    for settings in STORAGES {
        for data_only in [true, false] {
            write_of_lost_memory(settings, data_only);
        }
    }
    write_of_lost_memory("storage=file,path=IMAGE,queues=3,direct=off", true);
}

#[test]
fn a_ring_is_scribbled_over_while_it_is_read() {
    let mut daemon = HostileDaemon::start(
        1,
        &[("bad", "storage=ram,size=1M,queues=1,poll=busy"), ("good", "storage=ram,size=1M,queues=1")],
    );
    let neighbour = start_neighbour(daemon.socket("good"), 1, 7);
    let until = Instant::now() + Duration::from_secs(3);
    let mut lives = 0_u64;
    let mut random = SmallRng::seed_from_u64(8);
    while Instant::now() < until {
        let mut frontend = HostileFrontend::start(&daemon.socket("bad"), 0, 1);
        let stop = Arc::new(AtomicBool::new(false));
        let scribbler = {
            let (stop, memory, seed) = (Arc::clone(&stop), Arc::clone(&frontend.memory), random.random());
            std::thread::spawn(move || scribble(&memory, &stop, seed))
        };
        // Valid reads and writes, unless the other thread changes them.
        let queue = &mut frontend.queues[0];
        let life = Instant::now() + Duration::from_millis(60);
        let mut slot = 0;
        while Instant::now() < life && !queue.wait_retired(Duration::ZERO) {
            let head = START + 0x2_0000 + 64 * u64::from(slot);
            let (kind, piece) = if slot % 2 == 0 {
                (request_type::IN, writable(SEAM, 4096))
            } else {
                (request_type::OUT, readable(SEAM, 4096))
            };
            queue.ring.memory.write(head, &header(kind, 0));
            write_direct(
                &queue.ring,
                &[slot, slot + 1, slot + 2],
                &[readable(head, 16), piece, writable(head + 32, 1)],
            );
            queue.ring.offer(slot);
            queue.publish_and_kick();
            slot = (slot + 3) % 63;
            if slot == 0 {
                let _ = wait_for_used(queue.ring.avail, || queue.ring.used());
            }
        }
        stop.store(true, Ordering::Relaxed);
        scribbler.join().expect("the scribbler");
        lives += 1;
        drop(frontend);
        daemon.assert_alive("scribbling");
    }
    assert!(lives > 10, "{lives} lives");
    neighbour.assert_progress("scribbling");
    neighbour.finish();
    daemon.stop();
}

/// Waits a short time for the used index. On a corrupted ring it may never come.
fn wait_for_used(index: u16, used: impl Fn() -> u16) -> bool {
    (0..200).any(|_| {
        std::thread::sleep(Duration::from_micros(50));
        used() == index
    })
}

/// Changes descriptors, headers and tables while the daemon reads them, mostly to something almost valid.
fn scribble(memory: &SharedMemory, stop: &AtomicBool, seed: u64) {
    let mut random = SmallRng::seed_from_u64(seed);
    while !stop.load(Ordering::Relaxed) {
        let last = if random.random_bool(0.02) { 70 } else { 64 };
        let desc = RawDescriptor {
            address: [START + 0x2_0000, SEAM, SEAM + 4096, u64::MAX, START][random.random_range(0..5)],
            len: [16, 512, 4096, 1, 0, u32::MAX][random.random_range(0..6)],
            flags: random.random_range(0..4) | if random.random_bool(0.02) { 4 } else { 0 },
            next: random.random_range(0..last),
        };
        match random.random_range(0..10) {
            0..6 => memory.write(START + 16 * random.random_range(0..64), &desc.bytes()),
            6..9 => {
                let kind = [0, 1, 4, 8, 11, 13, 99][random.random_range(0..7)];
                let sector = if random.random_bool(0.9) { random.random_range(0..2048) } else { random.random() };
                memory.write(START + 0x2_0000 + 64 * random.random_range(0..63), &header(kind, sector));
            }
            _ => memory.write(SEAM + 16 * random.random_range(0..256), &desc.bytes()),
        }
    }
}

#[test]
fn a_full_call_eventfd_stops_no_other_guest() {
    let mut daemon = start(STORAGES[0], 1);
    let neighbour = start_neighbour(daemon.socket("good"), 1, 8);
    for bell in [m::SET_VRING_CALL, m::SET_VRING_ERR] {
        let mut frontend = HostileFrontend::start(&daemon.socket("bad"), 0, 1);
        // One more would overflow, so a write blocks for ever.
        let full = TestEventFd::blocking();
        full.add(u64::MAX - 1);
        frontend.connection.send(bell, 1, &0_u64.to_ne_bytes(), &[full.as_fd()]);
        let queue = &mut frontend.queues[0];
        queue.ring.set_used_event(0);
        match bell {
            m::SET_VRING_CALL => {
                frontend.memory.write(START + 0x2_0000, &header(request_type::FLUSH, 0));
                let pieces = [readable(START + 0x2_0000, 16), writable(START + 0x2_1000, 1)];
                let head = write_direct(&queue.ring, &[0, 1], &pieces);
                queue.ring.offer(head);
            }
            _ => queue.ring.offer(999),
        }
        queue.publish_and_kick();
        std::thread::sleep(QUIET_TIME);
        neighbour.assert_progress("a bell that is full");
        drop(frontend);
        daemon.wait_for_session_end("bad");
    }
    daemon.assert_alive("full bells");
    neighbour.finish();
    daemon.stop();
}

#[test]
fn a_large_guests_memory_is_not_allocated() {
    let daemon = start(STORAGES[1], 1);
    let neighbour = start_neighbour(daemon.socket("good"), 1, 9);
    let mut memory = SharedMemory::two_regions();
    memory.regions.push(FileRegion::new(1 << 32, 0x5000_0000_0000, 4 << 30, 0));
    let mut frontend = HostileFrontend::with_memory(&daemon.socket("bad"), 0, memory);
    frontend.add_queue(RingAddresses::pages(START), DEFAULT_RING_SIZE);
    frontend.memory.write(START + 0x2_0000, &header(request_type::IN, 0));
    let at = (1 << 32) + (3 << 30);
    let queue = &mut frontend.queues[0];
    let head = write_direct(&queue.ring, &[0, 1], &[readable(START + 0x2_0000, 16), writable(at, 513)]);
    queue.ring.offer(head);
    queue.publish_and_kick();
    assert_eq!(queue.wait_completion(), (0, 513));
    // In blocks of 512 bytes. Little more than the memory of the reads is allocated.
    let blocks = std::os::unix::fs::MetadataExt::blocks(&frontend.memory.regions[2].file.metadata().expect("memory"));
    assert!((1..=(8 << 20) / 512).contains(&blocks), "{blocks} blocks of memory for one read");
    neighbour.assert_progress("a large guest");
    drop(frontend);
    neighbour.finish();
    daemon.stop();
}
