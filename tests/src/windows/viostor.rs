//! viostor: requests of Windows' virtio-blk driver. Source: viostor/virtio_stor.c and virtio_stor_hw_helper.c.

use super::PAGE;
use super::buffer::Buffer;
use super::device::Device;
use super::rings::DriverRings;
use crate::hostile::frontend::{EVENT_IDX, INDIRECT_DESC, SEG_MAX, SIZE_MAX};
use crate::hostile::request::{
    MemorySegment, STATUS_OK, STATUS_POISON, header, range, readable, request_type, writable,
};

/// Feature bits of virtio-blk that it accepts if they are offered: BARRIER, SIZE_MAX, SEG_MAX, GEOMETRY, RO, BLK_SIZE,
/// FLUSH, CONFIG_WCE, MQ, DISCARD, WRITE_ZEROES; INDIRECT_DESC, EVENT_IDX, VERSION_1, ACCESS_PLATFORM, ORDER_PLATFORM.
/// Packed rings, which it accepts too, are left to tests of rings.
const ACCEPTED: u64 = 1
    | SIZE_MAX
    | SEG_MAX
    | 1 << 4
    | 1 << 5
    | 1 << 6
    | 1 << 9
    | 1 << 11
    | 1 << 12
    | 1 << 13
    | 1 << 14
    | INDIRECT_DESC
    | EVENT_IDX
    | 1 << 32
    | 1 << 33
    | 1 << 36;
/// Its own limit of data segments.
const MAX_PHYS_SEGMENTS: u32 = 512;
/// Its own limit of ranges of a discard.
const MAX_DISCARD_SEGMENTS: u32 = 16;
/// Bytes of the serial number.
const SERIAL_BYTES: u32 = 20;

/// Offsets in a slot.
const STATUS: u64 = 0x100;
const SERIAL: u64 = 0x200;
const RANGES: u64 = 0x400;

/// Limits that the driver has derived from the configuration space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ViostorLimits {
    /// Bytes of its longest transfer.
    pub transfer: u64,
    /// Bytes of its longest segment.
    pub segment: u32,
    /// Ranges of a discard.
    pub discard_ranges: u32,
    /// Sectors of a range of a discard.
    pub discard_sectors: u32,
    /// Bytes to which discards are aligned.
    pub discard_alignment: u32,
    /// Bytes of a logical block.
    pub block: u32,
    /// Sectors of 512 bytes.
    pub sectors: u64,
}

/// The driver of one device.
pub struct Viostor {
    rings: DriverRings,
    limits: ViostorLimits,
}

impl Viostor {
    /// Starts the device with this number of queues.
    ///
    /// # Panics
    /// When the device refuses, or has limits with which the driver does not work.
    pub fn start(mut device: Box<dyn Device>, queues: u16) -> Viostor {
        let accepted = device.offered() & ACCEPTED;
        let mut rings = DriverRings::start(device, accepted, queues);
        let limits = limits(&mut rings);
        Viostor { rings, limits }
    }

    /// Returns the limits.
    pub fn limits(&self) -> ViostorLimits {
        self.limits
    }

    /// Returns the accepted feature bits.
    pub fn accepted(&self) -> u64 {
        self.rings.accepted()
    }

    /// Returns the driver's queues.
    pub fn rings(&mut self) -> &mut DriverRings {
        &mut self.rings
    }

    /// Submits a read or a write. Sectors of 512 bytes.
    ///
    /// # Panics
    /// When the device refuses.
    pub fn transfer(&mut self, queue: u16, slot: u16, is_write: bool, sector: u64, buffer: &Buffer) {
        let kind = if is_write { request_type::OUT } else { request_type::IN };
        let data = buffer.segments(!is_write, self.limits.segment);
        self.submit(queue, slot, kind, sector, &data);
    }

