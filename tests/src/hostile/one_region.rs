//! A guest with one region of memory and one queue. Requests have indirect tables: chains of any length on few ring
//! entries.

use std::path::Path;

use super::frontend::{HostileFrontend, INDIRECT_DESC};
use super::memory::{FileRegion, SharedMemory};
use super::request::{MemorySegment, header, readable, writable, write_indirect};
use super::ring::RingAddresses;

/// Bytes of guest memory: the ring, headers, status bytes and tables, then [`DATA`].
pub const MEMORY: u64 = 8 << 20;
/// Guest address of the data, and its bytes to the end of memory.
pub const DATA: u64 = 4 << 20;
/// Entries of the ring.
pub const ENTRIES: u16 = 64;

const HEADERS: u64 = 0x8_0000;
const STATUS: u64 = 0x8_f000;
const TABLES: u64 = 0x9_0000;
/// Room for 512 descriptors.
const TABLE_BYTES: u64 = 0x2000;

/// Returns the guest's memory.
pub fn memory() -> SharedMemory {
    SharedMemory { regions: vec![FileRegion::new(0, 0x7f00_0000_0000, MEMORY, 0)] }
}

/// Connects, without the features `without`, and starts the queue.
///
/// # Panics
/// When the daemon rejects it, or has no indirect descriptors.
pub fn connect(socket: &Path, without: u64) -> HostileFrontend {
    let mut frontend = HostileFrontend::with_memory(socket, without, memory());
    assert_ne!(frontend.features & INDIRECT_DESC, 0);
    frontend.add_queue(RingAddresses::pages(0), ENTRIES);
    frontend
}

/// Offers a request of `pieces` as chain `index`, unpublished.
pub fn offer(frontend: &mut HostileFrontend, index: u16, kind: u32, sector: u64, pieces: &[MemorySegment]) {
    let (at, status) = (HEADERS + 16 * u64::from(index), STATUS + u64::from(index));
    frontend.memory.write(at, &header(kind, sector));
    frontend.memory.write(status, &[0xee]);
    let all = [&[readable(at, 16)], pieces, &[writable(status, 1)]].concat();
    let slots: Vec<u16> = (0..all.len() as u16).collect();
    let table = TABLES + TABLE_BYTES * u64::from(index);
    let descriptor = write_indirect(&frontend.memory, table, all.len() as u16, &slots, &all);
    let ring = &mut frontend.queues[0].ring;
    ring.write_descriptor(index, descriptor);
    ring.offer(index);
}

/// Returns the status of chain `index`.
pub fn status(frontend: &HostileFrontend, index: u16) -> u8 {
    statuses(frontend, usize::from(index) + 1)[usize::from(index)]
}

/// Returns the status of the first `count` chains.
pub fn statuses(frontend: &HostileFrontend, count: usize) -> Vec<u8> {
    frontend.memory.read(STATUS, count)
}
