//! A backend that leaves its devices to another process, and may continue to serve them.
//!
//! It is *paused* first: the watcher checks no device. Then devices *leave*, each on its own thread: their rings drain,
//! and the lock of each ([`crate::device_lock`]) passes to the other process when no request is in flight. A device
//! whose storage does not respond delays no other.

use std::time::{Duration, Instant};

use crate::backend::{Backend, Watcher};
use crate::device::{Device, DeviceTask};
use crate::leave_state::WatchMode;
use crate::name::DeviceName;
use crate::state_machine::DevicePhase;

/// Interval of checks of a wait for the watcher.
const CHECK: Duration = Duration::from_millis(2);
impl Backend {
    fn set_mode(&self, mode: WatchMode) {
        let mut progress = self.shared.leaving.0.lock();
        (progress.mode, progress.is_current) = (mode, false);
        drop(progress);
        self.wakeup.signal();
    }

    /// Waits until the watcher has acted upon the mode and `is_done` is true for the devices that have not left; until
    /// `is_over` at most. Returns the devices that have not left, and true if it is done.
    fn wait_for(&self, is_done: impl Fn(&[DeviceName]) -> bool, is_over: impl Fn() -> bool) -> (Vec<DeviceName>, bool) {
        loop {
            let over = is_over();
            let progress = self.shared.leaving.0.lock();
            let done = progress.is_current && is_done(&progress.remaining);
            if done || over {
                return (progress.remaining.clone(), done);
            }
            drop(progress);
            std::thread::sleep(CHECK);
        }
    }

    /// Pauses: devices are served unchanged. The lock of the device type is released.
    ///
    /// # Errors
    /// When the watcher does not respond in time. Then devices are served further.
    pub fn pause(&self, timeout: Duration) -> Result<(), String> {
        self.set_mode(WatchMode::Paused);
        let end = Instant::now() + timeout;
        if self.wait_for(|_| true, || Instant::now() >= end).1 {
            return Ok(());
        }
        self.serve_on();
        Err(format!("the thread that watches xenstore has not answered within {} s", timeout.as_secs()))
    }

    /// Makes the devices leave whose requests no journal records: they must have drained before another process serves
    /// them.
    ///
    /// # Errors
    /// Returns those that have not by `end`, or when `is_over` is true. They continue to drain.
    pub fn leave_unjournaled(&self, end: Instant, is_over: &dyn Fn() -> bool) -> Result<(), Vec<DeviceName>> {
        self.set_mode(WatchMode::LeavesUnjournaled);
        match self.wait_for(<[_]>::is_empty, || is_over() || Instant::now() >= end) {
            (_, true) => Ok(()),
            (remaining, false) => Err(remaining),
        }
    }

    /// Makes all devices leave. Does not wait for them.
    pub fn leave(&self) {
        self.set_mode(WatchMode::Leaves);
    }

    /// Waits until all devices have left, until `is_over` is true at most. Returns those that have not.
    pub fn wait_left(&self, is_over: &dyn Fn() -> bool) -> Vec<DeviceName> {
        self.wait_for(<[_]>::is_empty, is_over).0
    }

    /// Continues to serve the devices that no other process serves: those that have left are resumed.
    pub fn serve_on(&self) {
        self.set_mode(WatchMode::Serves);
    }
}

impl Watcher {
    /// Makes devices leave by `mode`, and reports those that have not.
    pub(crate) fn leave_devices(&mut self, mode: WatchMode) -> bool {
        let leaves = |device: &Device, shared: &_| match mode {
            WatchMode::Serves | WatchMode::Paused => false,
            WatchMode::LeavesUnjournaled => !device.is_journaled(shared),
            WatchMode::Leaves => true,
        };
        let mut leaving = Vec::new();
        for (key, watched) in &mut self.devices {
            match watched.device.take_if(|device| device.has_storage() && leaves(device, &self.shared)) {
                Some(device) => {
                    watched.busy = true;
                    leaving.push((*key, device, watched.phase));
                }
                // Another process may act on it from now on.
                None if watched.device.as_ref().is_some_and(|device| !device.has_storage()) => {
                    watched.phase = DevicePhase::Discovered;
                }
                None => {}
            }
        }
        for (key, device, phase) in leaving {
            self.start_task(key, device, phase, DeviceTask::Leave);
        }
        let remaining: Vec<DeviceName> = self
            .devices
            .values()
            .filter(|watched| mode != WatchMode::LeavesUnjournaled || !watched.is_journaled(&self.shared))
            .filter(|watched| watched.busy || watched.device.as_ref().is_some_and(Device::has_storage))
            .map(|watched| watched.name.clone())
            .collect();
        let is_waiting = mode != WatchMode::Paused && !remaining.is_empty();
        self.shared.leaving.report(mode, remaining);
        is_waiting
    }
}
