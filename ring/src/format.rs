//! What all formats of a virtqueue have in common. Source: virtio 1.3 section 2.6, "Virtqueues".

use mqblk_memory::GuestAddress;

/// Largest queue size that the specification allows. Source: virtio 1.3 sections 2.7 and 2.8.
pub const MAX_QUEUE_SIZE: u16 = 32768;

/// The chain continues in the descriptor named by `next`.
pub const DESC_NEXT: u16 = 1;
/// The buffer is device-writable (else device-readable).
pub const DESC_WRITE: u16 = 2;
/// The buffer holds a table of descriptors.
pub const DESC_INDIRECT: u16 = 4;

/// Protocol violation by the driver. It stops its queue and nothing else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VirtqueueError(pub &'static str);

/// Guest addresses of the three parts of a ring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RingAddresses {
    /// Descriptor table, 16 bytes each, aligned to 16.
    pub desc: GuestAddress,
    /// Available ring, aligned to 2.
    pub avail: GuestAddress,
    /// Used ring, aligned to 4.
    pub used: GuestAddress,
}

/// Error of the set-up of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RingSetupError {
    /// Not a power of two from 1 to 32768.
    #[error("ring size: found {0}, expected a power of two from 1 to 32768")]
    Size(u16),
    /// A part is not aligned, not mapped, or not in one memory region.
    #[error("{part} at guest address {address:#x}: expected {len} bytes in one memory region, aligned to {align}")]
    Part {
        /// Name of the part.
        part: &'static str,
        /// Its address, as given.
        address: u64,
        /// Required length in bytes.
        len: u64,
        /// Required alignment in bytes.
        align: u64,
    },
}

/// A descriptor, read once out of shared memory. Source: virtio 1.3 section 2.7.5.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Descriptor {
    /// Guest address of the buffer.
    pub address: u64,
    /// Its length in bytes.
    pub len: u32,
    /// [`DESC_NEXT`], [`DESC_WRITE`], [`DESC_INDIRECT`].
    pub flags: u16,
    /// Index of the next descriptor, with [`DESC_NEXT`].
    pub next: u16,
}

/// State of a stopped queue, for the next process or worker that serves the ring.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RingState {
    /// Where the ring is resumed, as the ring's format encodes it. Split: the next available entry to read.
    pub base: u32,
    /// Chains that were taken and are not completed, in the order of their heads. Empty after a drain.
    pub in_flight: Vec<u16>,
}

/// A segment of a chain: a range of guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChainSegment {
    /// Guest address.
    pub address: GuestAddress,
    /// Length in bytes; not 0.
    pub len: u32,
    /// Device-writable (else device-readable).
    pub writable: bool,
}

/// Error of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChainError {
    /// The ring violates the protocol: the queue stops.
    BrokenRing(VirtqueueError),
    /// Only this request is invalid: the chain is returned to the driver with no bytes written.
    BadRequest,
}

impl From<VirtqueueError> for ChainError {
    fn from(broken: VirtqueueError) -> Self {
        ChainError::BrokenRing(broken)
    }
}

/// The first descriptors of a chain, fetched ahead so that the lines they refer to are prefetched.
#[derive(Clone, Copy, Debug, Default)]
pub struct ChainHead {
    /// Identifies the chain until it is used. Split: index of the head descriptor.
    pub index: u16,
    /// The head descriptor.
    pub(crate) first: Descriptor,
    /// The first entry of its indirect table, if that was read.
    pub(crate) first_indirect: Option<Descriptor>,
}
