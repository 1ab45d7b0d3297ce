//! The sent state of a connection: JSON, and descriptors that it refers to by number.

use std::os::fd::{AsFd, OwnedFd};

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

/// Index of a descriptor among those sent with a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct DescriptorIndex(usize);

/// The descriptors of a state that is being saved.
#[derive(Default)]
pub(crate) struct SavedDescriptors(Vec<OwnedFd>);

impl SavedDescriptors {
    /// Adds a duplicate of a descriptor.
    ///
    /// # Errors
    /// When the process is out of descriptors.
    pub(crate) fn add(&mut self, file: &impl AsFd) -> Result<DescriptorIndex, String> {
        let duplicate = file.as_fd().try_clone_to_owned().map_err(|error| format!("descriptor: {error}"))?;
        self.0.push(duplicate);
        Ok(DescriptorIndex(self.0.len() - 1))
    }

    pub(crate) fn into_inner(self) -> Vec<OwnedFd> {
        self.0
    }
}

/// The descriptors of a state that has arrived. Each is taken once.
pub(crate) struct ReceivedDescriptors(Vec<Option<OwnedFd>>);

impl ReceivedDescriptors {
    pub(crate) fn new(descriptors: Vec<OwnedFd>) -> ReceivedDescriptors {
        ReceivedDescriptors(descriptors.into_iter().map(Some).collect())
    }

    /// Takes a descriptor.
    ///
    /// # Errors
    /// When there is none, or it was taken before.
    pub(crate) fn take(&mut self, index: DescriptorIndex) -> Result<OwnedFd, String> {
        let count = self.0.len();
        let found = self.0.get_mut(index.0).and_then(Option::take);
        found.ok_or_else(|| format!("descriptor: found number {}, expected one of {count}, each once", index.0))
    }
}

/// A connection of a frontend: its setup, except the positions of its queues.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ConnectionState {
    /// The device's type ([`VirtioDevice::device_type`](mqblk_virtio::VirtioDevice::device_type)).
    pub(crate) device: String,
    /// The connected socket.
    pub(crate) socket: DescriptorIndex,
    /// Time since the frontend connected, in milliseconds.
    pub(crate) connected_ms: u64,
    /// The features that the driver has accepted, and the frontend's protocol features.
    pub(crate) features: u64,
    pub(crate) protocol_features: u64,
    pub(crate) memory: Vec<MemorySlot>,
    pub(crate) in_flight: Option<InFlightLayout>,
    pub(crate) queues: Vec<QueueSetup>,
    /// True if the driver has started the device.
    pub(crate) is_started: bool,
    /// The channel to the frontend, and true if it has not read the last configuration.
    pub(crate) backend_channel: Option<DescriptorIndex>,
    pub(crate) config_stale: bool,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MemorySlot {
    pub(crate) guest: u64,
    pub(crate) user: u64,
    pub(crate) bytes: u64,
    pub(crate) offset: u64,
    pub(crate) file: DescriptorIndex,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct InFlightLayout {
    pub(crate) bytes: u64,
    pub(crate) offset: u64,
    pub(crate) queues: u16,
    pub(crate) queue_size: u16,
    pub(crate) file: DescriptorIndex,
}

/// The frontend's setup of a queue.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct QueueSetup {
    pub(crate) size: Option<u16>,
    /// Descriptor table, available ring and used ring, in the frontend's address space.
    pub(crate) addresses: Option<[u64; 3]>,
    pub(crate) enabled: bool,
    /// True if the frontend has started it, with or without a kick descriptor.
    pub(crate) is_kicked: bool,
    pub(crate) kick: Option<DescriptorIndex>,
    pub(crate) call: Option<DescriptorIndex>,
    pub(crate) err: Option<DescriptorIndex>,
}

/// The rest of a connection, once its queues are drained.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DrainedState {
    /// The position of each queue, as in SET_VRING_BASE.
    pub(crate) bases: Vec<u32>,
    /// The driver's configuration ([`VirtioDevice::config_bits`](mqblk_virtio::VirtioDevice::config_bits)).
    pub(crate) config_bits: u64,
    /// The device's state ([`VirtioDevice::save_state`](mqblk_virtio::VirtioDevice::save_state)), once the driver has
    /// started it.
    pub(crate) device: Option<Box<RawValue>>,
}
