//! A guest, as far as its disks see it, that migrates from one daemon to another with the state of its devices (SET_DEVICE_STATE_FD,
//! CHECK_DEVICE_STATE). Source: QEMU's `vhost-user.rst`, "Migrating back-end state".

use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::sync::Arc;

use rustix::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::hostile::front_end::{FrontEnd, QUEUE_SHARE, Queue, RING};
use crate::hostile::memory::START;
use crate::hostile::request::{direct, header, kind, readable, writable};
use crate::hostile::ring::Places;
use crate::hostile::socket::{Connection, Heard, VERSION, message as m, state};
use crate::hostile::wait_for;

/// SET_DEVICE_STATE_FD direction: from the backend to the frontend.
pub const SAVE: u32 = 0;
/// SET_DEVICE_STATE_FD direction: from the frontend to the backend.
pub const LOAD: u32 = 1;
/// Reply to SET_DEVICE_STATE_FD: accepted, and the backend uses the frontend's descriptor.
pub const TAKEN: u64 = 0x100;
/// Reply to SET_DEVICE_STATE_FD: rejected.
pub const NOT_TAKEN: u64 = 0x101;

/// Index of the first request queue of a controller.
const REQUESTS: usize = 2;
/// Addresses of a SCSI command, its response and its data: behind the third ring.
const COMMAND: u64 = START + 2 * QUEUE_SHARE + 0x4000;
const ANSWER: u64 = COMMAND + 0x400;
const DATA: u64 = COMMAND + 0x1000;

/// Creates a pipe. Returns its reading and its writing end.
///
/// # Panics
/// When the process is out of descriptors.
pub fn pipe() -> (File, File) {
    let (reader, writer) = rustix::pipe::pipe().expect("a pipe");
    (File::from(reader), File::from(writer))
}

/// Sends SET_DEVICE_STATE_FD. Returns the reply.
///
/// # Panics
/// When there is no reply.
pub fn set(connection: &mut Connection, direction: u32, file: BorrowedFd<'_>) -> u64 {
    connection.send(m::SET_DEVICE_STATE_FD, VERSION, &state(direction, 0), &[file]);
    match connection.hear() {
        Heard::Reply { message: m::SET_DEVICE_STATE_FD, payload } => {
            u64::from_ne_bytes(payload.try_into().expect("8 bytes"))
        }
        other => panic!("SET_DEVICE_STATE_FD: {other:?}"),
    }
}

/// Sends CHECK_DEVICE_STATE. Returns true if the transfer succeeded.
///
/// # Panics
/// When there is no reply.
pub fn check(connection: &mut Connection) -> bool {
    connection.ask_u64(m::CHECK_DEVICE_STATE) == 0
}

/// Saves the state of a device whose queues are stopped.
///
/// # Panics
/// When the daemon does not send it.
pub fn save(connection: &mut Connection) -> String {
    let (mut reader, writer) = pipe();
    assert_eq!(set(connection, SAVE, writer.as_fd()), TAKEN);
    drop(writer);
    let mut text = String::new();
    reader.read_to_string(&mut text).expect("the state");
    assert!(check(connection), "the daemon says that it could not give it");
    text
}

/// Loads the state of a device whose queues are stopped. Returns true if the daemon accepts it.
///
/// # Panics
/// When the daemon rejects SET_DEVICE_STATE_FD.
pub fn load(connection: &mut Connection, text: &[u8]) -> bool {
    let (reader, mut writer) = pipe();
    assert_eq!(set(connection, LOAD, reader.as_fd()), TAKEN);
    drop(reader);
    // The daemon may stop reading before the end.
    let _ = writer.write_all(text);
    drop(writer);
    check(connection)
}

/// When a VMM loads the state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Before everything else, as QEMU does.
    First,
    /// After the features and the memory table, before the queues start.
    Last,
    /// Never: a VMM without this feature.
    Never,
}

