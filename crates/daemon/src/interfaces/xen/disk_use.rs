//! The devices that have a disk open, and the one that serves it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use mqblk_core::lock::{RankedMutex, assert_may_wait};
use mqblk_engine::AnyDisk;
use mqblk_xen_server::{ActivationError, DeviceName, DiskUse, Params};

use crate::contract::ContractRecorder;

/// The devices that have one disk open.
#[derive(Debug, Default)]
struct DiskDevices {
    /// In the order of their opening.
    open: Vec<DeviceName>,
    /// The device that has activated it.
    active: Option<DeviceName>,
}

/// The devices of each disk that one device at a time may serve, by the disk's `params`.
#[derive(Clone)]
pub(super) struct DiskUsers(Arc<RankedMutex<BTreeMap<String, DiskDevices>>>);

impl Default for DiskUsers {
    fn default() -> DiskUsers {
        DiskUsers(Arc::new(RankedMutex::leaf(BTreeMap::new())))
    }
}

impl DiskUsers {
    fn other_device(&self, params: &Params, name: &DeviceName) -> Option<DeviceName> {
        let users = self.0.lock();
        users.get(&params.to_string())?.open.iter().find(|other| *other != name).cloned()
    }

    fn open(&self, params: &Params, name: &DeviceName) {
        self.0.lock().entry(params.to_string()).or_default().open.push(name.clone());
    }

    /// Makes this device the one that serves the disk.
    ///
    /// # Errors
    /// The device that serves it.
    fn activate(&self, params: &Params, name: &DeviceName) -> Result<(), DeviceName> {
        let mut users = self.0.lock();
        let devices = users.entry(params.to_string()).or_default();
        match &devices.active {
            Some(other) if other != name => Err(other.clone()),
            _ => {
                devices.active = Some(name.clone());
                Ok(())
            }
        }
    }

    fn deactivate(&self, params: &Params) {
        if let Some(devices) = self.0.lock().get_mut(&params.to_string()) {
            devices.active = None;
        }
    }

    fn close(&self, params: &Params, name: &DeviceName) {
        let mut users = self.0.lock();
        let Some(devices) = users.get_mut(&params.to_string()) else { return };
        if let Some(at) = devices.open.iter().position(|other| other == name) {
            devices.open.remove(at);
        }
        if devices.open.is_empty() {
            users.remove(&params.to_string());
        }
    }
}

/// A device's use of an open disk. Dropping it deactivates and closes the disk.
pub(super) struct UsedDisk {
    users: DiskUsers,
    /// `None`: any number of devices may serve it.
    params: Option<Params>,
    name: DeviceName,
    disk: Arc<AnyDisk>,
    is_active: bool,
    /// True if it stays active after the drop.
    is_left_active: bool,
    /// Forgets a device outside the configuration, if it has no guest.
    of_device: Option<Arc<ContractRecorder>>,
}

impl UsedDisk {
    /// Records that a device has opened a disk. `params`: the name of a disk that one device at a time may serve.
    pub(super) fn open(users: &DiskUsers, params: Option<&Params>, name: &DeviceName, disk: &Arc<AnyDisk>) -> UsedDisk {
        params.iter().for_each(|params| users.open(params, name));
        UsedDisk {
            users: users.clone(),
            params: params.cloned(),
            name: name.clone(),
            disk: Arc::clone(disk),
            is_active: false,
            is_left_active: false,
            of_device: None,
        }
    }

    /// Adds the record of the device, which is forgotten at the drop if it has no guest.
    pub(super) fn of_device(mut self, guests: Arc<ContractRecorder>) -> UsedDisk {
        self.of_device = Some(guests);
        self
    }
}

impl DiskUse for UsedDisk {
    fn other_device(&self) -> Option<DeviceName> {
        self.users.other_device(self.params.as_ref()?, &self.name)
    }

    fn activate(&mut self) -> Result<(), ActivationError> {
        if self.is_active {
            return Ok(());
        }
        if let Some(params) = &self.params {
            let activated = self.users.activate(params, &self.name);
            activated.map_err(|other| ActivationError::InUse(params.in_use_text(&other)))?;
        }
        assert_may_wait("storage");
        match self.disk.activate(Duration::ZERO) {
            Ok(()) => {
                self.is_active = true;
                Ok(())
            }
            Err(error) => {
                self.params.iter().for_each(|params| self.users.deactivate(params));
                let why = error.to_string();
                Err(if error.is_in_use() { ActivationError::InUse(why) } else { ActivationError::Failed(why) })
            }
        }
    }

    fn leave_active(&mut self) {
        self.is_left_active = self.is_active;
    }
}

impl Drop for UsedDisk {
    fn drop(&mut self) {
        if self.is_left_active {
            return;
        }
        if self.is_active
            && let Err(error) = self.disk.deactivate()
        {
            tracing::error!("{error}");
        }
        if let Some(params) = &self.params {
            if self.is_active {
                self.users.deactivate(params);
            }
            self.users.close(params, &self.name);
        }
        self.of_device.iter().for_each(|guests| guests.release());
    }
}
