//! Guests whose connections are valid and whose rings are hostile.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use super::{Attack, AttackControl};
use crate::hostile::frontend::{HostileFrontend, SEG_MAX, SIZE_MAX};
use crate::hostile::memory::{FileRegion, SharedMemory};
use crate::hostile::request::{MemorySegment, header, range, readable, request_type, writable, write_indirect};
use crate::hostile::ring::{INDIRECT, NEXT, RawDescriptor, RingAddresses, WRITE};

/// Entries of each ring.
pub const ENTRIES: u16 = 256;
/// Bytes of guest memory: rings, tables, headers and status bytes in the first MiB, small data in the second, large
/// data from `LARGE` on.
const MEMORY: u64 = 8 << 20;
const RING_STRIDE: u64 = 0x4000;
const TABLES: u64 = 0x2_0000;
const TABLE_BYTES: u64 = 64;
const LONG_TABLES: u64 = 0xc_0000;
const LONG_TABLE_BYTES: u64 = 0x1000;
const HEADERS: u64 = 0x6_0000;
const STATUS: u64 = 0x7_0000;
const SMALL: u64 = 1 << 20;
const LARGE: u64 = 4 << 20;
/// Most queues: their rings and tables fit in the first MiB.
const MAX_QUEUES: u16 = 4;
/// Pause of a guest whose rings are full.
const FULL: Duration = Duration::from_micros(200);
/// Time for the device to retire a broken ring.
const BROKEN: Duration = Duration::from_millis(100);
/// Giant requests in flight, and their descriptors of 4 MiB each.
const GIANTS: u16 = 16;
const GIANT_PIECES: usize = 249;
const GIANT_PIECE: u32 = 4 << 20;

/// Type, first sector, and data of a request.
pub type RequestTemplate = (u32, u64, MemorySegment);

/// A guest that keeps all its rings full with requests that it has laid out once. It reads no status and no data, so a
/// request costs it almost no CPU time.
#[derive(Debug)]
pub struct FloodingGuest {
    /// Its frontend.
    pub frontend: HostileFrontend,
    depth: u16,
}

impl FloodingGuest {
    /// Connects and starts `queues` queues.
    ///
    /// # Panics
    /// When the daemon refuses, or guest memory has no room for this many queues.
    pub fn connect(socket: &Path, without: u64, queues: u16) -> FloodingGuest {
        assert!(queues <= MAX_QUEUES, "{queues} queues");
        let memory = SharedMemory { regions: vec![FileRegion::new(0, 0x7f00_0000_0000, MEMORY, 0)] };
        let mut frontend = HostileFrontend::with_memory(socket, without, memory);
        for queue in 0..u64::from(queues) {
            frontend.add_queue(RingAddresses::pages(queue * RING_STRIDE), ENTRIES);
        }
        FloodingGuest { frontend, depth: 0 }
    }

    fn slot(queue: usize, index: u16) -> u64 {
        queue as u64 * u64::from(ENTRIES) + u64::from(index)
    }

    /// Lays out a request as head `index` of a queue: header, pieces, status.
    fn lay_out(&mut self, queue: usize, index: u16, table: u64, kind: u32, sector: u64, pieces: &[MemorySegment]) {
        let slot = FloodingGuest::slot(queue, index);
        let (at, status) = (HEADERS + 16 * slot, STATUS + slot);
        self.frontend.memory.write(at, &header(kind, sector));
        let all = [&[readable(at, 16)], pieces, &[writable(status, 1)]].concat();
        let slots: Vec<u16> = (0..all.len() as u16).collect();
        let descriptor = write_indirect(&self.frontend.memory, table, all.len() as u16, &slots, &all);
        let ring = &mut self.frontend.queues[queue].ring;
        ring.write_descriptor(index, descriptor);
        ring.memory.write(ring.addresses.avail + 4 + 2 * u64::from(index), &index.to_le_bytes());
    }

    /// Lays out a request for each entry of each ring.
    pub fn lay_out_small(&mut self, mut request: impl FnMut(u64) -> RequestTemplate) {
        for queue in 0..self.frontend.queues.len() {
            for index in 0..ENTRIES {
                let slot = FloodingGuest::slot(queue, index);
                let (kind, sector, data) = request(slot);
                let table = TABLES + TABLE_BYTES * slot;
                self.lay_out(queue, index, table, kind, sector, &[data]);
            }
        }
        self.depth = ENTRIES;
    }

    /// Lays out reads of 996 MiB, all to the same 4 MiB.
    fn lay_out_giants(&mut self) {
        for index in 0..ENTRIES {
            let table = LONG_TABLES + LONG_TABLE_BYTES * u64::from(index % GIANTS);
            self.lay_out(0, index, table, request_type::IN, 0, &[writable(LARGE, GIANT_PIECE); GIANT_PIECES]);
        }
        self.depth = GIANTS;
    }

