//! A vhost-user frontend with queues over memory and rings under full control.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustix::fd::{AsFd, OwnedFd};

use super::eventfd::TestEventFd;
use super::memory::{FileRegion, START, SharedMemory, mem_table_payload};
use super::request::{header, readable, request_type, writable, write_direct};
use super::ring::{HostileRing, RingAddresses};
use super::socket::{VhostUserSocket, message as m, vring_state_payload};
use super::{TIMEOUT, wait_for};

/// VIRTIO_BLK_F_SIZE_MAX: largest data descriptor in bytes. Without it a driver may use any.
pub const SIZE_MAX: u64 = 1 << 1;
/// VIRTIO_BLK_F_SEG_MAX: most data descriptors of a request. Without it a driver may use any number.
pub const SEG_MAX: u64 = 1 << 2;
/// VIRTIO_RING_F_INDIRECT_DESC.
pub const INDIRECT_DESC: u64 = 1 << 28;
/// VIRTIO_RING_F_EVENT_IDX.
pub const EVENT_IDX: u64 = 1 << 29;
/// VIRTIO_F_RING_PACKED.
pub const RING_PACKED: u64 = 1 << 34;
/// VHOST_USER_F_PROTOCOL_FEATURES.
pub const PROTOCOL_FEATURES: u64 = 1 << 30;

/// Default ring size.
pub const DEFAULT_RING_SIZE: u16 = 64;

/// Guest memory of a queue: its ring, then its requests.
pub const QUEUE_SHARE: u64 = 0x8000;

/// A queue: its ring and its three eventfds.
#[derive(Debug)]
pub struct FrontendQueue {
    /// The ring.
    pub ring: HostileRing,
    /// Signals the device.
    pub kick: TestEventFd,
    /// Signalled by the device.
    pub call: TestEventFd,
    /// Signalled by the device when the ring is broken.
    pub err: TestEventFd,
}

impl FrontendQueue {
    /// Creates a queue unknown to the daemon.
    pub fn new(memory: &Arc<SharedMemory>, at: RingAddresses, size: u16) -> FrontendQueue {
        let ring = HostileRing::new(Arc::clone(memory), at, size);
        FrontendQueue { ring, kick: TestEventFd::new(), call: TestEventFd::new(), err: TestEventFd::new() }
    }

    /// Publishes the offered heads, and kicks.
    pub fn publish_and_kick(&mut self) {
        self.ring.publish();
        self.kick.add(1);
    }

    /// Submits a read of the disk's first sector as head 0, with its segments from `at` on.
    pub fn read_first_sector(&mut self, at: u64) {
        self.ring.memory.write(at, &header(request_type::IN, 0));
        write_direct(&self.ring, &[0, 1, 2], &[readable(at, 16), writable(at + 512, 512), writable(at + 16, 1)]);
        self.ring.offer(0);
        self.publish_and_kick();
    }

    /// Waits for the next completion. Returns head and length.
    ///
    /// # Panics
    /// When none comes.
    pub fn wait_completion(&mut self) -> (u32, u32) {
        wait_for("an answer", || self.ring.take())
    }

    /// Waits until the device reports the ring broken. Returns false on timeout.
    pub fn wait_retired(&self, limit: Duration) -> bool {
        self.err.wait(limit)
    }
}

/// An in-flight region (GET_INFLIGHT_FD, SET_INFLIGHT_FD).
#[derive(Debug)]
pub struct InflightRegion {
    /// The daemon's description of it.
    pub description: Vec<u8>,
    /// Its memory.
    pub file: OwnedFd,
}

/// A vhost-user frontend.
#[derive(Debug)]
pub struct HostileFrontend {
    /// Its connection.
    pub connection: VhostUserSocket,
    /// The guest's memory.
    pub memory: Arc<SharedMemory>,
    /// The queues, in order.
    pub queues: Vec<FrontendQueue>,
    /// Negotiated features.
    pub features: u64,
}

impl HostileFrontend {
    /// Connects with packed rings, and sets the default memory table.
    pub fn connect_packed(socket: &Path) -> HostileFrontend {
        let mut connection = VhostUserSocket::connect(socket);
        let features = connection.negotiate_packed();
        let memory = Arc::new(SharedMemory::two_regions());
        let mut frontend = HostileFrontend { connection, memory, queues: Vec::new(), features };
        frontend.set_memory_table();
        frontend
    }

    /// Connects, without the features `without`, and sets the default memory table.
    pub fn connect(socket: &Path, without: u64) -> HostileFrontend {
        HostileFrontend::with_memory(socket, without, SharedMemory::two_regions())
    }

    /// Connects, without the features `without`, and sets this memory table.
    pub fn with_memory(socket: &Path, without: u64, memory: SharedMemory) -> HostileFrontend {
        let mut connection = VhostUserSocket::connect(socket);
        let features = connection.negotiate(without);
        let mut frontend = HostileFrontend { connection, memory: Arc::new(memory), queues: Vec::new(), features };
        frontend.set_memory_table();
        frontend
    }

