//! An open disk, and the features that are offered of it.

use std::sync::Arc;

use mqblk_core::Limits;

use crate::figures::Figures;
use crate::offer::{Description, Offer};
use crate::storage::Backing;

/// An open disk, with the settings of its device directory.
pub(crate) struct Opened {
    pub(crate) backing: Backing,
    pub(crate) figures: Arc<Figures>,
    pub(crate) read_only: bool,
    pub(crate) discard: bool,
    pub(crate) cdrom: bool,
    pub(crate) removable: bool,
}

impl Opened {
    pub(crate) fn description(&self) -> Description {
        let (mut geometry, limits) = (self.backing.disk.geometry(), self.backing.disk.limits());
        geometry.read_only |= self.read_only;
        Description { geometry, limits, cdrom: self.cdrom, removable: self.removable }
    }

    /// Returns the features to offer. A frontend that an earlier process has connected keeps that process's offer.
    pub(crate) fn offer(&self) -> Offer {
        let settings = &self.backing.settings;
        let Limits { volatile_cache, .. } = self.backing.disk.limits();
        let flush = volatile_cache && !settings.write_through;
        Offer {
            bounds: settings.bounds,
            indirect_segments: settings.indirect_segments,
            persistent: settings.mode.offers_persistent(),
            flush,
            barrier: flush,
            discard: self.discard,
        }
    }
}
