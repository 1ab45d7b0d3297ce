//! The keys that a backend writes before states 2 (InitWait) and 4 (Connected).

use mqblk_core::{Geometry, Limits};
use mqblk_xen::vbd::keys;

use crate::frontend::RingLimits;

/// A key and its value; `None`: the key is removed.
pub(crate) type KeyValue = (&'static str, Option<String>);

/// Features offered to a frontend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FeatureOffer {
    /// Limits of the rings.
    pub ring_limits: RingLimits,
    /// Maximum of segments of an indirect request; 0: not offered.
    pub indirect_segments: u16,
    /// Persistent grants.
    pub persistent: bool,
    /// Flush: the disk has a volatile write cache.
    pub flush: bool,
    /// Write barriers.
    pub barrier: bool,
    /// Discard.
    pub discard: bool,
}

impl FeatureOffer {
    /// Returns the keys to write with state 2.
    pub(crate) fn init_wait_keys(&self) -> Vec<KeyValue> {
        let RingLimits { queues, ring_page_order: ring_order } = self.ring_limits;
        let segments = (self.indirect_segments > 0).then(|| self.indirect_segments.to_string());
        vec![
            (keys::MULTI_QUEUE_MAX_QUEUES, Some(queues.to_string())),
            (keys::MAX_RING_PAGE_ORDER, Some(ring_order.to_string())),
            (keys::MAX_RING_PAGES, Some((1_u32 << ring_order).to_string())),
            (keys::FEATURE_MAX_INDIRECT_SEGMENTS, segments),
        ]
    }

    /// Returns the keys to write with state 4.
    pub(crate) fn connected_keys(&self, disk: &DiskDescription) -> Vec<KeyValue> {
        let DiskDescription { geometry, limits, .. } = disk;
        let granularity = limits.discard.filter(|_| self.discard).map(|discard| discard.granularity.0);
        let flag = |on: bool| Some(u8::from(on).to_string());
        let mut pairs = vec![
            (keys::FEATURE_FLUSH_CACHE, flag(self.flush)),
            (keys::FEATURE_BARRIER, flag(self.barrier)),
            (keys::FEATURE_PERSISTENT, flag(self.persistent)),
            (keys::FEATURE_DISCARD, flag(granularity.is_some())),
            (keys::DISCARD_GRANULARITY, granularity.map(|bytes| bytes.to_string())),
            (keys::DISCARD_ALIGNMENT, granularity.map(|_| 0.to_string())),
            // No storage backend guarantees that discarded data is unrecoverable.
            (keys::DISCARD_SECURE, granularity.map(|_| 0.to_string())),
            (keys::SECTOR_SIZE, Some(geometry.logical_block.bytes().to_string())),
            (keys::PHYSICAL_SECTOR_SIZE, Some(geometry.physical_block.bytes().to_string())),
            (keys::INFO, Some(disk.info().to_string())),
        ];
        pairs.push(disk.sectors());
        pairs
    }
}

/// Description of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DiskDescription {
    /// Size and block sizes.
    pub geometry: Geometry,
    /// Capabilities and limits.
    pub limits: Limits,
    /// True if the disk is presented as a CD-ROM.
    pub cdrom: bool,
    /// True if the medium is removable.
    pub removable: bool,
}

impl DiskDescription {
    fn info(&self) -> u32 {
        let bits = [
            (self.cdrom, keys::INFO_CDROM),
            (self.removable, keys::INFO_REMOVABLE),
            (self.geometry.read_only, keys::INFO_READ_ONLY),
        ];
        bits.into_iter().filter(|(set, _)| *set).fold(0, |info, (_, bit)| info | bit)
    }

    /// Returns the `sectors` key: the size in units of 512 bytes, for any block size, rounded down.
    pub(crate) fn sectors(&self) -> KeyValue {
        (keys::SECTORS, Some(self.geometry.size.sectors().0.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use mqblk_core::{BlockSize, ByteLen, DiscardLimits};

    use super::*;

    const OFFER: FeatureOffer = FeatureOffer {
        ring_limits: RingLimits { queues: 4, ring_page_order: 2 },
        indirect_segments: 256,
        persistent: true,
        flush: true,
        barrier: true,
        discard: true,
    };

    fn disk() -> DiskDescription {
        let geometry = Geometry {
            size: ByteLen(1 << 20),
            logical_block: BlockSize::B512,
            physical_block: BlockSize::B4096,
            alignment_offset: 0,
            min_io: ByteLen(0),
            opt_io: ByteLen(0),
            read_only: false,
        };
        let limits = Limits {
            max_transfer: ByteLen(1 << 20),
            max_segments: 256,
            discard: Some(DiscardLimits { granularity: ByteLen(4096), max_len: ByteLen(1 << 30) }),
            write_zeroes: None,
            volatile_cache: true,
            cost_per_request: true,
            pins_memory: false,
        };
        DiskDescription { geometry, limits, cdrom: false, removable: false }
    }

    fn value(pairs: &[KeyValue], key: &str) -> Option<String> {
        let found: Vec<_> = pairs.iter().filter(|(name, _)| *name == key).collect();
        assert_eq!(found.len(), 1, "{key}");
        found[0].1.clone()
    }

    #[test]
    fn ring_limits_are_written_with_state_2() {
        let pairs = OFFER.init_wait_keys();
        for (key, want) in [
            ("multi-queue-max-queues", Some("4")),
            ("max-ring-page-order", Some("2")),
            ("max-ring-pages", Some("4")),
            ("feature-max-indirect-segments", Some("256")),
        ] {
            assert_eq!(value(&pairs, key).as_deref(), want, "{key}");
        }
        let none = FeatureOffer { indirect_segments: 0, ..OFFER }.init_wait_keys();
        assert_eq!(value(&none, "feature-max-indirect-segments"), None, "absent, not 0");
    }

    #[test]
    fn the_disk_is_described_with_state_4() {
        let pairs = OFFER.connected_keys(&disk());
        for (key, want) in [
            ("feature-flush-cache", Some("1")),
            ("feature-barrier", Some("1")),
            ("feature-persistent", Some("1")),
            ("feature-discard", Some("1")),
            ("discard-granularity", Some("4096")),
            ("discard-alignment", Some("0")),
            ("discard-secure", Some("0")),
            ("sectors", Some("2048")),
            ("sector-size", Some("512")),
            ("physical-sector-size", Some("4096")),
            ("info", Some("0")),
        ] {
            assert_eq!(value(&pairs, key).as_deref(), want, "{key}");
        }
        let mut other = disk();
        other.geometry.read_only = true;
        other.geometry.logical_block = BlockSize::B4096;
        other.geometry.size = ByteLen((1 << 20) + 700);
        (other.cdrom, other.removable, other.limits.discard) = (true, true, None);
        let pairs = FeatureOffer { flush: false, barrier: false, persistent: false, ..OFFER }.connected_keys(&other);
        for (key, want) in [
            ("feature-flush-cache", Some("0")),
            ("feature-barrier", Some("0")),
            ("feature-persistent", Some("0")),
            ("feature-discard", Some("0")),
            ("discard-granularity", None),
            ("sectors", Some("2049")),
            ("sector-size", Some("4096")),
            ("info", Some("7")),
        ] {
            assert_eq!(value(&pairs, key).as_deref(), want, "{key}");
        }
        assert_eq!(
            value(&FeatureOffer { discard: false, ..OFFER }.connected_keys(&disk()), "feature-discard").unwrap(),
            "0"
        );
    }
}
