//! Queues that stop without a wait for storage: what it has not answered is left in flight, for another daemon or for
//! the same one. GET_VRING_BASE with GET_VRING_BASE_INFLIGHT, and GET_VRING_BASE_SKIP_DRAIN.

use std::os::unix::fs::FileExt;
use std::path::Path;

use mqblk_tests::hostile::daemon::HostileDaemon;
use mqblk_tests::hostile::frontend::{DEFAULT_RING_SIZE, HostileFrontend, InflightRegion};
use mqblk_tests::hostile::fuse::HangingFile;
use mqblk_tests::hostile::memory::{START, SharedMemory};
use mqblk_tests::hostile::request::{STATUS_OK, header, readable, request_type, writable, write_direct};
use mqblk_tests::hostile::ring::RingAddresses;
use mqblk_tests::hostile::session::SessionOutcome::Closed;
use mqblk_tests::hostile::session::{SessionCase, run_sessions};
use mqblk_tests::hostile::socket::{VERSION, message as m, vring_state_payload};
use mqblk_tests::hostile::wait_for;
use rustix::fs::MemfdFlags;

/// Protocol features.
const INFLIGHT: u64 = 1 << 20;
const SKIP_DRAIN: u64 = 1 << 23;

/// Bytes of a request's data: a block of the FUSE file.
const BLOCK: u64 = 4096;
/// Guest addresses of the requests.
const REQUESTS: u64 = START + 0x1_0000;

/// A way to stop a queue without a drain.
#[derive(Clone, Copy, Debug)]
enum Stop {
    /// GET_VRING_BASE, the later message not being agreed.
    Inflight,
    SkipDrain,
}

const STOPS: [Stop; 2] = [Stop::Inflight, Stop::SkipDrain];

impl Stop {
    fn stop(self, frontend: &mut HostileFrontend) -> u16 {
        let message = match self {
            Stop::Inflight => m::GET_VRING_BASE,
            Stop::SkipDrain => m::GET_VRING_BASE_SKIP_DRAIN,
        };
        let reply = frontend.connection.request(message, &vring_state_payload(0, 0));
        assert_eq!((reply.len(), &reply[..4]), (8, &[0; 4][..]), "{self:?}");
        u16::from_ne_bytes([reply[4], reply[5]])
    }

    /// Connects a frontend that agrees to this way.
    fn connect(self, socket: &Path, memory: SharedMemory) -> HostileFrontend {
        let mut frontend = HostileFrontend::with_memory(socket, 0, memory);
        let offered = frontend.connection.request_u64(m::GET_PROTOCOL_FEATURES);
        assert_eq!(offered & (INFLIGHT | SKIP_DRAIN), INFLIGHT | SKIP_DRAIN);
        let agreed = match self {
            Stop::Inflight => offered & !SKIP_DRAIN,
            Stop::SkipDrain => offered,
        };
        frontend.connection.send_acked(m::SET_PROTOCOL_FEATURES, &agreed.to_ne_bytes(), &[]);
        frontend
    }
}

/// Returns the guest addresses of the request that uses these descriptors: its header, status and data.
fn places(slots: [u16; 3]) -> (u64, u64, u64) {
    let at = REQUESTS + 0x2000 * u64::from(slots[0]);
    (at, at + 16, at + 0x1000)
}

/// Submits a write of a block, or a read of it.
fn submit(frontend: &mut HostileFrontend, slots: [u16; 3], block: u64, write: Option<u8>) {
    let (head, status, data) = places(slots);
    let kind = if write.is_some() { request_type::OUT } else { request_type::IN };
    frontend.memory.write(head, &header(kind, block * BLOCK / 512));
    frontend.memory.write(status, &[0xee]);
    frontend.memory.write(data, &vec![write.unwrap_or(0xdd); BLOCK as usize]);
    let bytes = if write.is_some() { readable(data, BLOCK as u32) } else { writable(data, BLOCK as u32) };
    let queue = &mut frontend.queues[0];
    let head = write_direct(&queue.ring, &slots, &[readable(head, 16), bytes, writable(status, 1)]);
    queue.ring.offer(head);
    queue.publish_and_kick();
}

