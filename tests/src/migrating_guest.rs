//! A guest, as far as its disks see it, that migrates from one daemon to another with the state of its devices
//! (SET_DEVICE_STATE_FD, CHECK_DEVICE_STATE). Source: QEMU's `vhost-user.rst`, "Migrating back-end state".

use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::sync::Arc;

use rustix::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::hostile::frontend::{DEFAULT_RING_SIZE, FrontendQueue, HostileFrontend, QUEUE_SHARE, RING_PACKED};
use crate::hostile::memory::START;
use crate::hostile::request::{header, readable, request_type, writable, write_direct};
use crate::hostile::ring::RingAddresses;
use crate::hostile::socket::{Received, VERSION, VhostUserSocket, message as m, vring_state_payload};
use crate::hostile::wait_for;

/// SET_DEVICE_STATE_FD direction: from the backend to the frontend.
pub const SAVE: u32 = 0;
/// SET_DEVICE_STATE_FD direction: from the frontend to the backend.
pub const LOAD: u32 = 1;
/// Reply to SET_DEVICE_STATE_FD: accepted, and the backend uses the frontend's descriptor.
pub const REPLY_ACCEPTED: u64 = 0x100;
/// Reply to SET_DEVICE_STATE_FD: rejected.
pub const REPLY_REJECTED: u64 = 0x101;

/// Index of the first request queue of a controller.
const FIRST_REQUEST_QUEUE: usize = 2;
/// Addresses of a SCSI command, its response and its data: behind the third ring.
const COMMAND: u64 = START + 2 * QUEUE_SHARE + 0x4000;
const RESPONSE: u64 = COMMAND + 0x400;
const DATA: u64 = COMMAND + 0x1000;

/// Creates a pipe. Returns its reading and its writing end.
///
/// # Panics
/// When the process is out of descriptors.
pub fn pipe() -> (File, File) {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    (File::from(OwnedFd::from(reader)), File::from(OwnedFd::from(writer)))
}

/// Sends SET_DEVICE_STATE_FD. Returns the reply.
///
/// # Panics
/// When there is no reply.
pub fn set_device_state_fd(connection: &mut VhostUserSocket, direction: u32, file: BorrowedFd<'_>) -> u64 {
    connection.send(m::SET_DEVICE_STATE_FD, VERSION, &vring_state_payload(direction, 0), &[file]);
    match connection.receive() {
        Received::Reply { message: m::SET_DEVICE_STATE_FD, payload } => {
            u64::from_ne_bytes(payload.try_into().expect("8 bytes"))
        }
        other => panic!("SET_DEVICE_STATE_FD: {other:?}"),
    }
}

/// Sends CHECK_DEVICE_STATE. Returns true if the transfer succeeded.
///
/// # Panics
/// When there is no reply.
pub fn check_device_state(connection: &mut VhostUserSocket) -> bool {
    connection.request_u64(m::CHECK_DEVICE_STATE) == 0
}

/// Saves the state of a device whose queues are stopped.
///
/// # Panics
/// When the daemon does not send it.
pub fn save_device_state(connection: &mut VhostUserSocket) -> String {
    let (mut reader, writer) = pipe();
    assert_eq!(set_device_state_fd(connection, SAVE, writer.as_fd()), REPLY_ACCEPTED);
    drop(writer);
    let mut text = String::new();
    reader.read_to_string(&mut text).expect("the state");
    assert!(check_device_state(connection), "the daemon says that it could not give it");
    text
}

/// Loads the state of a device whose queues are stopped. Returns true if the daemon accepts it.
///
/// # Panics
/// When the daemon rejects SET_DEVICE_STATE_FD.
pub fn load_device_state(connection: &mut VhostUserSocket, text: &[u8]) -> bool {
    let (reader, mut writer) = pipe();
    assert_eq!(set_device_state_fd(connection, LOAD, reader.as_fd()), REPLY_ACCEPTED);
    drop(reader);
    // The daemon may stop reading before the end.
    let _ = writer.write_all(text);
    drop(writer);
    check_device_state(connection)
}

/// The time at which a VMM loads the state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadOrder {
    /// Before everything else, as QEMU does.
    First,
    /// After the features and the memory table, before the queues start.
    Last,
    /// Never: a VMM without this feature.
    Never,
}

