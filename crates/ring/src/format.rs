//! Common parts of all formats of a virtqueue. Source: virtio 1.3 section 2.6, "Virtqueues".

use mqblk_memory::{GuestAddress, LeaseAccess};

/// Largest queue size that the specification allows. Source: virtio 1.3 sections 2.7 and 2.8.
pub const MAX_QUEUE_SIZE: u16 = 32768;

/// The chain continues in the descriptor named by `next`.
pub const DESC_NEXT: u16 = 1;
/// The buffer is device-writable (else device-readable).
pub const DESC_WRITE: u16 = 2;
/// The buffer holds a table of descriptors.
pub const DESC_INDIRECT: u16 = 4;

/// Most entries of an indirect table that are accepted: twice the 1024 segments of a request that can be served, so
/// that one with more has a status.
pub(crate) const MAX_INDIRECT_ENTRIES: u16 = 2048;

pub(crate) const MEMORY_LOST: VirtqueueError =
    VirtqueueError("the guest's memory was lost: the file behind it was truncated, or the hardware failed");
pub(crate) const READABLE_AFTER_WRITABLE: VirtqueueError =
    VirtqueueError("a readable descriptor follows a writable one");
pub(crate) const NESTED_INDIRECT: VirtqueueError = VirtqueueError("an indirect table names another one");

/// `mqpacked`, a word of the in-flight table of a packed ring: in the padding of its header. In a split ring's table it
/// is the first entry's counter, so each format recognizes the other's table.
pub(crate) const PACKED_TABLE_MAGIC: u64 = u64::from_le_bytes(*b"mqpacked");
/// The word's index.
pub(crate) const PACKED_TABLE_MAGIC_WORD: usize = 3;

/// Bytes of an event suppression structure of a packed ring.
pub const SUPPRESSION_BYTES: u64 = 4;

/// Format of a virtqueue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RingFormat {
    /// Source: virtio 1.3 section 2.7.
    #[default]
    Split,
    /// With VIRTIO_F_RING_PACKED. Source: virtio 1.3 section 2.8.
    Packed,
}

/// Protocol violation by the driver. It stops its queue and nothing else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VirtqueueError(pub &'static str);

/// Guest addresses of the three parts of a ring. A packed ring has its descriptors at `desc`, the driver's event
/// suppression at `avail` and the device's at `used`; both are aligned to 4.
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
    /// The position to resume at is not in the ring.
    #[error("base: found {found:#x}, expected {expected}")]
    Base {
        /// The base, as [`RingState::base`].
        found: u32,
        /// The valid values.
        expected: &'static str,
    },
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
    /// The position at which the ring is resumed, in the ring's encoding. Split: the next available entry to read.
    /// Packed: the positions of both ends, see [`Base::to_bits`](crate::packed::position::Base::to_bits).
    pub base: u32,
    /// Chains that were taken and are not completed, in the order of their identifiers. Empty after a drain.
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

impl ChainSegment {
    #[inline]
    pub(crate) fn from_descriptor(desc: Descriptor) -> ChainSegment {
        ChainSegment { address: GuestAddress(desc.address), len: desc.len, writable: desc.flags & DESC_WRITE != 0 }
    }
}

/// Header that a device type reads from the first segment of a chain.
pub trait ChainHeader: Sized {
    /// Bytes of the segment.
    const LEN: u32;

    /// Reads it, once. `None` if it cannot be read in the usual way.
    fn read(access: &mut LeaseAccess<'_>, address: GuestAddress) -> Option<Self>;
}

/// The chains of most requests, of a ring of one format: a device type reads them without a `match` for each.
pub trait UsualChains {
    /// Returns the header and the two other segments of a chain of three, in the ring or in an indirect table: the
    /// first one is readable and as long as the header, and the last one is writable. The others may have no bytes.
    /// `None` for all other chains, and for all chains that [`DeviceRing::walk`](crate::virtqueue::DeviceRing::walk)
    /// refuses.
    fn three_segments<H: ChainHeader>(
        &self,
        access: &mut LeaseAccess<'_>,
        head: &ChainHead,
    ) -> Option<(H, [ChainSegment; 2])>;
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

/// The first descriptors of a chain, fetched ahead to prefetch the lines that they refer to.
#[derive(Clone, Copy, Debug, Default)]
pub struct ChainHead {
    /// Identifies the chain until it is used. Split: index of the head descriptor. Packed: buffer id.
    pub index: u16,
    /// The head descriptor.
    pub(crate) first: Descriptor,
    /// The first entry of its indirect table, if that was read.
    pub(crate) first_indirect: Option<Descriptor>,
}
