//! vioscsi: commands and task management of Windows' virtio-scsi driver. Source: vioscsi/vioscsi.c and helper.c.

use super::PAGE;
use super::buffer::Buffer;
use super::device::Device;
use super::rings::DriverRings;
use crate::hostile::frontend::{EVENT_IDX, INDIRECT_DESC};
use crate::hostile::request::{readable, writable};

/// Feature bits that it accepts if they are offered: HOTPLUG, CHANGE, INDIRECT_DESC, EVENT_IDX, VERSION_1,
/// ACCESS_PLATFORM. Packed rings, which it accepts too, are left to tests of rings.
const ACCEPTED: u64 = 1 << 1 | 1 << 2 | INDIRECT_DESC | EVENT_IDX | 1 << 32 | 1 << 33;
/// Its own limit of data segments; it does not look at seg_max.
const MAX_PHYS_SEGMENTS: u64 = 512;

/// Queues. Source: virtio 1.3 section 5.6.2.
const CONTROL: u16 = 0;
const EVENTS: u16 = 1;
const FIRST_REQUESTS: u16 = 2;
/// Event buffers that it gives.
const EVENT_BUFFERS: u16 = 8;
const EVENT_BYTES: u32 = 16;
/// First slot of the event buffers, and the slot of task management. Commands have the others.
const EVENT_SLOTS: u16 = 112;
const CONTROL_SLOT: u16 = 127;

/// Bytes of a command's header with a CDB of 32 bytes, and of its response with 96 bytes of sense data.
const HEADER: u32 = 51;
const CDB_AT: u64 = 19;
const CDB_BYTES: usize = 32;
const RESPONSE: u32 = 12 + 96;
/// Offset of the response in a slot.
const RESPONSE_AT: u64 = 0x100;
/// Bytes of a response before the device writes it.
const POISON: u8 = 0xee;

/// A logical unit reset, the only task management that the driver has.
const TMF_LOGICAL_UNIT_RESET: u32 = 5;

/// The data of a command.
#[derive(Clone, Copy, Debug)]
pub enum ScsiData<'a> {
    /// None.
    None,
    /// To the device.
    Out(&'a Buffer),
    /// From the device.
    In(&'a Buffer),
}

/// How a command ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// virtio-scsi's response: 0 is OK. Source: virtio 1.3 section 5.6.6.1.
    pub response: u8,
    /// SCSI status: 0 is GOOD.
    pub status: u8,
    /// Bytes of the data buffer that were not transferred.
    pub residual: u32,
    /// Sense key, additional sense code and its qualifier. `None`: no sense data.
    pub sense: Option<(u8, u8, u8)>,
}

impl Answer {
    /// Returns true if the command has done what it should.
    pub fn is_good(&self) -> bool {
        (self.response, self.status) == (0, 0)
    }
}

/// The reply to task management: 0 is FUNCTION COMPLETE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaskManagement(pub u8);

/// The driver of one controller.
pub struct Vioscsi {
    rings: DriverRings,
    transfer: u64,
}

impl Vioscsi {
    /// Starts the device with this number of request queues.
    ///
    /// # Panics
    /// When the device refuses, or has limits with which the driver finds no unit.
    pub fn start(mut device: Box<dyn Device>, queues: u16) -> Vioscsi {
        let accepted = device.offered() & ACCEPTED;
        let mut rings = DriverRings::start(device, accepted, FIRST_REQUESTS + queues);
        let config = rings.config(0, 36);
        let word = |at: usize| u32::from_le_bytes(config[at..at + 4].try_into().expect("4 bytes"));
        let max_sectors = u64::from(word(8));
        let mut breaks = MAX_PHYS_SEGMENTS;
        if max_sectors > 0 && max_sectors != 0xffff && breaks * PAGE > max_sectors * 512 {
            breaks = max_sectors * 512 / PAGE;
        }
        // The driver keeps the low byte only.
        let (max_target, max_lun) = (config[30], config[32]);
        assert!(max_target > 0 && max_lun > 0, "no unit is looked for: {max_target}, {max_lun}");
        let mut this = Vioscsi { rings, transfer: breaks * PAGE };
        this.give_event_buffers();
        this
    }

    /// Returns the bytes of the longest transfer.
    pub fn longest_transfer(&self) -> u64 {
        self.transfer
    }

    /// Returns the driver's queues.
    pub fn rings(&mut self) -> &mut DriverRings {
        &mut self.rings
    }

    fn give_event_buffers(&mut self) {
        for slot in EVENT_SLOTS..EVENT_SLOTS + EVENT_BUFFERS {
            let at = self.rings.slot(slot);
            self.rings.submit(EVENTS, slot, &[writable(at, EVENT_BYTES)]);
        }
    }

