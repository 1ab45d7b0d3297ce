//! A device that a daemon serves over vhost-user, as QEMU presents it to the guest.

use std::path::Path;
use std::sync::Arc;

use rustix::fs::MemfdFlags;

use super::device::Device;
use super::{MEMORY, memory};
use crate::hostile::frontend::{HostileFrontend, PROTOCOL_FEATURES};
use crate::hostile::memory::SharedMemory;
use crate::hostile::ring::RingAddresses;
use crate::hostile::socket::{config_payload, message as m};

/// A device at a vhost-user socket.
#[derive(Debug)]
pub struct VhostUserDevice {
    frontend: HostileFrontend,
}

impl VhostUserDevice {
    /// Connects.
    ///
    /// # Panics
    /// When the daemon refuses.
    pub fn connect(socket: &Path) -> VhostUserDevice {
        let file = rustix::fs::memfd_create("guest", MemfdFlags::CLOEXEC).expect("memfd").into();
        let memory = memory(file);
        memory.regions[0].file.set_len(MEMORY).expect("memfd length");
        VhostUserDevice { frontend: HostileFrontend::with_memory(socket, 0, memory) }
    }
}

impl Device for VhostUserDevice {
    fn memory(&self) -> Arc<SharedMemory> {
        Arc::clone(&self.frontend.memory)
    }

    fn offered(&mut self) -> u64 {
        self.frontend.connection.request_u64(m::GET_FEATURES)
    }

    fn config(&mut self, offset: u32, len: u32) -> Vec<u8> {
        let payload = config_payload(offset, len, 0, &vec![0; len as usize]);
        self.frontend.connection.request(m::GET_CONFIG, &payload)[12..].to_vec()
    }

    fn start(&mut self, accepted: u64, rings: &[RingAddresses], size: u16) {
        // QEMU sets the features whenever the driver starts the device.
        self.frontend.features = accepted | PROTOCOL_FEATURES;
        self.frontend.connection.send_acked(m::SET_FEATURES, &self.frontend.features.to_ne_bytes(), &[]);
        self.frontend.queues.clear();
        for ring in rings {
            self.frontend.add_queue(*ring, size);
        }
    }

    fn notify(&mut self, queue: u16) {
        self.frontend.queues[usize::from(queue)].kick.add(1);
    }

    fn reset(&mut self) {
        for index in 0..self.frontend.queues.len() as u32 {
            self.frontend.stop_queue(index);
        }
    }
}