/// Result of a SCSI command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ended {
    /// SCSI status.
    pub status: u8,
    /// Sense key and additional sense codes, of fixed or descriptor format; `None` without sense data.
    pub sense: Option<(u8, u8, u8)>,
    /// All sense data.
    pub sense_data: Vec<u8>,
    /// Data-in, as much as was requested.
    pub data: Vec<u8>,
}

impl Ended {
    /// Returns true if the status is GOOD.
    pub fn is_good(&self) -> bool {
        self.status == 0
    }
}

/// A guest with one vhost-user device.
#[derive(Debug)]
pub struct Traveller {
    /// Its VMM's end of the connection.
    pub front: FrontEnd,
    /// Size of its driver's sense buffer in bytes.
    pub sense_size: u32,
}

impl Traveller {
    /// Connects and starts `queues` queues.
    pub fn start(socket: &Path, queues: u16) -> Traveller {
        Traveller { front: FrontEnd::start(socket, 0, queues), sense_size: 96 }
    }

    /// Stops the queues. Returns their available indices.
    pub fn stop(&mut self) -> Vec<u16> {
        (0..self.front.queues.len() as u32).map(|index| self.front.stop_queue(index)).collect()
    }

    /// Starts the queues again at the same daemon.
    pub fn start_again(&mut self, bases: &[u16]) {
        (0..).zip(bases).for_each(|(index, base)| self.front.start_queue(index, *base));
    }

    /// Saves the state of the device, whose queues are stopped.
    pub fn save(&mut self) -> String {
        save(&mut self.front.connection)
    }

    /// Migrates to another daemon with this state. Returns `None` if the daemon rejects it.
    ///
    /// # Panics
    /// When the daemon rejects anything else.
    pub fn arrive(&self, socket: &Path, bases: &[u16], state: &str, order: Order) -> Option<Traveller> {
        let mut connection = Connection::open(socket);
        let features = match order {
            Order::Last | Order::Never => connection.negotiate(0),
            Order::First => {
                connection.send(m::SET_OWNER, VERSION, &[], &[]);
                let features = connection.ask_u64(m::GET_FEATURES);
                let protocol = connection.ask_u64(m::GET_PROTOCOL_FEATURES);
                connection.send(m::SET_PROTOCOL_FEATURES, VERSION, &protocol.to_ne_bytes(), &[]);
                if !load(&mut connection, state.as_bytes()) {
                    return None;
                }
                connection.tell(m::SET_FEATURES, &features.to_ne_bytes(), &[]);
                features
            }
        };
        let memory = Arc::clone(&self.front.memory);
        let mut front = FrontEnd { connection, memory, queues: Vec::new(), features };
        front.tell_memory();
        if order == Order::Last && !load(&mut front.connection, state.as_bytes()) {
            return None;
        }
        for (index, base) in (0..).zip(bases) {
            let old = &self.front.queues[index as usize].ring;
            let mut queue = Queue::new(&front.memory, old.at, old.size);
            (queue.ring.avail, queue.ring.taken) = (old.avail, old.taken);
            front.queues.push(queue);
            front.start_queue(index, *base);
        }
        Some(Traveller { front, sense_size: self.sense_size })
    }

    /// Reads a sector of a virtio-blk disk through its first queue.
    ///
    /// # Panics
    /// When the read does not succeed.
    pub fn read_sector(&mut self, sector: u64) -> Vec<u8> {
        self.front.memory.write(COMMAND, &header(kind::IN, sector));
        let queue = &mut self.front.queues[0];
        let segments = [readable(COMMAND, 16), writable(DATA, 512), writable(ANSWER, 1)];
        let head = direct(&queue.ring, &[0, 1, 2], &segments);
        queue.ring.offer(head);
        queue.go();
        queue.answer();
        assert_eq!(self.front.memory.read(ANSWER, 1), [0]);
        self.front.memory.read(DATA, 512)
    }

