//! A vhost-user frontend with queues over memory and rings under full control.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustix::fd::{AsFd, OwnedFd};

use super::event::Event;
use super::memory::{Memory, Region, START, table};
use super::request::{direct, header, kind, readable, writable};
use super::ring::{Places, Ring};
use super::socket::{Connection, message as m, state};
use super::{PATIENCE, wait_for};

/// VIRTIO_RING_F_INDIRECT_DESC.
pub const INDIRECT_DESC: u64 = 1 << 28;
/// VIRTIO_RING_F_EVENT_IDX.
pub const EVENT_IDX: u64 = 1 << 29;
/// VHOST_USER_F_PROTOCOL_FEATURES.
pub const PROTOCOL_FEATURES: u64 = 1 << 30;

/// Default ring size.
pub const RING: u16 = 64;

/// Guest memory of a queue: its ring, then its requests.
pub const QUEUE_SHARE: u64 = 0x8000;

/// A queue: its ring and its three eventfds.
#[derive(Debug)]
pub struct Queue {
    /// The ring.
    pub ring: Ring,
    /// Signals the device.
    pub kick: Event,
    /// Signalled by the device.
    pub call: Event,
    /// Signalled by the device when the ring is broken.
    pub err: Event,
}

impl Queue {
    /// Creates a queue that the daemon does not know yet.
    pub fn new(memory: &Arc<Memory>, at: Places, size: u16) -> Queue {
        let ring = Ring::new(Arc::clone(memory), at, size);
        Queue { ring, kick: Event::new(), call: Event::new(), err: Event::new() }
    }

    /// Publishes the offered heads, and kicks.
    pub fn go(&mut self) {
        self.ring.publish();
        self.kick.add(1);
    }

    /// Submits a read of the disk's first sector as head 0, with its segments from `at` on.
    pub fn read_first_sector(&mut self, at: u64) {
        self.ring.memory.write(at, &header(kind::IN, 0));
        direct(&self.ring, &[0, 1, 2], &[readable(at, 16), writable(at + 512, 512), writable(at + 16, 1)]);
        self.ring.offer(0);
        self.go();
    }

    /// Waits for the next completion. Returns head and length.
    ///
    /// # Panics
    /// When none comes.
    pub fn answer(&mut self) -> (u32, u32) {
        wait_for("an answer", || self.ring.take())
    }

    /// Waits until the device reports the ring broken. Returns false on timeout.
    pub fn is_retired(&self, limit: Duration) -> bool {
        self.err.wait(limit)
    }
}

/// An in-flight region (GET_INFLIGHT_FD, SET_INFLIGHT_FD).
#[derive(Debug)]
pub struct Inflight {
    /// Its description by the daemon.
    pub about: Vec<u8>,
    /// Its memory.
    pub file: OwnedFd,
}

/// A vhost-user frontend.
#[derive(Debug)]
pub struct FrontEnd {
    /// Its connection.
    pub connection: Connection,
    /// The guest's memory.
    pub memory: Arc<Memory>,
    /// The queues, in order.
    pub queues: Vec<Queue>,
    /// Negotiated features.
    pub features: u64,
}

impl FrontEnd {
    /// Connects, without the features `without`, and sets the default memory table.
    pub fn connect(socket: &Path, without: u64) -> FrontEnd {
        FrontEnd::with_memory(socket, without, Memory::usual())
    }

    /// Connects, without the features `without`, and sets this memory table.
    pub fn with_memory(socket: &Path, without: u64, memory: Memory) -> FrontEnd {
        let mut connection = Connection::open(socket);
        let features = connection.negotiate(without);
        let mut frontend = FrontEnd { connection, memory: Arc::new(memory), queues: Vec::new(), features };
        frontend.tell_memory();
        frontend
    }

    /// Connects and starts `queues` queues of [`DEFAULT_RING_SIZE`] entries.
    pub fn start(socket: &Path, without: u64, queues: u16) -> FrontEnd {
        let mut frontend = FrontEnd::connect(socket, without);
        for index in 0..queues {
            frontend.add_queue(Places::pages(START + QUEUE_SHARE * u64::from(index)), RING);
        }
        frontend
    }

