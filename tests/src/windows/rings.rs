//! The driver's queues: requests with indirect tables, as Windows' drivers make all of theirs.

use std::sync::Arc;

use super::device::Device;
use crate::hostile::memory::SharedMemory;
use crate::hostile::request::{MemorySegment, write_indirect};
use crate::hostile::ring::{HostileRing, RingAddresses};
use crate::hostile::wait_for;

/// Entries of a queue.
const ENTRIES: u16 = 128;
/// Most queues of a device.
const QUEUES: u16 = 8;
/// Guest address of the rings, and bytes of each.
const RINGS: u64 = 1 << 20;
const RING_BYTES: u64 = 0x3000;
/// Guest address of the slots.
const SLOTS: u64 = 2 << 20;
/// Bytes of a slot: its header, response and ranges, then its table of at most 515 descriptors.
const SLOT_BYTES: u64 = 0x4000;
const TABLE: u64 = 0x1000;

/// A started device with its queues. A slot is a request's memory and its ring entry: 0 to 127.
pub struct DriverRings {
    device: Box<dyn Device>,
    memory: Arc<SharedMemory>,
    accepted: u64,
    rings: Vec<HostileRing>,
}

impl DriverRings {
    /// Accepts feature bits and starts the device with this number of queues.
    ///
    /// # Panics
    /// When the device refuses.
    pub fn start(device: Box<dyn Device>, accepted: u64, queues: u16) -> DriverRings {
        assert!(queues <= QUEUES, "found {queues} queues, expected at most {QUEUES}");
        let memory = device.memory();
        let at = |index: u16| RingAddresses::pages(RINGS + RING_BYTES * u64::from(index));
        let rings = (0..queues).map(|index| HostileRing::new(Arc::clone(&memory), at(index), ENTRIES)).collect();
        let mut this = DriverRings { device, memory, accepted, rings };
        this.start_queues();
        this
    }

    fn start_queues(&mut self) {
        self.memory.write(RINGS, &vec![0; usize::from(QUEUES) * RING_BYTES as usize]);
        for ring in &mut self.rings {
            (ring.avail, ring.last_used) = (0, 0);
        }
        let addresses: Vec<RingAddresses> = self.rings.iter().map(|ring| ring.addresses).collect();
        self.device.start(self.accepted, &addresses, ENTRIES);
    }

    /// Resets the device and starts it again, as a driver that has lost patience. Requests in flight are forgotten.
    ///
    /// # Panics
    /// When the device refuses.
    pub fn reset(&mut self) {
        self.device.reset();
        self.start_queues();
    }

    /// Returns the guest's memory.
    pub fn memory(&self) -> &Arc<SharedMemory> {
        &self.memory
    }

    /// Returns `len` bytes of the configuration space.
    ///
    /// # Panics
    /// When the device refuses.
    pub fn config(&mut self, offset: u32, len: u32) -> Vec<u8> {
        self.device.config(offset, len)
    }

    /// Returns the accepted feature bits.
    pub fn accepted(&self) -> u64 {
        self.accepted
    }

    /// Returns the guest address of a slot's first page.
    pub fn slot(&self, slot: u16) -> u64 {
        SLOTS + SLOT_BYTES * u64::from(slot)
    }

    /// Makes a request of these segments available, and notifies the device.
    ///
    /// # Panics
    /// When the device refuses.
    pub fn submit(&mut self, queue: u16, slot: u16, segments: &[MemorySegment]) {
        let slots: Vec<u16> = (0..segments.len() as u16).collect();
        let table = self.slot(slot) + TABLE;
        let descriptor = write_indirect(&self.memory, table, segments.len() as u16, &slots, segments);
        let ring = &mut self.rings[usize::from(queue)];
        ring.write_descriptor(slot, descriptor);
        ring.offer(slot);
        ring.publish();
        self.device.notify(queue);
    }

    /// Waits for the next completion. Returns the request's slot, and the number of bytes that the device has written.
    ///
    /// # Panics
    /// When none comes.
    pub fn wait(&mut self, queue: u16) -> (u16, u32) {
        let ring = &mut self.rings[usize::from(queue)];
        let (head, len) = wait_for("a completion", || ring.take());
        // The driver asks for an interrupt at the next one.
        ring.set_used_event(ring.last_used);
        (u16::try_from(head).expect("a slot"), len)
    }
}
