//! A session's queues as threads other than its control thread use them.

use std::time::{Duration, Instant};

use mqblk_core::{ACTIVATION_TIMEOUT, DiskSlot};
use mqblk_engine::{
    AttachError, ClosingDisk, QueueDisk, QueueMove, QueuePolicy, QueueSettings, UringContext, WorkerError,
};
use mqblk_virtio::VirtioDevice;

use super::Session;
use crate::disks::SessionQueues;
use crate::vring::{StartParams, Vring};

impl<D: VirtioDevice<UringContext>> Session<D> {
    /// Returns the queues, and the common parameters of those that start on `worker`.
    pub(super) fn start_params(&mut self, worker: usize) -> (&mut [Vring<D::Queue>], StartParams<'_, D>) {
        let QueueSettings { policy, .. } = self.disks.queues().get();
        let start = StartParams {
            device: &self.device,
            engine: &self.options.engine,
            disks: self.disks.list(),
            name: &self.options.name,
            memory: &self.memory,
            inflight: self.inflight.as_ref(),
            features: self.features,
            policy,
            fixed_buffers: self.options.fixed_buffers,
            worker,
            stats: &self.stats,
            logging: &self.logging,
        };
        (&mut self.vrings, start)
    }
}

impl<D: VirtioDevice<UringContext>> SessionQueues for Session<D> {
    fn open_disk(&mut self, disk: &QueueDisk) -> std::result::Result<(), AttachError> {
        self.active.add(disk, ACTIVATION_TIMEOUT)?;
        self.request_queues().try_for_each(|queue| queue.open_disk(disk.clone()))
    }

    fn begin_close_disk(&mut self, slot: DiskSlot) -> Vec<ClosingDisk> {
        // A worker that has ended has nothing in flight.
        self.request_queues().filter_map(|queue| queue.begin_close_disk(slot).ok()).collect()
    }

    fn end_close_disk(&mut self, slot: DiskSlot) {
        self.active.remove(slot);
    }

    fn refresh_disk(&mut self, slot: DiskSlot) {
        for queue in self.request_queues() {
            let _ = queue.refresh_disk(slot);
        }
    }

    fn move_queue(&mut self, queue: u16, worker: usize, timeout: Duration) -> std::result::Result<QueueMove, String> {
        match self.vrings.get_mut(usize::from(queue)) {
            Some(vring) => vring.move_to(&self.options.engine, worker, timeout, &self.stats),
            None => Err(format!("queue {queue}: found a number past the device's last queue")),
        }
    }

    fn set_policy(&mut self, policy: QueuePolicy) -> std::result::Result<(), WorkerError> {
        self.request_queues().try_for_each(|queue| queue.set_policy(policy))
    }

    fn begin_drain(&mut self) {
        self.sharing = None;
        self.state_transfer.cancel();
        self.vrings.iter_mut().for_each(|vring| vring.begin_drain(&self.options.name, true));
    }

    fn begin_end(&mut self) {
        self.begin_drain();
        self.vrings.iter().for_each(|vring| vring.pass_throttled(&self.options.name));
    }

    fn wait_drained(&mut self, end: Option<Instant>) -> bool {
        let (name, stats) = (&self.options.name, &self.stats);
        // No short circuit: every queue that can finish its drain does.
        let drained =
            self.vrings.iter_mut().map(|vring| vring.wait_drained(name, stats, end)).fold(true, |all, one| all & one);
        // Logged. No caller could act on the result.
        let _ = self.deactivate_if_stopped();
        drained
    }

    fn freeze_recorded(&mut self) -> std::result::Result<(), String> {
        if self.inflight.is_none() {
            return Err("requests are in flight, and its VMM keeps no in-flight region".to_owned());
        }
        self.freeze();
        Ok(())
    }

    fn save_drained(&mut self) -> std::result::Result<String, String> {
        self.drained_state()
    }

    fn resume(&mut self) -> bool {
        self.resume_queues()
    }

    fn freeze(&mut self) {
        let tracked = self.inflight.is_some();
        for vring in &mut self.vrings {
            if vring.freeze() {
                self.is_frozen = true;
                self.active.leave_active();
                let what = match tracked {
                    true => "its requests in flight are left to whoever serves the queue next",
                    false => "its requests in flight are lost: the VMM keeps no in-flight region",
                };
                tracing::warn!(disk = self.options.name, queue = vring.index, "storage did not answer in time: {what}");
            }
        }
    }
}
