//! Adds and removes workers while queues are served.

use super::queues::move_queues;
use crate::change::ChangeError;
use crate::exclusive::VerbScope;
use crate::interface::ServedDevice;
use crate::queues::{MAX_QUEUES, QUEUE_MAP};
use crate::saved_changes::{Keeping, SavedWorkers};
use crate::state::DaemonState;

impl DaemonState {
    /// Returns the number of workers.
    pub fn worker_count(&self) -> u16 {
        u16::try_from(self.engine().workers()).unwrap_or(u16::MAX)
    }

    /// Starts one more worker, pinned to `cpu` if given. From now on queues are placed on it or moved to it. Returns
    /// its number.
    ///
    /// # Errors
    /// If the maximum is reached, or the host refuses.
    pub fn add_worker(&self, cpu: Option<u16>, keeping: Keeping) -> Result<u16, ChangeError> {
        let _alone = self.change_alone(VerbScope::Workers, "worker.add")?;
        let number = self.start_worker(cpu)?;
        self.keep_workers(keeping);
        Ok(number)
    }

    /// Ends the last worker, after moving its queues to others. Returns its number.
    ///
    /// # Errors
    /// If it is the only one, a queue cannot move, or it does not respond. Queues that have moved stay there.
    pub fn remove_worker(&self, keeping: Keeping) -> Result<u16, ChangeError> {
        let _alone = self.change_alone(VerbScope::Workers, "worker.remove")?;
        let number = self.end_worker()?;
        self.keep_workers(keeping);
        Ok(number)
    }

    /// Starts or ends workers until there are `count`. `cpus`: the CPUs that they are pinned to.
    ///
    /// # Errors
    /// As [`add_worker`](Self::add_worker) and [`remove_worker`](Self::remove_worker). Earlier changes stay.
    pub(crate) fn set_workers(&self, count: u16, cpus: &[Option<u16>], keeping: Keeping) -> Result<(), ChangeError> {
        let _alone = self.change_alone(VerbScope::Workers, "workers")?;
        let mut changed = Ok(());
        while changed.is_ok() && self.worker_count() != count.clamp(1, MAX_QUEUES) {
            changed = if self.worker_count() < count {
                let cpu = cpus.get(usize::from(self.worker_count())).copied().flatten();
                self.start_worker(cpu).map(drop)
            } else {
                self.end_worker().map(drop)
            };
        }
        self.keep_workers(keeping);
        changed
    }

    fn start_worker(&self, cpu: Option<u16>) -> Result<u16, ChangeError> {
        if self.worker_count() >= MAX_QUEUES {
            return Err(ChangeError::Failed(format!("there are {MAX_QUEUES} workers, as many as there can be")));
        }
        let added = self.engine().add_worker(cpu.map(usize::from));
        let number = added.map_err(|error| ChangeError::Failed(format!("worker: {error}")))? as u16;
        self.placement().set_workers(self.worker_count());
        tracing::info!(worker = number, cpu, "worker added");
        Ok(number)
    }

    fn end_worker(&self) -> Result<u16, ChangeError> {
        let number = self.worker_count() - 1;
        let failed = |why: String| ChangeError::Failed(format!("worker {number}: {why}"));
        if number == 0 {
            return Err(failed("it is the only one".to_owned()));
        }
        let devices = self.devices();
        let uses = |device: &dyn ServedDevice| queues_on(device, number).next().is_some();
        let fixed = |device: &dyn ServedDevice| device.exports().iter().any(|export| export.has_one_channel());
        if let Some(device) = devices.iter().find(|device| uses(device.as_ref()) && fixed(device.as_ref())) {
            let why = "its storage serves one connection at a time, which cannot move: remove the disk first";
            return Err(failed(format!("it serves {:?}; {why}", device.id())));
        }
        // From here on no new queue is placed there.
        self.placement().set_workers(number);
        let left = devices.iter().try_for_each(|device| self.give_away(device.as_ref(), number));
        let removed = left.and_then(|()| {
            let removed = self.engine().remove_last_worker();
            removed.map_err(|error| format!("{error}; try again"))
        });
        if let Err(why) = removed {
            let mut placement = self.placement();
            placement.set_workers(number + 1);
            let rest: Vec<u16> =
                devices.iter().flat_map(|device| queues_on(device.as_ref(), number)).map(|_| number).collect();
            placement.place(&rest);
            return Err(failed(why));
        }
        tracing::info!(worker = number, "worker removed");
        Ok(number)
    }

    /// Moves a device's queues from a worker to the workers with the fewest queues.
    fn give_away(&self, device: &dyn ServedDevice, worker: u16) -> Result<(), String> {
        let id = device.id();
        for queue in queues_on(device, worker).collect::<Vec<u16>>() {
            let to = self.placement().least_loaded();
            move_queues(self, device, &[(queue, to)]).map_err(|why| format!("{id:?}: {why}"))?;
        }
        let is_kept = self.saved().settings.get(&id).is_some_and(|kept| kept.contains_key(QUEUE_MAP.name));
        if is_kept && let Some(target) = self.live_any(&id) {
            // The saved map may name the worker.
            self.keep_live(&target, &[QUEUE_MAP.name.to_owned()], Keeping::Record);
        }
        Ok(())
    }

    /// Records the number of workers, or forgets it.
    fn keep_workers(&self, keeping: Keeping) {
        let cpus = self.engine().cpus().into_iter().map(|cpu| cpu.map(|cpu| cpu as u16));
        let now =
            SavedWorkers { count: self.worker_count(), configured: self.configured_workers(), cpus: cpus.collect() };
        match keeping {
            Keeping::Nothing => return,
            Keeping::Forget => self.saved().workers = None,
            Keeping::Record => self.saved().workers = Some(now),
        }
        self.write_saved();
    }

    /// Restores the number of workers of an earlier daemon, unless the configuration was edited.
    pub(super) fn restore_workers(&self) {
        let Some(kept) = self.saved().workers.clone() else { return };
        if kept.configured != self.configured_workers() {
            tracing::info!("workers: the configuration was edited: {} of the state file are forgotten", kept.count);
            self.saved().workers = None;
        } else if let Err(error) = self.set_workers(kept.count, &kept.cpus, Keeping::Nothing) {
            tracing::error!("{error}; the state file keeps {} workers", kept.count);
        }
    }
}

/// Returns a device's queues on a worker.
fn queues_on(device: &dyn ServedDevice, worker: u16) -> impl Iterator<Item = u16> {
    let map = device.queue_settings().map(|queues| queues.map).unwrap_or_default();
    (0..).zip(map).filter(move |(_, of_queue)| *of_queue == usize::from(worker)).map(|(queue, _)| queue)
}
