//! Tasks of devices: each on its own thread, because it may wait for storage. Nothing waits for a task without a limit.

use std::collections::btree_map::Entry;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use mqblk_core::thread::spawn_with;
use mqblk_memory::DomainId;
use mqblk_xen::store::Xenstore;
use mqblk_xen::vbd::keys;

use crate::backend::{WatchedDevice, Watcher, watch_token};
use crate::device::{Device, DeviceTask, TaskEnd, TaskResult};
use crate::state_machine::DevicePhase;

/// Interval of attempts to have a device's lock, or its disk, from another user: at first, and at most. It doubles.
const RETRY: Duration = Duration::from_millis(5);
const MAX_RETRY: Duration = Duration::from_secs(1);

impl Watcher {
    /// Runs a device's task on a thread: it may wait for storage. A device has one task at a time. Without a thread a
    /// device that stops is abandoned; all others are retried.
    pub(crate) fn start_task(&mut self, key: (DomainId, u32), device: Device, phase: DevicePhase, task: DeviceTask) {
        let (shared, sender, wakeup) = (Arc::clone(&self.shared), self.result_sender.clone(), self.wakeup.clone());
        let name = format!("vbd-{}-{}", key.0.0, key.1);
        let is_stop = matches!(task, DeviceTask::Stop);
        let work = move |mut device: Device| {
            let ended = match catch_unwind(AssertUnwindSafe(|| device.run_task(&shared, phase, &task))) {
                Ok(end) => TaskResult { key, end, device: Some(device) },
                Err(_) => TaskResult { key, end: TaskEnd::Dropped, device: None },
            };
            // Fails only after the backend has stopped.
            let _ = sender.send(ended);
            wakeup.signal();
        };
        let Err((error, device)) = spawn_with(name, device, work) else { return };
        let Some(watched) = self.devices.get_mut(&key) else { return };
        watched.busy = false;
        if is_stop {
            tracing::warn!(device = %watched.name, "its storage is not closed, and its requests in flight are not waited for: {error}");
            device.into_iter().for_each(|device| device.abandon(&self.shared));
        } else {
            tracing::error!(device = %watched.name, "will retry: {error}");
            watched.device = device;
        }
    }

    /// Handles the result of a device's task.
    pub(crate) fn finish_task(&mut self, store: Option<&mut Xenstore>, ended: TaskResult) {
        let TaskResult { key, end, device } = ended;
        if end != TaskEnd::Waits {
            // It may have released the disk that another device waits for.
            let now = Instant::now();
            let waiting = self.devices.values_mut().filter_map(|watched| watched.retry.as_mut());
            waiting.for_each(|(at, _)| *at = now);
        }
        let Entry::Occupied(mut entry) = self.devices.entry(key) else { return };
        entry.get_mut().busy = false;
        let Some(device) = device else {
            tracing::error!(device = ?key, "a device's thread had panicked: its state is left as it is");
            return;
        };
        let watched = entry.get_mut();
        watched.was_journaled = device.is_journaled(&self.shared);
        watched.retry = match (end, watched.retry) {
            (TaskEnd::Waits, Some((_, interval))) => Some((interval * 2).min(MAX_RETRY)),
            (TaskEnd::Waits, None) => Some(RETRY),
            _ => None,
        }
        .map(|interval| (Instant::now() + interval, interval));
        match end {
            TaskEnd::Phase(phase) => {
                watched.stats = device.stats().filter(|_| phase.has_rings()).cloned();
                (watched.phase, watched.device) = (phase, Some(device));
                return;
            }
            TaskEnd::Waits => {
                watched.device = Some(device);
                return;
            }
            TaskEnd::Dropped => {}
        }
        let watched = entry.remove();
        let Some(store) = store else { return };
        let unwatched = store.unwatch(&format!("{}/{}", watched.frontend_path, keys::STATE), &watch_token(key));
        // It may have been created again meanwhile, for which no further event arrives.
        if let Err(error) = unwatched.and_then(|()| self.add_device(store, key.0, key.1)) {
            tracing::warn!(device = ?key, %error, "xenstore");
        }
    }

    /// Waits without a limit for running tasks, in simulations. Returns their number.
    pub(crate) fn finish_tasks(&mut self, mut store: Option<&mut Xenstore>) -> usize {
        let running = self.devices.values().filter(|watched| watched.busy).count();
        for _ in 0..running {
            let Ok(ended) = self.results.recv() else { break };
            self.finish_task(store.as_deref_mut(), ended);
        }
        running
    }

    /// Stops all devices, each when its task has ended. Those that have not by the [end of the
    /// stop](crate::device::BackendShared::stop_end) are left: the process ends.
    pub(crate) fn stop_devices(&mut self) {
        let end = self.shared.stop_end();
        loop {
            let idle = self.devices.iter_mut().filter(|(_, watched)| !watched.busy && !watched.is_stopped);
            let idle: Vec<_> = idle
                .filter_map(|(key, watched)| {
                    let device = watched.device.take()?;
                    (watched.busy, watched.is_stopped) = (true, true);
                    Some((*key, device, watched.phase))
                })
                .collect();
            for (key, device, phase) in idle {
                self.start_task(key, device, phase, DeviceTask::Stop);
            }
            let busy = || self.devices.values().filter(|watched| watched.busy);
            if busy().next().is_none() {
                return;
            }
            match self.results.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(ended) => self.finish_task(None, ended),
                Err(_) => {
                    for WatchedDevice { name, .. } in busy() {
                        tracing::error!(device = %name, "storage did not answer in time: the device is left as it is");
                    }
                    return;
                }
            }
        }
    }
}
