//! Live migration without a VM: the test's own frontend copies a guest's memory by the dirty log while requests run,
//! stops the queues, and continues at another daemon.

use std::fs::File;
use std::path::Path;

use crate::migrant::{Interface, LOG_ALL, Log, Migrant, image_bytes};
use mqblk_tests::hostile::daemon::HostileDaemon;
use mqblk_tests::hostile::frontend::{DEFAULT_RING_SIZE, HostileFrontend};
use mqblk_tests::hostile::memory::{END, START};
use mqblk_tests::hostile::ring::RingAddresses;
use mqblk_tests::hostile::session::SessionOutcome::{Closed, Refused};
use mqblk_tests::hostile::session::{SessionCase, completes_read, run_sessions};
use mqblk_tests::hostile::socket::message as m;
use rustix::fd::AsFd;

const IMAGE: u64 = 1 << 20;

/// The settings of one daemon's disk.
fn settings(interface: Interface, queues: usize, storage: &str) -> String {
    let interface = match interface {
        Interface::Blk => "virtio-blk",
        Interface::Scsi => "virtio-scsi",
    };
    format!("interface={interface},queues={queues},{storage}")
}

/// Runs requests of all kinds while logging is enabled, disabled and moved to other logs, with copies of dirty pages in
/// between. At each end every byte has been copied.
fn exact(interface: Interface, queues: usize, storage: &str, rounds: u32, seed: u64) {
    let daemon = HostileDaemon::start(2, &[("disk", &settings(interface, queues, storage))]);
    let mut guest = Migrant::start(&daemon.socket("disk"), interface, queues, seed);
    guest.settle();
    for _ in 0..rounds {
        // Some of these complete before logging is enabled, some afterwards.
        guest.submit(24);
        let wait = guest.pick(3) == 0;
        guest.reap(wait);
        guest.start_logging();
        for _ in 0..6 {
            guest.submit(16);
            guest.reap(false);
            match guest.pick(4) {
                0 => guest.switch_log(),
                1 => guest.copy_dirty(),
                _ => {}
            }
        }
        let wait = guest.pick(2) == 0;
        guest.reap(wait);
        // Requests may be in flight at the switchover: they complete before the queues have stopped.
        let bases = guest.stop();
        guest.check_copy();
        // Requests that the device had not pulled complete after the restart of the queues.
        guest.reap(false);
        guest.start_again(&bases);
        guest.submit(8);
        guest.stop_logging();
        guest.reap(true);
    }
    assert!(guest.answers > u64::from(rounds) * 24, "{} answers", guest.answers);
    drop(guest);
    daemon.stop();
}

#[test]
fn every_page_that_is_written_is_marked() {
    let storages = [
        "storage=ram,size=1M,merge=on",
        "path=IMAGE,merge=on",
        "path=IMAGE,direct=off",
        "storage=fault,inner=ram,size=1M,fault-jitter-us=3000,fault-reorder=4,merge=on",
    ];
    for interface in [Interface::Blk, Interface::Scsi] {
        for queues in [1, 4] {
            for (seed, storage) in (1..).zip(storages) {
                exact(interface, queues, storage, 6, seed);
            }
        }
    }
}

/// From one daemon to another and back, with a shared image and requests in flight.
#[test]
fn a_guest_migrates_there_and_back() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    // Without a delay: the destination waits for the lock for seconds before it refuses a start.
    std::thread::scope(|scope| {
        for interface in [Interface::Blk, Interface::Scsi] {
            for queues in [1, 4] {
                let image = folder.path().join(format!("{interface:?}-{queues}"));
                scope.spawn(move || there_and_back(&image, interface, queues));
            }
        }
    });
}

fn there_and_back(image: &Path, interface: Interface, queues: usize) {
    File::create(image).and_then(|file| file.set_len(IMAGE)).unwrap();
    let storage = format!(
        "storage=fault,inner=file,path={},fault-jitter-us=2000,lock=shared-migration,unit-name=moving",
        image.display()
    );
    let storage = if interface == Interface::Blk { storage.replace(",unit-name=moving", "") } else { storage };
    let daemons = [0, 1].map(|_| HostileDaemon::start(1, &[("disk", &settings(interface, queues, &storage))]));
    let mut guest = Migrant::start(&daemons[0].socket("disk"), interface, queues, 7);
    guest.settle();
    for round in 0..4 {
        let (here, there) = (&daemons[round % 2], &daemons[(round + 1) % 2]);
        guest.submit(24);
        guest.start_logging();
        guest.submit(24);
        guest.reap(false);
        assert!(
            !Migrant::is_start_accepted(&there.socket("disk")),
            "round {round}: two daemons run queues of one image"
        );
        there.wait_for_session_end("disk");
        if round == 1 {
            // The migration fails at the end: the guest continues at the source.
            let bases = guest.stop();
            guest.check_copy();
            guest.start_again(&bases);
            guest.stop_logging();
            guest.submit(24);
            guest.start_logging();
            guest.reap(false);
        }
        guest.copy_dirty();
        guest.submit(24);
        let bases = guest.stop();
        guest.check_copy();
        guest = guest.arrive(&there.socket("disk"), &bases);
        // Completions from before the stop are in the copied memory.
        guest.reap(true);
        guest.settle();
        assert!(
            !Migrant::is_start_accepted(&here.socket("disk")),
            "round {round}: two daemons run queues of one image"
        );
        guest.submit(24);
        guest.reap(true);
    }
    guest.stop();
    let model = std::mem::take(&mut guest.model);
    assert!(image_bytes(image, model.len()) == model, "the image is not what was written");
    drop(guest);
    for daemon in daemons {
        daemon.stop();
    }
}

