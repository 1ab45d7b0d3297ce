//! The record of what guests were given, while the daemon runs: a section of the state file.

use std::collections::BTreeMap;
use std::sync::Arc;

use mqblk_core::GuestObserver;
use mqblk_core::lock::{LockRank, RankedMutex};
use serde::{Deserialize, Serialize};

use super::{Contracts, DeviceContract, DiskContract, RawImages, SECTION};
use crate::state_file::{SavedState, StateFile};

/// The kernel's file with the id of its boot (proc_sys_kernel(5)).
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// The section. No guest outlives the host's boot.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedContracts {
    boot: String,
    devices: Contracts,
    /// Of any boot.
    #[serde(default)]
    raw_images: BTreeMap<String, String>,
}

impl SavedContracts {
    /// Reads the section of a state file. Drops an unusable one with a warning: serving has priority over its content.
    pub fn read(saved: &SavedState) -> SavedContracts {
        let section = saved.section::<SavedContracts>(SECTION).unwrap_or_else(|error| {
            tracing::warn!("{error}; the record of what guests were given is dropped");
            SavedContracts::default()
        });
        section.of_this_boot()
    }

    /// Drops everything of another boot of the host.
    fn of_this_boot(self) -> SavedContracts {
        // Read once, before the sandbox: /proc may be inaccessible later.
        let boot = std::fs::read_to_string(BOOT_ID).unwrap_or_default().trim().to_owned();
        let devices = if self.boot == boot { self.devices } else { Contracts::new() };
        SavedContracts { boot, devices, raw_images: self.raw_images }
    }

    /// Returns the devices.
    pub fn devices(&self) -> &Contracts {
        &self.devices
    }

    /// Prefers the section that another daemon hands over: it is newer. A daemon without such records hands over no
    /// boot id.
    pub fn or_handed(self, handed: Option<&SavedContracts>) -> SavedContracts {
        let own = self.of_this_boot();
        match handed {
            Some(handed) if handed.boot == own.boot => handed.clone(),
            _ => own,
        }
    }

    /// Returns the images that were served as raw.
    pub fn raw_images(&self) -> RawImages {
        RawImages::new(self.raw_images.clone())
    }
}

/// A device, as it is or would be given to a guest.
#[derive(Debug)]
struct Known {
    contract: DeviceContract,
    /// True if a guest relies on it.
    has_guest: bool,
}

#[derive(Debug, Default)]
struct Devices {
    known: BTreeMap<String, Known>,
    /// Number of changes of the record.
    changes: u64,
}

/// The record of what guests were given, with its state file, if there is one.
#[derive(Debug)]
pub struct KeptContracts {
    boot: String,
    raw_images: RawImages,
    devices: RankedMutex<Devices>,
    /// The number of the last written change. Locked during a write, so that the newest are written last.
    written: RankedMutex<u64>,
    file: Option<Arc<StateFile>>,
}

impl KeptContracts {
    /// Creates it with the records of an earlier daemon. `raw_images`: those of the storage backends.
    pub fn new(saved: SavedContracts, raw_images: RawImages, file: Option<Arc<StateFile>>) -> KeptContracts {
        let of_saved = |(key, contract)| (key, Known { contract, has_guest: true });
        let known = saved.devices.into_iter().map(of_saved).collect();
        KeptContracts {
            boot: saved.boot,
            raw_images,
            devices: RankedMutex::new(LockRank::KeptChanges, Devices { known, changes: 0 }),
            written: RankedMutex::new(LockRank::SavedSection, 0),
            file,
        }
    }

    /// Returns the records that guests rely on now.
    pub fn saved(&self) -> SavedContracts {
        let devices = self.devices.lock();
        let relied = devices.known.iter().filter(|(_, known)| known.has_guest);
        let devices = relied.map(|(key, known)| (key.clone(), known.contract.clone())).collect();
        SavedContracts { boot: self.boot.clone(), devices, raw_images: self.raw_images.list() }
    }

    /// Records that the device `key` is served, and returns the recorder of its guests. Keeps records of disks that are
    /// not served now.
    pub fn serve(self: &Arc<KeptContracts>, key: String, mut contract: DeviceContract) -> Arc<ContractRecorder> {
        let mut devices = self.devices.lock();
        let before = devices.known.remove(&key).filter(|known| known.contract.interface == contract.interface);
        let has_guest = before.as_ref().is_some_and(|known| known.has_guest);
        for (address, disk) in before.into_iter().flat_map(|known| known.contract.disks) {
            contract.disks.entry(address).or_insert(disk);
        }
        devices.known.insert(key.clone(), Known { contract, has_guest });
        drop(devices);
        Arc::new(ContractRecorder { kept: Arc::clone(self), key })
    }

    /// Changes the device `key`, and writes the record if it has changed.
    fn change(&self, key: &str, change: impl FnOnce(&mut Known)) {
        let changes = {
            let mut devices = self.devices.lock();
            let Some(known) = devices.known.get_mut(key) else { return };
            let before = (known.has_guest, known.contract.clone());
            change(known);
            let is_new_image = known.has_guest && self.raw_images.add(&known.contract);
            let is_same =
                !is_new_image && known.has_guest == before.0 && (!known.has_guest || known.contract == before.1);
            if is_same {
                return;
            }
            devices.changes += 1;
            devices.changes
        };
        let Some(file) = &self.file else { return };
        let mut written = self.written.lock();
        // Another thread may have written this change together with its own.
        if *written < changes {
            *written = self.devices.lock().changes;
            file.set(SECTION, &self.saved());
        }
    }
}

/// Records what the guests of a device are given.
#[derive(Debug)]
pub struct ContractRecorder {
    kept: Arc<KeptContracts>,
    key: String,
}

impl ContractRecorder {
    /// Records that guests see this disk at `address` from now on; `None`: no disk.
    pub fn set_disk(&self, address: &str, disk: Option<DiskContract>) {
        self.kept.change(&self.key, |known| match disk {
            Some(disk) => _ = known.contract.disks.insert(address.to_owned(), disk),
            None => _ = known.contract.disks.remove(address),
        });
    }

    /// Forgets the device, which is no longer served, unless a guest relies on it.
    pub fn release(&self) {
        let mut devices = self.kept.devices.lock();
        if devices.known.get(&self.key).is_some_and(|known| !known.has_guest) {
            devices.known.remove(&self.key);
        }
    }

    /// Forgets the device and what its guest relies on: it is removed.
    pub fn forget(&self) {
        self.left();
        self.kept.devices.lock().known.remove(&self.key);
    }
}

impl GuestObserver for ContractRecorder {
    fn arrived(&self) {
        self.kept.change(&self.key, |known| known.has_guest = true);
    }

    fn left(&self) {
        self.kept.change(&self.key, |known| known.has_guest = false);
    }
}