/// Waits for the completion of the request that uses these descriptors, and checks its status.
fn wait(frontend: &mut HostileFrontend, slots: [u16; 3]) {
    let (head, _) = frontend.queues[0].wait_completion();
    assert_eq!(head, u32::from(slots[0]));
    assert_eq!(frontend.memory.read(places(slots).1, 1), [STATUS_OK]);
}

/// Returns a copy of the guest's memory, as a migration makes it.
fn copy_of(memory: &SharedMemory) -> SharedMemory {
    let copy = SharedMemory::two_regions();
    for region in &memory.regions {
        copy.write(region.guest, &memory.read(region.guest, region.len as usize));
    }
    copy
}

fn copy_of_region(region: &InflightRegion) -> InflightRegion {
    let from = std::fs::File::from(region.file.try_clone().expect("a descriptor"));
    let mut bytes = vec![0; from.metadata().expect("its size").len() as usize];
    from.read_exact_at(&mut bytes, 0).expect("the region");
    let file = rustix::fs::memfd_create("region", MemfdFlags::CLOEXEC).expect("memfd");
    let to = std::fs::File::from(file);
    to.write_all_at(&bytes, 0).expect("the copy");
    InflightRegion { description: region.description.clone(), file: to.into() }
}

fn daemon(file: &HangingFile) -> HostileDaemon {
    let settings = format!("path={},queues=1,lock=shared-migration", file.path().display());
    HostileDaemon::start(1, &[("disk", &settings)])
}

/// Starts a guest with a served request. Returns its in-flight region, too.
fn guest(daemon: &HostileDaemon, stop: Stop) -> (HostileFrontend, InflightRegion) {
    let mut frontend = stop.connect(&daemon.socket("disk"), SharedMemory::two_regions());
    let region = frontend.get_inflight(1);
    frontend.set_inflight(&region);
    frontend.add_queue(RingAddresses::pages(START), DEFAULT_RING_SIZE);
    submit(&mut frontend, [0, 1, 2], 0, Some(0xa0));
    wait(&mut frontend, [0, 1, 2]);
    (frontend, region)
}

#[test]
#[ignore = "needs root"]
fn as_root_requests_in_flight_are_left_to_the_destination() {
    for stop in STOPS {
        let file = HangingFile::mount(1 << 20);
        let (source, destination) = (daemon(&file), daemon(&file));
        let (mut here, region) = guest(&source, stop);
        let hanging = file.hang();
        submit(&mut here, [3, 4, 5], 1, Some(0xa1));
        submit(&mut here, [6, 7, 8], 0, None);
        wait_for("the requests at the storage", || (file.waiting() >= 2).then_some(()));
        assert_eq!(stop.stop(&mut here), 3, "{stop:?}: the position");

        // Both are replayed when the storage has answered here: a write that came later would undo the guest's next.
        let mut there = stop.connect(&destination.socket("disk"), copy_of(&here.memory));
        there.set_inflight(&copy_of_region(&region));
        there.add_queue(RingAddresses::pages(START), DEFAULT_RING_SIZE);
        there.queues[0].ring.avail = here.queues[0].ring.avail;
        wait(&mut there, [0, 1, 2]);
        wait_for("the destination's log", || {
            let waits = |line: &String| line.contains("wait for the disk") && line.contains("another process");
            destination.warnings("disk").iter().any(waits).then_some(())
        });
        assert_eq!(there.queues[0].ring.used(), 1, "{stop:?}: two daemons run requests of one image");
        drop(hanging);
        let mut heads: Vec<u32> = (0..2).map(|_| there.queues[0].wait_completion().0).collect();
        heads.sort_unstable();
        assert_eq!(heads, [3, 6], "{stop:?}");
        assert_eq!(there.memory.read(places([6, 7, 8]).2, 1), [0xa0]);
        submit(&mut there, [0, 1, 2], 1, None);
        wait(&mut there, [0, 1, 2]);
        assert_eq!(there.memory.read(places([0, 1, 2]).2, 1), [0xa1]);
        assert_eq!(here.queues[0].ring.used(), 1, "{stop:?}: completed at the source, too");
        drop((here, there));
        source.stop();
        destination.stop();
    }
}