/// Connects a frontend with one queue and with a log.
fn logging(socket: &Path) -> (HostileFrontend, Log) {
    let mut front = HostileFrontend::connect(socket, LOG_ALL);
    let log = Log::new();
    let payload = [log.bytes.to_ne_bytes(), 0_u64.to_ne_bytes()].concat();
    front.connection.send(m::SET_LOG_BASE, 1, &payload, &[log.file.as_fd()]);
    front.connection.receive();
    let features = front.features | LOG_ALL;
    front.connection.send_acked(m::SET_FEATURES, &features.to_ne_bytes(), &[]);
    (front, log)
}

fn log_of(bytes: u64, offset: u64) -> Vec<u8> {
    [bytes.to_ne_bytes(), offset.to_ne_bytes()].concat()
}

#[test]
fn invalid_logs() {
    let rows: &[SessionCase] = &[
        (
            "a log of no bytes",
            |t| t.send_after_negotiation(m::SET_LOG_BASE, &log_of(0, 0), &[Log::new().file.as_fd()]),
            Closed,
        ),
        ("a log without a descriptor", |t| t.send_after_negotiation(m::SET_LOG_BASE, &log_of(96, 0), &[]), Closed),
        (
            "a log that is longer than its file",
            |t| t.send_after_negotiation(m::SET_LOG_BASE, &log_of(97, 0), &[Log::new().file.as_fd()]),
            Closed,
        ),
        (
            "a log at an offset past its file's end",
            |t| t.send_after_negotiation(m::SET_LOG_BASE, &log_of(96, 1), &[Log::new().file.as_fd()]),
            Closed,
        ),
        (
            "a log whose end overflows",
            |t| t.send_after_negotiation(m::SET_LOG_BASE, &log_of(96, u64::MAX - 5), &[Log::new().file.as_fd()]),
            Closed,
        ),
        (
            "a log that can only be read",
            |t| {
                let path = t.folder.join("log-to-read");
                std::fs::write(&path, [0; 96]).unwrap();
                t.send_after_negotiation(m::SET_LOG_BASE, &log_of(96, 0), &[File::open(&path).unwrap().as_fd()]);
            },
            Closed,
        ),
        (
            "a log that is too short for the memory",
            |t| {
                let front = HostileFrontend::connect(&t.socket, LOG_ALL);
                t.send_after_memory(front, m::SET_LOG_BASE, &log_of(95, 0), &[Log::new().file.as_fd()]);
            },
            Closed,
        ),
        (
            "memory that the log is too short for",
            |t| {
                let (front, _log) = logging(&t.socket);
                let more = mqblk_tests::hostile::memory::FileRegion::new(END + (1 << 20), 0x7d00_0000_0000, 4096, 0);
                t.send_after_memory(front, m::ADD_MEM_REG, &more.mem_reg_payload(), &[more.fd()]);
            },
            Refused,
        ),
        (
            "a ring that is logged outside the log",
            |t| {
                let (mut front, _log) = logging(&t.socket);
                front.add_queue(RingAddresses::pages(START), DEFAULT_RING_SIZE);
                let mut payload = front.vring_addr_payload(0, RingAddresses::pages(START));
                payload[4] = 1;
                let end = payload.len();
                payload[end - 8..].copy_from_slice(&(END - 100).to_ne_bytes());
                t.send_after_memory(front, m::SET_VRING_ADDR, &payload, &[]);
            },
            Refused,
        ),
    ];
    run_sessions(rows);
}

/// The only effect is that its marks are lost.
#[test]
fn a_log_that_is_truncated_while_in_use() {
    let mut daemon = HostileDaemon::start(1, &[("disk", "storage=ram,size=1M,queues=1")]);
    let (mut front, log) = logging(&daemon.socket("disk"));
    front.add_queue(RingAddresses::pages(START), DEFAULT_RING_SIZE);
    let mut payload = front.vring_addr_payload(0, RingAddresses::pages(START));
    payload[4] = 1;
    let end = payload.len();
    payload[end - 8..].copy_from_slice(&(START + 0x2000).to_ne_bytes());
    front.connection.send_acked(m::SET_VRING_ADDR, &payload, &[]);
    assert!(completes_read(&mut front, 0));
    log.file.set_len(0).unwrap();
    assert!(completes_read(&mut front, 0));
    front.connection.send_acked(m::SET_FEATURES, &front.features.to_ne_bytes(), &[]);
    assert!(completes_read(&mut front, 0));
    daemon.assert_alive("a log was cut off");
    assert!(daemon.log().contains("cut off the dirty log"), "{}", daemon.log());
    drop(front);
    daemon.stop();
}
