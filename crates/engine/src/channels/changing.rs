//! Settings of disks that are changed while their requests are in flight.

#[cfg(test)]
use mqblk_core::DiskChannel as _;

use super::{Channels, OpenChannel, PLUG_ROOM};
use crate::plug::Merger;

impl OpenChannel {
    /// Uses the disk's current plug options. Merged requests stay merged.
    fn reload_plug(&mut self) {
        let Some(options) = self.health.plug().filter(|options| *options != self.options) else { return };
        let (limits, geometry) = (self.disk.limits(), self.disk.geometry());
        self.channel.sliced().set_options(&options, &limits);
        match &mut self.merger {
            Some(merger) => merger.set_options(&options, &limits, &geometry),
            None => self.merger = Merger::new(&options, &limits, &geometry, PLUG_ROOM),
        }
        (self.options, self.depth) = (options, options.depth);
    }

    /// Returns the number of requests at the storage.
    #[cfg(test)]
    pub(crate) fn at_storage(&self) -> u32 {
        self.channel.outstanding()
    }

    /// Returns true if its merger is retired.
    fn has_retired_merger(&self) -> bool {
        self.merger.as_ref().is_some_and(|merger| merger.is_retired())
    }
}

impl Channels {
    /// Uses the disks' current limits and plug options.
    pub(crate) fn reload_settings(&mut self) {
        for at in 0..self.open.len() {
            let Some(open) = &mut self.open[at] else { continue };
            open.reload_plug();
            open.reload_limits();
            open.left = true;
            self.mark_busy(at);
        }
        self.throttles = self.open.iter().flatten().filter(|open| open.has_throttle()).count();
        self.left = true;
        self.drop_retired_mergers();
    }

    /// Drops retired mergers that have no requests left.
    fn drop_retired_mergers(&mut self) {
        for open in self.open.iter_mut().flatten() {
            open.merger.take_if(|merger| merger.is_retired() && merger.is_idle());
        }
        self.retired = self.open.iter().flatten().any(|open| open.has_retired_merger());
    }

    /// Prepares a sleep: drops mergers without further use, and returns the leased tokens of idle disks.
    #[inline]
    pub(crate) fn begin_sleep(&mut self) {
        if self.retired {
            self.drop_retired_mergers();
        }
        if self.throttles > 0 {
            self.rest_throttles();
        }
    }
}