#[test]
#[ignore = "needs root"]
fn as_root_a_migration_that_fails_goes_on_at_the_source() {
    for stop in STOPS {
        let file = HangingFile::mount(1 << 20);
        let daemon = daemon(&file);
        let (mut guest, region) = guest(&daemon, stop);
        let hanging = file.hang();
        submit(&mut guest, [3, 4, 5], 1, Some(0xa1));
        wait_for("the request at the storage", || (file.waiting() > 0).then_some(()));
        let base = stop.stop(&mut guest);
        guest.set_inflight(&region);
        guest.start_queue(0, base);
        submit(&mut guest, [6, 7, 8], 2, Some(0xa2));
        assert_eq!(guest.queues[0].ring.used(), 1, "{stop:?}: it waits for the storage's answer");
        drop(hanging);
        let mut heads: Vec<u32> = (0..2).map(|_| guest.queues[0].wait_completion().0).collect();
        heads.sort_unstable();
        assert_eq!(heads, [3, 6], "{stop:?}");
        for (block, content) in [(1, 0xa1), (2, 0xa2)] {
            submit(&mut guest, [0, 1, 2], block, None);
            wait(&mut guest, [0, 1, 2]);
            assert_eq!(guest.memory.read(places([0, 1, 2]).2, 1), [content]);
        }
        // Requests that the storage answers in time complete before the stop.
        submit(&mut guest, [0, 1, 2], 0, None);
        wait(&mut guest, [0, 1, 2]);
        stop.stop(&mut guest);
        drop(guest);
        daemon.stop();
    }
}

/// The frontend is gone while its requests are at the storage, and comes again.
#[test]
#[ignore = "needs root"]
fn as_root_a_frontend_that_ends_after_such_a_stop_keeps_nobody_out() {
    let file = HangingFile::mount(1 << 20);
    let daemon = daemon(&file);
    let (mut frontend, _region) = guest(&daemon, Stop::SkipDrain);
    let hanging = file.hang();
    submit(&mut frontend, [3, 4, 5], 1, Some(0xa1));
    wait_for("the request at the storage", || (file.waiting() > 0).then_some(()));
    Stop::SkipDrain.stop(&mut frontend);
    drop(frontend);
    drop(hanging);
    let mut next = HostileFrontend::start(&daemon.socket("disk"), 0, 1);
    submit(&mut next, [0, 1, 2], 1, None);
    wait(&mut next, [0, 1, 2]);
    assert_eq!(next.memory.read(places([0, 1, 2]).2, 1), [0xa1], "the storage has had it");
    drop(next);
    daemon.stop();
}

#[test]
fn it_is_offered_only_with_a_lock_that_is_passed_on() {
    let daemon = HostileDaemon::start(1, &[("ram", "storage=ram,size=1M"), ("file", "storage=file,path=IMAGE")]);
    for disk in ["ram", "file"] {
        let mut frontend = HostileFrontend::connect(&daemon.socket(disk), 0);
        let offered = frontend.connection.request_u64(m::GET_PROTOCOL_FEATURES);
        assert_eq!(offered & (INFLIGHT | SKIP_DRAIN), 0, "{disk}");
        frontend.connection.send(m::SET_PROTOCOL_FEATURES, VERSION, &(offered | INFLIGHT).to_ne_bytes(), &[]);
        assert!(frontend.wait_closed(), "{disk}: a feature that was not offered");
    }
    daemon.stop();
    let rows: &[SessionCase] = &[(
        "GET_VRING_BASE_SKIP_DRAIN that was not offered",
        |t| t.send_after_negotiation(m::GET_VRING_BASE_SKIP_DRAIN, &vring_state_payload(0, 0), &[]),
        Closed,
    )];
    run_sessions(rows);
}
