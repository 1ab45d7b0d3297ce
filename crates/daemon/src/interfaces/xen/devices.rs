//! The devices of the Xen backend: those of the configuration's disks, and those made by toolstacks.

use std::sync::Arc;
use std::time::Duration;

use mqblk_core::{ByteLen, Resize, Resized, SizeUsers};
use mqblk_engine::{
    Engine, QueueId, QueueMove, QueuePolicy, QueueSettings, QueueStats, SharedQueueSettings, WorkerStats,
};
use mqblk_xen::Xen;
use mqblk_xen_server::toolstack::{self, ToolstackError};
use mqblk_xen_server::{Backend, DeviceStats};

use crate::change::ChangeError;
use crate::interface::{DeviceDescription, DeviceStat, Export, ServedDevice, StatDetail};
use crate::report::DiskInfo;
use crate::resize::{self, GuestNotice, ResizeOutcome};
use crate::storage::StorageConfig;

/// Longest time for a device to handle a resize key in xenstore. Admin clients wait longer.
const RESIZE_TIMEOUT: Duration = Duration::from_secs(30);

/// A handle to the devices that are served, of the configuration and of toolstacks.
#[derive(Clone)]
pub(super) struct XenDevices {
    xen: Arc<dyn Xen>,
    backend: Arc<Backend>,
    engine: Arc<Engine>,
}

impl XenDevices {
    /// Creates a handle to the devices of a backend.
    pub(super) fn new(xen: Arc<dyn Xen>, backend: Arc<Backend>, engine: Arc<Engine>) -> XenDevices {
        XenDevices { xen, backend, engine }
    }

    /// Returns the devices whose disks are open.
    pub(super) fn list(&self) -> Vec<Arc<DeviceStats>> {
        self.backend.devices()
    }

    /// Resizes a device's disk like a toolstack: writes a xenstore key, which the device's own thread handles.
    ///
    /// # Errors
    /// If the disk cannot have that size, or the device does not handle the key in time.
    pub(super) fn resize(&self, device: &DeviceStats, request: Resize) -> Result<ResizeOutcome, ChangeError> {
        let subject = format!("disk {:?}", device.id);
        let failed = |error: ToolstackError| ChangeError::Failed(format!("{subject}: {error}"));
        let Some(disk) = device.disk() else {
            return Err(ChangeError::Failed(format!("{subject}: its storage is being closed")));
        };
        let before = disk.geometry().size;
        // Also checked here, for an error in terms of the request.
        request.check_size(disk.as_ref()).map_err(|error| resize::resize_error(&subject, request, error))?;
        let mut store = self.xen.store().map_err(ToolstackError::from).map_err(failed)?;
        toolstack::resize(&mut store, self.xen.domain(), &device.name, request, RESIZE_TIMEOUT).map_err(failed)?;
        let resized = Resized { before, size: disk.geometry().size };
        let guest = match (resized.is_change(), device.rings()) {
            (false, _) => GuestNotice::Unchanged,
            (true, 0) => GuestNotice::NoGuest,
            (true, _) => GuestNotice::Notified,
        };
        Ok(ResizeOutcome { resized, guest })
    }
}

/// The users of the size of a disk that is not attached: none.
struct NoUsers;

impl SizeUsers for NoUsers {
    fn set_size(&mut self, _: ByteLen) {}

    fn refresh(&mut self) {}
}

/// A served disk of the configuration.
pub(super) struct XenDisk {
    devices: XenDevices,
    info: DiskInfo,
    queues: Arc<SharedQueueSettings>,
    storage: StorageConfig,
}

impl XenDisk {
    /// Creates a disk. `queues`: the settings of its rings, with the worker of each offered one.
    pub(super) fn new(
        devices: XenDevices,
        info: DiskInfo,
        queues: Arc<SharedQueueSettings>,
        storage: StorageConfig,
    ) -> XenDisk {
        XenDisk { devices, info, queues, storage }
    }

    /// Returns the device that the disk is attached as. A previous device may still be in removal: one with rings is
    /// preferred.
    fn device(&self) -> Option<Arc<DeviceStats>> {
        let devices = self.devices.list().into_iter().filter(|device| device.id == self.info.id);
        devices.max_by_key(|device| device.rings() > 0)
    }

    /// Returns the statistics of each ring. Zero while the disk is not attached.
    fn queue_stats(&self, workers: &[WorkerStats]) -> Option<Vec<QueueStats>> {
        match self.device() {
            Some(device) => device.queue_stats(workers),
            None => Some(vec![QueueStats::default(); self.queues.get().map.len()]),
        }
    }
}

impl ServedDevice for XenDisk {
    fn describe(&self) -> DeviceDescription {
        self.info.describe(self.queue_settings().as_ref())
    }

    fn stat(&self, workers: &[WorkerStats], detail: StatDetail) -> Option<DeviceStat> {
        let mut stat = self.info.stat(self.queue_settings(), &self.queue_stats(workers)?, detail);
        stat.grants = Some(self.device().map(|device| device.grant_counters()).unwrap_or_default());
        Some(DeviceStat::Disk(Box::new(stat)))
    }

    fn exports(&self) -> Vec<Export> {
        vec![self.info.export()]
    }

