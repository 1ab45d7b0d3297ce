//! An open disk, and its offered features.

use std::sync::Arc;

use mqblk_core::Limits;

use crate::device_stats::DeviceStats;
use crate::offer::{DiskDescription, FeatureOffer};
use crate::storage::DiskBacking;

/// An open disk, with the settings of its device directory.
pub(crate) struct OpenDisk {
    pub(crate) backing: DiskBacking,
    pub(crate) stats: Arc<DeviceStats>,
    pub(crate) read_only: bool,
    pub(crate) discard: bool,
    pub(crate) cdrom: bool,
    pub(crate) removable: bool,
}

impl OpenDisk {
    pub(crate) fn description(&self) -> DiskDescription {
        let (mut geometry, limits) = (self.backing.disk.geometry(), self.backing.disk.limits());
        geometry.read_only |= self.read_only;
        DiskDescription { geometry, limits, cdrom: self.cdrom, removable: self.removable }
    }

    /// Returns the features to offer. A frontend that an earlier process has connected keeps that process's offer.
    pub(crate) fn offer(&self) -> FeatureOffer {
        let settings = &self.backing.settings;
        let Limits { volatile_cache, .. } = self.backing.disk.limits();
        let flush = volatile_cache && !settings.write_through;
        FeatureOffer {
            ring_limits: settings.ring_limits,
            indirect_segments: settings.indirect_segments,
            persistent: settings.mode.offers_persistent(),
            flush,
            barrier: flush,
            discard: self.discard,
        }
    }
}