    /// Connects and starts `queues` queues of [`DEFAULT_RING_SIZE`] entries.
    pub fn start(socket: &Path, without: u64, queues: u16) -> HostileFrontend {
        let mut frontend = HostileFrontend::connect(socket, without);
        for index in 0..queues {
            frontend.add_queue(RingAddresses::pages(START + QUEUE_SHARE * u64::from(index)), DEFAULT_RING_SIZE);
        }
        frontend
    }

    /// Reconnects for the same guest: memory and rings are unchanged, and no queue is started.
    pub fn reconnect(self, socket: &Path) -> HostileFrontend {
        let HostileFrontend { connection, memory, queues, .. } = self;
        drop(connection);
        let mut connection = VhostUserSocket::connect(socket);
        let features = connection.negotiate(0);
        let mut frontend = HostileFrontend { connection, memory, queues, features };
        frontend.set_memory_table();
        frontend
    }

    /// Requests an in-flight region for this many queues.
    pub fn get_inflight(&mut self, queues: u16) -> InflightRegion {
        let mut payload = vec![0; 16];
        payload.extend([queues.to_ne_bytes(), DEFAULT_RING_SIZE.to_ne_bytes(), [0; 2], [0; 2]].concat());
        let (payload, file) = self.connection.request_fd(m::GET_INFLIGHT_FD, &payload);
        InflightRegion { description: payload, file }
    }

    /// Sets an in-flight region.
    pub fn set_inflight(&mut self, region: &InflightRegion) {
        self.connection.send_acked(m::SET_INFLIGHT_FD, &region.description, &[region.file.as_fd()]);
    }

    /// Sends the memory table.
    pub fn set_memory_table(&mut self) {
        let regions: Vec<&FileRegion> = self.memory.regions.iter().collect();
        let fds: Vec<_> = regions.iter().map(|region| region.fd()).collect();
        self.connection.send_acked(m::SET_MEM_TABLE, &mem_table_payload(&regions), &fds);
    }

    /// Returns the payload of SET_VRING_ADDR.
    pub fn vring_addr_payload(&self, index: u32, at: RingAddresses) -> Vec<u8> {
        let user = |guest| self.memory.user_address(guest).to_ne_bytes();
        let mut payload = vring_state_payload(index, 0);
        for part in [user(at.desc), user(at.used), user(at.avail), [0; 8]] {
            payload.extend(part);
        }
        payload
    }

    /// Sets up the next queue and starts it.
    pub fn add_queue(&mut self, at: RingAddresses, size: u16) -> &mut FrontendQueue {
        let index = self.queues.len() as u32;
        self.queues.push(FrontendQueue::new(&self.memory, at, size));
        self.start_queue(index, 0);
        &mut self.queues[index as usize]
    }

    /// Configures an existing queue and starts it at available index `base`.
    pub fn start_queue(&mut self, index: u32, base: u16) {
        let queue = &self.queues[index as usize];
        let payload = u64::from(index).to_ne_bytes();
        let addresses = self.vring_addr_payload(index, queue.ring.addresses);
        let c = &mut self.connection;
        c.send_acked(m::SET_VRING_NUM, &vring_state_payload(index, queue.ring.size.into()), &[]);
        c.send_acked(m::SET_VRING_BASE, &vring_state_payload(index, base.into()), &[]);
        c.send_acked(m::SET_VRING_ADDR, &addresses, &[]);
        c.send_acked(m::SET_VRING_ERR, &payload, &[queue.err.as_fd()]);
        c.send_acked(m::SET_VRING_CALL, &payload, &[queue.call.as_fd()]);
        c.send_acked(m::SET_VRING_KICK, &payload, &[queue.kick.as_fd()]);
        if self.features & PROTOCOL_FEATURES != 0 {
            c.send_acked(m::SET_VRING_ENABLE, &vring_state_payload(index, 1), &[]);
        }
    }

    /// Stops a queue. Returns its available index.
    ///
    /// # Panics
    /// When there is no reply.
    pub fn stop_queue(&mut self, index: u32) -> u16 {
        let reply = self.connection.request(m::GET_VRING_BASE, &vring_state_payload(index, 0));
        assert_eq!(reply[..4], index.to_ne_bytes());
        u16::try_from(u32::from_ne_bytes([reply[4], reply[5], reply[6], reply[7]])).expect("a base of 16 bits")
    }

    /// Waits for the daemon to close the connection. Returns false if it sends a reply instead.
    pub fn wait_closed(&mut self) -> bool {
        self.connection.receive() == super::socket::Received::Closed
    }

    /// Returns the timeout of a reply.
    pub fn timeout(&self) -> Duration {
        TIMEOUT.time()
    }
}