    /// Posts event buffers, as heads 0 to 3 of the event queue.
    pub fn post_events(&mut self) {
        let queue = &mut self.front.queues[1];
        for entry in 0..4_u16 {
            let head = direct(&queue.ring, &[entry], &[writable(event_at(entry.into()), 16)]);
            queue.ring.offer(head);
        }
        queue.go();
    }

    /// Waits for the next event.
    ///
    /// # Panics
    /// When none comes.
    pub fn event(&mut self) -> [u8; 16] {
        let (head, len) = self.front.queues[1].answer();
        assert_eq!(len, 16);
        self.front.memory.read(event_at(head.into()), 16).try_into().expect("16 bytes")
    }

    /// Returns true if an event is pending.
    pub fn has_event(&self) -> bool {
        let ring = &self.front.queues[1].ring;
        ring.used() != ring.taken
    }

    /// Runs one SCSI command, with data-out `out` or `room` bytes of data-in.
    ///
    /// # Panics
    /// When it does not complete.
    pub fn scsi(&mut self, target: u8, cdb: &[u8], out: &[u8], room: u32) -> Ended {
        let mut command = vec![1, target, 0, 0, 0, 0, 0, 0];
        command.extend([0; 11 + 32]);
        command[19..19 + cdb.len()].copy_from_slice(cdb);
        let memory = Arc::clone(&self.front.memory);
        memory.write(COMMAND, &command);
        memory.write(ANSWER, &[0xee; 108]);
        let mut segments = vec![readable(COMMAND, command.len() as u32)];
        if !out.is_empty() {
            memory.write(DATA, out);
            segments.push(readable(DATA, out.len() as u32));
        }
        segments.push(writable(ANSWER, 12 + self.sense_size));
        if room > 0 {
            segments.push(writable(DATA, room));
        }
        let queue = &mut self.front.queues[REQUESTS];
        let head = direct(&queue.ring, &[0, 1, 2], &segments);
        queue.ring.offer(head);
        queue.go();
        wait_for("an answer", || queue.ring.take());
        let response = memory.read(ANSWER, 108);
        assert_eq!(response[11], 0, "response");
        let len = u32::from_le_bytes([response[0], response[1], response[2], response[3]]) as usize;
        let sense_data = response[12..12 + len].to_vec();
        let sense = match sense_data.first().map(|code| code & 0x7f) {
            None => None,
            Some(0x72) => Some((sense_data[1] & 15, sense_data[2], sense_data[3])),
            Some(_) => Some((sense_data[2] & 15, sense_data[12], sense_data[13])),
        };
        Ended { status: response[10], sense, sense_data, data: memory.read(DATA, room as usize) }
    }

    /// Runs TEST UNIT READY until it succeeds. Returns the additional sense codes of the unit attentions.
    ///
    /// # Panics
    /// When it fails for another reason, or the unit attentions do not end.
    pub fn attentions(&mut self, target: u8) -> Vec<(u8, u8)> {
        let mut codes = Vec::new();
        loop {
            let Ended { status, sense, .. } = self.scsi(target, &[0; 6], &[], 0);
            match (status, sense) {
                (0, _) => return codes,
                (2, Some((6, asc, ascq))) => codes.push((asc, ascq)),
                other => panic!("target {target}: {other:?}"),
            }
            assert!(codes.len() < 16, "{codes:?}");
        }
    }
}

fn event_at(entry: u64) -> u64 {
    START + QUEUE_SHARE + 0x4000 + 64 * entry
}

/// Returns the ring addresses of queue `index`.
pub fn places(index: u16) -> Places {
    Places::pages(START + QUEUE_SHARE * u64::from(index))
}

/// Entries of a ring.
pub const ENTRIES: u16 = RING;

/// Returns a descriptor that is not a pipe.
///
/// # Panics
/// When /dev/zero cannot be opened.
pub fn zeroes() -> OwnedFd {
    OwnedFd::from(File::open("/dev/zero").expect("/dev/zero"))
}