/// Result of a SCSI command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScsiResult {
    /// SCSI status.
    pub status: u8,
    /// Sense key and additional sense codes, of fixed or descriptor format; `None` without sense data.
    pub sense: Option<(u8, u8, u8)>,
    /// All sense data.
    pub sense_data: Vec<u8>,
    /// Data-in, as much as was requested.
    pub data: Vec<u8>,
}

impl ScsiResult {
    /// Returns true if the status is GOOD.
    pub fn is_good(&self) -> bool {
        self.status == 0
    }
}

/// A guest with one vhost-user device.
#[derive(Debug)]
pub struct MigratingGuest {
    /// Its VMM's end of the connection.
    pub frontend: HostileFrontend,
    /// Size of its driver's sense buffer in bytes.
    pub sense_size: u32,
}

impl MigratingGuest {
    /// Connects and starts `queues` queues.
    pub fn connect(socket: &Path, queues: u16) -> MigratingGuest {
        MigratingGuest { frontend: HostileFrontend::start(socket, 0, queues), sense_size: 96 }
    }

    /// Stops the queues. Returns their available indices.
    pub fn stop_queues(&mut self) -> Vec<u16> {
        (0..self.frontend.queues.len() as u32).map(|index| self.frontend.stop_queue(index)).collect()
    }

    /// Starts the queues again at the same daemon.
    pub fn restart_queues(&mut self, bases: &[u16]) {
        (0..).zip(bases).for_each(|(index, base)| self.frontend.start_queue(index, *base));
    }

    /// Saves the state of the device, whose queues are stopped.
    pub fn save_state(&mut self) -> String {
        save_device_state(&mut self.frontend.connection)
    }

    /// Migrates to another daemon with this state. Returns `None` if the daemon rejects it.
    ///
    /// # Panics
    /// When the daemon rejects anything else.
    pub fn migrate_to(&self, socket: &Path, bases: &[u16], state: &str, order: LoadOrder) -> Option<MigratingGuest> {
        let mut connection = VhostUserSocket::connect(socket);
        let features = match order {
            LoadOrder::Last | LoadOrder::Never => connection.negotiate(0),
            LoadOrder::First => {
                connection.send(m::SET_OWNER, VERSION, &[], &[]);
                let features = connection.request_u64(m::GET_FEATURES) & !RING_PACKED;
                let protocol = connection.request_u64(m::GET_PROTOCOL_FEATURES);
                connection.send(m::SET_PROTOCOL_FEATURES, VERSION, &protocol.to_ne_bytes(), &[]);
                if !load_device_state(&mut connection, state.as_bytes()) {
                    return None;
                }
                connection.send_acked(m::SET_FEATURES, &features.to_ne_bytes(), &[]);
                features
            }
        };
        let memory = Arc::clone(&self.frontend.memory);
        let mut front = HostileFrontend { connection, memory, queues: Vec::new(), features };
        front.set_memory_table();
        if order == LoadOrder::Last && !load_device_state(&mut front.connection, state.as_bytes()) {
            return None;
        }
        for (index, base) in (0..).zip(bases) {
            let old = &self.frontend.queues[index as usize].ring;
            let mut queue = FrontendQueue::new(&front.memory, old.addresses, old.size);
            (queue.ring.avail, queue.ring.last_used) = (old.avail, old.last_used);
            front.queues.push(queue);
            front.start_queue(index, *base);
        }
        Some(MigratingGuest { frontend: front, sense_size: self.sense_size })
    }

    /// Reads a sector of a virtio-blk disk through its first queue.
    ///
    /// # Panics
    /// When the read does not succeed.
    pub fn read_sector(&mut self, sector: u64) -> Vec<u8> {
        self.frontend.memory.write(COMMAND, &header(request_type::IN, sector));
        let queue = &mut self.frontend.queues[0];
        let segments = [readable(COMMAND, 16), writable(DATA, 512), writable(RESPONSE, 1)];
        let head = write_direct(&queue.ring, &[0, 1, 2], &segments);
        queue.ring.offer(head);
        queue.publish_and_kick();
        queue.wait_completion();
        assert_eq!(self.frontend.memory.read(RESPONSE, 1), [0]);
        self.frontend.memory.read(DATA, 512)
    }

