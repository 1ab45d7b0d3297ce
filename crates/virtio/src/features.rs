//! Feature bits common to all device types. Source: virtio 1.3 section 6.

use mqblk_ring::virtqueue::RingFormat;

/// Indirect descriptors.
pub const RING_INDIRECT_DESC: u64 = 1 << virtio_bindings::virtio_ring::VIRTIO_RING_F_INDIRECT_DESC;
/// Notifications are requested by index.
pub const RING_EVENT_IDX: u64 = 1 << virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
/// The device follows virtio 1.0 or later.
pub const VERSION_1: u64 = 1 << virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
/// The driver's addresses are those of the platform: guest addresses, unless the device is behind an IOMMU. A request's
/// data may pass through other buffers of the driver (swiotlb).
pub const ACCESS_PLATFORM: u64 = 1 << virtio_bindings::virtio_config::VIRTIO_F_ACCESS_PLATFORM;
/// Rings are packed, not split.
pub const RING_PACKED: u64 = 1 << virtio_bindings::virtio_config::VIRTIO_F_RING_PACKED;
/// Any split of a request into descriptors is accepted. Implied by VERSION_1 and offered for transitional drivers.
pub const ANY_LAYOUT: u64 = 1 << virtio_bindings::virtio_config::VIRTIO_F_ANY_LAYOUT;

/// Features that every virtio device here offers.
pub const RING_FEATURES: u64 = RING_INDIRECT_DESC | RING_EVENT_IDX | RING_PACKED | VERSION_1 | ANY_LAYOUT;

/// Returns the format of the rings of a driver that has accepted these features.
pub const fn ring_format(accepted: u64) -> RingFormat {
    if accepted & RING_PACKED != 0 { RingFormat::Packed } else { RingFormat::Split }
}