    /// Makes completed entries available again on all queues, and kicks. Returns the number of new requests.
    fn refill(&mut self) -> u16 {
        let mut new = 0;
        for queue in &mut self.frontend.queues {
            let ring = &mut queue.ring;
            // At first all heads, in the order of their layout.
            let first = ring.avail == 0 && ring.last_used == 0;
            let free = if first { self.depth } else { ring.used().wrapping_sub(ring.last_used) };
            // None if the device's index makes no sense.
            if !(1..=self.depth).contains(&free) {
                continue;
            }
            if first {
                ring.avail = free;
            } else {
                let used = ring.memory.read(ring.addresses.used + 4, 8 * usize::from(ENTRIES));
                for _ in 0..free {
                    let at = 8 * usize::from(ring.last_used % ENTRIES);
                    ring.last_used = ring.last_used.wrapping_add(1);
                    ring.offer(u16::from_le_bytes([used[at], used[at + 1]]));
                }
            }
            queue.publish_and_kick();
            new += free;
        }
        new
    }

    fn is_retired(&self) -> bool {
        self.frontend.queues.iter().any(|queue| queue.wait_retired(Duration::ZERO))
    }

    /// Keeps the rings full until the attack is stopped, a queue is retired, or `limit` has passed.
    fn flood(&mut self, control: &AttackControl, limit: Duration) {
        let until = Instant::now() + limit;
        while !control.is_stopped() && Instant::now() < until && !self.is_retired() {
            if self.refill() > 0 {
                control.count();
            }
            control.pause(FULL);
        }
    }
}

const FOREVER: Duration = Duration::from_secs(1 << 30);

/// Reads of one sector on four full queues of 256 entries.
pub fn small_reads(socket: PathBuf) -> Attack {
    Box::new(move |control| {
        let mut guest = FloodingGuest::connect(&socket, 0, MAX_QUEUES);
        guest.lay_out_small(|slot| (request_type::IN, slot % 64, writable(SMALL + 512 * slot, 512)));
        guest.flood(control, FOREVER);
    })
}

/// Flushes, discards and writes of zeroes, 64 MiB each, and small writes, on full queues.
pub fn flushes_and_zeroes(socket: PathBuf, sectors: u64) -> Attack {
    const RANGE_SECTORS: u32 = 64 << 11;
    Box::new(move |control| {
        let mut guest = FloodingGuest::connect(&socket, 0, 2);
        let memory = Arc::clone(&guest.frontend.memory);
        memory.write(LARGE, &range(0, RANGE_SECTORS.min(sectors as u32), 0));
        guest.lay_out_small(|slot| match slot % 16 {
            0 => (request_type::DISCARD, 0, readable(LARGE, 16)),
            1 => (request_type::WRITE_ZEROES, 0, readable(LARGE, 16)),
            2..6 => (request_type::OUT, 8 * (slot % 64), readable(SMALL + 512 * slot, 4096)),
            // A flush has no data: an empty segment keeps the layout.
            _ => (request_type::FLUSH, 0, readable(SMALL, 0)),
        });
        guest.flood(control, FOREVER);
    })
}

/// 16 reads of 996 MiB each, all the time.
pub fn giant_reads(socket: PathBuf) -> Attack {
    Box::new(move |control| {
        let mut guest = FloodingGuest::connect(&socket, SIZE_MAX | SEG_MAX, 1);
        guest.lay_out_giants();
        guest.flood(control, FOREVER);
    })
}

/// Kicks four queues without requests, in bursts: tens of thousands a second.
pub fn kicks(socket: PathBuf) -> Attack {
    const BURST: usize = 16;
    const PAUSE: Duration = Duration::from_millis(2);
    Box::new(move |control| {
        let guest = FloodingGuest::connect(&socket, 0, MAX_QUEUES);
        while !control.is_stopped() {
            for _ in 0..BURST {
                guest.frontend.queues.iter().for_each(|queue| queue.kick.add(1));
            }
            control.count();
            control.pause(PAUSE);
        }
    })
}