    /// Connects again for the same guest: memory and rings are unchanged, and no queue is started.
    pub fn again(self, socket: &Path) -> FrontEnd {
        let FrontEnd { connection, memory, queues, .. } = self;
        drop(connection);
        let mut connection = Connection::open(socket);
        let features = connection.negotiate(0);
        let mut frontend = FrontEnd { connection, memory, queues, features };
        frontend.tell_memory();
        frontend
    }

    /// Requests an in-flight region for so many queues.
    pub fn ask_inflight(&mut self, queues: u16) -> Inflight {
        let mut payload = vec![0; 16];
        payload.extend([queues.to_ne_bytes(), RING.to_ne_bytes(), [0; 2], [0; 2]].concat());
        let (payload, file) = self.connection.ask_for_file(m::GET_INFLIGHT_FD, &payload);
        Inflight { about: payload, file }
    }

    /// Sets an in-flight region.
    pub fn show_inflight(&mut self, region: &Inflight) {
        self.connection.tell(m::SET_INFLIGHT_FD, &region.about, &[region.file.as_fd()]);
    }

    /// Sends the memory table.
    pub fn tell_memory(&mut self) {
        let regions: Vec<&Region> = self.memory.regions.iter().collect();
        let fds: Vec<_> = regions.iter().map(|region| region.fd()).collect();
        self.connection.tell(m::SET_MEM_TABLE, &table(&regions), &fds);
    }

    /// Returns the payload of SET_VRING_ADDR.
    pub fn addresses(&self, index: u32, at: Places) -> Vec<u8> {
        let user = |guest| self.memory.user(guest).to_ne_bytes();
        let mut payload = state(index, 0);
        for part in [user(at.desc), user(at.used), user(at.avail), [0; 8]] {
            payload.extend(part);
        }
        payload
    }

    /// Sets the next queue up and starts it.
    pub fn add_queue(&mut self, at: Places, size: u16) -> &mut Queue {
        let index = self.queues.len() as u32;
        self.queues.push(Queue::new(&self.memory, at, size));
        self.start_queue(index, 0);
        &mut self.queues[index as usize]
    }

    /// Configures an existing queue and starts it at available index `base`.
    pub fn start_queue(&mut self, index: u32, base: u16) {
        let queue = &self.queues[index as usize];
        let payload = u64::from(index).to_ne_bytes();
        let addresses = self.addresses(index, queue.ring.at);
        let c = &mut self.connection;
        c.tell(m::SET_VRING_NUM, &state(index, queue.ring.size.into()), &[]);
        c.tell(m::SET_VRING_BASE, &state(index, base.into()), &[]);
        c.tell(m::SET_VRING_ADDR, &addresses, &[]);
        c.tell(m::SET_VRING_ERR, &payload, &[queue.err.as_fd()]);
        c.tell(m::SET_VRING_CALL, &payload, &[queue.call.as_fd()]);
        c.tell(m::SET_VRING_KICK, &payload, &[queue.kick.as_fd()]);
        if self.features & PROTOCOL_FEATURES != 0 {
            c.tell(m::SET_VRING_ENABLE, &state(index, 1), &[]);
        }
    }

    /// Stops a queue. Returns its available index.
    ///
    /// # Panics
    /// When there is no reply.
    pub fn stop_queue(&mut self, index: u32) -> u16 {
        let reply = self.connection.ask(m::GET_VRING_BASE, &state(index, 0));
        assert_eq!(reply[..4], index.to_ne_bytes());
        u16::try_from(u32::from_ne_bytes([reply[4], reply[5], reply[6], reply[7]])).expect("a base of 16 bits")
    }

    /// Waits for the daemon to close the connection. Returns false if it sends a reply instead.
    pub fn is_ended(&mut self) -> bool {
        self.connection.hear() == super::socket::Heard::End
    }

    /// Returns the timeout of a reply.
    pub fn patience(&self) -> Duration {
        PATIENCE
    }
}