    fn submit(&mut self, queue: u16, slot: u16, kind: u32, sector: u64, data: &[MemorySegment]) {
        let at = self.rings.slot(slot);
        self.rings.memory().write(at, &header(kind, sector));
        self.rings.memory().write(at + STATUS, &[STATUS_POISON]);
        let all = [&[readable(at, 16)], data, &[writable(at + STATUS, 1)]].concat();
        self.rings.submit(queue, slot, &all);
    }

    /// Submits a flush, which follows a write with FUA.
    ///
    /// # Panics
    /// When the device refuses.
    pub fn flush(&mut self, queue: u16, slot: u16) {
        self.submit(queue, slot, request_type::FLUSH, 0, &[]);
    }

    /// Submits a discard of ranges of sectors: start and number.
    ///
    /// # Panics
    /// When there are more than the driver sends.
    pub fn unmap(&mut self, queue: u16, slot: u16, ranges: &[(u64, u32)]) {
        assert!(ranges.len() <= self.limits.discard_ranges as usize);
        let at = self.rings.slot(slot) + RANGES;
        let bytes: Vec<u8> = ranges.iter().flat_map(|&(from, count)| range(from, count, 0)).collect();
        self.rings.memory().write(at, &bytes);
        self.submit(queue, slot, request_type::DISCARD, 0, &[readable(at, bytes.len() as u32)]);
    }

    /// Waits for a request. Returns its slot and its status.
    ///
    /// # Panics
    /// When none completes.
    pub fn wait(&mut self, queue: u16) -> (u16, u8) {
        let (slot, _) = self.rings.wait(queue);
        let at = self.rings.slot(slot) + STATUS;
        (slot, self.rings.memory().read(at, 1)[0])
    }

    /// Waits for a request that must succeed. Returns its slot.
    ///
    /// # Panics
    /// When it fails.
    pub fn succeeds(&mut self, queue: u16, what: &str) -> u16 {
        let (slot, status) = self.wait(queue);
        assert_eq!(status, STATUS_OK, "{what}");
        slot
    }

    /// Returns the serial number.
    ///
    /// # Panics
    /// When the request fails.
    pub fn serial(&mut self) -> Vec<u8> {
        let at = self.rings.slot(0) + SERIAL;
        self.submit(0, 0, request_type::GET_ID, 0, &[writable(at, SERIAL_BYTES)]);
        self.succeeds(0, "GET_ID");
        self.rings.memory().read(at, SERIAL_BYTES as usize)
    }

    /// Resets the device and starts it again: the driver's answer to a request without a completion.
    ///
    /// # Panics
    /// When the device refuses.
    pub fn reset_bus(&mut self) {
        self.rings.reset();
    }
}

/// Returns the driver's limits, as it calculates them.
fn limits(rings: &mut DriverRings) -> ViostorLimits {
    let accepted = rings.accepted();
    let config = rings.config(0, 60);
    let word = |at: usize| u32::from_le_bytes(config[at..at + 4].try_into().expect("4 bytes"));
    let (size_max, seg_max) = (if accepted & SIZE_MAX == 0 { PAGE as u32 } else { word(8) }, word(12));
    let mut breaks = u64::from(MAX_PHYS_SEGMENTS);
    if accepted & SEG_MAX != 0 && size_max > 0 && seg_max > 0 {
        breaks = u64::from(seg_max) * u64::from(size_max) / u64::from(size_max).next_multiple_of(PAGE) - 1;
    }
    assert!(breaks > 0, "no transfer: size_max {size_max}, seg_max {seg_max}");
    // Below 4 KiB Windows does not trim.
    let alignment = if word(44) == 0 { 0 } else { word(44).max(8) };
    ViostorLimits {
        transfer: breaks * PAGE,
        segment: if accepted & SIZE_MAX == 0 { u32::MAX } else { size_max },
        discard_ranges: word(40).min(MAX_DISCARD_SEGMENTS),
        discard_sectors: if word(36) == 0 { u32::MAX } else { word(36) },
        discard_alignment: alignment * 512,
        block: word(20),
        sectors: u64::from_le_bytes(config[..8].try_into().expect("8 bytes")),
    }
}
