//! Runs tables of [ring cases](super::ring_fixture) against a real daemon.

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use super::daemon::HostileDaemon;
use super::load::start_neighbour;
use super::request::SECTOR;
use super::ring_fixture::{ExpectedResult, RingFixture, read_disk, write_disk};

/// Bytes of each disk.
pub const DISK_BYTES: usize = 1 << 20;
/// Its sectors.
pub const SECTORS: u64 = (DISK_BYTES / SECTOR) as u64;
/// Used length of a successful read of one sector.
pub const READ_USED_LEN: u32 = SECTOR as u32 + 1;

/// Name, builder of the ring, and expected result.
pub type RingCase = (&'static str, fn(&mut RingFixture<'_>), ExpectedResult);

/// Returns content that differs between neighbouring bytes.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    SmallRng::seed_from_u64(seed).fill(&mut bytes[..]);
    bytes
}

/// Runs a table against the disk `id`, beside a good disk on the same worker.
///
/// # Panics
/// When a ring does not have the expected result.
pub fn run_ring_cases(id: &str, settings: &str, writable: bool, cases: &[RingCase]) {
    let disk = format!("storage=ram,size=1M,queues=2,queue-size=256{settings}");
    let good = "storage=ram,size=1M,queues=1";
    let mut daemon = HostileDaemon::start(1, &[(id, &disk), ("good", good)]);
    let neighbour = start_neighbour(daemon.socket("good"), 1, 1);
    let socket = daemon.socket(id);
    let mut model = if writable { pattern(7, DISK_BYTES) } else { vec![0; DISK_BYTES] };
    if writable {
        write_disk(&socket, &model);
    }
    let mut failed = Vec::new();
    for (name, build, expect) in cases {
        let checked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let mut case = RingFixture::new(&socket, &mut model);
            build(&mut case);
            case.check(*expect);
        }));
        daemon.assert_alive(name);
        neighbour.assert_progress(name);
        let found = read_disk(&socket, DISK_BYTES);
        if checked.is_err() {
            failed.push(format!("{name}: see above"));
        } else if found != model {
            failed.push(format!("{name}: the disk's content is not what it should be"));
        }
        model = found;
    }
    assert!(failed.is_empty(), "{} of {} rings:\n{}", failed.len(), cases.len(), failed.join("\n"));
    neighbour.finish();
    let retired = cases.iter().filter(|row| row.2 == ExpectedResult::Retired).count();
    let lines = daemon.warnings(id).iter().filter(|line| line.contains("queue retired")).count();
    assert!(lines >= retired, "{lines} log lines for {retired} retired queues");
    daemon.stop();
}