    /// Submits a command to a target's LUN through request queue `queue`. The tag is the address of the request
    /// in the guest, here that of the slot: it comes again with the next command of the slot.
    ///
    /// # Panics
    /// When the device refuses.
    pub fn submit(&mut self, queue: u16, slot: u16, address: (u8, u8), cdb: &[u8], data: ScsiData<'_>) {
        self.submit_tagged(queue, slot, slot, address, cdb, data);
    }

    /// As [`submit`](Self::submit), with the tag of another slot, whose command the driver has given up.
    ///
    /// # Panics
    /// When the device refuses.
    pub fn submit_tagged(
        &mut self,
        queue: u16,
        slot: u16,
        tagged: u16,
        (target, lun): (u8, u8),
        cdb: &[u8],
        data: ScsiData<'_>,
    ) {
        let at = self.rings.slot(slot);
        let mut header = [0; HEADER as usize];
        header[..8].copy_from_slice(&[1, target, 0, lun, 0, 0, 0, 0]);
        header[8..16].copy_from_slice(&self.rings.slot(tagged).to_le_bytes());
        let bytes = cdb.len().min(CDB_BYTES);
        header[CDB_AT as usize..][..bytes].copy_from_slice(&cdb[..bytes]);
        self.rings.memory().write(at, &header);
        self.rings.memory().write(at + RESPONSE_AT, &[POISON; RESPONSE as usize]);
        let (begin, end) = (readable(at, HEADER), writable(at + RESPONSE_AT, RESPONSE));
        let all = match data {
            ScsiData::None => vec![begin, end],
            ScsiData::Out(buffer) => [&[begin], &buffer.segments(false, u32::MAX)[..], &[end]].concat(),
            ScsiData::In(buffer) => [&[begin, end], &buffer.segments(true, u32::MAX)[..]].concat(),
        };
        self.rings.submit(FIRST_REQUESTS + queue, slot, &all);
    }

    /// Waits for a command. Returns its slot and how it ended.
    ///
    /// # Panics
    /// When none completes, or its response is not written.
    pub fn wait(&mut self, queue: u16) -> (u16, Answer) {
        let (slot, _) = self.rings.wait(FIRST_REQUESTS + queue);
        let response = self.rings.memory().read(self.rings.slot(slot) + RESPONSE_AT, RESPONSE as usize);
        let word = |at: usize| u32::from_le_bytes(response[at..at + 4].try_into().expect("4 bytes"));
        assert_ne!(response[11], POISON, "slot {slot}: no response");
        let (sense_len, sense) = (word(0) as usize, &response[12..]);
        // Fixed format, which D_SENSE 0 asks for. Source: SPC-4 section 4.5.3.
        let sense = (sense_len >= 14).then(|| (sense[2] & 0xf, sense[12], sense[13]));
        (slot, Answer { response: response[11], status: response[10], residual: word(4), sense })
    }

    /// Executes a command by queue 0 and slot 0.
    ///
    /// # Panics
    /// As [`submit`](Self::submit) and [`wait`](Self::wait).
    pub fn execute(&mut self, address: (u8, u8), cdb: &[u8], data: ScsiData<'_>) -> Answer {
        self.submit(0, 0, address, cdb, data);
        let (slot, answer) = self.wait(0);
        assert_eq!(slot, 0, "{cdb:02x?}");
        answer
    }

    /// Sends a logical unit reset of target 0, LUN 0: the driver's answer to a bus reset, of whichever unit.
    ///
    /// # Panics
    /// When the device refuses.
    pub fn send_reset(&mut self) {
        let at = self.rings.slot(CONTROL_SLOT);
        // Type 0, task management; subtype; LUN; tag 0. Source: virtio 1.3 section 5.6.6.2.
        let mut request = [0; 24];
        request[4..8].copy_from_slice(&TMF_LOGICAL_UNIT_RESET.to_le_bytes());
        request[8] = 1;
        self.rings.memory().write(at, &request);
        self.rings.memory().write(at + RESPONSE_AT, &[POISON]);
        self.rings.submit(CONTROL, CONTROL_SLOT, &[readable(at, 24), writable(at + RESPONSE_AT, 1)]);
    }

    /// Waits for the reply.
    ///
    /// # Panics
    /// When there is none.
    pub fn wait_reset(&mut self) -> TaskManagement {
        let (slot, _) = self.rings.wait(CONTROL);
        assert_eq!(slot, CONTROL_SLOT);
        TaskManagement(self.rings.memory().read(self.rings.slot(slot) + RESPONSE_AT, 1)[0])
    }
}