/// Rewrites descriptors, tables, headers and available indices while the device reads them. Reconnects when the device
/// has retired a queue.
pub fn rewriting(socket: PathBuf, seed: u64) -> Attack {
    Box::new(move |control| {
        let mut random = SmallRng::seed_from_u64(seed);
        while !control.is_stopped() {
            let mut guest = FloodingGuest::connect(&socket, 0, 2);
            let lay_out = |guest: &mut FloodingGuest| {
                guest.lay_out_small(|slot| match slot % 2 {
                    0 => (request_type::OUT, slot % 64, readable(SMALL + 512 * slot, 512)),
                    _ => (request_type::IN, slot % 64, writable(SMALL + 512 * slot, 512)),
                });
            };
            lay_out(&mut guest);
            let until = Instant::now() + Duration::from_secs(1);
            while !control.is_stopped() && Instant::now() < until && !guest.is_retired() {
                guest.refill();
                for _ in 0..32 {
                    let slot = random.random_range(0..u64::from(ENTRIES));
                    // Half of the time restores valid bytes, so that some requests mix both.
                    let (at, len) = [
                        (TABLES + TABLE_BYTES * slot + 16 * random.random_range(0..3), 16),
                        (HEADERS + 16 * slot, 16),
                        (TABLES + TABLE_BYTES * slot + 8, 4),
                    ][random.random_range(0..3)];
                    let right = guest.frontend.memory.read(at, len);
                    let wrong: Vec<u8> = right.iter().map(|byte| byte ^ (1 << random.random_range(0..8))).collect();
                    guest.frontend.memory.write(at, &wrong);
                    guest.frontend.memory.write(at, &right);
                }
                control.count();
            }
        }
    })
}

/// Broken rings, each on a connection of its own.
pub fn broken_rings(socket: PathBuf, seed: u64) -> Attack {
    Box::new(move |control| {
        let mut random = SmallRng::seed_from_u64(seed);
        while !control.is_stopped() {
            let mut guest = FloodingGuest::connect(&socket, SIZE_MAX | SEG_MAX, 1);
            break_ring(&mut guest, &mut random);
            guest.frontend.queues[0].wait_retired(BROKEN);
            control.count();
        }
    })
}

/// Publishes a ring that breaks one rule of virtio 1.3 section 2.7.
fn break_ring(guest: &mut FloodingGuest, random: &mut SmallRng) {
    let queue = &mut guest.frontend.queues[0];
    let ring = &mut queue.ring;
    let any = |random: &mut SmallRng| RawDescriptor {
        address: random.random_range(0..2 * MEMORY),
        len: [0, 1, 16, 512, 4 << 20, u32::MAX][random.random_range(0..6)],
        flags: random.random_range(0..8),
        next: random.random_range(0..2 * ENTRIES),
    };
    match random.random_range(0..6) {
        // A loop of two descriptors.
        0 => {
            for (index, next) in [(0, 1), (1, 0)] {
                ring.write_descriptor(index, RawDescriptor { address: SMALL, len: 16, flags: NEXT, next });
            }
            ring.offer(0);
        }
        // An endless chain of all descriptors.
        1 => {
            for index in 0..ENTRIES {
                let next = (index + 1) % ENTRIES;
                ring.write_descriptor(index, RawDescriptor { address: LARGE, len: 4096, flags: NEXT | WRITE, next });
            }
            ring.offer(0);
        }
        // An index that jumps over the whole ring.
        2 => ring.avail = ring.avail.wrapping_add(ENTRIES + random.random_range(1..30_000)),
        // Heads that do not exist.
        3 => (0..ENTRIES).for_each(|_| ring.offer(random.random_range(ENTRIES..=u16::MAX))),
        // Tables of any length, in tables.
        4 => {
            for entry in 0..64 {
                ring.memory.write(LONG_TABLES + 16 * entry, &any(random).bytes());
            }
            let len = random.random_range(0..=u32::from(u16::MAX));
            ring.write_descriptor(0, RawDescriptor { address: LONG_TABLES, len, flags: INDIRECT, next: 0 });
            ring.offer(0);
        }
        // Any descriptors at all.
        _ => {
            for index in 0..ENTRIES {
                ring.write_descriptor(index, any(random));
                ring.offer(index);
            }
        }
    }
    queue.publish_and_kick();
}

/// Truncates memory while requests to it are in flight, then reconnects.
pub fn cut_memory(socket: PathBuf) -> Attack {
    Box::new(move |control| {
        while !control.is_stopped() {
            let mut guest = FloodingGuest::connect(&socket, 0, 2);
            guest.lay_out_small(|slot| (request_type::IN, slot % 64, writable(SMALL + 512 * slot, 512)));
            guest.refill();
            let file = guest.frontend.memory.regions[0].file.try_clone().expect("a descriptor");
            file.set_len(0).expect("shorter");
            // A write makes the file longer again: only kicks from here on.
            guest.frontend.queues.iter().for_each(|queue| queue.kick.add(1));
            guest.frontend.queues[0].wait_retired(BROKEN);
            control.count();
        }
    })
}

/// Stops and starts queues with full rings.
pub fn stops_and_starts(socket: PathBuf) -> Attack {
    Box::new(move |control| {
        let mut guest = FloodingGuest::connect(&socket, 0, 2);
        guest.lay_out_small(|slot| (request_type::IN, slot % 64, writable(SMALL + 512 * slot, 512)));
        while !control.is_stopped() {
            guest.refill();
            for index in 0..2 {
                let base = guest.frontend.stop_queue(index);
                guest.frontend.start_queue(index, base);
            }
            control.count();
        }
    })
}
