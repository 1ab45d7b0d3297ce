//! Stops of queues by the frontend: with a drain, or with requests in flight that are left to whoever serves the ring
//! next.

use std::time::{Duration, Instant};

use mqblk_core::DiskError;
use mqblk_engine::UringContext;
use mqblk_virtio::VirtioDevice;
use mqblk_virtio::features::ring_format;
use vhost::vhost_user::Result;
use vhost::vhost_user::message::{VhostUserProtocolFeatures, VhostUserVringState};

use super::Session;
use crate::vring::Vring;

/// Time that storage has to answer the requests of queues that stop without a drain: most are not left in flight, and
/// the VMM's pause hardly grows. Counted from the first such queue.
const SUSPEND_GRACE: Duration = Duration::from_millis(50);

/// Protocol features. Source: QEMU's vhost-user.rst, "Protocol features".
const INFLIGHT: u64 = VhostUserProtocolFeatures::GET_VRING_BASE_INFLIGHT.bits();
const SKIP_DRAIN: u64 = 1 << 23;

impl<D: VirtioDevice<UringContext>> Session<D> {
    /// Returns true if the in-flight region has requests of a process before this one, or may have.
    pub(super) fn is_resumed(&self) -> bool {
        self.inflight.as_ref().is_some_and(|region| region.was_used())
    }

    /// Leaves queues to [`start_waiting_queues`](Self::start_waiting_queues): the source of a migration has left
    /// requests in flight, and keeps the disk until its storage has answered them.
    pub(super) fn wait_for_disk(&mut self, error: &DiskError) -> Result<()> {
        if !std::mem::replace(&mut self.disk_wait_logged, true) {
            tracing::warn!(disk = self.options.name, "queues with requests in flight wait for the disk: {error}");
        }
        Ok(())
    }

    /// Returns true if queues were stopped with requests in flight, which the storage has not answered yet.
    pub(crate) fn is_suspended(&self) -> bool {
        self.vrings.iter().any(Vring::is_suspended)
    }

    /// Checks whether the storage has answered what suspended queues have left in flight, and releases the disks then.
    /// Returns true if nothing is left.
    pub(crate) fn end_suspended(&mut self) -> bool {
        if !self.is_suspended() {
            return true;
        }
        let (name, stats, now) = (&self.options.name, &self.stats, Instant::now());
        for vring in self.vrings.iter_mut().filter(|vring| vring.is_suspended()) {
            vring.wait_drained(name, stats, Some(now));
        }
        if self.is_suspended() {
            return false;
        }
        // Logged. The frontend has its answer.
        let _ = self.deactivate_if_stopped();
        true
    }

    /// Returns the protocol features for stops without a drain, if they are offered: the disks keep the next process
    /// from replaying requests that the storage has not answered here. Source: QEMU's vhost-user.rst, GET_VRING_BASE.
    pub(super) fn suspend_features(&self) -> u64 {
        let is_offered = self.device.can_suspend() && self.disks.list().iter().all(|disk| disk.disk.is_passed_on());
        if is_offered { INFLIGHT | SKIP_DRAIN } else { 0 }
    }

    /// Returns true if GET_VRING_BASE does not drain: a frontend that agreed to SKIP_DRAIN, too, has a message for each
    /// way.
    pub(super) fn suspends_always(&self) -> bool {
        self.protocol_features & (INFLIGHT | SKIP_DRAIN) == INFLIGHT
    }

    /// As GET_VRING_BASE, without a wait for storage: the in-flight region has the requests that it has not answered.
    pub(crate) fn get_vring_base_skip_drain(&mut self, index: u32) -> Result<VhostUserVringState> {
        if self.protocol_features & (INFLIGHT | SKIP_DRAIN) != INFLIGHT | SKIP_DRAIN {
            return self.reject_unsupported("GET_VRING_BASE_SKIP_DRAIN");
        }
        self.stop_queue(index, true)
    }

    /// Stops a queue for GET_VRING_BASE. Returns its position.
    pub(super) fn stop_queue(&mut self, index: u32, suspends: bool) -> Result<VhostUserVringState> {
        let queue = self.check_index(index)?;
        if self.vrings[queue].is_startable() && !suspends && self.wait_for_start() {
            // The position is known only after the ring's earlier requests have completed.
            self.start_if_ready(queue)?;
        }
        let suspends = suspends && self.vrings[queue].is_tracked();
        let was_served = !self.vrings[queue].is_stopped();
        self.vrings[queue].begin_drain(&self.options.name, suspends);
        let drain =
            |session: &mut Self, end| session.vrings[queue].wait_drained(&session.options.name, &session.stats, end);
        if suspends {
            let end = *self.suspend_end.get_or_insert_with(|| Instant::now() + SUSPEND_GRACE);
            if !drain(self, Some(end)) {
                self.vrings[queue].suspend(&self.options.name, &self.stats);
            }
        } else if !self.wait_in_message(drain) {
            return self.reject_late(&format!("GET_VRING_BASE: queue {index}"));
        }
        let vring = &mut self.vrings[queue];
        // A stopped ring starts again with the next SET_VRING_KICK.
        vring.kick = None;
        vring.call = None;
        vring.call_event = None;
        let base = vring.base.unwrap_or(ring_format(self.features).first_base());
        if was_served {
            self.device.queue_stopped();
        }
        // A VMM that migrates the guest would start it elsewhere.
        if let Err(error) = self.deactivate_if_stopped() {
            return self.reject(format!("GET_VRING_BASE: queue {index}: {error}"));
        }
        Ok(VhostUserVringState::new(index, base))
    }
}