    fn id(&self) -> String {
        self.info.id.clone()
    }

    fn queue_settings(&self) -> Option<QueueSettings> {
        Some(self.queues.get())
    }

    fn set_policy(&self, policy: QueuePolicy) -> Result<(), String> {
        match self.device() {
            Some(device) => device.set_policy(policy).map_err(|error| error.to_string()),
            None => {
                self.queues.set_policy(policy);
                Ok(())
            }
        }
    }

    fn move_queue(&self, queue: u16, worker: usize, timeout: Duration) -> Result<QueueMove, String> {
        match self.device() {
            Some(device) => device.move_ring(&self.devices.engine, queue, worker, timeout),
            None => {
                self.queues.set_worker(queue, worker);
                Ok(QueueMove::AtStart)
            }
        }
    }

    fn attached_queues(&self) -> Vec<(u16, QueueId)> {
        self.device().map(|device| device.attached_rings()).unwrap_or_default()
    }

    fn is_connected(&self) -> bool {
        self.device().is_some_and(|device| device.rings() > 0)
    }

    /// Resizes the disk, attached or not.
    fn resize(&self, _id: &str, request: Resize) -> Result<ResizeOutcome, ChangeError> {
        if let Some(device) = self.device().filter(|device| device.disk().is_some()) {
            return self.devices.resize(&device, request);
        }
        let result = request.carry_out(self.storage.disk.as_ref(), &mut NoUsers);
        let resized =
            result.map_err(|error| resize::resize_error(&format!("disk {:?}", self.info.id), request, error))?;
        Ok(ResizeOutcome {
            resized,
            guest: if resized.is_change() { GuestNotice::NoGuest } else { GuestNotice::Unchanged },
        })
    }
}

/// A device outside the configuration, made by a toolstack.
pub(super) struct ToolstackDevice {
    devices: XenDevices,
    info: DiskInfo,
    device: Arc<DeviceStats>,
}

impl ToolstackDevice {
    /// Creates a handle to a device.
    pub(super) fn new(devices: XenDevices, device: Arc<DeviceStats>, interface: &'static str) -> ToolstackDevice {
        let info = DiskInfo {
            id: device.id.clone(),
            interface,
            storage: device.storage.clone(),
            plug: device.plug,
            health: Arc::clone(&device.health),
            queue_map: Vec::new(),
            disk: device.disk().as_ref().map(Arc::downgrade),
            watch_size: true,
            settings: Vec::new(),
        };
        ToolstackDevice { devices, info, device }
    }
}

impl ServedDevice for ToolstackDevice {
    fn describe(&self) -> DeviceDescription {
        self.info.describe(self.queue_settings().as_ref())
    }

    fn stat(&self, workers: &[WorkerStats], detail: StatDetail) -> Option<DeviceStat> {
        let mut stat = self.info.stat(self.queue_settings(), &self.device.queue_stats(workers)?, detail);
        stat.grants = Some(self.device.grant_counters());
        Some(DeviceStat::Disk(Box::new(stat)))
    }

    fn exports(&self) -> Vec<Export> {
        vec![self.info.export()]
    }

    fn id(&self) -> String {
        self.info.id.clone()
    }

    fn queue_settings(&self) -> Option<QueueSettings> {
        Some(self.device.queue_settings())
    }

    fn set_policy(&self, policy: QueuePolicy) -> Result<(), String> {
        self.device.set_policy(policy).map_err(|error| error.to_string())
    }

    fn move_queue(&self, queue: u16, worker: usize, timeout: Duration) -> Result<QueueMove, String> {
        self.device.move_ring(&self.devices.engine, queue, worker, timeout)
    }

    fn attached_queues(&self) -> Vec<(u16, QueueId)> {
        self.device.attached_rings()
    }

    fn is_connected(&self) -> bool {
        self.device.rings() > 0
    }

    fn resize(&self, _id: &str, request: Resize) -> Result<ResizeOutcome, ChangeError> {
        self.devices.resize(&self.device, request)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use mqblk_admin::model::{DiskStat, GrantCounters};

    #[test]
    fn grant_counters_are_not_mixed_up() {
        let none = serde_json::to_value(DiskStat::default()).unwrap();
        assert!(none.get("grants").is_none());
        let mut grants =
            GrantCounters { copies: 1, copy_calls: 2, maps: 4, mapped_pages: 14, ..GrantCounters::default() };
        grants.add(&GrantCounters {
            events_received: 20,
            stuck_pages: 15,
            over_budget: 13,
            ..GrantCounters::default()
        });
        let reported = serde_json::to_value(grants).unwrap();
        let reported = reported.as_object().unwrap();
        let set = reported.iter().filter(|(_, value)| **value != 0).map(|(key, value)| (key.as_str(), value.as_u64()));
        let want = [
            ("copies", 1),
            ("copy_calls", 2),
            ("maps", 4),
            ("over_budget", 13),
            ("held", 14),
            ("stuck", 15),
            ("events_taken", 20),
        ];
        assert_eq!(set.collect::<BTreeSet<_>>(), want.map(|(key, value)| (key, Some(value))).into());
        assert_eq!(reported.len(), 20);
    }
}