    /// Posts event buffers, as heads 0 to 3 of the event queue.
    pub fn post_events(&mut self) {
        let queue = &mut self.frontend.queues[1];
        for entry in 0..4_u16 {
            let head = write_direct(&queue.ring, &[entry], &[writable(event_address(entry.into()), 16)]);
            queue.ring.offer(head);
        }
        queue.publish_and_kick();
    }

    /// Waits for the next event.
    ///
    /// # Panics
    /// When none comes.
    pub fn next_event(&mut self) -> [u8; 16] {
        let (head, len) = self.frontend.queues[1].wait_completion();
        assert_eq!(len, 16);
        self.frontend.memory.read(event_address(head.into()), 16).try_into().expect("16 bytes")
    }

    /// Returns true if an event is pending.
    pub fn has_event(&self) -> bool {
        let ring = &self.frontend.queues[1].ring;
        ring.used() != ring.last_used
    }

    /// Runs one SCSI command, with data-out `out` or `room` bytes of data-in.
    ///
    /// # Panics
    /// When it does not complete.
    pub fn run_scsi(&mut self, target: u8, cdb: &[u8], out: &[u8], room: u32) -> ScsiResult {
        let mut command = vec![1, target, 0, 0, 0, 0, 0, 0];
        command.extend([0; 11 + 32]);
        command[19..19 + cdb.len()].copy_from_slice(cdb);
        let memory = Arc::clone(&self.frontend.memory);
        memory.write(COMMAND, &command);
        memory.write(RESPONSE, &[0xee; 108]);
        let mut segments = vec![readable(COMMAND, command.len() as u32)];
        if !out.is_empty() {
            memory.write(DATA, out);
            segments.push(readable(DATA, out.len() as u32));
        }
        segments.push(writable(RESPONSE, 12 + self.sense_size));
        if room > 0 {
            segments.push(writable(DATA, room));
        }
        let queue = &mut self.frontend.queues[FIRST_REQUEST_QUEUE];
        let head = write_direct(&queue.ring, &[0, 1, 2], &segments);
        queue.ring.offer(head);
        queue.publish_and_kick();
        wait_for("an answer", || queue.ring.take());
        let response = memory.read(RESPONSE, 108);
        assert_eq!(response[11], 0, "response");
        let len = u32::from_le_bytes([response[0], response[1], response[2], response[3]]) as usize;
        let sense_data = response[12..12 + len].to_vec();
        let sense = match sense_data.first().map(|code| code & 0x7f) {
            None => None,
            Some(0x72) => Some((sense_data[1] & 15, sense_data[2], sense_data[3])),
            Some(_) => Some((sense_data[2] & 15, sense_data[12], sense_data[13])),
        };
        ScsiResult { status: response[10], sense, sense_data, data: memory.read(DATA, room as usize) }
    }

    /// Runs TEST UNIT READY until it succeeds. Returns the additional sense codes of the unit attentions.
    ///
    /// # Panics
    /// When it fails for another reason, or the unit attentions do not end.
    pub fn take_unit_attentions(&mut self, target: u8) -> Vec<(u8, u8)> {
        let mut codes = Vec::new();
        loop {
            let ScsiResult { status, sense, .. } = self.run_scsi(target, &[0; 6], &[], 0);
            match (status, sense) {
                (0, _) => return codes,
                (2, Some((6, asc, ascq))) => codes.push((asc, ascq)),
                other => panic!("target {target}: {other:?}"),
            }
            assert!(codes.len() < 16, "{codes:?}");
        }
    }
}

fn event_address(entry: u64) -> u64 {
    START + QUEUE_SHARE + 0x4000 + 64 * entry
}

/// Returns the ring addresses of queue `index`.
pub fn ring_addresses(index: u16) -> RingAddresses {
    RingAddresses::pages(START + QUEUE_SHARE * u64::from(index))
}

/// Entries of a ring.
pub const ENTRIES: u16 = DEFAULT_RING_SIZE;

/// Returns a descriptor that is not a pipe.
///
/// # Panics
/// When /dev/zero cannot be opened.
pub fn open_dev_zero() -> OwnedFd {
    OwnedFd::from(File::open("/dev/zero").expect("/dev/zero"))
}
